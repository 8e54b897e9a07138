"""The supervisor by itself: with a child that the machine lets run late, a reader that does not read, a caller that
leaves."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

PROGRAM = """
import os, time
from shotclock.supervise import ipc, kernel
from shotclock.supervise.command_task import CommandReport, CommandTask, News, Order
from shotclock.supervise.supervisor import Supervisor

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


RELAY = """
import json, os, time
from shotclock.supervise import ipc, supervisor
from shotclock.supervise.command_task import CommandReport, CommandTask, News, Order
from shotclock.supervise.supervisor import Supervisor

def begin(script, before=lambda: None, stays=False, **limits):
    \"\"\"Supervise a shell script whose output goes into a pipe that is read only later.\"\"\"
    global control, inbox, output, pid
    control, theirs = ipc.pair()
    output, output_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        control.close()
        os.close(output)
        os.dup2(output_in, 1)
        os.close(output_in)
        above = Supervisor(theirs)
        before()
        limits.setdefault("output", "RELAY")
        above.run_command(CommandTask(["sh", "-c", script], dict(os.environ), **limits), stays=stays)
        os._exit(0)
    theirs.close()
    os.close(output_in)
    control.settimeout(20)
    inbox = ipc.MessageReader(control)

def read_all():
    size = 0
    while chunk := os.read(output, 65536):
        size += len(chunk)
    return size

def report():
    while (message := inbox.next())[0] != News.ENDED:
        pass
    return CommandReport.unpack(message[1])

def seconds_used():
    _, _, usage = os.wait4(pid, 0)
    return usage.ru_utime + usage.ru_stime

def say(*answer):
    print(json.dumps(answer))
"""
FLOOD = "head -c 100000 /dev/zero"  # more than a pipe holds, less than a pipe and what a supervisor holds


def supervise(lines: str) -> list[Any]:
    ran = subprocess.run([sys.executable, "-c", RELAY + lines], capture_output=True, timeout=30, text=True)
    assert ran.returncode == 0, ran.stderr
    answer: list[Any] = json.loads(ran.stdout)
    return answer


def test_a_stop_with_a_reader_that_does_not_read_is_no_timeout() -> None:
    lines = f"""
begin("{FLOOD}; exec sleep 60", grace_ms=200)
inbox.next()
time.sleep(0.5)
ipc.send(control, (Order.STOP, "cancelled"))
ended = report()
say(ended.fired, ended.stopped)
"""
    assert supervise(lines) == [None, "cancelled"]


def test_a_stop_also_ends_the_wait_for_a_reader_after_the_end_of_the_command() -> None:
    lines = f"""
begin("{FLOOD}")
inbox.next()
time.sleep(1)
ipc.send(control, (Order.STOP, "cancelled"))
ended = report()
say(ended.fired, ended.stopped, ended.status)
"""
    assert supervise(lines) == [None, "cancelled", 0]


def test_a_slow_reader_gets_all_output_of_a_command_whose_children_were_stopped() -> None:
    lines = f"""
begin("sleep 60 & {FLOOD}")
time.sleep(2.5)
size = read_all()
ended = report()
say(ended.fired, len(ended.leaked), size)
"""
    assert supervise(lines) == [None, 1, 100_000]


@pytest.mark.parametrize("script", [FLOOD, f"{FLOOD}; exec sleep 60"])
def test_a_supervisor_whose_caller_left_neither_stays_nor_spins(script: str) -> None:
    lines = f"""
begin("{script}")
inbox.next()
time.sleep(1)
control.close()
say(seconds_used())
"""
    assert supervise(lines)[0] < 0.5


def test_a_supervisor_with_children_left_behind_takes_no_further_command() -> None:
    lines = """
begin("sleep 1.5 >&- 2>&- &", stays=True, leave_children=True, output="CAPTURE")
say(report().spare_pid)
"""
    assert supervise(lines) == [0]


def test_a_command_that_did_not_start_is_not_announced() -> None:
    lines = """
def no_fork():
    raise BlockingIOError(11, "no process left")

def refuse():
    os.fork = no_fork
    supervisor.Cgroup.create = lambda: None

def broken(task, becomes):
    raise OSError(24, "no descriptor left")

def break_start():
    supervisor.become = broken

answers = []
for before in (refuse, break_start):
    begin("exit 0", before)
    message = inbox.next()
    answers.append([message[0], CommandReport.unpack(message[1]).unstartable if message[0] == News.ENDED else None])
say(*answers)
"""
    assert supervise(lines) == [["ended", ["fork", 11]], ["ended", ["exec", 24]]]
