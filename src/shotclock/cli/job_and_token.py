"""`job list|status|wait|extend|stop|cancel`, for `shotclock` and for every App, and `token create|list|revoke`."""

from __future__ import annotations

import os
import sys

from ..core.catalogue import BUDGET_VARIABLE, DEFAULT_BUDGET_MS
from ..core.clocks import WallTime, parse_duration_ms
from ..core.envelope import Envelope, stop_problem
from ..core.errors import Ending, Failure
from ..core.value_types import replace
from ..process.clock import wall_time
from ..runtime.call import OURSELVES, Call, Outcome, Tool
from ..store.store import Store
from .output import StopSignal, is_terminal, say_line, signals_heard, write_quietly
from .parser import Command, CommandTable, argument, duration, flag, option
from .subcommand import TIMEOUT_MS, Verb, Work, admit_call, conclude, deliver, engine_options, perform, read_verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any

    from ..store.tokens import Token
    from ..temporal.connection import Address

_JSON = flag("--json", "The envelope alone on stdout, also on a terminal.")
_JOB_ID = argument("job-id", "The job, or the beginning of its id.")


# A run that is cancelled cleans up, which has five minutes at most (workflow/run_context.CLEAN_UP_LIMIT_MS).
CANCEL_MS = 300_000 + TIMEOUT_MS
# Runs in a list of jobs.
MOST_RUNS = 100


# --- jobs -----------------------------------------------------------------------------------------------------

_JOB_COMMANDS = (
    Command("list", "List the jobs, the newest first.", (flag("--active", "Only those that still run."), _JSON)),
    Command("status", "Say how far a job is. The beginning of its id will do.", (_JOB_ID, _JSON)),
    Command(
        "wait",
        "Wait for a job and answer with its result, or INCOMPLETE once the budget is used up.",
        (_JOB_ID, duration("--budget", "How long to wait (30s off a terminal, else until it ends)."), _JSON),
    ),
    Command(
        "extend",
        "Give a job, or a run, more time while it runs.",
        (_JOB_ID, argument("by", "How much longer (30s).", read=parse_duration_ms), _JSON),
        usage="JOB-ID D",
    ),
    Command(
        "stop",
        "Ask a job, or a run, to end by itself; what has not after that is stopped. What is done so far is kept.",
        (
            _JOB_ID,
            duration("--within", "How long it may take (its own, or 5s)."),
            option("--reason", "TEXT", "Why; the work and its answer carry it.", default=""),
            _JSON,
        ),
    ),
    Command("cancel", "Stop a job at once, and wait until it has stopped.", (_JOB_ID, _JSON)),
)


def job_table(command: list[str], *, has_engine: bool = False) -> CommandTable:
    """Return the table of `job`. `command` is how the job commands are called; `has_engine`: they take runs of one."""
    more = engine_options("The runs on Temporal instead: temporal://HOST:PORT[/NAMESPACE].") if has_engine else ()
    commands = tuple(replace(each, parameters=(*each.parameters, *more)) for each in _JOB_COMMANDS)
    return CommandTable(f"{' '.join(command)} job", "Work that goes on after its caller left.", commands, "verb")


def job_main(words: list[str], *, app: str | None, command: list[str], tool: Tool = OURSELVES) -> int:
    """Run `job VERB`. `app` limits the list to one app's jobs, `command` is how the job commands are called."""

    def check(verb: str, said: dict[str, Any], report: Callable[[str, str], None]) -> None:
        if verb not in ("", "list") and said["job_id"] is None:
            report("job-id", "which one? `job list` lists them")
        if verb == "extend" and not said["by"]:
            report("by", "by how much? `job extend JOB 30s`")

    verb = read_verb(job_table(command, has_engine=app is None), words, check, names_verb=True, tool=tool)
    if isinstance(verb, int):
        return verb
    # Waiting is bounded by the budget, and without one by the job's own clocks.
    timeout_ms = {"wait": 0, "cancel": CANCEL_MS}.get(verb.name, TIMEOUT_MS)
    call = admit_call(
        f"job {verb.name}",
        timeout_ms,
        mutates=verb.name in ("cancel", "extend", "stop"),
        idempotent=verb.name != "extend",
        tool=tool,
        since_start=True,
    )
    on: Address | None = verb.values.get("on")
    if verb.name in ("extend", "stop") and on is not None:
        from .control import control_run

        how = (verb.values.get("by"), verb.values.get("within"), verb.values.get("reason") or "")
        return perform(control_run(call.name, str(verb.values["job_id"]), None, *how, on=on), verb.as_json)
    if verb.name in ("extend", "stop"):
        from .control import show_control

        return deliver(conclude(call, lambda: _control_or_refuse(verb, app)), verb.as_json, show_control)
    return deliver(conclude(call, lambda: _perform_job(verb, call, app, command)), verb.as_json, _show_jobs)


