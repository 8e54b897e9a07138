"""A client that accepts only a newer revision of the protocol than its server has."""

import asyncio
import json
import os
import sys
from typing import Any

import pytest
from mcp import Client, MCPError, StdioServerParameters

from shotclock.core.errors import Ending
from shotclock.wrap._failures import WrapFailure
from shotclock.wrap._limits import ServerLimits
from shotclock.wrap._messages import REVISION_KEY, encode
from shotclock.wrap._session import ClientSession
from tests.wrap.client import SERVER, connected, failure, wrapped
from tests.wrap.test_session import Lines, ReadyServer

pytestmark = pytest.mark.usefixtures("no_survivors")

NO_ANSWER_S = 60.0
META = {"_meta": {REVISION_KEY: "2026-07-28"}}
REASON = "the client speaks only the revision 2026-07-28 of the protocol, which the server does not have"


def test_the_sdk_client_reads_why_an_older_server_is_of_no_use() -> None:
    async def ask(*options: str) -> tuple[str, str]:
        argv = [sys.executable, "-m", "shotclock", "wrap", "--", *SERVER, *options]
        parameters = StdioServerParameters(command=argv[0], args=argv[1:], env=dict(os.environ))
        async with Client(parameters, mode="2026-07-28", read_timeout_seconds=NO_ANSWER_S) as client:
            with pytest.raises(MCPError) as refused:
                await client.list_tools()
            called = await client.call_tool("echo", {"text": "x"})
            assert called.is_error
            return str(refused.value), called.content[0].text  # type: ignore[union-attr]

    listed, called = asyncio.run(ask())
    assert f"tools/list was answered, but {REASON}" in listed and "a newer server" in listed
    assert f"tool echo was not sent: {REASON}" in called
    listed, called = asyncio.run(ask("--strict"))
    assert listed.startswith("Invalid request parameters. shotclock: ") and REASON in listed
    assert REASON in called


def test_the_first_call_says_that_it_was_answered_and_the_next_is_not_sent() -> None:
    with wrapped(greets=False) as client:
        text, envelope = failure(client.receive(client.call("echo", meta=META["_meta"], text="x"))["result"])
        assert f"was answered, but {REASON}" in text and envelope["meta"]["side_effects"] != "none"
        text, envelope = failure(client.receive(client.call("echo", meta=META["_meta"], text="x"))["result"])
        assert "was not sent" in text and envelope["meta"]["ending"] == "not_started"
        client.greet()  # a client may still choose the older revision
        assert client.text("echo", text="y") == "y"


@pytest.mark.slow
def test_a_client_that_asks_with_discovery_gets_the_error_unchanged_and_falls_back() -> None:
    for options in ([], ["--strict"]):
        with wrapped(greets=False, server=[*SERVER, *options]) as client, connected([*SERVER, *options]) as direct:
            for each in (client, direct):
                each.receive(each.request("server/discover", META, id="probe"))
                each.greet()
                assert each.text("echo", text="x") == "x"
            assert client.lines == direct.lines


class ModernServer(ReadyServer):
    """A server of 2026-07-28 that answers discovery at once, and everything else with an error."""

    def answer_all(self, session: ClientSession) -> None:
        for line in self.lines[:]:
            self.lines.remove(line)
            request = json.loads(line)
            found: Any = {"error": {"code": -32602, "message": "no such tool"}}
            if request["method"] == "server/discover":
                found = {"result": {"resultType": "complete", "supportedVersions": ["2026-07-28"]}}
            session.handle_server_line(encode({"jsonrpc": "2.0", "id": request["id"], **found}))


def test_an_error_of_a_server_of_the_same_revision_passes_unchanged() -> None:
    client, server = Lines(), ModernServer()
    session = ClientSession(ServerLimits(), client, lambda text: None, server)
    for id in (1, 2):
        params = {"name": "x", **META}
        session.handle_client_line(encode({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}))
        server.answer_all(session)
        server.answer_all(session)
        error = {"code": -32602, "message": "no such tool"}
        assert client.lines == [encode({"jsonrpc": "2.0", "id": id, "error": error})]
        client.lines.clear()


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_error_passes_unchanged_if_discovery_is_not_answered(is_lost: bool) -> None:
    client, server = Lines(), ReadyServer()
    session = ClientSession(ServerLimits(), client, lambda text: None, server)
    session.handle_client_line(encode({"jsonrpc": "2.0", "id": 1, "method": "prompts/list", "params": META}))
    line = b'{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"no"}}\n'
    session.handle_server_line(line)
    assert not client.lines and b"server/discover" in server.lines[-1]
    if is_lost:
        session.lose_server(WrapFailure("CONNECTION_LOST", "was lost", Ending.FINISHED), None)
    else:
        session.check_limits(session.next_due_ns)
    assert client.lines == [line]
