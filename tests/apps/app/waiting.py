"""Work of processes that tests start: importing it takes no time."""

import os
import time
from pathlib import Path

RELEASED_WITHIN_S = 60.0  # only a broken test exhausts this


def wait_for_release(folder: Path, name: str) -> None:
    """Write the pid to a file of this name, and wait until the test makes another."""
    (folder / name).write_text(str(os.getpid()))
    give_up_at = time.monotonic() + RELEASED_WITHIN_S
    while not (folder / f"release-{name}").exists():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
