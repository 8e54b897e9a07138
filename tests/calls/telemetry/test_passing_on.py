"""Trace ids go along with everything, without OpenTelemetry: to children and servers, and from whoever calls."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client

from tests.apps.server.client import connected, envelope_of, http_server, run

from .conftest import SPAN_ID, TRACE_ID, TRACEPARENT, ids, mcp_step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "enveloped")]

Write = Callable[[str, str], Path]
ECHO = ("sh", "-c", "echo $TRACEPARENT; echo $TRACESTATE")


def test_a_command_is_below_whoever_called_exec(shotclock: Any):
    ran = shotclock("exec", "--", *ECHO, env={"TRACEPARENT": TRACEPARENT, "TRACESTATE": "rojo=1,congo=2"})
    traceparent, tracestate = ran.stdout.decode().splitlines()
    trace_id, span_id = ids(traceparent)
    assert trace_id == TRACE_ID == ran.envelope()["meta"]["trace_id"]
    assert span_id != SPAN_ID
    assert tracestate == "rojo=1,congo=2"


@pytest.mark.parametrize("garbage", ["", "garbage", "00-0-0-00", f"00-{'0' * 32}-{SPAN_ID}-01", "💥" * 50, "-" * 9000])
def test_what_is_no_traceparent_is_passed_over_without_a_word(shotclock: Any, garbage: str):
    ran = shotclock("exec", "--", *ECHO, env={"TRACEPARENT": garbage, "TRACESTATE": "rojo=1"})
    assert ran.code == 0
    traceparent, tracestate = ran.stdout.decode().splitlines()
    assert ids(traceparent)[0] == ran.envelope()["meta"]["trace_id"]
    assert tracestate == ""  # it belonged to the trace that could not be read
    assert ran.envelope()["warnings"] == []


def test_one_that_was_meant_for_the_command_is_left_alone(shotclock: Any):
    meant = f"00-{'a' * 32}-{'b' * 16}-01"
    ran = shotclock("exec", "--env", f"TRACEPARENT={meant}", "--", *ECHO, env={"TRACEPARENT": TRACEPARENT})
    assert ran.stdout.decode().splitlines()[0] == meant


def test_steps_tell_commands_servers_and_tools_and_a_header_of_the_steps_own_wins(
    shotclock: Any, write: Write, tmp_path: Path, headers: tuple[int, list[dict[str, str]]]
):
    port, seen = headers
    meant = f"00-{'a' * 32}-{'b' * 16}-01"
    flow = write(
        "flow.yaml",
        f"""
        steps:
          say: {{exec: 'echo "$TRACEPARENT"', timeout: 20s}}
          fetch: {{type: http_client, url: "http://127.0.0.1:{port}/", timeout: 15000}}
          own: {{type: http_client, url: "http://127.0.0.1:{port}/", timeout: 15000, depends_on: fetch,
                 headers: {{Traceparent: "{meant}"}}}}
          ask: {mcp_step(tmp_path)}
        """,
    )
    env = {"TRACEPARENT": TRACEPARENT, "SHOTCLOCK_HOME": str(tmp_path / "home")}

    ran = shotclock("run", "--json", str(flow), env=env, timeout=60)

    assert ran.code == 0, ran
    steps = ran.json()["data"]["steps"]
    told = [steps["say"]["output"], seen[0]["traceparent"], steps["ask"]["output"]["meta"]["traceparent"]]
    assert [ids(traceparent)[0] for traceparent in told] == [TRACE_ID] * 3
    assert len({SPAN_ID, *(ids(traceparent)[1] for traceparent in told)}) == 4
    assert steps["ask"]["output"]["TRACEPARENT"] == told[2]
    assert seen[1]["traceparent"] == meant


APP = textwrap.dedent(
    """
    import os, subprocess
    from shotclock import App, Context

    app = App("tool")

    @app.command()
    def sync(ctx: Context) -> dict:
        env = {**os.environ, "TRACEPARENT": ctx.traceparent}
        child = subprocess.run(["sh", "-c", "echo $TRACEPARENT"], env=env, capture_output=True, text=True, timeout=10)
        return {"ctx": ctx.traceparent, "child": child.stdout.strip()}

    @app.command()
    async def on_loop(ctx: Context) -> dict:
        return {"ctx": ctx.traceparent}

    @app.command()
    def nested(ctx: Context) -> dict:
        return {"ctx": ctx.traceparent, "inner": ctx.call("sync").data["ctx"]}

    if __name__ == "__main__":
        app()
    """
)


@pytest.fixture
def app(write: Write) -> Path:
    return write("tool.py", APP)


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("command", ["sync", "nested"])
def test_the_command_line_of_an_app_takes_the_trace_of_its_caller(app: Path, tmp_path: Path, command: str):
    env = {**os.environ, "TRACEPARENT": TRACEPARENT, "SHOTCLOCK_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, str(app), command], env=env, capture_output=True, timeout=30)
    envelope = json.loads(done.stdout)
    assert envelope["meta"]["trace_id"] == TRACE_ID
    told = list(envelope["data"].values())
    assert [ids(traceparent)[0] for traceparent in told] == [TRACE_ID] * 2
    is_same = told[0] == told[1]
    assert is_same if command == "sync" else not is_same


def test_a_server_takes_the_trace_of_each_request_from_its_meta(app: Path):
    async def scenario() -> None:
        async with connected(target=f"{app}:app") as (client, _):
            for tool in ("sync", "on-loop"):
                envelope = await envelope_of(client, tool, meta={"traceparent": TRACEPARENT})
                assert envelope["meta"]["trace_id"] == TRACE_ID
                assert ids(envelope["data"]["ctx"])[0] == TRACE_ID
            # A wrong one, and none at all: each its own trace.
            traces = set()
            for meta in ({"traceparent": 7, "tracestate": []}, {"traceparent": "00-garbage"}, {}, {}):
                envelope = await envelope_of(client, "sync", meta=meta)
                assert envelope["ok"] and envelope["warnings"] == []
                traces.add(envelope["meta"]["trace_id"])
            assert len(traces) == 4 and TRACE_ID not in traces
            refused = await envelope_of(client, "sync", {"no": 1}, meta={"traceparent": TRACEPARENT})
            assert (refused["error"]["code"], refused["meta"]["trace_id"]) == ("ARG_ERROR", TRACE_ID)

    run(scenario())


def test_a_server_takes_the_trace_of_a_request_from_its_header_where_meta_says_none(app: Path):
    other = f"00-{'a' * 32}-{'b' * 16}-01"

    async def scenario(url: str) -> None:
        async with (
            httpx2.AsyncClient(headers={"traceparent": TRACEPARENT}, timeout=20) as http,
            _client(url, http) as client,
        ):
            said = await envelope_of(client, "sync")
            assert (said["meta"]["trace_id"], ids(said["data"]["child"])[0]) == (TRACE_ID, TRACE_ID)
            said = await envelope_of(client, "sync", meta={"traceparent": other})
            assert said["meta"]["trace_id"] == "a" * 32

    with http_server(target=f"{app}:app") as (url, _):
        run(scenario(url))


def _client(url: str, http: httpx2.AsyncClient) -> Client:
    from mcp.client.streamable_http import streamable_http_client

    return Client(streamable_http_client(url, http_client=http))


@pytest.mark.usefixtures("warm_starts")
def test_a_job_belongs_to_the_trace_of_whoever_started_it(tmp_path: Path, write: Write):
    file = write(
        "jobs.py",
        """
        from shotclock import App, Context

        app = App("long")

        @app.command(interruption=True)
        def work(ctx: Context) -> dict:
            return {"ctx": ctx.traceparent}

        if __name__ == "__main__":
            app()
        """,
    )
    env = {**os.environ, "TRACEPARENT": TRACEPARENT, "SHOTCLOCK_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, str(file), "work"], env=env, capture_output=True, timeout=60)
    envelope = json.loads(done.stdout)
    assert (envelope["meta"]["trace_id"], ids(envelope["data"]["ctx"])[0]) == (TRACE_ID, TRACE_ID), envelope


def test_calls_of_a_program_that_uses_opentelemetry_are_below_its_span_and_its_spans_below_the_call():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, timeout=60, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr.decode()
    spans = {span["name"]: span for span in json.loads(done.stdout)}
    assert set(spans) == {"mine", "calls", "its own", "other"}
    assert spans["calls"]["parent"] == spans["mine"]["id"]
    assert spans["its own"]["parent"] == spans["calls"]["id"]
    assert spans["other"]["parent"] == spans["calls"]["id"]
    assert len({span["trace"] for span in spans.values()}) == 1


PROGRAM = """
import asyncio, json
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from shotclock.core.catalogue import Operation
from shotclock.calls.runtime import Runtime

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("mine")

async def other():
    return 1

async def calls(ctx):
    with tracer.start_as_current_span("its own"):
        return (await ctx.call("other")).value

async def main():
    operations = [Operation(each.__name__, each, isolation="inline") for each in (calls, other)]
    async with Runtime(operations=operations) as runtime:
        with tracer.start_as_current_span("mine"):
            assert (await runtime.call("calls")).ok

asyncio.run(main())
print(json.dumps([
    {"name": span.name, "id": span.context.span_id, "parent": span.parent.span_id if span.parent else None,
     "trace": span.context.trace_id}
    for span in exporter.get_finished_spans()
]))
"""
