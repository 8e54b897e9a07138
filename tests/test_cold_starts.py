"""A command of every surface as a shell starts it, by itself: each imports all that it needs.

Most other tests start programs warm (see warm.py), where an import that is missing would go unnoticed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from tests.apps.server.client import ENDED_WITHIN_S, envelope_in, run, url_said_by

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

# Some interpreters that import all that they can, on a busy machine.
RUN_WITHIN_S = 60.0

SHOTCLOCK = [sys.executable, "-m", "shotclock"]
FLOW = (
    "steps: {say: {exec: echo hello}, call: {type: function, target: program.py:app, command: double, args: {n: 2}}}\n"
)
PROGRAM = """
from shotclock import App

app = App("program")

@app.command
def double(n: int) -> int:
    return 2 * n

@app.command
async def triple(n: int) -> int:
    return 3 * n

@app.command(interruption=True)
def quadruple(n: int) -> int:
    return 4 * n

if __name__ == "__main__":
    app()
"""
COMMANDS = [
    "shotclock --help",
    "shotclock check flow.yaml",
    "shotclock run flow.yaml --run-id r1",
    "shotclock report r1",
    "shotclock advise flow.yaml",
    "shotclock inbox list",
    "shotclock token list",
    "shotclock job list",
    "program --help",
    "program double 2",
    "program triple 2",
    "program quadruple 2",
    "program job list",
]
# What is slow to import, and what a command has no use for: a reader of docstrings where there is none to read, a
# library that draws for a terminal, the SDK where nothing speaks MCP, types where plain ones do, an event loop where
# nothing waits for two things at once.
PARSING_AND_DRAWING = {"rich", "docstring_parser"}
SERVING = {"mcp", "mcp_types", "starlette", "uvicorn", "anyio"}
STEPS = {"httpx2", "jinja2", "jsonschema"}
BEFORE_EVERY_COMMAND = {"asyncio", "pydantic", "ruamel", "sqlite3", "socket", "dataclasses", "inspect", "traceback"}
NEEDED_TO_HIDE_SECRETS = {"base64", "urllib", "ipaddress"}
UNUSED = {
    "shotclock exec --timeout 5s -- true": {
        *{*PARSING_AND_DRAWING, *SERVING, *STEPS},
        *{*BEFORE_EVERY_COMMAND, *NEEDED_TO_HIDE_SECRETS},
    },
    "shotclock wrap -- true": {*PARSING_AND_DRAWING, *SERVING, *STEPS, *BEFORE_EVERY_COMMAND},
    "shotclock --version": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "asyncio", "pydantic", "ruamel", "sqlite3"},
    "shotclock ui stop": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "asyncio", "pydantic", "ruamel", "sqlite3"},
    "shotclock errors": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "asyncio", "pydantic", "ruamel"},
    "shotclock check flow.yaml": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "asyncio", "pydantic", "sqlite3", "xml"},
    "shotclock plan flow.yaml": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "asyncio", "pydantic", "sqlite3"},
    "shotclock advise flow.yaml": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "asyncio", "pydantic"},
    "shotclock run command.yaml": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "dataclasses", "pydantic", "http", "xml"},
    "shotclock report": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "pydantic"},
    "shotclock inbox list --json": {
        *{*PARSING_AND_DRAWING, *SERVING, *STEPS},
        *{"asyncio", "dataclasses", "pydantic", "ruamel", "ssl"},
    },
    "shotclock token list": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "asyncio", "pydantic", "ruamel"},
    "shotclock job list": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "pydantic"},
    "shotclock serve nowhere.py:app": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "pydantic", "ruamel"},
    "program double 2": {
        *{*PARSING_AND_DRAWING, *SERVING, *STEPS},
        *{"dataclasses", "pydantic", "ruamel", "sqlite3", "tempfile"},
    },
    "program manifest": {*PARSING_AND_DRAWING, *SERVING, *STEPS, "pydantic", "ruamel", "sqlite3"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cold")
    (folder / "program.py").write_text(PROGRAM)
    (folder / "flow.yaml").write_text(FLOW)
    (folder / "command.yaml").write_text("steps: {say: {exec: echo hello}}")
    return folder


@pytest.fixture
def started(folder: Path, tmp_path: Path) -> Any:
    """How a program is started: words become those of Python, with a store that the tests here share."""

    def options(command: str) -> tuple[list[str], dict[str, Any]]:
        program, *words = command.split()
        argv = [*SHOTCLOCK, *words] if program == "shotclock" else [sys.executable, "program.py", *words]
        # A check reads the store if there is one, with sqlite3.
        home = folder / ("nowhere" if words[0] == "check" else "home")
        return argv, {"cwd": folder, "env": {**os.environ, "SHOTCLOCK_HOME": str(home)}}

    return options


def test_every_command_starts_by_itself(started: Any) -> None:
    for command in COMMANDS:
        argv, options = started(command)
        ran = subprocess.run(argv, **options, stdin=subprocess.DEVNULL, capture_output=True, timeout=RUN_WITHIN_S)
        assert ran.returncode == 0, (command, ran)
        assert b"Traceback" not in ran.stderr, (command, ran)


@pytest.mark.parametrize("command", UNUSED)
def test_a_command_does_not_import_what_it_has_no_use_for(command: str, started: Any) -> None:
    """Said by Python itself, of this process and of each that it starts."""
    argv, options = started(command)
    options["env"]["PYTHONPROFILEIMPORTTIME"] = "1"
    ran = subprocess.run(argv, **options, stdin=subprocess.DEVNULL, capture_output=True, timeout=RUN_WITHIN_S)
    imported = {name.decode() for name in re.findall(rb"^import time:.*\| +([^.\s]+)", ran.stderr, re.MULTILINE)}
    assert "shotclock" in imported, ran
    if "asyncio" in imported and sys.version_info >= (3, 14):  # imports it by itself
        imported.discard("dataclasses")
    assert not UNUSED[command] & imported
    assert ran.returncode == (5 if "nowhere" in command else 0), ran


def test_a_server_starts_by_itself_on_stdin_and_stdout(started: Any) -> None:
    argv, options = started("shotclock serve program.py:app")
    parameters = StdioServerParameters(command=argv[0], args=argv[1:], **options)

    async def scenario() -> Any:
        async with Client(parameters) as client:
            return envelope_in(await client.call_tool("double", {"n": 4}))

    assert run(scenario())["data"] == {"result": 8}


def test_a_server_starts_by_itself_on_a_port(started: Any) -> None:
    argv, options = started("shotclock serve program.py:app --http 127.0.0.1:0")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, **options, **pipes) as process:
        try:
            assert url_said_by(process).startswith("http://127.0.0.1:")
            process.terminate()
            assert process.wait(ENDED_WITHIN_S) == 143
        finally:
            process.kill()


def test_a_server_leaves_the_client_of_the_sdk_to_those_who_ask_for_it() -> None:
    program = "import sys, shotclock.apps.server._stdio, shotclock.apps.server._tool_calls\n"
    program += "assert not {'httpx2', 'mcp.client.client', 'mcp.server.mcpserver'} & sys.modules.keys()\n"
    program += "import mcp; from mcp.server import MCPServer; print(mcp.Client.__name__, MCPServer.__name__)\n"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=RUN_WITHIN_S)
    assert ran.stdout.split() == ["Client", "MCPServer"], ran
