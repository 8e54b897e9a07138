"""Whether a value keeps to a JSON Schema that a file gives, and how much memory what a file says may take.

Runs in a worker: a regular expression in a schema may take for ever, a `$ref` may name a server that does, and each of
many alternatives that do not fit keeps a copy of what did not fit it.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

from ..core.errors import Failure

# --- memory -----------------------------------------------------------------------------------------------
# How much memory a worker may take for what a file makes us compute: a template, a condition, a JSON Schema.
#
# Time is bounded by the clock of the call. Memory has to be bounded by itself, or the machine is on its knees before
# the clock rings.


# Beyond what the worker has: a few outputs several times over. `'a' * 9999999999` ends here.
MEMORY_LIMIT = 512 * 1024 * 1024
TOO_MUCH = f"it takes more than {MEMORY_LIMIT >> 20} MB of memory"


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Asking for more raises MemoryError. A worker does one thing at a time, so this bounds nobody else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm") as statm:
            limit = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_LIMIT
    except OSError:  # macOS has neither this nor a limit that holds
        limit = 0
    if not limit or (soft != resource.RLIM_INFINITY and soft <= limit):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
