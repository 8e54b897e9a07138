"""Tables of the store, in one version. Their columns follow from the records that they hold.

Before 1.0 an older store is moved aside, not migrated; `user_version` holds the number of the version. Columns ending
in `_at` are wall-clock milliseconds.
"""

from __future__ import annotations

from ..core.proposal import Proposal, Summary
from ._database import VERSION, Schema
from ._rows import create_table
from .audit import Entry, Token
from .groups import GroupPlace
from .idempotency import Lock, Reply
from .jobs import Checkpoint, Job
from .runs import StepRecord, StoredRun
from .wrapped_calls import SUCCEEDED, LoggedCall, OpenCall

_NUMBER, _NUMBERED, _TEXT = "INTEGER NOT NULL", "INTEGER PRIMARY KEY AUTOINCREMENT", "TEXT NOT NULL"
_RUN = "TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE"

_STATEMENTS = (
    create_table(
        "jobs",
        [Job],
        {"seq": "INTEGER PRIMARY KEY"},
        "UNIQUE (id)",
        "CHECK ((state IN ('finished', 'lost')) = (ended_at IS NOT NULL))",
        "CHECK (state <> 'starting' OR runner IS NULL)",
        "CHECK (state <> 'running' OR runner IS NOT NULL)",
    ),
    # SQLite appends seq to each of these, so they also give the newest first without sorting.
    "CREATE INDEX jobs_by_key ON jobs (key)",
    "CREATE INDEX jobs_by_app ON jobs (app)",
    "CREATE INDEX jobs_active ON jobs (seq) WHERE ended_at IS NULL",
    "CREATE INDEX jobs_active_by_app ON jobs (app) WHERE ended_at IS NULL",
    "CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL",
    create_table("checkpoints", [Checkpoint], {}, "PRIMARY KEY (key)"),
    "CREATE INDEX checkpoints_saved ON checkpoints (saved_at)",
    create_table("locks", [Lock], {"seq": _NUMBERED}, "UNIQUE (token)"),
    "CREATE INDEX locks_by_name ON locks (name)",
    "CREATE INDEX locks_by_holder ON locks (holder)",
    create_table(
        "replies",
        [Reply],
        {"scope": _TEXT, "key": _TEXT},
        "PRIMARY KEY (scope, key)",
        "CHECK (state IN ('running', 'interrupted', 'finished'))",
        "CHECK ((state = 'finished') = (envelope IS NOT NULL))",
        "CHECK ((state = 'running') = (ended_at IS NULL))",
    ),
    "CREATE INDEX replies_began ON replies (began_at)",
    # `bytes` is the size of an ended run with its steps, so that the oldest can be deleted without reading any.
    create_table(
        "runs",
        [StoredRun],
        {"seq": "INTEGER PRIMARY KEY", "bytes": "INTEGER"},
        "UNIQUE (id)",
        "CHECK ((ended_at IS NULL) = (envelope IS NULL))",
    ),
    "CREATE INDEX runs_ended ON runs (ended_at, bytes) WHERE ended_at IS NOT NULL",
    "CREATE INDEX runs_open ON runs (id) WHERE ended_at IS NULL",
    create_table("group_places", [GroupPlace], {"seq": _NUMBERED}, "UNIQUE (run)"),
    "CREATE INDEX group_places_by_name ON group_places (group_name)",
    create_table("steps", [StepRecord], {"run": _RUN, "changed_at": _NUMBER}, "PRIMARY KEY (run, id)")
    + " WITHOUT ROWID",
    # The begun items of a `for_each`, while its step runs.
    f"CREATE TABLE items (run {_RUN}, step TEXT NOT NULL, number INTEGER NOT NULL, record TEXT NOT NULL, "
    "PRIMARY KEY (run, step, number)) WITHOUT ROWID",
    # A request can be megabytes and never changes: in a table of its own it is neither read for a list nor written
    # again with every change.
    "CREATE TABLE asks (id TEXT NOT NULL PRIMARY KEY, ask TEXT NOT NULL)",
    # `created_seq` is the order of creation; `seq` moves with every change.
    create_table(
        "proposals",
        [Summary, Proposal],
        {"created_seq": _NUMBER, "remind_at": "INTEGER", "ask": None},
        "PRIMARY KEY (id)",
        "UNIQUE (seq)",
        "CHECK ((status IN ('approved', 'modified', 'rejected')) = (decision IS NOT NULL))",
        "CHECK ((decision IS NULL) = (decided_by IS NULL))",
        "CHECK ((decision IS NULL) = (decided_at IS NULL))",
        "CHECK ((decision IS NULL) = (notes IS NULL))",
        "CHECK (used_at IS NULL OR status IN ('approved', 'modified'))",
    ),
    "CREATE INDEX proposals_by_key ON proposals (asked_by, key, created_seq) WHERE key IS NOT NULL",
    "CREATE INDEX proposals_by_action ON proposals (asked_by, action_hash, created_seq)",
    "CREATE INDEX proposals_by_status ON proposals (status, seq)",
    "CREATE INDEX proposals_due ON proposals (expires_at) WHERE status = 'pending'",
    "CREATE INDEX proposals_to_remind ON proposals (remind_at) WHERE remind_at IS NOT NULL",
    "CREATE INDEX proposals_open ON proposals (asked_by, expires_at) WHERE status = 'pending'",
    create_table("audit", [Entry], {"seq": _NUMBERED}),
    "CREATE INDEX audit_by_proposal ON audit (proposal) WHERE proposal IS NOT NULL",
    # The last entry in the audit file.
    "CREATE TABLE audit_filed (seq INTEGER NOT NULL)",
    "INSERT INTO audit_filed (seq) VALUES (0)",
    create_table("tokens", [Token], {}, "PRIMARY KEY (id)", "CHECK (role IN ('agent', 'operator'))"),
    "CREATE INDEX tokens_by_name ON tokens (name)",
    # Browser sessions that were ended before they expired. A session itself is signed and not stored.
    "CREATE TABLE ended_sessions (id TEXT NOT NULL PRIMARY KEY, expires_at INTEGER NOT NULL)",
    create_table("calls", [LoggedCall], {"seq": _NUMBERED}),
    "CREATE INDEX calls_started ON calls (started_at)",
    f"CREATE INDEX calls_failed ON calls (seq) WHERE outcome NOT IN {SUCCEEDED}",
    create_table("open_calls", [OpenCall], {}, "PRIMARY KEY (holder, number)") + " WITHOUT ROWID",
    # The time of the last pruning.
    "CREATE TABLE pruned (at INTEGER NOT NULL)",
    "INSERT INTO pruned (at) VALUES (0)",
)
SCHEMA = Schema(VERSION, _STATEMENTS)
