"""Attacks on the policy and the pins of wrapped servers: lines that two parsers read differently."""

import contextlib
import json
import os
import resource
import select
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock.wrap._lines import LONGEST_LINE
from shotclock.wrap._pin_check import MOST_ASKED
from tests.wrap.client import ANSWER_WITHIN_S, wrapped
from tests.wrap.test_policy import TOOLS, Server, answer_to, inbox, wait_for_proposal

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")


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


def test_a_policy_reads_calls_whole(server: Server) -> None:
    with wrapped("--deny", "write_file path=/etc/*", server=server.command) as client:
        assert answer_to(client, "write_file", text="x" * 3_000_000, path="/tmp/a") == "allowed"
        assert "denied by the rule" in answer_to(client, "write_file", text="x" * 3_000_000, path="/etc/a")
        refused = client.receive(client.call("write_file", text="x" * (LONGEST_LINE + 1), path="/tmp/a"))
        assert "was not passed on" in refused["error"]["message"]
        assert answer_to(client, "read_file") == "allowed"
    assert [each["path"] for each in server.calls_of("write_file")] == ["/tmp/a"]


def test_the_id_of_an_open_request_cannot_be_used_again(server: Server) -> None:
    with wrapped("--ask", "write_file", server=server.command) as client:
        client.call("write_file", id="same", path="/tmp/a")
        client.call("read_file", id="same")
        assert answer_to(client, "read_file") == "allowed"
        assert "the id of an open request" in client.others[0]["error"]["message"]
    assert len(server.calls_of("read_file")) == 1


# --- servers -----------------------------------------------------------------------------------------------------

LYING = str(Path(__file__).with_name("lying_server.py"))
TOOL = '{"name":"good","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true}}'
BAD = '"result":{"tools":[{"name":"evil","inputSchema":{"type":"object"}}]}'
LONG_PART = '{"x":"$LONG"}'
LIES = {
    "result twice": f'"id":$ID,{BAD},"result":{{"tools":[{TOOL}]}}',
    "tools twice": f'"id":$ID,"result":{{"tools":[{{"name":"evil"}}],"tools":[{TOOL}]}}',
    "a name twice": '"id":$ID,"result":{"tools":[' + TOOL.replace('"name"', '"name":"evil","name"') + "]}",
    "another case": f'"id":$ID,"result":{{"Tools":[{{"name":"evil"}}],"tools":[{TOOL}]}}',
    "a line inside a line": f'"method":"notifications/x","params":\r{{"jsonrpc":"2.0","id":$ID,{BAD}}}\r',
    "a long member of no meaning": f'"x":{LONG_PART},"id":$ID,{BAD}',
    "a long notification": f'"method":"notifications/x","params":{LONG_PART},"id":$ID,{BAD}',
    "a long answer to another request": f'"id":"open","x":{LONG_PART},"id":$ID,{BAD}',
    "an id that is a list": f'"id":[$ID],{BAD}',
}
# Lines that begin as the answer to a call, and end as the answer to the list that the client asks for next.
FORESEEN = {
    "an id at both ends": f'"id":$ID,"result":{LONG_PART},"id":"next",{BAD}',
    "an id at the end": '"result":{"tools":[{"name":"evil"}],"x":"$LONG"},"id":"next"',
    "a message before the end of its line": f'"x":"\\\\\\"","id":$ID,{BAD},"y":{LONG_PART},"id":"next"}}'
    + " " * 9_000
    + "{",
}


