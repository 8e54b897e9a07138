"""Routes: which of several servers a request of the client is for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..core.value_types import record
from .lines import replace_value
from .merged_lists import PROMPTS, RESOURCES, TEMPLATES, TOOLS, MergedDirectory, MergedKind
from .merged_server import MergedServer
from .messages import Message

MOST_TASKS = 1_000
_NAMED = {"tools/call": TOOLS, "prompts/get": PROMPTS}
_OF_RESOURCES = ("resources/read", "resources/subscribe", "resources/unsubscribe")
_OF_TASKS = ("tasks/get", "tasks/result", "tasks/cancel")
# Requests that usually name their server near the start of the line.
ROUTED_BY_HEAD = (*_NAMED, *_OF_RESOURCES)


@record
class Route:
    """The server of a request, and the line for it."""

    server: MergedServer
    line: bytes


@record
class NoRoute:
    """Why no server is known for a request, and the lists that have not been read yet."""

    why: str
    unread: Sequence[MergedKind] = ()


class MergedRoutes:
    """The servers of requests, by the name, URI or task in them."""

    def __init__(self, servers: Sequence[MergedServer], directory: MergedDirectory) -> None:
        self._servers = servers
        self._directory = directory
        self._tasks: OrderedDict[str, MergedServer] = OrderedDict()

    def note_result(self, server: MergedServer, result: object) -> None:
        """Remember the server of a task."""
        task = result.get("task") if isinstance(result, dict) else None
        if isinstance(task, dict) and isinstance(task.get("taskId"), str):
            self._tasks[task["taskId"]] = server
            if len(self._tasks) > MOST_TASKS:
                self._tasks.popitem(last=False)

    def find(self, message: Message) -> Route | NoRoute:
        """Return the server of a request. Only the name of a tool or prompt is changed in its line."""
        method, params = message.method or "", message.params
        if method in _NAMED:
            return self._by_name(message, _NAMED[method], ("params", "name"), params.get("name"))
        if method == "completion/complete":
            ref = params.get("ref")
            ref = ref if isinstance(ref, dict) else {}
            if "name" in ref:
                return self._by_name(message, PROMPTS, ("params", "ref", "name"), ref["name"])
            return self._by_uri(message, ref.get("uri"))
        if method in _OF_RESOURCES:
            return self._by_uri(message, params.get("uri"))
        if method in _OF_TASKS:
            server = self._tasks.get(str(params.get("taskId")))
            if server is None:
                return NoRoute(f"no server is known for the task {params.get('taskId')!r}")
            return Route(server, message.line)
        if len(self._servers) == 1:
            return Route(self._servers[0], message.line)
        return NoRoute(f"{method} does not name one of the {len(self._servers)} servers, so it was not passed on")

    def _by_name(self, message: Message, kind: MergedKind, path: Sequence[str], name: object) -> Route | NoRoute:
        if not isinstance(name, str):
            return NoRoute(f"{message.method} has no name")
        server = self._directory.find_by_name(kind, name)
        if server is None:
            unread = () if self._directory.was_read(kind) else (kind,)
            return NoRoute(f"no server has {name!r}; {kind.method} lists the names", unread)
        line: bytes | None = message.line
        if server.entry.prefix:
            line = replace_value(message.line, path, name.removeprefix(server.entry.prefix))
        if line is None:
            return NoRoute(f"the name {name!r} cannot be replaced in this message")
        return Route(server, line)

    def _by_uri(self, message: Message, uri: object) -> Route | NoRoute:
        if not isinstance(uri, str):
            return NoRoute(f"{message.method} has no URI")
        server = self._directory.find_by_uri(uri)
        if server is None:
            unread = () if self._directory.was_read(RESOURCES, TEMPLATES) else (RESOURCES, TEMPLATES)
            return NoRoute(f"no server lists the resource {uri!r}, or a template for it", unread)
        return Route(server, message.line)
