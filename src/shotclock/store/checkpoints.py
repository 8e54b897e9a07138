"""Checkpoints: how far some work got, in its own form, so that the next attempt does not begin at nothing.

A checkpoint that was saved is on the disk. Whether it fits today's input, its fingerprint tells whoever loads it.
"""

from __future__ import annotations

from typing import Any

from ..core.records import dataclass
from ..core.walltime import WallTime
from . import columns as c
from .database import Database


@dataclass(frozen=True, slots=True)
class Checkpoint:
    key: str
    fingerprint: str
    state: Any
    saved_at: WallTime


class Checkpoints:
    """Table of checkpoints, one for each key."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, key: str, fingerprint: str, state: object, now: WallTime) -> None:
        """Replace the checkpoint of this key, all of it or nothing. `state` is any JSON value."""
        text = c.json_in(state)
        with self._database.write() as connection:
            connection.execute(
                "INSERT INTO checkpoints (key, fingerprint, state, saved_at) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET fingerprint = excluded.fingerprint, state = excluded.state, "
                "saved_at = excluded.saved_at",
                (c.text_in(key), c.text_in(fingerprint), text, now.ms),
            )

    def load(self, key: str) -> Checkpoint | None:
        """Return the checkpoint of this key, or None."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT key, fingerprint, state, saved_at FROM checkpoints WHERE key = ?", (c.text_in(key),)
            ).fetchone()
        if row is None:
            return None
        return Checkpoint(c.text_out(row[0]), c.text_out(row[1]), c.json_out(row[2]), WallTime(row[3]))

    def clear(self, key: str) -> bool:
        """Delete the checkpoint of this key. Return whether there was one."""
        with self._database.write() as connection:
            return connection.execute("DELETE FROM checkpoints WHERE key = ?", (c.text_in(key),)).rowcount > 0

    def forget_saved_before(self, before: WallTime, limit: int = 500) -> int:
        """Delete the oldest checkpoints, `limit` at most, and return how many. Those of jobs that are still active
        stay, however old."""
        with self._database.write() as connection:
            return connection.execute(
                "DELETE FROM checkpoints WHERE key IN (SELECT key FROM checkpoints WHERE saved_at < ? AND key NOT IN "
                "(SELECT key FROM jobs WHERE ended_at IS NULL) ORDER BY saved_at LIMIT ?)",
                (before.ms, c.count_in(limit, "limit")),
            ).rowcount
