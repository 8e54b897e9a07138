"""The report of a run as one value, and its renderings as Markdown and JUnit XML.

The functions are pure: the caller gives the time and whether the run's process lives.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...core.limits import WallTime
from ...core.validation import ValidationError
from ...core.value_types import JsonObject, as_dict, field, fields_of, replace, value
from ...core.visible_text import one_line
from ...terminal.output import brief
from ..check.plan import Groups, PlannedStep, needs, plan_of
from ..file.schema import WorkflowFile, callers_of
from ..run.state import Status, without_mark
from .words import (
    MARKS,
    WORDS,
    FiredClock,
    artifacts_in_words,
    news_in_words,
    noteworthy,
    skipped_in_words,
    wait_in_words,
    why_failed,
)

if TYPE_CHECKING:
    from ...store.runs import StepRecord, StoredRun

NAMES_SHOWN = 40  # artifacts in Markdown
OUTPUT_SHOWN = 20_000  # characters of a step's output. All of it is in the envelope of the run
MESSAGE_SHOWN = 2_000


@value
class ReportedStep:
    id: str
    type: str
    status: Status
    depends_on: Groups
    is_per_item: bool
    timeout_ms: int | None  # of one attempt; None if it has no limit of its own
    clock: FiredClock | None
    why: str = ""  # an explanation, or nothing
    at_ms: int | None = None  # on the timeline: its start, or the end of the step that caused it to be skipped
    budget_ms: int | None = None  # for all its attempts, within the time that the run had left
    p95_ms: int | None = None  # of earlier runs, if there are enough
    # From the record of the step.
    started_ms: int | None = None
    duration_ms: int | None = None  # so far, of a running step
    attempts: int = 0
    loops: int = 0
    continues: bool = False  # the run continues after its failure
    is_finally: bool = False
    reason: str | None = None
    cause: str | None = None
    error: JsonObject | None = None
    ending: str | None = None
    warnings: list[JsonObject] = field(default_factory=list)
    output: Any = None
    kept_from: str | None = None  # the run in which it succeeded, if that is another
    kept_items: int = 0  # of earlier runs
    overtime: list[JsonObject] = field(default_factory=list)  # decisions about its time while it ran
    artifacts: list[JsonObject] = field(default_factory=list)
    waits_for: list[str] = field(default_factory=list)  # proposals that nobody has decided yet
    waited_ms: int = 0  # the part of `duration_ms` in which it waited for people
    printed: list[JsonObject] = field(default_factory=list)
    """The ends of both streams of each attempt: `step` (an item has its own name), `try`, `stdout` and `stderr`."""

    @property
    def ended_ms(self) -> int | None:
        return None if self.started_ms is None or self.duration_ms is None else self.started_ms + self.duration_ms

    @property
    def uncounted_ms(self) -> int:
        """Return how long it waited for people without using up its time. That of a question is for people."""
        return 0 if self.type == "human-input" else min(self.waited_ms, self.duration_ms or 0)

    @property
    def worked_ms(self) -> int | None:
        return None if self.duration_ms is None else self.duration_ms - self.uncounted_ms

    @property
    def mark(self) -> str:
        return MARKS[Status.PARKED if self.waits_for else self.status]

    @property
    def word(self) -> str:
        return "waits for a person" if self.waits_for else WORDS[self.status]

    @property
    def took(self) -> str:
        return "" if self.worked_ms is None else brief(self.worked_ms)

    @property
    def has_failed_the_run(self) -> bool:
        return self.status.is_bad and not self.continues

    def output_text(self, limit: int = OUTPUT_SHOWN) -> str:
        """Return the output, cut in the middle if it is long."""
        return "" if self.output is None else shorten(format_output(self.output), limit)


@value
class Report:
    run_id: str
    name: str
    file: str
    status: Status
    why: str
    started_at: WallTime | None  # None if the run never began
    ended_at: WallTime | None
    as_of: WallTime
    duration_ms: int
    budget_ms: int | None
    critical_path: tuple[str, ...]  # the chain of steps that the end of the run waited for
    steps: tuple[ReportedStep, ...] = ()  # in the order of their starts, then those that never started
    error: JsonObject | None = None
    outputs: Any = None
    warnings: tuple[JsonObject, ...] = ()  # without those of its steps
    concurrency: JsonObject | None = None  # its group, and how long it waited for that
    artifacts: JsonObject | None = None  # their folder, number and size, and whether they were deleted

    @property
    def group(self) -> str:
        """The group of the run in words, or nothing."""
        if self.concurrency is None:
            return ""
        group, waited_ms = str(self.concurrency["group"]), self.concurrency["waited_ms"]
        return f"{group}, waited {brief(waited_ms)}" if waited_ms else group

    rerun_of: str | None = None  # the run that it continues
    continue_command: str = ""  # of a run that failed

    @property
    def counts(self) -> dict[Status, int]:
        found = Counter(step.status for step in self.steps)
        return {status: found[status] for status in Status if found[status]}

    def to_dict(self) -> JsonObject:
        return as_dict(self) | {
            "status": self.status.value,
            "started_at": None if self.started_at is None else self.started_at.iso(),
            "ended_at": None if self.ended_at is None else self.ended_at.iso(),
            "as_of": self.as_of.iso(),
            "counts": {status.value: count for status, count in self.counts.items()},
            "critical_path": list(self.critical_path),
            "warnings": list(self.warnings),
            "steps": [_step_dict(step) for step in self.steps],
        }


def _step_dict(step: ReportedStep) -> JsonObject:
    made = as_dict(step) | {"depends_on": ["|".join(group) for group in step.depends_on]}
    made |= {"status": step.status.value, "uncounted_ms": step.uncounted_ms}
    made["clock"] = None if step.clock is None else as_dict(step.clock)
    shown = step.output_text()
    if len(shown) > OUTPUT_SHOWN:  # it was cut
        made |= {"output": shown, "output_truncated": True}
    return made


def report_of(
    run: StoredRun,
    records: Mapping[str, StepRecord],
    *,
    now: WallTime,
    is_alive: bool,
    find_p95: Callable[[Mapping[str, str]], Mapping[str, int]] = lambda types: {},
    where: str = "",
) -> Report:
    """`is_alive`: the process of an unfinished run still exists. `find_p95` returns the p95 of steps in earlier runs by
    the types of the steps."""
    is_alive = is_alive and run.parked_at is None  # a parked run has no process
    planned, callers = _plan(run)
    written = run.workflow.get("steps") if isinstance(run.workflow, dict) else None
    names = dict.fromkeys([*([str(name) for name in written] if isinstance(written, dict) else []), *records])
    as_of = run.ended_at or now
    elapsed_ms = as_of.since_ms(run.created_at)
    budget_ms = None if run.deadline_at is None else run.deadline_at.since_ms(run.created_at)
    steps: dict[str, ReportedStep] = {}
    for name in names:
        planned_step = planned.get(name)
        step = _make_step(name, records[name].record if name in records else {}, planned_step)
        worst_ms = _worst_ms(step, planned_step)
        if step.status is Status.RUNNING and step.started_ms is not None:
            ran_ms = max(0, elapsed_ms - step.started_ms)
            # The end of a dead process is not known, but no step outlived its clocks.
            limit_ms = worst_ms if not is_alive and worst_ms is not None else ran_ms
            step = replace(step, duration_ms=ran_ms if step.waits_for else min(ran_ms, limit_ms))
            if step.waits_for and step.attempts <= 1 and not step.is_per_item:
                step = replace(step, waited_ms=ran_ms)
        left_ms = None if budget_ms is None or step.started_ms is None else max(0, budget_ms - step.started_ms)
        if step.clock is not None and step.attempts == 1 and not step.clock.is_of(step.id):
            left_ms = step.clock.limit_ms  # the clock that fired has the exact value
        steps[name] = replace(step, budget_ms=min((limit for limit in (worst_ms, left_ms) if limit), default=None))
    cut_off = run.ended_at is None and not is_alive
    p95 = find_p95({step.id: step.type for step in steps.values()})
    placed = [
        replace(
            step,
            at_ms=_find_position(step, steps),
            why=_why(step, steps, where, cut_off=cut_off),
            p95_ms=p95.get(step.id),
        )
        for step in steps.values()
    ]
    placed.sort(key=lambda step: (step.at_ms is None, step.at_ms or 0))
    if cut_off:  # the last known moment
        elapsed_ms = max((step.ended_ms or 0 for step in placed), default=0)
    status = _run_status(run, is_alive)
    error = (run.envelope or {}).get("error")
    data = (run.envelope or {}).get("data")
    waits = _find_waits(placed) if status is Status.RUNNING else []
    return Report(
        run.id,
        run.name,
        run.file,
        status,
        wait_in_words(waits, where) if waits else _run_why(run, status, error),
        run.created_at,
        run.ended_at,
        now,
        max(elapsed_ms, *(step.ended_ms or 0 for step in placed), 0),
        budget_ms,
        _critical_path(steps, callers),
        tuple(placed),
        error,
        data.get("outputs") if isinstance(data, dict) else None,
        tuple((run.envelope or {}).get("warnings") or ()),
        concurrency=run.concurrency,
        rerun_of=run.rerun_of,
    )


def unstarted(name: str, envelope: Mapping[str, Any], now: WallTime) -> Report:
    error = envelope.get("error")
    why = str(error["message"]) if error else ""
    return Report("", name, name, Status.FAILED, why, None, now, now, 0, None, (), error=error)


def _plan(run: StoredRun) -> tuple[Mapping[str, PlannedStep], Mapping[str, Collection[str]]]:
    """Return the planned steps and the callers of each; none if another version stored an unreadable workflow."""
    try:
        workflow = WorkflowFile.model_validate(without_mark(run.workflow))
        return {step.id: step for step in plan_of(workflow).steps}, callers_of(workflow)
    except (ValidationError, ValueError, KeyError, AttributeError):
        return {}, {}


def _worst_ms(step: ReportedStep, planned: PlannedStep | None) -> int | None:
    if planned is None:
        return step.timeout_ms
    if planned.is_per_item:
        return planned.worst_ms and planned.rounds and planned.worst_ms * planned.rounds
    worst_ms = planned.worst_ms
    if step.overtime and worst_ms and step.timeout_ms and planned.longest_ms:  # it was extended
        worst_ms += max(0, step.timeout_ms - planned.longest_ms)
    return worst_ms


def _make_step(name: str, record: Mapping[str, Any], planned: PlannedStep | None) -> ReportedStep:
    error = record.get("error")
    context = error.get("context") if isinstance(error, dict) else None
    clock = context.get("clock") if isinstance(context, dict) else None
    recorded = {key: value for key, value in record.items() if key in fields_of(ReportedStep)}
    own = {
        "id": name,
        "type": str(record.get("type", "")) if planned is None else planned.type,
        "status": Status(record.get("status", Status.PENDING)),
        "depends_on": () if planned is None else planned.groups,
        "is_per_item": planned is not None and planned.is_per_item,
        "is_finally": planned is not None and planned.is_finally,
        "timeout_ms": record.get("timeout_ms") or None,
        "clock": _make_clock(clock) if isinstance(clock, dict) else None,
    }
    return ReportedStep(**(recorded | own))


def _make_clock(clock: Mapping[str, Any]) -> FiredClock:
    return FiredClock(
        str(clock.get("kind", "timeout")),
        str(clock.get("owner", "")),
        int(clock.get("limit_ms") or 0),
        int(clock.get("elapsed_ms") or 0),
    )


def _find_position(step: ReportedStep, steps: Mapping[str, ReportedStep]) -> int | None:
    """Return the start of a step, or the end of the step that caused it to be skipped."""
    if step.started_ms is not None:
        return step.started_ms
    cause = steps.get(step.cause or "")
    return None if step.status is not Status.SKIPPED or cause is None else cause.ended_ms


def _critical_path(steps: Mapping[str, ReportedStep], callers: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    ran = {name: step for name, step in steps.items() if step.ended_ms is not None and step.attempts}
    path: list[str] = []
    last = max(ran.values(), key=lambda step: step.ended_ms or 0, default=None)
    while last is not None and last.id not in path:
        path.append(last.id)
        start_ms = last.started_ms or 0
        waited_for = {*needs(last.depends_on), *callers.get(last.id, ())} & ran.keys()
        if last.is_finally and not waited_for:
            waited_for = {name for name, step in ran.items() if not step.is_finally}
        before = [ran[name] for name in waited_for if (ran[name].ended_ms or 0) <= start_ms]
        last = max(before, key=lambda step: step.ended_ms or 0, default=None)
    return tuple(reversed(path))


def _why(step: ReportedStep, steps: Mapping[str, ReportedStep], where: str, *, cut_off: bool) -> str:
    if step.clock is not None:
        return f"stopped by {step.clock.in_words(step.id)}"
    if step.error is not None:
        return shorten(why_failed(step.error), MESSAGE_SHOWN)
    cause = steps.get(step.cause or "")
    ended = WORDS[cause.status] if cause is not None else "did not succeed"
    if step.kept_from is not None:
        return f"kept from run {step.kept_from}"
    if step.reason is not None:
        return skipped_in_words(step.reason, step.cause, ended)
    if step.status is Status.RUNNING and cut_off:
        return "it ran when its process died"
    if step.waits_for:
        return wait_in_words(step.waits_for, where)
    if step.status is Status.PENDING and step.is_finally and not step.depends_on:
        return "waits for the end of all other steps"
    if step.status is Status.PENDING:
        waits = [
            group for group in step.depends_on if not any(name in steps and _has_passed(steps[name]) for name in group)
        ]
        return f"waits for {', '.join('|'.join(group) for group in waits)}" if waits else ""
    items = "item" if step.kept_items == 1 else "items"
    kept = f"{step.kept_items} {items} kept from an earlier run" if step.kept_items else ""
    waited = f"waited {brief(step.waited_ms)} for a person" if step.uncounted_ms else ""
    return shorten("; ".join(filter(None, (kept, waited, noteworthy(step.warnings)))), MESSAGE_SHOWN)


def _has_passed(step: ReportedStep) -> bool:
    return step.status is Status.SUCCEEDED or (step.continues and step.status.is_bad)


def _find_waits(steps: Iterable[ReportedStep]) -> list[str]:
    """Return the proposals without which no step of a run can continue."""
    running = [step for step in steps if step.status is Status.RUNNING]
    return [each for step in running for each in step.waits_for] if all(step.waits_for for step in running) else []


def _run_status(run: StoredRun, is_alive: bool) -> Status:
    if run.envelope is None and run.parked_at is not None:
        return Status.PARKED
    if run.envelope is None:
        return Status.RUNNING if is_alive else Status.INTERRUPTED
    return judge_code((run.envelope.get("error") or {}).get("code"))


def judge_code(code: object) -> Status:
    """Return the status of a run that ended with this error code, or None."""
    if code is None:
        return Status.SUCCEEDED
    return {
        "TIMEOUT": Status.TIMED_OUT,
        "NO_TIME_LEFT": Status.TIMED_OUT,
        "CANCELLED": Status.CANCELLED,
        "INCOMPLETE": Status.PENDING,
    }.get(str(code), Status.FAILED)


def _run_why(run: StoredRun, status: Status, error: Mapping[str, Any] | None) -> str:
    if error is not None:
        return shorten(str(error.get("message", "")), MESSAGE_SHOWN)
    if status is Status.INTERRUPTED:
        return f"its process died; `shotclock run --resume {run.id}` continues it"
    if status is Status.PARKED:
        return f"it waits for a person (`shotclock inbox list`); `shotclock run --resume {run.id}` continues it"
    if status is Status.RUNNING:
        return f"under way in process {run.holder.pid}" if run.holder.pid else "under way on its engine"
    return ""


def format_output(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)


def shorten(text: str, limit: int) -> str:
    """Return the beginning and the end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n… {len(text) - limit} characters left out …\n{text[-(limit - limit // 2) :]}"


_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")


def to_markdown(report: Report) -> str:
    took = brief(report.duration_ms)
    lines = [f"### {MARKS[report.status]} {_code(report.name)} {WORDS[report.status]} in {took}", ""]
    if report.why:
        lines += [_code(report.why), ""]
    if not report.steps:
        return "\n".join(lines)
    of = "" if report.budget_ms is None else f" of {brief(report.budget_ms)}"
    counts = ", ".join(f"{count} {WORDS[status]}" for status, count in report.counts.items())
    lines += [f"{took}{of} · {counts} · run {_code(report.run_id)}", ""]
    if report.group:
        lines += [f"group {_code(report.group)}", ""]
    has_p95 = any(step.p95_ms is not None for step in report.steps)  # a column of its own, only where there is history
    lines.append(f"| | step | status | took |{' p95 |' * has_p95} budget | attempts | |")
    lines.append(f"|---|---|---|---:|{'---:|' * has_p95}---:|---:|---|")
    for step in report.steps:
        cells = (
            step.mark,
            _code(step.id) + (" (finally)" if step.is_finally else ""),
            step.word + (", may fail" if step.continues and step.status.is_bad else ""),
            step.took,
            *(["" if step.p95_ms is None else brief(step.p95_ms)] if has_p95 else []),
            "" if step.budget_ms is None else brief(step.budget_ms),
            str(step.attempts) if step.attempts > 1 and not step.is_per_item else "",
            _code(step.why) if step.why else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    for step in report.steps:
        for news in step.overtime:
            lines += ["", f"◔ {_code(step.id)} +{brief(news['at_ms'])}: {_code(news_in_words(news))}"]
    if len(report.critical_path) > 1:
        lines += ["", f"Longest way: {' → '.join(map(_code, report.critical_path))}"]
    if report.artifacts is not None:
        lines += ["", f"{artifacts_in_words(report.artifacts)}: {_code(report.artifacts['folder'])}"]
        lines += [f"- {_code(each['file'])}, {each['bytes']} bytes" for each in list_artifacts(report)[:NAMES_SHOWN]]
    for notice in report.warnings:
        lines += ["", f"⚠ {_code(str(notice['code']))}: {_code(str(notice['message']))}"]
    if report.rerun_of:
        lines += ["", f"Continues run {_code(report.rerun_of)}"]
    if report.continue_command:
        lines += ["", f"Continue it: {_code(report.continue_command)}"]
    return "\n".join(lines) + "\n"


def list_artifacts(report: Report) -> list[JsonObject]:
    if report.artifacts is None or report.artifacts.get("is_deleted"):
        return []
    return [artifact for step in report.steps for artifact in step.artifacts]


def _code(text: str) -> str:
    """Return a text as code, so that nothing in it is markup, a mention, a link or a table border."""
    flat = one_line(text)
    if "|" in flat:  # a table splits at it even inside backticks, and a backslash may be the text's
        return f"<code>{_PUNCTUATION.sub(lambda found: f'&#{ord(found[0])};', flat)}</code>"
    fence = "`" * (1 + max((len(ticks) for ticks in re.findall("`+", flat)), default=0))
    pad = " " if flat.startswith("`") or flat.endswith("`") or not flat.strip() else ""
    return f"{fence}{pad}{flat}{pad}{fence}"
