"""Names of a package that are imported when they are first used, of our packages and of others'.

For packages of which most programs need one or two modules. Type checkers are told where the names live by the package
itself, below TYPE_CHECKING. Every start of the program comes by here, so this imports nothing itself.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def names_of(
    package: str, modules: Mapping[str, str], before: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Return the package's `__getattr__`: `modules` says in which of its modules a name lives, `before` which module
    has to be imported before one of these."""

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        with UncollectedImports():
            if before is not None and modules[name] in before:
                import_module(f"{package}.{before[modules[name]]}")
            value = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


class UncollectedImports:
    """Imports that are not looked through for garbage, meanwhile or right afterwards: what is imported stays, and that
    takes a tenth of the import."""

    def __enter__(self) -> None:
        import gc

        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        import gc

        if self._collects:
            if not gc.get_freeze_count():  # together these make everything old, without looking at it
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def import_lazily(package: str) -> None:
    """Let single modules of a package be imported without all that its `__init__` imports. That is run when somebody
    looks for a name of the package itself. Where the package is imported already, nothing happens."""
    if package in sys.modules:
        return
    from importlib.util import find_spec, module_from_spec

    spec = find_spec(package)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    module, loader = module_from_spec(spec), spec.loader

    def find(name: str) -> object:
        if vars(module).pop("__getattr__", None) is not None:
            loader.exec_module(module)
        return getattr(module, name)

    vars(module)["__getattr__"] = find
    sys.modules[package] = module
    parent, _, last = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
