"""What is said to work that runs in another process: overtime from inside, more time and stops from outside."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.store.store import Store
from tests.command_line import SHOTCLOCK, Running, wait_for

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

# What a command line or a run takes on a busy machine.
WITHIN_S = 60.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "home"


@pytest.fixture
def run_flow(start: Callable[..., Running], tmp_path: Path, home: Path) -> Iterator[Callable[..., Running]]:
    def run_flow(text: str, *words: str) -> Running:
        (tmp_path / "flow.yaml").write_text(textwrap.dedent(text))
        return start("run", tmp_path / "flow.yaml", "--run-id", "r", *words)

    return run_flow


def say(*words: str) -> tuple[int, dict[str, Any]]:
    ran = subprocess.run([*SHOTCLOCK, *words], capture_output=True, timeout=WITHIN_S, stdin=subprocess.DEVNULL)
    envelope = json.loads(ran.stdout)
    assert ran.returncode == envelope["meta"]["exit_code"]
    return ran.returncode, envelope


def wait_for_file(path: Path) -> None:
    wait_for(path.exists, path.name, WITHIN_S)


def test_a_command_asks_for_overtime_and_its_step_ends_in_it(run_flow: Any) -> None:
    running = run_flow("""
        steps:
          slow:
            exec: |
              shotclock overtime --by 10s --reason "one more table" > asked.json
              sleep 5; cat asked.json
            timeout: 30
            soft: 4
            overtime: {observer: none, budget: 20s}
    """)
    assert running.ends(WITHIN_S) == 0, running.stdout
    [step] = running.envelope()["data"]["steps"].values()
    assert step["output"]["data"]["granted_ms"] == 10_000
    [told] = step["overtime"]
    assert (told["event"], told["asked_by"], told["verdict"]) == ("overtime", "call", "granted")
    assert "◔ slow 10s of overtime" in running.stderr.decode()


def test_overtime_that_is_declined_is_an_exit_code_of_its_own(run_flow: Any, tmp_path: Path) -> None:
    (tmp_path / "decide.sh").write_text('#!/bin/sh\necho \'{"decline": true, "reason": "enough"}\'\n')
    (tmp_path / "decide.sh").chmod(0o700)
    running = run_flow(f"""
        steps:
          slow:
            exec: 'shotclock overtime --by 20s --reason why || echo "code $?"'
            timeout: 60
            overtime: {{observer: command, command: {tmp_path}/decide.sh, budget: 20s}}
    """)
    assert running.ends(WITHIN_S) == 0, running.stdout
    [step] = running.envelope()["data"]["steps"].values()
    assert "OVERTIME_DECLINED" in step["output"] and "overtime was declined: enough" in step["output"]
    assert step["output"].endswith("code 4")
    assert [told["verdict"] for told in step["overtime"]] == ["declined"]


def test_outside_of_a_call_there_is_nobody_to_ask(home: Path) -> None:
    code, envelope = say("overtime", "--by", "30s", "--reason", "why not")
    assert (code, envelope["error"]["code"]) == (4, "NOT_EXTENDABLE")
    assert "SHOTCLOCK_OVERTIME is not set" in envelope["error"]["message"]
    code, envelope = say("overtime", "--reason", " ")
    assert code == 2 and {error["field"] for error in envelope["error"]["errors"]} == {"by", "reason"}


def test_an_operator_extends_a_step_past_its_timeout(run_flow: Any, home: Path, tmp_path: Path) -> None:
    running = run_flow(
        "steps: {slow: {exec: 'touch up; while [ ! -e go ]; do sleep 0.1; done; echo done', timeout: 8}}"
    )
    wait_for_file(tmp_path / "up")
    code, envelope = say("job", "extend", "r", "60s", "--step", "slow")
    assert code == 0, envelope
    [extended] = envelope["data"]["extended"]
    assert (extended["name"], extended["granted_ms"], extended["timeout_ms"]) == ("step slow", 60_000, 68_000)
    code, envelope = say("job", "extend", "r", "5s", "--step", "nosuch")
    assert code == 5 and "step 'nosuch' of 'r' is not running now" in envelope["error"]["message"]
    with Store.open(home) as store:
        record = store.runs.steps("r")["slow"].record
        assert record["timeout_ms"] == 68_000 and record["overtime"][0]["granted_ms"] == 60_000
    (tmp_path / "go").touch()
    assert running.ends(WITHIN_S) == 0
    code, envelope = say("job", "extend", "r", "5s", "--step", "slow")
    assert code == 5 and "has ended" in envelope["error"]["message"]


def test_a_run_that_is_given_more_time_gives_it_to_its_steps(run_flow: Any, home: Path, tmp_path: Path) -> None:
    """The step has no limit of its own but a later one than the run's: it follows the run."""
    running = run_flow(
        """
        timeout: 6
        steps:
          slow: {exec: 'touch up; while [ ! -e go ]; do sleep 0.1; done; sleep 7', timeout: 120}
          next: {exec: 'echo $SHOTCLOCK_REMAINING_MS', depends_on: [slow]}
    """,
        "--force",
    )
    wait_for_file(tmp_path / "up")
    code, envelope = say("job", "extend", "r", "60s")
    assert code == 0 and envelope["data"]["extended"][0]["timeout_ms"] == 66_000, envelope
    (tmp_path / "go").touch()
    with Store.open(home) as store:
        run = store.runs.get("r")
        assert run is not None and run.deadline_at is not None
        assert abs(run.deadline_at.since_ms(run.created_at) - 66_000) < 100
    assert running.ends(WITHIN_S) == 0, running.stdout
    assert int(running.envelope()["data"]["steps"]["next"]["output"]) > 6000


