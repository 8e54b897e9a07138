"""A command: what a supervisor is told to run, how it is started, and the report when it is over.

Its output comes through a pipe that is read as it comes, and captured within bounds or passed on without waiting for
its reader.

docs/design.md: R16.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

from ..core.clocks import DEFAULT_WIND_DOWN_MS
from ..core.value_types import as_dict, field, record, value
from . import clock

DEFAULT_OUTPUT_LIMIT = 1024 * 1024
# A flood stops being written here; by then nobody will read it all, and a disk must not fill up.
SPILL_CAP = 64 * 1024 * 1024
SPILL_KEPT_SECONDS = 24 * 3600
READ_SIZE = 256 * 1024
# POLLOUT promises room for this much in a pipe, so a write of it cannot block, and no flag of a
# descriptor that others may share has to be changed.
PIPE_ROOM = 4096
RELAY_HELD = 64 * 1024
# What is shown of each stream to whoever asks what a command is doing.
LOOKED_AT = 4096


@value
class Captured:
    """Output that was captured: head and tail, and the file that has the whole."""

    head: bytes = b""
    tail: bytes = b""
    total: int = 0
    file: str | None = None
    file_bytes: int = 0

    @property
    def truncated(self) -> bool:
        return self.total > len(self.head) + len(self.tail)


class Capture:
    """Bounded capture of a stream. Keeps at most `limit` bytes in memory, the first half as it came and the last half
    seen so far; the whole in a file up to a cap."""

    def __init__(self, limit: int, spill_to: str | None) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._total = 0
        self._spill_to = spill_to
        self._spill_fd = -1
        self._spilled = 0

    def add(self, chunk: bytes) -> None:
        self._total += len(chunk)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if not chunk:
            return
        self._tail.append(chunk)
        self._tail_size += len(chunk)
        if self._spill_fd >= 0:
            self._spill(chunk)
        elif self._tail_size > self._tail_limit:
            self._open_spill()
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_limit:
            self._tail_size -= len(self._tail.popleft())

    @property
    def total(self) -> int:
        return self._total

    def end(self, most: int) -> bytes:
        """Return the last of what came, as far as it is in memory."""
        tail = b"".join(self._tail)
        return (tail if len(tail) >= most else bytes(self._head) + tail)[-most:] if most else b""

    def finish(self) -> Captured:
        tail = b"".join(self._tail)
        if len(tail) > self._tail_limit:
            tail = tail[len(tail) - self._tail_limit :]
        if self._spill_fd >= 0:
            os.close(self._spill_fd)
            self._spill_fd = -1
            return Captured(bytes(self._head), tail, self._total, self._spill_to, self._spilled)
        return Captured(bytes(self._head), tail, self._total)

    def _open_spill(self) -> None:
        """Open the file at the first byte that memory cannot keep: from here on it has everything, from the start."""
        if self._spill_to is None:
            return
        try:
            make_private_directory(os.path.dirname(self._spill_to))
            prune_spills()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._spill_fd = os.open(self._spill_to, flags, 0o600)
        except OSError:
            self._spill_to = None  # nowhere to write: head and tail are what is kept, and `truncated` says so
            return
        self._spill(bytes(self._head))
        for chunk in self._tail:
            self._spill(chunk)

    def _spill(self, chunk: bytes) -> None:
        chunk = chunk[: SPILL_CAP - self._spilled]
        try:
            while chunk:
                written = os.write(self._spill_fd, chunk)
                self._spilled += written
                chunk = chunk[written:]
        except OSError:
            pass  # disk full: the file ends here, its size is reported


class Stream:
    """One output pipe of the work."""

    def __init__(self, fd: int, capture: Capture | None, relay_to: int) -> None:
        self.fd = fd
        self.capture = capture
        self.relay_to = relay_to
        self.held = bytearray()
        self.total = 0
        self.last = b""
        """The end of what was relayed, for whoever looks at it."""
        self.trouble = 0
        """Why what was relayed could not be written on: an errno. That a reader left is none."""
        os.set_blocking(fd, False)

    @property
    def open(self) -> bool:
        return self.fd >= 0

    @property
    def busy(self) -> bool:
        return self.open or bool(self.held)

    def read(self) -> bool:
        """Take what is there. Return True if there was anything."""
        try:
            chunk = os.read(self.fd, READ_SIZE if self.capture else RELAY_HELD)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return False
        if self.capture is not None:
            self.capture.add(chunk)
        else:
            self.held += chunk
            self.total += len(chunk)
            self.last = (self.last + chunk)[-LOOKED_AT:]
        return True

    def end(self) -> tuple[bytes, int]:
        """Return the last of what came, and how much came in all."""
        return (self.last, self.total) if self.capture is None else (self.capture.end(LOOKED_AT), self.capture.total)

    def write(self) -> None:
        if not _takes_more(self.relay_to):  # both streams may be the same pipe, and the other was faster
            return
        try:
            written = os.write(self.relay_to, self.held[:PIPE_ROOM])
        except OSError as error:  # nobody reads any more: let the work find out the way it would without us
            self.trouble = 0 if error.errno == errno.EPIPE else error.errno or errno.EIO
            self.held.clear()
            self.close()
            return
        del self.held[:written]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _takes_more(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))


def state_directory() -> str:
    """Return where durable state lives: SHOTCLOCK_HOME, else XDG_STATE_HOME/shotclock, else
    ~/.local/state/shotclock."""
    if home := os.environ.get("SHOTCLOCK_HOME"):
        return os.path.abspath(home)
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "shotclock")


def make_private_directory(path: str) -> None:
    """Make a directory with every parent that is ours: makedirs gives its mode to the last one only."""
    home = state_directory()
    os.makedirs(os.path.dirname(home), exist_ok=True)
    for folder in (home, path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def spill_path(name: str, home: str = "") -> str:
    """Return the file of output that does not fit. `home` is the state directory, where the caller has looked it up."""
    return f"{home or state_directory()}/output/{name}"


def stop_file_path(name: str, home: str = "") -> str:
    return f"{home or state_directory()}/stop/{name}"


def prune_spills() -> None:
    """Remove output files nobody came for in a day. Cheap: one listing, only done when a new one is written."""
    folder = os.path.join(state_directory(), "output")
    oldest = clock.wall_seconds() - SPILL_KEPT_SECONDS
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.stat(follow_symlinks=False).st_mtime < oldest:
                os.unlink(entry.path)
        except OSError:
            continue


# Python ignores these, and what is ignored stays so across exec; what we run expects the default.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


class Output(Enum):
    INHERIT = auto()
    """The work writes to the caller's own descriptors; we never see it."""
    CAPTURE = auto()
    RELAY = auto()
    """Passed through byte by byte, so that silence can be noticed."""


