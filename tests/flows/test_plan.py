"""What a workflow would take, against brute force over every way through."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.limits import reserve_ms_for
from shotclock.flows.check.plan import graph_of, plan_of
from shotclock.flows.file.loader import load_text
from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.run.step_choice import StepChoice, cut_down
from shotclock.flows.steps.provider import Retry


def workflow(steps: dict[str, dict[str, Any]], **top: Any) -> WorkflowFile:
    named = {name: {"type": "command", "exec": "true", **step} for name, step in steps.items()}
    return WorkflowFile.model_validate({**top, "steps": named})


# --- the pauses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backoff", "pauses"),
    [
        ({}, [1000, 1000, 1000, 1000]),
        ({"delay_ms": 0}, [0, 0, 0, 0]),
        ({"mode": "linear", "delay_ms": 100}, [100, 200, 300, 400]),
        ({"mode": "exponential", "delay_ms": 100}, [100, 200, 400, 800]),
        ({"mode": "exponential", "delay_ms": 100, "max_delay_ms": 300}, [100, 200, 300, 300]),
        ({"mode": "fixed", "delay_ms": 500, "max_delay_ms": 300}, [300, 300, 300, 300]),
        ({"mode": "linear", "delay_ms": 100, "jitter": True}, [100, 200, 300, 400]),
    ],
)
def test_the_pauses_grow_as_the_file_says(backoff: dict[str, Any], pauses: list[int]) -> None:
    retry = Retry.model_validate({"max": 4, "backoff": backoff})
    assert [retry.backoff.longest_ms(number) for number in range(1, 5)] == pauses
    (step,) = plan_of(workflow({"a": {"timeout": 2, "on_fail": {"retry": {"max": 4, "backoff": backoff}}}})).steps
    assert (step.attempts, step.delays_ms, step.worst_ms) == (5, sum(pauses), 10_000 + sum(pauses))


def test_overtime_that_moves_the_timeout_is_part_of_the_worst_case_and_other_overtime_is_not() -> None:
    inside = {"timeout": 10, "soft": 4, "wind_down": 3, "overtime": {"budget": 20}}
    moves = {"timeout": 10, "overtime": {"budget": 20, "hard_extends": True}, "depends_on": ["a"]}
    plan = plan_of(workflow({"a": inside, "b": moves}))
    first, second = plan.steps
    assert (first.soft_ms, first.wind_down_ms, first.worst_ms, first.ends_ms) == (4000, 3000, 10_000, 10_000)
    assert (second.soft_ms, second.wind_down_ms, second.worst_ms, second.ends_ms) == (None, 5000, 30_000, 40_000)
    assert second.overtime is not None and plan.worst_ms == 40_000


def test_a_thousand_doublings_are_still_a_number() -> None:
    retry = {"max": 1000, "backoff": {"mode": "exponential", "delay_ms": 1000}}
    (step,) = plan_of(workflow({"a": {"timeout": 1, "on_fail": {"retry": retry}}}, timeout=60)).steps
    assert step.attempts == 1001


def test_a_step_that_says_its_own_reaction_does_not_get_the_retries_of_the_defaults() -> None:
    flow = workflow(
        {"a": {}, "b": {"on_fail": {}}, "c": {"on_fail": {"retry": {"max": 1}}}},
        defaults={"on_fail": {"retry": {"max": 5}}},
    )
    assert {step.id: step.attempts for step in plan_of(flow).steps} == {"a": 6, "b": 1, "c": 2}


# --- one step ---------------------------------------------------------------------------------------------


def test_a_timeout_is_cut_to_the_time_of_its_run() -> None:
    for run, caller_ms, own, effective_ms in (
        (None, None, 60, 60_000),
        (None, None, 0, None),
        (10, None, 60, 9_500),
        (10, None, 5, 5_000),
        (10, None, 0, 9_500),
        (2, None, 60, 1_800),
        (10, 4_000, 60, 3_600),
        (10, 40_000, 60, 9_500),
        (None, 4_000, 60, 3_600),
        (0, None, 60, 60_000),
        (10, 0, 60, 9_500),
    ):
        plan = plan_of(workflow({"a": {"timeout": own}}, timeout=run), timeout_ms=caller_ms)
        assert plan.steps[0].effective_ms == effective_ms, (run, caller_ms, own)


def test_a_step_is_per_item_if_it_or_its_source_has_items() -> None:
    # `for_each` as written; whether the step is per item alone, and behind a step with `for_each: true`.
    for written, alone, behind_source in (
        (None, False, True),
        (False, False, False),
        (True, False, True),
        ([], True, True),
        ("{{ x }}", True, True),
    ):
        assert plan_of(workflow({"a": {"for_each": written}})).steps[0].is_per_item is alone, written
        steps = {
            "list": {"for_each": True},
            "other": {},
            "each": {"for_each": written, "depends_on": "other|list"},
            "behind": {"depends_on": "each"},
        }
        found = {step.id: step.is_per_item for step in plan_of(workflow(steps)).steps}
        assert found == {"list": False, "other": False, "each": behind_source, "behind": written is True}, written


# --- the whole --------------------------------------------------------------------------------------------


def test_the_longest_way_is_the_one_that_takes_longest_not_the_one_with_most_steps() -> None:
    plan = plan_of(
        workflow(
            {
                "a": {"timeout": 1},
                "b": {"timeout": 1, "depends_on": "a"},
                "c": {"timeout": 1, "depends_on": "b"},
                "long": {"timeout": 10, "depends_on": "a"},
                "end": {"timeout": 2, "depends_on": ["c", "long"]},
            }
        )
    )
    assert plan.critical_path == ("a", "long", "end")
    assert plan.worst_ms == 13_000
    assert (plan.step("end").starts_ms, plan.step("end").ends_ms) == (11_000, 13_000)


def test_known_items_count_in_rounds_of_the_places() -> None:
    steps = {
        "m": {"timeout": 2, "matrix": {"n": list(range(12))}},
        "each": {"timeout": 2, "for_each": list(range(17)), "depends_on": "m"},
        "computed": {"timeout": 2, "for_each": "{{ outputs.m }}", "depends_on": "each"},
    }
    plan = plan_of(workflow(steps))
    assert [step.ends_ms for step in plan.steps] == [4_000, 10_000, 12_000]


def test_a_step_without_a_limit_has_no_end_nor_has_what_waits_for_it() -> None:
    plan = plan_of(workflow({"a": {"timeout": 0}, "b": {"depends_on": "a"}, "c": {"timeout": 500}}))
    assert plan.worst_ms is None
    assert plan.critical_path == ("a",)
    assert (plan.step("a").starts_ms, plan.step("a").ends_ms) == (0, None)
    assert (plan.step("b").starts_ms, plan.step("b").ends_ms) == (None, None)
    assert plan.step("c").ends_ms == 500_000


def test_either_of_two_waits_at_worst_for_both() -> None:
    plan = plan_of(workflow({"a": {"timeout": 3}, "b": {"timeout": 7}, "c": {"timeout": 1, "depends_on": "a|b"}}))
    assert plan.worst_ms == 8_000
    assert plan.critical_path == ("b", "c")


@st.composite
def flows(draw: st.DrawFn) -> WorkflowFile:
    """Steps that wait only for earlier ones, written in any order; some without a limit, some tried again."""
    count = draw(st.integers(1, 7))
    steps: dict[str, dict[str, Any]] = {}
    for number in range(count):
        before = draw(st.lists(st.sampled_from([f"s{n}" for n in range(number)]), unique=True)) if number else []
        steps[f"s{number}"] = {
            "timeout": draw(st.sampled_from([0, 1, 2, 3, 50])),
            "depends_on": ["|".join(before)] if before and draw(st.booleans()) else before,
            "on_fail": {"retry": {"max": draw(st.integers(0, 2)), "backoff": {"delay_ms": draw(st.integers(0, 9))}}},
        }
    return workflow({name: steps[name] for name in draw(st.permutations(list(steps)))})


def ways(flow: WorkflowFile) -> list[list[str]]:
    """Every way from a step that waits for nothing to any step."""
    before = {name: {other for group in groups for other in group} for name, groups in graph_of(flow).items()}

    def to(name: str) -> list[list[str]]:
        return [[*way, name] for other in before[name] for way in to(other)] or [[name]]

    return [way for name in before for way in to(name)]


def length(flow: WorkflowFile, way: list[str]) -> float:
    total = 0.0
    for name in way:
        step = flow.steps[name]
        assert step.on_fail is not None
        assert step.on_fail.retry is not None
        tries, pause = step.on_fail.retry.max, step.on_fail.retry.backoff.delay_ms
        timeout = step.timeout
        assert isinstance(timeout, int)
        total += (tries + 1) * timeout * 1000 + tries * pause if timeout else float("inf")
    return total


@given(flows())
def test_the_worst_case_is_the_longest_of_all_ways(flow: WorkflowFile) -> None:
    plan = plan_of(flow)
    lengths = {tuple(way): length(flow, way) for way in ways(flow)}
    worst = max(lengths.values())
    assert (float("inf") if plan.worst_ms is None else plan.worst_ms) == worst
    assert lengths[plan.critical_path] == worst
    for step in plan.steps:
        ends = max(lengths[way] for way in lengths if way[-1] == step.id)
        assert (float("inf") if step.ends_ms is None else step.ends_ms) == ends


@given(flows())
def test_every_step_is_planned_once_after_what_it_waits_for(flow: WorkflowFile) -> None:
    seen: set[str] = set()
    for step in plan_of(flow).steps:
        assert all(name in seen for group in step.groups for name in group)
        assert step.id not in seen
        seen.add(step.id)
    assert seen == flow.steps.keys()


@given(flows(), st.integers(1, 100_000))
def test_nothing_has_more_time_than_its_run(flow: WorkflowFile, limit_ms: int) -> None:
    for step in plan_of(flow, timeout_ms=limit_ms).steps:
        assert step.effective_ms is not None
        assert step.effective_ms <= limit_ms - reserve_ms_for(limit_ms)


# --- large ------------------------------------------------------------------------------------------------


def chain(count: int) -> WorkflowFile:
    return workflow({f"s{n}": {"timeout": 1, "depends_on": [f"s{n - 1}"] if n else []} for n in range(count)})


@pytest.mark.slow
def test_a_chain_of_three_thousand_is_as_long_as_its_links() -> None:
    plan = plan_of(chain(3_000))
    assert plan.worst_ms == 3_000_000
    assert plan.critical_path == tuple(f"s{n}" for n in range(3_000))


# --- clean-up -------------------------------------------------------------------------------------------------


def test_the_declared_time_of_clean_up_is_kept_of_the_time_of_the_run() -> None:
    rows: list[tuple[dict[str, Any], int, int]] = [
        ({"timeout": 1}, 10, 1112),  # itself and the reserve of its calls
        ({"timeout": 30}, 600, 30_500),
        ({"timeout": 30}, 20, 10_000),  # half of the run at most
        ({}, 20, 2_000),  # a tenth if nothing is declared
        ({"timeout": 0}, 20, 2_000),
    ]
    for clean_up, run_s, kept_ms in rows:
        plan = plan_of(workflow({"a": {"on_fail": {"run": "down"}}, "down": clean_up}, timeout=run_s))
        assert plan.clean_up_ms == kept_ms, clean_up
        inside_ms = run_s * 1000 - kept_ms
        assert plan.step("a").effective_ms == min(60_000, inside_ms - min(500, inside_ms // 10)), clean_up


def test_nothing_is_kept_where_nobody_declares_clean_up() -> None:
    assert plan_of(workflow({"a": {"on_success": {"run": "b"}}, "b": {"timeout": 1}}, timeout=10)).clean_up_ms == 0
    assert plan_of(workflow({"a": {"on_fail": {"run": "b"}}, "b": {"timeout": 1}})).clean_up_ms == 0


def test_tags_select_a_step_that_is_named_only_in_a_condition() -> None:
    loaded = load_text(b"steps: {a: {exec: x}, b: {exec: x}, c: {exec: x, tags: [t], if: \"outputs.a == 'x'\"}}")
    assert loaded.workflow is not None
    assert list(cut_down(loaded.workflow, StepChoice(tags=("t",))).steps) == ["a", "c"]
