"""A command's function as a worker calls it: exits, questions and results that do not fit become failures.

A search of its code shows whether it reads the state of its App.
"""

from __future__ import annotations

import dis
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any, get_args

from ..core.arguments import (
    NotSerializable,
    context_name,
    find_conversions,
    misfit,
    plain_schema,
    signature_of,
    to_valid_json,
)
from ..core.catalogue import CommandSpec
from ..core.content_blocks import holds_content, mentions_content
from ..core.errors import Failure, SideEffects
from ..core.signatures import CONTEXT_NAME, declare, read_hints, read_signature, with_context, wraps
from ..core.value_types import JsonObject


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
    @wraps(function)
    def check(given: Mapping[str, object], converted: Mapping[str, object]) -> dict[str, object]:
        return find_conversions(signature_of(function), given, converted)._asdict()

    check.looks_at_arguments = True  # type: ignore[attr-defined]
    return check


def output_schema(function: Callable[..., Any]) -> JsonObject | None:
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


def yields(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def collect_items(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a generator, writes each item to its context, and returns all of them."""
    written = read_signature(function)
    wanted = context_name(function)

    def begin(arguments: tuple[Any, ...], named: JsonObject) -> tuple[Any, Any]:
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
