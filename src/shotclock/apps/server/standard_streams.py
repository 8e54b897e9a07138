"""Standard streams and descriptors of a server, and MCP over stdin and stdout: one JSON-RPC message per line.

Nothing here blocks or grows without limit: neither a client that does not read stderr nor a tool that prints without
end can stop the server or fill its memory.

The SDK's transport uses threads of a pool that hung work can exhaust; this one never blocks. While more than
MOST_UNWRITTEN bytes wait for a client that does not read, nothing more is read from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import re
import resource
import select
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self

import anyio
from mcp.server.transport_security import DEFAULT_MAX_REQUEST_BODY_SIZE
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_REQUEST, PARSE_ERROR, jsonrpc_message_adapter

from ...supervise.clock import TokenBucket
from ...supervise.command_task import PIPE_ROOM

READ_SIZE = 64 * 1024
MOST_HELD = 1024 * 1024  # bytes of stderr that wait for a slow client. More are dropped


class PipeWriter:
    """A descriptor that is written without blocking. Bytes without room wait in memory."""

    def __init__(self, fd: int, on_drained: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)
        self._held = bytearray()
        self._waits = False
        self._on_drained = on_drained
        self.is_broken: bool = False  # the other side has closed it. Further bytes are dropped

    @property
    def held(self) -> int:
        return len(self._held)

    def write(self, content: bytes) -> None:
        self._held += content
        if not self._waits:
            self._flush()

    def close(self) -> None:
        """Write what there is room for, and drop the rest."""
        if self._waits:
            self._flush()
            self._held.clear()
            self._wait(False)

    def _flush(self) -> None:
        written = 0
        try:
            while written < len(self._held) and self._poller.poll(0):
                written += os.write(self._fd, self._held[written : written + PIPE_ROOM])
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True
            written = len(self._held)
        del self._held[:written]
        was_waiting = self._waits
        self._wait(bool(self._held))
        if self._on_drained is not None and not self._held and (was_waiting or self.is_broken):
            self._on_drained()

    def _wait(self, waits: bool) -> None:
        if waits and not self._waits:
            self._loop.add_writer(self._fd, self._flush)
        elif self._waits and not waits:
            self._loop.remove_writer(self._fd)
        self._waits = waits


class ServerStderr(io.TextIOBase):
    """The stderr of a server, which never blocks. `dropped` counts the bytes left out."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer = PipeWriter(fd)
        # Lines about mistakes of clients, from the server and its libraries; refilled in a quarter of an hour.
        self._own = TokenBucket(1024 * 1024, 1024)
        self._tools = TokenBucket(16 * 1024 * 1024, 16 * 1024)
        self._used_up: set[TokenBucket] = set()  # from the first refusal until half of the allowance is back
        self.dropped: int = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._write_within(self._own, text.encode("utf-8", "backslashreplace"), "too much was written here")
        return len(text)

    def relay(self, content: bytes) -> None:
        self._write_within(self._tools, content, "tools print too much")

    def say(self, line: str) -> None:
        """Write a line of the server itself. These are few, and not counted."""
        self._write(f"shotclock: {line}\n".encode("utf-8", "backslashreplace"))

    def _write_within(self, allowance: TokenBucket, content: bytes, why: str) -> None:
        if allowance in self._used_up and allowance.left >= allowance.at_once / 2:
            self._used_up.remove(allowance)
        if allowance not in self._used_up:
            if not allowance.take(len(content)):
                self._write(content)
                return
            self._used_up.add(allowance)
            self.say(f"{why}: most of it is left out for a while")
        self.dropped += len(content)

    def _write(self, content: bytes) -> None:
        if self._writer.held + len(content) > MOST_HELD:
            self.dropped += len(content)
        else:
            self._writer.write(content)

    def end(self) -> None:
        self._writer.close()


@contextlib.contextmanager
def unblock_stderr(fd: int = 2) -> Iterator[ServerStderr]:
    """Replace sys.stderr, so that no log line, traceback or warning can block this process."""
    before = sys.stderr
    sys.stderr = stderr = ServerStderr(fd)
    try:
        yield stderr
    finally:
        stderr.end()
        sys.stderr = before


@contextlib.contextmanager
def relay_stderr() -> Iterator[ServerStderr]:
    """Do as `unblock_stderr`, and relay the stderr of processes started meanwhile."""
    try:
        own = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:  # stderr is closed
        with unblock_stderr() as stderr:
            yield stderr
        return
    loop = asyncio.get_running_loop()
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.dup2(write_end, 2)
    os.close(write_end)
    try:
        with unblock_stderr(own) as stderr:

            def relay() -> bool:
                try:
                    content = os.read(read_end, READ_SIZE)
                except BlockingIOError:
                    return False
                stderr.relay(content)
                return bool(content)

            loop.add_reader(read_end, relay)
            try:
                yield stderr
            finally:
                loop.remove_reader(read_end)
                for _ in range(MOST_HELD // READ_SIZE):
                    if not relay():
                        break
    finally:
        os.dup2(own, 2)
        os.close(read_end)
        os.close(own)


@contextlib.contextmanager
def claim_descriptors() -> Iterator[tuple[int, int]]:
    """Move stdin and stdout to private descriptors. Meanwhile stdin is empty and stdout is stderr."""
    wire_in, wire_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(null, 0)
        try:
            os.dup2(2, 1)
        except OSError:  # stderr is closed
            os.dup2(null, 1)
        yield wire_in, wire_out
    finally:
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        for fd in (wire_in, wire_out, null):
            os.close(fd)


# For the store, the host of async commands, logs, and connections that are accepted or closed in the same moment.
KEPT_FOR_SERVER = 64
EACH_WORKER = 4
MOST_CONNECTIONS = 16_384  # beyond this, memory is used up first


def share_descriptors(most_workers: int) -> tuple[int, int]:
    """Return the numbers of workers and connections that can be open together."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return most_workers, MOST_CONNECTIONS
    free = max(16, limit - KEPT_FOR_SERVER)
    workers = max(1, min(most_workers, free // 2 // EACH_WORKER))
    return workers, min(MOST_CONNECTIONS, free - workers * EACH_WORKER)


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
