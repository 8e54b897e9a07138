"""Work that outlives its caller's budget: handed over, found again by the identical call, looked at and cancelled."""

import json
import os
import select
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from shotclock.core.limits import WallTime
from shotclock.dispatch.job_client import JobClient
from shotclock.store.jobs import RETENTION_MS
from shotclock.store.store import Store
from shotclock.supervise.clock import wall_time
from tests.apps.app.conftest import Home, fields_of, lines_of, uses_the_store, wait_for
from tests.conftest import SPEC

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

# What exit 14 may take beyond the budget (F-080: budget 2000, exit 14 within 3 s), here from the start of Python on.
LATE_BY_AT_MOST_S = 3.0


def validator(name: str) -> Any:
    return Draft7Validator(json.loads((SPEC / name).read_text("utf-8")))


INCOMPLETE = validator("incomplete-data.derived.json")
DESCRIPTOR = validator("job-descriptor.derived.json")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- the budget ---------------------------------------------------------------------------------------


@pytest.mark.requirement("F-080")
@pytest.mark.requirement("F-082")
@pytest.mark.requirement("C-034")
def test_work_of_ten_seconds_with_a_budget_of_two_is_handed_over_within_three(
    tool: Any, tmp_path: Path, home: Home, validate_envelope: Any
):
    program = tool("long.py")
    ran = program("count", tmp_path, "100", "--pause", "0.1", "--budget", "2s")
    assert ran.code == 14
    assert ran.elapsed_s < 2 + LATE_BY_AT_MOST_S + start_up_s(program)
    envelope = validate_envelope(ran.json())
    assert envelope["ok"] is False and envelope["error"]["code"] == "INCOMPLETE"
    assert envelope["meta"]["budget_ms"] == 2000
    assert 2000 <= envelope["meta"]["duration_ms"] < 2000 + LATE_BY_AT_MOST_S * 1000
    assert envelope["meta"]["ending"] == "detached"
    data = envelope["data"]
    INCOMPLETE.validate(data)
    assert data["state"] == "running"
    assert data["progress"]["done"] < 100
    # A slow machine may have had none to tell so far.
    job = wait_for(lambda: home.job() if home.job().progress_done is not None else None, "progress")
    assert job.progress_total == 100 and job.progress_unit == "numbers"
    for word in ("continue_command", "cancel_command"):
        assert data["job_id"] in data[word]
    # They are commands, to be run as they stand.
    again = subprocess.run(
        [*shlex.split(data["continue_command"]), "--budget", "100ms"], capture_output=True, timeout=20
    )
    assert again.returncode == 14
    assert json.loads(again.stdout)["data"]["progress"]["done"] >= data["progress"]["done"]
    stopped = subprocess.run(shlex.split(data["cancel_command"]), capture_output=True, timeout=20)
    assert stopped.returncode == 0, stopped.stdout
    assert json.loads(stopped.stdout)["data"]["status"] == "cancelled"


def start_up_s(program: Any) -> float:
    """What this machine needs, now, to start the program and to answer: not the budget's affair."""
    return float(program("job", "list").elapsed_s) + 0.5


@pytest.mark.requirement("F-080")
def test_the_budget_is_the_flags_or_the_environments(tool: Any, tmp_path: Path, home: Home):
    program, env = tool("long.py"), {"AGENT_CALL_BUDGET_MS": "300"}
    said = program.envelope("once", tmp_path, "30", env=env, code=14)
    assert said["meta"]["budget_ms"] == 300
    both = program.envelope("once", tmp_path, "30", "--budget", "200ms", env=env, code=14)
    assert both["meta"]["budget_ms"] == 200 and both["data"]["job_id"] == said["data"]["job_id"]
    wait_for(lambda: lines_of(tmp_path / "notes"), "the work")  # its process may take longer to start than a budget
    assert len(lines_of(tmp_path / "notes")) == 1


@pytest.mark.requirement("F-080")
def test_a_budget_that_is_none_is_an_argument_error(tool: Any, tmp_path: Path):
    program = tool("long.py")
    for running in [program.start("once", tmp_path, env={"AGENT_CALL_BUDGET_MS": v}) for v in ("soon", "-5", "1.5")]:
        assert fields_of(running.ends().json()) == ["AGENT_CALL_BUDGET_MS"]
    assert not (tmp_path / "notes").exists()


@pytest.mark.requirement("F-080")
def test_without_a_word_the_budget_is_thirty_seconds_off_a_terminal():
    from shotclock.terminal.subcommand import read_budget_ms

    assert read_budget_ms(None) == 30_000


