"""The routes of the operators' page and its API. The work is the inbox's; here requests are read and answers written.

GET    /api/inbox?status=pending|ended|all&limit=&before=    POST   /api/inbox                  propose
GET    /api/inbox/events                                     POST   /api/inbox/ID/decision
GET    /api/inbox/ID                                         POST   /api/inbox/ID/check         dry run of a decision
GET    /api/inbox/ID/result?wait_ms=                         POST   /api/inbox/ID/extend
POST   /api/inbox/session                                    POST   /api/inbox/ID/withdraw
DELETE /api/inbox/session
GET    /api/running                                          POST   /api/running/extend         by_ms
                                                             POST   /api/running/stop           reason, within_ms

Both take a run (with step), a job or a request_id. The store knows the work that runs, the process that runs it knows
its clocks. The work of a process that does not answer is shown without clocks. Calls of wrapped MCP servers are listed
too; they cannot be changed here.

Changes of the inbox are server-sent events:

    event: hello      the time of the server and the state of the engine, if there is one; sent first
    event: proposal   the summary of a new or changed proposal; its `id` is the number to continue from
    event: reminder   a proposal that expires soon
    event: alive      every 15 s, so that silence means a dead connection; the state of the engine

A reader that returns with `Last-Event-ID` (or `?after=`) gets the changes that it missed. A reader that does not
read is dropped. A stream ends when its token is revoked or its session ends.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from ...calls.control import live_calls
from ...calls.control_channel import RunOrder, ask_holder, find_calls, list_calls
from ...calls.principal import Principal, Role
from ...core.errors import Failure
from ...core.limits import ProcessIdentity, WallTime, format_duration
from ...core.proposal import Confirmation, Proposal, ProposalStatus, Summary
from ...core.value_types import JsonObject, as_dict, replace
from ...dispatch.engines import EngineFront
from ...people.auth import (
    LASTS_MS,
    AuthMiddleware,
    Work,
    address_of,
    answering,
    is_still_known,
    principal_of,
    read_body,
    refusal,
)
from ...people.inbox import Inbox
from ...people.person_wait import describe_proposal, read_response_budget_ms
from ...people.proposal_checks import problems_with_decision
from ...people.proposal_json import (
    compared_with,
    form,
    mistake,
    modified_text,
    read_decision,
    read_number,
    read_request,
    summary,
    whole,
)
from ...store.jobs import Job
from ...store.runs import StoredRun
from ...store.store import Store
from ...store.wrapped_calls import LOST, CallFilter, CallsNow, LoggedCall, OpenCall
from ...supervise.clock import wall_time
from ...supervise.kernel import can_see, is_alive, this_process

HEARTBEAT_S = 15.0
TAKEN_WITHIN_S = 20.0  # for a reader to take one piece
MOST_STREAMS = 256
MOST_STREAMS_EACH = 24


class Streams:
    def __init__(self, inbox: Callable[[], Inbox], engine: EngineFront | None = None) -> None:
        self._inbox = inbox
        self._engine = engine
        self._open: Counter[str] = Counter()
        self.ending: asyncio.Event = asyncio.Event()

    def end(self) -> None:
        self.ending.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        principal = principal_of(request)
        who = f"{principal.role} {principal.name}"
        try:
            after = _after(request)
            if self._open.total() >= MOST_STREAMS or self._open[who] >= MOST_STREAMS_EACH:
                raise Failure("RATE_LIMITED", "too many event streams are open", retry_after_ms=5_000)
            inbox = self._inbox()
        except Failure as failure:
            await refusal("inbox events", failure)(scope, receive, send)
            return
        self._open[who] += 1

        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(TAKEN_WITHIN_S):
                await send(message)

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        try:
            async with aclosing(self._events(inbox, request, principal, after)) as events:
                answer = StreamingResponse(events, headers=headers, media_type="text/event-stream")
                await answer(scope, receive, send_soon)
        except (TimeoutError, OSError):
            pass  # the reader does not read, or has left
        finally:
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]

    async def _events(
        self, inbox: Inbox, request: Request, principal: Principal, after: int | None
    ) -> AsyncGenerator[bytes]:
        changes, ending = aiter(inbox.changes(after)), asyncio.ensure_future(self.ending.wait())
        change = asyncio.ensure_future(anext(changes))
        text = event("hello", {"now": wall_time().iso(), "engine": describe_engine(self._engine, principal)})
        try:
            # Unbounded on purpose: a stream lasts until its reader leaves or does not read, or the server stops.
            while not ending.done():
                if text:
                    if not await is_still_known(request):
                        return
                    yield text
                await asyncio.wait([change, ending], timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if change.done():
                    text = _describe(change.result(), principal)
                    change = asyncio.ensure_future(anext(changes))
                else:
                    text = event("alive", {"engine": describe_engine(self._engine, principal)})
        except StopAsyncIteration:
            pass  # the inbox is closed
        finally:
            change.cancel()
            ending.cancel()
            await asyncio.wait([change, ending], timeout=TAKEN_WITHIN_S)


def _after(request: Request) -> int | None:
    written = request.headers.get("last-event-id") or request.query_params.get("after")
    if not written:
        return None
    if not (written.isascii() and written.isdecimal() and len(written) < 19):
        raise mistake("after", "the id of the last event is a whole number")
    return int(written)


def _describe(change: Summary | Any, principal: Principal) -> bytes:
    """Return the event for a change; nothing if the principal may not see it."""
    proposal = change if isinstance(change, Summary) else change.proposal
    if not principal.may_see(proposal):
        return b""
    name = "proposal" if isinstance(change, Summary) else "reminder"
    return event(name, summary(proposal, principal), proposal.seq)


def event(name: str, data: JsonObject, seq: int | None = None) -> bytes:
    id_line = "" if seq is None else f"id: {seq}\n"
    return f"{id_line}event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


MOST_LISTED = 500
MOST_RUNNING = 100
MOST_STEPS = 500
LOOK_LIMIT_S = 1.0  # for one process to list its calls. A process that is stopped does not answer
Calls = list[JsonObject]
LONGEST_MS = 10 * 365 * 24 * 3600 * 1000


class Operators:
    """The routes of one server. `served` names its App; `inbox` opens the inbox when first needed."""

    auth: AuthMiddleware  # set when the middleware is put before these routes

    def __init__(
        self, served: str, inbox: Callable[[], Inbox], store: Callable[[], Store], engine: EngineFront | None = None
    ) -> None:
        self._served = served
        self._engine = engine
        self._store = store
        self._inbox = inbox
        self._files = StaticFiles(directory=Path(__file__).parent / "page")
        self._streams = Streams(inbox, engine)
        self._budget_ms = read_response_budget_ms()

    def end_waits(self) -> None:
        """End the event streams and answer the waiting requests: the server is about to stop."""
        self._streams.end()

    def routes(self) -> list[BaseRoute]:
        def route(method: str, path: str, name: str, work: Work, **options: Any) -> Route:
            return Route(f"/api/inbox{path}", answering(f"inbox {name}", work, **options), methods=[method])

        def change(name: str, work: Work) -> Route:
            return Route(f"/api/running/{name}", answering(f"running {name}", work, mutates=True), methods=["POST"])

        wait_ms = self._budget_ms
        return [
            Route("/", self._page, methods=["GET"]),
            Route("/inbox", self._page, methods=["GET"]),
            Mount("/page", self._files),
            route("GET", "", "list", self._list),
            route("POST", "", "propose", self._propose, mutates=True, idempotent=True, wait_ms=wait_ms),
            Route("/api/inbox/session", self._session, methods=["POST", "DELETE"]),
            Route("/api/inbox/events", self._streams, methods=["GET"]),
            route("GET", "/{id}", "show", self._get),
            route("GET", "/{id}/result", "check", self._result, wait_ms=wait_ms),
            route("POST", "/{id}/decision", "decide", self._decide, mutates=True),
            route("POST", "/{id}/check", "check decision", self._check),
            route("POST", "/{id}/extend", "extend", self._extend, mutates=True),
            route("POST", "/{id}/withdraw", "withdraw", self._withdraw, mutates=True),
            Route("/api/running", answering("running", self._list_running), methods=["GET"]),
            change("extend", self._extend_running),
            change("stop", self._stop_running),
            Route("/api/{rest:path}", self._nowhere, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]

    async def _nowhere(self, request: Request) -> Response:
        failure = Failure("UNKNOWN_OPERATION", f"{request.method} {request.url.path[:100]} is not part of this API")
        return refusal("api", failure)

    async def _page(self, request: Request) -> Response:
        key = request.query_params.get("key")
        if key is None or key == "used" or request.method != "GET":
            return await self._files.get_response("index.html", request.scope)
        link = self.auth.link
        if link is None or not self.auth.site.is_direct(request.headers) or not link.use(key):
            return RedirectResponse("/?key=used", 303, {"Cache-Control": "no-store"})
        cookie = self.auth.sessions.begin(Principal.local().name, wall_time())
        # The proof is in the fragment, which neither servers nor other pages see.
        where = f"/#proof={self.auth.sessions.proof(cookie)}"
        answer = RedirectResponse(where, 303, {"Cache-Control": "no-store"})
        self._set_cookie(answer, request, cookie)
        return answer

    def _set_cookie(self, answer: Response, request: Request, cookie: str) -> None:
        answer.set_cookie(
            self.auth.cookie_name,
            cookie,
            max_age=LASTS_MS // 1000 if cookie else 0,
            path="/",
            secure=request.headers.get("x-forwarded-proto") == "https",
            httponly=True,
            samesite="strict",
        )

    async def _session(self, request: Request) -> Response:
        cookie = ""

        async def work(request: Request, _: Principal) -> JsonObject:
            nonlocal cookie
            if request.method == "DELETE":
                await self.auth.end_session(request.headers)
                return {"signed_in": False}
            token = (await read_body(request)).get("token")
            signed_in = await self.auth.authenticate(token if isinstance(token, str) else "", address_of(request.scope))
            principal, id, expires_at = signed_in
            if principal.role is not Role.OPERATOR:
                raise Failure("NOT_ALLOWED", f"{principal.name} is an agent: this page is for operators")
            cookie = self.auth.sessions.begin(principal.name, wall_time(), token_id=id, until=expires_at)
            return {"principal": _principal(principal), "proof": self.auth.sessions.proof(cookie)}

        answer = await answering("inbox session", work)(request)
        if cookie or (request.method == "DELETE" and answer.status_code == 200):
            self._set_cookie(answer, request, cookie)
        return answer

    async def _list(self, request: Request, principal: Principal) -> JsonObject:
        query = request.query_params
        wanted = query.get("status", "all")
        if wanted not in ("pending", "ended", "all"):
            raise mistake("status", "must be pending, ended or all")
        found = await self._inbox().list(
            status=ProposalStatus.PENDING if wanted == "pending" else None,
            ended=wanted == "ended",
            asked_by=None if principal.role is Role.OPERATOR else principal.name,
            limit=read_number(query.get("limit", "200"), "limit", 1, MOST_LISTED),
            before_seq=read_number(query["before"], "before", 0, 2**62) if "before" in query else None,
        )
        newest = await self._inbox().list(limit=1)
        return {
            "served": self._served,
            "principal": _principal(principal),
            "sign_in": ["token"] if self.auth.link is None else ["link", "token"],
            "now": wall_time().iso(),
            "seq": newest[0].seq if newest else 0,
            "proposals": [summary(proposal, principal) for proposal in found],
            "engine": describe_engine(self._engine, principal),
        }

    async def _get(self, request: Request, principal: Principal) -> JsonObject:
        return await self._compared(await self._find_visible(request, principal), principal)

    async def _compared(self, proposal: Proposal, principal: Principal) -> JsonObject:
        """Return the whole proposal, compared to the file as it is now."""
        compared = await asyncio.to_thread(compared_with, proposal, principal)
        return {"proposal": whole(proposal, principal, compared, await self._inbox().find_last_use(proposal))}

    async def _find_visible(self, request: Request, principal: Principal) -> Proposal:
        """Raises PROPOSAL_NOT_FOUND unless the principal may see it."""
        id = request.path_params["id"]
        proposal = await self._inbox().get(id)
        if proposal is None or not principal.may_see(proposal):
            raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id[:100]!r}")
        return proposal

    async def _result(self, request: Request, principal: Principal) -> JsonObject:
        """Return the state of a proposal to its proposer, after at most the wait."""
        wait_ms = self._wait_ms(request.query_params.get("wait_ms", "0"))
        proposal = await self._find_visible(request, principal)
        return describe_proposal(await self._wait_for_decision(proposal, wait_ms))

    async def _wait_for_decision(self, proposal: Proposal, wait_ms: int) -> Proposal:
        """Return the proposal once decided, or unchanged if the wait or the server ends first."""
        if not proposal.is_open or self._streams.ending.is_set():
            return proposal
        waiting = asyncio.ensure_future(self._inbox().wait(proposal.id, wait_ms))
        ending = asyncio.ensure_future(self._streams.ending.wait())
        try:
            await asyncio.wait((waiting, ending), return_when=asyncio.FIRST_COMPLETED)  # bounded by the wait
            return waiting.result() if waiting.done() else proposal
        finally:
            waiting.cancel()
            ending.cancel()

    def _wait_ms(self, written: object) -> int:
        return min(self._budget_ms, read_number(written, "wait_ms", 0, 2**53))

    async def _propose(self, request: Request, principal: Principal) -> JsonObject:
        body = await read_body(request)
        wait_ms = self._wait_ms(body.pop("wait_ms", 0))
        key = _text_or_none(body, "idempotency_key")
        proposal = await self._inbox().propose(read_request(body), principal, key=key)
        return describe_proposal(await self._wait_for_decision(proposal, wait_ms))

    async def _decide(self, request: Request, principal: Principal) -> JsonObject:
        principal.must_be_operator()
        body = await read_body(request)
        action_hash, typed = body.pop("action_hash", None), _text_or_none(body, "confirmation")
        if not isinstance(action_hash, str):
            raise mistake("action_hash", "required: that of the proposal you looked at")
        id = request.path_params["id"]
        is_engines = self._engine is not None and await self._engine.has(id)
        decide = self._engine.decide if self._engine is not None and is_engines else self._inbox().decide
        decider = replace(principal, via="HTTP")
        decision = read_decision(body)
        proposal = await decide(id, decision, decider, Confirmation(action_hash, typed))
        return {"proposal": whole(proposal, principal, None, await self._inbox().find_last_use(proposal))}

    async def _check(self, request: Request, principal: Principal) -> JsonObject:
        principal.must_be_operator()
        body = await read_body(request)
        decision = read_decision({key: body[key] for key in body if key not in ("action_hash", "confirmation")})
        proposal = await self._find_visible(request, principal)
        errors = problems_with_decision(proposal.ask, decision)
        is_deep = any(error["field"] == "arguments" for error in errors)  # or cannot be shown for another reason
        return {
            "errors": errors,
            "modified": None if is_deep else modified_text(proposal.ask, decision),
            "form": [] if is_deep else form(proposal.ask, decision.arguments or {}),
        }

    async def _extend(self, request: Request, principal: Principal) -> JsonObject:
        principal.must_be_operator()
        by_ms = read_number((await read_body(request)).get("by_ms"), "by_ms", 1, 2**53)
        id = request.path_params["id"]
        await self._must_not_be_of_engine(id, "extended")
        return await self._compared(await self._inbox().extend(id, by_ms, principal), principal)

    async def _withdraw(self, request: Request, principal: Principal) -> JsonObject:
        await read_body(request)
        proposal = await self._find_visible(request, principal)
        await self._must_not_be_of_engine(proposal.id, "withdrawn")
        return describe_proposal(await self._inbox().withdraw(proposal.id, principal))

    async def _must_not_be_of_engine(self, id: str, what: str) -> None:
        if self._engine is not None and await self._engine.has(id):
            message = f"{id} is asked by a run on {self._engine.url}: it can be decided, but not be {what}"
            raise Failure("NOT_EXTENDABLE" if what == "extended" else "NOT_ALLOWED", message)

    async def _list_running(self, request: Request, principal: Principal) -> JsonObject:
        principal.must_be_operator("see what runs")
        store = self._store()
        runs, jobs = await asyncio.to_thread(_read_store, store)
        wrapped = await asyncio.to_thread(read_calls, store)
        holders = {run.holder for run in runs} | {job.runner for job in jobs if job.runner is not None}
        calls = await _list_calls_of(store, holders)
        shown = [
            _describe_run(run, await asyncio.to_thread(store.runs.steps, run.id), calls.get(run.holder)) for run in runs
        ]
        engine = describe_engine(self._engine, principal)
        if self._engine is not None and engine is not None:
            try:
                found, silent = await self._engine.list_runs(MOST_RUNNING)
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
            **describe_calls(wrapped, wall_time()),
        }

    async def _extend_running(self, request: Request, principal: Principal) -> JsonObject:
        principal.must_be_operator("extend what runs")
        body = await read_body(request)
        return await self._order(body, read_number(body.get("by_ms"), "by_ms", 1, LONGEST_MS), principal)

    async def _stop_running(self, request: Request, principal: Principal) -> JsonObject:
        principal.must_be_operator("stop what runs")
        return await self._order(await read_body(request), None, principal)

    async def _order(self, body: JsonObject, by_ms: int | None, by: Principal) -> JsonObject:
        """Extend the named work by `by_ms`, or wind it down if None. Raises Failure if it is not running."""
        named = {key: body[key] for key in ("run", "job", "step", "request_id") if body.get(key) is not None}
        is_target = bool(named.keys() & {"run", "job", "request_id"})
        if not is_target or not all(isinstance(value, str) for value in named.values()):
            raise mistake("run", "name a run, job or request_id, as text")
        reason = str(body.get("reason") or "")
        within_ms = body.get("within_ms")
        if within_ms is not None:
            within_ms = read_number(within_ms, "within_ms", 0, LONGEST_MS)
        run_id = named.get("run") or named.get("job") or ""
        order = RunOrder(run_id, named.get("step"), by.name, by_ms, within_ms, reason)
        if "request_id" in named and named["request_id"] in live_calls:
            return await order.act_on(find_calls({"request_id": named["request_id"]}))
        store = self._store()
        if "run" in named and self._engine is not None and store.runs.get(run_id) is None:
            return await self._engine.order(order)
        holder = await asyncio.to_thread(_find_holder, store, named)
        return await asyncio.to_thread(ask_holder, store.home, holder, order.as_request())


def _text_or_none(body: JsonObject, key: str) -> str | None:
    value = body.pop(key, None)
    if not isinstance(value, str | None):
        raise mistake(key, "must be text")
    return value


def _principal(principal: Principal) -> dict[str, str]:
    return {"name": principal.name, "role": principal.role.value}


def describe_engine(engine: EngineFront | None, to: Principal) -> dict[str, object] | None:
    """Return the engine's address and problem; None without an engine, and for agents."""
    return None if engine is None or to.role is Role.AGENT else {"url": engine.url, "problem": engine.problem}


