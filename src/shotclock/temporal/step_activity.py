"""The activities of a worker: one carries out a step with the executor and the supervisor of every run, the other
renders the outputs of a run.

A worker tells the engine by heartbeats that it has a step, and knows which of them have arrived. It stops the step by
itself once none has for half the time after which the engine would give the step to somebody else, and it is gone when
that time is over: so a step never runs twice at once, also behind a cut network. A worker that is frozen is killed by
then; and a step that came to it late, as what was sent to a frozen one does, is begun only if the engine says that it
is still this worker's.

docs/design.md: R57, R58.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.client import AsyncActivityCancelledError, Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from ..core.clocks import NS_PER_MS, Bound, ClockKind, Clocks, Deadline, Fired, WallTime, move_bell
from ..core.envelope import Envelope, Warning_, warning
from ..core.errors import Failure, SideEffects
from ..core.overtime import OvertimeRequest
from ..core.redaction import looks_secret
from ..core.trace import TraceContext
from ..core.value_types import replace, value
from ..inbox.inbox import Inbox
from ..process.clock import monotonic_ns, wall_time
from ..process.context import Scope, current_scope
from ..process.kernel import DeadlineTimer
from ..providers.provider import ForeignProposal, Providers, RunServices
from ..providers.workflow import NestedRun
from ..runtime import control_channel
from ..runtime.call import Call, WindDown, admit
from ..runtime.control import calls_inside, control_of, enter, leave, live_calls
from ..runtime.runtime import Runtime
from ..store.store import Store
from ..workflow.engine import describe_news, move_steps, name_nested_run
from ..workflow.lint import identity, inner_workflow
from ..workflow.plan import run_timeout_ms
from ..workflow.scheduler import Deadlines, ParallelSlots, PersonWait, RunContext
from ..workflow.schema import WorkflowFile, check_inputs
from ..workflow.state import OutputsView, StepState, StepsView, explain_limit, redaction_for
from ..workflow.step_executor import StepExecutor, trace_steps
from ..workflow.step_renderer import StepFailed, StepRenderer
from .messages import ORDER_ACTIVITY, OUTPUTS_ACTIVITY, STEP_ACTIVITY, VERSION, Order, RunInput, StepInput, StepReply
from .payloads import JSON_LIMIT, KEY_VARIABLE, read_key, write_workflow
from .proposals import pack_proposals, unpack_proposals

# So many heartbeats in the time after which a worker is taken for lost: one that is late does no harm.
BEATS = 8
# Before a step of a later version is given back, so that the engine does not send it to and fro.
LATER_VERSION_PAUSE_S = 0.5
# Between two questions whether a step is still this worker's, where the first had no answer.
ASK_AGAIN_S = 0.05
# Of the calls of a step, told with each of them: the items of a step may be many.
CALLS_TOLD = 10
# A cut-off step is stopped at this share of that time, killed at the second, and at the third the worker ends itself
# with all that it runs: something in it does not do what it is told. One that is frozen does not even do that, and is
# killed by its guard at the last.
STOP_SHARE, KILL_SHARE, EXIT_SHARE, GUARD_SHARE = 0.5, 0.7, 0.85, 0.9


class EngineClock:
    """The clock of the engine, as far as one activity knows it: by the instant at which it was started."""

    def __init__(self, started_ms: int, at_ns: int) -> None:
        self.started_ms, self.at_ns = started_ms, at_ns

    def now_ms(self) -> int:
        return self.at_ms(monotonic_ns())

    def at_ms(self, at_ns: int) -> int:
        """Return an instant of this process on the engine's clock."""
        return self.started_ms + (at_ns - self.at_ns) // NS_PER_MS

    def deadline(self, at_ms: int) -> Deadline:
        """Return the instant as a deadline of this process."""
        return Deadline(self.at_ns + (at_ms - self.started_ms) * NS_PER_MS)

    def ahead_ms(self) -> int:
        """Return how far it is ahead of the wall clock here."""
        return self.now_ms() - wall_time().ms


class StartDelays:
    """How late steps come to this worker, measured by the fastest of them: only the engine knows when it gave them
    away, and by a clock that is not ours."""

    def __init__(self) -> None:
        self._least_ns: int | None = None

    def measure(self, started_ns: int, at_ns: int) -> int | None:
        """Return how much later than the fastest one this step has come. None: there is nothing to measure by."""
        apart_ns = at_ns - started_ns
        if self._least_ns is None:
            return None
        self._least_ns = min(self._least_ns, apart_ns)
        return apart_ns - self._least_ns

    def adopt(self, started_ns: int, at_ns: int) -> None:
        """Measure by this step from now on: it was in time by the engine's word, or the engine's clock was set back."""
        self._least_ns = at_ns - started_ns


