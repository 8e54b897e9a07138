"""Lists of a server: pages with opaque cursors, and the parts that all listed things have; and failed requests."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, MISSING_REQUIRED_CLIENT_CAPABILITY, REQUEST_TIMEOUT, Icon

from ...core.catalogue import CommandSpec
from ...core.envelope import ENVELOPE_KEY, Envelope
from ...core.value_types import JsonObject
from ...worker.client_forms import REQUIRED_CAPABILITIES
from ._results import describe_failure

T = TypeVar("T")
Context = ServerRequestContext[Any, Any]
Serve = Callable[[Context, str, Mapping[str, object]], Awaitable[Envelope | JsonObject]]
"""Runs the function of a declaration and returns its envelope, or `input_required`."""


def page_of(items: Sequence[T], params: Any, size: int | None) -> tuple[list[T], str | None]:
    """Return a page of a list, and the cursor of the next one. Raises MCPError for a cursor that is none of ours."""
    cursor = None if params is None else params.cursor
    start = 0 if cursor is None else _read_cursor(cursor)
    if start is None or (cursor is not None and (size is None or not 0 < start < len(items) or start % size)):
        raise MCPError(code=INVALID_PARAMS, message="the cursor is not one of this list: list it from the start")
    if size is None or start + size >= len(items):
        return list(items[start:]), None
    return list(items[start : start + size]), base64.urlsafe_b64encode(f"after {start + size}".encode()).decode()


def _read_cursor(cursor: str) -> int | None:
    try:
        word, _, number = base64.urlsafe_b64decode(cursor).decode().partition(" ")
    except (binascii.Error, ValueError):
        return None
    return int(number) if word == "after" and number.isascii() and number.isdecimal() and len(number) < 10 else None


def shown_fields(spec: CommandSpec) -> JsonObject:
    """Return the fields that the protocol has for tools, prompts and resources alike."""
    return {
        "title": spec.listing.title,
        "description": spec.description or None,
        "icons": [Icon.model_validate(icon) for icon in spec.listing.icons] or None,
        "_meta": spec.listing.meta or None,
    }


def values_of(spec: CommandSpec, texts: Mapping[str, str]) -> dict[str, object]:
    """Return arguments, which the protocol has as texts, as values: JSON where the parameter is no text."""
    return {name: text if takes_text(spec, name) else _value_of(text) for name, text in texts.items()}


def _value_of(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text  # refused, or converted, where its type is known


def takes_text(spec: CommandSpec, name: str) -> bool:
    """Return whether a parameter is a text, or unknown."""
    return kinds_of(spec.input_schema.get("properties", {}).get(name, {}), spec.input_schema) <= {"string", "null"}


def kinds_of(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> set[str]:
    """Return the JSON types of a schema; none if it allows all."""
    if "$ref" in schema:
        schema = whole.get("$defs", {}).get(schema["$ref"].rpartition("/")[2], {})
    kinds = {str(schema["type"])} if "type" in schema else set()
    return kinds.union(*(kinds_of(each, whole) for each in schema.get("anyOf", ())))


def missing_in(envelope: Envelope) -> object:
    """Return the capabilities that a question of the function needed and the client lacks; None if it was no such."""
    context = (envelope.error or {}).get("context")
    return context.get(REQUIRED_CAPABILITIES) if envelope.code == "CANNOT_ASK" and isinstance(context, dict) else None


def refusal_of(envelope: Envelope, **named: object) -> MCPError:
    """Return a failed request as an error of the protocol: sentences for a person, and the envelope for programs."""
    error: JsonObject = envelope.error or {}
    code = INTERNAL_ERROR
    if (missing := missing_in(envelope)) is not None:
        code, named = MISSING_REQUIRED_CLIENT_CAPABILITY, {**named, "requiredCapabilities": missing}
    elif envelope.code == "ARG_ERROR":
        code = INVALID_PARAMS
    elif error.get("context", {}).get("clock") is not None:
        code = REQUEST_TIMEOUT
    return MCPError(code=code, message=describe_failure(envelope), data={**named, ENVELOPE_KEY: envelope.to_dict()})
