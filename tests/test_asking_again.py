"""What fails beside the others is asked again by itself: code that is late is late then too, and it is said."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
from pathlib import Path

def test_passes(): pass

def test_is_late_at_first():
    asked = Path(__file__).with_name("asked")
    before = len(asked.read_text()) if asked.exists() else 0
    asked.write_text("x" * (before + 1))
    assert before >= {late}
"""
HOOKS = "from tests.conftest import pytest_addoption, pytest_runtest_logreport, pytest_sessionfinish  # noqa"


@pytest.mark.slow
@pytest.mark.parametrize("beside", [[], ["-n", "2"]], ids=["one process", "several"])
@pytest.mark.parametrize(("late", "code", "said"), [(2, 0, "passed when asked 2×"), (9, 1, "FAILED each time")])
def test_what_fails_is_asked_again_by_itself_up_to_twice_and_named(
    late: int, code: int, said: str, beside: list[str], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_it.py").write_text(PROGRAM.format(late=late))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--ask-again", "2", *beside],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == code, ran.stdout
    assert ran.stdout.rstrip().splitlines()[-1] == f"  {said}: test_it.py::test_is_late_at_first"
    assert len((tmp_path / "asked").read_text()) == 3
