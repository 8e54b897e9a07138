"""Answers over HTTP: an envelope, or problem details (RFC 9457) that carry one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response

from ...core.clocks import Clocks
from ...core.envelope import Envelope
from ...core.errors import Ending, Failure, error_entry
from ...inbox.access import ANONYMOUS, Principal
from ...inbox.person_wait import refusal_outcome
from ...inbox.proposal_json import mistake, parse_object
from ...process.clock import monotonic_ns
from ...runtime.call import Call, Outcome, Tool, admit, answer
from ...runtime.outcomes import outcome_of_error, timeout_problem

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


async def answer_request(
    name: str,
    work: Awaitable[Mapping[str, Any]],
    *,
    mutates: bool = False,
    idempotent: bool = False,
    wait_ms: int = 0,
) -> Response:
    """Do the work of a request and answer it on time. Passes on a cancellation and ClientDisconnect."""
    clocks = Clocks(timeout_ms=REQUEST_LIMIT_MS + wait_ms, grace_ms=0)
    admission = admit(name, clocks, mutates=mutates, idempotent=idempotent, tool=SERVED)
    outcome = await _outcome(admission, work)
    return make_response(answer(admission, outcome), _headers_of(outcome.value))


Work = Callable[[Request, Principal], Awaitable[Mapping[str, Any]]]


def answering(
    name: str, work: Work, *, mutates: bool = False, idempotent: bool = False, wait_ms: int = 0
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        data = work(request, principal_of(request))
        return await answer_request(name, data, mutates=mutates, idempotent=idempotent, wait_ms=wait_ms)

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


async def read_body(request: Request) -> dict[str, Any]:
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
