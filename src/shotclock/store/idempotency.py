"""Idempotency keys: the answer of a call, so that a repeat is answered and not run.

    begin ── Fresh ─────────── finish ── Finished, to every repeat
               │ the holder died without an answer
               └─ Interrupted ─ finish ── Finished
                              └ drop ─── Fresh again

Nothing runs twice under one key. When the process of the first call dies, its progress is unknown: `begin` returns
`Interrupted` to every caller until one of them settles it. Either `finish` with the envelope INTERRUPTED, side effects
unknown, which then answers all repeats; or `drop`, if the operation is idempotent or changes nothing.
The same key with other arguments is a `Mismatch`, however the first call ended.

docs/design.md: R37.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.clocks import ProcessIdentity, WallTime
from ..core.value_types import value
from .database import Database
from .rows import RowMapper
from .schema import check_count, decode_process, json_text


@value
class Fresh:
    """The key is new: the caller runs the call, and must `finish` or `drop` it."""


@value
class CallInProgress:
    """A living process runs the call."""

    holder: ProcessIdentity
    began_at: WallTime


@value
class Interrupted:
    """The process that ran the call died before it answered."""

    holder: ProcessIdentity
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
    """Digest of the arguments that the key was first used with."""


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
        """Begin a call under a key, or return the state of the earlier one. Exactly one caller gets `Fresh`.

        `is_alive` must not use the store.
        """
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
            ended_at = first.ended_at or now
            if first.envelope is None:
                return Interrupted(first.holder, first.began_at, ended_at)
            return Finished(first.envelope, first.began_at, ended_at)

    def is_known(self, scope: str, key: str) -> bool:
        """Return whether the key was used before."""
        with self._database.read() as transaction:
            found = transaction.execute("SELECT 1 FROM replies WHERE scope = ? AND key = ?", (scope, key))
            return found.fetchone() is not None

    def finish(self, scope: str, key: str, envelope: Mapping[str, Any], now: WallTime) -> bool:
        """Record the answer, unless there is one, and return whether it was recorded."""
        text = json_text(envelope)
        with self._database.write() as transaction:
            finished = transaction.execute(
                "UPDATE replies SET state = 'finished', envelope = ?, ended_at = ? "
                "WHERE scope = ? AND key = ? AND state <> 'finished'",
                (text, now, scope, key),
            )
            return finished.rowcount > 0

    def drop(self, scope: str, key: str) -> bool:
        """Delete the key of a call that never began or may be repeated. Return whether there was one."""
        with self._database.write() as transaction:
            return transaction.execute("DELETE FROM replies WHERE scope = ? AND key = ?", (scope, key)).rowcount > 0

    def forget_begun_before(
        self, before: WallTime, is_alive: Callable[[ProcessIdentity], bool], limit: int = 500
    ) -> int:
        """Delete the oldest keys, `limit` at most, and return their number. Keys of running calls stay."""
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
