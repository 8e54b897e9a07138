"""The approval hook of `shotclock agent install --approvals`: a permission request of an agent becomes a proposal.

An approval is valid for the one request. Everything else is a denial with its reason: a rejection, no decision in time,
a store that cannot be used. It is given before the agent's own limit, at which the agent would ask at its terminal.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from ..calls.principal import Principal, Role
from ..core.errors import Failure
from ..core.limits import format_duration
from ..core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposalStatus
from ..core.value_types import JsonObject
from ..core.visible_text import one_line
from ..people.access import make_id
from ..people.inbox import Inbox
from ..people.person_wait import SECONDS_VARIABLE, VARIABLE, CallWait, ask_and_wait, read_response_budget_ms
from ..people.proposal_checks import TITLE_LIMIT
from ..store.store import Store
from ..supervise.clock import monotonic_ns
from ..terminal.output import write_quietly
from .known_agents import APPROVAL_TIMEOUT_S

LONGEST_WAIT_MS = (APPROVAL_TIMEOUT_S - 20) * 1000  # the rest is for the start, the store and the answer
STORE_LIMIT_S = 5.0  # of opening and closing the store; a stuck disk exhausts it
SHELL_TOOLS = ("Bash", "bash")
LOOK_S = 1  # between two looks at the agent


def decide(agent: str) -> int:
    """Read a permission request, wait for the decision of an operator, and print the answer for the agent."""
    try:
        request = json.loads(sys.stdin.buffer.read())
        is_set = os.environ.get(VARIABLE) or os.environ.get(SECONDS_VARIABLE)
        wait_ms = min(read_response_budget_ms(), LONGEST_WAIT_MS) if is_set else LONGEST_WAIT_MS
        refusal = asyncio.run(_ask_while_wanted(agent, request, wait_ms))
    except Exception as error:  # fails closed
        refusal = f"shotclock could not ask an operator: {str(error) or type(error).__name__}"
    answer: JsonObject = {"behavior": "allow"} if refusal is None else {"behavior": "deny", "message": refusal}
    if agent == "claude":
        answer = {"hookSpecificOutput": {"hookEventName": "PermissionRequest", "decision": answer}}
    write_quietly(sys.stdout, json.dumps(answer) + "\n")
    return 0


async def _ask_while_wanted(agent: str, request: JsonObject, wait_ms: int) -> str | None:
    """Ask, but not for longer than the agent lives or wants to know: its proposal is withdrawn then."""
    asking, parent = asyncio.ensure_future(_ask(agent, request, wait_ms)), os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, asking.cancel)
    looks = int(wait_ms / 1000 + STORE_LIMIT_S) // LOOK_S + 1
    for _ in range(looks):
        if (await asyncio.wait([asking], timeout=LOOK_S))[0]:
            return "the agent has stopped this request" if asking.cancelled() else asking.result()
        if os.getppid() != parent:
            break
    asking.cancel()
    await asyncio.wait([asking], timeout=STORE_LIMIT_S)
    return "the store did not answer in time, or the agent has ended"


async def _ask(agent: str, request: JsonObject, wait_ms: int) -> str | None:
    """Return why the request is refused, or None where it is approved."""
    with Store.open() as store:
        inbox, asker, asked = Inbox(store), Principal(agent, Role.AGENT), list[Proposal]()
        try:
            wait = CallWait(monotonic_ns(), wait_ms, f"{agent}-{make_id(10)}")
            waited = await ask_and_wait(inbox, _read(agent, request, wait_ms), asker, wait, asked.append)
            asked.append(waited.proposal)
        except Failure as failure:
            return f"shotclock could not ask an operator: {failure}"
        finally:
            if asked and asked[-1].is_open:
                inbox.withdraw_unneeded(asked[-1].id, asker)
            await inbox.close()
    return _refusal(waited.proposal, wait_ms)


def _read(agent: str, request: JsonObject, wait_ms: int) -> ProposalRequest:
    """Return the proposal of a request. Raises KeyError where it does not say what the operator has to see."""
    names = ("tool_name", "tool_input") if agent == "claude" else ("toolName", "toolInput")
    tool, found = (request[name] for name in names)
    arguments = found if isinstance(found, dict) else {"input": found}
    command = arguments.get("command") if tool in SHELL_TOOLS else None
    shown = command or json.dumps(arguments, ensure_ascii=False)
    return ProposalRequest(
        Kind.OPERATION,
        one_line(f"{agent} {tool}: {shown}".replace("\n", " \\n "), TITLE_LIMIT),  # a line may end a comment
        operation=str(tool),
        arguments=arguments,
        policy=Policy(ttl_ms=wait_ms),
        surroundings={"directory": str(request.get("cwd") or os.getcwd())},
    )


def _refusal(proposal: Proposal, wait_ms: int) -> str | None:
    if proposal.status is ProposalStatus.APPROVED:
        return None
    notes = proposal.decision.notes if proposal.decision is not None else ""
    if proposal.status is ProposalStatus.MODIFIED:
        changed = json.dumps(proposal.decision.arguments if proposal.decision is not None else None)
        return f"an operator approves it only with these arguments: {changed}. {notes}".strip()
    if proposal.status is ProposalStatus.REJECTED:
        return f"an operator rejected it: {notes}" if notes else "an operator rejected it"
    return f"no operator decided within {format_duration(wait_ms)}; do something else, or ask again later"
