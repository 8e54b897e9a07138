"""An invocation that may outlive its caller: its identity, and its checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..core.arguments import NotSerializable, to_jsonable
from ..core.catalogue import Catalogue, CommandSpec
from ..core.clocks import WallTime
from ..core.envelope import Warning_, warning
from ..core.errors import Failure
from ..core.proposal import digest
from ..core.value_types import value
from ..process.clock import wall_time
from ..runtime.preloaded_zygote import Program

if TYPE_CHECKING:
    from ..store.jobs import NewJob
    from ..store.store import Store

# The largest checkpoint: it is read and written whole.
CHECKPOINT_LIMIT = 16_000_000


@value
class Stdin:
    """Input from stdin, spooled to a file that the caller removes."""

    path: str
    digest: str


@value
class Invocation:
    catalogue: Catalogue
    spec: CommandSpec
    program: Program
    arguments: Mapping[str, object]
    timeout_ms: int
    """Of all the work; 0 is none."""
    idempotency_key: str | None = None
    resume_from: str | None = None
    stdin: Stdin | None = None
    owner: str | None = None
    """None: the user of the store."""
    proposal_id: str | None = None

    def key(self) -> str:
        return invocation_key(
            self.catalogue, self.spec.name, self.arguments, self.idempotency_key, self.stdin, self.owner
        )

    def as_new_job(self, log_path: str, job_id: str, now: WallTime) -> NewJob:
        interruption = self.spec.interruption
        assert interruption is not None
        from ..store.jobs import NewJob  # imports sqlite3, which few commands need

        return NewJob(
            id=job_id,
            key=self.key(),
            app=self.catalogue.name,
            command=self.spec.name,
            arguments=dict(self.arguments),
            cwd=_directory(),
            program=self.program._asdict(),
            tool_version=self.catalogue.version,
            spec={
                "catalogue": self.catalogue.to_plain(),
                "timeout_ms": self.timeout_ms,
                "resume_from": self.resume_from,
                "proposal_id": self.proposal_id,
            },
            max_lifetime_ms=interruption.max_lifetime_ms,
            idle_timeout_ms=interruption.idle_timeout_ms,
            idempotency_key=self.idempotency_key,
            log_path=log_path,
            stdin_path=None if self.stdin is None else f"{log_path.removesuffix('.log')}.stdin",
            deadline_at=now + self.timeout_ms if self.timeout_ms else None,
            resume=interruption.resume,
            owner=self.owner,
        )


def invocation_key(
    catalogue: Catalogue,
    command: str,
    arguments: Mapping[str, object],
    idempotency_key: str | None = None,
    stdin: Stdin | None = None,
    owner: str | None = None,
) -> str:
    """Return a digest of all that identifies the work: equal for the same work."""
    spec = catalogue.find(command)
    properties = {} if spec is None else spec.input_schema.get("properties", {})
    defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    work: list[Any] = [
        catalogue.name,
        catalogue.version,
        command,
        to_jsonable({**defaults, **arguments}),  # the same value may come from the library or the command line
        _directory(),
        idempotency_key,
        None if stdin is None else stdin.digest,
        *([] if owner is None else [owner]),
    ]
    return digest(work)


class InvocationCheckpoint:
    def __init__(self, store: Callable[[], Store], key: Callable[[], str]) -> None:
        """`store` and `key` are called in a thread when needed: the store may block, and not all arguments are JSON."""
        self._store = store
        self._make_key = key
        self._fingerprint = ""
        self.is_kept = False
        self.warnings: list[Warning_] = []

    @property
    def _key(self) -> str:
        try:
            return self._make_key()
        except NotSerializable as error:
            raise Failure("CHECKPOINTS_UNAVAILABLE", f"the arguments of the call cannot be recorded: {error}") from None

    async def save(self, state: object) -> None:
        """Store the state durably. Raises Failure if it cannot be stored."""
        plain = to_jsonable(state)
        if len(json.dumps(plain)) > CHECKPOINT_LIMIT:
            raise Failure("CHECKPOINTS_UNAVAILABLE", f"a checkpoint holds at most {CHECKPOINT_LIMIT} characters")
        self.is_kept = True
        await asyncio.to_thread(
            lambda: self._store().checkpoints.save(self._key, self._fingerprint, plain, wall_time())
        )

    async def restore(self, fingerprint: str) -> object:
        """Return the last state. Return None, and delete it, if it was for another input."""
        kept = await asyncio.to_thread(lambda: self._store().checkpoints.load(self._key))
        self._fingerprint = fingerprint
        if kept is None:
            return None
        self.is_kept = True
        if kept.fingerprint != fingerprint:
            self.warnings.append(warning("CHECKPOINT_DISCARDED", kept_for=kept.fingerprint, now=fingerprint))
            await asyncio.to_thread(self.clear)
            return None
        return kept.state

    def clear(self) -> None:
        self._store().checkpoints.clear(self._key)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""
