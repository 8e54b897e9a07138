"""`shotclock token create|list|revoke`: access to the inbox over the network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..core.clocks import WallTime
from ..core.envelope import Envelope
from ..core.errors import Ending, Failure
from ..inbox.access import Access, Principal, Role
from ..inbox.person_wait import refusal_outcome
from ..process.clock import wall_time
from ..runtime.call import Outcome
from ..store.store import Store
from ..store.tokens import Token
from .output import say_line, signals_heard, write_quietly
from .parser import CommandTable, Subcommand, argument, duration, option
from .subcommand import JSON, ChildWork


def _create(name: str, role: str, ttl: int | None) -> ChildWork:
    def body(access: Access, now: WallTime) -> dict[str, object]:
        issued = access.issue(name, Role(role), Principal.local(), now, ttl_ms=ttl)
        return {"token": issued.text, **_describe(issued.token, now)}

    return _work("create", body)


def _list() -> ChildWork:
    return _work("list", lambda access, now: {"tokens": [_describe(token, now) for token in access.tokens()]})


def _revoke(name: str) -> ChildWork:
    def body(access: Access, now: WallTime) -> dict[str, object]:
        ended = {token.id for token in access.revoke(name, Principal.local(), now)}
        if not ended:
            raise Failure("TOKEN_NOT_FOUND", f"there is no token {name!r} to revoke")
        return {"revoked": [_describe(token, now) for token in access.tokens() if token.id in ended]}

    return _work("revoke", body)


def _work(verb: str, body: Callable[[Access, WallTime], dict[str, object]]) -> ChildWork:
    def perform() -> Outcome:
        try:
            with Store.open() as store:
                return Outcome(Ending.FINISHED, data=body(Access(store), wall_time()))
        except Failure as failure:
            return refusal_outcome(failure)

    return ChildWork(f"token {verb}", perform, mutates=verb != "list", show=_show)


def _describe(token: Token, now: WallTime) -> dict[str, object]:
    """Describe a token without its secret."""
    status = "active" if token.is_active(now) else "expired" if token.revoked_at is None else "revoked"
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "status": status,
        "created_at": token.created_at.iso(),
        "expires_at": None if token.expires_at is None else token.expires_at.iso(),
        "revoked_at": None if token.revoked_at is None else token.revoked_at.iso(),
    }


def _show(envelope: Envelope) -> None:
    data: Any = envelope.data
    if not envelope.ok:
        return
    if "token" in data:
        # Alone on stdout, so that a script can capture it.
        write_quietly(sys.stdout, f"{data['token']}\n", signals_heard)
        say_line(f"this is the only time it is shown; {data['name']} is {data['role']}, token {data['id']}")
        return
    from .render import draw_text, render_tokens

    tokens = data["tokens"] if "tokens" in data else data["revoked"]
    write_quietly(sys.stdout, draw_text(lambda console: render_tokens(tokens, console, wall_time())), signals_heard)


COMMANDS = {
    "token": CommandTable(
        "shotclock token",
        "Access to the inbox over the network: agents propose, operators decide.",
        (
            Subcommand(
                "create",
                "Create a token and print it once: only its hash is stored.",
                (
                    argument(
                        "name",
                        "The name on its proposals and decisions: 1 to 64 letters, digits or ._@+-.",
                        missing="missing NAME of the agent or operator",
                    ),
                    option(
                        "--role",
                        "ROLE",
                        "agent (proposes) or operator (decides).",
                        choices=("agent", "operator"),
                        missing="missing --role: agent or operator",
                    ),
                    duration("--ttl", "The token expires after this time (30d, 12h; without it, never)."),
                    JSON,
                ),
                _create,
                usage="--role agent|operator NAME [--ttl D]",
            ),
            Subcommand("list", "List all tokens, the oldest first, also revoked and expired ones.", (JSON,), _list),
            Subcommand(
                "revoke",
                "Revoke a token for good.",
                (
                    argument(
                        "name",
                        "The name or the id of the token.",
                        missing="missing NAME or id; see `shotclock token list`",
                    ),
                    JSON,
                ),
                _revoke,
                usage="NAME|ID",
            ),
        ),
        "verb",
    )
}
