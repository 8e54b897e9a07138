"""The generated parts of the reference pages are those that `make docs` writes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKED_WITHIN_S = 60.0


def test_the_generated_pages_are_up_to_date() -> None:
    # In a process of its own: other tests register error codes in this one.
    command = [sys.executable, "-m", "tools.reference", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CHECKED_WITHIN_S)
    assert checked.returncode == 0, checked.stdout + checked.stderr
