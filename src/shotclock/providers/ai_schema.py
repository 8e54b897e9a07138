"""JSON schemas as a file writes them: whether one is a schema at all, and one as a model can be given it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# The keywords whose value is a schema, a list of schemas, or a schema for each name. What is below others is a value.
_ONE: tuple[str, ...] = ("items", "contains", "additionalItems", "additionalProperties", "contentSchema", "not")
_ONE += ("unevaluatedProperties", "unevaluatedItems", "propertyNames", "if", "then", "else")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)


def find_schema_flaw(schema: Mapping[str, Any]) -> str | None:
    """Return why a value is no JSON schema, or refers to what is not in it; None where all is well. Imports jsonschema,
    which is slow."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
        for part in _parts_of(schema):
            patterns = [part.get("pattern"), *(part.get("patternProperties") or ())]
            for pattern in patterns:
                if pattern is not None:
                    _compile(pattern)
            reference = part.get("$ref")
            if isinstance(reference, str):
                _check_reference(schema, reference)
    except SchemaError as error:
        where = "/".join(str(key) for key in error.path)
        return error.message + (f", at {where}" if where else "")
    except ValueError as error:
        return str(error)
    except RecursionError:
        return "it is nested too deeply"
    return None


def find_value_flaw(schema: Mapping[str, Any], value: object) -> str | None:
    """Return what is wrong with a value by its schema, and where; None where it fits. Imports jsonschema, which is
    slow."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema).iter_errors(value))
    return None if error is None else f"{error.json_path}: {error.message}"


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


def _check_reference(schema: Mapping[str, Any], reference: str) -> None:
    if reference.startswith("#"):
        look_up(schema, reference)
    elif not any(isinstance(part.get("$id"), str) for part in _parts_of(schema)):
        raise ValueError(f"$ref {reference!r} is not in the schema itself, and nothing is fetched: begin it with '#'")


def look_up(schema: Mapping[str, Any], reference: str) -> Any:
    """Return the part of a schema that a reference like `#/$defs/name` or `#anchor` means. Raises ValueError."""
    pointer = unquote(reference.removeprefix("#"))
    if pointer and not pointer.startswith("/"):
        for part in _parts_of(schema):
            if pointer in (part.get("$anchor"), part.get("$dynamicAnchor")):
                return part
        raise ValueError(f"$ref {reference!r} means nothing in the schema")
    found: Any = schema
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            raise ValueError(f"$ref {reference!r} means nothing in the schema")
    if not isinstance(found, Mapping | bool):
        raise ValueError(f"$ref {reference!r} means no schema")
    return found


def _parts_of(schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and every schema in it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        waiting += [part[key] for key in _ONE if key in part]
        for key in _SEVERAL:
            if isinstance(part.get(key), list):
                waiting += part[key]
        for key in _NAMED:
            if isinstance(part.get(key), Mapping):
                waiting += part[key].values()


def as_object(schema: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a schema as a model is asked for it, and whether what is meant is its `result`: a structured answer is
    always an object. All that it refers to is in its `$defs`, which is where every provider looks. Raises ValueError
    for a reference that means nothing."""
    gathered = _Gathered(schema)
    written = gathered.rewrite(schema)
    is_wrapped = written.get("type") != "object"
    if is_wrapped:
        written = {"type": "object", "properties": {"result": written}, "required": ["result"]}
    if gathered.definitions:
        written["$defs"] = gathered.definitions
    return written, is_wrapped


class _Gathered:
    """What the references of one schema mean, each under a name of its own."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._names: dict[str, str] = {}
        self.definitions: dict[str, Any] = {}

    def rewrite(self, part: Any) -> Any:
        """Return a part of the schema with its references to `$defs`."""
        if not isinstance(part, Mapping):
            return part
        written: dict[str, Any] = {}
        for key, value in part.items():
            if key == "$ref" and isinstance(value, str):
                written[key] = f"#/$defs/{self._name(value)}"
            elif key in _SEVERAL and isinstance(value, list):
                written[key] = [self.rewrite(each) for each in value]
            elif key in _ONE:
                written[key] = self.rewrite(value)
            elif key in _NAMED and isinstance(value, Mapping):
                if key not in _DEFINITIONS:
                    written[key] = {name: self.rewrite(each) for name, each in value.items()}
            else:
                written[key] = value
        return written

    def _name(self, reference: str) -> str:
        if reference not in self._names:
            last = re.sub(r"\W", "_", reference.rpartition("/")[2]).strip("_") or "it"
            name = last if last not in self._names.values() else f"{last}_{len(self._names)}"
            self._names[reference] = name
            self.definitions[name] = self.rewrite(look_up(self._schema, reference))
        return self._names[reference]
