"""Workflows: what a step costs, whether a long run costs more per step, and a bare loop of subprocess.run beside it."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shotclock import Runtime
from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.run.runs import RunCaller, RunRequest, start
from shotclock.store.store import Store

from .rounds import Size, take_turns
from .table import Bar, Row, Table, absolute, compared
from .workers import our_throughput

LIMIT_S = 300
TITLE = "Workflows, every step written down"
NOTE = (
    "Steps that do nothing, one after the other (*chain*) or all at once (*fan-out*, eight at a time), in a run "
    "with its store: the time of the whole run, from its start to its envelope, divided by the number of steps. "
    'The peer is half as many `subprocess.run("true", shell=True)` in a row, before or after each long run. '
    "*Growth* is the time per step of a long run divided by that of a short one. For `function` steps the App is "
    "already imported. Their ratio compares them with calls of the same runtime's pool of two workers in the same "
    "round, without a run and a store."
)
SHORT, LONG = 100, 1000
APP = Path(__file__).with_name("mcp_app.py")
# A single `true` that takes longer than this is a machine that cannot be measured on.
PEER_LIMIT_S = 10
WHY = (
    "A step is a transaction, a supervisor that watches a tree, an envelope and a state; the loop of the run is one "
    "core."
)


def workflow(kind: str, shape: str, count: int) -> WorkflowFile:
    steps: dict[str, dict[str, Any]] = {}
    for number in range(count):
        step: dict[str, Any] = {"type": "command", "exec": "true"}
        if kind == "function":
            step = {"type": "function", "target": f"{APP}:app", "command": "noop", "arguments": {"a": number}}
        if shape == "chain" and number:
            step["depends_on"] = [f"s{number - 1}"]
        steps[f"s{number}"] = step
    return WorkflowFile.model_validate({"steps": steps})


async def ms_per_step(kind: str, shape: str, count: int) -> float:
    """Of a whole run; of one of functions, of what comes after its first step, which waits for the import."""
    flow = workflow(kind, shape, count)
    with tempfile.TemporaryDirectory(prefix="shotclock-bench-") as folder, Store.open(Path(folder) / "home") as store:
        request = RunRequest(flow, f"{folder}/flow.yaml", Path(folder))
        ended: list[float] = []

        def on_change(state: Any) -> None:
            if state.status.is_final:
                ended.append(time.perf_counter())

        began = time.perf_counter()
        envelope = await start(request, store, RunCaller(None, on_change))
        taken, counted = time.perf_counter() - began, count
        assert envelope.ok, envelope.error
        if kind == "function":
            # Those that were handed over with the first have been waiting with it.
            skipped = 1 if shape == "chain" else flow.max_parallelism
            taken, counted = ended[-1] - ended[skipped - 1], count - skipped
    return taken / counted * 1e3


def peer_ms(count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        subprocess.run("true", shell=True, timeout=PEER_LIMIT_S)
    return (time.perf_counter() - began) / count * 1e3


async def pool_ms(short: int, long: int) -> float:
    """Per call, of as many at once as the long run has steps, in a pool that is up."""
    async with Runtime(workers=2, most_workers=2, preload=["benchmarks.functions"]) as runtime:
        await our_throughput(runtime, short)
        return 1e3 / await our_throughput(runtime, long)


async def _measure(rounds: int, short: int, long: int) -> Table:
    def sides(kind: str, peer: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
        """The peer between the long runs: next to both, in either order."""

        def run(shape: str, count: int) -> Callable[[], Any]:
            return lambda: ms_per_step(kind, shape, count)

        ours = {f"{shape} {count}": run(shape, count) for shape, count in (("chain", short), ("chain", long))}
        others = {f"{shape} {count}": run(shape, count) for shape, count in (("fan-out", long), ("fan-out", short))}
        return {**ours, "peer": peer, **others}

    taken = {
        "command": await take_turns(sides("command", lambda: peer_ms(long // 2)), rounds),
        "function": await take_turns(sides("function", lambda: pool_ms(short, long)), rounds),
    }
    rows: list[Row] = []
    commands, functions = taken["command"], taken["function"]
    for shape, bar in (("chain", Bar(2.0)), ("fan-out", Bar(1.5))):
        for count in (short, long):
            side = f"{shape} {count}"
            what, ratio = f"command, {shape} of {count:,}", commands.ratio(side, "peer")
            aim = bar if count == long else None  # a short run is mostly its beginning and its end
            peer = commands["peer"]
            rows.append(compared(what, commands[side], "subprocess.run", peer, "{:.2f} ms", aim, WHY, ratio))
    for kind, figures in taken.items():
        for shape in ("chain", "fan-out"):
            growth = figures.ratio(f"{shape} {long}", f"{shape} {short}")
            rows.append(absolute(f"{kind}, {shape}: growth", growth, "{:.2f} ×", Bar(1.3, "×")))
    for shape in ("chain", "fan-out"):
        side = f"{shape} {long}"
        pool, ratio = f"its pool alone {1e3 / functions['peer']:,.0f}/s", functions.ratio("peer", side)
        what, rate = f"function, {shape} of {long:,}", 1e3 / functions[side]
        rows.append(absolute(what, rate, "{:,.0f}/s", None, pool, ratio, WHY))
    return Table(TITLE, NOTE, rows)


def measure(size: Size) -> Table:
    return asyncio.run(_measure(*size.of((5, SHORT, LONG), (1, SHORT, LONG), (1, 10, 20))))
