"""Zygotes: small, single-threaded processes that fork supervisors on request, so that a threaded process need not.

The *clean* zygote runs our code only. It forks a supervisor for every command and for one *preloaded* zygote, which
imports the users' modules (an import may hang, so it is supervised) and forks a supervisor for every worker.

    runtime ── clean zygote ─┬─ supervisor ── command
                             ├─ supervisor ── preloaded zygote ── supervisor ── worker
                             └─ guard of the runtime itself, which kills a frozen runtime

A supervisor lives as long as its own socket to the runtime, not as its zygote. One whose work is gone starts the next,
which saves forks of a large process. Both zygotes are subreapers: the orphans of a killed supervisor become children of
its zygote, which kills them.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from . import ipc, kernel
from .clock import pause
from .command_task import CommandReport, CommandTask, News, takes_more
from .kernel import DeadlineTimer
from .kill import Cgroup, kill_below, signal_process
from .supervisor import GUARD_LOOK_MS, SUPERVISOR_NAME, Supervisor, has_rung

COMMAND, COMMANDS, PRELOADED, WORKER, GUARD = b"c", b"r", b"z", b"w", b"g"

# Not named after the program: `pkill shotclock` then leaves a process that cleans up.
ZYGOTE_NAME = "clock-zygote"

# The work can read the environment of the processes above it in /proc, so the zygote gets only the variables that an
# interpreter needs to start and a supervisor needs to find the state directory.
_LIBRARIES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")
_OURS = ("SHOTCLOCK_HOME", "XDG_STATE_HOME", "SHOTCLOCK_TEST_MARK")  # the last: in tests
_NEEDED = frozenset(("PATH", "HOME", "LANG", "TMPDIR", "TZ", *_LIBRARIES, *_OURS))
_NEEDED_PREFIXES = ("LC_", "PYTHON")

# A request is one small message on a local socket; only a sender that is not scheduled exhausts this.
_REQUEST_LIMIT_S = 10.0
# How long the supervisors may take to clean up after the runtime is gone: a kill and its verification.
FAREWELL_LIMIT_S = 3.0
FAREWELL_PAUSE_S = 0.005
_PID_SIZE = 4


_early: list[tuple[socket.socket, int]] = []


_DESCRIPTORS_OF_IMPORTS = 8  # the socket of the zygote, and files that are imported beside it


def start_zygote_early() -> None:
    """Start a clean zygote while this program still imports its own modules."""
    with contextlib.suppress(OSError):  # the run reports it
        kernel.check_descriptors(_DESCRIPTORS_OF_IMPORTS)
        _early.append(start_clean_zygote())


def stop_early_zygote() -> None:
    while _early:
        ours, pid = _early.pop()
        ours.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # bounded: SIGKILL ends a process that only imports


def start_clean_zygote() -> tuple[socket.socket, int]:
    """Start a clean zygote, or return the early one. It ends when the socket is closed or its holder dies."""
    return _early.pop() if _early else _spawn_zygote(detached=False)


def start_detached_zygote() -> tuple[socket.socket, int]:
    """Start a clean zygote that is not a child of this program, which may wait for all of its own children."""
    ours, first = _spawn_zygote(detached=True)
    ours.settimeout(_REQUEST_LIMIT_S)
    try:
        return ours, int.from_bytes(ours.recv(_PID_SIZE), "little")
    except OSError as error:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
        raise ipc.Broken(str(error)) from error
    finally:
        with contextlib.suppress(ChildProcessError):  # the program ignores SIGCHLD, or its handler was faster
            os.waitpid(first, 0)  # it has forked and ends, or it was killed


def _spawn_zygote(*, detached: bool) -> tuple[socket.socket, int]:
    # A closed stderr is replaced meanwhile. Otherwise our end of the socket could become the output of the zygote and
    # keep it from seeing the end of file.
    nulls = [os.open(os.devnull, os.O_RDWR)]
    while nulls[-1] <= 2:
        os.set_inheritable(nulls[-1], True)
        nulls.append(os.open(os.devnull, os.O_RDWR))
    ours, theirs = socket.socketpair()
    # -P, and only our own root on the path: a `socket.py` in the current folder must not be imported.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        f"import sys; sys.path.append({root!r}); from shotclock.supervise.zygote import main; main({theirs.fileno()})"
    )
    if detached:
        leave = f"os.write({theirs.fileno()}, pid.to_bytes({_PID_SIZE}, 'little')), os._exit(0)"
        code = f"import os; pid = os.fork(); pid and ({leave}); {code}"
    os.set_inheritable(theirs.fileno(), True)
    try:
        pid = contextvars.Context().run(  # it belongs to no call, also not to the first that needs it
            os.posix_spawn,
            sys.executable,
            [sys.executable, "-P", "-c", code],
            needed_variables(),
            file_actions=[(os.POSIX_SPAWN_DUP2, nulls[-1], 0), (os.POSIX_SPAWN_DUP2, 2, 1)],
            setsigmask=[],
            setsid=detached,  # so that Ctrl-C reaches it neither during its start nor later
        )
    finally:
        for null in nulls:
            os.close(null)
        theirs.close()
    ours.setblocking(False)
    return ours, pid


def needed_variables() -> dict[str, str]:
    names = os.environ
    return {name: names[name] for name in names if name in _NEEDED or name.startswith(_NEEDED_PREFIXES)}


def main(fd: int) -> None:
    os.set_inheritable(fd, False)
    # Another process may wait for the end of file of a descriptor that the runtime inherited.
    os.closerange(3, fd)
    os.closerange(fd + 1, fd + 256)
    kernel.name_process(ZYGOTE_NAME)
    serve_forks(socket.socket(fileno=fd))


def serve_forks(requests: socket.socket) -> NoReturn:
    forked: set[int] = set()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # the runtime handles Ctrl-C
    child_signal, child_signal_in = kernel.open_signal_pipe()
    kernel.become_subreaper()
    poller = select.poll()
    poller.register(requests, select.POLLIN)
    poller.register(child_signal, select.POLLIN)
    continuing = kernel.ContinuingTimer()
    while True:
        if forked:  # and from then on
            continuing.arm(GUARD_LOOK_MS, GUARD_LOOK_MS)
        # Unbounded on purpose: a zygote has nothing to do without requests, and the socket ends with the runtime.
        ready = {fd for fd, _ in poller.poll()}
        if child_signal in ready:
            kernel.empty(child_signal)
            _reap(forked)
        if requests.fileno() not in ready:
            continue
        note, fds = ipc.receive_fds(requests)
        if not note:
            break
        try:
            pid = os.fork()
        except OSError as error:
            with socket.socket(fileno=fds.pop(0)) as control, contextlib.suppress(ipc.Broken):
                control.setblocking(False)
                ipc.send(control, (News.ENDED, CommandReport(unstartable=("fork", error.errno or 0)).pack()))
            for fd in fds:
                os.close(fd)
            continue
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for fd in (child_signal, child_signal_in):
                    os.close(fd)
                requests.close()
                _supervise(note, fds)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(0)
        forked.add(pid)
        for fd in fds:
            os.close(fd)
    # The supervisors have noticed as well. They clean up and exit; then the rest is killed.
    for _ in range(int(FAREWELL_LIMIT_S / FAREWELL_PAUSE_S)):
        _reap(forked)
        # Those that we forked, and those that a preloaded zygote below us forked.
        left = [pid for pid in kernel.descendants(os.getpid()) if pid in forked or _is_supervisor(pid)]
        if not left:
            break
        for pid in filter(kernel.is_stopped, left):
            signal_process(pid, signal.SIGCONT)
        pause(FAREWELL_PAUSE_S)
    _kill_strays(forked)
    os._exit(0)


def _reap(forked: set[int]) -> None:
    """Reap the dead, and kill the orphans of a killed supervisor."""
    dead: dict[int, int] = {}
    kernel.collect_dead(dead.__setitem__)
    forked.difference_update(dead)
    # Left by a killed supervisor, or by one that was inside it.
    cgroups = {pid: cgroup for pid in dead if (cgroup := Cgroup.left_by(pid)) is not None}
    killed = [pid for pid, status in dead.items() if os.WIFSIGNALED(status)]
    for pid in killed:
        if pid in cgroups:
            cgroups[pid].kill()
    if killed:
        _kill_strays(forked)
    for cgroup in cgroups.values():
        cgroup.remove()


def _kill_strays(forked: set[int]) -> None:
    """Kill all below us but supervisors and their work, searched again in each sweep because they start processes."""

    def roots() -> list[int]:
        return [pid for pid in kernel.children_of(os.getpid()) if pid not in forked and not _is_supervisor(pid)]

    def reap() -> bool:
        return kernel.collect_dead(lambda pid, status: forked.discard(pid)) or not roots()

    def strays() -> list[int]:
        return [stray for root in roots() for stray in _find_unguarded(root)]

    kill_below(reap, lambda wait_ms: pause(wait_ms / 1000), find=strays)


def kill_what_lost_its_supervisor(supervisor: int, detached_zygote: int | None = None) -> list[int]:
    """Kill the processes of a killed supervisor, for its caller: its zygote may be stopped. Return the survivors.

    Raises OSError if processes cannot be looked at.
    """
    top = os.getpid() if detached_zygote is None else detached_zygote

    def find() -> list[int]:
        kernel.start_of(os.getpid())  # raises if the listings below would be empty for want of descriptors
        if _is_supervisor(supervisor) and not kernel.is_zombie(supervisor):  # dying: its children are not orphans yet
            return [supervisor]
        zygotes = [pid for pid in (top, *kernel.descendants(top)) if kernel.name_of(pid) == ZYGOTE_NAME]
        for pid in zygotes:
            signal_process(pid, signal.SIGCONT)
        children = []
        for pid in zygotes:
            below = kernel.children_of(pid)
            # A new supervisor has that name until it sets its own: then these are processes of its work.
            if kernel.name_of(pid) == ZYGOTE_NAME:
                children += below
        roots = [pid for pid in children if kernel.name_of(pid) not in (SUPERVISOR_NAME, ZYGOTE_NAME)]
        return [pid for root in roots for pid in _find_unguarded(root) if not kernel.is_zombie(pid)]

    return kill_below(lambda: not find(), lambda wait_ms: pause(wait_ms / 1000), find=find)


def continue_ours() -> None:
    """Continue stopped zygotes and supervisors, so that they can end."""
    for pid in kernel.descendants(os.getpid()):
        if kernel.name_of(pid) in (ZYGOTE_NAME, SUPERVISOR_NAME):
            signal_process(pid, signal.SIGCONT)


def _is_supervisor(pid: int) -> bool:
    return kernel.name_of(pid) == SUPERVISOR_NAME


def _find_unguarded(root: int) -> list[int]:
    """Return a process and its descendants that no supervisor guards."""
    found = [root]
    for pid in found:
        found += [child for child in kernel.children_of(pid) if not _is_supervisor(child)]
    return found


def _supervise(note: bytes, fds: list[int]) -> None:
    control = socket.socket(fileno=fds[0])
    if note == COMMAND:
        control.settimeout(_REQUEST_LIMIT_S)
        try:
            message = ipc.receive_one(control)
        except ipc.Broken:
            return  # the caller has left
        control.settimeout(None)
        if _is_called_off(control):
            return
        supervisor = Supervisor(control)
        supervisor.run_command(CommandTask(**message[0]), fds[1:], stays=len(fds) == 1)
        while supervisor.run_next_command():
            pass
    elif note == COMMANDS:
        Supervisor(control).run_commands()
    elif note == PRELOADED:
        requests = socket.socket(fileno=fds[1])
        Supervisor(control).run_worker(lambda: _become_preloaded(requests, control), leave_children=True)
    elif note == WORKER:
        supervisor = Supervisor(control)
        further = fds[1:]
        first = True
        while further:
            _supervise_worker(supervisor, control, further, announce=first)
            further, first = supervisor.wait_for_next(), False
    elif note == GUARD:
        _guard_runtime(control, *fds[1:])


def _guard_runtime(control: socket.socket, timer_fd: int, runtime_fd: int) -> None:
    """Kill a frozen runtime, whose timer expires, and with it its work, so that nothing continues when it is thawed."""
    os.setsid()  # so that Ctrl-Z, which stops the group of the runtime, does not stop its guard
    kernel.name_process(SUPERVISOR_NAME)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(timer_fd, select.POLLIN)
    while True:
        # Unbounded on purpose: the runtime arms the timer, and its socket ends with it.
        ready = {fd for fd, _ in poller.poll()}
        if control.fileno() in ready:
            return
        if has_rung(timer_fd):
            signal.pidfd_send_signal(runtime_fd, signal.SIGKILL)
            if kernel.name_of(os.getppid()) == ZYGOTE_NAME:  # perhaps stopped as well, but it has to clean up
                signal_process(os.getppid(), signal.SIGCONT)
            with contextlib.suppress(OSError):  # last: stderr may be closed or full
                if takes_more(2):
                    os.write(2, b"shotclock: killed with all its work: the process was frozen for too long\n")
            return


def _supervise_worker(supervisor: Supervisor, control: socket.socket, fds: list[int], *, announce: bool) -> None:
    calls_fd, bell_fd, memory, tokens = fds
    calls = socket.socket(fileno=calls_fd)

    def serve() -> None:
        control.close()
        _program("shotclock.worker.main").serve_calls(calls, DeadlineTimer(bell_fd), memory, tokens)

    def release() -> None:
        calls.close()
        os.close(memory)
        os.close(tokens)

    supervisor.run_worker(serve, bell_fd=bell_fd, announce=announce, release=release)
    os.close(bell_fd)


def _is_called_off(control: socket.socket) -> bool:
    """Return whether the caller has left, or has sent a message, which can only be "stop"."""
    try:
        control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


def _become_preloaded(requests: socket.socket, control: socket.socket) -> None:
    control.close()
    kernel.name_process(ZYGOTE_NAME)
    _program("shotclock.worker.preloading").prepare(*ipc.receive_one(requests))
    serve_forks(requests)


def _program(name: str) -> Any:
    """Import the program of a forked child, by name: it is above this package."""
    return importlib.import_module(name)
