"""`shotclock check`, `plan` and `schema`: a workflow file looked at before anything runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..core.effects import Ending
from ..core.envelope import Problem
from ..runtime.call import Outcome
from ..workflow.lint import find_unset, lint
from ..workflow.loader import Finding, Loaded, load_file
from ..workflow.plan import Plan, PlannedStep, plan_of
from ..workflow.schema import json_schema
from ..workflow.state import StepState

OnChange = Callable[[StepState], None]


def check(flow: str, timeout_ms: int | None = None) -> Outcome:
    loaded = load(flow)
    if isinstance(loaded, Outcome):
        return loaded
    findings = lint(loaded, timeout_ms=timeout_ms) + find_unset(loaded, os.environ)
    return judge(loaded, findings, {"findings": [_describe_finding(loaded, finding) for finding in findings]})


def plan(flow: str, timeout_ms: int | None = None) -> Outcome:
    loaded = load(flow)
    if isinstance(loaded, Outcome):
        return loaded
    findings = lint(loaded, timeout_ms=timeout_ms)
    data: dict[str, object] = {"findings": [_describe_finding(loaded, finding) for finding in findings]}
    broken = any(finding.rule in ("graph/cycle", "graph/missing-dependency") for finding in findings)
    if loaded.workflow is not None and not broken:
        data |= _describe_plan(plan_of(loaded.workflow, timeout_ms=timeout_ms))
    return judge(loaded, findings, data)


def schema() -> Outcome:
    return Outcome(Ending.FINISHED, data=json_schema())


def load(flow: str) -> Loaded | Outcome:
    try:
        return load_file(Path(flow))
    except FileNotFoundError:
        problem = Problem("FILE_NOT_FOUND", f"there is no file {flow!r}", "validation")
    except OSError as error:
        hint = None if isinstance(error, PermissionError) else "name a file that holds a workflow"
        said = f"{flow!r} cannot be read: {error.strerror}"
        problem = Problem("FILE_UNREADABLE", said, "validation", suggestion=hint)
    except ValueError as error:  # a NUL in its name
        problem = Problem("FILE_NOT_FOUND", f"{flow!r} is no name of a file: {error}", "validation")
    return Outcome(Ending.NOT_STARTED, problem)


def judge(
    loaded: Loaded, findings: list[Finding], data: dict[str, object] | None = None, *, may_be_tight: bool = False
) -> Outcome:
    """Return the outcome for what was found. With `may_be_tight`, clocks that cannot fit are no reason to refuse it."""
    wrong = [finding for finding in findings if finding.is_error]
    if may_be_tight:
        wrong = [finding for finding in wrong if not finding.rule.startswith("budget/")]
    if data is None:
        data = {"findings": [_describe_finding(loaded, finding) for finding in findings]}
    data = {"file": loaded.source.name, **data}
    if not wrong:
        return Outcome(Ending.FINISHED, data=data)
    errors = [{"field": finding.field, "message": loaded.format_finding(finding)} for finding in wrong]
    count = "1 problem" if len(wrong) == 1 else f"{len(wrong)} problems"
    problem = Problem("WORKFLOW_INVALID", f"{loaded.source.name}: {count}, nothing ran", "validation", errors=errors)
    return Outcome(Ending.FINISHED, problem, data)


def _describe_finding(loaded: Loaded, finding: Finding) -> dict[str, object]:
    shown: dict[str, object] = {
        "rule": finding.rule,
        "severity": "error" if finding.is_error else "warning",
        "file": finding.file or loaded.source.name,
        "line": finding.place.line,
        "column": finding.place.column,
        "field": finding.field,
        "message": finding.message,
    }
    if finding.suggestion:
        shown["suggestion"] = finding.suggestion
    return shown


def _describe_plan(made: Plan) -> dict[str, object]:
    return {
        "run_timeout_ms": made.run_timeout_ms,
        "worst_case_ms": made.worst_ms,
        "clean_up_ms": made.clean_up_ms,
        "critical_path": list(made.critical_path),
        "steps": [_describe_step(step) for step in made.steps],
    }


def _describe_step(step: PlannedStep) -> dict[str, object]:
    return {
        "id": step.id,
        "type": step.type,
        "depends_on": ["|".join(group) for group in step.groups],
        "timeout_ms": step.timeout_ms,
        "effective_timeout_ms": step.effective_ms,
        "grace_ms": step.grace_ms,
        "attempts": step.attempts,
        "retry_delays_ms": step.delays_ms,
        "latest_start_ms": step.starts_ms,
        "latest_end_ms": step.ends_ms,
        "per_item": step.is_per_item,
    }
