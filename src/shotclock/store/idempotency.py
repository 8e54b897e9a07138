"""Idempotency keys: what was answered to a call, so that its repeat is answered and not run.

    begin ── Fresh ─────────── finish ── Finished, to every repeat
               │ holder died without a word
               └─ Interrupted ─ finish ── Finished
                              └ drop ─── Fresh again

Under one key nothing runs twice unless somebody says so. When the process that ran it is dead, nobody knows how far it
got: `begin` answers `Interrupted` to everyone who asks, until one of them settles it. Either `finish`, with the
envelope that says INTERRUPTED, side effects unknown, which then is the answer to all repeats; or `drop`, which is
right where the operation is idempotent or changes nothing, and lets the next `begin` run it anew.
The same key with other arguments is a `Mismatch`, whatever became of the first.

docs/design.md: R37.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.records import dataclass
from ..core.walltime import ProcessIdentity, WallTime
from . import schema as c
from .database import Database


@dataclass(frozen=True, slots=True)
class Fresh:
    """The key is new: the caller runs the call, and owes a `finish` or a `drop`, however it ends."""


@dataclass(frozen=True, slots=True)
class CallInProgress:
    """A living process runs the call."""

    holder: ProcessIdentity
    began_at: WallTime


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The process that ran the call died before it answered."""

    holder: ProcessIdentity
    """The dead one."""
    began_at: WallTime
    found_at: WallTime


@dataclass(frozen=True, slots=True)
class Finished:
    """The call has been answered."""

    envelope: dict[str, Any]
    began_at: WallTime
    finished_at: WallTime


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The key was used with other arguments."""

    began_at: WallTime
    digest: str
    """Of the arguments that the key was first used with."""


Beginning = Fresh | CallInProgress | Interrupted | Finished | Mismatch


class IdempotencyKeys:
    """Table of idempotency keys and the answers under them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(
        self,
        scope: str,
        key: str,
        digest: str,
        holder: ProcessIdentity,
        now: WallTime,
        is_alive: Callable[[ProcessIdentity], bool],
    ) -> Beginning:
        """Begin a call under a key, or return what became of the earlier one. `Fresh` goes to exactly one of all who
        ask. `is_alive` must not use the store."""
        name = (c.text_in(scope), c.text_in(key))
        with self._database.write() as connection:
            row = connection.execute(
                "SELECT digest, state, holder, began_at, ended_at, envelope FROM replies WHERE scope = ? AND key = ?",
                name,
            ).fetchone()
            if row is None:
                connection.execute(
                    "INSERT INTO replies (scope, key, digest, state, holder, began_at) "
                    "VALUES (?, ?, ?, 'running', ?, ?)",
                    (*name, c.text_in(digest), c.holder_in(holder), now.ms),
                )
                return Fresh()
            first_digest, state, first_holder = c.text_out(row[0]), row[1], c.holder_out(row[2])
            began_at, ended_at = WallTime(row[3]), c.maybe_time_out(row[4])
            if first_digest != digest:
                return Mismatch(began_at, first_digest)
            if state == "running":
                if is_alive(first_holder):
                    return CallInProgress(first_holder, began_at)
                connection.execute(
                    "UPDATE replies SET state = 'interrupted', ended_at = ? WHERE scope = ? AND key = ?",
                    (now.ms, *name),
                )
                return Interrupted(first_holder, began_at, now)
            assert ended_at is not None
            if state == "interrupted":
                return Interrupted(first_holder, began_at, ended_at)
            return Finished(c.json_out(row[5]), began_at, ended_at)

    def is_known(self, scope: str, key: str) -> bool:
        """Return whether the key was used before, so that nothing has to be run for it."""
        with self._database.read() as connection:
            found = connection.execute(
                "SELECT 1 FROM replies WHERE scope = ? AND key = ?", (c.text_in(scope), c.text_in(key))
            ).fetchone()
        return found is not None

    def finish(self, scope: str, key: str, envelope: Mapping[str, Any], now: WallTime) -> bool:
        """Record the answer and return whether it is now the answer: the first one stays."""
        text = c.json_in(envelope)
        with self._database.write() as connection:
            return connection.execute(
                "UPDATE replies SET state = 'finished', envelope = ?, ended_at = ? "
                "WHERE scope = ? AND key = ? AND state <> 'finished'",
                (text, now.ms, c.text_in(scope), c.text_in(key)),
            ).rowcount > 0  # fmt: skip

    def drop(self, scope: str, key: str) -> bool:
        """Delete the key, as if it had never been used: for calls that never began, or may be repeated. Return whether
        there was one."""
        with self._database.write() as connection:
            return connection.execute(
                "DELETE FROM replies WHERE scope = ? AND key = ?", (c.text_in(scope), c.text_in(key))
            ).rowcount > 0  # fmt: skip

    def forget_begun_before(
        self, before: WallTime, is_alive: Callable[[ProcessIdentity], bool], limit: int = 500
    ) -> int:
        """Delete the oldest keys, `limit` at most, and return how many. Those of calls that a living process still runs
        stay, however old."""
        with self._database.write() as connection:
            rows = connection.execute(
                "SELECT rowid, state, holder FROM replies WHERE began_at < ? ORDER BY began_at LIMIT ?",
                (before.ms, c.count_in(limit, "limit")),
            ).fetchall()
            old = [
                (rowid,) for rowid, state, holder in rows if state != "running" or not is_alive(c.holder_out(holder))
            ]
            connection.executemany("DELETE FROM replies WHERE rowid = ?", old)
        return len(old)
