"""Spans of real runs, as a real collector would get them: their parents, their clocks and how they ended."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from shotclock.calls.telemetry import FLUSH_LIMIT_S

from .conftest import SPAN_ID, TRACE_ID, TRACEPARENT, Collector, http_server, ids, mcp_step

pytestmark = [pytest.mark.usefixtures("no_survivors", "enveloped"), pytest.mark.slow]

Write = Callable[[str, str], Path]
# What starting an interpreter and a workflow takes on a machine that is busy, beyond the bound that is measured.
STARTED_S = 8.0


@pytest.fixture
def run(shotclock: Any, tmp_path: Path, collector: Collector) -> Callable[..., dict[str, Any]]:
    """A function that runs a workflow under the eyes of the collector: its envelope."""

    def run(flow: Path, *, env: Any = None, code: int = 0, words: tuple[str, ...] = ()) -> dict[str, Any]:
        home = {"SHOTCLOCK_HOME": str(tmp_path / "home")}
        ran = shotclock("run", "--json", *words, str(flow), env={**collector.env, **home, **(env or {})}, timeout=60)
        assert ran.code == code, ran
        return dict(json.loads(ran.stdout))

    return run


def test_a_run_is_a_tree_of_spans_and_everything_it_starts_is_told_where_it_stands(
    run: Any, write: Write, collector: Collector, headers: tuple[int, list[dict[str, str]]], tmp_path: Path
):
    port, seen = headers
    flow = write(
        "flow.yaml",
        f"""
        name: tree
        timeout: 60s
        steps:
          say: {{exec: 'echo "$TRACEPARENT"', timeout: 20s, idle: 10s}}
          fetch: {{type: http_client, url: "http://127.0.0.1:{port}/", timeout: 15000}}
          ask: {mcp_step(tmp_path)}
        """,
    )

    envelope = run(flow, env={"TRACEPARENT": TRACEPARENT, "TRACESTATE": "rojo=1"})

    whole = collector.one("run tree")
    assert (whole.trace_id, whole.parent_id) == (TRACE_ID, SPAN_ID)
    assert envelope["meta"]["trace_id"] == TRACE_ID
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    assert {span.name for span in collector.children_of(whole)} == {"step say", "step fetch", "step ask"}
    assert whole.attributes["shotclock.run.id"] == envelope["data"]["run_id"]
    assert (whole.attributes["shotclock.timeout_ms"], whole.kind, whole.status) == (60_000, "run", "ok")
    assert whole.resource["service.name"] == "shotclock"

    steps = envelope["data"]["steps"]
    told = {
        "say": steps["say"]["output"],
        "fetch": seen[0]["traceparent"],
        "ask": steps["ask"]["output"]["meta"]["traceparent"],
    }
    for name, traceparent in told.items():
        step, tried = collector.one(f"step {name}"), collector.one(f"try {name}")
        assert (step.kind, step.status, step.attributes["shotclock.step.attempts"]) == ("step", "ok", 1)
        assert (tried.kind, tried.parent_id) == ("call", step.span_id)
        assert ids(traceparent) == (TRACE_ID, tried.span_id), name
        assert whole.started_ns <= step.started_ns <= tried.started_ns <= tried.ended_ns <= step.ended_ns
        assert tried.attributes["shotclock.ending"] == "finished"
    assert ids(steps["ask"]["output"]["TRACEPARENT"]) == ids(told["ask"])
    assert seen[0]["tracestate"] == steps["ask"]["output"]["meta"]["tracestate"] == "rojo=1"

    said = collector.one("try say").attributes
    assert (said["shotclock.timeout_ms"], said["shotclock.idle_ms"], said["process.exit.code"]) == (20_000, 10_000, 0)
    assert collector.one("try fetch").attributes["shotclock.side_effects"] == "none"


def test_what_fails_says_its_code_and_what_is_stopped_says_whose_clock_it_was(
    run: Any, write: Write, collector: Collector
):
    flow = write(
        "flow.yaml",
        """
        name: bad
        steps:
          fails: {exec: "exit 7", timeout: 20s, on_fail: {retry: {max: 1, backoff: {delay_ms: 1}}}}
          hangs: {exec: "sleep 600", timeout: 300ms, grace: 100ms}
          after: {exec: "true", depends_on: hangs}
          not-now: {exec: "true", if: "{{ 1 > 2 }}"}
          winds: {exec: "trap 'exit 0' TERM; sleep 60 & wait", timeout: 60s, soft: 300ms, overtime: progress}
        """,
    )

    run(flow, code=3)

    whole = collector.one("run bad")
    assert (whole.error, whole.status, whole.attributes["shotclock.exit_code"]) == ("STEPS_FAILED", "error", 3)
    fails, tries = collector.one("step fails"), [span for span in collector.spans if span.name == "try fails"]
    assert (fails.error, fails.status, fails.attributes["shotclock.step.attempts"]) == ("COMMAND_FAILED", "error", 2)
    assert [(span.error, span.parent_id, span.attributes["process.exit.code"]) for span in tries] == [
        ("COMMAND_FAILED", fails.span_id, 7)
    ] * 2
    hangs, tried = collector.one("step hangs"), collector.one("try hangs")
    assert (hangs.error, hangs.attributes["shotclock.step.status"]) == ("TIMEOUT", "timed_out")
    assert (tried.error, tried.parent_id) == ("TIMEOUT", hangs.span_id)
    assert tried.attributes["shotclock.ending"] == "killed"
    clock = {name: tried.attributes[f"shotclock.clock.{name}"] for name in ("kind", "owner", "limit_ms")}
    assert clock == {"kind": "timeout", "owner": "step hangs", "limit_ms": 300}
    assert tried.attributes["shotclock.clock.elapsed_ms"] >= 300
    for span in (collector.one("step winds"), collector.one("try winds")):
        assert {name: value for name, value in span.attributes.items() if "overtime" in name or "wind" in name} == {
            "shotclock.overtime.requests": 1,
            "shotclock.overtime.granted_ms": 0,
            "shotclock.wind_down.by": "observer",
        }
    winds = collector.one("try winds")
    asked, declined, stopped = winds.events
    assert [name for name, _, _ in winds.events] == [
        "shotclock.overtime.requested",
        "shotclock.overtime.declined",
        "shotclock.wind_down",
    ]
    assert winds.started_ns + 300_000_000 <= asked[1] <= declined[1] <= stopped[1] + 1_000_000 <= winds.ended_ns
    assert asked[2] == {"shotclock.overtime.asked_by": "soft clock"}
    assert (
        declined[2]["shotclock.overtime.observer"] == "progress" and declined[2]["shotclock.overtime.granted_ms"] == 0
    )
    assert stopped[2] == {"shotclock.wind_down.by": "observer", "shotclock.wind_down.within_ms": 5000}
    assert "grown" not in str(winds.events), "the reasons of others are not told"
    not_now = collector.one("step not-now")
    assert (not_now.status, not_now.attributes["shotclock.step.status"]) == ("ok", "skipped")
    after = collector.one("step after")  # it never began: a moment of the run
    assert (after.status, after.parent_id, after.started_ns) == ("ok", whole.span_id, after.ended_ns)
    assert {name: after.attributes[f"shotclock.step.{name}"] for name in ("status", "reason", "cause")} == {
        "status": "skipped",
        "reason": "dependency_failed",
        "cause": "hangs",
    }


def test_a_workflow_in_a_step_is_below_its_step(run: Any, write: Write, collector: Collector):
    write("inner.yaml", "name: inner\nsteps: {deep: {exec: 'echo $TRACEPARENT', timeout: 10s}}")
    flow = write("flow.yaml", "name: outer\nsteps: {inner: {type: workflow, workflow: inner.yaml, timeout: 30}}")

    envelope = run(flow)

    outer, step, inner = collector.one("run outer"), collector.one("step inner"), collector.one("run inner")
    deep, tried = collector.one("step deep"), collector.one("try deep")
    chain = [outer, step, inner, deep, tried]
    assert [span.parent_id for span in chain] == ["", *(span.span_id for span in chain[:-1])]
    said = envelope["data"]["steps"]["inner"]["output"]["deep"]
    assert ids(said) == (envelope["meta"]["trace_id"], tried.span_id)


def test_exec_is_one_span_and_its_child_is_below_it(shotclock: Any, collector: Collector):
    ran = shotclock("exec", "--", "sh", "-c", "echo $TRACEPARENT; exit 3", env=collector.env)

    assert ran.code == 3
    span = collector.one("exec")
    assert ids(ran.stdout.decode().strip()) == (span.trace_id, span.span_id)
    assert (span.parent_id, span.error, span.attributes["process.exit.code"]) == ("", "COMMAND_FAILED", 3)
    assert span.trace_id == ran.envelope()["meta"]["trace_id"]


def test_what_a_caller_does_not_want_sampled_is_not(shotclock: Any, collector: Collector):
    unsampled = TRACEPARENT.removesuffix("01") + "00"

    ran = shotclock("exec", "--", "sh", "-c", "echo $TRACEPARENT", env={**collector.env, "TRACEPARENT": unsampled})

    assert re.fullmatch(rf"00-{TRACE_ID}-(?!{SPAN_ID})[0-9a-f]{{16}}-00", ran.stdout.decode().strip())
    assert collector.spans == []


@pytest.mark.parametrize(
    "setting", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_TRACES_EXPORTER": "console"}]
)
def test_nothing_is_sent_where_that_was_said(shotclock: Any, collector: Collector, setting: dict[str, str]):
    assert shotclock("exec", "--", "true", env={**collector.env, **setting}).code == 0
    assert collector.requests == 0


APP = """
import os, subprocess, sys
from shotclock import App, Context

