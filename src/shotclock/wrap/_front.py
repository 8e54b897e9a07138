"""The process in front of a server: one thread, one loop, and no library beyond the standard one."""

from __future__ import annotations

import select
from functools import partial

from ..core.limits import NS_PER_MS
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import Order
from ..supervise.foreground import TerminalSignals
from ._catalogue import LastCatalogue
from ._gate import Policy
from ._lifecycle import ServerLife
from ._limits import ServerLimits
from ._lines import LineSplitter
from ._requests import OnEnded, OnOpen
from ._server_process import ServerCommand
from ._session import ClientSession
from ._writers import LineWriter, NoteWriter, read_some

CLIENT_IN, CLIENT_OUT, OUR_STDERR = 0, 1, 2
LONGEST_WAIT_MS = 60_000
# How long a client that reads slowly may take for the last answers.
FLUSH_LIMIT_MS = 1_000


class Front:
    """The loop between one client, on stdin and stdout, and its server."""

    def __init__(
        self,
        command: ServerCommand,
        limits: ServerLimits,
        signals: TerminalSignals,
        *,
        is_lazy: bool = False,
        policy: Policy | None = None,
        on_ended: OnEnded | None = None,
        on_open: OnOpen | None = None,
        catalogue: LastCatalogue | None = None,
    ) -> None:
        self._signals = signals
        self._is_lazy = is_lazy
        self._client = LineWriter(CLIENT_OUT)
        self._notes = NoteWriter(OUR_STDERR)
        make_session = partial(
            ClientSession,
            limits,
            self._client,
            self._notes.note,
            policy=policy,
            on_ended=on_ended,
            on_open=on_open,
            catalogue=catalogue,
        )
        self.life: ServerLife = ServerLife(command, limits, signals, self._notes, make_session)
        self._session = self.life.session
        self._gate = self._session.gate
        self._splitter = LineSplitter()
        self._is_client_open = True
        self._next_due_ns = 0
        self._poller = select.poll()
        self._watched: dict[int, int] = {}

    def run(self) -> None:
        """Pass messages until the client is gone and the server has ended."""
        if not self._is_lazy:
            self.life.start()
        while not self.life.is_over:
            self._watch()
            self._next_due_ns = min(self._session.next_due_ns, self.life.next_due_ns)
            wait_ms = -(-(self._next_due_ns - monotonic_ns()) // NS_PER_MS)
            ready = self._poller.poll(max(0, min(LONGEST_WAIT_MS, wait_ms)))
            # The client last: a request must not be sent to a server whose end has already come.
            for fd, events in sorted(ready, key=lambda each: each[0] == CLIENT_IN):
                self._handle(fd, events)
            now_ns = monotonic_ns()
            if now_ns >= self._next_due_ns:
                self._session.check_limits(now_ns)
                self.life.check_clocks(now_ns)
        self._client.finish(FLUSH_LIMIT_MS)
        self._gate.close()
        self._notes.flush_ready()

    def _watch(self) -> None:
        """Choose the descriptors to wait for. A side is not read while the other one is behind."""
        wanted = {self._signals.fd: select.POLLIN}
        if self._gate.fd is not None:
            wanted[self._gate.fd] = select.POLLIN
        process, writer = self.life.process, self.life.writer
        is_server_behind = writer is not None and writer.is_full
        if self._is_client_open:
            is_paused = is_server_behind or self._session.is_client_paused or self._client.is_full
            wanted[CLIENT_IN] = select.POLLRDHUP if is_paused else select.POLLIN  # its end is seen in any case
        if not self._client.is_broken:
            wanted[CLIENT_OUT] = select.POLLOUT if self._client.has_unwritten else 0  # 0: its reader may leave
        if self._notes.has_unwritten:
            wanted[OUR_STDERR] = select.POLLOUT
        if process is not None:
            if process.control_fd >= 0:
                wanted[process.control_fd] = select.POLLIN
            if process.stdout_fd >= 0 and not self._client.is_full:
                wanted[process.stdout_fd] = select.POLLIN
            if process.stderr_fd >= 0:
                wanted[process.stderr_fd] = select.POLLIN
            if writer is not None and writer.has_unwritten:
                wanted[writer.fd] = select.POLLOUT
        if wanted != self._watched:
            for fd in self._watched.keys() - wanted.keys():
                self._poller.unregister(fd)
            for fd, events in wanted.items():
                if self._watched.get(fd) != events:
                    self._poller.register(fd, events)
            self._watched = wanted

    def _handle(self, fd: int, events: int) -> None:
        process, writer = self.life.process, self.life.writer
        if fd == CLIENT_IN:
            self._read_client()
        elif fd == CLIENT_OUT:
            self._client.flush()
            if self._client.is_broken or events & (select.POLLERR | select.POLLNVAL):
                self._client.is_broken = True
                self._lose_client()
        elif fd == OUR_STDERR:
            self._notes.flush_ready()
        elif fd == self._signals.fd:
            while (order := self._signals.next_order()) is not None:
                if order[0] in (Order.STOP, Order.KILL):
                    self._is_client_open = False
                    self.life.stop(order[1], at_once=order[0] == Order.KILL)
        elif fd == self._gate.fd:
            self._gate.handle_decisions()
        elif process is None:
            return
        elif fd == process.stdout_fd:
            self.life.read_stdout()
        elif fd == process.stderr_fd:
            self.life.read_stderr()
        elif fd == process.control_fd:
            self.life.read_news()
        elif writer is not None and fd == writer.fd:
            writer.flush()
            self.life.close_stdin_when_written()

    def _read_client(self) -> None:
        chunk = read_some(CLIENT_IN)
        if chunk is None:
            return
        for line in self._splitter.split(chunk) if chunk else self._splitter.finish():
            self._session.handle_client_line(line)
        if not chunk:
            self._lose_client()

    def _lose_client(self) -> None:
        self._is_client_open = False
        self.life.close()
