"""`shotclock wrap install`: the configuration of an MCP client, before and after, and the servers it starts then."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.agents.known_agents import CLIENTS
from shotclock.core.errors import Failure
from shotclock.wrap.cli import COMMAND
from tests.agents.installers import Installer, options
from tests.command_line import Running, wait_for
from tests.wrap.client import GREETING, RawClient

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

SERVER = Path(__file__).parents[1] / "wrap" / "sdk_server.py"
TABLES = {"claude": "mcpServers", "codex": "mcp_servers", "cursor": "mcpServers", "vscode": "servers"}
TABLES["gemini"] = "mcpServers"
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


def words_of(entry: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return our words without the program, and the command behind them."""
    assert os.path.isabs(entry["command"]) and os.path.basename(entry["command"]) == "shotclock", entry
    place = entry["args"].index("--")
    return entry["args"][: place + 1], entry["args"][place + 1 :]


def states_of(answer: Any) -> dict[str, str]:
    return {each["name"]: each["state"] for each in answer["servers"]}


def forms_of(client: str) -> list[str]:
    """Return the forms that the client reads itself."""
    count = len(JSON_TEXTS) if client in ("cursor", "vscode") else len(JSON_TEXTS) - 1
    return [form.replace("TABLE", TABLES[client]) for form in (TOML_TEXTS if client == "codex" else JSON_TEXTS[:count])]


@pytest.mark.parametrize("client", CLIENTS)
def test_every_form_is_wrapped_in_place_and_restored_byte_for_byte(client: str, home: Path) -> None:
    installer = Installer("wrap", client)
    for text in forms_of(client):
        installer.write(text)
        expected = installer.data
        assert installer.install()["changed"] is True
        written, data = installer.text, installer.data
        ours, command = words_of(data[TABLES[client]]["a"])
        assert command == COMMAND_OF_A
        assert ours == ["wrap", "--name", "a", *TIMEOUTS.get(client, []), "--"]
        data[TABLES[client]]["a"] |= {"command": command[0], "args": command[1:]}
        assert data == expected, "nothing else has changed"
        assert (installer.install()["changed"], installer.text) == (False, written), "twice changes nothing"
        assert installer.remove()["changed"] is True
        assert (installer.text, installer.remove()["changed"]) == (text, False)


def test_a_removal_is_exact_also_without_the_kept_text(home: Path) -> None:
    more = ['{"TABLE": {"a": {"command": "npx"}}}', '{"TABLE": {"a": {\r\n\t"command": "npx"\r\n}}}']
    more += ['{"TABLE": {"a": {"command": "npx", "args": [ ]}}}', '{"TABLE": {"a": {"command": "x", "args": [\n]}}}']
    tables = ['[TABLE.a]\n  command = "npx" # c\n', '[TABLE]\na = {command = "npx"}', 'TABLE.a.command = "npx"\r\n']
    tables += ['[TABLE.a]\ncommand = "npx"\nargs = [ # none\n]\n']
    for client, others in (("cursor", more), ("codex", tables)):
        installer = Installer("wrap", client)
        for text in [*forms_of(client), *(form.replace("TABLE", TABLES[client]) for form in others)]:
            installer.write(text)
            assert installer.install(given=options("--timeout", "5m"))["changed"] is True
            for kept in (home / ".local").rglob("wrap-*.json"):
                kept.unlink()
            installer.remove()
            assert installer.text == text


def test_a_server_without_arguments_gets_them() -> None:
    installer = Installer("wrap", "cursor")
    installer.write('{\n  "mcpServers": {\n    "a": {\n      "command": "serve"\n    }\n  }\n}\n')
    installer.install()
    assert words_of(installer.servers["a"]) == (["wrap", "--name", "a", "--"], ["serve"])
    assert '\n      "args": ["wrap", "--name", "a", "--", "serve"],\n      "command": "' in (installer.text or "")


