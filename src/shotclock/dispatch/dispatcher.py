"""Calls of one app's commands, from every surface: begun once, taken through the same stages, answered once.

begin ── preview, if not confirmed ── approval ── job, or idempotency key ── limits ── worker ── answer

Arguments are checked in the worker, and before that for a preview, an approval or a job.

Contracts (AGENTS.md): one way through the stages; SIGTERM hands a job off, SIGINT cancels it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from ..calls.call import Call, CallRequest, CallRules, Effects, Outcome, invalid, tool_of
from ..calls.preloaded_zygote import Program
from ..calls.runtime import Runtime
from ..calls.supervised_commands import run_in_thread, run_shielded
from ..core.arguments import Conversions, NotSerializable, json_arguments, to_valid_json
from ..core.catalogue import CONFIRMATION, Catalogue, CommandSpec, Operation
from ..core.envelope import Envelope, Problem, shorten, stop_problem, warning
from ..core.errors import Ending, Failure
from ..core.limits import Bound, Clocks, Deadline
from ..core.overtime import ObserverKind
from ..core.value_types import JsonObject, replace
from ..worker.context import CallListener
from .invocation import Invocation, InvocationCheckpoint

if TYPE_CHECKING:
    from ..calls.call import StepSurroundings
    from ..core.visible_text import Redaction
    from ..people.approval import Approvals
    from ..people.inbox import Inbox
    from ..store.jobs import Job
    from ..store.store import Store
    from .job_client import JobClient

# How long a stopped call may take beyond its grace until its processes are reported gone.
STOP_LIMIT_S = 3.0
LONGEST_NEWS = 200  # characters of an item in a progress message
# The job commands other than `wait`; the store's own waits are shorter than this.
JOB_CLOCKS = Clocks(timeout_ms=30_000)
# The longest check of arguments before a job or an approval, which may take days themselves.
LOOK_LIMIT_MS = 30_000

T = TypeVar("T")


class Dispatcher:
    """The stages of calls of one app's commands. The store is opened when a call first needs it."""

    def __init__(
        self,
        catalogue: Catalogue,
        runtime: Runtime,
        *,
        program: Program | None = None,
        command: list[str] | None = None,
        store_of: Callable[[], Store] | None = None,
        inbox_of: Callable[[], Inbox] | None = None,
        place: str | None = None,
        step: StepSurroundings | None = None,
    ) -> None:
        """Prepare the stages; nothing is opened yet.

        With a `program`, commands that declare it continue as jobs in a process that imports it. `command` is the
        command line of the `job` commands, for hints; `store_of` and `inbox_of` give those of another dispatcher;
        `place` is the file or module of the commands without a `program`; `step` is the step of a run that calls them.
        """
        self.catalogue = catalogue
        self.runtime = runtime
        self._program = program
        self._command = command or ["shotclock"]
        self._checks = ArgumentChecks(runtime)
        self._opened: Store | None = None
        self._inbox: Inbox | None = None
        self._store_of = store_of
        self._inbox_of = inbox_of
        self._approvals: Approvals | None = None
        limits, observers = None, {}
        if any(spec.approval is not None for spec in catalogue.commands):
            from ..people.approval import Approvals

            program_place = place if program is None else program.place
            self._approvals = Approvals(catalogue, self.inbox, self._checks.look_at, program_place, step)
        if any(spec.overtime for spec in catalogue.commands):
            from ..people.approval import ask_person

            observers[ObserverKind.PERSON] = partial(ask_person, self.inbox)
        if any(spec.single_flight is not None or spec.concurrency is not None for spec in catalogue.everything):
            from .admission import ConcurrencyLimits

            limits = ConcurrencyLimits(catalogue, self.store, self._checks.look_at)
        self._rules = CallRules(tool_of(catalogue), self._approvals, limits, observers)

    async def __aenter__(self) -> Self:
        await self.runtime.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.runtime.__aexit__(kind, error, trace)
        if self._inbox is not None:
            await self._inbox.close()
        if self._opened is not None:
            self._opened.close()

    def store(self) -> Store:
        if self._store_of is not None:
            return self._store_of()
        if self._opened is None:
            from ..store.store import Store

            self._opened = Store.open()
        return self._opened

    def inbox(self) -> Inbox:
        """Return the inbox of its commands' proposals. Raises StoreError."""
        if self._inbox_of is not None:
            return self._inbox_of()
        if self._inbox is None:
            from ..people.inbox import Inbox

            self._inbox = Inbox(self.store())
        return self._inbox

    def jobs(self) -> JobClient:
        from .job_client import JobClient

        return JobClient(self.store(), self._command)

    async def call(self, request: CallRequest) -> Envelope:
        """Call a command: one envelope, on time. A cancellation is passed on."""
        return await self.carry_out(self.begin(request))

    def begin(self, request: CallRequest) -> Call:
        """Settle whether a call is confirmed, and start its clocks. They count all but the wait for an approval."""
        spec = self.catalogue.find(request.name)
        by_argument: object = False
        if spec is not None and spec.needs_confirmation and CONFIRMATION in request.arguments:
            request.arguments = dict(request.arguments)
            by_argument = request.arguments.pop(CONFIRMATION)
            if not isinstance(by_argument, bool) and request.refusal is None:
                request.refusal = invalid([{"field": CONFIRMATION, "message": "must be true or false"}])
        if spec is not None and request.refusal is None and (missing := _find_missing_secrets(spec)):
            request.refusal = invalid(missing)
        call = self.runtime.begin(
            request.name if spec is None else self.runtime.operation(spec.name),
            request.arguments,
            request.clocks if spec is not None else (request.clocks or Clocks()).over(self.catalogue.clocks),
            parent=request.parent,
            began_ns=request.began_ns,
            rules=self._rules,
        )
        call.request = request
        if spec is None:
            return call
        if _has_dry_run(spec) and request.arguments.get("dry_run") is True:
            request.dry_run = True
        is_confirmed = bool(spec.destructive) and (request.confirmed or by_argument is True)
        if request.dry_run or request.validate_only or (spec.needs_confirmation and not is_confirmed):
            # A preview changes nothing. The copy is not the registered operation, so it takes no place.
            call.operation = replace(self.runtime.operation(spec.name), mutates=False)
            is_confirmed = False
        request.confirmed = is_confirmed
        return call

    async def carry_out(self, call: Call) -> Envelope:
        async with self.runtime.answering(call) as answering:
            answering.outcome = await self._run_stages(call)
        return answering.envelope

    async def _run_stages(self, call: Call) -> Outcome | Envelope:
        """Run the stages in turn; the first answer ends the call. `Runtime.perform` follows the last one."""
        spec, request = self.catalogue.find(call.name), call.request
        assert request is not None
        if request.refusal is not None:
            return request.refusal
        if spec is None:
            return await self.runtime.perform(call)
        if self._needs_approval(spec) or self._goes_on_as_job(spec) or request.idempotency_key is not None:
            # Copied as well: the caller must not change them while a person decides.
            call.arguments, problems = json_arguments(request.arguments)
            request.arguments = call.arguments
            if problems:
                return invalid(problems)
        for stage in (self._rehearse, self._approve_unless_known, self._run_as_job, self._run_under_key):
            ended = await stage(call, spec, request)
            if ended is not None:
                return ended
        return await self._run_here(call, spec, request)

    async def _rehearse(self, call: Call, spec: CommandSpec, request: CallRequest) -> Outcome | None:
        """Preview a call that is a dry run, a validation, or not confirmed."""
        is_unconfirmed = spec.needs_confirmation and not (request.confirmed or request.dry_run or request.validate_only)
        if not (request.validate_only or request.dry_run or is_unconfirmed):
            return None
        would: dict[str, object] = {"would_run": spec.name, "arguments": _describe_arguments(request.arguments)}
        if request.validate_only or not _has_dry_run(spec):
            outcome = await self._check(call, spec, request, call.bound)
            if outcome.problem is None:
                outcome.data = {"dry_run": True, **would} if request.dry_run else {"valid": True}
        else:
            call.arguments = {**request.arguments, "dry_run": True}
            outcome = await self._run_here(call, spec, request)
            would["preview"] = outcome.data
        if not is_unconfirmed:
            return outcome
        if outcome.problem is not None:
            return _describe_failed_preview(spec, outcome)
        message = f"{spec.name} is destructive and was not confirmed; nothing was done"
        return Outcome(Ending.NOT_STARTED, Problem("CONFIRMATION_REQUIRED", message, "validation"), would)

    async def _approve_unless_known(self, call: Call, spec: CommandSpec, request: CallRequest) -> Outcome | None:
        """Ask for an approval, unless the identical call was approved and is running or has its answer kept."""
        if not self._needs_approval(spec):
            return None
        try:
            if await asyncio.to_thread(self._is_known, call, spec, request):
                return None
        except Failure as failure:
            from ..people.person_wait import refusal_outcome

            return refusal_outcome(failure)
        return await self._approve(call, spec, request)

    async def _approve(self, call: Call, spec: CommandSpec, request: CallRequest) -> Outcome | None:
        """Ask for an approval, unless this call has one. Wrong arguments are refused first."""
        if call.proposal_id is not None or not self._needs_approval(spec):
            return None
        assert self._approvals is not None
        checked = await self._check(call, spec, request)
        if checked.problem is not None:
            return checked
        data: Any = checked.data
        asking = self._approvals.approve(call, Conversions(**data))
        refusal = await _unless_stopped(asking, request.stop, STOP_LIMIT_S)
        return refusal.outcome(Ending.NOT_STARTED) if isinstance(refusal, StopSignal) else refusal

    async def _run_as_job(self, call: Call, spec: CommandSpec, request: CallRequest) -> Outcome | Envelope | None:
        """Start or attach to the job of this work, and wait within the caller's budget. Return None if it is no job."""
        if not self._goes_on_as_job(spec):
            return None
        is_approved = call.proposal_id is not None or not self._needs_approval(spec)
        ended = await self._wait_for_job(call, spec, request, may_start=is_approved)
        if ended is None:  # the approved job may have ended and been delivered meanwhile
            ended = await self._approve(call, spec, request)
        return ended or await self._wait_for_job(call, spec, request, may_start=True)

    async def _run_under_key(self, call: Call, spec: CommandSpec, request: CallRequest) -> Outcome | Envelope | None:
        """Answer a repeat with the first call's answer. Return None for the first call itself."""
        if request.idempotency_key is None:
            return None
        from .admission import KeyedCall

        arguments = {**spec.defaults, **request.arguments}
        keyed = KeyedCall(self.store(), self._scope(spec, request), request.idempotency_key, arguments, request.stdin)
        # The approved first call with the same key may have failed without an effect meanwhile.
        return await keyed.begin(call) or await self._approve(call, spec, request)

    async def _run_here(self, call: Call, spec: CommandSpec, request: CallRequest) -> Outcome:
        checkpoint = InvocationCheckpoint(self.store, self._invocation(call, spec, request).key)
        listener = CommandListener(checkpoint, spec, request, call.tool.redaction())
        limit_s = STOP_LIMIT_S + (call.clocks.grace_ms or 0) / 1000
        outcome = await _unless_stopped(self.runtime.perform(call, listener), request.stop, limit_s)
        if isinstance(outcome, StopSignal):
            outcome = outcome.outcome(Ending.KILLED)
        if outcome.problem is not None and spec.streams and outcome.data in (None, {"partial": True}):
            outcome.data = listener.items or outcome.data
        if outcome.problem is not None and spec.steps:
            outcome.data = listener.add_steps(outcome.data)
        if outcome.problem is None:
            await checkpoint.forget()
        outcome.warnings += tuple(checkpoint.warnings)
        return outcome

    async def _wait_for_job(
        self, call: Call, spec: CommandSpec, request: CallRequest, *, may_start: bool
    ) -> Outcome | Envelope | None:
        """Return the outcome of the job, as far as this caller waits; None if it may not be started."""
        checked = await self._check(call, spec, request)
        if checked.problem is not None:
            return checked
        invocation, client = self._invocation(call, spec, request), self.jobs()
        if request.idempotency_key is not None:
            from .admission import find_other_work

            scope, key = self._scope(spec, request), request.idempotency_key
            refusal = await asyncio.to_thread(find_other_work, self.store(), scope, key, invocation.key())
            if refusal is not None:
                return refusal

        def find_job() -> Job | None:
            found = client.start_or_attach(invocation, call.trace) if may_start else client.find_attached(invocation)
            if found is not None:  # and continues if the call is cancelled, even by now
                call.cancellation.ending = Ending.DETACHED
            return found

        job = await run_in_thread(find_job)
        if job is None:
            return None
        waiting = client.wait(job, call, request.budget_ms, request.on_progress)
        ended = await _unless_stopped(waiting, request.stop, STOP_LIMIT_S)
        if isinstance(ended, StopSignal):
            ended = await client.stop_waiting(job, call, ended.name)
        if isinstance(ended, Envelope):
            if request.confirmed:  # the runner does not know it
                ended.meta["confirmed"] = True
            if job.delivered_at is not None and job.ended_at is not None:
                ended.warnings.append(warning("REPLAYED", finished_at=job.ended_at.iso()))
        return ended

    def _is_known(self, call: Call, spec: CommandSpec, request: CallRequest) -> bool:
        """Return whether the identical call was approved, and is running or has its answer kept."""
        if self._goes_on_as_job(spec):
            return self.jobs().find_attached(self._invocation(call, spec, request)) is not None
        key = request.idempotency_key
        return key is not None and self.store().idempotency.is_known(self._scope(spec, request), key)

    def _invocation(self, call: Call, spec: CommandSpec, request: CallRequest) -> Invocation:
        return Invocation(
            self.catalogue,
            spec,
            self._program,
            call.arguments,
            call.clocks.timeout_ms or 0,  # the caller's deadline ends the waiting, not the work
            request.idempotency_key,
            request.resume_from,
            request.stdin,
            request.owner,
            call.proposal_id,
            request.asks,
            request.caller,
        )

    def begin_job_command(self, action: str, parent: Deadline | None = None) -> Call:
        """Start the clocks of a job command. `wait` has no limit of its own."""
        clocks = Clocks(timeout_ms=0) if action == "wait" else JOB_CLOCKS
        return self.begin_own(f"job {action}", clocks, parent, mutates=action == "cancel")

    def begin_own(
        self, name: str, clocks: Clocks, parent: Deadline | None, *, mutates: bool, idempotent: bool = False
    ) -> Call:
        call = self.runtime.begin(name, {}, clocks, parent=parent, is_command=True, rules=self._rules)
        call.effects = Effects(mutates, idempotent)
        return call

    async def run_job_command(
        self, call: Call, action: str, job_id: str | None, request: CallRequest
    ) -> Outcome | Envelope:
        """Run a job command. An agent sees only its own jobs."""
        return await self.jobs().perform(
            action,
            job_id,
            call,
            app=self.catalogue.name,
            of=None if request.principal is None else request.principal.sees_jobs_of,
            budget_ms=request.budget_ms,
            on_progress=request.on_progress,
        )

    def _scope(self, spec: CommandSpec, request: CallRequest) -> str:
        """Return the scope of an idempotency key: one command of one owner. Neither name contains an @."""
        scope, owner = f"{self.catalogue.name}/{spec.name}", request.owner
        return scope if owner is None else f"{scope}@{owner}"

    def _needs_approval(self, spec: CommandSpec) -> bool:
        return self._approvals is not None and self._approvals.guards(spec.name)

    def _goes_on_as_job(self, spec: CommandSpec) -> bool:
        return spec.interruption is not None and spec.interruption.detach and self._program is not None

    async def _check(self, call: Call, spec: CommandSpec, request: CallRequest, bound: Bound | None = None) -> Outcome:
        """Check the arguments of a call, bounded (more tightly before a job or an approval): types may run code."""
        looking = self._checks.look_at(call, spec, call.arguments, bound)
        looked = await _unless_stopped(looking, request.stop, STOP_LIMIT_S)
        return looked.outcome(Ending.NOT_STARTED) if isinstance(looked, StopSignal) else looked


