"""Phones over the real adb client, against a scripted one that speaks adb's protocol: what works, and what becomes of
one that hangs, talks nonsense or goes away."""

import asyncio
import base64
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.runtime import Runtime
from shotclock.core.errors import Failure
from shotclock.ui import client
from shotclock.ui._adb import server_address
from shotclock.ui._android import open_device
from shotclock.ui.daemon import RuntimeServices, find_all_devices
from tests.rows import row

from .conftest import act, data_of
from .pages import Session, is_alive, kill
from .scripted_phone import (
    DETAILS,
    PNG,
    ScriptedPhone,
    adb_processes,
    drip,
    drop,
    end_server,
    free_port,
    garbage,
    hang,
    node,
    phone_session,
    private_adb,
    speak_nonsense,
    window,
)

pytestmark = pytest.mark.slow

SNAP = {"id": "snap", "type": "snapshot_ui"}
TIMES = 2
BUDGET_MS = 1000


@pytest.fixture(scope="module")
def adb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with private_adb(tmp_path_factory.mktemp("adb")) as port:
        yield port


@pytest.fixture(scope="module")
def kept(adb: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedPhone, Session]]:
    folder = tmp_path_factory.mktemp("phone")
    phone = ScriptedPhone(folder / "phone")
    try:
        with phone_session(folder / "home", phone) as session:
            yield phone, session
    finally:
        phone.close()


@pytest.fixture
def phone(kept: tuple[ScriptedPhone, Session]) -> ScriptedPhone:
    kept[0].reset()
    return kept[0]


@pytest.fixture
def session(kept: tuple[ScriptedPhone, Session], phone: ScriptedPhone) -> Session:
    return kept[1]


@pytest.fixture
def other_phone(adb: int, tmp_path: Path) -> Iterator[ScriptedPhone]:
    phone = ScriptedPhone(tmp_path / "phone")
    try:
        yield phone
    finally:
        phone.close()


def ok(envelope: dict[str, Any], action_id: str) -> dict[str, Any]:
    assert envelope["ok"], envelope
    return data_of(envelope, action_id)


# --- the payloads of the budget table -------------------------------------------------------------------------


def test_a_simple_snapshot_runs(session: Session) -> None:
    data = ok(session.run(SNAP, timeout_ms=30000), "snap")
    assert data["where"] == "com.shop/.MainActivity"
    refs = re.findall(r" \[ref=(e\d+)\]", data["text"])
    assert len(set(refs)) == 8
    assert re.sub(r" \[ref=e\d+\]", "", data["text"]).splitlines() == [
        '- text "Shop"',
        '- button "Buy" [id=buy]',
        '- button "Closed" [disabled]',
        '- textbox "Name" [id=name]: "old"',
        '- text "Price"',
        '- text "5 EUR"',
        '- checkbox "Gift" [checked]',
        '- img "Basket" [clickable]',
    ]
    again = ok(session.run(SNAP), "snap")["text"]
    assert again == data["text"], "what is there still has the ref that it had"


def test_a_navigation_is_waited_for(phone: ScriptedPhone, session: Session) -> None:
    phone.when("monkey", DETAILS, "com.details/.Start", "ffff")
    told = session.run(
        {"id": "open", "type": "open_app", "params": {"applicationId": "com.details"}},
        {
            "id": "nav",
            "type": "wait_for_navigation",
            "params": {
                "expectedPackage": "com.details",
                "expectedNode": {"textEquals": "Details"},
                "timeoutMs": 30000,
            },
        },
        timeout_ms=35000,
    )
    assert ok(told, "nav") == {"where": "com.details/.Start"}
    assert told["data"]["page"] == {"state": "changed", "where": "com.details/.Start", "next": "same"}


def test_click_sleep_wait_and_snapshot_run_in_their_budgets(phone: ScriptedPhone, session: Session) -> None:
    phone.when("tap", DETAILS)
    told = session.run(
        act("click", "click", "Buy"),
        {"id": "sleep", "type": "sleep", "params": {"durationMs": 1500}},
        act("wait_for_node", "wait", "Details", timeoutMs=10000),
        SNAP,
        timeout_ms=45000,
    )
    assert ok(told, "snap")["text"].startswith('- text "Details" [ref=')
    assert phone.log == ["[input][tap][140][250]"]
    assert told["meta"]["side_effects"] == "complete"


