"""Tabs, dialogs and downloads in a real browser: what an action opens is in its answer, and can be acted on."""

from typing import Any

import pytest

from .conftest import act, data_of
from .pages import Session

pytestmark = pytest.mark.slow

SNAP = {"id": "snap", "type": "snapshot_ui"}
TABS = {"id": "tabs", "type": "list_tabs"}
SAID = {"id": "said", "type": "read_text", "params": {"matcher": {"css": "#said"}}}


def do(action_type: str, **params: Any) -> dict[str, Any]:
    return {"id": action_type, "type": action_type, "params": params}


def test_a_tab_that_a_click_opens_is_in_its_answer_and_becomes_the_active_one(session: Session) -> None:
    for name in ("Blank", "Window"):
        told = session.run(session.open("/opens"), act("click", "click", name), TABS)
        (opened,) = data_of(told, "click")["opened"]
        assert (opened["kind"], opened["where"]) == ("tab", f"{session.url}/details"), told
        *others, active = data_of(told, "tabs")["tabs"]
        assert active["active"] and active["tab"] == opened["tab"] and not any("active" in each for each in others)
        told = session.run(do("close_tab"), act("read_text", "read", "Opens"))
        assert told["ok"] and told["data"]["page"]["where"] == f"{session.url}/opens", told


def test_a_tab_that_still_loads_is_reported_as_loading_and_later_by_its_name(session: Session) -> None:
    told = session.run(session.open("/opens"), act("click", "click", "Slow"))
    assert data_of(told, "click")["opened"] == [{"kind": "tab", "where": "", "state": "loading"}], told
    told = session.run(act("wait_for_node", "wait", "Slow page", timeoutMs=9000), do("close_tab"))
    (opened,) = data_of(told, "wait")["opened"]
    assert opened["where"] == f"{session.url}/slow" and opened["tab"].startswith("t"), told


def test_tabs_are_opened_listed_switched_and_closed_by_name(session: Session) -> None:
    told = session.run(session.open("/"), TABS, do("open_tab", uri=f"{session.url}/details"))
    first = next(each["tab"] for each in data_of(told, "tabs")["tabs"] if each.get("active"))
    second = data_of(told, "open_tab")["tab"]
    assert data_of(told, "open_tab")["status"] == 200 and first != second
    told = session.run(do("switch_tab", tab=first), act("read_text", "read", "Shop"), TABS)
    listed = {each["tab"]: each for each in data_of(told, "tabs")["tabs"]}
    assert listed[first]["active"] and listed[first]["title"] == "Shop" and listed[second]["title"] == "Details"
    told = session.run(do("close_tab", tab=second))
    assert second not in [each["tab"] for each in data_of(told, "close_tab")["tabs"]]
    told = session.run(do("switch_tab", tab=second))
    assert told["error"]["code"] == "NODE_NOT_FOUND" and first in told["error"]["message"], told
    assert told["meta"]["side_effects"] == "none"


def test_the_last_tab_that_is_closed_leaves_an_empty_one(session: Session) -> None:
    for each in data_of(session.run(TABS), "tabs")["tabs"]:
        assert session.run(do("close_tab", tab=each["tab"]))["ok"]
    told = session.run(TABS, session.open("/"))
    (left,) = data_of(told, "tabs")["tabs"]
    assert left["where"] == "about:blank" and told["ok"]


def test_an_order_that_navigates_says_where_and_history_goes_back_and_forward(session: Session) -> None:
    told = session.run(session.open("/opens"), act("click", "click", "Same"), act("read_text", "read", "Details"))
    assert told["ok"] and told["data"]["page"] == {
        "state": "changed", "where": f"{session.url}/details", "title": "Details", "next": "same",
    }  # fmt: skip
    told = session.run(act("press_key", "back", key="back"), act("press_key", "forward", key="forward"))
    assert data_of(told, "back")["where"].endswith("/opens") and data_of(told, "forward")["where"].endswith("/details")


def test_a_confirm_is_left_to_the_next_action_which_accepts_or_dismisses_it(session: Session) -> None:
    for accept, said in ((True, "true"), (False, "false")):
        told = session.run(session.open("/asks"), act("click", "ask", "Ask"))
        asked = {"type": "confirm", "message": "Sure?", "answer": "pending"}
        assert data_of(told, "ask")["dialogs"] == [asked] and told["elapsed_ms"] < 8000, told
        told = session.run(do("answer_dialog", accept=accept), SAID)
        answered = {**asked, "answer": "accepted" if accept else "dismissed"}
        assert data_of(told, "answer_dialog")["dialogs"] == [answered], told
        assert data_of(told, "said")["text"] == said


