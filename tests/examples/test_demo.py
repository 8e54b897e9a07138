"""`make demo`, which does not set up .venv here, and `shotclock demo workflow`: the tour, and the page of it."""

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import POLL_S, ROOT, RUN_LIMIT_S, SHOTCLOCK

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


TOUR = [*SHOTCLOCK, "demo", "workflow"]


@pytest.mark.alone
def test_make_demo_plays_the_scenes(ours: Path, folder: Path) -> None:
    with open(folder / "out", "wb") as out:
        ran = subprocess.run(make(ours), stdout=out, stderr=out, stdin=subprocess.DEVNULL, timeout=RUN_LIMIT_S)
    said = (folder / "out").read_text()
    assert ran.returncode == 0, said
    assert said.count("left alive: 0") == 5 and "none of the demo is alive any more" in said


def test_off_a_terminal_the_tour_is_a_table_and_says_where_the_page_is(folder: Path) -> None:
    before = {path for path in ROOT.glob("examples/**/*") if "__pycache__" not in path.parts}
    with open(folder / "out", "wb") as out:
        ran = subprocess.run(TOUR, stdout=out, stderr=out, stdin=subprocess.DEVNULL, timeout=RUN_LIMIT_S)
    said = (folder / "out").read_text()
    assert ran.returncode == 0, said
    assert "\x1b" not in said
    assert "| ◷ | `hang` | timed out |" in said and "`it needs hang: hang timed out`" in said
    assert re.search(r"\| ✓ \| `ask-service` \| succeeded \| \S+ \| \S+ \| [2-6] \|", said)
    assert "Exit code 3, as it should be (of the run; the demo's own is 0)" in said
    [page] = re.findall(r"the page, for a browser: (\S+\.html)", said)
    assert "killed by its own clock" in Path(page).read_text("utf-8")
    assert {path for path in ROOT.glob("examples/**/*") if "__pycache__" not in path.parts} == before


def test_on_a_terminal_the_tour_is_seen_running_and_the_page_is_opened(
    folder: Path, answer: Callable[..., tuple[int, str]]
) -> None:
    programs = folder / "programs"
    programs.mkdir()
    (programs / "xdg-open").write_text(f'#!/bin/sh\necho "$1" > {folder}/opened\n')
    (programs / "xdg-open").chmod(stat.S_IRWXU)
    env = {"DISPLAY": ":0", "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "LINES": "40"}
    code, screen = answer(TOUR, env=env)
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


def test_any_other_end_of_the_tour_fails(shotclock: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = shotclock("demo", "workflow", env={"SHOTCLOCK_HOME": str(tmp_path / "file" / "home")})
    assert ran.code == 1
    assert b"should end with exit code 3" in ran.stderr
