"""One connection to one SQLite file: opening, transactions, threads and forks.

Write-ahead logging, so that readers never wait for a writer. A durable transaction is on the disk when it returns;
one that is not (a heartbeat, a lock) survives `kill -9` of anybody, but may be lost with the power, together with
everybody whom it was about.

A connection must not cross a fork, and not only the copy is at fault: SQLite keeps one table of file locks per
process, the child inherits it without the locks, and even a *new* connection there would believe in them. Once the
parent ends, others clean up a log that the child still writes to, and what it commits is gone
(tests/store/test_forks.py). So every open database lets go before a fork and comes back, on both sides, when it is
next used.

Nobody else may open and close the file inside a process that has a connection: POSIX drops all its locks then.

docs/design.md: R34.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .home import (
    FILE_MODE,
    StoreBusy,
    StoreError,
    StoreUnusable,
    create_private_file,
    make_private_directory,
    sync_directory,
)
from .rows import encode
from .schema import APPLICATION_ID, STATEMENTS, VERSION

# How long SQLite waits for another process's transaction. Ours take milliseconds: a stopped process or a dying disk
# would run this out.
BUSY_TIMEOUT_MS = 5_000
# How long a thread waits for another thread's transaction, which may itself be waiting for another process.
THREAD_WAIT_S = 10.0
# Some of what happens while files are created and removed around us is answered "busy" without any waiting, so opening
# waits in small steps of its own: ten seconds at the most. Many first opens on a slow disk would run this out.
OPEN_ATTEMPTS = 100
OPEN_PAUSE_S = 0.05
OPEN_STEP_MS = 25
# What a fork may be kept waiting by a transaction of another thread. Run out: the child cannot use the store.
FORK_WAIT_S = 2.0
# What is kept of the write-ahead log's file after a burst.
LOG_KEPT_BYTES = 4 * 1024 * 1024
_HEADER_BYTES = 100
# Room of what was deleted is given back when it is asked for.
_INCREMENTAL = 2

_FORKED = "the store was in use in the moment this process was forked, and can only be opened after an exec"

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


def translate_error(error: sqlite3.Error, path: str | os.PathLike[str]) -> StoreError:
    """Return the error of ours that a SQLite error stands for. The one place where it is translated."""
    if is_busy(error):
        return StoreBusy("the store is in use by others", path)
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    meaning = _MEANING.get(code, "the store failed")
    return StoreUnusable(f"{meaning} ({name}: {error})", path)


# Taken after a database's own lock, never before.
_opening = threading.Lock()
_open: weakref.WeakSet[SQLiteDatabase] = weakref.WeakSet()
# Connections that came through a fork in use. Even closing one would be wrong, so they are kept until we end.
_inherited: list[tuple[tuple[int, int], sqlite3.Connection]] = []
_torn = False  # this process was forked while another thread was opening some store


class SQLiteTransaction:
    """A transaction on the connection: see rows.Transaction. SQLite takes `?` for values as it is."""

    __slots__ = ("_connection",)

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        return self._connection.execute(statement, [encode(value) for value in values])

    def executemany(self, statement: str, rows: Iterable[Sequence[object]]) -> sqlite3.Cursor:
        return self._connection.executemany(statement, ([encode(value) for value in row] for row in rows))

    def change_mark(self) -> object:
        # The number means something on one connection only, and a fork brings another one.
        return self._connection, self._connection.execute("PRAGMA data_version").fetchone()[0]


class SQLiteDatabase:
    """One connection to the file, shared by the threads of this process and dropped before a fork."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Whoever waits for the lock holds the queue lock, so a thread in a hurry cannot come back before it: Python's
        # locks are not fair, and a fork would wait for ever behind one that writes in a loop.
        self._queue = threading.Lock()
        self._lock = threading.Lock()
        self._user = 0  # the thread inside
        self._pid = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._file = (0, 0)
        self._synchronous = ""
        self._busy_ms = -1
        self._let_go_by = 0
        self._closed = False
        with self._hold_lock():
            self._connect()
        _open.add(self)

    @contextmanager
    def read(self) -> Iterator[SQLiteTransaction]:
        """Open a transaction for reading: what is seen inside belongs to one instant."""
        with self._transaction("BEGIN") as connection:
            yield SQLiteTransaction(connection)

    @contextmanager
    def write(self, *, durable: bool = True, may_wait: bool = True) -> Iterator[SQLiteTransaction]:
        """Open a transaction for reading and writing, alone among all processes. All of it happens, or nothing does.

        `may_wait=False` is for an event loop: StoreBusy at once where another thread or process is in the way.
        """
        with self._transaction("BEGIN IMMEDIATE", "FULL" if durable else "NORMAL", may_wait) as connection:
            yield SQLiteTransaction(connection)

    def open_another(self) -> SQLiteDatabase:
        """Open a connection of its own to the same file. The caller closes it."""
        return SQLiteDatabase(self.path)

    def shrink(self, pages: int | None = None) -> bool:
        """Give space of what was deleted back to the file system: so many pages at most, or all of it. Return whether
        that was possible: others may be in the middle of something."""
        with self._hold_lock():
            self._check_file()
            connection = self._connection or self._connect()
            try:
                connection.execute(f"PRAGMA busy_timeout={OPEN_STEP_MS if pages is not None else BUSY_TIMEOUT_MS}")
                self._busy_ms = -1
                # A script, because it steps once for each page, and `execute` would stop after the first.
                connection.executescript(f"PRAGMA incremental_vacuum({pages or 0})")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.Error:
                return False
            return True

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        with self._hold_lock():
            self._closed = True
            self._disconnect()
        _open.discard(self)

    # --- transactions -----------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, begin: str, synchronous: str = "", may_wait: bool = True) -> Iterator[sqlite3.Connection]:
        with self._hold_lock(THREAD_WAIT_S if may_wait else 0):
            self._check_file()
            if self._connection is None and not may_wait:
                raise StoreBusy("the store has to be opened again", self.path)
            connection = self._connection or self._connect()
            try:
                if (busy_ms := BUSY_TIMEOUT_MS if may_wait else 0) != self._busy_ms:
                    connection.execute(f"PRAGMA busy_timeout={busy_ms}")
                    self._busy_ms = busy_ms
                if synchronous and synchronous != self._synchronous:
                    connection.execute(f"PRAGMA synchronous={synchronous}")
                    self._synchronous = synchronous
                connection.execute(begin)
                try:
                    yield connection
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise translate_error(error, self.path) from error

    @contextmanager
    def _hold_lock(self, within_s: float = THREAD_WAIT_S) -> Iterator[None]:
        if self._closed:
            raise StoreUnusable("the store was closed", self.path)
        if self._pid != os.getpid():
            raise StoreUnusable(_FORKED, self.path)
        if self._user == threading.get_ident():  # a signal handler, or a callback such as is_alive
            raise StoreBusy("the store was asked from inside one of its own transactions", self.path)
        if not self._acquire(within_s):
            raise StoreBusy("another thread of this process is using the store", self.path)
        try:
            self._user = threading.get_ident()
            yield
        finally:
            self._user = 0
            self._lock.release()

    def _acquire(self, within_s: float) -> bool:
        """Take the lock. Waits twice that long at the worst: for the queue lock, and for the lock itself."""
        if not self._queue.acquire(timeout=within_s):
            return False
        try:
            return self._lock.acquire(timeout=within_s)
        finally:
            self._queue.release()

    def _check_file(self) -> None:
        """Raise StoreUnusable if the file was removed or replaced: whoever goes on with it shares its locks with
        nobody."""
        try:
            found = os.stat(self.path)
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._file:
            raise StoreUnusable("the store was removed or replaced while it was open", self.path)

    # --- opening ----------------------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreUnusable("the store was closed", self.path)
        if not _opening.acquire(timeout=THREAD_WAIT_S):
            raise StoreBusy("another thread of this process is opening a store", self.path)
        try:
            self._connection = self._open_connection()
            return self._connection
        finally:
            _opening.release()

    def _open_connection(self) -> sqlite3.Connection:
        make_private_directory(self.path.parent)
        try:
            self._file = _prepare_file(self.path)
        except OSError as error:
            raise StoreUnusable(f"the store cannot be created ({error.strerror})", self.path) from error
        if _torn or any(file == self._file for file, _ in _inherited):
            raise StoreUnusable(_FORKED, self.path)
        last: StoreError | None = None
        for attempt in range(OPEN_ATTEMPTS):
            if attempt:
                time.sleep(OPEN_PAUSE_S)
            connection: sqlite3.Connection | None = None
            try:
                connection = sqlite3.connect(
                    self.path, timeout=OPEN_STEP_MS / 1000, isolation_level=None, check_same_thread=False
                )
                self._synchronous = ""
                _set_up(connection, self.path)
                self._busy_ms = -1  # set by the first transaction
                return connection
            except sqlite3.Error as error:
                last = translate_error(error, self.path)
                last.__cause__ = error
                if connection is not None:
                    connection.close()
                if not is_busy(error):
                    raise last from error
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
        assert last is not None
        raise last

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- forks ------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        inside = self._user == threading.get_ident()  # the fork is made from inside a transaction
        if inside or self._pid != os.getpid() or not self._acquire(FORK_WAIT_S):
            return
        self._let_go_by = threading.get_ident()
        self._disconnect()

    def after_fork(self, *, in_child: bool) -> None:
        if in_child:
            self._queue = threading.Lock()  # somebody may have held it, who is not here
        if self._let_go_by == threading.get_ident():  # two threads may fork at once
            self._let_go_by = 0
            self._pid = os.getpid()
            self._lock.release()
        elif in_child and self._connection is not None:
            # The old pid stays, so that every use is refused.
            _inherited.append((self._file, self._connection))


