"""Jobs whose runner, worker or machine was killed: never lost silently, and taken up where they were."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.apps.app.conftest import Home, lines_of, wait_for, warning_codes
from tests.store.locked import LONG_S, held
from tests.wall_clock import HOUR_MS, WallClock

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]


def counted(folder: Path) -> list[int]:
    return [int(line) for line in lines_of(folder / "notes") if line.isdecimal()]


def starts(folder: Path) -> list[int]:
    return [int(line.split()[1]) for line in lines_of(folder / "notes") if line.startswith("start")]


def begin_counting(program: Any, folder: Path, to: int = 40, *words: str) -> str:
    """Under way, as a job, at five at least."""
    job_id = program.envelope("count", folder, str(to), "--budget", "500ms", *words, code=14)["data"]["job_id"]
    wait_for(lambda: len(counted(folder)) > 5, "some progress")
    return str(job_id)


@pytest.mark.requirement("C-035")
@pytest.mark.requirement("F-081")
def test_after_kill_minus_nine_the_identical_call_goes_on_where_it_was(
    tool: Any, tmp_path: Path, home: Home, no_survivors: Any, validate_envelope: Any
):
    program = tool("long.py")
    job_id = begin_counting(program, tmp_path)
    os.kill(home.runner(), signal.SIGKILL)
    assert no_survivors.wait_until_alone(3) == [], "the work dies with its runner"
    reached = counted(tmp_path)[-1]
    envelope = validate_envelope(program.envelope("count", tmp_path, "40", code=0))
    assert envelope["meta"]["job_id"] == job_id
    assert envelope["data"]["counted"] == 40
    assert starts(tmp_path) == [0, envelope["data"]["started_at"]]
    assert 0 < envelope["data"]["started_at"] <= reached + 1
    numbers = counted(tmp_path)
    assert sorted(set(numbers)) == list(range(40)), "nothing was left out"
    assert len(numbers) <= 41, "and at most the one in flight was done twice"
    assert starts(tmp_path)[1] >= reached
    assert home.job().attempt == 2
    # What came to its end starts over the next time.
    program.envelope("count", tmp_path, "40", "--pause", "0.05", code=0, timeout=40)
    assert starts(tmp_path)[2:] == [0]


@pytest.mark.requirement("F-081")
def test_a_lost_job_is_told_with_the_end_of_its_log(tool: Any, tmp_path: Path, home: Home, validate_envelope: Any):
    program = tool("long.py")
    job_id = program.envelope("once", tmp_path, "30", "--budget", "500ms", code=14)["data"]["job_id"]
    wait_for(lambda: b"working hard" in Path(str(home.job().log_path)).read_bytes(), "the log")
    os.kill(home.runner(), signal.SIGKILL)
    status = program.envelope("job", "status", job_id, code=0)["data"]
    assert status["status"] == "failed" and status["terminal"] and status["code"] == "JOB_LOST"
    # Not resumable: the identical call is told, once, and the one after it runs anew.
    envelope = validate_envelope(program.envelope("once", tmp_path, "30", code=1))
    assert envelope["error"]["code"] == "JOB_LOST"
    assert "working hard" in envelope["error"]["context"]["log_tail"]
    assert envelope["error"]["retryable"] is False and envelope["meta"]["side_effects"] == "unknown"
    anew = program.envelope("once", tmp_path, "30", "--budget", "1s", code=14)
    assert anew["data"]["job_id"] != job_id
    wait_for(lambda: len(lines_of(tmp_path / "notes")) == 2, "the second run")


@pytest.mark.requirement("F-081")
def test_whoever_waits_for_a_job_hears_of_its_loss_at_once(
    tool: Any, tmp_path: Path, home: Home, validate_envelope: Any
):
    running = tool("long.py").start("once", tmp_path, "30")
    wait_for(lambda: lines_of(tmp_path / "notes"), "the work to be up")
    os.kill(home.runner(), signal.SIGKILL)
    killed_at = time.monotonic()
    ran = running.ends(within_s=20)
    assert time.monotonic() - killed_at < 20
    assert ran.code == 1 and validate_envelope(ran.json())["error"]["code"] == "JOB_LOST"


@pytest.mark.requirement("F-081")
def test_a_worker_that_is_killed_is_a_crash_that_the_runner_tells(tool: Any, tmp_path: Path, validate_envelope: Any):
    running = tool("long.py").start("once", tmp_path, "30")
    [line] = wait_for(lambda: lines_of(tmp_path / "notes"), "the work to be up")
    os.kill(int(line.split()[1]), signal.SIGKILL)
    ran = running.ends(within_s=5)
    assert ran.code == 1 and validate_envelope(ran.json())["error"]["code"] == "WORKER_CRASHED"


@pytest.mark.requirement("C-035")
def test_if_everything_is_killed_at_once_it_still_goes_on(tool: Any, tmp_path: Path, home: Home, no_survivors: Any):
    program = tool("long.py")
    (tmp_path / "async").mkdir()
    begin_counting(program, tmp_path, 2000)
    running = program.start("asynchronous", tmp_path / "async", "--to", "2000")
    wait_for(lambda: len(home.jobs()) == 2, "both jobs")
    wait_for(lambda: all((job.progress_done or 0) > 3 for job in home.jobs()), "progress of both")
    for process in no_survivors.alive():
        with contextlib.suppress(ProcessLookupError):  # one dies with another
            os.kill(process.pid, signal.SIGKILL)
    running.process.wait(5)
    assert no_survivors.wait_until_alone(3) == []
    again = [["count", tmp_path, "2000", "--budget", "100ms"], ["asynchronous", tmp_path / "async", "--to", "2000"]]
    codes = [ran.code for ran in program.each(again, env={"AGENT_CALL_BUDGET_MS": "100"})]
    assert codes == [14, 14]
    for folder in (tmp_path, tmp_path / "async"):
        first, second = wait_for(lambda folder=folder: starts(folder)[1:] and starts(folder), "the second attempt")
        assert first == 0 and second > 0


@pytest.mark.requirement("C-035")
def test_a_checkpoint_for_another_input_is_discarded_with_a_warning(
    tool: Any, tmp_path: Path, home: Home, validate_envelope: Any
):
    program = tool("long.py")
    begin_counting(program, tmp_path, 20)
    os.kill(home.runner(), signal.SIGKILL)
    (tmp_path / "input").write_text("changed")
    envelope = validate_envelope(program.envelope("count", tmp_path, "20", code=0))
    assert warning_codes(envelope) == ["CHECKPOINT_DISCARDED"]
    assert envelope["data"]["started_at"] == 0 and starts(tmp_path) == [0, 0]


@pytest.mark.requirement("C-035")
def test_a_command_that_cannot_be_detached_can_still_resume(tool: Any, tmp_path: Path, no_survivors: Any):
    program = tool("long.py")
    running = program.start("resumes-only", tmp_path, "--to", "60")
    wait_for(lambda: len(counted(tmp_path)) > 5, "some progress")
    running.signal(signal.SIGKILL)
    running.process.wait(5)
    assert no_survivors.wait_until_alone(3) == [], "it is no job: it dies with its caller"
    envelope = program.envelope("resumes-only", tmp_path, "--to", "60", code=0)
    assert envelope["data"]["result"] > 5


@pytest.mark.requirement("F-081")
@pytest.mark.requirement("C-035")
def test_a_timeout_does_not_lose_what_was_checkpointed(tool: Any, tmp_path: Path, validate_envelope: Any):
    """All of the work has one timeout; the next identical call has a new one, and goes on."""
    program = tool("long.py")
    # Of its four seconds the runner's start takes one, on a busy machine three.
    work = ("count", tmp_path, "100")
    first = validate_envelope(program.envelope(*work, "--timeout", "4s", code=10))
    assert first["error"]["code"] == "TIMEOUT"
    assert first["data"]["completed_steps"] == ["load"] and first["data"]["failed_step"] == "work"
    second = program.envelope(*work, code=0)
    assert second["data"]["started_at"] > 0, "the identical call went on where the first was stopped"


@pytest.mark.requirement("F-081")
def test_a_runner_that_was_stopped_is_not_taken_for_dead(tool: Any, tmp_path: Path, home: Home):
    """SIGSTOP, a debugger, a laptop that sleeps: it lives, so nobody else may start the work again."""
    program = tool("long.py")
    job_id = begin_counting(program, tmp_path)
    runner = home.runner()
    os.kill(runner, signal.SIGSTOP)
    try:
        envelope = program.envelope("count", tmp_path, "40", "--budget", "300ms", code=14)
        assert envelope["data"]["job_id"] == job_id
        assert starts(tmp_path) == [0]
    finally:
        os.kill(runner, signal.SIGCONT)
    assert program.envelope("job", "wait", job_id, code=0)["data"]["counted"] == 40


def test_a_flood_of_output_costs_two_files_and_not_the_disk(tool: Any, tmp_path: Path, home: Home):
    program = tool(
        "flood.py",
        """
