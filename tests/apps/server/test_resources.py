"""Resources and templates over MCP: listed, read on the clock, and refused with a sentence."""

import asyncio
import base64
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError
from mcp_types import ResourceUpdatedNotification

from shotclock.core.envelope import ENVELOPE_KEY
from tests.apps.server.client import (
    LATE_S,
    LEGACY,
    MODERN,
    NO_ANSWER_S,
    ROOT,
    SOME_TRANSPORTS,
    command,
    connected,
    http_server,
    run,
)
from tests.processes import is_running
from tests.warm import starting_warm

PROGRAM = """
    import asyncio, json, os, time
    from shotclock import App, Context, EmbeddedResource, Failure, File, Image

    app = App("library", list_page_size={page_size})
    PNG = b"\\x89PNG\\r\\n\\x1a\\n"

    @app.command(
        mutates=False, title="Add", description="Add two numbers.", icons=["https://example.org/add.png"],
        open_world=False, meta={{"example.org/x": 1}},
    )
    def add(a: int, b: int) -> int:
        return a + b

    @app.resource(
        "docs://readme", mime_type="text/markdown", title="Read me",
        icons=["https://example.org/i.png", {{"src": "data:image/png;base64,AA==", "sizes": ["48x48"]}}],
        annotations={{"audience": ["user"], "priority": 0.5}}, meta={{"example.org/x": 1}},
    )
    def readme() -> str:
        "The first file to read."
        return "# Read me"

    @app.resource("docs://picture")
    def picture() -> bytes:
        return PNG

    @app.resource("docs://config", name="settings")
    async def config() -> dict:
        return {{"debug": True}}

    @app.resource("docs://several")
    def several() -> list:
        return ["text", Image(data=PNG), EmbeddedResource("docs://other", text="inside")]

    @app.resource("docs://nothing")
    def nothing() -> None:
        pass

    @app.resource("users://{{id}}/posts/{{post}}", mime_type="application/json")
    def post(id: int, post: str, ctx: Context) -> dict:
        "A post of a user."
        return {{"id": id, "post": post, "has_time": ctx.remaining_ms() > 0}}

    @app.resource("files://{{path*}}")
    def file(path: str) -> str:
        return path

    @app.resource("search://notes{{?query,limit}}")
    def search(query: str = "", limit: int = 10) -> dict:
        return {{"query": query, "limit": limit}}

    @app.resource("slow://sync", timeout="500ms")
    def slow() -> str:
        time.sleep(60)
        return ""

    @app.resource("slow://long", timeout="60s")
    def long() -> str:
        with open(os.environ["STARTED"], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)
        return ""

    @app.resource("slow://blocked", timeout="500ms")
    async def blocked() -> str:
        time.sleep(60)
        return ""

    @app.resource("one://{{id}}", concurrency=1, timeout="60s")
    def one_at_a_time(id: str) -> str:
        if id == "first":
            long()
        return id

    @app.resource("shared://count", isolation="shared")
    async def count() -> str:
        global counted
        counted += 1
        return str(counted)

    counted = 0

    @app.resource("bad://crash")
    def crash() -> str:
        os._exit(3)

    @app.resource("bad://raises")
    def raises() -> str:
        raise ValueError("hunter2")

    @app.resource("bad://fails")
    def fails() -> str:
        raise Failure("COMMAND_FAILED", "the disk is full")

    @app.resource("bad://large")
    def large() -> str:
        return "x" * 9_000_000

    for number in range({many}):
        @app.resource(f"numbers://{{number}}", name=f"number {{number}}")
        def number(value: int = number) -> str:
            return str(value)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write(tmp_path, monkeypatch)


def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int = 0, page_size: int | None = None) -> str:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    file = tmp_path / "library.py"
    file.write_text(textwrap.dedent(PROGRAM).format(many=many, page_size=page_size))
    return f"{file}:app"


async def until(condition: Callable[[], Any]) -> Any:
    """What a condition returns once it holds."""
    give_up_at = time.monotonic() + NO_ANSWER_S
    while not (found := condition()):
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.02)
    return found


async def refused(client: Client, uri: str) -> Any:
    """The error of a read that fails."""
    with pytest.raises(MCPError) as raised:
        await client.read_resource(uri)
    return raised.value.error


@pytest.mark.parametrize(("transport", "mode"), SOME_TRANSPORTS)
def test_resources_are_listed_and_read(library: str, transport: str, mode: str) -> None:
    async def scenario() -> None:
        async with connected(transport, mode, target=library) as (client, _):

            async def contents(uri: str) -> list[Any]:
                read = await client.read_resource(uri)
                return [each.model_dump(by_alias=True, exclude_none=True) for each in read.contents]

            listed = {each.uri: each for each in (await client.list_resources()).resources}
            readme = listed["docs://readme"]
            assert (readme.name, readme.title, readme.mime_type) == ("readme", "Read me", "text/markdown")
            assert readme.description == "The first file to read."
            assert readme.icons and readme.icons[1].sizes == ["48x48"]
            assert readme.annotations and readme.annotations.priority == 0.5
            assert readme.meta == {"example.org/x": 1}
            assert listed["docs://config"].name == "settings"
            templates = (await client.list_resource_templates()).resource_templates
            assert [each.uri_template for each in templates] == [
                "users://{id}/posts/{post}",
                "files://{+path}",
                "search://notes{?query,limit}",
                "one://{id}",
            ]
            (add,) = (await client.list_tools()).tools
            assert (add.name, add.title, add.meta) == ("add", "Add", {"example.org/x": 1})
            assert add.description == "Add two numbers.\n\nAnswers within 30s."
            assert add.icons and add.icons[0].src == "https://example.org/add.png"
            assert add.annotations and (add.annotations.read_only_hint, add.annotations.open_world_hint) == (
                True,
                False,
            )

            assert await contents("docs://readme") == [
                {"uri": "docs://readme", "text": "# Read me", "mimeType": "text/markdown"}
            ]
            png = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
            assert await contents("docs://picture") == [
                {"uri": "docs://picture", "blob": png, "mimeType": "application/octet-stream"}
            ]
            assert await contents("docs://config") == [
                {"uri": "docs://config", "text": '{"debug":true}', "mimeType": "application/json"}
            ]
            assert await contents("docs://several") == [
                {"uri": "docs://several", "text": "text", "mimeType": "text/plain"},
                {"uri": "docs://several", "blob": png, "mimeType": "image/png"},
                {"uri": "docs://other", "text": "inside"},
            ]
            assert await contents("docs://nothing") == []
            (post,) = await contents("users://3/posts/caf%C3%A9%20au%20lait")
            assert post["text"] == '{"id":3,"post":"café au lait","has_time":true}'
            assert (await contents("files://a/b/c.txt"))[0]["text"] == "a/b/c.txt"
            assert (await contents("search://notes?limit=3&query=a+b"))[0]["text"] == '{"query":"a b","limit":3}'
            assert (await contents("search://notes"))[0]["text"] == '{"query":"","limit":10}'

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "mode"), SOME_TRANSPORTS)
def test_a_read_that_hangs_crashes_or_fails_is_an_error_with_a_sentence(
    library: str, transport: str, mode: str
) -> None:
    async def scenario() -> None:
        async with connected(transport, mode, target=library) as (client, _):
            began = time.monotonic()
            errors = await asyncio.gather(*(refused(client, f"slow://{each}") for each in ("sync", "blocked")))
            assert time.monotonic() - began < 0.5 + LATE_S + 5
            for error, name in zip(errors, ("sync", "blocked"), strict=True):
                assert error.code == -32001
                message = f"TIMEOUT: resource slow://{name} timed out after 500ms. It is safe to call it again."
                assert error.message == message
                assert error.data["uri"] == f"slow://{name}"
                assert error.data[ENVELOPE_KEY]["error"]["code"] == "TIMEOUT"
            assert (await refused(client, "bad://crash")).message.startswith("WORKER_CRASHED: ")
            raised = await refused(client, "bad://raises")
            assert raised.code == -32603 and "hunter2" not in raised.message
            failed = await refused(client, "bad://fails")
            assert failed.message.startswith("COMMAND_FAILED: the disk is full.")
            assert (await refused(client, "bad://large")).message.startswith("RESULT_TOO_LARGE: ")
            wrong = await refused(client, "users://x/posts/1")
            assert wrong.code == -32602 and wrong.message.startswith("ARG_ERROR: id: ")
            unknown = await refused(client, "docs://nowhere")
            assert unknown.code == (-32602 if mode == MODERN else -32002)
            assert (
                unknown.message == "there is no resource 'docs://nowhere'" and unknown.data["uri"] == "docs://nowhere"
            )
            for outside in ("files://../secret", "files://a/%2e%2e/b", "users://1/posts/a%2Fb", "files:///etc/passwd"):
                assert "there is no resource" in (await refused(client, outside)).message, outside
            named_as_tool = await client.call_tool("resource docs://readme", {})
            assert named_as_tool.is_error, "a resource is no tool"
            assert (await client.read_resource("docs://readme")).contents

    run(scenario())


@pytest.mark.parametrize(("transport", "mode"), [("stdio", MODERN), ("http", LEGACY)])
def test_a_cancelled_read_kills_its_process(library: str, tmp_path: Path, transport: str, mode: str) -> None:
    async def scenario() -> None:
        async with connected(transport, mode, target=library) as (client, _):
            reading = asyncio.create_task(client.read_resource("slow://long"))
            started = tmp_path / "started"
            pid = await until(lambda: started.exists() and started.read_text())
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await until(lambda: not is_running(int(pid)))
            assert (await client.read_resource("docs://readme")).contents

    run(scenario())


def test_a_resource_has_the_limits_and_the_place_of_a_command(library: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(target=library) as (client, _):
            first = asyncio.create_task(client.read_resource("one://first"))
            await until((tmp_path / "started").exists)
            held = await refused(client, "one://second")
            assert held.message.startswith("LOCK_HELD: ") and "safe to call it again after" in held.message
            first.cancel()
            reads = await asyncio.gather(*(client.read_resource("shared://count") for _ in range(5)))
            assert sorted(read.contents[0].text for read in reads) == ["1", "2", "3", "4", "5"]  # type: ignore[union-attr]

    run(scenario())


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_read_is_answered_when_the_server_is_stopped(library: str, tmp_path: Path, transport: str) -> None:
    async def scenario() -> None:
        async with connected(transport, target=library) as (client, server):
            reading = asyncio.create_task(refused(client, "slow://long"))
            await until((tmp_path / "started").exists)
            server.terminate()
            assert (await reading).message.startswith("CANCELLED: stopped: ")
            assert not is_running(int((tmp_path / "started").read_text()))

    run(scenario())


@pytest.mark.slow
def test_a_thousand_resources_come_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write(tmp_path, monkeypatch, many=1000, page_size=100)

    async def scenario() -> None:
        async with connected(target=target) as (client, _):
            uris: list[str] = []
            cursor, pages = None, 0
            while pages == 0 or cursor is not None:
                page = await client.list_resources(cursor=cursor)
                assert 0 < len(page.resources) <= 100
                uris += [each.uri for each in page.resources]
                cursor, pages = page.next_cursor, pages + 1
            assert pages == 11 and len(uris) == len(set(uris))
            assert {f"numbers://{number}" for number in range(1000)} <= set(uris)
            assert (await client.read_resource("numbers://999")).contents[0].text == "999"  # type: ignore[union-attr]
            for bad in ("", "x", "YWZ0ZXIgNw==", base64.urlsafe_b64encode(b"after 999999").decode()):
                with pytest.raises(MCPError) as raised:
                    await client.list_resources(cursor=bad)
                assert raised.value.error.code == -32602, bad
                assert "list it from the start" in raised.value.error.message

    run(scenario())


CHANGING = """
    import asyncio
    from shotclock import App, Context

    app = App("changing")

    @app.resource("notes://{id}")
    def note(id: str) -> str:
        return id

    @app.command
    def change(id: str, ctx: Context, times: int = 1) -> int:
        for _ in range(times):
            ctx.resource_updated(f"notes://{id}")
        return times

    @app.command(isolation="shared")
    async def change_shared(id: str, ctx: Context) -> str:
        await ctx.resource_updated(f"notes://{id}")
        return id

    if __name__ == "__main__":
        app()
