"""How long after its deadline the call of a killed process is answered."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import TimeoutError as FutureTimeout

from shotclock import Clocks, Envelope, Operation, Runtime

from .functions import LONG_S, sleep
from .rounds import Size, find_peer, percentile
from .table import Bar, Row, Table, absolute

pebble = find_peer("pebble")

LIMIT_S = 120
TITLE = "Answer after the deadline"
NOTE = (
    "The time from the deadline until the awaiting task has its answer. For a killed process the answer comes "
    "after the kill and its verification (grace 0)."
)
TIMEOUT_MS = 50
CLOCKS = Clocks.of(timeout=f"{TIMEOUT_MS}ms", grace="0ms")


async def our_lateness(call: Callable[[], Awaitable[Envelope]], count: int) -> list[float]:
    late = []
    for _ in range(count):
        began = time.perf_counter()
        envelope = await call()
        late.append((time.perf_counter() - began) * 1e3 - TIMEOUT_MS)
        assert envelope.code == "TIMEOUT" and envelope.meta["ending"] == "killed", envelope
    return late


def pebble_lateness(count: int) -> list[float]:
    late: list[float] = []
    if pebble is None:
        return late
    with pebble.ProcessPool(max_workers=1) as pool:
        pool.schedule(time.sleep, args=(0,)).result(10)
        for _ in range(count):
            began = time.perf_counter()
            try:
                pool.schedule(time.sleep, args=(LONG_S,), timeout=TIMEOUT_MS / 1e3).result(10)
            except FutureTimeout:
                pass
            late.append((time.perf_counter() - began) * 1e3 - TIMEOUT_MS)
        pool.stop()
    return late


def subprocess_lateness(count: int) -> list[float]:
    late = []
    for _ in range(count):
        began = time.perf_counter()
        try:
            subprocess.run(["sleep", f"{LONG_S:.0f}"], timeout=TIMEOUT_MS / 1e3)
        except subprocess.TimeoutExpired:
            pass
        late.append((time.perf_counter() - began) * 1e3 - TIMEOUT_MS)
    return late


def killed_rows(what: str, late: list[float], peer_name: str, peer: list[float]) -> list[Row]:
    bars = {50: Bar(10, "ms"), 99: Bar(50, "ms")}
    return [
        absolute(
            f"{what}, p{percent}",
            percentile(late, percent),
            "{:.1f} ms",
            bar,
            f"{peer_name} {percentile(peer, percent):.1f} ms" if peer else "–",
        )
        for percent, bar in bars.items()
    ]


async def one_killed_process(count: int) -> list[Row]:
    functions = pebble_lateness(count if count < 20 else max(20, count // 5))
    commands = subprocess_lateness(count)
    operation = Operation("sleep", sleep)
    async with Runtime(workers=2, preload=["benchmarks.functions"]) as runtime:
        await our_lateness(lambda: runtime.run(["sleep", f"{LONG_S:.0f}"], CLOCKS), 3)
        ours = await our_lateness(lambda: runtime.run(["sleep", f"{LONG_S:.0f}"], CLOCKS), count)
        await runtime.call(operation, {}, Clocks.of("2s", grace="0ms"))  # the pool comes up
        workers = await our_lateness(lambda: runtime.call(operation, {}, CLOCKS), count)
    return [
        *killed_rows("function in a worker", workers, "pebble", functions),
        *killed_rows("command", ours, "subprocess.run", commands),
    ]


def measure(size: Size) -> Table:
    return Table(TITLE, NOTE, asyncio.run(one_killed_process(size.of(200, 40, 2))))
