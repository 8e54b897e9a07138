"""The engines of the command line: this machine, or Temporal with `--on`; `shotclock worker` and `engine`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.envelope import Envelope
from ..core.errors import Ending, Failure
from ..runtime.call import Call, Outcome
from ..runtime.outcomes import outcome_of_error
from ..runtime.runtime import Runtime
from ..store.home import HOME_VARIABLE
from ..store.store import Store
from ..temporal.connection import Address, DevServer, require_sdk, run_dev_server
from ..workflow.engine import EmbeddedEngine, Engine, manage_run
from .output import Signalled, StopSignal, raise_on_stop, say_line
from .subcommand import admit_call, conclude, deliver

if TYPE_CHECKING:
    from ..temporal.engine import TemporalEngine


def temporal_engine(on: Address, queue: str | None = None, heartbeat_ms: int | None = None) -> TemporalEngine:
    """Return the engine at an address. Raise Failure if the package of Temporal is not installed."""
    require_sdk()
    from ..temporal.engine import TemporalEngine

    return TemporalEngine(on, queue=queue, heartbeat_ms=heartbeat_ms)


@contextlib.contextmanager
def open_engine(on: Address | None, queue: str | None = None, heartbeat_ms: int | None = None) -> Iterator[Engine]:
    """Open the engine of this machine, or the one at an address. Raise Failure."""
    if on is not None:
        yield temporal_engine(on, queue, heartbeat_ms)
    else:
        with Store.open() as store:
            yield EmbeddedEngine(store)


async def manage_run_on(on: Address, verb: str, run_id: str, call: Call, budget_ms: int | None) -> Outcome | Envelope:
    """Carry out `job status`, `wait` or `cancel` on a run of Temporal."""
    engine = temporal_engine(on)
    try:
        return await manage_run(engine, verb, run_id, call, budget_ms)
    except Failure as failure:
        if failure.code == "RUN_NOT_FOUND":
            raise
        return engine.unknown_outcome(failure, run_id)


def perform_on_proposals(on: Address, id: str | None, decides: bool, perform: Callable[[], Outcome]) -> Outcome:
    """Perform a command of `inbox` on the proposals of Temporal's runs, in a temporary store. A decision (`decides`)
    about the proposal with this id counts only once its run has accepted it. Raise Failure."""

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


# --- servers ----------------------------------------------------------------------------------------------


def _serve_until_stopped(name: str, serve: Callable[[asyncio.Future[str]], Awaitable[str]], as_json: bool) -> int:
    """Serve until a signal arrives, and answer with its name. Return the exit code."""
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
        except Exception as error:  # of the SDK, or a bug: the caller gets an envelope
            return outcome_of_error(error)

    return deliver(conclude(call, body), as_json)


def worker_main(on: Address, options: dict[str, Any], as_json: bool) -> int:
    """Serve as a worker until stopped."""

    async def serve(stop: asyncio.Future[str]) -> str:
        from ..temporal.worker import WorkerOptions, serve_worker

        worker = WorkerOptions(options["queue"], options["max_parallel"], options["drain_ms"], options["folder"])
        ready = f"worker: takes up to {worker.most_steps} steps at a time from {worker.queue} of {on}"
        return await serve_worker(on, worker, stop, lambda: say_line(ready))

    return _serve_until_stopped("worker", serve, as_json)


def dev_main(options: dict[str, Any], as_json: bool) -> int:
    """Serve as the development engine until stopped."""

    async def serve(stop: asyncio.Future[str]) -> str:
        server = DevServer(options["port"], options["db"], options["ui"])
        async with Runtime() as runtime, run_dev_server(server, runtime) as process:
            say_line(f"engine: {server.address} answers")
            waits: list[asyncio.Future[Any]] = [stop, process.ended]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # unbounded: it serves until it is stopped
            if not stop.done():
                raise Failure("CONNECTION_LOST", "the server has ended by itself")
            return stop.result()

    return _serve_until_stopped("engine dev", serve, as_json)
