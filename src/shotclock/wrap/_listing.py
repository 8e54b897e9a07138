"""Lists of a server, read under ids of our own: all pages of all kinds, one request at a time.

They are read after the greeting of the client, after a restart, and after the server has announced a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.json_values import is_deeper_than
from ..core.limits import NS_PER_MS, format_duration
from ..supervise.clock import monotonic_ns
from ._messages import JsonObject, RpcMessage, error_of, request_line
from ._pins import TOOLS, ListKind, Objects, digest_of
from ._replay import ReplayMemory
from ._requests import NEVER_NS

MOST_PAGES = 1_000
MOST_OBJECTS = 5_000
DEPTH_LIMIT = 64
# A server may announce changes all the time: its lists are read this often at most.
RELIST_MS = 300
# Errors of servers that do not have a list.
_NO_SUCH_METHOD = (-32601, -32602)


class OwnLists:
    """One reading of the lists of a server."""

    def __init__(
        self, kinds: Sequence[ListKind], memory: ReplayMemory, list_ms: int, send: Callable[[bytes], bool]
    ) -> None:
        self.listed: dict[str, Objects] = {}
        self.problem: str = ""
        self.due_ns: int = NEVER_NS
        self._kinds = list(kinds)
        self._memory = memory
        self._list_ms = list_ms
        self._send = send
        self._own_id = ""
        self._pages = 0

    @property
    def is_under_way(self) -> bool:
        return bool(self._own_id)

    def is_awaited(self, id: object) -> bool:
        return bool(self._own_id) and id == self._own_id

    def begin(self) -> None:
        self.listed, self.problem, self._pages = {}, "", 0
        self._next_kind()

    def _next_kind(self) -> None:
        """Ask for the next list that the server has."""
        self._own_id, self.due_ns = "", NEVER_NS
        for kind in self._kinds[len(self.listed) :]:
            self.listed[kind.name] = {}
            if self._declares(kind) is not False:
                self._ask(kind, None)
                return

    def _declares(self, kind: ListKind) -> bool | None:
        """Return whether the server has announced such lists; None if that is not known."""
        capabilities = None if self._memory.greeting is None else self._memory.greeting.capabilities
        return kind.capability in capabilities if isinstance(capabilities, dict) else None

    def _ask(self, kind: ListKind, cursor: object) -> None:
        params: JsonObject = {} if cursor is None else {"cursor": cursor}
        if self._memory.greeting is None and self._memory.envelope:
            params["_meta"] = self._memory.envelope
        self._own_id = self._memory.own_id("list")
        self.due_ns = monotonic_ns() + self._list_ms * NS_PER_MS if self._list_ms else NEVER_NS
        self._send(request_line(self._own_id, kind.method, params))

    def handle_answer(self, message: RpcMessage) -> None:
        """Note a page, and ask for the next one. `is_under_way` is false after the last."""
        kind = self._kinds[len(self.listed) - 1]
        if message.is_error:
            error = error_of(message)
            if error.get("code") in _NO_SUCH_METHOD and self._declares(kind) is not True:
                self._next_kind()
            else:
                self.fail(f"{kind.method} failed: {str(error.get('message'))[:200]}")
            return
        result = message.result if isinstance(message.result, dict) else {}
        page, objects = result.get(kind.name), self.listed[kind.name]
        for definition in page if isinstance(page, list) else ():
            name = name_of(kind, definition)
            if name is None:
                continue
            if name in objects and digest_of(objects[name]) != digest_of(definition):
                objects[name] = [objects[name], definition]  # two of one name: never the pinned one
            else:
                objects[name] = definition
        self._pages += 1
        cursor = result.get("nextCursor")
        if self._pages > MOST_PAGES or len(objects) > MOST_OBJECTS:
            self.fail(f"{kind.method} has more than {MOST_OBJECTS} objects or {MOST_PAGES} pages")
        elif cursor is not None:
            self._ask(kind, cursor)
        else:
            self._next_kind()

    def fail(self, problem: str) -> None:
        self.problem, self._own_id, self.due_ns = problem, "", NEVER_NS

    def check(self, now_ns: int) -> bool:
        """Return whether the time of a page is over."""
        if now_ns < self.due_ns:
            return False
        kind = self._kinds[len(self.listed) - 1]
        self.fail(f"{kind.method} was not answered within {format_duration(self._list_ms)}")
        return True


class KnownLists:
    """The lists of a server as they were last read, and when to read them again."""

    def __init__(
        self, reading: OwnLists, may_ask: Callable[[], bool], on_read: Callable[[str], None], *, are_needed: bool
    ) -> None:
        """`on_read` gets the problem of a reading that has failed, otherwise nothing."""
        self.is_stale: bool = are_needed
        self.are_needed = are_needed
        self._listed: dict[str, Objects] = {}
        self._reading = reading
        self._may_ask = may_ask
        self._on_read = on_read
        self._changed_again = False
        self._not_before_ns = 0
        self._retry_ns = NEVER_NS

    def objects(self, kind: ListKind) -> Objects:
        return self._listed.get(kind.name, {})

    def tool(self, name: str) -> JsonObject:
        """Return the definition of a tool; an empty one if the server lists no such tool."""
        definition = self.objects(TOOLS).get(name)
        return definition if isinstance(definition, dict) else {}

    def hints_of(self, name: str) -> JsonObject:
        hints = self.tool(name).get("annotations")
        return hints if isinstance(hints, dict) else {}

    def handle_change(self) -> None:
        """Read the lists again: the server has announced a change."""
        self.is_stale, self._changed_again = True, self._reading.is_under_way
        self.read_if_stale()

    def note_difference(self, kind: ListKind, name: str, definition: object) -> None:
        """Read the lists again if the client was sent another definition."""
        self.is_stale |= digest_of(self.objects(kind).get(name)) != digest_of(definition)

    def handle_lost_server(self) -> None:
        self.is_stale = self.are_needed
        self._reading.fail("")

    def read_if_stale(self) -> None:
        if not self.is_stale or self._reading.is_under_way or not self._may_ask():
            return
        now_ns = monotonic_ns()
        if now_ns < self._not_before_ns:
            self._retry_ns = self._not_before_ns
            return
        self._not_before_ns, self._retry_ns = now_ns + RELIST_MS * NS_PER_MS, NEVER_NS
        self._changed_again = False
        self._reading.begin()
        self._finish_if_done()

    def handle_answer(self, message: RpcMessage) -> None:
        if self._reading.is_awaited(message.id):
            self._reading.handle_answer(message)
            self._finish_if_done()

    def fail(self, id: object, problem: str) -> None:
        """Give up a list that cannot be checked whole."""
        if self._reading.is_awaited(id):
            self._reading.fail(problem)
            self._finish_if_done()

    @property
    def next_due_ns(self) -> int:
        return min(self._reading.due_ns, self._retry_ns)

    def check(self, now_ns: int) -> None:
        if self._reading.check(now_ns):
            self._finish_if_done()
        if now_ns >= self._retry_ns:
            self._retry_ns = NEVER_NS
            self.read_if_stale()

    def _finish_if_done(self) -> None:
        problem = self._reading.problem
        if self._reading.is_under_way:
            return
        if self._changed_again and not problem:
            self.read_if_stale()
            return
        if not problem:
            self.is_stale, self._listed = False, self._reading.listed
        self._on_read(problem)


def name_of(kind: ListKind, definition: object) -> str | None:
    """Return the name of a definition; None if it has none, or is nested too deep to be written again."""
    name = definition.get(kind.key) if isinstance(definition, dict) else None
    return name if isinstance(name, str) and not is_deeper_than(DEPTH_LIMIT, definition) else None
