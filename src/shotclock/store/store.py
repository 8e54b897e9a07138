"""The store: everything that must outlive a process, as tables over one file; and its retention.

Retention is how long ended runs, proposals and calls are kept, the deletion of older ones, and the reset of a whole
store. Runs that are under way or parked and open proposals are never deleted. The audit trail is kept whole: the
entries of a deleted proposal stay, with one more for the deletion.

Contract (AGENTS.md): ended work is deleted, unfinished work is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from ..core.envelope import refusal
from ..core.errors import Failure
from ..core.limits import DurationError, ProcessIdentity, WallTime, parse_duration_ms
from ..core.value_types import JsonObject, as_dict, replace, value
from ._database import Database, Transaction, decode_process, open_alone
from ._schema import SCHEMA
from .audit import Audit, Tokens
from .groups import GroupPlaces
from .home import FILE_NAME, StoreBusy, StoreUnusable, make_private_directory, state_home
from .idempotency import IdempotencyKeys, Locks
from .jobs import Checkpoints, Jobs
from .proposals import Proposals
from .runs import Runs, belongs_to
from .wrapped_calls import Calls

AUDIT_FILE_NAME = "audit.jsonl"
JOBS_FOLDER = "jobs"
LOGS_FOLDER = "logs"
ARTIFACTS_FOLDER = "artifacts"
RUNNERS_SINCE = 12  # the version in which jobs.keeper was renamed to jobs.runner

DAY_MS = 24 * 3_600_000
# Runs and proposals that one transaction deletes, so that other writers do not wait long.
AT_ONCE = 50
# Pruning in passing, once a day: so many of each kind are deleted, and so many pages are given back. If there is more,
# the next time comes sooner.
IN_PASSING = 200
PAGES_IN_PASSING = 2_000
PAUSE_MS = DAY_MS
PAUSE_WITH_MORE_MS = 3_600_000
LOG_NAME_LENGTH = 180  # leaves room in a file name for the number of the attempt, and a suffix
_SIZE = re.compile(r"(\d+)\s*([kMGT]?)B?", re.ASCII)
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Store(contextlib.AbstractContextManager["Store"]):
    """State of one user, for several threads. Every method is one short transaction, and waits for a bounded time.

    It never reads a clock or looks for a process: the caller passes the time and a function that tells who is alive.
    """

    def __init__(self, home: Path) -> None:
        """Open the store of this directory, which must be absolute. Use `Store.open`."""
        self.home = home
        database = Database(home / FILE_NAME, SCHEMA)
        self._database = database
        self.audit: Audit = Audit(database)
        self.calls: Calls = Calls(database)
        self.checkpoints: Checkpoints = Checkpoints(database)
        self.groups: GroupPlaces = GroupPlaces(database)
        self.idempotency: IdempotencyKeys = IdempotencyKeys(database)
        self.jobs: Jobs = Jobs(database)
        self.locks: Locks = Locks(database)
        self.proposals: Proposals = Proposals(database)
        self.runs: Runs = Runs(database)
        self.tokens: Tokens = Tokens(database)

    @classmethod
    def open(cls, home: Path | None = None) -> Store:
        """Open the store. Raises StoreUnusable, which says what to repair, and StoreBusy, which may be retried."""
        return cls(Path(os.path.abspath(home)) if home is not None else state_home(os.environ))

    @property
    def path(self) -> Path:
        return self._database.path

    def shrink(self, pages: int | None = None) -> bool:
        return self._database.shrink(pages)

    def begin_pruning(self, now: WallTime, pause_ms: int) -> bool:
        """Return whether the last pruning is that long ago; if so, the caller has to do it."""
        # A clock that was set back must not put it off for ever.
        due, values = "at < ? OR at > ?", (now.ms - pause_ms, now.ms)
        with self._database.read() as transaction:  # mostly it is not due, and a writer would wait for others
            if transaction.execute(f"SELECT 1 FROM pruned WHERE {due}", values).fetchone() is None:
                return False
        with self._database.write(durable=False) as transaction:
            return transaction.execute(f"UPDATE pruned SET at = ? WHERE {due}", (now, *values)).rowcount > 0

    def prune_again_in(self, now: WallTime, pause_ms: int, sooner_ms: int) -> None:
        """Record that there is more to delete: the next pruning is due after this time instead of the pause."""
        with self._database.write(durable=False) as transaction:
            transaction.execute("UPDATE pruned SET at = ?", (now.ms - pause_ms + sooner_ms,))

    def folder(self, name: str) -> Path:
        """Make a private directory beside the database, for files such as logs and spooled input."""
        return make_private_directory(self.home / name)

    def close(self) -> None:
        """Close the store. Closing twice does nothing."""
        self._database.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@value
class Retention:
    """Limits of stored runs, proposals and calls. 0 is no limit."""

    runs_ms: int = 30 * DAY_MS
    runs: int = 1_000
    runs_bytes: int = 10**9
    proposals_ms: int = 90 * DAY_MS
    calls_ms: int = 30 * DAY_MS
    calls: int = 100_000
    artifacts_bytes: int = 10 * 10**9
    run_logs_bytes: int = 64 * 10**6  # of one run, while it runs


@value
class Pruned:
    """Count of deleted runs, proposals and calls, or of those that would be."""

    runs: int = 0
    runs_bytes: int = 0
    proposals: int = 0
    report_pages: int = 0  # pages that `report --open` wrote into the store's directory
    calls: int = 0
    logs: int = 0  # folders with the output of the steps of deleted runs
    artifacts: int = 0
    """Folders with the artifacts of deleted runs, and of the oldest of those that have too many."""
    is_all: bool = True

    def as_data(self) -> JsonObject:
        return {name: value for name, value in as_dict(self).items() if name != "is_all"}


def read_retention(environment: Mapping[str, str]) -> Retention:
    """Read the limits from the environment. Raises Failure that names every invalid variable."""
    readers: dict[str, tuple[str, Callable[[str], int]]] = {
        "SHOTCLOCK_KEEP_RUNS_FOR": ("runs_ms", parse_duration_ms),
        "SHOTCLOCK_KEEP_RUNS": ("runs", parse_count),
        "SHOTCLOCK_KEEP_RUNS_SIZE": ("runs_bytes", parse_size),
        "SHOTCLOCK_KEEP_RUN_LOGS_SIZE": ("run_logs_bytes", parse_size),
        "SHOTCLOCK_KEEP_PROPOSALS_FOR": ("proposals_ms", parse_duration_ms),
        "SHOTCLOCK_KEEP_CALLS_FOR": ("calls_ms", parse_duration_ms),
        "SHOTCLOCK_KEEP_CALLS": ("calls", parse_count),
        "SHOTCLOCK_KEEP_ARTIFACTS_SIZE": ("artifacts_bytes", parse_size),
    }
    limits: dict[str, int] = {}
    errors = []
    for variable, (name, read) in readers.items():
        if text := environment.get(variable, "").strip():
            try:
                limits[name] = read(text)
            except (DurationError, ValueError) as error:
                errors.append({"field": variable, "message": str(error)})
    if errors:
        raise refusal(errors)
    return replace(Retention(), **limits)


def parse_size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or len(found[1]) > 15:
        raise ValueError(f"{text[:40]!r} is not a size: write 500000, 200kB, 20MB or 1GB, or 0 for no limit")
    return int(found[1]) * _UNITS[found[2]]


def parse_count(text: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{text[:40]!r} is not a whole number; 0 means no limit")
    return int(text)


def prune(
    store: Store,
    retention: Retention,
    now: WallTime,
    is_alive: Callable[[ProcessIdentity], bool],
    *,
    dry_run: bool = False,
    limit: int = -1,
) -> Pruned:
    """Delete runs, proposals and calls beyond the limits; of runs and of proposals at most `limit`.

    Raises Failure of the store.
    """
    before = _before(now, retention.runs_ms)
    runs = store.runs.list_outdated(before, retention.runs, retention.runs_bytes)
    if before is not None:
        runs += store.runs.list_left_behind(before, is_alive)
    open_runs = store.runs.list_open_ids()  # first: a run that begins now has no old proposals
    decided_before = _before(now, retention.proposals_ms)
    old = [] if decided_before is None else store.proposals.list_forgettable(decided_before)
    proposals = [id for id, key in old if key is None or not belongs_to(key, open_runs, "/.")]
    pages = _list_old_pages(store, before)
    old_calls = _before(now, retention.calls_ms), retention.calls
    if dry_run:
        calls = store.calls.count_outdated(*old_calls) + len(store.calls.list_outdated_lost(*old_calls, is_alive))
        gone = frozenset(run.seq for run in runs)
        logs = _list_without_run(store, LOGS_FOLDER, gone)
        artifacts = _list_old_artifacts(store, retention.artifacts_bytes, gone)
        size = sum(run.bytes for run in runs)
        return Pruned(len(runs), size, len(proposals), len(pages), calls, len(logs), len(artifacts))
    is_all = limit < 0 or max(len(runs), len(proposals)) <= limit
    if not is_all:
        runs, proposals = runs[:limit], proposals[:limit]
    deleted_runs = sum(store.runs.forget(runs[at : at + AT_ONCE]) for at in range(0, len(runs), AT_ONCE))
    deleted = sum(store.proposals.forget(proposals[at : at + AT_ONCE], now) for at in range(0, len(proposals), AT_ONCE))
    logs = _list_without_run(store, LOGS_FOLDER)
    artifacts = _list_old_artifacts(store, retention.artifacts_bytes)
    for folder in (*logs, *artifacts):
        shutil.rmtree(folder, ignore_errors=True)
    for page in pages:
        with contextlib.suppress(OSError):
            os.unlink(page)
    calls = store.calls.forget_outdated(*old_calls) + store.calls.forget_lost(*old_calls, is_alive)
    size = sum(run.bytes for run in runs)
    return Pruned(deleted_runs, size, deleted, len(pages), calls, len(logs), len(artifacts), is_all)


def prune_in_passing(
    store: Store, environment: Mapping[str, str], now: WallTime, is_alive: Callable[[ProcessIdentity], bool]
) -> None:
    """Prune a bounded part, once a day. A failure is left for `shotclock prune` to report."""
    try:
        if store.begin_pruning(now, PAUSE_MS):
            pruned = prune(store, read_retention(environment), now, is_alive, limit=IN_PASSING)
            store.shrink(PAGES_IN_PASSING)
            if not pruned.is_all:
                store.prune_again_in(now, PAUSE_MS, PAUSE_WITH_MORE_MS)
    except Failure:
        pass


def move_aside(home: Path, now: WallTime, is_alive: Callable[[ProcessIdentity], bool]) -> Path:
    """Move the store with its audit file and job logs to a directory of their own and return that directory.

    Raises StoreBusy while a process works with the store, StoreUnusable where there is none or it is a newer one.
    """
    path = home / FILE_NAME
    if not path.exists():
        raise StoreUnusable("there is no store to move aside", path)
    with open_alone(path, SCHEMA) as (transaction, version):
        if work := _list_work(transaction, version, is_alive):
            raise StoreBusy(f"the store cannot be moved aside while work runs ({', '.join(work)})", path)
        target = home / f"store-{version}-{now.iso().replace(':', '').replace('.', '')}"
        target.mkdir(mode=0o700)
        # The store last: while it is there, this can be repeated.
        for name in (AUDIT_FILE_NAME, JOBS_FOLDER, LOGS_FOLDER, ARTIFACTS_FOLDER, FILE_NAME):
            with contextlib.suppress(FileNotFoundError):
                os.rename(home / name, target / name)
    return target


def _list_work(transaction: Transaction, version: int, is_alive: Callable[[ProcessIdentity], bool]) -> list[str]:
    found = []
    for kind, table, column in (
        ("job", "jobs", "runner" if version >= RUNNERS_SINCE else "keeper"),
        ("run", "runs", "holder"),
    ):
        rows = transaction.execute(f"SELECT id, {column} FROM {table} WHERE ended_at IS NULL AND {column} IS NOT NULL")
        for id, holder in rows:
            process = decode_process(holder)
            if is_alive(process):
                found.append(f"{kind} {id}, pid {process.pid}")
    return found


def _before(now: WallTime, age_ms: int) -> WallTime | None:
    return WallTime(max(0, now.ms - age_ms)) if age_ms else None


def log_name(name: str) -> str:
    """Return the name of the folder or file for the logs of this run or step."""
    written = quote(name, safe=" []", errors="surrogatepass")
    if not written.strip("."):  # `.` and `..` are other folders
        written = written.replace(".", "%2E")
    if len(written) <= LOG_NAME_LENGTH:
        return written
    return f"{written[: LOG_NAME_LENGTH - 17]}~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def _list_without_run(store: Store, kind: str, gone: frozenset[int] = frozenset()) -> list[str]:
    """Return the folders of this kind without a run, or with one of those that will be gone."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(store.home / kind) as entries:
        found = {entry.name: entry.path for entry in entries}
    # The folders first: a run that begins now is in the store before it has one.
    kept = {log_name(id) for seq, id in store.runs.list_ids() if seq not in gone} if found else set()
    return [path for name, path in found.items() if name not in kept]


def _list_old_artifacts(store: Store, limit: int, gone: frozenset[int] = frozenset()) -> list[str]:
    """Return the folders of artifacts without a run, and those of the oldest ended runs that exceed the limit."""
    found = _list_without_run(store, ARTIFACTS_FOLDER, gone)
    if not limit:
        return found
    open_ids, total = store.runs.list_open_ids(), 0
    for _, run_id in sorted(store.runs.list_ids(), reverse=True):
        folder = str(store.home / ARTIFACTS_FOLDER / log_name(run_id))
        if folder in found or not os.path.isdir(folder):
            continue
        for parent, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(parent, name)).st_size
        if total > limit and run_id not in open_ids:
            found.append(folder)
    return found


def _list_old_pages(store: Store, before: WallTime | None) -> list[str]:
    """Return the old pages that `report --open` wrote into the store's directory."""
    found = []
    with contextlib.suppress(OSError), os.scandir(store.home / "reports") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found_stat = entry.stat(follow_symlinks=False)
                if before is not None and stat.S_ISREG(found_stat.st_mode) and found_stat.st_mtime * 1000 < before.ms:
                    found.append(entry.path)
    return found
