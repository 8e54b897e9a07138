"""How a server starts, what keeps it from starting, and that nothing is left when it ends, however it ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.apps.server.client import (
    ADVERSARIES,
    ENDED_WITHIN_S,
    LEGACY,
    MODERN,
    ROOT,
    STARTED_WITHIN_S,
    connected,
    envelope_of,
    envelope_on_wire,
    http_server,
    run,
    served,
)
from tests.calls.bounds import eventually, marked, soon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

ENVELOPED = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}


def say(process: subprocess.Popen[bytes], number: int, tool: str, arguments: dict[str, Any]) -> None:
    assert process.stdin is not None
    params = {"name": tool, "arguments": arguments, "_meta": ENVELOPED}
    request = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[bytes], within: float = STARTED_WITHIN_S) -> Any:
    """The next line on stdout, which has to be a message of the protocol."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    line, give_up_at = b"", time.monotonic() + within
    while not line.endswith(b"\n") and time.monotonic() < give_up_at:
        line += process.stdout.readline() or b""
        if not line:
            time.sleep(0.005)
    message = json.loads(line)
    assert message["jsonrpc"] == "2.0"
    return message


def hang_three(process: subprocess.Popen[bytes], folder: Path) -> None:
    for number, tool in enumerate(("daemonises-without-a-trace", "patient", "patient-async")):
        place = folder / tool
        place.mkdir()
        meta = {**ENVELOPED, "shotclock.dev/timeoutMs": 20_000}
        params = {"name": tool, "arguments": {"folder": str(place)}, "_meta": meta}
        assert process.stdin is not None
        request = {"jsonrpc": "2.0", "id": 100 + number, "method": "tools/call", "params": params}
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        eventually(lambda place=place: (place / "ready").exists(), within=STARTED_WITHIN_S)


def nothing_left(folder: Path) -> bool:
    return not any(marked(place) for place in folder.iterdir() if place.is_dir())


# --- ending ---------------------------------------------------------------------------------------


def test_the_end_of_stdin_stops_everything_and_is_a_clean_exit(tmp_path: Path) -> None:
    with served("serve", ADVERSARIES) as process:
        hang_three(process, tmp_path)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(ENDED_WITHIN_S) == 0
        eventually(lambda: nothing_left(tmp_path))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_everything_and_those_who_wait_are_told(number: int, code: int, tmp_path: Path) -> None:
    with served("serve", ADVERSARIES) as process:
        hang_three(process, tmp_path)
        process.send_signal(number)
        answers = {(message := hear(process))["id"]: envelope_on_wire(message["result"]) for _ in range(3)}
        assert set(answers) == {100, 101, 102}
        assert all(not envelope["ok"] for envelope in answers.values())
        assert process.wait(ENDED_WITHIN_S) == code
        eventually(lambda: nothing_left(tmp_path))


def test_the_second_signal_does_not_wait(tmp_path: Path) -> None:
    with served("serve", ADVERSARIES) as process:
        hang_three(process, tmp_path)
        for child in psutil.Process(process.pid).children(recursive=True):
            if "clock-zygote" in child.name():
                child.suspend()  # so that stopping politely takes its time
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)  # two signals in one moment are one
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDED_WITHIN_S) == 143
        assert time.monotonic() - began < 4
        for child in psutil.process_iter(["name"]):
            if child.info["name"] == "clock-zygote" and child.status() == psutil.STATUS_STOPPED:
                child.resume()
        eventually(lambda: nothing_left(tmp_path), within=10)


def test_a_killed_server_leaves_nothing(tmp_path: Path) -> None:
    with served("serve", ADVERSARIES) as process:
        hang_three(process, tmp_path)
        process.kill()
        process.wait(ENDED_WITHIN_S)
        eventually(lambda: nothing_left(tmp_path), within=10)


def test_a_signal_during_a_hanging_import_ends_it(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        f"import time\nopen({str(tmp_path / 'importing')!r}, 'w').close()\ntime.sleep(60)\n"
    )
    with served("serve", str(tmp_path / "slow.py")) as process:
        eventually(lambda: (tmp_path / "importing").exists(), within=STARTED_WITHIN_S)
        process.terminate()
        assert process.wait(ENDED_WITHIN_S) == 143


