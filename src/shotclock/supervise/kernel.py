"""Calls into the kernel: adoption of orphans, death with the parent, the process tree, timers, process identity.

Outside Linux `become_subreaper` fails: there an orphan is killed only with the process group of the work.

The identity of a process is its pid, start time and boot, because pids are reused. A process that cannot be seen from
here (another machine, another pid namespace) is assumed to be alive: the opposite mistake would take a lock from its
owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from struct import Struct

from ..core.errors import Failure
from ..core.limits import ProcessIdentity
from ..core.value_types import replace

LINUX = sys.platform == "linux"
_PF_EXITING = 0x4  # a flag of /proc/PID/stat: set before the process gives its children away

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_TFD_TIMER_ABSTIME = 1

# PyDLL keeps the GIL: these calls return at once, and handing the GIL over costs more than they do.
_libc = ctypes.PyDLL(None, use_errno=True) if LINUX else None


def _prctl(option: int, value: int) -> bool:
    return _libc is not None and _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0


def find_unfitness() -> str | None:
    """Return why work cannot be stopped here, so none may start. The /proc of another PID namespace lists others."""
    if not LINUX:
        return None
    if not (own := _name_in_proc()):
        return "/proc is not mounted or cannot be read, so processes could not be found to be stopped"
    if own != str(os.getpid()):
        return (
            "/proc shows another PID namespace, so the wrong processes would be stopped: mount it anew (mount -t proc)"
        )
    return None


def is_proc_foreign() -> bool:
    """Return whether /proc shows another PID namespace. Of its entries only our own is certain, and our children."""
    return LINUX and _name_in_proc() not in ("", str(os.getpid()))


def _name_in_proc() -> str:
    try:
        return os.readlink("/proc/self")
    except OSError:
        return ""


def _entry(pid: int) -> str:
    """Return the name of the entry of a process in /proc; one that is never there, where it cannot be known."""
    return str(pid) if not is_proc_foreign() else "self" if pid == os.getpid() else "0"


def become_subreaper() -> bool:
    """Adopt every orphaned descendant from now on. A fork does not inherit this."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent dies. The parent must be single-threaded: the kernel watches its thread."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died between the fork and the line above
        os._exit(1)


def forbid_core_dump() -> None:
    """Leave no core file of this process, as before it ends itself by SIGQUIT."""
    _prctl(_PR_SET_DUMPABLE, 0)


def name_process(name: str) -> None:
    """Set the name in `ps` and `top`, so that an operator can tell our processes from the work."""
    if _libc is not None:
        _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def hide_variables(is_hidden: Callable[[str], bool]) -> None:
    """Hide variables from the /proc entry of this process, which shows the memory that the kernel filled at exec.

    C gets copies first; a library that kept a pointer into the old memory would see an empty value.
    """
    if _libc is None:
        return
    try:
        fields = _read_stat("self")
        start, end = int(fields[47]), int(fields[48])
        if not 0 < start < end:
            return
        position = start
        for entry in ctypes.string_at(start, end - start).split(b"\0"):
            name, equals, _ = entry.partition(b"=")
            if equals and is_hidden(os.fsdecode(name)):
                if (value := os.environb.get(name)) is not None:
                    os.putenv(name, value)
                ctypes.memset(position, 0, len(entry))
            position += len(entry) + 1
    except (OSError, IndexError):
        return


def has_children() -> bool:
    """Return whether any child is left; for a subreaper, which adopts every orphan, the proof that a tree is gone."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def collect_dead(on_end: Callable[[int, int], None] = lambda pid, status: None) -> bool:
    """Reap every child that has ended, with a call for each. Return whether none is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False
        on_end(pid, status)


def open_signal_pipe() -> tuple[int, int]:
    """Return a pipe that every handled signal writes to from now on, so that it ends a poll."""
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
    return ends


_SIGINFO_SIZE = 128
_SI_KERNEL = 128
_SFD_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000


def open_signal_descriptor(numbers: Iterable[int]) -> int:
    """Open a descriptor on which blocked signals are read with their origin; -1 if there is none here."""
    if _libc is None:
        return -1
    mask = sum(1 << (number - 1) for number in numbers)
    fd: int = _libc.signalfd(-1, (ctypes.c_uint64 * 16)(mask), _SFD_NONBLOCK_CLOEXEC)
    return fd


def read_signal(fd: int) -> tuple[int, bool] | None:
    """Read the next signal, and whether the kernel sent it, as for a key of a terminal."""
    try:
        details = os.read(fd, _SIGINFO_SIZE)
    except BlockingIOError:
        return None
    number, code = int.from_bytes(details[:4], sys.byteorder), int.from_bytes(details[8:12], sys.byteorder)
    return number, code == _SI_KERNEL


