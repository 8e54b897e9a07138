"""Files of Visor through the command: imported or refused as expected, and run."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shotclock.core.envelope import Envelope
from shotclock.flows.visor._writer import find_errors
from shotclock.flows.visor.importing import import_file
from tests.conftest import Ran

from .foreign_files import EXPECTED, FILES, HERE, described, names, outcome_of

OUTCOMES = json.loads(EXPECTED.read_text())
RUNS = json.loads((HERE / "runs.json").read_text())
KEYS = dict.fromkeys(("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GOOGLE_API_KEY"), "key")  # of models
Command = Callable[..., Ran]
Run = Callable[..., Envelope]


def test_each_file_is_refused_or_becomes_a_valid_one_with_these_notes() -> None:
    assert names() == sorted(OUTCOMES)
    for name, expected in OUTCOMES.items():
        assert outcome_of(name) == expected, name
        if isinstance(expected, list):
            assert find_errors(import_file(str(FILES / name)).text, FILES) == [], name


@pytest.mark.slow
def test_the_commands_import_and_check_files(shotclock: Command, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    shutil.copytree(FILES, folder)
    env = {"SHOTCLOCK_HOME": str(tmp_path / "home"), **KEYS}
    refused = [name for name, expected in OUTCOMES.items() if isinstance(expected, str)]
    imported = [name for name, expected in OUTCOMES.items() if isinstance(expected, list)]
    assert len(refused) >= 3 and len(imported) >= 30
    for name in [refused[0], *imported[::16]]:
        expected = OUTCOMES[name]
        ran = shotclock("import", name, "--output", f"out-{name}", "--json", cwd=folder, env=env)
        answer = ran.json()
        if isinstance(expected, str):
            assert (ran.code, answer["error"]["code"]) == (2, "WORKFLOW_INVALID")
            assert answer["error"]["message"].replace(f"{folder}/", "") == expected
            assert not (folder / f"out-{name}").exists()
            continue
        assert described(answer["data"]["notes"]) == expected
        checked = shotclock("check", f"out-{name}", "--json", cwd=folder, env=env)
        assert checked.code == 0, checked.stdout


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_an_imported_file_does_what_visor_did(number: int, run: Run) -> None:
    case = RUNS[number]
    text = import_file(str(FILES / case["file"])).text
    variables = {"PATH": os.environ["PATH"], "HOME": "/home/someone", **case.get("environment", {})}
    envelope = run(text, inputs=case.get("inputs", {}), environment=variables)
    steps = envelope.data["steps"]
    outputs = {name: each["output"] for name, each in steps.items() if each["status"] == "succeeded"}
    wanted = case.get("outputs", {})
    assert {name: outputs.get(name) for name in wanted} == wanted, steps
    assert sorted(name for name, each in steps.items() if each["status"] == "failed") == case.get("failed", [])
    if "succeeded" in case:
        assert sorted(outputs) == case["succeeded"]


def test_check_plan_and_run_name_the_command_that_imports(shotclock: Command, tmp_path: Path) -> None:
    file = str(FILES / "github-ops.yaml")
    for command in ("check", "plan", "run"):
        ran = shotclock(command, file, "--json", cwd=tmp_path, env={"SHOTCLOCK_HOME": str(tmp_path / "home")})
        assert ran.code == 2
        assert f"shotclock import {file}" in ran.json()["error"]["suggestion"]


def test_what_cannot_be_imported_says_what_to_do(shotclock: Command, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "ci.yml").write_text("on: push\njobs: {a: {runs-on: ubuntu-latest, steps: [{run: echo a}]}}\n")
    (tmp_path / "Makefile").write_text("build:\n\tgo build\n")
    hints = {
        "Makefile": ("WORKFLOW_INVALID", "name a file of Visor"),
        "ci.yml": ("WORKFLOW_INVALID", "files of other tools are not supported"),
        "-": ("ARG_ERROR", "write it to a file"),
        "missing.yml": ("FILE_NOT_FOUND", "check the spelling"),
        "folder": ("FILE_UNREADABLE", "name a file"),
    }
    for name, (code, hint) in hints.items():
        answer = shotclock("import", name, "--json", cwd=tmp_path).json()
        assert answer["error"]["code"] == code, name
        assert hint in answer["error"]["suggestion"], name


def test_the_file_that_is_read_is_never_overwritten(shotclock: Command, tmp_path: Path) -> None:
    text = "steps: {a: {type: noop, group: x}}\n"
    (tmp_path / "visor.yaml").write_text(text)
    (tmp_path / "link.yml").symlink_to("visor.yaml")
    for output in ("./visor.yaml", "link.yml"):
        answer = shotclock("import", "visor.yaml", "--output", output, "--force", "--json", cwd=tmp_path).json()
        assert (answer["error"]["code"], answer["error"]["message"]) == (
            "ARG_ERROR",
            "--output is the file that is read",
        )
    assert (tmp_path / "visor.yaml").read_text() == text


def test_the_steps_that_fail_are_named_first_and_counted(shotclock: Command, tmp_path: Path) -> None:
    (tmp_path / "visor.yaml").write_text(
        "steps:\n"
        "  a: {type: noop, group: x}\n"
        "  b: {type: memory}\n"
        "  c: {type: script, content: 'return 1'}\n"
        "  d: {exec: 'echo {{ outputs.a }}', timeout: 5000}\n"
    )
    ran = shotclock("import", "visor.yaml", "--output", "flow.yaml", "--format", "text", cwd=tmp_path)
    kinds = [line.split(": ")[1] for line in ran.stderr.decode().splitlines()]
    assert kinds[:2] == ["fails", "fails"] and {"left out", "different here"} == set(kinds[2:])
    assert ran.stdout.decode().endswith(f"flow.yaml: written, with {len(kinds)} notes; 2 steps will fail\n")
    assert (tmp_path / "flow.yaml").read_text().splitlines()[2] == "# Fails instead:"
    data = shotclock("import", "visor.yaml", "--json", cwd=tmp_path).json()["data"]
    assert data["failing"] == ["b", "c"]
    assert [note["fails"] for note in data["notes"]][:3] == [True, True, False]


def test_a_file_of_json_is_imported(shotclock: Command, tmp_path: Path) -> None:
    (tmp_path / "visor.json").write_text('{"version": "1.0", "checks": {"a": {"type": "noop"}}}')
    ran = shotclock("import", "visor.json", cwd=tmp_path)
    assert (ran.code, ran.stdout.splitlines()[0]) == (0, b"# Imported from visor.json by shotclock import.")
