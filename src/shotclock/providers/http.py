"""`http_client`: one HTTP request on the loop, and one bound over all of it: lookup, connection, TLS, redirects, body.

The request runs in a task of its own and the clock beside it, so that nothing a server does, and nothing that the
client library waits for while it cleans up, can hold up the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..core.clocks import ClockKind
from ..core.effects import Ending, SideEffects
from ..core.envelope import Problem, warning
from ..core.trace import TRACEPARENT
from ..process.clock import monotonic_ns, wall_seconds
from ..process.context import Scope
from ..runtime.call import Call, Outcome, admit, answer, no_time_left
from ..runtime.command_runner import shielded
from ..runtime.handlers import raised
from ..runtime.loop_call import current_scope
from ..runtime.outcomes import stalled_problem
from ..runtime.runtime import Runtime
from ..runtime.soft_and_idle import LONGEST_DELAY_S, Alarms
from .http_request import HttpRequest, InvalidRequest, is_secret, shown, unfetchable
from .http_response import BodyTooLarge, Response, Unwritable, retry_after_ms
from .name_lookup import Names
from .provider import StepCall, StepResult, hand_over

if TYPE_CHECKING:
    import httpx2

REMAINING_HEADER = "Shotclock-Remaining-Ms"
MOST_REDIRECTS = 10
# How long a cancelled request is waited for. It closes its sockets without waiting for anybody, so only a blocked
# loop or a worker that is slow to die runs it out; the answer then says that it was abandoned.
STOP_LIMIT_S = 1.0
# However close the caller's deadline is: closing a socket takes a turn of the loop or two.
SHORTEST_STOP_S = 0.05
# A gateway's answer says nothing about what the server behind it has done.
_UNAVAILABLE = (502, 503, 504)


class HttpProvider:
    """Sends requests. A failure's rule is http_client/ and timeout, download_timeout, stalled, fetch_error, status,
    body_too_large, output_file or invalid."""

    def __init__(self) -> None:
        self._names: tuple[Runtime, Names] | None = None
        self._tls: dict[tuple[str | None, str | None], ssl.SSLContext] = {}
        self._abandoned: set[asyncio.Task[None]] = set()

    async def run(self, call: StepCall, runtime: Runtime) -> StepResult:
        scope = current_scope.get()
        request: HttpRequest | InvalidRequest
        try:
            request = HttpRequest.of(call.settings)
        except InvalidRequest as error:
            request = error
        admission = admit(
            call.name,
            call.clocks,
            parent=runtime.inherited if scope is None else scope.deadline,
            parent_owner="caller" if scope is None else scope.name,
            caller=runtime.trace if scope is None else scope.span.trace,
            mutates=request.mutates,
            idempotent=request.is_idempotent,
        )
        if isinstance(request, InvalidRequest):
            refused = Outcome(Ending.NOT_STARTED, Problem("STEP_INVALID", str(request), "validation"))
            return StepResult(answer(admission, refused), None, "http_client/invalid")
        exchange = Exchange(request, Response(request, call.folder), admission)
        if admission.no_time_left:
            return StepResult(answer(admission, no_time_left(admission)), None, exchange.timeout_rule)
        depth = -1 if scope is None else scope.depth
        inner = Scope(admission.bound.bell, depth, admission.name, admission)
        fetching = self._fetch(exchange, call, inner, self._names_of(runtime))
        try:
            outcome, rule = await self._bounded(exchange, fetching)
        except asyncio.CancelledError as cancelled:
            left = answer(admission, exchange.cancelled())
            hand_over(cancelled, StepResult(left, exchange.response.output, "http_client/cancelled"))
            raise
        return StepResult(answer(admission, outcome), exchange.response.output, rule)

    async def close(self) -> None:
        for task in self._abandoned:
            task.cancel()

    # --- the clock ----------------------------------------------------------------------------------------

    async def _bounded(self, exchange: Exchange, fetching: Any) -> tuple[Outcome, str | None]:
        loop = asyncio.get_running_loop()
        admission = exchange.admission
        work: asyncio.Task[None] = loop.create_task(fetching)
        silent: asyncio.Future[None] = loop.create_future()

        def fall_silent() -> None:
            if not silent.done():
                silent.set_result(None)

        alarms = exchange.alarms = Alarms(loop, admission, on_soft=lambda: None, on_idle=fall_silent)
        fired: ClockKind | None = None
        try:
            while not work.done() and fired is None:
                bell = admission.bound.bell
                left_s = LONGEST_DELAY_S if bell is None else bell.remaining_ns(monotonic_ns()) / 1e9
                fired = ClockKind.IDLE if silent.done() else ClockKind.TIMEOUT if left_s <= 0 else None
                if fired is None:
                    limit_s = min(left_s, LONGEST_DELAY_S)
                    await asyncio.wait([work, silent], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._stop(work, STOP_LIMIT_S)
            raise
        finally:
            alarms.cancel()
        if fired is None:
            outcome, rule = exchange.ended(work)
        else:
            kill_ns = admission.bound.kill_ns
            left_s = STOP_LIMIT_S if kill_ns is None else (kill_ns - monotonic_ns()) / 1e9
            await self._stop(work, max(SHORTEST_STOP_S, min(STOP_LIMIT_S, left_s)))
            ending = Ending.CANCELLED if work.done() else Ending.ABANDONED
            outcome, rule = exchange.rang(fired, ending)
        if alarms.soft_rang and outcome.problem is None:
            outcome.warnings += (warning("SOFT_LIMIT", limit_ms=admission.clocks.soft_ms),)
        return outcome, rule

    async def _stop(self, work: asyncio.Task[None], limit_s: float) -> None:
        work.cancel()
        await shielded(asyncio.wait([work], timeout=limit_s))
        if not work.done():
            self._abandoned.add(work)
            work.add_done_callback(self._abandoned.discard)
        elif not work.cancelled():
            work.exception()  # seen: the bell is the answer

    # --- the request --------------------------------------------------------------------------------------

    async def _fetch(self, exchange: Exchange, call: StepCall, scope: Scope, names: Names) -> None:
        """Fills the exchange's response. Raises what went wrong."""
        import httpx2

        env = call.env

        from .http_transport import Transport

        current_scope.set(scope)  # of this task only: the lookup has to end with us
        asked = exchange.request
        transport = Transport(
            names,
            lambda: self._tls_for(env),
            env,
            on_sign=exchange.sign_of_life,
            on_body=exchange.response.received,
        )
        try:
            async with httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
                request: httpx2.Request | None = client.build_request(
                    asked.method,
                    httpx2.URL(asked.url).copy_merge_params(asked.params),
                    headers=asked.headers,
                    content=asked.content,
                    extensions={"trace": exchange.trace},
                )
                for _ in range(MOST_REDIRECTS + 1):
                    assert request is not None
                    exchange.begin(request)
                    response = await client.send(request, stream=True)
                    try:
                        if response.next_request is None:
                            await exchange.take(response)
                            return
                    finally:
                        await response.aclose()  # the body of a redirect is not read: it may have no end
                    request = _redirected(request, response.next_request, asked.content, call.holds_secret)
            raise httpx2.TooManyRedirects(f"more than {MOST_REDIRECTS} redirects")
        finally:
            await transport.aclose()

    def _tls_for(self, env: Mapping[str, str]) -> ssl.SSLContext:
        """Whom to trust: what the step's environment says, as for curl, else the system's."""
        key = env.get("SSL_CERT_FILE") or None, env.get("SSL_CERT_DIR") or None
        if key not in self._tls:
            import httpx2

            own = ssl.create_default_context(cafile=key[0], capath=key[1]) if any(key) else None
            self._tls[key] = own or httpx2.create_ssl_context(trust_env=False)
        return self._tls[key]

    def _names_of(self, runtime: Runtime) -> Names:
        if self._names is None or self._names[0] is not runtime:
            self._names = runtime, Names(runtime)
        return self._names[1]


