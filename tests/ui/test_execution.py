"""The order of an execution: what each step has, what is told of it, where it ends and what it may have changed."""

import asyncio
from typing import Any

import pytest

from shotclock.ui import device
from shotclock.ui._execution import GUARD_MS, LOOK_GUARD_MS, shorten_snapshot
from shotclock.ui.client import RESULT_MARGIN_MS
from shotclock.ui.daemon import ANSWER_RESERVE_MS
from shotclock.ui.device import Countdown, Place, Snapshot
from shotclock.ui.payload import usable_ms

from .conftest import MemoryDevice, act, execution, fail, hang, run_on

SNAP = {"id": "snap", "type": "snapshot_ui"}


def ids(result: dict[str, Any]) -> list[tuple[str, bool]]:
    return [(step["id"], step["success"]) for step in result["stepResults"]]


def test_every_step_has_a_result_and_the_whole_one_too() -> None:
    events: list[Any] = []
    result = run_on(
        MemoryDevice({"Price": lambda ms: ["5 €"]}), execution(act("read_text", "r", "Price"), SNAP), events
    )
    assert result["status"] == "success" and result["error"] is None
    assert result["stepResults"][0] == {"id": "r", "actionType": "read_text", "success": True, "data": {"text": "5 €"}}
    assert result["position"] == {"index": 1, "actionId": "snap", "completed": 2, "total": 2}
    assert result["page"] == {"state": "same", "where": "memory:start", "next": "same"}
    assert [event["event"] for event in events] == ["step", "stepResult"] * 2
    assert result["effects"] == "none"


def test_what_follows_a_failed_step_does_not_run() -> None:
    device = MemoryDevice({"Go": fail("ACTION_FAILED")})
    result = run_on(device, execution(act("click", "a", "A"), act("click", "b", "Go"), SNAP))
    assert ids(result) == [("a", True), ("b", False)] and result["status"] == "failed"
    assert (result["error"]["code"], result["error"]["actionId"]) == ("ACTION_FAILED", "b")
    assert result["position"] == {"index": 1, "actionId": "b", "completed": 1, "total": 3}
    assert result["effects"] == "unknown"


def test_a_step_has_its_own_budget_or_what_is_left_of_the_execution() -> None:
    device = MemoryDevice()
    run_on(device, execution(act("click", "a", "A", timeoutMs=700), act("click", "b", "B"), timeout_ms=5000))
    (_, own), (_, left) = device.asked
    assert own == 700 and 4000 <= left <= 4500


def test_a_device_that_does_not_answer_is_told_by_what_it_was_asked() -> None:
    for action, code in (
        (act("wait_for_node", "x", "X", timeoutMs=50), "WAIT_TIMEOUT"),
        (act("read_text", "x", "X", timeoutMs=50), "EVAL_TIMEOUT"),
        (act("click", "x", "X", timeoutMs=50), "OPERATION_TIMEOUT"),
    ):
        result = run_on(MemoryDevice({"X": hang}), execution(action))
        assert result["error"]["code"] == code
        clock = result["error"]["clock"]
        assert (clock["owner"], clock["limit_ms"]) == ("action x", 50) and clock["elapsed_ms"] >= 50


def test_the_execution_ends_on_time_whatever_the_device_does() -> None:
    result = run_on(MemoryDevice({"X": hang}), execution(act("press_key", "k", key="x"), timeout_ms=1000))
    assert result["status"] == "success"
    result = run_on(MemoryDevice({"X": hang}), execution(act("wait_for_node", "x", "X"), SNAP, timeout_ms=1000))
    assert result["error"]["code"] == "OPERATION_TIMEOUT"
    assert result["error"]["clock"]["owner"] == "execution c-1"
    assert 900 <= result["durationMs"] < 1900 and ids(result) == [("x", False)]


@pytest.mark.slow
def test_a_frozen_page_is_told_and_replaced() -> None:
    device = MemoryDevice({"X": hang})
    device.answers, device.recovers_to = False, Place("about:blank", "d2")
    result = run_on(device, execution(act("click", "x", "X", timeoutMs=50)))
    assert result["page"] == {"state": "unresponsive", "where": "memory:start", "next": "fresh"}
    device.answers, device.recovers_to = False, device.place
    result = run_on(device, execution(act("click", "x", "X", timeoutMs=50)))
    assert result["page"]["next"] == "recovered"


