"""Workflows: what a step costs, whether a long run costs more per step, and a bare loop of subprocess.run beside it."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shotclock.store.store import Store
from shotclock.workflow.engine import RunCaller, RunRequest, start
from shotclock.workflow.schema import WorkflowFile

from .rounds import take_turns
from .table import Bar, Row, Table, absolute, compared

LIMIT_S = 300
TITLE = "Workflows, every step written down"
NOTE = (
    "Steps that do nothing, one after the other (*chain*) or all at once (*fan-out*, eight at a time), in a run with "
    "its store: time per step of the whole run, from its beginning to its envelope. The peer is the same number of "
    '`subprocess.run("true", shell=True)` in a row. *Growth* is the time per step of a long run divided by that of a '
    "short one. The rate of `function` steps is that of a run whose App is up: importing it takes as long as it takes."
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


async def _measure(rounds: int) -> Table:
    def ours(kind: str, shape: str, count: int) -> Callable[[], Any]:
        return lambda: ms_per_step(kind, shape, count)

    kinds = [(kind, shape) for kind in ("command", "function") for shape in ("chain", "fan-out")]
    sides = {f"{kind} {shape} {count}": ours(kind, shape, count) for kind, shape in kinds for count in (SHORT, LONG)}
    taken = await take_turns({**sides, "peer": lambda: peer_ms(LONG // 2)}, rounds)
    rows: list[Row] = []
    for shape, bar in (("chain", Bar(2.0)), ("fan-out", Bar(1.5))):
        for count in (SHORT, LONG):
            ours_ms, peer = taken[f"command {shape} {count}"], taken["peer"]
            what = f"command, {shape} of {count:,}"
            aim = bar if count == LONG else None  # a short run is mostly its beginning and its end
            rows.append(compared(what, ours_ms, "subprocess.run", peer, "{:.2f} ms", aim, WHY))
    for kind, shape in kinds:
        growth = taken[f"{kind} {shape} {LONG}"] / taken[f"{kind} {shape} {SHORT}"]
        rows.append(absolute(f"{kind}, {shape}: growth", growth, "{:.2f} ×", Bar(1.3, "×")))
    for shape in ("chain", "fan-out"):
        rate = 1e3 / taken[f"function {shape} {LONG}"]
        # A chain is one round trip after the other; what a machine can do at once is the bar.
        aim = Bar(2000, "/s", at_least=True) if shape == "fan-out" else None
        rows.append(absolute(f"function, {shape} of {LONG:,}", rate, "{:,.0f}/s", aim))
    return Table(TITLE, NOTE, rows)


def measure(quick: bool) -> Table:
    return asyncio.run(_measure(1 if quick else 5))
