"""A stand-in for a collector, and servers that say what they were sent."""

import contextlib
import json
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

# A collector gets the spans when their process leaves at the latest; this is for a machine that is busy.
SPANS_WITHIN_S = 15.0

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@dataclass(frozen=True)
class Seen:
    """A span as the collector got it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    status: str
    message: str
    resource: dict[str, Any]
    started_ns: int
    ended_ns: int
    role: str  # SERVER, INTERNAL and so on

    @property
    def kind(self) -> str:
        return str(self.attributes["shotclock.kind"])

    @property
    def error(self) -> str | None:
        return self.attributes.get("error.type")


@dataclass
class Collector:
    port: int = 0
    spans: list[Seen] = field(default_factory=list)
    requests: int = 0

    @property
    def env(self) -> dict[str, str | None]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}"}

    def take(self, body: bytes) -> None:
        self.requests += 1
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _plain(part.resource.attributes)
            for scope in part.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Seen(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            _plain(span.attributes),
                            [(each.name, each.time_unix_nano, _plain(each.attributes)) for each in span.events],
                            {0: "unset", 1: "ok", 2: "error"}[span.status.code],
                            span.status.message,
                            resource,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                        )
                    )

    def one(self, name: str, kind: str | None = None) -> Seen:
        found = [span for span in self.spans if span.name == name and kind in (None, span.kind)]
        assert len(found) == 1, (name, [span.name for span in self.spans])
        return found[0]

    def children_of(self, parent: Seen) -> list[Seen]:
        return [span for span in self.spans if span.parent_id == parent.span_id]

    def wait_for(self, is_it: Callable[[Seen], bool]) -> Seen:
        give_up = time.monotonic() + SPANS_WITHIN_S
        while time.monotonic() < give_up:
            found = [span for span in self.spans if is_it(span)]
            if found:
                assert len(found) == 1, found
                return found[0]
            time.sleep(0.01)
        raise AssertionError(f"it did not come; there are {[span.name for span in self.spans]}")


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextlib.contextmanager
def http_server(answer: Callable[[BaseHTTPRequestHandler, bytes], bytes]) -> Iterator[int]:
    """Its port. Every request gets what `answer` makes of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            said = answer(self, body)
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()

    def take(_: BaseHTTPRequestHandler, body: bytes) -> bytes:
        collector.take(body)
        return b""

    with http_server(take) as collector.port:
        yield collector


@pytest.fixture
def headers() -> Iterator[tuple[int, list[dict[str, str]]]]:
    """A server's port, and the headers it has seen, by names in lower case."""
    seen: list[dict[str, str]] = []

    def note(request: BaseHTTPRequestHandler, _: bytes) -> bytes:
        seen.append({name.lower(): value for name, value in request.headers.items()})
        return b"noted"

    with http_server(note) as port:
        yield port, seen


# Says as its result what it was sent and started with.
MCP_SERVER = """
import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    match message["method"]:
        case "initialize":
            result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}},
                      "serverInfo": {"name": "noting", "version": "1"}}
        case "tools/list":
            result = {"tools": [{"name": "note", "inputSchema": {"type": "object"}}]}
        case _:
            said = {"meta": message["params"].get("_meta", {}), "TRACEPARENT": os.environ.get("TRACEPARENT")}
            result = {"content": [], "structuredContent": said}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path / name

    write("noting.py", MCP_SERVER)
    return write


def mcp_step(folder: Path) -> str:
    words = {"type": "mcp", "command": sys.executable, "args": [str(folder / "noting.py")], "method": "note"}
    return json.dumps({**words, "timeout": 20})


def ids(traceparent: str) -> tuple[str, str]:
    """The trace's and the parent's. Fails on what is no traceparent."""
    version, trace_id, span_id, flags = traceparent.split("-")
    assert (version, len(trace_id), len(span_id), flags) == ("00", 32, 16, "01"), traceparent
    return trace_id, span_id
