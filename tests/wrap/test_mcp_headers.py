"""Headers of MCP over HTTP: their encoding, and the copies of arguments."""

import json
from email.message import Message
from typing import Any

from shotclock.wrap.mcp_headers import DeclaredHeaders, decode_value, encode_value


def learnt(**properties: Any) -> DeclaredHeaders:
    headers = DeclaredHeaders()
    tool = {"name": "tool", "inputSchema": {"type": "object", "properties": properties}}
    headers.learn(json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"tools": [tool]}}).encode())
    return headers


def sent(**headers: str) -> Message:
    message = Message()
    for name, text in headers.items():
        message[f"Mcp-Param-{name}"] = text
    return message


def test_a_declared_argument_and_its_header_are_equal_or_both_absent() -> None:
    inner = {"type": "object", "properties": {"flag": {"type": "boolean", "x-mcp-header": "Flag"}}}
    region, count = {"type": "string", "x-mcp-header": "Region"}, {"type": "integer", "x-mcp-header": "Count"}
    declared = learnt(region=region, count=count, inner=inner, free={"type": "string"})
    assert declared.has("tool") and not declared.has("other")
    for arguments, headers in (
        ({}, {}),
        ({"free": "x"}, {"Unknown": "y"}),
        ({"region": "é"}, {"Region": "=?base64?w6k=?="}),
        ({"region": " a"}, {"Region": "=?base64?IGE=?="}),
        ({"count": 42}, {"Count": "42.0"}),
        ({"count": 10**30}, {"Count": str(10**30)}),
        ({"inner": {"flag": True}}, {"Flag": "true"}),
    ):
        assert declared.problem_with("tool", arguments, sent(**headers)) is None, arguments
    for arguments, headers in (
        ({"region": "a"}, {}),
        ({}, {"Region": "a"}),
        ({"region": None}, {"Region": "a"}),
        ({"region": "a"}, {"Region": "b"}),
        ({"region": "a"}, {"Region": "=?base64?YQ?="}),
        ({"count": 42}, {"Count": "42.5"}),
        ({"inner": {"flag": True}}, {"Flag": "True"}),
    ):
        assert declared.problem_with("tool", arguments, sent(**headers)), arguments
    twice = sent(Region="a")
    twice["mcp-param-region"] = "a"
    assert declared.problem_with("tool", {"region": "a"}, twice)


def test_a_malformed_declaration_is_ignored() -> None:
    for malformed in ({"x-mcp-header": 1, "type": "string"}, {"x-mcp-header": "a b", "type": "string"},
                      {"x-mcp-header": "A", "type": "number"}, True):  # fmt: skip
        assert not learnt(a=malformed).has("tool")
    same = {"type": "string", "x-mcp-header": "A"}
    assert not learnt(a=same, b=same).has("tool")


def test_a_header_is_decoded_only_if_it_is_well_formed() -> None:
    assert decode_value("plain") == "plain"
    assert decode_value("=?base64?SGVsbG8=?=") == "Hello"
    for malformed in (None, "=?base64?SGVsbG8?=", "=?base64?SGVs!!!bG8=?=", "=?base64?/w==?="):
        assert decode_value(malformed) is None


def test_copies_of_arguments_match_them() -> None:
    declared = learnt(
        region={"type": "string", "x-mcp-header": "Region"}, count={"type": "integer", "x-mcp-header": "N"}
    )
    for region in ("a", "é", " a", "", "=?base64?YQ==?=", "a\nb"):
        arguments = {"region": region, "count": 3, "other": 1}
        copies = declared.copies("tool", arguments)
        assert decode_value(encode_value(region)) == region and copies["Mcp-Param-N"] == "3"
        message = Message()
        for name, text in copies.items():
            message[name] = text
        assert declared.problem_with("tool", arguments, message) is None
    assert declared.copies("other", {"region": "a"}) == {}


def test_a_later_list_replaces_the_declarations_of_a_tool() -> None:
    declared = learnt(region={"type": "string", "x-mcp-header": "Region"})
    declared.learn(b'{"jsonrpc":"2.0","id":2,"result":{"tools":[{"name":"tool","inputSchema":{}}]}}')
    assert not declared.has("tool")
