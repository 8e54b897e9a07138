"""Control of running calls: the soft clock, overtime, and the graceful stop.

A call that runs is in `live_calls`, whatever its kind. Its control is made when it is needed: it has a soft clock, or
somebody wants to extend it or to wind it down. It lives on the loop that waits for the call; one timer is all that a
call with overtime costs while it runs.

Winding down goes from a call to all that were made inside it, each a little earlier than the one it is a part of, so
that what is left of their work arrives there in time.

docs/design.md: R47.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.clocks import (
    DEFAULT_WIND_DOWN_MS,
    NS_PER_MS,
    Bound,
    ClockKind,
    Deadline,
    Fired,
    format_duration,
    latest_bell,
    move_bell,
    reserve_ms_for,
)
from ..core.errors import Failure
from ..core.value_types import replace
from ..process.clock import monotonic_ns
from .call import Call, WindDown, WorkView
from .idle_clock import LONGEST_DELAY_S

if TYPE_CHECKING:  # most programs negotiate nothing
    from ..core.overtime import Overtime, OvertimeDecision, OvertimeRequest

# What is kept of a call's progress for whoever decides about its overtime.
PROGRESS_KEPT = 20
# How long the end of a command's output may take to be shown; a supervisor that is stopped runs it out.
LOOK_LIMIT_S = 1.0
# How long the loop of a call may take to hear of a decision; one that is blocked runs it out.
ACT_LIMIT_S = 5.0
# Of what an observer, or a call that asks for overtime, gives as its reason.
TEXT_SHOWN = 2000

# Who looks at a call is called inside of it, and is no sign that it goes on.
OBSERVER_NAME = "overtime observer"

T = TypeVar("T")

live_calls: dict[str, Call] = {}
"""The calls of this process that have begun and are not answered, by request id, in the order of their beginning."""


Observe = Callable[[Call, dict[str, Any]], "Awaitable[OvertimeDecision]"]
"""Asks whoever decides about the overtime of a call; gets a summary of it."""
OnNews = Callable[[Call, "OvertimeRequest | WindDown"], None]


class CallControl:
    """The soft clock of one call, and what may be decided about it while it runs."""

    __slots__ = (
        "_asking",
        "_former_bells",
        "_former_parents",
        "_kept_ms",
        "_last_seen",
        "_lock",
        "_pending",
        "_soft",
        "_soft_ns",
        "_stopping",
        "call",
        "is_over",
        "loop",
        "observe",
        "on_change",
        "progress",
        "signs",
    )

    def __init__(self, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        self.call = call
        self.loop = loop
        self._lock: asyncio.Lock | None = None
        self._asking: asyncio.Task[None] | None = None
        self._soft: asyncio.TimerHandle | None = None
        self._stopping: asyncio.TimerHandle | None = None
        self._soft_ns: int | None = None
        self._kept_ms = 0
        """What grants leave before the timeout, so that there is time to wind down."""
        self._pending: tuple[int, str] | None = None
        """Since when an observer is asked, and by whom, while it is."""
        self._last_seen: dict[str, tuple[int, int]] = {}
        """What it had written, and its signs of life, when an observer last looked at it; and those of the calls inside
        it, by request id."""
        self._former_bells: list[Deadline] = []
        self._former_parents: list[Deadline] = []
        """Deadlines that were moved, which code inside the call may still have."""
        self.observe: Observe | None = None
        self.on_change: OnNews | None = None
        self.progress: deque[dict[str, object]] = deque(maxlen=PROGRESS_KEPT)
        self.signs = 0
        """How often it has shown that it goes on."""
        self.is_over = False

    # --- the soft clock -----------------------------------------------------------------------------------

    def arm(self) -> None:
        """Start the soft clock of the call, where it has one. Its work begins now."""
        call, soft_ms = self.call, self.call.clocks.soft_ms
        limit_ms = call.bound.limit_ms
        limit_ms = limit_ms and max(1, limit_ms - call.queued_ns // NS_PER_MS)
        if call.overtime is not None and (soft_ms is None or 0 < limit_ms <= soft_ms):
            soft_ms = call.overtime.policy.soft_ms(limit_ms)
        if call.overtime is not None and soft_ms:
            from ..core.overtime import kept_for_wind_down_ms

            self._kept_ms = kept_for_wind_down_ms(limit_ms, soft_ms, self._wind_down_ms)
        if soft_ms and call.winding_down is None and not self.is_over:
            soft_ns = call.started_ns + call.queued_ns + soft_ms * NS_PER_MS
            self._soft_ns = max(soft_ns, self._soft_ns or 0)  # somebody may have extended it while it waited
            if self._soft is not None:  # whoever began the call and whoever carries it out may both start its clock
                self._soft.cancel()
            self._wait_for_soft()

    def begin_work(self) -> None:
        """Count the soft clock from now on: what came before was a wait for a worker."""
        self.call.queued_ns = monotonic_ns() - self.call.started_ns
        self.arm()

    def close(self) -> None:
        """End with the call."""
        self.is_over = True
        for timer in (self._soft, self._stopping):
            if timer is not None:
                timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        if self._pending is not None and self.call.overtime is not None:
            (began_ns, asked_by), now_ns, self._pending = self._pending, monotonic_ns(), None
            at_ms, took_ms = (began_ns - self.call.started_ns) // NS_PER_MS, (now_ns - began_ns) // NS_PER_MS
            self._tell(self.call.overtime.note_unanswered(at_ms, asked_by, took_ms))

    def note_progress(self, done: float, total: float | None, message: str | None) -> None:
        self.signs += 1
        at_ms = (monotonic_ns() - self.call.started_ns) // NS_PER_MS
        self.progress.append({"at_ms": at_ms, "done": done, "total": total, "message": message})

    def _wait_for_soft(self) -> None:
        assert self._soft_ns is not None
        left_s = (self._soft_ns - monotonic_ns()) / 1e9
        if left_s > 0:
            self._soft = self.loop.call_later(min(left_s, LONGEST_DELAY_S), self._wait_for_soft)
            return
        self._soft = None
        if self.call.winding_down is not None or self.is_over:
            return
        if self.call.work is not None and self.call.work.is_queued:
            return  # it is started anew with the work
        if self._has_observer:
            self._asking = self.loop.create_task(self._negotiate_at_bell())
        else:
            self.wind_down("soft clock", f"the soft limit of {format_duration(self._soft_limit_ms)} rang")

    def soft_remaining_ms(self, now_ns: int) -> int | None:
        """Return what is left until its soft clock rings; None where it has none."""
        return None if self._soft_ns is None else max(0, self._soft_ns - now_ns) // NS_PER_MS

    @property
    def _wind_down_ms(self) -> int:
        written = self.call.clocks.wind_down_ms
        return DEFAULT_WIND_DOWN_MS if written is None else written

    @property
    def _soft_limit_ms(self) -> int:
        """Return when the soft clock rang, from the beginning of the call, or of its work if that had to wait: what was
        set, and what was granted."""
        at_ns = self._soft_ns or monotonic_ns()
        return max(0, (at_ns - self.call.started_ns - self.call.queued_ns) // NS_PER_MS)

    @property
    def _has_observer(self) -> bool:
        return self.call.overtime is not None and self.call.overtime.policy.has_observer

    # --- overtime -----------------------------------------------------------------------------------------

    async def _negotiate_at_bell(self) -> None:
        request = await self.negotiate("soft clock")
        if request is not None and not request.granted_ms and self.call.winding_down is None and not self.is_over:
            self.wind_down("observer", request.reason or f"overtime was {request.verdict}")

    async def negotiate(self, asked_by: str, wanted_ms: int | None = None, why: str = "") -> OvertimeRequest | None:
        """Ask the observer for overtime, at the soft bell or because the call wants it, and apply what is granted.
        Bounded by what the observer may take. None where it has become unnecessary meanwhile."""
        from ..core.overtime import OvertimeDecision

        overtime = self.call.overtime
        assert overtime is not None
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:  # whoever is before us is bounded as we are
            if wanted_ms is None and self._soft_ns is not None and self._soft_ns > monotonic_ns():
                return None  # the call has asked by itself meanwhile, and got it
            if self.call.winding_down is not None:
                return None
            began_ns = monotonic_ns()
            self._pending = began_ns, asked_by
            ceiling_ms = self._ceiling_ms(began_ns, asked_by)
            room_ms = overtime.room_ms(ceiling_ms)
            asked_ms = wanted_ms or overtime.policy.max_per_request_ms or overtime.policy.budget_ms
            if room_ms and self.observe is not None:
                limit_ms = overtime.patience_ms(ceiling_ms)
                decision = await self._ask_observer(overtime, room_ms, asked_by, wanted_ms, why, limit_ms)
            else:
                decision = OvertimeDecision(asked_ms)
            if wanted_ms is not None:
                decision = replace(decision, extend_ms=min(decision.extend_ms, wanted_ms))
            now_ns = monotonic_ns()
            request = overtime.settle(
                decision,
                at_ms=(began_ns - self.call.started_ns) // NS_PER_MS,
                took_ms=(now_ns - began_ns) // NS_PER_MS,
                ceiling_ms=self._ceiling_ms(now_ns, asked_by),
                asked_by=asked_by,
            )
            self._pending = None
            if request.granted_ms and not self.is_over:
                self._grant(request, now_ns)
            self._tell(request)
            return request

    def _grant(self, request: OvertimeRequest, now_ns: int) -> None:
        overtime = self.call.overtime
        assert overtime is not None
        # From now on, or from its bell where that is still to come: a call that asks early loses nothing by it.
        from_ns = max(now_ns, self._soft_ns or 0) if request.asked_by == "call" else now_ns
        if overtime.policy.hard_extends:
            self._extend_limit(request.granted_ms + request.took_ms)
        bell = self.call.bound.bell
        soft_ns = from_ns + request.granted_ms * NS_PER_MS
        self._soft_ns = soft_ns if bell is None else min(soft_ns, bell.at_ns)
        if self._soft is not None:
            self._soft.cancel()
        self._wait_for_soft()

    async def _ask_observer(
        self, overtime: Overtime, room_ms: int, asked_by: str, wanted_ms: int | None, why: str, limit_ms: int
    ) -> OvertimeDecision:
        from ..core.overtime import OvertimeDecision

        assert self.observe is not None
        try:
            async with asyncio.timeout(limit_ms / 1000):
                summary = await self._summarise(overtime, room_ms)
                summary |= {"asked_by": asked_by, "asked_ms": wanted_ms, "reason": why[:TEXT_SHOWN]}
                return await self.observe(self.call, summary)
        except TimeoutError:
            return OvertimeDecision(
                failed=True, reason=f"the observer did not answer within {format_duration(limit_ms)}"
            )
        except Failure as failure:
            return OvertimeDecision(failed=True, reason=f"the observer failed: {failure.code}: {failure}"[:TEXT_SHOWN])
        except Exception as error:
            return OvertimeDecision(
                failed=True, reason=f"the observer failed: {type(error).__name__}: {error}"[:TEXT_SHOWN]
            )

    async def _summarise(self, overtime: Overtime, room_ms: int) -> dict[str, Any]:
        """Return what an observer sees of the call. Bounded in size and time."""
        call, now_ns = self.call, monotonic_ns()
        inner = list(calls_inside(call))
        view, *views = await _look_at([call, *inner])
        bell = call.bound.bell
        seen = {each.request_id: (shown.written, _signs_of(each)) for each, shown in zip(inner, views, strict=True)}
        seen[""] = view.written, self.signs
        last_seen, self._last_seen = self._last_seen, seen
        has_grown = any(
            new > old for name, now in seen.items() for new, old in zip(now, last_seen.get(name, (0, 0)), strict=True)
        )
        # One that has begun inside it is a sign of life as well; but not what was begun together with it.
        has_grown = has_grown or bool(last_seen and seen.keys() - last_seen.keys())
        return {
            "call": call.name,
            "request_id": call.request_id,
            "elapsed_ms": (now_ns - call.started_ns) // NS_PER_MS,
            "timeout_ms": call.bound.limit_ms,
            "remaining_ms": None if bell is None else bell.remaining_ms(now_ns),
            "stdout": view.stdout,
            "stderr": view.stderr,
            "output_bytes": view.written,
            "has_grown": has_grown or not all(each.has_begun for each in (view, *views)),
            "progress": list(self.progress) or next(filter(None, map(_progress_of, inner)), []),
            "calls": [
                {"call": each.name, "running_ms": (now_ns - each.started_ns) // NS_PER_MS}
                for each in inner[:PROGRESS_KEPT]
            ],
            "granted_ms": overtime.granted_ms,
            "requests": [request.as_meta() for request in overtime.requests[-PROGRESS_KEPT:]],
            "requests_left": overtime.requests_left,
            "most_ms": room_ms,
        }

    def _ceiling_ms(self, now_ns: int, asked_by: str = "soft clock") -> int | None:
        """Return how far away the instant is that no grant may pass; None is for nowhere. What a call asks for by
        itself is counted from its soft bell, where that is still to come."""
        overtime, bell = self.call.overtime, self.call.bound.bell
        if overtime is not None and overtime.policy.hard_extends:
            bell = self._latest_bell()
        if bell is None:
            return None
        from_ns = max(now_ns, self._soft_ns or 0) if asked_by == "call" else now_ns
        return max(0, bell.remaining_ms(from_ns) - self._kept_ms)

    def _latest_bell(self) -> Deadline | None:
        """Return what the parent leaves: no bell of this call may be later."""
        return latest_bell(self.call.parent, self.call.started_ns, self.call.clocks.reserve_ms)

    def _extend_limit(self, by_ms: int) -> int:
        """Make the call's own limit that much longer, as far as the parent's deadline allows. Return by how much."""
        call, clocks = self.call, self.call.clocks
        moved = move_bell(call.bound, by_ms, self._latest_bell(), call.parent)
        if moved is None or call.work is None:
            return 0
        moved_ms = moved.limit_ms - call.bound.limit_ms
        if clocks.timeout_ms:
            call.clocks = replace(clocks, timeout_ms=clocks.timeout_ms + moved_ms)
        if self._take_bound(moved):
            return moved_ms
        call.clocks = clocks
        return 0

    def _take_bound(self, moved: Bound) -> bool:
        """Let the work have another bell, and what was called inside it and is bounded by that. Return False where the
        work cannot be given one."""
        call, before = self.call, self.call.bound
        call.bound = moved
        if call.work is not None and not call.work.move_bell():
            call.bound = before
            return False
        if before.bell is not None:
            self._former_bells.append(before.bell)
        for inner in calls_made_by(call):
            if inner.parent is not None and inner.parent is before.bell:
                control = control_of(inner)
                control.loop.call_soon_threadsafe(control.follow_caller, moved.bell)
        return True

    def find_current(self, deadline: Deadline | None) -> Deadline | None:
        """Return what has become of a deadline that the call was bounded by, or that it has bounded others by."""
        if any(deadline is former for former in self._former_bells):
            return self.call.bound.bell
        return self.call.parent if any(deadline is former for former in self._former_parents) else deadline

    def follow_caller(self, parent: Deadline | None, longer_ms: int = 0) -> bool:
        """Take the deadline of whoever made the call, which is a later one now, and a limit of its own that is so much
        longer: the bell moves along, as far as both allow. Return False where the work cannot be given another bell."""
        call, bound = self.call, self.call.bound
        before = call.parent, call.clocks
        if call.parent is not None and call.parent is not parent:
            self._former_parents.append(call.parent)
        call.parent = parent
        own_ms = call.clocks.timeout_ms or 0
        if own_ms and longer_ms:
            own_ms += longer_ms
            call.clocks = replace(call.clocks, timeout_ms=own_ms)
        own = Deadline.after_ms(call.started_ns, own_ms) if own_ms else None
        latest = self._latest_bell()
        is_own = own is not None and (latest is None or own.at_ns <= latest.at_ns)
        until = own if is_own else latest
        if bound.bell is None or until is None or self.is_over:
            return True
        moved = move_bell(bound, (until.at_ns - bound.bell.at_ns) // NS_PER_MS, latest, parent)
        if moved is None:
            return True
        if not is_own:
            moved = replace(moved, owner=call.parent_owner, source=parent)
        elif bound.owner != call.name:
            moved = replace(moved, owner=call.name)
        if self._take_bound(moved):
            return True
        call.parent, call.clocks = before
        return False

    def extend(self, by_ms: int, who: str) -> OvertimeRequest:
        """Give a running call more time on a person's word: its timeout and its soft clock move along. Raises Failure
        where that cannot be. Never past the deadline of whoever called it."""
        from ..core.overtime import Overtime, OvertimeRequest

        call, now_ns = self.call, monotonic_ns()
        if call.winding_down is not None:
            raise Failure("NOT_EXTENDABLE", f"{call.name} is winding down already")
        moved_ms = self._extend_limit(by_ms) if call.bound.bell is not None else by_ms
        if moved_ms <= 0:
            latest = self._latest_bell()
            if latest is not None and call.bound.bell is not None and latest.at_ns <= call.bound.bell.at_ns:
                raise Failure("NOT_EXTENDABLE", f"{call.name} has all the time that its {call.parent_owner} has")
            raise Failure("NOT_EXTENDABLE", f"the time of {call.name} cannot be changed while it runs")
        if self._soft_ns is not None:
            self._soft_ns = max(self._soft_ns, now_ns) + moved_ms * NS_PER_MS
            if self._soft is not None:
                self._soft.cancel()
            self._wait_for_soft()
        request = OvertimeRequest.by_person(who, (now_ns - call.started_ns) // NS_PER_MS, by_ms, moved_ms)
        if call.overtime is None:
            call.overtime = Overtime.of_person()
        call.overtime.requests.append(request)
        self._tell(request)
        return request

    # --- the graceful stop ----------------------------------------------------------------------------------

    def wind_down(self, by: str, reason: str, within_ms: int | None = None) -> WindDown:
        """Ask the call, and all that was made inside it, to end by themselves; what has not by then is stopped."""
        call, now_ns = self.call, monotonic_ns()
        if within_ms is None:
            within_ms = self._wind_down_ms
        fired = None
        if by in ("soft clock", "observer"):
            elapsed_ms = (now_ns - call.started_ns) // NS_PER_MS
            fired = Fired(ClockKind.SOFT, call.name, self._soft_limit_ms, elapsed_ms)
        until_ns = now_ns + within_ms * NS_PER_MS
        bell = call.bound.bell
        if bell is not None:
            until_ns = min(until_ns, bell.at_ns)
        return self._wind_down(WindDown(by, reason, now_ns, until_ns, fired))

    def _wind_down(self, asked: WindDown) -> WindDown:
        call, known = self.call, self.call.winding_down
        if known is not None and known.until_ns <= asked.until_ns:
            return known
        call.winding_down = asked if known is None else replace(known, until_ns=asked.until_ns)
        for timer in (self._soft, self._stopping):
            if timer is not None:
                timer.cancel()
        if self.call.work is not None:
            self.call.work.wind_down(asked.until_ns)
        self._stopping = self.loop.call_later(max(0.0, (asked.until_ns - monotonic_ns()) / 1e9), self._stop)
        if known is None:
            self._tell(asked)
        for_inner = _shorten(asked)
        for inner in calls_made_by(call):  # each tells those inside of itself
            control = control_of(inner)
            control.loop.call_soon_threadsafe(control._wind_down, for_inner)
        return call.winding_down

    def wind_down_with(self, outer: WindDown) -> None:
        """Wind the call down from its beginning: it is made inside of one that winds down already."""
        self._wind_down(_shorten(outer))

    def _stop(self) -> None:
        if self.call.work is not None and not self.is_over:
            self.call.work.stop_unwound()

    def _tell(self, news: OvertimeRequest | WindDown) -> None:
        above: Call | None = self.call
        while above is not None:  # whoever watches a run hears of its steps
            if above.control is not None and above.control.on_change is not None:
                try:
                    above.control.on_change(self.call, news)
                except Exception as error:  # whoever watches does not stop what it watches
                    self.loop.call_exception_handler({"message": "shotclock overtime", "exception": error})
            above = above.inside_of


def _shorten(asked: WindDown) -> WindDown:
    """Return the graceful stop of what is inside a call: a little earlier, so that its answer arrives there in time."""
    left_ms = max(0, asked.until_ns - monotonic_ns()) // NS_PER_MS
    return replace(asked, until_ns=asked.until_ns - reserve_ms_for(left_ms) * NS_PER_MS)


def control_of(call: Call) -> CallControl:
    """Return the control of a running call; it is made if there was none. What it does, it does on the loop that waits
    for the call: see `act_on`."""
    if call.control is None:
        call.control = CallControl(call, call.loop or asyncio.get_running_loop())
    return call.control


async def act_on(call: Call, act: Callable[[CallControl], T]) -> T:
    """Extend a running call or wind it down, from whatever loop. Raises what `act` raises, and TimeoutError where the
    loop of the call is blocked."""
    control = control_of(call)

    async def acting() -> T:
        return act(control)

    if control.loop is asyncio.get_running_loop():
        return act(control)
    async with asyncio.timeout(ACT_LIMIT_S):
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(acting(), control.loop))


def enter(call: Call) -> None:
    """Count a call among those that run, and are waited for on this loop."""
    call.loop = asyncio.get_running_loop()
    live_calls[call.request_id] = call


def leave(call: Call) -> None:
    """Take a call out that is about to be answered."""
    live_calls.pop(call.request_id, None)
    if call.inside_of is not None and call.name != OBSERVER_NAME:
        note_sign_of_life(call.inside_of)
    if call.control is not None:
        call.control.close()


def calls_inside(call: Call) -> Iterator[Call]:
    """Yield the running calls that were made inside another, at any depth."""
    for other in list(live_calls.values()):
        above = other.inside_of
        while above is not None and above is not call:
            above = above.inside_of
        if above is call:
            yield other


def calls_made_by(call: Call) -> list[Call]:
    """Return the running calls that were made in this one itself."""
    return [other for other in list(live_calls.values()) if other.inside_of is call]


async def _look_at(calls: Sequence[Call]) -> list[WorkView]:
    """Return what the work of each call has shown, the first and as many others as an observer is shown. Bounded
    for all of them together; one that does not answer has shown nothing."""

    async def look(call: Call) -> WorkView:
        work = call.work
        if work is None or (call.loop is not None and call.loop is not loop):  # it may only be asked there
            return WorkView()
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                return await work.look()
        except TimeoutError:
            return WorkView()

    loop = asyncio.get_running_loop()
    views = await asyncio.gather(*(look(call) for call in calls[: 1 + PROGRESS_KEPT]))
    return [*views, *(WorkView() for _ in calls[len(views) :])]


def _signs_of(call: Call) -> int:
    return 0 if call.control is None else call.control.signs


def _progress_of(call: Call) -> list[dict[str, object]]:
    return [] if call.control is None else list(call.control.progress)


def has_overtime(call: Call) -> bool:
    """Return whether anybody may ask for the signs of life of a call: it, or one that it is made in, has overtime."""
    above: Call | None = call
    while above is not None and above.overtime is None:
        above = above.inside_of
    return above is not None


def note_progress(call: Call, done: float, total: float | None, message: str | None) -> None:
    """Note that a call goes on, on the loop that waits for it, where anybody may ask."""
    if call.control is not None or has_overtime(call):
        control_of(call).note_progress(done, total, message)


def note_sign_of_life(call: Call) -> None:
    """Note that a call goes on, where anybody may ask: it has written something, or a call inside it has ended."""
    if call.control is not None or has_overtime(call):
        control_of(call).signs += 1


def start_control(call: Call, observe: Observe) -> None:
    """Start the soft clock of a call whose work begins now. Whoever looks at its arguments beside it starts none."""
    if (call.clocks.soft_ms or call.overtime is not None) and live_calls.get(call.request_id) is call:
        control = control_of(call)
        control.observe = observe
        control.arm()


def follow_wind_down(call: Call) -> None:
    """Wind a call down whose work begins inside of one that winds down already."""
    outer = call.inside_of
    if outer is not None and outer.winding_down is not None and live_calls.get(call.request_id) is call:
        control_of(call).wind_down_with(outer.winding_down)


async def request_overtime(call: Call, by_ms: int, reason: str) -> int:
    """Ask for overtime in the name of the call itself, and return what was granted. Raises Failure where it may have
    none. Bounded by what its observer may take."""
    if call.overtime is None or not call.overtime.policy.max_requests:
        raise Failure("NOT_EXTENDABLE", f"{call.name} may have no overtime; declare it with `overtime`")
    request = await control_of(call).negotiate("call", by_ms, reason)
    return 0 if request is None else request.granted_ms
