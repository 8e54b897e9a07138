"""Features of runs together: artifacts of resumed items, groups with `finally`, signals while messages are sent."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.flows.test_people import WITHIN_S, Runs, runs
from tests.flows.test_resume import Started, finished

__all__ = ["runs"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "warm_starts")]

EACH = """
max_parallelism: 1
steps:
  each:
    exec: 'echo {{ item }} > made; echo {{ item }} >> ../did; test {{ item }} != y || test -e ../ok || END'
    for_each: [x, y, z]
    cwd: "{{ item }}"
    artifacts: made
    idempotent: true
"""


def until(holds: Callable[[], Any]) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def files(envelope: dict[str, Any], name: str) -> list[str]:
    return [each["file"] for each in envelope["data"]["steps"][name].get("artifacts", ())]


def folders(folder: Path) -> None:
    for name in "xyz":
        (folder / name).mkdir()


def test_a_resumed_step_keeps_the_artifacts_of_items_that_a_killed_process_had_finished(tmp_path: Path) -> None:
    flow, did = tmp_path / "flow.yaml", tmp_path / "did"
    folders(tmp_path)
    flow.write_text(EACH.replace("END", "sleep 60"))
    started = Started(tmp_path / "home", str(flow), "--run-id", "r")
    started.wait_until(lambda: did.exists() and "y" in did.read_text())
    assert started.kill()
    (tmp_path / "ok").touch()
    envelope = finished(tmp_path / "home", "--resume", "r")
    assert did.read_text().split() == ["x", "y", "y", "z"]
    assert files(envelope, "each") == ["each[0]/made", "each[1]/made", "each[2]/made"]


def test_a_second_signal_while_messages_are_sent_answers_with_the_end_of_the_run(runs: Runs) -> None:
    flow = runs.flow("""
notify: [{on: [ended], command: [sh, -c, "cat > message; sleep 60"]}]
steps: {work: {exec: "touch began; sleep 60"}}
finally: {clean: {exec: echo cleaned, timeout: 5s}}
""")
    process = runs.start(flow, "--run-id", "r", "--json")
    until((runs.folder / "began").exists)
    process.send_signal(signal.SIGTERM)
    until((runs.folder / "message").exists)
    time.sleep(0.3)  # two signals at once count as one
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=WITHIN_S)
    envelope = json.loads(out)
    assert (process.returncode, envelope["error"]["code"], envelope["error"]["message"]) == (
        143,
        "CANCELLED",
        "stopped by SIGTERM",
    )
    assert envelope["data"]["steps"]["clean"]["status"] == "succeeded" and "continue_command" not in envelope["data"]
    [note] = envelope["warnings"]
    assert note["code"] == "NOT_NOTIFIED" and "a second SIGTERM" in note["message"]
    assert runs("--resume", "r", code=143)["data"] == envelope["data"]


def test_a_run_that_was_cancelled_after_its_last_step_has_nothing_to_run_again(runs: Runs) -> None:
    flow = runs.flow("""
steps: {work: {exec: echo done}}
finally: {clean: {exec: "touch began; sleep 1", timeout: 5s}}
""")
    process = runs.start(flow, "--run-id", "r", "--json")
    until((runs.folder / "began").exists)
    process.send_signal(signal.SIGTERM)
    envelope = json.loads(process.communicate(timeout=WITHIN_S)[0])
    assert envelope["error"]["code"] == "CANCELLED" and "rerun_command" not in envelope["data"]
    refused = runs("--rerun-failed", "r", code=2)
    assert "nothing to run again" in refused["error"]["message"]


def test_a_rerun_cleans_up_wholly_although_a_part_of_it_had_succeeded_before(tmp_path: Path) -> None:
    flow, did = tmp_path / "flow.yaml", tmp_path / "did"
    (tmp_path / "clean.yaml").write_text("""
steps:
  remove: {exec: echo remove >> did}
  tell: {exec: echo tell >> did; test -e told, depends_on: remove}
""")
    flow.write_text("steps: {work: {exec: exit 1}}\nfinally: {clean: {type: workflow, workflow: clean.yaml}}\n")
    finished(tmp_path / "home", str(flow), "--run-id", "first")
    (tmp_path / "told").touch()
    envelope = finished(tmp_path / "home", "--rerun-failed", "first")
    assert envelope["data"]["steps"]["clean"]["status"] == "succeeded"
    assert did.read_text().split() == ["remove", "tell"] * 2


def test_finally_knows_that_the_run_was_asked_to_stop(runs: Runs) -> None:
    flow = runs.flow("""
steps: {work: {exec: "touch began; sleep 60"}, after: {exec: echo after, depends_on: work}}
finally: {clean: {exec: "echo {{ run.status }}"}}
""")
    process = runs.start(flow, "--run-id", "r", "--json")
    until((runs.folder / "began").exists)
    argv = [sys.executable, "-m", "shotclock", "job", "stop", "r"]
    assert subprocess.run(argv, env=runs.env, capture_output=True, timeout=WITHIN_S).returncode == 0
    envelope = json.loads(process.communicate(timeout=WITHIN_S)[0])
    assert envelope["error"]["code"] == "CANCELLED"
    assert envelope["data"]["steps"]["clean"]["output"] == "cancelled"


def test_a_run_does_not_wait_for_its_group_into_the_time_of_finally(runs: Runs) -> None:
    flow = runs.flow("""
timeout: 60s
concurrency: g
steps: {work: {exec: "touch began; while [ ! -e go ]; do sleep 0.05; done"}}
finally: {clean: {exec: echo cleaned >> done, timeout: 20s}}
""")
    holder = runs.start(flow, "--run-id", "first")
    until((runs.folder / "began").exists)
    began = time.monotonic()
    refused = runs(flow, "--run-id", "second", "--timeout", "25s", code=10)
    assert refused["error"]["code"] == "QUEUE_TIMEOUT" and time.monotonic() - began < 20
    (runs.folder / "go").touch()
    holder.communicate(timeout=WITHIN_S)
    assert runs.done() == ["cleaned"]


def test_a_run_whose_end_cannot_be_stored_sends_nothing_and_names_no_run_that_continues_it(runs: Runs) -> None:
    flow = runs.flow("""
notify: [{on: [failed], command: [touch, sent]}]
steps: {work: {exec: "rm -r home/*; exit 1"}}
""")
    envelope = runs(flow, "--run-id", "r", code=3)
    assert "rerun_command" not in envelope["data"]
    [note] = [each for each in envelope["warnings"] if each["code"] == "NOT_NOTIFIED"]
    assert "--resume r" in note["message"] and not (runs.folder / "sent").exists()
