"""Messages over stdio that cannot be taken: whoever waits for an answer gets one, under the id it waits for."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shotclock.server.stdio import LONGEST_LINE, Outline
from tests.server.client import ADVERSARIES, MODERN, connected, run, served
from tests.server.test_lifecycle import hear, say

BIG = "y" * (LONGEST_LINE + 1000)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(['"id": 9', "}]", "\\", '\\"']),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["id", "x", '"', "\\"]), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["id", "method", "params", "jsonrpc", "\\", '"}']), VALUES),
    st.booleans(),
    st.integers(1, 40),
)
def test_the_outline_of_a_message_has_its_own_keys_and_nothing_of_what_is_nested(
    message: dict[str, Any], as_ascii: bool, size: int
) -> None:
    text = json.dumps(message, ensure_ascii=as_ascii).encode("utf-8", "surrogatepass")
    outline = Outline()
    for at in range(0, len(text), size):
        outline.read(text[at : at + size])
    assert outline.message() == {
        key: None if isinstance(value, list | dict) else value for key, value in message.items()
    }


def test_the_outline_of_an_endless_message_stays_small() -> None:
    outline = Outline()
    outline.read(b'{"id": 1, "method": "x", "more": "')
    for _ in range(200):
        outline.read(b'\\"' * 10_000)
    outline.read(b'"')
    assert len(outline._text) < 2_000
    for _ in range(200):
        outline.read(b', "a": 1' * 10_000)
    assert len(outline._text) < 40_000
    assert outline.message() is None


@pytest.mark.slow
@pytest.mark.usefixtures("no_survivors")
def test_a_request_that_is_too_long_is_refused_under_its_own_id_and_the_next_one_works() -> None:
    inner = {"name": "noop", "arguments": {"id": 666, "deep": [{"id": 667}], "text": '"id": 668, \\" } ' + BIG}}
    orders = [
        {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": inner},
        {"method": "tools/call", "params": inner, "jsonrpc": "2.0", "id": "late"},
        {"params": inner, "id": 8, "method": "tools/call", "more": [inner], "jsonrpc": "2.0"},
    ]
    with served("serve", ADVERSARIES) as process:
        assert process.stdin is not None
        for request in orders:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            refused = hear(process)
            assert refused["id"] == request["id"]
            assert str(LONGEST_LINE) in refused["error"]["message"]
            say(process, 100, "noop", {"a": 2})
            assert hear(process)["result"]["structuredContent"]["ok"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_survivors")
def test_what_nobody_waits_for_is_not_answered_even_if_it_is_too_long() -> None:
    note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"id": 1, "text": BIG}}
    answer = {"jsonrpc": "2.0", "id": 3, "result": {"text": BIG}}
    with served("serve", ADVERSARIES) as process:
        assert process.stdin is not None
        for message in (note, answer):
            process.stdin.write(json.dumps(message).encode() + b"\n")
        say(process, 100, "noop", {"a": 2})
        assert hear(process)["id"] == 100


@pytest.mark.slow
@pytest.mark.usefixtures("no_survivors")
def test_a_request_that_is_no_proper_message_is_refused_under_its_own_id() -> None:
    deep = '{"jsonrpc": "2.0", "id": 4, "method": "tools/call", "params": ' + '{"a":' * 5000 + "1" + "}" * 5001
    with served("serve", ADVERSARIES) as process:
        assert process.stdin is not None
        for line, id in (('{"jsonrpc": "2.0", "id": 5, "method": 7}', 5), (deep, 4)):
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            assert hear(process)["id"] == id


@pytest.mark.slow
@pytest.mark.usefixtures("no_survivors")
@pytest.mark.parametrize("mode", [MODERN, "legacy"])
def test_a_client_that_sends_too_much_is_told_at_once(mode: str) -> None:
    async def scenario() -> None:
        async with connected("stdio", mode) as (client, _):
            with pytest.raises(Exception, match=str(LONGEST_LINE)):
                await client.call_tool("noop", {"a": BIG})

    run(scenario(), within=25)
