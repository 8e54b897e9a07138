"""What the kernel says about processes, checked against trees that were really built."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from shotclock.core.value_types import replace
from shotclock.supervise import kernel
from shotclock.supervise.kill import kill_tree
from tests.calls.bounds import ROOT, eventually

pytestmark = pytest.mark.usefixtures("no_survivors")


@contextmanager
def script(code: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process in its own session, ended with everything in it. It says `ready` in a file of that name."""
    code = f"import os, sys, time, threading\nready = lambda: open({str(folder / 'ready')!r}, 'w').close()\n" + (
        textwrap.dedent(code)
    )
    with open(folder / "out", "wb") as out:
        # From 3.12 on Python warns of a fork beside threads, which is what is meant here.
        words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
        process = subprocess.Popen(words, start_new_session=True, stdout=out, stderr=out)
    try:
        eventually(lambda: (folder / "ready").exists() or process.poll() is not None, within=10)
        assert process.poll() is None, (folder / "out").read_text()
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


def output(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "out").read_text().split()]


# Main thread forks, a thread forks, and each of the children forks once more; all sleep.
TREE = """
    def fork_two():
        if os.fork() == 0:
            if os.fork() == 0:
                pass
            os.write(1, b"%d " % os.getpid())
            time.sleep(40)
            os._exit(0)
    thread = threading.Thread(target=lambda: (fork_two(), time.sleep(40)), daemon=True)
    thread.start()
    fork_two()
    give_up_at = time.monotonic() + 10
    while len(open("/proc/self/fd/1").read().split()) < 4 and time.monotonic() < give_up_at:
        time.sleep(0.01)
    ready()
    time.sleep(40)
"""


def test_descendants_are_those_of_every_thread_parents_before_children(tmp_path: Path) -> None:
    with script(TREE, tmp_path) as process:
        found = kernel.descendants(process.pid)
        assert sorted(found) == sorted(output(tmp_path))
        assert len(found) == 4
        assert sorted(found) == sorted(child.pid for child in psutil.Process(process.pid).children(recursive=True))
        parents = {pid: psutil.Process(pid).ppid() for pid in found}
        for position, pid in enumerate(found):
            assert parents[pid] == process.pid or parents[pid] in found[:position]


def test_without_the_children_files_of_proc_the_same_tree_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with script(TREE, tmp_path) as process:
        listed = sorted(kernel.descendants(process.pid))
        monkeypatch.setattr(kernel.os.path, "exists", lambda path: False)
        assert sorted(kernel.descendants(process.pid)) == listed


def test_a_process_without_children_or_that_is_gone_has_no_descendants(tmp_path: Path) -> None:
    with script("ready(); time.sleep(40)", tmp_path) as process:
        assert kernel.descendants(process.pid) == []
    assert kernel.descendants(process.pid) == []


def test_zombies_are_among_the_descendants_and_are_told_apart(tmp_path: Path) -> None:
    zombie = """
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        ready()
        time.sleep(40)
    """
    with script(zombie, tmp_path) as process:
        (pid,) = kernel.descendants(process.pid)
        assert kernel.is_zombie(pid)
        assert not kernel.is_zombie(process.pid)
    assert kernel.is_zombie(pid), "what is gone is as good as dead"


def test_a_process_whose_main_thread_has_ended_is_alive_while_another_thread_runs(tmp_path: Path) -> None:
    headless = f"""
        from tests.calls import work
        threading.Thread(target=lambda: (work.await_mark({str(tmp_path)!r}, "headless"), ready())).start()
        work.sleeps_without_a_main_thread({str(tmp_path)!r})
    """
    with script(headless, tmp_path) as process:
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert not kernel.is_zombie(process.pid) and not kernel.is_halted(process.pid)
        assert kernel.is_alive(replace(kernel.this_process(), pid=process.pid, started=kernel.start_of(process.pid)))
        mark = os.environ["SHOTCLOCK_TEST_MARK"]
        assert f"SHOTCLOCK_TEST_MARK={mark}".encode() in kernel.environment_of(process.pid)
        process.kill()
        process.wait(5)
        assert kernel.is_zombie(process.pid)


