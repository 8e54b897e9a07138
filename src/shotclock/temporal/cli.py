"""`shotclock worker` and `shotclock engine`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ..calls.call import Outcome
from ..calls.runtime import Runtime
from ..core.errors import Ending, Failure
from ..dispatch.engines import engine_options
from ..supervise.zygote import start_zygote_early, stop_early_zygote
from ..terminal.output import StopListener, say_line
from ..terminal.parser import Option, Subcommand
from ..terminal.subcommand import admit_call, conclude, deliver

if TYPE_CHECKING:
    from .connection import Address


def _serve_until_stopped(name: str, serve: Callable[[asyncio.Future[str]], Awaitable[str]], as_json: bool) -> int:
    from .connection import require_sdk

    call = admit_call(name, 0)

    async def main() -> str:
        with StopListener() as stop:
            return await serve(stop)

    def body() -> Outcome:
        StopListener.raise_at_once()
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
            Option.taking("--queue", "NAME", "The queue, as named in `runs_on`.", default="shotclock"),
            Option.number(
                "--max-parallel",
                "Run at most this many steps at a time.",
                1,
                999_999,
                default="8",
            ),
            Option.taking("--folder", "DIR", "Run steps here whose workflow's folder does not exist on this machine."),
            Option.duration(
                "--drain",
                "The time that running steps have to end after a stop; other workers repeat those that do not.",
                default="30s",
                key="drain_ms",
            ),
            *engine_options("The engine: temporal://HOST:PORT[/NAMESPACE].", missing="missing --on URL: the engine"),
        ),
        run=_run_worker,
        usage="--on URL [OPTIONS]",
    ),
    "engine": Subcommand(
        "engine",
        options=(
            Option.argument("what", "dev.", choices=("dev",), missing="write `shotclock engine dev`"),
            Option.number("--port", "Listen on this port of this machine.", 1, 65_535, default="7233"),
            Option.taking("--db", "FILE", "Keep the state in this file; without one it is lost when the server stops."),
            Option.flag("--ui", "Serve Temporal's own web page as well, on the port 1000 above."),
        ),
        run=_run_dev_server,
        usage="dev [OPTIONS]",
    ),
}
