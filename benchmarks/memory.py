"""What a pending call weighs: growth of this process with 10,000 of them waiting."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

from shotclock import Clocks, Operation, Runtime

from .functions import sleep_async
from .isolated import run_isolated
from .process_memory import resident_kib
from .rounds import Size
from .table import Table, compared

LIMIT_S = 90
TITLE = "Memory per pending call"
NOTE = (
    "Growth of the resident size with 10,000 async calls waiting, divided by 10,000; each side in a fresh process. "
    "The peer is a task under `asyncio.timeout`, on one loop; ours is a task there and one on the handler's loop."
)
COUNT = 10_000
SETTLE_S = 1.0


def our_growth(count: int, settle_s: float) -> float:
    async def run() -> float:
        operation = Operation("sleep", sleep_async, isolation="inline")
        clocks = Clocks.of(timeout="50s", grace="0ms")
        async with Runtime() as runtime:
            first = asyncio.ensure_future(runtime.call(operation, {}, clocks))  # everything lazy is in place
            await asyncio.sleep(settle_s)
            return await _grown([runtime.call(operation, {}, clocks) for _ in range(count)], first, settle_s)

    return asyncio.run(run())


def peer_growth(count: int, settle_s: float) -> float:
    async def one() -> None:
        async with asyncio.timeout(50):
            await sleep_async()

    async def run() -> float:
        first = asyncio.ensure_future(one())
        await asyncio.sleep(settle_s)
        return await _grown([one() for _ in range(count)], first, settle_s)

    return asyncio.run(run())


async def _grown(coroutines: list[Coroutine[Any, Any, Any]], first: asyncio.Future[Any], settle_s: float) -> float:
    count = len(coroutines)
    gc.collect()
    before = resident_kib()
    pending = [first, *map(asyncio.ensure_future, coroutines)]
    del coroutines
    # Until all handlers have started; on a healthy machine they take about a second.
    await asyncio.sleep(3 * settle_s)
    gc.collect()
    assert not any(task.done() for task in pending)
    grown = resident_kib() - before
    for task in pending:
        task.cancel()
    await asyncio.wait(pending, timeout=20)
    return grown / count


def measure(size: Size) -> Table:
    counted = size.of((COUNT, SETTLE_S), (COUNT, SETTLE_S), (10, 0.1))
    ours = run_isolated(our_growth, *counted, within_s=40)
    peer = run_isolated(peer_growth, *counted, within_s=40)
    return Table(TITLE, NOTE, [compared("pending async call", ours, "asyncio.timeout task", peer, "{:.1f} KiB")])
