"""Proposals: what an agent asks a person for, the changes a proposal may go through, and the one shape of the answer.

    pending ──┬─ approved | modified | rejected     a person decided; an approval is used once
              ├─ expired                            nobody did in time; never shown as rejected
              └─ withdrawn                          the asker took it back

The transitions here are pure: the store applies them inside a transaction, so that of two at once one wins.
"""

from __future__ import annotations

from collections.abc import Mapping

from .clocks import LATEST_MS, MAX_MS, ProcessIdentity, WallTime
from .envelope import join_problems
from .errors import Failure
from .proposal_request import (
    JSON,
    Decision,
    InboxLimits,
    Kind,
    Policy,
    Problems,
    ProposalRequest,
    ProposalStatus,
    ProposedFile,
    canonical,
    digest,
    problems_with,
    problems_with_answer,
    problems_with_key,
)
from .value_types import replace, value

__all__ = [
    "ActionOutcome",
    "Decision",
    "InboxLimits",
    "Kind",
    "Policy",
    "Problems",
    "Proposal",
    "ProposalRequest",
    "ProposalStatus",
    "ProposedFile",
    "Runner",
    "Summary",
    "apply_decision",
    "apply_expiry",
    "apply_extension",
    "apply_going_on",
    "apply_outcome",
    "apply_use",
    "apply_withdrawal",
    "canonical",
    "check_decision",
    "digest",
    "may_decide",
    "must_be_open",
    "problems_with",
    "problems_with_decision",
    "problems_with_key",
    "refusal",
    "result_of",
]

STILL_QUEUED = "operator response timed out; proposal remains queued"
# What a list shows of an operator's notes.
NOTES_SHOWN = 200


@value
class Runner:
    """Process that runs what was approved, or the job that outlives it."""

    holder: ProcessIdentity
    job_id: str | None = None


@value
class ActionOutcome:
    """Outcome of what was approved."""

    ok: bool
    at: WallTime
    code: str | None = None
    """Of the error, where it failed."""
    message: str | None = None


@value
class Summary:
    """Fields that a list shows of a proposal, and all that is read for it: no long texts."""

    id: str
    seq: int
    status: ProposalStatus
    asked_by: str
    created_at: WallTime
    expires_at: WallTime
    decided_by: str | None
    decided_at: WallTime | None
    decided_via: str | None
    used_at: WallTime | None
    runner: Runner | None
    outcome: ActionOutcome | None
    kind: Kind
    title: str
    operation: str | None
    path: str | None
    destructive: bool
    deciders: tuple[str, ...]
    dispatched: bool
    notes: str | None
    """The beginning of what the operator wrote; None while nobody has decided."""

    @property
    def is_open(self) -> bool:
        return self.status.is_open


@value
class Proposal:
    """A proposal with its decision and outcome. Never changed in place: each transition returns a new one."""

    id: str
    ask: ProposalRequest
    asked_by: str
    key: str | None
    action_hash: str
    status: ProposalStatus
    created_at: WallTime
    expires_at: WallTime
    decision: Decision | None = None
    decided_by: str | None = None
    decided_at: WallTime | None = None
    decided_via: str | None = None
    """Through what the decision came: the command line, HTTP, or a client that asked its own person."""
    used_at: WallTime | None = None
    """When the approved operation was dispatched: an approval lets one pass."""
    runner: Runner | None = None
    """Who dispatched it."""
    outcome: ActionOutcome | None = None
    """What became of it, once that is known."""
    reminded_at: WallTime | None = None
    seq: int = 0
    """Grows with every change of any proposal, so that a watcher knows what it has seen."""

    @property
    def is_open(self) -> bool:
        return self.status.is_open

    @property
    def is_unused(self) -> bool:
        """Return whether nobody has gone on with it yet, after a yes or without an answer."""
        return self.used_at is None and self.runner is None

    @property
    def remind_at(self) -> WallTime | None:
        """Return when the reminder is due; None if there is none (any more)."""
        if not self.ask.policy.remind_ms or self.reminded_at is not None or not self.is_open:
            return None
        return WallTime(max(self.created_at.ms, self.expires_at.ms - self.ask.policy.remind_ms))

    @property
    def summary(self) -> Summary:
        about = self.ask.about()
        return Summary(
            self.id,
            self.seq,
            self.status,
            self.asked_by,
            self.created_at,
            self.expires_at,
            self.decided_by,
            self.decided_at,
            self.decided_via,
            self.used_at,
            self.runner,
            self.outcome,
            **{**about, "kind": self.ask.kind, "deciders": self.ask.policy.deciders},
            notes=None if self.decision is None else self.decision.notes[:NOTES_SHOWN],
        )

    def is_due(self, now: WallTime) -> bool:
        return self.is_open and now >= self.expires_at

    def answers(self, now: WallTime) -> bool:
        """Return whether the identical call is answered by this one instead of a new one."""
        if now >= self.expires_at:
            return False
        return self.is_open or (self.status.is_decided and self.used_at is None)

    @property
    def arguments(self) -> Mapping[str, JSON] | None:
        """Return what the operation is to be run with, if it may be run."""
        if self.status is ProposalStatus.MODIFIED and self.decision is not None:
            return self.decision.arguments
        return self.ask.arguments

    @property
    def file_text(self) -> str | None:
        """Return what the file is to hold, if it may be written."""
        if self.status is ProposalStatus.MODIFIED and self.decision is not None:
            return self.decision.file_text
        return None if self.ask.file is None else self.ask.file.proposed


