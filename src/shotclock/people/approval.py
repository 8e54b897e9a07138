"""Approvals: a command that declares `approval` runs only after an operator has approved exactly this call.

    arguments are checked ── proposal ── approved ── used by this one call ── the work, whose timeout starts now
                                 │
                                 └─ rejected, expired, still pending: an answer, and nothing has run

An approval is valid for one call. Of two identical calls that waited for the same proposal, the second asks again.

A command that writes a file is shown as a change of that file. Its current text is read here, because no code of the
app runs before the approval.

The question of overtime to a person is here too.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from ..calls.call import Call, CallRequest, Outcome, StepSurroundings, invalid
from ..calls.principal import Principal
from ..core.arguments import Conversions, json_arguments
from ..core.catalogue import ApprovedFile, Catalogue, CommandSpec
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.limits import NS_PER_MS, format_duration, reserve_ms_for
from ..core.overtime import OvertimeDecision
from ..core.proposal import (
    Kind,
    Policy,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    ProposedFile,
    canonical,
    digest,
)
from ..core.value_types import JsonObject, replace
from ..core.visible_text import HIDDEN
from ..supervise.clock import monotonic_ns
from .inbox import EDITED, HIDDEN_VALUES, Inbox, hide_secrets, restore_hidden
from .person_wait import (
    CALL_AGAIN,
    NOT_BOUND,
    CallWait,
    action_changed,
    ask_and_wait,
    read_response_budget_ms,
    refusal_outcome,
)
from .proposal_checks import TITLE_LIMIT
from .proposal_json import read_text_file

# The one parameter beside the text that a command with an approved file may have.
JUSTIFICATION = "justification"
PROGRAM_DIGEST = "program content"
NO_SUCH_FILE = "no such file"
NOT_A_FILE = "not a regular file"
# The answer that grants no overtime, and the parts of the call's own reason and of its output that are shown.
DECLINE = "no more time"
REASON_SHOWN = 1000
OUTPUT_SHOWN = 1500
Check = Callable[[Call, CommandSpec, Mapping[str, object]], Awaitable[Outcome]]


class Approvals:
    """Asks a person before a command that declares `approval` is run, and records its outcome.

    Making one raises Failure where the environment holds no valid time to wait for people.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        inbox: Callable[[], Inbox],
        check: Check | None = None,
        program: str | None = None,
        step: StepSurroundings | None = None,
    ) -> None:
        """`check` validates arguments without running the command. `program` is the file or the module of the commands,
        `step` the step of a run that they are called for."""
        self._step = step
        self._check = check
        self._program = program
        self._file = catalogue.file
        # Workers run the program as it was imported, which was before this.
        self._file_digest = None if catalogue.file is None else digest_of_file(catalogue.file)
        self._app = catalogue.name
        self._specs = {spec.name: spec for spec in catalogue.commands if spec.approval is not None}
        self._inbox = inbox
        self._budget_ms = read_response_budget_ms() if self._specs else 0

    def guards(self, name: str) -> bool:
        return name in self._specs

    async def approve(self, call: Call, conversions: Conversions | None = None) -> Outcome | None:
        """Ask a person whether the call may run, and wait within its caller's time. Return the answer if it may not.

        Otherwise the approval is used up, and the call has the approved arguments, perhaps modified. Its clocks stop
        while a person is asked. `conversions` is the result of a check of the arguments that was already made.
        """
        spec, request = self._specs[call.name], call.request
        try:
            if request is None:  # made inside another call, which must not change the arguments while a person decides
                call.arguments, problems = json_arguments(call.arguments)
                if problems:
                    return invalid(problems)
                call.request = request = CallRequest(call.name, call.arguments, repeat_hint=CALL_AGAIN)
            if conversions is None:
                checked = await self._check_arguments(call, spec, call.arguments)
                if isinstance(checked, Outcome):
                    return checked
                conversions = checked
            return await self._ask(call, spec, request, conversions)
        except Failure as failure:  # the store cannot be used, or the action has changed meanwhile
            return refusal_outcome(failure)

    async def _check_arguments(
        self, call: Call, spec: CommandSpec, arguments: Mapping[str, object]
    ) -> Outcome | Conversions:
        if self._check is None:
            return Conversions({}, [])
        checked = await self._check(call, spec, arguments)
        data: Any = checked.data
        return checked if checked.problem is not None else Conversions(**data)

    async def _ask(
        self, call: Call, spec: CommandSpec, request: CallRequest, conversions: Conversions
    ) -> Outcome | None:
        """Propose the call, wait for a decision and use the approval up."""
        started_ns = monotonic_ns()
        limits = [self._budget_ms, *([] if request.budget_ms is None else [request.budget_ms])]
        if call.time.parent is not None:
            remaining_ms = call.time.parent.remaining_ms(started_ns)
            limits.append(remaining_ms - reserve_ms_for(remaining_ms))
        wait_ms = max(0, min(limits))
        inbox, run_wait = self._inbox(), request.run_wait
        by = request.principal or Principal.local()
        while True:
            ask = await self._question(call, spec, request, conversions)
            # The action hash of a file does not cover its current text; another current text is another question.
            identity = None if ask.file is None else digest([ask.title, ask.action_hash, ask.file.current])
            wait = run_wait or CallWait(started_ns, wait_ms, request.idempotency_key or identity)
            must_be_same = partial(_must_be_same_question, ask, run_wait is not None)
            waited = await ask_and_wait(inbox, ask, by, wait, must_be_same)
            proposal = waited.proposal
            unanswered = proposal.allows_unanswered
            if not unanswered and not proposal.status.allows:
                return waited.outcome(request.repeat_hint or f"call {spec.name} again with the same arguments")
            if waited.was_open:
                call.restart_clocks()
                # The directory, a file or a conversion may be another one by now.
                checked = await self._check_arguments(call, spec, call.arguments)
                if isinstance(checked, Outcome):
                    return checked
                conversions = checked
                if not _is_same_question(proposal.ask, await self._question(call, spec, request, conversions)):
                    message = f"the action has changed since {proposal.id} was proposed"
                    raise Failure("ACTION_CHANGED", message, suggestion="call again to propose the new action")
            approved = _make_approved_arguments(spec, call.arguments, proposal)
            if self._step_of(request) is not None and spec.approved_file is None:
                modified = [name for name, each in approved.items() if each is not call.arguments.get(name)]
                if edited := [name for name in modified if HIDDEN in canonical(approved[name])]:
                    return invalid([{"field": name, "message": EDITED} for name in edited])
            if proposal.status is ProposalStatus.MODIFIED:
                checked = await self._check_arguments(call, spec, approved)
                if isinstance(checked, Outcome):
                    return checked
            if await inbox.use(proposal.id, ask.action_hash, unanswered=unanswered):
                call.arguments, call.proposal_id = approved, proposal.id
                if request.budget_ms is not None:
                    waited_ms = (monotonic_ns() - started_ns) // NS_PER_MS
                    request.budget_ms = max(0, request.budget_ms - waited_ms)
                return None

    def must_be_approved(self, proposal: Proposal) -> None:
        """Raise Failure unless the proposal was made for this program file, with the content that was imported."""
        approved = (proposal.ask.surroundings or {}).get(PROGRAM_DIGEST)
        if approved != self._file_digest:
            message = f"{self._file!r} has changed since {proposal.id} was proposed"
            raise Failure("ACTION_CHANGED", message, suggestion="call again to propose the new action")

    def record(self, proposal_id: str, envelope: Envelope) -> None:
        """Record the outcome of an approved call. A detached job records its own."""
        if envelope.ending != "detached":
            message = str((envelope.error or {}).get("message", ""))
            self._inbox().record_outcome(proposal_id, envelope.code, message)

    async def _question(
        self, call: Call, spec: CommandSpec, request: CallRequest, conversions: Conversions
    ) -> ProposalRequest:
        """Describe the action of this call with its surroundings."""
        surroundings = self._surroundings()
        if self._file is not None:
            surroundings[PROGRAM_DIGEST] = await asyncio.to_thread(digest_of_file, self._file)
            if surroundings[PROGRAM_DIGEST] != self._file_digest:
                message = f"{self._file!r} has changed since this program was started from it"
                raise Failure("ACTION_CHANGED", message, suggestion="start the program again, and call again")
        if request.stdin is not None:
            surroundings["stdin"] = {"sha256": request.stdin.digest}
        if request.resume_from is not None:
            surroundings["resume from"] = request.resume_from
        runs_as, unsteady, shown = conversions.runs_as, conversions.unsteady, call.arguments
        converted: JsonObject = {"runs as": runs_as} if runs_as else {}
        converted |= {"runs as something else every time": unsteady} if unsteady else {}
        if (step := self._step_of(request)) is not None:
            inbox, redact = self._inbox(), step.redact
            surroundings |= await step.describe(inbox)
            hidden: list[str] = []
            shown = await hide_secrets(inbox, redact, shown, "arguments", hidden)
            converted = await hide_secrets(inbox, redact, converted, "conversions", hidden)
            if hidden:
                surroundings[HIDDEN_VALUES] = [*surroundings.get(HIDDEN_VALUES, ()), *hidden]
        surroundings |= converted
        if spec.approved_file is None:
            return self._ask_for_operation(spec, shown, request.justification, surroundings)
        return await asyncio.to_thread(
            self._ask_for_file, spec, spec.approved_file, call.arguments, request.justification, surroundings
        )

    def _step_of(self, request: CallRequest) -> StepSurroundings | None:
        """Return the step that a call is made for; a call inside another one is made for the step of the whole App."""
        return self._step if request.run_wait is None else request.run_wait.step

    def _ask_for_operation(
        self, spec: CommandSpec, arguments: Mapping[str, Any], justification: str, surroundings: Mapping[str, Any]
    ) -> ProposalRequest:
        defaults, declared = spec.defaults, list(spec.input_schema.get("properties", {}))
        arguments = {**defaults, **arguments}
        # One order of the arguments that differ from their defaults: identical calls have identical titles.
        names = [name for name in declared if name in arguments] + sorted(arguments.keys() - declared)
        shown = [
            each for each in names if each not in defaults or canonical(defaults[each]) != canonical(arguments[each])
        ]
        title = " ".join([self._app, spec.name, *(f"{name}={arguments[name]}" for name in shown)])
        return ProposalRequest(
            Kind.OPERATION,
            _shorten_title(title),
            justification,
            operation=f"{self._app}/{spec.name}",
            arguments=arguments,
            input_schema=spec.input_schema,
            policy=_policy_of(spec),
            surroundings=surroundings,
            dispatched=True,
        )

    def _ask_for_file(
        self,
        spec: CommandSpec,
        file: ApprovedFile,
        arguments: Mapping[str, object],
        justification: str,
        surroundings: Mapping[str, Any],
    ) -> ProposalRequest:
        """Describe a change of a file. Reads the file, for the comparison."""
        return ProposalRequest(
            Kind.FILE,
            _shorten_title(f"{self._app} {spec.name}: {os.path.basename(file.path)}"),
            justification or str(arguments.get(JUSTIFICATION, "")),
            file=ProposedFile(file.path, str(arguments[file.proposed]), read_text_file(file.path), was_read=True),
            policy=_policy_of(spec),
            surroundings={"command": f"{self._app}/{spec.name}", **surroundings},
            dispatched=True,
        )

    def _surroundings(self) -> JsonObject:
        """Return the directory and the program of every call."""
        try:
            found: JsonObject = {"directory": os.getcwd()}
        except OSError:  # it was removed under us
            found = {"directory": None}
        found |= NOT_BOUND
        if self._program is not None:
            found["program"] = self._program
        if self._file is not None and self._file != self._program:  # a module name may be found in several places
            found["program file"] = self._file
        return found


