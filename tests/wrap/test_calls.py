"""The log of calls: every call of a wrapped server is in the store, and no call waits for it or fails because of it."""

import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.limits import WallTime
from shotclock.store.store import Retention, Store, prune
from shotclock.store.wrapped_calls import CallFilter, LoggedCall
from shotclock.wrap._call_log import MOST_WAITING, CallLog, server_name
from shotclock.wrap._limits import CallLimits
from shotclock.wrap._requests import EndedRequest
from tests.rows import row
from tests.store.locked import LONG_S, held
from tests.wrap.client import SERVER, failure, wrapped

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

# A small program on a busy machine. Only a hang runs this out.
RUN_WITHIN_S = 30.0
NOW = WallTime(1_800_000_000_000)
DAY_MS = 24 * 3600 * 1000


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def listed(*options: str) -> list[dict[str, Any]]:
    """The calls that `shotclock mcp log` lists, as JSON."""
    argv = [sys.executable, "-m", "shotclock", "mcp", "log", *options]
    ran = subprocess.run(argv, capture_output=True, timeout=RUN_WITHIN_S)
    envelope = json.loads(ran.stdout)
    assert envelope["ok"], envelope
    return envelope["data"]["calls"]


def logged(number: int, **changes: Any) -> LoggedCall:
    fields: dict[str, Any] = {
        "server": "files",
        "tool": "read",
        "started_at": NOW + number,
        "duration_ms": number,
        "outcome": "ok",
        "call_id": None,
        "timeout_ms": 1_000,
        "idle_ms": 0,
        "request_bytes": 100,
        "answer_bytes": 200,
        "arguments_sha256": None,
        "generation": 1,
        "pid": 7,
    }
    return LoggedCall(**{**fields, **changes})


@pytest.mark.slow
def test_every_call_is_logged_with_its_limits_outcome_sizes_and_digest() -> None:
    with wrapped("--name", "files", "--timeout", "1s", "--idle", "30s") as client:
        pid = client.process.pid
        client.text("echo", text="hello", b=[1, 2])
        client.ask("big", size=200_000)
        text, envelope = failure(client.ask("hang"))
        failure(client.ask("crash"))
        assert "error" in client.receive(client.call("missing"))
    missing, crashed, hung, big, echo = listed()
    assert [each["outcome"] for each in (missing, crashed, hung, big, echo)] == [
        *("error", "CONNECTION_LOST", "TIMEOUT", "ok", "ok")
    ]
    assert {(each["server"], each["pid"]) for each in listed()} == {("files", pid)}
    assert (echo["timeout_ms"], echo["idle_ms"], echo["generation"]) == (1_000, 30_000, 1)
    canonical = b'{"b":[1,2],"text":"hello"}'
    assert echo["arguments_sha256"] == hashlib.sha256(canonical).hexdigest()
    assert big["answer_bytes"] > 200_000 > big["request_bytes"] > 0
    assert hung["duration_ms"] >= 1_000 and hung["answer_bytes"] == 0
    assert hung["call_id"] == envelope["meta"]["request_id"] and hung["call_id"] in text
    assert missing["generation"] == 2


@pytest.mark.slow
def test_a_long_result_of_a_tool_that_failed_is_logged_as_one() -> None:
    for style in ([], ["--id-last"]):
        with wrapped(server=[*SERVER, *style]) as client:
            assert client.ask("big", size=200_000, fails=True)["isError"]
            assert client.text("big", size=200_000)
        assert [each["outcome"] for each in listed()[:2]] == ["ok", "tool_error"]


def test_calls_that_were_cancelled_or_in_flight_when_the_client_left_are_logged_once() -> None:
    with wrapped() as client:
        id = client.call("hang")
        client.send(method="notifications/cancelled", params={"requestId": id})
        client.text("echo", text="behind it")
        client.call("hang", left=True)
        client.text("echo", text="behind it")
    assert sorted(each["outcome"] for each in listed("--tool", "hang")) == ["CANCELLED", "CONNECTION_LOST"]


def test_a_long_request_has_its_size_and_its_digest() -> None:
    with wrapped() as client:
        client.text("echo", text="x" * 150_000)
    [call] = listed()
    canonical = b'{"text":"%s"}' % (b"x" * 150_000)
    assert call["request_bytes"] > 150_000 and call["arguments_sha256"] == hashlib.sha256(canonical).hexdigest()


def test_results_with_is_error_are_tool_errors() -> None:
    with wrapped(server=[sys.executable, "-c", FAILING_SERVER]) as client:
        assert client.ask("anything")["isError"]
    assert [each["outcome"] for each in listed("--failed")] == ["tool_error"]


FAILING_SERVER = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "f", "version": "1"}}
    if request["method"] == "tools/call":
        result = {"content": [{"type": "text", "text": "no such file"}], "isError": True}
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""


def test_nothing_is_logged_with_no_log_and_without_calls(home: Path) -> None:
    with wrapped("--no-log") as client:
        client.text("echo", text="unseen")
    with wrapped() as client:
        client.receive(client.request("tools/list"))
    assert not (home / "shotclock.db").exists()


def test_a_store_that_cannot_be_used_fails_no_call_and_is_named_at_the_end(home: Path, tmp_path: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "shotclock.db").write_bytes(b"this is no database" * 100)
    with open(tmp_path / "err", "wb") as err, wrapped(stderr=err) as client:
        for number in range(3):
            assert client.text("echo", text=str(number)) == str(number)
    assert "3 calls were not logged: this is not a Shotclock store" in (tmp_path / "err").read_text()


