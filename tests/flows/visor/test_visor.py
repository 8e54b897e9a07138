"""Visor files are imported as workflows that pass `check`, with a note on all that differs."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from shotclock.core.errors import Failure
from shotclock.flows.file.yaml_reader import read_tree
from shotclock.flows.visor._writer import find_errors
from shotclock.flows.visor.importing import import_file, is_of_visor

from .foreign_files import FILES, names

SHOTCLOCK = [sys.executable, "-m", "shotclock"]
LIMIT_S = 60
pytestmark = pytest.mark.usefixtures("warm_starts")
ROUNDS = 120  # of the fuzz test


def run(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, "SHOTCLOCK_HOME": str(cwd / "home"), **env}
    return subprocess.run(
        [*SHOTCLOCK, *words],
        cwd=cwd,
        env=everything,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )


def test_a_value_in_a_command_stays_one_word(tmp_path: Path) -> None:
    text = import_file(str(FILES / "words-in-commands.yaml")).text
    steps = read_tree(text).value["steps"]
    assert steps["use"]["exec"] == "printf '%s' {{ outputs.title }}"


def test_a_condition_that_cannot_be_said_stays_closed() -> None:
    steps = read_tree(import_file(str(FILES / "refused-conditions.yaml")).text).value["steps"]
    assert [steps[name].get("if") for name in "abdeg"] == [False] * 5
    assert [steps[name].get("fail_if") for name in "cf"] == ["true"] * 2


def test_the_notes_are_in_the_answer_and_on_stderr(tmp_path: Path) -> None:
    file = str(FILES / "github-ops.yaml")
    plain = run("import", file, cwd=tmp_path)
    assert plain.stdout.startswith("# Imported from github-ops.yaml by shotclock import.\n")
    assert f"{file}:3: fails: steps.label.type" in plain.stderr
    answer = json.loads(run("import", file, "--json", cwd=tmp_path).stdout)["data"]
    assert {"line": 3, "key": "steps.label.type"} == {key: answer["notes"][0][key] for key in ("line", "key")}
    assert answer["workflow"] == plain.stdout


def test_a_file_is_not_overwritten_without_force(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text("mine")
    words = ("import", str(FILES / "anchors.yaml"), "--output", "flow.yaml")
    assert run(*words, cwd=tmp_path).returncode != 0
    assert (tmp_path / "flow.yaml").read_text() == "mine"
    assert run(*words, "--force", cwd=tmp_path).returncode == 0
    assert (tmp_path / "flow.yaml").read_text().startswith("# Imported")


def test_a_file_of_ours_with_a_mistake_is_not_taken_for_one_of_visor(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("steps: {a: {exec: echo a, timeot: 3}}\n")
    assert not is_of_visor(tmp_path / "ours.yaml")


def bomb() -> bytes:
    """Return a small file of aliases that unfolds into millions of values."""
    lines = [b"a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [b"%c: &%c [%s]" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 106)]
    return b"\n".join(lines)


def test_what_is_no_file_of_visor_is_refused(tmp_path: Path) -> None:
    bad = {
        "empty": b"",
        "binary": bytes(range(256)),
        "list": b"- a\n- b\n",
        "text": b"hello",
        "broken": b"steps: {a: [",
        "documents": b"steps: {}\n---\nsteps: {}\n",
        "alias": b"a: &a [*a]\n",
        "bomb": bomb(),
        "deep": b"steps: " + b"[" * 2000,
        "huge": b"#" * 4_000_001,
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(Failure) as raised:
            import_file(str(tmp_path / name))
        assert raised.value.code == "WORKFLOW_INVALID", name
    with pytest.raises(Failure, match="there is no file"):
        import_file(str(tmp_path / "absent"))


def mutate(text: str, chance: random.Random) -> str:
    """Return a file with a few damaged places."""
    lines = text.splitlines(keepends=True)
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(len(lines))
        line = lines[at]
        match chance.randrange(6):
            case 0:
                lines[at] = ""
            case 1:
                cut = chance.randrange(len(line) + 1)
                lines[at] = line[:cut] + chance.choice("{}[]'\"`|&*!%@:;,.?()#$\\\0é\n") + line[cut:]
            case 2:
                lines[at] = line + line
            case 3:
                key, colon, _ = line.partition(":")
                lines[at] = f"{key}{colon} {chance.choice(['7', 'true', '[]', '{}', 'null', '-1e9', 'x', '[[a]]'])}\n"
            case 4:
                other = chance.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
            case _:
                start = chance.randrange(len(line) + 1)
                lines[at] = line[:start] + line[start + chance.randrange(1, 5) :]
    return "".join(lines)


@pytest.mark.slow
def test_a_damaged_file_is_imported_or_refused(tmp_path: Path) -> None:
    chance = random.Random(26)
    texts = [(FILES / name).read_text() for name in names()]
    accepted = 0
    for number in range(ROUNDS):
        file = tmp_path / "damaged.yaml"
        file.write_text(mutate(chance.choice(texts), chance), encoding="utf-8", errors="replace")
        try:
            made = import_file(str(file))
        except Failure as failure:
            assert failure.code == "WORKFLOW_INVALID", number
        else:
            accepted += 1
            assert find_errors(made.text, tmp_path) == [], number
    assert 10 < accepted < ROUNDS


# The shape of Visor's own examples/negotiated-timeout.yaml, with its helper beside it.
NEGOTIATED = """
version: "1.0"
imports: [./workflows/helper-workflow.yaml]
checks:
  agent:
    type: ai
    prompt: Ask the helper what 2+2 is.
    schema: plain
    ai:
      timeout: 300000
      ai_timeout: 15000
      timeout_behavior: negotiated
      negotiated_timeout_budget: 120000
      negotiated_timeout_max_requests: 2
      negotiated_timeout_max_per_request: 60000
      graceful_stop_deadline: 5000
    ai_custom_tools:
      - workflow: helper
"""
HELPER = """
id: helper
name: Helper
inputs: [{name: question, required: true, schema: {type: string}}]
steps: {answer: {type: ai, prompt: "Answer briefly: {{ inputs.question }}", schema: plain}}
"""


@pytest.mark.slow
def test_an_agent_with_an_imported_workflow_passes_check_plan_and_import_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GOOGLE_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "helper-workflow.yaml").write_text(HELPER)
    (tmp_path / "flow.yaml").write_text(NEGOTIATED)
    imported = run("import", "flow.yaml", "--output", "ours.yaml", "--json", cwd=tmp_path)
    assert imported.returncode == 0, imported.stdout
    assert "helper:\n    workflow: ./workflows/helper-workflow.yaml" in (tmp_path / "ours.yaml").read_text()
    for flow in ("flow.yaml", "ours.yaml"):
        for command in ("check", "plan"):
            answer = json.loads(run(command, flow, cwd=tmp_path).stdout)
            assert answer["ok"], (command, flow, answer)
            findings = {(each["rule"], each["severity"]) for each in answer["data"]["findings"]}
            assert findings == {("ai/key", "warning")}
        refused = json.loads(run("run", flow, "--json", cwd=tmp_path).stdout)
        assert refused["error"]["code"] == "WORKFLOW_INVALID" and "import" not in refused["error"]["suggestion"]
