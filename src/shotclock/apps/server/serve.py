"""The life of a server: it learns the commands of an App, serves them, and stops.

The end of stdin stops everything. SIGTERM or SIGINT also answers the waiting calls; a second signal does not wait for
that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..._version import __version__
from ...calls.executor import DEFAULT_WARM
from ...calls.preloaded_zygote import Program
from ...calls.runtime import Runtime
from ...core.catalogue import DEFAULT_BUDGET_MS, Catalogue
from ...core.content_blocks import LONGEST_CONTENT
from ...core.envelope import refusal
from ...core.errors import Failure
from ...core.limits import Clocks, DurationError, WallTime, format_duration, parse_duration_ms
from ...core.value_types import replace, value
from ...dispatch.dispatcher import Dispatcher
from ...dispatch.engines import engine_at
from ...dispatch.invocation import Target, asking
from ...people.addresses import check_reach, listen_on, parse_address, url_of
from ...people.authorisation import Authorisation, read_authorisation
from ...people.inbox import Inbox
from ...store.store import Store
from ...supervise.clock import wall_time
from ...worker.messages import keep_users_code_out
from .shell_jobs import ShellLimits
from .standard_streams import ServerStderr, claim_descriptors, relay_stderr, share_descriptors, unblock_stderr

if TYPE_CHECKING:
    from ...dispatch.engines import EngineAddress, EngineFront
    from ._mcp_server import McpServer
    from ._reload import Reloader

MOST_WORKERS = 256  # every hanging sync call holds a process. Further calls wait, and report that
WARM_UP_S = 10.0  # for the first workers to start before clients are served; a call before that only waits longer
LAST_ANSWERS_S = 1.0  # for the last answers to reach their clients, once everything is stopped
TRANSPORT_ENDS_S = 5.0  # for the transport to end. Each of its own waits is shorter
LEAST_RESULT = 1024  # an error has to fit
# Headers that say who a client is by a secret, and the page's own.
_CREDENTIALS = ("authorization", "proxy-authorization", "cookie", "shotclock-proof")
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
FOR_CLIENTS = "for the MCP client that starts this command; for HTTP: `shotclock serve … --http HOST:PORT`"


@value
class Options:
    """`address` None is stdin and stdout; `operation_timeout_ms` None is that of the App."""

    address: tuple[str, int] | None = None
    operation_timeout_ms: int | None = None
    require_token: bool = False  # from clients on this machine as well
    elicitation: bool = False  # clients may ask their own person for approvals, even if the App does not allow it
    on: EngineAddress | None = None  # the engine whose runs the operators' page shows
    authorisation: Authorisation | None = None  # the issuer whose tokens are accepted, from every client
    reload: bool = False  # the program is imported anew when one of its files changes
    headers: tuple[str, ...] = ()  # of requests, that functions see
    result_limit: int = LONGEST_CONTENT  # characters of an answer


class ServedApp(Protocol):
    clocks: Clocks
    workers: int | None

    def catalogue(self) -> Catalogue: ...
    def describe(self) -> Catalogue: ...
    def explain_missing(self) -> str: ...
    @property
    def program(self) -> Program: ...


def options_of(
    *,
    http: str | None = None,
    operation_timeout: object = None,
    operation_timeout_ms: object = None,
    require_token: bool = False,
    elicitation: bool = False,
    on: EngineAddress | None = None,
    reload: bool = False,
    pass_header: Iterable[str] = (),
    result_limit: object = LONGEST_CONTENT,
    **authorisation: Any,
) -> tuple[Options, dict[str, str]]:
    """Return the options, and every mistake in them. `authorisation` has those of read_authorisation."""
    mistakes: dict[str, str] = {}
    address = limit_ms = None
    has_issuer = authorisation.get("issuer") is not None
    if http is not None:
        try:
            address = parse_address(http)
            check_reach(address, lambda: has_issuer or _has_tokens(), require_token=require_token)
        except ValueError as error:
            mistakes["http"] = str(error)
    elif require_token:
        mistakes["require_token"] = "goes with --http: there are no tokens on stdin"
    accepted, found = read_authorisation(address, **authorisation)
    if reload and has_issuer:
        mistakes["reload"] = "is for the author of an App, and does not go with --issuer"
    if on is not None and http is None:
        mistakes["on"] = "goes with --http: the operators' page shows its runs"
    headers = tuple(name.lower() for name in ([pass_header] if isinstance(pass_header, str) else pass_header))
    if bad := [name for name in headers if name in _CREDENTIALS or not _HEADER.fullmatch(name)]:
        why = "has credentials, which functions do not see" if bad[0] in _CREDENTIALS else "is no name of a header"
        mistakes["pass_header"] = f"{bad[0]!r} {why}"
    elif headers and http is None:
        mistakes["pass_header"] = "goes with --http: there are no headers on stdin"
    most = result_limit if isinstance(result_limit, int) else 0
    if not LEAST_RESULT <= most <= LONGEST_CONTENT:
        mistakes["result_limit"] = f"must be a number of bytes between {LEAST_RESULT} and {LONGEST_CONTENT}"
    if operation_timeout is not None and operation_timeout_ms is not None:
        mistakes["operation_timeout"] = "give it once: as a duration, or in milliseconds"
    elif operation_timeout is not None:
        try:
            limit_ms = parse_duration_ms(operation_timeout)
        except DurationError as error:
            mistakes["operation_timeout"] = str(error)
    elif operation_timeout_ms is not None:
        written = str(operation_timeout_ms)
        if written.isascii() and written.isdecimal() and len(written) < 12:
            limit_ms = int(written)
        else:
            mistakes["operation_timeout_ms"] = f"{written!r} is not a number of milliseconds"
    token = require_token or has_issuer
    options = Options(address, limit_ms, token, elicitation, on, accepted, reload, headers, most)
    return options, mistakes | {each["field"]: each["message"] for each in found}


def _has_tokens() -> bool:
    now = wall_time()
    with Store.open() as store:
        return any(token.is_active(now) for token in store.tokens.list())


def serve_target(text: str, options: Options) -> int:
    """Serve an App that this process never imports; return the exit code. Raises Failure. No process survives this."""
    target = Target.parse(text)
    runtime = _runtime_of(target)
    reloaded = target if options.reload else None
    return asyncio.run(_serve(runtime, target.program, options, lambda: target.learn(runtime), reloaded))


def _runtime_of(target: Target) -> Runtime:
    return Runtime(program=target.program, most_workers=share_descriptors(MOST_WORKERS)[0])


@contextlib.asynccontextmanager
async def _look_at_engine(on: EngineAddress | None, store: Callable[[], Store]) -> AsyncIterator[EngineFront | None]:
    """Watch the engine, if any; it need not answer for the server to start. Raises Failure without its SDK."""
    if on is None:
        yield None
        return
    front_end = engine_at(on).open_front_end(on, store)
    async with front_end.looking():
        yield front_end


async def serve_inbox(options: Options) -> int:
    """Serve the operators' page alone, and return the exit code. Raises Failure."""
    assert options.address is not None
    async with contextlib.AsyncExitStack() as stack:
        stderr = stack.enter_context(unblock_stderr())
        sock = stack.enter_context(contextlib.closing(listen_on(options.address)))
        signals = stack.enter_context(ServerSignals())
        store = stack.enter_context(Store.open())
        inbox = Inbox(store)
        stack.push_async_callback(inbox.close)
        async with _serve_http(options, sock, stderr, None, lambda: store, lambda: inbox) as serving:
            await signals.wait_beside(serving)
    return signals.exit_code


