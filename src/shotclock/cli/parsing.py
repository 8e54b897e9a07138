"""Words into a function and its arguments: at once where they are plain, by cyclopts where they are not."""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

from ..core.clocks import Clocks
from ..core.envelope import Envelope
from ..enforce.admission import OURSELVES, Tool, admit, answer, invalid
from ..enforce.clock import process_began_ns
from .words import Parsed, Words, read_plainly

Mistakes = list[dict[str, str]]


def parse(words: Words, said: list[str], *, help_hint: str) -> tuple[Parsed | None, Mistakes]:
    """What was said, and every mistake in it. None, where it could not be understood at all."""
    plain = read_plainly(words, said)
    if plain is not None:
        return plain, []
    from .understanding import understand

    return understand(words, said, help_hint=help_hint)


def print_help(words: Words, said: list[str]) -> None:
    """To stdout only where a person reads it."""
    from . import understanding

    understanding.print_help(words, said)


class Spoken(NamedTuple):
    verb: str
    said: dict[str, Any]
    """By the names of the verb's parameters, with their defaults. Nothing, where it could not be understood at all."""
    mistakes: Mistakes


def parse_verb(words: Words, said: list[str], *, command: str) -> Spoken | None:
    """`command VERB …`. None where help was asked for, and has been given."""
    verb, verbs = said[0] if said else "", list(words.commands)
    if verb in ("", "-h", "--help", "help"):
        print_help(words, [])
        return None if said else Spoken("", {}, [{"field": "verb", "message": f"one of {', '.join(verbs)}"}])
    if verb not in verbs:
        close = difflib.get_close_matches(verb, verbs, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return Spoken("", {}, [{"field": "verb", "message": f"{verb!r} is none of {', '.join(verbs)}{hint}"}])
    parsed, mistakes = parse(words, said, help_hint=f"{command} {verb} --help")
    if parsed is None:
        return Spoken(verb, {}, mistakes)
    if parsed.wants_help:
        print_help(words, [verb])
        return None
    parsed.arguments.apply_defaults()
    return Spoken(verb, dict(parsed.arguments.arguments), mistakes)


def mistaken(name: str, mistakes: Mistakes, tool: Tool = OURSELVES) -> Envelope:
    """The answer to words that were not understood. Nothing has begun."""
    return answer(admit(name, Clocks(), tool=tool, began_ns=process_began_ns()), invalid(mistakes))
