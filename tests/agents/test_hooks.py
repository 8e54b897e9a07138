"""The hooks that rewrite commands, as an agent calls them before each one."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.agents import hook as agent_hook
from shotclock.agents.hook import quote_for_gemini
from tests.command_line import SHOTCLOCK, SOON_S

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]


@pytest.fixture(autouse=True)
def home(user_home: Path) -> Path:
    return user_home


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that gives a hook its input and returns its answer, or None."""

    def call(agent: str, request: object, *, shell: str = "", **env: str) -> Any:
        (tmp_path / "in").write_bytes(request if isinstance(request, bytes) else json.dumps(request).encode())
        shell = shell or str(tmp_path / "bin" / "shotclock-sh")
        with monkeypatch.context() as patch, open(tmp_path / "in") as given, open(tmp_path / "out", "w") as answer:
            patch.setattr(sys, "stdin", given)
            patch.setattr(sys, "stdout", answer)
            for name, text in env.items():
                patch.setenv(name, text)
            assert agent_hook.main([agent, shell]) == 0
        written = (tmp_path / "out").read_bytes()
        return json.loads(written) if written else None

    return call


def run_in_shell(command: str) -> str:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=SOON_S).stdout


NASTY = "printf '%s|' 'it''s' \"a b\" `echo back` $(echo sub) \\$x; echo \"$((1+1))\" # done"


def test_each_rewriting_hook_keeps_the_meaning_and_the_other_arguments(hook: Any) -> None:
    told = run_in_shell(NASTY)
    tool_input = {"command": NASTY, "description": "d", "is_background": False}
    base = {"session_id": "s", "transcript_path": "", "cwd": "/tmp", "timestamp": "t"}
    request = {**base, "hook_event_name": "BeforeTool", "tool_name": "run_shell_command", "tool_input": tool_input}
    answer = hook("gemini", request)["hookSpecificOutput"]
    assert (set(answer), answer["hookEventName"]) == ({"hookEventName", "tool_input"}, "BeforeTool")
    assert {**answer["tool_input"], "command": NASTY} == tool_input
    assert run_in_shell(answer["tool_input"]["command"]) == told
    request = {"sessionId": "s", "timestamp": 1, "cwd": "/tmp", "toolName": "bash"}
    for arguments in ({"command": NASTY, "description": "d"}, json.dumps({"command": NASTY, "description": "d"})):
        answer = hook("copilot", {**request, "toolArgs": arguments})
        assert set(answer) == {"modifiedArgs"}, "no decision"
        assert answer["modifiedArgs"]["description"] == "d"
        assert run_in_shell(answer["modifiedArgs"]["command"]) == told
    request = {**base, "hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": {"command": NASTY}}
    answer = hook("codex", {**request, "turn_id": "1", "model": "m"})["hookSpecificOutput"]
    assert (answer["hookEventName"], answer["permissionDecision"]) == ("PreToolUse", "allow")
    assert run_in_shell(answer["updatedInput"]["command"]) == told


def test_quoting_for_gemini_is_plain_double_quotes_around_any_text() -> None:
    for text in (NASTY, "a\nb", "\\", '"', "`", "$x", "!!", "'", "\\`", '\\"$', "é"):
        quoted = quote_for_gemini(text)
        assert run_in_shell(f"printf %s {quoted}") == text
        assert (quoted[0], quoted[-1]) == ('"', '"')


def test_gemini_finds_the_command_after_an_escaped_backquote() -> None:
    """Gemini CLI 0.61.0 reads no further where a quote follows two backslashes."""
    assert quote_for_gemini("echo \\`; touch x") == '"echo "\'\\`\'"; touch x"'
    assert quote_for_gemini("a\\\\`$x") == '"a"\'\\\\`\'"\\$x"'


def test_a_hook_with_a_surprising_input_prints_nothing(hook: Any) -> None:
    for agent in ("gemini", "copilot", "codex"):
        for request in (b"", b"not json", b"\xff", [], {}, {"tool_name": "run_shell_command"}, {"toolName": "bash"}):
            assert hook(agent, request) is None
    assert hook("nobody", {}) is None
    other = {"hook_event_name": "BeforeTool", "tool_name": "write_file", "tool_input": {"command": "x"}}
    assert hook("gemini", other) is None
    assert hook("copilot", {"toolName": "view", "toolArgs": {"command": "x"}}) is None
    good = {"tool_name": "run_shell_command", "tool_input": {"command": "x"}}
    assert hook("gemini", good, shell="/gone/bash") is None, "a removed program stops nothing"


