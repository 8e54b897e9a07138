"""Reruns: a new run that continues an ended one. What had succeeded is kept, as far as it is still valid.

The kept steps become the first records of the new run, as those of a run that is resumed, so no other code has to tell
the two apart.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.errors import Failure
from ...core.limits import WORK_CLOCKS
from ...core.value_types import JsonObject, value
from ...people.approval import NO_SUCH_FILE, digest_of_file
from ...store.runs import StoredRun
from ...store.store import Store
from ...supervise.kernel import is_alive
from ..check.plan import graph_of, is_per_item, items_come_from, keep_outputs, on_demand, outputs_without, reach
from ..file.loader import try_load
from ..file.schema import CONDITIONS, WorkflowFile, ai_steps, callers_of, is_template, texts_in
from ..file.templates import mentions, uses_mapping
from ..steps.command import ToolStep
from ._kept_items import is_masked, keep, keep_finished
from .artifacts import run_folder
from .state import Reason, Status, StepState, is_same, read_record, unstarted_state, without_mark
from .step_choice import depends_of, left_out, refuse_unknown

# Keys of a step that have no part in the output of an attempt that succeeded.
LIMIT_KEYS = frozenset(
    {*WORK_CLOCKS, "min_time", "overtime", "connect_timeout"}
    | {"description", "tags", "idempotent", "continue_on_failure", "accept_skipped", "on_fail", "on_success", "runs_on"}
)
# Keys that say which items there are, and what is made of all their outputs. The items themselves stay the same.
ITEM_KEYS = frozenset({"for_each", "matrix"})
WHOLE_KEYS = ITEM_KEYS | {"transform", "output_schema"}
# Keys of the file that are part of every step.
FILE_KEYS = ("env", "env_file")
DEFAULT_KEYS = ("env", "cwd", "shell")


@value
class Rerun:
    """The beginning of a new run: the records of its steps, and a description of what is kept and why not more."""

    workflow: WorkflowFile
    recorded: Mapping[str, StepState]
    shown: JsonObject


def plan_rerun(
    old: StoredRun, store: Store, workflow: WorkflowFile, inputs: Mapping[str, Any], start_from: Sequence[str] = ()
) -> Rerun:
    """Return what a run of the file keeps of an ended run. `inputs` are those of the new run."""
    refuse_open(old)
    refuse_unknown(workflow, start_from, "from")
    rerun = _Planner(old, store, workflow, inputs, start_from).plan()
    if not rerun.shown["runs_again"] and "outputs" not in rerun.shown["file"]:
        message = f"run {old.id!r} has nothing to run again: all of its steps are finished"
        raise Failure("ARG_ERROR", message, suggestion="--from STEP runs a step and all that depends on it again")
    return rerun


def plan_nested_rerun(
    store: Store, outer: Mapping[str, Any], step_id: str, file: str, workflow: WorkflowFile, inputs: Mapping[str, Any]
) -> Rerun | None:
    """Return what a nested run keeps of the one with the same inputs inside the run that `outer` continues."""
    if step_id not in outer.get("inside", ()):
        return None
    run_id, old = outer["of"], None
    while run_id is not None and old is None:  # a kept step ran in an earlier one
        old = store.runs.find_ended_inside(run_id, step_id, file, inputs)
        above = store.runs.get(run_id)
        run_id = None if above is None else above.rerun_of
    try:
        return None if old is None else _Planner(old, store, workflow, inputs, ()).plan()
    except Failure:  # another version of shotclock wrote it
        return None


def refuse_open(run: StoredRun) -> None:
    """Refuse a run that has not ended: it can be resumed, or a process still has it."""
    if run.ended_at is not None:
        return
    if run.parked_at is None and is_alive(run.holder):
        why, hint = f"is under way in process {run.holder.pid}", f"`shotclock job wait {run.id}` waits for its end"
    else:
        why, hint = "has not ended", f"`shotclock run --resume {run.id}` continues it"
    raise Failure("RUN_TAKEN", f"run {run.id!r} {why}; --rerun-failed continues ended runs", suggestion=hint)


@value
class StepChange:
    """The changed keys of a step, of its tools, and those of the file that are part of every step."""

    own_keys: tuple[str, ...]
    file_keys: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.own_keys, *self.file_keys)

    @property
    def is_of_limits(self) -> bool:
        return LIMIT_KEYS.issuperset(self.keys)

    @property
    def causes(self) -> str:
        return ", ".join(key for key in self.keys if key not in LIMIT_KEYS)

    @property
    def is_of_items(self) -> bool:
        return (LIMIT_KEYS | WHOLE_KEYS).issuperset(self.keys)


class FileChanges:
    def __init__(self, old: Mapping[str, Any], workflow: WorkflowFile) -> None:
        self._old = old
        self._new = _as_json(workflow)
        self._workflow = workflow
        self.added: list[str] = [name for name in workflow.steps if name not in old["steps"]]
        self.removed: list[str] = [name for name in old["steps"] if name not in workflow.steps]
        self.of_file: list[str] = [key for key in _changed_keys(old, self._new) if key != "steps"]

    @cached_property
    def _for_all(self) -> tuple[str, ...]:
        """Return the changed keys that are part of every step."""
        changed = [f"{key} of the file" for key in FILE_KEYS if key in self.of_file]
        old, new = self._old.get("defaults") or {}, self._new.get("defaults") or {}
        return (*changed, *(f"defaults.{key}" for key in _changed_keys(old, new) if key in DEFAULT_KEYS))

    def of_step(self, name: str) -> StepChange:
        """Return the changes of a step that is in both files."""
        keys = _changed_keys(self._old["steps"][name], self._new["steps"][name])
        old, new = self._old.get("tools") or {}, self._new.get("tools") or {}
        tools = [f"tools.{tool}" for tool in self._tools_of(name) if not is_same(old.get(tool), new.get(tool))]
        return StepChange((*keys, *tools), self._for_all)

    def _tools_of(self, name: str) -> Iterable[str]:
        step = self._workflow.steps[name]
        if isinstance(step, ToolStep):
            return [step.tool]
        return next((list(each.ai.tools) for other, each in ai_steps(self._workflow) if other == name), [])


def _as_json(workflow: WorkflowFile) -> JsonObject:
    made: JsonObject = json.loads(json.dumps(workflow.model_dump(exclude_unset=True)))
    return made


def _changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys([*old, *new])
    return [key for key in keys if (key in old) != (key in new) or not is_same(old[key], new[key])]


_ENDS = {
    Status.FAILED: "it failed",
    Status.TIMED_OUT: "it timed out",
    Status.CANCELLED: "it was cancelled",
    Status.INTERRUPTED: "it was interrupted",
    Status.SKIPPED: "it was skipped",
}
_EXPRESSION = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)


def _expressions(written: Mapping[str, Any], without: Collection[str] = ()) -> Iterator[str]:
    """Yield the expressions in a part of a file, without those in some of its keys."""
    for path, text in texts_in({key: each for key, each in written.items() if key not in without}):
        if path[0] in CONDITIONS:
            yield text
        else:
            yield from _EXPRESSION.findall(text)


class _Planner:
    def __init__(
        self, old: StoredRun, store: Store, workflow: WorkflowFile, inputs: Mapping[str, Any], start_from: Sequence[str]
    ) -> None:
        self.old, self.store, self.workflow = old, store, workflow
        self.states = read_record(old, store)[1]
        self.start_from = start_from
        self.has_choice = any(state.reason is Reason.NOT_CHOSEN for state in self.states.values())
        names = {**old.inputs, **inputs}
        self.changed_inputs = [name for name in names if not is_same(old.inputs.get(name), inputs.get(name))]
        self.final, self.demanded = frozenset(workflow.finally_), on_demand(workflow)
        self.callers = callers_of(workflow)
        self.restores: list[JsonObject] = []
        self.depends = {name: self._find_dependencies(name) for name in workflow.steps}
        self.followers: dict[str, list[str]] = {}
        for name, others in self.depends.items():
            for other in others:
                self.followers.setdefault(other, []).append(name)

    def plan(self) -> Rerun:
        out = {name for name in self.workflow.steps if self._was_left_out(name)}
        comparable = keep_outputs(self.workflow, outputs_without(self.workflow, out))
        changes = FileChanges(without_mark(self.old.workflow), comparable)
        changed = {
            name: change
            for name in self.workflow.steps
            if name not in changes.added and (change := changes.of_step(name)).keys
        }
        reasons = self._find_reasons(changed)
        behind_from = self._behind(self.start_from)
        recorded: dict[str, StepState] = {}
        for name in self.workflow.steps:
            state = self._begin_step(name, reasons, changed.get(name), name in behind_from)
            if state is not None:
                recorded[name] = state
        kept = [name for name, state in recorded.items() if state.kept_from is not None]
        shown: JsonObject = {
            "of": self.old.id,
            "kept": len(kept),
            "kept_items": sum(sum(map(bool, state.parts)) for state in recorded.values() if not state.kept_from),
            "runs_again": [{"step": name, "why": why} for name, why in reasons.items()],
            "added": changes.added,
            "removed": changes.removed,
            "changed": [
                {"step": name, "keys": list(change.own_keys), "runs_again": name in reasons}
                for name, change in changed.items()
                if change.own_keys
            ],
            "file": changes.of_file,
            "restores": [each for each in self.restores if each["step"] in kept],
            "inside": [name for name in reasons if self._goes_on_inside(name, reasons, changed.get(name), behind_from)],
        }
        out = {name for name, state in recorded.items() if state.reason is Reason.NOT_CHOSEN}
        return Rerun(keep_outputs(self.workflow, outputs_without(self.workflow, out)), recorded, shown)

    def _find_dependencies(self, name: str) -> list[str]:
        """Return the steps whose new outcome would be another one for this step."""
        found = depends_of(self.workflow, name)
        if self._uses_all(_expressions(self.workflow.steps[name].model_dump())):
            found += [other for other in self.workflow.steps if other != name and other not in self.final]
        return found + (self.callers.get(name, []) if name in self.demanded else [])

    def _uses_all(self, texts: Iterable[str]) -> bool:
        return any(uses_mapping(kind, text, self.workflow.steps) for text in texts for kind in ("outputs", "steps"))

    def _behind(self, names: Iterable[str]) -> dict[str, None]:
        return reach(names, lambda name: self.followers.get(name, ()))

    def _find_reasons(self, changed: Mapping[str, StepChange]) -> dict[str, str]:
        """Return the steps that run again, each with the reason."""
        own = {name: why for name in self.workflow.steps if (why := self._find_reason(name, changed.get(name)))}
        # A step that was left out is needed by one that runs.
        for name in list(self._find_needed(own)):
            own.setdefault(name, "a step that runs again needs it")
        reasons = dict(own)
        left = list(own)
        while left:
            cause = left.pop()
            for name in self.followers.get(cause, ()):
                if name not in reasons and not self._stays_out(name) and name not in self.final:
                    reasons[name] = f"it depends on {cause}, which runs again"
                    left.append(name)
        return {name: reasons[name] for name in self.workflow.steps if name in reasons}

    def _find_needed(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the left out steps without which one of these could not start."""
        graph = graph_of(self.workflow)

        def find_missing(name: str) -> Iterator[str]:
            for group in () if self.workflow.steps[name].accept_skipped else graph[name]:
                if all(map(self._was_left_out, group)):
                    yield from group

        return (name for name in reach(names, find_missing) if self._was_left_out(name))

    def _was_left_out(self, name: str) -> bool:
        """Return whether the caller of the old run had not chosen the step. An added one was not chosen either."""
        state = self.states.get(name)
        return self.has_choice and (state is None or state.reason is Reason.NOT_CHOSEN) and name not in self.final

    def _stays_out(self, name: str) -> bool:
        """Return whether the step is left out, or waits for a reaction that never came."""
        state = self.states.get(name)
        was_uncalled = name in self.demanded and (state is None or state.reason is Reason.ON_DEMAND)
        return self._was_left_out(name) or was_uncalled

    def _find_reason(self, name: str, change: StepChange | None) -> str | None:
        """Return why a step runs again for its own sake."""
        if name in self.start_from:
            return "--from names it"
        state = self.states.get(name)
        if name in self.final:  # it runs in any case
            is_missing = state is not None and (state.status.is_bad or state.reason is Reason.RUN_ENDED)
            return _ENDS[state.status] if state is not None and is_missing else None
        if self._stays_out(name):
            return None
        if name not in without_mark(self.old.workflow)["steps"] or state is None:
            return "it is new in the file" if state is None else "it never ran"
        if state.status is Status.SKIPPED and state.reason is Reason.DEPENDENCY_SKIPPED:
            return None  # it is skipped again, unless what it depends on runs
        if state.status is not Status.SUCCEEDED and state.reason is not Reason.CONDITION:
            return _ENDS.get(state.status, "it had not ended")
        if change is not None and not change.is_of_limits:
            return f"changed: {change.causes}"
        if self._uses_changed_input(name):
            return "one of its inputs is another"
        if (file := self._find_changed_file(name, state)) is not None:
            return f"its file {file} has changed"
        if state.partial:
            return "its output was cut"
        if is_masked(state.output):
            return "its output has a masked secret (***), which cannot be handed on"
        return self._find_lost_artifact(name, state)

    def _find_lost_artifact(self, name: str, state: StepState) -> str | None:
        """Return why a step runs again for its artifacts. A file that is missing in its place is restored instead."""
        step, ran_in = self.workflow.steps[name], state.kept_from or self.old.id
        cwd = step.cwd or self.workflow.defaults.cwd or "."
        if not step.artifacts or is_template(cwd):  # where the files of items belong is not known
            return None
        root, kept = os.path.realpath(Path(self.old.file).parent / cwd), run_folder(self.store.home, ran_in)
        before = self.store.runs.steps(ran_in).get(name)
        for each in () if before is None else before.record.get("artifacts", ()):
            place = os.path.join(root, each["path"])
            found = digest_of_file(place)
            if found == f"sha256 {each['sha256']}":
                continue
            is_below = Path(os.path.realpath(os.path.dirname(place))).is_relative_to(root)
            is_whole = is_below and digest_of_file(str(kept / each["file"])) == f"sha256 {each['sha256']}"
            if found != NO_SUCH_FILE or not is_whole:
                return f"its artifact {each['path']} is {'gone' if found == NO_SUCH_FILE else 'another file now'}"
            self.restores.append({"step": name, "from": str(kept / each["file"]), "to": place})
        return None

    def _find_changed_file(self, name: str, state: StepState) -> str | None:
        """Return a file of a nested workflow that is not as it was when it ran."""
        if self.workflow.steps[name].type != "workflow":
            return None
        for file, written in self.store.runs.files_inside(state.kept_from or self.old.id, name).items():
            loaded = try_load(Path(file))
            workflow = None if isinstance(loaded, Failure) else loaded.workflow
            if workflow is None or not is_same(without_mark(written), _as_json(workflow)):
                return Path(file).name
        return None

    def _uses_changed_input(self, name: str, without: Collection[str] = ()) -> bool:
        if not self.changed_inputs:
            return False
        texts = [*_expressions(self.workflow.steps[name].model_dump(), without)]
        for part in (self.workflow.env, self.workflow.defaults.env, {"tools": str(self.workflow.tools)}):
            texts += _expressions(part)
        named = "|".join(map(re.escape, self.changed_inputs))
        by_name = re.compile(rf"\binputs\s*(?:\.\s*(?:{named})\b|\[\s*['\"](?:{named})['\"]\s*\])")
        as_whole = re.compile(r"\binputs\b(?!\s*(?:\.|\[\s*['\"]))")
        return any(by_name.search(text) or as_whole.search(text) for text in texts)

    def _begin_step(
        self, name: str, reasons: dict[str, str], change: StepChange | None, is_behind_from: bool
    ) -> StepState | None:
        """Return the record with which a step begins; None for a step that begins anew."""
        old = self.states.get(name)
        if name in self.final:
            return None
        if name not in reasons:
            return self._keep(name, old)
        if old is None or old.type != self.workflow.steps[name].type:
            return None
        if name in self.demanded:
            return self._call_again(name, old, reasons)
        if is_behind_from or not is_per_item(self.workflow, self.workflow.steps[name]):
            return None
        parts = keep_finished(old, self.old.id)
        count = sum(map(bool, parts))
        if not parts:
            return None
        file = self._find_changed_file(name, old)
        if file is not None or not self._keeps_items(name, reasons, change):
            reasons[name] += "" if file is None or file in reasons[name] else f"; its file {file} has changed"
            reasons[name] += "" if change is None or change.is_of_items else f"; changed: {change.causes}"
            reasons[name] += f"; {count} finished {'item runs' if count == 1 else 'items run'} again, too"
            return None
        reasons[name] += f"; {count} finished {'item is' if count == 1 else 'items are'} kept"
        state = unstarted_state(self.workflow, name)
        state.parts, state.was_paused = parts, True
        return state

    def _goes_on_inside(
        self, name: str, reasons: Mapping[str, str], change: StepChange | None, behind_from: Collection[str]
    ) -> bool:
        """Return whether the run inside a step may keep what had succeeded: the step runs again only as it failed."""
        is_same_step = change is None or change.is_of_items
        step, old = self.workflow.steps[name], self.states.get(name)
        if step.type != "workflow" or old is None or not is_same_step or name in behind_from:
            return False
        if name in self.final:  # the new run has something else to clean up
            return False
        if is_per_item(self.workflow, step):
            return self._keeps_items(name, reasons, change)
        has_run = old.status.is_bad or self._find_changed_file(name, old) is not None
        return has_run and not any(other in reasons for other in self.depends[name])

    def _keep(self, name: str, old: StepState | None) -> StepState | None:
        if self._was_left_out(name):
            return left_out(self.workflow, name)
        if old is None or old.reason in (Reason.ON_DEMAND, Reason.DEPENDENCY_SKIPPED):
            return None
        state = unstarted_state(self.workflow, name)
        kept_from = old.kept_from or self.old.id
        if old.status is Status.SKIPPED:
            state.status, state.reason, state.kept_from = old.status, old.reason, kept_from
            return state
        state.exit_code = old.exit_code
        state.parts = [{"kept_from": kept_from, **part} if part else {} for part in old.parts]
        if name in self.demanded:
            state.is_called = True
        return keep(state, old.output, kept_from)

    def _call_again(self, name: str, old: StepState, reasons: Mapping[str, str]) -> StepState | None:
        """Return a step that a kept step had called and that has to be called again for it."""
        had_callers = [each for each in self.callers.get(name, ()) if each not in reasons and each in self.states]
        succeeded = [each for each in had_callers if self.states[each].status is Status.SUCCEEDED]
        reactions = (self.workflow.steps[each].on_success for each in succeeded)
        was_called = old.reason is not Reason.ON_DEMAND and any(
            each is not None and name in each.run for each in reactions
        )
        if not was_called and name not in self.start_from:
            return None
        state = unstarted_state(self.workflow, name)
        state.is_called = True
        return state

    def _keeps_items(self, name: str, reasons: Mapping[str, str], change: StepChange | None) -> bool:
        """Return whether an item of the same value would have the same output."""
        step = self.workflow.steps[name]
        if (change is not None and not change.is_of_items) or self._uses_changed_input(name, WHOLE_KEYS):
            return False
        written, sources = step.model_dump(), items_come_from(self.workflow, step)
        inside = [*_expressions(written, WHOLE_KEYS)]
        if self._uses_all(inside):
            return False
        listed = [*_expressions({key: written.get(key) for key in ITEM_KEYS})]
        # A template names the source of the items for the current one.
        found = (each for text in inside for each in mentions(text))
        named = {each.name for each in found if each.kind != "outputs" or each.name not in sources}
        of_items = {*sources, *(each.name for text in listed for each in mentions(text))} - named
        return all(other in of_items for other in self.depends[name] if other in reasons)


def describe(shown: Mapping[str, Any], most: int = 20) -> list[str]:
    kept = f"keeps {shown['kept']} step{'s' * (shown['kept'] != 1)}"
    items = f", {shown['kept_items']} finished item{'s' * (shown['kept_items'] != 1)}" if shown["kept_items"] else ""
    again = len(shown["runs_again"])
    lines = [f"continues run {shown['of']}: {kept}{items}; {again} step{'s' * (again != 1)} to run"]
    changes = [f"+ {name}: added to the file" for name in shown["added"]]
    changes += [f"- {name}: removed from the file" for name in shown["removed"]]
    for each in shown["changed"]:
        outcome = "" if each["runs_again"] else ", kept"
        changes.append(f"~ {each['step']}: changed in the file ({', '.join(each['keys'])}){outcome}")
    changes += [f"~ {key} of the file: changed" for key in shown["file"]]
    reasons = [f"↻ {each['step']}: {each['why']}" for each in shown["runs_again"]]
    restores = [f"+ {each['step']}: restores {each['to']}" for each in shown["restores"]]
    for part in (changes, reasons, restores):
        lines += [f"  {line}" for line in part[:most]]
        lines += [f"  … and {len(part) - most} more"] if len(part) > most else []
    return lines
