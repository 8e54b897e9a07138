"""The process between one client and several servers: one thread, one loop, as `front` has it for one server."""

from __future__ import annotations

import select
import signal
from collections.abc import Sequence

from ...core.clocks import NS_PER_MS
from ...process.clock import monotonic_ns
from ...process.command_task import Order
from ...process.foreground import TerminalSignals
from ..front import CLIENT_IN, CLIENT_OUT, FLUSH_LIMIT_MS, LONGEST_WAIT_MS, OUR_STDERR
from ..lines import LineSplitter
from ..writers import LineWriter, NoteWriter, read_some
from .merger import Merger
from .server import ConfiguredServer, MergedServer

# Of answers of our own to a client that sends requests and reads nothing.
MOST_UNREAD = 8 * 1024 * 1024


class MergedFront:
    """The loop between a client, on stdin and stdout, and its servers."""

    def __init__(self, entries: Sequence[ConfiguredServer], signals: TerminalSignals) -> None:
        self._signals = signals
        self._client = LineWriter(CLIENT_OUT)
        self._notes = NoteWriter(OUR_STDERR)
        self._servers = [MergedServer(entry, self._notes) for entry in entries]
        self._merger = Merger(self._servers, self._client, self._notes.write_line)
        self._splitter = LineSplitter()
        self._is_client_open = True
        self._poller = select.poll()
        self._watched: dict[int, int] = {}

    @property
    def exit_code(self) -> int:
        """Return the exit code if no server can be started, otherwise 0."""
        codes = [each.exit_code for each in self._servers]
        return next((code for code in codes if code), 0) if None not in codes else 0

    def run(self) -> None:
        """Pass messages until the client is gone and every server has ended."""
        for server in self._servers:
            server.start()
        while not self._is_over:
            self._watch()
            ready = dict(self._poller.poll(self._wait_ms()))
            self._handle_servers(ready)
            if self._signals.fd in ready:
                self._obey_signals()
            if OUR_STDERR in ready:
                self._notes.flush()
            if CLIENT_OUT in ready:
                self._write_client(ready[CLIENT_OUT])
            if CLIENT_IN in ready:  # last: a request must not be sent to a server whose end has already come
                self._read_client()
            now_ns = monotonic_ns()
            self._merger.check(now_ns)
            for server in self._servers:
                server.check_clocks(now_ns, is_held=self._is_held(server) or self._merger.line_owner is server)
        self._client.finish(FLUSH_LIMIT_MS)
        self._notes.flush()

    @property
    def _is_over(self) -> bool:
        is_useless = all(each.exit_code is not None for each in self._servers)
        return (not self._is_client_open or is_useless) and not any(each.is_running for each in self._servers)

    def _is_held(self, server: MergedServer) -> bool:
        """Return whether a server has to wait: the client is behind, or reads a long line of another one."""
        return self._client.is_full or self._merger.line_owner not in (None, server)

    def _watch(self) -> None:
        now_ns = monotonic_ns()
        wanted = {self._signals.fd: select.POLLIN}
        is_client_behind = self._client.unwritten_size > MOST_UNREAD
        are_servers_behind = any([each.holds_client_back(now_ns) for each in self._servers])
        if self._is_client_open:  # its end is seen in any case
            wanted[CLIENT_IN] = select.POLLRDHUP if is_client_behind or are_servers_behind else select.POLLIN
        if not self._client.is_broken:
            wanted[CLIENT_OUT] = select.POLLOUT if self._client.has_unwritten else 0  # 0: its reader may leave
        if self._notes.has_unwritten:
            wanted[OUR_STDERR] = select.POLLOUT
        for server in self._servers:
            fds = [server.stderr_fd]
            if not self._is_held(server):
                fds.append(server.stdout_fd)
            if not self._is_held(server) or not self._is_client_open:
                fds.append(server.pid_fd)
            wanted |= {fd: select.POLLIN for fd in fds if fd >= 0}
            if server.writer is not None and server.writer.has_unwritten:
                wanted[server.writer.fd] = select.POLLOUT
        if wanted != self._watched:
            for fd in self._watched.keys() - wanted.keys():
                self._poller.unregister(fd)
            for fd, events in wanted.items():
                self._poller.register(fd, events)
            self._watched = wanted

    def _wait_ms(self) -> int:
        due_ns = min(self._merger.next_due_ns, *(each.next_due_ns for each in self._servers))
        return max(0, min(LONGEST_WAIT_MS, -(-(due_ns - monotonic_ns()) // NS_PER_MS)))

    def _handle_servers(self, ready: dict[int, int]) -> None:
        for server in self._servers:
            if server.stderr_fd in ready:
                server.read_stderr()
            if server.writer is not None and server.writer.fd in ready:
                server.writer.flush()
                server.close_stdin_when_written()
            if server.stdout_fd in ready and not self._is_held(server):
                server.read_stdout()
            if server.pid_fd in ready and not (self._is_held(server) and self._is_client_open):
                server.end()

    def _read_client(self) -> None:
        chunk = read_some(CLIENT_IN)
        if chunk is None:
            return
        for part, piece in self._splitter.split(chunk) if chunk else self._splitter.finish():
            self._merger.take_from_client(part, piece)
        if not chunk:
            self._lose_client()

    def _write_client(self, events: int) -> None:
        self._client.flush()
        if self._client.is_broken or events & (select.POLLERR | select.POLLNVAL):
            self._client.is_broken = True
            self._lose_client()

    def _lose_client(self) -> None:
        if self._is_client_open:
            self._is_client_open = False
            for server in self._servers:
                server.close()

    def _obey_signals(self) -> None:
        while (order := self._signals.next_order()) is not None:
            if order[0] in (Order.STOP, Order.KILL):
                self._is_client_open = False
                for server in self._servers:
                    server.stop(signal.Signals[order[1]])
