"""Event loops in threads of their own, where async handlers, guards and observers run.

The caller's loop holds the clock, another loop does the work: a handler that blocks its loop blocks neither the
answer nor the clock. Such a loop is retired with the handler still in it (a thread cannot be killed), what it
had not yet picked up moves to a fresh one, and the next call never notices.

Observers are told of every envelope there, each on a loop of its own: one that hangs or raises costs nobody else. A
plain function is called straight from the queue of its loop; only one that is async costs a task.

Calls made by calls run one level deeper, on a loop of that level, so a child can never block its parent.

docs/design.md: R20, R21, R45.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..core.envelope import Envelope
from ..process.clock import monotonic_ns
from .asyncio_private import be_silent_about, running_loop, start_at_once

# How long a posted piece of work may lie before its loop counts as blocked. A healthy loop takes microseconds;
# a machine short of CPU takes some milliseconds.
PICKUP_LIMIT_NS = 100_000_000
# A cancellation takes a turn of the loop for each layer of awaiting: a task in a group in a gather in a handler. Only
# after so many has everybody who obeys had the chance to; what they take in a crowd is no part of anybody's grace.
TURNS_TO_OBEY = 8
# How many callbacks or cancellations a loop takes in one turn. The rest wait for what these set off: objects made and
# freed in turn do not set off the garbage collector, and nobody's answer waits for everybody's cancellation.
AT_A_TIME = 100
# Callbacks that follow a wake-up this closely are a burst.
BURST_NS = 1_000_000
# How long work that nobody waits for may wait to be sent on together with more.
LATER_S = 0.002
# How long closing waits for a loop's thread. A blocked one is left behind; the thread is a daemon.
JOIN_LIMIT_S = 0.5
# How long closing waits for observers to be told what they have not been told yet.
FINISH_LIMIT_S = 1.0


class CrossLoopQueue:
    """Queue of callbacks to one event loop, from any thread.

    Waking a sleeping thread costs more than the rest of a call. In a burst, only the first callback wakes the loop at
    once; those right behind it wait for the end of the sender's turn, and one wake-up delivers them all. Callbacks that
    come one at a time are no burst, however closely they follow each other: whoever sends them waits for the answer.
    """

    __slots__ = ("_deferring", "_in_crowds", "_loop", "_posted", "_waking", "_woken_ns")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[Any, ...]] = deque()
        self._waking = False
        self._deferring = False
        self._in_crowds = False
        self._woken_ns = 0

    def post(self, *callback: Any) -> None:
        """Post what to call, and with what. Nothing happens if the loop is closed: nobody will ever look."""
        self._posted.append(callback)
        if self._waking:
            return
        now_ns = monotonic_ns()
        sender = running_loop()
        if sender is None or not self._in_crowds or now_ns - self._woken_ns >= BURST_NS:
            self._wake(now_ns)
        elif not self._deferring:
            self._deferring = True
            sender.call_soon(self._wake_now)

    def post_later(self, *callback: Any) -> None:
        """Post what nobody waits for: within a few milliseconds, together with whatever else comes until then."""
        self._posted.append(callback)
        if self._waking or self._deferring:
            return
        sender = running_loop()
        if sender is None:
            self._wake(monotonic_ns())
        else:
            self._deferring = True
            sender.call_later(LATER_S, self._wake_now)

    def deliver_deferred(self) -> None:
        """Call, on the loop itself, callbacks whose sender was blocked before it could wake us."""
        self._deferring = False
        self._deliver(len(self._posted))

    def wake_for_deferred(self) -> bool:
        """Wake the loop for those, from any thread. Return True while there are callbacks."""
        if self._posted:
            self._deferring = False
            self.wake()
        return bool(self._posted)

    def wake(self) -> None:
        """Wake the loop at once, whatever was put off: the loop that put it off may be ending."""
        self._wake(monotonic_ns())

    def _wake_now(self) -> None:
        self._deferring = False
        if self._posted and not self._waking:
            self._wake(monotonic_ns())

    def _wake(self, now_ns: int) -> None:
        self._waking = True
        self._woken_ns = now_ns
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self, most: int = AT_A_TIME) -> None:
        # Cleared before looking: whoever posts from here on wakes us again, so nothing is left lying.
        self._waking = False
        posted = self._posted
        self._in_crowds = len(posted) > 1
        for _ in range(min(len(posted), most)):
            try:
                callback = posted.popleft()
                callback[0](*callback[1:])
            except Exception as error:  # one bad callback must not swallow the others' callbacks
                self._loop.call_exception_handler({"message": "shotclock mailbox", "exception": error})
        if posted and not self._waking:
            self._waking = True
            self._loop.call_soon(self._deliver)


# Held for two lines of ours at a time. One for all: thousands of calls wait, and each lock would be an object more
# for the garbage collector to walk over.
_claiming = threading.Lock()


class LoopTask:
    """Work on its way to a loop: claimed and started once, cancelled on request. What it does is `run`."""

    __slots__ = ("cancel_heard", "claimed", "context", "finished_ns", "posted_ns", "task", "thread")

    def __init__(self) -> None:
        self.claimed = False
        self.context = contextvars.copy_context()
        self.task: asyncio.Task[None] | None = None
        self.thread: LoopThread | None = None
        self.posted_ns = 0
        self.finished_ns = 0
        self.cancel_heard = False

    def claim(self, thread: LoopThread | None = None, task: asyncio.Task[None] | None = None) -> bool:
        """Return True to exactly one of those who want to start it (or to call it off). Whoever finds it claimed by a
        loop finds there as well whom to cancel."""
        with _claiming:
            if self.claimed:
                return False
            self.claimed, self.thread, self.task = True, thread, task
            return True

    async def run(self, thread: LoopThread | None = None) -> None:
        """Run at its place: claim itself there, unless that was done before. May not raise; answers for itself."""
        raise TypeError(f"{type(self).__name__} does not say what to run")


class Delivery:
    """A cancellation on its way to work of one loop, and how far it has come.

    Whether a loop is blocked is told from what it does, not from how long that takes: one that throws ten thousand
    cancellations needs a while for the last of them, but is seen somewhere else at each look.
    """

    __slots__ = ("_loop", "_loop_tasks", "_passed", "_thread", "came_round_at", "crowd", "is_heard")

    def __init__(
        self, loop_tasks: Sequence[LoopTask], loop: asyncio.AbstractEventLoop, thread: LoopThread | None = None
    ) -> None:
        self._loop_tasks = deque(loop_tasks)
        self._loop = loop
        self._thread = thread
        self._passed = 0
        self.crowd = len(loop_tasks) if thread is None else thread.crowd
        """How many pieces of work the loop may have to step through first."""
        self.is_heard = False
        self.came_round_at: float | None = None
        """When all of them had had their turns to obey, in the loop's time."""

    def deliver(self, turns: int = TURNS_TO_OBEY) -> None:
        """Cancel them, on the loop itself."""
        self.is_heard = True
        self._move()
        for _ in range(min(len(self._loop_tasks), AT_A_TIME)):
            loop_task = self._loop_tasks.popleft()  # what has ended is not held until the last one is asked
            loop_task.cancel_heard = True
            if loop_task.task is not None:
                try:
                    loop_task.task.cancel()
                except Exception as error:  # of an awaitable of somebody's; the others are cancelled all the same
                    self._loop.call_exception_handler({"message": "shotclock cancellation", "exception": error})
        if self._loop_tasks:
            self._loop.call_soon(self.deliver, turns)
        else:
            self._turn(turns)

    def _turn(self, left: int) -> None:
        self._move()
        if left:
            self._loop.call_soon(self._turn, left - 1)
        else:
            self.came_round_at = self._loop.time()

    def _move(self) -> None:
        self._passed += 1
        if self._thread is not None:
            self._thread.sign_ns = monotonic_ns()  # those behind this one wait for a loop that is busy, not blocked

    def pulse(self) -> tuple[object, ...]:
        """Return where the loop is. The same at two looks means that it has not moved."""
        sign_ns = None if self._thread is None else self._thread.sign_ns
        return self._passed, sign_ns, asyncio.current_task(self._loop)


