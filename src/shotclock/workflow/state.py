"""The state of a run: the status of each step, what templates see of it, what the store keeps of the run, and what it
answers once its steps are over.

Whether a step failed is a typed status, never text. Secrets are left out of the workflow that is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.clocks import ClockKind, Fired, WallTime, format_duration
from ..core.envelope import Problem, Warning_
from ..core.errors import Ending, Failure, SideEffects, effects_of_all
from ..core.redaction import HIDDEN, Redaction, is_secret_header, looks_secret
from ..core.value_types import field, fields_of, record
from ..providers.provider import STEP_TYPES
from ..runtime.call import Call, Outcome, wound_down_problem
from .plan import keep_steps
from .schema import REFERENCE, WorkflowFile

if TYPE_CHECKING:
    from ..store.runs import Run
    from ..store.store import Store


class Status(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    PARKED = "parked"
    """Of a run alone: it waits for a person, and no process waits with it."""

    @property
    def is_final(self) -> bool:
        return self not in (Status.PENDING, Status.RUNNING, Status.PARKED)

    @property
    def is_bad(self) -> bool:
        return self in (Status.FAILED, Status.TIMED_OUT, Status.CANCELLED, Status.INTERRUPTED)


class Reason(StrEnum):
    """Why a step was skipped."""

    CONDITION = "condition"
    DEPENDENCY_FAILED = "dependency_failed"
    DEPENDENCY_SKIPPED = "dependency_skipped"
    ON_DEMAND = "on_demand"
    """Only named by `run`, and nothing called for it."""
    RUN_ENDED = "run_ended"


@record
class StepState:
    """The state of one step of a run."""

    id: str
    type: str
    status: Status = Status.PENDING
    reason: Reason | None = None
    cause: str | None = None
    """The step whose failure this goes back to."""
    started_ms: int | None = None
    """Since the run began."""
    duration_ms: int | None = None
    timeout_ms: int | None = None
    attempts: int = 0
    cut_off: int = 0
    """How many of its attempts were cut off with their process. They are none of the tries that the file allows."""
    loops: int = 0
    output: Any = None
    error: dict[str, Any] | None = None
    exit_code: int | None = None
    """The exit code of its command. None of any other step, and of one that is done for items."""
    ending: str | None = None
    side_effects: SideEffects | None = None
    """None of one that has not begun, or that nobody knows more of than its status."""
    warnings: list[Warning_] = field(default_factory=list)
    partial: bool = False
    """Its output is what there was when it was cut off, or told to come to an end."""
    details: dict[str, Any] = field(default_factory=dict)
    """What is known of how the output came about: of a model which one, and what it used."""
    continues: bool = False
    """Its failure does not stop those who wait for it."""
    visit: int = 0
    """How often it was begun anew."""
    calls: int = 0
    """How often it has called for others by `run`."""
    is_called: bool = False
    """A `run` of another step has called for it."""
    is_cut_short: bool = False
    """The run's own clock stopped it."""
    proposal_id: str | None = None
    """Of the approval that it began with, before the run was parked."""
    parts: list[dict[str, Any]] = field(default_factory=list)
    """The records of its items, where the run was parked while some of them waited."""
    has_begun: bool = False
    """It had begun when the run was parked or its process died, and begins again when the run goes on."""
    overtime: list[dict[str, Any]] = field(default_factory=list)
    """What was decided about its time while it ran: overtime that was asked for, and that it was wound down."""
    cut_off_ms: int = 0
    """What the try that was cut off with its process had used of its time, where the next one has only the rest."""
    try_began_ns: int = 0
    """When the try began that it is in. Known only while it runs."""
    used_ms: int = 0
    """What its last try took. Known only while it runs."""
    earlier_effects: SideEffects = SideEffects.NONE
    """What the tries before this one may have changed. Known only while it runs."""

    @property
    def has_passed(self) -> bool:
        return self.status is Status.SUCCEEDED or (self.continues and self.status.is_bad)

    @property
    def effects(self) -> SideEffects:
        """Return what the step may have changed, as far as is known."""
        if self.side_effects is not None:
            return self.side_effects
        is_untouched = self.status in (Status.PENDING, Status.SKIPPED) or (
            self.status is Status.FAILED and not self.attempts
        )
        return SideEffects.NONE if is_untouched else SideEffects.UNKNOWN

    def fresh(self) -> StepState:
        """Return the same step before it has run. How often it sent the run back is not forgotten."""
        return StepState(
            self.id,
            self.type,
            timeout_ms=self.timeout_ms,
            loops=self.loops,
            visit=self.visit,
            calls=self.calls,
            continues=self.continues,
            is_called=self.is_called,
        )

    def put_off(self) -> StepState:
        """Return the same step for when the run goes on: what was done of its items stays done."""
        later = self.fresh()
        later.proposal_id = self.proposal_id if STEP_TYPES[self.type].waits_when_approved else None
        later.parts = self.parts
        later.has_begun = True
        later.attempts, later.cut_off = self.attempts, self.cut_off
        return later

    def to_parked(self) -> StepState:
        """Return the same step where its last try only waited for a person: it will be made when the run goes on."""
        later = self.put_off()
        made = [part.get("attempts", 0) for part in self.parts] or [self.attempts - 1]
        later.attempts = max(0, sum(made))
        if later.attempts or self.type == "workflow":  # what was done of it before
            later.side_effects = SideEffects.UNKNOWN
        return later

    def after_cut_off(self, *, is_harmless: bool, only_waited: bool = False) -> StepState:
        """Return what becomes of a step whose process died while it ran: it is put off, to be run again, where that
        does no harm, and interrupted otherwise."""
        # A question is asked again under its key; a run inside this one knows by itself how far it was.
        can_repeat = STEP_TYPES[self.type].can_repeat
        if is_harmless or can_repeat or only_waited:
            later = self.put_off()
            if not can_repeat:
                later.proposal_id = None
            if not can_repeat and not only_waited:  # the try that it was in, which nobody lived to count
                later.attempts, later.cut_off = later.attempts + 1, later.cut_off + 1
            return later
        self.status = Status.INTERRUPTED
        self.attempts += 1  # the try that it was in, which nobody lived to count
        message = "its process died while it ran, and it is not marked as safe to run twice (`idempotent`)"
        self.error = {"code": "INTERRUPTED", "message": message, "retryable": False, "phase": "execution"}
        return self

    def key_in(self, run_id: str) -> str:
        """Return the key of one visit to the step: going back to it asks people again, going on with the run does
        not."""
        return f"{run_id}/{self.id}" + (f"#{self.visit}" if self.visit else "")

    def cancel(self) -> None:
        """Mark the step as cancelled, and keep the context of what was learned while it was stopped."""
        known = self.error or {}
        context = known.get("context") if known.get("code") == "CANCELLED" else None
        self.status = Status.CANCELLED
        self.error = {"code": "CANCELLED", "message": "the run was stopped", "retryable": False, "phase": "execution"}
        if context:
            self.error["context"] = context

    def to_answer(self) -> dict[str, Any]:
        """Return what the envelope shows of it."""
        values = zip(_SHOWN, _read_shown(self), strict=True)
        always = _ALWAYS_SHOWN if self.exit_code is None else {*_ALWAYS_SHOWN, "exit_code"}
        return {name: value for name, value in values if value or name in always}

    def to_record(self) -> dict[str, Any]:
        """Return what the store keeps of it: what differs from a fresh step, because every step is written twice."""
        values = zip(_FIELDS, _read_fields(self), strict=True)
        return {name: value for name, value in values if value or name in _ALWAYS_RECORDED}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> StepState:
        """Read a record of the store. Raises ValueError or KeyError where another version has written something that is
        not known here."""
        reason = record.get("reason")
        known = {name: value for name, value in record.items() if name in _FIELDS}
        known |= {"status": Status(record["status"]), "reason": None if reason is None else Reason(reason)}
        if known.get("side_effects") is not None:
            known["side_effects"] = SideEffects(known["side_effects"])
        return cls(**known)


