"""Liquid templates of foreign files as templates of ours."""

from __future__ import annotations

import re
from collections.abc import Callable

from ...core.value_types import record, replace
from ._expression import Code, Kind, NameScope, Unsayable, both, bounded, either, is_null, less_or_more, literal, same

TEMPLATE_LIMIT, DEPTH_LIMIT = 200_000, 30  # characters, and levels of blocks
_TAG = re.compile(r"\{%-?\s*(\w+|#)?([\s\S]*?)-?%\}|\{\{-?([\s\S]*?)-?\}\}")
_TOKEN = re.compile(
    r"\s+|(?P<text>'[^']*'|\"[^\"]*\")|(?P<number>-?\d+(?:\.\d+)?(?!\.\d))"
    r"|(?P<name>[A-Za-z_][\w-]*\??)|(?P<sign>==|!=|<>|<=|>=|[<>|:,.\[\]=])"
)
_PLAIN_FILTERS: dict[str, tuple[str, Kind]] = {
    "upcase": ("upper", "text"),
    "downcase": ("lower", "text"),
    "capitalize": ("capitalize", "text"),
    "strip": ("trim", "text"),
    "escape": ("escape", "text"),
    "first": ("first", "any"),
    "last": ("last", "any"),
    "uniq": ("unique | list", "list"),
    "sort": ("sort", "list"),
    "reverse": ("reverse | list", "list"),
}
_SHELL = ("shell_escape", "escape_shell")


def is_liquid(text: str) -> bool:
    return "{{" in text or "{%" in text


def template(source: str, scope: NameScope, *, is_command: bool = False) -> str:
    """Return a template that gives the same text. Raises Unsayable."""
    if len(source) > TEMPLATE_LIMIT:
        raise Unsayable(f"a template of more than {TEMPLATE_LIMIT} characters")
    if not is_liquid(source):
        return source
    return _Template(replace(scope, bound=dict(scope.bound)), is_command).convert(source)


@record
class _Template:
    scope: NameScope
    is_command: bool

    def convert(self, source: str) -> str:
        made: list[str] = []
        open_tags: list[str] = []
        at = 0
        while (found := _TAG.search(source, at)) is not None:
            made.append(_plain(source[at : found.start()]))
            at = found.end()
            written = found.group()
            left, right = "-" * (written[2] == "-"), "-" * (written[-3] == "-")
            if found[3] is not None:
                made.append(f"{{{{{left} {self._value(found[3]).text} {right}}}}}")
                continue
            name, rest = found[1] or "", (found[2] or "").strip()
            if name in ("comment", "raw"):
                end = re.compile(r"\{%-?\s*end" + name + r"\s*-?%\}").search(source, at)
                if end is None:
                    raise Unsayable(f"`{{% {name} %}}` without an end")
                body, at = source[at : end.start()], end.end()
                if name == "raw":
                    made.append("{% raw %}" + body + "{% endraw %}")
                continue
            if name == "#":
                continue
            made += [f"{{%{left} {each} {right}%}}" for each in self._tag(name, rest, open_tags)]
            if len(open_tags) > DEPTH_LIMIT:
                raise Unsayable(f"more than {DEPTH_LIMIT} levels of blocks")
        if open_tags:
            raise Unsayable(f"`{{% {open_tags[-1]} %}}` without an end")
        made.append(_plain(source[at:]))
        return "".join(made)

    def _tag(self, name: str, rest: str, open_tags: list[str]) -> list[str]:
        inside = open_tags[-1] if open_tags else ""
        match name:
            case "if" | "unless":
                open_tags.append(name)
                return [f"if {self._condition(rest, is_negated=name == 'unless')}"]
            case "elsif" if inside in ("if", "unless"):
                return [f"elif {self._condition(rest)}"]
            case "else" if inside:
                return ["else"]
            case "endif" | "endunless" if name == f"end{inside}":
                open_tags.pop()
                return ["endif"]
            case "for":
                return [self._for(rest, open_tags)]
            case "endfor" if inside == "for":
                open_tags.pop()
                return ["endfor"]
            case "assign":
                return [self._assign(rest, open_tags)]
        raise Unsayable(f"`{{% {name} %}}`")

    def _for(self, rest: str, open_tags: list[str]) -> str:
        found = re.fullmatch(r"([A-Za-z_]\w*)\s+in\s+([\s\S]+?)", rest)
        if found is None or re.search(r"\b(limit|offset|cols)\s*:", rest):
            raise Unsayable(f"`{{% for {rest[:40]} %}}`")
        name, items = found[1], _Reader(found[2], self.scope).whole()
        if items.kind != "list":
            items = Code(f"{items.operand} | default([], true)")
        open_tags.append("for")
        self.scope.bound[name] = Code(name, path=("\0item",))
        self.scope.bound["forloop"] = Code("loop", path=("\0loop",))
        return f"for {name} in {items.text}"

    def _assign(self, rest: str, open_tags: list[str]) -> str:
        found = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*([\s\S]+)", rest)
        if found is None:
            raise Unsayable(f"`{{% assign {rest[:40]} %}}`")
        if "for" in open_tags:
            raise Unsayable("`{% assign %}` inside a loop: the value does not leave the loop here")
        value = self._value(found[2])
        self.scope.bound[found[1]] = Code(found[1], value.kind)
        return f"set {found[1]} = {value.as_value}"

    def _value(self, source: str) -> Code:
        return bounded(_Reader(source, self.scope, self.is_command).whole())

    def _condition(self, source: str, *, is_negated: bool = False) -> str:
        made = bounded(_Reader(source, self.scope).condition())
        return f"not ({made.text})" if is_negated else made.text


