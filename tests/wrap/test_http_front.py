"""A stdio server offered over streamable HTTP, to clients of both generations of the protocol."""

import asyncio
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import Client, StdioServerParameters

from shotclock.cli.wrap import words_of_child
from tests.wrap.client import ANSWER_WITHIN_S, GREETING, SERVER
from tests.wrap.http_client import (
    ENVELOPE_OF_PROTOCOL,
    MODERN,
    Answer,
    Front,
    HttpClient,
    front,
    read_events,
    session,
    wait_until,
)

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

HERE = Path(__file__).parent
SDK_SERVER = [sys.executable, str(HERE / "sdk_server.py")]
ASKING_SERVER = [sys.executable, str(HERE / "asking_server.py")]
MODERN_SERVER = [*SERVER, "--modern"]
NO_ANSWER_S = 60.0
MODES = ["legacy", "2026-07-28", "auto"]


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, timeout=10)
    return [int(each) for each in found.stdout.split()]


# --- the SDK's client ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_client_sees_the_same_server_as_over_stdio(mode: str) -> None:
    async def look(server: Any) -> list[str]:
        async with Client(server, mode=mode, read_timeout_seconds=NO_ANSWER_S) as client:
            tools = await client.list_tools()
            sums = [await client.call_tool("add", {"a": number, "b": 1}) for number in range(3)]
            return [tools.model_dump_json(), *(each.model_dump_json() for each in sums)]

    direct = StdioServerParameters(command=SDK_SERVER[0], args=SDK_SERVER[1:], env=dict(os.environ))
    with front(server=SDK_SERVER) as served:
        assert asyncio.run(look(direct)) == asyncio.run(look(served.url))


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_progress_logs_and_questions_reach_the_client(mode: str) -> None:
    async def use(server: Any) -> list[Any]:
        seen: list[Any] = []

        async def progress(step: float, total: float | None, message: str | None) -> None:
            seen.append(("progress", step, total))

        async def log(params: types.LoggingMessageNotificationParams) -> None:
            seen.append(("log", params.data))

        async def sample(context: Any, params: Any) -> types.CreateMessageResult:
            content = types.TextContent(type="text", text="sampled")
            return types.CreateMessageResult(role="assistant", content=content, model="m")

        async def elicit(context: Any, params: Any) -> types.ElicitResult:
            return types.ElicitResult(action="accept", content={"name": "Ada"})

        client = Client(
            server,
            mode=mode,
            read_timeout_seconds=NO_ANSWER_S,
            logging_callback=log,
            log_level="info",
            sampling_callback=sample,
            elicitation_callback=elicit,
        )
        async with client:
            reported = await client.call_tool("report", {"steps": 3}, progress_callback=progress)
            answers = [reported.model_dump_json()]
            if mode == "legacy":  # the other revision has no requests of servers
                answers += [(await client.call_tool(tool, {})).model_dump_json() for tool in ("sample", "elicit")]
            return [*sorted(map(str, seen)), *answers]

    direct = StdioServerParameters(command=ASKING_SERVER[0], args=ASKING_SERVER[1:], env=dict(os.environ))
    with front(server=ASKING_SERVER) as served:
        over_http = asyncio.run(use(served.url))
    assert over_http == asyncio.run(use(direct))
    assert sum("progress" in each for each in over_http) >= 3


def test_subscriptions_stay_open_and_belong_to_their_client() -> None:
    async def use(url: str) -> None:
        async with Client(url, mode=MODERN) as first, Client(url, mode=MODERN) as second:
            async with first.listen(tools_list_changed=True) as heard, second.listen(tools_list_changed=True) as other:
                await first.call_tool("change", {})
                for subscription in (heard, other):
                    event = await asyncio.wait_for(anext(aiter(subscription)), NO_ANSWER_S)
                    assert "ToolsListChanged" in repr(event)
            assert (await second.call_tool("wait", {"seconds": 0})).content[0].text == "waited"  # type: ignore[union-attr]

    with front(server=ASKING_SERVER) as served:
        asyncio.run(use(served.url))


def test_a_hanging_call_is_answered_on_time() -> None:
    async def use(url: str, mode: str) -> None:
        async with Client(url, mode=mode, read_timeout_seconds=NO_ANSWER_S) as client:
            failed = await client.call_tool("hang", {})
            assert failed.is_error and "300ms" in failed.content[0].text  # type: ignore[union-attr]
            assert (await client.call_tool("add", {"a": 1, "b": 2})).structured_content == {"result": 3}

    with front("--tool", "hang=timeout:300ms", server=SDK_SERVER) as served:
        for mode in ("legacy", MODERN):
            asyncio.run(use(served.url, mode))


