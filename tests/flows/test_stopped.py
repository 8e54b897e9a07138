"""Runs that are stopped: what their steps had said is kept, and what they declared as clean-up runs."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from tests.flows.conftest import statuses, step

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

Run = Callable[..., Envelope]
WITHIN_S = 30.0


class Program:
    """`shotclock run` in a folder of the test's own, to be sent signals."""

    def __init__(self, folder: Path, text: str) -> None:
        (folder / "flow.yaml").write_text(textwrap.dedent(text))
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shotclock", "run", "flow.yaml", "--run-id", "r"],
            cwd=folder,
            env={**os.environ, "SHOTCLOCK_HOME": str(folder / "home")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def wait_for(self, name: str) -> None:
        give_up_at = time.monotonic() + WITHIN_S
        while not (self.folder / name).exists():
            assert time.monotonic() < give_up_at and self.process.poll() is None, f"{name} is not there"
            time.sleep(0.02)

    def ended(self) -> tuple[int, Any]:
        out, _ = self.process.communicate(timeout=WITHIN_S)
        return self.process.returncode, json.loads(out) if out else None


@pytest.fixture
def started(tmp_path: Path) -> Any:
    programs: list[Program] = []

    def start(text: str) -> Program:
        programs.append(Program(tmp_path, text))
        return programs[-1]

    yield start
    for program in programs:
        if program.process.poll() is None:
            program.process.kill()
        program.process.communicate(timeout=WITHIN_S)


# --- what is kept -------------------------------------------------------------------------------------------------


def test_what_a_step_said_before_a_signal_stopped_it_is_kept(
    started: Any, validate_envelope: Callable[[Any], Any]
) -> None:
    program = started("steps: {talks: {exec: 'echo half; echo complaint >&2; touch up; sleep 60', grace: 100ms}}")
    program.wait_for("up")
    program.process.send_signal(signal.SIGINT)
    code, envelope = program.ended()
    validate_envelope(envelope)
    assert code == 130 and envelope["error"]["code"] == "CANCELLED"
    talks = envelope["data"]["steps"]["talks"]
    assert (talks["status"], talks["output"], talks["ending"]) == ("cancelled", "half", "killed"), talks
    assert talks["error"]["code"] == "CANCELLED" and talks["error"]["context"]["rule"] == "command/cancelled"
    assert "complaint" in talks["error"]["context"]["stderr"]


def test_what_steps_of_every_kind_said_before_fail_fast_stopped_them_is_kept(run: Run, tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(
        "steps:\n  done: {exec: echo inner}\n  talks: {exec: 'echo deep; touch up3; sleep 60', grace: 0}\n"
    )
    (tmp_path / "st.py").write_text(
        "import time\nfrom pathlib import Path\nfrom shotclock import App\napp = App('st', default_timeout='1m')\n"
        "@app.command(mutates=False)\ndef hang(file: str) -> None:\n    Path(file).touch()\n    time.sleep(60)\n"
    )
    envelope = run(f"""
        fail_fast: true
        steps:
          one: {{exec: 'echo one; touch up1; sleep 60', grace: 0}}
          each:
            exec: 'echo "item {{{{ item }}}}"; touch up2{{{{ item }}}}; [ {{{{ item }}}} = a ] || sleep 60'
            for_each: [a, b]
            grace: 0
          inside: {{type: workflow, workflow: inner.yaml}}
          calls:
            type: function
            target: "{tmp_path}/st.py:app"
            command: hang
            arguments: {{file: "{tmp_path}/up4"}}
            grace: 0
          breaks:
            exec: |
              for name in up1 up2a up2b up3 up4; do
                while [ ! -e $name ]; do sleep 0.05; done
              done
              sleep 0.3
              exit 1
    """)
    assert statuses(envelope) == {
        "one": "cancelled",
        "each": "cancelled",
        "inside": "cancelled",
        "calls": "cancelled",
        "breaks": "failed",
    }
    assert (step(envelope, "one")["output"], step(envelope, "one")["ending"]) == ("one", "killed")
    assert (step(envelope, "each")["output"], step(envelope, "each")["ending"]) == (["item a", "item b"], "killed")
    inside = step(envelope, "inside")
    assert inside["output"] == {"done": "inner", "talks": "deep"} and inside["ending"] == "killed", inside
    assert step(envelope, "calls")["ending"] == "killed"
    assert {step(envelope, name)["error"]["code"] for name in ("one", "each", "inside", "calls")} == {"CANCELLED"}


# --- clean-up -----------------------------------------------------------------------------------------------------


def test_clean_up_of_the_step_that_failed_and_of_those_that_were_stopped_for_it_runs_under_fail_fast(
    run: Run, tmp_path: Path
) -> None:
    envelope = run("""
        fail_fast: true
        steps:
          breaks: {exec: 'while [ ! -e up ]; do sleep 0.05; done; exit 1', on_fail: {run: down}}
          beside: {exec: 'touch up; sleep 60', grace: 0, on_fail: {run: [unlock, down]}}
          later: {exec: touch later, depends_on: beside}
          down: {exec: 'echo down >> cleaned'}
          unlock: {exec: 'sleep 0.2; echo unlock >> cleaned'}
          uncalled: {exec: touch uncalled}
          well: {exec: exit 0, depends_on: later, on_fail: {run: uncalled}}
    """)
    assert statuses(envelope) == {
        "breaks": "failed",
        "beside": "cancelled",
        "later": "skipped",
        "down": "succeeded",
        "unlock": "succeeded",
        "uncalled": "skipped",
        "well": "skipped",
    }
    assert sorted((tmp_path / "cleaned").read_text().split()) == ["down", "unlock"], "each once"
    assert (envelope.code, envelope.exit_code) == ("STEPS_FAILED", 3)


CLEANED = """
    name: guarded
    steps:
      work: {exec: 'touch lock up; sleep 60', grace: 100ms, on_fail: {run: unlock}}
      after: {exec: touch after, depends_on: work}
      unlock: {exec: 'rm lock; touch unlocking; sleep 0.5; echo gone', timeout: 20s}
"""


def test_clean_up_runs_when_a_signal_stops_the_run(
    started: Any, tmp_path: Path, validate_envelope: Callable[[Any], Any]
) -> None:
    program = started(CLEANED)
    program.wait_for("up")
    program.process.send_signal(signal.SIGTERM)
    code, envelope = program.ended()
    validate_envelope(envelope)
    assert code == 143 and envelope["error"]["code"] == "CANCELLED"
    steps = envelope["data"]["steps"]
    assert {name: each["status"] for name, each in steps.items()} == {
        "work": "cancelled",
        "after": "skipped",
        "unlock": "succeeded",
    }
    assert steps["unlock"]["output"] == "gone" and not (tmp_path / "lock").exists()


def test_a_second_signal_does_not_wait_for_clean_up_and_is_answered(started: Any, validate_envelope: Any) -> None:
    program = started(CLEANED.replace("sleep 0.5", "sleep 15"))
    program.wait_for("up")
    program.process.send_signal(signal.SIGINT)
    program.wait_for("unlocking")
    time.sleep(0.3)  # two at once are one wish
    began = time.monotonic()
    program.process.send_signal(signal.SIGINT)
    code, envelope = program.ended()
    assert code == 130 and time.monotonic() - began < 5
    validate_envelope(envelope)
    assert (envelope["error"]["code"], envelope["meta"]["side_effects"]) == ("CANCELLED", "unknown")
    assert (envelope["data"]["run_id"], envelope["data"]["continue_command"]) == ("r", "shotclock run --resume r")


def test_clean_up_that_hangs_is_stopped_by_its_own_clock_after_a_signal(started: Any) -> None:
    program = started(CLEANED.replace("sleep 0.5", "sleep 60").replace("timeout: 20s", "timeout: 1s, grace: 0"))
    program.wait_for("up")
    program.process.send_signal(signal.SIGTERM)
    code, envelope = program.ended()
    assert code == 143
    unlock = envelope["data"]["steps"]["unlock"]
    assert unlock["status"] == "timed_out" and unlock["error"]["context"]["clock"]["limit_ms"] == 1000


def test_the_clean_up_of_a_run_inside_runs_when_the_one_around_it_is_stopped(started: Any, tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(textwrap.dedent(CLEANED))
    program = started("steps: {inside: {type: workflow, workflow: inner.yaml}}")
    program.wait_for("up")
    program.process.send_signal(signal.SIGTERM)
    code, envelope = program.ended()
    assert code == 143 and not (tmp_path / "lock").exists()
    assert envelope["data"]["steps"]["inside"]["output"]["unlock"] == "gone"


def test_clean_up_has_the_time_that_it_declares_when_the_clock_of_the_run_rang(run: Run, tmp_path: Path) -> None:
    began = time.monotonic()
    envelope = run("""
        timeout: 8s
        steps:
          work: {exec: 'touch lock; sleep 60', grace: 0, on_fail: {run: unlock}}
          after: {exec: touch after, depends_on: work}
          unlock: {exec: 'sleep 2; rm lock; echo gone', timeout: 3s, grace: 0}
    """)
    took_s = time.monotonic() - began
    assert statuses(envelope) == {"work": "timed_out", "after": "skipped", "unlock": "succeeded"}, envelope
    assert step(envelope, "unlock")["output"] == "gone" and not (tmp_path / "lock").exists()
    assert (envelope.code, envelope.exit_code) == ("TIMEOUT", 10)
    assert envelope.error is not None
    kept = re.fullmatch(
        r"the run did not end within 8s, of which (3(?:\.\d+)?)s were kept for clean-up", envelope.error["message"]
    )
    assert kept is not None, envelope.error
    clock = step(envelope, "work")["error"]["context"]["clock"]
    assert (clock["limit_ms"], clock["kept_ms"]) == (8000, round(float(kept[1]) * 1000)) and kept[0] in step(
        envelope, "work"
    )["error"]["message"]
    assert step(envelope, "work")["duration_ms"] >= 4000 and took_s < 8 + 6


def test_a_workflow_inside_says_how_much_of_its_time_was_kept_for_clean_up(run: Run, tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text("""
        steps:
          work: {exec: 'sleep 60', grace: 0, on_fail: {run: tidy}}
          tidy: {exec: 'true', timeout: 1s, grace: 0}
    """)
    envelope = run("steps: {inside: {type: workflow, workflow: inner.yaml, timeout: 3s, grace: 0}}")
    error = step(envelope, "inside")["error"]
    assert re.fullmatch(
        r"Workflow timed out after 3 seconds, of which 1(\.\d+)?s were kept for clean-up", error["message"]
    )


def test_clean_up_that_declares_no_time_has_a_tenth_of_the_run_s(run: Run, tmp_path: Path) -> None:
    envelope = run("""
        timeout: 10s
        steps:
          work: {exec: 'touch lock; sleep 60', grace: 0, on_fail: {run: unlock}}
          unlock: {exec: 'rm lock; sleep 60', grace: 0}
    """)
    assert statuses(envelope) == {"work": "timed_out", "unlock": "timed_out"}
    assert 500 <= step(envelope, "unlock")["duration_ms"] <= 4000 and not (tmp_path / "lock").exists()
    assert step(envelope, "work")["duration_ms"] >= 8000, "no more than that is kept back"
    assert envelope.code == "TIMEOUT"