@pytest.mark.requirement("F-080")
def test_the_budget_is_one_callers_and_the_timeout_is_all_of_the_work(
    tool: Any, tmp_path: Path, validate_envelope: Any
):
    program = tool("long.py")
    first = program.envelope("once", tmp_path, "30", "--budget", "300ms", "--timeout", "1500ms", code=14)
    ended = validate_envelope(program.envelope("job", "wait", first["data"]["job_id"], code=10))
    assert ended["error"]["code"] == "TIMEOUT"
    assert ended["meta"]["timeout_ms"] == 1500


def test_the_callers_own_deadline_ends_its_waiting_and_not_the_work(tool: Any, tmp_path: Path, home: Home):
    program = tool("long.py")
    envelope = program.envelope("once", tmp_path, "30", env={"SHOTCLOCK_REMAINING_MS": "3000"}, code=14)
    assert envelope["data"]["state"] == "running"
    assert is_alive(home.runner())


@pytest.mark.requirement("F-082")
def test_work_that_ends_within_the_budget_is_answered_like_any_other(tool: Any, tmp_path: Path, validate_envelope: Any):
    program = tool("long.py")
    fine, failed = program.start("once", tmp_path, "0.1"), program.start("once", tmp_path, "0.1", "--fails")
    envelope = validate_envelope(fine.ends().json())
    assert envelope["ok"] and envelope["data"]["result"].startswith("done by")
    ran = failed.ends()
    envelope = validate_envelope(ran.json())
    assert ran.code == 12 and envelope["error"]["code"] == "STORE_BUSY" and envelope["data"] == {"left": 1}
    assert "budget_ms" not in envelope["meta"]


# --- the identical call -------------------------------------------------------------------------------


@pytest.mark.requirement("F-081")
def test_the_identical_call_attaches_and_gets_the_result_and_the_next_one_runs_anew(tool: Any, tmp_path: Path):
    program = tool("long.py")
    first = program.envelope("once", tmp_path, "2", "--budget", "100ms", code=14)
    # Said in another way, it is the same call: by name, and with what is the default anyway.
    second = program.envelope("once", "--seconds", "2", "--no-fails", "--folder", tmp_path, code=0)
    assert second["meta"]["job_id"] == first["data"]["job_id"]
    assert second["data"]["result"] == "done by " + lines_of(tmp_path / "notes")[0].split()[1]
    assert len(lines_of(tmp_path / "notes")) == 1
    third = program.envelope("once", tmp_path, "2", "--budget", "100ms", code=14)
    assert third["data"]["job_id"] != first["data"]["job_id"]


@pytest.mark.requirement("F-081")
def test_of_many_identical_calls_at_once_one_runs(tool: Any, tmp_path: Path, home: Home):
    program = tool("long.py")
    running = [program.start("once", tmp_path, "5") for _ in range(6)]
    results = [one.ends(60).json() for one in running]
    assert len(lines_of(tmp_path / "notes")) == 1, lines_of(tmp_path / "notes")
    assert {result["data"]["result"] for result in results} == {results[0]["data"]["result"]}
    assert len(home.jobs()) == 1


