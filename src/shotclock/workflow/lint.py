"""What will go wrong with a workflow of the right shape, found before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ..core.deadlines import reserve_ms_for
from ..core.durations import format_duration
from ..core.graph import behind_all, find_cycle, needs
from .kinds import KINDS, duration_ms
from .loading import Finding, Loaded, Path_, Source
from .plan import Plan, PlannedStep, graph_of, plan_of, run_timeout_ms, written_timeout
from .schema import AnyStep, GitStep, HumanStep, Reaction, ToolStep, WorkflowFile

# A bare number of seconds from here on is hours; one of milliseconds up to here is gone before anything answers.
MANY_SECONDS = 3_600
FEW_MILLISECONDS = 100


def lint(loaded: Loaded, *, timeout_ms: int | None = None, unattended: bool = True) -> list[Finding]:
    """Errors first as they stand in the file, then warnings. `timeout_ms` is the caller's own limit on the run."""
    workflow = loaded.workflow
    if workflow is None:
        return list(loaded.findings)
    found = [*_graph(workflow), *_clocks(workflow), *_tools(workflow), *_people(workflow, unattended)]
    if not any(finding.rule == "graph/cycle" for finding in found):
        found += _budgets(workflow, plan_of(workflow, timeout_ms=timeout_ms))
    placed = [_placed(finding, loaded.source) for finding in found]
    return sorted(placed, key=lambda finding: (not finding.is_error, finding.place.line, finding.place.column))


def _placed(finding: Finding, source: Source) -> Finding:
    from dataclasses import replace

    return replace(finding, place=source.place_of(finding.path))


def _steps_key(path: tuple[str, ...]) -> Path_:
    return ("steps", *path)


# --- the graph --------------------------------------------------------------------------------------------


def _graph(workflow: WorkflowFile) -> Iterator[Finding]:
    graph = graph_of(workflow)
    for step_id, groups in graph.items():
        for name in sorted(needs(groups)):
            if name not in graph:
                yield _unknown(step_id, "depends_on", name, graph, "graph/missing-dependency")
        for key, reaction in _reactions(workflow.steps[step_id]):
            for name in [*reaction.run, *([reaction.goto] if reaction.goto else [])]:
                if name not in graph:
                    yield _unknown(step_id, key, name, graph, "graph/unknown-target")
    if (circle := find_cycle(graph)) is not None:
        message = f"steps wait for each other: {' → '.join(circle)}"
        yield Finding("graph/cycle", message, _steps_key((circle[0], "depends_on")))
        return
    never = {step_id for step_id, step in workflow.steps.items() if step.if_ is False or step.if_ == "false"}
    for step_id in sorted(behind_all(graph, never) - never):
        message = f"can never start: it waits for {', '.join(sorted(needs(graph[step_id]) & never)) or 'such a step'}"
        yield Finding("graph/unreachable", message, _steps_key((step_id,)), is_error=False)
    for step_id in sorted(never):
        message = "can never start: its condition is always false"
        yield Finding("graph/unreachable", message, _steps_key((step_id, "if")), is_error=False)


def _reactions(step: AnyStep) -> Iterator[tuple[str, Reaction]]:
    for key, reaction in (("on_fail", step.on_fail), ("on_success", step.on_success)):
        if reaction is not None:
            yield key, reaction


def _unknown(step_id: str, key: str, name: str, known: dict[str, object] | object, rule: str) -> Finding:
    names = list(known) if isinstance(known, dict) else []
    close = difflib.get_close_matches(name, names, n=1)
    suggestion = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
    return Finding(rule, f"there is no step {name!r}", _steps_key((step_id, key)), suggestion=suggestion)


# --- single clocks ----------------------------------------------------------------------------------------


def _clocks(workflow: WorkflowFile) -> Iterator[Finding]:
    for step_id, step in workflow.steps.items():
        kind, written = KINDS[step.type], written_timeout(step)
        key = "clone_timeout_ms" if isinstance(step, GitStep) and step.clone_timeout_ms is not None else "timeout"
        if isinstance(written, int | float):
            yield from _unit(step_id, key, written, kind.unit, step.type)
        timeout_ms = None if written is None else kind.timeout_ms(written)
        for name in ("soft", "idle"):
            limit = getattr(step, name)
            if limit is not None and timeout_ms and duration_ms(limit, kind.unit) >= timeout_ms:
                message = f"rings at {format_duration(duration_ms(limit, kind.unit))}, when the timeout already has"
                yield Finding("clock/never-rings", message, _steps_key((step_id, name)), is_error=False)


