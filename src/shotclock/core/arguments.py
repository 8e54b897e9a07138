"""Check of arguments against a function's signature: every problem at once, before anything runs."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from .envelope import MOST_CHANGES, is_whole, make_whole, note_halves, whole_keys, whole_text

# pydantic is imported where it is first needed: most of the command line never does, and it is slow to start.

CONTEXT_NAME = "ctx"


class NotSerializable(Exception):
    """A result that cannot be put into JSON."""


class Parameter(NamedTuple):
    """One parameter of a function that takes its arguments by name."""

    name: str
    kind: Literal["by place or name", "by name", "rest"]
    default: Any
    """`...`: it has to be given."""


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Read the parameters of a function. Raises TypeError where one cannot be passed by name."""
    # What `inspect` would find first. To import it takes longer than all else that is done about a command.
    written: Any = function
    while isinstance(written, types.FunctionType) and (attributes := vars(written)):
        if "__wrapped__" not in attributes or "__signature__" in attributes:
            return _inspect(function)
        written = attributes["__wrapped__"]
    if not isinstance(written, types.FunctionType):
        return _inspect(function)
    code = written.__code__
    if code.co_posonlyargcount or code.co_flags & _TAKES_MORE_BY_PLACE:
        return _inspect(function)
    by_place, total = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[: total + bool(code.co_flags & _TAKES_MORE_BY_NAME)]
    defaults = written.__defaults__ or ()
    default_of = dict(zip(names[by_place - len(defaults) : by_place], defaults, strict=True))
    default_of |= written.__kwdefaults__ or {}
    found = [Parameter(name, "by place or name", default_of.get(name, ...)) for name in names[:by_place]]
    found += [Parameter(name, "by name", default_of.get(name, ...)) for name in names[by_place:total]]
    return found + [Parameter(name, "rest", ...) for name in names[total:]]


_TAKES_MORE_BY_PLACE, _TAKES_MORE_BY_NAME = 0x04, 0x08  # of a code's flags, as `inspect` has them


def _inspect(function: Callable[..., Any]) -> list[Parameter]:
    import inspect

    found: list[Parameter] = []
    for each in inspect.signature(function).parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY) and each.name != CONTEXT_NAME:
            raise TypeError(f"{function.__qualname__}: arguments are passed by name, {each} cannot be")
        default = ... if each.default is each.empty else each.default
        if each.kind is each.VAR_KEYWORD:
            found.append(Parameter(each.name, "rest", ...))
        else:
            by_place = each.kind is not each.KEYWORD_ONLY
            found.append(Parameter(each.name, "by place or name" if by_place else "by name", default))
    return found