@pytest.mark.slow
def test_a_store_that_is_locked_delays_no_call_and_gets_the_calls_later(home: Path) -> None:
    Store.open(home).close()
    other = sqlite3.connect(home / "shotclock.db", isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with wrapped("--timeout", "5s") as client:
            for number in range(20):
                client.text("echo", text=str(number))
            # Longer than a batch: the first attempts to write find the store locked.
            client.receive(client.request("tools/call", {"name": "progress", "arguments": SLOW, "_meta": TOKEN}))
            other.execute("COMMIT")
    finally:
        other.close()
    assert len(listed("--tool", "echo")) == 20


SLOW = {"count": 1, "every": 1.5}
TOKEN = {"progressToken": "t"}


@pytest.mark.slow
def test_a_store_that_is_locked_for_twelve_seconds_loses_no_call_also_of_a_client_that_leaves_meanwhile(
    home: Path,
) -> None:
    Store.open(home).close()
    with held(home) as enough:
        began = time.monotonic()
        for name in ("one", "two"):
            with wrapped("--name", name) as client:
                for number in range(20):
                    client.text("echo", text=str(number))
        assert time.monotonic() - began < LONG_S, "no client waits for the store"
        with wrapped("--name", "three") as client:
            client.text("echo", text="while it is locked")
            enough.wait(LONG_S)
    calls = listed("--limit", "100")
    assert {name: sum(call["server"] == name for call in calls) for name in ("one", "two", "three")} == {
        "one": 20,
        "two": 20,
        "three": 1,
    }
    assert not list((home / "calls").iterdir()), "each file was added once"
    assert len(listed("--limit", "100")) == 41


def test_a_burst_of_calls_while_the_store_is_locked_is_kept_or_counted(home: Path) -> None:
    Store.open(home).close()
    log = CallLog("files")
    ended = EndedRequest("", "tools/call", "read", "ok", CallLimits(), 5, 100, 200, None, 1)
    with held(home):
        for _ in range(3 * MOST_WAITING):
            log.add(ended)
        note = log.close()
    found = re.match(r"(\d+) calls were not logged", note)
    dropped = 0 if found is None else int(found[1])
    assert len(listed("--limit", "10000")) == min(10_000, 3 * MOST_WAITING - dropped)


def test_calls_are_filtered_by_server_tool_outcome_and_time_and_sorted(home: Path) -> None:
    with Store.open(home) as store:
        store.calls.add(
            [
                logged(30, tool="read_file", outcome="TIMEOUT"),
                logged(10, tool="read_dir", server="other"),
                logged(20, tool="write_file", outcome="tool_error"),
                logged(40, tool="Read_file", outcome="ok"),
                logged(50, tool="ask", server="inbox", outcome="INCOMPLETE"),
            ],
            keep=0,
        )
        table: list[tuple[CallFilter, list[int]]] = [
            (CallFilter(), [50, 40, 20, 10, 30]),
            (CallFilter(server="other"), [10]),
            (CallFilter(tool="read_*"), [10, 30]),
            (CallFilter(tool="nothing"), []),
            (CallFilter(failed=True), [20, 30]),
            (CallFilter(timeouts=True), [30]),
            (CallFilter(since=NOW + 20), [50, 40, 20, 30]),
            (CallFilter(server="files", tool="*_file", failed=True, since=NOW + 25), [30]),
        ]
        for wanted, durations in table:
            with row(wanted):
                assert [call.duration_ms for call in store.calls.list(wanted, 10)] == durations
        assert [call.duration_ms for call in store.calls.list(CallFilter(), 2, slowest=True)] == [50, 40]


def test_old_calls_are_deleted_by_age_and_by_count(home: Path) -> None:
    with Store.open(home) as store:
        store.calls.add([logged(number) for number in range(3_000)], keep=2_900)
        assert len(store.calls.list(CallFilter(), 5_000)) == 2_900
        retention = Retention(calls_ms=DAY_MS, calls=2_500)
        assert prune(store, retention, NOW + 3_000, lambda holder: False, dry_run=True).calls == 400
        assert prune(store, retention, NOW + 3_000, lambda holder: False).calls == 400
        assert prune(store, retention, NOW + (DAY_MS + 2_990), lambda holder: False).calls == 2_490
        assert [call.duration_ms for call in store.calls.list(CallFilter(), 100)] == list(range(2_999, 2_989, -1))


def test_the_name_of_a_server_comes_from_its_command() -> None:
    table = {
        "npx -y @modelcontextprotocol/server-everything": "server-everything",
        "npx -y some-server@1.2.3 --port 1": "some-server",
        "uvx mcp-server-time --local-timezone=UTC": "mcp-server-time",
        "/usr/bin/python3.11 -m mcp_server_git": "mcp_server_git",
        "uv run tools/server.py": "server",
        "npx": "npx",
    }
    for command, name in table.items():
        with row(command):
            assert server_name(command.split()) == name


def test_the_table_fits_80_columns(home: Path) -> None:
    with Store.open(home) as store:
        long = logged(1, server="a-server-with-a-long-name", tool="a_tool_with_a_very_long_name_indeed")
        worst = {"outcome": "SERVICE_UNAVAILABLE", "request_bytes": 123_456, "answer_bytes": 99_999_999}
        store.calls.add([long, logged(3_723_000, **worst)], keep=0)
    argv = [sys.executable, "-m", "shotclock", "mcp", "log", "--format", "text"]
    ran = subprocess.run(argv, capture_output=True, timeout=RUN_WITHIN_S, env={**os.environ, "COLUMNS": "80"})
    lines = ran.stdout.decode().splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 80, lines
    assert "SERVICE_UNAVAILABLE" in lines[1] and "a_tool" in lines[2]
