"""The question of overtime to a person: how much longer may a call run?

It is an ordinary question of the inbox, with the possible extensions as its choices. It is withdrawn when its caller
stops waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.clocks import format_duration
from ..core.overtime import OvertimeDecision
from ..core.proposal import Kind, Policy, ProposalRequest
from ..runtime.call import Call
from .access import Principal
from .inbox import Inbox

DECLINE = "no more time"
# The parts of the call's own reason and of its output that are shown.
REASON_SHOWN = 1000
OUTPUT_SHOWN = 1500


async def ask_person(inbox_of: Callable[[], Inbox], call: Call, summary: dict[str, Any]) -> OvertimeDecision:
    """Ask in the inbox whether a call may have overtime, and return the decision.

    The caller bounds the wait: a cancellation withdraws the question. Raises Failure without a usable inbox.
    """
    assert call.overtime is not None
    policy, inbox, by = call.overtime.policy, inbox_of(), Principal.local()
    choices = _choices(summary, policy.share_ms)
    ask = ProposalRequest(
        Kind.QUESTION,
        f"More time for {call.name}?"[:200],
        _describe(summary),
        choices=tuple(choices),
        policy=Policy(ttl_ms=max(1, policy.observer_timeout_ms), deciders=policy.deciders),
    )
    # A new key for every question of a call: an earlier answer must not be found again.
    key = f"overtime/{call.request_id}/{len(call.overtime.requests)}"
    proposal = await inbox.propose(ask, by, key=key, outlives_asker=False)
    try:
        proposal = await inbox.wait_until(proposal, None)
    finally:
        if proposal.is_open:
            inbox.withdraw_unneeded(proposal.id, by)
    decision = proposal.decision
    if decision is None:
        return OvertimeDecision(failed=True, reason="the question was not answered in time")
    granted_ms = choices.get(decision.answer, 0) if isinstance(decision.answer, str) else 0
    by_name = proposal.decided_by
    return OvertimeDecision(granted_ms, f"{decision.notes} ({by_name})" if decision.notes else f"decided by {by_name}")


def _choices(summary: dict[str, Any], share_ms: int) -> dict[str, int]:
    """Return the possible answers: the requested time, one share, all that is left, or nothing."""
    most_ms = int(summary["most_ms"])
    amounts = sorted({min(most_ms, ms) for ms in (summary.get("asked_ms") or share_ms, share_ms, most_ms)})
    return {f"{format_duration(ms)} more": ms for ms in amounts if ms > 0} | {DECLINE: 0}


def _describe(summary: dict[str, Any]) -> str:
    """Return the facts about the call for the person."""
    lines = [f"It has run for {format_duration(summary['elapsed_ms'])}."]
    if summary["remaining_ms"] is not None:
        lines[0] += f" It is stopped in {format_duration(summary['remaining_ms'])} at the latest."
    if summary.get("reason"):
        lines.append(f"It asks for more itself: {summary['reason'][:REASON_SHOWN]}")
    if summary["granted_ms"]:
        lines.append(f"It was given {format_duration(summary['granted_ms'])} before.")
    lines.append("Its output or its progress has grown." if summary["has_grown"] else "It has shown nothing new.")
    if summary["progress"]:
        last = summary["progress"][-1]
        of = "" if last["total"] is None else f" of {last['total']}"
        lines.append(f"Progress: {last['done']}{of} {last['message'] or ''}".strip())
    if summary["calls"]:
        lines.append("Inside it: " + ", ".join(str(inner["call"]) for inner in summary["calls"][:10]))
    for name in ("stdout", "stderr"):
        if summary[name].strip():
            lines.append(f"The end of its {name}:\n{summary[name][-OUTPUT_SHOWN:]}")
    return "\n\n".join(lines)
