"""The SDK's client before several servers, of both generations of the protocol."""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp import Client, StdioServerParameters

from tests.wrap.several import entry, named, wrap_of

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

SDK_NAMED = [sys.executable, str(Path(__file__).with_name("sdk_named_server.py"))]
NO_ANSWER_S = 60.0


def sdk(name: str, **options: Any) -> dict[str, Any]:
    return entry([*SDK_NAMED, name], **options)


def client_of(folder: Path, servers: dict[str, Any], mode: str) -> Client:
    argv = wrap_of(folder / "wrap.yaml", servers)
    parameters = StdioServerParameters(command=argv[0], args=argv[1:], env=dict(os.environ))
    return Client(parameters, mode=mode, read_timeout_seconds=NO_ANSWER_S)


async def use(client: Client, names: str) -> None:
    tools = {tool.name for tool in (await client.list_tools()).tools}
    assert {f"{name}_who" for name in names} <= tools
    for number, name in enumerate(names):
        called = await client.call_tool(f"{name}_who", {"n": number})
        assert called.structured_content == {"result": f"sdk{name} {number}"}
        prompt = await client.get_prompt(f"{name}_greet")
        assert prompt.messages[0].content.text == f"Hello from sdk{name}"  # type: ignore[union-attr]
        read = await client.read_resource(f"sdk{name}://text")
        assert read.contents[0].text == f"text of sdk{name}"  # type: ignore[union-attr]
    seen: list[Any] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        seen.append(message)

    await client.call_tool("b_slow", {}, progress_callback=note)
    assert seen == ["sdkb"]


@pytest.mark.parametrize("mode", ["2026-07-28", "legacy", "auto"])
def test_clients_of_every_revision_use_all_servers(mode: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with client_of(tmp_path, {"a": sdk("sdka"), "b": sdk("sdkb")}, mode) as client:
            await use(client, "ab")
            assert client.protocol_version == ("2025-11-25" if mode == "legacy" else "2026-07-28")
            if mode != "2026-07-28":
                assert client.instructions == "## a\n\nUse sdka.\n\n## b\n\nUse sdkb."

    asyncio.run(run())


def test_one_older_server_makes_all_speak_the_older_revision(tmp_path: Path) -> None:
    async def run() -> None:
        servers = {"a": sdk("sdka"), "b": sdk("sdkb"), "c": named("x")}
        async with client_of(tmp_path, servers, "auto") as client:
            await use(client, "ab")
            assert client.protocol_version == "2025-06-18"
            assert "c_same" in {tool.name for tool in (await client.list_tools()).tools}

    asyncio.run(run())


def test_a_server_that_cannot_start_does_not_change_the_revision(tmp_path: Path) -> None:
    async def run() -> None:
        servers = {"a": sdk("sdka"), "b": sdk("sdkb"), "c": entry(["/nowhere/at-all"])}
        async with client_of(tmp_path, servers, "auto") as client:
            await use(client, "ab")
            assert client.protocol_version == "2026-07-28"
            assert "cannot be started" in str(client.instructions)

    asyncio.run(run())


def test_one_subscription_has_the_changes_of_all_servers(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_of(tmp_path, {"a": sdk("sdka"), "b": sdk("sdkb")}, "auto") as client:
            async with client.listen(tools_list_changed=True) as subscription:
                assert subscription.honored.tools_list_changed
                events = aiter(subscription)
                for name in "ab":
                    await client.call_tool(f"{name}_change", {})
                    event = await asyncio.wait_for(anext(events), NO_ANSWER_S)
                    assert type(event).__name__ == "ToolsListChanged"
            await use(client, "ab")

    asyncio.run(run())


def wrap_process(name: str) -> psutil.Process:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # another child may end meanwhile
            if f"--name={name}" in child.cmdline():
                return child
    raise AssertionError(f"no wrap of {name}")


def test_a_subscription_outlives_the_wrap_of_a_server(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_of(tmp_path, {"a": sdk("sdka"), "b": sdk("sdkb")}, "auto") as client:
            async with client.listen(tools_list_changed=True) as subscription:
                events = aiter(subscription)
                wrap_process("b").kill()
                await asyncio.wait_for(anext(events), NO_ANSWER_S)  # ours, because the lists may have changed
                await use(client, "ab")
                await client.call_tool("b_change", {})
                await asyncio.wait_for(anext(events), NO_ANSWER_S)

    asyncio.run(run())
