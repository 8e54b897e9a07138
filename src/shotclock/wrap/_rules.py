"""Rules for calls: which pass, which a person is asked about, and which are denied. The first match counts."""

from __future__ import annotations

import contextlib
import json
import math
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase

from ..core.value_types import value
from ..net.tool_hints import ANNOTATIONS

ALMOST = 0.85  # a word this like that of an annotation is a slip, which would let calls pass
# Spellings of a path that only a server resolves: blanks at an end, control characters, `~`, a scheme, `..`.
_UNPLAIN = re.compile(r"[\x00-\x1f\x7f]|^\s|\s$|^~|^[A-Za-z][A-Za-z0-9+.-]+:|(^|[/\\])\.\.([/\\]|$)")


class CallVerdict(StrEnum):
    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


@value
class Rule:
    """A verdict on the calls of some tools, perhaps with some arguments only."""

    verdict: CallVerdict
    text: str  # as it was written
    tools: str  # a pattern of names, or the word for an annotation
    arguments: tuple[tuple[str, str], ...] = ()

    @property
    def needs_hints(self) -> bool:
        return self.tools in ANNOTATIONS

    def matches_tool(self, tool: str, hints: Mapping[str, object]) -> bool:
        test = ANNOTATIONS.get(self.tools)
        if test is not None:
            return test(hints)
        is_like = fnmatchcase(_plain_name(tool), self.tools.casefold())
        return fnmatchcase(tool, self.tools) or (is_like and self.verdict is not CallVerdict.ALLOW)

    def matches_arguments(self, arguments: Mapping[str, object]) -> bool:
        """Compare every way to write a name and a value. To allow, all have to match; otherwise one is enough.

        A path that is not written plainly may match any pattern of paths.
        """
        enough = all if self.verdict is CallVerdict.ALLOW else any
        for name, pattern in self.arguments:
            texts = _texts_of(_named(name, arguments))
            if not texts or not (_are_unplain(texts, pattern) or enough(self._fits(text, pattern) for text in texts)):
                return False
        return True

    def _fits(self, text: str, pattern: str) -> bool:
        if fnmatchcase(text, pattern):
            return True
        number = _number(pattern)
        # A server may read a text as the number that it looks like, but need not.
        return number is not None and number in (text, None if self.verdict is CallVerdict.ALLOW else _number(text))

    def cannot_decide(self, arguments: Mapping[str, object]) -> bool:
        """Return whether a path that the rule is about is not written plainly."""
        return any(_are_unplain(_texts_of(_named(name, arguments)), pattern) for name, pattern in self.arguments)

    def __str__(self) -> str:
        return f"{self.verdict} {self.text}"


def _plain_name(name: str) -> str:
    """Return a name for a comparison: some servers do not distinguish `path` from `Path`, or end a name at NUL."""
    return name.casefold().partition("\0")[0].strip()


def _named(name: str, arguments: Mapping[str, object]) -> list[object]:
    return [item for key, item in arguments.items() if _plain_name(key) == _plain_name(name)]


def _are_unplain(texts: Iterable[str], pattern: str) -> bool:
    """Return whether one of these is not written plainly, if the pattern is about a path and not about a text."""
    is_about_path = "/" in pattern and "://" not in pattern and not pattern.startswith("*")
    return is_about_path and any(_UNPLAIN.search(text) for text in texts)


def _number(written: str | float) -> str | None:
    """Return the one way to write the value of a number; None for other texts."""
    try:
        number = float(written)
    except (ValueError, OverflowError):
        return None
    return None if not math.isfinite(number) else str(int(number)) if number.is_integer() else repr(number)


def _texts_of(argument: object) -> list[str]:
    """Return the texts that a pattern is compared with: each item of a list, a number by its value, exact and as most
    servers read it, and a path also in plain form.

    Many servers read a list also from a text with JSON, and some end a text at NUL.
    """
    if isinstance(argument, list):
        return [text for item in argument for text in _texts_of(item)]
    text = argument if isinstance(argument, str) else json.dumps(argument, sort_keys=True)
    if isinstance(argument, int | float) and not isinstance(argument, bool) and (number := _number(argument)):
        return [text, number] if isinstance(argument, int) else [number]
    texts = [text]
    if "\0" in text:
        texts += _texts_of(text.partition("\0")[0])
    if text.lstrip()[:1] == "[":
        with contextlib.suppress(ValueError, RecursionError):
            texts += _texts_of(json.loads(text))
    if "/" in text and "://" not in text:
        plain = posixpath.normpath(text)
        texts.append("/" + plain.lstrip("/") if plain.startswith("/") else plain)
    return texts


@value
class Rules:
    rules: Sequence[Rule] = ()
    is_read_only: bool = False

    @property
    def asks(self) -> bool:
        return any(rule.verdict is CallVerdict.ASK for rule in self.rules)

    @property
    def needs_hints(self) -> bool:
        return self.is_read_only or any(rule.needs_hints for rule in self.rules)

    def list_unused(self, tools: Iterable[str]) -> list[Rule]:
        """Return the rules whose pattern matches none of these names: most likely by mistake."""
        by_name = [rule for rule in self.rules if not rule.needs_hints]
        return [rule for rule in by_name if not any(rule.matches_tool(tool, {}) for tool in tools)]

    def decide(
        self, tool: str, arguments: Mapping[str, object], hints: Mapping[str, object]
    ) -> tuple[CallVerdict, str]:
        """Return the verdict on a call, and why, as the end of a sentence."""
        if self.is_read_only and hints.get("readOnlyHint") is not True:
            return CallVerdict.DENY, "was denied: with --read-only, only tools that declare readOnlyHint are called"
        for rule in self.rules:
            if rule.matches_tool(tool, hints) and rule.matches_arguments(arguments):
                if rule.cannot_decide(arguments):
                    what = f"the rule '{rule}' is about a path that is not written plainly in this call"
                    return CallVerdict.DENY, f"was denied: {what} (no '..', '~', scheme or blanks at its ends)"
                is_denied = rule.verdict is CallVerdict.DENY
                return rule.verdict, f"was denied by the rule '{rule}'" if is_denied else str(rule)
        return CallVerdict.ALLOW, ""


def rule_reader(verdict: CallVerdict) -> Callable[[str], Rule]:
    """Return a reader of rules such as `write_file path=/etc/*`, which raises ValueError."""

    def read(text: str) -> Rule:
        from difflib import get_close_matches  # which a server without rules need not load

        tools, *conditions = text.split() or [""]
        if not tools:
            raise ValueError("name a tool, as in 'write_*', or an annotation, as in 'destructive'")
        arguments = []
        for each in conditions:
            name, equals, pattern = each.partition("=")
            if not name or not equals:
                raise ValueError(f"{each!r} should be ARGUMENT=PATTERN, as in 'write_file path=/etc/*'")
            arguments.append((name, pattern))
        if "=" in tools:
            raise ValueError(f"{tools!r} should be the name of a tool, as in '* {tools}'")
        if tools not in ANNOTATIONS and (meant := get_close_matches(tools.lower(), ANNOTATIONS, 1, ALMOST)):
            raise ValueError(f"did you mean {meant[0]!r}? For a tool of that name write '[{tools[0]}]{tools[1:]}'")
        return Rule(verdict, " ".join([tools, *conditions]), tools, tuple(arguments))

    return read
