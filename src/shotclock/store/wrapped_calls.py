"""Calls of tools that pass through `shotclock wrap`. Arguments and results are not kept, only their sizes.

A call that lasts is a row of `open_calls` until it has ended; then it is one of `calls`. The row of a process that was
killed stays: such a call is lost, and how it ended is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..core.limits import ProcessIdentity, WallTime
from ..core.value_types import value
from ._database import Table, Transaction, check_count, decode_text
from ._rows import RowMapper

# Outcomes of calls that the server has answered. All others are the codes of failures.
SUCCEEDED = ("ok", "answered")
# Outcomes of calls whose end is not recorded.
RUNNING, WAITING, LOST, UNKNOWN = "running", "waiting", "lost", "unknown"
PENDING = "INCOMPLETE"  # it was not sent, and waits for an approval
TIMED_OUT = ("TIMEOUT", "STALLED", "QUEUE_TIMEOUT")
# Calls that one transaction deletes, so that other writers do not wait long.
AT_ONCE = 1_000
# Processes may end between two looks; each look finds the calls that they have recorded at their end.
MOST_LOOKS = 5


@value
class LoggedCall:
    server: str
    tool: str
    started_at: WallTime
    duration_ms: int
    outcome: str
    """ok, tool_error (a result with isError), error (of the protocol), answered (too long to be read), or a code."""
    call_id: str | None  # the id in the text of a failure
    timeout_ms: int
    idle_ms: int
    request_bytes: int
    answer_bytes: int
    arguments_sha256: str | None  # of canonical JSON; None if they were too long to be read
    generation: int  # the number of the server process, 1 until it is started again
    pid: int  # the process in front of the server


@value
class OpenCall:
    """A call that has not ended, as the process in front of the server has last recorded it."""

    holder: ProcessIdentity  # the process in front of the server
    number: int  # the call within its process
    server: str
    tool: str
    started_at: WallTime
    is_sent: bool  # false while it waits for the server, or for a person who has to approve it
    timeout_ms: int
    idle_ms: int
    due_at: WallTime | None  # when its next limit is reached; None without limits
    due_by: str | None  # the limit that is reached then: timeout, idle or queue
    request_bytes: int
    arguments_sha256: str | None
    generation: int

    def describe(self, now: WallTime, outcome: str) -> dict[str, object]:
        """Return the fields of a logged call, with its duration so far, and its next limit."""
        is_lost = outcome == LOST
        return {
            "server": self.server,
            "tool": self.tool,
            "started_at": self.started_at.iso(),
            "duration_ms": None if is_lost else max(0, now.ms - self.started_at.ms),
            "outcome": outcome,
            "call_id": None,
            "timeout_ms": self.timeout_ms,
            "idle_ms": self.idle_ms,
            "request_bytes": self.request_bytes,
            "answer_bytes": 0,
            "arguments_sha256": self.arguments_sha256,
            "generation": self.generation,
            "pid": self.holder.pid,
            "due_at": None if self.due_at is None or is_lost else self.due_at.iso(),
            "due_by": None if is_lost else self.due_by,
        }


@value
class CallsNow:
    """Calls at one instant, each group in the wanted order."""

    open: tuple[OpenCall, ...]  # calls of processes that run, or that cannot be seen from here
    lost: tuple[OpenCall, ...]  # calls of processes that are gone and have not recorded how they ended
    ended: tuple[LoggedCall, ...]

    def describe_open(self, now: WallTime, can_see: Callable[[ProcessIdentity], bool]) -> list[dict[str, object]]:
        """Return the open calls in JSON. Where their process cannot be seen, nothing is claimed."""
        return [
            call.describe(now, UNKNOWN if not can_see(call.holder) else RUNNING if call.is_sent else WAITING)
            for call in self.open
        ]

    def describe_lost(self, now: WallTime) -> list[dict[str, object]]:
        return [call.describe(now, LOST) for call in self.lost]


@value
class CallFilter:
    server: str | None = None
    tool: str | None = None  # a pattern, as in `wrap --tool`
    failed: bool = False
    timeouts: bool = False
    since: WallTime | None = None


_CALLS = RowMapper(LoggedCall, "calls")
_OPEN_CALLS = RowMapper(OpenCall, "open_calls")
_FORGET_OPEN = "DELETE FROM open_calls WHERE holder = ? AND number = ?"
# Literals, so that the index of failed calls is used.
_FAILED = f"outcome NOT IN {SUCCEEDED} AND outcome <> '{PENDING}'"


class Calls(Table):
    """Table of calls, in the order of their ends."""

    def add(
        self,
        calls: Sequence[LoggedCall],
        keep: int,
        opened: Sequence[OpenCall] = (),
        closed: Sequence[tuple[ProcessIdentity, int]] = (),
        *,
        wait_ms: int | None = 0,
    ) -> None:
        """Record calls and delete all but the newest `keep` that have ended; 0 is no limit.

        `closed` names open calls that have ended. Raises StoreBusy instead of waiting. `wait_ms`: see Database.write.
        """
        with self._database.write(durable=False, wait_ms=wait_ms) as transaction:
            _insert(transaction, _CALLS, "calls", calls)
            transaction.executemany(_FORGET_OPEN, [*closed, *((call.holder, call.number) for call in opened)])
            _insert(transaction, _OPEN_CALLS, "open_calls", opened)
            if keep:
                transaction.execute("DELETE FROM calls WHERE seq <= (SELECT max(seq) FROM calls) - ?", (keep,))

    def list(self, wanted: CallFilter, limit: int, *, slowest: bool = False) -> list[LoggedCall]:
        """Return the selected calls that have ended, the newest first or the slowest first."""
        check_count(limit, "limit")
        return self._read(_list_ended, wanted, limit, slowest)

    def look(
        self, wanted: CallFilter, limit: int, is_alive: Callable[[ProcessIdentity], bool], *, slowest: bool = False
    ) -> CallsNow:
        """Return the open calls of that server, tool and time, and at most `limit` of the selected ended ones."""
        check_count(limit, "limit")
        gone: set[ProcessIdentity] = set()
        for _ in range(MOST_LOOKS):
            with self._database.read() as transaction:
                conditions, values = _conditions(transaction, wanted, "open_calls")
                newest_first = f"{_where(conditions)}ORDER BY started_at DESC, number DESC"
                rows = _OPEN_CALLS.list(transaction, newest_first, values)
                ended = _list_ended(transaction, wanted, limit, slowest)
            now_gone = {holder for holder in {call.holder for call in rows} if not is_alive(holder)}
            if now_gone <= gone:  # otherwise a process has ended since, and may have recorded its calls before
                break
            gone |= now_gone
        running = tuple(call for call in rows if call.holder not in gone)
        return CallsNow(running, tuple(call for call in rows if call.holder in gone), tuple(ended))

    def count_outdated(self, before: WallTime | None, keep: int) -> int:
        """Return how many calls `forget_outdated` would delete."""
        outdated, values = _outdated(before, keep)
        return int(self._select(f"SELECT count(*) FROM calls WHERE {outdated}", values)[0][0])

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

    def forget_lost(self, before: WallTime | None, keep: int, is_alive: Callable[[ProcessIdentity], bool]) -> int:
        """Delete calls of processes that are gone: those that began before then, and all but the newest `keep`."""
        lost = self.list_outdated_lost(before, keep, is_alive)
        for at in range(0, len(lost), AT_ONCE):
            with self._database.write(durable=False) as transaction:
                transaction.executemany(_FORGET_OPEN, lost[at : at + AT_ONCE])
        return len(lost)

    def list_outdated_lost(
        self, before: WallTime | None, keep: int, is_alive: Callable[[ProcessIdentity], bool]
    ) -> Sequence[tuple[ProcessIdentity, int]]:
        """Return the calls that `forget_lost` would delete."""
        lost = self.look(CallFilter(), 0, is_alive).lost
        return [
            (call.holder, call.number)
            for place, call in enumerate(lost)
            if (before is not None and call.started_at < before) or 0 < keep <= place
        ]


def _insert(transaction: Transaction, mapper: RowMapper[Any], table: str, records: Sequence[object]) -> None:
    rows = [tuple(mapper.write(each).values()) for each in records]
    if rows:
        marks = ", ".join("?" * len(rows[0]))
        transaction.executemany(f"INSERT INTO {table} ({mapper.columns}) VALUES ({marks})", rows)


def _list_ended(transaction: Transaction, wanted: CallFilter, limit: int, slowest: bool) -> list[LoggedCall]:
    conditions, values = _conditions(transaction, wanted, "calls")
    if wanted.failed:
        conditions.append(_FAILED)
    if wanted.timeouts:
        conditions.append(f"outcome IN {TIMED_OUT}")
    order = "duration_ms DESC, seq DESC" if slowest else "seq DESC"
    return _CALLS.list(transaction, f"{_where(conditions)}ORDER BY {order} LIMIT ?", (*values, limit))


def _conditions(transaction: Transaction, wanted: CallFilter, table: str) -> tuple[list[str], list[object]]:
    """Return the conditions on columns that both tables have, and their values."""
    conditions: list[str] = []
    values: list[object] = []
    if wanted.server is not None:
        conditions.append("server = ?")
        values.append(wanted.server)
    if wanted.since is not None:
        conditions.append("started_at >= ?")
        values.append(wanted.since)
    if wanted.tool is not None:
        found = transaction.execute(f"SELECT DISTINCT tool FROM {table}").fetchall()
        tools = [tool for (tool,) in found if fnmatchcase(decode_text(tool), wanted.tool)]
        conditions.append(f"tool IN ({', '.join('?' * len(tools))})" if tools else "0 = 1")
        values += tools
    return conditions, values


def _where(conditions: Sequence[str]) -> str:
    return f"WHERE {' AND '.join(conditions)} " if conditions else ""


def _outdated(before: WallTime | None, keep: int) -> tuple[str, list[object]]:
    conditions, values = ["0 = 1"], list[object]()
    if before is not None:
        conditions.append("started_at < ?")
        values.append(before)
    if keep:
        conditions.append("seq <= (SELECT max(seq) FROM calls) - ?")
        values.append(keep)
    return " OR ".join(conditions), values
