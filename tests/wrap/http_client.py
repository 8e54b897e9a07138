"""A front of a wrapped server over HTTP, and a raw client of it. Every wait is bounded."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from tests.wrap.client import ANSWER_WITHIN_S, GREETING, SERVER

ENDED_WITHIN_S = 30.0
HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
MODERN = "2026-07-28"
ENVELOPE_OF_PROTOCOL = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
}


class Front:
    """A running `shotclock wrap --http`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(ENDED_WITHIN_S)


@contextmanager
def front(*options: str, server: list[str] | None = None, at: str = "127.0.0.1:0") -> Iterator[Front]:
    """`shotclock wrap --http OPTIONS -- SERVER`, until the test is over."""
    words = ["--", *server] if server else [] if "--config" in options else ["--", *SERVER]
    argv = [sys.executable, "-m", "shotclock", "wrap", "--http", at, *options, *words]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)
        try:
            wait_until(lambda: read_log(log).endswith("/mcp\n") or process.poll() is not None)
            found = re.search(r"serving \S+ on http://\S+:(\d+)/mcp$", read_log(log).strip())
            assert found is not None, read_log(log)
            yield Front(process, int(found[1]))
        finally:
            process.terminate()
            try:
                process.wait(ENDED_WITHIN_S)
            finally:
                process.kill()
                process.wait(ENDED_WITHIN_S)
        assert "Exception in thread" not in read_log(log), read_log(log)


def read_log(log: IO[bytes]) -> str:
    return os.pread(log.fileno(), 1_000_000, 0).decode("utf-8", "replace")


class Answer:
    """An HTTP response, read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): text for name, text in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def messages(self) -> list[Any]:
        """The messages of an event stream, or the only one of a JSON body."""
        if self.headers["content-type"] == "application/json":
            return [self.json]
        return [json.loads(event["data"]) for event in read_events(self.body) if event.get("data")]

    @property
    def text(self) -> str:
        return self.messages[-1]["result"]["content"][0]["text"]


def read_events(body: bytes) -> list[dict[str, str]]:
    events = []
    for block in body.decode().split("\r\n\r\n"):
        lines = [line.partition(":") for line in block.split("\r\n") if line and not line.startswith(":")]
        if lines:
            events.append({name: value.removeprefix(" ") for name, _, value in lines})
    return events


class HttpClient:
    """A client of one connection, with or without a session."""

    def __init__(self, front: Front, **headers: str) -> None:
        self.front = front
        self.connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=ANSWER_WITHIN_S)
        self.headers = {**HEADERS, **{name.replace("_", "-"): text for name, text in headers.items()}}
        self.last_id = 0

    def __enter__(self) -> "HttpClient":
        return self

    def __exit__(self, *raised: object) -> None:
        self.connection.close()

    def begin(self, content: Any, **headers: str) -> None:
        """Send a POST without waiting for its answer."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        more = {name.replace("_", "-"): text for name, text in headers.items()}
        self.connection.request("POST", "/mcp", body, {**self.headers, **more})

    def post(self, content: Any, **headers: str) -> Answer:
        self.begin(content, **headers)
        return Answer(self.connection.getresponse())

    def get(self, **headers: str) -> http.client.HTTPResponse:
        more = {name.replace("_", "-"): text for name, text in headers.items()}
        self.connection.request("GET", "/mcp", headers={**self.headers, **more})
        return self.connection.getresponse()

    def delete(self) -> Answer:
        self.connection.request("DELETE", "/mcp", headers=self.headers)
        return Answer(self.connection.getresponse())

    def message(self, method: str, params: dict[str, Any] | None = None, *, id: Any = None) -> dict[str, Any]:
        self.last_id += 1
        id = self.last_id if id is None else id
        return {"jsonrpc": "2.0", "id": id, "method": method, **({} if params is None else {"params": params})}

    def request(self, method: str, params: dict[str, Any] | None = None, *, id: Any = None) -> Answer:
        return self.post(self.message(method, params, id=id))

    def call_message(self, tool: str, meta: Any = None, id: Any = None, **arguments: Any) -> dict[str, Any]:
        params = {"name": tool, "arguments": arguments, **({"_meta": meta} if meta else {})}
        return self.message("tools/call", params, id=id)

    def call(self, tool: str, meta: Any = None, id: Any = None, **arguments: Any) -> Answer:
        return self.post(self.call_message(tool, meta, id, **arguments))

    def greet(self) -> Answer:
        """Open a session."""
        answer = self.request("initialize", GREETING)
        self.headers["Mcp-Session-Id"] = answer.headers["mcp-session-id"]
        assert self.post({"jsonrpc": "2.0", "method": "notifications/initialized"}).status == 202
        return answer

    def modern_call(self, tool: str, *, id: Any, token: Any = None, **arguments: Any) -> Answer:
        """Call a tool without a session."""
        self.begin_modern_call(tool, id=id, token=token, **arguments)
        return Answer(self.connection.getresponse())

    def begin_modern_call(self, tool: str, *, id: Any, token: Any = None, **arguments: Any) -> None:
        meta = {**ENVELOPE_OF_PROTOCOL, **({} if token is None else {"progressToken": token})}
        self.begin(
            self.call_message(tool, meta, id, **arguments),
            MCP_Protocol_Version=MODERN,
            Mcp_Method="tools/call",
            Mcp_Name=tool,
        )


@contextmanager
def session(front: Front, **headers: str) -> Iterator[HttpClient]:
    """A client with a session of its own."""
    with HttpClient(front, **headers) as client:
        client.greet()
        yield client


def wait_until(condition: Any, within_s: float = ENDED_WITHIN_S) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "not in time"
        time.sleep(0.05)