def _policy_of(spec: CommandSpec) -> Policy:
    policy = spec.approval or Policy()
    return replace(policy, destructive=spec.destructive or policy.destructive)


def _must_be_same_question(ask: ProposalRequest, is_step: bool, proposal: Proposal) -> None:
    if _is_same_question(proposal.ask, ask):
        return
    if is_step:
        raise action_changed(proposal.id, {"proposal_id": proposal.id})
    message = f"{proposal.id} asks for the same with another title, policy or current text"
    raise Failure("ACTION_CHANGED", message, suggestion="withdraw it and call again, or use another key")


def _is_same_question(one: ProposalRequest, other: ProposalRequest) -> bool:
    """Return whether two requests ask the same.

    An agent may have proposed the same action before, under a policy of its own: for any operator to decide, without
    the typed confirmation, against a current text that it made up.
    """
    return (one.title, one.policy, one.file, one.text) == (other.title, other.policy, other.file, other.text)


def _make_approved_arguments(
    spec: CommandSpec, arguments: Mapping[str, object], proposal: Proposal
) -> Mapping[str, object]:
    """Return the arguments that the command is run with: those of the caller, with the operator's modifications.
    Unmodified ones are the caller's own objects, which JSON may not hold."""
    file = spec.approved_file
    if file is None:
        if proposal.status is not ProposalStatus.MODIFIED:
            return arguments
        asked = dict(proposal.ask.arguments or {})
        # A default that was shown and not modified stays the command's own: not every one would pass as an argument.
        return {
            name: arguments[name] if is_same else restore_hidden(value, asked.get(name), arguments.get(name))
            for name, value in (proposal.arguments or {}).items()
            if not (is_same := name in asked and canonical(asked[name]) == canonical(value)) or name in arguments
        }
    assert proposal.ask.file is not None
    approved = {**arguments, file.proposed: proposal.file_text}
    if JUSTIFICATION in arguments:  # the one that the operator was shown, not that of this call
        approved[JUSTIFICATION] = proposal.ask.justification
    if file.decision is not None:
        shown = {"path": file.path, "text": proposal.file_text, "current": proposal.ask.file.current}
        approved[file.decision] = {**proposal.as_result(), "file": shown}
    return approved


