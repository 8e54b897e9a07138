"""A command's function as a worker calls it: exits, questions and results that do not fit become failures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..core.arguments import NotSerializable, find_conversions, misfit, plain_schema, signature_of
from ..core.catalogue import CommandSpec
from ..core.content_blocks import holds_content, mentions_content
from ..core.errors import Failure, SideEffects
from ..core.signatures import read_hints, wraps


def around(
    function: Callable[..., Any],
    *,
    supply: Callable[[], Mapping[str, Any]] = dict,
    guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    change: Callable[[Any], Any] = lambda result: result,
) -> Callable[..., Any]:
    """Return the function with supplied arguments, called inside of a guard, and with its result changed."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def run_async(*arguments: Any, **named: Any) -> Any:
            with guard():
                return change(await function(*arguments, **named, **supply()))

        return run_async

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        with guard():
            return change(function(*arguments, **named, **supply()))

    return run


def refuse_questions(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Make `input()` in a command the failure INPUT_REQUIRED: commands have no terminal."""

    @contextmanager
    def guard() -> Iterator[None]:
        try:
            yield
        except EOFError as error:
            if str(error) != "EOF when reading a line":  # not from `input`
                raise
            message = f"{name} asks a question, and there is no terminal to answer it"
            raise Failure("INPUT_REQUIRED", message, side_effects=SideEffects.UNKNOWN) from None

    return around(function, guard=guard)


def keep_exit_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Make `sys.exit(3)` in a command a failure with that exit code, and `sys.exit(text)` one with that message."""

    @contextmanager
    def guard() -> Iterator[None]:
        try:
            yield
        except SystemExit as error:
            if error.code is None or error.code == 0:
                raise  # it reports success, which is no answer
            if not isinstance(error.code, int):
                raise Failure("GENERAL_ERROR", str(error.code)) from None
            exit_code = error.code & 0xFF or 1  # as the system cuts it
            failure = Failure("GENERAL_ERROR", f"{name} left with exit code {exit_code}")
            failure.exit_code = exit_code
            raise failure from None

    return around(function, guard=guard)


def check_result(function: Callable[..., Any], spec: CommandSpec) -> Callable[..., Any]:
    """Make a result that does not fit the declared schema a failure: a client would discard it."""
    schema = spec.output_schema
    if schema is None:
        return function

    def check(result: object) -> object:
        if holds_content(result):
            how = "put its type into the return annotation, as in -> Image or -> list[str | Image]"
            raise Failure("RESULT_INVALID", f"{spec.name} returned content and does not declare it: {how}")
        try:
            reason = misfit(result, schema)
        except NotSerializable:  # reported when the result is sent
            return result
        if reason is None:
            return result
        raise Failure("RESULT_INVALID", f"{spec.name} did not return what it declares: {reason}", data=result)

    return around(function, change=check)


def argument_checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that only checks the arguments."""

    @wraps(function)
    def check(given: Mapping[str, object], converted: Mapping[str, object]) -> dict[str, object]:
        return find_conversions(signature_of(function), given, converted)._asdict()

    check.looks_at_arguments = True  # type: ignore[attr-defined]
    return check


def output_schema(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the schema of the return type, if it has one. A list of anything has none: it may hold content."""
    annotation = read_hints(function).get("return")
    if annotation in (None, Any, list, list[Any], tuple) or mentions_content(annotation):
        return None
    if (schema := plain_schema(annotation)) is not None:
        return schema
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(annotation).json_schema(mode="serialization")
    except Exception:  # pydantic knows no schema of this type
        return None
