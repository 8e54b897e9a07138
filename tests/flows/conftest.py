"""What tests of workflows share: a file from a few lines and what is said about it, and its run by the real engine."""

import asyncio
import http.server
import os
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.flows.check.lint import lint
from shotclock.flows.file.loader import Finding, Loaded, load_text
from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.run.run_context import OnChange, OnNews
from shotclock.flows.run.runs import RunCaller, RunRequest, start
from shotclock.store.store import Store

RUN_LIMIT_S = 60  # every workflow here ends within a few seconds; a hang of the engine runs it out

Load = Callable[..., Loaded]
Lint = Callable[..., list[Finding]]


@pytest.fixture
def load() -> Load:
    """The text, dedented, as a workflow file."""

    def load(text: str | bytes) -> Loaded:
        data = text if isinstance(text, bytes) else textwrap.dedent(text).encode()
        return load_text(data, "flow.yaml")

    return load


@pytest.fixture
def linted(load: Load) -> Lint:
    """Everything said about a file of the right shape."""

    def linted(text: str, *, timeout_ms: int | None = None, unattended: bool = True) -> list[Finding]:
        loaded = load(text)
        assert loaded.workflow is not None, loaded.findings
        return lint(loaded, timeout_ms=timeout_ms, unattended=unattended)

    return linted


@pytest.fixture
def problems(load: Load) -> Callable[[str | bytes], list[Finding]]:
    """What is wrong with a file that is not of the right shape."""

    def problems(text: str | bytes) -> list[Finding]:
        loaded = load(text)
        assert loaded.workflow is None, "nothing was found"
        assert loaded.findings
        assert all(finding.is_error for finding in loaded.findings)
        return list(loaded.findings)

    return problems


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "home")


@pytest.fixture
def run(tmp_path: Path, store: Store, validate_envelope: Callable[[dict[str, Any]], Any]) -> Callable[..., Envelope]:
    """A function that runs a workflow, given as it is written, and returns its valid envelope."""

    def run(
        text: str | WorkflowFile,
        *,
        environment: dict[str, str] | None = None,
        stop_after: float | None = None,
        on_change: OnChange | None = None,
        on_news: OnNews | None = None,
        **more: Any,
    ) -> Envelope:
        workflow = text if isinstance(text, WorkflowFile) else _loaded(text, tmp_path)

        async def main() -> Envelope:
            request = RunRequest(workflow, str(tmp_path / "flow.yaml"), tmp_path, **more)
            stop = None
            if stop_after is not None:
                stop = asyncio.get_running_loop().create_future()
                asyncio.get_running_loop().call_later(stop_after, stop.set_result, "SIGTERM")
            async with asyncio.timeout(RUN_LIMIT_S):
                variables = os.environ if environment is None else environment
                return await start(request, store, RunCaller(stop, on_change, on_news, variables))

        envelope = asyncio.run(main())
        validate_envelope(envelope.to_dict())
        return envelope

    return run


@pytest.fixture
def web() -> Iterator[Callable[[str, bytes], str]]:
    """A function that puts a body of a content type onto a server, and returns its URL."""
    bodies: dict[str, tuple[str, bytes]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, body = bodies[self.path]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def put(kind: str, body: bytes) -> str:
        path = f"/{len(bodies)}"
        bodies[path] = kind, body
        return f"http://127.0.0.1:{server.server_port}{path}"

    yield put
    server.shutdown()
    server.server_close()


@pytest.fixture
def speaking() -> Path:
    """The program of an MCP server that says what it is told to."""
    return Path(__file__).with_name("speaking.py")


def _loaded(text: str, folder: Path) -> WorkflowFile:
    loaded = load_text(textwrap.dedent(text).encode(), "flow.yaml", folder)
    assert loaded.workflow is not None, loaded.findings
    return loaded.workflow


def statuses(envelope: Envelope) -> dict[str, str]:
    assert isinstance(envelope.data, dict)
    return {name: step["status"] for name, step in envelope.data["steps"].items()}


def step(envelope: Envelope, name: str) -> dict[str, Any]:
    assert isinstance(envelope.data, dict)
    return envelope.data["steps"][name]
