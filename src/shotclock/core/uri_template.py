"""URI templates of resources, all compared with a URI in linear time.

Ours are `notes://{id}`, `files://{+path}` for several segments, and `{?a,b}` for a query. A decoded value never leads
out of a folder: without `+` it holds no slash, and it never holds `..` as a segment.

Those of wrapped servers may be any of RFC 6570. One that is trusted matches strictly, one that is not trusted matches
every URI it might be expanded to: servers differ in the characters they accept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

LONGEST_URI = 8_192
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_EXPRESSION = re.compile(r"\{([^{}]*)\}?")
# The characters at which the value of an expression ends, by its operator. Some operators begin the value themselves.
_END = {"": "/?#", "+": "", "#": "", ".": "/?#", "/": "?#", ";": "/?#", "?": "#", "&": "#"}
_BEGINS = ".#/;?&"
_FORMS = "an expression is {name}, {+name} for several segments, or {?name,name} at the end"


class UriTemplate(NamedTuple):
    text: str
    pattern: re.Pattern[str]
    names: tuple[str, ...]  # in the path
    deep: frozenset[str]  # those of several segments
    query: tuple[str, ...]

    def match(self, uri: str) -> dict[str, str] | None:
        """Return the values in a URI, decoded; None if it is no expansion of the template."""
        if len(uri) > LONGEST_URI:
            return None
        path, has_query, query = uri.partition("?") if self.query else (uri, "", "")
        found = self.pattern.fullmatch(path)
        if found is None:
            return None
        values = {name: unquote(found[name]) for name in self.names}
        for name, value in values.items():
            parts = value.split("/")
            if "\0" in value or "\\" in value or value.startswith("/") or ".." in parts or value == ".":
                return None
            if len(parts) > 1 and name not in self.deep:
                return None
        for name, value in parse_qsl(query, keep_blank_values=True) if has_query else ():
            if name not in self.query or name in values:
                return None
            values[name] = value
        return values


def check_uri(uri: str) -> None:
    if not _SCHEME.match(uri):
        raise ValueError(f"a URI begins with a scheme, as in 'docs://readme': {uri!r} does not")


def _split(template: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text before the first expression, and each expression with the text behind it."""
    parts = _EXPRESSION.split(template)
    return parts[0], list(zip(parts[1::2], parts[2::2], strict=True))


@lru_cache(maxsize=4096)
def parse_template(text: str) -> UriTemplate:
    """Read a template. `{name*}` is `{+name}`, as in FastMCP. Raises ValueError."""
    check_uri(text)
    first, parts = _split(text)
    if text.count("{") != text.count("}") or any("}" in literal for literal in (first, *(part[1] for part in parts))):
        raise ValueError(f"{text!r}: a brace has no partner; {_FORMS}")
    written, pattern = first, re.escape(first)
    names: list[str] = []
    deep: set[str] = set()
    query: tuple[str, ...] = ()
    for expression, literal in parts:
        if deep and not expression.startswith("?"):
            raise ValueError(f"{text!r}: only a query may follow {{+name}}")
        if expression.startswith("?"):
            query = tuple(name.strip() for name in expression[1:].split(","))
            if literal:
                raise ValueError(f"{text!r}: nothing may follow the query")
            written += f"{{?{','.join(query)}}}"
            continue
        name = expression.removeprefix("+").removesuffix("*")
        names.append(name)
        if name != expression:
            deep.add(name)
            pattern += f"(?P<{name}>[^?#]+)" if name.isidentifier() else ""
        else:
            if written.endswith("}"):
                raise ValueError(f"{text!r}: a text has to be between {{{names[-2]}}} and {{{name}}}")
            pattern += f"(?P<{name}>[^/?#{re.escape(literal[:1])}]++)" if name.isidentifier() else ""
        written += (f"{{+{name}}}" if name in deep else f"{{{name}}}") + literal
        pattern += re.escape(literal)
    for name in (*names, *query):
        if not name.isidentifier():
            raise ValueError(f"{text!r}: {_FORMS}")
    if len({*names, *query}) < len(names) + len(query):
        raise ValueError(f"{text!r}: a name is in it twice")
    return UriTemplate(written, re.compile(pattern, re.DOTALL), tuple(names), frozenset(deep), query)


def is_template(uri: str) -> bool:
    return "{" in uri or "}" in uri


def check_parameters(template: UriTemplate, parameters: Mapping[str, bool]) -> None:
    """Raise ValueError unless the template gives every required parameter, and no other. `parameters` are required
    where they are true."""
    missing = [name for name, is_required in parameters.items() if is_required and name not in template.names]
    unknown = [name for name in template.names + template.query if name not in parameters]
    if unknown:
        raise ValueError(f"{{{unknown[0]}}} in {template.text!r} is no parameter of the function")
    if missing:
        place = "is optional in the URI: give it a default" if missing[0] in template.query else "is not in the URI"
        raise ValueError(f"{template.text!r}: the parameter {missing[0]!r} {place}")


def matches_strictly(template: str, uri: str) -> bool:
    """Return whether a URI is an expansion of a template, as nearly every server understands it.

    A value never holds the character that follows its expression, so some expansions are not found.
    """
    first, parts = _split(template)
    pattern = re.escape(first)
    for expression, literal in parts:
        operator = expression[:1] if expression[:1] in _END else ""
        ends = re.escape(_END[operator] + literal[:1])
        value = f"[^{ends}]*+" if ends else ".*+"
        pattern += f"(?:{re.escape(operator)}{value})?+" if operator and operator in _BEGINS else value
        pattern += re.escape(literal)
    return re.fullmatch(pattern, uri, re.DOTALL) is not None


def may_match(template: str, uri: str) -> bool:
    """Return whether any server might take a URI for an expansion of a template."""
    first, parts = _split(template)
    literals = [first.casefold(), *(literal.casefold() for _, literal in parts)]
    return any(_has_in_order(literals, text.casefold()) for text in (uri, unquote(uri)))


def _has_in_order(literals: list[str], text: str) -> bool:
    first, last = literals[0], literals[-1]
    if len(literals) == 1:
        return text == first
    end = len(text) - len(last)
    if not text.startswith(first) or not text.endswith(last):
        return False
    at = len(first)
    for literal in literals[1:-1]:
        found = text.find(literal, at, end)
        if found < 0:
            return False
        at = found + len(literal)
    return at <= end
