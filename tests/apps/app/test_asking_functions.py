"""Functions that log and that ask their client, in both generations of the protocol."""

import asyncio
import signal
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.shared.exceptions import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    CreateMessageResult,
    ElicitCompleteNotification,
    ElicitResult,
    ListRootsResult,
    TextContent,
)

from shotclock import testing
from shotclock.apps.server import _paused_calls as paused_calls
from shotclock.apps.server import client_link
from shotclock.calls.control import live_calls
from shotclock.core.envelope import ENVELOPE_KEY
from shotclock.worker.client_forms import checked_url
from tests.apps.app.programs.asking import app
from tests.apps.server.client import ENDED_WITHIN_S, LEGACY, MODERN, connected, envelope_in

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]
ANSWERED_WITHIN_S = 60.0


class Person:
    """Gives these answers in turn, after a pause."""

    def __init__(self, *answers: dict[str, Any] | None, pause_s: float = 0) -> None:
        self._answers, self._pause_s = list(answers), pause_s
        self.asked: list[Any] = []

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        self.asked.append(params)
        await asyncio.sleep(self._pause_s)  # a person thinks
        answer = self._answers.pop(0)
        return (
            ElicitResult(action="decline") if answer is None else ElicitResult(action="accept", content=answer or None)
        )


async def model(context: Any, params: Any) -> CreateMessageResult:
    assert params.system_prompt == "Be brief" and params.max_tokens == 10
    text = TextContent(type="text", text=params.messages[0].content.text.upper())
    return CreateMessageResult(role="assistant", content=text, model="loud")


def call(mode: str, tool: str, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    async def scenario() -> Any:
        async with testing.client(app, mode=mode, **options) as client:
            try:
                return envelope_in(await client.call_tool(tool, arguments or {}))
            except MCPError as error:
                return {**error.data[ENVELOPE_KEY], "protocol": error}

    return asyncio.run(asyncio.wait_for(scenario(), ANSWERED_WITHIN_S))


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_a_function_asks_twice_and_does_its_work_once(mode: str, tmp_path: Path) -> None:
    person = Person({"size": "l", "count": 2, "extras": ["bow"]}, {"answer": True})
    envelope = call(mode, "order", {"folder": str(tmp_path)}, elicitation_callback=person)
    assert envelope["data"] == {"result": "2 LARGE_BOX ['bow'] True"}
    assert (tmp_path / "begun").read_text() == "x"
    fields = person.asked[0].requested_schema["properties"]
    assert fields["size"]["oneOf"][0] == {"const": "s", "title": "Small box"}
    assert fields["count"]["default"] == 1 and fields["extras"]["items"]["enum"] == ["bow", "card"]
    declined = call(mode, "order", {"folder": str(tmp_path)}, elicitation_callback=Person(None))
    assert declined["data"] == {"result": "no order: decline"}


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_the_time_of_a_person_is_not_the_time_of_the_work(mode: str) -> None:
    person = Person({"answer": "Ada"}, pause_s=1.5)
    assert call(mode, "patient", elicitation_callback=person)["data"] == {"result": "Ada"}
    stopped = call(mode, "slow_after", elicitation_callback=Person({"answer": "Ada"}))
    assert stopped["error"]["code"] == "TIMEOUT"


def test_a_question_a_moment_before_the_timeout_does_not_move_it() -> None:
    late = call(LEGACY, "ask_late", elicitation_callback=Person({"answer": "Ada"}, pause_s=ANSWERED_WITHIN_S))
    assert (late["error"]["code"], late["error"]["message"]) == ("TIMEOUT", "ask_late timed out after 500ms")


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_a_client_that_cannot_answer_is_named(mode: str, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path)}
    refused = call(mode, "order", arguments)
    assert refused["error"]["code"] == "CANNOT_ASK"
    if mode == MODERN:  # the revision wants an error of the protocol
        assert refused["protocol"].code == MISSING_REQUIRED_CLIENT_CAPABILITY
        assert refused["protocol"].data["requiredCapabilities"] == {"elicitation": {}}
    wrong = call(mode, "order", arguments, elicitation_callback=Person({"size": "huge"}))
    assert wrong["error"]["code"] == "BAD_ANSWER"
    assert not call(mode, "nested", elicitation_callback=Person())["ok"]
    long = call(mode, "ask_much", {"characters": 1024 * 1024}, elicitation_callback=Person())
    assert long["error"]["code"] == "CANNOT_ASK" and "characters" in long["error"]["message"]


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_a_person_is_sent_to_a_url(mode: str) -> None:
    messages: list[Any] = []

    async def note(message: Any) -> None:
        messages.append(message)

    person = Person({})
    envelope = call(mode, "sign_in", elicitation_callback=person, message_handler=note)
    assert envelope["data"] == {"result": "accept None"}
    (asked,) = person.asked
    assert (asked.mode, asked.url) == ("url", "https://example.com/sign-in?id=1")
    completed = [each.params.elicitation_id for each in messages if isinstance(each, ElicitCompleteNotification)]
    assert completed == ([] if mode == MODERN else [asked.elicitation_id])
    assert call(mode, "sign_in", elicitation_callback=Person(None))["data"] == {"result": "decline None"}


