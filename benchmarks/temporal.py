"""Workflows on Temporal: steps per second on one server and two workers, beside bare activities that do the same."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.run.runs import RunCaller, RunRequest
from shotclock.temporal._engine import TemporalEngine
from shotclock.temporal.connection import connect, read_address

from .rounds import Size, take_turns
from .table import Bar, Row, Table, absolute, compared
from .temporal_peer import QUEUE, BareRun

LIMIT_S = 300
TITLE = "Workflows on Temporal"
NOTE = (
    "Runs of steps that do nothing (`true` in a shell), eight at a time in each run, on one server of `shotclock "
    "engine dev` and two workers of eight places each, all on this machine: steps per second from the start of "
    "the first run to the end of the last. The peer is a workflow of temporalio with activities that run the same "
    "command by `asyncio.create_subprocess_shell`, on the same server, with two workers of its own. Neither side "
    "uses the SDK's sandbox. *Per core* is a rate divided by the cores that the server or the workers used "
    "meanwhile."
)
WHY = "A step is rendered, supervised, verified gone and judged; a bare activity is a fork and an exit code."
RUNS, STEPS = 4, 50
START_S = 60.0


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextlib.contextmanager
def running(words: list[str], ready: str, folder: str) -> Iterator[int]:
    """Run a program, from when it says that it is ready, and give its pid."""
    with open(f"{folder}/{time.monotonic_ns()}.err", "w+b") as err:
        process = subprocess.Popen(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=err, stderr=err)
        try:
            give_up_at = time.monotonic() + START_S
            while ready not in Path(err.name).read_text(errors="replace"):
                assert time.monotonic() < give_up_at and process.poll() is None, Path(err.name).read_text()[-2000:]
                time.sleep(0.05)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(START_S)


def cpu_seconds(pids: list[int]) -> float:
    """What these processes and all below them have used, with those that have ended and were waited for."""
    import psutil

    used = 0.0
    for pid in pids:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used += times.user + times.system + times.children_user + times.children_system
    return used


async def ours_per_s(address: str, folder: str, count: int) -> float:
    engine = TemporalEngine(read_address(address, {}))
    steps = {f"s{number}": {"type": "command", "exec": "true"} for number in range(count)}
    flow = WorkflowFile.model_validate({"steps": steps})

    async def one() -> None:
        envelope = await engine.start(RunRequest(flow, f"{folder}/flow.yaml", Path(folder)), RunCaller())
        assert envelope.ok, envelope.error

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(RUNS)))
    return RUNS * count / (time.perf_counter() - began)


async def bare_per_s(address: str, count: int) -> float:
    client = await connect(read_address(address, {}))

    async def one(number: int) -> None:
        id = f"bare-{time.monotonic_ns()}-{number}"
        await client.execute_workflow(BareRun.run, count, id=id, task_queue=QUEUE)

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(RUNS)))
    return RUNS * count / (time.perf_counter() - began)


async def _measure(rounds: int, steps: int) -> Table:
    port = free_port()
    address = f"temporal://127.0.0.1:{port}"
    shotclock, peer = [sys.executable, "-m", "shotclock"], str(Path(__file__).with_name("temporal_peer.py"))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shotclock-bench-"))
        engine = stack.enter_context(running([*shotclock, "engine", "dev", "--port", str(port)], "answers", folder))
        workers = [
            stack.enter_context(running([*shotclock, "worker", "--on", address], "takes up to", folder))
            for _ in range(2)
        ]
        for _ in range(2):
            stack.enter_context(running([sys.executable, peer, f"127.0.0.1:{port}"], "ready", folder))
        await ours_per_s(address, folder, steps)  # warm: imports, supervisors, the server's caches
        await bare_per_s(address, steps)
        used: dict[str, float] = {"server": 0.0, "workers": 0.0, "s": 0.0}

        async def ours() -> float:
            before = cpu_seconds([engine]), cpu_seconds(workers), time.perf_counter()
            rate = await ours_per_s(address, folder, steps)
            used["server"] += cpu_seconds([engine]) - before[0]
            used["workers"] += cpu_seconds(workers) - before[1]
            used["s"] += time.perf_counter() - before[2]
            return rate

        taken: dict[str, Any] = await take_turns({"ours": ours, "bare": lambda: bare_per_s(address, steps)}, rounds)
    rate = taken["ours"]
    rows: list[Row] = [
        compared(
            f"{RUNS} runs of {steps} steps, steps per second", rate, "temporalio", taken["bare"], "{:.0f}/s",
            Bar(0.8, at_least=True), WHY,
        ),
        *(
            absolute(f"steps per core and second, {who}", rate * used["s"] / max(0.01, used[who]), "{:.0f}", None)
            for who in ("server", "workers")
        ),
    ]  # fmt: skip
    return Table(TITLE, NOTE, rows)


def measure(size: Size) -> Table:
    return asyncio.run(_measure(*size.of((5, STEPS), (2, STEPS), (1, 2))))
