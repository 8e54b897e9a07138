"""Memory of a conversation: the messages that a new server process needs to take the place of the old one.

Clients of the older revisions greet once, so the greeting is repeated under an id of ours. Those of 2026-07-28 carry
it in every request, so only open subscriptions are repeated.
"""

from __future__ import annotations

import os

from ..core.value_types import value
from ._messages import DISCOVER, REVISION_KEY, JsonObject, RpcMessage, envelope_of_protocol, read_line, request_line
from ._requests import ClientRequest

OWN_PREFIX = "shotclock-"
_KINDS_OF_LISTS = ("tools", "prompts", "resources")


@value
class Greeting:
    """The answer of a server to `initialize`, as far as a client relies on it."""

    revision: object = None
    capabilities: object = None

    @classmethod
    def of(cls, result: object) -> Greeting:
        if not isinstance(result, dict):  # too long to be read
            return cls()
        return cls(result.get("protocolVersion"), result.get("capabilities"))

    @property
    def announced_lists(self) -> list[str]:
        """Return the kinds of lists whose changes the server announces."""
        found = []
        for kind in _KINDS_OF_LISTS:
            declared = self.capabilities.get(kind) if isinstance(self.capabilities, dict) else None
            if isinstance(declared, dict) and declared.get("listChanged"):
                found.append(kind)
        return found


class ReplayMemory:
    """The part of a conversation that outlives a server process."""

    def __init__(self) -> None:
        self.greeting: Greeting | None = None
        self.envelope: JsonObject = {}
        self._initialize = b""
        self._initialized = b""
        self._level = b""
        self._subscriptions: dict[str, bytes] = {}
        self._count = 0
        self._own_suffix = f"-{os.urandom(4).hex()}"  # the client may be another wrap, with such ids of its own

    @property
    def is_modern(self) -> bool:
        """Return whether the client speaks 2026-07-28."""
        return bool(self.envelope) and self.greeting is None

    @property
    def can_probe(self) -> bool:
        return self.greeting is not None or bool(self.envelope)

    @property
    def is_greeted(self) -> bool:
        """Return whether the client has finished its greeting, so that requests of ours may follow."""
        return bool(self._initialized if self.greeting is not None else self.envelope)

    def own_id(self, purpose: str) -> str:
        self._count += 1
        return f"{OWN_PREFIX}{purpose}-{self._count}{self._own_suffix}"

    def is_own(self, id: object) -> bool:
        return isinstance(id, str) and id.startswith(OWN_PREFIX) and id.endswith(self._own_suffix)

    def record_client_message(self, message: RpcMessage) -> None:
        if message.method == "notifications/initialized":
            self._initialized = message.line
        elif not self.envelope and REVISION_KEY in message.meta and message.method != DISCOVER:
            self.envelope = envelope_of_protocol(message.meta)

    def record_result(self, request: ClientRequest, result: object) -> None:
        """Remember a request that the server has granted, if a new process has to get it, too."""
        match request.method:
            case "initialize" if request.line:
                self._initialize, self.greeting = request.line, Greeting.of(result)
            case "logging/setLevel":
                self._level = request.line
            case "resources/subscribe" | "resources/unsubscribe" if request.line:
                message = read_line(request.line)
                uri = "" if message is None else str(message.params.get("uri"))
                self._subscriptions.pop(uri, None)
                if request.method == "resources/subscribe":
                    self._subscriptions[uri] = request.line

    @property
    def initialize_line(self) -> bytes:
        return self._initialize

    def greeting_line(self, own_id: str) -> bytes:
        return _under(own_id, self._initialize)

    def lines_after_greeting(self) -> list[tuple[str, bytes]]:
        """Return the further lines to replay, with the ids of their answers; a notification has none."""
        lines = [("", self._initialized)] if self._initialized else []
        for line in (self._level, *self._subscriptions.values()):
            if line:
                own_id = self.own_id("replay")
                lines.append((own_id, _under(own_id, line)))
        return lines

    def probe_line(self, own_id: str) -> bytes:
        """Return a request that a server answers at once: a ping, or discovery, because 2026-07-28 has no ping."""
        if self.greeting is not None:
            return request_line(own_id, "ping")
        return self.discovery_line(own_id)

    def discovery_line(self, own_id: str) -> bytes:
        return request_line(own_id, DISCOVER, {"_meta": self.envelope})


def _under(own_id: str, line: bytes) -> bytes:
    message = read_line(line)
    return b"" if message is None else message.with_id(own_id)
