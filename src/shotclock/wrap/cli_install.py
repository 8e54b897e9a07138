"""`shotclock wrap install`, `remove` and `status`: the servers of an MCP client, each behind `shotclock wrap`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..agents.config_editor import ConfigEditor
from ..agents.config_files import (
    SCOPE,
    YES,
    Backup,
    ConfigChange,
    ConfigPlace,
    Edit,
    backup_path,
    change_file,
    draw_change,
    read_text,
    write_change,
)
from ..agents.install import program_folder
from ..agents.known_agents import CLIENTS, ConfigScope, McpClient
from ..agents.server_entries import ServerEntry, ServerState, list_servers
from ..calls.call import Outcome
from ..core.errors import Ending, Failure
from ..core.limits import format_duration
from ..core.value_types import replace, value
from ..core.visible_text import visible
from ..terminal.drawing import styled
from ..terminal.parser import CommandTable, Option, Subcommand, is_option, nearest_of
from ..terminal.subcommand import ChildWork, Mistaken, run_subcommand, run_table
from ._limits import DEFAULT_TIMEOUT_MS
from .cli import COMMAND as WRAP
from .cli import FOR_EVERY_SERVER, names_verb
from .cli import main as run_server

if TYPE_CHECKING:
    from rich.console import Console

MARGIN_MS = 1000  # between our last answer and the client's own limit; the way back takes some milliseconds
NOT_FOR_ALL = ("--name", "--update-lock")  # a name belongs to one server, and an update to one start


@value
class WrapOptions:
    """Options of `shotclock wrap` for every server of an installation, as they were typed."""

    words: tuple[str, ...]
    timeout_ms: int | None
    grace_ms: int

    def for_server(self, client: McpClient, entry: ServerEntry) -> list[str]:
        """Return the words before the command of a server."""
        name = [f"--name={entry.name}"] if entry.name.startswith("-") else ["--name", entry.name]
        timeout_ms = self._timeout_below(client.limit_ms(entry.content))
        own = [] if timeout_ms is None else ["--timeout", format_duration(timeout_ms)]
        return ["wrap", *name, *own, *self.words, "--"]

    def _timeout_below(self, limit_ms: int | None) -> int | None:
        """Return the timeout with which an answer comes before the client's limit. None: no other is needed."""
        if self.timeout_ms is not None or limit_ms is None:
            return None
        timeout_ms = limit_ms - self.grace_ms - MARGIN_MS
        return timeout_ms if 0 < timeout_ms < DEFAULT_TIMEOUT_MS else None

    def warn(self, client: McpClient, entry: ServerEntry) -> str | None:
        """Return a note where the client gives up before we answer."""
        limit_ms = client.limit_ms(entry.content)
        if limit_ms is None or self._timeout_below(limit_ms) is not None:
            return None
        timeout_ms = DEFAULT_TIMEOUT_MS if self.timeout_ms is None else self.timeout_ms
        if timeout_ms and timeout_ms + self.grace_ms < limit_ms:
            return None
        return (
            f"{client.title} stops waiting for {entry.name} after {format_duration(limit_ms)}, before the timeout here."
        )


@value
class ServersFile:
    """The file of a client that an installation changes."""

    client: McpClient
    scope: ConfigScope | None
    file: Path

    @classmethod
    def find(cls, client: McpClient, *, project: bool, file: str | None = None) -> ServersFile:
        if file is not None:
            return cls(client, None, Path(file).absolute())
        scope = ConfigScope.of(project)
        return cls(client, scope, client.file.path(scope, os.environ, Path.cwd()))

    @property
    def place(self) -> ConfigPlace:
        return ConfigPlace(f"wrap-{self.client.name}", self.client.title, self.file, self.client.syntax)

    def servers_in(self, text: str | None) -> list[ServerEntry]:
        return list_servers(self.client, self.place.edit(text).data)

    def answer(self, change: ConfigChange, notes: Iterable[str] = ()) -> ConfigChange:
        details: dict[str, object] = {
            "client": self.client.name,
            "scope": None if self.scope is None else self.scope.value,
            "servers": [entry.as_data() for entry in self.servers_in(change.after)],
            "backup": str(backup_path(self.place.owner, self.file)) if change.keeps else None,
        }
        return replace(change, details=details, notes=(*notes, *change.notes))


