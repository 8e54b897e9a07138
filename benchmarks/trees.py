"""How long it takes to get rid of a tree of 53 processes, a daemon in a session of its own among them."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import time
import uuid

from shotclock import Clocks, Runtime

from .functions import LONG_S
from .isolated import kill_marked, left_with_mark
from .rounds import Size
from .table import Bar, Row, Table, absolute

LIMIT_S = 90
TITLE = "Killing a tree of 53 processes"
NOTE = (
    "A shell, 50 sleeping children, and a daemon (double fork, its own session) with a child of its own. The time "
    "runs from the timeout (grace 0) to the answer. Then all processes of the machine are searched for survivors, "
    "which carry a mark in their environment: at once for shotclock, after another 200 ms for the peers, which do "
    "not wait. `killpg` is `Popen(start_new_session=True)`, `wait(timeout)`, `os.killpg`."
)
SIZE = 53
TREE = f"""
for i in $(seq 50); do sleep {LONG_S:.0f} & done
( setsid bash -c 'sleep {LONG_S:.0f} & wait' & )
wait
"""
TIMEOUT_MS = 700
# By then the tree stands; counted shortly before the bell.
COUNT_AFTER_S = 0.5
# Peers do not wait for what they killed; we look at once at ours, and give theirs this long to be gone.
SETTLE_S = 0.2


class Killed:
    """What one side achieved, round by round."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self.left: list[int] = []

    def note(self, began: float, mark: str, settle_s: float) -> None:
        self.late_ms.append((time.perf_counter() - began) * 1e3 - TIMEOUT_MS)
        self.left.append(kill_marked(mark, settle_s=settle_s))

    @property
    def summary(self) -> str:
        return f"{statistics.median(self.late_ms):.1f} ms, {max(self.left)} left"


async def kill_ours(runtime: Runtime, killed: Killed) -> int:
    mark = uuid.uuid4().hex
    began = time.perf_counter()
    clocks = Clocks.of(timeout=f"{TIMEOUT_MS}ms", grace="0ms")
    call = asyncio.ensure_future(runtime.run(["bash", "-c", TREE], clocks, env={"BENCH_MARK": mark}))
    await asyncio.sleep(COUNT_AFTER_S)
    stood = len(left_with_mark(mark))
    envelope = await call
    killed.note(began, mark, 0)
    assert envelope.code == "TIMEOUT" and not envelope.meta["survivors"], envelope
    return stood


def kill_leader(killed: Killed) -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "BENCH_MARK": mark}
    began = time.perf_counter()
    try:
        # Output to nowhere: with a pipe it would wait for whoever of the tree still holds it.
        subprocess.run(["bash", "-c", TREE], env=environment, stdout=subprocess.DEVNULL, timeout=TIMEOUT_MS / 1e3)
    except subprocess.TimeoutExpired:
        pass
    killed.note(began, mark, SETTLE_S)


def kill_group(killed: Killed) -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "BENCH_MARK": mark}
    began = time.perf_counter()
    process = subprocess.Popen(["bash", "-c", TREE], env=environment, start_new_session=True)
    try:
        process.wait(TIMEOUT_MS / 1e3)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)
    killed.note(began, mark, SETTLE_S)


async def _measure(rounds: int) -> list[Row]:
    ours, leader, group = Killed(), Killed(), Killed()
    async with Runtime() as runtime:
        await runtime.run(["true"])
        for _ in range(rounds):
            stood = await kill_ours(runtime, ours)
            assert stood == SIZE, f"{stood} processes stood before the bell"
            kill_leader(leader)
            kill_group(group)
    bar = Bar(60, "ms")
    left = max(ours.left)
    rows = [
        absolute(
            "gone and answered, median", statistics.median(ours.late_ms), "{:.1f} ms", bar, f"killpg {group.summary}"
        ),
        absolute("gone and answered, worst", max(ours.late_ms), "{:.1f} ms", bar, f"subprocess.run {leader.summary}"),
    ]
    return [
        *rows,
        Row(
            "left alive",
            str(left),
            f"killpg {max(group.left)}, subprocess.run {max(leader.left)}",
            None,
            "0",
            left == 0,
        ),
    ]


def measure(size: Size) -> Table:
    return Table(TITLE, NOTE, asyncio.run(_measure(size.of(10, 3, 1))))
