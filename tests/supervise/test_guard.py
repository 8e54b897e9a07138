"""A zygote and the guard of a frozen runtime, whatever has become of the standard descriptors."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

LIMIT_S = 10.0
GUARD = """
import os, socket, subprocess, sys
from shotclock.supervise.clock import monotonic_ns
from shotclock.supervise.kernel import DeadlineTimer
from shotclock.supervise.zygote import _guard_runtime

frozen = subprocess.Popen(["sleep", "60"], stderr=subprocess.DEVNULL)
timer = DeadlineTimer()
timer.arm(monotonic_ns())
ours, theirs = socket.socketpair()
descriptor = os.pidfd_open(frozen.pid)
if sys.argv[1:]:
    os.close(2)
try:
    _guard_runtime(ours, timer.fd, descriptor)
finally:
    has_died = os.waitid(os.P_PID, frozen.pid, os.WEXITED | os.WNOHANG) is not None
    if not has_died:
        has_died = frozen.wait(5) == -9
    print("killed" if has_died else "alive")
"""


@pytest.mark.parametrize("stderr", ["read", "closed", "without a reader", "full"])
def test_a_frozen_runtime_is_killed_whatever_became_of_stderr(stderr: str) -> None:
    read_end, write_end = os.pipe()
    if stderr == "full":
        os.set_blocking(write_end, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(write_end, bytes(65536))
        os.set_blocking(write_end, True)
    if stderr == "without a reader":
        os.close(read_end)
    words = [sys.executable, "-c", GUARD, *(["close"] if stderr == "closed" else [])]
    guard = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=write_end, text=True)
    os.close(write_end)
    try:
        out, _ = guard.communicate(timeout=LIMIT_S)
    finally:
        guard.kill()
        guard.wait(LIMIT_S)
    assert out == "killed\n"
    if stderr == "read":
        assert b"frozen for too long" in os.read(read_end, 4096)
    if stderr != "without a reader":
        os.close(read_end)


@pytest.mark.parametrize("closed", [(2,), (0, 2), (0, 1, 2)])
def test_a_zygote_ends_with_its_socket_also_if_standard_descriptors_are_closed(closed: tuple[int, ...]) -> None:
    program = f"""
import os, sys
from shotclock.supervise.zygote import start_clean_zygote

answer = os.dup(1)
for number in {closed}:
    os.close(number)
ours, zygote = start_clean_zygote()
is_open = [number for number in {closed} if os.path.exists("/proc/self/fd/" + str(number))]
ours.close()
pidfd = os.pidfd_open(zygote)
import select
ended = select.select([pidfd], [], [], {LIMIT_S})[0] != []
if not ended:
    os.kill(zygote, 9)
os.waitpid(zygote, 0)
os.write(answer, repr((is_open, ended)).encode())
"""
    words = [sys.executable, "-c", program]
    ran = subprocess.run(words, capture_output=True, timeout=30, text=True)
    assert (ran.stdout, ran.stderr) == ("([], True)", "")
