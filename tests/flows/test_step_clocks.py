"""The table of DESIGN §6: which key bounds a kind of step, what a bare number means there, what holds otherwise."""

from typing import Any

import pytest

from shotclock.core.limits import MAX_MS
from shotclock.flows.check.plan import grace_ms, plan_of, run_timeout_ms, step_timeout_ms
from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.steps.provider import STEP_TYPES
from tests.rows import row

# What a step of each kind needs at least.
LEAST: dict[str, dict[str, Any]] = {
    "command": {"exec": "true"},
    "http_client": {"url": "http://127.0.0.1/"},
    "mcp": {"url": "http://127.0.0.1/mcp", "method": "ask"},
    "tool": {"tool": "count"},
    "git-checkout": {},
    "human-input": {"prompt": "Go on?"},
    "function": {"target": "app.py:app", "command": "go"},
    "workflow": {"workflow": "other.yaml"},
    "ai": {"prompt": "Is it good?"},
    "ui": {
        "execution": {
            "commandId": "c",
            "taskId": "t",
            "source": "test",
            "expectedFormat": "android-ui-automator",
            "timeoutMs": 30_000,
            "actions": [{"id": "snap", "type": "snapshot_ui"}],
        }
    },
}
# kind, key, what 1500 means there in milliseconds, default in milliseconds (0: none, None: the run's).
TABLE = [
    ("command", "timeout", 1_500_000, 60_000),
    ("http_client", "timeout", 1_500, 30_000),
    ("mcp", "timeout", 1_500_000, 60_000),
    ("human-input", "timeout", 1_500_000, 0),
    ("tool", "timeout", 1_500, 30_000),
    ("git-checkout", "clone_timeout_ms", 1_500, 300_000),
    ("workflow", "timeout", 1_500_000, None),
    ("function", "timeout", 1_500_000, 30_000),
    ("ai", "ai.timeout", 1_500, 600_000),
    ("ui", "timeout", 1_500, 36_000),
]


def workflow(kind: str, top: dict[str, Any] | None = None, **said: Any) -> WorkflowFile:
    for key in [key for key in said if "." in key]:  # inside of one of its parts
        part, _, name = key.partition(".")
        said[part] = {name: said.pop(key)}
    return WorkflowFile.model_validate({**(top or {}), "steps": {"it": {"type": kind, **LEAST[kind], **said}}})


def timeout_ms(flow: WorkflowFile) -> int | None:
    return step_timeout_ms(flow, flow.steps["it"])


def test_the_table_has_every_kind() -> None:
    assert {kind for kind, *_ in TABLE} == set(STEP_TYPES) == LEAST.keys()


def test_the_key_that_bounds_a_step() -> None:
    for kind, key, _, _ in TABLE:
        with row(kind):
            assert STEP_TYPES[kind].timeout_key == key
            assert key.partition(".")[0] in STEP_TYPES[kind].schema.model_fields


def test_a_bare_number_has_the_unit_of_its_kind() -> None:
    for kind, key, meant_ms, _ in TABLE:
        with row(kind):
            assert timeout_ms(workflow(kind, **{key: 1500})) == meant_ms
            if key == "timeout":
                assert timeout_ms(workflow(kind, timeout="1500")) == meant_ms
                assert timeout_ms(workflow(kind, timeout=1500.0)) == meant_ms


def test_what_holds_when_nothing_is_said() -> None:
    for kind, _, _, default_ms in TABLE:
        with row(kind):
            assert timeout_ms(workflow(kind)) == default_ms


def test_text_with_a_unit_means_the_same_everywhere() -> None:
    for kind, _, _, _ in TABLE:
        with row(kind):
            for written, ms in {
                "500ms": 500,
                "30s": 30_000,
                "5m": 300_000,
                "1h30m": 5_400_000,
                "PT30S": 30_000,
            }.items():
                assert timeout_ms(workflow(kind, timeout=written)) == ms


def test_zero_is_none() -> None:
    for kind, key, _, _ in TABLE:
        with row(kind):
            for written in (0, "0", "0s", "PT0S") if key == "timeout" else (0,):
                assert timeout_ms(workflow(kind, **{key: written})) == 0
                assert plan_of(workflow(kind, **{key: written})).steps[0].ends_ms is None


def test_a_default_of_the_file_holds_for_every_kind_that_has_one() -> None:
    for kind in [kind for kind, *_ in TABLE if kind != "workflow"]:
        with row(kind):
            top = {"defaults": {"timeout": "7s"}}
            assert timeout_ms(workflow(kind, top)) == 7_000
            assert timeout_ms(workflow(kind, top, timeout="9s")) == 9_000