def _read_store(store: Store) -> tuple[list[StoredRun], list[Job]]:
    runs = [run for run in store.runs.list_open(MOST_RUNNING) if is_alive(run.holder)]
    jobs = [job for job in store.jobs.list(None, True, MOST_RUNNING) if job.runner is None or is_alive(job.runner)]
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


async def _list_calls_of(store: Store, holders: Iterable[ProcessIdentity]) -> dict[ProcessIdentity, list[JsonObject]]:
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


def _describe_run(run: StoredRun, records: JsonObject, calls: Calls | None) -> JsonObject:
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
        step["waits_for"] = stored.get("waits_for", [])
        steps.append(step | {"overtime": stored.get("overtime") or [], "calls": tries.get(name, [])})
    return {
        "id": run.id,
        "name": run.name,
        "started_at": run.created_at.iso(),
        "deadline_at": None if run.deadline_at is None else run.deadline_at.iso(),
        "call": own,
        "steps": steps,
    }


def _describe_job(job: Job, calls: Calls | None) -> JsonObject:
    return {
        "id": job.id,
        "name": f"{job.app} {job.command}",
        "started_at": job.created_at.iso(),
        "owner": job.owner,
        "call": next((call for call in calls or () if call.get("run_id") == job.id), None),
    }


LATELY_MS = 3_600_000
MOST_OPEN = 100
MOST_FAILED = 50


