"""Steps that are done for every item: their own, or those of a step that gives its output away item by item."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shotclock.core.envelope import Envelope
from shotclock.store.store import Store

from .conftest import statuses, step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]
Run = Callable[..., Envelope]

LIST = """list: {exec: 'echo ''[{"n": "x"}, {"n": "y z"}]''', for_each: true}"""


def test_who_waits_for_a_list_that_is_given_away_is_done_for_each_item(run: Run) -> None:
    envelope = run(
        f"""
        steps:
          {LIST}
          each: {{exec: 'printf "%s" "{{{{ item.n }}}}-{{{{ index }}}}-{{{{ outputs.list.n }}}}"', depends_on: list}}
          whole: {{exec: 'printf "%s" "{{{{ steps.list.output[1].n }}}}"', depends_on: list, for_each: false}}
          own: {{exec: 'printf "%s" "{{{{ item }}}}{{{{ outputs.list[0].n }}}}"', depends_on: list, for_each: [a, b]}}
          behind: {{exec: 'echo "{{{{ outputs.each[1] }}}}"', depends_on: each}}
        """
    )
    assert envelope.ok, envelope.error
    assert step(envelope, "list")["output"] == [{"n": "x"}, {"n": "y z"}]
    assert step(envelope, "each")["output"] == ["x-0-x", "y z-1-y z"] and step(envelope, "each")["attempts"] == 2
    assert step(envelope, "whole")["output"] == "y z"
    assert step(envelope, "own")["output"] == ["ax", "bx"]
    assert step(envelope, "behind")["output"] == "y z-1-y z"


def test_items_go_through_worker_templates_and_on_to_the_next(run: Run) -> None:
    envelope = run(
        f"""
        steps:
          {LIST}
          upper:
            exec: 'printf %s "{{{{ item.n | upper }}}}{{{{ outputs.list.n | length }}}}"'
            depends_on: list
            for_each: true
          again: {{exec: 'printf %s "{{{{ item }}}}!"', depends_on: upper}}
        """
    )
    assert envelope.ok, envelope.error
    assert step(envelope, "upper")["output"] == ["X1", "Y Z3"]
    assert step(envelope, "again")["output"] == ["X1!", "Y Z3!"]


def test_an_output_that_is_no_list_cannot_be_given_away(run: Run) -> None:
    envelope = run("steps: {a: {exec: echo hello, for_each: true}, b: {exec: 'true', depends_on: a}}")
    assert statuses(envelope) == {"a": "failed", "b": "skipped"}
    error = step(envelope, "a")["error"]
    assert error["code"] == "OUTPUT_INVALID" and error["context"]["rule"] == "step/for_each"


def test_no_items_are_no_work(run: Run) -> None:
    envelope = run("steps: {a: {exec: 'echo []', for_each: true}, b: {exec: exit 1, depends_on: a}}")
    assert envelope.ok and step(envelope, "b")["output"] == []
    envelope = run(
        "steps: {a: {exec: exit 1, for_each: true, continue_on_failure: true}, b: {exec: exit 1, depends_on: a}}"
    )
    assert envelope.ok and step(envelope, "b")["output"] == []


def test_of_two_that_would_do_the_items_are_those_of_the_one_that_did(run: Run) -> None:
    envelope = run(
        """
        steps:
          bad: {exec: exit 1, for_each: true}
          good: {exec: "echo '[1, 2]'", for_each: true}
          plain: {exec: echo 5}
          either: {exec: 'echo {{ item }}', depends_on: bad|good}
          once: {exec: 'echo {{ outputs.plain }}', depends_on: bad|plain}
        """
    )
    assert step(envelope, "either")["output"] == ["1", "2"]
    assert step(envelope, "once")["output"] == "5"


def test_an_item_whose_template_fails_fails_the_step_and_says_why(run: Run) -> None:
    envelope = run("steps: {a: {exec: 'echo {{ item.b }}', for_each: [{b: 1}, {c: 2}]}}")
    assert statuses(envelope) == {"a": "failed"} and step(envelope, "a")["error"]["code"] == "TEMPLATE_FAILED"
    assert step(envelope, "a")["output"] == ["1", None]


def test_which_items_failed_is_said(run: Run) -> None:
    envelope = run("steps: {a: {exec: 'exit {{ item }}', for_each: [0, 3, 0, 4]}}")
    error = step(envelope, "a")["error"]
    assert error["message"].startswith("item 2 of 4 (3) and 1 more: ") and error["context"]["items_failed"] == [1, 3]


def most_at_once(log: str) -> int:
    """Of lines + and -, how many had begun and not ended at most."""
    under_way = most = 0
    for mark in log.split():
        under_way += 1 if mark == "+" else -1
        most = max(most, under_way)
    return most


WORK = "echo + >> log; sleep 0.15; echo - >> log"


def test_max_parallelism_bounds_steps_items_and_files_inside_together(run: Run, tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(f"steps: {{a: {{exec: '{WORK}'}}, b: {{exec: '{WORK}', for_each: [1, 2]}}}}")
    envelope = run(
        f"""
        max_parallelism: 2
        steps:
          one: {{exec: '{WORK}', for_each: [1, 2, 3, 4]}}
          two: {{exec: '{WORK}', for_each: [1, 2, 3, 4]}}
          plain: {{exec: '{WORK}'}}
          inner: {{type: workflow, workflow: inner.yaml, for_each: [1, 2]}}
        """
    )
    assert envelope.ok, envelope.error
    log = (tmp_path / "log").read_text()
    assert most_at_once(log) == 2 and log.split().count("+") == 4 + 4 + 1 + 2 * 3


def test_with_one_place_parts_go_on_one_after_the_other_and_nobody_waits_for_ever(run: Run, tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(f"steps: {{b: {{exec: '{WORK}', for_each: [1, 2]}}}}")
    (tmp_path / "outer.yaml").write_text("steps: {a: {type: workflow, workflow: inner.yaml, for_each: [1, 2]}}")
    envelope = run("max_parallelism: 1\nsteps: {a: {type: workflow, workflow: outer.yaml}, b: {exec: 'true'}}")
    assert envelope.ok, envelope.error
    assert most_at_once((tmp_path / "log").read_text()) == 1


def test_the_run_of_an_item_never_has_the_name_of_the_run_of_another_step(
    run: Run, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "inner.yaml").write_text("inputs: {name: {type: string}}\nsteps: {it: {exec: 'true'}}\n")
    envelope = run(
        """
        steps:
          a: {type: workflow, workflow: inner.yaml, for_each: [x, y], inputs: {name: "{{ item }}"}}
          a.2: {type: workflow, workflow: inner.yaml, inputs: {name: own}, depends_on: a}
        """,
        run_id="r",
    )
    assert envelope.ok
    names = {each.id: each.inputs.get("name") for each in store.runs.list()}
    assert names == {"r": None, "r.a": "x", "r.a.4": "y", "r.a.2": "own"}


def test_a_template_sees_all_steps_where_it_uses_the_mapping_and_each_that_it_names(run: Run) -> None:
    envelope = run(
        """
        outputs:
          loop: "{% for name, each in steps.items() %}{{ name }}={{ each.status }} {% endfor %}"
          get: "{{ outputs.get('a')|upper }}"
          trimmed: "{{-outputs.a|upper}}"
          minus: "{% set total = 9 %}{{ total-outputs.n|int }}"
        steps: {a: {exec: echo x}, n: {exec: echo 4}}
        """
    )
    assert isinstance(envelope.data, dict) and envelope.warnings == []
    made = {"loop": "a=succeeded n=succeeded ", "get": "X", "trimmed": "X", "minus": "5"}
    assert envelope.data["outputs"] == made
