"""Workflow steps: files that run files, each a run of its own, inside the deadline of the outer one."""

import asyncio
import contextlib
import os
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
from shotclock.flows.check.lint import NESTING_LIMIT
from shotclock.flows.file.loader import load_file
from shotclock.flows.run.runs import RunCaller, RunRequest, start
from shotclock.store.store import Store
from tests.calls.bounds import ROOT, eventually, marked

pytestmark = pytest.mark.usefixtures("no_survivors")

RUN_LIMIT_S = 60


class Flows:
    """A folder of workflow files, and a store."""

    def __init__(self, folder: Path, store: Store, validate: Callable[[dict[str, Any]], Any]) -> None:
        self.folder, self.store, self._validate = folder, store, validate

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def run(self, name: str = "outer.yaml", *, stop_when: Callable[[], Any] | None = None, **more: Any) -> Envelope:
        file = self.folder / name
        loaded = load_file(file)
        assert loaded.workflow is not None, loaded.findings

        async def main() -> Envelope:
            request = RunRequest(loaded.workflow, str(file), self.folder, **{"run_id": "r1", **more})
            stop = asyncio.get_running_loop().create_future()
            running = asyncio.ensure_future(start(request, self.store, RunCaller(stop=stop)))
            async with asyncio.timeout(RUN_LIMIT_S):
                while stop_when is not None and not stop_when():
                    await asyncio.sleep(0.01)
                if stop_when is not None:
                    stop.set_result("SIGTERM")
                return await running

        envelope = asyncio.run(main())
        self._validate(envelope.to_dict())
        return envelope


@pytest.fixture
def flows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_envelope: Any) -> Any:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    (tmp_path / "flows").mkdir()
    with Store.open(tmp_path / "home") as store:
        yield Flows(tmp_path / "flows", store, validate_envelope)


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


def step(envelope: Envelope, name: str) -> dict[str, Any]:
    data: Any = envelope.data
    found: dict[str, Any] = data["steps"][name]
    return found


OUTER = """
    steps:
      inner: {type: workflow, workflow: inner.yaml}
"""


def test_inputs_go_in_and_outputs_come_out(flows: Flows) -> None:
    flows.write(
        "outer.yaml",
        """
        steps:
          word: {exec: "echo hello"}
          inner:
            type: workflow
            workflow: inner.yaml
            depends_on: word
            inputs: {word: "{{ outputs.word }}", times: 2}
          after: {exec: "echo {{ outputs.inner.said }}!", depends_on: inner}
        """,
    )
    flows.write(
        "inner.yaml",
        """
        inputs: {word: {type: string, required: true}, times: {type: integer}}
        outputs: {said: "{{ outputs.say }}"}
        steps:
          say: {exec: "echo {{ inputs.word }} {{ inputs.times }}"}
        """,
    )

    envelope = flows.run()

    assert step(envelope, "inner")["output"] == {"said": "hello 2"}
    assert step(envelope, "after")["output"] == "hello 2!"


def test_without_outputs_those_of_its_steps_are_its_output(flows: Flows) -> None:
    flows.write("outer.yaml", OUTER)
    flows.write("inner.yaml", "steps: {a: {exec: echo 1}, b: {exec: echo two}}")

    assert step(flows.run(), "inner")["output"] == {"a": "1", "b": "two"}


def test_it_is_a_run_of_its_own_in_the_same_store(flows: Flows) -> None:
    flows.write("outer.yaml", OUTER)
    flows.write("inner.yaml", "steps: {a: {exec: echo 1}}")

    flows.run()

    inner = flows.store.runs.get("r1.inner")
    assert inner is not None and inner.envelope is not None
    assert inner.envelope["ok"]
    assert flows.store.runs.steps("r1.inner")["a"].status == "succeeded"
    outer = flows.store.runs.get("r1")
    assert outer is not None
    assert inner.trace_id == outer.trace_id


