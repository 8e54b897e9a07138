"""Tokens of those who reach the inbox over the network. Only the hash of a token is kept.

A token lives until it is revoked or expires. A name is unique among the living, because proposals are somebody's by
name; a token that follows a revoked one of the same name goes on with what that one proposed.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from ..core.errors import Failure
from ..core.records import dataclass
from ..core.walltime import WallTime
from . import schema as c
from .audit import append, digest_of_row
from .database import Database

_COLUMNS = "id, name, role, digest, created_at, expires_at, revoked_at"


@dataclass(frozen=True, slots=True)
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


class Tokens:
    """Table of tokens and of browser sessions that were ended."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, token: Token, by: str) -> None:
        """Record a token. Raises Failure if a living one has that name."""
        with self._database.write() as connection:
            if any(there.is_active(token.created_at) for there in _list_named(connection, token.name)):
                message = f"there is an active token named {token.name!r}: revoke it first, or choose another name"
                raise Failure("ARG_ERROR", message, context={"errors": [{"field": "name", "message": message}]})
            connection.execute(
                f"INSERT INTO tokens ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    token.id,
                    c.text_in(token.name),
                    token.role,
                    token.digest,
                    token.created_at.ms,
                    c.maybe_time_in(token.expires_at),
                    None,
                ),
            )
            expires_at = None if token.expires_at is None else token.expires_at.iso()
            details = {"token": token.id, "name": token.name, "role": token.role, "expires_at": expires_at}
            details["row"] = _row_digest(connection, token.id)
            append(connection, token.created_at, "token-issued", None, by, details)

    def get(self, id: str) -> Token | None:
        query = f"SELECT {_COLUMNS} FROM tokens WHERE id = ?"
        with self._database.read() as connection:
            row = connection.execute(query, (c.text_in(id),)).fetchone()
        return None if row is None else _token(row)

    def revoke(self, id_or_name: str, by: str, now: WallTime) -> list[Token]:
        """Revoke the token of that id, or all of that name. Return those that were not revoked before."""
        query = f"SELECT {_COLUMNS} FROM tokens WHERE (id = ? OR name = ?) AND revoked_at IS NULL"
        with self._database.write() as connection:
            given = c.text_in(id_or_name)
            found = [_token(row) for row in connection.execute(query, (given, given)).fetchall()]
            for token in found:
                connection.execute("UPDATE tokens SET revoked_at = ? WHERE id = ?", (now.ms, token.id))
                details = {"token": token.id, "name": token.name, "row": _row_digest(connection, token.id)}
                append(connection, now, "token-revoked", None, by, details)
        return found

    def end_session(self, id: str, expires_at: WallTime, now: WallTime) -> None:
        """Record, until it expires, that a browser's session is not to be let in any more."""
        with self._database.write() as connection:
            connection.execute("DELETE FROM ended_sessions WHERE expires_at <= ?", (now.ms,))
            connection.execute("INSERT OR IGNORE INTO ended_sessions VALUES (?, ?)", (c.text_in(id), expires_at.ms))

    def has_ended(self, session_id: str) -> bool:
        with self._database.read() as connection:
            row = connection.execute("SELECT 1 FROM ended_sessions WHERE id = ?", (c.text_in(session_id),)).fetchone()
        return row is not None

    def digests(self) -> dict[str, str]:
        """Return the digest of all that is kept of each, by its id, as its last entry has it."""
        with self._database.read() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM tokens").fetchall()
        return {row[0]: digest_of_row(row) for row in rows}

    def list(self) -> list[Token]:
        """Return the oldest first, with those that are revoked or expired."""
        with self._database.read() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM tokens ORDER BY created_at, id")
            return [_token(row) for row in rows]


def _row_digest(connection: sqlite3.Connection, id: str) -> str:
    return digest_of_row(connection.execute(f"SELECT {_COLUMNS} FROM tokens WHERE id = ?", (id,)).fetchone())


def _list_named(connection: sqlite3.Connection, name: str) -> list[Token]:
    rows = connection.execute(f"SELECT {_COLUMNS} FROM tokens WHERE name = ?", (c.text_in(name),))
    return [_token(row) for row in rows]


def _token(row: tuple[Any, ...]) -> Token:
    id, name, role, digest, created_at, expires_at, revoked_at = row
    return Token(
        id,
        c.text_out(name),
        role,
        digest,
        WallTime(created_at),
        c.maybe_time_out(expires_at),
        c.maybe_time_out(revoked_at),
    )
