"""Steps as a list: their names, their order, and where their mistakes are."""

from collections.abc import Callable

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from shotclock.core.envelope import Envelope
from shotclock.flows.check.lint import lint
from shotclock.flows.file.loader import Finding
from shotclock.flows.file.schema import json_schema
from tests.flows.conftest import Lint, Load
from tests.rows import row

ORDER = """
    steps:
      - echo one >> order
      - id: two
        if: "1 > 2"
        exec: echo two >> order
      - name: three
        exec: echo three >> order
        on_success: {run: after}
      - id: after
        exec: echo after >> order
      - {id: four, exec: "sleep 0.2; echo four >> order; exit 1"}
      - echo five >> order
      - {id: free, depends_on: [], exec: "true"}
      - {id: behind, needs: free, exec: "true"}
    """


def test_each_step_waits_for_the_one_before_unless_it_says_otherwise(load: Load) -> None:
    workflow = load(ORDER).workflow
    assert workflow is not None
    assert {name: step.depends_on for name, step in workflow.steps.items()} == {
        "step-1": [],
        "two": ["step-1"],
        "three": ["two"],
        "after": [],
        "four": ["three"],
        "step-6": ["four"],
        "free": [],
        "behind": ["free"],
    }


def test_a_list_runs_in_order_past_a_skipped_step_and_ends_at_a_failed_one(run: Callable[..., Envelope]) -> None:
    envelope = run(ORDER.replace(">> order", ""))
    assert isinstance(envelope.data, dict)
    steps = envelope.data["steps"]
    assert {name: state["status"] for name, state in steps.items()} == {
        "step-1": "succeeded",
        "two": "skipped",
        "three": "succeeded",
        "after": "succeeded",
        "four": "failed",
        "step-6": "skipped",
        "free": "succeeded",
        "behind": "succeeded",
    }
    assert steps["step-6"]["reason"] == "dependency_failed"
    begins = [steps[name]["started_ms"] for name in ("step-1", "three", "four")]
    assert begins == sorted(begins)


def test_a_dependency_that_is_skipped_counts_only_where_that_is_accepted(run: Callable[..., Envelope]) -> None:
    envelope = run(
        """
        steps:
          a: {if: "1 > 2", exec: "true"}
          b: {depends_on: a, exec: "true"}
          c: {depends_on: a, accept_skipped: true, exec: "true"}
          d: {depends_on: b, accept_skipped: true, exec: "true"}
        """
    )
    assert isinstance(envelope.data, dict)
    assert envelope.data["completed"] == ["c"]


WRONG = {
    "a name twice": ("steps:\n  - {id: a, exec: x}\n  - {name: a, exec: x}", 3, "there twice, first in line 2"),
    "the name of an unnamed one": ("steps:\n  - {id: step-2, exec: x}\n  - x", 3, "'step-2' is there twice"),
    "two names": ("steps:\n  - id: a\n    name: b\n    exec: x", 3, "both name the step"),
    "a number as a name": ("steps:\n  - id: 5\n    exec: x", 2, "as text"),
    "a name for people": ("steps:\n  - name: Run tests\n    exec: x", 2, "cannot name a step"),
    "a list in a list": ("steps:\n  - [x]", 2, "a mapping, or a command as text"),
    "nothing": ("steps: []", 1, "is empty"),
    "an unknown key": ("steps:\n  - x\n  - exec: x\n    tiemout: 5", 4, "unknown key 'tiemout'"),
    "a wrong value": ("steps:\n  - x\n  - exec: x\n    timeout: soon", 4, "soon"),
    "no type": ("steps:\n  - x\n  - run: x", 3, "needs a `type`"),
}


def test_a_mistake_in_a_list_is_reported_with_its_line(problems: Callable[[str], list[Finding]]) -> None:
    for name, (text, line, message) in WRONG.items():
        with row(name):
            found = [(each.place.line, each.message) for each in problems(text)]
            assert any(at == line and message in said for at, said in found), found


def test_all_mistakes_of_a_list_are_reported_together(problems: Callable[[str], list[Finding]]) -> None:
    lines = ["steps:", "- {id: a, exec: x}", "- {id: a, exec: x, soft: soon}", "- {name: Run it, exec: x}"]
    found = problems("\n".join([*lines, "- {exec: x, nope: 1}"]))
    assert [each.place.line for each in found] == [3, 3, 4, 5]


def test_a_wrong_name_does_not_hide_what_is_wrong_elsewhere(load: Load) -> None:
    lines = ["- {id: a, exec: x}", "- {id: a, exec: x}", "- {exec: x, depends_on: c}", "- echo {{ outputs.nope }}"]
    found = lint(load("\n".join(["steps:", *lines])))
    assert [(each.rule, each.place.line) for each in found] == [
        ("schema/twice", 3),
        ("graph/missing-dependency", 4),
        ("template/unknown-step", 5),
    ]


def test_what_check_finds_in_a_step_of_a_list_has_its_line(linted: Lint) -> None:
    found = linted("steps:\n  - x\n  - id: b\n    depends_on: c\n    exec: echo {{ outputs.nope }}\n")
    assert [(each.rule, each.place.line) for each in found] == [
        ("graph/missing-dependency", 4),
        ("template/unknown-step", 5),
    ]


@pytest.mark.parametrize("text", [ORDER, "steps: [x]", "checks: [{id: a, type: http_client, url: 'http://x'}]"])
def test_the_schema_for_editors_accepts_a_list(text: str) -> None:
    assert Draft202012Validator(json_schema()).is_valid(YAML(typ="safe", pure=True).load(text))


def test_the_schema_for_editors_refuses_a_wrong_list() -> None:
    validator = Draft202012Validator(json_schema())
    for name in ("two names", "a number as a name", "a name for people", "a list in a list", "nothing", "no type"):
        with row(name):
            assert not validator.is_valid(YAML(typ="safe", pure=True).load(WRONG[name][0]))
