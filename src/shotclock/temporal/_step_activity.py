"""The activities of a worker: carry out a step, order a step, render the outputs of a run.

A worker sends heartbeats for its steps, and knows which of them have arrived. Once none has arrived for half of the
heartbeat timeout, it stops the step by itself, and its processes are gone before the engine gives the step to another
worker: so a step never runs twice at once, even behind a cut network. A frozen worker is killed by its guard. A step
that arrives late, as it does at a worker that was frozen, begins only if the engine confirms that it still belongs to
this worker.

AGENTS.md: a worker that is cut off stops before another begins.
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

from ..calls.call import Call, WindDown, admit
from ..calls.control import control_of, live_calls
from ..calls.control_channel import RunOrder, describe_call
from ..calls.runtime import Runtime
from ..core.envelope import Envelope
from ..core.errors import Failure, SideEffects
from ..core.limits import NS_PER_MS, Bound, ClockKind, Clocks, Deadline, Fired, WallTime, move_bell
from ..core.overtime import OvertimeRequest
from ..core.trace import TraceContext
from ..core.value_types import JsonObject, replace, value
from ..core.visible_text import looks_secret
from ..flows.check.lint import identity, inner_workflow
from ..flows.check.plan import FinallyReserve, run_timeout_ms
from ..flows.file.schema import WorkflowFile, check_inputs
from ..flows.run.run_context import Deadlines, ParallelSlots, PersonWait, RunContext, SharedParts
from ..flows.run.run_news import describe_news, move_steps
from ..flows.run.runs import name_nested_run, read_envelope, render_outputs
from ..flows.run.state import OutputsView, StepState, StepsView, redaction_for
from ..flows.run.step_attempt import trace_steps
from ..flows.run.step_executor import StepExecutor
from ..flows.run.step_log import OnStepOutput, RunLogs
from ..flows.run.step_renderer import StepRenderer
from ..flows.steps.provider import ForeignProposal, NestedRun, Providers, RunServices
from ..people.inbox import Inbox
from ..store.store import Store
from ..supervise.clock import monotonic_ns, wall_time
from ..supervise.kernel import DeadlineTimer
from ..worker.context import Scope, current_scope
from ._messages import (
    ORDER_ACTIVITY,
    OUTPUTS_ACTIVITY,
    STEP_ACTIVITY,
    VERSION,
    OrderInput,
    RunInput,
    StepInput,
    StepReply,
    pack_proposals,
    unpack_proposals,
)
from ._payloads import KEY_VARIABLE, find_json_limit, read_keys, write_workflow
from .step_tails import StepTails

BEATS = 8  # heartbeats per heartbeat timeout: a late one does no harm
# Parts of the heartbeat timeout: a cut-off step is stopped after the first and killed after the second. After the third
# the worker ends itself with all of its processes, because that did not help.
STOP_SHARE, KILL_SHARE, EXIT_SHARE = 0.5, 0.7, 0.85
GUARD_DELAY_NS = 100 * NS_PER_MS  # the guard kills a worker that has not ended itself by then, because it is frozen
# The pause before a step of another version is returned, so that the engine does not send it to and fro.
OTHER_VERSION_PAUSE_S = 0.5
ASK_AGAIN_S = 0.05  # the pause before a busy engine is asked again whether a step is still this worker's
MOST_CALLS = 10  # The calls of a step that a heartbeat describes. A step may have many items.


class EngineClock:
    """The engine's clock, known by the instant at which an activity was started."""

    def __init__(self) -> None:
        self.started_ms: int = int(activity.info().started_time.timestamp() * 1000)
        self.at_ns: int = monotonic_ns()

    def now_ms(self) -> int:
        return self.at_ms(monotonic_ns())

    def at_ms(self, at_ns: int) -> int:
        return self.started_ms + (at_ns - self.at_ns) // NS_PER_MS

    def deadline(self, at_ms: int) -> Deadline:
        return Deadline(self.at_ns + (at_ms - self.started_ms) * NS_PER_MS)

    def ahead_ms(self) -> int:
        return self.now_ms() - wall_time().ms


