"""Several servers as one: merged lists, routed calls, limits and policy of each, and their deaths."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Watch
from tests.processes import wait_until_gone
from tests.wrap.client import ANSWER_WITHIN_S, ENDED_WITHIN_S, GREETING, RawClient, connected, failure
from tests.wrap.several import entry, named, scripted, several, wrap_of

pytestmark = pytest.mark.usefixtures("no_survivors")

POLL_S = 0.02
BIG = 60_000_000
PEAK_LIMIT_KB = 30 * 1024


def names(client: RawClient, method: str, key: str, of: str = "name") -> list[str]:
    return [each[of] for each in client.receive(client.request(method))["result"][key]]


def seen(client: RawClient, method: str, **params: Any) -> tuple[str, Any]:
    """Return the server that answered a request, and the parameters that it got."""
    result = client.receive(client.request(method, params))["result"]
    return result["server"], result["params"]


def wait_for_text(file: Path, text: str) -> None:
    give_up_at = time.monotonic() + ANSWER_WITHIN_S
    while text not in file.read_text():
        assert time.monotonic() < give_up_at, file.read_text()
        time.sleep(POLL_S)


# --- one server made of several ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_greetings_of_all_servers_become_one(tmp_path: Path) -> None:
    with several(tmp_path, greets=False, a=named("new"), b=named("old"), c=scripted()) as client:
        result = client.greet()["result"]
        assert result["protocolVersion"] == "2025-03-26"
        assert result["serverInfo"]["name"] == "shotclock wrap"
        assert result["instructions"] == "## a\n\nUse new.\n\n## b\n\nUse old."
        changes = {"listChanged": True}
        assert result["capabilities"] == {
            "tools": changes,
            "prompts": changes,
            "resources": {"subscribe": True, **changes},
            "completions": {},
            "logging": {},
        }
        again = client.receive(client.request("initialize", GREETING))["error"]
        assert again["code"] == -32600


@pytest.mark.slow
def test_lists_have_all_pages_of_all_servers_under_prefixes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as stderr, several(tmp_path, stderr=stderr, a=named("x"), b=named("y", prefix="")) as client:
        assert names(client, "tools/list", "tools") == ["a_same", "a_only_x", "same", "only_y"]
        assert names(client, "prompts/list", "prompts") == ["a_hello", "a_bye_x", "hello", "bye_y"]
        assert names(client, "resources/list", "resources", "uri") == ["x://one", "shared://one", "y://one"]
        templates = names(client, "resources/templates/list", "resourceTemplates", "uriTemplate")
        assert templates == ["x://by/{id}/x", "y://by/{id}/x"]
        assert "cursor" in client.receive(client.request("tools/list", {"cursor": "1"}))["error"]["message"]
    assert log.read_text().count("shared://one of the server b is left out: it belongs to a") == 1


@pytest.mark.slow
def test_requests_reach_the_server_that_has_the_object(tmp_path: Path) -> None:
    with several(tmp_path, a=named("x"), b=named("y"), c=named("z", prefix="")) as client:
        assert seen(client, "tools/call", name="b_same", arguments={"name": "b_same"}) == (
            "y",
            {"name": "same", "arguments": {"name": "b_same"}},
        )
        assert seen(client, "tools/call", name="unlisted")[0] == "z"
        assert seen(client, "prompts/get", name="a_hello") == ("x", {"name": "hello"})
        assert seen(client, "completion/complete", ref={"type": "ref/prompt", "name": "b_hello"}) == (
            "y",
            {"ref": {"type": "ref/prompt", "name": "hello"}},
        )
        template = {"type": "ref/resource", "uri": "y://by/{id}/x"}
        assert seen(client, "completion/complete", ref=template)[0] == "y"
        for uri, server in (("y://one", "y"), ("x://by/12/x", "x"), ("shared://one", "x")):
            assert seen(client, "resources/read", uri=uri) == (server, {"uri": uri})
            assert seen(client, "resources/subscribe", uri=uri)[0] == server
        unknown = client.receive(client.request("resources/read", {"uri": "none://x"}))["error"]
        assert "no server lists the resource 'none://x'" in unknown["message"]
        unnamed = client.receive(client.request("some/method", {}))["error"]
        assert "some/method does not name one of the 3 servers" in unnamed["message"]
        assert client.receive(client.request("ping"))["result"] == {}


@pytest.mark.slow
def test_tasks_belong_to_the_server_that_began_them(tmp_path: Path) -> None:
    with several(tmp_path, a=named("x"), b=named("y")) as client:
        for name in ("a_same", "b_same"):
            client.receive(client.request("tools/call", {"name": name, "task": {}}))
        assert seen(client, "tasks/get", taskId="task-of-y")[0] == "y"
        assert seen(client, "tasks/cancel", taskId="task-of-x")[0] == "x"
        assert "no server is known" in client.receive(client.request("tasks/get", {"taskId": "z"}))["error"]["message"]


@pytest.mark.slow
def test_bytes_other_than_the_name_pass_unchanged(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted("--id-last")) as client:
        client.write(
            b'{ "params" : {"arguments":{"text":"\xc3\xa9 \\u00e9 1.0","name":"b_x"} ,"name": "b_echo" },'
            b'"method":"tools/call", "jsonrpc":"2.0","id":"7" }\n'
        )
        assert client.receive("7")["result"]["content"][0]["text"] == "é é 1.0"
        assert client.lines[-1].startswith(b'{"result":')  # as this server writes it
        client.write(b"not json\n[]\n")
        assert [client.receive(None)["error"]["code"] for _ in range(2)] == [-32700, -32600]


@pytest.mark.slow
def test_log_levels_reach_every_server_with_a_log(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=named("x"), c=scripted()) as client:
        assert client.receive(client.request("logging/setLevel", {"level": "debug"}))["result"] == {}
        assert [client.text(f"{name}_levels") for name in "ac"] == ['["debug"]'] * 2


@pytest.mark.slow
def test_questions_of_two_servers_with_equal_ids_are_told_apart(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted()) as client:
        calls = [client.call("a_ask"), client.call("b_ask")]
        questions = [client.wait_for("sampling/createMessage")["id"] for _ in calls]
        assert len(set(questions)) == 2
        for id in reversed(questions):
            client.send(id=id, result=id)
        answers = [json.loads(client.receive(id)["result"]["content"][0]["text"]) for id in calls]
        assert [answer[0] for answer in answers] == ["a", "b"]
        client.send(id="unknown", result=1)
        assert client.text("a_echo", text="fine") == "fine"


@pytest.mark.slow
def test_requests_that_come_before_the_greeting_is_answered_wait_for_it(tmp_path: Path) -> None:
    with several(tmp_path, greets=False, a=scripted(), b=scripted()) as client:
        greeting, cancelled = client.request("initialize", GREETING), client.call("a_crash")
        client.send(method="notifications/cancelled", params={"requestId": cancelled})
        call = client.call("b_echo", text="early")
        assert client.receive(greeting)["result"]["capabilities"]
        assert client.receive(call)["result"]["content"][0]["text"] == "early"
        assert client.text("a_echo", text="alive") == "alive" and not client.others


@pytest.mark.slow
def test_a_client_may_give_up_a_discovery_and_initialize(tmp_path: Path) -> None:
    with several(tmp_path, greets=False, a=scripted("--mute", "server/discover"), b=named("x")) as client:
        probe = client.request("server/discover", {})
        client.send(method="notifications/cancelled", params={"requestId": probe})
        assert "instructions" in client.greet()["result"]
        assert client.text("a_echo", text="fine") == "fine"
        assert seen(client, "tools/call", name="b_same")[0] == "x"
        again = client.receive(client.request("server/discover", {}))["error"]
        assert again["code"] == -32601


@pytest.mark.slow
def test_cancellation_and_progress_reach_the_right_side(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted()) as client:
        id = client.call("b_hang")
        client.send(method="notifications/cancelled", params={"requestId": id})
        assert [client.text(f"{name}_cancelled") for name in "ab"] == ["[]", f"[{id}]"]
        client.receive(client.call("b_progress", meta={"progressToken": "t"}, count=2, every=0.01))
        assert [client.wait_for("notifications/progress")["params"]["progress"] for _ in range(2)] == [1, 2]


# --- limits and policy ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_server_has_limits_and_rules_of_its_own(tmp_path: Path) -> None:
    short = scripted(timeout="500ms", grace="500ms")
    strict = scripted(rules=[{"allow": "echo"}, {"deny": "*"}], tools={"hang": {"timeout": "300ms"}})
    with several(tmp_path, a=short, b=strict, c=scripted()) as client:
        hanging = client.call("a_hang")
        assert client.text("c_echo", text="meanwhile") == "meanwhile"
        assert "within 500ms, its timeout" in failure(client.receive(hanging)["result"])[0]
        assert client.text("b_echo", text="allowed") == "allowed"
        text, envelope = failure(client.ask("b_pid"))
        assert "denied by the rule" in text and envelope["error"]["code"] == "NOT_ALLOWED"
        assert int(client.text("c_pid"))


@pytest.mark.slow
def test_options_under_defaults_count_for_every_server(tmp_path: Path) -> None:
    servers = {"a": scripted(), "b": scripted(timeout="1m")}
    argv = wrap_of(tmp_path / "wrap.yaml", servers, defaults={"timeout": "400ms", "grace": "300ms"})
    with connected(argv) as client:
        client.greet()
        waits = client.call("b_hang")
        failure(client.ask("a_hang"))
        assert client.text("b_echo", text="x") == "x"
        client.send(method="notifications/cancelled", params={"requestId": waits})


@pytest.mark.slow
def test_an_approval_before_a_tool_of_one_server_waits_for_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    asking = scripted(rules=[{"ask": "pid"}], env={"SECRET": "x"}, **{"ask-wait": "300ms"})
    with several(tmp_path, a=asking, b=scripted()) as client:
        assert "waits for approval" in client.ask("a_pid")["content"][0]["text"]
        assert int(client.text("b_pid"))


# --- servers that are not there ------------------------------------------------------------------------------------


def test_the_others_work_without_a_server_that_cannot_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        open(log, "wb") as stderr,
        several(tmp_path, greets=False, stderr=stderr, a=scripted(), b=entry(["/nowhere/at-all"])) as client,
    ):
        assert "cannot be started: '/nowhere/at-all' was not found" in client.greet()["result"]["instructions"]
        assert all(name.startswith("a_") for name in names(client, "tools/list", "tools"))
        text, envelope = failure(client.ask("b_tool"))
        assert "tool b_tool was not sent: the server b cannot be started" in text
        assert envelope["error"]["code"] == "CONNECT_FAILED" and envelope["meta"]["ending"] == "not_started"
        assert client.text("a_echo", text="works") == "works"
    assert "b: shotclock wrap: '/nowhere/at-all' was not found" in log.read_text()


def test_without_any_server_the_exit_code_is_that_of_the_first(tmp_path: Path) -> None:
    with several(tmp_path, greets=False, a=entry(["/nowhere/at-all"]), b=entry([str(tmp_path)])) as client:
        assert client.process.wait(ENDED_WITHIN_S) == 127


@pytest.mark.slow
def test_a_server_that_hangs_at_its_start_does_not_stop_the_others(tmp_path: Path) -> None:
    mute = scripted("--mute", "initialize", **{"start-up": "1s"})
    with several(tmp_path, greets=False, a=scripted(), b=mute) as client:
        assert "b\n\nThis server is not available now" in client.greet()["result"]["instructions"]
        assert client.text("a_echo", text="works") == "works"
        text, _ = failure(client.ask("b_echo"))
        assert "the server b " in text


@pytest.mark.slow
def test_a_server_that_comes_later_is_announced(tmp_path: Path) -> None:
    (tmp_path / "once").touch()
    later = scripted("--started", str(tmp_path / "once"), "--mute-later", "initialize", **{"start-up": "1s"})
    with several(tmp_path, greets=False, a=named("x"), b=later) as client:
        result = client.greet()["result"]
        assert "logging" not in result["capabilities"]
        assert names(client, "tools/list", "tools") == ["a_same", "a_only_x"]
        (tmp_path / "once").unlink()  # its next start is a good one
        client.wait_for("notifications/tools/list_changed")
        assert "b_echo" in names(client, "tools/list", "tools")
        assert client.text("b_echo", text="late") == "late"


@pytest.mark.slow
def test_a_server_whose_list_fails_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        open(log, "wb") as stderr,
        several(
            tmp_path,
            stderr=stderr,
            a=named("x"),
            b=named("y", "--crash-at-list"),
            c=scripted("--mute", "tools/list", list="1s"),
        ) as client,
    ):
        assert names(client, "tools/list", "tools") == ["a_same", "a_only_x"]
        assert client.text("c_echo", text="still") == "still"
    assert log.read_text().count("tools/list leaves out the server") == 2


# --- deaths --------------------------------------------------------------------------------------------------------


def wrap_above(pid: int) -> int:
    """Return the wrap of a server: its supervisor's parent."""
    return psutil.Process(psutil.Process(pid).ppid()).ppid()


