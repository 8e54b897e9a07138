"""The group of a run (`concurrency`): the wait for it before the run starts.

The store decides in one transaction who has the group. A run that waits asks again and again, bounded by its deadline
and ended by a signal. Nothing of it has run then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from ...calls.call import Call, Outcome
from ...calls.control_channel import ask_holder
from ...core.envelope import stop_problem
from ...core.errors import Ending, Failure, SideEffects
from ...core.limits import NS_PER_MS
from ...core.value_types import JsonObject, replace, value
from ...core.visible_text import one_line
from ...store.groups import Blocker, GroupPlace, OnConflict, PlaceTaken
from ...store.runs import RunTaken
from ...store.store import Store
from ...supervise.clock import monotonic_ns, wall_time
from ...supervise.kernel import is_alive, this_process
from ..file.schema import WorkflowFile
from ..file.templates import TemplateError, render_simple
from .run_context import OnNews

LOOK_S = 0.1  # between two questions to the store
CANCEL_ANSWER_S = 1.0  # for the answer of a run that is cancelled; a stopped process (SIGSTOP) exhausts it
GROUP_LENGTH = 200


@value
class GroupRequest:
    run_id: str
    call: Call
    store: Store
    stop: asyncio.Future[str] | None
    on_news: OnNews | None
    inside: tuple[str, ...]  # the runs around it
    cancel_parked: Callable[[str, Store], Awaitable[object]]
    is_resumed: bool = False
    kept_ms: int = 0
    """The time for clean-up and `finally`: a new run that has no more could do nothing else."""

    @property
    def effects(self) -> SideEffects:
        """The effects of a run that could not enter: those of its earlier processes, if there were any."""
        return SideEffects.UNKNOWN if self.is_resumed else SideEffects.NONE

    @property
    def nothing(self) -> str:
        return "nothing more ran" if self.is_resumed else "nothing ran"

    @property
    def suggestion(self) -> str:
        """What to do with a run that was cancelled before it had its group."""
        return f"continue it with `shotclock run --resume {self.run_id}`" if self.is_resumed else "start it again"


@value
class GroupEntry:
    """The result of asking: the run has its group, or was stopped before it had it, or has none."""

    request: GroupRequest
    record: JsonObject | None = None
    """What the store, the answer and the report show."""
    stopped_by: str | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome of a run that was stopped while it waited."""
        group = (self.record or {})["group"]
        problem = stop_problem(str(self.stopped_by))
        message = f"{problem.message} while it waited for its group {group!r}; {self.request.nothing}"
        problem = replace(problem, message=message, suggestion=self.request.suggestion)
        return Outcome(Ending.NOT_STARTED, problem, side_effects=self.request.effects)

    @contextlib.contextmanager
    def left_on_error(self) -> Iterator[None]:
        """Leave the group if the run cannot begin after all."""
        try:
            yield
        except RunTaken:  # the place is that of the other run
            raise
        except BaseException:
            if self.record is not None:
                _leave(self.request)
            raise


def group_of(workflow: WorkflowFile, inputs: Mapping[str, Any]) -> str | None:
    """Return the name of the group of a run. Raises Failure if the template makes none."""
    if workflow.concurrency is None:
        return None
    try:
        name = render_simple(workflow.concurrency.group, {"inputs": inputs}).text.strip()
    except TemplateError as error:
        raise Failure("ARG_ERROR", f"concurrency.group: {error}") from None
    if not name or len(name) > GROUP_LENGTH:
        shown = one_line(name, 40)
        raise Failure("ARG_ERROR", f"concurrency.group makes {shown!r}: 1 to {GROUP_LENGTH} characters are a name")
    return name


async def enter_group(workflow: WorkflowFile, inputs: Mapping[str, Any], request: GroupRequest) -> GroupEntry:
    """Enter the group of a run, perhaps after a wait. Raises Failure if the run cannot have it."""
    group = group_of(workflow, inputs)
    if group is None or workflow.concurrency is None:
        return GroupEntry(request)
    on_conflict = OnConflict(workflow.concurrency.on_conflict)
    try:
        return await _GroupWait(request, group, on_conflict).carry_out()
    except BaseException:
        _leave(request)
        raise


def _leave(request: GroupRequest) -> None:
    with contextlib.suppress(Failure):  # the place counts only as long as this process lives
        request.store.groups.leave(request.run_id, this_process())


