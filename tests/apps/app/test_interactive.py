"""An App at the prompt of Python: a module works, and a command that is typed there is refused with a hint."""

import subprocess
import sys
from pathlib import Path

import pytest

TYPED = """
import asyncio
from shotclock import App
app = App("cell")
@app.command(mutates=False)
def add(a: int) -> int:
    return a + 1

@app.command(mutates=False, isolation="inline")
async def negate(a: int) -> int:
    return -a

print("typed:", asyncio.run(app.call("add", a=1)).error["message"])
print("inline:", asyncio.run(app.call("negate", a=1)).value)
import tool
print("module:", asyncio.run(tool.app.call("add", a=1)).value)
"""
TOOL = """
from shotclock import App
app = App("tool")
@app.command(mutates=False)
def add(a: int) -> int:
    return a + 1
"""


@pytest.mark.slow
def test_a_module_works_at_the_prompt_and_a_typed_command_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(TOOL)
    ran = subprocess.run(
        [sys.executable, "-i", "-q"], input=TYPED, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "inline: -1" in ran.stdout and "module: 2" in ran.stdout, ran
    assert "typed: " in ran.stdout and "is defined in a notebook or a REPL" in ran.stdout
