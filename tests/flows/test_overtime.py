"""Overtime of steps, and the graceful stop of runs with everything inside them."""

import asyncio
import contextlib
import http.server
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls import control_channel
from shotclock.calls.control import control_of, live_calls
from shotclock.calls.control_channel import RunOrder
from shotclock.core.envelope import Envelope
from shotclock.flows.report.words import news_in_words
from shotclock.store.store import Store
from tests.calls.bounds import ROOT
from tests.flows.conftest import statuses, step

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

Run = Callable[..., Envelope]
# What a busy machine may take to start the Apps and servers of a run, beside the clocks that are measured.
START_S = 20.0

APP = """
import time
from shotclock import App, Context

app = App("tool", default_timeout="60s")

@app.command
def count(ctx: Context) -> dict[str, object]:
    for number in range(1000):
        ctx.keep({"counted": number})
        time.sleep(0.05)
        if ctx.stopping:
            return {"counted": number, "saved": True}
    return {"counted": 1000}

@app.command
def is_deaf(ctx: Context) -> None:
    ctx.keep({"kept": True})
    time.sleep(60)

@app.command
def extend(summary: dict[str, object]) -> dict[str, object]:
    return {"extend": "20s"}
"""
SAVES = "trap 'echo saved; exit 0' TERM; echo begun; sleep 60 & wait"


def output(envelope: Envelope, name: str) -> Any:
    return step(envelope, name)["output"]


def test_defaults_hold_for_every_step(run: Run):
    envelope = run(
        """
        defaults: {soft: 300ms, wind_down: 2s, overtime: {observer: none, budget: 5s}}
        steps:
          a: {exec: sleep 60}
          b: {exec: "trap 'echo saved; exit 0' TERM; sleep 60 & wait"}
        """
    )
    assert statuses(envelope) == {"a": "timed_out", "b": "succeeded"} and output(envelope, "b") == "saved"


SLOW_GIT = f"""#!/bin/sh
case "$*" in *ls-remote*) sleep 4;; esac
exec {shutil.which("git")} "$@"
"""
SLEEPS = """
import time
from shotclock import App

app = App("tool", default_timeout="60s")

@app.command
def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "done"

@app.command
async def sleep_on_a_loop(seconds: float) -> str:
    import asyncio

    await asyncio.sleep(seconds)
    return "done"
"""
# Each takes longer than the three seconds that its step has.
LONG_WORK = """
  command: {exec: sleep 4; echo done, TIMEOUT}
  function: {type: function, target: "tool.py:app", command: sleep, args: {seconds: 4}, TIMEOUT}
  async_function: {type: function, target: "tool.py:app", command: sleep_on_a_loop, args: {seconds: 4}, TIMEOUT}
  checkout: {type: git-checkout, repository: origin, path: here, env: {PATH: "BIN:$PATH"}, CLONE_TIMEOUT}
  workflow: {type: workflow, workflow: middle.yaml, TIMEOUT}
  request: {type: http_client, url: "URL", TIMEOUT_MS}
  server:
    {type: mcp, command: INTERPRETER, args: [-m, tests.flows.steps.mcp_servers, starts_slowly, "4"], method: echo,
     env: {PYTHONPATH: "ROOT"}, TIMEOUT}
"""