def test_a_client_of_both_generations_falls_back_for_an_old_server() -> None:
    async def use(url: str) -> str:
        async with Client(url, mode="auto", read_timeout_seconds=NO_ANSWER_S) as client:
            echoed = await client.call_tool("echo", {"text": "x"})
            return str(echoed.content[0].text)  # type: ignore[union-attr]

    with front() as served:
        assert asyncio.run(use(served.url)) == "x"
        wait_until(lambda: len(children_of(served.process.pid)) == 1)  # the shared one, which it tried first


# --- sessions --------------------------------------------------------------------------------------------------------


def test_each_session_has_a_server_of_its_own_until_it_is_deleted() -> None:
    with front() as served, session(served) as first, session(served) as second:
        pids = [client.call("pid").text for client in (first, second)]
        assert pids[0] != pids[1]
        assert first.delete().status == 200
        assert first.request("ping").status == 404
        wait_until(lambda: not Path(f"/proc/{pids[0]}").exists())
        assert second.call("pid").text == pids[1]


def test_a_request_without_its_session_is_refused() -> None:
    with front() as served, HttpClient(served) as client:
        assert client.request("ping").status == 400
        assert client.post(client.message("ping"), Mcp_Session_Id="unknown").status == 404
        assert client.delete().status == 400
        assert client.post(b"[]").status == 400
        assert client.post(b"{").json["error"]["code"] == -32700
        assert client.post(client.message("ping"), Content_Type="text/plain").status == 415
        assert client.post(client.message("ping"), Accept="text/html").status == 406
        assert client.post(client.message("ping"), MCP_Protocol_Version="1999-01-01").status == 400
        for id in ({}, {"id": None}, {"id": True}, {"id": 1.5}, {"id": [1]}):  # neither a request nor a notification
            assert client.post({"jsonrpc": "2.0", "method": "initialize", **id}).status == 400
        assert not children_of(served.process.pid)
        client.connection.request("PUT", "/mcp", b"{}", client.headers)
        assert client.connection.getresponse().status == 405


def test_an_idle_session_ends_also_while_its_stream_is_open() -> None:
    with front("--session-idle", "1s") as served, session(served) as client, HttpClient(served) as listener:
        listener.headers = dict(client.headers)
        stream = listener.get()
        assert stream.status == 200
        # An open request keeps the session.
        assert client.call("progress", {"progressToken": 1}, count=3, every=0.7).text == "finished"
        assert b"data" not in stream.read()  # it ends with the session
        assert client.request("ping").status == 404
        wait_until(lambda: not children_of(served.process.pid))


def test_more_sessions_than_allowed_displace_an_unused_one_or_are_refused() -> None:
    with front("--max-sessions", "1") as served, session(served) as first, HttpClient(served) as second:
        with HttpClient(served) as listener:
            listener.headers = dict(first.headers)
            assert listener.get().status == 200
            refused = second.request("initialize", {})
            assert refused.status == 503 and "retry-after" in refused.headers
        wait_until(
            lambda: second.request("initialize", GREETING).status == 200
        )  # until the listener is seen to be gone
        assert first.request("ping").status == 404


def test_a_client_that_leaves_during_its_greeting_leaves_no_session() -> None:
    with front() as served, HttpClient(served) as client:
        client.begin(client.message("initialize", GREETING))
        client.connection.close()
        with HttpClient(served) as later:
            wait_until(lambda: later.request("ping").status == 400 and children_of(served.process.pid))
        wait_until(lambda: not children_of(served.process.pid))


def test_a_client_that_takes_no_events_gets_json() -> None:
    with front() as served, session(served) as client:
        client.headers["Accept"] = "application/json"
        answer = client.call("progress", {"progressToken": 1}, count=2, every=0.1)
        assert answer.headers["content-type"] == "application/json" and answer.text == "finished"


