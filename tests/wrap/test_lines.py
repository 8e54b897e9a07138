"""Lines of any length are split, read at both ends and given other ids, without a change to any other byte."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shotclock.wrap._lines import END_SIZE, LineSplitter, LongLine
from shotclock.wrap._messages import key_of, read_line, read_long_line

IDS = st.one_of(st.integers(), st.text(max_size=30))
# Texts that try to look like members of the outermost object.
TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(['","id":7}', '\\","id":7', '{"id":7}', '"id":7,"jsonrpc":"2.0"}', "\\", '\\"', "}\n", ',"id":7}']),
)
VALUES = st.recursive(TEXTS | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))


LONGEST = 2 * END_SIZE  # of these tests


def split(stream: bytes, sizes: list[int]) -> list[bytes | LongLine]:
    splitter, lines = LineSplitter(LONGEST), []
    while stream:
        size = sizes.pop() if sizes else len(stream)
        lines += splitter.split(stream[:size])
        stream = stream[size:]
    return [*lines, *splitter.finish()]


@given(
    lengths=st.lists(st.sampled_from([0, 1, 100, LONGEST - 1, LONGEST, 5 * LONGEST]), max_size=5),
    sizes=st.lists(st.integers(1, 2 * LONGEST), max_size=20),
)
def test_lines_are_whole_up_to_the_bound_and_of_longer_ones_both_ends_are_kept(
    lengths: list[int], sizes: list[int]
) -> None:
    lines = [bytes(65 + place % 26 for place in range(length)) + b"\n" for length in lengths]
    found = split(b"".join(lines), sizes)
    assert len(found) == len(lines)
    for line, seen in zip(lines, found, strict=True):
        if len(line) <= LONGEST:
            assert seen == line
        else:
            assert isinstance(seen, LongLine) and seen.size == len(line)
            assert line.startswith(seen.head) and line.endswith(seen.tail)
            assert END_SIZE <= len(seen.head) and min(END_SIZE, len(line)) <= len(seen.tail) <= LONGEST + len(line)


@given(id=IDS, value=VALUES, is_last=st.booleans(), is_compact=st.booleans())
def test_the_id_of_a_message_is_replaced_and_nothing_else(id: Any, value: Any, is_last: bool, is_compact: bool) -> None:
    ends = ({"jsonrpc": "2.0", "id": id}, {"result": value})
    content = {**ends[1], **ends[0]} if is_last else {**ends[0], **ends[1]}
    line = json.dumps(content, separators=(",", ":") if is_compact else None).encode() + b"\n"
    message = read_line(line)
    assert message is not None and message.key == key_of(id)
    changed = message.with_id("fresh")
    assert changed is not None and json.loads(changed) == {**content, "id": "fresh"}
    back = read_line(changed)
    assert back is not None and json.loads(back.with_id(id) or b"") == content


@given(id=IDS, name=st.text(max_size=20), value=VALUES, is_request=st.booleans(), is_last=st.booleans())
def test_of_a_line_that_is_too_long_the_id_and_the_method_are_read(
    id: Any, name: str, value: Any, is_request: bool, is_last: bool
) -> None:
    ends = {"jsonrpc": "2.0", "id": id} | ({"method": "tools/call"} if is_request else {})
    large = {"name": name, "value": value, "long": "é" * LONGEST}
    large = {"params": large} if is_request else {"result": large}
    line = json.dumps({**large, **ends} if is_last else {**ends, **large}, separators=(",", ":")).encode() + b"\n"
    (seen,) = split(line, [])
    assert isinstance(seen, LongLine)
    message = read_long_line(seen)
    assert message.key == key_of(id) and message.method == ("tools/call" if is_request else None)
    assert message.is_request is is_request and message.is_answer is not is_request


def test_members_of_inner_objects_are_not_taken_for_those_of_a_long_line() -> None:
    for tail in ('"}],"id":7}}', '\\",\\"id\\":7}"}', '"},"id":7},{}]}', '","id":7'):
        assert LongLine(b'{"jsonrpc":"2.0","result":{', tail.encode() + b"\n", 1).read_members() == {"jsonrpc": "2.0"}


def test_other_text_is_no_message() -> None:
    for text in (b"[1,2]", b"42", b'"text"', b"{}", b"null", b"[" * 50_000, b'{"jsonrpc":"1.0","id":1}', b"\xff\xfe"):
        assert read_line(text) is None


def test_another_id_leaves_every_other_byte_as_it_was() -> None:
    for line, changed in (
        (
            b'{"jsonrpc":"2.0","id":1,"result":{"n":1.0e3,"id":1}}\n',
            b'{"jsonrpc":"2.0","id":"x","result":{"n":1.0e3,"id":1}}\n',
        ),
        (
            b'{"result": [1e400, "\\u00e9"], "id": "a" , "jsonrpc": "2.0"}\n',
            b'{"result": [1e400, "\\u00e9"], "id": "x" , "jsonrpc": "2.0"}\n',
        ),
    ):
        message = read_line(line)
        assert message is not None and message.with_id("x") == changed