HEADLESS = """
import ctypes, os, sys
from shotclock.supervise import kernel
from tests.calls import work

os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: another user's id has hidden our entries in /proc
pid = os.fork()
if pid == 0:
    work.sleeps_without_a_main_thread(sys.argv[1])
work.await_mark(sys.argv[1], "headless")
print(b"FOUND_BY=this" in kernel.environment_of(pid))
os.kill(pid, 9)
os.waitpid(pid, 0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_finds_the_mark_of_a_process_whose_main_thread_has_ended() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", HEADLESS, folder]
        env = {**os.environ, "FOUND_BY": "this"}
        ran = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)
    assert ran.stdout == "True\n", ran.stderr


def test_an_orphan_below_a_subreaper_stays_below_it(tmp_path: Path) -> None:
    adopts = """
        from shotclock.supervise import kernel
        assert kernel.become_subreaper()
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(1, b"%d" % os.getpid())
                time.sleep(40)
            os._exit(0)
        os.waitpid(child, 0)
        ready()
        time.sleep(40)
    """
    with script(adopts, tmp_path) as process:
        eventually(lambda: output(tmp_path))
        assert kernel.descendants(process.pid) == output(tmp_path)
        assert psutil.Process(output(tmp_path)[0]).ppid() == process.pid
        os.kill(output(tmp_path)[0], signal.SIGKILL)  # it left the session that is killed below


def test_has_children_tells_running_and_dead_children_from_none(tmp_path: Path) -> None:
    asks = """
        from shotclock.supervise import kernel
        said = [kernel.has_children()]
        hold, let_go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(let_go)
            os.read(hold, 1)
            os._exit(0)
        said.append(kernel.has_children())
        os.close(let_go)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        said.append(kernel.has_children())
        os.waitpid(pid, 0)
        said.append(kernel.has_children())
        os.write(1, b"%d %d %d %d" % tuple(said))
        ready()
        time.sleep(40)
    """
    with script(asks, tmp_path):
        assert output(tmp_path) == [False, True, True, False]


def test_a_child_that_shall_die_with_its_parent_does(tmp_path: Path) -> None:
    leaves = """
        from shotclock.supervise import kernel
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            kernel.die_with_parent(me)
            os.setsid()
            os.write(1, b"%d" % os.getpid())
            ready()
        time.sleep(40)
    """
    with script(leaves, tmp_path) as process:
        (pid,) = output(tmp_path)
        assert not kernel.is_zombie(pid)
        process.kill()
        process.wait(5)
        eventually(lambda: kernel.is_zombie(pid), within=2)


def test_a_description_names_the_command_and_survives_odd_ones(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "40"]) as process:
        eventually(lambda: "sleep" in str(kernel.describe(process.pid)["command"]))
        assert kernel.describe(process.pid) == {"pid": process.pid, "command": "sleep 40"}
        process.kill()
    assert kernel.describe(process.pid) == {"pid": process.pid, "command": "?"}
    odd = tmp_path / "a (b) c"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "40", b"\xff\n" * 300], stderr=subprocess.DEVNULL) as process:
        assert isinstance(kernel.describe(process.pid)["command"], str)
        process.kill()


# --- the bell ---------------------------------------------------------------------------------------------


@pytest.fixture
def bell() -> Iterator[kernel.DeadlineTimer]:
    bell = kernel.DeadlineTimer()
    yield bell
    bell.close()
    bell.close()  # twice is no harm


def rings_within(fd: int, ms: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(ms))


def test_a_bell_rings_at_its_time_and_not_before(bell: kernel.DeadlineTimer) -> None:
    at_ns = time.monotonic_ns() + 100_000_000
    bell.arm(at_ns)
    assert not rings_within(bell.fd, 0)
    assert rings_within(bell.fd, 5000)
    assert 0 <= time.monotonic_ns() - at_ns < 4_000_000_000


def test_a_bell_whose_time_has_passed_rings_at_once(bell: kernel.DeadlineTimer) -> None:
    for at_ns in (time.monotonic_ns() - 1, 1, 0, -5):
        bell.arm(at_ns)
        assert rings_within(bell.fd, 1000)


def test_a_disarmed_bell_is_silent_until_it_is_armed_again(bell: kernel.DeadlineTimer) -> None:
    bell.arm(time.monotonic_ns() + 30_000_000)
    bell.disarm()
    assert not rings_within(bell.fd, 100)
    bell.arm(time.monotonic_ns() - 1)
    assert rings_within(bell.fd, 1000)
    bell.disarm()
    assert not rings_within(bell.fd, 0)


def test_a_bell_can_be_set_ten_years_ahead(bell: kernel.DeadlineTimer) -> None:
    bell.arm(time.monotonic_ns() + 10 * 365 * 24 * 3600 * 10**9)
    assert not rings_within(bell.fd, 50)


def test_a_bell_is_heard_by_another_process_even_if_the_one_that_armed_it_is_stopped(
    bell: kernel.DeadlineTimer, tmp_path: Path
) -> None:
    os.set_inheritable(bell.fd, True)
    hears = f"""
        import select
        poller = select.poll()
        poller.register({bell.fd}, select.POLLIN)
        ready()
        os.write(1, b"%d" % bool(poller.poll(5000)))
        time.sleep(40)
    """
    code = f"import os, time\nready = lambda: open({str(tmp_path / 'ready')!r}, 'w').close()\n" + textwrap.dedent(hears)
    with (
        open(tmp_path / "out", "wb") as out,
        subprocess.Popen([sys.executable, "-c", code], pass_fds=[bell.fd], stdout=out) as process,
    ):
        try:
            eventually(lambda: (tmp_path / "ready").exists())
            bell.arm(time.monotonic_ns() + 20_000_000)
            eventually(lambda: output(tmp_path) == [1])
        finally:
            process.kill()


BLIND = """
import os, resource, subprocess, sys
from shotclock.supervise import kernel, zygote
from shotclock.worker.context import StartedProcesses
from shotclock.supervise.kill import kill_tree

