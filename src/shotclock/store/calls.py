"""Calls of tools that passed through `shotclock wrap`. Arguments and results are not kept, only their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ..core.clocks import WallTime
from ..core.value_types import value
from .database import Table, check_count, decode_text
from .rows import RowMapper

# Outcomes of calls that the server has answered. All others are the codes of failures.
SUCCEEDED = ("ok", "answered")
TIMED_OUT = ("TIMEOUT", "STALLED", "QUEUE_TIMEOUT")
# Calls that one transaction deletes, so that other writers do not wait long.
AT_ONCE = 1_000


@value
class LoggedCall:
    """A call that has ended."""

    server: str
    tool: str
    started_at: WallTime
    duration_ms: int
    outcome: str
    """ok, tool_error (a result with isError), error (of the protocol), answered (too long to be read), or a code."""
    call_id: str | None
    """The id in the text of a failure."""
    timeout_ms: int
    idle_ms: int
    request_bytes: int
    answer_bytes: int
    arguments_sha256: str | None
    """Of canonical JSON; None if they were too long to be read."""
    generation: int
    """The number of the server process, 1 until it is started again."""
    pid: int
    """The process in front of the server."""


@value
class CallFilter:
    """Selection of calls."""

    server: str | None = None
    tool: str | None = None  # a pattern, as in `wrap --tool`
    failed: bool = False
    timeouts: bool = False
    since: WallTime | None = None


_CALLS = RowMapper(LoggedCall, "calls")


class Calls(Table):
    """Table of calls, in the order of their ends."""

    def add(self, calls: Sequence[LoggedCall], keep: int) -> None:
        """Record calls and delete all but the newest `keep`; 0 is no limit. Raises StoreBusy instead of waiting."""
        rows = [tuple(_CALLS.write(call).values()) for call in calls]
        marks = ", ".join("?" * len(rows[0])) if rows else ""
        with self._database.write(durable=False, may_wait=False) as transaction:
            if rows:
                transaction.executemany(f"INSERT INTO calls ({_CALLS.columns}) VALUES ({marks})", rows)
            if keep:
                transaction.execute("DELETE FROM calls WHERE seq <= (SELECT max(seq) FROM calls) - ?", (keep,))

    def list(self, wanted: CallFilter, limit: int, *, slowest: bool = False) -> list[LoggedCall]:
        """Return the selected calls, the newest first or the slowest first."""
        check_count(limit, "limit")
        conditions: list[str] = []
        values: list[object] = []
        for outcomes, is_in, is_wanted in ((SUCCEEDED, "NOT IN", wanted.failed), (TIMED_OUT, "IN", wanted.timeouts)):
            if is_wanted:
                conditions.append(f"outcome {is_in} ({', '.join('?' * len(outcomes))})")
                values += outcomes
        if wanted.server is not None:
            conditions.append("server = ?")
            values.append(wanted.server)
        if wanted.since is not None:
            conditions.append("started_at >= ?")
            values.append(wanted.since)
        with self._database.read() as transaction:
            if wanted.tool is not None:
                found = transaction.execute("SELECT DISTINCT tool FROM calls").fetchall()
                tools = [tool for (tool,) in found if fnmatchcase(decode_text(tool), wanted.tool)]
                conditions.append(f"tool IN ({', '.join('?' * len(tools))})" if tools else "0 = 1")
                values += tools
            where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
            order = "duration_ms DESC, seq DESC" if slowest else "seq DESC"
            return _CALLS.list(transaction, f"{where}ORDER BY {order} LIMIT ?", (*values, limit))

    def count_outdated(self, before: WallTime | None, keep: int) -> int:
        """Return how many calls `forget_outdated` would delete."""
        outdated, values = _outdated(before, keep)
        with self._database.read() as transaction:
            found = transaction.execute(f"SELECT count(*) FROM calls WHERE {outdated}", values).fetchone()
            return int(found[0])

    def forget_outdated(self, before: WallTime | None, keep: int) -> int:
        """Delete the calls that began before then, and all but the newest `keep`; 0 is no limit. Return how many."""
        outdated, values = _outdated(before, keep)
        if not self.count_outdated(before, keep):  # a writer would wait for others
            return 0
        some = f"seq IN (SELECT seq FROM calls WHERE {outdated} ORDER BY seq LIMIT ?)"
        deleted = 0
        while (now := self._execute(f"DELETE FROM calls WHERE {some}", (*values, AT_ONCE), durable=False)) > 0:
            deleted += now
        return deleted


def _outdated(before: WallTime | None, keep: int) -> tuple[str, list[object]]:
    conditions, values = ["0 = 1"], list[object]()
    if before is not None:
        conditions.append("started_at < ?")
        values.append(before)
    if keep:
        conditions.append("seq <= (SELECT max(seq) FROM calls) - ?")
        values.append(keep)
    return " OR ".join(conditions), values
