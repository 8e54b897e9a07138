"""The clocks of a call, and the record of the one that fired.

docs/design.md: R9.
"""

from __future__ import annotations

from enum import StrEnum
from operator import attrgetter

from .deadlines import Deadline
from .durations import DurationError, parse_duration_ms
from .records import fields_of, value

DEFAULT_TIMEOUT_MS = 30_000
DEFAULT_GRACE_MS = 5_000


class ClockKind(StrEnum):
    TIMEOUT = "timeout"
    SOFT = "soft"
    IDLE = "idle"
    QUEUE = "queue"
    BUDGET = "budget"
    OPERATION = "operation"


@value
class Clocks:
    """Limits in milliseconds. None: not set, the next level decides. 0: none, set explicitly."""

    timeout_ms: int | None = None
    soft_ms: int | None = None
    idle_ms: int | None = None
    queue_ms: int | None = None
    grace_ms: int | None = None
    reserve_ms: int | None = None

    @classmethod
    def of(
        cls,
        timeout: object = None,
        *,
        soft: object = None,
        idle: object = None,
        queue: object = None,
        grace: object = None,
        reserve: object = None,
    ) -> Clocks:
        """Make clocks from durations as people write them; raises DurationError naming the clock at fault."""
        said = {
            "timeout": timeout,
            "soft": soft,
            "idle": idle,
            "queue": queue,
            "grace": grace,
            "reserve": reserve,
        }
        limits: dict[str, int | None] = {}
        for name, written in said.items():
            try:
                limits[f"{name}_ms"] = None if written is None else parse_duration_ms(written)
            except DurationError as error:
                raise DurationError(f"{name}: {error}") from None
        return cls(**limits)

    def over(self, defaults: Clocks) -> Clocks:
        """Return these clocks, with what they leave unset taken from the defaults."""
        mine = _limits_of(self)
        if None not in mine:
            return self
        pairs = zip(mine, _limits_of(defaults), strict=True)
        return Clocks(*[theirs if own is None else own for own, theirs in pairs])


_limits_of = attrgetter(*fields_of(Clocks))


@value
class Fired:
    """The clock that fired and its owner: always stated, never left to be guessed from a message."""

    kind: ClockKind
    owner: str
    limit_ms: int
    elapsed_ms: int
    source: Deadline | None = None
    """The deadline that passed, where it was one of this process: whoever made it knows it again (`is`)."""

    def as_context(self) -> dict[str, object]:
        return {
            "kind": self.kind.value,
            "owner": self.owner,
            "limit_ms": self.limit_ms,
            "elapsed_ms": self.elapsed_ms,
        }
