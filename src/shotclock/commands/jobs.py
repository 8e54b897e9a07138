"""`job list|status|logs|wait|extend|stop|restart|cancel`, for `shotclock` and for every App; and `shotclock overtime`.

EngineRuns are jobs as well: a parked run reports its id as a job's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..calls.call import OURSELVES, Call, Outcome, Tool
from ..calls.control_channel import RunOrder, ask
from ..calls.principal import Principal
from ..core.envelope import Envelope, Problem, Warning_, stop_problem
from ..core.errors import Ending, Failure
from ..core.limits import NS_PER_MS, ClockKind, Fired, format_duration
from ..core.value_types import JsonObject, replace, value
from ..dispatch.background_command import is_command
from ..dispatch.engines import engine_at, engine_options, open_local_runs
from ..dispatch.job_client import JobClient
from ..people.person_wait import refusal_outcome
from ..store.jobs import Job
from ..store.store import Store
from ..supervise.clock import monotonic_ns
from ..supervise.environment import OVERTIME_VARIABLE
from ..terminal.output import EarlyEnd, StopListener, write_quietly
from ..terminal.parser import CommandTable, Option, Subcommand, positive_duration
from ..terminal.subcommand import TIMEOUT_MS, ChildWork, admit_call, conclude, deliver, read_budget_ms
from . import _background as background
from . import job_logs

if TYPE_CHECKING:
    from ..dispatch.engines import EngineAddress, EngineRuns

LONGEST_WAIT_S = 24 * 3600.0  # the observer may be a person
_VERDICTS = {"declined": "overtime was declined", "failed": "no overtime", "exhausted": "there is no overtime left"}
_NO_EXTENSION = "--by needs a duration, such as --by 30s"
_NO_REASON = "--reason needs a text for the observer that decides"
MOST_RUNS = 100
# Waiting is bounded by the budget, and without one by the job's own limits. A cancelled run cleans up for five minutes
# at most (workflow/run_context.CLEAN_UP_LIMIT_MS).
_TIMEOUTS_MS = {"wait": 0, "cancel": 300_000 + TIMEOUT_MS}

_JOB_ID = Option.argument(
    "job-id", "The job: its name, its id, or the beginning of its id.", missing="missing JOB-ID; see `job list`"
)
_ORDERS = ("extend", "stop")
_NO_DURATION = "missing BY: the time to add, as in `job extend JOB 30s`"
_STEP = Option.taking("--step", "NAME", "Of a run: only this step of it.")
_COMMANDS = (
    Subcommand(
        "list",
        "List the jobs, running ones first, then the newest.",
        (Option.flag("--active", "List only running jobs."),),
    ),
    Subcommand("status", "Show the state and the progress of a job.", (_JOB_ID,)),
    Subcommand(
        "wait",
        "Wait for a job and print its envelope, or INCOMPLETE when the budget is used up.",
        (_JOB_ID, Option.duration("--budget", "Wait this long (30s; on a terminal until the job ends).")),
    ),
    Subcommand(
        "extend",
        "Give a running job or run more time.",
        (_JOB_ID, Option.argument("by", "The time to add (30s).", read=positive_duration, missing=_NO_DURATION)),
        usage="JOB-ID D",
    ),
    Subcommand(
        "stop",
        "Ask a job or a run to end by itself, then kill it. Its partial result is kept.",
        (
            _JOB_ID,
            Option.duration("--within", "Kill it after this time (the job's own, or 5s)."),
            Option.taking("--reason", "TEXT", "The reason, for the work and its envelope.", default=""),
        ),
    ),
    Subcommand("cancel", "Kill a job, and wait until it has ended.", (_JOB_ID,)),
)
_RESTART = Subcommand(
    "restart",
    "Stop a command that was started with `exec --detach`, and start it again with the same options.",
    (_JOB_ID,),
)


@value
class JobScope:
    """The program whose jobs are handled: an App's, or with `app` None all, and runs."""

    command: list[str]
    app: str | None = None
    tool: Tool = OURSELVES


