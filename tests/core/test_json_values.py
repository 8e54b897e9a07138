"""Values read and written: nothing is another value afterwards."""

import json
import math
import struct
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shotclock.core.json_values import as_plain, as_text, is_true, read_json, read_printed

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=20,
)


def test_what_is_neither_an_object_nor_a_list_stays_the_text_that_was_printed() -> None:
    for text in [
        "3.10",
        "12e4567",
        "1234e56",
        "10.00",
        "9007199254740993.0",
        "5",
        "-1",
        "true",
        "null",
        '"quoted"',
        "007",
        "",
        "-",
        "{no",
        "[NaN]",
        "[Infinity]",
        "-Infinity",
        "{'a': 1}",
        "[1] [2]",
        "  spaces  ",
        "a\nb",
    ]:
        assert read_printed(text) == (text, ()) and read_printed(f"{text}\n") == (text, ())


def test_objects_and_lists_are_read() -> None:
    for text, value in [
        ('{"a": 1}\n', {"a": 1}),
        ("[1]\n\n", [1]),
        ("{}", {}),
        (" [3.10, 1e5, -0.0] ", [3.1, 1e5, -0.0]),
    ]:
        assert read_printed(text) == (value, ())


def test_a_number_that_cannot_be_held_stays_the_text_that_was_printed() -> None:
    for literal in [
        "1e999",
        "-1e400",
        "1e-400",
        "9007199254740993.0",
        "12345678901234567890.123456",
        "1e-99999999999999999999",
        "9" * 5_000,
        "-" + "1" * 10_000,
        "0." + "3" * 5_000,
    ]:
        assert read_printed(f'{{"v": {literal}, "w": [1]}}') == ({"v": literal, "w": [1]}, (literal,))
        assert read_json(literal) == (literal, (literal,))


@given(st.decimals(allow_nan=False, allow_infinity=False) | st.floats(allow_nan=False, allow_infinity=False))
@example(0.1)
@example(5e-324)
@example(2.0**-24)
@example(Decimal("0.10000000000000000555"))
def test_a_number_that_is_read_is_the_number_that_was_printed(number: Decimal | float) -> None:
    literal = str(number).replace("E", "e")
    ((held,), kept) = read_json(f"[{literal}]")
    if kept:
        assert held == literal
    else:
        digits = max(1, len(Decimal(literal).as_tuple().digits))
        assert Decimal(literal) in (Decimal(format(held, f".{digits}g")), Decimal(repr(held)))


@given(st.binary(min_size=8, max_size=8))
@example(struct.pack("<d", 2.0**-24))
def test_every_float_is_read_back_in_all_usual_ways_to_print_it(data: bytes) -> None:
    (number,) = struct.unpack("<d", data)
    if math.isfinite(number):
        for literal in (repr(number), f"{number:.17g}", f"{number:.20e}"):
            assert read_json(f"[{literal}]") == ([number], ()), literal


@given(JSON_VALUES)
def test_what_is_more_than_text_renders_back_as_the_json_it_was(value: Any) -> None:
    text = as_text(value)
    text.encode() if not isinstance(value, str) else None  # half a character is escaped
    if isinstance(value, dict | list):
        assert read_printed(text) == (value, ())
    elif not isinstance(value, str) and value is not None:
        assert json.loads(text) == value
    assert as_plain(value) == (value, ())


def test_what_is_not_json_is_made_so_or_refused() -> None:
    assert as_plain(range(3)) == ([0, 1, 2], ())
    assert as_plain({1: (True, None), None: {"a": {2}}.items()}) == ({"1": [True, None], "": [["a", [2]]]}, ())
    assert as_plain([math.inf, -math.inf]) == (["inf", "-inf"], ("inf", "-inf"))
    assert as_plain(10**5_000) == (f"1{'0' * 5_000}", (f"1{'0' * 5_000}",))
    deep: Any = 1
    for _ in range(250):
        deep = [deep]
    for wrong in (deep, b"bytes", object(), len):
        with pytest.raises(ValueError, match=r"deep|cannot be passed on"):
            as_plain(wrong)


def test_text_that_says_no_is_not_true() -> None:
    assert not any(map(is_true, ("", "false", "False\n", "0", "no", "null", 0, [], None, False)))
    assert all(map(is_true, ("true", "yes", "1", "x", [0], 2, True)))
