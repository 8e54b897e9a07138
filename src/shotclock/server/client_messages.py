"""Messages to a client while its call runs: questions to its person (elicitation), and progress.

A client of the 2026 revision gets `input_required` and repeats the call with the answer; an older one is asked while
the call waits. The first decision counts, here or in the inbox.

Nothing proves that a person answered, because the client relays the answer. So elicitation is off unless the App or
`serve` enables it, never used for destructive or very long proposals, and the audit trail names the client. Only two
clients are asked: one that started this server as its child, and so has its user's access to the inbox anyway, and one
with an operator's token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp_types import ClientCapabilities, ElicitationCapability

from ..core.errors import Failure
from ..core.proposal import Decision, Kind, Proposal, ProposalStatus
from ..core.value_types import replace
from ..core.visible_text import one_line, visible
from ..inbox.access import Principal, Role
from ..inbox.inbox import Inbox
from ..process.clock import monotonic_ns

# Characters of an action that a client can show; a longer one is left to the inbox. Justifications are cut.
SHOWN_LENGTH = 4_000
WHY_LENGTH = 1_000
NAME_LENGTH = 100
LONGEST_ASK_S = 3_600.0  # a client may take as long as its call; this bounds one that never answers


def decider_at(ctx: ServerRequestContext[Any, Any], caller: Principal) -> Principal | None:
    """Return the principal that decides if this client is asked; None if it cannot be."""
    if not ctx.session.check_client_capability(ClientCapabilities(elicitation=ElicitationCapability())):
        return None
    client = ctx.session.client_params
    name = "without a name" if client is None else one_line(client.client_info.name, NAME_LENGTH)
    via = f"MCP client {name} (elicitation)"
    if ctx.request is None:
        return replace(Principal.local(), via=via)
    return replace(caller, via=via) if caller.role is Role.OPERATOR else None


def may_answer(proposal: Proposal, decider: Principal) -> bool:
    """Return whether this person may decide: allowed to, not destructive, short enough to be shown."""
    policy = proposal.ask.policy
    is_theirs = not policy.deciders or decider.name in policy.deciders
    return is_theirs and not policy.destructive and len(_done(proposal)) <= SHOWN_LENGTH


def form_for(proposal: Proposal) -> tuple[str, dict[str, Any]]:
    """Return the message and schema of a question. The action comes first, so that no justification hides it."""
    ask = proposal.ask
    message = _done(proposal)
    if ask.justification:
        message += "\n\n" + _beginning(f"The agent says: {ask.justification}", WHY_LENGTH, proposal.id)
    properties: dict[str, Any] = {}
    if ask.kind is Kind.QUESTION:
        properties["answer"] = {"type": "string", "title": "Answer"}
        if ask.choices:
            properties["answer"]["enum"] = list(ask.choices)
        required = ["answer"]
    else:
        properties["decision"] = {"type": "string", "title": "Decision", "enum": ["approve", "reject"]}
        required = ["decision"]
    properties["notes"] = {"type": "string", "title": "Notes"}
    return message, {"type": "object", "properties": properties, "required": required}


def _done(proposal: Proposal) -> str:
    """Return the action, with the whole new text of a file."""
    file = proposal.ask.file
    return proposal.ask.text if file is None else f"{proposal.ask.text}\n\nThe whole text:\n{visible(file.proposed)}"


def _beginning(text: str, limit: int, id: str) -> str:
    if len(text) <= limit:
        return visible(text)
    return f"{visible(text[:limit])}\n… only the beginning is shown here; all of it: shotclock inbox show {id}"


def input_required(proposal: Proposal) -> dict[str, Any]:
    message, schema = form_for(proposal)
    params = {"mode": "form", "message": message, "requestedSchema": schema}
    return {
        "resultType": "input_required",
        "inputRequests": {proposal.id: {"method": "elicitation/create", "params": params}},
    }


async def take_answers(responses: object, inbox: Inbox, caller: Principal, decider: Principal) -> set[str]:
    """Decide the proposals that the client has answered; return their ids."""
    answered: set[str] = set()
    for proposal_id, response in responses.items() if isinstance(responses, Mapping) else ():
        if not isinstance(proposal_id, str) or not isinstance(response, Mapping):
            continue
        answered.add(proposal_id)
        proposal = await inbox.get(proposal_id)
        if proposal is not None and proposal.asked_by == caller.name and may_answer(proposal, decider):
            await _decide(proposal, response, inbox, decider)
    return answered


async def ask_while_waiting(
    ctx: ServerRequestContext[Any, Any], proposal: Proposal, inbox: Inbox, decider: Principal
) -> None:
    """Ask an older client. If that fails, the inbox has the question."""
    message, schema = form_for(proposal)
    try:
        async with asyncio.timeout(LONGEST_ASK_S):
            result = await ctx.session.elicit_form(message, schema, ctx.request_id)
        await _decide(proposal, {"action": result.action, "content": result.content}, inbox, decider)
    except asyncio.CancelledError:
        raise
    except Exception:  # the client has left, or does not ask
        return


async def _decide(proposal: Proposal, response: Mapping[str, Any], inbox: Inbox, decider: Principal) -> None:
    content = response.get("content")
    fields: Mapping[str, Any] = content if isinstance(content, Mapping) else {}
    notes = str(fields.get("notes") or "")
    action = response.get("action")
    if action == "decline" or (action == "accept" and fields.get("decision") == "reject"):
        decision = Decision(ProposalStatus.REJECTED, notes)
    elif action == "accept" and proposal.ask.kind is Kind.QUESTION and "answer" in fields:
        decision = Decision(ProposalStatus.APPROVED, notes, answer=fields["answer"])
    elif action == "accept" and fields.get("decision") == "approve":
        decision = Decision(ProposalStatus.APPROVED, notes)
    else:  # postponed
        return
    with suppress(Failure):  # already decided, expired, or the store is busy: the answer to the call reports its state
        await inbox.decide(proposal.id, decision, decider, action_hash=proposal.action_hash)


BURST = 10  # notifications of a call at once, and one more per interval, so that a loop does not flood the client
INTERVAL_S = 0.1
# For the last notifications to be sent before the answer. Only a client that stopped reading takes longer.
LAST_WORD_S = 1.0

SendProgress = Callable[[float, float | None, str | None], Awaitable[None]]


class ProgressReports:
    """Progress of one call: strictly increasing, at a bounded rate, never after the answer."""

    def __init__(self, report: SendProgress) -> None:
        self._report = report
        self._highest: float | None = None
        self._unsent: list[tuple[float, float | None, str | None]] = []
        self._allowed = float(BURST)
        self._counted_ns = monotonic_ns()
        self._sending: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    def note(self, done: float, total: float | None, message: str | None) -> None:
        if self._closed.is_set() or (self._highest is not None and done <= self._highest):
            return
        self._highest = done
        if len(self._unsent) >= max(1.0, self._allowed):
            self._unsent.pop()  # too many to send: replaced by the latest
        self._unsent.append((done, total, message))
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._unsent:
                now_ns = monotonic_ns()
                earned = (now_ns - self._counted_ns) / (INTERVAL_S * 1e9)
                self._allowed, self._counted_ns = min(self._allowed + earned, float(BURST)), now_ns
                if self._allowed < 1 and not self._closed.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._closed.wait(), (1 - self._allowed) * INTERVAL_S)
                    continue
                self._allowed -= 1
                done, total, message = self._unsent.pop(0)
                is_count = isinstance(done, int) and (total is None or isinstance(total, int))
                if message and is_count:
                    message = f"{done} {message}" if total is None else f"{done} of {total} {message}"
                await self._report(done, total, message)
        finally:
            self._sending = None

    async def finish(self) -> None:
        """Send the last reports before the answer, because none may follow it."""
        self._closed.set()
        if (sending := self._sending) is not None:
            await asyncio.wait([sending], timeout=LAST_WORD_S)
            sending.cancel()

    def abandon(self) -> None:
        self._closed.set()
        if self._sending is not None:
            self._sending.cancel()
