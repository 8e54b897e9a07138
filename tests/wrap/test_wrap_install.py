"""`shotclock wrap install`: the configuration of an MCP client, before and after, and the servers it starts then."""

import json
import os
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.agents import _toml_text as toml_text
from shotclock.agents import json_text
from shotclock.terminal.parser import read
from shotclock.wrap.cli import COMMAND
from tests.command_line import Running, wait_for
from tests.wrap.client import GREETING, RawClient

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

SERVER = Path(__file__).parents[1] / "wrap" / "sdk_server.py"
TABLES = {"claude": "mcpServers", "codex": "mcp_servers", "cursor": "mcpServers", "vscode": "servers"}
TABLES["gemini"] = "mcpServers"
FILES = {
    "claude": (".claude.json", ".mcp.json"),
    "codex": (".codex/config.toml", ".codex/config.toml"),
    "cursor": (".cursor/mcp.json", ".cursor/mcp.json"),
    "vscode": (".config/Code/User/mcp.json", ".vscode/mcp.json"),
    "gemini": (".gemini/settings.json", ".gemini/settings.json"),
}
TIMEOUTS = {"codex": ["--timeout", "4m57s"], "gemini": ["--timeout", "9m57s"]}

# Each has the server `a` with this command, and everything that a careless rewrite would lose.
COMMAND_OF_A = ["npx", "-y", "some-server", "${input:key}"]
JSON_TEXTS = [
    '{"TABLE": {"a": {"command": "npx", "args": ["-y", "some-server", "${input:key}"]}}}',
    """{
    "zeta": 1.0e3, "TABLE": {
        "a": {
            "env": {"K": "${env:K}"},
            "args": [
                "-y",
                "some-server", "\\u0024{input:key}"
            ],
            "command": "\\u006epx", "disabled": true
        }
    }
}""",
    """\ufeff{
\t// a comment with "quotes" and a trailing comma
\t"TABLE": {
\t\t"a": { /* it, } */
\t\t\t"type": "stdio", "command": /* command */ "npx", // npx
\t\t\t"args": [ // none
\t\t\t\t"-y", "some-server", /* key */ "${input:key}",
\t\t\t],
\t\t},
\t}, // https://example.com
}
""".replace("\n", "\r\n"),
]
TOML_TEXTS = [
    '[TABLE.a]\ncommand = "npx"\nargs = ["-y", "some-server", "${input:key}"]\n',
    """\ufeff# mine
model = "m" # [TABLE.a]
text = '''
[TABLE.a]
command = "no"
'''
[ TABLE . "a" ] # the server
  command = 'npx' # npx
  args = [ # ]
    '-y', # no ]
    \"\"\"some-server\"\"\",
    "${input:key}", # the key ]
  ]
  enabled = false
[TABLE.a.env]
command = "no"
[[other]]
command = "no"
""",
    'TABLE.a.command = "npx"\r\nTABLE.a.args = ["-y", "some-server", "${input:key}"]\r\nday = 2026-11-18 12:00:00\r\n',
    '[TABLE]\na = { env = { X = "}" }, args = ["-y", "some-server", "${input:key}"], command = "npx" }\n',
]


@pytest.fixture(autouse=True)
def home(user_home: Path) -> Path:
    return user_home


@pytest.fixture
def install(shotclock: Any) -> Callable[..., Any]:
    return lambda client, *more, **options: shotclock("wrap", "install", client, "--yes", *more, **options)


@pytest.fixture
def remove(shotclock: Any) -> Callable[..., Any]:
    return lambda client, *more, **options: shotclock("wrap", "remove", client, "--yes", *more, **options)


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode())
    return file


def parsed(file: Path) -> Any:
    text = file.read_bytes().decode()
    syntax: Any = toml_text if file.suffix == ".toml" else json_text
    return syntax.parse(syntax.blank_comments(text))


