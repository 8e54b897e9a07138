"""Words that were not said plainly, by cyclopts: help, what can be meant in more than one way, and every mistake at
once."""

from __future__ import annotations

import difflib
import inspect
import sys
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import cyclopts
from cyclopts import App, CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError
from cyclopts.help import PlainFormatter
from rich.console import Console

from ..core.records import as_dict
from .output import is_terminal
from .words import Function, Group, Parameter, Parsed, Words

# Plain help is wrapped to the first; what names an option may stand out to the second.
HELP_WIDTH, HELP_ROOM = 96, 160


@dataclass(frozen=True)
class Parser:
    """The words as cyclopts knows them: the same functions, their parameters described in its own terms."""

    app: App
    functions: dict[Function, Function]


def parser_of(words: Words) -> Parser:
    known: dict[str, Any] = {"version": words.version}
    if words.version is None:
        known = {"version_flags": []}
    app = App(name=words.name, help=words.help, usage=words.usage, help_epilogue=words.epilogue, **known)
    groups: dict[Group, cyclopts.Group] = {}

    def grouped(group: Group) -> cyclopts.Group:
        return groups.setdefault(group, cyclopts.Group(group.name, sort_key=group.sort_key))

    def described(parameter: Parameter) -> cyclopts.Parameter:
        said = {name: value for name, value in as_dict(parameter).items() if value is not None}
        if parameter.group is not None:
            said["group"] = grouped(parameter.group)
        return cyclopts.Parameter(**said)

    def translated(function: Function) -> Function:
        hints = get_type_hints(function, include_extras=True)
        for name, hint in hints.items():
            if metadata := getattr(hint, "__metadata__", ()):
                said = tuple(described(item) if isinstance(item, Parameter) else item for item in metadata)
                hints[name] = Annotated[(hint.__origin__, *said)]
        parameters = inspect.signature(function).parameters.values()

        def stand_in(**_: object) -> None: ...

        stand_in.__doc__ = function.__doc__
        stand_in.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
        )
        stand_in.__annotations__ = {parameter.name: hints[parameter.name] for parameter in parameters}
        return stand_in

    functions: dict[Function, Function] = {}
    for place, (name, command) in enumerate(words.commands.items()):
        function = translated(command.function)
        functions[function] = command.function
        app.command(function, name=name)
        if command.group is not None:
            app[name].group = grouped(command.group)
        if words.in_order:
            app[name].sort_key = place
        if name in words.usages:
            app[name].usage = words.usages[name]
        if name in words.epilogues:
            app[name].help_epilogue = words.epilogues[name]
    return Parser(app, functions)


def understand(words: Words, said: list[str], *, help_hint: str) -> tuple[Parsed | None, list[dict[str, str]]]:
    """What the parser objects to is noted, taken out, and the rest parsed again."""
    parser = parser_of(words)
    mistakes: list[dict[str, str]] = []
    rest = list(said)
    for _ in range(len(said) + 1):  # each round takes at least one word away
        try:
            function, bound, _ = parser.app.parse_args(rest, print_error=False, exit_on_error=False)
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
            asked = getattr(function, "__func__", None)
            wants = {"wants_help": asked is App.help_print, "wants_version": asked is App.version_print}
            return Parsed(parser.functions.get(function), bound, rest, **wants), mistakes
    return None, mistakes


def print_help(words: Words, said: list[str]) -> None:
    """To stdout only where a person reads it; then with colour, elsewhere plain."""
    app = parser_of(words).app
    on_terminal = is_terminal(sys.stdout)
    app.help_formatter = None if on_terminal else PlainFormatter(max_width=HELP_WIDTH)
    console = Console(highlight=False)
    if not on_terminal:
        console = Console(stderr=True, highlight=False, no_color=True, width=HELP_ROOM)
    app.help_print(said, console=console)


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
