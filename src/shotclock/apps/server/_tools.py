"""The tools of a server: the commands of an App, and the server's own for jobs, running calls and proposals; and the
messages to a client while its call runs: questions to its person (elicitation), and progress.

A wait for an operator is bounded by the response budget and holds only a future. A proposal without a decision is
`data.status: pending`, and no error.

A client of the 2026 revision gets `input_required` and repeats the call with the answer; an older one is asked while
the call waits. The first decision counts, here or in the inbox.

Nothing proves that a person answered, because the client relays the answer. So elicitation is off unless the App or
`serve` enables it, never used for destructive or very long proposals, and the audit trail names the client. Only two
clients are asked: one that started this server as its child, and so has its user's access to the inbox anyway, and one
with an operator's token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Protocol, cast

from mcp.server.context import ServerRequestContext
from mcp_types import ClientCapabilities, ElicitationCapability, Tool, ToolAnnotations

from ...calls.call import Call, CallRequest, Outcome
from ...calls.control import live_calls
from ...calls.control_channel import RunOrder, ask_holder
from ...calls.principal import ANONYMOUS, Principal, Role
from ...core.catalogue import CONFIRMATION, DEFAULT_BUDGET_MS, Catalogue, CommandSpec, JsonSchema
from ...core.envelope import Envelope, Problem
from ...core.errors import Ending, Failure
from ...core.limits import Clocks, DurationError, format_duration, parse_duration_ms
from ...core.proposal import (
    Confirmation,
    Decision,
    Kind,
    Policy,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    ProposedFile,
)
from ...core.trace import span_id_of
from ...core.value_types import JsonObject, replace
from ...core.visible_text import one_line, visible
from ...dispatch.dispatcher import Dispatcher
from ...people import person_wait
from ...people.inbox import Inbox
from ...people.person_wait import CallWait, Waited
from ...supervise.clock import TokenBucket
from ._listing import shown_fields
from ._results import result_schema

JOB_TOOL = "job"
PROPOSE, CHECK, WITHDRAW = "propose", "check-proposal", "withdraw-proposal"
STOP, EXTEND = "graceful_stop", "extend"
CONTROLS = (STOP, EXTEND)
JUSTIFICATION = "justification"
# Controls ask this or another process of this machine, which answers at once or never.
CONTROL_CLOCKS = Clocks(timeout_ms=10_000)

_GOES_ON = (
    "May take longer than you wait: then it answers INCOMPLETE, which is no error, and continues in the background. "
    "Call it again with the same arguments to attach to it, or use the tool `job` with its job_id to wait for it or "
    "to cancel it."
)
_NEEDS_APPROVAL = (
    "Runs only after an operator has approved it. Without a decision in time it answers with status pending, "
    "which is no error: the proposal stays queued, and the identical call picks the decision up."
)
_NEEDS_CONFIRMATION = (
    "Destroys something. Call it first without confirm_destructive: it answers CONFIRMATION_REQUIRED with its "
    "planned effects, and does nothing. Call it again with confirm_destructive: true to have it done."
)

ISOLATION_KEY = "shotclock.dev/isolation"
"""In the `_meta` of a tool that shares a process with others."""


def tools_of(catalogue: Catalogue) -> dict[str, Tool]:
    """Return the commands as tools, then the server's own that are of use. A command replaces one of them."""
    commands = [spec for spec in catalogue.commands if spec.on_mcp]
    tools = {spec.name: _command_tool(spec) for spec in commands}
    own = [JOB_TOOL] if any(spec.interruption is not None for spec in commands) else []
    own += CONTROLS if tools else ()
    own += [PROPOSE] if catalogue.proposals else []
    own += [CHECK, WITHDRAW] if catalogue.proposals or any(spec.approval is not None for spec in commands) else []
    return tools | {name: _own_tool(name) for name in own if name not in tools}


