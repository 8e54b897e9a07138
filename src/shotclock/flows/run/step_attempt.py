"""One attempt of a step as a call, and the span of a step above its attempts.

run nightly ─┬─ step fetch ─── try fetch ─── calls of the server
             ├─ step build ─┬─ try build
             │              └─ try build ─── exec ─── …
             └─ step audit ─── run audit ─── step scan ─── try scan
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...calls.call import Call, Outcome, Work, WorkView, answer, new_span_id, no_time_left, wound_down_problem
from ...calls.control import OBSERVER_NAME, Observe, control_of, live_calls, start_control
from ...calls.outcomes import outcome_of_error
from ...calls.runtime import Runtime
from ...core.envelope import Envelope
from ...core.errors import Ending, Failure
from ...core.limits import NS_PER_MS, Deadline
from ...core.overtime import ObserverKind, Overtime
from ...core.trace import TraceContext
from ...core.value_types import replace
from ...supervise import spans
from ...supervise.clock import monotonic_ns, wall_ns
from ...worker.context import Scope, Traced, current_scope
from ..steps.provider import Provider, StepCall, StepPart, StepResult
from .scheduler import Execute
from .state import Status, StepState, TemplateScope


class AnsweredAttempt(NamedTuple):
    envelope: Envelope
    output: Any = None
    rule: str | None = None  # the kind of a failure, such as `command/timeout`
    details: Mapping[str, Any] | None = None
    cut: str | None = None  # why the output is not whole
    is_long: bool = False  # because it is too long


async def run_attempt(
    provider: Provider,
    step: StepCall,
    runtime: Runtime,
    *,
    may_start: bool = True,
    ask_model: Observe | None = None,
    on_cancelled: Callable[[AnsweredAttempt], None] | None = None,
) -> AnsweredAttempt:
    """Run one attempt as a call of the provider. `on_cancelled` gets the partial result of a cancelled one."""
    rules = runtime.rules
    if ask_model is not None:
        rules = replace(rules, observers={**rules.observers, ObserverKind.MODEL: ask_model})
    call = runtime.begin(step.name, {}, step.clocks, rules=rules)
    call.time.min_time_ms = step.min_time_ms
    if step.used_ms:
        call.count_from(call.started_ns - step.used_ms * NS_PER_MS)
    if step.overtime is not None:
        call.overtime = Overtime(step.overtime)
    outer = current_scope.get() or Scope(runtime.inherited, -1, "caller", call)
    token = current_scope.set(change_scope(outer, outer.deadline, outer.span, call))
    work = call.work = _AttemptWork(call, provider.step_type.can_extend)
    live_calls.enter(call)
    start_control(call, runtime.observe)
    try:
        if call.no_time_left or not may_start:
            result = StepResult(no_time_left(call))
        else:
            result = await provider.run(step, call, runtime)
    except Failure as failure:
        outcome = outcome_of_error(failure)
        outcome.ending = Ending.NOT_STARTED
        result = StepResult(outcome)
    except asyncio.CancelledError:
        left = step.cancelled.result
        if not work.take_back_cancellation():
            if left is not None and on_cancelled is not None:
                on_cancelled(_answer_attempt(provider, call, left))
            raise
        result = _unwound_result(call, left)
    finally:
        current_scope.reset(token)
        live_calls.leave(call)
    return _answer_attempt(provider, call, result)


class _AttemptWork(Work):
    """The work of an attempt whose provider has none of its own: its calls wind down, then the attempt is cancelled."""

    __slots__ = ("_call", "_can_extend", "_is_stopped", "_limit_ms", "_task")

    def __init__(self, call: Call, can_extend: bool) -> None:
        self._call = call
        self._can_extend = can_extend
        self._limit_ms = call.clocks.timeout_ms or 0
        self._task = asyncio.current_task()
        self._is_stopped = False

    def move_bell(self) -> bool:
        """Extend the calls of the step. Other waits look at the deadline again when the old one is reached."""
        if not self._can_extend:
            return False
        call, before_ms = self._call, self._limit_ms
        longer_ms = (call.clocks.timeout_ms or 0) - before_ms
        made = [
            each
            for each in live_calls.made_by(call)
            if each.time.parent is call.time.parent and each.name != OBSERVER_NAME
        ]
        if longer_ms and not all(control_of(each).follow_caller(each.time.parent, longer_ms) for each in made):
            return False
        self._limit_ms = before_ms + longer_ms
        return True

    async def look(self) -> WorkView:
        """Return only whether it has begun: not while an App is imported for it."""
        return WorkView(has_begun=not self._can_extend or bool(live_calls.made_by(self._call)))

    def stop_unwound(self) -> None:
        if self._task is not None and not self._is_stopped:
            self._is_stopped = True
            self._task.cancel()

    def take_back_cancellation(self) -> bool:
        """Return whether only `stop_unwound` has cancelled the attempt."""
        return self._is_stopped and self._task is not None and self._task.uncancel() == 0


def _unwound_result(call: Call, left: StepResult | None) -> StepResult:
    """Return the partial result of an attempt that did not wind down in time."""
    problem = wound_down_problem(call)
    if left is None:
        return StepResult(Outcome(Ending.CANCELLED, problem))
    outcome = left.outcome
    if isinstance(outcome, Envelope):
        survivors: Any = outcome.meta.get("survivors") or ()
        outcome = Outcome(Ending(outcome.ending), problem, outcome.data, survivors=survivors)
    outcome.problem = problem
    return StepResult(outcome, left.output, left.rule)


def _answer_attempt(provider: Provider, call: Call, result: StepResult) -> AnsweredAttempt:
    envelope = result.outcome if isinstance(result.outcome, Envelope) else answer(call, result.outcome)
    if result.rewrite is not None:
        envelope = result.rewrite(envelope)
    rule = result.rule or provider.step_type.rule_for(envelope.code)
    return AnsweredAttempt(envelope, result.output, rule, result.details, result.cut, result.is_long)


# The ids of a span are made even if spans are not recorded: the calls below pass theirs on to their children.


def trace_steps(execute: Execute, deadline_of: Callable[[str], Deadline | None]) -> Execute:
    """Execute each step below a span of its own and inside its deadline."""

    async def execute_traced(name: str, step: StepPart, state: StepState, scope: TemplateScope) -> None:
        outer = scope_of_run()
        run = outer.span.trace
        own, began_ns = run.below(new_span_id()), monotonic_ns()
        token = current_scope.set(change_scope(outer, deadline_of(name), own, outer.call))
        try:
            await execute(name, step, state, scope)
        finally:
            current_scope.reset(token)
            ended_ns = wall_ns()
            _record_span(state, own, run.span_id, ended_ns - (monotonic_ns() - began_ns), ended_ns)

    return execute_traced


def record_skipped_span(state: StepState) -> None:
    outer = current_scope.get()
    if outer is not None:
        run, now_ns = outer.span.trace, wall_ns()
        _record_span(state, run.below(new_span_id()), run.span_id, now_ns, now_ns)


def _record_span(state: StepState, own: TraceContext, run_id: str, started_ns: int, ended_ns: int) -> None:
    """Record the span of a step, made at once because the state changes when the step runs again."""
    if spans.recorder is None:
        return
    # A cancelled step may not be final yet.
    status = state.status if state.status.is_final else Status.CANCELLED
    attributes: dict[str, spans.Attribute] = {
        "shotclock.kind": "step",
        "shotclock.step.id": state.id,
        "shotclock.step.type": state.type,
        "shotclock.step.status": status.value,
        "shotclock.step.attempts": state.attempts,
    }
    # Without the reasons for overtime, which may quote secrets.
    granted_ms = [news["granted_ms"] for news in state.overtime if news["event"] == "overtime"]
    optional = {
        "shotclock.timeout_ms": state.timeout_ms or None,
        "shotclock.ending": state.ending,
        "shotclock.step.reason": None if state.reason is None else state.reason.value,
        "shotclock.step.cause": state.cause,
        "shotclock.overtime.requests": len(granted_ms) or None,
        "shotclock.overtime.granted_ms": sum(granted_ms) if granted_ms else None,
        "shotclock.wind_down.by": next((str(n["by"]) for n in state.overtime if n["event"] == "wind_down"), None),
    }
    attributes |= {name: each for name, each in optional.items() if each is not None}
    code, message = None, ""
    if status.is_bad:
        error = state.error or {}
        code = str(error.get("code") or status.value.upper())
        message = str(error.get("message") or "")  # already redacted
    span = spans.Span(f"step {state.id}", own, run_id, started_ns, ended_ns, attributes, code, message)
    spans.recorder.tell(lambda: span)


def scope_of_run() -> Scope:
    scope = current_scope.get()
    if scope is None:
        raise RuntimeError("a step is executed outside of a run")
    return scope


def change_scope(scope: Scope, deadline: Deadline | None, span: Traced, call: Any) -> Scope:
    """Copy the scope. Each step makes three copies, and `replace` takes several times as long."""
    return Scope(deadline, scope.depth, scope.name, span, call, scope.overtime_address)
