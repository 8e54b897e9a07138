"""The two ends of the adapter of a server over HTTP: the address that it gets, and the reports that it gives.

Headers and the query of the address may be secret: they reach the adapter in its environment, and no message has them.
Reports are lines between the messages of the server, which always begin with a brace.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from enum import StrEnum
from urllib.parse import unquote, urlsplit

from ...core.value_types import value

VARIABLE = "SHOTCLOCK_WRAP_ENDPOINT"
SHORTEST_SECRET = 6  # a shorter header value is left in excerpts of answers: "true" is no secret
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
# Set by the adapter for each request.
_OWN_HEADERS = ("accept", "connection", "content-length", "content-type", "host", "last-event-id", "transfer-encoding")
_REPORT = b"\x1eshotclock "
_DEFAULT_PORTS = {"http": 80, "https": 443}


@value
class Endpoint:
    scheme: str
    host: str
    port: int
    path: str  # with the query
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def origin(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    @property
    def shown(self) -> str:
        """Return the address for messages, without its query, which may be secret."""
        return self.origin + self.path.partition("?")[0]

    @property
    def identity(self) -> str:
        """Return a text that differs for each address, and has nothing secret."""
        query = self.path.partition("?")[2]
        return f"{self.shown}?sha256={hashlib.sha256(query.encode()).hexdigest()}" if query else self.shown

    def to_environment(self) -> dict[str, str]:
        fields = [self.scheme, self.host, self.port, self.path, self.headers]
        return {VARIABLE: json.dumps(fields)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Endpoint:
        scheme, host, port, path, headers = json.loads(environment[VARIABLE])
        return cls(scheme, host, port, path, tuple((name, text) for name, text in headers))

    def without_secrets(self, text: str) -> str:
        """Return a text of the server without our query and the values of our headers, which it may repeat."""
        secrets = [self.path.partition("?")[2]]
        for _, content in self.headers:
            secrets += [content, content.partition(" ")[2]]
        for secret in secrets:
            if len(secret) >= SHORTEST_SECRET:
                text = text.replace(secret, "…")
        return text


def read_url(text: str) -> Endpoint:
    """Read an address. Raises ValueError."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # whose text may repeat a part of a password
        raise ValueError("it is no valid URL") from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError("it has to begin with http:// or https://")
    if not parts.hostname:
        raise ValueError("it has no host")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or not path.isprintable() or " " in path:
        raise ValueError("its path has characters that must be written as %XX")
    headers: tuple[tuple[str, str], ...] = ()
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = (("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}"),)
    return Endpoint(parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme], path, headers)


def read_header(text: str) -> tuple[str, str]:
    """Read `NAME: VALUE`. Raises ValueError, without the value, which may be secret."""
    name, colon, content = text.partition(":")
    name, content = name.strip(), content.strip()
    if not colon or not _NAME.fullmatch(name):
        raise ValueError("should be 'NAME: VALUE', as in 'Authorization: Bearer ${TOKEN}'")
    if name.lower() in _OWN_HEADERS or name.lower().startswith("mcp-"):
        raise ValueError(f"{name} is set for each request and cannot be chosen")
    if not _VALUE.fullmatch(content):
        raise ValueError(f"the value of {name} has characters that a header cannot have")
    return name, content


class ResponseFate(StrEnum):
    """The fate of a request that was not answered."""

    NOT_SENT = "was not sent"
    REFUSED = "was refused"
    LOST = "was lost"
    FAILED = "failed"


@value
class AdapterReport:
    """A request without an answer. Without an id: the session is lost, and the adapter ends."""

    id: object
    code: str
    fate: ResponseFate
    why: str  # the end of a sentence that begins with the server
    line: str = ""  # a request that may be sent in the next session

    def to_line(self) -> bytes:
        fields = [self.id, self.code, self.fate, self.why, self.line]
        return _REPORT + json.dumps(fields).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> AdapterReport | None:
        """Return the report of a line; None if it is a message."""
        if not line.startswith(_REPORT):
            return None
        id, code, fate, why, text = json.loads(line[len(_REPORT) :])
        return cls(id, code, ResponseFate(fate), why, text)
