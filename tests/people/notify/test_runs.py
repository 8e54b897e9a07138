"""Notifications of runs: once for each end and each park, also after `kill -9`, and never a reason to fail."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.proposal import Decision, ProposalStatus
from tests.flows.test_people import WITHIN_S, Runs, runs
from tests.people.notify.servers import Taken, wait_until, web_server

__all__ = ["runs"]

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

EVERYTHING = "[failed, parked, timed_out, ended]"
QUESTION = "steps: {ask: {type: human-input, prompt: Which way?}}\n"
# It can be killed while it waits for the file `go`, and may run again.
WAITING = "steps: {wait: {exec: 'touch began; while [ ! -e go ]; do sleep 0.05; done', idempotent: true}}\n"


@pytest.fixture
def taken() -> Iterator[Taken]:
    with web_server() as taken:
        yield taken


def flow(runs: Runs, taken: Taken, steps: str, on: str = EVERYTHING, more: str = "") -> str:
    return runs.flow(f"name: nightly\nnotify:\n  - {{on: {on}, webhook: '{taken.url}/run'}}\n{more}{steps}")


def events(taken: Taken) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in taken.items]


def names(taken: Taken) -> list[str]:
    return [event["event"] for event in events(taken)]


def user_file(runs: Runs, text: str) -> None:
    folder = runs.folder / "config" / "shotclock"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(text)
    runs.env["XDG_CONFIG_HOME"] = str(folder.parent)


def shotclock(runs: Runs, *words: str) -> Any:
    argv = [sys.executable, "-m", "shotclock", *words]
    ended = subprocess.run(argv, cwd=runs.folder, env=runs.env, capture_output=True, timeout=WITHIN_S)
    return json.loads(ended.stdout)


def test_a_failed_run_sends_one_message_that_says_what_failed(runs: Runs, taken: Taken) -> None:
    envelope = runs(flow(runs, taken, "steps: {build: {exec: exit 3}}"), "--run-id", "r1", code=3)
    assert envelope["warnings"] == []
    [event] = events(taken)
    assert (event["event"], event["run_id"], event["name"], event["code"]) == (
        "failed",
        "r1",
        "nightly",
        "STEPS_FAILED",
    )
    assert (event["ok"], event["failed"], event["command"]) == (False, ["build"], "shotclock report r1")
    assert event["text"].splitlines()[1:] == [
        "STEPS_FAILED: 1 of 1 steps failed: build",
        "build: the command ended with exit code 3",
        "shotclock report r1",
    ]


def test_each_end_is_sent_to_the_entries_that_ask_for_it(runs: Runs, taken: Taken) -> None:
    for steps, on, code, expected in (
        ("steps: {a: {exec: 'true'}}", "[ended]", 0, ["ended"]),
        ("steps: {a: {exec: 'true'}}", "[failed, timed_out, parked]", 0, []),
        ("steps: {a: {exec: 'false'}}", "[ended]", 3, ["failed"]),
        ("steps: {a: {exec: 'false'}}", "[timed_out]", 3, []),
        ("timeout: 1s\nsteps: {a: {exec: sleep 60}}", "[timed_out]", 10, ["timed_out"]),
        ("timeout: 1s\nsteps: {a: {exec: sleep 60}}", "[failed]", 10, ["timed_out"]),  # it has failed as well
    ):
        taken.items.clear()
        runs(flow(runs, taken, steps, on), code=code)
        assert names(taken) == expected, (steps, on)


def test_a_run_that_was_killed_sends_nothing_until_it_is_resumed_and_then_once(runs: Runs, taken: Taken) -> None:
    process = runs.start(flow(runs, taken, WAITING), "--run-id", "r1")
    wait_until((runs.folder / "began").exists)
    process.kill()
    process.communicate(timeout=WITHIN_S)
    assert taken.items == []
    (runs.folder / "go").touch()
    runs("--resume", "r1", code=0)
    runs("--resume", "r1", code=0)
    assert names(taken) == ["ended"]


def test_a_run_that_was_killed_while_it_sent_is_not_sent_again(runs: Runs, taken: Taken) -> None:
    taken.drips = True
    process = runs.start(flow(runs, taken, "steps: {a: {exec: 'true'}}"), "--run-id", "r1")
    taken.wait_for(1)
    process.kill()
    process.communicate(timeout=WITHIN_S)
    taken.drips = False
    assert runs("--resume", "r1", code=0)["data"]["completed"] == ["a"]
    assert names(taken) == ["ended"]


def test_a_run_that_was_killed_between_its_end_and_its_message_is_sent_when_it_is_resumed(
    runs: Runs, taken: Taken
) -> None:
    runs(flow(runs, taken, "steps: {a: {exec: 'true'}}"), "--run-id", "r1", code=0)
    taken.items.clear()
    with sqlite3.connect(runs.folder / "home" / "shotclock.db") as store:  # as the kill would leave it
        store.execute("UPDATE runs SET owes_notice = 1")
    store.close()
    for _ in range(2):
        runs("--resume", "r1", code=0)
    assert names(taken) == ["ended"]


def test_a_run_is_sent_once_for_each_time_it_is_parked(runs: Runs, taken: Taken) -> None:
    user_file(runs, 'page = "http://127.0.0.1:1234/"\n')
    parked = runs(flow(runs, taken, QUESTION), "--run-id", "r1", code=14)
    [event] = events(taken)
    [waiting] = event["waiting"]
    proposal_id = parked["data"]["waiting"][0]["proposal_id"]
    assert (event["event"], waiting["proposal_id"]) == ("parked", proposal_id)
    assert event["link"] == f"http://127.0.0.1:1234/#/{proposal_id}"
    runs("--resume", "r1", code=14)
    runs.decide(Decision(ProposalStatus.APPROVED, answer="left"))
    runs("--resume", "r1", code=0)
    assert names(taken) == ["parked", "parked", "ended"]


def test_a_server_that_does_not_answer_is_a_warning_in_the_answer_and_the_report(runs: Runs, taken: Taken) -> None:
    taken.drips = True
    began = time.monotonic()
    envelope = runs(flow(runs, taken, "steps: {a: {exec: 'true'}}"), "--run-id", "r1", code=0)
    assert 4 < time.monotonic() - began < WITHIN_S
    [notice] = envelope["warnings"]
    assert notice["code"] == "NOT_NOTIFIED"
    assert notice["message"] == f"webhook 127.0.0.1:{taken.port}: did not end within 5s"
    assert envelope["meta"]["duration_ms"] < 4_000  # the run itself had ended
    assert shotclock(runs, "report", "r1", "--format", "json")["data"]["warnings"] == [notice]
    runs("--resume", "r1", code=0)
    assert len(taken.items) == 1


def test_the_end_is_recorded_before_the_message_is_sent(runs: Runs, taken: Taken) -> None:
    taken.drips = True
    process = runs.start(flow(runs, taken, "steps: {a: {exec: 'true'}}"), "--run-id", "r1")
    taken.wait_for(1)
    assert shotclock(runs, "report", "r1", "--format", "json")["data"]["status"] == "succeeded"
    assert process.poll() is None
    process.communicate(timeout=WITHIN_S)


def test_the_caller_of_a_run_gets_its_answer_before_its_own_deadline(runs: Runs, taken: Taken) -> None:
    taken.drips = True
    file = flow(runs, taken, "steps: {a: {exec: sleep 60}}")
    program = [sys.executable, "-m", "shotclock"]
    argv = [*program, "exec", "--timeout", "3s", "--", *program, "run", file, "--json"]
    ended = subprocess.run(argv, cwd=runs.folder, env=runs.env, capture_output=True, timeout=WITHIN_S)
    envelope = json.loads(ended.stdout)
    assert (ended.returncode, envelope["error"]["code"]) == (10, "TIMEOUT")
    assert [notice["code"] for notice in envelope["warnings"]] == ["NOT_NOTIFIED"]


def test_secrets_are_neither_sent_nor_shown(runs: Runs, taken: Taken) -> None:
    runs.env["HOOK_TOKEN"] = "opensesame-1"
    (runs.folder / ".env").write_text("MORE_TOKEN=opensesame-2\n")
    text = (
        "name: nightly opensesame-1\nenv_file: .env\nnotify:\n"
        f"  - {{on: [failed], webhook: '{taken.url}/${{MORE_TOKEN}}', headers: {{X-Token: '${{HOOK_TOKEN}}'}}}}\n"
        f"  - {{on: [failed], webhook: 'http://127.0.0.1:1/${{MORE_TOKEN}}'}}\n"
        "steps: {a: {exec: 'false'}}\n"
    )
    envelope = runs(runs.flow(text), "--run-id", "r1", code=3)
    [request] = taken.items
    assert (request.path, request.headers["X-Token"]) == ("/opensesame-2", "opensesame-1")
    assert "opensesame" not in request.body
    assert len(envelope["warnings"]) == 1
    assert "opensesame" not in json.dumps(envelope["warnings"])


def test_the_users_file_is_for_all_runs_and_a_nested_run_sends_nothing(runs: Runs, taken: Taken) -> None:
    user_file(runs, f'timeout = "1m"\n[[notify]]\non = ["ended"]\nwebhook = "{taken.url}/user"\n')
    runs.flow(
        f"notify: [{{on: [ended], webhook: '{taken.url}/inner'}}]\nsteps: {{a: {{exec: 'true'}}}}\n", "inner.yaml"
    )
    outer = runs.flow("steps: {call: {type: workflow, workflow: inner.yaml}}\n")
    runs(outer, code=0)
    assert [request.path for request in taken.items] == ["/user"]
    found = shotclock(runs, "check", outer)["data"]["findings"]
    assert [(each["rule"], each["severity"]) for each in found] == [("nested/notify", "warning")]


def test_a_mistake_in_the_users_file_is_a_warning(runs: Runs) -> None:
    user_file(runs, '[[notify]]\non = ["faild"]\nwebhook = "https://example.com"\n')
    [notice] = runs(runs.flow("steps: {a: {exec: 'true'}}\n"), code=0)["warnings"]
    assert notice["code"] == "NOT_NOTIFIED"
    assert "notify.0.on.0: Input should be 'failed'" in notice["message"]


def test_a_mistake_in_a_workflow_file_is_refused_by_check_and_nothing_runs(runs: Runs) -> None:
    broken = runs.flow("notify: [{on: [faild], telegram: x}]\nsteps: {a: {exec: echo ran >> done}}\n")
    answer = shotclock(runs, "check", broken)
    assert [each["field"] for each in answer["error"]["errors"]] == ["notify.0.on.0", "notify.0.telegram"]
    assert not runs(broken, code=2)["ok"]
    assert runs.done() == []
    unset = runs.flow("notify: [{on: [failed], slack: '${NOT_SET_HERE}'}]\nsteps: {a: {exec: 'true'}}\n")
    [finding] = shotclock(runs, "check", unset)["data"]["findings"]
    assert (finding["rule"], finding["severity"], finding["field"]) == ("env/unset", "warning", "notify.0.slack")
    runs(unset, code=0)


def test_a_projects_file_does_not_decide_where_messages_go(runs: Runs, taken: Taken) -> None:
    (runs.folder / "shotclock.toml").write_text(f'[[notify]]\non = ["ended"]\nwebhook = "{taken.url}"\n')
    (runs.folder / ".git").mkdir()
    runs(runs.flow("steps: {a: {exec: 'true'}}\n"), code=0)
    assert taken.items == []
    answer = shotclock(runs, "notify", "test")
    assert answer["error"]["code"] == "ARG_ERROR"
    assert "a checkout must not decide where messages go" in answer["error"]["message"]
    shell = [sys.executable, "-c", "from shotclock.main import run_shell; run_shell()", "-c", "true"]
    ran = subprocess.run(shell, cwd=runs.folder, env=runs.env, capture_output=True, timeout=WITHIN_S)
    assert b"notify: a checkout must not decide where messages go" in ran.stderr


def test_notify_test_sends_a_trial_on_every_channel(runs: Runs, taken: Taken) -> None:
    file = flow(runs, taken, "steps: {a: {exec: 'true'}}\n", "[timed_out]", "  - {on: [failed], slack: '${NOPE}'}\n")
    answer = shotclock(runs, "notify", "test", file)
    assert [each["ok"] for each in answer["data"]["messages"]] == [True, False]
    assert (answer["error"]["code"], names(taken)) == ("UNAVAILABLE", ["test"])
    user_file(runs, f'[[notify]]\non = ["proposed"]\nntfy = "{taken.url}/topic"\n')
    assert shotclock(runs, "notify", "test")["ok"]
    assert taken.items[1].path == "/topic"
    (Path(runs.env["XDG_CONFIG_HOME"]) / "shotclock" / "config.toml").unlink()
    assert shotclock(runs, "notify", "test")["error"]["code"] == "PRECONDITION"
    assert os.listdir(Path(runs.env["XDG_CONFIG_HOME"]) / "shotclock") == []
