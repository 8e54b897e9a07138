"""The life of a server, from start to end: a runtime, what the App offers, the SDK's server, and who tells it to stop.

The client leaves (end of stdin): everything is stopped, and that was it. SIGTERM or SIGINT: everything is stopped,
those who wait are told, and the second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..core.catalogue import DEFAULT_BUDGET_MS, Catalogue
from ..core.clocks import Clocks, DurationError, format_duration, parse_duration_ms
from ..core.envelope import join_problems
from ..core.errors import Failure
from ..core.value_types import replace, value
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.targets import learn, parse_target
from ..inbox.inbox import Inbox
from ..process.clock import wall_time
from ..process.messages import keep_users_code_out
from ..runtime.preloaded_zygote import Program
from ..runtime.runtime import Runtime
from ..runtime.worker_pool import DEFAULT_WARM
from ..store.store import Store
from .addresses import check_reach, listen_on, parse_address
from .standard_streams import ServerStderr, claim_descriptors, relay_stderr, share_descriptors, unblock_stderr

if TYPE_CHECKING:
    from ..temporal.connection import Address
    from ..temporal.front_end import FrontEnd
    from .http import HttpServer
    from .tool_calls import McpServer

# Every hanging sync call holds a process. Of a client that has more than this in flight the rest waits, and is told so.
MOST_WORKERS = 256
# How long the first workers may take to come up before clients are served; those who call meanwhile only wait longer.
WARM_UP_S = 10.0
# Once everything is stopped, how long the last answers may take to reach clients that still read.
LAST_ANSWERS_S = 1.0
# After the transport was told to end. Each of its own waits is shorter.
TRANSPORT_ENDS_S = 5.0


@value
class Options:
    """How to serve. `address` None is stdin and stdout; `operation_timeout_ms` None is what the app says."""

    address: tuple[str, int] | None = None
    operation_timeout_ms: int | None = None
    require_token: bool = False
    """Also from those who are on this machine."""
    elicitation: bool = False
    """Whether clients may ask their own person for approvals, also where the app does not say so."""
    on: Address | None = None
    """The engine whose runs the operators' page shows as well."""


class ServedApp(Protocol):
    """What a server needs of an App that serves itself."""

    clocks: Clocks
    workers: int | None

    def catalogue(self) -> Catalogue: ...
    @property
    def program(self) -> Program: ...


def options_of(
    *,
    http: str | None = None,
    operation_timeout: object = None,
    operation_timeout_ms: object = None,
    require_token: bool = False,
    elicitation: bool = False,
    on: Address | None = None,
) -> tuple[Options, list[dict[str, str]]]:
    """Read the options as people write them. Returns them, and every mistake in them."""
    mistakes: list[dict[str, str]] = []
    address = limit_ms = None
    if http is not None:
        try:
            address = parse_address(http)
            check_reach(address, _has_tokens, require_token=require_token)
        except ValueError as error:
            mistakes.append({"field": "http", "message": str(error)})
    elif require_token:
        mistakes.append({"field": "require_token", "message": "goes with --http: there are no tokens on stdin"})
    if on is not None and http is None:
        mistakes.append({"field": "on", "message": "goes with --http: it is the operators' page that shows its runs"})
    if operation_timeout is not None and operation_timeout_ms is not None:
        message = "give it once: as a duration, or in milliseconds"
        mistakes.append({"field": "operation_timeout", "message": message})
    elif operation_timeout is not None:
        try:
            limit_ms = parse_duration_ms(operation_timeout)
        except DurationError as error:
            mistakes.append({"field": "operation_timeout", "message": str(error)})
    elif operation_timeout_ms is not None:
        written = str(operation_timeout_ms)
        if written.isascii() and written.isdecimal() and len(written) < 12:
            limit_ms = int(written)
        else:
            mistakes.append(
                {"field": "operation_timeout_ms", "message": f"{written!r} is not a number of milliseconds"}
            )
    return Options(address, limit_ms, require_token, elicitation, on), mistakes


def _has_tokens() -> bool:
    now = wall_time()
    with Store.open() as store:
        return any(token.is_active(now) for token in store.tokens.list())


def serve_target(text: str, options: Options) -> int:
    """Serve an App that this process never imports, until the client leaves or a signal comes: the exit code.

    Raises Failure if it cannot be served. Nothing survives this.
    """
    target = parse_target(text)
    runtime = Runtime(
        program=target.program,
        most_workers=share_descriptors(MOST_WORKERS)[0],
    )
    return asyncio.run(_Serving(runtime, target.program, options, lambda: learn(runtime, target)).run())


