"""Files of each kind through the command: enough of them, imported or refused as expected, and run."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.workflow.foreign.importing import import_file
from shotclock.workflow.foreign.writer import find_errors
from tests.conftest import Ran

from .foreign_files import EXPECTED, HERE, KINDS, RUN_AT_LEAST, described, names, outcome_of

OUTCOMES = json.loads(EXPECTED.read_text())
RUNS = json.loads((HERE / "runs.json").read_text())
KEYS = dict.fromkeys(("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GOOGLE_API_KEY"), "key")  # of models
STOP_AFTER_S = 1.0
Command = Callable[..., Ran]
Run = Callable[..., Envelope]


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_enough_files_and_enough_of_them_are_run(kind: str) -> None:
    assert len(names(kind)) >= KINDS[kind]
    assert names(kind) == sorted(OUTCOMES[kind])
    assert 2 <= sum(isinstance(each, str) for each in OUTCOMES[kind].values()) <= len(names(kind)) // 4
    assert len({case["file"] for case in RUNS[kind]}) >= RUN_AT_LEAST


FILES = [(kind, name) for kind in KINDS for name in OUTCOMES[kind]]


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_file_is_refused_or_becomes_a_valid_one_with_these_notes(kind: str, name: str) -> None:
    assert outcome_of(kind, name) == OUTCOMES[kind][name]
    if isinstance(OUTCOMES[kind][name], list):
        assert find_errors(import_file(str(HERE / kind / name), kind).text, HERE / kind) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), FILES)
def test_the_commands_import_and_check_a_file(kind: str, name: str, shotclock: Command, tmp_path: Path) -> None:
    folder = tmp_path / kind
    shutil.copytree(HERE / kind, folder)
    expected = OUTCOMES[kind][name]
    env = {"SHOTCLOCK_HOME": str(tmp_path / "home"), **KEYS}
    ran = shotclock("import", name, "--kind", kind, "--output", "flow.yaml", "--json", cwd=folder, env=env)
    answer = ran.json()
    if isinstance(expected, str):
        assert (ran.code, answer["error"]["code"]) == (2, "WORKFLOW_INVALID")
        assert answer["error"]["message"].replace(f"{folder}/", "") == expected
        assert not (folder / "flow.yaml").exists()
        return
    assert described(answer["data"]["notes"]) == expected
    checked = shotclock("check", "flow.yaml", "--json", cwd=folder, env=env)
    assert checked.code == 0, checked.stdout


@pytest.mark.parametrize(("kind", "number"), [(kind, number) for kind in KINDS for number in range(len(RUNS[kind]))])
def test_an_imported_file_does_what_the_other_tool_did(kind: str, number: int, run: Run, tmp_path: Path) -> None:
    case = RUNS[kind][number]
    text = import_file(str(HERE / kind / case["file"]), kind).text
    variables = {"PATH": os.environ["PATH"], "HOME": "/home/someone", **case.get("environment", {})}
    envelope = run(text, inputs=case.get("inputs", {}), environment=variables)
    steps = envelope.data["steps"]
    outputs = {name: each["output"] for name, each in steps.items() if each["status"] == "succeeded"}
    wanted = case.get("outputs", {})
    assert {name: outputs.get(name) for name in wanted} == wanted, steps
    assert sorted(name for name, each in steps.items() if each["status"] == "failed") == case.get("failed", [])
    assert not [name for name in case.get("skipped", []) if steps[name]["status"] != "skipped"]
    if "succeeded" in case:
        assert sorted(outputs) == case["succeeded"]
    if "artifacts" in case:
        assert [each["file"] for step in steps.values() for each in step.get("artifacts", [])] == case["artifacts"]
    if "audit" in case:
        is_ordered = kind != "actions"  # whose jobs run at once
        lines = (tmp_path / "audit").read_text().splitlines()
        assert (lines if is_ordered else sorted(lines)) == (case["audit"] if is_ordered else sorted(case["audit"]))


def test_a_variable_that_has_to_be_set_is_asked_for_before_anything_runs(run: Run) -> None:
    text = import_file(str(HERE / "actions" / "variables.yml"), "actions").text
    with pytest.raises(Failure, match="the variable GITHUB_REF is not set"):
        run(text, environment={"PATH": os.environ["PATH"], "SHOP": "a"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "inputs", "lines"),
    [
        ("dagu", "handlers.yaml", {"SECONDS": "30"}, ["cancel", "exit aborted"]),
        ("taskfile", "deferred.yml", {"task": "long"}, ["stopped"]),
    ],
)
def test_what_comes_last_also_runs_when_the_run_is_stopped(
    kind: str, name: str, inputs: dict[str, Any], lines: list[str], run: Run, tmp_path: Path
) -> None:
    text = import_file(str(HERE / kind / name), kind).text
    envelope = run(text, inputs=inputs, stop_after=STOP_AFTER_S)
    assert envelope.error is not None
    found = (tmp_path / "audit").read_text().splitlines()
    assert [line for line in found if line != "init"] == lines  # which a slow machine has not begun by then


@pytest.mark.slow
def test_the_handlers_of_dagu_have_time_of_their_own_after_the_timeout(run: Run, tmp_path: Path) -> None:
    text = import_file(str(HERE / "dagu" / "handlers-late.yaml"), "dagu").text
    assert "timeout: 130s\n" in text  # 2 for the steps; 60, 5 and 60 for the handlers, and one more for each
    envelope = run(text)
    assert envelope.error is not None and envelope.error["code"] == "TIMEOUT"
    assert (tmp_path / "audit").read_text().splitlines() == ["failure", "exit failed late"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("visor", "github-ops.yaml"), ("actions", "ci.yml"), ("taskfile", "simple.yml"), ("dagu", "chain.yaml")],
)
def test_check_plan_and_run_name_the_command_that_imports(
    kind: str, name: str, shotclock: Command, tmp_path: Path
) -> None:
    file = str(HERE / kind / name)
    for command in ("check", "plan", "run"):
        ran = shotclock(command, file, "--json", cwd=tmp_path, env={"SHOTCLOCK_HOME": str(tmp_path / "home")})
        assert ran.code == 2
        assert f"shotclock import {file}" in ran.json()["error"]["suggestion"]


def test_what_cannot_be_imported_says_what_to_do(shotclock: Command, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "ours.yaml").write_text("steps: {a: {exec: echo a}}\n")
    (tmp_path / "any.json").write_text('{"a": 1}')
    (tmp_path / "text.txt").write_text("hello\n")
    (tmp_path / "ci.yml").write_text("on: push\njobs: {a: {runs-on: ubuntu-latest, steps: [{run: echo a}]}}\n")
    (tmp_path / "Makefile").write_text("build:\n\tgo build\n")
    (tmp_path / ".gitlab-ci.yml").write_text("build: {script: [make]}\n")
    hints = {
        ("Makefile",): ("WORKFLOW_INVALID", "not supported: name a file of Visor, GitHub Actions, Task, Dagu"),
        (".gitlab-ci.yml",): ("WORKFLOW_INVALID", "other tools are not supported"),
        ("-",): ("ARG_ERROR", "write it to a file"),
        ("missing.yml",): ("FILE_NOT_FOUND", "check the spelling"),
        ("folder",): ("FILE_UNREADABLE", "name a file"),
        ("ours.yaml",): ("WORKFLOW_INVALID", "run it with `shotclock run ours.yaml`"),
        ("any.json",): ("WORKFLOW_INVALID", "--kind visor|actions|taskfile|dagu"),
        ("text.txt",): ("WORKFLOW_INVALID", "name a file of Visor, GitHub Actions, Task, Dagu"),
        ("ci.yml", "--kind", "dagu"): ("WORKFLOW_INVALID", "leave out --kind"),
    }
    for words, (code, hint) in hints.items():
        answer = shotclock("import", *words, "--json", cwd=tmp_path).json()
        assert answer["error"]["code"] == code, words
        assert hint in answer["error"]["suggestion"], words


def test_the_file_that_is_read_is_never_overwritten(shotclock: Command, tmp_path: Path) -> None:
    text = "on: push\njobs: {a: {runs-on: ubuntu-latest, steps: [{run: echo a}]}}\n"
    (tmp_path / "ci.yml").write_text(text)
    (tmp_path / "link.yml").symlink_to("ci.yml")
    for output in ("ci.yml", "./ci.yml", "link.yml"):
        answer = shotclock("import", "ci.yml", "--output", output, "--force", "--json", cwd=tmp_path).json()
        assert (answer["error"]["code"], answer["error"]["message"]) == (
            "ARG_ERROR",
            "--output is the file that is read",
        )
    assert (tmp_path / "ci.yml").read_text() == text


def test_the_steps_that_fail_are_named_first_and_counted(shotclock: Command, tmp_path: Path) -> None:
    name = str(HERE / "actions" / "windows.yml")
    ran = shotclock("import", name, "--output", "flow.yaml", "--format", "text", cwd=tmp_path)
    assert ran.stdout.decode().endswith("flow.yaml: written, with 4 notes; 2 steps will fail\n")
    kinds = [line.split(": ")[1] for line in ran.stderr.decode().splitlines()]
    assert kinds == ["fails", "fails", "left out", "different here"]
    assert (tmp_path / "flow.yaml").read_text().splitlines()[2] == "# Fails instead:"
    data = shotclock("import", name, "--json", cwd=tmp_path).json()["data"]
    assert data["failing"] == ["build", "posh-1"]
    assert [note["fails"] for note in data["notes"]] == [True, True, False, False]


def test_a_file_of_json_is_imported(shotclock: Command, tmp_path: Path) -> None:
    (tmp_path / "Taskfile.json").write_text('{"version": "3", "tasks": {"default": "echo hi"}}')
    ran = shotclock("import", "Taskfile.json", cwd=tmp_path)
    assert (ran.code, ran.stdout.splitlines()[0]) == (
        0,
        b"# Imported from Taskfile.json (taskfile) by shotclock import.",
    )
