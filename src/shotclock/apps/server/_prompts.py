"""Prompts of an App, and completions of their arguments and of those of resource templates."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CompleteRequestParams,
    CompleteResult,
    Completion,
    GetPromptRequestParams,
    GetPromptResult,
    ListPromptsResult,
    PaginatedRequestParams,
    Prompt,
    PromptArgument,
    PromptReference,
)

from ...core.catalogue import Catalogue, CommandSpec
from ...core.envelope import Envelope
from ...core.uri_template import is_template, parse_template
from ._listing import Context, Serve, kinds_of, page_of, refusal_of, shown_fields, takes_text, values_of


def offer_prompts(server: Server[Any], catalogue: Catalogue, serve: Serve, *, always: bool = False) -> None:
    """Add the requests for prompts and completions to a server, if the App has any, or `always`."""
    prompts = {spec.name.partition(" ")[2]: spec for spec in catalogue.served if spec.kind == "prompt"}
    completions = {spec.name: spec for spec in catalogue.served if spec.kind == "completion"}
    shown = [_prompt(name, spec) for name, spec in prompts.items()]

    async def list_prompts(ctx: Context, params: PaginatedRequestParams | None) -> ListPromptsResult:
        page, cursor = page_of(shown, params, catalogue.list_page_size)
        return ListPromptsResult(prompts=page, next_cursor=cursor)

    async def get(ctx: Context, params: GetPromptRequestParams) -> GetPromptResult | dict[str, Any]:
        spec = prompts.get(params.name)
        if spec is None:
            raise _no_prompt(params.name, prompts)
        envelope = await serve(ctx, spec.name, values_of(spec, params.arguments or {}))
        if not isinstance(envelope, Envelope):
            return envelope
        if not envelope.ok:
            raise refusal_of(envelope)
        data: Any = envelope.data
        return GetPromptResult.model_validate({"description": spec.description or None, **data})

    async def complete(ctx: Context, params: CompleteRequestParams) -> CompleteResult:
        reference = params.ref.name if isinstance(params.ref, PromptReference) else str(params.ref.uri)
        if isinstance(params.ref, PromptReference) and reference not in prompts:
            raise _no_prompt(reference, prompts)
        if is_template(reference):
            reference = _written(reference)
        others = dict(params.context.arguments or {}) if params.context is not None else {}
        spec = completions.get(f"completion {reference} {params.argument.name}")
        given: dict[str, object] = {"value": params.argument.value}
        if spec is not None and "arguments" in spec.input_schema["properties"]:
            given["arguments"] = others
        if spec is None and (spec := completions.get("completion *")) is not None:
            given = {"ref": params.ref.model_dump(by_alias=True, exclude_none=True)}
            given["argument"] = {"name": params.argument.name, "value": params.argument.value}
            given["context"] = {"arguments": others} if others else None
        if spec is None:
            return CompleteResult(completion=Completion(values=[]))
        envelope = await serve(ctx, spec.name, given)
        assert isinstance(envelope, Envelope)  # a completion cannot ask
        if not envelope.ok:
            raise refusal_of(envelope)
        return CompleteResult.model_validate({"completion": envelope.data})

    if prompts or always:
        server.add_request_handler("prompts/list", PaginatedRequestParams, list_prompts)
        server.add_request_handler("prompts/get", GetPromptRequestParams, get)
    if completions or always:
        server.add_request_handler("completion/complete", CompleteRequestParams, complete)


def _no_prompt(name: str, prompts: Mapping[str, CommandSpec]) -> MCPError:
    close = difflib.get_close_matches(name, prompts, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "list the prompts, and mind the spelling"
    return MCPError(code=INVALID_PARAMS, message=f"there is no prompt {name[:100]!r}: {hint}")


def _written(template: str) -> str:
    """Return a template in the form in which it is listed."""
    try:
        return parse_template(template).text
    except ValueError:
        return template


def _prompt(name: str, spec: CommandSpec) -> Prompt:
    required = spec.input_schema.get("required", ())
    arguments = [_argument(spec, each, each in required) for each in spec.input_schema["properties"]]
    return Prompt(name=name, arguments=arguments or None, **shown_fields(spec))


def _argument(spec: CommandSpec, name: str, is_required: bool) -> PromptArgument:
    schema = spec.input_schema["properties"][name]
    description = schema.get("description", "")
    if not takes_text(spec, name):
        kinds = " or ".join(sorted(kinds_of(schema, spec.input_schema) - {"null"}))
        description = f"{description} As JSON: {kinds}.".strip()
    return PromptArgument(name=name, description=description or None, required=is_required)
