"""Expected failures of the store, each with a registered code.

    StoreError
    ├── StoreBusy       somebody else was writing for longer than we wait; nothing was changed, try again
    └── StoreUnusable   the place, the file or the disk must be mended first; nothing was changed

Wrong values given by our own code are plain ValueError and TypeError: bugs, not conditions.
"""

from __future__ import annotations

import os
import sqlite3
from typing import ClassVar

from ..core.errors import Failure


class StoreError(Failure):
    CODE: ClassVar[str]

    def __init__(self, message: str, path: str | os.PathLike[str], *, suggestion: str | None = None) -> None:
        shown = printable(path)
        super().__init__(self.CODE, f"{message}: {shown}", context={"store": shown}, suggestion=suggestion)


class StoreBusy(StoreError):
    CODE = "STORE_BUSY"


class StoreUnusable(StoreError):
    CODE = "STORE_UNUSABLE"


def printable(path: str | os.PathLike[str]) -> str:
    """Return a path as text for an envelope, which may not hold undecodable bytes."""
    return os.fsdecode(path).encode("utf-8", "backslashreplace").decode()


_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_MEANING = {
    sqlite3.SQLITE_CORRUPT: "the store is corrupt; move it away to start a new one",
    sqlite3.SQLITE_NOTADB: "this is not a Shotclock store, or a corrupt one; move it away to start a new one",
    sqlite3.SQLITE_FULL: "the disk is full; nothing was written to the store",
    sqlite3.SQLITE_READONLY: "the store cannot be written to",
    sqlite3.SQLITE_PERM: "the store may not be used by this user",
    sqlite3.SQLITE_AUTH: "the store may not be used by this user",
    sqlite3.SQLITE_CANTOPEN: "the store cannot be opened",
    sqlite3.SQLITE_IOERR: "the disk failed under the store",
    sqlite3.SQLITE_NOMEM: "there is no memory left for the store",
}


def is_busy(error: sqlite3.Error) -> bool:
    # Extended codes (SQLITE_BUSY_RECOVERY, …) carry the plain one in their lowest byte.
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in _BUSY


def translated(error: sqlite3.Error, path: str | os.PathLike[str]) -> StoreError:
    """Return the error of ours that a SQLite error stands for. The one place where it is translated."""
    if is_busy(error):
        return StoreBusy("the store is in use by others", path)
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    meaning = _MEANING.get(code, "the store failed")
    return StoreUnusable(f"{meaning} ({name}: {error})", path)
