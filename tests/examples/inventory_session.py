"""One session with the inventory: a client drives the server of examples/inventory.py, or the one of FastMCP."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp_types import CallToolResult, ElicitResult

ANSWERS_WITHIN_S = 30.0
WANTS_LOG: Any = {"io.modelcontextprotocol/logLevel": "info"}  # in the 2026 revision
APPLE, PEAR, PLUM = ({"name": "apple", "count": 5, "price": 0.5}, {"name": "pear", "count": 9, "price": 1.0},
                     {"name": "plum", "count": 4, "price": 0.25})  # fmt: skip
TAKEN = {**APPLE, "count": 2}


@dataclass(frozen=True)
class Fails:
    """A call that fails, with these words in what the client sees."""

    words: str


@dataclass(frozen=True)
class Picture:
    """A call that answers with a PNG of this size."""

    width: int
    height: int


CALLS: list[tuple[str, dict[str, Any], Any]] = [
    ("gross", {"price": 10}, 11.9),
    ("gross", {"price": 10, "rate": 200}, Fails("Input should be less than or equal to 100")),
    ("add", {"item": APPLE}, "5 apple"),
    ("add", {"item": APPLE}, Fails("apple is there already")),
    ("load", {"items": [PEAR, PLUM]}, 2),
    ("search", {"query": "p"}, [APPLE, PEAR, PLUM]),
    ("search", {"query": "p", "limit": 1}, [APPLE]),
    ("search", {"query": ""}, Fails("at least 1 character")),
    ("take", {"name": "apple", "count": 3}, TAKEN),
    ("take", {"name": "apple", "count": 30}, Fails("2 apple are left, not 30")),
    ("take", {"name": "apple", "count": "many"}, Fails("Input should be a valid integer")),
    ("reorder", {"name": "fig"}, Fails("there is no fig in stock")),
    ("reorder", {"name": "pear"}, "ordered 7 pear by express"),
    ("reorder", {"name": "plum"}, "nothing was ordered"),
    ("chart", {}, Picture(64, 24)),
]
"""Calls in this order, and their values."""
LOG = [("info", "added 2 items"), ("warning", "few apple are left")]
PROGRESS = [(1, 2, "added pear"), (2, 2, "added plum")]
QUESTIONS = [
    ("How many pear do you want?", {"count": "integer", "express": "boolean"}, ["count"]),
    ("Order 7 pear?", {"value": "string"}, ["value"]),
    ("How many plum do you want?", {"count": "integer", "express": "boolean"}, ["count"]),
]
ANSWERS: dict[str, ElicitResult] = {
    "How many pear do you want?": ElicitResult(action="accept", content={"count": 7, "express": True}),
    "Order 7 pear?": ElicitResult(action="accept", content={"value": "yes"}),
    "How many plum do you want?": ElicitResult(action="decline"),
}
RESOURCES = {
    "inventory://summary": ("application/json", '{"items": 3, "value": 11.0}'),
    "inventory://items/pear": ("text/plain", "9 pear at 1.0"),
    "inventory://items/fig": Fails("there is no fig in stock"),
}
LETTER = "Write a short letter that orders 5 pears."


@dataclass
class Session:
    """What a client has seen. The notices are in the order in which they came."""

    offered: dict[str, Any] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)
    resources: dict[str, Any] = field(default_factory=dict)
    letter: Any = None
    log: list[Any] = field(default_factory=list)
    progress: list[Any] = field(default_factory=list)
    questions: list[Any] = field(default_factory=list)


def answer_of(result: CallToolResult) -> Any:
    """Return the value of a result, which is in the structured content and in the text, or the text of a failure."""
    (block,) = result.content
    if block.type == "image":
        assert not result.is_error and block.mime_type == "image/png"
        return ("image", block.data)
    assert block.type == "text"
    return ("failed", block.text) if result.is_error else ("value", result.structured_content, block.text)


async def drive(argv: list[str], mode: str, environ: Mapping[str, str] | None = None) -> Session:
    seen = Session()

    async def elicit(_: Any, params: Any) -> ElicitResult:
        schema = params.requested_schema
        kinds = {name: each["type"] for name, each in schema["properties"].items()}
        seen.questions.append((params.message, kinds, schema["required"]))
        return ANSWERS[params.message]

    async def log(params: Any) -> None:
        data = params.data
        seen.log.append((params.level, data["msg"] if isinstance(data, dict) else data))

    async def progress(done: float, total: float | None, message: str | None) -> None:
        seen.progress.append((done, total, message))

    server = StdioServerParameters(command=argv[0], args=argv[1:], env={**os.environ, **(environ or {})})
    callbacks: dict[str, Any] = {"elicitation_callback": elicit, "logging_callback": log}
    async with Client(server, mode=mode, read_timeout_seconds=ANSWERS_WITHIN_S, **callbacks) as client:
        seen.offered = {
            "instructions": client.instructions,
            "tools": {
                tool.name: (
                    sorted(tool.input_schema["properties"]),
                    tool.input_schema.get("required", []),
                    is_read(tool),
                )
                for tool in (await client.list_tools()).tools
            },
            "resources": [each.uri for each in (await client.list_resources()).resources],
            "templates": [each.uri_template for each in (await client.list_resource_templates()).resource_templates],
            "prompts": [each.name for each in (await client.list_prompts()).prompts],
        }
        for name, arguments, _ in CALLS:
            result = await client.call_tool(name, arguments, progress_callback=progress, meta=WANTS_LOG)
            seen.answers.append(answer_of(result))
        for uri in RESOURCES:
            try:
                (content,) = (await client.read_resource(uri)).contents
                seen.resources[uri] = (content.mime_type, getattr(content, "text", None))
            except MCPError as error:
                seen.resources[uri] = ("failed", error.error.message)
        (message,) = (await client.get_prompt("letter", {"name": "pears", "count": "5"})).messages
        seen.letter = (message.role, getattr(message.content, "text", None))
    return seen


def is_read(tool: Any) -> bool:
    return tool.annotations is not None and tool.annotations.read_only_hint is True
