"""The actions of an execution on local pages in a real, headless Chromium."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shotclock.core.errors import Failure
from shotclock.ui import client
from shotclock.ui._browser import FLAGS, find_chromium

from .conftest import act, data_of
from .pages import Session, is_alive, needs_browser, pids_with, session_in

pytestmark = pytest.mark.slow

SNAP = {"id": "snap", "type": "snapshot_ui"}


def test_a_page_is_opened_read_typed_into_and_clicked(session: Session) -> None:
    told = session.run(
        session.open("/"),
        {"id": "before", "type": "read_text", "params": {"matcher": {"resourceId": "answer"}}},
        act("click", "buy", "Buy"),
        {"id": "after", "type": "read_text", "params": {"matcher": {"resourceId": "said"}}},
        {"id": "name", "type": "enter_text", "params": {"matcher": {"contentDescEquals": "Name"}, "text": "Ada"}},
        {"id": "more", "type": "enter_text", "params": {"matcher": {"css": "#name"}, "text": " L", "clear": False}},
        {"id": "typed", "type": "read_text", "params": {"matcher": {"css": "#name"}}},
        {"id": "price", "type": "read_key_value_pair", "params": {"labelMatcher": {"textEquals": "Price"}}},
        {"id": "colour", "type": "read_key_value_pair", "params": {"labelMatcher": {"textEquals": "Colour"}}},
        {"id": "items", "type": "read_text", "params": {"matcher": {"css": ".item"}, "all": True}},
    )
    assert told["ok"], told
    assert (data_of(told, "before")["text"], data_of(told, "after")["text"]) == ("nothing yet", "bought")
    assert "Ada" in data_of(told, "typed")["text"] and " L" in data_of(told, "typed")["text"]
    assert data_of(told, "price") == {"label": "Price", "value": "5 EUR"}
    assert data_of(told, "colour") == {"label": "Colour", "value": "red"}
    assert data_of(told, "items")["all"] == ["one", "two"]
    assert told["meta"]["side_effects"] == "complete" and told["data"]["page"]["state"] == "changed"


def test_a_snapshot_has_roles_names_states_and_refs_that_can_be_clicked(session: Session) -> None:
    text = data_of(session.run(session.open("/"), SNAP), "snap")["text"]
    assert 'button "Closed" [disabled]' in text and 'heading "Shop" [level=1]' in text
    line = next(line for line in text.splitlines() if 'button "Buy"' in line)
    ref = line.partition("[ref=")[2].partition("]")[0]
    told = session.run({"id": "c", "type": "click", "params": {"matcher": {"ref": ref}}}, SNAP)
    assert "bought" in data_of(told, "snap")["text"] and told["data"]["page"]["state"] == "same"
    told = session.run({"id": "c", "type": "click", "params": {"matcher": {"ref": "e9999"}}})
    assert told["error"]["code"] == "NODE_NOT_FOUND" and told["meta"]["side_effects"] == "none"
    short = session.run({**SNAP, "params": {"maxBytes": 60}})
    assert data_of(short, "snap")["truncated"] and len(data_of(short, "snap")["text"]) <= 60


MATCHERS: list[tuple[dict[str, str], list[str] | None]] = [
    ({"role": "button", "textEquals": "Buy"}, ["Buy"]),
    ({"role": "button", "textContains": "Lat"}, ["Later"]),
    ({"role": "link", "textEquals": "Buy"}, None),
    ({"role": "button", "textEquals": "Buy", "textContains": "Late"}, None),
    ({"resourceId": "answer", "textContains": "nothing"}, ["nothing yet"]),
    ({"resourceId": "answer", "textEquals": "nothing"}, None),
    ({"css": ".item", "textEquals": "two"}, ["two"]),
    ({"css": ".item"}, ["one", "two"]),
    ({"contentDescEquals": "Fixed"}, ["set"]),
    ({"contentDescContains": "Fix", "css": "#name"}, None),
    ({"textContains": "Detai"}, ["Details"]),
    ({"resourceId": 'quo"te\\'}, None),
]


def test_all_that_a_matcher_says_must_hold(session: Session) -> None:
    for matcher, texts in MATCHERS:
        read = {"id": "r", "type": "read_text", "params": {"matcher": matcher, "all": True, "timeoutMs": 400}}
        if texts is not None:
            read["params"]["timeoutMs"] = 5000  # type: ignore[index]
        told = session.run(session.open("/"), read)
        if texts is None:
            assert told["error"]["code"] == "WAIT_TIMEOUT", told
        else:
            assert data_of(told, "r")["all"] == texts


def test_a_ref_beside_another_criterion_has_to_be_that_node(session: Session) -> None:
    text = data_of(session.run(session.open("/"), SNAP), "snap")["text"]
    line = next(line for line in text.splitlines() if 'button "Buy"' in line)
    ref = line.partition("[ref=")[2].partition("]")[0]
    told = session.run({"id": "r", "type": "read_text", "params": {"matcher": {"ref": ref, "role": "button"}}})
    assert data_of(told, "r")["text"] == "Buy"
    told = session.run({"id": "r", "type": "read_text", "params": {"matcher": {"ref": ref, "role": "link"}}})
    assert told["error"]["code"] == "NODE_NOT_FOUND", told


def test_the_payloads_of_the_budget_table_run(session: Session) -> None:
    """As they are for a browser, which has addresses in place of packages."""
    told = session.run(SNAP, timeout_ms=30000)
    assert told["ok"] and told["data"]["stepResults"][0]["actionType"] == "snapshot_ui"
    nav = {"expectedUrl": f"{session.url}/details", "timeoutMs": 30000}
    told = session.run(
        session.open("/details"), {"id": "wait", "type": "wait_for_navigation", "params": nav}, timeout_ms=35000
    )
    assert told["ok"], told
    assert session.run(session.open("/"))["ok"]
    told = session.run(
        act("click", "click-1", "Later"),
        act("sleep", "sleep-1", durationMs=1500),
        act("wait_for_node", "wait-1", "Late", timeoutMs=10000),
        {"id": "snap-1", "type": "snapshot_ui"},
        timeout_ms=45000,
    )
    assert told["ok"] and "Late" in data_of(told, "snap-1")["text"], told
    assert [step["id"] for step in told["data"]["stepResults"]] == ["click-1", "sleep-1", "wait-1", "snap-1"]


def test_waits_end_as_soon_as_what_they_wait_for_is_there(session: Session) -> None:
    told = session.run(
        session.open("/"), act("click", "later", "Later"), act("wait_for_node", "w", "Late", timeoutMs=9000)
    )
    assert told["ok"] and told["data"]["durationMs"] < 9000, told
    told = session.run(act("wait_for_node", "w", "Never there", state="hidden", timeoutMs=9000))
    assert told["ok"] and told["data"]["durationMs"] < 9000, told


def test_a_wait_in_vain_has_waited_as_long_as_it_says(session: Session) -> None:
    for action in (
        act("wait_for_node", "x", "Nowhere", timeoutMs=600),
        act("wait_for_node", "x", "Buy", state="hidden", timeoutMs=600),
        act("click", "x", "Closed", timeoutMs=600),
        act("read_text", "x", "Nowhere", timeoutMs=600),
    ):
        assert session.run(session.open("/"))["ok"]
        error = session.run(action)["error"]
        assert error["code"] == "WAIT_TIMEOUT" and "within 600 ms" in error["message"], error
        assert error["context"]["clock"]["elapsed_ms"] >= 600, error


def test_what_cannot_be_done_says_why_and_leaves_the_page_as_it_was(session: Session) -> None:
    for action, code, said in (
        (act("wait_for_node", "x", "Nowhere", timeoutMs=400), "WAIT_TIMEOUT", "textEquals='Nowhere'"),
        (act("click", "x", "Closed", timeoutMs=2500), "WAIT_TIMEOUT", "not enabled"),
        (act("wait_for_navigation", "x", expectedUrl="*/other", timeoutMs=400), "WAIT_TIMEOUT", "the address is"),
        (act("wait_for_navigation", "x", expectedPackage="com.x", timeoutMs=400), "ACTION_UNSUPPORTED", "packages"),
        ({"id": "x", "type": "click", "params": {"matcher": {"css": "[["}}}, "ACTION_FAILED", "[["),
        (act("open_app", "x", applicationId="com.x"), "ACTION_UNSUPPORTED", "write https://com.x"),
        ({"id": "x", "type": "click", "params": {"matcher": {"ref": "f9e2"}}}, "NODE_NOT_FOUND", "has no ref 'f9e2'"),
        (act("open_uri", "x", uri="chrome://crash"), "ACTION_UNSUPPORTED", "chrome://crash"),
        (act("open_uri", "x", uri="http://127.0.0.1:9"), "ACTION_FAILED", "ERR_"),
        (act("open_uri", "x", uri="http://[bad"), "ACTION_FAILED", "invalid URL"),
        (act("take_screenshot", "x", path="/tmp/a\0b"), "ACTION_FAILED", "null byte"),
        (act("press_key", "x", key="recents"), "ACTION_UNSUPPORTED", "recents"),
    ):
        assert session.run(session.open("/"))["ok"]
        told = session.run(action)
        assert told["error"]["code"] == code and said in told["error"]["message"], told["error"]
        assert told["data"]["stepResults"][0]["success"] is False
        if "127.0.0.1:9" not in str(action):
            assert told["data"]["page"]["state"] == "same"
        if code != "ACTION_FAILED":
            assert told["meta"]["side_effects"] == "none"


def test_keys_scrolling_windows_and_going_back(session: Session) -> None:
    bottom = {"id": "u", "type": "scroll_until", "params": {"matcher": {"textEquals": "Bottom"}}}
    told = session.run(
        session.open("/"),
        {
            "id": "q",
            "type": "enter_text",
            "params": {"matcher": {"contentDescEquals": "Search"}, "text": "tea", "submit": True},
        },
        {"id": "s", "type": "scroll", "params": {"direction": "down"}},
        bottom,
        {"id": "s2", "type": "scroll", "params": {"direction": "up", "distanceRatio": 1}},
        act("click", "d", "Details"),
        act("wait_for_navigation", "n", expectedUrl="*/details", timeoutMs=5000),
        act("press_key", "back", key="back"),
        act("wait_for_node", "w", "Buy", timeoutMs=5000),
    )
    assert told["ok"], told
    assert data_of(told, "s") == {"moved": True} and "scrolls" in data_of(told, "u")
    told = session.run(
        act("click", "new", "New window"), act("wait_for_node", "w", "all of them", timeoutMs=5000), SNAP
    )
    assert told["ok"] and told["data"]["page"]["where"].endswith("/details"), told
    told = session.run({"id": "close", "type": "close_app"}, act("wait_for_node", "w", "Buy", timeoutMs=5000))
    assert told["ok"] and told["data"]["page"]["where"].endswith("/"), told


def test_a_screenshot_is_in_the_result_or_in_a_file(session: Session, tmp_path: Path) -> None:
    told = session.run(session.open("/"), {"id": "p", "type": "take_screenshot"})
    assert base64.b64decode(data_of(told, "p")["image"]).startswith(b"\x89PNG")
    path = tmp_path / "page.png"
    told = session.run({"id": "p", "type": "take_screenshot", "params": {"path": str(path)}})
    assert data_of(told, "p")["path"] == str(path) and path.read_bytes().startswith(b"\x89PNG")


def test_the_callers_deadline_ends_an_execution_before_its_own(session: Session) -> None:
    told = session.run(act("wait_for_node", "x", "Nowhere", timeoutMs=9000), remaining_ms=1000)
    assert told["elapsed_ms"] < 5000 and told["error"]["code"] in ("WAIT_TIMEOUT", "OPERATION_TIMEOUT"), told
    assert told["error"]["context"]["clock"]["owner"] == "caller"


def test_one_execution_at_a_time_and_the_other_is_told_who_has_it(session: Session) -> None:
    first: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: first.append(session.run(act("sleep", "s", durationMs=1500))))
    running.start()
    while (session.status() or {}).get("holder") is None:
        assert running.is_alive()
        time.sleep(0.01)
    told = session.run(SNAP)
    running.join(20)
    error = told["error"]
    assert (error["code"], told["meta"]["exit_code"]) == ("EXECUTION_CONFLICT_IN_FLIGHT", 4)
    holder = error["context"]["holder"]
    assert holder["pid"] == os.getpid() and 0 <= holder["ageMs"] < 10_000 and error["retry_after_ms"] <= 15000
    assert told["meta"]["ending"] == "not_started" and first[0]["ok"]
    assert session.run(SNAP)["ok"]


def test_stopping_a_device_in_the_middle_tells_who_waits(tmp_path: Path) -> None:
    with session_in(tmp_path / "home") as session:
        assert session.run(session.open("/"))["ok"]  # what its start takes would leave no time for the sleep
        told: list[dict[str, Any]] = []
        begun = tmp_path / "begun.png"
        take = {"id": "p", "type": "take_screenshot", "params": {"path": str(begun)}}
        actions = [take, act("sleep", "s", durationMs=12000)]
        running = threading.Thread(target=lambda: told.append(session.run(*actions)))
        running.start()
        give_up_at = time.monotonic() + 40
        while not begun.exists():  # that somebody has the device does not say that the execution has begun
            assert time.monotonic() < give_up_at and running.is_alive()
            time.sleep(0.02)
        session.stop()
        running.join(20)
        assert told[0]["error"]["code"] == "CANCELLED" and told[0]["meta"]["ending"] == "cancelled", told
        assert told[0]["data"]["position"]["total"] == 2 and session.status() is None
        assert session.run(SNAP)["ok"]  # whoever comes behind it gets another device, and no word of the old one


def kill_once_it_has_the_device(caller: subprocess.Popen[bytes], session: Session, within_s: float) -> None:
    try:
        give_up_at = time.monotonic() + within_s
        while (session.status() or {}).get("holder") is None:
            assert time.monotonic() < give_up_at and caller.poll() is None
            time.sleep(0.02)
    finally:
        caller.kill()
        caller.wait(5)


def test_a_caller_that_leaves_stops_its_execution(session: Session) -> None:
    program = "import sys; from tests.ui.pages import Session; from pathlib import Path\n"
    program += "Session(Path(sys.argv[1]), '').run({'id': 's', 'type': 'sleep', 'params': {'durationMs': 14000}})"
    caller = subprocess.Popen([sys.executable, "-c", program, str(session.home)], cwd=Path(__file__).parents[2])
    kill_once_it_has_the_device(caller, session, 20)
    give_up_at = time.monotonic() + 8
    while not (told := session.run(SNAP))["ok"]:
        assert told["error"]["code"] == "EXECUTION_CONFLICT_IN_FLIGHT" and time.monotonic() < give_up_at, told
        time.sleep(0.05)


def test_a_caller_that_leaves_while_the_device_is_started_keeps_nobody_out_and_has_done_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_browser()
    go, slow = tmp_path / "go", tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\nwhile [ ! -e {go} ]; do sleep 0.1; done\nexec {find_chromium()} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("SHOTCLOCK_CHROMIUM", str(slow))
    program = "import sys; from tests.ui.pages import Session; from pathlib import Path\n"
    program += "session = Session(Path(sys.argv[1]), sys.argv[2]); session.run(session.open('/details'))"
    with session_in(tmp_path / "home") as session:
        words = [sys.executable, "-c", program, str(session.home), session.url]
        caller = subprocess.Popen(words, cwd=Path(__file__).parents[2])
        kill_once_it_has_the_device(caller, session, 40)
        give_up_at = time.monotonic() + 10
        while (status := session.status()) is None or status["holder"] is not None:
            assert time.monotonic() < give_up_at, "it is held for a caller that is gone"
            time.sleep(0.02)
        assert not status["open"]
        go.touch()
        told = session.run(SNAP)
        assert told["ok"] and "Details" not in json.dumps(told["data"]), told


def test_kill_9_of_the_daemon_in_the_middle_takes_the_browser_along_and_the_next_command_works(tmp_path: Path) -> None:
    with session_in(tmp_path / "home") as session:
        assert session.run(session.open("/"))["ok"]
        status, below = session.status(), session.processes("chrom")
        assert status is not None and below
        told: list[dict[str, Any]] = []
        running = threading.Thread(target=lambda: told.append(session.run(SNAP, act("sleep", "s", durationMs=9000))))
        running.start()
        while (session.status() or {}).get("holder") is None:
            time.sleep(0.01)
        os.kill(status["pid"], signal.SIGKILL)
        running.join(20)
        assert told[0]["error"]["code"] == "DEVICE_LOST" and told[0]["elapsed_ms"] < 9000, told
        assert not any(is_alive(pid) for pid in below)
        old = (session.home / "ui" / "browser.tmp").read_text()
        assert session.run(session.open("/"))["ok"]
        assert not Path(old).exists()
        last = session.status()
        assert last is not None and last["pid"] != status["pid"]
        scratch, below = (session.home / "ui" / "browser.tmp").read_text(), session.processes("chrom")
        session.stop()
        assert not is_alive(last["pid"]) and not any(is_alive(pid) for pid in below) and not Path(scratch).exists()


def test_a_frozen_daemon_is_killed_with_its_browser_and_the_next_execution_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RESULT_MARGIN_MS", 2500)  # the five seconds

    def freeze(session: Session, *, all_of_it: bool) -> list[int]:
        assert session.run(session.open("/"), timeout_ms=9000)["ok"]
        daemon = psutil.Process((session.status() or {})["pid"])
        pids = [daemon.pid, *(process.pid for process in daemon.children(recursive=True))]
        assert len(pids) > 4
        for pid in pids if all_of_it else pids[:1]:
            os.kill(pid, signal.SIGSTOP)
        return pids

    with session_in(tmp_path / "home") as session:
        frozen = freeze(session, all_of_it=True)
        with pytest.raises(Failure, match="no result of status"):
            session.status()
        assert is_alive(frozen[0], 0.1)  # who only looks kills nothing
        told = session.run(SNAP, timeout_ms=1000)
        assert told["error"]["code"] == "RESULT_ENVELOPE_TIMEOUT" and told["elapsed_ms"] < 6000, told
        assert not any(is_alive(pid, 0.1) for pid in frozen)
        frozen = freeze(session, all_of_it=False)  # the next execution works
        scratch = (session.home / "ui" / "browser.tmp").read_text()
        session.stop()
        assert not any(is_alive(pid, 0.1) for pid in frozen) and not Path(scratch).exists()
        assert session.status() is None


def test_a_stopped_browser_is_answered_in_time_killed_and_replaced(tmp_path: Path) -> None:
    with session_in(tmp_path / "home") as session:
        assert session.run(session.open("/"))["ok"]
        stopped = session.processes("--remote-debugging-pipe")
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        told = session.run(SNAP, timeout_ms=1000)
        assert told["elapsed_ms"] <= 6000 and told["error"]["code"] in ("EVAL_TIMEOUT", "OPERATION_TIMEOUT"), told
        assert told["data"]["page"] == {"state": "unresponsive", "where": f"{session.url}/", "next": "none"}
        told = session.run(session.open("/"), SNAP)
        assert told["ok"] and not any(is_alive(pid) for pid in stopped), told


def test_a_stopped_process_of_the_device_is_answered_in_time_killed_and_replaced(tmp_path: Path) -> None:
    with session_in(tmp_path / "home") as session:
        assert session.run(session.open("/"))["ok"]
        status, picture = session.status(), tmp_path / "picture.png"
        assert status is not None
        below = psutil.Process(status["pid"]).children(recursive=True)
        (host,) = [process.pid for process in below if process.name() == "shotclock-host"]

        def stop_soon() -> None:
            while not picture.exists():
                time.sleep(0.005)
            os.kill(host, signal.SIGSTOP)

        thread = threading.Thread(target=stop_soon)
        thread.start()
        take = {"id": "p", "type": "take_screenshot", "params": {"path": str(picture)}}
        told = session.run(take, act("sleep", "s", durationMs=1200), timeout_ms=2000)
        thread.join(10)
        assert told["elapsed_ms"] >= 6900 and told["error"]["code"] == "RESULT_ENVELOPE_TIMEOUT", told
        assert told["error"]["context"]["events"] and told["error"]["context"]["clock"]["limit_ms"] == 6800
        assert told["data"]["position"]["total"] == 2 and told["data"]["page"]["next"] == "none"
        told = session.run(session.open("/"), SNAP)
        assert told["ok"] and not is_alive(host), told


def test_many_who_start_a_device_at_once_share_one(tmp_path: Path) -> None:
    with session_in(tmp_path / "home") as session:
        told: list[dict[str, Any]] = []
        callers = [threading.Thread(target=lambda: told.append(session.run(SNAP))) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
        codes = sorted("" if each["ok"] else each["error"]["code"] for each in told)
        assert codes[0] == "" and set(codes) <= {"", "EXECUTION_CONFLICT_IN_FLIGHT"}, told
        give_up_at = time.monotonic() + 5
        while len(daemons := [pid for pid in pids_with("shotclock.ui.daemon", str(session.home))]) > 1:
            assert time.monotonic() < give_up_at, daemons  # those that came too late leave
            time.sleep(0.02)
        assert len(daemons) == 1


def test_an_idle_daemon_ends_and_leaves_nothing(tmp_path: Path) -> None:
    with session_in(tmp_path / "home") as session:
        client.start_daemon(session.device, idle_ms=300).close()
        status = session.status()
        assert status is not None and not is_alive(status["pid"], within_s=15)
        assert session.status() is None
        assert {path.suffix for path in (session.home / "ui").iterdir()} <= {".lock", ".log"}


def test_a_chromium_app_is_attached_to_and_left_running(tmp_path: Path) -> None:
    with session_in(tmp_path / "home") as own:
        chromium = find_chromium()
        assert chromium is not None
        profile = tmp_path / "profile"
        words = [chromium, "--headless", "--no-sandbox", *FLAGS, f"--user-data-dir={profile}"]
        words += ["--remote-debugging-port=0", f"{own.url}/details"]
        with open(tmp_path / "err", "wb") as err:
            app = subprocess.Popen(words, stdout=err, stderr=err, start_new_session=True)
        try:
            port = profile / "DevToolsActivePort"
            give_up_at = time.monotonic() + 30
            while not port.exists() or not port.read_text():
                assert time.monotonic() < give_up_at and app.poll() is None
                time.sleep(0.02)
            session = Session(own.home, own.url, f"cdp:http://127.0.0.1:{port.read_text().split()[0]}")
            told = session.run(act("wait_for_node", "w", "all of them", timeoutMs=9000), SNAP)
            assert told["ok"] and told["data"]["page"]["where"].endswith("/details"), told
            session.stop()
            assert app.poll() is None
        finally:
            os.killpg(app.pid, signal.SIGKILL)
            app.wait(5)


def test_a_device_that_is_not_there_is_told_and_no_daemon_is_started_for_a_wrong_payload(tmp_path: Path) -> None:
    with session_in(tmp_path / "home") as session:
        told = session.send({"commandId": "x"})
        assert told["error"]["code"] == "EXECUTION_VALIDATION_FAILED" and session.status() is None
        gone = Session(session.home, session.url, "cdp:http://127.0.0.1:9")
        told = gone.run(SNAP)
        assert told["error"]["code"] == "DEVICE_UNAVAILABLE" and told["meta"]["exit_code"] == 12, told
        gone.stop()
        nobody = Session(session.home, session.url, "toaster")
        assert nobody.run(SNAP)["error"]["code"] == "DEVICE_UNAVAILABLE"
        nobody.stop()