_PASSING = ("try_began_ns", "used_ms", "earlier_effects")
_FIELDS = tuple(name for name in fields_of(StepState) if name not in _PASSING)
_KEPT_BACK = {"id", "continues", "visit", "calls", "is_called", "is_cut_short", "proposal_id", "parts", "cut_off"}
_KEPT_BACK |= {"has_begun", "cut_off_ms"}
_SHOWN = tuple(name for name in _FIELDS if name not in _KEPT_BACK)
_read_fields, _read_shown = attrgetter(*_FIELDS), attrgetter(*_SHOWN)
_ALWAYS_SHOWN = {"status", "duration_ms", "attempts", "output", "error"}
# Nothing, 0, false and empty are different things in these.
_ALWAYS_RECORDED = {"started_ms", "duration_ms", "timeout_ms", "output", "exit_code"}


def lists_of(states: Mapping[str, StepState]) -> dict[str, list[str]]:
    """Return the steps by what became of them, each in exactly one list. `pending` is only there where the run is not
    over."""
    lists: dict[str, list[str]] = {"completed": [], "failed": [], "skipped": [], "pending": []}
    for name, state in states.items():
        if state.status.is_bad:
            lists["failed"].append(name)
        else:
            lists[_LISTS.get(state.status, "pending")].append(name)
    if not lists["pending"]:
        del lists["pending"]
    return lists


