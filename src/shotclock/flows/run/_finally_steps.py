"""Steps of `finally`: what their templates see of the run, and how far an earlier process had come with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...core.value_types import JsonObject
from .state import Reason, Status, StepState

# Texts, so that a template of a run without a failure does not fail.
NO_FAILURE = {"step": "", "code": "", "message": ""}


def describe_run(
    states: Iterable[StepState], *, is_stopped: bool, is_winding_down: bool, is_out_of_time: bool
) -> JsonObject:
    """Return `status` and `failure` of a run whose `finally` steps begin: `run.status` in their templates."""
    ended = [state for state in states if not state.is_finally]
    bad = [state for state in ended if state.status.is_bad and not state.continues]
    # A step that was stopped because another one failed is not the cause.
    causes = [state for state in bad if state.status is not Status.CANCELLED]
    first = min(causes, key=_ended_ms, default=None)
    is_wound_down = is_winding_down and (bad or was_stopped_before(ended))
    if is_stopped or is_wound_down or (bad and not causes):
        status = "cancelled"
    elif is_out_of_time or any(state.is_cut_short for state in ended):
        status = "timed_out"
    elif bad:
        status = "failed"
    else:
        status = "cancelled" if was_stopped_before(ended) else "succeeded"
    failure = dict(NO_FAILURE)
    if first is not None:
        error = first.error or {}
        failure = {"step": first.id, "code": error.get("code", ""), "message": error.get("message", "")}
    elif status != "succeeded":
        failure["code"] = "TIMEOUT" if status == "timed_out" else "CANCELLED"
    return {"status": status, "failure": failure}


def _ended_ms(state: StepState) -> int:
    return (state.started_ms or 0) + (state.duration_ms or 0)


def was_stopped_before(states: Iterable[StepState]) -> bool:
    """Return whether steps never ran because the run was stopped."""
    return any(state.reason is Reason.RUN_ENDED for state in states)


def has_begun(states: Mapping[str, StepState]) -> bool:
    """Return whether an earlier process had begun the `finally` steps of a run."""
    return any(
        state.is_finally and (state.has_begun or state.started_ms is not None or state.status.is_bad)
        for state in states.values()
    )
