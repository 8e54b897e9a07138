"""Requests and responses of `http_client` steps.

Both received and unpacked bytes are counted: a megabyte of gzip can be a gigabyte of zeros, and bytes after the end of
a gzip stream unpack to nothing.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import httpx2

from ...core.json_values import write_json
from ...core.value_types import JsonObject, value
from ...core.visible_text import hide_credentials, hide_values
from ...supervise.command_task import make_private_directory, prune_spills, spill_path

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
# RFC 9110 §9.2.2.
IDEMPOTENT_METHODS = {*SAFE_METHODS, "PUT", "DELETE"}
METHODS = {*IDEMPOTENT_METHODS, "POST", "PATCH", "TRACE"}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# Shorter values would be found in every other word.
SHORTEST_SECRET = 4
DEFAULT_BODY_BYTES = 10_000_000
MOST_CAUSES = 10


class InvalidRequest(Exception):
    """A request that cannot be sent as it is written. Nothing was sent."""


@value
class HttpRequest:
    method: str
    url: str
    params: JsonObject
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


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors behind it, which may form a circle."""
    cause: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__
