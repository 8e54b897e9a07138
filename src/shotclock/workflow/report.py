"""What became of a run, step by step, as one value: every rendering of a run is made from it.

Pure: whoever calls says what time it is and whether the run's process lives. A run that still runs, or was cut off, has
a report like any other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ..core.durations import format_duration
from ..core.graph import Groups, needs
from ..core.records import dataclass
from ..core.shapes import ValidationError
from ..core.walltime import WallTime
from ..store.runs import Run, StepRecord
from .plan import Plan, plan_of
from .schema import WorkflowFile
from .state import Reason, Status

# What a report shows of one step's output, in characters. The whole of it is in the envelope of the run.
OUTPUT_SHOWN = 20_000
# What it shows of a message. Longer ones are somebody's output.
MESSAGE_SHOWN = 2_000

MARKS = {
    Status.PENDING: "·",
    Status.RUNNING: "…",
    Status.SUCCEEDED: "✓",
    Status.FAILED: "✗",
    Status.TIMED_OUT: "◷",
    Status.SKIPPED: "–",
    Status.CANCELLED: "■",
    Status.INTERRUPTED: "!",
    Status.PARKED: "◌",
}
WORDS = {status: status.value.replace("_", " ") for status in Status}


@dataclass(frozen=True, slots=True)
class FiredClock:
    """The clock that stopped a step, and whose it was."""

    kind: str
    owner: str
    limit_ms: int
    elapsed_ms: int


@dataclass(frozen=True, slots=True)
class ReportedStep:
    id: str
    type: str
    status: Status
    why: str
    """A sentence, or nothing where there is nothing to explain."""
    depends_on: Groups
    at_ms: int | None
    """Where it belongs on the timeline: its start, or when it was decided that it has none."""
    started_ms: int | None
    duration_ms: int | None
    """So far, of one that still runs."""
    timeout_ms: int | None
    """Of one try; None is no limit of its own."""
    budget_ms: int | None
    """What all its tries could take, inside what the run had left when it began."""
    attempts: int
    is_per_item: bool
    loops: int
    continues: bool
    """Its failure does not fail the run."""
    reason: str | None
    cause: str | None
    clock: FiredClock | None
    error: dict[str, Any] | None
    ending: str | None
    warnings: tuple[dict[str, Any], ...]
    output: Any

    @property
    def ended_ms(self) -> int | None:
        return None if self.started_ms is None or self.duration_ms is None else self.started_ms + self.duration_ms

    @property
    def has_failed_the_run(self) -> bool:
        return self.status.is_bad and not self.continues

    def output_text(self, limit: int = OUTPUT_SHOWN) -> str:
        """As a person reads it, cut in the middle where it is long."""
        if self.output is None:
            return ""
        return shortened(as_read(self.output), limit)


@dataclass(frozen=True, slots=True)
class Report:
    run_id: str
    name: str
    file: str
    status: Status
    why: str
    started_at: WallTime | None
    """None of a run that never began."""
    ended_at: WallTime | None
    as_of: WallTime
    duration_ms: int
    budget_ms: int | None
    critical_path: tuple[str, ...]
    """The steps that the end of the run waited for, the first first."""
    steps: tuple[ReportedStep, ...] = ()
    """As they came, those that never did last."""
    error: dict[str, Any] | None = None
    outputs: Any = None
    warnings: tuple[dict[str, Any], ...] = ()
    """Of the run itself; its steps have their own."""

    @property
    def counts(self) -> dict[Status, int]:
        found = Counter(step.status for step in self.steps)
        return {status: found[status] for status in Status if found[status]}

    def to_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "name": self.name,
            "file": self.file,
            "status": self.status.value,
            "why": self.why,
            "started_at": None if self.started_at is None else self.started_at.iso(),
            "ended_at": None if self.ended_at is None else self.ended_at.iso(),
            "as_of": self.as_of.iso(),
            "duration_ms": self.duration_ms,
            "budget_ms": self.budget_ms,
            "counts": {status.value: count for status, count in self.counts.items()},
            "critical_path": list(self.critical_path),
            "error": self.error,
            "outputs": self.outputs,
            "warnings": list(self.warnings),
            "steps": [_step_dict(step) for step in self.steps],
        }


def _step_dict(step: ReportedStep) -> dict[str, Any]:
    made = asdict(step) | {"depends_on": ["|".join(group) for group in step.depends_on]}
    made["status"] = step.status.value
    made["warnings"] = list(step.warnings)
    shown = step.output_text()
    if len(shown) > OUTPUT_SHOWN:  # cut: then its text is what there is
        made |= {"output": shown, "output_truncated": True}
    return made


# --- from what is stored ----------------------------------------------------------------------------------


def report_of(run: Run, records: Mapping[str, StepRecord], *, now: WallTime, is_alive: bool) -> Report:
    """`is_alive` is whether the process that has the run is still there; of an ended run it says nothing."""
    is_alive = is_alive and run.parked_at is None  # then it is nobody's, wherever it was parked
    plan = _plan(run)
    planned = {} if plan is None else {step.id: step for step in plan.steps}
    names = dict.fromkeys([*_ids_of(run), *records])
    as_of = run.ended_at or now
    elapsed_ms = as_of.since_ms(run.created_at)
    budget_ms = None if run.deadline_at is None else run.deadline_at.since_ms(run.created_at)
    is_open = run.ended_at is None
    steps: dict[str, ReportedStep] = {}
    for name in names:
        known = records[name].record if name in records else {}
        plain = planned.get(name)
        step = _reported(name, known, () if plain is None else plain.groups)
        worst_ms = step.timeout_ms
        if plain is not None:
            worst_ms = plain.worst_ms if not plain.is_per_item else None
            step = replace(step, type=plain.type, is_per_item=plain.is_per_item)
        if step.status is Status.RUNNING and step.started_ms is not None:
            ran_ms = max(0, elapsed_ms - step.started_ms)
            # When a dead process stopped is not known, but no step of it outlived its clocks.
            limit_ms = worst_ms if not is_alive and worst_ms is not None else ran_ms
            step = replace(step, duration_ms=min(ran_ms, limit_ms))
        left_ms = None if budget_ms is None or step.started_ms is None else max(0, budget_ms - step.started_ms)
        if step.clock is not None and step.attempts == 1 and not _is_own(step):
            left_ms = step.clock.limit_ms  # said by the one whose clock it was
        limits = [limit for limit in (worst_ms, left_ms) if limit]
        steps[name] = replace(step, budget_ms=min(limits) if limits else None)
    cut_off = is_open and not is_alive
    placed = [
        replace(step, at_ms=_place(step, steps), why=_why(step, steps, cut_off=cut_off)) for step in steps.values()
    ]
    placed.sort(key=lambda step: (step.at_ms is None, step.at_ms or 0))
    if is_open and not is_alive:  # the last that is known of it
        elapsed_ms = max((step.ended_ms or 0 for step in placed), default=0)
    status = _run_status(run, is_alive)
    error = (run.envelope or {}).get("error")
    data = (run.envelope or {}).get("data")
    return Report(
        run.id,
        run.name,
        run.file,
        status,
        _run_why(run, status, error),
        run.created_at,
        run.ended_at,
        now,
        max(elapsed_ms, *(step.ended_ms or 0 for step in placed), 0),
        budget_ms,
        _critical_path(steps, _callers(run)),
        tuple(placed),
        error,
        data.get("outputs") if isinstance(data, dict) else None,
        tuple((run.envelope or {}).get("warnings") or ()),
    )


def unstarted(name: str, envelope: Mapping[str, Any], now: WallTime) -> Report:
    """Of a run that was refused: no steps, and why."""
    error = envelope.get("error")
    why = str(error["message"]) if error else ""
    return Report("", name, name, Status.FAILED, why, None, now, now, 0, None, (), error=error)


def _plan(run: Run) -> Plan | None:
    """None of a run that another version wrote down in a way this one does not read."""
    try:
        return plan_of(WorkflowFile.model_validate(run.workflow))
    except (ValidationError, ValueError, KeyError):
        return None


def _ids_of(run: Run) -> list[str]:
    """As they are written in the file."""
    written = run.workflow.get("steps") if isinstance(run.workflow, dict) else None
    return [str(name) for name in written] if isinstance(written, dict) else []


def _reported(name: str, known: Mapping[str, Any], groups: Groups) -> ReportedStep:
    error = known.get("error")
    context = error.get("context") if isinstance(error, dict) else None
    clock = context.get("clock") if isinstance(context, dict) else None
    return ReportedStep(
        id=name,
        type=str(known.get("type", "")),
        status=Status(known.get("status", Status.PENDING)),
        why="",
        depends_on=groups,
        at_ms=None,
        started_ms=known.get("started_ms"),
        duration_ms=known.get("duration_ms"),
        timeout_ms=known.get("timeout_ms") or None,
        budget_ms=None,
        attempts=known.get("attempts", 0),
        is_per_item=False,
        loops=known.get("loops", 0),
        continues=bool(known.get("continues")),
        reason=known.get("reason"),
        cause=known.get("cause"),
        clock=_clock(clock) if isinstance(clock, dict) else None,
        error=error,
        ending=known.get("ending"),
        warnings=tuple(known.get("warnings") or ()),
        output=known.get("output"),
    )


def _clock(said: Mapping[str, Any]) -> FiredClock:
    return FiredClock(
        str(said.get("kind", "timeout")),
        str(said.get("owner", "")),
        int(said.get("limit_ms") or 0),
        int(said.get("elapsed_ms") or 0),
    )


def _place(step: ReportedStep, steps: Mapping[str, ReportedStep]) -> int | None:
    """A step that was skipped stands where the one it goes back to ended."""
    if step.started_ms is not None:
        return step.started_ms
    cause = steps.get(step.cause or "")
    return None if step.status is not Status.SKIPPED or cause is None else cause.ended_ms


def _callers(run: Run) -> dict[str, set[str]]:
    """By step, those whose `on_fail` or `on_success` names it: it may have waited for them."""
    callers: dict[str, set[str]] = {}
    try:
        steps = WorkflowFile.model_validate(run.workflow).steps
    except (ValidationError, ValueError):
        return callers
    for name, step in steps.items():
        for reaction in (step.on_fail, step.on_success):
            for called in () if reaction is None else reaction.run:
                callers.setdefault(called, set()).add(name)
    return callers


def _critical_path(steps: Mapping[str, ReportedStep], callers: Mapping[str, set[str]]) -> tuple[str, ...]:
    ran = {name: step for name, step in steps.items() if step.ended_ms is not None and step.attempts}
    path: list[str] = []
    last = max(ran.values(), key=lambda step: step.ended_ms or 0, default=None)
    while last is not None and last.id not in path[-1:]:
        path.append(last.id)
        start_ms = last.started_ms or 0
        waited_for = {*needs(last.depends_on), *callers.get(last.id, ())} & ran.keys()
        before = [ran[name] for name in waited_for if (ran[name].ended_ms or 0) <= start_ms]
        last = max(before, key=lambda step: step.ended_ms or 0, default=None)
    return tuple(reversed(path))


# --- in words ---------------------------------------------------------------------------------------------


def _why(step: ReportedStep, steps: Mapping[str, ReportedStep], *, cut_off: bool) -> str:
    if step.clock is not None:
        return f"stopped by {clock_in_words(step)}"
    if step.error is not None:
        return shortened(why_failed(step.error), MESSAGE_SHOWN)
    cause = steps.get(step.cause or "")
    became = f"{step.cause} {WORDS[cause.status]}" if cause is not None else f"{step.cause} did not succeed"
    reasons = {
        Reason.CONDITION.value: "its condition did not hold",
        Reason.DEPENDENCY_FAILED.value: f"it needs {step.cause}: {became}",
        Reason.DEPENDENCY_SKIPPED.value: f"it needs {step.cause}: {became}",
        Reason.ON_DEMAND.value: "nothing called for it",
        Reason.RUN_ENDED.value: "the run ended before it could start",
    }
    if step.reason is not None:
        return reasons.get(step.reason, step.reason)
    if step.status is Status.RUNNING and cut_off:
        return "it ran when its process died"
    if step.status is Status.PENDING:
        waits = [
            group for group in step.depends_on if not any(name in steps and _has_passed(steps[name]) for name in group)
        ]
        return f"waits for {', '.join('|'.join(group) for group in waits)}" if waits else ""
    return shortened(noteworthy(step.warnings), MESSAGE_SHOWN)


def why_failed(error: Mapping[str, Any]) -> str:
    """Its message. That a command failed is no reason; the last line that it said mostly is one."""
    message = str(error.get("message", ""))
    last = stderr_of(error).strip().rpartition("\n")[2].strip()
    return f"{last} ({message})" if last and error.get("code") == "COMMAND_FAILED" else message


def noteworthy(warnings: Iterable[Mapping[str, Any]]) -> str:
    """What to say of a step that succeeded, if anything. That it had no more time than its run is no news."""
    return next((str(each.get("message", "")) for each in warnings if each.get("code") != "DEADLINE_INHERITED"), "")


def stderr_of(error: Mapping[str, Any] | None) -> str:
    context = (error or {}).get("context")
    return str(context.get("stderr") or "") if isinstance(context, Mapping) else ""


def _has_passed(step: ReportedStep) -> bool:
    return step.status is Status.SUCCEEDED or (step.continues and step.status.is_bad)


def clock_in_words(step: ReportedStep) -> str:
    """Whose clock it was: the step's own, the run's, or somebody's."""
    assert step.clock is not None
    limit = brief(step.clock.limit_ms)
    if _is_own(step):
        return f"its own {step.clock.kind} clock ({limit})"
    if step.clock.owner.startswith("run "):
        return f"the run's clock, which left it {limit}"
    return f"the {step.clock.kind} clock of {step.clock.owner or 'somebody else'} ({limit})"


