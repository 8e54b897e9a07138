"""A workflow from its file to its one envelope: every step recorded, and resumed where it was cut off."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets as tokens
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ..core.clocks import ClockKind, Clocks, Fired
from ..core.deadlines import NS_PER_MS
from ..core.durations import format_duration
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem, stop_problem, warning
from ..core.errors import Failure
from ..core.proposal import Proposal, result_of
from ..core.records import dataclass, replace_fields
from ..core.redaction import Redaction, looks_secret
from ..core.trace import TraceContext
from ..core.walltime import WallTime
from ..inbox.access import Principal
from ..inbox.inbox import Inbox
from ..process import kernel
from ..process.clock import monotonic_ns, wall_ns, wall_time
from ..process.context import Scope
from ..process.identity import is_alive, this_process
from ..providers.provider import Aside, ForeignProposal, Providers, RunServices
from ..providers.step_type import STEP_TYPES, StepPart
from ..providers.workflow import NestedRun
from ..runtime.call import Call, Outcome, admit, answer, inherited_deadline, inherited_trace
from ..runtime.handlers import outcome_of_error
from ..runtime.loop_call import current_scope
from ..runtime.preloaded_zygote import Program
from ..runtime.runtime import Runtime
from ..store.home import StoreBusy
from ..store.retention import prune_by_the_way
from ..store.runs import NewRun, Run, RunTaken, StepRecord
from ..store.store import Store
from .lint import identity, inner_workflow
from .loader import load_file
from .plan import clean_up_steps, kept_for_clean_up_ms, retry_of, run_timeout_ms
from .scheduler import Deadlines, OnChange, ParallelSlots, Scheduler
from .schema import WorkflowFile, check_inputs
from .secrets import is_same, literal_secrets, unset_message, unset_names, visible, without_secrets
from .state import Reason, Status, StepState, effects_of, lists_of
from .step_approval import PersonWait, key_of
from .step_executor import Steps, tell_of_skipped, trace_steps
from .step_renderer import StepFailed, StepRenderer
from .template_references import env_texts

# Beside a workflow that was written down without its secrets.
HIDES = "x-secrets-hidden"


@dataclass(frozen=True)
class RunRequest:
    workflow: WorkflowFile
    file: str
    folder: Path
    run_id: str = field(default_factory=lambda: tokens.token_hex(8))
    inputs: Mapping[str, Any] = field(default_factory=dict)
    timeout_ms: int | None = None
    """The caller's own limit, where it is shorter than the file's."""

    @property
    def name(self) -> str:
        return self.workflow.name or Path(self.file).stem


@dataclass(frozen=True)
class RunContext:
    """What a run gives to those inside it."""

    run_id: str
    files: tuple[str, ...]
    """Those that run each other, down to this one."""
    runtime: Runtime
    providers: Providers
    store: Store
    environment: Mapping[str, str]
    on_change: OnChange | None
    inbox: Callable[[], Inbox]
    attention: PersonWait
    places: ParallelSlots
    begun: dict[tuple[str, int], int] = field(default_factory=dict)

    async def run(self, inner: NestedRun) -> Envelope:
        """A run of its own, PARENT.STEP, with a number where a step begins more than one: that of its item, and behind
        those of all items where it is begun again. By the item, so that a run that goes on finds each one's own. One
        that a process which died has left behind is taken up. Raises Failure if the file cannot be run."""
        unattended = not os.isatty(0)
        workflow = await asyncio.to_thread(inner_workflow, inner.file, self.files, unattended=unattended)
        environment = {**self.environment, **inner.env}
        while True:
            index, count = inner.item
            before = self.begun.get((inner.step_id, index), 0)
            self.begun[inner.step_id, index] = before + 1
            number = before * count + index + 1
            run_id = f"{self.run_id}.{inner.step_id}" + (f".{number}" if number > 1 else "")
            request = RunRequest(workflow, identity(inner.file), inner.file.absolute().parent, run_id, inner.inputs)
            known = await asyncio.to_thread(self.store.runs.get, run_id)
            on_change = self._report_as(run_id.removeprefix(f"{self.run_id}."))
            company = _RunPeople(inner.stop, on_change, environment, contextlib.nullcontext, self, None)
            try:
                if known is None:
                    return await _start_run(request, self.store, company)
                if known.ended_at is None and known.file == request.file and not is_alive(known.holder):
                    return await _resume_run(run_id, self.store, company)
            except Failure as failure:
                if failure.code != "RUN_TAKEN":  # somebody was faster; the next number is free
                    raise

    def _report_as(self, name: str) -> OnChange | None:
        """Return what tells whoever watches this run of one inside it, by names that begin with the step's."""
        on_change = self.on_change
        return on_change and (lambda state: on_change(replace(state, id=f"{name}.{state.id}")))


