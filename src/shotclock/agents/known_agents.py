"""The one table of coding agents and MCP clients: their files, our entries in them, and their own limits.

Every entry for commands was seen to work with the agent itself; `make conformance` repeats that. Three agents have a
setting for their shell, or look into a nested shell, so the user's own rules are applied to the command itself:

    claude      CLAUDE_CODE_SHELL_PREFIX: the rules are checked first
    opencode    a plugin sets `shell`: the rules are checked first
    gemini      a hook rewrites the command to `{ …/bash -c "…"; }`, into which Gemini's policy engine looks

Copilot and Codex check the rewritten command only, so they need --accept-allow. The limits of MCP servers are those of
Codex 0.169, Gemini CLI 0.61 and Claude Code 2.1.326.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

from ..core.value_types import JsonObject, value
from ._json_text import JsonSyntax
from ._toml_text import TOML
from .config_editor import ConfigEntry, ConfigSyntax

HOOK_TIMEOUT_S = 10  # a hook takes some 50 ms; a machine without memory exhausts this
APPROVAL_TIMEOUT_S = 600  # of the agent; the hook itself answers earlier
CODEX_TOOL_LIMIT_MS = 300_000  # older ones have 60 or 120 s
GEMINI_TOOL_LIMIT_MS = 600_000
CLAUDE_LEAST_LIMIT_MS = 1000  # Claude Code ignores smaller ones
PREFIX = "CLAUDE_CODE_SHELL_PREFIX"
HOOK_NAME = "shotclock"

# A file with anything else is ignored as a whole by the program that reads it.
PLAIN_JSON = JsonSyntax()
CLAUDE_JSON = JsonSyntax(reads_byte_order_mark=True)
GEMINI_JSON = JsonSyntax(reads_comments=True)
EDITOR_JSON = JsonSyntax(reads_comments=True, reads_last_commas=True, reads_byte_order_mark=True)  # VS Code and Cursor


class ConfigScope(StrEnum):
    USER = "user"
    PROJECT = "project"

    @classmethod
    def of(cls, project: bool) -> ConfigScope:
        return cls.PROJECT if project else cls.USER


@value
class ConfigFile:
    """A file of a program: for its user, below a folder that a variable names, and for a project."""

    user: str
    project: str
    variable: str = ""
    default: str = ""
    """The folder below the home, where the variable is not set."""

    def path(self, scope: ConfigScope, environ: Mapping[str, str], project: Path) -> Path:
        home = home_of(environ, self.variable, self.default)
        return home / self.user if scope is ConfigScope.USER else project / self.project


@value
class Programs:
    """Absolute paths of our own programs."""

    shotclock: str
    shell: str
    bash: str
    """A link to `shell` with a name that agents know as a shell."""


@value
class CodingAgent:
    """A coding agent, and how its commands get to us."""

    name: str
    title: str
    file: ConfigFile
    entries: Callable[[Programs], tuple[ConfigEntry, ...]] = lambda programs: ()
    approvals: Callable[[Programs], tuple[ConfigEntry, ...]] | None = None
    plugin: Callable[[Programs], str] | None = None
    """Returns the text of a file of our own, instead of entries."""
    syntax: ConfigSyntax = PLAIN_JSON
    fresh: str = "{}\n"
    """The text of a new file."""
    notes: tuple[str, ...] = ()
    needs_acceptance: str = ""
    """The meaning of --accept-allow, if it is needed."""


@value
class McpClient:
    """A client of MCP servers, and where it finds them."""

    name: str
    title: str
    file: ConfigFile
    table: str = "mcpServers"
    limit_ms: Callable[[JsonObject], int | None] = lambda entry: None
    """Returns the client's own limit for a call to this server. None: it has none that is known."""
    syntax: ConfigSyntax = EDITOR_JSON
    fresh: str = "{}\n"


def home_of(environ: Mapping[str, str], variable: str, *default: str) -> Path:
    """Return the folder that a variable of the agent names, else this one below the home."""
    named = environ.get(variable, "")
    return Path(named) if named else Path(environ.get("HOME") or os.path.expanduser("~"), *default)


def hook_command(programs: Programs, name: str, shell: str, *more: str) -> str:
    return shlex.join([programs.shotclock, "agent", "hook", name, shell, *more])


def _group(command: str, **more: object) -> dict[str, object]:
    """Return a group of one hook, as Claude Code, Codex and Gemini CLI have it. `matcher` belongs to the group."""
    outside = {"matcher": more.pop("matcher")} if "matcher" in more else {}
    return {**outside, "hooks": [{"type": "command", "command": command, **more}]}


def _claude_entries(programs: Programs) -> tuple[ConfigEntry, ...]:
    """The hook only tells the shell which commands are put in the background; the rules are checked on the command."""
    command = hook_command(programs, "claude", programs.shell)
    group = _group(command, matcher="Bash", timeout=HOOK_TIMEOUT_S)
    return ConfigEntry(("env", PREFIX), programs.shell, in_list=False), ConfigEntry(("hooks", "PreToolUse"), group)


def _claude_approvals(programs: Programs) -> tuple[ConfigEntry, ...]:
    command = hook_command(programs, "claude", programs.shell, "--approvals")
    group = _group(command, timeout=APPROVAL_TIMEOUT_S, onFailure="block")
    return (ConfigEntry(("hooks", "PermissionRequest"), group),)


