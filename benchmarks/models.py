"""Models: what an `ai` step takes beside pydantic-ai alone, asking the same model on loopback, once both are warm."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .rounds import Size, take_turns
from .table import Bar, Row, Table, absolute, compared

LIMIT_S = 300
TITLE = "Models"
PIECES, PAUSE_S = 100, 0.003
NOTE = (
    f"A model on loopback that answers in {PIECES} pieces, one every {PAUSE_S * 1e3:.0f} ms at best. A question "
    "and its answer, read as a stream: an `ai` step of a run, in a chain of ten after a first one that waits for the "
    "imports, with its store and its envelope; and `Agent.run_stream` of pydantic-ai in a loop, on a warm connection. "
    "The rest of a step is what it takes beyond that."
)
STEPS = 10
# Coming up takes the server a tenth of a second.
STARTED_S = 20
WHY = "A step goes to a process of its own, which streams every piece back, and is written down."


class _Model(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(PIECES):
            time.sleep(PAUSE_S)
            self._say(asked, {"content": f"{number} "})
        self._say(asked, {}, "stop")
        self._send(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _say(self, asked: dict[str, Any], delta: dict[str, Any], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        told = {
            "id": "1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": asked["model"],
            "choices": [choice],
        }
        self._send(f"data: {json.dumps(told)}\n\n".encode())

    def _send(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def model() -> Iterator[str]:
    """A model in a process of its own, so that it takes no time from whoever asks it. Yields its address."""
    server = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait(STARTED_S)


async def step_ms(url: str, count: int) -> float:
    from shotclock.flows.file.schema import WorkflowFile
    from shotclock.flows.run.runs import RunCaller, RunRequest, start
    from shotclock.store.store import Store

    steps: dict[str, Any] = {}
    for number in range(count + 1):
        steps[f"s{number}"] = {
            "type": "ai",
            "prompt": "count",
            "ai": {"base_url": url, "model": "m", "timeout": 60_000},
        }
        if number:
            steps[f"s{number}"]["depends_on"] = f"s{number - 1}"
    ended: list[float] = []
    with tempfile.TemporaryDirectory(prefix="shotclock-bench-") as folder, Store.open(Path(folder) / "home") as store:
        request = RunRequest(WorkflowFile.model_validate({"steps": steps}), f"{folder}/flow.yaml", Path(folder))

        def on_change(state: Any) -> None:
            if state.status.is_final:
                ended.append(time.perf_counter())

        envelope = await start(request, store, RunCaller(None, on_change))
    assert envelope.ok, envelope.error
    return (ended[-1] - ended[0]) / count * 1e3


async def alone_ms(url: str, count: int) -> float:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    asked = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(asked)

    async def ask() -> None:
        async with agent.run_stream("count") as answer:
            async for _ in answer.stream_text(delta=True, debounce_by=None):
                pass

    async with agent:  # keeps the connection
        await ask()
        began = time.perf_counter()
        for _ in range(count):
            await ask()
        return (time.perf_counter() - began) / count * 1e3


async def _measure(rounds: int, count: int) -> Table:
    with model() as url:
        taken = await take_turns({"step": lambda: step_ms(url, count), "alone": lambda: alone_ms(url, count)}, rounds)
    rows: list[Row] = [
        compared("a question and its answer", taken["step"], "pydantic-ai", taken["alone"], "{:.1f} ms", Bar(1.2), WHY),
        absolute("the rest of a step", taken["step"] - taken["alone"], "{:.1f} ms", None),
    ]
    return Table(TITLE, NOTE, rows)


def measure(size: Size) -> Table:
    return asyncio.run(_measure(*size.of((5, STEPS), (1, STEPS), (1, 1))))


if __name__ == "__main__":
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    http.daemon_threads = True
    sys.stdout.write(f"http://127.0.0.1:{http.server_port}/v1\n")
    sys.stdout.flush()
    assert os.getppid() != 1
    http.serve_forever()
