"""Search of a function's code for reads of the state of its App."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from ..core.arguments import context_name

STATE_NAMES = frozenset({"state", "lifespan_context"})
_UNANNOTATED = "context"  # a parameter of helper functions, beside those that receive a command's context


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
    for name in {name for code in codes for name in _loaded(code, "LOAD_GLOBAL", "LOAD_NAME")}:
        helper = inspect.unwrap(found) if callable(found := function.__globals__.get(name)) else None
        if isinstance(helper, FunctionType) and helper.__globals__ is function.__globals__:
            parameters = helper.__code__.co_varnames[: helper.__code__.co_argcount + helper.__code__.co_kwonlyargcount]
            if (_UNANNOTATED in parameters or takes_context(helper)) and _reads(helper, seen):
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
    return not STATE_NAMES.isdisjoint(code.co_names) and not STATE_NAMES.isdisjoint(
        _loaded(code, "LOAD_ATTR", "LOAD_METHOD")
    )


def _loaded(code: CodeType, *opnames: str) -> set[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname in opnames}