def job_table(scope: JobScope) -> CommandTable:
    engine = () if scope.app else engine_options("EngineRuns on Temporal instead: temporal://HOST:PORT[/NAMESPACE].")
    commands = tuple(
        replace(
            each,
            options=(*each.options, *((_STEP,) if engine and each.name in _ORDERS else ()), *engine),
            run=partial(_run_job, scope, each.name),
        )
        for each in _COMMANDS
    )
    name = f"{' '.join(scope.command)} job"
    commands += (job_logs.log_command(name, scope.tool),)
    if scope.app is None:
        commands += (replace(_RESTART, run=background.restart_work),)
    return CommandTable(name, "Work that outlives its caller.", commands, "verb")


def _run_job(
    scope: JobScope, name: str, on: EngineAddress | None = None, **values: Any
) -> ChildWork | Callable[[bool], int]:
    if name in _ORDERS:
        limits = (values.get("by"), values.get("within"), values.get("reason") or "")
        order = RunOrder(values["job_id"], values.get("step"), Principal.local().name, *limits)
        return _order_work(f"job {name}", order, on, scope)
    budget_ms = read_budget_ms(values["budget"]) if name == "wait" else None

    def start(as_json: bool) -> int:
        timeout_ms = _TIMEOUTS_MS.get(name, TIMEOUT_MS)
        call = admit_call(f"job {name}", timeout_ms, mutates=name == "cancel", idempotent=True, tool=scope.tool)
        work = partial(_perform, name, values, scope, on, call, budget_ms)
        envelope = conclude(call, lambda: asyncio.run(_unless_stopped(work)))
        return deliver(envelope, as_json, _show_jobs, scope.tool.name)

    return start


def _order_work(name: str, order: RunOrder, on: EngineAddress | None, scope: JobScope) -> ChildWork:
    def body() -> Outcome:
        if on is not None:
            return Outcome(Ending.FINISHED, data=asyncio.run(engine_at(on).open_runs(on).order(order)))
        with Store.open() as store:
            try:
                job = JobClient(store, []).find(order.run_id)
            except Failure as failure:
                _must_be_run(scope, store, order.run_id, failure)
                return Outcome(Ending.FINISHED, data=asyncio.run(open_local_runs(store).order(order)))
            if order.step is not None:
                raise Failure("ARG_ERROR", f"--step: {order.run_id} is a job, and only runs have steps")
            if is_command(job):
                return _order_command(JobClient(store, scope.command), job, order)
            if not job.is_active or job.runner is None:
                state = "has ended" if not job.is_active else "is only being started"
                raise Failure("CALL_NOT_FOUND", f"job {job.id} {state}")
            sent = replace(order, run_id=job.id).send(store.home, job.runner, f"job {job.id}")
            return Outcome(Ending.FINISHED, data=sent)

    return ChildWork(name, body, mutates=True, show=_show_order, on_failure=refusal_outcome, tool=scope.tool)


def _order_command(client: JobClient, job: Job, order: RunOrder) -> Outcome:
    """Stop a command in the background, and wait until it has ended."""
    if order.by_ms is not None:
        message = f"the lifetime of {job.command} is fixed at its start; restart it with another --lifetime"
        raise Failure("NOT_EXTENDABLE", message)
    return client.describe_stop(asyncio.run(client.cancel(job, within_ms=order.within_ms)))


def _show_order(envelope: Envelope) -> None:
    data: Any = envelope.data if envelope.ok and isinstance(envelope.data, dict) else {}
    if "job_id" in data and "status" in data:
        write_quietly(sys.stdout, _job_line(data))
    for call in data.get("extended", ()):
        left = "" if call["remaining_ms"] is None else f", {format_duration(call['remaining_ms'])} left"
        write_quietly(sys.stdout, f"{call['name']}: {format_duration(call['granted_ms'])} more{left}\n")
    for call in data.get("stopping", ()):
        within = format_duration(call["winding_down"]["remaining_ms"])
        write_quietly(sys.stdout, f"{call['name']}: winding down, {within} at most\n")


