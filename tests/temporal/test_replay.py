"""The workflow decides the same when its history is replayed, in the sandbox of Temporal; histories of before as well.

A running run survives an upgrade where these replay. A recorded history is never changed: a new way of deciding needs
`workflow.patched` and a history of its own here. A new version of the messages needs new histories: the slow tests
write theirs into the directory that RECORD_HISTORIES names.
"""

import asyncio
import importlib
import os
import time
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

import shotclock
from shotclock.calls.call import admit, answer_at
from shotclock.core.envelope import warning
from shotclock.core.limits import ClockKind, Clocks
from shotclock.flows.run.state import Status, StepState, judge_run
from shotclock.temporal import _run_workflow as run_workflow
from shotclock.temporal._run_workflow import RunWorkflow
from shotclock.temporal.connection import connect, read_address
from tests.temporal.conftest import Cluster, Runs, wait_until

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json"))
WITHIN_S = 60

# Everything that the workflow decides by itself: order, skips, retries, going back, clean-up, people, runs inside.
ALL_KINDS = """
    timeout: 60
    max_parallelism: 2
    steps:
      a: {type: command, exec: "echo a"}
      b: {type: command, exec: "exit 1", on_fail: {run: [tidy], retry: {max: 1, backoff: {delay_ms: 10}}}}
      c: {type: command, exec: "echo c", depends_on: [b]}
      tidy: {type: command, exec: "echo tidy"}
      d: {type: command, exec: "test -e again || { touch again; exit 1; }", on_fail: {goto: a}, depends_on: [a]}
      ask: {type: human-input, prompt: "Well?", timeout: 1, default: "no"}
      inner: {type: workflow, workflow: inner.yaml}
      hangs: {type: command, exec: "sleep 300", timeout: 1, grace: 100ms}
    outputs: {a: "{{ outputs.a }}"}
    """


def make_runner() -> SandboxedWorkflowRunner:
    """The sandbox, where it finds out what depends on anything but history. Workers do without: this is what shows that
    they can. What the workflow uses of ours is shared with it: pure, or only named."""
    ours = [f"shotclock.{room}" for room in ("core", "process", "store", "runtime", "inbox", "dispatch", "providers")]
    ours += ["shotclock.flows", "shotclock.temporal._messages"]
    return SandboxedWorkflowRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules(*ours))


def replay(history: WorkflowHistory, workflow_class: type = RunWorkflow) -> None:
    async def main() -> None:
        replayer = Replayer(workflows=[workflow_class], workflow_runner=make_runner())
        await replayer.replay_workflow(history)

    asyncio.run(asyncio.wait_for(main(), WITHIN_S))


def fetch(cluster: Cluster, run_id: str) -> WorkflowHistory:
    async def main() -> WorkflowHistory:
        client = await connect(read_address(cluster.url, {}))
        return await client.get_workflow_handle(run_id).fetch_history()

    history = asyncio.run(asyncio.wait_for(main(), WITHIN_S))
    if (folder := os.environ.get("RECORD_HISTORIES")) is not None:
        name = run_id.partition("-")[0] + ("-nested" if "." in run_id else "")
        (Path(folder) / f"{name}.json").write_text(history.to_json())
    return history


@pytest.mark.slow
@pytest.mark.parametrize("file", HISTORIES, ids=lambda file: file.stem)
def test_a_history_of_before_is_replayed(file: Path) -> None:
    replay(WorkflowHistory.from_json(file.stem, file.read_text()))


def test_a_workflow_that_reads_a_clock_of_its_own_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sandbox sees it, though workers run without."""
    begins = "        self._input = run_input\n"
    source = Path(run_workflow.__file__).read_text().replace("from ..", "from shotclock.")
    changed = source.replace("from .", "from shotclock.temporal.").replace(begins, f"{begins}        time.time()\n", 1)
    (tmp_path / "changed_workflow.py").write_text(
        changed.replace("import asyncio\n", "import asyncio\nimport time\n", 1)
    )
    monkeypatch.syspath_prepend(tmp_path)
    changed_class = importlib.import_module("changed_workflow").RunWorkflow
    (file, *_) = HISTORIES
    with pytest.raises(Exception, match=r"Cannot access time\.time"):
        replay(WorkflowHistory.from_json(file.stem, file.read_text()), changed_class)


def test_there_are_histories_of_before() -> None:
    assert len(HISTORIES) >= 2


def test_a_workflow_that_decides_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself can fail: with another name for the activity the histories do not fit."""
    (file, *_) = HISTORIES
    history = WorkflowHistory.from_json(file.stem, file.read_text())
    monkeypatch.setattr(run_workflow, "STEP_ACTIVITY", "another")

    async def main() -> None:
        replayer = Replayer(workflows=[RunWorkflow], workflow_runner=UnsandboxedWorkflowRunner())
        await replayer.replay_workflow(history)

    with pytest.raises(workflow.NondeterminismError):
        asyncio.run(asyncio.wait_for(main(), WITHIN_S))


