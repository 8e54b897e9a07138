"""The store: everything that must outlive a process, in eight rooms over one file."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from .audit import Audit
from .checkpoints import Checkpoints
from .database import Database
from .home import private_directory, state_home
from .jobs import Jobs
from .locks import Locks
from .proposals import Proposals
from .replies import Replies
from .runs import Runs
from .tokens import Tokens

FILE_NAME = "shotclock.db"


class Store:
    """Usable from several threads. Every method is one short transaction, and waits for a bounded time only.

    It never reads a clock or looks for a process: whoever calls says what time it is and who is alive.
    """

    def __init__(self, home: Path) -> None:
        """Use `Store.open`. The directory must be absolute."""
        self.home = home
        self._database = Database(home / FILE_NAME)
        self.jobs = Jobs(self._database)
        self.checkpoints = Checkpoints(self._database)
        self.locks = Locks(self._database)
        self.replies = Replies(self._database)
        self.runs = Runs(self._database)
        self.proposals = Proposals(self._database)
        self.tokens = Tokens(self._database)
        self.audit = Audit(self._database)

    @classmethod
    def open(cls, home: Path | None = None) -> Store:
        """StoreUnusable says what must be mended; StoreBusy is worth another try."""
        return cls(Path(os.path.abspath(home)) if home is not None else state_home(os.environ))

    @property
    def path(self) -> Path:
        return self._database.path

    def folder(self, name: str) -> Path:
        """A private directory beside the database, for files that belong to what is stored: logs, spooled input."""
        return private_directory(self.home / name)

    def close(self) -> None:
        """Closing twice does nothing. What was committed stays, whether or not anybody closes."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
