"""Restarts of a server: a pause that grows with each crash, and a circuit breaker on crash loops."""

from __future__ import annotations

from collections import deque

from ..core.limits import NS_PER_MS

FIRST_PAUSE_MS = 250
LONGEST_PAUSE_MS = 10_000
# This many crashes within the window open the circuit for the cool-down.
MOST_CRASHES = 5
WINDOW_MS = 60_000
COOL_DOWN_MS = 30_000


class Restarts:
    """The crashes of a server, and when it may be started again."""

    def __init__(self) -> None:
        self._crashes: deque[int] = deque()
        self._open_until_ns = 0

    def record_crash(self, now_ns: int) -> int:
        """Return when to start the server again. The first restart is immediate."""
        while self._crashes and self._crashes[0] < now_ns - WINDOW_MS * NS_PER_MS:
            self._crashes.popleft()
        self._crashes.append(now_ns)
        count = len(self._crashes)
        if count >= MOST_CRASHES:
            # The oldest is forgotten: after the cool-down one more start is tried, and its crash opens the circuit.
            self._crashes.popleft()
            self._open_until_ns = now_ns + COOL_DOWN_MS * NS_PER_MS
            self._crashes = deque(self._open_until_ns for _ in self._crashes)
            return self._open_until_ns
        pause_ms = min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS << (count - 2)) if count > 1 else 0
        return now_ns + pause_ms * NS_PER_MS

    def open_for_ms(self, now_ns: int) -> int:
        """Return how long the circuit stays open; 0 if it is closed."""
        return max(0, -(-(self._open_until_ns - now_ns) // NS_PER_MS))
