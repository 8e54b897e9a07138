"""The scheduler of a run: a step starts the moment what it waits for is done, and every change is written down first.

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
from contextlib import AbstractContextManager
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.clocks import NS_PER_MS, Deadline, Fired, WallTime
from ..core.envelope import Warning_, warning
from ..core.errors import Failure, SideEffects
from ..core.proposal import Proposal
from ..core.redaction import Redaction
from ..core.value_types import NamedTuple, dataclass, field
from ..process.clock import monotonic_ns
from ..providers.provider import STEP_TYPES, ForeignProposal, Providers, Reaction, StepPart
from .plan import clean_up_steps, graph_of, needs, on_demand, step_timeout_ms
from .schema import WorkflowFile
from .state import OutputsView, Reason, Status, StepState, StepsView

if TYPE_CHECKING:
    from ..inbox.inbox import Inbox
    from ..runtime.call import Call
    from ..runtime.runtime import Runtime
    from ..store.store import Store

# --- slots ------------------------------------------------------------------------------------------------
# How much is under way at a time, over a whole run with its items and the files that it runs.
#
# A step takes a slot before it starts. One that is made of parts (the items of a `for_each`, the steps of another
# file) lends its own slot to them and asks for more around it. So a part never waits for a slot that only its own
# step could give back, and with one slot at least the parts go on one after the other.


class _SlotState(Enum):
    WAITING = auto()
    """Waits for one of its own slots."""
    OUTSIDE = auto()
    """Has one of its own, and waits for one of the outer slots."""
    TAKEN = auto()
    OVER = auto()


class Slot:
    """A slot that was asked for."""

    def __init__(self, slots: ParallelSlots, on_grant: Callable[[], None]) -> None:
        self._slots = slots
        self._on_grant = on_grant
        self.state = _SlotState.WAITING
        self.outer: Slot | None = None
        """The outer slot, where it is not the one that was lent."""

    def grant(self) -> None:
        self.state = _SlotState.TAKEN
        self._on_grant()

    def give_back(self) -> None:
        """Give the slot back. One that was not granted yet will not be."""
        was, self.state = self.state, _SlotState.OVER
        self._slots.release(self, was)


class ParallelSlots:
    def __init__(self, most: int, outer: ParallelSlots | None = None) -> None:
        """Make `most` slots. `outer` are the slots of which the step, whose parts ask here, has one."""
        self._free = most
        self._outer = outer
        self._is_lent_free = outer is not None
        self._waiting: deque[Slot] = deque()
        self._outside: deque[Slot] = deque()

    def ask(self, on_grant: Callable[[], None]) -> Slot:
        """Ask for a slot. `granted` is called once there is one, which may be now; in the order in which they were
        asked for."""
        slot = Slot(self, on_grant)
        self._waiting.append(slot)
        self._hand_out()
        return slot

    @contextlib.asynccontextmanager
    async def hold_one(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it. Bounded by the clocks of the steps that have one."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        slot = self.ask(lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
            yield
        finally:
            slot.give_back()

    def release(self, slot: Slot, was: _SlotState) -> None:
        if was in (_SlotState.WAITING, _SlotState.OVER):
            return
        self._free += 1
        if slot.outer is not None:
            slot.outer.give_back()
        elif self._outer is not None:
            self._is_lent_free = True
            self._lend()
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free > 0 and self._waiting:
            slot = self._waiting.popleft()
            if slot.state is not _SlotState.WAITING:
                continue
            self._free -= 1
            if self._outer is None:
                slot.grant()
                continue
            slot.state = _SlotState.OUTSIDE
            self._outside.append(slot)
            self._lend()
            if slot.state is _SlotState.OUTSIDE:
                slot.outer = self._outer.ask(slot.grant)

    def _lend(self) -> None:
        """Give the slot of the outer step to the part that has waited longest for one."""
        while self._is_lent_free and self._outside:
            slot = self._outside.popleft()
            if slot.state is _SlotState.OUTSIDE:
                self._is_lent_free = False
                outer, slot.outer = slot.outer, None
                if outer is not None:
                    outer.give_back()
                slot.grant()


# --- waiting for people -----------------------------------------------------------------------------------
# Whether a run works or only waits for people, and for how long its caller waits with it.
#
# While anything works, waiting costs the caller nothing. Once all that is left to do needs a person, the caller waits
# for its budget; after that the run is *parked*: it lies in the store with its questions, and going on with it later
# picks up what was decided meanwhile.


class PersonWait:
    """The count of what works and what waits for people, for a run and all that are inside it."""

    def __init__(self, budget_ms: int | None) -> None:
        """Count what works and what waits. Without a budget the caller waits for as long as people take."""
        self.budget_ms = budget_ms
        self.waiting: dict[str, Proposal | ForeignProposal] = {}
        """By the key that each was asked under."""
        self.parked_on: dict[str, Proposal | ForeignProposal] = {}
        """What was waited for when it was parked."""
        self.unanswered: list[Proposal] = []
        """What was asked by us and nobody waits for any more, as far as is known undecided."""
        self.parked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at_work = 0
        self._bell: asyncio.TimerHandle | None = None

    def at_work(self) -> AbstractContextManager[None]:
        """Count a step as working."""
        return self._counted(1)

    def leave_to_parts(self) -> AbstractContextManager[None]:
        """Count a step, inside `at_work`, as not working: each of its parts is counted by itself."""
        return self._counted(-1)

    @contextlib.contextmanager
    def waits(self, key: str, proposal: Proposal | ForeignProposal) -> Iterator[None]:
        """Count a step, inside `at_work`, as waiting for a person until it is answered."""
        self.waiting[key] = proposal
        try:
            with self._counted(-1):
                yield
        finally:
            left = self.waiting.pop(key)
            if isinstance(left, Proposal):
                self.unanswered.append(left)
            self._look()

    @contextlib.contextmanager
    def _counted(self, change: int) -> Iterator[None]:
        self._at_work += change
        self._look()
        try:
            yield
        finally:
            self._at_work -= change
            self._look()

    def _look(self) -> None:
        if self._at_work or not self.waiting:
            if self._bell is not None:
                self._bell.cancel()
                self._bell = None
        elif self._bell is None and self.budget_ms is not None:
            self._bell = asyncio.get_running_loop().call_later(self.budget_ms / 1000, self._park)

    def _park(self) -> None:
        if not self.parked.done():
            self.parked_on = dict(self.waiting)
            self.parked.set_result(None)


# --- scheduling -------------------------------------------------------------------------------------------

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
OnNews = Callable[[str, dict[str, Any]], None]
"""Hears what was decided about the time of a step, or of the run itself, whose name is empty."""


class Deadlines:
    """The deadlines of the steps of a run: clean-up works until the run's own bell, all others until a little
    earlier."""

    def __init__(self, bell: Deadline | None, kept_ms: int, clean_up: frozenset[str]) -> None:
        self._run = self._clean_up_by = bell
        self._work = bell if bell is None or not kept_ms else Deadline(bell.at_ns - kept_ms * NS_PER_MS)
        self._clean_up = clean_up
        self._rung: list[Deadline] = []
        """Those of the run's own that have stopped something."""

    def of(self, step_id: str) -> Deadline | None:
        return self._clean_up_by if step_id in self._clean_up else self._work

    def note_fired(self, fired: Fired | None) -> bool:
        """Note the clock that stopped something, and return whether its deadline is the run's own. That of a stop is
        not: somebody else stopped the run."""
        source = None if fired is None else fired.source
        if source is None or (source is not self._run and source is not self._work):
            return False
        self._rung.append(source)
        return True

    @property
    def have_rung(self) -> bool:
        """Return whether the run's own clock has stopped something."""
        return bool(self._rung)

    def may_start(self, step_id: str) -> bool:
        """Return whether a step may start: not once the run's clock has stopped another, though a part of the reserve
        is left. Clean-up may until the run's own bell."""
        return not any(rung is self._run or step_id not in self._clean_up for rung in self._rung)

    def move(self, bell: Deadline) -> dict[int, Deadline]:
        """Take another bell of the run. Return what each deadline of before has become, by the id of that object."""
        assert self._run is not None and self._work is not None
        later = Deadline(bell.at_ns - (self._run.at_ns - self._work.at_ns)) if self._work is not self._run else bell
        became = {id(self._run): bell, id(self._work): later}
        if self._clean_up_by is self._run:
            self._clean_up_by = bell
        self._run, self._work = bell, later
        return became

    def note_cut_short(self, step_id: str) -> None:
        """Note that the run's own clock has stopped a step that was carried out elsewhere."""
        rung = self._run if step_id in self._clean_up else self._work
        if rung is not None:
            self._rung.append(rung)

    def begin_clean_up(self, now_ns: int, limit_ms: int = CLEAN_UP_LIMIT_MS) -> None:
        """Bound the clean-up of a run that was stopped, also where the run itself has no limit."""
        by = Deadline.after_ms(now_ns, limit_ms)
        if self._run is None or by.at_ns < self._run.at_ns:
            self._clean_up_by = by


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What bounds the steps of a run."""

    slots: ParallelSlots
    """Shared with the items of steps and the runs inside this one."""
    deadlines: Deadlines
    began_ns: int
    """When the run began, perhaps in another process."""
    now_ns: Callable[[], int] = monotonic_ns
    """The clock that the deadlines are read on. A workflow of Temporal has its own, which replays."""


class StepListener(NamedTuple):
    """Who hears of the steps of a run."""

    on_change: OnChange | None = None
    on_skip: OnChange | None = None
    """Hears of steps that are never executed."""


NO_LISTENER = StepListener()


@dataclass(frozen=True)
class RunContext:
    """What the parts of one run share."""

    run_id: str
    workflow: WorkflowFile
    folder: Path
    """The folder of the file."""
    files: tuple[str, ...]
    """The real paths of the files that run each other, down to this one."""
    began_at: WallTime
    store: Store
    runtime: Runtime
    providers: Providers
    inbox: Callable[[], Inbox]
    person_wait: PersonWait
    slots: ParallelSlots
    deadlines: Deadlines
    environment: Mapping[str, str]
    """Every variable, for steps that ask for one by name."""
    base_env: Mapping[str, str]
    """The variables that children see without asking: those whose names do not look secret."""
    redaction: Redaction
    on_change: OnChange | None
    on_news: OnNews | None
    call: Call
    describe_limit: Callable[[], tuple[str, Fired]]
    """Says which limit the run has reached, once it has."""
    wound_down: set[str] = field(default_factory=set)
    """The steps that somebody has asked to wind down: no further item or try of them begins."""
    nested_runs: dict[tuple[str, int], int] = field(default_factory=dict)
    """How many runs a step has begun for one of its items."""


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
        listener: StepListener = NO_LISTENER,
        known: Mapping[str, StepState] | None = None,
        limits: RunLimits | None = None,
    ) -> None:
        """Prepare the steps of a run. `record` returns when the states are written down, and raises if they cannot be.
        `known` is what an earlier process wrote down of this very run."""
        self._workflow = workflow
        self._execute = execute
        self._record = record
        self._scope = scope
        self._on_change, self._on_skip = listener
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
        self._clean_up = clean_up_steps(workflow)
        slots = ParallelSlots(workflow.max_parallelism)
        self._limits = limits or RunLimits(slots, Deadlines(None, 0, self._clean_up), monotonic_ns())
        self._asked: dict[str, Slot] = {}
        """The slot that a step has or waits for."""
        self._ready: list[str] = []
        """What starts now: it has its slot, or needs none."""
        self._starting: list[str] = []
        """What starts when that is written down."""
        self._under_way: dict[str, None] = {}
        """Decided on, and not ended. In order: a run that is replayed has to do the same again."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unwritten: list[StepState] = []
        self._news = asyncio.Event()
        self._starts = 0
        self._over: deque[str] = deque()
        """Ended or skipped, and what that means for others is not decided yet."""
        self._cleaned: set[str] = set()
        """Called for as clean-up since the run was stopped."""
        self._is_stopping = False
        self._is_cleaning = False
        self._is_winding_down = False
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
        """Run until every step is final and written down. Bounded by the deadline around the steps, since each ends
        inside it. Raises what `record` raises, with everything stopped."""
        try:
            for name in self.states:
                self._consider(name)
            self._follow_up()
            await self._work()
            if self._is_stopping and not self.is_parked:
                await self._write_what_can_be()  # before anybody is waited for, who may need all of his grace
                await self._stop_tasks(name for name in self._tasks if name not in self._clean_up & self._on_demand)
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
            if self._under_way:
                await self._news.wait()  # bounded by the clocks of the steps
            self._news.clear()

    @property
    def _is_halted(self) -> bool:
        """Return whether nothing starts any more."""
        return self._is_stopping and not self._is_cleaning

    def park(self) -> None:
        """Park the run. Called only while nothing but people is waited for; a run that is being stopped is not
        parked."""
        if not self._is_stopping:
            self.is_parked = self._is_stopping = True
            self._news.set()

    def wind_down(self) -> None:
        """Let what runs come to its end, and start nothing any more but clean-up."""
        self._is_winding_down = True
        for name in [name for name in self._under_way if name not in self._tasks and name not in self._clean_up]:
            self._under_way.pop(name)
            self._give_back(name)
        self._ready = [name for name in self._ready if name in self._under_way]
        self._news.set()

    def stop(self) -> None:
        """Stop what runs, and clean up."""
        self._is_stopping = True
        self._news.set()

    def stop_at_once(self, *, clean_up: bool) -> None:
        """Stop a run that another process has begun before anything of it goes on: what had begun is cancelled, and
        cleaned up after where that can be."""
        self.stop()
        for name, state in self.states.items():
            if state.has_begun and not state.status.is_final:
                state.cancel()
                if not state.attempts and state.type != "workflow":
                    state.side_effects = SideEffects.NONE  # it only waited
                self._unwritten.append(state)
                if clean_up:
                    self._over.append(name)

    def _begin_clean_up(self) -> None:
        for name in self._starting:  # written down at the most
            self.states[name].status, self.states[name].started_ms = Status.PENDING, None
        self._starting = []
        for name in [name for name in self._under_way if name not in self._tasks]:
            self._under_way.pop(name)
            self._give_back(name)  # which may be granted to the next of these
        self._ready = []
        self._limits.deadlines.begin_clean_up(self._limits.now_ns())
        self._is_cleaning = True
        self._follow_up()

    def scope_for(self, name: str) -> dict[str, Any]:
        """Return what the templates of a step can see."""
        return {**self._scope, "outputs": OutputsView(self.states), "steps": StepsView(self.states)}

    # --- writing down -------------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Write down all that has changed, in one transaction, then tell the listener."""
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
        """Start a step, skip it, or leave it waiting. `because` is the step that has ended; without one every group is
        looked at."""
        state = self.states[name]
        if state.status is not Status.PENDING or name in self._under_way or self._is_stopping:
            return
        if self._is_winding_down and name not in self._clean_up:
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
            self._asked[name] = self._limits.slots.ask(lambda: self._is_ready(name))
        else:
            self._ready.append(name)

    def _is_ready(self, name: str) -> None:
        self._ready.append(name)
        self._news.set()

    def _give_back(self, name: str) -> None:
        if (slot := self._asked.pop(name, None)) is not None:
            slot.give_back()

    # --- running ------------------------------------------------------------------------------------------

    def _take_ready(self) -> None:
        """Mark the steps that start now as running, which is not true before it is written down."""
        self._starting = []
        now_ms = (self._limits.now_ns() - self._limits.began_ns) // NS_PER_MS
        while self._ready:
            name = self._ready.pop(0)
            if not self._limits.deadlines.may_start(name):  # the run's clock rang while it waited for its slot
                self._under_way.pop(name, None)
                self._give_back(name)  # which may be granted to the next of these
                continue
            self._starting.append(name)
            state = self.states[name]
            state.status, state.started_ms, state.has_begun = Status.RUNNING, now_ms, False
            self._unwritten.append(state)

    def _begin(self) -> None:
        while self._starting and not self._is_halted:
            name = self._starting.pop(0)
            self._tasks[name] = asyncio.get_running_loop().create_task(self._step(name))

    async def _step(self, name: str) -> None:
        state, began_ns = self.states[name], self._limits.now_ns()
        try:
            await self._execute(name, self._workflow.steps[name], state, self.scope_for(name))
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
        """Stop what runs, for real. Bounded: a cancelled step is killed after its grace."""
        tasks = [self._tasks[name] for name in names]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- after a step -------------------------------------------------------------------------------------

    def _follow_up(self) -> None:
        """Decide what the end of a step means for the others. No recursion: a chain of thousands is skipped at once."""
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
        # One is cancelled here where items of it never began, because it was wound down.
        if state.status in (Status.FAILED, Status.TIMED_OUT, Status.CANCELLED):
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
        may_start = self._limits.deadlines.may_start
        if self._starts > START_CAP or name in self._under_way or not may_start(name):
            return
        for other in filter(may_start, self._with_followers(name)):
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
        """End every step that is not final: nothing runs any more, so what still waits never will."""
        for name in self._starting:  # written down at the most
            self.states[name].status, self.states[name].started_ms = Status.PENDING, None
        for state in self.states.values():
            if state.status.is_final:
                continue
            if state.status is Status.RUNNING:
                state.cancel()
                self._unwritten.append(state)
            else:
                is_uncalled = state.id in self._on_demand and not state.is_called
                self._mark_skipped(state, Reason.ON_DEMAND if is_uncalled else Reason.RUN_ENDED)
