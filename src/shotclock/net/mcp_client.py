"""One conversation with an MCP server by the official SDK. Imported only where it is used, because the SDK is heavy.

Nothing in here is trusted to end: its caller waits for `settled`, reads the stage, and holds the clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Any, cast

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ..core.lazy_names import import_lazily
from ..core.value_types import JsonObject

# Before any part of the SDK: its servers are a quarter of its import.
import_lazily("mcp")
import_lazily("mcp.client")

# ruff: noqa: E402
import mcp_types as types
from mcp.client._transport import TransportStreams
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import CONNECTION_CLOSED, METHOD_NOT_FOUND

from .._version import __version__
from ..calls.supervised_commands import InteractiveProcess
from ..core.envelope import CONTROLS_EXTENSION, ENVELOPE_KEY, Problem
from ..core.errors import Failure
from ..core.json_values import as_text, read_json
from ..core.trace import TraceContext
from ..supervise.clock import monotonic_ns
from ..supervise.spans import stand_at
from .http import CountedBody

REMAINING = "shotclock.dev/remainingMs"
STOP_TOOL = "graceful_stop"  # ends a call early with a partial result
# Bytes. Reading a larger message would block the loop.
MESSAGE_LIMIT = 16_000_000
# For a server that has refused the handshake: it is running, and answers this at once if at all.
DISCOVER_S = 2.0
# Bytes on stdout beside messages: more is not an MCP server.
STRAY_LIMIT = 16_000_000
STRAY_SHOWN = 200
# More is an endless list.
MOST_PAGES = 100
NAMES_SHOWN = 15

# The SDK's messages belong in the step's error, not on stderr.
logging.getLogger("mcp").addHandler(logging.NullHandler())


class Stage(Enum):
    CONNECTING = "connection"
    LISTING = "list of tools"
    CALLING = "tool call"
    ANSWERED = "answer"


class Conversation:
    """One conversation with a server. `settled` holds the tool's result or the problem."""

    def __init__(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        remaining_ms: Callable[[], int | None],
        trace: TraceContext,
        *,
        on_sign: Callable[[], None] | None = None,
        on_progress: Callable[[float, float | None, str | None], None] | None = None,
        on_log: Callable[[str, str, str | None], None] | None = None,
    ) -> None:
        """`trace` is the call, as the parent of the server's spans.

        `on_sign` is called as bytes are read: on a late loop it takes several turns until they count as progress.
        """
        self._tool, self._arguments, self._remaining_ms = tool, dict(arguments), remaining_ms
        self._trace = trace
        self.settled: asyncio.Future[types.CallToolResult | Problem] = asyncio.get_running_loop().create_future()
        self.stage: Stage = Stage.CONNECTING
        self.stage_began_ns: int = monotonic_ns()
        self.heard_ns: int = self.stage_began_ns
        self.granted: tuple[int, int] | None = None  # when the server was called, and the milliseconds that it got
        self.lost: bool = False
        self.stray: bytes = b""  # the beginning of the output that is not MCP
        self._report_sign, self._report_progress, self._report_log = on_sign, on_progress, on_log
        self.kept: tuple[str, ...] = ()  # numbers that cannot be represented exactly and stay text
        self._stop_tool: types.Tool | None = None
        self.calling: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        """The session of the tool call, once it is made."""

    @property
    def has_begun(self) -> bool:
        return self.stage in (Stage.CALLING, Stage.ANSWERED)

    @property
    def is_calling(self) -> bool:
        return self.stage is Stage.CALLING

    def enter(self, stage: Stage) -> None:
        self.stage, self.stage_began_ns = stage, monotonic_ns()
        self.heard_ns = self.stage_began_ns

    def record_sign_of_life(self) -> None:
        self.heard_ns = monotonic_ns()
        if self._report_sign is not None:
            self._report_sign()

    async def talk(self, transport: AbstractAsyncContextManager[TransportStreams]) -> None:
        """Hold the whole conversation. Errors go to `settled`; only a cancellation is raised."""
        stand_at(self._trace)  # the parent of the SDK's spans, which it sends to the server
        try:
            async with transport as (incoming, outgoing), self._session(incoming, outgoing) as session:
                try:
                    result = await self._call_tool(session)
                except Exception as error:
                    result = self._make_problem(error)
                self._settle(result)
        except Exception as error:  # of the transport or of closing it
            self._settle(self._make_problem(_first_error(error)))

    async def _call_tool(self, session: ClientSession) -> types.CallToolResult | Problem:
        await _connect(session)
        self.enter(Stage.LISTING)
        if (missing := await self._find_missing_tool(session)) is not None:
            return missing
        self.enter(Stage.CALLING)
        if (remaining_ms := self._remaining_ms()) is not None:
            self.granted = monotonic_ns(), remaining_ms
        self.calling.set_result(session)
        result = await self._call(session, self._tool, self._arguments, remaining_ms, self._trace)
        self.enter(Stage.ANSWERED)
        return result

    async def _call(
        self,
        session: ClientSession,
        tool: str,
        arguments: JsonObject,
        remaining_ms: int | None,
        trace: TraceContext,
    ) -> types.CallToolResult:
        meta: JsonObject = {**trace.as_headers()}
        if remaining_ms is not None:
            meta[REMAINING] = remaining_ms
        return await session.call_tool(
            tool, arguments, progress_callback=self._on_progress, meta=cast("types.RequestParamsMeta", meta)
        )

    async def ask_to_stop(self, request_ids: Sequence[str], within_ms: int) -> None:
        """Ask the server's stop tool, if any, to end these calls: each if it takes a request_id, else once."""
        with contextlib.suppress(Exception):  # the waiter sees whether the call ends
            async with asyncio.timeout(within_ms / 1000):
                session = await asyncio.shield(self.calling)
                if self._stop_tool is None or self._tool == STOP_TOOL:
                    return
                takes = self._stop_tool.input_schema.get("properties") or {}
                ids = request_ids if "request_id" in takes else request_ids[:1]
                await asyncio.gather(*(self._ask_once(session, takes, each, within_ms) for each in ids))

    async def _ask_once(self, session: ClientSession, takes: Collection[str], request_id: str, within_ms: int) -> None:
        arguments = {"request_id": request_id, "within_ms": within_ms, "reason": "the caller winds down"}
        meta = cast("types.RequestParamsMeta", {**self._trace.as_headers(), REMAINING: within_ms})
        accepted = {name: value for name, value in arguments.items() if name in takes}
        pause_s = 0.1
        # The call may not have arrived there yet: the request is repeated, less and less often.
        while (await session.call_tool(STOP_TOOL, accepted, meta=meta)).is_error:
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def _list_tools(self, session: ClientSession) -> list[types.Tool]:
        tools: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor) if cursor else None)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        self._stop_tool = next((tool for tool in tools if tool.name == STOP_TOOL), None)
        return tools

    async def _find_missing_tool(self, session: ClientSession) -> Problem | None:
        """Return why the tool cannot be called, or None."""
        try:
            names = [tool.name for tool in await self._list_tools(session)]
        except MCPError as error:
            if error.code == METHOD_NOT_FOUND:
                return None
            raise
        if self._tool in names:
            return None
        close = difflib.get_close_matches(self._tool[:100], names, n=1)
        listed = ", ".join(names[:NAMES_SHOWN]) + (" …" if len(names) > NAMES_SHOWN else "")
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {listed or 'none'}"
        message = f"the MCP server has no tool {self._tool!r}"
        return Problem("UNKNOWN_OPERATION", message, "validation", suggestion=hint)

    def _session(self, incoming: Any, outgoing: Any) -> ClientSession:
        return _Session(
            incoming,
            outgoing,
            logging_callback=self._on_log,
            log_level="info",
            message_handler=self._on_message,
            client_info=types.Implementation(name="shotclock", version=__version__),
            extensions={CONTROLS_EXTENSION: {}},
        )

    async def _on_message(self, message: object) -> None:
        self.record_sign_of_life()

    async def _on_progress(self, progress: float, total: float | None, message: str | None) -> None:
        self.record_sign_of_life()
        if self._report_progress is not None:
            self._report_progress(progress, total, message)

    async def _on_log(self, params: types.LoggingMessageNotificationParams) -> None:
        if self._report_log is not None:
            self._report_log(params.level, as_text(params.data), params.logger)

    def _make_problem(self, error: BaseException) -> Problem:
        is_called = self.is_calling
        lost = "CONNECTION_LOST" if is_called else "CONNECT_FAILED"
        if isinstance(error, MCPError):
            self.lost = self.lost or _is_lost(error)
            context: dict[str, object] = {"mcp_code": error.code}
            if is_called and not self.lost:
                return Problem("TOOL_FAILED", f"MCP error {error.code}: {error.message}", context=context)
            return Problem(lost, f"the MCP server did not answer: {error.message}", context=context)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if is_called and not isinstance(error, OSError | httpx2.HTTPError):
            return Problem("TOOL_FAILED", f"the tool's answer cannot be used: {text[:500]}")
        return Problem(lost, f"talking with the MCP server failed: {text[:500]}")

    @staticmethod
    def content_of(result: types.CallToolResult) -> list[JsonObject]:
        return [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in result.content]

    @staticmethod
    def text_of(result: types.CallToolResult) -> str:
        return "\n".join(block.text for block in result.content if isinstance(block, types.TextContent))

    def output_of(self, result: types.CallToolResult) -> Any:
        """Return the structured content; else the text; else the content blocks."""
        if result.structured_content is not None:
            return result.structured_content
        is_text = all(isinstance(block, types.TextContent) for block in result.content)
        return self.text_of(result) if is_text else self.content_of(result)

    def _settle(self, result: types.CallToolResult | Problem) -> None:
        if not self.settled.done():
            self.settled.set_result(result)

    # --- transports ---------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def over_http(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[TransportStreams]:
        # Without timeouts: the step's clocks bound each wait, and a tool may be silent.
        async with (
            httpx2.AsyncClient(headers=dict(headers), timeout=None, event_hooks={"response": [_cap_body]}) as client,
            streamable_http_client(url, http_client=client) as streams,
        ):
            yield streams

    @contextlib.asynccontextmanager
    async def over_pipes(self, server: InteractiveProcess) -> AsyncIterator[TransportStreams]:
        coming_in, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, going_out = anyio.create_memory_object_stream[SessionMessage](0)
        async with anyio.create_task_group() as group, incoming, outgoing:
            group.start_soon(self._read_messages, server, coming_in)
            group.start_soon(_write_messages, server, going_out, coming_in)
            try:
                yield incoming, outgoing
            finally:
                group.cancel_scope.cancel()

    async def _read_messages(
        self, server: InteractiveProcess, coming_in: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        unread, strays = bytearray(), 0
        with coming_in, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while chunk := await server.read():
                self.record_sign_of_life()
                unread += chunk
                if b"\n" not in chunk and len(unread) <= MESSAGE_LIMIT:
                    continue
                *lines, rest = bytes(unread).split(b"\n")
                unread = bytearray(rest)
                for line in lines:
                    try:
                        message, kept = _parse_message(line)
                        self.kept += kept
                    except ValueError as error:
                        self._settle(self._make_problem(error))
                        return
                    if message is not None:
                        await coming_in.send(SessionMessage(message))
                    elif line.strip():
                        strays += len(line)
                        self.stray = (self.stray + line + b"\n")[:STRAY_SHOWN]
                if len(unread) > MESSAGE_LIMIT:
                    code = "TOOL_FAILED" if self.is_calling else "CONNECT_FAILED"
                    message = f"a message of the MCP server is larger than {MESSAGE_LIMIT} bytes, which is the limit"
                    self._settle(Problem(code, message))
                if strays > STRAY_LIMIT or len(unread) > MESSAGE_LIMIT:
                    self.stray = self.stray or bytes(unread[:STRAY_SHOWN])
                    return


class ServerConversation(Conversation):
    """A conversation that stays open for calls until `close`. `settled` holds the problem where it ended before."""

    def __init__(self, trace: TraceContext, **listeners: Any) -> None:
        super().__init__("", {}, lambda: None, trace, **listeners)
        self.listed: asyncio.Future[list[types.Tool]] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()

    async def _call_tool(self, session: ClientSession) -> Problem:
        """List the tools, and stay until `close`."""
        await _connect(session)
        self.enter(Stage.LISTING)
        tools = await self._list_tools(session)
        self.enter(Stage.CALLING)
        self.calling.set_result(session)
        self.listed.set_result(tools)
        await self._closing.wait()  # bounded by its opener
        return Problem("CONNECTION_LOST", "the conversation with the MCP server is over")

    async def call(
        self, tool: str, arguments: Mapping[str, Any], remaining_ms: int | None, trace: TraceContext
    ) -> types.CallToolResult:
        """Call a tool, bounded by the caller. Raises Failure where the server does not answer."""
        if self.settled.done():
            problem = self.settled.result()
            why = problem.message if isinstance(problem, Problem) else "it has left"
            raise Failure("CONNECTION_LOST", f"the MCP server cannot be asked any more: {why}")
        try:
            return await self._call(self.calling.result(), tool, dict(arguments), remaining_ms, trace)
        except Exception as error:
            problem = self._make_problem(_first_error(error))
            raise Failure(problem.code, problem.message) from error

    def close(self) -> None:
        self._closing.set()


async def _cap_body(response: httpx2.Response) -> None:
    """Bound a body that is read at once. The SDK limits events of a stream."""
    stream, size = response.stream, 0

    def count(part: bytes) -> None:
        nonlocal size
        size += len(part)
        if size > MESSAGE_LIMIT:
            raise httpx2.ReadError(f"the answer is larger than {MESSAGE_LIMIT} bytes", request=response.request)

    is_stream_of_events = "text/event-stream" in response.headers.get("content-type", "")
    if isinstance(stream, httpx2.AsyncByteStream) and not is_stream_of_events:
        response.stream = CountedBody(stream, count)


class _Session(ClientSession):
    async def validate_tool_result(self, name: str, result: types.CallToolResult) -> None:
        """Check nothing: regular expressions in the server's schema may take for ever."""


async def _connect(session: ClientSession) -> None:
    """Connect by `initialize`: some never answer an unknown method. One that refuses it is of a later revision."""
    try:
        await session.initialize()
    except MCPError as refused:
        if _is_lost(refused):
            raise
        try:
            with anyio.fail_after(DISCOVER_S):
                await session.discover()
        except (MCPError, TimeoutError):
            raise refused from None


def _is_lost(error: MCPError) -> bool:
    """Return whether the connection ended. Servers use the same code, so the text counts too."""
    return error.code == CONNECTION_CLOSED and error.message == "Connection closed"


async def _write_messages(
    server: InteractiveProcess,
    going_out: MemoryObjectReceiveStream[SessionMessage],
    coming_in: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    with going_out:
        try:
            async for message in going_out:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await server.write(text.encode() + b"\n")
        except (BrokenPipeError, anyio.ClosedResourceError):
            coming_in.close()  # ends the wait for an answer


def _parse_message(line: bytes) -> tuple[Any, tuple[str, ...]]:
    """Return the message (None: other output), and its numbers that stay text. Raises ValueError if it is broken."""
    if not line.lstrip().startswith(b"{"):
        return None, ()
    adapter = types.jsonrpc_message_adapter
    if b'"structuredContent"' not in line and ENVELOPE_KEY.encode() not in line:
        with contextlib.suppress(ValueError):
            return adapter.validate_json(line, by_name=False), ()
    if b'"jsonrpc"' not in line or not (b'"result"' in line or b'"error"' in line):
        return None, ()
    # Read here: the SDK changes 1e999 and rejects half characters.
    plain, kept = read_json(line.decode("utf-8", "replace"))
    return adapter.validate_python(plain, by_name=False), kept


def _first_error(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
