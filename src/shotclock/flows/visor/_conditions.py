"""Conditions in JavaScript, `if` and `fail_if` of Visor, as expressions of our templates.

They may have comparisons, `&&`, `||`, `!`, `.length`, keys of values and parentheses.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ...core.value_types import record
from ._expression import (
    Code,
    NameScope,
    Unsayable,
    both,
    bounded,
    either,
    is_missing,
    is_null,
    less_or_more,
    literal,
    same,
    truth,
)

SOURCE_LIMIT, DEPTH_LIMIT = 20_000, 40  # characters, and levels of nesting
_TOKEN = re.compile(
    r"\s+|(?P<number>\d{1,15}(?:\.\d{1,15})?(?![\w.]))|(?P<text>'[^'\\\n]*'|\"[^\"\\\n]*\")|(?P<name>[A-Za-z_$][\w$]*)"
    r"|(?P<sign>===|!==|==|!=|<=|>=|&&|\|\||\?\.|[-<>!.()\[\]])"
)
_EQUAL = {"===": False, "==": False, "!==": True, "!=": True}
_ORDERED = ("<", ">", "<=", ">=")
_CONSTANTS = {"true": True, "false": False, "null": None, "undefined": None}


class _Token(NamedTuple):
    kind: str
    text: str


class _Term(NamedTuple):
    code: Code
    word: str = ""  # `null` or `undefined`, if it is that
    is_joined: bool = False  # of `&&` or `||`: its truth is known, not its value


def condition(source: str, scope: NameScope) -> str:
    """Return a condition that holds where that of JavaScript is true. Raises Unsayable."""
    if len(source) > SOURCE_LIMIT:
        raise Unsayable(f"a condition of more than {SOURCE_LIMIT} characters")
    reader = _ConditionReader(_tokens(source), scope)
    made = truth(reader.either().code)
    reader.take("")
    return bounded(made).text


def _tokens(source: str) -> list[_Token]:
    found, at = [], 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            raise Unsayable(f"{source[at : at + 20]!r} is not converted")
        if match.lastgroup:
            found.append(_Token(match.lastgroup, match.group()))
        at = match.end()
    return [*found, _Token("end", "")]


@record
class _ConditionReader:
    tokens: list[_Token]
    scope: NameScope
    at: int = 0
    depth: int = 0

    @property
    def sign(self) -> str:
        """Return the next token, empty if it is no sign."""
        return self.tokens[self.at].text if self.tokens[self.at].kind == "sign" else ""

    def take(self, expected: str | None = None) -> _Token:
        token = self.tokens[self.at]
        if expected is not None and (token.text != expected or token.kind == "text"):
            raise Unsayable(f"{token.text!r} is not converted there" if token.text else "a condition that ends early")
        self.at += token.kind != "end"
        return token

    def either(self) -> _Term:
        return self._joined("||")

    def _joined(self, sign: str) -> _Term:
        read = self._comparison if sign == "&&" else lambda: self._joined("&&")
        term = read()
        while self.sign == sign:
            self.take()
            join = both if sign == "&&" else either
            term = _Term(bounded(join(truth(term.code), truth(read().code))), is_joined=True)
        return term

    def _comparison(self) -> _Term:
        left = self._unary()
        sign = self.sign
        if sign not in _EQUAL and sign not in _ORDERED:
            return left
        self.take()
        right = self._unary()
        if self.sign in _EQUAL or self.sign in _ORDERED:
            raise Unsayable(f"`{sign}` twice in a row")
        if left.is_joined or right.is_joined:
            raise Unsayable("a comparison of the value of `&&` or `||`")
        if sign in _ORDERED:
            return _Term(less_or_more(left.code, sign, right.code))
        return _Term(_equality(sign, left, right))

    def _unary(self) -> _Term:
        self.depth += 1
        if self.depth > DEPTH_LIMIT:
            raise Unsayable(f"more than {DEPTH_LIMIT} levels of nesting")
        try:
            if self.sign == "!":
                self.take()
                return _Term(truth(self._unary().code, is_negated=True))
            if self.sign == "-":
                self.take()
                number = self._primary().code.literal
                if isinstance(number, int | float):
                    return _Term(literal(-number))
                raise Unsayable("`-` before a value")
            return self._with_keys(self._primary())
        finally:
            self.depth -= 1

    def _with_keys(self, term: _Term) -> _Term:
        code, is_optional = term.code, False
        while self.sign in (".", "?.", "["):
            if term.is_joined:
                raise Unsayable("a key of the value of `&&` or `||`")
            sign = self.take().text
            is_optional = is_optional or sign == "?."
            if sign == "[" or self.sign == "[":
                self.at += sign != "["
                code = self._item(code, is_optional)
                self.take("]")
            else:
                name = self.take()
                if name.kind != "name":
                    raise Unsayable(f"{name.text!r} is no name of a key")
                code = self._member(code, name.text, is_optional)
            term = _Term(code)
        if self.sign == "(":
            raise Unsayable("a call of a function or a method")
        return term

    def _member(self, code: Code, name: str, is_optional: bool) -> Code:
        if name != "length":
            return self.scope.member(code, name, is_optional=is_optional)
        # The length of nothing is nothing, and not 0.
        guard = f"{code.as_value} is not none" if is_optional and code.kind not in ("list", "text") else ""
        return Code(f"{code.operand} | length", "number", is_tight=False, is_filtered=True, guard=guard)

    def _item(self, code: Code, is_optional: bool) -> Code:
        key = self.take()
        if key.kind == "text":
            return self._member(code, key.text[1:-1], is_optional)
        if key.kind != "number" or not key.text.isdecimal():
            raise Unsayable("a key that is computed")
        if code.path in (("outputs",), ("env",), ("inputs",)):
            raise Unsayable("a number as the name of a key")
        written = f"({code.operand} | default([], true))" if is_optional else code.operand
        return Code(f"{written}[{int(key.text)}]", may_miss=True)

    def _primary(self) -> _Term:
        token = self.take()
        if token.kind == "number":
            return _Term(literal(int(token.text) if token.text.isdecimal() else float(token.text)))
        if token.kind == "text":
            return _Term(literal(token.text[1:-1]))
        if token.kind == "name":
            if token.text in _CONSTANTS:
                return _Term(literal(_CONSTANTS[token.text]), token.text if token.text[0] in "nu" else "")
            if self.sign == "(":
                raise Unsayable(f"the function `{token.text}()`")
            return _Term(self.scope.head(token.text))
        if token.text == "(":
            term = self.either()
            self.take(")")
            return term if term.code.is_tight else term._replace(code=_in_parentheses(term.code))
        raise Unsayable(f"{token.text!r} is not converted there" if token.text else "a condition that ends early")


def _in_parentheses(code: Code) -> Code:
    return Code(code.operand, code.kind) if code.kind == "boolean" else code


def _equality(sign: str, left: _Term, right: _Term) -> Code:
    is_negated, is_strict = _EQUAL[sign], len(sign) == 3
    for one, other in ((left, right), (right, left)):
        if other.word == "undefined":
            return (is_missing if is_strict else is_null)(one.code, is_negated=is_negated)
        if other.word == "null" and not is_strict:
            return is_null(one.code, is_negated=is_negated)
    if not is_strict and not (left.code.kind == right.code.kind != "any"):
        for code in (left.code, right.code):
            if code.literal is not None and not (isinstance(code.literal, str) and _is_plain_word(code.literal)):
                raise Unsayable(f"`{sign}` between values of two types, which JavaScript converts: write `{sign}=`")
    return same(left.code, right.code, is_negated=is_negated)


def _is_plain_word(text: str) -> bool:
    """Return whether no value of another type is converted to this text."""
    return text[:1].isalpha() and text not in ("true", "false", "null", "NaN", "Infinity")
