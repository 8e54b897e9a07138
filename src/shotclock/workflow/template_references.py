"""The templates of a file: where they stand, what is there for each, and which steps they speak of by name, as in
`outputs.build` and `steps['build'].status`.

An output is there once its step has succeeded. A template that speaks of a step nobody waits for works or fails by
chance, so the linter says so before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.graph import needs, not_before
from ..providers.command import ToolStep
from ..providers.step_type import STEP_TYPES, Scalar, StepPart
from .expressions import Around, look_at_condition, look_at_template
from .loader import Finding, Path_, suggest
from .plan import graph_of, is_per_item
from .schema import WorkflowFile
from .templates import is_template

_MENTIONED = re.compile(r"\b(?<![.\w'\"-])(outputs|steps)(?:\.([\w-]+)|\[['\"]([^'\"]+)['\"]\])")
_EVERYWHERE = frozenset({"outputs", "steps", "inputs", "env", "run"})
_NO_ITEMS = "only a step with `for_each`, or after one that says `for_each: true`, has items"
_BEFORE_ITEMS = "`if`, `for_each` and `transform` are about the whole step: there are no items yet"
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


class Written(NamedTuple):
    """A template or a condition, and what is there for it."""

    path: Path_
    text: str
    around: Around
    is_condition: bool = False


def findings(workflow: WorkflowFile, *, skip: Collection[str] = ()) -> Iterator[Finding]:
    """Of a workflow without circles. `skip` are rules that cannot be told, since part of the file is not known."""
    looked = [
        (
            each.path,
            look_at_condition(each.text, each.around)
            if each.is_condition
            else look_at_template(each.text, each.around),
        )
        for each in _find_templates(workflow)
    ]
    outputs = {
        (name, str(path[1]))
        for path, (_, spoken) in looked
        for _, name in spoken
        if path[0] == "steps" and name in workflow.steps
    }
    not_waited_for = not_before(_before(workflow), outputs)
    for path, (flaws, spoken) in looked:
        for flaw in flaws:
            if flaw.rule not in skip:
                yield Finding(flaw.rule, flaw.message, path, suggestion=flaw.suggestion, is_error=flaw.is_error)
        for kind, name in spoken:
            if name not in workflow.steps:
                yield _unknown(path, kind, name, workflow)
            elif path[0] == "steps" and name != path[1] and (name, path[1]) in not_waited_for:
                what = "may not be there yet" if kind == "outputs" else "may be anything by then"
                message = f"`{kind}.{name}` {what}: nothing makes it wait for {name}"
                hint = f"add {name} to its `depends_on`"
                yield Finding("template/not-waited-for", message, path, suggestion=hint, is_error=False)


def _find_templates(workflow: WorkflowFile) -> Iterator[Written]:
    """Every template and every condition of the file."""
    texts = {name for name, step in workflow.steps.items() if _says_text(workflow, step)}
    base = Around(_EVERYWHERE, workflow.inputs, workflow.steps, texts)
    once = replace(base, hints={"item": _NO_ITEMS, "index": _NO_ITEMS})
    per_item = {name for name, step in workflow.steps.items() if is_per_item(workflow, step)}
    for step_id, step in workflow.steps.items():
        before = replace(base, hints=dict.fromkeys(("item", "index"), _BEFORE_ITEMS)) if step_id in per_item else once
        each = replace(base, names={*_EVERYWHERE, "item", "index"}) if step_id in per_item else once
        for path, text in _texts(step):
            around = before if path[0] in ("if", "for_each", "transform") else each
            if path[0] in ("fail_if", "transform"):
                says = {*texts, "output"} if path[0] == "fail_if" and _is_printed(step) else texts
                around = replace(around, names={*around.names, "output"}, texts=says)
            yield Written(("steps", step_id, *path), text, around, path[0] in _CONDITIONS)
    anywhere = replace(base, names={*_EVERYWHERE, "item", "index"}) if per_item else once
    yield from _plain_texts(("env",), workflow.env, anywhere)
    yield from _plain_texts(("defaults", "env"), workflow.defaults.env, anywhere)
    yield from _plain_texts(("defaults", "cwd"), workflow.defaults.cwd, anywhere)
    for name, tool in workflow.tools.items():
        inside = replace(anywhere, names={*anywhere.names, "args", "arguments"})
        for key, around in (("exec", inside), ("stdin", inside), ("env", anywhere), ("cwd", anywhere)):
            yield from _plain_texts(("tools", name, key), getattr(tool, key), around)
    for name, text in workflow.outputs.items():
        yield from _plain_texts(("outputs", name), text, once)


def _plain_texts(path: Path_, value: Any, around: Around) -> Iterator[Written]:
    for where, text in _templates_in(path, value):
        yield Written(where, text, around)


def _is_printed(step: StepPart) -> bool:
    """Whether what it says is text that nobody has read as JSON."""
    return STEP_TYPES[step.type].prints_text and getattr(step, "output_format", "auto") != "json"


def _says_text(workflow: WorkflowFile, step: StepPart) -> bool:
    return (
        _is_printed(step) and step.transform is None and step.for_each is not True and not is_per_item(workflow, step)
    )


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
    return Finding("template/unknown-step", message, path, suggestion=hint)


def _texts(step: StepPart) -> Iterator[tuple[Path_, str]]:
    written = step.model_dump(exclude_unset=True)
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