# --- clients that behave badly --------------------------------------------------------------------


def test_lines_that_are_no_messages_are_answered_and_the_next_one_works() -> None:
    with served("serve", ADVERSARIES) as process:
        assert process.stdin is not None
        say(process, 1, "noop", {"a": 1})
        assert hear(process)["id"] == 1
        for line in (b"not json", b"[]", b'{"jsonrpc":"2.0"}', b"\xff\xfe", b"{" * 100_000, b"x" * 5_000_000):
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            refused = hear(process)
            assert refused["id"] is None, line[:40]
            assert refused["error"]["code"] == -32700
        process.stdin.write(b"\n\n")
        say(process, 2, "noop", {"a": 2})
        assert envelope_on_wire(hear(process)["result"])["data"] == {"result": 2}


def test_a_client_that_never_reads_stderr_does_not_stop_the_server(tmp_path: Path) -> None:
    with served("serve", ADVERSARIES) as process:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            say(process, number, "writes-for-ever", {"folder": str(folder)})  # fills our stderr
            assert envelope_on_wire(hear(process)["result"])["error"]["code"] == "TIMEOUT"
        for number in range(50):
            say(process, 100 + number, "raises", {})  # its traceback goes to stderr as well
            assert hear(process)["id"] == 100 + number
        say(process, 999, "noop", {"a": 3})
        assert envelope_on_wire(hear(process)["result"])["ok"]


def test_what_a_tool_prints_goes_to_stderr_up_to_a_bound_and_that_it_is_cut_is_said_once(tmp_path: Path) -> None:
    with open(tmp_path / "stderr", "wb") as stderr, served("serve", ADVERSARIES, stderr=stderr) as process:
        say(process, 1, "floods", {"megabytes": 3})
        assert envelope_on_wire(hear(process)["result"])["data"] == {"result": "done"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDED_WITHIN_S) == 143
    said = (tmp_path / "stderr").read_bytes()
    assert said.count(b"x" * 999_999 + b"\n") == 3, "a few megabytes are nobody's flood"
    assert b"the last line\n" in said
    with open(tmp_path / "stderr", "wb") as stderr, served("serve", ADVERSARIES, stderr=stderr) as process:
        say(process, 1, "floods", {"megabytes": 100})
        assert envelope_on_wire(hear(process)["result"])["data"] == {"result": "done"}
        say(process, 2, "noop", {"a": 3})
        assert hear(process)["id"] == 2
    said = (tmp_path / "stderr").read_bytes()
    assert 1_000_000 < len(said) < 30_000_000
    assert said.count(b"tools print too much: most of it is left out") == 1


def test_a_client_that_reads_nothing_is_not_read_from_any_more_and_costs_bounded_memory() -> None:
    with served("serve", ADVERSARIES, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        say(process, 0, "noop", {"a": 1})
        assert hear(process)["id"] == 0
        server = psutil.Process(process.pid)
        before = server.memory_info().rss
        os.set_blocking(process.stdin.fileno(), False)
        params = {"name": "nope", "arguments": {"text": "x" * 1000}, "_meta": ENVELOPED}
        request = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}).encode() + b"\n"
        sent, give_up_at, stuck_since = 0, time.monotonic() + 60, time.monotonic()
        while time.monotonic() < give_up_at and time.monotonic() - stuck_since < 3:
            try:
                sent += os.write(process.stdin.fileno(), request * 8)
                stuck_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        assert time.monotonic() < give_up_at, f"{sent} bytes were taken, and no end"
        assert server.memory_info().rss - before < 150_000_000
        process.stdin.close()
        assert process.wait(ENDED_WITHIN_S) == 0


def test_a_client_that_closes_our_stdout_has_left(tmp_path: Path) -> None:
    with served("serve", ADVERSARIES) as process:
        hang_three(process, tmp_path)
        assert process.stdout is not None
        process.stdout.close()
        say(process, 1, "noop", {})
        assert process.wait(ENDED_WITHIN_S) == 0
        eventually(lambda: nothing_left(tmp_path))


