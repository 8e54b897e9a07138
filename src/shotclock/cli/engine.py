"""`shotclock worker`, `shotclock engine` and `shotclock run --on`: workflows on Temporal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.clocks import NS_PER_MS, ClockKind, Fired
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending, Failure
from ..core.value_types import value
from ..dispatch.job_client import JobClient
from ..inbox.access import Principal
from ..inbox.person_wait import refusal_outcome
from ..process.clock import monotonic_ns, wall_time
from ..runtime.call import Call, Outcome
from ..runtime.outcomes import outcome_of_error
from ..store.home import HOME_VARIABLE
from ..store.store import Store
from ..temporal.connection import Address, connect, require_sdk
from ..workflow.engine import RunCaller, RunRequest
from ..workflow.report import Report
from ..workflow.state import Status, count_steps, describe_as_job
from .control import show_control
from .output import Signalled, StopSignal, raise_on_stop, say_line
from .subcommand import Verb, Work, admit_call, conclude, deliver

if TYPE_CHECKING:
    from ..temporal.client import RunSummary

# Runs in a list of jobs.
MOST_LISTED = 100
# A run that is cancelled cleans up, which has five minutes; one that no worker takes does not even begin with it.
CANCEL_LIMIT_S = 320.0


def _serve_until_stopped(name: str, serve: Callable[[asyncio.Future[str]], Awaitable[str]], as_json: bool) -> int:
    """Serve until a signal comes, and say by what it was stopped. Returns the exit code."""
    call = admit_call(name, 0)

    async def main() -> str:
        with StopSignal() as stop:
            return await serve(stop)

    def body() -> Outcome:
        raise_on_stop()
        try:
            require_sdk()
            return Outcome(Ending.FINISHED, data={"stopped_by": asyncio.run(main())})
        except (Failure, Signalled):
            raise
        except Exception as error:  # of the SDK, or ours; whoever waits for an envelope gets one
            return outcome_of_error(error)

    return deliver(conclude(call, body), as_json)


def worker_main(on: Address, options: dict[str, Any], as_json: bool) -> int:
    """Serve as a worker until told to stop."""

    async def serve(stop: asyncio.Future[str]) -> str:
        from ..temporal.worker import WorkerOptions, serve_worker

        asked = WorkerOptions(options["queue"], options["max_parallel"], options["drain_ms"], options["folder"])
        ready = f"worker: takes up to {asked.most_steps} steps at a time from {asked.queue} of {on}"
        return await serve_worker(on, asked, stop, lambda: say_line(ready))

    return _serve_until_stopped("worker", serve, as_json)


def dev_main(options: dict[str, Any], as_json: bool) -> int:
    """Serve as the engine, for trying it out, until told to stop."""

    async def serve(stop: asyncio.Future[str]) -> str:
        from ..runtime.runtime import Runtime
        from ..temporal.dev_server import DevServer, run_dev_server

        server = DevServer(options["port"], options["db"], options["ui"])
        async with Runtime() as runtime, run_dev_server(server, runtime) as process:
            say_line(f"engine: {server.address} answers")
            waits: list[asyncio.Future[Any]] = [stop, process.ended]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # it is there until somebody wants it gone
            if not stop.done():
                raise Failure("CONNECTION_LOST", "the server has ended by itself")
            return stop.result()

    return _serve_until_stopped("engine dev", serve, as_json)


async def perform_on_runs(verb: Verb, on: Address, call: Call, budget_ms: int | None) -> Outcome | Envelope:
    """Do one of list, status, wait and cancel with the runs of an engine, as with jobs; an envelope is the run's own.
    Raises Failure."""
    require_sdk()
    from ..temporal.client import list_runs, unknown_outcome

    if verb.name == "list":
        found = await list_runs(await connect(on), MOST_LISTED, active_only=bool(verb.values["active"]))
        return Outcome(Ending.FINISHED, data={"jobs": [_describe_as_job(run, on) for run in found]})
    run_id = str(verb.values["job_id"])
    try:
        return await _perform_on_run(verb, run_id, on, call, budget_ms)
    except Failure as failure:
        if failure.code == "RUN_NOT_FOUND":
            raise
        return unknown_outcome(failure, run_id, on.on_command_line)


async def _perform_on_run(
    verb: Verb, run_id: str, on: Address, call: Call, budget_ms: int | None
) -> Outcome | Envelope:
    from ..temporal.client import SEEN_LIMIT, cancel, read_progress, read_summary, wait_at_most

    client = await connect(on)
    run = await read_summary(client, run_id)
    problem = None
    if verb.name == "cancel":
        if await cancel(client, run_id, CANCEL_LIMIT_S) is None:
            problem = Problem("TIMEOUT", f"run {run_id} has not stopped within {CANCEL_LIMIT_S:g}s")
        run = await read_summary(client, run_id)
    if verb.name == "wait":
        until_ns, waits_ms = JobClient.patience(call, budget_ms)
        left_s = None if until_ns is None else max(0, until_ns - monotonic_ns()) / 1e9
        if (ended := await wait_at_most(client, run_id, left_s)) is not None:
            return ended
        fired = Fired(ClockKind.BUDGET, "caller", waits_ms, (monotonic_ns() - call.started_ns) // NS_PER_MS)
        run = await read_summary(client, run_id)
        message = f"run {run_id} is {run.status.value}; data.continue_command goes on with it"
        problem = Problem("INCOMPLETE", message, fired=fired)
    data = _describe_as_job(run, on)
    with contextlib.suppress(Failure):  # no worker answers for it
        told = await read_progress(client.get_workflow_handle(run_id), SEEN_LIMIT)
        data["timeout_ms"] = told["limit_ms"]
        data["progress"] = count_steps([Status(step["status"]) for step in told["steps"].values()])
    if verb.name == "wait":
        data["state"] = "paused" if run.status is Status.PARKED else "running"
        return Outcome(Ending.DETACHED, problem, data)
    return Outcome(Ending.FINISHED, problem, data)


def _describe_as_job(run: RunSummary, on: Address) -> dict[str, Any]:
    shown = describe_as_job(run.run_id, run.name, run.status, run.started_at, run.ended_at, on.on_command_line)
    return shown if run.code is None else {**shown, "code": run.code}


def list_on_engine(on: Address, most: int) -> list[dict[str, object]]:
    """Return the last runs of an engine, as `shotclock report` lists those of the store. Raises Failure."""
    require_sdk()
    from ..temporal.client import list_runs

    async def main() -> list[RunSummary]:
        return await list_runs(await connect(on), most)

    return [
        {
            "run_id": run.run_id,
            "name": run.name,
            "status": run.status.value,
            "started_at": run.started_at.iso(),
            "ended_at": None if run.ended_at is None else run.ended_at.iso(),
            "duration_ms": None if run.ended_at is None else run.ended_at.since_ms(run.started_at),
            "why": run.code or "",
        }
        for run in asyncio.run(main())
    ]


def order_on_engine(
    name: str,
    on: Address,
    run_id: str,
    step: str | None,
    by_ms: int | None,
    within_ms: int | None = None,
    reason: str = "",
) -> Work:
    """Return the work of giving a run or a step of it more time, or of winding it down."""

    def body() -> Outcome:
        async def main() -> dict[str, Any]:
            require_sdk()
            from ..temporal.client import send_order

            client = await connect(on)
            who = Principal.local().name
            handle = client.get_workflow_handle(run_id)
            return await send_order(
                handle,
                {"run_id": run_id, "step": step, "who": who, "by_ms": by_ms, "within_ms": within_ms, "reason": reason},
            )

        try:
            return Outcome(Ending.FINISHED, data=asyncio.run(main()))
        except Failure as failure:
            return refusal_outcome(failure)

    return Work(name, body, mutates=True, show=show_control)


def report_on_engine(on: Address, run_id: str) -> Report:
    """Return the report of a run that an engine has. Raises Failure."""
    require_sdk()
    from ..temporal.client import as_accepted, find_run, read_report

    async def main() -> Report:
        client = await connect(on)
        try:
            return await read_report(client, run_id, wall_time(), on.on_command_line)
        except Failure as failure:
            if failure.code != "RUN_NOT_FOUND":
                raise
            return await read_report(client, await find_run(client, run_id), wall_time(), on.on_command_line)

    try:
        return asyncio.run(main())
    except Failure as failure:
        raise failure if failure.code == "RUN_NOT_FOUND" else as_accepted(failure, run_id, on.on_command_line) from None


def decide_on_engine(on: Address, id: str | None, decides: bool, perform: Callable[[], Outcome]) -> Outcome:
    """Do something with what the runs of an engine ask people. `decides`: it decides about the proposal of this id, and
    only what its run has taken counts. Raises Failure."""
    require_sdk()
    from ..temporal.client import pull_proposals, push_decision, refuse_decided

    async def pull(store: Store) -> dict[str, str]:
        client = await connect(on)
        found = await pull_proposals(client, store, id)
        if decides and id not in found:
            await refuse_decided(client, str(id))
        return found

    async def push(store: Store, run_id: str) -> None:
        await push_decision(await connect(on), run_id, store, str(id))

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
        if decides and outcome.problem is None:
            asyncio.run(push(store, runs[str(id)]))
        data: Any = outcome.data
        for each in data.get("proposals", ()) if isinstance(data, dict) else ():
            each["run_id"] = runs[each["id"]]
        return outcome


@value
class RunOnEngine:
    """A run that is given to an engine, or the id of one that it has."""

    on: Address
    request: RunRequest | str
    queue: str | None
    heartbeat_ms: int | None

    async def carry_out(self, caller: RunCaller) -> Envelope:
        """Return the envelope of the run. Raises Failure where it cannot be begun or found."""
        require_sdk()
        from ..temporal.client import EngineOptions, answer_unknown, start, wait_again
        from ..temporal.messages import DEFAULT_HEARTBEAT_MS, DEFAULT_QUEUE

        where = self.on.on_command_line
        if isinstance(self.request, str):
            try:
                return await wait_again(await connect(self.on), self.request, caller, where)
            except Failure as failure:
                if failure.code == "RUN_NOT_FOUND":
                    raise
                return answer_unknown(failure, self.request, where)
        options = EngineOptions(self.queue or DEFAULT_QUEUE, self.heartbeat_ms or DEFAULT_HEARTBEAT_MS)
        return await start(await connect(self.on), self.request, caller, options, where)
