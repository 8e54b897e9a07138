"""Values that JSON writes alike, told apart.

JSON has one text for `b"abc"` and `"YWJj"`, for a path and its name, for a member of an enum and its value. What runs
with them can tell them apart, so an approval or a key that stands for one must not stand for the other. Beside the
JSON of a value stands the type of everything in it that JSON does not have, by its place:

    {"v": [b"abc", Order(1)]}  ->  {"v": ["YWJj", {"a": 1}]}  with  v[0]: bytes,  v[1]: shop.Order and its state

The state of an object is all that a pickle of it would hold. It is what travels to the process that runs it.
"""

from __future__ import annotations

import copyreg
import json
import math
import pickle
import re
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from .arguments import NotSerializable, Signature, to_jsonable

_SIMPLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_SCALARS = (type(None), bool, int, float, str, bytes)
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
_NAN = struct.pack(">d", math.nan)


class Typed(NamedTuple):
    """Value that is not JSON."""

    path: str
    type: str
    state: str | None = None
    """What sets it apart from others of its type that JSON writes alike. None: there are none."""


class Exact(NamedTuple):
    """Arguments as JSON, with the types that it loses."""

    plain: dict[str, Any]
    """As JSON holds it."""
    typed: list[Typed]
    """What JSON does not say. Two with the same of both are the same."""


def exact(arguments: Mapping[str, object]) -> Exact:
    """Return the arguments as JSON, with the types that it loses. Raises NotSerializable for what has no JSON, and for
    what cannot be told from something else."""
    typed: list[Typed] = []
    try:
        plain = {name: _plain(arguments[name], _inside("", name), typed) for name in sorted(arguments)}
    except RecursionError:
        raise NotSerializable("the arguments cannot be put into JSON: they are nested too deep") from None
    return Exact({name: plain[name] for name in arguments}, typed)


def identity(arguments: Mapping[str, object]) -> Any:
    """Return JSON that is the same for the same arguments only: themselves, where they are JSON. Raises as `exact`."""
    plain, typed = exact(arguments)
    return [plain, *map(list, typed)] if typed else plain


