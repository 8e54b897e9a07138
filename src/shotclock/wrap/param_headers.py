"""`Mcp-Param-*` headers: copies of arguments, for proxies, which a server of 2026-07-28 compares with the body.

A tool declares them in its input schema. The declarations are learnt from the lists that clients read, and without a
list there are none to compare.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from email.message import Message as Headers

from ..core.value_types import value

DECLARATION = "x-mcp-header"
PREFIX = "mcp-param-"
MOST_DEPTH = 20
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_ENCODED = re.compile(r"=\?base64\?(.*)\?=")
_DECIMAL = re.compile(r"-?[0-9]{1,400}(\.0+)?")


@value
class DeclaredHeader:
    """An argument that is copied to a header."""

    path: tuple[str, ...]
    header: str
    type: str


class ParamHeaders:
    """The declarations of all tools of a server."""

    def __init__(self) -> None:
        self._by_tool: dict[str, list[DeclaredHeader]] = {}

    def learn(self, answer: bytes) -> None:
        """Read the declarations in the answer to `tools/list`."""
        if not self._by_tool and DECLARATION.encode() not in answer:
            return
        result = json.loads(answer).get("result")
        tools = result.get("tools") if isinstance(result, dict) else None
        for tool in tools if isinstance(tools, list) else ():
            if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                declared = list(_declarations(tool.get("inputSchema"), ()))
                is_unique = len({each.header for each in declared}) == len(declared)
                self._by_tool[tool["name"]] = declared if is_unique else []

    def declares(self, tool: object) -> bool:
        return bool(self._by_tool.get(str(tool)))

    def problem_with(self, tool: object, arguments: object, headers: Headers) -> str | None:
        """Return the first difference between headers and arguments."""
        for declared in self._by_tool.get(str(tool), ()):
            sent = [text.strip(" \t") for text in headers.get_all(declared.header, [])]
            argument, name = _find(arguments, declared.path), ".".join(declared.path)
            if len(sent) > 1:
                return f"{declared.header} header appears more than once"
            text = _text_of(argument)
            if text is None and not sent:
                continue
            if text is None:
                return f"{declared.header} header is present but the argument {name!r} is absent"
            if not sent:
                return f"{declared.header} header is missing but the argument {name!r} is present"
            decoded = decode_header(sent[0])
            if decoded is None or not _is_equal(declared.type, argument, text, decoded):
                return f"{declared.header} header does not match the argument {name!r}"
        return None


def _declarations(schema: object, path: tuple[str, ...]) -> Iterator[DeclaredHeader]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or len(path) > MOST_DEPTH:
        return
    for name, each in properties.items():
        if not isinstance(each, dict):
            continue
        token, kind = each.get(DECLARATION), each.get("type")
        if isinstance(token, str) and _TOKEN.fullmatch(token) and kind in ("string", "integer", "boolean"):
            yield DeclaredHeader((*path, name), PREFIX + token.lower(), kind)
        yield from _declarations(each, (*path, name))


def _find(arguments: object, path: tuple[str, ...]) -> object:
    for name in path:
        arguments = arguments.get(name) if isinstance(arguments, dict) else None
    return arguments


def _text_of(argument: object) -> str | None:
    """Return an argument as a client copies it; None if it has no copy."""
    if isinstance(argument, bool):
        return "true" if argument else "false"
    return str(argument) if isinstance(argument, str | int | float) else None


def _is_equal(kind: str, argument: object, text: str, decoded: str) -> bool:
    is_whole = isinstance(argument, int) or (isinstance(argument, float) and argument.is_integer())
    if kind == "integer" and is_whole and not isinstance(argument, bool) and _DECIMAL.fullmatch(decoded):
        return int(decoded.partition(".")[0]) == argument
    return decoded == text


def decode_header(text: str | None) -> str | None:
    """Return the value of a header that may be encoded; None if it is absent or malformed."""
    found = None if text is None else _ENCODED.fullmatch(text)
    if found is None:
        return text
    try:
        decoded = base64.b64decode(found[1], validate=True)
        return decoded.decode() if base64.b64encode(decoded).decode() == found[1] else None
    except (binascii.Error, ValueError):
        return None
