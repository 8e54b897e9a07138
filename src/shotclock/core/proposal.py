"""Proposals: the request of an agent to a person, the decision, the transitions of a proposal, and its result.

    pending ──┬─ approved | modified | rejected     decided by a person; an approval is used once
              ├─ expired                            not decided in time; never shown as rejected
              └─ withdrawn                          taken back by the agent

The transitions are pure: the store applies them inside a transaction, so that of two at once one wins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from .errors import Failure
from .limits import LATEST_MS, MAX_MS, ProcessIdentity, WallTime
from .value_types import JsonObject, as_dict, fields_of, replace, value
from .visible_text import text_of

JSON = Any  # a recursive alias would not help code that has to look inside
Problems = list[dict[str, str]]

STILL_QUEUED = "operator response timed out; proposal remains queued"
# The part of an operator's notes that a list shows.
NOTES_SHOWN = 200


@value
class InboxLimits:
    """Limits of open proposals, so that an agent that asks in a loop buries neither a person nor other agents."""

    each: int = 100  # of one agent
    all: int = 1_000


class ProposalStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    MODIFIED = "modified"
    REJECTED = "rejected"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"

    @property
    def is_open(self) -> bool:
        return self is ProposalStatus.PENDING

    @property
    def is_decided(self) -> bool:
        return self in (ProposalStatus.APPROVED, ProposalStatus.MODIFIED, ProposalStatus.REJECTED)

    @property
    def allows(self) -> bool:
        return self in (ProposalStatus.APPROVED, ProposalStatus.MODIFIED)


class Kind(StrEnum):
    OPERATION = "operation"
    FILE = "file"
    QUESTION = "question"


@value
class Policy:
    ttl_ms: int = 86_400_000
    """The time until it expires; until then its decision also answers the identical call. 0: it does not expire."""
    remind_ms: int = 0  # the time between the reminder and the end. 0: no reminder
    when_expired: Literal["expire", "reject", "default"] = "expire"
    """The continuation of the work if it is not answered. The proposal itself is `expired` in any case."""
    deciders: tuple[str, ...] = ()  # the names of the operators who may decide. Empty: any
    destructive: bool = False  # approving needs a typed confirmation


@value
class ProposedFile:
    path: str
    proposed: str
    current: str | None = None
    """The text that the change is shown against. None: there is no such file, or its text is unknown."""
    was_read: bool = False  # whether Shotclock has read `current` itself; otherwise it is a claim of the agent


@value
class ProposalRequest:
    """Content of a proposal. It never changes; another request is another proposal."""

    kind: Kind
    title: str
    justification: str = ""
    operation: str | None = None
    arguments: Mapping[str, JSON] | None = None
    file: ProposedFile | None = None
    choices: tuple[str, ...] = ()
    default: JSON = None
    input_schema: dict[str, JSON] | None = None
    """The schema of `arguments`, for a form and for mistakes in a modification."""
    policy: Policy = Policy()
    surroundings: Mapping[str, JSON] | None = None
    """Further parts of the action that cannot be modified: directory, environment, program, number of attempts."""
    dispatched: bool = False  # whether Shotclock carries the action out. Otherwise the agent does, unseen

    @property
    def text(self) -> str:
        """Return the whole action as every surface shows it."""
        action: JsonObject
        if self.operation is not None:
            action = {"run" if self.dispatched else "the asker runs": self.operation}
            if self.arguments is not None:
                action["with"] = dict(sorted(self.arguments.items()))  # their order has no meaning
        elif self.file is not None:
            content = self.file.proposed.encode("utf-8", "surrogatepass")
            action = {
                "write" if self.dispatched else "the asker writes": self.file.path,
                "with": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
            }
        else:
            action = {"question": self.title} | ({"choices": list(self.choices)} if self.choices else {})
        if self.surroundings:
            action["where"] = dict(sorted(self.surroundings.items()))
        return text_of(action)

    @property
    def action_hash(self) -> str:
        """Return the hash of the action, without its justification and its policy."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def confirmation(self) -> str:
        """Return the text to be typed before a destructive action is approved."""
        return " ".join((self.operation or self.title).split())


@value
class Decision:
    status: ProposalStatus  # APPROVED, MODIFIED or REJECTED
    notes: str = ""
    arguments: Mapping[str, JSON] | None = None  # the arguments of a modified operation
    file_text: str | None = None  # the text of a modified file
    answer: JSON = None  # the answer to a question, which is approved with it


@value
class Confirmation:
    """What a person was shown, and has typed, before deciding."""

    action_hash: str | None = None  # of the action that was shown
    typed: str | None = None  # for a destructive action


def canonical(value: JSON) -> str:
    """Return one text for one value, with its keys sorted. Raises ValueError or TypeError where it is not JSON."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deep") from None


def digest(value: JSON) -> str:
    """Return the identity of a JSON value: of calls under a key, of jobs, of checkpoints and of audit entries."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


@value
class Runner:
    """Process that runs an approved action, or the job that outlives it."""

    holder: ProcessIdentity
    job_id: str | None = None


