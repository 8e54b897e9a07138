"""Killing of a tree of processes: every descendant of this subreaper, until the kernel says that there is none.

docs/design.md: R12, R13, R14.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Callable
from functools import cache

from ..core.clocks import NS_PER_MS
from . import kernel
from .clock import monotonic_ns
from .kernel import LINUX

# The signals that tell a program of ours to stop.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# How long a SIGKILLed tree may take to be gone. Only processes stuck inside the kernel (dead network mounts) exhaust
# it; they are reported as survivors.
VERIFY_LIMIT_MS = 2_000
# Between two sweeps over a tree that is dying; SIGCHLD usually ends the wait sooner.
SWEEP_PAUSE_MS = 5
# Sweeps that a tree may outlive before the kernel is asked to kill it as a whole: it forks faster than it is found.
SWEEPS_ALONE = 3
# Sweeps after which processes of other users, which we may not signal, are not waited for any longer.
SWEEPS_OVER_OTHERS = 6


def kill_below(
    reap: Callable[[], bool],
    pause: Callable[[int], None],
    *,
    find: Callable[[], list[int]] | None = None,
    escalate: Callable[[], None] = lambda: None,
) -> list[int]:
    """Send SIGKILL to every descendant of this subreaper, again and again until `reap` says that none is left.

    The only place that kills a tree. Whole process groups at a time, because within a group nothing can escape by
    forking while the signal is sent. `find` narrows the targets, anew for each sweep; what outlives the first few
    calls for `escalate`. Returns the pids that would not die within the limit, or that only another user can kill.
    """
    me, my_group = os.getpid(), os.getpgrp()
    find = find or (lambda: kernel.descendants(me))
    give_up_ns = monotonic_ns() + VERIFY_LIMIT_MS * NS_PER_MS
    sweeps = 0
    while True:
        sweeps += 1
        targets = find()
        for group in {group_of(pid) for pid in targets} - {0, my_group}:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        immune = [pid for pid in targets if not signal_process(pid, signal.SIGKILL)]
        if reap():
            return []
        if immune and sweeps >= SWEEPS_OVER_OTHERS and all(pid in immune or kernel.is_zombie(pid) for pid in find()):
            return [pid for pid in immune if not kernel.is_zombie(pid)]
        if monotonic_ns() >= give_up_ns:
            left = [pid for pid in find() if not kernel.is_zombie(pid)]
            # A /proc that lists nothing alive does not prove that nothing is there; only `reap` does.
            return left or ([] if reap() else [kernel.UNKNOWN_PID])
        if sweeps == SWEEPS_ALONE:
            escalate()
        elif all(pid in targets for pid in find()):  # otherwise something forked meanwhile: no time to pause
            pause(SWEEP_PAUSE_MS)
            if reap():
                return []


def kill_tree(root: int, pause: Callable[[int], None]) -> list[int]:
    """Kill a process of this user that is not below us, and all below it. Returns the pids that would not die within
    the limit. Whoever calls this knows that the process still is the one that is meant."""
    signal_process(root, signal.SIGSTOP)  # it starts nothing more, and stays the parent of what it has started
    seen: dict[int, int] = {}
    """By pid when it started. Those whose parent is killed before them are no longer found below the root."""

    def find() -> list[int]:
        found = kernel.descendants(root)
        for pid in seen.keys() - set(found):
            found += kernel.descendants(pid)
        for pid in found:
            seen.setdefault(pid, kernel.start_of(pid))
        return [pid for pid, at in seen.items() if kernel.start_of(pid) == at and not kernel.is_zombie(pid)]

    left = kill_below(lambda: not find(), pause, find=find)
    started = kernel.start_of(root)
    signal_process(root, signal.SIGKILL)
    give_up_ns = monotonic_ns() + VERIFY_LIMIT_MS * NS_PER_MS
    while started and kernel.start_of(root) == started and not kernel.is_zombie(root):
        if monotonic_ns() >= give_up_ns:
            left.append(root)
            break
        pause(SWEEP_PAUSE_MS)
    for pid in seen:  # a supervisor among them can no longer tidy up itself
        if (cgroup := Cgroup.left_by(pid)) is not None:
            cgroup.remove()
    return left


def signal_process(pid: int, number: int) -> bool:
    """Send a signal to a process, where it is still there. Return False if it belongs to another user."""
    try:
        os.kill(pid, number)
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def group_of(pid: int) -> int:
    """Return the process group of a process; 0: it is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


