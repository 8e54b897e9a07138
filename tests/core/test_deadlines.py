"""Deadlines nest: no child later than its parent, no kill before its bell, no answer after the caller's bell."""

from hypothesis import example, given
from hypothesis import strategies as st

from shotclock.core.limits import DEFAULT_RESERVE_MS, MAX_MS, NS_PER_MS, Bound, Deadline, nest, reserve_ms_for

instants = st.integers(0, 2**62)
limits = st.integers(0, 10_000) | st.integers(0, MAX_MS)
some_time = st.integers(1, 10_000) | st.integers(1, MAX_MS)
reserves = st.none() | st.integers(0, 5_000) | st.integers(0, MAX_MS)
# How far ahead a parent's deadline lies; often close, sometimes gone by.
leads_ns = st.integers(-10 * NS_PER_MS, 10_000 * NS_PER_MS) | st.integers(-(10**18), 10**18)


def bound_under(now_ns: int, parent: Deadline | None, timeout_ms: int, grace_ms: int, reserve_ms: int | None) -> Bound:
    return nest(now_ns, timeout_ms=timeout_ms, grace_ms=grace_ms, owner="own", parent=parent, reserve_ms=reserve_ms)


# --- one deadline ---------------------------------------------------------------------------------


@given(instants, instants)
def test_remaining_time_is_never_negative_and_never_more_than_there_is(at_ns: int, now_ns: int):
    deadline = Deadline(at_ns)
    assert 0 <= deadline.remaining_ns(now_ns) == max(0, at_ns - now_ns)
    assert 0 <= deadline.remaining_ms(now_ns) * NS_PER_MS <= deadline.remaining_ns(now_ns)
    assert deadline.remaining_ns(now_ns) - deadline.remaining_ms(now_ns) * NS_PER_MS < NS_PER_MS


@given(instants, instants)
def test_a_deadline_has_passed_exactly_when_nothing_remains(at_ns: int, now_ns: int):
    assert Deadline(at_ns).has_passed(now_ns) == (Deadline(at_ns).remaining_ns(now_ns) == 0)


@given(instants, limits)
def test_a_deadline_after_some_time_leaves_exactly_that_time(now_ns: int, ms: int):
    assert Deadline.after_ms(now_ns, ms).remaining_ms(now_ns) == ms


@given(instants, some_time, st.integers(0, 10**15))
def test_remaining_time_that_travels_is_never_more_than_there_was(now_ns: int, ms: int, passed_ns: int):
    """It is handed on in whole milliseconds, so each hand-over may lose one and none may gain any."""
    deadline = Deadline.after_ms(now_ns, ms)
    now_ns += passed_ns
    handed_on = Deadline.after_ms(now_ns, deadline.remaining_ms(now_ns))
    assert handed_on.at_ns <= max(now_ns, deadline.at_ns)
    assert handed_on.at_ns > deadline.at_ns - NS_PER_MS


# --- the reserve ----------------------------------------------------------------------------------


