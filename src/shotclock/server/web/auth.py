"""The door: every HTTP request passes it, to the page, to the API and to MCP, and behind it it is known who asks.

    Host       one of ours, else 421       a page elsewhere that made its name point here
    Origin     none, or our own, else 403  a page elsewhere in the operator's browser
    who asks   a token, an operator's browser, straight from this machine else the anonymous agent; else 401
    how often  per principal, else 429     and per address for those who show a wrong token
    how much   a length that is too large is refused before anything of it is read: 413

A wrong token is never taken for none: whoever shows one is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import lru_cache, partial
from http.cookies import CookieError, SimpleCookie

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import Failure
from ...core.walltime import WallTime
from ...inbox.access import Access, Principal, Role
from ...process.clock import wall_time
from ...store.store import Store
from .allowed_origins import Site
from .rate_limit import Buckets, Rate
from .responses import Refused, refusal
from .sessions import Link, Sessions

# Names under which we are asked for; those who make them up only make each other forgotten.
KNOWN_HOSTS = 64
PRINCIPAL = "shotclock.principal"
IS_STILL = "shotclock.is_still"
# Nobody's name: no token can be issued for it.
ANONYMOUS = Principal("(anonymous)", Role.AGENT)
PROOF_HEADER = "shotclock-proof"

MCP_PATH = "/mcp"
SESSION_PATH = "/api/inbox/session"
# A proposed file and the current one, a megabyte each, and what JSON makes of them; as much as MCP takes.
BODY_LIMIT = 4 * 1024 * 1024
SMALL_BODY_LIMIT = 64 * 1024
# A person with two pages open and a script beside them stays far below this; a loop that went wild does not.
API_RATE = Rate(per_second=20, burst=200)
# MCP from elsewhere. On this machine it is not counted: agents here call tools as fast as they like.
MCP_RATE = Rate(per_second=100, burst=1_000)
WRONG_TOKEN_RATE = Rate(per_second=0.5, burst=20)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def principal_of(request: object) -> Principal:
    """Who sent a request: behind the door `request` is Starlette's, which MCP handlers find as `ctx.request`.

    Without one (MCP over stdin and stdout) it is whoever started the server as an agent: anonymous.
    """
    if not isinstance(request, HTTPConnection):
        return ANONYMOUS
    principal = request.scope.get(PRINCIPAL, ANONYMOUS)
    return principal if isinstance(principal, Principal) else ANONYMOUS


async def is_still_known(request: HTTPConnection) -> bool:
    """Whether whoever sent it would be let in as the same now: for answers that last, and outlive a token."""
    look: Callable[[], Awaitable[bool]] = request.scope[IS_STILL]
    return await look()


class AuthMiddleware:
    """ASGI middleware around everything that a server offers over HTTP."""

    def __init__(
        self,
        app: ASGIApp,
        site: Site,
        store: Callable[[], Store],
        sessions: Sessions,
        link: Link | None,
        most_each: int,
    ) -> None:
        """`most_each` requests of one agent may be answered at once."""
        self._app = app
        self._site = site
        self._answers_to = lru_cache(KNOWN_HOSTS)(site.answers_to)
        self._store = store
        self.sessions = sessions
        self.link = link
        self._api = Buckets(API_RATE)
        self._mcp = Buckets(MCP_RATE)
        self._wrong = Buckets(WRONG_TOKEN_RATE)
        self._most_each = most_each
        self._answering: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = _Sent(send)
        try:
            headers = Headers(scope=scope)
            self._check_names(scope, headers)
            limit = _body_limit(scope)
            _check_length(headers, limit)
            principal = await self._admitted(scope, headers)
            scope[PRINCIPAL] = principal
            scope[IS_STILL] = partial(self._is_still, principal, scope, headers)
            if principal != ANONYMOUS:
                scope["user"] = _user(principal)  # a session of MCP belongs to whoever began it
            # MCP counts by itself, and what its receiving raises would become a 500.
            body = _Body(receive, None if scope["path"] == MCP_PATH else limit)
            with self._place(principal, scope["path"], body):
                await self._app(scope, body, sent)
        except Failure as failure:  # ours, or that the store cannot be used
            if not sent.started:
                await refusal(_name_of(scope), failure)(scope, receive, sent)
        except ClientDisconnect:
            pass  # before it had sent all of its request: nobody is there to be told

    @contextlib.contextmanager
    def _place(self, principal: Principal, path: str, body: _Body) -> Iterator[None]:
        """One of the places that an agent has. Others are kept free, or those who wait for a person would keep that
        person's page from being served. A request that is not whole has no place: its connection may be dropped."""
        if principal.role is Role.OPERATOR or is_public(path):
            yield
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

        body.when_whole(take)
        try:
            yield
        finally:
            if has_place:
                self._answering[who] -= 1
                if not self._answering[who]:
                    del self._answering[who]

    def _check_names(self, scope: Scope, headers: Headers) -> None:
        if len(headers.getlist("host")) != 1 or not self._answers_to(headers["host"]):
            raise Refused("HOST_REFUSED", f"this server is not {headers.get('host', '')[:100]!r}")
        origins = headers.getlist("origin")
        for origin in origins:
            ours = self._site.is_own_page(origin, headers["host"])
            if not ours and not (scope["path"] == MCP_PATH and self._site.is_local_page(origin)):
                raise Refused("ORIGIN_REFUSED", f"pages from {origin[:100]!r} may not ask this server")
        foreign = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
        if foreign and scope["path"] != MCP_PATH:  # what browsers say even where they leave the Origin out
            raise Refused("ORIGIN_REFUSED", "pages from other sites may not ask this server")

    async def _admitted(self, scope: Scope, headers: Headers) -> Principal:
        path = scope["path"]
        if is_public(path):
            return ANONYMOUS
        principal = await self._principal(headers, _address(scope))
        if path != MCP_PATH:
            _count(self._api, f"{principal.role} {principal.name}")
        elif not self.is_direct(headers):
            _count(self._mcp, f"{principal.role} {principal.name}")
        return principal

    async def _principal(self, headers: Headers, address: str) -> Principal:
        given = headers.getlist("authorization")
        if given:
            kind, _, token = given[0].partition(" ")
            if len(given) > 1 or kind.lower() != "bearer":
                raise Refused("TOKEN_INVALID", "send one header: Authorization: Bearer TOKEN", headers=_BEARER)
            return (await self.known(token.strip(), address))[0]
        if (session := await self._session(headers)) is not None:
            return session
        if self.is_direct(headers):
            return ANONYMOUS
        message = "this server wants a token with every request that does not come straight from its own machine"
        if self._site.wants_token:
            message = "this server wants a token with every request"
        raise Refused("TOKEN_INVALID", message, headers=_BEARER)

    async def _is_still(self, principal: Principal, scope: Scope, headers: Headers) -> bool:
        try:
            return await self._principal(headers, _address(scope)) == principal
        except Refused:
            return False
        except Failure:  # the store cannot be asked now, and has nothing to tell either
            return True

    async def known(self, token: str, address: str) -> tuple[Principal, str, WallTime | None]:
        """Whose token it is, its id and until when it lives. Raises Refused.

        Only wrong ones are counted: whoever floods us with them keeps nobody out who has a right one.
        """
        store, now = self._store(), wall_time()
        principal = await asyncio.to_thread(Access(store).authenticate, token, now)
        found = None if principal is None else await asyncio.to_thread(store.tokens.get, token.split("_")[2])
        if principal is None or found is None:
            _count(self._wrong, address)
            raise Refused("TOKEN_INVALID", "this token is not known, or was revoked, or has expired", headers=_BEARER)
        return principal, found.id, found.expires_at

    async def _session(self, headers: Headers) -> Principal | None:
        proof = headers.get(PROOF_HEADER)
        cookie = cookie_of(headers, self.cookie_name) if proof else None
        if not cookie or not proof:
            return None
        now = wall_time()
        session = self.sessions.look(cookie, proof, now)
        if session is None or await asyncio.to_thread(self._store().tokens.has_ended, session.id):
            return None
        if session.token_id is None:
            return Principal(session.name, Role.OPERATOR) if self.is_direct(headers) else None
        token = await asyncio.to_thread(self._store().tokens.get, session.token_id)
        if token is None or not token.is_active(now):
            return None
        return Principal(token.name, Role(token.role))

    async def end_session(self, headers: Headers) -> None:
        """Sign out whoever shows both halves of a session. Raises Failure where that cannot be written down."""
        proof, cookie, now = headers.get(PROOF_HEADER), cookie_of(headers, self.cookie_name), wall_time()
        session = self.sessions.look(cookie, proof, now) if cookie and proof else None
        if session is not None:
            await asyncio.to_thread(self._store().tokens.end_session, session.id, session.expires_at, now)

    def is_direct(self, headers: Headers) -> bool:
        return self._site.is_direct(headers)

    @property
    def cookie_name(self) -> str:
        """Cookies know no ports, so the name does."""
        return f"shotclock-inbox-{self._site.port}"


