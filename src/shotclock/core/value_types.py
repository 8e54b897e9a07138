"""Plain value types for the modules that every start of the command line pays for.

`dataclasses` imports `inspect` and compiles half a dozen methods per class: as much time again as starting
Python itself. A `@record` reads the same to people and type checkers, has slots, and costs a tenth. Other modules
use the `dataclass` of this one: to the functions of `dataclasses` its classes are dataclasses. Either way only
`__init__` is compiled, and that once several objects of a class are made: to compile one takes as long as a hundred
objects, and most programs make none, or one, of most classes. Regular expressions are compiled when they are first
used, for the same reason.

docs/design.md: R24.
"""

from __future__ import annotations

from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from dataclasses import dataclass as dataclass
    from typing import Any, TypeVar, dataclass_transform
    from typing import NamedTuple as NamedTuple
    from typing import TypedDict as TypedDict

    T = TypeVar("T")
else:

    def dataclass_transform(**_):
        return lambda decorator: decorator


if not TYPE_CHECKING:
    # Those of `typing` compile a method for each class, and each annotation that is text, at every start.

    class NamedTuple(tuple):
        """Base of tuples whose items have names. They are made by position alone; the last may have defaults."""

        __slots__ = ()

        def __init_subclass__(cls):
            # What collections.namedtuple uses: private, and the price of the start-up ratios in design R24.
            from _collections import _tuplegetter

            names = tuple(cls.__annotations__)
            cls._defaults = tuple(vars(cls)[name] for name in names if name in vars(cls))
            cls._fields = cls.__match_args__ = names
            for position, name in enumerate(names):
                setattr(cls, name, _tuplegetter(position, ""))

        def __new__(cls, *items):
            missing = len(cls._fields) - len(items)
            if missing:
                if not 0 < missing <= len(cls._defaults):
                    raise TypeError(f"{cls.__name__} takes {', '.join(cls._fields)}, and was given {len(items)} items")
                items += cls._defaults[-missing:]
            return tuple.__new__(cls, items)

        def __getnewargs__(self):
            return tuple(self)

        def __repr__(self):
            items = (f"{name}={item!r}" for name, item in zip(self._fields, self, strict=True))
            return f"{type(self).__name__}({', '.join(items)})"

    class TypedDict:
        """Base of classes that only say which keys a dict may have."""

        def __init_subclass__(cls, total=True):
            pass


class _Made:
    """A default that is made anew for each record."""

    __slots__ = ("factory",)

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory


def default_factory(*, factory: Callable[[], Any]) -> Any:
    return _Made(factory)


@dataclass_transform(field_specifiers=(default_factory,), frozen_default=False)
def record(cls: type[T]) -> type[T]:
    """Make a class with slots, an `__init__` over its annotations, equality and a repr."""
    return _build(cls, frozen=False)


