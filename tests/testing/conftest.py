"""Shotclock as it is installed from its wheel, for tests of what only an installation has."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILT_WITHIN_S = 60.0
ENDED_WITHIN_S = 100.0

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=BUILT_WITHIN_S)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="session")
def installed(wheel: Path) -> Path:
    """The folder of an unpacked wheel, with its entry points, to be put on PYTHONPATH."""
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


@pytest.fixture
def run_installed(installed: Path, tmp_path: Path) -> Run:
    """A function that runs Python with the installed package, in the folder of the test."""

    def run(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(installed), "NO_COLOR": "1", **(env or {})}
        environment.pop("PYTEST_ADDOPTS", None)
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=ENDED_WITHIN_S,
        )

    return run
