"""Who comes before whom, for many pairs of steps at once.

Going back from every step that asks would take time with the square of a long workflow. So everybody is visited once,
each after those before it, and what is known about those is handed on: one bit for each step that is asked about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

# So many are asked about in one go. All at once would take a megabyte for every few steps of the largest file there is.
AT_ONCE = 4096

Before = Mapping[str, Collection[str]]
"""By step, those right before it. There may be circles: a step can be gone back to."""


def not_before(before: Before, pairs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Of pairs (earlier, later) those where there is no way from the second back to the first."""
    askers: dict[str, list[str]] = {}
    for earlier, later in pairs:
        if earlier not in before.get(later, ()):
            askers.setdefault(earlier, []).append(later)
    if not askers:
        return set()
    knots, names = list(_knots(before)), list(askers)
    missing: set[tuple[str, str]] = set()
    for start in range(0, len(names), AT_ONCE):
        bits = {name: 1 << number for number, name in enumerate(names[start : start + AT_ONCE])}
        above: dict[str, int] = {}
        for knot in knots:
            # Of its own members none is in `above` yet, and each is right before another one.
            others = {other for name in knot for other in before[name]}
            known = 0
            for other in others:
                known |= above.get(other, 0) | bits.get(other, 0)
            above.update(dict.fromkeys(knot, known))
        missing |= {(name, later) for name, bit in bits.items() for later in askers[name] if not above[later] & bit}
    return missing


def _knots(before: Before) -> Iterator[list[str]]:
    """Every step once, after all those before it; steps that are before each other together."""
    number: dict[str, int] = {}
    done: set[str] = set()
    trail: list[str] = []
    # On the trail, the first of each knot as far as is known (Gabow's algorithm, without recursion).
    firsts: list[str] = []
    for start in before:
        work = [] if start in number else [(start, iter(before[start]))]
        while work:
            name, left = work[-1]
            if name not in number:
                number[name] = len(number)
                trail.append(name)
                firsts.append(name)
            for other in left:
                if other not in number and other in before:
                    work.append((other, iter(before[other])))
                    break
                if other in number and other not in done:
                    while number[firsts[-1]] > number[other]:
                        firsts.pop()
            else:
                work.pop()
                if firsts[-1] == name:
                    firsts.pop()
                    at = number[name]
                    knot = []
                    while trail and number[trail[-1]] >= at:
                        knot.append(trail.pop())
                    done.update(knot)
                    yield knot
