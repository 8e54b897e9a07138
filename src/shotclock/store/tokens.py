"""Tokens of agents and operators that use the inbox over the network. Only the hash of a token is stored.

A token is active until it is revoked or expires. A name is unique among active tokens, because proposals belong to a
name; a token that follows a revoked one of the same name owns its proposals.
"""

from __future__ import annotations

from ..core.clocks import WallTime
from ..core.errors import Failure
from ..core.value_types import value
from .audit import append, digest_of_row
from .database import Database, Transaction
from .rows import RowMapper

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


class Tokens:
    """Table of tokens and of browser sessions that were ended."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
        """Return the token of that id, or None."""
        with self._database.read() as transaction:
            return _TOKENS.get(transaction, "WHERE id = ?", (id,))

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
        with self._database.read() as transaction:
            row = transaction.execute("SELECT 1 FROM ended_sessions WHERE id = ?", (session_id,)).fetchone()
        return row is not None

    def digests(self) -> dict[str, str]:
        """Return the digest of each row, by the id of the token, as its last entry has it."""
        with self._database.read() as transaction:
            rows = transaction.execute(f"SELECT {_ROW} FROM tokens").fetchall()
        return {row[0]: digest_of_row(row) for row in rows}

    def list(self) -> list[Token]:
        """Return the tokens, the oldest first, including revoked and expired ones."""
        with self._database.read() as transaction:
            return _TOKENS.list(transaction, "ORDER BY created_at, id")


def _row_digest(transaction: Transaction, id: str) -> str:
    return digest_of_row(transaction.execute(f"SELECT {_ROW} FROM tokens WHERE id = ?", (id,)).fetchone())
