"""The soft and idle clocks of a call that is waited for on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.deadlines import NS_PER_MS
from .admission import Admission
from .clock import monotonic_ns

# asyncio refuses absurd delays on some platforms; a day at a time is as good.
LONGEST_DELAY_S = 86_400.0
NOT_YET = object()
"""What `on_idle` returns where the work has not begun, and so cannot be silent."""


class Alarms:
    """Rings `on_soft` once, and `on_idle` once when there was no sign of life for the idle clock's length."""

    __slots__ = ("_handles", "_idle_ns", "_last_ns", "_loop", "_on_idle", "soft_rang")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        admission: Admission,
        *,
        on_soft: Callable[[], None],
        on_idle: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._on_idle = on_idle
        self._last_ns = monotonic_ns()
        self._idle_ns = (admission.clocks.idle_ms or 0) * NS_PER_MS
        self._handles: list[asyncio.TimerHandle] = []
        self.soft_rang = False
        if admission.clocks.soft_ms:
            self._call_later(admission.clocks.soft_ms / 1000, self._ring_soft, on_soft)
        if self._idle_ns:
            self._call_later(self._idle_ns / 1e9, self._check_idle)

    def sign_of_life(self) -> None:
        self._last_ns = monotonic_ns()

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def _ring_soft(self, on_soft: Callable[[], None]) -> None:
        self.soft_rang = True
        on_soft()

    def _check_idle(self) -> None:
        silent_ns = monotonic_ns() - self._last_ns
        if silent_ns >= self._idle_ns and self._on_idle() is not NOT_YET:
            return
        self._call_later(max(self._idle_ns - silent_ns, self._idle_ns // 10) / 1e9, self._check_idle)

    def _call_later(self, delay_s: float, then: Callable[..., None], *arguments: object) -> None:
        self._handles.append(self._loop.call_later(min(delay_s, LONGEST_DELAY_S), then, *arguments))
