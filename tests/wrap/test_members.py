"""Members of messages, found by windows."""

import json
import random

import pytest

from shotclock.wrap import members as scanner
from shotclock.wrap.members import find_members
from shotclock.wrap.payloads import MOST_IN_MEMORY, Payload

MESSAGES = [
    {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "x", "arguments": {"id": 1, "a": [{}]}}},
    {"result": {"content": ['"', "\\", '\\"', "}{", "é\u2028😀", ""], "_meta": {"k": {"n": None}}}, "id": "a\"b"},
    {"params": {"_meta": {"progressToken": -1.5e3, "other": [True, {}]}, "name": "\n"}, "method": "m", "id": None},
    {},
]  # fmt: skip


def members_of(content: object) -> dict[tuple[str, ...], object]:
    found: dict[tuple[str, ...], object] = {}

    def walk(item: object, path: tuple[str, ...]) -> None:
        if isinstance(item, dict) and path in scanner._OPENED:
            for name, each in item.items():
                walk(each, (*path, name))
        elif path not in scanner._OPENED:
            found[path] = item

    walk(content, ())
    return found


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("window", [2, 3, 5, 64, 10_000])
def test_members_are_found_wherever_a_window_ends(
    message: object, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner, "WINDOW", window)
    for text in (json.dumps(message), json.dumps(message, indent=2, ensure_ascii=False)):
        data = text.encode()
        members = find_members(lambda at, size, data=data: data[at : at + size])
        assert {path: json.loads(each) for path, each in members.texts.items()} == members_of(message)
        for path, (start, end) in members.spans.items():
            json.loads(data[start:end])
            assert path not in members.texts or members.texts[path] == data[start:end]


@pytest.mark.parametrize("window", [2, 7, 10_000])
def test_a_text_that_is_no_object_is_refused(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "WINDOW", window)
    for text in (b"", b"[]", b"1", b"{", b'{"a"', b'{"a":', b'{"a":}', b'{"a":1', b'{"a":1,}', b'{"a":"b', b'{"a":"\\',
                 b'{"a":[{}}', b'{"a":1}}', b'{"a":1 "b":2}', b'{a:1}', b'{"params":{"a":1}', b'{"a":["x'):  # fmt: skip
        with pytest.raises(ValueError):
            find_members(lambda at, size, text=text: text[at : at + size])


def test_the_last_one_of_equal_names_counts() -> None:
    members = Payload(b'{"id":1,"params":{"name":"a","_meta":{"x":1}},"params":{"name":"b"},"id":2}').scan()
    assert members is not None
    assert members.read("id") == 2 and members.read("params", "name") == "b"
    assert ("params", "_meta", "x") not in members


def test_a_replaced_member_leaves_all_other_bytes_as_they_were() -> None:
    filler = "".join(random.Random(1).choices('ab\\"é\n{}', k=MOST_IN_MEMORY))
    for arguments in ({}, {"filler": filler}):
        content = {"id": 1, "params": {"arguments": arguments, "_meta": {"progressToken": "t"}}, "jsonrpc": "2.0"}
        data = json.dumps(content, ensure_ascii=False).encode()
        payload = Payload()
        for at in range(0, len(data), 10_000):
            payload.add(data[at : at + 10_000])
        members = payload.scan()
        assert members is not None
        payload.replace(members.spans[("params", "_meta", "progressToken")], b"123")
        payload.replace(members.spans[("id",)], b"99")
        sent = b"".join(payload.pieces())
        assert len(sent) == payload.size
        assert sent == data.replace(b'"t"}', b"123}").replace(b'{"id": 1', b'{"id": 99')
        payload.close()


def test_an_end_of_line_between_members_becomes_a_space() -> None:
    assert b"".join(Payload(b'{\r\n"id": 1\n}').pieces()) == b'{  "id": 1 }'
