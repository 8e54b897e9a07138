"""Leftovers, which outlived their deadline with nobody left to stop them, and how to sweep them away safely.

Everything a command starts inherits SHOTCLOCK_DEADLINE_NS. A process that carries one which has passed, and has
no supervisor above it, is a leftover: its supervisor and its caller were killed in the same instant. (What is
left on purpose by `exec --leave-children` is told of no deadline.) Nothing here kills but `sweep_away`, and only what
is ours, overdue, unguarded and not at a terminal.

docs/design.md: R18.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable

from ..core.deadlines import NS_PER_MS
from ..core.records import dataclass
from ..core.trace import TRACEPARENT_VARIABLE, parse_trace
from . import cgroups, kernel
from .clock import monotonic_ns, wall_seconds
from .environment import DEADLINE_VARIABLE
from .supervisor import SUPERVISOR_NAME
from .zygote import ZYGOTE_NAME

# A tree that is being stopped right now is past its deadline, too; its supervisor takes milliseconds.
OVERDUE_AFTER_MS = 1_000
# What a leftover gets between TERM and KILL, and how long a killed one may take to be gone.
GRACE_MS = 1_000
VERIFY_MS = 2_000

# A cgroup this young may be of a supervisor that is about to put its command into it.
CGROUP_SETTLED_S = 60

# A supervisor stops what is below it; a zygote, what its supervisors lost.
_GUARDS = (SUPERVISOR_NAME, ZYGOTE_NAME)


@dataclass(frozen=True, slots=True)
class Leftover:
    pid: int
    command: str
    overdue_ms: int
    trace_id: str
    kept: str
    """Why a sweep would not touch it; empty if it would."""
    started: int
    """Clock ticks since boot: with the pid, an identity that is never reused."""


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    parent: int
    terminal: int
    started: int


def find_leftovers(trace_id: str | None = None) -> list[Leftover]:
    """Return everything on this machine that is overdue and unguarded; of one trace only, if one is given.

    Environments of other users' processes cannot be read unless we are root, so those are not seen.
    """
    if not os.path.isdir("/proc/self"):
        return []
    now, me = monotonic_ns(), os.geteuid()
    ourselves = {os.getpid(), *_ancestors(os.getpid())}
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) in ourselves:
            continue
        pid = int(name)
        carried = _read_deadline(pid)
        if carried is None:
            continue
        deadline_ns, trace = carried
        overdue_ms = (now - deadline_ns) // NS_PER_MS
        if overdue_ms < OVERDUE_AFTER_MS or (trace_id is not None and trace != trace_id):
            continue
        process = _read(pid)
        if process is None or kernel.is_zombie(pid) or _is_guarded(pid):
            continue
        kept = ""
        try:
            if os.stat(f"/proc/{pid}").st_uid != me:
                kept = "belongs to another user"
            elif process.terminal:
                kept = "has a terminal, so somebody may be sitting at it"
        except OSError:
            continue
        command = str(kernel.describe(pid)["command"])
        found.append(Leftover(pid, command, overdue_ms, trace, kept, process.started))
    return sorted(found, key=lambda leftover: leftover.pid)


def sweep_away(leftovers: Iterable[Leftover]) -> list[dict[str, object]]:
    """Send TERM, wait a short grace, send KILL. Return of each whether it is gone. What would be kept is not
    touched."""
    held: dict[int, Leftover] = {}
    swept: list[dict[str, object]] = []
    try:
        for leftover in leftovers:
            if leftover.kept:
                continue
            try:
                fd = os.pidfd_open(leftover.pid)
            except OSError:  # it left meanwhile
                swept.append({"pid": leftover.pid, "command": leftover.command, "gone": True})
                continue
            held[fd] = leftover
        # The descriptor pins the process; only now is it certain that it is still the one that was looked at.
        for fd, leftover in list(held.items()):
            process = _read(leftover.pid)
            if process is None or process.started != leftover.started:
                swept.append({"pid": leftover.pid, "command": leftover.command, "gone": True})
                del held[fd]
                os.close(fd)
        for number, wait_ms in ((signal.SIGTERM, GRACE_MS), (signal.SIGKILL, VERIFY_MS)):
            for fd in held:
                for each in (number, signal.SIGCONT):
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(fd, each)
            for fd in _await_ends(set(held), wait_ms):
                leftover = held.pop(fd)
                os.close(fd)
                swept.append({"pid": leftover.pid, "command": leftover.command, "gone": True})
        swept += [{"pid": left.pid, "command": left.command, "gone": False} for left in held.values()]
    finally:
        for fd in held:
            os.close(fd)
    return swept


def find_abandoned_cgroups() -> list[str]:
    """Return empty cgroups of supervisors that were killed before they could remove them. They cost little, but add
    up."""
    home = cgroups.home_directory()
    found = []
    for name in os.listdir(home) if home is not None else ():
        word, _, pid = name.partition("-")
        if word != "shotclock" or not pid.isdecimal() or os.path.exists(f"/proc/{pid}"):
            continue
        path = os.path.join(str(home), name)
        try:
            with open(os.path.join(path, "cgroup.events")) as file:
                empty = "populated 0" in file.read()
            if empty and wall_seconds() - os.stat(path).st_mtime > CGROUP_SETTLED_S:
                found.append(path)
        except OSError:
            continue
    return found


def remove_cgroups(paths: Iterable[str]) -> None:
    for path in paths:
        cgroups.Cgroup(path).remove()


def _await_ends(pidfds: set[int], wait_ms: int) -> set[int]:
    poller = select.poll()
    for fd in pidfds:
        poller.register(fd, select.POLLIN)
    ended: set[int] = set()
    give_up_ns = monotonic_ns() + wait_ms * NS_PER_MS
    while len(ended) < len(pidfds) and (left_ns := give_up_ns - monotonic_ns()) > 0:
        for fd, _ in poller.poll(-(-left_ns // NS_PER_MS)):
            ended.add(fd)
            poller.unregister(fd)
    return ended


def _read_deadline(pid: int) -> tuple[int, str] | None:
    """Return the deadline and the trace that a process was started with, if any."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    variables = dict(entry.partition(b"=")[::2] for entry in entries)
    deadline = variables.get(DEADLINE_VARIABLE.encode(), b"")
    if not deadline.isdigit() or len(deadline) >= 20:
        return None
    trace = parse_trace(variables.get(TRACEPARENT_VARIABLE.encode(), b"").decode(errors="replace"))
    return int(deadline), "" if trace is None else trace.trace_id


def _read(pid: int) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name is in parentheses and may itself contain anything. fields[n] is field n + 3 of proc(5).
            before, _, after = file.read().rpartition(b")")
    except OSError:
        return None
    fields = after.split()
    name = before.partition(b"(")[2].decode(errors="replace")
    return _Process(name, int(fields[1]), int(fields[4]), int(fields[19]))


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    process = _read(pid)
    while process is not None and process.parent > 0 and process.parent not in found:
        found.append(process.parent)
        process = _read(process.parent)
    return found


def _is_guarded(pid: int) -> bool:
    return any((process := _read(each)) is not None and process.name in _GUARDS for each in (pid, *_ancestors(pid)))
