"""Values in shell commands: each reaches the shell as data, whatever the quoting around its placeholder.

A placeholder is not replaced by its value but by a reference to a variable that holds it, written so that it is one
word of data where it stands: bare, in double quotes, in single quotes, in a here-document. Nothing in a value is ever
read as shell. Where no such reference exists (a quoted here-document), or where the command would run what is in the
word (`eval`, `sh -c`, a comparison that bash computes), the value is refused, whichever shell is the step's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ..core.value_types import NamedTuple, lazy_pattern
from .shell_programs import (
    ASSIGNED,
    AWK,
    INTERACTIVE_VARIABLE,
    INTERPRETER,
    RUN_VARIABLE,
    SHELL,
    STANDARD_INPUT,
    STARTING,
    find_awk_programs,
    find_code_words,
    find_interpreted,
    find_names_to_read,
    find_program,
    find_script_files,
    find_script_reader,
    find_sed_scripts,
    find_shell_script,
    find_ssh_words,
    is_code_option,
    options_of,
    program_of,
    starts_interactive_shell,
)
from .shell_syntax import MARKED, Command, Group, Script, TooDeep, ValueContext, Word, read_script

VARIABLE = "SHOTCLOCK_VALUE_{}"
# What Linux takes in one environment variable, less its name.
VALUE_LIMIT = 128 * 1024 - 64

_PLAIN_NUMBER = lazy_pattern(r"-?\d{1,18}")
_MARK_CHARACTERS = lazy_pattern("[\ue000-\ue003]")
_MARK_OR_ITS_PARTS = lazy_pattern(f"{MARKED.pattern}|{_MARK_CHARACTERS.pattern}")


class Unsafe(ValueError):
    """A value that stands where it could not be kept from meaning something else."""


class Refusal(NamedTuple):
    """The reason why a value cannot stand where it does."""

    position: int
    message: str
    suggestion: str
    is_error: bool = True


def mark(number: int, nonce: int = 0) -> str:
    """Return what stands in a rendered command for value `number`. No template can write it by itself, and where values
    are looked through for marks, `nonce` is one that no value can know."""
    return f"\ue000{nonce}:{number}\ue001"


def has_marks(text: str) -> bool:
    return _MARK_CHARACTERS.search(text) is not None


def marks_in(text: str) -> list[str]:
    """Return every mark in the text, in its order, and what is left of broken ones."""
    return [found[0] for found in _MARK_OR_ITS_PARTS.finditer(text)]


def unmarked(text: str, values: Sequence[str], nonce: int) -> str:
    """Return the text with the values themselves where marks of this nonce stand."""

    def value_of(found: re.Match[str]) -> str:
        number = int(found[2])
        return values[number] if int(found[1]) == nonce and number < len(values) else found[0]

    return MARKED.sub(value_of, text) if has_marks(text) else text


def with_references(command: str, values: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the command with a reference for every mark, and the variables that hold the values. Raises Unsafe."""
    script = _read(command)
    for refusal in sorted(_refusals(script)):
        if refusal.is_error:
            raise Unsafe(f"{refusal.message}: {refusal.suggestion}")
    variables: dict[str, str] = {}
    written: list[str] = []
    position = 0
    for found in MARKED.finditer(command):
        written.append(command[position : found.start()])
        position = found.end()
        value = values[int(found[2])]
        if "\0" in value:
            raise Unsafe("a value with a NUL byte in it cannot be passed to a command")
        try:
            size = len(value.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            raise Unsafe("a value with an incomplete character cannot be passed to a command") from None
        if size > VALUE_LIMIT:
            raise Unsafe(f"a value of more than {VALUE_LIMIT} bytes cannot be passed in a command: use `stdin`")
        name = VARIABLE.format(found[2])
        variables[name] = value
        written.append(_reference(script.places[found.start()], name, value))
    written.append(command[position:])
    return "".join(written), variables


def find_refusals(command: str) -> list[Refusal]:
    """Return what will be refused in a command with marks, and what is only doubtful, from left to right."""
    try:
        return sorted(set(_refusals(_read(command))))
    except Unsafe as unsafe:
        return [Refusal(0, str(unsafe), "write it as a file, and run that")]


def find_variable_refusal(name: str, command: str | None = None) -> Refusal | None:
    """Return why a value cannot be a variable of a step, whose shell command may be known; None where it can."""
    if RUN_VARIABLE.fullmatch(name):
        return _refuse_in_variable(0, name)
    if name == INTERACTIVE_VARIABLE and command is not None:
        try:
            commands = read_script(command).commands
        except TooDeep:
            return None  # refused for that
        if any(starts_interactive_shell(each.words) for each in commands):
            return _refuse_in_variable(0, name)
    return None


def find_unheard(command: str) -> str | None:
    """Return the first program that is piped into another and could fail unseen; None if there is none."""
    if "|" not in command or "pipefail" in command:
        return None
    try:
        commands = read_script(command).commands
    except TooDeep:
        return None
    for number, piped in enumerate(commands):
        if piped.piped_from is not None:
            for before in commands[piped.piped_from : number]:
                rest = before.words[find_program(before.words) :]
                if rest and not rest[0].marks and (name := program_of(rest[0])) not in _NEVER_FAILING:
                    return name
    return None


def _read(command: str) -> Script:
    try:
        return read_script(command)
    except TooDeep as deep:
        raise Unsafe(str(deep)) from None


def _reference(place: ValueContext, name: str, value: str) -> str:
    match place:
        case ValueContext.BARE:
            return f'"${{{name}}}"'
        case ValueContext.DOUBLE | ValueContext.HEREDOC:
            return f"${{{name}}}"
        case ValueContext.SINGLE:
            return f"'\"${{{name}}}\"'"
        case ValueContext.COMMENT:
            return ""
        case ValueContext.ARITHMETIC:
            if _PLAIN_NUMBER.fullmatch(value.strip()):
                return value.strip()
            raise Unsafe(f"in $((…)) only a whole number can stand, not {value[:40]!r}")
        case _:
            raise Unsafe(f"a value cannot stand {place}")


# --- where a value would be run ----------------------------------------------------------------------------

_BY_ENV = "pass it by `env`, as a variable of the command"
_BESIDE = "pass it as an argument after the script, or by `env`"
_HINTS = {
    ValueContext.OLD_ARITHMETIC: "write $((…))",
    ValueContext.QUOTED_HEREDOC: "take the quotes off the word after <<",
    ValueContext.BACKTICK: "write $(…)",
    ValueContext.BACKSLASH: "leave the backslash out, a value needs none",
}
_SUBSCRIPT = lazy_pattern("(?:[A-Za-z_]\\w*)?\\[[^=]*\ue000[^=]*\\]\\+?=", re.DOTALL)
# bash computes what is assigned to these.
_COMPUTED_NAMES = {"RANDOM", "OPTIND", "HISTCMD"}
_ENV_OPTION = lazy_pattern(r"--env=|-e")
_COMPARISONS = {"-eq", "-ne", "-lt", "-le", "-gt", "-ge"}
_DECLARING = {"declare", "typeset", "local", "readonly", "export"}
# Programs that print what they are given.
_REPEATING = {"echo", "printf", "cat", "tee"}
# And others whose failure nobody waits for.
_NEVER_FAILING = {*_REPEATING, "yes", "seq", "true", ":", "date", "set", "for", "case", "select", "function", "read"}
# They speak of programs without starting them.
_SPEAKING = {"echo", "printf", "grep", "egrep", "fgrep", "rg", "test", "[", "[[", "eval", "trap", "alias", "let"}
# They read nothing, so that what they are piped into does not read what was meant for them.
_NEVER_READING = {"echo", "printf", "seq", "yes", "true", ":", "date", "curl", "wget", "git", "ls", "find"}
# `$CC -c` compiles.
_COMPILERS = lazy_pattern(r"\$?(?:CC|CXX|GCC|CLANG)\b")
_SHELL_C = lazy_pattern(r"-[abefhiklmnoprstuvx]*c[abefhiklmnoprstuvx]*")
_PREFIXES = {"env", "sudo", "doas", "exec", "nohup", "nice", "time", "timeout", "setsid", "stdbuf"}
_EXPANDED = lazy_pattern(r"\$?(?P<name>[A-Za-z_]\w*)(?::?[-=](?P<default>.*))?", re.DOTALL)
_NAMED_DESCRIPTOR = lazy_pattern(r"\{\w+\}")
# Options of `make` whose value is the next word.
_MAKE_VALUE = lazy_pattern(r"^(?:-[a-zA-Z]*[CfIoW]|--directory|--file|--makefile|--include-dir)$")


def _refusals(script: Script) -> Iterator[Refusal]:
    for position, place in script.places.items():
        if place.startswith(("in ", "behind ")):
            message = f"a value cannot stand {place}"
            yield Refusal(position, message, _HINTS.get(place, _BY_ENV))
    if not script.places:
        return
    looked = _Commands(script)
    for start, end in script.computed:
        yield from _in_arithmetic(looked.repeated([Word(inside=[(start, end)])]), "arithmetic")
    for command in script.commands:
        yield from looked.refusals(command)
    for group in script.groups:
        yield from looked.refusals_in_group(group)
    yield from looked.refusals_of_descriptors()
    for name, start, end in script.arrays:
        if looked.is_computed(name):
            yield from _in_arithmetic(looked.values_in([Word(inside=[(start, end)])]), f"{name}=(…)")
    for name, default in script.defaults:
        if looked.is_computed(name):
            yield from _in_arithmetic(looked.repeated([default]), f"${{{name}=…}}")


def _in_script(positions: Iterable[int], program: str) -> Iterator[Refusal]:
    for position in positions:
        yield Refusal(position, f"a value stands inside a script for {program}, which would run what is in it", _BESIDE)


def _in_arithmetic(positions: Iterable[int], where: str, hint: str = _BY_ENV) -> Iterator[Refusal]:
    for position in positions:
        yield Refusal(position, f"a value stands in {where}, where bash would run what is in it", hint)


def _refuse_in_variable(position: int, name: str) -> Refusal:
    message = f"a value stands in the variable {name}, which a shell or another program would run"
    return Refusal(position, message, "write out what it is, or pass the value under another name")


def _in_settings(positions: Iterable[int], program: str, what: str) -> Iterator[Refusal]:
    for position in positions:
        message = f"a value stands in {what} for {program}, which would take what is in it for commands of its own"
        yield Refusal(position, message, "escape it, or use a program that takes it as data", False)


class _Commands:
    """The simple commands of a script, looked at one by one for values that they would run."""

    def __init__(self, script: Script) -> None:
        self._commands = script.commands
        self._numbers = {id(command): number for number, command in enumerate(script.commands)}
        self._bodies = {group.function: group for group in script.groups if group.function}
        self._integers = set(self._find_integers())
        self._is_interactive = any(starts_interactive_shell(command.words) for command in script.commands)
        self._name_programs()

    def refusals(self, command: Command) -> Iterator[Refusal]:
        words = command.words
        yield from self._assignments(words)
        head = find_program(words)
        rest = words[head:]
        name = program_of(rest[0]) if rest else ""
        yield from self._variables(words if name in STARTING or name in _DECLARING else words[:head])
        if name in ("for", "select") and len(rest) > 1 and self.is_computed(rest[1].text):
            yield from _in_arithmetic(self.repeated(rest[2:]), f"{rest[1].text}, a variable that it computes,")
        if name in ("for", "case", "select", "function"):
            return
        yield from self._builtin(name, rest[1:])
        if name not in _SPEAKING:
            for number, word in enumerate(rest):
                yield from self._script_in_words(program_of(word), rest[number + 1 :])
                # Who is not known to start what it is given may still do so: `wrapper bash -c "…"`.
                if number == 0 or name in STARTING:
                    yield from self._script_of(program_of(word), rest[number + 1 :], command)
            yield from self._script_of_unknown(rest)
        yield from self._input(command)
        yield from self._output(command)

    def values_in(self, words: Iterable[Word]) -> list[int]:
        """Return the values that stand in words, and in the commands whose output they take."""
        found = []
        for word in words:
            found += word.marks
            for start, end in word.inside:
                found += self._values_of(self._commands[start:end])
        return found

    def repeated(self, words: Iterable[Word]) -> list[int]:
        """Return the values that stand in words, and that `echo` and the like put there."""
        found = []
        for word in words:
            found += word.marks
            for start, end in word.inside:
                inner = self._commands[start:end]
                found += self._values_of(
                    each for each in inner if each.words and program_of(each.words[0]) in _REPEATING
                )
        return found

    def _values_of(self, commands: Iterable[Command]) -> list[int]:
        return [mark for each in commands for word in (*each.words, *each.input) for mark in word.marks]

    # --- variables ----------------------------------------------------------------------------------------

    def _name_programs(self) -> None:
        """Write the name of a shell or interpreter where a variable stands for it: `$SHELL`, `${S:-sh}`, `S=sh; $S`."""
        known = {"SHELL": "sh", "BASH": "bash"}
        words = [word for command in self._commands for word in command.words if not word.marks]
        for word in words:
            if (assigned := ASSIGNED.match(word.text)) is not None and not word.is_expanded:
                name = word.text[assigned.end() :].rpartition("/")[2]
                if SHELL.fullmatch(name) or INTERPRETER.fullmatch(name):
                    known[assigned["name"]] = name
        for word in words:
            if word.is_expanded and (found := _EXPANDED.fullmatch(word.text)) is not None:
                default = (found["default"] or "").rpartition("/")[2]
                lower = found["name"].lower()
                if found["name"] in known:
                    word.text = known[found["name"]]
                elif SHELL.fullmatch(default) or INTERPRETER.fullmatch(default):
                    word.text = default
                elif INTERPRETER.fullmatch(lower):
                    word.text = lower

    def _find_integers(self) -> Iterator[str]:
        for command in self._commands:
            rest = command.words[find_program(command.words) :]
            if rest and program_of(rest[0]) in _DECLARING and "i" in options_of(rest[1:]):
                for word in rest[1:]:
                    yield "*" if word.is_expanded and "=" not in word.text else word.text.partition("=")[0].rstrip("+")

    def is_computed(self, name: str) -> bool:
        """Return whether bash computes what is assigned to a variable."""
        name = name.partition("[")[0]
        return name in _COMPUTED_NAMES or name in self._integers or "*" in self._integers or self._is_run(name)

    def _is_run(self, name: str) -> bool:
        """Return whether a shell or another program runs what is in a variable."""
        return RUN_VARIABLE.fullmatch(name) is not None or (name == INTERACTIVE_VARIABLE and self._is_interactive)

    def _assigned_by(self, command: Command) -> list[Word]:
        """Return the variables that a command reads its input into."""
        rest = command.words[find_program(command.words) :]
        name = program_of(rest[0]) if rest else ""
        if name in ("mapfile", "readarray"):
            return find_names_to_read(rest[1:], "dnOsuCc")
        return find_names_to_read(rest[1:]) if name == "read" else []

    def _assignments(self, words: Sequence[Word]) -> Iterator[Refusal]:
        for word in words:
            if not word.is_quoted and _SUBSCRIPT.match(word.text):
                yield from _in_arithmetic(word.marks, "the number of an item")
                return
            assigned = ASSIGNED.match(word.text)
            if assigned is None:
                return
            if assigned["name"] in self._integers or assigned["name"] in _COMPUTED_NAMES:
                yield from _in_arithmetic(self.repeated([word]), f"{assigned['name']}=")

    def _variables(self, words: Iterable[Word]) -> Iterator[Refusal]:
        """Yield refusals of `BASH_ENV=… bash`, `export PAGER=…` and `env LD_PRELOAD=… program`."""
        for word in words:
            option = _ENV_OPTION.match(word.text)
            assigned = ASSIGNED.match(word.text, option.end() if option is not None else 0)
            if assigned is not None and self._is_run(assigned["name"]):
                yield from (_refuse_in_variable(mark, assigned["name"]) for mark in self.repeated([word]))

    # --- what the shell does by itself --------------------------------------------------------------------

    def _builtin(self, name: str, words: Sequence[Word]) -> Iterator[Refusal]:
        match name:
            case "eval" | "alias":
                yield from _in_script(self.values_in(words), name)
            case "trap":
                operands = [word for word in words if word.text != "--" and not word.text.startswith("-")]
                yield from _in_script(self.values_in(operands[:1]), name)
            case "let":
                yield from _in_arithmetic(self.repeated(words), "`let`")
            case "declare" | "typeset" | "local" | "readonly" | "export":
                options = options_of(words)
                for word in words:
                    named = "\ue000" in word.text.partition("=")[0]
                    if (named and name != "export") or options & set("iaAn"):
                        yield from _in_arithmetic(self.repeated([word]), f"`{name}`")
            case "unset" | "mapfile" | "readarray":
                yield from _in_arithmetic(self.repeated(words), f"the names of `{name}`")
            case "read":
                yield from _in_arithmetic(self.repeated(find_names_to_read(words)), "the names of `read`")
            case "getopts":
                yield from _in_arithmetic(self.repeated(words[1:2]), "the name of `getopts`")
            case "printf" | "test" | "[" | "[[":
                yield from self._tested(name, words)
            case "compgen" | "complete":
                yield from _in_script(self.values_in(find_code_words(words, "WC", stops=False)), name)
            case "." | "source":
                for word in words[:1]:
                    yield from _in_script(self.values_in([Word(inside=word.inside)]), name)

    def _tested(self, name: str, words: Sequence[Word]) -> Iterator[Refusal]:
        texts = [word.text for word in words]
        for number, word in enumerate(words):
            before = texts[number - 1] if number else ""
            behind = texts[number + 1] if number + 1 < len(texts) else ""
            if before == "-v" or (name == "printf" and word.text.startswith("-v")):
                yield from _in_arithmetic(self.repeated([word]), f"`{name} -v`")
                if name == "printf" and self.is_computed(word.text.removeprefix("-v")):
                    yield from _in_arithmetic(self.repeated(words[number + 1 :]), f"{word.text}, which is a number,")
            elif name == "[[" and (before in _COMPARISONS or behind in _COMPARISONS):
                hint = "compare it with `[ … ]`"
                yield from _in_arithmetic(self.repeated([word]), "a comparison of numbers in [[…]]", hint)
            elif name in ("test", "[") and number and words[number - 1].marks and word.marks:
                # The first may be `-v`.
                yield from _in_arithmetic(
                    word.marks, f"`{name}` behind another value", "write an operator between them"
                )

    # --- scripts for other programs -----------------------------------------------------------------------

    def _script_in_words(self, name: str, words: Sequence[Word]) -> Iterator[Refusal]:
        if SHELL.fullmatch(name):
            script, operands = find_shell_script(words)
            # `bash FILE` runs the file that a value names; `bash <(…)` runs what a value is made into.
            made = [Word(inside=word.inside) for word in operands[:1] if not script]
            yield from _in_script(self.values_in([*script, *made]), name)
        elif (found := INTERPRETER.fullmatch(name)) is not None:
            yield from _in_script(self.values_in(find_interpreted(words, found["name"])), name)

    def _script_of_unknown(self, words: Sequence[Word]) -> Iterator[Refusal]:
        """Yield refusals of `$(…) -c SCRIPT`: which program is started is known only when it runs, and may be a
        shell."""
        for number, word in enumerate(words):
            if word.is_expanded and not word.marks and not _COMPILERS.match(word.text):
                script, _ = find_shell_script(words[number + 1 :])
                if any(_SHELL_C.fullmatch(each.text) for each in words[number + 1 :]):
                    yield from _in_script(self.values_in(script), "a program that only a variable names")
            if number == 0 and program_of(word) not in _PREFIXES:
                return

    def _script_of(self, name: str, words: Sequence[Word], command: Command) -> Iterator[Refusal]:
        if name in AWK:
            made = [Word(inside=word.inside) for word in find_script_files(words)]
            yield from _in_script(self.values_in([*find_awk_programs(words), *made]), name)
        elif name == "env":
            split = [word for word in words if word.text.startswith("--split-string=")]
            split += find_code_words(words, "S", valued="uC")
            yield from _in_script(self.values_in(split), "`env -S`")
        elif name == "ssh":
            _, remote = find_ssh_words(words)
            yield from _in_script(self.values_in(remote), "the shell on the other side")
            options = [word for word in words if "command=" in word.text.lower() and word not in remote]
            yield from _in_script(self.values_in(options), name)
        elif name in ("su", "runuser", "script", "flock", "sg"):
            yield from _in_script(self.values_in(find_code_words(words, "c", stops=False)), name)
        elif name == "watch" and not {"-x", "--exec"} & {word.text for word in words}:
            yield from _in_script(self.values_in(words), name)
        elif name == "parallel":
            texts = [word.text for word in words]
            yield from _in_script(self.values_in(words[: texts.index(":::")] if ":::" in texts else words), name)
        elif name == "xargs":
            yield from self._xargs(words, command)
        elif name in ("sed", "gsed"):
            files = find_script_files(words)
            made = [Word(inside=word.inside) for word in files]
            scripts = find_code_words(words, "e", stops=False) if files else find_sed_scripts(words)
            yield from _in_settings(self.values_in([*scripts, *made]), name, "a script")
            if any(STANDARD_INPUT.fullmatch(word.text) for word in files):
                yield from _in_settings(self._read_by(command), name, "a script")
        elif name in ("make", "gmake"):
            yield from _in_settings(self.values_in(word for word in words if "=" in word.text), name, "a variable")
            pairs = zip([Word(), *words], words, strict=False)
            first = [word for before, word in pairs if word.text[:1] == "\ue000" and not _MAKE_VALUE.match(before.text)]
            yield from _in_settings(self.values_in(first), name, "an argument, which may be an option,")

    def _xargs(self, words: Sequence[Word], command: Command) -> Iterator[Refusal]:
        """Yield refusals of `xargs`: what it reads becomes a script where it is put into one, or where the script is
        missing."""
        texts = [word.text for word in words]
        for number, word in enumerate(words):
            if SHELL.fullmatch(program_of(word)):
                script, rest = find_shell_script(words[number + 1 :])
                asks = any(is_code_option(each.text, "c") for each in words[number + 1 :])
                follows = zip(texts, [*texts[1:], ""], strict=True)
                replaced = [text[2:] or following for text, following in follows if text.startswith("-I")]
                is_put_in = any(place and place in each.text for each in script for place in replaced)
                if is_put_in or (asks and not script and not rest):
                    yield from _in_script(self._read_by(command), word.text)

    # --- scripts on standard input ------------------------------------------------------------------------

    def _input(self, command: Command) -> Iterator[Refusal]:
        yield from self._read_in([command], self._read_by(command), 0, is_own=True)
        # The commands inside its words read what is piped into it.
        for start, end in (part for word in command.words for part in word.inside):
            yield from self._read_in(self._commands[start:end], self._piped_into(command), start)

    def _read_in(
        self, commands: Sequence[Command], values: list[int], first: int, *, is_own: bool = False
    ) -> Iterator[Refusal]:
        """Yield refusals of values that reach commands on their standard input, where those run or compute what they
        read."""
        for command in commands:
            reader = self._reader(command)
            computed = [word.text for word in self._assigned_by(command) if self.is_computed(word.text)]
            if (reader or computed) and (is_own or self._inherits(command, first)):
                if reader:
                    yield from _in_script(values, reader)
                if computed:
                    yield from _in_arithmetic(values, f"{computed[0]}, which is a number,")

    def _reader(self, command: Command, called: tuple[str, ...] = ()) -> str | None:
        """Return the program that takes the standard input of a command for a script: itself, or one in the function
        that it calls."""
        rest = command.words[find_program(command.words) :]
        body = self._bodies.get(rest[0].text) if rest else None
        if body is None or body.function in called:
            return find_script_reader(rest)
        for inner in self._commands[body.first : body.end]:
            if self._inherits(inner, body.first):
                reader = self._reader(inner, (*called, body.function))
                if reader is not None:
                    return reader
        return None

    def _inherits(self, command: Command, first: int) -> bool:
        """Return whether a command of a group, which begins at `first`, may read what the group reads."""
        if command.input:
            return False
        if command.piped_from is None or command.piped_from < first:
            return True
        before = self._commands[command.piped_from : self._numbers[id(command)]]
        heads = [(each, each.words[find_program(each.words) :]) for each in before]
        return any(rest and not each.input and program_of(rest[0]) not in _NEVER_READING for each, rest in heads)

    def refusals_in_group(self, group: Group) -> Iterator[Refusal]:
        inner = self._commands[group.first : group.end]
        if fed := [*self.values_in(group.tail.input), *self._piped_into(group.head)]:
            yield from self._read_in(inner, fed, group.first)
        yield from self._written_to(group.tail.output, [*self._values_of(inner), *fed])

    def refusals_of_descriptors(self) -> Iterator[Refusal]:
        """Yield refusals of `exec <<< …; sh` and `coproc sh`: what is opened once is there for all commands that
        follow."""
        for number, command in enumerate(self._commands):
            rest = command.words[find_program(command.words) :]
            name = program_of(rest[0]) if rest else ""
            behind = self._commands[number + 1 :]
            if name == "exec" and all(_NAMED_DESCRIPTOR.fullmatch(word.text) for word in rest[1:]):
                if fed := self.values_in(command.input):
                    yield from self._read_in(behind, fed, number)
                yield from self._written_to(command.output, self._values_of(behind))
            elif name == "coproc":
                started = [Command(rest[at:]) for at in range(1, len(rest))]
                readers = [reader for each in (*started, *behind) if (reader := self._reader(each)) and not each.input]
                if readers:
                    yield from _in_script(self._values_of(self._commands), readers[0])

    def _output(self, command: Command) -> Iterator[Refusal]:
        """Yield refusals of `echo … > >(sh)` and `… | tee >(sh)`."""
        words = [*command.words, *command.output]
        yield from self._written_to(words, [*self.values_in(command.words), *self._read_by(command)])

    def _written_to(self, targets: Iterable[Word], values: list[int]) -> Iterator[Refusal]:
        for start, end in (part for word in targets for part in word.feeding):
            yield from self._read_in(self._commands[start:end], values, start)

    def _read_by(self, command: Command) -> list[int]:
        """Return the values in what a command reads."""
        return [*self.values_in(command.input), *self._piped_into(command)]

    def _piped_into(self, command: Command) -> list[int]:
        if command.piped_from is None:
            return []
        return self._values_of(self._commands[command.piped_from : self._numbers[id(command)]])
