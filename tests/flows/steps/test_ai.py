"""`ai` steps: real agents in real processes, asking models on loopback that hang, drip, cut, refuse and never stop."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.flows.check.lint import lint
from shotclock.flows.check.plan import overtime_of, plan_of
from shotclock.flows.file.loader import Finding, load_text
from shotclock.flows.run.runs import RunCaller, RunRequest, start
from shotclock.flows.run.state import record_workflow
from shotclock.flows.steps._ai_tools import TEXT_LIMIT, AgentListener
from shotclock.flows.steps.ai import PROMPT_LIMIT, read_overtime
from shotclock.flows.steps.ai_models import AiModel, AiPart, ChosenModel, choose_model, default_timeout_ms
from shotclock.store.store import Store
from tests.calls.bounds import ROOT, eventually, marked
from tests.flows.steps.model_servers import CallTool, Garbage, Hang, ModelServer, Say, Status, model_server
from tests.flows.steps.warm_agents import warm_agents
from tests.rows import row

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

RUN_LIMIT_S = 90.0
# Of a step that is not about its clock.
ENOUGH_MS = 60_000
# Past a bell, on two cores that others use as well.
LATE_S = 4.0
# What a server has sent is in the hands of the run a moment later; only this can be waited for.
HANDED_ON_S = 1.0
KEY = "sk-secret-of-openai"
MODEL = "SHOTCLOCK_AI_MODEL"

GREET = (
    "{greet: {description: greets somebody, exec: 'echo \"hello {{ args.who }}\"', "
    "input_schema: {type: object, properties: {who: {type: string}}, required: [who]}}}"
)


@pytest.fixture(scope="module")
def agents() -> Iterator[None]:
    with warm_agents("openai", "anthropic", "google"):
        yield


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs these tests may have a key of their own, and would pay for them."""
    for name in list(os.environ):
        if name.startswith(("OPENAI_", "ANTHROPIC_", "GOOGLE_", "GEMINI_", "SHOTCLOCK_AI_")):
            monkeypatch.delenv(name)


@pytest.fixture
def run(tmp_path: Path, validate_envelope: Callable[[dict[str, Any]], Any], agents: None) -> Callable[..., Envelope]:
    """A function that runs a workflow by the real engine, and returns its valid envelope."""

    def run(
        text: str, environment: dict[str, str] | None = None, stop_after: "threading.Event | Appears | None" = None
    ) -> Envelope:
        loaded = load_text(textwrap.dedent(text).encode(), "flow.yaml", tmp_path)
        assert loaded.workflow is not None, loaded.findings

        async def main() -> Envelope:
            assert loaded.workflow is not None
            request = RunRequest(loaded.workflow, str(tmp_path / "flow.yaml"), tmp_path)
            stop = None if stop_after is None else asyncio.ensure_future(stop_when(stop_after))
            variables = {**os.environ, "OPENAI_API_KEY": KEY, **(environment or {})}
            async with asyncio.timeout(RUN_LIMIT_S):
                return await start(request, Store.open(tmp_path / "home"), RunCaller(stop, environment=variables))

        envelope = asyncio.run(main())
        validate_envelope(envelope.to_dict())
        return envelope

    return run


async def stop_when(happened: "threading.Event | Appears") -> str:
    """Return the signal that ends a run once something has happened, and the agent had time to hand on what it read."""
    assert await asyncio.to_thread(happened.wait, RUN_LIMIT_S)
    await asyncio.sleep(HANDED_ON_S)
    return "SIGTERM"


def steps(envelope: Envelope) -> dict[str, dict[str, Any]]:
    assert isinstance(envelope.data, dict)
    return envelope.data["steps"]


def ask(server: ModelServer, more: str = "", step: str = "", timeout: int = ENOUGH_MS) -> str:
    """A step that asks a server, in one line of YAML."""
    block = f"base_url: {server.url}/v1, model: m, timeout: {timeout}"
    return f"{{type: ai, prompt: what is it?, ai: {{{block}{', ' if more else ''}{more}}}{', ' if step else ''}{step}}}"


# --- what comes back ------------------------------------------------------------------------------------------


def test_blocks_that_exist_run_unchanged_beside_other_steps(run: Callable[..., Envelope]) -> None:
    with model_server(Say("hello ", "world", tokens=7)) as server:
        envelope = run(
            f"""
            steps:
              diff: {{exec: echo a change}}
              plain:
                type: ai
                prompt: "look at {{{{ outputs.diff }}}}, in {{{{ deadline.remaining }}}} ms"
                depends_on: diff
                ai: {{timeout: 300000, ai_timeout: 60000}}
              negotiated:
                type: ai
                prompt: hello
                ai:
                  timeout: 300000
                  ai_timeout: 60000
                  timeout_behavior: negotiated
                  negotiated_timeout_budget: 120000
                  negotiated_timeout_max_requests: 3
                  negotiated_timeout_max_per_request: 60000
                  graceful_stop_deadline: 5000
              claude:
                type: ai
                prompt: hello
                ai: {{provider: anthropic, model: claude-3-opus, timeout: 120000}}
              page: {{type: http_client, url: "{server.url}/v1/models", depends_on: diff}}
            """,
            {**server.openai, **server.anthropic, "SHOTCLOCK_AI_MODEL": "gpt-x"},
        )
    assert envelope.ok, envelope
    found = steps(envelope)
    assert found["page"]["output"] == {"object": "list", "data": []}
    for name in ("plain", "negotiated", "claude"):
        assert found[name]["status"] == "succeeded", found[name]
        assert found[name]["output"] == "hello world"
        assert "partial" not in found[name]
        assert found[name]["side_effects"] == "none"
    assert found["plain"]["details"]["usage"] == {
        "requests": 1,
        "tool_calls": 0,
        "input_tokens": 7,
        "output_tokens": 7,
        "total_tokens": 14,
    }
    assert (found["plain"]["details"]["model"], found["plain"]["details"]["finish_reason"]) == ("gpt-x", "stop")
    assert found["claude"]["details"]["model"] == "claude-3-opus"
    assert found["claude"]["timeout_ms"] == 120_000
    asked = [body["messages"][0]["content"] for body in server.requests if body["model"] == "gpt-x"]
    assert "look at a change, in 300000 ms" in asked


def test_a_model_of_google_answers_calls_tools_and_fails_as_the_others(run: Callable[..., Envelope]) -> None:
    def model(body: dict[str, Any]) -> Any:
        asked = json.dumps(body["contents"])
        if "fail" in asked:
            return Status(503)
        return Say("it said ", "hello") if "functionResponse" in asked else CallTool("greet", {"who": "you"})

    with model_server(model) as server:
        envelope = run(
            f"""
            tools: {GREET}
            steps:
              it: {{type: ai, prompt: greet, ai: {{model: gemini-x, timeout: {ENOUGH_MS}, tools: greet}}}}
              bad: {{type: ai, prompt: fail, ai: {{model: gemini-x, timeout: {ENOUGH_MS}, retry: {{max: 0}}}}}}
            """,
            server.google,
        )
    found = steps(envelope)
    assert found["it"]["output"] == "it said hello", found["it"]
    assert found["it"]["details"]["usage"]["requests"] == 2
    assert found["bad"]["error"]["code"] == "MODEL_UNAVAILABLE", found["bad"]
    assert set(server.keys) == {"secret-of-google"}
    assert "hello you" in json.dumps(server.requests)