@dataclass(frozen=True)
class _RunPeople:
    """Who is there while it runs: who may stop it, who is told, who draws, and the run around it."""

    stop: asyncio.Future[str] | None
    on_change: OnChange | None
    environment: Mapping[str, str] | None
    aside: Aside
    around: RunContext | None
    budget_ms: int | None


async def start(
    request: RunRequest,
    store: Store,
    *,
    stop: asyncio.Future[str] | None = None,
    on_change: OnChange | None = None,
    environment: Mapping[str, str] | None = None,
    aside: Aside = contextlib.nullcontext,
    budget_ms: int | None = None,
) -> Envelope:
    """Run a workflow. Always one envelope. Raises Failure if it cannot even be begun.

    `aside` is entered while a person is asked something at the terminal, for whoever draws on it. `budget_ms` is how
    long the caller waits once there is nothing left to do without a person; None is for as long as it takes.
    """
    return await _start_run(request, store, _RunPeople(stop, on_change, environment, aside, None, budget_ms))


async def _start_run(request: RunRequest, store: Store, company: _RunPeople) -> Envelope:
    limits = [limit for limit in (run_timeout_ms(request.workflow), request.timeout_ms) if limit]
    admission = _admit(request, min(limits) if limits else 0)
    inputs = check_inputs(request.workflow, request.inputs)
    environment = os.environ if company.environment is None else company.environment
    _refuse_unset(request.workflow, environment)
    # In the store its time is counted from where its clock was started, so that it has there what it has here.
    began_at = WallTime.of_ns(wall_ns() - (monotonic_ns() - admission.started_ns))
    new = NewRun(
        request.run_id,
        request.name,
        request.file,
        _without_secrets(request.workflow, environment),
        inputs,
        admission.trace_id,
        None if admission.bound.bell is None else began_at + admission.bound.limit_ms,
    )
    try:
        await asyncio.to_thread(store.runs.begin, new, this_process(), began_at)
    except RunTaken:
        raise Failure("RUN_TAKEN", f"there is a run {request.run_id!r} already; --resume continues it") from None
    return await _carry_out(request, inputs, admission, store, {}, company, _Begun(began_at, admission.started_ns))


async def resume(
    run_id: str,
    store: Store,
    *,
    stop: asyncio.Future[str] | None = None,
    on_change: OnChange | None = None,
    environment: Mapping[str, str] | None = None,
    aside: Aside = contextlib.nullcontext,
    budget_ms: int | None = None,
) -> Envelope:
    """Go on with a run that is parked or whose process died, with the deadline it had. One that has ended answers as it
    did."""
    return await _resume_run(run_id, store, _RunPeople(stop, on_change, environment, aside, None, budget_ms))


async def _resume_run(run_id: str, store: Store, company: _RunPeople) -> Envelope:
    run = await asyncio.to_thread(_take_up, run_id, store)
    if run.envelope is not None:
        return _recorded_answer(run)
    workflow, states = await asyncio.to_thread(read_record, run, store)
    workflow = await asyncio.to_thread(_restore_secrets, run, workflow)
    _refuse_unset(workflow, os.environ if company.environment is None else company.environment)
    request = RunRequest(workflow, run.file, Path(run.file).parent, run.id, run.inputs)
    left_ms = 0 if run.deadline_at is None else max(1, run.deadline_at - wall_time())
    admission = _admit(request, left_ms, TraceContext(run.trace_id))
    known = await asyncio.to_thread(lambda: _find_known_states(workflow, states, store, run))
    return await _carry_out(request, run.inputs, admission, store, known, company, _Begun.by(run))


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


@dataclass(frozen=True)
class _Begun:
    """When a run began, perhaps in another process."""

    at: WallTime
    at_ns: int
    budget_ms: int | None = None
    """How long it had, where this process only goes on with it."""

    @classmethod
    def by(cls, run: Run) -> _Begun:
        budget_ms = None if run.deadline_at is None else run.deadline_at.since_ms(run.created_at)
        return cls(run.created_at, monotonic_ns() - wall_time().since_ms(run.created_at) * NS_PER_MS, budget_ms)


