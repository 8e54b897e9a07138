"""URI templates (RFC 6570), compared with a URI in two ways, both in linear time.

A template that is trusted matches strictly, one that is not trusted matches whatever it might be expanded to: servers
differ in the characters they accept.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

_EXPRESSION = re.compile(r"\{([^{}]*)\}?")
# The characters at which the value of an expression ends, by its operator. Some operators begin the value themselves.
_END = {"": "/?#", "+": "", "#": "", ".": "/?#", "/": "?#", ";": "/?#", "?": "#", "&": "#"}
_BEGINS = ".#/;?&"


def matches_strictly(template: str, uri: str) -> bool:
    """Return whether a URI is an expansion of a template, as nearly every server understands it.

    A value never holds the character that follows its expression, so some expansions are not found.
    """
    parts = _EXPRESSION.split(template)  # literal, expression, literal, …
    pattern = re.escape(parts[0])
    for expression, literal in zip(parts[1::2], parts[2::2], strict=True):
        operator = expression[:1] if expression[:1] in _END else ""
        ends = re.escape(_END[operator] + literal[:1])
        value = f"[^{ends}]*+" if ends else ".*+"
        pattern += f"(?:{re.escape(operator)}{value})?+" if operator and operator in _BEGINS else value
        pattern += re.escape(literal)
    return re.fullmatch(pattern, uri, re.DOTALL) is not None


def may_match(template: str, uri: str) -> bool:
    """Return whether any server might take a URI for an expansion of a template."""
    literals = [literal.casefold() for literal in _EXPRESSION.split(template)[0::2]]
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
