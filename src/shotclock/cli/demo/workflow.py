"""`shotclock demo workflow`: a workflow whose steps hang, and its report."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from pathlib import Path

from ...core.errors import error_entry
from ..output import is_terminal, say_line, write_quietly
from ..subcommand import load, run_subcommand

FILE = Path(__file__).parent / "tour.yaml"
STEPS_FAILED = error_entry("STEPS_FAILED").exit_code


def run_workflow() -> int:
    """Run the workflow, whose steps are meant to fail, and open its report."""
    run_id = f"tour-{uuid.uuid4().hex[:12]}"
    shows = is_terminal(sys.stdout)
    summary = "Seven steps: one hangs and hides a daemon, one falls silent, one needs several tries"
    write_quietly(sys.stdout, f"{summary} ({FILE})\n")
    code = _run("run", [str(FILE), "--run-id", run_id, *([] if shows else ["--output", "markdown"])])
    if code < 0:
        return code
    if code != STEPS_FAILED:
        say_line(f"the workflow should end with exit code {STEPS_FAILED}, some steps failed; this was {code}")
        return 1
    meaning = "steps that hang do not succeed, and the steps that need them are skipped"
    write_quietly(sys.stdout, f"\nExit code {STEPS_FAILED}, as it should be: {meaning}.\n\n")
    with open(os.devnull, "w") as null, contextlib.nullcontext() if shows else contextlib.redirect_stdout(null):
        return _run("report", [run_id, "--open"])


def _run(name: str, words: list[str]) -> int:
    command = load(name)
    assert not hasattr(command, "commands")
    return run_subcommand("shotclock", command, words)
