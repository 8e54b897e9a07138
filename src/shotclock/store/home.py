"""Directory of this user's state, private files and directories in it, and the expected failures of the store.

    StoreError
    ├── StoreBusy       another process was writing for too long; nothing was changed, retry
    └── StoreUnusable   the directory, the file or the disk must be repaired; nothing was changed

Wrong values from our own code raise ValueError and TypeError: they are bugs.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from ..core.errors import Failure

HOME_VARIABLE = "SHOTCLOCK_HOME"
FILE_NAME = "shotclock.db"
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
KEY_BYTES = 32
# A writer waits for others in attempts of this length, between which other threads have the connection.
ATTEMPT_MS = 250


class StoreError(Failure):
    CODE: ClassVar[str]

    def __init__(self, message: str, path: str | os.PathLike[str], *, suggestion: str | None = None) -> None:
        shown = printable(path)
        super().__init__(self.CODE, f"{message}: {shown}", context={"store": shown}, suggestion=suggestion)


class StoreBusy(StoreError):
    CODE: ClassVar[str] = "STORE_BUSY"


class StoreUnusable(StoreError):
    CODE: ClassVar[str] = "STORE_UNUSABLE"


def printable(path: str | os.PathLike[str]) -> str:
    """Return a path as text for an envelope, which may not hold undecodable bytes."""
    return os.fsdecode(path).encode("utf-8", "backslashreplace").decode()


def state_home(environ: Mapping[str, str]) -> Path:
    """Return SHOTCLOCK_HOME, else $XDG_STATE_HOME/shotclock, else ~/.local/state/shotclock. An empty variable is unset.

    A relative SHOTCLOCK_HOME is refused: it would be another store in every directory, and a job could not find its
    own. A relative XDG_STATE_HOME is ignored, as the XDG specification demands.
    """
    if own := environ.get(HOME_VARIABLE, ""):
        if own == "~" or own.startswith("~/"):  # no shell expanded it: it came from a configuration file
            return _user_home(environ) / own[2:]
        if not os.path.isabs(own):
            raise StoreUnusable(f"{HOME_VARIABLE} must be an absolute path", own)
        return Path(own)
    xdg = environ.get("XDG_STATE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else _user_home(environ) / ".local" / "state") / "shotclock"


def make_private_directory(path: Path) -> Path:
    """Make the directory (0700, independent of the umask). Raises StoreUnusable if others own it or may write to it."""
    try:
        _make(path)
        found = path.stat()
    except OSError as error:
        raise StoreUnusable(f"the directory of the store cannot be used ({error.strerror})", path) from error
    if not stat.S_ISDIR(found.st_mode):
        raise StoreUnusable("the directory of the store is not a directory", path)
    if found.st_uid != os.geteuid():
        raise StoreUnusable(
            f"the directory of the store belongs to user {found.st_uid}, not to {os.geteuid()}",
            path,
            suggestion=f"set {HOME_VARIABLE} to a directory of this user's own",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreUnusable(
            "others may write to the directory of the store", path, suggestion="run chmod go-w on it, or choose another"
        )
    return path


def create_private_file(path: Path) -> int:
    """Create a file that only this user can open and return its descriptor. Raises FileExistsError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        os.fchmod(descriptor, FILE_MODE)  # a umask may have removed our own permissions
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def load_private_key(path: Path) -> bytes:
    """Read the key of this file, or make it. Raises StoreUnusable.

    It is written to another file and then linked, so that half of it is never read, and the first one stays.
    """
    try:
        if not path.exists():
            fresh = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
            descriptor = create_private_file(fresh)
            try:
                os.write(descriptor, os.urandom(KEY_BYTES))
                os.fsync(descriptor)
                os.link(fresh, path)
            except FileExistsError:
                pass  # another process of this user was faster
            finally:
                os.close(descriptor)
                os.unlink(fresh)
            sync_directory(path.parent)
        found = os.stat(path, follow_symlinks=False)
        key = path.read_bytes()
    except OSError as error:
        raise StoreUnusable(f"the key cannot be used ({error.strerror or error})", path) from error
    if len(key) != KEY_BYTES or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StoreUnusable(f"the key should be {KEY_BYTES} bytes that only this user can read: remove it", path)
    return key


def sync_directory(path: Path) -> None:
    """Write a directory to the disk, so that a new name in it survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(path: Path) -> None:
    missing = []
    while not path.is_dir():
        missing.append(path)
        if path == path.parent:
            break
        path = path.parent
    for each in reversed(missing):
        try:
            os.mkdir(each, DIRECTORY_MODE)
        except FileExistsError:  # another process was faster, or a file is in the way: the caller checks
            continue
        os.chmod(each, DIRECTORY_MODE)
        sync_directory(each.parent)


def _user_home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME", "")
    if os.path.isabs(home):
        return Path(home)
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = ""
    if not os.path.isabs(home):
        raise StoreUnusable(f"this user has no home directory: set {HOME_VARIABLE}", home or "HOME")
    return Path(home)
