"""`http_client`: one HTTP request, with one bound over lookup, connection, TLS, redirects and body.

The request runs in a task beside its clock, so that neither the server nor the clean-up of the client library can delay
the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Literal

import h11
import httpcore2
import httpx2

from ...calls.call import Call, Effects, Outcome, Work
from ...calls.control import LONGEST_DELAY_S, IdleClock
from ...calls.outcomes import limit_problem, outcome_of_error
from ...calls.runtime import Runtime
from ...calls.supervised_commands import run_shielded
from ...core.envelope import Problem
from ...core.errors import Ending, SideEffects
from ...core.limits import ClockKind
from ...core.validation import field
from ...core.value_types import replace
from ...core.visible_text import is_secret_header
from ...net.http import Names, Transport
from ...supervise.clock import monotonic_ns, wall_time
from ...worker.context import Scope, current_scope
from .http_message import (
    DEFAULT_BODY_BYTES,
    BodyTooLarge,
    HttpRequest,
    InvalidRequest,
    Response,
    Unwritable,
    causes_of,
    retry_after_ms,
    show_url,
    unfetchable,
)
from .provider import Provider, Scalar, StepCall, StepPart, StepResult, StepType


class HttpStep(StepPart):
    type: Literal["http_client"]
    url: str = field(min_length=1)
    method: str = "GET"
    headers: dict[str, Scalar] = field(default={})
    body: Any = None
    params: dict[str, Scalar] = field(default={})
    max_body_bytes: int = field(default=DEFAULT_BODY_BYTES, ge=1)
    output_file: str | None = None


HTTP = StepType(
    "http_client",
    "HTTP request, bounded with its body and redirects",
    HttpStep,
    lambda services: HttpProvider(),
    default_ms=30_000,
    unit="ms",
    value_keys=frozenset({"body", "headers", "params"}),
    rules={
        "FETCH_FAILED": "fetch_error",
        "TIMEOUT": "fetch_error",
        "NO_TIME_LEFT": "fetch_error",
        "HTTP_STATUS": "status",
        "RATE_LIMITED": "status",
        "SERVICE_UNAVAILABLE": "status",
        "BODY_TOO_LARGE": "body_too_large",
        "FILE_UNWRITABLE": "output_file",
        "STEP_INVALID": "invalid",
    },
)
STEP_TYPES = (HTTP,)
MOST_REDIRECTS = 10
# A cancelled request closes its sockets without waiting, so only a blocked loop or a slow worker exceeds this; the
# answer then says `abandoned`.
STOP_LIMIT_S = 1.0
# However close the caller's deadline is: closing a socket takes one or two turns of the loop.
SHORTEST_STOP_S = 0.05
# Statuses of a gateway, which do not tell whether the server behind it has acted.
_UNAVAILABLE = (502, 503, 504)


class HttpProvider(Provider):
    def __init__(self) -> None:
        self._names: Names | None = None  # of the run's runtime
        self._tls: dict[tuple[str | None, str | None], ssl.SSLContext] = {}
        self._abandoned: set[asyncio.Task[None]] = set()

    step_type = HTTP

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        call.effects = Effects(mutates=False, idempotent=True)
        try:
            request = HttpRequest.of(step.settings)
        except InvalidRequest as error:
            return StepResult(Outcome(Ending.NOT_STARTED, Problem("STEP_INVALID", str(error), "validation")))
        call.effects = Effects(request.mutates, request.is_idempotent)
        exchange = HttpExchange(request, Response(request, step.folder), call)
        scope = current_scope.get()
        inner = Scope(call.bound.bell, -1 if scope is None else scope.depth, call.name, call, call=call)
        self._names = self._names or Names(runtime)
        fetching = self._fetch(exchange, step, inner, self._names)
        try:
            outcome = await self._run_bounded(exchange, fetching)
        except asyncio.CancelledError:
            step.cancelled.result = StepResult(exchange.cancelled_outcome(), exchange.response.output)
            raise
        is_timeout = isinstance(outcome.problem, Problem) and outcome.problem.code == "TIMEOUT"
        is_download = is_timeout and request.output_file is not None
        rule = "http_client/download_timeout" if is_download else None
        return StepResult(outcome, exchange.response.output, rule)

    async def close(self) -> None:
        for task in self._abandoned:
            task.cancel()

    async def _run_bounded(self, exchange: HttpExchange, fetching: Any) -> Outcome:
        loop = asyncio.get_running_loop()
        admission = exchange.admission
        work: asyncio.Task[None] = loop.create_task(fetching)
        rang: asyncio.Future[ClockKind] = loop.create_future()
        exchange.begin_clocks(loop, rang)
        fired: ClockKind | None = None
        try:
            while not work.done() and fired is None:
                bell = admission.bound.bell
                left_s = LONGEST_DELAY_S if bell is None else bell.remaining_ns(monotonic_ns()) / 1e9
                fired = rang.result() if rang.done() else ClockKind.TIMEOUT if left_s <= 0 else None
                if fired is None:
                    limit_s = min(left_s, LONGEST_DELAY_S)
                    waits: list[asyncio.Future[Any]] = [work, rang]
                    await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._stop(work, STOP_LIMIT_S)
            raise
        finally:
            exchange.end_clocks()
        if fired is None:
            outcome = exchange.final_outcome(work)
        else:
            kill_ns = admission.bound.kill_ns
            left_s = STOP_LIMIT_S if kill_ns is None else (kill_ns - monotonic_ns()) / 1e9
            await self._stop(work, max(SHORTEST_STOP_S, min(STOP_LIMIT_S, left_s)))
            ending = Ending.CANCELLED if work.done() else Ending.ABANDONED
            outcome = exchange.limit_outcome(fired, ending)
        return outcome

    async def _stop(self, work: asyncio.Task[None], limit_s: float) -> None:
        work.cancel()
        await run_shielded(asyncio.wait([work], timeout=limit_s))
        if not work.done():
            self._abandoned.add(work)
            work.add_done_callback(self._abandoned.discard)
        elif not work.cancelled():
            work.exception()  # marks it as retrieved: the timeout is the answer

    async def _fetch(self, exchange: HttpExchange, step: StepCall, scope: Scope, names: Names) -> None:
        """Send the request and fill the response. Raises any error."""
        env = step.env
        current_scope.set(scope)  # of this task only: the lookup ends with the request
        wanted = exchange.request
        transport = Transport(
            names, lambda: self._tls_for(env), env, on_sign=exchange.sign_of_life, on_body=exchange.response.count_bytes
        )
        try:
            async with httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
                request = client.build_request(
                    wanted.method,
                    httpx2.URL(wanted.url).copy_merge_params(wanted.params),
                    headers=wanted.headers,
                    content=wanted.content,
                    extensions={"trace": exchange.trace},
                )
                for _ in range(MOST_REDIRECTS + 1):
                    exchange.begin(request)
                    response = await client.send(request, stream=True)
                    try:
                        if response.next_request is None:
                            await exchange.receive(response)
                            return
                    finally:
                        await response.aclose()  # the body of a redirect is not read: it may be endless
                    request = _prepare_redirect(request, response.next_request, wanted.content, step.holds_secret)
            raise httpx2.TooManyRedirects(f"more than {MOST_REDIRECTS} redirects")
        finally:
            await transport.aclose()

    def _tls_for(self, env: Mapping[str, str]) -> ssl.SSLContext:
        """Return the TLS context of the step's environment, as for curl."""
        key = env.get("SSL_CERT_FILE") or None, env.get("SSL_CERT_DIR") or None
        if key not in self._tls:
            own = ssl.create_default_context(cafile=key[0], capath=key[1]) if any(key) else None
            self._tls[key] = own or httpx2.create_ssl_context(trust_env=False)
        return self._tls[key]


