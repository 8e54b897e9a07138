"""What is refused before anything runs has one shape, whoever refuses it."""

import itertools
import json
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.commands import exec as exec_command
from shotclock.main import INDEX, load, main
from shotclock.terminal.parser import CommandTable, Option, Subcommand
from shotclock.terminal.subcommand import find_work

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


# --- every subset of the options ------------------------------------------------------------------------------

# Called, these would serve, watch, start devices, stop processes or answer an agent: their words are only read.
ONLY_READ = {"serve", "wrap", "worker", "engine", "doctor", "watch", "hook"}
LOADED = {name: load(name) for name in INDEX if name not in ("exec", "timeout")}


def spellings_of(parameter: Option) -> list[list[str]]:
    """A right value, a wrong one, none, and a name with a typing mistake."""
    right = parameter.choices[0] if parameter.choices else "x"
    for text in ("1", "10ms", "a=b", "temporal://127.0.0.1:9"):
        try:
            if parameter.read is not None and not parameter.choices:
                parameter.read(text)
                right = text
                break
        except ValueError:
            continue
    if not parameter.name.startswith("--"):
        return [[right], ["?!"]]
    if not parameter.metavar:
        return [[parameter.name], [f"{parameter.name}=maybe"], [f"{parameter.name[:-1]}x"]]
    name = parameter.name
    return [[name, right], [name, "?!"], [name], [f"{name}="], [f"{name[:-1]}x", "?!"]]


def subsets_of(command: Subcommand, size: int, chance: random.Random) -> Iterator[list[str]]:
    for some in itertools.combinations(command.own, size):
        for _ in range(1 if size != 1 else 3):
            yield [word for each in some for word in chance.choice(spellings_of(each))]


def command_lines(largest: int, most_pairs: int) -> Iterator[tuple[list[str], bool]]:
    """Every subcommand with subsets of its options, and whether it may be called."""
    chance = random.Random(21)
    for size in range(largest + 1):
        found: list[tuple[list[str], bool]] = []
        for name, loaded in LOADED.items():
            for command in loaded.commands if isinstance(loaded, CommandTable) else [loaded]:
                may_be_called = name != "ui" and name not in ONLY_READ and command.name not in ONLY_READ
                verb = [command.name] if isinstance(loaded, CommandTable) else []
                found += [([name, *verb, *words], may_be_called) for words in subsets_of(command, size, chance)]
        found += [(["exec", *words], False) for words in subsets_of(exec_command.COMMAND, size, chance)]
        yield from found if size < 2 else chance.sample(found, min(most_pairs, len(found)))


def only_read(words: list[str]) -> None:
    if words[0] == "exec":
        exec_command.parse([*words[1:], "--", "true"])
    else:
        loaded = LOADED[words[0]]
        command = loaded.find(words[1]) if isinstance(loaded, CommandTable) else loaded
        assert command is not None
        find_work(words[0], command, command.read(words[1 + isinstance(loaded, CommandTable) :]))


def find_unanswered(largest: int, most_pairs: int) -> list[str]:
    """Call every line in this process, whose stdout is a file. Return those that were not answered by an envelope."""
    found = []
    for words, may_be_called in command_lines(largest, most_pairs):
        sys.stdout.seek(0)
        sys.stdout.truncate()
        try:
            if may_be_called:
                main([*words, "--json"])
                sys.stdout.flush()
                printed = Path("printed").read_text()
                is_text = any(word in ("markdown", "junit") for word in words)
                assert is_text or {"ok", "data", "error", "warnings", "meta"} == set(json.loads(printed)), printed
            else:
                only_read(words)
        except BaseException:
            found.append(f"{words}: {traceback.format_exc()}")
    return found


@pytest.mark.parametrize(
    ("largest", "most_pairs"),
    [pytest.param(2, 300, marks=pytest.mark.slow), pytest.param(3, 20_000, marks=pytest.mark.soak, id="soak")],
)
def test_every_subset_of_options_is_answered_by_an_envelope_and_never_by_a_traceback(
    largest: int, most_pairs: int, tmp_path: Path
) -> None:
    call_all = (
        f"from tests.test_refusals import *; sys.stderr.write(json.dumps(find_unanswered({largest}, {most_pairs})))"
    )
    with open(tmp_path / "printed", "w") as printed:
        ended = subprocess.run(
            [sys.executable, "-c", call_all],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "HOME": str(tmp_path),  # configurations of agents are there
                "SHOTCLOCK_HOME": str(tmp_path / "home"),
                "SHOTCLOCK_RESPONSE_TIMEOUT": "10ms",
            },
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.PIPE,
            timeout=WITHIN_S * (30 if largest > 2 else 2),
        )
    assert json.loads(ended.stderr.splitlines()[-1]) == [], ended.stderr


def test_an_unknown_option_of_run_is_refused_in_words(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "shotclock", "run", "flow.yaml", "--just", "b", "--json"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=WITHIN_S,
    )
    [mistake] = json.loads(ended.stdout)["error"]["errors"]
    assert ended.returncode == 2 and mistake["field"] == "--just" and "unknown option" in mistake["message"]


def test_the_words_of_other_tools_are_answered_with_ours(shotclock: Callable[..., Any]) -> None:
    for words, hint in (
        (["wait", "--text", "x"], "write shotclock ui wait"),
        (["snapshot"], "write shotclock ui snapshot"),
        (["wait-for-nav", "--timeout", "5000"], "write shotclock ui wait-for-nav"),
        (["execute", "--execution", "{}"], "write shotclock ui exec"),
        (["--check", "all", "--timeout", "300000"], "write shotclock run FLOW"),
        (["rap", "--config", "x"], "did you mean wrap?"),
        (["ui", "wait", "--desc", "x"], "write --label"),
        (["ui", "click", "--coordinate", "3,4"], "write --at X,Y"),
        (["ui", "exec", "best-effort"], '"mode": "best_effort"'),
        (["run", "--check", "all"], "--only STEP,STEP"),
        (["run", "--config", "flow.yaml"], "write shotclock run FLOW"),
        (["run", "flow.yaml", "--debug"], "--events FILE"),
        (["run", "flow.yaml", "--max-parallelism", "3"], "write `max_parallelism` in FLOW"),
        (["run", "flow.yaml", "--fail-fast"], "write `fail_fast` in FLOW"),
    ):
        error = shotclock(*words, "--json").json()["error"]
        assert hint in f"{error['message']} {error['suggestion']}", (words, error)
