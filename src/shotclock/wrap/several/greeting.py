"""The greeting of a client before several servers: one answer made of theirs.

`initialize` and `server/discover` go to every server. The client is answered when all have answered, or after a limit;
a later server is announced by `list_changed`. A server of both generations is fixed by its first message, so after a
discovery that some server refused, those that accepted it are started again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..._version import __version__
from ...core.clocks import NS_PER_MS
from ...core.envelope import ENVELOPE_KEY
from ...process.clock import monotonic_ns
from ..failures import CONNECTION_CLOSED
from ..links import ClientLink, Note
from ..messages import JsonObject, RpcMessage, encode, error_of
from ..requests import NEVER_NS
from .lists import is_plain
from .server import MergedPhase, MergedServer

# A client waits this long for slow servers, as for a download by npx.
GREETING_WAIT_MS = 20_000
_SERVER_INFO: JsonObject = {"name": "shotclock wrap", "version": __version__}
_SERVER_INFO_KEY = "io.modelcontextprotocol/serverInfo"
_OLDEST_REVISION, _REVISION = "2024-11-05", re.compile(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}")
_KINDS = ("tools", "prompts", "resources")
_METHOD_NOT_FOUND, _INVALID_REQUEST = -32601, -32600

Announce = Callable[[Sequence[str]], None]


class MergedGreeting:
    """The generation of the protocol that the client speaks, and the servers that are ready for it."""

    def __init__(self, servers: Sequence[MergedServer], client: ClientLink, note: Note, announce: Announce) -> None:
        self.is_modern: bool = False
        self._servers = servers
        self._client = client
        self._note = note
        self._announce = announce
        self._client_id: object = None  # of the greeting that waits for an answer
        self._due_ns = NEVER_NS
        self._waiting: set[MergedServer] = set()
        self._discovery: JsonObject | None = None  # None again once the client cannot discover
        self._is_refused = False  # by a server that does not know discovery
        self._discovered: JsonObject = {}
        self._initialize: JsonObject | None = None
        self._is_answered = False
        # For servers that come later.
        self._initialized = b""
        self._level: JsonObject | None = None
        self._subscriptions: dict[str, tuple[MergedServer, JsonObject]] = {}

    @property
    def is_pending(self) -> bool:
        """Return whether the client waits for the answer to a greeting."""
        return self._client_id is not None

    # --- from the client -----------------------------------------------------------------------------------------

    def take_discover(self, message: RpcMessage) -> None:
        if self._discovered:  # a probe; the servers have probes of their own
            self._client.write_line(encode({"jsonrpc": "2.0", "id": message.id, "result": self._discovered}))
        elif self.is_pending or self._initialize is not None:
            self._refuse(message.id, _METHOD_NOT_FOUND, "the client has sent a greeting before")
        else:
            self._discovery, self._is_refused = message.params, False
            self._begin(message, set(self._servers))
            for server in self._servers:
                if server.is_running:
                    self._discover(server)

    def take_initialize(self, message: RpcMessage) -> None:
        if self._initialize is not None or self.is_modern:
            self._refuse(message.id, _INVALID_REQUEST, "the client has sent a greeting before")
            return
        late = {each for each in self._servers if each.phase is MergedPhase.DISCOVERING and not self.is_pending}
        self._discovery, self._initialize = None, message.params
        self._begin(message, set(self._servers) - late)
        for server in self._servers:
            if server.greeting:
                self._leave_discovery(server)
            elif server.phase in (MergedPhase.UP, MergedPhase.DISCOVERING):  # some never answer what they do not know
                self._greet(server)

    def _begin(self, message: RpcMessage, servers: set[MergedServer]) -> None:
        self._client_id, self._due_ns = message.id, monotonic_ns() + GREETING_WAIT_MS * NS_PER_MS
        self._waiting = {each for each in servers if each.exit_code is None}
        self._finish_if_complete()

    def take_envelope(self) -> None:
        """Note a request with the envelope of 2026-07-28, from a client that does not negotiate."""
        if not self.is_modern and self._initialize is None:
            self._become_modern()

    def _become_modern(self) -> None:
        self.is_modern = True
        for server in self._servers:
            if server.is_running:
                server.phase = MergedPhase.READY

    def take_initialized(self, line: bytes) -> None:
        self._initialized = line
        for server in self._servers:
            if server.is_ready:
                server.send(line)

    def keep_level(self, params: JsonObject) -> None:
        self._level = params

    def keep_subscription(self, server: MergedServer, message: RpcMessage) -> None:
        uri = str(message.params.get("uri"))
        self._subscriptions.pop(uri, None)
        if message.method == "resources/subscribe":
            self._subscriptions[uri] = server, message.params

    # --- to and from a server ------------------------------------------------------------------------------------

    def note_started(self, server: MergedServer) -> None:
        if self.is_modern:
            server.phase = MergedPhase.READY
            self._announce(_KINDS)
        elif self._initialize is not None:
            self._greet(server)
        elif self._discovery is not None:
            self._discover(server)

    def note_ended(self, server: MergedServer) -> None:
        if server.exit_code is not None:
            self._note(f"shotclock: the server {server.name} {server.why}")
            self._settle(server)

    def _discover(self, server: MergedServer) -> None:
        if not self.is_modern:
            server.phase = MergedPhase.DISCOVERING
        server.ask("server/discover", self._discovery or {}, lambda answer: self._take_discovery(server, answer))

    def _take_discovery(self, server: MergedServer, answer: RpcMessage | None) -> None:
        if answer is None or _is_unstartable(answer):  # the end of its wrap decides
            return
        if self._initialize is not None:  # which the server has got meanwhile
            return
        if server.phase is MergedPhase.DISCOVERING:
            server.phase = MergedPhase.UP
        is_accepted = self._keep_answer(server, answer)
        if self._discovery is None:  # the client has been told to initialize
            if is_accepted:
                self._leave_discovery(server)
            return
        if not is_accepted and _failure_of_wrap(answer):
            self._explain(server, answer)
        elif not is_accepted:
            self._is_refused = True
        self._settle(server)

    def _leave_discovery(self, server: MergedServer) -> None:
        server.greeting, server.capabilities = {}, None
        server.restart("is being started again")

    def _greet(self, server: MergedServer) -> None:
        server.phase = MergedPhase.GREETING
        server.ask("initialize", self._initialize or {}, lambda answer: self._take_greeting(server, answer))

    def _take_greeting(self, server: MergedServer, answer: RpcMessage | None) -> None:
        if answer is None or _is_unstartable(answer):
            return
        if self._keep_answer(server, answer):
            server.phase, server.why = MergedPhase.READY, ""
            self._repeat_state(server)
            if self._is_answered:
                self._note(f"shotclock: the server {server.name} is ready")
                self._announce([kind for kind in _KINDS if server.has(kind)])
        else:
            self._explain(server, answer)
            server.restart(server.why)  # later each time
        self._settle(server)

    def _explain(self, server: MergedServer, answer: RpcMessage) -> None:
        text = str((_failure_of_wrap(answer) or error_of(answer)).get("message", "it cannot be read"))
        server.why = f"did not accept the greeting: {text.partition(chr(10))[0][:300]}"
        self._note(f"shotclock: the server {server.name} {server.why}")

    def _keep_answer(self, server: MergedServer, answer: RpcMessage) -> bool:
        """Keep the answer to a greeting. Return whether it is one."""
        if not isinstance(answer.result, dict) or not is_plain(answer.result):
            return False
        version = answer.result.get("protocolVersion", _OLDEST_REVISION)
        if not isinstance(version, str) or not _REVISION.fullmatch(version) or version < _OLDEST_REVISION:
            return False  # the client would leave, because of the oldest revision of all
        server.greeting = answer.result
        capabilities = answer.result.get("capabilities")
        found = capabilities if isinstance(capabilities, dict) else {}
        server.capabilities = {key: item for key, item in found.items() if isinstance(item, dict)}
        return True

    def _repeat_state(self, server: MergedServer) -> None:
        """Repeat the messages of the client that followed its greeting."""
        if self._initialized:
            server.send(self._initialized)
        if self._level is not None and server.has("logging"):
            server.ask("logging/setLevel", self._level, _drop)
        for owner, params in self._subscriptions.values():
            if owner is server:
                server.ask("resources/subscribe", params, _drop)

    # --- the answer to the client --------------------------------------------------------------------------------

    def _settle(self, server: MergedServer) -> None:
        self._waiting.discard(server)
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self._client_id is not None and not self._waiting:
            self._finish()

    def _finish(self) -> None:
        id, self._client_id, self._due_ns = self._client_id, None, NEVER_NS
        if self._initialize is not None:
            self._answer_initialize(id)
        else:
            self._answer_discover(id)

    def _answer_discover(self, id: object) -> None:
        accepted = [each for each in self._servers if each.greeting]
        versions = _common([each.greeting.get("supportedVersions") for each in accepted])
        if versions and not self._is_refused and not self._waiting:
            if not self.is_modern:
                self._become_modern()
            self._discovered = {
                "resultType": "complete",
                "supportedVersions": versions,
                **self._merged(accepted),
                **merged_caching([each.greeting for each in accepted]),
                "_meta": {_SERVER_INFO_KEY: _SERVER_INFO},
            }
            self._client.write_line(encode({"jsonrpc": "2.0", "id": id, "result": self._discovered}))
            return
        self._discovery = None
        for server in accepted:
            self._leave_discovery(server)
        self._refuse(id, _METHOD_NOT_FOUND, "not every server knows server/discover; use initialize")

    def _answer_initialize(self, id: object) -> None:
        ready = [each for each in self._servers if each.is_ready]
        if not ready and not self._waiting and all(each.phase is MergedPhase.DOWN for each in self._servers):
            reasons = "; ".join(f"{each.name} {each.why}" for each in self._servers)
            self._initialize = None
            self._refuse(id, CONNECTION_CLOSED, f"no server is available: {reasons}")
            return
        self._is_answered = True
        versions = [version for each in ready if isinstance(version := each.greeting.get("protocolVersion"), str)]
        wanted = (self._initialize or {}).get("protocolVersion")
        result = {
            "protocolVersion": min(versions, default=wanted),
            **self._merged(ready),
            "serverInfo": _SERVER_INFO,
        }
        self._client.write_line(encode({"jsonrpc": "2.0", "id": id, "result": result}))

    def _merged(self, servers: Sequence[MergedServer]) -> JsonObject:
        """Return the capabilities and instructions of the servers together."""
        capabilities: JsonObject = {}
        for server in servers:
            _add(capabilities, server.capabilities or {})
        if any(each not in servers and each.exit_code is None for each in self._servers):
            for kind in _KINDS:  # which a server may have that comes later
                capabilities.setdefault(kind, {})
        for kind in _KINDS:
            if isinstance(declared := capabilities.get(kind), dict):
                declared["listChanged"] = True  # lists change with the servers that are there
        if isinstance(resources := capabilities.get("resources"), dict) and "subscribe" in resources:
            resources["subscribe"] = resources["subscribe"] is True
        if isinstance(tasks := capabilities.get("tasks"), dict):
            tasks.pop("list", None)
        parts = []
        for server in self._servers:
            text = server.greeting.get("instructions")
            if server not in servers:
                parts.append(f"## {server.name}\n\nThis server is not available now: it {server.why}.")
                self._note(f"shotclock: the server {server.name} is left out for now: it {server.why}")
            elif isinstance(text, str) and text.strip():
                parts.append(f"## {server.name}\n\n{text.strip()}")
        return {"capabilities": capabilities, **({"instructions": "\n\n".join(parts)} if parts else {})}

    def _refuse(self, id: object, code: int, text: str) -> None:
        error = {"code": code, "message": f"shotclock: {text}"}
        self._client.write_line(encode({"jsonrpc": "2.0", "id": id, "error": error}))

    # --- time ----------------------------------------------------------------------------------------------------

    @property
    def next_due_ns(self) -> int:
        return self._due_ns

    def check(self, now_ns: int) -> None:
        if now_ns >= self._due_ns:
            self._finish()


def merged_caching(results: Sequence[JsonObject]) -> JsonObject:
    """Return how long a client may keep the merged result: as long as the most careful of the servers says."""
    times = [found if isinstance(found := each.get("ttlMs"), int) else 0 for each in results]
    is_public = bool(results) and all(each.get("cacheScope") == "public" for each in results)
    return {"ttlMs": min(times, default=0), "cacheScope": "public" if is_public else "private"}


def _drop(answer: RpcMessage | None) -> None:
    """Drop the answer to a request that is repeated."""


def _add(whole: JsonObject, part: JsonObject) -> None:
    """Add the capabilities of a server."""
    for key, item in part.items():
        have = whole.get(key)
        if isinstance(have, dict) and isinstance(item, dict):
            _add(have, item)
        elif isinstance(item, dict):
            copy: JsonObject = {}
            _add(copy, item)
            whole[key] = copy
        elif have is None or (have is False and item is True):
            whole[key] = item


def _common(lists: Sequence[object]) -> list[str]:
    """Return the revisions that are in every list."""
    first, *others = [each if isinstance(each, list) else [] for each in lists] or [[]]
    return [version for version in first if all(version in other for other in others)]


def _failure_of_wrap(answer: RpcMessage) -> JsonObject:
    """Return the error that the wrap reports in place of its server; an empty one if the server itself has refused."""
    data = error_of(answer).get("data")
    envelope = data.get(ENVELOPE_KEY) if isinstance(data, dict) else None
    error = envelope.get("error") if isinstance(envelope, dict) else None
    return error if isinstance(error, dict) else {}


def _is_unstartable(answer: RpcMessage) -> bool:
    """Return whether the wrap is about to end, because its server cannot be started."""
    return _failure_of_wrap(answer).get("code") == "CONNECT_FAILED"