# --- what a phone can do --------------------------------------------------------------------------------------


def test_a_ref_of_the_last_snapshot_is_clicked_and_means_nothing_else(phone: ScriptedPhone, session: Session) -> None:
    lines = ok(session.run(SNAP), "snap")["text"].splitlines()
    ref = next(line for line in lines if "Basket" in line).partition("[ref=")[2].rstrip("]")
    click = {"id": "c", "type": "click", "params": {"matcher": {"ref": ref}, "timeoutMs": 400}}
    assert ok(session.run(click), "c") == {"x": 140, "y": 760}
    phone.show(DETAILS)  # nothing there is what the ref was given to
    told = session.run(click)
    assert told["error"]["code"] == "WAIT_TIMEOUT" and len(phone.log) == 1
    assert told["meta"]["side_effects"] == "none"


def test_nodes_are_found_by_what_they_are(session: Session) -> None:
    for matcher, point in (
        ({"resourceId": "com.shop:id/buy"}, (140, 250)),
        ({"role": "button", "textContains": "bu"}, (140, 250)),
        ({"contentDescEquals": "Basket"}, (140, 760)),
        ({"role": "checkbox"}, (140, 660)),
    ):
        told = session.run({"id": "c", "type": "click", "params": {"matcher": matcher}})
        assert ok(told, "c") == {"x": point[0], "y": point[1]}, matcher


def test_long_clicks_points_and_text_fields_are_touched(phone: ScriptedPhone, session: Session) -> None:
    told = session.run(
        act("click", "long", "Buy", clickType="long_click"),
        {"id": "at", "type": "click", "params": {"coordinate": {"x": 5, "y": 6.4}}},
        {"id": "focus", "type": "click", "params": {"matcher": {"role": "textbox"}, "clickType": "focus"}},
    )
    assert told["ok"], told
    swipe = "[input][swipe][140][250][140][250][700]"
    assert phone.log == [swipe, "[input][tap][5][6]", "[input][tap][540][470]"]


def test_what_is_disabled_is_not_clicked(phone: ScriptedPhone, session: Session) -> None:
    told = session.run(act("click", "c", "Closed", timeoutMs=500))
    assert told["error"]["code"] == "WAIT_TIMEOUT" and "disabled" in told["error"]["message"]
    assert phone.log == [] and told["meta"]["side_effects"] == "none"


def test_text_reaches_the_phone_as_it_was_written(phone: ScriptedPhone, session: Session) -> None:
    field = {"resourceId": "name"}
    for text, typed in (
        ("two words", ["two%swords"]),
        ('it\'s "$HOME" `id` \\ & ; | <a> * ~ # !', ['it\'s%s"$HOME"%s`id`%s\\%s&%s;%s|%s<a>%s*%s~%s#%s!']),
        ("100%sure", ["100%", "sure"]),
        ("-5", ["-5"]),
    ):
        phone.reset()
        told = session.run(
            {"id": "t", "type": "enter_text", "params": {"matcher": field, "text": text, "submit": True}}
        )
        assert ok(told, "t") == {"length": len(text)}
        cleared = "[input][keyevent]" + "[67]" * 3 + "[112]" * 3
        said = [f"[input][text][{each}]" for each in typed]
        assert phone.log == ["[input][tap][540][470]", cleared, *said, "[input][keyevent][66]"], text


def test_text_that_input_cannot_type_is_refused_before_anything_is_typed(
    phone: ScriptedPhone, session: Session
) -> None:
    for text in ("grün", "a\nb"):
        params = {"matcher": {"role": "textbox"}, "text": text}
        told = session.run({"id": "t", "type": "enter_text", "params": params}, timeout_ms=5000)
        assert told["error"]["code"] == "ACTION_UNSUPPORTED" and "printable ASCII" in told["error"]["message"]
        assert phone.log == [] and told["meta"]["side_effects"] == "none"


