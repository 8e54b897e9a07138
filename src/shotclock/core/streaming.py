"""Commands that yield: each item is sent to the caller at once, and the result is the list of all items."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable
from functools import wraps
from typing import Any

from .arguments import CONTEXT_NAME, context_name, to_valid_json


def yields(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def collect_items(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a generator, writes each item to its context, and returns all of them."""
    written = inspect.signature(function)
    wanted = context_name(function)

    def begin(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        context = named[wanted] if wanted else named.pop(CONTEXT_NAME)
        return context, function(*arguments, **named)

    if inspect.isasyncgenfunction(function):

        @wraps(function)
        async def run_async(*arguments: Any, **named: Any) -> list[Any]:
            context, generator = begin(arguments, named)
            items = []
            async for item in generator:
                items.append(item)
                context.write(json.dumps(to_valid_json(item)[0]))
            return items

        run: Callable[..., Any] = run_async
    else:

        @wraps(function)
        def run(*arguments: Any, **named: Any) -> list[Any]:
            context, generator = begin(arguments, named)
            items = []
            for item in generator:
                items.append(item)
                context.write(json.dumps(to_valid_json(item)[0]))
            return items

    parameters = list(written.parameters.values())
    if wanted is None:
        place = next((n for n, each in enumerate(parameters) if each.kind is each.VAR_KEYWORD), len(parameters))
        parameters.insert(place, inspect.Parameter(CONTEXT_NAME, inspect.Parameter.KEYWORD_ONLY))
    run.__signature__ = written.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {**function.__annotations__, "return": _list_of_items(function)}
    return run


def _list_of_items(function: Callable[..., Any]) -> Any:
    """Return the type of the result: `list[T]` of a function that declares `Iterator[T]` or the like."""
    try:
        declared = typing.get_type_hints(function, include_extras=True).get("return")
    except NameError:  # reported with the other mistakes of the signature
        declared = None
    items = typing.get_args(declared)
    return list[items[0]] if items else list[Any]  # type: ignore[valid-type]
