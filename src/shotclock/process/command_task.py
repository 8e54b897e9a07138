"""A command: what a supervisor is told to run, how it is started, and the report when it is over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from enum import Enum, auto

from ..core.records import as_dict, default_factory, record
from .output import DEFAULT_OUTPUT_LIMIT, Captured

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
    """What to run and by when. Instants are monotonic nanoseconds; None is never."""

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

    def pack(self) -> dict[str, object]:
        return as_dict(self)


@record
class CommandReport:
    """What became of the work, sent once, when the tree is verified gone (or declared a survivor)."""

    status: int | None = None
    """The leader's exit code, or minus its signal; None if it was never seen to end."""
    fired: str | None = None
    """The clock that made us stop it."""
    elapsed_ns: int = 0
    """From start to the moment the clock fired, or to the end."""
    stopped: str | None = None
    """Why we were told to stop it, if we were: the caller's word."""
    leaked: list[dict[str, object]] = default_factory(factory=list)
    survivors: list[dict[str, object]] = default_factory(factory=list)
    soft_rang: bool = False
    stdout: Captured = default_factory(factory=Captured)
    stderr: Captured = default_factory(factory=Captured)
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
