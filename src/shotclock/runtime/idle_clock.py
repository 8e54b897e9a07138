"""The idle limit of a call on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.clocks import NS_PER_MS
from ..process.clock import monotonic_ns

# asyncio refuses absurd delays on some platforms; a day at a time is as good.
LONGEST_DELAY_S = 86_400.0
NOT_YET = object()
"""Returned by `on_idle` if the work has not begun."""


class IdleClock:
    """Timer that calls `on_idle` once after a silence of its length."""

    __slots__ = ("_idle_ns", "_last_ns", "_loop", "_on_idle", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, idle_ms: int, on_idle: Callable[[], object]) -> None:
        self._loop = loop
        self._on_idle = on_idle
        self._last_ns = monotonic_ns()
        self._idle_ns = idle_ms * NS_PER_MS
        self._timer = self._call_later(self._idle_ns / 1e9)

    def sign_of_life(self) -> None:
        self._last_ns = monotonic_ns()

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        silent_ns = monotonic_ns() - self._last_ns
        if silent_ns >= self._idle_ns and self._on_idle() is not NOT_YET:
            return
        # One handle at a time: a call that is watched for days would keep one for each check.
        self._timer = self._call_later(max(self._idle_ns - silent_ns, self._idle_ns // 10) / 1e9)

    def _call_later(self, delay_s: float) -> asyncio.TimerHandle:
        return self._loop.call_later(min(delay_s, LONGEST_DELAY_S), self._check)
