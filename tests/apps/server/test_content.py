"""Content in results: images, audio, files and links, alone or among other values."""

import base64
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from shotclock import Audio, EmbeddedResource, Failure, File, Image, Message, ResourceLink
from shotclock.core.arguments import to_valid_json
from tests.apps.server.client import SOME_TRANSPORTS, connected, envelope_in, run

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\x00\x00"

PROGRAM = """
    import base64
    from pathlib import Path
    from typing import Any
    from mcp_types import TextContent
    from shotclock import App, Audio, EmbeddedResource, Failure, File, Image, ResourceLink

    app = App("content")
    PNG = base64.b64decode({png!r})
    WAV = {wav!r}

    @app.command(mutates=False)
    def image() -> Image:
        return Image(data=PNG, format="png", annotations={{"audience": ["user"]}})

    @app.command(mutates=False)
    def mixed() -> list[Any | Image]:
        return ["a text", Image(data=PNG), {{"a": 1}}, Audio(data=WAV), ResourceLink("docs://readme"), 3]

    @app.command(mutates=False)
    def without_annotation():
        return [EmbeddedResource("test://x", text="inside", mime_type="text/plain"), File(data=b"a,b", format="csv")]

    @app.command(mutates=False)
    def of_the_sdk() -> TextContent:
        return TextContent(type="text", text="hello")

    @app.command(mutates=False)
    def undeclared() -> list[object]:
        return [Image(data=PNG)]

    @app.command(mutates=False)
    def anything() -> list:
        return ["here:", Image(data=PNG)]

    @app.command(mutates=False)
    def missing() -> Image:
        return Image(path="/nowhere/x.png")

    @app.command(mutates=False)
    def nine_megabytes() -> Image:
        return Image(data=PNG + bytes(9_000_000), format="png")

    @app.command(mutates=False)
    def many() -> list[Image]:
        return [Image(data=PNG + bytes(1_000_000), format="png") for _ in range(8)]

    @app.command(mutates=False)
    def looks_like_content() -> dict[str, str]:
        return {{"type": "text", "text": "a value"}}

    @app.command
    def fails() -> None:
        raise Failure("COMMAND_FAILED", "half of it", data=[Image(data=PNG)])

    if __name__ == "__main__":
        app()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    file = tmp_path / "content_app.py"
    file.write_text(textwrap.dedent(PROGRAM).format(png=base64.b64encode(PNG).decode(), wav=WAV))
    return file


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "mode"), SOME_TRANSPORTS)
def test_content_arrives_as_blocks_of_the_protocol(program: Path, transport: str, mode: str) -> None:
    encoded = base64.b64encode(PNG).decode()
    image = {"type": "image", "data": encoded, "mimeType": "image/png"}

    async def scenario() -> None:
        async with connected(transport, mode, target=f"{program}:app") as (client, _):

            async def blocks_of(name: str) -> list[Any]:
                result = await client.call_tool(name, {})
                assert not result.is_error and result.structured_content is None, result
                assert envelope_in(result)["ok"]
                return [block.model_dump(by_alias=True, exclude_none=True) for block in result.content]

            assert await blocks_of("image") == [{**image, "annotations": {"audience": ["user"]}}]
            assert await blocks_of("mixed") == [
                {"type": "text", "text": "a text"},
                image,
                {"type": "text", "text": '{"a":1}'},
                {"type": "audio", "data": base64.b64encode(WAV).decode(), "mimeType": "audio/wav"},
                {"type": "resource_link", "uri": "docs://readme", "name": "readme"},
                {"type": "text", "text": "3"},
            ]
            assert [block["resource"] for block in await blocks_of("without_annotation")] == [
                {"uri": "test://x", "mimeType": "text/plain", "text": "inside"},
                {"uri": "file:///resource.csv", "mimeType": "text/csv", "text": "a,b"},
            ]
            assert [block["type"] for block in await blocks_of("anything")] == ["text", "image"]
            assert await blocks_of("of_the_sdk") == [{"type": "text", "text": "hello"}]
            schemas = {tool.name: tool.output_schema for tool in (await client.list_tools()).tools}
            assert [schemas[name] for name in ("image", "mixed", "of_the_sdk", "anything")] == [None] * 4
            data = envelope_in(await client.call_tool("image", {}))["data"]
            assert data == {**image, "annotations": {"audience": ["user"]}}

    run(scenario())


@pytest.mark.slow
def test_content_that_cannot_be_sent_is_a_failure_that_says_why(program: Path) -> None:
    async def scenario() -> None:
        async with connected(target=f"{program}:app") as (client, _):
            undeclared = await _failure(client, "undeclared")
            assert "RESULT_INVALID" in undeclared and "-> list[str | Image]" in undeclared
            assert "NOT_FOUND: FileNotFoundError" in await _failure(client, "missing")
            assert "RESULT_TOO_LARGE: the data: 6.3 MB are the most" in await _failure(client, "nine_megabytes")
            assert "RESULT_TOO_LARGE" in await _failure(client, "many")
            declared = await client.call_tool("looks_like_content", {})
            assert declared.structured_content == {"type": "text", "text": "a value"}
            left = await client.call_tool("fails", {})
            assert left.is_error and [block.type for block in left.content] == ["text", "image"]

    run(scenario())


async def _failure(client: Client, tool: str) -> str:
    result = await client.call_tool(tool, {})
    assert result.is_error
    return str(result.content[0].text)  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_person_sees_a_placeholder_and_a_program_the_blocks(program: Path) -> None:
    def answer(*words: str) -> str:
        argv = [sys.executable, str(program), "mixed", *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, env=os.environ).stdout

    assert answer("--format=text").splitlines() == [
        "a text",
        "[image image/png, 70 B]",
        '{"a":1}',
        "[audio audio/wav, 20 B]",
        "[link readme: docs://readme]",
        "3",
    ]
    blocks = json.loads(answer("--format=json"))["data"]
    assert blocks[1] == {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"}


def test_the_type_is_that_of_the_format_the_bytes_or_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    (tmp_path / "b.svg").write_text("<svg/>")
    (tmp_path / "notes.md").write_text("# Notes")
    (tmp_path / "half.txt").write_bytes(b"\xff")
    types = [
        (Image(path=tmp_path / "a.jpg"), "image/jpeg"),
        (Image(path=str(tmp_path / "b.svg")), "image/svg+xml"),
        (Image(data=base64.b64encode(PNG).decode()), "image/png"),
        (Image(data=b"?", format="JPG"), "image/jpeg"),
        (Image(data=b"RIFF\x00\x00\x00\x00WEBPVP8 "), "image/webp"),
        (Audio(data=b"ID3\x04"), "audio/mpeg"),
        (Audio(data=b"?", format="m4a"), "audio/mp4"),
    ]
    assert [content.block["mimeType"] for content, _ in types] == [expected for _, expected in types]
    notes = File(path=tmp_path / "notes.md").block["resource"]
    assert notes == {"uri": (tmp_path / "notes.md").as_uri(), "mimeType": "text/markdown", "text": "# Notes"}
    assert File(path=tmp_path / "half.txt").block["resource"]["blob"] == "/w=="
    assert File(data=b"%PDF", format="pdf", name="a b").block["resource"]["uri"] == "file:///a%20b.pdf"


def test_a_mistake_is_reported_when_the_object_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "notes.txt").write_text("words")
    mistakes: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: Image(), ValueError, "either path or data"),
        (lambda: Image(path="x.png", data=PNG), ValueError, "either path or data"),
        (lambda: Image(data="/tmp/x.png"), ValueError, "base64"),
        (lambda: Image(data=b""), ValueError, "empty"),
        (lambda: Image(data=3), TypeError, "bytes or base64, not int"),  # type: ignore[arg-type]
        (lambda: Image(data=b"words"), ValueError, "no known kind of image"),
        (lambda: Image(data=WAV), ValueError, "no known kind of image"),
        (lambda: Image(data=PNG, format="image/png"), ValueError, "a format is a word"),
        (lambda: Image(path=tmp_path / "empty.png"), ValueError, "is empty"),
        (lambda: Image(path=tmp_path / "notes.txt"), ValueError, "notes.txt is no known kind of image"),
        (lambda: Image(path=tmp_path / "none.png"), FileNotFoundError, "none.png"),
        (lambda: Image(path="/dev/zero", format="png"), Failure, "6.3 MB are the most"),
        (lambda: Image(data=PNG, annotations={"audience": ["robots"]}), ValueError, "audience"),
        (lambda: Image(data=PNG, annotations={"prio": 1}), ValueError, "not prio"),
        (lambda: ResourceLink("readme"), ValueError, "scheme"),
        (lambda: EmbeddedResource("a://b"), ValueError, "either text or data"),
        (lambda: Message("x", role="system"), ValueError, "'user' or 'assistant'"),  # type: ignore[arg-type]
    ]
    for make, kind, words in mistakes:
        with pytest.raises(kind, match=words):
            make()


def test_content_inside_other_values_becomes_json() -> None:
    link = ResourceLink("a://b", name="b")
    block = {"type": "resource_link", "uri": "a://b", "name": "b"}
    assert to_valid_json({"links": [link], "path": Path("/x")}) == ({"links": [block], "path": "/x"}, [])
    assert to_valid_json(Message(link, role="assistant"))[0] == {"role": "assistant", "content": block}
    assert to_valid_json(Message({"a": 1}))[0] == {"role": "user", "content": {"type": "text", "text": '{"a":1}'}}