def test_keys_are_pressed(phone: ScriptedPhone, session: Session) -> None:
    for key, done in (
        ("back", "[input][keyevent][4]"),
        ("Q", "[input][text][Q]"),
        ("ctrl+a", "[input][keycombination][113][29]"),
    ):
        phone.reset()
        assert session.run({"id": "k", "type": "press_key", "params": {"key": key}})["ok"]
        assert phone.log == [done]


def test_apps_and_addresses_are_opened_and_closed(phone: ScriptedPhone, session: Session) -> None:
    phone.when("am", DETAILS, "com.browser/.Tab")
    told = session.run(
        {"id": "uri", "type": "open_uri", "params": {"uri": "https://x.test/?a=1&b='2' $(id)"}},
        {"id": "close", "type": "close_app", "params": {}},
    )
    assert ok(told, "uri") == {"where": "com.browser/.Tab"}
    assert ok(told, "close") == {"applicationId": "com.browser"}
    view = "[am][start][-W][-a][android.intent.action.VIEW][-d][https://x.test/?a=1&b='2' $(id)]"
    assert phone.log == [view, "[am][force-stop][com.browser]"]


def test_what_a_phone_refuses_or_cannot_do_is_said(session: Session) -> None:
    for action, code in (
        ({"type": "open_app", "params": {"applicationId": "com.nothing"}}, "ACTION_FAILED"),
        ({"type": "open_uri", "params": {"uri": "nowhere:1"}}, "ACTION_FAILED"),
        ({"type": "open_app", "params": {"applicationId": "a; reboot"}}, "ACTION_UNSUPPORTED"),
        ({"type": "click", "params": {"matcher": {"css": "b"}}}, "ACTION_UNSUPPORTED"),
        ({"type": "click", "params": {"matcher": {"textEquals": "Buy"}, "clickType": "focus"}}, "ACTION_UNSUPPORTED"),
        ({"type": "enter_text", "params": {"matcher": {"textEquals": "Shop"}, "text": "x"}}, "ACTION_FAILED"),
        ({"type": "wait_for_navigation", "params": {"expectedUrl": "x", "timeoutMs": 500}}, "ACTION_UNSUPPORTED"),
        ({"type": "read_key_value_pair", "params": {"labelMatcher": {"textEquals": "Shop"}}}, None),
    ):
        told = session.run({"id": "x", **action}, timeout_ms=5000)
        assert (told["error"] or {}).get("code") == code, told


def test_an_execution_with_an_action_that_no_phone_has_is_refused_before_anything_is_sent(
    phone: ScriptedPhone, session: Session
) -> None:
    node = {"textEquals": "Buy"}
    for action_type, params in (
        ("hover", {"matcher": node}),
        ("select_option", {"matcher": node, "options": ["a"]}),
        ("upload_file", {"matcher": node, "paths": ["/a"]}),
        ("list_tabs", {}),
        ("open_tab", {}),
        ("switch_tab", {"tab": "t1"}),
        ("close_tab", {}),
        ("answer_dialog", {"accept": True}),
    ):
        told = session.run(act("click", "c", "Buy"), {"id": "x", "type": action_type, "params": params})
        assert told["error"]["code"] == "ACTION_UNSUPPORTED" and "nothing was sent" in told["error"]["message"], told
        assert told["error"]["context"]["path"] == "actions.1.type" and phone.log == []


def test_a_snapshot_of_one_node_has_what_is_in_it(session: Session) -> None:
    told = session.run({**SNAP, "params": {"matcher": {"textEquals": "Buy"}}})
    assert ok(told, "snap")["text"].startswith('- button "Buy"') and "Shop" not in ok(told, "snap")["text"]


def test_input_that_android_refuses_is_told_in_its_words(phone: ScriptedPhone, session: Session) -> None:
    (phone.folder / "refuses").write_text("java.lang.SecurityException: Injecting to another application\n")
    told = session.run(act("click", "c", "Buy"))
    assert told["error"]["code"] == "ACTION_FAILED" and "SecurityException" in told["error"]["message"]
    assert told["meta"]["side_effects"] == "unknown"