def _must_be_run(scope: JobScope, store: Store, name: str, failure: Failure) -> None:
    if failure.code != "JOB_NOT_FOUND" or scope.app is not None or store.runs.get(name) is None:
        raise failure


async def _unless_stopped(work: Callable[[], Any]) -> Outcome | Envelope:
    """Stop waiting when a signal comes. It does not end the job, whose state is not looked up again."""
    done = await StopListener.run(work())
    if not isinstance(done, EarlyEnd):
        return done  # type: ignore[no-any-return]
    problem = stop_problem(str(done.signal))
    problem = replace(problem, message=f"the waiting was {problem.message}; `job status` shows the job")
    return Outcome(Ending.CANCELLED, problem, {"partial": True})


async def _perform(
    name: str, values: JsonObject, scope: JobScope, on: EngineAddress | None, call: Call, budget_ms: int | None
) -> Outcome | Envelope:
    job_id, active_only = str(values.get("job_id")), bool(values.get("active"))
    if on is not None:
        remote = engine_at(on).open_runs(on)
        if name == "list":
            runs = await remote.list_runs(MOST_RUNS, active_only=active_only)
            return Outcome(Ending.FINISHED, data={"jobs": [run.as_job(remote.where) for run in runs]})
        try:
            return await _manage_run(remote, name, job_id, call, budget_ms)
        except Failure as failure:
            if failure.code == "RUN_NOT_FOUND":
                raise
            return remote.unknown_outcome(failure, job_id)
    with Store.open() as store:
        try:
            return await JobClient(store, scope.command).perform(
                name, values.get("job_id"), call, app=scope.app, active_only=active_only, budget_ms=budget_ms
            )
        except Failure as failure:
            await asyncio.to_thread(_must_be_run, scope, store, job_id, failure)
            return await _manage_run(open_local_runs(store), name, job_id, call, budget_ms)


