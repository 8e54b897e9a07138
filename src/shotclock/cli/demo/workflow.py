"""`shotclock demo workflow`: a workflow whose steps hang, and its report."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from pathlib import Path

from ...core.errors import error_entry
from ..output import is_terminal, say_line, write_quietly
from ..subcommand import TABLE, run_table

FILE = Path(__file__).parent / "tour.yaml"
STEPS_FAILED = error_entry("STEPS_FAILED").exit_code


def run_workflow() -> int:
    """Run the workflow, whose steps are meant to fail, and open its report."""
    run_id = f"tour-{uuid.uuid4().hex[:12]}"
    shows = is_terminal(sys.stdout)
    summary = "Seven steps: one hangs and hides a daemon, one falls silent, one needs several tries"
    write_quietly(sys.stdout, f"{summary} ({FILE})\n")
    code = run_table(TABLE, ["run", str(FILE), "--run-id", run_id, *([] if shows else ["--output", "markdown"])])
    if code < 0:
        return code
    if code != STEPS_FAILED:
        say_line(f"the workflow should end with exit code {STEPS_FAILED}, some steps failed; this was {code}")
        return 1
    meaning = "steps that hang do not succeed, and the steps that need them are skipped"
    shown = f"Exit code {STEPS_FAILED}, as it should be (of the run; the demo's own is 0)"
    write_quietly(sys.stdout, f"\n{shown}: {meaning}.\n\n")
    with open(os.devnull, "w") as null, contextlib.nullcontext() if shows else contextlib.redirect_stdout(null):
        return run_table(TABLE, ["report", run_id, "--open"])
