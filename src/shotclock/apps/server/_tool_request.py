"""One request to run a function, with the limits and the key that its client wrote into `_meta`.

A remaining time that cannot be read is only a hint, and ignored with a warning; an option that cannot be read is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...calls.principal import Principal
from ...worker.context import Caller
from ._results import REMAINING
from .client_link import ClientLink

TIMEOUT = "shotclock.dev/timeoutMs"
BUDGET = "shotclock.dev/budgetMs"
IDEMPOTENCY_KEY = "shotclock.dev/idempotencyKey"

LONGEST_MS = 100_000_000_000  # about three years. Longer times overflow timers
LONGEST_KEY = 256


class RequestMeta(NamedTuple):
    remaining_ms: int | None = None
    timeout_ms: int | None = None
    budget_ms: int | None = None
    idempotency_key: str | None = None
    wants_progress: bool = False
    unreadable: str | None = None  # why the remaining time was ignored, if it was
    mistakes: tuple[dict[str, str], ...] = ()


def read_request_meta(meta: Mapping[str, Any] | None) -> RequestMeta:
    if not meta:
        return RequestMeta()
    mistakes: list[dict[str, str]] = []
    remaining_ms, unreadable = meta.get(REMAINING), None
    if remaining_ms is not None and not _is_duration(remaining_ms):
        unreadable = f"_meta[{REMAINING!r}] is not a whole number of milliseconds: {repr(remaining_ms)[:40]}"
        remaining_ms = None
    limits: list[int | None] = []
    for name in (TIMEOUT, BUDGET):
        limit = meta.get(name)
        if limit is not None and not _is_duration(limit):
            mistakes.append({"field": f"_meta.{name}", "message": "must be a whole number of milliseconds, 0 or more"})
            limit = None
        limits.append(limit)
    key = meta.get(IDEMPOTENCY_KEY)
    if key is not None and not (isinstance(key, str) and 0 < len(key) <= LONGEST_KEY):
        message = f"must be a string of 1 to {LONGEST_KEY} characters"
        mistakes.append({"field": f"_meta.{IDEMPOTENCY_KEY}", "message": message})
    wants_progress = meta.get("progressToken") is not None
    return RequestMeta(remaining_ms, limits[0], limits[1], key, wants_progress, unreadable, tuple(mistakes))


def _is_duration(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LONGEST_MS


class ToolRequest(NamedTuple):
    name: str
    arguments: object
    meta: RequestMeta
    link: ClientLink
    principal: Principal
    is_tool: bool = True  # else a resource, a prompt or a completion
    asks: Mapping[str, Any] | None = None
    """The capabilities of a client that a job may ask."""
    caller: Caller | None = None
