"""The servers in the file of an MCP client, and whether `shotclock wrap` is before their commands."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Any

from ..core.value_types import value
from .known_agents import McpClient

REMOTE_KEYS = ("url", "httpUrl", "serverUrl")
LOCAL_TYPES = (None, "stdio", "local")


class ServerState(StrEnum):
    PLAIN = "not wrapped"
    WRAPPED = "wrapped"
    LEFT = "left as it is"


@value
class ServerEntry:
    """A server in the file of a client."""

    path: tuple[str, ...]
    content: Any

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def project(self) -> str | None:
        """The folder of the project for which Claude Code has the server in the user's file."""
        return self.path[1] if self.path[0] == "projects" else None

    @property
    def command(self) -> list[str]:
        """The program and its arguments. Only for an entry without an obstacle."""
        return [self.content["command"], *self.content.get("args", [])]

    @property
    def obstacle(self) -> str:
        """The reason why the entry cannot be wrapped, or nothing."""
        if not isinstance(self.content, dict):
            return "it is not a table of settings"
        if any(self.content.get(key) for key in REMOTE_KEYS) or self.content.get("type") not in LOCAL_TYPES:
            return "it is not reached over stdin and stdout"
        command, arguments = self.content.get("command"), self.content.get("args", [])
        if not isinstance(command, str) or not command:
            return "its command is not a text"
        if not isinstance(arguments, list) or not all(isinstance(word, str) for word in arguments):
            return "its args are not a list of texts"
        if self._runs_us and self.wrap_length is None:
            return "it was wrapped by hand"
        return ""

    @property
    def _runs_us(self) -> bool:
        return os.path.basename(self.command[0]) == "shotclock" and self.command[1:2] == ["wrap"]

    @property
    def wrap_length(self) -> int | None:
        """The number of arguments that an installation added before the command of the server. None: none."""
        arguments = self.command[1:]
        is_ours = self._runs_us and os.path.isabs(self.command[0]) and arguments[1:2] and "--" in arguments[:-1]
        return arguments.index("--") + 1 if is_ours and arguments[1].startswith("--name") else None

    @property
    def state(self) -> ServerState:
        if self.obstacle:
            return ServerState.LEFT
        return ServerState.PLAIN if self.wrap_length is None else ServerState.WRAPPED

    def as_data(self) -> dict[str, object]:
        return {"name": self.name, "project": self.project, "state": self.state.value, "reason": self.obstacle or None}


def list_servers(client: McpClient, data: Any) -> list[ServerEntry]:
    """Return every server of a file, with those of Claude Code's projects."""
    projects = data.get("projects") if client.name == "claude" else None
    folders = projects.items() if isinstance(projects, dict) else ()
    places: list[tuple[tuple[str, ...], Any]] = [((), data), *((("projects", name), each) for name, each in folders)]
    tables = [((*path, client.table), each.get(client.table)) for path, each in places if isinstance(each, dict)]
    named = [(path, table) for path, table in tables if isinstance(table, dict)]
    return [ServerEntry((*path, name), found) for path, table in named for name, found in table.items()]