def test_a_workflow_in_a_workflow_has_the_time_of_its_parent_whatever_the_defaults_say() -> None:
    assert timeout_ms(workflow("workflow", {"defaults": {"timeout": "7s"}})) is None


def test_of_two_timeouts_of_a_checkout_its_own_key_counts() -> None:
    assert timeout_ms(workflow("git-checkout", timeout="9s", clone_timeout_ms=4_000)) == 4_000


def test_the_timeout_of_a_run_is_in_seconds() -> None:
    assert run_timeout_ms(workflow("command", {"timeout": 90})) == 90_000
    assert run_timeout_ms(workflow("command", {"timeout": "90"})) == 90_000
    assert run_timeout_ms(workflow("command", {"timeout": "90ms"})) == 90
    assert run_timeout_ms(workflow("command", {"timeout": 0})) is None
    assert run_timeout_ms(workflow("command")) is None


def test_grace_has_the_unit_of_its_kind_too() -> None:
    for kind, ms in [("command", 2_000), ("http_client", 2), ("tool", 2), ("mcp", 2_000)]:
        with row(kind, ms):
            flow = workflow(kind, grace=2)
            assert grace_ms(flow, flow.steps["it"]) == ms


def test_no_grace_is_not_the_default_grace() -> None:
    for top, said, ms in [({}, {"grace": 0}, 0), ({"defaults": {"grace": "0s"}}, {}, 0), ({}, {}, 5_000)]:
        flow = workflow("command", top, **said)
        assert grace_ms(flow, flow.steps["it"]) == plan_of(flow).steps[0].grace_ms == ms


# --- what is no duration ----------------------------------------------------------------------------------

REFUSED = [
    -1,
    -0.5,
    "-5s",
    "soon",
    "",
    " ",
    "5 s",
    "s",
    "1m1h",
    "5x",
    "1_000",
    "1:30",
    "٣٠",
    ".5",
    "5.",
    "1e3",
    True,
    [],
]
REFUSED += [{}, "P", "PT", 10**30, "9" * 70, 1e300, "4000d", 1e-9, "0.1ms", "0x10", "30S", float("inf"), float("nan")]


def test_what_is_no_duration_is_refused_for_every_clock() -> None:
    for key in ["timeout", "soft", "idle", "grace"]:
        for written in REFUSED:
            with row(key, written):
                for kind in STEP_TYPES:
                    with pytest.raises(ValueError, match=rf"{key}\n"):
                        workflow(kind, **{key: written})
                for top in ({"timeout": written}, {"defaults": {key: written}}):
                    if "timeout" in top or key in top["defaults"]:
                        with pytest.raises(ValueError, match=r"timeout|defaults"):
                            workflow("command", top)


def test_a_fraction_is_looked_at_in_the_unit_of_its_kind() -> None:
    assert timeout_ms(workflow("command", timeout=1.5)) == 1_500
    with pytest.raises(ValueError, match="whole milliseconds"):
        workflow("http_client", timeout=1.5)


def test_the_longest_clock_is_the_same_in_every_unit() -> None:
    assert timeout_ms(workflow("http_client", timeout=MAX_MS)) == MAX_MS
    assert timeout_ms(workflow("command", timeout=MAX_MS // 1000)) == MAX_MS
    assert timeout_ms(workflow("git-checkout", clone_timeout_ms=MAX_MS)) == MAX_MS
    for kind, key, written in [
        ("http_client", "timeout", MAX_MS + 1),
        ("command", "timeout", MAX_MS // 1000 + 1),
        ("git-checkout", "clone_timeout_ms", MAX_MS + 1),
    ]:
        with pytest.raises(ValueError):
            workflow(kind, **{key: written})


def test_a_default_needs_its_unit_because_the_kinds_differ_in_theirs() -> None:
    with pytest.raises(ValueError, match="60 has no unit"):
        workflow("command", {"defaults": {"timeout": 60}})


def test_what_ends_in_ms_is_a_whole_number() -> None:
    for written in ["5s", 1.0, True, -1, "500"]:
        with row(written):
            with pytest.raises(ValueError):
                workflow("git-checkout", clone_timeout_ms=written)
            for key in ("delay_ms", "max_delay_ms"):
                with pytest.raises(ValueError):
                    workflow("command", on_fail={"retry": {"max": 1, "backoff": {key: written}}})
