"""A thousand workers: a simulation of deadlines, heartbeats and takeovers, checked against a small, real cluster.

The model is the arithmetic of `temporal/_step_activity.py` and `temporal/_run_workflow.py`: a worker beats eight times
in the heartbeat time H; the engine gives a step away H after it last heard of it; a worker that is cut off stops it at
0.5 H, kills it at 0.7 H and itself at 0.85 H after the last beat that arrived; the step goes on in what is left of its
time. Everything else (the network, how long a decision takes) is measured on the small cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.run.runs import RunCaller, RunRequest
from shotclock.temporal._engine import TemporalEngine
from shotclock.temporal._step_activity import BEATS, EXIT_SHARE
from shotclock.temporal._worker import STICKY_S
from shotclock.temporal.connection import read_address

from .rounds import Size, percentile
from .table import Bar, Row, Table, absolute
from .temporal import cpu_seconds, free_port, running

LIMIT_S = 600
TITLE = "A thousand workers, simulated"
NOTE = (
    "First a real cluster of one server and two workers: the time from `kill -9` of a worker until its step runs "
    "on the other one, beside the range that the model predicts. Then the model: 1,000 workers of eight places; "
    "100,000 runs of ten steps (30 s on average, 5 min at most), which arrive at the rate that keeps four of five "
    "places busy; heartbeats of 10 s; and a worker lost every ten seconds, half of them killed and half cut off. "
    "*Gap* is the time between the end of one copy of a step and the start of the next: below zero, two would run "
    "at once. *Cores* are those of the server, computed from the cost of a step and of a heartbeat on the small "
    "cluster."
)
SMALL_H = 3.0
KILLS = 4


@dataclass
class Model:
    """One cluster, by its numbers."""

    workers: int
    places: int
    runs: int
    steps: int
    heartbeat_s: float
    mean_step_s: float
    limit_s: float
    loss_every_s: float
    cut_share: float = 0.5
    """Of the losses: workers that are cut off instead of killed."""
    busy_share: float = 0.8
    """Of the places: what is taken over needs a free one."""
    decide_s: float = 0.05
    """From the engine's decision to the start elsewhere."""
    seed: int = 1


@dataclass
class Seen:
    takeovers: list[float] = field(default_factory=list)
    """From the loss of a worker to the start elsewhere."""
    gaps: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """How long after its deadline it is known that a step is over."""
    ended: int = 0
    timed_out: int = 0
    losses: int = 0
    lasted_s: float = 0.0


