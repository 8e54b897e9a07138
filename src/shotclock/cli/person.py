"""A question only a person may answer: at a terminal, by typing back what is expected."""

from __future__ import annotations

import select
import sys

from ..core.envelope import Problem
from .output import is_terminal, write_quietly

# How long we wait for somebody who may have left the terminal.
ANSWER_LIMIT_S = 600.0


def ask(name: str, expected: str) -> Problem | None:
    """None where the person agreed; otherwise why nothing runs."""
    if not is_terminal(sys.stdin) or not is_terminal(sys.stderr):
        message = f"{name} runs only after a person has typed {expected!r} at a terminal"
        return Problem("PERSON_REQUIRED", message, "validation", context={"expected": expected})
    write_quietly(sys.stderr, f"{name} needs a person to confirm. Type {expected!r} to go on: ")
    if not select.select([sys.stdin], [], [], ANSWER_LIMIT_S)[0]:
        return Problem("PERSON_REQUIRED", f"{name}: nobody answered", "validation")
    if sys.stdin.readline().rstrip("\n") == expected:
        return None
    return Problem("PERSON_REQUIRED", f"{name} was not confirmed", "validation")
