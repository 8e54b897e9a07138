"""A package that `shotclock new tool` wrote works as it is, with Shotclock from its wheel."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from tests.testing.conftest import Run

pytestmark = pytest.mark.usefixtures("no_survivors")

BIN = str(Path(sys.executable).parent)


@pytest.mark.slow
def test_a_new_tool_passes_its_tests_is_a_command_and_is_served_to_its_clients(
    run_installed: Run, installed: Path, tmp_path: Path
) -> None:
    made = run_installed("-m", "shotclock", "new", "tool", "my-tool")
    answer = json.loads(made.stdout)
    assert answer["ok"] and "tests/test_app.py" in answer["data"]["files"], answer
    folder = tmp_path / "my-tool"
    tested = run_installed("-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder))
    assert "3 passed" in tested.stdout and tested.returncode == 0, tested.stdout
    env = {"PYTHONPATH": f"{installed}:{folder / 'src'}", "PATH": f"{BIN}:/usr/bin:/bin"}
    greeted = run_installed("-m", "my_tool", "greet", "Ada", "--format", "text", env=env)
    assert greeted.stdout == "Hello, Ada!\n"
    script = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["scripts"]["my-tool"]
    assert script == "my_tool.app:app"
    called = run_installed(
        *("-m", "shotclock", "call", "my-tool", "greet", "--arg", "name=Ada"),
        *("--config", str(folder / ".mcp.json"), "--json"),
        env=env,
    )
    assert json.loads(called.stdout.splitlines()[-1])["data"] == {"result": "Hello, Ada!"}, called.stdout
    for file, table in ((".cursor/mcp.json", "mcpServers"), (".vscode/mcp.json", "servers")):
        assert "my-tool" in json.loads((folder / file).read_text())[table]


@pytest.mark.slow
def test_a_new_tool_passes_mypy_strict_and_ruff(run_installed: Run, tmp_path: Path) -> None:
    assert run_installed("-m", "shotclock", "new", "tool", "my-tool", "--folder", "here").returncode == 0
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n")
    checked = run_installed("-m", "mypy", "--strict", "--config-file", str(config), "here/src", "here/tests")
    assert checked.returncode == 0, checked.stdout
    rules = ["--isolated", "--select", "E,F,I,UP,B", "--line-length=120", "--config", 'src=["here/src"]']
    linted = run_installed("-m", "ruff", "check", *rules, "here")
    assert linted.returncode == 0, linted.stdout


@pytest.mark.slow
def test_other_names_and_folders_in_use_are_refused(run_installed: Run, tmp_path: Path) -> None:
    for name in ("My_Tool", "tests", "-x", "../up"):
        refused = run_installed("-m", "shotclock", "new", "tool", "--json", name)
        assert refused.returncode == 2, (name, refused.stdout)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    refused = run_installed("-m", "shotclock", "new", "tool", "used")
    assert refused.returncode == 6 and "not an empty folder" in refused.stdout
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["file"]
