"""The reader of JavaScript expressions: a tree of the part of the language that conditions are written in."""

from __future__ import annotations

import re
from typing import Any

from ...core.value_types import record, value
from .expression import Unsayable

SOURCE_LIMIT, DEPTH_LIMIT = 20_000, 40  # characters, and levels of nesting

_TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n]*|/\*[\s\S]*?\*/)"
    r"|(?P<number>0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<text>'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")"
    r"|(?P<name>[A-Za-z_$][\w$]*)"
    r"|(?P<sign>=>|\?\.(?!\d)|\?\?|===|!==|==|!=|<=|>=|&&|\|\||\*\*|\.\.\.|\+\+|--|[-+*/%]=|[-+*/%<>!?:.,;()\[\]{}=&|^~])"
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f", "v": "\v"}
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("??",),
    ("||",),
    ("&&",),
    ("===", "!==", "==", "!="),
    ("<", ">", "<=", ">="),
    ("+", "-"),
    ("*", "/", "%"),
)
_REFUSED_WORDS = frozenset(
    [
        "function",
        "class",
        "new",
        "await",
        "async",
        "yield",
        "delete",
        "void",
        "in",
        "instanceof",
        "this",
        "while",
        "for",
        "do",
        "switch",
        "try",
        "throw",
        "var",
    ]
)


@value
class SyntaxNode:
    """A node of the tree: its kind and its parts."""

    kind: str
    parts: tuple[Any, ...] = ()


@value
class _Token:
    kind: str
    text: str
    value: Any = None
    after_newline: bool = False


def parse_expression(source: str) -> SyntaxNode:
    """Return the tree of one expression, or of statements of which the last gives the value. Raises Unsayable."""
    if len(source) > SOURCE_LIMIT:
        raise Unsayable(f"a script of more than {SOURCE_LIMIT} characters")
    return _SyntaxParser(_tokens(source)).program()


def _tokens(source: str) -> list[_Token]:
    found: list[_Token] = []
    at, newline = 0, False
    while at < len(source):
        if source[at] == "`":
            parts, at = _template(source, at)
            found.append(_Token("template", "`", parts, newline))
            newline = False
            continue
        match = _TOKEN.match(source, at)
        if match is None:
            raise Unsayable(f"the character {source[at]!r} is not understood")
        kind, text = str(match.lastgroup), match.group()
        if kind == "space":
            newline = newline or "\n" in text
        else:
            if text == "/" and (not found or found[-1].text in ("(", ",", "=", ":", "[", "!", "&&", "||", "?", "=>")):
                raise Unsayable("a regular expression")
            found.append(_Token(kind, text, _value_of(kind, text), newline))
            newline = False
        at = match.end()
    found.append(_Token("end", "", after_newline=True))
    return found


def _value_of(kind: str, text: str) -> Any:
    if kind == "number":
        if text[:2] in ("0x", "0X"):
            return int(text, 16)
        if len(text) > 30:
            raise Unsayable("a number of so many digits")
        if text.isdecimal():
            return int(text)
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise Unsayable("a number of that size")
        return number
    return _unescape(text[1:-1]) if kind == "text" else None


