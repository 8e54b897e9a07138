"""Tables, as numbered migrations.

Migrations are append only: what has been released is never edited.

Each migration is one transaction; `user_version` says how many a file has had. What a column holds: store/rows.py.
"""

# "SHOT": tells our files from any other SQLite database that may lie in the way.
APPLICATION_ID = 0x53484F54

_FIRST = (
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
        spec TEXT NOT NULL,
        log_path TEXT,
        stdin_path TEXT,
        state TEXT NOT NULL CHECK (state IN ('starting', 'running', 'finished', 'lost')),
        attempt INTEGER NOT NULL,
        keeper TEXT,
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
        CHECK (state <> 'starting' OR keeper IS NULL),
        CHECK (state <> 'running' OR keeper IS NOT NULL)
    )
    """,
    # Each of these has seq as its last column by itself, so they also give the newest first without sorting.
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
)

_RUNS = (
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
        ended_at INTEGER,
        envelope TEXT,
        CHECK ((ended_at IS NULL) = (envelope IS NULL))
    )
    """,
    "CREATE INDEX runs_ended ON runs (ended_at) WHERE ended_at IS NOT NULL",
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
)

_INBOX = (
    # The long texts stand last: what stands before them is read without them.
    """
    CREATE TABLE proposals (
        id TEXT NOT NULL PRIMARY KEY,
        seq INTEGER NOT NULL UNIQUE,
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
        used_at INTEGER,
        decision TEXT,
        ask TEXT NOT NULL,
        CHECK ((status IN ('approved', 'modified', 'rejected')) = (decision IS NOT NULL)),
        CHECK ((decision IS NULL) = (decided_by IS NULL)),
        CHECK ((decision IS NULL) = (decided_at IS NULL)),
        CHECK (used_at IS NULL OR status IN ('approved', 'modified'))
    )
    """,
    "CREATE INDEX proposals_by_key ON proposals (asked_by, key) WHERE key IS NOT NULL",
    "CREATE INDEX proposals_by_action ON proposals (asked_by, action_hash)",
    "CREATE INDEX proposals_by_status ON proposals (status, seq)",
    "CREATE INDEX proposals_due ON proposals (expires_at) WHERE status = 'pending'",
    "CREATE INDEX proposals_to_remind ON proposals (remind_at) WHERE remind_at IS NOT NULL",
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
)

# What is asked for can be megabytes, and never changes: in a table of its own it is neither read for a list nor written
# again with every change.
_ASKS = (
    "CREATE TABLE asks (id TEXT NOT NULL PRIMARY KEY, ask TEXT NOT NULL)",
    "INSERT INTO asks (id, ask) SELECT id, ask FROM proposals",
    "ALTER TABLE proposals RENAME TO proposals_before",
    """
    CREATE TABLE proposals (
        id TEXT NOT NULL PRIMARY KEY,
        seq INTEGER NOT NULL UNIQUE,
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
        used_at INTEGER,
        about TEXT NOT NULL,
        notes TEXT,
        decision TEXT,
        CHECK ((status IN ('approved', 'modified', 'rejected')) = (decision IS NOT NULL)),
        CHECK ((decision IS NULL) = (decided_by IS NULL)),
        CHECK ((decision IS NULL) = (decided_at IS NULL)),
        CHECK ((decision IS NULL) = (notes IS NULL)),
        CHECK (used_at IS NULL OR status IN ('approved', 'modified'))
    )
    """,
    """
    INSERT INTO proposals (rowid, id, seq, status, asked_by, key, action_hash, created_at, expires_at, remind_at,
        reminded_at, decided_by, decided_at, used_at, about, notes, decision)
    SELECT rowid, id, seq, status, asked_by, key, action_hash, created_at, expires_at, remind_at, reminded_at,
        decided_by, decided_at, used_at,
        json_object('kind', json_extract(ask, '$.kind'), 'title', json_extract(ask, '$.title'),
            'operation', json_extract(ask, '$.operation'), 'path', json_extract(ask, '$.file.path'),
            'destructive', json_extract(ask, '$.policy.destructive'),
            'deciders', json_extract(ask, '$.policy.deciders')),
        substr(json_extract(decision, '$.notes'), 1, 200), decision
    FROM proposals_before
    """,
    "DROP TABLE proposals_before",
    "CREATE INDEX proposals_by_key ON proposals (asked_by, key) WHERE key IS NOT NULL",
    "CREATE INDEX proposals_by_action ON proposals (asked_by, action_hash)",
    "CREATE INDEX proposals_by_status ON proposals (status, seq)",
    "CREATE INDEX proposals_due ON proposals (expires_at) WHERE status = 'pending'",
    "CREATE INDEX proposals_to_remind ON proposals (remind_at) WHERE remind_at IS NOT NULL",
    "CREATE INDEX proposals_open ON proposals (asked_by, expires_at) WHERE status = 'pending'",
)