def test_a_call_runs_on_without_its_client_and_can_be_resumed() -> None:
    with front() as served, session(served) as client:
        with HttpClient(served, **{"MCP-Protocol-Version": "2025-11-25"}) as leaving:
            leaving.headers["Mcp-Session-Id"] = client.headers["Mcp-Session-Id"]
            leaving.begin(leaving.call_message("progress", {"progressToken": "t"}, id="long", count=4, every=0.3))
            response = leaving.connection.getresponse()
            first = response.readline() + response.readline()
        last_id = read_events(first)[0]["id"]
        events = read_events(Answer(client.get(Last_Event_ID=last_id)).body)
        messages = [json.loads(event["data"]) for event in events]
        assert [each.get("params", {}).get("progress") for each in messages] == [1, 2, 3, 4, None]
        assert messages[-1]["id"] == "long"
        for unknown in ("99-1", "x", last_id.partition("-")[0] + "-5"):
            assert Answer(client.get(Last_Event_ID=unknown)).status == 400


def test_messages_that_belong_to_no_call_come_on_the_stream_of_the_client() -> None:
    with front() as served, session(served) as client, HttpClient(served) as listener:
        pid = int(client.call("pid").text)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: client.call("pid").text != str(pid))
        listener.headers = dict(client.headers)
        line = b""
        stream = listener.get()
        while not line.startswith(b"data:"):
            line = stream.readline()
        assert json.loads(line[5:])["method"] == "notifications/tools/list_changed"


def test_a_cancelled_call_ends_its_stream() -> None:
    with front() as served, session(served) as client, HttpClient(served) as other:
        other.headers = dict(client.headers)
        client.begin(client.call_message("hang", id=7))
        cancellation = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
        ends: list[Answer] = []
        reading = threading.Thread(target=lambda: ends.append(Answer(client.connection.getresponse())))
        reading.start()
        while reading.is_alive():  # until the call has arrived
            assert other.post(cancellation).status == 202
            reading.join(0.2)
        assert ends[0].messages[-1]["error"]["code"] == -32800
        assert other.call("echo", text="after").text == "after"


# --- without a session -----------------------------------------------------------------------------------------------


def test_clients_with_equal_ids_and_tokens_share_one_server() -> None:
    with front(server=MODERN_SERVER) as served:
        clients = [HttpClient(served) for _ in range(4)]
        for number, client in enumerate(clients):
            client.begin_modern_call("progress", id=1, token="t", count=number + 1, every=0.05)
        for number, client in enumerate(clients):
            *progress, answer = Answer(client.connection.getresponse()).messages
            assert answer["id"] == 1
            assert [each["params"] for each in progress] == [
                {"progressToken": "t", "progress": step + 1} for step in range(number + 1)
            ]
        assert len({client.modern_call("pid", id="x").text for client in clients}) == 1
        for client in clients:
            client.connection.close()


def test_a_message_that_belongs_to_no_call_is_not_sent_to_another_client() -> None:
    with front("--timeout", "3s", server=MODERN_SERVER) as served, HttpClient(served) as other:
        other.begin_modern_call("hang", id=1)
        with HttpClient(served, Accept="application/json") as client:
            assert client.modern_call("flood", id=1, count=3).text == "done"
        assert len(Answer(other.connection.getresponse()).messages) == 1


def test_an_id_that_is_there_twice_reaches_no_other_client() -> None:
    with front(server=MODERN_SERVER) as served, HttpClient(served) as client:
        headers = {"MCP_Protocol_Version": MODERN, "Mcp_Method": "tools/call", "Mcp_Name": "echo"}
        call = json.dumps(client.call_message("echo", {**ENVELOPE_OF_PROTOCOL, "progressToken": "t"}, id=1, text="x"))
        for twice in (
            call[:-1] + ', "id": 99}',
            call.replace('"progressToken"', '"progressToken": 99, "progressToken"'),
        ):
            refused = client.post(twice.encode(), **headers)
            assert refused.status == 400 and "twice" in refused.json["error"]["message"]
        assert client.post(call.encode(), **headers).text == "x"


def test_a_closed_connection_cancels_its_call() -> None:
    with front(server=MODERN_SERVER) as served, HttpClient(served) as client:
        with HttpClient(served) as leaving:
            leaving.begin_modern_call("hang", id=1)
            assert client.modern_call("echo", id=2, text="x").text == "x"
        wait_until(lambda: len(json.loads(client.modern_call("cancelled", id=3).text)) == 1)


