"""Files of calls that the store did not take in time, beside the store. The next process that records or lists calls
adds them to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Mapping

from ..core.json_values import of_json, to_json
from ..core.limits import ProcessIdentity, WallTime
from ..core.value_types import value
from .home import StoreBusy, create_private_file, make_private_directory, state_home
from .store import Store, prune_in_passing, read_retention
from .wrapped_calls import LoggedCall, OpenCall

FOLDER = "calls"


@value
class CallBatch:
    """Calls of one process that are recorded together."""

    holder: ProcessIdentity
    ended: tuple[LoggedCall, ...] = ()
    opened: tuple[OpenCall, ...] = ()
    closed: tuple[int, ...] = ()  # the numbers of open calls that have ended

    def add_to(self, store: Store, keep: int, wait_ms: int | None = 0) -> None:
        closed = [(self.holder, number) for number in self.closed]
        store.calls.add(self.ended, keep, self.opened, closed, wait_ms=wait_ms)


def record_calls(
    batch: CallBatch,
    environment: Mapping[str, str],
    now: WallTime,
    is_alive: Callable[[ProcessIdentity], bool],
    *,
    is_last: bool,
) -> bool:
    """Record calls, and those of files. Return False if others keep the store busy; the last attempt writes a file.

    Raises StoreError if the store cannot be used, and OSError if no file can be written.
    """
    keep = read_retention(environment).calls
    try:
        with Store.open() as store:
            batch.add_to(store, keep)
            with contextlib.suppress(StoreBusy):  # the next batch tries again
                add_spooled(store, keep)
            prune_in_passing(store, environment, now, is_alive)
    except StoreBusy:
        if not is_last:
            return False
        folder = make_private_directory(state_home(environment) / FOLDER)
        path = folder / f"{batch.holder.pid}-{os.urandom(4).hex()}"
        with open(create_private_file(path.with_suffix(".new")), "w", encoding="utf-8") as file:
            json.dump(to_json(batch), file)
        os.rename(path.with_suffix(".new"), path)
    return True


def add_spooled(store: Store, keep: int, wait_ms: int | None = 0) -> None:
    """Add the calls of all files to the store, each once. Raises StoreBusy."""
    for path in (store.home / FOLDER).glob("*[!w]"):
        # Another process adds it, or another version wrote it.
        with contextlib.suppress(OSError, ValueError, TypeError), open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:  # otherwise another process has just added it
                of_json(CallBatch, json.load(file)).add_to(store, keep, wait_ms)
                os.unlink(path)
