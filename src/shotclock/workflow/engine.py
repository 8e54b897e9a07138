"""Runs of workflows: start one, go on with one, cancel one; each answers with one envelope.

Every step is recorded, so a run whose process died goes on where it was cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.clocks import NS_PER_MS, ClockKind, Clocks, Fired, WallTime
from ..core.envelope import Envelope, Problem, stop_problem, warning
from ..core.errors import Ending, Failure
from ..core.proposal import Proposal, result_of
from ..core.redaction import looks_secret
from ..core.trace import TraceContext
from ..core.value_types import entity, field, replace, value
from ..inbox.access import Principal
from ..inbox.inbox import Inbox
from ..inbox.overtime_question import ask_person
from ..process import kernel
from ..process.clock import monotonic_ns, wall_ns, wall_time
from ..process.context import Scope, current_scope
from ..process.kernel import is_alive, this_process
from ..providers.provider import STEP_TYPES, Aside, ForeignProposal, Providers, RunServices, StepPart
from ..providers.workflow import NestedRun
from ..runtime.call import (
    Call,
    Outcome,
    WindDown,
    Work,
    admit,
    answer,
    inherited_deadline,
    inherited_trace,
)
from ..runtime.control import calls_inside, control_of, enter, leave
from ..runtime.control_channel import runs as running_runs
from ..runtime.outcomes import outcome_of_error
from ..runtime.preloaded_zygote import Program
from ..runtime.runtime import Runtime
from ..store.home import StoreBusy
from ..store.retention import prune_by_the_way
from ..store.runs import NewRun, Run, RunTaken, StepRecord
from ..store.store import Store
from .lint import identity, inner_workflow
from .plan import clean_up_steps, is_per_item, kept_for_clean_up_ms, may_run_again, run_timeout_ms
from .scheduler import (
    Deadlines,
    OnChange,
    OnNews,
    ParallelSlots,
    PersonWait,
    RunContext,
    RunLimits,
    Scheduler,
    StepListener,
)
from .schema import WorkflowFile, check_inputs, find_unset_variables
from .state import (
    Status,
    StepState,
    describe_steps,
    effects_of,
    explain_limit,
    judge_steps,
    park_outcome,
    read_record,
    record_workflow,
    redaction_for,
    restore_secrets,
    survivors_of,
)
from .step_executor import StepExecutor, record_skipped_span, trace_steps
from .step_renderer import StepFailed, StepRenderer

if TYPE_CHECKING:
    from ..core.overtime import OvertimeRequest

# Between two tries to write down what was decided about a run while others keep the store busy.
BUSY_PAUSE_S = 0.05


@value
class RunRequest:
    """A workflow to be run, with its inputs."""

    workflow: WorkflowFile
    file: str
    folder: Path
    run_id: str = field(default_factory=lambda: os.urandom(8).hex())
    inputs: Mapping[str, Any] = field(default_factory=dict)
    timeout_ms: int | None = None
    """The caller's own limit, where it is shorter than the file's."""

    @property
    def name(self) -> str:
        return self.workflow.name or Path(self.file).stem


@value
class RunCaller:
    """What the caller of a run decides about it."""

    stop: asyncio.Future[str] | None = None
    """Stops the run once it holds the name of a signal."""
    on_change: OnChange | None = None
    on_news: OnNews | None = None
    environment: Mapping[str, str] | None = None
    """The variables of the run; None is for those of this process."""
    aside: Aside = contextlib.nullcontext
    """Entered while a person is asked something at the terminal, for whoever draws on it."""
    budget_ms: int | None = None
    """How long the caller waits once all that is left to do needs a person; None is for as long as it takes."""
    outer: RunContext | None = None
    """The run that this one is a step of."""
    cleans_up: bool = True
    """Whether what its steps declare as clean-up can be run, where it is stopped at once."""

    @property
    def variables(self) -> Mapping[str, str]:
        return os.environ if self.environment is None else self.environment


DEFAULT_CALLER = RunCaller()


async def start(request: RunRequest, store: Store, caller: RunCaller = DEFAULT_CALLER) -> Envelope:
    """Run a workflow and return its one envelope. Raises Failure if it cannot be begun."""
    limits = [limit for limit in (run_timeout_ms(request.workflow), request.timeout_ms) if limit]
    call = _admit(request, min(limits) if limits else 0)
    inputs = check_inputs(request.workflow, request.inputs)
    _refuse_unset(request.workflow, caller.variables)
    # In the store its time is counted from where its clock was started, so that it has there what it has here.
    began_at = WallTime.of_ns(wall_ns() - (monotonic_ns() - call.started_ns))
    new = NewRun(
        request.run_id,
        request.name,
        request.file,
        record_workflow(request.workflow, caller.variables),
        inputs,
        call.trace_id,
        None if call.bound.bell is None else began_at + call.bound.limit_ms,
    )
    try:
        await asyncio.to_thread(store.runs.begin, new, this_process(), began_at)
    except RunTaken:
        raise Failure("RUN_TAKEN", f"there is a run {request.run_id!r} already; --resume continues it") from None
    return await _Run(request, inputs, call, store, caller, _Beginning(began_at, call.started_ns), {}).carry_out()


async def resume(run_id: str, store: Store, caller: RunCaller = DEFAULT_CALLER) -> Envelope:
    """Go on with a run that is parked or whose process died, with the deadline it had, and return its envelope. One
    that has ended answers as it did. Raises Failure if there is no such run, or it cannot go on."""
    run = await asyncio.to_thread(_take_up, run_id, store)
    if run.envelope is not None:
        return _recorded_answer(run)
    workflow, states = await asyncio.to_thread(read_record, run, store)
    workflow = await asyncio.to_thread(restore_secrets, run, workflow)
    _refuse_unset(workflow, caller.variables)
    request = RunRequest(workflow, run.file, Path(run.file).parent, run.id, run.inputs)
    left_ms = 0 if run.deadline_at is None else max(1, run.deadline_at - wall_time())
    call = _admit(request, left_ms, TraceContext(run.trace_id))
    known = await asyncio.to_thread(lambda: _find_known_states(workflow, states, store, run))
    return await _Run(request, run.inputs, call, store, caller, _Beginning.of(run), known).carry_out()


async def run_nested(outer: RunContext, inner: NestedRun) -> Envelope:
    """Run a file as a run of its own inside another, or take up one that a process which died has left behind. Raises
    Failure if the file cannot be run.

    It is called PARENT.STEP, with a number where a step begins more than one: that of its item, and behind those of all
    items where it is begun again. By the item, so that a run that goes on finds each one's own.
    """
    unattended = not os.isatty(0)
    workflow = await asyncio.to_thread(inner_workflow, inner.file, outer.files, unattended=unattended)
    while True:
        run_id, name = name_nested_run(inner, outer.run_id, outer.nested_runs)
        request = RunRequest(workflow, identity(inner.file), inner.file.absolute().parent, run_id, inner.inputs)
        known = await asyncio.to_thread(outer.store.runs.get, run_id)
        environment = {**outer.environment, **inner.env}
        caller = RunCaller(
            inner.stop,
            _rename_changes(outer.on_change, name),
            _rename_news(outer.on_news, name),
            environment,
            outer=outer,
        )
        try:
            if known is None:
                return await start(request, outer.store, caller)
            if known.ended_at is None and known.file == request.file and not is_alive(known.holder):
                return await resume(run_id, outer.store, caller)
        except Failure as failure:
            if failure.code != "RUN_TAKEN":  # somebody was faster; the next number is free
                raise


def name_nested_run(inner: NestedRun, outer_id: str, begun: dict[tuple[str, int], int]) -> tuple[str, str]:
    """Return the id of the next run of a step, and its name inside the outer run. Counts it in `begun`."""
    index, count = inner.item
    before = begun.get((inner.step_id, index), 0)
    begun[inner.step_id, index] = before + 1
    number = before * count + index + 1
    name = inner.step_id + (f".{number}" if number > 1 else "")
    return f"{outer_id}.{name}", name


def _rename_changes(on_change: OnChange | None, name: str) -> OnChange | None:
    """Return what reports the changes of a nested run to the outer run's listener, by names that begin with its own."""
    return on_change and (lambda state: on_change(replace(state, id=f"{name}.{state.id}")))


