"""Whether a value keeps to a JSON Schema that a file gives.

Runs in a worker: a regular expression in a schema may take for ever, a `$ref` may name a server that does, and each of
many alternatives that do not fit keeps a copy of what did not fit it.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import Failure
from .memory_limit import TOO_MUCH, bounded_memory


def misfit(schema: dict[str, Any], value: Any) -> str | None:
    """What is wrong, or None. Raises Failure where that takes too much to find out."""
    from jsonschema import SchemaError
    from referencing.exceptions import Unresolvable

    try:
        with bounded_memory():
            return _misfit(schema, value)
    except SchemaError as error:
        return f"it is not a JSON Schema: {error.message[:200]}"
    except Unresolvable as error:
        return f"its $ref cannot be followed: {str(error)[:200]}"
    except MemoryError:
        raise Failure("OUTPUT_INVALID", TOO_MUCH) from None


def _misfit(schema: dict[str, Any], value: Any) -> str | None:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    Draft202012Validator.check_schema(schema)
    # With a registry of its own, which is empty, nothing is fetched from anywhere.
    validator = Draft202012Validator(schema, registry=Registry())
    problem = next(iter(validator.iter_errors(value)), None)
    return None if problem is None else f"{problem.json_path}: {problem.message[:200]}"
