"""`exec --detach`: a background command is ready when it says so, survives its caller, and ends with its owner."""

import json
import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.supervise.kernel import read_start
from tests.command_line import SHOTCLOCK, SOON_S, is_alive, wait_for, warning_codes

pytestmark = pytest.mark.usefixtures("no_survivors")

# The promise is two seconds; the rest is for a machine that several test runs share.
GONE_WITHIN_S = 2.0
LOADED_S = 4.0
RAN_WITHIN_S = 60.0
EXEC = " ".join([*SHOTCLOCK, "exec"])
DETACH = f"{EXEC} --detach"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store of the test's own. Jobs that still run at the end are killed with their runners."""
    folder = tmp_path / "home"
    monkeypatch.setenv("SHOTCLOCK_HOME", str(folder))
    yield folder
    for entry in (folder / "runners").glob("[0-9]*"):
        if is_alive(int(entry.name)):
            os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture
def job(shotclock: Any) -> Callable[..., Any]:
    """A function that runs `shotclock job …` and returns the data of its envelope."""

    def run(*words: str, code: int | None = 0) -> Any:
        ran = shotclock("job", *words, "--json")
        assert code is None or ran.code == code, ran
        return ran.json()["data"]

    return run


def start_job(shotclock: Any, *words: str, **more: Any) -> Any:
    """Start a background command and return the data of the answer."""
    ran = shotclock("exec", "--detach", "--json", *words, timeout=RAN_WITHIN_S, **more)
    assert ran.code == 0, ran
    return ran.json()["data"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(port: int) -> list[str]:
    return [sys.executable, "-u", "-m", "http.server", str(port), "--bind", "127.0.0.1"]


def answers(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def seconds_until_gone(pid: int, within_s: float = LOADED_S) -> float:
    began = time.monotonic()
    wait_for(lambda: not is_alive(pid), f"the end of {pid}", within_s)
    return time.monotonic() - began


# --- readiness ------------------------------------------------------------------------------------


def test_a_server_survives_the_call_answers_on_its_port_and_is_gone_after_job_stop(shotclock: Any, job: Any) -> None:
    port = free_port()
    ran = shotclock("exec", "--detach", "--name", "web", "--ready-port", str(port), "--", *serve(port))
    assert (ran.code, ran.stderr) == (0, b"")
    line = ran.stdout.decode()
    assert line.startswith("web is ready: job ") and line.count("\n") == 1 and ", no owner; logs: " in line
    assert "shotclock job logs web" in line and "shotclock job stop web" in line
    assert answers(port)
    shown = job("status", "web")
    assert (shown["status"], shown["ready"], shown["ready_sign"]) == ("running", True, f"port {port}")
    stopped = job("stop", "web")
    assert (stopped["status"], stopped["code"]) == ("cancelled", "CANCELLED")
    assert not is_alive(shown["pid"]) and not answers(port)


@pytest.mark.slow
def test_a_line_of_the_output_and_a_url_are_signs_of_readiness_too(shotclock: Any, job: Any) -> None:
    script = "echo starting; sleep 0.3; printf 'listening on 3000' >&2; exec sleep 60"
    shown = start_job(shotclock, "--name", "line", "--ready-output", r"listening on \d+$", "--", "sh", "-c", script)
    assert shown["ready"] is True
    port = free_port()
    url = f"http://127.0.0.1:{port}/no-such-page"  # which is answered with 404
    assert start_job(shotclock, "--name", "url", "--ready-url", url, "--", *serve(port))["ready"] is True
    for name in ("line", "url"):
        job("stop", name)


def test_a_server_on_another_address_of_the_machine_is_seen_on_its_port(shotclock: Any, job: Any) -> None:
    port = free_port()
    server = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.3"]
    assert start_job(shotclock, "--name", "web", "--ready-port", str(port), "--", *server)["ready"] is True
    job("stop", "web")


def test_a_pattern_that_backtracks_does_not_delay_the_stop(shotclock: Any) -> None:
    words = ["--ready-output", "^(a+)+$", "--ready-within", "1s", "--", "sh", "-c", f"echo {'a' * 50}b; exec sleep 60"]
    ran = shotclock("exec", "--detach", *words, timeout=RAN_WITHIN_S)
    assert ran.code == 124 and b"takes too long; write a simpler pattern" in ran.stderr


@pytest.mark.slow
def test_a_command_that_is_not_ready_in_time_is_stopped_and_explained_by_its_log(shotclock: Any, job: Any) -> None:
    words = ["--name", "slow", "--ready-port", str(free_port()), "--ready-within", "500ms"]
    ran = shotclock("exec", "--detach", *words, "--", "sh", "-c", "echo hello from it; exec sleep 60")
    assert ran.code == 124
    text = ran.stderr.decode()
    assert "NOT_READY: slow was not ready within 500ms" in text and "refuses connections" in text
    assert text.endswith("hello from it\n")
    shown = job("status", "slow")
    assert (shown["status"], shown["code"]) == ("failed", "NOT_READY")
    ran = shotclock("exec", "--detach", "--json", *words, "--", "sh", "-c", "echo hello; exec sleep 60")
    envelope = ran.json()
    assert ran.code == envelope["meta"]["exit_code"] == 10
    assert envelope["error"]["context"]["log_tail"] == "hello\n"


@pytest.mark.slow
def test_a_command_that_ends_before_it_is_ready_gives_its_exit_code_and_log(shotclock: Any) -> None:
    for own, code in ((3, 3), (0, 125)):
        script = f"echo no config; exit {own}"
        ran = shotclock("exec", "--detach", "--ready-output", "listening", "--", "sh", "-c", script)
        assert ran.code == code
        assert f"ended with exit code {own} before it was ready" in ran.stderr.decode()
        assert ran.stderr.endswith(b"no config\n")
    ran = shotclock("exec", "--detach", "--ready-output", "listening", "--", "true")
    assert ran.stderr.endswith(b"before it was ready. It has written nothing\n")


@pytest.mark.slow
def test_without_a_sign_the_answer_comes_when_the_command_was_really_started(shotclock: Any, tmp_path: Path) -> None:
    ran = shotclock("exec", "--detach", "--", "no-such-command")
    assert (ran.code, ran.stdout) == (127, b"") and b"COMMAND_NOT_FOUND" in ran.stderr
    (tmp_path / "text").write_text("text")
    assert shotclock("exec", "--detach", "--", tmp_path / "text").code == 126
    assert shotclock("exec", "--detach", "--cwd", tmp_path / "nowhere", "--", "true").code == 125
    ran = shotclock("exec", "--detach", "--", "true")
    assert ran.code == 0 and b"true has started: job" in ran.stdout


def test_another_server_on_the_port_or_at_the_url_is_not_taken_for_the_command(shotclock: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ran = shotclock("exec", "--detach", "--ready-port", str(port), "--", "sleep", "60")
        assert ran.code == 125
        assert f"port {port} is held by another process" in ran.stderr.decode()
        assert f"(pid {os.getpid()})" in ran.stderr.decode()


@pytest.mark.slow
def test_a_server_that_takes_the_port_meanwhile_is_named(start: Any, tmp_path: Path) -> None:
    port = free_port()
    began = tmp_path / "began"
    words = ["--ready-port", str(port), "--ready-within", "3s", "--", "sh", "-c", f"touch {began}; exec sleep 60"]
    running = start("exec", "--detach", *words)
    wait_for(began.exists, "the command")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        assert running.ends() == 124
    assert f"port {port} is held by another process" in running.stderr.decode()


@pytest.mark.slow
def test_a_callers_deadline_ends_its_wait_and_not_the_job(shotclock: Any, job: Any, validate_envelope: Any) -> None:
    words = ["--name", "slow", "--ready-output", "never", "--json", "--", "sleep", "60"]
    ran = shotclock("exec", "--detach", *words, env={"SHOTCLOCK_REMAINING_MS": "2000"})
    envelope = validate_envelope(ran.json())
    assert ran.code == 14 and envelope["error"]["code"] == "INCOMPLETE"
    assert "slow is not ready yet" in envelope["error"]["message"]
    assert job("status", "slow")["ready"] is False
    job("stop", "slow")


@pytest.mark.slow
def test_a_signal_before_it_is_ready_stops_the_command(start: Any, job: Any) -> None:
    running = start("exec", "--detach", "--name", "w", "--ready-output", "never", "--", "sleep", "60")
    wait_for(lambda: (job("status", "w", code=None) or {}).get("pid"), "the command")
    running.signal(signal.SIGINT)
    assert running.ends() == -signal.SIGINT
    assert job("status", "w")["code"] == "CANCELLED"


@pytest.mark.slow
def test_every_answer_keeps_the_contract(shotclock: Any, validate_envelope: Any) -> None:
    for words, ending in (
        (["--name", "web", "--lifetime", "1h", "--", "sleep", "60"], "detached"),
        (["--name", "web", "--", "true"], "not_started"),
        (["--ready-output", "x", "--ready-within", "100ms", "--", "sleep", "60"], "killed"),
        (["--ready-output", "x", "--", "true"], "finished"),
        (["--", "no-such-command"], "not_started"),
        (["--owner", "agent", "--", "true"], "not_started"),
    ):
        envelope = validate_envelope(shotclock("exec", "--detach", "--json", *words).json())
        assert envelope["meta"]["ending"] == ending, words
    for words in (["status", "web"], ["logs", "web"], ["restart", "web"], ["stop", "web"], ["wait", "web"], ["list"]):
        validate_envelope(shotclock("job", *words, "--json").json())


# --- names, lists, logs ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_name_is_of_one_running_job_and_resolves_to_the_latest(shotclock: Any, job: Any) -> None:
    first = start_job(shotclock, "--name", "web", "--", "sleep", "60")
    ran = shotclock("exec", "--detach", "--name", "web", "--", "sleep", "60")
    assert ran.code == 125
    text = ran.stderr.decode()
    assert f"web runs already, as job {first['job_id']}" in text
    assert "shotclock job stop web" in text and "shotclock job restart web" in text
    job("cancel", "web")
    second = start_job(shotclock, "--name", "web", "--", "sleep", "60")
    assert second["job_id"] != first["job_id"]
    assert job("status", "web")["job_id"] == second["job_id"]
    assert job("status", first["job_id"])["status"] == "cancelled"
    job("stop", "web")
    assert job("status", "web")["job_id"] == second["job_id"]
    assert shotclock("exec", "--detach", "--name", "a b", "--", "true").code == 125


@pytest.mark.slow
def test_restart_stops_a_command_and_starts_the_same_again(shotclock: Any, job: Any, tmp_path: Path) -> None:
    port = free_port()
    words = ["--name", "web", "--ready-port", str(port), "--lifetime", "1h", "--cwd", str(tmp_path), "--env", "A=B"]
    first = start_job(shotclock, *words, "--", "sh", "-c", f"echo A is $A in $PWD; exec {' '.join(serve(port))}")
    second = job("restart", "web")
    assert second["job_id"] != first["job_id"] and second["pid"] != first["pid"] and second["ready"] is True
    assert not is_alive(first["pid"]) and answers(port)
    assert job("logs", "web")["text"].startswith(f"A is B in {tmp_path}\n")
    assert 0 < second["lifetime_left_ms"] <= 3_600_000
    job("stop", "web")
    assert job("restart", "web")["ready"] is True  # also one that has ended
    job("stop", "web")
    job("restart", "nothing", code=5)


def test_a_list_shows_name_age_lifetime_owner_and_readiness(shotclock: Any, job: Any, on_terminal: Any) -> None:
    owner = str(os.getpid())
    start_job(shotclock, "--name", "web", "--lifetime", "2h", "--owner", owner, "--", "sleep", "60")
    [shown] = job("list", "--active")["jobs"]
    assert shown["name"] == "web" and shown["owner_process"]["pid"] == os.getpid()
    assert 0 < shown["lifetime_left_ms"] <= 7_200_000 and shown["age_ms"] >= 0
    screen = on_terminal("job", "list", streams=("stdout",)).screen
    assert "web" in screen and "running" in screen and "1h59m left" in screen and f"({owner})" in screen
    assert "ready" in screen and len(screen.rstrip("\n")) <= 80
    job("stop", "web")


def test_logs_are_read_by_lines_and_by_time_and_followed_to_the_end(shotclock: Any, job: Any, start: Any) -> None:
    script = "for n in 1 2 3 4 5; do echo line $n; done; read stop < go; echo last; printf open"
    folder = Path(os.environ["SHOTCLOCK_HOME"]).parent
    os.mkfifo(folder / "go")
    start_job(shotclock, "--name", "five", "--cwd", str(folder), "--ready-output", "line 5", "--", "sh", "-c", script)
    shown = job("logs", "five")
    assert (shown["first_line"], shown["next_line"], shown["terminal"]) == (1, 6, False)
    assert shown["text"] == "line 1\nline 2\nline 3\nline 4\nline 5\n"
    assert job("logs", "five", "-n", "2")["text"] == "line 4\nline 5\n"
    assert job("logs", "five", "--since", "4")["text"] == "line 4\nline 5\n"
    assert job("logs", "five", "--since", "6")["text"] == ""
    assert job("logs", "five", "--since", "10m")["text"] == shown["text"]
    left = start("job", "logs", "-f", "-n1", "five")
    left.said(b"line 5\n")
    left.signal(signal.SIGINT)
    assert (left.ends(), left.stdout, left.stderr) == (130, b"line 5\n", b"")
    following = start("job", "logs", "-f", "-n2", "five")
    wait_for(lambda: following.stdout == b"line 4\nline 5\n", "the last lines")
    (folder / "go").write_text("on\n")
    assert following.ends() == 0
    assert following.stdout == b"line 4\nline 5\nlast\nopen"
    assert job("logs", "five", "--since", "6")["text"] == "last\nopen"


# --- the ends of a job ----------------------------------------------------------------------------


def test_a_server_is_gone_within_two_seconds_of_its_owners_sigkill(shotclock: Any, job: Any) -> None:
    owner = subprocess.Popen(["sleep", "60"])
    port = free_port()
    words = ["--name", "web", "--owner", str(owner.pid), "--ready-port", str(port)]
    shown = start_job(shotclock, *words, "--", *serve(port))
    owner.kill()
    took_s = seconds_until_gone(shown["pid"])
    owner.wait(SOON_S)
    assert took_s < GONE_WITHIN_S or os.getloadavg()[0] > (os.cpu_count() or 1), f"it took {took_s:.2f} s"
    wait_for(lambda: job("status", "web")["terminal"], "the end of the job")
    envelope = shotclock("job", "wait", "web", "--json").json()
    assert envelope["error"]["code"] == "CANCELLED"
    assert f"its owner ended: sleep 60 (pid {owner.pid})" in envelope["error"]["message"]


@pytest.mark.slow
def test_a_tree_that_ignores_sigterm_is_gone_with_its_owner_as_well(shotclock: Any) -> None:
    owner = subprocess.Popen(["sleep", "60"])
    script = "trap '' TERM; setsid sh -c 'trap \"\" TERM; echo daemon $$; sleep 60; sleep 60' & sleep 60; sleep 60"
    words = ["--owner", str(owner.pid), "--ready-output", "daemon", "--", "sh", "-c", script]
    shown = start_job(shotclock, *words)
    daemon = int(Path(shown["log"]).read_text().split()[1])
    owner.kill()
    took_s = max(seconds_until_gone(shown["pid"]), seconds_until_gone(daemon))
    owner.wait(SOON_S)
    assert took_s < LOADED_S


def test_a_runner_that_is_stopped_by_a_signal_still_notices_the_end_of_the_owner(shotclock: Any, home: Path) -> None:
    owner = subprocess.Popen(["sleep", "60"])
    shown = start_job(shotclock, "--owner", str(owner.pid), "--", "sleep", "60")
    [entry] = (home / "runners").iterdir()
    os.kill(int(entry.name), signal.SIGSTOP)
    owner.kill()
    owner.wait(SOON_S)
    seconds_until_gone(shown["pid"])


def test_a_command_that_stops_its_supervisor_is_gone_with_its_owner_as_well(shotclock: Any, job: Any) -> None:
    owner = subprocess.Popen(["sleep", "60"])
    script = "kill -STOP $PPID; echo stopped; exec sleep 60"
    words = ["--name", "bold", "--owner", str(owner.pid), "--ready-output", "stopped"]
    shown = start_job(shotclock, *words, "--", "sh", "-c", script)
    owner.kill()
    owner.wait(SOON_S)
    seconds_until_gone(shown["pid"])
    wait_for(lambda: job("status", "bold")["terminal"], "the end of the job")
    assert job("status", "bold")["code"] == "CANCELLED"


def test_the_agent_that_runs_the_command_is_its_owner(shotclock: Any, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    command = f"env CLAUDECODE=1 {DETACH} --json -- sleep 60 > {answer}.new; mv {answer}.new {answer}; exec sleep 60"
    agent = subprocess.Popen(["sh", "-c", command])
    try:
        wait_for(answer.exists, "the job", RAN_WITHIN_S)
        shown = json.loads(answer.read_text())["data"]
        assert shown["owner_process"]["pid"] == agent.pid
    finally:
        agent.kill()
        agent.wait(SOON_S)
    seconds_until_gone(shown["pid"])


@pytest.mark.slow
def test_an_owner_that_cannot_be_one_is_refused_and_none_is_none(shotclock: Any, job: Any) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(SOON_S)
    for owner in (str(ended.pid), "agent", "somebody"):
        ran = shotclock("exec", "--detach", "--owner", owner, "--", "sleep", "60")
        assert ran.code == 125 and b"owner:" in ran.stderr, ran
    shown = start_job(shotclock, "--name", "free", "--owner", "none", "--", "sleep", "60")
    assert shown["owner_process"] is None
    job("stop", "free")


@pytest.mark.slow
def test_the_end_of_a_lifetime_is_reported_as_such(shotclock: Any) -> None:
    for words, env in ((["--lifetime", "300ms"], {}), ([], {"SHOTCLOCK_LIFETIME": "300ms"})):
        start_job(shotclock, "--name", "short", *words, "--", "sleep", "60", env=env)
        ran = shotclock("job", "wait", "short", "--json")
        assert ran.code == 10
        message = ran.json()["error"]["message"]
        assert message == "short was stopped at the end of its lifetime of 300ms"
    ran = shotclock("exec", "--detach", "--", "true", env={"SHOTCLOCK_LIFETIME": "soon"})
    assert ran.code == 125 and b"SHOTCLOCK_LIFETIME" in ran.stderr


@pytest.mark.slow
def test_a_killed_runner_takes_its_tree_along_and_the_job_is_lost(shotclock: Any, job: Any, home: Path) -> None:
    shown = start_job(shotclock, "--name", "web", "--", "sh", "-c", "setsid sleep 60 & sleep 60; true")
    [entry] = (home / "runners").iterdir()
    os.kill(int(entry.name), signal.SIGKILL)
    seconds_until_gone(shown["pid"])
    assert job("list", "--active")["jobs"] == []
    lost = job("status", "web")
    assert (lost["status"], lost["code"]) == ("failed", "JOB_LOST")
    start_job(shotclock, "--name", "web", "--", "sleep", "60")  # the name is free again
    job("stop", "web")


def test_a_stop_has_its_own_grace(shotclock: Any, job: Any) -> None:
    script = "trap '' TERM; echo deaf; sleep 60; sleep 60"
    start_job(shotclock, "--name", "deaf", "--grace", "1m", "--ready-output", "deaf", "--", "sh", "-c", script)
    assert job("stop", "deaf", "--within", "200ms")["terminal"] is True
    job("extend", "deaf", "1h", code=4)


def test_silence_stops_a_background_command_with_an_idle_limit(shotclock: Any) -> None:
    start_job(shotclock, "--name", "quiet", "--idle", "300ms", "--", "sh", "-c", "echo once; sleep 60")
    assert shotclock("job", "wait", "quiet", "--json").json()["error"]["code"] == "STALLED"


# --- inside another command -----------------------------------------------------------------------


def test_a_job_survives_the_end_of_the_command_that_started_it(shotclock: Any, job: Any) -> None:
    ran = shotclock("exec", "--json", "--", *SHOTCLOCK, "exec", "--detach", "--name", "inner", "--", "sleep", "60")
    envelope = ran.json()
    assert ran.code == 0 and warning_codes(envelope) == ["JOB_CONTINUES"]
    shown = job("status", "inner")
    [told] = envelope["data"]["jobs"]
    assert (told["job_id"], told["name"]) == (shown["job_id"], "inner")
    assert envelope["meta"]["survivors"] == []
    assert is_alive(shown["pid"]) and shown["status"] == "running"
    job("stop", "inner")


def test_a_command_that_starts_a_job_adds_nothing_to_stderr(shotclock: Any, job: Any) -> None:
    ran = shotclock("exec", "--", "sh", "-c", f"{DETACH} --name inner -- sleep 60")
    assert (ran.code, ran.stderr) == (0, b"")
    job("stop", "inner")


@pytest.mark.slow
def test_a_job_survives_the_deadline_of_the_command_that_started_it(shotclock: Any, job: Any) -> None:
    script = f"{DETACH} --name inner -- sh -c 'env > vars; exec sleep 60'; setsid sleep 60 & sleep 60"
    folder = Path(os.environ["SHOTCLOCK_HOME"]).parent
    ran = shotclock("exec", "--timeout", "3s", "--json", "--", "sh", "-c", script, cwd=folder)
    assert ran.json()["error"]["code"] == "TIMEOUT"
    shown = job("status", "inner")
    assert is_alive(shown["pid"])
    assert "SHOTCLOCK_REMAINING_MS" not in (folder / "vars").read_text()
    assert job("stop", "inner")["status"] == "cancelled"


def test_a_job_survives_the_sigkill_of_exec_and_nothing_else_does(start: Any, job: Any, no_survivors: Any) -> None:
    running = start("exec", "--", "sh", "-c", f"{DETACH} --name inner -- sleep 77; setsid sleep 60 & echo up; sleep 60")
    running.said(b"up")
    shown = job("status", "inner")
    running.signal(signal.SIGKILL)
    running.ends()
    wait_for(lambda: not any("sleep 60" in each.cmdline for each in no_survivors.alive()), "the end of the rest")
    assert is_alive(shown["pid"]) and job("status", "inner")["status"] == "running"
    job("stop", "inner")


def test_a_job_started_by_a_job_survives_it(shotclock: Any, job: Any) -> None:
    script = f"{DETACH} --name inner -- sleep 60; echo done; sleep 60"
    start_job(shotclock, "--name", "outer", "--ready-output", "done", "--", "sh", "-c", script)
    job("stop", "outer")
    assert job("status", "inner")["status"] == "running"
    job("stop", "inner")


@pytest.mark.slow
def test_only_exec_spares_jobs(shotclock: Any, job: Any) -> None:
    ran = shotclock("timeout", "50", *SHOTCLOCK, "exec", "--detach", "--name", "inner", "--", "sleep", "60")
    assert ran.code == 0
    wait_for(lambda: job("status", "inner")["terminal"], "its end")
    assert job("status", "inner")["status"] in ("cancelled", "failed")  # by a signal to the runner or to its command


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_options_that_make_no_sense_together_are_refused_in_words(shotclock: Any) -> None:
    for words, expected in (
        (["--detach", "--timeout", "1m"], "--lifetime instead of --timeout"),
        (["--detach", "--stdin"], "no stdin"),
        (["--detach", "--budget", "1m"], "exclude each other"),
        (["--detach", "--leave-children"], "no effect on a command in the background"),
        (["--detach", "--soft", "1m"], "--soft has no effect"),
        (["--detach", "--ready-port", "80", "--ready-output", "x"], "exclude each other"),
        (["--detach", "--ready-port", "65536"], "1 to 65535"),
        (["--detach", "--ready-output", "("], "not a regular expression"),
        (["--detach", "--ready-url", "localhost:80"], "is not a URL"),
        (["--name", "web"], "--name needs --detach"),
        (["--ready-port", "80"], "--ready-port needs --detach"),
        (["--budget", "1m", "--lifetime", "1h"], "--lifetime needs --detach"),
        (["--budget", "0"], "above 0"),
    ):
        ran = shotclock("exec", *words, "--", "true")
        assert ran.code == 125 and expected in ran.stderr.decode(), (words, ran)


@pytest.mark.slow
def test_of_many_starts_under_one_name_one_wins(start: Any, job: Any) -> None:
    running = [start("exec", "--detach", "--name", "one", "--", "sleep", "60") for _ in range(5)]
    codes = sorted(each.ends(RAN_WITHIN_S) for each in running)
    assert codes == [0, 125, 125, 125, 125]
    job("stop", "one")


def test_a_job_started_in_the_shell_of_an_agent_ends_with_the_agent_and_not_before(job: Any, tmp_path: Path) -> None:
    shell = tmp_path / "shotclock-sh"
    shell.write_text(f"#!{sys.executable}\nimport sys\nfrom shotclock.main import run_shell\nsys.exit(run_shell())\n")
    shell.chmod(0o755)
    ended = tmp_path / "ended"
    command = f"env CLAUDECODE=1 SHOTCLOCK_LIFETIME=1h {shell} -c '{DETACH} --name inner -- sleep 60'"
    agent = subprocess.Popen(["sh", "-c", f"{command}; echo $? > {ended}.new; mv {ended}.new {ended}; exec sleep 60"])
    try:
        wait_for(ended.exists, "the end of the shell", RAN_WITHIN_S)
        assert ended.read_text() == "0\n"
        shown = job("status", "inner")
        assert shown["status"] == "running" and shown["owner_process"]["pid"] == agent.pid
        assert 0 < shown["lifetime_left_ms"] <= 3_600_000
    finally:
        agent.kill()
        agent.wait(SOON_S)
    seconds_until_gone(shown["pid"])


@pytest.mark.slow
def test_a_start_that_was_killed_holds_no_name_and_is_not_listed_as_running(
    shotclock: Any, job: Any, home: Path
) -> None:
    code = (
        "from shotclock.dispatch.background_command import BackgroundCommand\n"
        "from shotclock.supervise.clock import wall_time\n"
        "from shotclock.store.store import Store\n"
        "job = BackgroundCommand(['sleep', '60'], '/', name='web').as_job('abc', '/dev/null', wall_time())\n"
        "Store.open().jobs.create_unless_active(job, bool)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=RAN_WITHIN_S)
    (home / "runners").mkdir()
    entry = home / "runners" / str(os.getpid())
    entry.write_text(f"{read_start(os.getpid())} abc web")
    assert job("status", "abc")["status"] == "running"  # its runner has only not taken charge yet
    entry.unlink()
    start_job(shotclock, "--name", "web", "--", "sleep", "60")
    assert (job("status", "abc")["status"], job("status", "abc")["code"]) == ("failed", "JOB_LOST")
    job("stop", "web")


# --- a store in trouble ---------------------------------------------------------------------------


def lock_store(home: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(home / "shotclock.db", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection


@pytest.mark.slow
def test_a_locked_store_neither_delays_the_end_with_the_owner_nor_loses_it(
    shotclock: Any, job: Any, home: Path
) -> None:
    owner = subprocess.Popen(["sleep", "60"])
    shown = start_job(shotclock, "--name", "web", "--owner", str(owner.pid), "--", "sleep", "60")
    lock = lock_store(home)
    time.sleep(5.5)  # the next heartbeat is due: a runner that waits for the store is waiting now
    owner.kill()
    owner.wait(SOON_S)
    took_s = seconds_until_gone(shown["pid"])
    assert took_s < GONE_WITHIN_S or os.getloadavg()[0] > (os.cpu_count() or 1), f"it took {took_s:.2f} s"
    time.sleep(5.5)  # longer than one attempt to store the end
    lock.close()
    wait_for(lambda: job("status", "web")["terminal"], "the end of the job")
    assert job("status", "web")["code"] == "CANCELLED"


def fill_disk(*pids: int) -> None:
    """Let these processes write to no file any more: for them each disk is full."""
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def on_full_disk(*words: str) -> Any:
    ran = subprocess.run(
        [*SHOTCLOCK, *words, "--json"],
        capture_output=True,
        timeout=RAN_WITHIN_S,
        preexec_fn=lambda: fill_disk(os.getpid()),
        check=False,
    )
    return json.loads(ran.stdout)


def test_a_job_is_stopped_on_a_full_disk_and_the_answer_says_that_its_end_is_not_recorded(
    shotclock: Any, job: Any, home: Path
) -> None:
    script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    shown = start_job(
        shotclock, "--name", "web", "--owner", "none", "--ready-output", "ready", "--", "sh", "-c", script
    )
    [entry] = (home / "runners").iterdir()
    fill_disk(int(entry.name))
    answer = on_full_disk("job", "stop", "web", "--within", "300ms")
    assert not is_alive(shown["pid"])
    assert answer["ok"] and (answer["data"]["status"], answer["data"]["code"]) == ("cancelled", "CANCELLED")
    [notice] = answer["warnings"]
    assert notice["code"] == "NOT_WRITTEN_DOWN" and "disk" in notice["message"]
    resource.prlimit(int(entry.name), resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_for(lambda: job("status", "web")["terminal"], "the end of the job, which is recorded later")
    assert job("status", "web")["code"] == "CANCELLED"


def test_a_command_is_stopped_when_its_store_is_removed(shotclock: Any, home: Path) -> None:
    shown = start_job(shotclock, "--owner", "none", "--", "sleep", "60")
    [entry] = (home / "runners").iterdir()
    shutil.rmtree(home)
    seconds_until_gone(shown["pid"])
    seconds_until_gone(int(entry.name))
