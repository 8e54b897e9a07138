"""What fails beside the others is asked again by itself: code that is late is late then too, and it is said."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
from pathlib import Path
import pytest

def test_passes(): pass

@pytest.mark.parametrize("late", {late})
def test_is_late(late):
    asked = Path(__file__).with_name(f"asked-{{late}}")
    before = len(asked.read_text()) if asked.exists() else 0
    asked.write_text("x" * (before + 1))
    assert before >= late
"""
HOOKS = "from tests.asking_again import pytest_addoption, pytest_runtest_logreport, pytest_sessionfinish  # noqa"
SAID = {2: "  passed when asked 2×: test_it.py::test_is_late[2]", 9: "  FAILED each time: test_it.py::test_is_late[9]"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "code", "beside"),
    [([2], 0, ["-p", "xdist", "-n", "2"]), ([2, 9], 1, [])],
    ids=["several processes, and all passes in the end", "one process, and one is broken"],
)
def test_what_fails_is_asked_again_by_itself_up_to_twice_and_named(
    late: list[int], code: int, beside: list[str], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_it.py").write_text(PROGRAM.format(late=late))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--ask-again", "2", *beside],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # they cost more than this
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == code, ran.stdout
    assert ran.stdout.rstrip().splitlines()[-len(late) :] == [SAID[each] for each in late]
    assert [len((tmp_path / f"asked-{each}").read_text()) for each in late] == [3 for _ in late]
