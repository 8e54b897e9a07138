"""What a supervisor is told to run, and what it tells when it is over. Plain values, sent between processes."""

from __future__ import annotations

from enum import Enum, auto

from ..core.records import as_dict, default_factory, record
from .output_capture import DEFAULT_OUTPUT_LIMIT, Captured


class Output(Enum):
    INHERIT = auto()
    """The work writes to the caller's own descriptors; we never see it."""
    CAPTURE = auto()
    RELAY = auto()
    """Passed through byte by byte, so that silence can be noticed."""


@record
class CommandTask:
    """What to run and by when. Instants are monotonic nanoseconds; None is never."""

    argv: list[str]
    env: dict[str, str]
    cwd: str | None = None
    started_ns: int = 0
    """When the call began, from where its clocks are counted."""
    bell_ns: int | None = None
    kill_ns: int | None = None
    soft_ns: int | None = None
    idle_ms: int = 0
    grace_ms: int = 0
    output: str = Output.CAPTURE.name
    output_limit: int = DEFAULT_OUTPUT_LIMIT
    spill_stdout: str | None = None
    spill_stderr: str | None = None
    leave_children: bool = False
    stdin: bool = False
    """Give the work the caller's stdin. Otherwise it reads the end of file at once."""

    def pack(self) -> dict[str, object]:
        return as_dict(self)


@record
class CommandReport:
    """What became of the work, told once, when the tree is verified gone (or declared a survivor)."""

    status: int | None = None
    """The leader's exit code, or minus its signal; None if it was never seen to end."""
    fired: str | None = None
    """The clock that made us stop it."""
    elapsed_ns: int = 0
    """From start to the moment the clock fired, or to the end."""
    stopped: str | None = None
    """Why we were told to stop it, if we were: the caller's word."""
    leaked: list[dict[str, object]] = default_factory(factory=list)
    survivors: list[dict[str, object]] = default_factory(factory=list)
    soft_rang: bool = False
    stdout: Captured = default_factory(factory=Captured)
    stderr: Captured = default_factory(factory=Captured)
    unstartable: tuple[str, int] | None = None
    """Which step of starting failed ("machine", "exec", "cwd", "fork"), and its errno."""
    unwritten: int = 0
    """The errno for which output that was to be passed on was lost."""
    lost: bool = False
    """There was no report: the supervisor was killed. What it guarded was looked for, and these are its survivors."""
    ended_ns: int = 0
    spare_pid: int = 0
    """The supervisor's own, where it waits for another command."""

    def pack(self) -> dict[str, object]:
        packed = as_dict(self)
        for name in ("stdout", "stderr"):
            packed[name] = tuple(as_dict(packed[name]).values())
        return packed

    @classmethod
    def unpack(cls, packed: dict[str, object]) -> CommandReport:
        for name in ("stdout", "stderr"):
            packed[name] = Captured(*packed[name])  # type: ignore[misc]
        return cls(**packed)  # type: ignore[arg-type]