def _rename_news(on_news: OnNews | None, name: str) -> OnNews | None:
    return on_news and (lambda step, news: on_news(f"{name}.{step}" if step else name, news))


def _take_up(run_id: str, store: Store) -> Run:
    try:
        run = store.runs.take_up(run_id, this_process(), is_alive)
    except RunTaken as taken:
        message = f"run {run_id!r} is under way in process {taken.run.holder.pid}"
        raise Failure("RUN_TAKEN", message) from None
    if run is None:
        raise Failure("RUN_NOT_FOUND", f"there is no run {run_id!r}")
    return run


def _recorded_answer(run: Run) -> Envelope:
    """Return the envelope of a run that has ended, as it was answered then."""
    recorded = run.envelope
    assert recorded is not None
    return Envelope(recorded["data"], recorded["error"], recorded["warnings"], recorded["meta"])


@value
class _Beginning:
    """When a run began, perhaps in another process."""

    at: WallTime
    at_ns: int
    budget_ms: int | None = None
    """How long it had, where this process only goes on with it."""

    @classmethod
    def of(cls, run: Run) -> _Beginning:
        budget_ms = None if run.deadline_at is None else run.deadline_at.since_ms(run.created_at)
        return cls(run.created_at, monotonic_ns() - wall_time().since_ms(run.created_at) * NS_PER_MS, budget_ms)


