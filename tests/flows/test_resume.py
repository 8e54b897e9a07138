"""Runs that are cut off by SIGKILL go on where they were, with the deadline they had."""

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.limits import WallTime
from shotclock.store.store import Store
from tests.store.work import appears
from tests.wall_clock import HOUR_MS, WallClock

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

RUN_LIMIT_S = 60  # a run of 200 short steps on a loaded machine
GONE_LIMIT_S = 10
STARTED_LIMIT_S = 20  # until its first step runs, on a loaded machine


def command(home: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "shotclock", "run", *words], {**os.environ, "SHOTCLOCK_HOME": str(home)}


class Started:
    """The command under way, to be killed."""

    def __init__(self, home: Path, *words: str) -> None:
        argv, env = command(home, *words)
        self._process = subprocess.Popen(
            argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_until(self, holds: Callable[[], bool]) -> None:
        give_up = time.monotonic() + STARTED_LIMIT_S
        while not holds() and not self.wait(0.005):
            assert time.monotonic() < give_up

    def kill(self) -> bool:
        """Whether it was killed before it ended by itself."""
        self._process.kill()
        self._process.wait(GONE_LIMIT_S)
        return self._process.returncode == -signal.SIGKILL


def finished(home: Path, *words: str) -> dict[str, Any]:
    argv, env = command(home, *words)
    out = home.parent / "out.json"
    with open(out, "wb") as file:
        subprocess.run(argv, env=env, stdout=file, stderr=subprocess.DEVNULL, timeout=RUN_LIMIT_S)
    return json.loads(out.read_bytes())


LONG = "timeout: 6s\nsteps: {long: {exec: 'touch begun; sleep 30', idempotent: true}}\n"


@pytest.mark.slow
@pytest.mark.parametrize("is_same_boot", [True, False])
def test_a_run_that_is_resumed_after_the_clock_was_set_back_has_no_more_time_than_the_store_saw_it_leave(
    tmp_path: Path, is_same_boot: bool
) -> None:
    home, flow, clock = tmp_path / "home", tmp_path / "flow.yaml", WallClock(tmp_path / "clock")
    flow.write_text(LONG)
    argv, env = command(home, str(flow), "--run-id", "r")
    began = time.monotonic()
    with subprocess.Popen(argv, env={**clock.environment, **env, "PYTHONPATH": clock.environment["PYTHONPATH"]}) as run:
        appears(tmp_path / "begun")
        time.sleep(2.0)
        run.kill()
    if not is_same_boot:
        with contextlib.closing(sqlite3.connect(home / "shotclock.db")) as store, store:
            store.execute("UPDATE runs SET began_on = 'another-boot 1'")
    clock.move(-HOUR_MS)
    argv, _ = command(home, "--resume", "r", "--json")
    resumed_at = time.monotonic()
    ran = subprocess.run(argv, env={**clock.environment, "SHOTCLOCK_HOME": str(home)}, capture_output=True, timeout=60)
    envelope = json.loads(ran.stdout)
    assert envelope["error"]["code"] == "TIMEOUT"
    took_s = time.monotonic() - (began if is_same_boot else resumed_at)
    assert took_s < 6 + 3, "with the start of two programs"
    with Store.open(home) as store:
        recorded = store.runs.get("r")
    assert recorded is not None and recorded.deadline_at is not None
    assert recorded.deadline_at - recorded.created_at == 6_000 and recorded.ended_at >= recorded.created_at


def wide(steps: int) -> str:
    """Each leaves a mark when it begins and when it ends."""
    lines = ["timeout: 10m", "max_parallelism: 4", "steps:"]
    for number in range(steps):
        lines.append(f"  s{number}:")
        marked = f"echo +{number} >> marks; sleep 0.04; echo -{number} >> marks"
        lines.append(f"    exec: {marked}; echo $(( {number} * {number} ))")
        if number >= 5:
            lines.append(f"    depends_on: s{number - 5}")
        lines.append("    idempotent: true" if number % 2 else "    on_fail: {retry: {max: 1}}")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "kills"), [(60, 6), pytest.param(200, 20, marks=pytest.mark.soak)])
