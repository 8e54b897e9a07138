"""Resources, templates and prompts of an App: listed in pages, and got by running their function on the clock.

Also completions of their arguments.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    Annotations,
    CompleteRequestParams,
    CompleteResult,
    Completion,
    GetPromptRequestParams,
    GetPromptResult,
    ListPromptsResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    PaginatedRequestParams,
    Prompt,
    PromptArgument,
    PromptReference,
    ReadResourceRequestParams,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ...core.catalogue import Catalogue, CommandSpec
from ...core.envelope import Envelope
from ...core.uri_template import is_template, parse_template
from ...core.value_types import JsonObject
from ._listing import Context, Serve, kinds_of, page_of, refusal_of, shown_fields, takes_text, values_of
from ._subscriptions import Subscriptions

# Of a resource that does not exist. The 2026 revision uses the code of wrong parameters, and never this one.
RESOURCE_NOT_FOUND = -32002


def offer_resources(
    server: Server[Any], catalogue: Catalogue, serve: Serve, subscriptions: Subscriptions, *, always: bool = False
) -> None:
    """Add the requests for resources to a server, if the App has any, or `always`."""
    specs = [spec for spec in catalogue.served if spec.kind == "resource"]
    if not specs and not always:
        return
    size = catalogue.list_page_size
    fixed = {spec.listing.uri: spec for spec in specs if not is_template(spec.listing.uri)}
    templates = [(parse_template(spec.listing.uri), spec) for spec in specs if is_template(spec.listing.uri)]
    shown_resources = [Resource(uri=uri, **_shown(spec)) for uri, spec in fixed.items()]
    shown_templates = [ResourceTemplate(uri_template=spec.listing.uri, **_shown(spec)) for _, spec in templates]

    def find(ctx: Context, uri: str) -> tuple[CommandSpec, dict[str, object]]:
        if uri in fixed:
            return fixed[uri], {}
        for template, spec in templates:
            if (texts := template.match(uri)) is not None:
                return spec, values_of(spec, texts)
        code = INVALID_PARAMS if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS else RESOURCE_NOT_FOUND
        raise MCPError(code=code, message=f"there is no resource {uri[:200]!r}", data={"uri": uri})

    async def list_resources(ctx: Context, params: PaginatedRequestParams | None) -> ListResourcesResult:
        page, cursor = page_of(shown_resources, params, size)
        return ListResourcesResult(resources=page, next_cursor=cursor)

    async def list_templates(ctx: Context, params: PaginatedRequestParams | None) -> ListResourceTemplatesResult:
        page, cursor = page_of(shown_templates, params, size)
        return ListResourceTemplatesResult(resource_templates=page, next_cursor=cursor)

    async def read(ctx: Context, params: ReadResourceRequestParams) -> ReadResourceResult | JsonObject:
        uri = str(params.uri)
        spec, arguments = find(ctx, uri)
        envelope = await serve(ctx, spec.name, arguments)
        if not isinstance(envelope, Envelope):
            return envelope
        if not envelope.ok:
            raise refusal_of(envelope, uri=uri)
        data: Any = envelope.data
        contents = [{"uri": uri, **content} for content in data["contents"]]
        return ReadResourceResult.model_validate({"contents": contents})

    server.add_request_handler("resources/list", PaginatedRequestParams, list_resources)
    server.add_request_handler("resources/templates/list", PaginatedRequestParams, list_templates)
    server.add_request_handler("resources/read", ReadResourceRequestParams, read)
    subscriptions.offer(server, find)


def _shown(spec: CommandSpec) -> JsonObject:
    written = spec.listing.annotations
    annotations = None if written is None else Annotations.model_validate(written)
    own = {"name": spec.shown_name, "mime_type": spec.listing.mime_type, "annotations": annotations}
    return {**shown_fields(spec), **own}


def offer_prompts(server: Server[Any], catalogue: Catalogue, serve: Serve, *, always: bool = False) -> None:
    """Add the requests for prompts and completions to a server, if the App has any, or `always`."""
    prompts = {spec.name.partition(" ")[2]: spec for spec in catalogue.served if spec.kind == "prompt"}
    completions = {spec.name: spec for spec in catalogue.served if spec.kind == "completion"}
    shown = [_prompt(name, spec) for name, spec in prompts.items()]

    async def list_prompts(ctx: Context, params: PaginatedRequestParams | None) -> ListPromptsResult:
        page, cursor = page_of(shown, params, catalogue.list_page_size)
        return ListPromptsResult(prompts=page, next_cursor=cursor)

    async def get(ctx: Context, params: GetPromptRequestParams) -> GetPromptResult | JsonObject:
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
