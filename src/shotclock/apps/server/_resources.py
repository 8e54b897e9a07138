"""Resources and templates of an App: listed in pages, and read by running their function on the clock."""

from __future__ import annotations

from typing import Any

from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    Annotations,
    ListResourcesResult,
    ListResourceTemplatesResult,
    PaginatedRequestParams,
    ReadResourceRequestParams,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ...core.catalogue import Catalogue, CommandSpec
from ...core.envelope import Envelope
from ...core.uri_template import is_template, parse_template
from ._listing import Context, Serve, page_of, refusal_of, shown_fields, values_of
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

    async def read(ctx: Context, params: ReadResourceRequestParams) -> ReadResourceResult | dict[str, Any]:
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


def _shown(spec: CommandSpec) -> dict[str, Any]:
    written = spec.listing.annotations
    annotations = None if written is None else Annotations.model_validate(written)
    own = {"name": spec.shown_name, "mime_type": spec.listing.mime_type, "annotations": annotations}
    return {**shown_fields(spec), **own}
