"""Messages over stdio that cannot be taken: each is refused, under the id of the request where it begins with it."""

import json

import pytest

from shotclock.apps.server._stdio import LONGEST_LINE
from tests.apps.server.client import ADVERSARIES, MODERN, connected, envelope_on_wire, run, served
from tests.apps.server.test_lifecycle import hear, say

BIG = "y" * (LONGEST_LINE + 1000)


@pytest.mark.slow
@pytest.mark.usefixtures("no_survivors")
def test_a_message_that_is_too_long_is_refused_and_the_next_one_works() -> None:
    inner = {"name": "noop", "arguments": {"id": 666, "deep": [{"id": 667}], "text": '"id": 668, \\" } ' + BIG}}
    refused_under = [
        ({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": inner}, 7),
        ({"method": "tools/call", "id": "early", "params": inner, "jsonrpc": "2.0"}, "early"),
        ({"method": "tools/call", "params": inner, "jsonrpc": "2.0", "id": "late"}, None),
        ({"jsonrpc": "2.0", "id": 3, "result": {"text": BIG}}, None),
    ]
    with served("serve", ADVERSARIES) as process:
        assert process.stdin is not None
        for message, id in refused_under:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            refused = hear(process)
            assert refused["id"] == id
            assert str(LONGEST_LINE) in refused["error"]["message"]
            say(process, 100, "noop", {"a": 2})
            assert envelope_on_wire(hear(process)["result"])["ok"]


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