# --- transitions ------------------------------------------------------------------------------------------------


def apply_decision(
    proposal: Proposal,
    decision: Decision,
    by: str,
    now: WallTime,
    *,
    via: str | None = None,
    action_hash: str | None = None,
    confirmation: str | None = None,
) -> Proposal:
    """Return it decided. Raises Failure where it may not be decided any more, not by this person, or not like this.

    `action_hash` is what the person was shown. The decision itself is checked by `problems_with_decision`.
    """
    may_decide(proposal, by)
    must_be_open(proposal)
    if action_hash is not None and action_hash != proposal.action_hash:
        raise Failure("ACTION_CHANGED", f"{proposal.id} proposes something else than what was decided on")
    if decision.status.allows and proposal.ask.policy.destructive:
        expected = proposal.ask.confirmation
        if " ".join((confirmation or "").split()) != expected:
            message = f"this is destructive: confirm it by typing {expected!r}"
            raise Failure("CONFIRMATION_NEEDED", message, context={"confirmation": expected})
    return replace(
        proposal, status=decision.status, decision=decision, decided_by=by, decided_at=now, decided_via=via or None
    )


def apply_expiry(proposal: Proposal) -> Proposal:
    """Return it expired. Raises Failure unless it is open."""
    must_be_open(proposal)
    return replace(proposal, status=ProposalStatus.EXPIRED)


def apply_withdrawal(proposal: Proposal, by: str) -> Proposal:
    """Return it withdrawn. Raises Failure unless it is open and by whoever proposed it."""
    if by != proposal.asked_by:
        raise Failure("NOT_ALLOWED", f"{proposal.id} was proposed by {proposal.asked_by}, who alone may withdraw it")
    must_be_open(proposal)
    return replace(proposal, status=ProposalStatus.WITHDRAWN)


def apply_extension(proposal: Proposal, by_ms: int, by: str) -> Proposal:
    """Return it with a later end, and a reminder again before that. Raises Failure unless it is open and theirs to
    decide."""
    may_decide(proposal, by)
    must_be_open(proposal)
    if type(by_ms) is not int or not 0 < by_ms <= MAX_MS:
        raise Failure("ARG_ERROR", "a proposal is extended by a time from 1ms to ten years")
    expires_at = WallTime(min(LATEST_MS, proposal.expires_at.ms + by_ms))
    return replace(proposal, expires_at=expires_at, reminded_at=None)


def apply_use(proposal: Proposal, action_hash: str, now: WallTime, runner: Runner | None = None) -> Proposal:
    """Return it used. Raises Failure unless this is an approval of exactly that action, and nobody has used it."""
    if not proposal.status.allows:
        raise Failure("NOT_ALLOWED", f"{proposal.id} is {proposal.status}, not approved")
    if action_hash != proposal.action_hash:
        raise Failure("ACTION_CHANGED", f"{proposal.id} approves something else than what would be done")
    if proposal.used_at is not None:
        raise Failure("ALREADY_DECIDED", f"the approval {proposal.id} was used at {proposal.used_at}")
    return replace(proposal, used_at=now, runner=runner)


