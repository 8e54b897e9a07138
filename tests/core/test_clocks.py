"""Clocks: what is said wins, what is unsaid is taken from the next level, and a fault names its clock."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.limits import MAX_MS, ClockKind, Clocks, DurationError, Fired, format_duration

NAMES = ("timeout", "soft", "idle", "queue", "grace", "reserve")
limits = st.none() | st.integers(0, MAX_MS)
clocks = st.builds(Clocks, **{f"{name}_ms": limits for name in NAMES})


def as_said(these: Clocks) -> dict[str, int | None]:
    return {name: getattr(these, f"{name}_ms") for name in NAMES}


@given(clocks, clocks)
def test_what_is_said_wins_and_the_unsaid_comes_from_the_defaults(these: Clocks, defaults: Clocks):
    for name, limit in as_said(these.over(defaults)).items():
        said, fallback = as_said(these)[name], as_said(defaults)[name]
        assert limit == (fallback if said is None else said)


@given(clocks)
def test_laying_clocks_over_silence_or_themselves_changes_nothing(these: Clocks):
    assert these.over(Clocks()) == these
    assert Clocks().over(these) == these
    assert these.over(these) == these


@given(clocks, clocks, clocks)
def test_levels_can_be_laid_over_each_other_in_any_grouping(call: Clocks, operation: Clocks, app: Clocks):
    assert call.over(operation).over(app) == call.over(operation.over(app))


@given(clocks)
def test_an_explicit_zero_is_none_and_not_unsaid(defaults: Clocks):
    none_at_all = Clocks(**{f"{name}_ms": 0 for name in NAMES})
    assert none_at_all.over(defaults) == none_at_all


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, MAX_MS)))
def test_clocks_are_read_from_durations_as_people_write_them(said: dict[str, int]):
    read = as_said(Clocks.of(**{name: format_duration(ms) for name, ms in said.items()}))
    assert read == {name: said.get(name) for name in NAMES}


def test_the_timeout_may_be_given_without_its_name():
    assert Clocks.of("30s") == Clocks(timeout_ms=30_000)


def test_a_bad_duration_is_refused_with_the_name_of_its_clock():
    for name in NAMES:
        for bad in ["soon", "-1s", "30", "1s1s", 30, float("nan"), True, b"1s", ""]:
            with pytest.raises(DurationError, match=rf"^{name}: "):
                Clocks.of(**{other: "1s" for other in NAMES if other != name}, **{name: bad})


@given(clocks)
def test_clocks_can_be_keys_and_cannot_be_changed(these: Clocks):
    assert {these: 1}[Clocks(**{f"{name}_ms": limit for name, limit in as_said(these).items()})] == 1
    with pytest.raises(AttributeError):
        these.timeout_ms = 1  # type: ignore[misc]


@given(st.sampled_from(ClockKind), st.text(), st.integers(0, MAX_MS), st.integers(0, MAX_MS))
def test_the_clock_that_fired_says_its_kind_owner_limit_and_elapsed_time(
    kind: ClockKind, owner: str, limit_ms: int, elapsed_ms: int
):
    said = json.loads(json.dumps(Fired(kind, owner, limit_ms, elapsed_ms).as_context()))
    assert said == {"kind": kind.value, "owner": owner, "limit_ms": limit_ms, "elapsed_ms": elapsed_ms}