class _GroupWait:
    def __init__(self, request: GroupRequest, group: str, on_conflict: OnConflict) -> None:
        self._request, self._group, self._on_conflict = request, group, on_conflict
        self._began_ns = monotonic_ns()
        self._shown: str | None = None
        self._cancelled: set[str] = set()

    async def carry_out(self) -> GroupEntry:
        request = self._request
        while True:
            blocker = await asyncio.to_thread(self._ask)
            record: JsonObject = {
                "group": self._group,
                "on_conflict": self._on_conflict.value,
                "waited_ms": (monotonic_ns() - self._began_ns) // NS_PER_MS if self._shown is not None else 0,
            }
            if blocker is None:
                return GroupEntry(request, record)
            if self._on_conflict is OnConflict.REFUSE and self._shown is None:
                raise self._refusal(blocker)
            self._show(blocker)
            if self._on_conflict is OnConflict.CANCEL and blocker.is_held and blocker.run not in self._cancelled:
                await self._cancel(blocker)
            await self._pause(blocker)
            if request.stop is not None and request.stop.done():
                _leave(request)
                return GroupEntry(request, record, request.stop.result())

    def _ask(self) -> Blocker | None:
        run_id, me = self._request.run_id, this_process()
        groups = self._request.store.groups
        wanted = GroupPlace(self._group, run_id, me, is_held=False)
        try:
            answer = groups.ask(wanted, self._on_conflict, wall_time(), is_alive, self._request.inside)
        except PlaceTaken as taken:
            message = f"a run {run_id!r} waits for its group already, in process {taken.holder.pid}"
            raise Failure("RUN_TAKEN", message) from None
        if answer.replaced_by is not None:
            message = f"run {answer.replaced_by} of group {self._group!r} is newer, and takes the place of this one"
            message, hint = f"{message}; {self._request.nothing}", self._request.suggestion
            raise Failure("CANCELLED", message, suggestion=hint, side_effects=self._request.effects)
        return answer.blocker

    def _refusal(self, blocker: Blocker) -> Failure:
        state = "is parked" if blocker.is_parked else "is under way" if blocker.is_held else "waits"
        hint = f"wait for it (`shotclock job wait {blocker.run}`), or end it (`shotclock job stop {blocker.run}`)"
        if blocker.is_parked:
            hint = f"continue it (`shotclock run --resume {blocker.run}`), or `shotclock job cancel {blocker.run}`"
        message = f"run {blocker.run} of group {self._group!r} {state}; {self._request.nothing}"
        return self._failure("LOCK_HELD", message, blocker, hint)

    def _failure(self, code: str, message: str, blocker: Blocker, hint: str) -> Failure:
        context = {"group": self._group, "run_id": blocker.run}
        return Failure(code, message, context=context, suggestion=hint, side_effects=self._request.effects)

    def _show(self, blocker: Blocker) -> None:
        if blocker.run != self._shown and self._request.on_news is not None:
            news = {"event": "waiting", "group": self._group, "for_run": blocker.run, "is_parked": blocker.is_parked}
            self._request.on_news("", news)
        self._shown = blocker.run

    async def _cancel(self, blocker: Blocker) -> None:
        """Ask the run to end. One that cannot be reached yet is asked again at the next look."""
        run_id, store = blocker.run, self._request.store
        reason = f"run {self._request.run_id} of group {self._group!r} takes its place"
        with contextlib.suppress(Failure):
            if blocker.is_parked:  # its clean-up runs here, and is not cut off by a signal
                await self._request.cancel_parked(run_id, store)
            else:
                order: dict[str, object] = {"do": "cancel", "run": run_id, "reason": reason}
                left_s = CANCEL_ANSWER_S if self._left_ms is None else max(0.0, self._left_ms / 1000)
                await asyncio.to_thread(ask_holder, store.home, blocker.holder, order, min(CANCEL_ANSWER_S, left_s))
            self._cancelled.add(run_id)

    @property
    def _left_ms(self) -> int | None:
        bell = self._request.call.bound.bell
        return None if bell is None else bell.remaining_ms(monotonic_ns()) - self._request.kept_ms

    async def _pause(self, blocker: Blocker) -> None:
        """Wait for the next look. Bounded by the deadline of the run, if it has one; a signal ends it at once."""
        stop, left_ms = self._request.stop, self._left_ms
        if left_ms is not None and left_ms <= 0:
            over = f"the time of this run is over; {self._request.nothing}"
            message = f"run {blocker.run} has group {self._group!r}, and {over}"
            hint = "allow the run more time: the wait for its group counts"
            raise self._failure("QUEUE_TIMEOUT", message, blocker, hint)
        pause_s = LOOK_S if left_ms is None else min(LOOK_S, left_ms / 1000)
        if stop is None:
            await asyncio.sleep(pause_s)
        else:
            await asyncio.wait([stop], timeout=pause_s)
