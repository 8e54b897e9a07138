"""Files of other tools in the folders beside this test: what is noted, that the result is valid, and what it does."""

import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shotclock.workflow.foreign.common import FileRefused, Unconvertible
from shotclock.workflow.foreign.result import Imported
from shotclock.workflow.foreign.taskfile_templates import machine, system
from shotclock.workflow.lint import lint
from shotclock.workflow.loader import load_text
from shotclock.workflow.yaml_reader import read_tree

from .foreign_files import EXPECTED, HERE

KINDS = ("actions", "taskfile", "dagu")
CASES = json.loads(EXPECTED.read_text())


def converter(kind: str) -> ModuleType:
    return importlib.import_module(f"shotclock.workflow.foreign.{kind}")


def imported(kind: str, name: str) -> Imported:
    made: Imported = converter(kind).convert(read_tree((HERE / kind / name).read_text()), name)
    return made


def as_yaml(value: Any, indent: int = 0) -> str:
    """Write a document as block mappings, with every text in double quotes."""
    space = "  " * indent
    if isinstance(value, dict) and value:
        return "".join(f"{space}{json.dumps(key)}:{_inside(item, indent)}" for key, item in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{space}-{_inside(item, indent)}" for item in value)
    return f"{space}{json.dumps(value, ensure_ascii=False)}\n"


def _inside(item: Any, indent: int) -> str:
    return f"\n{as_yaml(item, indent + 1)}" if isinstance(item, dict | list) and item else f" {as_yaml(item)}"


def mistakes(document: dict[str, Any], folder: Path) -> list[str]:
    loaded = load_text(as_yaml(document).encode(), "flow.yaml", folder)
    found = loaded.findings if loaded.workflow is None else lint(loaded)
    # Files of variables are of the machine that runs the workflow.
    return [f"{each.field}: {each.message}" for each in found if each.is_error and each.rule != "env/file"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_is_recognised_by_its_own_converter_alone(kind: str) -> None:
    for name, case in CASES[kind].items():
        document = read_tree((HERE / kind / name).read_text()).value
        assert isinstance(case, str) or converter(kind).looks_like(document, name), name
        for other in set(KINDS) - {kind}:
            assert not converter(other).looks_like(document, "file.yml"), name


def test_a_workflow_of_ours_is_not_taken_for_a_foreign_one() -> None:
    document = {"steps": {"a": {"exec": "true"}, "b": {"exec": "true", "depends_on": ["a"]}}}
    assert not any(converter(kind).looks_like(document, "flow.yaml") for kind in KINDS)


# --- finally, ended, concurrency and tags ---------------------------------------------------------------


def drafted(kind: str, name: str) -> dict[str, Any]:
    document = imported(kind, name).document
    assert document is not None
    return document


def test_steps_after_a_failure_wait_for_the_end_of_others() -> None:
    steps = drafted("actions", "cleanup.yml")["steps"]
    assert steps["build-On-failure"]["depends_on"] == [{"build-Work": "ended"}]
    failed = "steps['build-Start'].status not in ['succeeded', 'skipped']"
    assert steps["build-On-failure"]["if"].startswith(failed)
    assert steps["build-Stop"]["depends_on"] == [{"build-Work": "ended"}, {"build-On-failure": "ended"}]
    assert steps["build-After-all"]["depends_on"] == ["build-Work", "build-On-failure", "build-Stop"]
    assert steps["notify-begin"]["depends_on"] == [{"build-After-all": "ended"}]
    assert "'failure' in [('failure' if steps['build-Start']" in steps["notify-begin"]["if"]
    assert steps["notify"]["depends_on"] == ["notify-begin"]
    assert steps["notify"]["tags"] == ["notify"]


def test_a_deferred_command_is_final_only_for_the_task_that_is_asked_for() -> None:
    document = drafted("taskfile", "deferred.yml")
    chosen = [name for name in document["finally"] if name.startswith("default")]
    assert chosen == ["default-deferred", "default-deferred-2", "default-deferred-3"]
    assert document["finally"]["default-deferred-2"]["depends_on"] == {"default-deferred": "ended"}
    waits = document["steps"]["default-sub-deferred"]["depends_on"]
    assert waits[0] in document["steps"] and {"default-sub-2": "ended"} in waits


def test_a_group_of_runs_is_written_as_concurrency() -> None:
    groups = {
        ("actions", "deploy.yml"): ("deploy", "wait"),
        ("actions", "after-failure.yml"): ("After a failure-{{ inputs.fail }}", "cancel"),
        ("dagu", "chain.yaml"): ("nightly", "wait"),
        ("dagu", "handlers.yaml"): ("handlers", "wait"),
    }
    for (kind, name), (group, on_conflict) in groups.items():
        assert drafted(kind, name)["concurrency"] == {"group": group, "on_conflict": on_conflict}
    assert "concurrency" not in drafted("actions", "groups.yml")


def test_an_upload_is_a_step_that_keeps_files() -> None:
    steps = drafted("actions", "groups.yml")["steps"]
    assert steps["keep-artifacts"]["artifacts"] == [{"path": "out/*.xml", "if_missing": "error"}]
    assert steps["keep-artifacts"]["depends_on"] == ["keep-1"]
    steps = drafted("actions", "after-failure.yml")["steps"]
    assert [each["path"] for each in steps["first-Keep"]["artifacts"]] == ["audit", "*.xml"]


def test_commands_of_a_taskfile_can_be_numbers_and_name_the_platform() -> None:
    text = """
version: "3"
tasks:
  default:
    cmds:
      - cmd: false
      - echo {{OS}}/{{ARCH}}
      - task: docker:up
"""
    made = converter("taskfile").convert(read_tree(text), "Taskfile.yml")
    names = f"{system()}/{machine()}"
    assert f"false\necho {names}" in made.document["steps"]["default"]["exec"]
    assert f"OS and ARCH are those of the machine that imported the file: {names.replace('/', ', ')}" in [
        note.message for note in made.notes
    ]
    (failing,) = [note for note in made.notes if note.is_failing]
    assert (failing.line, failing.key) == (4, "tasks.default")


# --- keys that are neither carried over nor noted -------------------------------------------------------


def places_in(part: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each key."""
    for key, inside in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        if isinstance(part, dict):
            yield (*path, key)
        yield from places_in(inside, (*path, key))


def outcome_without(kind: str, text: str, path: tuple[str | int, ...]) -> tuple[Any, list[tuple[str, str]]]:
    """Return the workflow of a file without a key, before it is checked, and the notes."""
    document = json.loads(text)
    holder = document
    for part in path[:-1]:
        holder = holder[part]
    if path:
        del holder[path[-1]]
    try:
        draft = converter(kind).draft_of(read_tree(json.dumps(document)), "file")
    except (FileRefused, Unconvertible) as refused:
        return str(refused), []
    return json.dumps(draft.document()), sorted((note.key, note.message) for note in draft.notes.written)


# What these say holds in any case: nothing is printed before a command, and an answer of HTTP has only its body.
WITHOUT_EFFECT = {"taskfile": ["silent"], "dagu": ["steps.2.with.silent", "steps.2.with.json"]}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in CASES[kind] if "all-" in name])
def test_each_key_is_carried_over_or_noted(kind: str, name: str) -> None:
    text = json.dumps(read_tree((HERE / kind / name).read_text()).value)
    whole = outcome_without(kind, text, ())
    noted = [key for key, _ in whole[1]]
    vanished = [
        ".".join(map(str, path))
        for path in places_in(json.loads(text))
        if path != ("version",) and outcome_without(kind, text, path) == whole
    ]
    vanished = [key for key in vanished if not any(f"{key}.".startswith(f"{each}.") for each in noted)]
    assert vanished == WITHOUT_EFFECT.get(kind, [])


# --- any file -------------------------------------------------------------------------------------------

# Changed files of each kind, each checked as a whole. Those of the soak suite are others each time.
MUTATIONS = [40, pytest.param(3_000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
SCALARS = [None, True, -1, 2.5, "", "${{ x", "{{.X", "${A.b}", "always()", "{{ }}", [], {}, [1], {"a": None}, "a" * 300]


@pytest.mark.parametrize("mutations", MUTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_converted_or_refused_and_never_raises(kind: str, mutations: int, tmp_path: Path) -> None:
    seed = f"{kind}-26" if mutations == 40 else f"{kind}-{random.random()}"
    dice = random.Random(seed)
    names = sorted(CASES[kind])
    for _ in range(mutations):
        document = read_tree((HERE / kind / dice.choice(names)).read_text()).value
        for _ in range(dice.randint(1, 4)):
            mutate(document, dice)
        text = json.dumps(document, ensure_ascii=False)
        tree = read_tree(text)
        converter(kind).looks_like(tree.value, "x.yml")
        made = converter(kind).convert(tree, "x.yml")
        assert (made.document is None) == (made.refusal is not None)
        if made.document is not None:
            assert mistakes(made.document, tmp_path) == [], (seed, text)


def mutate(document: Any, dice: random.Random) -> None:
    holders = [document]
    for holder in holders:  # which grows
        inside = holder.values() if isinstance(holder, dict) else holder
        holders += [each for each in inside if isinstance(each, dict | list) and each]
    holder = dice.choice(holders)
    keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    if not keys:
        return
    key, other = dice.choice(keys), dice.choice(holders)
    change = dice.randrange(4)
    if change == 0:
        holder[key] = dice.choice(SCALARS)
    elif change == 1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    elif change == 2:
        holder[key] = json.loads(json.dumps(other))
    else:
        del holder[key]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", "5", "[]", "a: [", "jobs: {}", "tasks: {}", "steps: []", "a: 1\na: 2", "\ttab"])
def test_what_is_no_such_file_is_refused(kind: str, text: str) -> None:
    made = converter(kind).convert(read_tree(text), "x.yml")
    assert made.document is None
    assert made.refusal


def test_a_small_file_that_unfolds_into_much_is_refused() -> None:
    tasks = {f"t{number}": {"deps": [f"t{number + 1}"] * 4} for number in range(15)} | {"t15": {}}
    made = converter("taskfile").convert(read_tree(json.dumps({"version": "3", "tasks": tasks})), "Taskfile.yml")
    assert made.refusal == "its tasks or variables use each other too often"
    variables = {f"v{number}": f"{{{{.v{number + 1}}}}}" * 4 for number in range(15)} | {"v15": ""}
    taskfile = {"version": "3", "vars": variables, "tasks": {"default": "echo {{.v0}}"}}
    made = converter("taskfile").convert(read_tree(json.dumps(taskfile)), "Taskfile.yml")
    assert made.refusal == "its tasks or variables use each other too often"
    variables = {"v0": "text"} | {f"v{number}": f"${{v{number - 1}}}" * 4 for number in range(1, 30)}
    made = converter("dagu").convert(read_tree(json.dumps({"env": variables, "steps": ["echo"]})), "dag.yaml")
    assert made.refusal == "it has variables that are too long"
    jobs = {
        "a": {"runs-on": "ubuntu-latest", "steps": [{"run": "${{ " * 100_000}, {"run": "echo", "if": "a && " * 9999}]}
    }
    made = converter("actions").convert(read_tree(json.dumps({"on": "push", "jobs": jobs})), "ci.yml")
    assert made.document is not None
    assert all("exit 1" in step["exec"] for step in made.document["steps"].values())


def test_a_file_with_too_many_steps_is_refused() -> None:
    tasks = {f"t{number}": "echo" for number in range(301)}
    made = converter("taskfile").convert(read_tree(json.dumps({"version": "3", "tasks": tasks})), "Taskfile.yml")
    assert "300" in (made.refusal or "")
