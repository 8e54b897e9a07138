"""What is said over HTTP: an envelope where it went well, else problem details (RFC 9457) that carry one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ...core.clocks import Clocks
from ...core.effects import Ending
from ...core.envelope import Envelope
from ...core.errors import Failure, error_entry
from ...inbox.outcomes import refusal_outcome
from ...process.clock import monotonic_ns
from ...runtime.call import Call, Outcome, admit, answer
from ...runtime.handlers import outcome_of_error
from ...runtime.outcomes import timeout_problem

# What one request to the inbox may take, beside the time that its caller asked to wait for a person. The store's own
# waits are shorter; a disk that hangs would run this out.
REQUEST_LIMIT_MS = 25_000
PROBLEM = "application/problem+json"


class Refused(Failure):
    """At the door: the request goes no further. `headers` belong to the answer."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(code, message, retry_after_ms=retry_after_ms)
        self.headers = headers


async def enveloped(
    name: str,
    work: Awaitable[Mapping[str, Any]],
    *,
    mutates: bool = False,
    idempotent: bool = False,
    wait_ms: int = 0,
) -> Response:
    """The answer to a request, on time. Passed on: a cancellation, and that the client left before it had asked."""
    clocks = Clocks(timeout_ms=REQUEST_LIMIT_MS + wait_ms, grace_ms=0)
    admission = admit(name, clocks, mutates=mutates, idempotent=idempotent)
    outcome = await _outcome(admission, work)
    return shown(answer(admission, outcome), _headers_of(outcome.value))


async def _outcome(admission: Call, work: Awaitable[Mapping[str, Any]]) -> Outcome:
    limit_s = admission.bound.limit_ms / 1000
    try:
        async with asyncio.timeout(limit_s) as clock:
            return Outcome(Ending.FINISHED, data=dict(await work))
    except TimeoutError as error:
        if clock.expired():
            return Outcome(Ending.ABANDONED, timeout_problem(admission, monotonic_ns() - admission.started_ns))
        return _unexpected(error)
    except Failure as failure:
        return refusal_outcome(failure)
    except ClientDisconnect:
        raise
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> Outcome:
    """A bug of ours: its traceback is for whoever runs the server, not for whoever asks."""
    return outcome_of_error(error)


def refusal(name: str, failure: Failure) -> Response:
    """Before anything was done."""
    return shown(answer(admit(name, Clocks()), refusal_outcome(failure)), _headers_of(failure))


def _headers_of(failure: object) -> Mapping[str, str] | None:
    return failure.headers if isinstance(failure, Refused) else None


def shown(envelope: Envelope, headers: Mapping[str, str] | None = None) -> Response:
    said: dict[str, str] = {"Cache-Control": "no-store", **(headers or {})}
    if envelope.error is None:
        pending = isinstance(envelope.data, dict) and envelope.data.get("status") == "pending"
        return Response(_text(envelope.to_dict()), 202 if pending else 200, said, "application/json")
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
        said["Retry-After"] = str(-(-int(str(retry_after_ms)) // 1000))
    return Response(_text(problem), entry.http_status, said, PROBLEM)


def _text(plain: object) -> bytes:
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
