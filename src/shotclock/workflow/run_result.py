"""What a run answers with, once its steps are over. Pure: it is the same wherever the steps were carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..core.clocks import Fired, format_duration
from ..core.envelope import Problem
from ..core.errors import Ending
from ..runtime.call import Call, Outcome, wound_down_problem
from .state import Reason, StepState, lists_of


def describe_steps(run_id: str, name: str, states: Mapping[str, StepState]) -> dict[str, object]:
    """Return what the envelope of a run shows of it and of its steps."""
    steps = {step_id: state.to_answer() for step_id, state in states.items()}
    return {"run_id": run_id, "name": name, "steps": steps, **lists_of(states)}


def judge_steps(
    call: Call,
    states: Mapping[str, StepState],
    data: dict[str, object],
    *,
    is_out_of_time: bool,
    find_fired: Callable[[], Fired],
) -> Outcome:
    """Return the outcome of a run that nobody stopped. Out of time it failed, whatever its steps tolerate."""
    bad = [name for name, state in states.items() if state.status.is_bad and not state.continues]
    was_cut = any(state.reason is Reason.RUN_ENDED for state in states.values())
    if call.winding_down is not None and (bad or was_cut):
        return Outcome(Ending.CANCELLED, wound_down_problem(call), {**data, "partial": True})
    if is_out_of_time or any(state.is_cut_short for state in states.values()):
        fired = find_fired()
        return Outcome(Ending.KILLED, Problem("TIMEOUT", explain_limit(call, fired), fired=fired), data)
    if not bad:
        return Outcome(Ending.FINISHED, data=data)
    names = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return Outcome(Ending.FINISHED, Problem("STEPS_FAILED", f"{len(bad)} of {len(states)} steps: {names}"), data)


def explain_limit(call: Call, fired: Fired) -> str:
    """Say which limit a run has reached."""
    owner = "its caller" if fired.owner == "caller" else fired.owner
    whose = "" if fired.owner == call.name else f" that {owner} left it"
    return f"the run did not end within {'the ' if whose else ''}{format_duration(fired.limit_ms)}{whose}"