# --- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "mode", "tool"),
    [
        ("stdio", MODERN, "patient"),
        ("stdio", MODERN, "waits-for-a-child-beside-others"),
        ("stdio", LEGACY, "waits-for-a-child"),
        ("http", LEGACY, "waits-for-a-child-beside-others"),
    ],
)
def test_a_cancelled_call_is_really_stopped(transport: str, mode: str, tool: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(transport, mode) as (client, _):
            call = asyncio.ensure_future(client.call_tool(tool, {"folder": str(tmp_path)}))
            await soon(lambda: (tmp_path / "ready").exists(), within=10)
            call.cancel()
            await asyncio.wait([call], timeout=10)
            await soon(lambda: not marked(tmp_path))
            assert (await envelope_of(client, "noop", {"a": 3}))["data"] == {"result": 3}

    run(scenario())


def test_a_client_that_hangs_up_stops_its_call(tmp_path: Path) -> None:
    with http_server() as (url, server):
        host, port = url.removeprefix("http://").removesuffix("/mcp").split(":")
        params = {"name": "patient", "arguments": {"folder": str(tmp_path)}, "_meta": ENVELOPED}
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
        head = (
            f"POST /mcp HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            "Accept: application/json, text/event-stream\r\nMcp-Protocol-Version: 2026-07-28\r\n"
            f"Mcp-Method: tools/call\r\nMcp-Name: patient\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(head.encode() + body)
            eventually(lambda: (tmp_path / "ready").exists(), within=10)
            assert marked(tmp_path)
        eventually(lambda: not marked(tmp_path))
        assert health(url)["cancelled"] == 1
        assert server.is_running()


# --- HTTP -----------------------------------------------------------------------------------------


def health(url: str, **headers: str) -> Any:
    request = urllib.request.Request(url.removesuffix("/mcp") + "/health", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read())


def test_health_says_how_the_server_does_and_only_to_this_machine() -> None:
    with http_server() as (url, _):
        said = health(url)
        assert said["ok"] is True
        assert said["name"] == "adversaries"
        assert said["calls"] == said["in_flight"] == said["orphans"] == 0
        assert said["workers"] >= 2
        for header in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            with pytest.raises(urllib.error.HTTPError):
                health(url, **header)


# --- what cannot be served ------------------------------------------------------------------------


def refusal(shotclock: Callable[..., Any], validate: Callable[[Any], Any], *words: str, **options: Any) -> Any:
    ran = shotclock("serve", *words, "--json", cwd=options.pop("cwd", ROOT), **options)
    envelope = validate(ran.json())
    assert ran.code == envelope["meta"]["exit_code"] != 0
    assert envelope["meta"]["ending"] == "not_started"
    return envelope["error"]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (None, "TARGET_NOT_FOUND", "no file"),
        ("x = 1\n", "TARGET_NOT_FOUND", "'app'"),
        ("from shotclock import App\nmcp = App('shop')\n", "TARGET_NOT_FOUND", "there is no 'app', but 'mcp' in"),
        ("app = 1\n", "TARGET_UNUSABLE", "int, not an App"),
        ("import nowhere_to_be_found\n", "TARGET_UNUSABLE", "nowhere_to_be_found"),
        ("def f(:\n", "TARGET_UNUSABLE", "SyntaxError"),
        ("1/0\n", "TARGET_UNUSABLE", "ZeroDivisionError"),
        ("import sys; sys.exit(3)\n", "TARGET_UNUSABLE", "SystemExit"),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_with_the_reason(
    text: str | None, code: str, said: str, tmp_path: Path, shotclock: Any, validate_envelope: Any
) -> None:
    file = tmp_path / "broken.py"
    if text is not None:
        file.write_text(text)
    error = refusal(shotclock, validate_envelope, str(file))
    assert error["code"] == code, error
    assert said in error["message"]
    if code == "TARGET_UNUSABLE" and "App" not in said:
        assert "Traceback" in error["context"]["traceback"]


def test_what_keeps_a_server_on_stdin_from_starting_is_the_last_line_of_stderr_after_the_one_traceback_of_its_cause(
    tmp_path: Path, shotclock: Any, validate_envelope: Any
) -> None:
    (tmp_path / "broken.py").write_text("1/0\n")
    ran = shotclock("serve", str(tmp_path / "broken.py"), cwd=ROOT)
    assert ran.stdout == b"", "which is the protocol's"
    *before, last = ran.stderr.decode().splitlines()
    envelope = validate_envelope(json.loads(last))
    assert (ran.code, envelope["error"]["code"]) == (4, "TARGET_UNUSABLE")
    assert "__mp_main__" not in "\n".join(before)
    assert sum("Traceback" in line for line in before) == 1, before
    assert any("ZeroDivisionError" in line for line in before)
    (tmp_path / "empty.py").write_text("x = 1\n")
    ran = shotclock("serve", str(tmp_path / "empty.py"), cwd=ROOT)
    assert "Traceback" not in ran.stderr.decode()
    assert json.loads(ran.stderr.decode().splitlines()[-1])["error"]["code"] == "TARGET_NOT_FOUND"


def test_a_person_who_starts_a_server_on_a_terminal_reads_that_it_is_for_a_client() -> None:
    ours, theirs = os.openpty()
    with served("serve", ADVERSARIES, stdin=theirs) as process:
        os.close(theirs)
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        said = bytearray()
        eventually(
            lambda: said.extend(process.stderr.read() or b"") or b"serving adversaries" in said, STARTED_WITHIN_S
        )
        assert b"for the MCP client" in said
        os.write(ours, b"\x04")  # the end of stdin
        assert process.wait(ENDED_WITHIN_S) == 0
    os.close(ours)


def test_an_import_that_kills_its_process_is_refused(tmp_path: Path, shotclock: Any, validate_envelope: Any) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(1)\n")
    error = refusal(shotclock, validate_envelope, str(tmp_path / "deadly.py"), env={"SHOTCLOCK_REMAINING_MS": "6000"})
    assert error["code"] in ("TIMEOUT", "TARGET_UNUSABLE"), error


def test_an_import_that_hangs_is_given_up_on(tmp_path: Path, shotclock: Any, validate_envelope: Any) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)\n")
    error = refusal(shotclock, validate_envelope, str(tmp_path / "slow.py"), env={"SHOTCLOCK_REMAINING_MS": "6000"})
    assert error["code"] == "TIMEOUT"
    assert "importing" in error["message"]


def test_a_module_is_found_in_the_current_directory_and_missed_elsewhere(
    tmp_path: Path, shotclock: Any, validate_envelope: Any
) -> None:
    (tmp_path / "mine.py").write_text("import beside\nfrom shotclock import App\napp = App('mine')\n")
    error = refusal(shotclock, validate_envelope, "mine:app", cwd=tmp_path)
    assert (error["code"], "beside" in error["message"]) == ("TARGET_UNUSABLE", True)
    (tmp_path / "beside.py").write_text("")
    ran = shotclock("serve", "mine:app", cwd=tmp_path)
    assert (ran.code, ran.stdout) == (0, b"")
    for target in ("mine_nowhere:app", "mine_nowhere.app:app"):
        error = refusal(shotclock, validate_envelope, target)
        assert (error["code"], "no module 'mine_nowhere'" in error["message"]) == ("TARGET_NOT_FOUND", True)
        assert "install its package" in error["suggestion"]
    (tmp_path / "src" / "mine_there").mkdir(parents=True)
    refused = shotclock("serve", "mine_there.app:app", cwd=tmp_path)
    assert "Traceback" not in refused.stderr.decode() and "pip install -e ." in refused.stderr.decode()
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "__init__.py").write_text("import beside_nothing\n")
    error = refusal(shotclock, validate_envelope, "parent.child:app", cwd=tmp_path)
    assert (error["code"], "beside_nothing" in error["message"]) == ("TARGET_UNUSABLE", True)


