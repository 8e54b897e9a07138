"""`make demo`: the tour, and the page of it. What it does not do here is set up .venv."""

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import POLL_S, ROOT, RUN_LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

# Nobody waits for the browser; it is a shell script here.
BROWSER_WITHIN_S = 10.0


def make(bin_folder: Path) -> list[str]:
    """The target with the programs of this folder, none of which is made anew."""
    venv = bin_folder.parent
    return ["make", "-C", str(ROOT), "--no-print-directory", f"VENV={venv}", "-o", f"{venv}/.installed", "demo"]


@pytest.fixture
def ours() -> Path:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    return Path(sys.executable).parent


def test_off_a_terminal_the_demo_is_a_table_and_says_where_the_page_is(ours: Path, folder: Path) -> None:
    before = {path for path in ROOT.glob("examples/**/*") if "__pycache__" not in path.parts}
    with open(folder / "out", "wb") as out:
        ran = subprocess.run(make(ours), stdout=out, stderr=out, stdin=subprocess.DEVNULL, timeout=RUN_LIMIT_S)
    said = (folder / "out").read_text()
    assert ran.returncode == 0, said
    assert "\x1b" not in said
    assert "| ◷ | `hang` | timed out |" in said and "`it needs hang: hang timed out`" in said
    assert re.search(r"\| ✓ \| `ask-service` \| succeeded \| \S+ \| \S+ \| [2-6] \|", said)
    assert "Exit code 3, as it should be" in said
    [page] = re.findall(r"the page, for a browser: (\S+\.html)", said)
    assert "killed by its own clock" in Path(page).read_text("utf-8")
    assert {path for path in ROOT.glob("examples/**/*") if "__pycache__" not in path.parts} == before


def test_on_a_terminal_the_demo_is_seen_running_and_the_page_is_opened(
    ours: Path, folder: Path, answer: Callable[..., tuple[int, str]]
) -> None:
    programs = folder / "programs"
    programs.mkdir()
    (programs / "xdg-open").write_text(f'#!/bin/sh\necho "$1" > {folder}/opened\n')
    (programs / "xdg-open").chmod(stat.S_IRWXU)
    env = {"DISPLAY": ":0", "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "LINES": "40"}
    code, screen = answer(make(ours), env=env)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    assert code == 0, plain
    assert re.search(r"hang +[━─]+ \d\.\ds left", plain)
    assert re.search(r"hang +out of time, stopping  \d\.\ds of grace left", plain)
    assert "nothing: the command and its daemon are gone" in plain
    assert re.search(r"◷ silent +\S+ / 20s +█+", plain), "the timeline"
    [page] = re.findall(r"opened (\S+\.html)", plain.replace("\n", ""))
    assert Path(page).exists()
    opened = folder / "opened"
    give_up_at = time.monotonic() + BROWSER_WITHIN_S
    while not (opened.exists() and opened.read_text() == f"{page}\n"):
        assert time.monotonic() < give_up_at, "nothing was opened"
        time.sleep(POLL_S)


@pytest.mark.parametrize("code", [0, 1, 10])
def test_any_other_end_of_the_tour_fails_the_demo(code: int, folder: Path, ours: Path) -> None:
    fake = folder / "bin"
    fake.mkdir()
    (fake / "shotclock").write_text(f"#!/bin/sh\nexit {code}\n")
    (fake / "shotclock").chmod(stat.S_IRWXU)
    ran = subprocess.run(make(fake), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=RUN_LIMIT_S)
    assert ran.returncode != 0
    assert f"this was {code}" in ran.stderr
