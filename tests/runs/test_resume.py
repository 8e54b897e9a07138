"""Runs that are cut off by SIGKILL go on where they were, with the deadline they had."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.walltime import WallTime
from shotclock.store import Store
from shotclock.workflow.run import resume

pytestmark = pytest.mark.usefixtures("no_survivors")

RUN_LIMIT_S = 60  # a run of 200 short steps on a loaded machine
GONE_LIMIT_S = 10


def command(home: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "shotclock", "run", *words], {**os.environ, "SHOTCLOCK_HOME": str(home)}


def killed_after(seconds: float, home: Path, *words: str) -> bool:
    """Whether it was killed before it ended by itself."""
    argv, env = command(home, *words)
    process = subprocess.Popen(
        argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait(GONE_LIMIT_S)
        return True


def finished(home: Path, *words: str) -> dict[str, Any]:
    argv, env = command(home, *words)
    out = home.parent / "out.json"
    with open(out, "wb") as file:
        subprocess.run(argv, env=env, stdout=file, stderr=subprocess.DEVNULL, timeout=RUN_LIMIT_S)
    return json.loads(out.read_bytes())


def wide(steps: int) -> str:
    lines = ["timeout: 10m", "max_parallelism: 4", "steps:"]
    for number in range(steps):
        lines.append(f"  s{number}:")
        lines.append(f"    exec: echo {number} >> trace; echo $(( {number} * {number} ))")
        if number >= 5:
            lines.append(f"    depends_on: s{number - 5}")
        if number % 2:
            lines.append("    idempotent: true")
        else:
            lines.append("    on_fail: {retry: {max: 1}}")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [8])
def test_a_run_killed_again_and_again_comes_to_the_same_result(kills: int, tmp_path: Path) -> None:
    random.seed(kills)
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text(wide(200))
    expected = {f"s{number}": number * number for number in range(200)}
    words = [str(flow), "--run-id", "r"]
    recorded: set[str] = set()
    for _ in range(kills):
        cut_off = killed_after(random.uniform(0.6, 1.4), home, *words)
        words = ["--resume", "r"]
        with Store.open(home) as store:
            if store.runs.get("r") is None:  # killed before it had begun
                words = [str(flow), "--run-id", "r"]
                continue
            done = {name for name, step in store.runs.steps("r").items() if step.status == "succeeded"}
        assert recorded <= done, "what had finished stays finished"
        recorded = done
        if not cut_off:
            break
    ran_before = (tmp_path / "trace").read_text().split()
    envelope = finished(home, *words)
    assert envelope["ok"], envelope["error"]
    assert {name: step["output"] for name, step in envelope["data"]["steps"].items()} == expected
    ran_after = (tmp_path / "trace").read_text().split()[len(ran_before) :]
    again = {f"s{number}" for number in ran_after} & recorded
    assert not again, "nothing that had finished ran a second time"


def test_a_step_that_was_cut_off_is_interrupted_unless_it_may_run_twice(tmp_path: Path) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text(
        "steps:\n"
        "  once: {exec: 'echo x >> once; sleep 600'}\n"
        "  again: {exec: 'echo x >> again; test $(wc -l < again) -gt 1 || sleep 600', idempotent: true}\n"
        "  behind: {exec: 'echo b', depends_on: once}\n"
    )
    argv, env = command(home, str(flow), "--run-id", "r")
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    give_up = time.monotonic() + 20
    while not ((tmp_path / "once").exists() and (tmp_path / "again").exists()):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    process.kill()
    process.wait(GONE_LIMIT_S)
    envelope = finished(home, "--resume", "r")
    steps = envelope["data"]["steps"]
    assert {name: step["status"] for name, step in steps.items()} == {
        "once": "interrupted",
        "again": "succeeded",
        "behind": "skipped",
    }
    assert steps["once"]["error"]["code"] == "INTERRUPTED" and steps["behind"]["cause"] == "once"
    assert (tmp_path / "once").read_text() == "x\n"
    assert finished(home, "--resume", "r") == envelope, "a run that has ended answers as it did"


def test_the_deadline_is_the_one_it_had(tmp_path: Path) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text("timeout: 5m\nsteps: {a: {exec: sleep 600, idempotent: true, grace: 0s}}\n")
    assert killed_after(2.0, home, str(flow), "--run-id", "r")
    with Store.open(home) as store:
        run = store.runs.get("r")
        assert run is not None and run.deadline_at is not None
        # As if five minutes less two seconds had passed since.
        with store._database.write() as connection:
            connection.execute("UPDATE runs SET deadline_at = ?", (WallTime(time.time_ns() // 1_000_000).ms + 2000,))
    began = time.monotonic()
    envelope = finished(home, "--resume", "r")
    assert envelope["error"]["code"] == "TIMEOUT" and envelope["meta"]["exit_code"] == 10
    assert time.monotonic() - began < 15


def test_nobody_takes_up_a_run_that_somebody_else_has(tmp_path: Path) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text("steps: {a: {exec: sleep 600}}\n")
    argv, env = command(home, str(flow), "--run-id", "r")
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 20
        with Store.open(home) as store:
            while store.runs.get("r") is None:
                assert time.monotonic() < give_up
                time.sleep(0.05)
        for words in (["--resume", "r"], [str(flow), "--run-id", "r"]):
            refused = finished(home, *words)
            assert refused["error"]["code"] == "RUN_TAKEN" and refused["meta"]["exit_code"] == 6
    finally:
        process.terminate()
        process.wait(GONE_LIMIT_S)
    assert finished(home, "--resume", "nobody")["error"]["code"] == "RUN_NOT_FOUND"


def test_a_resumed_run_in_this_process(tmp_path: Path) -> None:
    with Store.open(tmp_path / "home") as store:
        from shotclock.core.errors import Failure

        with pytest.raises(Failure):
            asyncio.run(resume("none", store))
