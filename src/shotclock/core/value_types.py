"""Plain value types for the modules that every start of the command line pays for.

`dataclasses` imports `inspect` and compiles half a dozen methods per class: as much time again as starting
Python itself. A `@record` reads the same to people and type checkers, has slots, and costs a tenth. Other modules
use `dataclass`, `field` and `replace` of this one: to the functions of `dataclasses` its classes are dataclasses, and
that module is first imported when one of them is asked about such a class. Either way only
`__init__` is compiled, and that once several objects of a class are made: to compile one takes as long as a hundred
objects, and most programs make none, or one, of most classes. Regular expressions are compiled when they are first
used, and `inspect` is asked where it has to be, for the same reason.

docs/design.md: R24.
"""

from __future__ import annotations

import types
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
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
        """Base of tuples whose items have names; the last may have defaults."""

        __slots__ = ()

        def __init_subclass__(cls):
            # What collections.namedtuple uses: private, and the price of the start-up ratios in design R24.
            from _collections import _tuplegetter

            names = tuple(cls.__annotations__)
            cls._defaults = tuple(vars(cls)[name] for name in names if name in vars(cls))
            cls._fields = cls.__match_args__ = names
            for position, name in enumerate(names):
                setattr(cls, name, _tuplegetter(position, ""))

        def __new__(cls, *items, **named):
            if named or len(items) != len(cls._fields):
                items = cls._complete(items, named)
            return tuple.__new__(cls, items)

        @classmethod
        def _complete(cls, items, named):
            defaults = dict(zip(cls._fields[len(cls._fields) - len(cls._defaults) :], cls._defaults, strict=True))
            given = dict(zip(cls._fields, items, strict=False))
            found = {**defaults, **given, **named}
            if len(items) > len(cls._fields) or given.keys() & named.keys() or found.keys() != set(cls._fields):
                raise TypeError(f"{cls.__name__} takes {', '.join(cls._fields)}, and was given {(*items, *named)}")
            return tuple(found[name] for name in cls._fields)

        def _replace(self, /, **named):
            return type(self)(**{**self._asdict(), **named})

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

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
    """Return the names of the fields that a record or a dataclass is made of, in order."""
    names: tuple[str, ...] = kind.__match_args__
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


class _Field:
    """What `field` was told about one field of a dataclass."""

    __slots__ = ("compare", "default", "default_factory", "init")

    def __init__(self, default: Any, default_factory: Callable[[], Any] | None, init: bool, compare: bool) -> None:
        self.default, self.default_factory, self.init, self.compare = default, default_factory, init, compare


if not TYPE_CHECKING:

    def dataclass(cls=None, /, **options):
        """Make a class with annotations a dataclass, as `dataclasses.dataclass` does. Classes inherit no fields."""
        if cls is None:
            return lambda cls: _dataclass(cls, **options)
        return _dataclass(cls, **options)

    def field(*, default=_ABSENT, default_factory=None, init=True, compare=True):
        """Declare a field of a dataclass, as `dataclasses.field` does."""
        return _Field(default, default_factory, init, compare)

    def replace(original, /, **changes):
        """Return a copy of a dataclass with some fields replaced. What no parameter sets is made anew."""
        return type(original)(**{**as_dict(original), **changes})


class _DataclassFields:
    """Make `__dataclass_fields__` of a class when the functions of `dataclasses` first look for it."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, tuple[object, _Field]]) -> None:
        self._fields = fields

    def __get__(self, instance: object, cls: type) -> dict[str, Any]:
        import dataclasses

        found: dict[str, Any] = {}
        for name, (kind, told) in self._fields.items():
            default = dataclasses.MISSING if told.default is _ABSENT else told.default
            make = told.default_factory
            made: Any = (
                dataclasses.field(default=default, init=told.init, compare=told.compare)
                if make is None
                else dataclasses.field(default_factory=make, init=told.init, compare=told.compare)
            )
            # What fields() and replace() look for: private, and the price of the start-up ratios in design R24.
            made.name, made.type, made._field_type = name, kind, dataclasses._FIELD  # type: ignore[attr-defined]
            made.kw_only = False
            found[name] = made
        owner = next(each for each in cls.__mro__ if vars(each).get("__dataclass_fields__") is self)
        owner.__dataclass_fields__ = found  # type: ignore[attr-defined]
        return found


def _dataclass(
    cls: Any,
    *,
    frozen: bool = False,
    slots: bool = False,
    eq: bool = True,
    order: bool = False,
    weakref_slot: bool = False,
) -> Any:
    from operator import attrgetter

    fields: dict[str, _Field] = {}
    body = {name: item for name, item in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    for name in cls.__annotations__:
        written = body.pop(name, _ABSENT)
        fields[name] = told = written if isinstance(written, _Field) else _Field(written, None, True, True)
        if not slots and told.default is not _ABSENT:
            body[name] = told.default
    names = tuple(fields)
    values = _reader(attrgetter, names)
    compared = tuple(name for name in names if fields[name].compare)
    compared_values = values if compared == names else _reader(attrgetter, compared)
    made = {
        "__dataclass_fields__": _DataclassFields({name: (cls.__annotations__[name], fields[name]) for name in names}),
        "__match_args__": tuple(name for name in names if fields[name].init),
        "__repr__": _dataclass_repr,
    }
    if eq:
        made["__eq__"] = lambda self, other: (
            compared_values(self) == compared_values(other) if other.__class__ is self.__class__ else NotImplemented
        )
        made["__hash__"] = (lambda self: hash(compared_values(self))) if frozen else None
    if order:
        made |= _comparisons(compared_values)
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
        spec = {name: (told.init, told.default, told.default_factory) for name, told in fields.items()}
        _give_initialiser(rebuilt, spec, frozen, has_more="__post_init__" in body)
    return rebuilt


def _reader(attrgetter: Callable[..., Any], names: tuple[str, ...]) -> Callable[[Any], tuple[object, ...]]:
    """Return what reads the values of these fields as a tuple."""
    read = attrgetter(*names) if names else lambda self: ()
    return read if len(names) != 1 else lambda self: (read(self),)


def _set_state(self: Any, names: tuple[str, ...], state: list[object]) -> None:
    for name, item in zip(names, state, strict=True):
        object.__setattr__(self, name, item)


def _dataclass_repr(self: Any) -> str:
    names = type(self).__annotations__
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


def is_coroutine_function(function: object) -> bool:
    """Say whether a call of it gives a coroutine: what `inspect` says, without importing it for a plain function or
    method."""
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    if isinstance(plain, types.FunctionType) and vars(plain).keys() <= {"__wrapped__"}:
        return bool(plain.__code__.co_flags & _IS_COROUTINE)
    import inspect

    return inspect.iscoroutinefunction(function)


_IS_COROUTINE = 0x80  # of a code's flags, as `inspect` has them
