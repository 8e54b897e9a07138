"""The agent loop by itself, in this process, with models that are functions: what it says, asks and does again."""

import asyncio
import contextlib
import gzip
import json
import re
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, ToolReturnPart, UserPromptPart
from pydantic_ai.models import Model
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel

from shotclock.core.errors import Failure
from shotclock.core.limits import Deadline
from shotclock.core.trace import TraceContext
from shotclock.flows.steps._ai_agent import MEMORY_LIMIT, MOST_TOOLS_AT_ONCE, AgentRun, run_agent
from shotclock.flows.steps._ai_client import build_model
from shotclock.flows.steps.ai_models import find_schema_flaw
from shotclock.supervise.clock import monotonic_ns
from shotclock.worker.context import Context
from tests.flows.steps.model_servers import Action, CallTool, Flood, ModelServer, Say, Status, model_server
from tests.rows import row

pytestmark = pytest.mark.slow

LIMIT_S = 30.0
RETRY = {"max": 2, "backoff": {"mode": "fixed", "delay_ms": 1, "max_delay_ms": None, "jitter": False}}
TASK: dict[str, Any] = {"prompt": "what?", "system_prompt": None, "tools": [], "limits": {}, "retry": RETRY}
LOOK = {"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {}}}
Answer = Callable[[list[ModelMessage], AgentInfo], AsyncIterator[Any]]


class Caller:
    """What the process that runs the workflow is to an agent."""

    def __init__(
        self,
        *,
        stopping: bool = False,
        answer: dict[str, Any] | None = None,
        time_ms: int = 20_000,
        stops_in_ms: int | None = None,
    ) -> None:
        self.stopping, self.time_ms, self.stops_in_ms = stopping, time_ms, stops_in_ms
        self.text = ""
        self.asked: list[tuple[str, Any]] = []
        self.answer = answer or {"ok": True, "output": "seen", "remaining_ms": 1234}

    async def _answer(self, question: str, value: Any) -> Any:
        self.asked.append((question, value))
        return self.answer if question == "tool" else {"stops_in_ms": self.stops_in_ms}

    @property
    def calls(self) -> list[Any]:
        return [value for question, value in self.asked if question == "tool"]

    def write(self, text: str) -> None:
        self.text += text

    def context(self) -> Context:
        class Span:
            trace = TraceContext("f" * 32)

        link: Any = SimpleNamespace(is_stopping=lambda: self.stopping, ask=self._answer, write=self.write)
        return Context("it", "1", Deadline.after_ms(monotonic_ns(), self.time_ms), 0, Span(), link)

    def run(self, *models: Answer | Model, **task: Any) -> dict[str, Any]:
        asked = [model if isinstance(model, Model) else FunctionModel(stream_function=model) for model in models]
        is_real = any(isinstance(model, Model) for model in models)
        agent = AgentRun(self.context(), {**TASK, **task}, asked, tells_end=is_real)
        return asyncio.run(asyncio.wait_for(agent.answer(), LIMIT_S))


def returned(messages: list[ModelMessage]) -> list[ToolReturnPart]:
    parts = [part for message in messages if isinstance(message, ModelRequest) for part in message.parts]
    return [part for part in parts if isinstance(part, ToolReturnPart)]


def prompts(messages: list[ModelMessage]) -> list[str]:
    parts = [part for message in messages if isinstance(message, ModelRequest) for part in message.parts]
    return [str(part.content) for part in parts if isinstance(part, UserPromptPart)]


async def say_it(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
    yield "one "
    yield "two"


async def look_first(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
    if returned(messages):
        yield f"it said {returned(messages)[-1].content}"
    else:
        yield {0: DeltaToolCall("look", "{}")}


def test_text_is_handed_on_as_it_comes_and_is_the_answer() -> None:
    caller = Caller()
    answer = caller.run(say_it)
    assert (answer["output"], answer["partial"], caller.text) == ("one two", False, "one two")
    assert answer["usage"]["requests"] == 1


def test_a_tool_is_asked_for_and_its_result_comes_with_the_time_that_is_left() -> None:
    caller = Caller()
    answer = caller.run(look_first, tools=[LOOK])
    assert caller.calls == [{"name": "look", "arguments": {}}]
    assert answer["output"] == "it said {'result': 'seen', 'remaining_ms': 1234}"


def test_a_tool_that_failed_is_told_to_the_model() -> None:
    caller = Caller(answer={"ok": False, "error": "no such thing", "remaining_ms": 1500})
    assert "no such thing\n(1.5s of your time are left)" in caller.run(look_first, tools=[LOOK])["output"]


def test_a_request_that_fails_after_a_tool_has_run_is_sent_again_without_running_it_again() -> None:
    failed = 0

    async def fail_twice(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        nonlocal failed
        if not returned(messages):
            yield {0: DeltaToolCall("look", "{}")}
            return
        if failed < 2:
            failed += 1
            if failed == 2:
                yield "half of an ans"
            raise ModelHTTPError(503, "m", "busy")
        yield "done"

    caller = Caller()
    answer = caller.run(fail_twice, tools=[LOOK])
    assert (answer["output"], answer["retries"], failed) == ("done", 2, 2)
    assert len(caller.calls) == 1
    assert [value.get("again") for question, value in caller.asked if question == "request"].count(True) == 2


def test_the_next_model_goes_on_with_what_the_first_has_learned() -> None:
    async def give_up(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        if returned(messages):
            raise ModelHTTPError(401, "m", "no")
        yield {0: DeltaToolCall("look", "{}")}

    caller = Caller()
    answer = caller.run(give_up, look_first, tools=[LOOK])
    assert answer["output"].startswith("it said")
    assert len(caller.calls) == 1


@pytest.mark.parametrize(
    ("said", "time_ms", "task"),
    [
        ("", 20_000, {"idle_ms": 200}),
        ("some wor", 20_000, {"idle_ms": 200}),
        ("", 600, {}),
        ("", 600, {"idle_ms": 900}),
    ],
)
def test_a_model_that_is_silent_is_given_up_for_the_next_one(said: str, time_ms: int, task: dict[str, Any]) -> None:
    """Once its idle clock rings, or where its share of the time is over. It is not asked again."""
    asked = 0

    async def hang(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        nonlocal asked
        asked += 1
        yield said
        await asyncio.sleep(LIMIT_S)

    caller = Caller(time_ms=time_ms)
    answer = caller.run(hang, say_it, **task)
    assert (answer["output"], asked, answer["usage"]["requests"]) == ("one two", 1, 2)
    (failed,) = answer["failed_models"]
    assert failed["code"] == "MODEL_UNAVAILABLE"
    assert "it was silent for" in failed["message"]
    assert {"again": True, "retries": 0} in [value for _, value in caller.asked], "what it said is void"


def test_a_model_that_goes_on_writing_is_not_silent() -> None:
    async def drip(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        for _ in range(10):
            await asyncio.sleep(0.2)
            yield "x"

    assert Caller().run(drip, say_it, idle_ms=1500)["output"] == "x" * 10


def test_the_last_model_is_left_to_the_clocks_of_its_caller() -> None:
    async def hang(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        await asyncio.sleep(1.0)
        yield "late"

    assert Caller().run(hang, idle_ms=200)["output"] == "late"
    assert Caller().run(hang, hang, idle_ms=200)["output"] == "late"


def test_a_model_that_winds_down_is_told_the_time_until_it_is_stopped() -> None:
    seen: list[str] = []

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        seen.extend(prompts(messages))
        yield "in short"

    Caller(stopping=True, stops_in_ms=3_000).run(answer)
    left = re.search(r"nearly up: ([\d.]+)s is left", seen[-1])
    assert left is not None and float(left[1]) <= 3.0, seen


def test_the_last_failure_is_the_answer_with_what_was_used() -> None:
    async def refuse(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        raise ModelHTTPError(429, "m", "slow down", headers={"Retry-After": "3600"})
        yield ""

    with pytest.raises(Failure) as raised:
        Caller().run(refuse)
    assert raised.value.code == "MODEL_RATE_LIMITED"
    assert raised.value.retry_after_ms == 3_600_000
    assert isinstance(raised.value.data, dict)
    assert raised.value.data["usage"]["requests"] == 1


def test_an_agent_that_is_told_to_stop_calls_no_tool_and_its_answer_is_partial() -> None:
    seen: list[list[str]] = []

    async def insist(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        seen.append(prompts(messages))
        if returned(messages):
            yield f"told: {returned(messages)[-1].content}"
        else:
            yield {0: DeltaToolCall("look", "{}")}

    caller = Caller(stopping=True)
    answer = caller.run(insist, tools=[LOOK])
    assert caller.calls == []
    assert answer["partial"] is True
    assert "not run: time is nearly up" in answer["output"]
    assert "Answer now" in seen[0][-1]
    assert sum("Answer now" in text for text in seen[-1]) == 1


# --- what a model may not do ----------------------------------------------------------------------------------


async def look_forever(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
    yield {0: DeltaToolCall("look", "{}")}


def test_calls_of_tools_that_fail_count_against_their_limit() -> None:
    caller = Caller(answer={"ok": False, "error": "no such thing", "remaining_ms": 1500})
    with pytest.raises(Failure) as raised:
        caller.run(look_forever, tools=[LOOK], limits={"tool_calls": 2, "requests": 20})
    assert (raised.value.code, raised.value.context["limit"]) == ("LIMIT_REACHED", "tool_calls")
    assert len(caller.calls) == 2
    assert isinstance(raised.value.data, dict)
    assert raised.value.data["usage"]["tool_calls"] == 2


def test_of_an_answer_with_more_calls_than_are_allowed_none_runs() -> None:
    async def ask_for_three(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        yield {number: DeltaToolCall("look", "{}", tool_call_id=f"call{number}") for number in range(3)}

    caller = Caller()
    with pytest.raises(Failure) as raised:
        caller.run(ask_for_three, tools=[LOOK], limits={"tool_calls": 2})
    assert raised.value.code == "LIMIT_REACHED"
    assert caller.calls == []


@pytest.mark.parametrize("arguments", ['{"another": 1}', "[" * 200_000])
def test_an_answer_that_never_is_what_was_asked_for_is_the_output_after_two_corrections(arguments: str) -> None:
    """Its value, or its text where readers do not take that."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        yield {0: DeltaToolCall(info.output_tools[0].name, arguments)}

    answered = Caller().run(answer, output_schema={"type": "array"})
    assert answered["output"] == ({"another": 1} if "another" in arguments else arguments)
    assert answered["usage"]["requests"] == 3


def test_of_an_answer_that_is_corrected_the_caller_keeps_the_last_text() -> None:
    async def answer(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        yield "in words"

    caller = Caller()
    assert caller.run(answer, output_schema={"type": "array"})["output"] == "in words"
    assert [told["again"] for question, told in caller.asked if question == "request"] == [False, True, True]


def test_a_model_may_correct_an_answer_that_does_not_fit_its_schema() -> None:
    """What never fits is taken in the end: who asked says what is wrong with it."""
    told: list[str] = []

    def answer(*counts: str) -> Answer:
        async def count(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
            answered = sum(isinstance(message, ModelResponse) for message in messages)
            told.append(str(messages[-1]))
            given = counts[min(answered, len(counts) - 1)]
            yield {0: DeltaToolCall(info.output_tools[0].name, f'{{"count": {given}}}')}

        return count

    schema = {"type": "object", "properties": {"count": {"type": "integer"}}}
    assert Caller().run(answer('"three"', "3"), output_schema=schema)["output"] == {"count": 3}
    assert "$.count: 'three' is not of type 'integer'" in told[1]
    never = Caller().run(answer('"three"'), output_schema=schema)
    assert (never["output"], never["usage"]["requests"]) == ({"count": "three"}, 3)
    assert Caller(stopping=True).run(answer('"three"'), output_schema=schema)["usage"]["requests"] == 1


def test_of_many_calls_in_one_answer_only_some_run_at_a_time() -> None:
    running = most = 0

    class Busy(Caller):
        async def _answer(self, question: str, value: Any) -> Any:
            nonlocal running, most
            if question == "tool":
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.01)
                running -= 1
            return await super()._answer(question, value)

    async def ask_for_many(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        if returned(messages):
            yield "done"
        else:
            yield {number: DeltaToolCall("look", "{}", tool_call_id=f"call{number}") for number in range(50)}

    caller = Busy()
    answer = caller.run(ask_for_many, tools=[LOOK])
    assert (most, len(caller.calls), answer["usage"]["tool_calls"]) == (MOST_TOOLS_AT_ONCE, 50, 50)


def test_requests_that_fail_count_against_their_limit() -> None:
    sent = 0

    async def fail(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        nonlocal sent
        sent += 1
        raise ModelHTTPError(503, "m", "busy")
        yield ""

    with pytest.raises(Failure) as raised:
        Caller().run(fail, fail, limits={"requests": 2}, retry={**RETRY, "max": 9})
    assert (raised.value.code, sent) == ("MODEL_UNAVAILABLE", 2)
    assert isinstance(raised.value.data, dict)
    assert raised.value.data["usage"]["requests"] == 2


def test_the_caller_knows_of_a_request_before_it_is_answered() -> None:
    caller = Caller()
    caller.run(look_first, tools=[LOOK])
    told = [value["usage"] for question, value in caller.asked if question == "request"]
    assert [(usage["requests"], usage["tool_calls"]) for usage in told] == [(1, 0), (2, 1)]


@pytest.mark.parametrize("kind", ["text", "arguments", "calls"])
def test_an_answer_that_does_not_end_is_given_up_at_a_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shotclock.flows.steps._ai_agent.CONVERSATION_LIMIT", 10_000)
    pieces = 0

    async def go_on(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        nonlocal pieces
        while pieces < 100_000:
            pieces += 1
            match kind:
                case "text":
                    yield "x" * 10
                case "arguments":
                    yield {0: DeltaToolCall("look" if pieces == 1 else None, '{"x": "' if pieces == 1 else "x" * 10)}
                case "calls":
                    yield {pieces: DeltaToolCall("look", "{}", tool_call_id=f"call{pieces}")}

    caller = Caller()
    with pytest.raises(Failure, match="longer than") as raised:
        caller.run(go_on, tools=[LOOK])
    assert raised.value.code == "MODEL_ANSWER_INVALID"
    assert pieces <= 1_100
    assert caller.calls == []


def test_a_tool_may_be_called_as_the_way_to_answer_is() -> None:
    async def answer(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        name = "final_result" if not returned(messages) else info.output_tools[0].name
        yield {0: DeltaToolCall(name, '{"n": 3}')}

    caller = Caller()
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    told = caller.run(answer, tools=[{**LOOK, "name": "final_result"}], output_schema=schema)
    assert (told["output"], len(caller.calls)) == ({"n": 3}, 1)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"n": {"$ref": "#/definitions/n"}}, "definitions": {"n": {"type": "integer"}}},
        {"$ref": "#/$defs/it", "$defs": {"it": {"type": "object", "properties": {"n": {"type": "integer"}}}}},
        {"type": "array", "items": {"$ref": "#/$defs/it"}, "$defs": {"it": {"items": {"$ref": "#/$defs/it"}}}},
    ],
)
def test_a_schema_may_refer_to_its_definitions(schema: dict[str, Any]) -> None:
    told: dict[str, Any] = {}

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        told.update(info.output_tools[0].parameters_json_schema)
        is_wrapped = "result" in told["properties"]
        yield {0: DeltaToolCall(info.output_tools[0].name, '{"result": []}' if is_wrapped else '{"n": 3}')}

    assert Caller().run(answer, output_schema=schema)["output"] in ({"n": 3}, [])
    assert told["type"] == "object"
    assert find_schema_flaw(told) is None


# --- OpenAI's own protocol ------------------------------------------------------------------------------------
# Spoken where no `base_url` is set. Its own servers are not on this machine: the SDK is told another one.


@pytest.fixture
def openai(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Model, ModelServer]]]:
    """A function that starts a server with a script, and returns OpenAI's model as if it were OpenAI's server."""
    with contextlib.ExitStack() as stack:

        def start(*script: Action) -> tuple[Model, ModelServer]:
            server = stack.enter_context(model_server(*script))
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
            return build_model.__wrapped__("openai", "gpt-x", None, "a-key"), server

        yield start


def test_openai_answers_in_its_own_protocol_and_calls_tools(openai: Callable[..., tuple[Model, ModelServer]]) -> None:
    model, server = openai(CallTool("look", {"at": "it"}, says="let me see "), Say("one ", "two", tokens=7))
    caller = Caller()
    answer = caller.run(model, tools=[LOOK])
    assert (answer["output"], answer["partial"], answer["model"]) == ("one two", False, "gpt-x")
    assert caller.text == "let me see one two"
    assert caller.calls == [{"name": "look", "arguments": {"at": "it"}}]
    assert answer["usage"] | {"requests": 2, "input_tokens": 12, "output_tokens": 12} == answer["usage"]
    assert "input" in server.requests[0] and server.keys == ["Bearer a-key"] * 2
    assert "seen" in json.dumps(server.requests[1]["input"])


def test_openai_gives_a_structured_answer_in_its_own_protocol(openai: Callable[..., tuple[Model, ModelServer]]) -> None:
    model, _ = openai(CallTool(None, {"n": 3}))
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    assert Caller().run(model, output_schema=schema)["output"] == {"n": 3}


def test_what_goes_wrong_in_openais_own_protocol_has_the_codes_of_the_others(
    openai: Callable[..., tuple[Model, ModelServer]],
) -> None:
    for action, code, sent in (
        (Status(401), "MODEL_AUTH_FAILED", 1),
        (Status(404), "MODEL_REQUEST_REFUSED", 1),
        (Status(429, retry_after="3600"), "MODEL_RATE_LIMITED", 1),
        (Status(500), "MODEL_UNAVAILABLE", 3),
        (Say("half of ", then="stop"), "MODEL_UNAVAILABLE", 3),
        (Say("half of ", then="cut"), "MODEL_UNAVAILABLE", 3),
        (CallTool("look", {}, then="stop"), "MODEL_UNAVAILABLE", 3),
        (Say("x", then="garbage"), "MODEL_ANSWER_INVALID", 1),
    ):
        model, server = openai(action)
        with row(action), pytest.raises(Failure) as raised:
            Caller().run(model, tools=[LOOK])
        assert (raised.value.code, len(server.requests)) == (code, sent), raised.value


def test_why_a_server_is_not_reached_is_said() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        model = build_model.__wrapped__("openai", "m", f"http://127.0.0.1:{nobody.getsockname()[1]}/v1", "")
        with pytest.raises(Failure, match="Connection error: ") as raised:
            Caller().run(model)
    assert raised.value.code == "MODEL_UNAVAILABLE"


# --- servers that would fill the memory -------------------------------------------------------------------------


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Flood], tuple[Model, ModelServer]]]:
    """A function that starts a server that floods whoever asks it, and returns a model on it."""
    monkeypatch.setattr("shotclock.flows.steps._ai_client.EVENT_LIMIT", 300_000)
    with contextlib.ExitStack() as stack:

        def start(flood: Flood) -> tuple[Model, ModelServer]:
            server = stack.enter_context(model_server(flood))
            return build_model.__wrapped__("openai", "m", f"{server.url}/v1", ""), server

        yield start


@pytest.mark.parametrize(
    ("flood", "words"),
    [
        (Flood(b"x" * 65_536), "a part of its answer is longer than"),
        (Flood(b"data: x\n" * 8_192), "a part of its answer is longer than"),
        (Flood(b"no\n\n" * 16_384, status=500), "a part of its answer is longer than"),
        (Flood(gzip.compress(b"x" * 1_000_000), encoding="gzip"), r"compressed \(gzip\)"),
    ],
    ids=["a line without end", "an event without end", "an error without end", "compressed"],
)
def test_a_server_cannot_fill_the_memory_of_an_agent(
    chat: Callable[[Flood], tuple[Model, ModelServer]], flood: Flood, words: str
) -> None:
    model, server = chat(flood)
    with pytest.raises(Failure, match=words) as raised:
        Caller().run(model)
    assert (raised.value.code, len(server.requests)) == ("MODEL_ANSWER_INVALID", 1)


def test_an_event_may_come_in_any_pieces_and_many_of_them_are_more_than_one_may_be(
    chat: Callable[[Any], tuple[Model, ModelServer]],
) -> None:
    model, _ = chat(Say(*["x" * 50_000] * 10))
    assert len(Caller().run(model)["output"]) == 500_000


def test_what_tools_answer_is_part_of_the_conversation_and_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shotclock.flows.steps._ai_agent.CONVERSATION_LIMIT", 50_000)
    caller = Caller(answer={"ok": True, "output": "y" * 10_000, "remaining_ms": None})
    with pytest.raises(Failure) as raised:
        caller.run(look_forever, tools=[LOOK])
    assert (raised.value.code, raised.value.context["limit"]) == ("LIMIT_REACHED", "characters")
    assert len(caller.calls) < 5


def test_an_answer_that_does_not_fit_into_memory_is_an_invalid_answer() -> None:
    async def fill(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        raise MemoryError
        yield ""

    with pytest.raises(Failure) as raised:
        Caller().run(fill)
    assert raised.value.code == "MODEL_ANSWER_INVALID"


def test_the_process_of_an_agent_takes_no_more_memory_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: set_to.append((which, limits)))
    with model_server(Say("hello")) as server:
        task = {**TASK, "models": [("openai", "m", f"{server.url}/v1", "")]}
        answer = asyncio.run(asyncio.wait_for(run_agent(Caller().context(), task), LIMIT_S))
    assert answer["output"] == "hello"
    assert set_to == [(resource.RLIMIT_DATA, (MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_DATA)[1]))]
