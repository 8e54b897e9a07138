"""`shotclock serve ui`: a page looked at and acted on through MCP, with the budgets that executions have everywhere."""

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shotclock.ui.payload import ACTION_TYPES, Matcher
from shotclock.ui.verbs import VERBS
from tests.ui.conftest import act, execution
from tests.ui.pages import Session, is_alive, session_in

from .client import MODERN, connected, envelope_in

pytestmark = pytest.mark.slow

TOOLS = {
    "ui_open", "ui_snapshot", "ui_click", "ui_type", "ui_key", "ui_select", "ui_hover", "ui_upload", "ui_scroll",
    "ui_read", "ui_tabs", "ui_dialog", "ui_wait", "ui_expect", "ui_screenshot", "ui_execute",
}  # fmt: skip
# The compact JSON of the tools of @playwright/mcp 0.0.83 has 20,286 bytes.
MOST_BYTES = 16_000


class Tools:
    def __init__(self, client: Any) -> None:
        self.client = client

    async def answer(self, name: str, **arguments: Any) -> Any:
        return envelope_in(await self.client.call_tool(f"ui_{name}", arguments))

    async def data(self, name: str, **arguments: Any) -> Any:
        """The data of a call that went well."""
        envelope = await self.answer(name, **arguments)
        assert envelope["ok"], envelope
        return envelope["data"]

    async def error(self, name: str, **arguments: Any) -> Any:
        envelope = await self.answer(name, **arguments)
        assert not envelope["ok"], envelope
        error = envelope["error"]
        return {**error, "code": error.get("context", {}).get("raised", error["code"])}


@asynccontextmanager
async def tools(*options: str) -> AsyncIterator[Tools]:
    async with connected("stdio", MODERN, *options, target="ui") as (client, _):
        yield Tools(client)


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 100))


