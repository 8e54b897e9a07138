"""The audit trail: an entry for every change of a proposal or a token, written in the same transaction.

Each entry has the hash of the one before it, so that none can be removed, changed or moved unnoticed. `filed` is the
last entry that is known to be in the file beside the database (inbox/audit_file.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.clocks import WallTime
from ..core.proposal import canonical, digest
from ..core.value_types import as_dict, replace, value
from .database import Database, Transaction
from .rows import Codec, RowMapper
from .schema import json_text

NOTHING_BEFORE = "0" * 64


@value
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
        """Return the fields that the hash covers."""
        fields = {name: each for name, each in as_dict(self).items() if name != "hash"}
        return {**fields, "at": self.at.iso()}

    def line(self) -> str:
        """Return the entry as a line of the audit file."""
        return canonical({**self.content(), "hash": self.hash}) + "\n"


def _decode_details(column: str) -> dict[str, Any]:
    """Return the details. Invalid ones are returned as text, so that the trail can be verified further."""
    try:
        details = json.loads(column)
    except (ValueError, RecursionError):
        details = None
    return details if isinstance(details, dict) else {"unreadable": str(column)}


_ENTRIES = RowMapper(Entry, "audit", codecs={"details": Codec(json_text, _decode_details)})


def append(
    transaction: Transaction,
    now: WallTime,
    action: str,
    proposal: str | None,
    by: str,
    details: Mapping[str, Any],
) -> int:
    """Append an entry and return its number. Only inside a writing transaction, which excludes other writers."""
    last, previous = _read_last(transaction)
    entry = Entry(last + 1, now, action, proposal, by, dict(details), previous, "")
    _ENTRIES.insert(transaction, replace(entry, hash=digest(entry.content())))
    return entry.seq


def next_seq(transaction: Transaction) -> int:
    """Return the number of the next entry. Only inside a writing transaction."""
    return _read_last(transaction)[0] + 1


def _read_last(transaction: Transaction) -> tuple[int, str]:
    last = transaction.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return (0, NOTHING_BEFORE) if last is None else (last[0], last[1])


def digest_of_row(row: Sequence[object]) -> str:
    """Return the digest of a row, as the entry of its last change has it."""
    return digest([value.hex() if isinstance(value, bytes) else value for value in row])


class Audit:
    """Table of the audit trail."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def entries(self, after_seq: int = 0, limit: int = 500) -> list[Entry]:
        """Return the entries after this number, the oldest first."""
        with self._database.read() as transaction:
            return _entries(transaction, after_seq, limit)

    def of(self, proposal_id: str, limit: int = 500) -> list[Entry]:
        """Return the history of one proposal."""
        with self._database.read() as transaction:
            return entries_of(transaction, proposal_id, limit)

    def head(self) -> tuple[int, str]:
        """Return the number and the hash of the last entry, to be anchored elsewhere."""
        with self._database.read() as transaction:
            return _read_last(transaction)

    def list_unfiled(self, limit: int) -> list[Entry]:
        """Return the entries that may be missing in the file, the oldest first."""
        with self._database.read() as transaction:
            return _entries(transaction, _read_filed_seq(transaction), limit)

    def get_filed_seq(self) -> int:
        """Return the number of the last entry that is known to be in the file."""
        with self._database.read() as transaction:
            return _read_filed_seq(transaction)

    def mark_filed(self, seq: int) -> None:
        """Record that the entries up to this one are in the file, and on the disk."""
        with self._database.write(durable=False) as transaction:
            transaction.execute("UPDATE audit_filed SET seq = ? WHERE seq < ?", (seq, seq))


def entries_of(transaction: Transaction, proposal_id: str, limit: int | None = None) -> list[Entry]:
    """Return the entries of one proposal, the oldest first."""
    rest, values = "WHERE proposal = ? ORDER BY seq", (proposal_id,)
    if limit is None:
        return _ENTRIES.list(transaction, rest, values)
    return _ENTRIES.list(transaction, f"{rest} LIMIT ?", (*values, limit))


def _read_filed_seq(transaction: Transaction) -> int:
    return int(transaction.execute("SELECT seq FROM audit_filed").fetchone()[0])


def _entries(transaction: Transaction, after_seq: int, limit: int) -> list[Entry]:
    return _ENTRIES.list(transaction, "WHERE seq > ? ORDER BY seq LIMIT ?", (after_seq, limit))