def test_after_a_change_by_the_user_only_our_words_are_removed() -> None:
    installer, text = Installer("wrap", "claude"), JSON_TEXTS[1].replace("TABLE", "mcpServers")
    installer.write(text)
    installer.install(given=options("--ask", "destructive", "--timeout=1m"))
    changed, expected = installer.data, json.loads(text)
    by_hand = {"command": "shotclock", "args": ["wrap", "--", "by-hand"]}
    for content in (changed, expected):
        content["mcpServers"]["a"]["args"].append("mine")
        content["mcpServers"]["b"] = by_hand
    installer.write(json.dumps(changed, indent=2))
    answer = installer.remove()
    assert "changed since" in answer["notes"][0]
    assert installer.data == expected
    assert answer["servers"][1]["reason"] == "it was wrapped by hand"
    installer.write('{"mcpServers": {"a": {"command": "x"}}}')
    installer.install()
    entry = installer.data
    entry["mcpServers"]["a"]["args"].remove("x")
    installer.write(json.dumps(entry))
    assert installer.remove()["changed"] is False, "without a command there is nothing to restore"
    installer.write(None)
    assert installer.remove()["changed"] is False


def test_an_empty_list_of_arguments_stays_after_other_changes() -> None:
    installer = Installer("wrap", "cursor")
    for text in ('{"mcpServers": {"a": {"args": [ ], "command": "x"}}}', '{"mcpServers": {"a": {"command": "x"}}}'):
        installer.write(text)
        installer.install()
        installer.write(f"{installer.text}\n")
        installer.remove()
        assert installer.text == text + "\n"


def test_options_are_put_in_and_updated_where_others_are_given() -> None:
    installer, text = Installer("wrap", "cursor"), JSON_TEXTS[2].replace("TABLE", "mcpServers")
    installer.write(text)
    given = ["--timeout", "2m", "--allow", "read_* path=/tmp/*", "--ask=destructive", "--read-only", "--env", "A=b c"]
    for words, expected in ((given, given), ([], given), (["--lazy"], ["--lazy"]), ([], ["--lazy"])):
        installer.install(given=options(*words))
        ours, command = words_of(installer.servers["a"])
        assert command == COMMAND_OF_A
        assert ours[3:-1] == expected
        assert not COMMAND.read([*ours[1:], *command]).mistakes
    installer.remove()
    assert installer.text == text


def test_only_the_named_servers_are_changed() -> None:
    names, installer = ["plain", "with.dots", "quotes\"'", "--dashes", "ünicode \\"], Installer("wrap", "codex")
    table = "".join(f"[mcp_servers.{json.dumps(name)}]\ncommand = 'run'\n" for name in names)
    installer.write(table)
    for place, name in enumerate(names):
        words = options("--lock", "/tmp/pins.json", servers=(name,))
        states = states_of(installer.install(names=[name], given=words))
        assert [states[each] for each in names[: place + 1]] == ["wrapped"] * (place + 1)
        assert all(states[each] == "not wrapped" for each in names[place + 1 :])
        ours, command = words_of(installer.servers[name])
        reading = COMMAND.read([*ours[1:], *command])
        assert (reading.values["name"], reading.typed["command"], reading.mistakes) == (name, ["run"], [])
    states = states_of(installer.remove(names=["plain"]))
    assert [states[each] for each in names] == ["not wrapped"] + ["wrapped"] * 4
    installer.remove()
    assert installer.text == table, "the kept text is that from before the first installation"


def test_servers_of_projects_in_the_file_of_claude_code_are_wrapped_too() -> None:
    entry = {"type": "stdio", "command": "serve", "args": [], "env": {}}
    content = {
        "numStartups": 3,
        "projects": {"/a": {"mcpServers": {"one": entry}, "allowedTools": []}, "/b": {"mcpServers": {}}, "/c": 3},
        "mcpServers": {"one": entry},
    }
    installer = Installer("wrap", "claude")
    installer.write(json.dumps(content, indent=2))
    servers = [(each["name"], each["project"], each["state"]) for each in installer.install()["servers"]]
    assert servers == [("one", None, "wrapped"), ("one", "/a", "wrapped")]
    for each in (installer.servers["one"], installer.data["projects"]["/a"]["mcpServers"]["one"]):
        assert words_of(each) == (["wrap", "--name", "one", "--"], ["serve"])
    installer.remove()
    assert installer.text == json.dumps(content, indent=2)


