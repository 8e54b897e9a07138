"""What tests of apps share: an app file run as a real program, a store of its own, and nobody left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.limits import ProcessIdentity
from shotclock.store.jobs import Job
from shotclock.store.store import Store
from shotclock.supervise.kernel import is_alive
from tests.conftest import KILLED_GONE_WITHIN_S, Ran, ends_within
from tests.warm import WarmStart, be_ready

PROGRAMS = Path(__file__).parent / "programs"
POLL_S = 0.01
# What a test waits for happens within a second or two; only a broken run or a machine on its knees exhausts this.
SOON_S = 20.0
# How long a runner may take to leave once its job has ended: it closes its runtime before, and exits right after.
KEEPER_LEAVES_WITHIN_S = 3.0
# Programs that a test lets run side by side; more would only measure how the machine shares its processors.
AT_ONCE = 3
# Words of an environment that would change what the programs do.
CLEARED = ("AGENT_CALL_BUDGET_MS", "CI", "NO_COLOR", "SHOTCLOCK_REMAINING_MS", "SHOTCLOCK_DEADLINE_NS")


def wait_for(condition: Callable[[], Any], what: str, within_s: float = SOON_S) -> Any:
    """The condition's first true answer."""
    give_up_at = time.monotonic() + within_s
    while not (answer := condition()):
        assert time.monotonic() < give_up_at, f"waited {within_s} s in vain for {what}"
        time.sleep(POLL_S)
    return answer


def uses_the_store(running: "Running") -> bool:
    """Whether a program has come so far that it looks after its job or its key."""
    try:
        links = [os.readlink(path) for path in Path(f"/proc/{running.process.pid}/fd").iterdir()]
    except OSError:
        return False
    return any(link.endswith("shotclock.db") for link in links)


def lines_of(path: Path) -> list[str]:
    """The whole lines that were written so far."""
    try:
        return path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []


def warning_codes(envelope: Mapping[str, Any]) -> list[str]:
    return [warning["code"] for warning in envelope["warnings"]]


def fields_of(envelope: Mapping[str, Any]) -> list[str]:
    return sorted(problem["field"] for problem in envelope["error"]["errors"])


@dataclass
class Running:
    """A program that has not ended yet. Its streams are files, unless the test brought its own."""

    process: subprocess.Popen[bytes]
    folder: Path
    began: float

    @property
    def stdout(self) -> bytes:
        return (self.folder / "out").read_bytes()

    @property
    def stderr(self) -> bytes:
        return (self.folder / "err").read_bytes()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self, within_s: float = 30.0) -> Ran:
        overran = self.process.returncode is None and not ends_within(self.process, within_s)
        elapsed_s = time.perf_counter() - self.began
        if overran:
            self.process.kill()
        ran = Ran(self.process.wait(KILLED_GONE_WITHIN_S), self.stdout, self.stderr, elapsed_s)
        assert not overran, f"still running after {within_s} s: {ran.stdout[-1000:]!r} {ran.stderr[-1000:]!r}"
        return ran


