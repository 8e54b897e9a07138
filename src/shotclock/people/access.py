"""Principals, their roles and their tokens: agents propose, operators decide.

A token reads `shotclock_ROLE_ID_SECRET`. The id finds it, the secret proves it. Only the hash of the whole is stored;
it needs no salt, because secrets of 256 bits cannot be tried.

Contract (AGENTS.md): an agent cannot approve its own proposal.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from ..calls.principal import Principal, Role
from ..core.envelope import refusal
from ..core.limits import MAX_MS, WallTime
from ..core.value_types import value
from ..store.audit import Token
from ..store.store import Store
from .audit_file import AuditFile

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}", re.ASCII)
TOKEN_PREFIX = "shotclock_"
_TOKEN = re.compile(TOKEN_PREFIX + r"(?:agent|operator)_([a-z2-7]{8})_[A-Za-z0-9_-]{43}", re.ASCII)
_NO_DIGEST = "0" * 64


def make_id(length: int) -> str:
    """Return a random id of letters and digits that are not confused with each other."""
    return "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz234567") for _ in range(length))


@value
class Issued:
    """A token that was just made, with its text."""

    text: str  # to be shown once: it is not stored
    token: Token


class Access:
    """Tokens of one store. Each method is one short transaction."""

    def __init__(self, store: Store) -> None:
        self._tokens = store.tokens
        self._file = AuditFile(store)

    def issue(self, name: str, role: Role, by: Principal, now: WallTime, *, ttl_ms: int | None = None) -> Issued:
        """Make a token. Raises Failure for an invalid name or that of an active token, and unless an operator asks."""
        by.must_be_operator("issue tokens")
        role = Role(role)
        problems = []
        if not _NAME.fullmatch(name):
            problems.append({"field": "name", "message": "must be 1 to 64 letters, digits or ._@+-"})
        if ttl_ms is not None and (type(ttl_ms) is not int or not 0 < ttl_ms <= MAX_MS):
            problems.append({"field": "ttl_ms", "message": "must be from 1 ms to ten years"})
        if problems:
            raise refusal(problems)
        id = make_id(8)
        text = f"{TOKEN_PREFIX}{role}_{id}_{secrets.token_urlsafe(32)}"
        token = Token(id, name, role, _digest(text), now, None if ttl_ms is None else now + ttl_ms)
        self._tokens.add(token, by.name)
        self._file.catch_up_if_possible()
        return Issued(text, token)

    def tokens(self) -> list[Token]:
        return self._tokens.list()

    def revoke(self, id_or_name: str, by: Principal, now: WallTime) -> list[Token]:
        """Revoke tokens by id or name and return those that were not revoked before."""
        by.must_be_operator("revoke tokens")
        revoked = self._tokens.revoke(id_or_name, by.name, now)
        self._file.catch_up_if_possible()
        return revoked

    def authenticate(self, text: str, now: WallTime) -> Principal | None:
        """Return the principal of an active token; None for any other text, without a reason."""
        match = _TOKEN.fullmatch(text)
        token = None if match is None else self._tokens.get(match[1])
        proven = hmac.compare_digest(_NO_DIGEST if token is None else token.digest, _digest(text))
        if token is None or not proven or not token.is_active(now):
            return None
        return Principal(token.name, Role(token.role))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
