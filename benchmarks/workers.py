"""Functions in warm worker processes: calls per second with two workers, and the time of one call."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from shotclock import Clocks, Operation, Runtime

from .functions import noop
from .rounds import Figures, Size, find_peer, take_turns
from .table import Bar, Row, Table, compared

LIMIT_S = 90
TITLE = "Process-isolated no-op, two workers"
NOTE = (
    "The same no-op function in two warm processes. *Throughput*: all calls handed over at once, until the last "
    "result is in. *Sequential*: one call after the other. Peers that have a timeout are given one; "
    "`multiprocessing.Pool` has none."
)
# What any single wait for a peer is bounded by.
WAIT_S = 30
CLOCKS = Clocks.of(timeout=f"{WAIT_S}s", grace="0ms")
OPERATION = Operation("noop", noop)

WHY = (
    "The caller's loop, one core, does for each call what the peers leave out: clocks, an envelope, a place in the "
    "queue that can time out; and the worker arms a bell for its supervisor and checks the arguments."
)

Start = Callable[[], Any]


def start_with_pebble(pool: Any) -> Callable[[], object]:
    future = pool.schedule(noop, args=(1,), timeout=WAIT_S)
    return lambda: future.result(WAIT_S)


def start_with_pool(pool: Any) -> Callable[[], object]:
    result = pool.apply_async(noop, (1,))
    return lambda: result.get(WAIT_S)


def peer_throughput(start: Start, count: int) -> float:
    began = time.perf_counter()
    for wait in [start() for _ in range(count)]:
        wait()
    return count / (time.perf_counter() - began)


def peer_latency(start: Start, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        start()()
    return (time.perf_counter() - began) / count


async def our_throughput(runtime: Runtime, count: int) -> float:
    began = time.perf_counter()
    envelopes = await asyncio.gather(*(runtime.call(OPERATION, {"a": 1}, CLOCKS) for _ in range(count)))
    taken = time.perf_counter() - began
    assert all(envelope.ok for envelope in envelopes)
    return count / taken


async def our_latency(runtime: Runtime, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        await runtime.call(OPERATION, {"a": 1}, CLOCKS)
    return (time.perf_counter() - began) / count


async def _measure(peers: dict[str, Start], rounds: int, count: int) -> Table:
    async with Runtime(workers=2, most_workers=2, preload=["benchmarks.functions"]) as runtime:
        assert (await runtime.call(OPERATION, {"a": 1}, CLOCKS)).ok
        rates = await take_turns(
            {
                "shotclock": lambda: our_throughput(runtime, count),
                **{name: partial(peer_throughput, start, count) for name, start in peers.items()},
            },
            rounds,
        )
        latencies = await take_turns(
            {
                "shotclock": lambda: our_latency(runtime, count // 10),
                **{name: partial(peer_latency, start, count // 10) for name, start in peers.items()},
            },
            rounds,
        )
    bars = {"pebble": Bar(1.0, at_least=True)}
    rows = [
        compared(
            "throughput",
            rates["shotclock"],
            name,
            rates[name],
            "{:,.0f}/s",
            bars.get(name),
            WHY,
            rates.ratio("shotclock", name),
        )
        for name in peers
    ]
    return Table(TITLE, NOTE, rows + [_latency_row(latencies, name) for name in peers])


def _latency_row(latencies: Figures, name: str) -> Row:
    ours, peer = latencies["shotclock"] * 1e6, latencies[name] * 1e6
    return compared("sequential", ours, name, peer, "{:.0f} µs", ratio=latencies.ratio("shotclock", name))


def measure(size: Size) -> Table:
    # Forked first, before this process has threads. Each pool is closed by the end of this process.
    fork_pool = multiprocessing.get_context("fork").Pool(2)
    billiard, pebble = find_peer("billiard"), find_peer("pebble")
    with contextlib.ExitStack() as ending:
        peers: dict[str, Start] = {}
        if pebble is not None:
            pebble_pool = pebble.ProcessPool(max_workers=2)
            ending.callback(pebble_pool.stop)
            peers["pebble"] = lambda: start_with_pebble(pebble_pool)
        if billiard is not None:
            billiard_pool = billiard.Pool(2)
            ending.callback(billiard_pool.terminate)
            peers["billiard"] = lambda: start_with_pool(billiard_pool)
        ending.callback(fork_pool.terminate)
        peers["multiprocessing"] = lambda: start_with_pool(fork_pool)
        return asyncio.run(_measure(peers, *size.of((15, 1_000), (5, 1_000), (1, 10))))
