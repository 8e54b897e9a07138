"""`job list|status|wait|extend|stop|cancel`, for `shotclock` and for every App. Runs are jobs as well: a parked run
reports its id as a job's."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core.clocks import parse_duration_ms
from ..core.envelope import Envelope, stop_problem
from ..core.errors import Ending, Failure
from ..core.value_types import replace, value
from ..dispatch.job_client import JobClient
from ..inbox.access import Principal
from ..inbox.person_wait import refusal_outcome
from ..runtime.call import OURSELVES, Call, Outcome, Tool
from ..store.store import Store
from ..workflow.engine import EmbeddedEngine, RunOrder, send_order
from .engine import control_run, manage_run, manage_run_on, show_control, temporal_engine
from .output import EarlyEnd, signals_heard, until_stopped, write_quietly
from .parser import CommandTable, Subcommand, argument, duration, flag, option
from .subcommand import (
    JSON,
    TIMEOUT_MS,
    Mistaken,
    admit_call,
    conclude,
    deliver,
    engine_options,
    perform,
    read_budget_ms,
)

if TYPE_CHECKING:
    from ..temporal.connection import Address

MOST_RUNS = 100
# Waiting is bounded by the budget, and without one by the job's own limits. A cancelled run cleans up for five minutes
# at most (workflow/run_context.CLEAN_UP_LIMIT_MS).
_TIMEOUTS_MS = {"wait": 0, "cancel": 300_000 + TIMEOUT_MS}

_JOB_ID = argument("job-id", "The job, or the beginning of its id.", missing="missing JOB-ID; see `job list`")
_NO_DURATION = "missing BY: the time to add, as in `job extend JOB 30s`"
_COMMANDS = (
    Subcommand("list", "List the jobs, the newest first.", (flag("--active", "List only running jobs."), JSON)),
    Subcommand("status", "Show the state and the progress of a job.", (_JOB_ID, JSON)),
    Subcommand(
        "wait",
        "Wait for a job and print its envelope, or INCOMPLETE when the budget is used up.",
        (_JOB_ID, duration("--budget", "Wait this long (30s; on a terminal until the job ends)."), JSON),
    ),
    Subcommand(
        "extend",
        "Give a running job or run more time.",
        (_JOB_ID, argument("by", "The time to add (30s).", read=parse_duration_ms, missing=_NO_DURATION), JSON),
        usage="JOB-ID D",
    ),
    Subcommand(
        "stop",
        "Ask a job or a run to end by itself, then kill it. Its partial result is kept.",
        (
            _JOB_ID,
            duration("--within", "Kill it after this time (the job's own, or 5s)."),
            option("--reason", "TEXT", "The reason, for the work and its envelope.", default=""),
            JSON,
        ),
    ),
    Subcommand("cancel", "Kill a job, and wait until it has ended.", (_JOB_ID, JSON)),
)


@value
class JobScope:
    """The program whose jobs are handled: an App's, or with `app` None all, and runs."""

    command: list[str]
    app: str | None = None
    tool: Tool = OURSELVES


def job_table(scope: JobScope) -> CommandTable:
    engine = () if scope.app else engine_options("Runs on Temporal instead: temporal://HOST:PORT[/NAMESPACE].")
    commands = tuple(
        replace(each, options=(*each.options, *engine), run=partial(_run_job, scope, each.name)) for each in _COMMANDS
    )
    return CommandTable(f"{' '.join(scope.command)} job", "Work that outlives its caller.", commands, "verb")


def _run_job(scope: JobScope, name: str, on: Address | None = None, **values: Any) -> Callable[[bool], int]:
    if name == "extend" and not values["by"]:
        raise Mistaken({"by": _NO_DURATION})
    budget_ms = read_budget_ms(values["budget"]) if name == "wait" else None

    def start(as_json: bool) -> int:
        call = admit_call(
            f"job {name}",
            _TIMEOUTS_MS.get(name, TIMEOUT_MS),
            mutates=name in ("cancel", "extend", "stop"),
            idempotent=name != "extend",
            tool=scope.tool,
            since_start=True,
        )
        order = (values.get("by"), values.get("within"), values.get("reason") or "")
        if name not in ("extend", "stop"):
            work = partial(_perform, name, values, scope, on, call, budget_ms)
            return deliver(conclude(call, lambda: asyncio.run(_unless_stopped(work))), as_json, _show_jobs)
        if on is None:
            return deliver(conclude(call, lambda: _control(scope, values["job_id"], *order)), as_json, show_control)
        return perform(control_run(call.name, values["job_id"], None, *order, on=on), as_json)

    return start