@dataclass_transform(field_specifiers=(default_factory,), frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make a record that cannot be changed, and can be a key."""
    return _build(cls, frozen=True)


def fields_of(kind: Any) -> tuple[str, ...]:
    """Return the names of a record's fields, in order."""
    names: tuple[str, ...] = kind.__slots__
    return names


def as_dict(of: Any) -> dict[str, Any]:
    return {name: getattr(of, name) for name in fields_of(of)}


def replace_fields(original: T, **fields: Any) -> T:
    """Return a copy with some fields replaced."""
    return type(original)(**{**as_dict(original), **fields})


def _build(cls: type[T], *, frozen: bool) -> type[T]:
    names = tuple(cls.__annotations__)
    body = {name: item for name, item in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    defaults = {name: body.pop(name) for name in names if name in body}
    body["__slots__"] = names
    body["__match_args__"] = names
    body.setdefault("__repr__", _repr)
    body.setdefault("__eq__", _eq)
    body["__hash__"] = _hash if frozen else None
    if frozen:
        body["__setattr__"] = body["__delattr__"] = _refuse
        body["__reduce__"] = lambda self: (type(self), tuple(getattr(self, name) for name in names))
    metaclass: Any = type(cls)
    rebuilt: type[T] = metaclass(cls.__name__, cls.__bases__, body)
    spec = {}
    for name in names:
        default = defaults.get(name, _ABSENT)
        is_made = isinstance(default, _Made)
        spec[name] = (True, _ABSENT if is_made else default, default.factory if is_made else None)
    _give_initialiser(rebuilt, spec, frozen, has_more="__post_init__" in body)
    return rebuilt


_ABSENT: Any = object()
# Objects of a class that are made before its `__init__` is compiled.
MADE_UNCOMPILED = 20
_COMPILE: dict[type, Callable[[], Any]] = {}


def compile_initialisers(*classes: type) -> None:
    """Compile `__init__` of these classes now, or of all that there are: once before a fork, instead of once in each
    child. Two threads may both compile one, which is the same."""
    for cls in classes or list(_COMPILE):
        if (compile := _COMPILE.get(cls)) is not None:  # otherwise it has its own by now
            cls.__init__ = compile()  # type: ignore[misc]
            _COMPILE.pop(cls, None)


def _give_initialiser(cls: Any, spec: dict[str, Any], frozen: bool, *, has_more: bool) -> None:
    """Give a class an `__init__`. `spec` says of each field whether it is a parameter, its default and its factory;
    `has_more`: `__post_init__` follows."""
    parameters = [name for name, (is_parameter, _, _) in spec.items() if is_parameter]
    put, left = object.__setattr__ if frozen else setattr, MADE_UNCOMPILED

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        nonlocal left
        left -= 1
        given = dict(zip(parameters, arguments, strict=False))
        fits = len(arguments) <= len(parameters) and not given.keys() & named and named.keys() <= spec.keys()
        given.update(named)
        for name, (is_parameter, default, factory) in spec.items():
            if name in given:
                fits = fits and is_parameter
            elif factory is not None:
                given[name] = factory()
            elif default is not _ABSENT:
                given[name] = default
            elif is_parameter:
                fits = False
        if left < 0 or not fits:  # what does not fit raises what Python raises
            compile_initialisers(cls)
            cls.__init__(self, *arguments, **named)
            return
        for name, item in given.items():
            put(self, name, item)
        if has_more:
            self.__post_init__()

    _COMPILE[cls] = lambda: _compile_initialiser(cls, spec, frozen, has_more)
    cls.__init__ = __init__


def _compile_initialiser(cls: Any, spec: dict[str, Any], frozen: bool, has_more: bool) -> Any:
    known: dict[str, Any] = {"_set": object.__setattr__, "_absent": _ABSENT}
    parameters, lines = [], []
    for name, (is_parameter, default, factory) in spec.items():
        source = name
        if factory is not None:
            known[f"_make_{name}"] = factory
            source = f"_make_{name}() if {name} is _absent else {name}" if is_parameter else f"_make_{name}()"
        elif default is not _ABSENT:
            known[f"_default_{name}"] = default
            source = name if is_parameter else f"_default_{name}"
        elif not is_parameter:
            continue
        if is_parameter:
            written = "_absent" if factory is not None else f"_default_{name}" if f"_default_{name}" in known else ""
            parameters.append(f"{name}={written}" if written else name)
        line = f" self.{name} = {source}"
        if frozen:
            line = f" _set(self, {name!r}, {source})"
            if name in getattr(cls, "__slots__", ()):  # its descriptor takes less than half as long
                known[f"_set_{name}"] = getattr(cls, name).__set__
                line = f" _set_{name}(self, {source})"
        lines.append(line)
    if has_more:
        lines.append(" self.__post_init__()")
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


if not TYPE_CHECKING:

    def dataclass(cls=None, /, **options):
        """Make a class with annotations a dataclass, as `dataclasses.dataclass` does. Classes inherit no fields."""
        if cls is None:
            return lambda cls: _dataclass(cls, **options)
        return _dataclass(cls, **options)


def _dataclass(
    cls: Any,
    *,
    frozen: bool = False,
    slots: bool = False,
    eq: bool = True,
    order: bool = False,
    weakref_slot: bool = False,
) -> Any:
    import dataclasses
    from operator import attrgetter

    fields: dict[str, Any] = {}
    body = {name: item for name, item in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    for name, kind in cls.__annotations__.items():
        written = body.pop(name, dataclasses.MISSING)
        is_declared = isinstance(written, dataclasses.Field)
        field: Any = written if is_declared else dataclasses.field(default=written)
        # What dataclasses.fields() and replace() look for: private, and the price of the start-up ratios in design R24.
        field.name, field.type, field._field_type = name, kind, dataclasses._FIELD  # type: ignore[attr-defined]
        field.kw_only = False
        fields[name] = field
        if not slots and field.default is not dataclasses.MISSING:
            body[name] = field.default
    names = tuple(fields)
    read = attrgetter(*names) if names else lambda self: ()
    values = read if len(names) != 1 else lambda self: (read(self),)
    made = {
        "__dataclass_fields__": fields,
        "__match_args__": tuple(name for name in names if fields[name].init),
        "__repr__": _dataclass_repr,
    }
    if eq:
        made["__eq__"] = lambda self, other: (
            values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented
        )
        made["__hash__"] = (lambda self: hash(values(self))) if frozen else None
    if order:
        made |= _comparisons(values)
    if frozen:
        made["__setattr__"] = made["__delattr__"] = _dataclass_refuse
        if slots:  # or copies and pickles would try to set what cannot be set
            made["__getstate__"] = lambda self: list(values(self))
            made["__setstate__"] = lambda self, state: _set_state(self, names, state)
    for name, item in made.items():
        if name not in body or (name == "__hash__" and body[name] is None):
            body[name] = item
    if slots:
        body["__slots__"] = (*names, "__weakref__") if weakref_slot else names
    rebuilt = type(cls)(cls.__name__, cls.__bases__, body)
    rebuilt.__qualname__ = cls.__qualname__
    if "__init__" not in body:
        spec = {
            name: (
                field.init,
                _ABSENT if field.default is dataclasses.MISSING else field.default,
                None if field.default_factory is dataclasses.MISSING else field.default_factory,
            )
            for name, field in fields.items()
        }
        _give_initialiser(rebuilt, spec, frozen, has_more="__post_init__" in body)
    return rebuilt


def _set_state(self: Any, names: tuple[str, ...], state: list[object]) -> None:
    for name, item in zip(names, state, strict=True):
        object.__setattr__(self, name, item)


def _dataclass_repr(self: Any) -> str:
    names = [field.name for field in self.__dataclass_fields__.values() if field.repr]
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def _dataclass_refuse(self: Any, name: str, *rest: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _comparisons(values: Callable[[Any], tuple[object, ...]]) -> dict[str, Any]:
    import operator

    def comparing(compare: Callable[[Any, Any], bool]) -> Any:
        return lambda self, other: (
            compare(values(self), values(other)) if other.__class__ is self.__class__ else NotImplemented
        )

    return {f"__{name}__": comparing(getattr(operator, name)) for name in ("lt", "le", "gt", "ge")}


class _LazyPattern:
    def __init__(self, text: str, flags: int) -> None:
        self.pattern, self._flags = text, flags

    def __getattr__(self, name: str) -> object:
        import re

        found: object = getattr(re.compile(self.pattern, self._flags), name)  # compiled once: `re` keeps it
        self.__dict__[name] = found
        return found


def lazy_pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Return what has the methods of a compiled pattern. It is none to the functions of `re` itself."""
    return _LazyPattern(text, flags)  # type: ignore[return-value]