class Leases:
    """By when each step has to be gone, unless the engine is heard of before."""

    def __init__(self) -> None:
        self._held: dict[object, tuple[int, int]] = {}
        self.timer = DeadlineTimer()
        """Rings for the worker's guard, a process of its own, once the worker should have ended itself."""

    def hold(self, step: object, heard_ns: int, limit_ns: int) -> None:
        """Have the worker end, for the sake of a step that the engine has heard of then, before the limit is over."""
        self._held[step] = heard_ns + int(limit_ns * EXIT_SHARE), heard_ns + int(limit_ns * GUARD_SHARE)
        self._arm()

    def end(self, step: object) -> None:
        self._held.pop(step, None)
        self._arm()

    def _arm(self) -> None:
        if self._held:
            self.timer.arm(min(guard_ns for _, guard_ns in self._held.values()))
        else:
            self.timer.disarm()

    @property
    def is_overdue(self) -> bool:
        now_ns = monotonic_ns()
        return any(now_ns >= exit_ns for exit_ns, _ in list(self._held.values()))


@value
class WorkerServices:
    """What all steps of a worker share."""

    client: Client
    runtime: Runtime
    store: Store
    inbox: Callable[[], Inbox]
    environment: Mapping[str, str]
    folder: Path | None
    """Where steps run whose file's own folder is not on this machine."""
    own_queue: str
    """Where this worker alone hears orders for the steps that it has."""
    leases: Leases
    own_variables: Mapping[str, str]
    """What the worker itself gets in with. No step sees it, and what is secret of it is taken out of what steps say."""


class Activities:
    """The activities that a worker offers."""

    def __init__(self, services: WorkerServices) -> None:
        self._services = services
        self._delays = StartDelays()
        self._under_way: dict[tuple[str, str], _StepWork] = {}
        """By run and step."""

    @activity.defn(name=STEP_ACTIVITY)
    async def carry_out_step(self, given: dict[str, Any]) -> dict[str, Any]:
        if given["version"] > VERSION:  # given back: another worker may have that version
            await asyncio.sleep(LATER_VERSION_PAUSE_S)
            return {"state": given["state"], "lost": {}, "is_unbegun": True}
        work = _StepWork(given, self._services, _engine_clock(), self._delays)  # type: ignore[arg-type]
        key = (given["run"]["run_id"], given["step"])
        self._under_way[key] = work
        try:
            return dict(await work.carry_out())
        finally:
            self._services.leases.end(work)
            if self._under_way.get(key) is work:
                del self._under_way[key]

    @activity.defn(name=ORDER_ACTIVITY)
    async def carry_out_order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Give a step that this worker has more time, or wind it down."""
        work = self._under_way.get((order["run_id"], order["step"]))
        try:
            if work is None:
                raise Failure("CALL_NOT_FOUND", f"step {order['step']} is not here any more")
            return await work.obey(order)  # type: ignore[arg-type]
        except Failure as failure:
            raise ApplicationError(str(failure), type=failure.code, non_retryable=True) from None

    @activity.defn(name=OUTPUTS_ACTIVITY)
    async def render_outputs(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of a run, and what went wrong with them."""
        clock = _engine_clock()
        workflow = WorkflowFile.model_validate({"steps": {"none": {"type": "command", "exec": "-"}}})
        made: dict[str, Any] = {}
        warnings: list[Warning_] = []
        async with _open_context(given["run"], workflow, clock, self._services) as context:
            renderer = StepRenderer(context)
            for name, template in given["outputs"].items():
                try:
                    made[name] = await renderer.render_output(template, _make_scope(given, context))
                except StepFailed as failed:
                    made[name] = None
                    context.deadlines.note_fired(failed.fired)
                    warnings.append(warning("OUTPUT_MISSING", f"output {name}: {failed}"))
            return {"outputs": made, "warnings": warnings, "is_cut_short": context.deadlines.have_rung}


def _engine_clock() -> EngineClock:
    return EngineClock(int(activity.info().started_time.timestamp() * 1000), monotonic_ns())


