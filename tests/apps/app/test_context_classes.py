"""A handler receives the subclass of Context that its parameter is annotated with."""

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

import pytest

from shotclock import App, Context, Depends
from shotclock.apps._command_function import reads_state

app = App("contexts")


class Greeting(Context):
    def greet(self) -> str:
        return f"hello from {self.name}"


@app.command(mutates=False)
def in_process(ctx: Greeting) -> str:
    return ctx.greet()


@app.command(mutates=False, isolation="shared")
async def in_shared(ctx: Greeting | None = None) -> str:
    assert ctx is not None
    return ctx.greet()


@app.command(mutates=False, isolation="inline")
async def on_this_loop(ctx: Greeting) -> str:
    return ctx.greet()


@app.command(mutates=False)
def other_name(count: int, context: Greeting) -> str:
    return context.greet() * count


@app.command(mutates=False)
async def other_name_async(*, context: Greeting | None = None) -> str:
    assert context is not None
    return context.greet()


def greeting(call: Greeting) -> str:
    return call.greet()


@app.command(mutates=False)
def in_dependency(text: Annotated[str, Depends(greeting)]) -> str:
    return text


@app.command(mutates=False)
def beside_dependency(context: Greeting, text: Annotated[str, Depends(greeting)]) -> str:
    return text if context.greet() == text else "another"


@app.command(mutates=False)
def in_generator(context: Greeting) -> Iterator[str]:
    yield context.greet()


@pytest.mark.slow
def test_the_declared_class_is_received_wherever_the_command_runs() -> None:
    async def call_each() -> None:
        async with app:
            for name in ("in_process", "in_shared", "on_this_loop"):
                answer = await app.call(name)
                assert answer.ok and answer.data == {"result": f"hello from {name}"}, answer
            for name in ("other_name_async", "in_dependency", "beside_dependency"):
                answer = await app.call(name)
                assert answer.ok and answer.data == {"result": f"hello from {name}"}, answer
            assert (await app.call("other_name", count=1)).data == {"result": "hello from other_name"}
            assert (await app.call("in_generator")).data == ["hello from in_generator"]

    asyncio.run(call_each())


def test_a_context_under_another_name_is_no_argument_of_the_tool() -> None:
    schemas = {spec.name: spec.input_schema["properties"] for spec in app.catalogue().commands}
    assert list(schemas["other_name"]) == ["count"]
    assert all(schemas[name] == {} for name in ("other_name_async", "in_dependency", "beside_dependency"))


def read_state(call: Greeting) -> Any:
    return call.state


def read_greeting(call: Greeting) -> str:
    return call.greet()


def test_the_state_is_found_behind_a_context_of_any_name() -> None:
    assert reads_state(lambda ctx: ctx.state)

    def with_helper(call: Greeting) -> Any:
        return read_state(call)

    def without(call: Greeting) -> str:
        return read_greeting(call)

    assert reads_state(with_helper) and not reads_state(without)


def test_a_second_context_is_refused() -> None:
    with pytest.raises(TypeError, match="'ctx' receives the context, so 'context' cannot be one"):

        @app.command
        def wrong(context: Greeting, ctx: Context) -> None: ...
