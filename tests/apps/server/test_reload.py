"""`serve --reload`: an author edits the program while clients are connected."""

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp import Client
from mcp_types import ElicitResult, ToolListChangedNotification

from tests.apps.server.client import LEGACY, MODERN, NO_ANSWER_S, connected, run, served, url_said_by
from tests.calls.bounds import eventually

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

PROGRAM = '''
import os, time
from shotclock import App, Context
import wording

app = App("edited")
{more}

@app.command(mutates=False)
def version() -> str:
    """Return the version of the program."""
    return wording.VERSION


@app.command(mutates=False)
def wait_for(path: str) -> str:
    """Return the version once a file is there."""
    while not os.path.exists(path):
        time.sleep(0.01)
    return wording.VERSION


@app.command(mutates=False)
def ask(ctx: Context) -> {returned}:
    """Ask, and return the version."""
    ctx.ask("Ready?", bool)
    return {value}
'''
MORE = '''
@app.resource("notes://1")
def note() -> str:
    """A note."""
    return "noted"

@app.prompt
def greet() -> str:
    """Greet."""
    return "hello"
'''


class Author:
    """Edits the program in a folder. The times of its edits are long ago: such a change needs no time to settle."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.edits = folder, 0
        self.write("wording.py", 'VERSION = "first"')
        self.write("tool.py", self.program())

    @staticmethod
    def program(more: str = "", returned: str = "str", value: str = "wording.VERSION") -> str:
        return PROGRAM.format(more=more, returned=returned, value=value)

    def write(self, name: str, text: str) -> None:
        self.edits += 1
        written = self.folder / f"{name}.new"
        written.write_text(text)
        long_ago = time.time() - 3600 + 2 * self.edits
        os.utime(written, (long_ago, long_ago))
        written.replace(self.folder / name)


def target_of(author: Author) -> str:
    return f"{author.folder / 'tool.py'}:app"


async def until(client: Client, tool: str, answer: str) -> None:
    """Call until the program of that version answers."""
    async with asyncio.timeout(NO_ANSWER_S):
        while (await client.call_tool(tool, {})).content[0].text != answer:  # type: ignore[union-attr]
            await asyncio.sleep(0.02)


async def has_gone(worker: psutil.Process) -> None:
    async with asyncio.timeout(NO_ANSWER_S):
        while worker.is_running():
            await asyncio.sleep(0.02)


def test_later_calls_have_the_new_program_and_older_clients_are_informed(tmp_path: Path) -> None:
    author, opened, informed = Author(tmp_path), tmp_path / "open", asyncio.Event()

    async def note(message: Any) -> None:
        if isinstance(message, ToolListChangedNotification):
            informed.set()

    async def scenario() -> None:
        options: dict[str, Any] = {"target": target_of(author), "message_handler": note}
        async with connected("stdio", LEGACY, "--reload", **options) as (client, server):
            tools = client.server_capabilities.tools
            assert tools is not None and tools.list_changed
            waiting = asyncio.create_task(client.call_tool("wait_for", {"path": str(opened)}))
            await until(client, "version", "first")
            workers = [child for child in server.children(recursive=True) if child.name() == "shotclock-work"]
            assert workers
            author.write("wording.py", 'VERSION = "second"')
            await until(client, "version", "second")
            assert not informed.is_set()  # the lists are the same
            author.write("tool.py", author.program('@app.command(mutates=False)\ndef more() -> str: return "more"\n'))
            await asyncio.wait_for(informed.wait(), NO_ANSWER_S)
            assert "more" in [tool.name for tool in (await client.list_tools()).tools]
            opened.touch()
            answered = await waiting
            assert (answered.is_error, answered.content[0].text) == (False, "first")
            for worker in workers:
                await has_gone(worker)
            # An import that hangs is given up when the author edits again.
            importing = tmp_path / "importing"
            author.write("wording.py", f"import time; open({str(importing)!r}, 'w').close(); time.sleep(600)")
            async with asyncio.timeout(NO_ANSWER_S):
                while not importing.exists():
                    await asyncio.sleep(0.02)
            author.write("wording.py", 'VERSION = "third"')
            await until(client, "version", "third")

    run(scenario())


def test_a_program_that_cannot_be_imported_leaves_the_former_one_and_listeners_are_informed(tmp_path: Path) -> None:
    author = Author(tmp_path)

    async def scenario(url: str, said: Any) -> None:
        async def until_said(words: bytes) -> None:
            while words not in said():  # bounded by `run`
                await asyncio.sleep(0.02)

        async def answer(context: Any, params: Any) -> ElicitResult:
            author.write("tool.py", author.program(MORE, "int", "7"))
            await until_said(b"reloaded ")
            return ElicitResult(action="accept", content={"answer": True})

        async def agree(context: Any, params: Any) -> ElicitResult:
            return ElicitResult(action="accept", content={"answer": True})

        async with (
            Client(url, mode=MODERN, read_timeout_seconds=NO_ANSWER_S, elicitation_callback=answer) as asked,
            Client(url, mode=MODERN, read_timeout_seconds=NO_ANSWER_S, elicitation_callback=agree) as plain,
        ):
            every = {"tools_list_changed": True, "resources_list_changed": True, "prompts_list_changed": True}
            async with plain.listen(**every) as changes:
                # The paused call ends in the program in which it began, with the schema that was listed then.
                await asked.list_tools()
                old = await asked.call_tool("ask", {})
                assert old.structured_content == {"result": "first"}
                kinds = {type(await asyncio.wait_for(anext(changes), NO_ANSWER_S)).__name__ for _ in range(3)}
                assert kinds == {"ToolsListChanged", "ResourcesListChanged", "PromptsListChanged"}
            assert (await plain.read_resource("notes://1")).contents[0].text == "noted"
            assert (await plain.get_prompt("greet")).messages[0].content.text == "hello"
            author.write("helper.py", "nothing here: a mistake")
            author.write("tool.py", "import helper\n" + author.program())
            await until_said(b"stays as it was: TARGET_UNUSABLE")
            assert (await plain.call_tool("ask", {})).content[0].text == "7"
            author.write("helper.py", "")  # it was never imported
            await until(plain, "version", "first")
            while (await plain.list_prompts()).prompts:  # bounded by `run`
                await asyncio.sleep(0.02)

    with served("serve", target_of(author), "--http", "127.0.0.1:0", "--reload") as process:
        url, heard = url_said_by(process), bytearray()

        def said() -> bytes:
            assert process.stderr is not None
            heard.extend(process.stderr.read() or b"")
            return bytes(heard)

        run(scenario(url, said))
        importing = tmp_path / "importing"
        author.write("helper.py", f"import time\nopen({str(importing)!r}, 'w').close()\ntime.sleep(1000)")
        eventually(importing.exists, within=NO_ANSWER_S)
        process.terminate()  # does not wait for the import
        assert process.wait(10) == 143
        assert len(re.findall(rb"shotclock: reloaded ", said())) == 2


def test_a_server_without_reload_announces_no_changes(tmp_path: Path) -> None:
    author = Author(tmp_path)
    author.write("tool.py", author.program(MORE))

    async def scenario() -> None:
        async with connected("stdio", "auto", target=target_of(author)) as (client, _):
            found = client.server_capabilities
            for each in (found.tools, found.resources, found.prompts):
                assert each is not None and not each.list_changed
            async with client.listen(tools_list_changed=True, resource_subscriptions=["notes://1"]) as changes:
                assert not changes.honored.tools_list_changed
                assert changes.honored.resource_subscriptions == ["notes://1"]

    run(scenario())