def apply_going_on(proposal: Proposal, action_hash: str, runner: Runner) -> Proposal:
    """Return it gone on without an answer. Raises Failure unless its rules say so, it is of exactly that action, and
    nobody has."""
    if proposal.status is not ProposalStatus.EXPIRED or proposal.ask.policy.when_expired != "default":
        raise Failure("NOT_ALLOWED", f"{proposal.id} is {proposal.status}, and nothing lets it go on")
    if action_hash != proposal.action_hash:
        raise Failure("ACTION_CHANGED", f"{proposal.id} proposes something else than what would be done")
    if proposal.runner is not None:
        raise Failure("ALREADY_DECIDED", f"what {proposal.id} proposes has gone on before")
    return replace(proposal, runner=runner)


def apply_outcome(proposal: Proposal, outcome: ActionOutcome) -> Proposal:
    """Return it with its outcome. Raises Failure unless it was used, and nobody has said yet what became of it."""
    if proposal.is_unused:
        raise Failure("NOT_ALLOWED", f"nothing was run with {proposal.id}")
    if proposal.outcome is not None:
        raise Failure("ALREADY_DECIDED", f"what became of {proposal.id} is known")
    return replace(proposal, outcome=outcome)


def refusal(problems: Problems) -> Failure:
    """Return the Failure that names every problem at once."""
    message = join_problems(problems)
    return Failure("ARG_ERROR", message, context={"errors": problems})


def may_decide(proposal: Proposal, by: str) -> None:
    """Raise Failure unless the person is one of its deciders."""
    deciders = proposal.ask.policy.deciders
    if deciders and by not in deciders:
        raise Failure("NOT_ALLOWED", f"{proposal.id} is for {', '.join(deciders)} to decide, not for {by}")


def must_be_open(proposal: Proposal) -> None:
    """Raise Failure that says how it ended and who ended it, unless it is open."""
    if proposal.is_open:
        return
    context: dict[str, object] = {"proposal_id": proposal.id, "status": proposal.status.value}
    if proposal.status is ProposalStatus.EXPIRED:
        context["expires_at"] = proposal.expires_at.iso()
        raise Failure("PROPOSAL_EXPIRED", f"{proposal.id} expired at {proposal.expires_at}", context=context)
    if proposal.status is ProposalStatus.WITHDRAWN:
        message = f"{proposal.id} was withdrawn by {proposal.asked_by}"
        raise Failure("PROPOSAL_WITHDRAWN", message, context=context)
    assert proposal.decided_at is not None
    context |= {"decided_by": proposal.decided_by, "decided_at": proposal.decided_at.iso()}
    message = f"{proposal.id} was {proposal.status} by {proposal.decided_by} at {proposal.decided_at}"
    raise Failure("ALREADY_DECIDED", message, context=context)


# --- what the asker is told -------------------------------------------------------------------------------------

_NOTES = {
    ProposalStatus.PENDING: STILL_QUEUED,
    ProposalStatus.EXPIRED: "nobody decided before it expired",
    ProposalStatus.WITHDRAWN: "withdrawn by whoever proposed it",
}


def result_of(proposal: Proposal) -> dict[str, JSON]:
    """Return the answer to the asker: one shape, whatever became of it. `arguments`, `file` or `answer` are there when
    they may be acted upon."""
    decision = proposal.decision
    result: dict[str, JSON] = {
        "status": proposal.status.value,
        "proposal_id": proposal.id,
        "notes": decision.notes if decision is not None else _NOTES[proposal.status],
        "title": proposal.ask.title,
        "expires_at": proposal.expires_at.iso(),
    }
    if proposal.status.allows:
        if proposal.arguments is not None:
            result["arguments"] = dict(proposal.arguments)
        if proposal.ask.file is not None:
            result["file"] = {"path": proposal.ask.file.path, "text": proposal.file_text}
        if proposal.ask.kind is Kind.QUESTION and decision is not None:
            result["answer"] = decision.answer
    if proposal.decided_by is not None and proposal.decided_at is not None:
        result |= {"decided_by": proposal.decided_by, "decided_at": proposal.decided_at.iso()}
    return result


def check_decision(proposal: Proposal, decision: Decision, by: str) -> None:
    """Raise Failure unless this person may decide it, now, and like this."""
    may_decide(proposal, by)
    must_be_open(proposal)
    if problems := problems_with_decision(proposal, decision):
        raise refusal(problems)


def problems_with_decision(proposal: Proposal, decision: Decision) -> Problems:
    """Return all problems at once; none if it can be carried out."""
    return problems_with_answer(proposal.ask, decision)
