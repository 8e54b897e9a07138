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

from ..core.clocks import ProcessIdentity, WallTime
from ..core.value_types import value
from .rows import Database, RowMapper, check_count, decode_process, json_text


@value
class Fresh:
    """The key is new: the caller runs the call, and owes a `finish` or a `drop`, however it ends."""


@value
class CallInProgress:
    """A living process runs the call."""

    holder: ProcessIdentity
    began_at: WallTime


@value
class Interrupted:
    """The process that ran the call died before it answered."""

    holder: ProcessIdentity
    """The dead one."""
    began_at: WallTime
    found_at: WallTime


@value
class Finished:
    """The call has been answered."""

    envelope: dict[str, Any]
    began_at: WallTime
    finished_at: WallTime


@value
class Mismatch:
    """The key was used with other arguments."""

    began_at: WallTime
    digest: str
    """Of the arguments that the key was first used with."""


Beginning = Fresh | CallInProgress | Interrupted | Finished | Mismatch


@value
class _Reply:
    """Row of a key: its call, and the answer to it."""

    digest: str
    state: str
    holder: ProcessIdentity
    began_at: WallTime
    ended_at: WallTime | None = None
    envelope: dict[str, Any] | None = None


_REPLIES = RowMapper(_Reply, "replies")


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
        with self._database.write() as transaction:
            first = _REPLIES.get(transaction, "WHERE scope = ? AND key = ?", (scope, key))
            if first is None:
                _REPLIES.insert(transaction, _Reply(digest, "running", holder, now), scope=scope, key=key)
                return Fresh()
            if first.digest != digest:
                return Mismatch(first.began_at, first.digest)
            if first.state == "running":
                if is_alive(first.holder):
                    return CallInProgress(first.holder, first.began_at)
                transaction.execute(
                    "UPDATE replies SET state = 'interrupted', ended_at = ? WHERE scope = ? AND key = ?",
                    (now, scope, key),
                )
                return Interrupted(first.holder, first.began_at, now)
            assert first.ended_at is not None
            if first.state == "interrupted":
                return Interrupted(first.holder, first.began_at, first.ended_at)
            assert first.envelope is not None
            return Finished(first.envelope, first.began_at, first.ended_at)

    def is_known(self, scope: str, key: str) -> bool:
        """Return whether the key was used before, so that nothing has to be run for it."""
        with self._database.read() as transaction:
            found = transaction.execute("SELECT 1 FROM replies WHERE scope = ? AND key = ?", (scope, key))
            return found.fetchone() is not None

    def finish(self, scope: str, key: str, envelope: Mapping[str, Any], now: WallTime) -> bool:
        """Record the answer and return whether it is now the answer: the first one stays."""
        text = json_text(envelope)
        with self._database.write() as transaction:
            return transaction.execute(
                "UPDATE replies SET state = 'finished', envelope = ?, ended_at = ? "
                "WHERE scope = ? AND key = ? AND state <> 'finished'",
                (text, now, scope, key),
            ).rowcount > 0  # fmt: skip

    def drop(self, scope: str, key: str) -> bool:
        """Delete the key, as if it had never been used: for calls that never began, or may be repeated. Return whether
        there was one."""
        with self._database.write() as transaction:
            return transaction.execute("DELETE FROM replies WHERE scope = ? AND key = ?", (scope, key)).rowcount > 0

    def forget_begun_before(
        self, before: WallTime, is_alive: Callable[[ProcessIdentity], bool], limit: int = 500
    ) -> int:
        """Delete the oldest keys, `limit` at most, and return how many. Those of calls that a living process still runs
        stay, however old."""
        with self._database.write() as transaction:
            rows = transaction.execute(
                "SELECT scope, key, state, holder FROM replies WHERE began_at < ? ORDER BY began_at LIMIT ?",
                (before, check_count(limit, "limit")),
            ).fetchall()
            old = [
                (scope, key)
                for scope, key, state, holder in rows
                if state != "running" or not is_alive(decode_process(holder))
            ]
            transaction.executemany("DELETE FROM replies WHERE scope = ? AND key = ?", old)
        return len(old)
