"""Dependencies between steps: what must come first, cycles, and in which order steps can start."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

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
