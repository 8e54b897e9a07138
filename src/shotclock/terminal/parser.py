"""The parser of command lines: tables of commands and options, and one reader for all of them.

Help and the option tables of the reference pages are written from them. The conventions are argparse's, except that
names are never abbreviated, and every mistake is reported at once.
`exec` loads this module at every start, so it imports little.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ..core.limits import parse_duration_ms
from ..core.value_types import JsonObject, field, record, replace, value

Mistakes = list[dict[str, str]]

HELP_WIDTH = 100
_LEAST_HELP_WIDTH = 60  # a narrower terminal breaks the lines itself
_HELP_COLUMN = 24
_VARIABLE = r"\$\{(?:env:)?([A-Za-z_]\w*)(?::-([^}]*))?\}"
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


@value
class Option:
    name: str  # `--timeout`, or the bare name of an argument
    help: str = ""
    metavar: str = ""  # the placeholder of its value; a flag has none
    default: Any = None  # a text is read as if it were typed
    choices: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()  # values that a shell offers; others are taken as well
    repeats: bool = False
    negatable: bool = False
    by_place: bool = False  # its name may be left out
    missing: str = ""  # the message where it is left out; without one it is optional, unless the App refuses it
    is_required: bool = False
    needs: str = ""  # an option without which this one has no meaning
    excludes: tuple[str, ...] = ()  # options that cannot be given beside this one
    read: Callable[[str], object] | None = None  # converts the text; a ValueError is the mistake
    heading: str = "Options"
    key: str = ""
    implied: Any = None  # its value where it is typed without one
    is_outer: bool = False  # goes before the command; behind it, another option has this name
    settle: Callable[[JsonObject], Mistakes] | None = None  # joins the values of several options into one

    @classmethod
    def taking(cls, name: str, metavar: str, help: str = "", **more: Any) -> Option:
        """Return an option that takes a value."""
        return cls(name, help, metavar, **{"key": name.lstrip("-").replace("-", "_"), **more})

    @classmethod
    def flag(cls, name: str, help: str = "", **more: Any) -> Option:
        return cls.taking(name, "", help, **{"default": False, **more})

    @classmethod
    def argument(cls, name: str, help: str = "", **more: Any) -> Option:
        return cls.taking(name, name.upper(), help, **{"by_place": True, "heading": "Arguments", **more})

    @classmethod
    def duration(cls, name: str, help: str = "", *, is_positive: bool = False, **more: Any) -> Option:
        read = positive_duration if is_positive else parse_duration_ms
        return cls.taking(name, "D", help, **{"read": read, **more})

    @classmethod
    def number(cls, name: str, help: str, least: int, most: int | None = None, **more: Any) -> Option:
        return cls.taking(name, **{"metavar": "N", "help": help, "read": number_between(least, most), **more})

    @classmethod
    def json(cls) -> Option:
        return cls.flag("--json", "Print only the envelope on stdout, also on a terminal.")

    @classmethod
    def timeout(cls, default: str = "30s") -> Option:
        return cls.duration("--timeout", "Answer within this time (500ms, 30s, 5m; 0 means no limit).", default=default)

    @property
    def field(self) -> str:
        return self.name.removeprefix("--")

    def read_default(self) -> Any:
        if self.repeats and self.default is None:
            return []
        return self.read(self.default) if self.read is not None and isinstance(self.default, str) else self.default

    def describe(self) -> tuple[str, str]:
        place = self.field.upper()
        name = self.name + (f", --no-{self.field}" if self.negatable else "")
        if self.name[:2] != "--":
            name = place
        elif self.by_place:
            name = f"{place}, {name}"
        elif self.metavar:
            name = f"{name} {self.metavar}"
        text = self.help + (" (repeatable)" if self.repeats and self.name[:2] == "--" else "")
        has_default = isinstance(self.default, str | int) and self.default not in (False, True, "")
        return name, (f"{text} [{self.default}]" if has_default else text).lstrip()


def whole_number(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 15:
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(text)


def number_between(least: int, most: int | None) -> Callable[[str], int]:
    def read_number(text: str) -> int:
        number = whole_number(text)
        if number < least or (most is not None and number > most):
            raise ValueError(f"must be {least} or more" if most is None else f"must be {least} to {most}")
        return number

    return read_number


def expand(text: str) -> str:
    """Replace `${NAME}` and `${NAME:-default}` by variables, as clients of MCP do. Raises ValueError."""

    def find(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ValueError(f"it uses the variable {match[1]}, which is not set")
        return found

    return re.sub(_VARIABLE, find, text)


def name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} should be NAME=VALUE")
    return name, value


def positive_duration(text: str) -> int:
    if not (duration_ms := parse_duration_ms(text)):
        raise ValueError("must be a duration above 0, such as 30s")
    return duration_ms


FORMAT = Option.taking(
    "--format",
    "FORM",
    "text, also off a terminal, or json, the same as --json.",
    choices=("text", "json"),
    key="--format",  # which no parameter of an App has
)


@value
class Subcommand:
    name: str
    summary: str = ""
    options: tuple[Option, ...] = ()
    run: Callable[..., Any] | None = None  # called with the values by the keys of the options
    main: Callable[[list[str]], int] | None = None  # reads the words itself and returns the exit code
    rest: str = ""  # the key of another command line: everything from the first word that is not an option
    usage: str = ""
    heading: str = "Commands"  # in the help of its table; without one, only its name is listed at the end
    description: str = ""  # shown in its help instead of the summary
    epilogue: str = ""
    is_stream: bool = False  # `run` writes its own output instead of an envelope

    @property
    def own(self) -> tuple[Option, ...]:
        """The options, and --json where `run` answers with an envelope."""
        has_json = any(each.name == "--json" for each in self.options)
        return self.options if has_json or self.is_stream or self.run is None else (*self.options, Option.json())

    @property
    def accepted(self) -> tuple[Option, ...]:
        """The options, and --format beside --json, unless the command has a --format of its own."""
        by_name = {each.name: each for each in self.own}
        if "--json" not in by_name or FORMAT.name in by_name:
            return self.own
        json = by_name["--json"]
        heading = "Options of every command" if json.is_outer else json.heading
        return (*self.own, replace(FORMAT, heading=heading))

    def read(self, words: list[str], prefix: str = "shotclock", before: int = 0) -> ParsedLine:
        """Read the words of the command, of which the first few came before it."""
        hint = " ".join(filter(None, ("see", prefix, self.name, "--help")))
        return _LineReader(self, words, hint, before).read()

    def help(self, prefix: str = "shotclock", width: int | None = None) -> str:
        """Return its help, for this terminal unless a width is given."""
        usage, sections = "[OPTIONS]", dict[str, list[tuple[str, str]]]()
        for each in self.accepted:
            sections.setdefault(each.heading, []).append(each.describe())
            if each.by_place:
                place = each.field.upper() + "…" * each.repeats
                usage += f" {place}" if each.missing or each.is_required else f" [{place}]"
        last = next((heading for heading in reversed(sections) if heading != "Arguments"), "Options")
        sections.setdefault(last, []).append(("-h, --help", "show help"))
        usage = f"Usage: {prefix} {self.name} {self.usage or usage}"
        return _page(usage, self.description or self.summary, sections, self.epilogue, width or _help_width())


@value
class CommandTable:
    """Commands under one name, such as `shotclock` or `shotclock inbox`."""

    name: str
    summary: str
    commands: tuple[Subcommand, ...]
    kind: str = "command"  # the word for one of the commands in messages
    epilogue: str = ""
    has_version: bool = False
    spelling: Callable[[str], str] = str  # converts a typed name to the table's spelling

    def find(self, name: str) -> Subcommand | None:
        spelt = self.spelling(name)
        return next((command for command in self.commands if command.name == spelt), None)

    @property
    def names(self) -> list[str]:
        return [command.name for command in self.commands]

    def help(self, width: int | None = None) -> str:
        sections: dict[str, list[tuple[str, str]]] = {}
        for command in self.commands:
            sections.setdefault(command.heading, []).append((command.name, command.summary))
        usage = f"Usage: {self.name} {self.kind.upper()} [OPTIONS]"
        if len(sections) > 1:
            return _grouped_page(usage, self, sections, width or _help_width())
        form = "text or json, before or after the command [text on a terminal, json elsewhere]"
        sections["Options"] = [(f"{FORMAT.name} {FORMAT.metavar}", form), ("-h, --help", "show help")]
        if self.has_version:
            sections["Options"].append(("--version", "show the version"))
        return _page(usage, self.summary, sections, self.epilogue, width or _help_width())


@record
class ParsedLine:
    command: Subcommand | None = None
    words: list[str] = field(default_factory=list)
    before: int = 0  # the number of words that were typed before the command
    typed: JsonObject = field(default_factory=dict)  # the values that were typed, by the keys of the options
    mistakes: Mistakes = field(default_factory=list)
    wants: str = ""
    format: str | None = None  # text or json, where it was asked for
    suggestion: str | None = None
    suggested: list[str] = field(default_factory=list)
    """The names probably meant by unknown options; they are not reported as missing."""

    @property
    def values(self) -> JsonObject:
        options = self.command.own if self.command is not None else ()
        return {**{each.key: each.read_default() for each in options}, **self.typed}

    def refuse(self, field: str, message: str) -> None:
        self.mistakes.append({"field": field, "message": message})

    def refuse_unknown(self, name: str, known: Iterable[str], hint: str) -> str | None:
        nearest, meant = explain(name, known)
        self.refuse(name, f"unknown option; {meant or hint}")
        if nearest is not None:
            self.suggested.append(nearest)
        return nearest


def find_command(table: CommandTable, words: list[str]) -> ParsedLine:
    """Find the command that the words name. Options may precede it."""
    options = words[: words.index("--")] if "--" in words else words
    before = ["", *options]
    places = [n for n, word in enumerate(options) if not is_option(word) and before[n] != FORMAT.name]
    named = [place for place in places if words[place] == "help" or table.find(words[place]) is not None]
    alone = [place for place in places if not is_option(before[place])]
    if not places:
        return _read_without_command(table, options)
    place = (named or alone or places)[0]
    name, others = words[place], [*words[:place], *words[place + 1 :]]
    if name == "help":
        return find_command(table, [*others, "--help"])
    line = ParsedLine(table.find(name), others, before=place)
    if line.command is not None:
        return line
    line.format = _read_without_command(table, options).format
    line.suggestion = explain(name, table.names, table.name, options[:place])[1] or None
    line.refuse(table.kind, f"there is no {table.kind} {name!r}; {line.suggestion or _list_names(table)}")
    return line


def _read_without_command(table: CommandTable, words: list[str]) -> ParsedLine:
    own = (Option.flag("--json"), Option.flag("--version")) if table.has_version else (Option.flag("--json"),)
    line = Subcommand("", options=own).read(words, table.name)
    line.command = None
    if not line.wants and line.typed.get("version"):
        line.wants = "version"
    if not line.wants and not line.mistakes:
        line.refuse(table.kind, f"missing {table.kind.upper()}; {_list_names(table)}")
    return line


def read_command(table: CommandTable, words: list[str]) -> ParsedLine:
    line = find_command(table, words)
    if line.command is None or line.command.main is not None:
        return line
    return line.command.read(line.words, table.name, line.before)


class _LineReader:
    def __init__(self, command: Subcommand, words: list[str], hint: str, before: int) -> None:
        self._command, self._rest, self._hint = command, deque(words), hint
        self._line = ParsedLine(command, words, before)
        self._outer = {each.name: each for each in command.own if each.is_outer}
        self._options = {each.name: each for each in command.accepted if each.name[:2] == "--" and not each.is_outer}
        self._options |= {f"--no-{each.field}": each for each in command.own if each.negatable}

    def read(self) -> ParsedLine:
        arguments: list[str] = []
        while self._rest:
            is_before = len(self._line.words) - len(self._rest) < self._line.before
            word = self._rest.popleft()
            if word == "--":
                arguments += self._rest
                break
            if not is_option(word):
                arguments.append(word)
                if self._command.rest:
                    arguments += self._rest
                    break
                continue
            name, equals, text = word.partition("=")
            if name in ("-h", "--help"):
                self._line.wants = "help"
            elif is_before and name in self._outer:
                self._read_option(self._outer[name], name, text if equals else None)
            elif name in self._options:
                self._read_option(self._options[name], name, text if equals else None)
            elif (chooser := self._option_with(name.removeprefix("--"))) is not None:
                self._line.refuse(name, f"unknown option; did you mean {chooser.name} {name.removeprefix('--')}?")
            elif (meant := f"--{text if equals else next(iter(self._rest), '')}") in self._options:
                self._line.refuse(name, f"unknown option; did you mean {meant}?")  # --scope project for --project
                if not equals:
                    self._rest.popleft()
            else:
                nearest = self._line.refuse_unknown(name, [*self._options, "--help"], self._hint)
                if not equals:
                    self._skip_value(self._options.get(nearest or ""))
        if self._command.rest:
            self._line.typed[self._command.rest] = arguments
        else:
            self._place(arguments)
        self._settle_format()
        reported = {mistake["field"] for mistake in self._line.mistakes}
        for each in self._command.own:
            if each.field in reported or each.name in self._line.suggested:
                continue
            if self._is_typed(each.name):
                self._check_others(each)
            elif each.missing:
                self._line.refuse(each.field, each.missing)
        return self._line

    def _option_with(self, choice: str) -> Option | None:
        """Return the option that has a choice of this name: somebody wrote --project for --scope project."""
        return next((each for each in self._options.values() if choice in each.choices and not each.by_place), None)

    def _settle_format(self) -> None:
        """Make `--format json` mean --json, and store the format that was asked for."""
        if (json := self._outer.get("--json") or self._options.get("--json")) is None:
            return
        typed, form = self._line.typed, self._line.typed.pop(FORMAT.key, None)
        if form == "text" and typed.get(json.key):
            self._line.refuse("format", "--format text and --json exclude each other: leave one out")
        if form == "json":
            typed[json.key] = True
        self._line.format = "json" if typed.get(json.key) else form

    def _is_typed(self, name: str) -> bool:
        return any(each.key in self._line.typed for each in self._command.own if each.name == name)

    def _check_others(self, each: Option) -> None:
        if each.needs and each.needs not in self._line.suggested and not self._is_typed(each.needs):
            self._line.refuse(each.field, f"{each.name} needs {each.needs}")
        for other in filter(self._is_typed, each.excludes):
            self._line.refuse(each.field, f"{each.name} and {other} exclude each other: leave one out")

    def _skip_value(self, nearest: Option | None) -> None:
        """Skip the value of an unknown option, or it would be taken for an argument."""
        takes_value = (nearest is None or nearest.metavar) and self._rest and not is_option(self._rest[0])
        if takes_value and (not self._command.rest or "--" in self._rest):
            self._rest.popleft()

    def _read_option(self, each: Option, name: str, text: str | None) -> None:
        if not each.metavar:
            if text is not None and text.lower() not in (*_TRUE, *_FALSE):
                self._line.refuse(each.field, f"{name} is a flag: {text[:40]!r} is neither true nor false")
            is_true = text is None or text.lower() not in _FALSE
            self._store(each, name, is_true == (name == each.name))
            return
        if text is None:
            if each.implied is not None and (not self._rest or is_option(self._rest[0])):
                self._store(each, name, each.implied)
                return
            if not self._rest or self._rest[0][:2] == "--":
                self._line.refuse(each.field, each.missing or f"{name} needs a value")
                return
            text = self._rest.popleft()
        self._put(each, text)

    def _place(self, arguments: list[str]) -> None:
        named: Option | None = None
        for each in self._command.own:
            if not each.by_place or not arguments:
                continue
            if each.key in self._line.typed:
                named = named or each
            elif named is not None:
                text = arguments.pop(0)
                message = f"{text!r} is unclear beside {named.name}: write {each.name} {text!r}"
                self._line.refuse(each.field, message)
            else:
                taken = len(arguments) if each.repeats else 1
                for text in arguments[:taken]:
                    self._put(each, text)
                arguments = arguments[taken:]
        for text in arguments:
            self._line.refuse("arguments", f"unexpected argument {text!r}")

    def _put(self, each: Option, text: str) -> None:
        if each.choices and text not in each.choices:
            self._line.refuse(each.field, f"{text[:40]!r} is none of {', '.join(each.choices)}")
        elif each.missing and not text.strip():
            self._line.refuse(each.field, each.missing)
        else:
            try:
                self._store(each, each.name, text if each.read is None else each.read(text))
            except ValueError as error:
                self._line.refuse(each.field, str(error))

    def _store(self, each: Option, name: str, value: object) -> None:
        typed = self._line.typed
        if each.repeats:
            typed.setdefault(each.key, []).append(value)
        elif each.key in typed and not self._command.rest:
            self._line.refuse(each.field, f"{name} was given before: leave one out")
        else:
            typed[each.key] = value  # before another command line the last one counts: wrappers add theirs


def is_option(word: str) -> bool:
    """Return whether a word is an option. `-`, a negative number and a word with a space in its name are values."""
    name = word.partition("=")[0]
    return word[:1] == "-" and word != "-" and not word[1:2].isdigit() and word[1:2] != "." and " " not in name


def _list_names(table: CommandTable) -> str:
    return f"there are {', '.join(table.names)} and help"


def nearest_of(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar known name."""
    return explain(name, known)[0]


