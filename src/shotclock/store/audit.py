"""The audit trail, and tokens.

The trail has an entry for every change of a proposal or a token, written in the same transaction. Each entry
has the hash of the one before it, so that none can be removed, changed or moved unnoticed. `filed` is the last entry
that is known to be in the file beside the database (people/audit_file.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..core.errors import Failure
from ..core.limits import WallTime
from ..core.proposal import canonical, digest
from ..core.value_types import JsonObject, as_dict, replace, value
from ._database import Table, Transaction, json_text
from ._rows import Codec, RowMapper

NOTHING_BEFORE = "0" * 64


@value
class Entry:
    """One entry of the audit trail, chained to the one before it by `previous`."""

    seq: int
    at: WallTime
    action: str
    proposal: str | None
    by: str
    details: JsonObject
    previous: str
    hash: str

    def content(self) -> JsonObject:
        fields = {name: each for name, each in as_dict(self).items() if name != "hash"}
        return {**fields, "at": self.at.iso()}

    def line(self) -> str:
        return canonical({**self.content(), "hash": self.hash}) + "\n"


def _decode_details(column: str) -> JsonObject:
    """Return the details. Invalid ones are returned as text, so that the trail can be verified further."""
    try:
        details = json.loads(column)
    except (ValueError, RecursionError):
        details = None
    return details if isinstance(details, dict) else {"unreadable": str(column)}


_ENTRIES = RowMapper(Entry, "audit", codecs={"details": Codec(json_text, _decode_details)})


def append(
    transaction: Transaction, now: WallTime, action: str, proposal: str | None, by: str, details: Mapping[str, Any]
) -> int:
    """Append an entry and return its number. Only inside a writing transaction, which excludes other writers."""
    last = _read_last(transaction)
    entry = Entry(last.seq + 1, now, action, proposal, by, dict(details), last.hash, "")
    _ENTRIES.insert(transaction, replace(entry, hash=digest(entry.content())))
    return entry.seq


def next_seq(transaction: Transaction) -> int:
    """Return the number of the next entry. Only inside a writing transaction."""
    return _read_last(transaction).seq + 1


def _read_last(transaction: Transaction) -> Head:
    last = transaction.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return Head(0, NOTHING_BEFORE) if last is None else Head(*last)


def digest_of_row(row: Sequence[object]) -> str:
    """Return the digest of a row, as the entry of its last change has it."""
    return digest([value.hex() if isinstance(value, bytes) else value for value in row])


class Head(NamedTuple):
    seq: int
    hash: str


class Audit(Table):
    def entries(self, after_seq: int = 0, limit: int = 500) -> list[Entry]:
        return self._read(_ENTRIES.list, "WHERE seq > ? ORDER BY seq LIMIT ?", (after_seq, limit))

    def of(self, proposal_id: str, limit: int = 500) -> list[Entry]:
        return self._read(_ENTRIES.list, "WHERE proposal = ? ORDER BY seq LIMIT ?", (proposal_id, limit))

    def head(self) -> Head:
        """Return the last entry, to be anchored elsewhere."""
        return self._read(_read_last)

    def list_unfiled(self, limit: int) -> list[Entry]:
        """Return the entries that may be missing in the file, the oldest first."""
        with self._database.read() as transaction:
            rest = "WHERE seq > (SELECT seq FROM audit_filed) ORDER BY seq LIMIT ?"
            return _ENTRIES.list(transaction, rest, (limit,))

    def get_filed_seq(self) -> int:
        """Return the number of the last entry that is known to be in the file."""
        return int(self._select("SELECT seq FROM audit_filed")[0][0])

    def mark_filed(self, seq: int) -> None:
        self._execute("UPDATE audit_filed SET seq = ? WHERE seq < ?", (seq, seq), durable=False)


def entries_of(transaction: Transaction, proposal_id: str) -> list[Entry]:
    return _ENTRIES.list(transaction, "WHERE proposal = ? ORDER BY seq", (proposal_id,))


# The columns that the digest in the last audit entry of a token covers. With others, `verify` would report every older
# token as changed.
_ROW = "id, name, role, digest, created_at, expires_at, revoked_at"


@value
class Token:
    id: str
    name: str
    role: str
    digest: str
    created_at: WallTime
    expires_at: WallTime | None = None
    revoked_at: WallTime | None = None

    def is_active(self, now: WallTime) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


_TOKENS = RowMapper(Token, "tokens")


class Tokens(Table):
    """Table of tokens of agents and operators, and of browser sessions that were ended. Only a token's hash is stored.

    A token is active until it is revoked or expires. A name is unique among active tokens, because proposals belong to
    a name; a token that follows a revoked one of the same name owns its proposals.
    """

    def add(self, token: Token, by: str) -> None:
        """Record a token. Raises Failure if an active one has that name."""
        with self._database.write() as transaction:
            of_that_name = _TOKENS.list(transaction, "WHERE name = ?", (token.name,))
            if any(there.is_active(token.created_at) for there in of_that_name):
                message = f"there is an active token named {token.name!r}: revoke it first, or choose another name"
                raise Failure("ARG_ERROR", message, context={"errors": [{"field": "name", "message": message}]})
            _TOKENS.insert(transaction, token)
            expires_at = None if token.expires_at is None else token.expires_at.iso()
            details = {"token": token.id, "name": token.name, "role": token.role, "expires_at": expires_at}
            details["row"] = _row_digest(transaction, token.id)
            append(transaction, token.created_at, "token-issued", None, by, details)

    def get(self, id: str) -> Token | None:
        return self._read(_TOKENS.get, "WHERE id = ?", (id,))

    def revoke(self, id_or_name: str, by: str, now: WallTime) -> list[Token]:
        """Revoke the token of that id, or all of that name. Return those that were not revoked before."""
        values = (id_or_name, id_or_name)
        with self._database.write() as transaction:
            found = _TOKENS.list(transaction, "WHERE (id = ? OR name = ?) AND revoked_at IS NULL", values)
            for token in found:
                transaction.execute("UPDATE tokens SET revoked_at = ? WHERE id = ?", (now, token.id))
                details = {"token": token.id, "name": token.name, "row": _row_digest(transaction, token.id)}
                append(transaction, now, "token-revoked", None, by, details)
        return found

    def end_session(self, id: str, expires_at: WallTime, now: WallTime) -> None:
        """Record, until its expiry, that a browser session has ended."""
        with self._database.write() as transaction:
            transaction.execute("DELETE FROM ended_sessions WHERE expires_at <= ?", (now,))
            transaction.execute(
                "INSERT INTO ended_sessions (id, expires_at) VALUES (?, ?) ON CONFLICT (id) DO NOTHING",
                (id, expires_at),
            )

    def has_ended(self, session_id: str) -> bool:
        return bool(self._select("SELECT 1 FROM ended_sessions WHERE id = ?", (session_id,)))

    def digests(self) -> dict[str, str]:
        """Return the digest of each row, by the id of the token, as its last entry has it."""
        return {row[0]: digest_of_row(row) for row in self._select(f"SELECT {_ROW} FROM tokens")}

    def list(self) -> list[Token]:
        return self._read(_TOKENS.list, "ORDER BY created_at, id")


def _row_digest(transaction: Transaction, id: str) -> str:
    return digest_of_row(transaction.execute(f"SELECT {_ROW} FROM tokens WHERE id = ?", (id,)).fetchone())
