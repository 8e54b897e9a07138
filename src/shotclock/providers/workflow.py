"""`workflow`: another workflow file, as a run of its own inside the deadline of this one.

How a file is run is the engine's business, which stands above the providers; so each step comes with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core.clocks import in_seconds
from ..core.envelope import Envelope
from ..core.validation import field
from ..core.value_types import replace, value
from .provider import Provider, StepCall, StepPart, StepResult, StepType, hand_over

if TYPE_CHECKING:
    import asyncio

    from ..runtime.call import Call
    from ..runtime.runtime import Runtime


class WorkflowStep(StepPart):
    type: Literal["workflow"]
    workflow: str = field(min_length=1, keys=("workflow", "config"))
    inputs: dict[str, Any] = field(default={}, keys=("inputs", "args"))


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

# What stopping a nested run may take beyond the grace of its steps: kills, their verification and the record, and its
# clean-up, which has a limit of its own (CLEAN_UP_LIMIT_MS) that runs out before this.
STOP_LIMIT_S = 320.0


@value
class NestedRun:
    """A workflow to be run inside another."""

    file: Path
    inputs: Mapping[str, Any]
    env: Mapping[str, str]
    """What its steps see of the environment, beside what they ask for."""
    step_id: str
    item: tuple[int, int]
    """Which of how many items of the step it is for."""
    stop: asyncio.Future[str]
    """Stops it, once it holds by whom."""


RunFile = Callable[[NestedRun], Awaitable[Envelope]]
"""Takes the bound of the call in the current scope. Raises Failure if the file cannot be run."""


class WorkflowProvider(Provider):
    """Provider of nested workflows. The rule of a failure is `workflow/timeout`, `workflow/invalid`, `workflow/inputs`,
    `workflow/depth`, `workflow/cancelled` or `workflow/failed`.

    The output is what the file's `outputs` say, or the outputs of its steps; the envelope's data is that of the run.
    """

    step_type = WORKFLOW

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        from ..process.context import Scope, current_scope

        outer = current_scope.get()
        depth = -1 if outer is None else outer.depth
        # The run inside is what is called: it stands where this call would, below the step, and inside its bound.
        token = current_scope.set(Scope(call.bound.bell, depth, call.bound.owner, call.caller, call))
        try:
            envelope = await self._until_ended(step)
        finally:
            current_scope.reset(token)
        data, bound = envelope.data, call.bound  # as it is now: it may have been extended
        if envelope.error is not None and isinstance(data, dict) and "run_id" in data:
            known = envelope.error.get("context")
            context = dict(known) if isinstance(known, dict) else {}
            if envelope.fired is not None and envelope.fired.source is bound.bell:
                # What rang is the step's clock, or that of the run around it. That the run inside had a little less
                # than the file says is our reserve.
                fired = replace(envelope.fired, limit_ms=bound.limit_ms, source=bound.source)
                envelope.error["message"] = f"Workflow timed out after {in_seconds(bound.limit_ms)}{fired.kept}"
                context["clock"] = fired.as_context()
                envelope = Envelope(data, envelope.error, envelope.warnings, envelope.meta, fired=fired)
            assert envelope.error is not None
            envelope.error["context"] = {**context, "run_id": data["run_id"], "failed": data.get("failed", [])}
        return StepResult(envelope, _output(envelope))

    async def _until_ended(self, step: StepCall) -> Envelope:
        import asyncio

        from ..runtime.command_runner import run_shielded

        assert step.run_file is not None, "a workflow is run by the engine alone"
        stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        file = step.folder / str(step.settings["workflow"])
        nested = NestedRun(file, step.settings.get("inputs", {}), step.env, step.step_id, step.item, stop)
        running = asyncio.ensure_future(step.run_file(nested))
        try:
            return await asyncio.shield(running)  # bounded by the deadline that its steps are inside of
        except asyncio.CancelledError as cancelled:
            if not running.done():
                stop.set_result("the run around it")
                grace_s = (step.clocks.grace_ms or 0) / 1000
                await run_shielded(asyncio.wait([running], timeout=STOP_LIMIT_S + grace_s))
                running.cancel()
            if running.done() and not running.cancelled() and running.exception() is None:
                envelope = running.result()
                hand_over(cancelled, StepResult(envelope, _output(envelope)))
            raise


def _output(envelope: Envelope) -> Any:
    data: Any = envelope.data
    if not isinstance(data, dict) or "steps" not in data:
        return None
    if "outputs" in data:
        return data["outputs"]
    return {name: step["output"] for name, step in data["steps"].items()}
