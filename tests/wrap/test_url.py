"""A server over HTTP behind the same limits: real servers on real sockets, good and bad ones."""

import asyncio
import json
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from mcp import Client, StdioServerParameters
from mcp_types import CreateMessageResult, ElicitResult, TextContent

from shotclock.wrap.remote._adapter import MOST_OPEN
from tests.wrap.client import ANSWER_WITHIN_S, ENDED_WITHIN_S, GREETING, RawClient, connected, failure
from tests.wrap.test_lives import POLL_S, wait_until_gone

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

FOLDER = Path(__file__).parent
WRAP = [sys.executable, "-m", "shotclock", "wrap"]
MOST_MB = 120.0  # of the adapter
HUNG_AT_ONCE = 100
# Of notifications that a server does not read, and the pause after which no more are accepted.
MOST_ACCEPTED, STALLED_S = 40_000_000, 3.0


@contextmanager
def serving(file: str, *arguments: str) -> Iterator[int]:
    """A server in a process of its own, and its port."""
    argv = [sys.executable, str(FOLDER / file), *(arguments or ("0",))]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=ENDED_WITHIN_S)


@pytest.fixture
def bad() -> Iterator[str]:
    with serving("bad_http_server.py") as port:
        yield f"http://127.0.0.1:{port}/mcp"


@pytest.fixture(scope="module")
def sdk_urls() -> Iterator[dict[str, str]]:
    """Servers of the SDK for tests that end none: one answers with streams, one with JSON.

    They are started before each test begins to look for survivors.
    """
    with serving("sdk_http_server.py") as streaming, serving("sdk_http_server.py", "0", "--json") as plain:
        yield {"": f"http://127.0.0.1:{streaming}/mcp", "--json": f"http://127.0.0.1:{plain}/mcp"}


@contextmanager
def wrapped_url(url: str, *options: str, greets: bool = True, stderr: Any = None) -> Iterator[RawClient]:
    with connected([*WRAP, *options, "--url", url], stderr) as client:
        if greets:
            client.greet()
        yield client


def requests_seen(client: RawClient) -> list[dict[str, Any]]:
    return json.loads(client.text("requests"))


def wait_for_call(client: RawClient, tool: str) -> None:
    """Wait until the server has a call."""
    give_up_at = time.monotonic() + ANSWER_WITHIN_S
    while not any((each["message"] or {}).get("params", {}).get("name") == tool for each in requests_seen(client)):
        assert time.monotonic() < give_up_at, f"{tool} did not reach the server"
        time.sleep(POLL_S)


def adapter_of(client: RawClient) -> psutil.Process:
    below = psutil.Process(client.process.pid).children(recursive=True)
    return next(each for each in below if "wrap.remote._adapter" in " ".join(each.cmdline()))


# --- a server that behaves -----------------------------------------------------------------------------------------


def sdk_client(argv: list[str], mode: str, **more: Any) -> Client:
    parameters = StdioServerParameters(command=argv[0], args=argv[1:], env=dict(os.environ))
    return Client(parameters, mode=mode, read_timeout_seconds=ANSWER_WITHIN_S * 2, **more)


async def answer_for_the_model(*_: Any) -> CreateMessageResult:
    return CreateMessageResult(role="assistant", content=TextContent(type="text", text="4"), model="none")


async def answer_for_the_person(*_: Any) -> ElicitResult:
    return ElicitResult(action="accept", content={"colour": "blue"})


