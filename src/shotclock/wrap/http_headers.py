"""Headers of MCP over HTTP, compared with the message in the body as the SDK's own server does."""

from __future__ import annotations

from collections.abc import Sequence
from email.message import Message as Headers

from .members import Members
from .messages import REVISION_KEY
from .param_headers import decode_header

REVISION = "mcp-protocol-version"
SESSION_ID = "mcp-session-id"
METHOD = "mcp-method"
NAME = "mcp-name"
LAST_EVENT_ID = "last-event-id"
JSON_TYPE, EVENT_TYPE = "application/json", "text/event-stream"

REVISIONS_WITH_SESSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
# From this one on a client can read an event without data.
FIRST_RESUMABLE = "2025-11-25"
REVISIONS_WITHOUT_SESSIONS = ("2026-07-28",)
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"

INVALID_PARAMS = -32602
HEADER_MISMATCH = -32020
UNSUPPORTED_REVISION = -32022
# The statuses of error answers without a session. Others are 200.
STATUS_OF_ERROR = {
    -32700: 400,
    -32600: 400,
    INVALID_PARAMS: 400,
    HEADER_MISMATCH: 400,
    -32021: 400,
    -32022: 400,
    -32601: 404,
}

_NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}


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


def problem_with_headers(headers: Headers, members: Members) -> tuple[int, str, object] | None:
    """Return code, message and data of the first mistake in a request of 2026-07-28."""
    for name in (REVISION, METHOD, NAME):
        if len(headers.get_all(name, [])) > 1:
            return HEADER_MISMATCH, f"{name} header appears more than once", None
    revision = members.read("params", "_meta", REVISION_KEY)
    missing = [key for key in (REVISION_KEY, CAPABILITIES_KEY) if ("params", "_meta", key) not in members]
    if missing:
        return INVALID_PARAMS, f"params._meta is missing the required envelope key(s): {', '.join(missing)}", None
    if header(headers, REVISION) is None or header(headers, REVISION) != revision:
        return HEADER_MISMATCH, f"{REVISION} header does not match the protocol version of the request", None
    if header(headers, METHOD) != members.method:
        return HEADER_MISMATCH, f"{METHOD} header does not match the method of the request", None
    named = _NAMED.get(members.method or "")
    if named is not None and ("params", named) in members:
        value = members.read("params", named)
        if value is not None and decode_header(header(headers, NAME)) != value:
            return HEADER_MISMATCH, f"{NAME} header does not match the {named!r} of the request", None
    return problem_with_revision(str(revision))


def problem_with_revision(
    revision: str, supported: Sequence[str] = REVISIONS_WITHOUT_SESSIONS
) -> tuple[int, str, object] | None:
    if revision in supported:
        return None
    return UNSUPPORTED_REVISION, "Unsupported protocol version", {"supported": list(supported), "requested": revision}
