"""The adapters of `wrap` behind each other: several servers, one of them over HTTP, offered over HTTP."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from mcp import Client

from tests.wrap.http_client import front
from tests.wrap.test_http_front import NO_ANSWER_S, SDK_SERVER
from tests.wrap.test_url import serving

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28", "auto"])
def test_servers_over_stdio_and_http_are_offered_as_one_over_http(mode: str, tmp_path: Path) -> None:
    async def use(url: str) -> tuple[list[str], list[str]]:
        async with Client(url, mode=mode, read_timeout_seconds=NO_ANSWER_S) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            sums = [await client.call_tool(f"{each}_add", {"a": 1, "b": 2}) for each in ("near", "far")]
            return names, [each.content[0].text for each in sums]  # type: ignore[union-attr]

    with serving("sdk_http_server.py") as port:
        far = {"url": f"http://127.0.0.1:{port}/mcp"}
        near = {"command": sys.executable, "args": SDK_SERVER[1:]}
        file = tmp_path / "mcp.json"
        file.write_text(json.dumps({"mcpServers": {"near": near, "far": far}}))
        with front("--config", str(file)) as served:
            names, sums = asyncio.run(use(served.url))
    assert {"near_add", "far_add"} <= set(names)
    assert sums == ["3", "3"]
