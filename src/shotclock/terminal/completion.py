"""Completion of command lines in bash, zsh and fish: scripts with every command and option of a table.

A script is complete in itself: no program is started while a person types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ..calls.call import Outcome
from ..core.errors import Ending
from ..core.value_types import value
from .parser import CommandTable, Option, Subcommand
from .subcommand import ChildWork

SHELLS = ("bash", "zsh", "fish")
_JSON = Option.flag("--json", "Print an envelope with the script instead of the script.", key="json_only")
_PLAIN_WORD = re.compile(r"[\w./:@%+=-]+")  # needs no quotes in any shell

Find = Callable[[Subcommand], "Subcommand | CommandTable"]


@value
class Completions:
    """The commands and options at one place of the command line, such as `shotclock inbox`."""

    path: tuple[str, ...]
    commands: tuple[tuple[str, str], ...] = ()
    options: tuple[Option, ...] = ()

    @property
    def key(self) -> str:
        return "".join(f"/{name}" for name in self.path)

    @property
    def flags(self) -> list[tuple[str, str]]:
        """The options with their descriptions."""
        found: dict[str, str] = {}
        for each in self.options:
            if each.name[:2] == "--":
                found.setdefault(each.name, each.help)
                if each.negatable:
                    found.setdefault(f"--no-{each.field}", f"Not {each.name}.")
        return [*found.items(), ("--help", "Show help.")]

    @property
    def valued(self) -> dict[str, list[str]]:
        """The options that take a value, with the values that can be suggested."""
        return {each.name: _suggested(each) for each in self.options if each.name[:2] == "--" and each.metavar}

    @property
    def words(self) -> list[str]:
        """The values of the arguments that can be suggested."""
        return [word for each in self.options if each.by_place for word in _suggested(each)]


def _suggested(each: Option) -> list[str]:
    return [word for word in (*each.choices, *each.suggestions) if _PLAIN_WORD.fullmatch(word)]


def _itself(command: Subcommand) -> Subcommand:
    return command


def places_of(table: CommandTable, find: Find, path: tuple[str, ...] = ()) -> Iterator[Completions]:
    """Yield the places of a table. `find` returns the table or the options behind a command."""
    own = (Option("--format", "text or json", "FORM", choices=("text", "json")),)
    version = (Option("--version", "Show the version."),) if table.has_version else ()
    yield Completions(path, tuple((command.name, command.summary) for command in table.commands), (*own, *version))
    for command in table.commands:
        behind = find(command)
        if isinstance(behind, CommandTable):
            yield from places_of(behind, _itself, (*path, command.name))
        else:
            yield Completions((*path, command.name), (), behind.accepted)


def completion_command(program: str, places: Callable[[], Iterator[Completions]]) -> Subcommand:
    """Return the subcommand `completion`, which prints the script for a shell."""

    def run(shell: str, json_only: bool) -> ChildWork:
        def body() -> Outcome:
            script = SCRIPTS[shell](program, list(places()))
            value = None if json_only else script  # a text is printed as it is
            return Outcome(Ending.FINISHED, data={"shell": shell, "script": script}, value=value)

        return ChildWork("completion", body)

    return Subcommand(
        "completion",
        "Print a script that completes commands and options in bash, zsh or fish.",
        (
            Option.argument("shell", "bash, zsh or fish.", choices=SHELLS, missing="name a shell: bash, zsh or fish"),
            _JSON,
        ),
        run=run,
        epilogue=f"To use it:\n\n"
        f'  eval "$({program} completion bash)"    # in ~/.bashrc\n'
        f'  eval "$({program} completion zsh)"     # in ~/.zshrc, after compinit\n'
        f"  {program} completion fish | source     # in ~/.config/fish/config.fish",
    )


def bash_script(program: str, places: list[Completions]) -> str:
    name = _function_name(program)
    lines = [
        f"# Completion of {program} in bash.",
        f"{name}() {{",
        "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} at= word words=",
        '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        *_descend(places),
        "    done",
        '    case "$at $previous" in',
    ]
    for patterns, words in _by_values(places):
        reply = f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$current"))' if words else "COMPREPLY=()"
        lines.append(f"        {patterns}) {reply}; return ;;")
    lines += ["    esac", '    case "$at" in']
    for place in places:
        flags = " ".join(flag for flag, _ in place.flags)
        others = " ".join([*(command for command, _ in place.commands), *place.words])
        lines.append(f'        "{place.key}") [[ $current == -* ]] && words="{flags}" || words="{others}" ;;')
    lines += [
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        f"complete -o bashdefault -o default -F {name} {program}",
    ]
    return "\n".join(lines) + "\n"


def zsh_script(program: str, places: list[Completions]) -> str:
    name = _function_name(program)
    lines = [
        f"#compdef {program}",
        f"{name}() {{",
        '    local at="" word previous="${words[CURRENT-1]}"',
        "    local -a found",
        '    for word in "${(@)words[2,CURRENT-1]}"; do',
        *_descend(places),
        "    done",
        '    case "$at $previous" in',
    ]
    for patterns, words in _by_values(places):
        reply = f"compadd -- {' '.join(words)}" if words else "_files"
        lines.append(f"        ({patterns}) {reply}; return ;;")
    lines += ["    esac", '    case "$at" in']
    for place in places:
        flags = " ".join(_zsh_entry(*entry) for entry in place.flags)
        commands = " ".join(_zsh_entry(*entry) for entry in (*place.commands, *((word, "") for word in place.words)))
        lines.append(f'        ("{place.key}") [[ $PREFIX == -* ]] && found=({flags}) || found=({commands}) ;;')
    lines += [
        "    esac",
        "    (( $#found )) && _describe value found || _files",
        "}",
        f'if [[ "$funcstack[1]" == {name} ]]; then {name} "$@"; else compdef {name} {program}; fi',
    ]
    return "\n".join(lines) + "\n"


def fish_script(program: str, places: list[Completions]) -> str:
    name = _function_name(program)
    lines = [
        f"# Completion of {program} in fish.",
        f"function {name}_at",
        "    set -l at ''",
        "    set -l words (commandline -opc)",
        "    set -e words[1]",
        "    for word in $words",
        '        switch "$at/$word"',
        *(f"            case {_fish(place.key)}\n                set at {_fish(place.key)}" for place in places[1:]),
        "        end",
        "    end",
        '    test "$at" = "$argv[1]"',
        "end",
    ]
    for place in places:
        start = f"complete -c {program} -n {_fish(f'{name}_at {_fish(place.key)}')}"
        entries = [*place.commands, *((word, "") for word in place.words)]
        lines += [f"{start} -f -a {_fish(word)} -d {_fish(text)}" for word, text in entries]
        for flag, text in place.flags:
            words = place.valued.get(flag)
            takes = "" if words is None else f" -x -a {_fish(' '.join(words))}" if words else " -r"
            lines.append(f"{start} -l {flag[2:]}{takes} -d {_fish(text)}")
    return "\n".join(lines) + "\n"


def _descend(places: list[Completions]) -> Iterator[str]:
    """Yield the lines that find the place of the words so far, in bash and zsh."""
    yield '        case "$at/$word" in'
    if len(places) > 1:
        yield f'            {"|".join(place.key for place in places[1:])}) at="$at/$word" ;;'
    yield "        esac"


def _by_values(places: list[Completions]) -> Iterator[tuple[str, list[str]]]:
    """Yield the options that take a value, as patterns of place and option, by the values to suggest."""
    found: dict[tuple[str, ...], list[str]] = {}
    for place in places:
        for flag, words in place.valued.items():
            found.setdefault(tuple(words), []).append(f'"{place.key} {flag}"')
    return ((("|".join(patterns)), list(words)) for words, patterns in found.items())


def _function_name(program: str) -> str:
    return "_" + re.sub(r"\W", "_", program)


def _zsh_entry(word: str, text: str) -> str:
    described = f"{word.replace(':', chr(92) + ':')}:{_first_sentence(text)}"
    return "'" + described.replace("'", "'\\''") + "'"


def _fish(text: str) -> str:
    return "'" + _first_sentence(text).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0]


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