def empty(fd: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(fd, 4096):
            pass


_TERMIOS_SIZE = 256  # more than any


def terminal_modes(fd: int) -> bytes:
    """Return the modes of a terminal, as `set_terminal_modes` takes them; nothing if they cannot be read."""
    modes = ctypes.create_string_buffer(_TERMIOS_SIZE)
    return modes.raw if _libc is not None and _libc.tcgetattr(fd, modes) == 0 else b""


def set_terminal_modes(fd: int, modes: bytes) -> None:
    if _libc is not None:
        _libc.tcsetattr(fd, 0, modes)  # at once


def replace_by_null(*numbers: int) -> None:
    """Let these descriptors lead nowhere: the process at the other end must not wait for this one."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        os.dup2(null, number)
    os.close(null)


UNKNOWN_PID = 0  # the pid of processes that exist, since waitpid has not returned ECHILD, but that /proc does not show


def descendants(root: int, is_left_out: Callable[[int], bool] | None = None) -> list[int]:
    """Return every process below `root`, parents before children, zombies included: a snapshot, soon stale.

    One that `is_left_out` is missing with everything below it.
    """
    if find_unfitness() is not None:
        return _list_own_children() if root == os.getpid() and is_proc_foreign() else []
    list_children = _find_lister()
    found: list[int] = []
    queue = [root]
    while queue:
        children = list_children(queue.pop())
        if is_left_out is not None:
            children = [pid for pid in children if not is_left_out(pid)]
        found += children
        queue += children
    return found


def children_of(pid: int) -> list[int]:
    return [] if find_unfitness() is not None else _find_lister()(pid)


def _find_lister() -> Callable[[int], list[int]]:
    """Return a function that lists the children of a process: by its children files or a pass over all processes."""
    if LINUX and os.path.exists("/proc/thread-self/children"):
        return _list_children
    by_parent = _scan_parents()
    return lambda pid: by_parent.get(pid, [])


def _list_own_children() -> list[int]:
    """Return the children of this process, by their pids here, from the /proc of a PID namespace around this one.

    When they are killed, a subreaper gets the children of each, and so the whole tree in the end.
    """
    depth = len(_pids_in_namespaces("self"))
    outside = _read_text("/proc/thread-self/children").split()
    return [int(pids[depth - 1]) for child in outside if len(pids := _pids_in_namespaces(child)) >= depth > 0]


def _pids_in_namespaces(entry: str) -> list[str]:
    lines = _read_text(f"/proc/{entry}/status").splitlines()
    return next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])


def name_of(pid: int) -> str:
    return _read_text(f"/proc/{_entry(pid)}/comm").rstrip("\n")


def _read_text(path: str, most: int = -1) -> str:
    """Return the text of a file, or its beginning; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return ""


def _list_children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # the process is gone
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def _scan_parents() -> dict[int, list[int]]:
    by_parent: dict[int, list[int]] = {}
    if LINUX:
        for name in os.listdir("/proc"):
            if name.isdecimal() and (fields := get_stat(int(name))):
                by_parent.setdefault(int(fields[1]), []).append(int(name))
        return by_parent
    import psutil

    for process in psutil.process_iter(["pid", "ppid"]):
        by_parent.setdefault(process.info["ppid"], []).append(process.info["pid"])
    return by_parent


def _read_stat(path: object) -> list[bytes]:
    """Return the fields of /proc/<path>/stat after the name: fields[n] is field n + 3 of proc(5).

    Raises PermissionError for a process that is there but hidden.
    """
    try:
        with open(f"/proc/{_entry(path) if isinstance(path, int) else path}/stat", "rb") as file:
            # The name may contain anything, parentheses included.
            return file.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        if isinstance(path, int) and exists(path):
            raise PermissionError(errno.EACCES, "hidden", f"/proc/{path}") from None
        raise


def exists(pid: int) -> bool:
    """Return whether there is a process, also one that /proc hides, as it does when mounted with `hidepid`."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # of another user
        return True
    except OSError:
        return False
    return True


def hides_processes() -> bool:
    """Return whether /proc may hide processes of other users from this one."""
    if os.geteuid() == 0:
        return False
    mounts = [line.split() for line in _read_text("/proc/self/mounts").splitlines()]
    options = next((fields[3] for fields in reversed(mounts) if fields[1] == "/proc"), "")
    return "hidepid=" in options


def _threads_of(pid: int) -> Iterator[str]:
    yield (entry := _entry(pid))
    with contextlib.suppress(OSError):
        yield from (f"{entry}/task/{thread}" for thread in os.listdir(f"/proc/{entry}/task"))


def _state_of(pid: int, fields: list[bytes]) -> str:
    """Return the state letter of a process, or of a living thread if its main thread has ended."""
    letter = fields[0].decode()
    if letter in "ZX" and int(fields[17]) > 1:
        for thread in _threads_of(pid):
            with contextlib.suppress(OSError):
                if (other := _read_stat(thread)[0].decode()) not in "ZX":
                    return other
    return letter


def _look_at(pid: int) -> str:
    """Return the state letter; X if the process is gone, "?" if it cannot be seen, for want of descriptors perhaps."""
    try:
        return _state_of(pid, _read_stat(pid))
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except OSError:
        return "?"


def get_stat(pid: int) -> list[bytes]:
    """Return the fields as `_read_stat` does; none of a process that is gone or cannot be seen."""
    try:
        return _read_stat(pid)
    except OSError:
        return []


def ancestors(pid: int) -> list[int]:
    found: list[int] = []
    if is_proc_foreign():  # it shows the pids of another namespace
        return found
    while (fields := get_stat(pid)) and (parent := int(fields[1])) > 0 and parent not in found:
        found.append(parent)
        pid = parent
    return found


def start_of(pid: int) -> int:
    """Return the start in clock ticks since boot, with the pid never reused; 0 if gone. Raises OSError if unseen."""
    try:
        return int(_read_stat(pid)[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def environment_of(pid: int) -> list[bytes]:
    for thread in _threads_of(pid):  # a main thread that has ended does not show them
        try:
            with open(f"/proc/{thread}/environ", "rb") as file:
                if variables := file.read():
                    return variables.split(b"\0")
        except OSError:  # of a main thread that has ended, only root gets another error than EACCES
            continue
    return []


def is_zombie(pid: int) -> bool:
    """Return whether a process is gone, or dead and not yet collected. One that cannot be seen is assumed to live."""
    return _look_at(pid) in "ZX"


def is_ending(pid: int) -> bool:
    """Return whether a process is dead or on its way out. Orphans then go past it, to the next subreaper."""
    fields = get_stat(pid)
    return is_zombie(pid) or (bool(fields) and bool(int(fields[6]) & _PF_EXITING))


def is_halted(pid: int) -> bool:
    return _look_at(pid) in "TtZX"


def is_suspended(pid: int) -> bool:
    """Return whether Ctrl-Z has stopped a process: it has a terminal, and the signal was not SIGSTOP."""
    fields = get_stat(pid)
    return bool(fields) and fields[0] == b"T" and int(fields[4]) != 0 and int(fields[49]) != signal.SIGSTOP


def terminal_of(pid: int) -> int:
    """Return the device number of the controlling terminal; 0 without one."""
    fields = get_stat(pid)
    return int(fields[4]) & 0xFFFFFFFF if fields else 0


def has_terminal(pid: int) -> bool:
    return terminal_of(pid) != 0


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process and of its children that it has reaped."""
    return sum(map(int, get_stat(pid)[11:15]))


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger. Only SIGKILL is sure to end that."""
    return _look_at(pid) in "Tt"


def command_line_of(pid: int, most: int = -1) -> str:
    return _read_text(f"/proc/{_entry(pid)}/cmdline", most).replace("\0", " ").strip()


def describe(pid: int) -> dict[str, object]:
    words = command_line_of(pid, 400) or name_of(pid)  # in the middle of an exec there is no command line yet
    if pid == UNKNOWN_PID or (not words and exists(pid)):
        return {"pid": pid, "command": "unknown: /proc does not show it"}
    words = words or "?"
    # A process may call itself anything, escape sequences included.
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words)
    return {"pid": pid, "command": text[:200]}


def identify_files(fds: Iterable[int]) -> set[tuple[int, int]]:
    """Return the identities of open files. The null device is none: all may have it open."""
    found = set()
    for fd in fds:
        with contextlib.suppress(OSError):  # closed
            state = os.fstat(fd)
            if state.st_rdev != os.makedev(1, 3):
                found.add((state.st_dev, state.st_ino))
    return found


def holds_any(pid: int, files: set[tuple[int, int]]) -> bool:
    """Return whether a process has one of these files open; also if that cannot be seen."""
    folder = f"/proc/{_entry(pid)}/fd"
    try:
        names = os.listdir(folder)
    except OSError as error:
        return not isinstance(error, FileNotFoundError | ProcessLookupError) or not LINUX or exists(pid)
    for name in names:
        try:
            state = os.stat(f"{folder}/{name}")
        except (FileNotFoundError, ProcessLookupError):  # closed meanwhile
            continue
        except OSError:  # of another user
            return True
        if (state.st_dev, state.st_ino) in files:
            return True
    return False


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class DeadlineTimer:
    """Timer as a file descriptor, armed by the worker, read by its killer: it expires even if the worker hangs."""

    __slots__ = ("_reference", "_setting", "fd")
    fd: int

    def __init__(self, fd: int | None = None) -> None:
        if _libc is None:  # no such timer: the caller that waits for the work has to end it
            self.fd = os.open(os.devnull, os.O_RDONLY) if fd is None else fd
            return
        self.fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC) if fd is None else fd
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._setting = _Itimerspec()
        self._reference = ctypes.byref(self._setting)

    def arm(self, at_ns: int) -> None:
        self._set(max(1, at_ns))

    def disarm(self) -> None:
        self._set(0)

    def _set(self, at_ns: int) -> None:
        if _libc is not None:
            value = self._setting.value
            value.seconds, value.nanoseconds = divmod(at_ns, 1_000_000_000)
            _libc.timerfd_settime(self.fd, _TFD_TIMER_ABSTIME, self._reference, None)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def check_descriptors(needed: int) -> None:
    """Raise OSError where fewer descriptors are left."""
    held: list[int] = []
    try:
        for _ in range(needed):
            held.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for fd in held:
            os.close(fd)


class ContinuingTimer:
    """Timer by which the kernel continues this process if it is stopped by then. A fork does not inherit it."""

    def __init__(self) -> None:
        signal.signal(signal.SIGCONT, lambda *_: None)  # from Linux 6.13 on an ignored timer is not repeated
        self._timer = ctypes.c_void_p()
        event = Struct("qii48x").pack(0, signal.SIGCONT, 0)  # struct sigevent, SIGEV_SIGNAL
        create = getattr(_libc, "timer_create", None)  # an old C library keeps it in librt
        self._is_there = create is not None and create(_CLOCK_MONOTONIC, event, ctypes.byref(self._timer)) == 0

    def arm(self, in_ms: int, again_ms: int) -> None:
        """Continue this process after a time, and then again and again, because it may be stopped again."""
        if self._is_there and _libc is not None:
            first, later = (_Timespec(ms // 1000, ms % 1000 * 1_000_000) for ms in (in_ms, again_ms))
            _libc.timer_settime(self._timer, 0, ctypes.byref(_Itimerspec(later, first)), None)

    def disarm(self) -> None:
        self.arm(0, 0)


def this_process() -> ProcessIdentity:
    return _this_process(os.getpid())


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a living process; None if it is gone."""
    try:
        started = read_start(pid)
    except OSError:
        return None
    return None if started is None else replace(this_process(), pid=pid, started=started)


def is_alive(holder: ProcessIdentity) -> bool:
    """Return whether exactly this process still runs. A zombie does not; one that cannot be seen is assumed to."""
    me = this_process()
    if holder.boot_id != me.boot_id:
        # The same machine after a reboot: none of its processes is left. Another machine: unknown.
        return holder.host != me.host
    if holder.namespace != me.namespace:
        return True
    try:
        seen = read_start(holder.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # out of descriptors, for example: no proof that it is gone
        return True
    return seen is not None and seen == holder.started


def can_see(holder: ProcessIdentity) -> bool:
    """Return whether the processes of its machine and pid namespace are seen from here."""
    me = this_process()
    return (holder.boot_id, holder.namespace) == (me.boot_id, me.namespace)


@lru_cache(maxsize=1)  # keyed by pid: a fork is another process
def _this_process(pid: int) -> ProcessIdentity:
    if (unfit := find_unfitness()) is not None:
        raise Failure("MACHINE_UNFIT", unfit)
    host = os.uname().nodename
    started = read_start(pid)
    if started is None:
        raise ProcessLookupError(pid)
    boot_id = _read_text("/proc/sys/kernel/random/boot_id").strip()
    return ProcessIdentity(host, boot_id or host, pid, started, _namespace())


def read_start(pid: int) -> int | None:
    """Return when a process started; None for a zombie. Raises FileNotFoundError or ProcessLookupError if gone."""
    if not LINUX:
        return _read_start_without_proc(pid)
    fields = _read_stat(pid)
    return None if _state_of(pid, fields) in "ZX" else int(fields[19])


def _read_start_without_proc(pid: int) -> int | None:
    import psutil

    try:
        process = psutil.Process(pid)
        # On the wall clock, so two boots cannot give the same value.
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 100)
    except psutil.ZombieProcess:
        return None
    except psutil.NoSuchProcess:
        raise ProcessLookupError(pid) from None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_first_namespace() -> bool:
    """Return whether this process sees all processes of the machine, and is in no container or sandbox."""
    return _namespace() == "pid:[4026531836]"  # a constant of Linux
