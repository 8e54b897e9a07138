"""Identity of this process, and whether another one that was written down is still there.

A pid alone says nothing: it is used again, sooner or later. With its start time and the boot it is unique.
What cannot be looked at from here (another machine, another pid namespace) is assumed to be alive, because the
other mistake would take a lock from somebody who is using it.

docs/design.md: R35.
"""

from __future__ import annotations

import os
from functools import lru_cache

from ..core.errors import Failure
from ..core.walltime import ProcessIdentity
from . import kernel

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def this_process() -> ProcessIdentity:
    return _this_process(os.getpid())


def is_alive(holder: ProcessIdentity) -> bool:
    """Return whether that very process still runs. A zombie does not; who is out of sight is taken to."""
    me = this_process()
    if holder.boot_id != me.boot_id:
        # The same machine, started again: nobody of that boot is left. Another machine: cannot be known from here.
        return holder.host != me.host
    if holder.namespace != me.namespace:
        return True
    try:
        seen = _read_start(holder.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # out of descriptors, say: not a proof of anybody's death
        return True
    return seen is not None and seen == holder.started


@lru_cache(maxsize=1)  # keyed by pid: a fork is somebody else
def _this_process(pid: int) -> ProcessIdentity:
    if (unfit := kernel.find_unfitness()) is not None:
        raise Failure("MACHINE_UNFIT", unfit)
    host = os.uname().nodename
    started = _read_start(pid)
    if started is None:
        raise ProcessLookupError(pid)
    return ProcessIdentity(host, _boot_id() or host, pid, started, _namespace())


def _read_start(pid: int) -> int | None:
    """Return when the process started; None for a zombie. Raises FileNotFoundError or ProcessLookupError if there is
    none."""
    if not kernel.LINUX:
        return _read_start_without_proc(pid)
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name is in parentheses and may itself contain anything. fields[n] is field n + 3 of proc(5).
        fields = file.read().rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _read_start_without_proc(pid: int) -> int | None:
    import psutil

    try:
        process = psutil.Process(pid)
        # Hundredths of a second on the wall clock there, so the boot need not tell two processes apart.
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 100)
    except psutil.ZombieProcess:
        return None
    except psutil.NoSuchProcess:
        raise ProcessLookupError(pid) from None


def _boot_id() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
