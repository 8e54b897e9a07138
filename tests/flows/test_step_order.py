"""Who comes before whom: the same answer as by walking back from every step, in the time of one walk."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shotclock.flows.check._template_check import check_templates
from shotclock.flows.check.plan import find_cycle, graph_of, needs, not_before
from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.file.templates import mentions

NAMES = "abcdefgh"
Before = dict[str, set[str]]


def walks_back(before: Before, earlier: str, later: str) -> bool:
    """The plain way: everything that can be reached, step by step."""
    reached: set[str] = set()
    left = [later]
    while left:
        for name in before.get(left.pop(), set()) - reached:
            reached.add(name)
            left.append(name)
    return earlier in reached


names = st.sampled_from(NAMES)


@given(st.dictionaries(names, st.sets(names, max_size=3)), st.integers(1, 9))
@example({"a": {"b"}, "b": {"a"}, "c": {"b"}, "d": {"c", "d"}, "e": {"h"}}, 2)
def test_every_pair_gets_the_answer_of_a_walk_back(before: Before, at_once: int) -> None:
    pairs = {(earlier, later) for earlier in NAMES for later in before}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shotclock.flows.check.plan.AT_ONCE", at_once)
        found = not_before(before, pairs)
    assert found == {(earlier, later) for earlier, later in pairs if not walks_back(before, earlier, later)}


entries = st.lists(names, min_size=1, max_size=3).map("|".join)
reactions = st.fixed_dictionaries({}, optional={"run": st.lists(names, max_size=2), "goto": names})
written_steps = st.fixed_dictionaries(
    {"exec": st.lists(names, max_size=3).map(lambda named: "x" + "".join(f" {{{{ outputs.{n} }}}}" for n in named))},
    optional={
        "depends_on": st.lists(entries, max_size=2),
        "on_fail": reactions,
        "on_success": reactions,
        "for_each": st.sampled_from([True, "{{ outputs.a }}", [1, 2]]),
    },
)


@given(st.dictionaries(names, written_steps, min_size=2), st.none() | reactions)
def test_a_step_is_told_of_exactly_the_outputs_that_nothing_makes_it_wait_for(
    steps: dict[str, dict[str, object]], on_fail: dict[str, object] | None
) -> None:
    file: dict[str, object] = {"steps": {name: {"type": "command", **step} for name, step in steps.items()}}
    if on_fail is not None:
        file["defaults"] = {"on_fail": on_fail}
    workflow = WorkflowFile.model_validate(file)
    graph = graph_of(workflow)
    if find_cycle(graph) is not None:
        return
    before = {name: needs(groups) for name, groups in graph.items()}
    expected = []
    for name, step in workflow.steps.items():
        for reaction in (step.on_fail or workflow.defaults.on_fail, step.on_success):
            for called in [] if reaction is None else [*reaction.run, *([reaction.goto] if reaction.goto else [])]:
                before.setdefault(called, set()).add(name)
    for name, written in steps.items():
        texts = [(key, str(written[key])) for key in written if key in ("exec", "for_each")]
        for key, text in texts:
            for _, spoken_of in dict.fromkeys(mentions(text)):
                if spoken_of not in steps:
                    expected.append(("template/unknown-step", ("steps", name, key), spoken_of))
                elif spoken_of != name and not walks_back(before, spoken_of, name):
                    expected.append(("template/not-waited-for", ("steps", name, key), spoken_of))
    found = [
        (each.rule, each.path, each.message.split("`")[1].removeprefix("outputs."))
        for each in check_templates(workflow)
    ]
    assert sorted(found) == sorted(expected)
