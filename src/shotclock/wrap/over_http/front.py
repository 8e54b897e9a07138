"""A stdio server offered over streamable HTTP: a thread for each connection, a child for each session.

Open connections are bounded in number. When all are in use, the oldest one without a whole request is dropped, so that
half a request keeps no client out. This and all limits of a connection come before authentication.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import signal
import socket
import threading
from typing import Any

from ...core.clocks import NS_PER_MS
from ...process.addresses import Site, url_of
from ...process.clock import monotonic_ns, pause
from ...process.command_task import Order
from ...process.foreground import TerminalSignals
from .children import Notes
from .connection import MCP_PATH, MOST_LARGE_BODIES, TAKEN_WITHIN_S, Authenticate, FrontParts, OpenConnections
from .exchange import McpConnection
from .sessions import FrontSettings, HttpSessions

MOST_CONNECTIONS = 512
LOOK_MS = 1_000
ACCEPT_AGAIN_S = 0.1
SHORT_LOOK_MS = 20
FAREWELL_MS = 1_000  # for connections to send their last answers
GIVE_UP_MS = 15_000


class HttpFront:
    """The loop that accepts connections, ends idle sessions and obeys signals."""

    def __init__(
        self,
        sock: socket.socket,
        site: Site,
        settings: FrontSettings,
        authenticate: Authenticate,
        signals: TerminalSignals,
    ) -> None:
        self._notes = Notes()
        self._sessions = HttpSessions(settings, self._notes)
        self._connections = OpenConnections()
        large_bodies = threading.BoundedSemaphore(MOST_LARGE_BODIES)
        self._parts = FrontParts(site, self._sessions, authenticate, self._connections, large_bodies)
        self._settings = settings
        self._sock = sock
        self._signals = signals

    def run(self, name: str) -> None:
        """Serve until a signal arrives and all children have ended."""
        self._notes.say(f"serving {name} on {url_of(self._sock.getsockname()[:2], MCP_PATH)}")
        self._sock.setblocking(False)
        poller = select.poll()
        for fd in (self._sock.fileno(), self._signals.fd):
            poller.register(fd, select.POLLIN)
        while self._signals.stopped_by is None:
            for fd, _ in poller.poll(LOOK_MS):
                if fd == self._sock.fileno():
                    self._accept()
            self._obey_signals()
            self._connections.drop_late()
            self._sessions.end_idle()
        self._sock.close()
        self._end_children()

    def _obey_signals(self) -> None:
        while (order := self._signals.next_order()) is not None:
            if order[0] == Order.SUSPEND:
                self._signals.suspend()
            elif order[0] == Order.KILL:
                self._sessions.kill()

    def _end_children(self) -> None:
        name = self._signals.stopped_by or "SIGTERM"
        self._sessions.stop(signal.Signals[name], f"this server was stopped by {name}")
        poller = select.poll()
        poller.register(self._signals.fd, select.POLLIN)
        # Each child is killed by its own thread at the end of its limits, so that this is never exhausted.
        give_up_ns = monotonic_ns() + (self._settings.end_within_ms + GIVE_UP_MS) * NS_PER_MS
        while self._sessions.has_children and monotonic_ns() < give_up_ns:
            poller.poll(SHORT_LOOK_MS)
            self._obey_signals()
        give_up_ns = monotonic_ns() + FAREWELL_MS * NS_PER_MS
        while any(each.is_answering for each in self._connections.list()) and monotonic_ns() < give_up_ns:
            pause(SHORT_LOOK_MS / 1000)

    def _accept(self) -> None:
        try:
            accepted, address = self._sock.accept()
        except BlockingIOError:
            return
        except OSError:  # there are no descriptors, or the client has left already
            pause(ACCEPT_AGAIN_S)
            return
        accepted.settimeout(TAKEN_WITHIN_S)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._connections.count >= MOST_CONNECTIONS and not self._connections.drop_oldest():
            with accepted, contextlib.suppress(OSError):
                accepted.send(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            return
        try:
            threading.Thread(target=self._serve, args=(accepted, address), daemon=True).start()
        except RuntimeError:  # there are no more threads
            accepted.close()

    def _serve(self, accepted: socket.socket, address: Any) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the client has gone, or errs
            McpConnection(accepted, address, self._parts)
        with contextlib.suppress(OSError):
            accepted.close()
