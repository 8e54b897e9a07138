"""Checks of a request of MCP over HTTP. Its headers are compared with its message as the SDK's own server does."""

from __future__ import annotations

from collections.abc import Iterable
from email.message import Message as Headers

from ..mcp_headers import EVENT_TYPE, JSON_TYPE, METHOD, NAME, NAMED_BY, REVISION, decode_value
from ..messages import REVISION_KEY, RpcMessage

REVISIONS_WITH_SESSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
FIRST_RESUMABLE = "2025-11-25"  # from this one on a client can read an event without data
REVISIONS_WITHOUT_SESSIONS = ("2026-07-28",)
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
HEADER_MISMATCH = -32020
MISSING_CAPABILITY = -32021
UNSUPPORTED_REVISION = -32022
# The statuses of error answers without a session. Others are 200.
STATUS_OF_ERROR = {
    **dict.fromkeys((PARSE_ERROR, INVALID_REQUEST, INVALID_PARAMS), 400),
    **dict.fromkeys((HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_REVISION), 400),
    METHOD_NOT_FOUND: 404,
}


class HttpRefusal(Exception):
    """A request that is answered with an HTTP status and a JSON-RPC error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: int = INVALID_REQUEST,
        headers: Iterable[tuple[str, str]] = (),
        id: object = None,
        data: object = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers: tuple[tuple[str, str], ...] = tuple(headers)
        self.id = id
        self.data = data


def header(headers: Headers, name: str) -> str | None:
    """Return a header without the white space around it."""
    text = headers.get(name)
    return None if text is None else str(text).strip(" \t")


def accepted_types(headers: Headers) -> tuple[bool, bool]:
    """Return whether the client accepts JSON, and whether it accepts events."""
    accepted = {part.partition(";")[0].strip().lower() for part in ",".join(headers.get_all("accept", [])).split(",")}
    is_any = "*/*" in accepted
    return (
        is_any or bool(accepted & {JSON_TYPE, "application/*"}),
        is_any or bool(accepted & {EVENT_TYPE, "text/*"}),
    )


def is_json(headers: Headers) -> bool:
    return str(headers.get("content-type", "")).partition(";")[0].strip().lower() == JSON_TYPE


def check_message(headers: Headers, message: RpcMessage) -> None:
    """Check a message of 2026-07-28 and its headers. Raises HttpRefusal."""
    if message.method is None:
        raise HttpRefusal(400, "the body must be one request or notification")
    problem = _problem_with_headers(headers, message) if message.is_request else None
    data = None
    if problem is None and (revision := header(headers, REVISION)) not in REVISIONS_WITHOUT_SESSIONS:
        problem = UNSUPPORTED_REVISION, "Unsupported protocol version"
        data = {"supported": list(REVISIONS_WITHOUT_SESSIONS), "requested": revision or ""}
    if problem is None and message.method == "initialize":
        # It would fix a server of both generations to the other one.
        problem = METHOD_NOT_FOUND, "Method not found"
    if problem is not None:
        code, text = problem
        raise HttpRefusal(STATUS_OF_ERROR[code], text, code=code, id=message.id, data=data)


def _problem_with_headers(headers: Headers, message: RpcMessage) -> tuple[int, str] | None:
    """Return code and text of the first mistake in the headers of a request."""
    for name in (REVISION, METHOD, NAME):
        if len(headers.get_all(name, [])) > 1:
            return HEADER_MISMATCH, f"{name} header appears more than once"
    missing = [key for key in (REVISION_KEY, CAPABILITIES_KEY) if key not in message.meta]
    if missing:
        return INVALID_PARAMS, f"params._meta is missing the required envelope key(s): {', '.join(missing)}"
    revision = header(headers, REVISION)
    if revision is None or revision != message.meta[REVISION_KEY]:
        return HEADER_MISMATCH, f"{REVISION} header does not match the protocol version of the request"
    if header(headers, METHOD) != message.method:
        return HEADER_MISMATCH, f"{METHOD} header does not match the method of the request"
    named = NAMED_BY.get(message.method or "", "")
    value = message.params.get(named)
    if value is not None and decode_value(header(headers, NAME)) != value:
        return HEADER_MISMATCH, f"{NAME} header does not match the {named!r} of the request"
    return None