class StartDelays:
    """The delays of steps on their way to this worker, relative to the fastest: the engine's clock is not ours."""

    def __init__(self) -> None:
        self._least_ns: int | None = None

    def measure(self, clock: EngineClock) -> int | None:
        apart_ns = clock.at_ns - clock.started_ms * NS_PER_MS
        if self._least_ns is None:
            return None
        self._least_ns = min(self._least_ns, apart_ns)
        return apart_ns - self._least_ns

    def adopt(self, clock: EngineClock) -> None:
        """Compare with this step from now on: the engine confirmed it, or its clock was set back."""
        self._least_ns = clock.at_ns - clock.started_ms * NS_PER_MS


class Leases:
    """The instants at which the worker has to end, one for each of its steps, unless a heartbeat arrives."""

    def __init__(self) -> None:
        self._exits: dict[object, int] = {}
        self.timer: DeadlineTimer = DeadlineTimer()
        """Wakes the worker's guard, a process of its own, when the worker should have ended itself."""

    def hold(self, step: object, heard_ns: int, limit_ns: int) -> None:
        self._exits[step] = heard_ns + int(limit_ns * EXIT_SHARE)
        self._arm()

    def end(self, step: object) -> None:
        self._exits.pop(step, None)
        self._arm()

    def _arm(self) -> None:
        if self._exits:
            self.timer.arm(min(self._exits.values()) + GUARD_DELAY_NS)
        else:
            self.timer.disarm()

    @property
    def is_overdue(self) -> bool:
        now_ns = monotonic_ns()
        return any(now_ns >= exit_ns for exit_ns in list(self._exits.values()))


@value
class WorkerServices:
    client: Client
    runtime: Runtime
    store: Store
    inbox: Callable[[], Inbox]
    environment: Mapping[str, str]
    folder: Path | None  # the directory of steps whose file's own folder is not on this machine
    own_queue: str  # the queue of this worker alone, for orders to its steps
    leases: Leases
    own_variables: Mapping[str, str]
    """The worker's own credentials. No step sees them, and they are redacted from the output of steps."""


class Activities:
    def __init__(self, services: WorkerServices) -> None:
        self._services = services
        self._delays = StartDelays()
        self._under_way: dict[tuple[str, str], _StepWork] = {}

    @activity.defn(name=STEP_ACTIVITY)
    async def carry_out_step(self, step_input: JsonObject) -> JsonObject:
        if step_input["version"] != VERSION:  # another worker may have that version
            await asyncio.sleep(OTHER_VERSION_PAUSE_S)
            return {"state": step_input["state"], "lost": {}, "is_unbegun": True}
        work = _StepWork(step_input, self._services, EngineClock(), self._delays)  # type: ignore[arg-type]
        key = (step_input["run"]["run_id"], step_input["step"])
        self._under_way[key] = work
        try:
            return dict(await work.carry_out())
        finally:
            self._services.leases.end(work)
            if self._under_way.get(key) is work:
                del self._under_way[key]

    @activity.defn(name=ORDER_ACTIVITY)
    async def carry_out_order(self, order: JsonObject) -> JsonObject:
        work = self._under_way.get((order["run_id"], order["step"]))
        try:
            if work is None:
                raise Failure("CALL_NOT_FOUND", f"step {order['step']} is not here any more")
            return await work.obey(order)  # type: ignore[arg-type]
        except Failure as failure:
            raise ApplicationError(str(failure), type=failure.code, non_retryable=True) from None

    @activity.defn(name=OUTPUTS_ACTIVITY)
    async def render_outputs(self, request: JsonObject) -> JsonObject:
        workflow = WorkflowFile.model_validate({"steps": {"none": {"type": "command", "exec": "-"}}})
        async with _open_context(request["run"], workflow, EngineClock(), self._services) as context:
            scope = _make_scope(request, context)
            outputs, notes = await render_outputs(context, StepRenderer(context), request["outputs"], scope)
            return {"outputs": outputs, "warnings": notes, "is_cut_short": context.deadlines.have_fired}


