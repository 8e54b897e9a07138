"""The tools of a server: those made of an App's commands, and our own, with which an agent asks a person.

Of the commands a list is made, once, from the catalogue. Our own propose something, look how it stands and take it
back. Waiting for the person is bounded by the response budget, and holds nothing but a future. Every answer has one
shape: `data.status` says what became of it, and a proposal that nobody has decided yet is no error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from mcp_types import Tool, ToolAnnotations

from ..core.catalogue import CONFIRMATION, Catalogue, CommandSpec, JsonSchema
from ..core.clocks import Clocks, Deadline, DurationError, format_duration, parse_duration_ms
from ..core.envelope import Problem
from ..core.errors import Ending, Failure
from ..core.manifest import data_schema
from ..core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposedFile
from ..core.trace import span_id_of
from ..dispatch.dispatcher import Dispatcher
from ..inbox.access import ANONYMOUS, Principal, Role
from ..inbox.person_wait import (
    CallWait,
    Waited,
    ask_and_wait,
    read_response_budget_ms,
    refusal_outcome,
    wait_for_decision,
)
from ..runtime.call import Call, CallRequest, Outcome
from ..runtime.control import live_calls
from ..runtime.control_channel import ask_holder, extend, wind_down

JOB_TOOL = "job"
JOB_ACTIONS = ("list", "status", "wait", "cancel")

_GOES_ON = (
    "May take longer than you wait: then it answers INCOMPLETE, which is no error, and goes on in the background. "
    "Call it again with the same arguments to attach to it, or use the tool `job` with data.job_id to wait for it or "
    "to cancel it."
)
_JOB_DESCRIPTION = (
    "Work that goes on in the background: list it, ask how far it is, wait for it (wait_ms at most) or cancel it. "
    "job_id is what an INCOMPLETE answer names; only `list` does without."
)


_NEEDS_APPROVAL = (
    "Runs only after an operator has approved it. Where nobody has decided in time it answers with data.status "
    "pending, which is no error: the proposal stays queued, and the identical call picks the decision up."
)
_NEEDS_CONFIRMATION = (
    "Destroys something. Call it first without confirm_destructive: it answers CONFIRMATION_REQUIRED with what it "
    "would do in data, and does nothing. Call it again with confirm_destructive: true to have it done."
)
JUSTIFICATION = "justification"


def tools_of(catalogue: Catalogue) -> dict[str, Tool]:
    """Return the tools by name, in the order they were declared, then ours where there is a use for them. A command of
    the same name as one of ours takes its place."""
    tools = {spec.name: _tool(spec) for spec in catalogue.commands if spec.on_mcp}
    if may_go_on(catalogue):
        tools[JOB_TOOL] = _job_tool()
    ours = [STOP, EXTEND] if tools else []
    ours += [PROPOSE] if catalogue.proposals else []
    if catalogue.proposals or any(spec.on_mcp and spec.approval is not None for spec in catalogue.commands):
        ours += [CHECK, WITHDRAW]
    return {**tools, **proposal_tools([name for name in ours if name not in tools], _envelope_schema(None))}


def may_go_on(catalogue: Catalogue) -> bool:
    """Return whether any tool may outlive its caller's budget."""
    return any(spec.on_mcp and spec.interruption is not None for spec in catalogue.commands)


def headers_matter(tool: Tool) -> bool:
    """Return whether its schema asks for arguments to be repeated in HTTP headers, which the SDK then compares."""
    return "x-mcp-header" in json.dumps(tool.input_schema, default=str)


def _tool(spec: CommandSpec) -> Tool:
    return Tool(
        name=spec.name,
        description=_description(spec) or None,
        input_schema={"type": "object", **_with_ours(spec)},
        output_schema=_envelope_schema(spec.output_schema),
        annotations=ToolAnnotations(
            read_only_hint=not spec.mutates,
            destructive_hint=spec.destructive,
            idempotent_hint=spec.idempotent or not spec.mutates,
        ),
    )


def takes_justification(spec: CommandSpec) -> bool:
    """Return whether the tool has an argument for the operator's eyes only."""
    return spec.approval is not None and JUSTIFICATION not in spec.input_schema.get("properties", {})


def _with_ours(spec: CommandSpec) -> JsonSchema:
    """Return the arguments of the command, and those that the server takes for itself."""
    ours: JsonSchema = {}
    if takes_justification(spec):
        ours[JUSTIFICATION] = {"type": "string", "description": "Why the operator should approve this call."}
    if spec.needs_confirmation:
        ours[CONFIRMATION] = {"type": "boolean", "description": "Do it. Without this it only says what it would do."}
    return {**spec.input_schema, "properties": {**spec.input_schema.get("properties", {}), **ours}}


