"""The audit trail: an entry for every change of a proposal or a token, written in the same transaction.

Each entry carries the hash of the one before it, so none can be taken out, changed or put elsewhere without a trace.
`filed` is how far the entries are known to be in the file beside the database as well (inbox/audit_file.py).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.proposal import canonical, digest
from ..core.records import dataclass
from ..core.walltime import WallTime
from . import schema as c
from .database import Database

NOTHING_BEFORE = "0" * 64
_COLUMNS = "seq, at, action, proposal, by, details, previous, hash"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the audit trail, chained to the one before it by `previous`."""

    seq: int
    at: WallTime
    action: str
    proposal: str | None
    by: str
    details: dict[str, Any]
    previous: str
    hash: str

    def content(self) -> dict[str, Any]:
        """Return all that the hash is made of."""
        return {
            "seq": self.seq,
            "at": self.at.iso(),
            "action": self.action,
            "proposal": self.proposal,
            "by": self.by,
            "details": self.details,
            "previous": self.previous,
        }

    def line(self) -> str:
        """Return the entry as a line of the audit file."""
        return canonical({**self.content(), "hash": self.hash}) + "\n"


def append(
    connection: sqlite3.Connection,
    now: WallTime,
    action: str,
    proposal: str | None,
    by: str,
    details: Mapping[str, Any],
) -> int:
    """Append an entry and return its number. Only inside a writing transaction, which makes us alone with the end of
    the chain."""
    seq, previous = _read_last(connection)
    seq += 1
    entry = Entry(seq, now, action, proposal, by, dict(details), previous, "")
    connection.execute(
        f"INSERT INTO audit ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (seq, now.ms, action, proposal, c.text_in(by), c.json_in(entry.details), previous, digest(entry.content())),
    )
    return seq


def next_seq(connection: sqlite3.Connection) -> int:
    """Return the number of the next entry. Only inside a writing transaction."""
    return _read_last(connection)[0] + 1


def _read_last(connection: sqlite3.Connection) -> tuple[int, str]:
    last = connection.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return (0, NOTHING_BEFORE) if last is None else (last[0], last[1])


def digest_of_row(row: Sequence[object]) -> str:
    """Return the digest of all that is kept of something, as the entry of its last change has it."""
    return digest([value.hex() if isinstance(value, bytes) else value for value in row])


class Audit:
    """Table of the audit trail."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def entries(self, after_seq: int = 0, limit: int = 500) -> list[Entry]:
        """Return the entries after this number, the oldest first."""
        with self._database.read() as connection:
            return _entries(connection, after_seq, limit)

    def of(self, proposal_id: str, limit: int = 500) -> list[Entry]:
        """Return the history of one proposal."""
        with self._database.read() as connection:
            return entries_of(connection, proposal_id, limit)

    def head(self) -> tuple[int, str]:
        """Return the number and the hash of the last entry: whoever keeps them elsewhere can tell later what was
        there."""
        with self._database.read() as connection:
            return _read_last(connection)

    def list_unfiled(self, limit: int) -> list[Entry]:
        """Return the entries that are not known to be in the file, the oldest first."""
        with self._database.read() as connection:
            return _entries(connection, _read_filed_seq(connection), limit)

    def get_filed_seq(self) -> int:
        """Return the number of the last entry that is known to be in the file."""
        with self._database.read() as connection:
            return _read_filed_seq(connection)

    def mark_filed(self, seq: int) -> None:
        """Record that everything up to this one is in the file, and on the disk."""
        with self._database.write(durable=False) as connection:
            connection.execute("UPDATE audit_filed SET seq = max(seq, ?)", (seq,))


def entries_of(connection: sqlite3.Connection, proposal_id: str, limit: int = -1) -> list[Entry]:
    query = f"SELECT {_COLUMNS} FROM audit WHERE proposal = ? ORDER BY seq LIMIT ?"
    return [_entry(row) for row in connection.execute(query, (c.text_in(proposal_id), limit))]


def _read_filed_seq(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT seq FROM audit_filed").fetchone()[0])


def _entries(connection: sqlite3.Connection, after_seq: int, limit: int) -> list[Entry]:
    query = f"SELECT {_COLUMNS} FROM audit WHERE seq > ? ORDER BY seq LIMIT ?"
    return [_entry(row) for row in connection.execute(query, (after_seq, limit))]


def _entry(row: tuple[Any, ...]) -> Entry:
    seq, at, action, proposal, by, details, previous, hash = row
    return Entry(seq, WallTime(at), action, proposal, c.text_out(by), c.json_out(details), previous, hash)
