"""`workflow`: another workflow file, as a run of its own inside the deadline of this one.

How a file is run is the engine's business, which stands above the providers; so it is handed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.durations import in_seconds
from ..core.effects import Ending
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.records import dataclass, replace_fields
from ..process.context import Scope
from ..runtime.call import answer, no_time_left
from ..runtime.command_runner import shielded
from ..runtime.handlers import raised
from ..runtime.loop_call import current_scope
from ..runtime.runtime import Runtime
from .provider import StepCall, StepResult, admitted, hand_over

# What stopping a nested run may take beyond the grace of its steps: kills, their verification and the record, and its
# clean-up, which has a limit of its own (CLEAN_UP_LIMIT_MS) that runs out before this.
STOP_LIMIT_S = 320.0


@dataclass(frozen=True, slots=True)
class Inner:
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


Run = Callable[[Inner], Awaitable[Envelope]]


class WorkflowProvider:
    """The rule of a failure is `workflow/timeout`, `workflow/invalid`, `workflow/inputs`, `workflow/depth`,
    `workflow/cancelled` or `workflow/failed`.

    The output is what the file's `outputs` say, or the outputs of its steps; the envelope's data is that of the run.
    """

    def __init__(self, run: Run) -> None:
        """`run` takes the deadline from the current scope, and raises Failure if the file cannot be run."""
        self._run = run

    async def run(self, call: StepCall, runtime: Runtime) -> StepResult:
        admission = admitted(call, runtime)
        if admission.no_time_left:
            return StepResult(answer(admission, no_time_left(admission)), None, "workflow/timeout")
        outer = current_scope.get()
        depth = -1 if outer is None else outer.depth
        # Named by whose clock it is, so that what it stops says the truth about who stopped it.
        # The run inside is what is called: it stands where this call would, below the step.
        bound = admission.bound
        set_ms = bound.limit_ms if bound.source is bound.bell else 0
        scope = Scope(bound.bell, depth, bound.owner, admission.caller, set_ms)
        token = current_scope.set(scope)
        try:
            envelope = await self._until_ended(call)
        except Failure as failure:
            outcome = raised(failure)
            outcome.ending = Ending.NOT_STARTED
            envelope = answer(admission, outcome)
        finally:
            current_scope.reset(token)
        data = envelope.data
        if envelope.error is not None and isinstance(data, dict) and "run_id" in data:
            known = envelope.error.get("context")
            context = dict(known) if isinstance(known, dict) else {}
            if envelope.fired is not None and envelope.fired.source is bound.bell:
                # What rang is the step's clock, or that of the run around it. That the run inside had a little less
                # than the file says is our reserve.
                fired = replace_fields(envelope.fired, limit_ms=bound.limit_ms, source=bound.source)
                envelope.error["message"] = f"Workflow timed out after {in_seconds(bound.limit_ms)}"
                context["clock"] = fired.as_context()
                envelope = Envelope(data, envelope.error, envelope.warnings, envelope.meta, fired=fired)
            assert envelope.error is not None
            envelope.error["context"] = {**context, "run_id": data["run_id"], "failed": data.get("failed", [])}
        return StepResult(envelope, _output(envelope), _rule(envelope))

    async def _until_ended(self, call: StepCall) -> Envelope:
        stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        file = call.folder / str(call.settings["workflow"])
        inner = Inner(file, call.settings.get("inputs", {}), call.env, call.step_id, call.item, stop)
        running = asyncio.ensure_future(self._run(inner))
        try:
            return await asyncio.shield(running)  # bounded by the deadline that its steps are inside of
        except asyncio.CancelledError as cancelled:
            if not running.done():
                stop.set_result("the run around it")
                grace_s = (call.clocks.grace_ms or 0) / 1000
                await shielded(asyncio.wait([running], timeout=STOP_LIMIT_S + grace_s))
                running.cancel()
            if running.done() and not running.cancelled() and running.exception() is None:
                envelope = running.result()
                hand_over(cancelled, StepResult(envelope, _output(envelope), _rule(envelope)))
            raise

    async def close(self) -> None:
        pass


def _output(envelope: Envelope) -> Any:
    data: Any = envelope.data
    if not isinstance(data, dict) or "steps" not in data:
        return None
    if "outputs" in data:
        return data["outputs"]
    return {name: step["output"] for name, step in data["steps"].items()}


def _rule(envelope: Envelope) -> str | None:
    match envelope.code:
        case None:
            return None
        case "TIMEOUT" | "NO_TIME_LEFT":
            return "workflow/timeout"
        case "WORKFLOW_INVALID" | "FILE_NOT_FOUND" | "FILE_UNREADABLE":
            return "workflow/invalid"
        case "ARG_ERROR":
            return "workflow/inputs"
        case "DEPTH_EXCEEDED":
            return "workflow/depth"
        case "CANCELLED":
            return "workflow/cancelled"
        case _:
            return "workflow/failed"