def ref_of(text: str, node: str) -> str:
    line = next(line for line in text.splitlines() if node in line)
    return line.partition("[ref=")[2].partition("]")[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session_in(tmp_path_factory.mktemp("ui") / "home") as session:
        assert session.run(session.open("/"))["ok"]
        yield session


def test_a_model_looks_clicks_types_and_checks(page: Session) -> None:
    async def scenario() -> None:
        async with tools() as ui:
            assert (await ui.data("open", uri=page.url))["page"]["title"] == "Shop"
            text = (await ui.data("snapshot"))["text"]
            assert (await ui.answer("click", ref=ref_of(text, 'button "Buy"')))["meta"]["side_effects"] == "complete"
            assert (await ui.data("expect", text="bought", resourceId="said"))["met"] is True
            missed = await ui.error("expect", text="sold", resourceId="said", timeoutMs=300)
            assert missed["code"] == "WAIT_TIMEOUT" and missed["context"]["found"] == "bought"
            await ui.data("type", text="tea", contentDescEquals="Search", submit=True)
            assert (await ui.data("read", css="#q"))["text"] == "tea"
            assert (await ui.data("read", textEquals="Price", value=True))["value"] == "5 EUR"
            assert await ui.data("scroll", direction="down") | {"page": 0} == {"moved": True, "page": 0}
            assert "scrolls" in await ui.data("scroll", textEquals="Bottom")
            assert (await ui.error("wait", textEquals="Nowhere", timeoutMs=300))["code"] == "WAIT_TIMEOUT"
            assert (await ui.error("wait"))["code"] == "MISSING_ARGUMENT"
            picture = await ui.client.call_tool("ui_screenshot", {})
            image = next(each for each in picture.content if each.type == "image")
            assert base64.b64decode(image.data).startswith(b"\x89PNG") and image.mime_type == "image/png"
            assert "image" not in json.loads(picture.content[0].text)

    run(scenario())


def test_a_model_follows_links_keys_tabs_and_dialogs(page: Session) -> None:
    async def scenario() -> None:
        async with tools() as ui:
            await ui.data("open", uri=f"{page.url}/opens")
            (opened,) = (await ui.data("click", textEquals="Blank"))["opened"]
            assert opened == {"kind": "tab", "tab": opened["tab"], "where": f"{page.url}/details", "title": "Details"}
            first, *_ = (await ui.data("tabs"))["tabs"]
            assert (await ui.data("tabs", action="switch", tab=first["tab"]))["where"] == f"{page.url}/opens"
            await ui.data("tabs", action="close", tab=opened["tab"])
            changed = (await ui.data("click", textEquals="Same"))["page"]
            assert (changed["state"], changed["title"]) == ("changed", "Details")
            assert (await ui.data("wait", expectedUrl="*/details"))["where"].endswith("/details")
            assert (await ui.data("key", key="back"))["where"].endswith("/opens")

            await ui.data("open", uri=f"{page.url}/asks")
            (asked,) = (await ui.data("click", textEquals="Prompt"))["dialogs"]
            assert asked == {"type": "prompt", "message": "Name?", "answer": "pending", "default": "Bob"}
            assert (await ui.data("dialog", accept=True, text="Ada"))["dialogs"][0]["answer"] == "accepted"
            assert (await ui.data("read", css="#said"))["text"] == "Ada"
            await ui.data("click", textEquals="Ask")
            assert (await ui.data("dialog", accept=False))["dialogs"][0]["answer"] == "dismissed"

            await ui.data("open", uri=f"{page.url}/inputs")
            assert (await ui.data("select", contentDescEquals="Colour", options=["Blue"]))["selected"] == ["b"]
            await ui.data("hover", textEquals="Menu")
            assert (await ui.data("wait", textEquals="Open me"))["state"] == "visible"
            await ui.data("open", uri=f"{page.url}/frames")
            await ui.data("click", role="button", textEquals="Inner")
            assert 'button "Deep"' in (await ui.data("snapshot", css="iframe >> nth=0"))["text"]

    run(scenario())


def test_only_files_of_the_folder_of_the_server_are_uploaded(page: Session, tmp_path: Path) -> None:
    folder, outside = tmp_path / "shared", tmp_path / "outside.txt"
    (folder / "inner").mkdir(parents=True)
    outside.write_text("secret")
    (folder / "inner" / "a.txt").write_text("a")
    (folder / "link.txt").symlink_to(outside)
    (folder / "fine.txt").symlink_to(folder / "inner" / "a.txt")

    async def scenario() -> None:
        input_ = {"css": "#file"}
        async with tools("--files", os.fspath(folder)) as ui:
            await ui.data("open", uri=f"{page.url}/inputs")
            for path in ("inner/a.txt", os.fspath(folder / "inner" / "a.txt"), "fine.txt"):
                assert (await ui.data("upload", paths=[path], **input_))["files"] == ["a.txt"]
            for path in ("../outside.txt", os.fspath(outside), "link.txt", "none.txt", "inner", "/etc/passwd", "a\0b"):
                refused = await ui.error("upload", paths=["fine.txt", path], **input_)
                assert refused["code"] == "NOT_ALLOWED" and "is not a file below the folder" in refused["message"]
            whole = {"id": "u", "type": "upload_file", "params": {"matcher": input_, "paths": ["link.txt"]}}
            assert (await ui.error("execute", execution={"actions": [whole]}))["code"] == "NOT_ALLOWED"
        async with tools() as ui:
            assert "--files" in (await ui.error("upload", paths=["a.txt"], **input_))["message"]

    run(scenario())


def test_an_execution_is_typed_and_its_head_may_be_left_out(page: Session) -> None:
    async def scenario() -> None:
        async with tools() as ui:
            actions = [
                {"id": "open", "type": "open_uri", "params": {"uri": page.url}},
                act("wait_for_node", "w", "Shop"),
            ]
            short = await ui.data("execute", execution={"actions": actions, "timeoutMs": 20000})
            assert [step["id"] for step in short["stepResults"]] == ["open", "w"]
            whole = execution(act("wait_for_node", "w", "Shop", timeoutMs=5000), timeout_ms=9000)
            assert (await ui.data("execute", execution=whole))["commandId"] == whole["commandId"]
            refused = await ui.answer("execute", execution={**whole, "timeoutMs": 5000})
            assert refused["error"]["context"]["raised"] == "EXECUTION_VALIDATION_FAILED"
            assert refused["meta"]["side_effects"] == "none"
            written = {"id": "p", "type": "take_screenshot", "params": {"path": "/tmp/x.png"}}
            assert (await ui.error("execute", execution={"actions": [written]}))["code"] == "NOT_ALLOWED"
            phone = await ui.error("hover", textEquals="x", device="android:nowhere")
            assert phone["code"] == "ACTION_UNSUPPORTED" and "nothing was sent" in phone["message"]

    run(scenario())


def test_the_list_of_tools_is_short_and_has_the_words_of_payloads(page: Session) -> None:
    async def scenario() -> None:
        async with tools() as ui:
            listed = (await ui.client.list_tools()).tools
            written = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in listed]
            size = len(json.dumps(written, separators=(",", ":")))
            assert {tool.name for tool in listed} == TOOLS and size <= MOST_BYTES, size
            schemas = {each["name"]: each["inputSchema"]["properties"] for each in written}
            (actions,) = [schemas["ui_execute"]["execution"]["properties"]["actions"]]
            params = actions["items"]["properties"]["params"]
            assert actions["items"]["properties"]["type"]["enum"] == list(ACTION_TYPES)
            for name, kind in ACTION_TYPES.items():
                assert f"{name}(" in params["description"]
                assert {info.keys[0] for info in kind.model_fields.values()} - {"path"} <= params["properties"].keys()
            criteria = {info.keys[0] for info in Matcher.model_fields.values()} - {"contentDescContains"}
            assert criteria <= schemas["ui_click"].keys() and schemas["ui_click"]["timeoutMs"]["default"] == 10_000
            assert schemas["ui_scroll"]["direction"]["enum"] == ["up", "down", "left", "right"]
            assert {verb.tool for verb in VERBS.values() if verb.tool} <= schemas.keys()
            read_only = {tool.name for tool in listed if tool.annotations and tool.annotations.read_only_hint}
            assert read_only == {"ui_snapshot", "ui_read", "ui_screenshot", "ui_wait", "ui_expect"}

    run(scenario())


def test_a_device_that_a_tool_had_to_start_keeps_its_page_until_the_server_ends(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with session_in(tmp_path_factory.mktemp("ui") / "home") as fresh:

        async def scenario() -> int:
            async with tools() as ui:
                opened = await ui.answer("open", uri=fresh.url)
                assert opened["ok"] and opened["warnings"] == []
                status = fresh.status()
                assert status is not None
                assert 'button "Buy"' in (await ui.data("snapshot"))["text"]
                assert fresh.status() == status
                return int(status["pid"])

        assert not is_alive(asyncio.run(asyncio.wait_for(scenario(), 100)))