@dataclass
class Tool:
    """How one program is called."""

    words: list[str]
    folder: Path
    cold: bool = False
    """Started as by a shell; otherwise warm, see tests/warm.py."""
    started: list[Running] = field(default_factory=list)

    def start(
        self,
        *args: str | os.PathLike[str],
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        before: list[str] | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> Running:
        streams = self.folder / f"streams-{len(self.started)}"
        streams.mkdir(parents=True)
        environment = {k: v for k, v in {**os.environ, **(env or {})}.items() if v is not None}
        with open(streams / "out", "wb") as out, open(streams / "err", "wb") as err:
            began = time.perf_counter()
            process = (subprocess.Popen if self.cold else WarmStart)(
                [*(before or []), *self.words, *args],
                stdin=stdin,
                stdout=out if stdout is None else stdout,
                stderr=err if stderr is None else stderr,
                env=environment,
                cwd=self.folder if cwd is None else cwd,
                pass_fds=pass_fds,
            )
        self.started.append(Running(process, streams, began))
        return self.started[-1]

    def __call__(self, *args: str | os.PathLike[str], timeout: float = 30.0, **options: Any) -> Ran:
        return self.start(*args, **options).ends(timeout)

    def each(self, calls: Sequence[Sequence[str | os.PathLike[str]]], **options: Any) -> list[Ran]:
        """The program once for each of the calls, a few at a time: half of a run is the start of Python."""
        ran: list[Ran] = []
        for first in range(0, len(calls), AT_ONCE):
            running = [self.start(*words, **options) for words in calls[first : first + AT_ONCE]]
            ran += [one.ends() for one in running]
        return ran

    def envelope(self, *args: str | os.PathLike[str], code: int | None = None, **options: Any) -> Any:
        """The one document on stdout of a run that agrees with it about the exit code."""
        ran = self(*args, **options)
        envelope = ran.json()
        assert ran.code == envelope["meta"]["exit_code"], ran
        if code is not None:
            assert ran.code == code, envelope
        return envelope


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_survivors: Any) -> Iterator["Home"]:
    """A store of the test's own. Keepers of jobs that still run are killed at the end; one whose job has ended and
    that is still there fails the test, and so does, by `no_survivors`, whatever a killed one leaves behind."""
    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    made = Home(tmp_path / "home")
    yield made
    made.leave()


@dataclass
class Home:
    path: Path

    def jobs(self) -> list[Job]:
        if not (self.path / "shotclock.db").exists():
            return []
        with Store.open(self.path) as store:
            return list(store.jobs.list())

    def job(self, id: str | None = None) -> Job:
        """The only one, if it is not named."""
        [job] = [job for job in self.jobs() if id in (None, job.id)]
        return job

    def runner(self, id: str | None = None) -> int:
        """The pid of a job's runner, once there is one."""
        job = wait_for(lambda: next((j for j in [self.job(id)] if j.runner is not None), None), "a runner")
        return int(job.runner.pid)

    def leave(self) -> None:
        stayed: list[str] = []
        for job in self.jobs():
            if job.is_active:
                self._kill_runner(job)
            elif job.runner is not None and not self._gone(job.runner):
                stayed.append(f"{job.id} ({job.command}): pid {job.runner.pid}")
                os.kill(job.runner.pid, signal.SIGKILL)
        assert not stayed, f"runners outlived the end of their jobs: {stayed}"

    def _kill_runner(self, job: Job) -> None:
        give_up_at = time.monotonic() + SOON_S
        while job.runner is None and job.is_active and time.monotonic() < give_up_at:  # it is on its way
            time.sleep(POLL_S)
            job = self.job(job.id)
        if job.runner is not None and is_alive(job.runner):
            os.kill(job.runner.pid, signal.SIGKILL)

    def _gone(self, runner: ProcessIdentity) -> bool:
        give_up_at = time.monotonic() + KEEPER_LEAVES_WITHIN_S
        while is_alive(runner) and time.monotonic() < give_up_at:
            time.sleep(POLL_S)
        return not is_alive(runner)


@pytest.fixture
def tool(tmp_path: Path) -> Iterator[Callable[..., Tool]]:
    """A function that puts an app file into the test's folder and says how it is run: one of tests/apps/app/programs by
    its name, or one of the test's own by its text."""
    be_ready()
    tools: list[Tool] = []

    def install(
        name: str = "tool.py", text: str | None = None, words: list[str] | None = None, cold: bool = False
    ) -> Tool:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            file.write_text(text)
        elif not file.exists():
            shutil.copyfile(PROGRAMS / name, file)
        made = Tool(words or [sys.executable, str(file)], tmp_path / f"run-{len(tools)}", cold)
        made.folder.mkdir()
        tools.append(made)
        return made

    yield install
    for running in (running for made in tools for running in made.started):
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait(KILLED_GONE_WITHIN_S)


def envelopes_in(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith(b'{"ok":')]
