"""Authors learn once that worker processes do not share a module global, where an App begins to serve."""

import asyncio
import subprocess
import sys
import warnings

import pytest

from shotclock.core.manifest import build_manifest
from shotclock.server.tools import tools_of
from tests.app.globals_app import app
from tests.server.client import ENDED_WITHIN_S, served
from tests.server.test_lifecycle import hear, say

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

USES = "(add_note uses NOTES; list_rows uses db; resource notes://all uses NOTES)"
REMEDY = "keep it in @app.lifespan and read ctx.state, or declare isolation='shared'; isolation='process'"


def test_an_app_warns_once_where_it_is_opened() -> None:
    async def scenario() -> None:
        for _ in range(2):
            async with app:
                pass

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(scenario())
    (warning,) = [str(each.message) for each in said if each.category is RuntimeWarning]
    assert warning.startswith("globals: ") and USES in warning and REMEDY in warning


def test_a_server_says_it_on_stderr_and_a_command_line_does_not() -> None:
    with served("serve", "tests.app.globals_app:app") as process:
        say(process, 1, "add_note", {"text": "a"})
        assert hear(process)["result"]["structuredContent"] == {"result": 1}
        _, said = process.communicate(timeout=ENDED_WITHIN_S)
    (line,) = [line for line in said.decode().splitlines() if "module globals" in line]
    assert USES in line and REMEDY in line
    words = [sys.executable, "-m", "tests.app.globals_app", "add_note", "a"]
    done = subprocess.run(words, capture_output=True, timeout=20, check=False)
    assert done.returncode == 0 and b"globals" not in done.stderr


def test_tools_and_the_manifest_name_the_commands_that_share_a_process() -> None:
    catalogue = app.catalogue()
    tools = tools_of(catalogue)
    assert tools["shared"].meta == {"shotclock.dev/isolation": "shared"} and tools["add_note"].meta is None
    commands = build_manifest(catalogue, "0")["commands"]
    assert commands["shared"]["isolation"] == "shared" and "isolation" not in commands["add-note"]