def _is_own(step: ReportedStep) -> bool:
    return step.clock is not None and step.clock.owner in (f"step {step.id}", step.id)


def owner_in_words(step: ReportedStep) -> str:
    if step.clock is None or _is_own(step):
        return "its own clock"
    return "the run's clock" if step.clock.owner.startswith("run ") else f"the clock of {step.clock.owner}"


def brief(ms: int) -> str:
    """A duration with as many digits as one reads: 312ms, 4.48s, 12.3s, 5m12s."""
    if ms < 1000:
        return format_duration(ms)
    unit = 10 if ms < 10_000 else 100 if ms < 60_000 else 1000
    return format_duration(round(ms / unit) * unit)


def _run_status(run: Run, is_alive: bool) -> Status:
    if run.envelope is None and run.parked_at is not None:
        return Status.PARKED
    if run.envelope is None:
        return Status.RUNNING if is_alive else Status.INTERRUPTED
    if run.envelope.get("ok"):
        return Status.SUCCEEDED
    code = (run.envelope.get("error") or {}).get("code")
    return {
        "TIMEOUT": Status.TIMED_OUT,
        "NO_TIME_LEFT": Status.TIMED_OUT,
        "CANCELLED": Status.CANCELLED,
        "INCOMPLETE": Status.PENDING,
    }.get(str(code), Status.FAILED)


def _run_why(run: Run, status: Status, error: Mapping[str, Any] | None) -> str:
    if error is not None:
        return shortened(str(error.get("message", "")), MESSAGE_SHOWN)
    if status is Status.INTERRUPTED:
        return f"its process died; `shotclock run --resume {run.id}` goes on with it"
    if status is Status.PARKED:
        return f"it waits for a person (`shotclock inbox list`); `shotclock run --resume {run.id}` goes on with it"
    if status is Status.RUNNING:
        return f"under way in process {run.holder.pid}"
    return ""


def as_read(value: Any) -> str:
    """An output as a person reads it."""
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)


def shortened(text: str, limit: int) -> str:
    """The beginning and the end of it."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n… {len(text) - limit} characters left out …\n{text[-(limit - limit // 2) :]}"
