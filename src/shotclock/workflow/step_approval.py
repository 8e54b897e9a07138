"""A step with `approval`: it is shown to an operator as it would run, and runs only after a yes to exactly that.

What is shown and hashed is everything that the file decides: its keys, what was interpolated into them, the variables
and the directory. A secret is shown as `***` and bound by a digest of what it really is.

The proposal is made under a key of the run and the step, so a process that goes on with the run finds it again. It is
spent when the step begins; a run that is cut off before that has not begun the step.

docs/design.md: R40.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token
from pathlib import Path
from typing import Any, NamedTuple

from ..core.clocks import Clocks
from ..core.deadlines import Deadline
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem
from ..core.errors import Failure
from ..core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposalStatus, canonical
from ..core.proposal_request import TITLE_LIMIT
from ..core.redaction import HIDDEN, Redaction
from ..core.shapes import ValidationError
from ..core.walltime import WallTime
from ..inbox.access import Principal
from ..inbox.hidden_values import hide_secrets
from ..inbox.inbox import Inbox
from ..inbox.outcomes import action_changed, describe_proposal, outcome_of, refusal_outcome, undecided_outcome
from ..providers.command import CommandStep, ToolStep
from ..providers.provider import ForeignProposal, Waits
from ..providers.step_type import STEP_TYPES, Approval, StepPart, duration_ms
from ..providers.workflow import WorkflowStep
from ..runtime.call import Outcome, admit, answer
from ..runtime.loop_call import current_scope
from .lint import approved_files, digests_of
from .state import StepState
from .step_renderer import RenderedStep


def key_of(run_id: str, state: StepState) -> str:
    """Of one visit to a step: going back to it asks again, going on with the run does not."""
    return f"{run_id}/{state.id}" + (f"#{state.visit}" if state.visit else "")


class Refused(NamedTuple):
    """How a step ended before it began."""

    envelope: Envelope
    rule: str


class StepGate:
    def __init__(
        self,
        inbox: Inbox,
        key: str,
        waits: Waits,
        redaction: Redaction,
        run_began_at: WallTime,
        *,
        used: str | None = None,
    ) -> None:
        """`used` is the proposal whose yes was used for this step before the run was parked."""
        self._inbox = inbox
        self._key = key
        self._run_began_at = run_began_at
        self._waits = waits
        self._redaction = redaction
        self.used = used
        self._files: Mapping[str, str] = {}
        self._bound: Token[Mapping[str, str]] | None = None

    async def ask(
        self, step_id: str, step: StepPart, rendered: RenderedStep, tries: int, deadline: Deadline | None
    ) -> RenderedStep | Refused:
        """Return what to run, which the operator may have changed, or how it ended before it began."""
        scope = current_scope.get()
        owner = "run" if scope is None else scope.name
        admission = admit(f"step {step_id}", Clocks(timeout_ms=0), parent=deadline, parent_owner=owner)
        written = rendered
        try:
            # It runs where it was shown to run, wherever a link leads by then.
            rendered = await asyncio.to_thread(_in_real_folder, written)
            ask = await self._ask(step_id, step, rendered, tries)
            known = None if self.used is None else await self._inbox.get(self.used)
            if known is not None and known.ask.action_hash == ask.action_hash:
                self._bind_files()
                return rendered._replace(settings={**rendered.settings, **_changes(ask, known, rendered.settings)})
            self.used = None
            proposal = await self._propose(ask)
            with self._waits(self._key, proposal):
                proposal = await self._inbox.wait_until(proposal, deadline)
            if proposal.status is ProposalStatus.EXPIRED and ask.policy.when_expired == "default":
                if await self._inbox.use(proposal.id, ask.action_hash, unanswered=True):
                    self.used = proposal.id
                self._bind_files()
                return rendered
            if not proposal.status.allows:
                # Open still: the run's time is over.
                outcome = outcome_of(proposal, 0, 0)
                if proposal.is_open:
                    outcome = undecided_outcome(proposal.id, describe_proposal(proposal), admission)
                return Refused(answer(admission, outcome), f"approval/{proposal.status}")
            changed = _changes(ask, proposal, rendered.settings)
            if (wrong := _find_wrong(step, changed)) is not None:
                problem = Problem("ARG_ERROR", f"what the operator changed it to does not fit: {wrong}", "validation")
                return Refused(answer(admission, Outcome(Ending.NOT_STARTED, problem)), "approval/modified")
            now = await asyncio.to_thread(_in_real_folder, written)
            if (await self._ask(step_id, step, now, tries)).action_hash != ask.action_hash:
                raise action_changed(proposal.id, {"proposal_id": proposal.id})
            if not await self._inbox.use(proposal.id, ask.action_hash):
                problem = Problem("ALREADY_DECIDED", f"the approval {proposal.id} was used before")
                return Refused(answer(admission, Outcome(Ending.NOT_STARTED, problem)), "approval/used")
            self.used = proposal.id
            self._bind_files()
        except Failure as failure:
            return Refused(answer(admission, refusal_outcome(failure)), "approval/failed")
        return rendered._replace(settings={**rendered.settings, **changed})

    def _bind_files(self) -> None:
        """Each is compared again with what was approved at the moment it is read to be run."""
        if self._files:
            self._bound = approved_files.set({**approved_files.get(), **self._files})

    def record(self, error: Mapping[str, Any] | None) -> None:
        """Write down what became of the step, for whoever approved it."""
        if self._bound is not None:
            approved_files.reset(self._bound)
        if self.used is not None:
            code = None if error is None else str(error.get("code"))
            self._inbox.record_outcome(self.used, code, "" if error is None else str(error.get("message", "")))

    async def _propose(self, ask: ProposalRequest) -> Proposal:
        try:
            return await self._inbox.propose(ask, Principal.local(), key=self._key, since=self._run_began_at)
        except Failure as failure:
            if failure.code != "KEY_REUSED":
                raise
            raise action_changed(failure.context.get("proposal_id"), failure.context) from None

    async def _ask(self, step_id: str, step: StepPart, rendered: RenderedStep, tries: int) -> ProposalRequest:
        written = step.approval if isinstance(step.approval, Approval) else Approval()
        run_id = self._key.partition("/")[0]
        title = f"{step_id}: {step.description}" if step.description else f"Run step {step_id}"
        settings = {name: value for name, value in rendered.settings.items() if value is not None}
        hidden: list[str] = []
        arguments = await self._hide_secrets(settings, "with", hidden)
        surroundings: dict[str, Any] = {
            "step type": step.type,
            "directory": await self._hide_secrets(str(rendered.folder), "directory", hidden),
            "environment": await self._hide_secrets(rendered.env, "environment", hidden),
        }
        if rendered.values:
            surroundings["values"] = await self._hide_secrets(rendered.values, "values", hidden)
        if tries > 1:
            surroundings["tries"] = f"up to {tries}: one approval covers all of them"
        if isinstance(step, WorkflowStep):
            file = rendered.folder / str(rendered.settings["workflow"])
            self._files = await asyncio.to_thread(digests_of, file)
            surroundings["files"] = await self._hide_secrets(self._files, "files", hidden)
        if hidden:
            surroundings["hidden values, by digest"] = hidden
        return ProposalRequest(
            Kind.OPERATION,
            " ".join(title.split())[:TITLE_LIMIT],
            f"Step {step_id} ({step.type}) of run {run_id} asks before it runs.",
            operation=f"run {run_id} step {step_id}",
            arguments=arguments,
            policy=Policy(
                ttl_ms=max(1, duration_ms(written.ttl, "s")),
                remind_ms=0 if written.remind is None else duration_ms(written.remind, "s"),
                when_expired=written.when_expired,
                deciders=tuple(written.deciders),
                destructive=written.destructive,
            ),
            surroundings=surroundings,
            dispatched=True,
        )

    async def _hide_secrets(self, value: Any, place: str, hidden: list[str]) -> Any:
        return await hide_secrets(self._inbox, self._redaction.text, value, place, hidden)


def _in_real_folder(rendered: RenderedStep) -> RenderedStep:
    try:
        return rendered._replace(folder=Path(os.path.realpath(rendered.folder)))
    except ValueError:  # no path at all, which is said where it would be entered
        return rendered


def _changes(ask: ProposalRequest, proposal: Proposal, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return only what differs, and in it what was not shown (a secret) as it is, not as it was shown."""
    if proposal.status is not ProposalStatus.MODIFIED:
        return {}
    asked, decided = dict(ask.arguments or {}), dict(proposal.arguments or {})
    return {
        name: _restore(value, asked.get(name), settings.get(name))
        for name, value in decided.items()
        if name not in asked or canonical(asked[name]) != canonical(value)
    }


