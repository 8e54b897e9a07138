"""Templates and conditions, read before anything runs: what is wrong with each, and what it speaks of.

They are parsed and not compiled: the compiler computes what is constant, and `'a' * 9999999999` is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.records import dataclass
from .loader import suggest
from .templates import condition_expression, environment_for, is_simple, names_in, with_subscripts

if TYPE_CHECKING:
    from jinja2 import nodes

# Of one template: past this many a list of problems helps nobody.
MOST_FLAWS = 10


class Flaw(NamedTuple):
    rule: str
    message: str
    suggestion: str | None = None
    is_error: bool = True


@dataclass(frozen=True)
class Around:
    """What is there for a template where it stands."""

    names: Collection[str]
    inputs: Collection[str]
    steps: Collection[str]
    texts: Collection[str] = ()
    """Steps whose output is text, or an object or a list; never a number."""
    hints: dict[str, str] = field(default_factory=dict)
    """For names that are there elsewhere: where."""


class Looked(NamedTuple):
    flaws: list[Flaw]
    mentions: list[tuple[str, str]]
    """`outputs` or `steps`, and the name of the step."""


def look_at_template(text: str, around: Around) -> Looked:
    if is_simple(text):
        return _look_at_names(text, around)
    return _looked(text, around, _parsed_template)


def look_at_condition(text: str, around: Around) -> Looked:
    return _looked(text, around, _parsed_condition)


def _look_at_names(text: str, around: Around) -> Looked:
    """Nothing but plain names: found without Jinja, which takes longer to load than most files to check."""
    flaws: list[Flaw] = []
    spoken: list[tuple[str, str]] = []
    for head, first in names_in(text):
        if head not in around.names:
            flaws.append(_unknown_name(head, around))
        elif first is not None:
            flaws += _look_at_member(head, first, around, spoken)
    return Looked(list(dict.fromkeys(flaws))[:MOST_FLAWS], list(dict.fromkeys(spoken)))


def _looked(text: str, around: Around, parse: Any) -> Looked:
    from jinja2 import TemplateSyntaxError

    try:
        tree = parse(text)
    except TemplateSyntaxError as error:
        line = f" in line {error.lineno} of it" if error.lineno > 1 else ""
        message = f"{_shown(text)} cannot be read{line}: {str(error.message).rstrip('.')}"
        return Looked([Flaw("template/syntax", message, _foreign(text))], [])
    except RecursionError:
        return Looked([Flaw("template/syntax", f"{_shown(text)} is nested too deep")], [])
    walk = _Walk(around)
    walk.through(tree)
    return Looked(list(dict.fromkeys(walk.flaws))[:MOST_FLAWS], list(dict.fromkeys(walk.spoken)))


def _parsed_template(text: str) -> nodes.Node:
    tree: nodes.Node = environment_for(False).parse(with_subscripts(text))
    return tree


def _parsed_condition(text: str) -> nodes.Node:
    from jinja2.parser import Parser

    expression = condition_expression(text)
    if expression is None:
        return _parsed_template(text)
    parser = Parser(environment_for(False), with_subscripts(expression), state="variable")
    tree = parser.parse_expression()
    if not parser.stream.eos:
        parser.fail(f"there is more after its end: {parser.stream.current.value!r}", parser.stream.current.lineno)
    return tree


def _shown(text: str) -> str:
    flat = " ".join(text.split())
    return f"`{flat if len(flat) <= 60 else flat[:59] + '…'}`"


# --- names ------------------------------------------------------------------------------------------------


def _unknown_name(name: str, around: Around) -> Flaw:
    hint = (
        around.hints.get(name)
        or _FOREIGN_NAMES.get(name)
        or suggest(name, sorted(around.names), otherwise="there are ")
    )
    return Flaw("template/unknown-name", f"there is no {name!r} here", hint)


def _look_at_member(head: str, name: str, around: Around, spoken: list[tuple[str, str]]) -> Iterator[Flaw]:
    if head == "inputs" and name not in around.inputs:
        hint = suggest(name, around.inputs, otherwise="there are ")
        yield Flaw("template/unknown-input", f"`inputs.{name}`: `inputs` has no {name!r}", hint)
    elif head in ("outputs", "steps"):
        spoken.append((head, name))


class _Walk:
    def __init__(self, around: Around) -> None:
        self._around = around
        self.flaws: list[Flaw] = []
        self.spoken: list[tuple[str, str]] = []

    def through(self, tree: nodes.Node) -> None:
        from jinja2 import nodes

        found = [tree, *_all_inside(tree)]
        bound = {node.name for node in found if isinstance(node, nodes.Name) and node.ctx != "load"}
        bound |= {node.name for node in found if isinstance(node, nodes.Macro | nodes.NSRef)}
        called = {id(node.node) for node in found if isinstance(node, nodes.Call)}
        known = {*self._around.names, *bound, *environment_for(False).globals, *_OF_JINJA}
        for node in found:
            match node:
                case nodes.Name(ctx="load") if node.name not in known:
                    self.flaws.append(_unknown_name(node.name, self._around))
                case nodes.Filter() if node.name not in environment_for(False).filters:
                    self.flaws.append(_unknown("template/unknown-filter", node.name, environment_for(False).filters))
                case nodes.Test() if node.name not in environment_for(False).tests:
                    self.flaws.append(_unknown("template/unknown-test", node.name, environment_for(False).tests))
                case nodes.Include() | nodes.Import() | nodes.FromImport() | nodes.Extends():
                    self.flaws.append(Flaw("template/syntax", "a template cannot take in other files"))
                case nodes.Getattr() | nodes.Getitem():
                    self._look_at_access(node, bound, is_called=id(node) in called)
                case nodes.Compare():
                    for operand in node.ops:
                        self._look_at_number(node.expr, operand.expr)
                        self._look_at_number(operand.expr, node.expr)
                case nodes.Add() | nodes.Sub() | nodes.Div() | nodes.FloorDiv() | nodes.Pow():
                    self._look_at_number(node.left, node.right)
                    self._look_at_number(node.right, node.left)
                case nodes.Not():
                    self._look_at_truth(node.node)

    def _look_at_access(self, node: Any, bound: set[str], *, is_called: bool) -> None:
        from jinja2 import nodes

        name = _member(node)
        if name is None:
            return
        is_method = isinstance(node, nodes.Getattr)
        if is_called and is_method and name not in _methods():
            hint = _FOREIGN_METHODS.get(name) or suggest(name, _methods())
            self.flaws.append(Flaw("template/unknown-method", f"nothing here has a `.{name}()`", hint))
        elif not is_called and is_method and name == "length":
            hint = "write `| length`"
            message = "`.length` is what JavaScript calls it; here it is a key of an object"
            self.flaws.append(Flaw("template/foreign", message, hint, is_error=False))
        head = node.node
        if not isinstance(head, nodes.Name) or head.name in bound or head.name not in self._around.names:
            return
        if is_called and is_method and name in dir(dict) and name not in self._around.steps:
            return
        self.flaws += _look_at_member(head.name, name, self._around, self.spoken)

    def _text_of(self, node: Any) -> str | None:
        """How it is written, where it is text whatever is printed."""
        from jinja2 import nodes

        if isinstance(node, nodes.Name) and node.name == "output" and "output" in self._around.texts:
            return "output"
        if isinstance(node, nodes.Getattr | nodes.Getitem) and isinstance(node.node, nodes.Name):
            name = _member(node)
            if node.node.name == "outputs" and name in self._around.texts:
                return f"outputs.{name}"
        return None

    def _look_at_number(self, node: Any, other: Any) -> None:
        from jinja2 import nodes

        written = self._text_of(node)
        value = other.value if isinstance(other, nodes.Const) else ""
        if written is None or not isinstance(value, bool | int | float):
            return
        kind = "bool" if isinstance(value, bool) else "float" if isinstance(value, float) else "int"
        hint = f"write `{written} | {kind}`, or say `output_format: json` at its step"
        shown = str(value).lower() if isinstance(value, bool) else value
        self.flaws.append(Flaw("template/text-compared", f"`{written}` is text, and {shown} is not", hint))

    def _look_at_truth(self, node: Any) -> None:
        if (written := self._text_of(node)) is not None:
            message = f"`not {written}` only asks whether the text is empty; `false` is text as well"
            hint = f"write `not {written} | bool`"
            self.flaws.append(Flaw("template/text-compared", message, hint, is_error=False))


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


def _unknown(rule: str, name: str, known: Collection[str]) -> Flaw:
    hint = _FOREIGN_FILTERS.get(name) or suggest(name, known)
    return Flaw(rule, f"there is no {rule.rpartition('-')[2]} {name!r}", hint)


@cache
def _methods() -> frozenset[str]:
    """What can be called on a value, or on what Jinja itself gives."""
    kinds: tuple[type, ...] = (str, list, dict, int, float, tuple, range)
    of_values = {name for kind in kinds for name in dir(kind) if not name.startswith("_")}
    return frozenset(of_values | {"cycle", "changed", "next", "reset", "super"})


# --- what other languages write ---------------------------------------------------------------------------

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
    (re.compile(r"\|\s*\w+\s*:"), "arguments of a filter stand in parentheses here: `| default('x')`"),
]
_FOREIGN_NAMES = {
    "null": "write `none`",
    "undefined": "write `x is not defined`",
    "JSON": "write `| tojson` or `| fromjson`",
    "Math": "use filters: `round`, `abs`, `max`, `min`",
    "process": "the environment is `env`",
    "secrets": "the environment is `env`; a step asks for a secret by its own `env`",
    "always": "a step runs whatever became of those before it if they say `continue_on_failure`",
    "args": "`args` is there in the `exec` and `stdin` of a tool",
    "arguments": "`arguments` is there in the `exec` and `stdin` of a tool",
    "output": "`output` is there in `fail_if` and `transform`; what another step said is `outputs.NAME`",
}
_FOREIGN_METHODS = {
    "includes": "write `'x' in y`",
    "contains": "write `'x' in y`",
    "indexOf": "write `'x' in y`, or `.find('x')`",
    "toUpperCase": "write `| upper`",
    "toLowerCase": "write `| lower`",
    "toString": "write `| string`",
    "trim": "write `| trim`",
    "startsWith": "write `.startswith('x')`",
    "endsWith": "write `.endswith('x')`",
    "map": "write `| map(attribute='x')`",
    "filter": "write `| selectattr('x')`",
    "some": "write `| selectattr('x') | list | length > 0`",
    "every": "write `| rejectattr('x') | list | length == 0`",
    "parse": "write `| fromjson`",
    "stringify": "write `| tojson`",
    "match": "compare with `in`, `.startswith('x')` or `.endswith('x')`",
    "slice": "write `x[1:3]`",
}
_FOREIGN_FILTERS = {
    "json": "write `| tojson`",
    "to_json": "write `| tojson`",
    "from_json": "write `| fromjson`",
    "parse_json": "write `| fromjson`",
    "size": "write `| length`",
    "upcase": "write `| upper`",
    "downcase": "write `| lower`",
    "strip": "write `| trim`",
    "append": "write `x ~ 'y'`",
    "prepend": "write `'y' ~ x`",
    "split": "write `x.split(',')`",
    "plus": "write `x + 1`",
    "minus": "write `x - 1`",
    "number": "write `| int` or `| float`",
    "to_number": "write `| int` or `| float`",
    "boolean": "write `| bool`",
}


def _foreign(text: str) -> str | None:
    """What may have been meant, where it is written as in JavaScript or Liquid."""
    outside = re.sub(r"'[^']*'|\"[^\"]*\"", "''", text)
    return next((hint for pattern, hint in _FOREIGN_WRITING if pattern.search(outside)), None)