app = App("tool")

@app.command()
def outer(ctx: Context) -> dict:
    return ctx.call("inner").data

@app.command()
async def inner() -> dict:
    return {"fine": True}

if __name__ == "__main__":
    app()
"""


@pytest.mark.usefixtures("warm_starts")
def test_a_call_that_calls_is_above_what_it_calls_although_it_runs_in_another_process(
    collector: Collector, write: Write, tmp_path: Path, shotclock: Any
):
    file = write("tool.py", APP)
    env = {**os.environ, **collector.env, "TRACEPARENT": TRACEPARENT, "SHOTCLOCK_HOME": str(tmp_path / "home")}

    done = subprocess.run([sys.executable, str(file), "outer"], env=env, capture_output=True, timeout=30)

    assert done.returncode == 0, done
    outer, inner = collector.one("outer"), collector.one("inner")
    assert (outer.trace_id, outer.parent_id, inner.parent_id) == (TRACE_ID, SPAN_ID, outer.span_id)
    assert json.loads(done.stdout)["meta"]["trace_id"] == TRACE_ID


# --- collectors that are not there ------------------------------------------------------------------------


def test_a_collector_that_is_away_changes_nothing_but_a_note(shotclock: Any, write: Write, tmp_path: Path):
    flow = write("flow.yaml", "steps: {say: {exec: echo hello, timeout: 10s}}")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "SHOTCLOCK_HOME": str(tmp_path / "home")}

    ran = shotclock("run", "--json", str(flow), env=env, timeout=60)

    assert ran.code == 0
    assert json.loads(ran.stdout)["data"]["steps"]["say"]["output"] == "hello"
    assert b"shotclock: spans are missing: the collector" in ran.stderr
    assert b"Traceback" not in ran.stderr and b"opentelemetry" not in ran.stderr
    assert ran.elapsed_s < FLUSH_LIMIT_S + STARTED_S


def test_a_collector_that_hangs_delays_the_end_by_no_more_than_the_limit(shotclock: Any):
    with http_server(lambda *_: time.sleep(30) or b"") as port:  # type: ignore[func-returns-value]
        began = time.monotonic()
        ran = shotclock("exec", "--json", "--", "true", env={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"})
        assert time.monotonic() - began < FLUSH_LIMIT_S + STARTED_S
    assert (ran.code, ran.stderr) == (0, b"")
    assert ran.json()["meta"]["duration_ms"] < 1000 * FLUSH_LIMIT_S


def test_a_collector_that_is_unwell_is_asked_once_at_the_end(shotclock: Any):
    asked: list[bytes] = []

    def unwell(request: BaseHTTPRequestHandler, body: bytes) -> bytes:
        asked.append(body)
        request.send_error(503)
        raise ConnectionResetError  # nothing more of it

    with http_server(unwell) as port:
        ran = shotclock("exec", "--json", "--", "true", env={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"})
    assert ran.json()["ok"] and len(asked) == 1


def test_the_envelope_stays_the_last_line_of_stderr(shotclock: Any):
    ran = shotclock("exec", "--", "true", env={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    assert ran.envelope()["ok"]


# --- what it costs where nobody asked for it --------------------------------------------------------------

LOADED = (
    "import sys; sys.argv = ['shotclock', *sys.argv[1:]]; import os; leave = os._exit\n"
    + """