def _count(buckets: Buckets, who: str) -> None:
    if wait_ms := buckets.take(who):
        raise Refused("RATE_LIMITED", "too many requests: try again in a moment", retry_after_ms=wait_ms)


_BEARER = {"WWW-Authenticate": 'Bearer realm="shotclock"'}


def is_public(path: str) -> bool:
    """The page itself, which is the same for everybody, and the way in."""
    return path in ("/", "/inbox", SESSION_PATH) or path.startswith("/page/")


def cookie_of(headers: Headers, name: str) -> str | None:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return None
    return None if found is None else found.value


def _user(principal: Principal) -> AuthenticatedUser:
    return AuthenticatedUser(AccessToken(token="", client_id=f"{principal.role} {principal.name}", scopes=[]))


def _address(scope: Scope) -> str:
    return str((scope.get("client") or ("?",))[0])


def _name_of(scope: Scope) -> str:
    return f"{scope['method']} {scope['path']}"[:100]


# --- bodies and headers -------------------------------------------------------------------------------------------


def _body_limit(scope: Scope) -> int:
    path = scope["path"]
    large = path in (MCP_PATH, "/api/inbox") or path.endswith(("/decision", "/check"))
    return BODY_LIMIT if large else SMALL_BODY_LIMIT


def _check_length(headers: Headers, limit: int) -> None:
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> Refused:
    # The rest is not read, so nothing else can come on this connection.
    return Refused("REQUEST_TOO_LARGE", f"a request may have {limit} bytes here", headers={"Connection": "close"})


class _Body:
    """The way in. What comes in pieces says no length before: it is counted. Raises ClientDisconnect where it does not
    end, and Refused where it is too long."""

    def __init__(self, receive: Receive, limit: int | None) -> None:
        self._receive = receive
        self._limit = limit
        self._read = 0
        self._is_whole = False
        self._tell: Callable[[], None] | None = None

    def when_whole(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_whole:
            raise ClientDisconnect
        self._read += len(message.get("body", b""))
        if self._limit is not None and self._read > self._limit:
            raise _too_large(self._limit)
        if not self._is_whole and not message.get("more_body", False):
            self._is_whole = True
            if self._tell is not None:
                self._tell()
        return message


_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


class _Sent:
    """The way out, with the headers that every answer has. Knows whether an answer has begun."""

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
