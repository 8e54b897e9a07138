"""Shotclock from its wheel, in an environment of its own with the base dependencies: no extras, no source tree.

In `make test` the dependencies are links to those of the tests' own environment, and pip installs without an index.
`make conformance` has pip install everything from the registry, as an author does.
"""

import asyncio
import importlib.metadata
import json
import os
import pty
import re
import select
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from packaging.requirements import Requirement

from tests.testing.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

INSTALLED_WITHIN_S = 300.0
ENDED_WITHIN_S = 60.0
HAS_REGISTRY = "SHOTCLOCK_CONFORMANCE" in os.environ
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]


@dataclass(frozen=True)
class Environment:
    """A Python environment, a home, and the package that `shotclock new tool my-tool` wrote and pip installed."""

    folder: Path

    @property
    def tool(self) -> Path:
        return self.folder / "my-tool"

    @property
    def variables(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("LANG", "TMPDIR", "SHOTCLOCK_TEST_MARK") if name in os.environ}
        path = f"{self.folder / 'env/bin'}:/usr/bin:/bin"
        return {**kept, "HOME": str(self.folder / "home"), "PATH": path, "NO_COLOR": "1", "COLUMNS": "200"}

    def run(self, program: str, *words: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(self.folder / "env/bin" / program), *words],
            cwd=cwd or self.folder,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=ENDED_WITHIN_S,
        )

    def answer(self, program: str, *words: str, cwd: Path | None = None) -> Any:
        """The envelope on the last line."""
        return json.loads(self.run(program, *words, cwd=cwd).stdout.splitlines()[-1])


def link_dependencies(site: Path, *names: str) -> None:
    """Link these distributions, and those they depend on without extras, into the folder of an environment."""
    wanted, done = [Requirement(name) for name in names], set[tuple[str, str]]()
    while wanted:
        requirement = wanted.pop()
        extra = next(iter(requirement.extras), "")
        if (requirement.name, extra) in done:
            continue
        done.add((requirement.name, extra))
        distribution = importlib.metadata.distribution(requirement.name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(str(distribution.locate_file(top)))
        needed = [Requirement(line) for line in distribution.requires or ()]
        wanted += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})]


