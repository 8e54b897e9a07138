"""Killing of process trees, verified by waitpid below a subreaper, else by /proc."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Callable
from functools import cache

from ..core.limits import NS_PER_MS
from . import kernel
from .clock import monotonic_ns
from .kernel import LINUX

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Only processes stuck inside the kernel (dead network mounts) exhaust this; they are reported as survivors.
VERIFY_LIMIT_MS = 2_000
SWEEP_PAUSE_MS = 5  # between two sweeps; SIGCHLD usually ends the wait sooner
# After these the kernel is asked to kill the tree as a whole: it forks faster than it is found.
SWEEPS_ALONE = 3
SWEEPS_OVER_OTHERS = 6  # after these the wait for processes of other users, which we may not signal, ends


def kill_below(
    reap: Callable[[], bool],
    pause: Callable[[int], None],
    *,
    find: Callable[[], list[int]] | None = None,
    spared_group: int = 0,
    escalate: Callable[[], None] = lambda: None,
) -> list[int]:
    """Send SIGKILL to every target until `reap` reports that none is left, or the limit is over; return the survivors.

    A process group is signalled as a whole, because within it nothing can escape by forking meanwhile, unless its
    leader is alive and no target: children of a shared worker are in the group of the worker. `spared_group` has other
    processes as well and is never signalled. `find` returns the targets of each sweep (default: our descendants);
    `escalate` is called if a tree outlives the first few.
    """
    me, my_group = os.getpid(), os.getpgrp()
    find = find or (lambda: kernel.descendants(me))
    give_up_ns = monotonic_ns() + VERIFY_LIMIT_MS * NS_PER_MS
    sweeps = 0
    while True:
        sweeps += 1
        targets = find()
        for group in {group_of(pid) for pid in targets} - {0, my_group, spared_group}:
            if group in targets or kernel.is_zombie(group):
                with contextlib.suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
        immune = [pid for pid in targets if not signal_process(pid, signal.SIGKILL)]
        if reap():
            return []
        if immune and sweeps >= SWEEPS_OVER_OTHERS and all(pid in immune or kernel.is_zombie(pid) for pid in find()):
            left = [pid for pid in immune if not kernel.is_zombie(pid)]
            if left:
                return left
        if monotonic_ns() >= give_up_ns:
            left = [pid for pid in find() if not kernel.is_zombie(pid)]
            # A /proc that lists nothing alive does not prove that nothing is there; only `reap` does.
            return left or ([] if reap() else [kernel.UNKNOWN_PID])
        if sweeps == SWEEPS_ALONE:
            escalate()
        elif all(pid in targets for pid in find()):  # otherwise a target forked meanwhile: do not pause
            pause(SWEEP_PAUSE_MS)
            if reap():
                return []


def kill_tree(root: int, pause: Callable[[int], None]) -> list[int]:
    """Kill a process of this user that is not below us, and its tree. The caller knows that the pid was not reused."""
    started = _start_of(root)
    signal_process(root, signal.SIGSTOP)  # it starts nothing more, and stays the parent of its children
    seen: dict[int, int] = {}
    """Start times by pid. A process whose parent is killed first is no longer found below the root."""

    def find() -> list[int]:
        found = kernel.descendants(root)
        for pid in seen.keys() - set(found):
            found += kernel.descendants(pid)
        for pid in found:
            seen.setdefault(pid, _start_of(pid))
        return [pid for pid, at in seen.items() if _start_of(pid) in (at, _UNSEEN) and not kernel.is_zombie(pid)]

    left = kill_below(lambda: not find(), pause, find=find)
    if _start_of(root) == started:  # otherwise it died meanwhile, and the pid may be another process's
        signal_process(root, signal.SIGKILL)
    give_up_ns = monotonic_ns() + VERIFY_LIMIT_MS * NS_PER_MS
    while started and _start_of(root) == started and not kernel.is_zombie(root):
        if monotonic_ns() >= give_up_ns:
            left.append(root)
            break
        pause(SWEEP_PAUSE_MS)
    for pid in seen:  # a killed supervisor cannot remove its own
        if (cgroup := Cgroup.left_by(pid)) is not None:
            cgroup.remove()
    return left


_UNSEEN = -1  # the start of a process that exists but cannot be looked at


def _start_of(pid: int) -> int:
    try:
        return kernel.start_of(pid)
    except PermissionError:
        return _UNSEEN


def signal_process(pid: int, number: int) -> bool:
    """Send a signal to a process, if it exists. Return False if it belongs to another user."""
    try:
        os.kill(pid, number)
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def signal_pinned(fd: int, number: int) -> None:
    """Send a signal to the process of a pidfd, if it exists."""
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(fd, number)


def is_group_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


# A cgroup around each command, if this user may make one: `cgroup.kill` cannot be outrun, not by a fork bomb and not by
# processes of another user. It needs cgroup v2 and a writable place in it, which root has on most machines and other
# users have only by delegation. Otherwise `kill_below` kills; it verifies the kill in both cases.

_SYS_CLONE3 = 435
_CLONE_INTO_CGROUP = 0x2_0000_0000
_PREFIX = "shotclock-"


class _CloneArguments(ctypes.Structure):
    _names = "flags pidfd child_tid parent_tid exit_signal stack stack_size tls set_tid set_tid_size cgroup"
    _fields_ = tuple((name, ctypes.c_uint64) for name in _names.split())


class Cgroup:
    """A cgroup named after the supervisor that owns it."""

    __slots__ = ("_path", "inside")

    def __init__(self, path: str) -> None:
        self._path = path
        self.inside: bool = False

    @classmethod
    def create(cls) -> Cgroup | None:
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
        home = home_directory()
        path = os.path.join(home, f"{_PREFIX}{pid}") if home is not None else ""
        return cls(path) if path and os.path.isdir(path) else None

    def fork(self) -> int:
        """Fork a child inside the cgroup, which must exec. Moving it later takes a system-wide lock."""
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
        return os.fork()  # a sandbox forbids clone3: the walk alone has to kill

    def kill(self) -> None:
        with contextlib.suppress(OSError), open(os.path.join(self._path, "cgroup.kill"), "w") as file:
            file.write("1")

    def enter(self) -> bool:
        """Move this process into the cgroup. It is killed with the cgroup, too."""
        self.inside = self.inside or _move_to(self._path)
        return self.inside

    def leave(self) -> bool:
        """Move this process out. Takes a system-wide lock like `enter`: some milliseconds."""
        if self.inside and _move_to(os.path.dirname(self._path)):
            self.inside = False
        return not self.inside

    def remove(self) -> None:
        """Remove the cgroup and those nested in it, unless a survivor is inside."""
        _remove(self._path)


def leave_our_cgroups() -> None:
    """Move this process to the nearest cgroup that is not one of ours, if it is in one."""
    home = outside = home_directory()
    while outside is not None and os.path.basename(outside).startswith(_PREFIX):
        outside = os.path.dirname(outside)
    if outside is not None and outside != home and _move_to(outside):
        home_directory.cache_clear()


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
    """Return the writable cgroup v2 of this process, cached before it enters one of its own."""
    if not LINUX or kernel.is_proc_foreign():  # ours are named after pids, which others have around our namespace
        return None
    with contextlib.suppress(OSError, StopIteration, ValueError):
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
    return None


def mechanism() -> str:
    """Return the strongest way to kill commands on this machine: "cgroup", "subreaper" or "process group"."""
    if not LINUX:
        return "process group"
    probe = Cgroup.create()
    if probe is None:
        return "subreaper"
    probe.remove()
    return "cgroup"
