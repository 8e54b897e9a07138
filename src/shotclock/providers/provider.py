"""What a provider is given and what it gives back. The engine does the rest: order, retries, templates, the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..core.clocks import Clocks
from ..core.deadlines import Bound, nest
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem
from ..core.proposal import Proposal
from ..core.records import dataclass, replace_fields
from ..core.walltime import WallTime
from .step_type import STEP_TYPES, StepType

if TYPE_CHECKING:
    import asyncio

    from ..inbox.inbox import Inbox
    from ..runtime.call import Call, Outcome
    from ..runtime.runtime import Runtime
    from .workflow import RunFile


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
    run_file: RunFile | None = None
    """Runs another workflow inside this run."""
    redact: Callable[[str], str] = lambda text: text
    """Takes the secrets that the run knows out of a text."""

    @property
    def name(self) -> str:
        return f"step {self.step_id}"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a provider gives back of one try."""

    outcome: Outcome | Envelope
    """What happened; an envelope where the runtime has answered the call already, or another call stands for it."""
    output: Any = None
    rule: str | None = None
    """What kind of failure it was, as `command/timeout`, where the step type does not say so by its code."""
    rewrite: Callable[[Envelope], Envelope] | None = None
    """Makes of the answer what a server has said that speaks of its calls as we do."""


class Provider(Protocol):
    """Carries out the steps of one type."""

    step_type: StepType

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        """Carry out one try, bounded by the clocks of its call. Whoever began the call answers it.

        Raises Failure where it cannot be begun, and what a cancellation raises; that may carry what came of the step
        until then (`hand_over`)."""
        ...

    async def close(self) -> None:
        """Stop what it keeps between steps."""
        ...


def hand_over(cancelled: asyncio.CancelledError, result: StepResult) -> None:
    """Let what came of a step until it was cancelled go along with the cancellation."""
    cancelled.step_result = result  # type: ignore[attr-defined]


def result_left_by(cancelled: asyncio.CancelledError) -> StepResult | None:
    """Return what came of the step that was cancelled, where its provider could still say so."""
    result = getattr(cancelled, "step_result", None)
    return result if isinstance(result, StepResult) else None


def envelope_left_by(cancelled: asyncio.CancelledError) -> Envelope | None:
    """Return the answer of the call that was cancelled, where the runtime could still give one."""
    envelope = getattr(cancelled, "envelope", None)
    return envelope if isinstance(envelope, Envelope) else None


def cancelled_outcome(ending: Ending) -> Outcome:
    """Return what is said of a step that was cancelled."""
    from ..runtime.call import Outcome

    return Outcome(ending, Problem("CANCELLED", "the step was cancelled"))


def restart_clocks(call: Call, runtime: Runtime) -> None:
    """Start the clocks of a try anew, inside those of its run: what came before was waiting for a person."""
    call.bound, call.started_ns = _bound_from_now(call, runtime, call.clocks.timeout_ms or 0)


def bounded_by_run(call: Call, runtime: Runtime) -> Call:
    """Return the same call bounded by its run alone: while a person is asked, the clock of the step stands still."""
    bound, now_ns = _bound_from_now(call, runtime, 0)
    return replace_fields(call, bound=bound, started_ns=now_ns)


def _bound_from_now(call: Call, runtime: Runtime, timeout_ms: int) -> tuple[Bound, int]:
    from ..process.clock import monotonic_ns
    from ..runtime.loop_call import current_scope

    scope, now_ns = current_scope.get(), monotonic_ns()
    bound = nest(
        now_ns,
        timeout_ms=timeout_ms,
        grace_ms=call.clocks.grace_ms or 0,
        owner=call.name,
        parent=runtime.inherited if scope is None else scope.deadline,
        parent_owner="caller" if scope is None else scope.name,
        reserve_ms=call.clocks.reserve_ms,
    )
    return bound, now_ns


Aside = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class RunServices:
    """What a run has for its providers."""

    inbox: Callable[[], Inbox]
    """Where people are asked."""
    aside: Aside = nullcontext
    """Entered while a question is open at the terminal, for whoever else draws on it."""


class Providers:
    """The providers of a run and of those inside it, each made when the first step of its type is tried."""

    def __init__(self, services: RunServices) -> None:
        self._services = services
        self._made: dict[str, Provider] = {}

    def __getitem__(self, step_type: str) -> Provider:
        if step_type not in self._made:
            self._made[step_type] = STEP_TYPES[step_type].make_provider(self._services)
        return self._made[step_type]

    async def close(self) -> None:
        """Stop what the providers keep between steps."""
        from contextlib import AsyncExitStack

        async with AsyncExitStack() as stack:  # a provider that cannot be closed does not keep the others
            for provider in self._made.values():
                stack.push_async_callback(provider.close)
