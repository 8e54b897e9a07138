"""Who holds something that is stored: a process, named so that no later process can be mistaken for it."""

from __future__ import annotations

from .records import dataclass


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    host: str
    boot_id: str
    pid: int
    started: int
    """Clock ticks since boot: with boot and pid, an identity that is never used twice."""
    namespace: str = ""
    """Where the pid counts. A sandbox or a container has pids of its own under the same boot."""