@record
class CommandTask:
    """A command to run, and by when. Instants are monotonic nanoseconds; None is never."""

    argv: list[str]
    env: dict[str, str]
    cwd: str | None = None
    started_ns: int = 0
    """When the call began, from where its clocks are counted."""
    bell_ns: int | None = None
    kill_ns: int | None = None
    soft_ns: int | None = None
    idle_ms: int = 0
    grace_ms: int = 0
    output: str = Output.CAPTURE.name
    output_limit: int = DEFAULT_OUTPUT_LIMIT
    spill_stdout: str | None = None
    spill_stderr: str | None = None
    leave_children: bool = False
    stdin: bool = False
    """Give the work the caller's stdin. Otherwise it reads the end of file at once."""
    wind_down_ms: int = DEFAULT_WIND_DOWN_MS
    """What it has, once its soft clock has rung, before it is stopped."""
    stop_signal: str = "SIGTERM"
    """How it is asked to wind down."""
    stop_file: str | None = None
    """Made when it is asked to."""

    def pack(self) -> dict[str, object]:
        return as_dict(self)


@record
class CommandReport:
    """The report on a command or a worker, sent once, when the tree is verified gone (or declared a survivor)."""

    status: int | None = None
    """The leader's exit code, or minus its signal; None if it was never seen to end."""
    fired: str | None = None
    """The clock that made us stop it."""
    elapsed_ns: int = 0
    """From start to the moment the clock fired, or to the end."""
    stopped: str | None = None
    """Why we were told to stop it, if we were: the caller's word."""
    leaked: list[dict[str, object]] = field(default_factory=list)
    survivors: list[dict[str, object]] = field(default_factory=list)
    soft_rang: bool = False
    """It was asked to wind down, by its soft clock or by an order."""
    stdout: Captured = field(default_factory=Captured)
    stderr: Captured = field(default_factory=Captured)
    unstartable: tuple[str, int] | None = None
    """Which step of starting failed ("machine", "exec", "cwd", "fork"), and its errno."""
    unwritten: int = 0
    """The errno for which output that was to be passed on was lost."""
    lost: bool = False
    """There was no report: the supervisor was killed. What it guarded was looked for, and these are its survivors."""
    ended_ns: int = 0
    spare_pid: int = 0
    """The supervisor's own, where it waits for another command."""

    def pack(self) -> dict[str, object]:
        packed = as_dict(self)
        for name in ("stdout", "stderr"):
            packed[name] = tuple(as_dict(packed[name]).values())
        return packed

    @classmethod
    def unpack(cls, packed: dict[str, object]) -> CommandReport:
        for name in ("stdout", "stderr"):
            packed[name] = Captured(*packed[name])  # type: ignore[misc]
        return cls(**packed)  # type: ignore[arg-type]


