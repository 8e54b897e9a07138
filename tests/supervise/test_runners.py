"""Runners of jobs below a supervisor: only an enrolled process with its own start time is spared."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

RAN_WITHIN_S = 30.0
SUPERVISE = """
import json, os, sys
from shotclock.supervise import foreground
from shotclock.supervise.command_task import CommandTask
from shotclock.supervise.foreground import TerminalSignals
script, folder, bell_ms = sys.argv[1:]
task = CommandTask(["sh", "-c", script], dict(os.environ), runners=folder or None, output="INHERIT")
if int(bell_ms):
    from shotclock.supervise.clock import monotonic_ns
    task.bell_ns = monotonic_ns() + int(bell_ms) * 1_000_000
    task.kill_ns = task.bell_ns + 1_000_000_000
report = foreground.run(task, TerminalSignals())
print(json.dumps({"jobs": report.jobs, "leaked": report.leaked, "survivors": report.survivors, "lost": report.lost}))
"""
RUNNER = """
import os, sys, time
folder, kind = sys.argv[1:]
if os.fork():
    os._exit(0)
from shotclock.supervise.runners import enrol, withdraw
if kind == "runner":
    enrol(folder, "job1", "a name")
elif kind == "old start":
    os.setsid()
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/{os.getpid()}", "w") as file:
        file.write("1 job1 a name")
else:
    from shotclock.supervise.kernel import name_process
    os.setsid()
    name_process("shotclock-job")
child = os.fork()
if child == 0:
    os.setsid()
with open(f"{folder}.{'child' if child == 0 else 'pid'}", "w") as file:
    file.write(str(os.getpid()))
time.sleep(60)
"""


class Tree:
    """A supervised shell that starts a process of some kind, which has a child in a session of its own."""

    def __init__(self, tmp_path: Path, kind: str) -> None:
        self._folder = tmp_path / "home" / "runners"
        self._folder.parent.mkdir()
        os.environ["SHOTCLOCK_HOME"] = str(self._folder.parent)
        (tmp_path / "runner.py").write_text(RUNNER)
        self.start = f"{sys.executable} {tmp_path}/runner.py {self._folder} '{kind}' > {os.devnull} 2>&1"
        self.files = [Path(f"{self._folder}.{end}") for end in ("pid", "child")]

    def command(self, script: str, *, spares: bool = True, bell_ms: int = 0) -> list[str]:
        folder = str(self._folder) if spares else ""
        waits = " && ".join(f"[ -s {file} ]" for file in self.files)
        script = f"{self.start}; until {waits}; do sleep 0.05; done; {script}"
        return [sys.executable, "-c", SUPERVISE, script, folder, str(bell_ms)]

    def run(self, script: str, **more: Any) -> Any:
        ran = subprocess.run(self.command(script, **more), capture_output=True, timeout=RAN_WITHIN_S, check=True)
        return json.loads(ran.stdout)

    @property
    def pids(self) -> list[int]:
        return [int(file.read_text()) for file in self.files]

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", "/nowhere")  # so that it is restored


def test_a_runner_and_its_tree_survive_the_end_of_the_command(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "runner")
    report = tree.run("setsid sleep 60 & true")
    runner, child = tree.pids
    assert report["jobs"] == [{"job_id": "job1", "name": "a name", "runner_pid": runner}]
    assert [each["command"] for each in report["leaked"]] == ["sleep 60"]
    assert is_alive(runner) and is_alive(child)
    tree.end()


def test_they_survive_a_timeout_and_a_lost_supervisor(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "runner")
    report = tree.run("trap '' TERM; setsid sleep 60 & sleep 60; sleep 60", bell_ms=3_000)
    assert report["survivors"] == [] and all(map(is_alive, tree.pids))
    tree.end()
    for file in tree.files:
        file.unlink()
    lost = tree.run("kill -9 $PPID; sleep 60")
    assert lost["lost"] and len(lost["jobs"]) == 1 and lost["survivors"] == [] and all(map(is_alive, tree.pids))
    tree.end()


def test_without_the_folder_nothing_is_spared(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "runner")
    report = tree.run("true", spares=False)
    assert report["jobs"] == [] and len(report["leaked"]) == 2
    assert not any(map(is_alive, tree.pids))


@pytest.mark.parametrize("kind", ["old start", "name"])
def test_a_process_that_only_looks_like_a_runner_is_stopped(kind: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path, kind)
    report = tree.run("true")
    assert report["jobs"] == [] and len(report["leaked"]) == 2
    assert not any(map(is_alive, tree.pids))


def test_the_entries_of_dead_runners_are_removed(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "runner")
    tree.run("true")
    [first] = (tmp_path / "home" / "runners").iterdir()
    tree.end()
    wait_for(lambda: not any(map(is_alive, tree.pids)), "their end")
    for file in tree.files:
        file.unlink()
    tree.run("true")
    [second] = (tmp_path / "home" / "runners").iterdir()
    assert first.name != second.name and second.stat().st_mode & 0o777 == 0o600
    tree.end()
