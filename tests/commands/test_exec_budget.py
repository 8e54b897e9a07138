"""`exec --budget`: a command that takes longer than its caller waits continues as a job; otherwise it is plain exec."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK, SOON_S, is_alive, wait_for

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

LONG = "50s"
RAN_WITHIN_S = 60.0
BINARY = bytes(range(256)) + b"\0\r\n\xff\xfe\x1b[31m no newline at the end"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store of the test's own. Jobs that still run at the end are killed with their runners."""
    folder = tmp_path / "home"
    monkeypatch.setenv("SHOTCLOCK_HOME", str(folder))
    yield folder
    for entry in (folder / "runners").glob("[0-9]*"):
        if is_alive(int(entry.name)):
            os.kill(int(entry.name), signal.SIGKILL)


def newest(shotclock: Any) -> Any:
    return shotclock("job", "list", "--json").json()["data"]["jobs"][0]


# --- within the budget ----------------------------------------------------------------------------


@pytest.mark.slow
def test_within_the_budget_streams_and_exit_code_are_those_of_the_command(shotclock: Any, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(BINARY)
    ran = shotclock("exec", "--budget", LONG, "--", "sh", "-c", "cat blob; cat blob blob >&2; exit 7", cwd=tmp_path)
    assert (ran.code, ran.stdout, ran.stderr) == (7, BINARY, BINARY + BINARY)
    ran = shotclock("exec", "--budget", LONG, "--", "sh", "-c", "echo 1; echo 2 >&2; echo 3", stderr_to_stdout=True)
    assert (ran.code, ran.stdout) == (0, b"1\n2\n3\n")
    for command, code in ((["no-such-command"], 127), ([str(tmp_path)], 126), (["sh", "-c", "kill -9 $$"], 137)):
        assert shotclock("exec", "--budget", LONG, "--", *command).code == code


def test_a_command_that_ends_within_the_budget_leaves_no_job_and_no_log(shotclock: Any, home: Path) -> None:
    assert shotclock("exec", "--budget", LONG, "--", "false").code == 1
    assert shotclock("job", "list", "--json").json()["data"]["jobs"] == []
    wait_for(lambda: not list((home / "jobs").iterdir()) and not list((home / "runners").iterdir()), "its files to go")


def test_with_json_the_envelope_holds_the_output(shotclock: Any, validate_envelope: Any) -> None:
    ran = shotclock("exec", "--budget", LONG, "--json", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    envelope = validate_envelope(ran.json())
    assert ran.code == envelope["meta"]["exit_code"] == 1
    assert envelope["error"]["code"] == "COMMAND_FAILED"
    assert (envelope["data"]["stdout"], envelope["data"]["stderr"]) == ("out\n", "err\n")
    assert envelope["data"]["exit_code"] == 3 and "job_id" not in envelope["data"]


def test_the_timeout_bounds_the_work_within_the_budget(shotclock: Any) -> None:
    ran = shotclock("exec", "--budget", LONG, "--timeout", "300ms", "--", "sleep", "60")
    assert ran.code == 124 and b"stopped after 300ms, the limit of --timeout" in ran.stderr


@pytest.mark.slow
def test_a_signal_within_the_budget_stops_the_command_and_ends_exec(start: Any, shotclock: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        running = start("exec", "--budget", LONG, "--", "sh", "-c", "echo up; sleep 60")
        running.said(b"up")
        pid = newest(shotclock)["pid"]
        running.signal(number)
        assert running.ends() == -number
        assert not is_alive(pid)


def test_a_reader_that_leaves_ends_the_command_as_without_us() -> None:
    command = [*SHOTCLOCK, "exec", "--budget", LONG, "--", "yes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.read(2)
        running.stdout.close()
        assert running.wait(RAN_WITHIN_S) == 128 + signal.SIGPIPE


# --- after it ---------------------------------------------------------------------------------------


def test_after_the_budget_the_streams_are_closed_and_one_line_says_how_to_wait(shotclock: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    script = "echo early; read go < go; echo late; exit 5"
    command = [*SHOTCLOCK, "exec", "--budget", "3s", "--", "sh", "-c", script]
    # Pipes, whose ends are reached only when no process of the job has them.
    ran = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=RAN_WITHIN_S)
    assert (ran.returncode, ran.stdout) == (14, b"early\n")
    [line] = ran.stderr.decode().splitlines()
    job = newest(shotclock)
    assert job["status"] == "running"
    assert "INCOMPLETE: still running after 3s" in line and f"`shotclock job wait {job['job_id']}`" in line
    (tmp_path / "go").write_text("on\n")
    waited = shotclock("job", "wait", job["job_id"], "--json")
    assert waited.json()["data"]["exit_code"] == 5
    assert shotclock("job", "logs", job["job_id"], "--json").json()["data"]["text"] == "early\nlate\n"


def test_with_json_the_answer_after_the_budget_is_incomplete(shotclock: Any, validate_envelope: Any) -> None:
    ran = shotclock("exec", "--budget", "500ms", "--json", "--", "sh", "-c", "echo out; exec sleep 60")
    envelope = validate_envelope(ran.json())
    assert ran.code == envelope["meta"]["exit_code"] == 14
    assert (envelope["error"]["code"], envelope["meta"]["ending"]) == ("INCOMPLETE", "detached")
    job_id = envelope["data"]["job_id"]
    assert envelope["data"]["continue_command"] == f"shotclock job wait {job_id}"
    assert shotclock("job", "stop", job_id).code == 0
    ended = shotclock("job", "wait", job_id, "--json").json()
    assert (ended["error"]["code"], ended["data"]["stdout"]) == ("CANCELLED", "out\n")


@pytest.mark.slow
def test_a_callers_deadline_ends_the_wait_and_not_the_job(shotclock: Any) -> None:
    ran = shotclock("exec", "--budget", LONG, "--json", "--", "sleep", "60", env={"SHOTCLOCK_REMAINING_MS": "2000"})
    assert ran.code == 14
    envelope = ran.json()
    assert envelope["warnings"] == [] and envelope["meta"]["timeout_ms"] == 600_000
    assert newest(shotclock)["status"] == "running"
    shotclock("job", "stop", envelope["data"]["job_id"])


def test_a_killed_exec_leaves_the_command_to_its_owner(start: Any, shotclock: Any) -> None:
    owner = subprocess.Popen(["sleep", "60"])
    running = start("exec", "--budget", LONG, "--owner", str(owner.pid), "--", "sh", "-c", "echo up; sleep 60")
    running.said(b"up")
    pid = newest(shotclock)["pid"]
    running.signal(signal.SIGKILL)
    running.ends()
    assert newest(shotclock)["status"] == "running" and is_alive(pid)
    owner.kill()
    owner.wait(SOON_S)
    wait_for(lambda: not is_alive(pid), "the end of the command")


def test_the_budget_of_agent_calls_is_not_one_of_exec(shotclock: Any) -> None:
    ran = shotclock("exec", "--", "sh", "-c", "sleep 0.5; echo done", env={"AGENT_CALL_BUDGET_MS": "100"})
    assert (ran.code, ran.stdout, ran.stderr) == (0, b"done\n", b"")


@pytest.mark.slow
def test_a_stop_that_outlasts_the_budget_is_still_waited_for(start: Any, shotclock: Any) -> None:
    script = "trap '' TERM; echo up; sleep 60; sleep 60"
    running = start("exec", "--budget", "3s", "--grace", "3s", "--", "sh", "-c", script)
    running.said(b"up")
    running.signal(signal.SIGTERM)
    pid = newest(shotclock)["pid"]
    assert running.ends() == -signal.SIGTERM
    assert not is_alive(pid)