# A run that waits for a person and has no process is no run whose process died.
_PARKED = ("ALTER TABLE runs ADD COLUMN parked_at INTEGER",)

# Sessions of operators' browsers that were ended before their time. A session itself is signed, and nowhere kept.
_ENDED_SESSIONS = ("CREATE TABLE ended_sessions (id TEXT NOT NULL PRIMARY KEY, expires_at INTEGER NOT NULL)",)

# Through what a decision came, who runs what it allowed, and what became of that.
_OUTCOMES = (
    "ALTER TABLE proposals ADD COLUMN decided_via TEXT",
    "ALTER TABLE proposals ADD COLUMN runner TEXT",
    "ALTER TABLE proposals ADD COLUMN outcome TEXT",
)

# Whose it is. None: of the user whose store this is.
_OWNERS = ("ALTER TABLE jobs ADD COLUMN owner TEXT",)

# How much each ended run takes, so that the oldest can go without reading any; NULL is one whose outputs stand in its
# envelope a second time, from before they were left out there. And when it was last looked for what is too old.
_RETENTION = (
    "ALTER TABLE runs ADD COLUMN bytes INTEGER",
    "DROP INDEX runs_ended",
    "CREATE INDEX runs_ended ON runs (ended_at, bytes) WHERE ended_at IS NOT NULL",
    "CREATE INDEX runs_open ON runs (id) WHERE ended_at IS NULL",
    "CREATE TABLE pruned (at INTEGER NOT NULL)",
    "INSERT INTO pruned (at) VALUES (0)",
)

# In what order proposals were made, which `seq` does not tell: it moves with every change. Those that are there have
# fewer of them before than any new one has entries in the audit trail, so the numbers of both are in one order.
_CREATION_ORDER = (
    "ALTER TABLE proposals ADD COLUMN created_seq INTEGER NOT NULL DEFAULT 0",
    "UPDATE proposals SET created_seq = rowid",
    "DROP INDEX proposals_by_key",
    "DROP INDEX proposals_by_action",
    "CREATE INDEX proposals_by_key ON proposals (asked_by, key, created_seq) WHERE key IS NOT NULL",
    "CREATE INDEX proposals_by_action ON proposals (asked_by, action_hash, created_seq)",
)

# The items of a `for_each` that have begun, as long as their step runs. Number -1: an earlier version has begun the
# step, and recorded none.
_ITEMS = (
    """
    CREATE TABLE items (
        run TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
        step TEXT NOT NULL,
        number INTEGER NOT NULL,
        record TEXT NOT NULL,
        PRIMARY KEY (run, step, number)
    ) WITHOUT ROWID
    """,
    "INSERT INTO items (run, step, number, record) SELECT run, id, -1, '{}' FROM steps WHERE status = 'running'",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    _FIRST,
    _RUNS,
    _INBOX,
    _ASKS,
    _PARKED,
    _ENDED_SESSIONS,
    _OUTCOMES,
    _OWNERS,
    _RETENTION,
    _CREATION_ORDER,
    _ITEMS,
)
