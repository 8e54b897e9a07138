"""Go templates of Taskfiles: known values are filled in, others become templates of ours."""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from .common import Unconvertible, in_quotes, literal, scalar_text


class Expression(NamedTuple):
    """A value that is known when the step runs."""

    code: str


Value = str | list[Any] | Expression
Lookup = Callable[[str], Value]  # raises Unconvertible

TOKENS_LIMIT = 200
INSIDE_LIMIT, TEXT_LIMIT = 300, 200_000  # templates in one text, and its characters

_INSIDE = re.compile(r"\{\{-?((?:[^\"`}]|\"(?:[^\"\\]|\\.)*\"|`[^`]*`|\}(?!\}))*?)-?\}\}")
_TOKEN = re.compile(
    r"\s*(?:(?P<text>\"(?:[^\"\\]|\\.)*\"|`[^`]*`)|(?P<number>-?[0-9]+)|(?P<name>\.[A-Za-z_][\w.]*)"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<mark>[|()]))"
)


def parts_of(text: str, lookup: Lookup) -> list[str | Expression]:
    """Return the parts of a text with templates. Raises Unconvertible."""
    made: list[str | Expression] = []
    end = 0
    if text.count("{{") > INSIDE_LIMIT or len(text) > TEXT_LIMIT:
        raise Unconvertible("has a text that is too long")
    for found in _INSIDE.finditer(text):
        made.append(text[end : found.start()])
        value = _Pipeline(found[1], lookup).value()
        if isinstance(value, list):
            raise Unconvertible("puts a list into text")
        made.append(value)
        end = found.end()
    if "{{" in text[end:]:
        raise Unconvertible("has a template without its end")
    return [part for part in [*made, text[end:]] if part != ""]


def template_of(text: str, lookup: Lookup, escape: Callable[[str], str] = literal) -> str:
    """Return a text with templates of ours."""
    made, plain = "", ""
    for part in parts_of(text, lookup):
        if isinstance(part, str):
            plain += part
        else:
            made, plain = f"{made}{escape(plain)}{{{{ {part.code} }}}}", ""
    return made + escape(plain)


def value_of(text: str, lookup: Lookup) -> Value:
    """Return the value of a text: known, or one expression."""
    parts = parts_of(text, lookup)
    if all(isinstance(part, str) for part in parts):
        known = "".join(part for part in parts if isinstance(part, str))
        if len(known) > TEXT_LIMIT:
            raise Unconvertible("has a text that is too long")
        return known
    codes = [part.code if isinstance(part, Expression) else in_quotes(part) for part in parts]
    if sum(map(len, codes)) > TEXT_LIMIT:
        raise Unconvertible("has a text that is too long")
    return Expression(codes[0] if len(codes) == 1 else f"({' ~ '.join(codes)})")


def known_text(text: str, lookup: Lookup) -> str:
    """Return a text that is known now. Raises Unconvertible."""
    value = value_of(text, lookup)
    if not isinstance(value, str):
        raise Unconvertible("has a value that is known only when it runs, where a fixed text is needed")
    return value


