"""Access tokens of HTTP clients: those of `shotclock token create`."""

from __future__ import annotations

import threading

from ..core.errors import Failure
from ..inbox.access import Access
from ..process.clock import wall_time
from ..store.store import Store
from .http_sessions import HttpRefusal


class TokenCheck:
    """The tokens in the store, for all threads."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._lock = threading.Lock()

    def owner_of(self, token: str) -> str | None:
        """Return the owner of a token; None for a wrong one. Raises HttpRefusal if the store cannot be read."""
        with self._lock:
            try:
                if self._store is None:
                    self._store = Store.open()
                principal = Access(self._store).authenticate(token, wall_time())
            except Failure as failure:
                raise HttpRefusal(503, f"tokens cannot be checked: {failure}") from None
        return None if principal is None else f"{principal.role} {principal.name}"


def has_tokens() -> bool:
    now = wall_time()
    with Store.open() as store:
        return any(token.is_active(now) for token in store.tokens.list())
