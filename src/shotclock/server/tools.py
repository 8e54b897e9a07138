"""The tools that are listed: what a client is told about each command, made once from the catalogue."""

from __future__ import annotations

import json
from typing import Any

from mcp_types import Tool, ToolAnnotations

from ..core.catalogue import CONFIRMATION, Catalogue, CommandSpec, JsonSchema
from ..core.durations import format_duration
from ..core.manifest import data_schema
from .proposal_tools import CHECK, PROPOSE, WITHDRAW, proposal_tools

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
    """By name, in the order they were declared, then ours where there is a use for them. A command of the same name as
    one of ours takes its place."""
    tools = {spec.name: _tool(spec) for spec in catalogue.commands if spec.on_mcp}
    if may_go_on(catalogue):
        tools[JOB_TOOL] = _job_tool()
    ours = [PROPOSE] if catalogue.proposals else []
    if catalogue.proposals or any(spec.on_mcp and spec.approval is not None for spec in catalogue.commands):
        ours += [CHECK, WITHDRAW]
    return {**tools, **proposal_tools([name for name in ours if name not in tools], _envelope_schema(None))}


def may_go_on(catalogue: Catalogue) -> bool:
    """Whether any tool may outlive its caller's budget."""
    return any(spec.on_mcp and spec.interruption is not None for spec in catalogue.commands)


def headers_matter(tool: Tool) -> bool:
    """Whether its schema asks for arguments to be repeated in HTTP headers, which the SDK then compares."""
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
    """Whether the tool has an argument for the operator's eyes only."""
    return spec.approval is not None and JUSTIFICATION not in spec.input_schema.get("properties", {})


def _with_ours(spec: CommandSpec) -> JsonSchema:
    """The arguments of the command, and those that the server takes for itself."""
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
    """The envelope, with the command's own result as the data of a success. What a failure says beside its error is
    open: how far it came, what there was before."""
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
