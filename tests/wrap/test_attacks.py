"""Attacks on the policy and the pins of wrapped servers: lines that two parsers read differently."""

import json
from pathlib import Path

import pytest

from tests.wrap.client import wrapped
from tests.wrap.test_policy import Server, answer_to

pytestmark = pytest.mark.usefixtures("no_survivors")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    return Server(tmp_path)


CALL = '"params":{"name":"write_file","arguments":{}}'
HARMLESS = '"params":{"name":"read_file","arguments":{}}'
LONG = json.dumps("x" * 100_000)
DISGUISED = {
    "method twice": f'{{"jsonrpc":"2.0","id":99,"method":"tools/call","method":"ping",{CALL}}}',
    "params twice": f'{{"jsonrpc":"2.0","id":99,"method":"tools/call",{CALL},{HARMLESS}}}',
    "name twice": '{"jsonrpc":"2.0","id":99,"method":"tools/call","params":{"name":"write_file","name":"read_file"}}',
    "an escaped key": f'{{"jsonrpc":"2.0","id":99,"method":"tools/call","\\u006dethod":"ping",{CALL}}}',
    "another case": f'{{"jsonrpc":"2.0","id":99,"Method":"tools/call",{CALL}}}',
    "both cases": f'{{"jsonrpc":"2.0","id":99,"method":"ping","METHOD":"tools/call",{CALL}}}',
    "a letter that folds to s": f'{{"jsonrpc":"2.0","id":99,"method":"tools/call",{HARMLESS},"param\u017f":{{}}}}',
    "another case of a name": '{"jsonrpc":"2.0","id":99,"method":"tools/call","params":{"name":"read","Name":"w"}}',
    "a method in another case": f'{{"jsonrpc":"2.0","id":99,"method":"Tools/Call",{CALL}}}',
    "a method that ends at NUL": f'{{"jsonrpc":"2.0","id":99,"method":"tools/call\\u0000",{CALL}}}',
    "an answer with a method": f'{{"jsonrpc":"2.0","id":null,"result":{{}},"method":"tools/call",{CALL}}}',
    "a method that is a list": f'{{"jsonrpc":"2.0","id":99,"method":["tools/call"],{CALL}}}',
    "a line inside a line": f'{{"jsonrpc":"2.0","method":"notifications/x","params":\r'
    f'{{"jsonrpc":"2.0","id":99,"method":"tools/call",{CALL}}}\r}}',
    "a name behind a long one": '{"jsonrpc":"2.0","id":99,"method":"tools/call","params":{"name":"read_file",'
    f'"arguments":{{"text":{LONG}}},"name":"write_file"}}}}',
    "a method behind a long part": f'{{"jsonrpc":"2.0","id":99,"method":"ping","x":{LONG},"method":"tools/call"}}',
    "a result before a call": f'{{"jsonrpc":"2.0","id":99,"result":{LONG},"method":"tools/call",{CALL}}}',
    "a byte order mark": f'\ufeff{{"jsonrpc":"2.0","id":99,"method":"tools/call",{CALL}}}',
}


def test_a_line_that_parsers_read_differently_does_not_pass_a_policy(server: Server) -> None:
    with wrapped("--deny", "write_file", server=server.command) as client:
        for what, line in DISGUISED.items():
            client.write(line.encode() + b"\n")
            assert answer_to(client, "read_file") == "allowed"
            (refusal,) = client.others
            assert refusal["error"]["code"] == -32600, what
            client.others.clear()
    methods = {each.get("method") for each in server.received}
    assert methods == {"initialize", "notifications/initialized", "tools/call"}
    assert len(server.calls_of("read_file")) == len(DISGUISED)


def test_a_policy_reads_calls_of_up_to_4_mb_whole(server: Server) -> None:
    with wrapped("--deny", "write_file path=/etc/*", server=server.command) as client:
        assert answer_to(client, "write_file", text="x" * 3_000_000, path="/tmp/a") == "allowed"
        assert "denied by the rule" in answer_to(client, "write_file", text="x" * 3_000_000, path="/etc/a")
        refused = client.receive(client.call("write_file", text="x" * 5_000_000, path="/tmp/a"))
        assert "too long" in refused["error"]["message"]
        assert answer_to(client, "read_file") == "allowed"
    assert [each["path"] for each in server.calls_of("write_file")] == ["/tmp/a"]


def test_the_id_of_an_open_request_cannot_be_used_again(server: Server) -> None:
    with wrapped("--ask", "write_file", server=server.command) as client:
        client.call("write_file", id="same", path="/tmp/a")
        client.call("read_file", id="same")
        assert answer_to(client, "read_file") == "allowed"
        assert "the id of an open request" in client.others[0]["error"]["message"]
    assert len(server.calls_of("read_file")) == 1
