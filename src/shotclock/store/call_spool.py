"""Files of calls that the store did not take in time, beside the store. The next process that records or lists calls
adds them to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from ..core.clocks import ProcessIdentity
from ..core.json_values import of_json, to_json
from ..core.value_types import value
from .calls import LoggedCall, OpenCall
from .home import create_private_file, make_private_directory
from .store import Store

FOLDER = "calls"


@value
class CallBatch:
    """Calls of one process that are recorded together."""

    holder: ProcessIdentity
    ended: tuple[LoggedCall, ...] = ()
    opened: tuple[OpenCall, ...] = ()
    closed: tuple[int, ...] = ()
    """The numbers of open calls that have ended."""

    def add_to(self, store: Store, keep: int, *, wait_ms: int | None = 0) -> None:
        """Record the calls. Raises StoreBusy."""
        closed = [(self.holder, number) for number in self.closed]
        store.calls.add(self.ended, keep, self.opened, closed, wait_ms=wait_ms)


def keep_for_later(home: Path, batch: CallBatch) -> None:
    """Write calls to a file. Raises OSError or StoreError."""
    path = make_private_directory(home / FOLDER) / f"{batch.holder.pid}-{os.urandom(4).hex()}"
    with open(create_private_file(path.with_suffix(".new")), "w", encoding="utf-8") as file:
        json.dump(to_json(batch), file)
    os.rename(path.with_suffix(".new"), path)


def take_in(store: Store, keep: int, *, wait_ms: int | None = 0) -> None:
    """Add the calls of all files to the store, each once. Raises StoreBusy."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(store.home / FOLDER):
            if not name.endswith(".new"):
                _take_in_file(store, store.home / FOLDER / name, keep, wait_ms)


def _take_in_file(store: Store, path: Path, keep: int, wait_ms: int | None) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:  # otherwise another process has just added it
                of_json(CallBatch, json.load(file)).add_to(store, keep, wait_ms=wait_ms)
                os.unlink(path)
    except (OSError, ValueError, TypeError):  # another process adds it, or another version wrote it
        pass
