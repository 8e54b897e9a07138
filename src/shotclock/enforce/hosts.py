"""Host processes seen from the runtime: async handlers run there when the process that holds the clocks may run none.

One host serves all calls, so they share what the app keeps in its memory. It is replaced when it

- is blocked: its loop does not pick up what it is given, or take note of a cancellation. New calls go to a fresh host.
  It is killed, with everything below it, at the bell of the call that blocks it;
- is tainted: a handler swallowed its cancellation. New calls go to a fresh host at once, the tainted one is killed as
  soon as nobody else's call is in it, so that nothing is abandoned for long;
- died by itself.

What had not begun moves to the fresh host and never notices; what had begun is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from functools import partial
from typing import Protocol

from ..core.clocks import ClockKind
from ..core.effects import Ending
from ..core.envelope import Problem, Warning_, warning
from . import wire
from .admission import Outcome
from .assignment import Report
from .clock import monotonic_ns
from .guests import Guest
from .hosted import HEARD_LIMIT_S, STARVED_TRIES
from .hostprocess import HEARD_LIMIT_NS, KILL_LIMIT_S, Fate, HostProcess
from .outcomes import crash_outcome
from .pool import IMPORT_LIMIT_NS, RESPAWN_PAUSE_S, WARM_UP_PAUSE_S, all_gone
from .preloaded import Preloaded
from .processes import shielded
from .spawned import Survivors

# Each tainted host is a process with handlers that would not stop, or that block it and may do so until their bells.
# Beyond this the oldest goes, whoever is in it.
MOST_TAINTED = 16
# Calls whose grace ends this soon after another's are waited for, so that all are killed and none is abandoned.
TOGETHER_NS = HEARD_LIMIT_NS
# After this many hosts in a row that never came up, those who wait are told instead of waiting for their bells.
MOST_FAILED_STARTS = 8


class Books(Protocol):
    """Who keeps the books of what was abandoned: the runtime."""

    def abandoned(self, call: Guest) -> None: ...
    def came_late(self, call: Guest) -> None: ...
    def was_killed(self, call: Guest) -> None: ...


class HostProcesses:
    """The host that serves, those that are on their way out, and the calls that wait for a fresh one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, preloaded: Preloaded, books: Books) -> None:
        self.loop = loop
        self.preloaded = preloaded
        self.context = contextvars.Context()  # for all our timers, instead of a copy of the caller's for each
        self._books = books
        self._serving: HostProcess | None = None
        self._all: set[HostProcess] = set()
        self._tainted: list[HostProcess] = []
        self._waiting: deque[Guest] = deque()
        self._respawn: asyncio.TimerHandle | None = None
        self._failed_starts = 0
        self._came_up_ns = 0
        self._closing = False

    async def warm_up(self, within_s: float) -> bool:
        """Start the host and wait for it. False if it is not up in time."""
        give_up_ns = monotonic_ns() + int(within_s * 1e9)
        while not (self._serving is not None and self._serving.is_ready):
            self._ensure_host()
            if monotonic_ns() >= give_up_ns:
                return False
            await asyncio.sleep(WARM_UP_PAUSE_S)
        return True

    async def run(self, guest: Guest) -> Outcome:
        """Run a call. Returns when the work has ended one way or the other; bounded by its clocks."""
        if self._closing:
            return _closing()
        guest.on_waiting_end = self._turn_away
        guest.arm(self.loop, self.context)
        queue: asyncio.TimerHandle | None = None
        if self._serving is not None and self._serving.is_ready:
            self._serving.take(guest)
        else:
            self._waiting.append(guest)
            self._ensure_host()
            if queue_ms := guest.admission.clocks.queue_ms:
                queue = self.loop.call_later(queue_ms / 1000, self._end_queueing, guest)
        try:
            return await guest.done
        except asyncio.CancelledError as cancelled:
            cancelled.outcome = await self._call_off(guest)  # type: ignore[attr-defined]
            raise
        finally:
            guest.disarm()
            if queue is not None:
                queue.cancel()

    async def _call_off(self, guest: Guest) -> Outcome | None:
        """The caller has left: stop the work, wait, bounded, until it has ended or is given up. What became of it."""
        host = guest.host
        if not isinstance(host, HostProcess):
            with contextlib.suppress(ValueError):
                self._waiting.remove(guest)
            return Outcome(Ending.NOT_STARTED)
        elif host.guests.get(guest.number) is guest:
            guest.done = self.loop.create_future()
            if guest.fired is None:
                guest.stop(ClockKind.TIMEOUT)
            else:  # it may have become overdue in the moment in which nobody waited
                guest.call_when_overdue(self.loop, self._overdue)
            limit_s = guest.grace_ns / 1e9 + HEARD_LIMIT_S * (STARVED_TRIES + 2) + KILL_LIMIT_S
            await shielded(asyncio.wait([guest.done], timeout=limit_s))
            return guest.done.result() if guest.done.done() else Outcome(Ending.ABANDONED)
        return None

    # --- waiting for a host -------------------------------------------------------------------------------

    def _end_queueing(self, guest: Guest) -> None:
        if guest.host is None and not guest.done.done():
            self._turn_away(guest, ClockKind.QUEUE)

    def _turn_away(self, guest: Guest, kind: ClockKind) -> None:
        """No host in time: it never started."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(guest)
        why = "no host process came up in time; importing the modules it needs takes too long"
        started_ns = self.preloaded.started_ns
        if self._came_up_ns < started_ns < monotonic_ns() - IMPORT_LIMIT_NS:
            self.preloaded.close()  # its supervisor kills it, and whatever its imports hang in
        if kind is ClockKind.QUEUE:
            fired = guest.admission.fired(kind, monotonic_ns() - guest.started_ns)
            guest.resolve(Outcome(Ending.NOT_STARTED, Problem("QUEUE_TIMEOUT", why, fired=fired)))
        else:
            guest.settle(Ending.NOT_STARTED, why=why)

    def _ensure_host(self) -> None:
        """One that serves, or is on its way, or will be tried again in a moment."""
        if self._serving is not None or self._respawn is not None or self._closing:
            return
        try:
            self._serving = HostProcess(self)
            self._all.add(self._serving)
        except (wire.Broken, OSError) as error:
            self._start_failed(str(error))

    def _start_failed(self, why: str) -> None:
        """The machine is full, the imports kill it, or somebody killed its zygote. Not again at once."""
        self._failed_starts += 1
        if self._failed_starts >= MOST_FAILED_STARTS:
            self._failed_starts = 0
            for guest in self._waiting:
                problem = Problem("SPAWN_FAILED", f"no host process came up in {MOST_FAILED_STARTS} tries: {why}")
                guest.resolve(Outcome(Ending.NOT_STARTED, problem))
            self._waiting.clear()
        if self._respawn is None and not self._closing:
            self._respawn = self.loop.call_later(RESPAWN_PAUSE_S, self._respawn_now, context=self.context)

    def _respawn_now(self) -> None:
        self._respawn = None
        if self._waiting:
            self._ensure_host()

    def came_up(self, host: HostProcess) -> None:
        self._came_up_ns = monotonic_ns()
        self._serve_waiting(host)

    def _serve_waiting(self, host: HostProcess) -> None:
        if host is self._serving and not host.is_dying:
            while self._waiting:
                host.take(self._waiting.popleft())

    # --- what becomes of calls ----------------------------------------------------------------------------

    def heard(self, host: HostProcess, guest: Guest) -> None:
        if guest.was_probed:
            self._give_up(host, guest)
        else:
            guest.call_when_overdue(self.loop, self._overdue)

    def ended(self, host: HostProcess, guest: Guest, kind: str, payload: object, finished_ns: int) -> None:
        self._failed_starts = 0
        if guest.is_abandoned:
            self._books.came_late(guest)
        elif kind == "unbegun" and guest.fired is None:  # refused, because its host is on its way out
            if self._closing:
                guest.resolve(_closing())
            else:
                self._move([guest])
        else:
            guest.disarm()
            warnings = (_replaced(_blocked(host, guest)),) if host.blocked_by else ()
            then = partial(guest.arrived, kind, payload, finished_ns, warnings=warnings)
            if not guest.started:
                then()
            elif guest.fired is None:  # it may keep them for the calls after it, as it keeps what is in memory
                guest.started.look_beside(self.loop, then)
            else:
                guest.started.stop_beside(self.loop, then, grace_ns=guest.left_of_grace_ns)
        self._kill_if_useless(host)

    def _overdue(self, guest: Guest) -> None:
        """It took note of its cancellation and is still there after its grace."""
        host = guest.host
        assert isinstance(host, HostProcess)
        if guest.done.done() or host.is_dying:
            return
        guest.is_overdue = True
        self._taint(host)
        if self._kill_if_useless(host):
            return
        others = [other for other in host.guests.values() if not other.is_overdue]
        soon_ns = monotonic_ns() + TOGETHER_NS
        if all(other.fired is not None and other.overdue_ns <= soon_ns for other in others):
            return  # the last of them decides for all
        if host.running() is guest:  # it may have blocked the loop since it was cancelled: see whether that still hears
            guest.was_probed = True
            host.cancel(guest)
        else:
            self._give_up(host, guest)

    def _give_up(self, host: HostProcess, guest: Guest) -> None:
        """It goes on among calls that need its host. Abandoned, until they have ended."""
        if guest.done.done() or host.is_dying:
            return
        why = _blocked(host, guest) if host.blocked_by else f"{guest.name} did not stop when it was cancelled"
        guest.is_abandoned = True
        self._books.abandoned(guest)

        def settle(survivors: Survivors = ()) -> None:
            guest.settle(Ending.ABANDONED, warnings=(_replaced(why),), survivors=survivors)

        if guest.started:  # it goes on, and what it has started does not
            guest.started.is_over = True
            guest.started.stop_beside(self.loop, settle)
        else:
            settle()

    # --- what becomes of hosts ----------------------------------------------------------------------------

    def _taint(self, host: HostProcess) -> None:
        if host in self._tainted:
            return
        self._tainted.append(host)
        self._relieve(host)
        if len(self._tainted) > MOST_TAINTED:
            oldest = self._tainted[0]
            names = sorted({guest.name for guest in oldest.guests.values() if guest.is_overdue})
            oldest.kill(Fate.CROWDED_OUT, ", ".join(names))

    def _kill_if_useless(self, host: HostProcess) -> bool:
        """A tainted host in which nobody is left but those who would not stop."""
        if host not in self._tainted or not all(guest.is_overdue for guest in host.guests.values()):
            return False
        host.kill(Fate.TAINTED)
        return True

    def found_deaf(self, host: HostProcess, unheard: list[Guest]) -> None:
        """Its loop does not hear that these are to be cancelled. Whoever blocks it has the time of its own clock, not
        of theirs; where that is not known, it may be any call whose bell has not rung."""
        running = host.running()
        suspects = [running] if running is not None else [g for g in host.guests.values() if host.has_begun(g)]
        if all(guest.fired is not None for guest in suspects):
            host.kill(Fate.DEAF, running.name if running is not None else "")
            self._relieve(host)
            return
        overdue = [guest for guest in unheard if monotonic_ns() >= guest.overdue_ns]
        if overdue:
            self.found_blocked(host)
        for guest in overdue:
            if host.guests.get(guest.number) is guest:
                guest.is_overdue = True
                self._give_up(host, guest)

    def found_blocked(self, host: HostProcess) -> None:
        """It goes on until the bell of whoever blocks it. Nothing else begins there; what had not goes elsewhere."""
        if host.blocked_by or host.is_dying:
            return
        running = host.running()
        unbegun = host.close_to_new(running.name if running is not None else "a task or a callback")
        self._taint(host)
        rung = [guest for guest in unbegun if guest.fired is not None]
        for guest in rung:
            warnings = (_replaced(_blocked(host, guest)),)
            guest.settle(Ending.NOT_STARTED, why="its host process had no time for it", warnings=warnings)
        self._move([guest for guest in unbegun if guest.fired is None])

    def _relieve(self, host: HostProcess) -> None:
        """A fresh one at once, before anybody asks for it."""
        if host is self._serving:
            self._serving = None
            self._ensure_host()

    def lost(self, host: HostProcess, report: Report) -> None:
        """A host is gone. Everybody who was in it is answered, or moved."""
        self._all.discard(host)
        if host in self._tainted:
            self._tainted.remove(host)
        was_serving = host is self._serving
        if was_serving:
            self._serving = None
        guests = sorted(host.guests.values(), key=lambda guest: guest.number)
        host.guests.clear()
        told = sum(not guest.is_abandoned and guest.fired is None and host.has_begun(guest) for guest in guests)
        unbegun = []
        for guest in guests:
            if guest.is_abandoned:
                self._books.was_killed(guest)
            elif host.has_begun(guest):
                self._answer_for(host, guest, report, told)
            elif self._closing:
                guest.resolve(_closing())
            elif guest.fired is not None:
                warnings = (_replaced(_why(host, guest), told),)
                guest.settle(Ending.NOT_STARTED, why="its host process had no time for it", warnings=warnings)
            else:
                unbegun.append(guest)
        if was_serving and host.was_any_good:
            self._ensure_host()
        elif was_serving:
            self._start_failed("it died before it served any call")
        self._move(unbegun)

    def _move(self, unbegun: list[Guest]) -> None:
        """To the fresh host, before all others, as if nothing had happened."""
        for guest in unbegun:
            guest.host, guest.number = None, 0
        self._waiting.extendleft(reversed(unbegun))
        if self._waiting:
            self._ensure_host()
            if self._serving is not None and self._serving.is_ready:
                self._serve_waiting(self._serving)

    def _answer_for(self, host: HostProcess, guest: Guest, report: Report, told: int) -> None:
        """For a call that had begun in a host that is gone."""
        survivors = report.survivors
        if guest.fired is not None:
            warnings = (_replaced(_why(host, guest), told),)
            guest.settle(Ending.KILLED, warnings=warnings, survivors=survivors)
        elif host.fate is Fate.CLOSING:
            problem = Problem("CANCELLED", "stopped: the runtime is closing")
            guest.resolve(Outcome(Ending.KILLED, problem, survivors=survivors))
        elif host.fate is Fate.DIED or report.lost:
            report.stopped = None  # we only asked its supervisor to be quick
            outcome = crash_outcome(guest.admission, report)
            outcome.warnings += (_replaced("it died"),)
            guest.resolve(outcome)
        else:
            message = f"{guest.name} was interrupted, its host process was replaced: {_why(host, guest)}; {_LOST}"
            context: dict[str, object] = {"operation": host.culprit} if host.culprit else {}
            problem = Problem("HOST_REPLACED", message, context=context or None)
            guest.resolve(Outcome(Ending.KILLED, problem, survivors=survivors))

    async def close(self) -> None:
        """Kill every host and wait, bounded, until each tree is reported gone."""
        self._closing = True
        if self._respawn is not None:
            self._respawn.cancel()
        for guest in self._waiting:
            guest.resolve(_closing())
        self._waiting.clear()
        hosts = list(self._all)
        for host in hosts:
            host.kill(Fate.CLOSING)
        await all_gone([host.gone for host in hosts if host.is_ready])
        if not all(host.gone.done() for host in hosts):
            self.preloaded.close()  # it may hang in an import, with the requests for them still in its hands
            await all_gone([host.gone for host in hosts])
        for host in hosts:
            host.end(None)


_LOST = "what handlers kept in its memory is lost"


def _blocked(host: HostProcess, guest: Guest) -> str:
    return f"{'it' if host.blocked_by == guest.name else host.blocked_by} blocked its event loop"


def _why(host: HostProcess, guest: Guest) -> str:
    if host.fate is Fate.DEAF:
        who = "it" if host.culprit == guest.name else host.culprit
        return f"{who} blocked its event loop" if who else "its event loop was blocked"
    if host.fate is Fate.DIED:
        return "it died"
    return f"{host.culprit or guest.name} did not stop when it was cancelled"


def _replaced(why: str, told: int = 0) -> Warning_:
    context = {"interrupted": told} if told else {}
    return warning("HOST_REPLACED", f"the host process was replaced ({why}); {_LOST}", **context)


def _closing() -> Outcome:
    return Outcome(Ending.NOT_STARTED, Problem("SHUTTING_DOWN", "the runtime is closing"))
