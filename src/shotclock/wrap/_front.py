"""The process in front of a server: one thread, one loop, and no library beyond the standard one."""

from __future__ import annotations

import select

from ..core.limits import NS_PER_MS
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import Order
from ..supervise.foreground import TerminalSignals
from ._catalogue import LastCatalogue
from ._gate import Policy
from ._lifecycle import ServerLife
from ._limits import ServerLimits
from ._lines import LineSplitter
from ._links import ServerLink
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

        def make_session(server: ServerLink) -> ClientSession:
            return ClientSession(
                limits,
                self._client,
                self._notes.write_line,
                server,
                policy=policy,
                on_ended=on_ended,
                on_open=on_open,
                catalogue=catalogue,
            )

        self._life = ServerLife(command, limits, signals, self._notes, make_session)
        self._session = self._life.session
        self._gate = self._session.gate
        self._splitter = LineSplitter()
        self._is_client_open = True
        self._next_due_ns = 0
        self._poller = select.poll()
        self._watched: dict[int, int] = {}

    @property
    def life(self) -> ServerLife:
        return self._life

    def run(self) -> None:
        """Pass messages until the client is gone and the server has ended."""
        if not self._is_lazy:
            self._life.start()
        while not self._life.is_over:
            self._watch()
            ready = self._poller.poll(self._wait_ms())
            # The client last: a request must not be sent to a server whose end has already come.
            for fd, events in sorted(ready, key=_is_from_client):
                self._handle(fd, events)
            now_ns = monotonic_ns()
            if now_ns >= self._next_due_ns:
                self._session.check_limits(now_ns)
                self._life.check_clocks(now_ns)
        self._client.finish(FLUSH_LIMIT_MS)
        self._gate.close()
        self._notes.flush()

    def _watch(self) -> None:
        """Choose the descriptors to wait for. A side is not read while the other one is behind."""
        wanted = {self._signals.fd: select.POLLIN}
        if self._gate.fd is not None:
            wanted[self._gate.fd] = select.POLLIN
        process, writer = self._life.process, self._life.writer
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

    def _wait_ms(self) -> int:
        self._next_due_ns = min(self._session.next_due_ns, self._life.next_due_ns)
        return max(0, min(LONGEST_WAIT_MS, -(-(self._next_due_ns - monotonic_ns()) // NS_PER_MS)))

    def _handle(self, fd: int, events: int) -> None:
        process, writer = self._life.process, self._life.writer
        if fd == CLIENT_IN:
            self._read_client()
        elif fd == CLIENT_OUT:
            self._client.flush()
            if self._client.is_broken or events & (select.POLLERR | select.POLLNVAL):
                self._client.is_broken = True
                self._lose_client()
        elif fd == OUR_STDERR:
            self._notes.flush()
        elif fd == self._signals.fd:
            self._obey_signals()
        elif fd == self._gate.fd:
            self._gate.take_decisions()
        elif process is None:
            return
        elif fd == process.stdout_fd:
            self._life.read_stdout()
        elif fd == process.stderr_fd:
            self._life.read_stderr()
        elif fd == process.control_fd:
            self._life.read_news()
        elif writer is not None and fd == writer.fd:
            writer.flush()
            self._life.close_stdin_when_written()

    def _read_client(self) -> None:
        chunk = read_some(CLIENT_IN)
        if chunk is None:
            return
        for line in self._splitter.split(chunk) if chunk else self._splitter.finish():
            self._session.take_from_client(line)
        if not chunk:
            self._lose_client()

    def _lose_client(self) -> None:
        self._is_client_open = False
        self._life.close()

    def _obey_signals(self) -> None:
        while (order := self._signals.next_order()) is not None:
            if order[0] in (Order.STOP, Order.KILL):
                self._is_client_open = False
                self._life.stop(order[1], at_once=order[0] == Order.KILL)


def _is_from_client(ready: tuple[int, int]) -> bool:
    return ready[0] == CLIENT_IN
