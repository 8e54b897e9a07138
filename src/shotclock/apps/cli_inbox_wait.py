"""`shotclock inbox propose`, `check` and `watch`: wait for a decision or for changes."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from ..calls.call import Call, Outcome
from ..calls.outcomes import outcome_of_error
from ..calls.principal import Principal, Role
from ..core.envelope import Problem, stop_problem
from ..core.errors import Ending, Failure
from ..core.limits import format_duration
from ..core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposalStatus, ProposedFile, Summary
from ..core.value_types import JsonObject, replace
from ..dispatch.job_client import JobClient
from ..people.cli_editing import read_text
from ..people.inbox import Inbox, Reminder
from ..people.person_wait import (
    CallWait,
    Waited,
    ask_and_wait,
    read_response_budget_ms,
    refusal_outcome,
    wait_for_decision,
)
from ..people.proposal_json import summary
from ..store.store import Store
from ..terminal.drawing import draw
from ..terminal.output import EarlyEnd, StopListener, is_terminal, say_line, write_quietly
from ._inbox_drawing import draw_inbox

STORE_LIMIT_S = 30.0  # a stuck disk would exhaust it
BELL = "\a"
WAITING_SHOWN = 200


def propose(values: JsonObject, call: Call) -> Outcome:
    asker = Principal(values["asker"] or Principal.local().name, Role.AGENT)
    ask = _read_request(values)

    async def begin(inbox: Inbox, wait: CallWait, on_found: Callable[[Proposal], None]) -> Outcome:
        waited = await ask_and_wait(inbox, ask, asker, wait, on_found)
        return _add_withdrawal(waited.answer_proposer(), waited.proposal)

    return _wait(begin, values["wait"], call, values["idempotency_key"])


def check(values: JsonObject, call: Call) -> Outcome:
    async def begin(inbox: Inbox, wait: CallWait, on_found: Callable[[Proposal], None]) -> Outcome:
        found = await inbox.wait(values["proposal_id"], 0)
        on_found(found)
        waited = await wait_for_decision(inbox, found, wait)
        return _add_withdrawal(waited.outcome(), waited.proposal)

    return _wait(begin, values["wait"], call, None)


def _read_request(values: JsonObject) -> ProposalRequest:
    policy = Policy(destructive=values["destructive"], remind_ms=values["remind"] or 0)
    if values["ttl"] is not None:
        policy = replace(policy, ttl_ms=values["ttl"])
    title, justification, file = values["title"], values["justification"], values["file"]
    if file is None:
        return ProposalRequest(
            Kind.QUESTION, title, justification, choices=tuple(values["choice"] or ()), policy=policy
        )
    current = None if values["current"] is None else read_text(values["current"], "current")
    proposed = ProposedFile(os.path.abspath(values["current"] or file), read_text(file, "file"), current)
    return ProposalRequest(Kind.FILE, title, justification, file=proposed, policy=policy)


Begin = Callable[[Inbox, CallWait, Callable[[Proposal], None]], Coroutine[Any, Any, Outcome]]


def _wait(begin: Begin, asked_ms: int | None, call: Call, key: str | None) -> Outcome:
    budget_ms = read_response_budget_ms()  # also with --wait: a malformed variable is reported at once
    _, wait_ms = JobClient.patience(call, budget_ms if asked_ms is None else asked_ms)
    proposal: Proposal | None = None

    def on_found(found: Proposal) -> None:
        nonlocal proposal
        proposal = found
        if found.is_open and wait_ms and is_terminal(sys.stderr):
            say_line(f"{found.id} waits for a decision, for up to {format_duration(wait_ms)} here")

    async def wait() -> Outcome:
        with Store.open() as store:
            inbox = Inbox(store)
            try:
                waiting = begin(inbox, CallWait(call.started_ns, wait_ms, key), on_found)
                done = await StopListener.run(waiting, wait_ms / 1000 + STORE_LIMIT_S)
            finally:
                await inbox.close()
        return _describe_leaving(proposal, done.signal, wait_ms) if isinstance(done, EarlyEnd) else done

    try:
        outcome = asyncio.run(wait())
    except Failure as failure:
        outcome = refusal_outcome(failure)
    outcome.budget_ms = wait_ms
    return outcome


def _add_withdrawal(outcome: Outcome, proposal: Proposal) -> Outcome:
    """Make the command that withdraws the proposal work here, in the asker's name."""
    if proposal.is_open and proposal.asked_by != Principal.local().name and isinstance(outcome.data, dict):
        outcome.data["cancel_command"] = f"{outcome.data['cancel_command']} --as {shlex.quote(proposal.asked_by)}"
    return outcome