import os
from shotclock import App

app = App("flood", default_timeout="20s")

@app.command(interruption=True)
def flood(megabytes: int = 30) -> str:
    for _ in range(megabytes):
        os.write(1, b"x" * 1_000_000)
    return "done"

app()
""",
    )
    assert program.envelope("flood", code=0)["data"] == {"result": "done"}
    kept = sum(path.stat().st_size for path in (home.path / "jobs").iterdir())
    assert 0 < kept < 3_000_000


def test_a_second_attempt_has_what_the_first_left_of_the_limit_also_if_the_clock_was_set_back(
    tool: Any, tmp_path: Path, home: Home
):
    program, clock = tool("long.py"), WallClock(tmp_path / "clock")
    words = ["count", tmp_path, "1000", "--timeout", "8s", "--pause", "0.05"]
    shown = program.envelope(*words, "--budget", "2500ms", code=14, env=clock.environment)
    wait_for(lambda: home.job().used_ms > 2_000, "a recorded sign of life")
    used_ms = home.job().used_ms
    os.kill(home.runner(), signal.SIGKILL)
    clock.move(-HOUR_MS)
    began = time.monotonic()
    envelope = program.envelope(*words, code=10, env=clock.environment, timeout=60)
    assert envelope["meta"]["job_id"] == shown["data"]["job_id"] and home.job().attempt == 2
    assert time.monotonic() - began < (8_000 - used_ms) / 1000 + 4, "with the start of three programs"
    assert envelope["error"]["code"] == "TIMEOUT" and envelope["error"]["context"]["clock"]["limit_ms"] == 8_000
    assert envelope["meta"]["duration_ms"] >= 8_000, "of all attempts"


def test_a_job_that_ends_while_the_store_is_locked_for_twelve_seconds_is_delivered_whole(
    tool: Any, tmp_path: Path, home: Home
):
    running = tool("long.py").start("count", tmp_path, "30")
    wait_for(lambda: len(counted(tmp_path)) > 5, "some progress")
    with held(home.path) as enough:
        enough.wait(LONG_S)
    ran = running.ends(within_s=40)
    assert ran.code == 0 and ran.json()["data"]["counted"] == 30
    job = home.job()
    assert job.attempt == 1 and (job.progress_done, job.delivered_at is None) == (30, False)
