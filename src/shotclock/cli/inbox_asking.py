"""`shotclock inbox propose` and `check`: a person is asked, and waited for, but not for long."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from ..core.deadlines import NS_PER_MS
from ..core.durations import format_duration
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem, stopped_by
from ..core.errors import Failure
from ..core.proposals import Ask, Kind, Policy, Proposal, ProposedFile
from ..core.records import changed
from ..enforce.admission import Admission, Outcome, answer
from ..enforce.clock import monotonic_ns
from ..inbox import Inbox, Principal, Role, outcome_of, refused, response_budget_ms
from ..jobs.front import Front
from ..store import Store
from . import signals
from .inbox_editing import read_text
from .output import is_terminal, say_line

# What making the proposal and telling how it stands may take beyond the waiting. A stuck disk would run this out.
STORE_LIMIT_S = 30.0


def waited(verb: str, said: dict[str, Any], admission: Admission) -> Envelope:
    budget_ms = response_budget_ms()  # also where --wait is given: nonsense in the environment is said at once
    _, wait_ms = Front.patience(admission, budget_ms if said["wait"] is None else said["wait"])
    asker = Principal(said.get("as_") or Principal.local().name, Role.AGENT)
    ask = _ask(said) if verb == "propose" else None

    async def begin(inbox: Inbox) -> Proposal:
        if ask is not None:
            return await inbox.propose(ask, asker, key=said["idempotency_key"])
        return await inbox.wait(said["proposal_id"], 0)

    with Store.open() as store:
        envelope = asyncio.run(_until_decided(store, begin, admission, wait_ms))
    envelope.meta["budget_ms"] = wait_ms
    return envelope


def _ask(said: dict[str, Any]) -> Ask:
    policy = Policy(destructive=said["destructive"], remind_ms=said["remind"] or 0)
    if said["ttl"] is not None:
        policy = Policy(said["ttl"], policy.remind_ms, destructive=policy.destructive)
    if said["file"] is None:
        choices = tuple(said["choice"] or ())
        return Ask(Kind.QUESTION, said["title"], said["justification"], choices=choices, policy=policy)
    current = None if said["current"] is None else read_text(said["current"], "current")
    path = os.path.abspath(said["current"] or said["file"])
    file = ProposedFile(path, read_text(said["file"], "file"), current)
    return Ask(Kind.FILE, said["title"], said["justification"], file=file, policy=policy)


async def _until_decided(
    store: Store, begin: Callable[[Inbox], Awaitable[Proposal]], admission: Admission, wait_ms: int
) -> Envelope:
    inbox = Inbox(store)
    known: Proposal | None = None

    async def waiting() -> Proposal:
        nonlocal known
        known = await begin(inbox)
        if known.is_open and wait_ms and is_terminal(sys.stderr):
            say_line(f"{known.id} waits for a decision, for up to {format_duration(wait_ms)} here")
        spent_ms = (monotonic_ns() - admission.started_ns) // NS_PER_MS
        return await inbox.wait(known.id, wait_ms - spent_ms) if known.is_open else known

    with signals.told() as stop:
        working = asyncio.ensure_future(waiting())
        both: list[asyncio.Future[Any]] = [working, stop]
        await asyncio.wait(both, timeout=wait_ms / 1000 + STORE_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        try:
            if working.done():
                waited_ms = (monotonic_ns() - admission.started_ns) // NS_PER_MS
                return answer(admission, _outcome(working.result(), waited_ms, wait_ms))
            working.cancel()
            return answer(admission, _left(known, stop.result() if stop.done() else None, wait_ms))
        except Failure as failure:
            return answer(admission, refused(failure))
        finally:
            await inbox.close()


def _outcome(proposal: Proposal, waited_ms: int, wait_ms: int) -> Outcome:
    """With a way to take it back that works here: it is taken back in the name of whoever asked."""
    outcome = outcome_of(proposal, waited_ms, wait_ms)
    if proposal.is_open and proposal.asked_by != Principal.local().name and isinstance(outcome.data, dict):
        outcome.data["cancel_command"] = f"{outcome.data['cancel_command']} --as {shlex.quote(proposal.asked_by)}"
    return outcome


def _left(known: Proposal | None, signal: str | None, wait_ms: int) -> Outcome:
    """Whoever stops waiting takes nothing back."""
    problem = Problem("STORE_BUSY", "the store did not answer") if signal is None else stopped_by(signal)
    if known is None:
        message = f"{problem.message}; whether it was proposed, `shotclock inbox list` says"
        return Outcome(Ending.CANCELLED, changed(problem, message=message))
    data = _outcome(known, 0, wait_ms).data
    assert isinstance(data, dict)
    message = f"{problem.message}; {known.id} remains queued"
    return Outcome(Ending.CANCELLED, changed(problem, message=message), {**data, "partial": True})