def _description(spec: CommandSpec) -> str:
    said = [spec.description] if spec.description else []
    if spec.approval is not None:
        said.append(_NEEDS_APPROVAL)
    if spec.needs_confirmation:
        said.append(_NEEDS_CONFIRMATION)
    if spec.interruption is not None:
        said.append(_GOES_ON)
    elif spec.clocks.timeout_ms:
        said.append(f"Answers within {format_duration(spec.clocks.timeout_ms)}.")
    return "\n\n".join(said)


def _envelope_schema(own: JsonSchema | None) -> JsonSchema:
    """Return the schema of the envelope, with the command's own result as the data of a success. What a failure says
    beside its error is open: how far it came, what there was before."""
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


def _job_tool() -> Tool:
    properties: dict[str, Any] = {
        "action": {"type": "string", "enum": list(JOB_ACTIONS)},
        "job_id": {"type": "string"},
        "wait_ms": {"type": "integer", "minimum": 0, "description": "with `wait`: how long at most"},
    }
    return Tool(
        name=JOB_TOOL,
        description=_JOB_DESCRIPTION,
        input_schema={
            "type": "object",
            "properties": properties,
            "required": ["action"],
            "additionalProperties": False,
        },
        output_schema=_envelope_schema(None),
        annotations=ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True),
    )


PROPOSE, CHECK, WITHDRAW = "propose", "check-proposal", "withdraw-proposal"
STOP, EXTEND = "graceful_stop", "extend"
CONTROLS = (STOP, EXTEND)
# They look at what runs here, or ask another process of this machine, which answers at once or not at all.
CONTROL_CLOCKS = Clocks(timeout_ms=10_000)

