"""Policy of wrapped servers: rules for calls, and approvals in the real inbox."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.net.tool_hints import DESTRUCTIVE
from shotclock.wrap._rules import CallVerdict, Rule, Rules, rule_reader
from tests.wrap.client import ANSWER_WITHIN_S, ENVELOPE, RawClient, failure, wrapped
from tests.wrap.client import SERVER as SCRIPTED
from tests.wrap.test_calls import listed

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

SERVER = str(Path(__file__).with_name("catalogue_server.py"))
TOOLS = [
    {"name": "read_file", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
    {"name": "write_file", "inputSchema": {"type": "object"}},
    {"name": "append", "inputSchema": {"type": "object"}, "annotations": {"destructiveHint": False}},
    {
        "name": "measure",
        "inputSchema": {"type": "object"},
        "outputSchema": {"type": "object"},
    },
]


class Server:
    """The command of a server, its catalogue, and the calls that have reached it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.file, self._record = folder / "catalogue.json", folder / "record.txt"
        self.publish(TOOLS)
        self.command = [sys.executable, SERVER, str(self.file), "--record", str(self._record), *options]

    def publish(self, tools: Any) -> None:
        self.file.write_text(json.dumps({"tools": tools}))

    @property
    def received(self) -> list[Any]:
        return [json.loads(line) for line in self._record.read_text().splitlines()]

    def calls_of(self, tool: str) -> list[Any]:
        calls = [each["params"] for each in self.received if each.get("method") == "tools/call"]
        return [each["arguments"] for each in calls if each["name"] == tool]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    return Server(tmp_path)


