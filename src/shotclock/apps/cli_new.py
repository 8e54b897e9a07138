"""`shotclock new tool NAME`: a package with a command line, an MCP server, tests and the configuration of clients."""

from __future__ import annotations

import json
import keyword
import os
import re
import sys
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from .._version import __version__
from ..calls.call import Outcome
from ..core.errors import Ending, Failure, SideEffects
from ..terminal.output import write_quietly
from ..terminal.parser import CommandTable, Option, Subcommand
from ..terminal.subcommand import ChildWork, Mistaken

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TAKEN = sys.stdlib_module_names | {"shotclock", "tests"}

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "$name"
version = "0.1.0"
description = "A tool for people and agents."
requires-python = ">=3.11"
dependencies = ["shotclock>=$version"]

[project.optional-dependencies]
dev = ["pytest"]

[project.scripts]
$name = "$package.app:app"

[tool.hatch.build.targets.wheel]
packages = ["src/$package"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["src"]
shotclock_leaks = "fail"
"""
_APP = '''\
"""The commands of $name: a command line, and tools of an MCP server."""

from shotclock import App, Failure

app = App("$name", version="0.1.0", help="A tool for people and agents.", default_timeout="30s")


@app.command(mutates=False)
def greet(name: str, times: int = 1) -> str:
    """Greet a person.

    Args:
        name: The name of the person.
        times: The number of greetings.
    """
    if not name.strip():
        raise Failure("the name is empty")
    return " ".join([f"Hello, {name}!"] * times)
'''
_MAIN = '''\
"""The command line: `python -m $package`."""

from $package.app import app

app()
'''
_TEST = '''\
"""Tests of the commands. They run in worker processes, with their limits."""

import asyncio

from shotclock import testing

from $package.app import app


def test_a_person_is_greeted() -> None:
    with testing.calls(app) as call:
        assert testing.assert_ok(call("greet", name="Ada", times=2)) == "Hello, Ada! Hello, Ada!"


def test_an_empty_name_is_refused() -> None:
    with testing.calls(app) as call:
        testing.assert_failed(call("greet", name=" "), "GENERAL_ERROR", message="the name is empty")


def test_an_mcp_client_calls_the_tool() -> None:
    async def call_tool() -> None:
        async with testing.client(app) as client:
            testing.assert_ok(await client.call_tool("greet", {"name": "Ada"}), "Hello, Ada!")

    asyncio.run(call_tool())
'''
_README = """\
# $name

    pip install -e '.[dev]'
    pytest

    # the command line, then the MCP server, on stdin and stdout
    $name greet Ada
    shotclock serve $package.app:app

`.mcp.json` (Claude Code), `.cursor/mcp.json` and `.vscode/mcp.json` start the server for a client that is opened in
this folder, from an environment with both installed. For all of your projects:

    shotclock serve $package.app:app --install claude
"""
_IGNORE = "__pycache__/\n.venv/\ndist/\n"


def files_of(name: str) -> dict[str, str]:
    package = name.replace("-", "_")
    values = {"name": name, "package": package, "version": __version__}
    server: dict[str, object] = {"command": "shotclock", "args": ["serve", f"{package}.app:app"]}
    written = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        ".gitignore": _IGNORE,
        f"src/{package}/__init__.py": '"""A tool for people and agents."""\n',
        f"src/{package}/__main__.py": _MAIN,
        f"src/{package}/app.py": _APP,
        f"src/{package}/py.typed": "",
        "tests/test_app.py": _TEST,
    }
    clients = {
        ".mcp.json": {"mcpServers": {name: server}},
        ".cursor/mcp.json": {"mcpServers": {name: server}},
        ".vscode/mcp.json": {"servers": {name: {"type": "stdio", **server}}},
    }
    files = {path: Template(text).substitute(values) for path, text in written.items()}
    return files | {path: json.dumps(content, indent=2) + "\n" for path, content in clients.items()}


def _write(name: str, folder: Path) -> Outcome:
    """Write the files into a folder that is new or empty. Raises Failure."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Failure(
                "CONFLICT",
                f"{folder} exists and is not an empty folder",
                suggestion="name a new or empty folder with --folder",
                side_effects=SideEffects.NONE,
            )
        for path, text in files_of(name).items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    except OSError as error:
        raise Failure("FILE_UNWRITABLE", f"{error.filename or folder}: {error.strerror}") from None
    return Outcome(Ending.FINISHED, data={"name": name, "folder": str(folder), "files": sorted(files_of(name))})


def _run_tool(name: str, folder: str | None) -> ChildWork:
    package = name.replace("-", "_")
    if not _NAME.fullmatch(name):
        raise Mistaken({"name": f"{name!r} is no name of a tool: write lower case words joined by hyphens"})
    if package in _TAKEN or keyword.iskeyword(package):
        raise Mistaken({"name": f"{name!r} would be a package that Python has already: choose another name"})
    place = Path(folder or name).absolute()
    return ChildWork(
        "new tool", partial(_write, name, place), mutates=True, show=partial(_show, os.path.relpath(place))
    )


def _show(folder: str, envelope: Any) -> None:
    if envelope.ok:
        files = "".join(f"  {path}\n" for path in envelope.data["files"])
        write_quietly(sys.stdout, f"wrote {folder}:\n{files}next: cd {folder} && pip install -e '.[dev]' && pytest\n")


TOOL = Subcommand(
    "tool",
    "Write a package with a command line, an MCP server, tests and the configuration of clients.",
    (
        Option.argument("name", "Lower case words joined by hyphens.", missing="missing NAME, such as my-tool"),
        Option.taking("--folder", "DIR", "The folder to write, which is new or empty. [NAME]"),
    ),
    _run_tool,
)
COMMANDS = {"new": CommandTable("shotclock new", "Begin a new tool.", (TOOL,), kind="template")}