class Exchange:
    """How far one request has got, and what is said about it in the end."""

    def __init__(self, request: HttpRequest, response: Response, admission: Call) -> None:
        self.request = request
        self.response = response
        self.admission = admission
        self.alarms: Alarms | None = None
        self._at = ""
        self._is_sent = False

    @property
    def timeout_rule(self) -> str:
        return "http_client/timeout" if self.request.output_file is None else "http_client/download_timeout"

    def begin(self, request: httpx2.Request) -> None:
        self._at = f"{request.method} {shown(request.url)}"
        if (bell := self.admission.bound.bell) is not None:
            request.headers[REMAINING_HEADER] = str(bell.remaining_ms(monotonic_ns()))
        if TRACEPARENT not in request.headers:  # unless the step says its own
            request.headers.update(self.admission.trace.as_headers())

    async def trace(self, event: str, _: Mapping[str, Any]) -> None:
        """Told by the client of every stage: a sign of life, and when the server may have heard of us."""
        self._is_sent = self._is_sent or event.endswith("send_request_headers.started")
        self.sign_of_life()

    def sign_of_life(self) -> None:
        if self.alarms is not None:
            self.alarms.sign_of_life()

    async def take(self, response: httpx2.Response) -> None:
        self.response.begin(response)
        with self.response.receiving():
            async with contextlib.aclosing(response.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    if not self.response.add(chunk):
                        break
                    await asyncio.sleep(0)  # what unpacks to a thousand chunks must not keep the bell from ringing
        self.response.finish(self.admission.request_id)

    # --- what is said -------------------------------------------------------------------------------------

    def rang(self, kind: ClockKind, ending: Ending) -> tuple[Outcome, str]:
        data = self.response.data()
        if kind is ClockKind.IDLE:
            stalled = stalled_problem(self.admission)
            return Outcome(ending, self._with_effects(stalled), data), "http_client/stalled"
        fired = self.admission.fired(kind, monotonic_ns() - self.admission.started_ns)
        what = "Request" if self.request.output_file is None else "Download"
        problem = Problem("TIMEOUT", f"{what} timed out after {fired.limit_ms}ms", fired=fired)
        return Outcome(ending, self._with_effects(problem), data), self.timeout_rule

    def ended(self, work: asyncio.Task[None]) -> tuple[Outcome, str | None]:
        error: BaseException | None
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is not None:
            return self._failed(error)
        response = self.response
        data = response.data()
        if (status := response.status) < 400:
            if self.request.output_file is None and response.is_cut_off:
                message = f"{self._at}: the answer should be JSON and was cut off after {response.size} bytes"
                return Outcome(Ending.FINISHED, Problem("FETCH_FAILED", message), data), "http_client/fetch_error"
            return Outcome(Ending.FINISHED, data=data), None
        code = "HTTP_STATUS"
        if status == 429:
            code = "RATE_LIMITED"
        elif status in _UNAVAILABLE and not self.request.mutates:
            code = "SERVICE_UNAVAILABLE"
        problem = Problem(
            code,
            f"{self._at} answered {status} {response.reason}".rstrip(),
            context={"status": status},
            retry_after_ms=retry_after_ms(response.headers, wall_seconds()) if status in (429, 503) else None,
            side_effects=None if code == "HTTP_STATUS" else SideEffects.NONE,
        )
        return Outcome(Ending.FINISHED, problem, data), "http_client/status"

    def cancelled(self) -> Outcome:
        return Outcome(Ending.CANCELLED, Problem("CANCELLED", "the request was cancelled"), self.response.data())

    def _failed(self, error: BaseException) -> tuple[Outcome, str]:
        import h11
        import httpcore2
        import httpx2

        data = self.response.data()
        if isinstance(error, httpcore2.TimeoutException):  # we give it none: it is the lookup's, at our own bell
            return self.rang(ClockKind.TIMEOUT, Ending.CANCELLED)
        if isinstance(error, BodyTooLarge):
            problem = Problem("BODY_TOO_LARGE", f"{self._at}: {error}", context={"limit": error.limit})
            return Outcome(Ending.FINISHED, problem, data), "http_client/body_too_large"
        if isinstance(error, Unwritable):
            return Outcome(Ending.FINISHED, Problem("FILE_UNWRITABLE", str(error)), data), "http_client/output_file"
        own = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ProxyError, httpcore2.UnsupportedProtocol)
        # h11's: a Content-Length that the step got wrong is found while the body is sent, and comes as it is.
        foreign = (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, h11.ProtocolError)
        if isinstance(error, (*own, *foreign, OSError, UnicodeError)):
            message = self.request.without_secrets(f"{self._at}: {_reason(error)}")
            problem = self._with_effects(Problem("FETCH_FAILED", message))
            return Outcome(Ending.FINISHED, problem, data), "http_client/fetch_error"
        if isinstance(error, asyncio.CancelledError):
            return self.cancelled(), "http_client/cancelled"
        return raised(error), "http_client/failed"

    def _with_effects(self, problem: Problem) -> Problem:
        """A server that never heard of the request has done nothing."""
        if self._is_sent:
            return problem
        return Problem(problem.code, problem.message, fired=problem.fired, side_effects=SideEffects.NONE)


