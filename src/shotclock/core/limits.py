"""The clocks of a call: durations, deadlines and their nesting; wall-clock times and processes in the store.

A duration is whole milliseconds: `500ms`, `30s`, `5m`, `1h30m`, `1.5s`, `2d`, and ISO 8601 `PT1H30M`. A bare number is
refused unless its unit is known: guessing between seconds and milliseconds turns a minute into sixteen hours. `0` alone
means "none".

A deadline is an instant on the monotonic clock of this boot:
- a child's bell is the earlier of its own timeout and its parent's deadline minus the reserve;
- the polite stop is sent at the bell, the kill at bell + grace, and never past half the reserve before the
  parent's deadline, so that the child's answer is there before the parent's own bell rings.

Contracts (AGENTS.md): deadlines nest; the answer names the limit.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import total_ordering
from operator import attrgetter
from typing import Any, overload

from .value_types import fields_of, value

# Ten years. Far beyond any sane clock, far below where nanoseconds leave a signed 64-bit integer.
MAX_MS = 10 * 365 * 24 * 3600 * 1000

_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_PART = rf"({_NUMBER})(ms|s|m|h|d)"
_COMPACT = rf"(?:{_NUMBER}(?:ms|s|m|h|d))+"
_ISO = rf"P(?:(?P<d>{_NUMBER})D)?(?:T(?=[0-9])(?:(?P<h>{_NUMBER})H)?(?:(?P<m>{_NUMBER})M)?(?:(?P<s>{_NUMBER})S)?)?"
_BARE = rf"[+-]?(?:{_NUMBER}|inf(?:inity)?|nan)"


class DurationError(ValueError):
    """A text or number that is not a duration."""


def parse_duration_ms(value: object, *, bare: str | None = None) -> int:
    """Return the milliseconds of a duration. `bare` is the unit ("ms" or "s") of a number without one."""
    if isinstance(value, bool):
        raise DurationError(f"{value!r} is not a duration: write 30s, 500ms, 1h30m or PT30S")
    if isinstance(value, int | float):
        return _of_number(value, bare)
    if not isinstance(value, str):
        if hasattr(value, "total_seconds") and not isinstance(value, type):
            return _of_timedelta(value)
        raise DurationError(f"a {type(value).__name__} is not a duration: write 30s, 500ms, 1h30m or PT30S")
    text = value.strip()
    if len(text) > 64:
        raise DurationError(f"{text[:20]!r}… is too long to be a duration")
    unit = text.lstrip("0123456789")
    if unit in _UNIT_MS and unit != text:
        return _of_parts(text, [(unit, text.removesuffix(unit))])
    if re.fullmatch(_BARE, text, re.ASCII | re.IGNORECASE):
        return _of_number(int(text) if text.isdecimal() else float(text), bare)
    if text.startswith("-"):
        raise DurationError(f"{text!r} is negative: write a time above 0, as in 30s, or 0 for no limit")
    if re.fullmatch(_COMPACT, text, re.ASCII):
        return _of_parts(text, [(unit, number) for number, unit in re.findall(_PART, text, re.ASCII)])
    iso = re.fullmatch(_ISO, text, re.ASCII)
    if iso and any(iso.groups()):
        return _of_parts(text, [(unit, number) for unit, number in iso.groupdict().items() if number])
    raise DurationError(f"{text!r} is not a duration: write 30s, 500ms, 1h30m or PT30S")


def format_duration(ms: int) -> str:
    """Return the shortest form that parses back to the same duration."""
    if ms <= 0:
        return "0ms" if ms == 0 else f"-{format_duration(-ms)}"
    whole, text = ms, ""
    for unit in ("d", "h", "m"):
        count, whole = divmod(whole, _UNIT_MS[unit])
        if count:
            text += f"{count}{unit}"
    if whole and not text and whole < 1000:
        return f"{whole}ms"
    if whole:
        text += f"{whole // 1000}.{whole % 1000:03d}".rstrip("0").rstrip(".") + "s"
    return text


def in_seconds(ms: int) -> str:
    if ms == 1000:
        return "1 second"
    return f"{ms / 1000:g} seconds" if ms < 10**9 else f"{ms // 1000} seconds"


def _of_timedelta(delta: Any) -> int:
    microseconds = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
    if microseconds < 0:
        raise DurationError(f"{delta} is negative: write a time above 0, as in 30s, or 0 for no limit")
    ms, rest = divmod(microseconds, 1000)
    if rest:
        raise DurationError(f"{delta} is too exact: write whole milliseconds, as in 1500ms")
    return _checked(ms, str(delta))


def _of_number(number: float | int, bare: str | None) -> int:
    if isinstance(number, float) and number - number != 0:  # infinity or NaN
        raise DurationError(f"{number} is not a duration: leave the clock out (or write 0) for none")
    if isinstance(number, int) and number.bit_length() > 64:
        raise DurationError("that number is too large: ten years is the most")
    if number < 0:
        raise DurationError(f"{number:g} is negative: write a time above 0, as in 30s, or 0 for no limit")
    if number == 0:
        return 0
    if bare is None:
        raise DurationError(f"{number} has no unit: write {number}s or {number}ms")
    return _checked(number * _UNIT_MS[bare], str(number))


def _of_parts(text: str, parts: list[tuple[str, str]]) -> int:
    units = [unit for unit, _ in parts]
    if units != sorted(set(units), key=["d", "h", "m", "s", "ms"].index):
        raise DurationError(f"{text!r} is ambiguous: write each unit once, the largest first, as in 1h30m")
    # Scaled integers, not floats: 1.1s is exactly 1100 ms.
    total = 0
    for unit, number in parts:
        digits, _, fraction = number.partition(".")
        scaled = int(digits + fraction) * _UNIT_MS[unit]
        whole, rest = divmod(scaled, 10 ** len(fraction))
        if rest:
            raise DurationError(f"{text!r} is too exact: write whole milliseconds, as in 1500ms")
        total += whole
    return _checked(total, text)


def _checked(ms: float | int, text: str) -> int:
    if ms > MAX_MS:
        raise DurationError(f"{text!r} is too long: ten years is the most")
    whole = round(ms)
    if (whole == 0 and ms != 0) or (isinstance(ms, float) and abs(ms - whole) > 1e-3):  # less is the error of floats
        raise DurationError(f"{text!r} is too exact: write whole milliseconds, as in 1500ms")
    return whole


NS_PER_MS = 1_000_000
# Enough to stop a process tree and return an envelope.
DEFAULT_RESERVE_MS = 500
# A parent with little time reserves this share of it.
RESERVE_SHARE = 10


@value
class Deadline:
    """An instant on the monotonic clock. A stored wall-clock time is another type on purpose: that clock may step."""

    at_ns: int

    @classmethod
    def after_ms(cls, now_ns: int, ms: int) -> Deadline:
        return cls(now_ns + ms * NS_PER_MS)

    def remaining_ns(self, now_ns: int) -> int:
        return max(0, self.at_ns - now_ns)

    def remaining_ms(self, now_ns: int) -> int:
        """Return the remaining time, rounded down: a child must never get more."""
        return self.remaining_ns(now_ns) // NS_PER_MS

    def has_passed(self, now_ns: int) -> bool:
        return now_ns >= self.at_ns


@value
class Bound:
    """The bell of work, its grace until the kill, and the owner of the clock."""

    bell: Deadline | None
    grace_ms: int  # shrinks near the parent's deadline
    limit_ms: int
    owner: str  # the call itself, or a parent with an earlier deadline
    source: Deadline | None = None
    """The deadline that set it, the bell or the parent's. Its identity is that of the clock."""

    @property
    def kill_ns(self) -> int | None:
        return None if self.bell is None else self.bell.at_ns + self.grace_ms * NS_PER_MS


