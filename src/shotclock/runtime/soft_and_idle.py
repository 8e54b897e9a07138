"""The soft and idle clocks of a call that is waited for on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.deadlines import NS_PER_MS
from ..process.clock import monotonic_ns
from .call import Call

# asyncio refuses absurd delays on some platforms; a day at a time is as good.
LONGEST_DELAY_S = 86_400.0
NOT_YET = object()
"""What `on_idle` returns where the work has not begun, and so cannot be silent."""


class Alarms:
    """Rings `on_soft` once, and `on_idle` once when there was no sign of life for the idle clock's length."""

    __slots__ = ("_idle", "_idle_ns", "_last_ns", "_loop", "_on_idle", "_soft", "soft_rang")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        admission: Call,
        *,
        on_soft: Callable[[], None],
        on_idle: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._on_idle = on_idle
        self._last_ns = monotonic_ns()
        self._idle_ns = (admission.clocks.idle_ms or 0) * NS_PER_MS
        self._soft: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self.soft_rang = False
        if admission.clocks.soft_ms:
            self._wait_for_soft(self._last_ns + admission.clocks.soft_ms * NS_PER_MS, on_soft)
        if self._idle_ns:
            self._idle = self._call_later(self._idle_ns / 1e9, self._check_idle)

    def sign_of_life(self) -> None:
        self._last_ns = monotonic_ns()

    def cancel(self) -> None:
        for handle in (self._soft, self._idle):
            if handle is not None:
                handle.cancel()

    def _wait_for_soft(self, at_ns: int, on_soft: Callable[[], None]) -> None:
        left_ns = at_ns - monotonic_ns()
        if left_ns > 0:
            self._soft = self._call_later(left_ns / 1e9, self._wait_for_soft, at_ns, on_soft)
        else:
            self.soft_rang = True
            on_soft()

    def _check_idle(self) -> None:
        silent_ns = monotonic_ns() - self._last_ns
        if silent_ns >= self._idle_ns and self._on_idle() is not NOT_YET:
            return
        # One handle at a time: a call that is watched for days would keep one for each look at it.
        delay_ns = max(self._idle_ns - silent_ns, self._idle_ns // 10)
        self._idle = self._call_later(delay_ns / 1e9, self._check_idle)

    def _call_later(self, delay_s: float, then: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
        return self._loop.call_later(min(delay_s, LONGEST_DELAY_S), then, *arguments)
