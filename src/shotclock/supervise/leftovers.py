"""Search for the processes that a piece of a program left behind, however they daemonised. Linux only.

A process belongs to the watched piece if it started since and carries the mark of the watch in its environment, or
descends from this process, or is a bare fork of it. One that scrubs its environment, runs another program and leaves
its parent before the first look is not found.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from . import kernel
from .clock import monotonic_ns, pause
from .kill import signal_process

MARK = "SHOTCLOCK_TEST_MARK"  # the variable with the token of a watch
POLL_S = 0.02
MOST_GENERATIONS = 1000  # a pid that is used again during the walk upwards could close a circle


@dataclass(frozen=True)
class LeftProcess:
    pid: int
    ppid: int
    state: str  # one letter, as in proc(5): R, S, D, T, Z, …
    started: int  # clock ticks since boot: with the pid, an identity that is never reused
    image: tuple[bytes, ...]  # addresses of stack and environment: random per exec, inherited by a bare fork
    name: str

    @cached_property
    def cmdline(self) -> str:
        """Return the command line as of the first look, or the name of a process that is gone."""
        return kernel.command_line_of(self.pid) or f"[{self.name}]"

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.started

    def __str__(self) -> str:
        return f"pid {self.pid} (parent {self.ppid}, state {self.state}): {self.cmdline}"


def read_process(pid: int) -> LeftProcess | None:
    fields = kernel.get_stat(pid)
    if not fields:
        return None
    image = (fields[25], fields[47], fields[48])  # startstack, env_start, env_end
    state = "S" if fields[0] == b"Z" and int(fields[17]) > 1 else fields[0].decode()  # only its main thread has ended
    return LeftProcess(pid, int(fields[1]), state, int(fields[19]), image, kernel.name_of(pid))


def pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def find_carriers(variable: str) -> list[LeftProcess] | None:
    """Return the living processes of this user that were started with `NAME=value`; None where there is no /proc."""
    if not os.path.exists("/proc/self/environ"):
        return None
    found = []
    for pid in pids():
        if variable.encode() in kernel.environment_of(pid):
            process = read_process(pid)
            if process is not None and process.state not in "ZX":
                _ = process.cmdline  # it may be gone when it is shown
                found.append(process)
    return sorted(found, key=lambda each: each.started)


@dataclass
class Watch:
    """A search for processes that started since `begin`. Call it from the process that starts them."""

    token: str
    helpers: Callable[[], set[int]] = set
    """Return our own helpers: not reported themselves, but their forks are."""
    spares_earlier: bool = False
    """Leave out the later children of processes that were there before: workers of a server that others use as well."""
    counts_zombies: bool = True
    before: set[int] = field(default_factory=set)
    """Pids of the processes that were there before. The kernel uses a pid again only after all the others."""
    seen: dict[tuple[int, int], LeftProcess] = field(default_factory=dict)
    _without_token: set[tuple[int, int, tuple[bytes, ...]]] = field(default_factory=set)

    def begin(self) -> None:
        """Leave out the processes that are there now."""
        self.before = pids()

    def alive(self) -> list[LeftProcess]:
        """Return the processes that are still there; of zombies only those that this process has to reap."""
        me = os.getpid()
        there = {p.pid: p for p in map(read_process, pids() - self.before) if p is not None}
        if not there:
            return []
        helpers = self.helpers()
        # Unreadable images are all zeros, also those of foreign processes.
        images = {p.image for pid in (me, *helpers) if (p := read_process(pid)) and p.image[0] != b"0"}

        def is_ours(process: LeftProcess) -> bool:
            if process.pid in helpers:
                return False
            if process.state in "ZX":
                return self.counts_zombies and process.ppid == me
            lineage = self._lineage(process, there)
            if lineage[-1] == me:
                return not self.spares_earlier or self.before.isdisjoint(lineage[:-1])
            return process.image in images or self._carries_token(process)

        found = sorted(filter(is_ours, there.values()), key=lambda p: p.pid)
        for process in found:
            _ = process.cmdline  # it may be gone when it is shown
        self.seen.update({p.identity: p for p in found})
        return found

    def _lineage(self, process: LeftProcess, there: dict[int, LeftProcess]) -> list[int]:
        """Return the pids above a process, up to this one or the first."""
        me, above = os.getpid(), [process.ppid]
        while above[-1] not in (0, 1, me) and len(above) < MOST_GENERATIONS:
            parent = there.get(above[-1]) or read_process(above[-1])
            if parent is None:
                break
            above.append(parent.ppid)
        return above

    def _carries_token(self, process: LeftProcess) -> bool:
        known = (process.pid, process.started, process.image)
        if process.image[0] == b"0" or known in self._without_token:  # not readable, nor is its environment
            return False
        environ = kernel.environment_of(process.pid)
        if f"{MARK}={self.token}".encode() in environ:
            return True
        if environ:  # in the middle of an exec there is none
            self._without_token.add(known)
        return False

    def wait_until_alone(self, within_s: float, *, kill: bool = False) -> list[LeftProcess]:
        """Return the processes that are left after this time. Two clean looks in a row: /proc is no snapshot."""
        give_up_ns = monotonic_ns() + round(within_s * 1e9)
        clean_looks = 0
        while clean_looks < 2:
            survivors = self.alive()
            clean_looks = 0 if survivors else clean_looks + 1
            for process in survivors if kill else ():
                _end(process)
            if survivors and monotonic_ns() >= give_up_ns:
                return survivors
            if survivors:
                pause(POLL_S)
        return []


def _end(process: LeftProcess) -> None:
    signal_process(process.pid, signal.SIGKILL)
    try:
        os.waitpid(process.pid, os.WNOHANG)
    except OSError:  # not our child
        pass
