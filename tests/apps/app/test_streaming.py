"""Commands that yield: items arrive one by one, and those of a stopped command are in its answer."""

import asyncio
import os
import select
import signal
import time
from typing import Any

import pytest

from shotclock import testing
from tests.apps.app.conftest import SOON_S
from tests.apps.app.programs.streaming import app


def test_a_program_gets_all_items_in_one_envelope(tool: Any, validate_envelope: Any) -> None:
    counted, coroutine = tool("streaming.py").each([["count", "3"], ["later", "2"]])
    assert validate_envelope(counted.json())["data"] == [1, 2, 3]
    assert validate_envelope(coroutine.json())["data"] == ["later 0", "later 1"]


def test_a_person_sees_each_item_when_it_is_yielded(tool: Any) -> None:
    ours, theirs = os.pipe()
    began = time.monotonic()
    running = tool("streaming.py").start(
        "count", "3", "--pause", "600", "--timeout", "0", "--format", "text", stdout=theirs
    )
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as reader:
        assert select.select([reader], [], [], SOON_S)[0] and reader.read(100) == b"1\n"
    assert time.monotonic() - began < 2 * SOON_S
    running.signal(signal.SIGTERM)
    assert running.ends().code == 143


def test_text_has_one_item_per_line_and_once(tool: Any) -> None:
    program = tool("streaming.py")
    ran = program("count", "3", "--format", "text")
    assert (ran.code, ran.stdout) == (0, b"1\n2\n3\n")
    assert program("hang", "Ada", "--format", "text").stdout == b'{"name": "Ada"}\n'
    assert program("count", "3", "--validate-only", "--format", "text").stdout == b'{\n  "valid": true\n}\n'


def test_the_items_of_a_command_that_is_stopped_or_fails_are_in_its_answer(tool: Any, validate_envelope: Any) -> None:
    program = tool("streaming.py")
    hung, failed = program.each([["hang", "Ada", "Bob"], ["fail"]])
    late = validate_envelope(hung.json())
    assert (late["error"]["code"], late["data"]) == ("TIMEOUT", [{"name": "Ada"}, {"name": "Bob"}])
    assert late["meta"]["partial"] is True
    assert (failed.json()["error"]["code"], failed.json()["data"]) == ("NOT_FOUND", ["first"])


def test_the_library_and_mcp_clients_are_informed_of_each_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMING_TOKEN", "s3cr3t-Value")
    items: list[object] = []
    with testing.calls(app) as call:
        testing.assert_ok(call.with_options("count", {"to": 3}, on_item=items.append), [1, 2, 3])
        testing.assert_ok(call.with_options("tell", {}, on_item=items.append), ["***"])
    assert items == [1, 2, 3, "***"]

    async def test() -> None:
        seen: list[tuple[object, ...]] = []

        async def note(*progress: object) -> None:
            seen.append(progress)

        async with testing.client(app) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert list(tools["count"].input_schema["properties"]) == ["to", "pause"]
            counted = await client.call_tool("count", {"to": 3, "pause": 0.2}, progress_callback=note)
            assert counted.structured_content == {"result": [1, 2, 3]}
        assert (1.0, None, "1") in seen

    asyncio.run(asyncio.wait_for(test(), 60))
