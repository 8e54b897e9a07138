"""MCP over stdin and stdout, without threads: lines in, lines out, on the event loop.

The SDK's own transport reads and writes in threads of a pool that hung work can exhaust. Here nothing blocks: a client
that does not read is written to only as far as its pipe has room; what does not fit waits in memory, and as long as
more than MOST_UNWRITTEN waits, nothing more is read from that client. So what it can make us hold is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
from collections import deque
from types import TracebackType
from typing import Any, Self

import anyio
from mcp.server.transport_security import DEFAULT_MAX_REQUEST_BODY_SIZE
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_REQUEST, PARSE_ERROR, jsonrpc_message_adapter

from ..process.command_task import PIPE_ROOM

READ_SIZE = 256 * 1024
# Messages that were read and not yet taken by the SDK. It takes them at once; only a busy loop runs this out.
MOST_UNREAD = 1024
MOST_UNWRITTEN = 1024 * 1024
# The same as over HTTP. A longer line is answered with an error and forgotten.
LONGEST_LINE = DEFAULT_MAX_REQUEST_BODY_SIZE
TOO_LONG = f"a message may have {LONGEST_LINE} bytes at most: send less, or the name of a file"
# What is kept of a message that is not: its outermost keys and the values that are not nested, each string up to the
# second of these. A method and an id need a few dozen bytes.
MOST_OUTLINE = 16 * 1024
LONGEST_OUTLINE_TEXT = 1024
# While nothing is read, its end is not seen either: this often it is looked whether the client has closed its side.
HANG_UP_CHECK_S = 0.25
_HUNG_UP = getattr(select, "POLLRDHUP", 0)


class Wire:
    """Both directions of one client. Give `reading` and `writing` to the SDK's server."""

    def __init__(self, wire_in: int, wire_out: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._in, self._out = wire_in, wire_out
        self._messages: deque[SessionMessage | Exception] = deque()
        self._line = bytearray()
        self._skipped: Outline | None = None  # of a line that is too long
        self._at_end = False
        self._reads = False
        self._wanted: asyncio.Future[None] | None = None
        self._unwritten: deque[memoryview] = deque()
        self._unwritten_bytes = 0
        self._writes = False
        self._room: asyncio.Future[None] | None = None
        self._broken = False
        self._poller = select.poll()
        self._poller.register(wire_out, select.POLLOUT)
        self._hang_up = select.poll()
        self._hang_up.register(wire_in, _HUNG_UP)
        self._hang_up_check: asyncio.TimerHandle | None = None
        self.reading, self.writing = Reading(self), Writing(self)
        self._read_on()

    def close(self) -> None:
        self._pause()
        if self._hang_up_check is not None:
            self._hang_up_check.cancel()
        if self._writes:
            self._loop.remove_writer(self._out)
            self._writes = False
        self._end()

    # --- in -----------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        if self._reads or self._at_end:
            return
        self._reads = True
        try:
            self._loop.add_reader(self._in, self._readable)
        except PermissionError:  # a file or /dev/null: always readable, and nothing to wait for
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
        if len(self._messages) > MOST_UNREAD or self._unwritten_bytes > MOST_UNWRITTEN:
            self._pause()
            self._look_for_hang_up()
        self._wake_reader()

    def _look_for_hang_up(self) -> None:
        self._hang_up_check = None
        if self._reads or self._at_end:
            return
        if self._hang_up.poll(0):
            self._messages.clear()  # who left wants no answers
            self._end()
        else:
            self._hang_up_check = self._loop.call_later(HANG_UP_CHECK_S, self._look_for_hang_up)

    def _add(self, part: bytes) -> None:
        if self._skipped is not None:
            self._skipped.read(part)
            return
        self._line += part
        if len(self._line) > LONGEST_LINE:
            self._skipped = Outline()
            self._skipped.read(bytes(self._line))
            self._line.clear()

    def _take_line(self) -> None:
        line, self._line = bytes(self._line).strip(), bytearray()
        skipped, self._skipped = self._skipped, None
        if skipped is not None:
            self._refuse(skipped, TOO_LONG)
        elif line:
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                outline = Outline()
                outline.read(line)
                self._refuse(outline, "not a JSON-RPC message")
            else:
                self._messages.append(SessionMessage(message))

    def _refuse(self, outline: Outline, why: str) -> None:
        """Answer a message that is not taken, under its own id where it has one: its sender waits for that."""
        message = outline.message()
        if message is not None and "method" in message and "id" not in message:
            return  # a notification wants no answer
        if message is not None and "id" in message and ("result" in message or "error" in message):
            return  # it is an answer itself; whoever asked here has a clock
        id = None if message is None else message.get("id")
        is_known = isinstance(id, str | int) and not isinstance(id, bool)
        error = {"code": INVALID_REQUEST if is_known else PARSE_ERROR, "message": why}
        refusal = {"jsonrpc": "2.0", "id": id if is_known else None, "error": error}
        with contextlib.suppress(anyio.BrokenResourceError):
            self.write(json.dumps(refusal).encode() + b"\n")

    def _end(self) -> None:
        self._at_end = True
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def next_message(self) -> SessionMessage | Exception:
        while not self._messages:
            if self._at_end:
                raise anyio.EndOfStream
            self._wanted = self._loop.create_future()
            await self._wanted  # unbounded on purpose: a server waits for its client, and ends with it
        message = self._messages.popleft()
        if not self._reads and self._unwritten_bytes <= MOST_UNWRITTEN:
            self._read_on()
        return message

    # --- out ----------------------------------------------------------------------------------------------

    def write(self, line: bytes) -> None:
        """Write what there is room for now, the rest as room comes. Raises BrokenResourceError if nobody is there."""
        if self._broken:
            raise anyio.BrokenResourceError
        rest = memoryview(line)
        if not self._unwritten:
            rest = rest[self._write_some(rest) :]
        if rest:
            self._unwritten.append(rest)
            self._unwritten_bytes += len(rest)
            if not self._writes:
                self._writes = True
                self._loop.add_writer(self._out, self._writable)

    def _write_some(self, data: memoryview) -> int:
        written = 0
        try:
            while written < len(data) and self._poller.poll(0):
                written += os.write(self._out, data[written : written + PIPE_ROOM])
        except BlockingIOError:
            pass
        except OSError as error:
            self._break()
            raise anyio.BrokenResourceError from error
        return written

    def _writable(self) -> None:
        with contextlib.suppress(anyio.BrokenResourceError):
            while self._unwritten:
                first = self._unwritten[0]
                written = self._write_some(first)
                self._unwritten_bytes -= written
                if written < len(first):
                    self._unwritten[0] = first[written:]
                    return
                self._unwritten.popleft()
        self._loop.remove_writer(self._out)
        self._writes = False
        self._wake_writers()
        if self._messages or not self._at_end:
            self._read_on()

    def _break(self) -> None:
        """Note that the client closed our stdout: it has left."""
        self._broken = True
        self._unwritten.clear()
        self._unwritten_bytes = 0
        self._wake_writers()
        self._pause()
        self._end()

    def _wake_writers(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    async def until_written(self) -> None:
        """Wait until all is written. As long as the client does not read, whoever has something to say waits; its calls
        have their own clocks."""
        while self._unwritten and not self._broken:
            if self._room is None:
                self._room = self._loop.create_future()
            await asyncio.shield(self._room)


# Up to the next mark that matters: in the outermost object, in a string, and further inside, where whole strings and
# lists and objects of a few levels are passed at once. None of them goes back over what it has passed.
_TO_MARK = re.compile(rb'[^"\[\]{}]*')
_TO_QUOTE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_FLAT = rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")'
for _ in range(3):
    _FLAT = rb"(?:" + _FLAT + rb"|[\[{]" + _FLAT + rb"*+[\]}])"
_TO_NESTED = re.compile(_FLAT + rb"*+", re.DOTALL)
_OPENINGS = re.compile(rb"[\[{]+")


class Outline:
    """The outermost object of a JSON text that comes in pieces and is not kept. Everything nested in it is left out."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._depth = 0
        self._in_string = False
        self._string_at = 0
        self._is_long = False  # the string that is being read
        self._is_escaped = False  # the last piece ended between a backslash and what it escapes

    def read(self, data: bytes) -> None:
        at = 0
        if self._is_escaped and data:
            self._keep(data[:1])
            self._is_escaped, at = False, 1
        while at < len(data) and len(self._text) <= MOST_OUTLINE:
            pattern = _TO_QUOTE if self._in_string else _TO_MARK if self._depth < 2 else _TO_NESTED
            found = pattern.match(data, at)
            assert found is not None  # each of them matches nothing at all as well
            self._keep(found[0])
            at = found.end() + 1
            mark = data[at - 1 : at]
            if mark == b'"':
                self._in_string = not self._in_string
                self._keep(mark)
                self._string_at, self._is_long = len(self._text), False
            elif mark == b"\\":
                self._keep(mark)
                self._is_escaped = True
            elif opened := _OPENINGS.match(mark):
                if self._depth == 1:
                    self._keep(b"null")
                elif self._depth > 1:
                    opened = _OPENINGS.match(data, at - 1) or opened
                    at = opened.end()
                self._depth += len(opened[0])
                self._keep(mark)
            elif mark:
                self._keep(mark)
                self._depth -= 1

    def _keep(self, part: bytes) -> None:
        if self._depth > 1 or len(self._text) > MOST_OUTLINE or (self._in_string and self._is_long):
            return
        self._text += part[: MOST_OUTLINE + 1]
        if self._in_string and len(self._text) - self._string_at > LONGEST_OUTLINE_TEXT:
            del self._text[self._string_at :]  # what is so long says nothing about who waits for an answer
            self._is_long = True

    def message(self) -> dict[str, object] | None:
        """Return the object, with null for all that is nested; None where it is none, or has too much in it."""
        try:
            message = json.loads(self._text) if len(self._text) <= MOST_OUTLINE else None
        except ValueError:
            return None
        return message if isinstance(message, dict) else None


class _Stream:
    """What the SDK expects of either direction."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._closed = False

    async def aclose(self) -> None:
        self._closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Reading(_Stream):
    async def receive(self) -> SessionMessage | Exception:
        if self._closed:
            raise anyio.ClosedResourceError
        return await self._wire.next_message()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class Writing(_Stream):
    async def send(self, item: SessionMessage, /) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        self._wire.write(_line_of(item.message))
        if self._wire._unwritten:
            await self._wire.until_written()


def _line_of(message: Any) -> bytes:
    try:
        text: str = message.model_dump_json(by_alias=True, exclude_unset=True)
    except ValueError:  # half a character somewhere, which UTF-8 cannot carry
        plain = message.model_dump(mode="python", by_alias=True, exclude_unset=True)
        text = json.dumps(plain, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace") + b"\n"
