"""`shotclock worker`, `shotclock engine` and `shotclock run --on`: workflows on Temporal."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ..core.envelope import Envelope
from ..core.errors import Ending, Failure
from ..core.value_types import value
from ..inbox.access import Principal
from ..inbox.person_wait import refusal_outcome
from ..process.clock import wall_time
from ..runtime.call import Outcome
from ..runtime.outcomes import failure_outcome
from ..store.home import HOME_VARIABLE
from ..store.store import Store
from ..temporal.connection import Address, connect, require_sdk
from ..workflow.engine import RunCaller, RunRequest
from ..workflow.report import Report
from .control import show_control
from .output import StopSignal, raise_on_stop, say_line
from .subcommand import Work, admit_call, conclude, deliver


def _serve_until_stopped(name: str, serve: Callable[[asyncio.Future[str]], Awaitable[str]], as_json: bool) -> int:
    """Serve until a signal comes, and say by what it was stopped. Returns the exit code."""
    call = admit_call(name, 0)

    async def main() -> str:
        with StopSignal() as stop:
            return await serve(stop)

    def body() -> Outcome:
        raise_on_stop()
        require_sdk()
        return Outcome(Ending.FINISHED, data={"stopped_by": asyncio.run(main())})

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


def cancel_on_engine(on: Address, run_id: str) -> Outcome:
    """Stop a run that an engine has, and say how it ended."""
    require_sdk()
    from ..temporal.client import cancel

    async def main() -> Envelope:
        client = await connect(on)
        return await cancel(client.get_workflow_handle(run_id))

    try:
        ended = asyncio.run(main())
    except Failure as failure:
        return failure_outcome(failure)
    data: Any = ended.data
    shown = {"run_id": run_id, "code": ended.code, "ok": ended.ok, "steps": data["steps"] if data else {}}
    return Outcome(Ending.FINISHED, data=shown)


def order_on_engine(name: str, on: Address, run_id: str, step: str | None, by_ms: int | None) -> Work:
    """Return the work of giving a step of a run more time, or of winding it or its run down."""

    def body() -> Outcome:
        async def main() -> dict[str, Any]:
            require_sdk()
            from ..temporal.client import send_order

            client = await connect(on)
            who = Principal.local().name
            handle = client.get_workflow_handle(run_id)
            return await send_order(
                handle,
                {"run_id": run_id, "step": step, "who": who, "by_ms": by_ms, "within_ms": None, "reason": ""},
            )

        try:
            return Outcome(Ending.FINISHED, data=asyncio.run(main()))
        except Failure as failure:
            return refusal_outcome(failure)

    return Work(name, body, mutates=True, show=show_control)


def report_on_engine(on: Address, run_id: str) -> Report:
    """Return the report of a run that an engine has. Raises Failure."""
    require_sdk()
    from ..temporal.client import read_report

    async def main() -> Report:
        return await read_report(await connect(on), run_id, wall_time())

    return asyncio.run(main())


def decide_on_engine(on: Address, id: str | None, decides: bool, perform: Callable[[], Outcome]) -> Outcome:
    """Do something with what the runs of an engine ask people. `decides`: it decides about the proposal of this id, and
    only what its run has taken counts. Raises Failure."""
    require_sdk()
    from ..temporal.client import pull_proposals, push_decision

    async def pull(store: Store) -> dict[str, str]:
        return await pull_proposals(await connect(on), store, id)

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
        from ..temporal.client import EngineOptions, start, wait_for_end
        from ..temporal.messages import DEFAULT_HEARTBEAT_MS, DEFAULT_QUEUE

        client = await connect(self.on)
        if isinstance(self.request, str):
            return await wait_for_end(client, self.request, caller, self.on.on_command_line)
        options = EngineOptions(self.queue or DEFAULT_QUEUE, self.heartbeat_ms or DEFAULT_HEARTBEAT_MS)
        return await start(client, self.request, caller, options, self.on.on_command_line)
