"""A step with `approval`: it is shown to an operator as it would run, and runs only after a yes.

The proposal is made under a key of the run and the step, so a process that goes on with the run finds it again. It is
spent when the step begins; a run that is cut off before that has not begun the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ..core.asks import TITLE_LIMIT
from ..core.clocks import ClockKind, Clocks
from ..core.deadlines import Deadline
from ..core.effects import Ending
from ..core.envelope import Problem
from ..core.errors import Failure
from ..core.proposals import Ask, Kind, Policy, Proposal, ProposalStatus
from ..core.walltime import WallTime
from ..enforce.admission import Outcome, admit, answer
from ..enforce.clock import monotonic_ns
from ..enforce.handlers import raised
from ..enforce.hosted import current_scope
from ..inbox import Inbox, Principal, outcome_of
from ..providers.provider import StepResult, Waits
from .kinds import duration_ms
from .schema import STEP_TYPES, AnyStep, Approval
from .states import StepState


def key_of(run_id: str, state: StepState) -> str:
    """Of one visit to a step: going back to it asks again, going on with the run does not."""
    return f"{run_id}/{state.id}" + (f"#{state.visit}" if state.visit else "")


class StepGate:
    def __init__(self, inbox: Inbox, key: str, waits: Waits, run_began_at: WallTime) -> None:
        self._inbox = inbox
        self._key = key
        self._run_began_at = run_began_at
        self._waits = waits

    async def passed(
        self,
        step_id: str,
        step: AnyStep,
        shown: Mapping[str, Any],
        values: Mapping[str, str],
        deadline: Deadline | None,
    ) -> dict[str, Any] | StepResult:
        """What the operator has changed about it, or how it ended before it began."""
        scope = current_scope.get()
        owner = "run" if scope is None else scope.name
        admission = admit(f"step {step_id}", Clocks(timeout_ms=0), parent=deadline, parent_owner=owner)
        ask = self._ask(step_id, step, {**shown, **({"values": dict(values)} if values else {})})
        try:
            proposal = await self._inbox.propose(ask, Principal.local(), key=self._key, since=self._run_began_at)
            with self._waits(self._key, proposal):
                proposal = await self._inbox.wait_until(proposal, deadline)
            if proposal.status is ProposalStatus.EXPIRED and ask.policy.when_expired == "default":
                return {}
            if not proposal.status.allows:
                outcome = outcome_of(proposal, 0, 0)
                if proposal.is_open:  # the run's time is over
                    fired = admission.fired(ClockKind.TIMEOUT, monotonic_ns() - admission.started_ns)
                    message = f"nobody decided {proposal.id} before the run's time was over"
                    outcome = Outcome(Ending.NOT_STARTED, Problem("NO_TIME_LEFT", message, fired=fired), outcome.data)
                return StepResult(answer(admission, outcome), None, f"approval/{proposal.status}")
            changed = _changes(ask, proposal)
            if (wrong := _wrong(step, changed)) is not None:
                problem = Problem("ARG_ERROR", f"what the operator made of it does not fit: {wrong}", "validation")
                return StepResult(answer(admission, Outcome(Ending.NOT_STARTED, problem)), None, "approval/modified")
            if not await self._inbox.use(proposal.id, ask.action_hash):
                problem = Problem("ALREADY_DECIDED", f"the approval {proposal.id} was used before")
                return StepResult(answer(admission, Outcome(Ending.NOT_STARTED, problem)), None, "approval/used")
        except Failure as failure:
            return StepResult(answer(admission, raised(failure)), None, "approval/failed")
        return changed

    def _ask(self, step_id: str, step: AnyStep, shown: Mapping[str, Any]) -> Ask:
        written = step.approval if isinstance(step.approval, Approval) else Approval()
        run_id = self._key.partition("/")[0]
        title = f"{step_id}: {step.description}" if step.description else f"Run step {step_id}"
        return Ask(
            Kind.OPERATION,
            " ".join(title.split())[:TITLE_LIMIT],
            f"Step {step_id} ({step.type}) of run {run_id} asks before it runs.",
            operation=f"run {run_id} step {step_id}",
            arguments=dict(shown),
            policy=Policy(
                ttl_ms=max(1, duration_ms(written.ttl, "s")),
                remind_ms=0 if written.remind is None else duration_ms(written.remind, "s"),
                when_expired=written.when_expired,
                deciders=tuple(written.deciders),
                destructive=written.destructive,
            ),
        )


def _changes(ask: Ask, proposal: Proposal) -> dict[str, Any]:
    """Only what differs: what was not shown as it is (a secret) is not overwritten by how it was shown."""
    if proposal.status is not ProposalStatus.MODIFIED:
        return {}
    asked, decided = dict(ask.arguments or {}), dict(proposal.arguments or {})
    return {name: value for name, value in decided.items() if name not in asked or asked[name] != value}


def _wrong(step: AnyStep, changed: Mapping[str, Any]) -> str | None:
    if not changed:
        return None
    if "values" in changed:
        return "values: what other steps said cannot be changed here; change what is done with it"
    model = STEP_TYPES[step.type]
    try:
        model.model_validate({**step.model_dump(by_alias=True, exclude_unset=True), **changed})
    except ValidationError as error:
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return None