@pytest.mark.slow
def test_a_result_comes_before_the_daemon_gives_the_device_up_whatever_hangs() -> None:
    device, asked = MemoryDevice({"X": hang}), []

    async def never(within_ms: int) -> Any:
        asked.append(within_ms)
        await hang(within_ms)

    device.look = device.recover = never  # type: ignore[method-assign,assignment]
    result = run_on(device, execution(act("click", "x", "X"), timeout_ms=1000))
    assert (result["error"]["code"], result["page"]["next"]) == ("OPERATION_TIMEOUT", "none")
    reserve_ms = 1000 - usable_ms(1000)  # the smallest there is
    most_ms = GUARD_MS + sum(within_ms + LOOK_GUARD_MS for within_ms in asked) - reserve_ms
    assert len(asked) == 2 and most_ms <= RESULT_MARGIN_MS - ANSWER_RESERVE_MS - 100


def test_a_caller_with_little_time_left_is_answered_before_a_frozen_page_is_mended() -> None:
    device = MemoryDevice({"X": hang})
    device.answers, device.recovers_to = False, Place("about:blank", "d2")
    result = run_on(device, execution(act("click", "x", "X")), within_ms=1500)
    assert result["durationMs"] <= 1500 and result["error"]["clock"]["owner"] == "caller"
    assert result["page"] == {"state": "unresponsive", "where": "memory:start", "next": "none"}


def test_a_device_that_was_lost_behind_what_succeeded_is_not_said_to_be_as_it_was() -> None:
    device = MemoryDevice()

    def lose(within_ms: int) -> list[str]:
        device.place = None
        return ["5 €"]

    device.script = {"Price": lose}
    result = run_on(device, execution(act("read_text", "r", "Price")))
    assert result["status"] == "success"
    assert (result["page"]["state"], result["page"]["next"]) == ("lost", "none")


def test_a_lost_device_is_told_even_where_nothing_brings_it_back() -> None:
    device = MemoryDevice({"X": fail("DEVICE_LOST")})

    def lose(within_ms: int) -> Any:
        device.place = None
        return fail("DEVICE_LOST")(within_ms)

    device.script["X"] = lose
    result = run_on(device, execution(act("click", "x", "X")))
    assert result["error"]["code"] == "DEVICE_LOST"
    assert result["page"] == {"state": "lost", "where": "memory:start", "next": "none"}


def test_a_bug_of_a_device_is_told_as_one() -> None:
    result = run_on(MemoryDevice({"X": lambda ms: 1 / 0}), execution(act("click", "x", "X")))
    assert result["error"]["code"] == "INTERNAL_ERROR" and "ZeroDivisionError" in result["error"]["message"]


def test_best_effort_goes_on_past_what_fails() -> None:
    device = MemoryDevice({"B": fail("WAIT_TIMEOUT")})
    actions = [act("click", "a", "A"), act("click", "b", "B"), act("click", "c", "C")]
    result = run_on(device, execution(*actions, mode="best_effort"))
    assert ids(result) == [("a", True), ("b", False), ("c", True)]
    assert result["status"] == "partial" and result["error"]["code"] == "PARTIAL_FAILURE"
    assert [each["actionId"] for each in result["error"]["failures"]] == ["b"]
    assert result["effects"] == "partial"


def test_best_effort_ends_after_five_failures_in_a_row() -> None:
    device = MemoryDevice({"B": fail("ACTION_FAILED")})
    steps = ["B"] * 4 + ["A"] + ["B"] * 6
    actions = [act("click", f"s{n}", text) for n, text in enumerate(steps)]
    result = run_on(device, execution(*actions, mode="best_effort"))
    assert [step["success"] for step in result["stepResults"]] == [False] * 4 + [True] + [False] * 5
    assert result["position"] == {"index": 9, "actionId": "s9", "completed": 1, "total": 11}


def test_best_effort_without_any_success_fails_with_the_first_failure() -> None:
    result = run_on(MemoryDevice({"B": fail("ACTION_FAILED")}), execution(act("click", "b", "B"), mode="best_effort"))
    assert (result["status"], result["error"]["code"]) == ("failed", "ACTION_FAILED")


