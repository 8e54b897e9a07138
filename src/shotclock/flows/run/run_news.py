"""Overtime and wind-downs of a run: they move its steps' deadlines, and are recorded and reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from ...calls.call import Call, WindDown, Work
from ...calls.control import control_of, live_calls
from ...calls.control_channel import runs as running_runs
from ...core.errors import Failure
from ...core.limits import NS_PER_MS, WallTime
from ...core.overtime import OvertimeRequest
from ...core.proposal import Proposal
from ...core.value_types import JsonObject
from ...store.home import StoreBusy
from ...store.runs import StepRecord
from ...supervise.clock import monotonic_ns, wall_time
from .run_context import Deadlines, RunContext
from .scheduler import Scheduler
from .state import Status, StepState

BUSY_PAUSE_S = 0.05  # the pause before news of a run is written again while other processes keep the store busy


class RunWork(Work):
    """The work of a run: its steps wind down by themselves, and no other step starts."""

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
    """Move the deadlines of the running steps. Later steps read the run's when they begin."""
    if run.bound.bell is None:
        return
    became = deadlines.move(run.bound.bell)
    for inner in live_calls.inside(run):  # with the calls that a step makes, which are inside the same deadline
        if (parent := became.get(id(inner.time.parent))) is not None:
            control_of(inner).follow_caller(parent)


class RunNews:
    """Records and reports overtime and wind-downs of a run and its steps."""

    def __init__(self, context: RunContext, scheduler: Scheduler, began_at: WallTime, began_ns: int) -> None:
        self._context, self._scheduler = context, scheduler
        self._began_at, self._began_ns = began_at, began_ns

    def handle(self, call: Call, news: OvertimeRequest | WindDown) -> None:
        run = self._context
        if call is not run.call and call.inside_of is not run.call:
            return  # a nested run reports it itself
        described: JsonObject = run.redaction.value(describe_news(call, news))
        name = call.name.removeprefix("step ") if call is not run.call else ""
        state = self._scheduler.states.get(name)
        if isinstance(news, WindDown) and news.fired is None:  # not by a limit of this one attempt
            run.winding_down.add(name)
        if call is run.call and call.bound.bell is not None and not isinstance(news, WindDown):
            self._write(self._write_deadline)
            # The proposals of waiting steps stay open as long as the run can use them now.
            for proposal in self._context.shared.person_wait.waiting.values():
                if isinstance(proposal, Proposal) and (bell := self._context.deadlines.of("")) is not None:
                    self._context.shared.inbox().follow(proposal.id, wall_time() + bell.remaining_ms(monotonic_ns()))
        elif state is not None and state.status is Status.RUNNING:
            state.overtime.append(described)
            if call.bound.owner == call.name:
                state.timeout_ms = call.bound.limit_ms
            self._write(partial(self._write_step, state))
        if run.on_news is not None:
            run.on_news(name, described)

    def _write(self, write: Callable[[], None]) -> None:
        """Write at once, or again in a moment if the store is busy: only the store has it after a `kill -9`."""
        try:
            write()
        except StoreBusy:
            asyncio.get_running_loop().call_later(BUSY_PAUSE_S, self._write, write)
        except Failure:
            pass  # the end of the step is written again with all of this

    def _write_step(self, state: StepState) -> None:
        if state.status is Status.RUNNING:  # the scheduler writes the end, with all of this
            record = StepRecord(state.id, state.status.value, state.to_record_so_far())
            self._context.shared.store.runs.record(self._context.run_id, [record], wall_time(), wait_ms=0)

    def _write_deadline(self) -> None:
        run, call = self._context, self._context.call
        if running_runs.get(run.run_id) is call:
            elapsed_ms = (call.started_ns - self._began_ns) // NS_PER_MS
            deadline_at = self._began_at + (elapsed_ms + call.bound.limit_ms)
            run.shared.store.runs.extend(run.run_id, deadline_at, wait_ms=0)


def describe_news(call: Call, news: OvertimeRequest | WindDown) -> JsonObject:
    """Return an event as reports and answers show it."""
    if not isinstance(news, WindDown):
        return {"event": "overtime", **news.as_meta()}
    return {
        "event": "wind_down",
        "at_ms": (news.at_ns - call.started_ns) // NS_PER_MS,
        "by": news.by,
        "reason": news.reason,
        "within_ms": max(0, news.until_ns - news.at_ns) // NS_PER_MS,
    }
