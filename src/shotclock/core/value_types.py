"""Records: classes with typed fields, slots, an `__init__` and a repr.

They replace `dataclasses`, whose import and method generation double the CPU time of `shotclock exec` (8 ms to 18 ms).
`__init__` is compiled when the first object of a class is made: most programs use few of the classes.

Contract (AGENTS.md): records, not dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")
JsonObject = dict[str, Any]
_ABSENT: Any = object()


class _Field:
    def __init__(
        self,
        *,
        default: object = _ABSENT,
        default_factory: Callable[[], object] | None = None,
        init: bool = True,
        compare: bool = True,
    ) -> None:
        self.default, self.factory, self.init, self.compare = default, default_factory, init, compare


def field(**options: Any) -> Any:
    """Declare a field: its `default` or `default_factory`, and whether `init` takes it and `compare` regards it."""
    return _Field(**options)


@dataclass_transform(field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a mutable class with slots, equality by fields and a repr. Fields are not inherited."""
    return _build(cls, frozen=False)


@dataclass_transform(field_specifiers=(field,), frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make a frozen, hashable record."""
    return _build(cls, frozen=True)


@overload
def entity(cls: type[T], /) -> type[T]: ...
@overload
def entity(*, frozen: bool) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(field_specifiers=(field,), eq_default=False)
def entity(cls: type[T] | None = None, /, *, frozen: bool = False) -> Any:
    """Make a record that is equal only to itself and can be referenced weakly."""
    if cls is None:
        return lambda cls: _build(cls, frozen=frozen, by_identity=True)
    return _build(cls, frozen=frozen, by_identity=True)


def fields_of(kind: object) -> tuple[str, ...]:
    """Return the names of the parameters of a record's `__init__`, in order."""
    names: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
    return names


def as_dict(of: object) -> dict[str, Any]:
    return {name: getattr(of, name) for name in fields_of(of)}


def replace(original: T, /, **changes: Any) -> T:
    """Return a copy of a record with some fields replaced."""
    return type(original)(**{**as_dict(original), **changes})


def _build(cls: type[T], *, frozen: bool, by_identity: bool = False) -> type[T]:
    body = {name: item for name, item in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    fields: dict[str, _Field] = {}
    for name in cls.__annotations__:
        default = body.pop(name, _ABSENT)
        fields[name] = default if isinstance(default, _Field) else _Field(default=default)
    body["__slots__"] = (*fields, "__weakref__") if by_identity else tuple(fields)
    body["__match_args__"] = tuple(name for name, each in fields.items() if each.init)
    body["__qualname__"] = cls.__qualname__
    body.setdefault("__repr__", _repr)
    if not by_identity and "__eq__" not in body:
        compared = tuple(name for name, each in fields.items() if each.compare)
        body |= _equality(compared, is_hashable=frozen)
    if frozen:
        body["__setattr__"] = body["__delattr__"] = _refuse
        body.setdefault("__reduce__", lambda self: (type(self), tuple(as_dict(self).values())))
    metaclass: Any = type(cls)
    rebuilt: type[T] = metaclass(cls.__name__, cls.__bases__, body)
    if "__init__" not in body:

        def __init__(self: Any, *arguments: Any, **named: Any) -> None:
            # Two threads may both compile it, with the same result.
            made: Any = rebuilt
            made.__init__ = _compile_initialiser(made, fields, frozen)
            made.__init__(self, *arguments, **named)

        rebuilt.__init__ = __init__  # type: ignore[method-assign]
    return rebuilt


def _equality(compared: tuple[str, ...], *, is_hashable: bool) -> dict[str, Any]:
    def values(of: object) -> list[object]:
        return [getattr(of, name) for name in compared]

    def __eq__(self: object, other: object) -> bool:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return {"__eq__": __eq__, "__hash__": (lambda self: hash((type(self), *values(self)))) if is_hashable else None}


def _compile_initialiser(cls: Any, fields: dict[str, _Field], frozen: bool) -> Any:
    names: dict[str, Any] = {"_absent": _ABSENT}
    parameters, lines = [], []
    for name, each in fields.items():
        source, default = name, ""
        if each.factory is not None:
            names[f"_make_{name}"] = each.factory
            source = f"_make_{name}() if {name} is _absent else {name}" if each.init else f"_make_{name}()"
            default = "=_absent"
        elif each.default is not _ABSENT:
            names[f"_default_{name}"] = each.default
            source = name if each.init else f"_default_{name}"
            default = f"=_default_{name}"
        elif not each.init:
            continue  # __post_init__ sets it
        if each.init:
            parameters.append(name + default)
        if frozen:
            names[f"_set_{name}"] = getattr(cls, name).__set__
            lines.append(f" _set_{name}(self, {source})")
        else:
            lines.append(f" self.{name} = {source}")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    exec(f"def __init__(self, {', '.join(parameters)}):\n" + ("\n".join(lines) or " pass"), names)
    return names["__init__"]


def _repr(self: object) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={item!r}' for name, item in as_dict(self).items())})"


def _refuse(self: object, name: str, *_: object) -> None:
    raise AttributeError(f"{type(self).__name__}.{name} cannot be set: the object is frozen; use replace()")
