"""The ends of what the attempts of a step print, on their way from its worker to `shotclock logs`.

A worker keeps no logs: the machine may be gone when they are wanted. The heartbeats of a step carry the end of its
output, and the result of its activity keeps it. The records are those of a log (flows/run/step_log.py), without
secrets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from ..core.errors import Failure
from ..core.value_types import JsonObject, entity, field
from ..flows.run.step_log import KeptLog, LogLine, read_records
from ._engine import TemporalEngine
from ._messages import STEP_ACTIVITY
from ._queries import RPC_LIMIT, unreadable

TAIL_LIMIT = 4_096  # bytes of one step: a heartbeat and each result in the history have them
LOOK_S = 0.5  # between two looks at the heartbeats of a run

OnLines = Callable[[KeptLog, list[LogLine]], None]


@entity
class _Tail:
    end: int = 0  # bytes written in all
    content: bytes = b""

    def add(self, records: bytes) -> None:
        self.end += len(records)
        content = self.content + records
        if len(content) > TAIL_LIMIT:
            content = content[content.find(b"\n", len(content) - TAIL_LIMIT - 1) + 1 :]
        # Of a line that is longer than all that is kept, the end.
        self.content = content or records[:1] + b" " + records[2 - TAIL_LIMIT :]


class StepTails:
    """The ends of the logs of one step's attempts and items, for its worker."""

    def __init__(self) -> None:
        self._tails: dict[tuple[str, int], _Tail] = {}  # the one that was written last is the last
        self._written = self._size = 0

    def add(self, step: str, number: int, records: bytes) -> None:
        if not records:
            return
        tail = self._tails.pop((step, number), None) or _Tail()
        before = len(tail.content)
        tail.add(records)
        self._tails[step, number] = tail
        self._written += len(records)
        self._size += len(tail.content) - before
        for other in list(self._tails.values())[:-1] if self._size > TAIL_LIMIT else ():
            if self._size > TAIL_LIMIT:
                self._size -= len(other.content)
                other.content = b""

    def describe(self) -> JsonObject:
        """Return the tails as JSON, and the bytes of all that was written, so that a reader can name what it missed."""
        tails = [
            {"step": step, "try": number, "end": tail.end, "text": tail.content.decode("utf-8", "surrogateescape")}
            for (step, number), tail in self._tails.items()
            if tail.content
        ]
        return {"written": self._written, "tails": tails} if tails else {}


@entity
class _ActivityReading:
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    read: int = 0  # bytes that were shown, or named as left out

    def add(self, prefix: str, printed: Mapping[str, Any], on_lines: OnLines) -> None:
        for tail in printed.get("tails", ()):
            step, number, end = tail["step"], tail["try"], tail["end"]
            content, seen = tail["text"].encode("utf-8", "surrogateescape"), self.ends.get((step, number), 0)
            if end <= seen:
                continue
            begin = end - len(content)
            lines = [LogLine(1, "", left_out=begin - seen)] if begin > seen else []
            lines += read_records(content[max(0, seen - begin) :])
            self.read += end - seen
            self.ends[step, number] = end
            on_lines(KeptLog(prefix + step, number, ""), lines)

    def finish(self, prefix: str, step: str, printed: Mapping[str, Any], on_lines: OnLines) -> None:
        """Name what was written by items and attempts whose ends were never seen."""
        self.add(prefix, printed, on_lines)
        if (missed := printed.get("written", self.read) - self.read) > 0:
            on_lines(KeptLog(prefix + step, 1, ""), [LogLine(1, "", left_out=missed)])


class RunTails:
    """The tails of a run and of the runs inside it, for a reader."""

    def __init__(self, engine: TemporalEngine, run_id: str, on_lines: OnLines) -> None:
        self._engine, self._run_id, self._on_lines = engine, run_id, on_lines
        self._readings: dict[tuple[str, str], _ActivityReading] = {}
        self._open: dict[str, None] = {run_id: None}
        self._inside: set[asyncio.Future[None]] = set()

    async def read(self, *, follows: bool) -> None:
        """Read all that is kept, or until the run has ended. Raises Failure."""
        client = await self._engine.client()
        reading: set[asyncio.Future[None]] = {asyncio.ensure_future(self._read_history(client, self._run_id, follows))}
        try:
            while reading:  # until the run has ended, which bounds it
                await self._look(client)
                done, reading = await asyncio.wait(reading, timeout=LOOK_S)
                for each in done:
                    each.result()
                reading |= self._inside
                self._inside.clear()
        except RPCError as error:
            raise Failure("CONNECTION_LOST", f"the engine does not answer: {error}") from None
        finally:
            for each in (*reading, *self._inside):
                each.cancel()

    async def _look(self, client: Client) -> None:
        for run_id in list(self._open):
            try:
                described = await client.get_workflow_handle(run_id).describe(rpc_timeout=RPC_LIMIT)
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND and run_id != self._run_id:  # it has not been started yet
                    continue
                raise
            for pending in described.raw_description.pending_activities:
                if pending.activity_type.name == STEP_ACTIVITY and pending.heartbeat_details.payloads:
                    beat = await self._decode(client, run_id, pending.heartbeat_details.payloads)
                    reading = self._reading(run_id, pending.activity_id)
                    reading.add(self._prefix(run_id), beat.get("printed") or {}, self._on_lines)

    async def _read_history(self, client: Client, run_id: str, follows: bool) -> None:
        """Read the results of activities, and the runs inside this one."""
        handle, activities = client.get_workflow_handle(run_id), dict[int, str]()
        self._open[run_id] = None
        async for event in handle.fetch_history_events(wait_new_event=follows):
            if event.event_type == EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED:
                child = event.start_child_workflow_execution_initiated_event_attributes.workflow_id
                self._inside.add(asyncio.ensure_future(self._read_history(client, child, follows)))
            await self._handle_event(client, run_id, event, activities)
        if follows:
            del self._open[run_id]

    async def _handle_event(self, client: Client, run_id: str, event: HistoryEvent, activities: dict[int, str]) -> None:
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            scheduled = event.activity_task_scheduled_event_attributes
            if scheduled.activity_type.name == STEP_ACTIVITY:
                activities[event.event_id] = scheduled.activity_id
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
            completed = event.activity_task_completed_event_attributes
            if (activity_id := activities.get(completed.scheduled_event_id)) is not None:
                reply = await self._decode(client, run_id, completed.result.payloads)
                reading, step = self._reading(run_id, activity_id), str(reply["state"]["id"])
                reading.finish(self._prefix(run_id), step, reply.get("printed") or {}, self._on_lines)
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT:
            timed_out = event.activity_task_timed_out_event_attributes
            details = timed_out.failure.timeout_failure_info.last_heartbeat_details.payloads
            if (activity_id := activities.get(timed_out.scheduled_event_id)) is not None and details:
                beat = await self._decode(client, run_id, details)
                reading = self._reading(run_id, activity_id)
                reading.add(self._prefix(run_id), beat.get("printed") or {}, self._on_lines)

    async def _decode(self, client: Client, run_id: str, payloads: Sequence[Payload]) -> Any:
        try:
            (decoded,) = await client.data_converter.decode(payloads)
        except Exception as error:  # another key, or a directory that is not here
            raise unreadable(client.get_workflow_handle(run_id), error) from None
        return decoded

    def _reading(self, run_id: str, activity_id: str) -> _ActivityReading:
        return self._readings.setdefault((run_id, activity_id), _ActivityReading())

    def _prefix(self, run_id: str) -> str:
        return "" if run_id == self._run_id else f"{run_id.removeprefix(f'{self._run_id}.')}."
