"""Checks of a workflow before anything runs: its graph, clocks, budgets, commands, tools and nested files."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from ...core.errors import Failure
from ...core.json_values import as_text
from ...core.limits import WORK_CLOCKS, format_duration, reserve_ms_for
from ...core.overtime import OvertimeError
from ...core.value_types import field, record, replace
from ...supervise.unsupervised import read_error_output
from ..file.loader import FINDINGS_LIMIT, SIZE_LIMIT, Finding, Loaded, Path_, Source, suggest, try_load
from ..file.schema import (
    ToolPart,
    WorkflowFile,
    ai_steps,
    callers_of,
    calls_of,
    envs_of,
    find_unset_notify,
    find_unset_variables,
    find_wrong_defaults,
    is_template,
)
from ..file.shell_quoting import Unsafe, find_refusals, find_unheard, find_variable_refusal, with_references
from ..file.templates import with_marks
from ..steps.command import SHELL, CommandStep, ToolStep
from ..steps.provider import STEP_TYPES, Approval, Reaction, StepPart, Unit, duration_ms
from ..steps.workflow import WorkflowStep
from ._finally_check import NO_PERSON, check_finally, check_reserve, find_person_inside
from ._template_check import check_templates, find_unset_names
from .plan import (
    Plan,
    PlannedStep,
    approval_ttl_ms,
    behind_all,
    clean_up_steps,
    clean_up_wants_ms,
    find_cycle,
    graph_of,
    items_come_from,
    needs,
    on_demand,
    overtime_of,
    plan_of,
    reach,
    run_timeout_ms,
    step_timeout_ms,
    timeout_key,
    written_timeout,
)

HOUR_S, DAY_S = 3_600, 86_400
# Bare numbers probably in the other unit: seconds from the first, milliseconds below the second; the third is for
# models and repositories.
MANY_SECONDS, FEW_MILLISECONDS, FEW_FOR_NETWORK = HOUR_S, 100, 1000
# Workflows in workflows: levels and files, and bytes, where a file counts once for each limit it is run under. More
# bytes would take minutes.
NESTING_LIMIT, NESTED_FILES_LIMIT = 10, 100
NESTED_SIZE_LIMIT = 4 * SIZE_LIMIT
# Commands of a file that are checked with `sh -n`, and the time for one, which includes loading the shell.
SYNTAX_CHECKS_LIMIT, SYNTAX_LIMIT_S = 100, 2.0
# Commands without syntax, and commands that change how the shell reads later lines.
_PLAIN_COMMAND = re.compile(
    r"(?! *(?:if|then|else|elif|fi|for|while|until|do|done|case|esac|select|function)\b)[\w ./:=,@%+-]*"
)
_TEACHING = re.compile(r"\b(?:alias|shopt)\b")
# A shell of the system, with options that do not change how it reads a command. A check runs no other program.
_SYSTEM_SHELL = re.compile(
    r"((?:(?:/usr)?/bin/)?(?:sh|dash|ash|bash))(?: -[efuvx]*(?:o (?:errexit|nounset|pipefail))?)*"
)
REFUSALS_LIMIT = 10  # values of one command that are reported


def lint(loaded: Loaded, *, timeout_ms: int | None = None, unattended: bool = True) -> list[Finding]:
    """Return the findings of a file, errors first; then those of the files that it runs.

    `timeout_ms` is the caller's limit on the run. An error caused only by that limit is a warning, except where it
    leaves no time for anything but `finally`.
    """
    above = (_identity_of(loaded.source),)
    found = _Nesting(unattended).findings(loaded, None, above)
    if not timeout_ms:
        return found
    wrong = {(finding.rule, finding.file, finding.path) for finding in found if finding.is_error}
    return [
        replace(finding, is_error=finding.is_error and (finding.rule, finding.file, finding.path) in wrong)
        if finding.rule != "budget/finally"
        else finding
        for finding in _Nesting(unattended).findings(loaded, timeout_ms, above)
    ]


def find_unset(loaded: Loaded, environment: Mapping[str, str]) -> list[Finding]:
    """Return a warning for each needed variable that is not set here: the file may run elsewhere."""
    if loaded.readable is None:
        return []
    return [
        Finding("env/unset", message, path, loaded.source.place_of(path), is_error=False)
        for find in (find_unset_variables, find_unset_notify, find_unset_names)
        for path, message in find(loaded.readable, environment)
    ][:FINDINGS_LIMIT]


def identity(file: str | Path) -> str:
    return os.path.realpath(file)


def _identity_of(source: Source) -> str:
    return identity(source.folder / os.path.basename(source.name))


@record
class _Nesting:
    """The check of a file and the files that it runs, each once for each limit it is run under."""

    unattended: bool
    seen: set[tuple[str, int | None]] = field(default_factory=set)
    files: dict[str, Loaded | Failure] = field(default_factory=dict)
    checked_bytes: int = 0

    def findings(self, loaded: Loaded, timeout_ms: int | None, above: tuple[str, ...]) -> list[Finding]:
        workflow = loaded.readable
        if workflow is None:
            return _sort([*loaded.findings])
        is_whole = loaded.workflow is not None
        prompts, flaws = _read_prompts(loaded, workflow)
        own = [*_check_file(workflow, timeout_ms, self.unattended and is_whole, prompts), *flaws]
        own += _check_references(workflow, loaded.source.folder)
        below: list[Finding] = []
        for path, step in _nested_files(workflow):
            if not is_template(step.workflow):
                here, inside = self._check_nested(loaded, workflow, path, step, timeout_ms, above)
                own += here
                below += inside
        if not is_whole:
            own = list(_certain(own, loaded.findings))
        located = (replace(found, place=loaded.source.place_of(found.path)) for found in own)
        return _sort([*loaded.findings, *located]) + below

    def _check_nested(
        self,
        parent: Loaded,
        workflow: WorkflowFile,
        where: Path_,
        step: WorkflowStep,
        timeout_ms: int | None,
        above: tuple[str, ...],
    ) -> tuple[list[Finding], list[Finding]]:
        path = (*where, "workflow")
        if self.checked_bytes > NESTED_SIZE_LIMIT:
            return [], []  # reported already
        child = self._load(parent.source.folder / step.workflow, path)
        if isinstance(child, Finding):
            return [child], []
        own = _identity_of(child.source)
        if own in above:
            return [Finding("nested/circle", _circle_in_words(own, above), path)], []
        if len(above) >= NESTING_LIMIT:
            return [Finding("nested/depth", f"workflows in workflows, more than {NESTING_LIMIT} deep", path)], []
        run_ms = run_timeout_ms(workflow, timeout_ms)
        inside_ms = None if run_ms is None else run_ms - reserve_ms_for(run_ms)
        limit_ms = min((limit for limit in (step_timeout_ms(workflow, step), inside_ms) if limit), default=None)
        here = list(_check_fit(child, str(where[1]), step, limit_ms)) if where[0] == "steps" else []
        last = child.readable if where[0] == "steps" and where[1] in workflow.finally_ else None
        if last is not None and (why := find_person_inside(last)) is not None:
            here.append(Finding("finally/person", f"{NO_PERSON}: {why}", path))
        if child.readable is not None and child.readable.notify:
            message = f"`notify` of {step.workflow} is not used here: only the outermost run sends messages"
            here.append(Finding("nested/notify", message, path, is_error=False))
        if (own, limit_ms) in self.seen:
            return here, []
        self.seen.add((own, limit_ms))
        self.checked_bytes += child.source.size
        if self.checked_bytes > NESTED_SIZE_LIMIT:
            message = f"runs other files of more than {NESTED_SIZE_LIMIT} bytes, counted once for each limit of a file"
            return [*here, Finding("nested/files", message, path)], []
        inside = self.findings(child, limit_ms, (*above, own))
        return here, [found if found.file else replace(found, file=child.source.name) for found in inside]

    def _load(self, file: Path, path: Path_) -> Loaded | Finding:
        key = str(file)
        if key not in self.files:
            if len(self.files) >= NESTED_FILES_LIMIT:
                return Finding("nested/files", f"runs more than {NESTED_FILES_LIMIT} other files", path)
            self.files[key] = try_load(file)
        loaded = self.files[key]
        if isinstance(loaded, Loaded):
            return loaded
        rule = "nested/unreadable" if loaded.code == "FILE_UNREADABLE" else "nested/missing"
        hint = suggest(file.name, _files_in(file.parent)) if rule == "nested/missing" else None
        return Finding(rule, str(loaded), path, suggestion=hint)


def _nested_files(workflow: WorkflowFile) -> Iterator[tuple[Path_, WorkflowStep]]:
    """Yield the steps and tools that run another file, tools as steps."""
    for step_id, step in workflow.steps.items():
        if isinstance(step, WorkflowStep):
            yield ("steps", step_id), step
    for name, tool in workflow.tools.items():
        if tool.workflow is not None:
            yield ("tools", name), WorkflowStep(type="workflow", workflow=tool.workflow)


def _circle_in_words(file: str, above: tuple[str, ...]) -> str:
    names = (*above[above.index(file) :], file)
    return f"files run each other: {' → '.join(os.path.basename(name) for name in names)}"


def _files_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, FINDINGS_LIMIT)]
    except (OSError, ValueError):
        return []


def _check_fit(child: Loaded, step_id: str, step: WorkflowStep, limit_ms: int | None) -> Iterator[Finding]:
    workflow = child.workflow
    if workflow is None:
        return
    name, path = os.path.basename(child.source.name), ("steps", step_id, "inputs")
    own_ms = run_timeout_ms(workflow)
    if limit_ms is not None and own_ms is not None and own_ms > limit_ms - reserve_ms_for(limit_ms):
        most = format_duration(limit_ms - reserve_ms_for(limit_ms))
        message = f"{name} may take {format_duration(own_ms)} by its own timeout, and has only {most} in this step"
        yield Finding("budget/longer-than-step", message, ("steps", step_id, "timeout"))
    for wanted, part in workflow.inputs.items():
        if part.required and part.default is None and wanted not in step.inputs:
            yield Finding("nested/input", f"{name} needs the input {wanted!r}", path)
    for written in step.inputs:
        if written not in workflow.inputs:
            hint = suggest(written, workflow.inputs, otherwise="there are ")
            yield Finding("nested/input", f"{name} has no input {written!r}", (*path, written), suggestion=hint)


def _sort(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: (not finding.is_error, finding.place))


def _check_file(
    workflow: WorkflowFile, timeout_ms: int | None, unattended: bool, prompts: Mapping[str, str]
) -> Iterator[Finding]:
    graph = list(islice(_check_graph(workflow), FINDINGS_LIMIT))
    yield from graph
    for check in (
        check_finally,
        _check_clocks,
        _check_tools,
        _check_schemas,
        _check_scripts,
        _check_syntax,
        _check_variables,
        _check_models,
    ):
        yield from islice(check(workflow), FINDINGS_LIMIT)
    yield from _check_questions(workflow, unattended, run_timeout_ms(workflow, timeout_ms))
    for name, why in find_wrong_defaults(workflow):
        yield Finding("input/default", why, ("inputs", name, "default"))
    yield from islice(check_templates(workflow, prompts=prompts), FINDINGS_LIMIT)
    has_circle = any(finding.rule == "graph/cycle" for finding in graph)
    for finding in _check_budgets(workflow, plan_of(workflow, timeout_ms=timeout_ms)):
        if not has_circle or finding.rule not in _CHAIN_RULES:
            yield finding


# Findings about chains of steps, which a circle or an unknown step makes meaningless.
_CHAIN_RULES = ("budget/critical-path", "budget/parallelism")


def _certain(found: list[Finding], flaws: Collection[Finding]) -> Iterator[Finding]:
    """Yield the findings that hold although mistakes were removed from the file."""
    broken = [flaw.path for flaw in flaws if flaw.path]
    sections = {path[0] for path in broken}
    unknown = {path[:2] for path in broken if path[0] in ("steps", "checks") and path[2:] in ((), ("type",))}
    keys = [path for path in broken if path[:2] not in unknown]
    skipped = {
        *_CHAIN_RULES,
        *(("template/unknown-input",) if "inputs" in sections else ()),
        *(("tool/unknown",) if "tools" in sections else ()),
    }
    for finding in found:
        path = finding.path
        if finding.rule in skipped or any(path[: len(each)] == each or each[: len(path)] == path for each in keys):
            continue
        if path[:2] not in unknown or finding.rule.startswith(("graph/", "template/")):
            yield finding


def _check_graph(workflow: WorkflowFile) -> Iterator[Finding]:
    graph = graph_of(workflow)
    if (circle := find_cycle(graph)) is not None:
        message = f"steps wait for each other: {_path_in_words(circle)}"
        yield Finding("graph/cycle", message, ("steps", circle[0], "depends_on"))
    for step_id, groups in graph.items():
        for name in sorted(needs(groups)):
            if name not in graph:
                yield _unknown_step(("steps", step_id, "depends_on"), name, graph, "graph/missing-dependency")
        yield from _check_targets(("steps", step_id, "on_fail"), workflow.steps[step_id].on_fail, graph)
        yield from _check_targets(("steps", step_id, "on_success"), workflow.steps[step_id].on_success, graph)
    yield from _check_targets(("defaults", "on_fail"), workflow.defaults.on_fail, graph)
    yield from _find_uncalled(workflow)
    if circle is not None:
        return
    never = {step_id for step_id, step in workflow.steps.items() if str(step.if_).strip().lower() == "false"}
    for step_id in sorted(never):
        message = "can never start: its condition is always false"
        yield Finding("graph/unreachable", message, ("steps", step_id, "if"), is_error=False)
    for step_id, step in workflow.steps.items():
        if len(sources := items_come_from(workflow, step)) > 1:
            message = f"is done for every item of {sources[0]}, and not of {', '.join(sources[1:])}"
            hint = "name the list: `for_each` with a list or a template"
            yield Finding("graph/items", message, ("steps", step_id, "depends_on"), suggestion=hint, is_error=False)
    accepting = {step_id for step_id, step in workflow.steps.items() if step.accept_skipped}
    strict = {
        step_id: tuple(group for group in groups if step_id not in accepting or never.isdisjoint(group))
        for step_id, groups in graph.items()
    }
    lost = behind_all(strict, never)
    for step_id in sorted(lost - never):
        causes = sorted(needs(graph[step_id]) & lost)
        message = f"can never start: it waits for {', '.join(causes)}, which never does"
        yield Finding("graph/unreachable", message, ("steps", step_id), is_error=False)


def _path_in_words(names: Sequence[str]) -> str:
    shown = names if len(names) <= 20 else [*names[:10], f"({len(names) - 20} more)", *names[-10:]]
    return " → ".join(shown)


def _find_uncalled(workflow: WorkflowFile) -> Iterator[Finding]:
    """Yield the steps that only another step starts, where that one never starts either."""
    waiting, callers = on_demand(workflow), callers_of(workflow)
    started = (name for name in workflow.steps if name not in waiting)
    reached = reach(started, lambda name: calls_of(workflow, name) if name in workflow.steps else ())
    for name in workflow.steps:
        if name not in reached:
            by = ", ".join(list(dict.fromkeys(callers.get(name, [name])))[:5])
            message = f"can never start: only {by} would run it, and never starts either"
            hint = "a step that a `run` names waits to be called: leave one of them out of `run`"
            yield Finding("graph/never-called", message, ("steps", name), suggestion=hint)


def _check_targets(path: Path_, reaction: Reaction | None, steps: Collection[str]) -> Iterator[Finding]:
    targets = [] if reaction is None else [*(("run", name) for name in reaction.run), ("goto", reaction.goto)]
    for key, name in targets:
        if name is not None and name not in steps:
            yield _unknown_step((*path, key), name, steps, "graph/unknown-target")


def _unknown_step(path: Path_, name: str, steps: Collection[str], rule: str) -> Finding:
    return Finding(rule, f"there is no step {name!r}", path, suggestion=suggest(name, steps, otherwise="there are "))


def _check_overtime(workflow: WorkflowFile, step_id: str, step: StepPart) -> Iterator[Finding]:
    where = ("steps", step_id, "overtime")
    if not step.overtime:
        return
    try:
        policy = overtime_of(workflow, step)
    except OvertimeError as error:
        yield Finding("clock/overtime", str(error), where)
        return
    if policy is not None and policy.hard_extends and not STEP_TYPES[step.type].can_extend:
        message = f"hard_extends: a {step.type} step waits on the clock of its question; `inbox extend` moves that"
        yield Finding("clock/overtime", message, where)


def _check_clocks(workflow: WorkflowFile) -> Iterator[Finding]:
    yield from _check_unit(("timeout",), workflow.timeout, "s", "a run")
    for name, tool in workflow.tools.items():
        yield from _check_unit(("tools", name, "timeout"), tool.timeout, "ms", "a tool")
    for step_id, step in workflow.steps.items():
        unit, whose = STEP_TYPES[step.type].unit, f"a {step.type}"
        key = timeout_key(step)
        few = FEW_FOR_NETWORK if step.type in ("ai", "git-checkout") else FEW_MILLISECONDS
        yield from _check_unit(("steps", step_id, *key.split(".")), written_timeout(step), unit, whose, few)
        if key != "timeout" and step.timeout is not None:
            message = f"is not used: `{key}` is there as well"
            yield Finding("clock/not-used", message, ("steps", step_id, "timeout"), is_error=False)
        yield from _check_overtime(workflow, step_id, step)
        timeout_ms = step_timeout_ms(workflow, step)
        for name in (*WORK_CLOCKS, "connect_timeout"):
            if name in ("timeout", "grace", "wind_down"):
                continue  # these begin where the timeout or the soft limit ends
            limit = getattr(step, name, None)
            if limit is not None and timeout_ms and duration_ms(limit, unit) >= timeout_ms:
                written = format_duration(duration_ms(limit, unit))
                message = f"has no effect: it is {written}, and the timeout is {format_duration(timeout_ms)}"
                yield Finding("clock/never-rings", message, ("steps", step_id, name), is_error=False)
            else:
                yield from _check_unit(("steps", step_id, name), limit, unit, whose)


def _check_unit(path: Path_, written: object, unit: Unit, whose: str, few: int = FEW_MILLISECONDS) -> Iterator[Finding]:
    """Warn about a bare number that would make more sense in the other unit."""
    if isinstance(written, str) and not written.strip().isdecimal():
        return
    if not isinstance(written, int | float | str):
        return
    ms = duration_ms(written, unit)
    if unit == "s" and _looks_like_ms(ms // 1000):
        message = f"{written} on {whose} is seconds: {format_duration(ms)}"
        hint = f"did you mean {format_duration(ms // 1000)}?"
        yield Finding("clock/unit", message, path, suggestion=hint, is_error=False)
    elif unit == "ms" and 0 < ms < few:
        meant = str(ms * 1000) if str(path[-1]).endswith("_ms") else f"{ms}s"
        message = f"{written} on {whose} is milliseconds"
        yield Finding("clock/unit", message, path, suggestion=f"did you mean {meant}?", is_error=False)


def _looks_like_ms(seconds: int) -> bool:
    """Return whether a number of seconds is round, and neither hours nor days: 60000 is 16h40m."""
    if seconds < MANY_SECONDS or seconds % 100:
        return False
    is_hours = seconds <= DAY_S and seconds % HOUR_S == 0
    is_days = seconds <= 30 * DAY_S and seconds % DAY_S == 0
    return not is_hours and not is_days


def _check_budgets(workflow: WorkflowFile, plan: Plan) -> Iterator[Finding]:
    run_ms = plan.run_timeout_ms
    if run_ms is None:
        return
    inside_ms = run_ms - reserve_ms_for(run_ms)
    work_ms = max(1, run_ms - plan.finally_ms)
    work_ms -= reserve_ms_for(work_ms)
    whose = "the run" if run_timeout_ms(workflow) == run_ms else "the caller of the run"
    has = f"{whose} has {format_duration(run_ms)}"
    yield from check_reserve(workflow, plan, has)
    kept = f"{has}, {format_duration(plan.finally_ms)} of it for finally" if plan.finally_ms else has
    clean_up = clean_up_steps(workflow)
    for step in plan.steps if plan.finally_ms < inside_ms else ():
        if step.id not in workflow.finally_:
            yield from _check_step_budget(workflow.steps[step.id], step, work_ms, kept)
            yield from _check_clean_up_budget(workflow.steps[step.id], step, plan, work_ms, kept, step.id in clean_up)
    if plan.worst_ms is None or plan.worst_ms > inside_ms:
        takes = "may take any time" if plan.worst_ms is None else f"may take {format_duration(plan.worst_ms)}"
        message = f"the longest chain of steps ({_path_in_words(plan.critical_path)}) {takes}, and {has}"
        yield Finding("budget/critical-path", message, ("timeout",), is_error=False)
        return
    # At best every place is always busy.
    together_ms = sum(step.worst_ms or 0 for step in plan.steps) // workflow.max_parallelism
    if together_ms > inside_ms:
        message = f"{workflow.max_parallelism} at a time, the steps may take {format_duration(together_ms)}; {has}"
        yield Finding("budget/parallelism", message, ("max_parallelism",), is_error=False)


def _check_clean_up_budget(
    written: StepPart, step: PlannedStep, plan: Plan, inside_ms: int, has: str, is_clean_up: bool
) -> Iterator[Finding]:
    """Warn where clean-up has less time than it declares, or takes it from another step."""
    wants_ms = clean_up_wants_ms(written, step.timeout_ms)
    path = ("steps", step.id, *timeout_key(written).split("."))
    if is_clean_up:
        if wants_ms is not None and wants_ms > plan.clean_up_ms:
            message = (
                f"clean-up that may take {format_duration(step.timeout_ms or 0)} is only sure to get "
                f"{format_duration(plan.clean_up_ms)}: {has}, and at most half of that is kept for clean-up"
            )
            yield Finding("budget/clean-up", message, path, is_error=False)
        return
    if step.is_written and step.timeout_ms and (step.effective_ms or 0) < step.timeout_ms <= inside_ms:
        kept = format_duration(plan.clean_up_ms)
        message = f"a timeout of {format_duration(step.timeout_ms)} is too long: {has}, {kept} of it for clean-up"
        yield Finding("budget/clean-up", message, path, is_error=False)


def _check_step_budget(written: StepPart, step: PlannedStep, inside_ms: int, has: str) -> Iterator[Finding]:
    if not step.is_written and step.attempts == 1:
        return  # a default timeout is cut to the remaining time
    path = ("steps", step.id, *timeout_key(written).split("."))
    if step.is_written and step.timeout_ms and step.timeout_ms > inside_ms:
        message = f"a timeout of {format_duration(step.timeout_ms)} is longer than it can be: {has}"
        hint = f"write at most {format_duration(inside_ms)}, or give the run more time"
        yield Finding("budget/longer-than-run", message, path, suggestion=hint)
    elif step.delays_ms > inside_ms:
        message = f"waiting {format_duration(step.delays_ms)} between its attempts takes too long: {has}"
        hint = "try less often, or cap the pauses with `max_delay_ms`"
        yield Finding("budget/waits", message, ("steps", step.id, "on_fail"), suggestion=hint)
    elif step.attempts > 1 and step.worst_ms is not None and step.worst_ms > inside_ms:
        message = (
            f"{step.attempts} attempts of {format_duration(step.timeout_ms or 0)} and the pauses between them take "
            f"{format_duration(step.worst_ms)}: {has}"
        )
        yield Finding("budget/retries", message, ("steps", step.id, "on_fail"), is_error=step.is_written)


def _check_tools(workflow: WorkflowFile) -> Iterator[Finding]:
    for step_id, step in workflow.steps.items():
        if isinstance(step, ToolStep) and step.tool not in workflow.tools:
            hint = suggest(step.tool, workflow.tools, otherwise="there are ")
            message = f"there is no tool {step.tool!r} in `tools`"
            yield Finding("tool/unknown", message, ("steps", step_id, "tool"), suggestion=hint)
        elif isinstance(step, ToolStep) and workflow.tools[step.tool].workflow is not None:
            message = f"the tool {step.tool!r} is a workflow, which is for agents"
            hint = f"write `type: workflow` and `workflow: {workflow.tools[step.tool].workflow}`"
            yield Finding("tool/workflow", message, ("steps", step_id, "tool"), suggestion=hint)


def _check_schemas(workflow: WorkflowFile) -> Iterator[Finding]:
    written = [(("steps", step_id, "output_schema"), step.output_schema) for step_id, step in workflow.steps.items()]
    written += [(("tools", name, "input_schema"), tool.input_schema) for name, tool in workflow.tools.items()]
    for path, schema in written:
        if schema is not None:
            from ..steps.ai_models import find_schema_flaw

            if (flaw := find_schema_flaw(schema)) is not None:
                yield Finding("schema/invalid", f"it is no JSON schema: {flaw}", path)


def _check_scripts(workflow: WorkflowFile) -> Iterator[Finding]:
    """Yield the values in commands that the step would refuse, and the pipes that hide a failure."""
    for path, part in _scripts(workflow):
        if not is_template(part.exec) and "|" not in part.exec:
            continue
        marked = with_marks(part.exec)
        for refusal in find_refusals(marked)[:REFUSALS_LIMIT] if is_template(part.exec) else ():
            # With blocks, the command is known when it runs.
            is_error = refusal.is_error and "{%" not in part.exec
            yield Finding(refusal.rule, refusal.message, path, suggestion=refusal.suggestion, is_error=is_error)
        shell = part.shell or workflow.defaults.shell or ["sh"]
        if not shell[0].endswith("bash") and (unheard := find_unheard(marked)):
            message = f"a failure of {unheard[0]} is not seen: where sh has no `pipefail`, the last in a pipe decides"
            hint = "write `shell: bash`, or write the output to a file first"
            yield Finding("shell/pipe", message, path, suggestion=hint, is_error=False)


def _check_syntax(workflow: WorkflowFile) -> Iterator[Finding]:
    """Yield the commands that their shell cannot read. No command is run."""
    checked = 0
    for path, part in _scripts(workflow):
        shell = part.shell or workflow.defaults.shell or SHELL
        # Blocks are known when the command runs, and `sh -n` does not apply an alias or extglob.
        if "{%" in part.exec or _PLAIN_COMMAND.fullmatch(part.exec) or _TEACHING.search(part.exec):
            continue
        system_shell = _SYSTEM_SHELL.fullmatch(" ".join(shell))
        if checked >= SYNTAX_CHECKS_LIMIT or system_shell is None or shutil.which(shell[0]) is None:
            continue
        script = part.exec
        if is_template(script):
            try:
                script, _ = with_references(with_marks(script), ["1"])
            except Unsafe:
                continue  # reported by _check_scripts
        checked += 1
        if complaint := read_error_output([system_shell[1], "-n", "-c", script], SYNTAX_LIMIT_S):
            why = re.sub(r"^.*?: (?:-c: )?(?:line )?(?=\d+: )", "line ", complaint.splitlines()[0])
            yield Finding("shell/syntax", f"{os.path.basename(shell[0])} cannot read it: {why}", path)


def _scripts(workflow: WorkflowFile) -> Iterator[tuple[Path_, CommandStep | ToolPart]]:
    for name, step in workflow.steps.items():
        if isinstance(step, CommandStep):
            yield ("steps", name, "exec"), step
    for name, tool in workflow.tools.items():
        yield ("tools", name, "exec"), tool


def _check_variables(workflow: WorkflowFile) -> Iterator[Finding]:
    for path, env, command in envs_of(workflow):
        for name, value in env.items():
            refusal = find_variable_refusal(name, command) if is_template(as_text(value)) else None
            if refusal is not None:
                yield Finding(refusal.rule, refusal.message, (*path, name), suggestion=refusal.suggestion)


def _check_references(workflow: WorkflowFile, folder: Path) -> Iterator[Finding]:
    """Yield the literal addresses and functions that cannot be right."""
    for step_id, step in workflow.steps.items():
        where = ("steps", step_id)
        written = step.cwd or workflow.defaults.cwd or "."
        home = None if is_template(written) else folder / written
        if step.type == "http_client":
            from ..steps.http_message import METHODS, find_written_flaws

            for key, why in find_written_flaws(step.model_dump(), is_template):
                yield Finding("http/invalid", why, (*where, key))
            method = str(getattr(step, "method", "GET")).upper()
            if not is_template(method) and method not in METHODS and (hint := suggest(method, METHODS)) is not None:
                message = f"{method[:20]!r} is not a common method"
                yield Finding("http/method", message, (*where, "method"), suggestion=hint, is_error=False)
        elif step.type == "git-checkout":
            from ..steps.git import NO_REPOSITORY, find_repository, find_unusable

            if getattr(step, "repository", None) is None and find_repository(os.environ, folder) is None:
                # GITHUB_REPOSITORY may be set where the file runs.
                why = NO_REPOSITORY.removeprefix("repository: ")
                yield Finding("git/invalid", why, (*where, "repository"), is_error=False)
            for key, why in find_unusable(step.model_dump(), is_template):
                yield Finding("git/invalid", why, (*where, key))
        elif step.type == "function" and home is not None:
            yield from _check_function((*where, "target"), getattr(step, "target", None), home, "app")


def _check_function(path: Path_, written: object, folder: Path, default: str = "") -> Iterator[Finding]:
    """Yield why a function, or the App of a `function` step, is not found. Nothing is imported."""
    if not isinstance(written, str) or is_template(written):
        return
    place, colon, attribute = written.partition(":")
    name = (attribute or default).partition(".")[0].removesuffix("()")
    rule, file = "function/missing", folder / place
    if not name:
        yield Finding(rule, f"{written!r} names no function", path, suggestion="write path/to/file.py:function")
    elif not place.endswith(".py") and os.sep not in place:
        top = place.partition(".")[0]
        search = [str(folder), os.getcwd(), *sys.path]
        if top not in sys.builtin_module_names and PathFinder.find_spec(top, search) is None:
            # It may be installed where the file runs.
            yield Finding(rule, f"there is no module {top!r} here", path, is_error=not colon)
    else:
        from ..steps.function import names_in

        try:
            names = names_in(file.read_bytes())
        except (OSError, ValueError) as error:
            hint = suggest(file.name, _files_in(file.parent)) if isinstance(error, FileNotFoundError) else None
            yield Finding(rule, f"there is no file {place!r}, or it cannot be read", path, suggestion=hint)
        except SyntaxError as error:
            yield Finding(rule, f"{place} cannot be read: line {error.lineno}: {error.msg}", path)
        else:
            if "*" not in names and name not in names:
                hint = suggest(name, sorted(names), otherwise="there are ")
                yield Finding(rule, f"there is no {name!r} in {place}", path, suggestion=hint)


def _check_questions(workflow: WorkflowFile, unattended: bool, run_ms: int | None) -> Iterator[Finding]:
    for step_id, step in workflow.steps.items():
        is_written = isinstance(step.approval, Approval) and "ttl" in step.approval.model_dump(exclude_unset=True)
        if is_written and run_ms and approval_ttl_ms(step) > run_ms:
            ttl, has = format_duration(approval_ttl_ms(step)), format_duration(run_ms)
            message = f"nobody has {ttl} to decide: the run has {has}, and its time runs while it waits"
            advice = "give the run a longer timeout, or the approval a shorter ttl"
            path = ("steps", step_id, "approval", "ttl")
            yield Finding("human/outlasts-run", message, path, suggestion=advice, is_error=False)
        if step.type != "human-input":
            continue
        choices, default = getattr(step, "choices", None), getattr(step, "default", None)
        if choices and default is not None:
            is_known = not any(map(is_template, (*choices, default)))
            if is_known and default not in choices:
                message = f"{default!r} is not one of its choices"
                hint = suggest(default, choices, otherwise="one of ")
                yield Finding("human/default", message, ("steps", step_id, "default"), suggestion=hint)
        if not step_timeout_ms(workflow, step) and unattended:
            message = "waits for a person without a time limit, and there may be no person"
            hint = "give it a `timeout` and a `default`, or run it at a terminal"
            yield Finding("human/unbounded", message, ("steps", step_id), suggestion=hint, is_error=False)


def _check_models(workflow: WorkflowFile) -> Iterator[Finding]:
    """Yield the package, variable or tool that an `ai` step lacks here."""
    for step_id, step in ai_steps(workflow):
        from ..steps.ai import find_flaws

        env = {**workflow.env, **workflow.defaults.env, **step.env}
        own = {name: str(value) for name, value in env.items() if value is not None}
        for flaw in find_flaws(step, workflow.tools, os.environ, own):
            path = ("steps", step_id, *flaw.path)
            yield Finding(flaw.rule, flaw.message, path, suggestion=flaw.suggestion, is_error=flaw.is_error)


def _read_prompts(loaded: Loaded, workflow: WorkflowFile) -> tuple[dict[str, str], list[Finding]]:
    """Return the texts of literally named prompt files, by step, and the findings about them."""
    prompts: dict[str, str] = {}
    flaws: list[Finding] = []
    for step_id, step in ai_steps(workflow):
        from ..steps.ai import read_prompt

        folder = step.cwd or workflow.defaults.cwd or "."
        if step.prompt_file is None or is_template(step.prompt_file) or is_template(folder):
            continue
        file = loaded.source.folder / folder / step.prompt_file
        try:
            prompts[step_id] = read_prompt(file)
        except Failure as failure:
            hint = suggest(file.name, _files_in(file.parent)) if failure.code == "FILE_NOT_FOUND" else None
            flaws.append(Finding("ai/prompt-file", str(failure), ("steps", step_id, "prompt_file"), suggestion=hint))
    return prompts, flaws


# A file that another one is about to run is checked again, because its name may have come from a template.

# The approved digests of files, by the name that a file is opened under: the target of a link may change.
approved_files: ContextVar[Mapping[str, str]] = ContextVar("shotclock_approved_files", default=MappingProxyType({}))
BY_TEMPLATE = "named by a template when it runs, and not covered"


def digests_of(file: Path) -> dict[str, str]:
    """Return the digests of a file and of all files that it runs, or why there is none."""
    found: dict[str, str] = {}
    left = [file.absolute()]
    while left:
        file = left.pop()
        name = str(file)
        if name in found:
            continue
        if len(found) >= NESTED_FILES_LIMIT:  # which fails the step a moment later
            found["more files"] = "not read"
            break
        loaded = try_load(file)
        if isinstance(loaded, Failure):
            found[name] = str(loaded)
            continue
        found[name] = f"sha256 {loaded.source.sha256}"
        for path, step in _nested_files(loaded.workflow) if loaded.workflow is not None else ():
            if is_template(step.workflow):
                found[f"{name}, step {path[1]}"] = BY_TEMPLATE
            else:
                left.append(file.parent / step.workflow)
    return found


def inner_workflow(file: Path, above: tuple[str, ...], *, unattended: bool) -> WorkflowFile:
    """Read and check a file that another one is about to run, below `above`. Raises Failure."""
    own = identity(file)
    if own in above:
        raise Failure("DEPTH_EXCEEDED", _circle_in_words(own, above), suggestion="break the circle")
    if len(above) >= NESTING_LIMIT:
        raise Failure("DEPTH_EXCEEDED", f"workflows in workflows, more than {NESTING_LIMIT} deep")
    loaded = try_load(file)
    if isinstance(loaded, Failure):
        raise loaded
    approved = approved_files.get().get(str(file.absolute()))
    if approved is not None and approved != f"sha256 {loaded.source.sha256}":
        message = f"{str(file)!r} was not approved as it is: it has changed since it was proposed"
        raise Failure("ACTION_CHANGED", message, suggestion="run the workflow again; it asks again")
    findings = lint(loaded, unattended=unattended) if loaded.workflow is not None else loaded.findings
    # Clocks that cannot fit were reported for the outer file, and may have been accepted.
    wrong = [found for found in findings if found.is_error and not found.rule.startswith("budget/")]
    if wrong or loaded.workflow is None:
        message, errors = loaded.format_errors(wrong)
        raise Failure("WORKFLOW_INVALID", f"{message}: {errors[0]['message']}", context={"errors": errors})
    return loaded.workflow
