"""The engine on Temporal: runs are started, watched, stopped and decided through Temporal's client."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar

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
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, TimeoutError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from ..calls.call import Outcome, admit, answer, inherited_deadline
from ..calls.control_channel import RunOrder
from ..calls.outcomes import failure_outcome
from ..calls.principal import Principal
from ..core.envelope import Envelope, Problem, Warning_, warning
from ..core.errors import Ending, Failure, SideEffects
from ..core.limits import NS_PER_MS, ClockKind, Clocks, Fired, ProcessIdentity, WallTime
from ..core.proposal import Confirmation, Decision, Proposal, apply_decision
from ..core.trace import TraceContext
from ..core.value_types import JsonObject, replace
from ..flows.check.lint import identity
from ..flows.engines import RunSummary
from ..flows.file.schema import WorkflowFile, check_inputs
from ..flows.report.report import Report, judge_code, report_of
from ..flows.run.notices import warn_of_temporal
from ..flows.run.runs import RunCaller, RunRequest, read_envelope, run_exists
from ..flows.run.state import Status, StepState, commands_for, count_steps, park_outcome
from ..flows.steps.provider import STEP_TYPES
from ..people.proposal_checks import check_decision
from ..store.proposals import export_proposal, read_exported
from ..store.runs import StepRecord, StoredRun
from ..supervise.clock import monotonic_ns, process_began_ns, wall_time
from ._messages import (
    DEFAULT_HEARTBEAT_MS,
    DEFAULT_QUEUE,
    ENDING,
    KEYS,
    RUN_WORKFLOW,
    STATUS,
    VERSION,
    WAITING,
    RunInput,
    describe_beginning,
    pack_record,
)
from ._payloads import KEY_VARIABLE, read_keys, refuse_large, write_workflow
from ._queries import (
    LISTED_BY,
    NO_WORKER,
    RPC_LIMIT,
    SEEN_LIMIT,
    Handle,
    Progress,
    RunChanges,
    not_reached,
    read_progress,
    unreadable,
)
from .connection import Address, connect

LOOK_S = 0.5  # the pause between two looks at a run, and before an engine that did not answer is asked again
START_LIMIT_MS = 30_000
NO_WORKER_MS = 5_000  # a worker polls within seconds
# The engine ends a run without a worker this long after its deadline. An operator can extend the run within
# that time.
EXTENSION_ROOM_MS = 86_400_000
TASK_LIMIT_S = 5  # after this a workflow whose worker died in the middle of a decision continues on another worker
MOST_SEARCHED = 50  # the newest runs that are searched for a proposal
# An order travels to the worker of its step and back: longer than ORDER_LIMIT_S in run_workflow.py.
ORDER_LIMIT = timedelta(seconds=20)
END_MARGIN_MS = 60_000  # after the deadline of a run: grace, the loss of a worker, the start of another
# A stopped run has five minutes for its clean-up. A run without a worker does not even begin it.
STOP_LIMIT_S, CANCEL_LIMIT_S = 360.0, 320.0
NOWHERE = ProcessIdentity("", "", 0, 0)
# With these codes the engine has refused the run. After any other error it may have accepted it.
_REFUSALS = (
    RPCStatusCode.INVALID_ARGUMENT, RPCStatusCode.NOT_FOUND, RPCStatusCode.PERMISSION_DENIED,
    RPCStatusCode.UNAUTHENTICATED, RPCStatusCode.FAILED_PRECONDITION, RPCStatusCode.UNIMPLEMENTED,
)  # fmt: skip
_LOST = ("TIMEOUT", "INTERRUPTED")  # the codes of runs that have ended without an envelope

T = TypeVar("T")


class TemporalEngine:
    """The runs of one namespace of Temporal. It connects with the first request, in the running event loop."""

    def __init__(self, address: Address, *, queue: str | None = None, heartbeat_ms: int | None = None) -> None:
        self.address = address
        self._queue = queue or DEFAULT_QUEUE
        self._heartbeat_ms = heartbeat_ms or DEFAULT_HEARTBEAT_MS
        self._client: Client | None = None
        self._attributes: list[str] | None = None

    @property
    def where(self) -> str:
        return self.address.on_command_line

    async def client(self) -> Client:
        if self._client is None:
            self._client = await connect(self.address)
        return self._client

    async def handle(self, run_id: str) -> Handle:
        return (await self.client()).get_workflow_handle(run_id)

    # --- starting and waiting -----------------------------------------------------------------------------

    async def start(self, request: RunRequest, caller: RunCaller) -> Envelope:
        call = admit(
            f"run {request.name}",
            Clocks(timeout_ms=request.limit_ms),
            parent=inherited_deadline(os.environ, monotonic_ns()).deadline,
        )
        inputs = check_inputs(request.workflow, request.inputs)
        client, attributes = await self.client(), await self.find_attributes()
        limit_ms = 0 if call.bound.bell is None else max(1, call.bound.limit_ms)
        run_input: RunInput = {
            "version": VERSION,
            "run_id": request.run_id,
            "name": request.name,
            "file": request.file,
            "folder": str(request.folder),
            "files": [identity(request.file)],
            "workflow": write_workflow(request.workflow, inputs, caller.environment),
            "inputs": inputs,
            "trace_id": call.trace_id,
            "limit_ms": limit_ms,
            "caller_ms": None if call.time.parent is None else max(1, call.time.parent.remaining_ms(monotonic_ns())),
            "deadline_at": None,
            "deadline_owner": "caller",
            "latest_at": None,
            "heartbeat_ms": self._heartbeat_ms,
            "queue": self._queue,
            "env": {},
            "attributes": attributes,
        }
        refuse_large(run_input, os.environ)
        start_id = uuid.uuid4().hex
        steps = request.workflow.steps.values()
        has_end = limit_ms and not any(step.approval or STEP_TYPES[step.type].waits_when_approved for step in steps)

        async def send() -> None:
            await client.start_workflow(
                RUN_WORKFLOW,
                run_input,
                id=request.run_id,
                task_queue=self._queue,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                execution_timeout=timedelta(milliseconds=limit_ms + EXTENSION_ROOM_MS) if has_end else None,
                task_timeout=timedelta(seconds=TASK_LIMIT_S),
                static_summary=request.name,
                search_attributes=describe_beginning(request.name, attributes),
                memo={"name": request.name, "file": request.file, "limit_ms": limit_ms, "start_id": start_id},
                rpc_timeout=RPC_LIMIT,
            )

        if not await _is_accepted(client.get_workflow_handle(request.run_id), send, start_id, caller.stop):
            message = f"the engine does not answer: it is unknown whether it has accepted run {request.run_id}"
            return self._unknown_answer(Failure("INCOMPLETE", message), request.run_id)
        noticing = asyncio.ensure_future(self._notice_missing_workers(request.workflow, caller))
        try:
            envelope = await self._wait_for_end(request.run_id, caller, limit_ms)
            envelope.warnings += noticing.result() if noticing.done() else []
        finally:
            noticing.cancel()
            await asyncio.wait([noticing])
        return envelope

    async def resume(self, run_id: str, caller: RunCaller) -> Envelope:
        try:
            limit_ms = int(await _read_memo(await self._describe(run_id), "limit_ms", 0))
        except Failure as failure:
            if failure.code == "RUN_NOT_FOUND":
                raise
            return self._unknown_answer(failure, run_id)
        return await self._wait_for_end(run_id, caller, limit_ms)

    async def _wait_for_end(self, run_id: str, caller: RunCaller, limit_ms: int) -> Envelope:
        """Wait for the end of an accepted run. Without an end the answer names the command that continues it: after the
        caller's budget if the run only waits for people, at once if no worker serves its queue, else after its limit.
        """
        try:
            envelope = await self._race_to_end(run_id, caller, limit_ms + END_MARGIN_MS if limit_ms else None)
        except Failure as failure:
            envelope = self._unknown_answer(failure, run_id)
        envelope.warnings += warn_of_temporal(os.environ)
        return envelope

    async def _race_to_end(self, run_id: str, caller: RunCaller, within_ms: int | None) -> Envelope:
        handle, began_ns = await self.handle(run_id), monotonic_ns()
        changes = RunChanges(await self.client(), run_id, caller)
        ending = asyncio.ensure_future(_read_end(handle))
        watching = asyncio.ensure_future(self._watch(changes, caller))
        untaken = asyncio.ensure_future(self._find_queue_without_worker(handle))
        tasks: list[asyncio.Future[Any]] = [ending, watching, untaken]
        waits = [*tasks, *([caller.stop] if caller.stop is not None else [])]
        try:
            while True:
                waited_ms = (monotonic_ns() - began_ns) // NS_PER_MS
                limit_s = None if within_ms is None else max(0, within_ms - waited_ms) / 1000
                done, _ = await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if done or within_ms is None:
                    break
                longer_ms = 0
                with contextlib.suppress(Failure):
                    longer_ms = int((await read_progress(handle))["limit_ms"]) + END_MARGIN_MS
                if longer_ms <= within_ms:
                    break
                within_ms = longer_ms  # the run was extended
            if ending.done():
                watching.cancel()
                return await changes.finish(ending.result())
            if watching.done():
                parked = self._parked_answer(run_id, watching.result(), caller.budget_ms or 0)
                parked.meta["duration_ms"] = (monotonic_ns() - began_ns) // NS_PER_MS
                return parked
            if untaken.done():
                message = f"no worker serves queue {untaken.result()!r}: run {run_id} waits for one"
                start = f"`shotclock worker {self.where} --queue {untaken.result()}` starts one"
                raise Failure("INCOMPLETE", message, suggestion=f"{start}; then run data.continue_command")
            if caller.stop is None or not caller.stop.done():
                return self._unended_answer(run_id, within_ms or 0)
            signal = caller.stop.result()
            tasks.append(asyncio.ensure_future(_insist(lambda: handle.signal("stop", signal, rpc_timeout=RPC_LIMIT))))
            done, _ = await asyncio.wait([ending], timeout=STOP_LIMIT_S)
            if not done:
                return self._unended_answer(run_id, int(STOP_LIMIT_S * 1000))
            watching.cancel()
            return await changes.finish(ending.result())
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.wait(tasks)

    async def _watch(self, changes: RunChanges, caller: RunCaller) -> Progress:
        """Report changes. Return the progress once the run has waited only for people as long as the caller does. Raise
        Failure once its record could not be read for a while, here or by its worker."""
        waits_since_ns = unread_since_ns = None
        while changes.is_wanted or caller.budget_ms is not None:
            now_ns = monotonic_ns()
            try:
                progress: Progress = {"only_waits": await changes.read()}
                if progress["only_waits"] and caller.budget_ms is not None:
                    progress = await self._read_with_nested(await read_progress(changes.handle))
                unread_since_ns = None
                waits_since_ns = (waits_since_ns or now_ns) if progress["only_waits"] else None
                waited_ms = 0 if waits_since_ns is None else (now_ns - waits_since_ns) // NS_PER_MS
                if waits_since_ns is not None and caller.budget_ms is not None and waited_ms >= caller.budget_ms:
                    return progress
            except Failure as failure:
                if failure.code == "INCOMPLETE":
                    unread_since_ns = unread_since_ns or now_ns
                    if now_ns - unread_since_ns >= NO_WORKER_MS * NS_PER_MS:
                        raise
            await asyncio.sleep(LOOK_S)
        return await _never(dict)

    async def _read_with_nested(self, progress: Progress) -> Progress:
        """Add the open proposals of nested runs. A run waits only for people if its nested runs do as well."""
        if not progress["only_waits"]:
            return progress
        try:
            handles = [await self.handle(each) for each in progress["children"]]
            inner = [await self._read_with_nested(await read_progress(each, SEEN_LIMIT)) for each in handles]
        except Failure:  # a nested run that does not answer may be working
            return {**progress, "only_waits": False}
        waiting = [*progress["waiting"], *(proposal for each in inner for proposal in each["waiting"])]
        return {**progress, "waiting": waiting, "only_waits": all(each["only_waits"] for each in inner)}

    async def _find_queue_without_worker(self, handle: Handle) -> str:
        """Return the queue of a run, once the queue has had no worker for a while."""
        alone_since_ns: int | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                described = await handle.describe(rpc_timeout=RPC_LIMIT)
                task = described.raw_description.pending_workflow_task
                if task.state != PendingWorkflowTaskState.PENDING_WORKFLOW_TASK_STATE_SCHEDULED:
                    break
                if await self._has_worker(described.task_queue, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW):
                    break
            except RPCError:
                alone_since_ns = None
                continue
            alone_since_ns = alone_since_ns or monotonic_ns()
            if monotonic_ns() - alone_since_ns >= NO_WORKER_MS * NS_PER_MS:
                return described.task_queue
        return await _never(str)

    async def _notice_missing_workers(self, workflow: WorkflowFile, caller: RunCaller) -> list[Warning_]:
        """Report each step whose own queue has no worker soon after the start."""
        await asyncio.sleep(NO_WORKER_MS / 1000)
        queues = {name: step.runs_on for name, step in workflow.steps.items() if step.runs_on}
        missing: list[Warning_] = []
        for name, queue in queues.items():
            try:
                if await self._has_worker(queue, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY):
                    continue
            except (Failure, RPCError):
                break
            start = f"`shotclock worker {self.where} --queue {queue}` starts one"
            missing.append(warning("NO_WORKER", f"no worker served queue {queue!r} of step {name}; {start}"))
            if caller.on_news is not None:
                caller.on_news(name, {"event": "no_worker", "queue": queue, "start": start})
        return missing

    async def _has_worker(self, queue: str, kind: TaskQueueType.ValueType) -> bool:
        client = await self.client()
        request = DescribeTaskQueueRequest(
            namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
        )
        return bool((await client.workflow_service.describe_task_queue(request, timeout=RPC_LIMIT)).pollers)

    async def wait(self, run_id: str, until_ns: int | None) -> Envelope | None:
        await self._describe(run_id)
        left_s = None if until_ns is None else max(0, until_ns - monotonic_ns()) / 1e9
        return await _within(left_s, _read_end(await self.handle(run_id)))

    async def cancel(self, run_id: str) -> Envelope | None:
        await self._describe(run_id)
        handle = await self.handle(run_id)

        async def stop() -> Envelope:
            await _insist(lambda: handle.cancel(rpc_timeout=RPC_LIMIT))
            return await _read_end(handle)

        return await _within(CANCEL_LIMIT_S, stop())

    # --- answers without an end ---------------------------------------------------------------------------

    def as_accepted(self, failure: Failure, run_id: str) -> Failure:
        """Return the failure with the run, the commands that continue it, and side effects as unknown."""
        failure.side_effects = SideEffects.UNKNOWN
        failure.data = {
            "run_id": run_id,
            "job_id": run_id,
            "state": "ended" if failure.code in _LOST else "running",
            **commands_for(run_id, self.where),
        }
        return failure

    def unknown_outcome(self, failure: Failure, run_id: str) -> Outcome:
        """Return the outcome of a command on a run that the engine may have accepted, with unknown side effects."""
        outcome = failure_outcome(self.as_accepted(failure, run_id))
        outcome.ending = Ending.ABANDONED if failure.code in _LOST else Ending.DETACHED
        return outcome

    def _unknown_answer(self, failure: Failure, run_id: str, fired: Fired | None = None) -> Envelope:
        outcome = self.unknown_outcome(failure, run_id)
        if isinstance(outcome.problem, Problem):
            outcome.problem = replace(outcome.problem, fired=fired)
        call = admit(f"run {run_id}", Clocks(timeout_ms=0))
        call.time.began_ns = process_began_ns()
        return answer(call, outcome)

    def _unended_answer(self, run_id: str, waited_ms: int) -> Envelope:
        key = f", or none has our {KEY_VARIABLE}" if read_keys(os.environ) else ""
        message = f"run {run_id} has not ended in its time: no worker takes it{key}, or the engine does not answer"
        fired = Fired(ClockKind.BUDGET, "caller", waited_ms, waited_ms)
        return self._unknown_answer(Failure("INCOMPLETE", message), run_id, fired)

    def _parked_answer(self, run_id: str, progress: Progress, budget_ms: int) -> Envelope:
        states = {name: StepState.from_record(record) for name, record in progress["steps"].items()}
        waiting = [read_exported(each["record"]).as_result() for each in progress["waiting"] if "record" in each]
        call = admit(f"run {progress['name']}", Clocks(timeout_ms=0), caller=TraceContext(progress["trace_id"]))
        return answer(call, park_outcome(run_id, progress["name"], states, waiting, budget_ms, self.where))

    # --- looking ------------------------------------------------------------------------------------------

    async def progress(self, run_id: str) -> RunSummary:
        """Return the progress of a run, without its steps if no worker answers for it."""
        summary = await self._summarise(await self._describe(run_id))
        with contextlib.suppress(Failure):
            progress = await read_progress(await self.handle(run_id), SEEN_LIMIT)
            counts = count_steps([Status(step["status"]) for step in progress["steps"].values()])
            waits_for = tuple(str(each["id"]) for each in progress["waiting"])
            summary = replace(summary, timeout_ms=progress["limit_ms"], steps=counts, waits_for=waits_for)
        return summary

    async def list_runs(self, most: int, *, active_only: bool = False) -> list[RunSummary]:
        found: list[WorkflowExecution] = []
        async for each in self._search(" AND ExecutionStatus = 'Running'" if active_only else ""):
            if each.parent_id is None:
                found.append(each)
            if len(found) == most:
                break
        found.sort(key=lambda each: each.start_time, reverse=True)
        return list(await asyncio.gather(*map(self._summarise, found)))

    async def _search(self, condition: str, most: int | None = None) -> AsyncIterator[WorkflowExecution]:
        client, query = await self.client(), f"WorkflowType = '{RUN_WORKFLOW}'{condition}"
        try:
            async for found in client.list_workflows(query, limit=most, rpc_timeout=RPC_LIMIT):
                yield found
        except RPCError as error:
            raise Failure("CONNECT_FAILED", f"the engine does not list its runs: {error}") from None

    async def report(self, run_id: str) -> Report:
        try:
            return await self._report(run_id)
        except Failure as failure:
            if failure.code != "RUN_NOT_FOUND":
                raise self.as_accepted(failure, run_id) from None
        return await self._report(await self._find_run(run_id))

    async def _report(self, run_id: str) -> Report:
        handle = await self.handle(run_id)
        progress, described, now = await read_progress(handle, SEEN_LIMIT), await self._describe(run_id), wall_time()
        envelope, ended_at = None, None
        if described.close_time is not None:
            envelope = (await _read_ended(handle)).to_dict()
            ended_at = _read_instant(described.close_time)
        run, records = make_run(run_id, progress)
        is_parked = ended_at is None and (await self._read_with_nested(progress))["only_waits"]
        run = replace(run, ended_at=ended_at, envelope=envelope, parked_at=now if is_parked else None)
        made = report_of(run, records, now=now, is_alive=True, where=self.where)
        if made.status is Status.PARKED:
            made = replace(made, why=f"it waits for a person: `shotclock inbox list {self.where}`")
        return made

    async def find_steps(self, run_id: str) -> tuple[str, bool, list[str]]:
        """Return the id of a run, whether it has ended, and its steps; none where no worker answers."""
        try:
            described = await self._describe(run_id)
        except Failure as failure:
            if failure.code != "RUN_NOT_FOUND":
                raise
            run_id = await self._find_run(run_id)
            described = await self._describe(run_id)
        names: list[str] = []
        with contextlib.suppress(Failure):
            names = list((await read_progress(await self.handle(run_id), SEEN_LIMIT))["steps"])
        return run_id, described.close_time is not None, names

    async def _find_run(self, beginning: str) -> str:
        found: list[str] = []
        if re.fullmatch(r"[A-Za-z0-9._-]+", beginning):
            found = [each.id async for each in self._search(f" AND WorkflowId STARTS_WITH '{beginning}'", 5)]
        if len(found) == 1:
            return found[0]
        message = f"there is no run {beginning!r}" if not found else f"several runs begin with {beginning!r}"
        hint = f"did you mean {' or '.join(found)}?" if found else LISTED_BY
        raise Failure("RUN_NOT_FOUND", message, context={"near": found}, suggestion=hint)

    async def _describe(self, run_id: str) -> WorkflowExecutionDescription:
        handle = await self.handle(run_id)
        try:
            described = await handle.describe(rpc_timeout=RPC_LIMIT)
        except RPCError as error:
            raise not_reached(handle, error) from None
        if described.workflow_type != RUN_WORKFLOW:
            raise Failure("RUN_NOT_FOUND", f"{run_id!r} is a workflow of another program")
        return described

    async def _summarise(self, found: WorkflowExecution) -> RunSummary:
        attributes, handle = found.typed_search_attributes, await self.handle(found.id)
        status, code = Status.RUNNING, None
        with contextlib.suppress(Failure):  # no worker answers for it now
            if found.close_time is not None:
                ending = attributes.get(ENDING)
                code = (await _read_ended(handle)).code if ending is None else None if ending == "OK" else ending
                status = judge_code(code)
            elif attributes.get(STATUS) != "running":
                progress = await self._read_with_nested(await read_progress(handle, SEEN_LIMIT))
                status = Status.PARKED if progress["only_waits"] else Status.RUNNING
        if status is Status.RUNNING and found.close_time is not None:  # terminated, or ended long ago
            status = Status.SUCCEEDED if found.status is WorkflowExecutionStatus.COMPLETED else Status.FAILED
        began_at = _read_instant(found.start_time)
        ended_at = None if found.close_time is None else _read_instant(found.close_time)
        duration_ms = None if ended_at is None else ended_at.since_ms(began_at)
        name = str(await _read_memo(found, "name", found.id))
        return RunSummary(found.id, name, status, began_at, ended_at, duration_ms, code, code or "")

    async def find_attributes(self) -> list[str]:
        """Return our registered search attributes; none with a key for payloads: Temporal stores them in the clear."""
        if read_keys(os.environ):
            return []
        if self._attributes is None:
            client = await self.client()
            request = ListSearchAttributesRequest(namespace=client.namespace)
            try:
                listed = await client.operator_service.list_search_attributes(request, timeout=SEEN_LIMIT)
            except RPCError:  # the next request may be answered
                return []
            types = listed.custom_attributes
            self._attributes = [key.name for key in KEYS if types.get(key.name) == int(key.indexed_value_type)]
        return self._attributes

    async def list_running(self, most: int | None = None, *, only_waiting: bool = False) -> list[str]:
        """Return the ids of the running runs. `only_waiting`: without those that certainly have no open proposal."""
        condition = " AND ExecutionStatus = 'Running'"
        if only_waiting and STATUS.name in await self.find_attributes():
            condition += f" AND ({STATUS.name} = '{WAITING}' OR {STATUS.name} IS NULL)"
        return [found.id async for found in self._search(condition, most)]

    async def is_running(self, run_id: str) -> bool:
        try:
            return (await self._describe(run_id)).close_time is None
        except Failure as failure:
            if failure.code == "RUN_NOT_FOUND":
                return False
            raise

    # --- orders and decisions -----------------------------------------------------------------------------

    async def order(self, order: RunOrder) -> JsonObject:
        handle = await self.handle(order.run_id)
        await read_progress(handle, SEEN_LIMIT)  # an order without a worker would be carried out later
        message = {name: getattr(order, name) for name in ("run_id", "step", "who", "by_ms", "within_ms", "reason")}
        try:
            calls: JsonObject = await handle.execute_update("order", message, rpc_timeout=ORDER_LIMIT)
            return calls
        except WorkflowUpdateFailedError as error:
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.type and cause.type.isupper():
                raise Failure(cause.type, cause.message) from None
            raise Failure("CALL_NOT_FOUND", str(cause)) from None  # the engine's own: the run has ended meanwhile
        except WorkflowUpdateRPCTimeoutOrCancelledError:
            text = f"no worker answers for run {handle.id!r}; it may still receive the order later"
            raise Failure("CONNECTION_LOST", text, suggestion=NO_WORKER) from None
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise not_reached(handle, error) from None
            text = f"it is unknown whether run {handle.id!r} has received the order: {error}"
            raise Failure("CONNECTION_LOST", text) from None

    async def decide(
        self,
        run_id: str,
        proposal_id: str,
        decision: Decision,
        by: Principal,
        confirmation: Confirmation = Confirmation(),
    ) -> Proposal:
        by.must_be_operator("decide")
        for asked in (await read_progress(await self.handle(run_id), SEEN_LIMIT))["waiting"]:
            if asked["id"] == proposal_id and "record" in asked:
                proposal = read_exported(asked["record"])
                check_decision(proposal, decision, by.name)
                decided = apply_decision(
                    proposal, decision, by.name, wall_time(), via=by.via or None, confirmation=confirmation
                )
                await self.send_decision(run_id, asked["step"], export_proposal(decided))
                return decided
        await self.refuse_decided(proposal_id)
        raise Failure("ALREADY_DECIDED", f"{proposal_id} is not open any more")

    async def send_decision(self, run_id: str, step: str, record: Mapping[str, Any]) -> None:
        """Send a decided proposal to its run. Raise CONNECTION_LOST if it is unknown whether the run has taken it."""
        id, handle = record["id"], await self.handle(run_id)
        try:
            await handle.execute_update("decide", pack_record(step, record), rpc_timeout=RPC_LIMIT)
        except WorkflowUpdateFailedError as error:
            raise Failure("ALREADY_DECIDED", f"{id} is not open any more: {error.__cause__ or error}") from None
        except (RPCError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
            if isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND:
                raise Failure("ALREADY_DECIDED", f"{id} is not open any more: its run has ended") from None
            message = f"it is unknown whether run {run_id} has taken the decision about {id}: {error}"
            raise Failure("CONNECTION_LOST", message, suggestion="look at it again before you decide again") from None

    async def find_proposals(self, id: str | None = None) -> list[tuple[str, Proposal]]:
        """Return the open proposals of the runs, or the one with this id, each with its run."""
        found: list[tuple[str, Proposal]] = []
        for run_id in await self.list_running(only_waiting=True):
            with contextlib.suppress(Failure):  # it has ended meanwhile, or no worker answers for it
                for each in (await read_progress(await self.handle(run_id)))["waiting"]:
                    if "record" in each and id in (None, each["id"]):
                        found.append((run_id, read_exported({**each["record"], "status": each["status"]})))
            if id is not None and found:
                break
        return found

    async def refuse_decided(self, id: str) -> None:
        """Raise Failure if the proposal was decided, or has expired, in one of the last runs."""
        client = await self.client()
        with contextlib.suppress(builtins.TimeoutError, RPCError):
            async with asyncio.timeout(RPC_LIMIT.total_seconds()):
                query = f"WorkflowType = '{RUN_WORKFLOW}'"
                async for found in client.list_workflows(query, limit=MOST_SEARCHED):
                    progress: Progress = {"decided": {}}
                    with contextlib.suppress(Failure):  # no worker answers for it
                        progress = await read_progress(await self.handle(found.id), SEEN_LIMIT)
                    if (record := progress["decided"].get(id)) is not None:
                        status, by = record["status"], record.get("decided_by")
                        code = "PROPOSAL_EXPIRED" if status == "expired" else "ALREADY_DECIDED"
                        message = f"{id} of run {found.id} is {status}" + (f", by {by}" if by else "")
                        raise Failure(code, message, context={"proposal_id": id, "status": status, "decided_by": by})


async def _is_accepted(
    handle: Handle, send: Callable[[], Awaitable[None]], start_id: str, stop: asyncio.Future[str] | None
) -> bool:
    """Return whether the engine has accepted a run; False if that is unknown. Raise Failure if it refuses it."""
    is_in_doubt, give_up_ns = False, monotonic_ns() + START_LIMIT_MS * NS_PER_MS
    while True:
        try:
            try:
                await send()
            except WorkflowAlreadyStartedError:
                described = await handle.describe(rpc_timeout=RPC_LIMIT)
                if await _read_memo(described, "start_id", "") != start_id:  # else our first request had arrived
                    raise run_exists(handle.id) from None
            return True
        except RPCError as error:
            if error.status in _REFUSALS and not is_in_doubt:
                raise Failure("CONNECT_FAILED", f"the engine did not take the run: {error}") from None
            is_in_doubt = True
        if monotonic_ns() >= give_up_ns or (stop is not None and stop.done()):
            return False
        await asyncio.sleep(LOOK_S)


async def _never(kind: type[T]) -> T:
    waiting: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    return await waiting


async def _within(limit_s: float | None, work: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except builtins.TimeoutError:
        return None


async def _insist(send: Callable[[], Awaitable[None]]) -> None:
    """Repeat a request about a run until the engine answers. The caller bounds the wait."""
    while True:
        try:
            return await send()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:  # the run has ended
                return
        await asyncio.sleep(LOOK_S)


async def _read_end(handle: Handle) -> Envelope:
    while True:
        try:
            return read_envelope(await handle.result())
        except WorkflowFailureError as error:
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.details:
                return read_envelope(cause.details[0])
            if isinstance(cause, TimeoutError):
                message = f"the engine has ended run {handle.id!r}: no worker did in its time"
                raise Failure("TIMEOUT", message, suggestion=NO_WORKER) from None
            message = f"run {handle.id!r} was terminated, without clean-up and without an envelope: {cause}"
            raise Failure("INTERRUPTED", message) from None
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise not_reached(handle, error) from None
        except Exception as error:
            raise unreadable(handle, error) from None
        await asyncio.sleep(LOOK_S)


async def _read_ended(handle: Handle) -> Envelope:
    envelope = await _within(RPC_LIMIT.total_seconds(), _read_end(handle))
    if envelope is None:
        raise Failure("CONNECT_FAILED", f"the engine does not answer for run {handle.id!r}")
    return envelope


async def _read_memo(found: WorkflowExecution, name: str, default: T) -> T:
    try:
        memo: T = await found.memo_value(name, default=default)
        return memo
    except (KeyError, ValueError, RuntimeError):
        return default


def _read_instant(at: datetime) -> WallTime:
    return WallTime(int(at.timestamp() * 1000))


def make_run(run_id: str, progress: Progress) -> tuple[StoredRun, dict[str, StepRecord]]:
    run = StoredRun(
        run_id,
        progress["name"],
        progress["file"],
        progress["workflow"],
        progress["inputs"],
        progress["trace_id"],
        NOWHERE,
        WallTime(progress["began_at"]),
        None if progress["deadline_at"] is None else WallTime(progress["deadline_at"]),
        None,
        None,
    )
    return run, {name: StepRecord(name, record["status"], record) for name, record in progress["steps"].items()}