def _command_tool(spec: CommandSpec) -> Tool:
    shown = shown_fields(spec) | {"description": _description(spec) or None}
    if spec.isolation == "shared":
        shown["_meta"] = {**(spec.listing.meta or {}), ISOLATION_KEY: "shared"}
    return Tool(
        name=spec.name,
        **shown,
        input_schema={"type": "object", **_input_schema(spec)},
        output_schema=result_schema(spec.output_schema, may_be_unfinished=spec.may_be_unfinished),
        annotations=ToolAnnotations(  # where the author declared nothing, the protocol's default counts: destructive
            read_only_hint=None if spec.mutates else True,
            destructive_hint=spec.destructive,
            idempotent_hint=spec.idempotent or None,
            open_world_hint=spec.open_world,
        ),
    )


def takes_justification(spec: CommandSpec) -> bool:
    return spec.approval is not None and JUSTIFICATION not in spec.input_schema.get("properties", {})


def _input_schema(spec: CommandSpec) -> JsonSchema:
    added: JsonSchema = {}
    if takes_justification(spec):
        added[JUSTIFICATION] = {"type": "string", "description": "Why the operator should approve this call."}
    if spec.needs_confirmation:
        added[CONFIRMATION] = {"type": "boolean", "description": "Do it. Without this it only reports its effects."}
    properties = {name: _without_title(name, each) for name, each in spec.input_schema.get("properties", {}).items()}
    return {**spec.input_schema, "properties": {**properties, **added}}


def _without_title(name: str, schema: JsonSchema) -> JsonSchema:
    """Leave out the title that pydantic makes of a name: it costs a model tokens and says nothing."""
    is_made = schema.get("title") == name.replace("_", " ").title()
    return {key: item for key, item in schema.items() if key != "title"} if is_made else schema


def _description(spec: CommandSpec) -> str:
    parts = [spec.description] if spec.description else []
    if spec.approval is not None:
        parts.append(_NEEDS_APPROVAL)
    if spec.needs_confirmation:
        parts.append(_NEEDS_CONFIRMATION)
    if spec.interruption is not None:
        parts.append(_GOES_ON)
    elif spec.clocks.timeout_ms:
        parts.append(f"Answers within {format_duration(spec.clocks.timeout_ms)}.")
    return "\n\n".join(parts)


_TEXT: JsonSchema = {"type": "string"}
_MS: JsonSchema = {"type": "integer", "minimum": 0}
_WAIT = _MS | {
    "description": "How long to wait for the operator, in milliseconds. At most the response budget, which is also "
    "the default."
}
_PROPOSAL_ID = _TEXT | {"description": "The proposal_id of an earlier answer."}
_WHICH: dict[str, JsonSchema] = {
    "request_id": _TEXT
    | {
        "description": "A running call: its meta.request_id, or the id of the call of yours that made it. Without this "
        "and job_id: all running calls of yours."
    },
    "job_id": _TEXT | {"description": "A job that continues in the background."},
}
_DESCRIPTIONS = {
    JOB_TOOL: (
        "Work that continues in the background: list it, ask how far it is, wait (wait_ms at most) or cancel it. "
        "job_id is what an INCOMPLETE answer names; only `list` does without."
    ),
    PROPOSE: (
        "Ask the operator for a decision: on a proposed file (path and proposed), or on a question. Answers with "
        "a status: approved, modified, rejected or expired; or pending, which is no error: the proposal stays "
        "queued, and the identical call or `check-proposal` picks the decision up later."
    ),
    CHECK: "The state of a proposal, waiting up to wait_ms for the operator. The status pending is no error.",
    WITHDRAW: "Take back a proposal of yours that is not decided yet.",
    STOP: (
        "Ask running calls of yours to end early and answer with their results so far; calls that do not end in time "
        "are stopped. Operators may stop any call."
    ),
    EXTEND: "Give running calls of yours more time, up to what their own caller has. Operators may extend any call.",
}
_PROPERTIES: dict[str, dict[str, JsonSchema]] = {
    JOB_TOOL: {
        "action": _TEXT | {"enum": ["list", "status", "wait", "cancel"]},
        "job_id": _TEXT,
        "wait_ms": _MS | {"description": "with `wait`: how long at most"},
    },
    PROPOSE: {
        "title": _TEXT | {"description": "The proposal, in one line."},
        JUSTIFICATION: _TEXT | {"description": "Why the operator should agree."},
        "path": _TEXT | {"description": "With a proposed file: its name."},
        "proposed": _TEXT | {"description": "With a proposed file: the whole text that it is to have."},
        "current": _TEXT | {"description": "With a proposed file: the text that it has now, for the comparison."},
        "choices": {"type": "array", "items": _TEXT, "description": "With a question: the possible answers."},
        "ttl": _TEXT | {"description": "How long it stays open, as in 30m or 24h."},
        "wait_ms": _WAIT,
    },
    CHECK: {"proposal_id": _PROPOSAL_ID, "wait_ms": _WAIT},
    WITHDRAW: {"proposal_id": _PROPOSAL_ID},
    STOP: {
        **_WHICH,
        "reason": _TEXT | {"description": "Why; the work and its answer carry it."},
        "within_ms": _MS | {"description": "How long it may take to end by itself."},
    },
    EXTEND: {**_WHICH, "by_ms": _MS | {"description": "How much longer it may take, in milliseconds."}},
}
_REQUIRED = {
    JOB_TOOL: ["action"],
    PROPOSE: ["title", JUSTIFICATION],
    CHECK: ["proposal_id"],
    WITHDRAW: ["proposal_id"],
    STOP: [],
    EXTEND: ["by_ms"],
}
OWN_TOOLS = tuple(_DESCRIPTIONS)


