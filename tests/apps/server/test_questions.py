"""Questions to a client that leaves, floods, lies, or whose function dies meanwhile."""

import asyncio
import http.client
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.shared.exceptions import MCPError
from mcp_types import ElicitResult

from shotclock import testing
from shotclock.apps.server import _paused_calls as paused_calls
from shotclock.calls.principal import Principal, Role
from shotclock.core.limits import WallTime
from shotclock.people.access import Access
from shotclock.store.store import Store
from tests.apps.app.conftest import Home, home
from tests.apps.app.programs.asking import app
from tests.apps.server.client import (
    ENDED_WITHIN_S,
    LEGACY,
    MODERN,
    NO_ANSWER_S,
    connected,
    envelope_in,
    http_server,
    run,
    served,
)
from tests.apps.server.test_lifecycle import ENVELOPED, hear
from tests.apps.server.test_tasks import post
from tests.calls.bounds import eventually

__all__ = ["home"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]
TARGET = "tests.apps.app.programs.asking:app"
ASKS: dict[str, Any] = {**ENVELOPED, "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}}}
MOST_HELD_BYTES = 60_000_000


async def agree(context: Any, params: Any) -> ElicitResult:
    return ElicitResult(action="accept", content={"answer": True})


async def never(context: Any, params: Any) -> ElicitResult:
    await asyncio.sleep(NO_ANSWER_S)
    raise AssertionError("it was asked for too long")


def send(process: Any, message: dict[str, Any]) -> None:
    process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    process.stdin.flush()


def shake_hands(process: Any, capabilities: dict[str, Any]) -> None:
    """Connect as an older client."""
    info = {"name": "raw", "version": "1"}
    params = {"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": info}
    send(process, {"id": 0, "method": "initialize", "params": params})
    assert hear(process)["id"] == 0
    send(process, {"method": "notifications/initialized"})


def in_flight(address: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=NO_ANSWER_S)
    connection.request("GET", "/health")
    answer = json.loads(connection.getresponse().read())
    assert "in_flight" in answer, answer
    return int(answer["in_flight"])


def busy_worker(folder: Path) -> int:
    """The worker that wrote its pid into the folder."""
    eventually(lambda: (folder / "pid").exists(), within=NO_ANSWER_S)
    return int((folder / "pid").read_text())


# --- a client that leaves -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_nothing_is_left_of_a_question_when_the_client_of_stdio_leaves(mode: str, tmp_path: Path) -> None:
    with served("serve", TARGET) as process:
        server = psutil.Process(process.pid)
        call: dict[str, Any] = {"name": "order", "arguments": {"folder": str(tmp_path)}}
        if mode == LEGACY:
            shake_hands(process, {"elicitation": {}})
        send(process, {"id": 1, "method": "tools/call", "params": call | ({"_meta": ASKS} if mode == MODERN else {})})
        asked = hear(process)
        assert asked.get("method") == "elicitation/create" or asked["result"]["resultType"] == "input_required"
        below = server.children(recursive=True)
        assert process.stdin is not None
        process.stdin.close()
        _, alive = psutil.wait_procs([server, *below], ENDED_WITHIN_S)
        assert not alive


def test_an_open_question_of_a_client_that_drops_the_connection_ends_with_its_session(tmp_path: Path) -> None:
    with http_server(target=TARGET) as (url, _):
        address = url.removeprefix("http://").removesuffix("/mcp")
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}

        def post(message: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
            connection = http.client.HTTPConnection(address, timeout=NO_ANSWER_S)
            connection.request("POST", "/mcp", json.dumps({"jsonrpc": "2.0", **message}), headers)
            return connection, connection.getresponse()

        info = {"name": "raw", "version": "1"}
        hello = {"protocolVersion": "2025-11-25", "capabilities": {"elicitation": {}}, "clientInfo": info}
        connection, answer = post({"id": 0, "method": "initialize", "params": hello})
        answer.read()
        connection.close()
        headers |= {"Mcp-Session-Id": answer.headers["Mcp-Session-Id"], "MCP-Protocol-Version": "2025-11-25"}
        post({"method": "notifications/initialized"})[0].close()
        call = {"name": "order", "arguments": {"folder": str(tmp_path)}}
        connection, answer = post({"id": 1, "method": "tools/call", "params": call})
        while b"elicitation/create" not in answer.readline():
            pass
        answer.close()
        connection.close()
        assert in_flight(address) == 1  # an older client may come back to its session
        connection = http.client.HTTPConnection(address, timeout=NO_ANSWER_S)
        connection.request("DELETE", "/mcp", headers=headers)
        assert connection.getresponse().status == 200
        eventually(lambda: in_flight(address) == 0, within=ENDED_WITHIN_S)


# --- a function that dies -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_a_worker_that_is_killed_while_it_asks_is_answered_and_its_question_withdrawn(
    mode: str, tmp_path: Path
) -> None:
    with served("serve", TARGET) as process:
        call: dict[str, Any] = {"name": "ask_with_pid", "arguments": {"folder": str(tmp_path)}}
        if mode == LEGACY:
            shake_hands(process, {"elicitation": {}})
        call |= {"_meta": ASKS} if mode == MODERN else {}
        send(process, {"id": 1, "method": "tools/call", "params": call})
        asked = hear(process)
        os.kill(busy_worker(tmp_path), signal.SIGKILL)
        if mode == LEGACY:
            heard = [hear(process), hear(process)]
            (answer,) = [each for each in heard if each.get("id") == 1]
            (withdrawn,) = [each for each in heard if "method" in each]
            assert withdrawn["method"] == "notifications/cancelled"
            assert withdrawn["params"]["requestId"] == asked["id"]
        else:
            again = {
                "requestState": asked["result"]["requestState"],
                "inputResponses": {"answer": {"action": "cancel"}},
            }
            send(process, {"id": 2, "method": "tools/call", "params": call | again})
            answer = hear(process)
            assert answer["id"] == 2
        assert answer["result"]["isError"] and "WORKER_CRASHED" in answer["result"]["content"][0]["text"]