@contextlib.asynccontextmanager
async def _look_at_engine(on: Address | None, store: Callable[[], Store]) -> AsyncIterator[FrontEnd | None]:
    """Look at the engine while this is entered, if there is one. One that does not answer is no reason not to serve.
    Raises Failure where it could never be asked."""
    if on is None:
        yield None
        return
    from ..temporal.connection import require_sdk

    require_sdk()
    from ..temporal.front_end import FrontEnd

    front_end = FrontEnd(on, store)
    async with front_end.looking():
        yield front_end


def serve_inbox(options: Options) -> int:
    """Serve the operators' page alone, until a signal comes: the exit code.

    Raises Failure if it cannot be served. What agents proposed stays queued.
    """
    return asyncio.run(_serve_inbox(options))


async def _serve_inbox(options: Options) -> int:
    from .http import HttpServer

    assert options.address is not None
    async with contextlib.AsyncExitStack() as stack:
        complaints = stack.enter_context(unblock_stderr())
        sock = stack.enter_context(contextlib.closing(listen_on(options.address)))
        signals = stack.enter_context(Signals())
        store = stack.enter_context(Store.open())
        inbox = Inbox(store)
        engine = await stack.enter_async_context(_look_at_engine(options.on, lambda: store))
        try:
            http = HttpServer(
                None,
                sock,
                lambda: {"name": "inbox"},
                store=lambda: store,
                inbox=lambda: inbox,
                engine=engine,
                require_token=options.require_token,
                most_connections=share_descriptors(0)[1],
                say=complaints.say,
            )
            serving = asyncio.ensure_future(http.run_until_left())
            stopping = asyncio.ensure_future(signals.heard.wait())
            # Unbounded on purpose: a server serves until somebody stops it.
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            await _leave(http, serving)
        finally:
            await inbox.close()
    return signals.exit_code


def serve_app(
    app: ServedApp,
    *,
    http: str | None = None,
    operation_timeout: object = None,
    operation_timeout_ms: object = None,
    require_token: bool = False,
    elicitation: bool = False,
) -> None:
    """Serve an App from the program that made it. Its functions run elsewhere all the same.

    Raises Failure if it cannot be served, and SystemExit if a signal ended it.
    """
    options, mistakes = options_of(
        http=http,
        operation_timeout=operation_timeout,
        operation_timeout_ms=operation_timeout_ms,
        require_token=require_token,
        elicitation=elicitation,
    )
    if mistakes:
        message = join_problems(mistakes)
        raise Failure("ARG_ERROR", message, context={"errors": mistakes})
    runtime = Runtime(
        program=app.program,
        clocks=app.clocks,
        workers=app.workers or DEFAULT_WARM,
        most_workers=share_descriptors(MOST_WORKERS)[0],
    )

    async def own_catalogue() -> Catalogue:
        return app.catalogue()

    code = asyncio.run(_Serving(runtime, app.program, options, own_catalogue).run())
    if code:
        sys.exit(code)


def backstop_warnings(catalogue: Catalogue, operation_timeout_ms: int) -> list[str]:
    """Warn where the backstop would ring before a tool's own clock does."""
    longest_ms, name = max(
        (
            (DEFAULT_BUDGET_MS if spec.interruption is not None else spec.clocks.timeout_ms or 0, spec.name)
            for spec in catalogue.commands
            if spec.on_mcp
        ),
        default=(0, ""),
    )
    if not operation_timeout_ms or operation_timeout_ms > longest_ms:
        return []
    return [
        f"the operation timeout of {format_duration(operation_timeout_ms)} is not longer than the "
        f"{format_duration(longest_ms)} that {name!r} may take: the server will end it first, with less detail"
    ]


def refuse_inline(catalogue: Catalogue) -> None:
    """Raise Failure for commands on the caller's loop: it would be the server's own."""
    names = [spec.name for spec in catalogue.commands if spec.on_mcp and spec.isolation == "inline"]
    if names:
        message = f"{', '.join(names)}: isolation='inline' is not offered by a server: use 'process' or 'shared'"
        raise Failure("TARGET_UNUSABLE", message)


