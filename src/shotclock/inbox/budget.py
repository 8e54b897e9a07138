"""How long a call that needs a person waits before it says that the proposal remains queued."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping

from ..core.durations import MAX_MS, DurationError, parse_duration_ms
from ..core.errors import Failure

RESPONSE_BUDGET_MS = 30_000
VARIABLE = "SHOTCLOCK_RESPONSE_TIMEOUT"
SECONDS_VARIABLE = "SUPERVISE_RESPONSE_TIMEOUT_SECONDS"
_SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12}", re.ASCII)


def response_budget_ms(environ: Mapping[str, str] | None = None) -> int:
    """Raises Failure (ARG_ERROR) for what is no duration: call it at the start, not when somebody waits already."""
    environ = os.environ if environ is None else environ
    if said := environ.get(VARIABLE, "").strip():
        try:
            return parse_duration_ms(said)
        except DurationError as error:
            raise _refused(VARIABLE, str(error)) from None
    if said := environ.get(SECONDS_VARIABLE, "").strip():
        if not _SECONDS.fullmatch(said):
            raise _refused(SECONDS_VARIABLE, f"{said[:40]!r} is not a number of seconds: write 30 or 0.5")
        # Up, so that a tiny budget does not become none at all.
        budget_ms = math.ceil(float(said) * 1000)
        if budget_ms > MAX_MS:
            raise _refused(SECONDS_VARIABLE, f"{said!r} is too long: the longest clock is ten years")
        return budget_ms
    return RESPONSE_BUDGET_MS


def _refused(variable: str, message: str) -> Failure:
    return Failure(
        "ARG_ERROR",
        f"the environment variable {variable} cannot be used: {message}",
        context={"errors": [{"field": variable, "message": message}]},
        suggestion=f"correct or unset {variable}",
    )
