"""Check of arguments against a function's signature, and of results against JSON; arguments as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from .content_blocks import Content
from .envelope import MOST_CHANGES, describe_halves, is_whole, make_whole, whole_keys, whole_text
from .json_values import has_json_type
from .signatures import CONTEXT_NAME, known_hints, read_hints, read_parameters
from .validation import Problems, describe_key, plain_shape
from .value_types import JsonObject

# pydantic and jsonschema are imported on use: they are slow, and most commands do not need them.


class NotSerializable(Exception):
    """A result that cannot be put into JSON."""


class HandlerParameter(NamedTuple):
    name: str
    kind: str  # `by place or name`, `by name` or `rest`
    default: object  # `...` where it is required


def parameters_of(function: Callable[..., Any]) -> list[HandlerParameter]:
    """Return the parameters of a function. Raises TypeError unless all can be passed by name."""
    found: list[HandlerParameter] = []
    for each in read_parameters(function).parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY) and each.name != CONTEXT_NAME:
            use = "a list parameter" if each.kind is each.VAR_POSITIONAL else "a parameter with a name"
            raise TypeError(f"{function.__qualname__}: {each} is not supported; use {use}")
        named = "by name" if each.kind is each.KEYWORD_ONLY else "by place or name"
        kind = "rest" if each.kind is each.VAR_KEYWORD else named
        found.append(HandlerParameter(each.name, kind, ... if each.default is each.empty else each.default))
    return found


def context_name(function: Callable[..., Any]) -> str | None:
    """Return the parameter that receives the context: `ctx`, or one that is annotated with Context."""
    parameters = read_parameters(function).parameters
    if CONTEXT_NAME in parameters:
        return CONTEXT_NAME
    hints = known_hints(function)
    return next((name for name in parameters if _is_context(hints.get(name))), None)


def context_hint(function: Callable[..., Any]) -> Any:
    """Return the annotation of the parameter that receives the context, None if there is none."""
    return known_hints(function).get(context_name(function) or "")


def _is_context(hint: Any) -> bool:
    """Return whether an annotation is Context, a subclass, or one of them in a union."""
    return any(getattr(each, "_is_call_context", False) for each in (hint, *get_args(hint)))


class Signature:
    """Parameters of a function, built once by `signature_of`. pydantic checks the types that `validation` cannot."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = parameters_of(function)
        hints = read_hints(function)
        self.context_name: str | None = context_name(function)
        self.context_hint: Any = hints.get(self.context_name or "")
        for name, hint in hints.items():
            if _is_context(hint) and name not in (self.context_name, "return"):
                raise TypeError(
                    f"{function.__qualname__}: {self.context_name!r} receives the context, so {name!r} cannot be one"
                )
        self._title = f"Arguments of {function.__qualname__}"
        self._takes_more = any(each.kind == "rest" and each.name != self.context_name for each in parameters)
        self._fields: dict[str, tuple[Any, Any]] = {
            each.name: (hints.get(each.name, Any), each.default)
            for each in parameters
            if each.name != self.context_name and each.kind != "rest"
        }
        self._model: Any = None
        try:
            self._plain = {name: plain_shape(hint) for name, (hint, _) in self._fields.items()}
        except TypeError:
            self._is_plain = False
        else:
            self._is_plain = all(
                default is ... or type(default) in _PLAIN or (type(default) is float and math.isfinite(default))
                for _, default in self._fields.values()
            )
        if not self._is_plain:
            self.build_model()

    def build_model(self) -> Any:
        """Return the pydantic model of the arguments, built on first use. Raises TypeError."""
        if self._model is None:
            from pydantic import ConfigDict, Field, ValidationError, create_model

            # Behind an alias, a parameter may have any name, `json` and `model_config` included.
            fields: JsonObject = {
                f"p{position}": (hint, Field(default, alias=name))
                for position, (name, (hint, default)) in enumerate(self._fields.items())
            }
            extra: Literal["allow", "forbid"] = "allow" if self._takes_more else "forbid"
            config = ConfigDict(extra=extra, arbitrary_types_allowed=True, protected_namespaces=())
            self._model = create_model(self._title, __config__=config, **fields)
            self._invalid = ValidationError
            self._validate = self._model.__pydantic_validator__.validate_python
        return self._model

    @property
    def defaults(self) -> dict[str, object]:
        return {name: default for name, (_, default) in self._fields.items() if default is not ...}

    def json_schema(self) -> JsonObject:
        if not self._is_plain:
            schema: JsonObject = self.build_model().model_json_schema(by_alias=True)
            schema.pop("title", None)
            return {"properties": {}, **schema}
        properties = {
            name: describe_key(self._plain[name], name, {}, *([] if default is ... else [default]))
            for name, (_, default) in self._fields.items()
        }
        schema = {"properties": properties, "type": "object", "additionalProperties": self._takes_more}
        required = [name for name, (_, default) in self._fields.items() if default is ...]
        return {**schema, "required": required} if required else schema

    def check(self, arguments: Mapping[str, object]) -> tuple[dict[str, object], list[dict[str, str]]]:
        """Return the arguments as the function wants them, or all problems with them."""
        accepted = self.accept_plain(arguments) if self._is_plain else None
        if accepted is not None:
            return accepted, []
        self.build_model()
        try:
            checked = self._validate(arguments)
        except self._invalid as error:
            return {}, [
                {"field": ".".join(map(str, problem["loc"])) or "arguments", "message": self._describe(problem)}
                for problem in error.errors(include_url=False, include_input=False)
            ]
        values = checked.__dict__
        accepted = {name: values[f"p{position}"] for position, name in enumerate(self._fields)}
        if self._takes_more:
            accepted.update(checked.__pydantic_extra__ or {})
        return accepted, []

    def _describe(self, problem: Mapping[str, Any]) -> str:
        if problem["type"] != "extra_forbidden" or len(problem["loc"]) != 1:
            return str(problem["msg"])
        from difflib import get_close_matches  # takes 5 ms

        near = get_close_matches(str(problem["loc"][0]), self._fields, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(self._fields) or 'none'}"
        return f"unknown argument; {hint}"

    def accept_plain(self, arguments: Mapping[str, object]) -> dict[str, object] | None:
        """Return the arguments where all of them have exactly the declared types, else None."""
        if not arguments.keys() <= self._fields.keys():
            return None
        problems: Problems = []
        accepted = {
            name: self._plain[name].check(arguments[name], (name,), problems) if name in arguments else default
            for name, (_, default) in self._fields.items()
        }
        return None if problems or ... in accepted.values() else accepted