def _refuse_unset(workflow: WorkflowFile, environment: Mapping[str, str]) -> None:
    """Raise Failure that names every variable which `env` needs and nobody has set."""
    errors = [
        {"field": ".".join(path), "message": message} for path, message in find_unset_variables(workflow, environment)
    ]
    if errors:
        message = "; ".join(dict.fromkeys(error["message"] for error in errors))
        raise Failure("ARG_ERROR", message, context={"errors": errors})


def _find_known_states(
    workflow: WorkflowFile, states: Mapping[str, StepState], store: Store, run: Run
) -> dict[str, StepState]:
    """Return the known state of each step. One that was cut off is run again only where that does no harm."""
    known = {}
    for step_id, state in states.items():
        step, items = workflow.steps[step_id], None
        if is_per_item(workflow, step) and not state.status.is_final:
            items = store.runs.items(run.id, step_id)
        if items is not None and -1 not in items:
            state = _put_off_items(workflow, step, state, items, store, run)
        elif state.status is Status.RUNNING:
            only_waited = not step.for_each and _only_waited(store, run, step, state)
            state = state.after_cut_off(is_harmless=may_run_again(workflow, step), only_waited=only_waited)
        elif state.status is Status.SKIPPED:
            state = state.fresh()
        known[step_id] = state
    return known


def _put_off_items(
    workflow: WorkflowFile, step: StepPart, state: StepState, items: Mapping[int, Any], store: Store, run: Run
) -> StepState:
    """Return a step whose items go on: done ones stay done, and one that was cut off follows the rule for steps."""
    parts = {**dict(enumerate(state.parts)), **items}
    for number, record in items.items():
        item = StepState.from_record(record)
        if item.status is Status.RUNNING:
            only_waited = _only_waited(store, run, step, item)
            item = item.after_cut_off(is_harmless=may_run_again(workflow, step), only_waited=only_waited)
            parts[number] = {**record, **item.to_record()}
    if state.status is Status.RUNNING:
        state = state.put_off()
        state.attempts = sum(part.get("attempts", 0) for part in parts.values())
    state.parts = [parts.get(number, {}) for number in range(max(parts, default=-1) + 1)]
    return state


