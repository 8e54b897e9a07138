"""Control of running calls: the soft limit, overtime, and winding down.

The control of a call lives on the loop that waits for the call. Winding down reaches
all calls inside a call, each a little earlier, so that the inner answers arrive in time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from ..core.errors import Failure
from ..core.limits import (
    DEFAULT_WIND_DOWN_MS,
    NS_PER_MS,
    Bound,
    ClockKind,
    Deadline,
    Fired,
    format_duration,
    latest_bell,
    move_bell,
)
from ..core.overtime import Overtime, OvertimeDecision, OvertimeRequest, Verdict, kept_for_wind_down_ms
from ..core.value_types import JsonObject, replace
from ..supervise.clock import monotonic_ns
from .call import Call, WindDown, Work, WorkView

# For the order to move a bell to reach the supervisor. If the bell is nearer, it may ring before that.
MOVED_WITHIN_MS = 50
PROGRESS_KEPT = 20
LOOK_LIMIT_S = 1.0  # only a stopped supervisor exhausts it
# Only a blocked loop exhausts it. Less than the patience of a client of the control channel.
ACT_LIMIT_S = 4.0
TEXT_SHOWN = 2000

# An observer's call runs inside the observed call and is no sign of life of it.
OBSERVER_NAME = "overtime observer"

NOTHING_SEEN: Mapping[str, tuple[int, int]] = {}

T = TypeVar("T")


class LiveCalls(dict[str, Call]):
    """The unanswered calls of this process by request id, oldest first."""

    def enter(self, call: Call) -> None:
        control_of(call)
        self[call.request_id] = call

    def leave(self, call: Call) -> None:
        self.pop(call.request_id, None)
        outer = call.inside_of
        if outer is not None and outer.control is not None and call.name != OBSERVER_NAME:
            outer.control.record_sign_of_life()
        if call.control is not None:
            call.control.close()
            call.control = None  # they refer to each other, and would both wait for the garbage collector

    def inside(self, call: Call) -> Iterator[Call]:
        """Yield the calls that were made inside another, at any depth."""
        for other in list(self.values()):
            above = other.inside_of
            while above is not None and above is not call:
                above = above.inside_of
            if above is call:
                yield other

    def made_by(self, call: Call) -> list[Call]:
        return [other for other in list(self.values()) if other.inside_of is call]


live_calls = LiveCalls()


Observe = Callable[[Call, JsonObject], Awaitable[OvertimeDecision]]
OnNews = Callable[[Call, OvertimeRequest | WindDown], None]
# asyncio refuses absurd delays on some platforms; a day at a time is as good.
LONGEST_DELAY_S = 86_400.0
# How soon a call is first asked whether it has begun, which takes a worker less than a millisecond.
FIRST_LOOK_S = 0.005


class CallControl:
    """The soft limit of one call, its overtime and its winding down."""

    # Defaults of the class, because most calls end without any of these.
    observe: Observe | None = None
    on_change: OnNews | None = None
    signs: int = 0
    is_over: bool = False
    _asking: asyncio.Task[None] | None = None
    _soft: asyncio.TimerHandle | None = None
    _stopping: asyncio.TimerHandle | None = None
    _soft_ns: int | None = None
    _queued_ns = 0
    _kept_ms = 0
    _pending: tuple[int, str] | None = None  # since when an observer is deciding, and at whose request
    _last_seen: Mapping[str, tuple[int, int]] = NOTHING_SEEN
    """Bytes written and signs of life when an observer last looked: of this call under "", of the calls inside it by
    request id."""
    _person_waits = 0
    _person_since_ns = 0
    _lent: Bound | None = None
    """The bound before a person was asked."""
    _former_bells: tuple[Deadline, ...] = ()
    _former_parents: tuple[Deadline, ...] = ()
    """Deadlines that were moved, which code inside the call may still hold."""

    def __init__(self, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        self.call = call
        self.loop = loop

    @cached_property
    def progress(self) -> deque[dict[str, object]]:
        return deque(maxlen=PROGRESS_KEPT)

    @cached_property
    def _lock(self) -> asyncio.Lock:
        return asyncio.Lock()

    def arm(self, queued_ns: int = 0) -> None:
        """Start the soft limit. It does not count the wait for a place or a worker."""
        self._queued_ns = queued_ns
        call, soft_ms = self.call, self.call.clocks.soft_ms
        limit_ms = call.bound.limit_ms
        limit_ms = limit_ms and max(1, limit_ms - self._queued_ns // NS_PER_MS)
        if call.overtime is not None:
            if soft_ms is None or 0 < limit_ms <= soft_ms:
                soft_ms = call.overtime.policy.soft_ms(limit_ms)
            if soft_ms:
                self._kept_ms = kept_for_wind_down_ms(limit_ms, soft_ms, self._wind_down_ms)
        if soft_ms and call.winding_down is None and not self.is_over:
            soft_ns = call.started_ns + self._queued_ns + soft_ms * NS_PER_MS
            self._set_soft(max(soft_ns, self._soft_ns or 0))  # an operator may have extended it while it waited

    def begin_work(self) -> None:
        """Count the soft limit from now on: the call waited for a worker."""
        self.arm(monotonic_ns() - self.call.started_ns)

    def close(self) -> None:
        self.is_over = True
        self._cancel_timers()
        if self._asking is not None:
            self._asking.cancel()
        if self._pending is not None and self.call.overtime is not None:
            (began_ns, asked_by), now_ns, self._pending = self._pending, monotonic_ns(), None
            at_ms, took_ms = (began_ns - self.call.started_ns) // NS_PER_MS, (now_ns - began_ns) // NS_PER_MS
            self._report(self.call.overtime.record_unanswered(at_ms, asked_by, took_ms))

    def record_sign_of_life(self) -> None:
        """Record output or an ended inner call, for an observer."""
        self.signs += 1

    def record_progress(self, done: float, total: float | None, message: str | None) -> None:
        self.signs += 1
        at_ms = (monotonic_ns() - self.call.started_ns) // NS_PER_MS
        self.progress.append({"at_ms": at_ms, "done": done, "total": total, "message": message})

    def soft_remaining_ms(self, now_ns: int) -> int | None:
        return None if self._soft_ns is None else max(0, self._soft_ns - now_ns) // NS_PER_MS

    def _set_soft(self, at_ns: int) -> None:
        self._soft_ns = at_ns
        if self._soft is not None:  # two parts of the runtime may start it
            self._soft.cancel()
        self._wait_for_soft(at_ns)

    def _wait_for_soft(self, at_ns: int) -> None:
        left_s = (at_ns - monotonic_ns()) / 1e9
        if left_s > 0:
            self._soft = self.loop.call_later(min(left_s, LONGEST_DELAY_S), self._wait_for_soft, at_ns)
            return
        self._soft = None
        if self.call.winding_down is not None or self.is_over:
            return
        if self.call.work is not None and self.call.work.is_queued:
            return  # `begin_work` starts it again
        if self.call.overtime is not None and self.call.overtime.policy.has_observer:
            self._asking = self.loop.create_task(self._negotiate_at_soft(self.call.overtime))
        else:
            reason = f"the soft limit of {format_duration(self._soft_limit_ms)} rang"
            self.wind_down("soft clock", reason, is_soft_limit=True)

    def _cancel_timers(self) -> None:
        for timer in (self._soft, self._stopping):
            if timer is not None:
                timer.cancel()

    @property
    def _wind_down_ms(self) -> int:
        declared = self.call.clocks.wind_down_ms
        return DEFAULT_WIND_DOWN_MS if declared is None else declared

    @property
    def _soft_limit_ms(self) -> int:
        """Return the soft limit with all grants, from the beginning of the work."""
        at_ns = self._soft_ns or monotonic_ns()
        return max(0, (at_ns - self.call.started_ns - self._queued_ns) // NS_PER_MS)

    async def _negotiate_at_soft(self, overtime: Overtime) -> None:
        request = await self.negotiate(overtime, "soft clock")
        if request is not None and not request.granted_ms and self.call.winding_down is None and not self.is_over:
            by = "observer" if request.verdict is Verdict.DECLINED else "soft clock"
            self.wind_down(by, request.reason or f"overtime was {request.verdict}", is_soft_limit=True)

    async def negotiate(
        self, overtime: Overtime, asked_by: str, wanted_ms: int | None = None, why: str = ""
    ) -> OvertimeRequest | None:
        """Get the observer's decision and apply it. Return None if it became unnecessary meanwhile."""
        async with self._lock:  # each holder is bounded likewise
            if wanted_ms is None and self._soft_ns is not None and self._soft_ns > monotonic_ns():
                return None  # the call itself has asked meanwhile, with success
            if self.call.winding_down is not None:
                return None
            began_ns = monotonic_ns()
            self._pending = began_ns, asked_by
            ceiling_ms = self._ceiling_ms(overtime, began_ns, asked_by)
            room_ms = overtime.room_ms(ceiling_ms)
            observe = self.observe if room_ms else None
            if observe is not None:
                details: dict[str, object] = {
                    "asked_by": asked_by,
                    "asked_ms": wanted_ms,
                    "reason": why[:TEXT_SHOWN],
                    "most_ms": room_ms,
                }
                decision = await self._ask(observe, overtime, details, overtime.patience_ms(ceiling_ms))
            else:
                most_ms = overtime.policy.max_per_request_ms or overtime.policy.budget_ms
                decision = OvertimeDecision(wanted_ms or most_ms)
            if wanted_ms is not None:
                decision = replace(decision, extend_ms=min(decision.extend_ms, wanted_ms))
            now_ns = monotonic_ns()
            request = overtime.settle(
                decision,
                at_ms=(began_ns - self.call.started_ns) // NS_PER_MS,
                took_ms=(now_ns - began_ns) // NS_PER_MS,
                ceiling_ms=self._ceiling_ms(overtime, now_ns, asked_by),
                asked_by=asked_by,
                is_asked=observe is not None,
            )
            self._pending = None
            if request.granted_ms and not self.is_over:
                request = self._grant(overtime, request, now_ns)
            self._report(request)
            return request

    def _grant(self, overtime: Overtime, request: OvertimeRequest, now_ns: int) -> OvertimeRequest:
        """Apply a grant. Return it as far as the work allows it."""
        counted_ns = self._counted_from(now_ns, request.asked_by)
        if overtime.policy.hard_extends:
            self._extend_limit(request.granted_ms + request.took_ms)
        bell = self.call.bound.bell
        if bell is not None and bell.remaining_ms(counted_ns) < request.granted_ms:
            request = overtime.reduce_last(bell.remaining_ms(counted_ns), "its timeout cannot be moved now")
        self._set_soft(counted_ns + request.granted_ms * NS_PER_MS)
        return request

    def _counted_from(self, now_ns: int, asked_by: str) -> int:
        """Return the instant a grant is counted from: a call that asks before its soft limit loses nothing."""
        return max(now_ns, self._soft_ns or 0) if asked_by == "call" else now_ns

    async def _ask(
        self, observe: Observe, overtime: Overtime, details: dict[str, object], limit_ms: int
    ) -> OvertimeDecision:
        try:
            async with asyncio.timeout(limit_ms / 1000):
                return await observe(self.call, await self._summarise(overtime) | details)
        except TimeoutError:
            reason = f"the observer did not answer within {format_duration(limit_ms)}"
        except Failure as failure:
            reason = f"the observer failed: {failure.code}: {failure}"
        except Exception as error:
            reason = f"the observer failed: {type(error).__name__}: {error}"
        return OvertimeDecision(failed=True, reason=reason[:TEXT_SHOWN])

    async def _summarise(self, overtime: Overtime) -> JsonObject:
        """Return the summary of the call for its observer, bounded in size and time."""
        call, now_ns = self.call, monotonic_ns()
        inner = list(live_calls.inside(call))
        view, *views = await _look_at([call, *inner])
        bell = call.bound.bell
        seen = {
            each.request_id: (shown.written, control_of(each).signs) for each, shown in zip(inner, views, strict=True)
        }
        seen[""] = view.written, self.signs
        last_seen, self._last_seen = self._last_seen, seen
        has_grown = any(
            new > old for name, now in seen.items() for new, old in zip(now, last_seen.get(name, (0, 0)), strict=True)
        )
        shown = next(filter(None, (control_of(each).progress for each in (call, *inner))), ())
        # A call begun inside since the last look is a sign of life.
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
            "progress": list(shown),
            "calls": [
                {"call": each.name, "running_ms": (now_ns - each.started_ns) // NS_PER_MS}
                for each in inner[:PROGRESS_KEPT]
            ],
            "granted_ms": overtime.granted_ms,
            "requests": [request.as_meta() for request in overtime.requests[-PROGRESS_KEPT:]],
            "requests_left": overtime.requests_left,
        }

    def _ceiling_ms(self, overtime: Overtime, now_ns: int, asked_by: str) -> int | None:
        """Return how far away the instant is that no grant may pass."""
        bell = self._latest_bell() if overtime.policy.hard_extends else self.call.bound.bell
        if bell is None:
            return None
        return max(0, bell.remaining_ms(self._counted_from(now_ns, asked_by)) - self._kept_ms)

    def _latest_bell(self) -> Deadline | None:
        return latest_bell(self.call.time.parent, self.call.started_ns, self.call.clocks.reserve_ms)

    def _extend_limit(self, by_ms: int) -> int:
        call, clocks = self.call, self.call.clocks
        moved = move_bell(call.bound, by_ms, self._latest_bell(), call.time.parent)
        if moved is None or call.work is None:
            return 0
        moved_ms = moved.limit_ms - call.bound.limit_ms
        if clocks.timeout_ms:
            call.time.clocks = replace(clocks, timeout_ms=clocks.timeout_ms + moved_ms)
        if self._apply_bound(moved):
            return moved_ms
        call.time.clocks = clocks
        return 0

    def _apply_bound(self, moved: Bound) -> bool:
        """Move the timeout of the work and of its inner calls. Return False if the work does not allow it."""
        call, before = self.call, self.call.bound
        call.time.bound = moved
        if call.work is not None and not call.work.move_bell():
            call.time.bound = before
            return False
        if before.bell is not None:
            self._former_bells += (before.bell,)
        for inner in live_calls.made_by(call):
            if inner.time.parent is not None and inner.time.parent is before.bell:
                control = control_of(inner)
                control.loop.call_soon_threadsafe(control.follow_caller, moved.bell)
        return True

    def get_current(self, deadline: Deadline | None) -> Deadline | None:
        """Return the present form of a deadline of this call."""
        if any(deadline is former for former in self._former_bells):
            return self.call.bound.bell
        return self.call.time.parent if any(deadline is former for former in self._former_parents) else deadline

    def follow_caller(self, parent: Deadline | None, longer_ms: int = 0) -> bool:
        """Take the caller's later deadline, and a timeout `longer_ms` longer. Return False if the work refuses."""
        call, bound = self.call, self.call.bound
        before = call.time.parent, call.clocks
        if call.time.parent is not None and call.time.parent is not parent:
            self._former_parents += (call.time.parent,)
        call.time.parent = parent
        own_ms = call.clocks.timeout_ms or 0
        if own_ms and longer_ms:
            own_ms += longer_ms
            call.time.clocks = replace(call.clocks, timeout_ms=own_ms)
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
            moved = replace(moved, owner=call.time.parent_owner, source=parent)
        elif bound.owner != call.name:
            moved = replace(moved, owner=call.name)
        if self._apply_bound(moved):
            return True
        call.time.parent, call.time.clocks = before
        return False

    def extend(self, by_ms: int, who: str) -> OvertimeRequest:
        """Move timeout and soft limit for an operator, never past the caller's deadline."""
        call, now_ns = self.call, monotonic_ns()
        if call.winding_down is not None:
            raise Failure("NOT_EXTENDABLE", f"{call.name} is winding down already")
        moved_ms = self._extend_limit(by_ms) if call.bound.bell is not None else by_ms
        if moved_ms <= 0:
            latest = self._latest_bell()
            if latest is not None and call.bound.bell is not None and latest.at_ns <= call.bound.bell.at_ns:
                raise Failure("NOT_EXTENDABLE", f"{call.name} has all the time that its {call.time.parent_owner} has")
            raise Failure("NOT_EXTENDABLE", f"the time of {call.name} cannot be changed while it runs")
        if self._soft_ns is not None:
            self._set_soft(max(self._soft_ns, now_ns) + moved_ms * NS_PER_MS)
        request = OvertimeRequest.by_person(who, (now_ns - call.started_ns) // NS_PER_MS, by_ms, moved_ms)
        if call.overtime is None:
            call.overtime = Overtime.of_person()
        call.overtime.requests.append(request)
        self._report(request)
        return request

    @contextlib.contextmanager
    def person_wait(self, limit_ms: int) -> Iterator[int]:
        """Stop the limits of the call while a person is asked, and yield how long it may take at most.

        The caller's own deadline is not stopped.
        """
        call, now_ns = self.call, monotonic_ns()
        if not self._person_waits:
            self._person_since_ns, self._lent = now_ns, call.bound
            if call.bound.bell is None or call.bound.bell.remaining_ms(now_ns) > MOVED_WITHIN_MS:
                self._extend_limit(limit_ms)
            if self._soft is not None:
                self._soft.cancel()
            if call.work is not None:
                call.work.hold_idle(True)
        self._person_waits += 1
        try:
            yield max(0, limit_ms - (now_ns - self._person_since_ns) // NS_PER_MS)
        finally:
            self._person_waits -= 1
            if not self._person_waits and not self.is_over:
                self._end_person_wait((monotonic_ns() - self._person_since_ns) // NS_PER_MS + 1)

    def _end_person_wait(self, took_ms: int) -> None:
        """Give the rest of the lent time back."""
        call, lent = self.call, self._lent
        if call.work is not None:
            call.work.hold_idle(False)
        if call.winding_down is not None or lent is None:
            return
        if lent.bell is not None and call.bound.bell is not None:
            until_ns = min(lent.bell.at_ns + took_ms * NS_PER_MS, call.bound.bell.at_ns)
            back_ms = (call.bound.bell.at_ns - until_ns) // NS_PER_MS
            if back_ms:
                bell, clocks = Deadline(until_ns), call.clocks
                if clocks.timeout_ms:
                    call.time.clocks = replace(clocks, timeout_ms=clocks.timeout_ms - back_ms)
                limit_ms = call.bound.limit_ms - back_ms
                self._apply_bound(replace(lent, bell=bell, limit_ms=limit_ms, source=bell))
        if self._soft_ns is not None:
            self._set_soft(self._soft_ns + took_ms * NS_PER_MS)

    def wind_down(self, by: str, reason: str, within_ms: int | None = None, *, is_soft_limit: bool = False) -> WindDown:
        """Ask the call, and all calls inside it, to end by themselves before they are stopped."""
        call, now_ns = self.call, monotonic_ns()
        if within_ms is None:
            within_ms = self._wind_down_ms
        fired = None
        if is_soft_limit:
            elapsed_ms = (now_ns - call.started_ns) // NS_PER_MS
            fired = Fired(ClockKind.SOFT, call.name, self._soft_limit_ms, elapsed_ms)
        until_ns = now_ns + within_ms * NS_PER_MS
        bell = call.bound.bell
        if bell is not None:
            until_ns = min(until_ns, bell.at_ns)
        return self._wind_down(WindDown(by, reason, now_ns, until_ns, fired))

    def _wind_down(self, stop: WindDown) -> WindDown:
        call, current = self.call, self.call.winding_down
        if current is not None and current.until_ns <= stop.until_ns:
            return current
        call.winding_down = stop if current is None else replace(current, until_ns=stop.until_ns)
        self._cancel_timers()
        if call.work is not None:
            call.work.wind_down(stop.until_ns)
        self._stopping = self.loop.call_later(max(0.0, (stop.until_ns - monotonic_ns()) / 1e9), self._stop)
        if current is None:
            self._report(stop)
        for_inner = _shorten(stop, call)
        for inner in live_calls.made_by(call):  # each passes it on to the calls inside it
            control = control_of(inner)
            control.loop.call_soon_threadsafe(control.follow_wind_down, for_inner)
        return call.winding_down

    def follow_wind_down(self, stop: WindDown) -> None:
        call = self.call
        if stop.has_to_be_gone and call.work is not None and call.work.has_grace:
            left_ms = max(0, stop.until_ns - monotonic_ns()) // NS_PER_MS
            grace_ms = min(call.bound.grace_ms, left_ms // 2)
            call.time.bound = replace(call.bound, grace_ms=grace_ms)
            stop = replace(stop, until_ns=stop.until_ns - grace_ms * NS_PER_MS)
        self._wind_down(stop)

    def prolong_wind_down(self, until_ns: int) -> None:
        """Move the end of a wind-down of this call alone, as far as its timeout has room."""
        call, stop, bell = self.call, self.call.winding_down, self.call.bound.bell
        until_ns = until_ns if bell is None else min(until_ns, bell.at_ns)
        is_own = call.inside_of is None or call.inside_of.winding_down is None
        if stop is not None and is_own and not self.is_over and until_ns > stop.until_ns:
            call.winding_down = replace(stop, until_ns=until_ns)
            self._cancel_timers()
            self._stopping = self.loop.call_later(max(0.0, (until_ns - monotonic_ns()) / 1e9), self._stop)

    def _stop(self) -> None:
        if self.call.work is not None and not self.is_over:
            self.call.work.stop_unwound()

    def _report(self, news: OvertimeRequest | WindDown) -> None:
        """Report a change to the watchers of this call and of all calls around it."""
        above: Call | None = self.call
        while above is not None:
            if above.control is not None and above.control.on_change is not None:
                try:
                    above.control.on_change(self.call, news)
                except Exception as error:  # an error of a watcher must not stop the call
                    self.loop.call_exception_handler({"message": "shotclock overtime", "exception": error})
            above = above.inside_of


def _shorten(stop: WindDown, outer: Call) -> WindDown:
    """Return the wind-down of a call inside another: earlier, so that the outer one has time for its result."""
    left_ms = max(0, stop.until_ns - monotonic_ns()) // NS_PER_MS
    work = outer.work or Work()
    until_ns = stop.until_ns - work.kept_ms(left_ms) * NS_PER_MS
    return replace(stop, until_ns=until_ns, has_to_be_gone=stop.has_to_be_gone or work.needs_end)


def control_of(call: Call) -> CallControl:
    """Return the control of a running call. Use it on the loop that waits for the call, or through `act_on`."""
    if call.control is None:
        call.control = CallControl(call, asyncio.get_running_loop())
    return call.control


async def act_on(call: Call, act: Callable[[CallControl], T]) -> T:
    """Act on a running call from any loop. Raises the errors of `act`, and TimeoutError if that loop is blocked."""
    control = control_of(call)

    async def acting() -> T:
        return act(control)

    if control.loop is asyncio.get_running_loop():
        return act(control)
    async with asyncio.timeout(ACT_LIMIT_S):
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(acting(), control.loop))


async def _look_at(calls: Sequence[Call]) -> list[WorkView]:
    """Return a view of the work of each call; empty past PROGRESS_KEPT, or without an answer within LOOK_LIMIT_S."""

    async def look(call: Call) -> WorkView:
        work = call.work
        if work is None or control_of(call).loop is not loop:  # only its own loop may read it
            return WorkView()
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                return await work.look()
        except TimeoutError:
            return WorkView()

    loop = asyncio.get_running_loop()
    views = await asyncio.gather(*(look(call) for call in calls[: 1 + PROGRESS_KEPT]))
    return [*views, *(WorkView() for _ in calls[len(views) :])]


def start_control(call: Call, observe: Observe, queued_ns: int = 0) -> None:
    """Start the soft limit of a call whose work begins now. A check of its arguments, which is not live, has none."""
    if (call.clocks.soft_ms or call.overtime is not None) and live_calls.get(call.request_id) is call:
        control = control_of(call)
        control.observe = observe
        control.arm(queued_ns)


def follow_wind_down(call: Call) -> None:
    outer = call.inside_of
    if outer is not None and outer.winding_down is not None and live_calls.get(call.request_id) is call:
        control_of(call).follow_wind_down(_shorten(outer.winding_down, outer))


async def request_overtime(call: Call, by_ms: int, reason: str) -> int:
    """Request overtime in the name of the call itself, and return the grant."""
    if call.overtime is None or not call.overtime.policy.max_requests:
        raise Failure("NOT_EXTENDABLE", f"{call.name} may have no overtime; declare it with `overtime`")
    if call.control is None:
        raise Failure("NOT_EXTENDABLE", f"{call.name} has ended")
    request = await call.control.negotiate(call.overtime, "call", by_ms, reason)
    return 0 if request is None else request.granted_ms


class IdleClock:
    """Timer that calls `on_idle` once after a silence of its length, counted from the beginning of the work."""

    __slots__ = ("_has_begun", "_idle_ns", "_is_counting", "_last_ns", "_loop", "_on_idle", "_timer", "is_held")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        idle_ms: int,
        on_idle: Callable[[], None],
        has_begun: Callable[[], bool] = lambda: True,
    ) -> None:
        self._loop = loop
        self._on_idle = on_idle
        self._has_begun = has_begun
        self._is_counting = False
        self.is_held: bool = False
        """A person is asked: the silence is not the function's."""
        self._last_ns = monotonic_ns()
        self._idle_ns = idle_ms * NS_PER_MS
        self._timer = self._call_later(min(FIRST_LOOK_S, self._idle_ns / 1e9))

    def sign_of_life(self) -> None:
        self._last_ns = monotonic_ns()

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        now_ns = monotonic_ns()
        if not self._is_counting:
            self._is_counting, self._last_ns = self._has_begun(), now_ns
        if self.is_held:
            self._last_ns = now_ns
        left_ns = self._last_ns + self._idle_ns - now_ns
        if left_ns <= 0:
            self._on_idle()
            return
        # One handle at a time: a call that is watched for days would keep one for each check.
        self._timer = self._call_later((left_ns if self._is_counting else self._idle_ns // 10) / 1e9)

    def _call_later(self, delay_s: float) -> asyncio.TimerHandle:
        return self._loop.call_later(min(delay_s, LONGEST_DELAY_S), self._check)
