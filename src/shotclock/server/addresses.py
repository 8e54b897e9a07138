"""The address of a server: read, listened on, and the names and pages under which it may be asked for.

A page from elsewhere can have its own name point at this machine (DNS rebinding), and then send what it likes as if it
were ours. Its requests carry that name in `Host`. So a `Host` has to be one that nobody else can make point here: an
address, or a name that was said to be ours.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..core.errors import Failure
from ..core.value_types import value

if TYPE_CHECKING:
    from starlette.datastructures import Headers


BACKLOG = 1024


def parse_address(text: str) -> tuple[str, int]:
    """Read HOST:PORT. Raises ValueError that says what is wrong with it."""
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
    """Raise ValueError where other machines would be served that cannot be told apart."""
    is_local = is_loopback(address[0])
    if (is_local and not require_token) or has_tokens():
        return
    if is_local:
        raise ValueError("a token is required, and there are none yet: make one with `shotclock token create`")
    raise ValueError(
        f"{address[0]} can be reached from other machines, and there are no access tokens yet: "
        "make one with `shotclock token create`, or serve on 127.0.0.1"
    )


def listen_on(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens. Raises Failure where the address cannot be had."""
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


HOSTS_VARIABLE = "SHOTCLOCK_HTTP_HOSTS"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?")


# What proxies add. A client that adds one itself only has to show a token.
_FORWARDING = frozenset(("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@value
class Site:
    """Where a server listens, and the names it answers to beside its address."""

    host: str
    port: int
    names: frozenset[str] = frozenset()
    wants_token: bool = False
    """From everybody: others can reach it, by its address, or by a name that a proxy passes on."""

    @classmethod
    def at(cls, address: tuple[str, int], environ: Mapping[str, str], *, require_token: bool = False) -> Site:
        said: Iterable[str] = re.split(r"[\s,]+", environ.get(HOSTS_VARIABLE, ""))
        given = {name.lower() for name in said if name}
        is_local = is_loopback(address[0])
        names = given | ({"localhost"} if is_local else {"localhost", socket.gethostname().lower()})
        return cls(*address, frozenset(names), require_token or bool(given) or not is_local)

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach it."""
        return is_loopback(self.host)

    def is_direct(self, headers: Headers) -> bool:
        """Return whether a request surely comes from this machine. One that a proxy here passes on may come from
        anywhere."""
        return not self.wants_token and not any(
            name in _FORWARDING or name.startswith("x-forwarded-") for name in headers
        )

    def answers_to(self, host: str | None) -> bool:
        """Return whether a `Host` header is one of ours. Any port: there may be a proxy."""
        found = _HOST.fullmatch(host or "")
        if found is None:
            return False
        name = found["name"].strip("[]").lower()
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        if self.is_local:
            return address.is_loopback
        return self.host in ("0.0.0.0", "::", str(address))  # an address cannot be made to point elsewhere

    def is_own_page(self, origin: str, host: str | None) -> bool:
        """Return whether a page of that `Origin` was served under the `Host` it now asks."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and bool(host) and parts.netloc.lower() == (host or "").lower()

    def is_local_page(self, origin: str) -> bool:
        """Return whether it is a page that some program on this machine serves."""
        try:
            name = urlsplit(origin).hostname or ""
        except ValueError:
            return False
        return self.is_local and (name == "localhost" or is_loopback(name))