def test_servers_that_cannot_be_wrapped_are_left_and_named(shotclock: Any) -> None:
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
    installer = Installer("wrap", "cursor")
    installer.write(json.dumps({"mcpServers": left}))
    answer = installer.install()
    assert answer["changed"] is False and set(states_of(answer).values()) == {"left as it is"}
    reasons = {each["name"]: each["reason"] for each in answer["servers"]}
    assert reasons["http"] == reasons["bare"] == "it is not reached over stdin and stdout"
    assert (reasons["text"], reasons["hand"]) == ("its args are not a list of texts", "it was wrapped by hand")
    assert "secret" not in json.dumps(answer)
    shown = shotclock("wrap", "install", "cursor", "--yes", "--format", "text").stdout.decode()
    assert "nothing to change" in shown and "http left as it is: it is not reached over stdin and stdout" in shown
    installer.write('{"mcpServers": {"a": {"\\u0063ommand": "x"}}}')
    with pytest.raises(Failure, match="'a' cannot be changed in place"):
        installer.install()


def test_without_servers_there_is_nothing_to_do_and_without_a_file_it_says_where_it_looked() -> None:
    for client in CLIENTS:
        installer = Installer("wrap", client, project=True)
        with pytest.raises(Failure, match=re.escape(str(installer.file))) as missing:
            installer.install()
        assert missing.value.code == "FILE_NOT_FOUND"
        empty = ["", "\n", "# only this\n", "[mcp_servers]\n"]
        for text in empty if client == "codex" else ["", " \n", "{}", '{"mcpServers": {}}', '{"mcpServers": 3}']:
            installer.write(text)
            answer = installer.install()
            assert (answer["changed"], answer["servers"], installer.text) == (False, [], text)


def test_the_timeout_lies_below_the_limit_of_the_client() -> None:
    for client, limit, given, words, note in (
        ("codex", "tool_timeout_sec = 60", [], ["--timeout", "57s"], None),
        ("codex", "tool_timeout_sec = 120.5", ["--grace", "500ms"], ["--timeout", "1m59s", "--grace", "500ms"], None),
        ("codex", "tool_timeout_sec = 3600", [], [], None),
        ("codex", "tool_timeout_sec = 2", [], [], "after 2s"),
        ("codex", "", ["--timeout", "5m"], ["--timeout", "5m"], "Codex stops waiting for a after 5m"),
        ("codex", "", ["--timeout", "1m"], ["--timeout", "1m"], None),
        ("codex", "", ["--timeout", "0"], ["--timeout", "0"], "after 5m"),
        ("gemini", ', "timeout": 30000', [], ["--timeout", "27s"], None),
        ("gemini", ', "timeout": true', [], ["--timeout", "9m57s"], None),
        ("claude", ', "timeout": 60000', [], ["--timeout", "57s"], None),
        ("claude", ', "timeout": 500', [], [], None),
        ("vscode", ', "timeout": 500', [], [], None),
    ):
        text = f'[mcp_servers.a]\ncommand = "x"\n{limit}\n'
        if client != "codex":
            text = f'{{"{TABLES[client]}": {{"a": {{"command": "x"{limit}}}}}}}'
        installer = Installer("wrap", client)
        installer.write(text)
        notes = installer.install(given=options(*given))["notes"]
        assert words_of(installer.servers["a"])[0][3:-1] == words, (client, limit, given)
        assert notes == [] if note is None else note in notes[0], (client, limit, given, notes)


def test_another_file_in_the_form_of_a_client_is_wrapped_and_a_path_in_a_project_is_warned_about(home: Path) -> None:
    installer = Installer("wrap", "vscode", file=home / "project" / "other.json")
    installer.write(JSON_TEXTS[0].replace("TABLE", "servers"))
    answer = installer.install()
    assert (answer["file"], answer["scope"], states_of(answer)) == (str(installer.file), None, {"a": "wrapped"})
    installer = Installer("wrap", "vscode", project=True)
    installer.write(JSON_TEXTS[0].replace("TABLE", "servers"))
    answer = installer.install()
    assert (answer["scope"], "do not commit" in answer["notes"][0]) == ("project", True)
    assert json.loads(Path(answer["backup"]).read_text())["before"] == JSON_TEXTS[0].replace("TABLE", "servers")