def _control(scope: JobScope, name: str, by_ms: int | None, within_ms: int | None, reason: str) -> Outcome:
    order = RunOrder(name, None, Principal.local().name, by_ms, within_ms, reason)
    try:
        with Store.open() as store:
            try:
                job = JobClient(store, []).find(name)
            except Failure as failure:
                _must_be_run(scope, store, name, failure)
                return Outcome(Ending.FINISHED, data=asyncio.run(EmbeddedEngine(store).order(order)))
            if not job.is_active or job.runner is None:
                state = "has ended" if not job.is_active else "is only being started"
                raise Failure("CALL_NOT_FOUND", f"job {job.id} {state}")
            data = send_order(store, job.runner, f"job {job.id}", replace(order, run_id=job.id))
            return Outcome(Ending.FINISHED, data=data)
    except Failure as failure:
        return refusal_outcome(failure)


def _must_be_run(scope: JobScope, store: Store, name: str, failure: Failure) -> None:
    """Raise the Failure of a job that was not found, unless it is the id of a run."""
    if failure.code != "JOB_NOT_FOUND" or scope.app is not None or store.runs.get(name) is None:
        raise failure


async def _unless_stopped(work: Callable[[], Any]) -> Outcome | Envelope:
    """Stop waiting when a signal comes. The job keeps running: it is not ours."""
    done = await until_stopped(work())
    if not isinstance(done, EarlyEnd):
        return done  # type: ignore[no-any-return]
    problem = stop_problem(str(done.signal))
    problem = replace(problem, message=f"{problem.message}; the job keeps running")
    return Outcome(Ending.CANCELLED, problem, {"partial": True})


async def _perform(
    name: str, values: dict[str, Any], scope: JobScope, on: Address | None, call: Call, budget_ms: int | None
) -> Outcome | Envelope:
    job_id = str(values.get("job_id"))
    if on is not None:
        if name != "list":
            return await manage_run_on(on, name, job_id, call, budget_ms)
        runs = await temporal_engine(on).list_runs(MOST_RUNS, active_only=bool(values["active"]))
        return Outcome(Ending.FINISHED, data={"jobs": [run.as_job(on.on_command_line) for run in runs]})
    with Store.open() as store:
        try:
            return await JobClient(store, scope.command).perform(
                name,
                values.get("job_id"),
                call,
                app=scope.app,
                active_only=bool(values.get("active")),
                budget_ms=budget_ms,
            )
        except Failure as failure:
            await asyncio.to_thread(_must_be_run, scope, store, job_id, failure)
            return await manage_run(EmbeddedEngine(store), name, job_id, call, budget_ms)


def _show_jobs(envelope: Envelope) -> None:
    data: Any = envelope.data
    if not isinstance(data, dict):
        return
    if "jobs" in data:
        text = "".join(_job_line(job) for job in data["jobs"]) or "no jobs\n"
    elif "job_id" in data and "status" in data:
        text = _job_line(data)
    else:
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    write_quietly(sys.stdout, text, signals_heard)


def _job_line(job: dict[str, Any]) -> str:
    progress = job.get("progress")  # a list of runs on an engine has none
    of = f"/{progress['total']}" if progress and "total" in progress else ""
    unit = f" {progress['unit']}" if progress and "unit" in progress else ""
    done = f"  {progress['done']}{of}{unit}" if progress else ""
    code = f"  {job['code']}" if "code" in job else ""
    return f"{job['job_id']}  {job['status']:<9}  {job['command']:<20}{done}{code}\n"


COMMANDS = {"job": job_table(JobScope(["shotclock"]))}
