"""Proposals as the API gives them. All texts are somebody else's: whoever shows them must not take them for markup."""

from __future__ import annotations

from typing import Any

from ...core.proposals import Proposal
from ...inbox import Principal, Role


def may_decide(proposal: Proposal, principal: Principal) -> bool:
    deciders = proposal.ask.policy.deciders
    return principal.role is Role.OPERATOR and (not deciders or principal.name in deciders)


def summary(proposal: Proposal, principal: Principal) -> dict[str, Any]:
    """What a list shows: no long texts."""
    ask, decision = proposal.ask, proposal.decision
    return {
        "id": proposal.id,
        "seq": proposal.seq,
        "kind": ask.kind.value,
        "title": ask.title,
        "operation": ask.operation,
        "path": None if ask.file is None else ask.file.path,
        "asked_by": proposal.asked_by,
        "status": proposal.status.value,
        "destructive": ask.policy.destructive,
        "created_at": proposal.created_at.iso(),
        "expires_at": proposal.expires_at.iso(),
        "decided_by": proposal.decided_by,
        "decided_at": None if proposal.decided_at is None else proposal.decided_at.iso(),
        "used_at": None if proposal.used_at is None else proposal.used_at.iso(),
        "notes": None if decision is None else decision.notes[:200],
        "may_decide": may_decide(proposal, principal),
    }


def whole(proposal: Proposal, principal: Principal) -> dict[str, Any]:
    decision = proposal.decision
    return {
        **summary(proposal, principal),
        **proposal.ask.as_json(),
        "action_hash": proposal.action_hash,
        "confirmation": proposal.ask.confirmation if proposal.ask.policy.destructive else None,
        "decision": None if decision is None else decision.as_json(),
        "_source": "external",
        "_trusted": False,
    }