def test_a_schema_asks_for_a_structured_answer_whatever_its_type(run: Callable[..., Envelope]) -> None:
    with (
        model_server(CallTool(None, {"count": 3})) as right,
        model_server(CallTool(None, {"count": "three"})) as wrong,
        model_server(CallTool(None, {"result": ["a", "b"]})) as listed,
        model_server(Say('{"nope": 1}'), Say('{"nope": 2}'), Say('{"nope": 3}')) as text,
        model_server(Say("one"), Say("two"), Say("three")) as words,
    ):
        envelope = run(f"""
            steps:
              right: {ask(right, step="output_schema: {type: object, properties: {count: {type: integer}}}")}
              wrong: {ask(wrong, step="schema: {type: object, properties: {count: {type: integer}}}")}
              listed: {ask(listed, step="schema: {type: array, items: {type: string}}")}
              text: {ask(text, step="schema: {type: object, required: [count]}")}
              words: {ask(words, step="schema: {type: object, required: [count]}")}
              each: {{exec: "echo {{{{ item }}}}", depends_on: listed, for_each: "{{{{ outputs.listed }}}}"}}
        """)
    found = steps(envelope)
    assert found["right"]["output"] == {"count": 3}
    assert found["wrong"]["error"]["code"] == "OUTPUT_INVALID"
    assert (found["text"]["error"]["code"], found["text"]["output"]) == ("OUTPUT_INVALID", {"nope": 3}), found["text"]
    assert (found["words"]["error"]["code"], found["words"]["output"]) == ("OUTPUT_INVALID", "three")
    assert found["listed"]["output"] == ["a", "b"]
    assert found["each"]["output"] == ["a", "b"]


def test_a_prompt_may_be_in_a_file_with_templates(run: Callable[..., Envelope], tmp_path: Path) -> None:
    (tmp_path / "review.md").write_text("Review this: {{ outputs.diff }}")
    with model_server(Say("fine")) as server:
        envelope = run(f"""
            steps:
              diff: {{exec: echo + one line}}
              review:
                type: ai
                prompt_file: review.md
                depends_on: diff
                ai: {{base_url: {server.url}/v1, model: m, system_prompt: "You are {{{{ run.name }}}}"}}
        """)
    assert steps(envelope)["review"]["output"] == "fine"
    said = [(message["role"], message["content"]) for message in server.requests[0]["messages"]]
    assert said == [("system", "You are flow"), ("user", "Review this: + one line")]


# --- models that do not behave ----------------------------------------------------------------------------------

BAD = {
    "hang": Hang(),
    "hang_in_stream": Say("so ", "far", then="hang"),
    "drip": Say(*(f"{number} " for number in range(1000)), pause_s=0.1),
    "silent": Say("a word", then="hang"),
    "cut": Say("one ", "two", then="cut"),
    "truncated": Say("three ", "four", then="stop"),
    "truncated_call": CallTool("none", {}, says="I call", then="stop"),
    "flood": Say("five", then="flood"),
    "garbage": Garbage(),
    "garbage_in_stream": Say("x", "y", then="garbage"),
    "auth": Status(401, message=f"{KEY} is no key"),
    "refused": Status(400),
    "broken": Status(500),
    "busy": Status(429, retry_after="120"),
}


# Those whose answer each client of a provider reads in its own way.
OF_ANTHROPIC = ("hang_in_stream", "cut", "truncated_call", "garbage_in_stream", "auth")
ENDINGS = {
    "hang": ("TIMEOUT", None, "ai/timeout"),
    "hang_in_stream": ("TIMEOUT", "so far", "ai/timeout"),
    "drip": ("TIMEOUT", "0 1 2 3 ", "ai/timeout"),
    "silent": ("STALLED", "a word", "ai/stalled"),
    "cut": ("MODEL_UNAVAILABLE", "one two", "ai/unavailable"),
    "truncated": ("MODEL_UNAVAILABLE", "three four", "ai/unavailable"),
    "truncated_call": ("MODEL_UNAVAILABLE", "I call", "ai/unavailable"),
    "flood": ("MODEL_ANSWER_INVALID", "five", "ai/answer"),
    "garbage": ("MODEL_ANSWER_INVALID", None, "ai/answer"),
    "garbage_in_stream": ("MODEL_ANSWER_INVALID", "xy", "ai/answer"),
    "auth": ("MODEL_AUTH_FAILED", None, "ai/auth"),
    "refused": ("MODEL_REQUEST_REFUSED", None, "ai/refused"),
    "broken": ("MODEL_UNAVAILABLE", None, "ai/unavailable"),
    "busy": ("MODEL_RATE_LIMITED", None, "ai/rate_limited"),
}


def run_misbehaving(run: Callable[..., Envelope], provider: str, actions: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    """Run a step with each of them, all at the same time; return what came of them, and how often each was asked."""
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(model_server(action)) for name, action in actions.items()}
        text = "max_parallelism: 20\nsteps:\n"
        for name, server in servers.items():
            url = server.url + ("/v1" if provider == "openai" else "")
            clocks = f"timeout: {ENOUGH_MS}" if name == "silent" else "timeout: 8000"
            block = f"provider: {provider}, base_url: {url}, model: m, {clocks}"
            idle = ", idle: 4000" if name == "silent" else ""
            retry = "retry: {max: 1, backoff: {delay_ms: 10}}"
            text += f"  {name}: {{type: ai, prompt: what, ai: {{{block}, {retry}}}, grace: 300{idle}}}\n"
        found = steps(run(text, {"ANTHROPIC_API_KEY": KEY}))
        return found, {name: len(server.requests) for name, server in servers.items()}


def test_a_model_that_misbehaves_is_ended_on_time_and_what_it_said_is_kept(run: Callable[..., Envelope]) -> None:
    for provider, actions in (("openai", BAD), ("anthropic", {name: BAD[name] for name in OF_ANTHROPIC})):
        found, asked = run_misbehaving(run, provider, actions)
        for name, step in found.items():
            code, output, rule = ENDINGS[name]
            with row(provider, name, step):
                assert (step["error"]["code"], step["error"]["context"]["rule"]) == (code, rule)
                assert step["duration_ms"] < 8_000 + 300 + LATE_S * 1000
                if output is None:
                    assert step["output"] is None
                else:
                    assert step["output"].startswith(output) and step["partial"] is True
                assert step["side_effects"] == "none" and KEY not in json.dumps(step)
                assert name == "drip" or step["details"]["usage"]["requests"] == asked[name]
        # Only what may pass is tried again.
        for name, times in {"cut": 2, "truncated_call": 2, "auth": 1, "garbage_in_stream": 1}.items():
            assert asked[name] == times, (provider, name)
        if provider == "openai":
            assert (asked["broken"], asked["truncated"], asked["refused"], asked["flood"]) == (2, 2, 1, 1)
            # It said when to come back, and there is no time for that.
            assert asked["busy"] == 1 and found["busy"]["error"]["retry_after_ms"] == 120_000


