"""`ui` steps: an execution on a browser or a phone, on the device of `shotclock ui`."""

from __future__ import annotations

from asyncio import CancelledError
from typing import Any, Literal

from ...calls.call import Call
from ...calls.outcomes import failure_outcome
from ...calls.runtime import Runtime
from ...core.errors import Ending, Failure
from ...core.value_types import JsonObject
from ...supervise.clock import monotonic_ns
from ...ui.client import KILL_MARGIN_MS, RESULT_MARGIN_MS, execute_async
from ...ui.device import DEFAULT_DEVICE, kind_of
from ...ui.payload import BEST_EFFORT_MAX_TIMEOUT_MS, DEFAULT_TIMEOUT_MS, MIN_TIMEOUT_MS, max_timeout_ms, read_execution
from ...ui.verbs import new_head
from .provider import Provider, StepCall, StepPart, StepResult, StepType, cancelled_outcome, duration_ms

RESULT_MS = RESULT_MARGIN_MS + KILL_MARGIN_MS


class UiStep(StepPart):
    type: Literal["ui"]
    execution: JsonObject | None = None
    actions: list[Any] | None = None  # the step's `timeout` is their timeoutMs
    mode: str = "direct"
    device: str = DEFAULT_DEVICE

    def check_together(self) -> None:
        super().check_together()
        problems: list[str] = []
        if not _has_template(self.device):
            try:
                kind_of(self.device)
            except Failure as unknown:
                problems.append(f"device: {unknown}")
        if (self.execution is None) == (self.actions is None):
            problems.append("a ui step has either `execution` or `actions`")
        else:
            problems += self._find_problems()
        if problems:
            raise ValueError("; ".join(problems))

    def _find_problems(self) -> list[str]:
        """Return the problems of an execution without templates."""
        problems: list[str] = []
        most_ms, timeout_ms = max_timeout_ms(self.mode), duration_ms(self.timeout, "ms") if self.timeout else 0
        if self.actions is not None and timeout_ms > most_ms:
            problems.append(f"timeout: {timeout_ms} ms, and an execution has at most {most_ms}")
        payload = self.execution or _payload_of(self.actions, self.mode, self.timeout)
        if not _has_template(payload):
            try:
                read_execution(payload)
            except Failure as failure:
                errors: Any = failure.context["errors"]
                problems += [f"{each['field']}: {each['message']}" for each in errors]
        return problems


def _default_ms(step: Any) -> int:
    """Return the execution's own timeout, and the margin for the result."""
    written: Any = (getattr(step, "execution", None) or {}).get("timeoutMs")
    is_number = type(written) in (int, float) and 0 < written <= BEST_EFFORT_MAX_TIMEOUT_MS
    return (int(written) if is_number else DEFAULT_TIMEOUT_MS) + RESULT_MS


UI = StepType(
    "ui",
    "actions on a browser or a phone",
    UiStep,
    lambda services: UiProvider(),
    default_ms=DEFAULT_TIMEOUT_MS + RESULT_MS,
    default_for=_default_ms,
    unit="ms",
    has_typed_output=True,
    value_keys=frozenset({"execution", "actions"}),
    rules={
        "EXECUTION_VALIDATION_FAILED": "invalid",
        "EXECUTION_CONFLICT_IN_FLIGHT": "conflict",
        "WAIT_TIMEOUT": "wait",
        "EVAL_TIMEOUT": "timeout",
        "OPERATION_TIMEOUT": "timeout",
        "RESULT_ENVELOPE_TIMEOUT": "timeout",
        "DEVICE_LOST": "device",
        "DEVICE_UNAVAILABLE": "device",
    },
)
STEP_TYPES = (UI,)


class UiProvider(Provider):
    """Provider of executions. The output is the result, with the data of the steps under their ids in `steps`."""

    step_type = UI

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        remaining_ms = None if call.bound.bell is None else call.bound.bell.remaining_ms(monotonic_ns())
        settings = step.settings
        payload = settings.get("execution")
        if payload is None:
            task = (step.key or step.step_id)[:128]
            payload = _payload_of(settings["actions"], settings["mode"], step.clocks.timeout_ms, task)
        traceparent = call.trace.traceparent
        try:
            envelope = await execute_async(
                str(settings["device"]), payload, remaining_ms=remaining_ms, traceparent=traceparent
            )
        except Failure as failure:
            return StepResult(failure_outcome(failure))
        except CancelledError:
            step.cancelled.result = StepResult(cancelled_outcome(Ending.CANCELLED))
            raise
        data: Any = envelope.data
        if isinstance(data, dict) and isinstance(data.get("stepResults"), list):
            data = {**data, "steps": {each["id"]: each["data"] for each in data["stepResults"]}}
        return StepResult(envelope, data)


def _payload_of(actions: Any, mode: str, timeout: Any, task: str = "check") -> JsonObject:
    """Return a payload. `timeout` is the step's, in milliseconds or as written."""
    timeout_ms = duration_ms(timeout, "ms") if timeout else DEFAULT_TIMEOUT_MS
    return {
        **new_head("step", "shotclock-workflow"),
        "taskId": task,
        "timeoutMs": max(MIN_TIMEOUT_MS, min(timeout_ms, max_timeout_ms(mode))),
        "mode": mode,
        "actions": actions,
    }


def _has_template(written: Any) -> bool:
    """Return whether any text in it is a template."""
    if isinstance(written, dict):
        return any(map(_has_template, written.values())) or any(map(_has_template, written))
    if isinstance(written, list):
        return any(map(_has_template, written))
    return isinstance(written, str) and ("{{" in written or "{%" in written)
