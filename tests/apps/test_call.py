"""`shotclock mcp call` and `shotclock mcp tools`: one bounded question to a server, of which nothing is left."""

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Running, Seen, is_alive, wait_for
from tests.rows import row

pytestmark = pytest.mark.usefixtures("no_survivors")

SERVER = [sys.executable, str(Path(__file__).parents[1] / "wrap" / "scripted_server.py")]
# Two interpreters, one of which imports the SDK, on a busy machine. Only a hang runs this out.
ENDED_WITHIN_S = 40.0


@pytest.fixture
def ask(start: Callable[..., Running]) -> Callable[..., dict[str, Any]]:
    """A function that runs `shotclock …` off a terminal and returns its envelope."""

    def run(*words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        running = start(*words, env=env)
        running.ends(ENDED_WITHIN_S)
        envelope = running.envelope()
        assert running.process.returncode == envelope["meta"]["exit_code"]
        return envelope

    return run


def test_a_call_returns_the_content_of_the_result(ask: Callable[..., dict[str, Any]]) -> None:
    envelope = ask("mcp", "call", "echo", "--arg", "text=hello", "--", *SERVER)
    assert envelope["data"] == {"content": [{"type": "text", "text": "hello"}]}


def test_arguments_are_texts_json_or_one_object(ask: Callable[..., dict[str, Any]]) -> None:
    words = ("--json-args", '{"text": "a", "other": 1}', "--arg", "text:=[1, true]")
    assert ask("mcp", "call", "echo", *words, "--", *SERVER)["data"]["content"][0]["text"] == "[1, True]"


@pytest.mark.slow
def test_a_tool_that_hangs_is_answered_at_its_timeout(ask: Callable[..., dict[str, Any]]) -> None:
    envelope = ask("mcp", "call", "hang", "--timeout", "3s", "--", *SERVER)
    assert envelope["error"]["code"] == "TIMEOUT" and envelope["meta"]["ending"] == "killed"


def test_everything_that_the_server_started_is_gone(ask: Callable[..., dict[str, Any]]) -> None:
    envelope = ask("mcp", "call", "daemon", "--", *SERVER)
    daemon = int(envelope["data"]["content"][0]["text"])
    assert not is_alive(daemon) and envelope["meta"]["survivors"] == []


def test_a_signal_stops_the_call_and_the_server(start: Callable[..., Running], tmp_path: Path) -> None:
    record = tmp_path / "record"
    running = start("mcp", "call", "hang", "--", *SERVER, "--record", str(record))
    wait_for(lambda: record.exists() and b'"tools"' in record.read_bytes(), "the list of tools", ENDED_WITHIN_S)
    running.signal(signal.SIGTERM)
    assert running.ends(ENDED_WITHIN_S) == 143
    assert running.envelope()["error"]["code"] == "CANCELLED"


@pytest.mark.slow
def test_failures_have_their_codes(ask: Callable[..., dict[str, Any]]) -> None:
    table = {
        ("mcp", "call", "missing", "--", *SERVER): "UNKNOWN_OPERATION",
        ("mcp", "call", "crash", "--", *SERVER): "CONNECTION_LOST",
        ("mcp", "call", "echo", "--", "no-such-program"): "COMMAND_NOT_FOUND",
        ("mcp", "tools", "--", "no-such-program"): "COMMAND_NOT_FOUND",
        ("mcp", "tools", "--", *SERVER, "--exit-at-start", "3"): "CONNECT_FAILED",
        ("mcp", "tools", "--timeout", "3s", "--", *SERVER, "--mute", "tools/list"): "TIMEOUT",
    }
    for words, code in table.items():
        with row(words):
            assert ask(*words)["error"]["code"] == code


def test_tools_are_listed_whole(ask: Callable[..., dict[str, Any]]) -> None:
    tools = ask("mcp", "tools", "--", *SERVER)["data"]["tools"]
    assert tools[0] == {"name": "echo", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}


@pytest.mark.slow
def test_a_server_is_found_by_its_name_in_a_configuration(
    ask: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"command": "${PROGRAM}", "args": [SERVER[1], "${UNSET_WORD:---id-last}"], "env": {"A": "b"}}
    servers = {
        "scripted": entry,
        "remote": {"type": "sse", "url": "http://localhost/sse"},
        "odd": {"command": "x", "args": "y"},
    }
    (tmp_path / ".mcp.json").write_text(json.dumps({"mcpServers": servers}))
    (tmp_path / "vscode.json").write_text(json.dumps({"servers": {"scripted": {**entry, "command": SERVER[0]}}}))
    monkeypatch.chdir(tmp_path)
    env = {"PROGRAM": SERVER[0]}
    assert ask("mcp", "call", "scripted", "echo", "--arg", "text=a", env=env)["ok"]
    assert ask("mcp", "tools", "scripted", "--config", "vscode.json")["ok"]
    table = {
        ("mcp", "tools", "other"): ".mcp.json has no server 'other'; it has: scripted, remote, odd",
        ("mcp", "tools", "scripted"): "uses the variable PROGRAM, which is not set",
        ("mcp", "tools", "remote"): "only streamable HTTP is supported",
        ("mcp", "tools", "odd"): "args as a list",
        ("mcp", "tools", "scripted", "--config", "missing.json"): "there is no file 'missing.json'",
        (
            "mcp",
            "tools",
        ): "missing SERVER",
        ("mcp", "tools", "scripted", "--", "true"): "exclude each other",
        ("mcp", "tools", "--"): "missing COMMAND after --",
        ("mcp", "tools", "a", "b"): "unexpected argument 'b'",
        (
            "mcp",
            "call",
        ): "missing TOOL",
        ("mcp", "call", "scripted"): "missing TOOL",
        ("mcp", "call", "scripted", "t", "--", "true"): "exclude each other",
        ("mcp", "call", "t", "a=1", "--", "true"): "write --arg a=1",
        ("mcp", "call", "t", "--arg", "a", "--", "true"): "should be NAME=VALUE",
        ("mcp", "call", "t", "--arg", "a:=x", "--", "true"): "is not JSON",
        ("mcp", "call", "t", "--arg", "a=1", "--arg", "a=2", "--", "true"): "given twice",
        ("mcp", "call", "t", "--json-args", "[]", "--", "true"): "should be a JSON object",
    }
    for words, message in table.items():
        with row(words):
            error = ask(*words)["error"]
            assert error["code"] == "ARG_ERROR" and message in error["message"], error


def test_a_person_reads_text(on_terminal: Callable[..., Seen]) -> None:
    words = ("mcp", "call", "echo", "--arg", "text=two\nlines \x1b[31m", "--", *SERVER)
    seen = on_terminal(*words, streams=("stdout",), within_s=ENDED_WITHIN_S)
    assert seen.code == 0 and seen.screen == "two\nlines <U+001B>[31m\n"
    seen = on_terminal("mcp", "tools", "--", *SERVER, streams=("stdout",), within_s=ENDED_WITHIN_S)
    assert re.findall(r"^\S*?(\w+)", re.sub(r"\x1b\[[0-9;]*m", "", seen.screen), re.MULTILINE)[:2] == [
        "echo",
        "die_once",
    ]
    assert "read-only" in seen.screen.splitlines()[0], "the words for the rules of shotclock wrap"


def test_a_person_reads_why_the_server_does_not_start(on_terminal: Callable[..., Seen]) -> None:
    words = ("mcp", "tools", "--", *SERVER, "--exit-at-start", "3")
    seen = on_terminal(*words, streams=("stdout", "stderr"), within_s=ENDED_WITHIN_S)
    assert seen.code == 12 and "cannot start\n" in seen.screen and "CONNECT_FAILED" in seen.screen
