"""What a function knows of its client, what the client reads of its exceptions, and how its results travel."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import Implementation

from shotclock import testing
from shotclock.calls.principal import Role
from tests.apps.app.programs.callers import app
from tests.apps.server.client import LEGACY, MODERN, connected, envelope_in, envelope_of, http_server, run
from tests.apps.web.serving import ANSWER_WITHIN_S, serving
from tests.people.issuing import issuing

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

TARGET = "tests.apps.app.programs.callers:app"
NOBODY = {"principal": None, "session": None, "claims": {}, "headers": {}, "authorization": False}
ME = Implementation(name="tester", version="1.2")
WORDS = ("serve", TARGET)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))


# --- the caller ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_a_function_sees_the_name_of_its_client_wherever_it_runs(mode: str) -> None:
    async def scenario() -> None:
        async with connected("stdio", mode, target=TARGET, client_info=ME) as (client, _):
            expected = {**NOBODY, "client": ["tester", "1.2"]}
            for tool in ("see", "see_shared", "see_inside"):
                assert (await envelope_of(client, tool))["data"] == expected, tool
            begun = await envelope_of(client, "see_later", meta={"shotclock.dev/budgetMs": 1})
            job = {"action": "wait", "job_id": begun["data"]["job_id"], "wait_ms": 20_000}
            assert (await envelope_of(client, "job", job))["data"] == expected
            read: Any = (await client.read_resource("caller://me")).contents[0]
            assert json.loads(read.text) == expected

    run(scenario())


def test_outside_of_a_server_the_caller_is_empty() -> None:
    with testing.calls(app) as call:
        assert testing.assert_ok(call("see")) == {**NOBODY, "client": ["", ""]}


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_a_function_sees_the_bearer_the_session_and_the_headers_that_serve_passes_but_no_token(
    mode: str, tmp_path: Path
) -> None:
    options = ("--pass-header", "X-Tenant", "--pass-header", "x-absent")
    with serving(tmp_path, words=WORDS, options=options) as server:
        headers = {"Authorization": f"Bearer {server.token('agent-1', Role.AGENT)}", "X-Tenant": "a", "X-Other": "b"}

        async def scenario() -> None:
            async with (
                httpx2.AsyncClient(headers=headers, trust_env=False, timeout=ANSWER_WITHIN_S) as http,
                Client(streamable_http_client(f"{server.url}/mcp", http_client=http), mode=mode) as client,
            ):
                for tool in ("see", "see_shared", "see_inside"):
                    seen = (await envelope_of(client, tool))["data"]
                    assert (seen["principal"], seen["headers"]) == ("agent-1", {"x-tenant": "a"}), tool
                    assert bool(seen["session"]) == (mode == LEGACY) and not seen["authorization"], seen
                begun = await envelope_of(client, "see_later", meta={"shotclock.dev/budgetMs": 1})
                job = {"action": "wait", "job_id": begun["data"]["job_id"], "wait_ms": 20_000}
                later = (await envelope_of(client, "job", job))["data"]
                assert (later["principal"], later["headers"]) == ("agent-1", {}), "headers are not stored"

        run(scenario())


def test_a_function_sees_the_verified_claims_of_a_token_of_the_issuer(tmp_path: Path) -> None:
    with issuing() as source, serving(tmp_path, words=WORDS, options=("--issuer", source.url)) as server:
        token = source.token(f"{server.url}/mcp", sub="ada", tenant={"id": 7})

        async def scenario() -> None:
            async with (
                httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=ANSWER_WITHIN_S) as http,
                Client(streamable_http_client(f"{server.url}/mcp", http_client=http)) as client,
            ):
                result = await client.call_tool("see", {})
                seen = envelope_in(result)["data"]
                assert seen["principal"] == f"{source.url}#ada"
                assert (seen["claims"]["sub"], seen["claims"]["tenant"]) == ("ada", {"id": 7})
                assert token not in str(result) and not seen["authorization"]

        run(scenario())


def test_headers_with_credentials_and_limits_that_make_no_sense_are_refused(shotclock: Any) -> None:
    refused = {
        ("--pass-header", "Authorization", "--http", "127.0.0.1:0"): "has credentials",
        ("--pass-header", "cookie", "--http", "127.0.0.1:0"): "has credentials",
        ("--pass-header", "a b", "--http", "127.0.0.1:0"): "is no name of a header",
        ("--pass-header", "x-tenant"): "goes with --http",
        ("--result-limit", "9M"): "must be a number of bytes between",
        ("--result-limit", "10"): "must be a number of bytes between",
        ("--result-limit", "many"): "is not a number of bytes",
    }
    for words, reason in refused.items():
        ended = shotclock("serve", TARGET, *words, "--json")
        assert ended.code == 2 and reason.encode() in ended.stdout, (words, ended)


# --- exceptions ---------------------------------------------------------------------------------------------------


def test_the_text_of_an_exception_that_the_app_names_reaches_the_caller_and_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(target=TARGET) as (client, _):
            texts = {"named": "not a text", "own": "no item 7", "empty": "ValueError"}
            for kind, text in texts.items():
                error = (await envelope_of(client, "fails", {"kind": kind}))["error"]
                assert (error["code"], error["message"]) == ("GENERAL_ERROR", text), kind
                assert error["context"]["exception"] in ("UnicodeError", "Unknown", "ValueError")
            assert (await envelope_of(client, "fails_early"))["error"]["message"] == "no such database"
            assert (await envelope_of(client, "fails_in_thread"))["error"]["message"] == "refused in thread"
            assert (await envelope_of(client, "fails_on_loop"))["error"]["message"] == "refused on the loop"
            hidden = await client.call_tool("fails", {"kind": "other"})
            assert envelope_in(hidden)["error"]["code"] == "INTERNAL_ERROR" and "hunter2" not in str(hidden)
            with pytest.raises(MCPError, match="no such note"):
                await client.read_resource("broken://1")

    run(scenario())


def test_only_classes_of_exceptions_can_be_shown() -> None:
    from shotclock import App

    for wrong in ("ValueError", (KeyboardInterrupt,), (ValueError("x"),), (5,)):
        with pytest.raises(TypeError, match="classes of exceptions"):
            App("wrong", errors_shown=wrong)  # type: ignore[arg-type]


# --- results ------------------------------------------------------------------------------------------------------


def test_a_result_above_the_limit_of_the_server_is_refused_with_what_to_do() -> None:
    async def scenario() -> None:
        async with connected("stdio", MODERN, "--result-limit", "2k", target=TARGET) as (client, _):
            assert (await envelope_of(client, "prints", {"count": 1000}))["ok"]
            refused = await client.call_tool("prints", {"count": 3000})
            error = envelope_in(refused)["error"]
            assert error["code"] == "RESULT_TOO_LARGE" and "2048 are the most" in error["message"]
            text = str(refused.content[0])
            assert "ask for less" in text and "xxx" not in str(refused), text

    run(scenario())


def test_what_slow_readers_leave_unread_is_bounded_together() -> None:
    """Clients that send a request and never read: the oldest are dropped, and another one is answered."""
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "prints", "arguments": {"count": 3_000_000}},
    }
    body["params"]["_meta"] = {  # type: ignore[index]
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": "slow", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    content = json.dumps(body).encode()
    with http_server(target=TARGET) as (url, _):
        address = ("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))
        head = (
            f"POST /mcp HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
            f"Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: {MODERN}\r\n"
            f"Mcp-Method: tools/call\r\nMcp-Name: prints\r\nContent-Length: {len(content)}\r\n\r\n"
        ).encode()
        slow = []
        for _ in range(24):
            sock = socket.socket()
            sock.settimeout(ANSWER_WITHIN_S)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(address)
            sock.sendall(head + content)
            assert sock.recv(12) == b"HTTP/1.1 200", sock.recv(1000)
            slow.append(sock)

        async def scenario() -> None:
            async with Client(url, mode=MODERN) as client:
                assert (await envelope_of(client, "numbers"))["ok"]

        run(scenario())
        dropped = 0
        for sock in slow:
            sock.settimeout(0.2)
            read, give_up_at = 12, time.monotonic() + ANSWER_WITHIN_S
            try:
                while read < 6_000_000 and time.monotonic() < give_up_at and (part := sock.recv(1_000_000)):
                    read += len(part)
            except (TimeoutError, ConnectionError):
                pass
            dropped += read < 6_000_000
            sock.close()
        assert 3 <= dropped <= 20, "more than the limit was left unread, and some of it fits"
