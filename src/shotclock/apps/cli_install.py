"""`shotclock serve TARGET --install CLIENT`: the entry of an App in the configuration of an MCP client."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..agents.config_editor import ConfigEditor
from ..agents.config_files import ConfigChange, ConfigPlace, change_file, draw_change, read_text, write_change
from ..agents.install import program_folder
from ..agents.known_agents import CLIENTS, ConfigScope, McpClient
from ..calls.runtime import Runtime
from ..core.errors import Failure
from ..core.value_types import JsonObject, replace
from ..dispatch.invocation import Target

_NAME = re.compile(r"[\w.-]{1,64}")  # understood by every client


def change_entry(
    verb: str, client: str, name: str | None, target: str, words: list[str], *, project: bool, yes: bool
) -> Callable[[bool], int]:
    """Return the work of `install` or `remove`: it shows the change of the client's file, asks, and writes it."""
    plan = partial(_plan_install, words) if verb == "install" else _plan_remove
    how = partial(draw_change, verb="wrote" if verb == "install" else "removed from")
    return change_file(
        f"serve {verb}",
        partial(plan, CLIENTS[client], ConfigScope.of(project), name, target),
        write_change,
        how,
        yes=yes,
    )


def _plan_install(
    words: list[str], client: McpClient, scope: ConfigScope, name: str | None, served: str
) -> ConfigChange:
    """Read the App and the file. Raises Failure if the App cannot be served, or the file cannot be changed."""
    target, shown = _read_target(served)
    learned = asyncio.run(_learn_name(target))
    name = name or ("ui" if served == "ui" else learned)
    if not _NAME.fullmatch(name):
        raise Failure("ARG_ERROR", f"--name: {name!r} has other characters than letters, digits, dots and hyphens")
    plan = plan_entry(client, scope, name, [shown, *words])
    is_of_module = target.module is not None and served != "ui"
    note = f"{target.module} has to be importable by the Python of shotclock, from any folder."
    return replace(plan, notes=(*plan.notes, *([note] if is_of_module else [])))


def plan_entry(client: McpClient, scope: ConfigScope, name: str, words: list[str]) -> ConfigChange:
    """Plan the entry of a server. Raises Failure if the file cannot be changed."""
    entry: JsonObject = {"command": os.path.join(program_folder(), "shotclock"), "args": ["serve", *words]}
    if client.name == "vscode":
        entry = {"type": "stdio", **entry}
    place, path = _place(client, scope, name), (client.table, name)

    def put(editor: ConfigEditor) -> None:
        found = editor.read(path)
        if found is not None and not _serves(found):
            message = f"{place.file} has another server called {name!r}, and was left as it is"
            raise Failure("CONFLICT", message, suggestion="give --name with another name")
        if found != entry:
            editor.put(path, entry)

    def drop(editor: ConfigEditor) -> None:
        if _serves(editor.read(path)):
            editor.drop(path)

    is_of_project = scope is ConfigScope.PROJECT
    notes = ("The path of shotclock is one of this machine: do not commit the file.",) if is_of_project else ()
    details: dict[str, object] = {"client": client.name, "scope": scope.value, "server": name, "entry": entry}
    return replace(place.plan_install(put, drop), details=details, notes=notes)


def _plan_remove(client: McpClient, scope: ConfigScope, name: str | None, served: str) -> ConfigChange:
    return plan_removal(client, scope, name, "" if name is not None else _read_target(served)[1])


def plan_removal(client: McpClient, scope: ConfigScope, name: str | None, shown: str) -> ConfigChange:
    """Plan to take the entry of a target out. With a name, the target need not be there any more."""
    place = _place(client, scope, name or "")
    text = read_text(place.file)
    servers = place.edit(text).read((client.table,))
    ours = {each: entry for each, entry in (servers if isinstance(servers, dict) else {}).items() if _serves(entry)}
    names = [each for each in ours if each == name or (name is None and ours[each]["args"][1:2] == [shown])]
    if len(names) > 1:
        raise Failure("ARG_ERROR", f"{place.file} has it as {', '.join(names)}", suggestion="give --name with one")
    details: dict[str, object] = {"client": client.name, "scope": scope.value, "server": names[0] if names else None}
    if not names:
        return ConfigChange(str(place.file), text, text, place.owner, details)
    plan = _place(client, scope, names[0]).plan_remove(lambda editor: editor.drop((client.table, names[0])))
    return replace(plan, details=details)


def _place(client: McpClient, scope: ConfigScope, name: str) -> ConfigPlace:
    file = client.file.path(scope, os.environ, Path.cwd())
    return ConfigPlace(f"serve-{client.name}-{name}", client.title, file, client.syntax, client.fresh)


def _read_target(given: str) -> tuple[Target, str]:
    """Return the target, and how an entry names it."""
    target = Target.parse("shotclock.ui.tools:app" if given == "ui" else given)
    return target, given if given == "ui" else f"{target.file or target.module or ''}:{target.attribute}"


async def _learn_name(target: Target) -> str:
    """Import the App in a process of its own, and return its name. Raises Failure."""
    runtime = Runtime(program=target.program, workers=1)
    async with runtime:
        return (await target.learn(runtime)).name


def _serves(entry: Any) -> bool:
    """Return whether an entry was written by an installation."""
    arguments = entry.get("args") if isinstance(entry, dict) else None
    return isinstance(arguments, list) and arguments[:1] == ["serve"] and "shotclock" in str(entry.get("command"))
