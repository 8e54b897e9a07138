"""Arguments as JSON, for calls that are approved, repeated under a key or run as a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from .arguments import NotSerializable, Signature, to_jsonable


def json_arguments(arguments: Mapping[str, object]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return a deep copy of arguments that are JSON, and a problem for each other one."""
    copied: dict[str, Any] = {}
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

    runs_as: dict[str, Any]
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