def test_a_sleep_is_slept_and_one_that_does_not_fit_any_more_is_told() -> None:
    assert run_on(MemoryDevice(), execution(act("sleep", "s", durationMs=30)))["durationMs"] >= 30
    late = execution(act("click", "x", "X", timeoutMs=400), act("sleep", "s", durationMs=800), timeout_ms=1000)

    async def slow(within_ms: int) -> dict[str, object]:
        await asyncio.sleep(0.3)
        return {}

    result = run_on(MemoryDevice({"X": slow}), late)
    assert result["error"]["code"] == "OPERATION_TIMEOUT" and 850 <= result["durationMs"] < 1500


def test_scroll_until_looks_scrolls_and_ends_where_nothing_moves() -> None:
    device = MemoryDevice({"X": fail("WAIT_TIMEOUT"), "scroll": lambda ms: True})
    result = run_on(device, execution(act("scroll_until", "u", "X", maxScrolls=3)))
    assert result["error"]["code"] == "WAIT_TIMEOUT" and "after 3 scrolls" in result["error"]["message"]
    device.script["scroll"] = lambda ms: False
    assert "at the end" in run_on(device, execution(act("scroll_until", "u", "X")))["error"]["message"]
    device.script["X"] = lambda ms: {"found": 1}
    assert run_on(device, execution(act("scroll_until", "u", "X")))["stepResults"][0]["data"]["scrolls"] == 0


def test_a_snapshot_is_cut_at_whole_lines() -> None:
    for most, kept in (
        (1000, 3),
        (16, 2),
        (15, 1),
        (1, 0),
    ):
        text = "- a\n- bbbbbbbbb\n- c"
        data = shorten_snapshot(Snapshot(text, Place("x", "y")), most)
        assert data["text"] == "\n".join(text.split("\n")[:kept])
        assert data["truncated"] == (kept < 3) and data.get("linesLeftOut", 0) == 3 - kept


def test_a_line_that_is_too_long_is_cut_and_keeps_its_ref() -> None:
    text = f'- a\n- button "{"ü" * 90_000}" [ref=e2]\n- c'
    data = shorten_snapshot(Snapshot(text, Place("x", "y")), 24_000)
    first, cut, last = str(data["text"]).split("\n")
    assert (first, last) == ("- a", "- c") and cut.startswith('- button "üü') and cut.endswith("… [ref=e2]")
    assert data["truncated"] is True and data["linesCut"] == 1 and "linesLeftOut" not in data
    assert len(str(data["text"]).encode()) <= 24_000
    data = shorten_snapshot(Snapshot(f"- {'x' * 500}", Place("x", "y")), 60)  # alone, too
    assert str(data["text"]).startswith("- xxx") and len(str(data["text"]).encode()) <= 60 and data["truncated"]


def test_a_text_that_is_too_long_is_cut_and_says_so() -> None:
    device = MemoryDevice({"Long": lambda ms: ["ü" * 30_000, "b", "c"], "Short": lambda ms: ["a", "b"]})

    def read(text: str, **params: Any) -> dict[str, Any]:
        data: dict[str, Any] = run_on(device, execution(act("read_text", "r", text, **params)))["stepResults"][0][
            "data"
        ]
        return data

    data = read("Long")
    assert data["text"].startswith("üü") and len(data["text"].encode()) <= 24_000 and data["truncated"] is True
    data = read("Long", all=True)
    assert len(data["all"]) == 1 and data["textsLeftOut"] == 2 and data["truncated"] is True
    assert read("Long", maxBytes=64_000) == {"text": "ü" * 30_000}
    assert read("Short", all=True) == {"text": "a", "all": ["a", "b"]}


def test_a_countdown_is_not_over_before_its_last_nanosecond(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(device, "monotonic_ns", lambda: now[0])
    time = Countdown(600)
    for now[0], left_ms in ((0, 600), (300_000, 600), (599_999_999, 1)):
        assert (time.left_ms, time.is_over) == (left_ms, False)
    now[0] = 600_000_000
    assert time.is_over
