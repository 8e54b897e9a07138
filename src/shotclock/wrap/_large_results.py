"""Large results of calls, cut to head and tail, with a link to a file that has the whole."""

from __future__ import annotations

import json
import re

from ..calls.call import new_request_id
from ..supervise.command_task import Capture, Captured, spill_path
from ._messages import JsonObject, encode
from ._requests import ClientRequest

LARGEST_LIMIT = 4 * 1024 * 1024  # kept in memory while it passes
_WHOLE_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_LONGEST_ESCAPE = 12  # a pair of \uXXXX
_STRUCTURED = b'"structuredContent"'  # inside a text its quotes would be escaped


def has_structure(line: bytes) -> bool:
    """Return whether the result has structured content."""
    return _STRUCTURED in line


def cut_result(request: ClientRequest, line: bytes, limit: int, *, is_error: bool, is_modern: bool) -> bytes:
    """Return the answer to a call cut to head and tail, and keep the whole in a file."""
    capture = Capture(limit, spill_path(f"wrap-{new_request_id()}.json"))
    capture.add(line)
    return _cut_line(request, capture.finish(), is_error=is_error, is_modern=is_modern)


def _cut_line(request: ClientRequest, captured: Captured, *, is_error: bool, is_modern: bool) -> bytes:
    left_out = captured.total - len(captured.head) - len(captured.tail)
    gap = f"[… shotclock left out {left_out} of {captured.total} bytes, the limit of --result-limit"
    content: list[object] = []
    if captured.file is not None and captured.file_bytes == captured.total:
        gap += f"; the whole answer is in {captured.file}"
        name = f"the whole answer of {request.tool}"
        uri = f"file://{captured.file}"
        link = {"type": "resource_link", "uri": uri, "name": name, "mimeType": "application/json"}
        content.append({**link, "size": captured.file_bytes})
    elif captured.file is not None:
        gap += f"; the first {captured.file_bytes} bytes are in {captured.file}"
    text = f"{_text_of_head(captured.head)}\n{gap} …]\n{_text_of_tail(captured.tail)}"
    result: JsonObject = {"content": [{"type": "text", "text": text}, *content]}
    if is_error:
        result["isError"] = True
    if is_modern:
        result["resultType"] = "complete"
    return encode({"jsonrpc": "2.0", "id": request.id, "result": result})


def _text_of_head(head: bytes) -> str:
    """Return the start of the first text of a result; of any other result, its JSON."""
    before, found, text = head.partition(b'"text":')
    opened = text.lstrip()
    if not found or opened[:1] != b'"' or len(before) > 1_000:
        return head.decode("utf-8", "replace")
    if _WHOLE_STRING.match(opened):  # a short text before a large part of another kind
        return head.decode("utf-8", "replace")
    return _unescape(opened[1:], from_end=True) or head.decode("utf-8", "replace")


def _text_of_tail(tail: bytes) -> str:
    """Return the end of the last text of a result; of any other result, its JSON."""
    end = tail.rfind(b'"}]')
    if end < 0 or b'"' in tail[:end].replace(b'\\"', b""):
        return tail.decode("utf-8", "replace")
    return _unescape(tail[:end], from_end=False) or tail.decode("utf-8", "replace")


def _unescape(inside: bytes, *, from_end: bool) -> str:
    """Return the text of a part of a JSON string. Its cut end, or its cut start, may be the half of an escape."""
    for dropped in range(_LONGEST_ESCAPE + 1):
        part = inside[: len(inside) - dropped] if from_end else inside[dropped:]
        try:
            return str(json.loads(b'"' + part + b'"'))
        except ValueError:
            continue
    return ""
