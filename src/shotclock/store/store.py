"""The store: everything that must outlive a process, as tables over one file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .database import SQLiteDatabase
from .home import make_private_directory, state_home

if TYPE_CHECKING:
    from ..core.clocks import WallTime
    from .audit import Audit
    from .idempotency import IdempotencyKeys
    from .jobs import Checkpoints, Jobs
    from .locks import Locks
    from .proposals import Proposals
    from .rows import Database
    from .runs import Runs
    from .tokens import Tokens

FILE_NAME = "shotclock.db"
AUDIT_FILE_NAME = "audit.jsonl"
JOBS_FOLDER = "jobs"

Table = TypeVar("Table")


class Store:
    """One user's state. Usable from several threads. Every method is one short transaction, and waits for a bounded
    time only.

    It never reads a clock or looks for a process: whoever calls says what time it is and who is alive.
    """

    def __init__(self, home: Path) -> None:
        """Open the store of this directory, which must be absolute. Use `Store.open`."""
        self.home = home
        self._database: Database = SQLiteDatabase(home / FILE_NAME)
        self._tables: dict[Any, Any] = {}

    @classmethod
    def open(cls, home: Path | None = None) -> Store:
        """Open the store. Raises StoreUnusable, which says what must be mended, and StoreBusy, which is worth another
        try."""
        return cls(Path(os.path.abspath(home)) if home is not None else state_home(os.environ))

    @property
    def path(self) -> Path:
        return self._database.path

    def shrink(self, pages: int | None = None) -> bool:
        """Give space of what was deleted back: see Database.shrink."""
        return self._database.shrink(pages)

    def begin_pruning(self, now: WallTime, pause_ms: int) -> bool:
        """Return whether nobody has looked for what is too old for so long; if so, it is the caller's to do."""
        # A clock that was set back must not put it off for ever.
        due, values = "at < ? OR at > ?", (now.ms - pause_ms, now.ms)
        with self._database.read() as transaction:  # mostly it is not, and a writer would wait for others
            if transaction.execute(f"SELECT 1 FROM pruned WHERE {due}", values).fetchone() is None:
                return False
        with self._database.write(durable=False) as transaction:
            return transaction.execute(f"UPDATE pruned SET at = ? WHERE {due}", (now, *values)).rowcount > 0

    def prune_again_in(self, now: WallTime, pause_ms: int, sooner_ms: int) -> None:
        """Record that there is more to be deleted: not after the whole pause, but this much."""
        with self._database.write(durable=False) as transaction:
            transaction.execute("UPDATE pruned SET at = ?", (now.ms - pause_ms + sooner_ms,))

    def folder(self, name: str) -> Path:
        """Make a private directory beside the database, for files that belong to what is stored: logs, spooled
        input."""
        return make_private_directory(self.home / name)

    def close(self) -> None:
        """Close the store. Closing twice does nothing. What was committed stays, whether or not anybody closes."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- tables: each is imported when it is first used, because most commands need one of them ---------------

    @property
    def audit(self) -> Audit:
        from .audit import Audit

        return self._table(Audit)

    @property
    def checkpoints(self) -> Checkpoints:
        from .jobs import Checkpoints

        return self._table(Checkpoints)

    @property
    def idempotency(self) -> IdempotencyKeys:
        from .idempotency import IdempotencyKeys

        return self._table(IdempotencyKeys)

    @property
    def jobs(self) -> Jobs:
        from .jobs import Jobs

        return self._table(Jobs)

    @property
    def locks(self) -> Locks:
        from .locks import Locks

        return self._table(Locks)

    @property
    def proposals(self) -> Proposals:
        from .proposals import Proposals

        return self._table(Proposals)

    @property
    def runs(self) -> Runs:
        from .runs import Runs

        return self._table(Runs)

    @property
    def tokens(self) -> Tokens:
        from .tokens import Tokens

        return self._table(Tokens)

    def _table(self, kind: Callable[[Database], Table]) -> Table:
        """Return the one table of this kind, made when it is first asked for."""
        table: Table | None = self._tables.get(kind)
        if table is None:
            # Two threads may make one each: a table holds nothing but the database.
            table = self._tables[kind] = kind(self._database)
        return table