def _shorten_title(title: str) -> str:
    title = " ".join(title.split())
    return title if len(title) <= TITLE_LIMIT else title[: TITLE_LIMIT - 1] + "…"


def digest_of_file(path: str) -> str:
    """Return the SHA-256 of a file's content, behind every symbolic link, or the reason why there is none."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return NOT_A_FILE
            return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except (FileNotFoundError, NotADirectoryError):
        return NO_SUCH_FILE
    except (OSError, ValueError) as error:
        return f"unreadable: {getattr(error, 'strerror', None) or error}"


async def ask_person(inbox_of: Callable[[], Inbox], call: Call, summary: JsonObject) -> OvertimeDecision:
    """Ask in the inbox whether a call may have overtime, and return the decision.

    It is an ordinary question, with the possible extensions as its choices.
    The caller bounds the wait: a cancellation withdraws the question. Raises Failure without a usable inbox.
    """
    assert call.overtime is not None
    policy, inbox, by = call.overtime.policy, inbox_of(), Principal.local()
    choices = _choices(summary, policy.share_ms)
    ask = ProposalRequest(
        Kind.QUESTION,
        f"More time for {call.name}?"[:200],
        _describe(summary),
        choices=tuple(choices),
        policy=Policy(ttl_ms=max(1, policy.observer_timeout_ms), deciders=policy.deciders),
    )
    # A new key for every question of a call: an earlier answer must not be found again.
    key = f"overtime/{call.request_id}/{len(call.overtime.requests)}"
    proposal = await inbox.propose(ask, by, key=key, outlives_asker=False)
    try:
        proposal = await inbox.wait_until(proposal, None)
    finally:
        if proposal.is_open:
            inbox.withdraw_unneeded(proposal.id, by)
    decision = proposal.decision
    if decision is None:
        return OvertimeDecision(failed=True, reason="the question was not answered in time")
    granted_ms = choices.get(decision.answer, 0) if isinstance(decision.answer, str) else 0
    by_name = proposal.decided_by
    return OvertimeDecision(granted_ms, f"{decision.notes} ({by_name})" if decision.notes else f"decided by {by_name}")


def _choices(summary: JsonObject, share_ms: int) -> dict[str, int]:
    """Return the possible answers: the requested time, one share, all that is left, or nothing."""
    most_ms = int(summary["most_ms"])
    amounts = sorted({min(most_ms, ms) for ms in (summary.get("asked_ms") or share_ms, share_ms, most_ms)})
    return {f"{format_duration(ms)} more": ms for ms in amounts if ms > 0} | {DECLINE: 0}


def _describe(summary: JsonObject) -> str:
    lines = [f"It has run for {format_duration(summary['elapsed_ms'])}."]
    if summary["remaining_ms"] is not None:
        lines[0] += f" It is stopped in {format_duration(summary['remaining_ms'])} at the latest."
    if summary.get("reason"):
        lines.append(f"It asks for more itself: {summary['reason'][:REASON_SHOWN]}")
    if summary["granted_ms"]:
        lines.append(f"It was given {format_duration(summary['granted_ms'])} before.")
    lines.append("Its output or its progress has grown." if summary["has_grown"] else "It has shown nothing new.")
    if summary["progress"]:
        last = summary["progress"][-1]
        of = "" if last["total"] is None else f" of {last['total']}"
        lines.append(f"Progress: {last['done']}{of} {last['message'] or ''}".strip())
    if summary["calls"]:
        lines.append("Inside it: " + ", ".join(str(inner["call"]) for inner in summary["calls"][:10]))
    for name in ("stdout", "stderr"):
        if summary[name].strip():
            lines.append(f"The end of its {name}:\n{summary[name][-OUTPUT_SHOWN:]}")
    return "\n\n".join(lines)
