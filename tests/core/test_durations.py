"""Durations: everything DESIGN §1 writes is read, everything else is refused with a reason."""

import math
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shotclock.core.limits import MAX_MS, DurationError, format_duration, in_seconds, parse_duration_ms

S, M, H, D = 1000, 60_000, 3_600_000, 86_400_000
UNITS = {"d": D, "h": H, "m": M, "s": S, "ms": 1}

WRITTEN = {
    "0": 0,
    "0ms": 0,
    "0s": 0,
    "0h0m0s": 0,
    "PT0S": 0,
    "1ms": 1,
    "500ms": 500,
    "30s": 30 * S,
    "5m": 5 * M,
    "90m": 90 * M,
    "1h30m": 90 * M,
    "2d": 2 * D,
    "1d2h3m4s5ms": D + 2 * H + 3 * M + 4 * S + 5,
    "1m500ms": M + 500,
    "1.5s": 1500,
    "1.1s": 1100,
    "0.001s": 1,
    "0.1h": 6 * M,
    "1.5h30m": 2 * H,
    "007s": 7 * S,
    "3000000000ms": 3_000_000_000,
    "3650d": MAX_MS,
    f"{MAX_MS}ms": MAX_MS,
    " 30s ": 30 * S,
    "\t5m\n": 5 * M,
    "PT30S": 30 * S,
    "PT5M": 5 * M,
    "PT1H": H,
    "PT1H30M": 90 * M,
    "PT0.5S": 500,
    "PT1.5H": 90 * M,
    "P1D": D,
    "P1DT12H": D + 12 * H,
    "P1DT2H3M4.005S": D + 2 * H + 3 * M + 4005,
}

REFUSED = {
    "nothing": "",
    "blank": "   ",
    "a word": "soon",
    "a unit alone": "s",
    "a unit alone, ms": "ms",
    "a bare number": "30",
    "a bare fraction": "1.5",
    "a bare signed number": "+30",
    "negative": "-5s",
    "negative and bare": "-5",
    "negative ISO": "-PT5S",
    "negative part": "1h-5m",
    "signed": "+5s",
    "not a number": "nan",
    "infinite": "inf",
    "minus infinite": "-Infinity",
    "not a number of seconds": "nans",
    "infinite seconds": "infs",
    "exponent": "1e3s",
    "bare exponent": "1e3",
    "overflowing exponent": "1e400",
    "hexadecimal": "0x10s",
    "underscores": "1_000s",
    "decimal comma": "1,5s",
    "no digit before the point": ".5s",
    "no digit after the point": "5.s",
    "two points": "1.5.5s",
    "one unit twice": "1s1s",
    "smallest first": "30m1h",
    "ms before s": "1ms1s",
    "space inside": "1h 30m",
    "space before the unit": "30 s",
    "upper case unit": "30S",
    "upper case M": "5M",
    "a long word for it": "30sec",
    "years": "1y",
    "weeks": "1w",
    "microseconds": "10us",
    "finer than a millisecond": "0.5ms",
    "finer than a millisecond, in seconds": "1.0001s",
    "ISO without anything": "P",
    "ISO with T only": "PT",
    "ISO ending in T": "P1DT",
    "ISO without T": "P1H",
    "ISO years": "P1Y",
    "ISO months": "P1M",
    "ISO weeks": "P1W",
    "ISO without unit": "PT30",
    "ISO twice": "PT1S1S",
    "ISO smallest first": "PT1M1H",
    "ISO in lower case": "pt30s",
    "ISO and compact": "PT1H30m",
    "longer than ten years": "3651d",
    "a millisecond too long": f"{MAX_MS + 1}ms",
    "past 64 bits": "99999999999999999999s",
    "very long": "9" * 100_000,
    "very long, with a unit": "0" * 100_000 + "1s",
    "very long nonsense": "x" * 1_000_000,
    "many parts": "1s" * 50_000,
    "Arabic digits": "٣٠s",
    "full-width digits": "３０s",
    "superscript": "5²s",
    "Arabic digits, bare": "٣٠",
    "NUL": "30s\0",
    "a lone surrogate": "30\udc80s",
}