def _plain(text: str) -> str:
    """Return the text between tags. A tag that Liquid does not end would be read as one here."""
    if "{{" in text or "{%" in text:
        raise Unsayable("a tag without an end")
    return text


def liquid_truth(code: Code) -> Code:
    """Return whether Liquid takes a value for true: all but nil and false."""
    if code.kind == "boolean":
        return code
    if code.kind in ("text", "number", "list") and not code.may_miss:
        return literal(True)
    if code.kind == "text":
        return Code(f"{code.operand} is defined", "boolean", is_tight=False)
    test = f"{code.as_value} is not none and {code.operand} is not false"
    return Code(
        f"{test} and {code.operand} not in ['false', 'null']" if code.printed else test, "boolean", is_tight=False
    )


@record
class _Reader:
    """The reader of one expression of Liquid, with its filters."""

    source: str
    scope: NameScope
    is_command: bool = False
    tokens: list[tuple[str, str]] | None = None
    at: int = 0

    def _now(self) -> tuple[str, str]:
        if self.tokens is None:
            self.tokens = _tokens(self.source)
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def _take(self, text: str | None = None) -> str:
        kind, now = self._now()
        if text is not None and (now != text or kind == "text"):
            raise Unsayable(f"{now!r} where `{text}` was expected" if now else f"the end where `{text}` was expected")
        self.at += 1
        return now

    def _is(self, *texts: str) -> bool:
        kind, now = self._now()
        return kind in ("sign", "name") and now in texts

    def _end(self) -> None:
        if self._now()[0] != "end":
            raise Unsayable(f"{self._now()[1]!r} is not understood there")

    def whole(self) -> Code:
        made = self._filtered(self._primary())
        self._end()
        return made

    def condition(self) -> Code:
        """Return a condition. Liquid joins from the right: `a and b or c` is `a and (b or c)`."""
        made = self._comparison()
        if self._is("and", "or"):
            join = both if self._take() == "and" else either
            if self.at > 60:
                raise Unsayable("a condition of so many parts")
            return join(made, self.condition())
        self._end()
        return made

    def _comparison(self) -> Code:
        left = self._primary()
        if self._is("|"):
            left = self._filtered(left)
        if not self._is("==", "!=", "<>", "<", ">", "<=", ">=", "contains"):
            return liquid_truth(left)
        sign = self._take()
        word = self._now()[1] if self._now()[0] == "name" else ""
        if word == "empty" and sign in ("==", "!=", "<>"):
            self._take()
            test = f"{left.as_value} {'in' if sign == '==' else 'not in'} ['', [], {{}}]"
            return Code(test, "boolean", is_tight=False)
        if word in ("nil", "null") and sign in ("==", "!=", "<>"):
            self._take()
            return is_null(left, is_negated=sign != "==")
        right = self._primary()
        if sign == "contains":
            return Code(f"{right.operand} in ({left.operand} | default([], true))", "boolean", is_tight=False)
        if sign in ("==", "!=", "<>"):
            return same(left, right, is_negated=sign != "==")
        return less_or_more(left, sign, right)

    def _primary(self) -> Code:
        kind, now = self._now()
        if kind == "text":
            self.at += 1
            return literal(now[1:-1])
        if kind == "number":
            self.at += 1
            return literal(float(now) if "." in now else int(now))
        if kind != "name":
            raise Unsayable(f"{now!r} is not understood there" if now else "an expression that ends early")
        self.at += 1
        words = {"true": True, "false": False, "nil": None, "null": None}
        if now in words:
            return literal(words[now])
        if now in ("blank", "empty"):
            raise Unsayable(f"`{now}`")
        made = self.scope.head(now)
        while True:
            if self._is("."):
                self._take()
                if self._now()[0] != "name":
                    raise Unsayable(f"{self._now()[1]!r} is no name of a key")
                made = self._member(made, self._take())
            elif self._is("["):
                self._take()
                kind, now = self._now()
                self.at += 1
                if kind == "text":
                    made = self.scope.member(made, now[1:-1])
                elif kind == "number" and now.lstrip("-").isdecimal() and made.path != ("\0item",):
                    made = Code(f"{made.operand}[{int(now)}]", may_miss=True)
                else:
                    raise Unsayable("a key that is computed, or the number of one")
                self._take("]")
            else:
                return made

    def _member(self, base: Code, name: str) -> Code:
        if base.path == ("\0loop",):
            names = {"index": "index", "index0": "index0", "first": "first", "last": "last", "length": "length"}
            names |= {"rindex": "revindex", "rindex0": "revindex0"}
            if name not in names:
                raise Unsayable(f"`forloop.{name}`")
            return Code(f"loop.{names[name]}", "boolean" if name in ("first", "last") else "number")
        if name == "size":
            return Code(f"{base.operand} | length", "number", is_tight=False, is_filtered=True)
        if name in ("first", "last") and base.path[:1] != ("outputs",):
            return Code(f"{base.operand} | {name}", is_tight=False, is_filtered=True)
        return self.scope.member(base, name)

    # --- filters

    def _filtered(self, made: Code) -> Code:
        while self._is("|"):
            self._take()
            kind, name = self._now()
            if kind != "name":
                raise Unsayable(f"{name!r} is no name of a filter")
            self.at += 1
            given: list[Code] = []
            if self._is(":"):
                self._take()
                given.append(self._primary())
                while self._is(","):
                    self._take()
                    given.append(self._primary())
                    if self._is(":"):
                        raise Unsayable(f"the filter `{name}` with named values")
            made = self._filter(made, name, given)
        return made

    def _filter(self, base: Code, name: str, given: list[Code]) -> Code:
        if name in _SHELL and not given:
            if not self.is_command:
                raise Unsayable(f"the filter `{name}` outside a command")
            return base  # a value in a command is one word here already
        if name in _PLAIN_FILTERS and not given:
            ours, kind = _PLAIN_FILTERS[name]
            return Code(f"{base.operand} | {ours}", kind, is_tight=False, is_filtered=True)
        write: Callable[[Code, list[Code]], Code] | None = _FILTERS.get((name, len(given)))
        if write is None:
            raise Unsayable(f"the filter `{name}`")
        return write(base, given)