def _own_tool(name: str) -> Tool:
    return Tool(
        name=name,
        description=_DESCRIPTIONS[name],
        input_schema={
            "type": "object",
            "properties": _PROPERTIES[name],
            "required": _REQUIRED[name],
            "additionalProperties": False,
        },
        annotations=ToolAnnotations(read_only_hint=name == CHECK, destructive_hint=False, idempotent_hint=True),
    )


def _find_mistake(field: str, schema: JsonSchema, value: object) -> str | None:
    match schema["type"]:
        case "integer" if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return "must be a whole number of milliseconds, 0 or more"
        case "array" if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
            return "must be a list of texts"
        case "string" if not isinstance(value, str):
            return "must be a text"
    if value not in schema.get("enum", [value]):
        return f"must be one of {', '.join(schema['enum'])}"
    if field == JUSTIFICATION and not str(value).strip():
        return "must say why the operator should agree"
    if field == "ttl":
        try:
            parse_duration_ms(value)
        except DurationError as error:
            return str(error)
    return None


class ServerTools(Protocol):
    """Tools that are no commands of an App: they run in the server's own process."""

    names: Collection[str]

    def mistakes_in(self, name: str, arguments: Mapping[str, Any]) -> list[dict[str, str]]: ...

    def wait_ms(self, name: str, arguments: Mapping[str, Any]) -> int | None:
        """Return how long a call may wait before it answers; None for a tool that does not wait."""

    def begin(self, request: CallRequest) -> Call: ...

    async def carry_out(self, call: Call, request: CallRequest) -> Envelope: ...

    def text_of(self, name: str, envelope: Envelope) -> str | None:
        """Return the answer as text for a model; None for the JSON of the envelope."""

    async def close(self) -> None:
        """End the work of the connection, bounded."""


