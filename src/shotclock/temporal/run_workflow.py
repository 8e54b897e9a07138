"""A run as a workflow of Temporal: the scheduler of every run, activities for its steps, history for its record.

Deterministic: it reads no clock but the workflow's, and what it decides follows from history alone. The deadline of the
run is an instant on that clock, fixed when the engine accepts the run.

Temporal never tries a step again by itself. A worker that is lost is found out by its silence; what becomes of its step
is decided here, as for a process that died: it is run again in what is left of its time where that does no harm.

docs/design.md: R57.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy, SearchAttributeKey
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    TimeoutError,
    TimeoutType,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from ..core.clocks import (
        DEFAULT_WIND_DOWN_MS,
        MAX_MS,
        NS_PER_MS,
        Bound,
        ClockKind,
        Clocks,
        Deadline,
        Fired,
        latest_bell,
        move_bell,
        nest,
    )
    from ..core.envelope import Problem, stop_problem
    from ..core.errors import Ending, SideEffects
    from ..core.overtime import Overtime, OvertimeRequest
    from ..core.trace import TraceContext
    from ..core.value_types import fields_of, replace
    from ..providers.provider import STEP_TYPES, StepPart
    from ..runtime.call import DEFAULT_CLOCKS, Call, Outcome, WindDown, answer_at
    from ..workflow.plan import clean_up_steps, grace_ms, kept_for_clean_up_ms, may_run_again, most_tries, plan_of
    from ..workflow.scheduler import Deadlines, ParallelSlots, RunLimits, Scheduler
    from ..workflow.schema import WorkflowFile
    from ..workflow.state import Status, StepState, describe_steps, effects_of, judge_steps
    from .messages import (
        ORDER_ACTIVITY,
        OUTPUTS_ACTIVITY,
        RUN_WORKFLOW,
        STEP_ACTIVITY,
        VERSION,
        Order,
        RunInput,
        StepInput,
        StepReply,
        select_visible,
        slice_workflow,
    )
    from .search_attributes import describe_beginning, describe_end, describe_progress, list_updates

    for _name in STEP_TYPES:  # or each would be imported anew when a file has such a step
        STEP_TYPES[_name]

# What a worker takes beyond a step's own time to see its tree gone and to say so.
REPLY_MARGIN_MS = 5_000
# The backstop above a step: twice what the file lets it take, and what an operator may give it on top.
GIFT_MS = 3_600_000
# Rendering the outputs of a run is bounded by the templates' own clock; this is for a worker that dies meanwhile.
OUTPUTS_LIMIT_S = 60
# What a worker may take to answer an order. It holds up nothing: without an answer nothing changes.
ORDER_LIMIT_S = 10
# What is kept of the engine's limit of a run for its clean-up.
CLEAN_UP_MS = 360_000
# What is kept of the run's time to learn from a step that it had no more.
LAST_WORD_MS = 1_000
# Why a run has ended that was cancelled through Temporal, in place of a signal's name.
CANCEL = "cancel"
ONCE = RetryPolicy(maximum_attempts=1)

T = TypeVar("T")


@workflow.defn(name=RUN_WORKFLOW)
class RunWorkflow:
    """One run, from its first step to its envelope."""

    @workflow.init
    def __init__(self, given: RunInput) -> None:
        if given["version"] > VERSION:  # this fails the task, not the run: another worker may have that version
            raise RuntimeError(f"a later version started the run (messages {given['version']}, here {VERSION})")
        self._given = given
        self._workflow = WorkflowFile.model_validate(given["workflow"])
        info = workflow.info()
        began = info.workflow_start_time if given.get("counts_from_acceptance") else info.start_time
        self._began_ns = int(began.timestamp() * 1000) * NS_PER_MS
        self._parent = self._find_parent()
        self._own_ms = given["limit_ms"]
        """The limit of its own, with what it was given on top."""
        self._call = self._admit()
        self._kept_ms = kept_for_clean_up_ms(self._workflow, self._call.bound.limit_ms)
        self._clean_up = clean_up_steps(self._workflow)
        self._deadlines = Deadlines(self._call.bound.bell, self._kept_ms, self._clean_up)
        self._plan = plan_of(self._workflow)
        self._ended_by: str | None = None
        self._waiting: dict[str, dict[str, Any]] = {}
        """What people are asked, by the id of the proposal."""
        self._decided: dict[str, dict[str, Any]] = {}
        """What has become of those that were decided or have expired, without what was asked."""
        self._holders: dict[str, str] = {}
        """The queues at which orders for steps are heard that have run for a while."""
        self._under_way: dict[str, _UnderWay] = {}
        """The steps that a worker has, or is to take."""
        self._attributes = given.get("attributes", [])
        self._shown: dict[str, Any] = {"ShotclockStatus": "running", "ShotclockStep": []}
        """The search attributes that are set."""
        self._children: dict[str, str] = {}
        """The runs inside this one that have not ended, with the step of each."""
        self._child_deadlines: dict[str, _ChildDeadline] = {}
        self._scheduler = Scheduler(
            self._workflow,
            execute=self._execute,
            record=self._record,
            scope={},
            limits=RunLimits(
                ParallelSlots(self._workflow.max_parallelism), self._deadlines, self._began_ns, workflow.time_ns
            ),
        )

    def _find_parent(self) -> Deadline | None:
        """Return the deadline of whoever started the run: never more than that."""
        given = self._given
        if given["deadline_at"] is not None:
            return Deadline(given["deadline_at"] * NS_PER_MS)
        caller_ms = given.get("caller_ms")
        return None if caller_ms is None else Deadline(self._began_ns + caller_ms * NS_PER_MS)

    def _admit(self) -> Call:
        """Begin the call of the run, at the instant at which its workflow was started."""
        given = self._given
        clocks = Clocks(timeout_ms=given["limit_ms"]).over(DEFAULT_CLOCKS)
        parent = None if given["deadline_at"] is None else Deadline(given["deadline_at"] * NS_PER_MS)
        name = f"run {given['name']}"
        bound = nest(
            self._began_ns,
            timeout_ms=given["limit_ms"],
            grace_ms=clocks.grace_ms or 0,
            owner=name,
            parent=parent,
            parent_owner=given["deadline_owner"],
        )
        request_id = f"{workflow.uuid4().hex[:12]}-1"
        return Call(name, clocks, bound, self._began_ns, request_id, TraceContext(given["trace_id"]))

    @workflow.run
    async def run(self, given: RunInput) -> dict[str, Any]:
        """Run the steps and return the envelope. A run that is not `ok` fails its workflow, with the envelope as the
        detail of the failure."""
        broken: Exception | None = None
        working = asyncio.get_running_loop().create_task(self._scheduler.run())
        while not working.done():
            try:
                await asyncio.shield(working)  # bounded by the clocks of the steps
            except asyncio.CancelledError:
                self.stop(CANCEL)
            except Exception as error:  # ours
                broken = error
        outputs: dict[str, Any] = {}
        if self._ended_by is None and broken is None and self._workflow.outputs:
            outputs = await self._render_outputs()
        outcome = self._judge(outputs, broken)
        outcome.warnings = tuple(self._scheduler.notes)
        outcome.side_effects = effects_of(self._scheduler.states.values())
        envelope = answer_at(self._call, outcome, workflow.time_ns()).to_dict()
        self._set_attributes(describe_end(envelope, [state.error for state in self._scheduler.states.values()]))
        if envelope["ok"]:
            return envelope
        why: Any = envelope["error"]
        raise ApplicationError(str(why["message"]), envelope, type=str(why["code"]), non_retryable=True)

    def _judge(self, outputs: dict[str, Any], broken: Exception | None) -> Outcome:
        states = self._scheduler.states
        data = describe_steps(self._given["run_id"], self._given["name"], states)
        if outputs:
            data["outputs"] = outputs
        if broken is not None:
            problem = Problem("INTERNAL_ERROR", f"{type(broken).__name__}: {broken}")
            return Outcome(Ending.KILLED, problem, {**data, "partial": True})
        if self._ended_by == CANCEL:
            problem = Problem("CANCELLED", "the run was cancelled", exit_code=143)
            return Outcome(Ending.CANCELLED, problem, {**data, "partial": True})
        if self._ended_by is not None:
            return Outcome(Ending.KILLED, stop_problem(self._ended_by), {**data, "partial": True})
        bound = self._call.bound
        elapsed_ms = (workflow.time_ns() - self._began_ns) // NS_PER_MS
        return judge_steps(
            self._call,
            states,
            data,
            is_out_of_time=self._deadlines.have_rung,
            find_fired=lambda: Fired(ClockKind.TIMEOUT, bound.owner, bound.limit_ms, elapsed_ms, kept_ms=self._kept_ms),
        )

    async def _render_outputs(self) -> dict[str, Any]:
        """Have a worker render the outputs of the run. What cannot be rendered is nothing, with a warning."""
        states = self._scheduler.states
        visible = select_visible(self._workflow, _NO_STEP, {"outputs": dict(self._workflow.outputs)}, states)
        given = {"run": self._describe_run(), "outputs": dict(self._workflow.outputs), "visible": visible}
        reply: dict[str, Any] = await workflow.execute_activity(
            OUTPUTS_ACTIVITY,
            given,
            result_type=dict,
            start_to_close_timeout=timedelta(seconds=OUTPUTS_LIMIT_S),
            retry_policy=RetryPolicy(maximum_attempts=3),
            summary="outputs",
        )
        self._scheduler.notes += reply["warnings"]
        if reply["is_cut_short"]:
            self._deadlines.note_cut_short("")
        outputs: dict[str, Any] = reply["outputs"]
        return outputs

    # --- one step -----------------------------------------------------------------------------------------

    async def _execute(self, name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        try:
            await self._execute_until_over(name, step, state)
        finally:
            self._under_way.pop(name, None)
            if self._holders.pop(name, None) is not None:
                self._show_progress()

    async def _execute_until_over(self, name: str, step: StepPart, state: StepState) -> None:
        """Have a worker carry out a step, and leave its state final. A cancellation is passed on."""
        known = _Known([], {})
        while True:
            try:
                reply = await self._carry_out(name, step, state, known)
            except ActivityError as error:
                if _is_cancelled() or is_cancelled_exception(error):
                    if is_cancelled_exception(error):  # nobody had taken it: whoever had answers with its state
                        state.side_effects = SideEffects.NONE
                    raise asyncio.CancelledError from error
                if self._is_over_without_worker(name, step, state, error):
                    return
                continue
            started_ms = state.started_ms
            _replace_state(state, StepState.from_record(reply["state"]))
            if reply.get("is_cancelled"):
                raise asyncio.CancelledError  # with what it had said until then
            if (lost := reply.get("lost")) is not None:
                if reply.get("is_unbegun"):
                    state.status, state.started_ms = Status.RUNNING, started_ms
                elif self._is_over_with_lost_worker(step, state, lost):
                    return
                continue
            if not reply.get("is_parked"):
                if state.is_cut_short:
                    self._deadlines.note_cut_short(name)
                return
            state.status, state.started_ms = Status.RUNNING, started_ms
            await self._wait_for_others(name, reply, known)
            if _is_cancelled():  # the runs inside it have ended, and so does it
                raise asyncio.CancelledError

    async def _carry_out(self, name: str, step: StepPart, state: StepState, known: _Known) -> StepReply:
        deadline, heartbeat_ms = self._deadlines.of(name), self._given["heartbeat_ms"]
        now_ns = workflow.time_ns()
        left_ms = None if deadline is None else max(1, deadline.remaining_ms(now_ns))
        own_ms, run_ms = self._backstops_ms(name, step, left_ms)
        backstop_ms = min(own_ms, run_ms)
        # One that is its own is behind all that the step may take, however long the run is.
        end = Deadline(now_ns + run_ms * NS_PER_MS) if run_ms < own_ms else None
        self._under_way[name] = _UnderWay(self._call.bound.bell, end)
        reply: StepReply = await workflow.execute_activity(
            STEP_ACTIVITY,
            self._describe_step(name, step, state, known),
            result_type=dict,
            task_queue=step.runs_on,
            schedule_to_start_timeout=None if left_ms is None else timedelta(milliseconds=left_ms),
            start_to_close_timeout=timedelta(milliseconds=backstop_ms + REPLY_MARGIN_MS),
            heartbeat_timeout=timedelta(milliseconds=heartbeat_ms),
            retry_policy=ONCE,
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            summary=name,
        )
        return reply

    def _backstops_ms(self, name: str, step: StepPart, left_ms: int | None) -> tuple[int, int]:
        """Return after how long a step is given up whose worker lives and does not end it: by its own clocks, and by
        what is left of the run."""
        planned = self._plan.step(name)
        most = MAX_MS
        if planned.worst_ms and not planned.is_per_item:
            most = 2 * (planned.worst_ms + planned.attempts * grace_ms(self._workflow, step)) + GIFT_MS
        if left_ms is None:
            return most, MAX_MS
        return most, left_ms + (GIFT_MS if self._given.get("is_extendable") else 0)

    def _describe_run(self) -> dict[str, Any]:
        given, bell = self._given, self._call.bound.bell
        kept: Sequence[str] = ("run_id", "name", "file", "folder", "files", "trace_id", "inputs", "env", "queue")
        return {
            **{key: given[key] for key in kept},  # type: ignore[literal-required]
            "began_at": self._began_ns // NS_PER_MS,
            "limit_ms": self._call.bound.limit_ms,
            "deadline_at": None if bell is None else bell.at_ns // NS_PER_MS,
        }

    def _describe_step(self, name: str, step: StepPart, state: StepState, known: _Known) -> StepInput:
        written = self._given["workflow"]
        part = slice_workflow(self._workflow, written, name)
        by, is_clean_up = self._deadlines.of(name), name in self._clean_up
        return {
            "version": VERSION,
            "run": self._describe_run(),
            "workflow": part,
            "step": name,
            "state": state.to_record(),
            "visible": select_visible(self._workflow, step, part, self._scheduler.states),
            "kept_ms": self._kept_ms,
            "clean_up_by": by.at_ns // NS_PER_MS if is_clean_up and by is not None else None,
            "is_clean_up": is_clean_up,
            "heartbeat_ms": self._given["heartbeat_ms"],
            "sent_at": workflow.time_ns() // NS_PER_MS,
            "proposals": known.proposals,
            "nested": known.nested,
            "may_park": known.may_park,
        }

    # --- without a worker ---------------------------------------------------------------------------------

    def _is_over_without_worker(self, name: str, step: StepPart, state: StepState, error: ActivityError) -> bool:
        """Decide about a step whose worker is gone, or that none has taken. Return whether that was its end."""
        cause = error.cause
        kind = cause.type if isinstance(cause, TimeoutError) else None
        if kind is TimeoutType.SCHEDULE_TO_START:
            if self._under_way[name].bell is not self._call.bound.bell:  # the run has more time than it had then
                return False
            self._note_untaken(name, state)
            return True
        if kind is not TimeoutType.HEARTBEAT:  # the backstop, or an error of ours
            code = "TIMEOUT" if kind is not None else "INTERNAL_ERROR"
            message = f"its worker did not end it: {cause or error}"
            state.error = {"code": code, "message": message, "retryable": False, "phase": "execution"}
            state.status = Status.TIMED_OUT if kind is not None else Status.FAILED
            state.attempts, state.side_effects = state.attempts + 1, SideEffects.UNKNOWN
            return True
        assert isinstance(cause, TimeoutError)
        heard: dict[str, int] = cause.last_heartbeat_details[0] if cause.last_heartbeat_details else {}
        return self._is_over_with_lost_worker(step, state, heard)

    def _note_untaken(self, name: str, state: StepState) -> None:
        state.status, state.side_effects, state.is_cut_short = Status.TIMED_OUT, SideEffects.NONE, True
        self._deadlines.note_cut_short(name)
        fired = Fired(ClockKind.TIMEOUT, self._call.name, self._call.bound.limit_ms, self._elapsed_ms())
        message = f"no worker has taken step {name} before the {self._call.name}'s time was over"
        context = {"rule": f"{state.type}/timeout", "clock": fired.as_context()}
        state.ending = Ending.NOT_STARTED.value
        state.error = {
            "code": "NO_TIME_LEFT", "message": message, "retryable": True, "phase": "validation", "context": context
        }  # fmt: skip

    def _is_over_with_lost_worker(self, step: StepPart, state: StepState, heard: dict[str, int]) -> bool:
        """Put a step off to be run again in what is left of its time, if that does no harm; else interrupt it.
        `heard` is the last that its worker has said of it."""
        now_ms = workflow.time_ns() // NS_PER_MS
        # Without a word of it, it is silent since it began.
        began_ms = heard.get("try_began_at", now_ms - self._given["heartbeat_ms"])
        state.attempts = max(state.attempts, heard.get("attempts", 1) - 1)
        started_ms = state.started_ms
        judged = state.after_cut_off(is_harmless=may_run_again(self._workflow, step))
        _replace_state(state, judged)
        if judged.status is Status.INTERRUPTED:
            state.side_effects = SideEffects.UNKNOWN
            return True
        state.status, state.has_begun, state.started_ms = Status.RUNNING, False, started_ms
        if self._plan.step(state.id).is_per_item:  # each item has its own time
            return False
        used_ms, limit_ms = max(0, now_ms - began_ms), state.timeout_ms or 0
        if limit_ms and used_ms >= limit_ms and not STEP_TYPES[step.type].can_repeat:
            return self._is_over_after_its_time(step, state, used_ms)
        state.cut_off_ms = used_ms if limit_ms else 0
        return False

    def _is_over_after_its_time(self, step: StepPart, state: StepState, used_ms: int) -> bool:
        """End a try whose time was over before its worker was missed: its tree has died with the worker."""
        state.cut_off -= 1  # it is one of the tries that the file allows
        if state.attempts - state.cut_off < most_tries(self._workflow, step):
            return False
        fired = Fired(ClockKind.TIMEOUT, f"step {state.id}", state.timeout_ms or 0, used_ms)
        context = {"rule": f"{state.type}/timeout", "clock": fired.as_context()}
        message = "its worker was lost, and its time was over before another could take it"
        state.status, state.side_effects, state.ending = Status.TIMED_OUT, SideEffects.UNKNOWN, Ending.KILLED.value
        state.error = {
            "code": "TIMEOUT", "message": message, "retryable": False, "phase": "execution", "context": context
        }  # fmt: skip
        return True

    def _elapsed_ms(self) -> int:
        return (workflow.time_ns() - self._began_ns) // NS_PER_MS

    # --- people -------------------------------------------------------------------------------------------

    async def _wait_for_others(self, name: str, reply: StepReply, known: _Known) -> None:
        """Wait until a person has decided about the step, or the runs inside it have ended. No worker waits."""
        nested = reply.get("nested") or []
        if nested:
            # All of them: the items of a step run beside each other.
            ended = await _gather([self._run_nested(name, each) for each in nested])
            known.nested |= {each["run_id"]: envelope for each, envelope in zip(nested, ended, strict=True)}
            known.proposals = reply["proposals"]
        else:
            known.proposals = await self._wait_for_people(name, reply["proposals"])
            # Nobody has decided, and the run's time is as good as over: the step is to say so, not to wait again.
            known.may_park = any(proposal["status"] != "pending" for proposal in known.proposals)

    async def _run_nested(self, name: str, given: RunInput) -> dict[str, Any]:
        """Run a file as a workflow of its own inside this one, and return its envelope."""
        given = {**given, "heartbeat_ms": self._given["heartbeat_ms"], "queue": self._given["queue"]}
        if self._attributes:
            given["attributes"] = self._attributes
        self._children[given["run_id"]] = name
        if given["deadline_at"] is not None and given["deadline_owner"] != f"step {name}":
            self._child_deadlines[given["run_id"]] = _ChildDeadline(given["deadline_at"], given.get("latest_at"))
        try:
            envelope: dict[str, Any] = await workflow.execute_child_workflow(
                RUN_WORKFLOW,
                given,
                id=given["run_id"],
                result_type=dict,
                task_timeout=workflow.info().task_timeout,
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                cancellation_type=workflow.ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
                static_summary=given["name"],
                search_attributes=describe_beginning(given["name"], self._attributes),
            )
            return envelope
        except ChildWorkflowError as error:
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.details:
                ended: dict[str, Any] = cause.details[0]
                return ended
            raise
        finally:
            del self._children[given["run_id"]]
            self._child_deadlines.pop(given["run_id"], None)

    async def _wait_for_people(self, name: str, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Wait until one of the proposals is decided or expires, or the run has no more time. No worker waits before
        that."""
        ids = [proposal["id"] for proposal in asked]
        self._waiting |= {proposal["id"]: proposal for proposal in asked}
        self._show_progress()
        try:
            while not self._is_decided(ids):  # or the run has more time than it had
                await self._wait_for_decision(name, ids)
        except builtins.TimeoutError:
            now_ms = workflow.time_ns() // NS_PER_MS
            for id in ids:
                if self._waiting[id]["expires_at"] <= now_ms:
                    self._waiting[id] = {**self._waiting[id], "status": "expired"}
        finally:
            decided = [self._waiting.pop(id) for id in ids]
            for each in decided:
                if each["status"] != "pending" and "record" in each:
                    record = {**each["record"], "status": each["status"]}
                    self._decided[each["id"]] = {key: record[key] for key in record if key != "ask"}
            self._show_progress()
        return decided

    def _is_decided(self, ids: list[str]) -> bool:
        return any(self._waiting[id]["status"] != "pending" for id in ids)

    async def _wait_for_decision(self, name: str, ids: list[str]) -> None:
        """Wait until a proposal is decided, or the run is given more time. Raises TimeoutError when one expires, or
        the time of the run is as good as over."""
        bell, deadline = self._call.bound.bell, self._deadlines.of(name)
        now_ms = workflow.time_ns() // NS_PER_MS
        ends = [self._waiting[id]["expires_at"] for id in ids]
        if deadline is not None:
            ends.append(deadline.at_ns // NS_PER_MS - LAST_WORD_MS)
        await workflow.wait_condition(
            lambda: self._is_decided(ids) or self._call.bound.bell is not bell,
            timeout=timedelta(milliseconds=max(1, min(min(ends) - now_ms, MAX_MS))),
            timeout_summary=f"{name} waits for a person",
        )

    @workflow.update
    def decide(self, proposal: dict[str, Any]) -> dict[str, Any]:
        """Take a proposal as somebody has decided it."""
        self._waiting[proposal["id"]] = proposal
        return proposal

    @decide.validator
    def _check_decision(self, proposal: dict[str, Any]) -> None:
        known = self._waiting.get(proposal["id"])
        if known is None or known["status"] != "pending":
            raise ApplicationError(f"{proposal['id']} is not open any more", type="ALREADY_DECIDED")

    # --- from outside -------------------------------------------------------------------------------------

    @workflow.signal
    def stop(self, by: str) -> None:
        """Stop the run and clean up. `by` is the name of a signal, or `cancel`."""
        if self._ended_by is None:
            self._ended_by = by
            self._scheduler.stop()

    @workflow.signal(unfinished_policy=workflow.HandlerUnfinishedPolicy.ABANDON)
    async def hold(self, told: list[str]) -> None:
        """Note at which queue orders for a step are heard, by the worker that has it."""
        step, queue = told
        self._holders[step] = queue
        self._show_progress()
        await self._tell_of_bell(step)

    @workflow.signal(unfinished_policy=workflow.HandlerUnfinishedPolicy.ABANDON)
    async def follow(self, deadline_at: int) -> None:
        """Take the later deadline of the run around this one: the bell moves along, as far as its own limit allows."""
        parent, bound = Deadline(deadline_at * NS_PER_MS), self._call.bound
        if self._parent is None or bound.bell is None or parent.at_ns <= self._parent.at_ns:
            return
        self._parent = parent
        latest = latest_bell(parent, self._began_ns)
        assert latest is not None
        own = Deadline(self._began_ns + self._own_ms * NS_PER_MS) if self._own_ms else None
        is_own = own is not None and own.at_ns <= latest.at_ns
        until = own if own is not None and is_own else latest
        moved = move_bell(bound, (until.at_ns - bound.bell.at_ns) // NS_PER_MS, latest, parent)
        if moved is not None:
            owner, source = (self._call.name, moved.bell) if is_own else (self._given["deadline_owner"], parent)
            await self._take_bound(replace(moved, owner=owner, source=source))

    @workflow.update
    async def order(self, order: Order) -> dict[str, Any]:
        """Give a step more time, or wind down a step or the whole run. The worker that has a step decides how much it
        gets: never more than the run has. Without its answer nothing changes."""
        if order["step"] is not None:
            return await self._send_order(order, order["step"])
        if order["by_ms"] is not None:
            return await self._extend(order["by_ms"], order["who"])
        until_ns = workflow.time_ns() + (order["within_ms"] or DEFAULT_WIND_DOWN_MS) * NS_PER_MS
        asked = WindDown(order["who"], order["reason"] or "it was asked to", workflow.time_ns(), until_ns)
        self._call.winding_down = asked
        self._scheduler.wind_down()
        told = [await self._send_order(order, step) for step in list(self._holders)]
        return {"stopping": [call for each in told for call in each["stopping"]]}

    @order.validator
    def _check_order(self, order: Order) -> None:
        step = order["step"]
        if step is None and order["by_ms"] is not None:
            if self._call.winding_down is not None:
                raise ApplicationError(f"{self._call.name} is winding down already", type="NOT_EXTENDABLE")
            if self._ended_by is not None:
                raise ApplicationError(f"{self._call.name} was stopped", type="NOT_EXTENDABLE")
            if not self._given.get("is_extendable"):
                raise ApplicationError("an earlier version has begun the run", type="NOT_EXTENDABLE")
        if step is not None and step not in self._holders:
            raise ApplicationError(f"step {step} does not run, or not for long enough yet", type="CALL_NOT_FOUND")

    async def _extend(self, by_ms: int, who: str) -> dict[str, Any]:
        """Give the whole run more time: what was asked for, as far as whoever started it and the backstops of the steps
        under way leave it. The new deadline follows from history, and every step under way is told of it."""
        granted_ms, moved = by_ms, None
        if self._call.bound.bell is not None:
            moved = self._find_later_bound(by_ms)
            granted_ms = moved.limit_ms - self._call.bound.limit_ms
            self._own_ms = self._own_ms and self._own_ms + granted_ms
        if self._call.overtime is None:
            self._call.overtime = Overtime.of_person()
        self._call.overtime.requests.append(OvertimeRequest.by_person(who, self._elapsed_ms(), by_ms, granted_ms))
        if moved is not None:
            await self._take_bound(moved)
        return {"extended": [self._describe_call() | {"granted_ms": granted_ms}]}

    def _find_later_bound(self, by_ms: int) -> Bound:
        latest = latest_bell(self._parent, self._began_ns)
        ends = [end for end in (latest, *(each.end for each in self._under_way.values())) if end is not None]
        if (engine_limit := workflow.info().execution_timeout) is not None:
            within_ms = int(engine_limit.total_seconds() * 1000) - CLEAN_UP_MS
            ends.append(Deadline(self._began_ns + within_ms * NS_PER_MS))
        end = min(ends, key=lambda each: each.at_ns, default=None)
        moved = move_bell(self._call.bound, by_ms, end, self._parent)
        if moved is None:
            whose = "its caller" if end is latest else "the engine or a step that runs"
            raise ApplicationError(f"{self._call.name} has all the time that {whose} can have", type="NOT_EXTENDABLE")
        return moved

    def _describe_call(self) -> dict[str, Any]:
        """Return the call of the run and how its clock stands, as `describe_call` does it where a run is here."""
        bell, run_id = self._call.bound.bell, self._given["run_id"]
        return {
            "request_id": run_id,
            "run_id": run_id,
            "name": self._call.name,
            "kind": "run",
            "elapsed_ms": self._elapsed_ms(),
            "timeout_ms": self._call.bound.limit_ms,
            "remaining_ms": None if bell is None else bell.remaining_ms(workflow.time_ns()),
        }

    async def _take_bound(self, moved: Bound) -> None:
        """Let the run have another bell, and tell everybody who goes by the old one."""
        before, bell = self._call.bound.bell, moved.bell
        assert before is not None and bell is not None
        self._call.bound = moved
        self._deadlines.move(bell)
        for run_id, known in list(self._child_deadlines.items()):
            known.at_ms += (bell.at_ns - before.at_ns) // NS_PER_MS
            at_ms = known.at_ms if known.latest_ms is None else min(known.at_ms, known.latest_ms)
            with contextlib.suppress(ApplicationError):  # it has ended meanwhile
                await workflow.get_external_workflow_handle(run_id).signal("follow", at_ms)
        await _gather([self._tell_of_bell(step) for step in self._holders])

    async def _tell_of_bell(self, step: str) -> None:
        """Tell the worker that has a step of the run's deadline, where it knows another. It may have ended it."""
        known, bell = self._under_way.get(step), self._call.bound.bell
        if known is None or bell is None or known.bell is bell:
            return
        known.bell = bell
        order: Order = {
            "run_id": self._given["run_id"], "step": step, "who": "", "by_ms": 0, "within_ms": None, "reason": "",
            "deadline_at": bell.at_ns // NS_PER_MS,
        }  # fmt: skip
        with contextlib.suppress(ApplicationError):
            await self._send_order(order, step)

    async def _send_order(self, order: Order, step: str) -> dict[str, Any]:
        try:
            told: dict[str, Any] = await workflow.execute_activity(
                ORDER_ACTIVITY,
                {**order, "step": step},
                result_type=dict,
                task_queue=self._holders[step],
                schedule_to_close_timeout=timedelta(seconds=ORDER_LIMIT_S),
                retry_policy=ONCE,
                summary=f"{step}: {'wind down' if order['by_ms'] is None else 'more time'}",
            )
            return told
        except ActivityError as error:
            if isinstance(error.cause, ApplicationError):
                raise ApplicationError(error.cause.message, type=error.cause.type) from None
            raise ApplicationError(f"the worker of step {step} does not answer", type="CALL_NOT_FOUND") from None

    @workflow.query
    def progress(self) -> dict[str, Any]:
        """Return how far the run is."""
        states = self._scheduler.states
        is_working = any(state.status is Status.RUNNING for state in states.values())
        return {
            **self._describe_run(),
            "workflow": self._given["workflow"],
            "steps": {name: state.to_record() for name, state in states.items()},
            "waiting": list(self._waiting.values()),
            "decided": self._decided,
            "children": dict(self._children),
            "only_waits": bool(self._waiting or self._children) and is_working and self._is_left_to_people(),
        }

    def _is_left_to_people(self) -> bool:
        """Return whether all that runs waits for people, or for runs inside, which say that themselves."""
        waiting = {proposal["step"] for proposal in self._waiting.values()} | set(self._children.values())
        states = self._scheduler.states
        return all(name in waiting for name, state in states.items() if state.status is Status.RUNNING)

    def _show_progress(self) -> None:
        """Let the run be found by the steps that it has been in for a while, and by whether it asks people. Not by
        every step: each change is an event of its history, and work for the index."""
        waiting = {proposal["step"] for proposal in self._waiting.values()}
        under_way = [name for name, state in self._scheduler.states.items() if state.status is Status.RUNNING]
        steps = [name for name in under_way if name in waiting or name in self._holders]
        self._set_attributes(describe_progress(steps, is_waiting=bool(waiting)))

    def _set_attributes(self, values: dict[SearchAttributeKey[Any], Any]) -> None:
        if updates := list_updates(values, self._attributes, self._shown):
            workflow.upsert_search_attributes(updates)
            self._shown |= {key.name: value for key, value in values.items()}

    async def _record(self, states: Sequence[StepState]) -> None:
        """Show how far the run is. History has it already."""
        lines = [f"{name}: {state.status.value}" for name, state in self._scheduler.states.items()]
        workflow.set_current_details("\n".join(lines))


_NO_STEP = STEP_TYPES["command"].schema.model_validate({"type": "command", "exec": "-"})


class _UnderWay:
    """A step that a worker has, or is to take."""

    def __init__(self, bell: Deadline | None, end: Deadline | None) -> None:
        self.bell = bell
        """That of the run, as the worker knows it."""
        self.end = end
        """When the engine gives it up, but for what a reply may take, where the run's time decides. It cannot be
        moved."""


class _ChildDeadline:
    """The deadline of a run inside this one which it has from this one, on the engine's clock."""

    def __init__(self, at_ms: int, latest_ms: int | None) -> None:
        self.at_ms, self.latest_ms = at_ms, latest_ms


class _Known:
    """What is known for a step that was put off until others had answered."""

    def __init__(self, proposals: list[dict[str, Any]], nested: dict[str, dict[str, Any]]) -> None:
        self.proposals, self.nested = proposals, nested
        self.may_park = True


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _gather(waiting: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all of them return. A cancellation is passed on to each, and all are waited for."""
    tasks = [asyncio.get_running_loop().create_task(each) for each in waiting]
    while not all(task.done() for task in tasks):
        try:
            await workflow.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
    return [task.result() for task in tasks]


def _replace_state(state: StepState, by: StepState) -> None:
    """Make a state what another one is: others hold this very object."""
    for name in fields_of(StepState):
        setattr(state, name, getattr(by, name))