def test_texts_and_values_are_read(session: Session) -> None:
    told = session.run(
        act("read_text", "one", "Shop"),
        {"id": "all", "type": "read_text", "params": {"matcher": {"role": "text"}, "all": True}},
        {"id": "pair", "type": "read_key_value_pair", "params": {"labelMatcher": {"textEquals": "Price"}}},
    )
    assert ok(told, "one") == {"text": "Shop"}
    assert ok(told, "all")["all"] == ["Shop", "Price", "5 EUR"]
    assert ok(told, "pair") == {"label": "Price", "value": "5 EUR"}


def test_a_scroll_says_whether_anything_moved(phone: ScriptedPhone, session: Session) -> None:
    assert ok(session.run({"id": "s", "type": "scroll"}), "s") == {"moved": False}
    phone.when("swipe", window(node("TextView", "Bottom")))
    until = {"id": "u", "type": "scroll_until", "params": {"matcher": {"textEquals": "Bottom"}}}
    assert ok(session.run(until), "u") == {"scrolls": 1}
    assert phone.log[0] == "[input][swipe][540][1560][540][440][400]"


def test_a_screenshot_is_the_whole_image(phone: ScriptedPhone, session: Session, tmp_path: Path) -> None:
    (phone.folder / "warning").write_text("[Warning] Multiple displays were found\n")
    path = tmp_path / "screen.png"
    told = session.run({"id": "s", "type": "take_screenshot"}, {"id": "f", "type": "take_screenshot", "params": {
        "path": str(path)}})  # fmt: skip
    assert base64.b64decode(ok(told, "s")["image"]) == PNG and path.read_bytes() == PNG


def test_a_node_that_goes_away_is_waited_for(phone: ScriptedPhone, session: Session) -> None:
    gone = act("wait_for_node", "w", "Buy", state="hidden", timeoutMs=400)
    assert session.run(gone)["error"]["code"] == "WAIT_TIMEOUT"
    phone.show(DETAILS)
    assert session.run(gone)["ok"]


def test_a_phone_without_exit_codes_works_as_well(adb: int, tmp_path: Path) -> None:
    phone = ScriptedPhone(tmp_path / "phone", features="cmd")
    try:
        with phone_session(tmp_path / "home", phone) as session:
            assert "Shop" in ok(session.run(SNAP), "snap")["text"]
            told = session.run({"id": "x", "type": "open_app", "params": {"applicationId": "com.nothing"}})
            assert told["error"]["code"] == "ACTION_FAILED"
    finally:
        phone.close()


# --- phones that hang, talk nonsense and go away --------------------------------------------------------------

LOOK = {"id": "snap", "type": "snapshot_ui", "params": {"timeoutMs": 600}}
WAIT = act("wait_for_node", "w", "Never", timeoutMs=600)
TAP = act("click", "c", "Buy", timeoutMs=600)
SHOT = {"id": "s", "type": "take_screenshot", "params": {"timeoutMs": 600}}
CASES = [
    ("uiautomator", hang, LOOK, {"EVAL_TIMEOUT"}),
    ("uiautomator", hang, WAIT, {"EVAL_TIMEOUT", "WAIT_TIMEOUT"}),
    ("uiautomator", drip, WAIT, {"EVAL_TIMEOUT", "WAIT_TIMEOUT"}),
    ("uiautomator", garbage, WAIT, {"EVAL_TIMEOUT"}),
    ("uiautomator", drop, SNAP, {"DEVICE_LOST"}),
    ("uiautomator", speak_nonsense, WAIT, {"DEVICE_LOST", "EVAL_TIMEOUT", "WAIT_TIMEOUT"}),
    ("input", hang, TAP, {"OPERATION_TIMEOUT"}),
    ("input", garbage, TAP, {"ACTION_FAILED"}),
    ("input", drop, TAP, {"DEVICE_LOST"}),
    ("screencap", garbage, SHOT, {"ACTION_FAILED"}),
    ("screencap", drop, SHOT, {"DEVICE_LOST"}),
    ("", hang, LOOK, {"EVAL_TIMEOUT", "OPERATION_TIMEOUT"}),
]