def _only_waited(store: Store, run: Run, step: StepPart, state: StepState) -> bool:
    """Return whether it is certain that a step waited for its approval, or its command's, and had not begun."""
    asker, key = Principal.local().name, state.key_in(run.id)
    if step.approval and not store.proposals.was_used(asker, key):
        return True
    return STEP_TYPES[step.type].asks_before_start and store.proposals.is_unused(asker, f"{key}.{state.attempts + 1}")


def _admit(request: RunRequest, timeout_ms: int, trace: TraceContext | None = None) -> Call:
    """Begin the call of a run: inside the run that it is a step of, else inside the time of the environment."""
    scope = current_scope.get()
    step: Call | None = None if scope is None else scope.call
    if step is not None:  # named by whose clock it is, so that what it stops says the truth about who stopped it
        parent, owner = step.bound.bell, step.bound.owner
    elif scope is not None:
        parent, owner = scope.deadline, scope.name
    else:
        parent, owner = inherited_deadline(os.environ, monotonic_ns()).deadline, "caller"
    return admit(
        f"run {request.name}",
        Clocks(timeout_ms=timeout_ms),
        parent=parent,
        parent_owner=owner,
        caller=trace or (inherited_trace() if scope is None else scope.span.trace),
        inside_of=step,
    )


@entity
class _Run:
    """One run in this process, from its first step to its envelope."""

    request: RunRequest
    inputs: Mapping[str, Any]
    call: Call
    store: Store
    caller: RunCaller
    began: _Beginning
    known: Mapping[str, StepState]
    """What an earlier process wrote down of its steps."""
    kept_ms: int = 0
    """What its steps leave of its time to clean-up."""

    async def carry_out(self) -> Envelope:
        """Run the steps, and return the envelope of the run once its end, or that it is parked, is written down."""
        # Every step is below us, and could read there what it does not get.
        kernel.hide_variables(looks_secret)
        token = current_scope.set(Scope(self.call.bound.bell, -1, self.call.name, self.call, call=self.call))
        outputs: dict[str, Any] = {}
        ended_by: str | Exception | None
        try:
            async with self._open_context() as context:
                steps = StepExecutor(context, lambda inner: run_nested(context, inner))
                scheduler = self._make_scheduler(context, steps)
                await steps.warm_observers()
                try:
                    ended_by = await self._wait_for_steps(scheduler, context)
                    if ended_by is None and not scheduler.is_parked:
                        outputs = await _render_outputs(context, steps.renderer, scheduler)
                except Exception as error:  # the store could not be used any more, or a bug
                    ended_by = error
                if self.caller.outer is None and not scheduler.is_parked and context.person_wait.unanswered:
                    await _withdraw(context.person_wait.unanswered, context.inbox())
        finally:
            current_scope.reset(token)
        if scheduler.is_parked:
            return await self._park(scheduler, context)
        return await self._end(scheduler, context, outputs, ended_by)

    @contextlib.asynccontextmanager
    async def _open_context(self) -> AsyncIterator[RunContext]:
        """Open what the steps of the run share; a nested run shares the runtime, providers and inbox of the outer."""
        request, outer, everything = self.request, self.caller.outer, dict(self.caller.variables)
        async with contextlib.AsyncExitStack() as stack:
            if outer is None:
                runtime = await stack.enter_async_context(Runtime(program=Program(), workers=1))
                runtime.open_channel(self.store.home)
                inbox: Callable[[], Inbox] = (opened := OpenedInbox(self.store))
                stack.push_async_callback(opened.close)
                runtime.person_observer = partial(ask_person, inbox)
                person_wait = PersonWait(self.caller.budget_ms)
                providers = Providers(RunServices(inbox, self.caller.aside, everything))
                stack.push_async_callback(providers.close)
            else:
                runtime, providers = outer.runtime, outer.providers
                inbox, person_wait = outer.inbox, outer.person_wait
            limit_ms = self.began.budget_ms or self.call.bound.limit_ms
            self.kept_ms = kept_for_clean_up_ms(request.workflow, limit_ms)
            yield RunContext(
                run_id=request.run_id,
                workflow=request.workflow,
                folder=request.folder,
                files=(*(() if outer is None else outer.files), identity(request.file)),
                began_at=self.began.at,
                store=self.store,
                runtime=runtime,
                providers=providers,
                inbox=inbox,
                person_wait=person_wait,
                slots=ParallelSlots(request.workflow.max_parallelism, None if outer is None else outer.slots),
                deadlines=Deadlines(self.call.bound.bell, self.kept_ms, clean_up_steps(request.workflow)),
                environment=everything,
                base_env={name: value for name, value in everything.items() if not looks_secret(name)},
                redaction=redaction_for(request.workflow, everything),
                on_change=self.caller.on_change,
                on_news=self.caller.on_news,
                call=self.call,
                describe_limit=self._describe_fired_clock,
                record_item=self._record_item,
            )

    async def _record_item(self, step_id: str, number: int, record: dict[str, Any]) -> None:
        write = partial(self.store.runs.record_item, self.request.run_id, step_id, number, record)
        try:
            write(may_wait=False)  # as for steps
        except StoreBusy:
            await asyncio.to_thread(write)

    def _make_scheduler(self, context: RunContext, steps: StepExecutor) -> Scheduler:
        run_id, run = context.run_id, {"id": context.run_id, "name": self.request.name}

        async def record(states: Iterable[StepState]) -> None:
            records = [StepRecord(state.id, state.status.value, state.to_record()) for state in states]
            try:
                # A tenth of a millisecond; handing it to a thread would take twice that.
                self.store.runs.record(run_id, records, wall_time(), may_wait=False)
            except StoreBusy:
                await asyncio.to_thread(self.store.runs.record, run_id, records, wall_time())

        return Scheduler(
            context.workflow,
            execute=trace_steps(steps.execute, context.deadlines.of),
            record=record,
            scope={"inputs": dict(self.inputs), "env": context.base_env, "run": run},
            listener=StepListener(context.on_change, record_skipped_span),
            known=self.known,
            limits=RunLimits(context.slots, context.deadlines, self.began.at_ns),
        )

    async def _wait_for_steps(self, scheduler: Scheduler, context: RunContext) -> str | None:
        """Return the name of the signal that ended the run early, if one did. The outermost run parks itself and those
        inside it."""
        person_wait, stop = context.person_wait, self.caller.stop
        if is_stopped_before := stop is not None and stop.done():
            scheduler.stop_at_once(clean_up=self.caller.cleans_up)
        working = asyncio.ensure_future(scheduler.run())
        self.call.work = _RunWork(scheduler, context.deadlines, self.call)
        control_of(self.call).on_change = _NewsOfRun(context, scheduler, self.began).note
        enter(self.call)
        running_runs[self.request.run_id] = self.call
        if (asked := self.call.winding_down) is not None:
            self.call.work.wind_down(asked.until_ns)
        try:
            waits: list[asyncio.Future[Any]] = [working]
            waits += [person_wait.parked] if self.caller.outer is None else []
            waits += [] if stop is None else [stop]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # bounded by the clocks of the steps
            if working.done():
                working.result()
                if not is_stopped_before:
                    return None
        finally:
            leave(self.call)
            running_runs.pop(self.request.run_id, None)
            if not working.done():
                if person_wait.parked.done():
                    scheduler.park()
                else:
                    scheduler.stop()
                with contextlib.suppress(asyncio.CancelledError):
                    await working
        return stop.result() if stop is not None and stop.done() and not scheduler.is_parked else None

    async def _park(self, scheduler: Scheduler, context: RunContext) -> Envelope:
        """Write down that the run waits for people, and return the envelope that says how to go on with it."""
        run_id, states, person_wait = self.request.run_id, scheduler.states, context.person_wait
        proposals = [_describe_proposal(proposal) for proposal in person_wait.parked_on.values()]
        waiting = context.redaction.value(proposals)
        outcome = park_outcome(run_id, self.request.name, states, waiting, person_wait.budget_ms or 0)
        envelope = answer(self.call, outcome)
        try:
            await asyncio.to_thread(self.store.runs.park, run_id, this_process(), wall_time())
        except Failure as failure:
            envelope.warnings.append(warning("NOT_WRITTEN_DOWN", f"that the run is parked: {failure}"))
        return envelope

    async def _end(
        self,
        scheduler: Scheduler,
        context: RunContext,
        outputs: dict[str, Any],
        ended_by: str | Exception | None,
    ) -> Envelope:
        """Write down the end of the run, and return its envelope."""
        run_id, runs = self.request.run_id, self.store.runs
        outcome = self._judge(scheduler.states, outputs, ended_by, context.deadlines.have_rung)
        outcome.warnings = tuple(context.redaction.value(note) for note in scheduler.notes)
        outcome.side_effects = effects_of(scheduler.states.values())
        outcome.survivors = survivors_of(scheduler.states.values())
        envelope = answer(self.call, outcome)
        try:
            try:
                await asyncio.to_thread(runs.end, run_id, envelope.to_dict(), wall_time())
            except ValueError as error:  # all of it together is too long for one value
                envelope.warnings.append(warning("NOT_WRITTEN_DOWN", f"the outputs in the end of the run: {error}"))
                await asyncio.to_thread(runs.end, run_id, _without_outputs(envelope), wall_time())
        except Failure as failure:
            envelope.warnings.append(warning("NOT_WRITTEN_DOWN", f"the end of the run: {failure}"))
        if self.caller.outer is None:
            await asyncio.to_thread(prune_by_the_way, self.store, os.environ, wall_time(), is_alive)
        return envelope

    def _judge(
        self,
        states: Mapping[str, StepState],
        outputs: dict[str, Any],
        ended_by: str | Exception | None,
        is_out_of_time: bool,
    ) -> Outcome:
        """Return the outcome of the run. `ended_by` is the signal or the error that ended it before its steps did.
        Out of time it failed, whatever its steps tolerate."""
        data = self._describe_steps(states)
        if outputs:
            data["outputs"] = outputs
        if ended_by == _CANCEL:
            cancelled = Problem("CANCELLED", "the run was cancelled while no process had it", exit_code=143)
            return Outcome(Ending.CANCELLED, cancelled, {**data, "partial": True})
        if ended_by is not None:
            problem = stop_problem(ended_by) if isinstance(ended_by, str) else outcome_of_error(ended_by).problem
            return Outcome(Ending.KILLED, problem, {**data, "partial": True})
        return judge_steps(self.call, states, data, is_out_of_time=is_out_of_time, find_fired=self._find_fired_clock)

    def _describe_steps(self, states: Mapping[str, StepState]) -> dict[str, object]:
        return describe_steps(self.request.run_id, self.request.name, states)

    def _describe_fired_clock(self) -> tuple[str, Fired]:
        """Say which limit the run has reached."""
        fired = self._find_fired_clock()
        return explain_limit(self.call, fired), fired

    def _find_fired_clock(self) -> Fired:
        """Return the clock that stopped the run, with the limit that was set: what a parent kept back of it is nobody's
        limit."""
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


