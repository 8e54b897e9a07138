"""Open calls of wrapped servers: listed while they run, on the page as well, and never after their process is gone."""

import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.apps.web.routes import describe_calls
from shotclock.calls.principal import Role
from shotclock.core.limits import ProcessIdentity, WallTime
from shotclock.core.value_types import replace
from shotclock.store.store import Retention, Store, prune
from shotclock.store.wrapped_calls import CallFilter, CallsNow, OpenCall
from shotclock.supervise.kernel import this_process
from shotclock.wrap._call_log import MOST_WAITING, CallLog
from shotclock.wrap._limits import CallLimits
from shotclock.wrap._requests import EndedRequest, OpenRequest
from tests.apps.web.conftest import PHONE, browser, opened, shoot
from tests.apps.web.serving import Served, serving
from tests.wrap.client import wrapped

__all__ = ["browser", "opened"]  # fixtures

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

# A small program on a busy machine. Only a hang runs this out.
RUN_WITHIN_S = 30.0
SEEN_WITHIN_S = 20.0
LOOK_PAUSE_S = 0.05
NOW = WallTime(1_800_000_000_000)
DAY_MS = 24 * 3600 * 1000
GONE = ProcessIdentity("here", "boot", 7, 1, "ns")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def listed(*options: str) -> list[dict[str, Any]]:
    """The calls that `shotclock mcp log` lists, as JSON."""
    argv = [sys.executable, "-m", "shotclock", "mcp", "log", *options]
    envelope = json.loads(subprocess.run(argv, capture_output=True, timeout=RUN_WITHIN_S).stdout)
    assert envelope["ok"], envelope
    return envelope["data"]["calls"]


def wait_for_open(home: Path, is_it: Callable[[list[OpenCall]], bool]) -> list[OpenCall]:
    """The open calls in the store, once they are as wanted."""
    give_up_at = time.monotonic() + SEEN_WITHIN_S
    found: list[OpenCall] = []
    while time.monotonic() < give_up_at:
        if (home / "shotclock.db").exists():
            with Store.open(home) as store:
                found = list(store.calls.look(CallFilter(), 0, lambda holder: True).open)
            if is_it(found):
                return found
        time.sleep(LOOK_PAUSE_S)
    raise AssertionError(f"not in time; open are {found}")


def open_row(number: int, **changes: Any) -> OpenCall:
    fields: dict[str, Any] = {
        "holder": GONE,
        "number": number,
        "server": "files",
        "tool": "read",
        "started_at": NOW + number,
        "is_sent": True,
        "timeout_ms": 1_000,
        "idle_ms": 0,
        "due_at": NOW + 1_000,
        "due_by": "timeout",
        "request_bytes": 100,
        "arguments_sha256": None,
        "generation": 1,
    }
    return OpenCall(**{**fields, **changes})


@pytest.mark.slow
def test_a_call_that_lasts_is_listed_as_running_and_as_ended_when_it_has_ended(home: Path) -> None:
    with wrapped("--name", "files", "--timeout", "10m", "--idle", "5m") as client:
        client.text("echo", text="short")
        id = client.call("hang", a=1)
        wait_for_open(home, lambda calls: len(calls) == 1)
        [call] = listed("--running")
        assert (call["server"], call["tool"], call["outcome"]) == ("files", "hang", "running")
        assert (call["timeout_ms"], call["idle_ms"], call["pid"]) == (600_000, 300_000, client.process.pid)
        assert call["duration_ms"] >= 1_000 and call["due_by"] == "idle" and call["arguments_sha256"]
        assert [each["outcome"] for each in listed()] == ["running", "ok"]
        argv = [sys.executable, "-m", "shotclock", "mcp", "log", "--format", "text"]
        drawn = subprocess.run(argv, capture_output=True, timeout=RUN_WITHIN_S, env={**os.environ, "COLUMNS": "80"})
        assert b"idle in 4m" in drawn.stdout and max(map(len, drawn.stdout.splitlines())) <= 80
        assert listed("--running", "--server", "other") == [] == listed("--failed")
        client.send(method="notifications/cancelled", params={"requestId": id})
        wait_for_open(home, lambda calls: not calls)
        assert [each["outcome"] for each in listed()] == ["CANCELLED", "ok"]
    assert listed("--running") == []


