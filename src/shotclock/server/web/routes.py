"""The routes of the page and its API. What they do is the inbox's; here requests are read and answers written.

GET    /api/inbox?status=pending|ended|all&limit=&before=    POST   /api/inbox                  propose
GET    /api/inbox/events                                     POST   /api/inbox/ID/decision
GET    /api/inbox/ID                                         POST   /api/inbox/ID/check         would it be taken?
GET    /api/inbox/ID/result?wait_ms=                         POST   /api/inbox/ID/extend
POST   /api/inbox/session                                    POST   /api/inbox/ID/withdraw
DELETE /api/inbox/session

Changes of the inbox are server-sent events, for as long as somebody reads them:

    event: hello      what time it is here, and how the engine is, if there is one; sent first
    event: proposal   the summary of one that is new or changed; its `id` is the number to go on from
    event: reminder   one that expires soon
    event: alive      every 15 s, so that silence means that the connection is dead; how the engine is

Whoever comes back with `Last-Event-ID` (or `?after=`) gets what was missed. Whoever does not read is let go of, and may
come back the same way. Whose token was revoked, or session has ended, is told nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...core.errors import Failure
from ...core.proposal import Decision, Proposal, ProposalStatus, Summary, problems_with_decision
from ...core.value_types import replace
from ...inbox.access import Principal, Role
from ...inbox.inbox import Inbox
from ...inbox.person_wait import describe_proposal, read_response_budget_ms
from ...inbox.proposal_json import (
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
from ...process.clock import wall_time
from ...store.store import Store
from .auth import LASTS_MS, AuthMiddleware, is_still_known, principal_of
from .responses import answer_request, read_body, refusal
from .running import RunningCalls, describe_engine

if TYPE_CHECKING:
    from ...temporal.front_end import FrontEnd

HEARTBEAT_S = 15.0
# How many changes are read ahead for one reader, and how long one piece may take to be taken from us. What is not read
# ahead stays where it is, in the store.
MOST_WAITING = 256
TAKEN_WITHIN_S = 20.0
MOST_STREAMS = 256
MOST_STREAMS_EACH = 24


class Streams:
    """The readers of events of one server. ASGI application of the events' address."""

    def __init__(self, inbox: Any, engine: FrontEnd | None = None) -> None:
        self._inbox = inbox
        self._engine = engine
        self._open: Counter[str] = Counter()
        self._ending = asyncio.Event()

    def end(self) -> None:
        """End every stream at once: the server is about to leave."""
        self._ending.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        principal = principal_of(request)
        who = f"{principal.role} {principal.name}"
        try:
            after = _after(request)
            if self._open.total() >= MOST_STREAMS or self._open[who] >= MOST_STREAMS_EACH:
                raise Failure("RATE_LIMITED", "too many event streams are open", retry_after_ms=5_000)
            inbox: Inbox = self._inbox()
        except Failure as failure:
            await refusal("inbox events", failure)(scope, receive, send)
            return
        self._open[who] += 1
        try:
            await _Stream(inbox, request, after, self._ending, self._engine).run(receive, send)
        finally:
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]


def _after(request: Request) -> int | None:
    said = request.headers.get("last-event-id") or request.query_params.get("after")
    if not said:
        return None
    if not (said.isascii() and said.isdecimal() and len(said) < 19):
        raise mistake("after", "the id of the last event is a whole number")
    return int(said)


