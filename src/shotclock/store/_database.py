"""One connection to one SQLite file: opening, transactions, threads and forks; and the values of columns.

Write-ahead logging, so that readers never wait for a writer. A durable transaction is on the disk when it returns;
others (a heartbeat, a lock) survive `kill -9`, but may be lost with the power, as their processes are.

A connection must not cross a fork, and a new one in the child is no better: SQLite keeps one table of file locks per
process, and the child inherits the table without the locks. Once the parent ends, others clean up a log that the child
still writes to, and its commits are lost (tests/store/test_forks.py). So every open database disconnects before a fork
and connects again, on both sides, when it is next used.

No other code may open and close the file in a process that has a connection: POSIX drops all locks of the process then.

Contracts (AGENTS.md): one short transaction; no connection crosses a fork.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..core.limits import ProcessIdentity, WallTime
from ..core.value_types import value
from .home import (
    ATTEMPT_MS,
    FILE_MODE,
    StoreBusy,
    StoreError,
    StoreUnusable,
    create_private_file,
    make_private_directory,
    sync_directory,
)

# A writer waits this long for another process's transaction. Ours take milliseconds: hundreds of writers at once, a
# stopped process or a dying disk exhaust this. It is shorter than the limit of a command that answers at once.
BUSY_TIMEOUT_MS = 20_000
# A reader waits this long: only for the repair of the log of a process that was killed.
READ_TIMEOUT_MS = 5_000
# A thread waits this long for another thread's transaction, which may itself be waiting for another process.
THREAD_WAIT_S = 10.0
# While files are created and removed, SQLite sometimes answers "busy" without waiting, so opening waits in small steps
# of its own: ten seconds at the most. Many first opens on a slow disk exhaust this.
OPEN_ATTEMPTS = 100
OPEN_PAUSE_S = 0.05
OPEN_STEP_MS = 25
# A fork waits this long for a transaction of another thread. After that the child cannot use the store.
FORK_WAIT_S = 2.0
# The size of the write-ahead log's file after a burst.
LOG_KEPT_BYTES = 4 * 1024 * 1024
_HEADER_BYTES = 100
# auto_vacuum: unused pages are given back on request.
_INCREMENTAL = 2

# "SHOT": distinguishes the store from the SQLite databases of other programs.
APPLICATION_ID = 0x53484F54
# One value: 60 MB of text, the most that a step hands on, of which JSON escapes a byte with six at most; and the rest
# of its record. SQLite would accept a gigabyte, and hold the writer's lock meanwhile.
LONGEST_JSON = 400_000_000

# A time that is this much before one in the store shows that the clock was set back. A writer reads the clock before it
# waits for others, so a smaller difference shows nothing.
CLOCK_SLACK_MS = 60_000

Column = str | int | bytes | None
P = ParamSpec("P")
T = TypeVar("T")

_FORKED = "the store was in use when this process was forked, and can only be opened after an exec"

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


def translate_error(error: sqlite3.Error, path: str | os.PathLike[str]) -> StoreError:
    # Extended codes (SQLITE_BUSY_RECOVERY, …) have the plain one in their lowest byte.
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    if code in _BUSY:
        return StoreBusy("the store is in use by others", path)
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    meaning = _MEANING.get(code, "the store failed")
    return StoreUnusable(f"{meaning} ({name}: {error})", path)


# Taken after a database's own lock, never before.
_opening = threading.Lock()
_open: weakref.WeakSet[Database] = weakref.WeakSet()
# Connections that were in use during a fork. Even closing one would drop locks, so they are kept until the end.
_inherited: list[tuple[tuple[int, int], sqlite3.Connection]] = []
_torn = False  # this process was forked while another thread was opening some store


# Of the tables in schema.py, to be raised with every change of them. 1 to 11 were never released.
VERSION = 16


@value
class Schema:
    """Statements that create the tables, and the number of their version."""

    version: int
    statements: tuple[str, ...]


class Transaction:
    """One transaction. It encodes times, processes, text and numbers."""

    __slots__ = ("_connection",)

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        return self._connection.execute(statement, [encode(value) for value in values])

    def executemany(self, statement: str, rows: Iterable[Sequence[object]]) -> sqlite3.Cursor:
        return self._connection.executemany(statement, ([encode(value) for value in row] for row in rows))

    def change_mark(self) -> object:
        """Return a mark that is equal to an earlier one as long as no other connection has changed anything since."""
        # The number is valid on one connection only, and after a fork there is another one.
        return self._connection, self._connection.execute("PRAGMA data_version").fetchone()[0]


class Database:
    """One connection to the file, shared by the threads of this process and dropped before a fork."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path = path
        self._schema = schema
        # A thread that waits for the lock holds the queue lock, so that the last holder cannot overtake it: Python's
        # locks are not fair, and a fork would wait for ever behind a thread that writes in a loop.
        self._queue = threading.Lock()
        self._lock = threading.Lock()
        self._user = 0  # the thread inside
        self._pid = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._file = (0, 0)
        self._let_go_by = 0
        self._closed = False
        with self._hold_lock():
            self._connect()
        _open.add(self)

    def read(self) -> AbstractContextManager[Transaction]:
        """Open a transaction for reading. It sees the state of one instant."""
        return self._transaction("BEGIN")

    def write(self, *, durable: bool = True, wait_ms: int | None = None) -> AbstractContextManager[Transaction]:
        """Open a transaction for reading and writing that excludes other writers.

        `wait_ms` is another limit than the usual one; 0 is for an event loop, and raises StoreBusy instead of waiting.
        """
        limit_ms = BUSY_TIMEOUT_MS if wait_ms is None else wait_ms
        return self._transaction("BEGIN IMMEDIATE", "FULL" if durable else "NORMAL", limit_ms)

    def open_another(self) -> Database:
        """Open a connection of its own to the same file, for a thread that must not wait for others. The caller closes
        it."""
        return Database(self.path, self._schema)

    def shrink(self, pages: int | None = None) -> bool:
        """Give unused space back to the file system, so many pages or all. Return whether others allowed it."""
        with self._hold_lock():
            self._check_file()
            connection = self._connection or self._connect()
            try:
                connection.execute(f"PRAGMA busy_timeout={OPEN_STEP_MS if pages is not None else READ_TIMEOUT_MS}")
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
    def _transaction(self, begin: str, synchronous: str = "FULL", wait_ms: int | None = None) -> Iterator[Transaction]:
        timeout_ms = READ_TIMEOUT_MS if wait_ms is None else min(wait_ms, ATTEMPT_MS)
        more = 0 if wait_ms is None else -(-wait_ms // ATTEMPT_MS) - 1  # further attempts
        has_begun = False
        while not has_begun:
            with self._hold_lock(THREAD_WAIT_S if wait_ms is None else min(THREAD_WAIT_S, wait_ms / 1000)):
                self._check_file()
                if self._connection is None and wait_ms == 0:
                    raise StoreBusy("the store has to be opened again", self.path)
                connection = self._connection or self._connect()
                try:
                    connection.execute(f"PRAGMA busy_timeout={timeout_ms}")
                    connection.execute(f"PRAGMA synchronous={synchronous}")
                    connection.execute(begin)
                    has_begun = True
                    with connection:  # commits, or rolls back
                        yield Transaction(connection)
                except sqlite3.Error as error:
                    translated, more = translate_error(error, self.path), more - 1
                    if has_begun or more < 0 or not isinstance(translated, StoreBusy):
                        raise translated from error

    @contextmanager
    def _hold_lock(self, within_s: float = THREAD_WAIT_S) -> Iterator[None]:
        if self._closed:
            raise StoreUnusable("the store was closed", self.path)
        if self._pid != os.getpid():
            raise StoreUnusable(_FORKED, self.path)
        if self._user == threading.get_ident():  # a signal handler, or a callback such as is_alive
            raise StoreBusy("the store was used inside one of its own transactions", self.path)
        if not self._acquire(within_s):
            raise StoreBusy("another thread of this process is using the store", self.path)
        try:
            self._user = threading.get_ident()
            yield
        finally:
            self._user = 0
            self._lock.release()

    def _acquire(self, within_s: float) -> bool:
        """Take the lock. May wait twice that long: for the queue lock, and for the lock itself."""
        if not self._queue.acquire(timeout=within_s):
            return False
        try:
            return self._lock.acquire(timeout=within_s)
        finally:
            self._queue.release()

    def _check_file(self) -> None:
        """Raise StoreUnusable if the file was removed or replaced: its locks would exclude no other process."""
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
            make_private_directory(self.path.parent)
            try:
                self._file = _prepare_file(self.path)
            except OSError as error:
                raise StoreUnusable(f"the store cannot be created ({error.strerror})", self.path) from error
            if _torn or any(file == self._file for file, _ in _inherited):
                raise StoreUnusable(_FORKED, self.path)
            self._connection = self._open_patiently()
            return self._connection
        finally:
            _opening.release()

    def _open_patiently(self) -> sqlite3.Connection:
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            connection = sqlite3.connect(
                self.path, timeout=OPEN_STEP_MS / 1000, isolation_level=None, check_same_thread=False
            )
            try:
                _set_up(connection, self.path, self._schema)
                return connection
            except BaseException as error:
                connection.close()
                if not isinstance(error, sqlite3.Error):
                    raise
                translated = translate_error(error, self.path)
                if attempt == OPEN_ATTEMPTS or not isinstance(translated, StoreBusy):
                    raise translated from error
            time.sleep(OPEN_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

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
            self._queue = threading.Lock()  # a thread that does not exist in the child may have held it
        if self._let_go_by == threading.get_ident():  # two threads may fork at once
            self._let_go_by = 0
            self._pid = os.getpid()
            self._lock.release()
        elif in_child and self._connection is not None:
            # The old pid stays, so that every use is refused.
            _inherited.append((self._file, self._connection))


class Table:
    """Table of a database, with methods that are one short transaction each."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def _read(self, look: Callable[Concatenate[Transaction, P], T], *values: P.args, **named: P.kwargs) -> T:
        """Return the result of a function of one reading transaction."""
        with self._database.read() as transaction:
            return look(transaction, *values, **named)

    def _select(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        with self._database.read() as transaction:
            return transaction.execute(query, values).fetchall()

    def _execute(
        self, statement: str, values: Sequence[object], *, durable: bool = True, wait_ms: int | None = None
    ) -> int:
        """Execute one statement in a transaction of its own. Return the number of changed rows."""
        with self._database.write(durable=durable, wait_ms=wait_ms) as transaction:
            return transaction.execute(statement, values).rowcount


def _prepare_file(path: Path) -> tuple[int, int]:
    """Make the file if it is missing, check that it is a regular one, ours and private, and return its identity."""
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
    # SQLite writes over a file that is shorter than its header. With a journal beside it, the creation was interrupted,
    # and SQLite can recover it.
    if 0 < found.st_size < _HEADER_BYTES and not os.path.exists(f"{path}-journal"):
        raise StoreUnusable("this is not a Shotclock store, or a corrupt one; move it away to start a new one", path)
    if stat.S_IMODE(found.st_mode) != FILE_MODE:  # SQLite gives its -wal and -shm files the same
        os.chmod(path, FILE_MODE)
    return found.st_dev, found.st_ino


def _set_up(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    version = _check_version(connection, path, schema)
    if 0 < version < schema.version:
        message = f"the store has an older format (version {version}, this Shotclock needs {schema.version})"
        raise StoreUnusable(f"{message}: run `shotclock prune --reset` to move it aside and start a new one", path)
    if version == 0 and not schema.statements:
        raise StoreUnusable("it has no tables yet", path)
    if version == 0:  # later this would need a copy of the whole file
        connection.execute(f"PRAGMA auto_vacuum={_INCREMENTAL}")
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise StoreUnusable(f"this file system cannot hold the store (journal mode {mode})", path)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA fullfsync=ON")  # macOS: there, plain fsync stops at the drive's own cache
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute(f"PRAGMA journal_size_limit={LOG_KEPT_BYTES}")
    if version > 0:
        return
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        if _number(connection, "user_version") == 0:  # otherwise another process was faster
            for statement in schema.statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={schema.version}")


def _check_version(connection: sqlite3.Connection, path: Path, schema: Schema) -> int:
    """Return the version of a store; 0 for a new file. Raises StoreUnusable for a newer store and for other files."""
    version = _number(connection, "user_version")
    if version > schema.version:
        raise StoreUnusable(
            f"the store was written by a newer Shotclock (version {version}, this one knows {schema.version})",
            path,
            suggestion="upgrade shotclock, or set SHOTCLOCK_HOME to another directory",
        )
    is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if _number(connection, "application_id") != APPLICATION_ID and not (is_empty and version == 0):
        raise StoreUnusable("this is a database of some other program", path)
    return version


@contextmanager
def open_alone(path: Path, schema: Schema) -> Iterator[tuple[Transaction, int]]:
    """Open a store of this or an older version, alone among all processes; yield a transaction and the version.

    Raises StoreBusy while another process has it open. Only for a process that has not opened it otherwise.
    """
    _prepare_file(path)
    connection = sqlite3.connect(path, timeout=OPEN_STEP_MS / 1000, isolation_level=None)
    try:
        version = _check_version(connection, path, schema)
        # Fails while another process has the file open, even if idle, and leaves no log beside it.
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("BEGIN EXCLUSIVE")
        yield Transaction(connection), version
    except sqlite3.Error as error:
        translated = translate_error(error, path)
        if isinstance(translated, StoreBusy):
            raise StoreBusy("another process is using the store: stop servers, runs and jobs first", path) from error
        raise translated from error
    finally:
        connection.close()


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


class _HoldsOpening(threading.local):
    now = False  # also in a fork that began before this module was imported


_holds_opening = _HoldsOpening()


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


# --- values of columns --------------------------------------------------------------------------------------------


def encode(value: object) -> Column:
    """Return a value as a column holds it. Raises TypeError for other types than text, numbers, times and processes."""
    if isinstance(value, str):
        text = str(value)  # of an enum, its value
        try:
            _ = text.isascii() or text.encode()
        except UnicodeEncodeError:  # undecodable bytes (surrogates), which SQLite would refuse
            return text.encode("utf-8", "surrogatepass")
        return text
    if value is None or isinstance(value, int | bytes):
        return value
    if isinstance(value, WallTime):
        return value.ms
    if isinstance(value, ProcessIdentity):  # one canonical text, so that equal processes are equal columns
        return json_text([value.host, value.boot_id, value.pid, value.started, value.namespace])
    raise TypeError(f"a column cannot hold {type(value).__name__}")


def decode_text(column: str | bytes) -> str:
    return column.decode("utf-8", "surrogatepass") if isinstance(column, bytes) else column


def decode_process(column: str) -> ProcessIdentity:
    return ProcessIdentity(*json.loads(column))


def json_text(value: object) -> str:
    """Return JSON text. Raises ValueError or TypeError for other values, and for those too deep or too long."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("nested too deep to be stored") from None
    if len(text) > LONGEST_JSON:
        raise ValueError(f"{len(text)} characters of JSON are too many to be stored: {LONGEST_JSON} at most")
    return text


def parts_of_json(column: str, *paths: str) -> str:
    """Return the SQL of a JSON array with these parts of a JSON column, so that the rest of a large one stays there."""
    return f"json_extract({column}, " + ", ".join(f"'$.{path}'" for path in paths) + ")"


def check_count(count: int, name: str) -> int:
    """Return the number. Raises TypeError or ValueError unless it is a whole one from 0 up that fits into a column."""
    if type(count) is not int:
        raise TypeError(f"{name} must be a whole number, not {count!r}")
    if not 0 <= count < 2**63:
        raise ValueError(f"{name} must be a whole number from 0 up, not {count}")
    return count
