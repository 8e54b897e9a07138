"""An operator's browser: how it becomes known, and what it shows from then on.

On this machine the server prints a link with a key that works once: whoever can read that is the operator, and an agent
that only reaches the port is not. Elsewhere an operator's token is typed in. Either way the browser gets two halves: a
cookie that no script can read, and a *proof* that the page keeps for its own origin and sends with every request.

Two, because a cookie is given to every port of a host. An agent that serves something on another port of this machine,
and has the operator look at it, would be handed the cookie; the proof is nowhere it could come from. The proof also
keeps other pages from sending requests in the operator's name.

Both are signed with a key in the store's directory, so that a page goes on working when the server is started again.
Whoever signs out is remembered in the store until the session would have expired: both halves are worth nothing then.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from pathlib import Path

from ...core.records import dataclass
from ...core.walltime import WallTime
from ...store.home import load_private_key, make_private_directory

KEY_FILE = "operators.key"
LASTS_MS = 30 * 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    name: str
    expires_at: WallTime
    token_id: str | None = None
    """The token that was typed in, if one was: the session ends with it."""


class Sessions:
    """The key is read, or made, when it is first needed. Raises Failure where the store's directory cannot be used."""

    def __init__(self, home: Callable[[], Path]) -> None:
        self._home = home
        self._kept: bytes | None = None

    def begin(self, name: str, now: WallTime, *, token_id: str | None = None, until: WallTime | None = None) -> str:
        """The cookie of a new session."""
        expires_at = now + LASTS_MS
        if until is not None:
            expires_at = min(expires_at, until)
        content = json.dumps([name, expires_at.ms, token_id, secrets.token_hex(8)]).encode()
        body = base64.urlsafe_b64encode(content).decode().rstrip("=")
        return f"{body}.{self._signed('cookie', body)}"

    def proof(self, cookie: str) -> str:
        """The other half, for the page."""
        return self._signed("proof", cookie)

    def look(self, cookie: str, proof: str, now: WallTime) -> Session | None:
        """None unless both halves are ours, belong together and have not expired."""
        body, _, mac = cookie.partition(".")
        if not hmac.compare_digest(mac.encode(), self._signed("cookie", body).encode()):
            return None
        if not hmac.compare_digest(proof.encode("utf-8", "replace"), self.proof(cookie).encode()):
            return None
        try:
            content = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
            session = Session(content[3], content[0], WallTime(content[1]), content[2])
        except (ValueError, TypeError, IndexError, binascii.Error):
            return None
        return session if now < session.expires_at else None

    def _signed(self, what: str, text: str) -> str:
        return hmac.new(self._key(), f"{what} {text}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def _key(self) -> bytes:
        if self._kept is None:
            self._kept = load_private_key(make_private_directory(self._home()) / KEY_FILE)
        return self._kept


class Link:
    """The key in the printed link. Each works once; then there is the next, and `say` is told."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._key = secrets.token_urlsafe(24)

    @property
    def key(self) -> str:
        return self._key

    def use(self, key: str) -> bool:
        if not hmac.compare_digest(key.encode("utf-8", "replace"), self._key.encode()):
            return False
        self._key = secrets.token_urlsafe(24)
        self._say(self._key)
        return True
