"""Under which names a server may be asked for, and from which pages.

A page from elsewhere can have its own name point at this machine (DNS rebinding), and then send what it likes as if it
were ours. Its requests carry that name in `Host`. So a `Host` has to be one that nobody else can make point here: an
address, or a name that was said to be ours.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ...core.records import dataclass

if TYPE_CHECKING:
    from starlette.datastructures import Headers

HOSTS_VARIABLE = "SHOTCLOCK_HTTP_HOSTS"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?")


# What proxies add. A client that adds one itself only has to show a token.
_FORWARDING = frozenset(("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
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
        """Only this machine can reach it."""
        return is_loopback(self.host)

    def is_direct(self, headers: Headers) -> bool:
        """Whether a request surely comes from this machine. One that a proxy here passes on may come from anywhere."""
        return not self.wants_token and not any(
            name in _FORWARDING or name.startswith("x-forwarded-") for name in headers
        )

    def answers_to(self, host: str | None) -> bool:
        """Whether a `Host` header is one of ours. Any port: there may be a proxy."""
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
        """Whether a page of that `Origin` was served under the `Host` it now asks."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and bool(host) and parts.netloc.lower() == (host or "").lower()

    def is_local_page(self, origin: str) -> bool:
        """Whether it is a page that some program on this machine serves."""
        try:
            name = urlsplit(origin).hostname or ""
        except ValueError:
            return False
        return self.is_local and (name == "localhost" or is_loopback(name))
