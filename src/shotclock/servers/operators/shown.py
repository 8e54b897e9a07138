"""Proposals as the API gives them. All texts are somebody else's: whoever shows them must not take them for markup."""

from __future__ import annotations

from typing import Any

from ...core.proposals import Proposal, Summary
from ...inbox import Principal, Role


def summary(proposal: Summary, principal: Principal) -> dict[str, Any]:
    is_decider = not proposal.deciders or principal.name in proposal.deciders
    return {
        "id": proposal.id,
        "seq": proposal.seq,
        "kind": proposal.kind.value,
        "title": proposal.title,
        "operation": proposal.operation,
        "path": proposal.path,
        "asked_by": proposal.asked_by,
        "status": proposal.status.value,
        "destructive": proposal.destructive,
        "created_at": proposal.created_at.iso(),
        "expires_at": proposal.expires_at.iso(),
        "decided_by": proposal.decided_by,
        "decided_at": None if proposal.decided_at is None else proposal.decided_at.iso(),
        "used_at": None if proposal.used_at is None else proposal.used_at.iso(),
        "notes": proposal.notes,
        "may_decide": principal.role is Role.OPERATOR and is_decider,
    }


def whole(proposal: Proposal, principal: Principal) -> dict[str, Any]:
    decision = proposal.decision
    return {
        **summary(proposal.summary, principal),
        **proposal.ask.as_json(),
        "action_hash": proposal.action_hash,
        "confirmation": proposal.ask.confirmation if proposal.ask.policy.destructive else None,
        "decision": None if decision is None else decision.as_json(),
        "_source": "external",
        "_trusted": False,
    }