class HttpExchange(Work):
    def __init__(self, request: HttpRequest, response: Response, admission: Call) -> None:
        self.request = request
        self.response = response
        self.admission = admission
        self._idle: IdleClock | None = None
        self._rang: asyncio.Future[ClockKind] | None = None
        self._at = ""
        self._is_sent = False

    def begin(self, request: httpx2.Request) -> None:
        self._at = f"{request.method} {show_url(request.url)}"
        if (bell := self.admission.bound.bell) is not None:
            request.headers["Shotclock-Remaining-Ms"] = str(bell.remaining_ms(monotonic_ns()))
        self.admission.trace.add_to(request.headers)  # the step may set its own

    async def trace(self, event: str, _: Mapping[str, Any]) -> None:
        """Record a stage as a sign of life, and whether the request was sent."""
        self._is_sent = self._is_sent or event.endswith("send_request_headers.started")
        self.sign_of_life()

    def begin_clocks(self, loop: asyncio.AbstractEventLoop, rang: asyncio.Future[ClockKind]) -> None:
        """Start the idle clock. `rang` gets the clock that fired, except the timeout."""
        self._rang, self.admission.work = rang, self
        if idle_ms := self.admission.clocks.idle_ms:
            self._idle = IdleClock(loop, idle_ms, lambda: self._ring(ClockKind.IDLE))

    def end_clocks(self) -> None:
        self._rang = None
        if self._idle is not None:
            self._idle.cancel()

    def _ring(self, kind: ClockKind) -> None:
        if self._rang is not None and not self._rang.done():
            self._rang.set_result(kind)

    def stop_unwound(self) -> None:
        self._ring(ClockKind.SOFT)

    def move_bell(self) -> bool:
        return self._rang is not None  # the waiter reads the bell again when the old one rings

    def sign_of_life(self) -> None:
        if self._idle is not None:
            self._idle.sign_of_life()
        if self.admission.control is not None:
            self.admission.control.signs += 1

    async def receive(self, response: httpx2.Response) -> None:
        self.response.begin(response)
        with self.response.receiving():
            async with contextlib.aclosing(response.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    if not self.response.add(chunk):
                        break
                    await asyncio.sleep(0)  # a thousand unpacked chunks must not delay the timeout
        self.response.finish(self.admission.request_id)

    def limit_outcome(self, kind: ClockKind, ending: Ending) -> Outcome:
        problem = limit_problem(self.admission, kind)
        if kind is ClockKind.TIMEOUT:
            what = "Request" if self.request.output_file is None else "Download"
            problem = replace(problem, message=f"{what} timed out after {self.admission.bound.limit_ms}ms")
        return Outcome(ending, self._with_effects(problem), self.response.data())

    def final_outcome(self, work: asyncio.Task[None]) -> Outcome:
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is not None:
            return self._failure_outcome(error)
        response = self.response
        data = response.data()
        if (status := response.status) < 400:
            if self.request.output_file is None and response.is_cut_off:
                message = f"{self._at}: the answer should be JSON and was cut off after {response.size} bytes"
                return Outcome(Ending.FINISHED, Problem("FETCH_FAILED", message), data)
            return Outcome(Ending.FINISHED, data=data)
        code = "HTTP_STATUS"
        if status == 429:
            code = "RATE_LIMITED"
        elif status in _UNAVAILABLE and not self.request.mutates:
            code = "SERVICE_UNAVAILABLE"
        problem = Problem(
            code,
            f"{self._at} answered {status} {response.reason}".rstrip(),
            context={"status": status},
            retry_after_ms=retry_after_ms(response.headers, wall_time().ms / 1000) if status in (429, 503) else None,
            side_effects=None if code == "HTTP_STATUS" else SideEffects.NONE,
        )
        return Outcome(Ending.FINISHED, problem, data)

    def cancelled_outcome(self) -> Outcome:
        return Outcome(Ending.CANCELLED, Problem("CANCELLED", "the request was cancelled"), self.response.data())

    def _failure_outcome(self, error: BaseException) -> Outcome:
        data = self.response.data()
        if isinstance(error, httpcore2.TimeoutException):  # of the lookup, at the call's own timeout
            return self.limit_outcome(ClockKind.TIMEOUT, Ending.CANCELLED)
        if isinstance(error, BodyTooLarge):
            problem = Problem("BODY_TOO_LARGE", f"{self._at}: {error}", context={"limit": error.limit})
            return Outcome(Ending.FINISHED, problem, data)
        if isinstance(error, Unwritable):
            return Outcome(Ending.FINISHED, Problem("FILE_UNWRITABLE", str(error)), data)
        own = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ProxyError, httpcore2.UnsupportedProtocol)
        # h11 finds a wrong Content-Length of the step while the body is sent.
        foreign = (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, h11.ProtocolError)
        if isinstance(error, (*own, *foreign, OSError, UnicodeError)):
            message = self.request.without_secrets(f"{self._at}: {_reason(error)}")
            problem = self._with_effects(Problem("FETCH_FAILED", message))
            return Outcome(Ending.FINISHED, problem, data)
        if isinstance(error, asyncio.CancelledError):
            return self.cancelled_outcome()
        return outcome_of_error(error)

    def _with_effects(self, problem: Problem) -> Problem:
        """Add that there were no side effects, if the request was never sent."""
        return problem if self._is_sent else replace(problem, side_effects=SideEffects.NONE)