def _prepare_file(path: Path) -> tuple[int, int]:
    """Make the file if it is not there, check that it is a regular one, ours, and private, and return its identity."""
    try:
        descriptor = create_private_file(path)
    except FileExistsError:
        pass
    else:
        os.close(descriptor)
        sync_directory(path.parent)
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # a pipe would be opened, and never answer
        raise StoreUnusable("the store is not a regular file", path)
    if found.st_uid != os.geteuid():
        raise StoreUnusable(f"the store belongs to user {found.st_uid}, not to {os.geteuid()}", path)
    # SQLite takes anything shorter than its header for a new database and writes over it. With a journal beside it,
    # it is one whose creation was interrupted, and SQLite knows what to do.
    if 0 < found.st_size < _HEADER_BYTES and not os.path.exists(f"{path}-journal"):
        raise StoreUnusable("this is not a Shotclock store, or a corrupt one; move it away to start a new one", path)
    if stat.S_IMODE(found.st_mode) != FILE_MODE:  # SQLite gives its -wal and -shm the same
        os.chmod(path, FILE_MODE)
    return found.st_dev, found.st_ino


def _set_up(connection: sqlite3.Connection, path: Path) -> None:
    version = check_version(connection, path)
    if 0 < version < VERSION:
        message = f"the store has an older format (version {version}, this Shotclock needs {VERSION})"
        raise StoreUnusable(f"{message}: run `shotclock prune --reset` to move it aside and start a new one", path)
    if version == 0:  # later it would take a copy of everything
        connection.execute(f"PRAGMA auto_vacuum={_INCREMENTAL}")
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise StoreUnusable(f"this file system cannot hold the store (journal mode {mode})", path)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA fullfsync=ON")  # macOS: there, plain fsync stops at the drive's own cache
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute(f"PRAGMA journal_size_limit={LOG_KEPT_BYTES}")
    if version == 0:
        _create_tables(connection)