def test_a_run_killed_many_times_comes_to_the_same_result(tmp_path: Path, count: int, kills: int) -> None:
    seed = int(os.environ.get("SHOTCLOCK_TEST_SEED") or random.randrange(2**32))
    print(f"SHOTCLOCK_TEST_SEED={seed}")
    chance = random.Random(seed)
    home, flow, marks = tmp_path / "home", tmp_path / "flow.yaml", tmp_path / "marks"
    flow.write_text(wide(count))
    marks.touch()
    finished_by: dict[str, int] = {}
    """What was written down as finished, and how many marks there were then."""
    done: set[str] = set()
    words, killed = [str(flow), "--run-id", "r"], 0
    while killed < kills:
        before, started = marks.stat().st_size, Started(home, *words)
        if chance.random() < 0.75:  # in the middle of its steps, else wherever it is
            started.wait_until(lambda before=before: marks.stat().st_size > before)  # type: ignore[misc]
            started.wait(chance.uniform(0, 0.12))
        else:
            started.wait(chance.uniform(0, 0.3))
        if not started.kill():
            break
        killed += 1
        with Store.open(home) as store:
            if store.runs.get("r") is None:  # killed before it had begun
                continue
            words = ["--resume", "r"]
            known, done = done, {name for name, each in store.runs.steps("r").items() if each.status == "succeeded"}
        assert known <= done, "what had finished stays finished"
        marked = len(marks.read_text().split())
        finished_by |= dict.fromkeys(done - known, marked)
    assert killed == kills, "it ended before it could be killed that often: give its steps more to do"
    envelope = finished(home, *words)
    assert envelope["ok"], json.dumps([envelope["data"]["steps"][name] for name in envelope["data"]["failed"]])
    outputs = {name: each["output"] for name, each in envelope["data"]["steps"].items()}
    assert outputs == {f"s{number}": str(number * number) for number in range(count)}
    left = marks.read_text().split()
    assert {mark for mark in left if mark[0] == "-"} == {f"-{number}" for number in range(count)}
    for name, marked in finished_by.items():
        assert f"+{name[1:]}" not in left[marked:], f"{name} had finished and ran a second time"


@pytest.mark.slow
def test_a_step_that_was_cut_off_is_interrupted_unless_it_may_run_twice(tmp_path: Path) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text(
        "steps:\n"
        "  once: {exec: 'echo x >> once; sleep 600'}\n"
        "  again: {exec: 'echo x >> again; test $(wc -l < again) -gt 1 || sleep 600', idempotent: true}\n"
        "  behind: {exec: 'echo b', depends_on: once}\n"
    )
    started = Started(home, str(flow), "--run-id", "r")
    started.wait_until(lambda: (tmp_path / "once").exists() and (tmp_path / "again").exists())
    assert started.kill()
    envelope = finished(home, "--resume", "r")
    steps = envelope["data"]["steps"]
    assert {name: step["status"] for name, step in steps.items()} == {
        "once": "interrupted",
        "again": "succeeded",
        "behind": "skipped",
    }
    assert steps["once"]["error"]["code"] == "INTERRUPTED" and steps["behind"]["cause"] == "once"
    assert steps["once"]["attempts"] == 1, "it was begun once"
    assert (tmp_path / "once").read_text() == "x\n"
    assert finished(home, "--resume", "r") == envelope, "a run that has ended answers as it did"


