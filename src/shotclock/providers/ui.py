"""`ui` steps: an execution on a browser or a phone, on the device that `shotclock ui` keeps as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..core.errors import Ending, Failure
from ..process.clock import monotonic_ns
from ..ui import budgets
from ..ui.client import KILL_MARGIN_MS, RESULT_MARGIN_MS
from ..ui.device_names import DEFAULT_DEVICE, kind_of
from .provider import (
    Provider,
    StepCall,
    StepPart,
    StepResult,
    StepType,
    cancelled_outcome,
    duration_ms,
    hand_over,
)

if TYPE_CHECKING:
    from ..runtime.call import Call
    from ..runtime.runtime import Runtime


class UiStep(StepPart):
    type: Literal["ui"]
    execution: dict[str, Any] | None = None
    """A whole payload."""
    actions: list[Any] | None = None
    """Only its actions; the rest is the step's: `timeout` is its timeoutMs."""
    mode: str = "direct"
    device: str = DEFAULT_DEVICE

    def check_together(self) -> None:
        wrong: list[str] = []
        if not _has_template(self.device):
            try:
                kind_of(self.device)
            except Failure as unknown:
                wrong.append(f"device: {unknown}")
        if (self.execution is None) == (self.actions is None):
            wrong.append("a ui step has either `execution` or `actions`")
        else:
            wrong += self._find_wrong()
        if wrong:
            raise ValueError("; ".join(wrong))

    def _find_wrong(self) -> list[str]:
        """Return what is wrong with the execution, as far as it is known before the step runs."""
        wrong: list[str] = []
        most_ms, timeout_ms = _most_ms(self.mode), duration_ms(self.timeout, "ms") if self.timeout else 0
        if self.actions is not None and timeout_ms > most_ms:
            wrong.append(f"timeout: {timeout_ms} ms, and an execution has at most {most_ms}")
        written = self.execution or _payload_of(self.actions, self.mode, self.timeout)
        if _has_template(written):
            return wrong
        from ..ui.payload import read_execution

        try:
            read_execution(written)
        except Failure as failure:
            wrong += [f"{each['field']}: {each['message']}" for each in failure.context["errors"]]  # type: ignore[attr-defined]
        return wrong


def _default_ms(step: Any) -> int:
    """Return the timeout of a step that has none: its execution's own, and what is waited for the result."""
    written: Any = (getattr(step, "execution", None) or {}).get("timeoutMs")
    is_number = type(written) in (int, float) and 0 < written <= budgets.BEST_EFFORT_MAX_TIMEOUT_MS
    return (int(written) if is_number else budgets.DEFAULT_TIMEOUT_MS) + RESULT_MARGIN_MS + KILL_MARGIN_MS


UI = StepType(
    "ui",
    "actions on a browser or a phone",
    UiStep,
    lambda services: UiProvider(),
    default_ms=budgets.DEFAULT_TIMEOUT_MS + RESULT_MARGIN_MS + KILL_MARGIN_MS,
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
    """Provider of executions. The rule of a failure is `ui/timeout`, `ui/wait`, `ui/device`, `ui/conflict`,
    `ui/invalid`, `ui/cancelled` or `ui/failed`.

    The output is the result, with the data of the steps under their ids in `steps`.
    """

    step_type = UI

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        from asyncio import CancelledError

        from ..runtime.outcomes import failure_outcome
        from ..ui.async_client import execute
        from ..ui.payload import read_execution

        remaining_ms = None if call.bound.bell is None else call.bound.bell.remaining_ms(monotonic_ns())
        try:
            payload = read_execution(_payload(step)).written
            traceparent = call.trace.traceparent
            device = str(step.settings["device"])
            envelope = await execute(device, payload, remaining_ms=remaining_ms, traceparent=traceparent)
        except Failure as failure:
            return StepResult(failure_outcome(failure))
        except CancelledError as cancelled:
            hand_over(cancelled, StepResult(cancelled_outcome(Ending.CANCELLED)))
            raise
        data: Any = envelope.data
        if isinstance(data, dict) and isinstance(data.get("stepResults"), list):
            data = {**data, "steps": {each["id"]: each["data"] for each in data["stepResults"]}}
        return StepResult(envelope, data)


def _payload(step: StepCall) -> Any:
    """Return the execution of a step as it is written, or with what its actions alone do not say."""
    execution = step.settings.get("execution")
    if execution is not None:
        return execution
    settings, task = step.settings, (step.key or step.step_id)[:128]
    return _payload_of(settings["actions"], settings["mode"], step.clocks.timeout_ms, task)


def _payload_of(actions: Any, mode: str, timeout: Any, task: str = "check") -> dict[str, Any]:
    """Return a payload of these actions. `timeout` is the step's: a number of milliseconds, or as it is written."""
    from ..ui.builders import EXPECTED_FORMAT, new_command_id

    timeout_ms = duration_ms(timeout, "ms") if timeout else budgets.DEFAULT_TIMEOUT_MS
    return {
        "commandId": new_command_id("step"),
        "taskId": task,
        "source": "shotclock-workflow",
        "expectedFormat": EXPECTED_FORMAT,
        "timeoutMs": max(budgets.MIN_TIMEOUT_MS, min(timeout_ms, _most_ms(mode))),
        "mode": mode,
        "actions": actions,
    }


def _most_ms(mode: str) -> int:
    return budgets.BEST_EFFORT_MAX_TIMEOUT_MS if mode == "best_effort" else budgets.MAX_TIMEOUT_MS


def _has_template(written: Any) -> bool:
    """Return whether anything in it is only known when the step runs."""
    if isinstance(written, dict):
        return any(map(_has_template, written.values())) or any(map(_has_template, written))
    if isinstance(written, list):
        return any(map(_has_template, written))
    return isinstance(written, str) and ("{{" in written or "{%" in written)