def test_a_wrapped_command_is_not_wrapped_again(hook: Any) -> None:
    request = {"tool_name": "run_shell_command", "tool_input": {"command": "ls"}}
    wrapped = hook("gemini", request)["hookSpecificOutput"]["tool_input"]
    assert hook("gemini", {**request, "tool_input": wrapped}) is None


def test_the_hook_of_claude_code_says_nothing_and_leaves_a_note_of_a_command_in_the_background(
    hook: Any, home: Path
) -> None:
    notes = home / ".local/state/shotclock/background"
    request = {"tool_name": "Bash", "tool_input": {"command": "it's"}}
    in_background = {"tool_name": "Bash", "tool_input": {"command": "it's", "run_in_background": True}}
    for given, count in ((request, 0), (in_background, 1), (in_background, 1), (request, 0), (in_background, 1)):
        assert hook("claude", given, CLAUDE_CODE_SESSION_ID="s") is None
        assert len(list(notes.iterdir()) if notes.exists() else ()) == count
    for agent, given in (("claude", in_background), ("gemini", {**in_background, "tool_name": "run_shell_command"})):
        closed = hook(agent, given, SHOTCLOCK_HOME="/proc/closed")
        assert (closed is None) == (agent == "claude"), "where no note can be left, the command is wrapped all the same"
    assert hook("claude", request, CLAUDE_CODE_SESSION_ID="another") is None
    assert len(list(notes.iterdir())) == 1


def test_only_a_command_exactly_as_a_hook_writes_it_is_taken_for_wrapped(hook: Any, home: Path) -> None:
    def rewrite(agent: str, command: str, **more: object) -> str | None:
        arguments = {"command": command, **more}
        if agent == "copilot":
            answer = hook(agent, {"toolName": "bash", "toolArgs": arguments})
            return None if answer is None else answer["modifiedArgs"]["command"]
        tool = "Bash" if agent == "codex" else "run_shell_command"
        answer = hook(agent, {"tool_name": tool, "tool_input": arguments, "cwd": str(home)})
        output = None if answer is None else answer["hookSpecificOutput"]
        return None if output is None else (output.get("updatedInput") or output["tool_input"])["command"]

    background: dict[str, dict[str, object]] = {"gemini": {"is_background": True}, "copilot": {"mode": "async"}}
    for agent in ("codex", "gemini", "copilot"):
        for command in (NASTY, "ls", "it's", "\\`\\", "a\nb", ""):
            wrapped = rewrite(agent, command)
            assert wrapped is not None and run_in_shell(wrapped) == run_in_shell(command)
            assert rewrite(agent, wrapped) is None, "it is not wrapped again"
            assert rewrite(agent, command, **background.get(agent, {})) == wrapped, "its rules see nothing else"
        wrapped = rewrite(agent, "true x")
        assert wrapped is not None
        added = ("; setsid sleep 600 &", " & sleep 600", "\nsleep 600", " $(sleep 600)")
        inside = {
            "gemini": ('true"; sleep 600 "', "$(sleep 600)", "`sleep 600`", 'true\\\\"; sleep 600; "'),
            "": ("true' 'x'; sleep 600 '", "'; sleep 600; echo '", "'\"'$(sleep 600)'\"'", "'\"'\"; sleep 600; \"'\"'"),
        }
        escapes = [f"{wrapped}{more}" for more in added]
        escapes += [wrapped.replace("true", more) for more in inside.get(agent, inside[""])]
        escapes += [f"FOO=1 {wrapped}", wrapped.replace(" -c", " --timeout 0 -c"), f" {wrapped}", f"{wrapped} "]
        for command in escapes:
            assert rewrite(agent, command) is not None, f"{agent} would run this without limits: {command}"


