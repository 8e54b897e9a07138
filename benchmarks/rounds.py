"""Measuring: sides take turns within one run, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import enum
import gc
import importlib
import inspect
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

Side = Callable[[], float | Awaitable[float]]
T = TypeVar("T")


class Size(enum.IntEnum):
    WHOLE = 0
    QUICK = 1  # a glance, not a result
    ONCE = 2  # only whether it runs to its end

    def of(self, whole: T, quick: T, once: T) -> T:
        return (whole, quick, once)[self]


def find_peer(name: str) -> Any:
    """A peer's module; None where it is not installed, as beside the tests: then we are measured alone."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


class Figures(dict[str, float]):
    """The median figure of each side, by its name."""

    def __init__(self, taken: Mapping[str, Sequence[float]]) -> None:
        super().__init__({name: statistics.median(figures) for name, figures in taken.items()})
        self._taken = taken

    def ratio(self, ours: str, peer: str) -> float:
        """The median over the rounds of one side's figure divided by the other's in the same round. What slows down a
        round slows down both; the quotient of two medians may be of a quiet round and of a busy one."""
        pairs = zip(self._taken[ours], self._taken[peer], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


async def take_turns(sides: Mapping[str, Side], rounds: int) -> Figures:
    """The figures of each side. Every round asks each once, in an order that is turned round each time."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            gc.collect()
            figure: Any = sides[name]()
            if inspect.isawaitable(figure):
                figure = await figure
            if number:  # the first round warms up
                figures[name].append(figure)
    return Figures(figures)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least this share of the samples does not exceed."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
