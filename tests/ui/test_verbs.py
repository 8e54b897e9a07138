"""Verbs: the executions of commands and of MCP tools, from the declared actions."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.errors import Failure
from shotclock.ui.payload import ACTION_TYPES, read_execution
from shotclock.ui.verbs import VERBS, build, build_tool, leaves_of

from .test_payload import assert_fits

WHOLE = st.one_of(st.none(), st.integers(1000, 120000))
WAIT = st.one_of(st.none(), st.integers(1, 60000))
INPUTS: dict[str, dict[str, object]] = {
    "open": {"target": "com.x"},
    "click": {"text": "x", "long": True},
    "type": {"words": "", "label": "x", "keep": True, "submit": True},
    "press": {"key": "ctrl+a"},
    "scroll": {"text": "x"},
    "read": {"text": "x", "value": True},
    "snapshot": {"max_bytes": 100},
    "screenshot": {"file": "/x.png"},
    "select": {"option": ["red", "blue"], "label": "Colour"},
    "hover": {"text": "x"},
    "upload": {"file": ["/x.txt"], "text": "x"},
    "tabs": {"action": "switch", "tab": "t2"},
    "dialog": {"accept": True, "text": "Ada"},
}
BUILT = st.one_of(
    st.builds(lambda ms: (build("wait", {"text": "x", "timeout": ms}), max((ms or 0) + 5000, 30000)), WAIT),
    st.builds(
        lambda ms: (build("wait-for-nav", {"app": "x", "timeout": ms}), max(ms + 5000, 30000)), st.integers(1, 30000)
    ),
    st.builds(
        lambda ms, whole: (build("sleep", {"ms": ms}, whole), min(max(ms + 5000, whole or 0, 30000), 120000)),
        st.integers(0, 119500),
        WHOLE,
    ),
    st.builds(lambda verb, ms: (build(verb, INPUTS[verb], ms), ms or 30000), st.sampled_from(list(INPUTS)), WHOLE),
)  # fmt: skip


@given(BUILT)
def test_every_verb_gives_a_legal_execution_of_the_documented_length(built: tuple[dict[str, Any], int]) -> None:
    written, timeout_ms = built
    execution = read_execution(written)
    assert_fits(execution)
    assert execution.timeout_ms == timeout_ms


def test_verbs_have_the_documented_params_ids_and_sources() -> None:
    inputs: dict[str, Any] = {
        "wait": ({"text": "x", "timeout": 1, "hidden": True}, "wait_for_node"),
        "wait-for-nav": ({"url": "x", "timeout": 1}, "wait_for_navigation"),
        "sleep": ({"ms": 1}, "sleep"),
        "snapshot": ({}, "snapshot_ui"),
        "screenshot": ({"file": "/x"}, "take_screenshot"),
        "open": ({"target": "https://x"}, "open_uri"),
        "click": ({"at": {"x": 1, "y": 2}, "focus": False}, "click"),
        "type": ({"words": "a", "label": "b", "keep": True}, "enter_text"),
        "press": ({"key": "enter"}, "press_key"),
        "scroll": ({"direction": "up"}, "scroll"),
        "read": ({"id": "x", "value": True}, "read_key_value_pair"),
        "select": ({"option": ["red"], "ref": "e1"}, "select_option"),
        "hover": ({"css": "a"}, "hover"),
        "upload": ({"file": ["/a"], "ref": "e1"}, "upload_file"),
        "tabs": ({}, "list_tabs"),
        "dialog": ({"dismiss": True}, "answer_dialog"),
    }
    params: dict[str, Any] = {
        "wait": {"matcher": {"textEquals": "x"}, "state": "hidden", "timeoutMs": 1},
        "wait-for-nav": {"expectedUrl": "x", "timeoutMs": 1},
        "sleep": {"durationMs": 1},
        "screenshot": {"path": "/x"},
        "open": {"uri": "https://x"},
        "click": {"coordinate": {"x": 1, "y": 2}},
        "type": {"matcher": {"contentDescEquals": "b"}, "text": "a", "clear": False},
        "press": {"key": "enter"},
        "scroll": {"direction": "up"},
        "read": {"labelMatcher": {"resourceId": "x"}},
        "select": {"matcher": {"ref": "e1"}, "options": ["red"]},
        "hover": {"matcher": {"css": "a"}},
        "upload": {"matcher": {"ref": "e1"}, "paths": ["/a"]},
        "dialog": {"accept": False},
    }
    assert set(inputs) == set(VERBS)
    for verb, (values, action_type) in inputs.items():
        written = build(verb, values)
        is_look = verb in ("snapshot", "screenshot")
        (built,) = written["actions"]
        assert (built["id"], built["type"]) == ("snap" if is_look else verb, action_type)
        assert built.get("params") == params.get(verb)
        assert written["source"] == ("clawperator-observe" if is_look else "clawperator-action")
        assert written["mode"] == "direct" and written["taskId"] == written["commandId"]
    required = {"type": ["words", "matcher"], "wait-for-nav": ["timeout"], "sleep": ["ms"], "dialog": ["accept"]}
    for verb, missing in required.items():
        with pytest.raises(Failure) as refused:
            build(verb, {})
        errors: Any = refused.value.context["errors"]
        assert refused.value.code == "MISSING_ARGUMENT" and [each["field"] for each in errors] == missing


def test_two_flags_for_one_param_exclude_each_other() -> None:
    with pytest.raises(Failure, match="focus excludes"):
        build("click", {"text": "x", "long": True, "focus": True})


@given(st.one_of(st.floats(), st.text(), st.integers()))
def test_a_verb_passes_on_an_illegal_value_to_be_refused(written: Any) -> None:
    for built in (build("wait", {"text": "x", "timeout": written}), build("sleep", {"ms": written})):
        try:
            read_execution(built)
        except Failure as refused:
            problems: Any = refused.context["problems"]
            assert [each["path"][:16] for each in problems] == ["actions.0.params"]


def action_of(written: dict[str, Any]) -> tuple[str, dict[str, Any], int]:
    read_execution(written)
    (action,) = written["actions"]
    return action["type"], action.get("params", {}), written["timeoutMs"]


def test_a_tool_has_the_names_of_the_payload_and_a_budget_that_its_execution_outlasts() -> None:
    for verb, arguments, action_type, params, timeout_ms in (
        ("open", {"uri": "https://x", "applicationId": ""}, "open_uri", {"uri": "https://x"}, 30000),
        ("open", {"uri": "", "applicationId": "com.x"}, "open_app", {"applicationId": "com.x"}, 30000),
        ("click", {"ref": "e1", "textEquals": ""}, "click", {"matcher": {"ref": "e1"}}, 30000),
        ("type", {"ref": "e1", "text": ""}, "enter_text", {"matcher": {"ref": "e1"}, "text": ""}, 30000),
        ("scroll", {"direction": "up"}, "scroll", {"direction": "up"}, 30000),
        ("scroll", {"css": "a"}, "scroll_until", {"matcher": {"css": "a"}}, 30000),
        ("read", {"ref": "e1", "value": True}, "read_key_value_pair", {"labelMatcher": {"ref": "e1"}}, 30000),
        ("wait", {"role": "alert", "state": "hidden"}, "wait_for_node",
         {"matcher": {"role": "alert"}, "state": "hidden"}, 30000),
        ("wait", {"expectedUrl": "*/x", "ref": "e1", "timeoutMs": 29000}, "wait_for_navigation",
         {"expectedUrl": "*/x", "expectedNode": {"ref": "e1"}, "timeoutMs": 29000}, 34000),
        ("tabs", {"action": "close", "tab": "t2"}, "close_tab", {"tab": "t2"}, 30000),
        ("dialog", {"accept": False}, "answer_dialog", {"accept": False}, 30000),
        ("snapshot", {"timeoutMs": 30000}, "snapshot_ui", {"timeoutMs": 30000}, 35000),
    ):  # fmt: skip
        assert action_of(build_tool(verb, arguments)) == (action_type, params, timeout_ms)


def test_every_tool_names_its_parameters_as_the_actions_do() -> None:
    for verb in VERBS.values():
        keys = {"value", "action", "accept"} if verb.tool else set()
        for action in verb.actions:
            keys |= {leaf.key for leaf in leaves_of(ACTION_TYPES[action])}
        assert {each.name for each in verb.parameters} <= keys


def test_an_input_without_meaning_for_the_action_is_refused_and_so_is_a_missing_one() -> None:
    for refused, code, said in (
        (lambda: build("wait", {"url": "x", "hidden": True}), "ARG_ERROR", "hidden has no meaning"),
        (lambda: build("tabs", {"action": "list", "tab": "t2"}), "ARG_ERROR", "tab has no meaning"),
        (lambda: build_tool("tabs", {"uri": "https://x"}), "ARG_ERROR", "uri has no meaning"),
        (lambda: build_tool("wait", {"expectedUrl": "x", "state": "hidden"}), "ARG_ERROR", "state has no meaning"),
        (lambda: build_tool("hover", {}), "MISSING_ARGUMENT", "ref, textEquals"),
        (lambda: build_tool("tabs", {"action": "switch"}), "MISSING_ARGUMENT", "tab"),
        (lambda: build_tool("open", {}), "MISSING_ARGUMENT", "uri"),
    ):
        with pytest.raises(Failure, match=said) as failure:
            refused()
        assert failure.value.code == code