class LoopThread:
    """One loop in one daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._queue = CrossLoopQueue(self.loop)
        self._unclaimed: deque[LoopTask] = deque()
        self._lock = threading.Lock()
        self._retired = False
        self._running = 0
        self.sign_ns = monotonic_ns()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, loop_task: LoopTask) -> None:
        loop_task.posted_ns = monotonic_ns()
        self._unclaimed.append(loop_task)
        # The plain function: thousands may lie there, and a bound method for each would be an object more.
        self._queue.post(LoopThread.start, self, loop_task, loop_task.context)

    def post_later(self, then: Callable[[LoopThread], None]) -> None:
        self._queue.post_later(then, self)

    def cancel(self, loop_tasks: Sequence[LoopTask]) -> Delivery:
        delivery = Delivery(loop_tasks, self.loop, self)
        self._queue.post(delivery.deliver)
        return delivery

    def is_blocked(self, now_ns: int) -> bool:
        """Return whether something posted has been lying for longer than any healthy loop would let it."""
        with self._lock:  # several threads submit; only here is the queue shortened
            unclaimed = self._unclaimed
            while unclaimed and unclaimed[0].claimed:
                unclaimed.popleft()
            waits = bool(unclaimed) and now_ns - unclaimed[0].posted_ns > PICKUP_LIMIT_NS
        # One that has begun or ended anything of late is busy, not blocked.
        return waits and now_ns - self.sign_ns > PICKUP_LIMIT_NS

    @property
    def crowd(self) -> int:
        """Return how many pieces of work it has, begun or on their way."""
        return self._running + len(self._unclaimed)

    def retire(self) -> list[LoopTask]:
        """Take no more work; end when what runs here has ended. Gives back what was never picked up."""
        self._retired = True
        with self._lock:
            left = [loop_task for loop_task in self._unclaimed if not loop_task.claimed]
            self._unclaimed.clear()
        # Behind everything that was posted before, and behind the first step of each task made of it.
        self._queue.post(self._stop_soon)
        self._queue.wake()
        return left

    @property
    def has_unclaimed(self) -> bool:
        return bool(self._unclaimed)

    def stop(self) -> None:
        self._retired = True
        self._queue.post(self._stop_now)
        self._queue.wake()

    def join(self, within_s: float) -> bool:
        """Wait for the thread. Return False if it is stuck in somebody's code and is left behind."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self.loop):  # abandoned, and answered for long ago: no complaint on stderr
                be_silent_about(task)
            self.loop.close()

    def start(self, loop_task: LoopTask, context: contextvars.Context) -> None:
        """Start a task, on the loop itself."""
        # Claimed in its first step, not here: what waits behind somebody who blocks the loop can still be moved.
        if not loop_task.claimed:
            start_at_once(loop_task.run(self), self.loop, context)

    def begin(self, loop_task: LoopTask) -> bool:
        """Take the first step of a task. Return False if it was called off, or moved and started elsewhere."""
        self.sign_ns = monotonic_ns()
        if not loop_task.claim(self, asyncio.current_task()):
            return False
        self._running += 1
        return True

    def end(self, now_ns: int) -> None:
        """Take the last step of a task that has begun."""
        self.sign_ns = now_ns
        self._running -= 1
        if self._retired:
            self._stop_soon()

    def _stop_soon(self) -> None:
        self.loop.call_soon(self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        if not self._running:
            self.loop.stop()

    def _stop_now(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        # One turn for the cancellations to be thrown, one for what they schedule; then whatever is left stays.
        self.loop.call_soon(self.loop.call_soon, self.loop.stop)


class LoopThreads:
    """A loop thread per level of nesting, replaced as soon as it is blocked."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._levels: dict[int, LoopThread] = {}
        self._retired: list[LoopThread] = []

    @property
    def has_any(self) -> bool:
        return bool(self._levels or self._retired)

    def submit(self, loop_task: LoopTask, level: int) -> LoopThread:
        thread = self._levels.get(level)
        if thread is None or thread.is_blocked(monotonic_ns()):
            thread = self._replace(level, thread)
        thread.submit(loop_task)
        return thread

    def post_in_order(self, then: Callable[[LoopThread], None]) -> None:
        """Post to the one thread, however long it takes: for work that nobody waits for."""
        thread = self._levels.get(0) or self._replace(0, None)
        thread.post_later(then)

    def relieve(self, thread: LoopThread | None) -> None:
        """Replace a loop that did not react: whatever it has not picked up goes to a fresh one."""
        for level, current in list(self._levels.items()):
            if current is thread:
                self._replace(level, thread)

    def relieve_blocked(self) -> bool:
        """Look after every loop. Return True while anything still waits to be picked up."""
        now_ns = monotonic_ns()
        for level, thread in list(self._levels.items()):
            if thread.is_blocked(now_ns):
                self._replace(level, thread)
        return any(thread.has_unclaimed for thread in list(self._levels.values()))

    def _replace(self, level: int, old: LoopThread | None) -> LoopThread:
        with self._lock:
            current = self._levels.get(level)
            if current is not None and current is not old:
                return current
            fresh = self._levels[level] = LoopThread(f"{self._name}-{level}")
        if old is not None:
            self._retired = [thread for thread in self._retired if not thread.join(0)] + [old]
            for loop_task in old.retire():
                loop_task.context = (
                    loop_task.context.copy()
                )  # there may be a task in the other that has not found out yet
                fresh.submit(loop_task)
        return fresh

    def finish(self) -> None:
        """Let what is there run to its end, no longer than FINISH_LIMIT_S, then close."""
        threads = list(self._levels.values())
        give_up_ns = monotonic_ns() + int(FINISH_LIMIT_S * 1e9)
        for thread in threads:
            thread.retire()
        for thread in threads:
            thread.join(max(0.0, (give_up_ns - monotonic_ns()) / 1e9))
        self.close()

    def close(self) -> None:
        """Stop every loop; one that is stuck in somebody's code is left behind. Bounded by JOIN_LIMIT_S."""
        threads = [*self._levels.values(), *self._retired]
        give_up_ns = monotonic_ns() + int(JOIN_LIMIT_S * 1e9)
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join(max(0.0, (give_up_ns - monotonic_ns()) / 1e9))
        self._levels.clear()
        self._retired.clear()


Observer = Callable[[Envelope], Any]

# An observer this far behind is stuck; what it is not told is counted as its error.
OBSERVER_BACKLOG = 10_000


class ObserverQueue:
    """One observer, and what it has not been told yet."""

    def __init__(self, observer: Observer, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._observer = observer
        self._on_error = on_error
        self._threads = LoopThreads(name)
        self._backlog: deque[tuple[Envelope, contextvars.Context]] = deque()
        self._is_called = False

    def tell(self, envelope: Envelope) -> None:
        if len(self._backlog) >= OBSERVER_BACKLOG:
            self._on_error(RuntimeError(f"{self._observer!r} is {OBSERVER_BACKLOG} envelopes behind"))
            return
        self._backlog.append((envelope, contextvars.copy_context()))
        if not self._is_called:
            self._is_called = True
            self._threads.post_in_order(self._tell_all)

    def finish(self) -> None:
        """Tell it what it has not been told yet, no longer than FINISH_LIMIT_S."""
        self._threads.finish()

    def _tell_all(self, thread: LoopThread) -> None:
        # Cleared before looking: whoever comes from here on calls again, so nothing is left untold.
        self._is_called = False
        for _ in range(len(self._backlog)):
            envelope, context = self._backlog.popleft()
            try:
                observing = context.run(self._observer, envelope)
            except BaseException as error:
                self._on_error(error)
                continue
            if hasattr(observing, "__await__"):
                thread.start(_ObserverTask(observing, self._on_error), context)


class _ObserverTask(LoopTask):
    """An async observer that has been called and is not done."""

    __slots__ = ("_observing", "_on_error")

    def __init__(self, observing: Awaitable[object], on_error: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._observing, self._on_error = observing, on_error

    async def run(self, thread: LoopThread | None = None) -> None:
        assert thread is not None
        if not thread.begin(self):
            return
        try:
            await self._observing
        except BaseException as error:
            self._on_error(error)
        thread.end(monotonic_ns())
