"""The engines that run workflows: one protocol, and the engine of this machine."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from ..calls.control_channel import RunOrder
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.limits import WallTime
from ..core.value_types import JsonObject, replace, value
from ..dispatch.engines import EngineAddress, EngineRuns, engine_at
from ..store.runs import StepRecord, StoredRun
from ..store.store import Store
from ..supervise.clock import monotonic_ns, wall_time
from ..supervise.kernel import is_alive
from .report.history import read_p95
from .report.report import Report, report_of
from .run import runs as local
from .run.artifacts import find_artifacts
from .run.runs import RunCaller, RunRequest, read_envelope
from .run.state import Status, commands_for, count_steps, find_rerun_command
from .run.step_log import read_printed_ends

RUNS_SEARCHED = 200
# Between two looks at a run of another process, and the pause that callers are advised to make.
LOOK_S, POLL_INTERVAL_MS = 0.2, 1_000
# Every other status is `failed`.
_JOB_STATUSES = {"succeeded": "complete", "cancelled": "cancelled", "running": "running", "parked": "running"}


@value
class RunSummary:
    run_id: str
    name: str
    status: Status
    started_at: WallTime
    ended_at: WallTime | None = None
    duration_ms: int | None = None
    code: str | None = None
    why: str = ""
    timeout_ms: int | None = None
    steps: dict[str, object] | None = None
    waits_for: tuple[str, ...] = ()  # proposals

    @property
    def is_running(self) -> bool:
        return self.status is Status.RUNNING

    def as_row(self) -> dict[str, object]:
        return {
            "run_id": self.run_id,
            "name": self.name,
            "status": self.status.value,
            "started_at": self.started_at.iso(),
            "ended_at": None if self.ended_at is None else self.ended_at.iso(),
            "duration_ms": self.duration_ms,
            "why": self.why,
        }

    def as_job(self, where: str = "") -> dict[str, object]:
        """Return the run in the form of a job. `where` holds the options that name its engine."""
        shown: dict[str, object] = {
            "job_id": self.run_id,
            "run_id": self.run_id,
            "command": f"run {self.name}",
            "status": _JOB_STATUSES.get(self.status.value, "failed"),
            "run_status": self.status.value,
            "terminal": self.ended_at is not None,
            "status_command": f"shotclock job status {self.run_id} {where}".rstrip(),
            **commands_for(self.run_id, where),
            "poll_interval_ms": POLL_INTERVAL_MS,
            "created_at": self.started_at.iso(),
        }
        if self.is_running:
            shown["continue_command"] = f"shotclock job wait {self.run_id} {where}".rstrip()
        if self.ended_at is not None:
            shown["ended_at"] = self.ended_at.iso()
        optional = {"timeout_ms": self.timeout_ms, "progress": self.steps, "code": self.code}
        shown |= {"waits_for": list(self.waits_for)} if self.waits_for else {}
        return shown | {name: each for name, each in optional.items() if each is not None}


class Engine(EngineRuns, Protocol):
    """A place where runs are carried out. Methods raise Failure for expected errors."""

    async def start(self, request: RunRequest, caller: RunCaller) -> Envelope:
        """Run a workflow, and return its envelope."""

    async def resume(self, run_id: str, caller: RunCaller) -> Envelope:
        """Continue a run, and return its envelope."""

    async def list_runs(self, most: int, *, active_only: bool = False) -> list[RunSummary]:
        """Return the runs, the newest first."""

    async def report(self, run_id: str) -> Report:
        """Return the report of a run, found by its id or a unique beginning of it."""


class EmbeddedEngine:
    where = ""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def start(self, request: RunRequest, caller: RunCaller) -> Envelope:
        return await local.start(request, self.store, caller)

    async def resume(self, run_id: str, caller: RunCaller) -> Envelope:
        return await local.resume(run_id, self.store, caller)

    async def progress(self, run_id: str) -> RunSummary:
        return _summarise(self._get(run_id), self.store.runs.steps(run_id))

    async def list_runs(self, most: int, *, active_only: bool = False) -> list[RunSummary]:
        runs = self.store.runs.list_open(most) if active_only else self.store.runs.list(most)
        return [_summarise(run) for run in runs]

    async def wait(self, run_id: str, until_ns: int | None) -> Envelope | None:
        run = self._get(run_id)
        # A run without a process does not continue by itself.
        while run.envelope is None and run.parked_at is None and is_alive(run.holder):
            left_s = LOOK_S if until_ns is None else (until_ns - monotonic_ns()) / 1e9
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, LOOK_S))
            run = await asyncio.to_thread(self._get, run_id)
        return None if run.envelope is None else read_envelope(run.envelope)

    async def cancel(self, run_id: str) -> Envelope | None:
        return await local.cancel(run_id, self.store)

    async def order(self, order: RunOrder) -> JsonObject:
        run = self._get(order.run_id)
        if run.ended_at is not None:
            raise Failure("CALL_NOT_FOUND", f"run {run.id!r} has ended")
        if run.parked_at is not None:
            raise Failure("CALL_NOT_FOUND", f"run {run.id!r} is parked: no process has it")
        return await asyncio.to_thread(order.send, self.store.home, run.holder, f"run {run.id!r}")

    async def report(self, run_id: str) -> Report:
        run = self.find_run(run_id)
        made = report_of(
            run,
            self.store.runs.steps(run.id),
            now=wall_time(),
            is_alive=is_alive(run.holder),
            find_p95=partial(read_p95, self.store, run.name, run.file, run.created_at),
        )
        printed = await asyncio.to_thread(read_printed_ends, self.store.home, run.id)
        steps = tuple(replace(step, printed=printed.get(step.id, [])) for step in made.steps)
        can_continue = run.ended_at is not None and made.status.is_bad
        ends = ((step.status, step.reason) for step in steps)
        command = find_rerun_command(run.id, ends) if can_continue else ""
        artifacts = find_artifacts(self.store.home, run.id, (step.artifacts for step in steps))
        return replace(made, steps=steps, artifacts=artifacts, continue_command=command)

    def _get(self, run_id: str) -> StoredRun:
        run = self.store.runs.get(run_id)
        if run is None:
            raise Failure("RUN_NOT_FOUND", f"there is no run {run_id!r}")
        return run

    def find_run(self, run_id: str) -> StoredRun:
        """Return a run by its id or a unique beginning of it."""
        run = None if "\0" in run_id else self.store.runs.get(run_id)
        if run is not None:
            return run
        ids = [run.id for run in self.store.runs.list(RUNS_SEARCHED)]
        begin = [name for name in ids if run_id and name.startswith(run_id)]
        if len(begin) == 1:
            return self._get(begin[0])
        near = begin[:5] or difflib.get_close_matches(run_id, ids, n=3)
        message = f"there is no run {run_id!r}" if not begin else f"{len(begin)} runs begin with {run_id!r}"
        hint = f"did you mean {' or '.join(near)}?" if near else "`shotclock report` lists the last runs"
        raise Failure("RUN_NOT_FOUND", message, context={"near": near}, suggestion=hint)


def _summarise(run: StoredRun, records: Mapping[str, StepRecord] | None = None) -> RunSummary:
    made = report_of(run, records or {}, now=wall_time(), is_alive=run.ended_at is None and is_alive(run.holder))
    return RunSummary(
        run.id,
        run.name,
        made.status,
        run.created_at,
        run.ended_at,
        None if made.status in (Status.INTERRUPTED, Status.PARKED) else made.duration_ms,
        code=(made.error or {}).get("code"),
        why=made.why,
        timeout_ms=made.budget_ms or 0,
        steps=None if records is None else count_steps([step.status for step in made.steps]),
        waits_for=tuple(each for step in made.steps for each in step.waits_for),
    )


@contextmanager
def open_engine(
    on: EngineAddress | None, queue: str | None = None, heartbeat_ms: int | None = None
) -> Iterator[Engine]:
    """Open the engine of this machine, or the one at an address."""
    if on is not None:
        module: Any = engine_at(on)
        opened: Engine = module.open_runs(on, queue, heartbeat_ms)
        yield opened
    else:
        with Store.open() as store:
            yield EmbeddedEngine(store)
