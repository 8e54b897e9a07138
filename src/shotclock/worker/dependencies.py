"""Dependencies: a parameter that the framework fills for each call, and that no caller sees.

def database(ctx: Context) -> Iterator[Db]: ...

@app.command
def find(name: str, db: Annotated[Db, Depends(database)]) -> list[str]: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any, get_args

from ..core.arguments import context_hint, context_name
from ..core.signatures import CONTEXT_NAME, declare, known_hints, read_parameters, read_signature, with_context, wraps
from ..core.value_types import JsonObject, value
from .running_call import finish


@value
class Dependency:
    """A function whose result, or whose yielded value, fills a parameter."""

    function: Callable[..., Any]


def Depends(function: Callable[..., Any]) -> Any:
    """Fill a parameter with the result of a function: `db: Annotated[Db, Depends(get_db)]`, or as its default."""
    if not callable(function):
        raise TypeError("Depends takes a function")
    return Dependency(function)


def find_dependencies(function: Callable[..., Any]) -> dict[str, Dependency]:
    """Return the dependencies of a function by the names of their parameters."""
    hints = known_hints(function, include_extras=True)
    found = {}
    for parameter in read_parameters(function).parameters.values():
        written = (parameter.default, *get_args(hints.get(parameter.name))[1:])
        if (dependency := next((each for each in written if isinstance(each, Dependency)), None)) is not None:
            found[parameter.name] = dependency
    return found


def dependency_functions(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions of all dependencies of a command, also of those that others need."""
    return [each.function for found in find_dependencies(inspect.unwrap(function)).values() for each in _check(found)]


def supply_dependencies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without its dependencies: they are opened before each call and closed after it."""
    written = read_signature(function)
    dependencies = find_dependencies(function)
    if not dependencies:
        return function
    every = [each for dependency in dependencies.values() for each in _check(dependency)]
    wanted = context_name(function)
    name = function.__name__

    def split(named: JsonObject) -> Any:
        return named.get(wanted) if wanted else named.pop(CONTEXT_NAME)

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def run_async(**named: Any) -> Any:
            context = split(named)
            async with AsyncExitStack() as stack:
                return await function(**named, **await _open(dependencies, context, stack, {}))
            raise _swallowed(name)

        run: Callable[..., Any] = run_async
    else:

        @wraps(function)
        def run(**named: Any) -> Any:
            context = split(named)
            with ExitStack() as stack:
                return function(**named, **_open_for_sync(dependencies, context, stack, {}))
            raise _swallowed(name)

    kept = [parameter for parameter in written.parameters.values() if parameter.name not in dependencies]
    signature = written.replace(parameters=kept)
    if context_hint(function) is None:  # the first that a dependency declares
        hints = (context_hint(each.function) for each in every)
        signature = with_context(signature, next(filter(None, hints), signature.empty))
    declare(run, signature)
    return run


def _check(dependency: Dependency) -> list[Dependency]:
    """Return a dependency and those that it needs. Raises TypeError for a parameter that nothing fills."""
    inner = find_dependencies(dependency.function)
    context = context_name(dependency.function)
    for parameter in read_parameters(dependency.function).parameters.values():
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name not in (*inner, context) and parameter.default is parameter.empty and not is_variable:
            message = f"{parameter.name!r} has no value: it is neither ctx nor filled by Depends(…)"
            raise TypeError(f"Depends({dependency.function.__qualname__}): {message}")
    return [dependency, *(each for needed in inner.values() for each in _check(needed))]


async def _open(
    dependencies: Mapping[str, Dependency], context: Any, stack: AsyncExitStack, opened: dict[Any, Any]
) -> JsonObject:
    """Return the values of the parameters. A function that several of them name is called once."""
    values = {}
    for name, dependency in dependencies.items():
        function = dependency.function
        if function not in opened:
            arguments = await _open(find_dependencies(function), context, stack, opened)
            arguments |= _context_for(function, context)
            if inspect.isasyncgenfunction(function):
                opened[function] = await stack.enter_async_context(asynccontextmanager(function)(**arguments))
            elif inspect.isgeneratorfunction(function):
                opened[function] = stack.enter_context(contextmanager(function)(**arguments))
            else:
                made = function(**arguments)
                opened[function] = await made if inspect.iscoroutine(made) else made
        values[name] = opened[function]
    return values


def _open_for_sync(
    dependencies: Mapping[str, Dependency], context: Any, stack: ExitStack, opened: dict[Any, Any]
) -> JsonObject:
    """Do the same for a sync function: its sync dependencies run in its thread, async ones on the loop."""
    values = {}
    for name, dependency in dependencies.items():
        function = dependency.function
        if function not in opened:
            arguments = _open_for_sync(find_dependencies(function), context, stack, opened)
            arguments |= _context_for(function, context)
            if inspect.isasyncgenfunction(function):
                opened[function] = stack.enter_context(_OnLoop(asynccontextmanager(function)(**arguments)))
            elif inspect.isgeneratorfunction(function):
                opened[function] = stack.enter_context(contextmanager(function)(**arguments))
            else:
                made = function(**arguments)
                opened[function] = finish(made) if inspect.iscoroutine(made) else made
        values[name] = opened[function]
    return values


def _context_for(function: Callable[..., Any], context: Any) -> JsonObject:
    wanted = context_name(function)
    return {} if wanted is None else {wanted: context}


class _OnLoop(AbstractContextManager[Any]):
    """An async context manager for a sync function."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> Any:
        return finish(self._manager.__aenter__())

    def __exit__(self, *raised: object) -> bool | None:
        return finish(self._manager.__aexit__(*raised), is_clean_up=True)  # type: ignore[no-any-return]


def _swallowed(name: str) -> RuntimeError:
    return RuntimeError(f"a dependency of {name} caught an exception of the command and did not raise it again")