def _make_scope(given: Mapping[str, Any], context: RunContext) -> dict[str, Any]:
    """Return what templates see."""
    states = {name: StepState.from_record(record) for name, record in given["visible"].items()}
    run = {"id": context.run_id, "name": given["run"]["name"]}
    fixed = {"inputs": given["run"]["inputs"], "env": context.base_env, "run": run}
    return {**fixed, "outputs": OutputsView(states), "steps": StepsView(states)}


@contextlib.asynccontextmanager
async def _open_context(
    run: Mapping[str, Any],
    workflow: WorkflowFile,
    clock: EngineClock,
    services: WorkerServices,
    make_deadlines: Callable[[Deadline | None], Deadlines] = lambda bell: Deadlines(bell, 0, frozenset()),
    *,
    may_park: bool = True,
) -> AsyncIterator[RunContext]:
    """Open what a step shares with its run, which is nowhere in this process but here."""
    bell = None if run["deadline_at"] is None else clock.deadline(run["deadline_at"])
    call, deadlines = _admit_run(run, bell, clock), make_deadlines(bell)
    everything = {**services.environment, **run["env"]}
    providers = Providers(RunServices(services.inbox, environment=everything))
    token = current_scope.set(Scope(bell, -1, call.name, call, call=call))
    context = RunContext(
        run_id=run["run_id"],
        workflow=workflow,
        folder=_find_folder(run["folder"], services.folder),
        files=tuple(run["files"]),
        began_at=WallTime(run["began_at"] - clock.ahead_ms()),
        store=services.store,
        runtime=services.runtime,
        providers=providers,
        inbox=services.inbox,
        person_wait=PersonWait(0 if may_park else None),
        slots=ParallelSlots(workflow.max_parallelism),
        deadlines=deadlines,
        environment=everything,
        base_env={name: value for name, value in everything.items() if not looks_secret(name)},
        redaction=redaction_for(workflow, {**everything, **services.own_variables}),
        on_change=None,
        on_news=None,
        call=call,
        describe_limit=partial(_describe_fired_clock, call, deadlines),
        json_limit=JSON_LIMIT,
    )
    try:
        yield context
    finally:
        current_scope.reset(token)
        await providers.close()


def _describe_fired_clock(run: Call, deadlines: Deadlines) -> tuple[str, Fired]:
    fired = run.fired(ClockKind.TIMEOUT, monotonic_ns() - run.started_ns)
    fired = replace(fired, kept_ms=deadlines.kept_ms)
    return explain_limit(run, fired), fired


def _find_folder(of_file: str, here: Path | None) -> Path:
    """Return where relative paths start: the folder of the file, or that of the worker where there is no such one."""
    return here if here is not None and not os.path.isdir(of_file) else Path(of_file)


def _admit_run(run: Mapping[str, Any], bell: Deadline | None, clock: EngineClock) -> Call:
    """Begin the call that stands for the run here: its clocks have run since the run began."""
    call = admit(f"run {run['name']}", Clocks(timeout_ms=0), caller=TraceContext(run["trace_id"]))
    call.started_ns = clock.deadline(run["began_at"]).at_ns
    call.bound = Bound(bell, call.bound.grace_ms, run["limit_ms"], call.name, bell)
    return call


