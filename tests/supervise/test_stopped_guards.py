"""Work that stops its guards by a signal, and guards that are stopped and killed at random moments: nothing is left.

The kinds of processes: the work (of `wrap` a server), its supervisor, the caller, which is `shotclock` itself, and in a
run the zygote. At least one guard lives on, as design.md says; it may be stopped, like all others.
"""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from shotclock.supervise.leftovers import MARK, LeftProcess, find_carriers
from tests.calls.bounds import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are found on Linux only"),
]

ENTRIES = ("exec", "timeout", "shotclock-sh", "wrap", "run", "shotclock.run")
WITH_ZYGOTE = ("run", "shotclock.run")
UP_WITHIN_S = 60.0
# A guard is continued within a second; then it kills what is left, and verifies it.
GONE_WITHIN_S = 20.0
POLL_S = 0.02
STOPS = {
    "its supervisor": "kill -STOP $PPID",
    "its supervisor and what is above it": "above=$(ps -o ppid= -p $PPID); kill -STOP $above $PPID",
}
TREE = 'setsid sleep 300 & (trap "" TERM; sleep 301; :) & sh -c "setsid sh -c \'sleep 302; :\' & sleep 303; :" &'


class Entry:
    """A `shotclock` that runs a tree of processes without a limit that could end it before the test does."""

    def __init__(self, name: str, script: str, folder: Path) -> None:
        folder.mkdir()
        self.name, self._mark, self._up = name, uuid.uuid4().hex, folder / "up"
        work = folder / "work.sh"
        work.write_text(f"{TREE}\n{script}\ntouch {self._up}\nsleep 304\n:\n")
        env = {**os.environ, MARK: self._mark, "SHOTCLOCK_HOME": str(folder / "home")}
        with open(folder / "out", "wb") as out:
            self._shotclock = subprocess.Popen(
                _words(name, work), env=env, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
            )
        eventually(lambda: self._up.exists() or self._shotclock.poll() is not None, within=UP_WITHIN_S)
        assert self._up.exists(), (folder / "out").read_text()

    def processes(self) -> list[LeftProcess]:
        self._shotclock.poll()
        return find_carriers(f"{MARK}={self._mark}") or []

    def named(self, name: str) -> int:
        return next((process.pid for process in self.processes() if process.name == name), 0)

    @property
    def caller(self) -> int:
        return self._shotclock.pid

    def signal(self, pid: int, number: int) -> None:
        with suppress(OSError):
            fd = os.pidfd_open(pid)
            try:
                if any(process.pid == pid for process in self.processes()):
                    signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)

    def left(self) -> list[str]:
        """What is there after a while, killed."""
        give_up_at = time.monotonic() + GONE_WITHIN_S
        while (found := self.processes()) and time.monotonic() < give_up_at:
            time.sleep(POLL_S)
        for process in found:
            self.signal(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._shotclock.wait(5)
        assert self._shotclock.stdin is not None
        self._shotclock.stdin.close()
        return [f"{self.name}: {process}" for process in found]


def _words(name: str, work: Path) -> list[str]:
    shotclock = [sys.executable, "-m", "shotclock"]
    shell = "import sys; from shotclock.main import run_shell; run_shell()"
    match name:
        case "exec":
            return [*shotclock, "exec", "--timeout", "0", "--grace", "300ms", "--", "sh", str(work)]
        case "timeout":
            return [*shotclock, "timeout", "-k", "0.3", "0", "sh", str(work)]
        case "shotclock-sh":
            return [sys.executable, "-c", shell, "--timeout", "0", "-c", f". {shlex.quote(str(work))}"]
        case "wrap":
            return [*shotclock, "wrap", "--timeout", "0", "--grace", "300ms", "--", "sh", str(work)]
        case "shotclock.run":
            return [sys.executable, "-c", f"import shotclock; shotclock.run(['sh', {str(work)!r}])"]
    flow = work.with_name("flow.yaml")
    flow.write_text(f"steps:\n  stays: {{exec: 'exec sh {work}', timeout: 600}}\n")
    return [*shotclock, "run", str(flow)]


@pytest.mark.parametrize("stopped", STOPS)
def test_work_that_has_stopped_its_guards_dies_when_shotclock_is_killed(stopped: str, tmp_path: Path) -> None:
    entries = [Entry(name, STOPS[stopped], tmp_path / name) for name in ENTRIES]
    for entry in entries:
        entry.signal(entry.caller, signal.SIGKILL)
    assert [line for entry in entries for line in entry.left()] == []


def test_what_a_killed_supervisor_leaves_is_killed_though_its_caller_is_stopped(tmp_path: Path) -> None:
    entries = [Entry(name, ":", tmp_path / name) for name in ENTRIES if name not in WITH_ZYGOTE]
    for entry in entries:
        supervisor = entry.named("shotclock-sup")
        entry.signal(entry.caller, signal.SIGSTOP)
        entry.signal(supervisor, signal.SIGKILL)
        entry.signal(entry.caller, signal.SIGTERM)  # ends `wrap`, which would start its server again
    assert [line for entry in entries for line in entry.left()] == []


@pytest.mark.parametrize(
    "rounds", [2, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(1_800)])], ids=["short", "soak"]
)
def test_nothing_is_left_however_its_processes_are_stopped_and_killed(rounds: int, tmp_path: Path) -> None:
    for number in range(rounds):
        seed = random.randrange(1_000_000)
        entries = [Entry(name, ":", tmp_path / f"{number}-{name}") for name in ENTRIES]
        chance = random.Random(seed)
        spared = {entry: _choose_spared(entry, chance) for entry in entries}
        for _ in range(chance.randrange(10, 60)):
            entry = chance.choice(entries)
            pids = [process.pid for process in entry.processes()]
            action = chance.choice([signal.SIGSTOP, signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL])
            if pids and ((pid := chance.choice(pids)) != spared[entry] or action != signal.SIGKILL):
                entry.signal(pid, action)
            time.sleep(chance.choice([0, 0, 0.005, 0.05]))
        for entry in entries:
            is_spared = spared[entry] == entry.caller
            entry.signal(entry.caller, signal.SIGTERM if is_spared else signal.SIGKILL)
        assert [line for entry in entries for line in entry.left()] == [], f"seed {seed}"


def _choose_spared(entry: Entry, chance: random.Random) -> int:
    """The guard that is not killed. A run that is stopped is continued by no one, so it is killed in the end."""
    other = entry.named("clock-zygote") if entry.name in WITH_ZYGOTE else entry.caller
    return chance.choice([entry.named("shotclock-sup"), other])