def plan_install(servers: ServersFile, names: list[str], options: WrapOptions) -> ConfigChange:
    program, client, notes = os.path.join(program_folder(), "shotclock"), servers.client, list[str]()
    if read_text(servers.file) is None:
        hint = "name the file with --file, or the one of the project with --project"
        raise Failure("FILE_NOT_FOUND", f"{client.title} has no file {servers.file}", suggestion=hint)

    def put(editor: ConfigEditor) -> None:
        for entry in _choose(servers, editor, names):
            if entry.obstacle:
                continue
            count, words = entry.wrap_length or 0, options.for_server(client, entry)
            if count and not options.words:
                words = entry.command[1 : 1 + count]
            elif note := options.warn(client, entry):
                notes.append(note)
            if entry.command[: 1 + len(words)] != [program, *words]:
                editor.wrap(entry.path, program, words, count)

    change = servers.place.plan_install(put, _dropping(servers, []))
    if servers.scope is ConfigScope.PROJECT:
        notes.append("The path of shotclock is one of this machine: do not commit the file.")
    return servers.answer(change, notes)


def plan_remove(servers: ServersFile, names: list[str]) -> ConfigChange:
    def has_ours(text: str) -> bool:
        return any(entry.state is ServerState.WRAPPED for entry in servers.servers_in(text))

    return servers.answer(servers.place.plan_remove(_dropping(servers, names), has_ours))


def _dropping(servers: ServersFile, names: list[str]) -> Edit:
    """Return the edit that restores the servers of these names, or all of them."""
    backup = Backup.read(servers.place.owner, servers.file)
    originals = [] if backup is None else servers.servers_in(backup.before)
    had_args = {entry.path for entry in originals if isinstance(entry.content, dict) and "args" in entry.content}

    def drop(editor: ConfigEditor) -> None:
        for entry in _choose(servers, editor, names):
            if entry.state is ServerState.WRAPPED:
                editor.unwrap(entry.path, entry.wrap_length or 0, keeps_list=entry.path in had_args)

    return drop


def _choose(servers: ServersFile, editor: ConfigEditor, names: list[str]) -> list[ServerEntry]:
    """Return the entries of these names, or all. Raises Failure for a name that is not there."""
    found = list_servers(servers.client, editor.data)
    for name in names:
        if all(entry.name != name for entry in found):
            known = ", ".join(dict.fromkeys(entry.name for entry in found))
            there = f"there are {known}" if known else "there are none"
            raise Failure("NOT_FOUND", f"there is no server {name!r} in {servers.file}; {there}")
    return [entry for entry in found if not names or entry.name in names]