def test_a_request_that_failed_is_sent_again_when_its_server_says_and_then_to_the_next_model(
    run: Callable[..., Envelope],
) -> None:
    with (
        model_server(Status(429, retry_after="0.3"), Status(503), Say("at last")) as busy,
        model_server(Status(500)) as broken,
        model_server(Say("the other")) as other,
        model_server(Say("half of ", then="cut"), Say("whole")) as cut,
    ):
        second = f"fallback: [{{provider: anthropic, base_url: {other.url}, model: claude-x}}]"
        envelope = run(
            f"""
            steps:
              busy: {ask(busy)}
              fallen: {ask(broken, "retry: {max: 1, backoff: {delay_ms: 10}}, " + second)}
              cut: {ask(cut)}
            """,
            {"ANTHROPIC_API_KEY": KEY},
        )
    found = steps(envelope)
    assert found["busy"]["output"] == "at last"
    assert found["busy"]["details"]["retries"] == 2
    assert found["fallen"]["output"] == "the other"
    assert found["fallen"]["details"]["model"] == "claude-x"
    assert len(broken.requests) == 2
    (given_up,) = found["fallen"]["details"]["failed_models"]
    assert (given_up["model"], given_up["code"]) == ("m", "MODEL_UNAVAILABLE")
    # What the first answer had begun with is not part of the second.
    assert found["cut"]["output"] == "whole"
    assert "partial" not in found["cut"]


def test_a_model_that_hangs_is_given_up_for_the_next_and_only_the_last_one_stalls(run: Callable[..., Envelope]) -> None:
    with model_server(Say("a ", "word", then="hang")) as silent, model_server(Say("the other")) as other:
        to = "fallback: [{{base_url: {}/v1, model: n}}]"
        envelope = run(f"""
            steps:
              well: {ask(silent, to.format(other.url), "idle: 2500")}
              alone: {ask(silent, to.format(silent.url), "idle: 2500, grace: 200")}
        """)
    found = steps(envelope)
    assert (found["well"]["output"], found["well"]["details"]["model"]) == ("the other", "n"), found["well"]
    assert found["well"]["details"]["failed_models"][0]["message"].startswith("it was silent for 2.5s")
    assert (found["alone"]["error"]["code"], found["alone"]["output"]) == ("STALLED", "a word"), found["alone"]
    assert found["alone"]["details"]["model"] == "n"
    assert found["alone"]["error"]["context"]["clock"]["limit_ms"] == 2500
    assert len(silent.requests) == 3


# --- tools ------------------------------------------------------------------------------------------------------


def mcp(name: str, *more: str, extra: str = "") -> str:
    args = ", ".join(["-m", "tests.flows.steps.mcp_servers", name, *more])
    return f"{{command: {sys.executable}, args: [{args}], env: {{PYTHONPATH: {ROOT}}}{extra}}}"


def results(body: dict[str, Any]) -> list[str]:
    """What the model was told of its calls of tools."""
    return [message["content"] for message in body["messages"] if message["role"] == "tool"]


def test_tools_of_the_file_and_of_servers_are_called_over_one_connection(run: Callable[..., Envelope]) -> None:
    def model(body: dict[str, Any]) -> Any:
        done = len(results(body))
        calls = [
            CallTool("text", {"words": "first"}),
            CallTool("text", {"words": "second"}),
            CallTool("greet", {"who": "{{ env.HOME }} $(id) 'x'"}),
            CallTool("greet", {"whom": "nobody"}),
            CallTool("fail"),
        ]
        return calls[done] if done < len(calls) else Say("all done")

    with model_server(model) as server:
        envelope = run(f"""
            tools: {GREET}
            steps:
              it: {ask(server, "tools: greet, mcp_servers: {hands: " + mcp("good") + "}")}
        """)
    step = steps(envelope)["it"]
    assert step["output"] == "all done", step
    assert step["side_effects"] == "unknown"  # one of them failed
    assert (step["details"]["usage"]["tool_calls"], step["details"]["usage"]["requests"]) == (5, 6)
    told = results(server.requests[-1])
    first, second, greeted = (json.loads(text) for text in told[:3])
    assert (first["result"], second["result"]) == ("first", "second")
    assert 0 < first["remaining_ms"] <= ENOUGH_MS
    # What a model says is neither a template nor a script.
    assert greeted["result"] == "hello {{ env.HOME }} $(id) 'x'\n"
    assert "'who' is a required property" in told[3]
    assert "no such customer" in told[4]


def test_a_tool_that_hangs_is_stopped_and_the_model_is_told(run: Callable[..., Envelope], tmp_path: Path) -> None:
    def model(body: dict[str, Any]) -> Any:
        done = len(results(body))
        return (CallTool("slow"), CallTool("sleep"))[done] if done < 2 else Say("neither answered")

    server_of_tools = mcp("good", extra=", timeout: 700, tools: [slow]")
    with model_server(model) as server:
        began = time.monotonic()
        envelope = run(f"""
            tools:
              sleep: {{exec: sleep 60, timeout: 700}}
            steps:
              it: {ask(server, "tools: [sleep], mcp_servers: {hands: " + server_of_tools + "}", "idle: 3000")}
        """)
    assert time.monotonic() - began < RUN_LIMIT_S / 2
    step = steps(envelope)["it"]
    assert step["output"] == "neither answered", step
    slow, slept = results(server.requests[-1])
    assert "did not answer within 700ms" in slow
    assert "of your time are left" in slow
    assert "timed out after 700ms" in slept or "timed out after 0.7" in slept, slept


def test_a_server_that_dies_in_the_middle_is_told_to_the_model_and_the_step_goes_on(
    run: Callable[..., Envelope],
) -> None:
    def model(body: dict[str, Any]) -> Any:
        return CallTool("echo") if len(results(body)) < 2 else Say("without it")

    with model_server(model) as server:
        envelope = run(f"""
            steps:
              it: {ask(server, "mcp_servers: {hands: " + mcp("dies") + "}")}
        """)
    step = steps(envelope)["it"]
    assert (step["output"], step["side_effects"]) == ("without it", "unknown"), step
    assert all("the MCP server did not answer" in told for told in results(server.requests[-1]))


def test_what_a_tool_may_have_done_that_did_not_end_well_is_unknown(run: Callable[..., Envelope]) -> None:
    def model(name: str) -> Callable[[dict[str, Any]], Any]:
        return lambda body: Say("done") if results(body) else CallTool(name)

    servers = {name: model_server(model(name)) for name in ("well", "failing", "hanging", "slow")}
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context(server) for name, server in servers.items()}
        hands = "mcp_servers: {hands: " + mcp("good", extra=", timeout: 700, tools: [slow]") + "}"
        envelope = run(f"""
            tools:
              well: {{exec: "true"}}
              failing: {{exec: "false"}}
              hanging: {{exec: sleep 60, timeout: 700}}
            steps:
              well: {ask(opened["well"], "tools: [well]")}
              failing: {ask(opened["failing"], "tools: [failing]")}
              hanging: {ask(opened["hanging"], "tools: [hanging]")}
              slow: {ask(opened["slow"], hands)}
        """)
    found = steps(envelope)
    assert {name: step["output"] for name, step in found.items()} == dict.fromkeys(found, "done")
    assert {name: step["side_effects"] for name, step in found.items()} == {
        "well": "complete",
        "failing": "unknown",
        "hanging": "unknown",
        "slow": "unknown",
    }


def test_what_an_earlier_try_of_a_step_did_is_not_forgotten(run: Callable[..., Envelope]) -> None:
    with model_server(CallTool("greet", {"who": "x"}), Status(401), Status(503)) as server:
        retry = "on_fail: {retry: {max: 1, backoff: {delay_ms: 10}}}"
        envelope = run(f"""
            tools: {GREET}
            steps:
              it: {ask(server, "tools: greet, retry: {max: 0}", retry)}
        """)
    step = steps(envelope)["it"]
    assert len(server.requests) == 3
    assert (step["error"]["code"], step["attempts"]) == ("MODEL_UNAVAILABLE", 2)
    assert (step["side_effects"], step["error"]["retryable"]) == ("unknown", False)


