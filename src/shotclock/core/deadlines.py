"""Deadlines: instants on the monotonic clock of this boot, how they nest, and how grace fits below them.

The rules, once, for every kind of work:
- a child's bell is the earlier of its own timeout and its parent's deadline minus the reserve, never later;
- the polite stop is sent at the bell, the kill at bell + grace, and never past half the reserve before the
  parent's deadline, so that the child's answer is there before the parent's own bell rings.

docs/design.md: R6.
"""

from __future__ import annotations

from .records import value

NS_PER_MS = 1_000_000
# What a parent keeps back from a child, unless told otherwise: enough to stop a tree and pass an envelope up.
DEFAULT_RESERVE_MS = 500
# A short parent cannot spare that much; it keeps back this share of what is left.
RESERVE_SHARE = 10


@value
class Deadline:
    """An instant on the monotonic clock. Not comparable with a stored, wall-clock time on purpose."""

    at_ns: int

    @classmethod
    def after_ms(cls, now_ns: int, ms: int) -> Deadline:
        return cls(now_ns + ms * NS_PER_MS)

    def remaining_ns(self, now_ns: int) -> int:
        return max(0, self.at_ns - now_ns)

    def remaining_ms(self, now_ns: int) -> int:
        """Return what is left, rounded down: what is handed on must never be more than what is there."""
        return self.remaining_ns(now_ns) // NS_PER_MS

    def has_passed(self, now_ns: int) -> bool:
        return now_ns >= self.at_ns


@value
class Bound:
    """When the work is asked to stop, when it is killed, and whose clock that is. None is 'no bound'."""

    bell: Deadline | None
    grace_ms: int
    """From the polite stop to the kill. Near the parent's deadline it shrinks."""
    limit_ms: int
    """What was granted at the start, from start to bell; 0 where there is no bell."""
    owner: str
    """Who set the bell: the call itself, or the parent whose deadline cuts it short."""
    source: Deadline | None = None
    """The deadline that set it: the bell itself, or the parent's. Names may be alike; this very object is one clock."""

    @property
    def kill_ns(self) -> int | None:
        return None if self.bell is None else self.bell.at_ns + self.grace_ms * NS_PER_MS


def reserve_ms_for(remaining_ms: int, asked_ms: int | None = None) -> int:
    """Return what a parent with this much time left keeps back from a child."""
    wanted = DEFAULT_RESERVE_MS if asked_ms is None else asked_ms
    return min(wanted, remaining_ms // RESERVE_SHARE) if asked_ms is None else min(wanted, remaining_ms)


def nest(
    now_ns: int,
    *,
    timeout_ms: int,
    grace_ms: int,
    owner: str,
    parent: Deadline | None = None,
    parent_owner: str = "caller",
    reserve_ms: int | None = None,
) -> Bound:
    """Return the bound of work that starts now. `timeout_ms` 0 means no clock of its own."""
    own = Deadline(now_ns + timeout_ms * NS_PER_MS) if timeout_ms else None
    if parent is None:
        return Bound(own, grace_ms, timeout_ms, owner, own)
    reserve_ns = reserve_ms_for(parent.remaining_ms(now_ns), reserve_ms) * NS_PER_MS
    cap = Deadline(parent.at_ns - reserve_ns)
    if own is not None and own.at_ns <= cap.at_ns:
        bell, whose, source = own, owner, own
    else:
        bell, whose, source = cap, parent_owner, parent
    latest_kill_ns = parent.at_ns - reserve_ns // 2
    grace_ms = min(grace_ms, (latest_kill_ns - bell.at_ns) // NS_PER_MS)
    return Bound(bell, grace_ms, max(0, (bell.at_ns - now_ns) // NS_PER_MS), whose, source)
