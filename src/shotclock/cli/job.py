"""`job list|status|wait|cancel`: what goes on after its caller left, for `shotclock` and for every app."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from ..core.catalogue import BUDGET_VARIABLE, DEFAULT_BUDGET_MS
from ..core.clocks import Clocks
from ..core.durations import DurationError, parse_duration_ms
from ..core.effects import Ending
from ..core.envelope import Envelope, stopped_by
from ..core.errors import Failure
from ..core.records import changed
from ..enforce.admission import OURSELVES, Admission, Outcome, Tool, admit, answer, inherited_deadline
from ..enforce.clock import monotonic_ns, process_began_ns
from ..enforce.handlers import raised
from ..jobs.front import Front
from ..store import Store
from . import signals
from .output import emit, is_terminal, say_line, summary_line, wants_json, write_quietly
from .parsing import Mistakes, mistaken, parse_verb
from .words import Parameter, Words

# Looking and cancelling take a moment; the store's own waits are shorter than this.
TIMEOUT_MS = 30_000

_FLAG = Parameter(negative="", show_default=False)
_JSON = Annotated[bool, _FLAG]
_ID = Annotated[str | None, Parameter(name="job-id")]


def main(words: list[str], *, app: str | None, command: list[str], tool: Tool = OURSELVES) -> int:
    """`app` limits the list to one app's jobs, `command` is how the job commands are called."""
    as_json = wants_json("--json" in words)
    spoken = parse_verb(_vocabulary(command), words, command=f"{' '.join(command)} job")
    if spoken is None:
        return 0
    verb, said, mistakes = spoken
    if said and verb != "list" and said["job_id"] is None:
        mistakes.append({"field": "job-id", "message": "which one? `job list` lists them"})
    budget_ms = _budget(said.get("budget"), mistakes)
    if mistakes:
        return deliver(mistaken(f"job {verb}".strip(), mistakes, tool), as_json)
    # Waiting is bounded by the budget, and without one by the job's own clocks.
    clocks = Clocks(timeout_ms=0 if verb == "wait" else TIMEOUT_MS)
    admission = admit(
        f"job {verb}",
        clocks,
        parent=inherited_deadline(os.environ, monotonic_ns()).deadline,
        mutates=verb == "cancel",
        idempotent=True,
        tool=tool,
        began_ns=process_began_ns(),
    )

    async def perform() -> Envelope:
        with Store.open() as store:
            try:
                return await Front(store, command).perform(
                    verb,
                    said.get("job_id"),
                    admission,
                    app=app,
                    active_only=bool(said.get("active")),
                    budget_ms=budget_ms,
                )
            except Failure as failure:
                if failure.code != "JOB_NOT_FOUND" or app is not None:
                    raise
                run = await asyncio.to_thread(store.runs.get, str(said["job_id"]))
                if run is None:
                    raise
                from .job_run import answer_of_run

                return await answer_of_run(verb, run, store, admission, command, budget_ms)

    try:
        envelope = asyncio.run(_unless_signalled(perform, admission))
    except Failure as failure:
        envelope = answer(admission, raised(failure))
    return deliver(envelope, as_json)


async def _unless_signalled(perform: Callable[[], Awaitable[Envelope]], admission: Admission) -> Envelope:
    """A signal ends the waiting. The job goes on: it is not ours."""
    with signals.told() as stop:
        working = asyncio.ensure_future(perform())
        both: list[asyncio.Future[Any]] = [working, stop]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)  # bounded by the budget or the job's clocks
        if working.done():
            return working.result()
        working.cancel()
        problem = stopped_by(stop.result())
        problem = changed(problem, message=f"{problem.message}; the job goes on")
    return answer(admission, Outcome(Ending.CANCELLED, problem, {"partial": True}))


def _budget(written: str | None, mistakes: Mistakes) -> int | None:
    if written is not None:
        try:
            return parse_duration_ms(written) or None
        except DurationError as error:
            mistakes.append({"field": "budget", "message": str(error)})
            return None
    said = os.environ.get(BUDGET_VARIABLE, "").strip()
    if said.isdecimal():
        return int(said) or None
    return None if is_terminal(sys.stdout) else DEFAULT_BUDGET_MS


def _vocabulary(command: list[str]) -> Words:
    words = Words(
        name="job",
        help="Work that goes on after its caller left.",
        usage=f"Usage: {' '.join(command)} job VERB [OPTIONS]",
    )

    @words.command(name="list")
    def list_(*, active: Annotated[bool, _FLAG] = False, json: _JSON = False) -> None:
        """List the jobs, the newest first.

        Parameters
        ----------
        active
            Only those that still run.
        """

    @words.command()
    def status(job_id: _ID = None, /, *, json: _JSON = False) -> None:
        """Say how far a job is. The beginning of its id will do."""

    @words.command()
    def wait(
        job_id: _ID = None, /, *, budget: Annotated[str | None, Parameter(metavar="D")] = None, json: _JSON = False
    ) -> None:
        """Wait for a job and answer with its result, or INCOMPLETE once the budget is used up.

        Parameters
        ----------
        budget
            How long to wait (30s off a terminal, else until it ends).
        """

    @words.command()
    def cancel(job_id: _ID = None, /, *, json: _JSON = False) -> None:
        """Stop a job, and wait until it has stopped."""

    return words


def deliver(envelope: Envelope, as_json: bool) -> int:
    signals.only_note()
    if as_json:
        return emit(envelope, signals.heard)
    if isinstance(envelope.data, dict):
        write_quietly(sys.stdout, _readable(envelope.data), signals.heard)
    if envelope.error is not None or envelope.warnings:
        say_line(summary_line(envelope))
    return envelope.exit_code


def _readable(data: dict[str, Any]) -> str:
    if "jobs" in data:
        return "".join(_line(job) for job in data["jobs"]) or "no jobs\n"
    if "job_id" in data and "status" in data:
        return _line(data)
    import json

    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _line(job: dict[str, Any]) -> str:
    progress = job["progress"]
    of = f"/{progress['total']}" if "total" in progress else ""
    unit = f" {progress['unit']}" if "unit" in progress else ""
    code = f"  {job['code']}" if "code" in job else ""
    return f"{job['job_id']}  {job['status']:<9}  {job['command']:<20}  {progress['done']}{of}{unit}{code}\n"