def test_an_agent_that_never_stops_is_ended_by_its_limits(run: Callable[..., Envelope]) -> None:
    with (
        model_server(CallTool("greet", {"who": "x"}, says="again ", tokens=10)) as endless,
        model_server(Say("a long answer", tokens=500)) as wordy,
    ):
        envelope = run(f"""
            tools: {GREET}
            steps:
              requests: {ask(endless, "tools: greet, max_iterations: 3")}
              calls: {ask(endless, "tools: greet, limits: {tool_calls: 2}")}
              tokens: {ask(endless, "tools: greet, limits: {total_tokens: 50}")}
              output: {ask(wordy, "limits: {output_tokens: 100}")}
        """)
    found = steps(envelope)
    for name, limit in (
        ("requests", "requests"),
        ("calls", "tool_calls"),
        ("tokens", "total_tokens"),
        ("output", "output_tokens"),
    ):
        error = found[name]["error"]
        assert (error["code"], error["context"]["limit"]) == ("LIMIT_REACHED", limit), found[name]
        assert error["retryable"] is False
        assert found[name]["partial"] is True
        assert found[name]["details"]["usage"]["requests"] >= 1
    assert found["requests"]["output"] == "again again again "
    assert found["requests"]["details"]["usage"]["requests"] == 3
    assert found["output"]["output"] == "a long answer"
    assert found["output"]["side_effects"] == "none"


