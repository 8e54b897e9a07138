"""Instants and processes, for what is stored: they outlive a boot, which a monotonic deadline does not.

`WallTime` is another type than `Deadline` on purpose: the two clocks cannot be compared, and the wall clock may step.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import overload

from .deadlines import NS_PER_MS
from .records import dataclass

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The last millisecond of the year 9999: later ones have no ISO rendering that anybody reads.
LATEST_MS = 253_402_300_799_999


@dataclass(frozen=True, slots=True, order=True)
class WallTime:
    """Milliseconds since the epoch, UTC. Adding and taking away whole milliseconds gives another instant."""

    ms: int

    def __post_init__(self) -> None:
        if type(self.ms) is not int:
            raise TypeError(f"a wall-clock time is whole milliseconds, not {self.ms!r}")
        if not 0 <= self.ms <= LATEST_MS:
            raise ValueError(f"{self.ms} ms since the epoch is not between 1970 and 9999")

    @classmethod
    def of_ns(cls, ns: int) -> WallTime:
        """Convert the reading of a nanosecond clock, rounded down."""
        return cls(ns // NS_PER_MS)

    def __add__(self, ms: int) -> WallTime:
        return WallTime(self.ms + ms) if type(ms) is int else NotImplemented

    @overload
    def __sub__(self, other: WallTime) -> int: ...
    @overload
    def __sub__(self, other: int) -> WallTime: ...
    def __sub__(self, other: WallTime | int) -> WallTime | int:
        """Return the milliseconds between two instants (negative if `other` is later), or the instant that much
        earlier."""
        if isinstance(other, WallTime):
            return self.ms - other.ms
        return WallTime(self.ms - other) if type(other) is int else NotImplemented

    def since_ms(self, earlier: WallTime) -> int:
        """Return how long ago `earlier` was; 0 if the clock was set back meanwhile and it seems to lie ahead."""
        return max(0, self.ms - earlier.ms)

    def iso(self) -> str:
        return (_EPOCH + timedelta(milliseconds=self.ms)).isoformat(timespec="milliseconds")[:-6] + "Z"

    def __str__(self) -> str:
        return self.iso()


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that holds something, named so that no later process can be mistaken for it."""

    host: str
    boot_id: str
    pid: int
    started: int
    """Clock ticks since boot: with boot and pid, an identity that is never used twice."""
    namespace: str = ""
    """Where the pid counts. A sandbox or a container has pids of its own under the same boot."""
