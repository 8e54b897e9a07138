"""Runs of a group: one is under way at a time, also if processes are killed, runs are parked, and runs are resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.store.groups import GroupPlace
from shotclock.store.store import Store
from tests.flows.conftest import Lint, statuses

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

WITHIN_S = 60  # twenty starts of Python on a loaded machine


class Machine:
    """The runs of one store, each in a process of its own, with a file of what was under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def write(self, steps: str, concurrency: str, name: str = "flow") -> str:
        file = self.folder / f"{name}.yaml"
        file.write_text(f"timeout: 5m\nconcurrency: {concurrency}\nsteps:\n{steps}")
        return str(file)

    def start(self, *words: str, name: str = "r") -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.json", "wb") as out, open(self.folder / f"{name}.err", "wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "shotclock", "run", *words],
                env={**os.environ, "SHOTCLOCK_HOME": str(self.folder / "home")},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def run(self, flow: str, name: str) -> subprocess.Popen[bytes]:
        return self.start(flow, "--run-id", name, name=name)

    def answer(self, process: subprocess.Popen[bytes], name: str) -> dict[str, Any]:
        process.wait(WITHIN_S)
        return json.loads((self.folder / f"{name}.json").read_bytes())

    def places(self, group: str = "g") -> list[GroupPlace]:
        with Store.open(self.folder / "home") as store:
            return list(store.groups.list(group))

    def until(self, holds: Callable[[], Any]) -> None:
        give_up = time.monotonic() + WITHIN_S
        while not holds():
            assert time.monotonic() < give_up, "it did not come to this"
            time.sleep(0.02)

    def audit(self) -> list[str]:
        file = self.folder / "audit"
        return file.read_text().split() if file.exists() else []

    def is_in(self, name: str) -> bool:
        return f"+{name}" in self.audit()

    def err(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def kill_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait(WITHIN_S)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.kill_all()


GATED = """
  work:
    exec: 'echo "+{{ run.id }}" >> audit; until test -e go; do sleep 0.05; done; echo "-{{ run.id }}" >> audit'
    on_fail: {run: tidy}
  tidy: {exec: 'echo "-{{ run.id }}" >> audit', timeout: 20s}
"""
GROUP = "{group: g, on_conflict: %s}"


@pytest.mark.slow
def test_six_runs_of_a_group_are_under_way_one_after_the_other_in_their_order(machine: Machine) -> None:
    flow = machine.write(GATED, "g")
    runs = {f"r{number}": machine.run(flow, f"r{number}") for number in range(6)}
    machine.until(lambda: len(machine.places()) == 6 and machine.audit())
    order = [place.run for place in machine.places()]
    assert len(machine.audit()) == 1, "one is inside while the others wait"
    (machine.folder / "go").touch()
    answers = {name: machine.answer(process, name) for name, process in runs.items()}
    assert all(answer["ok"] for answer in answers.values())
    assert machine.audit() == [mark for name in order for mark in (f"+{name}", f"-{name}")]
    assert machine.places() == []
    first, last = answers[order[0]]["data"]["concurrency"], answers[order[-1]]["data"]["concurrency"]
    assert first == {"group": "g", "on_conflict": "wait", "waited_ms": 0} and last["waited_ms"] > 0
    assert f"waits for run {order[0]} of group g" in machine.err(order[-1])


@pytest.mark.slow
def test_a_refused_run_does_not_start_and_names_the_one_that_has_the_group(machine: Machine) -> None:
    flow = machine.write(GATED, GROUP % "refuse")
    holder = machine.run(flow, "first")
    machine.until(lambda: machine.is_in("first"))
    second = machine.run(flow, "second")
    refused = machine.answer(second, "second")
    assert second.returncode == refused["meta"]["exit_code"] == 4
    assert refused["error"]["code"] == "LOCK_HELD" and refused["meta"]["ending"] == "not_started"
    assert refused["meta"]["side_effects"] == "none" and refused["error"]["context"]["run_id"] == "first"
    assert "shotclock job wait first" in refused["error"]["suggestion"]
    (machine.folder / "go").touch()
    assert machine.answer(holder, "first")["ok"]
    assert machine.answer(machine.run(flow, "second"), "second")["ok"], "the id of the refused run is free"


@pytest.mark.slow
def test_a_newer_run_cancels_the_one_before_after_its_clean_up_and_replaces_those_that_wait(machine: Machine) -> None:
    flow = machine.write(GATED, GROUP % "cancel")
    # The first ends slowly, so that the others meet while it is being stopped.
    deaf = """
  work:
    exec: 'echo "+{{ run.id }}" >> audit; trap "touch asked; while ! test -e end; do sleep 0.05; done; exit 1" TERM;
      while :; do sleep 0.05; done'
    grace: 60s
    on_fail: {run: tidy}
  tidy: {exec: 'echo "-{{ run.id }}" >> audit', timeout: 20s}
"""
    first = machine.run(machine.write(deaf, "g", "deaf"), "first")
    machine.until(lambda: machine.is_in("first"))
    second = machine.run(flow, "second")
    machine.until((machine.folder / "asked").exists)
    third = machine.run(flow, "third")
    replaced = machine.answer(second, "second")
    assert (
        replaced["error"]["code"] == "CANCELLED" and "run third of group 'g' is newer" in replaced["error"]["message"]
    )
    assert replaced["meta"]["ending"] == "not_started" and replaced["meta"]["side_effects"] == "none"
    assert machine.audit() == ["+first"], "the newest has not begun: the first has not ended"
    (machine.folder / "end").touch()
    stopped = machine.answer(first, "first")
    assert stopped["error"]["code"] == "CANCELLED" and stopped["meta"]["exit_code"] == 143
    assert [note["code"] for note in stopped["warnings"]] == ["RUN_REPLACED"]
    assert "run second of group 'g'" in stopped["warnings"][0]["message"]
    (machine.folder / "go").touch()
    assert machine.answer(third, "third")["ok"]
    assert machine.audit() == ["+first", "-first", "+third", "-third"]


@pytest.mark.slow
def test_a_killed_holder_does_not_block_and_its_run_waits_for_the_group_when_it_is_resumed(machine: Machine) -> None:
    twice = GATED.replace("    on_fail", "    idempotent: true\n    on_fail")
    flow = machine.write(twice, "g")
    first = machine.run(flow, "first")
    machine.until(lambda: machine.is_in("first"))
    second = machine.run(flow, "second")
    machine.until(lambda: len(machine.places()) == 2)
    killed = machine.run(flow, "killed")  # one that waits is killed as well
    machine.until(lambda: len(machine.places()) == 3)
    killed.kill()
    first.kill()
    machine.until(lambda: machine.is_in("second"))
    resumed = machine.start("--resume", "first", name="resumed")
    machine.until(lambda: "waits for run second" in machine.err("resumed"))
    assert machine.audit() == ["+first", "+second"]
    (machine.folder / "go").touch()
    assert machine.answer(second, "second")["ok"] and machine.answer(resumed, "resumed")["ok"]
    assert machine.audit() == ["+first", "+second", "-second", "+first", "-first"]
    assert machine.places() == []


@pytest.mark.slow
def test_a_stop_while_waiting_ends_at_once_and_nothing_has_run(machine: Machine) -> None:
    flow = machine.write(GATED, "g")
    holder = machine.run(flow, "first")
    machine.until(lambda: machine.is_in("first"))
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        second = machine.run(flow, "second")
        machine.until(lambda: "waits for run first" in machine.err("second"))
        second.send_signal(number)
        stopped = machine.answer(second, "second")
        assert second.returncode == stopped["meta"]["exit_code"] == code
        assert stopped["error"]["code"] == "CANCELLED" and "waited for its group 'g'" in stopped["error"]["message"]
        assert stopped["meta"]["ending"] == "not_started" and stopped["meta"]["side_effects"] == "none"
        assert [place.run for place in machine.places()] == ["first"]
    late = machine.start(flow, "--run-id", "late", "--timeout", "2s", name="late")
    over = machine.answer(late, "late")
    assert over["error"]["code"] == "QUEUE_TIMEOUT" and over["meta"]["exit_code"] == 10
    assert over["meta"]["ending"] == "not_started"
    (machine.folder / "go").touch()
    assert machine.answer(holder, "first")["ok"]
    assert machine.audit() == ["+first", "-first"]


ASKS = """
  before: {exec: 'echo "+{{ run.id }}" >> audit'}
  ask: {type: human-input, prompt: Go?, depends_on: before}
  after: {exec: 'echo "-{{ run.id }}" >> audit', depends_on: ask}
"""


@pytest.mark.slow
def test_a_parked_run_keeps_its_group_until_it_is_resumed_or_cancelled(machine: Machine) -> None:
    asks = machine.write(ASKS, "g", "asks")
    refusing = machine.write(GATED, GROUP % "refuse", "refusing")
    parked = machine.start(asks, "--run-id", "parked", "--budget", "10ms", name="parked")
    assert machine.answer(parked, "parked")["error"]["code"] == "INCOMPLETE"
    refused = machine.answer(machine.run(refusing, "second"), "second")
    assert refused["error"]["code"] == "LOCK_HELD" and "is parked" in refused["error"]["message"]
    assert "--resume parked" in refused["error"]["suggestion"]
    again = machine.start("--resume", "parked", "--budget", "10ms", name="again")
    assert machine.answer(again, "again")["error"]["code"] == "INCOMPLETE", "it has its group still, and does not wait"
    (machine.folder / "go").touch()
    newest = machine.run(machine.write(GATED, GROUP % "cancel", "cancelling"), "newest")
    assert machine.answer(newest, "newest")["ok"]
    with Store.open(machine.folder / "home") as store:
        ended = store.runs.get("parked")
        assert ended is not None and ended.envelope is not None and ended.envelope["error"]["code"] == "CANCELLED"
    assert machine.audit() == ["+parked", "+newest", "-newest"]


def test_the_group_may_be_made_of_inputs_and_is_known_in_the_answer(run: Callable[..., Envelope]) -> None:
    flow = """
concurrency: "deploy-{{ inputs.target }}"
inputs: {target: {default: test}}
steps: {a: {exec: "true"}}
"""
    for inputs, group in (({}, "deploy-test"), ({"target": "live"}, "deploy-live")):
        data: Any = run(flow, inputs=inputs).data
        assert data["concurrency"] == {"group": group, "on_conflict": "wait", "waited_ms": 0}
    for target in ("x" * 201, "\n"):
        with pytest.raises(Failure, match=r"concurrency\.group makes"):
            run(flow.replace("deploy-", ""), inputs={"target": target})


def test_a_nested_run_shares_the_group_of_the_run_around_it_and_its_items_take_turns(
    run: Callable[..., Envelope], tmp_path: Path
) -> None:
    inner = 'concurrency: g\nsteps: {a: {exec: \'echo "+" >> audit; sleep 0.1; echo "-" >> audit\'}}\n'
    (tmp_path / "inner.yaml").write_text(inner)
    outer = "steps: {each: {type: workflow, workflow: inner.yaml, for_each: [1, 2, 3]}}"
    assert statuses(run(outer, run_id="turns")) == {"each": "succeeded"}
    assert (tmp_path / "audit").read_text().split() == ["+", "-"] * 3
    shared = f"concurrency: g\ntimeout: 20s\n{outer}"
    assert statuses(run(shared, run_id="shared")) == {"each": "succeeded"}


def test_a_group_of_anything_but_inputs_is_reported(linted: Lint) -> None:
    for group, message in (
        ("{{ outputs.a }}", "there is no 'outputs' here"),
        ("{{ inputs.tagret }}", "`inputs` has no 'tagret'"),
        ("{{ inputs.target | lower }}", "a group is text with names of inputs"),
    ):
        text = f'concurrency: "{group}"\ninputs: {{target: {{default: x}}}}\nsteps: {{a: {{exec: "true"}}}}\n'
        [finding] = [each for each in linted(text) if each.is_error]
        assert message in finding.message and finding.path == ("concurrency", "group")