"""


@pytest.fixture
def changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    file = tmp_path / "changing.py"
    file.write_text(textwrap.dedent(CHANGING))
    return file


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_stream_reports_the_changes_of_the_resources_that_it_names(changing: Path, transport: str) -> None:
    async def scenario() -> None:
        async with connected(transport, MODERN, target=f"{changing}:app") as (client, server):
            async with client.listen(resource_subscriptions=["notes://1", "notes://2"]) as changes:
                for tool, id in (("change", "3"), ("change", "1"), ("change_shared", "2")):
                    assert not (await client.call_tool(tool, {"id": id})).is_error
                seen = [str((await anext(changes)).uri) for _ in range(2)]  # type: ignore[union-attr]
                assert seen == ["notes://1", "notes://2"]
                if transport == "http":
                    server.terminate()
                    with pytest.raises(StopAsyncIteration):
                        await anext(changes)

    run(scenario())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:resources/")
@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_an_older_client_subscribes_to_single_resources(changing: Path, transport: str) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def note(message: Any) -> None:
        if isinstance(message, ResourceUpdatedNotification):
            seen.put_nowait(str(message.params.uri))

    async def scenario() -> None:
        async with listening(transport, f"{changing}:app", note) as client:
            await client.session.subscribe_resource("notes://1")
            with pytest.raises(MCPError) as raised:
                await client.session.subscribe_resource("docs://none")
            assert raised.value.error.code == -32002
            assert (await client.call_tool("change", {"id": "1"})).structured_content == {"result": 1}
            assert await asyncio.wait_for(seen.get(), NO_ANSWER_S) == "notes://1"
            await client.call_tool("change", {"id": "2"})
            await client.session.unsubscribe_resource("notes://1")
            await client.call_tool("change", {"id": "1"})
            await client.session.subscribe_resource("notes://3")
            await client.call_tool("change", {"id": "3", "times": 20})
            assert await asyncio.wait_for(seen.get(), NO_ANSWER_S) == "notes://3"

    run(scenario())


@asynccontextmanager
async def listening(transport: str, target: str, note: Any) -> AsyncIterator[Client]:
    """An older client that passes on its notifications."""
    options: dict[str, Any] = {"mode": LEGACY, "read_timeout_seconds": NO_ANSWER_S, "message_handler": note}
    if transport == "http":
        with http_server(target=target) as (url, _):
            async with Client(url, **options) as client:
                yield client
        return
    words = command(target)
    parameters = StdioServerParameters(command=words[0], args=words[1:], env=dict(os.environ), cwd=ROOT)
    with starting_warm():
        async with Client(parameters, **options) as client:
            yield client


def test_a_change_outside_a_server_is_no_error(changing: Path) -> None:
    argv = [sys.executable, str(changing), "change", "1", "--format=json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=os.environ)
    assert json.loads(done.stdout)["data"] == {"result": 1}