def _prepare_redirect(
    request: httpx2.Request, following: httpx2.Request, content: bytes | None, holds_secret: Callable[[str], bool]
) -> httpx2.Request:
    """Return the request of a redirect. To another server no secret is sent: raises HTTPError if the body holds one."""
    if (why := unfetchable(following.url)) is not None:
        raise httpx2.UnsupportedProtocol(f"it redirects to an address that cannot be used: {why}")
    if following.url.origin != request.url.origin:
        for name, value in following.headers.items():
            if is_secret_header(name) or holds_secret(value):
                del following.headers[name]
        # The body is sent again where the method stays, as for 307 and 308.
        if content and following.method == request.method and holds_secret(content.decode("utf-8", "surrogateescape")):
            raise httpx2.UnsupportedProtocol(
                f"it redirects to {show_url(following.url)}, another server, and the body holds a secret: "
                "use the address of that server if it may have it"
            )
    return following


def _reason(error: BaseException) -> str:
    """Return the message of the operating system or of TLS, if it is the cause."""
    for at in causes_of(error):
        if isinstance(at, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {at.verify_message}"
        if isinstance(at, OSError) and (at.errno or 0) > 0 and not isinstance(at, ssl.SSLError):
            return os.strerror(at.errno or 0)
    text = str(error) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}…"
