"""`shotclock wrap --http`: a wrapped server offered over HTTP."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import Failure
from ..process.addresses import Site, check_reach, listen_on, parse_address
from ..process.clock import wall_time
from ..process.foreground import TerminalSignals
from ..wrap.limits import ServerLimits
from ..wrap.over_http.front import HttpFront
from ..wrap.over_http.request_check import HttpRefusal
from ..wrap.over_http.sessions import FrontSettings
from .exec import NOT_DONE
from .output import say_line

if TYPE_CHECKING:
    from ..inbox.access import Access


def offer_over_http(
    values: Mapping[str, Any], limits: Sequence[ServerLimits], words_of_child: list[str], name: str
) -> int:
    """Serve HTTP clients, each session with a `wrap` process of its own, and return the exit code."""
    text, require_token = values["http"], values["require_token"]
    try:
        address = parse_address(text if ":" in text else f":{text}")
        check_reach(address, has_tokens, require_token=require_token)
        sock = listen_on(address)
    except (ValueError, Failure) as error:
        say_line(f"shotclock wrap: http: {error}")
        return NOT_DONE
    settings = FrontSettings(
        child_argv=(sys.executable, "-P", "-m", "shotclock", "wrap", *words_of_child),
        most_sessions=values["max_sessions"],
        idle_ms=values["session_idle"],
        end_within_ms=max(each.shutdown_ms + each.grace_ms for each in limits),
    )
    signals = TerminalSignals()
    site = Site.at(sock.getsockname()[:2], os.environ, require_token=require_token)
    front = HttpFront(sock, site, settings, TokenCheck().owner_of, signals)
    front.run(values["name"] or name)
    return -signal.Signals[signals.stopped_by] if signals.stopped_by is not None else 0


class TokenCheck:
    """The tokens of `shotclock token create`, for all threads."""

    def __init__(self) -> None:
        self._access: Access | None = None
        self._lock = threading.Lock()

    def owner_of(self, token: str) -> str | None:
        """Return the owner of a token; None for a wrong one. Raises HttpRefusal if the store cannot be read."""
        with self._lock:
            try:
                self._access = self._access or _open_access()
                principal = self._access.authenticate(token, wall_time())
            except Failure as failure:
                raise HttpRefusal(503, f"tokens cannot be checked: {failure}") from None
        return None if principal is None else f"{principal.role} {principal.name}"


def _open_access() -> Access:
    from ..inbox.access import Access  # with the database, which a server without tokens need not load
    from ..store.store import Store

    return Access(Store.open())


def has_tokens() -> bool:
    from ..store.store import Store  # as above

    now = wall_time()
    with Store.open() as store:
        return any(token.is_active(now) for token in store.tokens.list())