def _tokens(source: str) -> list[tuple[str, str]]:
    made: list[tuple[str, str]] = []
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            raise Unsayable(f"the character {source[at]!r} is not understood")
        if found.lastgroup is not None:
            made.append((found.lastgroup, found.group()))
        at = found.end()
    return made


def _text_filter(pattern: str) -> Callable[[Code, list[Code]], Code]:
    def write(base: Code, given: list[Code]) -> Code:
        for each in given:
            if not isinstance(each.literal, str):
                raise Unsayable("a filter whose value is no plain text")
        text = pattern.format(base.operand, *(each.text for each in given))
        return Code(text, "text", is_tight=False, is_filtered="|" in pattern)

    return write


def _default(base: Code, given: list[Code]) -> Code:
    instead = given[0]
    if base.kind == "any" and not base.printed and not (instead.kind == "number" and instead.literal == 0):
        # In Liquid 0 is a value; Jinja's `default` would replace it.
        kept = f"{base.as_value} not in [none, '', []] and {base.operand} is not false"
        return Code(f"{base.operand} if {kept} else {instead.operand}", is_tight=False)
    return Code(f"{base.operand} | default({instead.text}, true)", instead.kind, is_tight=False, is_filtered=True)


def _keys(base: Code, given: list[Code]) -> Code:
    if not isinstance(given[0].literal, str):
        raise Unsayable("`map` of a key that is computed")
    return Code(f"{base.operand} | map(attribute={given[0].text}) | list", "list", is_tight=False, is_filtered=True)


def _json(base: Code, given: list[Code]) -> Code:
    if given and not isinstance(given[0].literal, int):
        raise Unsayable("`json` with an indentation that is computed")
    indent = f"({given[0].text})" if given else ""
    return Code(f"{base.operand} | tojson{indent}", "text", is_tight=False, is_filtered=True)


_FILTERS: dict[tuple[str, int], Callable[[Code, list[Code]], Code]] = {
    ("json", 0): _json,
    ("json", 1): _json,
    ("to_json", 0): _json,
    ("default", 1): _default,
    ("size", 0): lambda base, given: Code(f"{base.operand} | length", "number", is_tight=False, is_filtered=True),
    ("join", 0): _text_filter("{0} | join(' ')"),
    ("join", 1): _text_filter("{0} | join({1})"),
    ("replace", 2): _text_filter("{0} | replace({1}, {2})"),
    ("remove", 1): _text_filter("{0} | replace({1}, '')"),
    ("append", 1): _text_filter("{0} ~ {1}"),
    ("prepend", 1): _text_filter("{1} ~ {0}"),
    ("map", 1): _keys,
    ("parse_json", 0): lambda base, given: Code(f"{base.operand} | fromjson", is_tight=False, is_filtered=True),
}
