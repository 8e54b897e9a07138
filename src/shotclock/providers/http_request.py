"""What an `http_client` step asks for, checked before anything is sent, and what of it must never be shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.records import dataclass
from ..core.redaction import hide_credentials, hide_values
from ..core.values import write_json

if TYPE_CHECKING:
    import httpx2

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
# RFC 9110 §9.2.2: done twice is done once.
IDEMPOTENT_METHODS = {*SAFE_METHODS, "PUT", "DELETE"}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# Shorter values would be found in every other word.
SHORTEST_SECRET = 4


class InvalidRequest(Exception):
    """The step cannot be sent as it is written. Nothing was."""


@dataclass(frozen=True)
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
        """Raises InvalidRequest, whose message names what is wrong and shows no value that may be secret."""
        try:
            return cls._of(settings)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            # Half a character, NaN, a list where a number belongs: templates may put anything anywhere.
            raise InvalidRequest(f"it has a value that cannot be sent ({type(error).__name__})") from None

    @classmethod
    def _of(cls, settings: Mapping[str, Any]) -> HttpRequest:
        method = str(settings.get("method") or "GET").upper()
        if not _TOKEN.fullmatch(method) or method == "CONNECT":
            raise InvalidRequest(f"method: {method[:20]!r} cannot be sent")
        url = _checked_url(settings["url"])
        headers = _headers(settings.get("headers") or {})
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
            int(settings.get("max_body_bytes") or 10_000_000),
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


def shown(url: httpx2.URL) -> str:
    """Without what is likely to be a secret in it: credentials and the query."""
    return str(url.copy_with(username=None, password=None, query=None, fragment=None))


def unfetchable(url: httpx2.URL) -> str | None:
    """Why there is no use in trying."""
    if url.scheme not in ("http", "https"):
        kind = f"{url.scheme}:" if url.scheme else "an address without http:// or https://"
        return f"{kind} cannot be fetched; only http and https can"
    if not url.host:
        return "it names no host"
    if url.port is not None and not 0 < url.port < 65_536:
        return f"there is no port {url.port}"
    return None


def _checked_url(written: Any) -> str:
    import httpx2

    text = _text(written).strip()
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise InvalidRequest(f"url: {hide_credentials(str(error))}") from None
    if (why := unfetchable(url)) is not None:
        raise InvalidRequest(f"url: {why}")
    return text


def _headers(written: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
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
    """As it is written: JSON where it is more than text."""
    if isinstance(value, str):
        return value
    return "" if value is None else write_json(value)