class Signature:
    """Parameters of a function. Build it once per function with `signature_of`.

    Arguments of plain types that are what they should be are passed on as they are; pydantic, whose import takes longer
    than most programs do, is only asked where a type is not plain or a value needs a conversion or an explanation.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = parameters_of(function)
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except NameError as error:
            raise TypeError(f"{function.__qualname__}: annotation cannot be resolved: {error}") from None
        self.wants_context = any(parameter.name == CONTEXT_NAME for parameter in parameters)
        self._title = f"Arguments of {function.__qualname__}"
        self._fields: dict[str, tuple[Any, Any]] = {}
        self._takes_more = False
        for parameter in parameters:
            if parameter.name == CONTEXT_NAME:
                continue
            if parameter.kind == "rest":
                self._takes_more = True
                continue
            self._fields[parameter.name] = (hints.get(parameter.name, Any), parameter.default)
        plain = {name: _plain_type(hint) for name, (hint, _) in self._fields.items()}
        are_plain = all(_is_plain_default(default) for _, default in self._fields.values())
        self._plain = {name: kind for name, kind in plain.items() if kind is not None} if are_plain else {}
        self._is_plain = len(self._plain) == len(self._fields)
        self._model: Any = None
        if not self._is_plain:
            self.build_model()

    def build_model(self) -> Any:
        """Return the model that pydantic checks with; the first time it is built. Raises TypeError and its kin."""
        if self._model is None:
            from pydantic import ConfigDict, Field, ValidationError, create_model

            # Behind an alias, a parameter may be called anything, `json` and `model_config` included.
            fields: dict[str, Any] = {
                f"p{position}": (hint, Field(default, alias=name))
                for position, (name, (hint, default)) in enumerate(self._fields.items())
            }
            extra: Any = "allow" if self._takes_more else "forbid"
            config = ConfigDict(extra=extra, arbitrary_types_allowed=True, protected_namespaces=())
            self._model = create_model(self._title, __config__=config, **fields)
            self._invalid = ValidationError
            self._validate = self._model.__pydantic_validator__.validate_python
        return self._model

    @property
    def defaults(self) -> dict[str, object]:
        """Return what is passed where nothing is given, before it is converted."""
        return {name: default for name, (_, default) in self._fields.items() if default is not ...}

    def json_schema(self) -> dict[str, Any]:
        """Return what the arguments look like, for those who call without seeing the function."""
        if self._is_plain:
            return self._plain_schema()
        schema: dict[str, Any] = self.build_model().model_json_schema(by_alias=True)
        schema.pop("title", None)
        schema.setdefault("properties", {})
        return schema

    def _plain_schema(self) -> dict[str, Any]:
        """Write the schema that pydantic would."""
        properties = {}
        for name, (_, default) in self._fields.items():
            written_default = {} if default is ... else {"default": default}
            properties[name] = {
                **written_default,
                **self._plain[name].schema,
                "title": name.title().replace("_", " ").strip(),
            }
        schema: dict[str, Any] = {"properties": properties, "type": "object", "additionalProperties": self._takes_more}
        required = [name for name, (_, default) in self._fields.items() if default is ...]
        return {**schema, "required": required} if required else schema

    def check(self, arguments: Mapping[str, object]) -> tuple[dict[str, object], list[dict[str, str]]]:
        """Return the arguments as the function wants them, or what is wrong with them."""
        if self._is_plain:
            accepted = self._accept_plain(arguments)
            if accepted is not None:
                return accepted, []
        self.build_model()
        try:
            checked = self._validate(arguments)
        except self._invalid as error:
            return {}, [
                {"field": ".".join(map(str, problem["loc"])) or "arguments", "message": problem["msg"]}
                for problem in error.errors(include_url=False, include_input=False)
            ]
        values = checked.__dict__
        accepted = {name: values[f"p{position}"] for position, name in enumerate(self._fields)}
        if self._takes_more:
            accepted.update(checked.__pydantic_extra__ or {})
        return accepted, []

    def _accept_plain(self, arguments: Mapping[str, object]) -> dict[str, object] | None:
        """Return the arguments where nothing about them has to be converted, None where pydantic has to look."""
        if len(arguments) > len(self._fields):
            return None
        accepted: dict[str, object] = {}
        seen = 0
        for name, (_, default) in self._fields.items():
            if name in arguments:
                seen += 1
                value = self._plain[name].accept(arguments[name])
                if value is _OTHERWISE:
                    return None
                accepted[name] = value
            elif default is ...:
                return None
            else:
                accepted[name] = default
        return accepted if seen == len(arguments) else None


class _PlainType(NamedTuple):
    """A type that needs no library: its JSON Schema, and what accepts a value that is just right."""

    schema: dict[str, Any]
    accept: Callable[[object], object]


_OTHERWISE = object()
_PLAIN_SCHEMAS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
# Above this an integer is not the same as a float.
_EXACT_AS_FLOAT = 2**53


def _plain_type(hint: Any) -> _PlainType | None:
    """Return the type as it is known here, None where pydantic has to know it."""
    if isinstance(hint, type) and hint in _PLAIN_SCHEMAS:
        return _PlainType({"type": _PLAIN_SCHEMAS[hint]}, _accept_float if hint is float else _make_acceptor(hint))
    if hint is Any:
        return _PlainType({}, lambda value: value)
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict and inside == (str, Any):
        return _PlainType({"additionalProperties": True, "type": "object"}, _accept_dict)
    if origin is Literal and len(set(inside)) == len(inside) and all(type(choice) is str for choice in inside):
        words = {"const": inside[0]} if len(inside) == 1 else {"enum": list(inside)}
        return _PlainType({**words, "type": "string"}, lambda value: value if _is_one_of(value, inside) else _OTHERWISE)
    if origin in (typing.Union, types.UnionType) and len(inside) == 2 and inside[1] is type(None):
        kind = _plain_type(inside[0])
        if kind is not None and "anyOf" not in kind.schema and inside[0] is not type(None):
            accept = kind.accept
            schema = {"anyOf": [kind.schema, {"type": "null"}]}
            return _PlainType(schema, lambda value: None if value is None else accept(value))
    if origin is list and len(inside) == 1:
        kind = _plain_type(inside[0])
        if kind is not None:
            each = kind.accept
            return _PlainType({"items": kind.schema, "type": "array"}, lambda value: _accept_list(value, each))
    return None


def plain_schema(hint: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of a type that needs no library, None for others."""
    kind = _plain_type(hint)
    if kind is not None:
        return kind.schema
    return {"additionalProperties": True, "type": "object"} if hint is dict else None


