"""The names that expressions of GitHub Actions can use: contexts, status functions and results of jobs."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from ...core.value_types import field, record
from . import actions_expressions as expressions
from .actions_expressions import BinaryOperation, Converter, Name, Term, static
from .common import Draft, ForeignPath, Unconvertible, literal_variable, output_of, scalar_text

_GITHUB = {"sha", "ref", "ref_name", "ref_type", "repository", "repository_owner", "actor", "event_name", "run_id"}
_GITHUB |= {"run_number", "run_attempt", "head_ref", "base_ref", "workflow", "job", "server_url", "api_url"}
_GITHUB |= {"graphql_url", "workspace", "triggering_actor", "event_path", "ref_protected"}
_MAY_BE_EMPTY = {"GITHUB_HEAD_REF", "GITHUB_BASE_REF"}  # outside of pull requests
_SYSTEMS = {"ubuntu": "Linux", "linux": "Linux"}
# Variables of Actions in a script, except in `${NAME:-default}`.
_VARIABLE = re.compile(r"\$\{?((?:GITHUB|RUNNER)_[A-Z_]+)\b(?!:?[-+])")
# Those that are files, or that only exist where the file sets them.
_SEPARATE = {"GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_STEP_SUMMARY", "GITHUB_PATH", "GITHUB_STATE", "GITHUB_TOKEN"}


@record
class ActionsJob:
    """A job that was converted."""

    exits: list[str] = field(default_factory=list)  # what later jobs wait for
    counted: list[str] = field(default_factory=list)  # the steps whose failure is that of the job
    gate: str | None = None
    outputs: dict[str, Term] = field(default_factory=dict)


@record
class ActionsStep:
    name: str
    is_certain: bool  # it always has an output when a later step runs
    goes_on: bool


@record
class ForeignFile:
    """A workflow file that is being converted."""

    draft: Draft
    document: dict[str, Any]
    name: str  # of the workflow, else of the file
    jobs: dict[str, ActionsJob] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)  # and their types
    env: dict[str, Any] = field(default_factory=dict)


class JobPlace:
    """The names that the expressions of a job can use."""

    def __init__(
        self,
        file: ForeignFile,
        path: ForeignPath,
        values: dict[str, Any],
        env: dict[str, Any],
        jobs: dict[str, ActionsJob] | None = None,
        job: ActionsJob | None = None,
        needs: list[str] | None = None,
    ) -> None:
        self.file = file
        self.path = path
        self.values = values
        self.env = env
        self.jobs: dict[str, ActionsJob] = jobs or {}
        self.job: ActionsJob = job or ActionsJob()
        self.needs: list[str] = needs or []
        self.steps: dict[str, ActionsStep] = {}
        self.done: list[str] = []  # the steps whose failure `failure()` sees
        self.set_by: dict[str, ActionsStep] = {}  # the variables that steps wrote to $GITHUB_ENV
        self.written_here: list[str] = []
        self.secrets: dict[str, None] = {}
        self.wanted: dict[str, str] = {}  # the `env` for the variables of the caller that a step reads
        self.gates: list[str] = []  # the steps that are skipped with a job above
        self.in_variables: bool = False
        self.is_special: bool = False

    def converter(self) -> Converter:
        return Converter(self.lookup, self.status)

    def add_step(self, step: dict[str, Any], made: ActionsStep) -> None:
        if isinstance(step.get("id"), str):
            self.steps[step["id"]] = made
        if not made.goes_on:
            self.done.append(made.name)
        self.set_by.update(dict.fromkeys(self.written_here, made))
        self.written_here = []

    def variables(self, env: dict[str, Any]) -> dict[str, Any]:
        made = {}
        for name, value in env.items():
            self.in_variables = True
            try:
                made[name] = value.code if isinstance(value, Term) else None
                if made[name] is None:
                    made[name] = self.converter().template(scalar_text(value), literal_variable)
            except Unconvertible as reason:
                raise Unconvertible(f"has a variable {name} that {reason}") from None
            finally:
                self.in_variables = False
        return made

    def from_steps(self) -> dict[str, Any]:
        return {name: Term(f"{{{{ {self.output(step, name)} }}}}", "text") for name, step in self.set_by.items()}

    def output(self, step: ActionsStep, name: str) -> str:
        if step.is_certain and not self.is_special:
            return output_of(step.name, name)
        part = f".{name}" if name.isidentifier() else f"['{name}']"
        return f"(steps['{step.name}'].output{part} | default(''))"

    # --- status functions

    def uses_status(self, node: Any) -> bool:
        node = expressions.without_success(node)
        return expressions.uses_status(node) or _mentions_results(node)

    def constant_status(self, node: Any) -> Any:
        """Return a condition without the `success()` that holds anyway."""
        return (
            node
            if self.done and expressions.uses_status(expressions.without_success(node))
            else expressions.without_success(node)
        )

    def status(self, name: str) -> Term:
        if name == "cancelled":
            self.file.draft.differ(
                (*self.path, "if"), "cancelled() is never true: a stopped run starts no further steps"
            )
            return static(False)
        failed = [f"steps['{each}'].status not in ['succeeded', 'skipped']" for each in self.done]
        if name == "always" or not failed:
            if failed:
                message = "always() does not include a run that is stopped: move the step to `finally` if it has to"
                self.file.draft.differ((*self.path, "if"), message)
            return static(name != "failure")
        if name == "success":
            failed += [f"steps['{each}'].status == 'skipped'" for each in self.gates]
        any_failed = f"({' or '.join(failed)})"
        return Term(any_failed if name == "failure" else f"not {any_failed}", "bool")

    # --- contexts

    def lookup(self, parts: list[Any]) -> Term:
        head, *rest = map(str, parts)
        find = getattr(self, f"_find_{head}", None)
        if find is None or not rest:
            raise Unconvertible(f"reads {head}")
        found: Term = find(rest)
        return found

    def _find_github(self, rest: list[str]) -> Term:
        if rest[0] == "event" and rest[1:2] == ["inputs"] and len(rest) == 3:
            return self._find_inputs(rest[2:])
        if rest == ["token"]:
            return self._find_secrets(["GITHUB_TOKEN"])
        if len(rest) != 1 or rest[0] not in _GITHUB:
            raise Unconvertible(f"reads github.{'.'.join(rest)}")
        if rest[0] == "job" and len(self.path) > 1:
            return static(self.path[1])
        if rest[0] == "workflow":
            return static(self.file.name)
        if rest[0] == "run_id":
            return Term("run.id", "text")
        return self._from_caller(f"GITHUB_{rest[0].upper()}", f"github.{rest[0]}")

    def _find_vars(self, rest: list[str]) -> Term:
        if not rest[0].isidentifier():
            raise Unconvertible(f"reads vars.{rest[0]}")
        return self._from_caller(rest[0], f"vars.{rest[0]}")

    def _from_caller(self, name: str, what: str) -> Term:
        if name in _MAY_BE_EMPTY:
            self.wanted[name] = f"${{{name}-}}"
            return Term(f"(env.{name} | default(''))", "text")
        self.wanted[name] = f"${{{name}}}"
        self.file.draft.differ(self.path, f"{what} is the variable {name} here, which has to be set")
        return Term(f"env.{name}", "text")

    def named_in(self, script: str, known: Collection[str], folder: str) -> tuple[dict[str, str], str]:
        """Return the variables of Actions that a script names: for its `env`, and as lines before it."""
        made, before = {}, ""
        for name in dict.fromkeys(_VARIABLE.findall(script)):
            part = name.partition("_")[2].lower()
            if name in _SEPARATE or name in known or re.search(rf"\b{name}=", script):
                continue
            if name == "GITHUB_WORKSPACE":
                before += f'export GITHUB_WORKSPACE="{_above(folder)}"\n'
            elif name == "RUNNER_TEMP":
                before += 'export RUNNER_TEMP="${TMPDIR:-/tmp}"\n'
            elif name == "GITHUB_ACTIONS":
                self.file.draft.differ((*self.path, "run"), "GITHUB_ACTIONS is not set, because this is not GitHub")
            elif name in ("GITHUB_JOB", "GITHUB_WORKFLOW", "GITHUB_RUN_ID", "RUNNER_OS"):
                term = self._find_runner([part]) if name == "RUNNER_OS" else self._find_github([part])
                if name not in self.wanted:
                    made[name] = literal_variable(term.value) if term.is_static else f"{{{{ {term.code} }}}}"
            else:
                self._from_caller(name, f"${name}")
        return made, before

    def _find_env(self, rest: list[str]) -> Term:
        name = rest[0]
        if not name.isidentifier():
            raise Unconvertible(f"reads env.{name}")
        if name in self.set_by:
            return Term(self.output(self.set_by[name], name), "text")
        if not self.in_variables:
            return Term(f"env.{name}" if name in self.env else f"(env.{name} | default(''))", "text")
        if name not in self.env:
            return static("")
        if "${{" in (text := scalar_text(self.env[name])):
            raise Unconvertible(f"uses the computed variable {name} in another one")
        return static(text)

    def _find_secrets(self, rest: list[str]) -> Term:
        name = rest[0]
        if not name.isidentifier():
            raise Unconvertible(f"reads secrets.{name}")
        self.file.draft.differ(self.path, f"the secret {name} is the variable {name} here, which has to be set")
        if self.in_variables:
            return Term(f"${{{name}}}", "secret")
        self.secrets[name] = None
        return Term(f"env.{name}", "text")

    def _find_inputs(self, rest: list[str]) -> Term:
        name = rest[0]
        if name not in self.file.inputs:
            raise Unconvertible(f"reads the input {name}, which is not declared")
        kind = {"boolean": "bool", "number": "number"}.get(self.file.inputs[name], "text")
        return Term(f"inputs.{name}" if name.isidentifier() else f"inputs['{name}']", kind)

    def _find_matrix(self, rest: list[str]) -> Term:
        names = [each.replace("-", "_") if not depth else each for depth, each in enumerate(rest)]
        if self.values and all(value is None for value in self.values.values()):
            if names[0] not in self.values:
                return static("")
            return Term("matrix." + ".".join(names), "any" if len(names) > 1 else "text")
        value: Any = self.values
        for each in names:
            value = value.get(each) if isinstance(value, dict) else None
        return static(value)

    def _find_runner(self, rest: list[str]) -> Term:
        job = self.file.document["jobs"].get(self.path[1]) if len(self.path) > 1 else None
        wanted = job.get("runs-on") if isinstance(job, dict) else None
        if rest == ["os"] and isinstance(wanted, str):
            wanted = self.converter().template(wanted) if "${{" in wanted else wanted
            found = next((name for start, name in _SYSTEMS.items() if wanted.lower().startswith(start)), None)
            if found is not None:
                return static(found)
        if rest[0] not in ("os", "arch", "temp", "tool_cache", "name") or len(rest) != 1:
            raise Unconvertible(f"reads runner.{'.'.join(rest)}")
        return self._from_caller(f"RUNNER_{rest[0].upper()}", f"runner.{rest[0]}")

    def _find_job(self, rest: list[str]) -> Term:
        if rest != ["status"]:
            raise Unconvertible(f"reads job.{'.'.join(rest)}")
        return Term(f"('failure' if {self.status('failure').code} else 'success')", "text")

    def _find_steps(self, rest: list[str]) -> Term:
        step = self.steps.get(rest[0])
        if step is None:
            raise Unconvertible(f"reads the step {rest[0]}, which was left out or is not before it")
        if rest[1:2] == ["outputs"] and len(rest) == 3:
            return Term(self.output(step, rest[2]), "text")
        if rest[1:] in (["outcome"], ["conclusion"]):
            bad = "success" if rest[1] == "conclusion" and step.goes_on else "failure"
            state = f"steps['{step.name}'].status"
            choice = f"('success' if {state} == 'succeeded' else 'skipped' if {state} == 'skipped' else '{bad}')"
            return Term(choice, "text")
        raise Unconvertible(f"reads steps.{'.'.join(rest)}")

    def _find_needs(self, rest: list[str]) -> Term:
        if rest == ["*", "result"]:
            return Term(f"[{', '.join(self._result(each) for each in self.needs)}]", "list")
        job = self.jobs.get(rest[0])
        if job is None or rest[0] not in self.needs:
            raise Unconvertible(f"reads the job {rest[0]}, which it does not need")
        if rest[1:] == ["result"]:
            return Term(self._result(rest[0]), "text")
        if rest[1:2] == ["outputs"] and len(rest) == 3 and rest[2] in job.outputs:
            return job.outputs[rest[2]]
        raise Unconvertible(f"reads needs.{'.'.join(rest)}")

    def _result(self, job_id: str) -> str:
        job = self.jobs[job_id]
        if job.gate is None and not _is_first(job, self.file):
            raise Unconvertible(f"reads the result of the job {job_id}")
        failed = " or ".join(f"steps['{each}'].status not in ['succeeded', 'skipped']" for each in job.counted)
        skipped = f"'skipped' if steps['{job.gate}'].status == 'skipped' else " if job.gate else ""
        return f"('failure' if {failed} else {skipped}'success')"


def _above(folder: str) -> str:
    """Return the folder of the workflow, as a shell in another one below it sees it. Raises Unconvertible."""
    parts = [part for part in folder.split("/") if part not in ("", ".")]
    if folder.startswith("/") or ".." in parts or "{{" in folder:
        raise Unconvertible("uses $GITHUB_WORKSPACE in a folder that is not a fixed one below it")
    return f"$(cd {'/'.join(['..'] * len(parts))} && pwd)" if parts else "$PWD"


def _is_first(job: ActionsJob, file: ForeignFile) -> bool:
    """Return whether a job can never be skipped as a whole, because nothing is before it."""
    return not any(file.draft.steps[name].get("depends_on") for name in job.counted[:1])


def sole_expression(text: str) -> str:
    """Return the expression of a text that is one, with or without `${{ }}`."""
    stripped = text.strip()
    if stripped.startswith("${{") and stripped.endswith("}}") and stripped.count("${{") == 1:
        return stripped[3:-2]
    if "${{" in text:
        raise Unconvertible("joins text with an expression where one value is read")
    return stripped


def _mentions_results(node: Any) -> bool:
    if isinstance(node, Name):
        return node.parts[0] == "needs" and "result" in node.parts
    inside = (
        node.sides
        if isinstance(node, BinaryOperation)
        else node.arguments
        if isinstance(node, expressions.FunctionCall)
        else []
    )
    return any(map(_mentions_results, inside))