def install(python: Path, *words: str) -> None:
    ran = subprocess.run(words, cwd=python.parent, capture_output=True, text=True, timeout=INSTALLED_WITHIN_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module", params=["linked", "registry"] if HAS_REGISTRY else ["linked"])
def environment(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    found = Environment(tmp_path_factory.mktemp("environment"))
    (found.folder / "home").mkdir()
    python = found.folder / "env/bin/python"
    venv.create(found.folder / "env", with_pip=False, symlinks=True)
    pip = [sys.executable, *PIP, "--python", str(python), "install", "--quiet"]
    editable = ["--editable", str(found.tool)]
    if request.param == "linked":
        (site,) = (found.folder / "env/lib").glob("*/site-packages")
        own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        link_dependencies(site, *own, "pytest", "hatchling", "editables")
        pip += ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
        install(python, *pip, str(wheel))
    else:
        install(python, *pip, str(wheel))
        editable[-1] += "[dev]"
    written = found.answer("shotclock", "new", "tool", "my-tool")
    assert written["ok"] and "tests/test_app.py" in written["data"]["files"], written
    install(python, *pip, *editable)
    return found


def test_a_new_tool_is_a_command_and_passes_its_tests_and_the_plugin_names_a_process_left_behind(
    environment: Environment,
) -> None:
    greeted = environment.run("my-tool", "greet", "Ada", "--format", "text", cwd=environment.folder / "home")
    assert greeted.stdout == "Hello, Ada!\n"
    assert environment.run("python", "-m", "my_tool", "greet", "Ada", "--format", "text").stdout == "Hello, Ada!\n"
    script = tomllib.loads((environment.tool / "pyproject.toml").read_text())["project"]["scripts"]["my-tool"]
    assert script == "my_tool.app:app"
    file = environment.tool / "tests" / "test_left.py"
    file.write_text("import subprocess\n\n\ndef test_child() -> None:\n    subprocess.Popen(['sleep', '61'])\n")
    tested = environment.run("python", "-m", "pytest", "-q", cwd=environment.tool)
    assert "4 passed, 1 error" in tested.stdout and tested.returncode == 1, tested.stdout
    assert re.search(r"test_child left 1 process behind:\n  pid \d+ \(parent \d+, state S\): sleep 61", tested.stdout)
    assert "ERROR tests/test_left.py::test_child" in tested.stdout


def test_the_written_configurations_start_the_server(environment: Environment) -> None:
    called = environment.answer(
        *("shotclock", "mcp", "call", "my-tool", "greet", "--arg", "name=Ada", "--config", ".mcp.json", "--json"),
        cwd=environment.tool,
    )
    assert called["data"] == {"result": "Hello, Ada!"}, called
    for file, table in ((".cursor/mcp.json", "mcpServers"), (".vscode/mcp.json", "servers")):
        assert "my-tool" in json.loads((environment.tool / file).read_text())[table]


def answer_at_terminal(environment: Environment, *words: str, typed: bytes) -> tuple[int, str]:
    """Run `shotclock` on a terminal, type this when it asks, and return its exit code and the screen."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [environment.folder / "env/bin/shotclock", *words],
        cwd=environment.folder,
        env=environment.variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    screen = b""
    try:
        while select.select([ours], [], [], ENDED_WITHIN_S)[0]:
            try:
                screen += os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
            if typed and b"[y/N]" in screen:
                os.write(ours, typed)
                typed = b""
        return process.wait(ENDED_WITHIN_S), screen.decode()
    finally:
        process.kill()
        process.wait(ENDED_WITHIN_S)
        os.close(ours)


async def ask_server(command: str, words: list[str], environment: Environment) -> tuple[set[str], str]:
    """Start a server as a client does, with little of an environment, and return its tools and a greeting."""
    variables = {**environment.variables, "PATH": "/usr/bin:/bin"}
    parameters = StdioServerParameters(command=command, args=words, env=variables, cwd=environment.folder / "home")
    async with Client(parameters, read_timeout_seconds=ENDED_WITHIN_S) as client:
        listed = await client.list_tools()
        greeted = await client.call_tool("greet", {"name": "Ada"})
        return {tool.name for tool in listed.tools}, greeted.content[0].text  # type: ignore[union-attr]


def test_the_tool_is_installed_in_each_client_difference_first_and_its_entry_answers(environment: Environment) -> None:
    home, entries = environment.folder / "home", []
    for client, file, table in (
        ("claude", ".claude.json", "mcpServers"),
        ("vscode", ".config/Code/User/mcp.json", "servers"),
    ):
        words = ["serve", "my_tool.app:app", "--install", client]
        code, screen = answer_at_terminal(environment, *words, typed=b"y\n")
        assert code == 0 and screen.index('+    "my-tool": {') < screen.index("[y/N]"), screen
        [(name, entry)] = json.loads((home / file).read_text())[table].items()
        assert name == "my-tool" and entry.pop("type", None) == ("stdio" if client == "vscode" else None)
        entries.append(entry)
    assert entries == [entries[0]] * 2
    refused = environment.answer("shotclock", *words, "--name", "other")
    assert '+    "other": {' in refused["error"]["context"]["diff"], refused
    asked = asyncio.run(ask_server(entries[0]["command"], entries[0]["args"], environment))
    assert asked == ({"greet"}, "Hello, Ada!")


def test_type_checkers_find_the_types_and_readers_the_man_pages_and_completions(environment: Environment) -> None:
    assert list((environment.folder / "env/lib").glob("python*/site-packages/shotclock/py.typed"))
    share = environment.folder / "env/share"
    assert "SHOTCLOCK" in (share / "man/man1/shotclock-exec.1").read_text("utf-8")
    completions = ("bash-completion/completions/shotclock", "zsh/site-functions/_shotclock")
    for place in (*completions, "fish/vendor_completions.d/shotclock.fish"):
        assert "timeout" in (share / place).read_text("utf-8"), place


def test_scripts_for_shells_are_printed(environment: Environment) -> None:
    for program, shell, first in (
        ("shotclock", "bash", "# Completion of shotclock in bash."),
        ("my-tool", "fish", "# Completion of my-tool in fish."),
    ):
        assert environment.run(program, "completion", shell).stdout.splitlines()[0] == first


def test_commands_need_no_extra_or_name_it(environment: Environment) -> None:
    folder = environment.folder
    assert environment.run("shotclock", "exec", "--timeout", "10s", "--", "echo", "hi").stdout == "hi\n"
    assert environment.run("shotclock-sh", "echo hi").stdout == "hi\n"
    assert environment.answer("shotclock", "inbox", "list")["data"]["proposals"] == []
    (folder / "two.yaml").write_text(
        "steps:\n  a: {exec: echo hi}\n  b: {depends_on: a, exec: 'echo {{ outputs.a }}!'}\n"
    )
    ran = environment.answer("shotclock", "run", "two.yaml", "--json")
    assert ran["data"]["steps"]["b"]["output"] == "hi!", ran
    (folder / "ai.yaml").write_text("steps: {a: {type: ai, prompt: hello, ai: {base_url: 'http://127.0.0.1:1/v1'}}}\n")
    for words, extra in ((["run", "ai.yaml"], "ai"), (["run", "two.yaml", "--on", "temporal://localhost:1"], "scale")):
        refused = environment.answer("shotclock", *words, "--json")
        assert not refused["ok"] and f"shotclock[{extra}]" in json.dumps(refused["error"]), refused


def test_the_demo_has_its_programs_in_the_wheel(environment: Environment) -> None:
    played = environment.run("shotclock", "demo", "--fast", "--scene", "3")
    assert played.returncode == 0, played.stdout
    assert played.stdout.count("left alive: 0") == 1 and "answer after" in played.stdout
