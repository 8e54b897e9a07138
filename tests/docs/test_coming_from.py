"""docs/howto/coming-from.md: what its second column names exists."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shotclock import App
from shotclock.core.errors import error_entries, warning_entries

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "howto" / "coming-from.md").read_text("utf-8")
PAGES = [*(ROOT / "docs" / "reference").glob("*.md"), ROOT / "docs" / "howto" / "mcp.md"]
REFERENCE = "".join(path.read_text("utf-8") for path in PAGES)


def ours() -> list[str]:
    """The code in the second column of every table."""
    cells = [re.split(r"(?<!\\)\|", line)[2] for line in PAGE.splitlines() if line.startswith("| ")]
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


@functools.cache
def help_of(*verb: str) -> str:
    ran = subprocess.run([sys.executable, "-m", "shotclock", *verb, "--help"], capture_output=True, timeout=60)
    assert ran.returncode == 0, verb
    return (ran.stdout + ran.stderr).decode()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_starts")
def test_every_command_and_option_of_ours_is_in_the_help() -> None:
    named = [span.split() for span in ours() if span.startswith("shotclock ")]
    assert len(named) > 12
    for words in named:
        verb = words[1:3] if words[1] in ("ui", "inbox") else words[1:2]
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", help_of(*verb)), words
        assert f"Usage: shotclock {' '.join(verb)}" in help_of(*verb)
    matching = help_of("ui", "click")
    for option in (span.split()[0] for span in ours() if span.startswith("--")):
        assert re.search(rf"{option}\b", matching), option


def test_every_code_variable_and_key_of_ours_exists() -> None:
    codes = {entry.code for entry in error_entries()} | set(warning_entries())
    variables = (ROOT / "examples" / "supervise" / "README.md").read_text("utf-8")
    rest = [span for span in ours() if not span.startswith(("shotclock ", "--", "app.", "App(", "@app", "ctx."))]
    for span in rest:
        if span.isupper():
            assert span in codes or f"`{span}`" in variables, span
        else:
            last = span.rpartition(".")[2]
            assert re.search(rf"[`.\"]{re.escape(last)}[`.\"]", REFERENCE + variables), span


def test_the_calls_of_ours_are_those_of_the_library() -> None:
    calls = {span for span in ours() if span.startswith(("app.", "App(", "@app", "ctx."))}
    app = App("tool", operation_timeout="2m")

    @app.command(timeout="30s")
    def work() -> None:
        """Do nothing."""

    assert callable(app.serve_mcp) and "operation_timeout_ms" in REFERENCE
    assert calls == {
        'App("tool", operation_timeout="2m")',
        '@app.command(timeout="30s")',
        "app.serve_mcp(operation_timeout_ms=120000)",
        "ctx.call",
    }
