"""`shotclock advise`: what it shows."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.store.store import Store
from tests.flows.past import add_run, timed_out, took

pytestmark = pytest.mark.slow

FLOW = """\
# nightly
timeout: 5m
steps:
  fetch:
    exec: 'true'
    timeout: 10   # seconds
  build: {exec: 'true', timeout: "1h", depends_on: fetch}
  rest: {exec: 'true'}
"""
Shotclock = Callable[..., Any]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"SHOTCLOCK_HOME": str(tmp_path / "home")}


@pytest.fixture
def flow(tmp_path: Path) -> Path:
    """A file with 25 runs: `fetch` needs more time and `rest` is new."""
    file = tmp_path / "flow.yaml"
    file.write_text(FLOW.replace('"1h"', '"2m"'))
    with Store.open(tmp_path / "home") as store:
        for number in range(25):
            fetched = timed_out(10_000, "fetch") if number == 20 else took(8_000 + number, "fetch")
            add_run(store, file, fetched, took(1_000, "build"), number=number, run_ms=60_000)
    return file


def test_the_numbers_and_the_advice_are_beside_each_timeout(
    shotclock: Shotclock, env: dict[str, str], flow: Path
) -> None:
    data = shotclock("advise", flow, env=env).json()["data"]
    assert data["runs"] == 25 and data["runs_are_all_read"]
    found = {each.pop("step"): each for each in data["timeouts"]}
    assert found["fetch"] == {
        "timeout_ms": 10_000,
        "source": "file",
        "runs": 25,
        "p50_ms": 8_012,
        "p95_ms": 8_024,
        "max_ms": 10_000,
        "max_is_at_least": True,
        "timeouts": 1,
        "failures": 0,
        "uncounted": 0,
        "verdict": "raise",
        "suggested_ms": 20_000,
        "advice": "raise it to 20s: 1 of 25 runs reached 10s",
    }
    assert found["build"]["advice"] == "lower it to 5s: the longest of 25 runs took 1s"
    assert (found["rest"]["source"], found["rest"]["advice"]) == ("default", "no past runs")
    assert found[None]["timeout_ms"] == 300_000

    text = shotclock("advise", flow, "--step", "fetch", "--format", "text", env=env).stdout.decode()
    assert re.search(r"fetch +10s +25 +8\.01s +8\.02s +≥10s +1 +raise it", text), text
    assert "build" not in text and "25 ended runs of flow" in text
    few = shotclock("advise", flow, "--runs", "4", env=env).json()["data"]
    assert few["runs"] == 4 and few["timeouts"][1]["advice"] == "4 runs are too few"
    unknown = shotclock("advise", flow, "--step", "fetsh", env=env)
    assert unknown.code == 2 and "did you mean 'fetch'?" in unknown.json()["error"]["suggestion"]


def test_a_check_names_the_same_limit(shotclock: Shotclock, env: dict[str, str], flow: Path) -> None:
    checked = shotclock("check", flow, env=env)
    [finding] = checked.json()["data"]["findings"]
    assert checked.code == 0 and finding["severity"] == "warning" and finding["line"] == 6
    assert finding["rule"] == "history/near-limit"
    assert (finding["message"], finding["suggestion"]) == ("1 of 25 runs reached 10s", "raise it to 20s")


def test_a_file_without_history_or_that_is_no_workflow_is_answered(
    shotclock: Shotclock, env: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "flow.yaml"
    file.write_text(FLOW)
    data = shotclock("advise", file, env=env).json()["data"]
    assert data["runs"] == 0 and {each["advice"] for each in data["timeouts"]} == {"no past runs"}
    assert not (tmp_path / "home").exists()
    file.write_text("steps: {a: {exec: 'true', timeout: soon}}")
    refused = shotclock("advise", file, env=env)
    assert refused.code == 2 and refused.json()["error"]["code"] == "WORKFLOW_INVALID"
    assert shotclock("advise", tmp_path / "none.yaml", env=env).json()["error"]["code"] == "FILE_NOT_FOUND"


def test_real_runs_are_advised_and_reported_with_their_p95(
    shotclock: Shotclock, env: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "flow.yaml"
    file.write_text("steps: {work: {exec: sleep 0.05, timeout: 5s}}")
    for number in range(6):
        assert shotclock("run", file, "--run-id", f"r{number}", env=env, cwd=tmp_path).code == 0
    [_, work] = shotclock("advise", "flow.yaml", env=env, cwd=tmp_path).json()["data"]["timeouts"]
    assert work["runs"] == 6 and 50 <= work["p50_ms"] <= work["p95_ms"] == work["max_ms"] < 5_000
    [step] = shotclock("report", "r5", env=env).json()["data"]["steps"]
    assert step["p95_ms"] is not None and 50 <= step["p95_ms"] <= work["max_ms"]
    assert "p95" in shotclock("report", "r5", "--format", "text", env=env).stdout.decode()
    assert "| p95 |" in shotclock("report", "r5", "--output", "markdown", env=env).stdout.decode()
    page = tmp_path / "page.html"
    assert shotclock("report", "r5", "--html", page, env=env).code == 0 and "p95 of earlier runs" in page.read_text()
    # Only four runs were before it.
    [step] = shotclock("report", "r4", env=env).json()["data"]["steps"]
    assert step["p95_ms"] is None
