"""Calls of an App's commands in a test: directly, or through its MCP server in memory.

Commands run in worker processes, as they do for users. The store is a folder of its own that ends with the block, so
that no test sees the keys, jobs and proposals of another, or of the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from ..apps.app import App, CallOptions, app_made_by, call_request
from ..apps.server.serve import open_server
from ..core.envelope import Envelope
from ..dispatch.dispatcher import Dispatcher
from ..store.home import HOME_VARIABLE

if TYPE_CHECKING:
    from mcp import Client
    from mcp.server.lowlevel import Server

STARTED_WITHIN_S = 30.0  # for the workers to import the program; a call before that only waits longer
LEAVES_WITHIN_S = 5.0  # for a server whose client has left; it ends by itself
ANSWERED_WITHIN_S = 300.0  # of an MCP client: commands have shorter limits of their own


class AsyncCommandCalls:
    """Calls of the commands of one App."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def __call__(self, command: str, /, **arguments: Any) -> Envelope:
        """Call a command by its parameters and return its envelope."""
        return await self._dispatcher.call(call_request(command, arguments))

    async def with_options(
        self, command: str, arguments: Mapping[str, object], **options: Unpack[CallOptions]
    ) -> Envelope:
        """Call a command with the options of `App.call_with`."""
        return await self._dispatcher.call(call_request(command, arguments, **options))


class CommandCalls:
    """Calls of the commands of one App, without an event loop of the test's own."""

    def __init__(self, calls: AsyncCommandCalls, runner: asyncio.Runner) -> None:
        self._calls, self._runner = calls, runner

    def __call__(self, command: str, /, **arguments: Any) -> Envelope:
        """Call a command by its parameters and return its envelope."""
        return self._runner.run(self._calls(command, **arguments))

    def with_options(self, command: str, arguments: Mapping[str, object], **options: Unpack[CallOptions]) -> Envelope:
        """Call a command with the options of `App.call_with`."""
        return self._runner.run(self._calls.with_options(command, arguments, **options))


class calls:
    """A block in which the commands of an App can be called: `with` in a test, `async with` in an async test."""

    def __init__(self, app: App | Callable[[], App], *, home: str | os.PathLike[str] | None = None) -> None:
        """Prepare calls of an App, or of the one that a function makes. `home` is the folder of the store."""
        self._app, self._home = app_made_by(app), home
        self._stack = contextlib.AsyncExitStack()
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> CommandCalls:
        runner = asyncio.Runner()
        with contextlib.ExitStack() as stack:
            stack.callback(runner.close)
            made = runner.run(self.__aenter__())
            stack.pop_all()
        self._runner = runner
        return CommandCalls(made, runner)

    def __exit__(self, *raised: object) -> None:
        runner, self._runner = self._runner, None
        assert runner is not None  # it was entered
        with runner:
            runner.run(self._stack.aclose())

    async def __aenter__(self) -> AsyncCommandCalls:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(_store_in(self._home))
            dispatcher = await stack.enter_async_context(self._app.dispatcher())
            # Now: in a test they would count as its processes, also if the calls are those of a wider fixture.
            await dispatcher.runtime.warm_up(STARTED_WITHIN_S)
            self._stack = stack.pop_all()
        return AsyncCommandCalls(dispatcher)

    async def __aexit__(self, *raised: object) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def client(
    app: App | Callable[[], App], *, home: str | os.PathLike[str] | None = None, **options: Any
) -> AsyncIterator[Client]:
    """Connect the SDK's client to the MCP server of an App, or of the one that a function makes, in this process.

    `options` are those of `mcp.Client`, such as `mode="legacy"` (the older protocol) and `elicitation_callback`.
    """
    from mcp import Client

    options.setdefault("read_timeout_seconds", ANSWERED_WITHIN_S)
    with _store_in(home):
        async with open_server(app_made_by(app)) as server, Client(_transport_to(server.sdk), **options) as connected:
            yield connected


@contextlib.asynccontextmanager
async def _transport_to(server: Server[Any]) -> AsyncIterator[Any]:
    """Run a server on streams in memory. Given the server itself, the client would leave the JSON of messages out."""
    from mcp.shared.memory import create_client_server_memory_streams

    async with create_client_server_memory_streams() as (client_streams, server_streams):
        serving = asyncio.ensure_future(server.run(*server_streams, server.create_initialization_options()))
        try:
            yield client_streams
        finally:
            await client_streams[1].aclose()
            await server_streams[1].aclose()
            await asyncio.wait([serving], timeout=LEAVES_WITHIN_S)
            serving.cancel()


@contextlib.contextmanager
def _store_in(home: str | os.PathLike[str] | None) -> Iterator[None]:
    """Have the store in this folder, by default in a new one that is removed afterwards."""
    with contextlib.ExitStack() as stack:
        if home is None:
            home = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="shotclock-test-", ignore_cleanup_errors=True)
            )
        before = os.environ.get(HOME_VARIABLE)
        os.environ[HOME_VARIABLE] = os.path.abspath(home)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(HOME_VARIABLE, None)
            else:
                os.environ[HOME_VARIABLE] = before
