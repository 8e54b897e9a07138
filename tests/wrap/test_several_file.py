"""The file of several servers: its keys become options of `wrap`, and every mistake in it is reported."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock.cli.wrap import COMMAND, check_server
from shotclock.cli.wrap_file import ServersFile, read_servers
from tests.wrap.client import ANSWER_WITHIN_S, connected
from tests.wrap.several import NAMED, entry, named, scripted

pytestmark = pytest.mark.usefixtures("no_survivors")

POLL_S = 0.02


def read(folder: Path, text: str, *chosen: str, name: str = "wrap.yaml") -> ServersFile:
    (folder / name).write_text(text)
    return read_servers(str(folder / name), chosen, COMMAND, check_server)


def mistakes(folder: Path, text: str, *chosen: str, name: str = "wrap.yaml") -> list[str]:
    """Return the mistakes of a file, without its path."""
    return [each.removeprefix(f"{folder / name}: ") for each in read(folder, text, *chosen, name=name).mistakes]


def of_server(folder: Path, keys: str) -> list[str]:
    """Return the mistakes of one server, without the place."""
    found = mistakes(folder, f"servers: {{a: {{{keys}}}}}")
    return [each.removeprefix("servers.a.") for each in found]


def test_keys_become_the_words_of_one_command_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    file = read(
        tmp_path,
        """
defaults: {timeout: 5m, read-only: true}
servers:
  files:
    command: npx
    args: [-y, "@scope/server", "${HOME_OF:-/tmp}"]
    env: {DEBUG: "1", KEY: "${TOKEN}", PYTHONPATH: lib}
    cwd: .
    prefix: f_
    timeout: 2m
    idle: 30s
    read-only: false
    result-limit: 65536
    tools: {"build_*": {timeout: 30m, idle: 2m}}
    rules: [{allow: "read_*"}, {ask: destructive}, {deny: "*"}]
    lock: files.lock
  my server: {command: ./run}
