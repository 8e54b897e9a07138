"""The engines that run workflows: one protocol, for this machine here and for Temporal in temporal/engine."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from ...calls.control_channel import ask_holder
from ...core.envelope import Envelope
from ...core.errors import Failure
from ...core.limits import ProcessIdentity, WallTime
from ...core.value_types import replace, value
from ...store.runs import StepRecord, StoredRun
from ...store.store import Store
from ...supervise.clock import monotonic_ns, wall_time
from ...supervise.kernel import is_alive
from ..report.history import read_p95
from ..report.report import Report, report_of
from . import runs as local
from ._artifacts import find_artifacts
from .runs import RunCaller, RunRequest, read_envelope
from .state import JsonObject, Status, commands_for, count_steps, find_rerun_command
from .step_log import read_printed_ends

RUNS_SEARCHED = 200
# Between two looks at a run of another process, and the pause that callers are advised to make.
LOOK_S, POLL_INTERVAL_MS = 0.2, 1_000
# Every other status is `failed`.
_JOB_STATUSES = {"succeeded": "complete", "cancelled": "cancelled", "running": "running", "parked": "running"}


@value
class RunOrder:
    """An order to a running run: more time for it or a step, or to wind down."""

    run_id: str
    step: str | None
    who: str
    by_ms: int | None  # None winds down
    within_ms: int | None = None
    reason: str = ""

    def as_request(self) -> dict[str, object]:
        request: dict[str, object] = {"run": self.run_id, "step": self.step, "who": self.who}
        if self.by_ms is None:
            return {**request, "do": "stop", "within_ms": self.within_ms, "reason": self.reason}
        return {**request, "do": "extend", "by_ms": self.by_ms}


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
        if self.status is Status.RUNNING:
            shown["continue_command"] = f"shotclock job wait {self.run_id} {where}".rstrip()
        if self.ended_at is not None:
            shown["ended_at"] = self.ended_at.iso()
        optional = {"timeout_ms": self.timeout_ms, "progress": self.steps, "code": self.code}
        shown |= {"waits_for": list(self.waits_for)} if self.waits_for else {}
        return shown | {name: each for name, each in optional.items() if each is not None}


class Engine(Protocol):
    """A place where runs are carried out. Methods raise Failure for expected errors."""

    @property
    def where(self) -> str:
        """Return the options that name the engine on a command line; empty for this machine."""

    async def start(self, request: RunRequest, caller: RunCaller) -> Envelope:
        """Run a workflow, and return its envelope."""

    async def resume(self, run_id: str, caller: RunCaller) -> Envelope:
        """Continue a run, and return its envelope."""

    async def progress(self, run_id: str) -> RunSummary:
        """Return the progress of a run."""

    async def list_runs(self, most: int, *, active_only: bool = False) -> list[RunSummary]:
        """Return the runs, the newest first."""

    async def wait(self, run_id: str, until_ns: int | None) -> Envelope | None:
        """Return the envelope of a run; None if it has not ended by then."""

    async def cancel(self, run_id: str) -> Envelope | None:
        """Stop a run, wait for its clean-up, and return its envelope; None if it has not ended in time."""

    async def order(self, order: RunOrder) -> JsonObject:
        """Extend a run or a step, or wind it down. Return its calls afterwards."""

    async def report(self, run_id: str) -> Report:
        """Return the report of a run, found by its id or a unique beginning of it."""


class EmbeddedEngine:
    """The engine of this machine."""

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
        return await asyncio.to_thread(send_order, self.store, run.holder, f"run {run.id!r}", order)

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
        artifacts = find_artifacts(self.store.home, run.id, steps)
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


def send_order(store: Store, holder: ProcessIdentity, name: str, order: RunOrder) -> JsonObject:
    """Send an order to the process that has a run or a job."""
    try:
        return ask_holder(store.home, holder, order.as_request())
    except Failure as failure:
        if failure.code != "CALL_NOT_FOUND":
            raise
        raise Failure("CALL_NOT_FOUND", f"{name} cannot be reached: {failure}") from None
