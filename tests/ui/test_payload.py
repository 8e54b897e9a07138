"""Payloads of executions: strict, every problem at once, exact messages and paths; budgets that fit."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.clocks import reserve_ms_for
from shotclock.core.errors import Failure
from shotclock.ui import budgets, builders
from shotclock.ui.aliases import ALIASES
from shotclock.ui.payload import ACTION_TYPES, Execution, parse_payload, read_execution

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


@pytest.mark.parametrize("name", TABLE)
def test_the_payloads_of_the_budget_table_are_valid_and_shown_as_they_were_written(name: str) -> None:
    execution = read_execution(TABLE[name])
    assert execution.written == TABLE[name]
    assert execution.plan == {
        "commandId": "c-1",
        "timeoutMs": TABLE[name]["timeoutMs"],
        "actionCount": len(TABLE[name]["actions"]),
        "actions": TABLE[name]["actions"],
    }


@pytest.mark.parametrize("timeout_ms", [999, 120001, 0, -5, 10**30, 10**400])
def test_the_timeout_of_an_execution_has_a_range(timeout_ms: int) -> None:
    assert problems(payload(timeoutMs=timeout_ms)) == {"timeoutMs": "timeoutMs must be between 1000 and 120000"}


@pytest.mark.parametrize("timeout_ms", [math.nan, math.inf, -math.inf, "30000", None, True, [], {}])
def test_the_timeout_of_an_execution_is_a_finite_number(timeout_ms: object) -> None:
    assert problems(payload(timeoutMs=timeout_ms)) == {"timeoutMs": "timeoutMs must be a finite number"}


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


@pytest.mark.parametrize(
    ("written", "path", "message"),
    [
        (action("wait_for_navigation", expectedPackage="x"), "timeoutMs", "is required"),
        (action("wait_for_navigation", expectedPackage="x", timeoutMs=0), "timeoutMs", "must be greater than 0"),
        (
            action("wait_for_navigation", expectedPackage="x", timeoutMs=math.nan),
            "timeoutMs",
            "must be a finite number",
        ),
        (action("wait_for_node", matcher={"role": "x"}, timeoutMs=60001), "timeoutMs", "must not exceed 60000"),
        (action("wait_for_node", matcher={"role": "x"}, timeoutMs="5"), "timeoutMs", "must be a finite number"),
        (action("sleep", durationMs=119501), "durationMs", "must not exceed 119500"),
        (action("sleep", durationMs=-1), "durationMs", "must not be negative"),
        (action("sleep", durationMs=10**400), "durationMs", "must not exceed 119500"),
        (action("click", coordinate={"x": 10**400, "y": 1}), "coordinate.x", "must be a number between 0 and 100000"),
        (action("sleep"), "durationMs", "is required"),
        (action("click", matcher={"css": "a"}, timeoutMs=30001), "timeoutMs", "must not exceed 30000"),
        (action("press_key", key="hyper+x"), "key", "'hyper+x' is no key"),
        (action("enter_text", matcher={"css": "a"}), "text", "is required"),
        (action("open_uri", uri="  "), "uri", "must not be blank"),
    ],
)
def test_a_param_out_of_its_limits_is_named_by_its_path(written: dict[str, Any], path: str, message: str) -> None:
    found = problems(payload(written, timeoutMs=120000))
    assert list(found) == [f"actions.0.params.{path}"]
    assert found[f"actions.0.params.{path}"].startswith(f"{written['type']} params.{path} {message}")


@pytest.mark.parametrize(
    "written",
    [
        action("click", matcher={}),
        action("click", matcher={"textEquals": None}),
        action("click"),
        action("click", matcher={"css": "a"}, coordinate={"x": 1, "y": 2}),
        action("wait_for_navigation", timeoutMs=10),
        action("wait_for_node", timeoutMs=10),
    ],
)
def test_an_action_that_says_of_nothing_what_it_is_for_is_refused(written: dict[str, Any]) -> None:
    assert all(path.startswith("actions.0.params") for path in problems(payload(written)))


def test_every_problem_is_reported_at_once_in_the_payload_and_in_what_replaces_a_part_of_it() -> None:
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
    both = [each["message"] for each in refusal(written, timeout_ms=500).context["problems"]]
    assert "timeoutMs must be a finite number" in both and "timeoutMs must be between 1000 and 120000" in both


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


@pytest.mark.parametrize("count", [0, 51])
def test_an_execution_has_one_to_fifty_actions(count: int) -> None:
    written = payload(actions=[{**SNAP, "id": str(n)} for n in range(count)])
    assert problems(written) == {"actions": f"actions must have between 1 and 50 entries, and has {count}"}


def test_best_effort_has_more_time_and_fewer_steps() -> None:
    assert read_execution(payload(timeoutMs=180000, mode="best_effort")).timeout_ms == 180000
    many = payload(actions=[{**SNAP, "id": str(n)} for n in range(31)], timeoutMs=180001, mode="best_effort")
    assert set(problems(many)) == {"actions", "timeoutMs"}


def test_a_payload_has_a_size() -> None:
    text = "x" * 64000
    found = problems(payload(action("enter_text", matcher={"css": "a"}, text=text)))
    assert found[""].endswith("at most 64000 are taken")


@pytest.mark.parametrize("written", [None, [], "x", 5, {}])
def test_what_is_no_payload_is_refused(written: object) -> None:
    assert problems(written)


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(Failure, match="the payload is not JSON"):
        parse_payload("{")
    assert math.isnan(parse_payload('{"timeoutMs": NaN}')["timeoutMs"])


def test_aliases_are_read_and_shown_under_the_documented_names() -> None:
    tap = {"id": "a", "type": "Tap", "params": {"selector": {"text": "OK"}, "timeout_ms": 5}}
    written = {**payload(tap), "command_id": "c-2"}
    del written["commandId"]
    execution = read_execution(written)
    assert execution.written["actions"] == [action("click", matcher={"textEquals": "OK"}, timeoutMs=5)]
    assert execution.command_id == "c-2"
    assert set(ALIASES.values()) <= set(ACTION_TYPES)


def test_an_alias_beside_what_it_stands_for_is_refused() -> None:
    both = {"id": "a", "type": "click", "params": {"selector": {"text": "OK"}, "matcher": {"css": "b"}}}
    assert set(problems(payload(both))) == {"actions.0.params.selector"}


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
    waits = [each.limit_ms or 0 for each in execution.actions if each.kind.is_wait]
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
    fits = budgets.timeout_for(needed_ms)
    assert budgets.usable_ms(fits) >= needed_ms
    assert fits == budgets.MIN_TIMEOUT_MS or budgets.usable_ms(fits - 1) < needed_ms


LEGAL_MATCHER = {"textEquals": "x"}
WHOLE = st.one_of(st.none(), st.integers(1000, 120000))
WAIT = st.one_of(st.none(), st.integers(1, 60000))
KEYS = st.sampled_from(["enter", "ctrl+a"])
UNTIL = st.sampled_from([None, LEGAL_MATCHER])
BUILDERS = st.one_of(
    st.builds(lambda ms: (builders.build_wait(LEGAL_MATCHER, ms), max((ms or 0) + 5000, 30000)), WAIT),
    st.builds(lambda ms: (builders.build_wait_for_nav(ms, package="x"), max(ms + 5000, 30000)), st.integers(1, 30000)),
    st.builds(
        lambda ms, whole: (builders.build_sleep(ms, whole), min(max(ms + 5000, whole or 0, 30000), 120000)),
        st.integers(0, 119500),
        WHOLE,
    ),
    st.builds(lambda ms: (builders.build_snapshot(ms), ms or 30000), WHOLE),
    st.builds(lambda ms: (builders.build_screenshot(ms), ms or 30000), WHOLE),
    st.builds(lambda ms: (builders.build_click(ms, matcher=LEGAL_MATCHER), ms or 30000), WHOLE),
    st.builds(lambda ms: (builders.build_open("file:///x", ms), ms or 30000), WHOLE),
    st.builds(lambda ms: (builders.build_open("com.x", ms), ms or 30000), WHOLE),
    st.builds(lambda ms: (builders.build_read(LEGAL_MATCHER, ms), ms or 30000), WHOLE),
    st.builds(lambda ms: (builders.build_read_value(LEGAL_MATCHER, ms), ms or 30000), WHOLE),
    st.builds(lambda ms, text: (builders.build_type(LEGAL_MATCHER, text, ms), ms or 30000), WHOLE, st.text()),
    st.builds(lambda ms, key: (builders.build_press(key, ms), ms or 30000), WHOLE, KEYS),
    st.builds(lambda ms, until: (builders.build_scroll("up", ms, until=until), ms or 30000), WHOLE, UNTIL),
)  # fmt: skip


@given(BUILDERS)
def test_every_builder_gives_a_legal_execution_of_the_documented_length(built: tuple[dict[str, Any], int]) -> None:
    written, timeout_ms = built
    execution = read_execution(written)
    assert_fits(execution)
    assert execution.timeout_ms == timeout_ms


def test_builders_have_the_documented_ids_and_sources() -> None:
    built = {
        "wait": builders.build_wait(LEGAL_MATCHER, 1),
        "wait-for-nav": builders.build_wait_for_nav(1, package="x"),
        "sleep": builders.build_sleep(1),
        "snap": builders.build_snapshot(),
    }
    for name, written in built.items():
        assert written["actions"][0]["id"] == name
        assert written["source"] == ("clawperator-observe" if name == "snap" else "clawperator-action")
        assert written["mode"] == "direct" and written["taskId"] == written["commandId"]


@given(st.one_of(st.floats(), st.text(), st.integers()))
def test_a_builder_passes_on_what_is_not_legal_to_be_refused(written: Any) -> None:
    for payload_of in (builders.build_wait(LEGAL_MATCHER, written), builders.build_sleep(written)):
        try:
            read_execution(payload_of)
        except Failure as refused:
            assert [each["path"][:16] for each in refused.context["problems"]] == ["actions.0.params"]
