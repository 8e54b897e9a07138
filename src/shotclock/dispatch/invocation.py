"""One invocation of a command that may outlive its caller, and its identity: equal ones are the same work."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from ..core.arguments import to_jsonable
from ..core.catalogue import Catalogue, CommandSpec
from ..core.exact_values import identity
from ..core.records import dataclass
from ..core.walltime import WallTime
from ..runtime.preloaded_zygote import Program
from ..store.jobs import NewJob


@dataclass(frozen=True, slots=True)
class Stdin:
    """What came in on the caller's stdin, spooled to a file that is the caller's to remove."""

    path: str
    digest: str


@dataclass(frozen=True, slots=True)
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
    """Whose job it is. None: the user's whose store it is."""
    proposal_id: str | None = None
    """The approval that it uses up, and that is owed its outcome."""

    def key(self) -> str:
        """Return the key of the arguments as JSON, which is what a job runs with: the same value may come from the
        library or the command line."""
        arguments = to_jsonable(dict(self.arguments))
        return invocation_key(self.catalogue, self.spec.name, arguments, self.idempotency_key, self.stdin, self.owner)

    def as_new_job(self, log_path: str, job_id: str, now: WallTime) -> NewJob:
        interruption = self.spec.interruption
        assert interruption is not None
        return NewJob(
            id=job_id,
            key=self.key(),
            app=self.catalogue.name,
            command=self.spec.name,
            arguments=to_jsonable(dict(self.arguments)),
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
    """Return what is the same for the same work: command, arguments, directory, version, key, input and owner. What is
    not said and what is said to be as it is by default are the same."""
    spec = catalogue.find(command)
    properties = {} if spec is None else spec.input_schema.get("properties", {})
    defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    work: list[Any] = [
        catalogue.name,
        catalogue.version,
        command,
        identity({**defaults, **arguments}),
        _directory(),
        idempotency_key,
        None if stdin is None else stdin.digest,
        *([] if owner is None else [owner]),
    ]
    text = json.dumps(work, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed under us
        return ""
