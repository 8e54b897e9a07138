"""`shotclock agent`: the configuration of a coding agent, before and after, and the answers of its hooks."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.agents import hook as agent_hook
from shotclock.agents._status import codex_hash
from shotclock.agents.hook import quote_for_gemini
from tests.command_line import POLL_S, SHOTCLOCK, SOON_S, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

FILES = {
    "claude": (".claude/settings.json", ".claude/settings.json"),
    "codex": (".codex/hooks.json", ".codex/hooks.json"),
    "gemini": (".gemini/settings.json", ".gemini/settings.json"),
    "opencode": (".config/opencode/plugins/shotclock.js", ".opencode/plugins/shotclock.js"),
    "copilot": (".copilot/hooks/shotclock.json", ".github/hooks/shotclock.json"),
}
ACCEPTANCE = {"codex": ("--accept-allow",), "copilot": ("--accept-allow",)}
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


def install(shotclock: Any, agent: str, *more: str, **options: Any) -> Any:
    return shotclock("agent", "install", agent, "--yes", *ACCEPTANCE.get(agent, ()), *more, **options)


def status_of(shotclock: Any, agent: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = shotclock("agent", "status", agent).json()["data"]["agents"]
    return rows[-1]


def test_a_removal_restores_every_file_byte_for_byte(shotclock: Any, home: Path) -> None:
    for agent, (user, project) in FILES.items():
        for folder, name, scope in ((home, user, "--user"), (home / "project", project, "--project")):
            file = folder / name
            originals = [None] if agent == "opencode" else [None, SETTINGS.encode(), b"", b"{}", b'{"a":1}\n\n']
            if scope == "--project":  # the scope chooses the file, and no more
                originals = originals[:2]
            for original in originals:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.unlink(missing_ok=True)
                if original is not None:
                    file.write_bytes(original)
                ran = install(shotclock, agent, scope)
                assert (ran.code, ran.json()["data"]["changed"]) == (0, True), (agent, original, ran)
                written = file.read_bytes()
                assert b"shotclock" in written
                again = install(shotclock, agent, scope)
                assert (again.json()["data"]["changed"], file.read_bytes()) == (False, written), "twice changes nothing"
                assert shotclock("agent", "remove", agent, scope, "--yes").code == 0
                assert (file.read_bytes() if file.exists() else None) == original, (agent, original)
            assert shotclock("agent", "remove", agent, scope, "--yes").json()["data"]["changed"] is False


def test_a_removal_deletes_the_folders_that_the_installation_made_if_they_are_empty(shotclock: Any, home: Path) -> None:
    before = set(home.rglob("*"))
    for agent in FILES:
        for scope in ("--user", "--project"):
            for _ in range(2):  # the folders are known also after a second installation
                install(shotclock, agent, scope)
            assert shotclock("agent", "remove", agent, scope, "--yes").code == 0
    assert {path for path in set(home.rglob("*")) - before if home / ".local" not in (path, *path.parents)} == set()
    install(shotclock, "copilot", "--project")
    (home / "project/.github/mine").touch()
    shotclock("agent", "remove", "copilot", "--project", "--yes")
    assert [path.name for path in (home / "project/.github").iterdir()] == ["mine"]


def test_an_installation_changes_only_its_own_lines(shotclock: Any, home: Path) -> None:
    file = home / ".gemini/settings.json"
    file.parent.mkdir()
    file.write_text(SETTINGS)
    ran = install(shotclock, "gemini")
    lines = [line for line in ran.json()["data"]["diff"].splitlines()[2:] if line[0] in "+-"]
    removed = [line for line in lines if line[0] == "-"]
    assert removed == ['-        "BeforeTool": [{"matcher": "x", "hooks": []}],'], "that line has the list"
    assert len(lines) == 2
    settings = json.loads(file.read_text())
    group = settings["hooks"]["BeforeTool"].pop()
    assert settings == json.loads(SETTINGS)
    assert group["matcher"] == "run_shell_command"
    assert shlex.split(group["hooks"][0]["command"])[1:4] == ["agent", "hook", "gemini"]


def test_after_a_change_by_the_user_only_our_entries_are_removed(shotclock: Any, home: Path) -> None:
    file = home / ".claude/settings.json"
    file.parent.mkdir()
    file.write_text(WITHOUT_LIST)
    install(shotclock, "claude", "--approvals")
    file.write_text(file.read_text().replace('"MINE": "yes"', '"MINE": "no"'))
    ran = shotclock("agent", "remove", "claude", "--yes")
    assert "changed since" in ran.json()["data"]["notes"][0]
    assert file.read_text() == WITHOUT_LIST.replace('"MINE": "yes"', '"MINE": "no"')
    install(shotclock, "opencode")
    plugin = home / FILES["opencode"][0]
    plugin.write_text(plugin.read_text() + "// mine\n")
    ran = shotclock("agent", "remove", "opencode", "--yes")
    assert (ran.code, ran.json()["error"]["code"]) == (6, "CONFLICT")
    assert plugin.exists()


def test_a_file_that_is_not_json_is_refused_with_its_mistake_and_left_as_it_is(shotclock: Any, home: Path) -> None:
    file = home / ".claude/settings.json"
    file.parent.mkdir()
    for text, mistake in (
        ('{"a": 1,}', "Claude Code does not read it"),
        ("{\n  // a comment\n}", "line 2"),
        ("[]", "not an object"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "decoding a JSON array"),
        ('{"env": 3}', "env should be an object"),
        ('{"env": {"CLAUDE_CODE_SHELL_PREFIX": "/mine"}}', "'/mine' already"),
    ):
        file.write_text(text)
        ran = install(shotclock, "claude")
        assert (ran.code, file.read_text()) == (6, text)
        assert mistake in ran.json()["error"]["message"]
        assert shotclock("agent", "status", "claude").code == 0
    file.write_bytes(b'{"a": "\xff"}')
    assert install(shotclock, "claude").code == 6
    plugin = home / FILES["opencode"][0]
    plugin.parent.mkdir(parents=True)
    plugin.write_text("// mine\n")
    assert install(shotclock, "opencode").code == 6
    assert plugin.read_text() == "// mine\n"


def test_comments_and_a_byte_order_mark_stay_where_the_agent_reads_them(shotclock: Any, home: Path) -> None:
    """Seen with the agents: Gemini CLI reads comments and no mark, Claude Code a mark and no comments."""
    commented = '{\n  // mine\n  "hooks": {\n    "X": [] // about X\n  } /* end */\n}\n'
    texts = {"gemini": commented, "claude": '\ufeff{\n  "a": 1\n}\n'}
    for agent, text in texts.items():
        file = home / FILES[agent][0]
        file.parent.mkdir()
        file.write_text(text)
        assert install(shotclock, agent).code == 0
        after = file.read_text()
        assert all(kept in after for kept in ("// mine\n", "// about X\n", "/* end */") if kept in text)
        assert after.startswith("\ufeff") == text.startswith("\ufeff")
        assert status_of(shotclock, agent)["installed"]
        assert install(shotclock, agent).json()["data"]["changed"] is False
        assert shotclock("agent", "remove", agent, "--yes").code == 0
        assert file.read_text() == text
        install(shotclock, agent)
        file.write_text(f"{file.read_text()}\n")
        assert "changed since" in shotclock("agent", "remove", agent, "--yes").json()["data"]["notes"][0]
        assert file.read_text() == f"{text}\n"
        other = next(each for each in texts if each != agent)
        file = home / FILES[other][0]
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        ran = install(shotclock, other)
        assert (ran.code, file.read_text()) == (6, text)
        assert "does not read it" in ran.json()["error"]["message"]
        assert not status_of(shotclock, other)["installed"]
        file.unlink()
        file.parent.rmdir()


def test_a_link_stays_a_link_and_the_mode_stays(shotclock: Any, home: Path) -> None:
    real, file = home / "dotfiles.json", home / ".claude/settings.json"
    file.parent.mkdir()
    real.write_text("{}\n")
    real.chmod(0o640)
    file.symlink_to(real)
    install(shotclock, "claude")
    assert file.is_symlink()
    assert "shotclock-sh" in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    shotclock("agent", "remove", "claude", "--yes")
    assert (file.is_symlink(), real.read_text()) == (True, "{}\n")


def test_a_file_keeps_its_owner_and_a_new_one_obeys_the_umask(shotclock: Any, home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    file = home / ".claude/settings.json"
    file.parent.mkdir()
    file.write_text("{}")
    os.chown(file, 12345, 12346)
    install(shotclock, "claude")
    assert (file.stat().st_uid, file.stat().st_gid) == (12345, 12346)
    words = [*SHOTCLOCK, "agent", "install", "gemini", "--yes"]
    subprocess.run(words, umask=0o077, check=True, capture_output=True, timeout=SOON_S)
    assert stat.S_IMODE((home / ".gemini/settings.json").stat().st_mode) == 0o600


def test_a_damaged_record_is_not_restored(shotclock: Any, home: Path) -> None:
    file = home / ".claude/settings.json"
    file.parent.mkdir()
    for damage in (b"", b"[]", b"{", b"\xff", b'{"before": 3, "after": "x"}'):
        file.write_text(WITHOUT_LIST)
        install(shotclock, "claude")
        records = [path for path in (home / ".local").rglob("*") if path.is_file()]
        assert len(records) == 1, "one file, so that it is replaced at once"
        records[0].write_bytes(damage)
        ran = shotclock("agent", "remove", "claude", "--yes")
        assert (ran.code, file.read_text()) == (0, WITHOUT_LIST), damage


def test_hooks_of_the_user_beside_ours_are_kept(shotclock: Any, home: Path) -> None:
    file = home / ".gemini/settings.json"
    mine = {"type": "command", "command": "echo shotclock agent hook"}
    for place in (0, 1):
        install(shotclock, "gemini")
        settings = json.loads(file.read_text())
        group = settings["hooks"]["BeforeTool"][0]
        ours = group["hooks"][0]
        group["hooks"].insert(place, mine)
        settings["hooks"]["BeforeTool"].append({"hooks": [mine]})
        file.write_text(json.dumps(settings))
        assert install(shotclock, "gemini").json()["data"]["changed"] is False
        ours["timeout"] = 1
        file.write_text(json.dumps(settings))
        assert install(shotclock, "gemini").json()["data"]["changed"] is True
        assert mine in json.loads(file.read_text())["hooks"]["BeforeTool"][0]["hooks"]
        assert status_of(shotclock, "gemini")["problems"] == []
        shotclock("agent", "remove", "gemini", "--yes")
        group["hooks"].remove(ours)
        assert json.loads(file.read_text()) == settings
        file.unlink()


def test_a_changed_plugin_is_not_overwritten(shotclock: Any, home: Path) -> None:
    install(shotclock, "opencode")
    plugin = home / FILES["opencode"][0]
    plugin.write_text(plugin.read_text() + "// mine\n")
    assert install(shotclock, "opencode").json()["error"]["code"] == "CONFLICT"
    assert plugin.read_text().endswith("// mine\n")


def test_the_kept_text_is_private(shotclock: Any, home: Path) -> None:
    file = home / ".claude/settings.json"
    file.parent.mkdir()
    file.write_text('{"env": {"KEY": "secret"}}')
    install(shotclock, "claude")
    kept = [path for path in (home / ".local").rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600]


def test_homes_of_the_agents_are_where_their_variables_say(shotclock: Any, home: Path) -> None:
    for agent, variable, name in (
        ("claude", "CLAUDE_CONFIG_DIR", "settings.json"),
        ("codex", "CODEX_HOME", "hooks.json"),
        ("gemini", "GEMINI_CLI_HOME", ".gemini/settings.json"),
        ("opencode", "XDG_CONFIG_HOME", "opencode/plugins/shotclock.js"),
        ("copilot", "COPILOT_HOME", "hooks/shotclock.json"),
    ):
        ran = install(shotclock, agent, env={variable: str(home / agent)})
        assert ran.json()["data"]["file"] == str(home / agent / name)
        assert (home / agent / name).exists()


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


def test_status_tells_what_is_installed_and_what_is_in_its_way(shotclock: Any, home: Path) -> None:
    for agent in FILES:
        assert status_of(shotclock, agent)["installed"] is False
        install(shotclock, agent)
        found = status_of(shotclock, agent)
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
        found = status_of(shotclock, agent)
        assert (found["effective"], problem in found["problems"][0]) == (False, True), found
        (project / name).unlink()
    (home / ".claude/settings.json").write_text('{"env": {"CLAUDE_CODE_SHELL_PREFIX": "/gone/shotclock-sh"}}')
    assert "/gone/shotclock-sh is not there" in status_of(shotclock, "claude")["problems"][0]


def test_status_sees_moved_programs_and_changed_settings(shotclock: Any, home: Path, tmp_path: Path) -> None:
    install(shotclock, "claude")
    file = home / ".claude/settings.json"
    moved, folder = tmp_path / "moved" / "shotclock-sh", tmp_path / "folder" / "shotclock-sh"
    moved.parent.mkdir()
    moved.write_text("#! /gone/venv/bin/python -I\n")
    moved.chmod(0o755)
    folder.mkdir(parents=True)
    for program in (moved, folder):
        file.write_text(json.dumps({"env": {"CLAUDE_CODE_SHELL_PREFIX": str(program)}}))
        found = status_of(shotclock, "claude")
        assert (found["effective"], f"{program} is not there" in found["problems"][0]) == (False, True)
    install(shotclock, "claude")
    settings = json.loads(file.read_text())
    del settings["hooks"]  # as an older version has installed it
    file.write_text(json.dumps(settings))
    found = status_of(shotclock, "claude")
    assert (found["installed"], found["effective"], found["problems"]) == (True, None, [])
    assert "commands in the background are limited: install it again" in found["conditions"][0]
    install(shotclock, "copilot")
    (home / ".copilot/settings.json").write_text('{"disableAllHooks": true}')
    assert "settings.json sets disableAllHooks" in status_of(shotclock, "copilot")["problems"][0]
    install(shotclock, "gemini")
    (home / "project/.gemini").mkdir()
    (home / "project/.gemini/settings.json").write_text('{"hooksConfig": {"disabled": 3}}')
    assert status_of(shotclock, "gemini")["problems"] == []
    install(shotclock, "codex")
    file = home / ".codex/hooks.json"
    file.write_text(file.read_text().replace('"Bash"', '"Write"'))
    assert "its matcher is 'Write' instead of 'Bash'" in status_of(shotclock, "codex")["problems"][0]
    for text in ("features = 3", "hooks = 3", "[hooks]\nstate = [1]"):
        (home / ".codex/config.toml").write_text(text)
        assert "has a value where Codex has a table" in status_of(shotclock, "codex")["problems"][-1]


def test_status_compares_the_trust_of_codex(shotclock: Any, home: Path) -> None:
    install(shotclock, "codex")
    file, config = home / ".codex/hooks.json", home / ".codex/config.toml"
    found = status_of(shotclock, "codex")
    assert (found["trusted"], found["problems"]) == (False, ["not trusted: run /hooks in Codex"])
    assert not config.exists(), "trust is the user's to give"
    group = json.loads(file.read_text())["hooks"]["PreToolUse"][0]
    config.write_text(f'[hooks.state."{file}:pre_tool_use:0:0"]\ntrusted_hash = "{codex_hash(group)}"\n')
    assert tomllib.loads(config.read_text())
    found = status_of(shotclock, "codex")
    assert (found["trusted"], found["effective"]) == (True, True)
    file.write_text(file.read_text().replace('"timeout": 10', '"timeout": 11'))
    assert status_of(shotclock, "codex")["trusted"] is False


def test_the_hash_of_a_hook_is_the_one_of_codex() -> None:
    """Codex 0.169.0 accepted this one."""
    group = {"matcher": "Bash", "hooks": [{"type": "command", "command": "/abs/hook", "timeout": 10}]}
    text = (
        '{"event_name":"pre_tool_use","hooks":[{"async":false,"command":"/abs/hook","timeout":10,"type":"command"}],'
        '"matcher":"Bash"}'
    )
    assert codex_hash(group) == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# --- hooks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hook(shotclock: Any, tmp_path: Path) -> Callable[..., Any]:
    """A function that gives a hook its input and returns its answer, or None."""

    def call(agent: str, request: object, **env: str) -> Any:
        text = request if isinstance(request, bytes) else json.dumps(request).encode()
        shell = str(tmp_path / "bin" / "shotclock-sh")
        ran = shotclock("agent", "hook", agent, shell, input=text, env=env)
        assert (ran.code, ran.stderr) == (0, b"")
        return json.loads(ran.stdout) if ran.stdout else None

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


def test_a_hook_with_a_surprising_input_prints_nothing(hook: Any, shotclock: Any) -> None:
    for agent in ("gemini", "copilot", "codex"):
        for request in (b"", b"not json", b"\xff", [], {}, {"tool_name": "run_shell_command"}, {"toolName": "bash"}):
            assert hook(agent, request) is None
    assert hook("nobody", {}) is None
    other = {"hook_event_name": "BeforeTool", "tool_name": "write_file", "tool_input": {"command": "x"}}
    assert hook("gemini", other) is None
    assert hook("copilot", {"toolName": "view", "toolArgs": {"command": "x"}}) is None
    good = {"tool_name": "run_shell_command", "tool_input": {"command": "x"}}
    gone = shotclock("agent", "hook", "gemini", "/gone/bash", input=json.dumps(good).encode())
    assert (gone.code, gone.stdout) == (0, b""), "a removed program stops nothing"


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


def test_the_locale_of_a_hook_does_not_change_the_command(hook: Any) -> None:
    text = json.dumps({"tool_name": "run_shell_command", "tool_input": {"command": "echo é"}}, ensure_ascii=False)
    for encoding in ("latin-1", "ascii"):
        answer = hook("gemini", text.encode(), PYTHONIOENCODING=encoding)
        assert "echo é" in answer["hookSpecificOutput"]["tool_input"]["command"]


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


def test_approvals_are_installed_beside_the_shell_and_block_where_they_fail(shotclock: Any, home: Path) -> None:
    install(shotclock, "claude", "--approvals")
    hooks = json.loads((home / ".claude/settings.json").read_text())["hooks"]["PermissionRequest"][0]["hooks"]
    assert [(each["onFailure"], each["timeout"]) for each in hooks] == [("block", 600)]
    assert status_of(shotclock, "claude")["approvals"] is True
    install(shotclock, "claude")
    assert status_of(shotclock, "claude")["approvals"] is False
    install(shotclock, "copilot", "--approvals")
    hooks = json.loads((home / ".copilot/hooks/shotclock.json").read_text())["hooks"]
    assert set(hooks) == {"preToolUse", "permissionRequest"}
