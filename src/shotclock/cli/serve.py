"""`shotclock serve`: an App as an MCP server; `shotclock inbox serve`: the operators' page alone. What keeps them from
serving is one envelope; after that, stdout is the protocol's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import Failure
from ..core.records import value
from .parsing import Mistakes

if TYPE_CHECKING:
    from ..servers.serving import Options


@value
class Serve:
    """A server that was asked for. Without a target it is the operators' page."""

    target: str | None
    options: Options
    json: bool = False
    """Whether the envelope was asked for on stdout, whoever else that belongs to."""


def understood(
    target: str | None,
    http: str | None,
    operation_timeout: str | None = None,
    operation_timeout_ms: str | None = None,
    require_token: bool = False,
    elicitation: bool = False,
) -> tuple[Serve, Mistakes]:
    from ..servers.serving import options_of

    options, mistakes = options_of(
        http=http,
        operation_timeout=operation_timeout,
        operation_timeout_ms=operation_timeout_ms,
        require_token=require_token,
        elicitation=elicitation,
    )
    return Serve(target, options), [{**mistake, "field": mistake["field"].replace("_", "-")} for mistake in mistakes]


def run(serve: Serve) -> int | Failure:
    """The exit code once it has served, or why it could not."""
    from ..servers.serving import serve_inbox, serve_target

    try:
        return serve_inbox(serve.options) if serve.target is None else serve_target(serve.target, serve.options)
    except Failure as failure:
        return failure
