"""The supervisor by itself, with a child that the machine lets run late."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

PROGRAM = """
import os, time
from shotclock.process import ipc, kernel
from shotclock.process.command_task import CommandReport, CommandTask, News, Order
from shotclock.process.supervisor import Supervisor

def die_late(parent, die_with_parent=kernel.die_with_parent):
    time.sleep(0.5)
    die_with_parent(parent)

kernel.die_with_parent = die_late
control, theirs = ipc.pair()
if os.fork() == 0:
    control.close()
    Supervisor(theirs).run_command(CommandTask(["sleep", "60"], dict(os.environ), grace_ms=10_000))
    os._exit(0)
theirs.close()
ipc.send(control, (Order.STOP, "cancelled"))
control.settimeout(20)
inbox = ipc.MessageReader(control)
while (message := inbox.next())[0] != News.ENDED:
    pass
print(CommandReport.unpack(message[1]).status)
"""


def test_a_stop_that_comes_between_fork_and_exec_is_not_lost() -> None:
    """The child still has the supervisor's handlers then, which would swallow it."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=30, text=True)
    assert (ran.stdout, ran.stderr) == ("-15\n", "")
