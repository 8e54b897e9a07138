"""Routes: which of several servers has a tool, a prompt, a resource or a task.

A name belongs to the server with the longest prefix that it begins with. What the servers list does not change that, so
no server can take the calls of another one. URIs have no prefix: one that several servers list belongs to the first in
the file.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence

from ...core.uri_template import matches_strictly, may_match
from ...core.value_types import record
from ..lines import replace_value
from ..links import Note
from ..messages import JsonObject, RpcMessage
from .lists import PROMPTS, RESOURCES, TOOLS, ListReading
from .server import MergedServer

MOST_TASKS = 1_000
_BY_NAME = ("tools/call", "prompts/get")
_BY_URI = ("resources/read", "resources/subscribe", "resources/unsubscribe")
_BY_TASK = ("tasks/get", "tasks/result", "tasks/cancel")
# Requests that usually name their server near the start of the line.
ROUTED_BY_HEAD = (*_BY_NAME, *_BY_URI)


@record
class Route:
    """The server of a request, and the line for it."""

    server: MergedServer
    line: bytes


@record
class NoRoute:
    """Why no server is known for a request."""

    why: str
    may_be_listed: bool = False  # by a server whose lists of resources have not been read


class MergedRoutes:
    """The servers of requests, by the name, URI or task in them."""

    def __init__(self, servers: Sequence[MergedServer], note: Note) -> None:
        self._servers = servers
        self._note = note
        self._noted: set[tuple[MergedServer, str]] = set()
        self._uris: dict[MergedServer, set[str]] = {}
        self._templates: dict[MergedServer, set[str]] = {}
        self._tasks: OrderedDict[str, MergedServer] = OrderedDict()

    def merge(self, reading: ListReading) -> list[JsonObject]:
        """Return the objects of a list in the order of the servers, without those that belong to another server."""
        key, is_named = reading.kind.key, reading.kind in (TOOLS, PROMPTS)
        known = self._uris if reading.kind is RESOURCES else self._templates
        if not is_named:
            for server, objects in reading.objects.items():
                known[server] = {str(each[key]) for each in objects}
        merged: list[JsonObject] = []
        for server in self._servers:
            for each in reading.objects.get(server, ()):
                name = server.entry.prefix + str(each[key]) if is_named else str(each[key])
                owner = (
                    self._by_prefix(name) if is_named else next(s for s in self._servers if name in known.get(s, ()))
                )
                if owner is server:
                    merged.append({**each, key: name})
                elif (server, name) not in self._noted and owner is not None:
                    self._noted.add((server, name))
                    self._note(f"shotclock: {name} of the server {server.name} is left out: it belongs to {owner.name}")
        return merged

    def note_task(self, server: MergedServer, result: object) -> None:
        """Remember the server of a task. The id of another server's task changes nothing."""
        task = result.get("task") if isinstance(result, dict) else None
        if isinstance(task, dict) and isinstance(task.get("taskId"), str):
            self._tasks.setdefault(task["taskId"], server)
            if len(self._tasks) > MOST_TASKS:
                self._tasks.popitem(last=False)

    def find(self, message: RpcMessage) -> Route | NoRoute:
        """Return the server of a request. Only the name of a tool or prompt is changed in its line."""
        method, params = message.method or "", message.params
        ref = params.get("ref") if method == "completion/complete" else None
        if method in _BY_NAME:
            return self._route_name(message, ("params", "name"), params.get("name"))
        if isinstance(ref, dict) and "name" in ref:
            return self._route_name(message, ("params", "ref", "name"), ref["name"])
        if method in _BY_URI or isinstance(ref, dict):
            uri = (ref if isinstance(ref, dict) else params).get("uri")
            server = self._by_uri(uri) if isinstance(uri, str) else None
            why = f"no server lists the resource {uri!r}, or a template for it"
            return NoRoute(why, may_be_listed=True) if server is None else Route(server, message.line)
        if method in _BY_TASK:
            server = self._tasks.get(str(params.get("taskId")))
            why = f"no server is known for the task {params.get('taskId')!r}"
            return NoRoute(why) if server is None else Route(server, message.line)
        if len(self._servers) == 1:
            return Route(self._servers[0], message.line)
        return NoRoute(f"{method} does not name one of the {len(self._servers)} servers, so it was not passed on")

    def _route_name(self, message: RpcMessage, path: Sequence[str], name: object) -> Route | NoRoute:
        server = self._by_prefix(name) if isinstance(name, str) else None
        if server is None or not isinstance(name, str):
            return NoRoute(f"no server has {name!r}: the names of its tools and prompts begin with its prefix")
        line = replace_value(message.line, path, name.removeprefix(server.entry.prefix))
        if line is None:
            return NoRoute(f"the name {name!r} cannot be replaced in this message")
        return Route(server, line)

    def _by_prefix(self, name: str) -> MergedServer | None:
        fitting = [each for each in self._servers if name.startswith(each.entry.prefix)]
        return max(fitting, key=lambda each: len(each.entry.prefix), default=None)

    def _first_with(self, known: dict[MergedServer, set[str]], uri: str) -> MergedServer | None:
        return next((each for each in self._servers if uri in known.get(each, ())), None)

    def _by_uri(self, uri: str) -> MergedServer | None:
        having = [each for each in self._servers if each.exit_code is None and each.has("resources")]
        if len(having) == 1 and having[0].capabilities is not None:
            return having[0]
        if (server := self._first_with(self._uris, uri)) is not None:
            return server
        for fits in (operator.eq, matches_strictly, may_match):
            for server in self._servers:
                if any(fits(template, uri) for template in self._templates.get(server, ())):
                    return server
        return None
