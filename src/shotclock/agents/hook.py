"""`shotclock agent hook`: called by an agent before each shell command, or when it asks for a permission.

It imports little, because every command waits for it. A hook that rewrites commands never blocks one: if anything is
unexpected, it prints nothing, and the command runs as it is. A hook that approves denies instead.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable

from ..commands.shell_limits import note_command
from ..core.value_types import JsonObject
from ..terminal.output import write_quietly

ANCESTORS = 6  # processes above the hook that may be Copilot: a shell, node, its launcher
RULE_DECISIONS = ("forbidden", "prompt")
HELP = """\
Usage: shotclock agent hook NAME SHELL [--approvals]

Answer a hook of an agent, whose request is read from stdin. `shotclock agent install` writes this call.
"""
CODEX_SYSTEM = "/etc/codex"
# One word, as `shlex.quote` and `quote_for_gemini` write it.
_QUOTED_WORD = r"""(?:[\w@%+=:,./-]+|'[^']*'(?:"'"'[^']*')*)"""
_GEMINI_WORD = r"""(?:"(?:[^"\\$`]|\\["\\$])*"|'\\*`')+"""
LONGEST_WORD = 120_000  # bytes of a rewritten command; Linux starts nothing with a word of 128 KiB


def main(words: list[str]) -> int:
    name, shell = (*words, "", "")[:2]
    if name in ("--help", "-h"):
        write_quietly(sys.stdout, HELP)
        return 0
    if "--approvals" in words:
        from ._approval_hook import decide

        return decide(name)
    try:
        answer = REWRITES[name](json.loads(sys.stdin.buffer.read()), shell)
        if answer is not None and os.access(shell, os.X_OK):
            write_quietly(sys.stdout, json.dumps(answer) + "\n")
    except Exception:  # an agent's command must run, with or without us
        pass
    return 0


def quote_for_gemini(text: str) -> str:
    """Quote a word so that Gemini's reader of `bash -c` finds the same text as the shell.

    It reads double quotes, except for a backslash before a backquote, and takes a quote after two backslashes for text.
    So a backquote is in single quotes, together with the backslashes before it.
    """
    pieces = re.split(r"(\\*`)", text)
    for place, piece in enumerate(pieces):
        pieces[place] = f"\"'{piece}'\"" if place % 2 else re.sub(r'[\\"$]', r"\\\g<0>", piece)
    return f'"{"".join(pieces)}"'


def note_claude(request: JsonObject, shell: str) -> None:
    """Claude Code has a setting for its shell: the command stays as it is."""
    arguments, session = request["tool_input"], os.environ.get("CLAUDE_CODE_SESSION_ID", "")
    note_command(session, arguments["command"], in_background=arguments.get("run_in_background") is True)


def rewrite_gemini(request: JsonObject, shell: str) -> JsonObject | None:
    arguments = request["tool_input"]
    if request["tool_name"] != "run_shell_command":
        return None
    if _is_wrapped(arguments["command"], f"{{ {shell}", _GEMINI_WORD, "; }"):
        return None
    # Gemini removes a shell around the whole command before it runs it, and inside braces only to check its rules.
    command = _checked(f"{{ {shell} -c {quote_for_gemini(arguments['command'])}; }}")
    note_command("", arguments["command"], in_background=arguments.get("is_background") is True)
    changed = {**arguments, "command": command}
    return {"hookSpecificOutput": {"hookEventName": "BeforeTool", "tool_input": changed}}