_LISTS = {Status.SUCCEEDED: "completed", Status.SKIPPED: "skipped"}


def survivors_of(states: Iterable[StepState]) -> list[dict[str, object]]:
    """Return the processes that the steps could not stop."""
    notes: list[dict[str, Any]] = [note for state in states for note in state.warnings if note["code"] == "SURVIVORS"]
    return [process for note in notes for process in note["context"]["processes"]]


def effects_of(states: Iterable[StepState]) -> SideEffects:
    """Return the side effects of all these steps together."""
    states = list(states)
    is_well = all(state.status in (Status.SUCCEEDED, Status.SKIPPED) for state in states)
    return effects_of_all((state.effects for state in states), ended_well=is_well)


# --- what templates see -----------------------------------------------------------------------------------


class _View(Mapping[str, Any]):
    """A view of the states as they are at the moment of looking: a copy for each of a thousand steps would be a
    million."""

    def __init__(self, states: Mapping[str, StepState]) -> None:
        self._states = states

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class OutputsView(_View):
    """`outputs.build` in a template. Only what has succeeded has an output."""

    def __getitem__(self, name: str) -> Any:
        state = self._states[name]
        if state.status is not Status.SUCCEEDED:
            raise KeyError(name)
        return state.output


class StepsView(_View):
    """`steps.build.status` in a template. Here is also the output of one that failed: what it said until then."""

    def __getitem__(self, name: str) -> Any:
        state = self._states[name]
        shown = {"status": state.status.value, "error": state.error, "attempts": state.attempts}
        shown |= {"partial": state.partial, "exit_code": state.exit_code}
        return {**shown, "output": state.output}


# --- a workflow as it is written down ---------------------------------------------------------------------

# Beside a workflow that was written down without its secrets.
HIDES = "x-secrets-hidden"
# What of a step or a tool is free text. The other keys are names and numbers, which a report reads.
_TEXTS = {"exec", "stdin", "url", "body", "params", "command", "args", "arguments", "repository"}
_TEXTS |= {"prompt", "system_prompt", "base_url", "default", "inputs", "transform"}