def _without_outputs(envelope: Envelope) -> dict[str, object]:
    """Return the envelope without outputs, for where it is too long: they are kept with the steps."""
    data: Any = envelope.data
    kept = {
        name: {key: value for key, value in step.items() if key != "output"} for name, step in data["steps"].items()
    }
    return {**envelope.to_dict(), "data": {**data, "steps": kept, "outputs": {}}}


class _RunWork(Work):
    """A run that is wound down: its steps are told by themselves, and nothing else is started."""

    def __init__(self, scheduler: Scheduler, deadlines: Deadlines, call: Call) -> None:
        self._scheduler, self._deadlines, self._call = scheduler, deadlines, call

    def wind_down(self, until_ns: int) -> None:
        self._scheduler.wind_down()

    def stop_unwound(self) -> None:
        self._scheduler.stop()

    def move_bell(self) -> bool:
        move_steps(self._call, self._deadlines)
        return True


def move_steps(run: Call, deadlines: Deadlines) -> None:
    """Let the steps that run have what their run has now; those that begin later find it anyway."""
    assert run.bound.bell is not None
    became = deadlines.move(run.bound.bell)
    # Also what a step calls: it is inside the same deadline.
    for inner in calls_inside(run):
        if (parent := became.get(id(inner.parent))) is not None:
            control_of(inner).follow_caller(parent)


