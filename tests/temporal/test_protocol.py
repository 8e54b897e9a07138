"""Both engines implement the Engine protocol: one test uses every method of it."""

import asyncio
import contextlib
import time
from typing import Any

import pytest

from shotclock.calls.control_channel import RunOrder
from shotclock.calls.principal import Principal
from shotclock.core.errors import Failure
from shotclock.core.proposal import Decision, Proposal, ProposalStatus
from shotclock.flows.engines import EmbeddedEngine, Engine
from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.run.runs import RunCaller, RunRequest
from shotclock.flows.run.state import Status
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from shotclock.temporal._engine import TemporalEngine
from shotclock.temporal.connection import read_address
from tests.temporal.conftest import WITHIN_S, Runs

pytestmark = pytest.mark.slow

ASKS: dict[str, Any] = {"timeout": 100, "steps": {"ask": {"type": "human-input", "prompt": "Well?"}}}


YES = Decision(ProposalStatus.APPROVED, answer="yes")


async def decide(engine: Engine, run_id: str, proposal_id: str) -> Proposal:
    if isinstance(engine, TemporalEngine):
        return await engine.decide(run_id, proposal_id, YES, Principal.local())
    assert isinstance(engine, EmbeddedEngine)
    inbox = Inbox(engine.store)
    try:
        return await inbox.decide(proposal_id, YES, Principal.local())
    finally:
        await inbox.close()


async def use(engine: Engine, runs: Runs) -> None:
    run_id, me = f"protocol-{time.monotonic_ns()}", Principal.local()
    file = runs.folder / "flow.yaml"
    request = RunRequest(WorkflowFile.model_validate(ASKS), str(file), runs.folder, run_id)
    parked: Any = await engine.start(request, RunCaller(budget_ms=500))
    assert parked.code == "INCOMPLETE", parked
    assert (await engine.progress(run_id)).status is Status.PARKED
    assert await engine.wait(run_id, time.monotonic_ns() + 10**8) is None
    (asked,) = parked.data["waiting"]
    decided = await decide(engine, run_id, asked["proposal_id"])
    assert decided.status is ProposalStatus.APPROVED and decided.decided_by == me.name
    with pytest.raises(Failure) as second:
        await decide(engine, run_id, asked["proposal_id"])
    assert second.value.code == "ALREADY_DECIDED"
    ended: Any = await engine.resume(run_id, RunCaller())
    assert ended.ok and ended.data["steps"]["ask"]["output"] == "yes", ended
    again: Any = await engine.wait(run_id, None)
    assert again.to_dict() == ended.to_dict()
    cancelled: Any = await engine.cancel(run_id)
    assert cancelled.to_dict() == ended.to_dict(), "an ended run stays as it is"
    assert (await engine.report(run_id[:-1])).status is Status.SUCCEEDED, "the beginning of an id is enough"
    with pytest.raises(Failure, match="has ended"):
        await engine.order(RunOrder(run_id, None, me.name, 1_000))
    assert run_id in [run.run_id for run in await engine.list_runs(100)]
    for missing in (engine.progress("none"), engine.report("none"), engine.wait("none", None)):
        with pytest.raises(Failure) as unknown:
            await missing
        assert unknown.value.code == "RUN_NOT_FOUND"


def test_every_method_of_the_protocol_answers_alike(on_either: Runs) -> None:
    with contextlib.ExitStack() as stack:
        engine: Engine
        if on_either.on is None:
            engine = EmbeddedEngine(stack.enter_context(Store.open(on_either.folder / "home")))
        else:
            engine = TemporalEngine(read_address(on_either.on, {}))
        asyncio.run(asyncio.wait_for(use(engine, on_either), WITHIN_S))
