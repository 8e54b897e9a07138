"""`shotclock logs`: the output of steps, during a run from other terminals, after its end, and after `kill -9`."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

FOLLOW_LIMIT_S = 30.0  # runs here take two or three seconds
LAG_LIMIT_S = 2.0  # 0.15 s on a quiet machine
FLOW = """\
steps:
  warn: {exec: "echo WARNING >&2; echo fine"}
  flaky: {exec: "echo out; exit 1", on_fail: {retry: {max: 1}}}
  each: {exec: "echo item {{ item }}", for_each: [a, b]}
  nested: {type: workflow, workflow: inner.yaml}
  silent: {exec: "true"}
  late: {exec: "true", depends_on: flaky}
"""
Logs = Callable[..., Any]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "inner.yaml").write_text("steps: {part: {exec: echo inside}}")
    return {"SHOTCLOCK_HOME": str(tmp_path / "home")}


@contextlib.contextmanager
def started(tmp_path: Path, env: dict[str, str], flow: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run with the id `one`, which is killed at the end if it has not ended."""
    (tmp_path / "flow.yaml").write_text(flow)
    words = [*SHOTCLOCK, "run", str(tmp_path / "flow.yaml"), "--run-id", "one"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, env={**os.environ, **env}, stdin=quiet, stdout=quiet, stderr=quiet) as running:
        try:
            wait_for(lambda: list((tmp_path / "home" / "logs" / "one").glob("*")), "output")
            yield running
        finally:
            running.kill()


def follow(env: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SHOTCLOCK, "logs", "one", "-f", *words],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_after_its_end_every_line_of_every_try_is_there(shotclock: Logs, env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW)
    assert shotclock("run", tmp_path / "flow.yaml", "--run-id", "one", env=env).code == 3
    answer = shotclock("logs", "one", env=env).json()
    found = {
        (log["step"], log["try"]): [(line["stream"], line["text"]) for line in log["lines"]]
        for log in answer["data"]["logs"]
    }
    assert sorted(found.pop(("warn", 1))) == [("stderr", "WARNING"), ("stdout", "fine")]
    assert found == {
        ("flaky", 1): [("stdout", "out")],
        ("flaky", 2): [("stdout", "out")],
        ("each[0]", 1): [("stdout", "item a")],
        ("each[1]", 1): [("stdout", "item b")],
        ("nested.part", 1): [("stdout", "inside")],
    }
    assert answer["data"]["terminal"] and answer["data"]["run_id"] == "one"

    text = shotclock("logs", "one", "-f", env=env).stdout.decode()
    assert {"flaky | out", "flaky (attempt 2) | out", "each[1] | item b", "nested.part | inside"} <= set(
        text.splitlines()
    )
    assert shotclock("logs", "one", "flaky", "--attempt", "2", "-f", env=env).stdout == b"out\n"
    assert sorted(shotclock("logs", "one", "each", "-f", env=env).stdout.splitlines()) == [
        b"each[0] | item a",
        b"each[1] | item b",
    ]
    assert shotclock("logs", "one", "nested", "-f", env=env).stdout == b"nested.part | inside\n"
    assert (
        "step silent has printed nothing"
        in shotclock("logs", "one", "silent", "--format", "text", env=env).stderr.decode()
    )

    for words, expected in (
        (["two"], "there is no run 'two'"),
        (["one", "nope"], "no step 'nope'"),
        (["one", "late"], "step late was skipped"),
        (["one", "flaky", "--attempt", "9"], "has no attempt 9, only 2"),
        (["one", "--attempt", "0"], "1 or more"),
        (["one", "each[9]"], "there is no each[9]: each has 2 items, from each[0] on"),
        (["one", "each[x]"], "there is no each[x]"),
        (["one", "warn[0]"], "warn has no items"),
    ):
        refused = shotclock("logs", *words, env=env)
        assert refused.code in (2, 5) and expected in str(refused.json()["error"]), (words, refused.json())
    shotclock("run", "--rerun-failed", "one", "--run-id", "rerun", env=env)
    kept = shotclock("logs", "rerun", "each[1]", env=env).json()["data"]
    assert kept["none"] == "step each[1] was kept from run one: see `shotclock logs one 'each[1]'`"
    pruned = shotclock("prune", "--keep", "1", "--max-size", "1B", env=env).json()
    assert pruned["data"]["deleted"]["logs"] == 3  # also those of the nested run
    assert shotclock("logs", "one", env=env).json()["error"]["code"] == "RUN_NOT_FOUND"


def test_two_terminals_follow_a_run_and_lag_little_behind(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "clock.py").write_text("import time\nfor n in range(4): print(n, time.time()); time.sleep(0.4)\n")
    clock = f"{sys.executable} -u clock.py"
    with started(tmp_path, env, f"steps: {{a: {{exec: {clock}}}, b: {{exec: printf unfinished; sleep 2}}}}"):
        with follow(env, "a") as one, follow(env) as all_of_it:
            assert one.stdout is not None and all_of_it.stdout is not None
            lags = [time.time() - float(line.split()[1]) for line in one.stdout]
            text = all_of_it.stdout.read()
    assert one.returncode == all_of_it.returncode == 0
    assert len(lags) == 4 and max(lags[2:]) < LAG_LIMIT_S, lags
    assert "b | unfinished\n" in text and text.count("a | ") == 4


def test_the_log_outlives_kill_9_and_the_resumed_run_adds_its_own_try(
    shotclock: Logs, env: dict[str, str], tmp_path: Path
) -> None:
    second = "[ $(wc -l < ran) = 2 ]"
    script = f"echo once >> ran; echo try $(wc -l < ran); {second} || sleep 60"
    flow = f"steps: {{a: {{idempotent: true, exec: '{script}'}}}}"
    with started(tmp_path, env, flow) as running, follow(env) as following:
        assert following.stdout is not None and following.stdout.readline() == "a | try 1\n"
        os.kill(running.pid, signal.SIGKILL)
        assert following.wait(FOLLOW_LIMIT_S) == 0  # a run without a process prints nothing more
    assert shotclock("run", "--resume", "one", env=env).code == 0
    assert shotclock("logs", "one", "-f", env=env).stdout == b"a | try 1\na (attempt 2) | try 2\n"
