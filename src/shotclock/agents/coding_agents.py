"""The coding agents that `shotclock agent` knows: their configuration files, and the entries that put us in front.

Every entry was seen to work with the agent itself; `make conformance` repeats that. Three agents have a setting for
their shell, or look into a nested shell, so the user's own rules are applied to the command itself:

    claude      CLAUDE_CODE_SHELL_PREFIX: the rules are checked first
    opencode    a plugin sets `shell`: the rules are checked first
    gemini      a hook rewrites the command to `{ …/bash -c "…"; }`, into which Gemini's policy engine looks

Copilot and Codex check the rewritten command only, so they need --accept-allow.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..core.errors import Failure
from ..core.value_types import value
from . import json_text

HOOK_TIMEOUT_S = 10  # a hook takes some 50 ms; a machine without memory exhausts this
APPROVAL_TIMEOUT_S = 600  # of the agent; the hook itself answers earlier
PREFIX = "CLAUDE_CODE_SHELL_PREFIX"
HOOK_NAME = "shotclock"


class ConfigScope(StrEnum):
    USER = "user"
    PROJECT = "project"


@value
class Programs:
    """Absolute paths of our own programs."""

    shotclock: str
    shell: str
    bash: str
    """A link to `shell` with a name that agents know as a shell."""


@value
class ConfigEntry:
    """A value in a JSON file: an element of a list, or the value of a key."""

    path: tuple[str, ...]
    content: Any
    in_list: bool = True


@value
class CodingAgent:
    """A coding agent, and how its commands get to us."""

    name: str
    title: str
    file: Callable[[ConfigScope, Mapping[str, str], Path], Path]
    """Returns the file for a scope, the environment and the project's folder."""
    entries: Callable[[Programs], tuple[ConfigEntry, ...]] = lambda programs: ()
    approvals: Callable[[Programs], tuple[ConfigEntry, ...]] | None = None
    plugin: Callable[[Programs], str] | None = None
    """Returns the text of a file of our own, instead of entries."""
    fresh: str = "{}\n"
    """The text of a new file."""
    notes: tuple[str, ...] = ()
    needs_acceptance: str = ""
    """The meaning of --accept-allow, if it is needed."""
    reads_comments: bool = False
    reads_byte_order_mark: bool = False

    def parse(self, text: str) -> Any:
        """Return the data of its file as it reads it itself. Raises ValueError and RecursionError."""
        text = json_text.without_comments(text) if self.reads_comments else text
        text = text.removeprefix("\ufeff") if self.reads_byte_order_mark else text
        return json.loads(text)


def home_of(environ: Mapping[str, str], variable: str, *default: str) -> Path:
    """Return the folder that a variable of the agent names, else this one below the home."""
    named = environ.get(variable, "")
    return Path(named) if named else Path(environ.get("HOME") or os.path.expanduser("~"), *default)


def hook_command(programs: Programs, name: str, shell: str, *more: str) -> str:
    return shlex.join([programs.shotclock, "agent", "hook", name, shell, *more])


def _is_our_hook(hook: object) -> bool:
    """Return whether a hook runs `shotclock agent hook`, perhaps of another installation."""
    command = (hook.get("command") or hook.get("bash")) if isinstance(hook, dict) else None
    try:
        words = shlex.split(command) if isinstance(command, str) else []
    except ValueError:
        return False
    return words[1:3] == ["agent", "hook"] and os.path.basename(words[0]) == "shotclock"


def find_ours(text: str, entry: ConfigEntry) -> json_text.Path | None:
    """Return the path of our entry of this kind, or None. In a group with hooks of the user it is the hook alone."""
    found = json_text.read(text, entry.path)
    if not entry.in_list:
        return entry.path if isinstance(found, str) and os.path.basename(found) == "shotclock-sh" else None
    for place, each in reversed(list(enumerate(found if isinstance(found, list) else ()))):
        if _is_our_hook(each):
            return (*entry.path, place)
        hooks = each.get("hooks") if isinstance(each, dict) else None
        ours = [at for at, hook in enumerate(hooks if isinstance(hooks, list) else ()) if _is_our_hook(hook)]
        if ours:
            return (*entry.path, place) if len(each["hooks"]) == 1 else (*entry.path, place, "hooks", ours[-1])
    return None


def put_entry(text: str, entry: ConfigEntry) -> str:
    """Return the text with this entry. Raises Failure where another value of the user is in its place."""
    path = find_ours(text, entry)
    found = json_text.read(text, entry.path)
    if path is None and not entry.in_list and found is not None:
        name = ".".join(entry.path)
        raise Failure("CONFLICT", f"{name} is {found!r} already", suggestion=f"remove {name} first")
    is_inside = path is not None and len(path) > len(entry.path) + 1
    content = entry.content["hooks"][0] if is_inside else entry.content
    if path is not None and json_text.read(text, path) == content:
        return text
    if path is None:
        path = (*entry.path, len(found) if isinstance(found, list) else 0) if entry.in_list else entry.path
    try:
        return json_text.put(text, path, content)
    except ValueError as error:
        raise Failure("CONFLICT", str(error), suggestion="correct the file first") from None


def drop_entry(text: str, entry: ConfigEntry) -> str:
    while (path := find_ours(text, entry)) is not None:
        text = json_text.drop(text, path)
    return text


def _group(command: str, **more: object) -> dict[str, object]:
    """Return a group of one hook, as Claude Code, Codex and Gemini CLI have it. `matcher` belongs to the group."""
    outside = {"matcher": more.pop("matcher")} if "matcher" in more else {}
    return {**outside, "hooks": [{"type": "command", "command": command, **more}]}