def wait_for_clients_gone(port: int) -> None:
    """Only the server is left: what was asked of a phone that hangs is not asked any more."""
    give_up_at = time.monotonic() + 2
    while len(left := adb_processes(port)) > 1:
        assert time.monotonic() < give_up_at, left
        time.sleep(0.02)


def test_a_phone_that_misbehaves_is_answered_in_time_and_the_next_execution_works(
    adb: int, phone: ScriptedPhone, session: Session
) -> None:
    for sign, misbehave, action, codes in CASES:
        with row(sign, misbehave.__name__, action["type"]):
            phone.misbehaves = {sign: misbehave}
            told = session.run(action, timeout_ms=BUDGET_MS)
            assert told["elapsed_ms"] <= BUDGET_MS + 5000, told
            assert told["error"]["code"] in codes, told
            wait_for_clients_gone(adb)
            phone.misbehaves = {}
            told = session.run(act("read_text", "read", "Shop"))
            assert ok(told, "read") == {"text": "Shop"}


def test_a_phone_that_vanished_is_told_and_used_again_once_it_is_back(
    other_phone: ScriptedPhone, tmp_path: Path
) -> None:
    with phone_session(tmp_path / "home", other_phone) as session:
        for _ in range(TIMES):
            assert session.run(SNAP)["ok"]
            other_phone.vanish()
            told = session.run(SNAP, timeout_ms=BUDGET_MS)
            assert told["error"]["code"] == "DEVICE_LOST" and told["elapsed_ms"] <= BUDGET_MS + 5000, told
            assert told["data"]["page"] == {"state": "lost", "where": told["data"]["page"]["where"], "next": "none"}
            told = session.run(SNAP, timeout_ms=BUDGET_MS)
            assert told["error"]["code"] in ("DEVICE_UNAVAILABLE", "DEVICE_LOST"), told
            other_phone.listen()


def test_a_screen_that_is_off_is_told_in_words(phone: ScriptedPhone, session: Session) -> None:
    (phone.folder / "said").write_text("ERROR: null root node returned by UiTestAutomationBridge.\n")
    told = session.run({"id": "snap", "type": "snapshot_ui", "params": {"timeoutMs": 700}})
    assert told["error"]["code"] == "EVAL_TIMEOUT" and "screen off" in told["error"]["message"]
    assert told["data"]["page"]["state"] == "same"


# --- phones that cannot be used -------------------------------------------------------------------------------


def refused(device: str) -> str:
    """What is said of a device that cannot be opened."""

    async def open_it() -> None:
        async with Runtime() as runtime:
            await open_device(device, RuntimeServices(runtime))

    with pytest.raises(Failure) as raised:
        asyncio.run(open_it())
    assert raised.value.code == "DEVICE_UNAVAILABLE"
    return str(raised.value)


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("own_store")
def test_a_phone_that_wants_to_be_asked_is_said_with_what_to_do(other_phone: ScriptedPhone, tmp_path: Path) -> None:
    other_phone.greeting = "authorize"
    said = refused(f"android:{other_phone.serial}")
    assert "allow USB debugging" in said


@pytest.mark.usefixtures("own_store")
def test_a_phone_that_says_nothing_is_said(other_phone: ScriptedPhone, tmp_path: Path) -> None:
    other_phone.greeting = "silence"
    assert other_phone.serial in refused(f"android:{other_phone.serial}")