def copy_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments as another process would get them, for nobody else to change. Raises NotSerializable."""
    try:
        return {name: _copy(value) for name, value in arguments.items()}
    except Exception as error:  # whatever the objects' own code raises
        raise NotSerializable(f"the arguments cannot be copied: {type(error).__name__}: {error}") from None


# --- as JSON, with types ------------------------------------------------------------------------------------------


def _plain(value: Any, path: str, typed: list[Typed]) -> Any:
    kind = type(value)
    if kind is list:
        return [_plain(each, f"{path}[{at}]", typed) for at, each in enumerate(value)]
    if kind is dict:
        return _plain_dict(value, path, typed)
    if kind is tuple:
        typed.append(Typed(path, "tuple"))
        return [_plain(each, f"{path}[{at}]", typed) for at, each in enumerate(value)]
    if kind is set or kind is frozenset:
        typed.append(Typed(path, kind.__name__))
        return _plain_set(value, path, typed)
    if kind is float and math.isfinite(value):
        return value
    if kind is float:
        bits = struct.pack(">d", value)
        typed.append(Typed(path, "float", bits.hex() if math.isnan(value) and bits != _NAN else None))
        return str(value)
    if kind is bytes or kind is bytearray:
        typed.append(Typed(path, kind.__name__))
    elif kind not in _SCALARS:
        return _plain_object(value, path, typed)
    return to_jsonable(value)


def _plain_dict(value: dict[Any, Any], path: str, typed: list[Typed]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, each in value.items():
        name = _name_in_json(key)
        if name in plain:
            raise NotSerializable(f"{path}: two names are both {name!r} in JSON")
        place = _inside(path, name)
        if type(key) is not str:
            # A blank stands in no place, so this is the name and not the value.
            is_plain = type(key) in (bool, int, type(None))
            typed.append(Typed(f"{place} name", name_of_class(type(key)), None if is_plain else _State().text(key)))
        plain[name] = _plain(each, place, typed)
    return plain


def _name_in_json(key: Any) -> str:
    return key if type(key) is str else str(next(iter(to_jsonable({key: None}))))


def _plain_set(value: Iterable[Any], path: str, typed: list[Typed]) -> list[Any]:
    """Return the members in an order of their own: that of a set is another one in every process."""
    members: list[tuple[str, Any, list[Typed]]] = []
    for each in value:
        inner: list[Typed] = []
        plain = _plain(each, "", inner)
        members.append((json.dumps([plain, inner]), plain, inner))
    members.sort(key=lambda member: member[0])
    for at, (_, _, inner) in enumerate(members):
        typed += [each._replace(path=f"{path}[{at}]{each.path}") for each in inner]
    return [plain for _, plain, _ in members]


def _plain_object(value: Any, path: str, typed: list[Typed]) -> Any:
    name, plain = name_of_class(type(value)), to_jsonable(value)
    if isinstance(value, Enum) and type(value).__members__.get(value._name_) is value:
        typed.append(Typed(path, f"{name}.{value._name_}"))
    else:
        state = _State().text(value)
        typed.append(Typed(path, name, None if _is_told_by(plain, value, state) else state))
    return plain


def _is_told_by(plain: Any, value: object, state: str) -> bool:
    """Return whether its JSON and its type say all: a date can be made of its text, a time of day in a named zone
    cannot."""
    if type(value).__module__ not in ("datetime", "decimal", "pathlib", "uuid", "ipaddress") or type(plain) is not str:
        return False
    try:
        kind: Any = type(value)
        return _State().text(_maker(kind).validate_python(plain)) == state
    except Exception:  # it has no such text
        return False


@lru_cache(maxsize=64)
def _maker(kind: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _inside(path: str, name: str) -> str:
    if _SIMPLE_NAME.fullmatch(name):
        return f"{path}.{name}" if path else name
    return f"{path}[{json.dumps(name)}]"


def name_of_class(kind: type) -> str:
    """Return the name that a pickle has for it. Raises NotSerializable where that is the name of something else."""
    _must_be_found(kind, kind.__module__, kind.__qualname__)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _must_be_found(value: object, module: str | None, qualname: str) -> None:
    found: Any = sys.modules.get(module or "")
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not value and value is not type(None):
        raise NotSerializable(f"{qualname} cannot be told from others: there is no such name in {module}")


# --- the state of an object ---------------------------------------------------------------------------------------


class _State:
    """Writes down all that a pickle of a value would hold, in one order. Cycles and shared parts are kept."""

    def __init__(self, *, with_set_fields: bool = True) -> None:
        self._with_set_fields = with_set_fields
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # as long as it lives, its id is no other's

    def text(self, value: object) -> str:
        """Return the text. Raises NotSerializable."""
        try:
            return json.dumps(self._of(value))
        except NotSerializable:
            raise
        except Exception as error:  # whatever its own code raises
            reason = f"{type(error).__name__}: {error}"
            raise NotSerializable(f"a {type(value).__name__} cannot be told from others: {reason}") from None

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS or kind is bytearray:
            return [kind.__name__, _write_scalar(value)]
        if kind is tuple:
            return ["tuple", *map(self._of, value)]
        if kind is frozenset:
            return ["frozenset", *self._members(value)]
        if isinstance(value, type):
            return ["class", name_of_class(value)]
        if kind is FunctionType or isinstance(value, BuiltinFunctionType):  # since 3.13 some are of a kind below it
            return self._of_function(value)
        if id(value) in self._seen:
            return ["again", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        if kind is list:
            return ["list", *map(self._of, value)]
        if kind is set:
            return ["set", *self._members(value)]
        if kind is dict:
            return ["dict", *([self._of(key), self._of(each)] for key, each in value.items())]
        if kind.__name__ in _PATHS and kind.__module__.partition(".")[0] == "pathlib":
            # Since 3.13 it is pickled as the pieces that it was put together from, which tell equal paths apart.
            return ["object", name_of_class(kind), str(value)]
        return ["object", name_of_class(kind), *self._reduce(value)]

    def _reduce(self, value: Any) -> list[Any]:
        reducer = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL) if reducer is None else reducer(value)
        if isinstance(reduced, str):
            return [reduced]
        make, arguments, state, items, pairs, *more = (*reduced, None, None, None)[:6]
        if isinstance(state, dict) and not self._with_set_fields:
            state = {name: each for name, each in state.items() if name != "__pydantic_fields_set__"}
        listed = None if items is None else list(items)
        named = None if pairs is None else list(pairs)
        return [self._of(each) for each in (make, arguments, state, listed, named, *more)]

    def _of_function(self, function: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if owner is None or isinstance(owner, ModuleType):
            _must_be_found(function, function.__module__, function.__qualname__)
            return ["function", function.__module__, function.__qualname__]
        return ["method", self._of(owner), function.__name__]

    def _members(self, members: Iterable[Any]) -> list[Any]:
        return sorted((self._of(each) for each in members), key=json.dumps)


def _write_scalar(value: Any) -> Any:
    if type(value) is float:
        return struct.pack(">d", value).hex()
    if type(value) is int:
        return hex(value)
    return value.hex() if isinstance(value, bytes | bytearray) else value


def _copy(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple, set, frozenset):
        return kind(map(_copy, value))
    if kind is dict:
        return {_copy(key): _copy(each) for key, each in value.items()}
    return pickle.loads(pickle.dumps(value))


# --- what conversion made of it -----------------------------------------------------------------------------------


class Look(NamedTuple):
    """Findings of the check of arguments that fit."""

    runs_as: dict[str, Any]
    """What the function gets where that is another value than was given, by its place."""
    unsteady: list[str]
    """Where that is another value every time, so that nobody can be shown it."""
    lost_in_json: list[str]
    """Those that would run as something else if they were written down as JSON first."""

    @classmethod
    def of(cls, data: Any) -> Look:
        return cls(**data)


def look(signature: Signature, given: Mapping[str, object], converted: Mapping[str, object]) -> Look:
    """Compare what was given with what the function would get."""
    try:
        plain, typed = exact(given)
    except NotSerializable:
        return Look({}, [], [])  # which is told where it has to be written down
    lost: set[str] = set()
    if typed:
        names = {name for name in given if exact({name: given[name]}).typed}
        again, problems = signature.check(plain)
        if problems:
            lost = names & {problem["field"].partition(".")[0] for problem in problems} or names
        else:
            lost = {name for name in names if not _runs_the_same(converted[name], again[name])}
    for name in signature.defaults.keys() - plain.keys():  # which may be converted as well
        with suppress(NotSerializable):
            plain |= exact({name: signature.defaults[name]}).plain
    runs_as, later = _changes(plain, converted), {}
    if runs_as:
        later = _changes(plain, signature.check(copy_arguments(given))[0])
    steady = {place: value for place, value in runs_as.items() if place in later and _is_json_same(value, later[place])}
    return Look(steady, sorted((runs_as.keys() | later.keys()) - steady.keys()), sorted(lost))


def _is_json_same(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)


def _runs_the_same(one: object, other: object) -> bool:
    """Return whether what runs cannot tell them apart, but for which fields of a model were left to their defaults."""
    try:
        return _State(with_set_fields=False).text(one) == _State(with_set_fields=False).text(other)
    except NotSerializable:
        return False


def _changes(given: Mapping[str, Any], converted: Mapping[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in sorted(given.keys() & converted.keys()):
        _note_change(given[name], converted[name], _inside("", name), found)
    return found


def _note_change(given: Any, run: Any, path: str, found: dict[str, Any]) -> None:
    """Note a change. What was left to a default is told elsewhere; what has no JSON cannot be told."""
    try:
        inner = _open_value(run)
    except Exception:  # a name without JSON, or whatever the code of a model raises
        return
    if isinstance(given, dict) and isinstance(inner, _Fields) and (type(run) is not dict or list(inner) == list(given)):
        for name in given:
            if name in inner:
                _note_change(given[name], inner[name], _inside(path, name), found)
        for name in inner.made - given.keys():
            with suppress(NotSerializable):
                found[_inside(path, name)] = to_jsonable(inner[name])
    elif type(inner) is list and isinstance(given, list) and len(given) == len(inner):
        for at, (each, other) in enumerate(zip(given, inner, strict=True)):
            _note_change(each, other, f"{path}[{at}]", found)
    else:
        try:
            plain = _plain(run, "", []) if type(run) in _CONTAINERS else to_jsonable(run)
        except (NotSerializable, RecursionError):
            return
        if not _is_same(given, inner if type(inner) is str else plain, run):
            found[path] = plain


class _Fields(dict[str, Any]):
    """By the names that they are given under."""

    made: frozenset[str] = frozenset()
    """Those that were given, or made by the model's own code, and not left to a default."""


