"""Places: how much is under way at a time, over a whole run with its items and the files that it runs.

A step takes a place before it starts. One that is made of parts (the items of a `for_each`, the steps of another file)
lends its own place to them and asks for more around it. So a part never waits for a place that only its own step could
give back, and with one place at least the parts go on one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import Enum, auto


class _State(Enum):
    WAITING = auto()
    """For one of its own places."""
    OUTSIDE = auto()
    """It has one of its own, and waits for one around."""
    TAKEN = auto()
    OVER = auto()


class Slot:
    """One that was asked for."""

    def __init__(self, places: ParallelSlots, granted: Callable[[], None]) -> None:
        self._places = places
        self._granted = granted
        self.state = _State.WAITING
        self.outer: Slot | None = None
        """The one around, where it is not the one that was lent."""

    def grant(self) -> None:
        self.state = _State.TAKEN
        self._granted()

    def give_back(self) -> None:
        """Also where it was not granted yet: then it will not be."""
        was, self.state = self.state, _State.OVER
        self._places.free(self, was)


class ParallelSlots:
    def __init__(self, most: int, around: ParallelSlots | None = None) -> None:
        """`around` are those that the step, whose parts ask here, has one of."""
        self._free = most
        self._around = around
        self._is_lent_free = around is not None
        self._waiting: deque[Slot] = deque()
        self._outside: deque[Slot] = deque()

    def ask(self, granted: Callable[[], None]) -> Slot:
        """`granted` is called once there is one, which may be now. In the order in which they were asked for."""
        place = Slot(self, granted)
        self._waiting.append(place)
        self._hand_out()
        return place

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it. Bounded by the clocks of those who have one."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = self.ask(lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
            yield
        finally:
            place.give_back()

    def free(self, place: Slot, was: _State) -> None:
        if was in (_State.WAITING, _State.OVER):
            return
        self._free += 1
        if place.outer is not None:
            place.outer.give_back()
        elif self._around is not None:
            self._is_lent_free = True
            self._lend()
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free > 0 and self._waiting:
            place = self._waiting.popleft()
            if place.state is not _State.WAITING:
                continue
            self._free -= 1
            if self._around is None:
                place.grant()
                continue
            place.state = _State.OUTSIDE
            self._outside.append(place)
            self._lend()
            if place.state is _State.OUTSIDE:
                place.outer = self._around.ask(place.grant)

    def _lend(self) -> None:
        """Give the lent place to whoever has waited longest for one around."""
        while self._is_lent_free and self._outside:
            place = self._outside.popleft()
            if place.state is _State.OUTSIDE:
                self._is_lent_free = False
                outer, place.outer = place.outer, None
                if outer is not None:
                    outer.give_back()
                place.grant()
