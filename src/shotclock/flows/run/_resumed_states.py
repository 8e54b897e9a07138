"""The states of the steps of a run that continues in another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calls.principal import Principal
from ...store.runs import StoredRun
from ...store.store import Store
from ..check.plan import is_per_item, may_run_again
from ..file.schema import WorkflowFile
from ..steps.provider import STEP_TYPES, StepPart
from ._finally_steps import has_begun
from ._kept_items import merge_items
from .state import Status, StepState


def resume_states(
    workflow: WorkflowFile, states: Mapping[str, StepState], store: Store, run: StoredRun
) -> dict[str, StepState]:
    """Return the states of a resumed run. A step that was cut off runs again only if that is harmless."""
    resumed = {}
    is_finishing = has_begun(states)  # then no other step starts any more
    for step_id, state in states.items():
        step, items = workflow.steps[step_id], None
        if is_per_item(workflow, step) and not state.status.is_final:
            items = store.runs.items(run.id, step_id)
        if items is not None and -1 not in items:
            state = _resume_items(workflow, step, state, items, store, run)
        elif state.status is Status.RUNNING:
            only_waited = not step.for_each and step.matrix is None and _only_waited(store, run, step, state)
            state = state.after_cut_off(is_harmless=may_run_again(workflow, step), only_waited=only_waited)
        elif state.status is Status.SKIPPED and not state.is_settled and (state.is_finally or not is_finishing):
            state = state.fresh()
        resumed[step_id] = state
    return resumed


def _resume_items(
    workflow: WorkflowFile, step: StepPart, state: StepState, items: Mapping[int, Any], store: Store, run: StoredRun
) -> StepState:
    """Return a step whose items continue: finished ones stay, and cut-off ones follow the rule for steps."""
    parts = {**dict(enumerate(state.parts)), **items}
    for number, record in items.items():
        item = StepState.from_record(record)
        if item.status is Status.RUNNING:
            only_waited = _only_waited(store, run, step, item)
            item = item.after_cut_off(is_harmless=may_run_again(workflow, step), only_waited=only_waited)
            parts[number] = {**record, **item.to_record()}
    if state.status is Status.RUNNING:
        state = state.put_off()
        state.attempts = sum(part.get("attempts", 0) for part in parts.values())
    state.parts = merge_items(state.parts, {number: parts[number] for number in items})
    return state


def _only_waited(store: Store, run: StoredRun, step: StepPart, state: StepState) -> bool:
    """Return whether a step certainly had not begun, because it waited for an approval."""
    asker, key = Principal.local().name, state.key_in(run.id)
    if step.approval and not store.proposals.was_used(asker, key):
        return True
    next_key = f"{key}.{state.attempts + 1}"
    return STEP_TYPES[step.type].asks_before_start and store.proposals.was_used(asker, next_key) is False