class Simulation:
    """Steps of all runs are one line: what is ready takes the next free place."""

    def __init__(self, model: Model) -> None:
        self.model, self.seen = model, Seen()
        self._random = random.Random(model.seed)
        self._events: list[tuple[float, int, str, int]] = []
        self._number = 0
        self._free = [worker for worker in range(model.workers) for _ in range(model.places)]
        self._alive = [True] * model.workers
        self._held: list[dict[int, tuple[float, float]]] = [{} for _ in range(model.workers)]
        """By worker: its steps, each with when it began there and its deadline."""
        self._work: dict[int, float] = {}
        """What a step takes; it begins anew where it was cut off."""
        self._deadline: dict[int, float] = {}
        self._freed: dict[int, tuple[float, float]] = {}
        """Of a step whose worker was lost: when that was, and by when its copy was gone."""
        self._waiting: deque[int] = deque()
        self._left = [model.steps] * model.runs

    def run(self) -> Seen:
        model = self.model
        pause_s = model.steps * model.mean_step_s / (model.workers * model.places * model.busy_share)
        at = 0.0
        for run in range(model.runs):
            at += self._random.expovariate(1 / pause_s)
            self._later(at, "again", run)
        self._later(self._random.expovariate(1 / model.loss_every_s), "loss", 0)
        while self.seen.ended < model.runs and self._events:
            now, _, what, which = heapq.heappop(self._events)
            if what == "loss":
                self._lose(now)
            elif what == "back":
                self._alive[which] = True
                self._free += [which] * model.places
                self._place(now)
            elif what == "again":
                self._waiting.append(which)
                self._place(now)
            else:
                self._end(now, which, int(what))
            self.seen.lasted_s = now
        return self.seen

    def _later(self, at: float, what: str, which: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, what, which))

    def _place(self, now: float) -> None:
        model = self.model
        while self._waiting and self._free:
            worker = self._free.pop()
            if not self._alive[worker]:
                continue
            run = self._waiting.popleft()
            if run not in self._deadline:
                self._deadline[run] = now + model.limit_s
                self._work[run] = self._random.expovariate(1 / model.mean_step_s)
            lost = self._freed.pop(run, None)
            if lost is not None:
                self.seen.takeovers.append(now - lost[0])
                self.seen.gaps.append(now - lost[1])
            self._held[worker][run] = (now, self._deadline[run])
            self._later(min(now + self._work[run], self._deadline[run]), str(worker), run)

    def _end(self, now: float, run: int, worker: int) -> None:
        held = self._held[worker].get(run)
        if held is None or min(held[0] + self._work[run], held[1]) != now:
            return  # its worker was lost meanwhile
        del self._held[worker][run]
        if self._alive[worker]:
            self._free.append(worker)
        if now == held[1]:
            self.seen.timed_out += 1
            self.seen.late.append(0.0)
        self._next(now, run)

    def _next(self, now: float, run: int) -> None:
        del self._deadline[run], self._work[run]
        self._left[run] -= 1
        if self._left[run]:
            self._waiting.append(run)
        else:
            self.seen.ended += 1
        self._place(now)

    def _lose(self, now: float) -> None:
        """Take a worker away, and have what it held missed, one heartbeat time after each step's last beat."""
        model = self.model
        self._later(now + self._random.expovariate(1 / model.loss_every_s), "loss", 0)
        worker = self._random.randrange(model.workers)
        if not self._alive[worker]:
            return
        self.seen.losses += 1
        self._alive[worker] = False
        is_cut = self._random.random() < model.cut_share
        for run, (began, deadline) in self._held[worker].items():
            age = self._random.uniform(0, model.heartbeat_s / BEATS)
            arrived = max(began, now - age)
            heard = arrived + self._random.uniform(0, 0.05)  # the way of a beat; what the worker counts from is earlier
            gone = now if not is_cut else arrived + model.heartbeat_s * self._random.uniform(0.5, EXIT_SHARE)
            missed = heard + model.heartbeat_s + self._random.uniform(0, STICKY_S) + model.decide_s
            if missed >= deadline:  # its time was over before anybody knew
                self.seen.timed_out += 1
                self.seen.late.append(missed - deadline)
                self._left[run] -= 1
                del self._deadline[run], self._work[run]
                if self._left[run]:
                    self._later(missed, "again", run)
                else:
                    self.seen.ended += 1
                continue
            self._freed[run] = (now, gone)
            self._later(missed, "again", run)
        self._held[worker] = {}
        self._later(now + 60.0, "back", worker)


# --- the small cluster --------------------------------------------------------------------------------------


async def measure_small(kills: int, beats_s: float) -> tuple[list[float], float]:
    """How long takeovers took on a real cluster, and what a beat costs its server, in seconds of a core."""
    port = free_port()
    address, taken = f"temporal://127.0.0.1:{port}", []
    shotclock = [sys.executable, "-m", "shotclock"]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shotclock-bench-"))
        engine = stack.enter_context(running([*shotclock, "engine", "dev", "--port", str(port)], "answers", folder))
        worker = [*shotclock, "worker", "--on", address, "--max-parallel", "40", "--drain", "0s"]
        workers = [stack.enter_context(running(worker, "takes up to", folder)) for _ in range(2)]
        temporal = TemporalEngine(read_address(address, {}), heartbeat_ms=int(SMALL_H * 1000))
        for number in range(kills):
            log = Path(folder) / f"log{number}"
            command = f"echo $PPID $(date +%s.%N) >> {log}; sleep 60"
            steps = {"s": {"type": "command", "exec": command, "timeout": 50, "grace": "100ms", "idempotent": True}}
            flow = WorkflowFile.model_validate({"steps": steps})
            request = RunRequest(flow, f"{folder}/flow.yaml", Path(folder))
            stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            run = asyncio.ensure_future(temporal.start(request, RunCaller(stop)))
            await _lines(log, 1)
            await asyncio.sleep(
                SMALL_H / 2 + number * SMALL_H / BEATS / kills
            )  # at another phase of the beat each time
            holder = next(pid for pid in workers if str(log) in _commands_below(pid))
            workers.remove(holder)
            workers.append(stack.enter_context(running(worker, "takes up to", folder)))
            killed = time.time()
            subprocess.run(["kill", "-9", str(holder)], timeout=10, check=True)
            _, again = await _lines(log, 2)
            taken.append(float(again.split()[1]) - killed)
            stop.set_result("SIGTERM")
            await run
        return taken, await _cost_of_beat(address, engine, folder, beats_s)


