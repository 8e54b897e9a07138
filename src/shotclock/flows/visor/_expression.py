"""Expressions of our templates that mean the same as those of JavaScript and Liquid.

The languages disagree about what is true, what is equal and what a missing value is. Where ours cannot say the same,
the expression is refused (Unsayable). Where a value has a type that the author did not mean, the expression fails when
it is evaluated, and does not answer something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from ...core.value_types import field, record, replace, value

Kind = Literal["any", "boolean", "number", "text", "list"]
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A name that Python's values have as well would give their method where the key is missing.
_OF_PYTHON = frozenset(name for kind in (dict, str, list, int, float) for name in dir(kind))
LENGTH_LIMIT = 4000  # characters of one expression: values are written once for each use


class Unsayable(ValueError):
    """What the foreign expression says cannot be said in ours, and why."""


@value
class Code:
    """An expression of a template, with what is known of its value."""

    text: str
    kind: Kind = "any"
    is_tight: bool = True  # needs no parentheses as an operand
    may_miss: bool = False  # is undefined where there is no such key
    path: tuple[str, ...] = ()  # the plain name that it is: `outputs`, `build`
    printed: bool = False  # the whole output of a command: a number in it is text here, and a number there
    literal: Any = None  # the value of a literal
    is_filtered: bool = False  # ends in a filter, which binds more tightly than a comparison
    guard: str = ""  # the condition under which there is a value at all

    @property
    def operand(self) -> str:
        if self.guard:
            return f"({self.text} if {self.guard} else none)"
        return self.text if self.is_tight else f"({self.text})"

    @property
    def compared(self) -> str:
        """Return the expression as one side of a comparison, which its guard stands before."""
        return self.text if self.is_filtered or self.is_tight else f"({self.text})"

    @property
    def as_value(self) -> str:
        """Return the expression with null for a missing value, as one side of a comparison."""
        return f"{self.operand} | default(none)" if self.may_miss else self.compared if not self.guard else self.operand


def literal(value: Any) -> Code:
    if value is None or isinstance(value, bool):
        return Code({None: "none", True: "true", False: "false"}[value], "boolean" if value is not None else "any")
    if isinstance(value, int | float):
        return Code(repr(value), "number", is_tight=value >= 0, literal=value)
    return Code(_quoted(value), "text", literal=value)


def _quoted(text: str) -> str:
    if any(mark in text for mark in ("{{", "}}", "{%", "%}")):
        raise Unsayable("a text with the braces of a template in it")
    if text.isprintable() and "'" not in text and "\\" not in text:
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=False)


# --- names -------------------------------------------------------------------------------------------------


@record
class NameScope:
    """The names that a foreign expression may use, and what they are here."""

    steps: Mapping[str, str]  # the type of each step by its name
    inputs: Mapping[str, str] = field(default_factory=dict)  # the type of each input
    output: Kind | None = None  # the kind of `output`, if there is one
    output_printed: bool = False
    has_args: bool = False
    bound: dict[str, Code] = field(default_factory=dict)

    def head(self, name: str) -> Code:
        """Return the expression of a name. Raises Unsayable for one without a counterpart."""
        if name in self.bound:
            return self.bound[name]
        if name in ("outputs", "outputs_raw", "inputs", "env") or (name == "args" and self.has_args):
            return Code("steps" if name == "outputs_raw" else name, path=(name,))
        if name == "output" and self.output is not None:
            return Code("output", self.output, printed=self.output_printed, path=("output",))
        raise Unsayable(_ABSENT.get(name) or f"there is no `{name}` here")

    def member(self, base: Code, name: str, *, is_optional: bool = False) -> Code:
        """Return a key of a value. Raises Unsayable for a name without a counterpart."""
        if base.path == ("outputs",) or base.path == ("outputs_raw",):
            return self._output_of(base.path[0], name)
        if base.path == ("env",):
            return Code(_with_key("env", name), "text", may_miss=True, path=("env", name))
        if base.path == ("inputs",):
            if name not in self.inputs:
                raise Unsayable(f"the file declares no input `{name}`")
            kinds: dict[str, Kind] = {"string": "text", "number": "number", "integer": "number", "array": "list"}
            kind = kinds.get(self.inputs[name], "boolean" if self.inputs[name] == "boolean" else "any")
            # An input that was not given is null here.
            return Code(_with_key("inputs", name), kind if kind == "any" else "any", path=("inputs", name))
        if base.path[:1] == ("outputs",) and len(base.path) == 2 and not base.path[1].startswith("\0"):
            of = self.steps[base.path[1]]
            if of == "human-input":
                if name == "text":
                    return replace(base, kind="text", path=("outputs", "\0" + base.path[1]))
                raise Unsayable(f"the answer of a person is its text, without `{name}`")
            if of == "command" and name in ("exit_code", "exitCode"):
                return Code(_with_key(f"{_with_key('steps', base.path[1])}.exit_code"), "any")
        if name in ("length", "size"):
            raise Unsayable(f"`.{name}` of a value that may be of any type")
        written = f"({base.operand} | default({{}}, true))" if is_optional else base.operand
        if name in _OF_PYTHON:
            return Code(f"{written}.get({_quoted(name)})")
        return Code(_with_key(written, name), may_miss=True, path=(*base.path, name) if base.path else ())

    def _output_of(self, head: str, name: str) -> Code:
        if name not in self.steps:
            raise Unsayable("earlier outputs are not kept" if name == "history" else f"the file has no step `{name}`")
        if head == "outputs_raw":
            return Code(f"{_with_key('steps', name)}.output", path=("steps", name))
        is_printed = self.steps[name] == "command"
        return Code(_with_key("outputs", name), may_miss=True, printed=is_printed, path=("outputs", name))


_ABSENT = {
    "pr": "there is no pull request here: hand its data over as an input",
    **dict.fromkeys(
        ("files", "filesChanged", "filesCount"), "there is no pull request here: hand its files over as an input"
    ),
    **dict.fromkeys(("branch", "baseBranch"), "there is no pull request here: hand the branch over as an input"),
    "event": "there are no events here: hand the data over as an input",
    "memory": "there is no memory between steps here",
    "outputs_history": "earlier outputs of a step are not kept for templates",
    "conversation": "there is no conversation here: hand its text over as an input",
    "issues": "issues of a review are not counted here: write `output.issues`",
    "metadata": "there is no `metadata` of issues here",
}


def _with_key(base: str, *names: str) -> str:
    for name in names:
        base += f".{name}" if _IDENTIFIER.fullmatch(name) else f"[{_quoted(name)}]"
    return base


# --- truth and equality ------------------------------------------------------------------------------------

_FALSE = "[none, false, 0, '']"
# A command that prints `false` gives text here, and false there.
_FALSE_PRINTED = "[none, false, 0, '', 'false', '0', 'null']"


def truth(code: Code, *, is_negated: bool = False) -> Code:
    """Return whether JavaScript takes a value for true."""
    if code.kind == "boolean":
        return Code(f"not {code.operand}", "boolean", is_tight=False) if is_negated else code
    if code.kind == "list":
        return literal(not is_negated)
    if code.kind == "number":
        return _guarded(code, f"{code.compared} {'==' if is_negated else '!='} 0", is_negated)
    if code.kind == "text":
        base = f"{code.operand} | default('')" if code.may_miss else code.operand
        return Code(f"{base} {'==' if is_negated else '!='} ''", "boolean", is_tight=False)
    values = _FALSE_PRINTED if code.printed else _FALSE
    return Code(f"{code.as_value} {'in' if is_negated else 'not in'} {values}", "boolean", is_tight=False)


def _guarded(code: Code, test: str, is_negated: bool) -> Code:
    """Return a test of a value that may not be there. Then it does not hold, and its opposite does."""
    if code.guard:
        test = f"not ({code.guard}) or {test}" if is_negated else f"{code.guard} and {test}"
    return Code(test, "boolean", is_tight=False)


def same(left: Code, right: Code, *, is_negated: bool = False) -> Code:
    """Return whether two values are strictly equal in JavaScript. One of them is a literal, or both are of one type."""
    if right.text in ("none", "true", "false") or right.literal is not None:
        return _same_as_literal(left, right, is_negated)
    if left.text in ("none", "true", "false") or left.literal is not None:
        return _same_as_literal(right, left, is_negated)
    if left.kind == right.kind != "any" and left.kind != "list":
        return Code(f"{left.as_value} {'!=' if is_negated else '=='} {right.as_value}", "boolean", is_tight=False)
    if "text" in (left.kind, right.kind):  # text is equal to nothing but the same text
        return Code(f"{left.as_value} {'!=' if is_negated else '=='} {right.as_value}", "boolean", is_tight=False)
    raise Unsayable("an equality of two values of unknown types: lists and objects are equal by value here")


def _same_as_literal(left: Code, right: Code, is_negated: bool) -> Code:
    sign = "!=" if is_negated else "=="
    if right.text == "none":
        # A null that a command prints is text here.
        test = f"{left.operand} is {'not ' if is_negated else ''}none"
    elif right.text in ("true", "false"):
        if left.printed:
            test = f"{left.as_value} {sign} '{right.text}'"
        else:
            test = f"{left.operand} is {'not ' if is_negated else ''}{right.text}"
    elif isinstance(right.literal, int | float):
        if left.printed:
            test = f"{left.as_value} {sign} '{right.text}'"
        elif left.kind != "number" and right.literal in (0, 1):  # here false is equal to 0, and true to 1
            twin = "true" if right.literal else "false"
            test = f"{left.as_value} {sign} {right.text} {'or' if is_negated else 'and'} "
            test += f"{left.operand} is {'' if is_negated else 'not '}{twin}"
        else:
            written = left.compared if left.guard else left.as_value
            return _guarded(left, f"{written} {sign} {right.text}", is_negated)
    else:
        test = f"{left.as_value} {sign} {right.text}"
    return Code(test, "boolean", is_tight=False)


def is_missing(code: Code, *, is_negated: bool = False) -> Code:
    if not code.may_miss:
        raise Unsayable("`undefined` of a value that is never missing here")
    return Code(f"{code.operand} is {'defined' if is_negated else 'undefined'}", "boolean", is_tight=False)


def is_null(code: Code, *, is_negated: bool = False) -> Code:
    return Code(f"{code.as_value} is {'not ' if is_negated else ''}none", "boolean", is_tight=False)


def less_or_more(left: Code, sign: str, right: Code) -> Code:
    """Return an order. A missing value is in none, and values of two types fail."""
    for code, other in ((left, right), (right, left)):
        if code.kind in ("boolean", "list") or (code.kind == "any" and other.kind not in ("number", "text")):
            raise Unsayable("an order of values of unknown types")
    written = [_as_number(left, right), _as_number(right, left)]
    test = f"{written[0]} {sign} {written[1]}"
    guards = [f"{code.operand} is defined" for code in (left, right) if code.may_miss and not code.printed]
    guards += [code.guard for code in (left, right) if code.guard]
    return Code(" and ".join([*guards, test]), "boolean", is_tight=False)


def _as_number(code: Code, other: Code) -> str:
    return f"{code.operand} | float" if code.printed and other.kind == "number" else code.compared


def both(left: Code, right: Code) -> Code:
    return Code(f"{_inside(left, 'or')} and {_inside(right, 'or')}", "boolean", is_tight=False)


def either(left: Code, right: Code) -> Code:
    return Code(f"{_inside(left, '')} or {_inside(right, '')}", "boolean", is_tight=False)


def _inside(code: Code, looser: str) -> str:
    """Return a condition as an operand of `and` or `or`. Parentheses only where they are needed, or help."""
    outside = re.sub(r"'[^']*'|\"[^\"]*\"|\([^()]*\)", "", code.text)
    needed = " if " in outside or (looser and f" {looser} " in outside)
    return f"({code.text})" if needed else code.text


def bounded(code: Code) -> Code:
    """Return the expression. Raises Unsayable if it has become too long to be read."""
    if len(code.text) > LENGTH_LIMIT:
        raise Unsayable(f"it would be longer than {LENGTH_LIMIT} characters here")
    return code
