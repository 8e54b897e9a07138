"""The stdin of a call."""

from __future__ import annotations

from ..core.value_types import value


@value
class Stdin:
    """Input from stdin, spooled to a file that the caller removes."""

    path: str
    digest: str
