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
from ..process import ipc
from ..process.call_processes import Survivors
from ..process.clock import monotonic_ns
from ..process.command_task import CommandReport
from .async_worker import HEARD_LIMIT_NS, KILL_LIMIT_S, AsyncWorker, Fate
from .call import Outcome
from .command_runner import shielded
from .host_call import HostCall
from .loop_call import HEARD_LIMIT_S, STARVED_TRIES
from .outcomes import crash_outcome
from .preloaded_zygote import Preloaded
from .worker_pool import IMPORT_LIMIT_NS, RESPAWN_PAUSE_S, WARM_UP_PAUSE_S, all_gone

# Each tainted host is a process with handlers that would not stop, or that block it and may do so until their bells.
# Beyond this the oldest goes, whoever is in it.
MOST_TAINTED = 16
# Calls whose grace ends this soon after another's are waited for, so that all are killed and none is abandoned.
TOGETHER_NS = HEARD_LIMIT_NS
# After this many hosts in a row that never came up, those who wait are told instead of waiting for their bells.
MOST_FAILED_STARTS = 8


class Books(Protocol):
    """Who keeps the books of what was abandoned: the runtime."""

    def abandoned(self, call: HostCall) -> None: ...
    def came_late(self, call: HostCall) -> None: ...
    def was_killed(self, call: HostCall) -> None: ...