_WAIT = {
    "type": "integer",
    "minimum": 0,
    "description": "How long to wait for the operator, in milliseconds. No longer than the response budget, which is "
    "also how long it is where nothing is said.",
}
_ID = {"type": "string", "description": "The proposal_id of an earlier answer."}
_TEXT: dict[str, Any] = {"type": "string"}
_MS: dict[str, Any] = {"type": "integer", "minimum": 0}
_WHICH: dict[str, dict[str, Any]] = {
    "request_id": {
        **_TEXT,
        "description": "A running call: its meta.request_id, or the id of the call of yours that made it. Without this "
        "and job_id: all running calls of yours.",
    },
    "job_id": {**_TEXT, "description": "A job that goes on in the background."},
}
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
    STOP: {
        **_WHICH,
        "reason": {**_TEXT, "description": "Why; the work and its answer carry it."},
        "within_ms": {**_MS, "description": "How long it may take to end by itself."},
    },
    EXTEND: {**_WHICH, "by_ms": {**_MS, "description": "How much longer it may take, in milliseconds."}},
}
_REQUIRED = {
    PROPOSE: ["title", "justification"],
    CHECK: ["proposal_id"],
    WITHDRAW: ["proposal_id"],
    STOP: [],
    EXTEND: ["by_ms"],
}
_DESCRIPTIONS = {
    PROPOSE: (
        "Ask the operator for a decision: on a proposed file (path and proposed), or on a question. Answers with "
        "data.status: approved, modified, rejected or expired; or pending, which is no error: the proposal stays "
        "queued, and the identical call or `check-proposal` picks the decision up later."
    ),
    CHECK: "How a proposal stands, waiting up to wait_ms for the operator. data.status pending is no error.",
    WITHDRAW: "Take back a proposal of yours that nobody has decided yet.",
    STOP: (
        "Ask running calls of yours to end early and answer with what they have so far; what has not ended by then is "
        "stopped. Operators may stop any call."
    ),
    EXTEND: "Give running calls of yours more time, up to what their own caller has. Operators may extend any call.",
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
        elif field.endswith("_ms"):
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


class Controlling:
    """The work of `graceful_stop` and `extend`: whoever made a call may end it early or give it more time, and so may
    operators. To others it is not there."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def begin(self, name: str, parent: Deadline | None) -> Call:
        return self._dispatcher.begin_own(name, CONTROL_CLOCKS, parent, mutates=True, idempotent=name == STOP)

    async def perform(self, call: Call, request: CallRequest) -> Outcome:
        """Extend or wind down what the arguments name. `mistakes_in` has looked at them."""
        said, by = cast("Mapping[str, Any]", request.arguments), request.principal
        assert by is not None
        who = "the client" if by == ANONYMOUS else by.name
        try:
            if "job_id" in said:
                data = await asyncio.to_thread(self._tell_runner, call.name, said, by, who)
            else:
                calls = self._find_calls(said.get("request_id"), by)
                if call.name == EXTEND:
                    data = await extend(calls, said["by_ms"], who)
                else:
                    data = await wind_down(calls, who, said.get("reason", ""), said.get("within_ms"))
        except Failure as failure:
            return refusal_outcome(failure)
        return Outcome(Ending.FINISHED, data=data)

    def _find_calls(self, request_id: str | None, by: Principal) -> list[Call]:
        """Return the calls of theirs that run here, or the one that is named. Raises CALL_NOT_FOUND."""
        found = []
        for call in list(live_calls.values()):
            made_by = None if call.request is None else call.request.principal
            if made_by is None or call.inside_of is not None:
                continue
            if request_id is None:
                is_meant = made_by == by
            else:
                is_named = request_id == call.request_id or _is_below(call, request_id)
                is_meant = is_named and (made_by == by or by.role is Role.OPERATOR)
            if is_meant:
                found.append(call)
        if not found:
            which = "" if request_id is None else f" {request_id[:80]!r}"
            raise Failure("CALL_NOT_FOUND", f"no call{which} of yours is running here")
        return found

    def _tell_runner(self, name: str, said: Mapping[str, Any], by: Principal, who: str) -> dict[str, Any]:
        job = self._dispatcher.jobs().find(said["job_id"], by.sees_jobs_of)
        if not job.is_active or job.runner is None:
            raise Failure("CALL_NOT_FOUND", f"job {job.id} does not run")
        request: dict[str, object] = {"run": job.id, "who": who}
        if name == EXTEND:
            request |= {"do": "extend", "by_ms": said["by_ms"]}
        else:
            request |= {"do": "stop", "reason": said.get("reason", ""), "within_ms": said.get("within_ms")}
        return ask_holder(self._dispatcher.store().home, job.runner, request)


class Proposing:
    """The work of our own tools. Raises Failure when it is made where the environment's budget cannot be read."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.budget_ms = read_response_budget_ms()

    def begin(self, name: str, parent: Deadline | None) -> Call:
        """Start the clocks of one of the tools: how long it waits is its budget's to say."""
        return self._dispatcher.begin_own(name, Clocks(timeout_ms=0), parent, mutates=name != CHECK, idempotent=True)

    async def perform(self, call: Call, request: CallRequest) -> Outcome:
        """Propose, look after a proposal or withdraw it, within the budget. `mistakes_in` has looked at the
        arguments."""
        wait = CallWait(call.started_ns, min(request.budget_ms or 0, self.budget_ms), request.idempotency_key)
        found: list[Proposal] = []
        try:
            waited = await self._propose_or_find(call.name, request, wait, found.append)
        except Failure as failure:
            return refusal_outcome(failure)
        except asyncio.CancelledError as cancelled:  # the server stops, or its backstop rang
            if found:  # it stays as it is, and whoever asked is told so
                data = Waited(found[0], True, wait.wait_ms).outcome().data
                assert isinstance(data, dict)
                cancelled.outcome = Outcome(Ending.CANCELLED, data={**data, "partial": True})  # type: ignore[attr-defined]
            raise
        outcome = waited.answer_proposer() if call.name == PROPOSE else waited.outcome()
        if call.name == WITHDRAW and _has_code(outcome, "PROPOSAL_WITHDRAWN"):
            return Outcome(Ending.FINISHED, data=outcome.data)
        outcome.budget_ms = wait.wait_ms if waited.proposal.is_open else None
        return outcome

    async def _propose_or_find(
        self, name: str, request: CallRequest, wait: CallWait, on_found: Callable[[Proposal], None]
    ) -> Waited:
        inbox, by = self._dispatcher.inbox(), request.principal
        arguments = cast("Mapping[str, Any]", request.arguments)
        assert by is not None
        if name == PROPOSE:
            return await ask_and_wait(inbox, _ask(arguments), by, wait, on_found)
        found = await inbox.get(arguments["proposal_id"])
        if found is None or not by.may_see(found):  # which of the two is nobody's business
            raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {arguments['proposal_id'][:40]!r} of yours")
        if name == WITHDRAW:
            found = await inbox.withdraw(found.id, by)
        on_found(found)
        return await wait_for_decision(inbox, found, wait)


def _is_below(call: Call, request_id: str) -> bool:
    """Return whether a call was made for that one of its caller's."""
    try:
        return span_id_of(request_id) == call.caller.span_id
    except ValueError:  # no id of ours
        return False


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
