"""Adversaries: functions that do everything to outlive their time.

A worker runs them by name; `python -m tests.calls.work NAME FOLDER` runs the same as a command, with a TERM
handler like a worker's. Each leaves a mark (a file with its pid) for every process whose end matters, the last
one being `ready`: from there on it has to be stopped. None lives longer than FOREVER_S, whatever we do wrong.
"""

import collections
import ctypes
import inspect
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

FOREVER_S = 40
READY_WITHIN_S = 10


def mark(folder: str, name: str, pid: int | None = None) -> None:
    """Say that a process is there, with its start time, so that a reused pid is not taken for it."""
    pid = pid or os.getpid()
    started = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
    new = Path(folder, f"{name}.{os.getpid()}.new")
    new.write_text(f"{pid} {started}")
    new.rename(Path(folder, name))


def await_mark(folder: str, name: str) -> None:
    give_up_at = time.monotonic() + READY_WITHIN_S
    while not Path(folder, name).exists() and time.monotonic() < give_up_at:
        time.sleep(0.001)


# --- code that does not come back -----------------------------------------------------------------


async def sleeps_async(folder: str) -> None:
    import asyncio  # not for those who do not need it: most runtimes of these tests import this module anew

    mark(folder, "ready")
    await asyncio.sleep(FOREVER_S)


def sleeps(folder: str) -> None:
    mark(folder, "ready")
    time.sleep(FOREVER_S)


def spins(folder: str) -> None:
    mark(folder, "ready")
    give_up_at = time.monotonic() + FOREVER_S
    while time.monotonic() < give_up_at:
        pass


def holds_the_gil(folder: str) -> None:
    """One C call, no bytecode in between: no other thread runs, and no Python signal handler either."""
    mark(folder, "ready")
    collections.deque(itertools.repeat(0, 10**10), maxlen=0)  # about a minute


def holds_the_gil_before_a_witness(folder: str) -> None:
    """The same, with a thread that counts in a file for as long as it is let."""

    def count() -> None:
        with open(Path(folder, "beats.new"), "ab", buffering=0) as file:
            while True:
                file.write(b".")
                time.sleep(0.001)

    beats = Path(folder, "beats.new")
    beats.touch()
    threading.Thread(target=count, daemon=True).start()
    give_up_at = time.monotonic() + READY_WITHIN_S
    while not beats.stat().st_size and time.monotonic() < give_up_at:
        time.sleep(0.001)
    with open(beats, "ab", buffering=0) as file:
        file.write(b"|")
        holds_the_gil(folder)


def waits_in_recv(folder: str) -> None:
    ours, _theirs = socket.socketpair()
    mark(folder, "ready")
    ours.recv(1)


def swallows_everything(folder: str) -> None:
    give_up_at = time.monotonic() + FOREVER_S
    while time.monotonic() < give_up_at:
        try:
            mark(folder, "ready")
            time.sleep(FOREVER_S)
        except BaseException:
            pass


def blocks_in_finally(folder: str) -> None:
    try:
        mark(folder, "ready")
        time.sleep(FOREVER_S)
    finally:
        time.sleep(FOREVER_S)


def waits_for_a_lock(folder: str) -> None:
    lock = threading.Lock()
    lock.acquire()
    mark(folder, "ready")
    lock.acquire()


# --- code that turns on its guard -----------------------------------------------------------------


def stops_its_supervisor(folder: str) -> None:
    mark(folder, "ready")
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(FOREVER_S)


def stops_its_guardians(folder: str) -> None:
    """Stop its supervisor, and the zygotes and supervisors above that one."""
    import psutil

    above = psutil.Process().parent()
    mark(folder, "ready")
    while above is not None and above.name() in ("shotclock-sup", "clock-zygote"):
        os.kill(above.pid, signal.SIGSTOP)
        above = above.parent()
    time.sleep(FOREVER_S)


def stops_its_caller(folder: str) -> None:
    """Stop its supervisor, all above that one that are ours, and the program that waits for them."""
    mark(folder, "ready")
    is_ours, pid = True, os.getpid()
    while is_ours:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        is_ours = Path(f"/proc/{pid}/comm").read_text().strip() in ("shotclock-sup", "clock-zygote")
        os.kill(pid, signal.SIGSTOP)
    time.sleep(FOREVER_S)


