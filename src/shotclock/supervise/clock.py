"""The only reader of time: monotonic nanoseconds, comparable across processes of one boot. docs/design.md: R4, R5."""

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
