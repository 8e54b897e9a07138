"""`workflow`: another workflow file, as a run of its own inside the deadline of this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ...core.envelope import Envelope
from ...core.limits import in_seconds
from ...core.validation import field
from ...core.value_types import JsonObject, replace
from .provider import NestedRun, Provider, StepCall, StepPart, StepResult, StepType

if TYPE_CHECKING:
    import asyncio

    from ...calls.call import Call
    from ...calls.runtime import Runtime


class WorkflowStep(StepPart):
    type: Literal["workflow"]
    workflow: str = field(min_length=1, keys=("workflow", "config"))
    inputs: JsonObject = field(default={}, keys=("inputs", "args"))


WORKFLOW = StepType(
    "workflow",
    "another workflow",
    WorkflowStep,
    lambda services: WorkflowProvider(),
    default_ms=None,
    has_typed_output=True,
    can_repeat=True,
    waits_when_approved=True,
    value_keys=frozenset({"inputs"}),
    rules={
        "WORKFLOW_INVALID": "invalid",
        "FILE_NOT_FOUND": "invalid",
        "FILE_UNREADABLE": "invalid",
        "ARG_ERROR": "inputs",
        "DEPTH_EXCEEDED": "depth",
    },
)
STEP_TYPES = (WORKFLOW,)

# Beyond the grace of its steps: kills, verification, the record, and the clean-up, whose limit (CLEAN_UP_LIMIT_MS) is
# shorter.
STOP_LIMIT_S = 320.0


class WorkflowProvider(Provider):
    """Provider of nested workflows. The output is the file's `outputs`, or those of its steps."""

    step_type = WORKFLOW

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        from ...worker.context import Scope, current_scope

        outer = current_scope.get()
        depth = -1 if outer is None else outer.depth
        # The nested run takes the place of this call in the scope.
        token = current_scope.set(Scope(call.bound.bell, depth, call.bound.owner, call.caller, call))
        try:
            envelope = await self._until_ended(step)
        finally:
            current_scope.reset(token)
        data, bound = envelope.data, call.bound  # overtime may have extended it
        if envelope.error is not None and isinstance(data, dict) and "run_id" in data:
            written = envelope.error.get("context")
            context = dict(written) if isinstance(written, dict) else {}
            if envelope.fired is not None and envelope.fired.source is bound.bell:
                # The clock of the step or of the outer run fired; the nested run had the reserve less.
                fired = replace(envelope.fired, limit_ms=bound.limit_ms, source=bound.source)
                envelope.error["message"] = f"Workflow timed out after {in_seconds(bound.limit_ms)}{fired.kept}"
                context["clock"] = fired.as_context()
                envelope = Envelope(data, envelope.error, envelope.warnings, envelope.meta, fired=fired)
            assert envelope.error is not None
            envelope.error["context"] = {**context, "run_id": data["run_id"], "failed": data.get("failed", [])}
        return StepResult(envelope, _output(envelope))

    async def _until_ended(self, step: StepCall) -> Envelope:
        import asyncio

        from ...calls.supervised_commands import run_shielded

        assert step.run_file is not None, "a workflow is run by the engine alone"
        stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        file = step.folder / str(step.settings["workflow"])
        nested = NestedRun(file, step.settings.get("inputs", {}), step.env, step.step_id, step.item, stop)
        running = asyncio.ensure_future(step.run_file(nested))
        try:
            return await asyncio.shield(running)  # bounded by the deadline of its steps
        except asyncio.CancelledError:
            if not running.done():
                stop.set_result("the run around it")
                await run_shielded(asyncio.wait([running], timeout=STOP_LIMIT_S + (step.clocks.grace_ms or 0) / 1000))
                running.cancel()
            if running.done() and not running.cancelled() and running.exception() is None:
                envelope = running.result()
                step.cancelled.result = StepResult(envelope, _output(envelope))
            raise


def _output(envelope: Envelope) -> Any:
    data: Any = envelope.data
    if not isinstance(data, dict) or "steps" not in data:
        return None
    if "outputs" in data:
        return data["outputs"]
    return {name: step["output"] for name, step in data["steps"].items()}
