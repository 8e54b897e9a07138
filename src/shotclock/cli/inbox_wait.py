"""`shotclock inbox propose`, `check` and `watch`: wait for a decision, or for whatever changes."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ..core.clocks import format_duration
from ..core.envelope import Problem, stop_problem
from ..core.errors import Ending, Failure
from ..core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposalStatus, ProposedFile, Summary
from ..core.value_types import replace
from ..dispatch.job_client import JobClient
from ..inbox.access import Principal, Role
from ..inbox.inbox import Inbox, Reminder
from ..inbox.person_wait import (
    CallWait,
    Waited,
    ask_and_wait,
    read_response_budget_ms,
    refusal_outcome,
    wait_for_decision,
)
from ..inbox.proposal_json import summary
from ..process.clock import wall_time
from ..runtime.call import Call, Outcome
from ..runtime.outcomes import outcome_of_error
from ..store.store import Store
from .inbox_edit import read_text
from .output import StopSignal, is_terminal, say_line, signals_heard, write_quietly

if TYPE_CHECKING:
    from rich.console import Console

# What making the proposal and telling how it stands may take beyond the waiting. A stuck disk would run this out.
STORE_LIMIT_S = 30.0
BELL = "\a"
WAITING_SHOWN = 200


def propose_or_check(verb: str, said: dict[str, Any], call: Call) -> Outcome:
    """Propose, or look, and wait for the decision for as long as was said. Raises Failure."""
    budget_ms = read_response_budget_ms()  # also where --wait is given: nonsense in the environment is said at once
    _, wait_ms = JobClient.patience(call, budget_ms if said["wait"] is None else said["wait"])
    asker = Principal(said.get("asker") or Principal.local().name, Role.AGENT)
    ask = _ask(said) if verb == "propose" else None

    wait = CallWait(call.started_ns, wait_ms, said.get("idempotency_key"))

    async def begin(inbox: Inbox, on_found: Callable[[Proposal], None]) -> Waited:
        if ask is not None:
            return await ask_and_wait(inbox, ask, asker, wait, on_found)
        found = await inbox.wait(said["proposal_id"], 0)
        on_found(found)
        return await wait_for_decision(inbox, found, wait)

    with Store.open() as store:
        outcome = asyncio.run(_wait_until_decided(store, begin, wait_ms, proposes=verb == "propose"))
    outcome.budget_ms = wait_ms
    return outcome


def _ask(said: dict[str, Any]) -> ProposalRequest:
    policy = Policy(destructive=said["destructive"], remind_ms=said["remind"] or 0)
    if said["ttl"] is not None:
        policy = Policy(said["ttl"], policy.remind_ms, destructive=policy.destructive)
    if said["file"] is None:
        choices = tuple(said["choice"] or ())
        return ProposalRequest(Kind.QUESTION, said["title"], said["justification"], choices=choices, policy=policy)
    current = None if said["current"] is None else read_text(said["current"], "current")
    path = os.path.abspath(said["current"] or said["file"])
    file = ProposedFile(path, read_text(said["file"], "file"), current)
    return ProposalRequest(Kind.FILE, said["title"], said["justification"], file=file, policy=policy)


async def _wait_until_decided(
    store: Store,
    begin: Callable[[Inbox, Callable[[Proposal], None]], Awaitable[Waited]],
    wait_ms: int,
    *,
    proposes: bool,
) -> Outcome:
    inbox = Inbox(store)
    known: Proposal | None = None

    def on_found(found: Proposal) -> None:
        nonlocal known
        known = found
        if known.is_open and wait_ms and is_terminal(sys.stderr):
            say_line(f"{known.id} waits for a decision, for up to {format_duration(wait_ms)} here")

    with StopSignal() as stop:
        working = asyncio.ensure_future(begin(inbox, on_found))
        both: list[asyncio.Future[Any]] = [working, stop]
        await asyncio.wait(both, timeout=wait_ms / 1000 + STORE_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        try:
            if working.done():
                return _describe_outcome(working.result(), proposes)
            working.cancel()
            return _describe_leaving(known, stop.result() if stop.done() else None, wait_ms)
        except Failure as failure:
            return refusal_outcome(failure)
        finally:
            await inbox.close()


def _describe_outcome(waited: Waited, proposes: bool) -> Outcome:
    """Describe how it stands, with a way to take it back that works here: in the name of whoever asked."""
    outcome, proposal = waited.answer_proposer() if proposes else waited.outcome(), waited.proposal
    if proposal.is_open and proposal.asked_by != Principal.local().name and isinstance(outcome.data, dict):
        outcome.data["cancel_command"] = f"{outcome.data['cancel_command']} --as {shlex.quote(proposal.asked_by)}"
    return outcome


def _describe_leaving(known: Proposal | None, signal: str | None, wait_ms: int) -> Outcome:
    """Describe what stays when we stop waiting: nothing is taken back."""
    problem = Problem("STORE_BUSY", "the store did not answer") if signal is None else stop_problem(signal)
    if known is None:
        message = f"{problem.message}; whether it was proposed, `shotclock inbox list` says"
        return Outcome(Ending.CANCELLED, replace(problem, message=message))
    data = _describe_outcome(Waited(known, known.is_open, wait_ms), False).data
    assert isinstance(data, dict)
    message = f"{problem.message}; {known.id} remains queued"
    return Outcome(Ending.CANCELLED, replace(problem, message=message), {**data, "partial": True})


# --- watching -------------------------------------------------------------------------------------------------


def watch(for_ms: int | None, call: Call, as_json: bool) -> Outcome:
    """Write what waits and then every change.

    Ends with the time asked for, with a signal, with our caller's deadline, or when nobody takes what we say.
    """
    limits = [] if for_ms is None else [for_ms / 1000]
    if call.bound.bell is not None:
        limits.append(call.bound.bell.remaining_ms(call.started_ns) / 1000)
    with Store.open() as store:
        return asyncio.run(_watch(store, min(limits, default=None), as_json))


async def _watch(store: Store, limit_s: float | None, as_json: bool) -> Outcome:
    inbox = Inbox(store)
    told = _ChangeWriter(as_json)
    with StopSignal() as stop:
        working = asyncio.ensure_future(_write_changes(inbox, told))
        both: list[asyncio.Future[Any]] = [working, stop]
        # Without a limit it is the person who ends it: that is what watching is.
        await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        outcome = Outcome(Ending.FINISHED)
        try:
            if working.done():
                working.result()
            elif stop.done():
                outcome = Outcome(Ending.CANCELLED, stop_problem(stop.result()))
        except Failure as failure:
            outcome = outcome_of_error(failure)
        finally:
            working.cancel()
            await inbox.close()
    outcome.data = {"changes": told.count}
    return outcome


async def _write_changes(inbox: Inbox, told: _ChangeWriter) -> None:
    """Write what waits by now, the oldest first, and then what changes; nothing is lost or told twice in between.

    Returns when whoever reads has left, and raises Failure when what we say cannot be written.
    """
    latest = await inbox.list(limit=1)
    seq = latest[0].seq if latest else 0
    for proposal in reversed(await inbox.list(status=ProposalStatus.PENDING, limit=WAITING_SHOWN)):
        if proposal.seq <= seq and not told.tell(proposal, rings=False):
            return
    if is_terminal(sys.stderr):
        say_line("watching; Ctrl-C ends it")
    async for change in inbox.changes(seq):
        if not told.tell(change, rings=isinstance(change, Reminder) or change.is_open):
            return


class _ChangeWriter:
    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._me = Principal.local()
        self._console: Console | None = None
        self.count = 0

    def tell(self, change: Summary | Reminder, *, rings: bool) -> bool:
        """Write one change. Returns whether there is still somebody to tell."""
        is_reminder = isinstance(change, Reminder)
        proposal = change.proposal if isinstance(change, Reminder) else change
        event = {"type": "reminder" if is_reminder else "proposal", "proposal": summary(proposal, self._me)}
        self.count += 1
        if self._as_json:
            text = json.dumps(event, separators=(",", ":")) + "\n"
        else:
            text = self._draw(event) + (BELL if rings else "")
        trouble = write_quietly(sys.stdout, text, signals_heard)
        if trouble is not None and not isinstance(trouble, BrokenPipeError):
            raise Failure("FILE_UNWRITABLE", f"what changes could not be written: {trouble}")
        return trouble is None

    def _draw(self, event: dict[str, Any]) -> str:
        from rich.console import Console

        from .render import line_of

        self._console = self._console or Console(highlight=False)
        with self._console.capture() as captured:
            self._console.print(line_of(event, wall_time()), no_wrap=True, overflow="ellipsis")
        return captured.get()