def _control_or_refuse(verb: Verb, app: str | None) -> Outcome:
    from ..inbox.person_wait import refusal_outcome

    try:
        return _control_job(verb, app)
    except Failure as failure:
        return refusal_outcome(failure)


def _control_job(verb: Verb, app: str | None) -> Outcome:
    """Extend a running job or run, or wind it down. Raise Failure if it cannot be reached."""
    import asyncio

    from ..dispatch.job_client import JobClient
    from ..inbox.access import Principal
    from ..workflow.engine import EmbeddedEngine, RunOrder, send_order

    said, name = verb.values, str(verb.values["job_id"])
    how = (Principal.local().name, said.get("by"), said.get("within"), said.get("reason") or "")
    with Store.open() as store:
        try:
            job = JobClient(store, []).find(name)
        except Failure as failure:
            if failure.code != "JOB_NOT_FOUND" or app is not None or store.runs.get(name) is None:
                raise
            data = asyncio.run(EmbeddedEngine(store).order(RunOrder(name, None, *how)))
            return Outcome(Ending.FINISHED, data=data)
        if not job.is_active or job.runner is None:
            state = "has ended" if not job.is_active else "is only being started"
            raise Failure("CALL_NOT_FOUND", f"job {job.id} {state}")
        data = send_order(store, job.runner, f"job {job.id}", RunOrder(job.id, None, *how))
        return Outcome(Ending.FINISHED, data=data)


def _perform_job(verb: Verb, call: Call, app: str | None, command: list[str]) -> Outcome | Envelope:
    import asyncio

    from ..dispatch.job_client import JobClient

    said, budget_ms = verb.values, _budget(verb.values.get("budget"))

    async def perform() -> Outcome | Envelope:
        if (on := verb.values.get("on")) is not None:
            from .engine import manage_run_on, temporal_engine

            if verb.name == "list":
                runs = await temporal_engine(on).list_runs(MOST_RUNS, active_only=bool(said["active"]))
                jobs = [run.as_job(on.on_command_line) for run in runs]
                return Outcome(Ending.FINISHED, data={"jobs": jobs})
            return await manage_run_on(on, verb.name, str(said["job_id"]), call, budget_ms)
        with Store.open() as store:
            try:
                return await JobClient(store, command).perform(
                    verb.name,
                    said.get("job_id"),
                    call,
                    app=app,
                    active_only=bool(said.get("active")),
                    budget_ms=budget_ms,
                )
            except Failure as failure:
                if failure.code != "JOB_NOT_FOUND" or app is not None:
                    raise
                run_id = str(said["job_id"])
                if await asyncio.to_thread(store.runs.get, run_id) is None:
                    raise
                from ..workflow.engine import EmbeddedEngine, manage_run

                return await manage_run(EmbeddedEngine(store), verb.name, run_id, call, budget_ms)

    return asyncio.run(_unless_signalled(perform))


async def _unless_signalled(perform: Callable[[], Awaitable[Outcome | Envelope]]) -> Outcome | Envelope:
    """Stop waiting when a signal comes. The job goes on: it is not ours."""
    import asyncio

    with StopSignal() as stop:
        working = asyncio.ensure_future(perform())
        both: list[asyncio.Future[Any]] = [working, stop]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)  # bounded by the budget or the job's clocks
        if working.done():
            return working.result()
        working.cancel()
        problem = stop_problem(stop.result())
        problem = replace(problem, message=f"{problem.message}; the job goes on")
    return Outcome(Ending.CANCELLED, problem, {"partial": True})


def _budget(asked_ms: int | None) -> int | None:
    if asked_ms is not None:
        return asked_ms or None
    said = os.environ.get(BUDGET_VARIABLE, "").strip()
    if said.isdecimal():
        return int(said) or None
    return None if is_terminal(sys.stdout) else DEFAULT_BUDGET_MS


def _show_jobs(envelope: Envelope) -> None:
    if isinstance(envelope.data, dict):
        write_quietly(sys.stdout, _jobs_in_words(envelope.data), signals_heard)


