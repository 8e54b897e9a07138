"""Workflows of GitHub Actions: jobs and their steps as steps that wait for each other."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from ...providers.matrix import combine
from ..yaml_reader import Tree, quote
from . import actions_expressions as expressions
from .actions_expressions import Term, parse, static
from .actions_names import ActionsJob, ActionsStep, ForeignFile, JobPlace, sole_expression
from .common import (
    STEPS_LIMIT,
    Draft,
    FileRefused,
    ForeignPath,
    Unconvertible,
    converted,
    is_scalar,
    list_at,
    literal,
    mapping_at,
    new_draft,
    note_unknown,
    scalar_text,
    slug,
    text_at,
)
from .result import Imported

KIND = "actions"
JOB_MINUTES = 360  # of a job that has no timeout
COMBINATIONS_LIMIT = 50
_OTHER_SYSTEMS = {"windows": "Windows", "macos": "macOS"}

_TOP_KEYS = {"name", "on", "env", "jobs", "defaults", "concurrency"}
_PERMISSIONS = "the steps have the permissions of the user who starts the run"
_TOP_LOST = {"permissions": _PERMISSIONS, "run-name": "a run has no title"}
_JOB_KEYS = {"needs", "if", "runs-on", "steps", "env", "defaults", "strategy", "timeout-minutes"}
_JOB_KEYS |= {"outputs", "environment", "container", "uses", "continue-on-error"}
_JOB_LOST = {
    "name": "its steps are named after the key of the job",
    "permissions": _PERMISSIONS,
    "services": "its services are not started; start them before the run",
    "concurrency": "only a whole run can have a group here",
    "secrets": "secrets of a reusable workflow are not handed on",
    "with": "inputs of a reusable workflow are not handed on",
}
_STEP_KEYS = {"id", "name", "if", "run", "shell", "working-directory", "env", "timeout-minutes", "continue-on-error"}
# The keys inside of others that are carried over.
_INSIDE: dict[tuple[str, ...], set[str]] = {
    ("defaults",): {"run"},
    ("defaults", "run"): {"shell", "working-directory"},
    ("concurrency",): {"group", "cancel-in-progress"},
    ("strategy",): {"matrix", "fail-fast", "max-parallel"},
    ("environment",): {"name"},
}
_CALL_LOST = {
    "secrets": "a secret is a variable of the environment here",
    "outputs": "the outputs of the steps are in the answer of the run",
}
_INPUT_KEYS = {"type", "description", "required", "default", "options"}
_UPLOAD_KEYS = {"path", "if-no-files-found"}
_TYPES = {"string": "string", "boolean": "boolean", "number": "number", "choice": "string", "environment": "string"}
_ONE_WORD = "a value in a command is one word of data here; there, it is a part of the command"
_OUTPUT = re.compile(r"\$GITHUB_OUTPUT\b|\$\{GITHUB_OUTPUT\}")
_VARIABLES = re.compile(r"\$GITHUB_ENV\b|\$\{GITHUB_ENV\}")
_WRITTEN = re.compile(
    r"""^[ \t]*echo[ \t]+["']?([A-Za-z_]\w*)=.*>>[ \t]*"?(?:\$GITHUB_ENV\b|\$\{GITHUB_ENV\})"?[ \t]*$""", re.M
)
_OF_GROUP = re.compile(r"\$\{\{\s*(?:github\.workflow|(?:github\.event\.)?inputs\.([A-Za-z_]\w*))\s*\}\}")
_BEFORE = re.compile(r"\$\{?GITHUB_(PATH|STATE)\b|::(set-output|set-env|save-state|add-path)\b")


def looks_like(document: object, file_name: str) -> bool:
    """Return whether a document is a workflow of GitHub Actions."""
    if not isinstance(document, dict) or not isinstance(document.get("jobs"), dict):
        return False
    jobs = [job for job in document["jobs"].values() if isinstance(job, dict)]
    return "on" in document or any(job.keys() & {"runs-on", "uses"} for job in jobs)


def convert(tree: Tree, file_name: str) -> Imported:
    return converted(KIND, draft_of, tree, file_name)