class Order:
    """Orders to a supervisor: the first field of a message to it, and what the others are."""

    STOP = "stop"
    """TERM, the grace, KILL. With why."""
    KILL = "kill"
    """At once. With why."""
    GRACE = "grace"
    """The grace from here on, in milliseconds."""
    WIND_DOWN = "wind down"
    """Ask it to end by itself. With the instant at which it is stopped if it has not."""
    BELL = "bell"
    """Another bell. With its instant, and that of the kill."""
    LOOK = "look"
    """Answer with what it has written so far."""
    SUSPEND = "suspend"
    CONTINUE = "continue"
    AGAIN = "again"
    """Run another worker. Its descriptors come along."""


class News:
    """News from a supervisor: the first field of a message from it, and what the others are."""

    STARTED = "started"
    """With the process group of the work, and the supervisor's own pid."""
    SOFT = "soft"
    """The soft clock rang."""
    LOOKED = "looked"
    """With the end of its stdout and of its stderr, and how many bytes both were in all."""
    SUSPENDED = "suspended"
    ENDED = "ended"
    """With a packed `CommandReport`: the last one about this work."""


class StartFailed(Exception):
    """A command that could not be started. `step` is "cwd" or "exec"."""

    def __init__(self, step: str, errno: int) -> None:
        super().__init__(step, errno)
        self.step = step
        self.errno = errno


def become(task: CommandTask, becomes: dict[int, int]) -> None:
    """Become the command, in the child between fork and exec. All our descriptors but the standard three close at
    exec."""
    for ignored in _PYTHON_IGNORES:
        signal.signal(ignored, signal.SIG_DFL)
    _enter(task.cwd)
    if not task.stdin and 0 not in becomes:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, fd in becomes.items():
        os.dup2(fd, number)
    _try_each(task, lambda path: os.execve(path, task.argv, task.env))


def spawn(task: CommandTask, becomes: dict[int, int]) -> int:
    """Spawn the command in a process group of its own and return its pid: what is left of starting one when nothing of
    ours is copied, which is most of what a fork costs.

    Our own stdin must be what the command is to read. A directory or a program on a dead network mount holds us up
    here: whoever waits for us must notice.
    """
    _enter(task.cwd)
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in becomes.items()]
    try:
        return _try_each(
            task,
            lambda path: os.posix_spawn(
                path, task.argv, task.env, file_actions=actions, setpgroup=0, setsigdef=_PYTHON_IGNORES
            ),
        )
    finally:
        if task.cwd is not None:
            os.chdir("/")  # nobody's directory is kept from being removed or unmounted by us


def _try_each(task: CommandTask, start: Callable[[str], int]) -> int:
    """Start what the path leads to. (`os.execvpe` does the same, and imports `warnings` for it.)"""
    refused: OSError | None = None
    for path in _candidates(task.argv[0], task.env):
        try:
            return start(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = error.errno or 0
        except OSError as error:  # there, but not to be executed: one further down the path may be
            refused = refused or error
    raise StartFailed("exec", missing if refused is None else refused.errno or 0)


def _candidates(command: str, env: dict[str, str]) -> list[str]:
    """Return where the command may be. The last one is tried in any case, for the reason why it is not."""
    if os.sep in command:
        return [command]
    paths = [os.path.join(folder, command) for folder in env.get("PATH", os.defpath).split(os.pathsep)]
    return [path for path in paths[:-1] if os.access(path, os.F_OK)] + paths[-1:]


def _enter(cwd: str | None) -> None:
    if cwd is not None:
        try:
            os.chdir(cwd)
        except OSError as error:
            raise StartFailed("cwd", error.errno or 0) from None
