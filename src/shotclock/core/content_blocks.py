"""Content blocks of MCP: images, audio, files and links in a result, as the JSON that the protocol has for them.

The public classes are in `worker.content`; here is what every surface knows of them.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, get_args

from .value_types import JsonObject

Block = JsonObject

# As base64. A result of more is refused by the server anyway.
LONGEST_CONTENT = 8 * 1024 * 1024

_COMMON = {"type", "annotations", "_meta"}
_KEYS = {
    "text": _COMMON | {"text"},
    "image": _COMMON | {"data", "mimeType"},
    "audio": _COMMON | {"data", "mimeType"},
    "resource": _COMMON | {"resource"},
    "resource_link": _COMMON | {"uri", "name", "title", "description", "mimeType", "size", "icons"},
}


class Content:
    """A part of a result that clients show as it is. It becomes its block in JSON."""

    __slots__ = ("block",)

    def __init__(self, block: Block) -> None:
        self.block: Block = {name: item for name, item in block.items() if item is not None}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and type(other) is type(self) and self.block == other.block

    def __hash__(self) -> int:
        return hash(json.dumps(self.block, sort_keys=True))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {describe_block(self.block)}>"


def mentions_content(annotation: Any) -> bool:
    """Return whether a return annotation contains a type of content, also one of the MCP SDK."""
    if isinstance(annotation, type) and not get_args(annotation):
        return issubclass(annotation, Content) or annotation.__module__.partition(".")[0] == "mcp_types"
    return any(mentions_content(each) for each in get_args(annotation))


def holds_content(result: object) -> bool:
    parts = result if isinstance(result, list | tuple) else [result]
    return any(isinstance(part, Content) for part in parts)


def blocks_of(value: object) -> list[Block] | None:
    """Return the blocks of a result with content, None for other results. Other parts of a list become texts."""
    if is_block(value):
        return [_without_none(value)]
    if not isinstance(value, list):
        return None
    are_blocks = [is_block(part) for part in value]
    if not any(are_blocks):
        return None
    parts = zip(value, are_blocks, strict=True)
    return [_without_none(part) if is_one else text_block(part) for part, is_one in parts]


def text_block(value: object) -> Block:
    """Return a text as a block, and any other value as its JSON."""
    if isinstance(value, str):
        return {"type": "text", "text": value}
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return {"type": "text", "text": text}


def is_block(value: object) -> bool:
    """Return whether a value is a complete content block: a client refuses an answer with a broken one."""
    if not isinstance(value, dict) or not isinstance(kind := value.get("type"), str):
        return False
    if kind not in _KEYS or not value.keys() <= _KEYS[kind]:
        return False
    match kind:
        case "text":
            return isinstance(value.get("text"), str)
        case "image" | "audio":
            return isinstance(value.get("mimeType"), str) and is_base64(value.get("data"))
        case "resource_link":
            return isinstance(value.get("uri"), str) and isinstance(value.get("name"), str)
    inside = value.get("resource")
    if not isinstance(inside, dict) or not isinstance(inside.get("uri"), str):
        return False
    return isinstance(inside.get("text"), str) or is_base64(inside.get("blob"))


def is_base64(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return False


def _without_none(block: Any) -> Block:
    """Leave out empty fields, which models of the SDK write as null, and the protocol does not allow."""
    kept = {name: item for name, item in block.items() if item is not None}
    if isinstance(kept.get("resource"), dict):
        kept["resource"] = {name: item for name, item in kept["resource"].items() if item is not None}
    return kept


def describe_block(block: Block) -> str:
    """Return a block in one line for people: a text as it is, other content as `[image image/png, 12 kB]`."""
    kind = block["type"]
    if kind == "text":
        return str(block["text"])
    if kind == "resource_link":
        return f"[link {block['name']}: {block['uri']}]"
    if kind == "resource":
        inside = block["resource"]
        size = len(inside["text"].encode()) if "text" in inside else _size(inside["blob"])
        return f"[file {inside['uri']}, {inside.get('mimeType', 'unknown type')}, {describe_size(size)}]"
    return f"[{kind} {block['mimeType']}, {describe_size(_size(block['data']))}]"


def _size(encoded: str) -> int:
    return len(encoded) * 3 // 4 - encoded[-2:].count("=")


def describe_size(size: int) -> str:
    """Return a number of bytes in the largest unit of which there is one."""
    if size < 1_000:
        return f"{size} B"
    return f"{size / 1_000:.0f} kB" if size < 1_000_000 else f"{size / 1_000_000:.1f} MB"