def _restore(decided: Any, shown: Any, real: Any) -> Any:
    if isinstance(decided, dict) and isinstance(shown, dict) and isinstance(real, dict):
        return {name: _restore(each, shown.get(name), real.get(name)) for name, each in decided.items()}
    if isinstance(decided, list) and isinstance(shown, list) and isinstance(real, list):
        known = list(zip(shown, real, strict=True))
        return [_restore(each, *(known[at] if at < len(known) else (None, None))) for at, each in enumerate(decided)]
    return real if type(decided) is type(shown) and decided == shown else decided


def _find_wrong(step: StepPart, changed: Mapping[str, Any]) -> str | None:
    if not changed:
        return None
    if masked := [name for name, value in changed.items() if HIDDEN in canonical(value)]:
        return f"{', '.join(masked)}: a text with a hidden value can be left as it is, or replaced, but not edited"
    # What runs of a tool is a command; the step itself only names the tool.
    is_tool = isinstance(step, ToolStep)
    model = CommandStep if is_tool else STEP_TYPES[step.type].schema
    written = {"exec": "-"} if is_tool else step.model_dump(exclude_unset=True)
    try:
        model.model_validate({**written, **changed})
    except ValidationError as error:
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return None


# --- waiting for people -----------------------------------------------------------------------------------
# Whether a run works or only waits for people, and for how long its caller waits with it.
#
# While anything works, waiting costs the caller nothing. Once all that is left to do needs a person, the caller waits
# for its budget; after that the run is *parked*: it lies in the store with its questions, and going on with it later
# picks up what was decided meanwhile.