def test_options_that_make_no_sense_are_refused_together(
    shotclock: Any, validate_envelope: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path))
    for words, fields in (
        (["--http", "0.0.0.0:80"], ["http"]),
        (["--http", "example.com:80"], ["http"]),
        (["--http", "8000"], ["http"]),
        (["--http", "127.0.0.1:99999"], ["http"]),
        (["--http", "", "--operation-timeout", "soon"], ["http", "operation-timeout"]),
        (["--operation-timeout", "1s", "--operation-timeout-ms", "5"], ["operation-timeout"]),
        (["--operation-timeout-ms", "-5"], ["operation-timeout-ms"]),
    ):
        error = refusal(shotclock, validate_envelope, "t.py", *words)
        assert (error["code"], [mistake["field"] for mistake in error["errors"]]) == ("ARG_ERROR", fields), words


def test_a_port_that_is_taken_is_refused_at_once(shotclock: Any, validate_envelope: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refusal(shotclock, validate_envelope, ADVERSARIES, "--http", f"127.0.0.1:{port}")
    assert error["code"] == "ADDRESS_UNAVAILABLE"
    assert str(port) in error["message"]


# --- an app that serves itself --------------------------------------------------------------------

SELF = """
from shotclock import App
app = App("self", default_timeout="5s")

@app.command
def where() -> int:
    import os
    return os.getpid()

@app.command
async def where_async() -> int:
    import os
    return os.getpid()

app.serve_mcp()
print("after")
"""


@pytest.mark.usefixtures("warm_starts")
def test_an_app_serves_itself_from_processes_of_their_own(tmp_path: Path) -> None:
    import sys

    (tmp_path / "own.py").write_text(SELF)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "own.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    )
    try:
        for number, tool in enumerate(("where", "where-async")):
            say(process, number, tool, {})
            envelope = envelope_on_wire(hear(process)["result"])
            assert envelope["ok"], envelope
            assert envelope["data"]["result"] != process.pid
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(ENDED_WITHIN_S) == 0
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), True)
        assert process.stdout.read() == b"after\n"
    finally:
        process.kill()
        process.wait(ENDED_WITHIN_S)


