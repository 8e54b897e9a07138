"""The scheduler of a run: it starts a step once its dependencies are done, and records every change first.

One loop owns all states. Changes since its last turn are recorded in one transaction, and a step starts only after its
start, and the ends it waited for, are recorded. AGENTS.md: recorded before it starts, one way to end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from ...core.envelope import Warning_, warning
from ...core.errors import Failure, SideEffects
from ...core.limits import NS_PER_MS
from ...core.value_types import JsonObject, value
from ...supervise.clock import monotonic_ns
from ..check.plan import clean_up_steps, ends_awaited, graph_of, needs, on_demand, reach
from ..file.schema import WorkflowFile, failure_reaction
from ..steps.provider import STEP_TYPES, Reaction, StepPart
from ._finally_steps import describe_run, has_begun
from .run_context import Deadlines, OnChange, ParallelSlots, Slot
from .state import OutputsView, Reason, Status, StepState, StepsView, unstarted_state

# The limit of `goto` from one step: a longer loop is taken for endless.
LOOP_CAP = 10
CALL_CAP = 100  # the limit of `run` from one step, higher because several steps may go back to it
# The limit of all starts, with repetitions. More come from steps that start each other.
START_CAP = 100_000

Execute = Callable[[str, StepPart, StepState, JsonObject], Awaitable[None]]
Record = Callable[[Sequence[StepState]], Awaitable[None]]


@value
class RunLimits:
    slots: ParallelSlots
    deadlines: Deadlines
    began_ns: int  # perhaps in another process
    now_ns: Callable[[], int] = monotonic_ns  # a Temporal workflow has its own clock, which replays


class Scheduler:
    """The steps of one run. `execute` runs one of them to its end and leaves its state final.

    A stopped run stops its steps and then runs the `on_fail` clean-up of those that did not succeed. The steps of
    `finally` begin once everything else has ended, however that was, except in a parked run.
    """

    def __init__(
        self,
        workflow: WorkflowFile,
        *,
        execute: Execute,
        record: Record,
        scope: Mapping[str, Any],
        on_change: OnChange | None = None,
        on_skip: OnChange | None = None,
        recorded: Mapping[str, StepState] | None = None,
        limits: RunLimits | None = None,
    ) -> None:
        """Prepare the steps of a run. `recorded` holds the states that an earlier process stored."""
        self._workflow = workflow
        self._execute = execute
        self._record = record
        self._scope = scope
        self._on_change, self._on_skip = on_change, on_skip
        self._graph = graph_of(workflow)
        self._followers: dict[str, list[str]] = {name: [] for name in self._graph}
        for name, groups in self._graph.items():
            for other in needs(groups):
                self._followers[other].append(name)
        self._on_demand = on_demand(workflow)
        self._last = frozenset(workflow.finally_)
        self._any_end = {name: ends_awaited(step) for name, step in workflow.steps.items()}
        self.states: dict[str, StepState] = {}
        for name in workflow.steps:
            self.states[name] = unstarted_state(workflow, name)
        self._met = dict.fromkeys(self._graph, 0)  # how many dependency groups of each step, from the first, are met
        self._clean_up = clean_up_steps(workflow)
        slots = ParallelSlots(workflow.max_parallelism)
        self._limits = limits or RunLimits(slots, Deadlines(None, 0, self._clean_up), monotonic_ns())
        self._slots: dict[str, Slot] = {}
        self._ready: list[str] = []
        self._starting: list[str] = []
        self._under_way: dict[str, None] = {}  # steps that have not ended, in order: a replayed run has to repeat it
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unwritten: list[StepState] = []
        self._trouble: Failure | None = None  # of the last record
        self._news = asyncio.Event()
        self._bug: BaseException | None = None
        self._starts = 0
        self._over: deque[str] = deque()  # ended steps whose followers are not decided yet
        self._cleaned: set[str] = set()
        self._is_stopping = False
        self._is_cleaning = False
        self._is_finishing = False  # the steps of `finally` have begun
        self._was_stopped = False  # from outside
        self._may_finish = True
        self.run_so_far: JsonObject = {}  # for the templates of `finally` steps
        self._is_winding_down = False
        self._unrecorded: Failure | None = None  # why the work was stopped: the store did not take its records
        self.is_over: bool = False  # only records are still to be written
        self.is_parked: bool = False  # only people can continue the run, and the caller waits no longer
        self.notes: list[Warning_] = []
        for name, state in (recorded or {}).items():
            if name in self.states:
                self.states[name] = state
                if state.is_newly_interrupted:
                    self._unwritten.append(state)
                    self._over.append(name)

    async def run(self) -> None:
        """Run until every step is final and recorded. Raise bugs after a stop, and the error of `record` that stopped
        the work, after clean-up and `finally`, which run whether or not they can be recorded."""
        try:
            if not has_begun(self.states):
                await self._run_until_finally()
            elif self._is_stopping:
                self._limits.deadlines.begin_clean_up(self._limits.now_ns())
            if not self.is_parked and self._last and self._may_finish:
                self._begin_finally()
                await self._work()
        finally:
            self._is_stopping, self._is_cleaning, self._is_finishing = True, False, False
            await self._write_if_possible()
            await self._stop_tasks(self._tasks)
            for name in list(self._slots):
                self._give_back(name)
            if not self.is_parked:
                self._settle_rest()
            self.is_over = True
            await self._write_if_possible()
            if self._unwritten:
                self.notes.append(warning("NOT_WRITTEN_DOWN", f"the last changes of steps: {self._trouble}"))
        if self._unrecorded is not None:
            raise self._unrecorded

    async def _run_until_finally(self) -> None:
        if not self._is_stopping and any(map(self._fails_fast, self.states.values())):
            self.stop_at_once(clean_up=True)  # as the process that died had begun to
        for name in self.states:
            self._consider(name)
        self._follow_up()
        await self._work()
        if self._is_stopping and not self.is_parked:
            await self._write_if_possible()  # before the wait for steps, which may need all of their grace
            await self._stop_tasks(name for name in self._tasks if name not in self._clean_up & self._on_demand)
            self._begin_clean_up()
            await self._work()

    def _begin_finally(self) -> None:
        """Settle all other steps, and start those that run last."""
        self._drop(name for name in self._under_way if name not in self._tasks)
        self._ready = []
        self._settle(state for name, state in self.states.items() if name not in self._last)
        others = (state for name, state in self.states.items() if name not in self._last)
        self.run_so_far = describe_run(
            others,
            is_stopped=self._was_stopped,
            is_winding_down=self._is_winding_down,
            is_out_of_time=self._limits.deadlines.have_fired,
        )
        self._limits.deadlines.begin_finally(self._limits.now_ns())
        self._is_cleaning, self._is_finishing = False, True
        for name in self._workflow.finally_:
            self._consider(name)
        self._follow_up()

    async def _work(self) -> None:
        while self._under_way and not self._is_halted:
            self._mark_running()
            await self._write_if_possible()
            if self._trouble is not None and not self._is_stopping and not self._is_finishing:
                self._unrecorded = self._trouble
                self._halt()
            self._begin()
            if self._under_way:
                await self._news.wait()  # bounded by the timeouts of the steps
            self._news.clear()
            if self._bug is not None:
                raise self._bug

    @property
    def _is_halted(self) -> bool:
        return self._is_stopping and not (self._is_cleaning or self._is_finishing)

    @property
    def is_hurried(self) -> bool:
        """Whether records may only wait for a moment: steps are to be stopped, or a person waits for the end."""
        return self._was_stopped or (self._is_halted and not self.is_over)

    @property
    def may_park(self) -> bool:
        return not (self._is_stopping or self._is_finishing or self._ready or self._starting)

    def park(self) -> None:
        """Park the run. Every running step must be waiting for people."""
        self.is_parked = self._is_stopping = True
        for task in self._tasks.values():
            task.cancel()
        self._news.set()

    def record_wait(self, state: StepState) -> None:
        """Record and report that a running step waits for a person, or does so no longer."""
        if self.states.get(state.id) is state and state.status is Status.RUNNING:
            self._unwritten.append(state)
            self._news.set()

    def wind_down(self) -> None:
        self._is_winding_down = True
        kept = self._clean_up | self._last
        self._drop(name for name in self._under_way if name not in self._tasks and name not in kept)
        self._ready = [name for name in self._ready if name in self._under_way]
        self._news.set()

    def stop(self) -> None:
        """Stop the run from outside. Steps of `finally` that have begun continue."""
        self._was_stopped = True
        self._halt()

    def _halt(self) -> None:
        self._is_stopping = True
        self._news.set()

    def stop_at_once(self, *, clean_up: bool) -> None:
        """Stop a run of another process before any step continues."""
        self._halt()
        self._may_finish = clean_up
        for name, state in self.states.items():
            if state.is_finally:
                continue
            if state.has_begun and not state.status.is_final:
                state.cancel()
                if not state.attempts and state.type != "workflow":
                    state.side_effects = SideEffects.NONE  # it only waited
                self._unwritten.append(state)
            elif not self._fails_fast(state):
                continue
            if clean_up:
                self._over.append(name)
        # What the other process has begun to clean up is not begun again.
        self._cleaned = {
            name for name, state in self.states.items() if state.is_called and state.started_ms is not None
        }

    def _fails_fast(self, state: StepState) -> bool:
        is_bad = state.status.is_bad and not state.continues
        return is_bad and self._workflow.fail_fast and not state.is_finally

    def _begin_clean_up(self) -> None:
        self._drop(name for name in self._under_way if name not in self._tasks)
        self._ready = []
        self._limits.deadlines.begin_clean_up(self._limits.now_ns())
        self._is_cleaning = True
        self._follow_up()

    def _drop(self, names: Iterable[str]) -> None:
        """Make steps pending that have not begun, although their start may be recorded."""
        for name in list(names):
            self._under_way.pop(name, None)
            if name in self._starting:
                self._starting.remove(name)
                self.states[name].status, self.states[name].started_ms = Status.PENDING, None
            self._give_back(name)  # which may grant the slot to the next of them

    def scope_for_templates(self) -> JsonObject:
        run = {"run": {**self._scope.get("run", {}), **self.run_so_far}} if self.run_so_far else {}
        return {**self._scope, **run, "outputs": OutputsView(self.states), "steps": StepsView(self.states)}

    async def _write_if_possible(self) -> None:
        """Record the changes of steps. Those that cannot be recorded are recorded with the next ones."""
        states = list({id(state): state for state in self._unwritten}.values())
        self._unwritten.clear()
        self._trouble = None
        if not states:
            return
        try:
            await self._record(states)
        except Failure as failure:
            self._trouble = failure
            self._unwritten[:0] = states
            return
        for state in states:
            if self._on_change is not None and state.status is not Status.PENDING:
                try:
                    self._on_change(state)
                except Exception as error:  # a broken listener does not stop the run
                    self._on_change = None
                    self.notes.append(warning("NOT_TOLD", f"of changes after that of {state.id}: {error}"))

    def _consider(self, name: str, because: StepState | None = None) -> None:
        state = self.states[name]
        if state.status is not Status.PENDING or name in self._under_way or state.is_finally != self._is_finishing:
            return
        if not self._is_finishing and (self._is_stopping or (self._is_winding_down and name not in self._clean_up)):
            return
        if name in self._on_demand:
            if state.is_called:
                self._start(name)
            return
        groups, met = self._graph[name], self._met[name]
        while met < len(groups) and any(self._is_met(name, self.states[other]) for other in groups[met]):
            met += 1
        self._met[name] = met
        if met == len(groups):
            self._start(name)
        elif because is None or not because.has_passed:
            for group in groups[met:]:
                members = [self.states[other] for other in group]
                if all(member.status.is_final and not self._is_met(name, member) for member in members):
                    self._skip(state, members)
                    return

    def _is_met(self, name: str, dependency: StepState) -> bool:
        if dependency.has_passed or (dependency.status.is_final and dependency.id in self._any_end[name]):
            return True
        is_left_out = dependency.reason in (Reason.CONDITION, Reason.NOT_CHOSEN)
        return is_left_out and self._workflow.steps[name].accept_skipped

    def _skip(self, state: StepState, members: list[StepState]) -> None:
        culprit = next((member for member in members if member.status.is_bad), members[0])
        failed = culprit.status.is_bad or culprit.reason is Reason.DEPENDENCY_FAILED
        state.cause = culprit.cause or culprit.id
        self._mark_skipped(state, Reason.DEPENDENCY_FAILED if failed else Reason.DEPENDENCY_SKIPPED)
        self._over.append(state.id)

    def _mark_skipped(self, state: StepState, reason: Reason) -> None:
        state.status, state.reason = Status.SKIPPED, reason
        self._unwritten.append(state)
        if self._on_skip is not None:
            self._on_skip(state)

    def _start(self, name: str) -> None:
        if not self._limits.deadlines.may_start(name):
            return  # it is skipped when the run ends
        self._starts += 1
        self._under_way[name] = None
        if STEP_TYPES[self.states[name].type].takes_slot:
            self._slots[name] = self._limits.slots.ask(lambda: self._make_ready(name))
        else:
            self._ready.append(name)

    def _make_ready(self, name: str) -> None:
        self._ready.append(name)
        self._news.set()

    def _give_back(self, name: str) -> None:
        if (slot := self._slots.pop(name, None)) is not None:
            slot.give_back()

    def _mark_running(self) -> None:
        """Mark the ready steps as running. They begin after that is recorded."""
        now_ms = (self._limits.now_ns() - self._limits.began_ns) // NS_PER_MS
        while self._ready:
            name = self._ready.pop(0)
            if not self._limits.deadlines.may_start(name):  # the run's time ended while it waited for its slot
                self._drop([name])
                continue
            self._starting.append(name)
            state = self.states[name]
            state.status, state.started_ms, state.has_begun = Status.RUNNING, now_ms, False
            state.waits_for, state.waited_ms = [], 0
            self._unwritten.append(state)

    def _begin(self) -> None:
        unbegun = [name for name in self._starting if name not in self._tasks]
        for name in unbegun if not self._is_halted else ():
            task = self._tasks[name] = asyncio.get_running_loop().create_task(self._step(name))
            task.add_done_callback(self._handle_bug)

    def _handle_bug(self, task: asyncio.Task[None]) -> None:
        """End the run with a bug. Otherwise it would wait for the step for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bug = error
            self._news.set()

    async def _step(self, name: str) -> None:
        state, began_ns = self.states[name], self._limits.now_ns()
        self._starting.remove(name)
        try:
            await self._execute(name, self._workflow.steps[name], state, self.scope_for_templates())
        except asyncio.CancelledError:
            if self.is_parked:
                self.states[name] = state.to_parked()
                self._unwritten.append(self.states[name])
                del self._tasks[name]
                return
            state.cancel()
        finally:
            self._give_back(name)
        state.duration_ms = (self._limits.now_ns() - began_ns) // NS_PER_MS
        del self._tasks[name]
        self._under_way.pop(name, None)
        self._unwritten.append(state)
        self._over.append(name)
        self._follow_up()
        self._news.set()

    async def _stop_tasks(self, names: Iterable[str]) -> None:
        """Stop steps and wait for their end. Bounded: a cancelled step is killed after its grace."""
        tasks = [self._tasks[name] for name in names]
        for task in tasks:
            if not task.cancelling():  # once only: a second time would cut its own clean-up
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _follow_up(self) -> None:
        """Decide about the followers of ended steps. Not recursive, because a chain of thousands is skipped at once."""
        while self._over and not self._is_halted:
            name = self._over.popleft()
            state = self.states[name]
            if self._is_cleaning:
                self._clean_up_after(name, state)
                continue
            if self._fails_fast(state):
                self._over.appendleft(name)  # it is cleaned up together with the steps that are stopped for it
                self._halt()
                return
            reaction = self._reaction(name, state)
            if reaction is not None:
                self._react(name, state, reaction)
            for follower in self._followers[name]:
                self._consider(follower, self.states[name])

    def _clean_up_after(self, name: str, state: StepState) -> None:
        reaction = None if state.status is Status.SUCCEEDED else self._reaction(name, state)
        for other in () if reaction is None else reaction.run:
            if other in self._under_way or other in self._cleaned or self.states[other].reason is Reason.NOT_CHOSEN:
                continue
            self._cleaned.add(other)
            self._renew(other)
            self.states[other].is_called = True
            self._unwritten.append(self.states[other])  # otherwise a run that is cut off now would not resume it
            self._start(other)

    def _reaction(self, name: str, state: StepState) -> Reaction | None:
        if state.status is Status.SUCCEEDED:
            return self._workflow.steps[name].on_success
        # A wound-down step whose items never began is cancelled, too.
        if state.status in (Status.FAILED, Status.TIMED_OUT, Status.CANCELLED):
            return failure_reaction(self._workflow, name)
        # After an interruption its clean-up is run; nothing is repeated.
        if state.status is Status.INTERRUPTED and (reaction := failure_reaction(self._workflow, name)) is not None:
            return Reaction(run=reaction.run)
        return None

    def _react(self, name: str, state: StepState, reaction: Reaction) -> None:
        called = [other for other in reaction.run if other != name]  # `defaults` name the clean-up step itself as well
        if called and state.calls >= CALL_CAP:
            self._warn_of_loop(state, f"{name} called for {', '.join(called)} {CALL_CAP} times, which is the limit")
        elif called:
            state.calls += 1
            for other in called:
                self._again(other)
        if reaction.goto is not None:
            if state.loops >= LOOP_CAP:
                self._warn_of_loop(state, f"{name} went back to {reaction.goto} {LOOP_CAP} times, which is the limit")
            else:
                state.loops += 1
                self._again(reaction.goto)

    def _warn_of_loop(self, state: StepState, message: str) -> None:
        state.warnings.append(warning("LOOP_CAP", message))
        self.notes.append(warning("LOOP_CAP", message))

    def _again(self, name: str) -> None:
        may_start = self._limits.deadlines.may_start
        if self._starts > START_CAP or name in self._under_way or not may_start(name):
            return
        for other in filter(may_start, reach([name], self._followers.__getitem__)):
            self._met[other] = 0
            if other not in self._under_way:
                self._renew(other)
        if name in self._on_demand:
            self.states[name].is_called = True
            self._unwritten.append(self.states[name])
        self._consider(name)

    def _renew(self, name: str) -> None:
        """Begin a new visit of an ended step, recorded so that a resumed run repeats it."""
        if self.states[name].status.is_final and self.states[name].reason is not Reason.NOT_CHOSEN:
            self.states[name] = self.states[name].fresh()
            self.states[name].visit += 1
            self._unwritten.append(self.states[name])

    def _settle_rest(self) -> None:
        self._drop(self._starting)
        self._settle(self.states.values())

    def _settle(self, states: Iterable[StepState]) -> None:
        for state in states:
            if state.status.is_final:
                continue
            if state.status is Status.RUNNING:
                state.cancel()
                self._unwritten.append(state)
            else:
                is_uncalled = state.id in self._on_demand and not state.is_called
                self._mark_skipped(state, Reason.ON_DEMAND if is_uncalled else Reason.RUN_ENDED)