def draft_of(tree: Tree, file_name: str) -> Draft:
    """Return the workflow before it is checked. Raises FileRefused or Unconvertible."""
    return _FileDraft(new_draft(KIND, tree), tree.value, file_name).convert()


class _FileDraft:
    def __init__(self, draft: Draft, document: dict[str, Any], file_name: str) -> None:
        env = {key: text for key, text in mapping_at(document, "env").items() if is_scalar(text)}
        self.file = ForeignFile(draft, document, scalar_text(document.get("name") or file_name), env=env)
        self.draft, self.document = draft, document

    def convert(self) -> Draft:
        draft, document = self.draft, self.document
        jobs = document.get("jobs")
        if not isinstance(jobs, dict) or not 0 < len(jobs) <= STEPS_LIMIT:
            raise FileRefused(f"`jobs` should be a mapping of 1 to {STEPS_LIMIT} jobs")
        note_unknown(draft, document, _TOP_KEYS, (), _TOP_LOST)
        self._note_inside()
        draft.top["name"] = text_at(draft, document, "name", ())
        self._convert_triggers()
        self._convert_concurrency()
        draft.top["defaults"] = {"timeout": f"{JOB_MINUTES // 60}h", "shell": ["bash", "+o", "pipefail"]}
        place = JobPlace(self.file, (), {}, self.file.env)
        own = place.variables(self.file.env)
        draft.top["env"] = {"CI": "true", **place.wanted, **own}
        for job_id in _in_order(jobs):
            self._convert_job(job_id, jobs[job_id])
        if len(jobs) > 1:
            draft.differ(("jobs",), "all jobs run in the folder of the workflow, not each on a machine of its own")
        return draft

    def _note_inside(self) -> None:
        """Note what is not carried over of keys that hold others."""
        found = self.document["jobs"].items()
        jobs: dict[ForeignPath, dict[str, Any]] = {("jobs", name): job for name, job in found if isinstance(job, dict)}
        holders: dict[ForeignPath, dict[str, Any]] = {(): self.document, **jobs}
        for path, holder in holders.items():
            for keys, known in _INSIDE.items():
                inside: object = holder
                for key in keys:
                    inside = inside.get(key) if isinstance(inside, dict) else None
                if isinstance(inside, dict):
                    note_unknown(self.draft, inside, known, (*path, *keys), {})
        for path, job in jobs.items():
            steps = job.get("steps")
            for number, step in enumerate(steps if isinstance(steps, list) else ()):
                holders[*path, "steps", number] = step if isinstance(step, dict) else {}
        for path, holder in holders.items():
            env = holder.get("env")
            for name, text in env.items() if isinstance(env, dict) else ():
                if not is_scalar(text):
                    self.draft.lose((*path, "env", name), "a variable is a text, a number, true or false")

    def _convert_triggers(self) -> None:
        triggers = self.document.get("on")
        named = triggers if isinstance(triggers, dict) else {}
        listed = [] if isinstance(triggers, dict) else list_at(self.document, "on")
        events = list(named) or [each for each in listed if isinstance(each, str)]
        if others := [event for event in events if event not in ("workflow_dispatch", "workflow_call")]:
            self.draft.lose(("on",), f"nothing starts a run by itself here: {', '.join(map(str, others))[:100]}")
        made: dict[str, Any] = {}
        for event in ("workflow_dispatch", "workflow_call"):
            inside = named.get(event)
            declared = inside.get("inputs") if isinstance(inside, dict) else None
            if isinstance(inside, dict):
                note_unknown(self.draft, inside, {"inputs"}, ("on", event), _CALL_LOST)
            for name, part in declared.items() if isinstance(declared, dict) else ():
                part = part if isinstance(part, dict) else {}
                path = ("on", event, "inputs", name)
                note_unknown(self.draft, part, _INPUT_KEYS, path, {})
                self.file.inputs[name] = kind = _TYPES.get(str(part.get("type", "string")), "string")
                if part.get("type") == "environment":
                    self.draft.lose((*path, "type"), "any text is accepted, not only the name of an environment")
                default = part.get("default", {"boolean": False, "string": ""}.get(kind))
                input_: dict[str, Any] = {
                    "type": kind,
                    "description": text_at(self.draft, part, "description", path),
                }
                input_["required"] = part.get("required") is True or None
                input_["default"] = None if input_["required"] and "default" not in part else default
                if kind == "string" and default is not None:
                    input_["default"] = scalar_text(default) if is_scalar(default) else ""
                made[name] = {key: value for key, value in input_.items() if value is not None}
                if isinstance(options := part.get("options"), list):
                    wanted = ", ".join(map(str, options))[:80]
                    self.draft.lose((*path, "options"), f"any text is accepted, not only {wanted}")
        self.draft.top["inputs"] = made

    def _convert_concurrency(self) -> None:
        written = self.document.get("concurrency")
        if written is None:
            return
        part = written if isinstance(written, dict) else {"group": written}
        group, cancels = part.get("group"), part.get("cancel-in-progress", False)
        if not isinstance(group, str) or not isinstance(cancels, bool):
            self.draft.lose(("concurrency",), "runs do not wait for each other: it is computed")
            return
        path: ForeignPath = ("concurrency", "group") if isinstance(written, dict) else ("concurrency",)
        made, end = "", 0
        for found in _OF_GROUP.finditer(group):
            if found[1] and found[1] not in self.file.inputs:
                continue
            filled = f"{{{{ inputs.{found[1]} }}}}" if found[1] else literal(self.file.name)
            made += literal(group[end : found.start()]) + filled
            end = found.end()
        if "${{" in group[end:] or "${{" in made:
            self.draft.lose(path, "runs do not wait for each other: only inputs can be in the name of a group")
            return
        made += literal(group[end:])
        self.draft.top["concurrency"] = {"group": made, "on_conflict": "cancel" if cancels else "wait"}
        if not cancels:
            self.draft.differ(path, "all runs that wait are run, one after another; there, only the newest of them")

    def _convert_job(self, job_id: str, written: Any) -> None:
        draft, path = self.draft, ("jobs", job_id)
        before = list(draft.steps)
        try:
            if not isinstance(written, dict):
                raise Unconvertible(f"should be a mapping, and is {quote(written)}")
            self.file.jobs[job_id] = _JobDraft(self.file, job_id, written).convert()
        except Unconvertible as reason:
            for name in [name for name in draft.steps if name not in before]:
                del draft.steps[name]
            needs = [step for each in _needs_of(written) for step in self.file.jobs[each].exits]
            name = draft.add(draft.name(job_id), _waiting(needs), path)
            draft.refuse_step(name, f"the job {reason}")
            self.file.jobs[job_id] = ActionsJob([name], [name], name)