async def use(client: Client, *, is_stream: bool) -> list[str]:
    """Return what a client sees of the server. Plain JSON has no room for progress."""
    seen = [(await client.list_tools()).model_dump_json()]
    seen += [(await client.call_tool("add", {"a": number, "b": 1})).model_dump_json() for number in range(3)]
    seen.append((await client.call_tool("route", {"region": "Zürich"})).model_dump_json())
    steps: list[float] = []

    async def note_step(progress: float, total: float | None, message: str | None) -> None:
        steps.append(progress)

    seen.append((await client.call_tool("steps", {"count": 3}, progress_callback=note_step)).model_dump_json())
    assert steps == ([1, 2, 3] if is_stream else [])
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["2026-07-28", "legacy", pytest.param("auto", marks=pytest.mark.soak)])
@pytest.mark.parametrize("form", ["", "--json"])
def test_a_client_sees_the_same_as_without_the_wrap(mode: str, form: str, sdk_urls: dict[str, str]) -> None:
    async def check(url: str) -> None:
        async with Client(url, mode=mode) as direct:
            expected = await use(direct, is_stream=not form)
        async with sdk_client([*WRAP, "--tool", "hang=timeout:300ms", "--url", url], mode) as client:
            assert await use(client, is_stream=not form) == expected
            before = (await client.call_tool("count_cancelled", {})).structured_content
            failed = await client.call_tool("hang", {})
            assert failed.is_error and "did not end within 300ms" in failed.content[0].text  # type: ignore[union-attr]
            give_up_at = time.monotonic() + ANSWER_WITHIN_S
            if form and mode != "legacy":  # the server of the SDK does not look at the connection then
                return
            while (await client.call_tool("count_cancelled", {})).structured_content == before:
                assert time.monotonic() < give_up_at, "the cancellation did not reach the server"
                await asyncio.sleep(POLL_S)

    asyncio.run(check(sdk_urls[form]))


@pytest.mark.slow
def test_questions_of_the_server_reach_the_client(sdk_urls: dict[str, str]) -> None:
    async def check(url: str) -> None:
        answers = {"sampling_callback": answer_for_the_model, "elicitation_callback": answer_for_the_person}
        async with sdk_client([*WRAP, "--url", url], "legacy", **answers) as client:
            for tool, text in (("ask_model", "4"), ("ask_person", "blue")):
                assert (await client.call_tool(tool, {})).content[0].text == text  # type: ignore[union-attr]

    asyncio.run(check(sdk_urls[""]))


@pytest.mark.slow
def test_a_new_session_is_opened_after_a_restart_of_the_server() -> None:
    with ExitStack() as servers:
        port = servers.enter_context(serving("sdk_http_server.py"))
        with wrapped_url(f"http://127.0.0.1:{port}/mcp") as client:
            first = client.text("pid")
            servers.close()
            text, envelope = failure(client.ask("pid"))
            assert "was not sent: the server could not be reached" in text and "connection refused" in text
            assert envelope["error"]["code"] == "CONNECT_FAILED" and envelope["meta"]["ending"] == "not_started"
            servers.enter_context(serving("sdk_http_server.py", str(port)))
            assert client.text("pid") != first  # held until the new session is open, then sent


@pytest.mark.slow
def test_a_subscription_stays_open_beside_calls(sdk_urls: dict[str, str]) -> None:
    async def check(url: str) -> None:
        async with sdk_client([*WRAP, "--timeout", "1s", "--url", url], "2026-07-28") as client:
            async with client.listen(tools_list_changed=True) as subscription:
                for _ in range(2):
                    await client.call_tool("publish", {})
                    event = await asyncio.wait_for(anext(aiter(subscription)), ANSWER_WITHIN_S)
                    assert type(event).__name__ == "ToolsListChanged"

    asyncio.run(check(sdk_urls[""]))


@pytest.mark.slow
def test_messages_that_belong_to_no_call_are_received(sdk_urls: dict[str, str]) -> None:
    with wrapped_url(sdk_urls[""]) as client:
        client.call("announce_until_heard", id="announcing")
        assert client.wait_for("notifications/tools/list_changed")


# --- sessions and headers ------------------------------------------------------------------------------------------


