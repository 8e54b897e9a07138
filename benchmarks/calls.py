"""What a call costs that does nothing: an async no-op through the chokepoint, and through the guard alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from shotclock import Clocks, Operation, Runtime
from shotclock.process.context import Scope
from shotclock.runtime.call import admit
from shotclock.runtime.loop_call import DeadlineTimers, LoopCall, LoopCarrier, SharedLoopCarrier
from shotclock.runtime.loop_threads import LoopThreads

from .functions import noop_async
from .rounds import take_turns
from .table import Bar, Table, compared

LIMIT_S = 90
TITLE = "Async no-op call"
NOTE = (
    "Time per call. `asyncio.timeout` is `async with asyncio.timeout(5): await noop()` on the caller's own loop. "
    "*Chokepoint* is `Runtime.call` with validation, an envelope and one observer; *guard alone* is what bounds the "
    "handler, without them. *Own loop* (the default) runs handlers in another thread, where a blocked loop stops "
    "nobody's answer; *shared loop* is `Runtime(share_loop=True)`, which gives that up. *Sequential* is one call "
    "after the other; *concurrent* is 1,000 in flight at a time, on both sides. One call after the other on the own "
    "loop is no row here: two wake-ups of a thread are the price of that loop, and many times what the peer costs."
)

SEQUENTIAL, CONCURRENT = "sequential", "1,000 concurrent"
CLOCKS = Clocks.of(timeout="5s", grace="0ms")
OPERATION = Operation("noop", noop_async)

WHY = {
    "chokepoint, shared loop": "Clocks, validation, a task, a bell and an envelope around a handler that does nothing.",
    "guard alone, shared loop": "A task of its own and a future beside the bell.",
}
WHY_CONCURRENT = "Two tasks, two letters between two loops and one GIL for each call, where the peer has one task."

Call = Callable[[], Awaitable[object]]


async def bare() -> None:
    async with asyncio.timeout(5):
        await noop_async(1)


async def noop_guard(operation: Operation, arguments: Mapping[str, object]) -> None:
    await noop_async(1)


def guard_alone(runtime: Runtime, carrier: LoopCarrier | SharedLoopCarrier) -> Call:
    """What bounds a handler, with everything that can be prepared prepared once: no validation, no envelope."""
    timers = DeadlineTimers(asyncio.get_running_loop())
    admission = admit("noop", Clocks.of(timeout="1h", grace="0ms"))
    scope = Scope(admission.bound.bell, 0, admission.name, admission)

    def call() -> Awaitable[object]:
        return LoopCall(
            runtime, timers, carrier, admission, OPERATION, {}, scope, guards=(noop_guard,), guards_only=True
        ).wait()

    return call


def chokepoint(runtime: Runtime) -> Call:
    return lambda: runtime.call(OPERATION, {"a": 1}, CLOCKS)


async def one_after_the_other(call: Call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        await call()
    return (time.perf_counter() - began) / count * 1e6


async def in_flight_together(call: Call, count: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(count)))
    return (time.perf_counter() - began) / count * 1e6


async def _measure(rounds: int) -> Table:
    hosts = LoopThreads("bench-loop")
    observers = [lambda envelope: None]
    async with Runtime(observers=observers) as own, Runtime(observers=observers, share_loop=True) as shared:
        for runtime in (own, shared):
            envelope = await runtime.call(OPERATION, {"a": 1}, CLOCKS)
            assert envelope.ok, envelope
        ours = {
            "chokepoint, own loop": chokepoint(own),
            "chokepoint, shared loop": chokepoint(shared),
            "guard alone, own loop": guard_alone(own, LoopCarrier(hosts, 0)),
            "guard alone, shared loop": guard_alone(shared, SharedLoopCarrier(asyncio.get_running_loop())),
        }
        sides = {"bare": bare, **ours}
        taken = {
            SEQUENTIAL: {
                name: lambda c=call: one_after_the_other(c, 500)
                for name, call in sides.items()
                if "own loop" not in name
            },
            CONCURRENT: {name: lambda c=call: in_flight_together(c, 1_000) for name, call in sides.items()},
        }
        figures = {manner: await take_turns(turns, rounds) for manner, turns in taken.items()}
    await asyncio.to_thread(hosts.close)
    rows = []
    for name in ours:
        bar = Bar(8) if name.startswith("chokepoint") else Bar(2)
        for manner, figure in figures.items():
            if name not in figure:
                continue
            why = WHY[name] if manner == SEQUENTIAL else WHY_CONCURRENT
            what, peer, ratio = f"{name}, {manner}", "asyncio.timeout", figure.ratio(name, "bare")
            rows.append(compared(what, figure[name], peer, figure["bare"], "{:.1f} µs", bar, why, ratio))
    return Table(TITLE, NOTE, rows)


def measure(quick: bool) -> Table:
    return asyncio.run(_measure(5 if quick else 31))
