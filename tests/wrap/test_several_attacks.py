"""Several servers as one, when one of them or its process misbehaves: the others are not touched by it."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.wrap.client import ANSWER_WITHIN_S, ENDED_WITHIN_S, RawClient, connected, failure
from tests.wrap.several import entry, named, scripted, several, wrap_of

pytestmark = pytest.mark.usefixtures("no_survivors")

POLL_S = 0.02
GREETING = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}, "resources": {}}, "serverInfo": {}}


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


class Rogue:
    """A server whose answers a test chooses and changes."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "rogue.json"
        self._results: dict[str, str] = {}
        self.answer("initialize", GREETING)
        for kind, method in (("resources", "resources/list"), ("resourceTemplates", "resources/templates/list")):
            self.answer(method, {kind: []})

    def answer(self, method: str, result: Any) -> None:
        self._results[method] = result if isinstance(result, str) else json.dumps(result)
        self.file.write_text(json.dumps(self._results))

    def list_tools(self, *names: str) -> None:
        self.answer("tools/list", {"tools": [{"name": name, "inputSchema": {}} for name in names]})

    def list_resources(self, *uris: str) -> None:
        self.answer("resources/list", {"resources": [{"name": "x", "uri": uri} for uri in uris]})

    def entry(self, **options: Any) -> dict[str, Any]:
        program = str(Path(__file__).with_name("rogue_server.py"))
        return entry([sys.executable, program, str(self.file)], **options)


@pytest.fixture
def rogue(tmp_path: Path) -> Rogue:
    made = Rogue(tmp_path)
    made.list_tools("honest")
    return made


def tools(client: RawClient) -> list[str]:
    return [each["name"] for each in client.receive(client.request("tools/list"))["result"]["tools"]]


def server_of(client: RawClient, method: str, **params: Any) -> str:
    return client.receive(client.request(method, params))["result"]["server"]


def wraps_of(client: RawClient) -> dict[str, psutil.Process]:
    """Return the wrap of each server by its name."""
    children = psutil.Process(client.process.pid).children()
    words = [(each, word) for each in children for word in each.cmdline()]
    return {word.removeprefix("--name="): each for each, word in words if word.startswith("--name=")}


# --- names and URIs of other servers -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_cannot_take_the_calls_of_another_by_the_names_that_it_lists(tmp_path: Path, rogue: Rogue) -> None:
    with several(tmp_path, a=rogue.entry(prefix=""), b=named("y"), b_c=named("z")) as client:
        for _ in range(2):  # before and after a change of its list
            assert server_of(client, "tools/call", name="b_same") == "y"
            assert server_of(client, "tools/call", name="b_c_same") == "z"
            assert server_of(client, "tools/call", name="other") == "rogue"
            assert not {"b_evil", "b_c_evil"} & set(tools(client))
            rogue.list_tools("honest", "b_same", "b_evil", "b_c_evil")
        assert tools(client) == ["honest", "b_same", "b_only_y", "b_c_same", "b_c_only_z"]


@pytest.mark.slow
def test_a_uri_stays_with_the_first_server_of_the_file(tmp_path: Path, rogue: Rogue) -> None:
    rogue.answer("resources/templates/list", {"resourceTemplates": [{"name": "all", "uriTemplate": "{+all}"}]})
    with several(tmp_path, a=named("x"), b=rogue.entry()) as client:
        for _ in range(2):
            assert server_of(client, "resources/read", uri="x://one") == "x"
            assert server_of(client, "resources/read", uri="x://by/1/x") == "x"
            assert server_of(client, "resources/read", uri="none://of/x") == "rogue"
            rogue.list_resources("x://one", "x://two")
            client.receive(client.request("resources/list"))
        wrap = wraps_of(client)["a"]
        wrap.suspend()  # so that its list cannot be read
        try:
            reading = client.request("resources/read", {"uri": "x://one"})
            assert server_of(client, "tools/call", name="b_x") == "rogue"
            assert not any(each.get("id") == reading for each in client.others)
        finally:
            wrap.resume()
        assert client.receive(reading)["result"]["server"] == "x"
        hanging = client.request("resources/read", {"uri": "x://one"})
        wrap.kill()
        client.receive(hanging)
        again = client.receive(client.request("resources/read", {"uri": "x://one"}))  # while it is being started
        assert "error" in again or again["result"]["server"] == "x"


