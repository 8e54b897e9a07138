"""Private Unix sockets: reachable by processes of the same user only, at a path of any length."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

from . import kernel

LONGEST_ADDRESS = 100  # the address of a Unix socket holds 107 bytes (103 on macOS); a state directory may be longer


def listen(path: str | os.PathLike[str], backlog: int = 64) -> socket.socket:
    """Return a listening socket. A file at the path is replaced: the caller must own the path or hold a lock for it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with _short_address(path) as address:
            listener.bind(address)
        os.chmod(path, 0o600)
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket) -> socket.socket | None:
    """Return the next connection, or None where the peer has left or belongs to another user."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    if peer_of(connection)[1] != os.geteuid():
        connection.close()
        return None
    connection.setblocking(False)
    return connection


def connect(path: str | os.PathLike[str], timeout_s: float) -> socket.socket:
    """Connect, with this timeout for each operation. Raises PermissionError where another user listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _short_address(path) as address:
            connection.connect(address)
        if peer_of(connection)[1] != os.geteuid():
            raise PermissionError("the socket belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user id of the other end. Outside Linux the pid is 0, and only the file mode protects."""
    if not kernel.LINUX:
        return 0, os.geteuid()
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


@contextlib.contextmanager
def _short_address(path: str | os.PathLike[str]) -> Iterator[str]:
    if len(os.fsencode(path)) < LONGEST_ADDRESS or not kernel.LINUX:
        yield os.fspath(path)
        return
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
