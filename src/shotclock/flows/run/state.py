"""The state of a run: the status of each step, the views of templates, the stored workflow and the run's answer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calls.call import Call, Outcome, wound_down_problem
from ...calls.outcomes import outcome_of_error
from ...core.envelope import Problem, Warning_, stop_problem
from ...core.errors import Ending, Failure, SideEffects, effects_of_all
from ...core.limits import NS_PER_MS, ClockKind, Fired, WallTime, format_duration
from ...core.references import REFERENCE
from ...core.value_types import JsonObject, field, fields_of, record
from ...core.visible_text import HIDDEN, Redaction, is_secret_header, looks_secret
from ..check.plan import keep_outputs, keep_steps, step_timeout_ms
from ..file.schema import WorkflowFile
from ..steps.provider import STEP_TYPES

if TYPE_CHECKING:
    from ...store.runs import StoredRun
    from ...store.store import Store

StepError = JsonObject
TemplateScope = JsonObject


class Status(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    PARKED = "parked"  # only for runs: no process waits for the person

    @property
    def is_final(self) -> bool:
        return self not in (Status.PENDING, Status.RUNNING, Status.PARKED)

    @property
    def is_bad(self) -> bool:
        return self in (Status.FAILED, Status.TIMED_OUT, Status.CANCELLED, Status.INTERRUPTED)


class Reason(StrEnum):
    CONDITION = "condition"
    DEPENDENCY_FAILED = "dependency_failed"
    DEPENDENCY_SKIPPED = "dependency_skipped"
    ON_DEMAND = "on_demand"  # named only by `run`, and no step called it
    RUN_ENDED = "run_ended"
    NOT_CHOSEN = "not_chosen"  # left out by the caller


ATTEMPTS_RECORDED = 50


@record
class StepState:
    id: str
    type: str
    status: Status = Status.PENDING
    reason: Reason | None = None
    cause: str | None = None
    started_ms: int | None = None
    duration_ms: int | None = None
    timeout_ms: int | None = None
    attempts: int = 0
    attempts_cut_off: int = 0  # attempts whose process died, which `retry` does not count
    loops: int = 0
    output: Any = None
    error: StepError | None = None
    exit_code: int | None = None
    ending: str | None = None
    side_effects: SideEffects | None = None  # None before the step begins
    warnings: list[Warning_] = field(default_factory=list)
    partial: bool = False  # the output ends where the step was stopped or wound down
    details: JsonObject = field(default_factory=dict)  # for a model, its name and usage
    continues: bool = False  # dependents run although this step failed
    visit: int = 0
    calls: int = 0
    is_called: bool = False
    is_finally: bool = False
    is_cut_short: bool = False
    proposal_id: str | None = None  # the approval that the step began with before the run was parked
    parts: list[JsonObject] = field(default_factory=list)
    """The records of its items that are kept when it begins again, here or in another run."""
    kept_from: str | None = None  # the run in which it succeeded
    kept_items: int = 0  # the items that succeeded in an earlier run
    has_begun: bool = False  # it had begun when the run was parked or its process died, and begins again on resume
    overtime: list[JsonObject] = field(default_factory=list)
    cut_off_ms: int = 0  # used by the cut-off attempt, if the next one has only the rest
    artifacts: list[JsonObject] = field(default_factory=list)
    was_paused: bool = False
    """It waited for a person or began again on resume, so `duration_ms` is not the time of its work."""
    waits_for: list[str] = field(default_factory=list)  # the proposals that a running or parked step waits for
    waited_ms: int = 0  # the part of `duration_ms` in which it waited for people; of one with items, they have it
    ended_attempts: list[list[Any]] = field(default_factory=list)
    """The milliseconds and the outcome of each attempt: `finished`, `failed`, `other`, or `stopped` by its own limit,
    which these milliseconds are. Of many, also of items, the longest."""
    # Not recorded: known only while the step runs, or until the scheduler of a resumed run has reacted to its end.
    is_newly_interrupted: bool = False
    attempt_began_ns: int = 0
    wait_began_ns: int = 0
    items: list[StepState] = field(default_factory=list)
    label: str = ""  # of an item, for people
    used_ms: int = 0
    earlier_effects: SideEffects = SideEffects.NONE

    @property
    def has_passed(self) -> bool:
        return self.status is Status.SUCCEEDED or (self.continues and self.status.is_bad)

    @property
    def is_settled(self) -> bool:
        """Return whether the step ended before the run began: it is kept or left out."""
        return self.kept_from is not None or self.reason is Reason.NOT_CHOSEN

    @property
    def effects(self) -> SideEffects:
        if self.side_effects is not None:
            return self.side_effects
        is_untouched = self.status in (Status.PENDING, Status.SKIPPED) or (
            self.status is Status.FAILED and not self.attempts
        )
        return SideEffects.NONE if is_untouched else SideEffects.UNKNOWN

    def record_attempt(self, ms: int, verdict: Status, owner: str) -> None:
        """Add the time of an attempt that has ended. `owner` is that of its own limits."""
        context = (self.error or {}).get("context")
        clock = context.get("clock") if isinstance(context, dict) else None
        outcome = "finished" if verdict is Status.SUCCEEDED else "failed" if verdict is Status.FAILED else "other"
        if isinstance(clock, dict) and (clock.get("kind"), clock.get("owner")) == ("timeout", owner):
            ms, outcome = clock["limit_ms"], "stopped"
        self.ended_attempts = longest_attempts([*self.ended_attempts, [ms, outcome]])

    def fresh(self) -> StepState:
        """Return the step as it was before it ran, with its loop counters."""
        return StepState(
            self.id,
            self.type,
            timeout_ms=self.timeout_ms,
            loops=self.loops,
            visit=self.visit,
            calls=self.calls,
            continues=self.continues,
            is_called=self.is_called,
            is_finally=self.is_finally,
        )

    def begin_wait(self, proposal_id: str, now_ns: int) -> None:
        self.was_paused = True
        self.wait_began_ns = self.wait_began_ns if self.waits_for else now_ns
        self.waits_for = [*self.waits_for, proposal_id]

    def end_wait(self, proposal_id: str, now_ns: int, *, counts: bool = True) -> None:
        self.waits_for = [each for each in self.waits_for if each != proposal_id]
        if counts and not self.waits_for:
            self.waited_ms += (now_ns - self.wait_began_ns) // NS_PER_MS

    def put_off(self) -> StepState:
        later = self.fresh()
        later.proposal_id = self.proposal_id if STEP_TYPES[self.type].waits_when_approved else None
        later.parts = self.parts
        later.has_begun = later.was_paused = True
        later.attempts, later.attempts_cut_off = self.attempts, self.attempts_cut_off
        return later

    def to_parked(self) -> StepState:
        """Return the step without its last attempt, which only waited for a person and is made again on resume."""
        later = self.put_off()
        later.waits_for = self.waits_for
        made = [part.get("attempts", 0) for part in self.parts] or [self.attempts - 1]
        later.attempts = max(0, sum(made))
        if (
            later.attempts or self.type == "workflow"
        ):  # earlier attempts, or steps of the nested run, may have had effects
            later.side_effects = SideEffects.UNKNOWN
        return later

    def after_cut_off(self, *, is_harmless: bool, only_waited: bool = False) -> StepState:
        """Return the step after its process died: to be run again if harmless, otherwise interrupted."""
        # A question is asked again under its key; a nested run knows its own progress.
        can_repeat = STEP_TYPES[self.type].can_repeat
        if is_harmless or can_repeat or only_waited:
            later = self.put_off()
            if not can_repeat:
                later.proposal_id = None
            if not can_repeat and not only_waited:  # the attempt that was running was not counted
                later.attempts, later.attempts_cut_off = later.attempts + 1, later.attempts_cut_off + 1
            return later
        self.status, self.is_newly_interrupted, self.waits_for = Status.INTERRUPTED, True, []
        self.attempts += 1
        message = "its process died while it ran, and it is not marked as safe to run twice (`idempotent`)"
        self.error = {"code": "INTERRUPTED", "message": message, "retryable": False, "phase": "execution"}
        return self

    def key_in(self, run_id: str) -> str:
        """Return the key of one visit to the step. A new visit asks people again; resuming the run does not."""
        return f"{run_id}/{self.id}" + (f"#{self.visit}" if self.visit else "")

    def cancel(self) -> None:
        """Mark the step as cancelled; its error context stays."""
        error = self.error or {}
        context = error.get("context") if error.get("code") == "CANCELLED" else None
        self.status = Status.CANCELLED
        self.error = {"code": "CANCELLED", "message": "the run was stopped", "retryable": False, "phase": "execution"}
        if context:
            self.error["context"] = context

    def to_answer(self) -> JsonObject:
        values = zip(_SHOWN, _read_shown(self), strict=True)
        always = _ALWAYS_SHOWN if self.exit_code is None else {*_ALWAYS_SHOWN, "exit_code"}
        shown = {name: value for name, value in values if value or name in always}
        return {**shown, "finally": True} if self.is_finally else shown

    def to_record(self) -> JsonObject:
        """Return the record: only the fields that differ from a fresh step, to keep the store small."""
        values = zip(_KEYS, _read_fields(self), strict=True)
        return {name: value for name, value in values if value or name in _ALWAYS_RECORDED}

    def to_record_so_far(self) -> JsonObject:
        """Return the record without a running attempt: one whose process dies is counted when the run is resumed."""
        is_attempting = self.status is Status.RUNNING and self.attempt_began_ns > 0
        return {**self.to_record(), "attempts": self.attempts - 1} if is_attempting else self.to_record()

    @classmethod
    def from_record(cls, record: JsonObject) -> StepState:
        """Read a record. Raise ValueError or KeyError if another version wrote it."""
        reason = record.get("reason")
        names = dict(zip(_KEYS, _FIELDS, strict=True))
        fields = {names[key]: value for key, value in record.items() if key in names}
        fields |= {"status": Status(record["status"]), "reason": None if reason is None else Reason(reason)}
        if fields.get("side_effects") is not None:
            fields["side_effects"] = SideEffects(fields["side_effects"])
        return cls(**fields)


_UNRECORDED = (
    "is_newly_interrupted",
    "attempt_began_ns",
    "wait_began_ns",
    "items",
    "label",
    "used_ms",
    "earlier_effects",
)
_FIELDS = tuple(name for name in fields_of(StepState) if name not in _UNRECORDED)
# The keys of records, in stores and histories; two are older than the names of their fields.
_KEYS = tuple({"ended_attempts": "tries", "attempts_cut_off": "cut_off"}.get(name, name) for name in _FIELDS)
_UNSHOWN = {
    "id",
    "continues",
    "visit",
    "calls",
    "is_called",
    "is_cut_short",
    "proposal_id",
    "parts",
    "attempts_cut_off",
}
_UNSHOWN |= {"is_finally", "has_begun", "cut_off_ms", "was_paused", "ended_attempts"}
_SHOWN = tuple(name for name in _FIELDS if name not in _UNSHOWN)
_read_fields, _read_shown = attrgetter(*_FIELDS), attrgetter(*_SHOWN)
_ALWAYS_SHOWN = {"status", "duration_ms", "attempts", "output", "error"}
# In these fields None, 0, false and empty mean different things.
_ALWAYS_RECORDED = {"started_ms", "duration_ms", "timeout_ms", "output", "exit_code"}


def longest_attempts(attempts: list[list[Any]]) -> list[list[Any]]:
    if len(attempts) <= ATTEMPTS_RECORDED:
        return attempts
    return sorted(attempts, key=lambda each: (each[1] == "stopped", each[0]), reverse=True)[:ATTEMPTS_RECORDED]


def lists_of(states: Mapping[str, StepState]) -> dict[str, list[str]]:
    """Return the names of the steps by outcome, each in exactly one list."""
    lists: dict[str, list[str]] = {"completed": [], "failed": [], "skipped": [], "pending": []}
    names = {Status.SUCCEEDED: "completed", Status.SKIPPED: "skipped"}
    for name, state in states.items():
        lists["failed" if state.status.is_bad else names.get(state.status, "pending")].append(name)
    if not lists["pending"]:
        del lists["pending"]
    return lists


def survivors_of(states: Iterable[StepState]) -> list[dict[str, object]]:
    notes: list[JsonObject] = [note for state in states for note in state.warnings if note["code"] == "SURVIVORS"]
    return [process for note in notes for process in note["context"]["processes"]]


def effects_of(states: Iterable[StepState]) -> SideEffects:
    states = list(states)
    is_well = all(state.status in (Status.SUCCEEDED, Status.SKIPPED) for state in states)
    return effects_of_all((state.effects for state in states), ended_well=is_well)


class _View(Mapping[str, Any]):
    """A live view of the states. Copies for each of a thousand steps would be a million."""

    def __init__(self, states: Mapping[str, StepState]) -> None:
        self._states = states

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class OutputsView(_View):
    """`outputs.build` in a template: only of succeeded steps."""

    def __getitem__(self, name: str) -> Any:
        state = self._states[name]
        if state.status is not Status.SUCCEEDED:
            raise KeyError(name)
        return state.output


class StepsView(_View):
    """`steps.build.status` in a template, also with partial output."""

    def __getitem__(self, name: str) -> Any:
        state = self._states[name]
        return {
            "status": state.status.value,
            "error": state.error,
            "attempts": state.attempts,
            "partial": state.partial,
            "exit_code": state.exit_code,
            "output": state.output,
        }


# The key that marks a workflow stored without its secrets.
HIDES = "x-secrets-hidden"
# Keys that hold free text. Other keys hold names and numbers, which reports read.
_TEXTS = {"exec", "stdin", "url", "body", "params", "command", "args", "arguments", "repository"}
_TEXTS |= {"prompt", "system_prompt", "base_url", "default", "inputs", "transform"}


def redaction_for(workflow: WorkflowFile, environment: Mapping[str, str]) -> Redaction:
    written = workflow.model_dump(exclude_unset=True)
    values = (
        str(value)
        for part in _parts(written)
        for key in ("env", "headers")
        for name, value in (part.get(key) or {}).items()
        if _is_literal_secret(key, name, value)
    )
    redaction = Redaction(environment)
    # Two steps may have different secrets under one name, and the name of a header may not look secret.
    redaction.learn({f"{number}_SECRET": value for number, value in enumerate(values)})
    return redaction


def without_secrets(written: Mapping[str, Any], redaction: Redaction) -> JsonObject:
    kept: JsonObject = json.loads(json.dumps(written))
    for part in _parts(kept):
        for key, value in part.items():
            if key in ("env", "headers") and isinstance(value, dict):
                part[key] = {
                    name: HIDDEN if _is_literal_secret(key, name, each) else redaction.value(each)
                    for name, each in value.items()
                }
            elif key in _TEXTS and not (key == "inputs" and "steps" in part):  # the file's `inputs` are declarations
                part[key] = redaction.value(value)
    return kept


def is_same(kept: Any, written: Any) -> bool:
    """Return whether a value is the stored one. It may differ only where a secret was hidden."""
    if isinstance(kept, dict) and isinstance(written, dict):
        return kept.keys() == written.keys() and all(is_same(kept[key], written[key]) for key in kept)
    if isinstance(kept, list) and isinstance(written, list):
        return len(kept) == len(written) and all(map(is_same, kept, written))
    if isinstance(kept, str) and HIDDEN in kept:
        pattern = ".*".join(map(re.escape, kept.split(HIDDEN)))
        return re.fullmatch(pattern, str(written), re.DOTALL) is not None
    return bool(kept == written) and type(kept) is type(written)


def _parts(written: Mapping[str, Any]) -> Iterator[JsonObject]:
    yield written  # type: ignore[misc]
    yield written.get("defaults") or {}
    for key in ("inputs", "tools", "steps"):
        for part in (written.get(key) or {}).values():
            yield part
            if isinstance(part.get("ai"), dict):
                yield part["ai"]
                yield from (part["ai"].get("mcp_servers") or {}).values()


def _is_literal_secret(key: str, name: str, value: Any) -> bool:
    if not looks_secret(name) and not (key == "headers" and is_secret_header(name)):
        return False
    text = "" if value is None else str(value)
    return bool(text) and "{{" not in text and not REFERENCE.search(text)


def read_record(run: StoredRun, store: Store) -> tuple[WorkflowFile, dict[str, StepState]]:
    try:
        states = {name: StepState.from_record(step.record) for name, step in store.runs.steps(run.id).items()}
        return WorkflowFile.model_validate(without_mark(run.workflow)), states
    except (ValueError, KeyError, TypeError):
        message = f"run {run.id!r} was recorded by another version of shotclock, which cannot be continued here"
        raise Failure("STORE_UNUSABLE", message, suggestion="continue it with the version that began it") from None


def without_mark(stored: JsonObject) -> JsonObject:
    return {key: value for key, value in stored.items() if key != HIDES}


def record_workflow(workflow: WorkflowFile, environment: Mapping[str, str]) -> JsonObject:
    written = workflow.model_dump(exclude_unset=True)
    kept = without_secrets(written, redaction_for(workflow, environment))
    return kept if kept == written else {**kept, HIDES: True}


def restore_secrets(run: StoredRun, kept: WorkflowFile) -> WorkflowFile:
    """Return the workflow with its secrets, read again from its file."""
    if HIDES not in run.workflow:
        return kept
    from ..file.loader import load_file

    why = f"run {run.id!r} was recorded without the secrets in {run.file}"
    try:
        loaded = load_file(Path(run.file))
    except OSError as error:
        message = f"{why}, which cannot be read: {error.strerror}"
        raise Failure("FILE_NOT_FOUND", message, suggestion="put the file back, then resume the run") from None
    workflow = None if loaded.workflow is None else keep_steps(loaded.workflow, kept.steps)
    if workflow is not None:
        workflow = keep_outputs(workflow, kept.outputs)
    written = None if workflow is None else workflow.model_dump(exclude_unset=True)
    if workflow is None or not is_same(without_mark(run.workflow), written):
        hint = "put the file back as it was, or begin a new run"
        raise Failure("WORKFLOW_INVALID", f"{why}, which has changed since", suggestion=hint)
    return workflow


def unstarted_state(workflow: WorkflowFile, name: str) -> StepState:
    step = workflow.steps[name]
    continues = step.continue_on_failure or workflow.defaults.continue_on_failure
    timeout_ms, is_finally = step_timeout_ms(workflow, step), name in workflow.finally_
    return StepState(name, step.type, timeout_ms=timeout_ms, continues=continues, is_finally=is_finally)


# In place of the name of a signal.
CANCEL = "cancel"
# Reasons with which a step is skipped again by a run that continues the ended one.
_STAYS_SKIPPED = frozenset({Reason.CONDITION, Reason.DEPENDENCY_SKIPPED, Reason.ON_DEMAND, Reason.NOT_CHOSEN})


def describe_steps(run_id: str, name: str, states: Mapping[str, StepState]) -> dict[str, object]:
    steps = {step_id: state.to_answer() for step_id, state in states.items()}
    return {"run_id": run_id, "name": name, "steps": steps, **lists_of(states)}


def find_rerun_command(run_id: str, statuses: Iterable[tuple[Status, str | None]]) -> str:
    """Return the command that continues an ended run, empty if it would find nothing to run again.

    `statuses` has the status and the reason of each step.
    """
    again = (status is not Status.SUCCEEDED and reason not in _STAYS_SKIPPED for status, reason in statuses)
    return f"shotclock run --rerun-failed {run_id}" if any(again) else ""


def commands_for(run_id: str, where: str = "") -> dict[str, object]:
    return {
        "continue_command": f"shotclock run --resume {run_id} {where}".rstrip(),
        "cancel_command": f"shotclock job cancel {run_id} {where}".rstrip(),
    }


def park_outcome(
    run_id: str,
    name: str,
    states: Mapping[str, StepState],
    waiting: Sequence[Mapping[str, Any]],
    budget_ms: int,
    where: str = "",
    until: WallTime | None = None,
) -> Outcome:
    """Return the outcome of a run that waits for people. `until` is its deadline, after which it cannot continue."""
    data: dict[str, object] = {
        **describe_steps(run_id, name, states),
        "waiting": waiting,
        "status": "parked",
        "state": "paused",
        "job_id": run_id,
        "progress": count_steps([state.status for state in states.values()]),
        **commands_for(run_id, where),
    }
    if until is not None:
        data["continue_until"] = until.iso()
    ids = ", ".join(str(each["proposal_id"]) for each in waiting)
    message = f"run {run_id} waits for a person ({ids})" + (f"; it can continue until {until}" if until else "")
    verbs = " or ".join(f"`{f'shotclock inbox {verb} ID {where}'.rstrip()}`" for verb in ("approve", "reject"))
    hint = f"decide with {verbs}, then run data.continue_command"
    problem = Problem(
        "INCOMPLETE", message, suggestion=hint, fired=Fired(ClockKind.BUDGET, "caller", budget_ms, budget_ms)
    )
    return Outcome(Ending.DETACHED, problem, data, side_effects=effects_of(states.values()))


def count_steps(statuses: Collection[Status]) -> dict[str, object]:
    return {"done": sum(status.is_final for status in statuses), "total": len(statuses), "unit": "steps"}


def judge_run(
    call: Call,
    states: Mapping[str, StepState],
    data: dict[str, object],
    ended_by: str | Exception | None,
    fired: Fired,
    *,
    is_out_of_time: bool,
) -> Outcome:
    """Return the outcome of a run. `ended_by` is the signal, `CANCEL` or the error that ended it early.

    `fired` is its limit, which has stopped it only if it is out of time.
    """
    bad = [name for name, state in states.items() if state.status.is_bad and not state.continues]
    was_cut = any(state.reason is Reason.RUN_ENDED for state in states.values())
    partial = {**data, "partial": True}
    if ended_by == CANCEL:
        outcome = Outcome(Ending.CANCELLED, Problem("CANCELLED", "the run was cancelled", exit_code=143), partial)
    elif ended_by is not None:
        problem = stop_problem(ended_by) if isinstance(ended_by, str) else outcome_of_error(ended_by).problem
        outcome = Outcome(Ending.KILLED, problem, partial)
    elif call.winding_down is not None and (bad or was_cut):
        outcome = Outcome(Ending.CANCELLED, wound_down_problem(call), partial)
    elif _is_out_of_time(states, is_out_of_time=is_out_of_time):
        outcome = Outcome(Ending.KILLED, Problem("TIMEOUT", explain_limit(call, fired), fired=fired), data)
    elif bad:
        names = bad + [name for name, state in states.items() if state.status.is_bad and state.continues]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        kinds = Counter(states[name].status.value.replace("_", " ") for name in names)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        failed = f"{counts}, of {len(states)} steps" if len(kinds) > 1 or not kinds["failed"] else ""
        problem = Problem("STEPS_FAILED", f"{failed or f'{len(names)} of {len(states)} steps failed'}: {shown}")
        outcome = Outcome(Ending.FINISHED, problem, data)
    elif was_cut:  # its process died after it was stopped, and only its `finally` steps were left to run
        unrun = [name for name, state in states.items() if state.reason is Reason.RUN_ENDED]
        message = f"the run was stopped before {len(unrun)} of {len(states)} steps ran: {', '.join(unrun[:5])}"
        outcome = Outcome(Ending.KILLED, Problem("INTERRUPTED", message), partial)
    else:
        outcome = Outcome(Ending.FINISHED, data=data)
    outcome.side_effects = effects_of(states.values())
    outcome.survivors = survivors_of(states.values())
    return outcome


def _is_out_of_time(states: Mapping[str, StepState], *, is_out_of_time: bool) -> bool:
    """Return whether the run's time is the cause of its end. A late `finally` step does not hide a failed step."""
    before = [state for state in states.values() if not state.is_finally]
    if any(state.is_cut_short for state in before):
        return True
    if any(state.is_cut_short for state in states.values()):
        return not any(state.status.is_bad and not state.continues for state in before)
    return is_out_of_time


def explain_limit(call: Call, fired: Fired) -> str:
    owner = "its caller" if fired.owner == "caller" else fired.owner
    whose = "" if fired.owner == call.name else f" that {owner} left it"
    return f"the run did not end within {'the ' if whose else ''}{format_duration(fired.limit_ms)}{whose}{fired.kept}"