async def _cost_of_beat(address: str, engine: int, folder: str, lasts_s: float) -> float:
    """Let forty steps beat for a while, and see what the server used beyond what it uses anyway."""
    beat_s, count = 0.25, 40
    steps = {f"s{n}": {"type": "command", "exec": f"sleep {lasts_s + 2}"} for n in range(count)}
    flow = WorkflowFile.model_validate({"max_parallelism": count, "steps": steps})
    request = RunRequest(flow, f"{folder}/flow.yaml", Path(folder))
    temporal = TemporalEngine(read_address(address, {}), heartbeat_ms=int(beat_s * BEATS * 1000))
    before = cpu_seconds([engine])
    await asyncio.sleep(lasts_s)
    idle = cpu_seconds([engine]) - before
    run = asyncio.ensure_future(temporal.start(request, RunCaller()))
    await asyncio.sleep(2.0)  # until they have begun
    before = cpu_seconds([engine])
    await asyncio.sleep(lasts_s)
    used = cpu_seconds([engine]) - before - idle
    await run
    return max(0.0, used) / (count * lasts_s / beat_s)


def _commands_below(pid: int) -> str:
    import psutil

    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(process.cmdline()))
    return "\n".join(found)


async def _lines(log: Path, count: int) -> list[str]:
    give_up_at = time.monotonic() + 60
    while True:
        lines = log.read_text().splitlines() if log.exists() else []
        if len(lines) >= count:
            return lines
        assert time.monotonic() < give_up_at, f"{count} lines in {log}"
        await asyncio.sleep(0.02)


# --- the table ----------------------------------------------------------------------------------------------


def check_model(taken: list[float]) -> Row:
    """Hold the model against what was measured: each takeover between the shortest and the longest it allows."""
    shortest = SMALL_H * (1 - 1 / BEATS) - 0.1
    longest = SMALL_H + STICKY_S + 1.0
    inside = sum(shortest <= each <= longest for each in taken) / len(taken)
    shown = f"{statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f})"
    what = f"real: takeover after kill -9, H = {SMALL_H:g} s, {len(taken)} times"
    return Row(what, shown, f"model {shortest:.2f} to {longest:.2f} s", None, "all inside", inside == 1.0)


def describe(model: Model, seen: Seen, beat_cost_s: float, step_cost_s: float) -> list[Row]:
    beats = model.workers * model.places * model.busy_share * BEATS / model.heartbeat_s
    rate = model.runs * model.steps / seen.lasted_s
    bound = Bar(model.heartbeat_s + 1.0, "s")
    size = f"{model.workers:,} workers, {model.runs:,} runs"
    return [
        absolute(f"model: {size}, hours", seen.lasted_s / 3600, "{:.1f} h", None),
        absolute("model: workers lost", seen.losses, "{:.0f}", None),
        absolute("model: steps taken over", len(seen.takeovers), "{:.0f}", None),
        absolute("model: takeover, 99 of 100 within", percentile(seen.takeovers, 99), "{:.2f} s", bound),
        absolute("model: smallest gap", min(seen.gaps), "{:.2f} s", Bar(0.0, "s", at_least=True)),
        absolute("model: after its deadline, the latest", max(seen.late, default=0.0), "{:.2f} s", bound),
        absolute("model: steps per second", rate, "{:.0f}/s", None),
        absolute("model: beats per second", beats, "{:.0f}/s", None),
        absolute("model: cores of the server", rate * step_cost_s + beats * beat_cost_s, "{:.1f}", None),
    ]


def measure(size: Size) -> Table:
    taken, beat_cost_s = asyncio.run(measure_small(*size.of((KILLS, 4.0), (2, 4.0), (1, 0.5))))
    scale = size.of(1, 20, 100)
    model = Model(1000 // scale, 8, 100_000 // scale, 10, 10.0, 30.0, 300.0, 10.0 * scale)
    seen = Simulation(model).run()
    # What one step costs a core of the server: `benchmarks/temporal.py` measures it.
    return Table(TITLE, NOTE, [check_model(taken), *describe(model, seen, beat_cost_s, STEP_COST_S)])


# Seconds of a server's core for one step, by the rate per core in the table "Workflows on Temporal".
STEP_COST_S = 1 / 100


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(measure(Size.QUICK if "--quick" in sys.argv else Size.WHOLE).as_text())
