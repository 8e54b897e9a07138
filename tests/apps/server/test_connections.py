"""Nothing at the door is unbounded: clients that send half of a request, connect without end, or read nothing."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from shotclock.calls.principal import Principal, Role
from shotclock.core.limits import WallTime
from shotclock.people.access import Access
from shotclock.store.store import Store
from tests.apps.server.client import ADVERSARIES, ENDED_WITHIN_S, ROOT, STARTED_WITHIN_S, envelope_on_wire
from tests.calls.bounds import eventually
from tests.warm import WarmStart

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

DESCRIPTORS = 256
HALF_HEADERS = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
HALF_BODY = (
    b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Accept: application/json, text/event-stream\r\nContent-Length: 100\r\n\r\n{"
)
HALF_API_BODY = HALF_BODY.replace(b"/mcp", b"/api/inbox")


@contextmanager
def flooded(folder: Path, **constants: float) -> Iterator[tuple[int, subprocess.Popen[bytes], Path]]:
    """A server with few descriptors and short clocks: its port, its process, and the file its stderr goes to."""
    few = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))\n"
    short = "".join(f"c.{name} = {value}\n" for name, value in constants.items())
    program = (
        f"{few}import shotclock.apps.server._http as c\n{short}from shotclock.main import run_program\nrun_program()\n"
    )
    words = ["serve", ADVERSARIES, "--http", "127.0.0.1:0"]
    log = folder / "log"
    with open(log, "wb") as stderr:
        process = WarmStart(
            [sys.executable, "-c", program, *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, cwd=ROOT,
        )  # fmt: skip
    try:
        eventually(lambda: b"decide at" in log.read_bytes() or process.poll() is not None, within=STARTED_WITHIN_S)
        found = re.search(rb"on http://127.0.0.1:(\d+)/mcp", log.read_bytes())
        assert found is not None, log.read_bytes()
        yield int(found[1]), process, log
        process.terminate()
        assert process.wait(ENDED_WITHIN_S) == 143, log.read_bytes()
    finally:
        process.kill()
        process.wait(ENDED_WITHIN_S)


def half_open(stack: ExitStack, port: int, count: int, *starts: bytes) -> list[socket.socket]:
    sockets = []
    for number in range(count):
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        client.sendall(starts[number % len(starts)])
        sockets.append(client)
    return sockets


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def health(port: int) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
        return json.loads(response.read())


def call(port: int, tool: str, arguments: dict[str, Any], **more: Any) -> Any:
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
    params = {"name": tool, "arguments": arguments, "_meta": {**meta, **more}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Mcp-Protocol-Version": "2026-07-28",
        "Mcp-Method": "tools/call",
        "Mcp-Name": tool,
    }
    request = urllib.request.Request(f"http://127.0.0.1:{port}/mcp", body, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        text = response.read().decode()
    found = re.search(r"^data: (\{.*)$", text, re.MULTILINE)
    return envelope_on_wire(json.loads(found[1] if found else text)["result"])


def test_a_flood_of_half_sent_requests_keeps_nobody_out_and_is_closed_in_time(tmp_path: Path) -> None:
    with flooded(tmp_path, HEADERS_WITHIN_S=4, BODY_WITHIN_S=4) as (port, _, log), ExitStack() as stack:
        before = len(log.read_bytes())
        clients = half_open(stack, port, 400, HALF_HEADERS, HALF_BODY, HALF_API_BODY)
        for _ in range(5):
            began = time.monotonic()
            assert health(port)["ok"]
            assert call(port, "noop", {"a": 2})["data"] == {"result": 2}
            assert time.monotonic() - began < 15
        eventually(lambda: all(is_closed(client) for client in clients), within=20)
        said = log.read_bytes()[before:]
        assert len(said) < 2_000, said[-2_000:]
        assert said.count(b"dropped before their request was complete") == 1, said
        assert b"Traceback" not in said


def test_a_client_that_sends_a_byte_now_and_then_is_told_that_it_takes_too_long(tmp_path: Path) -> None:
    with flooded(tmp_path, HEADERS_WITHIN_S=1.5, BODY_WITHIN_S=1.5) as (port, _, log):
        for start in (HALF_HEADERS, HALF_BODY, HALF_API_BODY):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                began = time.monotonic()
                client.sendall(start)
                client.settimeout(0.2)
                said = b""
                while time.monotonic() - began < 10:
                    try:
                        piece = client.recv(4096)
                        if not piece:
                            break
                        said += piece
                    except TimeoutError:
                        client.sendall(b"a")
                    except ConnectionError:
                        break
                assert time.monotonic() - began < 10
                assert said.startswith(b"HTTP/1.1 408 "), said
        assert b"Traceback" not in log.read_bytes()


def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    with flooded(tmp_path, HEADERS_WITHIN_S=1) as (port, _, _), ExitStack() as stack:
        clients = half_open(stack, port, 5, b"")
        eventually(lambda: all(is_closed(client) for client in clients), within=10)


def test_a_client_that_does_not_read_its_answer_is_let_go_of(tmp_path: Path) -> None:
    with flooded(tmp_path, TAKEN_WITHIN_S=1, HEADERS_WITHIN_S=1) as (port, process, _):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            request = b"GET /page/page.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            client.sendall(request * 400)  # more than the buffers of both sides hold

            server, mine = psutil.Process(process.pid), client.getsockname()[1]

            def is_open() -> bool:
                return any(each.raddr and each.raddr.port == mine for each in server.net_connections("tcp"))

            eventually(is_open, within=10)
            eventually(lambda: not is_open(), within=15)
        assert health(port)["ok"]


def test_workers_keep_their_descriptors_however_many_connect(tmp_path: Path) -> None:
    with flooded(tmp_path) as (port, _, log), ExitStack() as stack:
        half_open(stack, port, 300, HALF_HEADERS)
        short = {"shotclock.dev/timeoutMs": 3_000}
        folders = [tmp_path / str(number) for number in range(8)]
        for folder in folders:
            folder.mkdir()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda folder: call(port, "patient", {"folder": str(folder)}, **short), folders))
        assert [answer["error"]["code"] for answer in answers] == ["TIMEOUT"] * 8, answers
        assert all(answer["meta"]["ending"] == "killed" for answer in answers)
        assert b"Too many open files" not in log.read_bytes()


def open_session(port: int) -> str:
    """As clients of revisions before 2026 do. Returns its id."""
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}).encode()
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/mcp", body, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(response.headers["mcp-session-id"])


def is_known(port: int, session: str) -> bool:
    body = json.dumps({"jsonrpc": "2.0", "id": 2, "method": "ping"}).encode()
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Mcp-Session-Id": session,
    }
    request = urllib.request.Request(f"http://127.0.0.1:{port}/mcp", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30):
            return True
    except urllib.error.HTTPError as refused:
        assert refused.code == 404
        return False


def ask_in_session(port: int, session: str, tool: str, arguments: dict[str, Any]) -> socket.socket:
    params = {"name": tool, "arguments": arguments}
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}).encode()
    head = (
        "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "Accept: application/json, text/event-stream\r\n"
        f"Mcp-Session-Id: {session}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(head.encode() + body)
    return client


def test_the_answer_to_an_older_client_comes_as_json_in_one_piece_and_of_a_slow_one_the_head_comes_first(
    tmp_path: Path,
) -> None:
    # Where the head may wait for its answer for as long as a busy machine takes, and where it may not.
    with flooded(tmp_path, HEAD_WITHIN_S=20.0) as (port, _, log):
        session = open_session(port)
        for tool in ("noop", "noop_async"):
            with ask_in_session(port, session, tool, {"a": 5}) as client:
                head, _, body = client.recv(65536).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ") and b"content-type: application/json" in head.lower()
                assert json.loads(body)["id"] == 7 and b"content-length: %d" % len(body) in head.lower()
        assert b"Traceback" not in log.read_bytes()
    with flooded(tmp_path) as (port, _, log):
        session = open_session(port)
        with ask_in_session(port, session, "counts_to", {"n": 2, "pause_ms": 1000}) as client:
            piece = client.recv(65536)
            assert piece.startswith(b"HTTP/1.1 200 ") and b"text/event-stream" in piece and b'"id":7' not in piece
            while not piece.endswith(b"\r\n0\r\n\r\n"):
                more = client.recv(65536)
                assert more, piece
                piece += more
            assert b'"id":7' in piece
        with ask_in_session(port, session, "counts_to", {"n": 2, "pause_ms": 1000}):
            pass  # it leaves at once; what it asked for ends by itself
        assert is_known(port, session)
        assert b"Traceback" not in log.read_bytes()


def test_of_one_clients_sessions_the_one_that_was_idle_longest_makes_room_and_stopping_stays_quick(
    tmp_path: Path,
) -> None:
    from shotclock.apps.server._http import MOST_SESSIONS_EACH

    with flooded(tmp_path) as (port, process, log):
        first, second = open_session(port), open_session(port)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: open_session(port), range(MOST_SESSIONS_EACH - 2)))
        assert is_known(port, first)  # and is not idle longest any more
        last = open_session(port)
        assert [is_known(port, session) for session in (first, second, last)] == [True, False, True]
        began = time.monotonic()
        process.terminate()
        assert process.wait(ENDED_WITHIN_S) == 143
        assert time.monotonic() - began < 5
        assert b"Traceback" not in log.read_bytes()


def test_agents_that_wait_leave_room_for_the_person_they_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("SHOTCLOCK_HOME", str(home))
    with Store.open(home) as store:
        now = WallTime.of_ns(time.time_ns())
        token = Access(store).issue("olga", Role.OPERATOR, Principal.local(), now).text
    ask = b'{"title": "May I?", "wait_ms": 25000}'
    head = (
        f"POST /api/inbox HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(ask)}"
    )
    with flooded(tmp_path) as (port, _, log), ExitStack() as stack:
        clients = half_open(stack, port, 110, head.encode() + b"\r\n\r\n" + ask)
        refused = [client for client in clients if said_by(client).startswith(b"HTTP/1.1 429 ")]
        assert 10 < len(refused) < 60, len(refused)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/api/inbox", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert len(json.load(answer)["data"]["proposals"]) == 1
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as page:
            assert page.status == 200
        assert b"Traceback" not in log.read_bytes()


def said_by(client: socket.socket) -> bytes:
    """What came within a moment: those who wait for a person are told nothing yet."""
    client.settimeout(0.1)
    try:
        return client.recv(4096)
    except OSError:
        return b""
