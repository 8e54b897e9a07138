"""The cost of a call that does nothing, on the caller's own loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from shotclock import Clocks, Operation, Runtime

from .functions import noop_async
from .rounds import Size, take_turns
from .table import Bar, Table, compared

LIMIT_S = 90
TITLE = "Inline no-op call"
NOTE = (
    "Time per call, 1,000 in flight at a time on both sides. `asyncio.timeout` is `async with asyncio.timeout(5): "
    'await noop()`; ours is `Runtime.call` of an operation with `isolation="inline"`: validation, a limit, an '
    "envelope and one observer."
)
COUNT = 1_000
CLOCKS = Clocks.of(timeout="5s", grace="0ms")
OPERATION = Operation("noop", noop_async, isolation="inline")
WHY = "A task of its own for the handler, limits, validation and an envelope."


async def bare() -> None:
    async with asyncio.timeout(5):
        await noop_async(1)


async def in_flight_together(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(COUNT)))
    return (time.perf_counter() - began) / COUNT * 1e6


async def _measure(rounds: int) -> Table:
    async with Runtime(observers=[lambda envelope: None]) as runtime:
        envelope = await runtime.call(OPERATION, {"a": 1}, CLOCKS)
        assert envelope.ok, envelope
        figures = await take_turns(
            {
                "ours": lambda: in_flight_together(lambda: runtime.call(OPERATION, {"a": 1}, CLOCKS)),
                "bare": lambda: in_flight_together(bare),
            },
            rounds,
        )
    ratio = figures.ratio("ours", "bare")
    row = compared(
        "1,000 concurrent", figures["ours"], "asyncio.timeout", figures["bare"], "{:.1f} µs", Bar(6), WHY, ratio
    )
    return Table(TITLE, NOTE, [row])


def measure(size: Size) -> Table:
    return asyncio.run(_measure(size.of(31, 5, 1)))