def outcome_of(value: object, bare: str | None = None) -> int | None:
    """The duration, or None where it was refused as it should be: with a reason a person can read."""
    try:
        ms = parse_duration_ms(value, bare=bare)
    except DurationError as error:
        assert 10 < len(str(error)) < 250
        return None
    assert type(ms) is int
    assert 0 <= ms <= MAX_MS
    return ms


def test_every_form_people_write_is_read():
    for text, ms in WRITTEN.items():
        assert parse_duration_ms(text) == ms


def test_what_is_not_surely_a_duration_is_refused():
    for text in REFUSED.values():
        assert outcome_of(text) is None


def test_knowing_the_unit_of_bare_numbers_makes_nothing_else_a_duration():
    for name in [name for name in REFUSED if "bare" not in name]:
        assert outcome_of(REFUSED[name], bare="s") is None


def test_a_bare_number_is_refused_with_the_two_things_it_could_mean():
    for text in ["30", "1.5", "+30", "1000000"]:
        with pytest.raises(DurationError, match=r"has no unit: write .+s or .+ms"):
            parse_duration_ms(text)


@given(st.integers(0, MAX_MS))
@example(0)
@example(1)
@example(999)
@example(1000)
@example(60_000)
@example(2**31)
@example(2**32)
@example(3_000_000_000)
@example(MAX_MS)
def test_what_is_formatted_parses_back_to_the_same_milliseconds(ms: int):
    text = format_duration(ms)
    assert text.isascii() and " " not in text
    assert parse_duration_ms(text) == ms


@given(st.integers(1, MAX_MS))
def test_a_negative_span_is_formatted_but_never_accepted(ms: int):
    assert format_duration(-ms) == "-" + format_duration(ms)
    assert outcome_of(format_duration(-ms)) is None


@given(st.dictionaries(st.sampled_from(list(UNITS)), st.integers(0, 10_000), min_size=1))
def test_the_parts_add_up_when_each_unit_comes_once_and_the_largest_first(parts: dict[str, int]):
    text = "".join(f"{parts[unit]}{unit}" for unit in UNITS if unit in parts)
    total = sum(count * UNITS[unit] for unit, count in parts.items())
    assert outcome_of(text) == (total if total <= MAX_MS else None)


@given(st.permutations(list(UNITS)), st.integers(2, 5))
def test_any_other_order_of_units_is_refused(order: list[str], size: int):
    chosen = order[:size]
    in_order = chosen == sorted(chosen, key=list(UNITS).index)
    assert (outcome_of("".join(f"1{unit}" for unit in chosen)) is not None) == in_order


@given(st.integers(0, 3649), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59_999))
def test_iso_and_compact_say_the_same(days: int, hours: int, minutes: int, ms: int):
    iso = parse_duration_ms(f"P{days}DT{hours}H{minutes}M{ms // 1000}.{ms % 1000:03d}S")
    assert iso == parse_duration_ms(f"{days}d{hours}h{minutes}m{ms}ms")


