"""Words of other tools, and what to write here."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

# Keys of workflow files.
KEYS = {
    name: key
    for key, names in {
        "exec": "run script cmd command shell",
        "type": "uses",
        "if": "when",
        "depends_on": "after",
        "steps": "jobs tasks",
        "on_fail": "retry retries",
        "timeout": "timeout_ms timeout_seconds",
        "prompt": "question",
        "workflow": "file",
    }.items()
    for name in names.split()
}
KINDS = {
    name: hint
    for hint, names in {
        "did you mean 'http_client'?": "http fetch",
        "did you mean 'command'? It has `shell: bash`": "bash",
        "did you mean 'command'?": "shell script exec",
        "a 'command' with `exec: echo …` does that": "log logger",
        "a 'command' with `exec: 'true'` does that": "noop",
        "did you mean 'human-input'?": "human input",
        "did you mean 'git-checkout'?": "git checkout",
    }.items()
    for name in names.split()
}

# Commands and options, by the command before them.
_VERBS = ("click", "open", "press", "read", "screenshot", "scroll", "sleep", "snapshot", "type", "wait", "wait-for-nav")
COMMANDS: dict[str, dict[str, str]] = {
    "shotclock": {
        **{verb: f"write shotclock ui {verb}" for verb in _VERBS},
        "execute": "write shotclock ui exec",
        "tools": "write `shotclock mcp tools`",
        "call": "write `shotclock mcp call`",
        "calls": "write `shotclock mcp log`",
        **dict.fromkeys(("--check", "--config"), "write shotclock run FLOW"),
    },
    "shotclock ui exec": {"best-effort": 'set "mode": "best_effort" in the payload'},
}
# Options; the first is one that the command has.
_OPTIONS = {
    "--desc": ("--label", "write --label"),
    "--coordinate": ("--at", "write --at X,Y"),
    "--selector": ("--label", "write --text, --id, …"),
    "--check": ("--only", "write --only STEP,STEP"),
    "--config": ("--only", "write shotclock run FLOW"),
    "--debug": ("--only", "write --follow, or --events FILE"),
    "--max-parallelism": ("--only", "write `max_parallelism` in FLOW"),
    "--fail-fast": ("--only", "write `fail_fast` in FLOW"),
}

# Members of FastMCP.
_STATE = "keep state in the lifespan, or in a database"
_FUNCTIONS = "call the function that makes it"
_SESSIONS = "read ctx.caller for the client, its session and the claims of its token, and ctx.headers"
CONTEXT = {
    **dict.fromkeys(("get_state", "set_state", "delete_state"), _STATE),
    **dict.fromkeys(("read_resource", "list_resources", "get_prompt", "list_prompts"), _FUNCTIONS),
    **dict.fromkeys(("session", "session_id", "client_id", "request_context", "transport"), _SESSIONS),
    "fastmcp": "import the App from its module",
}
APP = {
    "tool": "write @app.command",
    "add_tool": "write app.command(function)",
    "run": "write app.serve_mcp(), or app() for the command line",
    "http_app": "write app.serve_mcp(http='HOST:PORT')",
    "mount": "put the commands into one App",
    "custom_route": "an App serves MCP alone",
}


class ExplainsMembers:
    """A class that says what to write in place of a member that it does not have."""

    _instead_of: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers report unknown members themselves

        def __getattr__(self, name):
            instead = self._instead_of.get(name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}" + (f": {instead}" if instead else "")
            )


def explain(name: str, known: Collection[str], table: str = "", words: Iterable[str] = ()) -> tuple[str | None, str]:
    """Return the known name that was probably meant, and what to write. `words` stand before it."""
    of_table = COMMANDS.get(table, {})
    if (hint := next((of_table[word] for word in (name, *words) if word in of_table), "")) != "":
        return None, hint
    mark, hint = _OPTIONS.get(name, ("", ""))
    if mark in known:
        return (mark if hint == f"write {mark}" else None), hint
    names = {each.lstrip("-"): each for each in known}  # options share them
    close = difflib.get_close_matches(name.lstrip("-").lower(), names, n=1)
    return (names[close[0]], f"did you mean {names[close[0]]}?") if close else (None, "")
