"""MCP steps: real servers in real processes, most of which do not want to end."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shotclock.net.mcp_client as conversation  # at once, so that no test pays for loading the SDK
from shotclock.core.limits import Clocks
from shotclock.flows.steps.mcp import McpProvider
from shotclock.net.tool_call import CLOSE_LIMIT_S
from tests.apps.server.client import http_server
from tests.calls.bounds import ROOT, marked

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

Trial = Callable[..., Any]
# An interpreter that starts while others use the two cores.
STARTED_MS = 15_000
# Beyond the limits themselves.
LATE_S = 3.0


def server(name: str, *more: str, method: str = "echo", arguments: Any = None, **settings: Any) -> dict[str, Any]:
    return {
        "command": sys.executable,
        "args": ["-m", "tests.flows.steps.mcp_servers", name, *more],
        "method": method,
        "arguments": arguments or {},
        **settings,
    }


@pytest.fixture
def ask(trial: Trial) -> Trial:
    """One call of a tool; `clocks` as in Clocks.of."""

    def ask(settings: dict[str, Any], *, run_ms: int | None = None, env: Any = None, **clocks: Any) -> Any:
        clocks = {"timeout": "20s", "grace": "200ms", **clocks}
        env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        return trial(McpProvider(), settings, Clocks.of(**clocks), env=env, run_ms=run_ms)

    return ask


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """Where the servers' processes say that they are there."""
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


# --- what comes back ------------------------------------------------------------------------------


def test_structured_content_is_the_output_and_the_server_is_told_the_remaining_time(ask: Trial) -> None:
    tried = ask(server("good", arguments={"a": [1, "ä"]}), timeout="9s")

    assert tried.result.envelope.ok, tried.result.envelope
    assert tried.result.output["arguments"] == {"a": [1, "ä"]}
    remaining = tried.result.output["meta"]["shotclock.dev/remainingMs"]
    assert 0 < remaining <= 9000
    assert tried.meta["ending"] == "finished"
    assert tried.result.rule is None


def test_what_is_no_text_comes_as_it_is(ask: Trial) -> None:
    output = ask(server("good", method="picture")).result.output

    assert output == [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]


def test_a_tool_that_says_it_failed_is_a_failed_step_with_its_words(ask: Trial) -> None:
    tried = ask(server("good", method="fail"))

    assert tried.error["code"] == "TOOL_FAILED"
    assert tried.message == "no such customer"
    assert tried.result.rule == "mcp/tool_error"
    assert tried.meta["side_effects"] == "unknown"


def test_an_envelope_is_opened_its_data_is_the_output(ask: Trial) -> None:
    tried = ask(server("good", method="envelope"))

    assert tried.result.output == {"answer": 42}
    assert tried.result.envelope.ok
    assert tried.result.envelope.warnings == [{"code": "ACME_LOW", "message": "low"}]
    assert tried.meta["side_effects"] == "partial"


def test_the_error_of_an_envelope_is_the_steps_own(ask: Trial) -> None:
    tried = ask(server("good", method="failing_envelope", arguments={"code": "ACME_NO_STOCK"}))

    assert tried.error["code"] == "ACME_NO_STOCK"
    assert tried.message == "out of stock"
    assert tried.meta["exit_code"] == 7
    assert tried.result.rule == "mcp/tool_error"


def test_a_tool_that_is_not_there_is_known_before_it_is_called(ask: Trial) -> None:
    tried = ask(server("good", method="ecoh"))

    assert tried.error["code"] == "UNKNOWN_OPERATION"
    assert tried.error["suggestion"] == "did you mean 'echo'?"
    assert tried.result.rule == "mcp/unknown_tool"
    assert tried.meta["side_effects"] == "none"


def test_a_server_that_is_silent_about_methods_it_does_not_know_is_no_problem(ask: Trial) -> None:
    tried = ask(server("silent_on_unknown"))

    assert tried.result.envelope.ok
    assert tried.elapsed_s < STARTED_MS / 1000


def test_arguments_that_are_no_json_are_refused_before_anything_starts(ask: Trial) -> None:
    tried = ask(server("good", arguments={"a": float("nan")}))

    assert tried.error["code"] == "ARG_ERROR"
    assert tried.meta["ending"] == "not_started"