@given(st.integers(0, 10**6), st.integers(0, 10**9 - 1), st.sampled_from(list(UNITS)))
def test_a_fraction_is_exact_or_refused_never_rounded(whole: int, billionths: int, unit: str):
    exact = (whole * 10**9 + billionths) * UNITS[unit]
    fits = exact % 10**9 == 0 and exact // 10**9 <= MAX_MS
    assert outcome_of(f"{whole}.{billionths:09d}{unit}") == (exact // 10**9 if fits else None)


DURATION_LIKE = st.text(alphabet="0123456789.,+-_ PTYWDHMSdhmsuinfaeEX٣３²\0\udc80", max_size=80)
ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(ANY_TEXT | DURATION_LIKE, st.sampled_from([None, "ms", "s", "m", "h", "d"]))
def test_arbitrary_text_is_a_duration_in_range_or_refused_and_nothing_else(text: str, bare: str | None):
    outcome_of(text, bare)


@given(st.floats() | st.integers() | st.integers(-(10**30), 10**30), st.sampled_from(["ms", "s", "m", "h", "d"]))
@example(10**400, "s")
@example(-(10**400), "s")
def test_arbitrary_numbers_are_durations_in_range_or_refused_and_nothing_else(number: float, bare: str):
    ms = outcome_of(number, bare)
    if ms is not None:
        assert ms == pytest.approx(number * UNITS[bare], abs=0.5)


def test_an_integer_too_long_to_be_written_down_is_refused_like_any_other():
    for sign in [1, -1]:
        for bare in [None, "ms", "s"]:
            # Python will not turn it into digits, not even for the message that refuses it.
            assert outcome_of(sign * 10**5000, bare) is None


@given(st.floats() | st.integers())
def test_a_number_without_a_unit_is_refused_unless_it_is_zero(number: float):
    assert outcome_of(number) == (0 if number == 0 else None)


@given(st.integers(0, MAX_MS), st.sampled_from(list(UNITS)))
def test_a_bare_number_in_a_known_unit_is_the_same_as_writing_the_unit(number: int, unit: str):
    expected = outcome_of(f"{number}{unit}")
    assert outcome_of(number, unit) == expected
    assert outcome_of(str(number), unit) == expected


def test_bare_numbers_are_read_in_the_unit_their_field_has():
    for number, bare, ms in [
        (30, "s", 30_000),
        (30, "ms", 30),
        (1.5, "s", 1500),
        ("1.5", "s", 1500),
        (0.3, "s", 300),
        (1.001, "s", 1001),
    ]:
        assert parse_duration_ms(number, bare=bare) == ms


def test_a_written_unit_wins_over_the_one_bare_numbers_have():
    for unit in ["ms", "s"]:
        assert parse_duration_ms("2m", bare=unit) == 120_000
        assert parse_duration_ms("PT2M", bare=unit) == 120_000


def test_numbers_no_clock_can_show_are_refused():
    for value in [math.nan, math.inf, -math.inf, -1, -0.001, 1e308, 0.0001]:
        for bare in [None, "ms", "s"]:
            assert outcome_of(value, bare) is None


def test_a_boolean_is_not_a_number_of_anything():
    for value in [True, False]:
        for bare in [None, "ms", "s"]:
            assert outcome_of(value, bare) is None


def test_other_types_are_refused_by_name():
    for value in [None, b"30s", [30], {"s": 30}, (), object(), timedelta, 1j]:
        for bare in [None, "s"]:
            assert outcome_of(value, bare) is None


@given(st.integers(0, MAX_MS))
def test_a_timedelta_of_whole_milliseconds_is_taken_exactly(ms: int):
    assert parse_duration_ms(timedelta(milliseconds=ms)) == ms


@given(st.timedeltas())
def test_any_timedelta_is_a_duration_in_range_or_refused(span: timedelta):
    outcome_of(span)


@given(st.integers(0, MAX_MS - 1), st.integers(1, 999))
@example(86_400_000, 500)
def test_a_timedelta_finer_than_a_millisecond_is_refused_however_long_it_is(ms: int, microseconds: int):
    assert outcome_of(timedelta(milliseconds=ms, microseconds=microseconds)) is None


def test_a_time_in_words_has_one_second_and_two_seconds():
    assert [in_seconds(ms) for ms in (1000, 2000, 2500, 500, 0)] == [
        "1 second", "2 seconds", "2.5 seconds", "0.5 seconds", "0 seconds",
    ]  # fmt: skip


def test_a_negative_time_is_told_as_it_was_written_with_what_to_write():
    for written in ["-1", -1, -1.0]:
        with pytest.raises(
            DurationError, match=r"^-1 is negative: write a time above 0, as in 30s, or 0 for no limit$"
        ):
            parse_duration_ms(written, bare="s")