def keeps_its_supervisor_stopped(folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what it would raise could hit outside of any `try`
    mark(folder, "ready")
    supervisor = os.getppid()
    give_up_at = time.monotonic() + FOREVER_S
    while time.monotonic() < give_up_at and os.getppid() == supervisor:
        os.kill(supervisor, signal.SIGSTOP)


# --- processes that do not go away ----------------------------------------------------------------


def has_a_child_that_ignores_term(folder: str) -> None:
    script = f"trap '' TERM; : > '{folder}/trapped.new'; sleep {FOREVER_S}"
    child = subprocess.Popen(["sh", "-c", script])
    mark(folder, "child", child.pid)
    await_mark(folder, "trapped.new")
    mark(folder, "ready")
    child.wait()


def reads_what_a_grandchild_holds_open(folder: str) -> None:
    child = subprocess.Popen(["sh", "-c", f"sleep {FOREVER_S} & echo $!"], stdout=subprocess.PIPE)
    mark(folder, "grandchild", int(child.stdout.readline()))
    child.wait()
    mark(folder, "ready")
    child.stdout.read()


def daemonises(folder: str) -> None:
    """Double fork and setsid, then goes on sleeping itself."""
    start_daemon(folder)
    mark(folder, "ready")
    time.sleep(FOREVER_S)


def daemonises_without_a_trace(folder: str) -> None:
    """The daemon ignores TERM and has its own group, no environment, no descriptor and another image."""

    def vanish() -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.chdir("/")
        os.closerange(0, 4096)
        os.execve("/bin/sleep", ["sleep", str(FOREVER_S)], {})

    start_daemon(folder, vanish)
    mark(folder, "ready")
    time.sleep(FOREVER_S)


def start_daemon(folder: str, then=lambda: time.sleep(FOREVER_S)) -> None:
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                mark(folder, "daemon")
                then()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    await_mark(folder, "daemon")


def sleeps_without_a_main_thread(folder: str) -> None:
    """End the main thread, and go on in another: /proc shows the process as a zombie."""

    def go_on() -> None:
        while Path("/proc/self/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
        mark(folder, "headless")
        time.sleep(FOREVER_S)

    threading.Thread(target=go_on).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # SYS_exit


def hops_from_pid_to_pid(folder: str) -> None:
    """A daemon that is somebody else every other millisecond: a list of pids is stale before it is read."""

    def hop() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        give_up_at = time.monotonic() + FOREVER_S
        while time.monotonic() < give_up_at:
            if os.fork():
                os._exit(0)
            time.sleep(0.002)

    start_daemon(folder, hop)
    mark(folder, "ready")
    time.sleep(FOREVER_S)


def stops_itself(folder: str) -> None:
    mark(folder, "ready")
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(FOREVER_S)


def writes_for_ever(folder: str) -> None:
    mark(folder, "ready")
    give_up_at = time.monotonic() + FOREVER_S
    while time.monotonic() < give_up_at:
        os.write(1, b"y\n")


def has_fifty_children(folder: str) -> None:
    children = [subprocess.Popen(["sleep", str(FOREVER_S)]) for _ in range(50)]
    for number, child in enumerate(children):
        mark(folder, f"child-{number}", child.pid)
    mark(folder, "ready")
    for child in children:
        child.wait()


# --- commands that leave, and leave something behind ----------------------------------------------


def leaves_a_grandchild_on_its_stdout(folder: str) -> None:
    child = subprocess.Popen(["sleep", str(FOREVER_S)])
    mark(folder, "grandchild", child.pid)
    mark(folder, "ready")
    print("done", flush=True)


def leaves_a_daemon(folder: str) -> None:
    start_daemon(folder)
    mark(folder, "ready")
    print("done", flush=True)


def leaves_a_daemon_without_a_main_thread(folder: str) -> None:
    start_daemon(folder, lambda: sleeps_without_a_main_thread(folder))
    await_mark(folder, "headless")
    mark(folder, "ready")
    print("done", flush=True)


def cleans_up_when_asked(folder: str) -> None:
    try:
        mark(folder, "ready")
        time.sleep(FOREVER_S)
    finally:
        time.sleep(0.15)
        mark(folder, "cleaned")


class Asked(BaseException):
    """TERM arrived."""


def main(name: str, folder: str) -> None:
    def on_term(number: int, frame: object) -> None:
        raise Asked

    signal.signal(signal.SIGTERM, on_term)
    try:
        result = globals()[name](folder)
        if inspect.iscoroutine(result):
            import asyncio

            asyncio.run(result)
    except Asked:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])


HANGING = [
    sleeps_async,
    sleeps,
    spins,
    holds_the_gil,
    waits_in_recv,
    swallows_everything,
    blocks_in_finally,
    waits_for_a_lock,
    has_a_child_that_ignores_term,
    reads_what_a_grandchild_holds_open,
    daemonises,
    daemonises_without_a_trace,
    stops_itself,
    writes_for_ever,
    has_fifty_children,
]