class ArgumentChecks:
    """Checks of arguments, in a process that can import their types."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._operations: dict[str, Operation] = {}

    async def look_at(
        self, call: Call, spec: CommandSpec, arguments: Mapping[str, object], bound: Bound | None = None
    ) -> Outcome:
        bound = bound or call.narrowed(LOOK_LIMIT_MS, "look at the arguments")
        return await self._runtime.check(call, self._operation(spec), arguments, bound)

    def _operation(self, spec: CommandSpec) -> Operation:
        if spec.name not in self._operations:
            reference = replace(spec.handler, qualname=f"{spec.handler.qualname}?", is_async=False)
            self._operations[spec.name] = Operation(
                spec.name, reference, isolation="process", mutates=False, idempotent=True, clocks=spec.clocks
            )
        return self._operations[spec.name]


class CommandListener(CallListener):
    """Listener to one call of a command: its steps, its progress, its checkpoint and the items that it yields."""

    def __init__(
        self, checkpoint: InvocationCheckpoint, spec: CommandSpec, request: CallRequest, redaction: Redaction | None
    ) -> None:
        self._checkpoint, self._request, self._redaction = checkpoint, request, redaction
        self._steps, self._streams, first = spec.steps, spec.streams, request.resume_from
        self._begun: list[str] = []
        self.skipped_steps: tuple[str, ...] = spec.steps[: spec.steps.index(first)] if first in spec.steps else ()
        self.stdin_path: str | None = None if request.stdin is None else request.stdin.path
        self.items: list[object] = []
        """Yielded so far. They are its data if it is stopped."""

    def wrote(self, text: str) -> None:
        if not self._streams:
            return
        item = json.loads(text)
        if self._redaction is not None:
            item = self._redaction.value(item)
        self.items.append(item)
        if self._request.on_item is not None:
            self._request.on_item(item)
        elif self._request.on_progress is not None:
            shown = shorten(item if isinstance(item, str) else text, LONGEST_NEWS)
            self._request.on_progress(float(len(self.items)), None, shown)  # a float: the message is no unit

    def progress(self, done: float, total: float | None, unit: str | None) -> None:
        if self._request.on_progress is not None:
            self._request.on_progress(done, total, self.redact(unit))

    def log(self, level: str, message: str, logger: str | None) -> None:
        report = self._request.on_log or super().log
        report(level, self.redact(message) or "", logger)

    def redact(self, text: str | None) -> str | None:
        return text if self._redaction is None or text is None else self._redaction.text(text)

    def step(self, name: str) -> None:
        if name not in self._begun:
            self._begun.append(name)

    async def checkpoint(self, state: object) -> None:
        await self._checkpoint.save(state)

    async def restore(self, fingerprint: str) -> object:
        return await self._checkpoint.restore(fingerprint)

    def ask(self, question: str, value: object) -> Coroutine[Any, Any, object]:
        answer = None if self._request.on_question is None else self._request.on_question(question, value)
        return super().ask(question, value) if answer is None else answer

    def add_steps(self, data: object) -> dict[str, object]:
        """Return the data of a failed command, with the state of its steps."""
        completed = self._begun[:-1]
        skipped = list(self.skipped_steps)
        pending = [name for name in self._steps if name not in completed and name not in skipped]
        shown: JsonObject = dict(data) if isinstance(data, dict) else {} if data is None else {"result": data}
        shown |= {"completed_steps": completed, "pending_steps": pending, "skipped_steps": skipped}
        if self._begun:
            shown["failed_step"] = self._begun[-1]
        if pending:
            shown["resume_from"] = self._begun[-1] if self._begun else pending[0]
        return shown


class StopSignal(NamedTuple):
    """The name of the signal by which a surface has stopped a call."""

    name: str

    def outcome(self, ending: Ending) -> Outcome:
        return Outcome(ending, stop_problem(self.name), {"partial": True})


async def _unless_stopped(work: Awaitable[T], stop: asyncio.Future[str] | None, limit_s: float) -> T | StopSignal:
    """Return the work's result, or the signal by which the surface stopped it."""
    if stop is None:
        return await work
    working = asyncio.ensure_future(work)
    both: list[asyncio.Future[Any]] = [working, stop]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)  # bounded by the work's own clocks
    except asyncio.CancelledError:
        working.cancel()
        await run_shielded(asyncio.wait([working], timeout=limit_s))
        raise
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.wait([working], timeout=limit_s)
    if working.done() and not working.cancelled() and working.exception() is None:
        return working.result()  # it ended by itself just then
    return StopSignal(stop.result())


def _find_missing_secrets(spec: CommandSpec) -> list[dict[str, str]]:
    return [
        {"field": secret.name, "message": f"a secret: set {secret.variable} in the environment"}
        for secret in spec.secrets
        if secret.is_required and not os.environ.get(secret.variable)
    ]


def _has_dry_run(spec: CommandSpec) -> bool:
    return "dry_run" in spec.input_schema["properties"]


def _describe_failed_preview(spec: CommandSpec, preview: Outcome) -> Outcome:
    problem = preview.problem() if callable(preview.problem) else preview.problem
    if problem is not None and (problem.phase != "validation" or preview.ending is not Ending.NOT_STARTED):
        why = f"{spec.name} was not confirmed, and its preview (dry_run) failed"
        problem = replace(
            problem,
            message=f"{why}: {problem.message}",
            outside=None if problem.outside is None else f"{why}: {problem.outside}",
            context={**(problem.context or {}), "preview": True},
        )
    preview.problem = problem
    return preview


def _describe_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    described: dict[str, object] = {}
    for name, value in arguments.items():
        try:
            described[name] = to_valid_json(value)[0]
        except NotSerializable:
            described[name] = repr(value)
    return described
