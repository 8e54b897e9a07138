"""The lists of several servers: all pages of each, read for one request of the client."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ...core.clocks import NS_PER_MS
from ...core.json_values import DEPTH_LIMIT, is_deeper_than
from ...core.value_types import value
from ...process.clock import monotonic_ns
from ..links import Note
from ..messages import JsonObject, RpcMessage, error_of
from .server import MergedServer

# Each page has the list limit of its server; this one is for all pages of all servers together.
LIST_WAIT_MS = 90_000
# Of the pages of one server together.
MOST_LISTED = 4 * 1024 * 1024
# Errors of servers that do not have a list.
_NO_SUCH_METHOD = (-32601, -32602)


@value
class MergedKind:
    """A kind of list."""

    name: str  # the key of the list in a result
    method: str
    capability: str
    key: str  # of an object
    required: str = "name"
    required_type: type = str  # a client refuses the whole list for one object without it

    def accepts(self, each: object) -> bool:
        if not isinstance(each, dict):
            return False
        return isinstance(each.get(self.key), str) and isinstance(each.get(self.required), self.required_type)


TOOLS = MergedKind("tools", "tools/list", "tools", "name", "inputSchema", dict)
PROMPTS = MergedKind("prompts", "prompts/list", "prompts", "name")
RESOURCES = MergedKind("resources", "resources/list", "resources", "uri")
TEMPLATES = MergedKind("resourceTemplates", "resources/templates/list", "resources", "uriTemplate")
KINDS = {each.method: each for each in (TOOLS, PROMPTS, RESOURCES, TEMPLATES)}


class ListReading:
    """One reading of a list from every server. A server whose list fails is left out."""

    def __init__(
        self,
        kind: MergedKind,
        servers: Sequence[MergedServer],
        meta: JsonObject,
        note: Note,
        on_read: Callable[[ListReading], None],
    ) -> None:
        self.kind = kind
        self.objects: dict[MergedServer, list[JsonObject]] = {}
        self.results: list[JsonObject] = []  # the last page of each server
        self.due_ns: int = monotonic_ns() + LIST_WAIT_MS * NS_PER_MS
        self.is_over: bool = False
        self._meta = {"_meta": meta} if meta else {}
        self._note = note
        self._on_read = on_read
        self._waiting = {each for each in servers if each.is_ready and each.has(kind.capability)}

    def begin(self) -> None:
        for server in list(self._waiting):
            self._ask(server, [], 0, {})
        self._end_if_complete()

    def _ask(self, server: MergedServer, before: list[JsonObject], size: int, cursor: JsonObject) -> None:
        params = {**cursor, **self._meta}
        server.ask(self.kind.method, params, lambda answer: self._take(server, before, size, answer))

    def _take(self, server: MergedServer, before: list[JsonObject], size: int, answer: RpcMessage | None) -> None:
        if self.is_over or server not in self._waiting:
            return
        if answer is None or not isinstance(answer.result, dict):
            self._take_failure(server, answer)
            return
        result, size = answer.result, size + len(answer.line)
        if size > MOST_LISTED or not is_plain(result):
            self._leave_out(server, f"it has more than {MOST_LISTED} bytes or {DEPTH_LIMIT} levels, or numbers as NaN")
            return
        page, missing = result.get(self.kind.name), f"{self.kind.key} or {self.kind.required}"
        for each in page if isinstance(page, list) else ():
            if self.kind.accepts(each):
                before.append(each)
            else:
                self._note(f"shotclock: {self.kind.method} leaves out an object of {server.name} without {missing}")
        if (cursor := result.get("nextCursor")) is not None:
            self._ask(server, before, size, {"cursor": cursor})
            return
        self.results.append(result)
        self._finish(server, before)

    def _take_failure(self, server: MergedServer, answer: RpcMessage | None) -> None:
        error = {} if answer is None else error_of(answer)
        if error.get("code") in _NO_SUCH_METHOD and server.capabilities is None:
            self._finish(server, [])
        else:
            text = "its process ended" if answer is None else str(error.get("message", "it is too long"))
            self._leave_out(server, text.partition("\n")[0].removeprefix("shotclock: ")[:300])

    def _finish(self, server: MergedServer, objects: list[JsonObject]) -> None:
        self.objects[server] = objects
        self._waiting.discard(server)
        self._end_if_complete()

    def _leave_out(self, server: MergedServer, why: str) -> None:
        self._note(f"shotclock: {self.kind.method} leaves out the server {server.name}: {why}")
        self._waiting.discard(server)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if not self._waiting and not self.is_over:
            self.is_over = True
            self._on_read(self)

    def check(self, now_ns: int) -> None:
        if now_ns >= self.due_ns:
            for server in list(self._waiting):
                self._leave_out(server, "it was not answered in time")


def is_plain(content: object) -> bool:
    """Return whether a part of a message can be merged: otherwise one server could spoil the list of all."""
    try:
        json.dumps(content, allow_nan=False)  # NaN is no JSON
    except ValueError:
        return False
    return not is_deeper_than(DEPTH_LIMIT, content)
