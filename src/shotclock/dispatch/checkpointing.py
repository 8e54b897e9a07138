"""Who listens to a call of a command: which step it is at, how far it is, and what it wants kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.arguments import NotSerializable, to_jsonable
from ..core.envelope import Warning_, warning
from ..core.errors import Failure
from ..process.clock import wall_time
from ..process.context import CallListener

if TYPE_CHECKING:
    from ..store.store import Store

# What one checkpoint may hold: it is read and written whole.
CHECKPOINT_LIMIT = 16_000_000


class Stepping(CallListener):
    """Knows the declared steps."""

    def __init__(self, steps: tuple[str, ...] = (), resume_from: str | None = None) -> None:
        self._steps = steps
        self._begun: list[str] = []
        self.skipped_steps = steps[: steps.index(resume_from)] if resume_from in steps else ()

    def step(self, name: str) -> None:
        if name not in self._begun:
            self._begun.append(name)

    def partial(self, data: object) -> dict[str, object]:
        """Say how far the steps of a command came that did not succeed, beside what it said itself."""
        completed = self._begun[:-1]
        skipped = list(self.skipped_steps)
        pending = [name for name in self._steps if name not in completed and name not in skipped]
        said: dict[str, Any] = dict(data) if isinstance(data, dict) else {} if data is None else {"result": data}
        said |= {"completed_steps": completed, "pending_steps": pending, "skipped_steps": skipped}
        if self._begun:
            said["failed_step"] = self._begun[-1]
        if pending:
            said["resume_from"] = self._begun[-1] if self._begun else pending[0]
        return said


class Checkpointing(Stepping):
    """Keeps checkpoints in the store, under the identity of the invocation."""

    def __init__(
        self,
        store: Callable[[], Store],
        key: Callable[[], str],
        steps: tuple[str, ...] = (),
        resume_from: str | None = None,
    ) -> None:
        """The key is made when it is needed: most calls keep nothing, and not every argument can be put into JSON."""
        super().__init__(steps, resume_from)
        self._store = store
        self._key_of = key
        self._fingerprint = ""
        self.kept = False
        self.warnings: list[Warning_] = []

    @property
    def _key(self) -> str:
        try:
            return self._key_of()
        except NotSerializable as error:
            raise Failure("CHECKPOINTS_UNAVAILABLE", f"the arguments of the call cannot be recorded: {error}") from None

    async def checkpoint(self, state: object) -> None:
        plain = to_jsonable(state)
        if len(json.dumps(plain)) > CHECKPOINT_LIMIT:
            raise Failure("CHECKPOINTS_UNAVAILABLE", f"a checkpoint holds at most {CHECKPOINT_LIMIT} characters")
        await asyncio.to_thread(self._save, plain)

    def clear(self) -> None:
        self._store().checkpoints.clear(self._key)

    def _save(self, state: object) -> None:
        self.kept = True
        self._store().checkpoints.save(self._key, self._fingerprint, state, wall_time())

    async def restore(self, fingerprint: str) -> object:
        kept = await asyncio.to_thread(lambda: self._store().checkpoints.load(self._key))
        self._fingerprint = fingerprint
        if kept is None:
            return None
        self.kept = True
        if kept.fingerprint != fingerprint:
            self.warnings.append(warning("CHECKPOINT_DISCARDED", kept_for=kept.fingerprint, now=fingerprint))
            await asyncio.to_thread(lambda: self._store().checkpoints.clear(self._key))
            return None
        return kept.state
