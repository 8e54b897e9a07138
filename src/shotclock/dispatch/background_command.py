"""A command that runs as a job, as the store holds it: `exec --detach` and `exec --budget`; and the end of any job."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..core.envelope import Envelope
from ..core.limits import NS_PER_MS, ProcessIdentity, WallTime
from ..core.value_types import as_dict, field, record, value
from ..store.home import StoreError
from ..store.jobs import Job
from ..store.store import Store
from ..supervise.clock import monotonic_ns, pause, wall_time
from ..supervise.kernel import is_alive, this_process

# How long the end of a job waits for a store that cannot be written to. After that it is lost.
STORE_LIMIT_MS = 600_000
STORE_LOOK_S = 0.25
APP = "exec"
NAME_RULE = "letters, digits, - _ and . only, 64 at most, a letter or a digit first"
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}", re.ASCII)


@value
class Ready:
    """Sign of readiness. Without one a command is ready once it has started."""

    port: int | None = None
    output: str | None = None
    url: str | None = None

    @property
    def is_asked(self) -> bool:
        return self.port is not None or self.output is not None or self.url is not None

    def describe(self) -> str:
        if self.port is not None:
            return f"port {self.port}"
        return f"a line that matches {self.output!r}" if self.output is not None else str(self.url)


@record
class BackgroundCommand:
    """Options of a command in the background. The environment is that of the process that starts it."""

    argv: list[str]
    cwd: str
    name: str | None = None
    env: dict[str, str] = field(default_factory=dict)  # the variables that were set for it alone
    clocks: dict[str, int] = field(default_factory=dict)
    stop_signal: str = "SIGTERM"
    quiet: bool = True
    ready: dict[str, object] = field(default_factory=dict)
    ready_within_ms: int = 0
    owner_choice: str | None = None
    owner: dict[str, object] | None = None  # the process with which it ends
    owner_command: str = ""
    budget_ms: int | None = None  # how long its caller waits for it; None: it was started with --detach
    captures: bool = False  # its output is also part of its envelope
    output_limit: int = 0
    is_one_output: bool = True  # its stdout and stderr are one pipe, which keeps their order
    passes_stdin: bool = False

    @property
    def label(self) -> str:
        return self.name or self.argv[0].rpartition("/")[2]

    @property
    def sign(self) -> Ready:
        return Ready(**self.ready)  # type: ignore[arg-type]

    @property
    def owner_process(self) -> ProcessIdentity | None:
        return None if self.owner is None else ProcessIdentity(**self.owner)  # type: ignore[arg-type]

    def describe_owner(self) -> str:
        return "none" if self.owner is None else f"{self.owner_command} (pid {self.owner['pid']})"

    @classmethod
    def of(cls, job: Job) -> BackgroundCommand:
        return cls(**job.spec["command"])

    def as_job(self, job_id: str, log_path: str, now: WallTime) -> Job:
        timeout_ms = self.clocks.get("timeout_ms", 0)
        return Job(
            id=job_id,
            key=f"{APP} {job_id}" if self.name is None else name_key(self.name),
            app=APP,
            command=self.label,
            arguments={},
            cwd=self.cwd,
            program={},
            tool_version="",
            spec={
                "command": as_dict(self),
                "timeout_ms": timeout_ms,
                "grace_ms": self.clocks.get("grace_ms", 0),
                "starter": as_dict(this_process()),
            },
            max_lifetime_ms=timeout_ms,
            idle_timeout_ms=self.clocks.get("idle_ms", 0),
            created_at=now,
            attempt_at=now,
            log_path=log_path,
            deadline_at=now + timeout_ms if timeout_ms else None,
        )


def read_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"{text[:80]!r} cannot be a name: {NAME_RULE}")
    return text


def name_key(name: str) -> str:
    """Return the key of the jobs with this name, of which one is active at most."""
    return f"{APP} name {name}"


def is_command(job: Job) -> bool:
    return job.app == APP and "command" in job.spec


def is_abandoned(job: Job) -> bool:
    """Return whether the process that was starting the command is gone. Its runner may be there all the same."""
    starter = job.spec.get("starter")
    return starter is not None and not is_alive(ProcessIdentity(**starter))


def describe_command(job: Job, now: WallTime) -> dict[str, object]:
    """Return the fields that only a command in the background has."""
    spec = BackgroundCommand.of(job)
    ends_at = job.deadline_at
    return {
        "name": spec.name,
        "argv": spec.argv,
        "cwd": job.cwd,
        "pid": job.spec.get("pid") if job.is_active else None,
        "ready": "ready_at_ms" in job.spec if job.is_active else None,
        "ready_sign": spec.sign.describe() if spec.sign.is_asked else None,
        "age_ms": now.since_ms(job.created_at),
        "lifetime_left_ms": None if ends_at is None or not job.is_active else max(0, ends_at - now),
        "owner_process": None if spec.owner is None else {"pid": spec.owner["pid"], "command": spec.owner_command},
    }


def record_end(store: Store, job: Job, envelope: Envelope, is_store_gone: Callable[[], bool]) -> bool:
    """Record the end of a job once the store can be written to. Return whether this was its latest attempt."""
    until_ns = monotonic_ns() + STORE_LIMIT_MS * NS_PER_MS
    while not is_store_gone():
        try:
            return store.jobs.finish(job.id, envelope.to_dict(), wall_time(), attempt=job.attempt)
        except StoreError:  # it is locked by another process, or the disk is full
            if monotonic_ns() >= until_ns:
                raise
            pause(STORE_LOOK_S)
    return False
