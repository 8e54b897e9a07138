"""Waiting for a person: the limits of the wait and of open proposals, the wait itself, and the outcome of the call.

    ask_and_wait ── propose ── on_found ── wait ── Waited ── outcome
                                              │
                    a call waits with its caller (CallWait), a step with its run (RunWait)

The limits come from the environment; invalid ones are reported at the start, not when a call waits.

There is one shape for every outcome, on every surface. An approval is a success. A proposal that is not decided yet is
no failure: it stays, and the answer says how to continue. A rejection is not `ok`, because a caller must not take it
for a permission.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..calls.call import Call, Outcome, RunWait
from ..calls.outcomes import failure_outcome
from ..core.envelope import Problem
from ..core.errors import Ending, Failure, SideEffects
from ..core.limits import (
    MAX_MS,
    NS_PER_MS,
    ClockKind,
    DurationError,
    Fired,
    WallTime,
    format_duration,
    parse_duration_ms,
)
from ..core.proposal import InboxLimits, Proposal, ProposalRequest, ProposalStatus, Summary
from ..core.value_types import value
from ..supervise.clock import monotonic_ns, wall_time
from ..supervise.kernel import is_alive

if TYPE_CHECKING:
    from ..calls.principal import Principal
    from .inbox import Inbox

RESPONSE_BUDGET_MS = 30_000
VARIABLE = "SHOTCLOCK_RESPONSE_TIMEOUT"
SECONDS_VARIABLE = "SUPERVISE_RESPONSE_TIMEOUT_SECONDS"
EACH_VARIABLE = "SHOTCLOCK_INBOX_LIMIT_EACH"
ALL_VARIABLE = "SHOTCLOCK_INBOX_LIMIT"
_COUNT = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12}", re.ASCII)
_STEP_OF_RUN = re.compile(r"run ([A-Za-z0-9._-]+) step ")  # the operation of an approved step
CALL_AGAIN = "make the approved call again, with the same arguments, to run it"
# Part of the text of every action that a process carries out. An approval bound to all inherited variables would never
# be valid: the width of a terminal is one of them.
NOT_BOUND = {
    "not covered by this approval": (
        "inherited variables, the contents of every file that has no sha256 here, such as imported modules,"
        " installed programs and data, and a change of a file between its last comparison, right before the start,"
        " and the moment when its program opens it"
    )
}


def read_response_budget_ms(environ: Mapping[str, str] = os.environ) -> int:
    """Return how long a call waits for a person. Raises Failure (ARG_ERROR) for invalid variables: call it at the
    start."""
    read_inbox_limits(environ)  # the caller is about to ask people, and should report these mistakes as early
    budget_ms = RESPONSE_BUDGET_MS
    # Both are checked, whichever is used: a mistake in the other would appear when this one is removed.
    if text := environ.get(SECONDS_VARIABLE, "").strip():
        if not _SECONDS.fullmatch(text):
            raise _refuse_variable(SECONDS_VARIABLE, f"{text[:40]!r} is not a number of seconds: write 30 or 0.5")
        budget_ms = math.ceil(float(text) * 1000)  # up, so that a tiny budget does not become none
        if budget_ms > MAX_MS:
            raise _refuse_variable(SECONDS_VARIABLE, f"{text!r} is too long: ten years is the most")
    if text := environ.get(VARIABLE, "").strip():
        try:
            return parse_duration_ms(text)
        except DurationError as error:
            raise _refuse_variable(VARIABLE, str(error)) from None
    return budget_ms


def read_inbox_limits(environ: Mapping[str, str] = os.environ) -> InboxLimits:
    """Return how many proposals may be open, of one agent and in all. Raises Failure (ARG_ERROR)."""
    usual = InboxLimits()
    return InboxLimits(_read_count(environ, EACH_VARIABLE, usual.each), _read_count(environ, ALL_VARIABLE, usual.all))


def _read_count(environ: Mapping[str, str], variable: str, default: int) -> int:
    text = environ.get(variable, "").strip()
    if text and not _COUNT.fullmatch(text):
        message = f"{text[:40]!r} is not a number of proposals: write a whole one from 1 to 999999999"
        raise _refuse_variable(variable, message)
    return int(text) if text else default


def _refuse_variable(variable: str, message: str) -> Failure:
    return Failure(
        "ARG_ERROR",
        f"the environment variable {variable} cannot be used: {message}",
        context={"errors": [{"field": variable, "message": message}]},
        suggestion=f"correct or unset {variable}",
    )


# --- asking and waiting ----------------------------------------------------------------------------------------


@value
class CallWait:
    """Wait of a call for a person: with its caller, for so long since it began."""

    started_ns: int
    wait_ms: int
    key: str | None = None  # finds the proposal again; without one the same action does

    @property
    def waited_ms(self) -> int:
        return (monotonic_ns() - self.started_ns) // NS_PER_MS


@value
class Waited:
    """A proposal as it was at the end of the wait."""

    proposal: Proposal
    was_open: bool  # whether there was a wait
    wait_ms: int = 0
    waited_ms: int = 0
    around: Call | None = None  # the call that bounded the wait of a step
    is_late: bool = False  # whether the run of the step had no more time to wait

    def outcome(self, again: str | None = None) -> Outcome:
        """Return the outcome for the agent. `again` says how to repeat a call that waits for the decision."""
        if self.around is not None and self.is_late:
            return undecided_outcome(self.proposal.id, describe_proposal(self.proposal), self.around)
        return outcome_of(self.proposal, self.waited_ms, self.wait_ms, again)

    def answer_proposer(self) -> Outcome:
        """Return the outcome of `propose`, whose work is done once the proposal is stored."""
        outcome = self.outcome()
        outcome.ending, outcome.side_effects = Ending.FINISHED, SideEffects.COMPLETE
        return outcome


async def ask_and_wait(
    inbox: Inbox,
    ask: ProposalRequest,
    by: Principal,
    wait: CallWait | RunWait,
    on_found: Callable[[Proposal], None] | None = None,
) -> Waited:
    """Propose, or find the proposal that answers, wait for its decision, and return it as it is then.

    `on_found` gets the proposal before the wait, and may raise. Raises Failure if it cannot be proposed:
    ACTION_CHANGED if the action of a step of a run is another one than it proposed before.
    """
    key, since = (wait.key, None) if isinstance(wait, CallWait) else (wait.key or None, wait.run_began_at)
    bell = None if isinstance(wait, CallWait) else wait.bounded().bound.bell
    until = None if bell is None else wall_time() + bell.remaining_ms(monotonic_ns())
    try:
        proposal = await inbox.propose(ask, by, key=key, since=since, until=until, on_found=on_found)
    except Failure as failure:
        if isinstance(wait, CallWait) or failure.code != "KEY_REUSED":
            raise
        raise action_changed(failure.context.get("proposal_id"), failure.context) from None
    return await wait_for_decision(inbox, proposal, wait)


async def wait_for_decision(inbox: Inbox, proposal: Proposal, wait: CallWait | RunWait) -> Waited:
    """Wait for the decision of a proposal and return it as it is then. Raises Failure if the store cannot be used."""
    was_open, is_late = proposal.is_open, False
    if isinstance(wait, CallWait):
        if was_open:
            proposal = await inbox.wait(proposal.id, wait.wait_ms - wait.waited_ms)
        return Waited(proposal, was_open, wait.wait_ms, wait.waited_ms)
    around = wait.bounded()
    if was_open:
        with wait.waits(wait.key or "", proposal):
            while True:
                proposal = await inbox.wait_until(proposal, bell := around.bound.bell)
                now = wait.bounded()
                later = now.bound.bell
                if not proposal.is_open or bell is None or (later is not None and later.at_ns <= bell.at_ns):
                    break
                around = now  # the run was given more time
            if proposal.is_open:
                proposal = await inbox.end_wait(proposal)
                is_late = not proposal.status.is_decided
    return Waited(proposal, was_open, around=around, is_late=is_late or proposal.ended_with_its_work)


# --- outcomes ----------------------------------------------------------------------------------------------------


@value
class LastUse:
    """Until when an approval can be used: by the run of its step, or else by the identical call."""

    until: WallTime
    run_id: str | None = None


def run_of(proposal: Proposal | Summary, dispatched: bool, last_use: LastUse | None = None) -> dict[str, object] | None:
    """Return the state of an approved action: not_started, running, succeeded, failed, or unknown if its process died.

    None if nothing was allowed, or if the agent carries it out itself. An action that waits to run has the `run_id` of
    its step, and with `last_use` the end of its time (`until`), after which it is `missed`.
    """
    is_unanswered = proposal.status is ProposalStatus.EXPIRED and proposal.runner is not None
    if not (dispatched or proposal.outcome) or not (proposal.status.allows or is_unanswered):
        return None
    runner, outcome = proposal.runner, proposal.outcome
    if outcome is not None and outcome.ok:
        return {"state": "succeeded", "at": outcome.at.iso()}
    if outcome is not None:
        return {"state": "failed", "at": outcome.at.iso(), "code": outcome.code, "message": outcome.message}
    if proposal.used_at is None and not is_unanswered:
        operation = proposal.operation if isinstance(proposal, Summary) else proposal.ask.operation
        step = _STEP_OF_RUN.match(operation or "")
        run_id = step[1] if step is not None else last_use.run_id if last_use is not None else None
        found: dict[str, object] = {"state": "not_started", "at": None}
        if run_id is not None:
            found["run_id"] = run_id
        if last_use is not None:
            state = "missed" if wall_time() >= last_use.until else "not_started"
            found |= {"state": state, "until": last_use.until.iso()}
        return found
    state = "running" if runner is not None and is_alive(runner.holder) else "unknown"
    job = {} if runner is None or runner.job_id is None else {"job_id": runner.job_id}
    return {"state": state, "at": None if proposal.used_at is None else proposal.used_at.iso(), **job}


def describe_proposal(proposal: Proposal) -> dict[str, object]:
    """Return the result of a proposal with the state of its action."""
    run = run_of(proposal, proposal.ask.dispatched)
    return {**proposal.as_result(), **({} if run is None else {"run": run})}


def outcome_of(proposal: Proposal, waited_ms: int, budget_ms: int, again: str | None = None) -> Outcome:
    """Return the outcome for the agent of a proposal. `again` says how to repeat a call that waits for the decision."""
    data = describe_proposal(proposal)
    status = proposal.status
    if status.allows:
        run = data.get("run")
        if isinstance(run, dict) and run["state"] == "not_started":
            resumes = f"shotclock run --resume {run['run_id']}" if "run_id" in run else None
            data |= {"continue_command": again or resumes} if again or resumes else {}
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
        message = f"{proposal.id} was not decided within {format_duration(budget_ms)}; it remains queued"
        fired = Fired(ClockKind.BUDGET, "caller", budget_ms, waited_ms)
        hint = None if again is None else "the identical call picks the decision up and runs: data.continue_command"
        problem = Problem("INCOMPLETE", message, fired=fired, side_effects=SideEffects.NONE, suggestion=hint)
    elif status is ProposalStatus.REJECTED:
        notes = f": {data['notes']}" if data["notes"] else ""
        problem = Problem("PROPOSAL_REJECTED", f"{proposal.id} was rejected by {proposal.decided_by}{notes}")
    elif status is ProposalStatus.EXPIRED:
        problem = Problem("PROPOSAL_EXPIRED", f"{proposal.id} expired at {proposal.expires_at}")
    else:
        problem = Problem("PROPOSAL_WITHDRAWN", str(data["notes"]))
    return Outcome(Ending.NOT_STARTED, problem, data)


def undecided_outcome(proposal_id: str, data: dict[str, object], around: Call) -> Outcome:
    """Return the outcome of a step whose run had no more time to wait. `around` bounded the wait."""
    fired = around.fired(ClockKind.TIMEOUT, monotonic_ns() - around.started_ns)
    message = f"{proposal_id} was not decided before the run's time was over"
    return Outcome(Ending.NOT_STARTED, Problem("NO_TIME_LEFT", message, fired=fired), data)


def action_changed(proposal_id: object, context: Mapping[str, object]) -> Failure:
    """Return the Failure of a step whose action is another one than was proposed for it."""
    message = f"the action of this step has changed since {proposal_id} was proposed"
    return Failure("ACTION_CHANGED", message, context=context, suggestion="run the workflow again, which asks anew")


def refusal_outcome(failure: Failure) -> Outcome:
    """Return the outcome of a refused request. Nothing has changed, unless the connection was lost meanwhile."""
    outcome = failure_outcome(failure)
    if failure.code != "CONNECTION_LOST":
        outcome.ending = Ending.NOT_STARTED
    return outcome