@contextlib.asynccontextmanager
async def _serve_http(
    options: Options,
    sock: socket.socket,
    stderr: ServerStderr,
    server: McpServer | None,
    store: Callable[[], Store],
    inbox: Callable[[], Inbox],
) -> AsyncIterator[asyncio.Future[None]]:
    """Serve the operators' page and, with a server, MCP, until this is left."""
    from ..web.routes import Operators
    from ._http import HttpServer

    issuer = None
    if options.authorisation is not None and server is not None:
        from ...net.http import Names
        from ...people.auth import MCP_PATH
        from ...people.issuer import Issuer

        wanted = options.authorisation.at(sock.getsockname()[:2], MCP_PATH)
        issuer = Issuer(wanted, Names(server.dispatcher.runtime), stderr.say)
    async with _look_at_engine(options.on, store) as engine:
        http = HttpServer(
            None if server is None else server.sdk,
            sock,
            (lambda: {"name": "inbox"}) if server is None else server.health,
            operators=Operators("" if server is None else server.sdk.name, inbox, store, engine),
            store=store,
            require_token=options.require_token,
            issuer=issuer,
            most_connections=share_descriptors(0 if server is None else MOST_WORKERS)[1],
            say=stderr.say,
        )
        serving = asyncio.ensure_future(http.run_until_left())
        yield serving
        http.leave()
        await asyncio.wait([serving], timeout=TRANSPORT_ENDS_S)
        serving.cancel()
        _report_crash(serving)


def serve_app(app: ServedApp, **written: Any) -> None:
    """Serve an App from its own program; its functions run elsewhere. Raises Failure, and SystemExit at a signal."""
    options, found = options_of(**written)
    if mistakes := [{"field": field, "message": message} for field, message in found.items()]:
        raise refusal(mistakes)
    runtime = Runtime(
        program=app.program,
        clocks=app.clocks,
        workers=app.workers or DEFAULT_WARM,
        most_workers=share_descriptors(MOST_WORKERS)[0],
    )
    code = asyncio.run(_serve(runtime, app.program, options, lambda: _describe(app, runtime)))
    if code:
        sys.exit(code)


