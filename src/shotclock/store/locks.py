"""Named locks with a number of slots, between all processes that share the store.

A lock belongs to a token and to a process; when the process is dead, the next caller takes its slot in the same
transaction. There is no waiting here: the caller decides how long to retry. Locks need not survive a
power loss (nor would their holders), so acquiring one does not wait for the disk.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core.clocks import ProcessIdentity, WallTime
from ..core.value_types import value
from .database import Database, Transaction
from .rows import RowMapper
from .schema import check_count


@value
class Lock:
    """One slot of a named lock, held under a token."""

    name: str
    token: str
    holder: ProcessIdentity
    label: str
    """The work of the holder, for those who wait."""
    acquired_at: WallTime
    expires_at: WallTime | None
    """The end of the lease. None: as long as the holder lives."""

    def age_ms(self, now: WallTime) -> int:
        return now.since_ms(self.acquired_at)

    def has_expired(self, now: WallTime) -> bool:
        return self.expires_at is not None and now >= self.expires_at


_LOCKS = RowMapper(Lock, "locks")


class Locks:
    """Table of locks."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
            locks = _of_name(transaction, name)
        in_the_way, _ = _weigh(locks, slots, token, now, is_alive)
        if in_the_way is not None:
            return in_the_way
        with self._database.write(durable=False) as transaction:
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

    def release(self, token: str) -> bool:
        """Release the slot of this token and return whether it was held."""
        with self._database.write(durable=False) as transaction:
            return transaction.execute("DELETE FROM locks WHERE token = ?", (token,)).rowcount > 0

    def list(self, name: str | None = None) -> tuple[Lock, ...]:
        """Return the locks, the oldest first, including those of dead holders."""
        with self._database.read() as transaction:
            if name is not None:
                return _of_name(transaction, name)
            return tuple(_LOCKS.list(transaction, "ORDER BY seq"))


def _weigh(
    locks: tuple[Lock, ...], slots: int, token: str, now: WallTime, is_alive: Callable[[ProcessIdentity], bool]
) -> tuple[Lock | None, list[Lock]]:
    """Return the oldest living lock, if there is no slot for this token, and the locks that are dead or expired."""
    if any(lock.token == token for lock in locks):
        return None, []
    vacant: list[Lock] = []
    taken: list[Lock] = []
    for lock in locks:
        (vacant if lock.has_expired(now) or not is_alive(lock.holder) else taken).append(lock)
    return (taken[0] if len(taken) >= slots else None), vacant


def _of_name(transaction: Transaction, name: str) -> tuple[Lock, ...]:
    return tuple(_LOCKS.list(transaction, "WHERE name = ? ORDER BY seq", (name,)))
