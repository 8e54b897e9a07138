"""The transport of HTTP requests, with killable name lookups.

httpx2 looks names up in threads that cannot be stopped, and leaves a socket to the garbage collector when its TLS
handshake is cancelled. Its network backend decides both.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import typing
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

import httpcore2
import httpx2

from ..core.catalogue import HandlerReference, Operation
from ..core.errors import Failure
from ..core.limits import Clocks

if TYPE_CHECKING:
    from ..calls.runtime import Runtime

# Each lookup occupies a worker.
LOOKUPS_AT_ONCE = 16

# Without a clock of its own: it ends with the deadline of its caller.
_RESOLVE = Operation(
    "resolve",
    HandlerReference(__name__, "resolve"),
    isolation="process",
    mutates=False,
    idempotent=True,
    clocks=Clocks(timeout_ms=0, grace_ms=0, reserve_ms=0),
)


class Names:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._places = asyncio.Semaphore(LOOKUPS_AT_ONCE)

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return at least one address, best first, within the current scope. Raises ConnectError, ConnectTimeout."""
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return [host]
        async with self._places:
            envelope = await self._runtime.call(_RESOLVE, {"host": host, "port": port})
        if not envelope.ok:
            late = envelope.code in ("TIMEOUT", "NO_TIME_LEFT")  # the caller's deadline passed first
            failed = httpcore2.ConnectTimeout if late else httpcore2.ConnectError
            raise failed(f"{host} was not found: {(envelope.error or {})['message']}")
        found: Any = envelope.value
        return list(found)


def resolve(host: str, port: int) -> list[str]:
    """Look up the addresses of a host. Runs in a worker. Raises Failure."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Failure("CONNECT_FAILED", error.strerror or str(error)) from None
    except UnicodeError:  # a label too long, or empty
        raise Failure("CONNECT_FAILED", "it cannot be the name of a host") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


# Before the next address of a host is tried beside a silent one (RFC 8305).
NEXT_ADDRESS_S = 0.25
# A name with more addresses is load-balanced, and any of them will do.
MOST_ADDRESSES = 8
# Parsed at once: a flood of tiny messages must not delay the timeout.
READ_BYTES = 16_384
# Bytes before a response begins: its headers, and any number of "100 Continue".
MOST_BYTES_BEFORE_ANSWER = 1_000_000


class CountedStream(httpcore2.AsyncNetworkStream):
    """A connection that reports received bytes to its backend."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, backend: Backend) -> None:
        self._stream = stream
        self._backend = backend

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        part = await self._stream.read(min(max_bytes, READ_BYTES), timeout)
        self._backend.count_bytes(len(part))
        return part

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> CountedStream:
        return CountedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._backend)

    def get_extra_info(self, info: str) -> typing.Any:
        return self._stream.get_extra_info(info)