@pytest.mark.slow
def test_the_next_limit_moves_with_the_progress_of_the_server(home: Path) -> None:
    with wrapped("--idle", "5m") as client:
        client.call("progress", meta={"progressToken": "t"}, count=4, every=1.5)
        [before] = wait_for_open(home, lambda calls: len(calls) == 1)
        assert before.due_at is not None
        due_ms = before.due_at.ms + 1_000
        wait_for_open(home, lambda calls: bool(calls and calls[0].due_at and calls[0].due_at.ms >= due_ms))


@pytest.mark.slow
def test_a_call_that_waits_for_its_server_is_not_called_running(home: Path, tmp_path: Path) -> None:
    server = [sys.executable, str(Path(__file__).with_name("scripted_server.py"))]
    with wrapped(server=[*server, "--started", str(tmp_path / "s"), "--delay-later", "20"]) as client:
        client.ask("crash")
        client.call("echo", text="held")
        wait_for_open(home, lambda calls: [call.is_sent for call in calls] == [False])
        assert [call["outcome"] for call in listed("--running")] == ["waiting"]


def test_a_call_of_a_killed_wrapper_is_lost_and_not_running(home: Path) -> None:
    with wrapped("--name", "files") as client:
        client.call("hang")
        wait_for_open(home, lambda calls: len(calls) == 1)
        os.kill(client.process.pid, signal.SIGKILL)
        client.process.wait(RUN_WITHIN_S)
        assert listed("--running") == []
        [call] = listed("--failed")
        assert (call["tool"], call["outcome"], call["duration_ms"], call["due_at"]) == ("hang", "lost", None, None)


def test_nothing_is_claimed_about_a_process_that_cannot_be_seen_from_here(home: Path) -> None:
    with Store.open(home) as store:
        store.calls.add([], 0, [open_row(1, holder=replace(this_process(), namespace="pid:[1]"))])
    assert [call["outcome"] for call in listed("--running")] == ["unknown"]


def test_calls_of_a_wrapper_that_ends_are_not_lost(home: Path) -> None:
    with wrapped() as client:
        client.call("hang")
        wait_for_open(home, lambda calls: len(calls) == 1)
    assert [call["outcome"] for call in listed()] == ["CONNECTION_LOST"]


def test_a_process_that_ends_between_two_looks_has_recorded_its_calls(home: Path) -> None:
    with Store.open(home) as store:
        store.calls.add([], 0, [open_row(1), open_row(2)])

        def ends_now(holder: ProcessIdentity) -> bool:
            store.calls.add([], 0, closed=[(holder, 1)])
            return False

        found = store.calls.look(CallFilter(), 10, ends_now)
        assert [call.number for call in found.lost] == [2] and found.open == ()


@pytest.mark.slow
def test_an_ended_call_does_not_stay_open_when_the_store_was_locked(home: Path) -> None:
    Store.open(home).close()
    other = sqlite3.connect(home / "shotclock.db", isolation_level=None)
    try:
        with wrapped("--timeout", "2s") as client:
            id = client.call("hang")
            wait_for_open(home, lambda calls: len(calls) == 1)
            other.execute("BEGIN IMMEDIATE")
            client.receive(id)
            client.text("echo", text="behind it")
            other.execute("COMMIT")
            wait_for_open(home, lambda calls: not calls)
    finally:
        other.close()
    assert [call["outcome"] for call in listed("--tool", "hang")] == ["TIMEOUT"]


