"""Headers of MCP over HTTP: their encoding, and the copies of arguments."""

import json
from typing import Any

from shotclock.wrap.remote._headers import DeclaredHeaders


def learnt(**properties: Any) -> DeclaredHeaders:
    headers = DeclaredHeaders()
    tool = {"name": "tool", "inputSchema": {"type": "object", "properties": properties}}
    headers.learn(json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"tools": [tool]}}).encode())
    return headers


def test_a_malformed_declaration_is_ignored() -> None:
    for malformed in ({"x-mcp-header": 1, "type": "string"}, {"x-mcp-header": "a b", "type": "string"},
                      {"x-mcp-header": "A", "type": "number"}, True):  # fmt: skip
        assert not learnt(a=malformed).has("tool")
    same = {"type": "string", "x-mcp-header": "A"}
    assert not learnt(a=same, b=same).has("tool")


def test_declared_arguments_are_copied_in_the_encoding_of_headers() -> None:
    inner = {"type": "object", "properties": {"flag": {"type": "boolean", "x-mcp-header": "Flag"}}}
    region, count = {"type": "string", "x-mcp-header": "Region"}, {"type": "integer", "x-mcp-header": "N"}
    declared = learnt(region=region, count=count, inner=inner, free={"type": "string"})
    assert declared.has("tool") and not declared.has("other")
    for arguments, copies in (
        ({"free": "x"}, {}),
        ({"region": "a", "count": 3}, {"Region": "a", "N": "3"}),
        ({"region": "é"}, {"Region": "=?base64?w6k=?="}),
        ({"region": " a"}, {"Region": "=?base64?IGE=?="}),
        ({"region": "a\nb"}, {"Region": "=?base64?YQpi?="}),
        ({"region": "=?base64?YQ==?="}, {"Region": "=?base64?PT9iYXNlNjQ/WVE9PT89?="}),
        ({"inner": {"flag": True}}, {"Flag": "true"}),
    ):
        assert declared.copies("tool", arguments) == {f"Mcp-Param-{name}": text for name, text in copies.items()}
    assert declared.copies("other", {"region": "a"}) == {}


def test_a_later_list_replaces_the_declarations_of_a_tool() -> None:
    declared = learnt(region={"type": "string", "x-mcp-header": "Region"})
    declared.learn(b'{"jsonrpc":"2.0","id":2,"result":{"tools":[{"name":"tool","inputSchema":{}}]}}')
    assert not declared.has("tool")
