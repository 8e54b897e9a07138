"""What a call that needed a person answers with: one shape for every outcome, on every surface.

An approval is a success. That nobody has answered yet is no failure: the proposal stays, and the answer says how to go
on. A rejection is a decision, but whoever called must not take it for a permission, so it is not `ok`. And where the
inbox does not do what it was asked for, nothing has changed.
"""

from __future__ import annotations

from ..core.clocks import ClockKind, Fired
from ..core.durations import format_duration
from ..core.effects import Ending, SideEffects
from ..core.envelope import Problem
from ..core.errors import Failure
from ..core.proposals import Proposal, ProposalStatus, result_of
from ..core.records import changed
from ..enforce.admission import Outcome
from ..enforce.outcomes import failure_outcome


def outcome_of(proposal: Proposal, waited_ms: int, budget_ms: int) -> Outcome:
    """What is said about a proposal to whoever asked for it, or asks how it stands."""
    data: dict[str, object] = dict(result_of(proposal))
    status = proposal.status
    if status.allows:
        return Outcome(Ending.FINISHED, data=data)
    if status is ProposalStatus.PENDING:
        data |= {
            "state": "paused",
            "job_id": proposal.id,
            "progress": {"done": 0, "total": 1, "unit": "decisions"},
            "continue_command": f"shotclock inbox check {proposal.id}",
            "cancel_command": f"shotclock inbox withdraw {proposal.id}",
        }
        message = f"nobody has decided {proposal.id} within {format_duration(budget_ms)}; it remains queued"
        fired = Fired(ClockKind.BUDGET, "caller", budget_ms, waited_ms)
        return Outcome(
            Ending.NOT_STARTED, Problem("INCOMPLETE", message, fired=fired, side_effects=SideEffects.NONE), data
        )
    if status is ProposalStatus.REJECTED:
        notes = f": {data['notes']}" if data["notes"] else ""
        return Outcome(
            Ending.NOT_STARTED,
            Problem("PROPOSAL_REJECTED", f"{proposal.id} was rejected by {proposal.decided_by}{notes}"),
            data,
        )
    code = f"PROPOSAL_{status.name}"
    message = (
        f"{proposal.id} expired at {proposal.expires_at}" if status is ProposalStatus.EXPIRED else str(data["notes"])
    )
    return Outcome(Ending.NOT_STARTED, Problem(code, message), data)


def refused(failure: Failure) -> Outcome:
    """What the inbox, or its door, would not do; with everything that is wrong with what was said, where it says so."""
    outcome = failure_outcome(failure)
    outcome.ending = Ending.NOT_STARTED
    errors = failure.context.get("errors")
    if failure.code == "ARG_ERROR" and isinstance(errors, list) and isinstance(outcome.problem, Problem):
        outcome.problem = changed(outcome.problem, phase="validation", errors=errors, context=None)
    return outcome
