"""Names of hosts to addresses, where a lookup that hangs can be killed.

`getaddrinfo` cannot be stopped: in a thread it would outlive its caller and keep the process from ending.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Any

from ..core.clocks import Clocks
from ..core.operation import HandlerReference, Operation

if TYPE_CHECKING:  # a worker imports this file for `resolve`, and should not have to import all the rest
    from ..runtime.runtime import Runtime

# Lookups under way at a time: each holds a worker, and the workers are there for others as well.
LOOKUPS_AT_ONCE = 16

# No clock of its own: it ends with the deadline of whoever asks, to the millisecond.
_RESOLVE = Operation(
    "resolve",
    HandlerReference(__name__, "resolve"),
    isolation="process",
    mutates=False,
    idempotent=True,
    clocks=Clocks(timeout_ms=0, grace_ms=0, reserve_ms=0),
)


class Unresolved(Exception):
    """The name has no address, or none that could be found out."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late
        """The caller's deadline came first."""


class Names:
    """Looks names up for one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        import asyncio

        self._runtime = runtime
        self._places = asyncio.Semaphore(LOOKUPS_AT_ONCE)

    async def addresses(self, host: str, port: int) -> list[str]:
        """At least one, best first. Bounded by the scope it is called in. Raises Unresolved."""
        if _is_address(host):
            return [host]
        async with self._places:
            envelope = await self._runtime.call(_RESOLVE, {"host": host, "port": port})
        if not envelope.ok:
            is_late = envelope.code in ("TIMEOUT", "NO_TIME_LEFT")
            raise Unresolved(str((envelope.error or {})["message"]), is_late=is_late)
        found: Any = envelope.value
        if found["error"] is not None:
            raise Unresolved(found["error"])
        return list(found["addresses"])


def resolve(host: str, port: int) -> dict[str, Any]:
    """Runs in a worker."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"error": error.strerror or str(error), "addresses": []}
    except UnicodeError:  # a label too long, or empty
        return {"error": "it cannot be the name of a host", "addresses": []}
    # A dict keeps the order and takes the same address once.
    return {"error": None, "addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found))}


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
