"""Functions that log and that ask their client, in both generations of the protocol."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mcp_types import CreateMessageResult, ElicitResult, TextContent

from shotclock import testing
from tests.app.programs.asking import app
from tests.server.client import LEGACY, MODERN, envelope_in

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
        return ElicitResult(action="decline") if answer is None else ElicitResult(action="accept", content=answer)


async def model(context: Any, params: Any) -> CreateMessageResult:
    assert params.system_prompt == "Be brief" and params.max_tokens == 10
    text = TextContent(type="text", text=params.messages[0].content.text.upper())
    return CreateMessageResult(role="assistant", content=text, model="loud")


def call(mode: str, tool: str, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    async def scenario() -> Any:
        async with testing.client(app, mode=mode, **options) as client:
            return envelope_in(await client.call_tool(tool, arguments or {}))

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


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_a_client_that_cannot_answer_is_named(mode: str, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path)}
    assert call(mode, "order", arguments)["error"]["code"] == "CANNOT_ASK"
    wrong = call(mode, "order", arguments, elicitation_callback=Person({"size": "huge"}))
    assert wrong["error"]["code"] == "BAD_ANSWER"
    assert not call(mode, "nested", elicitation_callback=Person())["ok"]


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