@value
class ActionOutcome:
    ok: bool
    at: WallTime
    code: str | None = None  # the error code of a failed one
    message: str | None = None


@value
class Summary:
    """Fields that a list shows of a proposal, without long texts."""

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
    notes: str | None  # the beginning of the operator's notes; None while it is not decided

    @property
    def is_open(self) -> bool:
        return self.status.is_open


_NOTES = {
    ProposalStatus.PENDING: STILL_QUEUED,
    ProposalStatus.EXPIRED: "it expired before it was decided",
    ProposalStatus.WITHDRAWN: "withdrawn by the agent that proposed it",
}


@value
class Proposal:
    """A proposal with its decision and outcome. Each transition returns a new one."""

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
    """The surface of the decision: the command line, HTTP, or an MCP client that asked its own user."""
    used_at: WallTime | None = None
    """When the approved operation was dispatched. An approval is valid for one run."""
    runner: Runner | None = None
    outcome: ActionOutcome | None = None
    reminded_at: WallTime | None = None
    seq: int = 0  # grows with every change of any proposal, so that a watcher knows which changes it has seen

    @property
    def is_open(self) -> bool:
        return self.status.is_open

    @property
    def is_unused(self) -> bool:
        """Return whether the action was not started yet, neither after an approval nor without an answer."""
        return self.used_at is None and self.runner is None

    @property
    def remind_at(self) -> WallTime | None:
        """Return when the reminder is due, if there is one to come."""
        if not self.ask.policy.remind_ms or self.reminded_at is not None or not self.is_open:
            return None
        return WallTime(max(self.created_at.ms, self.expires_at.ms - self.ask.policy.remind_ms))

    @property
    def summary(self) -> Summary:
        shared = {name: each for name, each in as_dict(self).items() if name in fields_of(Summary)}
        return Summary(
            **shared,
            kind=self.ask.kind,
            title=self.ask.title,
            operation=self.ask.operation,
            path=None if self.ask.file is None else self.ask.file.path,
            destructive=self.ask.policy.destructive,
            deciders=self.ask.policy.deciders,
            dispatched=self.ask.dispatched,
            notes=None if self.decision is None else self.decision.notes[:NOTES_SHOWN],
        )

    def is_due(self, now: WallTime) -> bool:
        return self.is_open and now >= self.expires_at

    def expires_by(self, until: WallTime | None) -> WallTime:
        """Return its end by its policy, or the earlier end of the work that asks."""
        ttl_ms = self.ask.policy.ttl_ms
        own = self.created_at + ttl_ms if ttl_ms else WallTime(LATEST_MS)
        return own if until is None else min(own, until)

    @property
    def ended_with_its_work(self) -> bool:
        """Return whether it expired because the work that asked had no more time."""
        return self.status is ProposalStatus.EXPIRED and self.expires_at < self.expires_by(None)

    @property
    def allows_unanswered(self) -> bool:
        """Return whether it expired and its policy continues without an answer."""
        is_default = self.ask.policy.when_expired == "default"
        return is_default and self.status is ProposalStatus.EXPIRED and not self.ended_with_its_work

    def answers(self, now: WallTime) -> bool:
        """Return whether the identical call is answered by this one instead of a new one."""
        return now < self.expires_at and (self.is_open or (self.status.is_decided and self.used_at is None))

    @property
    def arguments(self) -> Mapping[str, JSON] | None:
        """Return the arguments that the operation may be run with."""
        if self.status is ProposalStatus.MODIFIED and self.decision is not None:
            return self.decision.arguments
        return self.ask.arguments

    @property
    def file_text(self) -> str | None:
        """Return the text that the file may be given."""
        if self.status is ProposalStatus.MODIFIED and self.decision is not None:
            return self.decision.file_text
        return None if self.ask.file is None else self.ask.file.proposed

    def must_be_open(self) -> None:
        """Raise Failure with its end and its author, unless it is open."""
        if self.is_open:
            return
        context: dict[str, object] = {"proposal_id": self.id, "status": self.status.value}
        if self.status is ProposalStatus.EXPIRED:
            context["expires_at"] = self.expires_at.iso()
            why = ": the work that asked had no time left" if self.ended_with_its_work else ""
            raise Failure("PROPOSAL_EXPIRED", f"{self.id} expired at {self.expires_at}{why}", context=context)
        if self.decided_at is None:
            message = f"{self.id} was withdrawn by {self.asked_by}"
            raise Failure("PROPOSAL_WITHDRAWN", message, context=context)
        context |= {"decided_by": self.decided_by, "decided_at": self.decided_at.iso()}
        message = f"{self.id} was {self.status} by {self.decided_by} at {self.decided_at}"
        raise Failure("ALREADY_DECIDED", message, context=context)

    def as_result(self) -> dict[str, JSON]:
        """Return the result for the agent, in one shape for every status.

        `arguments`, `file` and `answer` are present only if they may be acted upon.
        """
        decision = self.decision
        result: dict[str, JSON] = {
            "status": self.status.value,
            "proposal_id": self.id,
            "notes": decision.notes if decision is not None else _NOTES[self.status],
            "title": self.ask.title,
            "expires_at": self.expires_at.iso(),
        }
        if self.status.allows:
            if self.arguments is not None:
                result["arguments"] = dict(self.arguments)
            if self.ask.file is not None:
                result["file"] = {"path": self.ask.file.path, "text": self.file_text}
            if self.ask.kind is Kind.QUESTION and decision is not None:
                result["answer"] = decision.answer
        if self.decided_by is not None and self.decided_at is not None:
            result |= {"decided_by": self.decided_by, "decided_at": self.decided_at.iso()}
        return result