class _NewsOfRun:
    """Writes down what is decided about the time of a run and of its steps while they run, and passes it on."""

    def __init__(self, context: RunContext, scheduler: Scheduler, began: _Beginning) -> None:
        self._context, self._scheduler, self._began = context, scheduler, began

    def note(self, call: Call, news: OvertimeRequest | WindDown) -> None:
        run = self._context
        if call is not run.call and call.inside_of is not run.call:
            return  # of a run inside of this one, which says it itself
        told: dict[str, Any] = run.redaction.value(describe_news(call, news))
        name = call.name.removeprefix("step ") if call is not run.call else ""
        state = self._scheduler.states.get(name)
        if isinstance(news, WindDown) and news.fired is None:  # not by a clock of this one try
            run.wound_down.add(name)
        if call is run.call and call.bound.bell is not None and not isinstance(news, WindDown):
            self._write(self._write_deadline)
        elif state is not None and state.status is Status.RUNNING:
            state.overtime.append(told)
            if call.bound.owner == call.name:
                state.timeout_ms = call.bound.limit_ms
            self._write(partial(self._write_step, state))
        if run.on_news is not None:
            run.on_news(name, told)

    def _write(self, write: Callable[[], None]) -> None:
        """Write at once, or again in a moment while others keep the store busy: whoever looks at the run, or goes on
        with it after a `kill -9`, finds it nowhere else."""
        try:
            write()
        except StoreBusy:
            asyncio.get_running_loop().call_later(BUSY_PAUSE_S, self._write, write)
        except Failure:
            pass  # what became of a step is written with its end, or the run says that it could not be

    def _write_step(self, state: StepState) -> None:
        if state.status is Status.RUNNING:  # its end is written by the scheduler, with all of this
            record = StepRecord(state.id, state.status.value, state.to_record())
            self._context.store.runs.record(self._context.run_id, [record], wall_time(), may_wait=False)

    def _write_deadline(self) -> None:
        run, call = self._context, self._context.call
        if running_runs.get(run.run_id) is call:
            elapsed_ms = (call.started_ns - self._began.at_ns) // NS_PER_MS
            deadline_at = self._began.at + (elapsed_ms + call.bound.limit_ms)
            run.store.runs.extend(run.run_id, deadline_at, may_wait=False)


