"""Runners of jobs, which outlive the command that started them: a supervisor spares them and everything below them.

A runner leaves the session and the cgroup of its caller, and records itself in a private folder: a file named after
its pid with its start time. Only a process with both is spared, so neither a name nor a reused pid is enough. The
folder is looked at only while processes are left of a command that has ended or is to be stopped.
"""

from __future__ import annotations

import contextlib
import os

from . import kernel
from .command_task import make_private_directory, state_directory
from .kill import leave_our_cgroups

_FOLDER = "runners"
_LONGEST_ENTRY = 1_000


def runners_folder(home: str = "") -> str:
    return f"{home or state_directory()}/{_FOLDER}"


def enrol(folder: str, job_id: str, name: str) -> None:
    """Make this process a runner, before it starts any work. Raises OSError if it cannot be recorded."""
    with contextlib.suppress(OSError):  # it leads a session already
        os.setsid()
    leave_our_cgroups()
    make_private_directory(folder)
    _prune(folder)
    fresh = f"{folder}/.{os.getpid()}"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        entry = f"{kernel.read_start(os.getpid())} {job_id} {name}"
        file.write(entry.encode("utf-8", "replace"))  # the name may be that of a file, with any bytes
    os.rename(fresh, f"{folder}/{os.getpid()}")  # a half-written entry is never read


def withdraw(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/{os.getpid()}")


def is_enrolled(folder: str, job_id: str) -> bool:
    try:
        pids = [int(name) for name in os.listdir(folder) if name.isdecimal()]
    except OSError:
        return False
    return any((job := _read(folder, pid)) is not None and job["job_id"] == job_id for pid in pids)


def _prune(folder: str) -> None:
    """Remove the entries of runners that were killed."""
    for name in os.listdir(folder):
        if name.isdecimal() and _read(folder, int(name)) is None:
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}/{name}")


def _read(folder: str, pid: int) -> dict[str, object] | None:
    """Return the job of a living runner; None if the process is none."""
    try:
        with open(f"{folder}/{pid}", encoding="utf-8", errors="replace") as file:
            started, job_id, name = file.read(_LONGEST_ENTRY).split(" ", 2)
        if int(started) != kernel.read_start(pid):
            return None
    except (OSError, ValueError):
        return None
    return {"job_id": job_id, "name": name, "runner_pid": pid}


class Runners:
    """The runners below this process. Without a folder there are none."""

    __slots__ = ("_folder",)

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def is_one(self, pid: int) -> bool:
        return self._folder is not None and _read(self._folder, pid) is not None

    def list_others(self) -> list[int]:
        """Return every process below this one that is neither a runner nor below one."""
        return kernel.descendants(os.getpid(), None if self._folder is None else self.is_one)

    def are_alone(self) -> bool:
        """Return whether only runners are left.

        This process alone reaps its children, so none leaves the list while it is read; and every process below
        has an ancestor in it.
        """
        if self._folder is None:
            return False
        children = kernel.children_of(os.getpid())
        return bool(children) and all(map(self.is_one, children))

    def jobs(self) -> list[dict[str, object]]:
        """Return the jobs of the runners among our children."""
        if self._folder is None or not kernel.has_children():
            return []
        return [job for pid in kernel.children_of(os.getpid()) if (job := _read(self._folder, pid)) is not None]
