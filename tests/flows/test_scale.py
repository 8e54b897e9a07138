"""A long run costs no more for each step than a short one. How much a step costs is measured by `make bench`."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.run.runs import RunRequest, start
from shotclock.flows.run.scheduler import Scheduler
from shotclock.flows.run.state import Status, StepState
from shotclock.flows.steps.provider import StepPart
from shotclock.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

ROUNDS = 3
RUN_LIMIT_S = 60  # of a run of a few thousand steps that do nothing
# The bar is 1.3 on a quiet machine (benchmarks/workflows.py). What looks at all the others for each step is past this.
GROWTH = 2.0


def workflow(shape: str, count: int) -> WorkflowFile:
    steps: dict[str, dict[str, Any]] = {}
    for number in range(count):
        steps[f"s{number}"] = {"type": "command", "exec": "true"}
        if shape in ("chain", "failed chain") and number:
            steps[f"s{number}"]["depends_on"] = [f"s{number - 1}"]
    if shape == "fan-in":
        steps["all"] = {"type": "command", "exec": "true", "depends_on": list(steps)}
    return WorkflowFile.model_validate({"steps": steps})


def growth(seconds_per_step: Callable[[int], float], short: int, long: int) -> float:
    seconds_per_step(short)  # warms up
    pairs = [(seconds_per_step(short), seconds_per_step(long)) for _ in range(ROUNDS)]
    for_short, for_long = (min(side) for side in zip(*pairs, strict=True))
    return for_long / for_short


@pytest.mark.soak
def test_the_time_of_a_command_does_not_grow_with_the_run() -> None:
    def seconds_per_step(count: int) -> float:
        async def main() -> float:
            with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "home") as store:
                request = RunRequest(workflow("chain", count), f"{folder}/flow.yaml", Path(folder))
                began = time.process_time()
                async with asyncio.timeout(RUN_LIMIT_S):
                    assert (await start(request, store)).ok
                return (time.process_time() - began) / count

        return asyncio.run(main())

    assert growth(seconds_per_step, 50, 300) < GROWTH


@pytest.mark.parametrize("shape", ["failed chain", "fan-in"])
def test_deciding_what_runs_next_does_not_grow_with_the_run(shape: str) -> None:
    async def execute(name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        state.status = Status.FAILED if shape == "failed chain" else Status.SUCCEEDED

    async def record(states: Sequence[StepState]) -> None:
        for state in states:
            state.to_record()

    def seconds_per_step(count: int) -> float:
        running = Scheduler(workflow(shape, count), execute=execute, record=record, scope={})
        began = time.process_time()
        asyncio.run(asyncio.wait_for(running.run(), RUN_LIMIT_S))
        assert all(state.status.is_final for state in running.states.values())
        return (time.process_time() - began) / count

    assert growth(seconds_per_step, 300, 3000) < GROWTH