# --- transitions ------------------------------------------------------------------------------------------------


def apply_decision(
    proposal: Proposal,
    decision: Decision,
    by: str,
    now: WallTime,
    *,
    via: str | None = None,
    confirmation: Confirmation = Confirmation(),
) -> Proposal:
    """Return it decided. Raises Failure unless it is open, this person may decide it, and the action is the one shown.

    `problems_with_decision` checks the decision itself.
    """
    may_decide(proposal, by)
    proposal.must_be_open()
    if confirmation.action_hash not in (None, proposal.action_hash):
        raise Failure("ACTION_CHANGED", f"{proposal.id} proposes another action than the one that was decided on")
    if decision.status.allows and proposal.ask.policy.destructive:
        expected = proposal.ask.confirmation
        if " ".join((confirmation.typed or "").split()) != expected:
            message = f"this is destructive: confirm it by typing {expected!r}"
            raise Failure("CONFIRMATION_NEEDED", message, context={"confirmation": expected})
    return replace(
        proposal, status=decision.status, decision=decision, decided_by=by, decided_at=now, decided_via=via or None
    )


def apply_expiry(proposal: Proposal) -> Proposal:
    proposal.must_be_open()
    return replace(proposal, status=ProposalStatus.EXPIRED)


def apply_withdrawal(proposal: Proposal, by: str) -> Proposal:
    """Return it withdrawn. Raises Failure unless it is open and was proposed by the same agent."""
    if by != proposal.asked_by:
        raise Failure("NOT_ALLOWED", f"{proposal.id} was proposed by {proposal.asked_by}, who alone may withdraw it")
    proposal.must_be_open()
    return replace(proposal, status=ProposalStatus.WITHDRAWN)


def apply_extension(proposal: Proposal, by_ms: int, by: str) -> Proposal:
    """Return it with a later end and a new reminder. Raises Failure unless it is open and this person may decide it."""
    may_decide(proposal, by)
    proposal.must_be_open()
    if type(by_ms) is not int or not 0 < by_ms <= MAX_MS:
        raise Failure("ARG_ERROR", "a proposal is extended by a time from 1ms to ten years")
    expires_at = WallTime(min(LATEST_MS, proposal.expires_at.ms + by_ms))
    return replace(proposal, expires_at=expires_at, reminded_at=None)


def apply_use(
    proposal: Proposal, action_hash: str, now: WallTime, runner: Runner | None = None, *, unanswered: bool = False
) -> Proposal:
    """Return it used. Raises Failure unless this is an unused approval of exactly that action.

    `unanswered`: it expired instead, and its policy continues without an answer.
    """
    if unanswered and not proposal.allows_unanswered:
        raise Failure("NOT_ALLOWED", f"{proposal.id} is {proposal.status}, and its policy needs an answer")
    if not unanswered and not proposal.status.allows:
        raise Failure("NOT_ALLOWED", f"{proposal.id} is {proposal.status}, not approved")
    if action_hash != proposal.action_hash:
        raise Failure("ACTION_CHANGED", f"{proposal.id} proposes another action")
    if proposal.used_at is not None:
        raise Failure("ALREADY_DECIDED", f"the approval {proposal.id} was used at {proposal.used_at}")
    if proposal.runner is not None:
        raise Failure("ALREADY_DECIDED", f"the action of {proposal.id} was started before")
    return replace(proposal, used_at=None if unanswered else now, runner=runner)


def apply_outcome(proposal: Proposal, outcome: ActionOutcome, *, unused: bool = False) -> Proposal:
    """Return it with its outcome. Raises Failure if it has one, and unless it was used or, with `unused`, was not."""
    if proposal.is_unused is not unused or (unused and not proposal.status.allows):
        raise Failure("NOT_ALLOWED", f"the action of {proposal.id} was {'' if unused else 'not '}started")
    if proposal.outcome is not None:
        raise Failure("ALREADY_DECIDED", f"the outcome of {proposal.id} is already recorded")
    return replace(proposal, outcome=outcome)


def may_decide(proposal: Proposal, by: str) -> None:
    deciders = proposal.ask.policy.deciders
    if deciders and by not in deciders:
        raise Failure("NOT_ALLOWED", f"{proposal.id} is for {', '.join(deciders)} to decide, not for {by}")
