"""Conversion of values to columns and back. Total on whatever may be in a path, an argument or a label."""

from __future__ import annotations

import json
from typing import Any

from ..core.process_identity import ProcessIdentity
from ..core.walltime import WallTime

# One value. SQLite would take a gigabyte, and hold the writer's lock while it does.
LONGEST_JSON = 64 * 1024 * 1024


def text_in(text: str) -> str | bytes:
    """Return the text as it is, or as bytes if it holds undecodable ones (surrogates), which SQLite would refuse."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def text_out(column: str | bytes) -> str:
    return column.decode("utf-8", "surrogatepass") if isinstance(column, bytes) else column


def maybe_text_in(text: str | None) -> str | bytes | None:
    return None if text is None else text_in(text)


def maybe_text_out(column: str | bytes | None) -> str | None:
    return None if column is None else text_out(column)


def json_in(value: object) -> str:
    """Return JSON text. Raises ValueError or TypeError for what is no JSON, too deep, or too long."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("nested too deep to be stored") from None
    if len(text) > LONGEST_JSON:
        raise ValueError(f"{len(text)} characters of JSON are too many to be stored: {LONGEST_JSON} at most")
    return text


def json_out(column: str) -> Any:
    return json.loads(column)


def holder_in(holder: ProcessIdentity) -> str:
    """Return one canonical text, so that equal processes are equal columns."""
    return json_in([holder.host, holder.boot_id, holder.pid, holder.started, holder.namespace])


def holder_out(column: str) -> ProcessIdentity:
    return ProcessIdentity(*json_out(column))


def maybe_holder_out(column: str | None) -> ProcessIdentity | None:
    return None if column is None else holder_out(column)


def maybe_time_in(at: WallTime | None) -> int | None:
    return None if at is None else at.ms


def maybe_time_out(column: int | None) -> WallTime | None:
    return None if column is None else WallTime(column)


def count_in(count: int, what: str) -> int:
    """Return the number, checked to be a whole one from 0 up that fits into a column. Raises TypeError or
    ValueError."""
    if type(count) is not int:
        raise TypeError(f"{what} must be a whole number, not {count!r}")
    if not 0 <= count < 2**63:
        raise ValueError(f"{what} must be a whole number from 0 up, not {count}")
    return count
