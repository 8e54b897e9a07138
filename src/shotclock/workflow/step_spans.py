"""The span of a step: above the calls of its tries, below its run.

    run nightly ─┬─ step fetch ─── try fetch ─── what the server does
                 ├─ step build ─┬─ try build
                 │              └─ try build ─── exec ─── …
                 └─ step audit ─── run audit ─── step scan ─── try scan

Its ids are made in any case, because the calls below it tell theirs to what they start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..core.deadlines import Deadline
from ..core.trace import TraceContext
from ..process import spans
from ..process.clock import monotonic_ns, wall_ns
from ..providers.step_type import StepPart
from ..runtime.call import new_span_id
from ..runtime.loop_call import current_scope
from .scheduler import Execute
from .state import Status, StepState


def traced(execute: Execute, deadline_of: Callable[[str], Deadline | None]) -> Execute:
    """The same, with everything that it calls below a span of the step's own, and inside the step's deadline."""

    async def execute_traced(name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        around = current_scope.get()
        assert around is not None, "steps are executed inside of a run"
        run = around.span.trace
        own, began_ns = run.below(new_span_id()), monotonic_ns()
        token = current_scope.set(replace(around, span=own, deadline=deadline_of(name)))
        try:
            await execute(name, step, state, scope)
        finally:
            current_scope.reset(token)
            if spans.recorder is not None:
                ended_ns = wall_ns()
                span = _span(state, own, run.span_id, ended_ns - (monotonic_ns() - began_ns), ended_ns)
                spans.recorder.tell(lambda: span)

    return execute_traced


def tell_of_skipped(state: StepState) -> None:
    """A step that was never executed is a moment of its run."""
    around = current_scope.get()
    if spans.recorder is not None and around is not None:
        run, now_ns = around.span.trace, wall_ns()
        span = _span(state, run.below(new_span_id()), run.span_id, now_ns, now_ns)
        spans.recorder.tell(lambda: span)


def _span(state: StepState, own: TraceContext, run_id: str, started_ns: int, ended_ns: int) -> spans.Span:
    """Made at once: what a state says is changed when the step runs again."""
    # It is not final where a cancellation has gone through it.
    status = state.status if state.status.is_final else Status.CANCELLED
    attributes: dict[str, spans.Attribute] = {
        "shotclock.kind": "step",
        "shotclock.step.id": state.id,
        "shotclock.step.type": state.type,
        "shotclock.step.status": status.value,
        "shotclock.step.attempts": state.attempts,
    }
    if state.timeout_ms:
        attributes["shotclock.timeout_ms"] = state.timeout_ms
    if state.ending is not None:
        attributes["shotclock.ending"] = state.ending
    if state.reason is not None:
        attributes["shotclock.step.reason"] = state.reason.value
    if state.cause is not None:
        attributes["shotclock.step.cause"] = state.cause
    code, message = None, ""
    if status.is_bad:
        error = state.error or {}
        code = str(error.get("code") or status.value.upper())
        message = str(error.get("message") or "")  # without secrets: the state has none
    return spans.Span(f"step {state.id}", own, run_id, started_ns, ended_ns, attributes, code, message)
