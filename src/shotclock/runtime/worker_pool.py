"""The pool: how a call gets a warm worker, and what becomes of calls that wait. Runs on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
from collections import deque
from functools import partial
from math import inf

from ..core.clocks import ClockKind
from ..core.envelope import Problem
from ..core.errors import Ending
from ..process import ipc
from ..process.clock import monotonic_ns
from ..process.kill import VERIFY_LIMIT_MS
from .call import Outcome, wound_down_problem
from .command_runner import REPORT_MARGIN_MS, run_shielded
from .idle_clock import NOT_YET, IdleClock
from .outcomes import CLOSING, stalled_problem, timeout_problem
from .preloaded_zygote import Preloaded
from .worker_process import Task, Vacant, Worker

DEFAULT_WARM = max(2, min(8, os.cpu_count() or 2))
# An awaiting async function holds a process as well, of about 6 MB with its supervisor.
DEFAULT_MOST = 256
# A burst of short calls waits for the warm workers, because forking competes with the very work that is being
# waited for. A worker that is busy with one call for longer than this is replaced in the count.
GROW_AFTER_S = 0.05
GROW_LATE_NS = 10_000_000
# How long the imports of the preloaded zygote may take. A call does not wait longer than its own clocks; this is
# when the zygote is taken for hung and started anew by the next call.
IMPORT_LIMIT_NS = 60_000_000_000
# After a worker that died before it came up.
RESPAWN_PAUSE_S = 0.25
# Workers beyond the warm ones are kept this long in case the load comes back.
IDLE_KEPT_S = 10.0
# Between two looks at whether the workers are up.
WARM_UP_PAUSE_S = 0.005
# How often the calls of the pool are looked at. Only for those that wait for a worker is this their precision.
SWEEP_S = 0.01
# Calls that wait in a worker's socket are taken back if the one before them runs for longer than this.
HELD_UP_NS = 5_000_000
# The supervisor hears the bell by itself; this is for a worker that was stuck before it could arm it.
LATE_BELL_NS = 30_000_000


class Pool:
    """Pool that keeps `warm` workers ready, grows to `most` while calls hang, and refills as soon as one is killed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        preloaded: Preloaded,
        *,
        warm: int = DEFAULT_WARM,
        most: int = DEFAULT_MOST,
    ) -> None:
        self.loop = loop
        self.warm, self.most = warm, max(warm, most)
        self.preloaded = preloaded
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._leaving: set[Worker] = set()
        """Those that are being killed; their successors need not wait for the proof that they are gone."""
        self._vacant: list[Vacant] = []
        """Supervisors without a worker. Each forks its next one faster than the zygote would fork both."""
        self._waiting: deque[Task] = deque()
        self._has_inner = False
        """Calls made by calls may be among those that wait."""
        self._patience_ns: float = inf
        """Nobody who waits gives up before this."""
        self._growth: asyncio.TimerHandle | None = None
        self._growth_due_ns = 0
        self._trim: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._context = contextvars.Context()  # for all our timers, instead of a copy of the caller's for each
        self._not_before_ns = 0
        """When the next worker may be asked for, after one that could not be had."""
        self._closing = False

    @property
    def size(self) -> int:
        return len(self._all)

    async def warm_up(self, within_s: float) -> bool:
        """Start the warm workers and wait for them. Return False if they are not all up in time."""
        self.refill()
        give_up_ns = monotonic_ns() + int(within_s * 1e9)
        while sum(worker.is_up for worker in self._all) < self.warm:
            if monotonic_ns() >= give_up_ns:
                return False
            await asyncio.sleep(WARM_UP_PAUSE_S)
        return True

    async def run(self, task: Task) -> Outcome:
        """Run a call in a worker. Returns when the work has ended one way or the other; bounded by its clocks."""
        if self._closing:
            return closing_outcome()
        task.prepare(self)
        call = task.call
        if call.clocks.idle_ms:
            task.idle = IdleClock(self.loop, call.clocks.idle_ms, partial(self._stall, task))
        call.work = task
        self._watch()
        try:
            self._submit(task)
            outcome = await task.done
        except asyncio.CancelledError as cancelled:
            cancelled.outcome = await self._stop(task)  # type: ignore[attr-defined]
            raise
        except (ipc.Broken, OSError) as error:
            return Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", f"no worker could be started: {error}"))
        finally:
            if task.idle is not None:
                task.idle.cancel()
        if task.stalled and outcome.ending is Ending.KILLED:
            outcome.problem = stalled_problem(call)
        return outcome

    # --- clocks: the supervisors' are the ones that count, this looks after what they cannot see ------------

    def _watch(self) -> None:
        """Set one timer for all calls: as long as there are any, look at them every few milliseconds."""
        if self._sweep is None:
            self._sweep = self.loop.call_later(SWEEP_S, self._look, context=self._context)

    def _look(self) -> None:
        self._sweep = None
        now_ns = monotonic_ns()
        for worker in list(self._all):
            if len(worker.assigned) > 1 and now_ns - worker.began_ns > HELD_UP_NS:
                self._put_first(worker.take_back())
        if now_ns >= self._patience_ns:
            for task in [task for task in self._waiting if now_ns >= task.give_up_ns]:
                self._turn_away(task)
            self._patience_ns = min([task.give_up_ns for task in self._waiting], default=inf)
        if self._waiting and now_ns >= self._not_before_ns:
            self._refill_quietly()  # what could not be had before, and what others were given instead
        busy = [worker for worker in (*self._all, *self._leaving) if worker.task is not None]
        for worker in busy:
            self._look_at(worker, now_ns)
        if self._waiting or busy:
            self._watch()

    def _look_at(self, worker: Worker, now_ns: int) -> None:
        """Stop a call whose supervisor has not heard the bell by now: its worker was stuck before it could arm it."""
        task = worker.task
        if task is None or worker.stopping:
            return
        bell = task.call.bound.bell
        if bell is not None and now_ns >= bell.at_ns + LATE_BELL_NS:
            unbegun = worker.stop(task, ClockKind.TIMEOUT.value)
            if task in unbegun:
                worker.kill("it never began what it was given")
            self._put_first(unbegun)

    def _turn_away(self, task: Task) -> None:
        """Answer a call that had no worker in time: it never started."""
        call = task.call
        self._leave_queue(task)
        elapsed_ns = monotonic_ns() - call.started_ns
        message = "no worker came free in time"
        if not any(worker.is_up for worker in self._all):
            message = "no worker came up in time; importing the modules it needs takes too long"
            if any(monotonic_ns() - worker.asked_ns > IMPORT_LIMIT_NS for worker in self._all):
                self.preloaded.close()  # its supervisor kills it, and whatever its imports hang in
        if task.waits_for_queue:
            problem = Problem("QUEUE_TIMEOUT", message, fired=call.fired(ClockKind.QUEUE, elapsed_ns))
        else:
            late = timeout_problem(call, elapsed_ns)
            problem = Problem("TIMEOUT", f"{late.message}: {message}", fired=late.fired)
        task.resolve(Outcome(Ending.NOT_STARTED, problem))

    def _stall(self, task: Task) -> object:
        worker = task.worker
        if worker is None or worker.task is not task:
            assert task.idle is not None
            task.idle.sign_of_life()  # the clock of silence starts with the work
            return NOT_YET
        unbegun = worker.stop(task, ClockKind.IDLE.value)
        task.stalled = worker.task is task
        self._put_first(unbegun)
        return NOT_YET if task in unbegun else None

    def stop_unwound(self, task: Task) -> None:
        """Stop a call that was asked to wind down and has not ended. One that has not begun never will."""
        worker = task.worker
        unbegun = [] if worker is None else worker.stop(task, ClockKind.SOFT.value)
        if worker is None or task in unbegun:
            self._leave_queue(task)
            task.resolve(Outcome(Ending.NOT_STARTED, wound_down_problem(task.call)))
        self._put_first([other for other in unbegun if other is not task])

    async def _stop(self, task: Task) -> Outcome:
        """Stop the work, because the caller was cancelled, and wait, bounded, until it is gone. Return what became of
        it."""
        worker = task.worker
        if worker is None:
            self._leave_queue(task)
            return Outcome(Ending.NOT_STARTED)
        self._put_first([other for other in worker.stop(task, "cancelled") if other is not task])
        if task.worker is worker:  # it had begun, and no answer is there
            limit_s = (task.call.bound.grace_ms + VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000
            await run_shielded(worker.wait_gone(limit_s))
            report = worker.gone.result() if worker.gone.done() else None
            return Outcome(Ending.KILLED, survivors=() if report is None else report.survivors)
        return Outcome(Ending.FINISHED if task not in self._waiting else Ending.NOT_STARTED)

    # --- places -------------------------------------------------------------------------------------------

    def _submit(self, task: Task) -> None:
        if task.depth:
            self._has_inner = True
            self._waiting.appendleft(task)
        else:
            self._waiting.append(task)
        self._patience_ns = min(self._patience_ns, task.give_up_ns)
        self._serve_waiting()
        if task.worker is not None:
            return
        try:
            self.refill()
            if task.depth:
                self._make_way()
        except (ipc.Broken, OSError):
            if not self._all:  # nobody is there, or will be
                self._leave_queue(task)
                raise
        self._plan_growth()

    def _put_first(self, tasks: list[Task]) -> None:
        """Put calls that were held up before all others, and give them to whoever is free now."""
        now_ns = monotonic_ns()
        for task in reversed(tasks):
            if now_ns < task.give_up_ns:
                self._waiting.appendleft(task)
                self._patience_ns = min(self._patience_ns, task.give_up_ns)
            else:  # the next worker would be stopped before it has read it, and the one after that
                self._turn_away(task)
        self._serve_waiting()
        if self._waiting:
            self._plan_growth()

    def _serve_waiting(self) -> None:
        for _ in range(len(self._idle)):  # each once: whoever takes nothing would be asked for ever
            if self._waiting:
                self.give_back(self._idle.pop())

    def _leave_queue(self, task: Task) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(task)

    def give_back(self, worker: Worker) -> None:
        if self._closing or worker.stopping:
            return
        if self._waiting and (room := worker.room):
            tasks: list[Task] = []
            # No more than its share, or the others would have nothing to do.
            for _ in range(min(room, -(-len(self._waiting) // max(1, len(self._all))))):
                # The supervisor knows one grace at a time: that of the call that runs and of those right behind it.
                if worker.is_idle and not tasks:
                    worker.set_grace(self._waiting[0].call.bound.grace_ms)
                elif self._waiting[0].call.bound.grace_ms != worker.grace_ms:
                    break
                tasks.append(self._waiting.popleft())
            if tasks:
                worker.begin(*tasks)
        if not worker.is_idle:
            return
        self._idle.append(worker)
        if len(self._idle) > self.warm and self._trim is None:
            self._trim = self.loop.call_later(IDLE_KEPT_S, self._trim_idle)

    def _trim_idle(self) -> None:
        self._trim = None
        while len(self._idle) > self.warm:
            self._idle.pop(0).kill("not needed")

    def _plan_growth(self) -> None:
        if self._growth is None:
            self._growth_due_ns = monotonic_ns() + int(GROW_AFTER_S * 1e9)
            self._growth = self.loop.call_later(GROW_AFTER_S, self._grow)

    def _grow(self) -> None:
        """Start workers, because calls wait. Workers busy with one call for long are as good as missing: make up for
        them."""
        self._growth = None
        if not self._waiting or self._closing:
            return
        if monotonic_ns() - self._growth_due_ns > GROW_LATE_NS:  # our own loop was busy; the answers may lie unread
            self._plan_growth()
            return
        long_ago = monotonic_ns() - int(GROW_AFTER_S * 1e9)
        stuck = sum(worker.task is not None and worker.began_ns < long_ago for worker in self._all)
        wanted = 2 * stuck if stuck == len(self._all) else self.warm + stuck
        with contextlib.suppress(ipc.Broken, OSError):
            while len(self._all) < min(wanted, stuck + len(self._waiting), self.most):
                self._spawn()
        self._plan_growth()

    def on_leaving(self, worker: Worker) -> None:
        """Replace a worker that is being killed. Its successor is forked meanwhile, and what it has not begun goes to
        others."""
        if self._forget(worker):
            self._leaving.add(worker)
            self._put_first(worker.take_back())
            self._refill_quietly()

    def _forget(self, worker: Worker) -> bool:
        with contextlib.suppress(ValueError):
            self._idle.remove(worker)
        known = worker in self._all or worker in self._leaving
        self._all.discard(worker)
        self._leaving.discard(worker)
        return known

    def on_lost(self, worker: Worker, unstarted: list[Task]) -> None:
        self._forget(worker)
        if worker.vacant is not None:
            if self._closing or len(self._vacant) >= self.warm:
                worker.vacant.control.close()  # it leaves
            else:
                self._vacant.append(worker.vacant)
        self._put_first(unstarted)
        if self._closing:
            return
        if worker.is_up:
            self._refill_quietly()
        else:  # it could not even start: the machine is full, or the imports kill it. Not again at once.
            self._pause_spawning()
            self.loop.call_later(RESPAWN_PAUSE_S, self._refill_quietly)

    def _refill_quietly(self) -> None:
        if not self._closing:
            try:
                self.refill()
                self._make_way()
            except (ipc.Broken, OSError):
                self._pause_spawning()

    def _pause_spawning(self) -> None:
        self._not_before_ns = monotonic_ns() + int(RESPAWN_PAUSE_S * 1e9)

    def refill(self) -> None:
        """See to it that at least `warm` workers run or are on their way. Not if too many of those before them will not
        die."""
        while len(self._all) < self.warm and len(self._leaving) <= self.warm:
            self._spawn()

    def _make_way(self) -> None:
        """Start a worker for each call made by a call, which must not wait for a place its own caller holds. Not for
        all of them at once: more forks than cores only hold each other up."""
        while self._has_inner and self._count_coming() < self.warm:
            inner = sum(task.depth > 0 for task in self._waiting)
            self._has_inner = inner > 0
            if self._count_coming() >= inner:
                return
            self._spawn()

    def _count_coming(self) -> int:
        return sum(not worker.is_up for worker in self._all)

    def _spawn(self) -> None:
        while self._vacant:
            with contextlib.suppress(ipc.Broken):  # it was killed while it waited
                worker = Worker(self, self._vacant.pop())
                self._all.add(worker)
                if self._waiting:
                    self.give_back(worker)
                else:
                    self._idle.insert(0, worker)  # the last to be chosen: it is only just being forked
                return
        self._all.add(Worker(self))

    def kill_all(self) -> list[Worker]:
        """Take no more calls, answer those that wait, and kill every worker. Return those that are to be gone then."""
        self._closing = True
        for handle in (self._growth, self._trim, self._sweep):
            if handle is not None:
                handle.cancel()
        workers = [*self._all, *self._leaving]
        for worker in workers:
            self._waiting += worker.take_back()
        for task in self._waiting:
            task.resolve(closing_outcome())
        self._waiting.clear()
        for supervisor in self._vacant:
            supervisor.control.close()
        self._vacant.clear()
        for worker in workers:
            worker.kill(CLOSING)
        return workers


def closing_outcome() -> Outcome:
    return Outcome(Ending.NOT_STARTED, Problem("SHUTTING_DOWN", "the runtime is closing"))
