"""A command: its task, start, output, messages, and the report at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import NoReturn

from ..core.limits import DEFAULT_WIND_DOWN_MS
from ..core.value_types import as_dict, field, record, value
from . import clock

DEFAULT_OUTPUT_LIMIT = 1024 * 1024
# The most of a stream in a file: a flood must not fill the disk.
SPILL_CAP = 64 * 1024 * 1024
SPILL_KEPT_SECONDS = 24 * 3600
READ_SIZE = 256 * 1024
# POLLOUT promises room for this much in a pipe, so a write cannot block and shared descriptors keep their flags.
PIPE_ROOM = 4096
RELAY_HELD = 64 * 1024
LOOKED_AT = 4096  # bytes of each stream in an observer's view of a running command
SHOWN_HELD = 128 * 1024  # bytes of output that wait for a caller who is shown it; of more, the oldest are left out


@value
class Captured:
    head: bytes = b""
    tail: bytes = b""
    total: int = 0
    file: str | None = None
    file_bytes: int = 0

    @property
    def truncated(self) -> bool:
        return self.total > len(self.head) + len(self.tail)


class Capture:
    """Bounded capture of a stream: its first and last `limit / 2` bytes, and the whole in a file up to SPILL_CAP."""

    def __init__(self, limit: int, spill_to: str | None) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.total: int = 0
        self._spill_to = spill_to
        self._spill_fd = -1
        self._spilled = 0

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
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

    def end(self, most: int) -> bytes:
        tail = b"".join(self._tail)
        return (tail if len(tail) >= most else bytes(self._head) + tail)[-most:] if most else b""

    def finish(self) -> Captured:
        tail = b"".join(self._tail)
        if len(tail) > self._tail_limit:
            tail = tail[len(tail) - self._tail_limit :]
        if self._spill_fd >= 0:
            os.close(self._spill_fd)
            self._spill_fd = -1
            return Captured(bytes(self._head), tail, self.total, self._spill_to, self._spilled)
        return Captured(bytes(self._head), tail, self.total)

    def _open_spill(self) -> None:
        """Open the file when memory is full, and copy the output so far: the file has the whole."""
        if self._spill_to is None:
            return
        try:
            make_private_directory(os.path.dirname(self._spill_to))
            prune_spills()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._spill_fd = os.open(self._spill_to, flags, 0o600)
        except OSError:
            self._spill_to = None  # no place to write: head and tail are kept
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
            pass  # disk full: the file ends here, and its size is reported


class ShownOutput:
    """Captured output on its way to a caller who is shown it while the command runs."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._left_out = [0, 0]
        self.is_wanted: bool = True
        """The caller has taken all that was sent before, so a flood neither fills its socket nor waits for it."""

    @property
    def is_due(self) -> bool:
        return self.is_wanted and bool(self._pieces)

    def add(self, stream: int, chunk: bytes) -> None:
        self._pieces.append((stream, chunk))
        self._size += len(chunk)
        while self._size > SHOWN_HELD and len(self._pieces) > 1:
            oldest, dropped = self._pieces.popleft()
            self._size -= len(dropped)
            self._left_out[oldest - 1] += len(dropped)

    def take(self) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Return the pieces by their stream, 1 or 2, and the bytes of each stream left out before them."""
        pieces, left_out = list(self._pieces), self._left_out
        self._pieces.clear()
        self._size, self._left_out, self.is_wanted = 0, [0, 0], False
        return pieces, left_out


class OutputPipe:
    def __init__(self, fd: int, capture: Capture | None, relay_to: int) -> None:
        self.fd: int = fd
        self.capture = capture
        self.relay_to = relay_to
        self.shown: tuple[int, ShownOutput] | None = None
        self.held: bytearray = bytearray()
        self.total: int = 0
        self.last: bytes = b""
        self.last_ns = 0
        self.trouble: int = 0  # the errno of a failed relay; 0 if the reader left
        os.set_blocking(fd, False)

    @property
    def open(self) -> bool:
        return self.fd >= 0

    @property
    def busy(self) -> bool:
        return self.open or bool(self.held)

    def read(self) -> bool:
        """Read the available output. Return whether there was any."""
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
            if self.shown is not None:
                self.shown[1].add(self.shown[0], chunk)
        else:
            self.held += chunk
            self.total += len(chunk)
            self.last = (self.last + chunk)[-LOOKED_AT:]
        return True

    def end(self) -> tuple[bytes, int]:
        return (self.last, self.total) if self.capture is None else (self.capture.end(LOOKED_AT), self.capture.total)

    def write(self) -> None:
        if not takes_more(self.relay_to):  # both streams may be one pipe, which the other has filled
            return
        try:
            written = os.write(self.relay_to, self.held[:PIPE_ROOM])
        except OSError as error:  # the reader left: closing our end tells the work as it would without us
            self.trouble = 0 if error.errno == errno.EPIPE else error.errno or errno.EIO
            self.held.clear()
            self.close()
            return
        del self.held[:written]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def takes_more(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))


def state_directory() -> str:
    """Return the directory of durable state: SHOTCLOCK_HOME, XDG_STATE_HOME/shotclock or ~/.local/state/shotclock."""
    if home := os.environ.get("SHOTCLOCK_HOME"):
        return os.path.abspath(os.path.expanduser(home))
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "shotclock")


def make_private_directory(path: str) -> None:
    """Make a directory and its parent private: `os.makedirs` sets the mode of the last one only."""
    home = state_directory()
    os.makedirs(os.path.dirname(home), exist_ok=True)
    for folder in (home, path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def spill_path(name: str, home: str = "") -> str:
    """Return the file for output that does not fit into memory."""
    return f"{home or state_directory()}/output/{name}"


def stop_file_path(name: str, home: str = "") -> str:
    return f"{home or state_directory()}/stop/{name}"


def prune_spills() -> None:
    """Remove old output files. Called only before a new one is written, because it lists the directory."""
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


_SHELL = "/bin/sh"
_SCRIPT_LOOK = 256  # bytes, as shells do

# Python ignores these, and exec keeps that; a command expects the default.
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


class Output(Enum):
    INHERIT = auto()
    CAPTURE = auto()
    RELAY = auto()  # through a pipe, so that silence is noticed


@record
class CommandTask:
    """A command and its limits. Instants are monotonic nanoseconds; None is never."""

    argv: list[str]
    env: dict[str, str]
    cwd: str | None = None
    started_ns: int = 0
    bell_ns: int | None = None  # the timeout, at which the work is asked to stop
    kill_ns: int | None = None  # the latest kill, whatever the grace
    soft_ns: int | None = None  # the soft limit, at which the work is asked to end by itself
    idle_ms: int = 0  # the longest silence; 0 is any
    input_ms: int = 0  # how long a process may wait for input; 0 is for ever
    tells_input: bool = False  # by `News.INPUT_WANTED`, and the command continues
    grace_ms: int = 0  # between the request to stop and the kill
    output: str = Output.CAPTURE.name
    output_limit: int = DEFAULT_OUTPUT_LIMIT
    spill_stdout: str | None = None
    spill_stderr: str | None = None
    leave_children: bool = False
    stdin: bool = False  # otherwise the command reads the end of file at once
    wind_down_ms: int = DEFAULT_WIND_DOWN_MS
    stop_signal: str = "SIGTERM"
    stop_file: str | None = None
    executable: str | None = None  # the program, if it is not argv[0]
    umask: int = -1
    new_session: bool = False
    announced: bool = True  # its start is sent to the caller
    shares_group: bool = False  # with the caller, who has the terminal; otherwise it has a session and group of its own
    timeout_signal: int = int(signal.SIGTERM)
    tells_signals: bool = False  # by `News.SIGNALLED`
    shows_output: bool = False  # by `News.OUTPUT`, beside its capture
    runners: str | None = None  # the folder of the runners of jobs, which are spared; None: nothing is

    def pack(self) -> dict[str, object]:
        return as_dict(self)


@record
class CommandReport:
    """The report on a command or a worker, sent once, when its tree is verified gone or has survivors."""

    status: int | None = None  # the leader's exit code, or minus its signal; None if its end was not seen
    fired: str | None = None
    elapsed_ns: int = 0  # from the start to the limit that was reached, or to the end
    stopped: str | None = None  # the caller's reason
    leaked: list[dict[str, object]] = field(default_factory=list)
    survivors: list[dict[str, object]] = field(default_factory=list)
    jobs: list[dict[str, object]] = field(default_factory=list)
    """The jobs that were started below and continue."""
    soft_rang: bool = False
    input_wanted: dict[str, object] = field(default_factory=dict)
    """The process that waited for input, what it waited for, and the last line of the output where it is known."""
    stdout: Captured = field(default_factory=Captured)
    stderr: Captured = field(default_factory=Captured)
    unstartable: tuple[str, int] | None = None
    """The step of the start that failed ("machine", "exec", "cwd", "fork"), and its errno."""
    unwritten: int = 0
    lost: bool = False
    """The supervisor was killed before it could report. The survivors were looked for without it."""
    ended_ns: int = 0
    spare_pid: int = 0  # the pid of the supervisor, if it waits for another command

    def pack(self) -> dict[str, object]:
        packed = as_dict(self)
        for name in ("stdout", "stderr"):
            packed[name] = tuple(as_dict(packed[name]).values())
        return packed

    @classmethod
    def unpack(cls, packed: dict[str, object]) -> CommandReport:
        streams = {name: Captured(*packed[name]) for name in ("stdout", "stderr")}  # type: ignore[misc]
        return cls(**{**packed, **streams})  # type: ignore[arg-type]


class Order:
    """Kinds of orders to a supervisor, the first field of a message. The docstrings name the other fields."""

    STOP = "stop"
    """TERM, grace, KILL. Reason."""
    KILL = "kill"
    """KILL at once. Reason."""
    GRACE = "grace"
    """Change the grace. Milliseconds."""
    WIND_DOWN = "wind down"
    """The instant at which the work is stopped if it has not ended by itself."""
    BELL = "bell"
    """Move the timeout. Its instant, and that of the kill."""
    LOOK = "look"
    """Send `News.LOOKED`."""
    RING = "ring"
    """The timeout is over now."""
    SIGNAL = "signal"
    """Send a signal to the command. Its number."""
    SUSPEND = "suspend"
    CONTINUE = "continue"
    MORE = "more"
    """Send the next `News.OUTPUT`."""
    AGAIN = "again"
    """Run another worker. Its descriptors come with the message."""


class News:
    """Kinds of messages from a supervisor, likewise."""

    STARTED = "started"
    """The process group of the work, and the supervisor's own pid."""
    LOOKED = "looked"
    """The end of stdout, the end of stderr, and the total bytes of both."""
    SIGNALLED = "signalled"
    """The number of the signal that is sent to the work."""
    SUSPENDED = "suspended"
    INPUT_WANTED = "input wanted"
    """The process that waits for input, as in `CommandReport.input_wanted`; again after each such wait."""
    OUTPUT = "output"
    """Pieces of output with their stream, 1 or 2, and the bytes of each stream that were left out before them. The next
    one follows `Order.MORE`, and the last one the end of the command."""
    ENDED = "ended"
    """A packed `CommandReport`: the last message."""


