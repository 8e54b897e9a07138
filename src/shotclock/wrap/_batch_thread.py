"""A thread that writes records in batches and lives only while there are records to write."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ..supervise.clock import pause

BATCH_S = 1.0
BUSY_PAUSE_S = 0.1

# Hold this lock across fork(): a child forked mid-import inherits a locked import lock.
importing: threading.Lock = threading.Lock()
os.register_at_fork(before=importing.acquire, after_in_parent=importing.release, after_in_child=importing.release)


class BatchThread:
    """The thread of one owner, whose records are guarded by `lock`.

    `write` writes a batch, and returns False if the batch has to be tried again. `has_more`, called with the lock held,
    returns whether there is anything left to write.
    """

    def __init__(self, name: str, write: Callable[[], bool], has_more: Callable[[], bool]) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.is_closing: bool = False
        self.gives_up: bool = False  # the next attempt is the last
        self.problem: str = ""  # why the thread could not be started
        self._name, self._write, self._has_more = name, write, has_more
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def ensure_started(self, *, is_urgent: bool = False) -> None:
        """Start the thread if it is not running. An urgent batch waits for no more records. Needs the lock."""
        if is_urgent:
            self._wake.set()
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._write_all, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads; the next record tries again
            self.problem = str(error)
        else:
            self._thread = thread

    def begin_closing(self) -> None:
        """Write the rest without waiting for more records."""
        with self.lock:
            self.is_closing = True
        self._wake.set()

    def join(self, limit_s: float) -> bool:
        """Wait for the thread. Return whether it has ended; if it has not, its next failed attempt is its last."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(limit_s)
        self.gives_up = True
        return not thread.is_alive()

    def _write_all(self) -> None:
        while True:
            if not self.is_closing:
                self._wake.wait(BATCH_S)
                self._wake.clear()
            is_done_with = self._write()
            with self.lock:
                if not self._has_more():
                    self._thread = None
                    return
            if self.gives_up:
                return
            if not is_done_with:
                pause(BUSY_PAUSE_S)
