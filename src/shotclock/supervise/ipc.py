"""Messages between our own processes: a length, then marshalled plain values.

Marshal is built in and knows no classes, so a message can neither run code nor cost an import. Values of users travel
pickled inside a message and are only opened where they belong.
"""

from __future__ import annotations

# The C module alone: `socket` takes as long to import as a third of starting Python, and every `exec` would pay for it.
import _socket
import marshal
import os
import sys
from struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Message = tuple[Any, ...]

Socket = _socket.socket
pair: Callable[[], tuple[Socket, Socket]] = _socket.socketpair
_PREFIX = 4
_NO_SIGNAL = getattr(_socket, "MSG_NOSIGNAL", 0)
_FD = Struct("i")
_CHUNK = 64 * 1024  # recv() allocates it all before it knows how little came


class Broken(Exception):
    """The other side is gone or did not read in time, possibly in the middle of a message."""


def frame(message: Message) -> bytes:
    body = marshal.dumps(message)
    return len(body).to_bytes(_PREFIX, "little") + body


def send(sock: Socket, message: Message, fds: list[int] | None = None) -> None:
    """Send a whole message with descriptors, or raise Broken. Each part is bounded by the socket's timeout."""
    rest = memoryview(frame(message))
    rights = _rights(fds) if fds else []
    try:
        while rest:
            # A sandbox may forbid send(): that of Codex does. A program may have SIGPIPE end it.
            rest = rest[sock.sendmsg([rest], rights, _NO_SIGNAL) :]
            rights = []
    except OSError as error:
        raise Broken(str(error)) from error


class MessageReader:
    def __init__(self, sock: Socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._unread: list[Message] = []

    def receive(self) -> list[Message]:
        """Read once and return whole messages. Raises Broken at the end, BlockingIOError if nothing is there."""
        try:
            chunk = self._read()
        except (BlockingIOError, InterruptedError):
            raise
        except TimeoutError:
            raise BlockingIOError from None
        except OSError as error:
            raise Broken(str(error)) from error
        if not chunk:
            raise Broken("closed")
        buffer = self._buffer
        buffer += chunk
        messages: list[Message] = []
        start = 0
        while len(buffer) - start >= _PREFIX:
            end = start + _PREFIX + int.from_bytes(buffer[start : start + _PREFIX], "little")
            if len(buffer) < end:
                break
            messages.append(marshal.loads(memoryview(buffer)[start + _PREFIX : end].tobytes()))
            start = end
        if start:
            del buffer[:start]
        return messages

    def _read(self) -> bytes:
        return self._sock.recv(_CHUNK)

    @property
    def has_unread(self) -> bool:
        """Return whether `next` would give a message that has already come."""
        return bool(self._unread)

    def drop(self, kind: str) -> None:
        """Forget the messages of a kind that have already come."""
        self._unread = [message for message in self._unread if message[0] != kind]

    def put_back(self, messages: list[Message]) -> None:
        self._unread[:0] = messages

    def next(self) -> Message:
        """Return the next message, as long as the socket's timeout allows."""
        while not self._unread:
            self._unread += self.receive()
        return self._unread.pop(0)


class ReaderWithDescriptors(MessageReader):
    """Reader of messages with descriptors. The kernel delivers them no later than their message."""

    def __init__(self, sock: Socket) -> None:
        super().__init__(sock)
        self._descriptors: list[int] = []

    def _read(self) -> bytes:
        chunk, fds = receive_fds(self._sock, _CHUNK)
        self._descriptors += fds
        return chunk

    def take_descriptors(self) -> list[int]:
        taken, self._descriptors = self._descriptors, []
        return taken


def peer_pid(sock: Socket) -> int:
    """Return the process that made the pair of sockets, or the parent where a sandbox forbids to ask. Linux only."""
    try:
        return maker_pid(sock)
    except OSError:
        return os.getppid()


def maker_pid(sock: Socket) -> int:
    """Return the process that made the other end; 0 for a network socket. Linux only."""
    return int.from_bytes(sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 4), sys.byteorder)


def receive_one(sock: Socket) -> Message:
    """Receive one message and not a byte further: descriptors follow on the same socket."""
    size = int.from_bytes(_exactly(sock, _PREFIX), "little")
    message: Message = marshal.loads(_exactly(sock, size))
    return message


def _exactly(sock: Socket, size: int) -> bytes:
    parts = []
    while size:
        try:
            part = sock.recv(min(size, _CHUNK))
        except OSError as error:
            raise Broken(str(error)) from error
        if not part:
            raise Broken("closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send_fds(sock: Socket, note: bytes, fds: list[int]) -> None:
    try:
        sock.sendmsg([note], _rights(fds), _NO_SIGNAL)
    except BlockingIOError:  # the other side is behind with its work, not gone
        raise
    except OSError as error:
        raise Broken(str(error)) from error


def receive_fds(sock: Socket, size: int = 1, limit: int = 8) -> tuple[bytes, list[int]]:
    """Receive up to `size` bytes with their descriptors; no byte when the other side is gone."""
    room = _socket.CMSG_SPACE(limit * _FD.size)
    note, ancillary, _, _ = sock.recvmsg(size, room, getattr(_socket, "MSG_CMSG_CLOEXEC", 0))
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            fds += (fd for (fd,) in _FD.iter_unpack(data[: len(data) - len(data) % _FD.size]))
    return note, fds


def _rights(fds: list[int]) -> list[tuple[int, int, bytes]]:
    return [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(map(_FD.pack, fds)))]
