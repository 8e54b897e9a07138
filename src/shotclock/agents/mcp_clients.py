"""The MCP clients that `shotclock wrap install` knows: their files, their tables of servers, and their own limits.

The limits are those of Codex 0.169, Gemini CLI 0.61 and Claude Code 2.1.326.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from ..core.value_types import value
from . import _toml_text as toml_text
from . import json_text
from .coding_agents import ConfigScope, home_of
from .json_text import TextItem

CODEX_TOOL_LIMIT_MS = 300_000  # older ones have 60 or 120 s
GEMINI_TOOL_LIMIT_MS = 600_000
CLAUDE_LEAST_LIMIT_MS = 1000  # Claude Code ignores smaller ones
REMOTE_KEYS = ("url", "httpUrl", "serverUrl")
LOCAL_TYPES = (None, "stdio", "local")


class ConfigSyntax(Protocol):
    """A format of configuration files: a module that parses a text and finds places in it."""

    def blank_comments(self, text: str) -> str: ...
    def parse(self, text: str) -> Any: ...
    def locate(self, text: str, path: json_text.Path) -> TextItem | None: ...
    def list_items(self, text: str, at: int) -> list[TextItem]: ...


@value
class McpClient:
    """A client of MCP servers, and where it finds them."""

    name: str
    title: str
    file: Callable[[ConfigScope, Mapping[str, str], Path], Path]
    """Returns the file for a scope, the environment and the project's folder."""
    table: str
    limit_ms: Callable[[dict[str, Any]], int | None]
    """Returns the client's own limit for a call to this server. None: it has none that is known."""
    syntax: ConfigSyntax = json_text


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
    return [ServerEntry((*path, name), found) for path, table in _tables(client, data) for name, found in table.items()]


def _tables(client: McpClient, data: Any) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    if isinstance(table := data.get(client.table), dict):
        yield (client.table,), table
    projects = data.get("projects") if client.name == "claude" else None
    for folder, project in projects.items() if isinstance(projects, dict) else ():
        if isinstance(project, dict) and isinstance(table := project.get(client.table), dict):
            yield ("projects", folder, client.table), table


def _claude_file(scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
    return (
        project / ".mcp.json"
        if scope is ConfigScope.PROJECT
        else home_of(environ, "CLAUDE_CONFIG_DIR") / ".claude.json"
    )


def _codex_file(scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
    folder = home_of(environ, "CODEX_HOME", ".codex") if scope is ConfigScope.USER else project / ".codex"
    return folder / "config.toml"


def _cursor_file(scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
    return (home_of(environ, "") if scope is ConfigScope.USER else project) / ".cursor" / "mcp.json"


def _vscode_file(scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
    user = home_of(environ, "XDG_CONFIG_HOME", ".config") / "Code" / "User"
    return (user if scope is ConfigScope.USER else project / ".vscode") / "mcp.json"


def _gemini_file(scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
    folder = home_of(environ, "GEMINI_CLI_HOME") if scope is ConfigScope.USER else project
    return folder / ".gemini" / "settings.json"


def _read_limit(entry: dict[str, Any], key: str, unit_ms: int) -> int | None:
    found = entry.get(key)
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < float("inf")
    return int(found * unit_ms) if is_number and found is not None else None


def _claude_limit(entry: dict[str, Any]) -> int | None:
    limit_ms = _read_limit(entry, "timeout", 1)
    return limit_ms if limit_ms is not None and limit_ms >= CLAUDE_LEAST_LIMIT_MS else None


CLIENTS = {
    client.name: client
    for client in (
        McpClient("claude", "Claude Code", _claude_file, "mcpServers", _claude_limit),
        McpClient(
            "codex",
            "Codex",
            _codex_file,
            "mcp_servers",
            lambda entry: _read_limit(entry, "tool_timeout_sec", 1000) or CODEX_TOOL_LIMIT_MS,
            toml_text,
        ),
        McpClient("cursor", "Cursor", _cursor_file, "mcpServers", lambda entry: None),
        McpClient("vscode", "VS Code", _vscode_file, "servers", lambda entry: None),
        McpClient(
            "gemini",
            "Gemini CLI",
            _gemini_file,
            "mcpServers",
            lambda entry: _read_limit(entry, "timeout", 1) or GEMINI_TOOL_LIMIT_MS,
        ),
    )
}