def _claude_file(scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
    folder = home_of(environ, "CLAUDE_CONFIG_DIR", ".claude") if scope is ConfigScope.USER else project / ".claude"
    return folder / "settings.json"


def _claude_entries(programs: Programs) -> tuple[ConfigEntry, ...]:
    """The hook only tells the shell which commands are put in the background; the rules are checked on the command."""
    command = hook_command(programs, "claude", programs.shell)
    group = _group(command, matcher="Bash", timeout=HOOK_TIMEOUT_S)
    return ConfigEntry(("env", PREFIX), programs.shell, in_list=False), ConfigEntry(("hooks", "PreToolUse"), group)


def _claude_approvals(programs: Programs) -> tuple[ConfigEntry, ...]:
    command = hook_command(programs, "claude", programs.shell, "--approvals")
    group = _group(command, timeout=APPROVAL_TIMEOUT_S, onFailure="block")
    return (ConfigEntry(("hooks", "PermissionRequest"), group),)


def _codex_file(scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
    folder = home_of(environ, "CODEX_HOME", ".codex") if scope is ConfigScope.USER else project / ".codex"
    return folder / "hooks.json"


def _codex_entries(programs: Programs) -> tuple[ConfigEntry, ...]:
    command = hook_command(programs, "codex", programs.shell)
    return (ConfigEntry(("hooks", "PreToolUse"), _group(command, matcher="Bash", timeout=HOOK_TIMEOUT_S)),)


def _gemini_file(scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
    folder = home_of(environ, "GEMINI_CLI_HOME") if scope is ConfigScope.USER else project
    return folder / ".gemini" / "settings.json"


def _gemini_entries(programs: Programs) -> tuple[ConfigEntry, ...]:
    command = hook_command(programs, "gemini", programs.bash)
    group = _group(command, matcher="run_shell_command", name=HOOK_NAME, timeout=HOOK_TIMEOUT_S * 1000)
    return (ConfigEntry(("hooks", "BeforeTool"), group),)


def _opencode_file(scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
    user = home_of(environ, "XDG_CONFIG_HOME", ".config") / "opencode"
    return (user if scope is ConfigScope.USER else project / ".opencode") / "plugins" / "shotclock.js"


def _opencode_plugin(programs: Programs) -> str:
    return f"""\
// Written by `shotclock agent install opencode`; `shotclock agent remove opencode` deletes it.
// opencode runs its commands with this shell, after it has applied its permission rules.
import {{ existsSync }} from "node:fs"

const shell = {json.dumps(programs.shell)}
let own = ""

export const Shotclock = async () => ({{
  config: async (config) => {{
    if (config.shell !== shell) own = config.shell ?? ""
    if (existsSync(shell)) config.shell = shell
  }},
  "shell.env": async (input, output) => {{
    if (own.startsWith("/")) output.env.SHOTCLOCK_SHELL = own
  }},
}})
"""


def _copilot_file(scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
    folder = home_of(environ, "COPILOT_HOME", ".copilot") if scope is ConfigScope.USER else project / ".github"
    return folder / "hooks" / "shotclock.json"


def _copilot_entries(programs: Programs) -> tuple[ConfigEntry, ...]:
    # Copilot blocks every command where a hook fails, so a removed program must not.
    command = f"{hook_command(programs, 'copilot', programs.shell)} || true"
    return (ConfigEntry(("hooks", "preToolUse"), {"type": "command", "bash": command, "timeoutSec": HOOK_TIMEOUT_S}),)


def _copilot_approvals(programs: Programs) -> tuple[ConfigEntry, ...]:
    command = hook_command(programs, "copilot", programs.shell, "--approvals")
    hook = {"type": "command", "bash": command, "timeoutSec": APPROVAL_TIMEOUT_S}
    return (ConfigEntry(("hooks", "permissionRequest"), hook),)


AGENTS = {
    agent.name: agent
    for agent in (
        CodingAgent(
            "claude",
            "Claude Code",
            _claude_file,
            _claude_entries,
            _claude_approvals,
            reads_byte_order_mark=True,
            notes=("Your allow and deny rules are applied to the command itself, as before.",),
        ),
        CodingAgent(
            "codex",
            "Codex",
            _codex_file,
            _codex_entries,
            notes=(
                "Codex skips the hook without a word until you trust it: run /hooks in Codex.",
                "Commands with a word of a `forbidden` or `prompt` rule in rules/*.rules are left alone, so that Codex "
                "applies the rule to them.",
            ),
            needs_acceptance="Codex takes a rewritten command only together with the answer `allow`, and applies its "
            "rules to the rewritten command: it may run a command about which it would have asked you",
        ),
        CodingAgent(
            "gemini",
            "Gemini CLI",
            _gemini_file,
            _gemini_entries,
            reads_comments=True,
            notes=(
                "Gemini applies your deny and ask rules to the command inside `bash -c`.",
                "It asks about the whole `bash -c`, also where a rule allows the command inside it.",
            ),
        ),
        CodingAgent(
            "opencode",
            "opencode",
            _opencode_file,
            plugin=_opencode_plugin,
            notes=("Your permission rules are applied to the command itself, as before.",),
        ),
        CodingAgent(
            "copilot",
            "Copilot CLI",
            _copilot_file,
            _copilot_entries,
            _copilot_approvals,
            fresh='{\n  "version": 1\n}\n',
            notes=("Where Copilot has deny rules (--deny-tool, --deny-url, deniedUrls), commands are left alone.",),
            needs_acceptance="Copilot applies its rules to the rewritten command: rules for single commands, paths "
            "and URLs no longer match, and approving `shotclock-sh` for a session approves every command",
        ),
    )
}
