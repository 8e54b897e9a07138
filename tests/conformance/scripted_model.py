"""A model that follows a script: it asks its agent for one shell command after the other, in four protocols.

The number of tool results in a request is the place in the script, so a repeated request gets the same answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHELL_TOOLS = ("Bash", "bash", "exec_command", "run_shell_command", "shell")
END = "the script ends here"
PLACEHOLDERS = {"string": "x", "boolean": False, "number": 1, "integer": 1, "array": [], "object": {}}
USAGE = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}


@dataclass
class Request:
    """The parts of a request that the script needs."""

    tools: dict[str, Any]
    results: list[str]
    streams: bool = True


@dataclass
class Answer:
    """A shell call, or a text."""

    text: str = ""
    tool: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


class ScriptedModel:
    """A model on loopback. `results` holds the texts of the tool results in the longest conversation so far."""

    def __init__(self, commands: list[str], more: dict[str, Any] | None = None) -> None:
        self.commands = commands
        self.more = more or {}
        """Further arguments of the first shell call."""
        self.results: list[str] = []
        self.changed = threading.Condition()

    def answer(self, request: Request) -> Answer:
        with self.changed:
            if len(request.results) > len(self.results):
                self.results = request.results
                self.changed.notify_all()
        tool = next((name for name in SHELL_TOOLS if name in request.tools), "")
        if not tool or len(request.results) >= len(self.commands):
            return Answer(text=END)
        place = len(request.results)
        more = {} if place else self.more
        return Answer(tool=tool, arguments={**_arguments(request.tools[tool], self.commands[place]), **more})


def _arguments(schema: dict[str, Any], command: str) -> dict[str, Any]:
    properties = schema.get("properties", {})
    arguments: dict[str, Any] = {"cmd" if "cmd" in properties else "command": command}
    for name in schema.get("required", []):
        arguments.setdefault(name, PLACEHOLDERS.get(properties.get(name, {}).get("type"), "x"))
    return arguments


@contextmanager
def serve(commands: list[str], more: dict[str, Any] | None = None) -> Iterator[tuple[ScriptedModel, int]]:
    """Serve a model with this script. Yields the model and its port."""
    model = ScriptedModel(commands, more)

    class Handler(_Handler):
        script = model

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield model, server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: ScriptedModel

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._send(b"", "text/plain")

    def do_GET(self) -> None:
        self._send_json({"object": "list", "data": [{"id": "scripted", "object": "model"}], "models": []})

    def do_POST(self) -> None:
        body = json.loads(self._read_body() or b"{}")
        path = self.path.partition("?")[0]
        try:
            if path.endswith("/messages"):
                self._answer_messages(body)
            elif path.endswith("/responses"):
                self._answer_responses(body)
            elif path.endswith("/chat/completions"):
                self._answer_chat(body)
            elif "enerateContent" in path:
                self._answer_gemini(body)
            else:
                self._send_json({"input_tokens": 1, "totalTokens": 1})
        except (BrokenPipeError, ConnectionResetError):
            pass  # the agent was killed

    def _read_body(self) -> bytes:
        if self.headers.get("transfer-encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), "application/json")

    def _send_events(self, events: list[dict[str, Any]], *, last: str = "") -> None:
        """Send server-sent events. One with a `type` is named after it."""
        lines = []
        for event in events:
            lines += [f"event: {event['type']}"] if "type" in event else []
            lines += [f"data: {json.dumps(event)}", ""]
        self._send("\n".join([*lines, last, ""]).encode(), "text/event-stream")

    # --- Anthropic Messages: Claude Code

    def _answer_messages(self, body: dict[str, Any]) -> None:
        tools = {tool["name"]: tool.get("input_schema", {}) for tool in body.get("tools", []) if "name" in tool}
        contents = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
        parts = [part for content in contents for part in content if part.get("type") == "tool_result"]
        answer = self.script.answer(Request(tools, [_text(part.get("content")) for part in parts]))
        block: dict[str, Any] = {"type": "text", "text": ""}
        delta: dict[str, Any] = {"type": "text_delta", "text": answer.text}
        if answer.tool:
            block = {"type": "tool_use", "id": f"toolu_{len(parts)}", "name": answer.tool, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(answer.arguments)}
        reason = "tool_use" if answer.tool else "end_turn"
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "usage": USAGE}
        if not body.get("stream"):
            whole = {**block, "input": answer.arguments} if answer.tool else {**block, "text": answer.text}
            self._send_json({**message, "content": [whole], "stop_reason": reason, "stop_sequence": None})
            return
        end = {"stop_reason": reason, "stop_sequence": None}
        self._send_events(
            [
                {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}},
                {"type": "content_block_start", "index": 0, "content_block": block},
                {"type": "content_block_delta", "index": 0, "delta": delta},
                {"type": "content_block_stop", "index": 0},
                {"type": "message_delta", "delta": end, "usage": {"output_tokens": 1}},
                {"type": "message_stop"},
            ]
        )

    # --- OpenAI Responses: Codex

    def _answer_responses(self, body: dict[str, Any]) -> None:
        offered = [tool for tool in body.get("tools", []) if tool.get("type") == "function"]
        for group in body.get("tools", []):
            offered += group.get("tools", []) if group.get("type") == "namespace" else []
        tools = {tool["name"]: tool.get("parameters", {}) for tool in offered}
        inputs = [item for item in body.get("input", []) if str(item.get("type")).endswith("_output")]
        answer = self.script.answer(Request(tools, [_text(item.get("output")) for item in inputs]))
        item: dict[str, Any]
        if answer.tool:
            call = {"name": answer.tool, "arguments": json.dumps(answer.arguments), "call_id": f"call_{len(inputs)}"}
            item = {"type": "function_call", "id": f"fc_{len(inputs)}", "status": "completed", **call}
        else:
            content = [{"type": "output_text", "text": answer.text, "annotations": []}]
            item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
        response = {"id": f"resp_{len(inputs)}", "object": "response", "status": "completed", "output": [item]}
        self._send_events(
            [
                {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}},
                {"type": "response.output_item.added", "output_index": 0, "item": item},
                {"type": "response.output_item.done", "output_index": 0, "item": item},
                {"type": "response.completed", "response": {**response, "usage": USAGE}},
            ]
        )

    # --- OpenAI Chat: opencode, Copilot CLI

    def _answer_chat(self, body: dict[str, Any]) -> None:
        functions = [tool["function"] for tool in body.get("tools") or [] if tool.get("type") == "function"]
        tools = {function["name"]: function.get("parameters", {}) for function in functions}
        results = [_text(message.get("content")) for message in body["messages"] if message.get("role") == "tool"]
        answer = self.script.answer(Request(tools, results))
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.tool:
            function = {"name": answer.tool, "arguments": json.dumps(answer.arguments)}
            call = {"index": 0, "id": f"call_{len(results)}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reason = "tool_calls" if answer.tool else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        base = {"id": "chat_1", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            self._send_json({**base, "object": "chat.completion", "choices": [choice], "usage": usage})
            return
        chunk = {**base, "object": "chat.completion.chunk"}
        self._send_events(
            [
                {**chunk, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
                {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
                {**chunk, "choices": [], "usage": usage},
            ],
            last="data: [DONE]\n",
        )

    # --- Gemini

    def _answer_gemini(self, body: dict[str, Any]) -> None:
        declared = [each for tool in body.get("tools", []) for each in tool.get("functionDeclarations", [])]
        tools = {each["name"]: each.get("parametersJsonSchema") or each.get("parameters") or {} for each in declared}
        parts = [part for content in body["contents"] for part in content.get("parts", [])]
        results = [_text(part["functionResponse"]["response"]) for part in parts if "functionResponse" in part]
        settings = body.get("generationConfig", {})
        schema = settings.get("responseJsonSchema") or settings.get("responseSchema")
        if schema and not tools:  # a question to the model about the conversation itself
            part: dict[str, Any] = {"text": json.dumps(_example(schema))}
        else:
            answer = self.script.answer(Request(tools, results))
            part = {"text": answer.text}
            if answer.tool:
                part = {"functionCall": {"name": answer.tool, "args": answer.arguments, "id": f"fc_{len(results)}"}}
                part["thoughtSignature"] = "c2NyaXB0"
        candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
        usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
        content = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "scripted"}
        if "alt=sse" in self.path:
            self._send_events([content])
        else:
            self._send_json(content)


def _example(schema: dict[str, Any]) -> object:
    if "enum" in schema:
        return schema["enum"][0]
    if str(schema.get("type")).lower() == "object":
        return {name: _example(each) for name, each in schema.get("properties", {}).items()}
    return PLACEHOLDERS.get(str(schema.get("type")).lower(), "x")


def _text(content: object) -> str:
    """Return the text of a tool result of any shape."""
    if isinstance(content, list):
        return "\n".join(_text(part) for part in content)
    if isinstance(content, dict):
        return _text(content.get("text") or content.get("output") or content.get("error") or json.dumps(content))
    return "" if content is None else str(content)