# --- a client that lies ---------------------------------------------------------------------------


def test_only_the_client_of_a_paused_call_continues_it_and_only_once(home: Home) -> None:
    with Store.open(home.path) as store:
        now = WallTime.of_ns(time.time_ns())
        alice, bob = (Access(store).issue(name, Role.AGENT, Principal.local(), now).text for name in ("alice", "bob"))
    with http_server("--require-token", target=TARGET) as (url, _):
        call: dict[str, Any] = {"name": "patient", "arguments": {}, "declares": False}
        paused = post(url, "tools/call", alice, **call)["result"]
        assert list(paused["inputRequests"]) == ["answer"]
        given = {"inputResponses": {"answer": {"action": "accept", "content": {"answer": "Eve"}}}}
        state = {"requestState": paused["requestState"]}
        for token, params in ((bob, given | state), (alice, given | {"requestState": "x" * 43})):
            assert "names no waiting call" in post(url, "tools/call", token, **call, **params)["error"]["message"]
        for wrong in ({"answer": "Eve"}, [], "Eve", {"answer": [1]}):
            error = post(url, "tools/call", alice, **call, **state, inputResponses=wrong)["error"]
            assert error["code"] == -32602, error
        again = post(url, "tools/call", alice, **call, **state, inputResponses={"other": {"action": "cancel"}})[
            "result"
        ]
        assert list(again["inputRequests"]) == ["answer"] and again["requestState"] != paused["requestState"]
        state = {"requestState": again["requestState"]}
        given["inputResponses"]["answer"]["content"]["answer"] = "Ada"
        done = post(url, "tools/call", alice, **call, **given, **state)["result"]
        assert done["structuredContent"] == {"result": "Ada"}
        assert "names no waiting call" in post(url, "tools/call", alice, **call, **given, **state)["error"]["message"]


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_a_call_asks_a_bounded_number_of_questions_at_a_time(mode: str) -> None:
    async def scenario() -> Any:
        async with testing.client(app, mode=mode, elicitation_callback=agree) as client:
            return envelope_in(await client.call_tool("ask_often", {"questions": 1_000}))

    asked = run(scenario())["data"]["result"]  # the first answers may come before the last questions
    assert 20 <= asked < 500


def test_a_client_that_forgets_its_calls_gets_places_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paused_calls, "MOST_PAUSED", 2)
    monkeypatch.setattr(paused_calls, "GIVES_WAY_AFTER_MS", 0)

    async def scenario() -> None:
        async with testing.client(app, mode=MODERN, elicitation_callback=agree) as client:
            paused = [await client.session.call_tool("patient", {}, allow_input_required=True) for _ in range(3)]
            states = [each.request_state for each in paused]
            assert all(states)
            answers = {"answer": ElicitResult(action="accept", content={"answer": "Ada"})}
            with pytest.raises(MCPError, match="names no waiting call"):
                await client.session.call_tool("patient", {}, request_state=states[0], input_responses=answers)
            for state in states[1:]:
                done = await client.session.call_tool("patient", {}, request_state=state, input_responses=answers)
                assert envelope_in(done)["data"] == {"result": "Ada"}

    run(scenario())


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_a_function_in_the_shared_process_asks(mode: str) -> None:
    async def answer(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"answer": "Ada"})

    async def scenario() -> Any:
        async with testing.client(app, mode=mode, elicitation_callback=answer) as client:
            return await asyncio.gather(*(client.call_tool("ask_in_shared", {}) for _ in range(5)))

    assert [envelope_in(each)["data"] for each in run(scenario())] == [{"result": "Ada"}] * 5


# --- a log that is not read -----------------------------------------------------------------------


def test_a_flood_of_messages_for_a_client_that_does_not_read_is_bounded_and_counted() -> None:
    with served("serve", TARGET) as process:
        server = psutil.Process(process.pid)
        shake_hands(process, {})
        send(process, {"id": 1, "method": "tools/call", "params": {"name": "price", "arguments": {}}})
        hear(process)
        before = server.memory_info().rss
        count = 100_000
        send(process, {"id": 2, "method": "tools/call", "params": {"name": "flood", "arguments": {"messages": count}}})
        most = before
        seen, dropped = 0, 0
        pause_until = time.monotonic() + 1
        while time.monotonic() < pause_until:  # the client does not read meanwhile
            most = max(most, server.memory_info().rss)
            time.sleep(0.05)
        while (message := hear(process)).get("id") != 2:
            text = message["params"]["data"]
            if text.endswith("the client reads slowly"):
                dropped += int(text.split()[0])
            else:
                seen += 1
        most = max(most, server.memory_info().rss)
        assert message["result"]["structuredContent"] == {"result": "flooded"}
        assert seen + dropped == count and dropped, (seen, dropped)
        assert most - before < MOST_HELD_BYTES


def test_a_client_of_the_2026_revision_without_a_level_gets_no_messages() -> None:
    seen: list[Any] = []

    async def note(params: Any) -> None:
        seen.append(params)

    async def scenario() -> None:
        async with connected("stdio", MODERN, target=TARGET, logging_callback=note) as (client, _):
            assert envelope_in(await client.call_tool("chatty", {}))["ok"]

    run(scenario())
    assert not seen
