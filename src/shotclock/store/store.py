"""The store: everything that must outlive a process, as tables over one file."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from ..core.clocks import WallTime
from .audit import Audit
from .database import Database
from .home import make_private_directory, state_home
from .idempotency import IdempotencyKeys
from .jobs import Checkpoints, Jobs
from .locks import Locks
from .proposals import Proposals
from .runs import Runs
from .tokens import Tokens

FILE_NAME = "shotclock.db"
AUDIT_FILE_NAME = "audit.jsonl"
JOBS_FOLDER = "jobs"


class Store:
    """State of one user, for several threads. Every method is one short transaction, and waits for a bounded time.

    It never reads a clock or looks for a process: the caller passes the time and a function that tells who is alive.
    """

    def __init__(self, home: Path) -> None:
        """Open the store of this directory, which must be absolute. Use `Store.open`."""
        self.home = home
        database = Database(home / FILE_NAME)
        self._database = database
        self.audit = Audit(database)
        self.checkpoints = Checkpoints(database)
        self.idempotency = IdempotencyKeys(database)
        self.jobs = Jobs(database)
        self.locks = Locks(database)
        self.proposals = Proposals(database)
        self.runs = Runs(database)
        self.tokens = Tokens(database)

    @classmethod
    def open(cls, home: Path | None = None) -> Store:
        """Open the store. Raises StoreUnusable, which says what to repair, and StoreBusy, which may be retried."""
        return cls(Path(os.path.abspath(home)) if home is not None else state_home(os.environ))

    @property
    def path(self) -> Path:
        return self._database.path

    def shrink(self, pages: int | None = None) -> bool:
        """Give unused space back: see Database.shrink."""
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

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