def _open_value(run: Any) -> Any:
    """Return what is in a model, a dataclass, a dictionary or a secret."""
    kind = type(run)
    if kind is dict:
        return _Fields({_name_in_json(key): each for key, each in run.items()})
    if kind is tuple:
        return list(run)
    if hasattr(kind, "get_secret_value"):
        return run.get_secret_value()
    if getattr(kind, "__pydantic_root_model__", False):
        return _open_value(run.root)
    if hasattr(run, "model_fields_set") and hasattr(kind, "__pydantic_fields__"):
        names = {name: _name_given(field, name) for name, field in kind.__pydantic_fields__.items()}
        fields = _Fields({shown: getattr(run, name, None) for name, shown in names.items()})
        fields.made = frozenset(names[name] for name in run.model_fields_set if name in names)
        return fields
    if hasattr(kind, "__dataclass_fields__"):
        fields = _Fields({name: getattr(run, name, None) for name in kind.__dataclass_fields__})
        left = {name for name, field in kind.__dataclass_fields__.items() if field.default is fields[name]}
        made = {name for name, field in kind.__dataclass_fields__.items() if not callable(field.default_factory)}
        fields.made = frozenset(made - left)
        return fields
    return run


def _name_given(field: Any, name: str) -> str:
    return field.validation_alias if isinstance(field.validation_alias, str) else name


def _is_same(given: Any, plain: Any, run: Any) -> bool:
    if isinstance(run, set | frozenset) and isinstance(given, list):
        return sorted(map(json.dumps, given)) == sorted(map(json.dumps, plain))
    if isinstance(run, bytes | bytearray) and isinstance(given, str):
        return given == plain or bytes(run) == given.encode("utf-8", "surrogatepass")
    if isinstance(given, bool) or isinstance(plain, bool) or not isinstance(given, int | float):
        return _is_json_same(given, plain)
    return isinstance(plain, int | float) and given == plain  # compared exactly, and 1 is the number 1.0
