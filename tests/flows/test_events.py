"""What `--events` tells whoever watches a run from outside, and that nobody who does not read it is waited for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

RUN_LIMIT_S = 30  # a handful of short steps on a loaded machine
FLOW = "max_parallelism: 50\nsteps:\n" + "".join(
    f"  s{number}: {{exec: 'head -c 3000 /dev/zero | tr \"\\0\" x; exit 1'}}\n" for number in range(40)
)


def ran(folder: Path, flow: str, events: str) -> dict[str, Any]:
    (folder / "flow.yaml").write_text(flow)
    ended = subprocess.run(
        [sys.executable, "-m", "shotclock", "run", str(folder / "flow.yaml"), "--events", events],
        env={**os.environ, "SHOTCLOCK_HOME": str(folder / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=RUN_LIMIT_S,
    )
    answer: dict[str, Any] = json.loads(ended.stdout)
    assert answer["meta"]["exit_code"] == ended.returncode
    return answer


def test_every_change_is_a_line_and_the_last_is_the_run_s(tmp_path: Path) -> None:
    answer = ran(tmp_path, "steps: {a: {exec: echo hi}, b: {exec: exit 1, depends_on: a}}", str(tmp_path / "events"))
    lines = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert {line["run_id"] for line in lines} == {answer["data"]["run_id"]} and all(line["at"] for line in lines)
    told = [(line["event"], line.get("id"), line.get("type"), line.get("status")) for line in lines]
    steps = [("a", "running"), ("a", "succeeded"), ("b", "running"), ("b", "failed")]
    assert told == [*(("step", name, "command", status) for name, status in steps), ("run", None, None, None)]
    assert (lines[-1]["ok"], lines[-1]["code"], lines[-1]["exit_code"]) == (False, "STEPS_FAILED", 3)


def test_a_pipe_that_nobody_reads_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    answer = ran(tmp_path, "steps: {a: {exec: touch ran}}", str(tmp_path / "pipe"))
    assert answer["error"]["code"] == "FILE_UNWRITABLE" and not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_reader_that_does_not_read_holds_up_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        answer = ran(tmp_path, FLOW, str(tmp_path / "pipe"))
    finally:
        os.close(reader)
    assert len(answer["data"]["failed"]) == 40
    assert [note["code"] for note in answer["warnings"]] == ["NOT_TOLD"]


def test_a_full_disk_under_the_events_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    answer = ran(tmp_path, "steps: {a: {exec: echo hi}}", "/dev/full")
    assert answer["ok"] and [note["code"] for note in answer["warnings"]] == ["NOT_TOLD"]