class _JobDraft:
    def __init__(self, file: ForeignFile, job_id: str, job: dict[str, Any]) -> None:
        self.file, self.draft, self.id, self.job = file, file.draft, job_id, job
        self.path: ForeignPath = ("jobs", job_id)
        self.made = ActionsJob()
        if "uses" in job:
            raise FileRefused(f"the job {job_id} runs a reusable workflow, whose file is not read")
        if "container" in job:
            raise Unconvertible("runs in a container")
        steps = job.get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise Unconvertible("should have a list of steps")
        note_unknown(self.draft, job, _JOB_KEYS, self.path, _JOB_LOST)
        if "continue-on-error" in job and job["continue-on-error"] is not False:
            self.draft.lose((*self.path, "continue-on-error"), "jobs that need it do not run after its failure")
        found = [(number, self._run_of(number, step)) for number, step in enumerate(steps)]
        self.runs = [(number, step) for number, step in found if step is not None]
        env = {key: text for key, text in mapping_at(job, "env").items() if is_scalar(text)}
        self.own_env, self.env = env, {**file.env, **env}

    def convert(self) -> ActionsJob:
        combinations, native = self._combinations()
        needs = self._exits_above()
        entry = self._add_gate(needs, combinations[0] if len(combinations) == 1 else {})
        if not self.runs:
            name = self.draft.add(self.draft.name(self.id), {**entry, "exec": ":"}, self.path)
            self.made.exits.append(name)
            self.made.counted.append(name)
        for values in combinations:
            of_values = (
                [scalar_text(value) for value in values.values() if is_scalar(value)] if len(combinations) > 1 else []
            )
            prefix = slug("-".join([self.id, *of_values]))
            place = JobPlace(self.file, self.path, values, self.env, self.file.jobs, self.made, _needs_of(self.job))
            self.made.exits += self._add_steps(prefix, place, entry, native)
        last = place if self.runs and len(combinations) == 1 and native is None else None
        for name, text in mapping_at(self.job, "outputs").items():
            try:
                self.made.outputs[name] = _output(text, last)
            except Unconvertible as reason:
                self.draft.lose((*self.path, "outputs", name), f"it {reason}")
        return self.made

    def _on_this_system(self, combinations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the combinations that run on Linux. Raises Unconvertible if there are none."""
        wanted, path = self.job.get("runs-on"), (*self.path, "runs-on")
        labels = wanted if isinstance(wanted, list) else [wanted]
        kept, others = [], {}
        for number, values in enumerate(combinations):
            place = JobPlace(self.file, self.path, values, self.env, self.file.jobs, self.made, _needs_of(self.job))
            texts = [place.converter().template(each).lower() for each in labels if isinstance(each, str)]
            system = next((each for each in _OTHER_SYSTEMS for text in texts if text.startswith(each)), None)
            if system is not None:
                others[number] = _OTHER_SYSTEMS[system]
                continue
            kept.append(values)
            if not all(text.startswith("ubuntu") for text in texts) or len(texts) < len(labels):
                self.draft.differ(path, "the steps run on this machine, whatever `runs-on` names")
        if not kept:
            systems = " and ".join(dict.fromkeys(others.values()))
            raise Unconvertible(f"runs on {systems}: change `runs-on` if its steps can run here")
        for number, name in others.items():
            values = {key: scalar_text(value) for key, value in combinations[number].items() if is_scalar(value)}
            shown = ", ".join(f"{key}: {value}" for key, value in values.items())[:100]
            self.draft.lose(path, f"the combination {shown} was left out: it runs on {name}")
        return kept

    def _note_idle_axes(self, combinations: list[dict[str, Any]]) -> None:
        """Note each key of the matrix that no step uses which was carried over."""
        parts: list[object] = [{key: step[key] for key in step if key != "name"} for _, step in self.runs]
        parts += [self.job.get(key) for key in ("if", "env", "defaults", "outputs", "timeout-minutes")]
        text = json.dumps(parts)
        for axis in dict.fromkeys(key for each in combinations for key in each):
            name = re.escape(axis).replace("_", "[-_]")
            is_used = re.search(rf"\bmatrix(\.{name}\b|\[|\s*[,)]|\.\*)", text)
            if len({json.dumps(each.get(axis)) for each in combinations}) > 1 and not is_used:
                key = next((key for key in self.job["strategy"]["matrix"] if key.replace("-", "_") == axis), axis)
                message = f"matrix.{key} changes nothing here: no step uses it, so its combinations are the same run"
                self.draft.differ((*self.path, "strategy", "matrix", key), message)

    def _run_of(self, number: int, step: dict[str, Any]) -> dict[str, Any] | None:
        """Return a step that runs a command or keeps files, or None with a note."""
        if "run" in step:
            return {key: value for key, value in step.items() if key != "artifacts"}
        uses, path = str(step.get("uses", "")), (*self.path, "steps", number)
        action = uses.partition("@")[0]
        with_ = mapping_at(step, "with")
        if action == "actions/checkout" and not with_.keys() & {"repository", "ref", "path", "submodules", "lfs"}:
            self.draft.differ(path, "nothing is checked out: a run uses the files that are there")
        elif action in ("actions/cache", "actions/cache/restore", "actions/cache/save"):
            self.draft.differ(path, f"{action} was left out: nothing is removed between runs")
        elif action == "actions/download-artifact":
            self.draft.differ(path, f"{action} was left out: all jobs share one folder")
        elif action.startswith("actions/setup-"):
            wanted = ", ".join(f"{key} {with_[key]}" for key in with_ if "version" in key and is_scalar(with_[key]))
            self.draft.differ(path, f"{action} was left out: install {wanted or 'it'} before the run")
        elif action == "actions/upload-artifact":
            for key in step.keys() - {"id", "name", "if", "uses", "with", "continue-on-error"}:
                self.draft.lose((*path, key), "a step that keeps files has nothing like it here")
            note_unknown(self.draft, with_, _UPLOAD_KEYS, (*path, "with"), {"name": "files keep their own names"})
            try:
                return {**step, "name": step.get("name", "artifacts"), "run": ":", "artifacts": _artifacts(with_)}
            except Unconvertible as reason:
                self.draft.lose((*path, "with", "path"), f"the files are not kept: it {reason}")
        else:
            self.draft.lose(path, f"the action {quote(uses)} was left out" if uses else "it has no `run`")
        return None

    def _combinations(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Return the combinations, and the matrix if one step can have it as its own."""
        strategy = mapping_at(self.job, "strategy")
        matrix = strategy.get("matrix")
        if matrix is None:
            return self._on_this_system([{}]), None
        path = (*self.path, "strategy")
        if not isinstance(matrix, dict):
            raise Unconvertible("has a matrix that is computed")
        if "max-parallel" in strategy:
            self.draft.lose((*path, "max-parallel"), "as many run at a time as `max_parallelism` of the file allows")
        if strategy.get("fail-fast") is not False:
            self.draft.differ((*path, "matrix"), "a combination that fails does not stop the others")
        constant = JobPlace(self.file, self.path, {}, {})
        made: dict[str, list[Any]] = {}
        for axis, values in matrix.items():
            if isinstance(values, str):
                values = constant.converter().term(parse(sole_expression(values))).value
            if not isinstance(values, list):
                raise Unconvertible(f"has a matrix whose {axis} is no list")
            is_change = axis in ("include", "exclude")
            made[axis.replace("-", "_")] = [_with_plain_names(each) if is_change else each for each in values]
        if "${{" in json.dumps(made):
            raise Unconvertible("has a matrix that is computed")
        try:
            combinations = self._on_this_system(combine(made))
        except (ValueError, TypeError) as error:
            raise Unconvertible(f"has a matrix that {error}") from None
        self._note_idle_axes(combinations)
        if self._fits_one_step(combinations):
            return [{name: None for name in combinations[0]}], made
        if len(combinations) > COMBINATIONS_LIMIT:
            raise Unconvertible(f"has a matrix of {len(combinations)} combinations; {COMBINATIONS_LIMIT} are the most")
        return combinations, None

    def _fits_one_step(self, combinations: list[dict[str, Any]]) -> bool:
        if len(self.runs) != 1 or len({tuple(sorted(each)) for each in combinations}) > 1 or "outputs" in self.job:
            return False
        step = self.runs[0][1]
        fixed = [value for key, value in step.items() if key not in ("run", "env", "working-directory", "name")]
        fixed += [self.job.get(key) for key in ("if", "env", "continue-on-error", "timeout-minutes", "runs-on")]
        return "matrix" not in json.dumps(fixed)

    def _add_gate(self, needs: list[str], values: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of the first steps. A job with a condition has a step that decides for all of it."""
        place = JobPlace(self.file, self.path, values, self.env, self.file.jobs, self.made, _needs_of(self.job))
        node, environment = _condition_of(self.job), self.job.get("environment")
        text = json.dumps(self.file.document)
        is_asked = f"needs.{self.id}.result" in text or "needs.*.result" in text
        specials = any(expressions.uses_status(_condition_of(step, quiet=True)) for _, step in self.runs)
        if node is None and not environment and not (needs and (specials or is_asked)):
            return _waiting(needs)
        gate: dict[str, Any] = _waiting(needs)
        if node is not None:
            above = [self.file.jobs[each] for each in self._ancestors()]
            place.done = [step for each in above for step in each.counted]
            place.gates = [each.gate for each in above if each.gate is not None]
            if place.uses_status(node) and needs:
                gate = {"depends_on": [{name: "ended"} for name in needs]}
            node = place.constant_status(node)
            gate |= {} if node is None else _if(place.converter().condition(node))
            gate |= {"env": place.wanted} if place.wanted else {}
        if environment:
            gate["approval"] = True
            message = "an environment may need a reviewer, so an operator approves it; remove `approval` if not"
            self.draft.differ((*self.path, "environment"), message)
        self.made.gate = self.draft.add(self.draft.name(f"{self.id}-begin"), {**gate, "exec": ":"}, self.path)
        return {"depends_on": [self.made.gate]}

    def _ancestors(self) -> list[str]:
        found = _needs_of(self.job)
        for job_id in found:  # which grows
            found += [each for each in _needs_of(self.file.document["jobs"][job_id]) if each not in found]
        return found

    def _exits_above(self) -> list[str]:
        """Return the last steps of the jobs that have to succeed.

        Those of all ancestors, if one of them runs after a failure: it does not make up for the failure.
        """
        found, above = _needs_of(self.job), self._ancestors()
        jobs = self.file.document["jobs"]
        if any(expressions.uses_status(_condition_of(jobs[each], quiet=True)) for each in above):
            found = above
        return [step for each in found for step in self.file.jobs[each].exits]

    def _add_steps(
        self, prefix: str, place: JobPlace, entry: dict[str, Any], native: dict[str, Any] | None
    ) -> list[str]:
        last: str | None = None
        since: list[str] = []  # the steps with a status function since the last one without
        for number, step in self.runs:
            path = (*self.path, "steps", number)
            text = next(
                (str(step[key])[:100] for key in ("id", "name") if is_scalar(step.get(key)) and step.get(key)), ""
            )
            text = re.sub(r"\$\{\{.*?\}\}", "", text)
            name = prefix if len(self.runs) == 1 else f"{prefix}-{slug(text)[:40] if text else number + 1}"
            name = self.draft.name(name)
            place.is_special = False
            place.secrets, place.wanted, place.path = {}, {}, path
            before = [*([last] if last else []), *since]
            after_success = _waiting(before) if before else copy.deepcopy(entry)
            made = after_success
            reason = None
            try:
                node = _condition_of(step)
                is_special = bool(place.done) and place.uses_status(node)
                if is_special:
                    gate = [self.made.gate] if self.made.gate else []
                    made = {"depends_on": [*gate, *({each: "ended"} for each in before)]}
                node = place.constant_status(node)
                if node is not None:
                    made |= _if(place.converter().condition(node))
                place.is_special = is_special
            except Unconvertible as unconvertible:
                reason, is_special = f"its condition {unconvertible}", False
                made = after_success
            try:
                made |= self._command(step, path, place, native) if reason is None else {}
            except Unconvertible as unconvertible:
                reason = f"it {unconvertible}"
            if wanted := {name: text for name, text in place.wanted.items() if name not in made.get("env", {})}:
                made["env"] = {**wanted, **made.get("env", {})}
            made["tags"] = [slug(self.id)]
            self.draft.add(name, made, path)
            if reason is not None:
                self.draft.refuse_step(name, reason)
            last, since = (last, [*since, name]) if is_special else (name, [])
            goes_on = bool(made.get("continue_on_failure"))
            self.made.counted += [] if goes_on else [name]
            place.add_step(step, ActionsStep(name, "if" not in made and not goes_on, goes_on))
        return [*([last] if last else []), *since]

    def _command(
        self, step: dict[str, Any], path: ForeignPath, place: JobPlace, native: dict[str, Any] | None
    ) -> dict[str, Any]:
        draft = self.draft
        if "artifacts" in step:
            goes_on = {"continue_on_failure": True} if step.get("continue-on-error") is True else {}
            return {"exec": ":", "artifacts": step["artifacts"], **goes_on}
        note_unknown(draft, step, _STEP_KEYS, path, {})
        script = step["run"]
        if not isinstance(script, str) or not script.strip():
            raise Unconvertible("has no command")
        if found := _BEFORE.search(script):
            raise Unconvertible(f"hands something to later steps in a way that is not known here: {found[0]}")
        env = {key: value for key, value in mapping_at(step, "env").items() if is_scalar(value)}
        place.env = {**self.env, **env}
        variables = place.variables({**self.own_env, **place.from_steps(), **env})
        if _VARIABLES.search(script):
            if len(_VARIABLES.findall(script)) != len(_WRITTEN.findall(script)):
                raise Unconvertible('writes to $GITHUB_ENV by more than `echo "NAME=value"`')
            place.written_here = _WRITTEN.findall(script)
            script = _VARIABLES.sub("$SHOTCLOCK_OUTPUT", script)
        if "GITHUB_STEP_SUMMARY" in script:
            variables["GITHUB_STEP_SUMMARY"] = "/dev/null"
            draft.lose((*path, "run"), "the summary is not kept")
        script = _OUTPUT.sub("$SHOTCLOCK_OUTPUT", script)
        step_id = step.get("id")
        if (
            isinstance(step_id, str)
            and "$SHOTCLOCK_OUTPUT" not in script
            and f"steps.{step_id}.outputs" in json.dumps(self.job)
        ):
            script = f'export GITHUB_OUTPUT="$SHOTCLOCK_OUTPUT"\n{script}'
        converted = place.converter().template(script)
        if "${{" in script and "{{" in converted:
            draft.differ((*path, "run"), _ONE_WORD)
        shell = self._setting(step, "shell")
        exec_, words = _with_shell(converted, shell)
        folder = self._setting(step, "working-directory")
        cwd = None if folder is None else place.converter().template(folder)
        named, before = place.named_in(step["run"], place.env, cwd or "")
        made: dict[str, Any] = {"exec": before + exec_, "shell": words}
        if cwd is not None:
            made["cwd"] = cwd
        made["env"] = {**named, **variables, **{name: f"${{{name}}}" for name in place.secrets}}
        made["timeout"] = self._timeout(step, place, path)
        goes_on = step.get("continue-on-error", False)
        if isinstance(goes_on, str):
            goes_on = place.converter().term(parse(sole_expression(goes_on))).value
        if not isinstance(goes_on, bool):
            raise Unconvertible("has a computed continue-on-error")
        made["continue_on_failure"] = goes_on or None
        name = step.get("name")
        made["description"] = name if isinstance(name, str) and "${{" not in name else None
        made["matrix"] = native
        return {key: value for key, value in made.items() if value is not None and value != {}}

    def _setting(self, step: dict[str, Any], key: str) -> str | None:
        """Return a setting of the step, else of `defaults.run` of the job or the file."""
        holders: list[Any] = [step]
        for each in (self.job, self.file.document):
            defaults = each.get("defaults")
            holders.append(defaults.get("run") if isinstance(defaults, dict) else None)
        found = next((each[key] for each in holders if isinstance(each, dict) and each.get(key) is not None), None)
        if found is not None and not isinstance(found, str):
            raise Unconvertible(f"has a {key} that is no text")
        return found

    def _timeout(self, step: dict[str, Any], place: JobPlace, path: ForeignPath) -> str | None:
        """Return the shorter timeout of a step and its job."""
        found = []
        for holder, place_of in ((step, path), (self.job, self.path)):
            minutes = holder.get("timeout-minutes")
            if isinstance(minutes, str):
                is_known = re.search(r"\b(?!matrix\b)[a-z]+\.", minutes) is None  # others are known when it runs
                minutes = place.converter().term(parse(sole_expression(minutes))).value if is_known else None
                if minutes is None:
                    message = f"it is computed; without it, a step has {JOB_MINUTES // 60} hours"
                    self.draft.lose((*place_of, "timeout-minutes"), message)
            if minutes is None:
                continue
            if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not 0 < minutes < 1_000_000:
                raise Unconvertible("has a timeout-minutes that is no number")
            found.append(max(1, round(minutes * 60)))
            if holder is self.job and len(self.runs) > 1:
                self.draft.differ((*self.path, "timeout-minutes"), "holds for each step, not for all steps together")
        return f"{min(found)}s" if found else None


# --- parts of a file ------------------------------------------------------------------------------------


def _if(condition: str | bool) -> dict[str, Any]:
    return {} if condition is True else {"if": condition}


def _waiting(names: list[str]) -> dict[str, Any]:
    return {"depends_on": list(dict.fromkeys(names)), "accept_skipped": True} if names else {}


def _artifacts(with_: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the `artifacts` of an upload. Raises Unconvertible."""
    text, missing = with_.get("path"), with_.get("if-no-files-found", "warn")
    if not isinstance(text, str) or missing not in ("warn", "error", "ignore"):
        raise Unconvertible("has no path" if text is None else "has a path or a setting that is not known here")
    paths = [line.strip() for line in re.sub(r"\$\{\{ *github\.workspace *\}\}/", "", text).splitlines()]
    paths = [each.removeprefix("./") for each in paths if each]
    if wrong := next((each for each in paths if each[0] in "/~!" or "${{" in each or ".." in each.split("/")), None):
        raise Unconvertible(f"names {quote(wrong)}, and only fixed paths below the working directory can be kept")
    more = {} if missing == "warn" else {"if_missing": missing}
    return [{"path": each, **more} for each in paths]


def _output(text: object, place: JobPlace | None) -> Term:
    """Return an output of a job. Raises Unconvertible."""
    if place is None:
        raise Unconvertible("is of a job that has no step, or several combinations")
    parts = list(place.converter().text(text)) if isinstance(text, str) else []
    if len(parts) != 1:
        raise Unconvertible("is no text of one expression")
    return static(parts[0]) if isinstance(parts[0], str) else parts[0]


def _needs_of(job: Any) -> list[str]:
    needs = job.get("needs") if isinstance(job, dict) else None
    listed = needs if isinstance(needs, list) else [] if needs is None else [needs]
    return [str(each) for each in listed]


def _in_order(jobs: dict[str, Any]) -> list[str]:
    """Return the jobs, each after those that it needs. Raises FileRefused."""
    made: list[str] = []
    for job_id, job in jobs.items():
        if unknown := [each for each in _needs_of(job) if each not in jobs]:
            raise FileRefused(f"the job {job_id} needs {quote(unknown[0])}, which is not there")
    left = list(jobs)
    while left:
        ready = [job_id for job_id in left if all(each in made for each in _needs_of(jobs[job_id]))]
        if not ready:
            raise FileRefused(f"the jobs {', '.join(left)[:100]} need each other")
        made += ready
        left = [job_id for job_id in left if job_id not in made]
    return made


def _with_plain_names(entry: Any) -> Any:
    return {key.replace("-", "_"): item for key, item in entry.items()} if isinstance(entry, dict) else entry


def _condition_of(part: Any, *, quiet: bool = False) -> Any:
    """Return the tree of a condition, or None. Raises Unconvertible unless `quiet`."""
    written = part.get("if") if isinstance(part, dict) else None
    if written is None:
        return None
    try:
        if isinstance(written, bool | int | float):
            return static(written)
        if not isinstance(written, str):
            raise Unconvertible("is no text")
        return parse(sole_expression(written))
    except Unconvertible:
        if quiet:
            return None
        raise


def _with_shell(script: str, shell: str | None) -> tuple[str, list[str] | None]:
    """Return a script and the shell that runs it. Raises Unconvertible for other programs."""
    if shell is None:
        return script, None
    words = shell.replace("{0}", "").split()
    name = words[0].rpartition("/")[2] if words else ""
    if name in ("bash", "sh"):
        if shell == "bash":
            return script, ["bash"]
        options = [word for word in words[1:] if word not in ("-e", "-c", "--noprofile", "--norc")]
        keeps = [] if name == "sh" or any("pipefail" in word for word in options) else ["+o", "pipefail"]
        return script, [
            name,
            *([] if any("e" in word for word in words[1:]) or shell == "sh" else ["+e"]),
            *keeps,
            *options,
        ]
    if name in ("python", "python3") and "{{" not in script:
        return f"{name} - <<'END_OF_SCRIPT'\n{script.rstrip()}\nEND_OF_SCRIPT", None
    raise Unconvertible(f"is a script for {quote(shell)}")
