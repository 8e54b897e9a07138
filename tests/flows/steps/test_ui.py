"""`ui` steps: executions in a workflow, on a real page, with the step's own clock and the outputs of others."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.runtime import Runtime
from shotclock.core.limits import Clocks
from shotclock.flows.check.lint import lint
from shotclock.flows.file.loader import load_text
from shotclock.flows.run.step_attempt import run_attempt
from shotclock.flows.steps.provider import STEP_TYPES, StepCall
from tests.ui.conftest import execution
from tests.ui.pages import Session, session_in

RUN_LIMIT_S = 120
SNAP = {"id": "snap", "type": "snapshot_ui"}


def test_a_step_has_an_execution_or_actions() -> None:
    for keys in (
        "",
        "execution: {}\n    actions: []",
    ):
        loaded = load_text(f"steps:\n  it:\n    type: ui\n    {keys}\n".encode())
        assert any("either `execution` or `actions`" in finding.message for finding in loaded.findings)


def test_what_is_wrong_with_a_payload_is_found_before_it_runs() -> None:
    wait = "{id: w, type: wait_for_node, params: {matcher: {role: x}, timeoutMs: 5000}}"
    flow = f"steps: {{it: {{type: ui, timeout: 4000, actions: [{wait}, {{id: w, type: fly}}]}}}}"
    (finding,) = load_text(flow.encode()).findings
    assert (
        "actions.1.id: id 'w' is also the id of actions.0" in finding.message
        and "unknown action type 'fly'" in finding.message
    )
    flow = f"steps: {{it: {{type: ui, timeout: 4000, actions: [{wait}]}}}}"
    assert "raise timeoutMs to 5500" in load_text(flow.encode()).findings[0].message
    assert not load_text(flow.replace("4000", "6s").encode()).findings


def test_every_problem_of_a_step_is_found_at_once() -> None:
    for actions in (
        "actions: [{id: w, type: fly}], mode: some",
        "",
    ):
        flow = f"steps: {{it: {{type: ui, device: nope, timeout: 200s, {actions}}}}}"
        (finding,) = load_text(flow.encode()).findings
        said = ["there is no device 'nope'"]
        said += ["timeout: ", "unknown action type", "mode must be"] if actions else ["either `execution` or"]
        assert all(each in finding.message for each in said), finding.message


def test_a_step_may_have_the_time_of_its_mode_and_any_device_that_is_only_known_later() -> None:
    step = "{type: ui, device: '{{ env.D }}', timeout: 170s, mode: best_effort, actions: [{id: s, type: snapshot_ui}]}"
    flow = f"steps: {{it: {step}}}"
    assert not load_text(flow.encode()).findings
    (finding,) = load_text(flow.replace("170s", "181s").encode()).findings
    assert "timeout: 181000 ms, and an execution has at most 180000" in finding.message


def test_a_step_without_a_timeout_has_its_executions_and_what_is_waited_for_the_result() -> None:
    flow = """steps:
      it: {type: ui, execution: {timeoutMs: 60000, commandId: "{{ 1 }}"}}
      other: {type: ui, actions: [{id: s, type: snapshot_ui}]}
    """
    loaded = load_text(flow.encode())
    assert loaded.workflow is not None and not [f for f in lint(loaded) if f.level == "error"]
    kind = STEP_TYPES["ui"]
    steps = loaded.workflow.steps
    assert kind.timeout_ms(None, steps["it"]) == 66000 and kind.timeout_ms(None, steps["other"]) == 36000
    assert kind.timeout_ms(9000) == 9000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session_in(tmp_path_factory.mktemp("ui") / "home") as session:
        assert session.run(session.open("/"))["ok"]
        yield session


def run_flow(text: str, folder: Path) -> dict[str, Any]:
    (folder / "flow.yaml").write_text(text)
    words = [sys.executable, "-m", "shotclock", "run", "flow.yaml", "--json"]
    ran = subprocess.run(words, cwd=folder, capture_output=True, timeout=RUN_LIMIT_S)
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


@pytest.mark.slow
def test_steps_act_on_the_page_with_the_outputs_of_others(page: Session, tmp_path: Path) -> None:
    flow = f"""
    steps:
      word: {{exec: "echo Buy"}}
      buy:
        type: ui
        needs: word
        actions:
          - {{id: open, type: open_uri, params: {{uri: "{page.url}/"}}}}
          - {{id: buy, type: click, params: {{matcher: {{textEquals: "{{{{ outputs.word }}}}"}}}}}}
          - {{id: said, type: read_text, params: {{matcher: {{resourceId: said}}}}}}
      wait:
        type: ui
        needs: buy
        timeout: 900
        actions: [{{id: w, type: wait_for_node, params: {{matcher: {{textEquals: Nowhere}}}}}}]
      wrong: {{type: ui, needs: word, actions: [{{id: x, type: "{{{{ outputs.word }}}}"}}]}}
      say: {{needs: buy, exec: "echo {{{{ outputs.buy.steps.said.text }}}}"}}
    """
    steps = run_flow(flow, tmp_path)["data"]["steps"]
    assert steps["buy"]["output"]["steps"]["said"]["text"] == "bought", steps["buy"]
    assert steps["say"]["output"].strip() == "bought"
    assert steps["wrong"]["error"]["code"] == "EXECUTION_VALIDATION_FAILED"
    assert steps["wrong"]["error"]["context"]["rule"] == "ui/invalid"
    assert steps["wait"]["error"]["code"] in ("WAIT_TIMEOUT", "OPERATION_TIMEOUT"), steps["wait"]
    assert steps["wait"]["output"]["position"]["actionId"] == "w"


@pytest.mark.slow
def test_a_step_that_is_cancelled_stops_its_execution(page: Session, tmp_path: Path) -> None:
    async def scenario() -> float:
        async with Runtime(workers=1) as runtime:
            sleep = execution({"id": "s", "type": "sleep", "params": {"durationMs": 20000}})
            step = StepCall("it", {"execution": sleep, "device": "browser", "mode": "direct"}, Clocks(), {}, tmp_path)
            provider = STEP_TYPES["ui"].make_provider(None)  # type: ignore[arg-type]
            working = asyncio.ensure_future(run_attempt(provider, step, runtime))
            async with asyncio.timeout(20):
                while (await asyncio.to_thread(page.status) or {}).get("holder") is None:
                    await asyncio.sleep(0.02)
            working.cancel()
            await asyncio.wait([working], timeout=10)
            assert working.done()
            return time.monotonic()

    ended = asyncio.run(scenario())
    while (page.status() or {}).get("holder") is not None:
        assert time.monotonic() < ended + 5
        time.sleep(0.02)
    assert page.run(SNAP)["ok"]
