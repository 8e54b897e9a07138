"""Payloads of executions: strict, every problem at once, exact messages and paths; budgets that fit."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.errors import Failure
from shotclock.core.limits import reserve_ms_for
from shotclock.ui.payload import (
    ACTION_TYPES,
    MIN_TIMEOUT_MS,
    Execution,
    parse_payload,
    read_execution,
    timeout_for,
    usable_ms,
)

SNAP = {"id": "snap", "type": "snapshot_ui"}


def payload(*actions: Any, **changes: Any) -> dict[str, Any]:
    head = {"commandId": "c-1", "taskId": "t-1", "source": "agent", "expectedFormat": "android-ui-automator"}
    return {**head, "timeoutMs": 30000, "actions": list(actions) or [SNAP], **changes}


def action(action_type: str, action_id: str = "a", **params: Any) -> dict[str, Any]:
    return {"id": action_id, "type": action_type, "params": params}


def refusal(written: Any, **override: Any) -> Failure:
    with pytest.raises(Failure) as refused:
        read_execution(written, **override)
    assert refused.value.code == "EXECUTION_VALIDATION_FAILED"
    return refused.value


def problems(written: Any, **override: Any) -> dict[str, str]:
    return {each["path"]: each["message"] for each in refusal(written, **override).context["problems"]}


TABLE = {
    "simple snapshot": payload(SNAP, timeoutMs=30000),
    "navigation wait": payload(
        action("open_app", "open", applicationId="com.android.settings"),
        action("wait_for_navigation", "wait", expectedPackage="com.android.settings", timeoutMs=30000),
        timeoutMs=35000,
    ),
    "read after click": payload(
        action("click", "click-1", matcher={"textEquals": "Settings"}),
        action("sleep", "sleep-1", durationMs=1500),
        action("wait_for_node", "wait-1", matcher={"textEquals": "Connected devices"}, timeoutMs=10000),
        {"id": "snap-1", "type": "snapshot_ui"},
        timeoutMs=45000,
    ),
}


def test_the_payloads_of_the_budget_table_are_valid_and_shown_as_they_were_written() -> None:
    for written in TABLE.values():
        execution = read_execution(written)
        assert execution.written == written
        assert execution.plan == {
            "commandId": "c-1",
            "timeoutMs": written["timeoutMs"],
            "actionCount": len(written["actions"]),
            "actions": written["actions"],
        }


def test_the_timeout_of_an_execution_is_a_finite_number_in_a_range() -> None:
    for timeout_ms in (999, 120001, 0, -5, 10**30, 10**400):
        assert problems(payload(timeoutMs=timeout_ms)) == {"timeoutMs": "timeoutMs must be between 1000 and 120000"}
    for wrong in (math.nan, math.inf, -math.inf, "30000", None, True, [], {}):
        assert problems(payload(timeoutMs=wrong)) == {"timeoutMs": "timeoutMs must be a finite number"}


def test_the_ends_of_the_range_are_in_it_and_a_whole_float_is_a_number() -> None:
    assert [read_execution(payload(timeoutMs=ms)).timeout_ms for ms in (1000, 120000, 30000.0)] == [1000, 120000, 30000]
    assert problems(payload(timeoutMs=1500.5)) == {"timeoutMs": "timeoutMs must be a whole number of milliseconds"}


def test_a_navigation_wait_longer_than_it_may_be_says_where_it_stands() -> None:
    refused = refusal(
        payload(action("wait_for_navigation", "wait-for-nav", expectedPackage="x", timeoutMs=30001), timeoutMs=60000)
    )
    assert str(refused) == "wait_for_navigation params.timeoutMs must not exceed 30000"
    assert {name: refused.context[name] for name in ("path", "actionId", "actionType")} == {
        "path": "actions.0.params.timeoutMs",
        "actionId": "wait-for-nav",
        "actionType": "wait_for_navigation",
    }


PARAMS_OUT_OF_LIMITS = [
    (action("wait_for_navigation", expectedPackage="x"), "timeoutMs", "is required"),
    (action("wait_for_navigation", expectedPackage="x", timeoutMs=0), "timeoutMs", "must be at least 1"),
    (action("wait_for_navigation", expectedPackage="x", timeoutMs=math.nan), "timeoutMs", "must be a finite number"),
    (action("wait_for_node", matcher={"role": "x"}, timeoutMs=60001), "timeoutMs", "must not exceed 60000"),
    (action("wait_for_node", matcher={"role": "x"}, timeoutMs="5"), "timeoutMs", "must be a finite number"),
    (action("sleep", durationMs=119501), "durationMs", "must not exceed 119500"),
    (action("sleep", durationMs=-1), "durationMs", "must be at least 0"),
    (action("sleep", durationMs=10**400), "durationMs", "must not exceed 119500"),
    (action("click", coordinate={"x": 10**400, "y": 1}), "coordinate.x", "must not exceed 100000"),
    (action("click", coordinate={"x": math.nan, "y": 1}), "coordinate.x", "must be a finite number"),
    (action("scroll", distanceRatio=0.01), "distanceRatio", "must be at least 0.05"),
    (action("sleep"), "durationMs", "is required"),
    (action("click", matcher={"css": "a"}, timeoutMs=30001), "timeoutMs", "must not exceed 30000"),
    (action("click", matcher={"css": "a" * 513}), "matcher.css", "must have at most 512 characters"),
    (action("press_key", key="hyper+x"), "key", "'hyper+x' is no key"),
    (action("press_key", key=1), "key", "must be text"),
    (action("enter_text", matcher={"css": "a"}), "text", "is required"),
    (action("scroll", direction="away"), "direction", "must be one of 'up', 'down', 'left', 'right'"),
    (action("open_uri", uri="  "), "uri", "must not be blank"),
]


def test_a_param_out_of_its_limits_is_named_by_its_path() -> None:
    for written, path, message in PARAMS_OUT_OF_LIMITS:
        found = problems(payload(written, timeoutMs=120000))
        assert list(found) == [f"actions.0.params.{path}"]
        assert found[f"actions.0.params.{path}"].startswith(f"{written['type']} params.{path} {message}")


def test_an_action_without_a_target_is_refused() -> None:
    for written in (
        action("click", matcher={}),
        action("click", matcher={"textEquals": None}),
        action("click"),
        action("click", matcher={"css": "a"}, coordinate={"x": 1, "y": 2}),
        action("click", clickType="focus", coordinate={"x": 1, "y": 2}),
        action("wait_for_navigation", timeoutMs=10),
        action("wait_for_node", timeoutMs=10),
    ):
        assert all(path.startswith("actions.0.params") for path in problems(payload(written)))


def test_every_problem_is_reported_at_once_with_the_replacement_of_a_part() -> None:
    written = payload(
        action("sleep", "s", durationMs=-1),
        action("click", "s", matcher={"textEquals": "x", "colour": "red"}),
        action("fly", "f"),
        "no object",
        {"id": "k", "type": "press_key", "params": {"key": "enter"}, "why": 1},
        timeoutMs=math.inf,
        mode="quick",
        colour="blue",
    )
    del written["taskId"]
    found = problems(written, timeout_ms=500)
    assert set(found) == {
        "taskId",
        "mode",
        "colour",
        "timeoutMs",
        "actions.0.params.durationMs",
        "actions.1.id",
        "actions.1.params.matcher.colour",
        "actions.2.type",
        "actions.3",
        "actions.4.why",
    }
    assert found["timeoutMs"] == "timeoutMs must be between 1000 and 120000"
    assert found["actions.2.type"].startswith("unknown action type 'fly'; the types are open_app, ")


def test_an_override_is_what_the_budgets_have_to_fit_in() -> None:
    nav = action("wait_for_navigation", expectedPackage="x", timeoutMs=20000)
    assert "timeoutMs" in problems(payload(nav, timeoutMs=30000), timeout_ms=10000).popitem()[1]
    assert read_execution(payload(nav, timeoutMs=10000), timeout_ms=30000).timeout_ms == 30000
    assert problems(payload(nav, timeoutMs=30000), timeout_ms=math.nan) == {
        "timeoutMs": "timeoutMs must be a finite number"
    }


def test_an_action_that_cannot_fit_is_refused_with_what_would_fit() -> None:
    nav = action("wait_for_navigation", expectedPackage="x", timeoutMs=30000)
    found = problems(payload(nav, timeoutMs=30000))
    assert found["actions.0.params.timeoutMs"].endswith("raise timeoutMs to 30500 at least, or wait for less")
    assert read_execution(payload(nav, timeoutMs=30500)) and problems(payload(nav, timeoutMs=30499))


def test_an_interaction_has_to_fit_by_itself_only() -> None:
    clicks = [action("click", f"c{n}", matcher={"role": "x"}, timeoutMs=900) for n in range(3)]
    assert read_execution(payload(*clicks, timeoutMs=1000))
    clicks[1]["params"]["timeoutMs"] = 901
    assert set(problems(payload(*clicks, timeoutMs=1000))) == {"actions.1.params.timeoutMs"}


def test_waits_that_follow_each_other_have_to_fit_together() -> None:
    waits = [action("wait_for_node", f"w{n}", matcher={"role": "x"}, timeoutMs=10000) for n in range(3)]
    message = problems(payload(*waits, timeoutMs=30000))["timeoutMs"]
    assert "up to 30000 ms (w0 10000, w1 10000, w2 10000)" in message and "to 30500 at least" in message
    assert read_execution(payload(*waits, timeoutMs=30500)) and problems(payload(*waits, timeoutMs=30499))


def test_an_execution_has_one_to_fifty_actions() -> None:
    for count in (0, 51):
        written = payload(actions=[{**SNAP, "id": str(n)} for n in range(count)])
        assert problems(written) == {"actions": f"actions must have between 1 and 50 entries, and has {count}"}


def test_best_effort_has_more_time_and_fewer_steps() -> None:
    assert read_execution(payload(timeoutMs=180000, mode="best_effort")).timeout_ms == 180000
    many = payload(actions=[{**SNAP, "id": str(n)} for n in range(31)], timeoutMs=180001, mode="best_effort")
    assert set(problems(many)) == {"actions", "timeoutMs"}


def test_a_payload_has_a_size() -> None:
    text = "x" * 64000
    found = problems(payload(action("enter_text", matcher={"css": "a"}, text=text)))
    assert found[""].endswith("at most 64000 are accepted")


def test_anything_but_a_payload_is_refused() -> None:
    for written in (None, [], "x", 5, {}):
        assert problems(written)


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(Failure, match="the payload is not JSON"):
        parse_payload("{")
    assert math.isnan(parse_payload('{"timeoutMs": NaN}')["timeoutMs"])


def test_other_names_for_actions_and_params_are_refused() -> None:
    tap = {"id": "a", "type": "tap", "params": {}}
    selector = {"id": "b", "type": "click", "params": {"selector": {"text": "OK"}, "timeout_ms": 5}}
    assert {"actions.0.type", "actions.1.params.selector", "actions.1.params.timeout_ms"} <= set(
        problems(payload(tap, selector))
    )


# --- properties ------------------------------------------------------------------------------------------------

MS = st.one_of(st.integers(-10, 200_000), st.floats(), st.sampled_from([0, 1, 30000, 60000, 119500, 120000]))
MATCHERS = st.sampled_from([{"textEquals": "x"}, {"css": "a", "role": "link"}, {}, {"colour": 1}, None])
PARAMS = st.dictionaries(
    st.sampled_from(["matcher", "timeoutMs", "durationMs", "expectedNode", "uri", "text", "key", "applicationId"]),
    st.one_of(MS, MATCHERS, st.text(max_size=5)),
    max_size=4,
)
ANY_ACTION = st.fixed_dictionaries(
    {"id": st.sampled_from("abcdef"), "type": st.sampled_from([*ACTION_TYPES, "tap", "fly"])},
    optional={"params": PARAMS},
)
FITTING = st.one_of(
    st.builds(lambda ms: action("sleep", durationMs=ms), st.integers(0, 60_000)),
    st.builds(lambda ms: action("wait_for_node", matcher={"role": "x"}, timeoutMs=ms), st.integers(1, 60_000)),
    st.builds(lambda ms: action("click", matcher={"role": "x"}, timeoutMs=ms), st.integers(1, 30_000)),
    st.just(SNAP),
)
PAYLOADS = st.builds(
    lambda actions, timeout_ms, mode: payload(
        *({**each, "id": f"{each['id']}{n}"} for n, each in enumerate(actions)), timeoutMs=timeout_ms, mode=mode
    ),
    st.lists(st.one_of(FITTING, ANY_ACTION), min_size=1, max_size=4),
    st.one_of(MS, st.integers(1000, 180_000)),
    st.sampled_from(["direct", "artifact_compiled", "best_effort"]),
)


def assert_fits(execution: Execution) -> None:
    usable = execution.timeout_ms - reserve_ms_for(execution.timeout_ms)
    limits = [each.limit_ms for each in execution.actions if each.limit_ms is not None]
    waits = [each.limit_ms or 0 for each in execution.actions if each.params.is_wait]
    assert all(limit <= usable for limit in limits) and sum(waits) <= usable
    assert 1000 <= execution.timeout_ms <= (180000 if execution.mode == "best_effort" else 120000)


@given(PAYLOADS, st.one_of(st.none(), MS))
def test_every_payload_that_validates_has_budgets_that_fit(written: dict[str, Any], override: object) -> None:
    try:
        execution = read_execution(written, timeout_ms=override)
    except Failure as refused:
        assert refused.code == "EXECUTION_VALIDATION_FAILED" and refused.context["problems"]
        return
    assert_fits(execution)
    assert read_execution(json.loads(json.dumps(execution.written))) == execution


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["actions", "id", "type", "params"]), inner)
    ),
)


@given(JSON)
def test_no_json_is_more_than_a_refusal(written: object) -> None:
    with pytest.raises(Failure):
        read_execution(written)


@given(st.integers(1, 1_000_000))
def test_what_would_fit_is_the_shortest_that_does(needed_ms: int) -> None:
    fits = timeout_for(needed_ms)
    assert usable_ms(fits) >= needed_ms
    assert fits == MIN_TIMEOUT_MS or usable_ms(fits - 1) < needed_ms
