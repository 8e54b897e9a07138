"""Spans of wrapped calls, as a collector gets them: parents, names, outcomes, and nothing where they are not wanted."""

import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shotclock.wrap._call_spans import FLUSH_LIMIT_S
from tests.calls.telemetry.conftest import SPAN_ID, TRACE_ID, TRACEPARENT, Collector, collector
from tests.wrap.client import SERVER, failure, wrapped

__all__ = ["collector"]  # a fixture

pytestmark = pytest.mark.usefixtures("no_survivors")

# The end of a server and of its wrapper on a busy machine, beyond the bound that is measured.
ENDED_S = 10.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "TRACEPARENT", "TRACESTATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def sent(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Collector:
    """A collector to which wrappers are told to send."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
    return collector


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a collector that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_every_call_is_a_span_below_the_one_that_the_client_names(sent: Collector) -> None:
    with wrapped("--name", "files", "--timeout", "10m") as client:
        meta = {"traceparent": TRACEPARENT, "tracestate": "rojo=1"}
        assert client.receive(client.call("echo", meta=meta, id="first", text="hello"))["result"]
        client.text("echo", text="without a parent")
        span = sent.wait_for(lambda span: span.trace_id == TRACE_ID)
        other = sent.wait_for(lambda span: span.trace_id != TRACE_ID)
    assert (span.name, span.parent_id, span.status, span.role) == ("tools/call echo", SPAN_ID, "ok", "SERVER")
    assert span.attributes == {
        "mcp.method.name": "tools/call",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "echo",
        "jsonrpc.request.id": "first",
        "network.transport": "pipe",
        "shotclock.kind": "wrapped call",
        "shotclock.server": "files",
        "shotclock.server.generation": 1,
        "shotclock.timeout_ms": 600_000,
    }
    assert span.span_id != SPAN_ID and span.started_ns <= span.ended_ns
    assert (other.parent_id, len(sent.spans)) == ("", 2)


@pytest.mark.slow
def test_a_failed_call_has_its_code_and_the_id_in_the_answer(sent: Collector) -> None:
    with wrapped("--timeout", "300ms") as client:
        _, envelope = failure(client.ask("hang"))
        assert "error" in client.receive(client.call("missing"))
        hung = sent.wait_for(lambda span: span.name == "tools/call hang")
        missing = sent.wait_for(lambda span: span.name == "tools/call missing")
    assert (hung.status, hung.error) == ("error", "TIMEOUT")
    assert hung.attributes["shotclock.request.id"] == envelope["meta"]["request_id"]
    assert hung.ended_ns - hung.started_ns >= 300_000_000
    assert (missing.status, missing.error) == ("error", "error")


def test_the_server_gets_the_bytes_of_the_client(sent: Collector, tmp_path: Path) -> None:
    server = ["sh", "-c", f"tee {shlex.quote(str(tmp_path / 'got'))} | {shlex.join(SERVER)}"]
    line = b'{"id":"x","jsonrpc": "2.0","params":{"name":"echo","arguments":{"text":"a"}},"method":"tools/call"}\n'
    with wrapped(server=server) as client:
        client.write(line)
        client.receive("x")
        sent.wait_for(lambda span: span.name == "tools/call echo")
    assert line in (tmp_path / "got").read_bytes().splitlines(keepends=True)


def test_a_trace_that_the_client_does_not_sample_is_not_sent(sent: Collector) -> None:
    with wrapped() as client:
        unsampled = f"00-{TRACE_ID}-{SPAN_ID}-00"
        assert client.receive(client.call("echo", meta={"traceparent": unsampled}, text="x"))["result"]
        client.text("echo", text="y")
        span = sent.wait_for(lambda span: span.name == "tools/call echo")
    assert span.trace_id != TRACE_ID


@pytest.mark.slow
def test_spans_are_sent_after_a_restart_of_the_server_and_without_a_log(sent: Collector, home: Path) -> None:
    with wrapped("--no-log") as client:
        client.text("echo", text="first")
        sent.wait_for(lambda span: span.attributes["shotclock.server.generation"] == 1)
        failure(client.ask("crash"))
        client.text("echo", text="second")
        sent.wait_for(lambda span: span.error == "CONNECTION_LOST")
        sent.wait_for(lambda span: span.error is None and span.attributes["shotclock.server.generation"] == 2)
    assert not (home / "shotclock.db").exists()


def test_a_collector_that_never_answers_delays_no_call_and_the_end_by_a_bounded_time(
    silent: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent}")
    with open(tmp_path / "err", "wb") as err, wrapped(stderr=err) as client:
        for number in range(20):
            assert client.text("echo", text=str(number)) == str(number)
        began = time.monotonic()
    assert time.monotonic() - began < FLUSH_LIMIT_S + ENDED_S
    assert "spans are missing: the collector" in (tmp_path / "err").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("is_wanted", [False, True])
def test_the_sdk_is_loaded_only_where_spans_are_wanted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_wanted: bool
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    if is_wanted:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # the names of all imported modules, on stderr
    with open(tmp_path / "err", "wb") as err, wrapped(stderr=err) as client:
        client.text("echo", text="hello")
        if is_wanted:
            collector.wait_for(lambda span: True)
    imported = (tmp_path / "err").read_text()
    assert "shotclock.wrap._guard" in imported
    for name in ("opentelemetry.sdk", "shotclock.wrap._call_spans", "shotclock.calls.telemetry"):
        assert (name in imported) is is_wanted, name
    assert len(collector.spans) == is_wanted
