"""The tools of a server: the commands of an App, and the server's own for jobs, running calls and proposals.

A wait for an operator is bounded by the response budget and holds only a future. A proposal without a decision is
`data.status: pending`, and no error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from mcp_types import Tool, ToolAnnotations

from ..core.catalogue import CONFIRMATION, Catalogue, CommandSpec, JsonSchema
from ..core.clocks import Clocks, DurationError, format_duration, parse_duration_ms
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending, Failure
from ..core.manifest import data_schema
from ..core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposedFile
from ..core.trace import span_id_of
from ..dispatch.dispatcher import Dispatcher
from ..inbox import person_wait
from ..inbox.access import ANONYMOUS, Principal, Role
from ..inbox.person_wait import CallWait, Waited
from ..runtime.call import Call, CallRequest, Outcome
from ..runtime.control import live_calls
from ..runtime.control_channel import ask_holder, extend, wind_down

JOB_TOOL = "job"
PROPOSE, CHECK, WITHDRAW = "propose", "check-proposal", "withdraw-proposal"
STOP, EXTEND = "graceful_stop", "extend"
CONTROLS = (STOP, EXTEND)
JUSTIFICATION = "justification"
# Controls ask this or another process of this machine, which answers at once or never.
CONTROL_CLOCKS = Clocks(timeout_ms=10_000)

_GOES_ON = (
    "May take longer than you wait: then it answers INCOMPLETE, which is no error, and continues in the background. "
    "Call it again with the same arguments to attach to it, or use the tool `job` with data.job_id to wait for it or "
    "to cancel it."
)
_NEEDS_APPROVAL = (
    "Runs only after an operator has approved it. Without a decision in time it answers with data.status pending, "
    "which is no error: the proposal stays queued, and the identical call picks the decision up."
)
_NEEDS_CONFIRMATION = (
    "Destroys something. Call it first without confirm_destructive: it answers CONFIRMATION_REQUIRED with its "
    "planned effects in data, and does nothing. Call it again with confirm_destructive: true to have it done."
)


def tools_of(catalogue: Catalogue) -> dict[str, Tool]:
    """Return the commands as tools, then the server's own that are of use. A command replaces one of them."""
    commands = [spec for spec in catalogue.commands if spec.on_mcp]
    tools = {spec.name: _command_tool(spec) for spec in commands}
    own = [JOB_TOOL] if any(spec.interruption is not None for spec in commands) else []
    own += CONTROLS if tools else ()
    own += [PROPOSE] if catalogue.proposals else []
    own += [CHECK, WITHDRAW] if catalogue.proposals or any(spec.approval is not None for spec in commands) else []
    return tools | {name: _own_tool(name) for name in own if name not in tools}


def headers_matter(tool: Tool) -> bool:
    """Return whether the schema wants arguments in HTTP headers as well, which the SDK compares."""
    return "x-mcp-header" in json.dumps(tool.input_schema, default=str)


def _command_tool(spec: CommandSpec) -> Tool:
    return Tool(
        name=spec.name,
        description=_description(spec) or None,
        input_schema={"type": "object", **_input_schema(spec)},
        output_schema=_envelope_schema(spec.output_schema),
        annotations=ToolAnnotations(
            read_only_hint=not spec.mutates,
            destructive_hint=spec.destructive,
            idempotent_hint=spec.idempotent or not spec.mutates,
        ),
    )


def takes_justification(spec: CommandSpec) -> bool:
    return spec.approval is not None and JUSTIFICATION not in spec.input_schema.get("properties", {})


def _input_schema(spec: CommandSpec) -> JsonSchema:
    added: JsonSchema = {}
    if takes_justification(spec):
        added[JUSTIFICATION] = {"type": "string", "description": "Why the operator should approve this call."}
    if spec.needs_confirmation:
        added[CONFIRMATION] = {
            "type": "boolean",
            "description": "Do it. Without this it only reports its effects.",
        }
    return {**spec.input_schema, "properties": {**spec.input_schema.get("properties", {}), **added}}


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


def _envelope_schema(own: JsonSchema | None) -> JsonSchema:
    """Return the schema of the envelope, with the command's result as the data of a success."""
    schema: JsonSchema = {
        "type": "object",
        "properties": {
            "ok": {"type": "boolean"},
            "data": {"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "null"}]},
            "error": {
                "anyOf": [{"type": "object"}, {"type": "null"}],
                "description": "code, message, retryable, suggestion, context",
            },
            "warnings": {"type": "array"},
            "meta": {"type": "object", "description": "exit_code, duration_ms, timeout_ms, ending, side_effects, …"},
        },
        "required": ["ok", "data", "error", "warnings", "meta"],
    }
    if own:
        shape = data_schema(own)
        definitions = shape.pop("$defs", None)
        succeeded = {"properties": {"ok": {"const": True}, "data": shape}}
        schema["anyOf"] = [succeeded, {"properties": {"ok": {"const": False}}}]
        if definitions:  # the references inside point at the root
            schema["$defs"] = definitions
    return schema


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
        "data.status: approved, modified, rejected or expired; or pending, which is no error: the proposal stays "
        "queued, and the identical call or `check-proposal` picks the decision up later."
    ),
    CHECK: "The state of a proposal, waiting up to wait_ms for the operator. data.status pending is no error.",
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
        output_schema=_envelope_schema(None),
        annotations=ToolAnnotations(read_only_hint=name == CHECK, destructive_hint=False, idempotent_hint=True),
    )


