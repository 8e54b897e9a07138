"""Which functions read the state of their App, as far as their code shows it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from shotclock.apps._command_function import reads_state

state = {"a": "variable of that name"}


def directly(ctx: Any) -> Any:
    return ctx.state


def as_fastmcp_writes_it(ctx: Any) -> Any:
    return ctx.request_context.lifespan_context["db"]


def inside(ctx: Any) -> Any:
    return [each for each in (lambda: ctx.state)()]


def helper(context: Any) -> Any:
    return context.state


def by_helper(ctx: Any) -> Any:
    return helper(ctx)


def recursive(ctx: Any) -> Any:
    return recursive(ctx) if ctx else by_helper(ctx)


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return run


decorated = decorate(directly)


async def in_async(ctx: Any) -> Any:
    return ctx.state


def without_context(order: Any) -> Any:
    return order.state


def variable(ctx: Any) -> Any:
    return ctx.name, state


def helper_without_context(order: Any) -> Any:
    return order.state


def other_helper(ctx: Any) -> Any:
    return helper_without_context(ctx.name)


def stored(ctx: Any) -> None:
    ctx.name.state = 1


def test_reads_of_the_state_are_found_also_in_helpers_and_inner_functions() -> None:
    for function in (directly, as_fastmcp_writes_it, inside, by_helper, recursive, decorated, in_async):
        assert reads_state(function), function.__name__


def test_other_things_of_that_name_are_not_taken_for_the_state() -> None:
    for function in (without_context, variable, other_helper, stored):
        assert not reads_state(function), function.__name__
