"""The headers of MCP over HTTP: session and revision, and the parts of a message that 2026-07-28 repeats in headers."""

from __future__ import annotations

import base64
import re

from .messages import REVISION_KEY, Message

SESSION, REVISION, METHOD, NAME = "Mcp-Session-Id", "MCP-Protocol-Version", "Mcp-Method", "Mcp-Name"
PARAMETER_PREFIX = "Mcp-Param-"
ANNOTATION = "x-mcp-header"
MOST_TOOLS = 5_000

_NAMED_BY = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_PLAIN = re.compile(r"[\x20-\x7e]*")
_ENCODED = re.compile(r"=\?base64\?.*\?=")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TYPES = ("string", "integer", "boolean")


class RequestHeaders:
    """The headers of one conversation. A client greets once, or carries its revision in every request."""

    def __init__(self) -> None:
        self.session = ""
        self._negotiated = ""
        self._modern = ""  # the revision of the client, if it carries it in every request
        self._parameters: dict[str, dict[tuple[str, ...], str]] = {}

    @property
    def is_modern(self) -> bool:
        return bool(self._modern)

    def note_request(self, message: Message) -> None:
        """Note the revision of a client. It may ask `server/discover` first and greet when that is refused."""
        revision = message.meta.get(REVISION_KEY)
        if message.method == "initialize":
            self.session = self._negotiated = self._modern = ""
        elif isinstance(revision, str):
            self._modern = revision

    def note_greeting(self, result: object) -> None:
        revision = result.get("protocolVersion") if isinstance(result, dict) else None
        self._negotiated = revision if isinstance(revision, str) else ""

    def note_tools(self, result: object) -> None:
        """Note the arguments of tools that are repeated in headers."""
        tools = result.get("tools") if isinstance(result, dict) else None
        for tool in tools if isinstance(tools, list) else ():
            if (
                isinstance(tool, dict)
                and isinstance(name := tool.get("name"), str)
                and len(self._parameters) < MOST_TOOLS
            ):
                self._parameters[name] = _annotated(tool.get("inputSchema"))

    def of_stream(self) -> dict[str, str | bytes]:
        """Return the headers of a request without a message."""
        headers: dict[str, str | bytes] = {}
        if self.session:
            headers[SESSION] = self.session
        if self._negotiated:
            headers[REVISION] = self._negotiated
        return headers

    def of_message(self, message: Message) -> dict[str, str | bytes]:
        headers: dict[str, str | bytes] = {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
        }
        if not self._modern:
            return headers | self.of_stream()
        headers[REVISION] = self._modern
        if message.method is not None:
            headers[METHOD] = encode_value(message.method)
            name = message.params.get(_NAMED_BY.get(message.method, ""))
            if isinstance(name, str):
                headers[NAME] = encode_value(name)
            if message.method == "tools/call" and isinstance(name, str):
                headers |= self._of_arguments(name, message.params.get("arguments"))
        return headers

    def _of_arguments(self, tool: str, arguments: object) -> dict[str, str]:
        headers = {}
        for path, token in self._parameters.get(tool, {}).items():
            found = arguments
            for key in path:
                found = found.get(key) if isinstance(found, dict) else None
            if isinstance(found, bool):
                found = "true" if found else "false"
            if isinstance(found, str | int | float):
                headers[PARAMETER_PREFIX + token] = encode_value(str(found))
        return headers


def _annotated(schema: object) -> dict[tuple[str, ...], str]:
    """Return the headers that a schema declares, by the path of the argument; none if one of them is not valid."""
    found = dict(_walk(schema, ()))
    tokens = [token.lower() for token in found.values()]
    is_valid = len(set(tokens)) == len(tokens) and all(_TOKEN.fullmatch(token) for token in tokens)
    return found if is_valid else {}


def _walk(schema: object, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], str]]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = []
    for name, each in properties.items() if isinstance(properties, dict) else ():
        if not isinstance(each, dict):
            continue
        token = each.get(ANNOTATION)
        if isinstance(token, str) and each.get("type") in _TYPES:
            found.append(((*path, name), token))
        found += _walk(each, (*path, name))
    return found


def encode_value(text: str) -> str:
    """Return a header value that is equal to the text once it is decoded by the rules of 2026-07-28."""
    if _PLAIN.fullmatch(text) and text == text.strip() and not _ENCODED.fullmatch(text):
        return text
    return f"=?base64?{base64.b64encode(text.encode('utf-8', 'replace')).decode()}?="
