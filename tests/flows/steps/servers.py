"""Servers that misbehave, on real sockets, each connection in a thread of its own."""

import contextlib
import gzip
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Self

JOIN_S = 5.0  # a handler that waits for anything but the server's end would run this out
STEP_S = 0.02  # between two drops of what drips
FLOOD = b"x" * 65_536


class Connection:
    """One client. Every wait ends when the server is closed."""

    def __init__(self, sock: socket.socket, stopped: threading.Event, requests: list[bytes]) -> None:
        self.sock = sock
        self.stopped = stopped
        self._requests = requests

    def read_request(self) -> bytes:
        """Up to the end of the headers, and the body where a length is given. The server knows it before it answers."""
        request = self._read()
        if request:
            self._requests.append(request)
        return request

    def _read(self) -> bytes:
        received = b""
        while b"\r\n\r\n" not in received:
            part = self._recv()
            if not part:
                return received
            received += part
        head, _, body = received.partition(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                while len(body) < int(value) and (part := self._recv()):
                    body += part
        return head + b"\r\n\r\n" + body

    def _recv(self) -> bytes:
        while not self.stopped.is_set():
            try:
                return self.sock.recv(65_536)
            except TimeoutError:
                continue
        return b""

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.stopped.is_set():
            try:
                view = view[self.sock.send(view) :]
            except TimeoutError:
                continue

    def drip(self, data: bytes) -> None:
        for position in range(len(data)):
            self.send(data[position : position + 1])
            self.stopped.wait(STEP_S)
            if self.stopped.is_set():
                return

    def hang(self) -> None:
        """Until the other side is gone or the server is closed."""
        while self._recv():
            pass

    def reset(self) -> None:
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.sock.close()


Handler = Callable[[Connection], None]


class Server:
    """Listens on a port of 127.0.0.1 while it is entered. `tls` makes it one that speaks TLS."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None) -> None:
        self._handler = handler
        self._tls = tls
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.requests: list[bytes] = []
        self.connections = 0
        self._open = 0
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._listener.close()
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive(), "a handler of the server did not end"

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def all_left(self, within_s: float) -> bool:
        """Whether every client has closed its side."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, within_s)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with self._changed:
                self.connections += 1
                self._open += 1
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.settimeout(5.0)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
            sock.settimeout(0.05)
            connection = Connection(sock, self._stopped, self.requests)
            self._handler(connection)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            connection.hang()
        with contextlib.suppress(OSError):
            sock.close()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()


@contextlib.contextmanager
def deaf_port():
    """A port whose queue is full: it is there, and takes no more connections."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(listener.getsockname())
        yield listener.getsockname()[1]


def response(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    if "Content_Length" not in headers and "Transfer_Encoding" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answers(*replies: bytes) -> Handler:
    """Each connection gets the next one; the last one for ever."""
    left = list(replies)
    lock = threading.Lock()

    def handle(connection: Connection) -> None:
        connection.read_request()
        with lock:
            reply = left.pop(0) if len(left) > 1 else left[0]
        connection.send(reply)

    return handle


# --- those that never come to an end ----------------------------------------------------------------------


def says_nothing(connection: Connection) -> None:
    connection.hang()


def reads_nothing(connection: Connection) -> None:
    while not connection.stopped.wait(STEP_S):
        try:  # gone without reading what it sent: a look at the socket's state, not at its bytes
            connection.sock.send(b"")
            if connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return
            if connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1:  # no longer ESTABLISHED
                return
        except OSError:
            return


def drips_headers(connection: Connection) -> None:
    connection.read_request()
    connection.drip(b"HTTP/1.1 200 OK\r\n" + b"X-Slow: yes\r\n" * 10_000)


def drips_body(connection: Connection) -> None:
    connection.read_request()
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 100000\r\n\r\n")
    connection.drip(b"0123456789" * 10_000)


def drips_a_chunk_size(connection: Connection) -> None:
    connection.read_request()
    connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    connection.drip(b"0" * 100_000)


def drips_trailers(connection: Connection) -> None:
    connection.read_request()
    connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n")
    connection.drip(b"X-Trailer: yes\r\n" * 10_000)


def drips_gzip(connection: Connection) -> None:
    connection.read_request()
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 100000\r\n\r\n")
    connection.drip(gzip.compress(b"0123456789" * 10_000, 0))


def drips_an_error(connection: Connection) -> None:
    connection.read_request()
    connection.send(b"HTTP/1.1 500 Oh\r\nContent-Length: 100000\r\n\r\n")
    connection.drip(b"0123456789" * 10_000)


def promises_for_ever(connection: Connection) -> None:
    """One 100 Continue after the other."""
    connection.read_request()
    while not connection.stopped.is_set():
        connection.send(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def drips_promises(connection: Connection) -> None:
    connection.read_request()
    while not connection.stopped.wait(STEP_S):
        connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")


def floods(connection: Connection) -> None:
    """A body without an end, as fast as it goes."""
    connection.read_request()
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while not connection.stopped.is_set():
        connection.send(FLOOD)


def floods_after_gzip(connection: Connection) -> None:
    """A gzip stream that has ended, and more bytes behind it that unpack to nothing."""
    connection.read_request()
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"all"))
    while not connection.stopped.is_set():
        connection.send(FLOOD)


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    give_up_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(0.01)
    return True
