"""A store that another process keeps locked: a connection of its own is all that such a process has."""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

LONG_S = 12.0  # longer than what a writer waited for before, and shorter than what anything waits for now
JOIN_WITHIN_S = 30.0


@contextlib.contextmanager
def held(home: Path, for_s: float = LONG_S) -> Iterator[threading.Event]:
    """Hold the lock of all writers, for so long at most. The event that is yielded ends it earlier."""
    has_begun, enough = threading.Event(), threading.Event()

    def hold() -> None:
        other = sqlite3.connect(home / "shotclock.db", isolation_level=None, timeout=JOIN_WITHIN_S)
        try:
            other.execute("BEGIN IMMEDIATE")
            has_begun.set()
            enough.wait(for_s)
            other.execute("COMMIT")
        finally:
            other.close()

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        assert has_begun.wait(JOIN_WITHIN_S)
        yield enough
    finally:
        enough.set()
        holding.join(JOIN_WITHIN_S)