# --- cgroups ----------------------------------------------------------------------------------------------
#
# A cgroup around each command, where this machine lets us make one: the kernel itself then kills the whole tree.
# `cgroup.kill` cannot be outrun: not by a fork bomb, not by processes that fork and exit faster than they can be
# listed, not by ones of another user. It needs cgroup v2 and a place in it that we may write to, which root has on most
# machines and others have only where it was delegated to them. Everywhere else the walk over the descendants does the
# killing (`kill_below`), and verifies it here as well.

_SYS_CLONE3 = 435
_CLONE_INTO_CGROUP = 0x2_0000_0000
_PREFIX = "shotclock-"


class _CloneArguments(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
            "set_tid",
            "set_tid_size",
            "cgroup",
        )
    )


class Cgroup:
    """One directory in the cgroup tree, named after the supervisor that owns it."""

    __slots__ = ("_path", "inside")

    def __init__(self, path: str) -> None:
        self._path = path
        self.inside = False
        """Whether we are in it ourselves, so that whatever we start is."""

    @classmethod
    def create(cls) -> Cgroup | None:
        """Make a fresh one for this process's child, or return None where that is not possible."""
        home = home_directory()
        if home is None:
            return None
        path = os.path.join(home, f"{_PREFIX}{os.getpid()}")
        try:
            os.mkdir(path)
        except OSError:
            return None
        if os.path.exists(os.path.join(path, "cgroup.kill")):  # Linux 5.14
            return cls(path)
        with contextlib.suppress(OSError):
            os.rmdir(path)
        return None

    @classmethod
    def left_by(cls, pid: int) -> Cgroup | None:
        """Return the one that a supervisor, killed itself, can no longer remove: kill it, wait for the dead, remove
        it."""
        home = home_directory()
        path = os.path.join(home, f"{_PREFIX}{pid}") if home is not None else ""
        return cls(path) if path and os.path.isdir(path) else None

    def fork(self) -> int:
        """Fork like os.fork, but the child is in the cgroup from its first instruction. Only for a child that execs.

        Moving a process there later would take a lock of the whole system, and ten times as long.
        """
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            arguments = _CloneArguments(flags=_CLONE_INTO_CGROUP, exit_signal=signal.SIGCHLD, cgroup=fd)
            libc = ctypes.PyDLL(None, use_errno=True)
            ctypes.pythonapi.PyOS_BeforeFork()
            pid: int = libc.syscall(_SYS_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments))
            number = ctypes.get_errno()
            if pid == 0:
                ctypes.pythonapi.PyOS_AfterFork_Child()
                return 0
            ctypes.pythonapi.PyOS_AfterFork_Parent()
        finally:
            os.close(fd)
        if pid > 0:
            return pid
        if number == errno.EAGAIN:
            raise OSError(number, os.strerror(number))
        return os.fork()  # a sandbox that forbids clone3: the walk alone must do

    def kill(self) -> None:
        with contextlib.suppress(OSError), open(os.path.join(self._path, "cgroup.kill"), "w") as file:
            file.write("1")

    def enter(self) -> bool:
        """Move this process into it: all that it starts from here on is born in it; so would this process be killed
        with it."""
        self.inside = self.inside or _move_to(self._path)
        return self.inside

    def leave(self) -> bool:
        """Move this process out. Takes a lock of the whole system, as `enter` does: some milliseconds where nobody did
        so just before."""
        if self.inside and _move_to(os.path.dirname(self._path)):
            self.inside = False
        return not self.inside

    def remove(self) -> None:
        """Remove it, with what nested ones left behind. It must be empty; a survivor keeps it there."""
        _remove(self._path)


def _move_to(path: str) -> bool:
    try:
        with open(os.path.join(path, "cgroup.procs"), "w") as file:
            file.write("0")
    except OSError:
        return False
    return True


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)
        return
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                _remove(entry.path)
        os.rmdir(path)


@cache
def home_directory() -> str | None:
    """Return the cgroup this process is in, if it is one of version 2 that we may write to. Where we are in one of our
    own, it is the one around that: it was looked up before."""
    if not LINUX:
        return None
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            own = next(line[3:].rstrip("\n") for line in file if line.startswith("0::"))
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                if after.startswith("cgroup2 "):
                    root, mount = before.split()[3:5]
                    relative = os.path.relpath(own, root) if root != "/" else own.lstrip("/")
                    home = os.path.normpath(os.path.join(mount, relative))
                    return home if os.access(home, os.W_OK | os.X_OK) else None
    except (OSError, StopIteration, ValueError):
        pass
    return None


def mechanism() -> str:
    """Return how commands are killed on this machine: "cgroup", "subreaper" or "process group", the strongest there
    is."""
    if not LINUX:
        return "process group"
    probe = Cgroup.create()
    if probe is None:
        return "subreaper"
    probe.remove()
    return "cgroup"
