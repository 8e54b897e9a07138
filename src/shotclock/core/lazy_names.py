"""Import of single modules of a large package."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec


def import_lazily(package: str) -> None:
    """Make modules of a package importable without its `__init__`, which runs when a name of the package is first used.

    For the MCP SDK: it saves 60 to 110 ms.
    """
    if package in sys.modules:
        return
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
