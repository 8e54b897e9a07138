"""`shotclock serve ui`: a page looked at and acted on through MCP, with the budgets that executions have everywhere."""

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ui.conftest import act, execution
from tests.ui.pages import Session, is_alive, session_in

from .client import connected, envelope_in

pytestmark = pytest.mark.slow

TOOLS = {
    "ui_execute",
    "ui_open",
    "ui_snapshot",
    "ui_click",
    "ui_type",
    "ui_wait",
    "ui_expect",
    "ui_screenshot",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session_in(tmp_path_factory.mktemp("ui") / "home") as session:
        assert session.run(session.open("/"))["ok"]
        yield session


def test_a_model_looks_clicks_types_and_checks(page: Session) -> None:
    async def scenario() -> None:
        async with connected("stdio", target="ui") as (client, _):
            assert TOOLS <= {tool.name for tool in (await client.list_tools()).tools}

            async def call(name: str, **arguments: Any) -> Any:
                result = await client.call_tool(name, arguments)
                return envelope_in(result)

            assert (await call("ui_open", target=page.url))["ok"]
            text = (await call("ui_snapshot"))["data"]["text"]
            line = next(line for line in text.splitlines() if 'button "Buy"' in line)
            ref = line.partition("[ref=")[2].partition("]")[0]
            assert (await call("ui_click", ref=ref))["meta"]["side_effects"] == "complete"
            assert (await call("ui_expect", text="bought", id="said"))["data"]["met"] is True
            missed = await call("ui_expect", text="sold", id="said", timeout_ms=300)
            assert missed["error"]["code"] == "WAIT_TIMEOUT"
            assert missed["error"]["context"]["found"] == "bought"
            assert (await call("ui_type", words="Ada", label="Name"))["ok"]
            assert (await call("ui_wait", text="Nowhere", timeout_ms=300))["error"]["code"] == "WAIT_TIMEOUT"
            assert (await call("ui_wait"))["error"]["context"]["raised"] == "MISSING_ARGUMENT"
            whole = execution(act("wait_for_node", "w", "Shop", timeoutMs=5000), timeout_ms=9000)
            told = await call("ui_execute", execution=whole)
            assert told["data"]["stepResults"][0]["id"] == "w"
            refused = await call("ui_execute", execution=whole, timeout_ms=5000)
            assert refused["error"]["context"]["raised"] == "EXECUTION_VALIDATION_FAILED"
            assert refused["meta"]["side_effects"] == "none"
            picture = await client.call_tool("ui_screenshot", {})
            image = next(each for each in picture.content if each.type == "image")
            assert base64.b64decode(image.data).startswith(b"\x89PNG") and image.mime_type == "image/png"
            assert "image" not in json.loads(picture.content[0].text)

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_a_device_that_a_tool_had_to_start_keeps_its_page_until_the_server_ends(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with session_in(tmp_path_factory.mktemp("ui") / "home") as fresh:

        async def scenario() -> int:
            async with connected("stdio", target="ui") as (client, _):
                opened = envelope_in(await client.call_tool("ui_open", {"target": fresh.url}))
                assert opened["ok"] and opened["warnings"] == []
                status = fresh.status()
                assert status is not None
                shown = envelope_in(await client.call_tool("ui_snapshot", {}))
                assert 'button "Buy"' in shown["data"]["text"]
                assert fresh.status() == status
                return int(status["pid"])

        assert not is_alive(asyncio.run(asyncio.wait_for(scenario(), 100)))
