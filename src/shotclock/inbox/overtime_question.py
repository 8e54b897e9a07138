"""The question of overtime to a person: may a long call go on, and for how much longer?

An ordinary question of the inbox, with what can be granted as its choices. It is open for as long as somebody waits for
the answer, and withdrawn when nobody does any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.clocks import format_duration
from ..core.proposal import Kind, Policy, ProposalRequest, ProposalStatus
from ..runtime.call import Call
from .access import Principal
from .inbox import LONGEST_WAIT_MS, Inbox

if TYPE_CHECKING:
    from ..core.overtime import OvertimeDecision

DECLINE = "no more time"
# What is shown of the call's own reason and of its output.
REASON_SHOWN = 1000
OUTPUT_SHOWN = 1500


async def ask_person(inbox_of: Callable[[], Inbox], call: Call, summary: dict[str, Any]) -> OvertimeDecision:
    """Ask in the inbox whether a call may have overtime, and return what is decided. Bounded by whoever asks: the
    question is withdrawn with a cancellation. Raises Failure where there is no usable inbox."""
    from ..core.overtime import OvertimeDecision

    assert call.overtime is not None
    policy, inbox, by = call.overtime.policy, inbox_of(), Principal.local()
    choices = _choices(summary, policy.share_ms)
    ask = ProposalRequest(
        Kind.QUESTION,
        f"More time for {call.name}?"[:200],
        _describe(summary),
        choices=tuple(choices),
        # A question that was answered before is another one: the id of the call and what it has had are in its text.
        policy=Policy(ttl_ms=max(1, policy.observer_timeout_ms), deciders=policy.deciders),
    )
    key = f"overtime/{call.request_id}/{len(call.overtime.requests)}"
    proposal = await inbox.propose(ask, by, key=key, outlives_asker=False)
    try:
        while proposal.is_open:
            proposal = await inbox.wait(proposal.id, LONGEST_WAIT_MS)  # bounded by whoever asks, and by its own end
    finally:
        if proposal.is_open:
            inbox.withdraw_unneeded(proposal.id, by)
    decision = proposal.decision
    notes = "" if decision is None else decision.notes
    who = proposal.decided_by or "nobody"
    if decision is None or proposal.status is ProposalStatus.EXPIRED:
        return OvertimeDecision(failed=True, reason="nobody answered in time")
    granted_ms = choices.get(decision.answer, 0) if isinstance(decision.answer, str) else 0
    return OvertimeDecision(granted_ms, f"{notes} ({who})" if notes else f"decided by {who}")


def _choices(summary: dict[str, Any], share_ms: int) -> dict[str, int]:
    """Return what can be answered: what is granted at a time, as much as there is, what was asked for, or nothing."""
    most_ms = int(summary["most_ms"])
    amounts = sorted({min(most_ms, ms) for ms in (summary.get("asked_ms") or share_ms, share_ms, most_ms)})
    return {f"{format_duration(ms)} more": ms for ms in amounts if ms > 0} | {DECLINE: 0}


def _describe(summary: dict[str, Any]) -> str:
    """Say what a person should know about the call."""
    lines = [f"It has run for {format_duration(summary['elapsed_ms'])}."]
    if summary["remaining_ms"] is not None:
        lines[0] += f" It is stopped in {format_duration(summary['remaining_ms'])}, whatever is decided."
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
