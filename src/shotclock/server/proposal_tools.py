"""The tools with which an agent asks a person: propose, look how it stands, take it back.

Waiting for the person is bounded by the response budget, and holds nothing but a future. Every answer has one shape:
`data.status` says what became of it, and a proposal that nobody has decided yet is no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mcp_types import Tool, ToolAnnotations

from ..core.clocks import Clocks
from ..core.deadlines import NS_PER_MS, Deadline
from ..core.durations import DurationError, parse_duration_ms
from ..core.effects import Ending
from ..core.envelope import Problem
from ..core.errors import Failure
from ..core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposedFile
from ..dispatch.dispatcher import Dispatcher
from ..inbox.outcomes import outcome_of, refusal_outcome
from ..inbox.wait_budget import read_response_budget_ms
from ..process.clock import monotonic_ns
from ..runtime.call import Call, Outcome
from ..runtime.request import CallRequest

PROPOSE, CHECK, WITHDRAW = "propose", "check-proposal", "withdraw-proposal"
NAMES = frozenset((PROPOSE, CHECK, WITHDRAW))

_WAIT = {
    "type": "integer",
    "minimum": 0,
    "description": "How long to wait for the operator, in milliseconds. No longer than the response budget, which is "
    "also how long it is where nothing is said.",
}
_ID = {"type": "string", "description": "The proposal_id of an earlier answer."}
_TEXT: dict[str, Any] = {"type": "string"}
_PROPERTIES: dict[str, dict[str, Any]] = {
    PROPOSE: {
        "title": {**_TEXT, "description": "What is proposed, in one line."},
        "justification": {**_TEXT, "description": "Why the operator should agree."},
        "path": {**_TEXT, "description": "With a proposed file: what it is called."},
        "proposed": {**_TEXT, "description": "With a proposed file: the whole text that it is to have."},
        "current": {**_TEXT, "description": "With a proposed file: the text that it has now, for the comparison."},
        "choices": {"type": "array", "items": _TEXT, "description": "With a question: the possible answers."},
        "ttl": {**_TEXT, "description": "How long it stays open, as in 30m or 24h."},
        "wait_ms": _WAIT,
    },
    CHECK: {"proposal_id": _ID, "wait_ms": _WAIT},
    WITHDRAW: {"proposal_id": _ID},
}
_REQUIRED = {PROPOSE: ["title", "justification"], CHECK: ["proposal_id"], WITHDRAW: ["proposal_id"]}
_DESCRIPTIONS = {
    PROPOSE: (
        "Ask the operator for a decision: on a proposed file (path and proposed), or on a question. Answers with "
        "data.status: approved, modified, rejected or expired; or pending, which is no error: the proposal stays "
        "queued, and the identical call or `check-proposal` picks the decision up later."
    ),
    CHECK: "How a proposal stands, waiting up to wait_ms for the operator. data.status pending is no error.",
    WITHDRAW: "Take back a proposal of yours that nobody has decided yet.",
}


def proposal_tools(names: list[str], output_schema: dict[str, Any]) -> dict[str, Tool]:
    return {
        name: Tool(
            name=name,
            description=_DESCRIPTIONS[name],
            input_schema={
                "type": "object",
                "properties": _PROPERTIES[name],
                "required": _REQUIRED[name],
                "additionalProperties": False,
            },
            output_schema=output_schema,
            annotations=ToolAnnotations(read_only_hint=name == CHECK, destructive_hint=False, idempotent_hint=True),
        )
        for name in names
    }


def mistakes_in(name: str, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
    """List all mistakes at once. What the texts say is looked at where the proposal is made."""
    properties = _PROPERTIES[name]
    mistakes = [{"field": each, "message": "is needed"} for each in _REQUIRED[name] if each not in arguments]
    for field, value in arguments.items():
        if field not in properties:
            mistakes.append(
                {"field": field[:100], "message": f"is not an argument of it; it takes {', '.join(properties)}"}
            )
        elif field == "wait_ms":
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                mistakes.append({"field": field, "message": "must be a whole number of milliseconds, 0 or more"})
        elif field == "choices":
            if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
                mistakes.append({"field": field, "message": "must be a list of texts"})
        elif not isinstance(value, str):
            mistakes.append({"field": field, "message": "must be a text"})
        elif field == "justification" and not value.strip():
            mistakes.append({"field": field, "message": "must say why the operator should agree"})
        elif field == "ttl":
            try:
                parse_duration_ms(value)
            except DurationError as error:
                mistakes.append({"field": field, "message": str(error)})
    if ("path" in arguments) != ("proposed" in arguments):
        mistakes.append({"field": "path", "message": "a proposed file needs both `path` and `proposed`"})
    if "path" in arguments and "choices" in arguments:
        mistakes.append({"field": "choices", "message": "a proposed file is approved, modified or rejected"})
    return mistakes


class Proposing:
    """Does what the tools offer. Raises Failure when it is made where the environment's budget cannot be read."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.budget_ms = read_response_budget_ms()

    def begin(self, name: str, parent: Deadline | None) -> Call:
        """Start the clocks of one of the tools: how long it waits is its budget's to say."""
        return self._dispatcher.begin_own(name, Clocks(timeout_ms=0), parent, mutates=name != CHECK, idempotent=True)

    async def perform(self, call: Call, request: CallRequest) -> Outcome:
        """Propose, look after a proposal or withdraw it, within the budget. `mistakes_in` has looked at the
        arguments."""
        wait_ms = min(request.budget_ms or 0, self.budget_ms)
        try:
            proposal = await self._find_or_propose(call.name, request, wait_ms)
        except Failure as failure:
            return refusal_outcome(failure)
        outcome = outcome_of(proposal, (monotonic_ns() - call.started_ns) // NS_PER_MS, wait_ms)
        if call.name == WITHDRAW and _has_code(outcome, "PROPOSAL_WITHDRAWN"):
            return Outcome(Ending.FINISHED, data=outcome.data)
        outcome.budget_ms = wait_ms if proposal.is_open else None
        return outcome

    async def _find_or_propose(self, name: str, request: CallRequest, wait_ms: int) -> Proposal:
        inbox, by = self._dispatcher.inbox(), request.principal
        arguments = cast("Mapping[str, Any]", request.arguments)
        assert by is not None
        if name == PROPOSE:
            proposal = await inbox.propose(_ask(arguments), by, key=request.idempotency_key)
        else:
            found = await inbox.get(arguments["proposal_id"])
            if found is None or not by.may_see(found):  # which of the two is nobody's business
                raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {arguments['proposal_id'][:40]!r} of yours")
            if name == WITHDRAW:
                return await inbox.withdraw(found.id, by)
            proposal = found
        return await inbox.wait(proposal.id, wait_ms) if proposal.is_open else proposal


def _has_code(outcome: Outcome, code: str) -> bool:
    return isinstance(outcome.problem, Problem) and outcome.problem.code == code


def _ask(arguments: Mapping[str, Any]) -> ProposalRequest:
    policy = Policy(ttl_ms=parse_duration_ms(arguments["ttl"])) if "ttl" in arguments else Policy()
    title, justification = arguments["title"], arguments["justification"]
    if "path" in arguments:
        file = ProposedFile(arguments["path"], arguments["proposed"], arguments.get("current"))
        return ProposalRequest(Kind.FILE, title, justification, file=file, policy=policy)
    choices = tuple(arguments.get("choices", ()))
    return ProposalRequest(Kind.QUESTION, title, justification, choices=choices, policy=policy)
