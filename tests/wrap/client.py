"""A raw client of a wrapped server: lines over pipes, every wait bounded."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.warm import WarmStart

SERVER = [sys.executable, str(Path(__file__).with_name("scripted_server.py"))]
COLD_START = subprocess.Popen  # also where `warm_starts` has replaced it
# An interpreter or two on a busy machine. Only a hang runs this out.
ANSWER_WITHIN_S = 30.0
ENDED_WITHIN_S = 15.0
ENVELOPE = "shotclock.dev/envelope"
GREETING = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"sampling": {}},
    "clientInfo": {"name": "raw", "version": "1"},
}


class RawClient:
    """A client that sees the bytes."""

    def __init__(self, argv: list[str], stderr: Any, *, cold: bool = False) -> None:
        start = COLD_START if cold or argv[1:3] != ["-m", "shotclock"] else WarmStart
        self.process = start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        self.lines: list[bytes] = []
        """Everything that came, in order."""
        self.others: list[Any] = []
        """Messages that came while another one was waited for."""
        self._rest = bytearray()
        self._ready: list[bytes] = []
        self._last_id = 0

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def send(self, **content: Any) -> None:
        self.write(json.dumps({"jsonrpc": "2.0", **content}).encode() + b"\n")

    def request(self, method: str, params: dict[str, Any] | None = None, *, id: Any = None) -> Any:
        """Send a request and return its id."""
        self._last_id += 1
        id = self._last_id if id is None else id
        self.send(id=id, method=method, **({} if params is None else {"params": params}))
        return id

    def call(self, tool: str, *, meta: dict[str, Any] | None = None, id: Any = None, **arguments: Any) -> Any:
        """Send a call and return its id."""
        return self.request(
            "tools/call", {"name": tool, "arguments": arguments, **({"_meta": meta} if meta else {})}, id=id
        )

    def next_line(self, within_s: float = ANSWER_WITHIN_S) -> bytes:
        """Return the next line; nothing at the end of the stream."""
        assert self.process.stdout is not None
        give_up_at = time.monotonic() + within_s
        while not self._ready:
            left = give_up_at - time.monotonic()
            assert left > 0 and select.select([self.process.stdout], [], [], left)[0], "no line in time"
            chunk = os.read(self.process.stdout.fileno(), 1 << 20)
            if not chunk:
                return b""
            *whole, rest = chunk.split(b"\n")
            if whole:
                whole[0] = bytes(self._rest) + whole[0]
                self._rest.clear()
            self._rest += rest
            self._ready = [line + b"\n" for line in whole]
        line = self._ready.pop(0)
        self.lines.append(line)
        return line

    def receive(self, id: Any, within_s: float = ANSWER_WITHIN_S) -> Any:
        """Return the answer to a request."""
        for message in self.others:
            if is_answer(message, id):
                self.others.remove(message)
                return message
        give_up_at = time.monotonic() + within_s
        while True:
            line = self.next_line(max(0.01, give_up_at - time.monotonic()))
            assert line, f"the stream ended before the answer {id!r}"
            try:
                message = json.loads(line)
            except ValueError:
                message = line
            if is_answer(message, id):
                return message
            self.others.append(message)

    def wait_for(self, method: str, within_s: float = ANSWER_WITHIN_S) -> Any:
        """Return the next request or notification of that method."""
        give_up_at = time.monotonic() + within_s
        while True:
            for message in self.others:
                if isinstance(message, dict) and message.get("method") == method:
                    self.others.remove(message)
                    return message
            line = self.next_line(max(0.01, give_up_at - time.monotonic()))
            assert line, f"the stream ended before {method}"
            self.others.append(json.loads(line))

    def greet(self) -> Any:
        answer = self.receive(self.request("initialize", GREETING))
        self.send(method="notifications/initialized")
        return answer

    def ask(self, tool: str, **arguments: Any) -> Any:
        """Call a tool and return the result."""
        return self.receive(self.call(tool, **arguments))["result"]

    def text(self, tool: str, **arguments: Any) -> str:
        result = self.ask(tool, **arguments)
        assert not result.get("isError"), result
        return result["content"][0]["text"]


def is_answer(message: Any, id: Any) -> bool:
    is_message = isinstance(message, dict) and "method" not in message
    return is_message and message.get("id") == id and type(message["id"]) is type(id)


@contextmanager
def wrapped(
    *options: str, server: list[str] | None = None, greets: bool = True, stderr: Any = None, cold: bool = False
) -> Iterator[RawClient]:
    """A client of `shotclock wrap OPTIONS -- SERVER`. Cold where its memory or its imports are looked at."""
    argv = [sys.executable, "-m", "shotclock", "wrap", *options, "--", *(server or SERVER)]
    with connected(argv, stderr, cold=cold) as client:
        if greets:
            client.greet()
        yield client


@contextmanager
def connected(argv: list[str], stderr: Any = None, *, cold: bool = False) -> Iterator[RawClient]:
    client = RawClient(argv, stderr, cold=cold)
    process = client.process
    try:
        yield client
    finally:
        if process.stdin is not None:
            try:
                process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            process.wait(ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(ENDED_WITHIN_S)
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()


def failure(result: Any) -> tuple[str, Any]:
    """Return the text and the envelope of a failed call."""
    assert result["isError"] is True, result
    return result["content"][0]["text"], result["_meta"][ENVELOPE]
