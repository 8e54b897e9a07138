"""A matrix: the combinations as items, and what cannot be combined."""

from collections.abc import Callable

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from shotclock.core.envelope import Envelope
from shotclock.flows.file.loader import Finding
from shotclock.flows.file.schema import json_schema
from shotclock.flows.steps.matrix import CHANGES_LIMIT, COMBINATIONS_LIMIT, combine
from tests.flows.conftest import Lint
from tests.rows import row

FLOW = """
    steps:
      test:
        matrix:
          os: [a, b]
          python: ["{{ inputs.least }}", 2]
          exclude: [{os: a, python: 2}]
          include: [{os: b, extra: x}, {os: c, python: 3}]
        exec: echo {{ matrix.os }} {{ item.python }} {{ matrix.extra | default('-') }} {{ index }}
      after: {exec: "echo {{ outputs.test | length }}", depends_on: test}
    inputs: {least: {default: 1}}
    """


def test_the_combinations_are_those_of_actions() -> None:
    fruits = {"fruit": ["apple", "pear"], "animal": ["cat", "dog"]}
    both = [{"fruit": fruit, "animal": animal} for fruit in fruits["fruit"] for animal in fruits["animal"]]
    for more, expected in [
        ({}, both),
        ({"exclude": [{"fruit": "apple"}]}, both[2:]),
        ({"exclude": [{"fruit": "apple", "animal": "dog"}, {"animal": "fish"}]}, [both[0], *both[2:]]),
        ({"include": [{"color": "green"}]}, [{**each, "color": "green"} for each in both]),
        (
            # The example in the manual of GitHub Actions.
            {
                "include": [
                    {"color": "green"},
                    {"color": "pink", "animal": "cat"},
                    {"fruit": "apple", "shape": "circle"},
                    {"fruit": "banana"},
                    {"fruit": "banana", "animal": "cat"},
                ]
            },
            [
                {"fruit": "apple", "animal": "cat", "color": "pink", "shape": "circle"},
                {"fruit": "apple", "animal": "dog", "color": "green", "shape": "circle"},
                {"fruit": "pear", "animal": "cat", "color": "pink"},
                {"fruit": "pear", "animal": "dog", "color": "green"},
                {"fruit": "banana"},
                {"fruit": "banana", "animal": "cat"},
            ],
        ),
    ]:
        with row(more):
            assert combine({**fruits, **more}) == expected
    assert combine({"include": [{"a": 1}, {"b": 2}]}) == [{"a": 1}, {"b": 2}]
    assert combine({"a": [1, True], "exclude": [{"a": True}]}) == [{"a": 1}]


def test_a_step_is_done_for_every_combination(run: Callable[..., Envelope]) -> None:
    envelope = run(FLOW)
    assert isinstance(envelope.data, dict) and envelope.ok, envelope
    steps = envelope.data["steps"]
    assert steps["test"]["output"] == ["a 1 - 0", "b 1 x 1", "b 2 x 2", "c 3 - 3"]
    assert steps["after"]["output"] == "4"


def test_a_failed_combination_is_named(run: Callable[..., Envelope]) -> None:
    envelope = run("steps: {a: {matrix: {n: [1, 2, 3]}, exec: 'test {{ matrix.n }} != 2'}}")
    assert isinstance(envelope.data, dict)
    error = envelope.data["steps"]["a"]["error"]
    assert error["context"]["items_failed"] == [1]
    assert error["message"].startswith("item 2 of 3 (n: 2)")


WRONG = {
    "both": ("{matrix: {a: [1]}, for_each: [1], exec: x}", "give the step either `matrix` or `for_each`"),
    "no list": ("{matrix: {a: 1}, exec: x}", "should be a list, and is the number 1"),
    "a template": ("{matrix: {a: '{{ inputs.x }}'}, exec: x}", "should be a list"),
    "an empty list": ("{matrix: {a: []}, exec: x}", "a has no values"),
    "nothing": ("{matrix: {}, exec: x}", "has no combination"),
    "nothing left": ("{matrix: {a: [1], exclude: [{a: 1}]}, exec: x}", "has no combination"),
    "a name": ("{matrix: {a-b: [1]}, exec: x}", "'a-b' cannot be used in a template"),
    "an unknown name": ("{matrix: {a: [1], exclude: [{b: 1}]}, exec: x}", "exclude: there is no 'b'; there are a"),
    "no mapping": ("{matrix: {a: [1], include: [b]}, exec: x}", "include should be a list of mappings"),
    "too many": (
        f"{{matrix: {{a: {list(range(40))}, b: {list(range(40))}}}, exec: x}}",
        f"has more than {COMBINATIONS_LIMIT} combinations",
    ),
    "too many entries": (
        f"{{matrix: {{a: [1], include: {[{'b': 1}] * (CHANGES_LIMIT + 1)}}}, exec: x}}",
        f"include has {CHANGES_LIMIT + 1} entries; {CHANGES_LIMIT} are the most",
    ),
}


def test_what_cannot_be_combined_is_refused_with_its_line(problems: Callable[[str], list[Finding]]) -> None:
    for name, (step, message) in WRONG.items():
        with row(name):
            found = problems(f"steps:\n  a: {step}\n  b: {{exec: x, soft: soon}}")
            assert [each.place.line for each in found] == [2, 3]
            assert message in found[0].message


def test_a_template_names_a_matrix_only_where_there_is_one(linted: Lint) -> None:
    found = linted(
        """
        steps:
          a: {matrix: {os: [x]}, if: "matrix.os == 'x'", exec: "echo {{ matrix.os }}"}
          b: {for_each: [x], exec: "echo {{ matrix.os }}"}
          c: {exec: "echo {{ item }}"}
          d: {matrix: {os: [x]}, exec: "echo {{ matrix.oz }}"}
          e: {matrix: {os: [x], include: [{os: x, y: z}]}, exec: "echo {{ item.y | upper }} {{ item.less | upper }}"}
        """
    )
    assert [(each.rule, each.place.line) for each in found] == [
        ("template/unknown-name", line) for line in (3, 4, 5, 6, 7)
    ]
    assert found[-1].message == "`item.less`: there is no 'less' in it"


@pytest.mark.parametrize("kind", ["ui", "mcp", "ai"])
def test_every_kind_of_step_refuses_both(kind: str, problems: Callable[[str], list[Finding]]) -> None:
    own = {"ui": "actions: [{action: back}]", "mcp": "command: x, method: y", "ai": "prompt: x, ai: {model: m}"}[kind]
    found = problems(f"steps: {{a: {{type: {kind}, {own}, matrix: {{a: [1]}}, for_each: [1]}}}}")
    assert any("either `matrix` or `for_each`" in each.message for each in found)


def test_the_schema_for_editors_accepts_a_matrix() -> None:
    assert Draft202012Validator(json_schema()).is_valid(YAML(typ="safe", pure=True).load(FLOW))
