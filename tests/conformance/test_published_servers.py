"""Published servers give the same answers to their clients with and without `shotclock wrap`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.listening import SHOTCLOCK, free_port, listening
from tests.conformance.published_servers import FOLDER, TRIED, PublishedServer, prepare
from tests.conformance.results import record
from tests.wrap.client import RawClient, connected

pytestmark = pytest.mark.timeout(300)
each_server = pytest.mark.parametrize("server", TRIED, ids=lambda server: server.name)
CLIENT_S = 120.0  # of one client with all of its steps, on a busy machine
LAST = (["call", "trigger-long-running-operation", {"duration": 1, "steps": 1}],)
WRAP = [SHOTCLOCK, "wrap", "--"]
HERE = Path(__file__).parent
INFO = {"name": "raw", "version": "1"}
ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": INFO,
    "io.modelcontextprotocol/clientCapabilities": {},
}
FULL = {"sampling": {}, "elicitation": {"form": {}, "url": {}}, "roots": {"listChanged": True}}
METHODS = {
    "tools": "tools/list",
    "prompts": "prompts/list",
    "resources": "resources/list",
    "templates": "resources/templates/list",
    "call": "tools/call",
    "prompt": "prompts/get",
    "read": "resources/read",
    "subscribe": "resources/subscribe",
    "level": "logging/setLevel",
}
ANSWERS = {
    "sampling/createMessage": {
        "role": "assistant",
        "content": {"type": "text", "text": "sampled"},
        "model": "scripted",
    },
    "elicitation/create": {"action": "accept", "content": {"name": "Ada", "check": True}},
    "roots/list": {"roots": [{"uri": "file:///project", "name": "project"}]},
}


def without_what_varies(server: PublishedServer, text: str) -> str:
    for pattern in server.varies:
        text = re.sub(pattern, "VARIES", text)
    return text


def both_ways(server: PublishedServer, tmp_path: Path, site: str, *, full: bool) -> Iterator[dict[str, Any]]:
    """Yield the plan of a client, first for the server itself, then for the wrapped one."""
    for front in ([], WRAP):
        place = tmp_path / "place"
        prepare(place)
        yield server.plan([*front, *server.argv(place)], place, site, full=full)


# --- a client that sees the bytes


def params_of(step: list[Any]) -> dict[str, Any]:
    match step:
        case ["call" | "prompt", name, arguments]:
            return {"name": name, "arguments": arguments, "_meta": {"progressToken": "p"}}
        case ["read" | "subscribe", uri]:
            return {"uri": uri}
        case ["level", level]:
            return {"level": level}
        case _:
            return {}


def answer(client: RawClient, id: Any) -> None:
    """Read until the answer of a request has come, and answer the server's own requests."""
    while True:
        line = client.next_line(CLIENT_S)
        assert line, "the stream ended"
        message = json.loads(line)
        if message.get("method") in ANSWERS:
            client.send(id=message["id"], result=ANSWERS[message["method"]])
        elif "method" not in message and message["id"] == id:
            return


def lines_of(plan: dict[str, Any], envelope: dict[str, Any]) -> list[bytes]:
    """Return every line that a client reads. With an envelope, it speaks the revision that has no handshake."""
    with connected(plan["command"], subprocess.DEVNULL) as client:
        if envelope:
            answer(client, client.request("server/discover", {"_meta": envelope}))
        else:
            capabilities = FULL if plan["full"] else {}
            greeting = {"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": INFO}
            answer(client, client.request("initialize", greeting))
            client.send(method="notifications/initialized")
        for step in plan["steps"]:
            params = params_of(step)
            if envelope:
                params["_meta"] = {**params.get("_meta", {}), **envelope}
            answer(client, client.request(METHODS[step[0]], params))
        return client.lines


