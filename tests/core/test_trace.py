"""Ids of W3C Trace Context: what is read, what is passed over, what is passed on."""

import re

from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.trace import LONGEST_STATE, TraceContext, span_id_of, trace_from_variables

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
hexes = st.text("0123456789abcdef", min_size=16, max_size=16).filter(lambda text: text.strip("0"))


@given(hexes, hexes, hexes, st.booleans())
def test_what_is_written_is_read_again(first: str, second: str, span_id: str, sampled: bool):
    written = TraceContext(first + second, span_id, sampled, "rojo=1")
    assert TraceContext.parse(written.traceparent, "rojo=1") == written
    assert trace_from_variables(written.as_variables()) == written


def test_what_is_no_traceparent_is_nothing():
    for garbage in [
        None,
        7,
        b"00",
        "",
        "garbage",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",
        f"00-{TRACE_ID}0-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"0-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f"00-{TRACE_ID}-{SPAN_ID}-0g",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
        f"00-{TRACE_ID[:-1]}٣-{SPAN_ID}-01",
        f"01-{TRACE_ID}-{SPAN_ID}-01-" + "x" * 10_000,
    ]:
        assert TraceContext.parse(garbage, "rojo=1") is None


@given(st.text())
def test_no_text_is_an_error(text: str):
    TraceContext.parse(text, text)


def test_a_later_version_is_read_as_far_as_it_is_known():
    assert TraceContext.parse(f"cc-{TRACE_ID}-{SPAN_ID}-01-what-the-future-brings") == TraceContext(TRACE_ID, SPAN_ID)
    assert TraceContext.parse(f" 00-{TRACE_ID}-{SPAN_ID}-01 ") == TraceContext(TRACE_ID, SPAN_ID)


def test_only_the_lowest_flag_says_that_it_is_sampled():
    for flags, sampled in [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)]:
        trace = TraceContext.parse(f"00-{TRACE_ID}-{SPAN_ID}-{flags}")
        assert trace is not None and trace.sampled is sampled


def test_a_state_that_no_header_could_carry_is_left_out_alone():
    for state in ["a=1\nEvil: yes", "a=ä", "a=" + "1" * LONGEST_STATE, 7, None]:
        assert TraceContext.parse(f"00-{TRACE_ID}-{SPAN_ID}-01", state) == TraceContext(TRACE_ID, SPAN_ID)


def test_each_call_of_a_process_has_a_span_of_its_own():
    spans = {span_id_of(f"ffffffffffff-{number:x}") for number in range(1, 200_000, 7)}
    assert len(spans) == len(range(1, 200_000, 7))
    assert all(re.fullmatch("[0-9a-f]{16}", span) and span.strip("0") for span in list(spans)[:100])


def test_the_span_of_a_call_is_its_number_added_to_the_process():
    for number, span_id in [
        ("1", "00000000abcd0001"),
        ("ffff", "00000000abcdffff"),
        ("10000", "00000000abce0000"),
        ("fffff", "00000000abdcffff"),
    ]:
        assert span_id_of(f"00000000abcd-{number}") == span_id