def test_tokens_that_a_server_does_not_report_are_unknown_and_a_limit_on_them_ends_the_step(
    run: Callable[..., Envelope],
) -> None:
    with (
        model_server(CallTool("greet", {"who": "x"}, says="so far", tokens=0)) as endless,
        model_server(Say("fine", tokens=0)) as silent,
    ):
        envelope = run(f"""
            tools: {GREET}
            steps:
              limited: {ask(endless, "tools: greet, limits: {total_tokens: 10}")}
              free: {ask(silent)}
        """)
    found = steps(envelope)
    limited, free = found["limited"], found["free"]
    assert (limited["error"]["code"], limited["output"]) == ("PRECONDITION", "so far"), limited
    assert "reports no usage" in limited["error"]["message"]
    assert len(endless.requests) == 1
    assert free["output"] == "fine"
    for step in (limited, free):
        usage = step["details"]["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (None, None, None)


def test_a_server_that_cannot_be_used_fails_the_step_before_a_model_is_asked(run: Callable[..., Envelope]) -> None:
    with model_server(Say("never")) as server:
        envelope = run(f"""
            steps:
              missing: {ask(server, "mcp_servers: {x: {command: no-such-program-here}}")}
              dead: {ask(server, "mcp_servers: {x: {command: sh, args: [-c, 'echo broken >&2; exit 3']}}")}
              hangs: {ask(server, "mcp_servers: {x: {command: sleep, args: ['60'], connect_timeout: 600}}")}
        """)
    for name, words in (("missing", "no-such-program-here"), ("dead", "broken"), ("hangs", "took too long")):
        error = steps(envelope)[name]["error"]
        assert error["code"] == "CONNECT_FAILED", error
        assert words in error["message"], error
        assert error["context"]["rule"] == "ai/mcp_server"
    assert server.requests == []


def test_a_server_with_two_tools_of_one_name_is_refused_and_named(
    run: Callable[..., Envelope], capfd: pytest.CaptureFixture[str]
) -> None:
    with model_server(Say("never")) as server:
        envelope = run(f"""
            steps:
              it: {ask(server, "mcp_servers: {hands: " + mcp("lists_twice") + "}")}
        """)
    error = steps(envelope)["it"]["error"]
    assert (error["code"], server.requests) == ("STEP_INVALID", [])
    assert "the MCP server 'hands' has two tools called" in error["message"]
    assert capfd.readouterr().err == ""


def test_a_server_that_takes_all_the_time_of_the_step_is_a_timeout(run: Callable[..., Envelope]) -> None:
    with model_server(Say("never")) as server:
        more = "mcp_servers: {x: {command: sleep, args: ['60']}}"
        envelope = run(f"steps: {{it: {ask(server, more, 'grace: 200', timeout=3000)}}}")
    step = steps(envelope)["it"]
    assert (step["status"], step["error"]["code"]) == ("timed_out", "TIMEOUT"), step
    assert "connecting the MCP server 'x' took too long" in step["error"]["message"]
    assert step["error"]["context"]["clock"]["limit_ms"] == 3000
    assert server.requests == []


class Appears:
    """That a file is there, to be waited for as a threading.Event is."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def wait(self, within_s: float) -> bool:
        return bool(eventually(self._file.exists, within_s))


DEAF = "trap '' TERM; echo $$ > pid; while :; do sleep 1; done"
LOOK = "kill -0 $(cat pid) 2>/dev/null && echo alive || echo gone"


@pytest.mark.parametrize("by", ["its clock", "a signal"])
def test_a_tool_that_runs_when_the_agent_is_stopped_is_gone_with_the_step(
    run: Callable[..., Envelope], tmp_path: Path, by: str
) -> None:
    timeout = 3000 if by == "its clock" else ENOUGH_MS
    with model_server(CallTool("deaf")) as server:
        envelope = run(
            f"""
            tools:
              deaf: {{exec: "{DEAF}", timeout: 60000}}
            steps:
              it: {ask(server, "tools: deaf", "grace: 500, on_fail: {run: after}", timeout=timeout)}
              after: {{exec: "{LOOK}"}}
            """,
            stop_after=None if by == "its clock" else Appears(tmp_path / "pid"),
        )
    found = steps(envelope)
    assert found["it"]["error"]["code"] == ("TIMEOUT" if by == "its clock" else "CANCELLED"), found["it"]
    assert found["it"]["side_effects"] == "unknown"
    assert found["it"]["duration_ms"] < 3_500 + HANDED_ON_S * 1000 + LATE_S * 1000
    assert found["after"]["output"] == "gone"


# --- coming to an end ---------------------------------------------------------------------------------------------


def test_at_the_soft_clock_tools_stop_and_the_model_is_asked_to_answer(run: Callable[..., Envelope]) -> None:
    def model(body: dict[str, Any]) -> Any:
        return Say("what I have") if results(body) else CallTool("sleep", says="let me see ")

    with model_server(model) as server:
        envelope = run(f"""
            tools:
              sleep: {{exec: sleep 60, timeout: 60000}}
            steps:
              it: {ask(server, "tools: sleep, ai_timeout: 2500")}
        """)
    step = steps(envelope)["it"]
    assert step["status"] == "succeeded", step
    assert (step["output"], step["partial"]) == ("what I have", True)
    assert 2_000 < step["duration_ms"] < 2_500 + LATE_S * 1000
    assert [note["code"] for note in step["warnings"]] == ["SOFT_LIMIT"]
    assert step["warnings"][0]["context"]["limit_ms"] == 2_500
    last = server.requests[-1]
    assert "wound down without finishing" in results(last)[0]
    assert last["messages"][-1]["role"] == "user"
    assert "Answer now" in last["messages"][-1]["content"]
    assert last["tool_choice"] == "none"


STOPPING = f"{{command: {sys.executable}, args: [-m, tests.flows.steps.mcp_servers, stops_gracefully]}}"
NESTED = """
steps:
  it:
    exec: "trap 'echo the first half; exit 0' TERM; while :; do sleep 0.1; done"
    timeout: 60
"""


@pytest.mark.parametrize("by", ["soft clock", "observer"])
def test_when_an_agent_winds_down_its_servers_are_asked_to_stop_and_the_model_gets_their_partial_results(
    run: Callable[..., Envelope], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def work(body: dict[str, Any]) -> Any:
        return Say("it is ", results(body)[0]) if results(body) else CallTool("slow")

    block = NEGOTIATED if by == "observer" else "ai_timeout: 2000, graceful_stop_deadline: 20000"
    with model_server(judging({"reason": "it is stuck"}, work)) as server:
        envelope = run(f"""
            steps:
              it: {ask(server, f"{block}, mcp_servers: {{sub: {STOPPING}}}")}
        """)
    step = steps(envelope)["it"]
    assert step["status"] == "succeeded", step
    assert "half of it" in step["output"] and step["partial"] is True
    assert step["details"]["late_results"] == [{"tool": "slow", "output": "half of it"}]


def test_a_nested_run_that_is_an_agents_tool_may_wind_down_and_its_output_is_kept(
    run: Callable[..., Envelope], tmp_path: Path
) -> None:
    """Also where the model does not come to its answer any more."""
    (tmp_path / "nested.yaml").write_text(NESTED)
    nested = f"{sys.executable} -m shotclock run nested.yaml"
    with model_server(lambda body: Hang() if results(body) else CallTool("nested")) as server:
        envelope = run(f"""
            tools:
              nested: {{exec: "{nested}", timeout: 60000}}
            steps:
              it: {ask(server, "tools: nested, ai_timeout: 3000, graceful_stop_deadline: 8000", "grace: 300")}
        """)
    step = steps(envelope)["it"]
    assert step["error"]["context"]["clock"]["kind"] == "soft", step
    assert "the first half" in results(server.requests[-1])[0]
    assert "the first half" in step["output"] and step["partial"] is True


def test_a_tool_that_does_not_stop_leaves_time_for_the_last_answer_and_its_grace_is_inside_the_wind_down(
    run: Callable[..., Envelope],
) -> None:
    """The model takes longer than its half of the wind-down, and the timeout has room."""

    def model(body: dict[str, Any]) -> Any:
        return Say("a", " summary", pause_s=0.8) if results(body) else CallTool("deaf")

    with model_server(model) as server:
        envelope = run(f"""
            tools:
              deaf: {{exec: "trap '' TERM; while :; do sleep 0.1; done", timeout: 60000}}
            steps:
              it: {ask(server, "tools: deaf, ai_timeout: 1500, graceful_stop_deadline: 2000", "grace: 30000")}
        """)
    step = steps(envelope)["it"]
    assert (step["status"], step["output"], step["partial"]) == ("succeeded", "a summary", True), step
    assert step["details"]["late_results"][0]["tool"] == "deaf"
    assert step["duration_ms"] < 1_500 + 3_000 + LATE_S * 1000, "tools have half of it, and not 30 s of grace"


HELPER = """
description: Answers questions.
inputs: {question: {type: string, required: true, description: the question}, depth: {type: integer, default: 1}}
outputs: {answer: "{{ outputs.it }}"}
steps:
  it: {exec: "echo answer to $Q", env: {Q: "{{ inputs.question }}"}}
"""


def test_a_workflow_is_a_tool_of_an_agent_with_its_inputs_as_arguments(
    run: Callable[..., Envelope], tmp_path: Path
) -> None:
    (tmp_path / "helper.yaml").write_text(HELPER)
    calls = [CallTool("helper", {"question": word}) for word in ("one", "{{ two }}")]
    with model_server(*calls, CallTool("helper", {"depth": "deep"}), lambda body: Say(*results(body))) as server:
        envelope = run(f"""
            tools: {{helper: {{workflow: helper.yaml}}}}
            steps:
              it: {ask(server, "tools: helper")}
        """)
    step = steps(envelope)["it"]
    assert step["status"] == "succeeded", step
    first, second, third = results(server.requests[-1])
    assert "answer to one" in first and "answer to {{ two }}" in second
    assert "question: is required" in third and "depth" in third
    told = server.requests[0]["tools"][0]["function"]
    assert (told["name"], told["description"], told["parameters"]["required"]) == (
        "helper",
        "Answers questions.",
        ["question"],
    )
    assert told["parameters"]["properties"]["question"] == {"type": "string", "description": "the question"}


VISOR = """
version: "1.0"
imports: [./workflows/helper.yaml]
ai_model: some-model
checks:
  agent:
    type: ai
    prompt: Use the helper for every question.
    schema: plain
    ai_provider: openai
    ai_mcp_servers: {}
    ai: {timeout: 60000, ai_timeout: 30000, timeout_behavior: negotiated, graceful_stop_deadline: 5000}
    ai_custom_tools:
      - workflow: aid
"""
VISOR_HELPER = """
id: aid
name: Aid
description: Answers briefly
inputs:
  - name: question
    required: true
    description: The question to answer
    schema: {type: string}
outputs:
  - name: answer
    value: "{{ outputs.answer }}"
steps:
  answer:
    type: ai
    prompt: "Answer briefly: {{ inputs.question }}"
    schema: text
"""


def test_a_file_of_visor_with_an_imported_helper_runs_as_it_is(
    run: Callable[..., Envelope], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "helper.yaml").write_text(VISOR_HELPER)

    def model(body: dict[str, Any]) -> Any:
        if "Answer briefly" in str(body["messages"][0]["content"]):
            return Say("it is four")
        return Say("all: ", results(body)[0]) if results(body) else CallTool("aid", {"question": "2+2?"})

    with model_server(model) as server:
        for name, text in {**server.openai, "SHOTCLOCK_AI_MODEL": "gpt-x"}.items():
            monkeypatch.setenv(name, text)
        envelope = run(VISOR, dict(os.environ))
    step = steps(envelope)["agent"]
    assert step["status"] == "succeeded" and "it is four" in step["output"], step
    assert [body["model"] for body in server.requests] == ["some-model", "gpt-x", "some-model"]


def test_a_model_that_is_writing_at_the_soft_clock_is_cut_and_asked_for_a_summary_of_it(
    run: Callable[..., Envelope],
) -> None:
    def model(body: dict[str, Any]) -> Any:
        is_told = "Answer now" in str(body["messages"][-1]["content"])
        return Say("in short: yes") if is_told else Say(*(f"word{n} " for n in range(400)), pause_s=0.1)

    with model_server(model) as server:
        envelope = run(f"""
            steps:
              it: {ask(server, "ai_timeout: 2000")}
        """)
    step = steps(envelope)["it"]
    assert (step["status"], step["output"], step.get("partial")) == ("succeeded", "in short: yes", True), step
    asked, said, told = server.requests[-1]["messages"]
    assert (asked["role"], said["role"], told["role"]) == ("user", "assistant", "user")
    assert said["content"].startswith("word0 word1 ")


def test_the_text_of_a_model_that_was_cut_is_kept_where_the_summary_does_not_come(run: Callable[..., Envelope]) -> None:
    with model_server(Say("so ", "far", then="hang"), Say(" and", then="hang")) as server:
        envelope = run(f"""
            steps:
              it: {ask(server, "ai_timeout: 2000, graceful_stop_deadline: 2000", "grace: 300")}
        """)
    step = steps(envelope)["it"]
    assert (step["output"], step["partial"]) == ("so far and", True), step
    assert step["error"]["context"]["clock"]["kind"] == "soft"


def test_the_soft_clock_of_an_agent_starts_when_its_model_is_first_asked(
    run: Callable[..., Envelope], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its servers take to start, and no observer is asked before."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    slow = f"{{command: {sys.executable}, args: [-m, tests.flows.steps.mcp_servers, starts_slowly, '3']}}"
    with model_server(judging({"reason": "it has not begun"}, lambda _: Say("done"))) as server:
        envelope = run(f"""
            steps:
              told: {ask(server, f"ai_timeout: 2000, mcp_servers: {{slow: {slow}}}")}
              asked: {ask(server, f"{NEGOTIATED}, mcp_servers: {{slow: {slow}}}")}
        """)
    for name in ("told", "asked"):
        step = steps(envelope)[name]
        assert (step["status"], step["output"]) == ("succeeded", "done"), step
        assert "partial" not in step and not step.get("warnings") and not step.get("overtime"), step


def test_the_start_of_servers_and_of_the_models_process_is_in_the_answer_and_named_where_it_took_the_time(
    run: Callable[..., Envelope], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    slow = f"{{command: {sys.executable}, args: [-m, tests.flows.steps.mcp_servers, starts_slowly, '2']}}"
    with model_server(Say("done")) as server:
        envelope = run(f"""
            steps:
              answers: {ask(server, f"mcp_servers: {{slow: {slow}}}")}
              has_no_time: {ask(server, f"mcp_servers: {{slow: {slow}}}", "grace: 300", timeout=1500)}
        """)
    found = steps(envelope)
    assert found["answers"]["output"] == "done" and 2_000 <= found["answers"]["details"]["startup_ms"], found["answers"]
    error = found["has_no_time"]["error"]
    assert error["code"] == "TIMEOUT" and "starting its servers and the model's process took 1." in error["message"]
    assert found["has_no_time"]["details"]["startup_ms"] >= 1_400, found["has_no_time"]


def test_a_run_that_is_stopped_keeps_the_text_and_leaves_nothing(run: Callable[..., Envelope], tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with model_server(Say("so far", then="hang")) as server:
        envelope = run(
            f"""
            steps:
              it: {ask(server, "mcp_servers: {x: " + mcp("daemon", str(marks)) + "}", "grace: 200")}
            """,
            stop_after=server.hangs,
        )
    step = steps(envelope)["it"]
    assert step["status"] == "cancelled", step
    assert (step["output"], step["partial"]) == ("so far", True)
    assert list(marks.iterdir()), "it was never started"
    assert not marked(marks)


def test_a_run_that_is_killed_takes_agents_and_servers_with_it(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with model_server(Say("so far", then="hang")) as server:
        (tmp_path / "flow.yaml").write_text(
            f"steps: {{it: {ask(server, 'mcp_servers: {x: ' + mcp('daemon', str(marks)) + '}')}}}"
        )
        environment = {**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "shotclock", "run", str(tmp_path / "flow.yaml")]
        with open(tmp_path / "output", "wb") as output:
            running = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            assert server.hangs.wait(RUN_LIMIT_S), (tmp_path / "output").read_text()
            assert marked(marks)
        finally:
            running.kill()
            running.wait(10)
        eventually(lambda: not marked(marks))  # and the fixture looks for all the rest


# --- keys ---------------------------------------------------------------------------------------------------------


def test_a_key_goes_to_the_model_and_nowhere_else(
    run: Callable[..., Envelope], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(body: dict[str, Any]) -> Any:
        done = len(results(body))
        calls = (CallTool("environment"), CallTool("show"))
        return calls[done] if done < 2 else Say(f"your key is {KEY}")

    with model_server(model) as server:
        envelope = run(f"""
            tools:
              show: {{exec: env}}
            steps:
              it: {ask(server, "tools: show, mcp_servers: {x: " + mcp("good") + "}")}
              other: {{exec: env, depends_on: it}}
        """)
    step = steps(envelope)["it"]
    assert step["output"] == "your key is ***", step
    assert server.keys[0] == f"Bearer {KEY}"
    assert "PATH" in results(server.requests[-1])[0]
    assert KEY not in json.dumps(server.requests)
    assert KEY not in json.dumps(steps(envelope)["other"])
    stored = [file for file in (tmp_path / "home").rglob("*") if file.is_file()]
    assert stored
    assert not any(KEY.encode() in file.read_bytes() for file in stored)


def test_secrets_of_servers_are_not_in_what_is_written_down() -> None:
    loaded = load_text(b"""
        steps:
          it:
            type: ai
            prompt: hello
            ai:
              mcp_servers:
                started: {command: x, env: {API_TOKEN: literal-one, PLAIN: plain}}
                reached: {url: "http://x/mcp", headers: {Authorization: literal-two}}
    """)
    assert loaded.workflow is not None, loaded.findings
    kept = json.dumps(record_workflow(loaded.workflow, {}))
    assert "literal" not in kept
    assert "plain" in kept


# --- what is refused before anything runs -------------------------------------------------------------------------


def findings(text: str, folder: Path | None = None) -> list[Finding]:
    loaded = load_text(textwrap.dedent(text).encode(), "flow.yaml", folder)
    return list(loaded.findings) if loaded.workflow is None else lint(loaded)


def test_a_step_without_a_key_is_refused_and_the_variable_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = findings("steps: {a: {type: ai, prompt: hi, ai: {provider: anthropic}}}")
    assert (found.rule, found.is_error) == ("ai/key", True)
    assert "ANTHROPIC_API_KEY" in found.message
    (none,) = findings("steps: {a: {type: ai, prompt: hi}}")
    assert "ANTHROPIC_API_KEY, OPENAI_API_KEY, GOOGLE_API_KEY" in none.message
    monkeypatch.setenv("GEMINI_API_KEY", "x")
    assert findings("steps: {a: {type: ai, prompt: hi}}") == []
    assert (
        findings("steps: {a: {type: ai, prompt: hi, env: {OPENAI_API_KEY: '${X:-y}'}, ai: {provider: openai}}}") == []
    )


def test_a_step_without_the_extra_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setitem(sys.modules, "pydantic_ai", None)
    (found,) = findings("steps: {a: {type: ai, prompt: hi}}")
    assert (found.rule, found.suggestion) == ("ai/extra", "pip install 'shotclock[ai]'")


WRONG = [
    ("prompt: a, prompt_file: b", "schema/value", "either `prompt`, or `prompt_file`"),
    ("ai: {}", "schema/value", "either `prompt`, or `prompt_file`"),
    ("prompt_file: none.md", "ai/prompt-file", "there is no file"),
    ("prompt: a, ai: {base_url: 'localhost:11434'}", "ai/base-url", "begin it with http:// or https://"),
    ("prompt: a, ai: {provider: mistral}", "schema/value", "is not one of"),
    ("prompt: a, ai: {tools: [none]}", "tool/unknown", "there is no tool 'none'"),
    ("prompt: a, ai: {mcp_servers: {x: {}}}", "schema/value", "either `command` to start it"),
    ("prompt: a, ai: {modell: x}", "schema/unknown-key", "modell"),
    ("prompt: a, ai: {limits: {reqests: 1}}", "schema/unknown-key", "reqests"),
    ("prompt: a, ai: {limits: {cost: 0}}", "schema/value", "above 0"),
    ("prompt: a, ai: {limits: {cost: 1}, model: gpt-of-my-own}", "ai/price", "no price of gpt-of-my-own"),
    ("prompt: a, ai: {timeout: -1}", "schema/value", "negative"),
    ("prompt: '{{ outputs.none }}'", "template/unknown-step", "none"),
    ("prompt: a, ai: {system_prompt: '{{ nobody }}'}", "template/unknown-name", "nobody"),
    ("prompt: a, if: deadline.remaining > 5", "template/unknown-name", "deadline"),
    ("prompt_file: bad.md", "template/unknown-name", "nobody"),
]


def test_what_is_wrong_is_said_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    (tmp_path / "bad.md").write_text("look at {{ nobody }}")
    for step, rule, words in WRONG:
        with row(step):
            found = findings(f"steps: {{a: {{type: ai, {step}}}}}", tmp_path)
            assert [each.rule for each in found if each.is_error] == [rule], found
            assert words in found[0].message + (found[0].suggestion or "")


def test_a_prompt_file_that_is_too_large_is_refused_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "big.md").write_bytes(b"x" * (PROMPT_LIMIT + 1))
    flow = "steps: {a: {type: ai, prompt_file: big.md, ai: {base_url: 'http://localhost/v1'}}}"
    (found,) = findings(flow, tmp_path)
    assert "is larger than" in found.message
    assert found.suggestion is None


def test_check_warns_of_a_missing_key_and_run_refuses_it_before_anything_runs(
    shotclock: Callable[..., Any], tmp_path: Path
) -> None:
    flow = tmp_path / "flow.yaml"
    flow.write_text("steps: {a: {exec: touch ran}, b: {type: ai, prompt: hi, ai: {provider: openai}}}")
    env = {"SHOTCLOCK_HOME": str(tmp_path / "home")}
    checked = shotclock("check", flow, cwd=tmp_path, env=env)
    (finding,) = checked.json()["data"]["findings"]
    assert (checked.code, finding["severity"], finding["rule"]) == (0, "warning", "ai/key")
    ran = shotclock("run", flow, cwd=tmp_path, env=env)
    assert ran.code == 2, ran
    assert "OPENAI_API_KEY is not set" in ran.json()["error"]["errors"][0]["message"]
    assert not (tmp_path / "ran").exists()


def test_the_process_that_runs_the_workflow_imports_nothing_of_models(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from pathlib import Path
from shotclock.store.store import Store
from shotclock.flows.run.runs import RunRequest, start
from shotclock.flows.check.lint import lint
from shotclock.flows.file.loader import load_file

loaded = load_file(Path("flow.yaml"))
assert lint(loaded) == [], lint(loaded)
request = RunRequest(loaded.workflow, "flow.yaml", Path.cwd())
envelope = asyncio.run(start(request, Store.open(Path("home"))))
print(envelope.data["steps"]["it"]["output"])
print(*sorted(name for name in ("pydantic_ai", "openai", "anthropic", "mcp") if name in sys.modules))
"""
    with model_server(Say("hello")) as server:
        (tmp_path / "flow.yaml").write_text(f"steps: {{it: {ask(server)}}}")
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=RUN_LIMIT_S
        )
    assert done.stdout == "hello\n\n", done


