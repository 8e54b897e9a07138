"""The Tasks extension of MCP (SEP-2663): a call that continues as a job is a task, and the id of the job is the task's.

    client ── tools/call ── job ── task id          client ── tasks/get, tasks/cancel ── store ── job runner

A job that asks stores its questions. The client sees them in `tasks/get`, answers with `tasks/update`, and the job's
runner reads the answers from the store.

The server keeps nothing about a task. Every server of the same App and store answers for it, also after `kill -9` of
the one that created it. Clients of older revisions, and those that do not declare the extension, get no tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, TypeVar

from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp_types import (
    HEADER_MISMATCH,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    RequestParams,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ...calls.principal import Principal
from ...core.envelope import Envelope
from ...core.errors import Ending, Failure
from ...core.limits import format_duration
from ...core.value_types import JsonObject
from ...dispatch.dispatcher import Dispatcher
from ...dispatch.job_client import POLL_INTERVAL_MS, SILENT_LIMIT_MS
from ...store.jobs import RETENTION_MS, Job
from ...supervise.clock import wall_time
from ...worker.client_forms import CAPABILITIES
from ._listing import Context, refusal_of
from .client_link import capabilities_of, checked_answer

EXTENSION = "io.modelcontextprotocol/tasks"
# Errors of the machinery. Those of the tool itself are results with `isError`.
NOT_OF_THE_TOOL = frozenset(
    {"JOB_LOST", "WORKER_CRASHED", "SUPERVISOR_LOST", "SPAWN_FAILED", "HANDLER_NOT_IMPORTABLE", "MACHINE_UNFIT"}
)

T = TypeVar("T")


class TaskStatus(StrEnum):
    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TaskParams(RequestParams):
    task_id: str


class UpdateParams(TaskParams):
    input_responses: JsonObject


class Tasks:
    """The tasks of one App. `render` makes the result of a tool of an envelope."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        render: Callable[[Context, str, Envelope], JsonObject],
        principal_at: Callable[[Any], Principal],
    ) -> None:
        self._dispatcher = dispatcher
        self._render = render
        self._principal_at = principal_at
        commands = dispatcher.catalogue.commands
        self._specs = {
            spec.name: spec
            for spec in commands
            if spec.on_mcp and spec.interruption is not None and spec.interruption.detach
        }

    def offer(self, server: Server[Any], *, always: bool = False) -> None:
        """Add the requests for tasks to a server, if a command can become one, or `always`."""
        if not self._specs and not always:
            return
        server.extensions[EXTENSION] = {}
        server.add_request_handler("tasks/get", TaskParams, self._get)
        server.add_request_handler("tasks/update", UpdateParams, self._update)
        server.add_request_handler("tasks/cancel", TaskParams, self._cancel)

    def starts_at_once(self, ctx: Context, name: str) -> bool:
        """Return whether a call is answered with a task without waiting. One that a person approves waits first."""
        return name in self._specs and self._specs[name].approval is None and _declares_tasks(ctx)

    def asks_of(self, ctx: Context, name: str) -> JsonObject | None:
        """Return the capabilities of a client that the job of a call may ask; None if there is no task to ask in."""
        if name not in self._specs or not _declares_tasks(ctx):
            return None
        return {each: given for each, given in capabilities_of(ctx).items() if each in CAPABILITIES.values()}

    async def created_by(self, ctx: Context, name: str, envelope: Envelope) -> JsonObject | None:
        """Return the task of a call that continues as a job; None if it does not, or the client takes no tasks."""
        data = envelope.data
        if name not in self._specs or envelope.ending != Ending.DETACHED or not _declares_tasks(ctx):
            return None
        job_id = data.get("job_id") if isinstance(data, dict) else None
        try:
            job = await asyncio.to_thread(self._dispatcher.jobs().look, str(job_id))
        except Failure:  # the store is busy: the answer names the job
            return None
        return None if job is None else {"resultType": "task", **_describe(job)}

    async def _get(self, ctx: Context, params: TaskParams) -> JsonObject:
        job = await self._find(ctx, params.task_id)
        task = _describe(job)
        if task["status"] == TaskStatus.INPUT_REQUIRED:
            task["inputRequests"] = job.open_questions
        if job.is_active:
            return task
        envelope = await _reach(asyncio.to_thread(self._dispatcher.jobs().deliver, job))
        if task["status"] == TaskStatus.COMPLETED:
            task["result"] = self._render(ctx, job.command, envelope)
        elif task["status"] == TaskStatus.FAILED:
            task["error"] = refusal_of(envelope).error.model_dump(mode="json", exclude_none=True)
        return task

    async def _update(self, ctx: Context, params: UpdateParams) -> JsonObject:
        """Give responses to the job. Those to requests that are not open are ignored: the first one counts."""
        job = await self._find(ctx, params.task_id)
        asked = job.open_questions if job.is_active else {}
        answers = {}
        for key, response in params.input_responses.items():
            if key in asked:
                try:
                    answers[key] = checked_answer(asked[key]["method"], response)
                except Failure as failure:  # the request stays open
                    raise MCPError(code=INVALID_PARAMS, message=f"inputResponses[{key!r}]: {failure}") from None
        if answers:
            await _reach(asyncio.to_thread(self._dispatcher.store().jobs.answer, job.id, answers))
        return {}

    async def _cancel(self, ctx: Context, params: TaskParams) -> JsonObject:
        job, jobs = await self._find(ctx, params.task_id), self._dispatcher.jobs()
        if job.is_active:
            job = await _reach(jobs.cancel(job))
            if not job.is_active:  # its client knows: the same call, made again, is new work
                await _reach(asyncio.to_thread(jobs.deliver, job))
        return {}

    async def _find(self, ctx: Context, task_id: str) -> Job:
        """Return the job of a task. Raises MCPError; the task of another principal is unknown."""
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            raise MCPError(code=METHOD_NOT_FOUND, message="Method not found", data=ctx.method)
        if not _declares_tasks(ctx):
            raise MCPError(
                code=MISSING_REQUIRED_CLIENT_CAPABILITY,
                message=f"{ctx.method} needs a client that declares the extension {EXTENSION}",
                data={"requiredCapabilities": {"extensions": {EXTENSION: {}}}},
            )
        headers = getattr(ctx.request, "headers", None)
        if headers is not None and decode_header_value(headers.get(MCP_NAME_HEADER)) != task_id:
            raise MCPError(code=HEADER_MISMATCH, message="the header Mcp-Name is not the taskId of the request")
        job = await _reach(asyncio.to_thread(self._dispatcher.jobs().look, task_id)) if task_id.isascii() else None
        of = self._principal_at(ctx.request).sees_jobs_of
        is_ours = job is not None and job.app == self._dispatcher.catalogue.name and job.command in self._specs
        if job is None or not is_ours or (of is not None and job.owner != of):
            raise MCPError(code=INVALID_PARAMS, message=f"there is no task {task_id[:100]!r} in this server's store")
        return job


