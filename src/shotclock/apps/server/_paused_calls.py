"""Calls that wait until their clients repeat the request with answers (`input_required`, revision 2026-07-28).

The function waits in its worker. The state that names the call is a secret; the request that brings it has to be the
same one, by the same principal. The protocol has no message by which a client gives up: its call is stopped when the
time of an answer is over, or when it has waited for a while and a further call of the principal needs the place.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, SERVER_INFO_META_KEY
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ...calls.call import Call
from ...core.envelope import Envelope
from ...core.errors import Failure
from ...core.value_types import JsonObject, record
from ...supervise.clock import monotonic_ns
from ...worker.context import ASK_LIMIT_MS
from ._listing import Context
from .client_link import FunctionRequest, responses_in

if TYPE_CHECKING:
    from ._tool_calls import ToolCallMiddleware

MOST_PAUSED = 20  # calls of one principal, each in a worker of its own
GIVES_WAY_AFTER_MS = 60_000  # for a client to ask its person and come back, before its place may be needed


@record
class GuardedCall:
    """A call under the backstop of the server."""

    owner: ToolCallMiddleware
    """Of the program that the call runs in."""
    call: Call
    task: asyncio.Task[Envelope]
    stop: asyncio.Future[str] | None
    request: FunctionRequest
    began_ns: int
    paused_ns: int = 0
    expiry: asyncio.TimerHandle | None = None
    """Ends it while it is paused."""


class PausedCalls:
    def __init__(self) -> None:
        self._calls: dict[str, GuardedCall] = {}
        """By the state that names them, the longest pause first."""

    def pause(self, guarded: GuardedCall, server_info: Mapping[str, Any]) -> JsonObject | None:
        """Return the answer that asks the client; None if there is nothing to ask, or no place."""
        link = guarded.request.link
        requests = link.input_requests()
        if not requests:  # it has stopped asking
            return None
        if not self._make_room(guarded):
            link.refuse(Failure("CANNOT_ASK", f"{MOST_PAUSED} calls of the client wait for answers"))
            return None
        state = secrets.token_urlsafe(32)
        guarded.paused_ns = monotonic_ns()
        guarded.expiry = asyncio.get_running_loop().call_later(ASK_LIMIT_MS / 1000, self._expire, state)
        self._calls[state] = guarded
        return {
            "resultType": "input_required",
            "inputRequests": requests,
            "requestState": state,
            "_meta": {SERVER_INFO_META_KEY: server_info},
        }

    def _make_room(self, guarded: GuardedCall) -> bool:
        principal = guarded.request.principal
        states = [state for state, each in self._calls.items() if each.request.principal == principal]
        if len(states) < MOST_PAUSED:
            return True
        if monotonic_ns() - self._calls[states[0]].paused_ns < GIVES_WAY_AFTER_MS * 1_000_000:
            return False
        self._expire(states[0])
        return True

    def owner_of(self, ctx: Context) -> ToolCallMiddleware | None:
        """Return the owner of the call that a request continues. The program may have been replaced meanwhile."""
        guarded = self._calls.get(_state_in(ctx) or "")
        return None if guarded is None else guarded.owner

    def take(self, ctx: Context, request: FunctionRequest) -> GuardedCall | None:
        """Return the paused call that a request continues; None if it begins one. Raises MCPError."""
        responses_in(ctx)  # refused before the call is taken
        state = _state_in(ctx)
        if state is None:
            return None
        guarded = self._calls.get(state)
        asked = request.name, request.arguments, request.principal
        if guarded is None or asked != (guarded.request.name, guarded.request.arguments, guarded.request.principal):
            message = "requestState names no waiting call of this request: it may have ended; call again without it"
            raise MCPError(code=INVALID_PARAMS, message=message)
        self._remove(state)
        return guarded

    def stop_all(self, owner: ToolCallMiddleware) -> None:
        for state in [state for state, each in self._calls.items() if each.owner is owner]:
            self._expire(state)

    def _expire(self, state: str) -> None:
        """Stop a paused call: its client has not answered in time, or the server ends."""
        self._remove(state).task.cancel()

    def _remove(self, state: str) -> GuardedCall:
        guarded = self._calls.pop(state)
        if guarded.expiry is not None:
            guarded.expiry.cancel()
        return guarded


def _state_in(ctx: Context) -> str | None:
    """Return the state that a request brings. One that is no text names no call."""
    state = (ctx.params or {}).get("requestState")
    if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS or state is None:
        return None
    return state if isinstance(state, str) else ""
