"""Observers that are told of every envelope, off the caller's path: each on a loop of its own.

One that hangs or raises costs nobody else. A plain function is called straight from the queue of its loop; only one
that is async costs a task.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from ..core.envelope import Envelope
from ..process.clock import monotonic_ns
from .loop_threads import LoopTask, LoopThread, LoopThreads

Observer = Callable[[Envelope], Any]

# An observer this far behind is stuck; what it is not told is counted as its error.
OBSERVER_BACKLOG = 10_000


class ObserverQueue:
    """One observer, and what it has not been told yet."""

    def __init__(self, observer: Observer, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._observer = observer
        self._on_error = on_error
        self._threads = LoopThreads(name)
        self._untold: deque[tuple[Envelope, contextvars.Context]] = deque()
        self._is_called = False

    def tell(self, envelope: Envelope) -> None:
        if len(self._untold) >= OBSERVER_BACKLOG:
            self._on_error(RuntimeError(f"{self._observer!r} is {OBSERVER_BACKLOG} envelopes behind"))
            return
        self._untold.append((envelope, contextvars.copy_context()))
        if not self._is_called:
            self._is_called = True
            self._threads.post_in_order(self._tell_all)

    def finish(self) -> None:
        """Tell it what it has not been told yet, no longer than FINISH_LIMIT_S."""
        self._threads.finish()

    def _tell_all(self, thread: LoopThread) -> None:
        # Cleared before looking: whoever comes from here on calls again, so nothing is left untold.
        self._is_called = False
        for _ in range(len(self._untold)):
            envelope, context = self._untold.popleft()
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