# --- settings -----------------------------------------------------------------------------------------------------


def test_the_model_is_what_the_file_the_environment_or_the_key_says() -> None:
    openai, google = {"OPENAI_API_KEY": "k"}, {"OPENAI_API_KEY": "k", "GEMINI_API_KEY": "g"}
    for (provider, model, base_url), environment, chosen in [
        ((None, None, None), {"ANTHROPIC_API_KEY": "k"}, ("anthropic", "claude-sonnet-5", None, "k")),
        ((None, None, None), google, ("openai", "gpt-5.5", None, "k")),
        ((None, "gemini-x", None), google, ("google", "gemini-x", None, "g")),
        ((None, "claude-3-opus", None), {"ANTHROPIC_API_KEY": "k"}, ("anthropic", "claude-3-opus", None, "k")),
        ((None, "any", "http://x/v1"), {}, ("openai", "any", "http://x/v1", "")),
        (("openai", None, None), {"OPENAI_BASE_URL": "http://u", MODEL: "m"}, ("openai", "m", "http://u", "")),
        ((None, None, None), {**openai, MODEL: "gpt-z"}, ("openai", "gpt-z", None, "k")),
        (("google", None, None), {"GOOGLE_API_KEY": "k", MODEL: "gpt-z"}, ("google", "gemini-3.5-flash", None, "k")),
    ]:
        with row(provider, model, base_url, environment):
            asked = AiModel(provider=provider, model=model, base_url=base_url)
            assert choose_model(asked, environment) == ChosenModel(*chosen)