class OwnTools:
    """The server's own tools beside an App. Raises Failure for an unreadable budget."""

    def __init__(self, dispatcher: Dispatcher, names: Collection[str]) -> None:
        self.names = names
        self._dispatcher = dispatcher
        self.budget_ms: int = person_wait.read_response_budget_ms() if {PROPOSE, CHECK, WITHDRAW} & {*names} else 0

    def mistakes_in(self, name: str, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
        properties = _PROPERTIES[name]
        mistakes = {field: "is required" for field in _REQUIRED[name] if field not in arguments}
        for field, value in arguments.items():
            if field not in properties:
                mistakes[field[:100]] = f"is not an argument of it; it takes {', '.join(properties)}"
            elif (message := _find_mistake(field, properties[field], value)) is not None:
                mistakes[field] = message
        if ("path" in arguments) != ("proposed" in arguments):
            mistakes["path"] = "a proposed file needs both `path` and `proposed`"
        if "path" in arguments and "choices" in arguments:
            mistakes["choices"] = "a proposed file is approved, modified or rejected"
        needs_job = name == JOB_TOOL and "action" not in mistakes and arguments["action"] != "list"
        if needs_job and "job_id" not in arguments:
            mistakes["job_id"] = "must name the job"
        return [{"field": field, "message": message} for field, message in mistakes.items()]

    def wait_ms(self, name: str, arguments: Mapping[str, Any]) -> int | None:
        if name in CONTROLS or (name == JOB_TOOL and arguments["action"] != "wait"):
            return None
        wait_ms: int = arguments.get("wait_ms", DEFAULT_BUDGET_MS if name == JOB_TOOL else self.budget_ms)
        return wait_ms

    def text_of(self, name: str, envelope: Envelope) -> str | None:
        return None

    async def close(self) -> None:
        pass

    def begin(self, request: CallRequest) -> Call:
        """Start the clocks of a tool. One that waits is bounded by its budget."""
        name, begin = request.name, self._dispatcher.begin_own
        if name == JOB_TOOL:
            return self._dispatcher.begin_job_command(str(request.arguments["action"]), request.parent)
        if name in CONTROLS:
            return begin(name, CONTROL_CLOCKS, request.parent, mutates=True, idempotent=name == STOP)
        return begin(name, Clocks(timeout_ms=0), request.parent, mutates=name != CHECK, idempotent=True)

    async def carry_out(self, call: Call, request: CallRequest) -> Envelope:
        async with self._dispatcher.runtime.answering(call) as answering:
            answering.outcome = await self._perform(call, request)
        return answering.envelope

    async def _perform(self, call: Call, request: CallRequest) -> Outcome | Envelope:
        arguments = cast("Mapping[str, Any]", request.arguments)
        principal = request.principal or ANONYMOUS
        if request.name == JOB_TOOL:
            return await self._dispatcher.run_job_command(call, arguments["action"], arguments.get("job_id"), request)
        try:
            if request.name in CONTROLS:
                return Outcome(Ending.FINISHED, data=await self._control(call.name, arguments, principal))
            return await self._propose(call, request, arguments, principal)
        except Failure as failure:
            return person_wait.refusal_outcome(failure)

    async def _control(self, name: str, arguments: Mapping[str, Any], by: Principal) -> JsonObject:
        """End or extend calls and jobs, for their own caller and operators; others cannot see them."""
        who = "the client" if by == ANONYMOUS else by.name
        limits = arguments["by_ms"] if name == EXTEND else None, arguments.get("within_ms"), arguments.get("reason", "")
        order = RunOrder(arguments.get("job_id", ""), None, who, *limits)
        if "job_id" in arguments:
            return await asyncio.to_thread(self._control_job, order, by)
        return await order.act_on(_find_calls(arguments.get("request_id"), by))

    def _control_job(self, order: RunOrder, by: Principal) -> JsonObject:
        job = self._dispatcher.jobs().find(order.run_id, by.sees_jobs_of)
        if not job.is_active or job.runner is None:
            raise Failure("CALL_NOT_FOUND", f"job {job.id} is not running")
        return ask_holder(self._dispatcher.store().home, job.runner, replace(order, run_id=job.id).as_request())

    async def _propose(self, call: Call, request: CallRequest, arguments: Mapping[str, Any], by: Principal) -> Outcome:
        wait = CallWait(call.started_ns, min(request.budget_ms or 0, self.budget_ms), request.idempotency_key)
        inbox, found = self._dispatcher.inbox(), list[Proposal]()
        try:
            if call.name == PROPOSE:
                waited = await person_wait.ask_and_wait(inbox, _request_of(arguments), by, wait, found.append)
            else:
                found.append(await _find_or_withdraw(inbox, call.name, arguments["proposal_id"], by))
                waited = await person_wait.wait_for_decision(inbox, found[0], wait)
        except asyncio.CancelledError:  # the server stops, or its backstop fired
            if found:  # the proposal stays as it is, and the answer names it
                data = Waited(found[0], True, wait.wait_ms).outcome().data
                assert isinstance(data, dict)
                call.cancellation.outcome = Outcome(Ending.CANCELLED, data={**data, "partial": True})
            raise
        outcome = waited.answer_proposer() if call.name == PROPOSE else waited.outcome()
        problem = outcome.problem
        if call.name == WITHDRAW and isinstance(problem, Problem) and problem.code == "PROPOSAL_WITHDRAWN":
            return Outcome(Ending.FINISHED, data=outcome.data)
        outcome.budget_ms = wait.wait_ms if waited.proposal.is_open else None
        return outcome


async def _find_or_withdraw(inbox: Inbox, name: str, proposal_id: str, by: Principal) -> Proposal:
    found = await inbox.get(proposal_id)
    if found is None or not by.may_see(found):  # one message, so that it does not reveal foreign proposals
        raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {proposal_id[:40]!r} of yours")
    return await inbox.withdraw(found.id, by) if name == WITHDRAW else found


def _find_calls(request_id: str | None, by: Principal) -> list[Call]:
    """Return the principal's running calls, or the named one. Raises CALL_NOT_FOUND."""
    found = []
    for call in list(live_calls.values()):
        made_by = None if call.request is None else call.request.principal
        if made_by is None or call.inside_of is not None:
            continue
        is_named = request_id is not None and (request_id == call.request_id or _is_below(call, request_id))
        if (is_named and by.role is Role.OPERATOR) or (made_by == by and (is_named or request_id is None)):
            found.append(call)
    if not found:
        which = "" if request_id is None else f" {request_id[:80]!r}"
        raise Failure("CALL_NOT_FOUND", f"no call{which} of yours is running here")
    return found


def _is_below(call: Call, request_id: str) -> bool:
    try:
        return span_id_of(request_id) == call.caller.span_id
    except ValueError:
        return False


def _request_of(arguments: Mapping[str, Any]) -> ProposalRequest:
    policy = Policy(ttl_ms=parse_duration_ms(arguments["ttl"])) if "ttl" in arguments else Policy()
    title, justification = arguments["title"], arguments[JUSTIFICATION]
    if "path" in arguments:
        file = ProposedFile(arguments["path"], arguments["proposed"], arguments.get("current"))
        return ProposalRequest(Kind.FILE, title, justification, file=file, policy=policy)
    choices = tuple(arguments.get("choices", ()))
    return ProposalRequest(Kind.QUESTION, title, justification, choices=choices, policy=policy)


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


def form_for(proposal: Proposal) -> tuple[str, JsonObject]:
    """Return the message and schema of a question. The action comes first, so that no justification hides it."""
    ask = proposal.ask
    message = _done(proposal)
    if ask.justification:
        message += f"\n\nThe agent says: {visible(ask.justification[:WHY_LENGTH])}"
        if len(ask.justification) > WHY_LENGTH:
            message += f"\n… only the beginning is shown here; all of it: shotclock inbox show {proposal.id}"
    properties: JsonObject = {}
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


def input_required(proposal: Proposal) -> JsonObject:
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
        await inbox.decide(proposal.id, decision, decider, Confirmation(proposal.action_hash))


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
        self._allowance = TokenBucket(BURST, 1 / INTERVAL_S)
        self._sending: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    def note(self, done: float, total: float | None, message: str | None) -> None:
        if self._closed.is_set() or (self._highest is not None and done <= self._highest):
            return
        self._highest = done
        if len(self._unsent) >= max(1.0, self._allowance.left):
            self._unsent.pop()  # too many to send: replaced by the latest
        self._unsent.append((done, total, message))
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._unsent:
                wait_ms = self._allowance.take()
                if wait_ms and not self._closed.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._closed.wait(), wait_ms / 1000)
                    continue
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