@pytest.mark.slow
def test_items_that_are_done_stay_done_and_those_that_were_cut_off_follow_the_rule_for_steps(tmp_path: Path) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    # The first ten end at once, the next hang until the run is killed, and the others have not begun by then.
    script = "n={{{{ {value} }}}}; echo $n >> {name}; test $n -lt 10 || test -e go || sleep 600; echo $n"
    items = json.dumps(list(range(40)))
    flow.write_text(
        "max_parallelism: 16\n"
        "steps:\n"
        f"  once: {{exec: '{script.format(name='once', value='item')}', for_each: {items}}}\n"
        f"  again: {{exec: '{script.format(name='again', value='matrix.n')}', idempotent: true,\n"
        f"    matrix: {{n: {items}}}}}\n"
    )

    def count(name: str) -> Counter[int]:
        file = tmp_path / name
        return Counter(map(int, file.read_text().split())) if file.exists() else Counter()

    started = Started(home, str(flow), "--run-id", "r")
    started.wait_until(lambda: len(count("once")) == len(count("again")) == 18)  # of each, eight hang
    assert started.kill()
    (tmp_path / "go").touch()
    steps = finished(home, "--resume", "r")["data"]["steps"]
    hung, everything = range(10, 18), range(40)
    assert count("once") == dict.fromkeys(everything, 1), "each item ran once"
    assert count("again") == {item: 2 if item in hung else 1 for item in everything}
    assert steps["once"]["status"] == "interrupted" and steps["once"]["attempts"] == 40
    assert steps["once"]["error"]["context"]["items_failed"] == list(hung)
    assert steps["once"]["output"] == [None if item in hung else str(item) for item in everything]
    assert steps["again"]["status"] == "succeeded" and steps["again"]["attempts"] == 48
    assert steps["again"]["output"] == list(map(str, everything))


