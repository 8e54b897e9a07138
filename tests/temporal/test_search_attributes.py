"""Runs are found in Temporal by names that people know, where the namespace has these."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from shotclock.core.errors import Failure
from shotclock.temporal._engine import TemporalEngine
from shotclock.temporal._messages import TYPES, describe_end
from shotclock.temporal._payloads import KEY_VARIABLE
from shotclock.temporal.connection import connect, read_address
from tests.temporal.conftest import Cluster, Proxy, Runs, wait_until

WITHIN_S = 60
LIMIT = timedelta(seconds=10)


def on_engine(url: str, work: Callable[[Client], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work(await connect(read_address(url, {})))

    return asyncio.run(asyncio.wait_for(main(), WITHIN_S))


def read_attributes(cluster: Cluster, run_id: str) -> dict[str, Any]:
    async def work(client: Client) -> dict[str, Any]:
        try:
            described = await client.get_workflow_handle(run_id).describe(rpc_timeout=LIMIT)
        except RPCError:
            return {}
        return {pair.key.name: pair.value for pair in described.typed_search_attributes if pair.key.name in TYPES}

    found: dict[str, Any] = on_engine(cluster.url, work)
    return found


def find_runs(cluster: Cluster, query: str) -> list[str]:
    async def work(client: Client) -> list[str]:
        return [found.id async for found in client.list_workflows(query, rpc_timeout=LIMIT)]

    found: list[str] = on_engine(cluster.url, work)
    return found


def find_attributes(cluster: Cluster) -> list[str]:
    engine = TemporalEngine(read_address(cluster.url, {}))
    return asyncio.run(asyncio.wait_for(engine.find_attributes(), WITHIN_S))


@pytest.mark.slow
def test_a_run_is_found_by_its_step_and_its_clock(cluster: Cluster, tmp_path: Path) -> None:
    runs, run_id = Runs(tmp_path, cluster.url), f"found-{time.monotonic_ns()}"
    running = runs.start(
        """
        name: nightly
        timeout: 60
        steps:
          quick: {type: command, exec: "echo quick"}
          hang: {type: command, exec: "sleep 300", timeout: 3, grace: 100ms}
        """,
        *("--run-id", run_id, "--heartbeat", "4s"),
    )
    try:
        by_step = f"WorkflowId = '{run_id}' AND ShotclockStep = 'hang' AND ShotclockStatus = 'running'"
        wait_until(lambda: find_runs(cluster, by_step), "the run by the step that it is in")
        code, envelope = running.ended()
        assert code == 3, envelope
        by_clock = f"ShotclockClock = 'timeout of step hang' AND ShotclockRun = 'nightly' AND WorkflowId = '{run_id}'"
        wait_until(lambda: find_runs(cluster, by_clock), "the run by the clock that fired")
        assert read_attributes(cluster, run_id) == {
            "ShotclockRun": "nightly",
            "ShotclockStatus": "failed",
            "ShotclockClock": "timeout of step hang",
            "ShotclockEnding": "STEPS_FAILED",
        }
    finally:
        runs.close()


@pytest.mark.slow
def test_a_run_that_asks_is_waiting_and_only_such_are_asked_for_proposals(cluster: Cluster, tmp_path: Path) -> None:
    runs, run_id = Runs(tmp_path, cluster.url), f"waits-{time.monotonic_ns()}"
    runs.write('steps: {ask: {type: human-input, prompt: "Well?", timeout: 60}}', "inner.yaml")
    running = runs.start("steps: {inner: {type: workflow, workflow: inner.yaml}}", "--run-id", run_id)
    try:

        def list_waiting() -> list[str]:
            engine = TemporalEngine(read_address(cluster.url, {}))
            found = asyncio.run(asyncio.wait_for(engine.list_running(only_waiting=True), WITHIN_S))
            return [each for each in found if each.startswith(run_id)]

        assert wait_until(list_waiting, "the run that asks") == [f"{run_id}.inner"]
        waiting = read_attributes(cluster, f"{run_id}.inner")
        assert waiting["ShotclockStatus"] == "waiting" and waiting["ShotclockStep"] == ["ask"]
        assert read_attributes(cluster, run_id)["ShotclockStatus"] == "running"
        (proposal,) = [
            each["id"] for each in runs.call("inbox", "list")[1]["data"]["proposals"] if "Well?" in str(each)
        ]
        assert runs.call("inbox", "approve", proposal, "--answer", "yes")[0] == 0
        assert running.ended()[0] == 0
        ended = read_attributes(cluster, f"{run_id}.inner")
        assert ended == {"ShotclockRun": "inner", "ShotclockStatus": "succeeded", "ShotclockEnding": "OK"}
    finally:
        runs.close()


@pytest.mark.slow
def test_a_namespace_without_them_takes_runs_all_the_same(cluster: Cluster, tmp_path: Path) -> None:
    namespace = f"bare-{time.monotonic_ns()}"
    url = f"{cluster.url}/{namespace}"

    async def register(client: Client) -> None:
        request = RegisterNamespaceRequest(
            namespace=namespace, workflow_execution_retention_period=Duration(seconds=86_400)
        )
        await client.workflow_service.register_namespace(request, timeout=LIMIT)

    async def find(client: Client) -> list[str] | None:
        try:
            [each async for each in client.list_workflows(rpc_timeout=LIMIT)]
        except RPCError:
            return None  # the namespace is not known everywhere yet
        return await TemporalEngine(read_address(url, {})).find_attributes()

    on_engine(cluster.url, register)
    wait_until(lambda: on_engine(url, find) == [], "the namespace")
    worker = cluster.start_worker(url=url)
    runs = Runs(tmp_path, url)
    try:
        code, envelope = runs.run("steps: {one: {type: command, exec: echo one}}")
        assert code == 0, envelope
    finally:
        runs.close()
        worker.stop()


@pytest.mark.slow
def test_none_is_set_where_what_is_sent_is_encrypted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_attributes(cluster) == list(TYPES)
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    assert find_attributes(cluster) == []


def test_the_clock_of_the_run_comes_before_that_of_a_step() -> None:
    def fired(owner: str) -> dict[str, Any]:
        return {"code": "TIMEOUT", "context": {"clock": {"kind": "timeout", "owner": owner}}}

    ended = describe_end({"error": fired("run a")}, [None, {"code": "EXEC_FAILED"}, fired("step b")])
    assert {key.name: value for key, value in ended.items()}["ShotclockClock"] == "timeout of run a"


@pytest.mark.slow
def test_an_engine_that_does_not_answer_once_is_asked_again(link: Proxy) -> None:
    async def main() -> None:
        engine = TemporalEngine(read_address(link.url, {}))
        await engine.client()
        link.cut()
        assert await engine.find_attributes() == []
        with pytest.raises(Failure, match="does not list its runs"):
            await engine._find_run("never-begun")
        link.mend()
        while not await engine.find_attributes():
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), WITHIN_S))