def test_a_run_is_wound_down_with_what_its_steps_have_so_far(run_flow: Any, tmp_path: Path) -> None:
    running = run_flow("""
        steps:
          kept: {exec: 'trap "echo part; exit 0" TERM; touch up; sleep 60 & wait', timeout: 90}
          never: {exec: echo never, depends_on: [kept]}
    """)
    wait_for_file(tmp_path / "up")
    code, envelope = say("job", "stop", "r", "--reason", "enough")
    assert code == 0 and envelope["data"]["stopping"][0]["name"] == "run flow", envelope
    assert running.ends(WITHIN_S) == 143
    answer = running.envelope()
    assert answer["meta"]["partial"] is True
    assert answer["data"]["steps"]["kept"]["output"] == "part"
    assert answer["data"]["steps"]["never"]["reason"] == "run_ended"
    [told] = answer["data"]["steps"]["kept"]["overtime"]
    assert told["event"] == "wind_down"


def test_one_step_is_wound_down_and_the_others_go_on(run_flow: Any, tmp_path: Path) -> None:
    running = run_flow("""
        steps:
          one: {exec: 'trap "echo part; exit 0" TERM; touch up1; sleep 60 & wait', timeout: 90}
          two: {exec: 'touch up2; while [ ! -e go ]; do sleep 0.1; done; echo whole', timeout: 90}
    """)
    wait_for_file(tmp_path / "up1")
    wait_for_file(tmp_path / "up2")
    assert say("job", "stop", "r", "--step", "one")[0] == 0
    (tmp_path / "go").touch()
    assert running.ends(WITHIN_S) == 0, running.stdout
    steps = running.envelope()["data"]["steps"]
    assert (steps["one"]["output"], steps["two"]["output"]) == ("part", "whole")
    assert "overtime" not in steps["two"]


