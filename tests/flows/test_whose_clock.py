"""Whose clock stopped a step: told by the deadline itself, never by the words in somebody's answer."""

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.limits import Deadline
from shotclock.store.store import Store
from shotclock.supervise.clock import monotonic_ns
from tests.flows.conftest import step

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

Run = Callable[..., Envelope]

APP = """
    import time
    from shotclock import App, Failure

    app = App("st", default_timeout="1m")

    @app.command(mutates=False)
    def evaluate() -> str:
        time.sleep(60)
        return "never"

    @app.command(mutates=False)
    def claim(owner: str) -> str:
        clock = {"kind": "timeout", "owner": owner, "limit_ms": 1, "elapsed_ms": 1}
        raise Failure("TIMEOUT", "somebody's words", context={"clock": clock})
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "st.py").write_text(textwrap.dedent(APP))
    return tmp_path / "st.py"


def test_a_step_that_times_out_inside_a_shotclock_mcp_server_is_a_failed_step_and_not_the_end_of_the_run(
    run: Run, app: Path
) -> None:
    envelope = run(f"""
        timeout: 5m
        steps:
          hang:
            type: mcp
            command: {sys.executable}
            args: [-m, shotclock, serve, "{app}:app", --operation-timeout, 1m]
            method: evaluate
            timeout: 10
            env: {{PYTHONPATH: "{os.pathsep.join(sys.path)}"}}
          slow: {{exec: "sleep 1; echo finished"}}
    """)
    hang = step(envelope, "hang")
    assert hang["status"] == "timed_out" and hang["error"]["code"] == "TIMEOUT", hang
    assert hang["error"]["message"] == "MCP tool call timed out after 10 seconds"
    assert hang["error"]["context"]["rule"] == "mcp/timeout"
    clock = hang["error"]["context"]["clock"]
    assert (clock["owner"], clock["limit_ms"]) == ("step hang", 10_000) and clock["elapsed_ms"] >= 8000
    assert step(envelope, "slow")["output"] == "finished"
    assert (envelope.code, envelope.exit_code) == ("STEPS_FAILED", 3), envelope.error


def test_what_a_command_says_of_a_clock_is_no_clock_of_the_run(run: Run, app: Path) -> None:
    owners = {"one": "caller", "two": "run flow", "three": "step three"}
    says = "type: function, target: '{app}:app', command: claim, arguments: {{owner: {owner}}}"
    steps = "".join(f"  {name}: {{{says.format(app=app, owner=owner)}}}\n" for name, owner in owners.items())
    envelope = run(f"timeout: 1m\nsteps:\n{steps}")
    assert {step(envelope, name)["status"] for name in owners} == {"timed_out"}
    assert (envelope.code, envelope.exit_code) == ("STEPS_FAILED", 3), envelope.error


def test_the_clock_of_a_run_inside_is_not_that_of_the_run_around_it_though_both_are_called_the_same(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "inner.yaml").write_text("name: nightly\ntimeout: 1s\nsteps: {hang: {exec: sleep 60, grace: 0}}\n")
    envelope = run("""
        name: nightly
        timeout: 1m
        steps:
          inside: {type: workflow, workflow: inner.yaml}
    """)
    assert step(envelope, "inside")["status"] == "timed_out"
    assert "did not end within 1s" in step(envelope, "inside")["error"]["message"]
    assert (envelope.code, envelope.exit_code) == ("STEPS_FAILED", 3), envelope.error


@pytest.mark.parametrize("inside", [False, True])
def test_a_run_whose_own_clock_rang_says_so_whatever_kind_of_step_it_stopped(
    run: Run, app: Path, store: Store, tmp_path: Path, inside: bool
) -> None:
    kinds = {
        "command": "exec: sleep 60",
        "function": f'type: function, target: "{app}:app", command: evaluate',
        "gated": "exec: echo no, approval: true",
        "asks": "type: human-input, prompt: Well?",
    }
    for kind, written in kinds.items():
        if inside and kind not in ("command", "asks"):
            continue
        text = f"timeout: 2s\nsteps:\n  it: {{{written}, grace: 0}}\n"
        (tmp_path / f"{kind}.yaml").write_text(text)
        if inside:
            text = f"timeout: 2s\nsteps:\n  it: {{type: workflow, workflow: {kind}.yaml}}\n"
        envelope = run(text, run_id=kind)
        known = store.runs.get(kind)
        assert known is not None and known.deadline_at is not None
        assert known.deadline_at.since_ms(known.created_at) == 2000, "to the millisecond, for whoever goes on with it"
        assert (envelope.code, envelope.exit_code) == ("TIMEOUT", 10), (kind, envelope)
        assert envelope.error is not None and envelope.error["message"] == "the run did not end within 2s", kind


@pytest.mark.parametrize("limit", ["file", "caller"])
def test_a_run_that_its_clock_cut_short_is_a_timeout_though_the_stopped_step_may_fail_and_nothing_starts_after(
    run: Run, tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == "caller":
        monkeypatch.setenv("SHOTCLOCK_REMAINING_MS", "2000")
    envelope = run(f"""
        timeout: {"2s" if limit == "file" else "1m"}
        max_parallelism: 2
        steps:
          hang: {{exec: sleep 60, grace: 0, continue_on_failure: true, on_fail: {{retry: {{max: 3}}}}}}
          items:
            for_each: [1, 2, 3, 4]
            exec: "echo {{{{ item }}}} >> items; sleep 60"
            grace: 0
            continue_on_failure: true
          behind: {{exec: touch behind, depends_on: hang}}
          later: {{exec: touch later}}
    """)
    assert (envelope.code, envelope.exit_code, envelope.ending) == ("TIMEOUT", 10, "killed"), envelope
    assert step(envelope, "hang")["status"] == "timed_out" and step(envelope, "hang")["attempts"] == 1
    for name in ("behind", "later"):
        assert (step(envelope, name)["status"], step(envelope, name).get("reason")) == ("skipped", "run_ended"), name
        assert not (tmp_path / name).exists()
    assert step(envelope, "items")["status"] == "timed_out"
    assert (tmp_path / "items").read_text() == "1\n", "the other items had no slot before the clock rang"


def test_a_step_that_runs_a_file_is_a_timeout_where_its_clock_stopped_what_may_fail_in_it(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "inner.yaml").write_text(
        "steps:\n  hang: {exec: sleep 60, grace: 0, continue_on_failure: true}\n"
        "  behind: {exec: touch behind, depends_on: hang}\n"
    )
    envelope = run("steps: {inside: {type: workflow, workflow: inner.yaml, timeout: 2s}}")
    assert step(envelope, "inside")["status"] == "timed_out", step(envelope, "inside")
    assert (envelope.code, envelope.exit_code) == ("STEPS_FAILED", 3), envelope.error
    assert not (tmp_path / "behind").exists()


def test_a_run_that_its_clock_cut_short_cleans_up_and_goes_back_nowhere(run: Run, tmp_path: Path) -> None:
    envelope = run("""
        timeout: 4s
        steps:
          first: {exec: echo ran >> first}
          hang:
            exec: sleep 60
            grace: 0
            depends_on: first
            continue_on_failure: true
            on_fail: {goto: first, run: [tidy]}
          tidy: {exec: touch tidied, timeout: 2s}
    """)
    assert (envelope.code, envelope.exit_code) == ("TIMEOUT", 10), envelope
    assert (tmp_path / "tidied").exists() and (tmp_path / "first").read_text() == "ran\n"
    assert [step(envelope, name)["status"] for name in ("first", "hang", "tidy")] == [
        "succeeded",
        "timed_out",
        "succeeded",
    ]


def test_a_run_whose_clock_rang_while_its_outputs_were_made_says_so(run: Run) -> None:
    envelope = run(f'timeout: 1500ms\nsteps: {{it: {{exec: echo hi}}}}\noutputs: {{o: "{ENDLESS}"}}\n')
    assert (envelope.code, envelope.exit_code) == ("TIMEOUT", 10), envelope
    assert step(envelope, "it")["status"] == "succeeded"


def test_a_run_inside_names_the_time_that_its_step_has_and_not_that_less_the_reserve(
    run: Run, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "inner.yaml").write_text("steps: {hang: {exec: sleep 60, grace: 0}}\n")
    envelope = run("steps: {inside: {type: workflow, workflow: inner.yaml, timeout: 2s}}", run_id="r")
    assert step(envelope, "inside")["error"]["message"] == "Workflow timed out after 2 seconds"
    inner = store.runs.get("r.inside")
    assert inner is not None and inner.envelope is not None
    error: Any = inner.envelope["error"]
    assert error["message"] == "the run did not end within the 2s that step inside left it"
    assert error["context"]["clock"]["limit_ms"] == 2000


def test_a_run_that_its_caller_gave_little_time_names_what_the_caller_gave(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_REMAINING_MS", "3000")
    monkeypatch.setenv("SHOTCLOCK_DEADLINE_NS", str(Deadline.after_ms(monotonic_ns(), 3000).at_ns))
    envelope = run("timeout: 1m\nsteps: {hang: {exec: sleep 60, grace: 0}}")
    error: Any = envelope.error
    assert envelope.code == "TIMEOUT" and "that its caller left it" in error["message"], error
    limit_ms = error["context"]["clock"]["limit_ms"]
    assert 2400 <= limit_ms <= 3000, "what it gave, not what was left of it after the reserve"


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SLOW_PATTERN = '{pattern: "^(a|a)*b$"}'


@pytest.mark.parametrize(
    "written",
    [
        f'exec: "echo {ENDLESS}"',
        f"exec: printf %060d 0 | tr 0 a, output_schema: {SLOW_PATTERN}",
    ],
)
def test_a_run_whose_own_clock_stopped_a_template_says_so(run: Run, written: str) -> None:
    envelope = run(f"timeout: 1500ms\nsteps:\n  it: {{{written}}}\n")
    assert (envelope.code, envelope.exit_code) == ("TIMEOUT", 10), (step(envelope, "it"), envelope.error)
    assert envelope.error is not None and envelope.error["message"] == "the run did not end within 1.5s"
    assert envelope.error["context"]["clock"]["owner"] == "run flow"  # type: ignore[index]
    assert step(envelope, "it")["error"]["context"]["clock"]["kind"] == "timeout"


def test_a_template_that_its_own_clock_stopped_is_not_the_end_of_the_run(run: Run) -> None:
    envelope = run(f"""
        timeout: 1m
        steps:
          it: {{exec: echo hi, timeout: 500ms, transform: "{ENDLESS}"}}
    """)
    assert (envelope.code, envelope.exit_code) == ("STEPS_FAILED", 3), envelope.error


def test_what_shapes_an_output_has_what_is_left_of_the_steps_timeout(run: Run) -> None:
    envelope = run(f"steps:\n  it: {{exec: printf %060d 0 | tr 0 a, timeout: 2500ms, transform: '{ENDLESS}'}}\n")
    it = step(envelope, "it")
    assert it["status"] == "failed" and it["attempts"] == 1, it
    assert it["error"]["context"]["clock"]["limit_ms"] <= 2500, it["error"]


def test_a_step_that_used_all_its_time_can_still_hand_its_output_on(run: Run) -> None:
    envelope = run("""
        steps:
          first: {exec: "echo {{ 1 + 1 }}"}  # the worker that renders is up after it
          it: {exec: "sleep 2; echo 7", timeout: 2900ms, transform: "{{ output | int + 1 }}", depends_on: first}
    """)
    it = step(envelope, "it")
    assert it["output"] == 8 or it["status"] == "timed_out", it  # the command itself, on a busy machine


@pytest.mark.parametrize(
    "work",
    [
        pytest.param("type: workflow, workflow: inner.yaml", id="workflow"),
        pytest.param("exec: sleep 60, grace: 0, for_each: [1]", id="item"),
    ],
)
def test_a_step_that_its_run_s_clock_stops_names_the_limit_that_was_set(run: Run, tmp_path: Path, work: str) -> None:
    (tmp_path / "inner.yaml").write_text("steps: {a: {exec: sleep 60, grace: 0}}")
    envelope = run(f"name: short\ntimeout: 1s\nsteps: {{a: {{{work}}}}}")
    error = step(envelope, "a")["error"]
    assert error["message"].removeprefix("item 1 of 1 (1): ") == "stopped: the run did not end within 1s"
    assert {name: error["context"]["clock"][name] for name in ("kind", "owner", "limit_ms")} == {
        "kind": "timeout",
        "owner": "run short",
        "limit_ms": 1000,
    }
    assert error["context"]["clock"]["elapsed_ms"] >= 500
    assert envelope.error is not None and envelope.error["message"] == "the run did not end within 1s"
