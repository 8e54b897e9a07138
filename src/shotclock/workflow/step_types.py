"""The kinds of steps: which key bounds each, what a bare number means there, and what holds when nothing is said.

Existing files are written with these units, so they are kept, kind by kind; the linter points at numbers that look as
if another unit was meant.
"""

from __future__ import annotations

from typing import Literal

from ..core.durations import parse_duration_ms
from ..core.records import dataclass

Unit = Literal["s", "ms"]
MS_PER: dict[Unit, int] = {"s": 1000, "ms": 1}


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    does: str
    timeout_key: str
    unit: Unit
    default_ms: int | None
    """None: as long as the run it is in."""
    needs_place: bool = True
    """Whether it counts among the `max_parallelism` that are under way. Waiting for a person is no work."""

    def timeout_ms(self, written: object) -> int | None:
        """What the file says as milliseconds; 0 is none. Raises DurationError."""
        return self.default_ms if written is None else duration_ms(written, self.unit)


def duration_ms(written: object, unit: Unit) -> int:
    """Text as people write durations, or a bare number (in quotes or not) in the unit of where it stands."""
    return parse_duration_ms(written, bare=unit)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("command", "shell command in its own tree", "timeout", "s", 60_000),
        Kind("http_client", "HTTP request, bounded with its body and redirects", "timeout", "ms", 30_000),
        Kind("mcp", "MCP tool call", "timeout", "s", 60_000),
        Kind("tool", "custom tool from the file's `tools:`", "timeout", "ms", 30_000),
        Kind("git-checkout", "clone and check out", "clone_timeout_ms", "ms", 300_000),
        Kind("human-input", "question to a person", "timeout", "s", 0, needs_place=False),
        Kind("function", "a command of an App", "timeout", "s", 30_000),
        Kind("workflow", "another workflow", "timeout", "s", None),
    )
}