def test_a_prompt_takes_a_text_and_a_second_dialog_of_the_same_click_is_reported(session: Session) -> None:
    told = session.run(
        session.open("/asks"), act("click", "ask", "Prompt"), do("answer_dialog", accept=True, text="Ada"), SAID
    )
    assert data_of(told, "ask")["dialogs"][0]["default"] == "Bob" and data_of(told, "said")["text"] == "Ada"
    told = session.run(
        session.open("/asks"), act("click", "ask", "Both"), {**do("answer_dialog", accept=True), "id": "one"},
        {**do("answer_dialog", accept=False), "id": "two"}, SAID,
    )  # fmt: skip
    assert {each["message"]: each["answer"] for each in data_of(told, "one")["dialogs"]} == {
        "One?": "accepted", "Two?": "pending",
    }, told  # fmt: skip
    assert data_of(told, "said")["text"] == "true,false"
    told = session.run(session.open("/asks"), act("click", "ask", "Ask"), do("answer_dialog", accept=True, text="x"))
    assert told["error"]["code"] == "ACTION_UNSUPPORTED" and told["data"]["position"]["completed"] == 2, told


def test_a_dialog_that_comes_later_is_awaited_and_one_that_never_comes_is_a_timeout(session: Session) -> None:
    told = session.run(session.open("/asks"), act("click", "ask", "Later"), do("answer_dialog", accept=True), SAID)
    assert data_of(told, "said")["text"] == "true", told
    told = session.run(do("answer_dialog", accept=True, timeoutMs=300))
    assert told["error"]["code"] == "WAIT_TIMEOUT" and told["meta"]["side_effects"] == "none", told


def test_any_other_action_dismisses_an_open_dialog_and_does_not_hang(session: Session) -> None:
    again = {**session.open("/asks"), "id": "again"}
    for action in (SNAP, again, do("close_tab"), act("wait_for_node", "wait", "Ask")):
        told = session.run(session.open("/asks"), act("click", "ask", "Ask"), action)
        assert told["ok"] and told["elapsed_ms"] < 8000, told
        (dismissed,) = data_of(told, action["id"])["dialogs"]
        assert dismissed == {"type": "confirm", "message": "Sure?", "answer": "dismissed"}
    told = session.run(session.open("/asks"), act("click", "later", "Later"), act("wait_for_node", "w", "false"))
    assert told["ok"] and data_of(told, "w")["dialogs"][0]["answer"] == "dismissed", told  # it opened during the wait


def test_listing_tabs_and_sleeping_leave_a_dialog_open(session: Session) -> None:
    sleep = act("sleep", "s", durationMs=10)
    told = session.run(
        session.open("/asks"), act("click", "ask", "Ask"), TABS, sleep, do("answer_dialog", accept=True), SAID
    )
    assert data_of(told, "said")["text"] == "true", told


def test_an_alert_is_answered_at_once_and_a_guarded_page_is_left(session: Session) -> None:
    told = session.run(session.open("/asks"), act("click", "greet", "Greet"), SAID)
    assert data_of(told, "greet")["dialogs"] == [{"type": "alert", "message": "Hello", "answer": "dismissed"}], told
    assert data_of(told, "said")["text"] == "greeted"
    told = session.run(act("click", "guard", "Guard"), act("click", "leave", "Leave"), act("read_text", "r", "Details"))
    assert told["ok"], told
    assert data_of(told, "leave")["dialogs"][0]["type"] == "beforeunload"


def test_a_download_and_a_file_chooser_are_in_the_answer(session: Session) -> None:
    told = session.run(session.open("/opens"), act("click", "get", "Download"), act("sleep", "s", durationMs=300))
    downloads = [each for step in told["data"]["stepResults"] for each in step["data"].get("downloads", [])]
    assert [each["name"] for each in downloads] == ["a.bin"], told
    told = session.run(session.open("/inputs"), act("click", "choose", "Choose"), act("sleep", "s", durationMs=300))
    opened = [each for step in told["data"]["stepResults"] for each in step["data"].get("opened", [])]
    assert opened == [{"kind": "file chooser"}], told
