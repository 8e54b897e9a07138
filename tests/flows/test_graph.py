"""Dependencies: circles, orders and what can never start, against the simplest thing that could be right."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from shotclock.flows.check.plan import Groups, behind_all, find_cycle, groups_of, needs, order_of

NAMES = "abcdefg"
Graph = dict[str, Groups]


def chain(length: int) -> Graph:
    """Each waits for the one before it."""
    return {f"s{n}": ((f"s{n - 1}",),) if n else () for n in range(length)}


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any names may be waited for, also those that are not there."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6))
    group = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(tuple)
    return {name: tuple(draw(st.lists(group, max_size=3))) for name in names}


# --- oracles ----------------------------------------------------------------------------------------------


def reaches_itself(graph: Graph, start: str) -> bool:
    """By walking as many steps as there are names."""
    reached = needs(graph[start])
    for _ in graph:
        reached |= {other for name in reached if name in graph for other in needs(graph[name])}
    return start in reached


def never_start(graph: Graph, never: set[str]) -> set[str]:
    """By trying to start whatever can be, until nothing more can. Unknown names are taken as there."""
    started: set[str] = set()
    for _ in range(len(graph) + 1):
        for name, groups in graph.items():
            if name not in never and all(
                any(other in started or (other not in graph and other not in never) for other in group)
                for group in groups
            ):
                started.add(name)
    return set(graph) - started


# --- groups -----------------------------------------------------------------------------------------------


def test_a_bar_is_either_and_a_list_is_all() -> None:
    for written, groups in (
        ([], ()),
        (["A", "B"], (("A",), ("B",))),
        (["A", " B | C "], (("A",), ("B", "C"))),
        (["A", "A"], (("A",), ("A",))),
    ):
        assert groups_of(written) == groups
        assert needs(groups) == {name for group in groups for name in group}


# --- circles ----------------------------------------------------------------------------------------------


@given(graphs())
@example({"a": (("a",),)})
@example({"a": (("b",),), "b": (("a", "c"),)})
def test_a_circle_is_found_if_there_is_one_and_it_is_one(graph: Graph) -> None:
    circle = find_cycle(graph)
    assert (circle is not None) == any(reaches_itself(graph, name) for name in graph)
    if circle is not None:
        assert circle[0] == circle[-1]
        assert len(set(circle)) == len(circle) - 1
        for name, following in itertools.pairwise(circle):
            assert following in needs(graph[name])


def test_the_circle_is_told_without_the_way_to_it() -> None:
    graph = {"in": (("a",),), "a": (("b",),), "b": (("c",),), "c": (("a",),)}
    assert find_cycle(graph) == ["a", "b", "c", "a"]


# --- order ------------------------------------------------------------------------------------------------


@given(graphs())
def test_everything_comes_after_what_it_waits_for_and_nothing_behind_a_circle_comes(graph: Graph) -> None:
    order = order_of(graph)
    place = {name: number for number, name in enumerate(order)}
    assert len(place) == len(order)
    for name in order:
        assert all(place[other] < place[name] for other in needs(graph[name]) if other in graph)
    for name in set(graph) - set(order):
        assert any(other in graph and other not in place for other in needs(graph[name]))
    assert (set(order) == set(graph)) == (find_cycle(graph) is None)


def test_what_does_not_wait_comes_as_written() -> None:
    assert order_of({"z": (), "a": (), "m": (("z",),)}) == ["z", "a", "m"]


# --- what never starts ------------------------------------------------------------------------------------


@given(graphs(), st.sets(st.sampled_from(NAMES)))
def test_what_never_starts_is_what_nobody_could_start(graph: Graph, never: set[str]) -> None:
    if find_cycle(graph) is None:
        assert behind_all(graph, never) & set(graph) == never_start(graph, never)


def test_one_of_two_is_enough_to_start() -> None:
    graph = {"a": (), "b": (), "either": (("a", "b"),), "both": (("a",), ("b",)), "twice": (("a", "a"),)}
    assert behind_all(graph, {"a"}) == {"a", "both", "twice"}
    assert behind_all(graph, {"a", "b"}) == set(graph)


# --- large ------------------------------------------------------------------------------------------------


def test_a_circle_of_ten_thousand_is_found_and_told_whole() -> None:
    graph = chain(10_000) | {"s0": (("s9999",),)}
    circle = find_cycle(graph)
    assert circle is not None
    assert len(circle) == 10_001
    assert order_of(graph) == []