class AsyncPool:
    """The host that serves, those that are on their way out, and the calls that wait for a fresh one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, preloaded: Preloaded, books: Books) -> None:
        self.loop = loop
        self.preloaded = preloaded
        self.context = contextvars.Context()  # for all our timers, instead of a copy of the caller's for each
        self._books = books
        self._serving: AsyncWorker | None = None
        self._all: set[AsyncWorker] = set()
        self._tainted: list[AsyncWorker] = []
        self._waiting: deque[HostCall] = deque()
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

    async def run(self, host_call: HostCall) -> Outcome:
        """Run a call. Returns when the work has ended one way or the other; bounded by its clocks."""
        if self._closing:
            return _closing()
        host_call.on_waiting_end = self._turn_away
        host_call.arm(self.loop, self.context)
        queue: asyncio.TimerHandle | None = None
        if self._serving is not None and self._serving.is_ready:
            self._serving.take(host_call)
        else:
            self._waiting.append(host_call)
            self._ensure_host()
            if queue_ms := host_call.admission.clocks.queue_ms:
                queue = self.loop.call_later(queue_ms / 1000, self._end_queueing, host_call)
        try:
            return await host_call.done
        except asyncio.CancelledError as cancelled:
            cancelled.outcome = await self._call_off(host_call)  # type: ignore[attr-defined]
            raise
        finally:
            host_call.disarm()
            if queue is not None:
                queue.cancel()

    async def _call_off(self, host_call: HostCall) -> Outcome | None:
        """The caller has left: stop the work, wait, bounded, until it has ended or is given up. What became of it."""
        host = host_call.host
        if not isinstance(host, AsyncWorker):
            with contextlib.suppress(ValueError):
                self._waiting.remove(host_call)
            return Outcome(Ending.NOT_STARTED)
        elif host.host_calls.get(host_call.number) is host_call:
            host_call.done = self.loop.create_future()
            if host_call.fired is None:
                host_call.stop(ClockKind.TIMEOUT)
            else:  # it may have become overdue in the moment in which nobody waited
                host_call.call_when_overdue(self.loop, self._overdue)
            limit_s = host_call.grace_ns / 1e9 + HEARD_LIMIT_S * (STARVED_TRIES + 2) + KILL_LIMIT_S
            await shielded(asyncio.wait([host_call.done], timeout=limit_s))
            return host_call.done.result() if host_call.done.done() else Outcome(Ending.ABANDONED)
        return None

    # --- waiting for a host -------------------------------------------------------------------------------

    def _end_queueing(self, host_call: HostCall) -> None:
        if host_call.host is None and not host_call.done.done():
            self._turn_away(host_call, ClockKind.QUEUE)

    def _turn_away(self, host_call: HostCall, kind: ClockKind) -> None:
        """No host in time: it never started."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(host_call)
        why = "no host process came up in time; importing the modules it needs takes too long"
        started_ns = self.preloaded.started_ns
        if self._came_up_ns < started_ns < monotonic_ns() - IMPORT_LIMIT_NS:
            self.preloaded.close()  # its supervisor kills it, and whatever its imports hang in
        if kind is ClockKind.QUEUE:
            fired = host_call.admission.fired(kind, monotonic_ns() - host_call.started_ns)
            host_call.resolve(Outcome(Ending.NOT_STARTED, Problem("QUEUE_TIMEOUT", why, fired=fired)))
        else:
            host_call.settle(Ending.NOT_STARTED, why=why)

    def _ensure_host(self) -> None:
        """One that serves, or is on its way, or will be tried again in a moment."""
        if self._serving is not None or self._respawn is not None or self._closing:
            return
        try:
            self._serving = AsyncWorker(self)
            self._all.add(self._serving)
        except (ipc.Broken, OSError) as error:
            self._start_failed(str(error))

    def _start_failed(self, why: str) -> None:
        """The machine is full, the imports kill it, or somebody killed its zygote. Not again at once."""
        self._failed_starts += 1
        if self._failed_starts >= MOST_FAILED_STARTS:
            self._failed_starts = 0
            for host_call in self._waiting:
                problem = Problem("SPAWN_FAILED", f"no host process came up in {MOST_FAILED_STARTS} tries: {why}")
                host_call.resolve(Outcome(Ending.NOT_STARTED, problem))
            self._waiting.clear()
        if self._respawn is None and not self._closing:
            self._respawn = self.loop.call_later(RESPAWN_PAUSE_S, self._respawn_now, context=self.context)

    def _respawn_now(self) -> None:
        self._respawn = None
        if self._waiting:
            self._ensure_host()

    def came_up(self, host: AsyncWorker) -> None:
        self._came_up_ns = monotonic_ns()
        self._serve_waiting(host)

    def _serve_waiting(self, host: AsyncWorker) -> None:
        if host is self._serving and not host.is_dying:
            while self._waiting:
                host.take(self._waiting.popleft())

    # --- what becomes of calls ----------------------------------------------------------------------------

    def heard(self, host: AsyncWorker, host_call: HostCall) -> None:
        if host_call.was_probed:
            self._give_up(host, host_call)
        else:
            host_call.call_when_overdue(self.loop, self._overdue)

    def ended(self, host: AsyncWorker, host_call: HostCall, kind: str, payload: object, finished_ns: int) -> None:
        self._failed_starts = 0
        if host_call.is_abandoned:
            self._books.came_late(host_call)
        elif kind == "unbegun" and host_call.fired is None:  # refused, because its host is on its way out
            if self._closing:
                host_call.resolve(_closing())
            else:
                self._move([host_call])
        else:
            host_call.disarm()
            warnings = (_replaced(_blocked(host, host_call)),) if host.blocked_by else ()
            then = partial(host_call.arrived, kind, payload, finished_ns, warnings=warnings)
            if not host_call.started:
                then()
            elif host_call.fired is None:  # it may keep them for the calls after it, as it keeps what is in memory
                host_call.started.look_beside(self.loop, then)
            else:
                host_call.started.stop_beside(self.loop, then, grace_ns=host_call.left_of_grace_ns)
        self._kill_if_useless(host)

    def _overdue(self, host_call: HostCall) -> None:
        """It took note of its cancellation and is still there after its grace."""
        host = host_call.host
        assert isinstance(host, AsyncWorker)
        if host_call.done.done() or host.is_dying:
            return
        host_call.is_overdue = True
        self._taint(host)
        if self._kill_if_useless(host):
            return
        others = [other for other in host.host_calls.values() if not other.is_overdue]
        soon_ns = monotonic_ns() + TOGETHER_NS
        if all(other.fired is not None and other.overdue_ns <= soon_ns for other in others):
            return  # the last of them decides for all
        if (
            host.running() is host_call
        ):  # it may have blocked the loop since it was cancelled: see whether that still hears
            host_call.was_probed = True
            host.cancel(host_call)
        else:
            self._give_up(host, host_call)

    def _give_up(self, host: AsyncWorker, host_call: HostCall) -> None:
        """It goes on among calls that need its host. Abandoned, until they have ended."""
        if host_call.done.done() or host.is_dying:
            return
        why = _blocked(host, host_call) if host.blocked_by else f"{host_call.name} did not stop when it was cancelled"
        host_call.is_abandoned = True
        self._books.abandoned(host_call)

        def settle(survivors: Survivors = ()) -> None:
            host_call.settle(Ending.ABANDONED, warnings=(_replaced(why),), survivors=survivors)

        if host_call.started:  # it goes on, and what it has started does not
            host_call.started.is_over = True
            host_call.started.stop_beside(self.loop, settle)
        else:
            settle()

    # --- what becomes of hosts ----------------------------------------------------------------------------

    def _taint(self, host: AsyncWorker) -> None:
        if host in self._tainted:
            return
        self._tainted.append(host)
        self._relieve(host)
        if len(self._tainted) > MOST_TAINTED:
            oldest = self._tainted[0]
            names = sorted({host_call.name for host_call in oldest.host_calls.values() if host_call.is_overdue})
            oldest.kill(Fate.CROWDED_OUT, ", ".join(names))

    def _kill_if_useless(self, host: AsyncWorker) -> bool:
        """A tainted host in which nobody is left but those who would not stop."""
        if host not in self._tainted or not all(host_call.is_overdue for host_call in host.host_calls.values()):
            return False
        host.kill(Fate.TAINTED)
        return True

    def found_deaf(self, host: AsyncWorker, unheard: list[HostCall]) -> None:
        """Its loop does not hear that these are to be cancelled. Whoever blocks it has the time of its own clock, not
        of theirs; where that is not known, it may be any call whose bell has not rung."""
        running = host.running()
        suspects = [running] if running is not None else [g for g in host.host_calls.values() if host.has_begun(g)]
        if all(host_call.fired is not None for host_call in suspects):
            host.kill(Fate.DEAF, running.name if running is not None else "")
            self._relieve(host)
            return
        overdue = [host_call for host_call in unheard if monotonic_ns() >= host_call.overdue_ns]
        if overdue:
            self.found_blocked(host)
        for host_call in overdue:
            if host.host_calls.get(host_call.number) is host_call:
                host_call.is_overdue = True
                self._give_up(host, host_call)

    def found_blocked(self, host: AsyncWorker) -> None:
        """It goes on until the bell of whoever blocks it. Nothing else begins there; what had not goes elsewhere."""
        if host.blocked_by or host.is_dying:
            return
        running = host.running()
        unbegun = host.close_to_new(running.name if running is not None else "a task or a callback")
        self._taint(host)
        rung = [host_call for host_call in unbegun if host_call.fired is not None]
        for host_call in rung:
            warnings = (_replaced(_blocked(host, host_call)),)
            host_call.settle(Ending.NOT_STARTED, why="its host process had no time for it", warnings=warnings)
        self._move([host_call for host_call in unbegun if host_call.fired is None])

    def _relieve(self, host: AsyncWorker) -> None:
        """A fresh one at once, before anybody asks for it."""
        if host is self._serving:
            self._serving = None
            self._ensure_host()

    def lost(self, host: AsyncWorker, report: CommandReport) -> None:
        """A host is gone. Everybody who was in it is answered, or moved."""
        self._all.discard(host)
        if host in self._tainted:
            self._tainted.remove(host)
        was_serving = host is self._serving
        if was_serving:
            self._serving = None
        host_calls = sorted(host.host_calls.values(), key=lambda host_call: host_call.number)
        host.host_calls.clear()
        told = sum(
            not host_call.is_abandoned and host_call.fired is None and host.has_begun(host_call)
            for host_call in host_calls
        )
        unbegun = []
        for host_call in host_calls:
            if host_call.is_abandoned:
                self._books.was_killed(host_call)
            elif host.has_begun(host_call):
                self._answer_for(host, host_call, report, told)
            elif self._closing:
                host_call.resolve(_closing())
            elif host_call.fired is not None:
                warnings = (_replaced(_why(host, host_call), told),)
                host_call.settle(Ending.NOT_STARTED, why="its host process had no time for it", warnings=warnings)
            else:
                unbegun.append(host_call)
        if was_serving and host.was_any_good:
            self._ensure_host()
        elif was_serving:
            self._start_failed("it died before it served any call")
        self._move(unbegun)

    def _move(self, unbegun: list[HostCall]) -> None:
        """To the fresh host, before all others, as if nothing had happened."""
        for host_call in unbegun:
            host_call.host, host_call.number = None, 0
        self._waiting.extendleft(reversed(unbegun))
        if self._waiting:
            self._ensure_host()
            if self._serving is not None and self._serving.is_ready:
                self._serve_waiting(self._serving)

    def _answer_for(self, host: AsyncWorker, host_call: HostCall, report: CommandReport, told: int) -> None:
        """For a call that had begun in a host that is gone."""
        survivors = report.survivors
        if host_call.fired is not None:
            warnings = (_replaced(_why(host, host_call), told),)
            host_call.settle(Ending.KILLED, warnings=warnings, survivors=survivors)
        elif host.fate is Fate.CLOSING:
            problem = Problem("CANCELLED", "stopped: the runtime is closing")
            host_call.resolve(Outcome(Ending.KILLED, problem, survivors=survivors))
        elif host.fate is Fate.DIED or report.lost:
            report.stopped = None  # we only asked its supervisor to be quick
            outcome = crash_outcome(host_call.admission, report)
            outcome.warnings += (_replaced("it died"),)
            host_call.resolve(outcome)
        else:
            message = (
                f"{host_call.name} was interrupted, its host process was replaced: {_why(host, host_call)}; {_LOST}"
            )
            context: dict[str, object] = {"operation": host.culprit} if host.culprit else {}
            problem = Problem("HOST_REPLACED", message, context=context or None)
            host_call.resolve(Outcome(Ending.KILLED, problem, survivors=survivors))

    async def close(self) -> None:
        """Kill every host and wait, bounded, until each tree is reported gone."""
        self._closing = True
        if self._respawn is not None:
            self._respawn.cancel()
        for host_call in self._waiting:
            host_call.resolve(_closing())
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


def _blocked(host: AsyncWorker, host_call: HostCall) -> str:
    return f"{'it' if host.blocked_by == host_call.name else host.blocked_by} blocked its event loop"


def _why(host: AsyncWorker, host_call: HostCall) -> str:
    if host.fate is Fate.DEAF:
        who = "it" if host.culprit == host_call.name else host.culprit
        return f"{who} blocked its event loop" if who else "its event loop was blocked"
    if host.fate is Fate.DIED:
        return "it died"
    return f"{host.culprit or host_call.name} did not stop when it was cancelled"


def _replaced(why: str, told: int = 0) -> Warning_:
    context = {"interrupted": told} if told else {}
    return warning("HOST_REPLACED", f"the host process was replaced ({why}); {_LOST}", **context)


def _closing() -> Outcome:
    return Outcome(Ending.NOT_STARTED, Problem("SHUTTING_DOWN", "the runtime is closing"))
