"""Admission of HTTP requests to the page, the API and MCP, and their answers: an envelope, or problem details
(RFC 9457) that carry one.

    Host       one of the server's, else 421    against pages that make their name point here (DNS rebinding)
    Origin     none or the server's, else 403   against other pages in the operator's browser
    principal  by a token or an operator's session; directly from this machine the anonymous agent; else 401
               a token is one of the store, or one of the configured issuer (issuer.py)
    rate       per principal, else 429          and per address for wrong tokens
    length     a body that is too large is refused before it is read: 413

A wrong token is always refused, and never treated as none.

An operator's browser signs in by a link with a key that works once, which the server prints on its own machine, or by
an operator's token. It gets a cookie, which no script can read, and a *proof*, which the page keeps for its own origin
and sends with every request. A cookie alone is sent to every port of a host, so a server of an agent on this machine
could collect it; the proof also keeps other pages from sending requests.

Both are signed with a key in the store's directory, so a session survives a restart. A session that was signed out is
kept in the store until it would have expired.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, HTTPConnection, Request, cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..calls.call import Call, Effects, Outcome, Tool, admit, answer
from ..calls.outcomes import outcome_of_error, timeout_problem
from ..calls.principal import ANONYMOUS, Principal, Role
from ..core.envelope import Envelope
from ..core.errors import Ending, Failure, error_entry
from ..core.limits import Clocks, WallTime
from ..core.value_types import JsonObject, value
from ..store.home import load_private_key, make_private_directory
from ..store.store import Store
from ..supervise.clock import TokenBucket, monotonic_ns, wall_time
from .access import TOKEN_PREFIX, Access
from .addresses import Site
from .authorisation import METADATA_PATH
from .person_wait import refusal_outcome
from .proposal_json import mistake, parse_object

if TYPE_CHECKING:
    from .issuer import Issuer

KEY_FILE = "operators.key"
LASTS_MS = 30 * 24 * 60 * 60 * 1000


@value
class Session:
    id: str
    name: str
    expires_at: WallTime
    token_id: str | None = None  # the token that began it, if any: the session ends with it


class Sessions:
    """Sessions of operators' browsers. Raises Failure if their key cannot be stored."""

    def __init__(self, home: Callable[[], Path]) -> None:
        self._home = home

    def begin(self, name: str, now: WallTime, *, token_id: str | None = None, until: WallTime | None = None) -> str:
        expires_at = min(now + LASTS_MS, until or now + LASTS_MS)
        content = json.dumps([name, expires_at.ms, token_id, secrets.token_hex(8)]).encode()
        body = base64.urlsafe_b64encode(content).decode().rstrip("=")
        return f"{body}.{self._sign('cookie', body)}"

    def proof(self, cookie: str) -> str:
        return self._sign("proof", cookie)

    def look(self, cookie: str, proof: str, now: WallTime) -> Session | None:
        """Return the session if cookie and proof are valid, belong together and have not expired."""
        body, _, mac = cookie.partition(".")
        if not hmac.compare_digest(mac.encode(), self._sign("cookie", body).encode()):
            return None
        if not hmac.compare_digest(proof.encode("utf-8", "replace"), self.proof(cookie).encode()):
            return None
        try:
            content = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
            session = Session(content[3], content[0], WallTime(content[1]), content[2])
        except (ValueError, TypeError, IndexError, binascii.Error):
            return None
        return session if now < session.expires_at else None

    def _sign(self, what: str, text: str) -> str:
        return hmac.new(self._key, f"{what} {text}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    @cached_property
    def _key(self) -> bytes:
        return load_private_key(make_private_directory(self._home()) / KEY_FILE)


class Link:
    """The key in the printed link. It works once; then `say` gets the next one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.key: str = secrets.token_urlsafe(24)

    def use(self, key: str) -> bool:
        if not hmac.compare_digest(key.encode("utf-8", "replace"), self.key.encode()):
            return False
        self.key = secrets.token_urlsafe(24)
        self._say(self.key)
        return True


MOST_REMEMBERED = 4_096  # principals and addresses whose rate is kept. Clients cannot invent them

KNOWN_HOSTS = 64  # host headers whose check is kept. Invented ones only displace each other
IS_STILL = "shotclock.is_still"
PROOF_HEADER = "shotclock-proof"

MCP_PATH = "/mcp"
SESSION_PATH = "/api/inbox/session"
BODY_LIMIT = 4 * 1024 * 1024  # a proposed and a current file of a megabyte each, escaped in JSON; the limit of MCP
SMALL_BODY_LIMIT = 64 * 1024
# Requests at once, and more each second.
API_RATE = (200, 20.0)  # a person with two pages and a script stays far below this
MCP_RATE = (1_000, 100.0)  # for MCP from other machines only
WRONG_TOKEN_RATE = (20, 0.5)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


async def is_still_known(request: HTTPConnection) -> bool:
    """Return whether the sender is still the same principal: an event stream may outlive a token."""
    look: Callable[[], Awaitable[bool]] = request.scope[IS_STILL]
    return await look()


class AuthMiddleware:
    """ASGI middleware around all routes. `most_each` requests of one agent run at once."""

    def __init__(
        self,
        app: ASGIApp,
        site: Site,
        store: Callable[[], Store],
        link: Link | None,
        most_each: int,
        issuer: Issuer | None = None,
    ) -> None:
        self._app = app
        self._issuer = issuer
        self.site = site
        self._answers_to = lru_cache(KNOWN_HOSTS)(site.answers_to)
        self._store = store
        self.sessions: Sessions = Sessions(lambda: store().home)
        self.link = link
        self._api, self._mcp, self._wrong = map(_allowances, (API_RATE, MCP_RATE, WRONG_TOKEN_RATE))
        self._most_each = most_each
        self._answering: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            headers = Headers(scope=scope)
            self._check_names(scope, headers)
            path, length = scope["path"], headers.get("content-length", "0")
            is_large = path in (MCP_PATH, "/api/inbox") or path.endswith(("/decision", "/check"))
            limit = BODY_LIMIT if is_large else SMALL_BODY_LIMIT
            if not length.isdecimal() or int(length[:20]) > limit:
                raise _too_large(limit)
            principal = await self._admit(scope, headers)
            scope[PRINCIPAL] = principal
            scope[IS_STILL] = partial(self._is_still, principal, scope, headers)
            if principal != ANONYMOUS:
                owner = AccessToken(token="", client_id=f"{principal.role} {principal.name}", scopes=[])
                scope["user"] = AuthenticatedUser(owner)  # the owner of a session of MCP
            with self._place(principal, path) as take_place:
                # MCP has its own limit, and would turn an error while receiving into a 500.
                body = _Body(receive, None if path == MCP_PATH else limit, take_place)
                await self._app(scope, body, answer)
        except Failure as failure:
            if not answer.started:
                name = f"{scope['method']} {scope['path']}"[:100]
                await refusal(name, failure)(scope, receive, answer)
        except ClientDisconnect:
            pass  # the client left before it had sent the whole request

    @contextlib.contextmanager
    def _place(self, principal: Principal, path: str) -> Iterator[Callable[[], None]]:
        """Hold a place of an agent once its request is whole: waiting requests must not block the operator's page."""
        if principal.role is Role.OPERATOR or is_public(path):
            yield lambda: None
            return
        who = f"{principal.role} {principal.name}"
        if self._answering[who] >= self._most_each:
            message = f"{self._most_each} of your requests are being answered already: try again in a moment"
            raise Refused("RATE_LIMITED", message, retry_after_ms=1_000)
        has_place = False

        def take() -> None:
            nonlocal has_place
            has_place = True
            self._answering[who] += 1

        try:
            yield take
        finally:
            if has_place:
                self._answering[who] -= 1
                if not self._answering[who]:
                    del self._answering[who]

    def _check_names(self, scope: Scope, headers: Headers) -> None:
        if len(headers.getlist("host")) != 1 or not self._answers_to(headers["host"]):
            raise Refused("HOST_REFUSED", f"this server is not {headers.get('host', '')[:100]!r}")
        for origin in headers.getlist("origin"):
            if not self.site.knows_page(origin, headers["host"], from_here=scope["path"] == MCP_PATH):
                raise Refused("ORIGIN_REFUSED", f"pages from {origin[:100]!r} may not ask this server")
        foreign = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
        if foreign and scope["path"] != MCP_PATH:  # browsers send it even where they leave out the Origin
            raise Refused("ORIGIN_REFUSED", "pages from other sites may not ask this server")

    async def _admit(self, scope: Scope, headers: Headers) -> Principal:
        path = scope["path"]
        if is_public(path):
            return ANONYMOUS
        principal = await self._principal(headers, address_of(scope))
        if path != MCP_PATH:
            _count(self._api(f"{principal.role} {principal.name}"))
        elif not self.site.is_direct(headers):
            _count(self._mcp(f"{principal.role} {principal.name}"))
        return principal

    async def _principal(self, headers: Headers, address: str) -> Principal:
        credentials = headers.getlist("authorization")
        if credentials:
            kind, _, token = credentials[0].partition(" ")
            if len(credentials) > 1 or kind.lower() != "bearer":
                raise self._challenged(Failure("TOKEN_INVALID", "send one header: Authorization: Bearer TOKEN"))
            token = token.strip()
            if self._issuer is None or token.startswith(TOKEN_PREFIX):
                return (await self.authenticate(token, address))[0]
            try:
                return await self._issuer.authenticate(token)
            except Failure as failure:  # not counted as a guess: an expired token must get 401, to be renewed
                raise self._challenged(failure, _OAUTH_ERRORS.get(failure.code, "")) from None
        if (session := await self._session(headers)) is not None:
            return session
        if self.site.is_direct(headers):
            return ANONYMOUS
        unless = "" if self.site.wants_token else " that does not come directly from its own machine"
        raise self._challenged(Failure("TOKEN_INVALID", f"this server requires a token with every request{unless}"))

    def _challenged(self, failure: Failure, error: str = "") -> Refused:
        """Return a refusal that says in its headers how to get a token."""
        challenge = 'Bearer realm="shotclock"'
        if self._issuer is not None:
            challenge = self._issuer.challenge(error, str(failure) if error else "")
        headers = {"WWW-Authenticate": challenge}
        return Refused(failure.code, str(failure), headers=headers, retry_after_ms=failure.retry_after_ms)

    async def _is_still(self, principal: Principal, scope: Scope, headers: Headers) -> bool:
        try:
            return await self._principal(headers, address_of(scope)) == principal
        except Refused:
            return False
        except Failure:  # the store cannot be read now, and so has no news to protect
            return True

    async def authenticate(self, token: str, address: str) -> tuple[Principal, str, WallTime | None]:
        """Return principal, token id and expiry. Raises Refused. A flood of wrong tokens keeps no valid one out."""
        store, now = self._store(), wall_time()
        principal = await asyncio.to_thread(Access(store).authenticate, token, now)
        found = None if principal is None else await asyncio.to_thread(store.tokens.get, token.split("_")[2])
        if principal is None or found is None:
            _count(self._wrong(address))
            unknown = Failure("TOKEN_INVALID", "this token is not known, or was revoked, or has expired")
            raise self._challenged(unknown, "invalid_token")
        return principal, found.id, found.expires_at

    async def _session(self, headers: Headers) -> Principal | None:
        session, now = self._look(headers), wall_time()
        if session is None or await asyncio.to_thread(self._store().tokens.has_ended, session.id):
            return None
        if session.token_id is None:
            return Principal(session.name, Role.OPERATOR) if self.site.is_direct(headers) else None
        token = await asyncio.to_thread(self._store().tokens.get, session.token_id)
        if token is None or not token.is_active(now):
            return None
        return Principal(token.name, Role(token.role))

    async def end_session(self, headers: Headers) -> None:
        if (session := self._look(headers)) is not None:
            await asyncio.to_thread(self._store().tokens.end_session, session.id, session.expires_at, wall_time())

    def _look(self, headers: Headers) -> Session | None:
        proof, cookie = headers.get(PROOF_HEADER), cookie_parser(headers.get("cookie", "")).get(self.cookie_name)
        return self.sessions.look(cookie, proof, wall_time()) if cookie and proof else None

    @property
    def cookie_name(self) -> str:
        """The name has the port, because browsers share cookies between ports."""
        return f"shotclock-inbox-{self.site.port}"


def _allowances(rate: tuple[int, float]) -> Callable[[str], TokenBucket]:
    """Return the allowance of each principal or address, as long as it is remembered."""
    return lru_cache(MOST_REMEMBERED)(lambda who: TokenBucket(*rate))


def _count(allowance: TokenBucket) -> None:
    if wait_ms := allowance.take():
        raise Refused("RATE_LIMITED", "too many requests: try again in a moment", retry_after_ms=wait_ms)


_OAUTH_ERRORS = {"TOKEN_INVALID": "invalid_token", "NOT_ALLOWED": "insufficient_scope"}  # RFC 6750


def is_public(path: str) -> bool:
    """Return whether a path needs no principal: the page's files, signing in, and where to get a token."""
    return path in ("/", "/inbox", SESSION_PATH) or path.startswith(("/page/", METADATA_PATH))


def address_of(scope: Scope) -> str:
    return str((scope.get("client") or ("?",))[0])


def _too_large(limit: int) -> Refused:
    # The rest is not read, so the connection cannot be used again.
    return Refused("REQUEST_TOO_LARGE", f"a request may have {limit} bytes here", headers={"Connection": "close"})


class _Body:
    """The body of a request, counted as it arrives. Raises ClientDisconnect and Refused."""

    def __init__(self, receive: Receive, limit: int | None, on_whole: Callable[[], None]) -> None:
        self._receive = receive
        self._limit = limit
        self._read = 0
        self._is_whole = False
        self._on_whole = on_whole

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_whole:
            raise ClientDisconnect
        self._read += len(message.get("body", b""))
        if self._limit is not None and self._read > self._limit:
            raise _too_large(self._limit)
        if not self._is_whole and not message.get("more_body", False):
            self._is_whole = True
            self._on_whole()
        return message


_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


class _Answer:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        if not self.started:
            self.started = True
            own = list(message.get("headers", ()))
            named = {name.lower() for name, _ in own}
            message["headers"] = own + [header for header in _RAW_HEADERS if header[0] not in named]
        await self._send(message)


# For one request, beside the time that it waits for a person. Only a disk that hangs takes this long.
REQUEST_LIMIT_MS = 25_000
BODY_WITHIN_S = 15.0  # for a body to arrive. Only a client that sends it byte by byte takes this long
SERVED = Tool(is_served=True)
PRINCIPAL = "shotclock.principal"


def principal_of(request: HTTPConnection) -> Principal:
    principal = request.scope.get(PRINCIPAL, ANONYMOUS)
    return principal if isinstance(principal, Principal) else ANONYMOUS


class Refused(Failure):
    def __init__(
        self, code: str, message: str, *, headers: Mapping[str, str] | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(code, message, retry_after_ms=retry_after_ms)
        self.headers = headers


Work = Callable[[Request, Principal], Awaitable[Mapping[str, Any]]]


def answering(
    name: str, work: Work, *, mutates: bool = False, idempotent: bool = False, wait_ms: int = 0
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers on time. Passes on a cancellation and ClientDisconnect."""
    clocks = Clocks(timeout_ms=REQUEST_LIMIT_MS + wait_ms, grace_ms=0)

    async def endpoint(request: Request) -> Response:
        admission = admit(name, clocks, effects=Effects(mutates, idempotent), tool=SERVED)
        outcome = await _outcome(admission, work(request, principal_of(request)))
        return make_response(answer(admission, outcome), _headers_of(outcome.value))

    return endpoint


async def _outcome(admission: Call, work: Awaitable[Mapping[str, Any]]) -> Outcome:
    limit_s = admission.bound.limit_ms / 1000
    try:
        async with asyncio.timeout(limit_s) as clock:
            return Outcome(Ending.FINISHED, data=dict(await work))
    except TimeoutError as error:
        if clock.expired():
            return Outcome(Ending.ABANDONED, timeout_problem(admission, monotonic_ns() - admission.started_ns))
        return outcome_of_error(error)
    except Failure as failure:
        return refusal_outcome(failure)
    except ClientDisconnect:
        raise
    except Exception as error:
        return outcome_of_error(error)


def refusal(name: str, failure: Failure) -> Response:
    return make_response(answer(admit(name, Clocks()), refusal_outcome(failure)), _headers_of(failure))


def _headers_of(failure: object) -> Mapping[str, str] | None:
    return failure.headers if isinstance(failure, Refused) else None


def make_response(envelope: Envelope, headers: Mapping[str, str] | None = None) -> Response:
    all_headers: dict[str, str] = {"Cache-Control": "no-store", **(headers or {})}
    if envelope.error is None:
        pending = isinstance(envelope.data, dict) and envelope.data.get("status") == "pending"
        return Response(_text(envelope.to_dict()), 202 if pending else 200, all_headers, "application/json")
    code = str(envelope.error["code"])
    entry = error_entry(code)
    problem: dict[str, object] = {
        "type": f"urn:shotclock:error:{code}",
        "title": entry.summary,
        "status": entry.http_status,
        "detail": envelope.error["message"],
        "envelope": envelope.to_dict(),
    }
    if (retry_after_ms := envelope.error.get("retry_after_ms")) is not None:
        all_headers["Retry-After"] = str(-(-int(str(retry_after_ms)) // 1000))
    return Response(_text(problem), entry.http_status, all_headers, "application/problem+json")


def _text(plain: object) -> bytes:
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


async def read_body(request: Request) -> JsonObject:
    """Return the JSON object in the body. A page of another site cannot send its type (CORS)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        content = await asyncio.wait_for(request.body(), BODY_WITHIN_S)
    except TimeoutError:
        raise Failure("ARG_ERROR", f"the body did not arrive within {BODY_WITHIN_S:g} s") from None
    if not content:
        return {}
    if kind != "application/json":
        raise mistake("content-type", "must be application/json")
    return parse_object(content)
