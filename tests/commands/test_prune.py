"""`shotclock prune`: what it says, and that a run's envelope is the same before and after."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.store.store import RUNNERS_SINCE
from tests.command_line import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_starts")]
DAY_MS = 86_400_000


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"SHOTCLOCK_HOME": str(tmp_path / "home")}


def ran(shotclock: Callable[..., Any], env: dict[str, str], tmp_path: Path, name: str, days_ago: float = 0) -> Any:
    flow = tmp_path / "flow.yaml"
    flow.write_text("steps: {a: {exec: 'seq 20000'}}\noutputs: {n: '{{ outputs.a | length }}'}")
    envelope = shotclock("run", flow, "--run-id", name, env=env).json()
    with sqlite3.connect(tmp_path / "home" / "shotclock.db") as connection:
        connection.execute("UPDATE runs SET ended_at = ended_at - ? WHERE id = ?", (int(days_ago * DAY_MS), name))
    connection.close()
    return envelope


def test_old_runs_go_and_the_others_answer_as_they_did(
    shotclock: Callable[..., Any], env: dict[str, str], tmp_path: Path
) -> None:
    ran(shotclock, env, tmp_path, "old", 40)
    ran(shotclock, env, tmp_path, "weeks", 10)
    told = ran(shotclock, env, tmp_path, "new")
    dry = shotclock("prune", "--dry-run", env=env).json()
    assert dry["ok"] and dry["data"]["deleted"]["runs"] == 1 and dry["data"]["dry_run"]
    assert dry["meta"]["side_effects"] == "none"
    pruned = shotclock("prune", env=env).json()["data"]
    assert pruned["deleted"]["runs"] == 1 and pruned["deleted"]["runs_bytes"] > 100_000
    assert pruned["file_bytes"] < pruned["file_bytes_before"]
    assert shotclock("prune", "--older-than", "7d", env=env).json()["data"]["deleted"]["runs"] == 1
    again = shotclock("run", "--resume", "new", env=env).json()
    assert again["data"] == told["data"] and len(again["data"]["steps"]["a"]["output"]) > 100_000
    assert shotclock("run", "--resume", "old", env=env).json()["error"]["code"] == "RUN_NOT_FOUND"
    assert shotclock("prune", "--keep", "1", "--max-size", "1kB", env=env).json()["data"]["deleted"]["runs"] == 1


def test_wrong_limits_are_told_all_at_once(shotclock: Callable[..., Any], env: dict[str, str]) -> None:
    refused = shotclock("prune", "--older-than", "7", "--keep", "-1", "--max-size", "much", env=env)
    assert refused.code == 2
    assert [error["field"] for error in refused.json()["error"]["errors"]] == ["older-than", "keep", "max-size"]
    refused = shotclock("prune", env={**env, "SHOTCLOCK_KEEP_RUNS": "many"})
    assert refused.code == 2 and "SHOTCLOCK_KEEP_RUNS" in refused.json()["error"]["message"]


def test_a_person_reads_what_went(
    on_terminal: Callable[..., Any], env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    seen = on_terminal("prune", streams=("stdout", "stderr"), env=env)
    assert "deleted 0 runs, 0 proposals and 0 calls" in str(seen)


def test_a_run_cleans_up_after_itself_once_a_day(
    shotclock: Callable[..., Any], env: dict[str, str], tmp_path: Path
) -> None:
    ran(shotclock, env, tmp_path, "old", 40)
    with sqlite3.connect(tmp_path / "home" / "shotclock.db") as connection:
        connection.execute("UPDATE pruned SET at = 0")
    connection.close()
    ran(shotclock, env, tmp_path, "new")
    listed = json.dumps(shotclock("report", env=env).json()["data"]["runs"])
    assert '"new"' in listed and '"old"' not in listed


def test_an_older_store_is_refused_and_reset_once_nothing_runs(
    shotclock: Callable[..., Any], env: dict[str, str], tmp_path: Path
) -> None:
    told = ran(shotclock, env, tmp_path, "old")
    flow = tmp_path / "wait.yaml"
    flow.write_text(f"steps: {{a: {{exec: 'touch {tmp_path}/began; sleep 60'}}}}")
    command = [sys.executable, "-m", "shotclock", "run", str(flow), "--run-id", "running"]
    running = subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (tmp_path / "began").exists(), "the run to begin")
        busy = shotclock("prune", "--reset", env=env)
        assert busy.code == 12 and busy.json()["error"]["code"] == "STORE_BUSY"
    finally:
        running.terminate()
        running.wait(30)
    file = tmp_path / "home" / "shotclock.db"
    with sqlite3.connect(file) as connection:
        connection.execute("ALTER TABLE jobs RENAME COLUMN runner TO keeper")
        connection.execute(f"PRAGMA user_version={RUNNERS_SINCE - 1}")
    connection.close()
    refused = shotclock("report", "old", env=env).json()
    assert refused["error"]["code"] == "STORE_UNUSABLE" and "shotclock prune --reset" in refused["error"]["message"]
    assert shotclock("prune", "--reset", "--dry-run", env=env).code == 2
    moved_to = Path(shotclock("prune", "--reset", env=env).json()["data"]["moved_to"])
    assert (moved_to / "shotclock.db").exists() and not file.exists()
    assert shotclock("report", "old", env=env).json()["error"]["code"] == "RUN_NOT_FOUND"
    assert ran(shotclock, env, tmp_path, "old")["data"]["outputs"] == told["data"]["outputs"]
