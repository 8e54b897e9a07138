"""What a run does when the store is in use by others, or gone."""

import asyncio
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.limits import WallTime
from shotclock.flows.report.report import report_of
from shotclock.flows.run.runs import resume
from shotclock.store.home import StoreBusy
from shotclock.store.runs import StepRecord
from shotclock.store.store import Store
from tests.store.locked import LONG_S, held
from tests.store.work import appears

from .conftest import statuses

pytestmark = pytest.mark.usefixtures("no_survivors")
Run = Callable[..., Envelope]

_NOW = WallTime(1)
STARTED_WITHIN_S = 20.0  # the first step, on a loaded machine


def test_writing_that_must_not_wait_says_so_at_once(store: Store, tmp_path: Path, run: Run) -> None:
    run("steps: {a: {exec: 'true'}}", run_id="r")
    (database,) = (tmp_path / "home").glob("*.db")
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    with pytest.raises(StoreBusy):
        store.runs.record("r", [StepRecord("a", "running", {})], _NOW, wait_ms=0)
    assert time.monotonic() - began < 3
    other.execute("COMMIT")
    other.close()
    store.runs.record("r", [StepRecord("a", "running", {})], _NOW, wait_ms=0)


def test_a_run_whose_store_is_taken_away_stops_and_says_so(run: Run, tmp_path: Path) -> None:
    home = tmp_path / "home"

    def take_away(state: object) -> None:
        shutil.rmtree(home, ignore_errors=True)

    began = time.monotonic()
    envelope = run(
        """
        steps:
          a: {exec: sleep 0.3}
          long: {exec: sleep 600, grace: 0s}
          b: {exec: 'touch b', depends_on: a}
        """,
        on_change=take_away,
    )
    assert time.monotonic() - began < 30
    assert envelope.code == "STORE_UNUSABLE" and not envelope.ok
    assert envelope.meta["side_effects"] == "unknown" and envelope.error["retryable"] is False
    assert statuses(envelope)["a"] == "succeeded" and statuses(envelope)["long"] == "cancelled"
    assert statuses(envelope)["b"] == "skipped" and not (tmp_path / "b").exists(), "not written down, so not begun"
    assert {notice["code"] for notice in envelope.warnings} == {"NOT_WRITTEN_DOWN"}


LOCKED_WHILE_IT_RUNS = """
timeout: 60s
steps:
  a: {exec: 'touch a; while [ ! -e held ]; do sleep 0.01; done'}
  b: {exec: 'true', depends_on: a}
finally: [{id: last, exec: 'echo >> last', timeout: 1s}]
"""


def hold_from_the_first_step(folder: Path, for_s: float) -> threading.Thread:
    """Lock the store once step `a` has begun, and let it end then."""

    def hold() -> None:
        appears(folder / "a")
        with held(folder / "home", for_s) as enough:
            (folder / "held").touch()
            enough.wait(for_s)

    holding = threading.Thread(target=hold)
    holding.start()
    return holding


@pytest.mark.slow
def test_a_store_that_is_locked_for_twelve_seconds_delays_a_run_and_neither_ends_it_nor_loses_a_record(
    run: Run, store: Store, tmp_path: Path
) -> None:
    holding = hold_from_the_first_step(tmp_path, LONG_S)
    try:
        envelope = run(LOCKED_WHILE_IT_RUNS, run_id="r")
    finally:
        holding.join(LONG_S + STARTED_WITHIN_S)
    assert envelope.ok and set(statuses(envelope).values()) == {"succeeded"} and not envelope.warnings
    assert envelope.meta["duration_ms"] >= LONG_S * 1000 - 1000
    recorded = store.runs.get("r")
    assert recorded is not None and recorded.ended_at is not None
    assert {record.status for record in store.runs.steps("r").values()} == {"succeeded"}


def test_a_run_whose_store_stays_locked_ends_by_its_deadline_after_its_finally_and_says_how_to_continue(
    run: Run, store: Store, tmp_path: Path
) -> None:
    holding = hold_from_the_first_step(tmp_path, LONG_S)
    began = time.monotonic()
    try:
        envelope = run(LOCKED_WHILE_IT_RUNS.replace("60s", "4s"), run_id="r")
        took_s = time.monotonic() - began
        assert (tmp_path / "last").exists() and statuses(envelope)["last"] == "succeeded", "whatever the store does"
        assert statuses(envelope)["a"] == "succeeded" and statuses(envelope)["b"] == "skipped"
        assert envelope.code == "STORE_BUSY" and envelope.error["retryable"] is False
        assert "shotclock run --resume r" in envelope.error["suggestion"], "nothing says to call again"
        assert "NOT_WRITTEN_DOWN" in {notice["code"] for notice in envelope.warnings}
        assert took_s < LONG_S
    finally:
        holding.join(LONG_S + STARTED_WITHIN_S)
    resumed = asyncio.run(asyncio.wait_for(resume("r", store), STARTED_WITHIN_S))
    assert statuses(resumed) == {"a": "interrupted", "b": "skipped", "last": "succeeded"}, "as the store knows it"
    assert store.runs.get("r").ended_at is not None


def test_a_run_that_is_stopped_while_its_store_is_locked_ends_in_moments(run: Run, tmp_path: Path) -> None:
    holding = hold_from_the_first_step(tmp_path, LONG_S)
    try:
        began = time.monotonic()
        envelope = run(LOCKED_WHILE_IT_RUNS, stop_after=3.0)
        assert time.monotonic() - began < LONG_S
        assert envelope.code == "CANCELLED" and (tmp_path / "last").exists()
    finally:
        holding.join(LONG_S + STARTED_WITHIN_S)


def test_an_output_is_stored_once_with_its_step_and_once_with_its_run(run: Run, store: Store, tmp_path: Path) -> None:
    envelope = run(
        """
        steps: {a: {exec: 'head -c 200000 /dev/zero | tr "\\0" w; echo end', output_format: text}}
        outputs: {o: "{{ outputs.a }}", n: "{{ outputs.a | length }}"}
        """,
        run_id="r",
    )
    data: Any = envelope.data
    assert data["outputs"] == {"o": "w" * 200_000 + "end", "n": 200_003}
    (database,) = (tmp_path / "home").glob("*.db")
    with sqlite3.connect(database) as connection:
        (kept,) = connection.execute("SELECT length(envelope) FROM runs").fetchone()
        (steps,) = connection.execute("SELECT sum(length(record)) FROM steps").fetchone()
    connection.close()
    assert kept < 210_000 and steps < 210_000
    answer: Any = asyncio.run(asyncio.wait_for(resume("r", store), STARTED_WITHIN_S)).data
    assert answer == json.loads(json.dumps(data)), "a run that has ended answers as it did"
    known = store.runs.get("r")
    assert known is not None
    assert report_of(known, store.runs.steps("r"), now=_NOW, is_alive=False).outputs == data["outputs"]
