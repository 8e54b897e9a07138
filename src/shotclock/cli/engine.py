"""The engines of the command line: this machine, or Temporal with `--on`; `shotclock worker` and `engine`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.clocks import NS_PER_MS, ClockKind, Fired
from ..core.envelope import Envelope, Problem, Warning_
from ..core.errors import Ending, Failure
from ..process.clock import monotonic_ns
from ..process.zygote import start_zygote_early, stop_early_zygote
from ..runtime.call import Call, Outcome
from ..runtime.outcomes import outcome_of_error
from ..store.home import HOME_VARIABLE
from ..store.store import Store
from ..workflow.engine import EmbeddedEngine, Engine
from ..workflow.state import Status
from .output import Signalled, StopListener, raise_on_stop, say_line
from .parser import Subcommand, argument, duration, flag, option, whole_number
from .subcommand import JSON, admit_call, conclude, deliver, engine_options

if TYPE_CHECKING:
    from ..temporal.connection import Address
    from ..temporal.engine import TemporalEngine


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
    from ..dispatch.job_client import JobClient

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


def perform_on_proposals(on: Address, id: str | None, decides: bool, perform: Callable[[], Outcome]) -> Outcome:
    """Perform a command of `inbox` in a temporary store. A decision counts only once its run has accepted it."""

    async def pull(store: Store) -> dict[str, str]:
        engine = temporal_engine(on)
        found = await engine.pull_proposals(store, id)
        if decides and id not in found:
            await engine.refuse_decided(str(id))
        return found

    before = os.environ.get(HOME_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="shotclock-inbox-") as home, Store.open(Path(home)) as store:
        runs = asyncio.run(pull(store))
        os.environ[HOME_VARIABLE] = home
        try:
            outcome = perform()
        finally:
            os.environ.pop(HOME_VARIABLE)
            if before is not None:
                os.environ[HOME_VARIABLE] = before
        record = store.proposals.export(str(id)) if decides and outcome.problem is None else None
        if record is not None:
            asyncio.run(temporal_engine(on).send_decision(runs[str(id)], record))
        data: Any = outcome.data
        for each in data.get("proposals", ()) if isinstance(data, dict) else ():
            each["run_id"] = runs[each["id"]]
        return outcome


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
        from ..runtime.runtime import Runtime
        from ..temporal.connection import Address, run_dev_server

        async with Runtime() as runtime, run_dev_server(runtime, port, db, ui) as process:
            say_line(f"engine: {Address('127.0.0.1', port)} answers")
            waits: list[asyncio.Future[Any]] = [stop, process.ended]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # unbounded: it serves until it is stopped
            if not stop.done():
                raise Failure("CONNECTION_LOST", "the server has ended by itself")
            return stop.result()

    return lambda as_json: _serve_until_stopped("engine dev", serve, as_json)


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
}