def test_several_phones_have_to_be_told_apart_and_one_is_kept_once(
    phone: ScriptedPhone, session: Session, other_phone: ScriptedPhone, tmp_path: Path
) -> None:
    assert session.run(SNAP)["ok"]
    with phone_session(tmp_path / "home", other_phone) as other:
        assert other.run(SNAP)["ok"]
        said = refused("android")
        assert f"android:{phone.serial}" in said and f"android:{other_phone.serial}" in said
        found = {entry.name: entry for entry in asyncio.run(find_all_devices()) if entry.name.startswith("android")}
        assert found[f"android:{phone.serial}"].usable and found[f"android:{phone.serial}"].detail == "Scripted One"
        os.environ["ANDROID_SERIAL"] = other_phone.serial
        try:
            assert "under another name" in refused("android")
        finally:
            del os.environ["ANDROID_SERIAL"]


# --- adb itself -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_store")
def test_without_adb_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOTCLOCK_ADB", str(tmp_path / "none"))
    assert "apt install adb" in refused("android")
    [entry] = [each for each in asyncio.run(find_all_devices()) if each.name == "android"]
    assert not entry.usable and "apt install adb" in entry.detail


def test_looking_for_phones_leaves_no_server(tmp_path: Path) -> None:
    with private_adb(tmp_path / "adb") as port:
        [entry] = [each for each in asyncio.run(find_all_devices()) if each.name == "android"]
        assert not entry.usable and "USB debugging" in entry.detail
        assert adb_processes(port) == []


@pytest.mark.usefixtures("own_store")
def test_a_session_that_finds_no_phone_leaves_no_server(tmp_path: Path) -> None:
    with private_adb(tmp_path / "adb") as port:
        assert "USB debugging" in refused("android")
        assert "there is no phone 'R58M123'" in refused("android:R58M123")
        assert "Connection refused" in refused(f"android:127.0.0.1:{free_port()}")
        assert adb_processes(port) == []


def wait_until_refused(device: str) -> None:
    """A process that was killed may listen for a moment after it looks dead: its threads go one by one."""
    give_up_at = time.monotonic() + 5
    while (connection := client.try_connect(device)) is not None:
        connection.close()
        assert time.monotonic() < give_up_at, "the daemon that was killed still listens"
        time.sleep(0.02)


def test_the_server_outlives_the_daemon_and_nothing_else_does(tmp_path: Path) -> None:
    with private_adb(tmp_path / "adb") as port:
        phone = ScriptedPhone(tmp_path / "phone")
        try:
            with phone_session(tmp_path / "home", phone) as session:
                told = session.run(SNAP)
                assert told["ok"], told
                [server] = adb_processes(port)
                status = session.status()
                assert status is not None
                left = session.processes()
                kill([status["pid"]])
                wait_until_refused(session.device)
                assert not [pid for pid in left if pid != server and is_alive(pid)]
                told = session.run(SNAP)
                assert told["ok"], told  # the next command starts another daemon
                assert adb_processes(port) == [server]
                kill([server])  # and if the server is killed, the phone is reached by another one
                assert not is_alive(server)
                told = session.run(SNAP)
                assert told["ok"] or told["error"]["code"] == "DEVICE_LOST", told
                assert session.run(SNAP)["ok"]
        finally:
            phone.close()


@pytest.mark.usefixtures("own_store")
@pytest.mark.parametrize(
    ("answer", "said"),
    [(b"OKAY00040001", "version 1"), (b"HTTP/1.1 400", "not a working adb server"), (b"", "not a working adb server")],
)
def test_what_listens_in_place_of_a_server_is_not_relied_on(answer: bytes, said: str, tmp_path: Path) -> None:
    with private_adb(tmp_path / "adb"), socket.create_server(("127.0.0.1", server_address()[1])) as listener:
        asked: list[bytes] = []

        def serve() -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        asked.append(connection.recv(100))
                        connection.sendall(answer)
                        if not answer:
                            connection.settimeout(5)
                            connection.recv(1)
            except OSError:
                pass

        threading.Thread(target=serve, daemon=True).start()
        assert said in refused("android")
        assert set(asked) == {b"000chost:version"}, "it was not told to end"
        listener.shutdown(socket.SHUT_RDWR)


def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADB_SERVER_SOCKET", "vsock:3:5037")
    with pytest.raises(Failure, match="only tcp:HOST:PORT"):
        server_address()
    end_server(free_port())