child = subprocess.Popen(["sleep", "60"])
started = StartedProcesses()
started.add(child.pid)
unnoticed = StartedProcesses()
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
unnoticed.add(child.pid)
answers = [kernel.is_zombie(child.pid)]
for look in (
    lambda: kernel.start_of(child.pid),
    started.alive,
    lambda: kill_tree(child.pid, lambda wait_ms: None),
    lambda: zygote.kill_what_lost_its_supervisor(child.pid),
):
    try:
        answers.append(look())
    except OSError as error:
        answers.append(error.errno)
os.close(held.pop())
os.close(held.pop())
answers.append([each.alive() == [child.pid] for each in (started, unnoticed)])
child.kill()
child.wait()
print(answers)
"""


def test_without_a_descriptor_left_to_look_nothing_is_reported_gone() -> None:
    ran = subprocess.run([sys.executable, "-c", BLIND], capture_output=True, timeout=30, text=True)
    assert (ran.stdout, ran.stderr) == ("[False, 24, 24, 24, 24, [True, True]]\n", "")


def test_a_pid_that_was_reused_while_its_tree_was_killed_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    look = kernel.start_of
    with subprocess.Popen(["sleep", "60"]) as other:
        starts = iter([look(other.pid) - 1])
        monkeypatch.setattr(kernel, "start_of", lambda pid: next(starts, None) or look(pid))
        assert kill_tree(other.pid, lambda wait_ms: None) == []
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.3)
        other.kill()
