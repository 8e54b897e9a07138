"""A run: each step starts the moment what it waits for is done, inside one deadline, and every change is written down.

One loop owns all states, so nothing can be decided twice. What a step does is its provider's; here is only when. What
has changed since the loop last looked goes into one transaction, the ends of steps together with the starts that they
make possible. Nobody starts before it is written down that it does, or before the ends that it waited for are.

docs/design.md: R39, R46.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from ..core.deadlines import NS_PER_MS, Deadline
from ..core.envelope import Warning_, warning
from ..core.errors import Failure
from ..core.graph import needs
from ..process.clock import monotonic_ns
from ..providers.step_type import STEP_TYPES, Reaction, StepPart
from .plan import clean_up_steps, graph_of, on_demand, step_timeout_ms
from .schema import WorkflowFile
from .state import Reason, Status, StepState

# --- slots ------------------------------------------------------------------------------------------------
# How much is under way at a time, over a whole run with its items and the files that it runs.
#
# A step takes a place before it starts. One that is made of parts (the items of a `for_each`, the steps of another
# file) lends its own place to them and asks for more around it. So a part never waits for a place that only its own
# step could give back, and with one place at least the parts go on one after the other.


class _State(Enum):
    WAITING = auto()
    """For one of its own places."""
    OUTSIDE = auto()
    """It has one of its own, and waits for one around."""
    TAKEN = auto()
    OVER = auto()


class Slot:
    """One that was asked for."""

    def __init__(self, places: ParallelSlots, granted: Callable[[], None]) -> None:
        self._places = places
        self._granted = granted
        self.state = _State.WAITING
        self.outer: Slot | None = None
        """The one around, where it is not the one that was lent."""

    def grant(self) -> None:
        self.state = _State.TAKEN
        self._granted()

    def give_back(self) -> None:
        """Also where it was not granted yet: then it will not be."""
        was, self.state = self.state, _State.OVER
        self._places.free(self, was)


class ParallelSlots:
    def __init__(self, most: int, around: ParallelSlots | None = None) -> None:
        """`around` are those that the step, whose parts ask here, has one of."""
        self._free = most
        self._around = around
        self._is_lent_free = around is not None
        self._waiting: deque[Slot] = deque()
        self._outside: deque[Slot] = deque()

    def ask(self, granted: Callable[[], None]) -> Slot:
        """`granted` is called once there is one, which may be now. In the order in which they were asked for."""
        place = Slot(self, granted)
        self._waiting.append(place)
        self._hand_out()
        return place

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it. Bounded by the clocks of those who have one."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = self.ask(lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
            yield
        finally:
            place.give_back()

    def free(self, place: Slot, was: _State) -> None:
        if was in (_State.WAITING, _State.OVER):
            return
        self._free += 1
        if place.outer is not None:
            place.outer.give_back()
        elif self._around is not None:
            self._is_lent_free = True
            self._lend()
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free > 0 and self._waiting:
            place = self._waiting.popleft()
            if place.state is not _State.WAITING:
                continue
            self._free -= 1
            if self._around is None:
                place.grant()
                continue
            place.state = _State.OUTSIDE
            self._outside.append(place)
            self._lend()
            if place.state is _State.OUTSIDE:
                place.outer = self._around.ask(place.grant)

    def _lend(self) -> None:
        """Give the lent place to whoever has waited longest for one around."""
        while self._is_lent_free and self._outside:
            place = self._outside.popleft()
            if place.state is _State.OUTSIDE:
                self._is_lent_free = False
                outer, place.outer = place.outer, None
                if outer is not None:
                    outer.give_back()
                place.grant()


# How often a step may send the run back to an earlier one. A loop that has not ended by then is not going to.
LOOP_CAP = 10
# How often one may call for others by `run`. It may be gone back to by several, so it is more.
CALL_CAP = 100
# How many steps may be started in all, with every repetition: past this something feeds itself.
START_CAP = 100_000
# What all clean-up of a run may take once it was stopped, whatever its steps say. Each has its own clock before that.
CLEAN_UP_LIMIT_MS = 300_000

Execute = Callable[[str, StepPart, StepState, dict[str, Any]], Awaitable[None]]
Record = Callable[[Sequence[StepState]], Awaitable[None]]
OnChange = Callable[[StepState], None]


class Deadlines:
    """Until when the steps of a run may work: clean-up until the run's own bell, all others until a little earlier."""

    def __init__(self, bell: Deadline | None, kept_ms: int, clean_up: frozenset[str]) -> None:
        self._run = self._clean_up_by = bell
        self._work = bell if bell is None or not kept_ms else Deadline(bell.at_ns - kept_ms * NS_PER_MS)
        self._clean_up = clean_up

    def of(self, step_id: str) -> Deadline | None:
        return self._clean_up_by if step_id in self._clean_up else self._work

    def owns(self, deadline: Deadline | None) -> bool:
        """Whether it is the run's clock. That of a stop is not: somebody else stopped it."""
        return deadline is not None and (deadline is self._run or deadline is self._work)

    def begin_clean_up(self) -> None:
        """The run was stopped: what it still does has an end, also where nobody gave the run one."""
        by = Deadline.after_ms(monotonic_ns(), CLEAN_UP_LIMIT_MS)
        if self._run is None or by.at_ns < self._run.at_ns:
            self._clean_up_by = by


