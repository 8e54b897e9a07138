"""An invocation that may outlive its caller, and the target of `shotclock serve`.

An invocation has an identity and a checkpoint. A target is the place of an App, whose catalogue is read without
importing it here.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calls.call import CallRules, Stdin, Tool
from ..calls.preloaded_zygote import Program
from ..calls.runtime import Runtime
from ..core.arguments import NotSerializable, to_jsonable
from ..core.catalogue import Catalogue, CommandSpec, HandlerReference, Operation
from ..core.envelope import Envelope, Warning_, warning
from ..core.errors import Failure
from ..core.limits import Clocks, WallTime, format_duration
from ..core.proposal import digest
from ..core.value_types import as_dict, value
from ..supervise.clock import wall_time
from ..worker.context import Caller
from ..worker.running_call import MAIN_ALIAS

if TYPE_CHECKING:
    from ..store.jobs import Job
    from ..store.store import Store

# The largest checkpoint: it is read and written whole.
CHECKPOINT_LIMIT = 16_000_000
# How long the program may take to be imported: the heaviest libraries on a cold disk.
IMPORT_LIMIT_MS = 60_000
TRACEBACK_SHOWN = 8000
# The author of a program may see where it fails to import.
_FOR_AUTHORS = CallRules(Tool(debug=True))


@value
class Invocation:
    catalogue: Catalogue
    spec: CommandSpec
    program: Program | None  # None: it cannot become a job
    arguments: Mapping[str, object]
    timeout_ms: int  # of all the work; 0 is none
    idempotency_key: str | None = None
    resume_from: str | None = None
    stdin: Stdin | None = None
    owner: str | None = None  # None: the user of the store
    proposal_id: str | None = None
    asks: Mapping[str, Any] | None = None  # the capabilities of an MCP client that the job may ask
    caller: Caller | None = None

    def key(self) -> str:
        """Return a digest of all that identifies the work: equal for the same work."""
        work = [
            self.catalogue.name,
            self.catalogue.version,
            self.spec.name,
            # The same value may come from the library or the command line.
            to_jsonable({**self.spec.defaults, **self.arguments}),
            _directory(),
            self.idempotency_key,
            None if self.stdin is None else self.stdin.digest,
            *([] if self.owner is None else [self.owner]),
        ]
        return digest(work)

    @property
    def resumes(self) -> bool:
        return self.spec.interruption is not None and self.spec.interruption.resume

    def as_job(self, log_path: str, job_id: str, now: WallTime) -> Job:
        interruption = self.spec.interruption
        assert interruption is not None and self.program is not None
        from ..store.jobs import Job  # imports sqlite3, which few commands need

        return Job(
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
                "grace_ms": self.spec.clocks.grace_ms or 0,
                "resume_from": self.resume_from,
                "proposal_id": self.proposal_id,
                "asks": None if self.asks is None else dict(self.asks),
                # Headers are of one request, and may be secret.
                "caller": None if self.caller is None else {**as_dict(self.caller), "headers": {}},
            },
            max_lifetime_ms=interruption.max_lifetime_ms,
            idle_timeout_ms=interruption.idle_timeout_ms,
            created_at=now,
            attempt_at=now,
            idempotency_key=self.idempotency_key,
            log_path=log_path,
            stdin_path=None if self.stdin is None else f"{log_path.removesuffix('.log')}.stdin",
            deadline_at=now + self.timeout_ms if self.timeout_ms else None,
            owner=self.owner,
        )


class InvocationCheckpoint:
    def __init__(self, store: Callable[[], Store], key: Callable[[], str]) -> None:
        """`store` and `key` are called in a thread when needed: the store may block, and not all arguments are JSON."""
        self._store = store
        self._make_key = key
        self._fingerprint = ""
        self.is_kept: bool = False
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

    async def forget(self) -> None:
        """Delete the checkpoint of work that succeeded. If it cannot be deleted, there is a warning."""
        try:
            if self.is_kept:
                await asyncio.to_thread(self.clear)
        except Failure as failure:
            self.warnings.append(warning("CHECKPOINT_LEFT", cause=str(failure)))


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


@value
class Target:
    """Place of an App: a module or a file, and its name in there."""

    attribute: str
    module: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.attribute}"

    @property
    def program(self) -> Program:
        """Return how a process imports the target, from where `python FILE` and `python -m MODULE` would."""
        ours = [entry for entry in sys.path if entry]
        folder = os.path.dirname(self.file) if self.file else os.getcwd()
        maker = f"{self.module or MAIN_ALIAS}/{self.attribute}" if self.attribute.endswith("()") else ""
        return Program(None, self.file, (folder, *ours), (self.module,) if self.module else (), maker)

    @staticmethod
    def parse(text: str) -> Target:
        """Read `package.module:app` or `path/to/file.py:app`; with `()` a function makes the App. Raises Failure."""
        place, attribute = text.partition(":")[0], parse_attribute(text)
        if not all(part.isidentifier() for part in attribute.removesuffix("()").split(".")):
            raise Failure("TARGET_UNUSABLE", f"{attribute!r} cannot be the name of an App in {place!r}")
        if place.endswith(".py") or os.sep in place:
            if not os.path.isfile(place):
                raise Failure("TARGET_NOT_FOUND", f"there is no file {place!r}")
            # A link may lead elsewhere by the time it is imported again.
            return Target(attribute, file=os.path.realpath(place))
        if place and all(part.isidentifier() for part in place.split(".")):
            return Target(attribute, module=place)
        raise Failure("TARGET_UNUSABLE", f"{text!r} is neither package.module:app nor path/to/file.py:app")

    async def learn(self, runtime: Runtime) -> Catalogue:
        """Read the App's catalogue in a worker that imports it. Raises Failure with the reason."""
        place = {"attribute": self.attribute, "module": self.module or MAIN_ALIAS}
        described = await _ask(runtime, "describe", "shotclock.apps.app", "describe", place)
        if described.ok and isinstance(described.data, dict):
            return Catalogue.from_plain(described.data)
        if described.code == "MACHINE_UNFIT":  # nothing was imported, and nothing is to blame but the machine
            raise Failure("MACHINE_UNFIT", str((described.error or {}).get("message")))
        if described.ending == "not_started":
            limit = format_duration(int(str(described.meta["timeout_ms"])))
            cause = (described.error or {}).get("message")
            message = f"importing {self} took longer than {limit}, or ended the process that did it"
            raise Failure(
                "TIMEOUT", message, context={"cause": cause}, suggestion="import less, or inside of functions"
            )
        raise await _explain_failure(runtime, self, described)


