"""The reader of command lines: a table of commands, one reader for all of them, every mistake at once.

`shotclock`, its subcommands (`exec` included) and the commands of every App are tables of `Command` and `Parameter`.
The conventions are argparse's: `--name value`, `--name=value`, `--` ends the options, options may stand before or after
the subcommand, `-5` is a number. Two things are not: a name is never abbreviated, and reading goes on after a mistake,
so that all of them are reported together. `exec` pays for this module at every start, so it imports nothing but what
it always needs.
"""

from __future__ import annotations

from ..core.clocks import parse_duration_ms
from ..core.value_types import field, record, value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

Mistakes = list[dict[str, str]]

HELP_WIDTH = 100
_HELP_COLUMN = 24
_YES, _NO = ("true", "yes", "1"), ("false", "no", "0")
_TRUE_OR_FALSE = ("true", "yes", "false", "no")


@value
class Parameter:
    """One option or argument. Made by `option`, `flag` and `argument`."""

    name: str
    """As it is typed: `--timeout`, or the bare name of an argument."""
    help: str = ""
    metavar: str = ""
    """What stands for its value in the help; a flag has none."""
    default: Any = None
    """Where it is a text, as it would be typed."""
    choices: tuple[str, ...] = ()
    repeats: bool = False
    """It may be given several times, and is a list."""
    negatable: bool = False
    """There is a `--no-name` as well."""
    by_place: bool = False
    """It may be given without its name."""
    required: bool = False
    read: Callable[[str], object] | None = None
    """Makes the value of the text; its ValueError is the mistake."""
    heading: str = "Options"
    key: str = ""
    others: tuple[str, ...] = ()
    """What other tools call this option; whoever types that is told its name here."""

    @property
    def field(self) -> str:
        """Return the name as mistakes give it."""
        return self.name.removeprefix("--")

    def read_default(self) -> Any:
        if self.repeats and self.default is None:
            return []
        return self.read(self.default) if self.read is not None and isinstance(self.default, str) else self.default


def option(name: str, metavar: str, help: str = "", **more: Any) -> Parameter:
    """Declare an option with a value."""
    return Parameter(name, help, metavar, **{"key": _key(name), **more})


def flag(name: str, help: str = "", **more: Any) -> Parameter:
    """Declare an option without a value."""
    return Parameter(name, help, default=more.pop("default", False), **{"key": _key(name), **more})


def argument(name: str, help: str = "", **more: Any) -> Parameter:
    """Declare an argument: it has a place, and no dashes."""
    shown = name.upper()
    return Parameter(name, help, shown, **{"key": _key(name), "by_place": True, "heading": "Arguments", **more})


def duration(name: str, help: str = "", **more: Any) -> Parameter:
    """Declare an option whose value is a duration, in milliseconds."""
    return option(name, "D", help, **{"read": parse_duration_ms, **more})


