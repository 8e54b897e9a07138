"""A process of its own for every call, forked from the zygote, against a plain fork of this process."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections import defaultdict
from functools import partial
from multiprocessing.connection import Connection

from shotclock import Clocks, Operation, Runtime

from .functions import noop
from .rounds import Figures, Size, take_turns
from .table import Bar, Row, Table, compared

LIMIT_S = 60
TITLE = "Fresh process per call"
NOTE = (
    "Calls one after the other, each in a new process: from the request until the result is there and the process "
    "is gone. Shotclock's process is forked and guarded by a supervisor (a pool of one whose worker is killed "
    "after each call; two supervisors take turns). The peer is `multiprocessing`'s fork of this process with the "
    "result through a pipe and no timeout. *Until the result* leaves out the end of the process on both sides."
)
WHY = (
    "As much is forked, touched and torn down as by the peer, and a supervisor hears of it, kills and verifies: more "
    "work in all, of which two cores do a part at the same time."
)
WAIT_S = 10.0
CLOCKS = Clocks.of(timeout="10s", grace="0ms")
OPERATION = Operation("noop", noop)
IN_A_ROW = 5


async def our_call(runtime: Runtime) -> tuple[float, float]:
    """One call in the only worker, which is then killed; the pool has the next one forked meanwhile."""
    began = time.perf_counter()
    envelope = await runtime.call(OPERATION, {"a": 1}, CLOCKS)
    answered = time.perf_counter()
    assert envelope.ok, envelope
    (worker,) = runtime._children.pool()._all
    worker.kill("fresh")
    async with asyncio.timeout(WAIT_S):
        await asyncio.shield(worker.gone)
    return answered - began, time.perf_counter() - began


def send_noop(pipe: Connection) -> None:
    pipe.send(noop(1))


async def peer_call() -> tuple[float, float]:
    fork = multiprocessing.get_context("fork")
    began = time.perf_counter()
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=send_noop, args=(theirs,))
    process.start()
    assert ours.poll(WAIT_S) and ours.recv() == 1
    answered = time.perf_counter()
    process.join(WAIT_S)
    ended = time.perf_counter()
    ours.close()
    theirs.close()
    return answered - began, ended - began


async def _measure(rounds: int) -> Table:
    results: dict[str, list[float]] = defaultdict(list)
    sides = ("shotclock", "fork")
    async with Runtime(workers=1, most_workers=1, preload=["benchmarks.functions"]) as runtime:

        async def turn(name: str) -> float:
            whole, until = [], []
            for number in range(IN_A_ROW + 1):
                until_result, until_gone = await (our_call(runtime) if name == "shotclock" else peer_call())
                if number:  # the pool had the time to fork the first one before it was asked for
                    until.append(until_result)
                    whole.append(until_gone)
            results[name].append(statistics.median(until) * 1e3)
            return statistics.median(whole) * 1e3

        whole = await take_turns({name: partial(turn, name) for name in sides}, rounds)
    result = Figures({name: taken[1:] for name, taken in results.items()})  # the first round warms up
    peer, shown = "multiprocessing fork", "{:.2f} ms"

    def row(what: str, figures: Figures, limit: float) -> Row:
        ours, theirs = (figures[name] for name in sides)
        return compared(what, ours, peer, theirs, shown, Bar(limit), WHY, figures.ratio(*sides))

    return Table(
        TITLE,
        NOTE,
        [row("until gone", whole, 1.4), row("until the result", result, 0.6)],
    )


def measure(size: Size) -> Table:
    return asyncio.run(_measure(size.of(50, 10, 1)))