def _jobs_in_words(data: dict[str, Any]) -> str:
    if "jobs" in data:
        return "".join(_job_line(job) for job in data["jobs"]) or "no jobs\n"
    if "job_id" in data and "status" in data:
        return _job_line(data)
    import json

    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _job_line(job: dict[str, Any]) -> str:
    progress = job.get("progress")  # nobody is asked how far each run of an engine is
    of = f"/{progress['total']}" if progress and "total" in progress else ""
    unit = f" {progress['unit']}" if progress and "unit" in progress else ""
    done = f"  {progress['done']}{of}{unit}" if progress else ""
    code = f"  {job['code']}" if "code" in job else ""
    return f"{job['job_id']}  {job['status']:<9}  {job['command']:<20}{done}{code}\n"


# --- tokens ---------------------------------------------------------------------------------------------------

TOKEN_TABLE = CommandTable(
    "shotclock token",
    "Who may reach the inbox over the network: agents propose and look after their own, operators decide.",
    (
        Command(
            "create",
            "Make a token and print it, this once: only its hash is kept.",
            (
                argument("name", "Who it is for: 1 to 64 letters, digits or ._@+-; proposals and decisions carry it."),
                option("--role", "ROLE", "agent (proposes) or operator (decides).", choices=("agent", "operator")),
                duration("--ttl", "How long it lives (30d, 12h); until it is revoked, if nothing is said."),
                _JSON,
            ),
            usage="--role agent|operator NAME [--ttl D]",
        ),
        Command("list", "List the tokens, the oldest first, with those that were revoked or have expired.", (_JSON,)),
        Command(
            "revoke",
            "End a token, from now on and for good.",
            (argument("name", "The name it was made for, or its id."), _JSON),
            usage="NAME|ID",
        ),
    ),
    "verb",
)


def token_main(words: list[str]) -> int:
    """Run `shotclock token VERB`."""
    verb = read_verb(TOKEN_TABLE, words, _check_token_values)
    if isinstance(verb, int):
        return verb

    def show(envelope: Envelope) -> None:
        if envelope.ok:
            _show_tokens(verb.name, envelope.data)

    work = Work(f"token {verb.name}", lambda: _do_token(verb), mutates=verb.name != "list", show=show)
    return perform(work, verb.as_json)


def _check_token_values(verb: str, said: dict[str, Any], report: Callable[[str, str], None]) -> None:
    if verb == "create" and said["role"] is None:
        report("role", "--role agent may propose, --role operator may decide")
    if verb in ("create", "revoke") and not said["name"]:
        which = "whose? A name is needed" if verb == "create" else "which one? `shotclock token list` lists them"
        report("name", which)


def _do_token(verb: Verb) -> Outcome:
    from ..inbox.access import Access, Principal, Role
    from ..inbox.person_wait import refusal_outcome

    said, now, me = verb.values, wall_time(), Principal.local()
    try:
        with Store.open() as store:
            access = Access(store)
            if verb.name == "list":
                tokens = [_describe_token(token, now) for token in access.tokens()]
                return Outcome(Ending.FINISHED, data={"tokens": tokens})
            if verb.name == "create":
                issued = access.issue(said["name"], Role(said["role"]), me, now, ttl_ms=said["ttl"])
                return Outcome(Ending.FINISHED, data={"token": issued.text, **_describe_token(issued.token, now)})
            revoked = access.revoke(said["name"], me, now)
            if not revoked:
                raise Failure("TOKEN_NOT_FOUND", f"there is no token {said['name']!r} that could be revoked")
            ended = {token.id for token in revoked}
            tokens = [_describe_token(token, now) for token in access.tokens() if token.id in ended]
            return Outcome(Ending.FINISHED, data={"revoked": tokens})
    except Failure as failure:
        return refusal_outcome(failure)


def _describe_token(token: Token, now: WallTime) -> dict[str, object]:
    """Return nothing from which the token could be made."""
    status = "active" if token.is_active(now) else "expired" if token.revoked_at is None else "revoked"
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "status": status,
        "created_at": token.created_at.iso(),
        "expires_at": None if token.expires_at is None else token.expires_at.iso(),
        "revoked_at": None if token.revoked_at is None else token.revoked_at.iso(),
    }


def _show_tokens(verb: str, data: Any) -> None:
    if verb == "create":
        # Alone on stdout, so that it can be taken from there; what is about it is for the person.
        write_quietly(sys.stdout, f"{data['token']}\n", signals_heard)
        say_line(f"this is the only time it is shown; {data['name']} is {data['role']}, token {data['id']}")
        return
    from .render import draw_text, render_tokens

    tokens, now = data["tokens" if verb == "list" else "revoked"], wall_time()
    write_quietly(sys.stdout, draw_text(lambda console: render_tokens(tokens, console, now)), signals_heard)
