"""What can be said on a command line: a function for each command, whose parameters are its words.

What is said plainly is read right here: names as they are declared, no abbreviation, no mistake. Everything else, help
included, is left to cyclopts (understanding.py), whose import takes longer than most commands do. What both understand
they understand alike: tests/cli/test_words.py compares them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ..core.records import made, record, value

Function = Callable[..., Any]

_SNAKE_CASE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@value
class Group:
    """A heading in the help of a command, or of all of them."""

    name: str
    sort_key: int


@value
class Parameter:
    """What is said about a word, beside its type. The names are those of cyclopts."""

    name: str | None = None
    help: str | None = None
    metavar: str | None = None
    negative: str | None = None
    show_default: bool | None = None
    group: Group | None = None


@value
class Command:
    function: Function
    group: Group | None = None


@record
class Words:
    """A program, or a subcommand with verbs of its own."""

    name: str
    help: str
    usage: str
    epilogue: str = ""
    version: str | None = None
    """None: it has no --version."""
    usages: dict[str, str] = made(factory=dict)
    epilogues: dict[str, str] = made(factory=dict)
    in_order: bool = False
    """Listed as they were declared, and not by name."""
    commands: dict[str, Command] = made(factory=dict)

    def add(self, function: Function, *, name: str | None = None, group: Group | None = None) -> None:
        self.commands[name or function.__name__] = Command(function, group)

    def command(self, *, name: str | None = None, group: Group | None = None) -> Callable[[Function], Function]:
        def declared(function: Function) -> Function:
            self.add(function, name=name, group=group)
            return function

        return declared


class Parsed(NamedTuple):
    function: Function | None
    """None where help or the version was asked for."""
    arguments: inspect.BoundArguments
    words: list[str]
    """Those that were understood."""
    wants_help: bool = False
    wants_version: bool = False


class _Word(NamedTuple):
    """A parameter as far as it can be read here: a flag, a text, one of some texts, or any number of texts."""

    name: str
    is_flag: bool = False
    is_list: bool = False
    choices: tuple[str, ...] | None = None

    def takes(self, value: str) -> bool:
        """What begins with a dash may be an option."""
        return bool(value) and value[0] != "-" and (self.choices is None or value in self.choices)


def read_plainly(words: Words, said: list[str]) -> Parsed | None:
    """None: it is not said plainly, which says nothing about whether it is right."""
    if said == ["--version"] and words.version is not None:
        return Parsed(None, inspect.Signature().bind(), said, wants_version=True)
    command = words.commands.get(said[0]) if said else None
    if command is None:
        return None
    signature = inspect.signature(command.function)
    options, positionals = _readable(command.function, signature)
    given: list[str] = []
    named: dict[str, Any] = {}
    rest = iter(said[1:])
    for word in rest:
        if word[:1] != "-":
            given.append(word)
            continue
        option, equals, value = word.partition("=")
        meant = options.get(option)
        if meant is None or (meant.name in named and not meant.is_list):
            return None
        if meant.is_flag:
            if equals:
                return None
            named[meant.name] = True
            continue
        value = value if equals else next(rest, "")
        if not meant.takes(value):
            return None
        named[meant.name] = [*named.get(meant.name, ()), value] if meant.is_list else value
    for place, value in zip(positionals, given, strict=False):
        if place is None or place.is_list or place.is_flag or place.name in named or not place.takes(value):
            return None
    try:
        return Parsed(command.function, signature.bind(*given, **named), said)
    except TypeError:  # one is missing, or one too many
        return None


def _readable(function: Function, signature: inspect.Signature) -> tuple[dict[str, _Word], list[_Word | None]]:
    hints = get_type_hints(function, include_extras=True)
    options: dict[str, _Word] = {}
    positionals: list[_Word | None] = []
    for parameter in signature.parameters.values():
        kind, described = _taken_apart(hints[parameter.name])
        word = _word(parameter.name, kind)
        if parameter.kind is not parameter.KEYWORD_ONLY:
            positionals.append(word)
        option = described.name or f"--{parameter.name.replace('_', '-')}"
        is_named = described.name is not None or _SNAKE_CASE.fullmatch(parameter.name)
        if parameter.kind is not parameter.POSITIONAL_ONLY and word is not None and is_named:
            options[option] = word
    return options, positionals


def _taken_apart(annotation: Any) -> tuple[Any, Parameter]:
    described = [item for item in getattr(annotation, "__metadata__", ()) if isinstance(item, Parameter)]
    kind = annotation.__origin__ if described else annotation
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not NoneType]
        kind = kinds[0] if len(kinds) == 1 else None
    return kind, described[-1] if described else Parameter()


def _word(name: str, kind: Any) -> _Word | None:
    """None: of another type, which is not read here."""
    if kind is bool:
        return _Word(name, is_flag=True)
    if kind is str:
        return _Word(name)
    if kind == list[str]:
        return _Word(name, is_list=True)
    if get_origin(kind) is Literal:
        return _Word(name, choices=get_args(kind))
    return None
