"""A run as a Temporal workflow: the scheduler of every run, activities for its steps, history for its record.

It is deterministic: it reads only the workflow's clock, and every decision follows from history. The deadline of the
run is an instant on that clock, fixed when the engine accepts the run.

Temporal never retries a step by itself. A lost worker is noticed by its silence. Its step is then judged here, as that
of a dead process: it runs again in the rest of its time if that is harmless.

AGENTS.md: the workflow is replayable, Temporal never retries a step.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
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
    from ..calls.call import DEFAULT_CLOCKS, Call, CallTime, Outcome, WindDown, answer_at
    from ..core.envelope import Problem, warning
    from ..core.errors import Ending, SideEffects
    from ..core.limits import (
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
    from ..core.overtime import Overtime, OvertimeRequest
    from ..core.trace import TraceContext
    from ..core.value_types import JsonObject, fields_of, record, replace
    from ..flows.check.plan import (
        clean_up_steps,
        finally_reserve,
        grace_ms,
        kept_for_clean_up_ms,
        may_run_again,
        most_attempts,
        plan_of,
    )
    from ..flows.file.schema import WorkflowFile
    from ..flows.run.run_context import Deadlines, ParallelSlots
    from ..flows.run.scheduler import RunLimits, Scheduler
    from ..flows.run.state import (
        CANCEL,
        Status,
        StepError,
        StepState,
        TemplateScope,
        describe_steps,
        judge_run,
    )
    from ..flows.steps.provider import STEP_TYPES, StepPart
    from ._messages import (
        ORDER_ACTIVITY,
        OUTPUTS_ACTIVITY,
        RUN_WORKFLOW,
        STEP_ACTIVITY,
        VERSION,
        OrderInput,
        RunInput,
        StepInput,
        StepReply,
        describe_beginning,
        describe_end,
        describe_progress,
        follow_run,
        select_visible,
        slice_workflow,
    )
    from ._payloads import UnreadablePayload

    for _name in STEP_TYPES:  # otherwise each would be imported again when a file has such a step
        STEP_TYPES[_name]

REPLY_MARGIN_MS = 5_000  # a worker needs this long beyond a step's own time to verify the kill and to reply
GIFT_MS = 3_600_000  # the backstop above a step is twice its worst case plus this, the most that an operator may add
OUTPUTS_LIMIT_S = 60  # the templates of outputs have their own timeout; this is for a worker that dies meanwhile
# The time for a worker to answer an order. The run does not wait for it, and without an answer it changes nothing.
ORDER_LIMIT_S = 10
CHANGES_SIZE = 1_000_000  # characters in one answer, which Temporal limits
CLEAN_UP_MS = 360_000  # the part of the engine's limit of a run that is kept for clean-up
LAST_WORD_MS = 1_000  # the part of the run's time in which a step reports that it had no more
ONCE = RetryPolicy(maximum_attempts=1)
# After these no worker has seen the end of a step: its processes should be dead, which was not checked.
UNSEEN = (TimeoutType.HEARTBEAT, TimeoutType.START_TO_CLOSE)

T = TypeVar("T")


@record
class _StepOnWorker:
    bell: Deadline | None
    end: Deadline | None
    """The instant at which the engine abandons the step, if the run's time decides it. It cannot be moved."""


@record
class _NestedRun:
    step: str
    deadline_ms: int | None  # the deadline that it has from this run, on the engine's clock
    latest_ms: int | None


@record
class _Answers:
    proposals: list[JsonObject]
    nested: dict[str, JsonObject]
    may_park: bool = True