def test_headers_follow_the_revisions_before_2026(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("URL_TEST_TOKEN", "s3cret-token")
    with wrapped_url(bad, "--header", "Authorization: Bearer ${URL_TEST_TOKEN}") as client:
        client.text("echo", text="x")
        assert "s3cret-token" not in " ".join(adapter_of(client).cmdline())
        first, second, *others = (each for each in requests_seen(client) if each["http"] == "POST")
    assert first["message"]["method"] == "initialize" and "Mcp-Session-Id" not in first["headers"]
    assert "MCP-Protocol-Version" not in first["headers"]
    assert second["message"]["method"] == "notifications/initialized"
    for each in (second, *others):
        assert each["headers"]["Mcp-Session-Id"] == "session-1"
        assert each["headers"]["MCP-Protocol-Version"] == "2025-06-18"
        assert each["headers"]["Authorization"] == "Bearer s3cret-token"


def test_headers_repeat_the_message_in_2026(bad: str) -> None:
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}
    with wrapped_url(bad, greets=False) as client:
        assert client.text("echo", text="x", meta=meta) == "x"
        client.receive(client.request("resources/read", {"uri": "file:///ü", "_meta": meta}))
        called, read, *_ = json.loads(client.text("requests", meta=meta))
    assert called["headers"]["MCP-Protocol-Version"] == "2026-07-28" and "Mcp-Session-Id" not in called["headers"]
    assert called["headers"]["Mcp-Method"] == "tools/call" and called["headers"]["Mcp-Name"] == "echo"
    assert read["headers"]["Mcp-Name"] == "=?base64?ZmlsZTovLy/DvA==?="


@pytest.mark.slow
def test_a_call_is_sent_with_the_headers_of_its_tool_before_the_client_has_read_a_list(
    sdk_urls: dict[str, str],
) -> None:
    prefix = "io.modelcontextprotocol/"
    info = {"name": "raw", "version": "1"}
    meta = {prefix + "protocolVersion": "2026-07-28", prefix + "clientInfo": info, prefix + "clientCapabilities": {}}
    with wrapped_url(sdk_urls[""], greets=False) as client:
        assert client.text("route", region="Zürich", meta=meta) == "Zürich"
        assert client.text("route", unused="y" * 100_000, region="Bern", meta=meta) == "Bern"
        assert all(json.loads(line)["id"] in (1, 2) for line in client.lines)