class _Stream:
    """One reader of events."""

    def __init__(
        self, inbox: Inbox, request: Request, after: int | None, ending: asyncio.Event, engine: FrontEnd | None
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._request = request
        self._principal = principal_of(request)
        self._after = after
        self._ending = ending
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)

    async def run(self, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        tasks = [
            asyncio.ensure_future(work)
            for work in (self._read(), self._write(send), _until_gone(receive), self._ending.wait())
        ]
        try:
            # Unbounded on purpose: a stream lasts until its reader goes, or does not read, or the server leaves.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=TAKEN_WITHIN_S)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(TAKEN_WITHIN_S):
                await send({"type": "http.response.body", "body": b""})
        for task in tasks:  # what went wrong is said where bugs are said
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and not isinstance(error, _TooSlow | OSError):
                raise error

    async def _read(self) -> None:
        await self._waiting.put(
            event("hello", {"now": wall_time().iso(), "engine": describe_engine(self._engine, self._principal)})
        )
        async for change in self._inbox.changes(self._after):
            proposal = change if isinstance(change, Summary) else change.proposal
            if not self._principal.may_see(proposal):
                continue
            said = summary(proposal, self._principal)
            name = "proposal" if isinstance(change, Summary) else "reminder"
            await self._waiting.put(event(name, said, proposal.seq))  # as fast as it is taken, which is bounded below

    async def _write(self, send: Send) -> None:
        while True:  # not with wait_for, which in Python 3.11 may swallow that we are to end
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    text = await self._waiting.get()
            except TimeoutError:
                text = event("alive", {"engine": describe_engine(self._engine, self._principal)})
            while not self._waiting.empty():
                text += self._waiting.get_nowait()
            if not await is_still_known(self._request):
                return
            try:
                async with asyncio.timeout(TAKEN_WITHIN_S):
                    await send({"type": "http.response.body", "body": text, "more_body": True})
            except TimeoutError:
                raise _TooSlow from None


class _TooSlow(Exception):
    """The reader does not read."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(name: str, data: dict[str, Any], seq: int | None = None) -> bytes:
    id_line = "" if seq is None else f"id: {seq}\n"
    return f"{id_line}event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


MOST_LISTED = 500
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

Endpoint = Callable[[Request], Awaitable[Response]]


class Pages:
    """The page's own files, read once."""

    def __init__(self) -> None:
        folder = resources.files(__package__) / "page"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith(tuple(TYPES))}
        self._tags = {name: f'"{hashlib.sha256(content).hexdigest()[:20]}"' for name, content in self._files.items()}

    def answer(self, name: str, request: Request) -> Response:
        content = self._files.get(name)
        if content is None:
            failure = Failure("FILE_NOT_FOUND", f"the page has no {name[:100]!r}")
            return refusal("page", failure)
        headers = {"ETag": self._tags[name], "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == self._tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=TYPES[name.rpartition(".")[2]])


class Operators:
    """The routes of one server. `served` is its name; `inbox` opens it when it is first needed."""

    def __init__(
        self, served: str, inbox: Callable[[], Inbox], store: Callable[[], Store], engine: FrontEnd | None = None
    ) -> None:
        self._served = served
        self._engine = engine
        self._running = RunningCalls(store, engine)
        self._inbox = inbox
        self._pages = Pages()
        self._streams = Streams(inbox, engine)
        self._budget_ms = read_response_budget_ms()
        self._waits: set[asyncio.Future[Proposal]] = set()
        self._is_ending = False
        self.auth_middleware: AuthMiddleware | None = None
        """Set by whoever puts it before us."""

    def end_waits(self) -> None:
        """Let go of those who read events, and answer those who wait for a decision: the server is about to leave."""
        self._is_ending = True
        self._streams.end()
        for waiting in self._waits:
            waiting.cancel()

    def routes(self) -> list[Route]:
        api = "/api/inbox"
        return [
            Route("/", self._page, methods=["GET"]),
            Route("/inbox", self._page, methods=["GET"]),
            Route("/page/{name}", self._file, methods=["GET"]),
            Route(api, self._either(self._list, self._propose), methods=["GET", "POST"]),
            Route(f"{api}/session", self._session, methods=["POST", "DELETE"]),
            Route(f"{api}/events", self._streams, methods=["GET"]),
            Route(f"{api}/{{id}}", self._get, methods=["GET"]),
            Route(f"{api}/{{id}}/result", self._result, methods=["GET"]),
            Route(f"{api}/{{id}}/decision", self._decide, methods=["POST"]),
            Route(f"{api}/{{id}}/check", self._check, methods=["POST"]),
            Route(f"{api}/{{id}}/extend", self._extend, methods=["POST"]),
            Route(f"{api}/{{id}}/withdraw", self._withdraw, methods=["POST"]),
            *self._running.routes(),
            Route("/api/{rest:path}", self._nowhere, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]

    async def _nowhere(self, request: Request) -> Response:
        failure = Failure("UNKNOWN_OPERATION", f"{request.method} {request.url.path[:100]} is not part of this API")
        return refusal("api", failure)

    @staticmethod
    def _either(get: Endpoint, post: Endpoint) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await (post if request.method == "POST" else get)(request)

        return endpoint

    # --- the page -------------------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        key = request.query_params.get("key")
        auth_middleware = self.auth_middleware
        if key is None or key == "used" or auth_middleware is None or request.method != "GET":
            return self._pages.answer("index.html", request)
        if (
            auth_middleware.link is None
            or not auth_middleware.is_direct(request.headers)
            or not auth_middleware.link.use(key)
        ):
            return RedirectResponse("/?key=used", 303, {"Cache-Control": "no-store"})
        cookie = auth_middleware.sessions.begin(Principal.local().name, wall_time())
        # The other half goes to the page in the fragment, which neither servers nor other pages get to see.
        answer = RedirectResponse(
            f"/#proof={auth_middleware.sessions.proof(cookie)}", 303, {"Cache-Control": "no-store"}
        )
        self._give(answer, request, cookie)
        return answer

    async def _file(self, request: Request) -> Response:
        return self._pages.answer(request.path_params["name"], request)

    def _give(self, answer: Response, request: Request, cookie: str) -> None:
        assert self.auth_middleware is not None
        answer.set_cookie(
            self.auth_middleware.cookie_name,
            cookie,
            max_age=LASTS_MS // 1000 if cookie else 0,
            path="/",
            secure=request.headers.get("x-forwarded-proto") == "https",
            httponly=True,
            samesite="strict",
        )

    async def _session(self, request: Request) -> Response:
        auth_middleware = self.auth_middleware
        assert auth_middleware is not None
        if request.method == "DELETE":

            async def sign_out() -> dict[str, Any]:
                await auth_middleware.end_session(request.headers)
                return {"signed_in": False}

            answer = await answer_request("inbox session", sign_out())
            if answer.status_code == 200:
                self._give(answer, request, "")
            return answer
        cookie = ""

        async def work() -> dict[str, Any]:
            nonlocal cookie
            token = (await read_body(request)).get("token")
            address = request.client.host if request.client else "?"
            principal, id, expires_at = await auth_middleware.authenticate(
                token if isinstance(token, str) else "", address
            )
            if principal.role is not Role.OPERATOR:
                raise Failure("NOT_ALLOWED", f"{principal.name} is an agent: this page is for operators")
            cookie = auth_middleware.sessions.begin(principal.name, wall_time(), token_id=id, until=expires_at)
            return {"principal": _principal(principal), "proof": auth_middleware.sessions.proof(cookie)}

        answer = await answer_request("inbox session", work())
        if cookie:
            self._give(answer, request, cookie)
        return answer

    # --- looking --------------------------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        principal = principal_of(request)

        async def work() -> dict[str, Any]:
            wanted = request.query_params.get("status", "all")
            if wanted not in ("pending", "ended", "all"):
                raise mistake("status", "must be pending, ended or all")
            limit = read_number(request.query_params.get("limit", "200"), "limit", 1, MOST_LISTED)
            said = request.query_params.get("before")
            before = None if said is None else read_number(said, "before", 0, 2**62)
            found = await self._inbox().list(
                status=ProposalStatus.PENDING if wanted == "pending" else None,
                ended=wanted == "ended",
                asked_by=None if principal.role is Role.OPERATOR else principal.name,
                limit=limit,
                before_seq=before,
            )
            seen = await self._inbox().list(limit=1)
            return {
                "served": self._served,
                "principal": _principal(principal),
                "sign_in": ["link", "token"]
                if self.auth_middleware is not None and self.auth_middleware.link is not None
                else ["token"],
                "now": wall_time().iso(),
                "seq": seen[0].seq if seen else 0,
                "proposals": [summary(proposal, principal) for proposal in found],
                "engine": describe_engine(self._engine, principal),
            }

        return await answer_request("inbox list", work())

    async def _get(self, request: Request) -> Response:
        principal = principal_of(request)

        async def work() -> dict[str, Any]:
            proposal = await self._find_visible(request)
            return {"proposal": whole(proposal, principal, await asyncio.to_thread(compared_with, proposal, principal))}

        return await answer_request("inbox show", work())

    async def _find_visible(self, request: Request) -> Proposal:
        """Return the proposal. Raises PROPOSAL_NOT_FOUND unless the principal may see it."""
        id = request.path_params["id"]
        proposal = await self._inbox().get(id)
        if proposal is None or not principal_of(request).may_see(proposal):
            raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id[:100]!r}")
        return proposal

    async def _result(self, request: Request) -> Response:
        """Answer whoever asked, in the one shape, after at most the wait."""
        try:
            wait_ms = self._wait_ms(request.query_params.get("wait_ms", "0"))
        except Failure as failure:
            return refusal("inbox check", failure)

        async def work() -> dict[str, Any]:
            proposal = await self._find_visible(request)
            return describe_proposal(await self._wait_for_decision(proposal, wait_ms))

        return await answer_request("inbox check", work(), wait_ms=wait_ms)

    async def _wait_for_decision(self, proposal: Proposal, wait_ms: int) -> Proposal:
        """Return the proposal once it is decided, or as it was where the wait, or the server, ends before that."""
        if not proposal.is_open or self._is_ending:  # it may have been proposed, or looked up, meanwhile
            return proposal
        waiting = asyncio.ensure_future(self._inbox().wait(proposal.id, wait_ms))
        self._waits.add(waiting)
        try:
            await asyncio.wait((waiting,))  # bounded by the wait
        finally:
            self._waits.discard(waiting)
            waiting.cancel()
        return proposal if waiting.cancelled() else waiting.result()

    def _wait_ms(self, said: object) -> int:
        return min(self._budget_ms, read_number(said, "wait_ms", 0, 2**53))

    # --- asking and deciding --------------------------------------------------------------------------------

    async def _propose(self, request: Request) -> Response:
        principal = principal_of(request)
        try:
            said = await read_body(request)
            wait_ms = self._wait_ms(said.pop("wait_ms", 0))
            key = said.pop("idempotency_key", None)
            if not isinstance(key, str | None):
                raise mistake("idempotency_key", "must be text")
        except Failure as failure:
            return refusal("inbox propose", failure)

        async def work() -> dict[str, Any]:
            proposal = await self._inbox().propose(read_request(said), principal, key=key)
            return describe_proposal(await self._wait_for_decision(proposal, wait_ms))

        return await answer_request("inbox propose", work(), mutates=True, idempotent=True, wait_ms=wait_ms)

    async def _decide(self, request: Request) -> Response:
        principal = principal_of(request)

        async def work() -> dict[str, Any]:
            principal.must_be_operator()
            said = await read_body(request)
            action_hash, confirmation = said.pop("action_hash", None), said.pop("confirmation", None)
            if not isinstance(action_hash, str):
                raise mistake("action_hash", "required: that of the proposal you looked at")
            if not isinstance(confirmation, str | None):
                raise mistake("confirmation", "must be text")
            id = request.path_params["id"]
            is_engines = self._engine is not None and await self._engine.has(id)
            decide = self._engine.decide if self._engine is not None and is_engines else self._inbox().decide
            proposal = await decide(
                id,
                read_decision(said),
                replace(principal, via="HTTP"),
                action_hash=action_hash,
                confirmation=confirmation,
            )
            return {"proposal": whole(proposal, principal)}

        return await answer_request("inbox decide", work(), mutates=True)

    async def _check(self, request: Request) -> Response:
        principal = principal_of(request)

        async def work() -> dict[str, Any]:
            principal.must_be_operator()
            said = await read_body(request)
            said.pop("action_hash", None)
            said.pop("confirmation", None)
            decision: Decision = read_decision(said)
            proposal = await self._find_visible(request)
            errors = problems_with_decision(proposal, decision)
            is_deep = any(error["field"] == "arguments" for error in errors)  # or otherwise nothing to be shown
            return {
                "errors": errors,
                "modified": None if is_deep else modified_text(proposal.ask, decision),
                "form": [] if is_deep else form(proposal.ask, decision.arguments or {}),
            }

        return await answer_request("inbox check decision", work())

    async def _extend(self, request: Request) -> Response:
        principal = principal_of(request)

        async def work() -> dict[str, Any]:
            principal.must_be_operator()
            by_ms = read_number((await read_body(request)).get("by_ms"), "by_ms", 1, 2**53)
            await self._must_not_be_of_engine(request.path_params["id"], "extended")
            proposal = await self._inbox().extend(request.path_params["id"], by_ms, principal)
            return {"proposal": whole(proposal, principal, await asyncio.to_thread(compared_with, proposal, principal))}

        return await answer_request("inbox extend", work(), mutates=True)

    async def _withdraw(self, request: Request) -> Response:
        principal = principal_of(request)

        async def work() -> dict[str, Any]:
            await read_body(request)
            proposal = await self._find_visible(request)
            await self._must_not_be_of_engine(proposal.id, "withdrawn")
            return describe_proposal(await self._inbox().withdraw(proposal.id, principal))

        return await answer_request("inbox withdraw", work(), mutates=True)

    async def _must_not_be_of_engine(self, id: str, what: str) -> None:
        if self._engine is not None and await self._engine.has(id):
            message = f"{id} is asked by a run on {self._engine.url}: it can be decided, but not be {what}"
            raise Failure("NOT_EXTENDABLE" if what == "extended" else "NOT_ALLOWED", message)


def _principal(principal: Principal) -> dict[str, str]:
    return {"name": principal.name, "role": principal.role.value}