def read_record(run: Run, store: Store) -> tuple[WorkflowFile, dict[str, StepState]]:
    """Return a run as it was written down. Raises Failure if another version did, in a way that is not known here."""
    try:
        states = {name: StepState.from_record(step.record) for name, step in store.runs.steps(run.id).items()}
        written = {key: value for key, value in run.workflow.items() if key != HIDES}
        return WorkflowFile.model_validate(written), states
    except (ValueError, KeyError, TypeError):
        message = f"run {run.id!r} was recorded by another version of shotclock, which cannot be continued here"
        raise Failure("STORE_UNUSABLE", message, suggestion="continue it with the version that began it") from None


def _without_secrets(workflow: WorkflowFile, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the workflow as it is written down: without secrets, and saying so where there were some."""
    written = workflow.model_dump(exclude_unset=True)
    redaction = Redaction({**environment, **literal_secrets(written)})
    kept = without_secrets(written, redaction)
    return kept if kept == written else {**kept, HIDES: True}


def _restore_secrets(run: Run, kept: WorkflowFile) -> WorkflowFile:
    """Return the workflow with what was hidden, read again from its file. Raises Failure if that is gone or changed."""
    if HIDES not in run.workflow:
        return kept
    why = f"run {run.id!r} was recorded without the secrets in {run.file}"
    try:
        loaded = load_file(Path(run.file))
    except OSError as error:
        message = f"{why}, which cannot be read: {error.strerror}"
        raise Failure("FILE_NOT_FOUND", message, suggestion="put the file back, then resume the run") from None
    written = None if loaded.workflow is None else loaded.workflow.model_dump(exclude_unset=True)
    expected = {key: value for key, value in run.workflow.items() if key != HIDES}
    if loaded.workflow is None or not is_same(expected, written):
        hint = "put the file back as it was, or begin a new run"
        raise Failure("WORKFLOW_INVALID", f"{why}, which has changed since", suggestion=hint)
    return loaded.workflow


def _refuse_unset(workflow: WorkflowFile, environment: Mapping[str, str]) -> None:
    """Raise Failure that names every variable which `env` needs and nobody has set."""
    errors = [
        {"field": ".".join(path), "message": unset_message(name)}
        for path, text in env_texts(workflow)
        for name in unset_names(text, environment)
    ]
    if errors:
        message = "; ".join(dict.fromkeys(error["message"] for error in errors))
        raise Failure("ARG_ERROR", message, context={"errors": errors})


def _find_known_states(
    workflow: WorkflowFile, states: Mapping[str, StepState], store: Store, run: Run
) -> dict[str, StepState]:
    """Return what is known of each step. One that was in the middle is done again only where that does no harm."""
    known = {}
    for step_id, state in states.items():
        if state.status is Status.RUNNING:
            step = workflow.steps[step_id]
            # A question is asked again under its key; a run inside this one knows by itself how far it was.
            can_repeat = STEP_TYPES[step.type].can_repeat
            harmless = step.idempotent or retry_of(workflow, step) is not None or can_repeat
            if harmless or (not step.for_each and _only_waited(store, run, step, state)):
                state = state.put_off()
                if not can_repeat:
                    state.proposal_id = None
            else:
                state.status = Status.INTERRUPTED
                state.attempts += 1  # the try that it was in, which nobody lived to count
                message = "its process died while it ran, and it is not marked as safe to run twice (`idempotent`)"
                state.error = {"code": "INTERRUPTED", "message": message, "retryable": False, "phase": "execution"}
        elif state.status is Status.SKIPPED:
            state = state.fresh()
        known[step_id] = state
    return known


def _only_waited(store: Store, run: Run, step: StepPart, state: StepState) -> bool:
    """Whether it is certain that a step waited for its approval, or its command's, and had not begun."""
    asker, key = Principal.local().name, key_of(run.id, state)
    if step.approval and not store.proposals.was_used(asker, key):
        return True
    return STEP_TYPES[step.type].asks_before_start and store.proposals.is_unused(asker, f"{key}.{state.attempts + 1}")


def _admit(request: RunRequest, timeout_ms: int, trace: TraceContext | None = None) -> Call:
    """Begin the call of a run: inside the run that it is a step of, else inside the time of the environment."""
    scope = current_scope.get()
    return admit(
        f"run {request.name}",
        Clocks(timeout_ms=timeout_ms),
        parent=inherited_deadline(os.environ, monotonic_ns()).deadline if scope is None else scope.deadline,
        parent_owner="caller" if scope is None else scope.name,
        caller=trace or (inherited_trace() if scope is None else scope.span.trace),
    )


async def _carry_out(
    request: RunRequest,
    inputs: Mapping[str, Any],
    admission: Call,
    store: Store,
    known: Mapping[str, StepState],
    company: _RunPeople,
    begun: _Begun,
) -> Envelope:
    around = company.around
    # Every step is below us, and could read there what it does not get.
    kernel.hide_variables(looks_secret)
    everything = dict(os.environ if company.environment is None else company.environment)
    redaction = Redaction(everything)
    base_env = visible(everything)
    files = (*(() if around is None else around.files), identity(request.file))
    scope = {"inputs": dict(inputs), "env": base_env, "run": {"id": request.run_id, "name": request.name}}

    async def record(states: Iterable[StepState]) -> None:
        records = [StepRecord(state.id, state.status.value, state.to_record()) for state in states]
        try:
            # A tenth of a millisecond; handing it to a thread would take twice that.
            store.runs.record(request.run_id, records, wall_time(), may_wait=False)
        except StoreBusy:
            await asyncio.to_thread(store.runs.record, request.run_id, records, wall_time())

    token = current_scope.set(Scope(admission.bound.bell, -1, admission.name, admission))
    try:
        async with contextlib.AsyncExitStack() as stack:
            if around is None:
                runtime = await stack.enter_async_context(Runtime(program=Program(), workers=1))
                opened = _Opened(store)
                stack.push_async_callback(opened.close)
                inbox: Callable[[], Inbox] = opened
                attention = PersonWait(company.budget_ms)
                providers = Providers(RunServices(inbox, company.aside))
                stack.push_async_callback(providers.close)
            else:
                runtime, providers = around.runtime, around.providers
                inbox, attention = around.inbox, around.attention
            places = ParallelSlots(request.workflow.max_parallelism, None if around is None else around.places)
            inside = RunContext(
                request.run_id,
                files,
                runtime,
                providers,
                store,
                everything,
                company.on_change,
                inbox,
                attention,
                places,
            )
            had_ms = begun.budget_ms or admission.bound.limit_ms
            kept_ms = kept_for_clean_up_ms(request.workflow, had_ms)
            deadlines = Deadlines(admission.bound.bell, kept_ms, clean_up_steps(request.workflow))
            renderer = StepRenderer(request.workflow, runtime, everything, redaction, request.folder)
            steps = Steps(
                request.workflow,
                runtime,
                providers,
                renderer,
                base_env=base_env,
                redaction=redaction,
                deadlines=deadlines,
                run_id=request.run_id,
                run_began_at=begun.at,
                attention=attention,
                inbox=inbox,
                places=places,
                run_file=inside.run,
            )
            running = Scheduler(
                request.workflow,
                execute=trace_steps(steps.execute, deadlines.of),
                record=record,
                scope=scope,
                on_change=company.on_change,
                on_skip=tell_of_skipped,
                known=known,
                began_ns=begun.at_ns,
                places=places,
                deadlines=deadlines,
            )
            ended_by: str | Exception | None
            outputs: dict[str, Any] = {}
            try:
                ended_by = await _until_done(running, company.stop, attention, is_outermost=around is None)
                if ended_by is None and not running.is_parked:
                    outputs = await _render_outputs(request.workflow, renderer, running)
            except Exception as error:  # the store could not be used any more, or a bug
                ended_by = error
            if around is None and not running.is_parked and attention.left:
                await _take_back(attention.left, inbox())
    finally:
        current_scope.reset(token)
    if running.is_parked:
        envelope = answer(admission, _parked_outcome(request, running, attention, redaction))
        try:
            await asyncio.to_thread(store.runs.park, request.run_id, this_process(), wall_time())
        except Failure as failure:
            envelope.warnings.append(warning("NOT_WRITTEN_DOWN", f"that the run is parked: {failure}"))
        return envelope
    outcome = _judge_run(request, admission, running, outputs, ended_by, begun)
    outcome.warnings = tuple(redaction.value(note) for note in running.notes)
    outcome.side_effects = effects_of(running.states.values())
    envelope = answer(admission, outcome)
    try:
        try:
            await asyncio.to_thread(store.runs.end, request.run_id, envelope.to_dict(), wall_time())
        except ValueError as error:  # all of it together is too long for one value
            envelope.warnings.append(warning("NOT_WRITTEN_DOWN", f"the outputs in the end of the run: {error}"))
            await asyncio.to_thread(store.runs.end, request.run_id, _without_outputs(envelope), wall_time())
    except Failure as failure:
        envelope.warnings.append(warning("NOT_WRITTEN_DOWN", f"the end of the run: {failure}"))
    if around is None:
        await asyncio.to_thread(prune_by_the_way, store, os.environ, wall_time(), is_alive)
    return envelope


def _without_outputs(envelope: Envelope) -> dict[str, object]:
    """Return the envelope without outputs, for where it is too long: they are kept with the steps."""
    data: Any = envelope.data
    kept = {
        name: {key: value for key, value in step.items() if key != "output"} for name, step in data["steps"].items()
    }
    return {**envelope.to_dict(), "data": {**data, "steps": kept, "outputs": {}}}


class _Opened:
    """The inbox, once somebody is to be asked."""

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


async def _until_done(
    running: Scheduler, stop: asyncio.Future[str] | None, attention: PersonWait, *, is_outermost: bool
) -> str | None:
    """The name of the signal that ended it early, if one did. The outermost run parks itself and those inside it."""
    working = asyncio.ensure_future(running.run())
    try:
        waits: list[asyncio.Future[Any]] = [working]
        waits += [attention.parked] if is_outermost else []
        waits += [] if stop is None else [stop]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # bounded by the clocks of the steps
        if working.done():
            working.result()
            return None
    finally:
        if not working.done():
            if attention.parked.done():
                running.park()
            else:
                running.stop()
            with contextlib.suppress(asyncio.CancelledError):
                await working
    return stop.result() if stop is not None and stop.done() and not running.is_parked else None


async def _take_back(asked: Iterable[Proposal], inbox: Inbox) -> None:
    """Withdraw what nobody waits for any more."""
    for proposal in asked:
        try:
            await inbox.withdraw(proposal.id, Principal.local())
        except Failure as failure:
            if failure.code.startswith("STORE_"):
                return  # what could not be written now could not be for the next one; the others were decided


def _describe_proposal(asked: Proposal | ForeignProposal) -> dict[str, Any]:
    return dict(asked.shown) if isinstance(asked, ForeignProposal) else result_of(asked)


def _parked_outcome(request: RunRequest, running: Scheduler, attention: PersonWait, redaction: Redaction) -> Outcome:
    """Return the outcome of a run that is not over: it lies in the store, and its questions in the inbox."""
    states, budget_ms = running.states, attention.budget_ms or 0
    asked = list(attention.asked.values())
    ids = ", ".join(proposal.id for proposal in asked)
    data: dict[str, object] = {
        "run_id": request.run_id,
        "name": request.name,
        **_list_steps(states),
        "waiting": redaction.value([_describe_proposal(proposal) for proposal in asked]),
        "status": "parked",
        "state": "paused",
        "job_id": request.run_id,
        "progress": _progress(states),
        "continue_command": f"shotclock run --resume {request.run_id}",
        "cancel_command": f"shotclock job cancel {request.run_id}",
    }
    message = f"run {request.run_id} waits for a person ({ids}); continue it with data.continue_command"
    fired = Fired(ClockKind.BUDGET, "caller", budget_ms, budget_ms)
    effects = effects_of(states.values())
    return Outcome(Ending.DETACHED, Problem("INCOMPLETE", message, fired=fired), data, side_effects=effects)


def _progress(states: Mapping[str, StepState]) -> dict[str, object]:
    done = sum(state.status.is_final for state in states.values())
    return {"done": done, "total": len(states), "unit": "steps"}


async def cancel(run_id: str, store: Store) -> Envelope:
    """End a run that no process has, for good: its questions are withdrawn, and going on with it answers CANCELLED.

    Raises Failure if there is none, or a process has it (RUN_TAKEN). One that has ended stays as it is.
    """
    return await asyncio.to_thread(_cancel_run, run_id, store)


def _cancel_run(run_id: str, store: Store) -> Envelope:
    run = _take_up(run_id, store)
    if run.envelope is not None:
        return _recorded_answer(run)
    workflow, states = read_record(run, store)
    known = _find_known_states(workflow, states, store, run)
    for step_id, step in workflow.steps.items():
        if step.type == "workflow":
            for inner in store.runs.list_inside(run_id, step_id):
                _cancel_run(inner, store)
        state = known.setdefault(step_id, StepState(step_id, step.type))
        if not state.status.is_final:
            state.status, state.reason = Status.SKIPPED, Reason.RUN_ENDED
    asker = Principal.local().name
    for proposal_id in store.proposals.open_of_run(asker, run_id):
        with contextlib.suppress(Failure):  # decided or expired just now
            store.proposals.withdraw(proposal_id, asker, wall_time())
    records = [StepRecord(state.id, state.status.value, state.to_record()) for state in known.values()]
    store.runs.record(run_id, records, wall_time())
    admission = admit(f"run {run.name}", Clocks(timeout_ms=0), caller=TraceContext(run.trace_id))
    data = {"run_id": run_id, "name": run.name, **_list_steps(known), "partial": True}
    problem = Problem("CANCELLED", "the run was cancelled while no process had it", exit_code=143)
    outcome = Outcome(Ending.CANCELLED, problem, data, side_effects=effects_of(known.values()))
    store.runs.end(run_id, answer(admission, outcome).to_dict(), wall_time())
    ended = store.runs.get(run_id)
    assert ended is not None
    return _recorded_answer(ended)


def _list_steps(states: Mapping[str, StepState]) -> dict[str, object]:
    return {"steps": {name: state.to_answer() for name, state in states.items()}, **lists_of(states)}


async def _render_outputs(workflow: WorkflowFile, renderer: StepRenderer, running: Scheduler) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, template in workflow.outputs.items():
        try:
            made[name] = await renderer.render_output(template, running.scope_for(name))
        except StepFailed as failed:
            made[name] = None
            running.notes.append(warning("OUTPUT_MISSING", f"output {name}: {failed}"))
    return made


def _judge_run(
    request: RunRequest,
    admission: Call,
    running: Scheduler,
    outputs: dict[str, Any],
    ended_by: str | Exception | None,
    begun: _Begun,
) -> Outcome:
    """`ended_by` is the signal or the error that ended it before its steps did."""
    states = running.states
    bad = [name for name, state in states.items() if state.status.is_bad and not state.continues]
    data: dict[str, object] = {
        "run_id": request.run_id,
        "name": request.name,
        **_list_steps(states),
    }
    if outputs:
        data["outputs"] = outputs
    if isinstance(ended_by, str):
        return Outcome(Ending.KILLED, stop_problem(ended_by), {**data, "partial": True})
    if ended_by is not None:
        return Outcome(Ending.KILLED, outcome_of_error(ended_by).problem, {**data, "partial": True})
    if not bad:
        return Outcome(Ending.FINISHED, data=data)
    if any(states[name].is_cut_short for name in bad):
        fired = _run_fired(admission, begun)
        whose = "" if fired.owner == admission.name else f" that {_name_owner(fired.owner)} left it"
        message = f"the run did not end within {'the ' if whose else ''}{format_duration(fired.limit_ms)}{whose}"
        return Outcome(Ending.KILLED, Problem("TIMEOUT", message, fired=fired), data)
    names = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return Outcome(Ending.FINISHED, Problem("STEPS_FAILED", f"{len(bad)} of {len(states)} steps: {names}"), data)


def _run_fired(admission: Call, begun: _Begun) -> Fired:
    """The clock of the run, with the limit that was set: what a parent kept back of it is nobody's limit."""
    if begun.budget_ms is not None:
        elapsed_ms = (monotonic_ns() - begun.at_ns) // NS_PER_MS
        return Fired(ClockKind.TIMEOUT, admission.name, begun.budget_ms, elapsed_ms, admission.bound.source)
    fired = admission.fired(ClockKind.TIMEOUT, monotonic_ns() - admission.started_ns)
    source = fired.source
    if source is None or source is admission.bound.bell:
        return fired
    scope = current_scope.get()
    set_ms = scope.limit_ms if scope is not None and scope.deadline is source else 0
    return replace_fields(fired, limit_ms=set_ms or source.remaining_ms(admission.started_ns))


def _name_owner(owner: str) -> str:
    return "its caller" if owner == "caller" else owner
