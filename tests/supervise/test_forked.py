"""A function in a forked child: what it returns, how it is stopped, and that nothing is left. Run in a program of
its own, because `forked` becomes a subreaper and kills every child of the process it is used in."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

# More than any of these programs needs; only a hang runs it out.
PROGRAM_LIMIT_S = 20.0

PROGRAM = """
import json, os, signal, sys, time
from shotclock.supervise import forked
from shotclock.supervise.clock import monotonic_ns

def daemon():
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)

def within(ms):
    return monotonic_ns() + ms * 1_000_000

def attempt(function, until_ns=None):
    began = monotonic_ns()
    try:
        answer = ["returned", forked.run(function, until_ns=until_ns)]
    except forked.Unfinished as unfinished:
        answer = [type(unfinished).__name__, str(unfinished)]
    print(json.dumps([*answer, (monotonic_ns() - began) // 1_000_000]), flush=True)

def hang():
    daemon()
    print("hanging", flush=True)
    time.sleep(60)
"""


def run(lines: str) -> list[Any]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM + lines],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=PROGRAM_LIMIT_S,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def test_what_it_returns_comes_back_however_large():
    assert run("attempt(lambda: {'a': [1, 2]})")[:2] == ["returned", {"a": [1, 2]}]
    kind, value, _ = run("attempt(lambda: 'x' * 3_000_000)")
    assert (kind, len(value)) == ("returned", 3_000_000)


def test_what_it_raises_is_named():
    assert run("attempt(lambda: 1 / 0)")[:2] == ["Raised", "ZeroDivisionError: division by zero"]
    assert run("attempt(lambda: sys.exit(3))")[:2] == ["Raised", "SystemExit: 3"]


def test_a_result_that_cannot_be_sent_is_a_death_not_a_hang():
    assert run("attempt(lambda: (lambda: 0), within(5000))")[0] == "Died"


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_child_that_dies_is_noticed_though_its_daemon_holds_the_pipe(end: str):
    kind, _, took_ms = run(f"attempt(lambda: (daemon(), {end}), within(10_000))")
    assert kind == "Died"
    assert took_ms < 5000


def test_time_up_kills_it_and_everything_below():
    kind, _, took_ms = run("attempt(hang, within(300))")
    assert kind == "Overdue"
    assert 300 <= took_ms < 2000


def test_a_child_that_died_in_time_is_not_overdue_however_long_its_tree_takes_to_end():
    lines = """
end = forked._end_everything
forked._end_everything = lambda *arguments: (time.sleep(1.5), end(*arguments))[1]
attempt(lambda: os._exit(0), within(1000))
"""
    assert run(lines)[0] == "Died"


def test_what_it_leaves_running_is_killed_though_it_returned():
    assert run("attempt(lambda: daemon() or 7)")[:2] == ["returned", 7]


def test_it_nests():
    inner = "forked.run(lambda: time.sleep(60), until_ns=within(200))"
    kind, text, took_ms = run(f"attempt(lambda: {inner}, within(10_000))")
    assert (kind, text) == ("Raised", "Overdue: it did not answer in time")
    assert took_ms < 5000
    assert run("attempt(lambda: forked.run(lambda: 5, until_ns=None), within(10_000))")[:2] == ["returned", 5]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_it(number: signal.Signals, tmp_path: Path):
    with started(tmp_path) as (program, said):
        program.send_signal(number)
        assert program.wait(PROGRAM_LIMIT_S) == 0
        assert json.loads(said().splitlines()[-1])[:2] == ["StoppedBySignal", f"stopped by {number.name}"]


def test_if_the_program_is_killed_the_child_dies_with_it(tmp_path: Path, no_survivors: Any):
    with started(tmp_path, "attempt(lambda: print('hanging', flush=True) or time.sleep(60))") as (program, _):
        [child] = [process.pid for process in no_survivors.alive() if process.ppid == program.pid]
        program.kill()
        program.wait(PROGRAM_LIMIT_S)
        give_up_at = time.monotonic() + PROGRAM_LIMIT_S
        while os.path.exists(f"/proc/{child}") and time.monotonic() < give_up_at:
            time.sleep(0.01)
        assert not os.path.exists(f"/proc/{child}")


class started:
    """The program, once it has said that it hangs."""

    def __init__(self, folder: Path, lines: str = "attempt(hang)") -> None:
        self.out = folder / "out"
        with open(self.out, "wb") as out:
            self.program = subprocess.Popen([sys.executable, "-c", PROGRAM + lines], stdout=out)

    def __enter__(self) -> tuple[subprocess.Popen[bytes], Any]:
        give_up_at = time.monotonic() + PROGRAM_LIMIT_S
        while b"hanging" not in self.out.read_bytes():
            assert time.monotonic() < give_up_at, "it never began"
            time.sleep(0.01)
        return self.program, self.out.read_bytes

    def __exit__(self, *_: object) -> None:
        self.program.kill()
        self.program.wait(PROGRAM_LIMIT_S)