def read_calls(store: Store) -> CallsNow:
    return store.calls.look(CallFilter(failed=True), MOST_FAILED, is_alive)


def describe_calls(found: CallsNow, now: WallTime) -> JsonObject:
    """Return the open calls, and those that failed or were lost lately, the newest first."""
    shown = found.open[:MOST_OPEN]
    open_calls = CallsNow(shown, (), ()).describe_open(now, can_see)
    failed = [(call.started_at + call.duration_ms, _describe_ended(call)) for call in found.ended]
    failed += [(call.started_at, _describe_lost(call, now)) for call in found.lost]
    failed.sort(key=lambda each: each[0].ms, reverse=True)
    lately = [row for at, row in failed if now.ms - at.ms <= LATELY_MS]
    return {
        "wrapped": [
            {**row, "id": _id_of(call), "more": _command("--running", call)}
            for call, row in zip(shown, open_calls, strict=True)
        ],
        "wrapped_count": len(found.open),
        "failed": lately[:MOST_FAILED],
        "failed_has_more": len(lately) >= MOST_FAILED,
        "failed_command": f"shotclock mcp log --failed --since {format_duration(LATELY_MS)}",
    }


def _id_of(call: OpenCall) -> str:
    return f"open-{call.holder.pid}-{call.holder.started}-{call.number}"


def _describe_ended(call: LoggedCall) -> JsonObject:
    ended_at = call.started_at + call.duration_ms
    id = call.call_id or f"call-{call.pid}-{call.started_at.ms}-{call.duration_ms}-{call.request_bytes}"
    row = {**as_dict(call), "started_at": call.started_at.iso(), "ended_at": ended_at.iso()}
    return {**row, "id": f"failed-{id}", "more": _command("--failed", call)}


def _describe_lost(call: OpenCall, now: WallTime) -> JsonObject:
    row = call.describe(now, LOST)
    return {**row, "ended_at": None, "id": f"failed-{_id_of(call)}", "more": _command("--failed", call)}


def _command(selection: str, call: LoggedCall | OpenCall) -> str:
    """Return the command that lists this call and similar ones, quoted for a shell."""
    pattern = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in call.tool)
    return shlex.join(["shotclock", "mcp", "log", selection, f"--server={call.server}", f"--tool={pattern}"])