def describe_news(call: Call, news: OvertimeRequest | WindDown) -> dict[str, Any]:
    """Return what was decided about the time of a call, as it is written down with its step."""
    if not isinstance(news, WindDown):
        return {"event": "overtime", **news.as_meta()}
    return {
        "event": "wind_down",
        "at_ms": (news.at_ns - call.started_ns) // NS_PER_MS,
        "by": news.by,
        "reason": news.reason,
        "within_ms": max(0, news.until_ns - news.at_ns) // NS_PER_MS,
    }


class OpenedInbox:
    """The inbox of a store, opened when somebody is to be asked."""

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


async def _withdraw(proposals: Iterable[Proposal], inbox: Inbox) -> None:
    """Withdraw proposals that nobody waits for any more."""
    for proposal in proposals:
        try:
            await inbox.withdraw(proposal.id, Principal.local())
        except Failure as failure:
            if failure.code.startswith("STORE_"):
                return  # what could not be written now could not be for the next one; the others were decided


def _describe_proposal(proposals: Proposal | ForeignProposal) -> dict[str, Any]:
    return dict(proposals.shown) if isinstance(proposals, ForeignProposal) else result_of(proposals)


# In place of a signal's name, where somebody cancels a run that no process has.
_CANCEL = "cancel"


async def cancel(run_id: str, store: Store) -> Envelope:
    """End a run that no process has, for good: its questions are withdrawn, what the `on_fail` of its begun steps
    declares is run, and going on with it answers CANCELLED. Clean-up that cannot be run is named in a warning.

    Raises Failure if there is none, or a process has it (RUN_TAKEN). One that has ended stays as it is.
    """
    return await _cancel(run_id, store)


