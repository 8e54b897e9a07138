"""MCP over stdin and stdout: one JSON-RPC message per line, on the event loop.

The SDK's transport uses threads of a pool that hung work can exhaust; this one never blocks. While more than
MOST_UNWRITTEN bytes wait for a client that does not read, nothing more is read from it, so that the server holds a
bounded amount.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
from collections import deque
from typing import Any, Self

import anyio
from mcp.server.transport_security import DEFAULT_MAX_REQUEST_BODY_SIZE
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_REQUEST, PARSE_ERROR, jsonrpc_message_adapter

from .standard_streams import PipeWriter

READ_SIZE = 256 * 1024
MOST_UNREAD = 1024  # messages not yet taken by the SDK, which takes them at once unless the loop is busy
MOST_UNWRITTEN = 1024 * 1024
LONGEST_LINE = DEFAULT_MAX_REQUEST_BODY_SIZE  # the limit of HTTP. A longer line is answered with an error
TOO_LONG = f"a message may have {LONGEST_LINE} bytes at most: send less, or the name of a file"
HEAD_SIZE = 1024  # bytes of a refused line in which its id is looked for
HANG_UP_CHECK_S = 0.25  # while nothing is read, the end of stdin is not seen: the descriptor is checked this often
_HUNG_UP = getattr(select, "POLLRDHUP", 0)
# The leading keys of a JSON object that hold text or a whole number.
_LEADING_KEYS = re.compile(rb'\s*\{((?:\s*"\w+"\s*:\s*(?:-?\d{1,18}|"[^"\\]*")\s*[,}])+)')


class Wire:
    """Both directions of one client: the SDK server's read stream and write stream."""

    def __init__(self, wire_in: int, wire_out: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._in = wire_in
        self._messages: deque[SessionMessage] = deque()
        self._line = bytearray()
        self._is_too_long = False
        self.ended: asyncio.Event = asyncio.Event()
        self._reads = False
        self._arrived: asyncio.Future[None] | None = None
        self._writer = PipeWriter(wire_out, self._drained)
        self._room: asyncio.Future[None] | None = None
        self._hang_up = select.poll()
        self._hang_up.register(wire_in, _HUNG_UP)
        self._hang_up_check: asyncio.TimerHandle | None = None
        self._read_on()

    def close(self) -> None:
        self._pause()
        if self._hang_up_check is not None:
            self._hang_up_check.cancel()
        self._writer.close()
        self._end()

    async def aclose(self) -> None:
        """Do nothing: the SDK closes each stream, the server closes the wire."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        pass

    def _read_on(self) -> None:
        if self._reads or self.ended.is_set():
            return
        self._reads = True
        try:
            self._loop.add_reader(self._in, self._readable)
        except PermissionError:  # a file or /dev/null, which is always readable
            self._loop.call_soon(self._readable_file)

    def _pause(self) -> None:
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._in)

    def _readable_file(self) -> None:
        if self._reads:
            self._readable()
            self._loop.call_soon(self._readable_file)

    def _readable(self) -> None:
        try:
            chunk = os.read(self._in, READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._pause()
            self._end()
            return
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._add(line)
            self._take_line()
        self._add(rest)
        if len(self._messages) > MOST_UNREAD or self._writer.held > MOST_UNWRITTEN:
            self._pause()
            self._look_for_hang_up()
        _wake(self._arrived)

    def _look_for_hang_up(self) -> None:
        self._hang_up_check = None
        if self._reads or self.ended.is_set():
            return
        if self._hang_up.poll(0):
            self._messages.clear()
            self._end()
        else:
            self._hang_up_check = self._loop.call_later(HANG_UP_CHECK_S, self._look_for_hang_up)

    def _add(self, part: bytes) -> None:
        if not self._is_too_long:
            self._line += part
        if len(self._line) > LONGEST_LINE:
            self._is_too_long = True
            del self._line[HEAD_SIZE:]

    def _take_line(self) -> None:
        line, self._line = bytes(self._line).strip(), bytearray()
        is_too_long, self._is_too_long = self._is_too_long, False
        if is_too_long:
            self._refuse(line, TOO_LONG)
        elif line:
            try:
                self._messages.append(SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False)))
            except ValueError:
                self._refuse(line, "not a JSON-RPC message")

    def _refuse(self, line: bytes, why: str) -> None:
        """Answer a line that is not taken, under its request id if it begins with that."""
        request_id = _request_id(line[:HEAD_SIZE])
        error = {"code": PARSE_ERROR if request_id is None else INVALID_REQUEST, "message": why}
        self._writer.write(json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}).encode() + b"\n")

    def _end(self) -> None:
        self.ended.set()
        _wake(self._arrived)

    async def receive(self) -> SessionMessage | Exception:
        while not self._messages:
            if self.ended.is_set():
                raise anyio.EndOfStream
            self._arrived = self._loop.create_future()
            await self._arrived  # unbounded on purpose: a server waits for its client, and ends with it
        message = self._messages.popleft()
        if self._writer.held <= MOST_UNWRITTEN:
            self._read_on()
        return message

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def send(self, item: SessionMessage, /) -> None:
        """Write a message completely. Raises BrokenResourceError if the client has left."""
        if not self._writer.is_broken:
            self._writer.write(_line_of(item.message))
        if self._writer.is_broken:
            raise anyio.BrokenResourceError
        await self.until_written()

    async def until_written(self) -> None:
        """Wait until the client has read everything. The calls of a client that does not read have their clocks."""
        while self._writer.held:
            if self._room is None or self._room.done():
                self._room = self._loop.create_future()
            await asyncio.shield(self._room)

    def _drained(self) -> None:
        _wake(self._room)
        if self._writer.is_broken:
            self._pause()
            self._end()
        else:
            self._read_on()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _request_id(head: bytes) -> str | int | None:
    """Return the id of a request that begins with its id and method. The id of an answer is one of the server's own."""
    found = _LEADING_KEYS.match(head)
    try:
        keys = json.loads(b"{" + found[1].rstrip(b",}") + b"}") if found is not None else {}
    except ValueError:
        return None
    request_id: str | int | None = keys.get("id") if "method" in keys else None
    return request_id


def _line_of(message: Any) -> bytes:
    try:
        text: str = message.model_dump_json(by_alias=True, exclude_unset=True)
    except ValueError:  # half a character somewhere, which UTF-8 cannot carry
        plain = message.model_dump(mode="python", by_alias=True, exclude_unset=True)
        text = json.dumps(plain, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace") + b"\n"