def _unescape(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        written = found[1]
        if written[0] in "ux":
            try:
                made = chr(int(written[1:].strip("{}"), 16))
            except (ValueError, OverflowError):
                raise Unsayable("an escape in a text that is not understood") from None
            if "\ud800" <= made <= "\udfff":
                raise Unsayable("half a character in a text")
            return made
        return "" if written == "\n" else _ESCAPES.get(written, written)

    return re.sub(r"\\(u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[\s\S])", one, text)


def _template(source: str, start: int) -> tuple[list[str | SyntaxNode], int]:
    parts: list[str | SyntaxNode] = []
    at, plain = start + 1, ""
    while at < len(source):
        if source[at] == "`":
            return [*parts, _unescape(plain)], at + 1
        if source.startswith("${", at):
            end, depth = at + 2, 1
            while end < len(source) and depth:
                depth += {"{": 1, "}": -1}.get(source[end], 0)
                if source[end] == "`":
                    raise Unsayable("a template text inside another")
                end += 1
            parts += [_unescape(plain), parse_expression(source[at + 2 : end - 1])]
            at, plain = end, ""
            continue
        step = 2 if source[at] == "\\" else 1
        plain += source[at : at + step]
        at += step
    raise Unsayable("a template text without an end")


@record
class _SyntaxParser:
    tokens: list[_Token]
    at: int = 0
    depth: int = 0

    @property
    def now(self) -> _Token:
        return self.tokens[self.at]

    def take(self, text: str | None = None) -> _Token:
        token = self.now
        if text is not None and (token.text != text or token.kind in ("text", "template")):
            shown = repr(token.text) if token.text else "the end"
            raise Unsayable(f"{shown} where `{text}` was expected")
        if token.kind != "end":
            self.at += 1
        return token

    def is_sign(self, *texts: str) -> bool:
        return self.now.kind in ("sign", "name") and self.now.text in texts

    def ahead(self, count: int) -> _Token:
        return self.tokens[min(self.at + count, len(self.tokens) - 1)]

    # --- statements

    def program(self) -> SyntaxNode:
        made = self.statements(("end",))
        if self.now.kind != "end":
            raise Unsayable(f"{self.now.text!r} is not understood there")
        return made

    def statements(self, ends: tuple[str, ...]) -> SyntaxNode:
        """Return `let` bindings, branches and the value of the last statement, as one expression."""
        self._deeper()
        while self.is_sign(";"):
            self.take()
        try:
            if self.now.kind == "end" or self.is_sign("}"):
                return SyntaxNode("undefined")
            if self.is_sign("const", "let"):
                self.take()
                if self.now.kind != "name":
                    raise Unsayable("a declaration of several names at once")
                name = self.take().text
                self.take("=")
                given = self.expression()
                self._end_of_statement()
                return SyntaxNode("let", (name, given, self.statements(ends)))
            if self.is_sign("if"):
                return self._branch(ends)
            if self.is_sign("return"):
                self.take()
                made = (
                    SyntaxNode("undefined") if self.is_sign(";", "}") or self.now.kind == "end" else self.expression()
                )
                while self.is_sign(";"):
                    self.take()
                return made
            made = self.expression()
            self._end_of_statement()
            if self.now.kind == "end" or self.is_sign("}"):
                return made
            if made.kind == "call" and made.parts[0] == SyntaxNode("name", ("log",)):
                return self.statements(ends)  # it only prints
            raise Unsayable("statements that do something")
        finally:
            self.depth -= 1

    def _branch(self, ends: tuple[str, ...]) -> SyntaxNode:
        self.take("if")
        self.take("(")
        condition = self.expression()
        self.take(")")
        then = self._block()
        if self.is_sign("else"):
            self.take()
            otherwise = self._block()
            while self.is_sign(";"):
                self.take()
            if self.now.kind != "end" and not self.is_sign("}"):
                raise Unsayable("statements after `else`")
        else:
            otherwise = self.statements(ends)
        return SyntaxNode("choice", (condition, then, otherwise))

    def _block(self) -> SyntaxNode:
        if not self.is_sign("{"):
            if not self.is_sign("return", "if"):
                raise Unsayable("a branch that does not return")
            if self.is_sign("if"):
                return self._branch(())
            self.take("return")
            made = self.expression()
            self._end_of_statement()
            return made
        self.take("{")
        made = self.statements(("}",))
        self.take("}")
        return made

    def _end_of_statement(self) -> None:
        if self.is_sign(";", ","):
            self.take()
        elif not (self.now.after_newline or self.is_sign("}")):
            raise Unsayable(f"{self.now.text!r} is not understood there")

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > DEPTH_LIMIT:
            raise Unsayable(f"more than {DEPTH_LIMIT} levels of nesting")

    # --- expressions

    def expression(self) -> SyntaxNode:
        self._deeper()
        try:
            made = self._binary(0)
            if not self.is_sign("?"):
                return made
            self.take("?")
            then = self.expression()
            self.take(":")
            return SyntaxNode("choice", (made, then, self.expression()))
        finally:
            self.depth -= 1

    def _binary(self, level: int) -> SyntaxNode:
        if level == len(_LEVELS):
            return self._unary()
        made = self._binary(level + 1)
        while self.is_sign(*_LEVELS[level]):
            sign = self.take().text
            made = SyntaxNode("binary", (sign, made, self._binary(level + 1)))
        return made

    def _unary(self) -> SyntaxNode:
        self._deeper()
        try:
            if self.is_sign("!", "-", "+", "typeof"):
                sign = self.take().text
                return SyntaxNode("unary", (sign, self._unary()))
            return self._postfix()
        finally:
            self.depth -= 1

    def _postfix(self) -> SyntaxNode:
        made, is_optional = self._primary(), False
        while True:
            if self.is_sign("?."):
                self.take()
                is_optional = True
                if self.is_sign("["):
                    made = self._index(made, True)
                elif self.is_sign("("):
                    raise Unsayable("a call of a function that may be missing")
                else:
                    made = SyntaxNode("member", (made, self._member_name(), True))
            elif self.is_sign("."):
                self.take()
                made = SyntaxNode("member", (made, self._member_name(), is_optional))
            elif self.is_sign("[") and not (self.now.after_newline and made.kind == "call"):
                made = self._index(made, is_optional)
            elif self.is_sign("("):
                self.take()
                made = SyntaxNode("call", (made, tuple(self._list(")"))))
            else:
                return made

    def _member_name(self) -> str:
        if self.now.kind != "name":
            raise Unsayable(f"{self.now.text!r} is no name of a key")
        return self.take().text

    def _index(self, base: SyntaxNode, is_optional: bool) -> SyntaxNode:
        self.take("[")
        index = self.expression()
        self.take("]")
        return SyntaxNode("index", (base, index, is_optional))

    def _list(self, end: str) -> list[SyntaxNode]:
        made: list[SyntaxNode] = []
        while not self.is_sign(end):
            if self.is_sign("..."):
                raise Unsayable("`...`")
            made.append(self._arrow() or self.expression())
            if not self.is_sign(end):
                self.take(",")
        self.take(end)
        return made

    def _arrow(self) -> SyntaxNode | None:
        if self.now.kind == "name" and self.ahead(1).text == "=>":
            names = [self.take().text]
        elif self.is_sign("(") and self.ahead(1).kind == "name" and self.ahead(2).text == ")":
            if self.ahead(3).text != "=>":
                return None
            self.take()
            names = [self.take().text]
            self.take(")")
        elif self.is_sign("(") and (self.ahead(1).text in (")", "{") or self.ahead(2).text == ","):
            raise Unsayable("a function of other than one name")
        else:
            return None
        self.take("=>")
        if self.is_sign("{"):
            raise Unsayable("a function with statements")
        return SyntaxNode("arrow", (names[0], self.expression()))

    def _primary(self) -> SyntaxNode:
        token = self.take()
        if token.kind in ("number", "text"):
            return SyntaxNode("literal", (token.value,))
        if token.kind == "template":
            return SyntaxNode("template", tuple(token.value))
        if token.kind == "name":
            words: dict[str, SyntaxNode] = {
                "true": SyntaxNode("literal", (True,)),
                "false": SyntaxNode("literal", (False,)),
                "null": SyntaxNode("literal", (None,)),
                "undefined": SyntaxNode("undefined"),
            }
            if token.text in _REFUSED_WORDS:
                raise Unsayable(f"`{token.text}`")
            return words.get(token.text) or SyntaxNode("name", (token.text,))
        if token.text == "(":
            made = self.expression()
            while self.is_sign(","):  # `(log(x), value)`
                if made.kind != "call" or made.parts[0] != SyntaxNode("name", ("log",)):
                    raise Unsayable("the comma operator")
                self.take()
                made = self.expression()
            self.take(")")
            return made
        if token.text == "[":
            return SyntaxNode("array", tuple(self._list("]")))
        if token.text == "{":
            return self._object()
        raise Unsayable(f"{token.text!r} is not understood there" if token.text else "an expression that ends early")

    def _object(self) -> SyntaxNode:
        pairs: list[tuple[str, SyntaxNode]] = []
        while not self.is_sign("}"):
            token = self.take()
            if token.kind not in ("name", "text"):
                raise Unsayable("a key of an object that is no plain name")
            name = token.value if token.kind == "text" else token.text
            if self.is_sign(":"):
                self.take()
                pairs.append((name, self.expression()))
            elif token.kind == "name" and self.is_sign(",", "}"):
                pairs.append((name, SyntaxNode("name", (name,))))
            else:
                raise Unsayable("an object with functions")
            if not self.is_sign("}"):
                self.take(",")
        self.take("}")
        return SyntaxNode("object", tuple(pairs))
