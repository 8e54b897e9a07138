"""A server of models on loopback, spoken by hand: OpenAI's chat completions and responses, Anthropic's messages and
Gemini's contents, streamed as the real ones do. What it does is a script, one entry for each request; the last one is
repeated.

    with model_server(Say("hello ", "world"), Status(429, retry_after="1")) as server: …

None of its answers lasts longer than FOREVER_S.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FOREVER_S = 40.0


@dataclass(frozen=True)
class Say:
    """Text, in pieces."""

    pieces: tuple[str, ...]
    pause_s: float = 0.0
    """Before each piece."""
    tokens: int = 5
    """That the request is said to have used, in and out each. 0: an OpenAI-like server reports no usage."""
    then: str = "end"
    """Or `hang` in the middle of the stream, `cut` the connection, `garbage`: no JSON where there should be; `stop`:
    the stream ends in good order, before the answer has; `flood`: a line without an end."""

    def __init__(self, *pieces: str, pause_s: float = 0.0, tokens: int = 5, then: str = "end") -> None:
        for name, value in (("pieces", pieces), ("pause_s", pause_s), ("tokens", tokens), ("then", then)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class CallTool:
    """The model wants a tool; `None` is whichever tool gives a structured answer."""

    name: str | None
    arguments: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    tokens: int = 5
    then: str = "end"
    """Or `stop`, as of Say."""


@dataclass(frozen=True)
class Status:
    """An error."""

    code: int
    retry_after: str | None = None
    message: str = "no"


@dataclass(frozen=True)
class Hang:
    """No byte of an answer."""


@dataclass(frozen=True)
class Garbage:
    """An answer that is no answer of a model."""


@dataclass(frozen=True)
class Flood:
    """The same bytes, without an end."""

    data: bytes
    status: int = 200
    encoding: str | None = None


Action = Say | CallTool | Status | Hang | Garbage | Flood
Script = Action | Callable[[dict[str, Any]], Action]
"""What to do, or how to decide it by the request."""


@dataclass
class ModelServer:
    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of the requests, as they came."""
    keys: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    hangs: threading.Event = field(default_factory=threading.Event)
    """Set once it has sent all that it will, and hangs."""

    @property
    def openai(self) -> dict[str, str]:
        """The environment that makes it OpenAI."""
        return {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": "sk-secret-of-openai"}

    @property
    def google(self) -> dict[str, str]:
        return {"GOOGLE_GEMINI_BASE_URL": self.url, "GEMINI_API_KEY": "secret-of-google"}

    @property
    def anthropic(self) -> dict[str, str]:
        return {"ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": "sk-secret-of-anthropic"}


@contextlib.contextmanager
def model_server(*script: Script) -> Iterator[ModelServer]:
    http = _Http(("127.0.0.1", 0), _Handler)
    http.daemon_threads = True
    http.script = list(script)
    server = http.model = ModelServer(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        http.shutdown()
        http.server_close()
        thread.join(5)


class _Http(ThreadingHTTPServer):
    script: list[Script]
    model: ModelServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is what most tests are about."""


class _Cut(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"object": "list", "data": []}), {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        model, script = self.server.model, self.server.script
        entry = script[min(len(model.requests), len(script) - 1)]
        model.requests.append(body)
        names = ("x-api-key", "x-goog-api-key", "Authorization")
        model.keys.append(next((self.headers[name] for name in names if name in self.headers), ""))
        action = entry(body) if callable(entry) else entry
        kinds: dict[str, type[_Speech]] = {
            "/messages": _Anthropic,
            ":streamGenerateContent": _Google,
            "/responses": _Responses,
        }
        path = self.path.partition("?")[0]
        speak = next((kind for end, kind in kinds.items() if path.endswith(end)), _OpenAi)(self, body)
        try:
            self._act(action, speak)
        except (_Cut, OSError):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(2)

    def _act(self, action: Action, speak: "_Speech") -> None:
        match action:
            case Hang():
                self.wait(FOREVER_S)
                raise _Cut
            case Status():
                headers = {} if action.retry_after is None else {"Retry-After": action.retry_after}
                self._answer(action.code, json.dumps({"error": {"message": action.message, "type": "x"}}), headers)
            case Garbage():
                self._answer(200, '{"not": "a model', {})
            case Flood():
                self.begin(action.status, action.encoding)
                self._flood(action.data)
                raise _Cut
            case CallTool():
                self.begin()
                speak.start()
                if action.says:
                    speak.text(action.says)
                speak.tool(action.name or speak.output_tool(), action.arguments)
                if action.then != "stop":
                    speak.finish(called=True, tokens=action.tokens)
                self.end()
            case Say():
                self.begin()
                speak.start()
                for piece in action.pieces:
                    self.wait(action.pause_s)
                    speak.text(piece)
                if action.then == "hang":
                    self.server.model.hangs.set()
                    self.wait(FOREVER_S)
                if action.then == "garbage":
                    speak.garbage()
                if action.then == "stop":
                    self.end()
                    return
                if action.then == "flood":
                    self.chunk(b"data: ")
                    self._flood(b"x" * 65_536)
                if action.then != "end":
                    raise _Cut
                speak.finish(called=False, tokens=action.tokens)
                self.end()

    def _flood(self, data: bytes) -> None:
        until = time.monotonic() + FOREVER_S
        while time.monotonic() < until and not self.server.model.ended.is_set():
            self.chunk(data)

    def wait(self, seconds: float) -> None:
        if seconds and self.server.model.ended.wait(seconds):
            raise _Cut

    def _answer(self, code: int, text: str, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def begin(self, status: int = 200, encoding: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        if encoding is not None:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()


class _Speech:
    """What a stream of one protocol looks like."""

    def __init__(self, handler: _Handler, body: dict[str, Any]) -> None:
        self._handler, self._body = handler, body

    def start(self) -> None: ...
    def text(self, piece: str) -> None: ...
    def tool(self, name: str, arguments: dict[str, Any]) -> None: ...
    def finish(self, *, called: bool, tokens: int) -> None: ...
    def garbage(self) -> None: ...

    def output_tool(self) -> str:
        raise NotImplementedError


class _OpenAi(_Speech):
    def _chunk(self, delta: dict[str, Any], finish: str | None = None, usage: dict[str, Any] | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        told = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self._body["model"],
            "choices": [] if usage else [choice],
        }
        if usage:
            told["usage"] = usage
        self._handler.chunk(f"data: {json.dumps(told)}\n\n".encode())

    def start(self) -> None:
        self._chunk({"role": "assistant", "content": ""})

    def text(self, piece: str) -> None:
        self._chunk({"content": piece})

    def tool(self, name: str, arguments: dict[str, Any]) -> None:
        written = json.dumps(arguments)
        function = {"name": name, "arguments": ""}
        self._chunk(
            {"tool_calls": [{"index": 0, "id": f"call_{time.time_ns()}", "type": "function", "function": function}]}
        )
        self._chunk({"tool_calls": [{"index": 0, "function": {"arguments": written}}]})

    def finish(self, *, called: bool, tokens: int) -> None:
        self._chunk({}, "tool_calls" if called else "stop")
        usage = {"prompt_tokens": tokens, "completion_tokens": tokens, "total_tokens": 2 * tokens}
        if tokens:
            self._chunk({}, usage=usage)
        self._handler.chunk(b"data: [DONE]\n\n")

    def garbage(self) -> None:
        self._handler.chunk(b"data: {no json\n\n")

    def output_tool(self) -> str:
        return str(self._body["tools"][-1]["function"]["name"])


class _Responses(_Speech):
    """OpenAI's own protocol, the newer of its two."""

    def __init__(self, handler: _Handler, body: dict[str, Any]) -> None:
        super().__init__(handler, body)
        self._number = 0
        self._items: list[dict[str, Any]] = []

    def _event(self, kind: str, **more: Any) -> None:
        told = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        self._handler.chunk(f"event: {kind}\ndata: {json.dumps(told)}\n\n".encode())

    def _response(self, status: str, tokens: int = 0) -> dict[str, Any]:
        usage = {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 2 * tokens,
        }
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": int(time.time()),
            "model": self._body["model"],
            "status": status,
            "output": self._items if status == "completed" else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage if status == "completed" else None,
        }

    def start(self) -> None:
        self._event("response.created", response=self._response("in_progress"))
        self._event("response.in_progress", response=self._response("in_progress"))

    def text(self, piece: str) -> None:
        if not self._items or self._items[-1]["type"] != "message":
            item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
            self._event("response.output_item.added", output_index=len(self._items), item=item)
            part = {"type": "output_text", "text": "", "annotations": []}
            self._items.append({**item, "content": [part]})
            self._event("response.content_part.added", part=part, **self._place())
        self._items[-1]["content"][0]["text"] += piece
        self._event("response.output_text.delta", delta=piece, logprobs=[], **self._place())

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def tool(self, name: str, arguments: dict[str, Any]) -> None:
        number, written = time.time_ns(), json.dumps(arguments)
        item = {"id": f"fc_{number}", "type": "function_call", "call_id": f"call_{number}", "name": name}
        index = len(self._items)
        self._items.append({**item, "arguments": written, "status": "completed"})
        self._event("response.output_item.added", output_index=index, item={**item, "arguments": ""})
        place = {"item_id": item["id"], "output_index": index}
        self._event("response.function_call_arguments.delta", delta=written, **place)
        self._event("response.function_call_arguments.done", arguments=written, name=name, **place)
        self._event("response.output_item.done", output_index=index, item=self._items[-1])

    def finish(self, *, called: bool, tokens: int) -> None:
        self._event("response.completed", response=self._response("completed", tokens))

    def garbage(self) -> None:
        self._handler.chunk(b"event: response.output_text.delta\ndata: {no json\n\n")

    def output_tool(self) -> str:
        return str(self._body["tools"][-1]["name"])


class _Anthropic(_Speech):
    _index = 0

    def _event(self, kind: str, **more: Any) -> None:
        self._handler.chunk(f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode())

    def start(self) -> None:
        message = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": self._body["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 5, "output_tokens": 0},
        }
        self._event("message_start", message=message)
        self._is_open = False

    def text(self, piece: str) -> None:
        if not self._is_open:
            self._event("content_block_start", index=self._index, content_block={"type": "text", "text": ""})
            self._is_open = True
        self._event("content_block_delta", index=self._index, delta={"type": "text_delta", "text": piece})

    def _stop_block(self) -> None:
        if self._is_open:
            self._event("content_block_stop", index=self._index)
            self._index += 1
            self._is_open = False

    def tool(self, name: str, arguments: dict[str, Any]) -> None:
        self._stop_block()
        block = {"type": "tool_use", "id": f"toolu_{time.time_ns()}", "name": name, "input": {}}
        self._event("content_block_start", index=self._index, content_block=block)
        delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
        self._event("content_block_delta", index=self._index, delta=delta)
        self._is_open = True

    def finish(self, *, called: bool, tokens: int) -> None:
        self._stop_block()
        delta = {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}
        self._event("message_delta", delta=delta, usage={"output_tokens": tokens})
        self._event("message_stop")

    def garbage(self) -> None:
        self._handler.chunk(b"event: content_block_delta\ndata: {no json\n\n")

    def output_tool(self) -> str:
        return str(self._body["tools"][-1]["name"])


class _Google(_Speech):
    def _chunk(self, parts: list[dict[str, Any]], **more: Any) -> None:
        candidate: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": parts}}
        usage = more.pop("usage", None)
        told: dict[str, Any] = {"candidates": [candidate | more], "modelVersion": "gemini-m", "responseId": "1"}
        if usage is not None:
            told["usageMetadata"] = usage
        self._handler.chunk(f"data: {json.dumps(told)}\r\n\r\n".encode())

    def text(self, piece: str) -> None:
        self._chunk([{"text": piece}])

    def tool(self, name: str, arguments: dict[str, Any]) -> None:
        self._chunk([{"functionCall": {"name": name, "args": arguments}}])

    def finish(self, *, called: bool, tokens: int) -> None:
        usage = {"promptTokenCount": tokens, "candidatesTokenCount": tokens, "totalTokenCount": 2 * tokens}
        self._chunk([{"text": ""}], finishReason="STOP", usage=usage)

    def garbage(self) -> None:
        self._handler.chunk(b"data: {no json\r\n\r\n")

    def output_tool(self) -> str:
        return str(self._body["tools"][-1]["functionDeclarations"][-1]["name"])