@pytest.mark.slow
def test_the_deadline_is_the_one_it_had(tmp_path: Path) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text("timeout: 5m\nsteps: {a: {exec: touch begun; sleep 600, idempotent: true, grace: 0s}}\n")
    started = Started(home, str(flow), "--run-id", "r")
    started.wait_until((tmp_path / "begun").exists)
    assert started.kill()
    with Store.open(home) as store:
        run = store.runs.get("r")
        assert run is not None and run.deadline_at is not None
        # As if five minutes less two seconds had passed since.
        with store._database.write() as connection:
            connection.execute("UPDATE runs SET deadline_at = ?", (WallTime(time.time_ns() // 1_000_000).ms + 2000,))
        run = store.runs.get("r")
        assert run is not None and run.deadline_at is not None
    began = time.monotonic()
    envelope = finished(home, "--resume", "r")
    assert envelope["error"]["code"] == "TIMEOUT" and envelope["meta"]["exit_code"] == 10
    assert time.monotonic() - began < 15
    clock = envelope["error"]["context"]["clock"]
    assert clock["limit_ms"] == run.deadline_at.since_ms(run.created_at) <= clock["elapsed_ms"] + 600, "of all of it"


def test_a_step_that_runs_again_after_its_process_died_counts_the_first_start_and_keeps_all_its_tries(
    tmp_path: Path,
) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text(
        "steps:\n"
        "  once: {exec: 'echo x >> once; test $(wc -l < once) -gt 1 || sleep 600', idempotent: true}\n"
        "  tries:\n"
        "    exec: 'echo x >> tries; test $(wc -l < tries) -gt 1 || sleep 600; exit 1'\n"
        "    on_fail: {retry: {max: 1, backoff: {delay_ms: 1}}}\n"
    )
    started = Started(home, str(flow), "--run-id", "r")
    started.wait_until(lambda: (tmp_path / "once").exists() and (tmp_path / "tries").exists())
    assert started.kill()
    steps = finished(home, "--resume", "r")["data"]["steps"]
    starts = {name: len((tmp_path / name).read_text().split()) for name in steps}
    assert starts == {"once": 2, "tries": 3}, "a start that was cut off is none of the tries that the file allows"
    assert {name: step["attempts"] for name, step in steps.items()} == starts


def test_a_try_that_had_overtime_when_its_process_died_is_counted_once(tmp_path: Path) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text("""
steps:
  tries:
    exec: 'echo x >> tries; test $(wc -l < tries) -gt 1 || sleep 600; exit 1'
    soft: 300ms
    overtime: {command: "echo '{\\"extend\\": \\"1h\\"}'; touch granted", budget: 2h}
    on_fail: {retry: {max: 1, backoff: {delay_ms: 1}}}
""")
    started = Started(home, str(flow), "--run-id", "r")
    started.wait_until((tmp_path / "granted").exists)
    with Store.open(home) as store:
        started.wait_until(lambda: bool(store.runs.steps("r")["tries"].record.get("overtime")))
    assert started.kill()
    tries = finished(home, "--resume", "r")["data"]["steps"]["tries"]
    assert tries["attempts"] == 3 and len((tmp_path / "tries").read_text().split()) == 3


def test_a_run_killed_while_fail_fast_stops_it_is_stopped_and_cleaned_up_when_it_is_resumed(tmp_path: Path) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text("""
fail_fast: true
steps:
  bad: {exec: sleep 0.5; exit 1, on_fail: {run: tidy}}
  deaf: {exec: "trap 'touch asked' TERM; while :; do sleep 0.1 || :; done", grace: 60s, idempotent: true}
  later: {exec: echo later >> done, depends_on: beside}
  beside: {exec: echo beside >> done, depends_on: deaf}
  tidy: {exec: 'echo tidy >> done; test -e tidied || { touch tidied; sleep 600; }', idempotent: true}
  once: {exec: echo once >> done}
""")
    done = tmp_path / "done"
    started = Started(home, str(flow), "--run-id", "r")
    started.wait_until((tmp_path / "asked").exists)
    assert started.kill()
    assert done.read_text().split() == ["once"]
    started = Started(home, "--resume", "r")  # which cleans up, and is killed while it does
    started.wait_until((tmp_path / "tidied").exists)
    assert started.kill()
    ended = finished(home, "--resume", "r")
    assert ended["error"]["code"] == "STEPS_FAILED" and done.read_text().split() == ["once", "tidy", "tidy"]
    statuses = {name: step["status"] for name, step in ended["data"]["steps"].items()}
    assert statuses == {
        "bad": "failed", "deaf": "cancelled", "tidy": "succeeded", "once": "succeeded",
        **dict.fromkeys(("later", "beside"), "skipped"),
    }  # fmt: skip


def test_a_run_of_another_version_is_refused_with_an_envelope(tmp_path: Path) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text("steps: {a: {exec: touch begun; sleep 600, idempotent: true, grace: 0s}}\n")
    started = Started(home, str(flow), "--run-id", "r")
    started.wait_until((tmp_path / "begun").exists)
    assert started.kill()
    for change in (
        "UPDATE steps SET record = json_set(record, '$.status', 'unheard-of')",
        "UPDATE steps SET record = json_set(record, '$.status', 'running')",
        'UPDATE runs SET workflow = \'{"steps": {"a": {"type": "unheard-of"}}}\'',
    ):
        with Store.open(home) as store, store._database.write() as connection:
            connection.execute(change)
        if "running" not in change:
            refused = finished(home, "--resume", "r")
            assert refused["error"]["code"] == "STORE_UNUSABLE" and "another version" in refused["error"]["message"]


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
        assert refused["error"]["suggestion"].startswith("choose another id; if that run has not ended")
    finally:
        process.terminate()
        process.wait(GONE_LIMIT_S)
    assert finished(home, "--resume", "nobody")["error"]["code"] == "RUN_NOT_FOUND"


def test_a_run_that_is_cut_off_while_it_goes_round_comes_back_to_where_it_was(tmp_path: Path) -> None:
    """The step that sent it back is to be judged anew, and what was called for is still called for."""
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    flow.write_text(
        "steps:\n"
        "  fix:\n"
        "    exec: 'echo x >> fixes; test $(wc -l < fixes) != 2 || { touch second; sleep 600; }'\n"
        "    idempotent: true\n"
        "  test: {exec: 'test $(wc -l < fixes) -ge 3', depends_on: fix, on_fail: {goto: fix, run: note}}\n"
        "  note: {exec: 'echo n >> notes', idempotent: true}\n"
        "  after: {exec: echo done, depends_on: test}\n"
    )
    started = Started(home, str(flow), "--run-id", "r")
    started.wait_until((tmp_path / "second").exists)
    assert started.kill()
    envelope = finished(home, "--resume", "r")
    assert envelope["ok"], envelope["error"]
    steps = envelope["data"]["steps"]
    assert {name: each["status"] for name, each in steps.items()} == dict.fromkeys(steps, "succeeded")
    assert steps["test"]["loops"] == 1, "that it was sent back before is not forgotten"
