"""Expressions of GitHub Actions (`${{ … }}` and `if:`) as expressions of our templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .common import Unconvertible, in_quotes, literal, scalar_text

DEPTH_LIMIT, TOKENS_LIMIT = 40, 300
INSIDE_LIMIT = 300  # expressions in one text
STATUS_FUNCTIONS = ("success", "failure", "always", "cancelled")

_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?(?:0x[0-9a-fA-F]+|[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?))"
    r"|(?P<text>'(?:[^']|'')*')|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)"
    r"|(?P<mark>&&|\|\||[!=<>]=|[!<>().,\[\]*]))"
)
_INSIDE = re.compile(r"\$\{\{((?:[^'}]|'[^']*'|\}(?!\}))*)\}\}")


class Term(NamedTuple):
    """An expression of ours: its kind is text, number, bool, null, list, or any."""

    code: str
    kind: str
    value: Any = None
    is_static: bool = False


class FunctionCall(NamedTuple):
    name: str
    arguments: list[Any]


class Name(NamedTuple):
    parts: list[Any]  # texts, numbers, `*`, or nodes


class BinaryOperation(NamedTuple):
    mark: str
    sides: list[Any]


Lookup = Callable[[list[Any]], Term]  # raises Unconvertible
Status = Callable[[str], Term]


def static(value: Any) -> Term:
    """Return a term of a value that is known."""
    if isinstance(value, bool):
        return Term("true" if value else "false", "bool", value, True)
    if isinstance(value, int | float):
        return Term(str(value), "number", value, True)
    if value is None:
        return Term("''", "null", None, True)
    if isinstance(value, list):
        terms = [static(each) for each in value]
        return Term(f"[{', '.join(each.code for each in terms)}]", "list", value, True)
    if not isinstance(value, str):
        raise Unconvertible("uses a mapping as a value")
    return Term(in_quotes(value), "text", value, True)


def parse(text: str) -> Any:
    """Return the tree of an expression. Raises Unconvertible."""
    return _ExpressionParser(text).whole()


class _ExpressionParser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at, self._depth = 0, 0
        text = text.strip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise Unconvertible(f"has an expression that cannot be read: {text[at : at + 20]!r}")
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
            if len(self._tokens) > TOKENS_LIMIT:
                raise Unconvertible("has an expression that is too long")
        self._tokens.append(("end", ""))

    def whole(self) -> Any:
        node = self._binary(0)
        if self._tokens[0][0] != "end":
            raise Unconvertible(f"has an expression that cannot be read at {self._tokens[0][1]!r}")
        return node

    def _take(self, mark: str) -> bool:
        if self._tokens[0] == ("mark", mark):
            self._tokens.pop(0)
            return True
        return False

    def _need(self, mark: str) -> None:
        if not self._take(mark):
            raise Unconvertible(f"has an expression that cannot be read: {mark!r} is missing")

    _LEVELS = (("||",), ("&&",), ("==", "!="), ("<", "<=", ">", ">="))

    def _binary(self, level: int) -> Any:
        if level == len(self._LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._tokens[0][0] == "mark" and self._tokens[0][1] in self._LEVELS[level]:
            mark = self._tokens.pop(0)[1]
            left = BinaryOperation(mark, [left, self._binary(level + 1)])
        return left

    def _unary(self) -> Any:
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise Unconvertible("has an expression that is nested too deep")
        node = BinaryOperation("!", [self._unary()]) if self._take("!") else self._postfix()
        self._depth -= 1
        return node

    def _postfix(self) -> Any:
        node = self._primary()
        while True:
            if self._take("."):
                kind, text = self._tokens.pop(0)
                if kind != "name" and text != "*":
                    raise Unconvertible("has an expression that cannot be read after a dot")
                node = self._member(node, text)
            elif self._take("["):
                inner = "*" if self._take("*") else self._binary(0)
                node = self._member(node, inner.value if isinstance(inner, Term) else inner)
                self._need("]")
            else:
                return node

    def _member(self, node: Any, part: Any) -> Any:
        if not isinstance(node, Name):
            raise Unconvertible("takes a part of a computed value")
        return Name([*node.parts, part])

    def _primary(self) -> Any:
        kind, text = self._tokens.pop(0)
        if kind == "number":
            return static(int(text, 16) if "0x" in text else float(text) if re.search(r"[.eE]", text) else int(text))
        if kind == "text":
            return static(text[1:-1].replace("''", "'"))
        if kind == "name":
            if text in ("true", "false", "null"):
                return static({"true": True, "false": False, "null": None}[text])
            return FunctionCall(text.lower(), self._arguments()) if self._take("(") else Name([text])
        if text == "(":
            node = self._binary(0)
            self._need(")")
            return node
        raise Unconvertible(f"has an expression that cannot be read at {text or 'its end'!r}")

    def _arguments(self) -> list[Any]:
        made: list[Any] = []
        if self._take(")"):
            return made
        while True:
            made.append(self._binary(0))
            if self._take(")"):
                return made
            self._need(",")


def uses_status(node: Any) -> bool:
    """Return whether an expression calls `success()` or the like, which replaces the default `success()`."""
    if isinstance(node, FunctionCall):
        return node.name in STATUS_FUNCTIONS or any(map(uses_status, node.arguments))
    return isinstance(node, BinaryOperation) and any(map(uses_status, node.sides))


def without_success(node: Any) -> Any:
    """Return a condition without the `success()` that it is joined to by `&&`; None if nothing is left."""
    if node == FunctionCall("success", []):
        return None
    if isinstance(node, BinaryOperation) and node.mark == "&&":
        left, right = (without_success(side) for side in node.sides)
        return right if left is None else left if right is None else BinaryOperation("&&", [left, right])
    return node


def without_parentheses(code: str) -> str:
    """Return an expression without parentheses around all of it."""
    outside = re.sub(r"'[^']*'|\"[^\"]*\"", lambda found: "_" * len(found[0]), code)
    depth = 0
    for at, mark in enumerate(outside):
        depth += (mark == "(") - (mark == ")")
        if depth == 0:
            return code[1:-1] if at == len(code) - 1 and code[0] == "(" else code
    return code


class Converter:
    """Expressions in one place of a file."""

    def __init__(self, lookup: Lookup, status: Status) -> None:
        self._lookup, self._status = lookup, status

    def condition(self, node: Any) -> str | bool:
        """Return a condition of ours."""
        term = self.term(node)
        return bool(term.value) if term.is_static else without_parentheses(self._truth(term))

    def term(self, node: Any) -> Term:
        if isinstance(node, Term):
            return node
        if isinstance(node, FunctionCall):
            return self._call(node)
        if isinstance(node, Name):
            return self._lookup(
                [part if isinstance(part, str | int | float) else self._index(part) for part in node.parts]
            )
        sides = [self._open(side) for side in node.sides]
        if node.mark == "!":
            if sides[0].is_static:
                return static(not sides[0].value)
            return Term(f"not {sides[0].code}" if sides[0].code.isidentifier() else f"not ({sides[0].code})", "bool")
        if node.mark in ("&&", "||"):
            if sides[0].is_static:
                return sides[1] if bool(sides[0].value) == (node.mark == "&&") else sides[0]
            kinds = {side.kind for side in sides}
            word = "and" if node.mark == "&&" else "or"
            return Term(f"({sides[0].code} {word} {sides[1].code})", kinds.pop() if len(kinds) == 1 else "any")
        return _compare(node.mark, *sides)

    def _open(self, node: Any) -> Term:
        """Return a term that may be part of a larger one."""
        term = self.term(node)
        if term.kind == "secret":
            raise Unconvertible("computes with a secret in a variable")
        return term

    def text(self, text: str) -> Iterator[str | Term]:
        """Yield the parts of a text with expressions in it."""
        end = 0
        if text.count("${{") > INSIDE_LIMIT:
            raise Unconvertible(f"has more than {INSIDE_LIMIT} expressions in one text")
        for found in _INSIDE.finditer(text):
            if found.start() > end:
                yield text[end : found.start()]
            yield self.term(parse(found[1]))
            end = found.end()
        if "${{" in text[end:]:
            raise Unconvertible("has an expression without its end")
        if end < len(text):
            yield text[end:]

    def template(self, text: str, escape: Callable[[str], str] = literal) -> str:
        """Return a text with templates of ours."""
        made = ""
        for part in self.text(text):
            if isinstance(part, str):
                made += escape(part)
            elif part.is_static and part.kind != "list":
                made += escape(scalar_text(part.value))
            elif part.kind == "secret":
                made += part.code
            else:
                made += f"{{{{ {without_parentheses(part.code)} }}}}"
        return made

    def plain(self, text: str) -> str:
        """Return a text all of whose expressions are known. Raises Unconvertible."""
        parts = list(self.text(text))
        if not all(isinstance(part, str) or (part.is_static and part.kind != "list") for part in parts):
            raise Unconvertible("has an expression, and only a fixed text can stand here")
        return "".join(part if isinstance(part, str) else scalar_text(part.value) for part in parts)

    def _index(self, node: Any) -> str:
        term = self.term(node)
        if not term.is_static or not isinstance(term.value, str | int):
            raise Unconvertible("takes a part by a computed name")
        return str(term.value)

    def _truth(self, term: Term) -> str:
        if term.kind in ("text", "any"):  # here, the texts `false` and `no` are not true
            return f"({term.code}) not in ['', false, none, 0]"
        return term.code if term.kind != "null" else "false"

    def _call(self, call: FunctionCall) -> Term:
        if call.name in STATUS_FUNCTIONS:
            return self._status(call.name)
        terms = [self._open(each) for each in call.arguments]
        made = _FUNCTIONS.get(call.name)
        if made is None:
            raise Unconvertible(f"calls {call.name}()")
        least, most, write = made
        if not least <= len(terms) <= most:
            raise Unconvertible(f"calls {call.name}() with {len(terms)} arguments")
        return write(terms)


def _lower(term: Term) -> str:
    if term.is_static:
        return in_quotes(scalar_text(term.value).lower())
    return f"({term.code} | lower)"


def _folded(value: Any) -> Any:
    """Return a value as it is compared with others: text in lower case, all else as a number."""
    if isinstance(value, str):
        return value.lower() or 0.0
    return value if isinstance(value, list) else float(value or 0)


def _compare(mark: str, left: Term, right: Term) -> Term:
    kinds = {left.kind, right.kind}
    if "secret" in kinds or "list" in kinds:
        raise Unconvertible("compares a secret or a list")
    if mark in ("==", "!=") and left.is_static and right.is_static:
        return static((_folded(left.value) == _folded(right.value)) == (mark == "=="))
    if kinds == {"bool"} or kinds == {"number"}:
        return Term(f"({left.code} {mark} {right.code})", "bool")
    if "bool" in kinds:
        raise Unconvertible("compares true or false with text, which is never equal there")
    if "number" in kinds or mark not in ("==", "!="):
        sides = [each.code if each.kind == "number" else f"({each.code} | float)" for each in (left, right)]
        return Term(f"({sides[0]} {mark} {sides[1]})", "bool")
    fixed = next((scalar_text(each.value) for each in (left, right) if each.is_static), None)
    if fixed is not None and fixed.lower() == fixed.upper():  # in which upper and lower case are the same
        return Term(f"({left.code} {mark} {right.code})", "bool")
    return Term(f"({_lower(left)} {mark} {_lower(right)})", "bool")


def _contains(terms: list[Term]) -> Term:
    whole, part = terms
    if whole.kind == "list":
        return Term(f"({part.code} in {whole.code})", "bool")
    if whole.kind == "any":
        raise Unconvertible("calls contains() with a value that is text or a list")
    return Term(f"({_lower(part)} in {_lower(whole)})", "bool")


def _format(terms: list[Term]) -> Term:
    if not terms[0].is_static:
        raise Unconvertible("calls format() with a computed text")
    made: list[str] = []
    for found in re.finditer(r"\{\{|\}\}|\{(\d+)\}|[^{}]+|[{}]", scalar_text(terms[0].value)):
        if found[1] is not None:
            if int(found[1]) + 1 >= len(terms):
                raise Unconvertible("calls format() with too few arguments")
            made.append(terms[int(found[1]) + 1].code)
        elif found[0] in "{}":
            raise Unconvertible("calls format() with a single brace")
        else:
            made.append(in_quotes(found[0][0] if found[0] in ("{{", "}}") else found[0]))
    return Term(f"({' ~ '.join(made or [in_quotes('')])})", "text")


def _from_json(terms: list[Term]) -> Term:
    if not terms[0].is_static:
        return Term(f"({terms[0].code} | fromjson)", "any")
    try:
        return static(json.loads(scalar_text(terms[0].value)))
    except ValueError:
        raise Unconvertible("calls fromJSON() with a text that is no JSON") from None


def _edge(method: str) -> Callable[[list[Term]], Term]:
    return lambda terms: Term(f"{_lower(terms[0])}.{method}({_lower(terms[1])})", "bool")


def _join(terms: list[Term]) -> Term:
    separator = terms[1].code if len(terms) > 1 else "','"
    return Term(f"({terms[0].code} | join({separator}))", "text")


_FUNCTIONS: dict[str, tuple[int, int, Callable[[list[Term]], Term]]] = {
    "contains": (2, 2, _contains),
    "startswith": (2, 2, _edge("startswith")),
    "endswith": (2, 2, _edge("endswith")),
    "format": (1, 20, _format),
    "join": (1, 2, _join),
    "tojson": (1, 1, lambda terms: Term(f"({terms[0].code} | tojson)", "text")),
    "fromjson": (1, 1, _from_json),
}
