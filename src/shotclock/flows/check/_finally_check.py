"""Checks of `finally`: its steps depend on each other alone, wait for no person, and fit into the run's time."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.limits import format_duration, reserve_ms_for
from ..file.loader import Finding, Path_
from ..file.schema import WorkflowFile
from ..steps.provider import Reaction
from .plan import Plan, graph_of, needs

NO_PERSON = "a finally step cannot wait for a person"
_ENDED = "leave it out: a finally step begins once all steps have ended"


def check_finally(workflow: WorkflowFile) -> Iterator[Finding]:
    last = frozenset(workflow.finally_)
    if not last:
        return
    for name, groups in graph_of(workflow).items():
        for other in sorted(needs(groups) & workflow.steps.keys()):
            if (name in last) != (other in last):
                path = ("steps", name, "depends_on")
                message = f"a finally step cannot wait for {other!r}, a step of `steps`"
                hint: str | None = _ENDED
                if other in last:
                    message = f"waits for the finally step {other!r}, which begins after all other steps"
                    hint = "move it to `finally` as well"
                yield Finding("finally/depends-on", message, path, suggestion=hint)
    for name, step in workflow.steps.items():
        for key, reaction in (("on_fail", step.on_fail), ("on_success", step.on_success)):
            yield from _check_reaction(("steps", name, key), reaction, name in last, workflow)
    yield from _check_reaction(("defaults", "on_fail"), workflow.defaults.on_fail, False, workflow)
    for name in workflow.finally_:
        if (why := find_person(workflow, name)) is not None:
            hint = "ask in `steps`, and use the answer here"
            yield Finding("finally/person", f"{NO_PERSON}: {why}", ("steps", name), suggestion=hint)


def _check_reaction(path: Path_, reaction: Reaction | None, is_last: bool, workflow: WorkflowFile) -> Iterator[Finding]:
    targets = [] if reaction is None else [*(("run", name) for name in reaction.run), ("goto", reaction.goto)]
    for key, name in targets:
        if name in workflow.steps and (name in workflow.finally_) != is_last:
            where = "`steps`, which have ended" if is_last else "`finally`, which runs once, after all other steps"
            message = f"cannot {'run' if key == 'run' else 'go to'} {name!r}: it is a step of {where}"
            yield Finding("finally/border", message, (*path, key))


def find_person(workflow: WorkflowFile, name: str) -> str | None:
    """Return why a step may wait for a person."""
    step = workflow.steps[name]
    if step.approval:
        return "it has an `approval`"
    if step.type == "human-input":
        return "it is a question"
    return None


def find_person_inside(workflow: WorkflowFile) -> str | None:
    """Return why a nested file may wait for a person."""
    found = ((name, find_person(workflow, name)) for name in workflow.steps)
    return next((f"step {name!r}: {why}" for name, why in found if why is not None), None)


def check_reserve(workflow: WorkflowFile, plan: Plan, has: str) -> Iterator[Finding]:
    """Refuse a reserve that leaves no time for the other steps."""
    run_ms = plan.run_timeout_ms
    if run_ms is None or not plan.finally_ms:
        return
    left_ms = run_ms - reserve_ms_for(run_ms)
    if plan.finally_ms >= left_ms:
        path = " → ".join(plan.finally_path)
        needed = format_duration(plan.finally_ms)
        message = f"the finally steps ({path}) need {needed}, which leaves no time for the others: {has}"
        hint = f"give the run more than {needed}, or these steps shorter timeouts"
        yield Finding("budget/finally", message, ("finally",), suggestion=hint)
