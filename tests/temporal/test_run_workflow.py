"""The workflow of a run among workers that answer late, oddly or not at all. Its activities are scripts of the test."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.core.value_types import JsonObject
from shotclock.flows.run.state import Status, StepState
from shotclock.temporal._engine import TemporalEngine, read_progress
from shotclock.temporal._messages import ORDER_ACTIVITY, OUTPUTS_ACTIVITY, RUN_WORKFLOW, STEP_ACTIVITY, VERSION
from shotclock.temporal._run_workflow import RunWorkflow
from shotclock.temporal.connection import connect, read_address
from tests.temporal.conftest import WITHIN_S, Cluster

pytestmark = pytest.mark.slow

LIMIT = timedelta(seconds=WITHIN_S)
HEARTBEAT_MS = 1_000
Activity = Callable[[JsonObject], Awaitable[JsonObject]]
COMMAND = {"type": "command", "exec": "-"}


def done(step: JsonObject) -> JsonObject:
    state = StepState.from_record(step["state"])
    state.status, state.attempts = Status.SUCCEEDED, state.attempts + 1
    return {"state": state.to_record()}


async def be_done(step: JsonObject) -> JsonObject:
    return done(step)


async def nothing(request: JsonObject) -> JsonObject:
    return {"outputs": {}, "warnings": [], "is_cut_short": False, "stopping": []}


async def beat_until(holds: Callable[[], bool]) -> None:
    """Wait for a condition, with heartbeats, which bring a cancellation."""
    give_up_at = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < give_up_at
        activity.heartbeat({})
        await asyncio.sleep(0.05)


def make_input(run_id: str, queue: str, workflow: JsonObject, **changes: Any) -> JsonObject:
    return {
        "version": VERSION, "run_id": run_id, "name": "flow", "file": "flow.yaml", "folder": "/", "files": [],
        "workflow": workflow, "inputs": {}, "trace_id": "0" * 32, "limit_ms": 60_000, "caller_ms": None,
        "deadline_at": None, "deadline_owner": "caller", "latest_at": None, "heartbeat_ms": HEARTBEAT_MS,
        "queue": queue, "env": {}, "attributes": [], **changes,
    }  # fmt: skip


class Play:
    """One run with scripted activities."""

    def __init__(self, client: Client, queue: str, run_id: str) -> None:
        self.client, self.queue, self.run_id = client, queue, run_id

    @property
    def handle(self) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(self.run_id)

    async def begin(self, steps: JsonObject, **more: Any) -> None:
        run_input = make_input(self.run_id, self.queue, {"version": "1.0", "timeout": 60, "steps": steps, **more})
        await self.client.start_workflow(RUN_WORKFLOW, run_input, id=self.run_id, task_queue=self.queue)

    async def wait_for(self, status: str, step: str) -> None:
        while True:
            with contextlib.suppress(Failure):  # it has not begun yet
                if (await read_progress(self.handle))["steps"][step]["status"] == status:
                    return
            await asyncio.sleep(0.05)

    async def find_child(self) -> "Play":
        while not (children := (await read_progress(self.handle))["children"]):
            await asyncio.sleep(0.05)
        (child,) = children
        found = Play(self.client, self.queue, child)
        await found.wait_for("running", "inside")
        return found

    async def hold(self, *steps: str) -> None:
        """Announce steps, as their workers do."""
        for step in steps:
            await self.wait_for("running", step)
            await self.handle.signal("hold", [step, self.queue])

    async def order(self, **order: Any) -> JsonObject:
        whole = {"run_id": self.run_id, "step": None, "who": "me", "by_ms": None, "within_ms": None, "reason": ""}
        return await self.handle.execute_update("order", {**whole, **order}, rpc_timeout=LIMIT)


def define(name: str, script: Activity) -> Activity:
    @activity.defn(name=name)
    async def play_script(request: JsonObject) -> JsonObject:
        return await script(request)

    return play_script


def play(
    cluster: Cluster,
    script: Callable[[Play], Awaitable[None]],
    step: Activity = be_done,
    order: Activity = nothing,
    outputs: Activity = nothing,
) -> Envelope:
    """Run the script beside a worker with these activities, and return the envelope of its run."""

    async def main() -> Envelope:
        address, run_id = read_address(cluster.url, {}), f"played-{time.monotonic_ns()}"
        client = await connect(address)
        worker = Worker(
            client,
            task_queue=run_id,
            workflows=[RunWorkflow],
            activities=[define(STEP_ACTIVITY, step), define(ORDER_ACTIVITY, order), define(OUTPUTS_ACTIVITY, outputs)],
            workflow_runner=UnsandboxedWorkflowRunner(),
        )
        async with worker:
            await script(Play(client, run_id, run_id))
            ended = await TemporalEngine(address).wait(run_id, time.monotonic_ns() + 20 * 10**9)
        assert ended is not None, "it did not end"
        return ended

    return asyncio.run(asyncio.wait_for(main(), WITHIN_S))


def test_a_step_may_end_while_its_run_is_wound_down(cluster: Cluster) -> None:
    is_ordered, is_over = asyncio.Event(), asyncio.Event()

    async def step(step: JsonObject) -> JsonObject:
        await beat_until((is_over if step["step"] == "a" else is_ordered).is_set)
        return done(step)

    async def order(order: JsonObject) -> JsonObject:
        is_ordered.set()
        while not has_ended.is_set():
            await asyncio.sleep(0.05)
        return {"stopping": [{"name": order["step"]}]}

    has_ended = asyncio.Event()

    async def script(run: Play) -> None:
        await run.begin({"a": COMMAND, "b": COMMAND})
        await run.hold("a", "b")
        winding = asyncio.ensure_future(run.order())
        await run.wait_for("succeeded", "b")
        has_ended.set()
        assert {"name": "a"} in (await asyncio.wait_for(winding, 10))["stopping"]
        is_over.set()

    assert play(cluster, script, step, order).data["completed"] == ["a", "b"]  # type: ignore[index,call-overload]


def test_every_step_is_wound_down_although_one_cannot_be(cluster: Cluster) -> None:
    ordered: list[str] = []

    async def step(step: JsonObject) -> JsonObject:
        await beat_until(lambda: len(ordered) == 2)
        return done(step)

    async def order(order: JsonObject) -> JsonObject:
        ordered.append(order["step"])
        if order["step"] == "a":
            raise ApplicationError("not here", type="CALL_NOT_FOUND", non_retryable=True)
        return {"stopping": [{"name": order["step"]}]}

    async def script(run: Play) -> None:
        await run.begin({"a": COMMAND, "b": COMMAND})
        await run.hold("a", "b")
        assert await run.order() == {"stopping": [{"name": "b"}]}

    assert play(cluster, script, step, order).ok


def test_a_late_hold_of_an_ended_step_is_forgotten(cluster: Cluster) -> None:
    async def step(step: JsonObject) -> JsonObject:
        await beat_until(lambda: step["step"] == "a" or ended.is_set())
        return done(step)

    ended = asyncio.Event()

    async def script(run: Play) -> None:
        await run.begin({"a": COMMAND, "b": COMMAND})
        await run.wait_for("succeeded", "a")
        await run.handle.signal("hold", ["a", run.queue])
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await run.order(step="a")
        assert "does not run" in str(refused.value.cause)
        ended.set()

    assert play(cluster, script, step).ok


@pytest.mark.parametrize("reply", [{"lost": {}, "is_unbegun": True}, {"lost": {}}])
def test_a_step_that_comes_back_to_a_stopped_run_is_not_started_again(cluster: Cluster, reply: JsonObject) -> None:
    starts: list[str] = []

    async def step(step: JsonObject) -> JsonObject:
        starts.append(step["step"])
        with pytest.raises(asyncio.CancelledError):
            await beat_until(lambda: len(starts) > 1)
        return {"state": step["state"], "proposals": [], **reply}

    async def script(run: Play) -> None:
        await run.begin({"a": {**COMMAND, "idempotent": True}})
        while not starts:
            await asyncio.sleep(0.05)
        await run.handle.cancel()

    ended = play(cluster, script, step)
    assert (ended.code, starts) == ("CANCELLED", ["a"])
    assert ended.meta["side_effects"] == ("none" if "is_unbegun" in reply else "unknown")


def test_a_run_that_is_cancelled_while_its_outputs_are_rendered_has_an_envelope(cluster: Cluster) -> None:
    begun = asyncio.Event()

    async def outputs(request: JsonObject) -> JsonObject:
        begun.set()
        await asyncio.sleep(3)
        return await nothing(request)

    async def script(run: Play) -> None:
        await run.begin({"a": COMMAND}, outputs={"a": "{{ outputs.a }}"})
        await begun.wait()
        await run.handle.cancel()

    ended = play(cluster, script, outputs=outputs)
    assert ended.code == "CANCELLED" and ended.data["completed"] == ["a"]  # type: ignore[index,call-overload]


def test_outputs_that_no_worker_can_render_are_missing(cluster: Cluster) -> None:
    async def outputs(request: JsonObject) -> JsonObject:
        raise ApplicationError("broken", non_retryable=True)

    async def script(run: Play) -> None:
        await run.begin({"a": COMMAND}, outputs={"a": "{{ outputs.a }}"})

    ended = play(cluster, script, outputs=outputs)
    assert ended.ok and ended.data["outputs"] == {"a": None}, ended  # type: ignore[index,call-overload]
    assert [note["code"] for note in ended.warnings] == ["OUTPUT_MISSING"]


@pytest.mark.parametrize("is_idempotent", [True, False])
def test_nobody_has_seen_the_end_of_a_step_whose_worker_is_lost(cluster: Cluster, is_idempotent: bool) -> None:
    async def step(step: JsonObject) -> JsonObject:
        activity.heartbeat({"attempts": 1, "try_began_at": step["sent_at"] - 5_000})
        await asyncio.sleep(HEARTBEAT_MS / 1000 * 2)
        return done(step)

    async def script(run: Play) -> None:
        await run.begin({"a": {**COMMAND, "idempotent": is_idempotent, "timeout": 2}})

    ended = play(cluster, script, step)
    failed: Any = ended.data["steps"]["a"]  # type: ignore[index,call-overload]
    assert (ended.code, failed["ending"]) == ("STEPS_FAILED", "abandoned"), ended
    assert "survivors" not in ended.meta
    assert [note["code"] for note in ended.warnings] == ["END_UNSEEN"]


def test_a_run_that_is_stopped_after_the_loss_of_a_worker_is_abandoned(cluster: Cluster) -> None:
    begun = asyncio.Event()

    async def step(step: JsonObject) -> JsonObject:
        begun.set()
        await asyncio.sleep(HEARTBEAT_MS / 1000 * 3)
        return done(step)

    async def script(run: Play) -> None:
        await run.begin({"a": COMMAND})
        await begun.wait()
        await run.handle.signal("stop", "SIGTERM")

    ended = play(cluster, script, step)
    assert ended.ending == "abandoned" and "survivors" not in ended.meta, ended
    assert [note["code"] for note in ended.warnings] == ["END_UNSEEN"]


def test_a_terminated_nested_run_is_a_failure_of_its_step(cluster: Cluster) -> None:
    answers: list[JsonObject] = []

    async def step(step: JsonObject) -> JsonObject:
        run_id = step["run"]["run_id"] + ".inner"
        if step["step"] == "inside":
            await beat_until(lambda: bool(answers))
        elif run_id in step["nested"]:
            answers.append(step["nested"][run_id])
            reply = done(step)
            reply["state"]["warnings"] = answers[0]["warnings"]
            return reply
        else:
            inner = make_input(run_id, step["run"]["queue"], {"version": "1.0", "steps": {"inside": COMMAND}})
            return {"state": step["state"], "is_parked": True, "proposals": [], "nested": [inner]}
        return done(step)

    async def script(run: Play) -> None:
        await run.begin({"outside": {"type": "workflow", "workflow": "inner.yaml"}})
        await (await run.find_child()).handle.terminate()

    assert "survivors" not in play(cluster, script, step).meta
    (answer,) = answers
    assert answer["error"]["code"] == "INTERRUPTED" and answer["meta"]["ending"] == "abandoned", answer
    assert answer["meta"]["side_effects"] == "unknown" and "survivors" not in answer["meta"]


def test_winding_down_a_run_winds_down_its_nested_runs_and_a_working_one_is_not_parked(cluster: Cluster) -> None:
    ordered: list[str] = []

    async def step(step: JsonObject) -> JsonObject:
        run_id = step["run"]["run_id"] + ".inner"
        if step["step"] == "inside":
            await beat_until(lambda: ordered == ["inside"])
        elif run_id not in step["nested"]:
            inner = make_input(run_id, step["run"]["queue"], {"version": "1.0", "steps": {"inside": COMMAND}})
            return {"state": step["state"], "is_parked": True, "proposals": [], "nested": [inner]}
        return done(step)

    async def order(order: JsonObject) -> JsonObject:
        ordered.append(order["step"])
        return {"stopping": []}

    async def script(run: Play) -> None:
        await run.begin({"outside": {"type": "workflow", "workflow": "inner.yaml"}})
        inner = await run.find_child()
        engine = TemporalEngine(read_address(cluster.url, {}))
        assert (await engine.report(run.run_id)).status is Status.RUNNING
        assert (await engine.progress(run.run_id)).status is Status.RUNNING
        await inner.hold("inside")
        await run.order()

    assert play(cluster, script, step, order).ok
    assert ordered == ["inside"]


def test_a_deadline_that_a_worker_has_not_confirmed_is_sent_again(cluster: Cluster) -> None:
    ordered: list[JsonObject] = []

    async def step(step: JsonObject) -> JsonObject:
        await beat_until(lambda: len(ordered) == 2)
        return done(step)

    async def order(order: JsonObject) -> JsonObject:
        ordered.append(order)
        if len(ordered) == 1:
            raise ApplicationError("not here", type="CALL_NOT_FOUND", non_retryable=True)
        return {}

    async def script(run: Play) -> None:
        await run.begin({"a": COMMAND})
        await run.hold("a")
        await run.order(by_ms=1_000)
        await run.hold("a")

    assert play(cluster, script, step, order).ok
    first, second = ordered
    assert first["deadline_at"] == second["deadline_at"]
