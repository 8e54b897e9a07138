"""FastMCP's words for the context and for errors, in an App. A whole server is in tests/examples/test_inventory.py."""

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from mcp.types import ElicitResult

from shotclock import App, testing
from shotclock.fastmcp import (
    AcceptedElicitation,
    CancelledElicitation,
    Context,
    CurrentContext,
    DeclinedElicitation,
    ResourceError,
    ToolError,
)

app = App("ported")
WITHIN_S = 60.0


@dataclass
class Guest:
    name: str
    age: int = 0


QUESTIONS: dict[str, Any] = {
    "text": str,
    "whole number": int,
    "yes or no": bool,
    "literal": Literal["a", "b"],
    "one of": ["a", "b"],
    "some of": [["a", "b"]],
    "one with a title": {"a": {"title": "First"}, "b": {}},
    "some with a title": [{"a": {"title": "First"}, "b": {}}],
    "form": Guest,
}


@app.command(mutates=False)
async def ask(question: str, context: Context = CurrentContext()) -> str:  # noqa: B008 as FastMCP writes it
    match await context.elicit(question, QUESTIONS[question]):
        case AcceptedElicitation(data=data, action="accept"):
            return repr(data)
        case DeclinedElicitation() as declined:
            return declined.action
        case CancelledElicitation() as cancelled:
            return cancelled.action


@app.command(mutates=False)
async def ask_titled(ctx: Context, form: bool) -> str:
    of = Guest if form else int
    answer = await ctx.elicit("How many?", of, response_title="Guests", response_description="With children")
    assert isinstance(answer, AcceptedElicitation)
    return repr(answer.data)


@app.command(mutates=False)
async def note(ctx: Context) -> str:
    await ctx.debug("d")
    await ctx.info("i", logger_name="notes")
    await ctx.warning("w", extra={"left": 2})
    await ctx.error("e")
    await ctx.log("n", level="notice")
    await ctx.report_progress(1, 3, "one of three")
    await ctx.report_progress(2)
    return ctx.request_id


@app.command(mutates=False)
def refuse(words: str) -> None:
    raise ToolError(words)


@app.resource("ported://{id}")
def refused(id: str) -> str:
    raise ResourceError(f"there is no {id}")


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, WITHIN_S))


@pytest.mark.slow
def test_questions_have_fastmcps_form_and_their_answers_fastmcps_classes(no_survivors: object) -> None:
    titled = [{"const": "a", "title": "First"}, {"const": "b", "title": "b"}]
    asked: list[tuple[str, dict[str, Any], Any, str]] = [
        ("text", {"type": "string"}, "x", "'x'"),
        ("whole number", {"type": "integer"}, 3, "3"),
        ("yes or no", {"type": "boolean"}, True, "True"),
        ("literal", {"type": "string", "enum": ["a", "b"]}, "a", "'a'"),
        ("one of", {"type": "string", "enum": ["a", "b"]}, "b", "'b'"),
        ("some of", {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}, ["a"], "['a']"),
        ("one with a title", {"type": "string", "oneOf": titled}, "a", "'a'"),
        ("some with a title", {"type": "array", "items": {"anyOf": titled}}, ["a", "b"], "['a', 'b']"),
    ]
    schemas: dict[str, Any] = {}
    answers: dict[str, ElicitResult] = {
        "form": ElicitResult(action="accept", content={"name": "Ada"}),
        "How many?": ElicitResult(action="accept", content={"value": 4}),
    }

    async def answer(_: Any, params: Any) -> ElicitResult:
        schemas[params.message] = params.requested_schema["properties"]
        return answers[params.message]

    async def test() -> None:
        async with testing.client(app, elicitation_callback=answer) as client:

            async def value(tool: str, **arguments: Any) -> Any:
                return testing.assert_ok(await client.call_tool(tool, arguments))

            for question, schema, given, received in asked:
                answers[question] = ElicitResult(action="accept", content={"value": given})
                assert await value("ask", question=question) == received, question
                assert {k: v for k, v in schemas[question]["value"].items() if k != "title"} == schema, question
            assert await value("ask", question="form") == "Guest(name='Ada', age=0)"
            assert list(schemas["form"]) == ["name", "age"]
            for action in ("decline", "cancel"):
                answers["text"] = ElicitResult(action=action)
                assert await value("ask", question="text") == action
            assert await value("ask_titled", form=False) == "4"
            expected = {"type": "integer", "title": "Guests", "description": "With children"}
            assert schemas["How many?"]["value"] == expected
            refused = testing.assert_failed(await client.call_tool("ask_titled", {"form": True}), "INTERNAL_ERROR")
            assert "TypeError" in refused["message"]

    run(test())


@pytest.mark.slow
def test_messages_progress_and_errors_reach_the_client(no_survivors: object) -> None:
    log: list[tuple[str, str | None, Any]] = []
    progress: list[tuple[float, float | None, str | None]] = []

    async def note_log(params: Any) -> None:
        log.append((params.level, params.logger, params.data))

    async def note_progress(*seen: Any) -> None:
        progress.append(seen)

    async def test() -> None:
        async with testing.client(app, mode="legacy", logging_callback=note_log) as client:
            await client.set_logging_level("debug")
            noted = testing.assert_ok(await client.call_tool("note", {}, progress_callback=note_progress))
            assert noted
            for words in ("no such thing", "NOT_FOUND", ""):
                failure = await client.call_tool("refuse", {"words": words})
                assert testing.assert_failed(failure, "GENERAL_ERROR")["message"].startswith(words)
            with pytest.raises(Exception, match="there is no 3"):
                await client.read_resource("ported://3")

    run(test())
    levels = [("debug", "d"), ("info", "i"), ("warning", 'w {"left": 2}'), ("error", "e"), ("notice", "n")]
    assert [(level, text) for level, _, text in log] == levels and log[1][1] == "notes"
    assert progress == [(1, 3, "one of three"), (2, None, None)]


def test_what_fastmcp_has_beyond_that_is_an_error_that_names_it() -> None:
    for name in ("get_state", "read_resource", "session", "client_id"):
        assert not hasattr(Context, name)


def test_the_error_for_what_fastmcp_has_beyond_that_says_what_to_do_instead() -> None:
    app: Any = App("moved")
    ctx: Any = Context.__new__(Context)
    for of, name, instead in (
        (app, "tool", "@app"),
        (app, "run", "serve_mcp"),
        (ctx, "get_state", "lifespan"),
        (ctx, "session", "client"),
    ):
        with pytest.raises(AttributeError, match=f"{name}.*{instead}"):
            getattr(of, name)
        with pytest.raises(AttributeError, match=r"has no attribute 'unknown'$"):
            of.unknown  # noqa: B018
    with pytest.raises(ValueError, match="such as 'book-library', not"):
        App("Book Library")
