"""Search of a function's code for reads of the state of its App."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from .arguments import context_name

STATE_NAMES = frozenset({"state", "lifespan_context"})
_HELPERS_NAME = "context"  # of a parameter of helper functions, also without annotation


def reads_state(function: Callable[..., Any]) -> bool:
    """Return whether a function with a context, or a helper of its module that takes one, reads the state."""
    return takes_context(function) and _reads(inspect.unwrap(function), set())


def takes_context(function: Callable[..., Any]) -> bool:
    return context_name(function) is not None


def _reads(function: Callable[..., Any], seen: set[object]) -> bool:
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    codes = list(codes_of(function.__code__))
    if any(_loads_state(code) for code in codes):
        return True
    for name in {name for code in codes for name in code.co_names}:
        found = function.__globals__.get(name)
        helper = inspect.unwrap(found) if isinstance(found, FunctionType) else None
        if not isinstance(helper, FunctionType) or helper.__globals__ is not function.__globals__:
            continue
        if (takes_context(helper) or _HELPERS_NAME in helper.__code__.co_varnames) and _reads(helper, seen):
            return True
    return False


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def _loads_state(code: CodeType) -> bool:
    """Return whether the code reads an attribute of that name: a global variable may have it as well."""
    if not STATE_NAMES.intersection(code.co_names):
        return False
    loads = ("LOAD_ATTR", "LOAD_METHOD")
    return any(each.opname in loads and each.argval in STATE_NAMES for each in dis.get_instructions(code))