def _unit(step_id: str, key: str, written: float, unit: str, kind: str) -> Iterator[Finding]:
    path = _steps_key((step_id, key))
    if unit == "s" and written >= MANY_SECONDS and written % 100 == 0:
        meant = format_duration(int(written))
        message = f"{written:g} on a {kind} is seconds: {format_duration(int(written) * 1000)}"
        yield Finding("clock/unit", message, path, suggestion=f"did you mean {meant}?", is_error=False)
    elif unit == "ms" and 0 < written < FEW_MILLISECONDS:
        message = f"{written:g} on a {kind} is milliseconds"
        yield Finding("clock/unit", message, path, suggestion=f"did you mean {written:g}s?", is_error=False)


# --- budgets ----------------------------------------------------------------------------------------------


def _budgets(workflow: WorkflowFile, plan: Plan) -> Iterator[Finding]:
    run_ms = plan.run_timeout_ms
    if run_ms is None:
        return
    inside_ms = run_ms - reserve_ms_for(run_ms)
    whose = "the run" if run_timeout_ms(workflow) == run_ms else "the caller of the run"
    has = f"{whose} has {format_duration(run_ms)}"
    for step in plan.steps:
        yield from _step_budget(step, inside_ms, has)
    if plan.worst_ms is None or plan.worst_ms > inside_ms:
        worst = "no end in sight" if plan.worst_ms is None else format_duration(plan.worst_ms)
        message = f"the longest way ({' → '.join(plan.critical_path)}) may take {worst}; {has}"
        yield Finding("budget/critical-path", message, ("timeout",), is_error=False)


def _step_budget(step: PlannedStep, inside_ms: int, has: str) -> Iterator[Finding]:
    if not step.is_written and step.attempts == 1:
        return  # what merely holds for its kind is cut to what is left
    if step.is_written and step.timeout_ms and step.timeout_ms > inside_ms:
        message = f"a timeout of {format_duration(step.timeout_ms)} cannot be used up: {has}"
        hint = f"at most {format_duration(inside_ms)}, or give the run more"
        yield Finding("budget/longer-than-run", message, _steps_key((step.id, "timeout")), suggestion=hint)
    elif step.delays_ms > inside_ms:
        message = f"waiting {format_duration(step.delays_ms)} between its tries cannot fit: {has}"
        yield Finding("budget/waits", message, _steps_key((step.id, "on_fail")))
    elif step.attempts > 1 and step.worst_ms is not None and step.worst_ms > inside_ms:
        message = (
            f"{step.attempts} tries of {format_duration(step.timeout_ms or 0)} and the pauses between them take "
            f"{format_duration(step.worst_ms)}: {has}"
        )
        yield Finding("budget/retries", message, _steps_key((step.id, "on_fail")))


# --- the rest ---------------------------------------------------------------------------------------------


def _tools(workflow: WorkflowFile) -> Iterator[Finding]:
    for step_id, step in workflow.steps.items():
        if isinstance(step, ToolStep) and step.tool not in workflow.tools and "{{" not in step.tool:
            close = difflib.get_close_matches(step.tool, workflow.tools, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(workflow.tools) or 'none'}"
            message = f"there is no tool {step.tool!r} in `tools`"
            yield Finding("tool/unknown", message, _steps_key((step_id, "tool")), suggestion=hint)


def _people(workflow: WorkflowFile, unattended: bool) -> Iterator[Finding]:
    for step_id, step in workflow.steps.items():
        if isinstance(step, HumanStep) and not step.timeout and unattended:
            message = "waits for a person without an end, and nobody may be there"
            hint = "give it a `timeout` and a `default`, or run it at a terminal"
            yield Finding("human/unbounded", message, _steps_key((step_id,)), suggestion=hint, is_error=False)