class Scheduler:
    """The steps of one run. `execute` runs one of them to its end and leaves its state final.

    A run that is stopped (by a signal, by `fail_fast`) stops its steps and then runs what the `on_fail` of those that
    did not succeed declares as clean-up. Nothing else starts any more.
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
        known: Mapping[str, StepState] | None = None,
        began_ns: int | None = None,
        places: ParallelSlots | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """`places` are shared with the items of steps and the runs inside this one.

        `record` returns when it is written down, and raises if it cannot be. `on_skip` hears of those that are never
        executed. `known` is what an earlier process wrote down of this very run, `began_ns` when that began."""
        self._workflow = workflow
        self._execute = execute
        self._record = record
        self._scope = scope
        self._on_change = on_change
        self._on_skip = on_skip
        self._graph = graph_of(workflow)
        self._behind: dict[str, list[str]] = {name: [] for name in self._graph}
        for name, groups in self._graph.items():
            for other in needs(groups):
                self._behind[other].append(name)
        self._on_demand = on_demand(workflow)
        self.states: dict[str, StepState] = {}
        for name, step in workflow.steps.items():
            self.states[name] = StepState(
                name,
                step.type,
                timeout_ms=step_timeout_ms(workflow, step),
                continues=step.continue_on_failure or workflow.defaults.continue_on_failure,
            )
        self._met = dict.fromkeys(self._graph, 0)
        """How many of the groups that it waits for, counted from the first, are known to have been met."""
        self._started_ns = monotonic_ns() if began_ns is None else began_ns
        self._places = places or ParallelSlots(workflow.max_parallelism)
        self._asked: dict[str, Slot] = {}
        """The place that a step has or waits for."""
        self._ready: list[str] = []
        """What starts now: it has its place, or needs none."""
        self._starting: list[str] = []
        """What starts when that is written down."""
        self._under_way: set[str] = set()
        """Decided on, and not ended."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unwritten: list[StepState] = []
        self._news = asyncio.Event()
        self._starts = 0
        self._over: deque[str] = deque()
        """Ended or skipped, and what that means for others is not decided yet."""
        self._clean_up = clean_up_steps(workflow)
        self._deadlines = deadlines or Deadlines(None, 0, self._clean_up)
        self._cleaned: set[str] = set()
        """Called for as clean-up since the run was stopped."""
        self._is_stopping = False
        self._is_cleaning = False
        self.is_parked = False
        """All that was left to do needs a person, and nobody waits any longer. What waits is not over."""
        self.notes: list[Warning_] = []
        """What went wrong beside the steps."""
        for name, state in (known or {}).items():
            if name in self.states:
                self.states[name] = state
                if state.status is Status.INTERRUPTED:
                    self._unwritten.append(state)

    async def run(self) -> None:
        """Until every step is final and written down. Bounded by the deadline around the steps, since each ends inside
        it. Raises what `record` raises, with everything stopped."""
        try:
            for name in self.states:
                self._consider(name)
            self._follow_up()
            await self._work()
            if self._is_stopping and not self.is_parked:
                await self._write_what_can_be()  # before anybody is waited for, who may need all of his grace
                await self._stop_tasks(self._tasks.keys() - (self._clean_up & self._on_demand))
                self._begin_clean_up()
                await self._work()
        finally:
            self._is_stopping, self._is_cleaning = True, False
            await self._write_what_can_be()  # before anybody is waited for, who may need all of his grace
            await self._stop_tasks(self._tasks)
            for name in list(self._asked):
                self._give_back(name)
            if not self.is_parked:
                self._settle_rest()
            await self._write_what_can_be()

    async def _work(self) -> None:
        while self._under_way and not self._is_halted:
            self._take_ready()
            await self._write()
            self._begin()
            await self._news.wait()  # bounded by the clocks of the steps
            self._news.clear()

    @property
    def _is_halted(self) -> bool:
        """Nothing starts any more."""
        return self._is_stopping and not self._is_cleaning

    def park(self) -> None:
        """Only while nothing but people is waited for. A run that is being stopped is not parked."""
        if not self._is_stopping:
            self.is_parked = self._is_stopping = True
            self._news.set()

    def stop(self) -> None:
        """Stop what runs, and clean up."""
        self._is_stopping = True
        self._news.set()

    def _begin_clean_up(self) -> None:
        for name in self._starting:  # written down at the most
            self.states[name].status, self.states[name].started_ms = Status.PENDING, None
        self._starting = []
        for name in self._under_way - self._tasks.keys():
            self._under_way.discard(name)
            self._give_back(name)  # which may be granted to the next of these
        self._ready = []
        self._deadlines.begin_clean_up()
        self._is_cleaning = True
        self._follow_up()

    def scope_for(self, name: str) -> dict[str, Any]:
        """What its templates can see."""
        return {**self._scope, "outputs": Outputs(self.states), "steps": Shown(self.states)}

    # --- writing down -------------------------------------------------------------------------------------

    async def _write(self) -> None:
        """All that has changed, in one transaction. Whoever watches is told afterwards."""
        states = list({id(state): state for state in self._unwritten}.values())
        self._unwritten.clear()
        if not states:
            return
        await self._record(states)
        for state in states:
            if self._on_change is not None and state.status is not Status.PENDING:
                try:
                    self._on_change(state)
                except Exception as error:  # whoever watches does not stop what it watches
                    self._on_change = None
                    self.notes.append(warning("NOT_TOLD", f"of changes after that of {state.id}: {error}"))

    async def _write_what_can_be(self) -> None:
        try:
            await self._write()
        except Failure as failure:
            self.notes.append(warning("NOT_WRITTEN_DOWN", f"the last changes of steps: {failure}"))

    # --- deciding -----------------------------------------------------------------------------------------

    def _consider(self, name: str, because: StepState | None = None) -> None:
        """Start it, skip it, or leave it waiting. `because` of a step that has ended; else everything is looked at."""
        state = self.states[name]
        if state.status is not Status.PENDING or name in self._under_way or self._is_stopping:
            return
        if name in self._on_demand:
            if state.is_called:  # and until then it waits
                self._start(name)
            return
        groups, met = self._graph[name], self._met[name]
        while met < len(groups) and any(self.states[other].has_passed for other in groups[met]):
            met += 1
        self._met[name] = met
        if met == len(groups):
            self._start(name)
        elif because is None or not because.has_passed:
            for group in groups[met:]:
                members = [self.states[other] for other in group]
                if all(member.status.is_final and not member.has_passed for member in members):
                    self._skip(state, members)
                    return

    def _skip(self, state: StepState, members: list[StepState]) -> None:
        culprit = next((member for member in members if member.status.is_bad), members[0])
        failed = culprit.status.is_bad or culprit.reason is Reason.DEPENDENCY_FAILED
        state.cause = culprit.cause or culprit.id
        self._skipped(state, Reason.DEPENDENCY_FAILED if failed else Reason.DEPENDENCY_SKIPPED)
        self._over.append(state.id)

    def _skipped(self, state: StepState, reason: Reason) -> None:
        state.status, state.reason = Status.SKIPPED, reason
        self._unwritten.append(state)
        if self._on_skip is not None:
            self._on_skip(state)

    def _start(self, name: str) -> None:
        self._starts += 1
        self._under_way.add(name)
        if STEP_TYPES[self.states[name].type].takes_slot:
            self._asked[name] = self._places.ask(lambda: self._is_ready(name))
        else:
            self._ready.append(name)

    def _is_ready(self, name: str) -> None:
        self._ready.append(name)
        self._news.set()

    def _give_back(self, name: str) -> None:
        if (place := self._asked.pop(name, None)) is not None:
            place.give_back()

    # --- running ------------------------------------------------------------------------------------------

    def _take_ready(self) -> None:
        """Those that start now, which is not true before it is written down."""
        self._starting, self._ready = self._ready, []
        now_ms = (monotonic_ns() - self._started_ns) // NS_PER_MS
        for name in self._starting:
            state = self.states[name]
            state.status, state.started_ms = Status.RUNNING, now_ms
            self._unwritten.append(state)

    def _begin(self) -> None:
        while self._starting and not self._is_halted:
            name = self._starting.pop(0)
            self._tasks[name] = asyncio.get_running_loop().create_task(self._step(name))

    async def _step(self, name: str) -> None:
        state, began_ns = self.states[name], monotonic_ns()
        try:
            await self._execute(name, self._workflow.steps[name], state, self.scope_for(name))
        except asyncio.CancelledError:
            if self.is_parked:
                self.states[name] = state.to_parked()
                self._unwritten.append(self.states[name])
                del self._tasks[name]
                return
            _cancel(state)
        finally:
            self._give_back(name)
        state.duration_ms = (monotonic_ns() - began_ns) // NS_PER_MS
        del self._tasks[name]
        self._under_way.discard(name)
        self._unwritten.append(state)
        self._over.append(name)
        self._follow_up()
        self._news.set()

    async def _stop_tasks(self, names: Iterable[str]) -> None:
        """Stop what runs, for real. Bounded: a cancelled step is killed after its grace."""
        tasks = [self._tasks[name] for name in names]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- after a step -------------------------------------------------------------------------------------

    def _follow_up(self) -> None:
        """What the end of a step means for the others. No recursion: a chain of thousands is skipped at once."""
        while self._over and not self._is_halted:
            name = self._over.popleft()
            state = self.states[name]
            if self._is_cleaning:
                self._clean_up_after(name, state)
                continue
            if state.status.is_bad and self._workflow.fail_fast and not state.continues:
                self._over.appendleft(name)  # its clean-up comes with that of those who are stopped for it
                self.stop()
                return
            reaction = self._reaction(name, state)
            if reaction is not None:
                self._react(name, state, reaction)
            for follower in self._behind[name]:
                self._consider(follower, self.states[name])

    def _clean_up_after(self, name: str, state: StepState) -> None:
        reaction = self._workflow.steps[name].on_fail or self._workflow.defaults.on_fail
        if reaction is None or state.status not in (Status.FAILED, Status.TIMED_OUT, Status.CANCELLED):
            return
        for other in reaction.run:
            if other in self._under_way or other in self._cleaned:
                continue
            self._cleaned.add(other)
            if self.states[other].status.is_final:
                self.states[other] = self.states[other].fresh()
                self.states[other].visit += 1
            self.states[other].is_called = True
            self._unwritten.append(self.states[other])
            self._start(other)

    def _reaction(self, name: str, state: StepState) -> Reaction | None:
        step = self._workflow.steps[name]
        if state.status is Status.SUCCEEDED:
            return step.on_success
        if state.status in (Status.FAILED, Status.TIMED_OUT):
            return step.on_fail or self._workflow.defaults.on_fail
        return None

    def _react(self, name: str, state: StepState, reaction: Reaction) -> None:
        called = [other for other in reaction.run if other != name]  # `defaults` name it for itself as well
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
        """Run a step (once more), and everything behind it that has run before."""
        if self._starts > START_CAP or name in self._under_way:
            return
        for other in self._with_followers(name):
            self._met[other] = 0
            if self.states[other].status.is_final and other not in self._under_way:
                self.states[other] = self.states[other].fresh()
                self.states[other].visit += 1
                self._unwritten.append(self.states[other])  # or a run that is cut off now would not come back to it
        if name in self._on_demand:
            self.states[name].is_called = True
            self._unwritten.append(self.states[name])
        self._consider(name)

    def _with_followers(self, name: str) -> list[str]:
        found = {name: None}
        left = [name]
        while left:
            for follower in self._behind[left.pop()]:
                if follower not in found:
                    found[follower] = None
                    left.append(follower)
        return list(found)

    def _settle_rest(self) -> None:
        """Nothing runs any more, so what still waits never will."""
        for name in self._starting:  # written down at the most
            self.states[name].status, self.states[name].started_ms = Status.PENDING, None
        for state in self.states.values():
            if state.status.is_final:
                continue
            if state.status is Status.RUNNING:
                _cancel(state)
                self._unwritten.append(state)
            else:
                is_uncalled = state.id in self._on_demand and not state.is_called
                self._skipped(state, Reason.ON_DEMAND if is_uncalled else Reason.RUN_ENDED)


def _cancel(state: StepState) -> None:
    """With what was learned about it while it was stopped."""
    context = (state.error or {}).get("context") if (state.error or {}).get("code") == "CANCELLED" else None
    state.status = Status.CANCELLED
    state.error = {"code": "CANCELLED", "message": "the run was stopped", "retryable": False, "phase": "execution"}
    if context:
        state.error["context"] = context


class _View(Mapping[str, Any]):
    """Of the states, as they are when somebody looks: a copy for each of a thousand steps would be a million."""

    def __init__(self, states: Mapping[str, StepState]) -> None:
        self._states = states

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class Outputs(_View):
    """`outputs.build` in a template. Only what has succeeded has an output."""

    def __getitem__(self, name: str) -> Any:
        state = self._states[name]
        if state.status is not Status.SUCCEEDED:
            raise KeyError(name)
        return state.output


class Shown(_View):
    """`steps.build.status` in a template. Here is also the output of one that failed: what it said until then."""

    def __getitem__(self, name: str) -> Any:
        state = self._states[name]
        shown = {"status": state.status.value, "error": state.error, "attempts": state.attempts}
        return {**shown, "output": state.output}
