"""What a command wrote, as the envelope shows it: text where it is text, exact bytes where it is not."""

import base64
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shotclock.calls.call import admit
from shotclock.calls.commands import assign, judge
from shotclock.core.limits import Clocks
from shotclock.supervise.command_task import Capture, Captured, CommandReport

GAP = re.compile(r"\n\[… (\d+) bytes left out …\]\n")


def captured(written: bytes, limit: int, cuts: list[int]) -> Captured:
    """As it comes out of a pipe: in pieces that know nothing of characters."""
    capture = Capture(limit, spill_to=None)
    edges = sorted({0, len(written), *(cut % (len(written) + 1) for cut in cuts)})
    for start, stop in pairwise(edges):
        capture.add(written[start:stop])
    return capture.finish()


def shown(kept: Captured) -> tuple[dict[str, Any], set[str]]:
    """The data and the codes of the warnings."""
    admission = admit("exec", Clocks())
    outcome = judge(admission, assign(admission, ["x"]), CommandReport(status=0, stdout=kept))
    assert isinstance(outcome.data, dict)
    return outcome.data, {str(warning["code"]) for warning in outcome.warnings}


limits = st.integers(0, 12) | st.integers(0, 200)
cuts = st.lists(st.integers(0, 10_000), max_size=6)
wide = st.text(st.sampled_from("aé€😀\n\0"), max_size=60) | st.text(max_size=60)


@given(st.binary(max_size=300), limits, cuts)
def test_what_is_kept_is_the_beginning_and_the_end_and_never_more_than_the_limit(
    written: bytes, limit: int, cuts: list[int]
):
    kept = captured(written, limit, cuts)
    assert kept.total == len(written)
    assert len(kept.head) + len(kept.tail) == min(limit, len(written))
    assert written.startswith(kept.head) and written.endswith(kept.tail)
    assert kept.truncated == (len(written) > limit)


@pytest.mark.slow
@given(wide, limits, cuts)
@example("😀😀", 2, [])
@example("😀😀", 3, [])
@example("😀😀", 6, [])
@example("€€", 1, [])
@example("é" * 10, 9, [])
def test_text_is_never_called_anything_else_wherever_it_was_cut(text: str, limit: int, cuts: list[int]):
    kept = captured(text.encode(), limit, cuts)
    data, warnings = shown(kept)
    assert "OUTPUT_NOT_UTF8" not in warnings
    assert "stdout_base64" not in data
    if not kept.truncated:
        assert data["stdout"] == text


@given(st.text(st.sampled_from("aé€😀\n"), max_size=60), limits, cuts)
def test_what_is_left_out_is_counted_to_the_byte_and_no_character_is_broken(text: str, limit: int, cuts: list[int]):
    kept = captured(text.encode(), limit, cuts)
    data, warnings = shown(kept)
    if not kept.truncated:
        assert "OUTPUT_TRUNCATED" not in warnings
        return
    assert "OUTPUT_TRUNCATED" in warnings
    assert data["stdout_bytes"] == len(text.encode())
    [gap] = GAP.finditer(data["stdout"])
    head, tail = data["stdout"][: gap.start()], data["stdout"][gap.end() :]
    assert text.startswith(head) and text.endswith(tail)
    assert len(head.encode()) + int(gap[1]) + len(tail.encode()) == len(text.encode())
    # A cut costs at most the character it went through, on each side.
    assert len(head.encode()) + len(tail.encode()) >= limit - 6


@given(st.binary(max_size=300) | st.text(max_size=50).map(lambda text: text.encode("utf-16")), limits, cuts)
def test_arbitrary_bytes_are_shown_without_fault_and_kept_exactly(written: bytes, limit: int, cuts: list[int]):
    kept = captured(written, limit, cuts)
    data, warnings = shown(kept)
    assert isinstance(data["stdout"], str)
    data["stdout"].encode("utf-8")
    assert ("stdout_base64" in data) == ("OUTPUT_NOT_UTF8" in warnings)
    if "stdout_base64" in data:
        assert base64.b64decode(data["stdout_base64"], validate=True) == kept.head + kept.tail
    elif not kept.truncated:
        assert data["stdout"].encode() == written, "said to be exact, and is not"


@given(st.binary(max_size=20), st.binary(max_size=20), st.integers(0, 100))
def test_any_head_and_tail_at_all_can_be_shown(head: bytes, tail: bytes, dropped: int):
    shown(Captured(head, tail, len(head) + len(tail) + dropped))
