"""What is refused before anything runs has one shape, whoever refuses it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("warm_starts")

WITHIN_S = 60.0
FLOW = """
inputs: {count: {type: integer, required: true}}
steps: {one: {exec: touch ran}}
"""
NEEDS = """
steps: {one: {exec: touch ran, env: {KEY: "${NOBODY_SET_THIS}"}}}
"""


@pytest.mark.parametrize(
    ("words", "variables", "field"),
    [
        (["run", "flow.yaml", "--input", "count=many"], {}, "inputs.count"),
        (["run", "flow.yaml", "--input", "count=1", "--input", "other=1"], {}, "inputs.other"),
        (["run", "flow.yaml"], {}, "inputs.count"),
        (["run", "needs.yaml"], {}, "steps.one.env.KEY"),
        (["run", "outer.yaml"], {"SHOTCLOCK_RESPONSE_TIMEOUT": "soon"}, "SHOTCLOCK_RESPONSE_TIMEOUT"),
        (["prune"], {"SHOTCLOCK_KEEP_RUNS": "soon"}, "SHOTCLOCK_KEEP_RUNS"),
        (["inbox", "propose", "--title", "x", "--type", "operation"], {}, None),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_wrong_arguments_are_listed_in_error_errors_and_nothing_ran(
    tmp_path: Path,
    words: list[str],
    variables: dict[str, str],
    field: str | None,
    validate_envelope: Callable[[Any], Any],
) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW)
    (tmp_path / "needs.yaml").write_text(NEEDS)
    (tmp_path / "outer.yaml").write_text("steps: {one: {exec: touch ran, approval: true}}")
    ended = subprocess.run(
        [sys.executable, "-m", "shotclock", *words, "--json"],
        cwd=tmp_path,
        env={**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home"), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=WITHIN_S,
    )
    answer = validate_envelope(json.loads(ended.stdout))
    error, meta = answer["error"], answer["meta"]
    assert ended.returncode == 2 and error["code"] == "ARG_ERROR", answer
    assert error["phase"] == "validation"
    assert (meta["ending"], meta["side_effects"]) == ("not_started", "none")
    assert "errors" not in error.get("context", {})
    assert error["errors"] and all(set(each) == {"field", "message"} for each in error["errors"])
    assert field is None or field in {each["field"] for each in error["errors"]}
    assert not (tmp_path / "ran").exists()


def test_wrong_inputs_of_a_workflow_inside_another_have_the_same_shape(tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(FLOW)
    (tmp_path / "outer.yaml").write_text("steps: {one: {type: workflow, workflow: inner.yaml, inputs: {count: many}}}")
    ended = subprocess.run(
        [sys.executable, "-m", "shotclock", "run", "outer.yaml", "--json"],
        cwd=tmp_path,
        env={**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=WITHIN_S,
    )
    error = json.loads(ended.stdout)["data"]["steps"]["one"]["error"]
    assert (error["code"], error["phase"]) == ("ARG_ERROR", "validation")
    assert [each["field"] for each in error["errors"]] == ["inputs.count"] and "errors" not in error["context"]
