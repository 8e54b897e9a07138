"""Runs in this process: start, resume, nest and cancel a run. A run whose process died resumes where it was cut off."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...calls.call import Call, CallRules, admit, answer, inherited_deadline, inherited_trace
from ...calls.control import control_of, live_calls
from ...calls.control_channel import run_cancels
from ...calls.control_channel import runs as running_runs
from ...calls.preloaded_zygote import Program
from ...calls.principal import Principal
from ...calls.runtime import Runtime
from ...calls.supervised_commands import run_in_thread
from ...core.envelope import Envelope, Problem, Warning_, warning
from ...core.errors import Failure
from ...core.limits import NS_PER_MS, ClockKind, Clocks, Deadline, Fired, WallTime
from ...core.overtime import ObserverKind
from ...core.trace import TraceContext
from ...core.value_types import JsonObject, entity, field, replace, value
from ...core.visible_text import looks_secret
from ...people.approval import ask_person
from ...people.inbox import Inbox
from ...store.home import ATTEMPT_MS, StoreBusy, StoreError
from ...store.runs import RunTaken, StepRecord, StoredRun
from ...store.store import Retention, Store, prune_in_passing, read_retention
from ...supervise import kernel
from ...supervise.clock import monotonic_ns, wall_ns, wall_time
from ...supervise.kernel import is_alive, this_process
from ...worker.context import Scope, current_scope
from ..check.lint import identity, inner_workflow
from ..check.plan import clean_up_steps, finally_reserve, kept_for_clean_up_ms, most_attempts, on_demand, run_timeout_ms
from ..file.schema import WorkflowFile, check_inputs, failure_reaction, find_unset_variables
from ..steps.provider import Aside, ForeignProposal, NestedRun, Providers, RunServices
from ._concurrency import GroupRequest, enter_group
from ._log_quota import VARIABLE, LogQuota
from ._resumed_states import resume_states
from .artifacts import RunArtifacts, describe_artifacts, find_wrong_limit, read_limit, restore_artifacts
from .notices import Notice, answer_again, notice_of
from .rerun import plan_nested_rerun
from .run_context import Deadlines, OnChange, OnNews, ParallelSlots, PersonWait, RunContext, SharedParts
from .run_news import RunNews, RunWork
from .scheduler import RunLimits, Scheduler
from .state import (
    CANCEL,
    StepState,
    TemplateScope,
    describe_steps,
    find_rerun_command,
    judge_run,
    park_outcome,
    read_record,
    record_workflow,
    redaction_for,
    restore_secrets,
)
from .step_attempt import record_skipped_span, trace_steps
from .step_executor import StepExecutor
from .step_log import OnStepOutput, RunLogs
from .step_renderer import StepFailed, StepRenderer

# How long a record waits for a store that others keep busy: until the run's work has to end, and without a deadline so
# long. A process that was stopped inside a transaction exhausts this.
PATIENCE_MS = 600_000
# The same if steps are to be stopped, or the time is over; and at the end of the run, for the last records.
HURRIED_WAIT_MS = 500
CLOCK_SLACK_MS = 100  # a clock that is slewed differs by less
LAST_WAIT_MS = 5_000


@value
class RunRequest:
    workflow: WorkflowFile
    file: str
    folder: Path
    run_id: str = field(default_factory=lambda: os.urandom(8).hex())
    inputs: Mapping[str, Any] = field(default_factory=dict)
    timeout_ms: int | None = None
    """The caller's own limit. The shorter of it and the file's holds."""
    recorded: Mapping[str, StepState] = field(default_factory=dict)
    """Steps that do not begin anew: those that are left out, and those that are kept from an earlier run."""
    rerun: Mapping[str, Any] | None = None  # the run that this one continues (`of`), and what it keeps of it

    @property
    def name(self) -> str:
        return self.workflow.name or Path(self.file).stem

    @property
    def limit_ms(self) -> int:
        return run_timeout_ms(self.workflow, self.timeout_ms) or 0


@value
class RunCaller:
    stop: asyncio.Future[str] | None = None  # stops the run once it holds the name of a signal
    on_change: OnChange | None = None
    on_news: OnNews | None = None
    environment: Mapping[str, str] = os.environ
    aside: Aside = contextlib.nullcontext
    """Entered while a question is shown at the terminal, so that a live view stops drawing."""
    budget_ms: int | None = None  # how long the caller waits once only people can continue the run
    outer: RunContext | None = None
    cleans_up: bool = True  # whether clean-up steps can run in a run that is stopped at once
    on_output: OnStepOutput | None = None
    on_end: Callable[[Envelope], None] | None = None
    """Called once the store has the end of the run, or that it is parked, before the messages are sent."""


DEFAULT_CALLER = RunCaller()


async def start(request: RunRequest, store: Store, caller: RunCaller = DEFAULT_CALLER) -> Envelope:
    call = _admit(request, request.limit_ms)
    inputs = check_inputs(request.workflow, request.inputs)
    _refuse_unset(request.workflow, caller.environment, request.recorded)
    has_group = request.workflow.concurrency is not None
    if has_group and await asyncio.to_thread(store.runs.get, request.run_id) is not None:
        raise run_exists(request.run_id)  # before it waits for its group
    last_ms = finally_reserve(request.workflow, call.bound.limit_ms).ms
    kept_ms = kept_for_clean_up_ms(request.workflow, max(0, call.bound.limit_ms - last_ms)) + last_ms
    group = await enter_group(request.workflow, inputs, _group_request(request.run_id, call, store, caller, kept_ms))
    if group.stopped_by is not None:
        return answer(call, group.outcome)
    # Counted from the start of the call's clock, so that both deadlines are the same.
    began_at = WallTime.of_ns(wall_ns() - (monotonic_ns() - call.started_ns))
    new = StoredRun(
        request.run_id,
        request.name,
        request.file,
        record_workflow(request.workflow, caller.environment),
        inputs,
        call.trace_id,
        this_process(),
        began_at,
        None if call.bound.bell is None else began_at + call.bound.limit_ms,
        concurrency=group.record,
        rerun_of=None if request.rerun is None else request.rerun["of"],
        rerun=None if request.rerun is None else dict(request.rerun),
        began_on=f"{this_process().boot_id} {call.started_ns}",
    )
    records = [StepRecord(state.id, state.status.value, state.to_record()) for state in request.recorded.values()]
    try:
        with group.left_on_error():
            await asyncio.to_thread(restore_artifacts, (request.rerun or {}).get("restores", ()))
            await asyncio.to_thread(store.runs.begin, new, records)
    except RunTaken:
        raise run_exists(request.run_id) from None
    request = replace(request, inputs=inputs)
    began = _Beginning(began_at, call.started_ns, concurrency=group.record)
    return await _Run(request, call, store, caller, began, request.recorded).carry_out()


def _group_request(
    run_id: str, call: Call, store: Store, caller: RunCaller, kept_ms: int = 0, *, resumed: bool = False
) -> GroupRequest:
    inside = () if caller.outer is None else caller.outer.runs
    return GroupRequest(run_id, call, store, caller.stop, caller.on_news, inside, cancel, resumed, kept_ms)


def run_exists(run_id: str) -> Failure:
    hint = f"choose another id; if that run has not ended, `shotclock run --resume {run_id}` continues it"
    return Failure("RUN_TAKEN", f"there is a run {run_id!r} already", suggestion=hint)


async def resume(run_id: str, store: Store, caller: RunCaller = DEFAULT_CALLER) -> Envelope:
    """Resume a parked or cut-off run with its old deadline. An ended run returns its old envelope."""
    run = await asyncio.to_thread(_claim, run_id, store)
    if run.envelope is not None:
        return await answer_again(run, read_envelope(run.envelope), store, caller.environment)
    run = await asyncio.to_thread(_follow_clock, run, store)
    workflow, states = await asyncio.to_thread(read_record, run, store)
    workflow = await asyncio.to_thread(restore_secrets, run, workflow)
    _refuse_unset(workflow, caller.environment, states)
    request = RunRequest(workflow, run.file, Path(run.file).parent, run.id, run.inputs, rerun=run.rerun)
    left_ms = 0 if run.deadline_at is None else max(1, run.deadline_at - wall_time())
    call = _admit(request, left_ms, TraceContext(run.trace_id))
    group = await enter_group(workflow, run.inputs, _group_request(run.id, call, store, caller, resumed=True))
    if group.stopped_by is not None:
        return answer(call, group.outcome)
    if group.record is not None and (waited_ms := group.record["waited_ms"]):
        waited_ms += (run.concurrency or {}).get("waited_ms", 0)
        concurrency = {**group.record, "waited_ms": waited_ms}
        with group.left_on_error():
            await asyncio.to_thread(store.runs.record_group, run.id, concurrency)
        run = replace(run, concurrency=concurrency)
    recorded = await asyncio.to_thread(resume_states, workflow, states, store, run)
    return await _Run(request, call, store, caller, _Beginning.of(run), recorded).carry_out()


async def run_nested(outer: RunContext, inner: NestedRun) -> Envelope:
    """Run a file as a run inside another, or resume the one that a dead process left.

    Its name is PARENT.STEP, with a number if a step begins several: the number of the item, and for later attempts a
    number behind those of all items. A resumed run so finds the run of each item again.
    """
    workflow = await asyncio.to_thread(inner_workflow, inner.file, outer.files, unattended=not os.isatty(0))
    while True:
        run_id, name = name_nested_run(inner, outer)
        request = RunRequest(workflow, identity(inner.file), inner.file.absolute().parent, run_id, inner.inputs)
        found = await asyncio.to_thread(outer.shared.store.runs.get, run_id)
        caller = RunCaller(
            inner.stop,
            _rename_changes(outer.on_change, name),
            _rename_news(outer.on_news, name),
            {**outer.environment, **inner.env},
            outer=outer,
            on_output=_rename_output(None if outer.logs is None else outer.logs.on_output, name),
        )
        try:
            if found is None:
                if outer.rerun is not None:
                    request = await asyncio.to_thread(_continue_nested, request, inner.step_id, outer)
                return await start(request, outer.shared.store, caller)
            if found.ended_at is None and found.file == request.file and not is_alive(found.holder):
                return await resume(run_id, outer.shared.store, caller)
        except Failure as failure:
            if failure.code != "RUN_TAKEN":  # another process was faster; the next number is free
                raise


def _continue_nested(request: RunRequest, step_id: str, outer: RunContext) -> RunRequest:
    """Return the request of a nested run that keeps what had succeeded in the same run inside the earlier one."""
    inputs = check_inputs(request.workflow, request.inputs)
    rerun = plan_nested_rerun(outer.shared.store, outer.rerun or {}, step_id, request.file, request.workflow, inputs)
    return request if rerun is None else replace(request, recorded=rerun.recorded, rerun=rerun.shown)


def name_nested_run(inner: NestedRun, outer: RunContext) -> tuple[str, str]:
    """Return the id of the next run of a step, and its name inside the outer run."""
    begun, (index, count) = outer.nested_runs, inner.item
    before = begun.get((inner.step_id, index), 0)
    begun[inner.step_id, index] = before + 1
    number = before * count + index + 1
    name = inner.step_id + (f".{number}" if number > 1 else "")
    if number > 1 and name in outer.workflow.steps:  # which names its own run so
        return name_nested_run(inner, outer)
    return f"{outer.run_id}.{name}", name


def _rename_changes(on_change: OnChange | None, name: str) -> OnChange | None:
    """Return a listener that puts the name of a nested run before the names of its steps."""
    return on_change and (lambda state: on_change(replace(state, id=f"{name}.{state.id}")))


def _rename_news(on_news: OnNews | None, name: str) -> OnNews | None:
    return on_news and (lambda step, news: on_news(f"{name}.{step}" if step else name, news))


def _rename_output(on_output: OnStepOutput | None, name: str) -> OnStepOutput | None:
    return on_output and (lambda step, number, records: on_output(f"{name}.{step}", number, records))


def _claim(run_id: str, store: Store) -> StoredRun:
    try:
        run = store.runs.take_up(run_id, this_process(), is_alive)
    except RunTaken as taken:
        raise Failure("RUN_TAKEN", f"run {run_id!r} is under way in process {taken.run.holder.pid}") from None
    if run is None:
        raise Failure("RUN_NOT_FOUND", f"there is no run {run_id!r}")
    return run


def _follow_clock(run: StoredRun, store: Store) -> StoredRun:
    """Return a run whose times were moved if the wall clock was set back, so that it has not more time than it had."""
    boot, _, began_ns = run.began_on.rpartition(" ")
    if boot == this_process().boot_id:
        used_ms = (monotonic_ns() - int(began_ns)) // NS_PER_MS
    else:
        used_ms = store.runs.last_seen_at(run.id).since_ms(run.created_at)
    by_ms = used_ms - (wall_time() - run.created_at)
    if by_ms < CLOCK_SLACK_MS:
        return run
    store.runs.set_back(run.id, by_ms)
    deadline_at = None if run.deadline_at is None else run.deadline_at - by_ms
    return replace(run, created_at=run.created_at - by_ms, deadline_at=deadline_at)


def read_envelope(written: Mapping[str, Any]) -> Envelope:
    return Envelope(written["data"], written["error"], list(written["warnings"]), written["meta"])


@value
class _Beginning:
    at: WallTime
    at_ns: int
    budget_ms: int | None = None
    concurrency: JsonObject | None = None

    @classmethod
    def of(cls, run: StoredRun) -> _Beginning:
        budget_ms = None if run.deadline_at is None else run.deadline_at.since_ms(run.created_at)
        at_ns = monotonic_ns() - wall_time().since_ms(run.created_at) * NS_PER_MS
        return cls(run.created_at, at_ns, budget_ms, run.concurrency)


def _refuse_unset(
    workflow: WorkflowFile, environment: Mapping[str, str], states: Mapping[str, StepState] = MappingProxyType({})
) -> None:
    """Refuse a run that needs a variable that is not set. Steps that have ended or are left out need none."""
    over = {("steps", name) for name, state in states.items() if state.is_settled}
    errors = [
        {"field": ".".join(path), "message": message}
        for find in (find_unset_variables, find_wrong_limit)
        for path, message in find(workflow, environment)
        if path[:2] not in over
    ]
    if errors:
        message = "; ".join(dict.fromkeys(error["message"] for error in errors))
        raise Failure("ARG_ERROR", message, context={"errors": errors})


def _log_limit(environment: Mapping[str, str]) -> int:
    """Return the most bytes of logs. `shotclock prune` reports a variable that is wrong."""
    try:
        return read_retention(environment).run_logs_bytes
    except Failure:
        return Retention().run_logs_bytes


def _admit(request: RunRequest, timeout_ms: int, trace: TraceContext | None = None) -> Call:
    """Begin the call of a run, inside its step or the time of the environment."""
    scope = current_scope.get()
    step: Call | None = None if scope is None else scope.call
    if step is not None:  # the owner of the limit, so that the error of a stopped run names the right one
        parent, owner = step.bound.bell, step.bound.owner
    elif scope is not None:
        parent, owner = scope.deadline, scope.name
    else:
        parent, owner = inherited_deadline(os.environ, monotonic_ns()).deadline, "caller"
    call = admit(
        f"run {request.name}",
        Clocks(timeout_ms=timeout_ms),
        parent=parent,
        parent_owner=owner,
        caller=trace or (inherited_trace() if scope is None else scope.span.trace),
    )
    call.inside_of = step
    return call


@entity
class _Run:
    request: RunRequest
    call: Call
    store: Store
    caller: RunCaller
    began: _Beginning
    recorded: Mapping[str, StepState]
    kept_ms: int = 0
    _logs: RunLogs | None = None
    _over_ns: int = 0  # when only the last records were left to write

    async def carry_out(self) -> Envelope:
        # Every step is our child and could read our environment in /proc.
        kernel.hide_variables(looks_secret)
        token = current_scope.set(Scope(self.call.bound.bell, -1, self.call.name, self.call, call=self.call))
        outputs: JsonObject = {}
        ended_by: str | Exception | None
        try:
            async with self._open_context() as context:
                steps = StepExecutor(context, lambda inner: run_nested(context, inner))
                scheduler = self._make_scheduler(context, steps)
                await steps.warm_observers()
                try:
                    ended_by = await self._wait_for_steps(scheduler, context)
                    if ended_by is None and not scheduler.is_parked:
                        scope = scheduler.scope_for_templates()
                        outputs, notes = await render_outputs(context, steps.renderer, context.workflow.outputs, scope)
                        scheduler.notes += notes
                except Exception as error:  # the store failed, or a bug
                    ended_by = error
                if not scheduler.is_parked and (self.recorded or context.shared.person_wait.has_asked):
                    await asyncio.to_thread(
                        _end_proposals, self.store, context.run_id, context.shared.person_wait.unheard
                    )
        finally:
            current_scope.reset(token)
        if scheduler.is_parked:
            return await self._park(scheduler, context)
        return await self._end(scheduler, context, outputs, ended_by)

    @contextlib.asynccontextmanager
    async def _open_context(self) -> AsyncIterator[RunContext]:
        """Open the shared objects of the steps; a nested run uses those of the outer run."""
        request, outer, environment = self.request, self.caller.outer, dict(self.caller.environment)
        async with contextlib.AsyncExitStack() as stack:
            if outer is None:
                inbox = OpenedInbox(self.store)
                rules = CallRules(observers={ObserverKind.PERSON: partial(ask_person, inbox)})
                runtime = await stack.enter_async_context(Runtime(program=Program(), workers=1, rules=rules))
                runtime.open_channel(self.store.home)
                stack.push_async_callback(inbox.close)
                providers = Providers(RunServices(inbox, self.caller.aside, environment))
                stack.push_async_callback(providers.close)
                shared = SharedParts(self.store, runtime, providers, inbox, PersonWait(self.caller.budget_ms))
            else:
                shared = outer.shared
            limit_ms = self.began.budget_ms or self.call.bound.limit_ms
            last = finally_reserve(request.workflow, limit_ms)
            clean_up_ms = kept_for_clean_up_ms(request.workflow, max(0, limit_ms - last.ms))
            self.kept_ms = clean_up_ms + last.ms
            redaction = redaction_for(request.workflow, environment)
            quota = LogQuota(_log_limit(environment)) if outer is None or outer.logs is None else outer.logs.quota
            self._logs = RunLogs(self.store.home, request.run_id, redaction, self.caller.on_output, quota)
            yield RunContext(
                run_id=request.run_id,
                workflow=request.workflow,
                folder=request.folder,
                files=(*(() if outer is None else outer.files), identity(request.file)),
                runs=(*(() if outer is None else outer.runs), request.run_id),
                began_at=self.began.at,
                shared=shared,
                slots=ParallelSlots(request.workflow.max_parallelism, None if outer is None else outer.slots),
                deadlines=Deadlines(self.call.bound.bell, clean_up_ms, clean_up_steps(request.workflow), last),
                environment=environment,
                base_env={name: value for name, value in environment.items() if not looks_secret(name)},
                redaction=redaction,
                call=self.call,
                get_fired=self._get_fired,
                on_change=self.caller.on_change,
                on_news=self.caller.on_news,
                logs=self._logs,
                artifacts=RunArtifacts(self.store.home, request.run_id, read_limit(environment), self.recorded),
                record_item=self._record_item,
                rerun=request.rerun,
            )

    async def _record_item(self, step_id: str, number: int, record: JsonObject) -> None:
        write = partial(self.store.runs.record_item, self.request.run_id, step_id, number, record)
        await _write(write, lambda waited_ms: _is_over(waited_ms, self.call.bound.bell, 0))

    def _make_scheduler(self, context: RunContext, steps: StepExecutor) -> Scheduler:
        run_id, run = context.run_id, {"id": context.run_id, "name": self.request.name}

        def is_over(waited_ms: int) -> bool:
            if scheduler.is_over:
                return self._is_over(scheduler)
            return _is_over(waited_ms, context.deadlines.before_next, HURRIED_WAIT_MS, scheduler.is_hurried)

        async def record(states: Iterable[StepState]) -> None:
            records = [StepRecord(state.id, state.status.value, state.to_record_so_far()) for state in states]
            await _write(partial(self.store.runs.record, run_id, records, wall_time()), is_over)

        scheduler = Scheduler(
            context.workflow,
            execute=trace_steps(steps.execute, context.deadlines.of),
            record=record,
            scope={"inputs": dict(self.request.inputs), "env": context.base_env, "run": run},
            on_change=context.on_change,
            on_skip=record_skipped_span,
            recorded=self.recorded,
            limits=RunLimits(context.slots, context.deadlines, self.began.at_ns),
        )
        return scheduler

    async def _wait_for_steps(self, scheduler: Scheduler, context: RunContext) -> str | None:
        """Return the name of the signal that ended the run early."""
        person_wait, stop = context.shared.person_wait, self.caller.stop
        is_stopped_before = stop is not None and stop.done()
        if person_wait.parked.done():  # while this nested run was prepared
            scheduler.park()
        elif is_stopped_before:
            scheduler.stop()
            scheduler.stop_at_once(clean_up=self.caller.cleans_up)
        person_wait.schedulers.append(scheduler)
        working = asyncio.ensure_future(scheduler.run())
        self.call.work = RunWork(scheduler, context.deadlines, self.call)
        control_of(self.call).on_change = RunNews(context, scheduler, self.began.at, self.began.at_ns).handle
        live_calls.enter(self.call)
        running_runs[self.request.run_id] = self.call
        cancelled: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        run_cancels[self.request.run_id] = partial(_cancel_running, cancelled, scheduler)
        if self.call.winding_down is not None:
            self.call.work.wind_down(self.call.winding_down.until_ns)
        try:
            waits: list[asyncio.Future[Any]] = [working, cancelled]
            waits += [] if stop is None else [stop]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # bounded by the timeouts of the steps
            if working.done():
                working.result()
                if not is_stopped_before:
                    return None
        finally:
            live_calls.leave(self.call)
            running_runs.pop(self.request.run_id, None)
            run_cancels.pop(self.request.run_id, None)
            if not working.done():
                scheduler.stop()
                with contextlib.suppress(asyncio.CancelledError):
                    await working
            person_wait.schedulers.remove(scheduler)
        if scheduler.is_parked:
            return None
        return next((each.result() for each in (stop, cancelled) if each is not None and each.done()), None)

    async def _park(self, scheduler: Scheduler, context: RunContext) -> Envelope:
        run_id, states, person_wait = self.request.run_id, scheduler.states, context.shared.person_wait
        proposals = [
            dict(each.shown) if isinstance(each, ForeignProposal) else each.as_result()
            for each in person_wait.parked_on.values()
        ]
        waiting = context.redaction.value(proposals)
        bell, now = self.call.bound.bell, wall_time()
        until = None if bell is None else now + bell.remaining_ms(monotonic_ns())
        outcome = park_outcome(run_id, self.request.name, states, waiting, person_wait.budget_ms or 0, until=until)
        envelope = answer(self.call, outcome)
        try:
            await asyncio.to_thread(self.store.runs.park, run_id, this_process(), wall_time())
        except Failure as failure:
            envelope.warnings.append(warning("NOT_WRITTEN_DOWN", f"that the run is parked: {failure}"))
        else:
            if self.caller.on_end is not None:
                self.caller.on_end(envelope)
        if (notice := self._make_notice(envelope)) is not None:
            envelope.warnings += await notice.send()
        return envelope

    async def _end(
        self, scheduler: Scheduler, context: RunContext, outputs: JsonObject, ended_by: str | Exception | None
    ) -> Envelope:
        run_id, runs, states = self.request.run_id, self.store.runs, scheduler.states
        data = describe_steps(run_id, self.request.name, states)
        if self.request.rerun is not None:
            data |= {"rerun_of": self.request.rerun["of"], "rerun": dict(self.request.rerun)}
        if outputs:
            data["outputs"] = outputs
        if self.began.concurrency is not None:
            data["concurrency"] = self.began.concurrency
        kept = (state.artifacts for state in states.values())
        if (artifacts := describe_artifacts(self.store.home, run_id, kept)) is not None:
            data["artifacts"] = artifacts
        is_out_of_time = context.deadlines.have_fired
        outcome = judge_run(self.call, states, data, ended_by, self._get_fired(), is_out_of_time=is_out_of_time)
        outcome.warnings = tuple(context.redaction.value(note) for note in scheduler.notes)
        if self._logs is not None and self._logs.lost:
            lost = warning("NOT_WRITTEN_DOWN", f"part of the output in the log of the run: {self._logs.lost}")
            outcome.warnings += (lost,)
        if self._logs is not None and self.caller.outer is None:
            await self._logs.quota.settle()
        if self._logs is not None and self.caller.outer is None and (deleted := self._logs.quota.deleted):
            lost = warning("NOT_WRITTEN_DOWN", f"the logs of the oldest {deleted} attempts: {VARIABLE} was reached")
            outcome.warnings += (lost,)
        ends = ((state.status, state.reason) for state in states.values())
        command = "" if outcome.problem is None or self.caller.outer is not None else find_rerun_command(run_id, ends)
        if isinstance(ended_by, StoreError) and isinstance(outcome.problem, Problem):
            message = f"the run was stopped, because its steps could not be recorded: {ended_by}"
            hint = (
                f"once the store can be written to, `{command or f'shotclock run --resume {run_id}'}` continues the run"
            )
            outcome.problem = replace(outcome.problem, message=message, suggestion=hint)
        envelope = answer(self.call, outcome)
        notice = self._make_notice(envelope)
        if command and isinstance(envelope.data, dict):
            envelope.data["rerun_command"] = command

        async def write_end(shown: dict[str, object]) -> None:
            end = partial(runs.end, run_id, shown, wall_time(), owes_notice=notice is not None)
            await _write_patiently(end, lambda waited_ms: self._is_over(scheduler))

        try:
            try:
                await write_end(envelope.to_dict())
            except ValueError as error:  # together the outputs are too long for one value
                envelope.warnings.append(warning("NOT_WRITTEN_DOWN", f"the outputs in the end of the run: {error}"))
                await write_end(_without_outputs(envelope))
        except Failure as failure:
            if isinstance(ended_by, StoreError) and envelope.error is not None:
                hint = f"once the store can be written to, `shotclock run --resume {run_id}` continues or ends the run"
                envelope.error["suggestion"] = hint
            envelope.warnings.append(warning("NOT_WRITTEN_DOWN", f"the end of the run: {failure}"))
            if command and isinstance(envelope.data, dict):
                del envelope.data["rerun_command"]  # for the store the run has not ended
            if notice is not None:
                message = f"not sent, because the end is not in the store; `shotclock run --resume {run_id}` sends it"
                envelope.warnings.append(warning("NOT_NOTIFIED", message))
            return envelope
        if self.caller.on_end is not None:
            self.caller.on_end(envelope)
        if self.caller.outer is None:
            await asyncio.to_thread(prune_in_passing, self.store, os.environ, wall_time(), is_alive)
        if notice is not None:
            envelope.warnings += await notice.send_end(self.store)
        return envelope

    def _is_over(self, scheduler: Scheduler) -> bool:
        """Return whether the last records, which are all that is left to do, have waited long enough."""
        self._over_ns = self._over_ns or monotonic_ns()
        waited_ms = (monotonic_ns() - self._over_ns) // NS_PER_MS
        return _is_over(waited_ms, self.call.bound.bell, LAST_WAIT_MS, scheduler.is_hurried)

    def _make_notice(self, envelope: Envelope) -> Notice | None:
        """Return the message about the run, if anybody wants it. A nested run sends none: the outer one does."""
        request, environment = self.request, self.caller.environment
        if self.caller.outer is not None:
            return None
        lasted_ms = (monotonic_ns() - self.began.at_ns) // NS_PER_MS  # since it began, in all its processes
        return notice_of(request.run_id, request.name, request.file, request.workflow, envelope, environment, lasted_ms)

    def _get_fired(self) -> Fired:
        """Return the limit that stopped the run, as it was set, not less a parent's reserve."""
        call, began = self.call, self.began
        if began.budget_ms is not None:
            elapsed_ms = (monotonic_ns() - began.at_ns) // NS_PER_MS
            return Fired(ClockKind.TIMEOUT, call.name, began.budget_ms, elapsed_ms, call.bound.source, self.kept_ms)
        fired = call.fired(ClockKind.TIMEOUT, monotonic_ns() - call.started_ns)
        fired = replace(fired, kept_ms=self.kept_ms)
        source = fired.source
        if source is None or source is call.bound.bell:
            return fired
        step = call.inside_of
        is_own_of_step = step is not None and source is step.bound.bell is step.bound.source
        set_ms = step.bound.limit_ms if step is not None and is_own_of_step else source.remaining_ms(call.started_ns)
        return replace(fired, limit_ms=set_ms)