@pytest.mark.slow
def test_a_run_of_every_kind_is_replayed_and_its_history_says_which_shotclock_made_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    runs, run_id = Runs(tmp_path, cluster.url), f"replayed-{time.monotonic_ns()}"
    runs.write("steps: {one: {type: command, exec: echo one}}", "inner.yaml")
    code, envelope = runs.run(ALL_KINDS, "--run-id", run_id)
    assert code == 3 and envelope["data"]["skipped"] == ["c"], envelope
    for each in (run_id, f"{run_id}.inner"):
        history = fetch(cluster, each)
        replay(history)
        done = [event.workflow_task_completed_event_attributes for event in history.events]
        assert {each.worker_version.build_id for each in done} == {"", f"shotclock-{shotclock.__version__}"}


@pytest.mark.slow
def test_a_cancelled_run_is_replayed(cluster: Cluster, tmp_path: Path) -> None:
    runs, run_id = Runs(tmp_path, cluster.url), f"cancelled-{time.monotonic_ns()}"
    running = runs.start(
        """
        timeout: 60
        steps:
          works: {type: command, exec: "touch begun; sleep 300", grace: 200ms, on_fail: {run: [tidy]}}
          other: {type: command, exec: "sleep 300", grace: 200ms}
          tidy: {type: command, exec: "touch tidied"}
        """,
        *("--run-id", run_id),
    )
    wait_until((tmp_path / "begun").exists, "the first step")
    code, told = runs.call("job", "cancel", run_id)
    assert code == 0 and told["data"]["code"] == "CANCELLED", told
    code, envelope = running.ended()
    assert code == 143 and envelope["error"]["code"] == "CANCELLED" and (tmp_path / "tidied").exists()
    replay(fetch(cluster, run_id))


@pytest.mark.slow
def test_a_run_that_was_given_more_time_keeps_it_without_its_worker_and_is_replayed(
    own_cluster: Cluster, tmp_path: Path
) -> None:
    own_cluster.start_engine()
    lost = own_cluster.start_worker()
    runs, run_id, began = Runs(tmp_path, own_cluster.url), f"longer-{time.monotonic_ns()}", time.monotonic()
    running = runs.start(
        """
        timeout: 15
        steps:
          slow:
            type: command
            exec: "echo begun >> begun; while test ! -e go; do sleep 0.2; done; echo done"
            timeout: 100
            idempotent: true
          ask: {type: command, exec: "echo yes", approval: true}
        """,
        *("--run-id", run_id, "--heartbeat", "2s", "--budget", "0s", "--force"),
    )
    runs.wait_for("begun")
    (asked,) = wait_until(lambda: runs.call("inbox", "list")[1]["data"]["proposals"], "the question")
    code, told = runs.call("job", "extend", run_id, "60s")
    assert code == 0 and told["data"]["extended"][0]["timeout_ms"] == 75_000, told
    lost.kill()
    own_cluster.start_worker()
    runs.wait_for("begun", 2)
    wait_until(lambda: time.monotonic() - began > 16.5, "the deadline that it had")
    assert runs.call("inbox", "approve", asked["id"])[0] == 0
    (tmp_path / "go").touch()
    code, envelope = running.ended()
    assert code == 0 and envelope["meta"]["timeout_ms"] == 75_000, envelope
    assert envelope["data"]["steps"]["ask"]["output"] == "yes"
    replay(fetch(own_cluster, run_id))


def test_a_stopped_run_with_survivors_of_its_steps_is_abandoned() -> None:
    left = {"pid": 4711, "command": "sleep"}
    state = StepState("a", "command", Status.FAILED, warnings=[warning("SURVIVORS", processes=[left])])
    call = admit("run flow", Clocks(timeout_ms=1_000))
    fired = call.fired(ClockKind.TIMEOUT, 0)
    outcome = judge_run(call, {"a": state}, {}, "SIGTERM", fired, is_out_of_time=False)
    envelope = answer_at(call, outcome, call.started_ns)
    assert (envelope.ending, envelope.meta["survivors"]) == ("abandoned", [left])
    assert [note["code"] for note in envelope.warnings] == ["SURVIVORS"]
