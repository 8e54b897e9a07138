"""The wait of a step of a run for a person, as its call carries it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..core.limits import WallTime
from ..core.proposal import Proposal
from ..core.value_types import value

if TYPE_CHECKING:
    from .call import Call


@value
class StepSurroundings:
    """Parts of a step of a run that decide its calls, beside their arguments."""

    describe: Callable[[Any], Awaitable[Mapping[str, Any]]]
    """Returns them as a person is shown them."""
    redact: Callable[[str], str]
    """Removes the secrets that the run knows from a text."""


@value
class RunWait:
    """Wait of a step of a run for a person: as long as the run has time, unless the run is parked meanwhile."""

    key: str | None
    """Finds the proposal again, also from a process that resumes the run."""
    run_began_at: WallTime | None
    """An older proposal under the key belongs to another run."""
    waits: Callable[[str, Proposal], AbstractContextManager[Any]]
    """Entered while a person is waited for."""
    bounded: Callable[[], Call]
    """Returns the call that bounds the wait."""
    step: StepSurroundings | None = None
