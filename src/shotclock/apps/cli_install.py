"""`shotclock serve TARGET --install CLIENT`: the entry of an App in the configuration of an MCP client."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..agents import json_text
from ..agents.coding_agents import ConfigScope
from ..agents.config_files import ConfigChange, change_file, draw_change, read_text, write_change
from ..agents.install import program_folder
from ..agents.mcp_clients import CLIENTS, McpClient
from ..agents.server_entries import read_config
from ..calls.runtime import Runtime
from ..core.errors import Failure
from ..dispatch.invocation import Target, learn, parse_target

_FRESH = "{}\n"
_NAME = re.compile(r"[\w.-]{1,64}")  # understood by every client


def install_in(
    client: str, scope: str, name: str | None, target: str, words: list[str], yes: bool
) -> Callable[[bool], int]:
    """Return the work that shows the change of the client's file, asks, and writes it."""
    plan = partial(_plan, CLIENTS[client], ConfigScope(scope), name, target, words)
    return change_file("serve install", plan, write_change, draw_change, yes=yes)


def _plan(client: McpClient, scope: ConfigScope, name: str | None, written: str, words: list[str]) -> ConfigChange:
    """Read the App and the file. Raises Failure if the App cannot be served, or the file cannot be changed."""
    target = parse_target("shotclock.ui.tools:app" if written == "ui" else written)
    found = asyncio.run(_learn_name(target))
    name = name or ("ui" if written == "ui" else found)
    if not _NAME.fullmatch(name):
        raise Failure("ARG_ERROR", f"--name: {name!r} has other characters than letters, digits, dots and hyphens")
    place = target.file or target.module or ""
    shown = written if written == "ui" else f"{place}:{target.attribute}"
    entry: dict[str, Any] = {"command": os.path.join(program_folder(), "shotclock"), "args": ["serve", shown, *words]}
    if client.name == "vscode":
        entry = {"type": "stdio", **entry}
    file = client.file(scope, os.environ, Path.cwd())
    before = read_text(file)
    after = put_server(str(file), before, (client.table, name), entry)
    notes = []
    if scope is ConfigScope.PROJECT:
        notes.append("The path of shotclock is one of this machine: do not commit the file.")
    if target.module is not None and written != "ui":
        notes.append(f"{target.module} has to be importable by the Python of shotclock, from any folder.")
    details: dict[str, object] = {"client": client.name, "scope": scope.value, "server": name, "entry": entry}
    return ConfigChange(str(file), before, after, f"serve-{client.name}", details, notes=tuple(notes))


async def _learn_name(target: Target) -> str:
    """Import the App in a process of its own, and return its name. Raises Failure."""
    runtime = Runtime(program=target.program, workers=1)
    async with runtime:
        return (await learn(runtime, target)).name


def put_server(file: str, before: str | None, path: tuple[str, str], entry: dict[str, Any]) -> str:
    """Return the text of a file with this entry; comments and all else stay. Raises Failure if that is impossible."""
    text = json_text.with_object(before, _FRESH)
    expected = read_config(file, text, json_text)
    table = expected.get(path[0])
    if isinstance(table, dict) and path[1] in table and not _is_ours(table[path[1]]):
        message = f"{file} has another server called {path[1]!r}, and was left as it is"
        raise Failure("CONFLICT", message, suggestion="give --name with another name")
    try:
        after = json_text.put(text, path, entry)
        expected.setdefault(path[0], {})[path[1]] = entry
        if json_text.parse(json_text.blank_comments(after)) == expected:
            return after
        problem = "the entry cannot be put into it"
    except (ValueError, TypeError, AttributeError) as error:
        problem = str(error)
    raise Failure("CONFLICT", f"{file} was left as it is: {problem}", suggestion="write the entry by hand")


def _is_ours(entry: Any) -> bool:
    arguments = entry.get("args") if isinstance(entry, dict) else None
    return isinstance(arguments, list) and arguments[:1] == ["serve"] and "shotclock" in str(entry.get("command"))
