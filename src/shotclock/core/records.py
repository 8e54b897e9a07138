"""Plain value types for the modules that every start of the command line pays for.

`dataclasses` imports `inspect` and compiles half a dozen methods per class: as much time again as starting
Python itself. A `@record` reads the same to people and type checkers, has slots, and costs a tenth. Modules
that are loaded by nothing that has to start quickly use `dataclasses` as usual.
"""

from __future__ import annotations

from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar, dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_):
        return lambda decorator: decorator


class _Made:
    """A default that is made anew for each record."""

    __slots__ = ("factory",)

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory


def made(*, factory: Callable[[], Any]) -> Any:
    return _Made(factory)


@dataclass_transform(field_specifiers=(made,), frozen_default=False)
def record(cls: type[T]) -> type[T]:
    """A class with slots, an `__init__` over its annotations, equality and a repr."""
    return _build(cls, frozen=False)


@dataclass_transform(field_specifiers=(made,), frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """A record that cannot be changed, and can be a key."""
    return _build(cls, frozen=True)


def fields_of(kind: Any) -> tuple[str, ...]:
    """The names of a record's fields, in order."""
    names: tuple[str, ...] = kind.__slots__
    return names


def as_dict(of: Any) -> dict[str, Any]:
    return {name: getattr(of, name) for name in fields_of(of)}


def changed(original: T, **fields: Any) -> T:
    """A copy with some fields replaced."""
    return type(original)(**{**as_dict(original), **fields})


def _build(cls: type[T], *, frozen: bool) -> type[T]:
    names = tuple(cls.__annotations__)
    body = {name: item for name, item in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    defaults = {name: body.pop(name) for name in names if name in body}
    body["__slots__"] = names
    body["__match_args__"] = names
    body["__init__"] = _initialiser(names, defaults, frozen)
    body.setdefault("__repr__", _repr)
    body.setdefault("__eq__", _eq)
    body["__hash__"] = _hash if frozen else None
    if frozen:
        body["__setattr__"] = body["__delattr__"] = _refuse
        body["__reduce__"] = lambda self: (type(self), tuple(getattr(self, name) for name in names))
    rebuilt: Any = type(cls)
    return rebuilt(cls.__name__, cls.__bases__, body)  # type: ignore[no-any-return]


def _initialiser(names: tuple[str, ...], defaults: dict[str, Any], frozen: bool) -> Any:
    known: dict[str, Any] = {"_set": object.__setattr__}
    parameters, lines = [], []
    for name in names:
        source = name
        if name in defaults:
            known[f"_default_{name}"] = defaults[name]
            parameters.append(f"{name}=_default_{name}")
            if isinstance(defaults[name], _Made):
                known[f"_make_{name}"] = defaults[name].factory
                source = f"_make_{name}() if {name} is _default_{name} else {name}"
        else:
            parameters.append(name)
        lines.append(f" _set(self, {name!r}, {source})" if frozen else f" self.{name} = {source}")
    exec(f"def __init__(self, {', '.join(parameters)}):\n" + ("\n".join(lines) or " pass"), known)
    return known["__init__"]


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in fields_of(self))})"


def _eq(self: Any, other: object) -> bool:
    return bool(as_dict(self) == as_dict(other)) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), *as_dict(self).values()))


def _refuse(self: Any, name: str, *rest: object) -> None:
    raise AttributeError(f"{type(self).__name__} cannot be changed; make a new one with changed()")
