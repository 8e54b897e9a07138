"""What a call that needed a person answers with: one shape for every outcome, on every surface.

An approval is a success. That nobody has answered yet is no failure: the proposal stays, and the answer says how to go
on. A rejection is a decision, but whoever called must not take it for a permission, so it is not `ok`. And where the
inbox does not do what it was asked for, nothing has changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.clocks import ClockKind, Fired
from ..core.durations import format_duration
from ..core.effects import Ending, SideEffects
from ..core.envelope import Problem
from ..core.errors import Failure
from ..core.proposal import Proposal, ProposalStatus, Summary, result_of
from ..process.clock import monotonic_ns
from ..process.identity import is_alive
from ..runtime.call import Call, Outcome
from ..runtime.outcomes import failure_outcome

CALL_AGAIN = "make the call that was approved again, with the same arguments: it runs then"


def run_of(proposal: Proposal | Summary, dispatched: bool) -> dict[str, object] | None:
    """Say what became of what was approved: not_started, running, succeeded, failed, or unknown where its process is
    gone.

    None where nobody allowed anything, or whoever asked does it without us."""
    is_unanswered = proposal.status is ProposalStatus.EXPIRED and proposal.runner is not None
    if not dispatched or not (proposal.status.allows or is_unanswered):
        return None
    if proposal.outcome is not None:
        state = "succeeded" if proposal.outcome.ok else "failed"
        known: dict[str, object] = {"state": state, "at": proposal.outcome.at.iso()}
        return (
            known
            if proposal.outcome.ok
            else {**known, "code": proposal.outcome.code, "message": proposal.outcome.message}
        )
    if proposal.used_at is None and not is_unanswered:
        return {"state": "not_started", "at": None}
    runner = proposal.runner
    state = "running" if runner is not None and is_alive(runner.holder) else "unknown"
    job = {} if runner is None or runner.job_id is None else {"job_id": runner.job_id}
    return {"state": state, "at": None if proposal.used_at is None else proposal.used_at.iso(), **job}


def describe_proposal(proposal: Proposal) -> dict[str, object]:
    """Return the one shape of an answer, with what became of what was allowed."""
    run = run_of(proposal, proposal.ask.dispatched)
    return {**result_of(proposal), **({} if run is None else {"run": run})}


def outcome_of(proposal: Proposal, waited_ms: int, budget_ms: int, again: str | None = None) -> Outcome:
    """Answer whoever asked for a proposal, or asks how it stands. `again` is how to go on with a call
    that waits for it: the call itself."""
    data = describe_proposal(proposal)
    status = proposal.status
    if status.allows:
        run = data.get("run")
        if isinstance(run, dict) and run["state"] == "not_started":
            data["continue_command"] = again or CALL_AGAIN
            return Outcome(Ending.NOT_STARTED, data=data)
        return Outcome(Ending.FINISHED, data=data)
    if status is ProposalStatus.PENDING:
        data |= {
            "state": "paused",
            "job_id": proposal.id,
            "progress": {"done": 0, "total": 1, "unit": "decisions"},
            "continue_command": again or f"shotclock inbox check {proposal.id}",
            "cancel_command": f"shotclock inbox withdraw {proposal.id}",
        }
        message = f"nobody has decided {proposal.id} within {format_duration(budget_ms)}; it remains queued"
        fired = Fired(ClockKind.BUDGET, "caller", budget_ms, waited_ms)
        hint = None if again is None else "the identical call picks the decision up and runs: data.continue_command"
        problem = Problem("INCOMPLETE", message, fired=fired, side_effects=SideEffects.NONE, suggestion=hint)
        return Outcome(Ending.NOT_STARTED, problem, data)
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


def undecided_outcome(proposal_id: str, data: dict[str, object], around: Call) -> Outcome:
    """Answer for a step whose run had no more time to wait for it. `around` is what bounded the waiting."""
    fired = around.fired(ClockKind.TIMEOUT, monotonic_ns() - around.started_ns)
    message = f"nobody decided {proposal_id} before the run's time was over"
    return Outcome(Ending.NOT_STARTED, Problem("NO_TIME_LEFT", message, fired=fired), data)


def action_changed(proposal_id: object, context: Mapping[str, object]) -> Failure:
    """Make what a step raises that would do something else now than what was proposed for it."""
    message = f"what this step would do now is not what {proposal_id} asks for: it has changed since it was proposed"
    return Failure("ACTION_CHANGED", message, context=context, suggestion="run the workflow again, which asks anew")


def refusal_outcome(failure: Failure) -> Outcome:
    """Say that the inbox, or whoever guards it, would not do something: nothing has changed."""
    outcome = failure_outcome(failure)
    outcome.ending = Ending.NOT_STARTED
    return outcome