def literal_secrets(written: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, the values that the file itself has for variables and headers that look secret."""
    found: dict[str, str] = {}
    for part in _parts(written):
        for key in ("env", "headers"):
            for name, value in (part.get(key) or {}).items():
                if _is_literal_secret(key, name, value):
                    found[f"{name}_SECRET"] = str(value)  # a header's name need not look like a variable's
    return found


def redaction_for(workflow: WorkflowFile, environment: Mapping[str, str]) -> Redaction:
    """Return what hides the secrets of the environment, and those that the file itself holds, from all that is kept or
    shown of a run."""
    return Redaction({**environment, **literal_secrets(workflow.model_dump(exclude_unset=True))})


def without_secrets(written: Mapping[str, Any], redaction: Redaction) -> dict[str, Any]:
    """Return the workflow as it may be kept: no literal secret in `env` and `headers`, no known one in its texts."""
    kept: dict[str, Any] = json.loads(json.dumps(written))
    for part in _parts(kept):
        for key, value in part.items():
            if key in ("env", "headers") and isinstance(value, dict):
                part[key] = {
                    name: HIDDEN if _is_literal_secret(key, name, each) else redaction.value(each)
                    for name, each in value.items()
                }
            elif key in _TEXTS and not _is_declaration(part, key):
                part[key] = redaction.value(value)
    return kept


def is_same(kept: Any, written: Any) -> bool:
    """Return whether this is what was kept without its secrets: it may differ where something was hidden, and only
    there."""
    if isinstance(kept, dict) and isinstance(written, dict):
        return kept.keys() == written.keys() and all(is_same(kept[key], written[key]) for key in kept)
    if isinstance(kept, list) and isinstance(written, list):
        return len(kept) == len(written) and all(map(is_same, kept, written))
    if isinstance(kept, str) and HIDDEN in kept:
        pattern = ".*".join(map(re.escape, kept.split(HIDDEN)))
        return re.fullmatch(pattern, str(written), re.DOTALL) is not None
    return bool(kept == written) and type(kept) is type(written)


def _parts(written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the file itself, its defaults, inputs, tools and steps: whatever may hold `env`, `headers` or text."""
    yield written  # type: ignore[misc]
    yield written.get("defaults") or {}
    for key in ("inputs", "tools", "steps"):
        for part in (written.get(key) or {}).values():
            yield part
            if isinstance(part.get("ai"), dict):
                yield part["ai"]
                yield from (part["ai"].get("mcp_servers") or {}).values()


def _is_declaration(part: Mapping[str, Any], key: str) -> bool:
    return key == "inputs" and "steps" in part


def _is_literal_secret(key: str, name: str, value: Any) -> bool:
    if not looks_secret(name) and not (key == "headers" and is_secret_header(name)):
        return False
    text = "" if value is None else str(value)
    return bool(text) and "{{" not in text and not REFERENCE.search(text)


def read_record(run: Run, store: Store) -> tuple[WorkflowFile, dict[str, StepState]]:
    """Return a run as it was written down. Raises Failure if another version did, in a way that is not known here."""
    try:
        states = {name: StepState.from_record(step.record) for name, step in store.runs.steps(run.id).items()}
        written = {key: value for key, value in run.workflow.items() if key != HIDES}
        return WorkflowFile.model_validate(written), states
    except (ValueError, KeyError, TypeError):
        message = f"run {run.id!r} was recorded by another version of shotclock, which cannot be continued here"
        raise Failure("STORE_UNUSABLE", message, suggestion="continue it with the version that began it") from None


def record_workflow(workflow: WorkflowFile, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the workflow as it is written down: without secrets, and saying so where there were some."""
    written = workflow.model_dump(exclude_unset=True)
    kept = without_secrets(written, redaction_for(workflow, environment))
    return kept if kept == written else {**kept, HIDES: True}


def restore_secrets(run: Run, kept: WorkflowFile) -> WorkflowFile:
    """Return the workflow with what was hidden, read again from its file. Raises Failure if that is gone or changed."""
    if HIDES not in run.workflow:
        return kept
    from .loader import load_file

    why = f"run {run.id!r} was recorded without the secrets in {run.file}"
    try:
        loaded = load_file(Path(run.file))
    except OSError as error:
        message = f"{why}, which cannot be read: {error.strerror}"
        raise Failure("FILE_NOT_FOUND", message, suggestion="put the file back, then resume the run") from None
    workflow = None if loaded.workflow is None else keep_steps(loaded.workflow, kept.steps)
    written = None if workflow is None else workflow.model_dump(exclude_unset=True)
    expected = {key: value for key, value in run.workflow.items() if key != HIDES}
    if workflow is None or not is_same(expected, written):
        hint = "put the file back as it was, or begin a new run"
        raise Failure("WORKFLOW_INVALID", f"{why}, which has changed since", suggestion=hint)
    return workflow


# --- the answer of a run: pure, and the same wherever its steps were carried out ------------------------------


def describe_steps(run_id: str, name: str, states: Mapping[str, StepState]) -> dict[str, object]:
    """Return what the envelope of a run shows of it and of its steps."""
    steps = {step_id: state.to_answer() for step_id, state in states.items()}
    return {"run_id": run_id, "name": name, "steps": steps, **lists_of(states)}


def park_outcome(
    run_id: str,
    name: str,
    states: Mapping[str, StepState],
    waiting: Sequence[Mapping[str, Any]],
    budget_ms: int,
    where: str = "",
) -> Outcome:
    """Return the outcome of a run that waits for people: what it has asked them, and how to go on with it. `where` are
    the words that name its engine."""
    data: dict[str, object] = {
        **describe_steps(run_id, name, states),
        "waiting": waiting,
        "status": "parked",
        "state": "paused",
        "job_id": run_id,
        "progress": count_steps([state.status for state in states.values()]),
        "continue_command": f"shotclock run --resume {run_id} {where}".rstrip(),
        "cancel_command": f"shotclock job cancel {run_id} {where}".rstrip(),
    }
    ids = ", ".join(str(each["proposal_id"]) for each in waiting)
    message = f"run {run_id} waits for a person ({ids}); continue it with data.continue_command"
    problem = Problem("INCOMPLETE", message, fired=Fired(ClockKind.BUDGET, "caller", budget_ms, budget_ms))
    return Outcome(Ending.DETACHED, problem, data, side_effects=effects_of(states.values()))


def count_steps(statuses: Collection[Status]) -> dict[str, object]:
    """Return how far a run is, as jobs say it."""
    return {"done": sum(status.is_final for status in statuses), "total": len(statuses), "unit": "steps"}


# What a job can be; how the run is stands beside it.
_JOB_STATUSES = {"succeeded": "complete", "cancelled": "cancelled", "running": "running", "parked": "running"}


def describe_as_job(
    run_id: str,
    name: str,
    status: Status,
    created_at: WallTime,
    ended_at: WallTime | None,
    where: str = "",
) -> dict[str, object]:
    """Describe a run as a job is described. `where` are the words that name its engine."""
    from ..dispatch.job_client import POLL_INTERVAL_MS

    goes_on = "job wait" if status is Status.RUNNING else "run --resume"
    shown: dict[str, object] = {
        "job_id": run_id,
        "run_id": run_id,
        "command": f"run {name}",
        "status": _JOB_STATUSES.get(status.value, "failed"),
        "run_status": status.value,
        "terminal": ended_at is not None,
        "status_command": f"shotclock job status {run_id} {where}".rstrip(),
        "continue_command": f"shotclock {goes_on} {run_id} {where}".rstrip(),
        "cancel_command": f"shotclock job cancel {run_id} {where}".rstrip(),
        "poll_interval_ms": POLL_INTERVAL_MS,
        "created_at": created_at.iso(),
    }
    if ended_at is not None:
        shown["ended_at"] = ended_at.iso()
    return shown


def judge_steps(
    call: Call,
    states: Mapping[str, StepState],
    data: dict[str, object],
    *,
    is_out_of_time: bool,
    find_fired: Callable[[], Fired],
) -> Outcome:
    """Return the outcome of a run that nobody stopped. Out of time it failed, whatever its steps tolerate."""
    bad = [name for name, state in states.items() if state.status.is_bad and not state.continues]
    was_cut = any(state.reason is Reason.RUN_ENDED for state in states.values())
    if call.winding_down is not None and (bad or was_cut):
        return Outcome(Ending.CANCELLED, wound_down_problem(call), {**data, "partial": True})
    if is_out_of_time or any(state.is_cut_short for state in states.values()):
        fired = find_fired()
        return Outcome(Ending.KILLED, Problem("TIMEOUT", explain_limit(call, fired), fired=fired), data)
    if not bad:
        return Outcome(Ending.FINISHED, data=data)
    names = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return Outcome(Ending.FINISHED, Problem("STEPS_FAILED", f"{len(bad)} of {len(states)} steps: {names}"), data)


def explain_limit(call: Call, fired: Fired) -> str:
    """Say which limit a run has reached."""
    owner = "its caller" if fired.owner == "caller" else fired.owner
    whose = "" if fired.owner == call.name else f" that {owner} left it"
    return f"the run did not end within {'the ' if whose else ''}{format_duration(fired.limit_ms)}{whose}{fired.kept}"