def test_the_server_sees_only_the_environment_of_the_step(ask: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = json.loads(ask(server("good", method="environment"), env={"ASKED": "for"}).result.output)

    assert seen["ASKED"] == "for"
    assert int(seen["SHOTCLOCK_REMAINING_MS"]) <= 20_000


# --- what does not come back ----------------------------------------------------------------------


def assert_ended(tried: Any, limit_s: float, rule: str, message: str) -> None:
    assert tried.error["code"] == "TIMEOUT"
    assert tried.result.rule == rule
    assert tried.message.startswith(message), tried.message
    assert limit_s <= tried.elapsed_s < limit_s + LATE_S + CLOSE_LIMIT_S


def test_a_server_that_never_answers_initialize_has_its_connect_timeout(ask: Trial) -> None:
    tried = ask(server("never_initializes", connect_timeout="700ms"))

    assert_ended(tried, 0.7, "mcp/connect_timeout", "MCP connection timed out after 0.7 seconds")
    clock = tried.error["context"]["clock"]
    assert clock["owner"] == "step it connect"
    assert clock["limit_ms"] == 700


def test_a_bare_connect_timeout_is_in_seconds(ask: Trial) -> None:
    tried = ask(server("never_initializes", connect_timeout=1))

    assert_ended(tried, 1.0, "mcp/connect_timeout", "MCP connection timed out after 1 second")


def test_the_steps_own_timeout_is_the_limit_where_it_is_shorter(ask: Trial) -> None:
    tried = ask(server("never_initializes"), timeout="600ms")

    assert_ended(tried, 0.6, "mcp/connect_timeout", "MCP connection timed out after 0.6 seconds")
    assert tried.error["context"]["clock"]["owner"] == "step it"


def test_the_clock_of_the_step_runs_while_the_client_is_still_loaded(
    ask: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = "import time\ntime.sleep(3)\nfrom shotclock.net.mcp_client import Conversation\n"
    (tmp_path / "loads_slowly.py").write_text(loads)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("shotclock.net.tool_call._CLIENT", "loads_slowly")

    tried = ask(server("never_answers"), timeout="5s")
    assert tried.error["code"] == "TIMEOUT" and tried.error["context"]["clock"]["limit_ms"] == 5000
    assert tried.elapsed_s < 5 + 3, "not later by what the loading took"

    monkeypatch.delitem(sys.modules, "loads_slowly")
    tried = ask(server("good"), timeout="500ms")
    assert_ended(tried, 0.5, "mcp/connect_timeout", "MCP connection timed out after 0.5 seconds")
    assert tried.meta["ending"] == "not_started"


def test_the_client_takes_no_server_of_the_sdk_along_and_leaves_the_sdk_to_others_as_it_is() -> None:
    program = "import sys; import shotclock.net.mcp_client\n"
    program += "assert 'mcp.client.session' in sys.modules and 'mcp.server' not in sys.modules\n"
    program += "import mcp; from mcp.client import Client; assert Client is mcp.Client and mcp.server.Server"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran


def test_a_server_that_starts_slowly_has_all_the_time_of_its_step(ask: Trial) -> None:
    tried = ask(server("starts_slowly", "10.5", arguments={"a": 1}), timeout="30s")

    assert tried.result.output["arguments"] == {"a": 1}, tried.result.envelope


def test_an_answer_that_is_too_long_is_refused_by_the_name_of_the_limit(
    ask: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "MESSAGE_LIMIT", 1_000_000)
    tried = ask(server("says_too_much"))

    assert "larger than 1000000 bytes" in tried.message and "no MCP" not in tried.message
    assert tried.error["code"] == "TOOL_FAILED" and tried.result.rule == "mcp/tool_error"


def test_a_call_that_is_never_answered_ends_on_time_and_its_server_is_killed(ask: Trial) -> None:
    tried = ask(server("never_answers"), timeout="2s")

    assert_ended(tried, 2.0, "mcp/timeout", "MCP tool call timed out after 2 seconds")
    assert tried.meta["ending"] == "killed"
    assert tried.meta["side_effects"] == "unknown"
    clock = tried.error["context"]["clock"]
    assert (clock["kind"], clock["owner"], clock["limit_ms"]) == ("timeout", "step it", 2000)


def test_the_runs_deadline_is_inside_it(ask: Trial) -> None:
    tried = ask(server("never_answers"), run_ms=2500)

    assert tried.result.rule == "mcp/timeout"
    assert tried.error["context"]["clock"]["owner"] == "run test"
    assert tried.elapsed_s < 2.5 + LATE_S


def test_garbage_on_stdout_is_no_answer_and_is_shown(ask: Trial) -> None:
    for limit_s in (1, 10):  # a busy machine may need longer to start it
        tried = ask(server("garbage", connect_timeout=f"{limit_s}s"))
        assert tried.result.rule in ("mcp/connect_timeout", "mcp/connect_error")
        assert tried.elapsed_s < limit_s + LATE_S + CLOSE_LIMIT_S
        if "this is no JSON" in tried.message:
            break
    assert "this is no JSON" in tried.message


def test_a_line_without_an_end_is_not_kept(ask: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MESSAGE_LIMIT", 1_000_000)

    tried = ask(server("one_line"))

    assert tried.error["code"] == "TOOL_FAILED" and "larger than 1000000 bytes" in tried.message
    assert tried.elapsed_s < STARTED_MS / 1000


def test_a_server_that_is_not_there_is_named(ask: Trial) -> None:
    tried = ask({"command": "no-such-server", "args": [], "method": "echo", "arguments": {}})

    assert tried.error["code"] == "COMMAND_NOT_FOUND"
    assert tried.result.rule == "mcp/connect_error"
    assert tried.meta["ending"] == "not_started"


def test_a_server_that_answered_and_left_a_daemon_loses_both(ask: Trial, marks: Path) -> None:
    tried = ask(server("daemon", str(marks), arguments={"a": 1}))

    assert tried.result.envelope.ok
    assert (marks / "daemon").exists()
    assert not marked(marks)


def test_a_deaf_server_that_hangs_is_killed_after_its_grace(ask: Trial, marks: Path) -> None:
    tried = ask(server("deaf_that_hangs", str(marks)), timeout="2s", grace="300ms")

    assert tried.result.rule == "mcp/timeout"
    assert not marked(marks)
    assert tried.elapsed_s < 2.3 + LATE_S + CLOSE_LIMIT_S


def test_a_server_that_reads_nothing_does_not_hold_a_large_request_for_ever(ask: Trial) -> None:
    tried = ask(server("reads_nothing", arguments={"a": "x" * 3_000_000}, connect_timeout="700ms"))

    assert_ended(tried, 0.7, "mcp/connect_timeout", "MCP connection timed out")


def test_silence_is_noticed_where_the_step_has_an_idle_clock(ask: Trial) -> None:
    tried = ask(server("never_answers"), idle="500ms")

    assert tried.error["code"] == "STALLED"
    assert tried.result.rule == "mcp/stalled"
    assert tried.elapsed_s < 10, "not at the timeout of 20 s"


def test_progress_is_a_sign_of_life(ask: Trial) -> None:
    assert ask(server("chatters"), idle="400ms").result.envelope.ok


def test_a_cancelled_step_leaves_nothing_of_its_server(trial: Trial, marks: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    settings = server("daemon_that_hangs", str(marks))

    with pytest.raises(asyncio.CancelledError):
        trial(McpProvider(), settings, Clocks.of("30s", grace="200ms"), env=env, cancel_after_s=2.0)

    assert (marks / "daemon").exists(), "it was under way"
    assert not marked(marks)


# --- by URL ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def listener(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on a real socket: each connection is given to `handle` in a thread."""
    stopped = threading.Event()
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)

        def accept() -> None:
            while not stopped.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listening.accept()
                    taken.append(connection)
                    threading.Thread(target=quietly, args=(connection,), daemon=True).start()

        def quietly(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                handle(connection)

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        finally:
            stopped.set()
            accepting.join(5)
            for connection in taken:
                connection.close()


def request_of(connection: socket.socket) -> dict[str, Any] | None:
    """The next message that is posted; None for what is no POST."""
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(65536)
        if not part:
            raise OSError("closed")
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return json.loads(body) if head.startswith(b"POST") else None


def respond(connection: socket.socket, result: Any, request: dict[str, Any]) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def polite_until_called(then: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    def handle(connection: socket.socket) -> None:
        while True:
            request = request_of(connection)
            match None if request is None else request["method"]:
                case None:
                    connection.sendall(b"HTTP/1.1 405 No\r\nContent-Length: 0\r\n\r\n")
                case "initialize":
                    assert request is not None
                    info = {"name": "by hand", "version": "1"}
                    version = request["params"]["protocolVersion"]
                    answer = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
                    respond(connection, answer, request)
                case "tools/list":
                    assert request is not None
                    respond(connection, {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}, request)
                case "tools/call":
                    then(connection)
                case _:
                    connection.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")

    return handle


def at(url: str, method: str = "echo", **settings: Any) -> dict[str, Any]:
    return {"url": url, "method": method, "arguments": {}, **settings}


def test_a_server_that_accepts_and_hangs_has_its_connect_timeout(ask: Trial) -> None:
    with listener(lambda connection: time.sleep(30)) as url:
        tried = ask(at(url, connect_timeout="600ms"))

    assert_ended(tried, 0.6, "mcp/connect_timeout", "MCP connection timed out after 0.6 seconds")
    assert tried.meta["ending"] == "not_started"


def test_a_call_over_http_that_hangs_ends_on_time(ask: Trial) -> None:
    with listener(polite_until_called(lambda connection: time.sleep(30))) as url:
        tried = ask(at(url), timeout="1s")

    assert_ended(tried, 1.0, "mcp/timeout", "MCP tool call timed out after 1 second")
    assert tried.meta["ending"] == "cancelled"
    assert tried.meta["side_effects"] == "unknown"


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    for _ in range(100_000):
        connection.sendall(b"[" * 65536)


@pytest.mark.parametrize("when", ["connecting", "calling"])
def test_an_answer_without_an_end_is_not_kept(ask: Trial, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    monkeypatch.setattr(conversation, "MESSAGE_LIMIT", 1_000_000)
    read: list[int] = []

    def counted(connection: socket.socket) -> None:
        try:
            flood(connection)
        finally:
            read.append(1)

    handle = polite_until_called(counted)
    if when == "connecting":

        def handle(connection: socket.socket) -> None:
            request_of(connection)
            counted(connection)

    with listener(handle) as url:
        tried = ask(at(url, connect_timeout="15s"), timeout="20s")

    assert tried.result.rule in ("mcp/connect_error", "mcp/tool_error"), tried.error
    assert tried.elapsed_s < 10
    assert read, "it was cut off"


def test_nobody_at_the_address_is_a_connect_error_at_once(ask: Trial) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tried = ask(at(f"http://127.0.0.1:{port}/mcp"))

    assert tried.error["code"] == "CONNECT_FAILED"
    assert tried.result.rule == "mcp/connect_error"
    assert tried.elapsed_s < 8


def test_what_is_no_mcp_server_is_a_connect_error(ask: Trial) -> None:
    def teapot(connection: socket.socket) -> None:
        while True:
            request_of(connection)
            connection.sendall(b"HTTP/1.1 418 Teapot\r\nContent-Length: 5\r\n\r\nshort")

    with listener(teapot) as url:
        tried = ask(at(url))

    assert tried.result.rule == "mcp/connect_error"


@pytest.mark.parametrize("url", ["http://[broken", "ftp://127.0.0.1/x", "nonsense", "http://127.0.0.1:99999/"])
def test_an_address_that_is_none_is_a_connect_error(ask: Trial, url: str) -> None:
    assert ask(at(url)).result.rule == "mcp/connect_error"


def test_a_server_of_our_own_is_called_over_http_and_its_envelope_opened(ask: Trial) -> None:
    with http_server() as (url, _):
        tried = ask({**at(url, "noop"), "arguments": {"a": 3}})
        failed = ask({**at(url, "noop"), "arguments": {"a": "three"}})

    assert tried.result.output == 3, tried.result.envelope
    assert failed.error["code"] == "ARG_ERROR"
    assert failed.result.rule == "mcp/tool_error"


# --- in a workflow --------------------------------------------------------------------------------
