"""A server that crashes is replaced, and nothing of it outlives the client."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import Watch
from tests.processes import wait_until_gone
from tests.wrap.client import ENDED_WITHIN_S, ENVELOPE, GREETING, SERVER, RawClient, failure, wrapped

pytestmark = pytest.mark.usefixtures("no_survivors")

POLL_S = 0.02


def test_a_crash_fails_the_call_and_the_next_one_works() -> None:
    with wrapped() as client:
        text, envelope = failure(client.ask("crash"))
        assert "the server ended with exit code 3" in text and "outcome is unknown" in text
        assert "about to crash" in text and "about to crash" in envelope["error"]["context"]["stderr"]
        assert envelope["error"]["code"] == "CONNECTION_LOST"
        assert client.text("echo", text="back") == "back"
        assert client.wait_for("notifications/tools/list_changed")


def test_a_harmless_call_is_repeated_after_a_crash(tmp_path: Path) -> None:
    with wrapped(server=[*SERVER, "--die-once", str(tmp_path / "died")]) as client:
        client.receive(client.request("tools/list"))
        assert client.text("die_once") == "alive"


def test_a_server_that_is_not_there_is_named_also_where_the_client_says_nothing() -> None:
    argv = [sys.executable, "-m", "shotclock", "wrap", "--", "no-such-server"]
    ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=ENDED_WITHIN_S)
    assert (ran.returncode, ran.stdout) == (127, b"")
    assert b"'no-such-server' was not found" in ran.stderr


def test_a_call_without_hints_is_not_repeated(tmp_path: Path) -> None:
    with wrapped(server=[*SERVER, "--die-once", str(tmp_path / "died")]) as client:
        failure(client.ask("die_once"))  # the client has not listed the tools, so no hint was seen


def test_a_late_answer_to_the_old_server_does_not_reach_the_new_one() -> None:
    with wrapped() as client:
        lost, crash = client.call("ask"), client.call("crash")
        old = client.wait_for("sampling/createMessage")
        assert old["id"] == 0
        failure(client.receive(lost)["result"])
        failure(client.receive(crash)["result"])
        assert client.wait_for("notifications/cancelled")["params"]["requestId"] == 0
        id = client.call("ask")
        new = client.wait_for("sampling/createMessage")
        assert new["id"] != 0 and isinstance(new["id"], str)
        client.send(id=0, result="old")
        client.send(id=new["id"], result="new")
        assert client.receive(id)["result"]["content"][0]["text"] == '"new"'


def test_calls_wait_for_a_new_server_until_their_queue_limit(tmp_path: Path) -> None:
    later = ["--started", str(tmp_path / "started"), "--mute-later", "initialize"]
    with wrapped("--queue", "500ms", "--start-up", "1m", server=[*SERVER, *later]) as client:
        failure(client.ask("crash"))
        text, envelope = failure(client.ask("echo", text="waits"))
        assert "was not sent: the server was not ready within 500ms" in text and "safe to call it again" in text
        assert envelope["error"]["code"] == "QUEUE_TIMEOUT" and envelope["error"]["retryable"] is True
        assert envelope["meta"]["ending"] == "not_started"


def test_a_server_that_does_not_answer_the_replayed_greeting_is_replaced(tmp_path: Path) -> None:
    later = ["--started", str(tmp_path / "started"), "--mute-later", "initialize"]
    with wrapped("--start-up", "300ms", server=[*SERVER, *later]) as client:
        failure(client.ask("crash"))
        (tmp_path / "started").unlink()  # the third start is a good one again
        assert client.text("echo", text="third") == "third"


def test_requests_of_any_length_wait_for_the_new_server_and_keep_their_order(tmp_path: Path) -> None:
    later = ["--started", str(tmp_path / "started"), "--delay-later", "0.5"]
    long = "z" * 500_000
    with wrapped(server=[*SERVER, *later]) as client:
        failure(client.ask("crash"))
        ids = [client.call("echo", text=text) for text in ("first", long, "last")]
        texts = [client.receive(id)["result"]["content"][0]["text"] for id in ids]
        assert texts == ["first", long, "last"]


def test_a_held_call_that_is_cancelled_never_reaches_the_server(tmp_path: Path) -> None:
    later = ["--started", str(tmp_path / "started"), "--delay-later", "0.5"]
    with wrapped(server=[*SERVER, *later]) as client:
        failure(client.ask("crash"))
        client.send(method="notifications/cancelled", params={"requestId": client.call("crash")})
        assert client.text("echo", text="alive") == "alive"


def test_the_greeting_and_the_log_level_are_replayed(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with wrapped(server=[*SERVER, "--record", str(record)]) as client:
        client.receive(client.request("logging/setLevel", {"level": "debug"}))
        failure(client.ask("crash"))
        assert json.loads(client.text("levels")) == ["debug"]
        answers = [json.loads(line) for line in record.read_bytes().splitlines()]
        ids = [str(answer.get("id")) for answer in answers]
        # The answers to our own requests did not reach the client.
        assert sum(id.startswith("shotclock-replay") for id in ids) == 2
        assert b"shotclock-replay" not in b"".join(client.lines)


@pytest.mark.slow
def test_a_server_that_keeps_crashing_is_not_started_for_a_while(tmp_path: Path) -> None:
    log = tmp_path / "log"
    failing = [*SERVER, "--exit-at-start", "7"]
    with log.open("wb") as stderr, wrapped(server=failing, greets=False, stderr=stderr) as client:
        error = client.receive(client.request("initialize", GREETING))["error"]
        assert error["code"] == -32000 and "exit code 7" in error["message"] and "cannot start" in error["message"]
        deadline = time.monotonic() + ENDED_WITHIN_S
        while True:
            error = client.receive(client.request("ping"))["error"]
            envelope = error["data"][ENVELOPE]
            if envelope["error"]["code"] == "SERVICE_UNAVAILABLE":
                break
            assert time.monotonic() < deadline
        assert "crashed too often" in error["message"]
        assert 0 < envelope["error"]["retry_after_ms"] <= 30_000
        assert envelope["meta"]["side_effects"] == "none"
    assert "is not started again for a while: 30s" in log.read_text()


@pytest.mark.slow
def test_a_server_that_a_signal_has_stopped_is_replaced() -> None:
    with wrapped() as client:
        pid = int(client.text("pid"))
        os.kill(pid, signal.SIGSTOP)
        text, envelope = failure(client.ask("hang"))
        assert "was stopped by a signal" in text and envelope["error"]["code"] == "HOST_REPLACED"
        assert int(client.text("pid")) != pid


def test_an_answer_that_breaks_off_is_followed_by_a_failure_and_a_new_server() -> None:
    with wrapped() as client:
        failure(client.ask("half"))
        assert not client.others  # not the half of a line
        assert client.text("echo", text="whole") == "whole"


@pytest.mark.parametrize("death", ["stdin", "client", "wrapper", "server", "term"])
def test_nothing_outlives_any_death(death: str, no_survivors: Watch) -> None:
    with wrapped("--shutdown", "300ms") as client:
        pid, daemon = int(client.text("pid")), int(client.text("daemon"))
        assert psutil.pid_exists(daemon)
        # A call that comes after the kill goes to the next server, which has to answer another one.
        client.call("hang" if death == "server" else "block")
        match death:
            case "stdin" | "client":
                pass
            case "wrapper":
                client.process.kill()
            case "server":
                os.kill(pid, signal.SIGKILL)
                wait_until_gone(daemon)
                assert int(client.text("pid")) != pid
            case "term":
                client.process.terminate()
        if death == "client":  # both of its ends are closed at once, as by a kill
            assert client.process.stdout is not None
            client.process.stdout.close()
        assert client.process.stdin is not None
        client.process.stdin.close()
        code = client.process.wait(ENDED_WITHIN_S)
        expected = {"wrapper": -signal.SIGKILL, "term": -signal.SIGTERM}
        assert code == expected.get(death, 0)
        wait_until_gone(pid)
        wait_until_gone(daemon)


def test_a_killed_client_takes_the_server_along() -> None:
    program = (
        "import subprocess, sys, time\n"
        "process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", program, sys.executable, "-m", "shotclock", "wrap", "--", *SERVER]
    client = RawClient(argv, None)
    front = int(client.next_line())
    os.kill(client.process.pid, signal.SIGKILL)
    client.process.wait(ENDED_WITHIN_S)
    wait_until_gone(front)
    for stream in (client.process.stdin, client.process.stdout):
        assert stream is not None
        stream.close()


def test_a_killed_supervisor_is_noticed_and_its_server_replaced() -> None:
    with wrapped() as client:
        pid = int(client.text("pid"))
        supervisor = psutil.Process(pid).ppid()
        os.kill(supervisor, signal.SIGKILL)
        wait_until_gone(pid)
        assert int(client.text("pid")) != pid


def test_an_idle_server_is_stopped_and_started_again_when_needed() -> None:
    with wrapped("--idle-shutdown", "300ms") as client:
        pid = int(client.text("pid"))
        wait_until_gone(pid)
        assert int(client.text("pid")) != pid


def test_an_old_server_is_replaced_between_two_calls() -> None:
    with wrapped("--max-lifetime", "500ms") as client:
        pid = int(client.text("pid"))
        wait_until_gone(pid)
        assert int(client.text("pid")) != pid


def test_calls_that_come_while_a_server_is_retired_are_not_lost() -> None:
    with wrapped("--max-lifetime", "20ms") as client:
        for number in range(30):
            assert client.text("echo", text=str(number)) == str(number)


def test_a_lazy_server_starts_with_the_first_message(no_survivors: Watch) -> None:
    with wrapped("--lazy", greets=False) as client:
        assert not psutil.Process(client.process.pid).children()
        client.greet()
        assert client.text("echo", text="awake") == "awake"


def test_a_command_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    log = tmp_path / "log"
    table = (["/nowhere/at-all"], 127, "give its path"), ([str(tmp_path / "plain")], 126, "make it executable")
    for argv, code, hint in table:
        with log.open("wb") as stderr, wrapped(server=argv, greets=False, stderr=stderr) as client:
            assert client.process.wait(ENDED_WITHIN_S) == code
        assert hint in log.read_text()


@pytest.mark.slow
def test_a_cached_catalogue_is_answered_before_the_server_is_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    server = [*SERVER, "--started", str(tmp_path / "started"), "--delay-later", "1"]
    answers = []
    for _ in range(2):
        with wrapped("--cached-catalogue", "--lazy", "--queue", "100ms", server=server, greets=False) as client:
            refused = client.receive(client.request("server/discover", {}))
            answers.append((refused, client.greet(), client.receive(client.request("tools/list"))))
            said_before = len(client.lines)
            # The call waits for the start, not only for its queue limit, and the server was greeted once.
            assert client.text("echo", text="ready") == "ready"
            assert said_before == 3
            if len(answers) == 2:  # the list may be old
                assert client.wait_for("notifications/tools/list_changed")
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_cached_catalogue_does_not_need_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    server = [*SERVER, "--started", str(tmp_path / "started"), "--mute-later", "initialize"]
    with wrapped("--cached-catalogue", server=server) as client:
        tools = client.receive(client.request("tools/list"))["result"]
    with wrapped("--cached-catalogue", "--start-up", "1s", server=server) as client:
        assert client.receive(client.request("tools/list"))["result"] == tools
        failure(client.ask("echo", text="never"))


def test_a_person_who_starts_it_at_a_terminal_learns_what_it_waits_for() -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "shotclock", "wrap", "--lazy", "--", *SERVER]
    with subprocess.Popen(argv, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None and select.select([process.stderr], [], [], ENDED_WITHIN_S)[0]
            assert b"shotclock mcp tools -- COMMAND" in process.stderr.readline()
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)