def _codex_entries(programs: Programs) -> tuple[ConfigEntry, ...]:
    command = hook_command(programs, "codex", programs.shell)
    return (ConfigEntry(("hooks", "PreToolUse"), _group(command, matcher="Bash", timeout=HOOK_TIMEOUT_S)),)


def _gemini_entries(programs: Programs) -> tuple[ConfigEntry, ...]:
    command = hook_command(programs, "gemini", programs.bash)
    group = _group(command, matcher="run_shell_command", name=HOOK_NAME, timeout=HOOK_TIMEOUT_S * 1000)
    return (ConfigEntry(("hooks", "BeforeTool"), group),)


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


def _copilot_entries(programs: Programs) -> tuple[ConfigEntry, ...]:
    # Copilot blocks every command where a hook fails, so a removed program must not.
    command = f"{hook_command(programs, 'copilot', programs.shell)} || true"
    return (ConfigEntry(("hooks", "preToolUse"), {"type": "command", "bash": command, "timeoutSec": HOOK_TIMEOUT_S}),)


def _copilot_approvals(programs: Programs) -> tuple[ConfigEntry, ...]:
    command = hook_command(programs, "copilot", programs.shell, "--approvals")
    hook = {"type": "command", "bash": command, "timeoutSec": APPROVAL_TIMEOUT_S}
    return (ConfigEntry(("hooks", "permissionRequest"), hook),)


def _read_limit(entry: JsonObject, key: str, unit_ms: int, least_ms: int = 1) -> int | None:
    found = entry.get(key)
    if not isinstance(found, int | float) or isinstance(found, bool):
        return None
    return int(found * unit_ms) if least_ms <= found * unit_ms < float("inf") else None


_GEMINI_FILE = ConfigFile(".gemini/settings.json", ".gemini/settings.json", "GEMINI_CLI_HOME")
_KNOWN: tuple[CodingAgent | McpClient, ...] = (
    CodingAgent(
        "claude",
        "Claude Code",
        ConfigFile("settings.json", ".claude/settings.json", "CLAUDE_CONFIG_DIR", ".claude"),
        _claude_entries,
        _claude_approvals,
        syntax=CLAUDE_JSON,
        notes=("Your allow and deny rules are applied to the command itself, as before.",),
    ),
    McpClient(
        "claude",
        "Claude Code",
        ConfigFile(".claude.json", ".mcp.json", "CLAUDE_CONFIG_DIR"),
        limit_ms=lambda entry: _read_limit(entry, "timeout", 1, CLAUDE_LEAST_LIMIT_MS),
        syntax=CLAUDE_JSON,
    ),
    CodingAgent(
        "codex",
        "Codex",
        ConfigFile("hooks.json", ".codex/hooks.json", "CODEX_HOME", ".codex"),
        _codex_entries,
        notes=(
            "Codex skips the hook without a word until you trust it: run /hooks in Codex.",
            "Commands with a word of a `forbidden` or `prompt` rule in rules/*.rules are left alone, so that Codex "
            "applies the rule to them.",
        ),
        needs_acceptance="Codex takes a rewritten command only together with the answer `allow`, and applies its "
        "rules to the rewritten command: it may run a command about which it would have asked you",
    ),
    McpClient(
        "codex",
        "Codex",
        ConfigFile("config.toml", ".codex/config.toml", "CODEX_HOME", ".codex"),
        "mcp_servers",
        lambda entry: _read_limit(entry, "tool_timeout_sec", 1000) or CODEX_TOOL_LIMIT_MS,
        TOML,
        fresh="",
    ),
    McpClient("cursor", "Cursor", ConfigFile(".cursor/mcp.json", ".cursor/mcp.json")),
    McpClient(
        "vscode",
        "VS Code",
        ConfigFile("Code/User/mcp.json", ".vscode/mcp.json", "XDG_CONFIG_HOME", ".config"),
        "servers",
    ),
    CodingAgent(
        "gemini",
        "Gemini CLI",
        _GEMINI_FILE,
        _gemini_entries,
        syntax=GEMINI_JSON,
        notes=(
            "Gemini applies your deny and ask rules to the command inside `bash -c`.",
            "It asks about the whole `bash -c`, also where a rule allows the command inside it.",
        ),
    ),
    McpClient(
        "gemini",
        "Gemini CLI",
        _GEMINI_FILE,
        limit_ms=lambda entry: _read_limit(entry, "timeout", 1) or GEMINI_TOOL_LIMIT_MS,
        syntax=GEMINI_JSON,
    ),
    CodingAgent(
        "opencode",
        "opencode",
        ConfigFile("opencode/plugins/shotclock.js", ".opencode/plugins/shotclock.js", "XDG_CONFIG_HOME", ".config"),
        plugin=_opencode_plugin,
        notes=("Your permission rules are applied to the command itself, as before.",),
    ),
    CodingAgent(
        "copilot",
        "Copilot CLI",
        ConfigFile("hooks/shotclock.json", ".github/hooks/shotclock.json", "COPILOT_HOME", ".copilot"),
        _copilot_entries,
        _copilot_approvals,
        fresh='{\n  "version": 1\n}\n',
        notes=("Where Copilot has deny rules (--deny-tool, --deny-url, deniedUrls), commands are left alone.",),
        needs_acceptance="Copilot applies its rules to the rewritten command: rules for single commands, paths "
        "and URLs no longer match, and approving `shotclock-sh` for a session approves every command",
    ),
)
AGENTS = {each.name: each for each in _KNOWN if isinstance(each, CodingAgent)}
CLIENTS = {each.name: each for each in _KNOWN if isinstance(each, McpClient)}
