"""The only reader of time: monotonic nanoseconds, comparable across processes of one boot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ..core.limits import WallTime

monotonic_ns: Callable[[], int] = time.monotonic_ns
wall_ns: Callable[[], int] = time.time_ns
wall_seconds: Callable[[], float] = time.time
pause: Callable[[float], None] = time.sleep  # for the few places that cannot wait for an event

_process_began = [monotonic_ns()]
os.register_at_fork(after_in_child=lambda: _process_began.__setitem__(0, monotonic_ns()))


def process_began_ns() -> int:
    return _process_began[0]


def timestamp(at_ns: int) -> str:
    """Return a wall-clock instant in UTC, for people and logs, never to measure time."""
    seconds, rest = divmod(at_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1_000_000:03d}Z"


def wall_time() -> WallTime:
    return WallTime.of_ns(wall_ns())


class TokenBucket:
    """A rate limit: `at_once` units in a burst, then `per_second` more."""

    def __init__(self, at_once: int, per_second: float) -> None:
        self.at_once = at_once
        self._per_second = per_second
        self._left = float(at_once)
        self._at_ns = monotonic_ns()

    @property
    def left(self) -> float:
        now_ns = monotonic_ns()
        self._left = min(self.at_once, self._left + (now_ns - self._at_ns) * self._per_second / 10**9)
        self._at_ns = now_ns
        return self._left

    def take(self, count: int = 1) -> int:
        """Take units. Returns 0, or the milliseconds until there are enough."""
        if (missing := count - self.left) > 0:
            return int(missing / self._per_second * 1000) + 1
        self._left -= count
        return 0
