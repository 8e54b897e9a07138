"""A handler receives the subclass of Context that its `ctx` is annotated with."""

import asyncio

import pytest

from shotclock import App, Context

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


@pytest.mark.slow
def test_the_declared_class_is_received_wherever_the_command_runs() -> None:
    async def call_each() -> None:
        async with app:
            for name in ("in_process", "in_shared", "on_this_loop"):
                answer = await app.call(name)
                assert answer.ok and answer.data == {"result": f"hello from {name}"}, answer

    asyncio.run(call_each())


def test_a_context_under_another_name_is_refused() -> None:
    with pytest.raises(TypeError, match="rename the parameter 'context' to 'ctx'"):

        @app.command
        def wrong(context: Greeting) -> None: ...
