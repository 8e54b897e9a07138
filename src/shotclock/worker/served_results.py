"""Results of resources, prompts and completions as the JSON of the protocol, made in the process of the function.

Later only JSON is left, in which bytes, texts and content look alike.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

from ..core.arguments import to_valid_json
from ..core.content_blocks import Block, Content, blocks_of, text_block
from ..core.errors import Failure
from ..core.value_types import JsonObject
from .content import Message

MOST_VALUES = 100  # of a completion, by the protocol


def conversion_of(kind: str, mime_type: str | None) -> Callable[[object], object]:
    """Return the function that converts the results of a kind of declaration."""
    if kind == "resource":
        return lambda result: {"contents": resource_contents(result, mime_type)}
    if kind == "prompt":
        return lambda result: {"messages": prompt_messages(result)}
    return completion


def resource_contents(result: object, mime_type: str | None) -> list[Block]:
    """Return the contents of a resource: one, or several for a list with bytes or content. They get its URI later."""
    if result is None:
        return []
    if isinstance(result, list | tuple) and any(isinstance(part, Content | bytes) for part in result):
        return [_resource_content(part, mime_type) for part in result]
    return [_resource_content(result, mime_type)]


def _resource_content(part: object, mime_type: str | None) -> Block:
    if isinstance(part, str):
        return {"text": part, "mimeType": mime_type or "text/plain"}
    if isinstance(part, bytes | bytearray | memoryview):
        return {"blob": base64.b64encode(part).decode(), "mimeType": mime_type or "application/octet-stream"}
    if isinstance(part, Content) and part.block.get("type") in ("image", "audio"):
        return {"blob": part.block["data"], "mimeType": part.block["mimeType"]}
    if isinstance(part, Content) and part.block.get("type") == "resource":
        return dict(part.block["resource"])
    return {"text": text_block(to_valid_json(part)[0])["text"], "mimeType": mime_type or "application/json"}


def prompt_messages(result: object) -> list[Block]:
    """Return the messages of a prompt: the parts of a list, or one. Parts without a role are the user's."""
    if result is None:
        return []
    parts = result if isinstance(result, list | tuple) else [result]
    return [_message(part) for part in parts]


def _message(part: object) -> Block:
    if isinstance(part, Message):
        return part.block
    plain = to_valid_json(part)[0]
    if not isinstance(plain, dict) or plain.keys() != {"role", "content"}:
        return Message(part).block
    role, content = plain["role"], plain["content"]
    if role not in ("user", "assistant"):
        raise Failure("RESULT_INVALID", f"the role of a message is 'user' or 'assistant', not {str(role)[:40]!r}")
    blocks = blocks_of(content) or [text_block(content)]
    return {"role": role, "content": blocks[0]}


def completion(result: object) -> JsonObject:
    """Return the values of a completion, cut to the most that the protocol allows."""
    plain = [] if result is None else to_valid_json(result)[0]
    found: JsonObject = dict(plain) if isinstance(plain, dict) else {"values": plain}
    values = found.get("values")
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise Failure("RESULT_INVALID", "a completion returns a list of texts")
    total = found.get("total") or len(values)
    has_more = bool(found.get("hasMore")) or len(values) > MOST_VALUES
    return {"values": values[:MOST_VALUES], "total": total, "hasMore": has_more}
