"""Agents of `ai` steps, forked for many runs from one process that has imported pydantic-ai and the SDKs: that takes
seconds of CPU, which every run would take anew. Everything else about them is as ever."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from shotclock.calls.preloaded_zygote import Preloaded, Program
from shotclock.calls.runtime import Runtime
from shotclock.flows.steps.ai import AiProvider
from shotclock.supervise import ipc
from shotclock.supervise.zygote import start_clean_zygote

UP_WITHIN_S = 60.0
GONE_WITHIN_S = 10.0


class SharedZygote(Preloaded):
    """A zygote that a runtime does not end when it closes."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


@contextlib.contextmanager
def warm_agents(*providers: str) -> Iterator[None]:
    """Have the agents of all runs forked from one process, which is up when this is entered and gone when it is left.
    Nothing of a run is in its environment."""
    clean, pid = start_clean_zygote()
    shared = SharedZygote(
        lambda note, fds: ipc.send_fds(clean, note, fds),
        program=Program(),
        modules=[
            "asyncio",
            "anyio._backends._asyncio",
            # A quarter of a second, which each agent would need.
            "genai_prices.data",
            "openai.resources.chat",
            "openai.resources.responses",
            "shotclock.flows.steps._ai_agent",
            *(f"pydantic_ai.{part}.{name}" for name in providers for part in ("models", "providers")),
        ],
    )

    async def come_up() -> None:
        async with Runtime(preloaded=shared, workers=1) as runtime:
            assert await runtime.warm_up(UP_WITHIN_S)

    try:
        asyncio.run(come_up())
        with mock.patch.object(AiProvider, "preloaded", shared):
            yield
    finally:
        shared.end()
        clean.close()
        asyncio.run(_collect(pid))


async def _collect(pid: int) -> None:
    async with asyncio.timeout(GONE_WITHIN_S):
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            await asyncio.sleep(0.02)
