"""What the runs of an engine ask people, and how far they are, as a server shows it that several may stand beside.

The engine has the truth. What its runs ask is written down in the store of the server, where the page finds it like
any other proposal; a decision counts once the run has taken it, and of two servers one is told that it came too late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar

from temporalio.client import Client
from temporalio.exceptions import TemporalError
from temporalio.service import RPCError

from ..core.clocks import WallTime
from ..core.errors import Failure
from ..core.proposal import (
    Decision,
    Proposal,
    ProposalStatus,
    apply_decision,
    check_decision,
    must_be_open,
)
from ..core.value_types import value
from ..inbox.access import Principal
from ..inbox.audit_file import AuditFile
from ..process.clock import wall_time
from ..store.proposals import export_proposal
from ..store.runs import Run, StepRecord
from ..store.store import Store
from ..workflow.state import Status
from .client import RPC_LIMIT, is_running, list_running, make_run, read_progress, send_decision, send_order
from .connection import Address, connect
from .messages import STEP_ACTIVITY, Order
from .proposals import pack_record

# How soon is seen what a run asks, or what was decided elsewhere.
LOOK_S = 1.0
# All that is asked of the engine for one look, or for one request. One that is gone, or runs without a worker, runs it
# out. Together with the body of a request it is shorter than what a request may take.
LOOK_LIMIT_S = 6.0
CHANGE_LIMIT_S = 12.0
# Without a worker nobody answers for a run.
ANSWER_LIMIT = timedelta(seconds=3)
ASK_LIMIT_S = 4.0
# So many runs are asked at a time, and listed at most.
ASKED_AT_ONCE = 16
MOST_RUNS = 500
MOST_ADOPTED = 1_000

T = TypeVar("T")
RunAndCalls = tuple[Run, dict[str, StepRecord], list[dict[str, Any]]]


@value
class Asked:
    """Where a proposal comes from."""

    run_id: str
    step: str


class FrontEnd:
    """The engine, as one server sees it. What goes wrong with looking is `problem`; all else raises Failure."""

    def __init__(self, address: Address, store: Callable[[], Store]) -> None:
        self._address = address
        self._store = store
        self._client: Client | None = None
        self._open: dict[str, Asked] = {}
        """What is not known to be over, by the id of the proposal."""
        self._has_adopted = False
        self.problem: str | None = "the engine has not answered yet"

    @property
    def url(self) -> str:
        return str(self._address)

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Look at the engine again and again, while this is entered."""
        task = asyncio.ensure_future(self._look_on())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=LOOK_LIMIT_S)

    async def _look_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Write down what the runs ask, and what has become of what they asked."""
        try:
            silent = await self._within(LOOK_LIMIT_S, self._look())
            self.problem = f"no worker answers for {silent} runs: what they ask is not known" if silent else None
        except Failure as failure:
            self.problem = str(failure)
        except Exception as error:  # ours: those who look at the page are to know that it does not change any more
            self.problem = f"looking at {self._address} has failed: {type(error).__name__}: {error}"

    async def _within(self, limit_s: float, work: Awaitable[T], code: str = "CONNECT_FAILED") -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            raise Failure(code, f"{self._address} did not answer within {limit_s:g}s") from None
        except RPCError as error:
            raise Failure(code, f"{self._address} does not answer: {error}") from None

    async def _connect(self) -> Client:
        if self._client is None:
            self._client = await connect(self._address)
        return self._client

    # --- proposals ----------------------------------------------------------------------------------------

    async def _look(self) -> int:
        """Return how many runs nobody answers for."""
        client = await self._connect()
        ids = await list_running(client, MOST_RUNS, only_waiting=True)
        told = await self._ask(client, ids)
        found = {each["id"]: (run_id, each) for run_id, run in told.items() for each in run["waiting"]}
        asked = {id: each for id, each in found.items() if "record" in each[1]}
        if asked:
            unheard = await asyncio.to_thread(self._take_new, [each for _, each in asked.values()])
            self._open |= {id: Asked(run_id, each["step"]) for id, (run_id, each) in asked.items()}
            for record in unheard:
                await self._send_unheard(client, self._open[record["id"]], record)
        if not self._has_adopted:
            self._open |= await self._find_left_over(client)
            self._has_adopted = True
        for id, known in list(self._open.items()):
            if id not in found and (known.run_id not in ids or known.run_id in told):
                await self._settle(client, id, known, told.get(known.run_id))
        return len(ids) - len(told)

    async def _ask(self, client: Client, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return how far the runs are that somebody answers for in time."""
        places = asyncio.Semaphore(ASKED_AT_ONCE)

        async def ask(run_id: str) -> tuple[str, dict[str, Any] | None]:
            async with places:
                try:
                    return run_id, await read_progress(client.get_workflow_handle(run_id), ANSWER_LIMIT)
                except Failure as failure:
                    # One that has ended meanwhile asks nothing.
                    ended: dict[str, Any] = {"waiting": [], "steps": {}}
                    return run_id, ended if failure.code == "RUN_NOT_FOUND" else None
                except TemporalError:  # its workflow cannot answer
                    return run_id, None

        asking = [asyncio.ensure_future(ask(run_id)) for run_id in ids]
        if not asking:
            return {}
        try:
            answered, _ = await asyncio.wait(asking, timeout=ASK_LIMIT_S)
        finally:
            for each in asking:
                each.cancel()
        answers = [each.result() for each in answered]
        return {run_id: told for run_id, told in answers if told is not None}

    def _take_new(self, packed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write down what is new. Return what was decided in this very store, and its run has not heard of: a worker
        may use the same one, and what it asks is here before its run has it."""
        store, now = self._store(), wall_time()
        unheard: list[dict[str, Any]] = []
        pending = {each.id for each in store.proposals.list(status=ProposalStatus.PENDING, limit=MOST_ADOPTED)}
        for each in packed:
            if each["id"] in pending:
                continue
            known = store.proposals.get(each["id"])
            # What is over here stays so: the engine may have been asked just before.
            if known is not None and known.status.is_decided:
                unheard.append(export_proposal(known))
            elif known is None and each["expires_at"] > now.ms:
                store.proposals.take_over({**each["record"], "status": each["status"]}, now)
        AuditFile(store).catch_up_if_possible()
        return unheard

    async def _send_unheard(self, client: Client, asked: Asked, record: dict[str, Any]) -> None:
        try:
            await send_decision(client, asked.run_id, pack_record(asked.step, record))
        except Failure as failure:
            if failure.code != "ALREADY_DECIDED":  # then it has heard of it, or of another, which is seen
                raise  # it is tried again at the next look

    async def _find_left_over(self, client: Client) -> dict[str, Asked]:
        """Return what an earlier server, or a worker, has left open in this store, and runs of the engine asked."""

        def read() -> dict[str, str]:
            store = self._store()
            found: dict[str, str] = {}
            for each in store.proposals.list(status=ProposalStatus.PENDING, limit=MOST_ADOPTED):
                proposal = store.proposals.get(each.id)
                if proposal is not None and each.id not in self._open and self._may_be_engines(each.id):
                    found[each.id] = str(proposal.key).partition("/")[0]
            return found

        left = await asyncio.to_thread(read)
        known = await self._ask(client, set(left.values()))
        return {id: Asked(run_id, "") for id, run_id in left.items() if known.get(run_id, {}).get("run_id")}

    async def _settle(self, client: Client, id: str, asked: Asked, told: dict[str, Any] | None) -> None:
        """Write down how a proposal has ended that its run does not wait for any more. `told` is how far the run is,
        unless it has ended."""
        has_ended = False
        if told is None:
            has_ended = not await is_running(client, asked.run_id)
            told = (await self._ask(client, [asked.run_id])).get(asked.run_id)
            if told is None:
                return  # nobody answers for it now
        decided = told.get("decided", {}).get(id)
        step = told["steps"].get(asked.step)
        if decided is None and not has_ended and (step is None or not Status(step["status"]).is_final):
            return  # between two waits of its step
        # Nobody wants to know any more where nobody has decided: the step was stopped, or its run.
        change = decided or {"status": ProposalStatus.WITHDRAWN.value}
        await asyncio.to_thread(self._write_end, id, change)
        self._open.pop(id, None)

    def _write_end(self, id: str, change: Mapping[str, Any]) -> None:
        store = self._store()
        record = store.proposals.export(id)
        if record is not None and record["status"] != change["status"]:
            store.proposals.take_over({**record, **change}, wall_time())
            AuditFile(store).catch_up_if_possible()

    async def has(self, id: str) -> bool:
        """Return whether a run of the engine asked this. Where that is not known, look."""
        if id in self._open:
            return True
        if not self._has_adopted or await asyncio.to_thread(self._may_be_engines, id):
            await self.look()
            if self.problem is not None and id not in self._open:
                raise Failure("CONNECT_FAILED", f"whose proposal {id[:100]} is, is not known: {self.problem}")
        return id in self._open

    def _may_be_engines(self, id: str) -> bool:
        """Return whether an open proposal is that of a run, and of none of this machine."""
        store = self._store()
        proposal = store.proposals.get(id)
        run_id, slash, _ = ((proposal and proposal.key) or "").partition("/")
        return bool(slash) and proposal is not None and proposal.is_open and store.runs.get(run_id) is None

    async def decide(
        self, id: str, decision: Decision, by: Principal, *, action_hash: str | None, confirmation: str | None
    ) -> Proposal:
        """Give a decision to the run that asked, as `Inbox.decide` records it. Raises CONNECTION_LOST where it is not
        known whether the run has taken it."""
        by.must_be_operator("decide")
        asked, proposal = self._open[id], await self._read(id)
        check_decision(proposal, decision, by.name)
        decided = apply_decision(
            proposal,
            decision,
            by.name,
            wall_time(),
            via=by.via or None,
            action_hash=action_hash,
            confirmation=confirmation,
        )
        record = export_proposal(decided)
        client = await self._within(LOOK_LIMIT_S, self._connect())
        try:
            await self._within(
                CHANGE_LIMIT_S, send_decision(client, asked.run_id, pack_record(asked.step, record)), "CONNECTION_LOST"
            )
        except Failure as failure:
            if failure.code != "ALREADY_DECIDED":
                raise
            await self.look()
            must_be_open(await self._read(id))
            raise
        await asyncio.to_thread(self._write_end, id, record)
        self._open.pop(id, None)
        return await self._read(id)

    async def _read(self, id: str) -> Proposal:
        proposal = await asyncio.to_thread(self._store().proposals.get, id)
        if proposal is None:
            raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id[:100]!r}")
        return proposal

    # --- runs ---------------------------------------------------------------------------------------------

    async def list_runs(self, most: int) -> tuple[list[RunAndCalls], int]:
        """Return the runs that are under way, each with its steps, and its calls as the workers last told them; and how
        many there are that nobody answers for. Raises Failure."""
        return await self._within(LOOK_LIMIT_S, self._list_runs(most))

    async def _list_runs(self, most: int) -> tuple[list[RunAndCalls], int]:
        client = await self._connect()
        ids = await list_running(client, most)
        told = await self._ask(client, ids)
        runs = []
        for run_id, each in told.items():
            if "name" in each:
                run, records = make_run(run_id, each)
                runs.append((run, records, [_describe_run_call(run), *await self._read_calls(client, run_id)]))
        return runs, len(ids) - len(told)

    async def _read_calls(self, client: Client, run_id: str) -> list[dict[str, Any]]:
        """Return the calls of a run's steps, from the last heartbeats of their workers."""
        described = await client.get_workflow_handle(run_id).describe(rpc_timeout=RPC_LIMIT)
        calls: list[dict[str, Any]] = []
        for pending in described.raw_description.pending_activities:
            if pending.activity_type.name == STEP_ACTIVITY and pending.heartbeat_details.payloads:
                (beat,) = await client.data_converter.decode(pending.heartbeat_details.payloads)
                calls += [{**call, "parent": run_id} for call in beat.get("calls", ())]
        return calls

    async def send_order(self, order: Order) -> dict[str, Any]:
        """Give a step of a run more time, or wind it or its run down. Raises Failure."""
        client = await self._within(LOOK_LIMIT_S, self._connect())
        sending = send_order(client.get_workflow_handle(order["run_id"]), order)
        return await self._within(CHANGE_LIMIT_S, sending, "CONNECTION_LOST")


def _describe_run_call(run: Run) -> dict[str, Any]:
    """Return the call of a run, as `describe_call` does it. Its deadline is on the engine's clock."""
    now = wall_time()
    deadline_at: WallTime | None = run.deadline_at
    return {
        "request_id": run.id,
        "run_id": run.id,
        "name": f"run {run.name}",
        "kind": "run",
        "parent": None,
        "started_at": run.created_at.iso(),
        "elapsed_ms": max(0, now - run.created_at),
        "timeout_ms": 0 if deadline_at is None else deadline_at - run.created_at,
        "remaining_ms": None if deadline_at is None else max(0, deadline_at - now),
        "soft_ms": None,
        "overtime": None,
        "winding_down": None,
        "progress": None,
    }
