"""Commands that yield: each item is sent to the caller at once, and the result is the list of all items."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any, get_args

from ..core.arguments import context_name, to_valid_json
from ..core.signatures import CONTEXT_NAME, declare, read_signature, with_context, wraps


def yields(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def collect_items(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a generator, writes each item to its context, and returns all of them."""
    written = read_signature(function)
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

    signature = with_context(written) if wanted is None else written
    items = get_args(written.return_annotation)  # of `Iterator[T]` or the like
    declare(run, signature.replace(return_annotation=list[items[0]] if items else list[Any]))  # type: ignore[valid-type]
    return run