@pytest.mark.parametrize("kind", ["bare", "full", "2026-07-28"])
@each_server
def test_every_line_reaches_a_client_byte_for_byte(
    server: PublishedServer, kind: str, tmp_path: Path, site: str
) -> None:
    if kind == "2026-07-28" and "==" not in server.package:
        pytest.skip("the servers of npm do not have this revision")
    full, envelope = kind == "full", ENVELOPE if kind == "2026-07-28" else {}
    direct, wrapped = (
        [without_what_varies(server, line.decode()) for line in lines_of(plan, envelope)]
        for plan in both_ways(server, tmp_path, site, full=full)
    )
    assert wrapped == direct
    tools = next(json.loads(line)["result"]["tools"] for line in direct if '"tools":[{' in line.replace(": ", ":"))
    expected = server.full_tools if full else server.tools
    assert tools and (not expected or len(tools) == expected)
    if full:
        record("published servers", server.package, "raw", f"{len(direct)} lines")


# --- clients of the SDKs

CLIENTS = {
    "python-1": [str(FOLDER / "python-1/bin/python"), str(HERE / "sdk_client.py")],
    "python-2": [sys.executable, str(HERE / "sdk_client.py")],
    "typescript-1": ["node", str(FOLDER / "sdk_client.mjs"), "1"],
    "typescript-2": ["node", str(FOLDER / "sdk_client.mjs"), "2"],
}


def seen_by(client: str, plan: dict[str, Any]) -> dict[str, Any]:
    shutil.copy(HERE / "sdk_client.mjs", FOLDER)  # Node.js looks for packages beside the script
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*CLIENTS[client], json.dumps(plan)], env=environ, capture_output=True, timeout=CLIENT_S)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def is_last_progress(notice: Any) -> bool:
    """Return whether a client may miss this notice: the SDKs drop progress that comes together with the answer."""
    match notice:
        case ["progress", value, total, _]:
            return bool(value == total)
        case ["progress", {"progress": value, "total": total}]:
            return bool(value == total)
        case {"method": "notifications/progress"}:
            return True  # the first generation of Python shows progress twice
        case _:
            return False


def normal(server: PublishedServer, client: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Return everything that a client saw, without what varies."""
    seen: dict[str, Any] = json.loads(without_what_varies(server, json.dumps(seen_by(client, plan))))
    # Handlers of notifications run beside the answers.
    seen["notices"] = sorted(json.dumps(notice) for notice in seen["notices"] if not is_last_progress(notice))
    return seen


@pytest.mark.parametrize("client", CLIENTS)
@each_server
def test_a_client_of_an_sdk_notices_nothing(server: PublishedServer, client: str, tmp_path: Path, site: str) -> None:
    for full in (False, True):
        direct, wrapped = (normal(server, client, plan) for plan in both_ways(server, tmp_path, site, full=full))
        assert wrapped == direct
        assert len(direct["answers"]) == len(server.plan([], tmp_path, site, full=full)["steps"])
        record("published servers", server.package, client, f"{len(direct['answers'])} answers")
        if server.name == "everything":
            assert len(direct["answers"][0]["tools"]) == (server.full_tools if full else server.tools)
            assert len(direct["questions"]) == (3 if full else 0)
            text = "".join(direct["notices"])
            assert all(word in text for word in ("progress", "notifications/message", "resources/updated"))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_over_stdio_sees_what_it_sees_over_http(
    client: str, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare a server over HTTP with the same one behind `wrap --url`."""
    server, place, sides = TRIED[0], tmp_path / "place", []
    port = free_port()
    monkeypatch.setenv("PORT", str(port))
    with listening([*server.argv(place)[:-1], "streamableHttp"], port, tmp_path / "http.log") as (url, _):
        for command in ([url], [SHOTCLOCK, "wrap", "--url", url]):
            prepare(place)
            plan = server.plan(command, place, site, full=True)
            # A last call of a second: notifications come over another connection than the answers.
            plan["steps"] += list(LAST)
            sides.append(normal(server, client, plan))
    assert sides[1] == sides[0]
    assert len(sides[0]["answers"]) == len(plan["steps"])
