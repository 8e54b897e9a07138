"""The headers of one conversation with a server over HTTP.

Tools declare in their input schema which arguments are copied to `Mcp-Param-*`, for proxies. The declarations are
learnt from the lists of tools that pass.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

from .._messages import REVISION_KEY, RpcMessage, read_line

SESSION, REVISION, METHOD, NAME = "Mcp-Session-Id", "MCP-Protocol-Version", "Mcp-Method", "Mcp-Name"
LAST_EVENT_ID = "Last-Event-ID"
JSON_TYPE, EVENT_TYPE = "application/json", "text/event-stream"
# The parameter that Mcp-Name repeats.
NAMED_BY = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}

PARAMETER_PREFIX = "Mcp-Param-"
DECLARATION = "x-mcp-header"
MOST_TOOLS = 5_000
MOST_DEPTH = 20
_TYPES = ("string", "integer", "boolean")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PLAIN = re.compile(r"[\x20-\x7e]*")
_ENCODED = re.compile(r"=\?base64\?(.*)\?=")

Path = tuple[str, ...]
HeaderTexts = dict[str, str]


def encode_value(text: str) -> str:
    """Return a header value that is equal to the text once it is decoded."""
    if _PLAIN.fullmatch(text) and text == text.strip() and not _ENCODED.fullmatch(text):
        return text
    return f"=?base64?{base64.b64encode(text.encode('utf-8', 'replace')).decode()}?="


class DeclaredHeaders:
    """The arguments that tools declare as headers. A tool with a malformed declaration has none."""

    def __init__(self) -> None:
        self._by_tool: dict[str, dict[str, Path]] = {}

    def learn(self, answer: bytes) -> None:
        """Read the declarations in an answer to `tools/list`."""
        if not self._by_tool and DECLARATION.encode() not in answer:
            return
        message = read_line(answer)
        result = None if message is None else message.result
        tools = result.get("tools") if isinstance(result, dict) else None
        for tool in tools if isinstance(tools, list) else ():
            if not isinstance(tool, dict) or not isinstance(name := tool.get("name"), str):
                continue
            self._by_tool.pop(name, None)
            declared = _declared(tool.get("inputSchema"))
            if declared and len(self._by_tool) < MOST_TOOLS:
                self._by_tool[name] = declared

    def has(self, tool: object) -> bool:
        return tool in self._by_tool

    def copies(self, tool: str, arguments: object) -> dict[str, str]:
        """Return the headers that repeat the arguments of a call."""
        texts = {header: _text_of(_find(arguments, path)) for header, path in self._by_tool.get(tool, {}).items()}
        return {header: encode_value(text) for header, text in texts.items() if text is not None}


class ConversationHeaders:
    """The session and the revision. From 2026-07-28 on, every request names the revision."""

    def __init__(self) -> None:
        self.session: str = ""
        self.declared: DeclaredHeaders = DeclaredHeaders()
        self._negotiated = ""
        self._modern = ""  # the revision of a client that names it in every request

    @property
    def is_modern(self) -> bool:
        return bool(self._modern)

    def record_request(self, message: RpcMessage) -> None:
        """Note the revision of a client. It may ask `server/discover` first and greet when that is refused."""
        revision = message.meta.get(REVISION_KEY)
        if message.method == "initialize":
            self.session = self._negotiated = self._modern = ""
        elif isinstance(revision, str):
            self._modern = revision

    def record_greeting(self, result: object) -> None:
        revision = result.get("protocolVersion") if isinstance(result, dict) else None
        self._negotiated = revision if isinstance(revision, str) else ""

    def of_stream(self) -> HeaderTexts:
        """Return the headers of a request without a message."""
        texts = {"Accept": EVENT_TYPE, SESSION: self.session, REVISION: self._negotiated}
        return {name: text for name, text in texts.items() if text}

    def of_message(self, message: RpcMessage) -> HeaderTexts:
        texts = {"Accept": f"{JSON_TYPE}, {EVENT_TYPE}", "Content-Type": JSON_TYPE}
        if not self._modern:
            return self.of_stream() | texts
        texts[REVISION] = encode_value(self._modern)
        if message.method is not None:
            texts[METHOD] = encode_value(message.method)
            name = message.params.get(NAMED_BY.get(message.method, ""))
            if isinstance(name, str):
                texts[NAME] = encode_value(name)
                if message.method == "tools/call":
                    texts |= self.declared.copies(name, message.params.get("arguments"))
        return texts


def _declared(schema: object) -> dict[str, Path]:
    """Return the paths of the arguments by the names of their headers; none if a declaration is malformed."""
    found = list(_declarations(schema, ()))
    is_valid = all(isinstance(token, str) and _TOKEN.fullmatch(token) and kind in _TYPES for token, kind, _ in found)
    if not is_valid or len({str(token).lower() for token, _, _ in found}) < len(found):
        return {}
    return {f"{PARAMETER_PREFIX}{token}": path for token, _, path in found}


def _declarations(schema: object, path: Path) -> Iterator[tuple[object, object, Path]]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or len(path) > MOST_DEPTH:
        return
    for name, each in properties.items():
        if isinstance(each, dict) and DECLARATION in each:
            yield each[DECLARATION], each.get("type"), (*path, name)
        yield from _declarations(each, (*path, name))


def _find(arguments: object, path: Path) -> object:
    for name in path:
        arguments = arguments.get(name) if isinstance(arguments, dict) else None
    return arguments


def _text_of(argument: object) -> str | None:
    """Return an argument as it is copied to a header; None if it has no copy."""
    if isinstance(argument, bool):
        return "true" if argument else "false"
    return str(argument) if isinstance(argument, str | int | float) else None
