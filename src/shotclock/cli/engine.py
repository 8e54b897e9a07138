"""The engines of the command line: this machine, or Temporal with `--on`; `shotclock worker` and `engine`.

Also orders to a call in another process: `shotclock overtime`, `run --extend`, `run --wind-down`, `job extend` and
`job stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core.clocks import NS_PER_MS, ClockKind, Fired, format_duration, parse_duration_ms
from ..core.envelope import Envelope, Problem, Warning_
from ..core.errors import Ending, Failure
from ..core.proposal import UNCONFIRMED, Confirmation, Decision, Proposal
from ..dispatch.job_client import JobClient
from ..inbox.access import Principal
from ..inbox.person_wait import refusal_outcome
from ..process.clock import monotonic_ns
from ..process.environment import OVERTIME_VARIABLE
from ..process.zygote import start_zygote_early, stop_early_zygote
from ..runtime.call import Call, Outcome
from ..runtime.control_channel import ask
from ..runtime.outcomes import outcome_of_error
from ..runtime.runtime import Runtime
from ..store.audit import Entry
from ..store.store import Store
from ..workflow.engine import EmbeddedEngine, Engine, RunOrder
from ..workflow.state import Status
from .output import Signalled, StopListener, raise_on_stop, say_line, signals_heard, write_quietly
from .parser import Subcommand, argument, duration, flag, option, whole_number
from .subcommand import JSON, ChildWork, admit_call, conclude, deliver, engine_options, timeout_option

if TYPE_CHECKING:
    from ..temporal.connection import Address
    from ..temporal.engine import TemporalEngine

LONGEST_WAIT_S = 24 * 3600.0  # the observer may be a person
_VERDICTS = {"declined": "overtime was declined", "failed": "no overtime", "exhausted": "there is no overtime left"}
_NO_DURATION = "--by needs a duration, such as --by 30s"
_NO_REASON = "--reason needs a text for the observer that decides"


def temporal_engine(on: Address, queue: str | None = None, heartbeat_ms: int | None = None) -> TemporalEngine:
    from ..temporal.connection import require_sdk

    require_sdk()
    from ..temporal.engine import TemporalEngine

    return TemporalEngine(on, queue=queue, heartbeat_ms=heartbeat_ms)


@contextlib.contextmanager
def open_engine(on: Address | None, queue: str | None = None, heartbeat_ms: int | None = None) -> Iterator[Engine]:
    if on is not None:
        yield temporal_engine(on, queue, heartbeat_ms)
    else:
        with Store.open() as store:
            yield EmbeddedEngine(store)


async def manage_run(engine: Engine, verb: str, run_id: str, call: Call, budget_ms: int | None) -> Outcome | Envelope:
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
    data["state"] = "running" if run.status is Status.RUNNING else "paused"
    fired = Fired(ClockKind.BUDGET, "caller", waits_ms, (monotonic_ns() - call.started_ns) // NS_PER_MS)
    message = f"run {run_id} is {run.status.value}; continue it with data.continue_command"
    return Outcome(Ending.DETACHED, Problem("INCOMPLETE", message, fired=fired), data)


async def manage_run_on(on: Address, verb: str, run_id: str, call: Call, budget_ms: int | None) -> Outcome | Envelope:
    engine = temporal_engine(on)
    try:
        return await manage_run(engine, verb, run_id, call, budget_ms)
    except Failure as failure:
        if failure.code == "RUN_NOT_FOUND":
            raise
        return engine.unknown_outcome(failure, run_id)


class EngineInbox:
    """The open proposals of runs on Temporal: the part of an Inbox that shows and decides them."""

    def __init__(self, on: Address) -> None:
        self._engine = temporal_engine(on)

    async def _find(self, id: str) -> tuple[str, Proposal]:
        """Return the run and its proposal. Raises Failure where it is decided or unknown."""
        if found := await self._engine.find_proposals(id):
            return found[0]
        await self._engine.refuse_decided(id)
        raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id!r}")

    async def get(self, id: str) -> Proposal:
        return (await self._find(id))[1]

    async def history(self, id: str) -> list[Entry]:
        return []  # the trail of a proposal is in the stores that handled it

    async def decide(
        self, id: str, decision: Decision, by: Principal, confirmation: Confirmation = UNCONFIRMED
    ) -> Proposal:
        """Decide a proposal, which counts once its run has accepted it."""
        run_id, _ = await self._find(id)
        return await self._engine.decide(run_id, id, decision, by, confirmation)


def _serve_until_stopped(name: str, serve: Callable[[asyncio.Future[str]], Awaitable[str]], as_json: bool) -> int:
    from ..temporal.connection import require_sdk

    call = admit_call(name, 0)

    async def main() -> str:
        with StopListener() as stop:
            return await serve(stop)

    def body() -> Outcome:
        raise_on_stop()
        try:
            require_sdk()
            return Outcome(Ending.FINISHED, data={"stopped_by": asyncio.run(main())})
        except (Failure, Signalled):
            raise
        except Exception as error:  # of the SDK, or a bug: the caller gets an envelope
            return outcome_of_error(error)

    return deliver(conclude(call, body), as_json)


def _run_worker(on: Address, queue: str, max_parallel: int, folder: str | None, drain_ms: int) -> Callable[[bool], int]:
    async def serve(stop: asyncio.Future[str]) -> str:
        from ..temporal.worker import WorkerOptions, serve_worker

        options = WorkerOptions(queue, max_parallel, drain_ms, folder)
        ready = f"worker: takes up to {options.most_steps} steps at a time from {options.queue} of {on}"
        return await serve_worker(on, options, stop, lambda: say_line(ready))

    def start(as_json: bool) -> int:
        start_zygote_early()  # before there are threads, of which the SDK of Temporal has several
        try:
            return _serve_until_stopped("worker", serve, as_json)
        finally:
            stop_early_zygote()

    return start


def _run_dev_server(what: str, port: int, db: str | None, ui: bool) -> Callable[[bool], int]:
    async def serve(stop: asyncio.Future[str]) -> str:
        from ..temporal.connection import Address, run_dev_server

        async with Runtime() as runtime, run_dev_server(runtime, port, db, ui) as process:
            say_line(f"engine: {Address('127.0.0.1', port)} answers")
            waits: list[asyncio.Future[Any]] = [stop, process.ended]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # unbounded: it serves until it is stopped
            if not stop.done():
                raise Failure("CONNECTION_LOST", "the server has ended by itself")
            return stop.result()

    return lambda as_json: _serve_until_stopped("engine dev", serve, as_json)


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
        write_quietly(sys.stdout, f"granted {format_duration(data['granted_ms'])}{left}\n", signals_heard)


def control_run(
    name: str,
    run_id: str,
    step: str | None,
    by_ms: int | None = None,
    within_ms: int | None = None,
    reason: str = "",
    on: Address | None = None,
) -> ChildWork:
    def body() -> Outcome:
        order = RunOrder(run_id, step, Principal.local().name, by_ms, within_ms, reason)
        with open_engine(on) as engine:
            return Outcome(Ending.FINISHED, data=asyncio.run(engine.order(order)))

    return ChildWork(name, body, mutates=True, show=show_control, on_failure=refusal_outcome)


def show_control(envelope: Envelope) -> None:
    if not envelope.ok or not isinstance(envelope.data, dict):
        return
    data: Any = envelope.data
    for call in data.get("extended", ()):
        left = "" if call["remaining_ms"] is None else f", {format_duration(call['remaining_ms'])} left"
        line = f"{call['name']}: {format_duration(call['granted_ms'])} more{left}\n"
        write_quietly(sys.stdout, line, signals_heard)
    for call in data.get("stopping", ()):
        within = format_duration(call["winding_down"]["remaining_ms"])
        write_quietly(sys.stdout, f"{call['name']}: winding down, {within} at most\n", signals_heard)


def _read_extension(text: str) -> int:
    if not (by_ms := parse_duration_ms(text)):
        raise ValueError(_NO_DURATION)
    return by_ms


def _read_reason(text: str) -> str:
    if not text.strip():
        raise ValueError(_NO_REASON)
    return text


def _read_positive(text: str) -> int:
    if (number := whole_number(text)) < 1 or number > 999_999:
        raise ValueError(f"{text[:40]!r} is not a whole number above 0")
    return number


COMMANDS = {
    "worker": Subcommand(
        "worker",
        options=(
            option("--queue", "NAME", "The queue, as named in `runs_on`.", default="shotclock"),
            option("--max-parallel", "N", "Run at most this many steps at a time.", read=_read_positive, default="8"),
            option("--folder", "DIR", "Run steps here whose workflow's folder does not exist on this machine."),
            duration(
                "--drain",
                "The time that running steps have to end after a stop; other workers repeat those that do not.",
                default="30s",
                key="drain_ms",
            ),
            JSON,
            *engine_options("The engine: temporal://HOST:PORT[/NAMESPACE].", missing="missing --on URL: the engine"),
        ),
        run=_run_worker,
        usage="--on URL [OPTIONS]",
    ),
    "engine": Subcommand(
        "engine",
        options=(
            argument("what", "dev.", choices=("dev",), missing="missing WHAT: dev"),
            option("--port", "N", "Listen on this port of this machine.", read=_read_positive, default="7233"),
            option("--db", "FILE", "Keep the state in this file; without one it is lost when the server stops."),
            flag("--ui", "Serve Temporal's own web page as well, on the port 1000 above."),
            JSON,
        ),
        run=_run_dev_server,
        usage="dev [OPTIONS]",
    ),
    "overtime": Subcommand(
        "overtime",
        options=(
            option("--by", "D", "The time to add (30s).", read=_read_extension, missing=_NO_DURATION),
            option(
                "--reason", "TEXT", "The reason, for the observer that decides.", read=_read_reason, missing=_NO_REASON
            ),
            JSON,
            timeout_option("10m"),
        ),
        run=request_overtime,
        usage="--by D --reason TEXT",
    ),
}
