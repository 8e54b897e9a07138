"""Running work, for the operators' page: runs with their steps, jobs, and calls of this server.

GET  /api/running            POST /api/running/extend    by_ms, and the target: run (with step), job or request_id
                             POST /api/running/stop      the target, reason, within_ms

The store knows the work, the process that runs it knows its clocks. The work of a process that does not answer is shown
without clocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.clocks import ProcessIdentity
from ...core.errors import Failure
from ...inbox.access import Principal, Role
from ...inbox.proposal_json import mistake, read_number
from ...process.clock import wall_time
from ...process.kernel import is_alive, this_process
from ...runtime.control import live_calls
from ...runtime.control_channel import ask_holder, extend, find_calls, list_calls, wind_down
from ...store.jobs import Job
from ...store.runs import StoredRun
from ...store.store import Store
from ...workflow.engine import RunOrder
from .responses import answer_request, answering, principal_of, read_body

if TYPE_CHECKING:
    from ...temporal.front_end import FrontEnd

MOST_LISTED = 100
MOST_STEPS = 500
LOOK_LIMIT_S = 1.0  # for one process to list its calls. A process that is stopped does not answer
Calls = list[dict[str, Any]]
LONGEST_MS = 10 * 365 * 24 * 3600 * 1000


class RunningCalls:
    def __init__(self, store: Callable[[], Store], engine: FrontEnd | None = None) -> None:
        self._store = store
        self._engine = engine

    def routes(self) -> list[Route]:
        return [
            Route("/api/running", answering("running", self._list), methods=["GET"]),
            Route("/api/running/{what:str}", self._change, methods=["POST"]),
        ]

    async def _list(self, request: Request, principal: Principal) -> dict[str, Any]:
        principal.must_be_operator("see what runs")
        store = self._store()
        runs, jobs = await asyncio.to_thread(_read_store, store)
        holders = {run.holder for run in runs} | {job.runner for job in jobs if job.runner is not None}
        calls = await _list_calls_of(store, holders)
        shown = [
            _describe_run(run, await asyncio.to_thread(store.runs.steps, run.id), calls.get(run.holder)) for run in runs
        ]
        engine = describe_engine(self._engine, principal)
        if self._engine is not None and engine is not None:
            try:
                found, silent = await self._engine.list_runs(MOST_LISTED)
                shown += [_describe_run(*run) for run in found]
                engine["problem"] = f"no worker answers for {silent} runs" if silent else None
            except Failure as failure:
                engine["problem"] = str(failure)
        # Calls of clients of this server, without the calls inside them.
        own = {id for id, call in live_calls.items() if call.request is not None and call.inside_of is None}
        return {
            "now": wall_time().iso(),
            "engine": engine,
            "runs": shown,
            "jobs": [_describe_job(job, calls.get(job.runner) if job.runner else None) for job in jobs],
            "calls": [call for call in list_calls() if call["request_id"] in own],
        }

    async def _change(self, request: Request) -> Response:
        what, principal = request.path_params["what"], principal_of(request)

        async def work() -> dict[str, Any]:
            principal.must_be_operator("extend and stop what runs")
            if what not in ("extend", "stop"):
                raise Failure("UNKNOWN_OPERATION", f"{what[:40]!r} cannot be done with running work; extend or stop it")
            body = await read_body(request)
            by_ms = read_number(body.get("by_ms"), "by_ms", 1, LONGEST_MS) if what == "extend" else None
            return await self._order(body, by_ms, principal)

        return await answer_request(f"running {what[:20]}", work(), mutates=True)

    async def _order(self, body: dict[str, Any], by_ms: int | None, by: Principal) -> dict[str, Any]:
        """Extend the named work by `by_ms`, or wind it down if None. Raises Failure if it is not running."""
        named = {key: body[key] for key in ("run", "job", "step", "request_id") if body.get(key) is not None}
        is_target = bool(named.keys() & {"run", "job", "request_id"})
        if not is_target or not all(isinstance(value, str) for value in named.values()):
            raise mistake("run", "name a run, job or request_id, as text")
        reason = str(body.get("reason") or "")
        within_ms = body.get("within_ms")
        if within_ms is not None:
            within_ms = read_number(within_ms, "within_ms", 0, LONGEST_MS)
        if "request_id" in named and named["request_id"] in live_calls:
            calls = find_calls({"request_id": named["request_id"]})
            if by_ms is None:
                return await wind_down(calls, by.name, reason, within_ms)
            return await extend(calls, by_ms, by.name)
        store = self._store()
        run_id = named.get("run") or named.get("job") or ""
        order = RunOrder(run_id, named.get("step"), by.name, by_ms, within_ms, reason)
        if "run" in named and self._engine is not None and store.runs.get(run_id) is None:
            return await self._engine.order(order)
        holder = await asyncio.to_thread(_find_holder, store, named)
        return await asyncio.to_thread(ask_holder, store.home, holder, order.as_request())


def describe_engine(engine: FrontEnd | None, to: Principal) -> dict[str, object] | None:
    """Return the engine's address and problem; None without an engine, and for agents."""
    return None if engine is None or to.role is Role.AGENT else {"url": engine.url, "problem": engine.problem}


