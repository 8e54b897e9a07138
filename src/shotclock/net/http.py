"""Requests and responses of `http_client` steps, and their transport, with killable name lookups.

Both received and unpacked bytes are counted: a megabyte of gzip can be a gigabyte of zeros, and bytes after the end of
a gzip stream unpack to nothing.

httpx2 looks names up in threads that cannot be stopped, and leaves a socket to the garbage collector when its TLS
handshake is cancelled. Its network backend decides both.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import ipaddress
import json
import os
import re
import secrets
import socket
import ssl
import stat
import typing
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

import httpcore2
import httpx2

from ..core.catalogue import HandlerReference, Operation
from ..core.errors import Failure
from ..core.json_values import write_json
from ..core.limits import Clocks
from ..core.value_types import value
from ..core.visible_text import hide_credentials, hide_values
from ..supervise.command_task import make_private_directory, prune_spills, spill_path

if TYPE_CHECKING:
    from ..calls.runtime import Runtime

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
# RFC 9110 §9.2.2.
IDEMPOTENT_METHODS = {*SAFE_METHODS, "PUT", "DELETE"}
METHODS = {*IDEMPOTENT_METHODS, "POST", "PATCH", "TRACE"}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# Shorter values would be found in every other word.
SHORTEST_SECRET = 4
DEFAULT_BODY_BYTES = 10_000_000


class InvalidRequest(Exception):
    """A request that cannot be sent as it is written. Nothing was sent."""


@value
class HttpRequest:
    method: str
    url: str
    params: dict[str, Any]
    headers: list[tuple[bytes, bytes]]
    content: bytes | None
    max_body_bytes: int
    output_file: str | None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> HttpRequest:
        """Read the settings of a step. Raises InvalidRequest with a message that shows no values."""
        try:
            return cls._of(settings)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            # Templates may produce half characters, NaN, or a list where a number belongs.
            raise InvalidRequest(f"it has a value that cannot be sent ({type(error).__name__})") from None

    @classmethod
    def _of(cls, settings: Mapping[str, Any]) -> HttpRequest:
        method = str(settings.get("method") or "GET").upper()
        if not _TOKEN.fullmatch(method) or method == "CONNECT":
            raise InvalidRequest(f"method: {method[:20]!r} cannot be sent")
        url = _check_url(settings["url"])
        headers = _read_headers(settings.get("headers") or {})
        content = None
        if (body := settings.get("body")) is not None:
            content = _text(body).encode()
            if not isinstance(body, str) and not any(name.lower() == b"content-type" for name, _ in headers):
                headers.append((b"Content-Type", b"application/json"))
        params = settings.get("params") or {}
        file = settings.get("output_file")
        if file is not None and (not _text(file) or "\0" in _text(file)):
            raise InvalidRequest("output_file: it is empty, or has a NUL character in it")
        return cls(
            method,
            url,
            {name: value if isinstance(value, list) else _text(value) for name, value in params.items()},
            headers,
            content,
            int(settings.get("max_body_bytes") or DEFAULT_BODY_BYTES),
            None if file is None else _text(file),
        )

    @property
    def mutates(self) -> bool:
        return self.method not in SAFE_METHODS

    @property
    def is_idempotent(self) -> bool:
        return self.method in IDEMPOTENT_METHODS

    def without_secrets(self, text: str) -> str:
        """Return the text without any value of a header, and without credentials in addresses."""
        values = [value.decode("utf-8", "replace") for _, value in self.headers]
        secrets = (part for value in values for part in (value, *value.split()))
        return hide_credentials(hide_values(text, secrets, SHORTEST_SECRET))


def find_written_flaws(settings: Mapping[str, Any], is_template: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a step without templates that cannot be sent, and why."""
    headers = settings.get("headers") or {}
    literal = {name: value for name, value in headers.items() if not is_template(f"{name}{value}")}
    for key, value in (("url", settings["url"]), ("method", settings.get("method")), ("headers", literal)):
        if value is None or (isinstance(value, str) and is_template(value)):
            continue
        try:
            HttpRequest.of({"url": "http://localhost", key: value})
        except InvalidRequest as error:
            yield key, str(error).removeprefix(f"{key}: ")


