"""The choice of steps of a run: by name, by tag, and all but some. The steps that are left out are skipped."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from ...core.errors import Failure
from ...core.value_types import value
from ..check.plan import (
    ends_awaited,
    graph_of,
    groups_of,
    keep_outputs,
    keep_steps,
    needs,
    order_of,
    outputs_without,
    reach,
)
from ..file.schema import WorkflowFile, calls_of, texts_in
from ..file.templates import mentions
from .state import Reason, Status, StepState, unstarted_state

NAMES_SHOWN = 10


@value
class StepChoice:
    """The options of a caller. Without `only` and `tags` every step is chosen, and `skip` takes steps out again."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def takes_all(self) -> bool:
        return not (self.only or self.skip or self.tags)


def choose(workflow: WorkflowFile, choice: StepChoice) -> frozenset[str]:
    """Return the chosen steps with those that they need. Raise Failure for an unknown name or tag."""
    refuse_unknown(workflow, choice.only, "only")
    refuse_unknown(workflow, choice.skip, "skip")
    _refuse_unknown_tags(workflow, choice.tags)
    named = [name for name, step in workflow.steps.items() if not set(choice.tags).isdisjoint(step.tags)]
    starts = [*choice.only, *named] if choice.only or choice.tags else list(workflow.steps)
    chosen = reach(starts, lambda name: needed_by(workflow, name))
    for name in workflow.finally_:
        if name in choice.skip:
            raise _refusal("skip", f"--skip: {name} is a step of `finally`, which always runs", "take it out of --skip")
    left = (chosen.keys() - set(choice.skip)) | {*workflow.finally_}
    startable = find_startable(workflow, left) if choice.only and choice.skip else left
    for name in choice.only:
        if name not in startable:
            why = f"--skip {', '.join(choice.skip)} leaves out what --only {name} needs"
            raise _refusal("skip", why, "leave one of the two options out")
    return frozenset(left & workflow.steps.keys())


def needed_by(workflow: WorkflowFile, name: str) -> list[str]:
    """Return the steps that a step waits for, names in its templates or starts by its reactions."""
    if name not in workflow.steps:
        return []
    return [*depends_of(workflow, name), *calls_of(workflow, name)]


def depends_of(workflow: WorkflowFile, name: str) -> list[str]:
    """Return the steps that a step waits for or names in its templates."""
    step = workflow.steps[name]
    mentioned = [each.name for _, text in texts_in(step.model_dump()) for each in mentions(text)]
    return [other for other in (*needs(groups_of(step.depends_on)), *mentioned) if other in workflow.steps]


def find_startable(workflow: WorkflowFile, chosen: Collection[str]) -> set[str]:
    """Return the chosen steps that no missing step keeps from starting."""
    graph = graph_of(workflow)
    found: set[str] = set()
    for name in order_of(graph):
        any_end = ends_awaited(workflow.steps[name])
        is_free = workflow.steps[name].accept_skipped or all(
            (found | any_end).intersection(group) for group in graph[name]
        )
        if name in chosen and is_free:
            found.add(name)
    return found


def leave_out(workflow: WorkflowFile, chosen: Collection[str]) -> tuple[WorkflowFile, dict[str, StepState]]:
    """Return the workflow without the outputs that need other steps, and the states of these steps."""
    states: dict[str, StepState] = {}
    for name in workflow.steps.keys() - set(chosen):
        states[name] = left_out(workflow, name)
    return keep_outputs(workflow, outputs_without(workflow, states)), states


def left_out(workflow: WorkflowFile, name: str) -> StepState:
    state = unstarted_state(workflow, name)
    state.status, state.reason = Status.SKIPPED, Reason.NOT_CHOSEN
    return state


def cut_down(workflow: WorkflowFile, choice: StepChoice) -> WorkflowFile:
    """Return the workflow with only the chosen steps, for an engine that does not skip the others."""
    chosen = choose(workflow, choice)
    for name in workflow.finally_:
        if gone := [other for other in depends_of(workflow, name) if other not in chosen]:
            option = "only" if choice.only else "tags"
            message = f"--{option}: {name} of `finally` always runs, and uses {gone[0]}, which is left out"
            raise _refusal(option, message, f"choose {gone[0]} too, or run the file here, without `--on`")
    return keep_steps(workflow, chosen)


def refuse_unknown(workflow: WorkflowFile, names: Iterable[str], option: str) -> None:
    for name in names:
        if name not in workflow.steps:
            near = difflib.get_close_matches(name, workflow.steps, n=3)
            known = [*workflow.steps]
            more = f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else ""
            listed = f"the steps of this file: {', '.join(known[:NAMES_SHOWN])}{more}"
            hint = f"did you mean {' or '.join(near)}?" if near else listed
            raise _refusal(option, f"--{option}: there is no step {name!r}; {hint}", hint)


def _refuse_unknown_tags(workflow: WorkflowFile, tags: Iterable[str]) -> None:
    known = sorted({tag for step in workflow.steps.values() for tag in step.tags})
    for tag in tags:
        if tag not in known:
            near = difflib.get_close_matches(tag, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else ""
            message = f"no step has the tag {tag!r}; the tags of this file: {', '.join(known) or 'none'}"
            raise _refusal("tags", message, hint)


def _refusal(option: str, message: str, suggestion: str) -> Failure:
    errors = [{"field": option, "message": message}]
    return Failure("ARG_ERROR", message, context={"errors": errors}, suggestion=suggestion or None)
