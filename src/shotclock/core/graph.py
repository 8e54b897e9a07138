"""Dependencies between steps: what must come first, cycles, and in which order steps can start."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping

Groups = tuple[tuple[str, ...], ...]
"""What a step waits for: something of every group. `["A", "B|C"]` is A, and B or C."""


def groups_of(written: Iterable[str]) -> Groups:
    return tuple(tuple(name.strip() for name in entry.split("|") if name.strip()) for entry in written)


def needs(groups: Groups) -> set[str]:
    return {name for group in groups for name in group}


def find_cycle(graph: Mapping[str, Groups]) -> list[str] | None:
    """Return one cycle, as a path that ends where it began; None where there is none. Unknown names are not looked
    at."""
    done: set[str] = set()
    for start in graph:
        if start in done:
            continue
        path: list[str] = []
        on_path: set[str] = set()
        # Depth first without recursion: a chain of ten thousand steps is a chain of ten thousand steps.
        stack: list[tuple[str, Iterator[str]]] = [(start, iter(sorted(needs(graph[start]))))]
        path.append(start)
        on_path.add(start)
        while stack:
            name, left = stack[-1]
            following = next(left, None)
            if following is None:
                stack.pop()
                path.pop()
                on_path.discard(name)
                done.add(name)
                continue
            if following in on_path:
                return [*path[path.index(following) :], following]
            if following in graph and following not in done:
                stack.append((following, iter(sorted(needs(graph[following])))))
                path.append(following)
                on_path.add(following)
    return None


def order_of(graph: Mapping[str, Groups]) -> list[str]:
    """Return every step after everything it names, otherwise as written. Steps on or behind a cycle are left out."""
    waiting = {name: {other for other in needs(groups) if other in graph} for name, groups in graph.items()}
    behind: dict[str, list[str]] = {name: [] for name in graph}
    for name, others in waiting.items():
        for other in others:
            behind[other].append(name)
    ready = deque(name for name, others in waiting.items() if not others)
    order = []
    while ready:
        name = ready.popleft()
        order.append(name)
        for follower in behind[name]:
            waiting[follower].discard(name)
            if not waiting[follower]:
                ready.append(follower)
    return order


def behind_all(graph: Mapping[str, Groups], names: Iterable[str]) -> set[str]:
    """Return what can never start if none of these does: whoever waits for a group that lies wholly among them."""
    lost: set[str] = set()
    behind: dict[str, list[tuple[str, int]]] = {}
    left: dict[tuple[str, int], int] = {}
    for name, groups in graph.items():
        for number, group in enumerate(groups):
            alternatives = set(group)
            left[name, number] = len(alternatives)
            for other in alternatives:
                behind.setdefault(other, []).append((name, number))
    fallen = list(names)
    while fallen:
        name = fallen.pop()
        if name in lost:
            continue
        lost.add(name)
        for follower in behind.get(name, ()):
            left[follower] -= 1
            if not left[follower]:
                fallen.append(follower[0])
    return lost


# --- who comes before whom --------------------------------------------------------------------------------
# Who comes before whom, for many pairs of steps at once.
#
# Going back from every step that asks would take time with the square of a long workflow. So everybody is visited once,
# each after those before it, and what is known about those is handed on: one bit for each step that is asked about.


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
