"""The address of a server, and the names and pages that may use it.

A foreign page can make its own name point here (DNS rebinding) and send it in `Host`. So a `Host` must be an address,
or a name that the operator has declared.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from ..core.errors import Failure
from ..core.value_types import value


def parse_address(text: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"{text!r} should be HOST:PORT, as in 127.0.0.1:8000")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if host == "localhost":
        return "127.0.0.1", int(port)
    try:
        return str(ipaddress.ip_address(host)), int(port)
    except ValueError:  # names are not resolved, which may take any time
        raise ValueError(f"{host!r} is a name: give the address to listen on, as in 127.0.0.1 or 0.0.0.0") from None


def check_reach(address: tuple[str, int], has_tokens: Callable[[], bool], *, require_token: bool = False) -> None:
    """Raise ValueError where a token is needed and there is none."""
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
    """Raises Failure."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    # With the protocol named, asyncio turns off Nagle's algorithm, which delays an answer by 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        message = f"cannot listen on {url_of(address)}: {error.strerror or error}"
        raise Failure("ADDRESS_UNAVAILABLE", message) from None
    return sock


def url_of(address: tuple[str, int], path: str = "") -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}{path}"


HOSTS_VARIABLE = "SHOTCLOCK_HTTP_HOSTS"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?")
# Headers that proxies add. A client that sends one itself needs a token.
_FORWARDING = frozenset(("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@value
class Site:
    host: str
    port: int
    names: frozenset[str] = frozenset()
    wants_token: bool = False  # other machines can reach the server, by its address or through a proxy

    @classmethod
    def at(
        cls,
        address: tuple[str, int],
        environ: Mapping[str, str],
        *,
        require_token: bool = False,
        public_name: str | None = None,
    ) -> Site:
        written = [*re.split(r"[\s,]+", environ.get(HOSTS_VARIABLE, "")), public_name]
        declared = {name.lower() for name in written if name}
        is_local = is_loopback(address[0])
        names = declared | ({"localhost"} if is_local else {"localhost", socket.gethostname().lower()})
        return cls(*address, frozenset(names), require_token or bool(declared) or not is_local)

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

    def is_direct(self, headers: Iterable[str]) -> bool:
        """Return whether a request, by its headers' names, certainly comes from this machine, not through a proxy."""
        return not self.wants_token and not any(
            name in _FORWARDING or name.startswith("x-forwarded-") for name in headers
        )

    def answers_to(self, host: str | None) -> bool:
        """Compare a `Host` header with the names, with any port: a proxy may have another."""
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
        return self.host in ("0.0.0.0", "::", str(address))  # unlike a name, an address cannot be rebound

    def knows_page(self, origin: str, host: str, *, from_here: bool) -> bool:
        """Return whether the page of an `Origin` was served under this `Host`, or `from_here` by any local program."""
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        if parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower():
            return True
        return from_here and self.is_local and (name == "localhost" or is_loopback(name))
