"""Recognition of a command that waits for input: on the caller's terminal, or on a stdin that only the caller can fill.

/proc shows the system call in which each thread is blocked. A process waits for input if one of its threads reads, or
polls, such a descriptor, and no thread waits for anything else: a socket, a file watcher or another process of the
tree could wake it without input. What cannot be seen (another user's process, an unknown machine) is never claimed.

Only imported where there is a limit on such a wait.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections.abc import Iterable
from enum import Enum, auto
from struct import iter_unpack, unpack

from ..core.limits import NS_PER_MS
from ..core.value_types import record, value
from . import ipc, kernel
from .clock import monotonic_ns
from .command_task import OutputPipe

LOOKS_PER_LIMIT = 10
SHORTEST_PAUSE_MS = 100
LONGEST_PAUSE_MS = 1_000
# An editor that polls its terminal wakes once for its swap file, a REPL once for its history.
MOST_WAKEUPS = 2
MOST_THREADS = 256  # of a process that is looked at
MOST_DESCRIPTORS = 1024  # in one set
# The search for other holders of the pipe. It takes milliseconds, unless the machine has very many processes.
SEARCH_LIMIT_MS = 500
BUSY_SHARE = 10  # a tree that used this fraction of the time is at work
PROMPT_LENGTH = 200
PROBE_LIMIT_MS = 1_000

_TERMINAL = "the terminal"
_STDIN = "stdin"


class _Call(Enum):
    READ = auto()
    POLL = auto()
    PPOLL = auto()
    SELECT = auto()
    PSELECT = auto()
    EPOLL = auto()
    EPOLL2 = auto()
    REST = auto()  # for another thread, or for a signal


_CALLS = {
    "x86_64": {
        0: _Call.READ,
        19: _Call.READ,  # readv
        7: _Call.POLL,
        271: _Call.PPOLL,
        23: _Call.SELECT,
        270: _Call.PSELECT,
        232: _Call.EPOLL,
        281: _Call.EPOLL,
        441: _Call.EPOLL2,
        202: _Call.REST,  # futex
        128: _Call.REST,  # rt_sigtimedwait
    },
    "aarch64": {
        63: _Call.READ,
        65: _Call.READ,
        73: _Call.PPOLL,
        72: _Call.PSELECT,
        22: _Call.EPOLL,
        441: _Call.EPOLL2,
        98: _Call.REST,
        137: _Call.REST,
    },
}
# Descriptors by which a program wakes itself.
_OWN_SIGNS = ("anon_inode:[eventfd]", "anon_inode:[signalfd]", "anon_inode:[timerfd]", "/dev/null")
_POLLIN = select.POLLIN | 0x40  # POLLRDNORM
_ESCAPES = rb"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]"


class _Unseen(Exception):
    """Something that /proc does not show, or that this module does not know."""


@value
class _BlockedCall:
    """A system call that waits: its descriptors, those it wants to read from, and its timeout (None: without end)."""

    call: _Call
    watched: set[int]
    wanted: set[int]
    timeout_ms: float | None = None


@value
class _Wait:
    source: str
    is_read: bool
    timeout_ms: float | None
    wakeups: int  # of all threads, since the process started


@record
class _Seen:
    since_ns: int
    wakeups: int
    ticks: int  # CPU time of the tree


class InputWatch:
    """The looks of a supervisor at its tree. Made while its own standard descriptors are still the command's."""

    def __init__(self, limit_ms: int, stdin: int = 0) -> None:
        self._limit_ms = limit_ms
        pause_ms = min(LONGEST_PAUSE_MS, max(SHORTEST_PAUSE_MS, limit_ms // LOOKS_PER_LIMIT))
        self._pause_ns = pause_ms * NS_PER_MS
        self._caller = os.getppid()
        self._terminal = kernel.terminal_of(self._caller)
        self._terminals = {_link("self", number) for number in (0, 1, 2) if os.isatty(number)}
        if 136 <= os.major(self._terminal) <= 143:
            self._terminals.add(f"/dev/pts/{os.minor(self._terminal) + (os.major(self._terminal) - 136) * 2**20}")
        self._stdin = _link("self", stdin)
        self._stdin_maker = _socket_maker(stdin) if self._stdin.startswith("socket:") else 0
        self._seen: dict[tuple[int, str], _Seen] = {}
        self._calls = _CALLS.get(os.uname().machine, {})
        self.look_ns: int | None = monotonic_ns() + self._pause_ns if self._calls else None

    def look(self, tree: list[int], streams: list[OutputPipe], last_output_ns: int) -> dict[str, object]:
        """Look at the tree. Return the process that has waited for the whole limit, for what, and the last line.

        The dictionary is empty if there is none. Without streams the last line of the output is not known.
        """
        now_ns = monotonic_ns()
        ticks = sum(kernel.cpu_ticks(pid) for pid in tree)
        before, self._seen = self._seen, {}
        found: dict[str, object] = {}
        for pid in tree:
            wait = self._find_wait(pid)
            if wait is None:
                continue
            key = (pid, wait.source)
            seen = before.get(key)
            has_moved = seen is not None and wait.wakeups - seen.wakeups > (0 if wait.is_read else MOST_WAKEUPS)
            if seen is None or seen.since_ns < last_output_ns or has_moved:
                seen = _Seen(now_ns, wait.wakeups, ticks)
            elif now_ns - seen.since_ns >= self._limit_ms * NS_PER_MS and not found:
                if self._is_certain(pid, wait, ticks - seen.ticks):
                    found = {**kernel.describe(pid), "waits_for": wait.source}
                seen = _Seen(now_ns, wait.wakeups, ticks)
            self._seen[key] = seen
        limits_ns = [seen.since_ns + self._limit_ms * NS_PER_MS for seen in self._seen.values()]
        self.look_ns = min([now_ns + self._pause_ns, *(at_ns for at_ns in limits_ns if at_ns > now_ns)])
        if found and streams:
            newest = max(streams, key=lambda stream: stream.last_ns)
            found["prompt"] = last_line(newest.end()[0])
        return found

    def _is_certain(self, pid: int, wait: _Wait, ticks: int) -> bool:
        """Return whether nothing but input from the caller can end the wait."""
        if wait.timeout_ms is not None and wait.timeout_ms < self._limit_ms:
            return False
        # The end of a child interrupts a poll: a launcher that keeps an eye on stdin waits for its child.
        if not wait.is_read and not all(map(kernel.is_zombie, kernel.children_of(pid))):
            return False
        if ticks * 1000 / os.sysconf("SC_CLK_TCK") > self._limit_ms / BUSY_SHARE:
            return False
        if wait.source == _TERMINAL:
            return True
        above = kernel.ancestors(self._caller)
        if self._stdin_maker:
            return self._stdin_maker in above
        return _is_held_only_by(above, self._stdin)

    def _find_wait(self, pid: int) -> _Wait | None:
        """Return what a process waits for; None if it does not wait for input, or not only."""
        try:
            threads = os.listdir(f"/proc/{pid}/task")
            if len(threads) > MOST_THREADS:
                return None
            found: tuple[str, _BlockedCall] | None = None
            for thread in threads:
                blocked = _blocked_call(f"{pid}/task/{thread}", self._calls)
                if (source := self._source_of(pid, blocked)) is not None:
                    found = source, blocked
            if found is None:
                return None
            source, blocked = found
            wakeups = sum(_wakeups(f"{pid}/task/{thread}") for thread in threads)
            return _Wait(source, blocked.call is _Call.READ, blocked.timeout_ms, wakeups)
        except (OSError, ValueError, LookupError, _Unseen):
            return None

    def _source_of(self, pid: int, blocked: _BlockedCall) -> str | None:
        """Return the input that a call waits for; None if only its own process can end it."""
        source = None
        for number in blocked.watched:
            link = _link(pid, number)
            if (name := self._input_name(pid, link)) is not None:
                source = name if number in blocked.wanted else source
            elif link not in _OWN_SIGNS and not _is_own_pipe(pid, link):
                raise _Unseen
        return source

    def _input_name(self, pid: int, link: str) -> str | None:
        is_on_ours = link == "/dev/tty" and self._terminal and kernel.terminal_of(pid) == self._terminal
        if link in self._terminals or is_on_ours:
            return _TERMINAL
        return _STDIN if link == self._stdin and link.startswith(("pipe:", "socket:")) else None


def last_line(output: bytes) -> str:
    """Return the last line that is not empty, without escape sequences: most likely the prompt."""
    lines = re.sub(_ESCAPES, b"", output).decode(errors="replace").replace("\r", "\n").split("\n")
    readable = ("".join(letter for letter in line if letter.isprintable()).strip() for line in reversed(lines))
    return next(filter(None, readable), "")[-PROMPT_LENGTH:]


def find_blindness() -> str | None:
    """Return why waiting for input is never claimed on this machine; None if a waiting child was seen."""
    machine = os.uname().machine
    if not kernel.LINUX or machine not in _CALLS:
        return f"the system calls of {sys.platform} on {machine} are not known"
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(ours, 1)
        finally:
            os._exit(0)
    try:
        until_ns = monotonic_ns() + PROBE_LIMIT_MS * NS_PER_MS
        while monotonic_ns() < until_ns:
            try:
                blocked = _blocked_call(f"{child}/task/{child}", _CALLS[machine])
                if blocked.call is _Call.READ and blocked.watched == {ours}:
                    _wakeups(f"{child}/task/{child}")
                    return None
            except _Unseen:  # not there yet
                pass
            select.select([], [], [], 0.01)
        return "/proc/PID/syscall does not show what a process waits for"
    except OSError as error:
        return f"/proc/PID/syscall cannot be read: {error.strerror}"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)


def _link(pid: object, number: object) -> str:
    """Return what a descriptor leads to, by name: a stat of it could hang on a dead network mount."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return ""


def _is_own_pipe(pid: int, link: str) -> bool:
    """Return whether a process holds both ends of a pipe, so that it is the one who writes to it."""
    if not link.startswith("pipe:"):
        return False
    ends = [number for number in os.listdir(f"/proc/{pid}/fd") if _link(pid, number) == link]
    return any(_is_writable(pid, number) for number in ends)


def _is_writable(pid: object, number: object) -> bool:
    return bool(os.lstat(f"/proc/{pid}/fd/{number}").st_mode & 0o200)


def _is_held_only_by(above: list[int], pipe: str) -> bool:
    """Return whether one of these processes can write to a pipe, and no other process that is seen."""
    if not any(_writes_to(pid, pipe) for pid in above):
        return False
    until_ns = monotonic_ns() + SEARCH_LIMIT_MS * NS_PER_MS
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) not in above and _writes_to(int(name), pipe):
            return False
        if monotonic_ns() > until_ns:
            return False
    return True


def _writes_to(pid: int, pipe: str) -> bool:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
        return any(_link(pid, number) == pipe and _is_writable(pid, number) for number in numbers)
    except OSError:  # gone, or of another user
        return False


def _socket_maker(number: int) -> int:
    """Return the process that made a socket, -1 if a sandbox does not say."""
    try:
        socket = ipc.Socket(fileno=os.dup(number))
        try:
            return ipc.maker_pid(socket) or -1
        finally:
            socket.close()
    except OSError:
        return -1


def _blocked_call(thread: str, calls: dict[int, _Call]) -> _BlockedCall:
    """Return the call in which a thread is blocked. Raises _Unseen if it runs, or waits in another one."""
    words = _read(f"/proc/{thread}/syscall").split()
    if len(words) != 9 or (call := calls.get(int(words[0]))) is None:
        raise _Unseen
    arguments = [int(word, 16) for word in words[1:]]
    if arguments[6] < 2**32:  # the stack of a 32-bit program, whose calls have other numbers
        raise _Unseen
    first, second, third, fourth, fifth, *_ = arguments
    match call:
        case _Call.REST:
            return _BlockedCall(call, set(), set())
        case _Call.READ:
            return _BlockedCall(call, {first}, {first})
        case _Call.POLL | _Call.PPOLL:
            timeout = _whole(third) if call is _Call.POLL else _timespec(thread, third)
            entries = iter_unpack("=ihh", _memory(thread, first, second * 8))
            return _BlockedCall(call, *_sorted_out((fd, events) for fd, events, _ in entries if fd >= 0), timeout)
        case _Call.SELECT | _Call.PSELECT:
            read, written, urgent = (_bits(thread, at, first) for at in (second, third, fourth))
            timeout = _timespec(thread, fifth, 1e-3 if call is _Call.SELECT else 1e-6)
            return _BlockedCall(call, read | written | urgent, read, timeout)
    timeout = _whole(fourth) if call is _Call.EPOLL else _timespec(thread, fourth)
    # Lines of an epoll: `tfd: 18 events: 19 data: …`, the events in hexadecimal digits.
    lines = _read(f"/proc/{thread}/fdinfo/{first}").splitlines()
    rows = [line.split() for line in lines if line.startswith(b"tfd:")]
    return _BlockedCall(call, *_sorted_out((int(row[1]), int(row[3], 16)) for row in rows), timeout)


def _sorted_out(pairs: Iterable[tuple[int, int]]) -> tuple[set[int], set[int]]:
    found = list(pairs)
    return {number for number, _ in found}, {number for number, events in found if events & _POLLIN}


def _bits(thread: str, at: int, count: int) -> set[int]:
    """Return the members of an fd_set, of which the kernel reads whole words."""
    field = int.from_bytes(_memory(thread, at, (count + 63) // 64 * 8), "little") if at else 0
    return {number for number in range(count) if field >> number & 1}


def _whole(word: int) -> float | None:
    """Return a C int of milliseconds; None if negative."""
    word &= 2**32 - 1
    return None if word >= 2**31 else word


def _timespec(thread: str, at: int, unit_ms: float = 1e-6) -> float | None:
    if not at:
        return None
    seconds, rest = unpack("=qq", _memory(thread, at, 16))
    return float(seconds * 1000 + rest * unit_ms)


def _memory(thread: str, at: int, size: int) -> bytes:
    if size > MOST_DESCRIPTORS * 8:
        raise _Unseen
    fd = os.open(f"/proc/{thread}/mem", os.O_RDONLY)
    try:
        found = os.pread(fd, size, at)
    finally:
        os.close(fd)
    if len(found) != size:
        raise _Unseen
    return found


def _wakeups(thread: str) -> int:
    """Return how often a thread has gone to sleep. Raises _Unseen unless it sleeps now."""
    fields = dict(line.split(b":", 1) for line in _read(f"/proc/{thread}/status").splitlines() if b":" in line)
    if fields[b"State"].split()[0] != b"S":
        raise _Unseen
    return int(fields[b"voluntary_ctxt_switches"])


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