def _is_plain_default(default: object) -> bool:
    is_plain = default is ... or default is None or type(default) in (bool, int, str)
    return is_plain or (type(default) is float and math.isfinite(default))


def _make_acceptor(kind: type) -> Callable[[object], object]:
    return lambda value: value if type(value) is kind else _OTHERWISE


def _accept_float(value: object) -> object:
    if type(value) is int and abs(value) <= _EXACT_AS_FLOAT:
        return float(value)
    return value if type(value) is float else _OTHERWISE


def _is_one_of(value: object, choices: tuple[object, ...]) -> bool:
    return type(value) is str and value in choices


def _accept_dict(value: object) -> object:
    return dict(value) if type(value) is dict and all(type(key) is str for key in value) else _OTHERWISE


def _accept_list(value: object, accept: Callable[[object], object]) -> object:
    if type(value) is not list:
        return _OTHERWISE
    accepted = [accept(item) for item in value]
    return _OTHERWISE if any(item is _OTHERWISE for item in accepted) else accepted


@lru_cache(maxsize=1024)
def signature_of(function: Callable[..., Any]) -> Signature:
    return Signature(function)


# What Python writes out in decimal is limited; this is safely below it (4,300 digits).
_LONGEST_INTEGER_BITS = 14_000
_PLAIN = frozenset({type(None), bool, int, str})


def to_jsonable(value: object) -> Any:
    """Return the value as JSON holds it; raises NotSerializable with a reason. Half characters stay what they are."""
    if type(value) in _PLAIN and (type(value) is not int or value.bit_length() <= _LONGEST_INTEGER_BITS):
        return value
    plain = _plain(value)
    return plain if _is_json(plain) else _with_named_numbers(plain)


def to_valid_json(value: object) -> tuple[Any, list[str]]:
    """Return the value as every reader of JSON takes it, and what had to be changed in it for that: half characters,
    numbers that are none, and bytes. Raises NotSerializable with a reason."""
    kind = type(value)
    if kind in _PLAIN and (
        value.isascii() if kind is str else kind is not int or value.bit_length() <= _LONGEST_INTEGER_BITS  # type: ignore[attr-defined]
    ):
        return value, []
    changes: list[str] = []
    try:
        plain = to_jsonable(value)
    except NotSerializable:
        try:
            whole = _with_whole_keys(value)
        except RecursionError:
            whole = value
        if whole is value:
            raise
        value, plain = whole, to_jsonable(whole)
        changes.append("names of fields: half characters became U+FFFD")
    if not changes and type(plain) is type(value) and plain == value and is_whole(plain):  # as nearly always
        return plain, []
    try:
        _note_changes(_plain(value), _plain(value, "hex"), "", changes)
    except RecursionError:
        raise NotSerializable(f"a {type(value).__name__} cannot be put into JSON: it is nested too deep") from None
    return make_whole(plain), changes


def _with_whole_keys(value: Any) -> Any:
    """Return the value with whole names: those with half a character in them would be refused. Only in the containers
    of Python itself."""
    if type(value) is dict:
        items = [_with_whole_keys(item) for item in value.values()]
        keys = whole_keys(value)
        same = keys == list(value) and all(a is b for a, b in zip(items, value.values(), strict=True))
        return value if same else dict(zip(keys, items, strict=True))
    if type(value) in (list, tuple):
        items = [_with_whole_keys(item) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    return value


def _note_changes(plain: Any, otherwise: Any, path: str, changes: list[str]) -> None:
    """Note what had to be changed in a value. `otherwise` is the same with bytes written in another way: where the two
    differ there are bytes."""
    if len(changes) >= MOST_CHANGES:
        return
    if isinstance(plain, dict):
        for (key, item), (other_key, other) in zip(plain.items(), otherwise.items(), strict=False):
            _note_text(key, other_key, f"{path}.{key}", changes)
            _note_changes(item, other, f"{path}.{key}", changes)
    elif isinstance(plain, list):
        for place, (item, other) in enumerate(zip(plain, otherwise, strict=False)):
            _note_changes(item, other, f"{path}[{place}]", changes)
    elif isinstance(plain, float) and not math.isfinite(plain):
        changes.append(f"{path[:200].lstrip('.') or 'the result'}: {plain} became a text")
    elif isinstance(plain, str):
        _note_text(plain, otherwise, path, changes)


def _note_text(plain: str, otherwise: str, path: str, changes: list[str]) -> None:
    if plain != otherwise:
        changes.append(f"{whole_text(path[:200]).lstrip('.') or 'the result'}: bytes became base64")
    elif whole_text(plain) is not plain:
        changes.append(note_halves(path))


def _is_json_already(value: object) -> bool:
    """Return whether it is made of the types that JSON has, and of nothing else."""
    kind = type(value)
    if kind in _LEAVES:
        return True
    if kind is list:
        return all(map(_is_json_already, value))  # type: ignore[call-overload]
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(_is_json_already, value.values()))  # type: ignore[attr-defined]
    return False