async def _manage_run(
    engine: EngineRuns, verb: str, run_id: str, call: Call, budget_ms: int | None
) -> Outcome | Envelope:
    """Carry out `job status`, `wait` or `cancel` on a run. An envelope is the run's own."""
    notes: tuple[Warning_, ...] = ()
    problem: Problem | None = None
    if verb == "cancel":
        ended = await engine.cancel(run_id)
        if ended is None:
            problem = Problem("TIMEOUT", f"run {run_id} has not stopped in time; its clean-up may still run")
        else:
            notes = tuple(note for note in ended.warnings if note["code"] == "CLEAN_UP_MISSING")
    until_ns, waits_ms = JobClient.patience(call, budget_ms)
    if verb == "wait" and (ended := await engine.wait(run_id, until_ns)) is not None:
        return ended
    run = await engine.progress(run_id)
    data = run.as_job(engine.where)
    if verb != "wait":
        return Outcome(Ending.FINISHED, problem, data, warnings=notes)
    data["state"] = "running" if run.is_running else "paused"
    fired = Fired(ClockKind.BUDGET, "caller", waits_ms, (monotonic_ns() - call.started_ns) // NS_PER_MS)
    message = f"run {run_id} is {data['run_status']}; continue it with `{data['continue_command']}`"
    return Outcome(Ending.DETACHED, Problem("INCOMPLETE", message, fired=fired), data)


def _show_jobs(envelope: Envelope) -> None:
    data: Any = envelope.data
    if not isinstance(data, dict):
        return
    if "jobs" in data:
        widths = [max((len(job[name]) for job in data["jobs"]), default=0) for name in ("status", "command")]
        text = "".join(_job_line(job, *widths) for job in data["jobs"]) or "no jobs\n"
    elif "job_id" in data and "status" in data:
        text = _job_line(data)
    else:
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    write_quietly(sys.stdout, text)


def _job_line(job: JsonObject, status_width: int = 0, name_width: int = 0) -> str:
    if "argv" in job:
        return _command_line(job, status_width, name_width)
    progress = job.get("progress")  # a list of runs on an engine has none
    of = f"/{progress['total']}" if progress and "total" in progress else ""
    unit = f" {progress['unit']}" if progress and "unit" in progress else ""
    done = f"  {progress['done']}{of}{unit}" if progress else ""
    code = f"  {job['code']}" if "code" in job else ""
    code += f"  waits for {', '.join(job['waits_for'])}" if "waits_for" in job else ""
    return f"{job['job_id']}  {job['status']:<9}  {job['command']:<20}{done}{code}\n"


def _command_line(job: JsonObject, status_width: int, name_width: int) -> str:
    """Return a line about a command in the background. With a short name it has 80 columns at most."""
    parts = [f"{job['job_id']}  {job['status']:<{status_width}}  {job['command']:<{name_width}}"]
    if not job["terminal"]:
        parts.append("ready" if job["ready"] else "not ready")
        parts.append(f"{_rounded(job['age_ms'])} old")
        left_ms, owner = job["lifetime_left_ms"], job["owner_process"]
        parts.append("no lifetime" if left_ms is None else f"{_rounded(left_ms)} left")
        parts.append("no owner" if owner is None else f"owner {_program(owner['command'])} ({owner['pid']})")
    elif "code" in job:
        parts.append(job["code"])
    return "  ".join(parts) + "\n"


def _program(command: str) -> str:
    return command.partition(" ")[0].rpartition("/")[2][:15]


def _rounded(ms: int) -> str:
    """Return a duration in seconds, or in minutes if it is long."""
    unit = 1_000 if ms < 3_600_000 else 60_000
    return format_duration(ms // unit * unit) if ms >= unit else "0s"


def request_overtime(by: int, reason: str, timeout: int) -> ChildWork:
    body = partial(_request_overtime, by, reason)
    return ChildWork("overtime", body, timeout, True, _show_overtime, on_failure=refusal_outcome)


def _request_overtime(by_ms: int, reason: str) -> Outcome:
    request_id, _, rest = os.environ.get(OVERTIME_VARIABLE, "").partition(":")
    token, _, path = rest.partition(":")
    if not path:
        message = f"overtime is not available here ({OVERTIME_VARIABLE} is not set)"
        raise Failure("NOT_EXTENDABLE", message)
    request: dict[str, object] = {"do": "overtime", "request_id": request_id, "token": token, "by_ms": by_ms}
    answer = ask(path, request | {"reason": reason}, LONGEST_WAIT_S)
    if answer["granted_ms"]:
        return Outcome(Ending.FINISHED, data=answer)
    why = f": {answer['reason']}" if answer["reason"] else ""
    problem = Problem("OVERTIME_DECLINED", f"{_VERDICTS.get(answer['verdict'], 'no overtime')}{why}")
    return Outcome(Ending.FINISHED, problem, answer)


def _show_overtime(envelope: Envelope) -> None:
    data: Any = envelope.data
    if data["granted_ms"]:
        left = "" if data["remaining_ms"] is None else f", {format_duration(data['remaining_ms'])} left in all"
        write_quietly(sys.stdout, f"granted {format_duration(data['granted_ms'])}{left}\n")


COMMANDS: dict[str, Subcommand | CommandTable] = {
    "job": job_table(JobScope(["shotclock"])),
    "overtime": Subcommand(
        "overtime",
        options=(
            Option.duration("--by", "The time to add (30s).", is_positive=True, missing=_NO_EXTENSION),
            Option.taking("--reason", "TEXT", "The reason, for the observer that decides.", missing=_NO_REASON),
            Option.timeout("10m"),
        ),
        run=request_overtime,
        usage="--by D --reason TEXT",
    ),
}