@given(limits)
def test_unless_told_otherwise_a_parent_keeps_back_a_tenth_and_at_most_half_a_second(remaining_ms: int):
    assert reserve_ms_for(remaining_ms) == min(DEFAULT_RESERVE_MS, remaining_ms // 10)


@given(limits, limits)
def test_a_parent_keeps_back_what_was_asked_and_never_more_than_it_has(remaining_ms: int, asked_ms: int):
    assert reserve_ms_for(remaining_ms, asked_ms) == min(asked_ms, remaining_ms)


# --- without a parent -----------------------------------------------------------------------------


@given(instants, some_time, limits, reserves)
def test_alone_the_bell_rings_at_the_timeout_and_the_kill_comes_after_the_whole_grace(
    now_ns: int, timeout_ms: int, grace_ms: int, reserve_ms: int | None
):
    bound = bound_under(now_ns, None, timeout_ms, grace_ms, reserve_ms)
    assert bound.bell == Deadline.after_ms(now_ns, timeout_ms)
    assert bound.kill_ns == now_ns + (timeout_ms + grace_ms) * NS_PER_MS
    assert (bound.limit_ms, bound.grace_ms, bound.owner) == (timeout_ms, grace_ms, "own")


@given(instants, limits, reserves)
def test_without_timeout_and_parent_there_is_no_bound_at_all(now_ns: int, grace_ms: int, reserve_ms: int | None):
    bound = bound_under(now_ns, None, 0, grace_ms, reserve_ms)
    assert bound == Bound(None, grace_ms, 0, "own"), "whoever stops it by hand still gives it its grace"
    assert bound.kill_ns is None


# --- under a parent -------------------------------------------------------------------------------


@given(instants, leads_ns, limits, limits, reserves)
def test_a_child_ends_before_its_parent_with_the_reserve_to_spare(
    now_ns: int, lead_ns: int, timeout_ms: int, grace_ms: int, reserve_ms: int | None
):
    parent = Deadline(now_ns + lead_ns)
    bound = bound_under(now_ns, parent, timeout_ms, grace_ms, reserve_ms)
    reserve_ns = reserve_ms_for(parent.remaining_ms(now_ns), reserve_ms) * NS_PER_MS
    assert bound.bell is not None and bound.kill_ns is not None
    assert bound.bell.at_ns <= parent.at_ns - reserve_ns
    assert bound.bell.at_ns <= bound.kill_ns <= parent.at_ns - reserve_ns // 2


@given(instants, leads_ns, limits, limits, reserves)
def test_a_child_is_never_given_more_than_it_asked_for(
    now_ns: int, lead_ns: int, timeout_ms: int, grace_ms: int, reserve_ms: int | None
):
    bound = bound_under(now_ns, Deadline(now_ns + lead_ns), timeout_ms, grace_ms, reserve_ms)
    assert bound.bell is not None and bound.kill_ns is not None
    if timeout_ms:
        assert bound.bell.at_ns <= now_ns + timeout_ms * NS_PER_MS
        assert bound.limit_ms <= timeout_ms
    assert 0 <= bound.grace_ms <= grace_ms
    assert bound.kill_ns <= bound.bell.at_ns + grace_ms * NS_PER_MS


@given(instants, leads_ns, limits, limits, reserves)
@example(0, -1, 0, 0, None)
@example(0, 0, 5, 5, None)
def test_the_limit_is_the_time_from_start_to_bell_and_never_negative(
    now_ns: int, lead_ns: int, timeout_ms: int, grace_ms: int, reserve_ms: int | None
):
    bound = bound_under(now_ns, Deadline(now_ns + lead_ns), timeout_ms, grace_ms, reserve_ms)
    assert bound.bell is not None
    assert bound.limit_ms == bound.bell.remaining_ms(now_ns) >= 0


@given(instants, leads_ns, limits, limits, reserves)
def test_the_owner_is_whoever_set_the_bell(
    now_ns: int, lead_ns: int, timeout_ms: int, grace_ms: int, reserve_ms: int | None
):
    parent = Deadline(now_ns + lead_ns)
    bound = bound_under(now_ns, parent, timeout_ms, grace_ms, reserve_ms)
    reserve_ns = reserve_ms_for(parent.remaining_ms(now_ns), reserve_ms) * NS_PER_MS
    own_ns = now_ns + timeout_ms * NS_PER_MS
    assert bound.bell is not None
    if timeout_ms and own_ns <= parent.at_ns - reserve_ns:
        assert (bound.owner, bound.limit_ms, bound.bell.at_ns) == ("own", timeout_ms, own_ns)
    else:
        assert (bound.owner, bound.bell.at_ns) == ("caller", parent.at_ns - reserve_ns)


@given(instants, some_time, some_time)
def test_far_from_the_parents_deadline_a_child_is_bound_as_if_it_were_alone(
    now_ns: int, timeout_ms: int, grace_ms: int
):
    parent = Deadline.after_ms(now_ns, timeout_ms + grace_ms + 2 * DEFAULT_RESERVE_MS)
    assert bound_under(now_ns, parent, timeout_ms, grace_ms, None) == bound_under(
        now_ns, None, timeout_ms, grace_ms, None
    )


@given(instants, some_time, some_time)
def test_near_the_parents_deadline_the_grace_shrinks_to_half_the_reserve(now_ns: int, left_ms: int, grace_ms: int):
    parent = Deadline.after_ms(now_ns, left_ms)
    bound = bound_under(now_ns, parent, MAX_MS, grace_ms, None)
    assert bound.grace_ms == min(grace_ms, reserve_ms_for(left_ms) * NS_PER_MS // 2 // NS_PER_MS)


def generations() -> st.SearchStrategy[list[tuple[int, int, int, int | None]]]:
    """For each generation: how long after its parent it starts (ns), timeout, grace, reserve."""
    return st.lists(st.tuples(st.integers(0, 10**10), limits, limits, reserves), min_size=2, max_size=8)


@given(instants, some_time, generations())
def test_through_any_number_of_generations_nobody_outlives_an_ancestor(
    now_ns: int, root_ms: int, family: list[tuple[int, int, int, int | None]]
):
    """Each child starts later than its parent and takes the parent's bell for its own parent's deadline."""
    deadline = Deadline.after_ms(now_ns, root_ms)
    for later_ns, timeout_ms, grace_ms, reserve_ms in family:
        now_ns += later_ns
        bound = bound_under(now_ns, deadline, timeout_ms, grace_ms, reserve_ms)
        assert bound.bell is not None and bound.kill_ns is not None
        assert bound.bell.at_ns <= deadline.at_ns
        assert bound.kill_ns <= deadline.at_ns, "killed only after the caller's own bell"
        deadline = bound.bell


@given(instants, some_time, limits, limits)
def test_a_grandchild_through_a_child_is_never_later_than_a_child_would_be(
    now_ns: int, root_ms: int, child_ms: int, timeout_ms: int
):
    root = Deadline.after_ms(now_ns, root_ms)
    child = bound_under(now_ns, root, child_ms, 0, None)
    through_child = bound_under(now_ns, child.bell, timeout_ms, 0, None)
    direct = bound_under(now_ns, root, timeout_ms, 0, None)
    assert through_child.bell is not None and child.bell is not None and direct.bell is not None
    assert through_child.bell.at_ns <= min(child.bell.at_ns, direct.bell.at_ns)
