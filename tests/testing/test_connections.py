"""Calls of an App's commands from a test: directly and through its MCP server in memory."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from shotclock import testing
from shotclock.store.home import HOME_VARIABLE
from tests.testing.greeter import app

pytestmark = pytest.mark.usefixtures("no_survivors")

WITHIN_S = 60.0


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, WITHIN_S))


def test_a_command_is_called_in_a_worker_process_and_answers_with_its_envelope() -> None:
    with testing.calls(app) as call:
        assert testing.assert_ok(call("greet", name="Ada", times=2)) == "Hello Ada, Hello Ada"
        described = testing.assert_ok(call("describe", name="Ada"))
        assert described["pid"] != os.getpid()
        testing.assert_failed(call("hang"), "TIMEOUT")
        testing.assert_failed(call("greet", name="nobody"), "NOT_FOUND", message="nobody to greet")


def test_the_options_of_a_call_can_be_given() -> None:
    progress: list[tuple[object, ...]] = []
    with testing.calls(app) as call:
        testing.assert_failed(call("forget", name="Ada"), "CONFIRMATION_REQUIRED")
        forgotten = call.with_options("forget", {"name": "Ada"}, confirm_destructive=True)
        assert testing.assert_ok(forgotten) == "forgot Ada"
        assert call.with_options("hang", {}, timeout="50ms").meta["timeout_ms"] == 50
        call.with_options("describe", {"name": "Ada"}, on_progress=lambda *seen: progress.append(seen))
    assert progress == [(1, 1, "names")]


def test_an_async_test_awaits_its_calls_and_several_at_a_time() -> None:
    async def test() -> None:
        async with testing.calls(app) as call:
            answers = await asyncio.gather(*(call("greet", name=name) for name in ("Ada", "Bob")))
            assert [testing.assert_ok(answer) for answer in answers] == ["Hello Ada", "Hello Bob"]
            assert (await call.with_options("hang", {}, timeout="50ms")).meta["timeout_ms"] == 50

    run(test())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_in_memory_sees_the_real_server(mode: str) -> None:
    async def test() -> None:
        async with testing.client(app, mode=mode) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert tools["greet"].input_schema["required"] == ["name"]
            greeted = await client.call_tool("greet", {"name": "Ada"})
            assert greeted.structured_content == {"result": "Hello Ada"}
            assert testing.assert_ok(greeted) == "Hello Ada"
            refused = await client.call_tool("greet", {})
            assert refused.is_error
            assert testing.assert_failed(refused, "ARG_ERROR")["errors"][0]["field"] == "name"
            testing.assert_failed(await client.call_tool("hang", {}), "TIMEOUT")

    run(test())


def test_a_keyed_call_is_not_replayed_from_another_block(tmp_path: Path) -> None:
    def call_with_key(**options: Any) -> dict[str, Any]:
        with testing.calls(app, **options) as call:
            envelope = call.with_options("greet", {"name": "Ada"}, idempotency_key="once")
            testing.assert_ok(envelope)
            return envelope.meta

    before = os.environ.get(HOME_VARIABLE)
    first, second = call_with_key(), call_with_key()
    assert first["request_id"] != second["request_id"] and "replayed" not in str(second)
    assert call_with_key(home=tmp_path)["request_id"] and (tmp_path / "shotclock.db").exists()
    assert os.environ.get(HOME_VARIABLE) == before
