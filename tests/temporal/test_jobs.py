"""Runs as jobs: listed, looked at, waited for and stopped by `shotclock job`, here and on an engine."""

import asyncio
import os
import pty
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.flows.cli.run import RunOptions, _deliver
from shotclock.temporal._engine import TemporalEngine
from shotclock.temporal.connection import Address, connect, read_address
from tests.temporal.conftest import WITHIN_S, Cluster, Program, Runs, steps_of, wait_until
from tests.warm import WarmStart

pytestmark = pytest.mark.slow

WORKS = """
    timeout: 400
    steps:
      first: {type: command, exec: "echo first"}
      works:
        type: command
        exec: "touch begun; while test ! -e go; do sleep 0.2; done; echo done"
        timeout: 300
        depends_on: [first]
    """
ASKS = """
    timeout: 100
    steps:
      first: {type: command, exec: "echo first"}
      ask: {type: human-input, prompt: "Well?", depends_on: [first], on_fail: {run: [tidy]}}
      tidy: {type: command, exec: "touch tidied"}
    """


@pytest.fixture
def runs(on_either: Runs) -> Runs:
    return on_either


def verbatim(runs: Runs, command: str) -> tuple[int, dict[str, Any]]:
    """Run what an answer says to run."""
    ours, *words = shlex.split(command)
    assert ours == "shotclock"
    return Program([*words, "--json"], runs.folder, f"verbatim-{time.monotonic_ns()}").ended()


def test_a_run_that_works_is_a_job_that_is_looked_at_and_waited_for(
    runs: Runs, validate_envelope: Callable[[Any], Any]
) -> None:
    run_id = f"job-{time.monotonic_ns()}"
    running = runs.start(WORKS, "--run-id", run_id)
    wait_until((runs.folder / "begun").exists, "the step")
    code, told = runs.call("job", "status", run_id)
    job = told["data"]
    assert code == 0 and (job["status"], job["run_status"], job["terminal"]) == ("running", "running", False), told
    assert job["progress"] == {"done": 1, "total": 2, "unit": "steps"} and job["timeout_ms"] == 400_000
    began = time.monotonic()
    code, told = runs.call("job", "wait", run_id, "--budget", "1s")
    validate_envelope(told)
    assert code == 14 and told["error"]["code"] == "INCOMPLETE" and told["data"]["state"] == "running", told
    assert 1 <= time.monotonic() - began < WITHIN_S / 2
    assert verbatim(runs, told["data"]["status_command"])[1]["data"]["run_status"] == "running"
    (runs.folder / "go").touch()
    code, waited = verbatim(runs, told["data"]["continue_command"])
    assert code == 0 and waited["data"]["steps"]["works"]["output"] == "done", waited
    assert running.ended()[1] == waited
    code, told = runs.call("job", "status", run_id)
    assert (told["data"]["status"], told["data"]["terminal"]) == ("complete", True), told


def test_a_run_that_is_parked_is_continued_and_cancelled_as_its_answer_says(runs: Runs) -> None:
    code, parked = runs.run(ASKS, "--budget", "1s", "--run-id", f"parked-{time.monotonic_ns()}")
    assert code == 14 and parked["error"]["code"] == "INCOMPLETE", parked
    code, told = runs.call("job", "status", parked["data"]["job_id"])
    assert code == 0 and told["data"]["run_status"] == "parked", told
    code, told = runs.call("job", "wait", parked["data"]["job_id"], "--budget", "1s")
    assert code == 14 and told["data"]["state"] == "paused", told
    code, told = verbatim(runs, f"{parked['data']['continue_command']} --budget 1s")
    assert code == 14 and told["data"]["waiting"] == parked["data"]["waiting"], told
    code, told = verbatim(runs, parked["data"]["cancel_command"])
    assert code == 0 and (told["data"]["status"], told["data"]["terminal"]) == ("cancelled", True), told
    assert told["data"]["code"] == "CANCELLED"
    code, ended = verbatim(runs, parked["data"]["continue_command"])
    assert code == 143 and steps_of(ended)["ask"] == "cancelled", ended
    code, again = runs.call("job", "cancel", parked["data"]["job_id"])
    assert code == 0 and again["data"]["status"] == "cancelled", "one that has ended stays as it is"


def test_runs_of_an_engine_are_listed_whatever_has_become_of_them(on_engine: Runs) -> None:
    runs, mark = on_engine, time.monotonic_ns()
    ids = {name: f"{name}-{mark}" for name in ("works", "waits", "good", "bad", "late")}
    runs.write("steps: {inner: {type: command, exec: echo inner}}", "inner.yaml")
    assert runs.run("steps: {a: {type: workflow, workflow: inner.yaml}}", "--run-id", ids["good"])[0] == 0
    assert runs.run("steps: {a: {type: command, exec: exit 1}}", "--run-id", ids["bad"])[0] == 3
    late = "{timeout: 1, steps: {a: {type: command, exec: sleep 60, grace: 100ms}}}"
    assert runs.run(late, "--run-id", ids["late"], "--force")[0] == 10
    assert runs.run(ASKS, "--budget", "1s", "--run-id", ids["waits"])[0] == 14
    working = runs.start(WORKS, "--run-id", ids["works"])
    wait_until((runs.folder / "begun").exists, "the step")

    def listed(*words: str, kind: str = "jobs", key: str = "run_status") -> dict[str, str]:
        code, told = runs.call(*words)
        assert code == 0, told
        return {run["run_id"]: run[key] for run in told["data"][kind] if run["run_id"].endswith(str(mark))}

    all_of_them = {
        ids["works"]: "running", ids["waits"]: "parked", ids["good"]: "succeeded", ids["bad"]: "failed",
        ids["late"]: "timed_out",
    }  # fmt: skip
    # Temporal's index is a moment behind.
    wait_until(lambda: listed("job", "list") == all_of_them, "all of them, without the run inside another")
    assert listed("report", kind="runs", key="status") == all_of_them
    active = {ids["works"]: "running", ids["waits"]: "parked"}
    wait_until(lambda: listed("job", "list", "--active") == active, "what is under way")
    assert next(iter(listed("job", "list"))) == ids["works"], "the newest first"
    assert verbatim(runs, f"shotclock job cancel {ids['waits']} --on {runs.on}")[0] == 0
    code, told = runs.call("job", "cancel", ids["works"])
    assert code == 0 and (told["data"]["status"], told["data"]["code"]) == ("cancelled", "CANCELLED"), told
    assert working.ended()[0] == 143


