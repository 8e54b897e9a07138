"""The shared objects of one run."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...core.limits import NS_PER_MS, Deadline, Fired, WallTime
from ...core.proposal import Proposal
from ...core.value_types import JsonObject, field, value
from ...core.visible_text import Redaction
from ...supervise.clock import monotonic_ns
from ..check.plan import NO_FINALLY, FinallyReserve
from ..file.schema import WorkflowFile
from ..steps.provider import ForeignProposal, Providers
from .artifacts import RunArtifacts
from .state import StepState
from .step_log import RunLogs

if TYPE_CHECKING:
    from ...calls.call import Call
    from ...calls.runtime import Runtime
    from ...people.inbox import Inbox
    from ...store.store import Store

CLEAN_UP_LIMIT_MS = 300_000  # each clean-up step has its own timeout before that

RecordItem = Callable[[str, int, JsonObject], Awaitable[None]]
OnChange = Callable[[StepState], None]
OnNews = Callable[[str, JsonObject], None]  # the name is that of a step, or empty for the run


# A step takes a slot before it starts, lends it to its parts (items, or steps of a nested file) and requests more for
# them. So a part never waits for a slot that only its own step could return, and a single slot is enough.


class _SlotState(Enum):
    WAITING = auto()
    OUTSIDE = auto()  # has an own slot, and waits for an outer one
    TAKEN = auto()
    OVER = auto()


class Slot:
    def __init__(self, slots: ParallelSlots, on_grant: Callable[[], None]) -> None:
        self._slots = slots
        self._on_grant = on_grant
        self.state: _SlotState = _SlotState.WAITING
        self.outer: Slot | None = None

    def grant(self) -> None:
        self.state = _SlotState.TAKEN
        self._on_grant()

    def give_back(self) -> None:
        was, self.state = self.state, _SlotState.OVER
        self._slots.release(self, was)


class ParallelSlots:
    """The limit on parallel steps of a run, its items and its nested runs."""

    def __init__(self, most: int, outer: ParallelSlots | None = None) -> None:
        self._free = most
        self._outer = outer
        self._is_lent_free = outer is not None
        self._waiting: deque[Slot] = deque()
        self._outside: deque[Slot] = deque()

    def ask(self, on_grant: Callable[[], None]) -> Slot:
        """Request a slot. `on_grant` is called, perhaps at once, in the order of the requests."""
        slot = Slot(self, on_grant)
        self._waiting.append(slot)
        self._hand_out()
        return slot

    @contextlib.asynccontextmanager
    async def hold_one(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it. Bounded by the timeouts of the holders."""
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
        """Lend the slot of the outer step to the part that has waited longest."""
        while self._is_lent_free and self._outside:
            slot = self._outside.popleft()
            if slot.state is _SlotState.OUTSIDE:
                self._is_lent_free = False
                outer, slot.outer = slot.outer, None
                if outer is not None:
                    outer.give_back()
                slot.grant()


# The steps around the current task: that of the run, and those that run it as a nested workflow.
steps_at_work: ContextVar[tuple[StepState, ...]] = ContextVar("shotclock_steps_at_work", default=())


class Parks(Protocol):
    """The steps of a run, which can be parked."""

    @property
    def may_park(self) -> bool: ...
    def park(self) -> None: ...
    def record_wait(self, state: StepState) -> None: ...


class PersonWait:
    """The count of working and waiting steps, for a run and its nested runs.

    Once only people can continue the run, the caller waits for its budget; then the run is *parked*: the store keeps it
    with its questions, and resuming it uses the answers.
    """

    def __init__(self, budget_ms: int | None) -> None:
        self.budget_ms = budget_ms
        self.waiting: dict[str, Proposal | ForeignProposal] = {}
        self.parked_on: dict[str, Proposal | ForeignProposal] = {}
        self.has_asked = False
        self.unheard: list[str] = []  # proposals of steps that were stopped while they waited, perhaps decided since
        self.parked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.schedulers: list[Parks] = []  # of the run and the runs inside it
        self._at_work = 0
        self._timer: asyncio.TimerHandle | None = None

    def at_work(self) -> AbstractContextManager[None]:
        return self._counted(1)

    def leave_to_parts(self) -> AbstractContextManager[None]:
        """Stop counting a step while each of its parts is counted by itself."""
        return self._counted(-1)

    @contextlib.contextmanager
    def waits(self, key: str, proposal: Proposal | ForeignProposal) -> Iterator[None]:
        self.waiting[key], self.has_asked = proposal, True
        states = steps_at_work.get()
        for state in states:
            state.begin_wait(proposal.id, monotonic_ns())
        self._record_waits(states)
        try:
            with self._counted(-1):
                yield
        except BaseException:
            self.unheard.append(proposal.id)
            raise
        finally:
            del self.waiting[key]
            self._look()
            if not self.parked.done():
                for state in states:  # the time of one with items or of a nested run is not only that of this wait
                    state.end_wait(proposal.id, monotonic_ns(), counts=state is states[-1])
                self._record_waits(states)

    def _record_waits(self, states: Iterable[StepState]) -> None:
        for state in states:
            for scheduler in self.schedulers:
                scheduler.record_wait(state)

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
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None and self.budget_ms is not None:
            self._timer = asyncio.get_running_loop().call_later(self.budget_ms / 1000, self._park)

    def _park(self) -> None:
        """Park all runs at once, unless a step is about to begin: it would be cut."""
        self._timer = None
        if not self.parked.done() and all(each.may_park for each in self.schedulers):
            self.parked_on = dict(self.waiting)
            self.parked.set_result(None)
            for each in self.schedulers:
                each.park()


