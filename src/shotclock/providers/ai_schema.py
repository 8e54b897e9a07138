"""JSON Schemas of outputs: their flaws, and their form for a model. jsonschema is imported on use: it is slow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any


def find_schema_flaw(schema: Mapping[str, Any]) -> str | None:
    """Return why a value is not a JSON Schema, or None."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    try:
        Draft202012Validator.check_schema(schema)
        resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
        for part in _objects_in(schema):
            patterns = [part.get("pattern"), *(part.get("patternProperties") or ())]
            for pattern in patterns:
                if isinstance(pattern, str):
                    re.compile(pattern)
            if isinstance(part.get("$ref"), str) and not isinstance(
                resolver.lookup(part["$ref"]).contents, dict | bool
            ):
                return f"$ref {part['$ref']!r} refers to a value that is not a schema"
    except SchemaError as error:
        where = "/".join(str(key) for key in error.path)
        return error.message + (f", at {where}" if where else "")
    except re.error as error:
        return f"{error.pattern!r} is not a regular expression: {error}"
    except Unresolvable as error:
        return f"$ref {error.ref!r} refers to nothing in the schema, and nothing is fetched: begin it with '#'"
    except RecursionError:
        return "it is nested too deeply"
    return None


def find_value_flaw(schema: Mapping[str, Any], value: object) -> str | None:
    """Return the worst flaw of a value and its path, or None."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema).iter_errors(value))
    return None if error is None else f"{error.json_path}: {error.message}"


def _objects_in(value: object) -> Iterator[dict[str, Any]]:
    """Yield the objects in a schema that are not values of `const` or `enum`."""
    if isinstance(value, dict):
        yield value
        value = [each for key, each in value.items() if key not in ("const", "enum")]
    if isinstance(value, list):
        for each in value:
            yield from _objects_in(each)


def as_object(schema: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a schema for a model, and whether the answer is wrapped as `result`: a structured answer is an object.

    Definitions move to `$defs`, where every provider expects them. Raises ValueError for other references.
    """
    written: dict[str, Any] = _with_defs(schema)
    definitions = {**written.pop("definitions", {}), **written.pop("$defs", {})}
    is_wrapped = written.get("type") != "object"
    if is_wrapped:
        written = {"type": "object", "properties": {"result": written}, "required": ["result"]}
    return ({**written, "$defs": definitions} if definitions else written), is_wrapped


def _with_defs(part: Any) -> Any:
    if isinstance(part, list):
        return [_with_defs(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    written = {key: _with_defs(value) for key, value in part.items()}
    if isinstance(reference := written.get("$ref"), str):
        if not (found := re.fullmatch(r"#/(?:\$defs|definitions)/([^/]+)", reference)):
            raise ValueError(f"$ref {reference!r}: write '#/$defs/NAME'")
        written["$ref"] = f"#/$defs/{found[1]}"
    return written
