"""`shotclock check`, `plan` and `schema`: examine a workflow file. Nothing runs."""

from __future__ import annotations

import os
from pathlib import Path

from ...calls.call import Outcome
from ...core.errors import Ending
from ...core.limits import parse_duration_ms
from ...core.value_types import replace
from ...terminal.parser import Option, Subcommand
from ...terminal.subcommand import ChildWork
from ..check.lint import find_unset, lint
from ..check.plan import Plan, PlannedStep, plan_of
from ..file.loader import Finding, Loaded, judge, load_or_refuse
from ..file.schema import WorkflowFile, json_schema
from ..report.history import find_near_limits
from ._check_drawing import draw_findings, draw_plan, draw_schema


def read_run_duration(text: str) -> int:
    """Read the timeout of a run. 1000 or more without a unit is milliseconds; a smaller number needs its unit."""
    is_plain = text.strip().isascii() and text.strip().isdecimal() and len(text.strip()) > 3
    return parse_duration_ms(text, bare="ms" if is_plain else None)


def _lint_elsewhere(loaded: Loaded, run_timeout_ms: int | None) -> list[Finding]:
    """Check a file that may run elsewhere: a missing key is a warning."""
    found = lint(loaded, timeout_ms=run_timeout_ms)
    judged = [replace(each, is_error=False) if each.rule == "ai/key" else each for each in found]
    return sorted(judged, key=lambda each: not each.is_error)


def point_to_import(flow: str, outcome: Outcome) -> Outcome:
    """Add the command that imports the file to the refusal of a file of Visor."""
    found = outcome.data["findings"] if isinstance(outcome.data, dict) else []
    wrong = [each["rule"] for each in found if each["severity"] == "error"] if isinstance(found, list) else []
    if outcome.problem is None or set(wrong) == {"ai/key"}:  # only a key is missing
        return outcome
    # The converter is large, and only needed for a file that is refused.
    from ..visor.importing import is_of_visor

    if not is_of_visor(Path(flow)):
        return outcome
    hint = f"this looks like a file of Visor: convert it with `shotclock import {flow}`"
    return replace(outcome, problem=replace(outcome.problem, suggestion=hint))


def _check(flow: str, run_timeout_ms: int | None) -> Outcome:
    loaded = load_or_refuse(flow)
    if isinstance(loaded, Outcome):
        return loaded
    findings = _lint_elsewhere(loaded, run_timeout_ms) + find_unset(loaded, os.environ)
    findings += find_near_limits(loaded)
    return point_to_import(flow, judge(loaded, findings, _describe_group(loaded.workflow)))


def _plan(flow: str, run_timeout_ms: int | None) -> Outcome:
    loaded = load_or_refuse(flow)
    if isinstance(loaded, Outcome):
        return loaded
    findings = _lint_elsewhere(loaded, run_timeout_ms)
    data: dict[str, object] = {}
    broken = any(finding.rule in ("graph/cycle", "graph/missing-dependency") for finding in findings)
    if loaded.workflow is not None and not broken:
        data |= _describe_plan(plan_of(loaded.workflow, timeout_ms=run_timeout_ms))
        data |= _describe_group(loaded.workflow)
        data["repositories"] = _find_repositories(loaded.workflow, loaded.source.folder)
    return point_to_import(flow, judge(loaded, findings, data))


def _describe_group(workflow: WorkflowFile | None) -> dict[str, object]:
    if workflow is None or workflow.concurrency is None:
        return {}
    return {"concurrency": {"group": workflow.concurrency.group, "on_conflict": workflow.concurrency.on_conflict}}


def _find_repositories(workflow: WorkflowFile, folder: Path) -> dict[str, str | None]:
    checkouts = [(name, step) for name, step in workflow.steps.items() if step.type == "git-checkout"]
    unnamed = [name for name, step in checkouts if getattr(step, "repository", None) is None]
    if not unnamed:
        return {}
    from ..steps.git import find_repository

    return dict.fromkeys(unnamed, find_repository(os.environ, folder))


def _describe_plan(made: Plan) -> dict[str, object]:
    return {
        "run_timeout_ms": made.run_timeout_ms,
        "worst_case_ms": made.worst_ms,
        "people_ms": made.people_ms,
        "clean_up_ms": made.clean_up_ms,
        "finally_ms": made.finally_ms,
        "finally_path": list(made.finally_path),
        "critical_path": list(made.critical_path),
        "steps": [_describe_step(step) for step in made.steps],
    }


def _describe_step(step: PlannedStep) -> dict[str, object]:
    return {
        "id": step.id,
        "type": step.type,
        "finally": step.is_finally,
        "depends_on": ["|".join(group) for group in step.groups],
        "any_end_of": sorted(step.any_end),
        "timeout_ms": step.timeout_ms,
        "effective_timeout_ms": step.effective_ms,
        "soft_ms": step.soft_ms,
        "wind_down_ms": step.wind_down_ms,
        "overtime": None if step.overtime is None else step.overtime.describe(),
        "grace_ms": step.grace_ms,
        "attempts": step.attempts,
        "retry_delays_ms": step.delays_ms,
        "latest_start_ms": step.starts_ms,
        "latest_end_ms": step.ends_ms,
        "per_item": step.is_per_item,
        "approval_ms": step.approval_ms,
    }


def _schema() -> Outcome:
    return Outcome(Ending.FINISHED, data=json_schema())


_OPTIONS = (
    Option.argument("flow", "The workflow file.", missing="missing FLOW: the workflow file"),
    Option.duration(
        "--run-timeout",
        "Assume this timeout of the run (5m; 1000 or more without a unit is milliseconds).",
        read=read_run_duration,
        key="run_timeout_ms",
    ),
    Option.timeout(),
)
COMMANDS = {
    "check": Subcommand("check", options=_OPTIONS, run=ChildWork.looking("check", _check, draw_findings)),
    "plan": Subcommand("plan", options=_OPTIONS, run=ChildWork.looking("plan", _plan, draw_plan)),
    "schema": Subcommand("schema", options=(Option.timeout(),), run=ChildWork.looking("schema", _schema, draw_schema)),
}
