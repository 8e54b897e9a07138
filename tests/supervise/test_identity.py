"""Who is alive: a pid is believed only together with its start time, and only where it can be seen."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shotclock.core.value_types import replace
from shotclock.supervise.kernel import is_alive, this_process

pytestmark = [
    pytest.mark.usefixtures("no_survivors"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc"),
]

GONE_WITHIN_S = 10  # a child that was killed; only a process stuck in the kernel would run this out


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(GONE_WITHIN_S)


def test_this_process_is_alive_and_the_same_each_time():
    assert is_alive(this_process())
    assert this_process() == this_process()
    assert this_process().pid == os.getpid()


def test_another_process_is_alive_until_it_is_killed_and_dead_as_a_zombie_already(sleeper: subprocess.Popen[bytes]):
    started = int(Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19])
    holder = replace(this_process(), pid=sleeper.pid, started=started)
    assert is_alive(holder)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet collected
    assert Path(f"/proc/{sleeper.pid}").exists()
    assert not is_alive(holder)
    sleeper.wait(GONE_WITHIN_S)
    assert not is_alive(holder)


def test_a_pid_that_was_used_again_is_not_taken_for_its_predecessor():
    assert not is_alive(replace(this_process(), started=this_process().started - 1))


def test_nobody_of_an_earlier_boot_of_this_machine_is_alive():
    assert not is_alive(replace(this_process(), boot_id="before"))


def test_who_is_on_another_machine_is_assumed_to_be_alive():
    assert is_alive(replace(this_process(), boot_id="theirs", host="elsewhere", pid=2**22 + 1))


def test_who_has_pids_of_another_namespace_is_assumed_to_be_alive():
    assert is_alive(replace(this_process(), namespace="pid:[1]", pid=2**22 + 1))


def test_a_machine_that_was_renamed_is_still_this_machine():
    assert not is_alive(replace(this_process(), host="old-name", pid=2**22 + 1))
    assert is_alive(replace(this_process(), host="old-name"))


def test_a_fork_is_somebody_else():
    this_process()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(this_process().pid).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        assert pipe.read() == str(child)
    os.waitpid(child, 0)


def test_running_out_of_descriptors_is_not_taken_for_anybodys_death(sleeper: subprocess.Popen[bytes]):
    started = int(Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19])
    holder = replace(this_process(), pid=sleeper.pid, started=started)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(OSError):
            open("/proc/self/stat")
        alive = is_alive(holder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert alive
