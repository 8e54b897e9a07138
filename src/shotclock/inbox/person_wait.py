"""Waiting for a person: asking and waiting, how long a call may, how many proposals may be open, and what the call
answers with.

    ask_and_wait ── propose ── on_found ── wait ── Waited ── outcome
                                              │
                    a call waits with its caller (CallWait), a step with its run (RunWait)

The limits are the environment's to say, and nonsense there is told at the start, not when somebody asks.

There is one shape for every outcome, on every surface. An approval is a success. That nobody has answered yet is no
failure: the proposal stays, and the answer says how to go on. A rejection is a decision, but whoever called must not
take it for a permission, so it is not `ok`. And where the inbox does not do what it was asked for, nothing has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..core.clocks import (
    MAX_MS,
    NS_PER_MS,
    ClockKind,
    DurationError,
    Fired,
    WallTime,
    format_duration,
    parse_duration_ms,
)
from ..core.envelope import Problem
from ..core.errors import Ending, Failure, SideEffects
from ..core.proposal import InboxLimits, Proposal, ProposalRequest, ProposalStatus, Summary, result_of
from ..core.value_types import dataclass, lazy_pattern
from ..process.clock import monotonic_ns
from ..process.kernel import is_alive
from ..runtime.call import Call, Outcome
from ..runtime.outcomes import failure_outcome

if TYPE_CHECKING:
    from .access import Principal
    from .inbox import Inbox

RESPONSE_BUDGET_MS = 30_000
VARIABLE = "SHOTCLOCK_RESPONSE_TIMEOUT"
SECONDS_VARIABLE = "SUPERVISE_RESPONSE_TIMEOUT_SECONDS"
EACH_VARIABLE = "SHOTCLOCK_INBOX_LIMIT_EACH"
ALL_VARIABLE = "SHOTCLOCK_INBOX_LIMIT"
_COUNT = lazy_pattern(r"[1-9][0-9]{0,8}", re.ASCII)
_SECONDS = lazy_pattern(r"[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12}", re.ASCII)


def read_response_budget_ms(environ: Mapping[str, str] | None = None) -> int:
    """Return how long a call waits for a person. Raises Failure (ARG_ERROR) for what is no duration: call it at the
    start, not when somebody waits already."""
    environ = os.environ if environ is None else environ
    read_inbox_limits(
        environ
    )  # whoever asks how long to wait is about to ask people, and hears of that nonsense as early
    budget_ms: int | None = None
    # Both are looked at, whichever counts: nonsense in the other would be believed once this one is gone.
    if text := environ.get(SECONDS_VARIABLE, "").strip():
        if not _SECONDS.fullmatch(text):
            raise _refuse_variable(SECONDS_VARIABLE, f"{text[:40]!r} is not a number of seconds: write 30 or 0.5")
        # Up, so that a tiny budget does not become none at all.
        budget_ms = math.ceil(float(text) * 1000)
        if budget_ms > MAX_MS:
            raise _refuse_variable(SECONDS_VARIABLE, f"{text!r} is too long: ten years is the most")
    if text := environ.get(VARIABLE, "").strip():
        try:
            return parse_duration_ms(text)
        except DurationError as error:
            raise _refuse_variable(VARIABLE, str(error)) from None
    return RESPONSE_BUDGET_MS if budget_ms is None else budget_ms


def read_inbox_limits(environ: Mapping[str, str] | None = None) -> InboxLimits:
    """Return how many proposals may be open, of one asker and in all. Raises Failure (ARG_ERROR), like the budget."""
    environ = os.environ if environ is None else environ
    usual = InboxLimits()
    return InboxLimits(_read_count(environ, EACH_VARIABLE, usual.each), _read_count(environ, ALL_VARIABLE, usual.all))


def _read_count(environ: Mapping[str, str], variable: str, default: int) -> int:
    text = environ.get(variable, "").strip()
    if text and not _COUNT.fullmatch(text):
        raise _refuse_variable(
            variable, f"{text[:40]!r} is not a number of proposals: write a whole one from 1 to 999999999"
        )
    return int(text) if text else default


def _refuse_variable(variable: str, message: str) -> Failure:
    return Failure(
        "ARG_ERROR",
        f"the environment variable {variable} cannot be used: {message}",
        context={"errors": [{"field": variable, "message": message}]},
        suggestion=f"correct or unset {variable}",
    )


# --- asking and waiting ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallWait:
    """Wait of a call for a person: with its caller, for so long since it began."""

    started_ns: int
    wait_ms: int
    key: str | None = None
    """Finds the question again; without one the same action does."""

    @property
    def waited_ms(self) -> int:
        return (monotonic_ns() - self.started_ns) // NS_PER_MS


# In the text of every action that a process carries out. A yes bound to all of them would never hold: a terminal's
# width is among them. What decides about the action is passed as an argument, or set by the file.
NOT_BOUND = {"inherited variables": "not covered by an approval"}


@dataclass(frozen=True, slots=True)
class StepSurroundings:
    """What a step of a run decides of the calls that are made for it, beside their arguments."""

    describe: Callable[[Inbox], Awaitable[Mapping[str, Any]]]
    """Gives it as a person is shown it."""
    redact: Callable[[str], str]
    """Takes the secrets that the run knows out of a text."""


@dataclass(frozen=True, slots=True)
class RunWait:
    """Wait of a step of a run for a person: for as long as the run has time, unless the run is parked meanwhile."""

    key: str | None
    """Finds the question again, also from a process that goes on with the run."""
    run_began_at: WallTime | None
    """What was asked under the key before that was asked by another run."""
    waits: Callable[[str, Proposal], AbstractContextManager[Any]]
    """Entered while a person is waited for."""
    bounded: Callable[[], Call]
    """Gives what bounds the waiting, once somebody is to be asked."""
    step: StepSurroundings | None = None


@dataclass(frozen=True, slots=True)
class Waited:
    """A proposal as it was when the wait was over."""

    proposal: Proposal
    was_open: bool
    """Whether it had to be waited for."""
    wait_ms: int = 0
    waited_ms: int = 0
    around: Call | None = None
    """What bounded the waiting of a step."""

    def outcome(self, again: str | None = None) -> Outcome:
        """Return the answer to whoever asked. `again` is how to go on with a call that waits for the decision."""
        if self.around is not None and self.proposal.is_open:
            return undecided_outcome(self.proposal.id, describe_proposal(self.proposal), self.around)
        return outcome_of(self.proposal, self.waited_ms, self.wait_ms, again)


async def ask_and_wait(
    inbox: Inbox,
    ask: ProposalRequest,
    by: Principal,
    wait: CallWait | RunWait,
    on_found: Callable[[Proposal], None] | None = None,
) -> Waited:
    """Propose, or find the proposal that answers, wait for its decision, and return it as it is then.

    `on_found` is told of the proposal before it is waited for, and may raise. Raises Failure where it cannot be
    proposed: ACTION_CHANGED where a step of a run would do something else now than what it asked for before.
    """
    key, since = (wait.key, None) if isinstance(wait, CallWait) else (wait.key or None, wait.run_began_at)
    try:
        proposal = await inbox.propose(ask, by, key=key, since=since)
    except asyncio.CancelledError as cancelled:
        if on_found is not None and (made := getattr(cancelled, "proposal", None)) is not None:
            with contextlib.suppress(Failure):  # the cancellation goes first
                on_found(made)
        raise
    except Failure as failure:
        if isinstance(wait, CallWait) or failure.code != "KEY_REUSED":
            raise
        raise action_changed(failure.context.get("proposal_id"), failure.context) from None
    if on_found is not None:
        on_found(proposal)
    return await wait_for_decision(inbox, proposal, wait)


async def wait_for_decision(inbox: Inbox, proposal: Proposal, wait: CallWait | RunWait) -> Waited:
    """Wait for the decision of a proposal, and return it as it is then. Raises Failure where the store cannot be
    used."""
    was_open = proposal.is_open
    if isinstance(wait, CallWait):
        if was_open:
            proposal = await inbox.wait(proposal.id, wait.wait_ms - wait.waited_ms)
        return Waited(proposal, was_open, wait.wait_ms, wait.waited_ms)
    around = wait.bounded()
    if was_open:
        with wait.waits(wait.key or "", proposal):
            proposal = await inbox.wait_until(proposal, around.bound.bell)
    return Waited(proposal, was_open, around=around)


# --- answers -----------------------------------------------------------------------------------------------------

CALL_AGAIN = "make the call that was approved again, with the same arguments: it runs then"


def run_of(proposal: Proposal | Summary, dispatched: bool) -> dict[str, object] | None:
    """Say what became of what was approved: not_started, running, succeeded, failed, or unknown where its process is
    gone.

    None where nobody allowed anything, or whoever asked does it without us."""
    is_unanswered = proposal.status is ProposalStatus.EXPIRED and proposal.runner is not None
    if not dispatched or not (proposal.status.allows or is_unanswered):
        return None
    if proposal.outcome is not None:
        state = "succeeded" if proposal.outcome.ok else "failed"
        known: dict[str, object] = {"state": state, "at": proposal.outcome.at.iso()}
        return (
            known
            if proposal.outcome.ok
            else {**known, "code": proposal.outcome.code, "message": proposal.outcome.message}
        )
    if proposal.used_at is None and not is_unanswered:
        return {"state": "not_started", "at": None}
    runner = proposal.runner
    state = "running" if runner is not None and is_alive(runner.holder) else "unknown"
    job = {} if runner is None or runner.job_id is None else {"job_id": runner.job_id}
    return {"state": state, "at": None if proposal.used_at is None else proposal.used_at.iso(), **job}


def describe_proposal(proposal: Proposal) -> dict[str, object]:
    """Return the one shape of an answer, with what became of what was allowed."""
    run = run_of(proposal, proposal.ask.dispatched)
    return {**result_of(proposal), **({} if run is None else {"run": run})}


def outcome_of(proposal: Proposal, waited_ms: int, budget_ms: int, again: str | None = None) -> Outcome:
    """Answer whoever asked for a proposal, or asks how it stands. `again` is how to go on with a call
    that waits for it: the call itself."""
    data = describe_proposal(proposal)
    status = proposal.status
    if status.allows:
        run = data.get("run")
        if isinstance(run, dict) and run["state"] == "not_started":
            data["continue_command"] = again or CALL_AGAIN
            return Outcome(Ending.NOT_STARTED, data=data)
        return Outcome(Ending.FINISHED, data=data)
    if status is ProposalStatus.PENDING:
        data |= {
            "state": "paused",
            "job_id": proposal.id,
            "progress": {"done": 0, "total": 1, "unit": "decisions"},
            "continue_command": again or f"shotclock inbox check {proposal.id}",
            "cancel_command": f"shotclock inbox withdraw {proposal.id}",
        }
        message = f"nobody has decided {proposal.id} within {format_duration(budget_ms)}; it remains queued"
        fired = Fired(ClockKind.BUDGET, "caller", budget_ms, waited_ms)
        hint = None if again is None else "the identical call picks the decision up and runs: data.continue_command"
        problem = Problem("INCOMPLETE", message, fired=fired, side_effects=SideEffects.NONE, suggestion=hint)
        return Outcome(Ending.NOT_STARTED, problem, data)
    if status is ProposalStatus.REJECTED:
        notes = f": {data['notes']}" if data["notes"] else ""
        return Outcome(
            Ending.NOT_STARTED,
            Problem("PROPOSAL_REJECTED", f"{proposal.id} was rejected by {proposal.decided_by}{notes}"),
            data,
        )
    code = f"PROPOSAL_{status.name}"
    message = (
        f"{proposal.id} expired at {proposal.expires_at}" if status is ProposalStatus.EXPIRED else str(data["notes"])
    )
    return Outcome(Ending.NOT_STARTED, Problem(code, message), data)


def undecided_outcome(proposal_id: str, data: dict[str, object], around: Call) -> Outcome:
    """Answer for a step whose run had no more time to wait for it. `around` is what bounded the waiting."""
    fired = around.fired(ClockKind.TIMEOUT, monotonic_ns() - around.started_ns)
    message = f"nobody decided {proposal_id} before the run's time was over"
    return Outcome(Ending.NOT_STARTED, Problem("NO_TIME_LEFT", message, fired=fired), data)


def action_changed(proposal_id: object, context: Mapping[str, object]) -> Failure:
    """Make what a step raises that would do something else now than what was proposed for it."""
    message = f"what this step would do now is not what {proposal_id} asks for: it has changed since it was proposed"
    return Failure("ACTION_CHANGED", message, context=context, suggestion="run the workflow again, which asks anew")


def refusal_outcome(failure: Failure) -> Outcome:
    """Say that the inbox, or whoever guards it, would not do something: nothing has changed."""
    outcome = failure_outcome(failure)
    outcome.ending = Ending.NOT_STARTED
    return outcome
