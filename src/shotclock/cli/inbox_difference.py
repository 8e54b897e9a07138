"""What a proposed file would change, for whoever decides."""

from __future__ import annotations

import difflib

from ..core.proposals import Proposal
from ..enforce.clock import monotonic_ns
from ..enforce.forked import Unfinished
from ..enforce.forked import run as run_forked

# What comparing two files may take. Texts of many thousand lines that have little in common run this out.
DIFF_LIMIT_NS = 3_000_000_000


def difference(proposal: Proposal) -> str | None:
    """What would change in the file, as a unified diff. None: there is no file, or it takes too long."""
    file = proposal.ask.file
    if file is None:
        return None

    def compared() -> str:
        before = [] if file.current is None else _lines(file.current)
        name = file.path.replace("\n", " ")
        old = "/dev/null" if file.current is None else name
        return "\n".join(difflib.unified_diff(before, _lines(file.proposed), old, name, lineterm=""))

    try:
        return run_forked(compared, until_ns=monotonic_ns() + DIFF_LIMIT_NS)
    except Unfinished:
        return None


def _lines(text: str) -> list[str]:
    """With a mark where the last one has no end, as diff(1) does."""
    lines = text.split("\n")
    if lines[-1] == "":
        return lines[:-1]
    return [*lines[:-1], f"{lines[-1]}\n\\ No newline at end of file"]