def test_what_is_no_run_of_ours_is_neither_shown_nor_stopped(on_engine: Runs, cluster: Cluster) -> None:
    runs, foreign = on_engine, f"foreign-{time.monotonic_ns()}"
    for verb in (["status"], ["wait"], ["cancel"], ["extend", "5s"], ["stop"]):
        code, told = runs.call("job", verb[0], "no-such-run", *verb[1:])
        assert code == 5 and told["error"]["code"] == "RUN_NOT_FOUND", told

    async def start() -> Any:
        client = await connect(read_address(cluster.url, {}))
        return await client.start_workflow("somebody-else", id=foreign, task_queue="theirs")

    async def describe() -> Any:
        client = await connect(read_address(cluster.url, {}))
        described = await client.get_workflow_handle(foreign).describe()
        await client.get_workflow_handle(foreign).terminate()
        return described

    asyncio.run(asyncio.wait_for(start(), WITHIN_S))
    code, told = runs.call("job", "cancel", foreign)
    assert code == 5 and "another program" in told["error"]["message"], told
    described = asyncio.run(asyncio.wait_for(describe(), WITHIN_S))
    assert described.status.name == "RUNNING" and described.history_length < 4, "not even asked to"


def test_without_a_worker_nobody_waits_for_long_and_the_answer_says_what_is_missing(on_engine: Runs) -> None:
    runs, run_id = on_engine, f"lonely-{time.monotonic_ns()}"
    running = runs.start(
        "{timeout: 600, steps: {a: {type: command, exec: echo a}}}", "--queue", run_id, "--run-id", run_id
    )
    code, untaken = running.ended()
    assert code == 14 and untaken["data"]["run_id"] == run_id, untaken
    code, told = runs.call("job", "wait", run_id, "--budget", "1s")
    assert code == 14 and told["data"]["run_status"] == "running", told
    for words in (["report", run_id], ["job", "extend", run_id, "5s"]):
        code, told = runs.call(*words)
        assert code == 12 and f"no worker answers for run {run_id!r}" in told["error"]["message"], told
        assert "shotclock worker" in told["error"]["suggestion"], told
    worker = Program(["worker", *runs.where, "--queue", run_id, "--drain", "1s"], runs.folder, "late")
    try:
        worker.wait_for_line("takes up to")
        code, envelope = verbatim(runs, untaken["data"]["continue_command"])
        assert code == 0 and steps_of(envelope) == {"a": "succeeded"}, envelope
        assert envelope["meta"]["timeout_ms"] == 600_000, "the refused extension is not received later"
        code, told = runs.call("report", run_id[:-3])
        assert code == 0 and told["data"]["run_id"] == run_id, "the beginning of an id will do"
    finally:
        worker.stop()


def on_terminal(folder: Path, words: list[str]) -> str:
    """Run `shotclock …` with a terminal for its output, and return what is on it."""
    ours, theirs = pty.openpty()
    try:
        inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
        environment = {**inherited, "SHOTCLOCK_HOME": str(folder / "home"), "TERM": "dumb"}
        command = [sys.executable, "-m", "shotclock", *words]
        WarmStart(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs).wait(
            WITHIN_S
        )
        return os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_person_at_a_terminal_is_told_what_to_type_next(on_engine: Runs) -> None:
    runs, run_id = on_engine, f"typed-{time.monotonic_ns()}"
    runs.write("steps: {a: {type: command, exec: echo a}}")
    shown = on_terminal(runs.folder, ["run", "flow.yaml", "--run-id", run_id, *runs.where])
    (command,) = (line.strip() for line in shown.splitlines() if line.strip().startswith("shotclock "))
    code, told = verbatim(runs, command)
    assert code == 0 and told["data"]["run_id"] == run_id, told
    shown = on_terminal(runs.folder, ["job", "list", *runs.where])
    assert f"{run_id}  complete   run flow" in shown
    shown = on_terminal(runs.folder, ["report", *runs.where])
    assert run_id in shown and "succeeded" in shown


def test_a_run_of_which_nothing_is_heard_is_said_to_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    envelope = TemporalEngine(Address("h"))._unended_answer("r", 1000)
    assert _deliver(envelope, RunOptions("flow.yaml"), False) == 14
    assert "shotclock run --resume r --on temporal://h:7233/default" in capfd.readouterr().err