def test_a_call_that_the_full_log_drops_does_not_stay_open(home: Path) -> None:
    Store.open(home).close()
    log = CallLog("files")
    log.record_open([OpenRequest(1, "read", time.monotonic_ns(), True, CallLimits(), None, None, 100, None, 1)])
    wait_for_open(home, lambda calls: len(calls) == 1)
    other = sqlite3.connect(home / "shotclock.db", isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        for number in (*[0] * MOST_WAITING, 1):
            log.add(EndedRequest("", "tools/call", "read", "ok", CallLimits(), 5, 100, 200, None, 1, number))
        other.execute("COMMIT")
    finally:
        other.close()
    wait_for_open(home, lambda calls: not calls)
    assert log.close().startswith("1 calls were not logged")


def test_lost_calls_are_pruned_and_open_ones_are_not(home: Path) -> None:
    alive = ProcessIdentity("here", "boot", 8, 1, "ns")
    with Store.open(home) as store:
        store.calls.add([], 0, [*map(open_row, range(1, 5)), open_row(1, holder=alive)])
        retention = Retention(calls_ms=DAY_MS, calls=3)
        later = NOW + 10
        assert prune(store, retention, later, lambda holder: holder == alive, dry_run=True).calls == 1
        assert prune(store, retention, later, lambda holder: holder == alive).calls == 1
        assert prune(store, retention, NOW + 2 * DAY_MS, lambda holder: holder == alive).calls == 3
        found = store.calls.look(CallFilter(), 10, lambda holder: holder == alive)
        assert [call.holder for call in found.open] == [alive] and found.lost == ()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as server:
        yield server


@pytest.mark.slow
def test_only_operators_see_the_calls_over_http(served: Served, home: Path) -> None:
    agent, operator = served.token("ann", Role.AGENT), served.token("eve", Role.OPERATOR)
    with wrapped("--name", "files", "--timeout", "500ms", "--tool", "ignore=timeout:10m") as client:
        client.ask("hang")
        client.call("ignore")
        wait_for_open(home, lambda calls: len(calls) == 1)
        refused = served.ask("GET", "/api/running", token=agent)
        assert (refused.status, refused.code) == (403, "NOT_ALLOWED")
        data = served.ask("GET", "/api/running", token=operator).data
        [call] = data["wrapped"]
        assert (call["server"], call["tool"], call["outcome"]) == ("files", "ignore", "running")
        assert call["more"] == "shotclock mcp log --running --server=files --tool=ignore"
        assert [(each["tool"], each["outcome"]) for each in data["failed"]] == [("hang", "TIMEOUT")]
        os.kill(client.process.pid, signal.SIGKILL)
        client.process.wait(RUN_WITHIN_S)
        data = served.ask("GET", "/api/running", token=operator).data
        assert data["wrapped"] == []
        assert {(each["tool"], each["outcome"]) for each in data["failed"]} == {("ignore", "lost"), ("hang", "TIMEOUT")}


def test_the_command_for_more_is_quoted_for_a_shell() -> None:
    found = CallsNow((open_row(1, tool="x'; rm *", server="-a $(id)"),), (), ())
    [call] = describe_calls(found, NOW)["wrapped"]
    words = shlex.split(call["more"])
    assert words == ["shotclock", "mcp", "log", "--running", "--server=-a $(id)", "--tool=x'; rm [*]"]


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "viewport"), [("light", None), ("dark", PHONE)])
def test_the_page_shows_a_call_while_it_runs_and_then_how_it_failed(
    served: Served, home: Path, opened: Any, theme: str, viewport: Any
) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    page = opened(served, theme=theme, **({"viewport": viewport} if viewport else {}))
    page.get_by_role("tab", name="Running").click()
    expect(page.locator("#detail")).to_contain_text("Nothing runs now")
    with wrapped("--name", "files", "--timeout", "10m") as client:
        assert "error" in client.receive(client.call("<b>odd</b>"))
        id = client.call("hang")
        row = page.locator("li.row", has_text="hang")
        expect(row).to_contain_text("files")
        expect(row.locator(".left-text")).to_contain_text("m")
        expect(page.locator("#running-count")).to_have_text("1")
        page.keyboard.press("j")
        detail = page.locator("#detail")
        expect(detail).to_contain_text("The server has this call.")
        expect(detail).to_contain_text("Its timeout is reached next")
        expect(detail).to_contain_text(str(client.process.pid))
        expect(detail).to_contain_text("shotclock mcp log --running --server=files --tool=hang")
        expect(detail.get_by_role("button").filter(has_not_text="Running")).to_have_count(0)  # it can only be looked at
        shoot(page, f"wrapped-{theme}")
        command = detail.get_by_role("region", name="Command that lists such calls").element_handle()
        before = detail.locator(".since").text_content()
        expect(detail.locator(".since")).not_to_have_text(str(before))
        assert command.evaluate("node => node.isConnected")  # drawn once, so that it can be selected and copied
        client.send(method="notifications/cancelled", params={"requestId": id})
        expect(detail).to_contain_text("It does not run any more")
        page.keyboard.press("n")
        expect(page.get_by_role("heading", name="Failed in the last hour")).to_be_visible()
        expect(page.locator("li.row", has_text="<b>odd</b>")).to_contain_text("error")
        failed = page.locator("li.row", has_text="cancelled")
        failed.click()
        expect(detail).to_contain_text("Cancelled by the client.")
        expect(detail).to_contain_text("shotclock mcp log --failed --server=files --tool=hang")
        shoot(page, f"wrapped-failed-{theme}")
