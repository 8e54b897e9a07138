"""What is said where the inbox, or its door, does not do what it was asked for. Nothing has changed then."""

from __future__ import annotations

from ..core.clocks import Clocks
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem
from ..core.errors import Failure
from ..core.records import changed
from ..enforce.admission import Outcome, admit, answer
from ..enforce.handlers import raised
from .parsing import Mistakes


def mistaken(name: str, mistakes: Mistakes) -> Envelope:
    message = "; ".join(f"{mistake['field']}: {mistake['message']}" for mistake in mistakes)
    problem = Problem("ARG_ERROR", message, "validation", errors=mistakes)
    return answer(admit(name, Clocks()), Outcome(Ending.NOT_STARTED, problem))


def failed(failure: Failure) -> Outcome:
    outcome = raised(failure)
    outcome.ending = Ending.NOT_STARTED
    errors = failure.context.get("errors")
    if failure.code == "ARG_ERROR" and isinstance(errors, list) and isinstance(outcome.problem, Problem):
        outcome.problem = changed(outcome.problem, phase="validation", errors=errors, context=None)
    return outcome