def test_a_person_is_sent_to_web_addresses_only() -> None:
    for url in ("javascript:alert(1)", "file:///etc/passwd", "https://", "https://a/\nb", "https://a/" + "x" * 4_000):
        with pytest.raises(ValueError, match="not an http"):
            checked_url(url)


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_the_model_of_the_client_answers(mode: str) -> None:
    envelope = call(mode, "summarise", {"text": "quiet"}, sampling_callback=model)
    assert envelope["data"] == {"result": "loud: QUIET"}


def test_a_client_reads_the_log_from_its_level_on() -> None:
    for mode, options in ((MODERN, {"log_level": "info"}), (LEGACY, {})):
        seen: list[tuple[Any, ...]] = []

        async def note(params: Any, seen: list[Any] = seen) -> None:
            seen.append((params.level, params.data, params.logger))

        assert call(mode, "chatty", logging_callback=note, **options)["ok"]
        assert seen == [("warning", "half done", "work")]


def test_a_paused_call_that_is_not_continued_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(client_link, "ASK_LIMIT_MS", 60_000)
    monkeypatch.setattr(paused_calls, "ASK_LIMIT_MS", 500)
    monkeypatch.setattr(paused_calls, "MOST_PAUSED", 1)
    arguments = {"folder": str(tmp_path)}

    async def scenario() -> None:
        async with testing.client(app, mode=MODERN, elicitation_callback=Person()) as client:
            begin = partial(client.session.call_tool, allow_input_required=True)
            paused = await begin("order", arguments)
            assert paused.request_state
            assert envelope_in(await begin("order", arguments))["error"]["code"] == "CANNOT_ASK"
            for name, given in (("patient", {}), ("order", {"folder": "/"})):
                with pytest.raises(MCPError, match="names no waiting call"):
                    await begin(name, given, request_state=paused.request_state)
            while live_calls:  # bounded by `wait_for`
                await asyncio.sleep(0.02)
            with pytest.raises(MCPError, match="names no waiting call"):
                await begin("order", arguments, request_state=paused.request_state)

    asyncio.run(asyncio.wait_for(scenario(), ANSWERED_WITHIN_S))


def test_an_answer_sent_ahead_of_the_question_is_checked(tmp_path: Path) -> None:
    async def scenario() -> Any:
        async with testing.client(app, mode=MODERN, elicitation_callback=Person()) as client:
            ahead = {"answer": ListRootsResult(roots=[])}
            return envelope_in(await client.call_tool("order", {"folder": str(tmp_path)}, input_responses=ahead))

    envelope = asyncio.run(asyncio.wait_for(scenario(), ANSWERED_WITHIN_S))
    assert envelope["error"]["code"] == "BAD_ANSWER"


def test_nothing_is_left_of_a_paused_call_when_its_server_ends(tmp_path: Path) -> None:
    async def scenario(signal_number: int) -> None:
        target = "tests.apps.app.programs.asking:app"
        async with connected(target=target, elicitation_callback=Person()) as (client, server):
            paused = await client.session.call_tool("order", {"folder": str(tmp_path)}, allow_input_required=True)
            assert paused.result_type == "input_required"
            below = server.children(recursive=True)
            assert below
            server.send_signal(signal_number)
            _, alive = psutil.wait_procs([server, *below], ENDED_WITHIN_S)
            assert not alive

    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        asyncio.run(asyncio.wait_for(scenario(signal_number), ANSWERED_WITHIN_S))
