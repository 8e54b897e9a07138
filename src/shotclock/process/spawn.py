"""How a command comes to be: in a fork of ours that becomes it, or spawned without one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from .command_task import CommandTask

# Python ignores these, and what is ignored stays so across exec; what we run expects the default.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


class StartFailed(Exception):
    """`step` is "cwd" or "exec"."""

    def __init__(self, step: str, errno: int) -> None:
        super().__init__(step, errno)
        self.step = step
        self.errno = errno


def become(task: CommandTask, becomes: dict[int, int]) -> None:
    """In the child, between fork and exec. All our descriptors but the standard three close at exec."""
    for ignored in _PYTHON_IGNORES:
        signal.signal(ignored, signal.SIG_DFL)
    _enter(task.cwd)
    if not task.stdin and 0 not in becomes:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, fd in becomes.items():
        os.dup2(fd, number)
    _try_each(task, lambda path: os.execve(path, task.argv, task.env))


def spawn(task: CommandTask, becomes: dict[int, int]) -> int:
    """The command's pid, in a process group of its own: what is left of starting one when nothing of ours is copied,
    which is most of what a fork costs.

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
    """Where the command may be. The last one is tried in any case, for the reason why it is not."""
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