_LEAVES = frozenset({type(None), bool, int, float, str})


def _with_lists(value: Any) -> Any:
    """Return it with lists for its tuples. Raises TypeError where more than that keeps it from being JSON."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is list or kind is tuple:
        return [_with_lists(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _with_lists(item) for key, item in value.items()}
    raise TypeError


def _plain(value: object, bytes_mode: Literal["base64", "hex"] = "base64") -> Any:
    try:
        return value if _is_json_already(value) else _with_lists(value)
    except (TypeError, RecursionError):  # what pydantic knows, or tells the reason why it is refused
        pass
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        return to_jsonable_python(value, bytes_mode=bytes_mode)
    except (PydanticSerializationError, ValueError, RecursionError, TypeError) as error:
        raise NotSerializable(f"a {type(value).__name__} cannot be put into JSON: {error}") from None


def _is_json(plain: Any) -> bool:
    try:
        json.dumps(plain, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _with_named_numbers(plain: Any) -> Any:
    """Return the value with NaN and infinities by their names, the nearest thing that JSON has."""
    if isinstance(plain, float):
        return plain if math.isfinite(plain) else str(plain)
    if isinstance(plain, int) and plain.bit_length() > _LONGEST_INTEGER_BITS:
        raise NotSerializable("an integer of thousands of digits cannot be put into JSON")
    if isinstance(plain, list):
        return [_with_named_numbers(item) for item in plain]
    if isinstance(plain, dict):
        return {key: _with_named_numbers(item) for key, item in plain.items()}
    return plain


# --- what a function returns ------------------------------------------------------------------------------

_SAYS_NOTHING = frozenset({"title", "description", "default", "examples", "format", "deprecated", "$defs", "$comment"})
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def misfit(value: object, schema: Mapping[str, Any]) -> str | None:
    """Return why a result does not fit the schema of what its function declares, or None where it does.

    What most functions declare is looked at here, without a copy; the rest by jsonschema, which is slow to import.
    """
    try:
        if _fits(value, schema, schema.get("$defs", {})):
            return None
    except _TooMuch:
        pass
    from jsonschema import Draft202012Validator

    error = next(Draft202012Validator(schema).iter_errors(to_valid_json(value)[0]), None)
    if error is None:
        return None
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    return f"{(place.lstrip('.') + ': ') if place else ''}{error.message}"


class _TooMuch(Exception):
    """The schema has a keyword that is not looked at here."""


def _fits(value: object, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> bool:
    if (reference := schema.get("$ref")) is not None:
        return _fits(value, definitions[reference.rpartition("/")[2]], definitions)
    if type(value) not in _JSON_TYPES:
        value = to_valid_json(value)[0]
    if isinstance(value, float) and not math.isfinite(value):
        return False  # is no number in JSON
    for keyword, rule in schema.items():
        if keyword in _SAYS_NOTHING:
            continue
        if keyword == "type" and isinstance(rule, str):
            if not isinstance(value, _TYPES[rule]) or (isinstance(value, bool) and rule in ("integer", "number")):
                return False
        elif keyword == "anyOf":
            if not any(_fits(value, option, definitions) for option in rule):
                return False
        elif keyword == "enum":
            if not any(type(value) is type(choice) and value == choice for choice in rule):
                return False
        elif keyword == "const":
            if type(value) is not type(rule) or value != rule:
                return False
        elif keyword == "items" and isinstance(rule, dict):
            if isinstance(value, list) and not all(_fits(item, rule, definitions) for item in value):
                return False
        elif keyword == "required":
            if isinstance(value, dict) and any(name not in value for name in rule):
                return False
        elif keyword == "properties":
            if isinstance(value, dict) and not all(
                _fits(value[name], each, definitions) for name, each in rule.items() if name in value
            ):
                return False
        elif keyword == "additionalProperties":
            if not _others_fit(value, rule, schema.get("properties", {}), definitions):
                return False
        else:
            raise _TooMuch
    return True


def _others_fit(value: object, rule: Any, known: Mapping[str, Any], definitions: Mapping[str, Any]) -> bool:
    if rule is True or not isinstance(value, dict):
        return True
    others = [item for name, item in value.items() if name not in known]
    return not others if rule is False else all(_fits(item, rule, definitions) for item in others)


_JSON_TYPES = frozenset({dict, list, str, int, float, bool, type(None)})