@pytest.fixture
def long_work(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """The steps of every kind whose timeout can be moved, with these words for their overtime, if any."""
    (tmp_path / "tool.py").write_text(SLEEPS)
    (tmp_path / "middle.yaml").write_text("steps: {inner: {type: workflow, workflow: inner.yaml}}")
    server = (
        f"{{type: mcp, command: {sys.executable}, args: [-m, tests.flows.steps.mcp_servers, starts_slowly, '4'], "
        + (f"method: echo, env: {{PYTHONPATH: '{ROOT}'}}, timeout: 60}}")
    )
    (tmp_path / "inner.yaml").write_text(f"steps: {{a: {{exec: sleep 4; echo done, timeout: 60}}, b: {server}}}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text(SLOW_GIT)
    (tmp_path / "bin/git").chmod(0o755)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q", "-b", "main", "origin"], check=True, timeout=60)
    words = ["-C", "origin", "commit", "-q", "--allow-empty", "-m", "first"]
    subprocess.run([*git, *words], check=True, timeout=60)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            threading.Event().wait(4)
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"done")

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def steps(timeout_s: int, overtime: str = "") -> str:
        text = "steps:" + LONG_WORK
        for name, value in {
            "CLONE_TIMEOUT": f"clone_timeout_ms: {timeout_s * 1000}{overtime}",
            "TIMEOUT_MS": f"timeout: {timeout_s * 1000}{overtime}",
            "TIMEOUT": f"timeout: {timeout_s}{overtime}",
            "BIN": str(tmp_path / "bin"),
            "$PATH": os.environ["PATH"],
            "URL": f"http://127.0.0.1:{server.server_port}/",
            "INTERPRETER": sys.executable,
            "ROOT": str(ROOT),
        }.items():
            text = text.replace(name, value)
        return text

    yield steps
    server.shutdown()
    server.server_close()


def test_the_timeout_of_every_kind_of_step_moves_along_with_what_is_granted(run: Run, long_work: Any):
    extends = """{command: "echo '{\\"extend\\": \\"30s\\"}'", budget: 40s, hard_extends: true}"""
    envelope = run("max_parallelism: 8\n" + long_work(3, f", soft: 1500ms, overtime: {extends}"))
    assert set(statuses(envelope).values()) == {"succeeded"}, {
        name: each["error"] for name, each in envelope.data["steps"].items() if each["error"]
    }
    for name in statuses(envelope):
        (told,) = step(envelope, name)["overtime"]
        assert told["granted_ms"] == 30_000 and step(envelope, name)["timeout_ms"] > 30_000, name


def test_a_run_that_is_extended_gives_all_that_is_inside_it_more_time(run: Run, long_work: Any):
    def extend_once_begun(state: Any) -> None:
        if state.id == "command" and state.status == "running":
            (outermost,) = [each for each in live_calls.values() if each.name.startswith("run ")]
            asyncio.get_running_loop().call_later(1, control_of(outermost).extend, 30_000, "alice")

    envelope = run("timeout: 3s\nmax_parallelism: 8\n" + long_work(60), on_change=extend_once_begun)
    assert set(statuses(envelope).values()) == {"succeeded"}, envelope.data
    assert envelope.meta["timeout_ms"] == 33_000


def test_a_question_is_not_extended_with_its_step(linted: Any):
    (finding,) = linted("steps: {a: {type: human-input, prompt: x, timeout: 9, overtime: {hard_extends: true}}}")
    assert finding.rule == "clock/overtime" and "inbox extend" in finding.message


@pytest.fixture
def nested(tmp_path: Path) -> str:
    """Three files inside each other, with a command, a function and an MCP server in the innermost."""
    (tmp_path / "tool.py").write_text(APP)
    (tmp_path / "inner.yaml").write_text(
        textwrap.dedent(
            f"""
            steps:
              command: {{exec: "{SAVES}", timeout: 60}}
              function: {{type: function, target: tool.py:app, command: count, timeout: 60}}
              server:
                type: mcp
                command: {sys.executable}
                args: [-m, tests.flows.steps.mcp_servers, good]
                method: slow
                env: {{PYTHONPATH: "{ROOT}"}}
                timeout: 60
              later: {{exec: touch later, depends_on: command}}
            """
        )
    )
    (tmp_path / "middle.yaml").write_text("steps: {inner: {type: workflow, workflow: inner.yaml, timeout: 60}}")
    return "middle: {type: workflow, workflow: middle.yaml, timeout: 60, soft: 4s, wind_down: 4s}"


def inner_steps(envelope: Envelope) -> Any:
    return output(envelope, "middle")["inner"]


def test_a_nested_stop_returns_partial_results_from_every_level_in_time_and_nothing_survives(
    run: Run, nested: str, store: Store
):
    began = time.monotonic()
    envelope = run(f"steps: {{{nested}, after: {{exec: echo no, depends_on: middle}}}}")
    took_s = time.monotonic() - began
    assert statuses(envelope) == {"middle": "timed_out", "after": "skipped"}
    innermost = inner_steps(envelope)
    assert innermost["command"] == "begun\nsaved"
    assert innermost["function"]["saved"] is True
    assert innermost["later"] is None
    nested_runs = {run.id: store.runs.get(run.id) for run in store.runs.list(20)}
    (record,) = [run.envelope["data"]["steps"]["server"] for run in nested_runs.values() if "inner" in run.id]
    assert record["error"]["context"].get("clock", {}).get("kind") == "soft", record
    assert step(envelope, "middle")["error"]["context"]["clock"]["kind"] == "soft"
    assert took_s < 4 + 4 + 1 + START_S


def test_winding_down_a_run_lets_its_clean_up_run_and_starts_nothing_else(run: Run, tmp_path: Path):
    text = f"""
        steps:
          a: {{exec: "touch {tmp_path}/begun; sleep 60", timeout: 60, on_fail: {{run: tidy}}}}
          b: {{exec: touch {tmp_path}/b, depends_on: a, timeout: 60}}
          tidy: {{exec: touch {tmp_path}/tidy}}
        """

    def wind_down_once_begun(state: Any) -> None:
        if state.id == "a" and state.status == "running":
            asyncio.get_running_loop().call_later(0.5, wind_down)

    def wind_down() -> None:
        (outermost,) = [each for each in live_calls.values() if each.name.startswith("run ")]
        control_of(outermost).wind_down("alice", "enough for today")

    envelope = run(text, on_change=wind_down_once_begun)
    assert envelope.code == "CANCELLED" and "enough for today" in str(envelope.error)
    assert (tmp_path / "tidy").exists() and not (tmp_path / "b").exists()
    data: Any = envelope.data
    assert data["partial"] is True and envelope.meta["partial"] is True


MATRIX = """
max_parallelism: 16
steps:
  extend: {exec: "while [ ! -e told ]; do sleep 0.05; done", OWN, overtime: {command: cat 20s.json, budget: 50s}}
  decline: {exec: SPEAKS, OWN, overtime: {command: cat no.json, budget: 50s}}
  malformed: {exec: SPEAKS, OWN, overtime: {command: cat soon.json, budget: 50s}}
  hanging: {exec: SPEAKS, OWN, overtime: {command: sleep 60, budget: 50s, observer_timeout: 500ms}}
  budget: {exec: SPEAKS, OWN, overtime: {budget: 900ms, max_per_request: 400ms, max_requests: 9}}
  sub_second: {exec: SPEAKS, OWN, overtime: {command: cat 500ms.json, budget: 50s, max_requests: 2}}
  per_request:
    {exec: SPEAKS, OWN, overtime: {command: cat 20s.json, budget: 50s, max_per_request: 700ms, max_requests: 1}}
  max_requests: {exec: SPEAKS, OWN, overtime: {budget: 50s, max_per_request: 300ms, max_requests: 2}}
  parent: {type: workflow, workflow: short.yaml, timeout: 60}
"""
SHORT = """
timeout: 6s
steps:
  a:
    exec: sleep 60
    timeout: 2
    grace: 0
    soft: 1s
    wind_down: 200ms
    overtime: {command: cat 20s.json, budget: 50s, max_requests: 9, hard_extends: true}
"""


def requests_of(described: Any) -> list[Any]:
    return [told for told in described.get("overtime", ()) if told["event"] == "overtime"]


def test_the_matrix_of_what_may_be_decided_about_the_time_of_a_step(run: Run, tmp_path: Path, store: Store):
    for text in ("20s", "500ms", "soon"):
        (tmp_path / f"{text}.json").write_text(json.dumps({"extend": text}))
    (tmp_path / "no.json").write_text('{"decline": true}')
    (tmp_path / "short.yaml").write_text(SHORT)
    speaks = "\"trap 'echo saved; exit 1' TERM; while :; do echo on; sleep 0.05; done\""

    def end_what_was_extended(name: str, news: dict[str, Any]) -> None:
        if name == "extend":
            (tmp_path / "told").touch()

    text = MATRIX.replace("SPEAKS", speaks).replace("OWN", "timeout: 60, soft: 500ms")
    envelope = run(text, on_news=end_what_was_extended)
    data: Any = envelope.data
    found = {name: requests_of(each) for name, each in data["steps"].items()}
    nested_runs = [store.runs.get(each.id) for each in store.runs.list(9)]
    (inner,) = [each for each in nested_runs if each is not None and each.id.endswith(".parent")]
    assert inner.envelope is not None
    ceiling = requests_of(inner.envelope["data"]["steps"]["a"])
    budget = found.pop("budget")
    assert {name: [told["verdict"] for told in each] for name, each in found.items()} == {
        "extend": ["granted"],
        "decline": ["declined"],
        "malformed": ["failed"],
        "hanging": ["failed"],
        "sub_second": ["granted", "granted", "exhausted"],
        "per_request": ["granted", "exhausted"],
        "max_requests": ["granted", "granted", "exhausted"],
        "parent": [],
    }
    assert (budget[-1]["verdict"], {told["verdict"] for told in budget[:-1]}) == ("exhausted", {"granted"})
    assert sum(told["granted_ms"] + told["took_ms"] for told in budget[:-1]) <= 900
    assert found["extend"][0]["granted_ms"] == 20_000 and found["per_request"][0]["granted_ms"] == 700
    assert [told["granted_ms"] for told in found["sub_second"]] == [500, 500, 0]
    first, second, _ = found["sub_second"]
    assert second["at_ms"] >= first["at_ms"] + first["took_ms"] + 500
    assert all(told["at_ms"] + told["took_ms"] + told["granted_ms"] < 6000 for told in ceiling), "never past its run"
    assert ceiling[0]["verdict"] == "granted" and inner.envelope["data"]["steps"]["a"]["timeout_ms"] > 2000
    for name, status in statuses(envelope).items():
        assert status == {"extend": "succeeded"}.get(name, "timed_out" if name != "parent" else status), name
        if name not in ("extend", "parent"):
            assert output(envelope, name).endswith("saved"), "what it said when it was asked to end"


def test_a_step_that_needs_more_time_than_there_is_costs_no_other(run: Run):
    envelope = run(
        """
        timeout: 50s
        steps:
          long: {exec: echo hi, min_time: 1m, continue_on_failure: true}
          other: {exec: echo other}
        """
    )
    assert envelope.ok and statuses(envelope) == {"long": "timed_out", "other": "succeeded"}
    error = step(envelope, "long")["error"]
    assert error["code"] == "NO_TIME_LEFT" and "at least 1m" in error["message"]


def test_a_function_that_begins_after_the_bell_knows_at_once_that_it_is_to_stop(run: Run, tmp_path: Path):
    (tmp_path / "tool.py").write_text("import time\ntime.sleep(0.5)\n" + APP)
    envelope = run(
        """
        steps:
          a: {type: function, target: "tool.py:app", command: count, timeout: 60, soft: 50ms, wind_down: 15s}
        """
    )
    assert output(envelope, "a") == {"counted": 0, "saved": True}


def test_no_item_starts_once_the_run_around_it_winds_down(run: Run, tmp_path: Path):
    (tmp_path / "inner.yaml").write_text(
        textwrap.dedent(
            f"""
            max_parallelism: 2
            steps:
              each:
                for_each: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
                exec: trap '' TERM; touch {tmp_path}/begun-$ITEM; sleep 0.5
                env: {{ITEM: "{{{{ item }}}}"}}
                timeout: 60
                on_fail: {{run: tidy}}
              tidy: {{for_each: [1, 2, 3], exec: "touch {tmp_path}/tidy-$ITEM", env: {{ITEM: "{{{{ item }}}}"}}}}
            """
        )
    )
    envelope = run("steps: {inner: {type: workflow, workflow: inner.yaml, timeout: 60, soft: 1200ms, wind_down: 30s}}")
    assert statuses(envelope) == {"inner": "timed_out"}
    begun = len(list(tmp_path.glob("begun-*")))
    assert 0 < begun <= 8, "two at a time, for half a second each, until the bell"
    assert len(list(tmp_path.glob("tidy-*"))) == 3, "all of its clean-up is done"


def test_a_request_that_nobody_had_answered_when_the_step_ended_is_in_its_record_and_report(
    run: Run, tmp_path: Path, store: Store
):
    observer = f"touch {tmp_path}/asked; sleep 60"
    envelope = run(
        f"""
        steps:
          a:
            exec: while [ ! -e {tmp_path}/asked ]; do sleep 0.05; done
            timeout: 60
            soft: 300ms
            overtime: {{command: "{observer}", budget: 50s, observer_timeout: 45s}}
        """
    )
    (told,) = step(envelope, "a")["overtime"]
    assert (told["verdict"], told["asked_by"], told["granted_ms"]) == ("unanswered", "soft clock", 0)
    (known,) = store.runs.list(1)
    assert store.runs.steps(known.id)["a"].record["overtime"] == [told]
    assert "ended before the answer" in news_in_words(told)


def test_what_is_decided_while_others_keep_the_store_busy_is_written_down_while_the_step_runs(
    run: Run, tmp_path: Path, store: Store
):
    """Whoever looks at the run sees it, and it is not lost with a `kill -9`."""

    async def extend_while_others_write() -> None:
        async with asyncio.timeout(START_S):
            while not (tmp_path / "begun").exists():
                await asyncio.sleep(0.02)
        (run_id,) = control_channel.runs
        before = store.runs.get(run_id)
        with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for meant in ({"run": run_id}, {"run": run_id, "step": "a"}):
                await RunOrder("", None, "alice", 5000).act_on(control_channel.find_calls(meant))
            other.execute("ROLLBACK")
        async with asyncio.timeout(START_S):
            while not store.runs.steps(run_id)["a"].record.get("overtime"):
                await asyncio.sleep(0.02)
            while store.runs.get(run_id).deadline_at != before.deadline_at + 5000:
                await asyncio.sleep(0.02)

    tasks = []

    def begin(state: Any) -> None:
        if not tasks:
            tasks.append(asyncio.ensure_future(extend_while_others_write()))
            tasks[0].add_done_callback(lambda _: (tmp_path / "go").touch())

    waits = f"touch {tmp_path}/begun; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    envelope = run(f'timeout: 50s\nsteps: {{a: {{exec: "{waits}", timeout: 40}}}}', on_change=begin)
    tasks[0].result()
    assert statuses(envelope) == {"a": "succeeded"} and envelope.meta["timeout_ms"] == 55_000


def test_no_further_item_or_try_of_a_step_begins_once_somebody_winds_it_down(run: Run, tmp_path: Path):
    text = f"""
        max_parallelism: 2
        steps:
          each:
            for_each: [1, 2, 3, 4]
            exec: trap 'exit 0' TERM; touch {tmp_path}/begun-$ITEM; sleep 60 & wait
            env: {{ITEM: "{{{{ item }}}}"}}
            timeout: 60
            on_fail: {{run: tidy}}
          again: {{exec: "echo x >> {tmp_path}/tries; exec sleep 60", on_fail: {{retry: {{max: 3}}}}, timeout: 60}}
          tidy: {{exec: touch {tmp_path}/tidy}}
        """

    async def wind_down_once_begun() -> None:
        async with asyncio.timeout(START_S):
            while not (tmp_path / "begun-1").exists() or not (tmp_path / "tries").exists():
                await asyncio.sleep(0.02)
        (run_id,) = control_channel.runs
        for name in ("each", "again"):
            await RunOrder("", None, "alice", None).act_on(control_channel.find_calls({"run": run_id, "step": name}))

    tasks = []

    def begin(state: Any) -> None:
        if not tasks:
            tasks.append(asyncio.ensure_future(wind_down_once_begun()))

    envelope = run(text, on_change=begin)
    tasks[0].result()
    assert sorted(path.name for path in tmp_path.glob("begun-*")) == ["begun-1"]
    assert statuses(envelope) == {"each": "cancelled", "again": "failed", "tidy": "succeeded"}
    error = step(envelope, "each")["error"]
    assert error["message"] == "3 of 4 items were not started: the step winds down"
    assert (tmp_path / "tries").read_text() == "x\n" and step(envelope, "again")["error"]["code"] == "CANCELLED"


SPEAKS = """
import time
from pathlib import Path
from shotclock import App, Context

app = App("tool", default_timeout="60s")

@app.command
def speak(ctx: Context, until: Path) -> str:
    for number in range(800):
        if until.exists():
            break
        ctx.progress(number)
        time.sleep(0.05)
    return "done"

@app.command
def is_silent(ctx: Context) -> str:
    while not ctx.stopping:
        time.sleep(0.05)
    return "stopped"
"""
# Whoever shows nothing for as long as one grant takes gets no other.
WATCHED = "timeout: 60, soft: 500ms, wind_down: 300ms, grace: 200ms, overtime: {budget: 50s, max_requests: 40, GRANTS}"


def watched(grants: str, **works: str) -> str:
    words = WATCHED.replace("GRANTS", f"max_per_request: {grants}")
    return "\n".join(
        ["max_parallelism: 8", "steps:", *(f"  {name}: {{{work}, {words}}}" for name, work in works.items())]
    )


def speaking_server(*words: str, method: str) -> str:
    module = "tests.flows.steps.mcp_servers"
    return (
        f"type: mcp, command: '{sys.executable}', args: [-m, {module}, {', '.join(words)}], "
        f"method: {method}, env: {{PYTHONPATH: '{ROOT}'}}"
    )


def test_what_is_called_inside_a_step_shows_that_it_goes_on(run: Run, tmp_path: Path):
    (tmp_path / "tool.py").write_text(SPEAKS)
    speaks = f"while [ ! -e {tmp_path}/workflow ]; do echo on; sleep 0.05; done"
    (tmp_path / "middle.yaml").write_text("steps: {inner: {type: workflow, workflow: inner.yaml}}")
    (tmp_path / "inner.yaml").write_text(f"steps: {{first: {{exec: 'true'}}, a: {{exec: '{speaks}', timeout: 60}}}}")
    granted: dict[str, int] = {}

    def end_after_some_grants(name: str, news: dict[str, Any]) -> None:
        granted[name] = granted.get(name, 0) + bool(news.get("granted_ms"))
        if granted[name] == 3:  # the first may be for what has not begun
            (tmp_path / name).touch()

    envelope = run(
        watched(
            "2s",
            function=f"type: function, target: 'tool.py:app', command: speak, args: {{until: {tmp_path}/function}}",
            server=speaking_server("chatters_until", f"{tmp_path}/server", method="echo"),
            workflow="type: workflow, workflow: middle.yaml",
        ),
        on_news=end_after_some_grants,
    )
    assert set(statuses(envelope).values()) == {"succeeded"}, envelope.data
    for name in statuses(envelope):
        told = step(envelope, name)["overtime"]
        assert len(told) >= 3 and {each.get("verdict") for each in told} == {"granted"}, (name, told)


def test_what_shows_nothing_inside_a_step_gets_no_more_than_its_start_has_earned(run: Run, tmp_path: Path):
    (tmp_path / "tool.py").write_text(SPEAKS)
    (tmp_path / "middle.yaml").write_text("steps: {inner: {type: workflow, workflow: inner.yaml}}")
    (tmp_path / "inner.yaml").write_text("steps: {first: {exec: echo first}, a: {exec: sleep 60, timeout: 60}}")
    envelope = run(
        watched(
            "500ms",
            function="type: function, target: 'tool.py:app', command: is_silent",
            server=speaking_server("good", method="slow"),
            workflow="type: workflow, workflow: middle.yaml",
        )
    )
    for name in statuses(envelope):
        *granted, declined, wound_down = step(envelope, name)["overtime"]
        assert (declined["verdict"], wound_down["event"]) == ("declined", "wind_down"), name
        assert {each["verdict"] for each in granted} <= {"granted"}


def test_a_server_is_told_of_a_wind_down_that_began_before_it_was_started(run: Run, monkeypatch: pytest.MonkeyPatch):
    from shotclock.net import mcp_client, tool_call

    winds_down, asked = threading.Event(), []
    load, ask_to_stop = tool_call.importlib.import_module, mcp_client.Conversation.ask_to_stop

    def load_late(name: str) -> Any:
        assert winds_down.wait(START_S)
        return load(name)

    async def note_and_ask(conversation: Any, *words: Any) -> None:
        asked.append(words)
        await ask_to_stop(conversation, *words)

    def on_news(name: str, news: dict[str, Any]) -> None:
        winds_down.set()

    monkeypatch.setattr(tool_call.importlib, "import_module", load_late)
    monkeypatch.setattr(mcp_client.Conversation, "ask_to_stop", note_and_ask)
    server = speaking_server("good", method="slow")
    envelope = run(f"steps: {{a: {{{server}, timeout: 60, soft: 50ms, wind_down: 2s, grace: 0}}}}", on_news=on_news)
    assert statuses(envelope) == {"a": "timed_out"} and len(asked) == 1


def test_the_record_says_who_decided_that_a_step_winds_down(run: Run) -> None:
    loop = 'exec: "while :; do echo x; sleep 0.05; done", timeout: 60, soft: 200ms, wind_down: 100ms, grace: 100ms'
    envelope = run(f"""
    steps:
      used_up: {{{loop}, overtime: {{budget: 50s, max_requests: 1, max_per_request: 200ms}}}}
      fails: {{{loop}, overtime: {{command: "exit 3", budget: 50s}}}}
      declines: {{{loop}, overtime: {{command: "echo '{{\\"decline\\": true}}'", budget: 50s}}}}
    """)
    for name, verdict, observer, by in (
        ("used_up", "exhausted", "none", "soft clock"),
        ("fails", "failed", "command", "soft clock"),
        ("declines", "declined", "command", "observer"),
    ):
        *_, decided, wound_down = step(envelope, name)["overtime"]
        found = decided["verdict"], decided["observer"], wound_down["event"], wound_down["by"]
        assert found == (verdict, observer, "wind_down", by), (name, decided, wound_down)
