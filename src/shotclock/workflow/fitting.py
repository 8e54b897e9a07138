"""Whether a value keeps to a JSON Schema that a file gives.

Runs in a worker: a regular expression in a schema may take for ever, and a `$ref` may name a server that does.
"""

from __future__ import annotations

from typing import Any


def misfit(schema: dict[str, Any], value: Any) -> str | None:
    """What is wrong, or None."""
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        Draft202012Validator.check_schema(schema)
        # With a registry of its own, which is empty, nothing is fetched from anywhere.
        validator = Draft202012Validator(schema, registry=Registry())
        problem = next(iter(validator.iter_errors(value)), None)
    except SchemaError as error:
        return f"it is no JSON Schema: {error.message[:200]}"
    except Unresolvable as error:
        return f"its $ref cannot be followed: {str(error)[:200]}"
    return None if problem is None else f"{problem.json_path}: {problem.message[:200]}"
