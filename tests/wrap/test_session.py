"""Decisions of a session without processes: policy, events, restarts and limits by the name of a tool."""

import json

import pytest

from shotclock.core.limits import NS_PER_MS
from shotclock.wrap._failures import WrapFailure
from shotclock.wrap._gate import Policy
from shotclock.wrap._limits import CallLimits, ServerLimits, ToolLimits, read_tool_limits
from shotclock.wrap._lines import LONGEST_LINE, LineSplitter
from shotclock.wrap._messages import RpcMessage, encode
from shotclock.wrap._requests import EndedRequest
from shotclock.wrap._restarts import COOL_DOWN_MS, MOST_CRASHES, WINDOW_MS, Restarts
from shotclock.wrap._rules import CallVerdict, Rules, rule_reader
from shotclock.wrap._session import ClientSession


class Lines:
    """The client, as a list of the lines it would read."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write_line(self, line: bytes) -> bool:
        self.lines.append(line)
        return True


class ReadyServer:
    """A server that takes every line and is never started again."""

    accepts, generation, has_spoken = True, 1, True

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def want(self) -> WrapFailure | None:
        return None

    def send(self, line: bytes) -> bool:
        self.lines.append(line)
        return True

    def probe(self) -> bool:
        return False

    def greet(self) -> None: ...

    def record_sign_of_life(self, message: RpcMessage) -> None: ...

    def kill(self, why: str) -> None: ...

    def describe_output(self) -> tuple[str, int]:
        return "", 0


NO_DELETE = Policy(Rules((rule_reader(CallVerdict.DENY)("delete"),)))


def call(id: int, tool: str) -> bytes:
    params = {"name": tool, "arguments": {"all": True}}
    return encode({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})


def test_a_refused_call_does_not_reach_the_server_and_every_end_is_reported() -> None:
    client, server, ended = Lines(), ReadyServer(), list[EndedRequest]()
    session = ClientSession(ServerLimits(), client, lambda text: None, server, policy=NO_DELETE, on_ended=ended.append)
    session.handle_client_line(call(1, "delete"))
    session.handle_client_line(call(2, "look"))
    session.handle_server_line(b'{"jsonrpc":"2.0","id":2,"result":{}}\n')
    assert server.lines == [call(2, "look")]
    refused = json.loads(client.lines[0])["result"]
    assert refused["isError"] and "was denied by the rule 'deny delete'" in refused["content"][0]["text"]
    assert client.lines[1] == b'{"jsonrpc":"2.0","id":2,"result":{}}\n'
    assert [(each.tool, each.outcome) for each in ended] == [("delete", "NOT_ALLOWED"), ("look", "ok")]


def test_a_call_that_is_too_long_does_not_reach_the_server() -> None:
    client, server = Lines(), ReadyServer()
    session = ClientSession(ServerLimits(), client, lambda text: None, server, policy=NO_DELETE)
    params = {"name": "look", "arguments": {"text": "x" * LONGEST_LINE}}
    line = encode({"jsonrpc": "2.0", "method": "tools/call", "params": params, "id": "last"})
    for each in LineSplitter().split(line):
        session.handle_client_line(each)
    refusal = json.loads(client.lines[0])
    assert not server.lines and refusal["id"] == "last" and refusal["error"]["code"] == -32600


def test_a_batch_is_refused_and_not_passed_on() -> None:
    client, server = Lines(), ReadyServer()
    session = ClientSession(ServerLimits(), client, lambda text: None, server)
    session.handle_client_line(b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]\n')
    assert not server.lines and json.loads(client.lines[0])["error"]["code"] == -32600


def test_a_late_list_of_ours_never_reaches_the_client() -> None:
    client, server = Lines(), ReadyServer()
    session = ClientSession(
        ServerLimits(list_ms=1), client, lambda text: None, server, policy=Policy(Rules(is_read_only=True))
    )
    session.handle_client_line(b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}\n')
    session.handle_server_line(b'{"jsonrpc":"2.0","id":1,"result":{"capabilities":{"tools":{}}}}\n')
    session.handle_client_line(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
    listing = json.loads(server.lines[-1])
    assert listing["method"] == "tools/list"
    session.handle_client_line(b'{"jsonrpc":"2.0","id":2,"method":"resources/read","params":{}}\n')
    session.check_limits(session.next_due_ns)  # the list is given up
    for id in (listing["id"], 2):
        line = encode({"result": {"tools": [{"name": "x" * 200_000}]}, "jsonrpc": "2.0", "id": id})
        client.lines.clear()
        session.handle_server_line(line)
        assert b"".join(client.lines) == (line if id == 2 else b"")


def test_the_pause_before_a_restart_grows_until_the_circuit_opens() -> None:
    restarts, now = Restarts(), 10**15
    pauses = []
    for _ in range(MOST_CRASHES - 1):
        pauses.append((restarts.record_crash(now) - now) // NS_PER_MS)
        now += NS_PER_MS
    assert pauses == [0, 250, 500, 1000] and restarts.open_for_ms(now) == 0
    restarts.record_crash(now)
    assert restarts.open_for_ms(now) == COOL_DOWN_MS
    now += COOL_DOWN_MS * NS_PER_MS
    assert restarts.open_for_ms(now) == 0
    restarts.record_crash(now)  # the one attempt after the cool-down
    assert restarts.open_for_ms(now) == COOL_DOWN_MS
    now += (COOL_DOWN_MS + WINDOW_MS + 1) * NS_PER_MS
    assert restarts.record_crash(now) == now


def test_limits_follow_the_method_and_the_first_pattern_that_matches() -> None:
    tools = (
        read_tool_limits("build_*=timeout:30m,idle:2m"),
        ToolLimits("*_all", timeout_ms=1),
        ToolLimits("*", idle_ms=5),
    )
    limits = ServerLimits(CallLimits(1000, 0, 300), tools, start_up_ms=7, list_ms=8)
    assert limits.of("tools/call", "build_all") == CallLimits(1_800_000, 120_000, 300)
    assert limits.of("tools/call", "list_all") == CallLimits(1, 0, 300)
    assert limits.of("tools/call", "other") == CallLimits(1000, 5, 300)
    assert limits.of("initialize", "").timeout_ms == 7 and limits.of("prompts/list", "").timeout_ms == 8
    assert limits.of("subscriptions/listen", "") == CallLimits(0, 0, 300)
    assert limits.of("resources/read", "") == limits.call
    for wrong in ("x", "=timeout:1s", "x=timeout", "x=total:1s", "x=timeout:1", "x=idle:1s,idle:2s"):
        with pytest.raises(ValueError):
            read_tool_limits(wrong)