@pytest.mark.slow
def test_a_killed_server_is_replaced_by_its_wrap(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted()) as client:
        pid, other = int(client.text("a_pid")), int(client.text("b_pid"))
        lost = client.call("a_hang")
        client.text("a_echo", text="read after it")  # a call that comes after the kill goes to the next server
        os.kill(pid, signal.SIGKILL)
        assert "was killed by SIGKILL" in failure(client.receive(lost)["result"])[0]
        assert int(client.text("a_pid")) != pid and int(client.text("b_pid")) == other


@pytest.mark.slow
def test_a_killed_wrap_is_started_again_with_the_state_of_the_client(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted()) as client:
        client.receive(client.request("logging/setLevel", {"level": "debug"}))
        pid, other = int(client.text("a_pid")), int(client.text("b_pid"))
        lost, asking = client.call("a_hang"), client.call("a_ask")
        question = client.wait_for("sampling/createMessage")["id"]
        os.kill(wrap_above(pid), signal.SIGKILL)
        text, envelope = failure(client.receive(lost)["result"])
        assert "the server a is being started again, because its wrap was killed by SIGKILL" in text
        assert "outcome is unknown" in text and envelope["error"]["code"] == "CONNECTION_LOST"
        failure(client.receive(asking)["result"])
        assert client.wait_for("notifications/cancelled")["params"]["requestId"] == question
        client.wait_for("notifications/tools/list_changed")
        client.send(id=question, result="late")
        assert client.text("a_levels") == '["debug"]'
        assert int(client.text("b_pid")) == other
        wait_until_gone(pid)


