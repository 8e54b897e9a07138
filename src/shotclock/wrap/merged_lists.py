"""The lists of several servers as one: all pages of each, prefixed names, and which server has which object."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..core.clocks import NS_PER_MS
from ..core.value_types import value
from ..process.clock import monotonic_ns
from .links import Note
from .merged_greeting import merged_caching
from .merged_server import MergedServer
from .messages import JsonObject, Message, error_of

# Each server has a limit of its own for a list; this one is for all of them together.
LIST_WAIT_MS = 90_000
MOST_PAGES = 1_000
MOST_OBJECTS = 5_000
# Errors of servers that do not have a list.
_NO_SUCH_METHOD = (-32601, -32602)


@value
class MergedKind:
    """A kind of list."""

    name: str  # the key of the list in a result
    method: str
    capability: str
    key: str  # of an object
    is_prefixed: bool = False


TOOLS = MergedKind("tools", "tools/list", "tools", "name", is_prefixed=True)
PROMPTS = MergedKind("prompts", "prompts/list", "prompts", "name", is_prefixed=True)
RESOURCES = MergedKind("resources", "resources/list", "resources", "uri")
TEMPLATES = MergedKind("resourceTemplates", "resources/templates/list", "resources", "uriTemplate")
KINDS = {each.method: each for each in (TOOLS, PROMPTS, RESOURCES, TEMPLATES)}


class ListReading:
    """One reading of a list from every server."""

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
        self.results: list[JsonObject] = []
        self.due_ns = monotonic_ns() + LIST_WAIT_MS * NS_PER_MS
        self.is_over = False
        self._meta = meta
        self._note = note
        self._on_read = on_read
        self._waiting = {each for each in servers if each.is_ready and each.has(kind.capability)}
        self._pages = 0

    def begin(self) -> None:
        for server in list(self._waiting):
            self._ask(server, [], None)
        self._end_if_complete()

    def _ask(self, server: MergedServer, before: list[JsonObject], cursor: object) -> None:
        params: JsonObject = {} if cursor is None else {"cursor": cursor}
        if self._meta:
            params["_meta"] = self._meta
        server.ask(self.kind.method, params, lambda answer: self._take(server, before, answer))

    def _take(self, server: MergedServer, before: list[JsonObject], answer: Message | None) -> None:
        if self.is_over:
            return
        if answer is None or not isinstance(answer.result, dict):
            self._take_failure(server, answer)
            return
        page = answer.result.get(self.kind.name)
        for each in page if isinstance(page, list) else ():
            if isinstance(each, dict) and isinstance(each.get(self.kind.key), str):
                before.append(each)
        self._pages += 1
        cursor = answer.result.get("nextCursor")
        if len(before) > MOST_OBJECTS or self._pages > MOST_PAGES:
            self._leave_out(server, f"it has more than {MOST_OBJECTS} objects or {MOST_PAGES} pages")
        elif cursor is not None:
            self._ask(server, before, cursor)
        else:
            self.results.append({key: item for key, item in answer.result.items() if key != self.kind.name})
            self.objects[server] = before
            self._waiting.discard(server)
            self._end_if_complete()

    def _take_failure(self, server: MergedServer, answer: Message | None) -> None:
        error = {} if answer is None else error_of(answer)
        if error.get("code") in _NO_SUCH_METHOD and server.capabilities is None:
            self.objects[server] = []
            self._waiting.discard(server)
            self._end_if_complete()
        else:
            text = "its process ended" if answer is None else str(error.get("message", "it is too long"))
            self._leave_out(server, text.partition("\n")[0].removeprefix("shotclock: ")[:300])

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

    def result(self, directory: MergedDirectory, *, is_modern: bool) -> JsonObject:
        """Return the merged list as one page."""
        merged: JsonObject = {self.kind.name: directory.take(self)}
        if is_modern:
            merged |= {"resultType": "complete", **merged_caching(self.results)}
        return merged


class MergedDirectory:
    """Which server has which tool, prompt, resource and template, as far as lists were read."""

    def __init__(self, servers: Sequence[MergedServer], note: Note) -> None:
        self._servers = servers
        self._note = note
        self._known: dict[str, dict[str, MergedServer]] = {}
        self._noted: set[tuple[str, str]] = set()

    def was_read(self, *kinds: MergedKind) -> bool:
        return all(kind.name in self._known for kind in kinds)

    def take(self, reading: ListReading) -> list[JsonObject]:
        """Note the objects of a list. Return them in the order of the servers; of equal names the first counts."""
        kind = reading.kind
        absent = {
            name: server for name, server in self._known.get(kind.name, {}).items() if server not in reading.objects
        }
        known: dict[str, MergedServer] = {}
        merged: list[JsonObject] = []
        for server in self._servers:
            for each in reading.objects.get(server, ()):
                name = str(each[kind.key])
                if kind.is_prefixed:
                    name = server.entry.prefix + name
                    each = {**each, kind.key: name}
                if known.setdefault(name, server) is server:
                    merged.append(each)
                elif (kind.name, name) not in self._noted:
                    self._noted.add((kind.name, name))
                    first = known[name].name
                    self._note(f"shotclock: {name} of the server {server.name} is left out: {first} has it, too")
        self._known[kind.name] = {**absent, **known}
        return merged

    def find_by_name(self, kind: MergedKind, name: str) -> MergedServer | None:
        """Return the server of a tool or prompt: the one that listed it, else the only one with its prefix."""
        if (found := self._known.get(kind.name, {}).get(name)) is not None:
            return found
        fitting = [each for each in self._servers if name.startswith(each.entry.prefix)]
        longest = max((len(each.entry.prefix) for each in fitting), default=0)
        nearest = [each for each in fitting if len(each.entry.prefix) == longest]
        return nearest[0] if len(nearest) == 1 else None

    def find_by_uri(self, uri: str) -> MergedServer | None:
        """Return the server of a resource: the only one with resources, the one that listed it, or by a template."""
        having = [each for each in self._servers if each.is_ready and each.has("resources")]
        if len(having) == 1 and having[0].capabilities is not None:
            return having[0]
        if (found := self._known.get(RESOURCES.name, {}).get(uri)) is not None:
            return found
        templates = self._known.get(TEMPLATES.name, {})
        if uri in templates:  # the reference of a completion
            return templates[uri]
        return next((server for template, server in templates.items() if _fits(template, uri)), None)


def _fits(template: str, uri: str) -> bool:
    """Return whether a URI may come from a template. The expressions in braces fit any text."""
    first, *others = re.split(r"\{[^}]*\}", template)
    if not others:
        return uri == template
    *middle, last = others
    at, end = len(first), len(uri) - len(last)
    if not uri.startswith(first) or not uri.endswith(last) or end < at:
        return False
    for part in middle:
        found = uri.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