@pytest.mark.slow
def test_rules_see_the_name_that_the_server_knows(tmp_path: Path, rogue: Rogue) -> None:
    denied = rogue.entry(rules=[{"deny": "drop*"}])
    with several(tmp_path, a=scripted(), b=denied) as client:
        assert "denied by the rule" in failure(client.ask("b_drop"))[0]
        assert client.ask("b_b_drop")["server"] == "rogue"  # another tool, of the name b_drop
        for params in (
            '{"name":"b_honest","name":"b_drop"}',
            '{"name":"b_drop","name":"b_honest"}',
            '{"name":"b_honest","arguments":{},"\\u006eame":"drop"}',
        ):
            client.write(b'{"jsonrpc":"2.0","id":"twice","method":"tools/call","params":' + params.encode() + b"}\n")
            answer = client.receive("twice")
            assert "error" in answer or "denied by the rule" in failure(answer["result"])[0], answer


@pytest.mark.slow
def test_a_call_without_an_id_reaches_no_server(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted()) as client:
        client.send(method="tools/call", params={"name": "crash", "arguments": {}})
        pids = [client.text(f"{name}_pid") for name in "ab"]
        assert [client.text(f"{name}_pid") for name in "ab"] == pids


@pytest.mark.slow
def test_a_second_request_with_an_open_id_is_refused(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted()) as client:
        client.call("a_ask", id="same")
        question = client.wait_for("sampling/createMessage")["id"]
        client.call("b_echo", id="same")
        assert "another request with this id is open" in client.receive("same")["error"]["message"]
        client.send(id=question, result="first")
        assert client.receive("same")["result"]["content"][0]["text"] == '"first"'


# --- answers that cannot be merged ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_list_that_cannot_be_written_anew_is_left_out_alone(tmp_path: Path, rogue: Rogue) -> None:
    with several(tmp_path, a=rogue.entry(), b=named("y")) as client:
        for schema in ("NaN", "-Infinity", nested(300), nested(880), json.dumps("x" * 4_200_000)):
            rogue.answer("tools/list", f'{{"tools":[{{"name":"t","inputSchema":{schema}}}]}}')
            assert tools(client) == ["b_same", "b_only_y"], schema[:20]
        many = {"tools": [{"name": "t", "description": "x" * 60_000}], "nextCursor": "for ever"}
        rogue.answer("tools/list", many)
        assert tools(client) == ["b_same", "b_only_y"]
        rogue.list_tools("t")
        assert tools(client) == ["a_t", "b_same", "b_only_y"]


def receive_beside_others(client: RawClient, id: Any) -> Any:
    """Return the answer to a request, without reading other messages, which are too deep for the test as well."""
    while f'"id":{id},' not in (line := client.next_line().decode()).replace(": ", ":"):
        assert line
    return json.loads(line)


