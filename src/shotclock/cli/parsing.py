"""Words into a verb, a function and its arguments, by cyclopts, with every mistake at once."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cyclopts import App, CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError
from cyclopts.help import PlainFormatter
from rich.console import Console

from ..core.clocks import Clocks
from ..core.envelope import Envelope
from ..enforce.admission import admit, answer
from ..enforce.handlers import invalid
from .output import is_terminal

Mistakes = list[dict[str, str]]


# Plain help is wrapped to the first; what names an option may stand out to the second.
HELP_WIDTH, HELP_ROOM = 96, 160


class Parsed(NamedTuple):
    command: Callable[..., Any]
    bound: inspect.BoundArguments
    words: list[str]
    """Those that were understood."""

    @property
    def wants_help(self) -> bool:
        return getattr(self.command, "__func__", None) is App.help_print

    @property
    def wants_version(self) -> bool:
        return getattr(self.command, "__func__", None) is App.version_print


def parse(parser: App, words: list[str], *, help_hint: str) -> tuple[Parsed | None, Mistakes]:
    """What the parser objects to is noted, taken out, and the rest parsed again."""
    mistakes: Mistakes = []
    rest = list(words)
    for _ in range(len(words) + 1):  # each round takes at least one word away
        try:
            command, bound, _ = parser.parse_args(rest, print_error=False, exit_on_error=False)
        except UnknownOptionError as error:
            option = error.token.keyword or error.token.value
            close = _nearest(option, _options_of(error))
            hint = f"did you mean {close[0]}?" if close else f"see {help_hint}"
            mistakes.append({"field": option, "message": f"unknown option; {hint}"})
            # Read on as if it had been spelt right, or its value would be taken for an argument.
            meant = close[0] if close and close[0] not in (word.partition("=")[0] for word in rest) else None
            rest = _respelt(rest, option, meant)
        except UnusedCliTokensError as error:
            unused = error.unused_tokens or []
            mistakes += [{"field": "arguments", "message": f"{word!r} is one too many"} for word in unused]
            for word in reversed(unused):
                del rest[len(rest) - 1 - rest[::-1].index(word)]  # the last of its kind is the one too many
        except CycloptsError as error:
            token = getattr(error, "token", None)
            keyword = getattr(token, "keyword", None) or getattr(error, "keyword", None)
            name = error.argument.name if error.argument is not None else keyword or "arguments"
            message = f"{name} needs a value" if isinstance(error, MissingArgumentError) else str(error)
            mistakes.append({"field": name.lstrip("-"), "message": message})
            less = _without(rest, keyword or name, getattr(token, "value", None))
            if len(less) == len(rest):
                return None, mistakes
            rest = less
        else:
            return Parsed(command, bound, rest), mistakes
    return None, mistakes


class Spoken(NamedTuple):
    verb: str
    said: dict[str, Any]
    """By the names of the verb's parameters, with their defaults. Nothing, where it could not be understood at all."""
    mistakes: Mistakes


def parse_verb(parser: App, words: list[str], verbs: Sequence[str], *, command: str) -> Spoken | None:
    """`command VERB …`. None where help was asked for, and has been given."""
    verb = words[0] if words else ""
    if verb in ("", "-h", "--help", "help"):
        print_help(parser, [])
        return None if words else Spoken("", {}, [{"field": "verb", "message": f"one of {', '.join(verbs)}"}])
    if verb not in verbs:
        close = difflib.get_close_matches(verb, verbs, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return Spoken("", {}, [{"field": "verb", "message": f"{verb!r} is none of {', '.join(verbs)}{hint}"}])
    parsed, mistakes = parse(parser, words, help_hint=f"{command} {verb} --help")
    if parsed is None:
        return Spoken(verb, {}, mistakes)
    if parsed.wants_help:
        print_help(parser, [verb])
        return None
    parsed.bound.apply_defaults()
    return Spoken(verb, dict(parsed.bound.arguments), mistakes)


def mistaken(name: str, mistakes: Mistakes) -> Envelope:
    """The answer to words that were not understood. Nothing has begun."""
    return answer(admit(name, Clocks()), invalid(mistakes))


def print_help(parser: App, words: list[str]) -> None:
    """To stdout only where a person reads it; then with colour, elsewhere plain."""
    on_terminal = is_terminal(sys.stdout)
    parser.help_formatter = None if on_terminal else PlainFormatter(max_width=HELP_WIDTH)
    console = Console(highlight=False)
    if not on_terminal:
        console = Console(stderr=True, highlight=False, no_color=True, width=HELP_ROOM)
    parser.help_print(words, console=console)


def _respelt(words: list[str], option: str, meant: str | None) -> list[str]:
    kept: list[str] = []
    dropping = False
    for word in words:
        name, equals, value = word.partition("=")
        if name == option:
            dropping = meant is None and not equals  # the word behind it is most likely its value
            kept += [] if meant is None else [f"{meant}{equals}{value}"]
        elif not dropping or (word.startswith("-") and not word[1:2].isdigit()):  # -5s was meant as a value
            dropping = False
            kept.append(word)
        else:
            dropping = False
    return kept


def _without(words: list[str], option: str, value: str | None) -> list[str]:
    """What the parser could not take in is left out: the option with its value, or a word that is no option's."""
    less = _respelt(words, option, None)
    if len(less) == len(words) and value in words:
        last = len(words) - 1 - words[::-1].index(value)
        less = words[:last] + words[last + 1 :]
    return less


def _nearest(option: str, known: list[str]) -> list[str]:
    """Compared without the dashes, which would make any two of them look alike."""
    named = {name.lstrip("-"): name for name in known}
    return [named[name] for name in difflib.get_close_matches(option.lstrip("-"), named, n=1)]


def _options_of(error: UnknownOptionError) -> list[str]:
    return [name for argument in error.argument_collection for name in argument.names]