def test_refusals_say_what_to_do(shotclock: Any, home: Path) -> None:
    installer, text = Installer("wrap", "cursor"), JSON_TEXTS[0].replace("TABLE", "mcpServers")
    installer.write(text)
    for words, code, message in (
        (("cursor", "--server", "b"), 5, "there is no server 'b'"),
        (("zed",), 2, "none of claude, codex, cursor, vscode, gemini"),
        (("cursor", "--timeout", "soon"), 2, "timeout: "),
        (("cursor", "--lock", "pins.json"), 2, "with one --server"),
        (("cursor", "--timeout", "--json"), 2, "timeout: --timeout needs a value"),
        (("cursor", "--on-change", "ask"), 2, "needs --lock"),
        (("cursor", "--name", "x"), 2, "--name: unknown option"),
        (("cursor", "--project", "--file", "x"), 2, "exclude each other"),
        (("cursor", "--scope", "project"), 2, "unknown option; did you mean --project?"),
        (("cursor", "--scope=user"), 2, "unknown option; did you mean --user?"),
        (("cursor", "--tiemout", "3s"), 2, "did you mean --timeout?"),
        (("cursor", "--timeout", "30", "--denny", "x"), 2, "30 has no unit"),
        (("cursor", "--timeout", "30", "--denny", "x"), 2, "did you mean --deny?"),
        (("cursor", "--sever", "a"), 2, "did you mean --server?"),
    ):
        ran = shotclock("wrap", "install", *words, "--yes")
        assert (ran.code, message in ran.json()["error"]["message"]) == (code, True), (words, ran)
    ran = shotclock("wrap", "install", "cursor")
    error = ran.json()["error"]
    assert (ran.code, error["code"], installer.text) == (2, "ARG_ERROR", text)
    assert '+{"mcpServers": {"a": {"command": "' in error["context"]["diff"]
    assert shotclock("wrap", "install").code == 2
    assert b"shotclock wrap --help" not in shotclock("wrap", "install", "--help").stdout


def test_an_installation_that_is_killed_leaves_the_old_text_or_the_new_one(start: Callable[..., Running]) -> None:
    installer, text = Installer("wrap", "cursor"), JSON_TEXTS[2].replace("TABLE", "mcpServers")
    installer.write(text)
    installer.install()
    new = installer.text
    for verb, before in (("install", text), ("remove", new)):
        for delay_s in (0.02, 0.05, 0.1, 0.2):
            installer.remove()
            if verb == "remove":
                installer.install()
            assert installer.text == before
            running = start("wrap", verb, "cursor", "--yes")
            try:
                running.ends(within_s=delay_s)
            except subprocess.TimeoutExpired:
                running.signal(signal.SIGKILL)
            running.ends()
            assert installer.text in (text, new)
            wait_for(lambda: not list(installer.file.parent.glob(".mcp.json.*")), "the end of the child that writes")
            assert installer.text in (text, new)
    installer.install()
    installer.remove()
    assert installer.text == text


def test_status_lists_the_servers_of_every_client(shotclock: Any) -> None:
    for client, project, text in (
        ("codex", False, TOML_TEXTS[1].replace("TABLE", "mcp_servers")),
        ("claude", True, '{"mcpServers": {"a": {"url": "x"}}}'),
        ("cursor", False, "{"),
    ):
        Installer("wrap", client, project=project).write(text)
    Installer("wrap", "codex").install()
    rows = {(row["client"], row["scope"]): row for row in shotclock("wrap", "status").json()["data"]["clients"]}
    assert len(rows) == 10
    assert rows["codex", "user"]["servers"] == [{"name": "a", "project": None, "state": "wrapped", "reason": None}]
    assert rows["claude", "project"]["servers"][0]["state"] == "left as it is"
    assert "line 1" in rows["cursor", "user"]["problem"]
    assert (rows["vscode", "user"]["exists"], rows["vscode", "user"]["servers"]) == (False, [])
    for words in (("wrap", "status", "codex", "--format", "text"), ("--format", "text", "wrap", "status", "codex")):
        assert "  a wrapped" in shotclock(*words).stdout.decode()


def test_an_option_that_is_the_choice_of_another_one_is_named(shotclock: Any) -> None:
    assert b"unknown option; did you mean --on-change block?" in shotclock("wrap", "--block", "--", "true").stderr


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


def test_the_written_entry_starts_the_server_as_a_client_does(shotclock: Any, home: Path) -> None:
    table = f"[mcp_servers.sdk]\ncommand = {json.dumps(sys.executable)}\nargs = [{json.dumps(str(SERVER))}]\n"
    installer = Installer("wrap", "codex")
    installer.write(table)
    assert shotclock("wrap", "install", "codex", "--deny", "crash", "--yes").code == 0
    entry = installer.servers["sdk"]
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
