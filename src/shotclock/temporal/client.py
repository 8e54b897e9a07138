"""Runs on Temporal as their caller sees them: started, waited for, stopped, looked at."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from temporalio.api.enums.v1 import PendingWorkflowTaskState, TaskQueueType
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import (
    Client,
    WorkflowExecution,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, TimeoutError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from ..core.clocks import NS_PER_MS, ClockKind, Clocks, Fired, ProcessIdentity, WallTime
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending, Failure, SideEffects
from ..core.proposal import result_of
from ..core.trace import TraceContext
from ..core.value_types import replace, value
from ..process.clock import monotonic_ns, process_began_ns
from ..providers.provider import STEP_TYPES
from ..runtime.call import Outcome, admit, answer, inherited_deadline
from ..runtime.outcomes import failure_outcome
from ..store.proposals import read_exported
from ..store.runs import Run, StepRecord
from ..store.store import Store
from ..workflow.engine import RunCaller, RunRequest
from ..workflow.lint import identity
from ..workflow.plan import run_timeout_ms
from ..workflow.report import Report, judge_code, report_of
from ..workflow.schema import WorkflowFile, check_inputs
from ..workflow.state import Status, StepState, park_outcome
from .messages import DEFAULT_HEARTBEAT_MS, DEFAULT_QUEUE, RUN_WORKFLOW, VERSION, Order, RunInput
from .payloads import KEY_VARIABLE, PAYLOADS_VARIABLE, read_key, write_workflow
from .proposals import pack_record, unpack_proposals
from .search_attributes import ENDING, KEYS, STATUS, WAITING, describe_beginning

# How often the caller looks how far the run is, and how soon it asks an engine again that did not answer.
LOOK_S = 0.5
# How long the caller tries to start a run while the engine does not answer.
START_LIMIT_MS = 30_000
# How long a run may wait at a queue without workers before its caller reports that. A worker polls within seconds.
NO_WORKER_MS = 5_000
# How long after its deadline the engine ends a run that no worker ends. An operator can extend the run within it.
EXTENSION_ROOM_MS = 86_400_000
# A workflow whose worker has died in the middle of a decision goes on elsewhere after this.
TASK_LIMIT_S = 5
RPC_LIMIT = timedelta(seconds=10)
# The last runs that are asked about a proposal that no run waits for.
MOST_ASKED = 50
# Before a decision is given to a run, it is seen that somebody answers for it.
SEEN_LIMIT = timedelta(seconds=5)
# An engine that does not say which search attributes it has is told of none.
ATTRIBUTES_LIMIT = timedelta(seconds=5)
# An order goes to the worker that has the step, and back.
ORDER_LIMIT = timedelta(seconds=20)
# What the end of a run may take beyond its deadline: grace, a worker that has to be missed first, another that starts.
END_MARGIN_MS = 60_000
# What a run may take that was stopped: its clean-up has five minutes.
STOP_LIMIT_S = 360.0
# The holder of a run that no process of this machine has.
NOWHERE = ProcessIdentity("", "", 0, 0)

T = TypeVar("T")


@value
class EngineOptions:
    """How a run is given to the engine."""

    queue: str = DEFAULT_QUEUE
    heartbeat_ms: int = DEFAULT_HEARTBEAT_MS


async def start(
    client: Client, request: RunRequest, caller: RunCaller, options: EngineOptions, address: str = ""
) -> Envelope:
    """Run a workflow on the engine and return its one envelope. Raises Failure if it cannot be begun."""
    limits = [limit for limit in (run_timeout_ms(request.workflow), request.timeout_ms) if limit]
    # Inside the time of the environment, as a run here would be.
    call = admit(
        f"run {request.name}",
        Clocks(timeout_ms=min(limits, default=0)),
        parent=inherited_deadline(os.environ, monotonic_ns()).deadline,
    )
    inputs = check_inputs(request.workflow, request.inputs)
    outer = call.parent
    attributes = await find_attributes(client)
    given: RunInput = {
        "version": VERSION,
        "run_id": request.run_id,
        "name": request.name,
        "file": request.file,
        "folder": str(request.folder),
        "files": [identity(request.file)],
        "workflow": write_workflow(request.workflow, inputs, caller.variables),
        "inputs": inputs,
        "trace_id": call.trace_id,
        "limit_ms": 0 if call.bound.bell is None else max(1, call.bound.limit_ms),
        "deadline_at": None,
        "deadline_owner": "caller",
        "heartbeat_ms": options.heartbeat_ms,
        "queue": options.queue,
        "env": {},
        "attributes": attributes,
        "is_extendable": True,
        "counts_from_acceptance": True,
    }
    if outer is not None:
        given["caller_ms"] = max(1, outer.remaining_ms(monotonic_ns()))
    limit_ms, handle, start_id = given["limit_ms"], client.get_workflow_handle(request.run_id), uuid.uuid4().hex
    has_end = limit_ms and not _may_ask(request.workflow)

    async def send() -> None:
        await client.start_workflow(
            RUN_WORKFLOW,
            given,
            id=request.run_id,
            task_queue=options.queue,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            execution_timeout=timedelta(milliseconds=limit_ms + EXTENSION_ROOM_MS) if has_end else None,
            task_timeout=timedelta(seconds=TASK_LIMIT_S),
            static_summary=request.name,
            search_attributes=describe_beginning(request.name, attributes),
            memo={"name": request.name, "file": request.file, "limit_ms": limit_ms, "start_id": start_id},
            rpc_timeout=RPC_LIMIT,
        )

    if not await _is_accepted(handle, send, start_id, caller.stop):
        message = f"the engine does not answer: it is not known whether it has accepted run {request.run_id}"
        return answer_unknown(Failure("INCOMPLETE", message), request.run_id, address)
    return await wait_for_end(client, request.run_id, caller, address, limit_ms + END_MARGIN_MS if limit_ms else None)


def _may_ask(workflow: WorkflowFile) -> bool:
    """Return whether a step may wait for a person."""
    return any(step.approval or STEP_TYPES[step.type].waits_when_approved for step in workflow.steps.values())


async def _is_accepted(
    handle: WorkflowHandle[Any, Any],
    send: Callable[[], Awaitable[None]],
    start_id: str,
    stop: asyncio.Future[str] | None,
) -> bool:
    """Send a run to the engine and return whether it has accepted it; False if that is not known. Raises Failure if
    the engine refuses it."""
    is_in_doubt, give_up_ns = False, monotonic_ns() + START_LIMIT_MS * NS_PER_MS
    while True:
        try:
            try:
                await send()
            except WorkflowAlreadyStartedError:
                described = await handle.describe(rpc_timeout=RPC_LIMIT)
                if await _read_memo(described, "start_id", "") != start_id:  # else our first request had arrived
                    message = f"there is a run {handle.id!r} already; --resume continues it"
                    raise Failure("RUN_TAKEN", message) from None
            return True
        except RPCError as error:
            if error.status in _REFUSALS and not is_in_doubt:
                raise Failure("CONNECT_FAILED", f"the engine did not take the run: {error}") from None
            is_in_doubt = True
        if monotonic_ns() >= give_up_ns or (stop is not None and stop.done()):
            return False
        await asyncio.sleep(LOOK_S)


# With these the engine has answered, and has not accepted the run. Any other error may have lost its answer.
_REFUSALS = (
    RPCStatusCode.INVALID_ARGUMENT, RPCStatusCode.NOT_FOUND, RPCStatusCode.PERMISSION_DENIED,
    RPCStatusCode.UNAUTHENTICATED, RPCStatusCode.FAILED_PRECONDITION, RPCStatusCode.UNIMPLEMENTED,
)  # fmt: skip


_attributes: WeakKeyDictionary[Client, list[str]] = WeakKeyDictionary()


async def find_attributes(client: Client) -> list[str]:
    """Return the search attributes of ours that the namespace has, looked up once for each client. None with a key for
    what is sent: Temporal keeps them as they are. None where nobody says so: runs do without."""
    if client not in _attributes:
        found: list[str] = []
        if read_key(os.environ) is None:
            with contextlib.suppress(RPCError):
                told = await client.operator_service.list_search_attributes(
                    ListSearchAttributesRequest(namespace=client.namespace), timeout=ATTRIBUTES_LIMIT
                )
                found = [
                    key.name for key in KEYS if told.custom_attributes.get(key.name) == int(key.indexed_value_type)
                ]
        _attributes[client] = found
    return _attributes[client]


async def wait_for_end(
    client: Client, run_id: str, caller: RunCaller, address: str, within_ms: int | None = None
) -> Envelope:
    """Wait for the end of a run that the engine has accepted, and return its envelope. A signal to the caller stops
    the run. Without an end the answer names the run and how to continue it: after the caller's budget if the run only
    waits for people, at once if no worker serves its queue, and after `within_ms` in any other case."""
    try:
        return await _wait_for_end(client, run_id, caller, address, within_ms)
    except Failure as failure:
        return answer_unknown(failure, run_id, address)


async def _wait_for_end(
    client: Client, run_id: str, caller: RunCaller, address: str, within_ms: int | None
) -> Envelope:
    handle, began_ns = client.get_workflow_handle(run_id), monotonic_ns()
    ending = asyncio.ensure_future(_read_envelope(handle))
    looking = asyncio.ensure_future(_look(client, handle, caller))
    untaken = asyncio.ensure_future(_find_queue_without_worker(client, handle))
    tasks: list[asyncio.Future[Any]] = [ending, looking, untaken]
    waits = [*tasks, *([caller.stop] if caller.stop is not None else [])]
    try:
        while True:
            waited_ms = (monotonic_ns() - began_ns) // NS_PER_MS
            limit_s = None if within_ms is None else max(0, within_ms - waited_ms) / 1000  # as long as the run may take
            done, _ = await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if done or within_ms is None or (longer_ms := await _read_limit_ms(handle) + END_MARGIN_MS) <= within_ms:
                break
            within_ms = longer_ms  # somebody has given it more time
        if ending.done():
            return ending.result()
        if looking.done():
            return _parked_answer(handle.id, looking.result(), caller.budget_ms or 0, address)
        if untaken.done():
            message = f"no worker serves queue {untaken.result()!r}: run {run_id} waits for one until its deadline"
            hint = f"`shotclock worker {address} --queue {untaken.result()}` starts one; then run data.continue_command"
            raise Failure("INCOMPLETE", message, suggestion=hint)
        if caller.stop is None or not caller.stop.done():
            return _unended_answer(handle.id, within_ms or 0, address)
        signal = caller.stop.result()
        tasks.append(asyncio.ensure_future(_insist(lambda: handle.signal("stop", signal, rpc_timeout=RPC_LIMIT))))
        done, _ = await asyncio.wait([ending], timeout=STOP_LIMIT_S)
        return ending.result() if done else _unended_answer(handle.id, int(STOP_LIMIT_S * 1000), address)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)


async def _find_queue_without_worker(client: Client, handle: WorkflowHandle[Any, Any]) -> str:
    """Return the queue of a run that no worker has taken, once the queue has had no worker for a while."""
    alone_since_ns: int | None = None
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            described = await handle.describe(rpc_timeout=RPC_LIMIT)
            task = described.raw_description.pending_workflow_task
            if task.state != PendingWorkflowTaskState.PENDING_WORKFLOW_TASK_STATE_SCHEDULED:
                break
            request = DescribeTaskQueueRequest(
                namespace=client.namespace,
                task_queue=TaskQueue(name=described.task_queue),
                task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
            )
            if (await client.workflow_service.describe_task_queue(request, timeout=RPC_LIMIT)).pollers:
                break
        except RPCError:
            alone_since_ns = None
            continue
        alone_since_ns = alone_since_ns or monotonic_ns()
        if monotonic_ns() - alone_since_ns >= NO_WORKER_MS * NS_PER_MS:
            return described.task_queue
    return await _never(str)


async def _never(kind: type[T]) -> T:
    """Wait until cancelled."""
    waiting: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    return await waiting


async def _insist(send: Callable[[], Awaitable[None]]) -> None:
    """Send a request about a run until the engine answers. The caller bounds the wait."""
    while True:
        try:
            return await send()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:  # the run has ended
                return
        await asyncio.sleep(LOOK_S)


async def wait_again(client: Client, run_id: str, caller: RunCaller, address: str) -> Envelope:
    """Wait for the end of a run that somebody has started, for as long as one that begins now may take. Raises
    Failure if there is none."""
    described = await _describe(client.get_workflow_handle(run_id))
    limit_ms = int(await _read_memo(described, "limit_ms", 0))
    return await wait_for_end(client, run_id, caller, address, limit_ms + END_MARGIN_MS if limit_ms else None)


async def _describe(handle: WorkflowHandle[Any, Any]) -> WorkflowExecutionDescription:
    """Return what the engine itself knows of a run. Raises Failure."""
    try:
        return await handle.describe(rpc_timeout=RPC_LIMIT)
    except RPCError as error:
        raise _not_reached(handle, error) from None


async def _read_limit_ms(handle: WorkflowHandle[Any, Any]) -> int:
    """Return how long a run may take now; 0 where nobody says so."""
    try:
        return int((await read_progress(handle))["limit_ms"])
    except Failure:
        return 0


def answer_unknown(failure: Failure, run_id: str, address: str, fired: Fired | None = None) -> Envelope:
    """Return the envelope of a caller that does not learn the end of a run that the engine has accepted."""
    outcome = unknown_outcome(failure, run_id, address)
    assert isinstance(outcome.problem, Problem)
    outcome.problem = replace(outcome.problem, fired=fired)
    return answer(admit(f"run {run_id}", Clocks(timeout_ms=0), began_ns=process_began_ns()), outcome)


def unknown_outcome(failure: Failure, run_id: str, address: str) -> Outcome:
    """Return the outcome of a command on a run that the engine has, or may have, accepted. It never claims that
    nothing was done: the run may do anything meanwhile."""
    outcome = failure_outcome(as_accepted(failure, run_id, address))
    outcome.ending = Ending.ABANDONED if failure.code in _LOST else Ending.DETACHED
    return outcome


def as_accepted(failure: Failure, run_id: str, address: str) -> Failure:
    """Return the failure with the run, the commands that continue it, and effects as unknown."""
    data = {
        "run_id": run_id,
        "job_id": run_id,
        "state": "ended" if failure.code in _LOST else "running",
        "continue_command": f"shotclock run --resume {run_id} {address}",
        "cancel_command": f"shotclock job cancel {run_id} {address}",
    }
    return Failure(
        failure.code,
        str(failure),
        data=data,
        context=failure.context,
        suggestion=failure.suggestion,
        side_effects=SideEffects.UNKNOWN,
    )


# The codes of runs that have ended without an envelope.
_LOST = ("TIMEOUT", "INTERRUPTED")


def _unended_answer(run_id: str, waited_ms: int, address: str) -> Envelope:
    """Return the envelope of a run that has not ended within the time that it may take."""
    why = (
        "no worker takes it" if read_key(os.environ) is None else f"no worker takes it, or none has our {KEY_VARIABLE}"
    )
    message = f"run {run_id} has not ended in its time: {why}, or the engine does not answer"
    fired = Fired(ClockKind.BUDGET, "caller", waited_ms, waited_ms)
    return answer_unknown(Failure("INCOMPLETE", message), run_id, address, fired)


async def _read_envelope(handle: WorkflowHandle[Any, Any]) -> Envelope:
    """Return the envelope of a run once it has ended. An engine that does not answer is asked again: the caller bounds
    the wait. Raises Failure if the run has no envelope, or one that cannot be read."""
    while True:
        try:
            told: dict[str, Any] = await handle.result()
            return Envelope(told["data"], told["error"], told["warnings"], told["meta"])
        except WorkflowFailureError as error:
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.details:
                told = cause.details[0]
                return Envelope(told["data"], told["error"], told["warnings"], told["meta"])
            if isinstance(cause, TimeoutError):
                message = f"the engine has ended run {handle.id!r}: no worker did in its time"
                raise Failure("TIMEOUT", message, suggestion=_NO_WORKER) from None
            message = f"run {handle.id!r} was ended from outside, without clean-up and without an envelope: {cause}"
            raise Failure("INTERRUPTED", message) from None
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise _not_reached(handle, error) from None
        except Exception as error:
            raise _unreadable(handle, error) from None
        await asyncio.sleep(LOOK_S)


async def _read_ended(handle: WorkflowHandle[Any, Any]) -> Envelope:
    """Return the envelope of a run that has ended. Raises Failure."""
    try:
        async with asyncio.timeout(RPC_LIMIT.total_seconds()):
            return await _read_envelope(handle)
    except builtins.TimeoutError:
        raise Failure("CONNECT_FAILED", f"the engine does not answer for run {handle.id!r}") from None


async def read_progress(handle: WorkflowHandle[Any, Any], limit: timedelta = RPC_LIMIT) -> dict[str, Any]:
    """Return how far a run is. Raises Failure where there is none, or no worker can say so."""
    try:
        told: dict[str, Any] = await handle.query("progress", rpc_timeout=limit)
        return told
    except RPCError as error:
        raise _not_reached(handle, error) from None
    except Exception as error:
        raise _unreadable(handle, error) from None


def _unreadable(handle: WorkflowHandle[Any, Any], error: Exception) -> Failure:
    message = f"the record of run {handle.id!r} cannot be read: {error}"
    hint = f"set {KEY_VARIABLE} and {PAYLOADS_VARIABLE} as for its workers, then run data.continue_command"
    return Failure("INCOMPLETE", message, suggestion=hint)


def _not_reached(handle: WorkflowHandle[Any, Any], error: RPCError) -> Failure:
    if error.status is RPCStatusCode.NOT_FOUND:
        if "already completed" in error.message:
            return Failure("CALL_NOT_FOUND", f"run {handle.id!r} has ended")
        return Failure("RUN_NOT_FOUND", f"there is no run {handle.id!r}", suggestion=_LISTED_BY)
    if error.status in _UNANSWERED:
        return Failure("CONNECT_FAILED", f"no worker answers for run {handle.id!r}", suggestion=_NO_WORKER)
    return Failure("CONNECT_FAILED", f"the engine does not answer for run {handle.id!r}: {error}")


_LISTED_BY = "check the spelling; `shotclock report --on URL` lists the runs"
_NO_WORKER = "is there one at its queue? `shotclock worker --on URL [--queue NAME]` starts one"
# What the engine says where it has asked for a while, or too many wait for an answer already.
_UNANSWERED = (RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.RESOURCE_EXHAUSTED)


async def _read_with_nested(client: Client, told: dict[str, Any]) -> dict[str, Any]:
    """Add what the runs inside a run wait for, where it waits for nothing but people and them. It waits for people only
    if they do as well."""
    if not told["only_waits"]:
        return told
    inner = [
        await _read_with_nested(client, await read_progress(client.get_workflow_handle(each)))
        for each in told["children"]
    ]
    waiting = [*told["waiting"], *(proposal for each in inner for proposal in each["waiting"])]
    return {**told, "waiting": waiting, "only_waits": all(each["only_waits"] for each in inner)}


async def _look(client: Client, handle: WorkflowHandle[Any, Any], caller: RunCaller) -> dict[str, Any]:
    """Tell the caller's listener of changes, as they are seen. Return how far the run is, once it has only waited for
    people for as long as the caller does."""
    seen: dict[str, Mapping[str, Any]] = {}
    waits_since_ns: int | None = None
    while caller.on_change is not None or caller.budget_ms is not None:
        with contextlib.suppress(Failure):
            told = await _read_with_nested(client, await read_progress(handle))
            for name, record in told["steps"].items():
                if caller.on_change is not None and record != seen.get(name) and record["status"] != "pending":
                    caller.on_change(StepState.from_record(record))
                seen[name] = record
            now_ns = monotonic_ns()
            waits_since_ns = (waits_since_ns or now_ns) if told["only_waits"] else None
            waited_ms = 0 if waits_since_ns is None else (now_ns - waits_since_ns) // NS_PER_MS
            if waits_since_ns is not None and caller.budget_ms is not None and waited_ms >= caller.budget_ms:
                return told
        await asyncio.sleep(LOOK_S)
    return await _never(dict)


def _parked_answer(run_id: str, told: Mapping[str, Any], budget_ms: int, address: str) -> Envelope:
    """Return the envelope of a run that waits for people, and how to go on with it."""
    states = {name: StepState.from_record(record) for name, record in told["steps"].items()}
    waiting = [result_of(read_exported(each["record"])) for each in told["waiting"] if "record" in each]
    call = admit(f"run {told['name']}", Clocks(timeout_ms=0), caller=TraceContext(told["trace_id"]))
    return answer(call, park_outcome(run_id, told["name"], states, waiting, budget_ms, address))


@value
class RunSummary:
    """What the engine itself knows of a run, or a worker has told of it in passing."""

    run_id: str
    name: str
    status: Status
    started_at: WallTime
    ended_at: WallTime | None
    code: str | None
    """Of an ended one that did not succeed."""


async def list_runs(client: Client, most: int, *, active_only: bool = False) -> list[RunSummary]:
    """Return the runs that the engine has, the newest first, without those inside others. Raises Failure."""
    query = f"WorkflowType = '{RUN_WORKFLOW}'" + (" AND ExecutionStatus = 'Running'" if active_only else "")
    found: list[WorkflowExecution] = []
    try:
        async for each in client.list_workflows(query, rpc_timeout=RPC_LIMIT):
            if each.parent_id is None:
                found.append(each)
            if len(found) == most:
                break
    except RPCError as error:
        raise Failure("CONNECT_FAILED", f"the engine does not list its runs: {error}") from None
    found.sort(key=lambda each: each.start_time, reverse=True)
    return list(await asyncio.gather(*(_summarise(client, each) for each in found)))


async def read_summary(client: Client, run_id: str) -> RunSummary:
    """Return what is known of a run, also where no worker answers for it. Raises Failure if there is none."""
    described = await _describe(client.get_workflow_handle(run_id))
    if described.workflow_type != RUN_WORKFLOW:
        raise Failure("RUN_NOT_FOUND", f"{run_id!r} is a workflow of somebody else, and no run of ours")
    return await _summarise(client, described)


async def find_run(client: Client, beginning: str) -> str:
    """Return the id of the one run whose id begins like this. Raises Failure unless there is just one."""
    found: list[str] = []
    if re.fullmatch(r"[A-Za-z0-9._-]+", beginning):
        query = f"WorkflowType = '{RUN_WORKFLOW}' AND WorkflowId STARTS_WITH '{beginning}'"
        found = [each.id async for each in client.list_workflows(query, limit=5, rpc_timeout=RPC_LIMIT)]
    if len(found) == 1:
        return found[0]
    message = f"there is no run {beginning!r}" if not found else f"several runs begin with {beginning!r}"
    hint = f"did you mean {' or '.join(found)}?" if found else _LISTED_BY
    raise Failure("RUN_NOT_FOUND", message, context={"near": found}, suggestion=hint)


async def _summarise(client: Client, found: WorkflowExecution) -> RunSummary:
    shown, handle = found.typed_search_attributes, client.get_workflow_handle(found.id)
    status, code = Status.RUNNING, None
    with contextlib.suppress(Failure):  # nobody answers for it now
        if found.close_time is not None:
            ending = shown.get(ENDING)
            code = (await _read_ended(handle)).code if ending is None else None if ending == "OK" else ending
            status = judge_code(code)
        elif shown.get(STATUS) != "running" and (await read_progress(handle, SEEN_LIMIT))["only_waits"]:
            status = Status.PARKED
    if status is Status.RUNNING and found.close_time is not None:  # ended by others, or long ago
        status = Status.SUCCEEDED if found.status is WorkflowExecutionStatus.COMPLETED else Status.FAILED
    ended_at = None if found.close_time is None else _read_instant(found.close_time)
    name = str(await _read_memo(found, "name", found.id))
    return RunSummary(found.id, name, status, _read_instant(found.start_time), ended_at, code)


async def _read_memo(found: WorkflowExecution, name: str, default: T) -> T:
    """Return what a run was given to be known by; the default where we have not its key."""
    try:
        told: T = await found.memo_value(name, default=default)
        return told
    except (KeyError, ValueError, RuntimeError):
        return default


def _read_instant(at: datetime) -> WallTime:
    return WallTime(int(at.timestamp() * 1000))


async def wait_at_most(client: Client, run_id: str, limit_s: float | None) -> Envelope | None:
    """Return the envelope of a run, or None if it has not ended within the limit. Raises Failure."""
    try:
        async with asyncio.timeout(limit_s):
            return await _read_envelope(client.get_workflow_handle(run_id))
    except builtins.TimeoutError:
        return None


async def cancel(client: Client, run_id: str, limit_s: float) -> Envelope | None:
    """Stop a run, wait until its clean-up is over, and return its envelope; None if it has not ended within the limit.
    A run that has ended answers as it did."""
    handle = client.get_workflow_handle(run_id)
    try:
        async with asyncio.timeout(limit_s):
            await _insist(lambda: handle.cancel(rpc_timeout=RPC_LIMIT))
            return await _read_envelope(handle)
    except builtins.TimeoutError:
        return None


async def read_report(client: Client, run_id: str, now: WallTime, address: str) -> Report:
    """Return the report of a run. Raises Failure if there is none."""
    handle = client.get_workflow_handle(run_id)
    told, described = await read_progress(handle), await _describe(handle)
    envelope, ended_at = None, None
    if described.close_time is not None:
        envelope = (await _read_ended(handle)).to_dict()
        ended_at = _read_instant(described.close_time)
    run, records = make_run(run_id, told)
    parked_at = now if told["only_waits"] and ended_at is None else None
    run = replace(run, ended_at=ended_at, envelope=envelope, parked_at=parked_at)
    made = report_of(run, records, now=now, is_alive=True)
    if made.status is Status.PARKED:
        made = replace(made, why=f"it waits for a person: `shotclock inbox list {address}`")
    return made


def make_run(run_id: str, told: Mapping[str, Any]) -> tuple[Run, dict[str, StepRecord]]:
    """Return a run that is under way, and its steps, as a store would have them."""
    run = Run(
        run_id,
        told["name"],
        told["file"],
        told["workflow"],
        told["inputs"],
        told["trace_id"],
        NOWHERE,
        WallTime(told["began_at"]),
        None if told["deadline_at"] is None else WallTime(told["deadline_at"]),
        None,
        None,
    )
    return run, {name: StepRecord(name, record["status"], record) for name, record in told["steps"].items()}


async def is_running(client: Client, run_id: str) -> bool:
    """Return whether a run is under way. Raises RPCError where the engine does not say so."""
    try:
        described = await client.get_workflow_handle(run_id).describe(rpc_timeout=RPC_LIMIT)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return False
        raise
    return described.close_time is None


async def list_running(client: Client, most: int | None = None, *, only_waiting: bool = False) -> list[str]:
    """Return the ids of the runs that are under way. `only_waiting`: without those that are known to ask nobody."""
    query = f"WorkflowType = '{RUN_WORKFLOW}' AND ExecutionStatus = 'Running'"
    if only_waiting and STATUS.name in await find_attributes(client):
        query += f" AND ({STATUS.name} = '{WAITING}' OR {STATUS.name} IS NULL)"
    return [found.id async for found in client.list_workflows(query, limit=most, rpc_timeout=RPC_LIMIT)]


async def send_order(handle: WorkflowHandle[Any, Any], order: Order) -> dict[str, Any]:
    """Give a step of a run more time, or wind it down. Return what its calls have now. Raises Failure."""
    try:
        told: dict[str, Any] = await handle.execute_update("order", order, rpc_timeout=ORDER_LIMIT)
        return told
    except WorkflowUpdateFailedError as error:
        cause = error.cause
        if isinstance(cause, ApplicationError) and cause.type:
            raise Failure(cause.type, cause.message) from None
        raise Failure("CALL_NOT_FOUND", str(cause)) from None
    except WorkflowUpdateRPCTimeoutOrCancelledError:
        message = f"no worker answers for run {handle.id!r}; it may still hear of this later"
        raise Failure("CONNECTION_LOST", message, suggestion=_NO_WORKER) from None
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise _not_reached(handle, error) from None
        message = f"it is not known whether run {handle.id!r} has received this: {error}"
        raise Failure("CONNECTION_LOST", message) from None


# --- people -------------------------------------------------------------------------------------------------


async def pull_proposals(client: Client, store: Store, id: str | None = None) -> dict[str, str]:
    """Write down in a store what the runs of the engine ask people, and return whose run each is. `id`: that one."""
    runs: dict[str, str] = {}
    for run_id in await list_running(client, only_waiting=True):
        with contextlib.suppress(Failure):  # it has ended meanwhile, or nobody answers for it
            told = await read_progress(client.get_workflow_handle(run_id))
            waiting = [each for each in told["waiting"] if id is None or each["id"] == id]
            await asyncio.to_thread(unpack_proposals, waiting, store)
            runs |= {each["id"]: run_id for each in waiting}
            if id in runs:
                break
    return runs


async def refuse_decided(client: Client, id: str) -> None:
    """Raise Failure if one of the last runs has had this proposal decided, or it has expired there."""
    query = f"WorkflowType = '{RUN_WORKFLOW}'"
    with contextlib.suppress(builtins.TimeoutError, RPCError):
        async with asyncio.timeout(RPC_LIMIT.total_seconds()):
            async for found in client.list_workflows(query, limit=MOST_ASKED):
                with contextlib.suppress(Failure):  # no worker answers for it
                    told = await read_progress(client.get_workflow_handle(found.id), SEEN_LIMIT)
                    if (record := told["decided"].get(id)) is not None:
                        break
            else:
                return
            status, by = record["status"], record.get("decided_by")
            code = "PROPOSAL_EXPIRED" if status == "expired" else "ALREADY_DECIDED"
            message = f"{id} of run {found.id} is {status}" + (f", by {by}" if by else "")
            raise Failure(code, message, context={"proposal_id": id, "status": status, "decided_by": by})


async def push_decision(client: Client, run_id: str, store: Store, id: str) -> None:
    """Tell a run how its proposal was decided. Raises Failure where somebody was faster."""
    record = await asyncio.to_thread(store.proposals.export, id)
    assert record is not None
    await send_decision(client, run_id, pack_record("", record))


async def send_decision(client: Client, run_id: str, decided: dict[str, Any]) -> None:
    """Give a run one of its proposals, decided. Raises Failure: ALREADY_DECIDED where somebody was faster,
    CONNECT_FAILED where nobody answers for the run, CONNECTION_LOST where it is not known whether it was taken."""
    id, handle = decided["id"], client.get_workflow_handle(run_id)
    told = await read_progress(handle, SEEN_LIMIT)
    step = next((each["step"] for each in told["waiting"] if each["id"] == id), "")
    try:
        await handle.execute_update("decide", {**decided, "step": step}, rpc_timeout=RPC_LIMIT)
    except WorkflowUpdateFailedError as error:
        raise Failure("ALREADY_DECIDED", f"{id} is not open any more: {error.__cause__ or error}") from None
    except (RPCError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
        if isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND:  # the run has ended
            raise Failure("ALREADY_DECIDED", f"{id} is not open any more: its run has ended") from None
        message = f"whether run {run_id} has taken the decision about {id} is not known: {error}"
        raise Failure("CONNECTION_LOST", message, suggestion="look at it again before you decide again") from None
