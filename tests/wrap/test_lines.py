"""Lines of any length are split, read at both ends and given other ids, without a change to any other byte."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shotclock.wrap.lines import (
    LONGEST_PARSED,
    LinePart,
    LineSplitter,
    Outline,
    error_flag_in_tail,
    id_in_tail,
    read_head,
)
from shotclock.wrap.messages import key_of, read_line, read_long_line

IDS = st.one_of(st.integers(), st.text(max_size=30))
# Texts that try to look like members of the outermost object.
TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(['","id":7}', '\\","id":7', '{"id":7}', '"id":7,"jsonrpc":"2.0"}', "\\", '\\"', "}\n", ',"id":7}']),
)
VALUES = st.recursive(TEXTS | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))


def parts_of(stream: bytes, sizes: list[int]) -> list[tuple[LinePart, bytes]]:
    splitter, parts = LineSplitter(), []
    while stream:
        size = sizes.pop() if sizes else len(stream)
        parts += splitter.split(stream[:size])
        stream = stream[size:]
    return [*parts, *splitter.finish()]


@given(
    lengths=st.lists(st.sampled_from([0, 1, 100, LONGEST_PARSED, LONGEST_PARSED + 1, 3 * LONGEST_PARSED]), max_size=5),
    sizes=st.lists(st.integers(1, 2 * LONGEST_PARSED), max_size=20),
)
def test_pieces_add_up_to_the_stream(lengths: list[int], sizes: list[int]) -> None:
    lines = [b"x" * length + b"\n" for length in lengths]
    rebuilt: list[bytes] = []
    for part, piece in parts_of(b"".join(lines), sizes):
        if part in (LinePart.WHOLE, LinePart.START):
            rebuilt.append(piece)
        else:
            rebuilt[-1] += piece
        assert part is not LinePart.WHOLE or len(piece) <= LONGEST_PARSED
    assert rebuilt == lines


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
    if is_last and is_compact:
        assert id_in_tail(line) == id


@given(id=IDS, name=st.text(max_size=20), value=VALUES)
def test_a_long_request_is_read_at_both_ends(id: Any, name: str, value: Any) -> None:
    arguments = {"value": value, "long": "é" * LONGEST_PARSED}
    first = {"jsonrpc": "2.0", "id": id, "method": "tools/call"}
    params = {"name": name, "_meta": {"progressToken": id}, "arguments": arguments}
    for content in (
        {**first, "params": params},
        {"method": "tools/call", "params": params, "jsonrpc": "2.0", "id": id},
    ):
        parts = parts_of(json.dumps(content, separators=(",", ":")).encode() + b"\n", [])
        assert [part for part, _ in parts] == [LinePart.START, LinePart.END]
        message = read_long_line(parts[0][1])
        assert message is not None and message.method == "tools/call"
        assert message.params["name"] == name and message.meta == {"progressToken": id}
        assert (id_in_tail(parts[1][1]) if message.key is None else message.id) == id


def test_other_text_is_no_message() -> None:
    for text in (b"[1,2]", b"42", b'"text"', b"{}", b"null", b"[" * 50_000, b'{"jsonrpc":"1.0","id":1}', b"\xff\xfe"):
        assert read_line(text) is None
    assert read_long_line(b'{"level":"info","message":"' + b"x" * LONGEST_PARSED) is None
    assert read_long_line(b"x" * LONGEST_PARSED) is None


def test_a_number_that_is_cut_is_not_read() -> None:
    assert read_head(b'{"jsonrpc":"2.0","id":12') == {"jsonrpc": "2.0", "id": None}


def test_the_error_flag_at_the_end_of_a_line_is_that_of_the_result() -> None:
    for tail, expected in (
        ('"}],"isError":true}}', True),
        ('"}], "isError": false}}', False),
        ('"}],"isError":true},"jsonrpc":"2.0","id":5}', True),
        ('"}],"isError":true,"resultType":"complete"},"id":"a","jsonrpc":"2.0"}', True),
        ('"}],"_meta":{"isError":true}}}', None),
        ('"}],"isError":true,"_meta":{}}}', None),
        ('\\"isError\\":true}}"}]}}', None),
        ('\\"}],\\"isError\\":true}}', None),
        ('"}]}}', None),
    ):
        assert error_flag_in_tail(tail.encode() + b"\n") is expected, tail


@given(content=st.dictionaries(TEXTS, VALUES, max_size=5), sizes=st.lists(st.integers(1, 9)), is_ascii=st.booleans())
def test_the_outline_of_a_line_has_its_own_members_only(content: Any, sizes: list[int], is_ascii: bool) -> None:
    rest, outline = json.dumps(content, ensure_ascii=is_ascii).encode(), Outline()
    while rest:
        size = sizes.pop() if sizes else len(rest)
        assert outline.is_closed is (outline.text == b"")
        outline.add(rest[:size])
        rest = rest[size:]
    shown = {name: 0 if isinstance(item, dict | list) else item for name, item in content.items()}
    assert outline.is_closed and json.loads(outline.text) == shown