def explain(name: str, known: Iterable[str], table: str = "", words: Iterable[str] = ()) -> tuple[str | None, str]:
    from ..core import foreign_words  # imports difflib, which only mistakes need

    return foreign_words.explain(name, list(known), table, words)


def _help_width() -> int:
    """Return the width of help on this terminal, and the usual one elsewhere."""
    try:
        columns = os.get_terminal_size(1).columns
    except (OSError, ValueError):
        return HELP_WIDTH
    written = os.environ.get("COLUMNS", "")
    columns = int(written) if written.isascii() and written.isdecimal() else columns
    return min(HELP_WIDTH, max(_LEAST_HELP_WIDTH, columns)) if columns else HELP_WIDTH


def _grouped_page(usage: str, table: CommandTable, sections: dict[str, list[tuple[str, str]]], width: int) -> str:
    """Return the help of many commands, on one screen."""
    others = ", ".join(name for name, _ in sections.pop("", []))
    column = max(len(name) for entries in sections.values() for name, _ in entries) + 4
    lines = [usage, *_wrap(table.summary, width)]
    for heading, entries in sections.items():
        lines += [f"{heading}:", *(line for entry in entries for line in _entry(*entry, width, column))]
    lines += _wrap(f"Others: {others}." if others else "", width) + _wrap(table.epilogue, width)
    return "\n".join(lines) + "\n"


def _page(usage: str, summary: str, sections: dict[str, list[tuple[str, str]]], epilogue: str, width: int) -> str:
    lines = [usage, ""]
    if summary:
        lines += [*_wrap(summary, width), ""]
    for heading, entries in sections.items():
        lines += [f"{heading}:", *(line for entry in entries for line in _entry(*entry, width)), ""]
    if epilogue:
        lines += [*_wrap(epilogue, width), ""]
    return "\n".join(lines[:-1]) + "\n"


def _entry(name: str, text: str, width: int, column: int = _HELP_COLUMN) -> list[str]:
    indent = " " * column
    lines = [indent + line for line in _wrap(text, width - column)]
    if len(name) + 4 > column or not lines:
        return [f"  {name}", *lines]
    return [f"  {name}".ljust(column) + lines[0].lstrip(), *lines[1:]]


def _wrap(text: str, width: int) -> list[str]:
    import textwrap  # only help needs it, and `exec` starts without

    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        if any(line[:1].isspace() for line in paragraph.splitlines()):  # an example keeps its lines
            lines += [*paragraph.splitlines(), ""]
        else:
            lines += [*textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False), ""]
    return lines[:-1]
