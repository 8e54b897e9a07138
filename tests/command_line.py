"""What tests of the command line share: a run in mid-flight, a terminal, and words to find things in envelopes."""

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.warm import WarmStart

POLL_S = 0.005
# What a test waits for happens in milliseconds; only a broken run or a machine on its knees exhausts this.
SOON_S = 10.0

# Escape sequences, and those of them that set a colour of the text or behind it. Bold and dim are no colours.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")

SHOTCLOCK = [sys.executable, "-m", "shotclock"]


def wait_for(condition: Callable[[], Any], what: str, within_s: float = SOON_S) -> Any:
    """The condition's first true answer."""
    give_up_at = time.monotonic() + within_s
    while not (answer := condition()):
        assert time.monotonic() < give_up_at, f"waited {within_s} s in vain for {what}"
        time.sleep(POLL_S)
    return answer


def envelopes_in(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith(b'{"ok":')]


def warning_codes(envelope: dict[str, Any]) -> list[str]:
    return [warning["code"] for warning in envelope["warnings"]]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def read_slowly(fd: int, first_after_s: float = 0.0, pause_s: float = 0.002) -> bytes:
    """To the end of file, which is the other side's to reach. Its pauses are the behaviour under test."""
    time.sleep(first_after_s)
    received = bytearray()
    while select.select([fd], [], [], SOON_S)[0] and (chunk := os.read(fd, 65536)):
        received += chunk
        time.sleep(pause_s)
    os.close(fd)
    return bytes(received)


@dataclass
class Running:
    """A `shotclock` that has not ended yet. Its streams are files, unless the test brought its own."""

    process: subprocess.Popen[bytes]
    folder: Path
    _open: list[Any] = field(default_factory=list)

    @property
    def stdout(self) -> bytes:
        return (self.folder / "out").read_bytes()

    @property
    def stderr(self) -> bytes:
        return (self.folder / "err").read_bytes()

    def said(self, text: bytes) -> None:
        """Wait until the command has written this to stdout: it is up, its traps are set."""
        wait_for(lambda: text in self.stdout or self.process.poll() is not None, f"{text!r} on stdout")
        assert text in self.stdout, f"ended with {self.process.returncode} first: {self.stderr[-2000:]!r}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self, within_s: float = SOON_S) -> int:
        return self.process.wait(within_s)

    def envelope(self) -> dict[str, Any]:
        """The only envelope, wherever it was put."""
        [envelope] = envelopes_in(self.stdout + self.stderr)
        return envelope


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    """A function that starts `shotclock …` and returns at once; what still runs at the end is killed."""
    started: list[Running] = []

    def run(
        *args: str | os.PathLike[str],
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        env: dict[str, str] | None = None,
        before: list[str] | None = None,
    ) -> Running:
        """`before`: words to put before the command, as in `env A=B`."""
        folder = tmp_path_factory.mktemp("running")
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            process = WarmStart(
                [*(before or []), *SHOTCLOCK, *args],
                stdin=stdin,
                stdout=out if stdout is None else stdout,
                stderr=err if stderr is None else stderr,
                env={**os.environ, **(env or {})},
            )
        started.append(Running(process, folder))
        return started[-1]

    yield run
    for running in started:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGKILL)
            running.process.wait(SOON_S)


@dataclass(frozen=True)
class Seen:
    code: int
    screen: str
    """What the terminal showed, with plain line ends."""
    stdout: bytes
    stderr: bytes


@pytest.fixture
def on_terminal(tmp_path: Path) -> Callable[..., Seen]:
    """A function that runs `shotclock …` with some of its streams on a terminal, the others on files."""

    def run(*args: str, streams: tuple[str, ...], within_s: float = SOON_S, env: dict[str, str] | None = None) -> Seen:
        ours, theirs = pty.openpty()
        screen = b""
        try:
            with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
                process = WarmStart(
                    [*SHOTCLOCK, *args],
                    stdin=subprocess.DEVNULL,
                    stdout=theirs if "stdout" in streams else out,
                    stderr=theirs if "stderr" in streams else err,
                    env={**os.environ, **(env or {})},
                )
            give_up_at = time.monotonic() + within_s
            try:
                while (ended := process.poll() is not None) or time.monotonic() < give_up_at:
                    while select.select([ours], [], [], 0 if ended else 0.02)[0]:
                        screen += os.read(ours, 65536)
                    if ended:
                        break
            finally:
                process.kill()
                process.wait(SOON_S)
            assert ended, f"still running after {within_s} s: {screen[-2000:]!r}"
        finally:
            os.close(ours)
            os.close(theirs)
        text = screen.decode().replace("\r\n", "\n")
        return Seen(process.returncode, text, (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes())

    return run


@pytest.fixture
def user_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, a project in it, and our programs on PATH."""
    for name in ("CI", "NO_COLOR", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME", "COPILOT_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("GEMINI_CLI_HOME", "XDG_STATE_HOME", "SHOTCLOCK_HOME"):
        monkeypatch.delenv(name, raising=False)
    home, programs = tmp_path / "home", tmp_path / "bin"
    (home / "project").mkdir(parents=True)
    programs.mkdir()
    for name, words in (("shotclock", SHOTCLOCK), ("shotclock-sh", ["/bin/bash"])):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(home / "project")
    return home
