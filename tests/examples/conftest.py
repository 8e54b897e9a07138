"""The examples as a person has them: copied to a folder of their own, run by the command itself, with its own store."""

import contextlib
import os
import pty
import select
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import KILLED_GONE_WITHIN_S
from tests.warm import WarmStart, own_terminal

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
SHOTCLOCK = [sys.executable, "-m", "shotclock"]
FLOWS = sorted(EXAMPLES.rglob("*.yaml"))

# Each takes a few seconds by itself, on a busy machine some times that.
RUN_LIMIT_S = 90.0
POLL_S = 0.05


@dataclass(frozen=True)
class Result:
    """What a run answered."""

    code: int
    data: dict[str, Any]
    error: dict[str, Any] | None

    @property
    def statuses(self) -> dict[str, str]:
        return {name: step["status"] for name, step in self.data["steps"].items()}

    def step(self, name: str) -> dict[str, Any]:
        return self.data["steps"][name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the flows, copied. No `shotclock` on PATH: a newcomer's is only in .venv."""
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    paths = [path for path in os.environ["PATH"].split(os.pathsep) if not (Path(path) / "shotclock").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(paths))
    for name in ("NO_COLOR", "CI", "DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(EXAMPLES / "flows", tmp_path / "flows", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "flows"


@pytest.fixture
def run(folder: Path, shotclock: Callable[..., Any], validate_envelope: Callable[..., Any]) -> Callable[..., Result]:
    """A function that runs a flow off a terminal."""

    def run(flow: str, **inputs: object) -> Result:
        words = [word for name, value in inputs.items() for word in ("--input", f"{name}={value}")]
        ran = shotclock("run", folder / flow, *words, timeout=RUN_LIMIT_S)
        envelope = validate_envelope(ran.json())
        return Result(ran.code, envelope["data"], envelope["error"])

    return run


@pytest.fixture
def answer(folder: Path) -> Callable[..., tuple[int, str]]:
    """A function that runs a command on a terminal, types `answer` when it is asked something, and reads it all."""

    def run(command: list[str], typed: str | None = None, env: dict[str, str] | None = None) -> tuple[int, str]:
        terminal, theirs = pty.openpty()
        process = WarmStart(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=own_terminal,
            cwd=folder, env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **(env or {})},
        )  # fmt: skip
        os.close(theirs)
        screen = b""
        code = None
        give_up_at = time.monotonic() + RUN_LIMIT_S
        try:
            while code is None:
                assert time.monotonic() < give_up_at, f"still running after {RUN_LIMIT_S} s: {screen.decode()}"
                if select.select([terminal], [], [], POLL_S)[0]:
                    with contextlib.suppress(OSError):  # nobody has the other side open any more
                        screen += os.read(terminal, 65536)
                        continue
                if typed is not None and b"\r\n> " in screen:
                    os.write(terminal, typed.encode() + b"\n")
                    typed = None
                code = process.poll()
        finally:
            process.kill()
            process.wait(KILLED_GONE_WITHIN_S)
            os.close(terminal)
        return code, screen.decode().replace("\r\n", "\n")

    return run