def _redirected(
    request: httpx2.Request, following: httpx2.Request, content: bytes | None, holds_secret: Callable[[str], bool]
) -> httpx2.Request:
    """What the client made of a redirect, with no secret for a server that was not asked for by name: headers that are
    called like one or hold one are left out. Raises HTTPError where the body holds one: without it, it would be another
    request."""
    import httpx2

    if (why := unfetchable(following.url)) is not None:
        raise httpx2.UnsupportedProtocol(f"it redirects to an address that cannot be used: {why}")
    if following.url.origin != request.url.origin:
        for name, value in following.headers.items():
            if is_secret(name) or holds_secret(value):
                del following.headers[name]
        # Sent again where the method stays, as for 307 and 308.
        if content and following.method == request.method and holds_secret(content.decode("utf-8", "surrogateescape")):
            raise httpx2.UnsupportedProtocol(
                f"it redirects to {shown(following.url)}, another server, and the body holds a secret: "
                "ask that server by its own address if it may have it"
            )
    return following


def _reason(error: BaseException) -> str:
    """What the operating system or TLS said, if one of them is behind it."""
    at: BaseException | None = error
    for _ in range(8):  # a chain of causes has two or three links; one that is a circle has no end
        if isinstance(at, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {at.verify_message}"
        if isinstance(at, OSError) and (at.errno or 0) > 0 and not isinstance(at, ssl.SSLError):
            return os.strerror(at.errno or 0)
        at = None if at is None else at.__cause__ or at.__context__
    text = str(error) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}…"
