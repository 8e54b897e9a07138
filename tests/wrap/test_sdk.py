"""The SDK's own client and server, of both generations of the protocol, with and without the wrap."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from tests.wrap.client import ENVELOPE

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

SDK_SERVER = [sys.executable, str(Path(__file__).with_name("sdk_server.py"))]
NO_ANSWER_S = 60.0
WRAP = [sys.executable, "-m", "shotclock", "wrap", "--tool", "hang=timeout:300ms", "--"]


def client_of(argv: list[str], mode: str) -> Client:
    parameters = StdioServerParameters(command=argv[0], args=argv[1:], env=dict(os.environ))
    return Client(parameters, mode=mode, read_timeout_seconds=NO_ANSWER_S)


@pytest.mark.parametrize("mode", ["2026-07-28", "legacy", pytest.param("auto", marks=pytest.mark.soak)])
def test_a_client_sees_the_same_server_and_survives_its_failures(
    mode: str, validate_envelope: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    async def look(argv: list[str]) -> list[Any]:
        async with client_of(argv, mode) as client:
            tools = await client.list_tools()
            sums = [await client.call_tool("add", {"a": number, "b": 1}) for number in range(3)]
            return [tools.model_dump_json(), *(each.model_dump_json() for each in sums)]

    async def break_it() -> None:
        async with client_of([*WRAP, *SDK_SERVER], mode) as client:
            await client.list_tools()
            for tool, code in (("hang", "TIMEOUT"), ("crash", "CONNECTION_LOST")):
                failed = await client.call_tool(tool, {})
                assert failed.is_error and "shotclock: tool" in failed.content[0].text  # type: ignore[union-attr]
                envelope = validate_envelope(json.loads(failed.model_dump_json(by_alias=True))["_meta"][ENVELOPE])
                assert envelope["error"]["code"] == code
                added = await client.call_tool("add", {"a": 1, "b": 2})
                assert added.structured_content == {"result": 3}

    assert asyncio.run(look(SDK_SERVER)) == asyncio.run(look([*WRAP, *SDK_SERVER]))
    asyncio.run(break_it())


def test_pins_and_hints_hold_for_clients_of_every_revision(tmp_path: Path) -> None:
    lock, log = tmp_path / "lock.json", tmp_path / "log.txt"

    async def use(mode: str) -> None:
        wrap = f"exec {sys.executable} -m shotclock wrap --read-only --lock {lock} -- {' '.join(SDK_SERVER)} 2>>{log}"
        async with client_of(["sh", "-c", wrap], mode) as client:
            added = await client.call_tool("add", {"a": 1, "b": 2})
            assert added.structured_content == {"result": 3}
            denied = await client.call_tool("pid", {})
            assert denied.is_error and "readOnlyHint" in denied.content[0].text  # type: ignore[union-attr]
            assert len((await client.list_tools()).tools) == 4

    for mode in ("legacy", "2026-07-28"):
        asyncio.run(use(mode))
    assert log.read_text().count("pinned 4 tools") == 1 and "blocked" not in log.read_text()
