"""The owner of a command: the agent, terminal or process that started it, and with which it ends."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Mapping

from ..core.limits import ProcessIdentity
from . import kernel
from .environment import AGENT_MARKS

OWNER_WORDS = ("agent", "terminal", "parent", "none")
# Variables in which an agent names its own process.
_PID_VARIABLES = ("CLAUDE_PID", "OPENCODE_PID")
# Without descriptors of processes, an owner is looked at this often.
OWNER_LOOK_MS = 500


class UnknownOwner(Exception):
    """An owner that was asked for and cannot be one."""


def find_owner(choice: str | None, environ: Mapping[str, str] = os.environ) -> ProcessIdentity | None:
    """Return the owner of that name or pid; None for no owner. Raises UnknownOwner.

    Without a choice it is the agent, else the leader of the terminal's session.
    """
    match choice:
        case None:
            return _agent(environ) or _terminal_leader()
        case "none":
            return None
        case "agent":
            found, missing = _agent(environ), "no coding agent runs this command"
        case "terminal":
            found, missing = _terminal_leader(), "this command has no terminal"
        case "parent":
            found, missing = _identify(os.getppid()), "the parent process is gone"
        case _:
            if not (pid := _read_pid(choice)):
                raise UnknownOwner(f"{choice!r} is neither a pid nor one of {', '.join(OWNER_WORDS)}")
            found = _identify(pid)
            missing = f"there is no process {choice} of this user"
    if found is None:
        raise UnknownOwner(missing)
    return found


def is_agent_gone(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether an agent has ended and left this process: its variable is stale, and the parent has adopted us.

    An adopting process, such as init, is in another session and has no variable of the agent. The process 1 of a
    sandbox has it: there the agent lives outside and is not seen.
    """
    parent = os.getppid()
    stale = [name for name in _PID_VARIABLES if (pid := _read_pid(environ.get(name, ""))) and not kernel.identify(pid)]
    session = 0
    with contextlib.suppress(OSError):
        session = os.getsid(parent)
    if not stale or not parent or session == os.getsid(0):
        return False
    inherited = kernel.environment_of(parent)
    if not inherited and not kernel.is_first_namespace():  # it may be hidden from us
        return False
    return not any(entry.startswith(f"{name}=".encode()) for name in stale for entry in inherited)


def find_agent_mark(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the mark of an agent that this process has, or a process above it: an environment can be cleared."""
    found = [each for pid in kernel.ancestors(os.getpid()) for each in kernel.environment_of(pid)]
    marked = {entry.partition(b"=")[0].decode("utf-8", "replace") for entry in found if entry.partition(b"=")[2]}
    return next((mark for mark in AGENT_MARKS if environ.get(mark) or mark in marked), None)


def _agent(environ: Mapping[str, str]) -> ProcessIdentity | None:
    """Return the agent that runs this command, by its own variable or by the mark that it gives to its commands."""
    above = kernel.ancestors(os.getpid())
    for name in _PID_VARIABLES:
        if (pid := _read_pid(environ.get(name, ""))) in above:
            return _identify(pid)
    mark = next((mark for mark in AGENT_MARKS if environ.get(mark)), None)
    if mark is None:
        return None
    # Commands of the agent inherit its mark, the agent itself was started without it.
    for pid in above:
        if not any(entry.startswith(f"{mark}=".encode()) for entry in kernel.environment_of(pid)):
            return _identify(pid) if pid > 1 else None
    return None


def _read_pid(text: str) -> int:
    """Return the pid; 0 if the text is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _terminal_leader() -> ProcessIdentity | None:
    leader = os.getsid(0)
    return _identify(leader) if leader not in (0, os.getpid()) and kernel.has_terminal(os.getpid()) else None


def _identify(pid: int) -> ProcessIdentity | None:
    """Return a living process of this user."""
    if pid <= 1:
        return None
    try:
        if kernel.LINUX and os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return None
    except OSError:
        return None
    return kernel.identify(pid)


class OwnerWatch:
    """Watch over an owner. `fd` becomes readable when it is gone; it is -1 where the system has no such descriptors."""

    def __init__(self, owner: ProcessIdentity) -> None:
        self._owner = owner
        self.look_ms = OWNER_LOOK_MS
        self.fd: int = -1
        try:
            self.fd = os.pidfd_open(owner.pid)
        except (AttributeError, OSError):
            return  # `is_gone` looks at the process itself

    @property
    def is_gone(self) -> bool:
        if self.fd >= 0 and select.select([self.fd], [], [], 0)[0]:
            return True
        return not kernel.is_alive(self._owner)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
