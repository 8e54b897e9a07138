"""Wall-clock instants: exact arithmetic, no mixing with other clocks, a rendering that reads back."""

import pickle
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.limits import LATEST_MS, Deadline, WallTime

instants = st.integers(0, LATEST_MS).map(WallTime)


@given(instants, instants)
def test_the_difference_of_two_instants_leads_from_one_to_the_other(a: WallTime, b: WallTime):
    assert a + (b - a) == b
    assert b - (b - a) == a
    assert (a < b) == (b - a > 0)
    assert a.since_ms(b) == max(0, a - b)


@given(instants)
def test_what_is_rendered_reads_back_as_the_same_millisecond(at: WallTime):
    assert at.iso().endswith("Z") and len(at.iso()) == len("2026-11-15T00:00:00.000Z")
    assert round((datetime.fromisoformat(at.iso()) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000) == at.ms
    assert str(at) == at.iso()
    assert pickle.loads(pickle.dumps(at)) == at


@given(st.integers(0, LATEST_MS * 1_000_000))
def test_a_nanosecond_clock_is_rounded_down(ns: int):
    assert 0 <= ns - WallTime.of_ns(ns).ms * 1_000_000 < 1_000_000


@pytest.mark.parametrize("ms", [-1, LATEST_MS + 1, 2**63])
def test_what_lies_outside_four_digit_years_is_refused(ms: int):
    with pytest.raises(ValueError, match="1970"):
        WallTime(ms)


@pytest.mark.parametrize("ms", [1.0, True, "1", None])
def test_only_whole_milliseconds_are_taken(ms: object):
    with pytest.raises(TypeError):
        WallTime(ms)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [Deadline(5), 1.5, "1", True])
def test_other_clocks_and_other_numbers_do_not_mix_in(other: object):
    at = WallTime(1000)
    for mixed in (lambda: at + other, lambda: at - other, lambda: at < other):  # type: ignore[operator]
        with pytest.raises(TypeError):
            mixed()
    assert at != other


def test_arithmetic_that_leaves_the_range_is_an_error_and_not_another_time():
    with pytest.raises(ValueError):
        WallTime(LATEST_MS) + 1
    with pytest.raises(ValueError):
        WallTime(0) - 1
