"""Connections to one HTTP server: reused between requests, closed by another thread when a request is given up."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from ..._version import __version__
from ...core.limits import NS_PER_MS
from ...core.value_types import value
from ...supervise.clock import monotonic_ns
from .._lines import READ_SIZE
from ._events import CollectedMessage, MessageTooLarge
from ._headers import HeaderTexts
from .endpoint import Endpoint, ResponseFate, read_url

CONNECT_LIMIT_S = 10.0
# Most servers close a connection after 5 s without a request. One that is closed meanwhile would lose the request.
REUSED_WITHIN_MS = 3_000
MOST_KEPT = 32
MOST_REDIRECTS = 5
# The end of a body that is of no use, so that its connection can be reused.
DRAIN_LIMIT_S = 1.0
MOST_DRAINED = 4  # pieces
# A peer that is gone without a word is found after a minute.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_BROKEN = (OSError, http.client.HTTPException, ValueError)


class NoAnswer(Exception):
    """A request that the server did not answer: a code, the fate of the request, and the end of a sentence."""

    def __init__(self, code: str, fate: ResponseFate, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.fate = fate
        self.why = why


@value
class OutgoingRequest:
    verb: str
    headers: HeaderTexts
    body: CollectedMessage | None = None


class Exchange:
    """A request and its response on one connection. `abort` may be called by any thread."""

    def __init__(self) -> None:
        self.is_aborted: bool = False
        self.has_sent: threading.Event = threading.Event()
        """The whole request is written, or it never will be."""
        self.ended: threading.Event = threading.Event()
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

    def __init__(self, link: HttpLink, exchange: Exchange, connection: http.client.HTTPConnection) -> None:
        self._socket = connection.sock  # the connection may forget it in the next line
        self._response = connection.getresponse()
        self._link, self._exchange, self._connection = link, exchange, connection
        self.status: int = self._response.status
        self.kind: str = self.header("content-type").partition(";")[0].strip().lower()

    def header(self, name: str) -> str:
        return self._response.getheader(name) or ""

    @property
    def title(self) -> str:
        return f"HTTP {self.status} {self._response.reason}".rstrip()

    def read(self) -> bytes:
        """Return the next bytes; none at the end. Raises NoAnswer if the body is cut off."""
        try:
            piece = self._response.read1(READ_SIZE)
            if not piece and self._response.length:  # read1 does not complain
                raise http.client.IncompleteRead(b"")
        except _BROKEN as error:
            self.close()
            raise NoAnswer("CONNECTION_LOST", ResponseFate.LOST, _explain_loss(error)) from None
        return piece

    def collect(self, most: int | None = None) -> CollectedMessage:
        """Return the body, or its first bytes, and end the response. Raises as `read`, and MessageTooLarge."""
        body = CollectedMessage()
        try:
            while (most is None or body.size < most) and (piece := self.read()):
                body.add(piece[:most])
        except MessageTooLarge:
            self.close()
            raise
        self.finish()
        return body

    def finish(self) -> None:
        """Keep the connection for another request if the rest is short and comes at once. Close it otherwise."""
        with contextlib.suppress(NoAnswer, OSError):
            self._socket.settimeout(DRAIN_LIMIT_S)
            is_read = any(not self.read() for _ in range(MOST_DRAINED))
            self._response.close()
            self._exchange.hold(None)  # an abort that comes now must not close the connection of another request
            if is_read and not self._response.will_close and not self._exchange.is_aborted:
                self._link.keep(self._connection)
                return
        self.close()

    def close(self) -> None:
        self._exchange.hold(None)
        self._response.close()
        self._connection.close()


class HttpLink:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._path = endpoint.path
        self._lock = threading.Lock()
        self._kept: list[tuple[int, http.client.HTTPConnection]] = []
        self._tls: ssl.SSLContext | None = None
        self._via = ""
        if endpoint.scheme == "https":
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])

    def send(self, request: OutgoingRequest, exchange: Exchange, within_s: float | None = None) -> HttpResponse:
        """Send a request and return its response, which may take as long as the server works. Raises NoAnswer."""
        redirects = 0
        while True:
            kept = self._take_kept()
            connection = kept or self._connect()
            exchange.has_sent.clear()
            exchange.hold(connection.sock)
            try:
                connection.sock.settimeout(within_s)
                self._write(request, connection, exchange)
                response = HttpResponse(self, exchange, connection)
            except _BROKEN as error:
                exchange.hold(None)
                connection.close()
                if exchange.has_sent.is_set():
                    raise NoAnswer("CONNECTION_LOST", ResponseFate.LOST, _explain_loss(error)) from None
                if kept is None or exchange.is_aborted:
                    raise self._unreachable(error) from None
                continue  # the server closed an idle connection, and cannot begin with a part of a request
            if response.status not in (301, 302, 303, 307, 308):
                return response
            response.finish()
            redirects += 1
            self._follow(response, is_last=redirects > MOST_REDIRECTS)

    def _write(self, request: OutgoingRequest, connection: http.client.HTTPConnection, exchange: Exchange) -> None:
        body = request.body
        connection.putrequest(request.verb, self._path)
        headers = {"User-Agent": f"shotclock/{__version__}", **dict(self.endpoint.headers), **request.headers}
        if body is not None:
            headers["Content-Length"] = str(body.size)
        for name, text in headers.items():
            connection.putheader(name, text.encode("latin-1", "replace"))
        try:
            connection.endheaders(None if body is None else body.text)
        except ConnectionError:
            if body is None or body.size <= READ_SIZE:
                raise
            return  # the server may have answered that the body is too large for it
        exchange.has_sent.set()
        # A server that delays small packets would otherwise wait 40 ms before it sends the body after the headers.
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _follow(self, response: HttpResponse, *, is_last: bool) -> None:
        """Use the address of a redirect from now on. Raises NoAnswer if our headers must not be sent there."""
        there = urljoin(self.endpoint.origin + self._path, response.header("location"))
        why = f"redirected (HTTP {response.status}) to"
        try:
            target = read_url(there)
        except ValueError:
            raise NoAnswer("HTTP_STATUS", ResponseFate.REFUSED, f"{why} no address") from None
        is_here = target.origin == self.endpoint.origin and not urlsplit(there).username
        if response.status not in (307, 308) or not is_here or is_last:
            why = f"{why} {target.shown}, which is not followed: use that address in --url"
            raise NoAnswer("HTTP_STATUS", ResponseFate.REFUSED, why)
        self._path = target.path

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self.endpoint.host, self.endpoint.port
        try:
            proxy = None if self._tls is None else _find_proxy(host, port)
            first = proxy or self.endpoint
            if self._tls is None:
                connection = http.client.HTTPConnection(host, port, timeout=CONNECT_LIMIT_S)
            else:
                connection = http.client.HTTPSConnection(
                    first.host, first.port, timeout=CONNECT_LIMIT_S, context=self._tls
                )
            if proxy is not None:
                self._via = f" through the proxy {proxy.origin}"
                connection.set_tunnel(host, port, {f"Proxy-{name}": text for name, text in proxy.headers})
            connection.connect()
        except _BROKEN as error:  # ValueError: a host name that cannot be encoded
            raise self._unreachable(error) from None
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, number in _KEEP_ALIVE.items():
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, number)
        return connection

    def _unreachable(self, error: Exception) -> NoAnswer:
        why = f"could not be reached at {self.endpoint.shown}{self._via}: {_explain_unreachable(error)}"
        return NoAnswer("CONNECT_FAILED", ResponseFate.NOT_SENT, why)

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for the next request."""
        with self._lock:
            self._kept.append((monotonic_ns(), connection))
            dropped = self._kept.pop(0)[1] if len(self._kept) > MOST_KEPT else None
        if dropped is not None:
            dropped.close()

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


def _find_proxy(host: str, port: int) -> Endpoint | None:
    """Return the proxy that HTTPS_PROXY names, unless NO_PROXY names the host. Raises ValueError."""
    proxies = getproxies()
    text = proxies.get("https") or proxies.get("all")
    if not text or proxy_bypass(f"{host}:{port}"):
        return None
    text = text if "://" in text else f"http://{text}"
    if not text.startswith("http://"):
        raise ValueError("HTTPS_PROXY should begin with http://")
    return read_url(text)


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


def _explain_loss(error: Exception) -> str:
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
        return f"the name cannot be resolved: {error.strerror}"
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_LIMIT_S:g}s"
    strerror = getattr(error, "strerror", None)
    return strerror.lower() if strerror else str(error)
