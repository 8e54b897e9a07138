"""Connections to one HTTP server: reused between requests, closed by another thread when a request is given up."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from urllib.parse import urljoin, urlsplit

from .._version import __version__
from ..core.clocks import NS_PER_MS
from ..process.clock import monotonic_ns
from .endpoint import Endpoint, Fate, read_url
from .event_stream import CollectedMessage
from .lines import READ_SIZE

CONNECT_LIMIT_S = 10.0
# Most servers close a connection after 5 s without a request. One that is closed meanwhile would lose the request.
REUSED_WITHIN_MS = 3_000
MOST_KEPT = 32
MOST_REDIRECTS = 5
# The end of a body that is of no use, so that its connection can be reused.
DRAIN_LIMIT_S = 1.0
MOST_DRAINED = 64 * 1024
# A peer that is gone without a word is found after KEEP_IDLE_S + KEEP_TRIES * KEEP_EVERY_S.
KEEP_IDLE_S, KEEP_EVERY_S, KEEP_TRIES = 30, 10, 3
_KEEP_ALIVE = {"TCP_KEEPIDLE": KEEP_IDLE_S, "TCP_KEEPINTVL": KEEP_EVERY_S, "TCP_KEEPCNT": KEEP_TRIES}


class NoAnswer(Exception):
    """A request that the server did not answer: a code, the fate of the request, and the end of a sentence."""

    def __init__(self, code: str, fate: Fate, why: str) -> None:
        super().__init__(why)
        self.code, self.fate, self.why = code, fate, why


class Exchange:
    """One HTTP request and its response. `abort` may be called by any thread."""

    def __init__(self) -> None:
        self.is_aborted = False
        self.has_sent = threading.Event()
        """The whole request is written, or it never will be."""
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def hold(self, connection: socket.socket | None) -> None:
        with self._lock:
            self._socket = connection
            if self.is_aborted:
                self._shut_down()

    def abort(self) -> None:
        """Close the connection. The thread that waits for the response sees its end."""
        with self._lock:
            self.is_aborted = True
            self.ended.set()
            self._shut_down()

    def _shut_down(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Of the plain socket: the method of a TLS socket also removes its state under the reading thread.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class HttpResponse:
    """A response whose body is read in pieces."""

    def __init__(
        self, link: HttpLink, exchange: Exchange, connection: http.client.HTTPConnection, sock: socket.socket
    ) -> None:
        response = connection.getresponse()  # the connection may forget its socket here
        self.status = response.status
        self.reason = response.reason
        self.kind = (response.getheader("content-type") or "").partition(";")[0].strip().lower()
        self._link = link
        self._exchange = exchange
        self._connection = connection
        self._socket = sock
        self._response = response

    def header(self, name: str) -> str:
        return self._response.getheader(name) or ""

    def read(self) -> bytes:
        """Return the next bytes; none at the end. Raises OSError or HTTPException if the body is cut off."""
        piece = self._response.read1(READ_SIZE)
        if not piece and self._response.length:  # read1 does not complain
            raise http.client.IncompleteRead(b"", self._response.length)
        return piece

    def collect(self, most: int | None = None) -> CollectedMessage:
        """Return the body, or its first bytes. Raises as `read`, and MessageTooLarge."""
        body = CollectedMessage()
        while (most is None or body.size < most) and (piece := self.read()):
            body.add(piece if most is None else piece[:most])
        return body

    def limit_waits(self, seconds: float) -> None:
        """Raise TimeoutError from a read that waits longer."""
        self._socket.settimeout(seconds)

    def finish(self) -> None:
        """Read the rest if it is short and comes at once, so that the connection can be reused. Close it otherwise."""
        try:
            self.limit_waits(DRAIN_LIMIT_S)
            drained = 0
            while drained < MOST_DRAINED and (piece := self.read()):
                drained += len(piece)
            is_usable = drained < MOST_DRAINED and not self._response.will_close
        except (OSError, http.client.HTTPException, ValueError):
            is_usable = False
        self._response.close()
        self._exchange.hold(None)  # an abort that comes now must not close the connection of another request
        if is_usable and not self._exchange.is_aborted:
            self._link.keep(self._connection)
        else:
            self._connection.close()

    def close(self) -> None:
        self._exchange.hold(None)
        self._response.close()
        self._connection.close()


class HttpLink:
    """The way to one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._path = endpoint.path
        self._lock = threading.Lock()
        self._kept: list[tuple[int, http.client.HTTPConnection]] = []
        self._tls: ssl.SSLContext | None = None
        if endpoint.scheme == "https":
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])

    def send(
        self,
        method: str,
        headers: Mapping[str, str | bytes],
        body: CollectedMessage | None,
        exchange: Exchange,
        answer_within_s: float | None = None,
    ) -> HttpResponse:
        """Send a request and return its response, which may take as long as the server works. Raises NoAnswer."""
        for _ in range(MOST_REDIRECTS):
            response = self._send_once(method, headers, body, exchange, answer_within_s)
            if response.status not in (301, 302, 303, 307, 308):
                return response
            try:
                self._follow(response)
            finally:
                response.finish()
        raise NoAnswer("HTTP_STATUS", Fate.REFUSED, f"redirected more than {MOST_REDIRECTS} times")

    def _follow(self, response: HttpResponse) -> None:
        """Use the address of a redirect from now on. Raises NoAnswer if our headers must not be sent there."""
        here = self.endpoint.origin + self._path
        there = urljoin(here, response.header("location"))
        try:
            target = read_url(there)
            shown = target.shown
        except ValueError:
            raise NoAnswer("HTTP_STATUS", Fate.REFUSED, f"redirected (HTTP {response.status}) to no address") from None
        if response.status not in (307, 308) or target.origin != self.endpoint.origin or urlsplit(there).username:
            why = f"redirected (HTTP {response.status}) to {shown}, which is not followed: use that address in --url"
            raise NoAnswer("HTTP_STATUS", Fate.REFUSED, why)
        self._path = target.path

    def _send_once(
        self,
        method: str,
        headers: Mapping[str, str | bytes],
        body: CollectedMessage | None,
        exchange: Exchange,
        answer_within_s: float | None,
    ) -> HttpResponse:
        kept = self._take_kept()
        connection = kept or self._connect()
        sock = connection.sock
        exchange.has_sent.clear()
        exchange.hold(sock)
        try:
            sock.settimeout(answer_within_s)
            connection.putrequest(method, self._path)
            for name, text in {
                "User-Agent": f"shotclock/{__version__}",
                **dict(self.endpoint.headers),
                **headers,
            }.items():
                connection.putheader(name, text if isinstance(text, bytes) else text.encode("latin-1", "replace"))
            if body is not None:
                connection.putheader("Content-Length", str(body.size))
            connection.endheaders(None if body is None else body.body())
            exchange.has_sent.set()
            # A server that delays small packets would otherwise wait 40 ms before it sends the body after the headers.
            _set_tcp_option(sock, "TCP_QUICKACK", 1)
            return HttpResponse(self, exchange, connection, sock)
        except (OSError, http.client.HTTPException) as error:
            exchange.hold(None)
            connection.close()
            if exchange.has_sent.is_set():
                raise NoAnswer("CONNECTION_LOST", Fate.LOST, explain_loss(error)) from None
            if kept is None or exchange.is_aborted:
                raise self._unreachable(error) from None
        # The server closed an idle connection, and cannot begin with a part of a request.
        return self._send_once(method, headers, body, exchange, answer_within_s)

    def _connect(self) -> http.client.HTTPConnection:
        endpoint = self.endpoint
        if self._tls is None:
            connection = http.client.HTTPConnection(
                endpoint.host, endpoint.port, timeout=CONNECT_LIMIT_S, blocksize=READ_SIZE
            )
        else:
            connection = http.client.HTTPSConnection(
                endpoint.host, endpoint.port, timeout=CONNECT_LIMIT_S, blocksize=READ_SIZE, context=self._tls
            )
        try:
            connection.connect()
        except (OSError, ValueError) as error:  # ValueError: a host name that cannot be encoded
            connection.close()
            raise self._unreachable(error) from None
        sock = connection.sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, number in _KEEP_ALIVE.items():
            _set_tcp_option(sock, name, number)
        return connection

    def _unreachable(self, error: Exception) -> NoAnswer:
        why = f"could not be reached at {self.endpoint.shown}: {_explain_unreachable(error)}"
        return NoAnswer("CONNECT_FAILED", Fate.NOT_SENT, why)

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for the next request."""
        with self._lock:
            self._kept.append((monotonic_ns(), connection))
            dropped = self._kept[:-MOST_KEPT]
            del self._kept[:-MOST_KEPT]
        for _, old in dropped:
            old.close()

    def _take_kept(self) -> http.client.HTTPConnection | None:
        """Return a connection that the server has most likely not closed: a request is never sent twice."""
        oldest_ns = monotonic_ns() - REUSED_WITHIN_MS * NS_PER_MS
        while True:
            with self._lock:
                if not self._kept:
                    return None
                kept_ns, connection = self._kept.pop()
            if kept_ns >= oldest_ns and _is_silent(connection.sock):
                return connection
            connection.close()


def _set_tcp_option(sock: socket.socket, name: str, number: int) -> None:
    option = getattr(socket, name, None)  # not every system has all of them
    if option is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, number)


def _is_silent(sock: socket.socket | None) -> bool:
    """Return whether an idle connection is open and has nothing to read."""
    if sock is None:
        return False
    try:
        sock.settimeout(0)
        # The plain socket: the TLS layer has nothing of its own while the server is silent.
        socket.socket.recv(sock, 1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False  # its end, or bytes that belong to no request


def explain_loss(error: Exception) -> str:
    """Return why a request that was begun has no answer."""
    if isinstance(error, http.client.IncompleteRead):
        return "closed the connection in the middle of its answer"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionError | ssl.SSLEOFError):
        return "closed the connection before it had answered"
    if isinstance(error, TimeoutError):
        return "did not answer in time"
    if isinstance(error, http.client.HTTPException):
        return f"answered with something other than HTTP ({type(error).__name__})"
    return f"was cut off: {getattr(error, 'strerror', None) or error}"


def _explain_unreachable(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, socket.gaierror):
        return f"its name cannot be resolved: {error.strerror}"
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_LIMIT_S:g}s"
    return (getattr(error, "strerror", None) or str(error)).lower()