def _describe_leaving(proposal: Proposal | None, signal: str | None, wait_ms: int) -> Outcome:
    problem = Problem("STORE_BUSY", "the store did not answer") if signal is None else stop_problem(signal)
    if proposal is None:
        message = f"{problem.message}; see `shotclock inbox list` for whether the proposal was made"
        return Outcome(Ending.CANCELLED, replace(problem, message=message))
    outcome = _add_withdrawal(Waited(proposal, proposal.is_open, wait_ms).outcome(), proposal)
    data: Any = outcome.data
    message = f"{problem.message}; {proposal.id} remains queued"
    return Outcome(Ending.CANCELLED, replace(problem, message=message), {**data, "partial": True})


def watch(values: JsonObject, call: Call) -> Outcome:
    """Write the waiting proposals and then every change, until a limit, a signal or the reader ends it."""
    limits = [] if values["for_ms"] is None else [values["for_ms"] / 1000]
    if call.bound.bell is not None:
        limits.append(call.bound.bell.remaining_ms(call.started_ns) / 1000)
    with Store.open() as store:
        return asyncio.run(_watch(store, min(limits, default=None), values["as_json"]))


async def _watch(store: Store, limit_s: float | None, as_json: bool) -> Outcome:
    inbox, writer = Inbox(store), _ChangeWriter(as_json)
    outcome = Outcome(Ending.FINISHED)
    try:
        done = await StopListener.run(_write_changes(inbox, writer), limit_s)  # without a limit, a person ends it
        if isinstance(done, EarlyEnd) and done.signal is not None:
            outcome = Outcome(Ending.CANCELLED, stop_problem(done.signal))
    except Failure as failure:
        outcome = outcome_of_error(failure)
    finally:
        await inbox.close()
    outcome.data = {"changes": writer.count}
    return outcome


async def _write_changes(inbox: Inbox, writer: _ChangeWriter) -> None:
    """Write the waiting proposals, the oldest first, and then each change once."""
    latest = await inbox.list(limit=1)
    seq = latest[0].seq if latest else 0
    for proposal in reversed(await inbox.list(status=ProposalStatus.PENDING, limit=WAITING_SHOWN)):
        if proposal.seq <= seq and not writer.write(proposal, rings=False):
            return
    if is_terminal(sys.stderr):
        say_line("watching; Ctrl-C ends it")
    async for change in inbox.changes(seq):
        if not writer.write(change, rings=isinstance(change, Reminder) or change.is_open):
            return


class _ChangeWriter:
    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._me = Principal.local()
        self.count = 0

    def write(self, change: Summary | Reminder, *, rings: bool) -> bool:
        """Write one change. Returns whether the reader is still there."""
        is_reminder = isinstance(change, Reminder)
        proposal = change.proposal if isinstance(change, Reminder) else change
        event = {"type": "reminder" if is_reminder else "proposal", "proposal": summary(proposal, self._me)}
        self.count += 1
        if self._as_json:
            text = json.dumps(event, separators=(",", ":")) + "\n"
        else:
            text = draw(partial(draw_inbox, "watch"), event) + (BELL if rings else "")
        trouble = write_quietly(sys.stdout, text)
        if trouble is not None and not isinstance(trouble, BrokenPipeError):
            raise Failure("FILE_UNWRITABLE", f"the change could not be written: {trouble}")
        return trouble is None


VERBS = {"propose": propose, "check": check, "watch": watch}