@pytest.mark.slow
def test_a_lost_session_is_replaced_and_the_call_is_sent_in_the_new_one(bad: str, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, wrapped_url(bad, stderr=log) as client:
        client.text("forget")
        assert client.text("echo", text="again") == "again"
        seen = requests_seen(client)
    assert [each["message"]["method"] for each in seen if each["message"]].count("initialize") == 2
    assert seen[-1]["headers"]["Mcp-Session-Id"] != seen[2]["headers"]["Mcp-Session-Id"]
    text = (tmp_path / "log").read_text()
    assert "does not know the session any more" in text and "has opened a new session" in text
    assert "exit code" not in text and "killed" not in text


@pytest.mark.slow
def test_calls_in_flight_are_lost_with_their_session(bad: str) -> None:
    with wrapped_url(bad) as client:
        hung = client.call("hang")
        wait_for_call(client, "hang")
        client.text("forget")
        client.text("echo", text="again")
        text, envelope = failure(client.receive(hung)["result"])
        assert "was lost: the server at http://127.0.0.1" in text and "does not know the session" in text
        assert "outcome is unknown" in text and "The state of that session is lost" in text
        assert envelope["meta"]["ending"] == "abandoned" and envelope["error"]["code"] == "CONNECTION_LOST"


@pytest.mark.slow
def test_the_session_is_deleted_at_the_end(bad: str) -> None:
    with wrapped_url(bad) as client:
        client.text("echo", text="x")
    with wrapped_url(bad) as client:
        assert [each["headers"]["Mcp-Session-Id"] for each in requests_seen(client) if each["http"] == "DELETE"] == [
            "session-1"
        ]


@pytest.mark.slow
def test_an_idle_session_is_closed_and_another_is_opened_when_it_is_needed(bad: str) -> None:
    with wrapped_url(bad, "--idle-shutdown", "1s") as client:
        wait_until_gone(adapter_of(client).pid)
        seen = requests_seen(client)
    assert [each["http"] for each in seen].count("DELETE") == 1
    assert [each["message"]["method"] for each in seen if each["message"]].count("initialize") == 2


@pytest.mark.slow
def test_policy_pins_and_the_log_apply(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    lock = tmp_path / "lock.json"
    with wrapped_url(bad, "--lock", str(lock), "--deny", "fail", "--name", "tickets") as client:
        assert client.text("echo", text="x") == "x"
        assert failure(client.ask("fail"))[1]["error"]["code"] == "NOT_ALLOWED"
        assert all((each["message"] or {}).get("params", {}).get("name") != "fail" for each in requests_seen(client))
    assert "cut_stream" in lock.read_text()
    ran = subprocess.run(
        [sys.executable, "-m", "shotclock", "mcp", "log", "--server", "tickets", "--json"],
        capture_output=True,
        text=True,
        timeout=ANSWER_WITHIN_S,
    )
    assert [each["tool"] for each in json.loads(ran.stdout)["data"]["calls"]] == ["requests", "fail", "echo"]


# --- failures ------------------------------------------------------------------------------------------------------


def test_each_failure_names_its_cause(bad: str, validate_envelope: Callable[[Any], Any]) -> None:
    causes = {
        "fail": ("failed: the server answered with HTTP 500 Internal Server Error (<html> out of", "HTTP_STATUS"),
        "accept": ("failed: the server gave no answer that can be read: HTTP 202 Accepted", "HTTP_STATUS"),
        "garbage": ("was lost: the server ended its answer without a result", "CONNECTION_LOST"),
        "wrong_id": ("was lost: the server ended its answer without a result", "CONNECTION_LOST"),
        "not_http": ("was lost: the server answered with something other than HTTP", "CONNECTION_LOST"),
        "drop": ("was lost: the server closed the connection before it had answered", "CONNECTION_LOST"),
        "cut_json": ("was lost: the server closed the connection in the middle", "CONNECTION_LOST"),
        "cut_stream": ("was lost: the server closed the connection in the middle", "CONNECTION_LOST"),
        "lose_stream": ("ended the stream of its answer and does not resume it: HTTP 405", "CONNECTION_LOST"),
    }
    with wrapped_url(bad) as client:
        for tool, (words, code) in causes.items():
            text, envelope = failure(client.ask(tool))
            assert words in text, (tool, text)
            assert "outcome is unknown" in text and "stderr" not in text
            validate_envelope(envelope)
            assert envelope["error"]["code"] == code and envelope["meta"]["ending"] == "abandoned"
            assert len(text) < 1_000
        assert client.receive(client.call("refuse"))["error"] == {
            "code": -32602,
            "message": "bad arguments",
            "data": {"field": "a"},
        }
        assert client.text("echo", text="alive") == "alive"


@pytest.mark.slow
def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/mcp"
        with wrapped_url(f"{url}?key=s3cret", greets=False) as client:
            error = client.receive(client.request("initialize", GREETING))["error"]
            assert f"was not sent: the server could not be reached at {url}: connection refused" in error["message"]
    with wrapped_url("http://name.invalid/mcp", greets=False) as client:
        error = client.receive(client.request("initialize", GREETING))["error"]
        assert "the name cannot be resolved" in error["message"]
    with serving("bad_http_server.py") as port, wrapped_url(f"https://127.0.0.1:{port}/mcp", greets=False) as client:
        assert "TLS failed" in client.receive(client.request("initialize", GREETING))["error"]["message"]


def test_a_server_that_wants_credentials_is_named_without_repeating_them(bad: str) -> None:
    closed = bad.replace("/mcp", "/closed")
    with wrapped_url(closed, "--header", "Authorization: Bearer wrong-token", greets=False) as client:
        message = client.receive(client.request("initialize", GREETING))["error"]["message"]
    assert "was refused: the server denies access: HTTP 401 Unauthorized" in message and "--header" in message
    assert "wrong-token" not in message


@pytest.mark.slow
def test_tls_is_checked_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = tmp_path / "certificate.pem"
    certificate.write_bytes(self_signed("localhost"))
    with serving("bad_http_server.py", "0", str(certificate)) as port:
        with wrapped_url(f"https://localhost:{port}/mcp", greets=False) as client:
            message = client.receive(client.request("initialize", GREETING))["error"]["message"]
            assert "its certificate is not valid: self" in message
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with wrapped_url(f"https://localhost:{port}/mcp", "--tool", "hang=timeout:300ms") as client:
            failure(client.ask("hang"))
            assert client.text("odd_stream") == "odd"
            assert client.text("size", text="y" * 300_000) == "300000"


@pytest.mark.slow
def test_a_proxy_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = tmp_path / "certificate.pem"
    certificate.write_bytes(self_signed("localhost"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serving("bad_http_server.py", "0", str(certificate)) as port, tunnelling() as (proxy, asked):
        url = f"https://localhost:{port}/mcp"
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:s3cret@127.0.0.1:{proxy}")
        with wrapped_url(url) as client:
            assert client.text("echo", text="x") == "x"
        assert asked and all(f"CONNECT localhost:{port} " in each for each in asked)
        assert all("Proxy-Authorization: Basic dXNlcjpzM2NyZXQ=" in each for each in asked)
        asked.clear()
        monkeypatch.setenv("NO_PROXY", "example.org,localhost")
        with wrapped_url(url) as client:
            assert client.text("echo", text="x") == "x"
        assert not asked
        monkeypatch.delenv("NO_PROXY")
        with wrapped_url("https://refused.invalid/mcp", greets=False) as client:
            message = client.receive(client.request("initialize", GREETING))["error"]["message"]
        assert f"through the proxy http://127.0.0.1:{proxy}: Tunnel connection failed: 403" in message
        monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:9")
        with wrapped_url(url, greets=False) as client:
            message = client.receive(client.request("initialize", GREETING))["error"]["message"]
        assert "HTTPS_PROXY" in message and "http://" in message and "s3cret" not in message


@contextmanager
def tunnelling() -> Iterator[tuple[int, list[str]]]:
    """A proxy, its port, and the heads of the requests that it got. It knows localhost only."""
    asked: list[str] = []

    class Tunnel(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b"".join(iter(self.rfile.readline, b"\r\n")).decode()
            asked.append(head)
            host, port = head.split()[1].split(":")
            if host != "localhost":
                self.wfile.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", int(port)), ANSWER_WITHIN_S) as there:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                ends = {self.connection: there, there: self.connection}
                while ready := select.select(list(ends), [], [], ANSWER_WITHIN_S)[0]:
                    for end in ready:
                        if not (data := end.recv(65536)):
                            return
                        ends[end].sendall(data)

    class Proxy(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Proxy(("127.0.0.1", 0), Tunnel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], asked
        server.shutdown()


def self_signed(host: str) -> bytes:
    """Return a key and a certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    text = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return text + signed.public_bytes(serialization.Encoding.PEM)


@pytest.mark.slow
def test_redirects_stay_on_the_origin(bad: str) -> None:
    with wrapped_url(bad.replace("/mcp", "/slash")) as client:
        assert client.text("echo", text="x") == "x"
    with wrapped_url(bad.replace("/mcp", "/elsewhere"), greets=False) as client:
        message = client.receive(client.request("initialize", GREETING))["error"]["message"]
    assert "to http://127.0.0.2:9/mcp, which is not followed" in message and "secret" not in message


# --- streams and limits --------------------------------------------------------------------------------------------


def test_a_stream_that_ends_early_is_resumed(bad: str) -> None:
    with wrapped_url(bad) as client:
        assert client.text("resume") == "resumed"
        assert client.text("odd_stream") == "odd"
        assert [each["headers"].get("Last-Event-ID") for each in requests_seen(client) if each["http"] == "GET"] == [
            None,  # the stream for messages that belong to no call
            "e8",
        ]


@pytest.mark.slow
def test_the_stream_of_a_cancelled_call_is_not_resumed(bad: str) -> None:
    with wrapped_url(bad, "--tool", "poll=timeout:1s") as client:
        failure(client.ask("poll"))
        assert polls_seen(client) > 0
        give_up_at = time.monotonic() + ANSWER_WITHIN_S
        before = -1
        while before != (before := polls_seen(client)):  # the last one may be on its way
            assert time.monotonic() < give_up_at, "the stream is opened again and again"
            time.sleep(1.0)


def polls_seen(client: RawClient) -> int:
    return sum(each["headers"].get("Last-Event-ID", "").startswith("poll-") for each in requests_seen(client))


@pytest.mark.slow
def test_a_call_that_hangs_is_answered_on_time(bad: str) -> None:
    with wrapped_url(bad, "--tool", "hang=timeout:300ms") as client:
        ids = [client.call("hang") for _ in range(HUNG_AT_ONCE)]
        for id in ids:
            text, envelope = failure(client.receive(id)["result"])
            assert "did not end within 300ms, its timeout; the server was asked to cancel it" in text
            assert envelope["meta"]["ending"] == "abandoned"
        assert client.text("echo", text="alive") == "alive"
        cancelled = [each["message"]["params"]["requestId"] for each in requests_seen(client) if is_cancellation(each)]
        assert set(ids) >= set(cancelled)


@pytest.mark.slow
def test_too_many_open_calls_are_refused_and_a_ping_is_not(bad: str) -> None:
    with wrapped_url(bad) as client:
        ids = [client.call("hang") for _ in range(MOST_OPEN + 2)]
        for id in ids[-2:]:
            text, envelope = failure(client.receive(id)["result"])
            assert f"was not sent: the server has {MOST_OPEN} open calls" in text and "safe to call it again" in text
            assert envelope["error"]["code"] == "SERVICE_UNAVAILABLE"
        assert "result" in client.receive(client.request("ping"))


def is_cancellation(request: dict[str, Any]) -> bool:
    return bool(request["message"]) and request["message"].get("method") == "notifications/cancelled"


@pytest.mark.slow
def test_a_server_that_refuses_a_large_request_early_is_quoted(bad: str) -> None:
    with wrapped_url(bad.replace("/mcp", "/small")) as client:
        text, envelope = failure(client.ask("size", text="y" * 15_000_000))
        assert "HTTP 413" in text and "has not begun with it" in text, text
        assert envelope["meta"]["ending"] == "not_started"
        assert client.text("echo", text="alive") == "alive"


def test_a_server_that_answers_nothing_is_given_up_and_greeted_again() -> None:
    """The listening socket accepts connections, and no process reads them."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        with wrapped_url(url, "--start-up", "300ms", greets=False) as client:
            message = client.receive(client.request("initialize", GREETING))["error"]["message"]
    assert "did not answer initialize, so its session was given up" in message and "killed" not in message


@pytest.mark.slow
def test_a_deaf_session_is_replaced(bad: str) -> None:
    with wrapped_url(bad, "--tool", "echo=timeout:1s", "--grace", "300ms") as client:
        client.text("deafen")
        text, envelope = failure(client.ask("echo", text="x"))
        assert "did not react within 300ms after a limit, so its session was given up" in text
        assert "The state of that session is lost" in text and "killed" not in text
        assert envelope["error"]["code"] == "TIMEOUT" and envelope["meta"]["ending"] == "abandoned"
        assert "x" in client.text("requests")


@pytest.mark.slow
def test_a_result_that_is_too_large_is_refused_in_bounded_memory(bad: str) -> None:
    with wrapped_url(bad) as client:
        adapter = adapter_of(client)
        for stream in (True, False):
            answer = client.receive(client.call("large", stream=stream), ANSWER_WITHIN_S * 2)
            assert failure(answer["result"])[1]["error"]["code"] == "RESULT_TOO_LARGE"
        assert client.text("size", text="y" * 3_000_000) == "3000000"
        assert adapter.memory_info().rss / 1e6 < MOST_MB


@pytest.mark.slow
def test_notifications_for_a_deaf_server_are_not_collected_without_end(bad: str) -> None:
    line = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"text": "y" * 1000}}) + "\n"
    flood, written = line.encode() * 64, 0
    with wrapped_url(bad) as client:
        client.text("deafen")
        assert client.process.stdin is not None
        fd = client.process.stdin.fileno()
        os.set_blocking(fd, False)
        while written < MOST_ACCEPTED and select.select([], [fd], [], STALLED_S)[1]:
            written += os.write(fd, flood)
        os.set_blocking(fd, True)
        client.process.terminate()
    assert written < MOST_ACCEPTED


@pytest.mark.slow
def test_a_slow_answer_blocks_no_other(bad: str) -> None:
    with wrapped_url(bad, "--tool", "slow=timeout:2s") as client:
        slow = client.call("slow")
        for number in range(5):
            assert client.text("echo", text=str(number)) == str(number)
        failure(client.receive(slow)["result"])


# --- the end -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_adapter_is_replaced_and_not_taken_for_the_server(bad: str) -> None:
    with wrapped_url(bad) as client:
        os.kill(adapter_of(client).pid, signal.SIGSTOP)
        text, _ = failure(client.ask("echo", text="x"))
        assert "a signal had stopped the process that held the connection, so its session was given up" in text
        assert client.text("echo", text="back") == "back"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["wrapper", "adapter"])
def test_nothing_is_left_after_a_kill(bad: str, victim: str) -> None:
    with wrapped_url(bad) as client:
        adapter = adapter_of(client)
        hung = client.call("hang")
        wait_for_call(client, "hang")
        if victim == "wrapper":
            client.process.kill()
        else:
            os.kill(adapter.pid, signal.SIGKILL)
            text, envelope = failure(client.receive(hung)["result"])
            assert "the process that held the connection to the server was killed by SIGKILL" in text
            assert envelope["meta"]["ending"] == "abandoned"
            assert client.text("echo", text="back") == "back"
        wait_until_gone(adapter.pid)


@pytest.mark.slow
def test_a_server_of_a_configuration_is_called_from_the_shell(bad: str, tmp_path: Path) -> None:
    entry = {"type": "http", "url": bad, "headers": {"Authorization": "Bearer ${URL_TEST_TOKEN:-none}"}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"remote": entry}}))
    words = ["mcp", "call", "remote", "requests", "--config", str(tmp_path / "mcp.json"), "--format", "text"]
    ran = subprocess.run(
        [sys.executable, "-m", "shotclock", *words], capture_output=True, text=True, timeout=ANSWER_WITHIN_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(ran.stdout)[-1]["headers"]["Authorization"] == "Bearer none"


@pytest.mark.slow
def test_wrong_options_are_named() -> None:
    def run(*options: str) -> str:
        ran = subprocess.run([*WRAP, *options], capture_output=True, text=True, timeout=ANSWER_WITHIN_S)
        assert ran.returncode == 125
        return ran.stderr

    assert "begin with http:// or https://" in run("--url", "ftp://host/mcp")
    assert "exclude each other" in run("--url", "http://host/mcp", "--", "server")
    assert "--url" in run("--url", "http://host/mcp", "--cwd", "/tmp")
    assert "--header needs --url" in run("--header", "A: b", "--", "server")
    assert "cannot be chosen" in run("--url", "http://host/mcp", "--header", "Mcp-Session-Id: 1")
    assert "the variable NOT_SET_AT_ALL, which is not set" in run(
        "--url", "http://host", "--header", "A: ${NOT_SET_AT_ALL}"
    )
    assert "s3cret" not in run("--url", "http://host/mcp", "--header", "s3cret")
    assert "s3cret" not in run("--url", "http://user:s3cret/@host/mcp")
    assert "given before" in run("--url", "http://user:pw@host/mcp", "--header", "Authorization: x")
