"""The guard of a frozen runtime kills it whatever has become of stderr."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

LIMIT_S = 10.0
GUARD = """
import os, socket, subprocess, sys
from shotclock.process.clock import monotonic_ns
from shotclock.process.kernel import DeadlineTimer
from shotclock.process.zygote import _guard_runtime

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