@pytest.mark.slow
@pytest.mark.parametrize("death", ["stdin", "client", "wrapper", "term", "interrupt"])
def test_nothing_outlives_any_death(death: str, tmp_path: Path, no_survivors: Watch) -> None:
    with several(tmp_path, a=scripted(shutdown="300ms"), b=scripted(shutdown="300ms")) as client:
        pids = [int(client.text(f"{name}_{tool}")) for name in "ab" for tool in ("pid", "daemon")]
        client.call("a_block")
        match death:
            case "wrapper":
                client.process.kill()
            case "term":
                client.process.terminate()
            case "interrupt":
                client.process.send_signal(signal.SIGINT)
            case "client":  # both of its ends are closed at once, as by a kill
                assert client.process.stdout is not None
                client.process.stdout.close()
        assert client.process.stdin is not None
        client.process.stdin.close()
        code = client.process.wait(ENDED_WITHIN_S)
        expected = {"wrapper": -signal.SIGKILL, "term": -signal.SIGTERM, "interrupt": -signal.SIGINT}
        assert code == expected.get(death, 0)
        for pid in pids:
            wait_until_gone(pid)


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_result_of_60_mb_passes_without_being_gathered(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted("--id-last")) as client:
        for name in "ab":
            listing = client.request("tools/list")
            big = client.call(f"{name}_big", size=BIG)
            other = client.call("a_echo", text="beside it")
            assert len(client.receive(big)["result"]["content"][0]["text"]) == BIG
            assert client.receive(other)["result"]["content"][0]["text"] == "beside it"
            assert len(client.receive(listing)["result"]["tools"]) == 12
        status = Path(f"/proc/{client.process.pid}/status").read_text()
        assert int(status.split("VmHWM:")[1].split()[0]) <= PEAK_LIMIT_KB