class _StepWork:
    """One step, while this worker has it."""

    def __init__(self, given: StepInput, services: WorkerServices, clock: EngineClock, delays: StartDelays) -> None:
        self._given = given
        self._services = services
        self._clock = clock
        self._delays = delays
        self._limit_ns = given["heartbeat_ms"] * NS_PER_MS
        self._heard_ns = monotonic_ns()
        """Since when the engine has heard nothing of the step, at worst."""
        self._handle = services.client.get_async_activity_handle(task_token=activity.info().task_token)
        self.state = StepState.from_record(given["state"])
        if self.state.cut_off_ms and "sent_at" in given:
            self.state.cut_off_ms += max(0, clock.now_ms() - given["sent_at"])
        self._attempts_before, self._used_before_ms = self.state.attempts, self.state.cut_off_ms
        self._run_call: Call | None = None
        self._working: asyncio.Future[None] | None = None
        self._deadlines: Deadlines | None = None
        self._redact: Callable[[Any], Any] = lambda value: value
        self._wanted: dict[str, RunInput] = {}
        """The runs inside the step that its workflow has to begin."""
        self._is_announced = False
        self._is_ordered_off = False
        """The run has been stopped, and with it the step."""
        self._is_cut_off = False
        """The engine has not been heard of for too long, or this worker is shut down: others have to go on with it."""
        if self.state.cut_off_ms:
            self.state.earlier_effects = SideEffects.UNKNOWN

    async def carry_out(self) -> StepReply:
        """Execute the step, and return its state, whatever ends it. A step that this worker may not have any more has
        no reply: its tree is gone."""
        replying = asyncio.ensure_future(self._execute())
        while not replying.done():
            try:
                await asyncio.wait([replying])  # bounded: the step has its clocks, and one that is stopped its grace
            except asyncio.CancelledError:  # at any moment, also while the step is being stopped for another reason
                self._note_cancelled()
        return replying.result()

    def _note_cancelled(self) -> None:
        """Stop the step: its run was stopped, which the SDK may hear before `_hold` does, or else the worker is being
        shut down."""
        details = activity.cancellation_details()
        if details is not None and details.cancel_requested:
            self._is_ordered_off = True
        else:
            self._is_cut_off = True
        if self._working is not None:
            self._working.cancel()

    async def _execute(self) -> StepReply:
        given = self._given
        if not await self._is_still_ours() or self._is_cut_off:
            return {"state": given["state"], "lost": self._describe_try(), "is_unbegun": True}
        if self._is_ordered_off:
            return {"state": given["state"], "is_cancelled": True}
        workflow = WorkflowFile.model_validate(given["workflow"])
        step = workflow.steps[given["step"]]
        unpack_proposals(given["proposals"], self._services.store, self._clock.ahead_ms())
        async with _open_context(
            given["run"],
            workflow,
            self._clock,
            self._services,
            self._make_deadlines,
            may_park=given["may_park"],
        ) as context:
            executor = StepExecutor(context, lambda nested: self._run_nested(nested, context))
            context.nested_runs.update(self._count_nested())
            self._run_call, self._redact = context.call, context.redaction.value
            self._deadlines = context.deadlines
            control_of(context.call).on_change = partial(self._note_news, context)
            enter(context.call)
            execute = trace_steps(executor.execute, context.deadlines.of)
            working = asyncio.ensure_future(execute(given["step"], step, self.state, _make_scope(given, context)))
            self._working = working
            holding = asyncio.ensure_future(self._hold(working))
            parked = context.person_wait.parked
            try:
                await asyncio.wait([working, parked], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not working.done():
                    working.cancel()
                    await asyncio.wait([working])  # bounded: a cancelled step is killed after its grace
                holding.cancel()
                await asyncio.wait([holding])
                self._services.leases.end(self)
                leave(context.call)
            return self._reply(working, context)

    def _make_deadlines(self, bell: Deadline | None) -> Deadlines:
        given = self._given
        clean_up = frozenset([given["step"]] if given["is_clean_up"] else ())
        deadlines = Deadlines(bell, given["kept_ms"], clean_up)
        if given["clean_up_by"] is not None:
            left_ms = given["clean_up_by"] - self._clock.now_ms()
            deadlines.begin_clean_up(monotonic_ns(), max(1, left_ms))
        return deadlines

    def _reply(self, working: asyncio.Future[None], context: RunContext) -> StepReply:
        if not working.cancelled():
            working.result()
            return {"state": self.state.to_record()}
        if self._is_cut_off:
            return {"state": self._given["state"], "lost": self._describe_try()}
        if context.person_wait.parked.done() and not self._is_ordered_off:
            waiting = [each for each in context.person_wait.parked_on.values() if each.id not in self._wanted]
            asked = pack_proposals(self._given["step"], waiting, self._services.store, self._clock.ahead_ms())
            later = self.state.to_parked().to_record()
            return {"state": later, "is_parked": True, "proposals": asked, "nested": list(self._wanted.values())}
        return {"state": self.state.to_record(), "is_cancelled": True}

    async def obey(self, order: Order) -> dict[str, Any]:
        """Extend the calls of the step, or wind them down. Return what they have now. Raises Failure."""
        if "deadline_at" in order:
            return self._follow_run(order["deadline_at"])
        run_call = self._run_call
        calls = [call for call in live_calls.values() if run_call is not None and call.inside_of is run_call]
        if not calls:
            raise Failure("CALL_NOT_FOUND", f"step {self._given['step']} does not run at this moment")
        if order["by_ms"] is not None:
            return await control_channel.extend(calls, order["by_ms"], order["who"])
        return await control_channel.wind_down(calls, order["who"], order["reason"], order["within_ms"])

    def _follow_run(self, deadline_at: int) -> dict[str, Any]:
        """Take the later deadline of the run. One that is known already changes nothing."""
        run, deadlines = self._run_call, self._deadlines
        if run is not None and run.bound.bell is not None and deadlines is not None:
            later_ms = (self._clock.deadline(deadline_at).at_ns - run.bound.bell.at_ns) // NS_PER_MS
            if (moved := move_bell(run.bound, later_ms, None, None)) is not None:
                run.bound = moved
                move_steps(run, deadlines)
        return {}

    def _note_news(self, context: RunContext, call: Call, news: OvertimeRequest | WindDown) -> None:
        """Write down what is decided about the time of the step while it runs."""
        if call.inside_of is context.call:
            self.state.overtime.append(context.redaction.value(describe_news(call, news)))
            if isinstance(news, WindDown) and news.fired is None:  # not by a clock of this one try
                context.wound_down.add(self._given["step"])
            if call.bound.owner == call.name:
                self.state.timeout_ms = call.bound.limit_ms

    # --- runs inside it -----------------------------------------------------------------------------------

    def _count_nested(self) -> dict[tuple[str, int], int]:
        """Return how many runs each item of the step has begun in its tries before."""
        tries = [part.get("attempts", 0) for part in self.state.parts] or [self.state.attempts]
        return {(self._given["step"], number): count for number, count in enumerate(tries)}

    async def _run_nested(self, nested: NestedRun, context: RunContext) -> Envelope:
        """Return the envelope of a run inside the step, where it has ended. Otherwise its workflow is to begin it, and
        the step waits as for a person: in no worker."""
        run_id, _ = name_nested_run(nested, context.run_id, context.nested_runs)
        known = self._given["nested"].get(run_id)
        if known is not None:
            return Envelope(known["data"], known["error"], known["warnings"], known["meta"])
        inner = await asyncio.to_thread(inner_workflow, nested.file, context.files, unattended=True)
        scope = current_scope.get()
        assert scope is not None, "steps are tried inside of a run"
        bell = scope.deadline
        inputs = check_inputs(inner, nested.inputs)
        own_env = {key: text for key, text in nested.env.items() if self._services.environment.get(key) != text}
        if read_key(os.environ) is None and any(map(looks_secret, own_env)):
            message = f"{nested.file}: its variables hold a secret, which would lie in Temporal's history"
            raise Failure("PRECONDITION", message, suggestion=f"give the workers {KEY_VARIABLE}")
        run = self._given["run"]
        self._wanted[run_id] = {
            "version": VERSION,
            "run_id": run_id,
            "name": inner.name or nested.file.stem,
            "file": identity(nested.file),
            "folder": str(nested.file.absolute().parent),
            "files": [*context.files, identity(nested.file)],
            "workflow": write_workflow(inner, inputs, context.environment),
            "inputs": inputs,
            "trace_id": run["trace_id"],
            "limit_ms": run_timeout_ms(inner) or 0,
            "deadline_at": None if bell is None else self._clock.at_ms(bell.at_ns),
            "deadline_owner": scope.name,
            "heartbeat_ms": self._given["heartbeat_ms"],
            "queue": run["queue"],
            "env": own_env,
            "is_extendable": True,
            "counts_from_acceptance": True,
        }
        step = scope.call
        if isinstance(step, Call) and step.clocks.timeout_ms:
            own_ns = step.started_ns + step.clocks.timeout_ms * NS_PER_MS
            self._wanted[run_id]["latest_at"] = self._clock.at_ms(own_ns)
        with context.person_wait.at_work(), context.person_wait.waits(run_id, ForeignProposal(run_id, {})):
            await nested.stop  # until the step is parked, which is now or when its other items have ended
        raise asyncio.CancelledError

    # --- holding on to it ---------------------------------------------------------------------------------

    async def _is_still_ours(self) -> bool:
        """Return whether the step may be begun, with its lease held. One that has come late may be somebody else's by
        now, so the engine is asked first; and so is it before the first step, whose delay nobody knows."""
        started_ns, at_ns = self._clock.started_ms * NS_PER_MS, self._clock.at_ns
        delay_ns = self._delays.measure(started_ns, at_ns)
        if delay_ns is not None and delay_ns <= self._limit_ns // BEATS:
            self._heard_ns = at_ns - delay_ns
        elif await self._ask_until(monotonic_ns() + int(self._limit_ns * STOP_SHARE)):
            self._delays.adopt(started_ns, at_ns)
        else:
            return False
        self._services.leases.hold(self, self._heard_ns, self._limit_ns)
        # Not if it was frozen meanwhile. From here on its guard sees to that.
        return monotonic_ns() < self._heard_ns + int(self._limit_ns * STOP_SHARE)

    async def _ask_until(self, by_ns: int) -> bool:
        """Return whether the engine says that the step is this worker's. An engine that is busy is asked again."""
        while not await self._beat(by_ns):
            if self._is_cut_off or monotonic_ns() >= by_ns:
                return False
            await asyncio.sleep(ASK_AGAIN_S)
        return True

    async def _hold(self, working: asyncio.Future[None]) -> None:
        """Tell the engine that the step is here, and stop it where that has not been heard for too long."""
        pause_s = self._limit_ns / BEATS / 1e9
        while True:
            stop_ns = self._heard_ns + int(self._limit_ns * STOP_SHARE)
            self._services.leases.hold(self, self._heard_ns, self._limit_ns)
            await asyncio.sleep(min(pause_s, max(0, stop_ns - monotonic_ns()) / 1e9))
            is_heard = await self._beat(stop_ns)
            if self._is_ordered_off:
                working.cancel()
            elif is_heard and not self._is_announced:
                await self._announce(pause_s)
            if self._is_cut_off or (not is_heard and monotonic_ns() >= stop_ns):
                self._is_cut_off = True
                await self._give_up(working)
                return

    async def _beat(self, by_ns: int) -> bool:
        """Tell the engine that the step is here, and return whether it has heard that. Bounded."""
        sent_ns = monotonic_ns()
        within, beat = timedelta(seconds=self._limit_ns / BEATS / 1e9), self._describe_beat()
        try:
            # Not only the call's own bound: it is made again where nobody answers.
            async with asyncio.timeout(max(0, by_ns - sent_ns) / 1e9):
                await self._handle.heartbeat(beat, rpc_timeout=within)
            # The SDK has a clock of its own for this, and takes a step that it hears nothing of for lost: five seconds
            # after the heartbeat time it would cancel it, and keep its reply to itself. It sends few of these.
            activity.heartbeat(beat)
        except AsyncActivityCancelledError:
            self._is_ordered_off = True
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:  # it is not ours any more
                self._is_cut_off = True
            return False
        except Exception:  # no answer in time, or anything else: it was not heard
            return False
        self._heard_ns = sent_ns
        return True

    async def _give_up(self, working: asyncio.Future[None]) -> None:
        """Have the step gone before somebody else starts it."""
        working.cancel()
        await asyncio.wait([working], timeout=self._limit_ns * (KILL_SHARE - STOP_SHARE) / 1e9)
        for call in list(calls_inside(self._run_call)) if self._run_call is not None else ():
            if call.work is not None:
                call.work.kill()
        # If that does not help either, the lease runs out, and with it the worker.

    async def _announce(self, within_s: float) -> None:
        """Tell the workflow where orders for the step are heard. Short steps have ended by now, and need none."""
        run_id, queue = self._given["run"]["run_id"], self._services.own_queue
        self._is_announced = True
        handle = self._services.client.get_workflow_handle(run_id)
        with contextlib.suppress(RPCError, TimeoutError):  # then it hears none
            async with asyncio.timeout(within_s):
                await handle.signal("hold", [self._given["step"], queue], rpc_timeout=timedelta(seconds=within_s))

    def _describe_beat(self) -> dict[str, Any]:
        """Return which try the step is in, and how the clocks of its calls stand, for those who look at the run."""
        own = [call for call in live_calls.values() if call.inside_of is self._run_call]
        shown = [control_channel.describe_call(call) for call in own[:CALLS_TOLD]]
        return {**self._describe_try(), "calls": self._redact(shown)}

    def _describe_try(self) -> dict[str, int]:
        """Return which try the step is in, and when that began, on the engine's clock."""
        state = self.state
        if state.attempts <= self._attempts_before:  # it has not begun
            return {"attempts": self._attempts_before + 1, "try_began_at": self._clock.now_ms() - self._used_before_ms}
        began_at = self._clock.at_ms(state.try_began_ns)
        if state.attempts == self._attempts_before + 1:
            began_at -= self._used_before_ms
        return {"attempts": state.attempts, "try_began_at": began_at}