@pytest.mark.requirement("F-081")
def test_other_arguments_directories_versions_and_keys_are_other_work(tool: Any, tmp_path: Path, home: Home):
    program = tool("long.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    same = ["once", str(tmp_path), "20", "--budget", "100ms"]
    running = [
        program.start(*same),
        program.start("once", tmp_path, "21", "--budget", "100ms"),
        program.start(*same, cwd=elsewhere),
        program.start(*same, env={"TOOL_VERSION": "2"}),
        program.start(*same, "--idempotency-key", "k1"),
        program.start(*same, "--idempotency-key", "k2"),
    ]
    jobs = [one.ends().json()["data"]["job_id"] for one in running]
    assert len(set(jobs)) == len(jobs) == len(home.jobs())


@pytest.mark.requirement("F-081")
def test_input_is_spooled_and_part_of_what_makes_a_call_identical(tool: Any, tmp_path: Path, home: Home):
    program = tool("long.py")

    def start(text: str, *words: str) -> Any:
        (tmp_path / text).write_text(text)
        with open(tmp_path / text) as stdin:
            return program.start("reads", *words, stdin=stdin)

    first, other = start("tea", "3", "--budget", "100ms"), start("milk", "3", "--budget", "100ms")
    jobs = {one.ends().json()["data"]["job_id"] for one in (first, other)}
    assert len(jobs) == 2
    again = start("tea", "3").ends().json()
    assert again["data"] == {"result": "tea"} and again["meta"]["job_id"] in jobs


@pytest.mark.requirement("F-081")
def test_with_a_key_the_result_is_given_to_every_repeat(tool: Any, tmp_path: Path):
    program = tool("long.py")
    words = ["once", str(tmp_path), "0.1", "--idempotency-key", "k"]
    first, second = program.envelope(*words, code=0), program.envelope(*words, code=0)
    assert first["data"] == second["data"]
    assert len(lines_of(tmp_path / "notes")) == 1


# --- what it is cut off from --------------------------------------------------------------------------


@pytest.mark.requirement("F-071")
@pytest.mark.requirement("F-081")
def test_whoever_reads_the_callers_output_sees_its_end_although_the_job_goes_on(tool: Any, tmp_path: Path, home: Home):
    theirs, ours = os.pipe()
    err_theirs, err_ours = os.pipe()
    program = tool("long.py")
    program.start("stubborn", tmp_path, "--budget", "300ms", stdout=ours, stderr=err_ours, pass_fds=(ours,))
    os.close(ours)
    os.close(err_ours)
    received = {theirs: b"", err_theirs: b""}
    ended: set[int] = set()
    give_up_at = time.monotonic() + 15
    while len(ended) < 2 and time.monotonic() < give_up_at:
        for fd in select.select([fd for fd in received if fd not in ended], [], [], 0.2)[0]:
            chunk = os.read(fd, 65536)
            received[fd] += chunk
            if not chunk:
                ended.add(fd)
    for fd in received:
        os.close(fd)
    assert len(ended) == 2, "somebody still holds the caller's streams"
    assert json.loads(received[theirs])["error"]["code"] == "INCOMPLETE"
    assert is_alive(home.runner())


@pytest.mark.requirement("F-081")
def test_a_job_has_a_session_of_its_own_and_none_of_the_callers_time_or_files(tool: Any, tmp_path: Path):
    program = tool("long.py")
    with open(tmp_path / "secret", "w") as secret:
        env = {"SHOTCLOCK_REMAINING_MS": "60000"}
        envelope = program.envelope("session", tmp_path, pass_fds=(secret.fileno(),), env=env, code=0)
    data = envelope["data"]
    assert data["session"] != os.getsid(0)
    assert not [link for link in data["links"] if "secret" in link or "streams-" in link]
    assert data["cwd"] == str(program.folder)
    assert data["remaining"] is None or int(data["remaining"]) > 60_000, "its own time, not the caller's"


@pytest.mark.requirement("F-081")
@pytest.mark.requirement("F-030")
def test_a_job_survives_the_death_of_its_caller_and_of_the_callers_group(tool: Any, tmp_path: Path, home: Home):
    program = tool("long.py")
    running = program.start("once", tmp_path, "2", before=["setsid"])
    wait_for(lambda: lines_of(tmp_path / "notes"), "the work to be up")
    os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait(5)
    envelope = program.envelope("once", tmp_path, "2", code=0)
    assert envelope["data"]["result"] and len(lines_of(tmp_path / "notes")) == 1


@pytest.mark.requirement("F-081")
def test_sigterm_hands_the_work_over_and_sigint_stops_it(tool: Any, tmp_path: Path, home: Home, validate_envelope: Any):
    program = tool("long.py")
    (tmp_path / "b").mkdir()
    handed, stopped = program.start("once", tmp_path, "30"), program.start("once", tmp_path / "b", "30")
    wait_for(lambda: lines_of(tmp_path / "notes") and lines_of(tmp_path / "b" / "notes"), "the work to be up")
    handed.signal(signal.SIGTERM)
    stopped.signal(signal.SIGINT)
    envelope = validate_envelope(handed.ends(within_s=5).json())
    assert envelope["error"]["code"] == "INCOMPLETE"
    INCOMPLETE.validate(envelope["data"])
    assert is_alive(home.runner(envelope["data"]["job_id"]))
    ran = stopped.ends(within_s=8)
    assert ran.code == 130
    assert validate_envelope(ran.json())["error"]["context"]["signal"] == "SIGINT"
    [ended] = [job for job in home.jobs() if not job.is_active]
    assert ended.envelope is not None and ended.envelope["error"]["code"] == "CANCELLED"


# --- looking and cancelling ---------------------------------------------------------------------------


@pytest.mark.requirement("F-081")
@pytest.mark.requirement("C-034")
def test_a_job_can_be_listed_looked_at_and_cancelled(tool: Any, tmp_path: Path, home: Home, validate_envelope: Any):
    program = tool("long.py")
    job_id = program.envelope("count", tmp_path, "2000", "--budget", "500ms", code=14)["data"]["job_id"]
    status = validate_envelope(program.envelope("job", "status", job_id[:6], code=0))["data"]
    DESCRIPTOR.validate(status)
    assert status["status"] == "running" and status["terminal"] is False and status["command"] == "count"
    [listed] = program.envelope("job", "list", "--active", code=0)["data"]["jobs"]
    assert listed["job_id"] == job_id and listed["progress"]["done"] >= status["progress"]["done"]
    worker = int(wait_for(lambda: lines_of(tmp_path / "notes"), "the work")[0].split()[-1])
    runner = home.runner()
    cancelled = validate_envelope(program.envelope("job", "cancel", job_id, code=0))["data"]
    DESCRIPTOR.validate(cancelled)
    assert cancelled["status"] == "cancelled" and cancelled["terminal"] is True
    assert not is_alive(worker)
    wait_for(lambda: not is_alive(runner), "the runner to leave")
    again = program.envelope("job", "cancel", job_id, code=0)["data"]
    assert again["status"] == "cancelled", "cancelling twice changes nothing"
    waited = validate_envelope(program.envelope("job", "wait", job_id, code=143))
    assert waited["error"]["code"] == "CANCELLED"
    assert waited["data"]["completed_steps"] == ["load"] and waited["data"]["partial"] is True


@pytest.mark.requirement("F-031")
@pytest.mark.requirement("F-081")
def test_cancelling_kills_work_that_does_not_listen(tool: Any, tmp_path: Path):
    program = tool("long.py")
    job_id = program.envelope("stubborn", tmp_path, "--budget", "500ms", code=14)["data"]["job_id"]
    [line] = wait_for(lambda: lines_of(tmp_path / "notes"), "the work")
    began = time.monotonic()
    assert program.envelope("job", "cancel", job_id, code=0)["data"]["status"] == "cancelled"
    assert time.monotonic() - began < 8
    assert not is_alive(int(line.split()[1]))


NOT_THERE: list[tuple[list[str], int, str | None]] = [
    (["job"], 2, "verb"),
    (["job", "nope"], 2, "verb"),
    (["job", "status"], 2, "job-id"),
    (["job", "status", "a", "b"], 2, "arguments"),
    (["job", "wait", "x", "--budget", "soon"], 2, "budget"),
    (["job", "list", "--nope"], 2, "--nope"),
    (["job", "status", "0123456789abcdef"], 5, None),
    (["job", "wait", ""], 2, "job-id"),
    (["job", "cancel", "../../etc/passwd"], 5, None),
    (["job", "status", "é' OR 1=1 --"], 5, None),
]


def test_a_job_that_is_not_there_or_not_named_gets_an_envelope(tool: Any, validate_envelope: Any):
    runs = tool("long.py").each([words for words, _, _ in NOT_THERE])
    for (words, code, field), ran in zip(NOT_THERE, runs, strict=True):
        envelope = validate_envelope(ran.json())
        assert ran.code == code, words
        assert envelope["error"]["code"] == ("ARG_ERROR" if code == 2 else "JOB_NOT_FOUND")
        assert field is None or fields_of(envelope) == [field]


def test_a_signal_ends_the_waiting_for_a_job_and_not_the_job(tool: Any, tmp_path: Path, home: Home):
    program = tool("long.py")
    job_id = program.envelope("once", tmp_path, "30", "--budget", "100ms", code=14)["data"]["job_id"]
    waiting = program.start("job", "wait", job_id, "--budget", "0")
    wait_for(lambda: uses_the_store(waiting), "it to wait for the job")
    waiting.signal(signal.SIGTERM)
    ran = waiting.ends(within_s=5)
    error = ran.json()["error"]
    assert (ran.code, error["code"]) == (143, "CANCELLED")
    assert error["message"] == "the waiting was stopped by SIGTERM; `job status` shows the job"
    assert is_alive(home.runner())


# --- its own clocks -----------------------------------------------------------------------------------


@pytest.mark.requirement("F-081")
def test_without_progress_it_is_stalled_and_past_its_lifetime_it_ends(
    tool: Any, tmp_path: Path, validate_envelope: Any
):
    program = tool("long.py")
    stalled = program.start("silent", tmp_path, "--talks-for", "1.5")
    too_long = program.start("lives-too-long", tmp_path)
    ran = stalled.ends(15)
    envelope = validate_envelope(ran.json())
    assert ran.code == 10 and envelope["error"]["code"] == "STALLED"
    clock = envelope["error"]["context"]["clock"]
    assert clock["kind"] == "idle" and clock["limit_ms"] == 1000
    assert envelope["meta"]["duration_ms"] >= 2400, "progress kept it alive for a while"
    ran = too_long.ends(15)
    envelope = validate_envelope(ran.json())
    assert ran.code == 10 and envelope["error"]["code"] == "TIMEOUT"
    assert envelope["meta"]["timeout_ms"] == 1500


@pytest.mark.requirement("F-081")
def test_no_timeout_of_a_call_outlives_the_lifetime_of_a_job(tool: Any, tmp_path: Path):
    envelope = tool("long.py").envelope("lives-too-long", tmp_path, "--timeout", "0", code=10)
    assert envelope["meta"]["timeout_ms"] == 1500


# --- its files ----------------------------------------------------------------------------------------


def test_state_is_the_users_alone(tool: Any, tmp_path: Path, home: Home):
    program = tool("long.py")
    with open(tmp_path / "in", "w+") as stdin:
        program.start(
            "reads", "0", "--budget", "20s", stdin=stdin, before=["sh", "-c", 'umask 0; exec "$@"', "sh"]
        ).ends()
    found = [home.path, *home.path.rglob("*")]
    assert len(found) >= 4
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"


@pytest.mark.requirement("F-081")
def test_what_ended_is_kept_for_a_day_and_no_longer(tool: Any, tmp_path: Path, home: Home, monkeypatch: Any):
    program = tool("long.py")
    job_id = program.envelope("once", tmp_path, "0.1", code=0)["meta"]["job_id"]
    log = Path(str(home.job().log_path))
    assert "working hard" in log.read_text()
    with Store.open(home.path) as store:
        front = JobClient(store, ["tool"])
        for later_ms, is_there in ((RETENTION_MS - 60_000, True), (RETENTION_MS + 60_000, False)):
            then = WallTime(wall_time().ms + later_ms)
            monkeypatch.setattr("shotclock.dispatch.job_client.wall_time", lambda then=then: then)
            front.forget_old()
            assert (store.jobs.get(job_id) is not None) is is_there
            assert log.exists() is is_there
            monkeypatch.undo()


UNUSABLE = {
    "a file": lambda path: path.write_text("x"),
    "others may write": lambda path: (path.mkdir(), path.chmod(0o777)),
    "a database that is none": lambda path: (path.mkdir(mode=0o700), (path / "shotclock.db").write_bytes(b"x" * 5000)),
}


@pytest.mark.parametrize("how", [*UNUSABLE, "relative"])
def test_a_home_that_cannot_be_used_gives_an_envelope(how: str, tool: Any, tmp_path: Path, validate_envelope: Any):
    program, home = tool("long.py"), tmp_path / "unusable"
    if how in UNUSABLE:
        UNUSABLE[how](home)
    env = {"SHOTCLOCK_HOME": "relative/path" if how == "relative" else str(home)}
    running = [
        program.start(*words, env=env) for words in (["once", str(tmp_path)], ["flash", str(tmp_path)], ["job", "list"])
    ]
    for one in running:
        ran = one.ends()
        envelope = validate_envelope(ran.json())
        assert ran.code == 4 and envelope["error"]["code"] == "STORE_UNUSABLE", envelope
        assert b"Traceback" not in ran.stderr
    assert not (tmp_path / "notes").exists() and not (tmp_path / "inside").exists()
    fine = program.envelope("charge", tmp_path, "1", env=env, code=0)
    assert fine["data"] == {"charged": 1}, "a command that keeps nothing needs no store"


def test_bad_arguments_are_told_before_there_is_a_job(tool: Any, home: Home):
    envelope = tool("long.py").envelope("once", "--seconds", "long", "--budget", "1s", code=2)
    assert fields_of(envelope) == ["folder", "seconds"]
    assert home.jobs() == []


def test_a_program_that_is_gone_by_the_time_of_the_job_is_told(tool: Any, tmp_path: Path, validate_envelope: Any):
    """The runner imports the program anew; what it cannot import it says."""
    program = tool(
        "vanishing.py",
        """
import os, pathlib
from shotclock import App

app = App("vanishing")

@app.command(interruption=True)
def work() -> int:
    return 1

pathlib.Path(__file__).unlink()
app()
""",
    )
    ran = program("work", "--budget", "10s")
    envelope = validate_envelope(ran.json())
    assert ran.code == 1 and envelope["error"]["code"] == "HANDLER_NOT_IMPORTABLE"
    assert "vanishing" in json.dumps(envelope["error"])
