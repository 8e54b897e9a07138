"""Every request is answered on time, whatever the server does."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.wrap.client import ENVELOPE, SERVER, failure, wrapped

pytestmark = pytest.mark.usefixtures("no_survivors")

Validate = Callable[[dict[str, Any]], dict[str, Any]]
HUNG_AT_ONCE = 200


def test_a_call_that_hangs_is_answered_at_its_timeout(validate_envelope: Validate) -> None:
    with wrapped("--timeout", "300ms", "--idle", "5m") as client:
        pid = client.text("pid")
        id = client.call("hang")
        text, envelope = failure(client.receive(id)["result"])
        assert "did not end within 300ms, its timeout" in text and "timeout 300ms, idle limit 5m" in text
        assert "outcome is unknown" in text and envelope["meta"]["request_id"] in text
        validate_envelope(envelope)
        error = envelope["error"]
        assert error["code"] == "TIMEOUT" and error["retryable"] is False
        assert error["context"]["clock"]["kind"] == "timeout" and error["context"]["clock"]["limit_ms"] == 300
        assert error["context"]["limits"] == {"timeout_ms": 300, "idle_ms": 300_000, "queue_ms": 30_000}
        assert envelope["meta"]["ending"] == "abandoned" and envelope["meta"]["side_effects"] == "unknown"
        # The server was asked to cancel it, is alive, and was not replaced.
        assert json.loads(client.text("cancelled")) == [id]
        assert client.text("pid") == pid


@pytest.mark.slow
def test_progress_resets_the_idle_limit_and_nothing_resets_the_timeout() -> None:
    with wrapped("--idle", "1s") as client:
        assert client.text("progress", count=8, every=0.2, meta={"progressToken": "p"}) == "finished"
        text, envelope = failure(client.ask("hang"))
        assert "made no progress for 1s" in text and envelope["error"]["code"] == "STALLED"
    with wrapped("--idle", "2s", "--timeout", "1s", "--grace", "300ms") as client:
        _, envelope = failure(client.ask("progress", count=100, every=0.1, meta={"progressToken": "p"}))
        assert envelope["error"]["code"] == "TIMEOUT"


def test_tools_have_limits_by_pattern() -> None:
    with wrapped("--timeout", "5m", "--tool", "ha*=timeout:200ms,idle:0") as client:
        _, envelope = failure(client.ask("hang"))
        assert envelope["error"]["context"]["limits"]["timeout_ms"] == 200


def test_a_server_that_answers_not_even_a_ping_is_replaced() -> None:
    with wrapped("--timeout", "300ms", "--grace", "300ms") as client:
        pid = client.text("pid")
        text, envelope = failure(client.ask("block"))
        assert "did not react within 300ms" in text and "was killed with everything" in text and "memory" in text
        assert envelope["meta"]["ending"] == "killed" and envelope["error"]["code"] == "TIMEOUT"
        assert client.wait_for("notifications/tools/list_changed")
        assert client.text("pid") != pid


def test_a_server_that_is_busy_with_an_older_call_is_not_killed_for_a_younger_one() -> None:
    with wrapped("--list", "200ms", "--grace", "200ms") as client:
        busy = client.call("progress", count=5, every=0.2, meta={"progressToken": "p"})
        message = client.receive(client.request("tools/list"))["error"]["message"]
        assert "may be busy with progress, which is within its limits" in message
        assert client.receive(busy)["result"]["content"][0]["text"] == "finished"


@pytest.mark.slow
def test_calls_beside_a_blocking_one_fail_and_later_ones_wait_for_the_new_server() -> None:
    with wrapped("--timeout", "1s", "--tool", "echo=timeout:1m", "--grace", "300ms") as client:
        client.receive(client.request("tools/list"))
        block, beside, echo = client.call("block"), client.call("crash"), client.call("echo", text="again")
        assert failure(client.receive(block)["result"])[1]["error"]["code"] == "TIMEOUT"
        assert failure(client.receive(beside)["result"])[1]["error"]["code"] in ("HOST_REPLACED", "TIMEOUT")
        # It only reads, so it was repeated.
        assert client.receive(echo)["result"]["content"][0]["text"] == "again"


def test_a_server_that_never_greets_or_lists_is_answered_for() -> None:
    with wrapped("--start-up", "300ms", server=[*SERVER, "--mute", "initialize"], greets=False) as client:
        error = client.receive(client.request("initialize", {}))["error"]
        assert "did not end within 300ms, the limit of --start-up" in error["message"]
        assert error["data"][ENVELOPE]["error"]["code"] == "TIMEOUT"
    with wrapped("--list", "300ms", server=[*SERVER, "--mute", "tools/list"]) as client:
        error = client.receive(client.request("tools/list"))["error"]
        assert error["code"] == -32001 and "the limit of --list" in error["message"]
        assert client.text("echo", text="still there") == "still there"


def test_an_open_subscription_has_no_limit() -> None:
    with wrapped("--timeout", "100ms", "--list", "100ms", server=[*SERVER, "--mute", "subscriptions/listen"]) as client:
        client.request("subscriptions/listen", {}, id="listen")
        failure(client.ask("hang"))
        assert client.text("echo", text="x") == "x"
        assert not [message for message in client.others if message.get("id") == "listen"]


def test_200_calls_hang_at_once_and_each_is_answered() -> None:
    with wrapped("--timeout", "500ms") as client:
        ids = [client.call("hang") for _ in range(HUNG_AT_ONCE)]
        for id in ids:
            failure(client.receive(id)["result"])
        assert client.text("echo", text="next") == "next"


def test_a_call_that_the_client_cancels_is_not_answered() -> None:
    with wrapped("--timeout", "300ms") as client:
        id = client.call("hang")
        client.send(method="notifications/cancelled", params={"requestId": id})
        failure(client.ask("hang"))
        assert json.loads(client.text("cancelled"))[0] == id
        assert not [message for message in client.others if message.get("id") == id]


@pytest.mark.slow
def test_heartbeats_are_sent_where_they_are_asked_for() -> None:
    with wrapped("--timeout", "1s", "--heartbeat", "200ms") as client:
        failure(client.ask("hang", meta={"progressToken": "beat"}))
        beats = [message["params"] for message in client.others if message["method"] == "notifications/progress"]
        assert len(beats) >= 2 and {beat["progressToken"] for beat in beats} == {"beat"}
        assert beats[0]["progress"] < beats[1]["progress"] < 1


def test_the_time_in_which_a_person_answers_is_not_idle() -> None:
    with wrapped("--idle", "300ms") as client:
        id = client.call("ask")
        client.wait_for("sampling/createMessage")
        time.sleep(0.8)  # the person thinks
        client.send(id=0, result="yes")
        assert client.receive(id)["result"]["content"][0]["text"] == '"yes"'
