"""How long after its deadline a call is answered: one killed process, and thousands of deadlines at once."""

from __future__ import annotations

import asyncio
import gc
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import TimeoutError as FutureTimeout

import pebble

from shotclock import Clocks, Envelope, Operation, Runtime

from .functions import LONG_S, sleep, sleep_async
from .rounds import percentile
from .table import Bar, Row, Table, absolute

LIMIT_S = 120
TITLE = "Answer after the deadline"
NOTE = (
    "Lateness: from the deadline to the moment the awaiting task has its answer. For a killed process the answer "
    "comes after the kill and its verification (grace 0). *Fire together*: that many async calls are pending, "
    "every one with its deadline in the same millisecond; the peer has as many tasks under `asyncio.timeout_at`, "
    "which cancels on the same loop and promises nothing about a handler that blocks it. Medians over rounds."
)
TIMEOUT_MS = 50
CLOCKS = Clocks.of(timeout=f"{TIMEOUT_MS}ms", grace="0ms")
# The deadline is this far off when the first call is started, and all of them are waiting when it comes.
QUIET_MS, START_US = 500, 300
WHY = (
    "Each cancellation crosses to the handlers' loop and comes back, both loops share one GIL, and each answer is an "
    "envelope that says whose clock fired."
)


# --- one killed process ---------------------------------------------------------------------------------------


async def our_lateness(call: Callable[[], Awaitable[Envelope]], count: int) -> list[float]:
    late = []
    for _ in range(count):
        began = time.perf_counter()
        envelope = await call()
        late.append((time.perf_counter() - began) * 1e3 - TIMEOUT_MS)
        assert envelope.code == "TIMEOUT" and envelope.meta["ending"] == "killed", envelope
    return late


def pebble_lateness(count: int) -> list[float]:
    late = []
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
            f"{peer_name} {percentile(peer, percent):.1f} ms",
        )
        for percent, bar in bars.items()
    ]


async def one_killed_process(count: int) -> list[Row]:
    functions = pebble_lateness(max(20, count // 5))
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


# --- deadlines firing together --------------------------------------------------------------------------------


async def ours_together(runtime: Runtime, count: int, lead_ms: int, endings: Counter[str]) -> list[float]:
    operation = Operation("sleep", sleep_async)
    at = time.monotonic() + lead_ms / 1e3
    answers: list[tuple[Envelope, float]] = []

    async def one() -> None:
        began = time.monotonic()
        timeout_ms = max(1, round((at - began) * 1e3))  # 0 would mean none
        envelope = await runtime.call(operation, {}, Clocks(timeout_ms=timeout_ms, grace_ms=1_000))
        answers.append((envelope, (time.monotonic() - began) * 1e3 - timeout_ms))

    async with asyncio.timeout(lead_ms / 1e3 + 20):
        await asyncio.gather(*(one() for _ in range(count)))
    # Read when all of them are there: what one task does with its answer is not the lateness of the next.
    endings.update(f"{envelope.code} {envelope.meta['ending']}" for envelope, _ in answers)
    return [late for envelope, late in answers if envelope.code == "TIMEOUT"]  # a refusal is early, not punctual


async def asyncio_together(count: int, lead_ms: int) -> list[float]:
    at = asyncio.get_running_loop().time() + lead_ms / 1e3
    late: list[float] = []

    async def one() -> None:
        try:
            async with asyncio.timeout_at(at):
                await sleep_async()
        except TimeoutError:
            late.append((time.monotonic() - at) * 1e3)

    async with asyncio.timeout(lead_ms / 1e3 + 20):
        await asyncio.gather(*(one() for _ in range(count)))
    return late


async def fire_together(count: int, rounds: int, bar: Bar | None) -> list[Row]:
    ours: dict[int, list[float]] = {50: [], 99: []}
    peer: dict[int, list[float]] = {50: [], 99: []}
    endings: Counter[str] = Counter()
    lead_ms = QUIET_MS + count * START_US // 1000
    for _ in range(rounds):
        async with Runtime() as runtime:  # a fresh one: what one round abandons must not count against the next
            await ours_together(runtime, 100, QUIET_MS, Counter())
            gc.collect()
            late = await ours_together(runtime, count, lead_ms, endings)
        gc.collect()
        theirs = await asyncio_together(count, lead_ms)
        for percent in ours:
            ours[percent].append(percentile(late, percent))
            peer[percent].append(percentile(theirs, percent))
    rows = []
    for percent in (50, 99):
        mine, other = statistics.median(ours[percent]), statistics.median(peer[percent])
        held = bar if percent == 99 else None
        rows.append(
            Row(
                f"{count:,} fire together, p{percent}",
                f"{mine:.0f} ms",
                f"asyncio.timeout_at {other:.0f} ms",
                mine / other,
                str(held) if held else "–",
                held.is_met_by(mine / other) if held else None,
                WHY,
            )
        )
    told = ", ".join(f"{number:,} {ending}" for ending, number in endings.most_common())
    what = f"{count:,} fire together, {sum(endings.values()):,} answers in all"
    why = "Handlers that would have reacted were given up on, or calls refused, under load."
    return [*rows, Row(what, told, bar="all cancelled", met=list(endings) == ["TIMEOUT cancelled"], why=why)]


def measure(quick: bool) -> Table:
    async def all_rows() -> list[Row]:
        return [
            *await one_killed_process(40 if quick else 200),
            *await fire_together(1_000, 3 if quick else 5, None),
            *await fire_together(10_000, 1 if quick else 3, Bar(2.2)),
        ]

    return Table(TITLE, NOTE, asyncio.run(all_rows()))