def _read_store(store: Store) -> tuple[list[StoredRun], list[Job]]:
    runs = [run for run in store.runs.list_open(MOST_LISTED) if is_alive(run.holder)]
    jobs = [job for job in store.jobs.list(None, True, MOST_LISTED) if job.runner is None or is_alive(job.runner)]
    return runs, jobs


def _find_holder(store: Store, named: dict[str, str]) -> ProcessIdentity:
    if "run" in named:
        run = store.runs.get(named["run"])
        if run is None or run.ended_at is not None or run.parked_at is not None:
            raise Failure("CALL_NOT_FOUND", f"run {named['run'][:80]!r} is not running")
        return run.holder
    job = store.jobs.get(named["job"]) if "job" in named else None
    if job is None or not job.is_active or job.runner is None:
        raise Failure("CALL_NOT_FOUND", "it is not running any more")
    return job.runner


async def _list_calls_of(
    store: Store, holders: Iterable[ProcessIdentity]
) -> dict[ProcessIdentity, list[dict[str, Any]]]:
    """Return the calls of each process, asked concurrently, without those that do not answer."""
    me = this_process()

    async def look(holder: ProcessIdentity) -> tuple[ProcessIdentity, Calls | None]:
        if holder == me:
            return holder, list_calls()
        try:
            answer = await asyncio.to_thread(ask_holder, store.home, holder, {"do": "list"}, LOOK_LIMIT_S)
        except Failure:
            return holder, None
        return holder, answer["calls"]

    found = await asyncio.gather(*map(look, holders))
    return {holder: calls for holder, calls in found if calls is not None}


def _describe_run(run: StoredRun, records: dict[str, Any], calls: Calls | None) -> dict[str, Any]:
    own = next((call for call in calls or () if call.get("run_id") == run.id), None)
    tries: dict[str, Calls] = {}
    for call in calls or ():
        if own is not None and call["parent"] == own["request_id"]:
            tries.setdefault(str(call["name"]).removeprefix("step "), []).append(call)
    written = run.workflow.get("steps") if isinstance(run.workflow, dict) else None
    names = list(dict.fromkeys([*(written or {}), *records]))
    steps = []
    for name in names[:MOST_STEPS]:
        stored = records[name].record if name in records else {}
        step = {"id": name, "status": stored.get("status", "pending"), "duration_ms": stored.get("duration_ms")}
        steps.append(step | {"overtime": stored.get("overtime") or [], "calls": tries.get(name, [])})
    return {
        "id": run.id,
        "name": run.name,
        "started_at": run.created_at.iso(),
        "deadline_at": None if run.deadline_at is None else run.deadline_at.iso(),
        "call": own,
        "steps": steps,
    }


def _describe_job(job: Job, calls: Calls | None) -> dict[str, Any]:
    return {
        "id": job.id,
        "name": f"{job.app} {job.command}",
        "started_at": job.created_at.iso(),
        "owner": job.owner,
        "call": next((call for call in calls or () if call.get("run_id") == job.id), None),
    }
