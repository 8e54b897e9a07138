"""Places are never more than there are, and never waited for in vain."""

import random
from collections.abc import Callable

from shotclock.flows.run.run_context import ParallelSlots, Slot


def test_places_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    places, granted = ParallelSlots(2), list[int]()
    asked = [places.ask(lambda number=number: granted.append(number)) for number in range(5)]
    assert granted == [0, 1]
    asked[3].give_back()  # before it was granted
    asked[0].give_back()
    assert granted == [0, 1, 2]
    asked[1].give_back()
    asked[1].give_back()
    assert granted == [0, 1, 2, 4]


def test_parts_have_the_place_of_their_step_at_least() -> None:
    outer, granted = ParallelSlots(1), list[str]()
    outer.ask(lambda: granted.append("step"))
    parts = ParallelSlots(8, outer)
    first = parts.ask(lambda: granted.append("first"))
    parts.ask(lambda: granted.append("second"))
    assert granted == ["step", "first"]
    first.give_back()
    assert granted == ["step", "first", "second"]


class Step:
    """Holds one place while its parts are under way, each of which takes one of its own."""

    def __init__(self, root: ParallelSlots, chance: random.Random, running: "list[Part]") -> None:
        self.left = chance.randint(1, 5)
        self._places = ParallelSlots(chance.randint(1, 4), root)
        self._running = running
        self._place = Granted(root, self._begin)

    def _begin(self) -> None:
        for _ in range(self.left):
            part = Part(self)
            part.place = Granted(self._places, lambda part=part: self._running.append(part))

    def end_part(self) -> None:
        self.left -= 1
        if not self.left:
            self._place.give_back()


class Part:
    place: "Granted"

    def __init__(self, step: Step) -> None:
        self.step = step


class Granted:
    """A place whose taker hears of it only when it has been returned to whoever asked."""

    def __init__(self, places: ParallelSlots, taken: Callable[[], None]) -> None:
        self._place: Slot | None = None
        self._taken = taken
        self._place = places.ask(self._granted)
        if self._place.state.name == "TAKEN":
            taken()

    def _granted(self) -> None:
        if self._place is not None:
            self._taken()

    def give_back(self) -> None:
        assert self._place is not None
        self._place.give_back()


def test_parts_end_in_any_order_and_are_all_done_and_never_too_many_at_once() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        most = chance.randint(1, 4)
        root, running = ParallelSlots(most), list[Part]()
        steps = [Step(root, chance, running) for _ in range(chance.randint(1, 6))]
        while running:
            assert len(running) <= most, seed
            part = running.pop(chance.randrange(len(running)))
            part.place.give_back()
            part.step.end_part()
        assert not any(step.left for step in steps), f"seed {seed}: a part waits for ever"
