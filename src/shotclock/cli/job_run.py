"""`job status|wait|cancel` of a run: one that is parked tells its caller its id as that of a job."""

from __future__ import annotations

import asyncio
import shlex

from ..core.clocks import ClockKind, Fired
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem
from ..core.walltime import WallTime
from ..enforce.admission import Admission, Outcome, answer
from ..enforce.clock import monotonic_ns, wall_ns
from ..enforce.identity import is_alive
from ..jobs.front import LATER_LOOKS_S, POLL_INTERVAL_MS, Front
from ..store import Store
from ..store.runs import Run
from ..workflow.report import report_of
from ..workflow.run import cancel
from ..workflow.states import Status

# What a job can be; how a run is stands beside it.
_STATUSES = {
    Status.SUCCEEDED: "complete",
    Status.CANCELLED: "cancelled",
    Status.RUNNING: "running",
    Status.PARKED: "running",
}


async def answer_of_run(
    verb: str, run: Run, store: Store, admission: Admission, command: list[str], budget_ms: int | None
) -> Envelope:
    """Raises Failure where a run is to be cancelled that a process has."""
    if verb == "cancel":
        await cancel(run.id, store)
        run = store.runs.get(run.id) or run
    if verb != "wait":
        return answer(admission, Outcome(Ending.FINISHED, data=_shown(run, store, command)))
    until_ns, waits_ms = Front.patience(admission, budget_ms)
    # One that no process has does not go on by itself, however long it is waited for.
    while run.envelope is None and run.parked_at is None and is_alive(run.holder):
        left_s = LATER_LOOKS_S if until_ns is None else (until_ns - monotonic_ns()) / 1e9
        if left_s <= 0:
            break
        await asyncio.sleep(min(left_s, LATER_LOOKS_S))
        found = await asyncio.to_thread(store.runs.get, run.id)
        run = run if found is None else found
    if run.envelope is not None:
        told = run.envelope
        return Envelope(told["data"], told["error"], list(told["warnings"]), told["meta"])
    shown = _shown(run, store, command)
    data = {**shown, "state": "running" if shown["run_status"] == "running" else "paused"}
    fired = Fired(ClockKind.BUDGET, "caller", waits_ms, (monotonic_ns() - admission.started_ns) // 1_000_000)
    message = f"run {run.id} is {shown['run_status']}; data.continue_command goes on with it"
    return answer(admission, Outcome(Ending.DETACHED, Problem("INCOMPLETE", message, fired=fired), data))


def _shown(run: Run, store: Store, command: list[str]) -> dict[str, object]:
    """As a job is shown."""
    made = report_of(run, store.runs.steps(run.id), now=WallTime.of_ns(wall_ns()), is_alive=is_alive(run.holder))
    shown: dict[str, object] = {
        "job_id": run.id,
        "run_id": run.id,
        "command": f"run {run.name}",
        "status": _STATUSES.get(made.status, "failed"),
        "run_status": made.status.value,
        "terminal": run.ended_at is not None,
        "status_command": shlex.join([*command, "job", "status", run.id]),
        "continue_command": shlex.join([*command, *_going_on(made.status, run.id)]),
        "cancel_command": shlex.join([*command, "job", "cancel", run.id]),
        "poll_interval_ms": POLL_INTERVAL_MS,
        "timeout_ms": made.budget_ms or 0,
        "progress": {
            "done": sum(step.status.is_final for step in made.steps),
            "total": len(made.steps),
            "unit": "steps",
        },
        "created_at": run.created_at.iso(),
    }
    if run.ended_at is not None:
        shown["ended_at"] = run.ended_at.iso()
    if made.error is not None:
        shown["code"] = made.error["code"]
    return shown


def _going_on(status: Status, run_id: str) -> tuple[str, ...]:
    return ("job", "wait", run_id) if status is Status.RUNNING else ("run", "--resume", run_id)
