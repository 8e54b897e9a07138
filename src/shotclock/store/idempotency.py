"""Idempotency keys and named locks.

A key has the answer of a call, so that a repeat is answered and not run:

    begin ── Fresh ─────────── finish ── Finished, to every repeat
               │ the holder died without an answer
               └─ Interrupted ─ finish ── Finished
                              └ drop ─── Fresh again

Nothing runs twice under one key. When the process of the first call dies, its progress is unknown: `begin` returns
`Interrupted` to every caller until one of them settles it. Either `finish` with the envelope INTERRUPTED, side effects
unknown, which then answers all repeats; or `drop`, if the operation is idempotent or changes nothing.
The same key with other arguments is a `Mismatch`, however the first call ended.

Contract (AGENTS.md): a key's first answer is its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.limits import ProcessIdentity, WallTime
from ..core.value_types import JsonObject, value
from ._database import CLOCK_SLACK_MS, Table, Transaction, check_count, decode_process, json_text
from ._rows import RowMapper


@value
class Fresh:
    """The key is new: the caller runs the call, and must `finish` or `drop` it."""


@value
class CallInProgress:
    """A living process runs the call."""


@value
class Interrupted:
    began_at: WallTime


@value
class Finished:
    envelope: JsonObject
    finished_at: WallTime


@value
class Mismatch:
    began_at: WallTime


Beginning = Fresh | CallInProgress | Interrupted | Finished | Mismatch


@value
class Reply:
    digest: str
    state: str
    holder: ProcessIdentity
    began_at: WallTime
    ended_at: WallTime | None = None
    envelope: JsonObject | None = None


_REPLIES = RowMapper(Reply, "replies")


class IdempotencyKeys(Table):
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
                _REPLIES.insert(transaction, Reply(digest, "running", holder, now), scope=scope, key=key)
                return Fresh()
            if first.digest != digest:
                return Mismatch(first.began_at)
            if first.state == "running":
                if is_alive(first.holder):
                    return CallInProgress()
                transaction.execute(
                    "UPDATE replies SET state = 'interrupted', ended_at = ? WHERE scope = ? AND key = ?",
                    (now, scope, key),
                )
                return Interrupted(first.began_at)
            if first.envelope is None:
                return Interrupted(first.began_at)
            return Finished(first.envelope, first.ended_at or now)

    def is_known(self, scope: str, key: str) -> bool:
        return bool(self._select("SELECT 1 FROM replies WHERE scope = ? AND key = ?", (scope, key)))

    def finish(self, scope: str, key: str, envelope: Mapping[str, Any], now: WallTime) -> bool:
        """Record the answer, unless there is one, and return whether it was recorded."""
        query = (
            "UPDATE replies SET state = 'finished', envelope = ?, ended_at = ? "
            "WHERE scope = ? AND key = ? AND state <> 'finished'"
        )
        return self._execute(query, (json_text(envelope), now, scope, key)) > 0

    def drop(self, scope: str, key: str) -> bool:
        """Delete the key of a call that never began or may be repeated. Return whether there was one."""
        return self._execute("DELETE FROM replies WHERE scope = ? AND key = ?", (scope, key)) > 0

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


@value
class Lock:
    """One slot of a named lock, held under a token."""

    name: str
    token: str
    holder: ProcessIdentity
    label: str  # the work of the holder, for those who wait
    acquired_at: WallTime
    expires_at: WallTime | None  # the end of the lease. None: as long as the holder lives


_LOCKS = RowMapper(Lock, "locks")


class Locks(Table):
    """Table of locks with a number of slots, between all processes that share the store.

    A lock belongs to a token and to a process; when the process is dead, the next caller takes its slot in the same
    transaction. There is no waiting here: the caller decides how long to retry. Locks need not survive a power loss
    (nor would their holders), so acquiring one does not wait for the disk.
    """

    def acquire(
        self,
        name: str,
        *,
        slots: int = 1,
        holder: ProcessIdentity,
        label: str,
        token: str,
        now: WallTime,
        is_alive: Callable[[ProcessIdentity], bool],
        lease_ms: int | None = None,
    ) -> Lock | None:
        """Acquire a slot and return None, or return the living lock in the way that is oldest.

        Repeating it with a token that holds a slot renews the lease. `is_alive` must not use the store.
        """
        if check_count(slots, "slots") < 1:
            raise ValueError("a lock needs at least one slot")
        if not token:
            raise ValueError("a lock needs a token")
        expires_at = None if lease_ms is None else now + check_count(lease_ms, "lease_ms")
        # A waiting caller retries often. A look that ends in a conflict does not delay writers.
        with self._database.read() as transaction:
            locks, is_set_back = _of_name(transaction, name), _set_back_ms(transaction, now) > 0
        in_the_way, _ = _weigh(locks, slots, token, now, is_alive)
        if in_the_way is not None and not is_set_back:
            return in_the_way
        with self._database.write(durable=False) as transaction:
            if by_ms := _set_back_ms(transaction, now):  # no lease lasts longer for that
                query = "UPDATE locks SET acquired_at = acquired_at - ?, expires_at = expires_at - ?"
                transaction.execute(query, (by_ms, by_ms))
            in_the_way, vacant = _weigh(_of_name(transaction, name), slots, token, now, is_alive)
            if in_the_way is not None:
                return in_the_way
            transaction.executemany("DELETE FROM locks WHERE token = ?", [(lock.token,) for lock in vacant])
            mine = _LOCKS.get(transaction, "WHERE token = ?", (token,))
            if mine is None:
                _LOCKS.insert(transaction, Lock(name, token, holder, label, now, expires_at))
            elif mine.name != name or mine.holder != holder:
                raise ValueError(f"the token {token!r} holds another lock: {mine.name!r}")
            else:
                transaction.execute("UPDATE locks SET expires_at = ? WHERE token = ?", (expires_at, token))
        return None

    def release(self, token: str, *, wait_ms: int | None = None) -> bool:
        """Release the slot of this token and return whether it was held. `wait_ms`: see Database.write."""
        return self._execute("DELETE FROM locks WHERE token = ?", (token,), durable=False, wait_ms=wait_ms) > 0

    def list(self, name: str | None = None) -> tuple[Lock, ...]:
        """Return the locks, the oldest first, including those of dead holders."""
        with self._database.read() as transaction:
            if name is not None:
                return _of_name(transaction, name)
            return tuple(_LOCKS.list(transaction, "ORDER BY seq"))


def _set_back_ms(transaction: Transaction, now: WallTime) -> int:
    """Return by how much the clock was set back since the last lock was taken; 0 if it was not."""
    (last_at,) = transaction.execute("SELECT coalesce(max(acquired_at), 0) FROM locks").fetchone()
    return last_at - now.ms if last_at - now.ms > CLOCK_SLACK_MS else 0


def _weigh(
    locks: tuple[Lock, ...], slots: int, token: str, now: WallTime, is_alive: Callable[[ProcessIdentity], bool]
) -> tuple[Lock | None, list[Lock]]:
    """Return the oldest living lock, if there is no slot for this token, and the locks that are dead or expired."""
    if any(lock.token == token for lock in locks):
        return None, []
    vacant: list[Lock] = []
    taken: list[Lock] = []
    for lock in locks:
        has_expired = lock.expires_at is not None and now >= lock.expires_at
        (vacant if has_expired or not is_alive(lock.holder) else taken).append(lock)
    return (taken[0] if len(taken) >= slots else None), vacant


def _of_name(transaction: Transaction, name: str) -> tuple[Lock, ...]:
    return tuple(_LOCKS.list(transaction, "WHERE name = ? ORDER BY seq", (name,)))