class _Serving:
    """One run of a server, from learning what to serve to the last process gone."""

    def __init__(
        self, runtime: Runtime, program: Program, options: Options, catalogue: Callable[[], Awaitable[Catalogue]]
    ) -> None:
        self._runtime = runtime
        self._program = program
        self._options = options
        self._catalogue = catalogue
        self._signals = Signals()

    async def run(self) -> int:
        with contextlib.ExitStack() as stack:
            stack.enter_context(keep_users_code_out())
            complaints = stack.enter_context(relay_stderr())
            if self._options.address is None:
                wire = stack.enter_context(claim_descriptors())
                sock = None
            else:
                sock = stack.enter_context(contextlib.closing(listen_on(self._options.address)))
            stack.enter_context(self._signals)
            async with self._runtime:
                learning = asyncio.ensure_future(self._catalogue())
                await asyncio.sleep(0)  # by then it is under way, in other processes
                # The SDK takes a second to import, in which the app is imported elsewhere. A signal waits that long.
                from .tool_calls import McpServer

                catalogue = await self._unless_stopped(learning)
                if catalogue is None:
                    return self._signals.exit_code
                refuse_inline(catalogue)
                elicitation = catalogue.elicitation or self._options.elicitation
                catalogue = replace(catalogue, elicitation=elicitation, is_served=True)
                dispatcher = Dispatcher(catalogue, self._runtime, program=self._program)
                async with dispatcher:
                    self._runtime.open_channel()
                    for spec in catalogue.commands:
                        self._runtime.register(spec.operation())
                    await self._unless_stopped(self._runtime.warm_up(WARM_UP_S))
                    server = McpServer(dispatcher, self._options.operation_timeout_ms)
                    limit_ms = server.operation_timeout_ms
                    for line in backstop_warnings(catalogue, limit_ms):
                        complaints.say(line)
                    if sock is not None:
                        await self._serve_http(server, sock, complaints)
                    else:
                        await self._serve_stdio(server, *wire)
        return self._signals.exit_code

    async def _serve_stdio(self, server: McpServer, wire_in: int, wire_out: int) -> None:
        from .stdio import Wire

        wire = Wire(wire_in, wire_out)
        try:
            serving = asyncio.ensure_future(server.sdk.run(wire, wire, server.sdk.create_initialization_options()))
            await self._serve_until_stopped(server, serving)
            if not serving.done():
                await _wait_at_most(wire.until_written(), LAST_ANSWERS_S)
                serving.cancel()
                await asyncio.wait([serving], timeout=TRANSPORT_ENDS_S)
            _complain_about(serving)
        finally:
            wire.close()

    async def _serve_http(self, server: McpServer, sock: socket.socket, complaints: ServerStderr) -> None:
        from .http import HttpServer, mcp_url

        dispatcher = server.dispatcher
        complaints.say(f"serving {dispatcher.catalogue.name} on {mcp_url(sock)}")
        async with _look_at_engine(self._options.on, dispatcher.store) as engine:
            http = HttpServer(
                server.sdk,
                sock,
                server.health,
                store=dispatcher.store,
                inbox=dispatcher.inbox,
                engine=engine,
                require_token=self._options.require_token,
                most_connections=share_descriptors(MOST_WORKERS)[1],
                say=complaints.say,
            )
            serving = asyncio.ensure_future(http.run_until_left())
            await self._serve_until_stopped(server, serving)
            await _leave(http, serving)

    async def _serve_until_stopped(self, server: McpServer, serving: asyncio.Future[Any]) -> None:
        stopping = asyncio.ensure_future(self._signals.heard.wait())
        # Unbounded on purpose: a server serves until its client leaves or somebody stops it.
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not serving.done():
            server.middleware.stop(self._signals.name)
            await self._runtime.close()  # first: whoever waits is answered that it was stopped
            await _wait_at_most(server.middleware.until_idle(), LAST_ANSWERS_S)

    async def _unless_stopped(self, work: Awaitable[Any]) -> Any:
        """Return what came of the work; None if a signal came first."""
        task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._signals.heard.wait())
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._signals.heard.is_set():
            task.cancel()
            return None
        return task.result()


class Signals:
    """SIGTERM and SIGINT, heard while it is entered, on the running loop. The second one does not wait."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self.name = ""
        self.exit_code = 0

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._hear, number)
        return self

    def __exit__(self, *raised: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _hear(self, number: int) -> None:
        if self.heard.is_set():
            os._exit(128 + number)  # everything we started dies with us
        self.name, self.exit_code = signal.Signals(number).name, 128 + number
        self.heard.set()


async def _leave(http: HttpServer, serving: asyncio.Future[Any]) -> None:
    http.leave()
    await asyncio.wait([serving], timeout=TRANSPORT_ENDS_S)
    serving.cancel()
    _complain_about(serving)


async def _wait_at_most(work: Awaitable[Any], limit_s: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(work, limit_s)


def _complain_about(serving: asyncio.Future[Any]) -> None:
    """Write the traceback of a transport that ended by a bug of ours or the SDK's; the exit is clean otherwise."""
    if serving.done() and not serving.cancelled() and (error := serving.exception()) is not None:
        sys.excepthook(type(error), error, error.__traceback__)