@workflow.defn(name=RUN_WORKFLOW)
class RunWorkflow:
    @workflow.init
    def __init__(self, run_input: RunInput) -> None:
        if run_input["version"] != VERSION:  # fails the task, not the run: another worker may have that version
            raise RuntimeError(f"another version started the run (messages {run_input['version']}, here {VERSION})")
        self._input = run_input
        self._workflow = WorkflowFile.model_validate(run_input["workflow"])
        self._began_ns = int(workflow.info().workflow_start_time.timestamp() * 1000) * NS_PER_MS
        self._parent = self._find_parent()
        self._own_ms = run_input["limit_ms"]
        self._call = self._admit()
        self._last = finally_reserve(self._workflow, self._call.bound.limit_ms)
        clean_up_ms = kept_for_clean_up_ms(self._workflow, max(0, self._call.bound.limit_ms - self._last.ms))
        self._kept_ms = clean_up_ms + self._last.ms
        self._clean_up = clean_up_steps(self._workflow)
        self._deadlines = Deadlines(self._call.bound.bell, clean_up_ms, self._clean_up, self._last)
        self._plan = plan_of(self._workflow)
        self._ended_by: str | None = None
        self._waiting: dict[str, JsonObject] = {}
        self._decided: dict[str, JsonObject] = {}  # the decided and expired proposals, by id, without their questions
        self._holders: dict[str, str] = {}
        """The queues of the workers that have steps, for orders. Only steps that have run for a while are here."""
        self._under_way: dict[str, _StepOnWorker] = {}
        self._shown: JsonObject = {"ShotclockStatus": "running", "ShotclockStep": []}
        self._children: dict[str, _NestedRun] = {}
        self._changes: list[JsonObject] = []  # the records of steps, and the beginnings and ends of runs inside this
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
        if self._input["deadline_at"] is not None:
            return Deadline(self._input["deadline_at"] * NS_PER_MS)
        caller_ms = self._input["caller_ms"]
        return None if caller_ms is None else Deadline(self._began_ns + caller_ms * NS_PER_MS)

    def _admit(self) -> Call:
        limit_ms, deadline_at = self._input["limit_ms"], self._input["deadline_at"]
        clocks = Clocks(timeout_ms=limit_ms).over(DEFAULT_CLOCKS)
        name = f"run {self._input['name']}"
        bound = nest(
            self._began_ns,
            timeout_ms=limit_ms,
            grace_ms=clocks.grace_ms or 0,
            owner=name,
            parent=None if deadline_at is None else Deadline(deadline_at * NS_PER_MS),
            parent_owner=self._input["deadline_owner"],
        )
        request_id = f"{workflow.uuid4().hex[:12]}-1"
        return Call(name, request_id, TraceContext(self._input["trace_id"]), CallTime(clocks, bound, self._began_ns))

    @workflow.run
    async def run(self, run_input: RunInput) -> JsonObject:
        """Run the steps and return the envelope. A failed run raises it as the detail of the workflow's failure."""
        ended_by: str | Exception | None = None
        working = asyncio.get_running_loop().create_task(self._scheduler.run())
        while not working.done():
            try:
                await asyncio.shield(working)  # bounded by the timeouts of the steps
            except asyncio.CancelledError:
                self.stop(CANCEL)
            except Exception as error:  # a bug
                ended_by = error
        data = describe_steps(self._input["run_id"], self._input["name"], self._scheduler.states)
        if not (ended_by or self._ended_by) and self._workflow.outputs and (outputs := await self._render_outputs()):
            data["outputs"] = outputs
        states, bound, is_out_of_time = self._scheduler.states, self._call.bound, self._deadlines.have_fired
        ended_by = ended_by or self._ended_by
        fired = Fired(ClockKind.TIMEOUT, bound.owner, bound.limit_ms, self._elapsed_ms(), kept_ms=self._kept_ms)
        outcome = judge_run(self._call, states, data, ended_by, fired, is_out_of_time=is_out_of_time)
        unseen = [note for state in states.values() for note in state.warnings if note["code"] == "END_UNSEEN"]
        outcome.warnings = (*self._scheduler.notes, *unseen)
        envelope = _answer(self._call, outcome)
        self._set_attributes(describe_end(envelope, [state.error for state in self._scheduler.states.values()]))
        if envelope["ok"]:
            return envelope
        why: Any = envelope["error"]
        raise ApplicationError(str(why["message"]), envelope, type=str(why["code"]), non_retryable=True)

    async def _render_outputs(self) -> JsonObject:
        templates = dict(self._workflow.outputs)
        visible = select_visible(self._workflow, None, {"outputs": templates}, self._scheduler.states)
        try:
            reply: JsonObject = await workflow.execute_activity(
                OUTPUTS_ACTIVITY,
                {"run": self._describe_run(), "outputs": templates, "visible": visible},
                result_type=dict,
                schedule_to_start_timeout=self._find_left(""),
                start_to_close_timeout=timedelta(seconds=OUTPUTS_LIMIT_S),
                retry_policy=RetryPolicy(maximum_attempts=3),
                summary="outputs",
            )
        except (ActivityError, asyncio.CancelledError) as error:
            if is_cancelled_exception(error):
                self.stop(CANCEL)
            why = f"no worker has rendered the outputs: {error.__cause__ or error}"
            self._scheduler.notes.append(warning("OUTPUT_MISSING", why))
            return dict.fromkeys(templates)
        self._scheduler.notes += reply["warnings"]
        if reply["is_cut_short"]:
            self._deadlines.record_cut_short("")
        outputs: JsonObject = reply["outputs"]
        return outputs

    # --- one step -----------------------------------------------------------------------------------------

    async def _execute(self, name: str, step: StepPart, state: StepState, scope: TemplateScope) -> None:
        try:
            await self._execute_until_over(name, step, state)
        finally:
            self._under_way.pop(name, None)
            if self._holders.pop(name, None) is not None:
                self._show_progress()

    async def _execute_until_over(self, name: str, step: StepPart, state: StepState) -> None:
        answers = _Answers([], {})
        while True:
            try:
                reply = await self._carry_out(name, step, state, answers)
            except ActivityError as error:
                if isinstance(error.cause, TimeoutError) and error.cause.type in UNSEEN:
                    state.ending = Ending.ABANDONED.value
                    what = f"step {name}: its worker was lost or did not answer"
                    self._scheduler.notes.append(warning("END_UNSEEN", what))
                if _is_cancelled() or is_cancelled_exception(error):
                    if is_cancelled_exception(error):  # no worker had taken it: a worker replies with its state
                        _record_unbegun(state)
                    raise asyncio.CancelledError from error
                if self._is_over_without_worker(name, step, state, error):
                    return
                continue
            started_ms, waited_ms = state.started_ms, state.waited_ms
            _replace_state(state, StepState.from_record(reply["state"]))
            if reply.get("is_cancelled"):
                raise asyncio.CancelledError  # the state has the output so far
            if _is_cancelled() and (reply.get("is_parked") or "lost" in reply):  # a stopped run sends it no more
                if reply.get("is_parked") or reply.get("is_unbegun"):
                    _record_unbegun(state)
                raise asyncio.CancelledError
            if (lost := reply.get("lost")) is not None:
                if reply.get("is_unbegun"):
                    state.status, state.started_ms = Status.RUNNING, started_ms
                elif self._is_over_with_lost_worker(step, state, lost):
                    return
                continue
            if not reply.get("is_parked"):
                if state.is_cut_short:
                    self._deadlines.record_cut_short(name)
                return
            state.status, state.started_ms, state.waits_for, state.waited_ms = Status.RUNNING, started_ms, [], waited_ms
            nested = reply.get("nested") or []
            if nested:  # no worker waits meanwhile, nor for a person
                # Together, because the items of a step run in parallel.
                ended = await _gather([self._run_nested(name, each) for each in nested])
                answers.nested |= {each["run_id"]: envelope for each, envelope in zip(nested, ended, strict=True)}
                answers.proposals = reply["proposals"]
            else:
                answers.proposals = await self._wait_for_people(name, reply["proposals"])
                # Without a decision the run's time is nearly over: the step has to report that, not to wait again.
                answers.may_park = any(proposal["status"] != "pending" for proposal in answers.proposals)
            if _is_cancelled():  # its nested runs have ended, and so does it
                raise asyncio.CancelledError

    async def _carry_out(self, name: str, step: StepPart, state: StepState, answers: _Answers) -> StepReply:
        left, planned = self._find_left(name), self._plan.step(name)
        # When the engine abandons a step that its living worker does not end: by its own limits, and by the run's.
        own_ms, run_ms = MAX_MS, MAX_MS if left is None else left // timedelta(milliseconds=1) + GIFT_MS
        if planned.worst_ms and not planned.is_per_item:
            own_ms = 2 * (planned.worst_ms + planned.attempts * grace_ms(self._workflow, step)) + GIFT_MS
        # The step's own backstop is later than the end of the step, however long the run is.
        end = Deadline(workflow.time_ns() + run_ms * NS_PER_MS) if run_ms < own_ms else None
        self._under_way[name] = _StepOnWorker(self._call.bound.bell, end)
        reply: StepReply = await workflow.execute_activity(
            STEP_ACTIVITY,
            self._describe_step(name, step, state, answers),
            result_type=dict,
            task_queue=step.runs_on,
            schedule_to_start_timeout=left,
            start_to_close_timeout=timedelta(milliseconds=min(own_ms, run_ms) + REPLY_MARGIN_MS),
            heartbeat_timeout=timedelta(milliseconds=self._input["heartbeat_ms"]),
            retry_policy=ONCE,
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            summary=name,
        )
        return reply

    def _find_left(self, name: str) -> timedelta | None:
        deadline = self._deadlines.of(name)
        return None if deadline is None else timedelta(milliseconds=max(1, deadline.remaining_ms(workflow.time_ns())))

    def _describe_run(self) -> JsonObject:
        bell = self._call.bound.bell
        kept: Sequence[str] = ("run_id", "name", "file", "folder", "files", "trace_id", "inputs", "env", "queue")
        return {
            **{key: self._input[key] for key in kept},  # type: ignore[literal-required]
            "began_at": self._began_ns // NS_PER_MS,
            "limit_ms": self._call.bound.limit_ms,
            "deadline_at": None if bell is None else bell.at_ns // NS_PER_MS,
        }

    def _describe_step(self, name: str, step: StepPart, state: StepState, answers: _Answers) -> StepInput:
        part = slice_workflow(self._workflow, self._input["workflow"], name)
        by, is_clean_up = self._deadlines.of(name), name in self._clean_up
        described: StepInput = {
            "version": VERSION,
            "run": self._describe_run(),
            "workflow": part,
            "step": name,
            "state": state.to_record(),
            "visible": select_visible(self._workflow, step, part, self._scheduler.states),
            "kept_ms": self._kept_ms,
            "clean_up_by": by.at_ns // NS_PER_MS if is_clean_up and by is not None else None,
            "is_clean_up": is_clean_up,
            "heartbeat_ms": self._input["heartbeat_ms"],
            "sent_at": workflow.time_ns() // NS_PER_MS,
            "proposals": answers.proposals,
            "nested": answers.nested,
            "may_park": answers.may_park and not state.is_finally,
        }
        if self._workflow.finally_:
            described["last"] = {"reserve_ms": self._last.ms}
        if state.is_finally:
            ends_ms = None if by is None else by.at_ns // NS_PER_MS
            described["last"] |= {"by": ends_ms, "run": self._scheduler.run_so_far}
        return described

    # --- without a worker ---------------------------------------------------------------------------------

    def _is_over_without_worker(self, name: str, step: StepPart, state: StepState, error: ActivityError) -> bool:
        """Judge a step whose worker is gone, or that no worker has taken."""
        cause = error.cause
        if isinstance(cause, TimeoutError) and cause.type is TimeoutType.HEARTBEAT:
            heartbeat: dict[str, int] = cause.last_heartbeat_details[0] if cause.last_heartbeat_details else {}
            return self._is_over_with_lost_worker(step, state, heartbeat)
        if isinstance(cause, TimeoutError) and cause.type is TimeoutType.SCHEDULE_TO_START:
            if self._under_way[name].bell is not self._call.bound.bell:  # the run was extended meanwhile
                return False
            state.status, state.side_effects, state.is_cut_short = Status.TIMED_OUT, SideEffects.NONE, True
            self._deadlines.record_cut_short(name)
            fired = Fired(ClockKind.TIMEOUT, self._call.name, self._call.bound.limit_ms, self._elapsed_ms())
            message = f"no worker has taken step {name} before the {self._call.name}'s time was over"
            state.ending = Ending.NOT_STARTED.value
            state.error = _timeout_error(state, "NO_TIME_LEFT", message, fired)
            return True
        if isinstance(cause, ApplicationError) and cause.type == UnreadablePayload.__name__:
            state.status, state.side_effects, state.ending = Status.FAILED, SideEffects.NONE, Ending.NOT_STARTED.value
            message = f"its worker cannot read it: {cause.message}"
            state.error = {"code": "PRECONDITION", "message": message, "retryable": True, "phase": "validation"}
            return True
        is_late = isinstance(cause, TimeoutError)  # the backstop; anything else is a bug
        code, state.status = ("TIMEOUT", Status.TIMED_OUT) if is_late else ("INTERNAL_ERROR", Status.FAILED)
        message = f"its worker did not end it: {cause or error}"
        state.error = {"code": code, "message": message, "retryable": False, "phase": "execution"}
        state.attempts, state.side_effects = state.attempts + 1, SideEffects.UNKNOWN
        return True

    def _is_over_with_lost_worker(self, step: StepPart, state: StepState, heartbeat: dict[str, int]) -> bool:
        """Prepare a step to run again in the rest of its time if that is harmless, else interrupt it."""
        now_ms = workflow.time_ns() // NS_PER_MS
        # Without any heartbeat the worker has been silent since the step began.
        began_ms = heartbeat.get("try_began_at", now_ms - self._input["heartbeat_ms"])
        state.attempts = max(state.attempts, heartbeat.get("attempts", 1) - 1)
        started_ms = state.started_ms
        _replace_state(state, state.after_cut_off(is_harmless=may_run_again(self._workflow, step)))
        if state.status is Status.INTERRUPTED:
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
        """End an attempt whose time was over before its worker was missed."""
        state.attempts_cut_off -= 1  # it counts as an attempt of the file's `retry`
        if state.attempts - state.attempts_cut_off < most_attempts(self._workflow, step):
            return False
        fired = Fired(ClockKind.TIMEOUT, f"step {state.id}", state.timeout_ms or 0, used_ms)
        message = "its worker was lost, and its time was over before another could take it"
        state.status, state.side_effects, state.ending = Status.TIMED_OUT, SideEffects.UNKNOWN, Ending.ABANDONED.value
        state.error = _timeout_error(state, "TIMEOUT", message, fired)
        return True

    def _elapsed_ms(self) -> int:
        return (workflow.time_ns() - self._began_ns) // NS_PER_MS

    # --- people and nested runs ---------------------------------------------------------------------------

    async def _run_nested(self, name: str, run_input: RunInput) -> JsonObject:
        run_id, is_steps = run_input["run_id"], run_input["deadline_owner"] == f"step {name}"
        deadline_ms = None if is_steps else run_input["deadline_at"]
        self._children[run_id] = _NestedRun(name, deadline_ms, run_input["latest_at"])
        self._changes.append({"begins": run_id})
        try:
            envelope: JsonObject = await workflow.execute_child_workflow(
                RUN_WORKFLOW,
                {**run_input, "attributes": self._input["attributes"]},
                id=run_id,
                result_type=dict,
                task_timeout=workflow.info().task_timeout,
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                cancellation_type=workflow.ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
                static_summary=run_input["name"],
                search_attributes=describe_beginning(run_input["name"], self._input["attributes"]),
            )
            return envelope
        except ChildWorkflowError as error:
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.details:
                failed: JsonObject = cause.details[0]
                return failed
            message = f"run {run_id} was terminated, or never began: {cause}"
            notes = (warning("END_UNSEEN", message),)
            outcome = Outcome(Ending.ABANDONED, Problem("INTERRUPTED", message), warnings=notes)
            return _answer(replace(self._call, name=f"run {run_input['name']}"), outcome)
        finally:
            del self._children[run_id]
            self._changes.append({"ends": run_id})

    async def _wait_for_people(self, name: str, proposals: list[JsonObject]) -> list[JsonObject]:
        ids = [proposal["id"] for proposal in proposals]
        self._waiting |= {proposal["id"]: proposal for proposal in proposals}
        state, began_ns = self._scheduler.states[name], workflow.time_ns()
        for id in ids:
            state.begin_wait(id, began_ns)
        self._show_progress()
        try:
            while not self._is_decided(ids):  # again if the run was extended
                await self._wait_for_decision(name, ids)
        except builtins.TimeoutError:
            now_ms = workflow.time_ns() // NS_PER_MS
            for id in ids:
                if self._waiting[id]["expires_at"] <= now_ms:
                    self._waiting[id] = {**self._waiting[id], "status": "expired"}
        finally:
            for id in ids:
                state.end_wait(id, workflow.time_ns())
            decided = [self._waiting.pop(id) for id in ids]
            for each in decided:
                if each["status"] != "pending" and "record" in each:
                    written = {**each["record"], "status": each["status"]}
                    self._decided[each["id"]] = {key: written[key] for key in written if key != "ask"}
            self._show_progress()
        return decided

    def _is_decided(self, ids: list[str]) -> bool:
        return any(self._waiting[id]["status"] != "pending" for id in ids)

    async def _wait_for_decision(self, name: str, ids: list[str]) -> None:
        """Wait for a decision or an extension. Raise TimeoutError if a proposal expires or the run's time ends."""
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
    def decide(self, proposal: JsonObject) -> JsonObject:
        self._waiting[proposal["id"]] = proposal
        return proposal

    @decide.validator
    def _check_decision(self, proposal: JsonObject) -> None:
        waiting = self._waiting.get(proposal["id"])
        if waiting is None or waiting["status"] != "pending":
            raise ApplicationError(f"{proposal['id']} is not open any more", type="ALREADY_DECIDED")

    # --- signals, orders and queries ----------------------------------------------------------------------

    @workflow.signal
    def stop(self, by: str) -> None:
        """Stop the run and clean up. `by` is the name of a signal, or `cancel`."""
        if self._ended_by is None:
            self._ended_by = by
            self._scheduler.stop()

    @workflow.signal(unfinished_policy=workflow.HandlerUnfinishedPolicy.ABANDON)
    async def hold(self, step_and_queue: list[str]) -> None:
        step, queue = step_and_queue
        if step not in self._under_way:  # it has ended
            return
        self._holders[step] = queue
        self._show_progress()
        await self._send_deadline(step)

    @workflow.signal(unfinished_policy=workflow.HandlerUnfinishedPolicy.ABANDON)
    async def follow(self, deadline_at: int) -> None:
        """Follow the later deadline of the run around this one, as far as the run's own limit allows."""
        parent, bound = Deadline(deadline_at * NS_PER_MS), self._call.bound
        if self._parent is None or bound.bell is None or parent.at_ns <= self._parent.at_ns:
            return
        self._parent = parent
        latest = latest_bell(parent, self._began_ns) or parent
        own = Deadline(self._began_ns + self._own_ms * NS_PER_MS) if self._own_ms else None
        is_own = own is not None and own.at_ns <= latest.at_ns
        until = own if own is not None and is_own else latest
        moved = move_bell(bound, (until.at_ns - bound.bell.at_ns) // NS_PER_MS, latest, parent)
        if moved is not None:
            owner, source = (self._call.name, moved.bell) if is_own else (self._input["deadline_owner"], parent)
            await self._move_to(replace(moved, owner=owner, source=source))

    @workflow.update
    async def order(self, order: OrderInput) -> JsonObject:
        """Extend a step or the run, or wind it down. The worker of a step grants never more than the run has."""
        if order["step"] is not None:
            return await self._send_order(order, order["step"])
        if order["by_ms"] is not None:
            return await self._extend(order["by_ms"], order["who"])
        return await self._wind_down(order)

    @workflow.signal(unfinished_policy=workflow.HandlerUnfinishedPolicy.ABANDON)
    async def wind_down(self, order: OrderInput) -> None:
        """Follow the run around this one, which is winding down."""
        await self._wind_down(order)

    async def _wind_down(self, order: OrderInput) -> JsonObject:
        """Wind down the run, its steps and its nested runs. A step that has ended meanwhile needs no order."""
        until_ns = workflow.time_ns() + (order["within_ms"] or DEFAULT_WIND_DOWN_MS) * NS_PER_MS
        reason = order["reason"] or "it was asked to"
        self._call.winding_down = WindDown(order["who"], reason, workflow.time_ns(), until_ns)
        self._scheduler.wind_down()
        await _gather([_signal(run_id, "wind_down", order) for run_id in self._children])
        replies = await _gather([self._try_order(order, step) for step in self._holders])
        return {"stopping": [call for reply in replies for call in reply["stopping"]]}

    @order.validator
    def _check_order(self, order: OrderInput) -> None:
        step = order["step"]
        if step is None and order["by_ms"] is not None:
            if self._call.winding_down is not None:
                raise ApplicationError(f"{self._call.name} is winding down already", type="NOT_EXTENDABLE")
            if self._ended_by is not None:
                raise ApplicationError(f"{self._call.name} was stopped", type="NOT_EXTENDABLE")
        if step is not None and step not in self._holders:
            raise ApplicationError(f"step {step} does not run, or not for long enough yet", type="CALL_NOT_FOUND")

    async def _extend(self, by_ms: int, who: str) -> JsonObject:
        """Extend the run, as far as its caller and the backstops of its running steps allow. The engine cannot move a
        backstop."""
        granted_ms, moved = by_ms, None
        if self._call.bound.bell is not None:
            moved = self._find_later_bound(by_ms)
            granted_ms = moved.limit_ms - self._call.bound.limit_ms
            self._own_ms = self._own_ms and self._own_ms + granted_ms
        if self._call.overtime is None:
            self._call.overtime = Overtime.of_person()
        self._call.overtime.requests.append(OvertimeRequest.by_person(who, self._elapsed_ms(), by_ms, granted_ms))
        if moved is not None:
            await self._move_to(moved)
        bell, run_id = self._call.bound.bell, self._input["run_id"]
        call = {
            "request_id": run_id,
            "run_id": run_id,
            "name": self._call.name,
            "kind": "run",
            "elapsed_ms": self._elapsed_ms(),
            "timeout_ms": self._call.bound.limit_ms,
            "remaining_ms": None if bell is None else bell.remaining_ms(workflow.time_ns()),
            "granted_ms": granted_ms,
        }
        return {"extended": [call]}

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

    async def _move_to(self, moved: Bound) -> None:
        before, bell = self._call.bound.bell, moved.bell
        self._call.time.bound = moved
        if before is None or bell is None:
            return
        self._deadlines.move(bell)
        for id, packed in self._waiting.items():
            if (end := self._deadlines.of(packed["step"])) is not None:
                self._waiting[id] = follow_run(packed, end.at_ns // NS_PER_MS)
        for run_id, child in list(self._children.items()):
            if child.deadline_ms is not None:
                child.deadline_ms += (bell.at_ns - before.at_ns) // NS_PER_MS
                at_ms = child.deadline_ms if child.latest_ms is None else min(child.deadline_ms, child.latest_ms)
                await _signal(run_id, "follow", at_ms)
        await _gather([self._send_deadline(step) for step in self._holders])

    async def _send_deadline(self, step: str) -> None:
        """Send the run's deadline to the worker of a step, if it knows another one."""
        on_worker, bell = self._under_way.get(step), self._call.bound.bell
        if on_worker is None or bell is None or on_worker.bell is bell:
            return
        order: OrderInput = {
            "run_id": self._input["run_id"], "step": step, "who": "", "by_ms": 0, "within_ms": None, "reason": "",
            "deadline_at": bell.at_ns // NS_PER_MS,
        }  # fmt: skip
        with contextlib.suppress(ApplicationError):  # the step may have ended; otherwise the next extension sends it
            await self._send_order(order, step)
            on_worker.bell = bell

    async def _try_order(self, order: OrderInput, step: str) -> JsonObject:
        try:
            return await self._send_order(order, step)
        except ApplicationError:  # the step may have ended
            return {"stopping": []}

    async def _send_order(self, order: OrderInput, step: str) -> JsonObject:
        if step not in self._holders:
            raise ApplicationError(f"step {step} has ended", type="CALL_NOT_FOUND")
        try:
            reply: JsonObject = await workflow.execute_activity(
                ORDER_ACTIVITY,
                {**order, "step": step},
                result_type=dict,
                task_queue=self._holders[step],
                schedule_to_close_timeout=timedelta(seconds=ORDER_LIMIT_S),
                retry_policy=ONCE,
                summary=f"{step}: {'wind down' if order['by_ms'] is None else 'more time'}",
            )
            return reply
        except ActivityError as error:
            if isinstance(error.cause, ApplicationError):
                raise ApplicationError(error.cause.message, type=error.cause.type) from None
            raise ApplicationError(f"the worker of step {step} does not answer", type="CALL_NOT_FOUND") from None

    @workflow.query
    def changes(self, since: int) -> JsonObject:
        """Return what has changed since the change of that number, for a caller that shows each."""
        more: list[JsonObject] = []
        size = 0
        for change in self._changes[since:]:
            size += len(json.dumps(change))
            if more and size > CHANGES_SIZE:
                break
            more.append(change)
        has_more = since + len(more) < len(self._changes)
        return {"changes": more, "has_more": has_more, "only_waits": self._only_waits()}

    def _only_waits(self) -> bool:
        """Return whether no step is at work. Nested runs report for themselves whether they only wait for people."""
        running = [name for name, state in self._scheduler.states.items() if state.status is Status.RUNNING]
        waiting = {each["step"] for each in self._waiting.values()} | {each.step for each in self._children.values()}
        return bool(waiting) and bool(running) and all(name in waiting for name in running)

    @workflow.query
    def progress(self) -> JsonObject:
        return {
            **self._describe_run(),
            "workflow": self._input["workflow"],
            "steps": {name: state.to_record() for name, state in self._scheduler.states.items()},
            "waiting": list(self._waiting.values()),
            "decided": self._decided,
            "children": {run_id: child.step for run_id, child in self._children.items()},
            "only_waits": self._only_waits(),
        }

    def _show_progress(self) -> None:
        """Set the search attributes. Only longer steps are shown, because each change is an event in history."""
        waiting = {proposal["step"] for proposal in self._waiting.values()}
        running = [name for name, state in self._scheduler.states.items() if state.status is Status.RUNNING]
        steps = [name for name in running if name in waiting or name in self._holders]
        self._set_attributes(describe_progress(steps, is_waiting=bool(waiting)))

    def _set_attributes(self, values: dict[SearchAttributeKey[Any], Any]) -> None:
        changed = {key: value for key, value in values.items() if self._shown.get(key.name) != value}
        registered = [key for key in changed if key.name in self._input["attributes"]]
        if registered:
            workflow.upsert_search_attributes(
                [key.value_set(changed[key]) if changed[key] else key.value_unset() for key in registered]
            )
            self._shown |= {key.name: value for key, value in values.items()}

    async def _record(self, states: Sequence[StepState]) -> None:
        self._changes += [state.to_record() for state in states if state.status is not Status.PENDING]
        lines = [f"{name}: {state.status.value}" for name, state in self._scheduler.states.items()]
        workflow.set_current_details("\n".join(lines))


def _timeout_error(state: StepState, code: str, message: str, fired: Fired) -> StepError:
    has_begun = code == "TIMEOUT"
    return {
        "code": code,
        "message": message,
        "retryable": not has_begun,
        "phase": "execution" if has_begun else "validation",
        "context": {"rule": f"{state.type}/timeout", "clock": fired.as_context()},
    }


def _answer(call: Call, outcome: Outcome) -> JsonObject:
    """Return the envelope. If an end was not seen, it claims neither `killed` nor that nothing has survived."""
    is_unseen = any(note["code"] == "END_UNSEEN" for note in outcome.warnings)
    if is_unseen and outcome.ending is Ending.KILLED:
        outcome.ending = Ending.ABANDONED
    envelope = answer_at(call, outcome, workflow.time_ns())
    if is_unseen and not outcome.survivors:
        del envelope.meta["survivors"]
    return envelope.to_dict()


def _record_unbegun(state: StepState) -> None:
    if state.side_effects is None and not state.attempts:
        state.side_effects = SideEffects.NONE


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _signal(run_id: str, name: str, argument: OrderInput | int) -> None:
    with contextlib.suppress(ApplicationError):  # the nested run has ended meanwhile
        await workflow.get_external_workflow_handle(run_id).signal(name, argument)


async def _gather(waiting: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all. A cancellation is passed on to each, and all are waited for."""
    tasks = [asyncio.get_running_loop().create_task(each) for each in waiting]
    while not all(task.done() for task in tasks):
        try:
            await workflow.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
    return [task.result() for task in tasks]


def _replace_state(state: StepState, by: StepState) -> None:
    """Copy all fields of another state, because the scheduler holds this very object."""
    for name in fields_of(StepState):
        setattr(state, name, getattr(by, name))
