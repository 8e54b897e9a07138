"""The proposals and runs of Temporal, as the operators' page of a server shows them. Several servers may show the same.

The engine is the source of truth. Open proposals are copied into the store of the server, where the page finds them.
A decision counts once the run has accepted it; the slower of two servers gets ALREADY_DECIDED.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar

from temporalio.exceptions import TemporalError
from temporalio.service import RPCError

from ..calls.control_channel import RunOrder
from ..calls.principal import Principal
from ..core.errors import Failure
from ..core.proposal import Confirmation, Decision, Proposal, ProposalStatus
from ..core.value_types import JsonObject, value
from ..flows.run.state import Status
from ..people.audit_file import AuditFile
from ..store.proposals import export_proposal
from ..store.runs import StepRecord, StoredRun
from ..store.store import Store
from ..supervise.clock import wall_time
from ._engine import TemporalEngine, make_run
from ._messages import STEP_ACTIVITY
from ._queries import RPC_LIMIT, Progress, read_progress
from .connection import Address

LOOK_S = 1.0
# The limits of one look and of one request. With the body of a request they are shorter than a request may take.
LOOK_LIMIT_S = 6.0
CHANGE_LIMIT_S = 12.0
# The limits of one run's answer, and of all answers of one look. Without a worker a run does not answer.
ANSWER_LIMIT = timedelta(seconds=3)
ANSWERS_LIMIT_S = 4.0
ASKED_AT_ONCE = 16
MOST_RUNS = 500
MOST_ADOPTED = 1_000

T = TypeVar("T")
RunAndCalls = tuple[StoredRun, dict[str, StepRecord], list[JsonObject]]


@value
class ProposalOrigin:
    run_id: str
    step: str


class FrontEnd:
    """The engine, as one server sees it. An error of a look is in `problem`; other methods raise Failure."""

    def __init__(self, address: Address, store: Callable[[], Store]) -> None:
        self._engine = TemporalEngine(address)
        self._store = store
        self._open: dict[str, ProposalOrigin] = {}
        self._has_adopted = False
        self.url: str = str(address)
        self.problem: str | None = "the engine has not answered yet"

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self._look_repeatedly())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=LOOK_LIMIT_S)

    async def _look_repeatedly(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        try:
            silent = await self._within(LOOK_LIMIT_S, self._look())
            self.problem = f"no worker answers for {silent} runs: their proposals are unknown" if silent else None
        except Failure as failure:
            self.problem = str(failure)
        except Exception as error:  # a bug: the page has to show that it does not change any more
            self.problem = f"looking at {self.url} has failed: {type(error).__name__}: {error}"

    async def _within(self, limit_s: float, work: Awaitable[T], code: str = "CONNECT_FAILED") -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            raise Failure(code, f"{self.url} did not answer within {limit_s:g}s") from None
        except RPCError as error:
            raise Failure(code, f"{self.url} does not answer: {error}") from None

    async def _look(self) -> int:
        """Return the number of runs that do not answer."""
        unsent: Failure | None = None
        ids = await self._engine.list_running(MOST_RUNS, only_waiting=True)
        answers = await self._ask(ids)
        waiting = {each["id"]: (run_id, each) for run_id, answer in answers.items() for each in answer["waiting"]}
        shown = {id: each for id, each in waiting.items() if "record" in each[1]}
        if shown:
            unheard = await asyncio.to_thread(self._copy_new, [each for _, each in shown.values()])
            self._open |= {id: ProposalOrigin(run_id, each["step"]) for id, (run_id, each) in shown.items()}
            for record in unheard:
                try:
                    origin = self._open[record["id"]]
                    await self._engine.send_decision(origin.run_id, origin.step, record)
                except Failure as failure:
                    if failure.code != "ALREADY_DECIDED":  # else the run has this decision, or another one
                        unsent = failure
        if not self._has_adopted:
            self._open |= await self._find_left_over()
            self._has_adopted = True
        for id, origin in list(self._open.items()):
            if id not in waiting and (origin.run_id not in ids or origin.run_id in answers):
                await self._settle(id, origin, answers.get(origin.run_id))
        if unsent is not None:  # the next look tries it again
            raise unsent
        return len(ids) - len(answers)

    async def _ask(self, ids: Iterable[str]) -> dict[str, Progress]:
        places, until = asyncio.Semaphore(ASKED_AT_ONCE), asyncio.get_running_loop().time() + ANSWERS_LIMIT_S

        async def ask(run_id: str) -> Progress | None:
            try:
                async with asyncio.timeout_at(until), places:
                    return await read_progress(await self._engine.handle(run_id), ANSWER_LIMIT)
            except Failure as failure:
                # A run that has ended meanwhile has no open proposal.
                return {"waiting": [], "steps": {}} if failure.code == "RUN_NOT_FOUND" else None
            except (TimeoutError, TemporalError):  # its workflow cannot answer
                return None

        asked = list(ids)
        answers = await asyncio.gather(*map(ask, asked))
        return {run_id: progress for run_id, progress in zip(asked, answers, strict=True) if progress is not None}

    def _copy_new(self, packed: list[JsonObject]) -> list[JsonObject]:
        """Copy new proposals. Return those that a command on this machine has decided, in this store alone."""
        store, now = self._store(), wall_time()
        unheard: list[JsonObject] = []
        pending = {each.id for each in store.proposals.list(status=ProposalStatus.PENDING, limit=MOST_ADOPTED)}
        for each in packed:
            if each["id"] in pending:
                continue
            proposal = store.proposals.get(each["id"])
            # A proposal that has ended here stays so: the engine's answer may be older.
            if proposal is not None and proposal.status.is_decided:
                unheard.append(export_proposal(proposal))
            elif proposal is None and each["expires_at"] > now.ms:
                store.proposals.take_over({**each["record"], "status": each["status"]}, now)
        AuditFile(store).catch_up_if_possible()
        return unheard

    async def _find_left_over(self) -> dict[str, ProposalOrigin]:
        """Return the engine's proposals that an earlier server has left open in this store."""

        def read() -> dict[str, str]:
            listed = self._store().proposals.list(status=ProposalStatus.PENDING, limit=MOST_ADOPTED)
            runs = {each.id: self._find_foreign_run(each.id) for each in listed if each.id not in self._open}
            return {id: run_id for id, run_id in runs.items() if run_id is not None}

        left = await asyncio.to_thread(read)
        answers = await self._ask(set(left.values()))
        return {id: ProposalOrigin(run_id, "") for id, run_id in left.items() if answers.get(run_id, {}).get("run_id")}

    async def _settle(self, id: str, origin: ProposalOrigin, progress: Progress | None) -> None:
        """Record the end of a proposal that its run does not wait for any more. `progress` is that of a running run."""
        has_ended = False
        if progress is None:
            has_ended = not await self._engine.is_running(origin.run_id)
            progress = (await self._ask([origin.run_id])).get(origin.run_id)
            if progress is None:
                return  # no worker answers for it now
        decided = progress.get("decided", {}).get(id)
        step = progress["steps"].get(origin.step)
        if decided is None and not has_ended and (step is None or not Status(step["status"]).is_final):
            return  # between two waits of its step
        # Without a decision the step, or its run, was stopped.
        await asyncio.to_thread(self._write_end, id, decided or {"status": ProposalStatus.WITHDRAWN.value})
        self._open.pop(id, None)

    def _write_end(self, id: str, change: Mapping[str, Any]) -> None:
        store = self._store()
        record = store.proposals.export(id)
        if record is not None and record["status"] != change["status"]:
            store.proposals.take_over({**record, **change}, wall_time())
            AuditFile(store).catch_up_if_possible()

    async def has(self, id: str) -> bool:
        """Return whether a proposal belongs to a run of the engine. Look at the engine if that is unknown."""
        if id in self._open:
            return True
        if not self._has_adopted or await asyncio.to_thread(self._find_foreign_run, id) is not None:
            await self.look()
            if self.problem is not None and id not in self._open:
                message = f"it is unknown which engine proposal {id[:100]} belongs to: {self.problem}"
                raise Failure("CONNECT_FAILED", message)
        return id in self._open

    def _find_foreign_run(self, id: str) -> str | None:
        """Return the run of an open proposal if this machine does not have the run: it may be the engine's."""
        store = self._store()
        proposal = store.proposals.get(id)
        if proposal is None or not proposal.is_open:
            return None
        run_id, slash, _ = (proposal.key or "").partition("/")
        return run_id if slash and store.runs.get(run_id) is None else None

    async def decide(
        self, proposal_id: str, decision: Decision, by: Principal, confirmation: Confirmation = Confirmation()
    ) -> Proposal:
        """Decide a proposal of a run, as `Inbox.decide` does. Raises CONNECTION_LOST if it is unknown whether the run
        has the decision."""
        try:
            if (origin := self._open.get(proposal_id)) is None:  # a look has settled it since it was found
                raise Failure("ALREADY_DECIDED", f"{proposal_id} is not open any more")
            deciding = self._engine.decide(origin.run_id, proposal_id, decision, by, confirmation)
            decided = await self._within(CHANGE_LIMIT_S, deciding, "CONNECTION_LOST")
        except Failure as failure:
            if failure.code == "ALREADY_DECIDED":  # the store says by whom after a look
                await self.look()
                (await self._read(proposal_id)).must_be_open()
            raise
        await asyncio.to_thread(self._write_end, proposal_id, export_proposal(decided))
        self._open.pop(proposal_id, None)
        return await self._read(proposal_id)

    async def _read(self, id: str) -> Proposal:
        proposal = await asyncio.to_thread(self._store().proposals.get, id)
        if proposal is None:
            raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id[:100]!r}")
        return proposal

    async def list_runs(self, most: int) -> tuple[list[RunAndCalls], int]:
        return await self._within(LOOK_LIMIT_S, self._list_runs(most))

    async def _list_runs(self, most: int) -> tuple[list[RunAndCalls], int]:
        ids = await self._engine.list_running(most)
        answers = await self._ask(ids)
        runs = []
        for run_id, progress in answers.items():
            if "name" in progress:
                run, records = make_run(run_id, progress)
                # The calls of its steps, from the last heartbeats of their workers.
                client = await self._engine.client()
                described = await client.get_workflow_handle(run_id).describe(rpc_timeout=RPC_LIMIT)
                calls: list[JsonObject] = []
                for pending in described.raw_description.pending_activities:
                    if pending.activity_type.name == STEP_ACTIVITY and pending.heartbeat_details.payloads:
                        (beat,) = await client.data_converter.decode(pending.heartbeat_details.payloads)
                        calls += [{**call, "parent": run_id} for call in beat.get("calls", ())]
                runs.append((run, records, [_describe_run_call(run), *calls]))
        return runs, len(ids) - len(answers)

    async def order(self, order: RunOrder) -> JsonObject:
        return await self._within(CHANGE_LIMIT_S, self._engine.order(order), "CONNECTION_LOST")


def _describe_run_call(run: StoredRun) -> JsonObject:
    """Return the call of a run in the form of `describe_call`. Its deadline is on the engine's clock."""
    now, deadline_at = wall_time(), run.deadline_at
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
