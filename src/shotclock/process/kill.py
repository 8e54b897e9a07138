"""Killing of a tree of processes: every descendant of this subreaper, until the kernel says that there is none.

docs/design.md: R12, R13.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from ..core.deadlines import NS_PER_MS
from . import kernel
from .clock import monotonic_ns

# The signals that tell a program of ours to stop.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# How long a SIGKILLed tree may take to be gone. Only processes stuck inside the kernel (dead network mounts)
# or owned by another user exhaust it; they are reported as survivors.
VERIFY_LIMIT_MS = 2_000
# Between two sweeps over a tree that is dying; SIGCHLD usually ends the wait sooner.
SWEEP_PAUSE_MS = 5
# Sweeps that a tree may outlive before the kernel is asked to kill it as a whole: it forks faster than it is found.
SWEEPS_ALONE = 3


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
    calls for `escalate`. Returns the pids that would not die within the limit.
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
        for pid in targets:
            signal_process(pid, signal.SIGKILL)
        if reap():
            return []
        if monotonic_ns() >= give_up_ns:
            left = [pid for pid in targets if not kernel.is_zombie(pid)]
            # A /proc that went away under us lists nothing, which does not mean that nothing is there.
            return left if left or kernel.find_unfitness() is None else [kernel.UNKNOWN_PID]
        if sweeps == SWEEPS_ALONE:
            escalate()
        elif all(pid in targets for pid in find()):  # otherwise something forked meanwhile: no time to pause
            pause(SWEEP_PAUSE_MS)


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process, where it is still there, and ours to signal."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def group_of(pid: int) -> int:
    """Return the process group of a process; 0: it is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0
