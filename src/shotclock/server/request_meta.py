"""What a caller asks for beside the arguments: the time it has, and options of this one call, in the request's `_meta`.

Names are prefixed as the protocol asks of vendors. What is left of the caller's time is only a hint to us, so one that
cannot be read is passed over with a warning; an option that cannot be read is refused, because it was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

REMAINING = "shotclock.dev/remainingMs"
TIMEOUT = "shotclock.dev/timeoutMs"
BUDGET = "shotclock.dev/budgetMs"
IDEMPOTENCY_KEY = "shotclock.dev/idempotencyKey"
PROGRESS_TOKEN = "progressToken"

# About three years. Larger ones overflow timers somewhere on their way, and nobody waits that long.
LONGEST_MS = 100_000_000_000
LONGEST_KEY = 256


class RequestMeta(NamedTuple):
    remaining_ms: int | None = None
    timeout_ms: int | None = None
    budget_ms: int | None = None
    idempotency_key: str | None = None
    wants_progress: bool = False
    unreadable: str | None = None
    """Why the remaining time was passed over, if it was."""
    mistakes: tuple[dict[str, str], ...] = ()


NOTHING_SAID = RequestMeta()


def read_terms(meta: Mapping[str, Any] | None) -> RequestMeta:
    if not meta:
        return NOTHING_SAID
    mistakes: list[dict[str, str]] = []
    remaining_ms, unreadable = meta.get(REMAINING), None
    if remaining_ms is not None and not _is_duration(remaining_ms):
        unreadable = f"_meta[{REMAINING!r}] is not a whole number of milliseconds: {repr(remaining_ms)[:40]}"
        remaining_ms = None
    limits: dict[str, int | None] = {}
    for name in (TIMEOUT, BUDGET):
        limits[name] = limit = meta.get(name)
        if limit is not None and not _is_duration(limit):
            limits[name] = None
            mistakes.append({"field": f"_meta.{name}", "message": "must be a whole number of milliseconds, 0 or more"})
            limits[name] = None
    key = meta.get(IDEMPOTENCY_KEY)
    if key is not None and not (isinstance(key, str) and 0 < len(key) <= LONGEST_KEY):
        message = f"must be a string of 1 to {LONGEST_KEY} characters"
        mistakes.append({"field": f"_meta.{IDEMPOTENCY_KEY}", "message": message})
    return RequestMeta(
        remaining_ms,
        limits[TIMEOUT],
        limits[BUDGET],
        key,
        meta.get(PROGRESS_TOKEN) is not None,
        unreadable,
        tuple(mistakes),
    )


def _is_duration(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LONGEST_MS