class PersonWait:
    """One for a run and all that are inside it."""

    def __init__(self, budget_ms: int | None) -> None:
        """No budget: the caller waits for as long as people take."""
        self.budget_ms = budget_ms
        self.waiting: dict[str, Proposal | ForeignProposal] = {}
        """By the key that each was asked under."""
        self.asked: dict[str, Proposal | ForeignProposal] = {}
        """What was waited for when it was parked."""
        self.left: list[Proposal] = []
        """What was asked by us and nobody waits for any more, as far as is known undecided."""
        self.parked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at_work = 0
        self._bell: asyncio.TimerHandle | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._at_work += 1
        self._look()
        try:
            yield
        finally:
            self._at_work -= 1
            self._look()

    @contextmanager
    def leave_to_parts(self) -> Iterator[None]:
        """Inside `at_work`, which it is not any more: each of its parts says by itself whether it works."""
        self._at_work -= 1
        self._look()
        try:
            yield
        finally:
            self._at_work += 1
            self._look()

    @contextmanager
    def waits(self, key: str, proposal: Proposal | ForeignProposal) -> Iterator[None]:
        """Inside `at_work`, which it is not any more until somebody has answered."""
        self._at_work -= 1
        self.waiting[key] = proposal
        self._look()
        try:
            yield
        finally:
            self._at_work += 1
            left = self.waiting.pop(key)
            if isinstance(left, Proposal):
                self.left.append(left)
            self._look()

    def _look(self) -> None:
        if self._at_work or not self.waiting:
            if self._bell is not None:
                self._bell.cancel()
                self._bell = None
        elif self._bell is None and self.budget_ms is not None:
            self._bell = asyncio.get_running_loop().call_later(self.budget_ms / 1000, self._park)

    def _park(self) -> None:
        if not self.parked.done():
            self.asked = dict(self.waiting)
            self.parked.set_result(None)