def reserve_ms_for(remaining_ms: int, asked_ms: int | None = None) -> int:
    return min(DEFAULT_RESERVE_MS, remaining_ms // RESERVE_SHARE) if asked_ms is None else min(asked_ms, remaining_ms)


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
    grace_ms = min(grace_ms, (parent.at_ns - reserve_ns // 2 - bell.at_ns) // NS_PER_MS)
    return Bound(bell, grace_ms, max(0, (bell.at_ns - now_ns) // NS_PER_MS), whose, source)


def latest_bell(parent: Deadline | None, started_ns: int, reserve_ms: int | None = None) -> Deadline | None:
    """Return the latest bell inside a parent's deadline, as `nest` sets it."""
    if parent is None:
        return None
    return Deadline(parent.at_ns - reserve_ms_for(parent.remaining_ms(started_ns), reserve_ms) * NS_PER_MS)


def move_bell(bound: Bound, by_ms: int, latest: Deadline | None, parent: Deadline | None) -> Bound | None:
    """Return the bound with a later bell, owned by the call; None where it cannot move."""
    if bound.bell is None or by_ms <= 0:
        return None
    at_ns = bound.bell.at_ns + by_ms * NS_PER_MS
    if latest is not None:
        at_ns = min(at_ns, latest.at_ns)
    moved_ms = (at_ns - bound.bell.at_ns) // NS_PER_MS
    if moved_ms <= 0:
        return None
    bell, grace_ms = Deadline(at_ns), bound.grace_ms
    if parent is not None:  # the kill comes halfway to the parent's deadline, at the latest, as in `nest`
        grace_ms = min(grace_ms, max(0, parent.at_ns - at_ns) // 2 // NS_PER_MS)
    return Bound(bell, grace_ms, bound.limit_ms + moved_ms, bound.owner, bell)


DEFAULT_TIMEOUT_MS = 30_000
DEFAULT_GRACE_MS = 5_000
# Between the request to wind down and the stop.
DEFAULT_WIND_DOWN_MS = 5_000


class ClockKind(StrEnum):
    TIMEOUT = "timeout"
    SOFT = "soft"
    IDLE = "idle"
    INPUT = "input"
    QUEUE = "queue"
    BUDGET = "budget"
    OPERATION = "operation"


@value
class Clocks:
    """Limits in milliseconds. None: the next level decides. 0: no limit. Lists of clocks derive from these fields."""

    timeout_ms: int | None = None
    soft_ms: int | None = None
    idle_ms: int | None = None
    queue_ms: int | None = None
    grace_ms: int | None = None
    reserve_ms: int | None = None
    wind_down_ms: int | None = None

    @classmethod
    def of(cls, timeout: object = None, **others: object) -> Clocks:
        """Make clocks from durations, by the names in CLOCK_NAMES. Raises DurationError that names the clock."""
        limits: dict[str, int | None] = {}
        for name, written in {"timeout": timeout, **others}.items():
            if name not in CLOCK_NAMES:
                raise TypeError(f"there is no clock {name!r}; the clocks are {', '.join(CLOCK_NAMES)}")
            try:
                limits[f"{name}_ms"] = None if written is None else parse_duration_ms(written)
            except DurationError as error:
                raise DurationError(f"{name}: {error}") from None
        return cls(**limits)

    def over(self, defaults: Clocks) -> Clocks:
        """Return these clocks, with those of `defaults` for the ones that are not set."""
        mine = _limits_of(self)
        if None not in mine:
            return self
        pairs = zip(mine, _limits_of(defaults), strict=True)
        return Clocks(*[theirs if own is None else own for own, theirs in pairs])


_limits_of = attrgetter(*fields_of(Clocks))
CLOCK_NAMES = tuple(name.removesuffix("_ms") for name in fields_of(Clocks))
# The others concern the queue and the caller of the work.
WORK_CLOCKS = tuple(name for name in CLOCK_NAMES if name not in ("queue", "reserve"))


@value
class Fired:
    kind: ClockKind
    owner: str
    limit_ms: int
    elapsed_ms: int
    source: Deadline | None = None  # the deadline of this process that passed, compared by identity
    kept_ms: int = 0  # kept before the limit for the clean-up of a run

    @property
    def kept(self) -> str:
        return f", of which {format_duration(self.kept_ms)} were kept for clean-up" if self.kept_ms else ""

    def as_context(self) -> dict[str, object]:
        return {
            "kind": self.kind.value,
            "owner": self.owner,
            "limit_ms": self.limit_ms,
            "elapsed_ms": self.elapsed_ms,
            **({"kept_ms": self.kept_ms} if self.kept_ms else {}),
        }


# The last millisecond of the year 9999: ISO 8601 has no later ones.
LATEST_MS = 253_402_300_799_999


@value
@total_ordering
class WallTime:
    """Milliseconds since the epoch, UTC."""

    ms: int

    def __post_init__(self) -> None:
        if type(self.ms) is not int:
            raise TypeError(f"a wall-clock time is whole milliseconds, not {self.ms!r}")
        if not 0 <= self.ms <= LATEST_MS:
            raise ValueError(f"{self.ms} ms since the epoch is not between 1970 and 9999")

    @classmethod
    def of_ns(cls, ns: int) -> WallTime:
        return cls(ns // NS_PER_MS)

    def __add__(self, ms: int) -> WallTime:
        return WallTime(self.ms + ms) if type(ms) is int else NotImplemented

    @overload
    def __sub__(self, other: WallTime) -> int: ...
    @overload
    def __sub__(self, other: int) -> WallTime: ...
    def __sub__(self, other: WallTime | int) -> WallTime | int:
        if isinstance(other, WallTime):
            return self.ms - other.ms
        return WallTime(self.ms - other) if type(other) is int else NotImplemented

    def since_ms(self, earlier: WallTime) -> int:
        """Return the milliseconds since `earlier`; 0 if the clock was set back."""
        return max(0, self.ms - earlier.ms)

    def __lt__(self, other: object) -> bool:
        return self.ms < other.ms if isinstance(other, WallTime) else NotImplemented

    def iso(self) -> str:
        from datetime import UTC, datetime, timedelta  # slow to import, and `exec` does not need it

        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=self.ms)
        return at.isoformat(timespec="milliseconds")[:-6] + "Z"

    def __str__(self) -> str:
        return self.iso()


@value
class ProcessIdentity:
    host: str
    boot_id: str
    pid: int
    started: int  # clock ticks since boot: with boot and pid, an identity that is never used twice
    namespace: str = ""  # the pid namespace: containers have their own pids under the same boot