def _make_scope(request: Mapping[str, Any], context: RunContext) -> JsonObject:
    states = {name: StepState.from_record(record) for name, record in request["visible"].items()}
    run = {"id": context.run_id, "name": request["run"]["name"], **request.get("last", {}).get("run", {})}
    fixed = {"inputs": request["run"]["inputs"], "env": context.base_env, "run": run}
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
    on_output: OnStepOutput | None = None,
) -> AsyncIterator[RunContext]:
    """Open the context of a run for one of its steps. This process has no other part of the run."""
    bell = None if run["deadline_at"] is None else clock.deadline(run["deadline_at"])
    # The call represents the run here. Its time counts from the beginning of the run.
    call = admit(f"run {run['name']}", Clocks(timeout_ms=0), caller=TraceContext(run["trace_id"]))
    call.time.started_ns = clock.deadline(run["began_at"]).at_ns
    call.time.bound = Bound(bell, call.bound.grace_ms, run["limit_ms"], call.name, bell)
    deadlines = make_deadlines(bell)
    environment = {**services.environment, **run["env"]}
    providers = Providers(RunServices(services.inbox, environment=environment))
    person_wait = PersonWait(0 if may_park else None)
    redaction = redaction_for(workflow, {**environment, **services.own_variables})
    token = current_scope.set(Scope(bell, -1, call.name, call, call=call))

    def get_fired() -> Fired:
        return replace(call.fired(ClockKind.TIMEOUT, monotonic_ns() - call.started_ns), kept_ms=deadlines.kept_ms)

    context = RunContext(
        run_id=run["run_id"],
        workflow=workflow,
        folder=_find_folder(run["folder"], services.folder),
        files=tuple(run["files"]),
        began_at=WallTime(run["began_at"] - clock.ahead_ms()),
        shared=SharedParts(services.store, services.runtime, providers, services.inbox, person_wait),
        slots=ParallelSlots(workflow.max_parallelism),
        deadlines=deadlines,
        environment=environment,
        base_env={name: value for name, value in environment.items() if not looks_secret(name)},
        redaction=redaction,
        call=call,
        get_fired=get_fired,
        logs=None if on_output is None else RunLogs(None, run["run_id"], redaction, on_output),
        json_limit=find_json_limit(os.environ),
    )
    try:
        yield context
    finally:
        current_scope.reset(token)
        await providers.close()


def _find_folder(of_file: str, here: Path | None) -> Path:
    """Return the folder of the file, or the worker's own if this machine does not have it."""
    return here if here is not None and not os.path.isdir(of_file) else Path(of_file)


