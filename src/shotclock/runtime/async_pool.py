"""Async workers seen from the runtime: async handlers run there when the process that holds the clocks may run none.

One worker serves all calls, so they share what the app keeps in its memory. It is replaced when it

- is blocked: its loop does not pick up what it is given, or take note of a cancellation. New calls go to a fresh
  worker. It is killed, with everything below it, at the bell of the call that blocks it;
- is tainted: a handler swallowed its cancellation. New calls go to a fresh worker at once, the tainted one is killed as
  soon as nobody else's call is in it, so that nothing is abandoned for long;
- died by itself.

What had not begun moves to the fresh worker and never notices; what had begun is told.

docs/design.md: R29.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from functools import partial
from typing import Protocol

from ..core.clocks import ClockKind
from ..core.envelope import Problem, Warning_, warning
from ..core.errors import Ending
from ..process import ipc
from ..process.call_processes import Survivors
from ..process.clock import monotonic_ns
from ..process.command_task import CommandReport
from ..process.messages import Done
from .async_worker import HEARD_LIMIT_NS, HEARD_LIMIT_S, KILL_LIMIT_S, STARVED_TRIES, AsyncWorker, Fate, HostCall
from .call import Outcome
from .command_runner import run_shielded
from .outcomes import crash_outcome
from .preloaded_zygote import Preloaded
from .worker_pool import IMPORT_LIMIT_NS, RESPAWN_PAUSE_S, WARM_UP_PAUSE_S, closing_outcome

# Each tainted worker is a process with handlers that would not stop, or that block it and may do so until their bells.
# Beyond this the oldest goes, whoever is in it.
MOST_TAINTED = 16
# Calls whose grace ends this soon after another's are waited for, so that all are killed and none is abandoned.
TOGETHER_NS = HEARD_LIMIT_NS
# After this many workers in a row that never came up, those who wait are told instead of waiting for their bells.
MOST_FAILED_STARTS = 8


class AbandonedHostCalls(Protocol):
    """Count of what was abandoned in async workers: the runtime."""

    def note_abandoned(self, call: HostCall) -> None: ...
    def note_late_end(self, call: HostCall) -> None: ...
    def note_killed(self, call: HostCall) -> None: ...


class AsyncPool:
    """The async worker that serves, those that are on their way out, and the calls that wait for a fresh one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, preloaded: Preloaded, orphans: AbandonedHostCalls) -> None:
        self.loop = loop
        self.preloaded = preloaded
        self.context = contextvars.Context()  # for all our timers, instead of a copy of the caller's for each
        self._orphans = orphans
        self._serving: AsyncWorker | None = None
        self._all: set[AsyncWorker] = set()
        self._tainted: list[AsyncWorker] = []
        self._waiting: deque[HostCall] = deque()
        self._respawn: asyncio.TimerHandle | None = None
        self._failed_starts = 0
        self._came_up_ns = 0
        self._closing = False

    async def warm_up(self, within_s: float) -> bool:
        """Start the worker and wait for it. Return False if it is not up in time."""
        give_up_ns = monotonic_ns() + int(within_s * 1e9)
        while not (self._serving is not None and self._serving.is_up):
            self._ensure_worker()
            if monotonic_ns() >= give_up_ns:
                return False
            await asyncio.sleep(WARM_UP_PAUSE_S)
        return True

    async def run(self, host_call: HostCall) -> Outcome:
        """Run a call. Returns when the work has ended one way or the other; bounded by its clocks."""
        if self._closing:
            return closing_outcome()
        host_call.on_waiting_end = self._turn_away
        host_call.arm(self.loop, self.context)
        queue: asyncio.TimerHandle | None = None
        if self._serving is not None and self._serving.is_up:
            self._serving.take(host_call)
        else:
            self._waiting.append(host_call)
            self._ensure_worker()
            if queue_ms := host_call.call.clocks.queue_ms:
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
        """Stop the work, because the caller has left; wait, bounded, until it has ended or is given up. Return what
        became of it."""
        worker = host_call.host
        if worker is None:
            with contextlib.suppress(ValueError):
                self._waiting.remove(host_call)
            return Outcome(Ending.NOT_STARTED)
        elif worker.host_calls.get(host_call.number) is host_call:
            host_call.done = self.loop.create_future()
            if host_call.fired is None:
                host_call.stop(ClockKind.TIMEOUT)
            else:  # it may have become overdue in the moment in which nobody waited
                host_call.call_when_overdue(self.loop, self._end_overdue)
            limit_s = host_call.grace_ns / 1e9 + HEARD_LIMIT_S * (STARVED_TRIES + 2) + KILL_LIMIT_S
            await run_shielded(asyncio.wait([host_call.done], timeout=limit_s))
            return host_call.done.result() if host_call.done.done() else Outcome(Ending.ABANDONED)
        return None

    # --- waiting for a worker -------------------------------------------------------------------------------

    def _end_queueing(self, host_call: HostCall) -> None:
        if host_call.host is None and not host_call.done.done():
            self._turn_away(host_call, ClockKind.QUEUE)

    def _turn_away(self, host_call: HostCall, kind: ClockKind) -> None:
        """Answer a call that had no worker in time: it never started."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(host_call)
        why = "no host process came up in time; importing the modules it needs takes too long"
        started_ns = self.preloaded.started_ns
        if self._came_up_ns < started_ns < monotonic_ns() - IMPORT_LIMIT_NS:
            self.preloaded.close()  # its supervisor kills it, and whatever its imports hang in
        if kind is ClockKind.QUEUE:
            fired = host_call.call.fired(kind, monotonic_ns() - host_call.started_ns)
            host_call.resolve(Outcome(Ending.NOT_STARTED, Problem("QUEUE_TIMEOUT", why, fired=fired)))
        else:
            host_call.settle(Ending.NOT_STARTED, why=why)

    def _ensure_worker(self) -> None:
        """See to it that one serves, or is on its way, or will be tried again in a moment."""
        if self._serving is not None or self._respawn is not None or self._closing:
            return
        try:
            self._serving = AsyncWorker(self)
            self._all.add(self._serving)
        except (ipc.Broken, OSError) as error:
            self._start_failed(str(error))

    def _start_failed(self, why: str) -> None:
        """Put the next start off: the machine is full, the imports kill it, or somebody killed its zygote. Not again at
        once."""
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
            self._ensure_worker()

    def on_ready(self, worker: AsyncWorker) -> None:
        self._came_up_ns = monotonic_ns()
        self._serve_waiting(worker)

    def _serve_waiting(self, worker: AsyncWorker) -> None:
        if worker is self._serving and not worker.is_dying:
            while self._waiting:
                worker.take(self._waiting.popleft())

    # --- what becomes of calls ----------------------------------------------------------------------------

    def on_heard(self, worker: AsyncWorker, host_call: HostCall) -> None:
        if host_call.was_probed:
            self._give_up(worker, host_call)
        else:
            host_call.call_when_overdue(self.loop, self._end_overdue)

    def on_ended(self, worker: AsyncWorker, host_call: HostCall, done: Done) -> None:
        self._failed_starts = 0
        if host_call.is_abandoned:
            self._orphans.note_late_end(host_call)
        elif done.kind == "unbegun" and host_call.fired is None:  # refused, because its worker is on its way out
            if self._closing:
                host_call.resolve(closing_outcome())
            else:
                self._move([host_call])
        else:
            host_call.disarm()
            warnings = (_replaced_warning(_describe_block(worker, host_call)),) if worker.blocked_by else ()
            then = partial(host_call.take_result, done, warnings=warnings)
            if not host_call.started:
                then()
            elif host_call.fired is None:  # it may keep them for the calls after it, as it keeps what is in memory
                host_call.started.look_beside(self.loop, then)
            else:
                host_call.started.stop_beside(self.loop, then, grace_ns=host_call.left_of_grace_ns)
        self._kill_if_useless(worker)

    def _end_overdue(self, host_call: HostCall) -> None:
        """End a call that took note of its cancellation and is still there after its grace."""
        worker = host_call.host
        assert worker is not None
        if host_call.done.done() or worker.is_dying:
            return
        host_call.is_overdue = True
        self._taint(worker)
        if self._kill_if_useless(worker):
            return
        others = [other for other in worker.host_calls.values() if not other.is_overdue]
        soon_ns = monotonic_ns() + TOGETHER_NS
        if all(other.fired is not None and other.overdue_ns <= soon_ns for other in others):
            return  # the last of them decides for all
        if (
            worker.running() is host_call
        ):  # it may have blocked the loop since it was cancelled: see whether that still hears
            host_call.was_probed = True
            worker.cancel(host_call)
        else:
            self._give_up(worker, host_call)

    def _give_up(self, worker: AsyncWorker, host_call: HostCall) -> None:
        """Abandon a call that goes on among calls that need its worker, until they have ended."""
        if host_call.done.done() or worker.is_dying:
            return
        why = (
            _describe_block(worker, host_call)
            if worker.blocked_by
            else f"{host_call.name} did not stop when it was cancelled"
        )
        host_call.is_abandoned = True
        self._orphans.note_abandoned(host_call)

        def settle(survivors: Survivors = ()) -> None:
            host_call.settle(Ending.ABANDONED, warnings=(_replaced_warning(why),), survivors=survivors)

        if host_call.started:  # it goes on, and what it has started does not
            host_call.started.is_over = True
            host_call.started.stop_beside(self.loop, settle)
        else:
            settle()

    # --- what becomes of workers ----------------------------------------------------------------------------

    def _taint(self, worker: AsyncWorker) -> None:
        if worker in self._tainted:
            return
        self._tainted.append(worker)
        self._relieve(worker)
        if len(self._tainted) > MOST_TAINTED:
            oldest = self._tainted[0]
            names = sorted({host_call.name for host_call in oldest.host_calls.values() if host_call.is_overdue})
            oldest.kill(Fate.CROWDED_OUT, ", ".join(names))

    def _kill_if_useless(self, worker: AsyncWorker) -> bool:
        """Kill a tainted worker in which nobody is left but those who would not stop."""
        if worker not in self._tainted or not all(host_call.is_overdue for host_call in worker.host_calls.values()):
            return False
        worker.kill(Fate.TAINTED)
        return True

    def on_deaf(self, worker: AsyncWorker, unheard: list[HostCall]) -> None:
        """Decide about a worker whose loop does not hear that these are to be cancelled. Whoever blocks it has the time
        of its own clock, not of theirs; where that is not known, it may be any call whose bell has not rung."""
        running = worker.running()
        suspects = [running] if running is not None else [g for g in worker.host_calls.values() if worker.has_begun(g)]
        if all(host_call.fired is not None for host_call in suspects):
            worker.kill(Fate.DEAF, running.name if running is not None else "")
            self._relieve(worker)
            return
        overdue = [host_call for host_call in unheard if monotonic_ns() >= host_call.overdue_ns]
        if overdue:
            self.on_blocked(worker)
        for host_call in overdue:
            if worker.host_calls.get(host_call.number) is host_call:
                host_call.is_overdue = True
                self._give_up(worker, host_call)

    def on_blocked(self, worker: AsyncWorker) -> None:
        """Let it go on until the bell of whoever blocks it. Nothing else begins there; what had not goes elsewhere."""
        if worker.blocked_by or worker.is_dying:
            return
        running = worker.running()
        unbegun = worker.close_to_new(running.name if running is not None else "a task or a callback")
        self._taint(worker)
        rung = [host_call for host_call in unbegun if host_call.fired is not None]
        for host_call in rung:
            warnings = (_replaced_warning(_describe_block(worker, host_call)),)
            host_call.settle(Ending.NOT_STARTED, why="its host process had no time for it", warnings=warnings)
        self._move([host_call for host_call in unbegun if host_call.fired is None])

    def _relieve(self, worker: AsyncWorker) -> None:
        """Start a fresh one at once, before anybody asks for it."""
        if worker is self._serving:
            self._serving = None
            self._ensure_worker()

    def on_lost(self, worker: AsyncWorker, report: CommandReport) -> None:
        """Answer or move everybody who was in a worker that is gone."""
        self._all.discard(worker)
        if worker in self._tainted:
            self._tainted.remove(worker)
        was_serving = worker is self._serving
        if was_serving:
            self._serving = None
        host_calls = sorted(worker.host_calls.values(), key=lambda host_call: host_call.number)
        worker.host_calls.clear()
        interrupted = sum(
            not host_call.is_abandoned and host_call.fired is None and worker.has_begun(host_call)
            for host_call in host_calls
        )
        unbegun = []
        for host_call in host_calls:
            if host_call.is_abandoned:
                self._orphans.note_killed(host_call)
            elif worker.has_begun(host_call):
                self._answer_for(worker, host_call, report, interrupted)
            elif self._closing:
                host_call.resolve(closing_outcome())
            elif host_call.fired is not None:
                warnings = (_replaced_warning(_describe_end(worker, host_call), interrupted),)
                host_call.settle(Ending.NOT_STARTED, why="its host process had no time for it", warnings=warnings)
            else:
                unbegun.append(host_call)
        if was_serving and worker.was_any_good:
            self._ensure_worker()
        elif was_serving:
            self._start_failed("it died before it served any call")
        self._move(unbegun)

    def _move(self, unbegun: list[HostCall]) -> None:
        """Move calls to the fresh worker, before all others, as if nothing had happened."""
        for host_call in unbegun:
            host_call.host, host_call.number = None, 0
        self._waiting.extendleft(reversed(unbegun))
        if self._waiting:
            self._ensure_worker()
            if self._serving is not None and self._serving.is_up:
                self._serve_waiting(self._serving)

    def _answer_for(self, worker: AsyncWorker, host_call: HostCall, report: CommandReport, interrupted: int) -> None:
        """Answer a call that had begun in a worker that is gone."""
        survivors = report.survivors
        if host_call.fired is not None:
            warnings = (_replaced_warning(_describe_end(worker, host_call), interrupted),)
            host_call.settle(Ending.KILLED, warnings=warnings, survivors=survivors)
        elif worker.fate is Fate.CLOSING or (report.lost and self._closing):
            problem = Problem("CANCELLED", "stopped: the runtime is closing")
            host_call.resolve(Outcome(Ending.KILLED, problem, survivors=survivors))
        elif worker.fate is Fate.DIED or report.lost:
            report.stopped = None  # we only asked its supervisor to be quick
            outcome = crash_outcome(host_call.call, report)
            outcome.warnings += (_replaced_warning("it died"),)
            host_call.resolve(outcome)
        else:
            why = _describe_end(worker, host_call)
            message = f"{host_call.name} was interrupted, its host process was replaced: {why}; {_LOST}"
            context: dict[str, object] = {"operation": worker.culprit} if worker.culprit else {}
            problem = Problem("HOST_REPLACED", message, context=context or None)
            host_call.resolve(Outcome(Ending.KILLED, problem, survivors=survivors))

    def kill_all(self) -> list[AsyncWorker]:
        """Take no more calls, answer those that wait, and kill every worker. Return those that are to be gone then."""
        self._closing = True
        if self._respawn is not None:
            self._respawn.cancel()
        for host_call in self._waiting:
            host_call.resolve(closing_outcome())
        self._waiting.clear()
        workers = list(self._all)
        for worker in workers:
            worker.kill(Fate.CLOSING)
        return workers


_LOST = "what handlers kept in its memory is lost"


def _describe_block(worker: AsyncWorker, host_call: HostCall) -> str:
    return f"{'it' if worker.blocked_by == host_call.name else worker.blocked_by} blocked its event loop"


def _describe_end(worker: AsyncWorker, host_call: HostCall) -> str:
    if worker.fate is Fate.DEAF:
        who = "it" if worker.culprit == host_call.name else worker.culprit
        return f"{who} blocked its event loop" if who else "its event loop was blocked"
    if worker.fate is Fate.DIED:
        return "it died"
    return f"{worker.culprit or host_call.name} did not stop when it was cancelled"


def _replaced_warning(why: str, interrupted: int = 0) -> Warning_:
    context = {"interrupted": interrupted} if interrupted else {}
    return warning("HOST_REPLACED", f"the host process was replaced ({why}); {_LOST}", **context)
