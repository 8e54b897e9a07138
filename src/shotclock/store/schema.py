"""Tables of the store, in one version, and the values of their columns.

Before 1.0 an older store is moved aside, not migrated; `user_version` holds the number of the version. A column holds
text, a whole number, bytes or nothing; columns ending in `_at` are wall-clock milliseconds. Text that cannot be encoded
(paths, labels) is written as bytes.
"""

from __future__ import annotations

import json

from ..core.clocks import ProcessIdentity, WallTime

# One value: 60 MB of text, the most that a step hands on, of which JSON escapes a byte with six at most; and the rest
# of its record. SQLite would accept a gigabyte, and hold the writer's lock meanwhile.
LONGEST_JSON = 400_000_000

Column = str | int | bytes | None

# "SHOT": distinguishes the store from the SQLite databases of other programs.
APPLICATION_ID = 0x53484F54
# To be raised with every change of the tables. 1 to 11 were never released.
VERSION = 12

STATEMENTS = (
    """
    CREATE TABLE jobs (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        key TEXT NOT NULL,
        app TEXT NOT NULL,
        command TEXT NOT NULL,
        arguments TEXT NOT NULL,
        cwd TEXT NOT NULL,
        program TEXT NOT NULL,
        tool_version TEXT NOT NULL,
        idempotency_key TEXT,
        owner TEXT,
        spec TEXT NOT NULL,
        log_path TEXT,
        stdin_path TEXT,
        state TEXT NOT NULL CHECK (state IN ('starting', 'running', 'finished', 'lost')),
        attempt INTEGER NOT NULL,
        runner TEXT,
        progress_done INTEGER,
        progress_total INTEGER,
        progress_unit TEXT,
        progress_at INTEGER,
        heartbeat_at INTEGER,
        created_at INTEGER NOT NULL,
        attempt_at INTEGER NOT NULL,
        deadline_at INTEGER,
        max_lifetime_ms INTEGER NOT NULL,
        idle_timeout_ms INTEGER NOT NULL,
        cancel_requested_at INTEGER,
        ended_at INTEGER,
        envelope TEXT,
        delivered_at INTEGER,
        CHECK ((state IN ('finished', 'lost')) = (ended_at IS NOT NULL)),
        CHECK (state <> 'starting' OR runner IS NULL),
        CHECK (state <> 'running' OR runner IS NOT NULL)
    )
    """,
    # SQLite appends seq to each of these, so they also give the newest first without sorting.
    "CREATE INDEX jobs_by_key ON jobs (key)",
    "CREATE INDEX jobs_by_app ON jobs (app)",
    "CREATE INDEX jobs_active ON jobs (seq) WHERE ended_at IS NULL",
    "CREATE INDEX jobs_active_by_app ON jobs (app) WHERE ended_at IS NULL",
    "CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL",
    """
    CREATE TABLE checkpoints (
        key TEXT NOT NULL PRIMARY KEY,
        fingerprint TEXT NOT NULL,
        state TEXT NOT NULL,
        saved_at INTEGER NOT NULL
    )
    """,
    "CREATE INDEX checkpoints_saved ON checkpoints (saved_at)",
    """
    CREATE TABLE locks (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        token TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        holder TEXT NOT NULL,
        label TEXT NOT NULL,
        acquired_at INTEGER NOT NULL,
        expires_at INTEGER
    )
    """,
    "CREATE INDEX locks_by_name ON locks (name)",
    "CREATE INDEX locks_by_holder ON locks (holder)",
    """
    CREATE TABLE replies (
        scope TEXT NOT NULL,
        key TEXT NOT NULL,
        digest TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('running', 'interrupted', 'finished')),
        holder TEXT NOT NULL,
        began_at INTEGER NOT NULL,
        ended_at INTEGER,
        envelope TEXT,
        PRIMARY KEY (scope, key),
        CHECK ((state = 'finished') = (envelope IS NOT NULL)),
        CHECK ((state = 'running') = (ended_at IS NULL))
    )
    """,
    "CREATE INDEX replies_began ON replies (began_at)",
    """
    CREATE TABLE runs (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        file TEXT NOT NULL,
        workflow TEXT NOT NULL,
        inputs TEXT NOT NULL,
        trace_id TEXT NOT NULL,
        holder TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        deadline_at INTEGER,
        parked_at INTEGER,
        ended_at INTEGER,
        -- The size of an ended run with its steps, so that the oldest can be deleted without reading any.
        bytes INTEGER,
        envelope TEXT,
        CHECK ((ended_at IS NULL) = (envelope IS NULL))
    )
    """,
    "CREATE INDEX runs_ended ON runs (ended_at, bytes) WHERE ended_at IS NOT NULL",
    "CREATE INDEX runs_open ON runs (id) WHERE ended_at IS NULL",
    """
    CREATE TABLE steps (
        run TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
        id TEXT NOT NULL,
        status TEXT NOT NULL,
        record TEXT NOT NULL,
        changed_at INTEGER NOT NULL,
        PRIMARY KEY (run, id)
    ) WITHOUT ROWID
    """,
    # The begun items of a `for_each`, while its step runs.
    """
    CREATE TABLE items (
        run TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
        step TEXT NOT NULL,
        number INTEGER NOT NULL,
        record TEXT NOT NULL,
        PRIMARY KEY (run, step, number)
    ) WITHOUT ROWID
    """,
    # A request can be megabytes and never changes: in a table of its own it is neither read for a list nor written
    # again with every change.
    "CREATE TABLE asks (id TEXT NOT NULL PRIMARY KEY, ask TEXT NOT NULL)",
    # `created_seq` is the order of creation; `seq` moves with every change.
    """
    CREATE TABLE proposals (
        id TEXT NOT NULL PRIMARY KEY,
        seq INTEGER NOT NULL UNIQUE,
        created_seq INTEGER NOT NULL,
        status TEXT NOT NULL
            CHECK (status IN ('pending', 'approved', 'modified', 'rejected', 'expired', 'withdrawn')),
        asked_by TEXT NOT NULL,
        key TEXT,
        action_hash TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL,
        remind_at INTEGER,
        reminded_at INTEGER,
        decided_by TEXT,
        decided_at INTEGER,
        decided_via TEXT,
        used_at INTEGER,
        runner TEXT,
        outcome TEXT,
        kind TEXT NOT NULL,
        title TEXT NOT NULL,
        operation TEXT,
        path TEXT,
        destructive INTEGER NOT NULL,
        deciders TEXT NOT NULL,
        dispatched INTEGER NOT NULL,
        notes TEXT,
        decision TEXT,
        CHECK ((status IN ('approved', 'modified', 'rejected')) = (decision IS NOT NULL)),
        CHECK ((decision IS NULL) = (decided_by IS NULL)),
        CHECK ((decision IS NULL) = (decided_at IS NULL)),
        CHECK ((decision IS NULL) = (notes IS NULL)),
        CHECK (used_at IS NULL OR status IN ('approved', 'modified'))
    )
    """,
    "CREATE INDEX proposals_by_key ON proposals (asked_by, key, created_seq) WHERE key IS NOT NULL",
    "CREATE INDEX proposals_by_action ON proposals (asked_by, action_hash, created_seq)",
    "CREATE INDEX proposals_by_status ON proposals (status, seq)",
    "CREATE INDEX proposals_due ON proposals (expires_at) WHERE status = 'pending'",
    "CREATE INDEX proposals_to_remind ON proposals (remind_at) WHERE remind_at IS NOT NULL",
    "CREATE INDEX proposals_open ON proposals (asked_by, expires_at) WHERE status = 'pending'",
    """
    CREATE TABLE audit (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at INTEGER NOT NULL,
        action TEXT NOT NULL,
        proposal TEXT,
        by TEXT NOT NULL,
        details TEXT NOT NULL,
        previous TEXT NOT NULL,
        hash TEXT NOT NULL
    )
    """,
    "CREATE INDEX audit_by_proposal ON audit (proposal) WHERE proposal IS NOT NULL",
    # The last entry in the audit file.
    "CREATE TABLE audit_filed (seq INTEGER NOT NULL)",
    "INSERT INTO audit_filed (seq) VALUES (0)",
    """
    CREATE TABLE tokens (
        id TEXT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        role TEXT NOT NULL CHECK (role IN ('agent', 'operator')),
        digest TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER,
        revoked_at INTEGER
    )
    """,
    "CREATE INDEX tokens_by_name ON tokens (name)",
    # Browser sessions that were ended before they expired. A session itself is signed and not stored.
    "CREATE TABLE ended_sessions (id TEXT NOT NULL PRIMARY KEY, expires_at INTEGER NOT NULL)",
    # The time of the last pruning.
    "CREATE TABLE pruned (at INTEGER NOT NULL)",
    "INSERT INTO pruned (at) VALUES (0)",
)


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
    """Return the text of an encoded column."""
    return column.decode("utf-8", "surrogatepass") if isinstance(column, bytes) else column


def decode_process(column: str) -> ProcessIdentity:
    """Return the process of an encoded column."""
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


def check_count(count: int, name: str) -> int:
    """Return the number. Raises TypeError or ValueError unless it is a whole one from 0 up that fits into a column."""
    if type(count) is not int:
        raise TypeError(f"{name} must be a whole number, not {count!r}")
    if not 0 <= count < 2**63:
        raise ValueError(f"{name} must be a whole number from 0 up, not {count}")
    return count
