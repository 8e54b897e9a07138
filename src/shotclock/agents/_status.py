"""The state of an installation: whether its entries are there, its programs can run, and the agent uses them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import Failure
from ..core.value_types import JsonObject, field, record
from ._hook_entries import find_ours
from ._json_text import KeyPath
from .config_editor import ConfigEditor, ConfigEntry
from .known_agents import AGENTS, EDITOR_JSON, HOOK_NAME, PREFIX, CodingAgent, ConfigScope, Programs, home_of

CLAUDE_MANAGED = Path("/etc/claude-code/managed-settings.json")
GEMINI_SYSTEM = Path("/etc/gemini-cli/settings.json")
FIRST_LINE = 4096  # bytes
PLACES = Programs("shotclock", "shotclock-sh", "bash")  # only the places of the entries count


@record
class AgentStatus:
    agent: str
    scope: ConfigScope
    file: str
    installed: bool = False
    approvals: bool = False
    shell: str | None = None
    trusted: bool | None = None
    """None: the agent asks for no trust in its configuration."""
    problems: list[str] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    """Conditions of an effect that cannot be seen in files."""

    @property
    def is_there(self) -> bool:
        return self.installed or self.approvals or bool(self.problems)

    def as_data(self) -> dict[str, object]:
        return {
            "agent": self.agent,
            "scope": self.scope.value,
            "file": self.file,
            "installed": self.installed,
            "approvals": self.approvals,
            "shell": self.shell,
            "trusted": self.trusted,
            "effective": None if self.conditions and not self.problems else self.installed and not self.problems,
            "problems": self.problems,
            "conditions": self.conditions,
        }


def every_entry(agent: CodingAgent) -> tuple[ConfigEntry, ...]:
    """Return every entry that an installation may have; their contents are without meaning."""
    return (*agent.entries(PLACES), *(agent.approvals(PLACES) if agent.approvals is not None else ()))


def describe(agent: CodingAgent, scope: ConfigScope, environ: Mapping[str, str], project: Path) -> AgentStatus:
    """Look at the files of an agent. Nothing is claimed about a file that cannot be read."""
    file = agent.file.path(scope, environ, project)
    status = AgentStatus(agent.name, scope, str(file))
    try:
        text = file.read_text("utf-8")
        if agent.plugin is None:
            _read_entries(status, agent, text)
        elif match := re.search(r'^const shell = ("[^"\n]*")$', text, re.MULTILINE):
            status.installed, status.shell = True, json.loads(match[1])
            _check_program(status, json.loads(match[1]))
    except FileNotFoundError:
        return status
    except Failure as failure:
        status.problems.append(str(failure))
    except (OSError, ValueError) as error:
        status.problems.append(f"{file} cannot be read: {error}")
    if status.installed:
        _CHECKS[agent.name](status, environ, project)
    return status


def _read_entries(status: AgentStatus, agent: CodingAgent, text: str) -> None:
    approvals = agent.approvals(PLACES) if agent.approvals is not None else ()
    editor = ConfigEditor(Path(status.file), agent.title, text, agent.syntax)
    for entry in every_entry(agent):
        path = find_ours(editor, entry)
        if path is None:
            if status.installed and entry not in approvals:
                status.conditions.append("Without its hook, commands in the background are limited: install it again")
            continue
        found = editor.read(path)
        words = [found] * 5 if isinstance(found, str) else _hook_words(found)
        matcher = entry.content.get("matcher") if entry.in_list else None
        if matcher is not None and (own := _group_of(editor, entry, path).get("matcher")) != matcher:
            status.problems.append(f"its matcher is {own!r} instead of {matcher!r}: correct it")
        for program in (words[0], words[4]):
            _check_program(status, program)
        if entry in approvals:
            status.approvals = True
        elif entry == agent.entries(PLACES)[0]:  # the one that puts us in front
            status.installed, status.shell = True, words[4]


def _hook_words(hook: Any) -> list[str]:
    """Return the words of our hook's command: shotclock agent hook NAME SHELL."""
    inner = hook["hooks"][0] if "hooks" in hook else hook
    return [*shlex.split(inner.get("command") or inner["bash"]), *[""] * 5]


def _group_of(editor: ConfigEditor, entry: ConfigEntry, path: KeyPath) -> JsonObject:
    """Return the group of our hook, as if it were the only one in it."""
    group: JsonObject = editor.read(path[: len(entry.path) + 1])
    return {**group, "hooks": [editor.read(path)]} if len(path) > len(entry.path) + 1 else group


def _check_program(status: AgentStatus, program: str) -> None:
    problem = f"{program} is not there or cannot be executed: install it again, or remove this"
    if not _can_run(program) and problem not in status.problems:
        status.problems.append(problem)


def _can_run(program: str) -> bool:
    """Return whether a program and its interpreter are there. It is not started: a project's file may name it."""
    if not (os.path.isfile(program) and os.access(program, os.X_OK)):
        return False
    try:
        with open(program, "rb") as file:
            first = file.readline(FIRST_LINE).split()
    except OSError:  # it can be executed, but not read
        return True
    words = [first[0][2:], *first[1:]] if first and first[0].startswith(b"#!") else []
    interpreter = next(filter(None, words), b"")
    return not interpreter or os.access(interpreter, os.X_OK)


