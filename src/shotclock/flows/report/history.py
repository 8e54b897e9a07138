"""The history of a workflow file: how long its steps took in past runs, and the advice about timeouts that follows.

A duration counts if one attempt took it and ended by itself. An attempt that its own timeout stopped counts as at least
that long. Attempts that were stopped by anything else do not count, and neither does a step that waited for a person.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import Failure
from ...core.limits import NS_PER_MS, WORK_CLOCKS, WallTime, format_duration, reserve_ms_for
from ...core.value_types import field, value
from ...store.home import FILE_NAME, state_home
from ...supervise.clock import monotonic_ns
from ...terminal.output import brief
from ..check.lint import identity
from ..check.plan import (
    PlannedStep,
    plan_of,
    run_timeout_ms,
    step_clock_ms,
    step_timeout_ms,
    timeout_key,
    written_timeout,
)
from ..file.loader import Finding, Loaded
from ..file.schema import WorkflowFile
from ..run.state import Status
from ..steps.command import ToolStep
from ..steps.provider import STEP_TYPES, StepPart

if TYPE_CHECKING:
    from ...store.runs import PastRun, PastStep, Runs
    from ...store.store import Store

RUNS_READ = 200
READ_LIMIT_MS, LOOK_LIMIT_MS = 10_000, 250  # for `advise`, and in passing for `check` and the report
LEAST_RUNS, LEAST_RUNS_TO_LOWER = 5, 20
NEAR_SHARE, FAR_FACTOR = 0.8, 10  # a limit is near below maximum / 0.8, and far above 10 × maximum
RAISED_FACTOR, LOWERED_FACTOR, REACHED_FACTOR = 1.5, 3, 2  # of the maximum; the last of a limit that was reached
LEAST_LOWERED_MS = 5_000  # a busy machine delays any step by seconds
_BEHIND = {"timeout", "grace", "wind_down"}  # the other clocks end before the timeout
# A run of one process takes this much longer at most than its call.
RESUMED_AFTER_MS = 1_000
_ROUND_S = (1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 450, 600, 900, 1200, 1800, 2700)
_ROUND_H = (1, 1.5, 2, 3, 4, 6, 8, 12, 24, 36, 48, 72, 96, 168, 336, 720, 2160, 8760)
ROUND_MS = (100, 200, 300, 500, *(s * 1000 for s in _ROUND_S), *(int(h * 3_600_000) for h in _ROUND_H))


@value
class Figure:
    ms: int
    is_at_least: bool = False  # the true value may be greater, because a timeout stopped some attempts

    def __str__(self) -> str:
        return f"{'≥' if self.is_at_least else ''}{brief(self.ms)}"


@value
class Measured:
    """The durations of a step, or of a whole run, over past runs."""

    finished: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()  # the limits that stopped it
    failures: int = 0
    uncounted: int = 0  # a wait for a person, or stopped by something else

    @property
    def runs(self) -> int:
        return len(self.finished) + len(self.stopped)

    def percentile(self, share: float) -> Figure | None:
        """Return the smallest duration that this share of the runs did not exceed (nearest rank)."""
        # Of equal values, the certain one is first.
        values = sorted([*((ms, False) for ms in self.finished), *((ms, True) for ms in self.stopped)])
        if not values:
            return None
        rank = max(1, math.ceil(share * len(values)))
        return Figure(values[rank - 1][0], any(is_stopped for _, is_stopped in values[:rank]))

    def count_reached(self, limit_ms: int) -> int:
        """Return the number of runs that this limit would have stopped."""
        return sum(ms >= limit_ms for ms in (*self.finished, *self.stopped))

    def to_dict(self) -> dict[str, object]:
        made: dict[str, object] = {"runs": self.runs}
        for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1)):
            figure = self.percentile(share)
            made[f"{name}_ms"] = None if figure is None else figure.ms
            if figure is not None and figure.is_at_least:
                made[f"{name}_is_at_least"] = True
        return {**made, "timeouts": len(self.stopped), "failures": self.failures, "uncounted": self.uncounted}


@value
class Advice:
    """The advice about one timeout. `step` is None for that of the run."""

    step: str | None
    timeout_ms: int | None
    source: str  # file, defaults, tool, default or none
    measured: Measured
    verdict: str  # raise, lower, keep or unknown
    action: str
    why: str
    suggested_ms: int | None = None
    path: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        return f"{self.action}: {self.why}" if self.action else self.why

    def to_dict(self) -> dict[str, object]:
        return {
            "step": self.step,
            "timeout_ms": self.timeout_ms,
            "source": self.source,
            **self.measured.to_dict(),
            "verdict": self.verdict,
            "suggested_ms": self.suggested_ms,
            "advice": self.sentence,
        }


@value
class History:
    runs: tuple[PastRun, ...] = ()
    is_cut: bool = False  # there was no time to read more
    by_step: Mapping[str, Sequence[PastStep]] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Sequence[PastRun], *, is_cut: bool) -> History:
        by_step: dict[str, list[PastStep]] = {}
        for run in runs:
            for past in run.steps:
                by_step.setdefault(past.id, []).append(past)
        return cls(tuple(runs), is_cut, by_step)

    def of_step(self, step_id: str, step_type: str) -> Measured:
        waits = not STEP_TYPES[step_type].takes_slot  # for a person
        found = [past for past in self.by_step.get(step_id, ()) if past.type == step_type]
        return _measure(_judge_step(past) if not waits else (None, None) for past in found if past.attempts)

    def of_run(self) -> Measured:
        return _measure(map(_judge_run, self.runs))


_Judged = tuple[str | None, int | None]
_FINISHED, _STOPPED, _FAILED = "finished", "stopped", "failed"


def _measure(judged: Iterable[_Judged]) -> Measured:
    found = list(judged)
    return Measured(
        tuple(ms for kind, ms in found if kind == _FINISHED and ms is not None),
        tuple(ms for kind, ms in found if kind == _STOPPED and ms is not None),
        sum(kind == _FAILED for kind, _ in found),
        sum(kind is None for kind, _ in found),
    )


def _judge_step(past: PastStep) -> _Judged:
    if past.is_cut_short:
        return None, None
    if past.status == Status.TIMED_OUT:
        clock = past.clock or {}
        is_own = clock.get("kind") == "timeout" and clock.get("owner") == f"step {past.id}"
        return (_STOPPED, clock.get("limit_ms")) if is_own and clock.get("limit_ms") else (None, None)
    is_whole = not past.was_paused and not past.was_wound_down
    if is_whole and (reached := [ms for ms, outcome in past.tries if outcome == _STOPPED]):
        return _STOPPED, max(reached)
    if past.status == Status.FAILED:
        return _FAILED, None
    if past.status != Status.SUCCEEDED or not is_whole:
        return None, None
    if past.attempts == 1:
        return _FINISHED, past.duration_ms
    # Of several attempts or items the longest: the limit is that of each of them.
    longest = max((ms for ms, outcome in past.tries if outcome == _FINISHED), default=None)
    return (None, None) if longest is None else (_FINISHED, longest)


def _judge_run(run: PastRun) -> _Judged:
    elapsed_ms = run.ended_at.since_ms(run.created_at)
    was_resumed = run.took_ms is None or elapsed_ms - run.took_ms > RESUMED_AFTER_MS
    if was_resumed or any(step.was_paused for step in run.steps):
        return None, None
    if run.code == "TIMEOUT":
        return (None, None) if run.deadline_at is None else (_STOPPED, run.deadline_at.since_ms(run.created_at))
    if run.code == "STEPS_FAILED":
        return _FAILED, None
    return (None, None) if run.code is not None else (_FINISHED, elapsed_ms)


# --- reading -----------------------------------------------------------------------------------------------


def read_history(
    runs: Runs,
    name: str,
    file: str | Path,
    *,
    count: int = RUNS_READ,
    before: WallTime | None = None,
    within_ms: int = READ_LIMIT_MS,
) -> History:
    """Return the newest ended runs of a file of this workflow name, as many as can be read in the time.

    A file has the same history under each of its paths.
    """
    until_ns, own = monotonic_ns() + within_ms * NS_PER_MS, identity(file)
    is_late = False

    def may_go_on() -> bool:
        nonlocal is_late
        is_late = monotonic_ns() > until_ns
        return not is_late

    found: list[PastRun] = []
    for path in runs.list_files(name):
        if may_go_on() and identity(path) == own:
            found += runs.list_past(name, path, count, before, may_go_on)
    found.sort(key=lambda run: run.created_at.ms, reverse=True)
    return History.of(found[:count], is_cut=is_late)


def name_of(workflow: WorkflowFile, file: str | Path) -> str:
    return workflow.name or Path(file).stem


def find_near_limits(loaded: Loaded) -> list[Finding]:
    """Return a warning for each limit that past runs reached or nearly reached; none where there is no history."""
    if loaded.readable is None or not has_store():
        return []
    from ...store.runs import open_runs  # imports sqlite3, for which a file without history does not wait

    try:
        with open_runs(state_home(os.environ) / FILE_NAME) as runs:
            name = name_of(loaded.readable, loaded.source.name)
            history = read_history(runs, name, loaded.source.name, within_ms=LOOK_LIMIT_MS)
    except (Failure, OSError):
        return []
    return [
        Finding(
            "history/near-limit", each.why, each.path, loaded.source.place_of(each.path), each.action, is_error=False
        )
        for each in advise(loaded.readable, history)
        if each.verdict == "raise"
    ]


def has_store() -> bool:
    """Return whether there is a store. Opening one creates it."""
    try:
        return (state_home(os.environ) / FILE_NAME).is_file()
    except (Failure, OSError):
        return False


def read_p95(store: Store, name: str, file: str, before: WallTime, types: Mapping[str, str]) -> dict[str, int]:
    """Return the p95 of each step over the runs before then, where there are enough and it is certain."""
    try:
        history = read_history(store.runs, name, file, before=before, within_ms=LOOK_LIMIT_MS)
    except (Failure, OSError):
        return {}
    made = {}
    for step_id, step_type in types.items():
        if step_type in STEP_TYPES:
            measured = history.of_step(step_id, step_type)
            p95 = measured.percentile(0.95)
            if p95 is not None and not p95.is_at_least and measured.runs >= LEAST_RUNS:
                made[step_id] = p95.ms
    return made


# --- advice ------------------------------------------------------------------------------------------------


def advise(workflow: WorkflowFile, history: History) -> list[Advice]:
    """Return the advice about the timeout of the run, then about that of each step in the order of the file."""
    plan = plan_of(workflow)
    run_ms = run_timeout_ms(workflow)
    # The limits of the steps must still fit into a shorter run.
    fits_from_ms = None if plan.worst_ms is None else plan.worst_ms + plan.clean_up_ms + reserve_ms_for(plan.worst_ms)
    measured = history.of_run()
    source = "none" if run_ms is None else "file"
    judged = _judge(measured, run_ms, least_ms=fits_from_ms, most_ms=None, may_lower=True)
    found = [Advice(None, run_ms, source, measured, *judged, path=("timeout",))]
    planned = {step.id: step for step in plan.steps}
    for step_id, step in workflow.steps.items():
        found.append(_advise_step(workflow, step_id, step, planned[step_id], plan.run_timeout_ms, history))
    return found


def _advise_step(
    workflow: WorkflowFile, step_id: str, step: StepPart, planned: PlannedStep, run_ms: int | None, history: History
) -> Advice:
    limit_ms, source = step_timeout_ms(workflow, step) or None, _source_of(workflow, step)
    measured = history.of_step(step_id, step.type)
    most_ms = None
    if run_ms is not None:
        inside_ms = run_ms - reserve_ms_for(run_ms)
        overtime_ms = (planned.longest_ms or 0) - (planned.timeout_ms or 0)
        most_ms = (inside_ms - planned.delays_ms) // planned.attempts - overtime_ms
        if planned.effective_ms is not None and planned.timeout_ms and planned.effective_ms < planned.timeout_ms:
            most_ms = min(most_ms, planned.effective_ms)
    inner = [step_clock_ms(workflow, step, name) or 0 for name in WORK_CLOCKS if name not in _BEHIND]
    judged = _judge(measured, limit_ms, least_ms=2 * max(inner), most_ms=most_ms, may_lower=source == "file")
    section = "finally" if step_id in workflow.finally_ else "steps"
    path = (section, step_id, *(timeout_key(step).split(".") if source == "file" else ()))
    return Advice(step_id, limit_ms, source, measured, *judged, path=path)


def _source_of(workflow: WorkflowFile, step: StepPart) -> str:
    if written_timeout(step) is not None:
        return "file"
    if isinstance(step, ToolStep) and step.tool in workflow.tools and workflow.tools[step.tool].timeout is not None:
        return "tool"
    if workflow.defaults.timeout is not None and STEP_TYPES[step.type].default_ms is not None:
        return "defaults"
    return "default" if step_timeout_ms(workflow, step) else "none"


def _judge(
    measured: Measured, limit_ms: int | None, *, least_ms: int | None, most_ms: int | None, may_lower: bool
) -> tuple[str, str, str, int | None]:
    """Return the verdict, the action, its reason, and the suggested timeout.

    `least_ms` is the shortest timeout that leaves room for what it bounds, None if that is unknown; `most_ms` is the
    longest that the run has room for.
    """
    longest = measured.percentile(1)
    if longest is None or measured.runs < LEAST_RUNS:
        return "unknown", "", _explain_too_few(measured), None
    if limit_ms is None:
        return "keep", "", "it has no timeout", None
    took = f"the longest of {measured.runs} runs took {longest}"
    reached = measured.count_reached(limit_ms)
    if reached or longest.ms >= NEAR_SHARE * limit_ms:
        wanted = max(longest.ms * RAISED_FACTOR, limit_ms * REACHED_FACTOR if reached else 0)
        suggested = _round_up(wanted) if most_ms is None else min(_round_up(wanted), _round_down(most_ms, limit_ms))
        limit = format_duration(limit_ms)
        why = f"{reached} of {measured.runs} runs reached {limit}" if reached else f"{took}, of {limit}"
        if suggested > limit_ms:
            return "raise", f"raise it to {format_duration(suggested)}", why, suggested
        return "raise", "give the run more time, then raise it", why, None
    is_far = limit_ms > FAR_FACTOR * longest.ms and measured.runs >= LEAST_RUNS_TO_LOWER and not longest.is_at_least
    if is_far and may_lower and least_ms is not None:
        suggested = _round_up(max(longest.ms * LOWERED_FACTOR, LEAST_LOWERED_MS, least_ms))
        if suggested <= limit_ms // 2:
            return "lower", f"lower it to {format_duration(suggested)}", took, suggested
    return "keep", "keep it", took, None


def _explain_too_few(measured: Measured) -> str:
    if not measured.runs and not measured.uncounted and not measured.failures:
        return "no past runs"
    count = "1 run is" if measured.runs == 1 else f"{measured.runs or 'no'} runs are"
    few = f"{count} too few" if measured.runs else "no run can be counted"
    apart = [f"{measured.failures} failed"] if measured.failures else []
    if measured.uncounted:
        apart.append(f"{measured.uncounted} interrupted or continued")
    return few + (f" ({', '.join(apart)})" if apart else "")


def _round_up(ms: float) -> int:
    return next((each for each in ROUND_MS if each >= ms), math.ceil(ms))


def _round_down(ms: int, above_ms: int) -> int:
    """Return a round value above a limit, or else whole seconds."""
    rounded = max((each for each in ROUND_MS if each <= ms), default=0)
    return rounded if rounded > above_ms else ms // 1000 * 1000