def mistakes_in(name: str, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
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
    if name == JOB_TOOL and "action" not in mistakes and arguments["action"] != "list" and "job_id" not in arguments:
        mistakes["job_id"] = "must name the job"
    return [{"field": field, "message": message} for field, message in mistakes.items()]


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


class OwnTools:
    """The server's own tools; `mistakes_in` checks their arguments. Raises Failure for an unreadable budget."""

    def __init__(self, dispatcher: Dispatcher, names: Collection[str]) -> None:
        self._dispatcher = dispatcher
        self.budget_ms = person_wait.read_response_budget_ms() if {PROPOSE, CHECK, WITHDRAW} & {*names} else 0

    def begin(self, request: CallRequest) -> Call:
        """Start the clocks of a tool. One that waits is bounded by its budget."""
        name, begin = request.name, self._dispatcher.begin_own
        if name == JOB_TOOL:
            return self._dispatcher.begin_job_command(str(request.arguments["action"]), request.parent)
        if name in CONTROLS:
            return begin(name, CONTROL_CLOCKS, request.parent, mutates=True, idempotent=name == STOP)
        return begin(name, Clocks(timeout_ms=0), request.parent, mutates=name != CHECK, idempotent=True)

    async def perform(self, call: Call, request: CallRequest) -> Outcome | Envelope:
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

    async def _control(self, name: str, arguments: Mapping[str, Any], by: Principal) -> dict[str, Any]:
        """End or extend calls and jobs, for their own caller and operators; others cannot see them."""
        who = "the client" if by == ANONYMOUS else by.name
        if "job_id" in arguments:
            return await asyncio.to_thread(self._control_job, name, arguments, by, who)
        calls = _find_calls(arguments.get("request_id"), by)
        if name == EXTEND:
            return await extend(calls, arguments["by_ms"], who)
        return await wind_down(calls, who, arguments.get("reason", ""), arguments.get("within_ms"))

    def _control_job(self, name: str, arguments: Mapping[str, Any], by: Principal, who: str) -> dict[str, Any]:
        job = self._dispatcher.jobs().find(arguments["job_id"], by.sees_jobs_of)
        if not job.is_active or job.runner is None:
            raise Failure("CALL_NOT_FOUND", f"job {job.id} is not running")
        request: dict[str, object] = {"run": job.id, "who": who}
        if name == EXTEND:
            request |= {"do": "extend", "by_ms": arguments["by_ms"]}
        else:
            request |= {"do": "stop", "reason": arguments.get("reason", ""), "within_ms": arguments.get("within_ms")}
        return ask_holder(self._dispatcher.store().home, job.runner, request)

    async def _propose(self, call: Call, request: CallRequest, arguments: Mapping[str, Any], by: Principal) -> Outcome:
        wait = CallWait(call.started_ns, min(request.budget_ms or 0, self.budget_ms), request.idempotency_key)
        found: list[Proposal] = []
        try:
            waited = await self._find_or_propose(call.name, arguments, by, wait, found.append)
        except asyncio.CancelledError as cancelled:  # the server stops, or its backstop fired
            if found:  # the proposal stays as it is, and the answer names it
                data = Waited(found[0], True, wait.wait_ms).outcome().data
                assert isinstance(data, dict)
                cancelled.outcome = Outcome(Ending.CANCELLED, data={**data, "partial": True})  # type: ignore[attr-defined]
            raise
        outcome = waited.answer_proposer() if call.name == PROPOSE else waited.outcome()
        problem = outcome.problem
        if call.name == WITHDRAW and isinstance(problem, Problem) and problem.code == "PROPOSAL_WITHDRAWN":
            return Outcome(Ending.FINISHED, data=outcome.data)
        outcome.budget_ms = wait.wait_ms if waited.proposal.is_open else None
        return outcome

    async def _find_or_propose(
        self,
        name: str,
        arguments: Mapping[str, Any],
        by: Principal,
        wait: CallWait,
        on_found: Callable[[Proposal], None],
    ) -> Waited:
        inbox = self._dispatcher.inbox()
        if name == PROPOSE:
            return await person_wait.ask_and_wait(inbox, _request_of(arguments), by, wait, on_found)
        found = await inbox.get(arguments["proposal_id"])
        if found is None or not by.may_see(found):  # one message, so that it does not reveal foreign proposals
            raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {arguments['proposal_id'][:40]!r} of yours")
        if name == WITHDRAW:
            found = await inbox.withdraw(found.id, by)
        on_found(found)
        return await person_wait.wait_for_decision(inbox, found, wait)


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
    """Return whether a call was made for the named call of its caller."""
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
