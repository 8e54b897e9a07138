"""`make demo`, which does not set up .venv here."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, RUN_LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]


def make(bin_folder: Path) -> list[str]:
    """The target with the programs of this folder, none of which is made anew."""
    venv = bin_folder.parent
    return ["make", "-C", str(ROOT), "--no-print-directory", f"VENV={venv}", "-o", f"{venv}/.installed", "demo"]


@pytest.fixture
def ours() -> Path:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    return Path(sys.executable).parent


@pytest.mark.alone
def test_make_demo_plays_the_scenes(ours: Path, folder: Path) -> None:
    with open(folder / "out", "wb") as out:
        ran = subprocess.run(make(ours), stdout=out, stderr=out, stdin=subprocess.DEVNULL, timeout=RUN_LIMIT_S)
    said = (folder / "out").read_text()
    assert ran.returncode == 0, said
    assert said.count("left alive: 0") == 5 and "none of the demo is alive any more" in said
