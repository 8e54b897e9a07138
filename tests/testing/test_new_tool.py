"""A package that `shotclock new tool` writes, and the names it refuses. test_wheel.py installs and uses one."""

from pathlib import Path
from typing import Any

import pytest

from tests.testing.conftest import Run

pytestmark = pytest.mark.usefixtures("no_survivors")


@pytest.mark.slow
def test_a_new_tool_passes_ruff(run_installed: Run, tmp_path: Path) -> None:
    """tests/docs/test_types.py has mypy check it, in one run with all else that an author copies."""
    assert run_installed("-m", "shotclock", "new", "tool", "my-tool", "--folder", "here").returncode == 0
    rules = ["--isolated", "--select", "E,F,I,UP,B", "--line-length=120", "--config", 'src=["here/src"]']
    linted = run_installed("-m", "ruff", "check", *rules, "here")
    assert linted.returncode == 0, linted.stdout


@pytest.mark.slow
def test_other_names_and_folders_in_use_are_refused(shotclock: Any, tmp_path: Path) -> None:
    for name, said in {
        "My_Tool": "lower case words",
        "-x": "-x",
        "../up": "lower case words",
        "tests": "choose another name",
        "class": "choose another name",
        "json": "choose another name",
    }.items():
        refused = shotclock("new", "tool", "--json", name, cwd=tmp_path)
        assert refused.code == 2 and said.encode() in refused.stdout, (name, refused.stdout)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    refused = shotclock("new", "tool", "used", cwd=tmp_path)
    assert refused.code == 6 and b"not an empty folder" in refused.stdout
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["file"]