async def _describe(app: ServedApp, runtime: Runtime) -> Catalogue:
    """Return the catalogue of an App of this process. Raises Failure if workers cannot find its functions."""
    catalogue = app.describe()
    addresses = [spec.handler.qualname.partition(":")[2] for spec in catalogue.everything]
    require = asking("find", "shotclock.apps.app", "require_handlers")
    found = await runtime.call(require, {"addresses": addresses, "why": app.explain_missing()})
    if not found.ok:
        raise Failure("TARGET_UNUSABLE", f"{catalogue.name}: {(found.error or {}).get('message')}")
    return catalogue


def backstop_warnings(catalogue: Catalogue, operation_timeout_ms: int) -> list[str]:
    """Warn where the backstop would fire before the timeout of a tool."""
    longest_ms, name = max(
        (
            (DEFAULT_BUDGET_MS if spec.interruption is not None else spec.clocks.timeout_ms or 0, spec.name)
            for spec in catalogue.everything
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
    names = [spec.name for spec in catalogue.everything if spec.on_mcp and spec.isolation == "inline"]
    if names:
        message = f"{', '.join(names)}: isolation='inline' is not offered by a server: use 'process' or 'shared'"
        raise Failure("TARGET_UNUSABLE", message)


async def _serve(
    runtime: Runtime,
    program: Program,
    options: Options,
    find_catalogue: Callable[[], Awaitable[Catalogue]],
    reloaded: Target | None = None,
) -> int:
    """Run a server until the end of its last process, and return the exit code."""
    began = wall_time()
    signals = ServerSignals()
    with contextlib.ExitStack() as stack:
        stack.enter_context(keep_users_code_out())
        stderr = stack.enter_context(relay_stderr())
        if options.address is None:
            wire = stack.enter_context(claim_descriptors())
            sock = None
        else:
            sock = stack.enter_context(contextlib.closing(listen_on(options.address)))
        stack.enter_context(signals)
        async with runtime:
            learning = asyncio.ensure_future(find_catalogue())
            await asyncio.sleep(0)  # starts it, in other processes
            # Importing the SDK takes a second, while the App is imported elsewhere. A signal waits that long.
            from ._mcp_server import Clients, McpServer

            catalogue = await signals.unless_arrived(learning)
            if catalogue is None:
                return signals.exit_code
            async with contextlib.AsyncExitStack() as running:
                dispatcher = await running.enter_async_context(_connect(catalogue, runtime, program, options))
                runtime.open_channel()
                await signals.unless_arrived(runtime.warm_up(WARM_UP_S))
                clients = Clients(reloads=reloaded is not None, headers=options.headers, most=options.result_limit)
                server = McpServer(dispatcher, options.operation_timeout_ms, clients=clients)
                for line in (*backstop_warnings(catalogue, server.operation_timeout_ms), *catalogue.notes):
                    stderr.say(line)
                if reloaded is not None:
                    reloader = _reloader_of(reloaded, server, options, began, stderr.say)
                    await running.enter_async_context(reloader.watching())
                if sock is None:
                    if os.isatty(wire[0]):  # a person, who would wait for a prompt
                        stderr.say(f"serving {catalogue.name} on stdin and stdout, {FOR_CLIENTS}")
                    await _serve_stdio(server, signals, *wire)
                else:
                    stderr.say(f"serving {catalogue.name} on {url_of(sock.getsockname()[:2], '/mcp')}")
                    stores = dispatcher.store, dispatcher.inbox
                    async with _serve_http(options, sock, stderr, server, *stores) as serving:
                        await _serve_until_stopped(server, signals, serving)
    return signals.exit_code


def _connect(
    catalogue: Catalogue, runtime: Runtime, program: Program, options: Options, beside: Dispatcher | None = None
) -> Dispatcher:
    """Make the commands callable by clients, with the store of the dispatcher `beside`, if any. Raises Failure."""
    refuse_inline(catalogue)
    for spec in catalogue.everything:
        runtime.register(spec.operation())
    catalogue = replace(catalogue, elicitation=catalogue.elicitation or options.elicitation, is_served=True)
    if beside is None:
        return Dispatcher(catalogue, runtime, program=program)
    return Dispatcher(catalogue, runtime, program=program, store_of=beside.store, inbox_of=beside.inbox)


def _reloader_of(
    target: Target, server: McpServer, options: Options, since: WallTime, say: Callable[[str], None]
) -> Reloader:
    from ._reload import Reloader

    first = server.dispatcher

    def connect(catalogue: Catalogue, runtime: Runtime) -> Dispatcher:
        for line in (*backstop_warnings(catalogue, server.operation_timeout_ms), *catalogue.notes):
            say(line)
        return _connect(catalogue, runtime, target.program, options, first)

    return Reloader(target, server, since, lambda: _runtime_of(target), connect, say)


@contextlib.asynccontextmanager
async def open_server(app: ServedApp) -> AsyncIterator[McpServer]:
    """Serve an App to clients in this process, without a transport: for tests. Raises Failure."""
    runtime = Runtime(program=app.program, clocks=app.clocks, workers=app.workers or DEFAULT_WARM)
    with keep_users_code_out():
        async with runtime:
            catalogue = await _describe(app, runtime)
            async with _connect(catalogue, runtime, app.program, Options()) as dispatcher:
                from ._mcp_server import McpServer

                await runtime.warm_up(WARM_UP_S)
                yield McpServer(dispatcher)


async def serve_shell(limits: ShellLimits, folder: str) -> int:
    """Serve a shell to one client, on stdin and stdout, and return the exit code. Raises Failure."""
    signals = ServerSignals()
    with contextlib.ExitStack() as stack:
        stack.enter_context(relay_stderr())
        wire = stack.enter_context(claim_descriptors())
        stack.enter_context(signals)
        from ._mcp_server import McpServer
        from ._shell import INSTRUCTIONS, ShellTools

        catalogue = Catalogue(
            "shell", __version__, INSTRUCTIONS, operation_timeout_ms=limits.operation_timeout_ms, is_served=True
        )
        async with Dispatcher(catalogue, Runtime()) as dispatcher:
            shell = ShellTools(dispatcher, limits, folder)
            await _serve_stdio(McpServer(dispatcher, own_tools=shell, tools=shell.tools), signals, *wire)
    return signals.exit_code


async def _serve_stdio(server: McpServer, signals: ServerSignals, wire_in: int, wire_out: int) -> None:
    from ._stdio import Wire

    wire = Wire(wire_in, wire_out)
    closing = asyncio.ensure_future(_close_states_at_end(wire.ended, server))
    try:
        serving = asyncio.ensure_future(server.sdk.run(wire, wire, server.sdk.create_initialization_options()))
        await _serve_until_stopped(server, signals, serving)
        if not serving.done():
            await _wait_at_most(wire.until_written(), LAST_ANSWERS_S)
            serving.cancel()
            await asyncio.wait([serving], timeout=TRANSPORT_ENDS_S)
        _report_crash(serving)
    finally:
        wire.close()
        await closing


async def _close_states_at_end(ended: asyncio.Event, server: McpServer) -> None:
    """Close the states before the calls of a client that has left are stopped: that may take their process."""
    await ended.wait()  # unbounded on purpose: a server ends with its client
    await server.close_states()


async def _serve_until_stopped(server: McpServer, signals: ServerSignals, serving: asyncio.Future[Any]) -> None:
    await signals.wait_beside(serving)
    if not serving.done():
        server.stop(signals.name)
    await server.middleware.own_tools.close()
    if not serving.done():
        await server.close_runtimes()  # first, so that the waiting calls are answered
        await _wait_at_most(server.middleware.until_idle(), LAST_ANSWERS_S)


class ServerSignals:
    """SIGTERM and SIGINT on the running loop. The second one ends the process at once."""

    def __init__(self) -> None:
        self.arrived: asyncio.Event = asyncio.Event()
        self.name: str = ""
        self.exit_code: int = 0

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._arrive, number)
        return self

    def __exit__(self, *raised: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    async def wait_beside(self, work: asyncio.Future[Any]) -> None:
        """Wait for a signal or the end of the work. Unbounded on purpose: a server runs until it is stopped."""
        stopping = asyncio.ensure_future(self.arrived.wait())
        await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    async def unless_arrived(self, work: Awaitable[Any]) -> Any:
        """Return the result; None if a signal arrives first."""
        task = asyncio.ensure_future(work)
        await self.wait_beside(task)
        if self.arrived.is_set():
            task.cancel()
            return None
        return task.result()

    def _arrive(self, number: int) -> None:
        if self.arrived.is_set():
            os._exit(128 + number)  # the processes of the runtime end with this one
        self.name, self.exit_code = signal.Signals(number).name, 128 + number
        self.arrived.set()


async def _wait_at_most(work: Awaitable[Any], limit_s: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(work, limit_s)


def _report_crash(serving: asyncio.Future[Any]) -> None:
    if serving.done() and not serving.cancelled() and (error := serving.exception()) is not None:
        sys.excepthook(type(error), error, error.__traceback__)