def _declares_tasks(ctx: Context) -> bool:
    """Return whether this request declares the extension."""
    capabilities = ctx.session.client_capabilities
    extensions = None if capabilities is None else capabilities.extensions
    return ctx.protocol_version in MODERN_PROTOCOL_VERSIONS and EXTENSION in (extensions or {})


async def _reach(work: Coroutine[Any, Any, T]) -> T:
    """Use the store, and report a store that cannot be used as an error of the protocol."""
    try:
        return await work
    except Failure as failure:
        raise MCPError(code=INTERNAL_ERROR, message=str(failure)) from None


def _describe(job: Job) -> JsonObject:
    """Return the fields that a task has in every status. It is kept for a day after its end, so for a day at least."""
    now = wall_time()
    return {
        "taskId": job.id,
        "status": _status(job),
        "statusMessage": _message(job),
        "createdAt": job.created_at.iso(),
        "lastUpdatedAt": (job.ended_at or job.heartbeat_at or job.attempt_at).iso(),
        "ttlMs": (job.ended_at or now).since_ms(job.created_at) + RETENTION_MS,
        "pollIntervalMs": POLL_INTERVAL_MS,
    }


def _status(job: Job) -> TaskStatus:
    if job.is_active:
        return TaskStatus.INPUT_REQUIRED if job.open_questions else TaskStatus.WORKING
    code = _error_of(job).get("code")
    if code == "CANCELLED":
        return TaskStatus.CANCELLED
    return TaskStatus.FAILED if code in NOT_OF_THE_TOOL else TaskStatus.COMPLETED


def _message(job: Job) -> str:
    if not job.is_active:
        error = _error_of(job)
        return f"{error['code']}: {error['message']}" if error else f"{job.command} has ended"
    silent_ms = 0 if job.heartbeat_at is None else wall_time().since_ms(job.heartbeat_at)
    if silent_ms > SILENT_LIMIT_MS:
        return f"its runner has been silent for {format_duration(silent_ms)}"
    if job.cancel_requested_at is not None:
        return f"{job.command} was asked to stop and has not stopped yet"
    if job.open_questions:
        return f"{job.command} waits for an answer"
    if job.progress_done is None:
        return f"{job.command} is running"
    total = "" if job.progress_total is None else f" of {job.progress_total}"
    return f"{job.progress_done}{total} {job.progress_unit or 'done'}"


def _error_of(job: Job) -> JsonObject:
    """Return the error of an ended job; empty for a success. A lost job has an envelope once it was looked at."""
    error: JsonObject | None = None if job.envelope is None else job.envelope["error"]
    return error or {}