def test_headers_have_to_match_the_message() -> None:
    with front(server=MODERN_SERVER) as served, HttpClient(served) as client:
        call = client.call_message("echo", ENVELOPE_OF_PROTOCOL, text="x")
        good = {"MCP_Protocol_Version": MODERN, "Mcp_Method": "tools/call", "Mcp_Name": "echo"}
        assert client.post(call, **good).text == "x"
        assert client.post(call, **{**good, "Mcp_Name": "=?base64?ZWNobw==?="}).text == "x"
        for wrong in ({"Mcp_Method": "tools/list"}, {"Mcp_Name": "other"}, {"MCP_Protocol_Version": "2099-01-01"}):
            refused = client.post(call, **{**good, **wrong})
            assert refused.status == 400 and refused.json["error"]["code"] == -32020
        without = client.post(client.call_message("echo", text="x"), **good)
        assert without.status == 400 and without.json["error"]["code"] == -32602
        unknown = client.post(client.message("x/y", {"_meta": ENVELOPE_OF_PROTOCOL}), **{**good, "Mcp_Method": "x/y"})
        assert unknown.status == 404 and unknown.json["error"]["code"] == -32601
        greeting = client.message("initialize", {"_meta": ENVELOPE_OF_PROTOCOL})
        assert client.post(greeting, **{**good, "Mcp_Method": " initialize "}).status == 404
        assert client.get(MCP_Protocol_Version=MODERN).status == 405


