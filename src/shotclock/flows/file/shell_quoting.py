"""Values in shell commands: each reaches the shell as data, with any quoting around its placeholder.

A placeholder becomes a reference to a variable that holds the value, quoted as one word: bare, in quotes, in a
here-document. A value is refused where no such reference exists (a quoted here-document) and where the command would
run the word (`eval`, `sh -c`, a comparison that bash computes), whichever shell the step has.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

from ...core.value_types import replace
from . import shell_programs as programs
from .shell_programs import ASSIGNED, RUNNERS, find_started, options_of, program_of, read_interpreter, split_words
from .shell_syntax import MARK_START, MARKED, Script, SimpleCommand, TooDeep, ValueContext, Word, read_script

VARIABLE = "SHOTCLOCK_VALUE_{}"
VALUE_LIMIT = 128 * 1024 - 64  # the limit of Linux for one environment variable, less its name

_PLAIN_NUMBER = re.compile(r"-?\d{1,18}")
_MARK_CHARACTERS = re.compile("[\ue000-\ue003]")
_MARK_OR_ITS_PARTS = re.compile(f"{MARKED.pattern}|{_MARK_CHARACTERS.pattern}")


class Unsafe(ValueError):
    """A value in a place where it could be more than data."""


class Refusal(NamedTuple):
    position: int
    message: str
    suggestion: str
    is_error: bool = True
    rule: str = "shell/value-in-script"


def mark(number: int) -> str:
    """Return the mark of a value. Neither a template nor a value can write it there."""
    return f"\ue000{number}\ue001"


def has_marks(text: str) -> bool:
    return _MARK_CHARACTERS.search(text) is not None


def with_references(command: str, values: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the command with references for marks, and the variables with the values. Raises Unsafe."""
    try:
        script = read_script(command)
    except TooDeep as deep:
        raise Unsafe(str(deep)) from None
    for refusal in sorted(_refusals(script)):
        if refusal.is_error:
            raise Unsafe(f"{refusal.message}: {refusal.suggestion}")
    variables: dict[str, str] = {}

    def reference(found: re.Match[str]) -> str:
        name, value = VARIABLE.format(found[1]), values[int(found[1])]
        if "\0" in value:
            raise Unsafe("a value with a NUL byte in it cannot be passed to a command")
        try:
            size = len(value.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            raise Unsafe("a value with an incomplete character cannot be passed to a command") from None
        if size > VALUE_LIMIT:
            raise Unsafe(f"a value of more than {VALUE_LIMIT} bytes cannot be passed in a command: use `stdin`")
        variables[name] = value
        return _reference(script.places[found.start()], name, value)

    return MARKED.sub(reference, command), variables


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
    # Any other place but arithmetic has been refused.
    if not _PLAIN_NUMBER.fullmatch(value.strip()):
        raise Unsafe(f"in $((…)) a value must be a whole number, not {value[:40]!r}")
    return value.strip()


def find_refusals(command: str) -> list[Refusal]:
    """Return one refusal or warning per value of a command with marks, from left to right."""
    try:
        found = sorted(_refusals(read_script(command)), key=lambda refusal: not refusal.is_error)
    except TooDeep as deep:
        return [Refusal(0, str(deep), "write it as a file, and run that")]
    return sorted({refusal.position: refusal for refusal in reversed(found)}.values())


def find_variable_refusal(name: str, command: str | None = None) -> Refusal | None:
    """Return why a value is refused in a variable of a step, whose command may be known; else None."""
    if programs.RUN_VARIABLE.fullmatch(name):
        return next(_in_variable([0], name))
    if name == programs.INTERACTIVE_VARIABLE and command is not None:
        try:
            if any(programs.starts_interactive_shell(each.words) for each in read_script(command).commands):
                return next(_in_variable([0], name))
        except TooDeep:
            return None  # the command itself is refused
    return None


# Programs whose failure inside a pipe does not matter.
_NEVER_FAILING = {
    *("echo", "printf", "cat", "tee", "yes", "seq", "true", ":", "date", "set", "for", "case", "select", "function"),
    "read",
}


def find_unheard(command: str) -> list[str]:
    """Return the programs in pipes whose failure is hidden where the shell has no `pipefail`."""
    if "|" not in command or "pipefail" in command:
        return []
    try:
        commands = read_script(command).commands
    except TooDeep:
        return []
    found: dict[str, None] = {}
    for number, piped in enumerate(commands):
        for before in commands[piped.piped_from : number] if piped.piped_from is not None else ():
            name, _ = _program(before)
            if name and MARK_START not in name and name not in _NEVER_FAILING:
                found[name] = None
    return list(found)


_BY_ENV = "pass it by `env`, as a variable of the command"
_BESIDE = "pass it as an argument after the script, or by `env`"
_HINTS = {
    ValueContext.OLD_ARITHMETIC: "write $((…))",
    ValueContext.QUOTED_HEREDOC: "take the quotes off the word after <<",
    ValueContext.BACKTICK: "write $(…)",
    ValueContext.BACKSLASH: "leave the backslash out, a value needs none",
}
_SUBSCRIPT = re.compile("(?:[A-Za-z_]\\w*)?\\[[^=]*\ue000[^=]*\\]\\+?=|\\{\\w+\\[.*\ue000.*\\}$", re.DOTALL)
# bash computes a value that is assigned to these.
_COMPUTED_NAMES = {"RANDOM", "SRANDOM", "OPTIND", "HISTCMD", "BASHPID"}
_ENV_OPTION = re.compile(r"(?:--env=|-e)?")
_COMPARISONS = {"-eq", "-ne", "-lt", "-le", "-gt", "-ge"}
_DECLARING = {"declare", "typeset", "local", "readonly", "export"}
# They run or compute any of their arguments.
_EVALUATING = {
    *("eval", "alias", "trap", "let", "unset", "read", "mapfile", "readarray", "getopts", "compgen", "complete"),
    *("hash", "wait", "bind", "fc", "enable", "jobs", "su", "runuser", "sg", "script", "watch", "parallel"),
    *("at", "batch"),
}
# Builtins that fill the variables that they name.
_FILLING = {"read", "mapfile", "readarray", "getopts", "printf", "for", "select"}
_GRAMMAR = {"for", "case", "select", "function"}
# Builtins that run none of their arguments.
_SAFE = {
    *("echo", "printf", "test", "[", "[[", ":", "true", "false", "cd", "pushd", "exit", "return", "shift", "set"),
    *("type", "kill", "umask", "ulimit", "break", "continue", "command"),
}
_SEARCHING = {"grep", "egrep", "fgrep", "rg"}
_STANDARD_INPUT = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


def _refusals(script: Script) -> Iterator[Refusal]:
    for position, place in script.places.items():
        if place.startswith(("in ", "behind ")):
            yield Refusal(position, f"a value cannot be used {place}", _HINTS.get(place, _BY_ENV))
    if script.places:
        for refusal in _ScriptCheck(script).refusals():
            yield refusal._replace(message=_MARK_OR_ITS_PARTS.sub("…", refusal.message))


def _refuse(positions: Iterable[int], message: str, hint: str) -> Iterator[Refusal]:
    return (Refusal(position, message, hint) for position in positions)


def _in_script(positions: Iterable[int], program: str, hint: str = _BESIDE) -> Iterator[Refusal]:
    return _refuse(positions, f"a value is part of a script for {program}, which would run it", hint)


def _as_argument(positions: Iterable[int], what: str, hint: str) -> Iterator[Refusal]:
    return _refuse(positions, f"a value is {what}, which may run it", hint)


def _in_arithmetic(positions: Iterable[int], where: str, hint: str = _BY_ENV) -> Iterator[Refusal]:
    return _refuse(positions, f"a value is used in {where}, where bash would run it", hint)


def _in_variable(positions: Iterable[int], name: str) -> Iterator[Refusal]:
    message = f"a value is used in the variable {name}, which a shell or another program would run"
    return _refuse(positions, message, "write the text out, or pass the value under another name")


def _values_in(words: Iterable[Word]) -> list[int]:
    return [value for word in words for value in word.values]


class _ScriptCheck:
    """A search for values that the simple commands of a script would run."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._everything = [at for at, place in script.places.items() if place is not ValueContext.COMMENT]
        self._is_interactive = any(programs.starts_interactive_shell(command.words) for command in script.commands)
        items = {number for _, start, end in script.arrays for number in self._items(start, end)}
        self._commands = [command for number, command in enumerate(script.commands) if number not in items]
        self._has_arrays = bool(script.arrays) or any(map(_may_make_array, self._commands))

    def _items(self, start: int, end: int) -> Iterator[int]:
        """Yield the commands that are items of an array, without those inside them."""
        while start < end:
            yield start
            inner = [last for word in self._script.commands[start].words for _, last in word.inside]
            start = max([start + 1, *inner])

    def refusals(self) -> Iterator[Refusal]:
        script = self._script
        yield from _in_arithmetic(script.values_between(script.computed), "arithmetic")
        for name, start, end in script.arrays:
            if self._is_special(name):
                yield from _in_arithmetic(script.values_between([(start, end)]), f"{name}=(…)")
        for name, default in script.defaults:
            if self._is_special(name):
                positions = [*default.marks, *script.values_between(default.inside)]
                yield from _in_arithmetic(positions, f"${{{name}=…}}")
        for word in (word for command in script.commands for word in command.words):
            if _SUBSCRIPT.match(word.text):
                yield from _in_arithmetic(word.marks, "the number of an item")
        for command in self._commands:
            yield from self._in_words(command.words)
            yield from self._everywhere(command)

    def _is_special(self, name: str) -> bool:
        """Return whether a shell or a program evaluates a variable."""
        name = name.partition("[")[0]
        is_run = programs.RUN_VARIABLE.fullmatch(name) is not None or (
            name == programs.INTERACTIVE_VARIABLE and self._is_interactive
        )
        return is_run or name in _COMPUTED_NAMES

    def _everywhere(self, command: SimpleCommand) -> Iterator[Refusal]:
        """Refuse every value in the script, where any could reach this command."""
        name, words = _program(command)
        if name in _DECLARING - {"export"} and (options_of(words) & set("in") or any(w.text[:1] == "$" for w in words)):
            where = f"a script with `{name} -i` or `{name} -n`"
            yield from _in_arithmetic(self._everything, where, "leave out the option")
        for word in words if name in _FILLING else ():
            if self._is_special(word.text.removeprefix("-v")):
                yield from _in_arithmetic(self._everything, f"a script that reads data into {word.text}")
        if (reader := programs.find_script_reader(command.words)) is not None:
            program, stream = reader
            positions = self._fed(command) if stream in _STANDARD_INPUT else self._everything
            yield from _in_script(positions, program, _BY_ENV)

    def _fed(self, command: SimpleCommand) -> list[int]:
        """Return the values that may reach a command's standard input."""
        if command.has_input and not any(word.inside for word in command.input):
            return _values_in(command.input)
        if command.piped_from is not None:
            commands = self._script.commands
            number = next(number for number, each in enumerate(commands) if each is command)
            before = commands[command.piped_from : number]
            if all(each.has_input or _program(each)[0] in programs.NEVER_READING for each in before):
                return [value for each in before for value in _values_in([*each.words, *each.input])]
        return self._everything

    def _in_words(self, words: Sequence[Word]) -> Iterator[Refusal]:
        runner = ""
        while True:
            words = yield from self._assigned(words)
            while words and words[0].text[:1] == "-":  # `time -p`
                words = words[1:]
            if not words:
                return
            word, *args = words
            name = program_of(word)
            if word.made or (runner and word.is_open):
                what = f"a command for {runner}" if runner else "in a substitution that is a command"
                yield from _as_argument(word.values, what, "write the command out")
            if programs.is_computed(word):
                hint = "write the name out, or pass the value by `env`"
                yield from _as_argument(_values_in(args), "an argument of a program whose name is computed", hint)
                return
            if name not in RUNNERS:
                yield from self._of_program(name, args)
                return
            runner, words = name, find_started(name, args)
            yield from self._of_runner(name, args, words)

    def _assigned(self, words: Sequence[Word]) -> Generator[Refusal, None, Sequence[Word]]:
        """Yield refusals in the assignments before a command; return the command."""
        while words and (found := ASSIGNED.match(words[0].text)) is not None:
            if found["name"] in _COMPUTED_NAMES:
                yield from _in_arithmetic(words[0].values, f"{found['name']}=")
            elif self._is_special(found["name"]):
                yield from _in_variable(words[0].values, found["name"])
            words = words[1:]
        return words

    def _of_runner(self, name: str, words: Sequence[Word], started: Sequence[Word]) -> Iterator[Refusal]:
        runner = RUNNERS[name]
        if name == "command" and options_of(words[:1]) & set("vV"):
            return  # it only looks the program up
        options, values, rest = split_words(words, runner)
        behind, _, _ = split_words(rest[runner.operands :], runner)  # `flock lock -c "…"`
        own = words[: len(words) - len(started)]
        if any(programs.is_code_option(option.text, runner.code) for option in options + behind if not option.is_open):
            yield from _in_script(_values_in(words), name)
        is_unclear = programs.has_unclear_option(name, words)
        if is_unclear:
            hint = "write `--option=value`, or the short option"
            yield from _as_argument(_values_in(words), f"behind a long option of {name} without `=`", hint)
        hint = "put `--` before it, or write the option and its value as two words"
        yield from _as_argument(_values_in(options), f"an option of {name}", hint)
        yield from self._assigned([word for word in own if ASSIGNED.match(word.text)])
        possible = range(len(started)) if is_unclear else range(1)
        if name == "xargs" and any(self._runs_input(options, values, started[number:]) for number in possible):
            yield from _in_script(self._everything, name, _BY_ENV)

    def _runs_input(self, options: list[Word], values: list[tuple[str, Word]], started: Sequence[Word]) -> bool:
        """Return whether the command of xargs would run the words that xargs adds."""
        unknown = -1
        places = [option.text[2:] or "{}" for option in options if re.match("-i|-I.", option.text)]
        places += [option.text[10:] or "{}" for option in options if option.text.startswith("--replace")]
        places += [value.text for option, value in values if option.endswith("I")]
        place = places[-1] if places else ""
        if place:
            words = [
                replace(word, text=word.text.replace(place, MARK_START), marks=[unknown])
                if place in word.text
                else word
                for word in started
            ]
        else:
            words = [*started, Word(MARK_START, [unknown])]
        return any(refusal.position == unknown and refusal.is_error for refusal in self._in_words(words))

    def _of_program(self, name: str, words: Sequence[Word]) -> Iterator[Refusal]:
        if name in _EVALUATING:
            yield from _in_script(_values_in(words), f"`{name}`", _BY_ENV)
        elif name in _DECLARING:
            yield from self._declared(name, words)
        elif name in ("printf", "test", "[", "[["):
            yield from _tested(name, words)
        elif name in (".", "source"):
            yield from _in_script([value for word in words[:1] for value in word.made], name)
        elif (reading := programs.read_ssh(words) if name == "ssh" else read_interpreter(name, words)) is not None:
            program = "the shell of the other host" if name == "ssh" else name
            hint = "pass it by `env`, or a file by `<`" if name == "perl" and reading.rest else _BESIDE
            yield from _in_script(_values_in(reading.code), program, hint)
            if not reading.code:
                yield from _in_script([value for word in reading.rest[:1] for value in word.made], program)
            hint = "put `--` before it, if it is no option"
            yield from _as_argument(_values_in(filter(programs.may_run, reading.options)), f"an option of {name}", hint)
        elif name not in _SAFE | _GRAMMAR:
            yield from self._of_other(name, words)

    def _of_other(self, name: str, words: Sequence[Word]) -> Iterator[Refusal]:
        """Yield refusals and warnings for a program not known to run its arguments."""
        for number, word in enumerate(words):
            behind = words[number + 1 :]
            if name == "find" and word.text in ("-exec", "-execdir", "-ok", "-okdir"):
                yield from self._in_words([Word("env"), Word("--"), *behind])
            elif name not in _SEARCHING and (reading := read_interpreter(program_of(word), behind)) is not None:
                yield from _in_script(_values_in(reading.code), word.text)  # `wrapper bash -c "…"`
            elif name in programs.CONTAINERS and (option := _ENV_OPTION.match(word.text)) is not None:
                found = ASSIGNED.match(word.text, option.end())
                if found is not None and self._is_special(found["name"]):
                    yield from _in_variable(word.values, found["name"])
        if name in programs.SCRIPT_FILE_PROGRAMS:
            message = f"a value is used in an argument of {name}, which may run it"
            hint = "escape it, or use a program that takes it as data"
            yield from (Refusal(value, message, hint, False) for value in _values_in(words))
            return
        before = ""
        for word in words:
            if before == "--":
                return
            if word.is_open and before[:1] != "-":
                message = f"a value that begins with `-` is an option for {name} here"
                hint = f"put `--` before it, if {name} knows that"
                yield from (Refusal(value, message, hint, False, "shell/value-as-option") for value in word.values)
            before = word.text

    def _declared(self, name: str, words: Sequence[Word]) -> Iterator[Refusal]:
        is_array = bool(options_of(words) & set("aA")) or self._has_arrays
        for word in words:
            found = ASSIGNED.match(word.text)
            if found is None or MARK_START in found[0] or (is_array and name != "export"):
                yield from _in_arithmetic(word.values, f"`{name}`", "assign it in a command of its own")
        yield from self._assigned([word for word in words if ASSIGNED.match(word.text)])


def _program(command: SimpleCommand) -> tuple[str, Sequence[Word]]:
    """Return the program that is started in the end, and its arguments."""
    words: Sequence[Word] = command.words
    while words:
        if ASSIGNED.match(words[0].text) or words[0].text[:1] == "-":
            words = words[1:]
        elif (name := program_of(words[0])) in RUNNERS and (started := find_started(name, words[1:])):
            words = started
        else:
            return name, words[1:]
    return "", words


def _may_make_array(command: SimpleCommand) -> bool:
    """Return whether a command may be `a[0]=x`, `mapfile a`, `read -a` or `declare -A`."""
    text = " ".join(word.text for word in command.words)
    return re.match(r"\w+\[|.*\b(?:mapfile|readarray)\b|.* -\w*[aA]", text, re.DOTALL) is not None


def _tested(name: str, words: Sequence[Word]) -> Iterator[Refusal]:
    if name == "printf" and len(words) > 1 and words[0].is_open:
        yield from _in_arithmetic(words[0].values, "the format of `printf`", "write `printf '%s'` before it")
    for before, word, behind in zip([Word(), *words], words, [*words[1:], Word()], strict=False):
        if before.text == "-v" or (name == "printf" and word.text.startswith("-v")):
            yield from _in_arithmetic(word.values, f"`{name} -v`")
        elif name == "[[" and {before.text, behind.text} & _COMPARISONS:
            yield from _in_arithmetic(word.values, "a comparison of numbers in [[…]]", "compare it with `[ … ]`")
        elif name in ("test", "[") and before.values and word.values:
            # The first may be `-v`.
            yield from _in_arithmetic(word.values, f"`{name}` behind another value", "write an operator between them")
