"""Answers of ours in place of the server's: one readable sentence, and the envelope in `_meta`.

Models see the sentence only, so it names the limits, whether a repeat is safe, and the id of the call.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..calls.call import Outcome, admit, answer
from ..core.envelope import ENVELOPE_KEY, Envelope, Problem
from ..core.errors import Ending
from ..core.limits import NS_PER_MS, ClockKind, Fired, format_duration
from ..core.value_types import field, record, value
from ..supervise.clock import monotonic_ns
from ._messages import encode
from ._requests import ClientRequest
from .remote.endpoint import AdapterReport, ResponseFate

# Codes of JSON-RPC errors for requests that are no calls, as both SDKs use them.
CONNECTION_CLOSED, REQUEST_TIMEOUT = -32000, -32001
STDERR_IN_TEXT = 400


@value
class LossWords:
    """The words for the loss of a server: of its process or, over HTTP, of the session with it."""

    subject: str = "the server"  # of a sentence about the end of the process that we started
    stopped: str = "was stopped by a signal"
    replaced: str = "so it was killed with everything it had started"
    lost_state: str = "The memory of that server process is lost"
    ready_again: str = "the server is ready again (start {}); its memory is lost"
    planned: str = "the server was stopped as planned and is started again when it is needed"
    too_often: str = "the server has crashed too often in a short time and is not started again for a while"
    ending_killed: Ending = Ending.KILLED
    ending_gone: Ending = Ending.FINISHED


OF_PROCESS = LossWords()
# The server itself is out of our reach, and may work on.
OF_SESSION = LossWords(
    subject="the process that held the connection to the server",
    stopped="could not be used: a signal had stopped the process that held the connection",
    replaced="so its session was given up",
    lost_state="The state of that session is lost",
    ready_again="the server has opened a new session (number {}); the state of the old one is lost",
    planned="the session was closed as planned, and another is opened when it is needed",
    too_often="the session was lost or could not be opened several times in a short time, and no other is opened for a "
    "while",
    ending_killed=Ending.ABANDONED,
    ending_gone=Ending.ABANDONED,
)


@record
class WrapFailure:
    """Why a request was not answered by the server."""

    code: str
    what: str  # the end of a sentence that begins with the request
    ending: Ending
    clock: ClockKind | None = None
    stderr: str = ""
    noise_lines: int = 0
    survivors: Sequence[dict[str, object]] = field(default_factory=list)
    retry_after_ms: int | None = None
    note: str = ""  # a further sentence
    advice: str = ""  # of a decision of ours, which neither the limits nor the server explain
    data: dict[str, object] | None = None
    is_error: bool = True


def reported_failure(report: AdapterReport) -> WrapFailure:
    """Return the failure of a request that a server over HTTP has not answered."""
    what = f"{report.fate}: the server {report.why}"
    if report.fate in (ResponseFate.NOT_SENT, ResponseFate.REFUSED):
        advice = "" if report.fate is ResponseFate.NOT_SENT else "The server has not begun with it"
        return WrapFailure(report.code, what, Ending.NOT_STARTED, advice=advice)
    return WrapFailure(report.code, what, Ending.ABANDONED)


def failure_answer(request: ClientRequest, failure: WrapFailure, *, is_modern: bool) -> tuple[Envelope, bytes]:
    """Return the envelope and the line that answers a request: a result for a call, an error for any other."""
    envelope = _envelope(request, failure)
    text = _sentences(request, failure, envelope)
    content: dict[str, object] = {"jsonrpc": "2.0", "id": request.id}
    if request.is_call:
        content["result"] = {
            "content": [{"type": "text", "text": text}],
            "isError": failure.is_error,
            "_meta": {ENVELOPE_KEY: envelope.to_dict()},
            **({"resultType": "complete"} if is_modern else {}),
        }
    else:
        code = CONNECTION_CLOSED if failure.clock is None else REQUEST_TIMEOUT
        content["error"] = {"code": code, "message": text, "data": {ENVELOPE_KEY: envelope.to_dict()}}
    return envelope, encode(content)


def _envelope(request: ClientRequest, failure: WrapFailure) -> Envelope:
    elapsed_ms = (monotonic_ns() - request.arrived_ns) // NS_PER_MS
    call = admit(_name(request), request.limits.clocks, effects=request.effects)
    call.count_from(request.arrived_ns)
    limits = request.limits
    context: dict[str, object] = {
        "method": request.method,
        "limits": {"timeout_ms": limits.timeout_ms, "idle_ms": limits.idle_ms, "queue_ms": limits.queue_ms},
    }
    if failure.stderr:
        context["stderr"] = failure.stderr
    if failure.noise_lines:
        context["noise_lines"] = failure.noise_lines
    fired = None
    if failure.clock is not None:
        fired = Fired(failure.clock, call.name, getattr(limits, f"{failure.clock}_ms"), elapsed_ms)
    problem = Problem(
        failure.code,
        f"{call.name} {failure.what}",
        phase="validation" if failure.ending is Ending.NOT_STARTED else "execution",
        fired=fired,
        context=context,
        suggestion=_advice(request, failure),
        retry_after_ms=failure.retry_after_ms,
    )
    return answer(call, Outcome(failure.ending, problem, failure.data, survivors=failure.survivors))


def _name(request: ClientRequest) -> str:
    return f"tool {request.tool}" if request.tool else request.method


def _advice(request: ClientRequest, failure: WrapFailure) -> str:
    if failure.advice:
        return failure.advice
    if failure.ending is Ending.NOT_STARTED:
        return "It did not reach the server, so it is safe to call it again"
    if not request.is_call:
        return "It is safe to ask again"
    if not request.effects.mutates:
        return "The tool declares that it only reads, so it is safe to call it again"
    if request.effects.idempotent:
        return "The tool declares that a repeat changes nothing, so it is safe to call it again"
    return "Its outcome is unknown: look at its effects before you call it again"


def _sentences(request: ClientRequest, failure: WrapFailure, envelope: Envelope) -> str:
    limits = "" if failure.advice else f" ({request.limits.describe()})"
    parts = [f"shotclock: {_name(request)} {failure.what}{limits}", _advice(request, failure)]
    if failure.retry_after_ms:
        parts.append(f"Wait {format_duration(failure.retry_after_ms)} before that")
    if failure.note:
        parts.append(failure.note)
    parts.append(f"An operator finds it as call {envelope.meta['request_id']} in the log of the MCP server")
    text = ". ".join(parts) + "."
    if failure.stderr:
        text += f"\nThe server's last lines on stderr:\n{failure.stderr[-STDERR_IN_TEXT:]}"
    return text