def _read_options(words: list[str], names: list[str]) -> WrapOptions:
    line = WRAP.read([*words, "--", "server"])
    if "lock" in line.typed and len(names) != 1:
        line.refuse("lock", "each server needs a file of its own: give --lock with one --server")
    if line.mistakes:
        raise Mistaken({mistake["field"]: mistake["message"] for mistake in line.mistakes})
    return WrapOptions(tuple(words), line.typed.get("timeout"), line.values["grace"])


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of our own options, and those of the options of `shotclock wrap`."""
    known = {each.name: each for each in FOR_EVERY_SERVER if each.name not in NOT_FOR_ALL}
    ours = {each.name for each in INSTALL.options} | {"--format", "--help", "-h"}
    own, others, rest = list[str](), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        each = known.get(name) if is_option(word) else None
        if is_option(word) and each is None and name not in ours:  # a misspelt one is reported with its kind
            each = known.get(nearest_of(name, [*ours, *known]) or "")
        if each is None:
            own.append(word)
            continue
        others.append(word)
        if each.metavar and not equals and rest and rest[0][:2] != "--":
            others.append(rest.pop(0))
    return own, others


def _install_words(words: list[str]) -> int:
    own, others = _split(words)
    command = replace(INSTALL, main=None, run=partial(_run_install, others))
    return run_subcommand(TABLE.name, command, own)


def _run_install(
    words: list[str], client: str, user: bool, project: bool, file: str | None, server: list[str], yes: bool
) -> Any:
    options = _read_options(words, server)
    servers = ServersFile.find(CLIENTS[client], project=project, file=file)
    plan = partial(plan_install, servers, server, options)
    return change_file("wrap install", plan, write_change, partial(_draw_change, "wrote"), yes=yes)


def _run_remove(client: str, user: bool, project: bool, file: str | None, server: list[str], yes: bool) -> Any:
    servers = ServersFile.find(CLIENTS[client], project=project, file=file)
    plan = partial(plan_remove, servers, server)
    return change_file("wrap remove", plan, write_change, partial(_draw_change, "removed from"), yes=yes)


def _run_status(client: str | None) -> ChildWork:
    chosen = tuple(CLIENTS.values()) if client is None else (CLIENTS[client],)

    def body() -> Outcome:
        files = [ServersFile.find(each, project=project) for each in chosen for project in (False, True)]
        return Outcome(Ending.FINISHED, data={"clients": [_describe(each) for each in files]})

    return ChildWork("wrap status", body, draw=_draw_clients)


def _describe(place: ServersFile) -> dict[str, object]:
    """Return the servers of a file. A file that cannot be read has a problem instead."""
    text, servers, problem = None, list[dict[str, object]](), None
    try:
        text = read_text(place.file)
        servers = [entry.as_data() for entry in place.servers_in(text)]
    except Failure as failure:
        problem = str(failure)
    about = {"client": place.client.name, "scope": place.scope, "file": str(place.file)}
    return {**about, "exists": text is not None or problem is not None, "servers": servers, "problem": problem}


def _draw_clients(data: Any, console: Console) -> None:
    for each in data["clients"]:
        line = f"{each['client']:<9} {each['scope']:<8} {visible(each['file'])}"
        console.print(line if each["exists"] else f"{line} (no such file)", soft_wrap=True)
        if each["problem"] is not None:
            console.print(styled("  ! ", "yellow") + styled(visible(each["problem"])), soft_wrap=True)
        _draw_servers(each["servers"], console)


def _draw_change(verb: str, data: Any, console: Console) -> None:
    draw_change(data, console, verb)
    _draw_servers(data["servers"], console)


def _draw_servers(servers: Any, console: Console) -> None:
    for each in servers:
        style = {"wrapped": "green", "not wrapped": "yellow"}.get(each["state"], "bright_black")
        project = "" if each["project"] is None else f" in {each['project']}"
        reason = "" if each["reason"] is None else f": {each['reason']}"
        line = styled(f"  {visible(each['name'])}{visible(project)} ") + styled(f"{each['state']}{reason}", style)
        console.print(line, soft_wrap=True)


_NAMES = ", ".join(CLIENTS)
_CLIENT = Option.argument(
    "client", f"The client: {_NAMES}.", choices=tuple(CLIENTS), missing=f"missing CLIENT: {_NAMES}"
)
_WHERE = (
    *SCOPE,
    Option.taking("--file", "FILE", "Another file in the form of the client.", excludes=("--user", "--project")),
    Option.taking("--server", "NAME", "Only this server.", repeats=True),
)
INSTALL = Subcommand(
    "install",
    "Show how each server of an MCP client would be wrapped, ask, and write it.",
    (_CLIENT, *_WHERE, YES, Option.json()),
    main=_install_words,
    usage="CLIENT [OPTIONS] [OPTIONS OF WRAP]",
    description="Put `shotclock wrap --name NAME` and the options of `shotclock wrap` that you give before the command "
    "of each server in the configuration of a client. Everything else in the file stays as it is, comments too.",
    epilogue="""\
  shotclock wrap install codex
  shotclock wrap install claude --project --server github --ask destructive

Servers that are reached over HTTP are left as they are. A server that is wrapped already gets the options that you
give now; without any, it is left as it is. Where the client stops waiting for a call before our default of 10m, the
server gets a --timeout with which the client still reads our answer: 4m57s for Codex, 9m57s for Gemini CLI, less where
the entry of the server sets less. The old text is kept for `shotclock wrap remove`.""",
)
REMOVE = Subcommand(
    "remove",
    "Restore the servers of an MCP client as they were before the installation.",
    (_CLIENT, *_WHERE, YES),
    _run_remove,
    description="Restore the file as it was before the installation, byte for byte. If it was changed since, only the "
    "words of shotclock are removed.",
)
STATUS = Subcommand(
    "status",
    "List the servers of MCP clients, and whether they are wrapped.",
    (Option.argument("client", f"Only this client: {_NAMES}.", choices=tuple(CLIENTS)),),
    _run_status,
)
TABLE = CommandTable("shotclock wrap", "Wrap the servers of an MCP client.", (INSTALL, REMOVE, STATUS), "verb")


def main(words: list[str]) -> int:
    return run_table(TABLE, words) if names_verb(words) else run_server(words)


COMMANDS = {"wrap": replace(WRAP, main=main)}