def plain_schema(hint: Any) -> JsonObject | None:
    """Return the JSON Schema of a type that needs no pydantic, None for others."""
    try:
        return plain_shape(hint).schema({})
    except TypeError:
        return None


@lru_cache(maxsize=1024)
def signature_of(function: Callable[..., Any]) -> Signature:
    return Signature(function)


# Python writes integers of up to 4,300 digits; this many bits are safely below that.
_LONGEST_INTEGER_BITS = 14_000
_PLAIN = frozenset({type(None), bool, int, str})


def to_jsonable(value: object) -> Any:
    """Return the value as JSON data, with half characters. Raises NotSerializable with a reason."""
    if type(value) in _PLAIN and (type(value) is not int or value.bit_length() <= _LONGEST_INTEGER_BITS):
        return value
    plain = _plain(value)
    return plain if _is_json(plain) else _with_named_numbers(plain)


def to_valid_json(value: object) -> tuple[Any, list[str]]:
    """Return the value as strict JSON data, and a list of its changes. Raises NotSerializable with a reason."""
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
    if not changes and type(plain) is type(value) and plain == value and is_whole(plain):
        return plain, []
    try:
        _note_changes(_plain(value), _plain(value, "hex"), "", changes)
    except RecursionError:
        raise NotSerializable(f"a {type(value).__name__} cannot be put into JSON: it is nested too deep") from None
    return make_whole(plain), changes


def _with_whole_keys(value: Any) -> Any:
    """Return the value with whole keys, in Python's own containers: pydantic refuses keys with half characters."""
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
    """Add the changes in a value. `otherwise` has bytes in another encoding: the two differ where there are bytes."""
    if len(changes) >= MOST_CHANGES:
        return
    if isinstance(plain, dict):
        for (key, item), (other_key, other) in zip(plain.items(), otherwise.items(), strict=False):
            _note_changes(key, other_key, f"{path}.{key}", changes)
            _note_changes(item, other, f"{path}.{key}", changes)
    elif isinstance(plain, list):
        for place, (item, other) in enumerate(zip(plain, otherwise, strict=False)):
            _note_changes(item, other, f"{path}[{place}]", changes)
    elif isinstance(plain, float) and not math.isfinite(plain):
        changes.append(f"{path[:200].lstrip('.') or 'the result'}: {plain} became a text")
    elif isinstance(plain, str) and plain != otherwise:
        changes.append(f"{whole_text(path[:200]).lstrip('.') or 'the result'}: bytes became base64")
    elif isinstance(plain, str) and whole_text(plain) is not plain:
        changes.append(describe_halves(path))


_LEAVES = frozenset({type(None), bool, int, float, str})