class Deadlines:
    """The deadlines of the steps of a run, each earlier than the next: of work, of clean-up, and of `finally` steps."""

    def __init__(
        self, bell: Deadline | None, kept_ms: int, clean_up: frozenset[str], last: FinallyReserve = NO_FINALLY
    ) -> None:
        self._run = bell
        self._clean = self._clean_up_by = _before(bell, last.ms)
        self._work = _before(self._clean, kept_ms)
        self._clean_up = clean_up
        self._last = last
        self._last_by: dict[str, Deadline | None] = {}
        self._end: Deadline | None = None
        self._is_last = False
        self._fired: list[Deadline] = []

    @property
    def before_next(self) -> Deadline | None:
        """The end of the work or, in `finally`, the latest instant at which its steps have all of their time."""
        return self._clean if self._is_last else self._work

    @property
    def kept_ms(self) -> int:
        return 0 if self._run is None or self._work is None else (self._run.at_ns - self._work.at_ns) // NS_PER_MS

    def of(self, step_id: str) -> Deadline | None:
        if self._is_last:
            return self._last_by.get(step_id, self._end)
        return self._clean_up_by if step_id in self._clean_up else self._work

    def record_fired(self, fired: Fired | None) -> bool:
        """Note a limit that stopped a step. Return whether it is a deadline of the run itself."""
        source = None if fired is None else fired.source
        if source is None:
            return False
        if any(source is own for own in (*self._tiers, self._end, *self._last_by.values())):
            self._fired.append(source)
            return True
        return False

    def record_cut_short(self, step_id: str) -> None:
        deadline = self._run if self._is_last else self._clean if step_id in self._clean_up else self._work
        if deadline is not None:
            self._fired.append(deadline)

    @property
    def _tiers(self) -> tuple[Deadline | None, ...]:
        return self._work, self._clean, self._run

    @property
    def have_fired(self) -> bool:
        return bool(self._fired)

    def may_start(self, step_id: str) -> bool:
        """Return whether a step may start: not after the run's deadline stopped another one. Clean-up may, and what
        runs last."""
        if self._is_last:
            return True  # each has its own part of the time
        return not any(deadline is self._clean or step_id not in self._clean_up for deadline in self._fired)

    def move(self, bell: Deadline) -> dict[int, Deadline]:
        """Move the deadline of the run. Return the new deadlines by the ids of the old objects."""
        if self._run is None or self._work is None or self._clean is None:
            return {}
        by_ns, before = bell.at_ns - self._run.at_ns, self._tiers
        clean = bell if self._clean is self._run else Deadline(self._clean.at_ns + by_ns)
        work = clean if self._work is self._clean else Deadline(self._work.at_ns + by_ns)
        became = {id(old): new for old, new in zip(before, (work, clean, bell), strict=True)}
        for name, old in self._last_by.items():
            if old is not None:
                self._last_by[name] = became.setdefault(id(old), Deadline(old.at_ns + by_ns))
        if self._end is not None:
            self._end = became.setdefault(id(self._end), Deadline(self._end.at_ns + by_ns))
        if self._clean_up_by is self._clean:
            self._clean_up_by = clean
        self._work, self._clean, self._run = work, clean, bell
        return became

    def begin_clean_up(self, now_ns: int, limit_ms: int = CLEAN_UP_LIMIT_MS) -> None:
        """Bound the clean-up of a stopped run, also if the run itself has no limit."""
        by = Deadline.after_ms(now_ns, limit_ms)
        if self._clean is None or by.at_ns < self._clean.at_ns:
            self._clean_up_by = by

    def begin_finally(self, now_ns: int) -> None:
        """Fix the deadlines of the `finally` steps. They have their reserve also if the others ended too late."""
        end = self._run if self._clean_up_by is self._clean else self._clean_up_by
        least = Deadline.after_ms(now_ns, self._last.ms)
        if end is not None and end.at_ns < least.at_ns:
            end = least
        self.end_finally_at(end)
        self._last_by = {name: _before(end, behind_ms) for name, behind_ms in self._last.behind_ms.items()}

    def end_finally_at(self, end: Deadline | None) -> None:
        """Give the `finally` steps a deadline that was fixed elsewhere: by the workflow, for a worker."""
        self._is_last, self._end = True, end


def _before(deadline: Deadline | None, by_ms: int) -> Deadline | None:
    return deadline if deadline is None or not by_ms else Deadline(deadline.at_ns - by_ms * NS_PER_MS)


@value
class SharedParts:
    """The parts that a run shares with the runs inside it."""

    store: Store
    runtime: Runtime
    providers: Providers
    inbox: Callable[[], Inbox]
    person_wait: PersonWait


@value
class RunContext:
    run_id: str
    workflow: WorkflowFile
    folder: Path
    files: tuple[str, ...]  # the nested files, from the outermost to this one
    began_at: WallTime
    shared: SharedParts
    slots: ParallelSlots
    deadlines: Deadlines
    environment: Mapping[str, str]
    base_env: Mapping[str, str]  # without names that look secret
    redaction: Redaction
    call: Call
    get_fired: Callable[[], Fired]  # the limit that stopped the run
    on_change: OnChange | None = None
    on_news: OnNews | None = None
    winding_down: set[str] = field(default_factory=set)  # steps told to wind down; start no further items or attempts
    nested_runs: dict[tuple[str, int], int] = field(default_factory=dict)
    logs: RunLogs | None = None
    record_item: RecordItem | None = None  # None if only whole steps are recorded
    json_limit: tuple[int, str] | None = None  # the most characters of an output, and why not more
    runs: tuple[str, ...] = ()  # those of `files`
    artifacts: RunArtifacts | None = None
    rerun: Mapping[str, Any] | None = None
    """The run that this one continues, and what it keeps of it."""