class _Pipeline:
    def __init__(self, text: str, lookup: Lookup) -> None:
        self._lookup = lookup
        self._tokens: list[tuple[str, str]] = []
        at, text = 0, text.strip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise Unconvertible(f"has the template {{{{{text[:40]}}}}}")
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
            if len(self._tokens) > TOKENS_LIMIT:
                raise Unconvertible("has a template that is too long")
        self._text = text

    def value(self) -> Value:
        made = self._piped()
        if self._tokens:
            raise Unconvertible(f"has the template {{{{{self._text[:40]}}}}}")
        return made

    def _piped(self) -> Value:
        made = self._command([])
        while self._tokens and self._tokens[0] == ("mark", "|"):
            self._tokens.pop(0)
            made = self._command([made])
        return made

    def _command(self, piped: list[Value]) -> Value:
        if not self._tokens:
            raise Unconvertible("has an empty template")
        kind, text = self._tokens.pop(0)
        if kind != "word":
            self._tokens.insert(0, (kind, text))
            if piped:
                raise Unconvertible(f"has the template {{{{{self._text[:40]}}}}}")
            return self._operand()
        arguments: list[Value] = []
        while self._tokens and self._tokens[0] not in (("mark", "|"), ("mark", ")")):
            arguments.append(self._operand())
        return _call(text, [*arguments, *piped])

    def _operand(self) -> Value:
        kind, text = self._tokens.pop(0)
        if kind == "text":
            return text[1:-1] if text[0] == "`" else re.sub(r"\\(.)", _unescaped, text[1:-1])
        if kind == "number":
            return text
        if kind == "name":
            return self._lookup(text[1:])
        if kind == "word":
            return _call(text, [])
        if text == "(":
            made = self._piped()
            if not self._tokens or self._tokens.pop(0) != ("mark", ")"):
                raise Unconvertible("has a template without a closing parenthesis")
            return made
        raise Unconvertible(f"has the template {{{{{self._text[:40]}}}}}")


def _unescaped(found: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t", "r": "\r"}.get(found[1], found[1])


def _call(name: str, arguments: list[Value]) -> Value:
    made = _FUNCTIONS.get(name)
    if made is None or len(arguments) != made[0]:
        raise Unconvertible(f"uses {name} in a template")
    return made[1](*arguments)


def _default(other: Value, value: Value) -> Value:
    if isinstance(value, Expression):
        return Expression(f"({value.code} or {_code(other)})")
    return value or other


def _code(value: Value) -> str:
    if isinstance(value, list):
        raise Unconvertible("computes with a list in a template")
    return value.code if isinstance(value, Expression) else in_quotes(value)


def _changed(change: Callable[[str], str], filter_: str | None) -> Callable[[Value], Value]:
    def apply(value: Value) -> Value:
        if isinstance(value, str):
            return change(value)
        if filter_ is None:
            raise Unconvertible("changes a value in a way that is not known here")
        return Expression(f"({_code(value)} | {filter_})" if filter_ else _code(value))

    return apply


def _split(separator: Value, value: Value) -> Value:
    if not isinstance(separator, str) or not isinstance(value, str):
        raise Unconvertible("splits a value that is known only when it runs")
    return list(value.split(separator))


def _replace(old: Value, new: Value, value: Value) -> Value:
    if isinstance(old, str) and isinstance(new, str) and isinstance(value, str):
        return value.replace(old, new)
    return Expression(f"({_code(value)} | replace({_code(old)}, {_code(new)}))")


def _joined(separator: Value, value: Value) -> Value:
    if not isinstance(separator, str) or not isinstance(value, list):
        raise Unconvertible("joins a value that is no list")
    return separator.join(map(scalar_text, value))


def system() -> str:
    """Return the system of this machine, in the words of Go."""
    return platform.system().lower()


def machine() -> str:
    """Return the processor of this machine, in the words of Go."""
    name = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64", "i686": "386"}.get(name, name)


# A value of ours is one word of a command already, so it needs no quotation marks.
_FUNCTIONS: dict[str, tuple[int, Callable[..., Value]]] = {
    "default": (2, _default),
    "upper": (1, _changed(str.upper, "upper")),
    "toUpper": (1, _changed(str.upper, "upper")),
    "lower": (1, _changed(str.lower, "lower")),
    "toLower": (1, _changed(str.lower, "lower")),
    "trim": (1, _changed(str.strip, "trim")),
    "quote": (1, _changed(lambda text: f'"{text}"', None)),
    "squote": (1, _changed(lambda text: f"'{text}'", None)),
    "q": (1, _changed(shlex.quote, "")),
    "shellQuote": (1, _changed(shlex.quote, "")),
    "replace": (3, _replace),
    "splitList": (2, _split),
    "join": (2, _joined),
    "exeExt": (0, lambda: ""),
    "OS": (0, system),
    "ARCH": (0, machine),
}