class _StepWork:
    def __init__(
        self, step_input: StepInput, services: WorkerServices, clock: EngineClock, delays: StartDelays
    ) -> None:
        self._input = step_input
        self._services = services
        self._clock = clock
        self._delays = delays
        self._limit_ns = step_input["heartbeat_ms"] * NS_PER_MS
        self._heard_ns = monotonic_ns()
        self._handle = services.client.get_async_activity_handle(task_token=activity.info().task_token)
        self.state = StepState.from_record(step_input["state"])
        if self.state.cut_off_ms:
            self.state.cut_off_ms += max(0, clock.now_ms() - step_input["sent_at"])
            self.state.earlier_effects = SideEffects.UNKNOWN
        self._attempts_before, self._used_before_ms = self.state.attempts, self.state.cut_off_ms
        self._context: RunContext | None = None
        self._working: asyncio.Future[None] | None = None
        self._wanted: dict[str, RunInput] = {}  # the nested runs that the workflow has to begin
        self._tails = StepTails()
        self._is_announced = False
        self._is_ordered_off = False
        self._is_cut_off = False
        """No heartbeat has arrived for too long, or the worker is shutting down: another worker has to continue."""

    async def carry_out(self) -> StepReply:
        """Execute the step and return its state, even if it is cancelled. A step that another worker may have now is
        reported as lost, once its processes are gone."""
        replying = asyncio.ensure_future(self._execute())
        while not replying.done():
            try:
                await asyncio.wait([replying])  # bounded by the timeouts of the step, and by the grace of a stopped one
            except asyncio.CancelledError:  # at any moment, even while the step is being stopped for another reason
                self._handle_cancellation(activity.cancellation_details())
        return replying.result()

    def _handle_cancellation(self, details: activity.ActivityCancellationDetails | None) -> None:
        """Stop the step: its run was stopped, or the worker is shutting down, or the activity was paused or reset. The
        SDK and a heartbeat report it, in any order."""
        if details is not None and details.cancel_requested:
            self._is_ordered_off = True
        else:
            self._is_cut_off = True
        if self._working is not None:
            self._working.cancel()

    async def _execute(self) -> StepReply:
        step_input = self._input
        if not await self._is_still_ours() or self._is_cut_off:
            return {"state": step_input["state"], "lost": self._describe_attempt(), "is_unbegun": True}
        if self._is_ordered_off:
            return {"state": step_input["state"], "is_cancelled": True}
        workflow, name = WorkflowFile.model_validate(step_input["workflow"]), step_input["step"]
        unpack_proposals(step_input["proposals"], self._services.store, self._clock.ahead_ms())
        async with _open_context(
            step_input["run"],
            workflow,
            self._clock,
            self._services,
            self._make_deadlines,
            may_park=step_input["may_park"],
            on_output=self._tails.add,
        ) as context:
            self._context = context
            executor = StepExecutor(context, lambda nested: self._run_nested(nested, context))
            attempts = [part.get("attempts", 0) for part in self.state.parts] or [self.state.attempts]
            context.nested_runs.update({(name, number): count for number, count in enumerate(attempts)})
            control_of(context.call).on_change = partial(self._handle_news, context)
            live_calls.enter(context.call)
            execute = trace_steps(executor.execute, context.deadlines.of)
            scope = _make_scope(step_input, context)
            working = asyncio.ensure_future(execute(name, workflow.steps[name], self.state, scope))
            self._working = working
            holding = asyncio.ensure_future(self._hold(working))
            try:
                await asyncio.wait([working, context.shared.person_wait.parked], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not working.done():
                    working.cancel()
                    await asyncio.wait([working])  # bounded: a cancelled step is killed after its grace
                holding.cancel()
                await asyncio.wait([holding])
                self._services.leases.end(self)
                live_calls.leave(context.call)
            reply = self._reply(working, context)
            if printed := self._tails.describe():
                reply["printed"] = printed
            return reply

    def _make_deadlines(self, bell: Deadline | None) -> Deadlines:
        clean_up = frozenset([self._input["step"]] if self._input["is_clean_up"] else ())
        last = self._input.get("last", {})
        reserve = FinallyReserve(last.get("reserve_ms", 0))
        deadlines = Deadlines(bell, self._input["kept_ms"] - reserve.ms, clean_up, reserve)
        if "by" in last:
            deadlines.end_finally_at(None if last["by"] is None else self._clock.deadline(last["by"]))
        if self._input["clean_up_by"] is not None:
            deadlines.begin_clean_up(monotonic_ns(), max(1, self._input["clean_up_by"] - self._clock.now_ms()))
        return deadlines

    def _reply(self, working: asyncio.Future[None], context: RunContext) -> StepReply:
        if not working.cancelled():
            working.result()
            return {"state": self.state.to_record()}
        if self._is_cut_off:
            return {"state": self._input["state"], "lost": self._describe_attempt()}
        if context.shared.person_wait.parked.done() and not self._is_ordered_off:
            waiting = [each for each in context.shared.person_wait.parked_on.values() if each.id not in self._wanted]
            proposals = pack_proposals(self._input["step"], waiting, self._services.store, self._clock.ahead_ms())
            state, nested = self.state.to_parked().to_record(), list(self._wanted.values())
            return {"state": state, "is_parked": True, "proposals": proposals, "nested": nested}
        return {"state": self.state.to_record(), "is_cancelled": True}

    async def obey(self, order: OrderInput) -> JsonObject:
        if "deadline_at" in order:
            return self._follow_run(order["deadline_at"])
        calls = self._own_calls()
        if not calls:
            raise Failure("CALL_NOT_FOUND", f"step {self._input['step']} does not run at this moment")
        limits = order["by_ms"], order["within_ms"], order["reason"]
        return await RunOrder("", None, order["who"], *limits).act_on(calls)

    def _own_calls(self) -> list[Call]:
        run = None if self._context is None else self._context.call
        return [] if run is None else live_calls.made_by(run)

    def _follow_run(self, deadline_at: int) -> JsonObject:
        if self._context is not None and (bell := self._context.call.bound.bell) is not None:
            run = self._context.call
            later_ms = (self._clock.deadline(deadline_at).at_ns - bell.at_ns) // NS_PER_MS
            if (moved := move_bell(run.bound, later_ms, None, None)) is not None:
                run.time.bound = moved
                move_steps(run, self._context.deadlines)
        return {}

    def _handle_news(self, context: RunContext, call: Call, news: OvertimeRequest | WindDown) -> None:
        if call.inside_of is context.call:
            self.state.overtime.append(context.redaction.value(describe_news(call, news)))
            if isinstance(news, WindDown) and news.fired is None:  # not by a limit of this one attempt
                context.winding_down.add(self._input["step"])
            if call.bound.owner == call.name:
                self.state.timeout_ms = call.bound.limit_ms

    async def _run_nested(self, nested: NestedRun, context: RunContext) -> Envelope:
        """Return the envelope of an ended nested run. Otherwise park the step until the workflow has run it."""
        run_id, _ = name_nested_run(nested, context)
        if (ended := self._input["nested"].get(run_id)) is not None:
            return read_envelope(ended)
        inner = await asyncio.to_thread(inner_workflow, nested.file, context.files, unattended=True)
        scope = current_scope.get() or Scope(None, -1, context.call.name, context.call, call=context.call)
        bell, step, latest_at = scope.deadline, scope.call, None
        if isinstance(step, Call) and step.clocks.timeout_ms:
            latest_at = self._clock.at_ms(step.started_ns + step.clocks.timeout_ms * NS_PER_MS)
        inputs = check_inputs(inner, nested.inputs)
        own_env = {key: text for key, text in nested.env.items() if self._services.environment.get(key) != text}
        if not read_keys(os.environ) and any(map(looks_secret, own_env)):
            message = f"{nested.file}: its variables hold a secret, which would lie in Temporal's history"
            raise Failure("PRECONDITION", message, suggestion=f"give the workers {KEY_VARIABLE}")
        run = self._input["run"]
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
            "caller_ms": None,
            "deadline_at": None if bell is None else self._clock.at_ms(bell.at_ns),
            "deadline_owner": scope.name,
            "latest_at": latest_at,
            "heartbeat_ms": self._input["heartbeat_ms"],
            "queue": run["queue"],
            "env": own_env,
            "attributes": [],
        }
        with (
            context.shared.person_wait.at_work(),
            context.shared.person_wait.waits(run_id, ForeignProposal(run_id, {})),
        ):
            await nested.stop  # until the step is parked, which is now or when its other items have ended
        raise asyncio.CancelledError

    async def _is_still_ours(self) -> bool:
        """Return whether the step may begin, and hold its lease. The engine is asked about a late step, which may
        belong to another worker, and about the first one, whose delay is unknown.
        """
        delay_ns = self._delays.measure(self._clock)
        if delay_ns is not None and delay_ns <= self._limit_ns // BEATS:
            self._heard_ns = self._clock.at_ns - delay_ns
        elif await self._ask_until(monotonic_ns() + int(self._limit_ns * STOP_SHARE)):
            self._delays.adopt(self._clock)
        else:
            return False
        self._services.leases.hold(self, self._heard_ns, self._limit_ns)
        # Not if the worker was frozen meanwhile. From here on its guard ensures that.
        return monotonic_ns() < self._heard_ns + int(self._limit_ns * STOP_SHARE)

    async def _ask_until(self, by_ns: int) -> bool:
        """Return whether the engine confirms that the step belongs to this worker. A busy engine is asked again."""
        while not await self._beat(by_ns):
            if self._is_cut_off or monotonic_ns() >= by_ns:
                return False
            await asyncio.sleep(ASK_AGAIN_S)
        return True

    async def _hold(self, working: asyncio.Future[None]) -> None:
        pause_s = self._limit_ns / BEATS / 1e9
        while True:
            stop_ns = self._heard_ns + int(self._limit_ns * STOP_SHARE)
            self._services.leases.hold(self, self._heard_ns, self._limit_ns)
            await asyncio.sleep(min(pause_s, max(0, stop_ns - monotonic_ns()) / 1e9))
            has_arrived = await self._beat(stop_ns)
            if has_arrived and not self._is_ordered_off and not self._is_announced:
                await self._announce(pause_s)
            if self._is_cut_off or (not has_arrived and monotonic_ns() >= stop_ns):
                self._is_cut_off = True
                await self._give_up(working)
                return

    async def _beat(self, by_ns: int) -> bool:
        sent_ns = monotonic_ns()
        within, beat = timedelta(seconds=self._limit_ns / BEATS / 1e9), self._describe_beat()
        try:
            # The RPC's own timeout is not enough: the SDK repeats the RPC if it is not answered.
            async with asyncio.timeout(max(0, by_ns - sent_ns) / 1e9):
                await self._handle.heartbeat(beat, rpc_timeout=within)
            # The SDK has its own timer: five seconds after the heartbeat timeout it would cancel a step without
            # heartbeats, and drop its reply. It sends few of these.
            activity.heartbeat(beat)
        except AsyncActivityCancelledError as error:
            self._handle_cancellation(error.details)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:  # the step is not ours any more
                self._is_cut_off = True
            return False
        except Exception:  # no answer in time, or any other error: it has not arrived
            return False
        self._heard_ns = sent_ns
        return True

    async def _give_up(self, working: asyncio.Future[None]) -> None:
        """Stop and kill the step before another worker starts it. If that fails, the lease ends the worker."""
        working.cancel()
        await asyncio.wait([working], timeout=self._limit_ns * (KILL_SHARE - STOP_SHARE) / 1e9)
        for call in list(live_calls.inside(self._context.call)) if self._context is not None else ():
            if call.work is not None:
                call.work.kill()

    async def _announce(self, within_s: float) -> None:
        """Send the workflow the queue for orders to this step. Short steps have ended by now, and need none."""
        run_id, queue = self._input["run"]["run_id"], self._services.own_queue
        self._is_announced = True
        handle = self._services.client.get_workflow_handle(run_id)
        with contextlib.suppress(RPCError, TimeoutError):  # then it receives no orders
            async with asyncio.timeout(within_s):
                await handle.signal("hold", [self._input["step"], queue], rpc_timeout=timedelta(seconds=within_s))

    def _describe_beat(self) -> JsonObject:
        shown = [describe_call(call) for call in self._own_calls()[:MOST_CALLS]]
        calls = shown if self._context is None else self._context.redaction.value(shown)
        return {**self._describe_attempt(), "calls": calls, "printed": self._tails.describe()}

    def _describe_attempt(self) -> dict[str, int]:
        state = self.state
        if state.attempts <= self._attempts_before:  # it has not begun
            return {"attempts": self._attempts_before + 1, "try_began_at": self._clock.now_ms() - self._used_before_ms}
        began_at = self._clock.at_ms(state.attempt_began_ns)
        if state.attempts == self._attempts_before + 1:
            began_at -= self._used_before_ms
        return {"attempts": state.attempts, "try_began_at": began_at}
