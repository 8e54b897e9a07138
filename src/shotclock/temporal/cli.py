"""The engines of the command line: this machine, or Temporal with `--on`; `shotclock worker` and `engine`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..calls.call import Outcome
from ..calls.principal import Principal
from ..calls.runtime import Runtime
from ..core.errors import Ending, Failure
from ..core.proposal import UNCONFIRMED, Confirmation, Decision, Proposal
from ..flows.run.engine import EmbeddedEngine, Engine
from ..store.audit import Entry
from ..store.store import Store
from ..supervise.zygote import start_zygote_early, stop_early_zygote
from ..terminal.output import StopListener, raise_on_stop, say_line
from ..terminal.parser import Subcommand, argument, duration, flag, number_between, option
from ..terminal.subcommand import JSON, admit_call, conclude, deliver, engine_options

if TYPE_CHECKING:
    from ._engine import TemporalEngine
    from .connection import Address


def temporal_engine(on: Address, queue: str | None = None, heartbeat_ms: int | None = None) -> TemporalEngine:
    from .connection import require_sdk

    require_sdk()
    from ._engine import TemporalEngine

    return TemporalEngine(on, queue=queue, heartbeat_ms=heartbeat_ms)


@contextlib.contextmanager
def open_engine(on: Address | None, queue: str | None = None, heartbeat_ms: int | None = None) -> Iterator[Engine]:
    if on is not None:
        yield temporal_engine(on, queue, heartbeat_ms)
    else:
        with Store.open() as store:
            yield EmbeddedEngine(store)


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
    from .connection import require_sdk

    call = admit_call(name, 0)

    async def main() -> str:
        with StopListener() as stop:
            return await serve(stop)

    def body() -> Outcome:
        raise_on_stop()
        require_sdk()
        return Outcome(Ending.FINISHED, data={"stopped_by": asyncio.run(main())})

    return deliver(conclude(call, body), as_json)


def _run_worker(on: Address, queue: str, max_parallel: int, folder: str | None, drain_ms: int) -> Callable[[bool], int]:
    async def serve(stop: asyncio.Future[str]) -> str:
        from ._worker import WorkerOptions, serve_worker

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
        from .connection import Address, run_dev_server

        async with Runtime() as runtime, run_dev_server(runtime, port, db, ui) as process:
            say_line(f"engine: {Address('127.0.0.1', port)} answers")
            waits: list[asyncio.Future[Any]] = [stop, process.ended]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # unbounded: it serves until it is stopped
            if not stop.done():
                raise Failure("CONNECTION_LOST", "the server has ended by itself")
            return stop.result()

    return lambda as_json: _serve_until_stopped("engine dev", serve, as_json)


COMMANDS = {
    "worker": Subcommand(
        "worker",
        options=(
            option("--queue", "NAME", "The queue, as named in `runs_on`.", default="shotclock"),
            option(
                "--max-parallel",
                "N",
                "Run at most this many steps at a time.",
                read=number_between(1, 999_999),
                default="8",
            ),
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
            argument("what", "dev.", choices=("dev",), missing="write `shotclock engine dev`"),
            option(
                "--port", "N", "Listen on this port of this machine.", read=number_between(1, 65_535), default="7233"
            ),
            option("--db", "FILE", "Keep the state in this file; without one it is lost when the server stops."),
            flag("--ui", "Serve Temporal's own web page as well, on the port 1000 above."),
            JSON,
        ),
        run=_run_dev_server,
        usage="dev [OPTIONS]",
    ),
}
