"""Places of runs in their groups: of the runs of a group one is under way, and the others wait in their order.

A place belongs to a run and to a process. It counts while that process lives, and while the run is parked, until its
deadline. The row of a dead place is deleted by the next run that gets the group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

from ..core.limits import ProcessIdentity, WallTime
from ..core.value_types import value
from ._database import Table, Transaction, decode_process, decode_text
from ._rows import RowMapper


class OnConflict(Enum):
    WAIT = "wait"
    CANCEL = "cancel"
    REFUSE = "refuse"


@value
class GroupPlace:
    group_name: str
    run: str
    holder: ProcessIdentity
    is_held: bool  # the run may be under way. Otherwise it waits
    replaced_by: str | None = None  # the newer run that made this one give up waiting


@value
class Blocker:
    run: str
    holder: ProcessIdentity
    is_held: bool
    is_parked: bool


@value
class GroupAnswer:
    """The answer to a run that asks for its group. It has the group if there is neither a blocker nor a replacement."""

    blocker: Blocker | None = None
    replaced_by: str | None = None


class PlaceTaken(Exception):
    """Another living process has the place of this run."""

    def __init__(self, holder: ProcessIdentity) -> None:
        super().__init__(holder.pid)
        self.holder = holder


_PLACES = RowMapper(GroupPlace, "group_places")
# With the state of the run: a parked one needs no process, and counts until its deadline.
_OTHERS = (
    "SELECT p.run, p.holder, p.is_held, r.parked_at IS NOT NULL, r.deadline_at IS NULL OR r.deadline_at > ? "
    "FROM group_places p LEFT JOIN runs r ON r.id = p.run AND r.ended_at IS NULL "
    "WHERE p.group_name = ? AND p.run <> ? AND p.replaced_by IS NULL AND (p.is_held OR p.seq < ?) "
    "ORDER BY p.is_held DESC, p.seq"
)
_LAST = 2**62  # behind every other place


class GroupPlaces(Table):
    def ask(
        self,
        wanted: GroupPlace,
        on_conflict: OnConflict,
        now: WallTime,
        is_alive: Callable[[ProcessIdentity], bool],
        inside: Collection[str] = (),
    ) -> GroupAnswer:
        """Ask for the group of a run, the first time and again: take it, wait for it, or learn that it is refused.

        `inside` has the runs around a nested one: it shares the group that one of them holds. With `CANCEL` the first
        question makes the runs that wait give up. `is_alive` must not use the store. Raises PlaceTaken.
        """
        with self._database.read() as transaction:  # a waiting run asks often, and must not delay writers
            mine = _PLACES.get(transaction, "WHERE run = ?", (wanted.run,))
            if mine is not None and mine.holder == wanted.holder:
                if mine.replaced_by is not None or mine.is_held:
                    return GroupAnswer(None, mine.replaced_by)
                if (blocker := _find_blocker(transaction, wanted, now, is_alive)) is not None:
                    return GroupAnswer(blocker)
        with self._database.write(durable=False) as transaction:
            return _decide(transaction, wanted, on_conflict, now, is_alive, inside)

    def leave(self, run_id: str, holder: ProcessIdentity) -> None:
        self._execute("DELETE FROM group_places WHERE run = ? AND holder = ?", (run_id, holder), durable=False)

    def list(self, group_name: str) -> tuple[GroupPlace, ...]:
        """Return the places of a group in their order, with those of dead processes."""
        return tuple(self._read(_PLACES.list, "WHERE group_name = ? ORDER BY seq", (group_name,)))


def _decide(
    transaction: Transaction,
    wanted: GroupPlace,
    on_conflict: OnConflict,
    now: WallTime,
    is_alive: Callable[[ProcessIdentity], bool],
    inside: Collection[str],
) -> GroupAnswer:
    mine = _PLACES.get(transaction, "WHERE run = ?", (wanted.run,))
    if mine is not None and (mine.replaced_by is not None or mine.group_name != wanted.group_name):
        transaction.execute("DELETE FROM group_places WHERE run = ?", (wanted.run,))  # of an earlier process
        mine = None
    if mine is not None and mine.holder != wanted.holder and is_alive(mine.holder):
        raise PlaceTaken(mine.holder)
    if mine is not None and mine.is_held:
        transaction.execute("UPDATE group_places SET holder = ? WHERE run = ?", (wanted.holder, wanted.run))
        return GroupAnswer()
    blocker = _find_blocker(transaction, wanted, now, is_alive)
    if blocker is not None and blocker.is_held and blocker.run in inside:
        return GroupAnswer()
    if blocker is not None and mine is None and on_conflict is OnConflict.REFUSE:
        return GroupAnswer(blocker)
    if blocker is not None and mine is None and on_conflict is OnConflict.CANCEL:
        query = "UPDATE group_places SET replaced_by = ? WHERE group_name = ? AND NOT is_held AND replaced_by IS NULL"
        transaction.execute(query, (wanted.run, wanted.group_name))
        blocker = _find_blocker(transaction, wanted, now, is_alive)
    if mine is None:
        _PLACES.insert(transaction, wanted)
    else:
        transaction.execute("UPDATE group_places SET holder = ? WHERE run = ?", (wanted.holder, wanted.run))
    if blocker is not None:
        return GroupAnswer(blocker)
    # The places of dead processes, and all that are held: none of those counts any more.
    others = _PLACES.list(transaction, "WHERE group_name = ? AND run <> ?", (wanted.group_name, wanted.run))
    dead = [(place.run,) for place in others if place.is_held or not is_alive(place.holder)]
    transaction.executemany("DELETE FROM group_places WHERE run = ?", dead)
    transaction.execute("UPDATE group_places SET is_held = 1 WHERE run = ?", (wanted.run,))
    return GroupAnswer()


def _find_blocker(
    transaction: Transaction, wanted: GroupPlace, now: WallTime, is_alive: Callable[[ProcessIdentity], bool]
) -> Blocker | None:
    """Return the run that has the group, or else the first one that waits before this one."""
    row = transaction.execute("SELECT seq FROM group_places WHERE run = ?", (wanted.run,)).fetchone()
    before = _LAST if row is None else row[0]
    others = transaction.execute(_OTHERS, (now, wanted.group_name, wanted.run, before)).fetchall()
    for run, holder, is_held, is_parked, has_time in others:
        process = decode_process(holder)
        if has_time if is_parked else is_alive(process):
            return Blocker(decode_text(run), process, bool(is_held), bool(is_parked))
    return None
