"""What was asked for on the command line, where doing it takes more imports than understanding it."""

from __future__ import annotations

from ..core.records import made, value


@value
class RunAsked:
    """A run that was asked for on the command line."""

    flow: str | None
    run_id: str | None = None
    resume: str | None = None
    timeout_ms: int | None = None
    inputs: dict[str, str] = made(factory=dict)
    force: bool = False
    events: str | None = None
    output: str | None = None
    """What is written of the run, besides what a person sees: json, markdown or junit."""
    output_file: str | None = None
    budget_ms: int | None = None
    """How long a person is waited for; 0 is for as long as it takes."""