def exit(code):
    found = sorted(name for name in sys.modules if name.startswith("opentelemetry"))
    sys.stderr.write(f"loaded: {found}\\n"); sys.stderr.flush(); leave(code)
os._exit = exit
from shotclock.main import run_program
run_program()
"""
)


def test_without_configuration_nothing_of_opentelemetry_is_imported(tmp_path: Path, write: Write):
    flow = write("flow.yaml", "steps: {say: {exec: echo hello, timeout: 10s}}")
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    env["SHOTCLOCK_HOME"] = str(tmp_path / "home")
    for words in (["exec", "--", "true"], ["run", str(flow)]):
        done = subprocess.run([sys.executable, "-c", LOADED, *words], env=env, capture_output=True, timeout=30)
        assert done.returncode == 0, done
        assert b"loaded: []" in done.stderr, done.stderr


# --- other surfaces ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_starts")
def test_a_job_is_below_the_call_that_waits_for_it(collector: Collector, write: Write, tmp_path: Path):
    file = write(
        "jobs.py",
        """
        from shotclock import App

        app = App("long")

        @app.command(interruption=True)
        def work() -> dict:
            return {"done": True}

        if __name__ == "__main__":
            app()
        """,
    )
    env = {**os.environ, **collector.env, "SHOTCLOCK_HOME": str(tmp_path / "home")}

    done = subprocess.run([sys.executable, str(file), "work"], env=env, capture_output=True, timeout=60)

    assert done.returncode == 0, done
    works = collector.wait_for(lambda span: span.name == "work" and bool(span.parent_id))
    waits = collector.wait_for(lambda span: span.span_id == works.parent_id)
    assert (waits.name, waits.parent_id, waits.trace_id) == ("work", "", works.trace_id)
    assert waits.started_ns < works.started_ns < works.ended_ns < waits.ended_ns


@pytest.mark.usefixtures("warm_starts")
def test_a_served_tool_is_below_the_request_and_is_told_of_when_the_server_leaves(collector: Collector, write: Write):
    file = write("tool.py", APP)
    environment = {**os.environ, **{name: value for name, value in collector.env.items() if value}}
    parameters = StdioServerParameters(
        command=sys.executable, args=["-m", "shotclock", "serve", f"{file}:app"], env=environment
    )

    async def scenario() -> None:
        async with Client(parameters) as client:
            await client.call_tool("outer", {}, meta={"traceparent": TRACEPARENT})

    asyncio.run(asyncio.wait_for(scenario(), 60))

    outer = collector.wait_for(lambda span: span.name == "outer")
    inner = collector.wait_for(lambda span: span.name == "inner")
    assert (outer.trace_id, outer.parent_id, inner.parent_id) == (TRACE_ID, SPAN_ID, outer.span_id)


def test_steps_that_are_functions_or_checkouts_have_what_they_start_below_them(
    run: Any, write: Write, collector: Collector, tmp_path: Path
):
    write("tool.py", APP)
    repository = tmp_path / "there"
    for words in (["init", "-q", str(repository)], ["-C", str(repository), "commit", "-q", "--allow-empty", "-m", "x"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        subprocess.run(["git", *identity, *words], check=True, timeout=20, capture_output=True)
    flow = write(
        "flow.yaml",
        f"""
        name: kinds
        steps:
          call: {{type: function, target: "tool.py:app", command: outer, timeout: 30s}}
          clone: {{type: git-checkout, repository: {repository}, path: clone, clone_timeout_ms: 30000}}
        """,
    )

    run(flow)

    assert collector.one("outer").parent_id == collector.one("step call").span_id
    assert collector.one("inner").parent_id == collector.one("outer").span_id
    tries = [span for span in collector.spans if span.name == "try clone"]
    (whole,) = [span for span in tries if span.parent_id == collector.one("step clone").span_id]
    assert len(tries) > 2 and {span.parent_id for span in tries if span is not whole} == {whole.span_id}


def test_many_spans_at_once_all_arrive(run: Any, write: Write, collector: Collector):
    steps = "".join(
        f"  s{number}: {{type: function, target: 'tool.py:app', command: inner}}\n" for number in range(300)
    )
    write("tool.py", APP)

    run(write("flow.yaml", f"name: many\ntimeout: 60s\nmax_parallelism: 50\nsteps:\n{steps}"))

    many = collector.one("run many")
    assert len(collector.children_of(many)) == 300
    assert len([span for span in collector.spans if span.name == "inner"]) == 300
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