# --- the backstop ---------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [["--operation-timeout", "500ms"], ["--operation-timeout-ms", "500"]])
def test_the_backstop_really_stops_a_tool_that_has_no_timeout_and_warns_when_it_is_too_short(
    option: list[str], tmp_path: Path
) -> None:
    with served("serve", ADVERSARIES, *option) as process:
        began = time.monotonic()
        say(process, 1, "unbounded", {"folder": str(tmp_path)})
        eventually(lambda: (tmp_path / "ready").exists(), within=STARTED_WITHIN_S)
        envelope = envelope_on_wire(hear(process)["result"])
        assert envelope["error"]["code"] == "OPERATION_TIMEOUT"
        assert envelope["error"]["context"]["timeout_ms"] == 500
        assert envelope["meta"]["ending"] == "killed"
        assert time.monotonic() - began < STARTED_WITHIN_S
        eventually(lambda: not marked(tmp_path))
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        assert b"operation timeout of 500ms is not longer than the 20s that 'patient" in process.stderr.read()


@pytest.mark.parametrize("tool", ["swallows-beside-others", "swallows-through-its-grace", "blocks-others"])
def test_a_backstop_that_cost_the_apps_memory_says_so(tool: str, tmp_path: Path) -> None:
    async def scenario() -> tuple[Any, Any]:
        async with connected("stdio", MODERN, "--operation-timeout", "2s") as (client, _):
            assert (await envelope_of(client, "remembers", {"what": "a"}))["data"] == ["a"]
            envelope = await envelope_of(client, tool, {"folder": str(tmp_path)})
            assert not marked(tmp_path)
            return envelope, await envelope_of(client, "remembers", {"what": "b"})

    envelope, after = run(scenario(), within=60)
    assert envelope["error"]["code"] == "OPERATION_TIMEOUT"
    assert envelope["meta"]["ending"] == "killed"
    assert [warning["code"] for warning in envelope["warnings"]] == ["HOST_REPLACED"]
    assert after["data"] == ["b"]


def test_without_a_backstop_a_tool_without_a_timeout_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected("stdio", MODERN, "--operation-timeout", "0") as (client, _):
            call = asyncio.ensure_future(client.call_tool("unbounded", {"folder": str(tmp_path)}))
            await soon(lambda: (tmp_path / "ready").exists(), within=10)
            assert not (await asyncio.wait([call], timeout=1))[0]
            call.cancel()
            await asyncio.wait([call], timeout=10)
            await soon(lambda: not marked(tmp_path))

    run(scenario())