def test_commands_with_a_word_of_a_codex_rule_are_left_to_the_rule(hook: Any, home: Path) -> None:
    rules = home / ".codex/rules"
    rules.mkdir(parents=True)
    (rules / "default.rules").write_text('prefix_rule(pattern=["git", ["push", "fetch"]], decision="forbidden")\n')
    (rules / "allowed.rules").write_text('prefix_rule(pattern=["make"], decision="allow")\n')
    (home / "project/.codex/rules").mkdir(parents=True)
    (home / "project/.codex/rules/p.rules").write_text('prefix_rule(pattern=["rm"], decision="prompt")\n')
    for command, is_wrapped in (
        ("make all", True),
        ("echo git-like", True),
        ("git push", False),
        ("cd x&&git status", False),
        ("echo $(git push)", False),
        ("(rm x)", False),
        ("/bin/rm x", False),
        ("'rm' x", False),
        ("r\\m x", False),
        ('r"m" x; true', False),
        ("r''m x", False),
        ("r\\\nm x", False),
        ("echo 'a' \"b\"", True),
    ):
        request = {"tool_name": "Bash", "tool_input": {"command": command}, "cwd": str(home / "project")}
        assert (hook("codex", request) is not None) == is_wrapped, command


def test_rules_of_an_administrator_of_codex_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_hook, "CODEX_SYSTEM", str(tmp_path))
    rule = '{ pattern = [{ any_of = ["rm", "dd"] }], decision = "forbidden" }'
    (tmp_path / "requirements.toml").write_text(f"[rules]\nprefix_rules = [{rule}]\n")
    for command, is_wrapped in (("ls", True), ("dd if=x", False)):
        request = {"tool_name": "Bash", "tool_input": {"command": command}}
        assert (agent_hook.rewrite_codex(request, "/bin/sh") is not None) == is_wrapped


def test_the_locale_of_a_hook_does_not_change_the_command(shotclock: Any, tmp_path: Path) -> None:
    text = json.dumps({"tool_name": "run_shell_command", "tool_input": {"command": "echo é"}}, ensure_ascii=False)
    words = ("agent", "hook", "gemini", str(tmp_path / "bin" / "shotclock-sh"))
    ran = shotclock(*words, input=text.encode(), env={"PYTHONIOENCODING": "ascii"})
    assert "echo é" in ran.json()["hookSpecificOutput"]["tool_input"]["command"]


def test_a_command_that_would_be_too_long_with_its_quotes_is_left_alone(hook: Any) -> None:
    """Linux starts no program with a word of 128 KiB."""
    command = "cat > /dev/null <<'E'\n" + "it's\n" * 20_000 + "E\n"
    assert len(command) < 128 * 1024
    assert hook("copilot", {"toolName": "bash", "toolArgs": {"command": command}}) is None
    command = command.replace("'", "$")
    assert hook("gemini", {"tool_name": "run_shell_command", "tool_input": {"command": command * 3}}) is None


def test_where_copilot_has_deny_rules_commands_are_left_alone(tmp_path: Path, home: Path) -> None:
    request = json.dumps({"toolName": "bash", "toolArgs": {"command": "ls"}})
    agent, settings = tmp_path / "copilot", home / ".copilot/settings.json"
    settings.parent.mkdir()
    words = shlex.join([*SHOTCLOCK, "agent", "hook", "copilot", str(tmp_path / "bin/shotclock-sh")])
    agent.write_text(f"#!/bin/bash\n{words}\ntrue\n")
    agent.chmod(0o755)
    for options, text, is_wrapped in (
        (("--deny-tool", "shell(rm)"), "{}", False),
        (("--deny-tool=shell",), "{}", False),
        (("--deny-url", "example.org"), "{}", False),
        ((), '{"deniedUrls": ["example.org"]}', False),
        ((), '{"denied_urls": ["example.org"]}', False),
        ((), '// managed\n{\n  "deniedUrls": [\n    "example.org"]}', False),
        ((), '{"deniedUrls": [ ], "allowedUrls": ["example.org"]}', True),
        (("--allow-tool", "shell(rm)"), "{}", True),
    ):
        settings.write_text(text)
        ran = subprocess.run([agent, *options], input=request, capture_output=True, text=True, timeout=SOON_S)
        assert bool(ran.stdout) == is_wrapped, (options, text)