class Backend(httpcore2.AsyncNetworkBackend):
    """A network backend that closes its connections at `aclose`."""

    def __init__(self, names: Names, on_sign: Callable[[], None]) -> None:
        self._names = names
        self._on_sign = on_sign
        self._tcp = httpcore2.AnyIOBackend()
        self._opened: list[httpcore2.AsyncNetworkStream] = []
        self._before_answer: int | None = None

    def expect(self, answer: bool) -> None:
        """Set whether a response head or a body is next."""
        self._before_answer = 0 if answer else None

    def count_bytes(self, size: int) -> None:
        self._on_sign()
        if self._before_answer is not None:
            self._before_answer += size
            if self._before_answer > MOST_BYTES_BEFORE_ANSWER:
                raise httpcore2.RemoteProtocolError(
                    f"the server sent {MOST_BYTES_BEFORE_ANSWER} bytes without an answer"
                )

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[typing.Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await self._names.addresses(host, port)
        return await self._first_of(addresses[:MOST_ADDRESSES], port)

    async def _first_of(self, addresses: list[str], port: int) -> httpcore2.AsyncNetworkStream:
        """Return the first connection. Each address has a head start over the next."""
        left = list(addresses)
        trying: set[asyncio.Task[httpcore2.AsyncNetworkStream]] = set()
        error: BaseException | None = None
        try:
            while left or trying:
                if left:
                    trying.add(asyncio.ensure_future(self._open(left.pop(0), port)))
                # The last ones have until the request's timeout, which cancels this.
                limit_s = NEXT_ADDRESS_S if left else None
                ended, trying = await asyncio.wait(trying, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                for attempt in ended:
                    if attempt.exception() is None:
                        return attempt.result()
                    error = error or attempt.exception()
        finally:
            for attempt in trying:
                attempt.cancel()
            await asyncio.gather(*trying, return_exceptions=True)
        assert error is not None
        raise error

    async def _open(self, address: str, port: int) -> httpcore2.AsyncNetworkStream:
        stream = await self._tcp.connect_tcp(address, port)
        self._opened.append(stream)
        return CountedStream(stream, self)

    async def aclose(self) -> None:
        while self._opened:
            with contextlib.suppress(Exception):
                await self._opened.pop().aclose()


class Transport(httpx2.AsyncBaseTransport):
    """The transport of one request and its redirects. `env` names the proxy, as for curl.

    `on_sign` is called for all received bytes, `on_body` with each part of a body before it is unpacked.
    """

    def __init__(
        self,
        names: Names,
        tls: Callable[[], ssl.SSLContext],
        env: Mapping[str, str],
        *,
        on_sign: Callable[[], None],
        on_body: Callable[[bytes], None],
    ) -> None:
        self._backend = Backend(names, on_sign)
        self._tls = tls
        self._env = env
        self._on_body = on_body
        self._pools: dict[tuple[str, str | None], httpcore2.AsyncConnectionPool] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        self._backend.expect(answer=True)
        response = await self._pool(url).handle_async_request(
            httpcore2.Request(
                method=request.method,
                url=httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                headers=request.headers.raw,
                content=request.stream,
                extensions=request.extensions,
            )
        )
        self._backend.expect(answer=False)
        assert isinstance(response.stream, typing.AsyncIterable)
        return httpx2.Response(
            response.status,
            headers=response.headers,
            stream=CountedBody(response.stream, self._on_body),
            extensions=response.extensions,
        )

    def _pool(self, url: httpx2.URL) -> httpcore2.AsyncConnectionPool:
        proxy = proxy_for(url, self._env)
        key = url.scheme, proxy
        if key not in self._pools:
            is_secure = url.scheme == "https"
            self._pools[key] = httpcore2.AsyncConnectionPool(
                ssl_context=self._tls() if is_secure else None,
                proxy=None if proxy is None else _proxy(proxy),
                network_backend=self._backend,
            )
        return self._pools[key]

    async def aclose(self) -> None:
        for pool in self._pools.values():
            with contextlib.suppress(Exception):
                await pool.aclose()
        await self._backend.aclose()


class CountedBody(httpx2.AsyncByteStream):
    """A body that calls `on_part` with each part, which may raise."""

    def __init__(self, stream: typing.AsyncIterable[bytes], on_part: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._on_part = on_part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._on_part(part)
            yield part

    async def aclose(self) -> None:
        if hasattr(self._stream, "aclose"):
            await self._stream.aclose()


def proxy_for(url: httpx2.URL, env: Mapping[str, str]) -> str | None:
    variables = {name.lower(): value for name, value in env.items() if value}
    proxy = variables.get(f"{url.scheme}_proxy") or variables.get("all_proxy")
    if proxy is None or proxy_bypass_environment(url.host, {"no": variables.get("no_proxy", "")}):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _proxy(written: str) -> httpcore2.Proxy:
    url = httpx2.URL(written)
    if url.scheme not in ("http", "https"):
        raise httpcore2.UnsupportedProtocol(f"a proxy of the kind {url.scheme} cannot be used")
    auth = (url.username, url.password) if url.username or url.password else None
    return httpcore2.Proxy(str(url.copy_with(username=None, password=None)), auth)
