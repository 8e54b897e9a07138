"""`shotclock agent`: the configuration of a coding agent, before and after, and its permission requests."""

import hashlib
import json
import os
import pty
import select
import shlex
import signal
import stat
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shotclock.agents._status import codex_hash, describe
from shotclock.agents.known_agents import AGENTS, ConfigScope
from shotclock.core.errors import Failure
from tests.agents.installers import Installer
from tests.command_line import POLL_S, SHOTCLOCK, SOON_S, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "warm_starts")]

FILES = {
    "claude": (".claude/settings.json", ".claude/settings.json"),
    "codex": (".codex/hooks.json", ".codex/hooks.json"),
    "gemini": (".gemini/settings.json", ".gemini/settings.json"),
    "opencode": (".config/opencode/plugins/shotclock.js", ".opencode/plugins/shotclock.js"),
    "copilot": (".copilot/hooks/shotclock.json", ".github/hooks/shotclock.json"),
}
# Things that a careless rewrite would lose: order, unknown keys, a list on one line, the form of a number, the end.
SETTINGS = """{
    "zeta": 1.0e3, "alpha": [1,2,   3],
    "unknown": {"nested": {"é": "\\u00e9"}},
    "env": {"MINE": "yes"},
    "hooks": {
        "BeforeTool": [{"matcher": "x", "hooks": []}],
        "PreToolUse": [ ]
    }
}"""
# Without a list that our entry makes, and takes away with itself.
WITHOUT_LIST = SETTINGS.replace('"PreToolUse"', '"Stop"')


@pytest.fixture(autouse=True)
def home(user_home: Path) -> Path:
    return user_home


def install(agent: str, *, approvals: bool = False) -> None:
    Installer("agent", agent).install(approvals=approvals)


def status_of(agent: str) -> dict[str, Any]:
    return describe(AGENTS[agent], ConfigScope.USER, os.environ, Path.cwd()).as_data()


def test_the_command_writes_and_removes_and_says_what_it_did(shotclock: Any, home: Path) -> None:
    for agent in ("claude", "opencode"):
        ran = shotclock("agent", "install", agent, "--project", "--yes")
        assert (ran.code, ran.json()["data"]["changed"]) == (0, True), ran
        assert (home / "project" / FILES[agent][1]).exists()
        assert shotclock("agent", "remove", agent, "--project", "--yes").json()["data"]["changed"] is True
        assert not (home / "project" / FILES[agent][1]).exists()


def test_an_installation_changes_only_its_own_lines() -> None:
    installer = Installer("agent", "gemini")
    installer.write(SETTINGS)
    lines = [line for line in installer.install()["diff"].splitlines()[2:] if line[0] in "+-"]
    removed = [line for line in lines if line[0] == "-"]
    assert removed == ['-        "BeforeTool": [{"matcher": "x", "hooks": []}],'], "that line has the list"
    assert len(lines) == 2
    settings = installer.data
    group = settings["hooks"]["BeforeTool"].pop()
    assert settings == json.loads(SETTINGS)
    assert group["matcher"] == "run_shell_command"
    assert shlex.split(group["hooks"][0]["command"])[1:4] == ["agent", "hook", "gemini"]


def test_after_a_change_by_the_user_only_our_entries_are_removed() -> None:
    installer = Installer("agent", "claude")
    installer.write(WITHOUT_LIST)
    installer.install(approvals=True)
    installer.write((installer.text or "").replace('"MINE": "yes"', '"MINE": "no"'))
    assert "changed since" in installer.remove()["notes"][0]
    assert installer.text == WITHOUT_LIST.replace('"MINE": "yes"', '"MINE": "no"')


