"""Limits that the environment sets: how long a call waits for a person, and how many proposals may be open.

Both are the environment's to say, and nonsense there is told at the start, not when somebody asks.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping

from ..core.durations import MAX_MS, DurationError, parse_duration_ms
from ..core.errors import Failure
from ..core.proposal import InboxLimits

RESPONSE_BUDGET_MS = 30_000
VARIABLE = "SHOTCLOCK_RESPONSE_TIMEOUT"
SECONDS_VARIABLE = "SUPERVISE_RESPONSE_TIMEOUT_SECONDS"
EACH_VARIABLE = "SHOTCLOCK_INBOX_LIMIT_EACH"
ALL_VARIABLE = "SHOTCLOCK_INBOX_LIMIT"
_COUNT = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12}", re.ASCII)


def read_response_budget_ms(environ: Mapping[str, str] | None = None) -> int:
    """Return how long a call waits for a person. Raises Failure (ARG_ERROR) for what is no duration: call it at the
    start, not when somebody waits already."""
    environ = os.environ if environ is None else environ
    read_inbox_limits(
        environ
    )  # whoever asks how long to wait is about to ask people, and hears of that nonsense as early
    budget_ms: int | None = None
    # Both are looked at, whichever counts: nonsense in the other would be believed once this one is gone.
    if said := environ.get(SECONDS_VARIABLE, "").strip():
        if not _SECONDS.fullmatch(said):
            raise _refuse_variable(SECONDS_VARIABLE, f"{said[:40]!r} is not a number of seconds: write 30 or 0.5")
        # Up, so that a tiny budget does not become none at all.
        budget_ms = math.ceil(float(said) * 1000)
        if budget_ms > MAX_MS:
            raise _refuse_variable(SECONDS_VARIABLE, f"{said!r} is too long: ten years is the most")
    if said := environ.get(VARIABLE, "").strip():
        try:
            return parse_duration_ms(said)
        except DurationError as error:
            raise _refuse_variable(VARIABLE, str(error)) from None
    return RESPONSE_BUDGET_MS if budget_ms is None else budget_ms


def read_inbox_limits(environ: Mapping[str, str] | None = None) -> InboxLimits:
    """Return how many proposals may be open, of one asker and in all. Raises Failure (ARG_ERROR), like the budget."""
    environ = os.environ if environ is None else environ
    usual = InboxLimits()
    return InboxLimits(_read_count(environ, EACH_VARIABLE, usual.each), _read_count(environ, ALL_VARIABLE, usual.all))


def _read_count(environ: Mapping[str, str], variable: str, default: int) -> int:
    said = environ.get(variable, "").strip()
    if said and not _COUNT.fullmatch(said):
        raise _refuse_variable(
            variable, f"{said[:40]!r} is not a number of proposals: write a whole one from 1 to 999999999"
        )
    return int(said) if said else default


def _refuse_variable(variable: str, message: str) -> Failure:
    return Failure(
        "ARG_ERROR",
        f"the environment variable {variable} cannot be used: {message}",
        context={"errors": [{"field": variable, "message": message}]},
        suggestion=f"correct or unset {variable}",
    )
