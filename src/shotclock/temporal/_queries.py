"""Questions to a run on Temporal. A worker answers them, also once the run has ended."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

from temporalio.client import Client, WorkflowHandle, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from ..core.envelope import Envelope, warning
from ..core.errors import Failure
from ..core.value_types import JsonObject
from ..flows.run.runs import RunCaller
from ..flows.run.state import StepState
from ._payloads import KEY_VARIABLE, PAYLOADS_VARIABLE, UnreadablePayload

RPC_LIMIT = timedelta(seconds=10)
SEEN_LIMIT = timedelta(seconds=5)  # where a caller without a worker must not wait for long
LAST_CHANGES_S = 30.0  # for the changes of a run that has ended: a worker may have to replay it first
# With these codes the engine has found no worker that answers, or too many queries wait for one already.
_UNANSWERED = (RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.RESOURCE_EXHAUSTED)
LISTED_BY = "check the spelling; `shotclock report --on URL` lists the runs"
NO_WORKER = "is there one at its queue? `shotclock worker --on URL [--queue NAME]` starts one"

_ENCRYPTED = "Encoded failure"  # what the SDK writes in place of a message

Progress = JsonObject  # the answer to the `progress` query of a run (run_workflow.py)
Handle = WorkflowHandle[Any, Any]


async def read_progress(handle: Handle, limit: timedelta = RPC_LIMIT) -> Progress:
    return await _ask(handle, "progress", [], limit)


async def _ask(handle: Handle, question: str, arguments: list[int], limit: timedelta = RPC_LIMIT) -> JsonObject:
    try:
        reply: JsonObject = await handle.query(question, args=arguments, rpc_timeout=limit)
        return reply
    except RPCError as error:
        if error.status is RPCStatusCode.FAILED_PRECONDITION:
            raise await _explain_failing(handle) from None
        raise not_reached(handle, error) from None
    except WorkflowQueryFailedError as error:
        raise _unreadable_there(handle, str(error)) from None
    except Exception as error:
        raise unreadable(handle, error) from None


async def _explain_failing(handle: Handle) -> Failure:
    """Return why the workers of a run fail again and again to continue it: the last reason in its history."""
    why, kind = "its reason is not known", ""
    with contextlib.suppress(RPCError, TimeoutError):
        async with asyncio.timeout(SEEN_LIMIT.total_seconds()):
            async for event in handle.fetch_history_events():
                if event.HasField("workflow_task_failed_event_attributes"):
                    failure = event.workflow_task_failed_event_attributes.failure
                    why, kind = failure.message, failure.application_failure_info.type
    if kind == UnreadablePayload.__name__ or PAYLOADS_VARIABLE in why:  # or one that is too large to be sent
        return _unreadable_there(handle, why)
    return Failure("CONNECT_FAILED", f"the worker of run {handle.id!r} fails, and tries again: {why}")


class RunChanges:
    def __init__(self, client: Client, run_id: str, caller: RunCaller) -> None:
        self._client, self._run_id, self._caller = client, run_id, caller
        self._read: dict[str, int] = {}  # how many changes of each run were read
        self._inside: dict[str, None] = {}  # the runs inside it that have not ended
        self._broken: Exception | None = None
        self.handle: Handle = client.get_workflow_handle(run_id)

    @property
    def is_wanted(self) -> bool:
        return self._caller.on_change is not None or self._caller.on_news is not None

    async def read(self) -> bool:
        """Report the new changes. Return whether the run itself only waits for people or runs inside it."""
        only_waits = await self._read_run(self._run_id)
        for run_id in list(self._inside):
            await self._read_run(run_id)
        return only_waits

    async def _read_run(self, run_id: str) -> bool:
        while True:
            number = self._read.setdefault(run_id, 0)
            try:
                reply = await _ask(self._client.get_workflow_handle(run_id), "changes", [number])
            except Failure as failure:
                if failure.code == "RUN_NOT_FOUND" and run_id != self._run_id:  # it has not begun, or never did
                    return False
                raise
            for change in reply["changes"]:
                if (inside := change.get("begins")) is not None:
                    self._inside[inside] = None
                elif (inside := change.get("ends")) is not None:  # before the end of its step
                    await self._read_run(inside)
                    del self._inside[inside]
                else:
                    self._report(run_id, StepState.from_record(change))
                self._read[run_id] += 1
            if not reply["has_more"]:
                return bool(reply["only_waits"])

    def _report(self, run_id: str, state: StepState) -> None:
        caller, name = self._caller, state.id
        if run_id != self._run_id:
            state.id = f"{run_id.removeprefix(f'{self._run_id}.')}.{name}"
        try:
            if caller.on_news is not None and state.status.is_final:
                for news in state.overtime:
                    caller.on_news(state.id, news)
            if caller.on_change is not None:
                caller.on_change(state)
        except Exception as error:  # a broken listener does not stop the run
            self._broken, self._caller = error, RunCaller()

    async def finish(self, envelope: Envelope) -> Envelope:
        """Report the last changes of a run that has ended, and return its envelope."""
        why = ""
        if self.is_wanted:
            try:
                async with asyncio.timeout(LAST_CHANGES_S):
                    await self.read()
            except (Failure, TimeoutError) as error:
                why = str(error) or NO_WORKER
        if why or self._broken is not None:
            message = f"the last changes of steps are not known here: {why or self._broken}"
            envelope.warnings.append(warning("NOT_TOLD", message))
        return envelope


def _unreadable_there(handle: Handle, why: str) -> Failure:
    why = "the reason is encrypted, with a key that is not ours" if why == _ENCRYPTED else why
    return _unreadable(f"a worker of run {handle.id!r} cannot read its record: {why}")


def unreadable(handle: Handle, error: Exception) -> Failure:
    return _unreadable(f"the record of run {handle.id!r} cannot be read: {error}")


def _unreadable(message: str) -> Failure:
    hint = f"give callers and workers the same {PAYLOADS_VARIABLE}, and {KEY_VARIABLE} with all keys that were used"
    return Failure("INCOMPLETE", message, suggestion=f"{hint} (NEW,OLD); then run data.continue_command")


def not_reached(handle: Handle, error: RPCError) -> Failure:
    if error.status is RPCStatusCode.NOT_FOUND:
        if "already completed" in error.message:
            return Failure("CALL_NOT_FOUND", f"run {handle.id!r} has ended")
        return Failure("RUN_NOT_FOUND", f"there is no run {handle.id!r}", suggestion=LISTED_BY)
    if error.status in _UNANSWERED:
        return Failure("CONNECT_FAILED", f"no worker answers for run {handle.id!r}", suggestion=NO_WORKER)
    return Failure("CONNECT_FAILED", f"the engine does not answer for run {handle.id!r}: {error}")