def rewrite_copilot(request: JsonObject, shell: str) -> JsonObject | None:
    arguments = request["toolArgs"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if request["toolName"] != "bash" or _is_wrapped(arguments["command"], shell):
        return None
    if _has_denials(request.get("cwd") or os.getcwd()):
        return None
    changed = {**arguments, "command": _wrap(shell, arguments["command"])}
    note_command(request.get("sessionId", ""), arguments["command"], in_background=arguments.get("mode") == "async")
    return {"modifiedArgs": changed}


def rewrite_codex(request: JsonObject, shell: str) -> JsonObject | None:
    """Codex takes a rewritten command only with `allow`; a command that a rule may stop is left to the rule."""
    command = request["tool_input"]["command"]
    if request["tool_name"] != "Bash" or _is_wrapped(command, shell):
        return None
    if _words(command) & _ruled_words(request.get("cwd") or os.getcwd()):
        return None
    changed = {**request["tool_input"], "command": _wrap(shell, command)}
    answer = {"hookEventName": "PreToolUse", "permissionDecision": "allow", "updatedInput": changed}
    return {"hookSpecificOutput": answer}


REWRITES: dict[str, Callable[[JsonObject, str], JsonObject | None]] = {
    "claude": note_claude,
    "codex": rewrite_codex,
    "copilot": rewrite_copilot,
    "gemini": rewrite_gemini,
}


def _wrap(shell: str, command: str) -> str:
    return _checked(f"{shell} -c {shlex.quote(command)}")


def _checked(command: str) -> str:
    """Return the command. Raises ValueError where its quotes have made it too long to run."""
    if len(command.encode("utf-8", "surrogatepass")) > LONGEST_WORD:
        raise ValueError("too long")
    return command


def _is_wrapped(command: str, shell: str, word: str = _QUOTED_WORD, end: str = "") -> bool:
    """Return whether the whole command is as a hook writes it: one word for one shell. Anything else could escape."""
    return re.fullmatch(rf"{re.escape(shell)} -c {word}{end}", command) is not None


def _words(text: str) -> set[str]:
    """Return the words of a command, and the names of the programs that it gives by their paths."""
    joined = re.sub(r"\\\n|[\"'\\]", "", text)  # `r"m"` is `rm` for Codex, too
    words = re.findall(r"[^\s;&|()<>`$\"'\\]+", f"{text} {joined}")
    return {*words, *map(os.path.basename, words)}


def _ruled_words(folder: str) -> set[str]:
    """Return the words of all rules of Codex that forbid or ask, for the user and for the folders above this one."""
    home = os.environ.get("CODEX_HOME") or os.path.expanduser("~/.codex")
    places = [home, CODEX_SYSTEM]
    while folder != os.path.dirname(folder):
        places.append(os.path.join(folder, ".codex"))
        folder = os.path.dirname(folder)
    files = [os.path.join(CODEX_SYSTEM, "requirements.toml")]
    for rules in (os.path.join(place, "rules") for place in places):
        names = os.listdir(rules) if os.path.isdir(rules) else ()
        files += [os.path.join(rules, name) for name in names if name.endswith(".rules")]
    found: set[str] = set()
    for path in filter(os.path.exists, files):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if any(decision in text for decision in RULE_DECISIONS):
            found.update(*(match.split() for match in re.findall(r"[\"']([^\"'\n]*)[\"']", text)))
    return found


def _has_denials(folder: str) -> bool:
    """Return whether Copilot has rules that deny commands or URLs: by its command line, or in its settings."""
    home = os.environ.get("COPILOT_HOME") or os.path.expanduser("~/.copilot")
    project = os.path.join(folder, ".github", "copilot")
    for place, name in ((home, "settings.json"), (home, "config.json"), (project, "settings.json")):
        if _denies_urls(os.path.join(place, name)):
            return True
    return _denies_urls(os.path.join(project, "settings.local.json")) or _was_started_with_denials(os.getppid())


def _denies_urls(file: str) -> bool:
    if not os.path.exists(file):
        return False
    with open(file, encoding="utf-8") as opened:
        return re.search(r'"denied(?:Urls|_urls)"\s*:\s*\[\s*[^\s\]]', opened.read()) is not None


def _was_started_with_denials(pid: int) -> bool:
    for _ in range(ANCESTORS):
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            if any(word.startswith(("--deny-tool", "--deny-url")) for word in file.read().split("\0")):
                return True
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
        if pid <= 1:
            break
    return False
