"""`shotclock wrap --http`: a wrapped server offered over HTTP."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import Failure
from ..process.addresses import Site, check_reach, listen_on, parse_address
from ..process.foreground import TerminalSignals
from ..wrap.http_access import TokenCheck, has_tokens
from ..wrap.http_front import HttpFront
from ..wrap.http_sessions import FrontSettings
from ..wrap.limits import ServerLimits
from .exec import NOT_DONE
from .output import say_line


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