""",
    )
    assert file.mistakes == []
    first, second = file.servers
    assert first.words == [
        "--name=files",
        "--timeout=2m",
        "--env=DEBUG",
        "--env=KEY",
        "--env=PYTHONPATH=lib",
        f"--cwd={tmp_path}/.",
        "--idle=30s",
        "--result-limit=65536",
        "--tool=build_*=timeout:30m,idle:2m",
        "--allow=read_*",
        "--ask=destructive",
        "--deny=*",
        f"--lock={tmp_path}/files.lock",
        "--",
        "npx",
        "-y",
        "@scope/server",
        "/tmp",
    ]
    assert first.env == {"DEBUG": "1", "KEY": "secret"}  # not on the command line, which other users can read
    assert (first.prefix, first.limits.call.timeout_ms, first.limits.call.idle_ms) == ("f_", 120_000, 30_000)
    assert second.words == ["--name=my server", "--timeout=5m", "--read-only", "--", f"{tmp_path}/./run"]
    assert second.prefix == "my_server_"


def test_every_mistake_of_a_server_is_reported_with_its_key(tmp_path: Path) -> None:
    ok = "command: x"
    for keys, expected in {
        "": ["command: is missing"],
        "command: 1": ["command: 1 should be a text: put it in quotes"],
        f"{ok}, args: x": ["args: should be a list of texts"],
        f"{ok}, args: [a, 8080]": ["args[1]: 8080 should be a text: put it in quotes"],
        f"{ok}, env: [A=1]": ["env: should be an object of texts"],
        f"{ok}, env: {{A: 1}}": ["env.A: 1 should be a text: put it in quotes"],
        f"{ok}, env: {{A: '${{NOT_SET_AT_ALL}}'}}": ["env.A: "],
        f"{ok}, timout: 1s": ["timout: unknown key; did you mean timeout?"],
        f"{ok}, zzz: 1s": ["zzz: unknown key; see shotclock wrap --help"],
        f"{ok}, tool: x": ["tool: unknown key; did you mean tools?"],
        f"{ok}, allow: x": ["allow: unknown key; did you mean rules?"],
        f"{ok}, config: x": ["config: unknown key; see shotclock wrap --help"],
        f"{ok}, lazy: 3": ["lazy: should be true or false"],
        f"{ok}, timeout: [1s]": ["timeout: should be a text"],
        f"{ok}, tools: [x]": ["tools: should be an object of patterns"],
        f"{ok}, tools: {{x: {{speed: 1s}}}}": ["tools.x.speed: unknown limit; there are timeout, idle, queue"],
        f"{ok}, tools: {{x: {{timeout: soon}}}}": ["tools: "],
        f"{ok}, rules: x": ["rules: should be as in"],
        f"{ok}, rules: [{{allow: a}}, {{maybe: a}}]": ["rules[1]: should be as in"],
        f"{ok}, on-change: ask": ["on-change: --on-change needs --lock"],
        f"{ok}, on-change: no, lock: l": ["on-change: 'no' is none of block, ask"],
        f"{ok}, timeout: soon, idel: 1s": ["idel: unknown key; did you mean idle?"],
        f"{ok}, timeout: soon, idle: later": ["timeout: ", "idle: "],
        "command: shotclock, args: [wrap, --config, x]": ["command: would start several servers again"],
        f"{ok}, url: 'http://x'": ["url: "],
    }.items():
        found = of_server(tmp_path, keys)
        assert len(found) >= len(expected), (keys, found)
        for text in expected:
            assert any(each.startswith(text) for each in found), (keys, found)


def _bomb() -> str:
    """Return aliases that unfold into 2 ** 30 values."""
    return "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))


def test_files_that_are_too_large_are_refused_at_once(tmp_path: Path) -> None:
    assert "more than 1000000 bytes" in mistakes(tmp_path, "# " + "x" * 2_000_000)[0]
    assert "more than 1000000 bytes" in read_servers("/dev/zero", (), COMMAND, check_server).mistakes[0]
    many = json.dumps({f"k{number}": 0 for number in range(70_000)})
    assert "should be an object with the key servers" in mistakes(tmp_path, many, name="mcp.json")[0]


def test_mistakes_of_the_file_are_reported_with_their_place(tmp_path: Path) -> None:
    for text, expected in {
        "servers: {a: {command: x}": "line 1: is not YAML",
        "[]": "should be an object with the key servers",
        "servers: []": "should be an object with the key servers",
        "servers: {}": "servers: has no server",
        "servers: {a: x}": "servers.a: should be an object",
        "server: {}": "server: unknown key; did you mean servers?",
        "servers: {a: {command: x}}\ndefaults: {command: x}": "defaults.command: belongs to one server",
        "servers: {a: {command: x}}\ndefaults: x": "defaults: should be an object",
        "servers:\n  a: {command: x}\n  a: {command: y}": "line 3: ",
        "servers: {a: {command: x}, b: {}}": "servers.b.command: is missing",
        "servers: {a b: {command: x}, a_b: {command: x}}": "servers.a_b.prefix: 'a_b_' is the prefix of a b, too",
        _bomb(): "line ",
    }.items():
        assert any(each.startswith(expected) for each in mistakes(tmp_path, text)), (text, mistakes(tmp_path, text))
    assert mistakes(tmp_path, "servers: {a: {command: x}}", "b") == ["has no server 'b'; it has a"]
    assert "twice" in mistakes(tmp_path, '{"servers": {}, "servers": {}}', name="mcp.json")[0]
    assert "there is no such file" in read_servers(str(tmp_path / "none"), (), COMMAND, check_server).mistakes[0]


def test_the_configuration_of_a_client_is_read_and_its_other_keys_are_ignored(tmp_path: Path) -> None:
    server = {**entry(["npx", "-y"]), "env": {"A": "${env:PATH}"}, "type": "stdio", "timeout": 60000, "disabled": False}
    for key in ("mcpServers", "servers"):
        file = read(tmp_path, json.dumps({key: {"a": server}, "inputs": []}), name="mcp.json")
        assert file.mistakes == [] and file.servers[0].words == ["--name=a", "--env=A", "--", "npx", "-y"]
        assert file.notes == [f"{tmp_path}/mcp.json: servers.a: ignored timeout, disabled"]
    off = {"a": server, "b": {**server, "disabled": True}}
    assert [each.name for each in read(tmp_path, json.dumps({"mcpServers": off}), name="mcp.json").servers] == ["a"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "shotclock", "wrap", *words]
    return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=ANSWER_WITHIN_S)


def test_mistakes_end_the_command_before_any_server_is_started(tmp_path: Path) -> None:
    file, trace = tmp_path / "wrap.yaml", tmp_path / "started"
    servers: dict[str, Any] = {
        "a": entry(["touch", str(trace)]),
        "b": {"command": "x", "idel": "1s", "timeout": "soon"},
    }
    file.write_text(json.dumps({"servers": servers}))
    ran = run("--config", str(file), "--timeout", "1s", "--", "x")
    assert ran.returncode == 125 and not trace.exists()
    for text in (
        "shotclock wrap: timeout: write it into the file of --config, under defaults or a server",
        "shotclock wrap: command: write it into the file of --config, under defaults or a server",
        f"shotclock wrap: {file}: servers.b.idel: unknown key; did you mean idle?",
    ):
        assert text in ran.stderr
    assert "--server needs --config" in run("--server", "a", "--", "x").stderr


def test_only_the_named_servers_are_started(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"a": scripted(), "b": named("x"), "c": {"url": "http://localhost"}}}))
    argv = [sys.executable, "-m", "shotclock", "wrap", "--config", str(file), "--server", "b"]
    with connected(argv) as client:
        client.greet()
        tools = client.receive(client.request("tools/list"))["result"]["tools"]
        assert [tool["name"] for tool in tools] == ["b_same", "b_only_x"]


def test_paths_are_relative_to_the_file_and_variables_reach_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    program = "import os, sys; open('seen', 'w').write(os.environ['WORD']); os.execv(sys.argv[1], sys.argv[1:])"
    server = entry([sys.executable, "-c", program, *NAMED, "x"], cwd=".", env={"WORD": "${HOME:-x}!"}, lock="pins.json")
    (folder / "wrap.yml").write_text(json.dumps({"servers": {"a": server}}))
    with connected([sys.executable, "-m", "shotclock", "wrap", "--config", str(folder / "wrap.yml")]) as client:
        client.greet()
        client.receive(client.request("tools/list"))
        give_up_at = time.monotonic() + ANSWER_WITHIN_S
        while not (folder / "pins.json").exists():
            assert time.monotonic() < give_up_at
            time.sleep(POLL_S)
    assert (folder / "seen").read_text().endswith("!") and "only_x" in (folder / "pins.json").read_text()
