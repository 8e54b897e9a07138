"""What steps without a command print is in the log of the run: functions, MCP tools and models."""

import asyncio
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from shotclock.dispatch.job_log import Log
from shotclock.flows.file.loader import load_text
from shotclock.flows.run.runs import RunCaller, RunRequest, start
from shotclock.flows.run.step_log import list_logs, read_records
from shotclock.store.store import Store
from tests.flows.steps.model_servers import CallTool, Say, model_server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

RUN_LIMIT_S = 90.0
SECRET = "s3cr3t-value-xyz"
APP = """\
from shotclock import App, Context

app = App("demo")

@app.command()
def work(ctx: Context) -> int:
    for number in range(1000):
        ctx.progress(number + 1, 1000, "files")
    ctx.log("uses s3cr3t-value-xyz")
    ctx.log("slow", level="warning", logger="net")
    return 1

@app.command()
def many():
    yield "first"
    yield {"a": 1}
"""
SERVER = """\
import json, sys
def send(**message): print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
tools = [{"name": "dig", "inputSchema": {"type": "object"}}]
for line in sys.stdin:
    request = json.loads(line)
    match request.get("method"):
        case "initialize":
            info = {"name": "by hand", "version": "1"}
            version = request["params"]["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": {"tools": {}, "logging": {}}, "serverInfo": info}
            send(id=request["id"], result=result)
        case "tools/list":
            send(id=request["id"], result={"tools": tools})
        case "tools/call":
            token = request["params"]["_meta"]["progressToken"]
            progress = {"progressToken": token, "progress": 1, "total": 2, "message": "holes"}
            send(method="notifications/progress", params=progress)
            send(method="notifications/message", params={"level": "warning", "data": "rock s3cr3t-value-xyz"})
            send(id=request["id"], result={"content": [{"type": "text", "text": "dug"}]})
"""


@pytest.fixture
def printed(tmp_path: Path) -> Callable[[str], dict[str, list[tuple[int, str]]]]:
    """A function that runs a workflow and returns the lines of each step, each with its stream."""
    (tmp_path / "demo.py").write_text(APP)
    (tmp_path / "server.py").write_text(SERVER)

    def run(text: str) -> dict[str, list[tuple[int, str]]]:
        loaded = load_text(textwrap.dedent(text).encode(), "flow.yaml", tmp_path)
        assert loaded.workflow is not None, loaded.findings
        store = Store.open(tmp_path / "home")
        request = RunRequest(loaded.workflow, str(tmp_path / "flow.yaml"), tmp_path, "one")
        variables = {**os.environ, "API_TOKEN": SECRET, "OPENAI_API_KEY": "sk-key-of-a-test"}

        async def main() -> bool:
            async with asyncio.timeout(RUN_LIMIT_S):
                return (await start(request, store, RunCaller(environment=variables))).ok

        assert asyncio.run(main())
        return {
            log.step: [(line.stream, line.text) for line in read_records(Log(log.path).read().content)]
            for log in list_logs(store.home, "one")
        }

    return run


def test_messages_progress_and_items_of_functions(printed: Callable[..., dict[str, list[tuple[int, str]]]]) -> None:
    found = printed(
        """
        steps:
          work: {type: function, target: "demo.py:app", command: work}
          many: {type: function, target: "demo.py:app", command: many}
        """
    )
    work = found["work"]
    assert work[0] == (2, "1 of 1000 files") and (2, "1000 of 1000 files") in work
    assert len(work) < 100, "a loop that reports each item floods the log"
    assert work[-2:] == [(2, "uses ***"), (2, "warning: net: slow")]
    assert found["many"] == [(1, "first"), (1, '{"a":1}')]


def test_messages_and_progress_of_mcp_tools(printed: Callable[..., dict[str, list[tuple[int, str]]]]) -> None:
    call = f"{{type: mcp, command: {sys.executable}, args: [server.py], method: dig}}"
    found = printed(f"steps: {{dig: {call}}}")
    assert sorted(found["dig"]) == [(2, "1 of 2 holes"), (2, "warning: rock ***")]


def test_text_of_a_model_and_the_tools_that_it_calls(printed: Callable[..., dict[str, list[tuple[int, str]]]]) -> None:
    with model_server(CallTool("dig", says="let me dig"), Say("done s3cr3t-", "value-xyz\nwell")) as server:
        servers = f"mcp_servers: {{pit: {{command: {sys.executable}, args: [server.py]}}}}"
        model = f"base_url: {server.url}/v1, model: m, timeout: 60000, {servers}"
        found = printed(f"steps: {{ask: {{type: ai, prompt: dig, ai: {{{model}}}}}}}")
    stdout = [text for stream, text in found["ask"] if stream == 1]
    stderr = [text for stream, text in found["ask"] if stream == 2]
    assert stdout == ["let me dig", "done ***", "well"]
    assert {"calls dig", "1 of 2 holes", "warning: rock ***"} <= set(stderr)
