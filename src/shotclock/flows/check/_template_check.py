"""Checks of templates and conditions before anything runs: their syntax, names and steps.

They are parsed and not compiled: the compiler computes constants, and `'a' * 9999999999` is one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.references import unset_name_message
from ...core.value_types import field, replace, value
from ..file.loader import Finding, Path_, suggest
from ..file.schema import CONDITIONS, WorkflowFile, callers_of, is_template, texts_in
from ..file.templates import (
    condition_expression,
    environment_for,
    is_simple,
    names_in,
    refuse_text_block,
    with_subscripts,
    with_subscripts_in_tags,
)
from ..steps.matrix import combine
from ..steps.provider import STEP_TYPES, StepPart
from .plan import graph_of, is_per_item, needs, not_before

if TYPE_CHECKING:
    from jinja2 import nodes

FINDINGS_EACH = 10


@value
class VisibleNames:
    names: Collection[str]
    inputs: Collection[str]
    steps: Collection[str]
    texts: Collection[str] = ()  # steps whose output is never a number
    axes: Collection[str] = ()  # the names in the combinations of a matrix
    is_command: bool = False
    is_last: bool = False  # in a step of `finally`, which knows how the run has ended so far
    hints: dict[str, str] = field(default_factory=dict)  # where else a name can be used


class Checked(NamedTuple):
    findings: list[Finding]
    mentions: list[tuple[str, str]]  # `outputs` or `steps`, and the step


def check_template(text: str, visible: VisibleNames, *, is_condition: bool = False) -> Checked:
    if is_simple(text) and not is_condition:
        return _check_names(text, visible)
    from jinja2 import TemplateSyntaxError

    try:
        tree = _parse_condition(text) if is_condition else _parse_template(text)
    except TemplateSyntaxError as error:
        line = f" in line {error.lineno} of it" if error.lineno > 1 else ""
        message = f"{_quote(text)} cannot be read{line}: {str(error.message).rstrip('.')}"
        return Checked([_finding("template/syntax", message, _foreign(text))], [])
    except RecursionError:
        return Checked([_finding("template/syntax", f"{_quote(text)} is nested too deep")], [])
    walk = _TreeCheck(visible)
    walk.check(tree)
    return Checked(walk.findings, walk.mentions)


def _check_names(text: str, visible: VisibleNames) -> Checked:
    """Check plain names without Jinja, which takes longer to load than most files to check."""
    findings: list[Finding] = []
    mentions: list[tuple[str, str]] = []
    for head, *parts in names_in(text):
        if head not in visible.names:
            findings.append(_unknown_name(head, visible))
        elif parts:
            findings += _check_member(head, parts[0], visible, mentions)
            findings += _check_step_member(head, parts)
    return Checked(findings, mentions)


def _finding(rule: str, message: str, hint: str | None = None, *, is_error: bool = True) -> Finding:
    return Finding(rule, message, suggestion=hint, is_error=is_error)


def _parse_template(text: str) -> nodes.Node:
    tree: nodes.Node = environment_for(False).parse(with_subscripts_in_tags(text))
    return tree


def _parse_condition(text: str) -> nodes.Node:
    from jinja2.parser import Parser

    expression = condition_expression(text)
    if expression is None:
        return _parse_template(text)
    parser = Parser(environment_for(False), with_subscripts(expression), state="variable")
    tree = parser.parse_expression()
    if not parser.stream.eos:
        parser.fail(f"there is more after its end: {parser.stream.current.value!r}", parser.stream.current.lineno)
    return tree


def _quote(text: str) -> str:
    flat = " ".join(text.split())
    return f"`{flat if len(flat) <= 60 else flat[:59] + '…'}`"


def _unknown_name(name: str, visible: VisibleNames) -> Finding:
    hint = visible.hints.get(name) or _FOREIGN_NAMES.get(name)
    hint = hint or suggest(name, sorted(visible.names), otherwise="there are ")
    return _finding("template/unknown-name", f"there is no {name!r} here", hint)


def _check_member(head: str, name: str, visible: VisibleNames, mentions: list[tuple[str, str]]) -> Iterator[Finding]:
    if head == "inputs" and name not in visible.inputs:
        hint = suggest(name, visible.inputs, otherwise="there are ")
        yield _finding("template/unknown-input", f"`inputs.{name}`: `inputs` has no {name!r}", hint)
    elif head in ("outputs", "steps"):
        mentions.append((head, name))
    elif head in ("matrix", "item") and visible.axes and name not in visible.axes:
        yield _unknown_member(f"{head}.{name}", name, visible.axes)
    elif head in _MEMBERS and name not in _MEMBERS[head]:
        if head == "run" and name in _OF_ENDED_RUN:
            if not visible.is_last:
                hint = "a step of `finally` has it"
                yield _finding("template/unknown-name", f"`run.{name}` is not known before the run's steps end", hint)
        else:
            yield _unknown_member(f"{head}.{name}", name, _MEMBERS[head])


def _check_step_member(head: str, parts: list[str]) -> Iterator[Finding]:
    if head == "run" and parts[0] == "failure" and len(parts) > 1 and parts[1] not in _MEMBERS["run.failure"]:
        yield _unknown_member(f"run.failure.{parts[1]}", parts[1], _MEMBERS["run.failure"])
    if head == "steps" and len(parts) > 1 and parts[1] not in _MEMBERS["steps.NAME"]:
        yield _unknown_member(f"steps.{parts[0]}.{parts[1]}", parts[1], _MEMBERS["steps.NAME"])


def _unknown_member(written: str, name: str, members: Collection[str]) -> Finding:
    hint = suggest(name, members, otherwise="there are ")
    return _finding("template/unknown-name", f"`{written}`: there is no {name!r} in it", hint)


class _TreeCheck:
    def __init__(self, visible: VisibleNames) -> None:
        self._visible = visible
        self.findings: list[Finding] = []
        self.mentions: list[tuple[str, str]] = []

    def check(self, tree: nodes.Node) -> None:
        from jinja2 import nodes

        environment, found = environment_for(False), [tree, *_all_inside(tree)]
        if self._visible.is_command and (refusal := refuse_text_block(tree)) is not None:
            self.findings.append(_finding("template/syntax", refusal))
        bound = {node.name for node in found if isinstance(node, nodes.Name) and node.ctx != "load"}
        bound |= {node.name for node in found if isinstance(node, nodes.Macro | nodes.NSRef)}
        called = {id(node.node) for node in found if isinstance(node, nodes.Call)}
        known = {*self._visible.names, *bound, *environment.globals, *_OF_JINJA}
        for node in found:
            match node:
                case nodes.Name(ctx="load") if node.name not in known:
                    self.findings.append(_unknown_name(node.name, self._visible))
                case nodes.Filter() if node.name not in environment.filters:
                    self.findings.append(_unknown_filter("template/unknown-filter", node.name, environment.filters))
                case nodes.Test() if node.name not in environment.tests:
                    self.findings.append(_unknown_filter("template/unknown-test", node.name, environment.tests))
                case nodes.Include() | nodes.Import() | nodes.FromImport() | nodes.Extends():
                    self.findings.append(_finding("template/syntax", "a template cannot take in other files"))
                case nodes.Getattr() | nodes.Getitem():
                    self._check_access(node, bound, is_called=id(node) in called)
                case nodes.Compare():
                    for operand in node.ops:
                        self._check_number(node.expr, operand.expr)
                        self._check_number(operand.expr, node.expr)
                case nodes.Add() | nodes.Sub() | nodes.Div() | nodes.FloorDiv() | nodes.Pow():
                    self._check_number(node.left, node.right)
                    self._check_number(node.right, node.left)
                case nodes.Not():
                    self._check_truth(node.node)

    def _check_access(self, node: Any, bound: set[str], *, is_called: bool) -> None:
        from jinja2 import nodes

        name = _member(node)
        if name is None:
            return
        is_method = isinstance(node, nodes.Getattr)
        if is_called and is_method and name not in _methods():
            hint = _FOREIGN.get(name) or suggest(name, _methods())
            self.findings.append(_finding("template/unknown-method", f"nothing here has a `.{name}()`", hint))
        elif not is_called and is_method and name == "length":
            message = "`.length` is JavaScript; here it is a key of an object"
            self.findings.append(_finding("template/foreign", message, "write `| length`", is_error=False))
        head = node.node
        if isinstance(head, nodes.Getattr | nodes.Getitem) and isinstance(head.node, nodes.Name):
            if head.node.name not in bound and not is_called and (step := _member(head)) is not None:
                self.findings += _check_step_member(head.node.name, [step, name])
            return
        if not isinstance(head, nodes.Name) or head.name in bound or head.name not in self._visible.names:
            return
        if is_called and is_method and name in dir(dict) and name not in self._visible.steps:
            return
        self.findings += _check_member(head.name, name, self._visible, self.mentions)

    def _text_of(self, node: Any) -> str | None:
        """Return the text of an expression that is always text; None for others."""
        from jinja2 import nodes

        if isinstance(node, nodes.Name) and node.name == "output" and "output" in self._visible.texts:
            return "output"
        if isinstance(node, nodes.Getattr | nodes.Getitem) and isinstance(node.node, nodes.Name):
            name = _member(node)
            if node.node.name == "outputs" and name in self._visible.texts:
                return f"outputs.{name}"
        return None

    def _check_number(self, node: Any, other: Any) -> None:
        from jinja2 import nodes

        written = self._text_of(node)
        value = other.value if isinstance(other, nodes.Const) else ""
        if written is None or not isinstance(value, bool | int | float):
            return
        kind = "bool" if isinstance(value, bool) else "float" if isinstance(value, float) else "int"
        hint = f"write `{written} | {kind}`, or `output_format: json` at its step"
        shown = str(value).lower() if isinstance(value, bool) else value
        self.findings.append(_finding("template/text-compared", f"`{written}` is text, and {shown} is not", hint))

    def _check_truth(self, node: Any) -> None:
        if (written := self._text_of(node)) is not None:
            message = f"`not {written}` is true only for an empty text; `false` is text as well"
            hint = f"write `not {written} | bool`"
            self.findings.append(_finding("template/text-compared", message, hint, is_error=False))


def _all_inside(tree: nodes.Node) -> Iterator[nodes.Node]:
    left = [tree]
    while left:
        for node in left.pop().iter_child_nodes():
            yield node
            left.append(node)


def _member(node: Any) -> str | None:
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return str(node.attr)
    is_text = isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)
    return str(node.arg.value) if is_text else None


def _unknown_filter(rule: str, name: str, known: Collection[str]) -> Finding:
    hint = _FOREIGN.get(name) or suggest(name, known)
    return _finding(rule, f"there is no {rule.rpartition('-')[2]} {name!r}", hint)


@cache
def _methods() -> frozenset[str]:
    kinds: tuple[type, ...] = (str, list, dict, int, float, tuple, range)
    of_values = {name for kind in kinds for name in dir(kind) if not name.startswith("_")}
    return frozenset(of_values | {"cycle", "changed", "next", "reset", "super"})


# An output exists once its step has succeeded. A template that uses a step without waiting for it is reported.

_EVERYWHERE = frozenset({"outputs", "steps", "inputs", "env", "run"})
# Members of names that every file has.
_MEMBERS = {
    "run": ("id", "name"),
    "run.failure": ("step", "code", "message"),
    "deadline": ("remaining",),
    "steps.NAME": ("status", "output", "error", "exit_code", "attempts", "partial"),
}
_OF_ENDED_RUN = ("status", "failure")
_AROUND = frozenset(
    {"if", "for_each", "matrix", "transform", "fail_if"}
)  # rendered before or after the attempts of a step
_NO_ITEMS = "only a step with `for_each`, or after one that says `for_each: true`, has items"
_NO_MATRIX = "only a step with `matrix` has that"
_BEFORE_ITEMS = "`if`, `for_each` and `transform` are about the whole step: there are no items yet"
_PLAIN = {"description", "tags", "depends_on", "on_fail", "on_success", "output_schema", "approval", "type"}


class Written(NamedTuple):
    path: Path_
    text: str
    visible: VisibleNames
    is_condition: bool = False


def check_templates(workflow: WorkflowFile, *, prompts: Mapping[str, str] = MappingProxyType({})) -> Iterator[Finding]:
    """`prompts` are the texts of prompt files, by step."""
    yield from _check_group(workflow)
    checked = [
        (each.path, check_template(each.text, each.visible, is_condition=each.is_condition))
        for each in _find_templates(workflow, prompts)
    ]
    outputs = {
        (name, str(path[1]))
        for path, (_, mentions) in checked
        for _, name in mentions
        if path[0] == "steps" and name in workflow.steps
    }
    not_waited_for = not_before(_before(workflow), outputs)
    for path, (findings, mentions) in checked:
        for found in list(dict.fromkeys(findings))[:FINDINGS_EACH]:
            yield replace(found, path=path)
        for kind, name in dict.fromkeys(mentions):
            if name not in workflow.steps:
                yield _unknown_step(path, kind, name, workflow)
            elif path[0] == "steps" and name != path[1] and (name, path[1]) in not_waited_for:
                what = "may not be there yet" if kind == "outputs" else "may not be final yet"
                message = f"`{kind}.{name}` {what}: nothing makes it wait for {name}"
                hint = f"add {name} to its `depends_on`"
                yield Finding("template/not-waited-for", message, path, suggestion=hint, is_error=False)


def find_unset_names(workflow: WorkflowFile, environment: Mapping[str, str]) -> Iterator[tuple[Path_, str]]:
    """Yield the path and a message for each plain `env.NAME` of a variable that is not set."""
    steps = workflow.steps.values()
    if workflow.env_file or any(step.env_file for step in steps):
        return
    envs = [workflow.env, workflow.defaults.env, *(step.env for step in steps)]
    known = {name for env in (*envs, *(tool.env for tool in workflow.tools.values())) for name in env}
    for path, text, _, is_condition in _find_templates(workflow, {}):
        for head, *parts in names_in(text) if is_simple(text) and not is_condition else ():
            if head == "env" and parts and parts[0] not in environment and parts[0] not in known:
                yield path, unset_name_message(parts[0])


def _check_group(workflow: WorkflowFile) -> Iterator[Finding]:
    """The group is known before anything runs, so that only inputs can be in it."""
    if workflow.concurrency is None or not is_template(workflow.concurrency.group):
        return
    path, text = ("concurrency", "group"), workflow.concurrency.group
    if not is_simple(text):
        message = f"{_quote(text)}: a group is text with names of inputs, such as `deploy-{{{{ inputs.target }}}}`"
        yield Finding("template/group", message, path)
        return
    for found in _check_names(text, VisibleNames(("inputs",), workflow.inputs, ())).findings[:FINDINGS_EACH]:
        yield replace(found, path=path)


def _find_templates(workflow: WorkflowFile, prompts: Mapping[str, str]) -> Iterator[Written]:
    texts = {name for name, step in workflow.steps.items() if _outputs_text(workflow, step)}
    base = VisibleNames(_EVERYWHERE, workflow.inputs, workflow.steps, texts)
    once = replace(base, hints={"item": _NO_ITEMS, "index": _NO_ITEMS, "matrix": _NO_MATRIX})
    per_item = {name for name, step in workflow.steps.items() if is_per_item(workflow, step)}
    for step_id, step in workflow.steps.items():
        before = (
            replace(base, hints=dict.fromkeys(("item", "index", "matrix"), _BEFORE_ITEMS))
            if step_id in per_item
            else once
        )
        each = replace(base, names={*_EVERYWHERE, "item", "index"}) if step_id in per_item else once
        if step.matrix is not None:
            axes = dict.fromkeys(name for combination in combine(step.matrix) for name in combination)
            each = replace(each, names={*each.names, "matrix"}, axes=axes)
        in_file = [(("prompt_file",), prompts[step_id])] if is_template(prompts.get(step_id, "")) else []
        for path, text in (*_texts(step), *in_file):
            visible = before if path[0] in ("if", "for_each", "matrix", "transform") else each
            if path[0] not in _AROUND:
                visible = replace(visible, names={*visible.names, "deadline"})
            if path[0] in ("fail_if", "transform"):
                texts_here = {*texts, "output"} if path[0] == "fail_if" and _is_printed(step) else texts
                visible = replace(visible, names={*visible.names, "output"}, texts=texts_here)
            visible = replace(visible, is_command=path == ("exec",), is_last=step_id in workflow.finally_)
            yield Written(("steps", step_id, *path), text, visible, path[0] in CONDITIONS)
    anywhere = replace(base, names={*_EVERYWHERE, "item", "index"}) if per_item else once
    if any(step.matrix is not None for step in workflow.steps.values()):
        anywhere = replace(anywhere, names={*anywhere.names, "matrix"})
    yield from _plain_texts(("env",), workflow.env, anywhere)
    yield from _plain_texts(("defaults", "env"), workflow.defaults.env, anywhere)
    yield from _plain_texts(("defaults", "cwd"), workflow.defaults.cwd, anywhere)
    for name, tool in workflow.tools.items():
        inside = replace(anywhere, names={*anywhere.names, "args", "arguments"})
        command = replace(inside, is_command=True)
        for key, visible in (("exec", command), ("stdin", inside), ("env", anywhere), ("cwd", anywhere)):
            yield from _plain_texts(("tools", name, key), getattr(tool, key), visible)
    for name, text in workflow.outputs.items():
        yield from _plain_texts(("outputs", name), text, once)


def _plain_texts(path: Path_, value: Any, visible: VisibleNames) -> Iterator[Written]:
    for where, text in _templates_in(path, value):
        yield Written(where, text, visible)


def _is_printed(step: StepPart) -> bool:
    """Return whether the output is text that is not read as JSON."""
    return STEP_TYPES[step.type].prints_text and getattr(step, "output_format", "auto") != "json"


def _outputs_text(workflow: WorkflowFile, step: StepPart) -> bool:
    return (
        _is_printed(step) and step.transform is None and step.for_each is not True and not is_per_item(workflow, step)
    )


def _unknown_step(path: Path_, kind: str, name: str, workflow: WorkflowFile) -> Finding:
    message = f"`{kind}.{name}`: there is no step {name!r}"
    dotted = [step_id for step_id in workflow.steps if step_id.startswith(f"{name}.")]
    hint = f"write {kind}['{dotted[0]}']" if dotted else suggest(name, workflow.steps, otherwise="there are ")
    return Finding("template/unknown-step", message, path, suggestion=hint)


def _texts(step: StepPart) -> Iterator[tuple[Path_, str]]:
    for key, value in step.model_dump(exclude_unset=True).items():
        if key in CONDITIONS and isinstance(value, str):
            yield (key,), value
        elif key not in _PLAIN:
            yield from _templates_in((key,), value)


def _templates_in(path: Path_, value: Any) -> Iterator[tuple[Path_, str]]:
    return ((where, text) for where, text in texts_in(value, path) if is_template(text))


def _before(workflow: WorkflowFile) -> dict[str, set[str]]:
    """Return, by step, the steps that have ended when it starts: those it waits for and those that call it."""
    before = {name: needs(groups) for name, groups in graph_of(workflow).items()}
    if workflow.finally_:
        last = frozenset(workflow.finally_)
        others = workflow.steps.keys() - last
        before |= {name: needs_ | others if name in last else needs_ for name, needs_ in before.items()}
    for name, callers in callers_of(workflow).items():
        before.setdefault(name, set()).update(callers)
    return before


_OF_JINJA = {"loop", "self", "super", "caller", "varargs", "kwargs"}
_FOREIGN_WRITING = [
    (re.compile(r"&&"), "`&&` is written `and` here"),
    (re.compile(r"\|\|"), "`||` is written `or` here"),
    (re.compile(r"==="), "`===` is written `==` here"),
    (re.compile(r"!=="), "`!==` is written `!=` here"),
    (re.compile(r"=>"), "there are no functions here: use filters such as `map`, `select` and `selectattr`"),
    (re.compile(r"\?[^'\"]*:"), "`a ? b : c` is written `b if a else c` here"),
    (re.compile(r"(?<![=<>])!(?!=)"), "`!` is written `not` here"),
    (re.compile(r"\{%-?\s*assign\b"), "`{% assign … %}` is written `{% set … %}` here"),
    (re.compile(r"\{%-?\s*elsif\b"), "`{% elsif … %}` is written `{% elif … %}` here"),
    (re.compile(r"\{%-?\s*unless\b"), "`{% unless … %}` is written `{% if not … %}` here"),
    (re.compile(r"\|\s*\w+\s*:"), "arguments of a filter are in parentheses here: `| default('x')`"),
]
_FOREIGN_NAMES = {
    "null": "write `none`",
    "undefined": "write `x is not defined`",
    "JSON": "write `| tojson` or `| fromjson`",
    "Math": "use filters: `round`, `abs`, `max`, `min`",
    "process": "the environment is `env`",
    "secrets": "the environment is `env`; a step asks for a secret by its own `env`",
    "always": "to run a step after any end of another, write `depends_on: {NAME: ended}`, or put it into `finally`",
    "args": "`args` is there in the `exec` and `stdin` of a tool",
    "arguments": "`arguments` is there in the `exec` and `stdin` of a tool",
    "output": "`output` is there in `fail_if` and `transform`; the output of another step is `outputs.NAME`",
}
# What to write instead of the methods and filters of JavaScript and Liquid.
_FOREIGN = {
    name: f"write {hint}"
    for hint, names in {
        "`'x' in y`": "includes contains",
        "`'x' in y`, or `.find('x')`": "indexOf",
        "`| upper`": "toUpperCase upcase",
        "`| lower`": "toLowerCase downcase",
        "`| string`": "toString",
        "`| trim`": "trim strip",
        "`.startswith('x')`": "startsWith",
        "`.endswith('x')`": "endsWith",
        "`| map(attribute='x')`": "map",
        "`| selectattr('x')`": "filter",
        "`| selectattr('x') | list | length > 0`": "some",
        "`| rejectattr('x') | list | length == 0`": "every",
        "`| tojson`": "json to_json stringify",
        "`| fromjson`": "from_json parse_json parse",
        "a comparison with `in`, `.startswith('x')` or `.endswith('x')`": "match",
        "`x[1:3]`": "slice",
        "`| length`": "size",
        "`x ~ 'y'`": "append",
        "`'y' ~ x`": "prepend",
        "`x.split(',')`": "split",
        "`x + 1`": "plus",
        "`x - 1`": "minus",
        "`| int` or `| float`": "number to_number",
        "`| bool`": "boolean",
    }.items()
    for name in names.split()
}


def _foreign(text: str) -> str | None:
    """Return how syntax of JavaScript or Liquid is written here."""
    outside = re.sub(r"'[^']*'|\"[^\"]*\"", "''", text)
    return next((hint for pattern, hint in _FOREIGN_WRITING if pattern.search(outside)), None)
