"""`shotclock check`, `plan` and `schema` as they are called: one envelope, the right exit code, no hang."""

import os
from pathlib import Path
from typing import Any

import pytest

from shotclock.flows.cli.check import read_run_duration

pytestmark = pytest.mark.usefixtures("no_survivors")

# Far below the commands' own 30 s: a clear answer, not a timeout.
AT_ONCE_S = 15.0

GOOD = "timeout: 10m\nsteps:\n  a: {exec: touch ran, timeout: 5}\n  b: {exec: touch ran, depends_on: a}\n"
WRONG = "nmae: x\nsteps:\n  a:\n    exec: touch ran\n    timeot: 5\n"


@pytest.fixture
def flow(tmp_path: Path) -> Path:
    return tmp_path / "flow.yaml"


def test_a_good_file_is_nothing_to_speak_of(flow: Path, shotclock: Any, validate_envelope: Any) -> None:
    flow.write_text(GOOD)
    ran = shotclock("check", flow, cwd=flow.parent)
    envelope = validate_envelope(ran.json())
    assert ran.code == 0
    assert envelope["data"] == {"file": str(flow), "findings": []}
    assert envelope["meta"]["side_effects"] == "none"
    assert not (flow.parent / "ran").exists()


def test_a_wrong_file_is_exit_code_2_with_everything_that_is_wrong(
    flow: Path, shotclock: Any, validate_envelope: Any
) -> None:
    flow.write_text(WRONG)
    ran = shotclock("check", flow)
    envelope = validate_envelope(ran.json())
    assert ran.code == 2
    assert envelope["error"]["code"] == "WORKFLOW_INVALID"
    assert envelope["error"]["retryable"] is False
    assert envelope["error"]["errors"] == [
        {"field": "nmae", "message": f"{flow}:1:1: unknown key 'nmae'; did you mean 'name'?"},
        {"field": "steps.a.timeot", "message": f"{flow}:5:5: unknown key 'timeot'; did you mean 'timeout'?"},
    ]
    assert envelope["data"]["findings"][1] == {
        "rule": "schema/unknown-key",
        "severity": "error",
        "file": str(flow),
        "line": 5,
        "column": 5,
        "field": "steps.a.timeot",
        "message": "unknown key 'timeot'",
        "suggestion": "did you mean 'timeout'?",
    }
    assert not (flow.parent / "ran").exists()


def test_warnings_alone_are_no_failure(flow: Path, shotclock: Any, validate_envelope: Any) -> None:
    flow.write_text("steps: {a: {exec: x, timeout: 60000}}")
    ran = shotclock("check", flow)
    (finding,) = validate_envelope(ran.json())["data"]["findings"]
    assert (ran.code, finding["rule"], finding["severity"]) == (0, "clock/unit", "warning")


def test_what_is_wrong_in_another_file_carries_its_name(flow: Path, shotclock: Any, validate_envelope: Any) -> None:
    flow.write_text("steps: {a: {type: workflow, workflow: other.yaml}}")
    (flow.parent / "other.yaml").write_text(WRONG)
    ran = shotclock("check", "flow.yaml", cwd=flow.parent)
    envelope = validate_envelope(ran.json())
    assert ran.code == 2
    assert {finding["file"] for finding in envelope["data"]["findings"]} == {"other.yaml"}
    assert envelope["error"]["errors"][1]["message"].startswith("other.yaml:5:5: ")


def test_a_plan_is_told_step_by_step(flow: Path, shotclock: Any, validate_envelope: Any) -> None:
    flow.write_text(GOOD)
    data = validate_envelope(shotclock("plan", flow, cwd=flow.parent).json())["data"]
    assert (data["run_timeout_ms"], data["worst_case_ms"], data["critical_path"]) == (600_000, 65_000, ["a", "b"])
    assert data["steps"][1] == {
        "id": "b",
        "type": "command",
        "finally": False,
        "depends_on": ["a"],
        "any_end_of": [],
        "timeout_ms": 60_000,
        "effective_timeout_ms": 60_000,
        "grace_ms": 5_000,
        "soft_ms": None,
        "wind_down_ms": 5_000,
        "overtime": None,
        "attempts": 1,
        "retry_delays_ms": 0,
        "latest_start_ms": 5_000,
        "latest_end_ms": 65_000,
        "per_item": False,
        "approval_ms": 0,
    }
    assert not (flow.parent / "ran").exists()


def test_there_is_no_plan_of_what_cannot_be_planned(flow: Path, shotclock: Any, validate_envelope: Any) -> None:
    flow.write_text("steps: {a: {exec: x, depends_on: a}}")
    ran = shotclock("plan", flow)
    assert ran.code == 2
    assert "steps" not in validate_envelope(ran.json())["data"]


@pytest.mark.slow
def test_the_callers_limit_is_a_duration_or_milliseconds(flow: Path, shotclock: Any, validate_envelope: Any) -> None:
    flow.write_text(GOOD)
    for written, fits in (("5000", False), ("10m", True), ("PT5S", False)):
        ran = shotclock("check", flow, "--run-timeout", written)
        found = validate_envelope(ran.json())["data"]["findings"]
        assert ran.code == 0 and not any(finding["severity"] == "error" for finding in found)
        assert ("budget/longer-than-run" not in [finding["rule"] for finding in found]) == fits, written


@pytest.mark.slow
def test_a_small_number_without_a_unit_is_refused(flow: Path, shotclock: Any, validate_envelope: Any) -> None:
    flow.write_text(GOOD)
    for command, option in (("run", "--timeout"), ("plan", "--run-timeout")):
        ran = shotclock(command, flow, option, "5")
        (error,) = validate_envelope(ran.json())["error"]["errors"]
        assert ran.code == 2 and error["field"] == option.lstrip("-") and "write 5s" in error["message"]


