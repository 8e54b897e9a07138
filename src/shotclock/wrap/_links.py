"""The two sides of a session, as it sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ._failures import WrapFailure
from ._messages import RpcMessage

Note = Callable[[str], None]


class ServerLink(Protocol):
    @property
    def accepts(self) -> bool:
        """Return whether messages may be sent now."""

    @property
    def generation(self) -> int:
        """Return the number of the process, from 1."""

    @property
    def has_spoken(self) -> bool:
        """Return whether a message of the server has ever come."""

    def greet(self) -> None:
        """Send the known greeting of the client, which has been answered without the server."""

    def want(self) -> WrapFailure | None:
        """Start the server where that is needed. Return why it cannot be used at all."""

    def send(self, line: bytes) -> bool:
        """Send a line. Return False if the server is certain to read none of it."""

    def probe(self) -> bool:
        """Send a request that a living server answers at once. Return False where none is possible."""

    def record_sign_of_life(self, message: RpcMessage) -> None:
        """Note a sign of life, and the answers to requests of our own."""

    def kill(self, why: str) -> None:
        """Kill a server that does not react, and start another one."""

    def describe_output(self) -> tuple[str, int]:
        """Return the last lines of stderr, and the count of lines on stdout that are no messages."""


class ClientSide(Protocol):
    def write_line(self, line: bytes) -> bool: ...
