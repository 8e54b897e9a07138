"""Real MCP clients before and after `shotclock wrap install`, and after its removal: each reaches its server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.session import FOLDER, PROGRAMS

pytestmark = pytest.mark.timeout(300)
LIST_WITHIN_S = 60.0  # a client and an interpreter or three on a busy machine
SERVER = [sys.executable, str(Path(__file__).parents[1] / "wrap" / "sdk_server.py")]


@dataclass(frozen=True)
class Client:
    """A client, its file, and the end of the line for a server that it has reached."""

    name: str
    file: str
    text: str
    listing: tuple[str, ...]
    connected: str


JSON_SERVER = f'{{"command": {json.dumps(SERVER[0])}, "args": [{json.dumps(SERVER[1])}]}}'
CLIENTS = (
    Client("claude", ".claude.json", f'{{"mcpServers": {{"demo": {JSON_SERVER}}}}}', ("mcp", "list"), "✔ Connected"),
    Client(
        "gemini",
        ".gemini/settings.json",
        # Gemini starts servers only in folders that it trusts.
        f'{{ // mine\n  "mcpServers": {{"demo": {JSON_SERVER}}},\n'
        '  "security": {"folderTrust": {"enabled": false}}\n}\n',
        ("mcp", "list"),
        "Connected",
    ),
    Client(
        "codex",  # it lists servers without starting them
        ".codex/config.toml",
        f"# mine\n[mcp_servers.demo] # a demo\ncommand = '{SERVER[0]}'\nargs = [\n  '{SERVER[1]}', # the server\n]\n",
        ("mcp", "get", "demo", "--json"),
        "",
    ),
)


def run(words: list[str], home: Path) -> str:
    """Return everything that a program writes: Gemini CLI lists its servers on stderr."""
    quiet = {"CI": "1", "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
    environ = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "dumb", **quiet}
    ran = subprocess.run(words, cwd=home / "project", env=environ, capture_output=True, timeout=LIST_WITHIN_S)
    assert ran.returncode == 0, ran
    return f"{ran.stdout.decode()}\n{ran.stderr.decode()}"


def look(client: Client, home: Path) -> list[str]:
    """Return the command of the server as the client lists it, which has to reach it."""
    text = run([str(FOLDER / "node_modules" / ".bin" / client.name), *client.listing], home)
    if client.name == "codex":
        transport = json.loads(text[text.index("{") : text.rindex("}") + 1])["transport"]
        return [transport["command"], *transport["args"]]
    [line] = [line for line in text.splitlines() if "demo: " in line]
    assert line.endswith(client.connected), line
    return line.partition("demo: ")[2].split(" - ")[0].removesuffix(" (stdio)").split()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_reaches_its_server_before_and_after_the_installation(client: Client, tmp_path: Path) -> None:
    home = tmp_path / "home"
    file = home / client.file
    (home / "project").mkdir(parents=True)
    file.parent.mkdir(exist_ok=True)
    file.write_text(client.text)
    assert look(client, home) == SERVER
    before = file.read_bytes()
    shotclock = str(PROGRAMS / "shotclock")
    run([shotclock, "wrap", "install", client.name, "--yes"], home)
    seen = look(client, home)
    assert (seen[:4], seen[-3:]) == ([shotclock, "wrap", "--name", "demo"], ["--", *SERVER])
    run([shotclock, "wrap", "remove", client.name, "--yes"], home)
    if client.name == "claude":  # it stores other things in its file at every start
        assert json.loads(file.read_text())["mcpServers"] == json.loads(before)["mcpServers"]
    else:
        assert file.read_bytes() == before
    assert look(client, home) == SERVER