@pytest.mark.slow
def test_run_refuses_what_check_finds_before_anything_runs(
    flow: Path, shotclock: Any, validate_envelope: Any, tmp_path: Path
) -> None:
    home = {"SHOTCLOCK_HOME": str(tmp_path / "home")}
    for step in ('transform: "{{ output | json }}"', "on_fail: {run: deploy}"):
        flow.write_text(f"steps:\n  deploy: {{exec: touch deployed, {step}}}\n")
        for command in ("check", "run"):
            ran = shotclock(command, flow, env=home)
            error = validate_envelope(ran.json())["error"]
            assert (ran.code, error["code"], error["phase"]) == (2, "WORKFLOW_INVALID", "validation")
            assert error["errors"][0]["message"].startswith(f"{flow}:2:")
        assert not (flow.parent / "deployed").exists()


@pytest.mark.slow
def test_a_caller_with_less_time_than_the_file_asks_for_runs_it_inside_of_that(
    flow: Path, shotclock: Any, validate_envelope: Any, tmp_path: Path
) -> None:
    flow.write_text("steps: {a: {exec: echo done, timeout: 300}, b: {exec: sleep 60, depends_on: a, timeout: 300}}")
    ran = shotclock("run", flow, "--timeout", "2000", env={"SHOTCLOCK_HOME": str(tmp_path / "home")})
    envelope = validate_envelope(ran.json())
    assert (ran.code, envelope["error"]["code"], envelope["meta"]["timeout_ms"]) == (10, "TIMEOUT", 2000)
    assert envelope["data"]["completed"] == ["a"] and envelope["data"]["failed"] == ["b"]


def test_a_limit_that_is_none_is_an_argument_error(flow: Path, shotclock: Any, validate_envelope: Any) -> None:
    for written in ("-5", "9" * 30, "٣", "1.5.5", "nan"):
        with pytest.raises(ValueError):
            read_run_duration(written)
    flow.write_text(GOOD)
    ran = shotclock("check", flow, "--run-timeout", "soon")
    envelope = validate_envelope(ran.json())
    assert (ran.code, envelope["error"]["code"]) == (2, "ARG_ERROR")
    assert envelope["error"]["errors"][0]["field"] == "run-timeout"


def test_the_schema_is_printed(shotclock: Any, validate_envelope: Any) -> None:
    from shotclock.flows.file.schema import json_schema

    assert validate_envelope(shotclock("schema").json())["data"] == json_schema()


# --- files that are none ----------------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_exit_code_5(tmp_path: Path, shotclock: Any, validate_envelope: Any) -> None:
    ran = shotclock("check", tmp_path / "nope.yaml")
    assert (ran.code, validate_envelope(ran.json())["error"]["code"]) == (5, "FILE_NOT_FOUND")


@pytest.mark.slow
def test_a_pipe_a_device_and_a_folder_are_answered_at_once(
    tmp_path: Path, shotclock: Any, validate_envelope: Any
) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", "/dev/zero", tmp_path):
        ran = shotclock("check", path, timeout=AT_ONCE_S)
        envelope = validate_envelope(ran.json())
        assert (ran.code, envelope["error"]["code"]) == (7, "FILE_UNREADABLE"), path
        assert envelope["error"]["suggestion"] == "name a file that holds a workflow"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_told_so(flow: Path, shotclock: Any, validate_envelope: Any) -> None:
    flow.write_text(GOOD)
    flow.chmod(0)
    error = validate_envelope(shotclock("check", flow).json())["error"]
    assert (error["code"], error["suggestion"]) == ("FILE_UNREADABLE", "look at its permissions")


def test_a_file_that_cannot_be_read_though_it_is_one(shotclock: Any, validate_envelope: Any) -> None:
    ran = shotclock("check", "/proc/self/mem", timeout=AT_ONCE_S)
    assert (ran.code, validate_envelope(ran.json())["error"]["code"]) == (7, "FILE_UNREADABLE")


@pytest.mark.slow
def test_a_file_that_takes_too_long_to_read_ends_on_the_clock(
    flow: Path, shotclock: Any, validate_envelope: Any
) -> None:
    flow.write_text("!" * 3_900_000)  # a tag that ruamel reads in the square of its length
    ran = shotclock("check", flow, "--timeout", "1s", timeout=AT_ONCE_S)
    envelope = validate_envelope(ran.json())
    assert (ran.code, envelope["error"]["code"], envelope["meta"]["ending"]) == (10, "TIMEOUT", "killed")


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["flow.yaml", "--run-id", "../up"], ["run-id"]),
        (["--resume", "r", "--input", "n=1", "--timeout", "5m", "--run-id", "s"], ["timeout", "input", "run-id"]),
    ],
)
def test_what_no_run_can_be_told_is_refused_before_anything_runs(
    words: list[str], fields: list[str], flow: Path, shotclock: Any, validate_envelope: Any
) -> None:
    flow.write_text(GOOD)
    ran = shotclock("run", *words, cwd=flow.parent, env={"SHOTCLOCK_HOME": str(flow.parent / "home")})
    envelope = validate_envelope(ran.json())
    assert ran.code == 2 and envelope["error"]["code"] == "ARG_ERROR"
    assert sorted(error["field"] for error in envelope["error"]["errors"]) == sorted(fields)
    assert not (flow.parent / "ran").exists()
