"""What a proposed file would change, for whoever decides."""

from __future__ import annotations

import difflib

from ..core.proposals import Proposal
from ..enforce.clock import monotonic_ns
from ..enforce.forked import Unfinished
from ..enforce.forked import run as run_forked
from ..servers.operators.shown import Compared

# What comparing two files may take. Texts of many thousand lines that have little in common run this out.
DIFF_LIMIT_NS = 3_000_000_000
# So many lines of a file are shown whole.
WHOLE_LINES = 1_000


def difference(proposal: Proposal, compared: Compared) -> str | None:
    """Return what would change in the file, as a unified diff. None: there is no file, or it takes too long.

    Against what is only the asker's word all of it is shown, if it is not too long: what is the same may be new.
    """
    file = proposal.ask.file
    if file is None:
        return None

    def texts() -> str:
        before = [] if compared.before is None else _lines(compared.before)
        name = file.path.replace("\n", " ")
        old = "/dev/null" if compared.before is None else name
        after = _lines(file.proposed)
        is_whole = compared.source == "claim" and max(len(before), len(after)) <= WHOLE_LINES
        around = len(before) if is_whole else 3
        return "\n".join(difflib.unified_diff(before, after, old, name, lineterm="", n=around))

    try:
        return run_forked(texts, until_ns=monotonic_ns() + DIFF_LIMIT_NS)
    except Unfinished:
        return None


def _lines(text: str) -> list[str]:
    """With a mark where the last one has no end, as diff(1) does."""
    lines = text.split("\n")
    if lines[-1] == "":
        return lines[:-1]
    return [*lines[:-1], f"{lines[-1]}\n\\ No newline at end of file"]