@pytest.mark.slow
def test_messages_that_are_nested_deep_do_not_end_the_process(
    tmp_path: Path, rogue: Rogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    with several(tmp_path, a=rogue.entry(), b=named("y")) as client:
        monkeypatch.setattr(RawClient, "receive", receive_beside_others)
        for levels in range(840, 900, 6):
            deep = nested(levels)
            for line in (
                f'{{"x":1,"jsonrpc":"2.0","id":7,"y":2,"method":"sampling/createMessage","params":{deep}}}',
                f'{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":7,"x":{deep}}}}}',
            ):
                rogue.answer("send", line)
                assert client.ask("a_honest")["server"] == "rogue"
        assert server_of(client, "tools/call", name="b_same") == "y"


def test_a_greeting_that_cannot_be_merged_leaves_its_server_out(tmp_path: Path, rogue: Rogue) -> None:
    rogue.answer("initialize", f'{{"protocolVersion":"2025-06-18","capabilities":{{"tools":{nested(880)}}}}}')
    with several(tmp_path, greets=False, a=rogue.entry(), b=named("y")) as client:
        assert "did not accept the greeting" in client.greet()["result"]["instructions"]
        assert server_of(client, "tools/call", name="b_same") == "y"


# --- processes that hang -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wrap_that_is_stopped_is_replaced_after_the_limits_of_the_call(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(timeout="500ms", grace="200ms"), b=scripted()) as client:
        pid, wrap = int(client.text("a_pid")), wraps_of(client)["a"]
        wrap.suspend()
        hanging = client.call("a_echo", text="x")
        assert client.text("b_echo", text="meanwhile") == "meanwhile"
        text, envelope = failure(client.receive(hanging)["result"])
        assert "its wrap did not answer within its limits and was killed" in text
        assert envelope["error"]["code"] == "CONNECTION_LOST" and envelope["meta"]["ending"] == "abandoned"
        client.wait_for("notifications/tools/list_changed")
        assert int(client.text("a_pid")) != pid
        give_up_at = time.monotonic() + ENDED_WITHIN_S
        while psutil.pid_exists(pid):
            assert time.monotonic() < give_up_at
            time.sleep(POLL_S)


@pytest.mark.slow
def test_a_wrap_that_is_stopped_before_its_greeting_is_replaced(tmp_path: Path) -> None:
    short = scripted(**{"start-up": "1s", "grace": "200ms"})
    with several(tmp_path, greets=False, a=short, b=scripted()) as client:
        give_up_at = time.monotonic() + ANSWER_WITHIN_S
        while "a" not in (wraps := wraps_of(client)):
            assert time.monotonic() < give_up_at
            time.sleep(POLL_S)
        os.kill(wraps["a"].pid, signal.SIGSTOP)
        client.greet()
        assert client.text("b_echo", text="works") == "works"
        while "a_echo" not in tools(client):
            client.wait_for("notifications/tools/list_changed")
        assert client.text("a_echo", text="late") == "late"


@pytest.mark.slow
def test_a_slow_client_does_not_make_a_server_seem_to_hang(tmp_path: Path) -> None:
    servers = {"a": scripted(timeout="1s", grace="100ms"), "b": scripted()}
    with connected(wrap_of(tmp_path / "wrap.yaml", servers)) as client:
        client.greet()
        pid = client.text("a_pid")
        big, small = client.call("b_big", size=3_000_000), client.call("a_echo", text="waits")
        time.sleep(14)  # longer than the limits of the call with the margin beyond them; nothing is read meanwhile
        assert len(client.receive(big)["result"]["content"][0]["text"]) == 3_000_000
        assert client.receive(small)["result"]["content"][0]["text"] == "waits"
        assert client.text("a_pid") == pid


@pytest.mark.slow
def test_a_client_that_reads_nothing_does_not_fill_the_memory(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted()) as client:
        assert client.process.stdin is not None
        os.set_blocking(client.process.stdin.fileno(), False)
        line = b'{"jsonrpc":"2.0","id":"x","method":"none/such"}\n' * 1_000
        sent, stuck_at = 0, time.monotonic() + ANSWER_WITHIN_S
        while sent < 60_000_000 and time.monotonic() < stuck_at:
            try:
                sent += os.write(client.process.stdin.fileno(), line[sent % 48 :])
                stuck_at = time.monotonic() + 2
            except BlockingIOError:
                time.sleep(POLL_S)
        assert sent < 60_000_000  # it was not read any more
        assert psutil.Process(client.process.pid).memory_info().rss < 60_000_000
        os.set_blocking(client.process.stdin.fileno(), True)
        client.process.terminate()


@pytest.mark.slow
def test_a_stopped_wrap_does_not_outlive_the_client(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(shutdown="200ms", grace="200ms"), b=scripted()) as client:
        wraps_of(client)["a"].suspend()


@pytest.mark.slow
def test_a_server_cannot_take_the_task_of_another(tmp_path: Path, rogue: Rogue) -> None:
    rogue.answer("tools/call", {"task": {"taskId": "task-of-y"}})
    with several(tmp_path, a=rogue.entry(), b=named("y")) as client:
        for name in ("b_same", "a_honest"):
            client.receive(client.request("tools/call", {"name": name, "task": {}}))
        assert server_of(client, "tasks/get", taskId="task-of-y") == "y"


@pytest.mark.slow
def test_a_greeting_or_an_object_that_clients_refuse_does_not_spoil_those_of_others(
    tmp_path: Path, rogue: Rogue
) -> None:
    strange = {"tools": "x", "logging": 1, "resources": {"subscribe": {}}, "prompts": {"listChanged": []}}
    rogue.answer("initialize", {**GREETING, "capabilities": strange})
    rogue.answer("tools/list", {"tools": [{"name": "t"}, {"name": 1, "inputSchema": {}}, None, {"inputSchema": {}}]})
    with several(tmp_path, greets=False, a=named("y"), b=rogue.entry()) as client:
        capabilities = client.greet()["result"]["capabilities"]
        changes = {"listChanged": True}
        assert capabilities["tools"] == capabilities["prompts"] == changes and "logging" not in capabilities
        assert isinstance(capabilities["resources"]["subscribe"], bool)
        assert tools(client) == ["a_same", "a_only_y"]
    for version in ("1999-01-01", "0", None, 7):
        rogue.answer("initialize", {**GREETING, "protocolVersion": version})
        with several(tmp_path, greets=False, a=named("y"), b=rogue.entry()) as client:
            greeting = client.greet()["result"]
            assert greeting["protocolVersion"] == "2025-06-18" and "## b\n\nThis server" in greeting["instructions"]
