"""Where a server is reached: what is written becomes an address, and the address a socket that listens."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

from ..core.errors import Failure
from .web.allowed_origins import is_loopback

BACKLOG = 1024


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT. Raises ValueError that says what is wrong with it."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"{text!r} should be HOST:PORT, as in 127.0.0.1:8000")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if host == "localhost":
        return "127.0.0.1", int(port)
    try:
        return str(ipaddress.ip_address(host)), int(port)
    except ValueError:  # who knows where it leads, or how long it takes to find out
        raise ValueError(f"{host!r} is a name: say the address to listen on, as in 127.0.0.1 or 0.0.0.0") from None


def check_reach(address: tuple[str, int], has_tokens: Callable[[], bool], *, require_token: bool = False) -> None:
    """Other machines are served only where they can be told apart. Raises ValueError."""
    is_local = is_loopback(address[0])
    if (is_local and not require_token) or has_tokens():
        return
    if is_local:
        raise ValueError("a token is required, and there are none yet: make one with `shotclock token create`")
    raise ValueError(
        f"{address[0]} can be reached from other machines, and there are no access tokens yet: "
        "make one with `shotclock token create`, or serve on 127.0.0.1"
    )


def bound_socket(address: tuple[str, int]) -> socket.socket:
    """Raises Failure where the address cannot be had."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    # With the protocol named, asyncio turns off Nagle's algorithm on what is accepted; without, an answer takes 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        where = url_of(address)
        raise Failure("ADDRESS_UNAVAILABLE", f"cannot listen on {where}: {error.strerror or error}") from None
    return sock


def url_of(address: tuple[str, int], path: str = "") -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}{path}"