@pytest.fixture
def lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the lines of a server that has been pinned."""
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    file = tmp_path / "lies.json"
    file.write_text("{}")
    with wrapped("--lock", str(tmp_path / "mcp.lock"), server=[sys.executable, LYING, str(file)]) as client:
        client.ask("good")
    return file


def seen(lines: list[bytes]) -> list[Any]:
    """Return the messages among the lines."""
    messages = []
    for line in lines:
        with contextlib.suppress(ValueError):
            messages.append(json.loads(line))
    return messages


@pytest.mark.slow
def test_a_pinned_server_cannot_show_another_definition_to_another_parser(lies: Path) -> None:
    options = ["--lock", str(lies.parent / "mcp.lock"), "--list", "300ms", "--grace", "10s"]
    for what, lie in LIES.items():
        lies.write_text(json.dumps({"tools/list": [f'{{"jsonrpc":"2.0",{lie}}}']}))
        with wrapped(*options, server=[sys.executable, LYING, str(lies)]) as client:
            answer = client.receive(client.request("tools/list"))
            assert "error" in answer or answer["result"] == {"tools": []}, what
            assert client.ask("good") == {"content": []}
            client.request("tools/list", id="open")
            assert b"evil" not in b"".join(line for line in client.lines if b"shotclock" not in line), what


@pytest.mark.slow
def test_a_long_line_cannot_become_the_answer_to_a_list_on_its_way(lies: Path) -> None:
    options = ["--lock", str(lies.parent / "mcp.lock"), "--timeout", "1s"]
    for what, lie in FORESEEN.items():
        lies.write_text(json.dumps({"tools/call": [f'{{"jsonrpc":"2.0",{lie}}}']}))
        with wrapped(*options, server=[sys.executable, LYING, str(lies)]) as client:
            result = client.receive(client.call("good"))["result"]
            assert result["isError"], what
            names = [
                tool["name"] for tool in client.receive(client.request("tools/list", id="next"))["result"]["tools"]
            ]
            assert names == ["good"], what
            assert not any("evil" in json.dumps(message) for message in seen(client.lines)), what


@pytest.mark.slow
def test_a_long_result_of_a_pinned_server_passes_byte_for_byte(lies: Path) -> None:
    text = json.dumps({"x": ['}"\\', {"y": "]{"}], "z": "\\" * 70_001 + '"' * 70_001})
    for line in (f'{{"jsonrpc":"2.0","id":$ID,"result":{text}}}', f'{{"result":{text},"jsonrpc":"2.0","id":$ID}}'):
        lies.write_text(json.dumps({"tools/call": [line]}))
        with wrapped("--lock", str(lies.parent / "mcp.lock"), server=[sys.executable, LYING, str(lies)]) as client:
            client.receive(client.call("good", id=7))
            assert client.lines[-1] == line.replace("$ID", "7").encode() + b"\n"


@pytest.mark.slow
def test_a_greeting_that_is_nested_too_deep_to_be_kept_is_noise(lies: Path) -> None:
    for depth in (850, 975, 990, 5_000):
        deep = "[" * depth + "0" + "]" * depth
        lies.write_text(json.dumps({"initialize": [f'{{"jsonrpc":"2.0","id":$ID,"result":{{"x":{deep}}}}}']}))
        server = [sys.executable, LYING, str(lies)]
        with wrapped("--cached-catalogue", server=server, greets=False) as client:
            client.request("initialize", {"depth": depth})
            assert client.receive(client.request("ping"))["result"] == {"content": []}


def test_the_end_of_a_client_is_seen_while_its_server_does_not_read(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with wrapped("--shutdown", "100ms", "--grace", "100ms", server=sleeper, greets=False) as client:
        os.set_blocking(client.process.stdin.fileno(), False)
        note = b'{"jsonrpc":"2.0","method":"notifications/x","params":{"x":"' + b"x" * 4_000 + b'"}}\n'
        give_up_at = time.monotonic() + ANSWER_WITHIN_S
        while select.select([], [client.process.stdin], [], 1)[1]:  # until no more of the client is read
            assert time.monotonic() < give_up_at
            with contextlib.suppress(BlockingIOError):
                os.write(client.process.stdin.fileno(), note)
        client.process.stdin.close()
        assert client.process.wait(ANSWER_WITHIN_S) == 0


@pytest.mark.slow
def test_a_client_that_does_not_read_its_answers_is_not_read_either(server: Server) -> None:
    with wrapped("--deny", "*", server=server.command) as client:
        os.set_blocking(client.process.stdin.fileno(), False)
        written, call = 0, b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"x"}}\n'
        while written < 20_000 and select.select([], [client.process.stdin], [], 2)[1]:
            with contextlib.suppress(BlockingIOError):
                os.write(client.process.stdin.fileno(), call % (written + 1_000))
            written += 1
        assert written < 20_000  # so its answers do not fill our memory


def test_a_question_that_finds_no_thread_denies_its_call_only(server: Server) -> None:
    with wrapped("--ask", "write_file", "--no-log", server=server.command, cold=True) as client:
        assert answer_to(client, "read_file") == "allowed"
        pid = client.process.pid
        status = Path(f"/proc/{pid}/status").read_text()
        size = 1024 * int(status.partition("VmSize:")[2].split()[0])
        before = resource.prlimit(pid, resource.RLIMIT_AS, (size + 4 * 1024 * 1024, resource.RLIM_INFINITY))
        assert "the inbox cannot be asked" in answer_to(client, "write_file")
        assert answer_to(client, "read_file") == "allowed"
        resource.prlimit(pid, resource.RLIMIT_AS, before)
        client.call("write_file")
        wait_for_proposal()
    assert not server.calls_of("write_file")


def test_the_name_of_a_tool_cannot_forge_a_line_of_ours(server: Server, tmp_path: Path) -> None:
    with open(tmp_path / "log.txt", "w") as log:
        with wrapped("--deny", "*", server=server.command, stderr=log) as client:
            answer_to(client, "x\nshotclock: pinned 9 tools\x1b[2J\u202e")
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    assert "x<U+000A>shotclock: pinned 9 tools<U+001B>[2J<U+202E> was denied" in line


@pytest.mark.slow
def test_a_server_that_changes_everything_does_not_fill_the_inbox(server: Server, tmp_path: Path) -> None:
    lock = ["--lock", str(tmp_path / "mcp.lock")]
    with wrapped(*lock, server=server.command) as client:
        assert answer_to(client, "read_file") == "allowed"
    server.publish([*TOOLS, *({"name": f"new{number}", "inputSchema": {}} for number in range(30))])
    with wrapped(*lock, "--on-change", "ask", server=server.command) as client:
        assert answer_to(client, "read_file") == "allowed"
        before = pending(MOST_ASKED)
        inbox("reject", before[0])
        after = pending(MOST_ASKED)
        assert before[0] not in after and len({*before, *after}) == MOST_ASKED + 1


def pending(count: int) -> list[str]:
    """Return the open proposals as soon as there are so many."""
    give_up_at = time.monotonic() + ANSWER_WITHIN_S
    while time.monotonic() < give_up_at:
        found = [str(each["id"]) for each in inbox("list")["proposals"] if each["status"] == "pending"]
        if len(found) >= count:
            assert len(found) == count
            return found
    raise AssertionError("not so many proposals in time")


@pytest.mark.slow
def test_an_approval_covers_all_parameters_of_a_call(server: Server) -> None:
    with wrapped("--ask", "write_file", "--ask-wait", "300ms", server=server.command) as client:
        params = {"name": "write_file", "arguments": {}, "_meta": {"progressToken": 1}}
        client.receive(client.request("tools/call", params))
        inbox("approve", wait_for_proposal())
        client.receive(client.request("tools/call", {**params, "inputResponses": {"path": "/etc/passwd"}}))
        assert not server.calls_of("write_file")
        assert "/etc/passwd" in json.dumps(inbox("show", wait_for_proposal()))
        client.receive(client.request("tools/call", {**params, "_meta": {"progressToken": 2}}))
        assert server.calls_of("write_file") == [{}]
