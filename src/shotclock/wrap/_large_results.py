"""Large results of calls, cut to head and tail, with a link to a file that has the whole."""

from __future__ import annotations

from ..calls.call import new_request_id
from ..supervise.command_task import Capture, spill_path
from ._messages import JsonObject, RpcMessage, encode
from ._requests import ClientRequest

LARGEST_LIMIT = 4 * 1024 * 1024  # kept in memory while it passes


def cut_result(request: ClientRequest, answer: RpcMessage, limit: int, *, is_error: bool, is_modern: bool) -> bytes:
    """Return the answer to a call cut to head and tail, and keep the whole in a file."""
    capture = Capture(limit, spill_path(f"wrap-{new_request_id()}.json"))
    capture.add(answer.line)
    captured = capture.finish()
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
    whole = _text_of(answer)
    head, tail = whole[: len(captured.head)], whole[len(captured.head) :][-len(captured.tail) :]
    text = f"{head.decode('utf-8', 'replace')}\n{gap} …]\n{tail.decode('utf-8', 'replace')}"
    result: JsonObject = {"content": [{"type": "text", "text": text}, *content]}
    if is_error:
        result["isError"] = True
    if is_modern:
        result["resultType"] = "complete"
    return encode({"jsonrpc": "2.0", "id": request.id, "result": result})


def _text_of(answer: RpcMessage) -> bytes:
    """Return the texts of a result; of a result with other parts, its JSON."""
    content = answer.result.get("content") if isinstance(answer.result, dict) else None
    parts = [each if isinstance(each, dict) else {} for each in content] if isinstance(content, list) else []
    if not parts or not all(isinstance(part.get("text"), str) for part in parts):
        return answer.line
    return "\n".join(part["text"] for part in parts).encode("utf-8", "backslashreplace")