def whole_number(text: str) -> int:
    """Read a whole number. Raises ValueError with a message for whoever typed it."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 15:
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(text)


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


@value
class Command:
    """A command of a table, and what it takes."""

    name: str
    summary: str = ""
    parameters: tuple[Parameter, ...] = ()
    run: Callable[..., Any] | None = None
    """Called with the values, by the keys of the parameters."""
    main: Callable[[list[str]], int] | None = None
    """Reads its words itself: it has a table, or subcommands, of its own."""
    rest: str = ""
    """The key of everything from the first word on that is no option: another command line."""
    usage: str = ""
    description: str = ""
    """What the help says below the usage, instead of the summary."""
    epilogue: str = ""
    heading: str = "Commands"


@value
class CommandTable:
    """Commands under one name, such as `shotclock` or `shotclock inbox`."""

    name: str
    summary: str
    commands: tuple[Command, ...]
    kind: str = "command"
    """What messages call one of the commands."""
    epilogue: str = ""
    has_version: bool = False
    spelling: Callable[[str], str] = str
    """The name of a command as the table has it, however it was typed."""
    elsewhere: Callable[[str], str | None] = lambda name: None
    """Gives the command line of a command that another table has under this name."""

    def find(self, name: str) -> Command | None:
        meant = self.spelling(name)
        return next((command for command in self.commands if command.name == meant), None)

    @property
    def names(self) -> list[str]:
        return [command.name for command in self.commands]


@record
class Reading:
    """What was read, and what is wrong with it."""

    command: Command | None = None
    words: list[str] = field(default_factory=list)
    """Those behind the name of the command, and those that stood before it."""
    given: dict[str, Any] = field(default_factory=dict)
    """By the keys of the parameters, only what was said."""
    guessed: dict[str, Any] = field(default_factory=dict)
    """What was said under a name that is nearly right: good enough not to be missing, and for nothing else."""
    mistakes: Mistakes = field(default_factory=list)
    wants: str = ""
    """"help" or "version", where that is asked for."""
    suggestion: str | None = None

    @property
    def values(self) -> dict[str, Any]:
        """Return what was said, and the defaults of everything else."""
        parameters = self.command.parameters if self.command is not None else ()
        return {**{each.key: each.read_default() for each in parameters}, **self.guessed, **self.given}

    def refuse(self, field: str, message: str) -> None:
        self.mistakes.append({"field": field, "message": message})


# --- reading --------------------------------------------------------------------------------------------------


def read_command(table: CommandTable, words: list[str]) -> Reading:
    """Find the command, which options may precede, and read its words with its table."""
    place = _find_command(table, words)
    before = words if place is None else words[:place]
    if place is not None:
        name = words[place]
        command = table.find(name)
        words = [*before, *words[place + 1 :]]
        if command is None and name == "help":
            return Reading(table.find(words[0]) if words else None, wants="help")
        if command is not None:
            if command.main is not None:
                return Reading(command, words)
            return read(command, words, hint=f"see {table.name} {command.name} --help")
        reading = Reading(words=words, given={"json": "--json" in words})
        if (elsewhere := table.elsewhere(name)) is not None:
            reading.suggestion = f"that is `{elsewhere}`"
        elif (nearest := nearest_of(name, table.names)) is not None:
            reading.suggestion = f"did you mean {nearest}?"
        listed = reading.suggestion or _list_names(table)
        reading.refuse(table.kind, f"there is no {table.kind} {name!r}; {listed}")
        return reading
    if "-h" in before or "--help" in before:
        return Reading(wants="help")
    if table.has_version and "--version" in before:
        others = [word for word in before if word not in ("--version", "--json")]
        reading = Reading(given={"json": "--json" in before}, wants="version")
        for word in others:
            if is_option(word):
                name = word.partition("=")[0]
                nearest = nearest_of(name, ["--version", "--json"])
                reading.refuse(name, _describe_unknown(nearest, f"see {table.name} --help"))
            else:
                reading.refuse("arguments", f"{word!r} is one too many")
        return reading
    reading = Reading(words=words, given={"json": "--json" in before})
    known = {each.name for command in table.commands for each in command.parameters}
    for word in before:
        if is_option(word) and (name := word.partition("=")[0]) not in known:
            reading.refuse(name, _describe_unknown(nearest_of(name, known), f"see {table.name} --help"))
    if not reading.mistakes:
        reading.refuse(table.kind, f"none given; {_list_names(table)}")
    return reading


def read(command: Command, words: list[str], *, hint: str) -> Reading:
    """Read the words of one command. `hint` says where to look, where nothing is near what was typed."""
    return _Reader(command, words, hint).read()


class _Reader:
    """The reading of the words of one command."""

    def __init__(self, command: Command, words: list[str], hint: str) -> None:
        self._command, self._words, self._hint = command, words, hint
        self._reading = Reading(command, words)
        self._options = {each.name: each for each in command.parameters if each.name[:2] == "--"}
        self._negated = {f"--no-{each.field}": each for each in command.parameters if each.negatable}
        self._next = 0
        self._words_before: dict[str, int] = {}
        """By the keys of options with a value: how many words without a name stand before the first of them."""
        self._flag_before: dict[int, Parameter] = {}
        """By the number of a word without a name: the flag that it stands behind."""

    def read(self) -> Reading:
        given: list[str] = []
        while self._next < len(self._words):
            word = self._words[self._next]
            self._next += 1
            if word == "--":
                given += self._words[self._next :]
                break
            if is_option(word):
                self._read_option(word, len(given))
            elif self._command.rest:
                given = self._words[self._next - 1 :]
                break
            else:
                given.append(word)
        if self._command.rest:
            self._reading.given[self._command.rest] = given
        else:
            self._place(given)
        for each in self._command.parameters:
            if each.required and not self._is_reported(each):
                self._reading.refuse(each.field, f"{each.metavar or each.name} is missing")
        return self._reading

    def _is_reported(self, parameter: Parameter) -> bool:
        """Return whether it was given, or is the matter of a mistake already."""
        known = parameter.key in self._reading.given or parameter.key in self._reading.guessed
        return known or any(mistake["field"] == parameter.field for mistake in self._reading.mistakes)

    def _read_option(self, word: str, words_before: int) -> None:
        name, equals, text = word.partition("=")
        if name in ("-h", "--help"):
            self._reading.wants = "help"
            return
        parameter = self._options.get(name) or self._negated.get(name)
        if parameter is None:
            self._read_unknown(name, bool(equals))
        elif not parameter.metavar:
            self._read_flag(parameter, name, text if equals else None)
            if not equals and self._is_value(self._next) and self._words[self._next].lower() in _TRUE_OR_FALSE:
                self._flag_before[words_before] = parameter
        elif not equals and not self._is_value(self._next):
            self._reading.refuse(parameter.field, f"{name} needs a value")
        else:
            if not equals:
                text = self._words[self._next]
                self._next += 1
            self._words_before.setdefault(parameter.key, words_before)
            self._put(parameter, text)

    def _is_value(self, place: int) -> bool:
        return place < len(self._words) and self._words[place][:2] != "--"

    def _read_flag(self, parameter: Parameter, name: str, text: str | None) -> None:
        if text is not None and text.lower() not in (*_YES, *_NO):
            self._reading.refuse(parameter.field, f"{name} takes no value, and {text[:40]!r} is neither true nor false")
            text = None  # as if it had none: who asks for --json gets the refusal as JSON
        meant = (text is None or text.lower() in _YES) == (name == parameter.name)
        if parameter.key in self._reading.given and not self._command.rest:
            self._reading.refuse(parameter.field, f"{name} was given before: leave one out")
        self._reading.given[parameter.key] = meant

    def _read_unknown(self, name: str, has_value: bool) -> None:
        """Read on as if it had been spelt right, or its value would be taken for an argument."""
        known = [*self._options, *self._negated, "--help"]
        others = {other: each.name for each in self._command.parameters for other in each.others}
        nearest = others.get(name) or nearest_of(name, known)
        self._reading.refuse(name, _describe_unknown(nearest, self._hint))
        said = {word.partition("=")[0] for word in self._words}
        meant = None if nearest is None or nearest in said else self._options.get(nearest)
        takes_value = meant is None or meant.metavar
        if has_value or not takes_value or not self._is_value(self._next):
            return
        text = self._words[self._next]
        following = self._words[self._next + 1 : self._next + 2]
        if self._command.rest and not any(word[:2] == "--" for word in following):
            return  # it is rather the command than the value
        if is_option(text):
            return
        self._next += 1
        if meant is not None and (not meant.choices or text in meant.choices):
            try:
                value = text if meant.read is None else meant.read(text)
            except ValueError:  # the name is reported
                return
            self._reading.guessed[meant.key] = [value] if meant.repeats else value

    def _place(self, given: list[str]) -> None:
        """Hand the words without a name to the parameters that have a place, in their order."""
        named: Parameter | None = None
        rest = list(enumerate(given))
        for each in self._command.parameters:
            if not each.by_place:
                continue
            if each.key in self._reading.given:
                if named is None and rest and rest[0][0] < self._words_before.get(each.key, 0):
                    text = rest[0][1]
                    self._reading.refuse(each.field, f"given twice, as {text!r} and by {each.name}: leave one out")
                    rest = [] if each.repeats else rest[1:]
                else:
                    named = named or each
            elif rest and named is not None:
                _, text = rest.pop(0)
                self._reading.refuse(each.field, f"{text!r} comes after {named.name}: write {each.name} {text!r}")
            elif each.repeats:
                for _, text in rest:
                    self._put(each, text)
                rest = []
            else:
                while rest and each.metavar == "N" and self._refuse_value_of_flag(*rest[0]):
                    rest.pop(0)
                if rest:
                    self._put(each, rest.pop(0)[1])
        for number, text in rest:
            if not self._refuse_value_of_flag(number, text):
                self._reading.refuse("arguments", f"{text!r} is one too many")

    def _refuse_value_of_flag(self, number: int, text: str) -> bool:
        """Return whether a word that fits nowhere is `true` or `false` behind a flag, and so was meant for it."""
        meant = self._flag_before.get(number)
        if meant is None:
            return False
        without = f"{meant.name} or --no-{meant.field}" if meant.negatable else f"{meant.name} alone"
        self._reading.refuse(meant.field, f"{meant.name} takes no separate value, here {text!r}: write {without}")
        return True

    def _put(self, parameter: Parameter, text: str) -> None:
        given = self._reading.given
        if parameter.choices and text not in parameter.choices:
            self._reading.refuse(parameter.field, f"{text[:40]!r} is none of {', '.join(parameter.choices)}")
            return
        try:
            value = text if parameter.read is None else parameter.read(text)
        except ValueError as error:
            self._reading.refuse(parameter.field, str(error))
            return
        if parameter.repeats:
            given.setdefault(parameter.key, []).append(value)
        elif parameter.key in given and not self._command.rest:
            self._reading.refuse(parameter.field, f"{parameter.name} was given before: leave one out")
        else:
            given[parameter.key] = value  # before another command line the last one counts: wrappers add theirs


def is_option(word: str) -> bool:
    """Return whether a word is an option: `-`, a negative number and what has a space in its name are values."""
    name = word.partition("=")[0]
    return word[:1] == "-" and word != "-" and not word[1:2].isdigit() and word[1:2] != "." and " " not in name


def _find_command(table: CommandTable, words: list[str]) -> int | None:
    """Return the place of the first word that is neither an option nor the value of one."""
    for place, word in enumerate(words):
        if word == "--":
            return None
        if is_option(word):
            continue
        before = words[place - 1] if place else ""
        if not is_option(before) or "=" in before:
            return place
        found = table.find(word)
        if found is not None and not any(each.name == before and each.metavar for each in found.parameters):
            return place
        known = [each for command in table.commands for each in command.parameters if each.name == before]
        if known and not any(each.metavar for each in known):
            return place
    return None


def _list_names(table: CommandTable) -> str:
    names = [*table.names, *([] if "help" in table.names else ["help"])]
    return f"there are {', '.join(names[:-1])} and {names[-1]}"


def _describe_unknown(nearest: str | None, hint: str) -> str:
    return f"unknown option; {hint if nearest is None else f'did you mean {nearest}?'}"


def nearest_of(name: str, known: Iterable[str]) -> str | None:
    """Return what was probably meant. Dashes are left out, which would make any two options look alike."""
    import difflib

    named = {each.lstrip("-"): each for each in known}
    close = difflib.get_close_matches(name.lstrip("-").lower(), named, n=1)
    return named[close[0]] if close else None


# --- help -----------------------------------------------------------------------------------------------------


def table_help(table: CommandTable) -> str:
    """Write the help on all commands of a table."""
    usage = f"Usage: {table.name} {table.kind.upper()} [OPTIONS]"
    sections: dict[str, list[tuple[str, str]]] = {}
    for command in table.commands:
        sections.setdefault(command.heading, []).append((command.name, command.summary))
    common = [("-h, --help", f"this text, and more with a {table.kind} before it")]
    if table.has_version:
        common.append(("--version", "which version this is"))
    sections["Options"] = common
    return _page(usage, table.summary, sections, table.epilogue)


def command_help(table: CommandTable, command: Command) -> str:
    """Write the help on one command."""
    places = [each for each in command.parameters if each.by_place]
    words = " ".join(_in_usage(each) for each in places)
    usage = f"Usage: {table.name} {command.name} " + (command.usage or f"[OPTIONS] {words}".strip())
    sections: dict[str, list[tuple[str, str]]] = {}
    for each in command.parameters:
        sections.setdefault(each.heading, []).append((_name_in_help(each), _text_in_help(each)))
    last = next((heading for heading in reversed(sections) if heading != "Arguments"), "Options")
    sections.setdefault(last, []).append(("-h, --help", "this text"))
    return _page(usage, command.description or command.summary, sections, command.epilogue)


def _in_usage(parameter: Parameter) -> str:
    shown = _placeholder(parameter) + ("…" if parameter.repeats else "")
    return shown if parameter.required else f"[{shown}]"


def _placeholder(parameter: Parameter) -> str:
    return parameter.field.upper()


def _name_in_help(parameter: Parameter) -> str:
    if parameter.name[:2] != "--":
        return _placeholder(parameter)
    shown = parameter.name
    if parameter.negatable:
        shown += f", --no-{parameter.field}"
    if parameter.metavar and not parameter.by_place:
        shown += f" {parameter.metavar}"
    return f"{_placeholder(parameter)}, {shown}" if parameter.by_place else shown


def _text_in_help(parameter: Parameter) -> str:
    text = parameter.help
    if parameter.repeats and parameter.name[:2] == "--":
        text += " (repeatable)"
    shows = isinstance(parameter.default, str | int) and parameter.default not in (False, True, "")
    return f"{text} [{parameter.default}]".lstrip() if shows else text.lstrip()


def _page(usage: str, summary: str, sections: dict[str, list[tuple[str, str]]], epilogue: str) -> str:
    lines = [usage, ""]
    if summary:
        lines += [*_wrap(summary), ""]
    for heading, entries in sections.items():
        if entries:
            lines += [f"{heading}:", *(line for entry in entries for line in _entry(*entry)), ""]
    if epilogue:
        lines += [*_wrap(epilogue), ""]
    return "\n".join(lines[:-1]) + "\n"


def _entry(name: str, text: str) -> list[str]:
    indent = " " * _HELP_COLUMN
    lines = _wrap(text, HELP_WIDTH - _HELP_COLUMN)
    if len(name) + 4 > _HELP_COLUMN:
        return [f"  {name}", *(indent + line for line in lines)]
    first, *others = lines or [""]
    return [f"  {name}".ljust(_HELP_COLUMN) + first if first else f"  {name}", *(indent + line for line in others)]


def _wrap(text: str, width: int = HELP_WIDTH) -> list[str]:
    import textwrap

    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        if any(line[:1].isspace() for line in paragraph.splitlines()):  # an example, as it was written
            lines += [*paragraph.splitlines(), ""]
            continue
        lines += [*textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False), ""]
    return lines[:-1]