def _cancel_running(cancelled: asyncio.Future[str], scheduler: Scheduler, reason: str) -> None:
    if not cancelled.done():
        scheduler.notes.append(warning("RUN_REPLACED", f"cancelled: {reason}"))
        cancelled.set_result(CANCEL)


async def _write(write: Callable[..., object], is_over: Callable[[int], bool]) -> None:
    """Write here, in a tenth of a millisecond, or in a thread, which takes twice that, if the store is busy."""
    try:
        write(wait_ms=0)
    except StoreBusy:
        await _write_patiently(write, is_over)


async def _write_patiently(write: Callable[..., object], is_over: Callable[[int], bool]) -> None:
    """Write in a thread once the store is free. A cancellation ends the wait.

    `is_over` gets the milliseconds that it has waited, and returns whether StoreBusy is raised.
    """
    began_ns = monotonic_ns()
    while True:
        try:
            await run_in_thread(partial(write, wait_ms=ATTEMPT_MS))
            return
        except StoreBusy:
            if is_over((monotonic_ns() - began_ns) // NS_PER_MS):
                raise


def _is_over(waited_ms: int, by: Deadline | None, least_ms: int, is_hurried: bool = False) -> bool:
    """Return whether a write that has waited so long is given up."""
    if waited_ms < least_ms or is_hurried:
        return waited_ms >= least_ms
    return waited_ms >= PATIENCE_MS if by is None else by.has_passed(monotonic_ns())


def _without_outputs(envelope: Envelope) -> dict[str, object]:
    data: Any = envelope.data
    kept = {
        name: {key: value for key, value in step.items() if key != "output"} for name, step in data["steps"].items()
    }
    return {**envelope.to_dict(), "data": {**data, "steps": kept, "outputs": {}}}


class OpenedInbox:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._inbox: Inbox | None = None

    def __call__(self) -> Inbox:
        if self._inbox is None:
            self._inbox = Inbox(self._store)
        return self._inbox

    async def close(self) -> None:
        if self._inbox is not None:
            await self._inbox.close()


def _end_proposals(store: Store, run_id: str, unheard: Collection[str] = ()) -> None:
    with contextlib.suppress(Failure):  # the store cannot be used: they expire with the time of the run
        store.proposals.end_run(Principal.local().name, run_id, wall_time(), unheard)


async def cancel(run_id: str, store: Store, *, refusal: str | None = None) -> Envelope:
    """End a run that no process has, and its nested runs, and return its envelope.

    Its questions are withdrawn and the clean-up of its begun steps runs, unless `refusal` is why it cannot. Raise
    Failure if the run does not exist, or a process has it (RUN_TAKEN).
    """
    run = await asyncio.to_thread(_claim, run_id, store)
    if run.envelope is not None:
        return read_envelope(run.envelope)
    run = await asyncio.to_thread(_follow_clock, run, store)
    workflow, states = await asyncio.to_thread(read_record, run, store)
    for step_id, step in workflow.steps.items():
        if step_id in workflow.finally_ and refusal is None:
            continue  # it continues below, and so do the runs inside it
        why = refusal or (f"it needs the variables of step {step_id} around it" if step.env else None)
        for name in _names_inside(workflow, step_id, states.get(step_id)):
            for inner in await asyncio.to_thread(store.runs.list_inside, run_id, name):
                await cancel(inner, store, refusal=why)
    try:
        workflow = await asyncio.to_thread(restore_secrets, run, workflow)
        _refuse_unset(workflow, os.environ, states)
    except Failure as failure:
        refusal = refusal or str(failure)
    recorded = await asyncio.to_thread(resume_states, workflow, states, store, run)
    await asyncio.to_thread(_end_proposals, store, run_id)
    request = RunRequest(workflow, run.file, Path(run.file).parent, run.id, run.inputs, rerun=run.rerun)
    # The run's own time may be over; clean-up has its own limit.
    call = _admit(request, 0, TraceContext(run.trace_id))
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop.set_result(CANCEL)
    cut_off = (name for name, state in recorded.items() if state.has_begun or state.is_newly_interrupted)
    ended = {name for name, state in recorded.items() if state.status.is_final}
    last = [name for name in workflow.finally_ if name not in on_demand(workflow)]
    missing = [name for name in (*_clean_up_of(workflow, cut_off), *last) if name not in ended]
    if missing and refusal is not None:
        call.warnings += (warning("CLEAN_UP_MISSING", f"{', '.join(missing)} did not run: {refusal}", steps=missing),)
    caller = RunCaller(stop, cleans_up=refusal is None)
    return await _Run(request, call, store, caller, _Beginning.of(run), recorded).carry_out()


def _names_inside(workflow: WorkflowFile, step_id: str, state: StepState | None) -> list[str]:
    """Return the names of the runs inside a step: its own, or those of the tools that its agent may have called."""
    step = workflow.steps[step_id]
    if step.type != "ai":
        return [step_id] if step.type == "workflow" else []
    tools = [f"{step_id}.{name}" for name, tool in workflow.tools.items() if tool.workflow is not None]
    attempts = most_attempts(workflow, step) + (0 if state is None else state.attempts_cut_off)
    return tools + [f"{tool}.try{number}" for tool in tools for number in range(2, attempts + 1)]


def _clean_up_of(workflow: WorkflowFile, names: Iterable[str]) -> list[str]:
    reactions = (failure_reaction(workflow, name) for name in names)
    return list(dict.fromkeys(name for reaction in reactions if reaction is not None for name in reaction.run))


async def render_outputs(
    context: RunContext, renderer: StepRenderer, templates: Mapping[str, str], scope: TemplateScope
) -> tuple[JsonObject, list[Warning_]]:
    """Return the outputs of a run; None, with a warning, for one that cannot be rendered."""
    outputs: JsonObject = {}
    notes: list[Warning_] = []
    for name, template in templates.items():
        try:
            outputs[name] = await renderer.render_output(template, scope)
        except StepFailed as failed:
            outputs[name] = None
            context.deadlines.record_fired(failed.fired)
            notes.append(warning("OUTPUT_MISSING", f"output {name}: {failed}"))
    return outputs, notes
