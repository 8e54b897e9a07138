"""Which steps a template speaks of: by name, as in `outputs.build` and `steps['build'].status`.

An output is there once its step has succeeded. A template that speaks of a step nobody waits for works or fails by
chance, so the linter says so before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..core.graph import needs
from .ancestry import not_before
from .loading import Finding, Path_, suggest
from .plan import graph_of
from .schema import AnyStep, Scalar, ToolStep, WorkflowFile
from .templates import is_template

_MENTIONED = re.compile(r"\b(?<![.\w'\"-])(outputs|steps)(?:\.([\w-]+)|\[['\"]([^'\"]+)['\"]\])")
# Always an expression, with or without braces.
_CONDITIONS = {"if", "fail_if"}
# What is no template, whatever it looks like.
_PLAIN = {"description", "tags", "depends_on", "on_fail", "on_success", "output_schema", "approval", "type"}


class Mention(NamedTuple):
    kind: str
    """`outputs` or `steps`."""
    name: str


def mentions(template: str) -> list[Mention]:
    return [Mention(kind, dotted or quoted) for kind, dotted, quoted in _MENTIONED.findall(template)]


def findings(workflow: WorkflowFile) -> Iterator[Finding]:
    """Of a workflow without circles."""
    spoken = [
        (("steps", step_id, *path), mention)
        for step_id, step in workflow.steps.items()
        for path, text in _texts(step)
        for mention in dict.fromkeys(mentions(text))
    ]
    outputs = {(name, str(path[1])) for path, (kind, name) in spoken if kind == "outputs" and name in workflow.steps}
    not_waited_for = not_before(_before(workflow), outputs)
    for path, (kind, name) in spoken:
        if name not in workflow.steps:
            yield _unknown(path, kind, name, workflow)
        elif kind == "outputs" and name != path[1] and (name, path[1]) in not_waited_for:
            message = f"`outputs.{name}` may not be there yet: nothing makes it wait for {name}"
            hint = f"add {name} to its `depends_on`"
            yield Finding("template/not-waited-for", message, path, suggestion=hint, is_error=False)
    for output, text in workflow.outputs.items():
        for kind, name in dict.fromkeys(mentions(text)):
            if name not in workflow.steps:
                yield _unknown(("outputs", output), kind, name, workflow)


def env_texts(workflow: WorkflowFile) -> Iterator[tuple[tuple[str, ...], str]]:
    """Where the file says what variables its steps get, and what it says there."""
    tools = {step.tool for step in workflow.steps.values() if isinstance(step, ToolStep)}
    parts: list[tuple[tuple[str, ...], Mapping[str, Scalar]]] = [
        (("env",), workflow.env),
        (("defaults", "env"), workflow.defaults.env),
        *((("steps", name, "env"), step.env) for name, step in workflow.steps.items()),
        *((("tools", name, "env"), tool.env) for name, tool in workflow.tools.items() if name in tools),
    ]
    for path, env in parts:
        for name, value in env.items():
            if isinstance(value, str):
                yield (*path, name), value


def _unknown(path: Path_, kind: str, name: str, workflow: WorkflowFile) -> Finding:
    message = f"`{kind}.{name}`: there is no step {name!r}"
    dotted = [step_id for step_id in workflow.steps if step_id.startswith(f"{name}.")]
    hint = f"write {kind}['{dotted[0]}']" if dotted else suggest(name, workflow.steps, otherwise="there are ")
    return Finding("template/unknown-step", message, path, suggestion=hint, is_error=False)


def _texts(step: AnyStep) -> Iterator[tuple[Path_, str]]:
    written = step.model_dump(by_alias=True, exclude_unset=True)
    for key, value in written.items():
        if key in _CONDITIONS and isinstance(value, str):
            yield (key,), value
        elif key not in _PLAIN:
            yield from _templates_in((key,), value)


def _templates_in(path: Path_, value: Any) -> Iterator[tuple[Path_, str]]:
    if isinstance(value, str):
        if is_template(value):
            yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _templates_in((*path, key), item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _templates_in((*path, number), item)


def _before(workflow: WorkflowFile) -> dict[str, set[str]]:
    """By step, those that have ended when it starts: what it waits for, and who calls for it or goes back to it."""
    before = {name: needs(groups) for name, groups in graph_of(workflow).items()}
    for name, step in workflow.steps.items():
        for reaction in (step.on_fail or workflow.defaults.on_fail, step.on_success):
            if reaction is not None:
                for called in (*reaction.run, *((reaction.goto,) if reaction.goto else ())):
                    before.setdefault(called, set()).add(name)
    return before
