"""Prompts and completions over MCP, on the clock like tools."""

import asyncio
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError
from mcp_types import PromptReference, ResourceTemplateReference

from shotclock.core.envelope import ENVELOPE_KEY
from tests.apps.server.client import LATE_S, LEGACY, MODERN, SOME_TRANSPORTS, connected, run

PROGRAM = """
    import os, time
    from enum import StrEnum
    from pydantic import BaseModel
    from mcp_types import Completion, CompletionArgument, CompletionContext, PromptMessage, PromptReference, TextContent
    from shotclock import App, Context, Failure, Image, Message

    app = App("prompts", list_page_size=4)
    PNG = b"\\x89PNG\\r\\n\\x1a\\n"

    @app.prompt
    def hello() -> str:
        "Greet."
        return "Say hello."

    @app.prompt("review", title="Review", icons=["https://example.org/i.png"])
    def review_code(code: str, lines: list[int], strict: bool = False):
        '''Review code.

        Args:
            code: The code.
            lines: The lines to look at.
        '''
        return [f"Review {code}, lines {lines}", Message(f"Strictly: {strict}", role="assistant")]

    class Tone(StrEnum):
        KIND = "kind"
        ONE = "1"

    class Author(BaseModel):
        name: str

    @app.prompt
    def typed(tone: Tone, author: Author, page: int | str | None = None, note: str | None = None) -> dict:
        return {"tone": tone, "author": author, "page": page, "note": note}

    @app.prompt(name="picture", description="A picture to look at.")
    async def show(ctx: Context) -> list:
        return [Message(Image(data=PNG)), {"role": "user", "content": "What is it?"}]

    @app.prompt
    def of_the_sdk() -> list[PromptMessage]:
        return [PromptMessage(role="assistant", content=TextContent(type="text", text="hi"))]

    @app.prompt(timeout="500ms")
    def hangs() -> str:
        time.sleep(60)
        return ""

    @app.prompt
    def crashes() -> str:
        os._exit(3)

    @app.prompt
    def odd() -> list:
        return [{"role": "system", "content": "x"}]

    @app.resource("notes://{id}")
    def note(id: str) -> str:
        return id

    LANGUAGES = ["pascal", "perl", "php", "python"]

    @app.completion("review", "code")
    def complete_code(value: str, arguments: dict[str, str]) -> list[str]:
        return [each for each in LANGUAGES if each.startswith(value)] + list(arguments.values())

    @app.completion("notes://{id}", "id")
    async def complete_id(value: str) -> list[str]:
        return [f"{value}{number}" for number in range(150)]

    @app.completion("hangs", "x", timeout="500ms")
    def slow(value: str) -> list[str]:
        time.sleep(60)
        return []

    @app.completion
    def others(ref, argument: CompletionArgument, context: CompletionContext | None) -> Completion | None:
        if ref["type"] == "ref/prompt" and argument.name == "lines":
            return Completion(values=[argument.value + "!"], total=7, has_more=True)
        return None
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    file = tmp_path / "prompts_app.py"
    file.write_text(textwrap.dedent(PROGRAM))
    return f"{file}:app"


async def refused(work: Any) -> Any:
    with pytest.raises(MCPError) as raised:
        await work
    return raised.value.error


@pytest.mark.parametrize(("transport", "mode"), SOME_TRANSPORTS)
def test_prompts_are_listed_in_pages_and_filled_in(target: str, transport: str, mode: str) -> None:
    async def scenario() -> None:
        async with connected(transport, mode, target=target) as (client, _):
            first = await client.list_prompts()
            rest = await client.list_prompts(cursor=first.next_cursor)
            assert (len(first.prompts), len(rest.prompts), rest.next_cursor) == (4, 4, None)
            assert (await refused(client.list_prompts(cursor="x"))).code == -32602
            listed = {each.name: each for each in [*first.prompts, *rest.prompts]}
            review = listed["review"]
            assert (review.title, review.description) == ("Review", "Review code.")
            assert review.icons and review.icons[0].src == "https://example.org/i.png"
            assert [(each.name, each.description, each.required) for each in review.arguments or []] == [
                ("code", "The code.", True),
                ("lines", "The lines to look at. As JSON: array.", True),
                ("strict", "As JSON: boolean.", False),
            ]
            assert listed["picture"].description == "A picture to look at."

            async def messages(name: str, arguments: dict[str, str] | None = None) -> list[tuple[str, Any]]:
                got = await client.get_prompt(name, arguments)
                return [(each.role, each.content.model_dump(by_alias=True, exclude_none=True)) for each in got.messages]

            assert await messages("hello") == [("user", {"type": "text", "text": "Say hello."})]
            assert await messages("review", {"code": "3", "lines": "[1, 2]", "strict": "true"}) == [
                ("user", {"type": "text", "text": "Review 3, lines [1, 2]"}),
                ("assistant", {"type": "text", "text": "Strictly: True"}),
            ]
            typed = await messages("typed", {"tone": "1", "author": '{"name": "Ada"}', "page": "3", "note": "4"})
            assert typed[0][1]["text"] == '{"tone":"1","author":{"name":"Ada"},"page":3,"note":"4"}'
            assert await messages("picture") == [
                ("user", {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"}),
                ("user", {"type": "text", "text": "What is it?"}),
            ]
            assert await messages("of_the_sdk") == [("assistant", {"type": "text", "text": "hi"})]
            assert (await client.list_tools()).tools == []

    run(scenario())


@pytest.mark.parametrize(("transport", "mode"), [("stdio", MODERN), ("http", LEGACY)])
def test_a_prompt_that_fails_is_an_error_with_a_sentence(target: str, transport: str, mode: str) -> None:
    async def scenario() -> None:
        async with connected(transport, mode, target=target) as (client, _):
            began = time.monotonic()
            hung = await refused(client.get_prompt("hangs"))
            assert time.monotonic() - began < 0.5 + LATE_S
            assert hung.message == "TIMEOUT: prompt hangs timed out after 500ms. It is safe to call it again."
            assert hung.code == -32001 and hung.data[ENVELOPE_KEY]["error"]["code"] == "TIMEOUT"
            assert (await refused(client.get_prompt("crashes"))).message.startswith("WORKER_CRASHED: ")
            unknown = await refused(client.get_prompt("revue"))
            assert unknown.code == -32602 and "did you mean 'review'?" in unknown.message
            missing = await refused(client.get_prompt("review", {"lines": "no"}))
            assert missing.code == -32602 and "code: Field required" in missing.message
            assert "lines: Input should be a valid list" in missing.message
            assert "the role of a message is" in (await refused(client.get_prompt("odd"))).message
            asking = asyncio.create_task(client.get_prompt("hangs"))
            await asyncio.sleep(0)
            asking.cancel()
            assert (await client.get_prompt("hello")).messages

    run(scenario())


@pytest.mark.parametrize(("transport", "mode"), SOME_TRANSPORTS)
def test_arguments_are_completed(target: str, transport: str, mode: str) -> None:
    async def scenario() -> None:
        async with connected(transport, mode, target=target) as (client, _):
            if mode == LEGACY:  # a client that is set to the modern protocol does not ask
                assert client.server_capabilities.completions is not None
            prompt, note = PromptReference(name="review"), ResourceTemplateReference(uri="notes://{id}")

            async def complete(ref: Any, name: str, value: str, **options: Any) -> Any:
                return (await client.complete(ref, {"name": name, "value": value}, **options)).completion

            assert (await complete(prompt, "code", "p")).values == ["pascal", "perl", "php", "python"]
            known = await complete(prompt, "code", "py", context_arguments={"lines": "1"})
            assert known.values == ["python", "1"]
            many = await complete(note, "id", "n")
            assert (len(many.values), many.values[0], many.total, many.has_more) == (100, "n0", 150, True)
            general = await complete(prompt, "lines", "4")
            assert (general.values, general.total, general.has_more) == (["4!"], 7, True)
            assert (await complete(prompt, "strict", "")).values == []
            slow = await refused(complete(PromptReference(name="hangs"), "x", ""))
            assert slow.message.startswith("TIMEOUT: completion hangs x timed out after 500ms")
            assert (await refused(complete(PromptReference(name="none"), "x", ""))).code == -32602

    run(scenario())


def test_a_server_without_them_does_not_offer_them() -> None:
    async def scenario() -> None:
        async with connected("stdio", LEGACY) as (client, _):
            capabilities = client.server_capabilities
            assert (capabilities.prompts, capabilities.resources, capabilities.completions) == (None, None, None)

    run(scenario())