def test_without_a_key_no_model_is_chosen() -> None:
    with pytest.raises(Failure, match="ANTHROPIC_API_KEY"):
        choose_model(AiModel(provider="anthropic"), {"OPENAI_API_KEY": "k"})


KEYS = {"OPENAI_API_KEY": "of-openai", "MY_API_KEY": "of-mine", "ANTHROPIC_API_KEY": "of-anthropic"}


def test_the_key_of_a_provider_goes_to_its_own_hosts_and_to_this_machine_only() -> None:
    for url in (
        "https://api.openai.com/v1",
        "https://eu.api.openai.com/v1",
        "https://API.OpenAI.com.:443/v1",
        "http://localhost:11434/v1",
        "http://models.localhost/v1",
        "http://127.0.0.1:1234/v1",
        "http://[::1]:1234/v1",
    ):
        assert choose_model(AiModel(base_url=url, model="m"), KEYS).key == "of-openai", url
    for url in (
        "http://api.openai.com/v1",  # anybody on the way reads it
        "https://api.openai.com.example.org/v1",
        "https://example.org/api.openai.com",
        "https://notapi.openai.com/v1",
        "https://api.openai.com@example.org/v1",
        "https://example.org\\@api.openai.com/v1",
        "https://example.org/v1#@localhost",
        "http://localhost.example.org/v1",
        "http://192.168.1.5:8000/v1",
        "https://[api.openai.com/v1",
    ):
        assert choose_model(AiModel(base_url=url, model="m"), KEYS).key == "", url


def test_the_key_of_another_server_is_in_the_variable_that_the_file_names() -> None:
    elsewhere = "https://models.example.org/v1"
    named = AiModel(base_url=elsewhere, model="m", api_key_env="MY_API_KEY")
    assert choose_model(named, KEYS).key == "of-mine"
    assert choose_model(AiModel(provider="openai", api_key_env="MY_API_KEY"), KEYS).key == "of-mine"
    for name, words in (("OPENAI_API_KEY", "is not sent to models.example.org"), ("NO_API_KEY", "is not set")):
        with pytest.raises(Failure, match=words):
            choose_model(AiModel(base_url=elsewhere, model="m", api_key_env=name), KEYS)
    with pytest.raises(Failure, match=r"models\.example\.org is not a host of anthropic"):
        choose_model(AiModel(provider="anthropic", base_url=elsewhere), KEYS)


