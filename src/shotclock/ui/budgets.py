"""The budgets of an execution: their limits, how those of its actions nest in it, and what each has when it runs.

An execution has `timeoutMs` over the whole. Of that the last part is kept back, so that the result arrives before the
bell. What is left is shared by the actions, one after the other: a wait may not promise more than there is.
"""

from __future__ import annotations

from ..core.clocks import reserve_ms_for
from ..core.value_types import value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_TIMEOUT_MS = 1_000
MAX_TIMEOUT_MS = 120_000
DEFAULT_TIMEOUT_MS = 30_000
# What a builder adds to the budget of its one action.
BUILDER_MARGIN_MS = 5_000
# What the runtime waits beyond `timeoutMs` for the result. A device whose process does not answer runs it out.
RESULT_MARGIN_MS = 5_000

MAX_ACTIONS = 50
MAX_PAYLOAD_BYTES = 64_000

# `best_effort` goes on past what fails, up to these.
BEST_EFFORT_MAX_TIMEOUT_MS = 180_000
BEST_EFFORT_MAX_STEPS = 30
BEST_EFFORT_MAX_FAILURES = 5

MAX_INTERACTION_MS = 30_000
MAX_WAIT_MS = 60_000
MAX_NAVIGATION_MS = 30_000
# The longest that fits in the longest execution.
MAX_SLEEP_MS = MAX_TIMEOUT_MS - reserve_ms_for(MAX_TIMEOUT_MS)

# What an action has that says nothing itself, as far as the execution has so much left.
DEFAULT_INTERACTION_MS = 10_000
DEFAULT_WAIT_MS = 10_000


def usable_ms(timeout_ms: int) -> int:
    """Return what the actions of an execution share: all of it but the reserve for the result."""
    return timeout_ms - reserve_ms_for(timeout_ms)


def timeout_for(needed_ms: int) -> int:
    """Return the shortest execution whose actions share at least this much."""
    timeout_ms = max(MIN_TIMEOUT_MS, needed_ms)
    while usable_ms(timeout_ms) < needed_ms:
        timeout_ms += needed_ms - usable_ms(timeout_ms)
    return timeout_ms


@value
class ActionBudget:
    """What one action says of its time."""

    limit_ms: int
    must_follow: bool
    """Whether it is a wait or a sleep. Those may all take what they say, one after the other; an interaction that
    waits for its node ends as soon as the node is there."""


@value
class Misfit:
    """Budgets that do not fit in the execution, and the shortest one that they would fit in."""

    position: int | None
    """Of the action; None where it is the sum of them."""
    needed_ms: int
    usable_ms: int
    fits_in_ms: int


def find_misfits(timeout_ms: int, budgets: Sequence[ActionBudget | None]) -> list[Misfit]:
    """Return every budget that cannot be kept inside this execution; the sum only where each fits by itself."""
    usable = usable_ms(timeout_ms)
    misfits = [
        Misfit(position, budget.limit_ms, usable, timeout_for(budget.limit_ms))
        for position, budget in enumerate(budgets)
        if budget is not None and budget.limit_ms > usable
    ]
    total = sum(budget.limit_ms for budget in budgets if budget is not None and budget.must_follow)
    if not misfits and total > usable:
        misfits.append(Misfit(None, total, usable, timeout_for(total)))
    return misfits
