"""The table of DESIGN §6 by real work that hangs: the default, the unit of a bare number, the message, the rule.

The defaults are read from the plan: nobody waits five minutes for a test.
"""

import contextlib
import json
import os
import pty
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shotclock.net.mcp_client  # noqa: F401  (at once, so that no step's clock pays for loading the SDK)
from shotclock.core.envelope import Envelope
from shotclock.core.limits import reserve_ms_for
from shotclock.flows.check.plan import plan_of
from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.steps.provider import STEP_TYPES
from tests.flows.steps.servers import Server, says_nothing

from .conftest import step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]
Run = Callable[..., Envelope]

ROOT = Path(__file__).parent.parent.parent
MCP_SERVER = ["-m", "tests.flows.steps.mcp_servers", "never_answers"]
# Beyond the limit: the kill, the proof that all is gone, and a machine that has more to do.
LATE_MS = 4_000

APP = """
import time
from shotclock import App

app = App("hangs")


@app.command()
def hang() -> None:
    time.sleep(600)
"""


@dataclass(frozen=True)
class Line:
    """A line of the table. `bare` is written without a unit and comes to `limit_ms`."""

    kind: str
    default_ms: int | None
    bare: int
    limit_ms: int
    settings: dict[str, Any]
    message: str
    rule: str
    key: str = "timeout"


TABLE = [
    Line(
        "command", 60_000, 1, 1_000, {"exec": "sleep 600"},
        "Command execution timed out after 1 second", "command/timeout",
    ),
    Line(
        "http_client", 30_000, 700, 700, {"url": "URL"},
        "Request timed out after 700ms", "http_client/fetch_error",
    ),
    Line(
        "mcp", 60_000, 4, 4_000,
        {"command": sys.executable, "args": MCP_SERVER, "method": "echo", "cwd": str(ROOT)},
        "MCP tool call timed out after 4 seconds", "mcp/timeout",
    ),
    Line(
        "tool", 30_000, 700, 700, {"tool": "hang"},
        "Command execution timed out after 0.7 seconds", "tool/timeout",
    ),
    Line(
        "git-checkout", 300_000, 900, 900, {"repository": "URL/a.git", "path": "a"},
        "Git checkout timed out after 900ms", "git-checkout/timeout", key="clone_timeout_ms",
    ),
    Line(
        "human-input", None, 1, 1_000, {"prompt": "Go on?"},
        "Human input timed out after 1 second", "human-input/timeout",
    ),
    Line(
        "function", 30_000, 4, 4_000, {"target": "hangs.py:app", "command": "hang"},
        "hang timed out after 4s", "function/timeout",
    ),
    Line(
        "workflow", None, 2, 2_000, {"workflow": "inner.yaml"},
        "Workflow timed out after 2 seconds", "workflow/timeout",
    ),
]  # fmt: skip


@contextlib.contextmanager
def somebody_at_the_terminal() -> Iterator[None]:
    """A terminal on our stdin, with nobody who answers."""
    person, terminal = pty.openpty()
    before = os.dup(0)
    os.dup2(terminal, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        for fd in (before, person, terminal):
            os.close(fd)


def test_the_table_has_every_kind() -> None:
    # Those with tests of their own: steps/test_ui.py, where there is a browser, and steps/test_ai.py.
    assert {line.kind for line in TABLE} == set(STEP_TYPES) - {"ui", "ai"}


@pytest.mark.parametrize("line", TABLE, ids=[line.kind for line in TABLE])
def test_a_step_that_hangs(line: Line, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    (tmp_path / "hangs.py").write_text(APP)
    (tmp_path / "inner.yaml").write_text("steps: {in: {exec: sleep 600, timeout: 0, grace: 0s}}")
    with Server(says_nothing) as server, somebody_at_the_terminal():
        settings = json.loads(json.dumps(line.settings).replace("URL", server.url.rstrip("/")))
        tools = {"hang": {"exec": "sleep 600"}} if line.kind == "tool" else {}
        said = {"type": line.kind, "grace": "0s", **settings}
        silent = WorkflowFile.model_validate({"tools": tools, "steps": {"it": said}})
        bounded = WorkflowFile.model_validate({"tools": tools, "steps": {"it": {**said, line.key: line.bare}}})
        envelope = run(bounded)
    assert (plan_of(silent).steps[0].timeout_ms or None) == line.default_ms
    assert plan_of(bounded).steps[0].timeout_ms == line.limit_ms
    it = step(envelope, "it")
    assert it["status"] == "timed_out", it
    assert it["error"]["message"] == line.message
    assert it["error"]["context"]["rule"] == line.rule
    assert it["error"]["code"] == "TIMEOUT" and it["error"]["context"]["clock"]["limit_ms"] == line.limit_ms
    # The run inside, and the step inside that, each keep a reserve in which to say what became of them.
    reserves_ms = 2 * reserve_ms_for(line.limit_ms) if line.kind == "workflow" else 0
    assert line.limit_ms - reserves_ms - 1 <= it["duration_ms"] < line.limit_ms + LATE_MS
