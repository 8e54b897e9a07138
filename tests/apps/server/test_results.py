"""What a model reads: the value, or a few sentences that say what to do."""

import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate
from mcp import Client
from mcp_types import CallToolResult

from tests.apps.server.client import connected, envelope_in, run

PROGRAM = """
    import time
    from dataclasses import dataclass
    from shotclock import App, Failure

    app = App("results")

    @dataclass
    class Point:
        x: int
        y: int

    @app.command(mutates=False)
    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b

    @app.command
    def point() -> Point:
        return Point(1, 2)

    @app.command
    def words() -> list[str]:
        return ["a", "ü"]

    @app.command
    def maybe(known: bool) -> int | None:
        return 3 if known else None

    @app.command
    def nothing() -> None:
        pass

    @app.command(timeout="300ms")
    def writes_slowly() -> str:
        time.sleep(60)
        return ""

    @app.command(timeout="300ms", mutates=False)
    def reads_slowly() -> str:
        time.sleep(60)
        return ""

    @app.command
    def fails() -> str:
        raise Failure("COMMAND_FAILED", "the disk is full", suggestion="delete something", data={"written": 3})

    @app.command(destructive=True)
    def wipe(path: str) -> int:
        return 1

    @app.command(interruption=True, timeout="60s")
    def long() -> int:
        time.sleep(50)
        return 1

    @app.command(approval=True)
    def deploy() -> int:
        return 1
"""


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Client], Awaitable[Any]]], Any]:
    """A function that runs a scenario with a client of the server."""
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    file = tmp_path / "results.py"
    file.write_text(textwrap.dedent(PROGRAM))

    def converse(scenario: Callable[[Client], Awaitable[Any]], **options: Any) -> Any:
        async def connect() -> Any:
            async with connected("stdio", "auto", target=f"{file}:app", **options) as (client, _):
                return await scenario(client)

        return run(connect())

    return converse


def texts(result: CallToolResult) -> list[str]:
    return [block.text for block in result.content if block.type == "text"]


@pytest.mark.slow
def test_a_success_is_the_value_as_text_and_as_structure_that_fits_the_schema(ask: Any) -> None:
    calls: list[tuple[str, dict[str, Any], list[str], Any]] = [
        ("add", {"a": 1, "b": 2}, ["3"], {"result": 3}),
        ("point", {}, ['{"x":1,"y":2}'], {"x": 1, "y": 2}),
        ("words", {}, ['["a","ü"]'], {"result": ["a", "ü"]}),
        ("maybe", {"known": True}, ["3"], {"result": 3}),
        ("maybe", {"known": False}, [], {"result": None}),
        ("nothing", {}, [], None),
    ]

    async def scenario(client: Client) -> None:
        schemas = {tool.name: tool.output_schema for tool in (await client.list_tools()).tools}
        for tool, arguments, shown, structured in calls:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error and texts(result) == shown, tool
            assert result.structured_content == structured, tool
            assert envelope_in(result)["ok"]
            assert ("fastmcp" in (result.meta or {})) == (structured is not None and "result" in structured), tool
            if structured is None:
                assert schemas[tool] is None
            else:
                validate(structured, schemas[tool])

    ask(scenario)


@pytest.mark.slow
def test_a_model_reads_what_to_do_about_work_that_is_not_found(ask: Any) -> None:
    """The suggestions are in the text, not only in `_meta`."""
    calls: list[tuple[str, dict[str, Any], str]] = [
        (
            "job",
            {"action": "status", "job_id": "j-none"},
            "JOB_NOT_FOUND: there is no job 'j-none'. List your jobs with",
        ),
        ("check-proposal", {"proposal_id": "p-none"}, "A server knows the proposals of its store: repeat the call"),
        ("extend", {"by_ms": 1, "request_id": "none"}, "It has ended, or runs elsewhere: do not repeat this"),
    ]

    async def scenario(client: Client) -> None:
        for tool, arguments, shown in calls:
            result = await client.call_tool(tool, arguments)
            assert result.is_error and shown in texts(result)[0], texts(result)
        again = await client.call_tool("add", {"a": 1, "b": 2}, meta={"shotclock.dev/idempotencyKey": "k"})
        assert envelope_in(again)["ok"]
        reused = await client.call_tool("add", {"a": 1, "b": 3}, meta={"shotclock.dev/idempotencyKey": "k"})
        assert "KEY_REUSED" in texts(reused)[0] and "Use a new key for a new call." in texts(reused)[0]

    ask(scenario)


@pytest.mark.slow
def test_a_failure_is_readable_and_says_whether_a_repeat_is_safe(ask: Any) -> None:
    calls: list[tuple[str, dict[str, Any], list[str]]] = [
        ("add", {"a": 1}, ["ARG_ERROR: b: Field required. It changed nothing."]),
        (
            "writes_slowly",
            {},
            [
                "TIMEOUT: writes_slowly timed out after 300ms. It may have had effects: look at them before you call "
                "it again."
            ],
        ),
        ("reads_slowly", {}, ["TIMEOUT: reads_slowly timed out after 300ms. It is safe to call it again."]),
        (
            "fails",
            {},
            [
                "COMMAND_FAILED: the disk is full. Delete something. It may have had effects: look at them before you "
                "call it again.",
                '{"written":3}',
            ],
        ),
        (
            "wipe",
            {"path": "/x"},
            [
                "CONFIRMATION_REQUIRED: wipe is destructive and was not confirmed; nothing was done. Call it again "
                "with confirm_destructive: true to have it done. It changed nothing.",
                '{"would_run":"wipe","arguments":{"path":"/x"}}',
            ],
        ),
    ]

    async def scenario(client: Client) -> None:
        for tool, arguments, shown in calls:
            result = await client.call_tool(tool, arguments)
            assert result.is_error and texts(result) == shown, tool
            assert result.structured_content is None and not envelope_in(result)["ok"]

    ask(scenario)


@pytest.mark.slow
def test_unfinished_work_names_the_tool_that_continues_it_and_fits_the_schema(ask: Any) -> None:
    async def scenario(client: Client) -> None:
        schemas = {tool.name: tool.output_schema for tool in (await client.list_tools()).tools}
        budget = {"shotclock.dev/budgetMs": 300}
        for tool, name, state in (("long", "job_id", "running"), ("deploy", "proposal_id", "paused")):
            result = await client.call_tool(tool, {}, meta=budget)  # type: ignore[arg-type]
            structured, (text,) = result.structured_content, texts(result)
            assert not result.is_error and structured is not None
            validate(structured, schemas[tool])
            assert structured["state"] == state
            assert text.startswith("INCOMPLETE: ") and structured[name] in text and "shotclock " not in text
        cancelled = await client.call_tool("job", {"action": "list"})
        for job in envelope_in(cancelled)["data"]["jobs"]:
            await client.call_tool("job", {"action": "cancel", "job_id": job["job_id"]})

    ask(scenario)


@pytest.mark.slow
def test_controls_are_listed_only_to_a_client_that_asks_for_them(ask: Any) -> None:
    async def names(client: Client) -> set[str]:
        return {tool.name for tool in (await client.list_tools()).tools}

    assert not {"graceful_stop", "extend"} & ask(names)