def test_each_item_and_each_try_is_a_run_of_its_own(flows: Flows) -> None:
    flows.write(
        "outer.yaml",
        """
        steps:
          inner: {type: workflow, workflow: inner.yaml, for_each: [1, 2, 3], inputs: {n: "{{ item }}"}}
          fails: {type: workflow, workflow: bad.yaml, on_fail: {retry: {max: 1, backoff: {delay_ms: 1}}}}
        """,
    )
    flows.write("inner.yaml", 'inputs: {n: {type: any}}\nsteps: {a: {exec: "echo {{ inputs.n }}"}}')
    flows.write("bad.yaml", "steps: {a: {exec: exit 1}}")

    envelope = flows.run()

    assert step(envelope, "inner")["output"] == [{"a": "1"}, {"a": "2"}, {"a": "3"}]
    assert {run.id for run in flows.store.runs.list()} == {
        "r1", "r1.inner", "r1.inner.2", "r1.inner.3", "r1.fails", "r1.fails.2",
    }  # fmt: skip


def test_what_fails_inside_fails_the_step_with_its_run_and_its_steps(flows: Flows) -> None:
    flows.write("outer.yaml", OUTER + "      after: {exec: echo never, depends_on: inner}\n")
    flows.write(
        "inner.yaml", "steps: {good: {exec: echo 1}, bad: {exec: exit 3}, behind: {exec: echo, depends_on: bad}}"
    )

    envelope = flows.run()

    inner = step(envelope, "inner")
    assert inner["status"] == "failed"
    assert inner["error"]["code"] == "STEPS_FAILED"
    assert inner["error"]["context"] == {"run_id": "r1.inner", "failed": ["bad"], "rule": "workflow/failed"}
    assert inner["output"]["good"] == "1"
    assert step(envelope, "after")["reason"] == "dependency_failed"
    assert flows.store.runs.steps("r1.inner")["behind"].status == "skipped"


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("steps: {a: {exce: echo}}", "WORKFLOW_INVALID", "inner.yaml:1:"),
        ("steps: {a: {exec: echo, depends_on: b}}", "WORKFLOW_INVALID", "b"),
        ("inputs: {n: {required: true}}\nsteps: {a: {exec: echo}}", "ARG_ERROR", "n"),
        (None, "FILE_NOT_FOUND", "inner.yaml"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_with_what_is_wrong(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, text: str | None, code: str, words: str
) -> None:
    flows.write("outer.yaml", 'steps: {inner: {type: workflow, workflow: "{{ env.INNER }}.yaml"}}')
    if text is not None:
        flows.write("inner.yaml", text)
    monkeypatch.setenv("INNER", "inner")

    inner = step(flows.run(), "inner")

    assert inner["error"]["code"] == code
    assert words in inner["error"]["message"]
    assert inner["ending"] == "not_started"
    assert inner["error"]["context"]["rule"] == ("workflow/inputs" if code == "ARG_ERROR" else "workflow/invalid")
    if code == "WORKFLOW_INVALID":
        assert inner["error"]["errors"]


def test_a_circle_that_no_linter_could_see_is_refused_by_name(flows: Flows) -> None:
    flows.write("outer.yaml", 'steps: {go: {type: workflow, workflow: "{{ run.name }}.yaml"}}')

    go = step(flows.run(), "go")

    assert go["error"]["code"] == "DEPTH_EXCEEDED"
    assert "outer.yaml → outer.yaml" in go["error"]["message"]
    assert go["error"]["context"]["rule"] == "workflow/depth"


@pytest.mark.slow
def test_a_staircase_of_files_has_an_end(flows: Flows) -> None:
    for number in range(NESTING_LIMIT + 3):
        flows.write(f"f{number}.yaml", f'steps: {{go: {{type: workflow, workflow: "f{{{{ {number + 1} }}}}.yaml"}}}}')
    flows.write("outer.yaml", 'steps: {go: {type: workflow, workflow: "f{{ 0 }}.yaml"}}')

    envelope = flows.run()

    assert not envelope.ok
    runs = [run for run in flows.store.runs.list() if run.id != "r1"]
    assert len(runs) == NESTING_LIMIT - 1
    deepest = max(runs, key=lambda run: len(run.id))
    assert deepest.envelope is not None
    assert deepest.envelope["data"]["steps"]["go"]["error"]["code"] == "DEPTH_EXCEEDED"


@pytest.mark.slow
def test_the_steps_timeout_bounds_the_whole_inner_run(flows: Flows) -> None:
    flows.write("outer.yaml", "steps: {inner: {type: workflow, workflow: inner.yaml, timeout: 1}}")
    flows.write("inner.yaml", "steps: {hangs: {exec: sleep 30, grace: 100ms}, after: {exec: echo, depends_on: hangs}}")
    began = time.monotonic()

    inner = step(flows.run(), "inner")

    assert time.monotonic() - began < 15
    assert inner["status"] == "timed_out"
    assert inner["error"]["code"] == "TIMEOUT"
    assert inner["error"]["context"]["rule"] == "workflow/timeout"
    assert inner["error"]["context"]["clock"]["owner"] == "step inner"
    assert inner["duration_ms"] < 8000
    assert flows.store.runs.steps("r1.inner")["hangs"].status == "timed_out"


@pytest.mark.slow
def test_the_outer_runs_deadline_is_said_to_be_the_outer_runs(flows: Flows) -> None:
    flows.write("outer.yaml", "timeout: 1\nsteps: {inner: {type: workflow, workflow: inner.yaml}}")
    flows.write("inner.yaml", "timeout: 60\nsteps: {hangs: {exec: sleep 30, grace: 100ms}}")

    envelope = flows.run()

    assert envelope.code == "TIMEOUT"
    assert envelope.exit_code == 10
    assert step(envelope, "inner")["error"]["context"]["clock"]["owner"] == "run outer"


def adversary(name: str, marks: Path) -> str:
    return f"cd {ROOT} && exec {sys.executable} -m tests.calls.work {name} {marks}"


@pytest.mark.slow
def test_stopping_the_outer_run_stops_everything_inside_and_writes_it_down(flows: Flows, marks: Path) -> None:
    flows.write("outer.yaml", OUTER)
    flows.write("inner.yaml", "steps: {go: {type: workflow, workflow: deepest.yaml}}")
    flows.write("deepest.yaml", f"steps: {{hangs: {{exec: {adversary('daemonises', marks)!r}, grace: 100ms}}}}")

    envelope = flows.run(stop_when=lambda: (marks / "ready").exists())

    assert envelope.code == "CANCELLED"
    assert not marked(marks)
    for run_id in ("r1.inner", "r1.inner.go"):
        run = flows.store.runs.get(run_id)
        assert run is not None and run.envelope is not None, run_id
        assert run.envelope["error"]["code"] == "CANCELLED"
        assert run.envelope["error"]["message"] == "stopped by the run around it"


def test_the_environment_of_the_step_is_seen_inside_and_secrets_only_where_asked_for(flows: Flows) -> None:
    flows.write(
        "outer.yaml",
        """
        steps:
          inner:
            type: workflow
            workflow: inner.yaml
            env: {PLACE: here, GH_TOKEN: tok-12345}
        """,
    )
    flows.write(
        "inner.yaml",
        """
        steps:
          plain: {exec: 'echo "$PLACE/$GH_TOKEN"'}
          asks: {exec: 'test "$GH_TOKEN" = tok-12345 && echo yes', env: {GH_TOKEN: "${GH_TOKEN}"}}
        """,
    )

    assert step(flows.run(), "inner")["output"] == {"plain": "here/", "asks": "yes"}


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.slow
def test_a_run_that_was_killed_inside_goes_on_inside(flows: Flows, tmp_path: Path) -> None:
    log = tmp_path / "log"
    flows.write("outer.yaml", "steps: {inner: {type: workflow, workflow: inner.yaml, idempotent: true}}")
    flows.write(
        "inner.yaml",
        f"""
        steps:
          first: {{exec: "echo first >>{log}"}}
          second: {{exec: "echo second >>{log}; sleep 2", depends_on: first, idempotent: true}}
        """,
    )
    command = [sys.executable, "-m", "shotclock", "run", str(flows.folder / "outer.yaml"), "--run-id", "r1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: log.exists() and "second" in log.read_text(), 20)
    finally:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait(10)

    resumed = subprocess.run(
        [sys.executable, "-m", "shotclock", "run", "--resume", "r1"], timeout=40, stdout=subprocess.PIPE
    )

    assert resumed.returncode == 0
    assert log.read_text().split() == ["first", "second", "second"]
    assert {run.id for run in flows.store.runs.list()} == {"r1", "r1.inner"}