def parse_attribute(text: str) -> str:
    return text.partition(":")[2] or "app"


async def learn_files(runtime: Runtime, target: Target) -> list[str]:
    """Return the files of an App that was learned, which may change while it is served."""
    found = await _ask(runtime, "files", "shotclock.worker.preloading", "source_files", {})
    files = found.value if found.ok else None
    return list(files) if isinstance(files, list) else [target.file] if target.file else []


async def _explain_failure(runtime: Runtime, target: Target, described: Envelope) -> Failure:
    """Import it once more, for the traceback of the failure."""
    if target.file:
        again = {"path_name": target.file, "run_name": MAIN_ALIAS}
        imported = await _ask(runtime, "import", "runpy", "run_path", again)
    else:
        if missing := await _find_missing_module(runtime, str(target.module)):
            return _no_module(missing)
        imported = await _ask(runtime, "import", "importlib", "import_module", {"name": target.module})
    is_there = imported.ok or imported.code == "RESULT_NOT_SERIALIZABLE"  # a module is no data
    error: Any = (described if is_there else imported).error or {}
    if is_there and described.code == "TARGET_NOT_FOUND":
        return Failure("TARGET_NOT_FOUND", f"{error['message']} in {target.file or target.module}")
    message = f"{target}: {error.get('message')}" if is_there else f"importing {target} failed: {error.get('message')}"
    context = error.get("context") or {}
    shown = {name: each[-TRACEBACK_SHOWN:] if isinstance(each, str) else each for name, each in context.items()}
    return Failure("TARGET_UNUSABLE", message, context=shown)


async def _find_missing_module(runtime: Runtime, module: str) -> str | None:
    """Return the first of a module and the packages around it that is not there."""
    parts = module.split(".")
    for name in (".".join(parts[: end + 1]) for end in range(len(parts))):
        found = await _ask(runtime, "find", "importlib.util", "find_spec", {"name": name})
        if found.ok and found.value is None:
            return name
        if found.code != "RESULT_NOT_SERIALIZABLE":  # a package around it fails: the import says how
            break
    return None


def asking(name: str, module: str, function: str) -> Operation:
    """Return a question about a program, to a worker that has imported it."""
    return Operation(
        name,
        HandlerReference(module, function),
        isolation="process",
        mutates=False,
        idempotent=True,
        clocks=Clocks(timeout_ms=IMPORT_LIMIT_MS, grace_ms=0),
    )


def _no_module(name: str) -> Failure:
    suggestion = "install its package there, start in its folder, or name its file: path/to/file.py:app"
    if Path("src", *name.split(".")).exists():
        suggestion = f"install the package of this folder there: {shlex.quote(sys.executable)} -m pip install -e ."
    message = f"there is no module {name!r} for {sys.executable}, nor in this directory"
    return Failure("TARGET_NOT_FOUND", message, suggestion=suggestion)


async def _ask(runtime: Runtime, name: str, module: str, function: str, arguments: Mapping[str, object]) -> Envelope:
    return await runtime.call(asking(name, module, function), arguments, rules=_FOR_AUTHORS)