def test_what_the_environment_names_as_the_server_is_sent_the_key_but_not_what_a_file_puts_there() -> None:
    elsewhere = {"OPENAI_BASE_URL": "https://models.example.org/v1"}
    asked = AiModel(provider="openai", model="m")
    assert choose_model(asked, {**KEYS, **elsewhere}).key == "of-openai"
    assert choose_model(asked, KEYS, elsewhere) == ChosenModel("openai", "m", elsewhere["OPENAI_BASE_URL"], "")


def test_check_says_which_key_is_not_sent_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = "steps: {a: {type: ai, prompt: hi, ai: {base_url: 'https://models.example.org/v1', model: m%s}}}"
    assert findings(flow % "") == [], "a server of one's own may need none"
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    (found,) = findings(flow % "")
    assert (found.rule, found.is_error) == ("ai/key-not-sent", False)
    assert "OPENAI_API_KEY is not sent to models.example.org" in found.message
    assert "`api_key_env`" in str(found.suggestion)
    (refused,) = findings(flow % ", api_key_env: OPENAI_API_KEY")
    assert (refused.rule, refused.is_error) == ("ai/key", True)
    (unset,) = findings(flow % ", api_key_env: MY_API_KEY")
    assert "MY_API_KEY is not set" in unset.message
    (shown,) = findings(flow % ", api_key_env: MY_SERVER")
    assert "marks its value as a secret" in shown.message


def test_the_default_timeout_follows_the_model_and_is_never_more_than_half_an_hour() -> None:
    models = [
        "claude-haiku-5-5",
        "claude-sonnet-5",
        "claude-3-opus",
        "gpt-5-mini",
        "o3",
        "gemini-2.5-pro",
        "mine",
        None,
    ]
    minutes = [default_timeout_ms(model) // 60_000 for model in models]
    assert minutes == [5, 15, 30, 5, 30, 30, 10, 10]
    loaded = load_text(
        b"steps: {a: {type: ai, prompt: x, ai: {model: claude-3-opus}}, b: {type: ai, prompt: x, timeout: 5000}}"
    )
    assert loaded.workflow is not None
    assert [step.timeout_ms for step in plan_of(loaded.workflow).steps] == [30 * 60_000, 5000]


def test_what_a_block_says_of_overtime_is_read_in_milliseconds() -> None:
    assert read_overtime(AiPart()) is None
    block = AiPart.model_validate(
        {
            "timeout_behavior": "negotiated",
            "negotiated_timeout_budget": 120_000,
            "negotiated_timeout_max_requests": 5,
            "negotiated_timeout_max_per_request": "1m",
            "graceful_stop_deadline": 5000,
        }
    )
    keys = read_overtime(block)
    assert keys is not None
    assert (keys["observer"], keys["budget"], keys["max_requests"], keys["max_per_request"]) == (
        "model",
        "120000ms",
        5,
        "60000ms",
    )


def test_negotiated_time_without_a_budget_is_as_much_as_the_timeout() -> None:
    loaded = load_text(b"steps: {it: {type: ai, prompt: a, ai: {timeout: 90000, timeout_behavior: negotiated}}}")
    assert loaded.workflow is not None, loaded.findings
    policy = overtime_of(loaded.workflow, loaded.workflow.steps["it"])
    assert policy is not None and policy.budget_ms == 90_000


def test_of_a_long_text_the_beginning_and_the_end_are_kept() -> None:
    listener = AgentListener(SimpleNamespace(shown=SimpleNamespace(write=len)), lambda: None)  # type: ignore[arg-type]
    for text in ("start ", *["x" * 100_000] * 40, " end"):
        listener.wrote(text)
    assert listener.text.startswith("start x") and listener.text.endswith("x end")
    assert "characters left out" in listener.text
    assert len(listener.text) < TEXT_LIMIT + 100
    assert listener.size == 10 + 40 * 100_000


# --- overtime that a model decides about -------------------------------------------------------------------

NEGOTIATED = (
    "ai_timeout: 2000, timeout_behavior: negotiated, negotiated_timeout_budget: 30000, "
    "negotiated_timeout_max_requests: 3, negotiated_timeout_max_per_request: 10000, graceful_stop_deadline: 3000"
)


def judging(decision: dict[str, Any], work: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """A model that is asked twice over: it works, and where it is asked as an observer it decides."""

    def answer(request: dict[str, Any]) -> Any:
        if "You watch a long piece of work" in json.dumps(request):
            return CallTool(None, decision)
        return work(request)

    return answer


def test_a_model_grants_an_agent_more_time_and_it_comes_to_its_end(run: Callable[..., Envelope]) -> None:
    model = judging(
        {"extend_ms": 20_000, "reason": "it writes"},
        lambda _: Say("a ", "long ", "answer ", "indeed", pause_s=1.0),
    )
    with model_server(model) as server:
        envelope = run(f"""
            steps:
              it: {ask(server, NEGOTIATED)}
        """)
    step = steps(envelope)["it"]
    assert step["status"] == "succeeded", step
    assert step["output"] == "a long answer indeed" and not step.get("partial")
    (request,) = step["overtime"]
    assert (request["verdict"], request["granted_ms"], request["reason"]) == ("granted", 10_000, "it writes")


def test_a_model_that_observes_is_warm_before_it_is_asked(tmp_path: Path) -> None:
    observer = "overtime: {observer: model, model: gpt-x, budget: 5s}"
    (tmp_path / "flow.yaml").write_text(f"steps: {{it: {{exec: sleep 60, soft: 50s, {observer}}}}}")
    environment = {**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home"), "OPENAI_API_KEY": KEY}
    words = [sys.executable, "-m", "shotclock", "run", "flow.yaml"]

    def is_loaded() -> bool:
        """Return whether a process of the run has loaded what agents need."""
        for child in psutil.Process(running.pid).children(recursive=True):
            with contextlib.suppress(OSError):
                if "pydantic_core" in Path(f"/proc/{child.pid}/maps").read_text():
                    return True
        return False

    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        try:
            assert eventually(is_loaded, 30.0)
        finally:
            running.terminate()
            running.communicate(timeout=30)


def test_a_model_that_declines_or_leaves_out_how_much_or_gives_no_decision_has_the_agent_wind_down(
    run: Callable[..., Envelope],
) -> None:
    def wonder(request: dict[str, Any]) -> Any:
        return Say("I wonder") if "You watch a long piece of work" in json.dumps(request) else Hang()

    declines = judging({"decline": True, "reason": "it repeats itself"}, lambda _: Hang())
    leaves_out = judging({"reason": "hm"}, lambda _: Hang())
    with model_server(declines) as one, model_server(leaves_out) as other, model_server(wonder) as none:
        envelope = run(f"""
            steps:
              declines: {ask(one, NEGOTIATED)}
              leaves_out: {ask(other, NEGOTIATED)}
              wonders: {ask(none, NEGOTIATED)}
        """)
    for name, verdict, reason in (
        ("declines", "declined", "it repeats itself"),
        ("leaves_out", "declined", "hm"),
        ("wonders", "failed", "the observer gave no decision in 2 answers"),
    ):
        step = steps(envelope)[name]
        assert step["status"] == "timed_out" and step["error"]["context"]["clock"]["kind"] == "soft", json.dumps(step)
        assert step["duration_ms"] < 60_000
        request, *_ = step["overtime"]
        assert (request["verdict"], request["granted_ms"], request["reason"]) == (verdict, 0, reason)
    assert steps(envelope)["wonders"]["overtime"][-1]["by"] == "soft clock"