def test_a_value_of_the_user_in_the_place_of_an_entry_is_left() -> None:
    installer = Installer("agent", "claude")
    for text, mistake in (
        ('{"env": 3}', "env should be an object"),
        ('{"env": {"CLAUDE_CODE_SHELL_PREFIX": "/mine"}}', "'/mine' already"),
    ):
        installer.write(text)
        with pytest.raises(Failure, match=mistake):
            installer.install()
        assert installer.text == text
    installer = Installer("agent", "opencode")
    for text in ("// mine\n", None):
        installer.write(text)
        if text is None:
            installer.install()
            text = f"{installer.text}// mine\n"
            installer.write(text)
            with pytest.raises(Failure, match="was changed since"):
                installer.remove()
        with pytest.raises(Failure, match=r"is not ours|was changed since"):
            installer.install()
        assert installer.text == text


def test_a_new_file_obeys_the_umask() -> None:
    before = os.umask(0o077)
    try:
        installer = Installer("agent", "gemini")
        installer.install()
        assert stat.S_IMODE(installer.file.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_hooks_of_the_user_beside_ours_are_kept() -> None:
    installer, mine = Installer("agent", "gemini"), {"type": "command", "command": "echo shotclock agent hook"}
    for place in (0, 1):
        installer.install()
        settings = installer.data
        group = settings["hooks"]["BeforeTool"][0]
        ours = group["hooks"][0]
        group["hooks"].insert(place, mine)
        settings["hooks"]["BeforeTool"].append({"hooks": [mine]})
        installer.write(json.dumps(settings))
        assert installer.install()["changed"] is False
        ours["timeout"] = 1
        installer.write(json.dumps(settings))
        assert installer.install()["changed"] is True
        assert mine in installer.data["hooks"]["BeforeTool"][0]["hooks"]
        assert status_of("gemini")["problems"] == []
        installer.remove()
        group["hooks"].remove(ours)
        assert installer.data == settings
        installer.file.unlink()


def test_without_a_person_and_without_yes_nothing_is_written(shotclock: Any, home: Path) -> None:
    ran = shotclock("agent", "install", "claude")
    error = ran.json()["error"]
    assert (ran.code, error["code"]) == (2, "ARG_ERROR")
    assert "CLAUDE_CODE_SHELL_PREFIX" in error["context"]["diff"]
    assert not (home / ".claude").exists()


def test_refusals_say_what_to_do(shotclock: Any, home: Path) -> None:
    for words, text in (
        (("install", "cursor", "--yes"), "shotclock serve shell"),
        (("install", "codex", "--yes"), "only together with the answer `allow`"),
        (("install", "copilot", "--yes"), "--accept-allow"),
        (("install", "gemini", "--approvals", "--yes"), "Claude Code and Copilot CLI have"),
        (("install", "claude", "--user", "--project"), "exclude each other"),
        (("remove", "nobody", "--yes"), "there are claude, codex, gemini, opencode, copilot"),
        (("status", "nobody"), "there are claude, codex, gemini, opencode, copilot"),
    ):
        ran = shotclock("agent", *words)
        assert ran.code == 2, words
        assert text in ran.json()["error"]["message"], words
    assert sorted(path.name for path in home.iterdir()) == ["project"]


def answer_at_terminal(words: list[str], typed: bytes) -> tuple[int, str]:
    """Run a subcommand on a terminal, type this when it asks, and return its exit code and the screen."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*SHOTCLOCK, *words], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen, give_up_at = b"", time.monotonic() + SOON_S
    while time.monotonic() < give_up_at:
        if not select.select([ours], [], [], POLL_S)[0]:
            continue
        try:
            screen += os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if typed and b"[y/N]" in screen:
            os.write(ours, typed)
            typed = b""
    os.close(ours)
    return process.wait(SOON_S), screen.decode()


def test_a_person_sees_the_difference_and_is_asked(home: Path) -> None:
    code, screen = answer_at_terminal(["agent", "install", "claude"], b"n\n")
    assert (code, (home / ".claude").exists()) == (0, False)
    assert '+    "CLAUDE_CODE_SHELL_PREFIX"' in screen and "not written: " in screen
    code, screen = answer_at_terminal(["agent", "install", "claude"], b"y\n")
    assert (code, (home / ".claude/settings.json").exists()) == (0, True)
    assert screen.count("allow and deny rules") == 1


def test_status_tells_what_is_installed_and_what_is_in_its_way(home: Path, shotclock: Any) -> None:
    for agent in FILES:
        assert status_of(agent)["installed"] is False
        install(agent)
        found = status_of(agent)
        effects = {"codex": False, "gemini": None}
        assert (found["installed"], found["effective"]) == (True, effects.get(agent, True)), found
        assert os.path.basename(found["shell"]) == ("bash" if agent == "gemini" else "shotclock-sh")
        assert os.access(found["shell"], os.X_OK)
    assert len(shotclock("agent", "status").json()["data"]["agents"]) == 5
    project = home / "project"
    for agent, name, text, problem in (
        ("claude", ".claude/settings.local.json", '{"env": {"CLAUDE_CODE_SHELL_PREFIX": "/x"}}', "which wins here"),
        ("gemini", ".gemini/settings.json", '{"hooksConfig": {"enabled": false}}', "hooksConfig.enabled"),
        ("gemini", ".gemini/settings.json", '{"hooksConfig": {"disabled": ["shotclock"]}}', "hooksConfig.disabled"),
    ):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
        found = status_of(agent)
        assert (found["effective"], problem in found["problems"][0]) == (False, True), found
        (project / name).unlink()
    (home / ".claude/settings.json").write_text('{"env": {"CLAUDE_CODE_SHELL_PREFIX": "/gone/shotclock-sh"}}')
    assert "/gone/shotclock-sh is not there" in status_of("claude")["problems"][0]


def test_status_sees_moved_programs_and_changed_settings(home: Path, tmp_path: Path) -> None:
    install("claude")
    file = home / ".claude/settings.json"
    moved, folder = tmp_path / "moved" / "shotclock-sh", tmp_path / "folder" / "shotclock-sh"
    moved.parent.mkdir()
    moved.write_text("#! /gone/venv/bin/python -I\n")
    moved.chmod(0o755)
    folder.mkdir(parents=True)
    for program in (moved, folder):
        file.write_text(json.dumps({"env": {"CLAUDE_CODE_SHELL_PREFIX": str(program)}}))
        found = status_of("claude")
        assert (found["effective"], f"{program} is not there" in found["problems"][0]) == (False, True)
    install("claude")
    settings = json.loads(file.read_text())
    del settings["hooks"]  # as an older version has installed it
    file.write_text(json.dumps(settings))
    found = status_of("claude")
    assert (found["installed"], found["effective"], found["problems"]) == (True, None, [])
    assert "commands in the background are limited: install it again" in found["conditions"][0]
    install("copilot")
    (home / ".copilot/settings.json").write_text('{"disableAllHooks": true}')
    assert "settings.json sets disableAllHooks" in status_of("copilot")["problems"][0]
    install("gemini")
    (home / "project/.gemini").mkdir()
    (home / "project/.gemini/settings.json").write_text('{"hooksConfig": {"disabled": 3}}')
    assert status_of("gemini")["problems"] == []
    install("codex")
    file = home / ".codex/hooks.json"
    file.write_text(file.read_text().replace('"Bash"', '"Write"'))
    assert "its matcher is 'Write' instead of 'Bash'" in status_of("codex")["problems"][0]
    for text in ("features = 3", "hooks = 3", "[hooks]\nstate = [1]"):
        (home / ".codex/config.toml").write_text(text)
        assert "has a value where Codex has a table" in status_of("codex")["problems"][-1]


def test_status_compares_the_trust_of_codex(home: Path) -> None:
    install("codex")
    file, config = home / ".codex/hooks.json", home / ".codex/config.toml"
    found = status_of("codex")
    assert (found["trusted"], found["problems"]) == (False, ["not trusted: run /hooks in Codex"])
    assert not config.exists(), "trust is the user's to give"
    group = json.loads(file.read_text())["hooks"]["PreToolUse"][0]
    config.write_text(f'[hooks.state."{file}:pre_tool_use:0:0"]\ntrusted_hash = "{codex_hash(group)}"\n')
    assert tomllib.loads(config.read_text())
    found = status_of("codex")
    assert (found["trusted"], found["effective"]) == (True, True)
    file.write_text(file.read_text().replace('"timeout": 10', '"timeout": 11'))
    assert status_of("codex")["trusted"] is False


def test_the_hash_of_a_hook_is_the_one_of_codex() -> None:
    """Codex 0.169.0 accepted this one."""
    group = {"matcher": "Bash", "hooks": [{"type": "command", "command": "/abs/hook", "timeout": 10}]}
    text = (
        '{"event_name":"pre_tool_use","hooks":[{"async":false,"command":"/abs/hook","timeout":10,"type":"command"}],'
        '"matcher":"Bash"}'
    )
    assert codex_hash(group) == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# --- approvals --------------------------------------------------------------------------------------------------

CLAUDE = {
    "session_id": "s",
    "cwd": "/work",
    "hook_event_name": "PermissionRequest",
    "tool_name": "Bash",
    "tool_input": {"command": "rm -r build", "description": "clean"},
}
COPILOT = {
    "sessionId": "s",
    "timestamp": 1,
    "cwd": "/work",
    "toolName": "bash",
    "toolInput": {"command": "rm -r build"},
}


def ask(agent: str, request: object, wait: str = "20s") -> subprocess.Popen[bytes]:
    text = request if isinstance(request, bytes) else json.dumps(request).encode()
    words = [*SHOTCLOCK, "agent", "hook", agent, "/bin/sh", "--approvals"]
    env = {**os.environ, "SHOTCLOCK_RESPONSE_TIMEOUT": wait}
    asking = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert asking.stdin is not None
    asking.stdin.write(text)
    asking.stdin.close()
    return asking


def answer_of(asking: subprocess.Popen[bytes]) -> Any:
    assert asking.stdout is not None
    answer = json.loads(asking.stdout.read())
    asking.stdout.close()
    assert asking.wait(SOON_S) == 0
    return answer["hookSpecificOutput"]["decision"] if "hookSpecificOutput" in answer else answer


def open_proposal(shotclock: Any) -> dict[str, Any]:
    def look() -> Any:
        return shotclock("inbox", "list").json()["data"]["proposals"]

    found: list[dict[str, Any]] = wait_for(look, "a proposal")
    return found[0]


def test_an_operator_decides_each_permission_request(shotclock: Any) -> None:
    allowed = {"behavior": "allow"}
    denied = {"behavior": "deny", "message": "an operator rejected it: use make clean"}
    for agent, request in (("claude", CLAUDE), ("copilot", COPILOT)):
        for verb, expected in (
            (("approve",), allowed),
            (("reject", "--notes", "use make clean"), denied),
            (("approve",), allowed),
        ):
            asking = ask(agent, request)
            proposal = open_proposal(shotclock)
            assert "rm -r build" in proposal["title"]
            shown = shotclock("inbox", "show", proposal["id"]).json()["data"]
            assert "/work" in json.dumps(shown)
            decided = shotclock("inbox", verb[0], proposal["id"], *verb[1:])
            assert decided.code == 0, "each request is a proposal of its own"
            assert answer_of(asking) == expected


def test_without_a_decision_in_time_it_is_denied(shotclock: Any) -> None:
    answer = answer_of(ask("claude", CLAUDE, wait="300ms"))
    assert answer["behavior"] == "deny"
    assert "no operator decided within 300ms" in answer["message"]
    assert shotclock("inbox", "list").json()["data"]["proposals"] == [], "it cannot be approved any more"


def test_a_request_of_an_agent_that_was_killed_is_withdrawn(shotclock: Any, tmp_path: Path) -> None:
    words = shlex.join([*SHOTCLOCK, "agent", "hook", "copilot", "/bin/sh", "--approvals"])
    (tmp_path / "request").write_text(json.dumps(COPILOT))
    agent = subprocess.Popen(["bash", "-c", f"{words} < {tmp_path}/request; true"], stdout=subprocess.DEVNULL)
    open_proposal(shotclock)
    agent.kill()
    agent.wait(SOON_S)
    wait_for(lambda: not shotclock("inbox", "list").json()["data"]["proposals"], "the withdrawal")
    listed = shotclock("inbox", "list", "--all").json()["data"]["proposals"]
    assert [each["status"] for each in listed] == ["withdrawn"]


def test_a_request_that_the_agent_stops_is_denied_and_withdrawn(shotclock: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asking = ask("claude", CLAUDE)
        proposal = open_proposal(shotclock)
        asking.send_signal(number)
        assert answer_of(asking) == {"behavior": "deny", "message": "the agent has stopped this request"}
        assert shotclock("inbox", "show", proposal["id"]).json()["data"]["status"] == "withdrawn"


def test_a_title_shows_that_there_is_more_than_one_line_and_that_it_was_cut(shotclock: Any) -> None:
    for command, shown in (
        ("ls # harmless\nrm -r ~", "claude Bash: ls # harmless \\n rm -r ~"),
        ("echo " + "a" * 300 + "; rm -r ~", "claude Bash: echo " + "a" * 181 + "…"),
        ("ls \x1b[2K\u202e~", "claude Bash: ls <U+001B>[2K<U+202E>~"),
    ):
        asking = ask("claude", {**CLAUDE, "tool_input": {"command": command}})
        proposal = open_proposal(shotclock)
        assert proposal["title"] == shown
        shotclock("inbox", "reject", proposal["id"])
        assert answer_of(asking)["behavior"] == "deny"


def test_a_title_names_all_arguments_of_a_tool_that_is_no_shell(shotclock: Any) -> None:
    asking = ask("claude", {**CLAUDE, "tool_name": "mcp__x", "tool_input": {"command": "ls", "path": "/etc"}})
    proposal = open_proposal(shotclock)
    assert proposal["title"] == 'claude mcp__x: {"command": "ls", "path": "/etc"}'
    shotclock("inbox", "reject", proposal["id"])
    assert answer_of(asking)["behavior"] == "deny"


def test_an_approval_hook_fails_closed(home: Path) -> None:
    (home / ".local").write_text("a file, where the store's folder should be")
    answers = [answer_of(ask("claude", CLAUDE)), answer_of(ask("claude", CLAUDE, wait="soon"))]
    (home / ".local").unlink()
    answers += [answer_of(ask("claude", b"not json")), answer_of(ask("copilot", b"[]"))]
    answers += [answer_of(ask("claude", COPILOT)), answer_of(ask("copilot", {"toolName": "bash"}))]
    assert [answer["behavior"] for answer in answers] == ["deny"] * 6
    assert all("could not ask" in answer["message"] for answer in answers)


def test_approvals_are_installed_beside_the_shell_and_block_where_they_fail(home: Path) -> None:
    install("claude", approvals=True)
    hooks = json.loads((home / ".claude/settings.json").read_text())["hooks"]["PermissionRequest"][0]["hooks"]
    assert [(each["onFailure"], each["timeout"]) for each in hooks] == [("block", 600)]
    assert status_of("claude")["approvals"] is True
    install("claude")
    assert status_of("claude")["approvals"] is False
    install("copilot", approvals=True)
    hooks = json.loads((home / ".copilot/hooks/shotclock.json").read_text())["hooks"]
    assert set(hooks) == {"preToolUse", "permissionRequest"}
