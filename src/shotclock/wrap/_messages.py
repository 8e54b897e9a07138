"""JSON-RPC messages, read as far as routing and limits need. The bytes of a message pass unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..core.json_values import is_deeper_than
from ..core.value_types import record, replace
from ._lines import LongLine, replace_id

# `1` and `"1"` are two ids, and in Python 1 == True == 1.0: the type is part of the key.
Key = tuple[str, object]
JsonObject = dict[str, object]
DEPTH_READ = 900
INVALID_REQUEST = -32600

# A request that stays open for hours: its answer is the end of a subscription.
LISTEN = "subscriptions/listen"
DISCOVER = "server/discover"
# Repeating these on another server process changes nothing.
HARMLESS = frozenset(
    {
        "initialize",
        DISCOVER,
        "ping",
        "tools/list",
        "prompts/list",
        "resources/list",
        "resources/templates/list",
        "completion/complete",
        "logging/setLevel",
        "resources/subscribe",
        "resources/unsubscribe",
        LISTEN,
    }
)
LIST_CHANGES = {
    "notifications/tools/list_changed": "tools",
    "notifications/prompts/list_changed": "prompts",
    "notifications/resources/list_changed": "resources",
}
# Words by which a policy decides. Some parsers do not distinguish `method` from `Method`, or end a word at NUL.
_DECISIVE = {
    "jsonrpc",
    "id",
    "method",
    "params",
    "result",
    "error",
    "name",
    "arguments",
    "uri",
    "ref",
    "type",
    "tools",
    "prompts",
    "resourceTemplates",
    "instructions",
    "tools/call",
    "prompts/get",
    "resources/read",
    "resources/subscribe",
    "completion/complete",
}
# Of a request that may be repeated; hundreds may be open.
LONGEST_REPEATED = 16 * 1024
_ENVELOPE_PREFIX = "io.modelcontextprotocol/"
REVISION_KEY = _ENVELOPE_PREFIX + "protocolVersion"


@record
class RpcMessage:
    """A message of either side. `line` is its bytes."""

    line: bytes
    id: object
    key: Key | None
    method: str | None
    params: JsonObject
    result: object
    is_error: bool
    is_answer: bool

    @property
    def is_request(self) -> bool:
        return self.method is not None and self.key is not None

    @property
    def meta(self) -> JsonObject:
        meta = self.params.get("_meta")
        return meta if isinstance(meta, dict) else {}

    @property
    def is_tool_error(self) -> bool:
        return isinstance(self.result, dict) and self.result.get("isError") is True

    def with_id(self, new_id: str | int) -> bytes:
        """Return the line with another id. Numbers stay as they were written, such as 1.0e3 and 1e400."""
        return replace_id(self.line, new_id) or encode({**json.loads(self.line), "id": new_id})


def read_line(line: bytes) -> RpcMessage | None:
    """Return the message of a whole line; None for any other text, also for JSON that is no message."""
    try:
        content = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("jsonrpc") != "2.0":
        return None
    # It must be possible to write what was read, and the encoder has the same limit.
    if line.count(b"[") + line.count(b"{") > DEPTH_READ and is_deeper_than(DEPTH_READ, content):
        return None
    return _message(line, content)


def read_strictly(line: bytes) -> RpcMessage | None:
    """Return the message of a whole line that every parser reads alike; None for any other line."""
    message = read_line(line)
    if message is None or b"\r" in line.rstrip(b"\r\n"):  # some readers end a line at \r
        return None
    try:
        content: JsonObject = json.loads(line, object_pairs_hook=_read_members)
    except ValueError:
        return None
    is_either = ("method" in content) is not message.is_answer and ("method" in content) is (message.method is not None)
    inner = (content, message.params, message.params.get("ref"), message.result)
    words = [message.method or "", *(key for each in inner if isinstance(each, dict) for key in each)]
    return message if is_either and not any(_is_disguised(word) for word in words) else None


def _read_members(members: list[tuple[str, object]]) -> JsonObject:
    content = dict(members)
    if len(content) < len(members):
        raise ValueError("a key is there twice, and parsers differ in the one that counts")
    return content


def _is_disguised(word: str) -> bool:
    return word not in _DECISIVE and word.casefold().partition("\0")[0].strip() in _DECISIVE


def read_long_line(line: LongLine) -> RpcMessage:
    """Return what is known of a line that is too long to be passed."""
    members = line.read_members()
    message = _message(b"", members)
    return replace(message, is_answer=message.method is None)


def _message(line: bytes, content: JsonObject) -> RpcMessage:
    method, params, id = content.get("method"), content.get("params"), content.get("id")
    return RpcMessage(
        line=line,
        id=id,
        key=key_of(id),
        method=method if isinstance(method, str) else None,
        params=params if isinstance(params, dict) else {},
        result=content.get("result"),
        is_error="error" in content,
        is_answer="result" in content or "error" in content,
    )


def error_of(message: RpcMessage) -> JsonObject:
    """Return the error of a message; an empty one if there is none."""
    content = json.loads(message.line) if message.is_error else {}
    error = content.get("error")
    return error if isinstance(error, dict) else {}


def key_of(id: object) -> Key | None:
    return (type(id).__name__, id) if isinstance(id, str | int | float) else None


def encode(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def request_line(id: str, method: str, params: Mapping[str, object] | None = None) -> bytes:
    return encode({"jsonrpc": "2.0", "id": id, "method": method, **({"params": params} if params else {})})


def notification_line(method: str, params: Mapping[str, object] | None = None) -> bytes:
    return encode({"jsonrpc": "2.0", "method": method, **({"params": params} if params else {})})


def error_line(id: object, why: str) -> bytes:
    """Return our refusal of a request, or of a line without an id."""
    error = {"code": INVALID_REQUEST, "message": f"shotclock: {why}"}
    return encode({"jsonrpc": "2.0", "id": id, "error": error})


def cancellation_line(id: object, reason: str) -> bytes:
    return notification_line("notifications/cancelled", {"requestId": id, "reason": reason})


def envelope_of_protocol(meta: JsonObject) -> JsonObject:
    """Return the keys that every request of the revision 2026-07-28 carries in `_meta`."""
    return {key: item for key, item in meta.items() if key.startswith(_ENVELOPE_PREFIX)}
