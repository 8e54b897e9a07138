"""One life of a server: its command under a supervisor, with pipes to this process."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence

from ..calls.commands import explain_unstartable, signal_name
from ..core.envelope import Problem
from ..supervise import foreground, kernel
from ..supervise.client import Fate
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import CommandReport, CommandTask, News, Order, Output
from ..supervise.environment import DEADLINE_VARIABLE, OVERTIME_VARIABLE, REMAINING_VARIABLE
from ..supervise.foreground import PolledSupervisor, TerminalSignals
from ._call_log import server_name
from ._failures import OF_PROCESS, OF_SESSION
from .remote.endpoint import Endpoint

KEPT_STDERR = 2 * 1024


class ServerCommand:
    """The command of a server, and what its process inherits."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], cwd: str | None, grace_ms: int) -> None:
        self.argv: list[str] = list(argv)
        # Deadlines in the environment are those of a command above us, and a server has none.
        inherited = {name: text for name, text in os.environ.items() if name not in _OF_ANOTHER_CALL}
        self.env: dict[str, str] = {**inherited, **env}
        self.cwd = cwd
        self.grace_ms = grace_ms
        self.words = OF_PROCESS

    @property
    def name(self) -> str:
        return server_name(self.argv)

    @property
    def is_adapter(self) -> bool:
        """Return whether the process is our own and passes messages on to a server elsewhere."""
        return self.words is OF_SESSION

    @property
    def identity(self) -> list[str]:
        """Return words that tell this server from others."""
        return [*self.argv, self.cwd or os.getcwd()]

    def task(self) -> CommandTask:
        return CommandTask(
            argv=self.argv,
            env=self.env,
            cwd=self.cwd,
            started_ns=monotonic_ns(),
            grace_ms=self.grace_ms,
            output=Output.INHERIT.name,
            stdin=True,
        )


class AdapterCommand(ServerCommand):
    """The adapter of an endpoint, started and supervised as any server."""

    def __init__(self, endpoint: Endpoint, grace_ms: int) -> None:
        # -P, and only our own root on the path: a `queue.py` in the current folder must not be imported.
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        code = f"import sys; sys.path.append({root!r}); from shotclock.wrap.remote._adapter import main; main()"
        # The address may have a secret query, and others see the words of a command.
        argv = [sys.executable, "-P", "-c", code, endpoint.origin]
        super().__init__(argv, endpoint.to_environment(), None, grace_ms)
        self.words = OF_SESSION
        self._endpoint = endpoint

    @property
    def name(self) -> str:
        return self._endpoint.host

    @property
    def identity(self) -> list[str]:
        return [self._endpoint.identity]


_OF_ANOTHER_CALL = (REMAINING_VARIABLE, DEADLINE_VARIABLE, OVERTIME_VARIABLE, "")


class ServerProcess:
    """A server process and everything it starts. Nothing of it outlives this process."""

    stdin_fd: int
    stdout_fd: int
    stderr_fd: int

    def __init__(self, command: ServerCommand, signals: TerminalSignals) -> None:
        self._task = command.task()
        self._signals = signals
        self._kept = deque[bytes]()
        self._kept_size = 0
        self.leader: int = 0
        self.report: CommandReport | None = None
        theirs_in, self.stdin_fd = os.pipe()
        self.stdout_fd, theirs_out = os.pipe()
        self.stderr_fd, theirs_err = os.pipe()
        handed, ours = [theirs_in, theirs_out, theirs_err], [self.stdin_fd, self.stdout_fd, self.stderr_fd]
        self._supervisor: PolledSupervisor | None = None
        started = foreground.PolledSupervisor.start(self._task, signals, handed, ours)
        for fd in handed:
            os.close(fd)
        for fd in ours:
            os.set_blocking(fd, False)
        if isinstance(started, CommandReport):
            self.report = started
        else:
            self._supervisor = started
            started.control.setblocking(False)

    @property
    def control_fd(self) -> int:
        """Return the descriptor of the supervisor's messages; -1 if the server has ended."""
        return self._supervisor.control.fileno() if self._supervisor is not None else -1

    @property
    def next_ns(self) -> int | None:
        """Return when `tick` is due."""
        return self._supervisor.client.next_ns if self._supervisor is not None else None

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the server, so that it can answer nothing."""
        return self.leader > 0 and kernel.is_stopped(self.leader)

    def stop(self, reason: str) -> None:
        """Send SIGTERM, and SIGKILL after the grace."""
        if self._supervisor is not None:
            self._supervisor.order(Order.STOP, reason)

    def kill(self, reason: str) -> None:
        if self._supervisor is not None:
            self._supervisor.order(Order.KILL, reason)

    def has_ended(self) -> bool:
        """Read the messages of the supervisor. Return whether the server and everything it started is gone."""
        for message in self._supervisor.receive() if self._supervisor is not None else ():
            if message[0] == News.STARTED:
                self.leader = message[1]
        return self._finish()

    def is_lost(self, now_ns: int) -> bool:
        """Look after the supervisor. Return whether it is lost, and the server was killed without it."""
        if self._supervisor is not None:
            self._supervisor.tick(now_ns)
        return self._supervisor is not None and self._supervisor.client.fate is Fate.LOST and self._finish()

    def _finish(self) -> bool:
        if self._supervisor is not None and self._supervisor.client.fate is None:
            return False
        if self._supervisor is not None and self.report is None:
            self.report = self._supervisor.finish(self._signals)
        return True

    def keep_stderr(self, text: bytes) -> None:
        """Keep the last lines for failures."""
        self._kept.append(text[-KEPT_STDERR:])
        self._kept_size += len(self._kept[-1])
        while self._kept_size - len(self._kept[0]) >= KEPT_STDERR:
            self._kept_size -= len(self._kept.popleft())

    @property
    def stderr(self) -> str:
        text = b"".join(self._kept)[-KEPT_STDERR:].decode("utf-8", "replace").strip()
        return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)

    def explain_unstartable(self) -> Problem:
        step, number = (self.report and self.report.unstartable) or ("fork", 0)
        return explain_unstartable(self._task, step, number)

    def describe_end(self) -> str:
        """Return how the server ended, as the end of a sentence."""
        report = self.report
        if report is None or report.lost:
            return "was killed together with its supervisor"
        if report.unstartable is not None:
            return f"could not be started: {self.explain_unstartable().message}"
        if report.status is None:
            return "ended unseen"
        if report.status < 0:
            return f"was killed by {signal_name(-report.status)}"
        return f"ended with exit code {report.status}"

    def close_stream(self, name: str) -> None:
        """Close our end of `stdin`, `stdout` or `stderr`."""
        if (fd := getattr(self, f"{name}_fd")) >= 0:
            os.close(fd)
            setattr(self, f"{name}_fd", -1)

    def close(self) -> None:
        for name in ("stdin", "stdout", "stderr"):
            self.close_stream(name)
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None