async def _cancel(run_id: str, store: Store, *, refusal: str | None = None) -> Envelope:
    """Cancel a run and those inside it. `refusal` is why no clean-up can be run, if it cannot."""
    run = await asyncio.to_thread(_take_up, run_id, store)
    if run.envelope is not None:
        return _recorded_answer(run)
    workflow, states = await asyncio.to_thread(read_record, run, store)
    for step_id, step in workflow.steps.items():
        if step.type == "workflow":
            why = refusal or (f"it needs the variables of step {step_id} around it" if step.env else None)
            for inner in await asyncio.to_thread(store.runs.list_inside, run_id, step_id):
                await _cancel(inner, store, refusal=why)
    try:
        workflow = await asyncio.to_thread(restore_secrets, run, workflow)
        _refuse_unset(workflow, os.environ)
    except Failure as failure:
        refusal = refusal or str(failure)
    known = await asyncio.to_thread(_find_known_states, workflow, states, store, run)
    uncleaned = _clean_up_of(workflow, known) if refusal is not None else []
    asker = Principal.local().name
    for proposal_id in await asyncio.to_thread(store.proposals.open_of_run, asker, run_id):
        with contextlib.suppress(Failure):  # decided or expired just now
            await asyncio.to_thread(store.proposals.withdraw, proposal_id, asker, wall_time())
    request = RunRequest(workflow, run.file, Path(run.file).parent, run.id, run.inputs)
    # Its own time may be over, and clean-up has its own bound.
    call = _admit(request, 0, TraceContext(run.trace_id))
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop.set_result(_CANCEL)
    if uncleaned:
        message = f"{', '.join(uncleaned)} did not run: {refusal}"
        call.warnings += (warning("CLEAN_UP_MISSING", message, steps=uncleaned),)
    caller = RunCaller(stop, cleans_up=refusal is None)
    return await _Run(request, run.inputs, call, store, caller, _Beginning.of(run), known).carry_out()


def _clean_up_of(workflow: WorkflowFile, known: Mapping[str, StepState]) -> list[str]:
    """Return the steps that clean up after those that had begun."""
    found: dict[str, None] = {}
    for name, state in known.items():
        reaction = workflow.steps[name].on_fail or workflow.defaults.on_fail
        if reaction is not None and state.has_begun:
            found |= dict.fromkeys(reaction.run)
    return list(found)


async def _render_outputs(context: RunContext, renderer: StepRenderer, scheduler: Scheduler) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, template in context.workflow.outputs.items():
        try:
            made[name] = await renderer.render_output(template, scheduler.scope_for(name))
        except StepFailed as failed:
            made[name] = None
            context.deadlines.note_fired(failed.fired)
            scheduler.notes.append(warning("OUTPUT_MISSING", f"output {name}: {failed}"))
    return made