class StartFailed(Exception):
    def __init__(self, step: str, errno: int) -> None:
        super().__init__(step, errno)
        self.step = step
        self.errno = errno


def become(task: CommandTask, becomes: dict[int, int]) -> None:
    """Exec the command in the forked child. All descriptors but the standard three close at exec."""
    for ignored in PYTHON_IGNORES:
        signal.signal(ignored, signal.SIG_DFL)
    _enter(task.cwd)
    if not task.stdin and 0 not in becomes:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, fd in becomes.items():
        os.dup2(fd, number)
    _try_each(task, lambda path: _exec(path, task.argv, task.env))


def _exec(path: str, argv: list[str], env: dict[str, str]) -> NoReturn:
    """Exec a program, or a script without `#!` by sh, as `execvp` does. What has a NUL is no script."""
    try:
        os.execve(path, argv, env)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        with open(path, "rb") as file:
            if b"\0" in file.read(_SCRIPT_LOOK):
                raise error from None
        os.execve(_SHELL, [_SHELL, path, *argv[1:]], env)


def spawn(task: CommandTask, becomes: dict[int, int]) -> int:
    """Spawn the command in a process group: cheaper than a fork. A dead network mount blocks this process."""
    _enter(task.cwd)
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in becomes.items()]
    apart = {"setsid": True} if task.new_session else {"setpgroup": 0}
    if task.umask >= 0:
        os.umask(task.umask)
    try:
        return _try_each(
            task,
            lambda path: os.posix_spawn(
                path, task.argv, task.env, file_actions=actions, setsigdef=PYTHON_IGNORES, **apart
            ),
        )
    finally:
        if task.cwd is not None:
            os.chdir("/")  # so that the directory can be removed or unmounted


def _try_each(task: CommandTask, start: Callable[[str], int]) -> int:
    """Start the first usable candidate, as `os.execvpe` does, which cannot spawn."""
    refused: OSError | None = None
    for path in _candidates(task.executable or task.argv[0], task.env):
        try:
            return start(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = error.errno or 0
        except OSError as error:  # not executable: a later one in the path may be
            refused = refused or error
    raise StartFailed("exec", missing if refused is None else refused.errno or 0)


def _candidates(command: str, env: dict[str, str]) -> list[str]:
    """Return the possible paths. The last one is always attempted, for its error."""
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
