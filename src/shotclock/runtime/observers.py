"""Whoever is told of every envelope, off the caller's path: each on a loop of its own.

One that hangs or raises costs nobody else. A plain function is called straight from the mailbox of its loop; only one
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
        self._hosts = LoopThreads(name)
        self._untold: deque[tuple[Envelope, contextvars.Context]] = deque()
        self._is_called = False

    def tell(self, envelope: Envelope) -> None:
        if len(self._untold) >= OBSERVER_BACKLOG:
            self._on_error(RuntimeError(f"{self._observer!r} is {OBSERVER_BACKLOG} envelopes behind"))
            return
        self._untold.append((envelope, contextvars.copy_context()))
        if not self._is_called:
            self._is_called = True
            self._hosts.post_in_order(self._tell_all)

    def finish(self) -> None:
        """Tell it what it has not been told yet, no longer than FINISH_LIMIT_S."""
        self._hosts.finish()

    def _tell_all(self, host: LoopThread) -> None:
        # Cleared before looking: whoever comes from here on calls again, so nothing is left untold.
        self._is_called = False
        for _ in range(len(self._untold)):
            envelope, context = self._untold.popleft()
            try:
                told = context.run(self._observer, envelope)
            except BaseException as error:
                self._on_error(error)
                continue
            if hasattr(told, "__await__"):
                host.start(_Listening(told, self._on_error), context)


class _Listening(LoopTask):
    """An async observer that has been called and is not done."""

    __slots__ = ("_on_error", "_told")

    def __init__(self, told: Awaitable[object], on_error: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._told, self._on_error = told, on_error

    async def run(self, host: LoopThread | None = None) -> None:
        assert host is not None
        if not host.begin(self):
            return
        try:
            await self._told
        except BaseException as error:
            self._on_error(error)
        host.end(monotonic_ns())