def words_of(entry: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return our words without the program, and the command behind them."""
    assert os.path.isabs(entry["command"]) and os.path.basename(entry["command"]) == "shotclock", entry
    place = entry["args"].index("--")
    return entry["args"][: place + 1], entry["args"][place + 1 :]


def state_of(answer: Any, name: str) -> str:
    [state] = [each["state"] for each in answer.json()["data"]["servers"] if each["name"] == name]
    return str(state)


def test_every_client_and_form_is_wrapped_in_place_and_restored_byte_for_byte(
    install: Any, remove: Any, home: Path
) -> None:
    for client, (user, project) in FILES.items():
        for folder, name, scope in ((home, user, "user"), (home / "project", project, "project")):
            forms = TOML_TEXTS if client == "codex" else JSON_TEXTS
            for form in forms if scope == "user" else forms[-1:]:  # the scope chooses the file, and no more
                text = form.replace("TABLE", TABLES[client])
                file = write(folder / name, text)
                expected = parsed(file)
                ran = install(client, "--scope", scope)
                assert (ran.code, ran.json()["data"]["changed"]) == (0, True), (client, text, ran)
                written, data = file.read_bytes(), parsed(file)
                ours, command = words_of(data[TABLES[client]]["a"])
                assert command == COMMAND_OF_A
                assert ours == ["wrap", "--name", "a", *TIMEOUTS.get(client, []), "--"]
                data[TABLES[client]]["a"] |= {"command": command[0], "args": command[1:]}
                assert data == expected, "nothing else has changed"
                again = install(client, "--scope", scope)
                assert (again.json()["data"]["changed"], file.read_bytes()) == (False, written), "twice changes nothing"
                assert remove(client, "--scope", scope).code == 0
                assert file.read_bytes().decode() == text, (client, text)
                assert remove(client, "--scope", scope).json()["data"]["changed"] is False


def test_a_removal_is_exact_also_without_the_kept_text(install: Any, remove: Any, home: Path) -> None:
    more = ['{"TABLE": {"a": {"command": "npx"}}}', '{"TABLE": {"a": {\r\n\t"command": "npx"\r\n}}}']
    more += ['{"TABLE": {"a": {"command": "npx", "args": [ ]}}}', '{"TABLE": {"a": {"command": "x", "args": [\n]}}}']
    tables = ['[TABLE.a]\n  command = "npx" # c\n', '[TABLE]\na = {command = "npx"}', 'TABLE.a.command = "npx"\r\n']
    tables += ['[TABLE.a]\ncommand = "npx"\nargs = [ # none\n]\n', "[TABLE]\na.\"command\" = 'npx'"]
    for client, forms in (("cursor", [*JSON_TEXTS, *more]), ("codex", [*TOML_TEXTS, *tables])):
        file = home / FILES[client][0]
        for form in forms:
            text = form.replace("TABLE", TABLES[client])
            write(file, text)
            assert install(client, "--timeout", "5m").json()["data"]["changed"] is True
            for kept in (home / ".local").rglob("wrap-*.json"):
                kept.unlink()
            assert remove(client).code == 0
            assert file.read_bytes().decode() == text, text


def test_a_server_without_arguments_gets_them(install: Any, home: Path) -> None:
    file = write(
        home / ".cursor/mcp.json", '{\n  "mcpServers": {\n    "a": {\n      "command": "serve"\n    }\n  }\n}\n'
    )
    install("cursor")
    assert words_of(parsed(file)["mcpServers"]["a"]) == (["wrap", "--name", "a", "--"], ["serve"])
    assert '\n      "args": ["wrap", "--name", "a", "--", "serve"],\n      "command": "' in file.read_text()


def test_after_a_change_by_the_user_only_our_words_are_removed(install: Any, remove: Any, home: Path) -> None:
    file = write(home / ".claude.json", JSON_TEXTS[1].replace("TABLE", "mcpServers"))
    install("claude", "--ask", "destructive", "--timeout=1m")
    changed = json.loads(file.read_text())
    changed["mcpServers"]["a"]["args"].append("mine")
    changed["mcpServers"]["b"] = {"command": "shotclock", "args": ["wrap", "--", "by-hand"]}
    file.write_text(json.dumps(changed, indent=2))
    ran = remove("claude")
    assert "changed since" in ran.json()["data"]["notes"][0]
    expected = json.loads(JSON_TEXTS[1].replace("TABLE", "mcpServers"))
    expected["mcpServers"]["a"]["args"].append("mine")
    expected["mcpServers"]["b"] = changed["mcpServers"]["b"]
    assert json.loads(file.read_text()) == expected
    assert ran.json()["data"]["servers"][1]["reason"] == "it was wrapped by hand"
    file.write_text(json.dumps({"mcpServers": {"a": {"command": "x"}}}))
    install("claude")
    entry = json.loads(file.read_text())
    entry["mcpServers"]["a"]["args"].remove("x")
    file.write_text(json.dumps(entry))
    assert remove("claude").json()["data"]["changed"] is False, "without a command there is nothing to restore"
    file.unlink()
    assert remove("claude").json()["data"]["changed"] is False


def test_an_empty_list_of_arguments_stays_after_other_changes(install: Any, remove: Any, home: Path) -> None:
    for text in ('{"mcpServers": {"a": {"args": [ ], "command": "x"}}}', '{"mcpServers": {"a": {"command": "x"}}}'):
        file = write(home / ".cursor/mcp.json", text)
        install("cursor")
        file.write_text(file.read_text() + "\n")
        remove("cursor")
        assert file.read_text() == text + "\n"


def test_options_are_put_in_and_updated_where_others_are_given(install: Any, remove: Any, home: Path) -> None:
    text = JSON_TEXTS[2].replace("TABLE", "mcpServers")
    file = write(home / ".cursor/mcp.json", text)
    given = ["--timeout", "2m", "--allow", "read_* path=/tmp/*", "--ask=destructive", "--read-only", "--env", "A=b c"]
    for options, expected in ((given, given), ([], given), (["--lazy"], ["--lazy"]), ([], ["--lazy"])):
        assert install("cursor", *options).code == 0
        ours, command = words_of(parsed(file)["mcpServers"]["a"])
        assert command == COMMAND_OF_A
        assert ours[3:-1] == expected
        assert not read(COMMAND, [*ours[1:], *command], hint="").mistakes
    remove("cursor")
    assert file.read_bytes().decode() == text


def test_only_the_named_servers_are_changed(install: Any, remove: Any, home: Path) -> None:
    names = ["plain", "with.dots", "quotes\"'", "--dashes", "ünicode \\"]
    table = "".join(f"[mcp_servers.{json.dumps(name)}]\ncommand = 'run'\n" for name in names)
    file = write(home / ".codex/config.toml", table)
    for place, name in enumerate(names):
        ran = install("codex", f"--server={name}", "--lock", "/tmp/pins.json")
        assert [state_of(ran, each) for each in names[: place + 1]] == ["wrapped"] * (place + 1), ran
        ours, command = words_of(parsed(file)["mcp_servers"][name])
        reading = read(COMMAND, [*ours[1:], *command], hint="")
        assert (reading.values["name"], reading.typed["command"], reading.mistakes) == (name, ["run"], [])
        assert all(state_of(ran, each) == "not wrapped" for each in names[place + 1 :])
    ran = remove("codex", "--server", "plain")
    assert [state_of(ran, each) for each in names] == ["not wrapped"] + ["wrapped"] * 4
    assert remove("codex").code == 0
    assert file.read_text() == table, "the kept text is that from before the first installation"


def test_servers_of_projects_in_the_file_of_claude_code_are_wrapped_too(install: Any, remove: Any, home: Path) -> None:
    entry = {"type": "stdio", "command": "serve", "args": [], "env": {}}
    content = {
        "numStartups": 3,
        "projects": {"/a": {"mcpServers": {"one": entry}, "allowedTools": []}, "/b": {"mcpServers": {}}, "/c": 3},
        "mcpServers": {"one": entry},
    }
    file = write(home / ".claude.json", json.dumps(content, indent=2))
    ran = install("claude")
    servers = [(each["name"], each["project"], each["state"]) for each in ran.json()["data"]["servers"]]
    assert servers == [("one", None, "wrapped"), ("one", "/a", "wrapped")]
    found = parsed(file)
    for each in (found["mcpServers"]["one"], found["projects"]["/a"]["mcpServers"]["one"]):
        assert words_of(each) == (["wrap", "--name", "one", "--"], ["serve"])
    remove("claude")
    assert file.read_text() == json.dumps(content, indent=2)


def test_servers_that_cannot_be_wrapped_are_left_and_named(install: Any, shotclock: Any, home: Path) -> None:
    left = {
        "http": {"type": "http", "url": "https://x", "headers": {"Authorization": "secret"}},
        "sse": {"type": "sse", "url": "https://x"},
        "gemini": {"httpUrl": "https://x", "command": "x"},
        "bare": {"url": "https://x"},
        "number": {"command": 3},
        "empty": {"command": ""},
        "text": {"command": "x", "args": "y"},
        "mixed": {"command": "x", "args": ["y", 3]},
        "list": [],
        "hand": {"command": "shotclock", "args": ["wrap", "--", "x"]},
    }
    text = json.dumps({"mcpServers": left})
    file = write(home / ".cursor/mcp.json", text)
    ran = install("cursor")
    assert (ran.code, ran.json()["data"]["changed"], file.read_text()) == (0, False, text)
    found = {each["name"]: each for each in ran.json()["data"]["servers"]}
    assert {each["state"] for each in found.values()} == {"left as it is"}
    assert found["http"]["reason"] == found["bare"]["reason"] == "it is not reached over stdin and stdout"
    assert (found["text"]["reason"], found["hand"]["reason"]) == (
        "its args are not a list of texts",
        "it was wrapped by hand",
    )
    assert b"secret" not in ran.stdout
    shown = install("cursor", "--format", "text").stdout.decode()
    assert "nothing to change" in shown and "http left as it is: it is not reached over stdin and stdout" in shown


def test_a_file_that_cannot_be_changed_safely_is_refused_and_left_as_it_is(install: Any, home: Path) -> None:
    for client, text, mistake in (
        ("cursor", '{"mcpServers": {"a": {"command": "x"', "line 1"),
        ("cursor", "[]", "not an object"),
        ("cursor", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ("cursor", '{"mcpServers": {"a": {"\\u0063ommand": "x"}}}', "'a' cannot be changed in place"),
        ("cursor", '{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}', "it has 'a' twice"),
        ("codex", "[mcp_servers.a]\ncommand = x\n", "line 2"),
        ("codex", "[mcp_servers.a]\ncommand = 'x'\ncommand = 'y'\n", "line 3"),
    ):
        file = write(home / FILES[client][0], text)
        ran = install(client)
        assert (ran.code, ran.json()["error"]["code"], file.read_text()) == (6, "CONFLICT", text), (text[:80], ran)
        assert mistake in ran.json()["error"]["message"]
    write(home / ".cursor/mcp.json", "").write_bytes(b'{"a": "\xff"}')
    assert install("cursor").code == 6


def test_without_servers_there_is_nothing_to_do_and_without_a_file_it_says_where_it_looked(
    install: Any, home: Path
) -> None:
    for client in FILES:
        ran = install(client, "--scope", "project")
        assert (ran.code, ran.json()["error"]["code"]) == (5, "FILE_NOT_FOUND")
        assert str(home / "project" / FILES[client][1]) in ran.json()["error"]["message"]
        empty = ["", "\n", "# only this\n", "[mcp_servers]\n"]
        for text in empty if client == "codex" else ["", " \n", "{}", '{"mcpServers": {}}', '{"mcpServers": 3}']:
            file = write(home / "project" / FILES[client][1], text)
            ran = install(client, "--scope", "project")
            assert (ran.code, ran.json()["data"]["changed"]) == (0, False)
            assert (ran.json()["data"]["servers"], file.read_text()) == ([], text)


def test_the_timeout_lies_below_the_limit_of_the_client(install: Any, home: Path) -> None:
    for client, limit, options, words, note in (
        ("codex", "tool_timeout_sec = 60", [], ["--timeout", "57s"], None),
        ("codex", "tool_timeout_sec = 120.5", ["--grace", "500ms"], ["--timeout", "1m59s", "--grace", "500ms"], None),
        ("codex", "tool_timeout_sec = 3600", [], [], None),
        ("codex", "tool_timeout_sec = 2", [], [], "after 2s"),
        ("codex", "", ["--timeout", "5m"], ["--timeout", "5m"], "Codex stops waiting for a after 5m"),
        ("codex", "", ["--timeout", "1m"], ["--timeout", "1m"], None),
        ("codex", "", ["--timeout", "0"], ["--timeout", "0"], "after 5m"),
        ("gemini", '"timeout": 30000', [], ["--timeout", "27s"], None),
        ("gemini", '"timeout": true', [], ["--timeout", "9m57s"], None),
        ("claude", '"timeout": 60000', [], ["--timeout", "57s"], None),
        ("claude", '"timeout": 500', [], [], None),
        ("vscode", '"timeout": 500', [], [], None),
    ):
        text = f'[mcp_servers.a]\ncommand = "x"\n{limit}\n'
        if client != "codex":
            text = f'{{"{TABLES[client]}": {{"a": {{"command": "x", {limit}}}}}}}'
        file = write(home / FILES[client][0], text)
        ran = install(client, *options)
        assert words_of(parsed(file)[TABLES[client]]["a"])[0][3:-1] == words, (client, limit, options)
        notes = ran.json()["data"]["notes"]
        assert notes == [] if note is None else note in notes[0], (client, limit, options, notes)


def test_the_files_are_where_the_variables_of_the_clients_say(install: Any, home: Path) -> None:
    for client, variable, name in (
        ("claude", "CLAUDE_CONFIG_DIR", ".claude.json"),
        ("codex", "CODEX_HOME", "config.toml"),
        ("vscode", "XDG_CONFIG_HOME", "Code/User/mcp.json"),
        ("gemini", "GEMINI_CLI_HOME", ".gemini/settings.json"),
    ):
        file = write(home / client / name, TOML_TEXTS[0] if client == "codex" else "{}")
        assert install(client, env={variable: str(home / client)}).json()["data"]["file"] == str(file)
    file = write(home / "project" / "other.json", JSON_TEXTS[0].replace("TABLE", "servers"))
    ran = install("vscode", "--file", "other.json")
    assert (ran.json()["data"]["file"], state_of(ran, "a")) == (str(file), "wrapped")


def test_refusals_say_what_to_do(shotclock: Any, install: Any, home: Path) -> None:
    text = JSON_TEXTS[0].replace("TABLE", "mcpServers")
    file = write(home / ".cursor/mcp.json", text)
    for words, code, message in (
        (("cursor", "--server", "b"), 5, "there is no server 'b'"),
        (("zed",), 2, "none of claude, codex, cursor, vscode, gemini"),
        (("cursor", "--timeout", "soon"), 2, "timeout: "),
        (("cursor", "--lock", "pins.json"), 2, "with one --server"),
        (("cursor", "--timeout", "--json"), 2, "timeout: --timeout needs a value"),
        (("cursor", "--on-change", "ask"), 2, "needs --lock"),
        (("cursor", "--name", "x"), 2, "--name: unknown option"),
        (("cursor", "--scope", "project", "--file", "x"), 2, "exclude each other"),
        (("cursor", "--tiemout", "3s"), 2, "did you mean --timeout?"),
        (("cursor", "--timeout", "30", "--denny", "x"), 2, "30 has no unit"),
        (("cursor", "--timeout", "30", "--denny", "x"), 2, "did you mean --deny?"),
        (("cursor", "--sever", "a"), 2, "did you mean --server?"),
    ):
        ran = install(*words)
        assert (ran.code, message in ran.json()["error"]["message"]) == (code, True), (words, ran)
    ran = shotclock("wrap", "install", "cursor")
    error = ran.json()["error"]
    assert (ran.code, error["code"], file.read_text()) == (2, "ARG_ERROR", text)
    assert '+{"mcpServers": {"a": {"command": "' in error["context"]["diff"]
    assert shotclock("wrap", "install").code == 2
    assert b"shotclock wrap --help" not in shotclock("wrap", "install", "--help").stdout


def test_a_link_stays_a_link_and_the_mode_and_the_kept_text_are_private(install: Any, remove: Any, home: Path) -> None:
    text = JSON_TEXTS[0].replace("TABLE", "mcpServers").replace("npx", "secret")
    real = write(home / "dotfiles.json", text)
    real.chmod(0o640)
    (home / ".cursor").mkdir()
    (home / ".cursor/mcp.json").symlink_to(real)
    ran = install("cursor")
    assert (home / ".cursor/mcp.json").is_symlink() and "shotclock" in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    kept = Path(ran.json()["data"]["backup"])
    assert (stat.S_IMODE(kept.stat().st_mode), json.loads(kept.read_text())["before"]) == (0o600, text)
    remove("cursor")
    assert ((home / ".cursor/mcp.json").is_symlink(), real.read_text(), kept.exists()) == (True, text, False)


def test_an_installation_that_is_killed_leaves_the_old_text_or_the_new_one(
    start: Callable[..., Running], install: Any, remove: Any, home: Path
) -> None:
    text = JSON_TEXTS[2].replace("TABLE", "mcpServers")
    file = home / ".cursor/mcp.json"
    write(file, text)
    install("cursor")
    new = file.read_bytes()
    for verb, before in (("install", text.encode()), ("remove", new)):
        for delay_s in (0.0, 0.02, 0.05, 0.1, 0.15, 0.2):
            remove("cursor")
            if verb == "remove":
                install("cursor")
            assert file.read_bytes() == before
            running = start("wrap", verb, "cursor", "--yes")
            try:
                running.ends(within_s=delay_s)
            except subprocess.TimeoutExpired:
                running.signal(signal.SIGKILL)
            running.ends()
            assert file.read_bytes() in (text.encode(), new)
            wait_for(lambda: not list(file.parent.glob(".mcp.json.*")), "the end of the child that writes")
            assert file.read_bytes() in (text.encode(), new)
    install("cursor")
    remove("cursor")
    assert file.read_bytes() == text.encode()


def test_a_kept_text_of_an_installation_that_was_not_written_is_not_restored(
    install: Any, remove: Any, home: Path
) -> None:
    """The record is written first; a kill before the file is replaced leaves it behind."""
    text = JSON_TEXTS[0].replace("TABLE", "mcpServers")
    file = write(home / ".cursor/mcp.json", text)
    install("cursor")
    changed = text.replace("some-server", "other-server")
    write(file, changed)
    assert remove("cursor").json()["data"]["changed"] is False
    assert file.read_text() == changed
    install("cursor")
    remove("cursor")
    assert file.read_text() == changed
    install("cursor")
    for damage in (b"", b"[]", b"\xff", b'{"before": 3, "after": "x"}'):
        [kept] = (home / ".local").rglob("wrap-cursor-*.json")
        kept.write_bytes(damage)
        remove("cursor")
        assert file.read_text() == changed
        install("cursor")


def test_status_lists_the_servers_of_every_client(shotclock: Any, install: Any, home: Path) -> None:
    write(home / ".codex/config.toml", TOML_TEXTS[1].replace("TABLE", "mcp_servers"))
    write(home / "project/.mcp.json", '{"mcpServers": {"a": {"url": "x"}}}')
    write(home / ".cursor/mcp.json", "{")
    install("codex")
    rows = {(row["client"], row["scope"]): row for row in shotclock("wrap", "status").json()["data"]["clients"]}
    assert len(rows) == 10
    assert rows["codex", "user"]["servers"] == [{"name": "a", "project": None, "state": "wrapped", "reason": None}]
    assert rows["claude", "project"]["servers"][0]["state"] == "left as it is"
    assert "line 1" in rows["cursor", "user"]["problem"]
    assert (rows["vscode", "user"]["exists"], rows["vscode", "user"]["servers"]) == (False, [])
    for words in (("wrap", "status", "codex", "--format", "text"), ("--format", "text", "wrap", "status", "codex")):
        assert "  a wrapped" in shotclock(*words).stdout.decode()


def test_an_option_that_is_the_choice_of_another_one_is_named(shotclock: Any, home: Path) -> None:
    ran = shotclock("wrap", "install", "--project", "cursor", "--yes")
    assert [each["message"] for each in ran.json()["error"]["errors"]] == [
        "unknown option; did you mean --scope project?"
    ]


def test_a_mistyped_verb_is_not_run_as_a_server(shotclock: Any, home: Path) -> None:
    ran = shotclock("wrap", "installl", "cursor")
    assert (ran.code, ran.stderr) == (
        125, b"shotclock wrap: command: 'installl' was not found; did you mean shotclock wrap install?\n",
    )  # fmt: skip
    assert shotclock("wrap", "--", "installl").code == 127
    assert b"leave out the quotes" in shotclock("wrap", "--", "npx -y server").stderr


def test_a_server_named_like_a_verb_is_run_behind_two_dashes(shotclock: Any, home: Path) -> None:
    ran = shotclock("wrap", "--", "install", "--version", input=b"")
    assert (ran.code, b"envelope" in ran.stdout) == (0, False), "that program ended with the client"
    ran = shotclock("wrap", "--lazy", "install", input=b"")
    assert (ran.code, ran.stdout) == (0, b""), "options of wrap precede, so it is the server"


def test_the_written_entry_starts_the_server_as_a_client_does(install: Any, home: Path) -> None:
    table = f"[mcp_servers.sdk]\ncommand = {json.dumps(sys.executable)}\nargs = [{json.dumps(str(SERVER))}]\n"
    file = write(home / ".codex/config.toml", table)
    install("codex", "--deny", "crash")
    entry = tomllib.loads(file.read_text())["mcp_servers"]["sdk"]
    with open(home / "stderr", "wb") as stderr:
        client = RawClient([entry["command"], *entry["args"]], stderr)
        try:
            client.receive(client.request("initialize", GREETING))
            client.send(method="notifications/initialized")
            tools = client.receive(client.request("tools/list"))["result"]["tools"]
            assert [tool["name"] for tool in tools] == ["add", "pid", "crash", "hang"]
            answer = client.receive(client.call("add", a=1, b=2))["result"]
            assert answer["content"][0]["text"] == "3"
            assert client.receive(client.call("crash"))["result"]["isError"] is True
        finally:
            client.process.stdin.close()  # type: ignore[union-attr]
            assert client.process.wait(15) == 0
            client.process.stdout.close()  # type: ignore[union-attr]