def test_a_hundred_calls_at_once_are_each_answered_at_their_limit() -> None:
    with front("--timeout", "2s") as served, session(served) as client:
        answers: dict[int, Answer] = {}

        def hang(number: int) -> None:
            with HttpClient(served) as each:
                if number % 2:
                    each.headers = dict(client.headers)
                    answers[number] = each.call("hang", id=number)
                else:
                    answers[number] = each.modern_call("hang", id=1)

        threads = [threading.Thread(target=hang, args=(number,)) for number in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(NO_ANSWER_S)
        assert all("2s" in answers[number].text for number in range(100))
        assert client.call("echo", text="after").text == "after"


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id_last", [[], ["--id-last"]])
def test_large_results_and_bodies_pass_in_little_memory(id_last: list[str]) -> None:
    size = 20_000_000
    with front(server=[*SERVER, *id_last]) as served, session(served) as client:
        client.call("echo", text="warm")
        before = peak_memory_kb(served)
        assert len(client.call("big", size=size).text) == size
        assert len(client.modern_call("big", id=1, size=size).text) == size
        assert peak_memory_kb(served) - before < 12_000
        body = "y" * 4_000_000  # the longest bodies are parsed as a whole
        assert client.call("echo", text=body).text == body
        assert client.modern_call("echo", id=1, token=9, text=body).text == body
        assert peak_memory_kb(served) - before < 40_000


def peak_memory_kb(served: Front) -> int:
    lines = Path(f"/proc/{served.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def test_a_body_of_a_bad_length_is_refused_before_it_is_read() -> None:
    with front() as served:
        for length, status in (("100000000", 413), ("0" * 5000, 413), ("-1", 413), ("1\r\nContent-Length: 2", 411)):
            with socket.create_connection(("127.0.0.1", served.port), ANSWER_WITHIN_S) as raw:
                raw.sendall(
                    b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                    b"Accept: */*\r\nContent-Length: " + length.encode() + b"\r\n\r\n"
                )
                assert f" {status} ".encode() in raw.recv(4096)


@pytest.mark.soak
def test_a_stream_that_is_read_too_slowly_breaks_and_does_not_end_without_an_answer() -> None:
    with front() as served, session(served) as client, session(served) as other:
        # Otherwise the kernel may keep the whole stream for the client.
        client.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        client.begin(client.call_message("flood", count=100_000))
        assert select.select([client.connection.sock], [], [], ANSWER_WITHIN_S)[0], "the call has not begun"
        # Until the client has lost its place in line, which is when the server can write everything.
        busy = client.call_message("echo", id=client.last_id, text="x")
        wait_until(lambda: other.post(busy, Mcp_Session_Id=client.headers["Mcp-Session-Id"]).status == 200)
        with pytest.raises(http.client.IncompleteRead):
            client.connection.getresponse().read()


# --- security --------------------------------------------------------------------------------------------------------


def test_foreign_names_and_pages_are_refused() -> None:
    with front() as served, HttpClient(served) as client:
        for headers, status in (
            ({"Host": "evil.example"}, 421),
            ({"Origin": "http://evil.example"}, 403),
            ({"X_Forwarded_For": "1.2.3.4"}, 401),
            ({"Origin": f"http://localhost:{served.port}", "Host": f"localhost:{served.port}"}, 400),  # no session
        ):
            assert client.post(client.message("ping"), **headers).status == status
        client.connection.request("POST", "/other", b"{}", client.headers)
        assert client.connection.getresponse().status == 404


def test_a_required_token_is_checked_and_owns_its_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path))
    shotclock = [sys.executable, "-m", "shotclock"]

    refused = subprocess.run(
        [*shotclock, "wrap", "--http", "0.0.0.0:0", "--", *SERVER], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 125 and "shotclock token create" in refused.stderr

    def issue(name: str) -> str:
        argv = [*shotclock, "token", "create", name, "--role", "agent", "--format", "json"]
        made = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        return str(json.loads(made.stdout)["data"]["token"])

    tokens = [issue("one"), issue("two")]
    with front("--require-token", server=MODERN_SERVER) as served:
        with HttpClient(served) as client:
            assert client.request("initialize", {}).status == 401
            assert client.post(client.message("initialize", {}), Authorization=f"Bearer {tokens[0]}x").status == 401
        with session(served, Authorization=f"Bearer {tokens[0]}") as client:
            assert client.call("echo", text="x").text == "x"
            stolen = client.post(client.message("ping"), Authorization=f"Bearer {tokens[1]}")
            assert stolen.status == 404
            pids = set()
            for token in (*tokens, tokens[0]):
                client.headers["Authorization"] = f"Bearer {token}"
                pids.add(client.modern_call("pid", id=1).text)
            assert len(pids) == 2


def test_half_a_request_keeps_no_client_out() -> None:
    with front() as served:
        halves = [socket.create_connection(("127.0.0.1", served.port), ANSWER_WITHIN_S) for _ in range(600)]
        for half in halves:
            half.sendall(b"POST /mcp HTTP/1.1\r\nHost: ")
        with session(served) as client:
            assert client.call("echo", text="x").text == "x"
        for half in halves:
            half.close()


def test_the_process_of_a_session_gets_all_other_words_of_the_command_line() -> None:
    rest = ["--", "server", "--http", "1"]
    words = ["--http=0", "--timeout", "5s", "--max-sessions", "3", "--lazy", "--require-token", "--session-idle", "1s"]
    assert words_of_child([*words, "--deny=x", *rest]) == ["--timeout", "5s", "--lazy", "--deny=x", *rest]
    assert words_of_child(["--http", "0", "server", "--http", "1"]) == ["server", "--http", "1"]


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_server_that_cannot_start_is_reported_and_its_session_ends() -> None:
    with front(server=["/no/such/program"]) as served, HttpClient(served) as client:
        answer = client.request("initialize", {})
        assert "no/such/program" in answer.json["error"]["message"]
        assert "mcp-session-id" not in answer.headers
        modern = client.modern_call("echo", id=1)
        assert "no/such/program" in json.dumps(modern.json)
        wait_until(lambda: not children_of(served.process.pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything(number: signal.Signals) -> None:
    with front() as served, session(served) as client, HttpClient(served) as modern:
        daemon = int(client.call("daemon").text)
        modern.modern_call("daemon", id=1)
        client.begin(client.call_message("progress", {"progressToken": 1}, count=100, every=0.1))
        response = client.connection.getresponse()
        assert served.stop(number) == -number
        wait_until(lambda: not Path(f"/proc/{daemon}").exists())
        assert "tool progress was lost" in Answer(response).text


def test_nothing_survives_a_killed_front() -> None:
    with front(server=MODERN_SERVER) as served, session(served) as client, HttpClient(served) as modern:
        left = [int(client.call(tool).text) for tool in ("pid", "daemon")]
        left += [int(modern.modern_call(tool, id=1).text) for tool in ("pid", "daemon")]
        left += children_of(served.process.pid)
        assert served.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


def test_a_killed_child_is_reported_and_its_session_ends() -> None:
    with front() as served, session(served) as client:
        client.begin(client.call_message("progress", {"progressToken": 1}, count=100, every=0.1))
        response = client.connection.getresponse()
        os.kill(children_of(served.process.pid)[0], signal.SIGKILL)
        assert "ended by signal 9" in Answer(response).messages[-1]["error"]["message"]
        assert client.request("ping").status == 404
