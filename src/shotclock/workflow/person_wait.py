"""Whether a run works or only waits for people, and for how long its caller waits with it.

While anything works, waiting costs the caller nothing. Once all that is left to do needs a person, the caller waits for
its budget; after that the run is *parked*: it lies in the store with its questions, and going on with it later picks up
what was decided meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.proposal import Proposal
from ..providers.provider import ForeignProposal


class PersonWait:
    """One for a run and all that are inside it."""

    def __init__(self, budget_ms: int | None) -> None:
        """No budget: the caller waits for as long as people take."""
        self.budget_ms = budget_ms
        self.waiting: dict[str, Proposal | ForeignProposal] = {}
        """By the key that each was asked under."""
        self.asked: dict[str, Proposal | ForeignProposal] = {}
        """What was waited for when it was parked."""
        self.left: list[Proposal] = []
        """What was asked by us and nobody waits for any more, as far as is known undecided."""
        self.parked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at_work = 0
        self._bell: asyncio.TimerHandle | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._at_work += 1
        self._look()
        try:
            yield
        finally:
            self._at_work -= 1
            self._look()

    @contextmanager
    def leave_to_parts(self) -> Iterator[None]:
        """Inside `at_work`, which it is not any more: each of its parts says by itself whether it works."""
        self._at_work -= 1
        self._look()
        try:
            yield
        finally:
            self._at_work += 1
            self._look()

    @contextmanager
    def waits(self, key: str, proposal: Proposal | ForeignProposal) -> Iterator[None]:
        """Inside `at_work`, which it is not any more until somebody has answered."""
        self._at_work -= 1
        self.waiting[key] = proposal
        self._look()
        try:
            yield
        finally:
            self._at_work += 1
            left = self.waiting.pop(key)
            if isinstance(left, Proposal):
                self.left.append(left)
            self._look()

    def _look(self) -> None:
        if self._at_work or not self.waiting:
            if self._bell is not None:
                self._bell.cancel()
                self._bell = None
        elif self._bell is None and self.budget_ms is not None:
            self._bell = asyncio.get_running_loop().call_later(self.budget_ms / 1000, self._park)

    def _park(self) -> None:
        if not self.parked.done():
            self.asked = dict(self.waiting)
            self.parked.set_result(None)
