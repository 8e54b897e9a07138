"""Work that does not want to end: who gets an answer on time, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from shotclock import App, Clocks, Operation, Runtime

from . import functions
from .isolated import GaveUp, kill_marked, run_isolated
from .process_memory import peak_kib, resident_kib
from .rounds import Size, find_peer
from .table import Table

pebble = find_peer("pebble")

LIMIT_S = 120
TITLE = "Scoreboard: work that does not want to end"
NOTE = (
    "Timeout 500 ms, grace 0. Each cell shows how late the answer came, how many processes were left alive then, "
    "and for the flood how much the calling process grew. *Hangs*: no answer within 5 s. `subprocess.run` "
    "captures the output; pebble runs functions only. *Async command* is the default of an App: each call has a "
    'process of its own. With `isolation="shared"` all such calls share one process, which is killed.'
)
TIMEOUT_S = 0.5
HANGS_S = 5.0
# The interpreter comes up and goes down around the measurement itself.
MARGIN_S = 5.0
# Not every side waits for what it killed; what is alive after this is left.
SETTLE_S = 0.2
CLOCKS = Clocks.of(timeout=f"{TIMEOUT_S}s", grace="0ms")

COMMANDS = {
    "daemonised grandchild": ["bash", "-c", f"{functions.DAEMONISE}; sleep {functions.LONG_S:.0f}"],
    "child that ignores TERM": ["bash", "-c", f"trap '' TERM; while :; do sleep {functions.LONG_S:.0f}; done"],
    "C call that holds the GIL": [sys.executable, "-c", "from benchmarks.functions import *; hold_the_gil()"],
    "output flood": ["yes"],
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "daemonised grandchild": functions.leave_a_daemon,
    "child that ignores TERM": functions.ignore_term,
    "C call that holds the GIL": functions.hold_the_gil,
}
ASYNC_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sleep that blocks its loop": functions.block_the_loop,
    "C call that holds the GIL": functions.hold_the_gil_async,
}
SHARED = "-shared"

app = App("scoreboard", grace="0ms")
app.command(functions.noop_async)
for _function in ASYNC_FUNCTIONS.values():
    app.command(_function)
    app.command(_function, name=_function.__name__.replace("_", "-") + SHARED, isolation="shared")


def our_command(case: str, mark: str) -> str:
    async def run() -> str:
        async with Runtime() as runtime:
            await runtime.run(["true"])
            began, before = time.monotonic(), resident_kib()
            envelope = await runtime.run(COMMANDS[case], CLOCKS, env={"BENCH_MARK": mark})
            assert envelope.code == "TIMEOUT", envelope
            return _said(case, began, before, mark)

    return asyncio.run(run())


def our_function(case: str, mark: str) -> str:
    async def run() -> str:
        async with Runtime(workers=1, preload=["benchmarks.functions"]) as runtime:
            await runtime.call(Operation("noop", functions.noop), {"a": 1})
            began, before = time.monotonic(), resident_kib()
            envelope = await runtime.call(Operation("case", FUNCTIONS[case]), _arguments(case, mark), CLOCKS)
            assert envelope.code == "TIMEOUT", envelope
            return _said(case, began, before, mark)

    return asyncio.run(run())


def our_async_command(case: str, mark: str, suffix: str = "") -> str:
    async def run() -> str:
        async with app:
            await app.call("noop-async", a=1)
            began, before = time.monotonic(), resident_kib()
            name = ASYNC_FUNCTIONS[case].__name__.replace("_", "-") + suffix
            envelope = await app.call_with(name, {}, timeout=f"{TIMEOUT_S}s")
            assert envelope.code == "TIMEOUT", envelope
            return _said(case, began, before, mark)

    return asyncio.run(run())


def our_shared_command(case: str, mark: str) -> str:
    return our_async_command(case, mark, SHARED)


def their_command(case: str, mark: str) -> str:
    began, before = time.monotonic(), resident_kib()
    environment = {**os.environ, "BENCH_MARK": mark}
    try:
        subprocess.run(COMMANDS[case], capture_output=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        pass
    return _said(case, began, before, mark)


def their_function(case: str, mark: str) -> str:
    if pebble is None:
        return "not installed"
    pool = pebble.ProcessPool(max_workers=1)
    pool.schedule(functions.noop, args=(1,)).result(MARGIN_S)
    began, before = time.monotonic(), resident_kib()
    try:
        pool.schedule(FUNCTIONS[case], kwargs=_arguments(case, mark), timeout=TIMEOUT_S).result(60)
    except FutureTimeout:
        pass
    said = _said(case, began, before, mark)
    pool.stop()
    return said


def their_async_function(case: str, mark: str) -> str:
    async def run() -> str:
        began, before = time.monotonic(), resident_kib()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await ASYNC_FUNCTIONS[case]()
        except TimeoutError:
            pass
        return _said(case, began, before, mark)

    return asyncio.run(run())


def _arguments(case: str, mark: str) -> dict[str, str]:
    return {"mark": mark} if case == "daemonised grandchild" else {}


def _said(case: str, began: float, before_kib: int, mark: str) -> str:
    late_ms = (time.monotonic() - began - TIMEOUT_S) * 1e3
    left = kill_marked(mark, settle_s=SETTLE_S)
    said = f"{late_ms:.0f} ms late, {left} left"
    if case == "output flood":
        said += f", {(peak_kib() - before_kib) * 1024 / 1e6:,.0f} MB"
    return said


def _ask(side: Callable[[str, str], str], case: str) -> str:
    mark = uuid.uuid4().hex
    try:
        return str(run_isolated(side, case, mark, within_s=TIMEOUT_S + HANGS_S + MARGIN_S))
    except GaveUp:
        return f"**hangs**, {kill_marked(mark)} left"


def measure(size: Size) -> Table:
    grid = []
    for case in list(COMMANDS)[: size.of(None, None, 1)]:
        grid.append([f"{case}, command", _ask(our_command, case), f"subprocess.run: {_ask(their_command, case)}"])
        if case in FUNCTIONS:
            grid.append([f"{case}, function", _ask(our_function, case), f"pebble: {_ask(their_function, case)}"])
    for case in list(ASYNC_FUNCTIONS)[: size.of(None, None, 1)]:
        cells = [_ask(our_async_command, case), f"asyncio.timeout: {_ask(their_async_function, case)}"]
        grid.append([f"{case}, async command", *cells])
    blocks = next(iter(ASYNC_FUNCTIONS))
    grid.append([f'{blocks}, async command, `isolation="shared"`', _ask(our_shared_command, blocks), "–"])
    return Table(TITLE, NOTE, header=["what", "shotclock", "peer"], grid=grid)
