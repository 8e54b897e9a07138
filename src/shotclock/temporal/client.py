"""Runs on Temporal as their caller sees them: started, waited for, stopped, looked at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.value_types import value
from ..runtime.call import inherited_trace
from ..workflow.engine import RunCaller, RunRequest
from ..workflow.lint import identity
from ..workflow.plan import run_timeout_ms
from ..workflow.schema import check_inputs
from ..workflow.state import StepState, record_workflow
from .messages import DEFAULT_HEARTBEAT_MS, DEFAULT_QUEUE, RUN_WORKFLOW, VERSION, RunInput

# How often the caller looks how far the run is, where anybody wants to know.
LOOK_S = 0.5
# A workflow whose worker has died in the middle of a decision goes on elsewhere after this.
TASK_LIMIT_S = 5
# What the end of a run takes beyond its deadline: the grace of its steps, and a worker that has to be missed first.
END_MARGIN_MS = 30_000
RPC_LIMIT = timedelta(seconds=10)


@value
class EngineOptions:
    """How a run is given to the engine."""

    queue: str = DEFAULT_QUEUE
    heartbeat_ms: int = DEFAULT_HEARTBEAT_MS


async def start(client: Client, request: RunRequest, caller: RunCaller, options: EngineOptions) -> Envelope:
    """Run a workflow on the engine and return its one envelope. Raises Failure if it cannot be begun."""
    limits = [limit for limit in (run_timeout_ms(request.workflow), request.timeout_ms) if limit]
    given: RunInput = {
        "version": VERSION,
        "run_id": request.run_id,
        "name": request.name,
        "file": request.file,
        "folder": str(request.folder),
        "files": [identity(request.file)],
        "workflow": record_workflow(request.workflow, caller.variables),
        "inputs": check_inputs(request.workflow, request.inputs),
        "trace_id": inherited_trace().trace_id,
        "limit_ms": min(limits) if limits else 0,
        "deadline_at": None,
        "deadline_owner": "caller",
        "heartbeat_ms": options.heartbeat_ms,
        "queue": options.queue,
    }
    try:
        handle = await client.start_workflow(
            RUN_WORKFLOW,
            given,
            id=request.run_id,
            task_queue=options.queue,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            task_timeout=timedelta(seconds=TASK_LIMIT_S),
            static_summary=request.name,
            memo={"name": request.name, "file": request.file},
            rpc_timeout=RPC_LIMIT,
        )
    except WorkflowAlreadyStartedError:
        raise Failure("RUN_TAKEN", f"there is a run {request.run_id!r} already; --resume continues it") from None
    except RPCError as error:
        raise Failure("CONNECT_FAILED", f"the engine did not take the run: {error}") from None
    return await wait_for_end(handle, caller)


async def wait_for_end(handle: WorkflowHandle[Any, Any], caller: RunCaller) -> Envelope:
    """Wait for the end of a run and return its envelope. A signal to the caller stops the run."""
    ending = asyncio.ensure_future(_read_envelope(handle))
    looking = asyncio.ensure_future(_look(handle, caller))
    try:
        waits: list[asyncio.Future[Any]] = [ending, *([caller.stop] if caller.stop is not None else [])]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # bounded by the run's own clocks
        if not ending.done() and caller.stop is not None:
            await handle.signal("stop", caller.stop.result(), rpc_timeout=RPC_LIMIT)
        return await ending
    finally:
        looking.cancel()
        ending.cancel()
        await asyncio.wait([looking, ending])


async def _read_envelope(handle: WorkflowHandle[Any, Any]) -> Envelope:
    """Return the envelope of a run once it has ended."""
    try:
        told: dict[str, Any] = await handle.result()
    except WorkflowFailureError as error:
        cause = error.cause
        if not isinstance(cause, ApplicationError) or not cause.details:
            raise Failure("INTERNAL_ERROR", f"run {handle.id!r} has ended without an envelope: {cause}") from None
        told = cause.details[0]
    except RPCError as error:
        raise _not_reached(handle, error) from None
    return Envelope(told["data"], told["error"], told["warnings"], told["meta"])


async def read_progress(handle: WorkflowHandle[Any, Any]) -> dict[str, Any]:
    """Return how far a run is. Raises Failure where there is none, or no worker can say so."""
    try:
        told: dict[str, Any] = await handle.query("progress", rpc_timeout=RPC_LIMIT)
        return told
    except RPCError as error:
        raise _not_reached(handle, error) from None


def _not_reached(handle: WorkflowHandle[Any, Any], error: RPCError) -> Failure:
    if error.status is RPCStatusCode.NOT_FOUND:
        return Failure("RUN_NOT_FOUND", f"there is no run {handle.id!r}")
    return Failure("CONNECT_FAILED", f"the engine does not answer for run {handle.id!r}: {error}")


async def _look(handle: WorkflowHandle[Any, Any], caller: RunCaller) -> None:
    """Tell the caller's listener of changes, as they are seen."""
    if caller.on_change is None:
        return
    seen: dict[str, Mapping[str, Any]] = {}
    while True:
        with contextlib.suppress(Failure):
            told = await read_progress(handle)
            for name, record in told["steps"].items():
                if record != seen.get(name, {"status": "pending"}) and record["status"] != "pending":
                    caller.on_change(StepState.from_record(record))
                seen[name] = record
        await asyncio.sleep(LOOK_S)
