"""`shotclock token`: who may reach the inbox over the network, and as what."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Literal

from ..core.clocks import Clocks
from ..core.durations import DurationError, parse_duration_ms
from ..core.effects import Ending
from ..core.envelope import Envelope, warning
from ..core.errors import Failure
from ..core.texts import visible
from ..core.walltime import WallTime
from ..enforce.admission import Outcome, admit, answer, inherited_deadline, no_time_left
from ..enforce.clock import monotonic_ns, wall_ns
from ..enforce.forked import carry_out
from ..inbox import Access, Principal, Role, refused
from ..store import Store
from ..store.tokens import Token
from . import signals
from .output import emit, say_line, summary_line, wants_json, write_quietly
from .parsing import Mistakes, mistaken, parse_verb
from .words import Parameter, Words

# Each is one short transaction; the store's own waits are shorter than this.
TIMEOUT_MS = 30_000

_JSON = Annotated[
    bool, Parameter(negative="", show_default=False, help="The envelope alone on stdout, also on a terminal.")
]
_NAME = Annotated[str | None, Parameter(name="name")]


def main(words: list[str]) -> int:
    as_json = wants_json("--json" in words)
    spoken = parse_verb(_vocabulary(), words, command="shotclock token")
    if spoken is None:
        return 0
    verb, said, mistakes = spoken
    if said:
        _understand(verb, said, mistakes)
    if mistakes:
        return _deliver("", mistaken("token", mistakes), as_json)
    inherited = inherited_deadline(os.environ, monotonic_ns())
    admission = admit(
        f"token {verb}",
        Clocks(timeout_ms=TIMEOUT_MS),
        parent=inherited.deadline,
        mutates=verb != "list",
        notes=tuple(warning("DEADLINE_UNREADABLE", text) for text in inherited.warnings),
    )
    outcome = no_time_left(admission) if admission.no_time_left else carry_out(admission, lambda: _done(verb, said))
    return _deliver(verb, answer(admission, outcome), as_json)


def _understand(verb: str, said: dict[str, Any], mistakes: Mistakes) -> None:
    if verb == "create" and said["role"] is None:
        mistakes.append({"field": "role", "message": "--role agent may propose, --role operator may decide"})
    if verb != "list" and not said["name"]:
        which = "whose? A name is needed" if verb == "create" else "which one? `shotclock token list` lists them"
        mistakes.append({"field": "name", "message": which})
    if said.get("ttl") is not None:
        try:
            said["ttl"] = parse_duration_ms(said["ttl"])
        except DurationError as error:
            mistakes.append({"field": "ttl", "message": str(error)})


def _done(verb: str, said: dict[str, Any]) -> Outcome:
    now, me = WallTime.of_ns(wall_ns()), Principal.local()
    try:
        with Store.open() as store:
            access = Access(store)
            if verb == "list":
                tokens = [_shown(token, now) for token in access.tokens()]
                return Outcome(Ending.FINISHED, data={"tokens": tokens})
            if verb == "create":
                issued = access.issue(said["name"], Role(said["role"]), me, now, ttl_ms=said["ttl"])
                return Outcome(Ending.FINISHED, data={"token": issued.text, **_shown(issued.token, now)})
            revoked = access.revoke(said["name"], me, now)
            if not revoked:
                raise Failure("TOKEN_NOT_FOUND", f"there is no token {said['name']!r} that could be revoked")
            ended = {token.id for token in revoked}
            tokens = [_shown(token, now) for token in access.tokens() if token.id in ended]
            return Outcome(Ending.FINISHED, data={"revoked": tokens})
    except Failure as failure:
        return refused(failure)


def _shown(token: Token, now: WallTime) -> dict[str, object]:
    """Nothing of it from which the token could be made."""
    status = "living" if token.is_living(now) else "expired" if token.revoked_at is None else "revoked"
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "status": status,
        "created_at": token.created_at.iso(),
        "expires_at": None if token.expires_at is None else token.expires_at.iso(),
        "revoked_at": None if token.revoked_at is None else token.revoked_at.iso(),
    }


def _vocabulary() -> Words:
    usages = {"create": "--role agent|operator NAME [--ttl D]", "list": "", "revoke": "NAME|ID"}
    words = Words(
        name="token",
        help="Who may reach the inbox over the network: agents propose and look after their own, operators decide.",
        usage="Usage: shotclock token VERB [OPTIONS]",
        usages={verb: f"Usage: shotclock token {verb} {usage}" for verb, usage in usages.items()},
    )

    @words.command()
    def create(
        name: _NAME = None,
        /,
        *,
        role: Annotated[Literal["agent", "operator"] | None, Parameter(metavar="ROLE")] = None,
        ttl: Annotated[str | None, Parameter(metavar="D")] = None,
        json: _JSON = False,
    ) -> None:
        """Make a token and print it, this once: only its hash is kept.

        Parameters
        ----------
        name
            Who it is for: 1 to 64 letters, digits or ._@+-; proposals and decisions carry it.
        role
            agent (proposes) or operator (decides).
        ttl
            How long it lives (30d, 12h); until it is revoked, if nothing is said.
        """

    @words.command(name="list")
    def list_(*, json: _JSON = False) -> None:
        """List the tokens, the oldest first, with those that were revoked or have expired."""

    @words.command()
    def revoke(name: _NAME = None, /, *, json: _JSON = False) -> None:
        """End a token, from now on and for good.

        Parameters
        ----------
        name
            The name it was made for, or its id.
        """

    return words


# --- the answer -----------------------------------------------------------------------------------------------


def _deliver(verb: str, envelope: Envelope, as_json: bool) -> int:
    signals.only_note()
    if as_json:
        return emit(envelope, signals.heard)
    data: Any = envelope.data
    if envelope.ok and verb == "create":
        # Alone on stdout, so that it can be taken from there; what is about it is for the person.
        write_quietly(sys.stdout, f"{data['token']}\n", signals.heard)
        say_line(f"this is the only time it is shown; {data['name']} is {data['role']}, token {data['id']}")
    elif envelope.ok and data is not None:
        from .inbox_shown import drawn, render_tokens

        tokens, now = data["tokens" if verb == "list" else "revoked"], WallTime.of_ns(wall_ns())
        write_quietly(sys.stdout, drawn(lambda console: render_tokens(tokens, console, now)), signals.heard)
    if envelope.error is not None or envelope.warnings:
        say_line(visible(summary_line(envelope)), heard=signals.heard)
    return envelope.exit_code