def test_mistakes_are_said_all_at_once(home: Path) -> None:
    for words, fields in {
        ("job", "extend", "r", "5"): {"by"},
        ("job", "extend", "r", "soon", "--step", "step", "--force"): {"by", "--force"},
        ("job", "extend", "r"): {"by"},
        ("job", "stop"): {"job-id"},
    }.items():
        code, envelope = say(*words)
        assert code == 2 and {error["field"] for error in envelope["error"]["errors"]} == fields, (words, envelope)
    code, envelope = say("job", "stop", "nosuch")
    assert (code, envelope["error"]["code"]) == (5, "JOB_NOT_FOUND")


def test_events_and_report_tell_of_what_was_decided(run_flow: Any, tmp_path: Path) -> None:
    events = tmp_path / "events"
    running = run_flow(
        "steps: {slow: {exec: 'trap \"exit 0\" TERM; sleep 60 & wait', timeout: 60, soft: 1, wind_down: 9}}",
        "--events",
        str(events),
    )
    assert running.ends(WITHIN_S) == 0
    told = [json.loads(line) for line in events.read_text().splitlines()]
    [wind_down] = [line for line in told if line["event"] == "wind_down"]
    assert (wind_down["id"], wind_down["by"], wind_down["within_ms"]) == ("slow", "soft clock", 9000)
    _, envelope = say("report", "r", "--html", str(tmp_path / "r.html"))
    assert envelope["data"]["steps"][0]["overtime"][0]["event"] == "wind_down"
    page = (tmp_path / "r.html").read_text()
    assert "winds down within 9s: the soft limit of 1s rang" in page and "◔ wound down" in page


JOB = """
import time
from shotclock import App, Context

app = App("tool")

@app.command(timeout="8s", interruption=True)
def work(ctx: Context) -> str:
    ctx.keep({"half": True})
    open("up", "w").close()
    while not ctx.stopping:
        time.sleep(0.05)
    return "wound down"

app()
"""


def test_a_job_is_extended_and_stopped_gracefully(tmp_path: Path, home: Path) -> None:
    (tmp_path / "tool.py").write_text(JOB)
    words = [sys.executable, "tool.py", "work", "--budget", "100ms"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=WITHIN_S, stdin=subprocess.DEVNULL)
    assert ran.returncode == 14, ran
    job_id = json.loads(ran.stdout)["data"]["job_id"]
    wait_for_file(tmp_path / "up")
    code, envelope = say("job", "extend", job_id, "60s")
    assert code == 0 and envelope["data"]["extended"][0]["timeout_ms"] == 68_000, envelope
    code, envelope = say("job", "stop", job_id, "--within", "20s")
    assert code == 0 and envelope["data"]["stopping"][0]["winding_down"]["remaining_ms"] <= 20_000, envelope
    code, envelope = say("job", "wait", job_id, "--budget", "30s")
    assert code == 0 and envelope["data"] == {"result": "wound down"}, envelope
    assert [notice["code"] for notice in envelope["warnings"]] == ["WOUND_DOWN"]
    assert len(envelope["meta"]["overtime"]["requests"]) == 1
    code, envelope = say("job", "extend", job_id, "60s")
    assert code == 5 and "has ended" in envelope["error"]["message"]


APP = """
import json, subprocess, time
from shotclock import App

app = App("tool")

@app.command(timeout="60s", soft="40s", overtime={"observer": "none", "budget": "20s"})
def work() -> dict:
    asked = subprocess.run(["shotclock", "overtime", "--by", "5s", "--reason", "r"], capture_output=True, text=True)
    return json.loads(asked.stdout)["data"]

app()
"""


def test_what_a_function_starts_asks_for_overtime_for_its_call(tmp_path: Path, home: Path) -> None:
    (tmp_path / "tool.py").write_text(APP)
    words = [sys.executable, "tool.py", "work"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=WITHIN_S, stdin=subprocess.DEVNULL)
    envelope = json.loads(ran.stdout)
    assert envelope["data"]["granted_ms"] == 5000, envelope
    assert envelope["meta"]["overtime"]["granted_ms"] == 5000
    assert list((home / "control").iterdir()) == []