def check_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the version of a store; 0 for a new file. Raises StoreUnusable for a newer store and for other files."""
    version = _number(connection, "user_version")
    if version > VERSION:
        raise StoreUnusable(
            f"the store was written by a newer Shotclock (version {version}, this one knows {VERSION})",
            path,
            suggestion="upgrade shotclock, or set SHOTCLOCK_HOME to another directory",
        )
    is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if _number(connection, "application_id") != APPLICATION_ID and not (is_empty and version == 0):
        raise StoreUnusable("this is a database of some other program", path)
    return version


@contextmanager
def open_alone(path: Path) -> Iterator[tuple[SQLiteTransaction, int]]:
    """Open a store of this or an older version, alone among all processes; yield a transaction and the version.

    Raises StoreBusy while another process has it open. Only for a process that has not opened it otherwise.
    """
    _prepare_file(path)
    connection = sqlite3.connect(path, timeout=OPEN_STEP_MS / 1000, isolation_level=None)
    try:
        version = check_version(connection, path)
        # Needs the file alone, also where the others are idle, and leaves no log beside it.
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("BEGIN EXCLUSIVE")
        yield SQLiteTransaction(connection), version
    except sqlite3.Error as error:
        if is_busy(error):
            raise StoreBusy("another process is using the store: stop servers, runs and jobs first", path) from error
        raise translate_error(error, path) from error
    finally:
        connection.close()


def _create_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _number(connection, "user_version") == 0:  # otherwise another process was faster
            for statement in STATEMENTS:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


_holds_opening = threading.local()


def _before_fork() -> None:
    for database in list(_open):
        database.before_fork()
    _holds_opening.now = _opening.acquire(timeout=FORK_WAIT_S)


def _after_fork_in_parent() -> None:
    if _holds_opening.now:
        _opening.release()
    for database in list(_open):
        database.after_fork(in_child=False)


def _after_fork_in_child() -> None:
    global _opening, _torn
    _torn = _torn or not _holds_opening.now
    _opening = threading.Lock()
    for database in list(_open):
        database.after_fork(in_child=True)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
