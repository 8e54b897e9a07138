"""What a provider is given and what it gives back. The engine does the rest: order, retries, templates, the record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

from ..core.clocks import Clocks
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem
from ..core.proposal import Proposal
from ..core.records import dataclass
from ..core.walltime import WallTime
from ..runtime.call import Call, Outcome, admit
from ..runtime.loop_call import current_scope
from ..runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class ForeignProposal:
    """What a person is asked by somebody else than this run, as that one tells it."""

    id: str
    shown: Mapping[str, object]


Waits = Callable[[str, Proposal | ForeignProposal], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class StepCall:
    """One try of one step: everything is rendered, the clocks are the step's own, the run's deadline is around it."""

    step_id: str
    settings: Mapping[str, Any]
    """The step's own keys, with their templates replaced."""
    clocks: Clocks
    env: Mapping[str, str]
    """All that a child may see of the environment."""
    folder: Path
    """Where relative paths start: the step's `cwd`, else the directory of the file."""
    key: str = ""
    """Names this one try of this run's step, also to a process that goes on with the run."""
    run_began_at: WallTime | None = None
    """What was asked for under the key before that was asked for by another run."""
    waits: Waits = field(default=lambda key, proposal: nullcontext())
    """Entered while a person is waited for."""
    item: tuple[int, int] = (0, 1)
    """Which of how many items it is done for, counted from 0."""
    parks: bool = False
    """The run is parked once it has waited for people long enough."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Variables that hold what was interpolated into a shell command."""

    asked: Mapping[str, str] | None = None
    """What of `env` the file itself says; the rest is our own. None: nobody has told them apart."""
    holds_secret: Callable[[str], bool] = lambda text: False
    """Whether a secret that the run knows is in a text."""

    @property
    def name(self) -> str:
        return f"step {self.step_id}"


@dataclass(frozen=True, slots=True)
class StepResult:
    envelope: Envelope
    output: Any = None
    rule: str | None = None
    """What kind of failure it was, as `command/timeout`; found in error.context.rule."""


def hand_over(cancelled: asyncio.CancelledError, result: StepResult) -> None:
    """What came of a step until it was cancelled goes along with the cancellation."""
    cancelled.step_result = result  # type: ignore[attr-defined]


def handed_over(cancelled: asyncio.CancelledError) -> StepResult | None:
    result = getattr(cancelled, "step_result", None)
    return result if isinstance(result, StepResult) else None


def envelope_left_by(cancelled: asyncio.CancelledError) -> Envelope | None:
    """The answer of the call that was cancelled, where the runtime could still give one."""
    envelope = getattr(cancelled, "envelope", None)
    return envelope if isinstance(envelope, Envelope) else None


def cancelled_outcome(ending: Ending) -> Outcome:
    return Outcome(ending, Problem("CANCELLED", "the step was cancelled"))


def admitted(call: StepCall, runtime: Runtime, *, mutates: bool = True) -> Call:
    """The step's clocks, running, inside the deadline of its run: for work that a provider does on the loop itself."""
    scope = current_scope.get()
    return admit(
        call.name,
        call.clocks,
        parent=scope.deadline if scope is not None else runtime.inherited,
        parent_owner=scope.name if scope is not None else "caller",
        caller=scope.span.trace if scope is not None else runtime.trace,
        mutates=mutates,
    )


class Provider(Protocol):
    async def run(self, call: StepCall, runtime: Runtime) -> StepResult:
        """Bounded by the call's clocks. Raises only what a cancellation raises, with what there is to say of the step
        handed over by it (`hand_over`)."""
        ...

    async def close(self) -> None:
        """Stop what it keeps between steps."""
        ...