@pytest.mark.slow
def test_long_requests_reach_the_server_that_they_name_at_either_end(tmp_path: Path) -> None:
    long = "é" * 500_000
    with several(tmp_path, a=scripted(), b=scripted("--id-last")) as client:
        assert client.text("a_echo", text=long) == long
        for size, is_passed in ((200_000, True), (3_000_000, False)):
            text = "x" * size
            client.write(
                b'{"jsonrpc":"2.0","method":"tools/call","params":{"arguments":{"text":"'
                + text.encode()
                + b'"},"name":"b_echo"},"id":"end"}\n'
            )
            answer = client.receive("end")
            if is_passed:
                assert answer["result"]["content"][0]["text"] == text
            else:
                assert "does not name its server near its start" in answer["error"]["message"]
        id = client.call("b_ask")
        question = client.wait_for("sampling/createMessage")["id"]
        client.write(json.dumps({"jsonrpc": "2.0", "result": "y" * 100_000, "id": question}).encode() + b"\n")
        assert len(client.receive(id)["result"]["content"][0]["text"]) == 100_002


@pytest.mark.slow
def test_a_flood_of_one_server_does_not_mix_with_the_long_lines_of_another(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted()) as client:
        flood, big = client.call("a_flood", count=5_000), client.call("b_big", size=5_000_000)
        assert len(client.receive(big)["result"]["content"][0]["text"]) == 5_000_000
        assert client.receive(flood)["result"]["content"][0]["text"] == "done"
        assert [each["params"]["data"] for each in client.others] == list(range(5_000))


@pytest.mark.slow
def test_a_call_whose_answer_breaks_off_is_answered_after_it(tmp_path: Path) -> None:
    with several(tmp_path, a=scripted(), b=scripted()) as client:
        text, _ = failure(client.ask("a_half"))
        assert "exit code 5" in text
        assert b'"text":"yyy' in client.lines[-2]
        assert client.text("b_echo", text="fine") == "fine"