def inbox(*words: str) -> Any:
    ran = subprocess.run(
        [sys.executable, "-m", "shotclock", "inbox", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=ANSWER_WITHIN_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)["data"]


def wait_for_proposal() -> str:
    give_up_at = time.monotonic() + ANSWER_WITHIN_S
    while time.monotonic() < give_up_at:
        found = [each for each in inbox("list")["proposals"] if each["status"] == "pending"]
        if found:
            return str(found[0]["id"])
    raise AssertionError("no proposal in time")


def answer_to(client: RawClient, tool: str, **arguments: Any) -> str:
    """Return "allowed" or the text of the refusal."""
    result = client.ask(tool, **arguments)
    return result["content"][0]["text"] if result.get("isError") else "allowed"


def rule(verdict: CallVerdict, text: str) -> Rule:
    return rule_reader(verdict)(text)


# --- rules -------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_counts() -> None:
    read_only, unknown = {"readOnlyHint": True}, dict[str, object]()
    allow, ask, deny = CallVerdict.ALLOW, CallVerdict.ASK, CallVerdict.DENY
    table: list[tuple[list[tuple[CallVerdict, str]], str, dict[str, object], dict[str, Any], CallVerdict]] = [
        ([], "delete", unknown, {}, allow),
        ([(deny, "del*")], "delete", unknown, {}, deny),
        ([(allow, "delete"), (deny, "*")], "delete", unknown, {}, allow),
        ([(allow, "delete"), (deny, "*")], "other", unknown, {}, deny),
        ([(ask, "destructive")], "delete", unknown, {}, ask),
        ([(ask, "destructive")], "look", read_only, {}, allow),
        ([(ask, "destructive")], "append", {"destructiveHint": False}, {}, allow),
        ([(deny, "open-world")], "look", read_only, {}, deny),
        ([(deny, "open-world")], "look", {"openWorldHint": False}, {}, allow),
        ([(allow, "idempotent"), (deny, "*")], "put", {"idempotentHint": True}, {}, allow),
        ([(deny, "write path=/etc/*")], "write", unknown, {"path": "/etc/passwd"}, deny),
        ([(deny, "write path=/etc/*")], "write", unknown, {"path": "/tmp/../etc/passwd"}, deny),
        ([(deny, "write path=/etc/*")], "write", unknown, {"path": "//etc//passwd"}, deny),
        ([(deny, "write path=/etc/*")], "write", unknown, {"paths": "/etc/passwd"}, allow),
        ([(deny, "write paths=/etc/*")], "write", unknown, {"paths": ["/tmp/a", "/etc/b"]}, deny),
        ([(allow, "write path=/tmp/*"), (deny, "*")], "write", unknown, {"path": "/tmp/a"}, allow),
        ([(allow, "write path=/tmp/*"), (deny, "*")], "write", unknown, {"path": "/tmp/../etc/a"}, deny),
        ([(allow, "write paths=/tmp/*"), (deny, "*")], "write", unknown, {"paths": ["/tmp/a", "/etc/b"]}, deny),
        ([(allow, "write path=/tmp/*"), (deny, "*")], "write", unknown, {}, deny),
        ([(deny, "write path=/etc/*")], "write", unknown, {"path": "/tmp/a", "Path": "/etc/b"}, deny),
        ([(allow, "write path=/tmp/*"), (deny, "*")], "write", unknown, {"path": "/tmp/a", "PATH": "/etc/b"}, deny),
        ([(deny, "write paths=/etc/*")], "write", unknown, {"paths": ' ["/tmp/a", "/etc/b"]'}, deny),
        ([(deny, "read path=/etc/passwd")], "read", unknown, {"path": "/etc/passwd\0.txt"}, deny),
        ([(allow, "read path=*.txt"), (deny, "*")], "read", unknown, {"path": "/etc/passwd\0.txt"}, deny),
        ([(deny, "write")], "Write", unknown, {}, deny),
        ([(deny, "write")], " write\0", unknown, {}, deny),
        ([(allow, "write"), (deny, "*")], "Write", unknown, {}, deny),
        ([(deny, "* force=true")], "push", unknown, {"force": True}, deny),
        (
            [(allow, "fetch url=https://a.example/*"), (deny, "*")],
            "fetch",
            unknown,
            {"url": "https://a.example/b"},
            allow,
        ),
        ([(deny, "write path=/etc/*")], "write", unknown, {"path ": "/etc/a"}, deny),
        ([(deny, "write path=/etc/*")], "write", unknown, {"\tPath\0x": "/etc/a"}, deny),
        ([(allow, "write path=/tmp/*"), (deny, "*")], "write", unknown, {"path": "/tmp/a", "path ": "/etc/b"}, deny),
        ([(deny, "write path=/etc/* mode=w")], "write", unknown, {"path": "/etc/a", "mode": "r"}, allow),
    ]
    for rules, tool, hints, arguments, expected in table:
        made = Rules(tuple(rule(*each) for each in rules))
        assert made.decide(tool, arguments, hints)[0] is expected, (rules, tool, arguments)


def test_a_number_is_compared_by_its_value_however_it_is_written() -> None:
    deny, allow = CallVerdict.DENY, CallVerdict.ALLOW
    denied = Rules((rule(deny, "pay amount=100"),))
    allowed = Rules((rule(allow, "pay amount=100"), rule(deny, "*")))
    for literal in ("100", "100.0", "1e2", "1E+2", "100.00000000000000000001", "0.1e3"):
        arguments = json.loads(f'{{"amount": {literal}}}')
        assert denied.decide("pay", arguments, {})[0] is deny, literal
        assert allowed.decide("pay", arguments, {})[0] is allow, literal
    for written in ("1e2", " 100", "100.0", "1_00"):  # texts that a server may read as a number, or as a text
        assert denied.decide("pay", {"amount": written}, {})[0] is deny, written
        assert allowed.decide("pay", {"amount": written}, {})[0] is deny, written
    for other in (101, 100.5, -100, 10, "1e999999999", "1e-999999999", float("inf"), float("nan"), True, None, [], {}):
        assert denied.decide("pay", {"amount": other}, {})[0] is allow, other
    assert denied.decide("pay", {"amount": [1, 1e2]}, {})[0] is deny
    assert Rules((rule(deny, "pay amount=1e2"),)).decide("pay", {"amount": 100}, {})[0] is deny
    assert Rules((rule(deny, "pay amount=1??"),)).decide("pay", {"amount": 1e2}, {})[0] is deny
    # JavaScript reads every number as a double.
    big = Rules((rule(deny, "pay id=9007199254740992"),))
    assert big.decide("pay", {"id": 9007199254740993}, {})[0] is deny
    assert big.decide("pay", {"id": 10**400}, {})[0] is allow


def test_a_path_that_is_not_written_plainly_is_refused_where_a_rule_is_about_a_path() -> None:
    deny, ask = CallVerdict.DENY, CallVerdict.ASK
    spellings = [
        " /etc/x",
        "/etc/x ",
        "\t/etc/x",
        "file:///etc/x",
        "FILE:/etc/x",
        "~/x",
        "/tmp/../etc/x",
        "../etc/x",
        "/a\0b",
    ]
    for pattern in ("/etc/*", "/tmp/*", "secrets/*"):
        for verdict in CallVerdict:
            rules = Rules((rule(verdict, f"write path={pattern}"),))
            for spelling in spellings:
                for value in (spelling, ["/a", spelling]):
                    decided, why = rules.decide("write", {"Path ": value}, {})
                    assert decided is deny and "is not written plainly" in why, (pattern, verdict, value)
            for plain in ("/usr/x", "notes.txt", "a..b/c", "", 5, None):
                assert rules.decide("write", {"path": plain}, {})[0] is CallVerdict.ALLOW, plain
            assert rules.decide("read", {"path": " /etc/x"}, {})[0] is CallVerdict.ALLOW, "it is about another tool"
    for pattern in ("*.txt", "*", "*/etc/*", "https://*"):  # about a text
        rules = Rules((rule(ask, f"write path={pattern}"),))
        assert rules.decide("write", {"path": " a\nb"}, {})[0] is not deny, pattern


def test_a_rule_that_cannot_be_read_is_refused_with_the_right_form() -> None:
    for text, message in {"": "name a tool", "path=/etc/*": "name of a tool", "write path": "ARGUMENT=PATTERN"}.items():
        with pytest.raises(ValueError, match=message):
            rule(CallVerdict.DENY, text)


def test_a_misspelt_word_for_an_annotation_is_refused_because_no_tool_would_match() -> None:
    for text, meant in {"destuctive": DESTRUCTIVE, "readonly": "read-only", "Open_World": "open-world"}.items():
        with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
            rule(CallVerdict.ASK, text)
    assert rule(CallVerdict.ASK, "[r]eadonly").matches_tool("readonly", {})
    assert rule(CallVerdict.ASK, "read_*").tools == "read_*"


def test_denied_calls_are_answered_and_the_order_of_options_counts(server: Server) -> None:
    options = ["--allow", "write_file path=/tmp/*", "--deny", "write_*", "--allow", "*"]
    with wrapped(*options, server=server.command) as client:
        text, envelope = failure(client.ask("write_file", path="/etc/passwd"))
        assert "tool write_file was denied by the rule 'deny write_*'" in text
        assert envelope["error"]["code"] == "NOT_ALLOWED" and envelope["meta"]["ending"] == "not_started"
        assert answer_to(client, "write_file", path="/tmp/a") == "allowed"
        assert answer_to(client, "read_file") == "allowed"
        client.call("write_file", text="x" * 200_000, id="long")
        assert "was denied by the rule" in failure(client.receive("long")["result"])[0]
    assert server.calls_of("write_file") == [{"path": "/tmp/a"}]


def test_the_annotations_are_known_before_the_first_call_without_a_list_of_the_client(server: Server) -> None:
    with wrapped("--read-only", server=server.command) as client:
        assert "only tools that declare readOnlyHint" in answer_to(client, "write_file")
        assert "only tools that declare readOnlyHint" in answer_to(client, "append")
        assert answer_to(client, "read_file") == "allowed"
    methods = [each["method"] for each in server.received]
    assert methods[:3] == ["initialize", "notifications/initialized", "tools/list"]
    assert str(server.received[2]["id"]).startswith("shotclock-")
    assert not server.calls_of("write_file") and not server.calls_of("append")


def test_lines_that_are_no_valid_call_do_not_pass_a_policy(server: Server) -> None:
    with wrapped("--deny", "write_file", server=server.command) as client:
        params = {"name": "write_file", "arguments": {}}
        client.write(json.dumps({"id": 5, "method": "tools/call", "params": params}).encode() + b"\n")
        client.send(method="tools/call", params=params)
        behind = {"jsonrpc": "2.0", "id": 6, "params": {**params, "x": "x" * 100_000}, "method": "tools/call"}
        client.write(json.dumps(behind).encode() + b"\n")
        assert "was denied by the rule" in failure(client.receive(6)["result"])[0]
        assert answer_to(client, "read_file") == "allowed"
    assert not server.calls_of("write_file")


def test_a_rule_that_matches_no_tool_is_reported(server: Server, tmp_path: Path) -> None:
    with open(tmp_path / "log.txt", "w") as log:
        with wrapped("--ask", "delete_*", "--deny", "write_*", server=server.command, stderr=log) as client:
            assert answer_to(client, "read_file") == "allowed"
    text = (tmp_path / "log.txt").read_text()
    assert "no tool of the server matches the rule 'ask delete_*'" in text and "deny write_*" not in text


# --- approvals ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_approved_call_runs_exactly_once(server: Server) -> None:
    with wrapped("--ask", "destructive", server=server.command) as client:
        assert answer_to(client, "read_file") == "allowed"
        id = client.call("write_file", path="/tmp/a")
        proposal = wait_for_proposal()
        assert not server.calls_of("write_file")
        shown = inbox("show", proposal)
        assert shown["title"] == "write_file path=/tmp/a"
        inbox("approve", proposal)
        assert json.loads(client.receive(id)["result"]["content"][0]["text"]) == ["write_file", {"path": "/tmp/a"}]
        assert server.calls_of("write_file") == [{"path": "/tmp/a"}]
        again = client.call("write_file", path="/tmp/a")  # which is another call
        other = wait_for_proposal()
        assert other != proposal
        inbox("reject", other, "--notes", "once is enough")
        text, envelope = failure(client.receive(again)["result"])
        assert "was rejected by" in text and "once is enough" in text
        assert envelope["error"]["code"] == "PROPOSAL_REJECTED"
    assert len(server.calls_of("write_file")) == 1
    assert inbox("show", proposal)["run"]["state"] == "succeeded"


UNHINTED_APP = """
from shotclock import App

app = App("unhinted")

@app.command
def delete_everything() -> str:
    return "deleted"

if __name__ == "__main__":
    app.serve_mcp()
"""


@pytest.mark.slow
def test_a_command_of_an_app_that_declares_nothing_waits_where_destructive_calls_are_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    (tmp_path / "unhinted.py").write_text(UNHINTED_APP)
    command = [sys.executable, str(tmp_path / "unhinted.py")]
    with wrapped("--ask", "destructive", "--ask-wait", "300ms", server=command) as client:
        assert "waits for approval" in client.ask("delete_everything")["content"][0]["text"]


@pytest.mark.slow
def test_an_undecided_call_is_pending_and_the_identical_call_picks_the_decision_up(
    server: Server, validate_envelope: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    with wrapped("--ask", "*", "--ask-wait", "300ms", server=server.command) as client:
        result = client.ask("write_file", path="/tmp/a")
        proposal = wait_for_proposal()
        assert not result["isError"]
        text = result["content"][0]["text"]
        assert f"waits for approval as {proposal}" in text and f"shotclock inbox approve {proposal}" in text
        assert validate_envelope(result["_meta"][ENVELOPE])["data"]["proposal_id"] == proposal
        with_schema = client.ask("measure")
        assert with_schema["isError"] and "waits for approval" in with_schema["content"][0]["text"]
        inbox("approve", proposal)
        other = client.ask("write_file", content="a long text", path="/tmp/b")
        assert "waits for approval" in other["content"][0]["text"]  # the approval is for the exact arguments
        titles = [each["title"] for each in inbox("list")["proposals"]]
        assert "write_file path=/tmp/b content=a long text" in titles, "the shortest first, as a list cuts them"
    with wrapped("--ask", "*", "--ask-wait", "300ms", server=server.command) as client:
        assert client.text("write_file", path="/tmp/a") == '["write_file", {"path": "/tmp/a"}]'
        assert "waits for approval" in client.ask("write_file", path="/tmp/a")["content"][0]["text"]
    assert server.calls_of("write_file") == [{"path": "/tmp/a"}]


@pytest.mark.slow
def test_an_approval_is_void_when_the_tool_has_changed(server: Server) -> None:
    with wrapped("--ask", "write_*", server=server.command) as client:
        id = client.call("write_file", path="/tmp/a")
        proposal = wait_for_proposal()
        server.publish([{**tool, "description": "now it deletes"} for tool in TOOLS])
        assert client.text("announce") == "announced"
        assert f"has changed since {proposal} was proposed" in failure(client.receive(id)["result"])[0]
        inbox("approve", proposal)
        client.call("write_file", path="/tmp/a")
        assert wait_for_proposal() != proposal
    assert not server.calls_of("write_file")


@pytest.mark.slow
def test_a_cancelled_call_does_not_use_its_approval(server: Server) -> None:
    with wrapped("--ask", "write_*", server=server.command) as client:
        id = client.call("write_file", path="/tmp/a")
        proposal = wait_for_proposal()
        client.send(method="notifications/cancelled", params={"requestId": id})
        assert answer_to(client, "read_file") == "allowed"
        inbox("approve", proposal)
        assert client.text("write_file", path="/tmp/a")
    assert server.calls_of("write_file") == [{"path": "/tmp/a"}]


def test_other_calls_pass_while_one_waits_for_a_person(server: Server) -> None:
    with wrapped("--ask", "write_*", server=server.command) as client:
        waiting = [client.call("write_file", path=f"/tmp/{number}") for number in range(20)]
        assert answer_to(client, "read_file") == "allowed"
        client.send(method="notifications/cancelled", params={"requestId": waiting[0]})
    assert not server.calls_of("write_file")


@pytest.mark.slow
def test_a_modified_call_runs_with_the_arguments_of_the_operator(server: Server, tmp_path: Path) -> None:
    edited = tmp_path / "edited.json"
    edited.write_text('{"path": "/tmp/safe"}')
    with wrapped("--ask", "write_*", "--deny", "* path=/etc/*", server=server.command) as client:
        id = client.call("write_file", path="/etc/hosts")
        inbox("modify", wait_for_proposal(), "--file", str(edited))
        assert "/tmp/safe" in client.receive(id)["result"]["content"][0]["text"]
    assert server.calls_of("write_file") == [{"path": "/tmp/safe"}]
    assert listed()[0]["arguments_sha256"] == hashlib.sha256(b'{"path":"/tmp/safe"}').hexdigest()


def test_a_client_without_a_greeting_is_checked_like_any_other(server: Server) -> None:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    with wrapped("--read-only", server=server.command, greets=False) as client:
        refused = client.receive(client.call("write_file", meta=meta))["result"]
        assert "readOnlyHint" in failure(refused)[0] and refused["resultType"] == "complete"
        assert "result" in client.receive(client.call("read_file", meta=meta))
    own = server.received[0]
    assert own["method"] == "tools/list" and own["params"]["_meta"] == meta


def test_calls_before_the_greeting_is_answered_wait_for_the_list(server: Server) -> None:
    with wrapped("--read-only", server=server.command, greets=False) as client:
        client.request(
            "initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {}}, id="hello"
        )
        assert "readOnlyHint" in answer_to(client, "write_file")
        assert answer_to(client, "read_file") == "allowed"
    assert [each["method"] for each in server.received][:2] == ["initialize", "tools/list"]


def test_a_store_that_cannot_be_used_refuses_the_call(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(server.file))  # a file, not a directory
    with wrapped("--ask", "write_*", server=server.command) as client:
        assert "a person has to approve it, and" in failure(client.ask("write_file"))[0]
        assert answer_to(client, "read_file") == "allowed"
    assert not server.calls_of("write_file")


def test_arguments_that_cannot_be_checked_or_shown_are_denied(server: Server) -> None:
    with wrapped("--ask", "write_*", server=server.command) as client:
        assert "cannot be shown to a person" in failure(client.ask("write_file", size=float("nan")))[0]
        deep: Any = []
        for _ in range(500):
            deep = [deep]
        assert "nested too deep" in failure(client.ask("write_file", deep=deep))[0]
        assert "nested too deep" in failure(client.ask("read_file", deep=deep))[0]
        assert answer_to(client, "read_file") == "allowed"
    assert not server.calls_of("write_file")


@pytest.mark.slow
def test_one_approval_lets_one_of_two_identical_calls_run(server: Server) -> None:
    with wrapped("--ask", "write_*", server=server.command) as client:
        ids = [client.call("write_file", path="/tmp/a"), client.call("write_file", path="/tmp/a")]
        first = wait_for_proposal()
        inbox("approve", first)
        second = wait_for_proposal()
        assert second != first
        inbox("reject", second)
        results = [client.receive(id)["result"] for id in ids]
        assert sorted(bool(each.get("isError")) for each in results) == [False, True]
    assert server.calls_of("write_file") == [{"path": "/tmp/a"}]


@pytest.mark.slow
def test_an_approved_call_is_not_repeated_after_a_crash(server: Server, tmp_path: Path) -> None:
    command = [*SCRIPTED, "--die-once", str(tmp_path / "died")]  # the tool is idempotent
    with wrapped("--ask", "die_once", server=command) as client:
        id = client.call("die_once")
        proposal = wait_for_proposal()
        inbox("approve", proposal)
        assert failure(client.receive(id)["result"])[1]["error"]["code"] == "CONNECTION_LOST"
    assert inbox("show", proposal)["run"]["code"] == "CONNECTION_LOST"


def test_the_process_in_front_stays_small_with_an_inbox(server: Server) -> None:
    with wrapped("--ask", "write_*", "--ask-wait", "0", server=server.command, cold=True) as client:
        for number in range(20):
            assert "waits for approval" in client.ask("write_file", path=str(number))["content"][0]["text"]
        pages = int(Path(f"/proc/{client.process.pid}/statm").read_text().split()[1])
        most_mb = 30 if sys.version_info < (3, 14) else 36  # its asyncio and sqlite3 are larger
        assert pages * os.sysconf("SC_PAGESIZE") < most_mb * 1024 * 1024