def _read_json(file: Path, *path: str) -> Any:
    try:
        return ConfigEditor(file, "shotclock", file.read_text("utf-8"), EDITOR_JSON).read(path)
    except (OSError, ValueError, Failure):
        return None


def _check_claude(status: AgentStatus, environ: Mapping[str, str], project: Path) -> None:
    """Project settings win over user settings, local ones over both, managed ones over all. Then the environment."""
    folder = project / ".claude"
    files = [Path(status.file), folder / "settings.json", folder / "settings.local.json", CLAUDE_MANAGED]
    for file in files if status.scope is ConfigScope.USER else files[2:]:
        other = _read_json(file, "env", PREFIX)
        if other is not None and other != status.shell:
            status.problems.append(f"{file} sets {PREFIX} to {other!r}, which wins here")
        if status.approvals and _read_json(file, "disableAllHooks") is True:
            status.problems.append(f"{file} sets disableAllHooks, so permission requests do not reach the inbox")


def _check_codex(status: AgentStatus, environ: Mapping[str, str], project: Path) -> None:
    config = Path(environ.get("CODEX_HOME") or Path(environ.get("HOME", "~"), ".codex").expanduser()) / "config.toml"
    try:
        settings: JsonObject = tomllib.loads(config.read_text("utf-8"))
    except FileNotFoundError:
        settings = {}
    except (OSError, ValueError) as error:
        status.problems.append(f"{config} cannot be read: {error}")
        return
    try:
        if settings.get("features", {}).get("hooks") is False:
            status.problems.append(f"{config} sets features.hooks to false")
        projects = settings.get("projects", {})
        known = [str(each) for each in (project, *project.parents) if str(each) in projects]
        is_trusted = bool(known) and projects[known[0]].get("trust_level") == "trusted"
        if status.scope is ConfigScope.PROJECT and not is_trusted:
            status.problems.append("Codex reads the hooks of a project only where it trusts the project")
        status.trusted = _is_trusted(Path(status.file), settings)
    except (AttributeError, TypeError):
        status.problems.append(f"{config} has a value where Codex has a table")
        return
    if not status.trusted:
        status.problems.append("not trusted: run /hooks in Codex")


def _is_trusted(file: Path, settings: JsonObject) -> bool:
    """Return whether Codex has the hash of our hook as it is now."""
    editor = ConfigEditor(file, "Codex", file.read_text("utf-8"), AGENTS["codex"].syntax)
    (entry,) = every_entry(AGENTS["codex"])
    path = find_ours(editor, entry) or ()
    place, hook = (*path[len(entry.path) :: 2], 0)[:2]
    states = settings.get("hooks", {}).get("state", {})
    state = states.get(f"{os.path.abspath(file)}:pre_tool_use:{place}:{hook}", {})
    wanted = codex_hash(_group_of(editor, entry, path))
    return state.get("enabled", True) is not False and state.get("trusted_hash") == wanted


def codex_hash(group: JsonObject) -> str:
    """Return the hash by which Codex remembers that a hook was reviewed."""
    hooks = [{"async": False, **hook} for hook in group["hooks"]]
    content = {"event_name": "pre_tool_use", "hooks": hooks, "matcher": group.get("matcher")}
    compact = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(compact.encode()).hexdigest()}"


def _check_gemini(status: AgentStatus, environ: Mapping[str, str], project: Path) -> None:
    status.conditions.append("Gemini runs hooks only in folders that it trusts")
    system = Path(environ.get("GEMINI_CLI_SYSTEM_SETTINGS_PATH") or GEMINI_SYSTEM)
    for file in dict.fromkeys((Path(status.file), project / ".gemini" / "settings.json", system)):
        if _read_json(file, "hooksConfig", "enabled") is False:
            status.problems.append(f"{file} sets hooksConfig.enabled to false")
        disabled = _read_json(file, "hooksConfig", "disabled")
        if isinstance(disabled, list) and HOOK_NAME in disabled:
            status.problems.append(f"{file} has {HOOK_NAME} in hooksConfig.disabled")


def _check_opencode(status: AgentStatus, environ: Mapping[str, str], project: Path) -> None:
    if environ.get("OPENCODE_PURE"):
        status.problems.append("OPENCODE_PURE is set: opencode loads no plugins")
    if status.scope is ConfigScope.PROJECT and environ.get("OPENCODE_DISABLE_PROJECT_CONFIG"):
        status.problems.append("OPENCODE_DISABLE_PROJECT_CONFIG is set")


def _check_copilot(status: AgentStatus, environ: Mapping[str, str], project: Path) -> None:
    if status.scope is ConfigScope.PROJECT:
        status.conditions.append("Copilot reads the hooks of a project only where it trusts the folder")
    home = home_of(environ, "COPILOT_HOME", ".copilot")
    settings = project / ".github" / "copilot" / "settings.json"
    for file in (Path(status.file), home / "settings.json", home / "config.json", settings):
        if _read_json(file, "disableAllHooks") is True:
            status.problems.append(f"{file} sets disableAllHooks")


_CHECKS = {
    "claude": _check_claude,
    "codex": _check_codex,
    "copilot": _check_copilot,
    "gemini": _check_gemini,
    "opencode": _check_opencode,
}
