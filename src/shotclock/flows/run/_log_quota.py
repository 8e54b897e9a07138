"""The limit on the logs of one run: once it is reached, older attempts keep only the end of their output."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ...core.value_types import entity
from ...dispatch.job_log import Log

TAIL = 2_000  # bytes that are kept of the output of an older attempt
SHRUNK_SHARE = 0.75  # of the limit: shrinking goes on until there, so that it is not done for each line
VARIABLE = "SHOTCLOCK_KEEP_RUN_LOGS_SIZE"


@entity
class _Measured:
    path: str
    size: int
    changed_ns: int


class LogQuota:
    """The size of the logs of a run and of the runs inside it, for the process that has it."""

    def __init__(self, limit: int) -> None:
        """`limit` is in bytes; 0 is no limit."""
        self._limit = limit
        self._folders: dict[Path, None] = {}
        self._open: set[str] = set()
        self._size = 0
        self._shrinking: asyncio.Future[None] | None = None
        self.deleted: int = 0
        """Tries of which nothing is kept any more."""

    def open(self, folder: Path, path: str) -> None:
        if folder not in self._folders:
            self._folders[folder] = None
            self._size += sum(log.size for log in _measure(folder))  # of a resumed run
        self._open.add(path)

    def close(self, path: str) -> None:
        self._open.discard(path)
        self._shrink_if_too_large()

    def add(self, size: int) -> None:
        """Note that so many bytes were written. Shrink in a thread once they are too many."""
        self._size += size
        self._shrink_if_too_large()

    async def settle(self) -> None:
        """Shrink what is too large when all attempts have ended."""
        if self._shrinking is not None:
            await asyncio.wait([self._shrinking])  # it may have begun while some were open
        self._shrink_if_too_large()
        if self._shrinking is not None:
            await asyncio.wait([self._shrinking])

    def _shrink_if_too_large(self) -> None:
        if self._limit and self._size > self._limit and (self._shrinking is None or self._shrinking.done()):
            self._shrinking = asyncio.get_running_loop().run_in_executor(None, self._shrink)

    def _shrink(self) -> None:
        logs = sorted((log for folder in self._folders for log in _measure(folder)), key=lambda log: log.changed_ns)
        self._size, most = sum(log.size for log in logs), int(self._limit * SHRUNK_SHARE)
        note = f"the logs of the run have reached {self._limit:,} bytes ({VARIABLE})".encode()
        ended = [log for log in logs if log.path not in self._open]
        for log in ended:
            if self._size > most and log.size > 2 * TAIL:
                before, log.size = log.size, Log(log.path).shrink(TAIL, note)
                self._size -= before - log.size
        for log in logs:
            if self._size > most and log.path in self._open:
                with contextlib.suppress(OSError):  # the older page of an open log
                    size = os.stat(f"{log.path}.1").st_size
                    os.unlink(f"{log.path}.1")
                    self._size -= size
        # Only what ended attempts hold: the open ones are shrunk when they end.
        size = sum(log.size for log in ended)
        for log in ended:
            if size > self._limit:
                size, self._size, self.deleted = size - log.size, self._size - log.size, self.deleted + 1
                for file in Log(log.path).files:
                    with contextlib.suppress(OSError):
                        os.unlink(file)


def _measure(folder: Path) -> Iterator[_Measured]:
    found: dict[str, _Measured] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                state = entry.stat(follow_symlinks=False)
                path = entry.path.removesuffix(".index").removesuffix(".1")
                log = found.setdefault(path, _Measured(path, 0, 0))
                log.size, log.changed_ns = log.size + state.st_size, max(log.changed_ns, state.st_mtime_ns)
    yield from found.values()
