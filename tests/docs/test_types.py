"""What the pages, the examples and `shotclock new tool` give an author passes a strict type checker."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shotclock.apps.cli_new import files_of
from tests.docs.test_docs import BLOCKS, ROOT

pytestmark = pytest.mark.slow

# One run over everything. A cache that is empty, as in a fresh clone, costs ten seconds of a core.
MYPY_WITHIN_S = 300

TYPED = """
from typing import assert_type
import shotclock.testing
from shotclock import App, register_error

register_error("ACME_NO_STOCK", summary="None left.", side_effects="none")
app = App("typed")

@app.command
def bare(number: int) -> str: ...

@app.command(timeout="5s", mutates=False)
def declared(number: int, *, loud: bool = False) -> str: ...

@app.command()
async def awaited(number: int) -> str: ...

assert_type(bare(1), str)
assert_type(declared(1, loud=True), str)
async def use() -> None:
    assert_type(await awaited(1), str)

bare("x")  # error: arg-type
declared(1, 2)  # error: misc|call-arg

@app.command(timout="5s")  # error: call
def misspelt() -> None: ...

shotclock.Contxt  # error: attr-defined
shotclock.testing.clls  # error: attr-defined
"""


def write_shown(folder: Path) -> dict[str, str]:
    """Write every Python block of the pages and every example as a file; return where each comes from."""
    written: dict[str, str] = {}
    for number, block in enumerate(block for block in BLOCKS if block.language == "python"):
        name = f"block_{number}.py"  # no two of them are one module, whatever the pages call them
        (folder / name).write_text(block.text)
        written[name] = str(block)
    for example in sorted((ROOT / "examples").rglob("*.py")):
        (folder / example.name).write_text(example.read_text())  # by its own name, which a page may import
        written[example.name] = str(example.relative_to(ROOT))
    assert len(written) > 20
    return written


def write_new_tool(folder: Path) -> dict[str, str]:
    """Write the package of `shotclock new tool my-tool` and its tests; return where each file comes from."""
    files = {path: text for path, text in files_of("my-tool").items() if path.endswith((".py", "py.typed"))}
    for path, text in files.items():
        file = folder / path.removeprefix("src/")  # importable from the folder, as once it is installed
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return {path.removeprefix("src/"): f"new tool: {path}" for path in files if path.endswith(".py")}


@pytest.mark.timeout(MYPY_WITHIN_S + 20)
def test_examples_blocks_and_a_new_tool_pass_mypy_strict_and_a_command_keeps_its_signature(tmp_path: Path) -> None:
    typed = TYPED.replace(": ...", ":\n    raise NotImplementedError")
    (tmp_path / "typed.py").write_text(typed)
    written = {"typed.py": "typed.py", **write_shown(tmp_path), **write_new_tool(tmp_path)}
    (tmp_path / "mypy.ini").write_text("[mypy]\n")  # not the project's own, which an author does not have
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "mypy.ini", *sorted(written)],
        cwd=tmp_path,
        env={**os.environ, "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache" / "docs")},
        capture_output=True,
        text=True,
        timeout=MYPY_WITHIN_S,
    )
    found = re.findall(r"^([\w./]+):(\d+): error: (.*)$", ran.stdout, re.MULTILINE)
    wrong = [f"{written[name]} +{line}: {message}" for name, line, message in found if name != "typed.py"]
    assert not wrong, "\n".join(wrong)
    meant = {number for number, line in enumerate(typed.splitlines(), 1) if "# error" in line}
    assert {int(line) for name, line, _ in found if name == "typed.py"} == meant, ran.stdout + ran.stderr
