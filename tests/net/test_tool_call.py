"""One call of a tool against real servers, most of which do something wrong: all of them at once."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.call import Outcome
from shotclock.calls.control import start_control
from shotclock.calls.runtime import Runtime
from shotclock.core.limits import Clocks
from shotclock.net.tool_call import ToolAnswer, ToolRequest
from tests.calls.bounds import ROOT

pytestmark = pytest.mark.usefixtures("no_survivors")


async def ask(
    runtime: Runtime, server: str, tool: str = "echo", arguments: Any = None, clocks: Any = None, **fields: Any
) -> tuple[ToolAnswer, Any]:
    """Return the answer, and the envelope of the call as a step would give it."""
    argv = [sys.executable, "-m", "tests.flows.steps.mcp_servers", *server.split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    given = {"argv": argv, "env": {}, "base_env": env, "folder": ROOT, "on_cancelled": lambda outcome: None, **fields}
    call = runtime.begin("tool", {}, clocks or Clocks.of("40s", grace="200ms"), is_command=True)
    async with runtime.answering(call) as answering:
        start_control(call, runtime.observe)
        answer = await ToolRequest(tool, arguments or {}, **given).send(call, runtime)
        answering.outcome = answer.outcome
    envelope = answering.envelope
    return answer, envelope if answer.rewrite is None else answer.rewrite(envelope)


def test_what_a_server_does_is_what_its_caller_gets() -> None:
    short, idle = Clocks.of("6s", grace="100ms"), Clocks.of("40s", grace="100ms", idle="500ms")
    table: list[tuple[str, dict[str, Any], Any, str | None, str | None, str]] = [
        ("good", {"tool": "text", "arguments": {"words": "plain"}}, "plain", None, None, "finished"),
        ("good", {"tool": "many", "arguments": {"words": ["a", "b"]}}, "a\nb", None, None, "finished"),
        ("good", {"tool": "envelope"}, {"answer": 42}, None, None, "killed"),
        ("good", {"tool": "failing_envelope", "arguments": {"code": "ACME_X"}}, None, "ACME_X", "tool_error", "killed"),
        ("good", {"tool": "fail"}, ..., "TOOL_FAILED", None, "finished"),
        ("good", {"tool": "ecoh"}, None, "UNKNOWN_OPERATION", None, "not_started"),
        ("good", {"arguments": {"a": float("nan")}}, None, "ARG_ERROR", None, "not_started"),
        ("refuses", {}, None, "TOOL_FAILED", None, "finished"),
        ("nonsense", {}, None, "TOOL_FAILED", None, "finished"),
        ("lists_nothing", {}, ..., None, None, "finished"),
        ("garbage_in_between", {}, ..., None, None, "finished"),
        ("asks_back", {}, ..., None, None, "finished"),
        ("refuses_to_initialize", {}, None, "CONNECT_FAILED", None, "not_started"),
        ("dies", {}, None, "CONNECTION_LOST", None, "finished"),
        ("dies_at_once", {}, None, "CONNECT_FAILED", None, "not_started"),
        ("never_initializes", {"connect_ms": 400}, None, "TIMEOUT", "connect_timeout", "killed"),
        ("never_answers", {"clocks": short}, None, "TIMEOUT", None, "killed"),
        ("never_answers", {"clocks": idle}, None, "STALLED", None, "killed"),
        ("", {"argv": ["/none"]}, None, "COMMAND_NOT_FOUND", None, "not_started"),
        ("", {"argv": [], "url": "http://127.0.0.1:1/mcp"}, None, "CONNECT_FAILED", None, "not_started"),
    ]

    async def scenario() -> list[tuple[ToolAnswer, Any]]:
        async with Runtime() as runtime:
            await ask(runtime, "good")  # loads the client, so that no limit below runs for that
            return await asyncio.gather(*(ask(runtime, server, **asked) for server, asked, *_ in table))

    answers = asyncio.run(asyncio.wait_for(scenario(), 100))
    for (server, asked, output, code, rule, ending), (answer, envelope) in zip(table, answers, strict=True):
        found = (envelope.code, answer.rule, envelope.ending)
        assert found == (code, rule, ending), (server, asked, envelope)
        assert output is ... or answer.output == output, (server, asked)
    messages = {
        server: str((envelope.error or {}).get("message"))
        for (server, *_), (_, envelope) in zip(table, answers, strict=True)
    }
    assert messages["dies"] == "the MCP server left with exit code 3 before it had answered: disk full"
    assert "no licence" in messages["refuses_to_initialize"] and "no such config" in messages["dies_at_once"]
    assert messages["never_initializes"] == "MCP connection timed out after 0.4 seconds"
    assert answers[5][1].error["suggestion"] == "did you mean 'echo'?"
    assert [each["code"] for each in answers[2][1].warnings] == ["ACME_LOW"]


def test_progress_and_the_remaining_time_travel_and_a_call_that_winds_down_or_is_cancelled_leaves_no_server() -> None:
    async def scenario() -> None:
        news: list[float] = []
        left: list[Outcome] = []
        async with Runtime() as runtime:
            told, _ = await ask(runtime, "good", arguments={"a": [1]}, clocks=Clocks.of("9s"))
            assert (
                told.output["arguments"] == {"a": [1]} and 0 < told.output["meta"]["shotclock.dev/remainingMs"] <= 9000
            )
            await ask(runtime, "chatters", on_progress=lambda done, total, message: news.append(done))
            assert news == sorted(news) and len(news) >= 9
            stopped, envelope = await ask(runtime, "stops_gracefully", "slow", clocks=Clocks.of("30s", soft="3s"))
            assert stopped.output == "half of it" and [each["code"] for each in envelope.warnings] == ["SOFT_LIMIT"]
            working = asyncio.ensure_future(ask(runtime, "never_answers", on_cancelled=left.append))
            await asyncio.sleep(1)
            working.cancel()
            await asyncio.wait([working], timeout=10)
            assert working.cancelled() and [outcome.ending.value for outcome in left] == ["killed"]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_list_without_an_end_and_a_flood_are_left_on_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Runtime() as runtime:
            floods = await asyncio.gather(
                ask(runtime, "pages_for_ever", "not there"),
                ask(runtime, "garbage", connect_ms=3_000),
                ask(runtime, "one_line"),
                ask(runtime, "floods_stderr"),
                ask(runtime, "closes_stdout"),
            )
        assert [envelope.code for _, envelope in floods[2:]] == ["TOOL_FAILED", None, "CONNECTION_LOST"]
        assert floods[0][1].code in ("UNKNOWN_OPERATION", "TIMEOUT")
        assert "this is no JSON" in floods[1][1].error["message"]

    asyncio.run(asyncio.wait_for(scenario(), 60))