def show_url(url: httpx2.URL) -> str:
    """Return an address without its credentials and query, which may be secret."""
    return str(url.copy_with(username=None, password=None, query=None, fragment=None))


def unfetchable(url: httpx2.URL) -> str | None:
    """Return why an address cannot be fetched, or None."""
    if url.scheme not in ("http", "https"):
        kind = f"{url.scheme}:" if url.scheme else "an address without http:// or https://"
        return f"{kind} cannot be fetched; only http and https can"
    if not url.host:
        return "it names no host"
    if url.port is not None and not 0 < url.port < 65_536:
        return f"there is no port {url.port}"
    return None


def _check_url(written: Any) -> str:
    text = _text(written).strip()
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise InvalidRequest(f"url: {hide_credentials(str(error))}") from None
    if (why := unfetchable(url)) is not None:
        raise InvalidRequest(f"url: {why}")
    return text


def _read_headers(written: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    headers = []
    for name, value in written.items():
        if not _TOKEN.fullmatch(name):
            raise InvalidRequest(f"headers: {name[:40]!r} cannot be the name of a header")
        text = _text(value).strip()
        if _FORBIDDEN.search(text):
            raise InvalidRequest(f"headers: the value of {name} has a line break or control character in it")
        headers.append((name.encode(), text.encode()))
    if {b"content-length", b"transfer-encoding"} <= {name.lower() for name, _ in headers}:
        # RFC 9112 §6.3: two servers on the way may disagree on where the body ends.
        raise InvalidRequest("headers: Content-Length and Transfer-Encoding cannot both be sent; leave both out")
    return headers


def _text(value: Any) -> str:
    """Return a text unchanged, and any other value as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else write_json(value)


# Bytes of a failed or incomplete response.
KEPT_OF_FAILURE = 65_536
# A longer Retry-After is cut to this.
LONGEST_RETRY_AFTER_MS = 24 * 3600 * 1000
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/javascript", "application/x-www-form")


class BodyTooLarge(Exception):
    def __init__(self, limit: int) -> None:
        super().__init__(f"the answer is larger than max_body_bytes, {limit}")
        self.limit = limit


class Unwritable(Exception):
    """An output file that cannot be written."""


class Response:
    """The response as far as it was received."""

    def __init__(self, request: HttpRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self.status: int = 0
        self.reason: str = ""
        self.headers: Mapping[str, str] = {}
        self._charset: str | None = None
        self._body = bytearray()
        self.size: int = 0
        self._received_bytes = 0
        self._is_whole = False
        self._file: BinaryIO | None = None
        self._saved: dict[str, object] | None = None

    def begin(self, response: httpx2.Response) -> None:
        self.status, self.reason = response.status_code, response.reason_phrase
        self.headers, self._charset = response.headers, response.charset_encoding
        length = response.headers.get("content-length", "")
        too_long = length.isdecimal() and len(length) < 20 and int(length) > self._request.max_body_bytes
        if too_long and not self._is_error and self._request.method != "HEAD":
            raise BodyTooLarge(self._request.max_body_bytes)

    @property
    def _is_error(self) -> bool:
        return self.status >= 400

    def count_bytes(self, part: bytes) -> None:
        self._received_bytes += len(part)
        if self._received_bytes > self._request.max_body_bytes and not self._is_error:
            raise BodyTooLarge(self._request.max_body_bytes)

    def add(self, chunk: bytes) -> bool:
        """Keep a part of the body; return False once no more is needed. Raises BodyTooLarge, OSError."""
        self.size += len(chunk)
        if self._is_error:
            self._body += chunk[: KEPT_OF_FAILURE - len(self._body)]
            return len(self._body) < KEPT_OF_FAILURE
        if self.size > self._request.max_body_bytes:
            raise BodyTooLarge(self._request.max_body_bytes)
        if self._file is None:
            self._body += chunk
        else:
            self._file.write(chunk)
        return True

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Hold the output file open while the body is received. It is replaced only by a complete body."""
        if self._request.output_file is None or self._is_error:
            yield
            return
        target = _target(self._folder / self._request.output_file)
        part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("xb") as self._file:
                yield
            os.replace(part, target)
            self._saved = {"path": str(target), "bytes": self.size}
        except OSError as error:
            raise Unwritable(f"output_file: {target}: {error.strerror}") from None
        finally:
            self._file = None
            with contextlib.suppress(OSError):
                part.unlink()

    def finish(self, request_id: str) -> None:
        """Mark the response as complete. A body that is not text is saved to a file."""
        self._is_whole = True
        if self._saved is None and not self._is_error and self._text is None:
            path = spill_path(f"{request_id}.body")
            try:
                make_private_directory(os.path.dirname(path))
                prune_spills()
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(self._body)
            except OSError as error:
                raise Unwritable(f"the answer is not text, and {path} cannot be written: {error.strerror}") from None
            self._saved = {"path": path, "bytes": self.size}

    @property
    def output(self) -> Any:
        """Return the path of the saved body, or its text."""
        if self._saved is not None:
            return {**self._saved, "status": self.status, "content_type": self.headers.get("content-type", "")}
        if not self.status or (self._request.output_file is not None and not self._is_error):
            return None
        if self._is_whole and self._text is not None:
            return self._text
        return self._body[:KEPT_OF_FAILURE].decode("utf-8", "replace")

    @property
    def is_cut_off(self) -> bool:
        """Return whether a JSON body ends in the middle."""
        kind = self.headers.get("content-type", "").lower().partition(";")[0].strip()
        text = (self._text or "").rstrip()
        if not text or not (kind == "application/json" or kind.endswith("+json")):
            return False
        try:
            json.loads(text, parse_int=str, parse_float=str)
        except json.JSONDecodeError as error:
            return error.pos >= len(text) or error.msg.startswith("Unterminated string")
        except RecursionError:  # passed on as text
            pass
        return False

    def data(self) -> dict[str, object] | None:
        if not self.status:
            return None
        # A cookie is a credential.
        headers = {name: value for name, value in self.headers.items() if name.lower() != "set-cookie"}
        data: dict[str, object] = {"status": self.status, "headers": headers, "bytes": self.size}
        if not self._is_whole:
            data["partial"] = True
        if self._saved is not None:
            return {**data, "path": self._saved["path"]}
        return {**data, "body": self.output}

    @functools.cached_property
    def _text(self) -> str | None:
        """Return the whole body; None if it is not text."""
        kind = self.headers.get("content-type", "").lower()
        with contextlib.suppress(UnicodeDecodeError, LookupError, ValueError):
            return self._body.decode(self._charset or "utf-8-sig")
        if self._charset is not None or kind.startswith(_TEXT_TYPES) or kind.partition(";")[0].endswith("+json"):
            return self._body.decode("utf-8", "replace")
        return None


def _target(path: Path) -> Path:
    """Return the target of a link. Raises Unwritable unless it is a file: /dev/null must not be replaced."""
    target = Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(target.stat().st_mode):
            raise Unwritable(f"output_file: {target} exists and is not a file")
    return target


def retry_after_ms(headers: Mapping[str, str], now_s: float) -> int | None:
    """Return the milliseconds of a Retry-After header, in seconds or as a date."""
    written = headers.get("retry-after", "").strip()
    if written.isascii() and written.isdecimal():
        return min(int(written[:12]) * 1000, LONGEST_RETRY_AFTER_MS)
    try:
        at = email.utils.parsedate_to_datetime(written)
    except (ValueError, OverflowError):
        return None
    return min(max(0, int((at.timestamp() - now_s) * 1000)), LONGEST_RETRY_AFTER_MS)


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
MOST_CAUSES = 10
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


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors behind it, which may form a circle."""
    cause: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


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
