"""The man pages and the completions that the wheel installs, from the tables of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shotclock._version import __version__
from shotclock.main import load, table
from shotclock.terminal.completion import bash_script, fish_script, places_of, zsh_script
from shotclock.terminal.parser import CommandTable, Subcommand

FOLDER = Path(__file__).resolve().parents[1] / "share"
TABLE = table()
PROGRAM = TABLE.name


def roff(text: str) -> str:
    """Return text for a man page: no letter of it is a command."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...").replace("`", "'")
    return "\n".join("\\&" + line if line[:1] in (".", "'") else line for line in plain.splitlines())


def paragraphs(text: str) -> Iterator[str]:
    """Yield the lines of a text; indented examples keep theirs."""
    for paragraph in text.split("\n\n"):
        is_example = any(line[:1].isspace() for line in paragraph.splitlines())
        yield ".PP"
        yield from [".EX", roff(paragraph), ".EE"] if is_example else [roff(" ".join(paragraph.split()))]


def usage(name: str, command: Subcommand) -> str:
    """Return the synopsis of a command."""
    places = [f"{each.field.upper()}{'…' * each.repeats}" for each in command.accepted if each.by_place]
    return f"{name} {command.usage or ' '.join(['[OPTIONS]', *places])}"


def command_sections(command: Subcommand) -> Iterator[str]:
    """Yield the options of a command by heading, and what else its help says."""
    heading = None
    for each in sorted(command.accepted, key=lambda each: each.heading != "Arguments"):
        if each.heading != heading:
            heading = each.heading
            yield f".SS {roff(heading)}"
        name, text = each.describe()
        yield from [".TP", f"\\fB{roff(name)}\\fR", roff(" ".join(text.split()))]
    if command.epilogue:
        yield from [".SS Notes", *paragraphs(command.epilogue)]


def page(name: str, summary: str, body: Iterator[str]) -> str:
    """Return one man page."""
    title = name.replace(" ", "-")
    others = f"\\fB{PROGRAM}\\fR(1)" if name != PROGRAM else "\\fBtimeout\\fR(1)"
    lines = [
        f'.TH "{title.upper()}" 1 "" "{PROGRAM} {__version__}"',
        ".SH NAME",
        f"{roff(title)} \\- {roff(summary.rstrip('.'))}",
        *body,
        ".SH SEE ALSO",
        others,
    ]
    return "\n".join(lines) + "\n"


def command_body(name: str, command: Subcommand) -> Iterator[str]:
    """Yield the page of a subcommand without verbs."""
    yield from [".SH SYNOPSIS", roff(usage(name, command))]
    yield from [".SH DESCRIPTION", *paragraphs(command.description or command.summary)]
    yield from [".SH OPTIONS", *command_sections(command)]


def table_body(table: CommandTable, name: str) -> Iterator[str]:
    """Yield the page of a command with verbs, each with its options."""
    yield from [".SH SYNOPSIS", roff(f"{name} {table.kind.upper()} [OPTIONS]")]
    yield from [".SH DESCRIPTION", *paragraphs(table.summary)]
    for command in table.commands:
        yield from [f".SH {roff(command.name.upper())}", roff(usage(f"{name} {command.name}", command))]
        yield from [*paragraphs(command.description or command.summary), *command_sections(command)]


def program_body() -> Iterator[str]:
    """Yield the page of the program: its subcommands, each with a page of its own."""
    yield from [".SH SYNOPSIS", roff(f"{PROGRAM} SUBCOMMAND [OPTIONS]")]
    yield from [".SH DESCRIPTION", *paragraphs(TABLE.summary), *paragraphs(TABLE.epilogue), ".SH COMMANDS"]
    for command in TABLE.commands:
        yield from [".TP", f"\\fB{PROGRAM}\\-{roff(command.name)}\\fR(1)", roff(command.summary)]


def generated_files() -> dict[Path, str]:
    """Return the text of every man page and completion."""
    man, completions = FOLDER / "man", FOLDER / "completions"
    files = {man / f"{PROGRAM}.1": page(PROGRAM, TABLE.summary, program_body())}
    for entry in TABLE.commands:
        name, found = f"{PROGRAM} {entry.name}", load(entry.name)
        body = table_body(found, name) if isinstance(found, CommandTable) else command_body(name, found)
        files[man / f"{PROGRAM}-{entry.name}.1"] = page(name, entry.summary, body)
    places = list(places_of(TABLE, lambda command: load(command.name)))
    files[completions / f"{PROGRAM}.bash"] = bash_script(PROGRAM, places)
    files[completions / f"_{PROGRAM}"] = zsh_script(PROGRAM, places)
    files[completions / f"{PROGRAM}.fish"] = fish_script(PROGRAM, places)
    return files