def _with_lists(value: Any) -> Any:
    """Return the value with lists for its tuples. Raises TypeError unless it is JSON data apart from that."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is list or kind is tuple:
        return [_with_lists(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _with_lists(item) for key, item in value.items()}
    if isinstance(value, Content):
        return value.block
    raise TypeError


def _plain(value: object, bytes_mode: Literal["base64", "hex"] = "base64") -> Any:
    try:
        return _with_lists(value)
    except (TypeError, RecursionError):  # pydantic converts it or has the reason
        pass
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        return to_jsonable_python(value, bytes_mode=bytes_mode, fallback=_content_block)
    except (PydanticSerializationError, ValueError, RecursionError, TypeError) as error:
        raise NotSerializable(f"a {type(value).__name__} cannot be put into JSON: {error}") from None


def _content_block(value: object) -> object:
    if isinstance(value, Content):
        return value.block
    raise TypeError(f"Unable to serialize unknown type: {type(value)}")


def _is_json(plain: Any) -> bool:
    try:
        json.dumps(plain, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _with_named_numbers(plain: Any) -> Any:
    """Return the value with NaN and infinities as text."""
    if isinstance(plain, float):
        return plain if math.isfinite(plain) else str(plain)
    if isinstance(plain, int) and plain.bit_length() > _LONGEST_INTEGER_BITS:
        raise NotSerializable("an integer of thousands of digits cannot be put into JSON")
    if isinstance(plain, list):
        return [_with_named_numbers(item) for item in plain]
    if isinstance(plain, dict):
        return {key: _with_named_numbers(item) for key, item in plain.items()}
    return plain


_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "format", "deprecated", "$defs", "$comment"})


def misfit(value: object, schema: Mapping[str, Any]) -> str | None:
    """Return why a result does not fit its schema, or None. jsonschema, slow to import, checks rare keywords."""
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
    """A keyword of the schema that is not checked here."""


def _fits(value: object, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> bool:
    if (reference := schema.get("$ref")) is not None:
        return _fits(value, definitions[reference.rpartition("/")[2]], definitions)
    if type(value) not in _LEAVES and type(value) not in (dict, list):
        value = to_valid_json(value)[0]
    if isinstance(value, float) and not math.isfinite(value):
        return False  # not a number in JSON
    for keyword, rule in schema.items():
        if keyword in _ANNOTATIONS:
            continue
        if keyword == "type" and isinstance(rule, str):
            if not has_json_type(value, rule):
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
            if isinstance(value, dict) and rule is not True:
                others = [item for name, item in value.items() if name not in schema.get("properties", {})]
                if others and (rule is False or not all(_fits(item, rule, definitions) for item in others)):
                    return False
        else:
            raise _TooMuch
    return True


def json_arguments(arguments: Mapping[str, object]) -> tuple[JsonObject, list[dict[str, str]]]:
    """Return a deep copy of arguments that are JSON, and a problem for each other one."""
    copied: JsonObject = {}
    problems: list[dict[str, str]] = []
    for name, given in arguments.items():
        reason = f"a {type(given).__name__} is not the same after JSON"
        try:
            copied[name] = json.loads(json.dumps(given, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            reason = str(error)
        if name not in copied or copied[name] != given:
            message = f"must be text, a number, true, false, null, or a list or object of these: {reason}"
            problems.append({"field": name, "message": message})
    return copied, problems


class Conversions(NamedTuple):
    """Values that a function receives where its types convert the caller's: text to a path, an object to a model."""

    runs_as: JsonObject
    unsteady: list[str]  # the arguments whose value is different in every check, so that a person cannot be shown it


def find_conversions(signature: Signature, given: Mapping[str, object], converted: Mapping[str, object]) -> Conversions:
    found = Conversions({}, [])
    again, _ = signature.check(given)
    originals = {**{name: each for name, each in signature.defaults.items() if _has_json(each)}, **given}
    for name in sorted(converted):
        value = _shown(converted[name])
        if name in originals and _is_same(value, _shown(originals[name])):
            continue
        if name in again and _is_same(value, _shown(again[name])):
            found.runs_as[name] = value
        else:
            found.unsteady.append(name)
    return found


def _has_json(value: object) -> bool:
    try:
        to_jsonable(value)
    except NotSerializable:
        return False
    return True


def _shown(value: Any) -> Any:
    """Return a value as JSON, with the parts that pydantic would hide and with sets in one order."""
    if isinstance(value, set | frozenset):  # its order is different in every process
        return sorted(map(_shown, value), key=json.dumps)
    if isinstance(value, list | tuple):
        return list(map(_shown, value))
    if isinstance(value, dict):
        return {str(name): _shown(each) for name, each in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if hasattr(value, "get_secret_value"):
        return _shown(value.get_secret_value())
    if getattr(value, "__pydantic_root_model__", False):
        return _shown(value.root)
    if hasattr(value, "model_fields_set"):
        return {name: _shown(each) for name, each in value}
    if hasattr(value, "__dataclass_fields__"):
        return {name: _shown(getattr(value, name, None)) for name in value.__dataclass_fields__}
    return to_jsonable(value) if _has_json(value) else f"<{type(value).__module__}.{type(value).__qualname__}>"


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are the same: 1 is 1.0 and not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
