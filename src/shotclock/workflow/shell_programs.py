"""Programs that run their arguments: how the words of each are read.

`shell_quoting` decides where a value is refused; this module only knows the programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .shell_syntax import MARK_START, TooDeep, Word, read_script

ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<subscript>\[[^=]*\])?\+?=", re.DOTALL)
SHELL = re.compile(r"(?:ba|da|a|z|k|mk|c|tc|fi)?sh|rbash")
INTERPRETER = re.compile(r"(?P<name>python|perl|ruby|node|nodejs|php|lua|bun|deno|osascript|Rscript)[\d.]*")
AWK = {"awk", "gawk", "mawk", "nawk"}
# They start the program that they are given inside a container.
CONTAINERS = {"docker", "podman", "kubectl"}


class Runner(NamedTuple):
    """A program or builtin that runs its arguments as a command."""

    valued: str = ""
    """The letters of options whose value is the next word."""
    operands: int = 0
    """How many words stand between the options and the command."""
    script: str = ""
    """The letters of options that take a script."""


RUNNERS = {
    **dict.fromkeys(("command", "builtin", "coproc", "nohup", "setsid", "busybox"), Runner()),
    **{"env": Runner("uCa", script="S"), "exec": Runner("a"), "sudo": Runner("CDghpRrTtUu"), "doas": Runner("Cu")},
    **{"nice": Runner("n"), "ionice": Runner("cnpPu"), "chrt": Runner("TPD", 1), "taskset": Runner("", 1)},
    **{"time": Runner("fo"), "timeout": Runner("ks", 1), "stdbuf": Runner("ieo"), "flock": Runner("Ew", 1, "c")},
    **{"chroot": Runner("", 1), "unshare": Runner("GRSw"), "nsenter": Runner("tSG"), "xargs": Runner("adEILnPs")},
    "strace": Runner("aeEIoOpPsSuX"),
}
# Options that take a script in the next word or after `=`.
_CODE_WORDS = {"--eval", "--print", "--command", "--run", "--split-string", "--session-command", "--source"}
# Other long options whose value is the next word. Each names code to load.
_VALUE_WORDS = {
    *("--require", "--import", "--loader", "--experimental-loader", "--input-type", "--conditions", "--preload"),
    *("--check-hash-based-pycs", "--env-file", "--rcfile", "--init-file", "--file", "--include", "--load"),
}
# By interpreter: the letters of options that take a script, and of options whose value is the next word.
_CODE_LETTERS = {"python": "c", "perl": "eE", "ruby": "e", "node": "ep", "nodejs": "ep", "php": "rBRE", "lua": "e"}
_VALUE_LETTERS = {"python": "WX", "perl": "I", "ruby": "rICE", "node": "rC", "nodejs": "rC", "php": "dczS", "lua": "l"}
# Modules of Python that run their arguments, and modules that run their standard input.
_RUNNING_MODULES, _READING_MODULES = {"timeit", "pdb", "trace", "cProfile", "profile"}, {"code", "asyncio", "pdb"}
_SSH_VALUED = "bcDEeFIiJLlmOopQRSWwBP"
# Programs that do not read their standard input.
NEVER_READING = {"echo", "printf", "curl", "wget"}
# `perl -n` and `perl -p` run a file name that ends in `|`, and `-a` and `-F` imply `-n`.
_PERL_LOOP = re.compile(r"-(?![MmI])[\w.]*[napF]")
# Options that make an interpreter read its standard input behind the script.
_INTERACTIVE = re.compile(r"-(?![WXl])[A-Za-z]*i[A-Za-z]*|--interactive")
_STANDARD_INPUT = re.compile(r"-|/dev/stdin|(?:/dev|/proc/self)/fd/\d+")
_ASKING = {"--version", "--help", "-V"}
# Variables that a shell or another program evaluates: as a script, a command, options that take either, or a file of
# code to load. Variables that name a folder to search (PATH, PYTHONPATH, LD_LIBRARY_PATH) are not among them.
RUN_VARIABLE = re.compile(
    r"BASH_ENV|BASH_FUNC_.*|PS[0-4]|PROMPT_COMMAND"
    r"|(?:GIT_|GIT_SEQUENCE_|SUDO_|KUBE_|SYSTEMD_|HG)?EDITOR|VISUAL|FCEDIT|(?:GIT_|GH_|AWS_|SYSTEMD_|MAN)?PAGER"
    r"|LESSOPEN|LESSCLOSE|(?:GIT|SSH|SUDO)_ASKPASS|(?:RSYNC|CVS|BORG)_RSH|RSYNC_CONNECT_PROG"
    r"|GIT_(?:SSH|SSH_COMMAND|PROXY_COMMAND|EXTERNAL_DIFF|CONFIG.*)"
    r"|PERL5OPT|PERL5DB|PYTHON(?:STARTUP|BREAKPOINT|WARNINGS)|RUBYOPT|NODE_OPTIONS|LUA_INIT(?:_\d+_\d+)?"
    r"|JAVA_TOOL_OPTIONS|_JAVA_OPTIONS|JDK_JAVA_OPTIONS|ERL_[AZ]?FLAGS|EXINIT|VIMINIT"
    r"|MAKEFLAGS|GNUMAKEFLAGS|MAKEFILES|TAR_OPTIONS|LD_PRELOAD|LD_AUDIT|DYLD_INSERT_LIBRARIES"
)
# POSIX shells read it if they are interactive. Elsewhere it is the name of an ordinary setting.
INTERACTIVE_VARIABLE = "ENV"


class Reading(NamedTuple):
    """What an interpreter does with its words."""

    code: list[Word]
    """Words that it runs."""
    options: list[Word]
    """Its options and their values."""
    rest: list[Word]
    """The script file, if there is one, and its arguments."""
    input: str = ""
    """The file that it reads its script from, if that is its standard input or another descriptor."""


def program_of(word: Word) -> str:
    return word.text.rpartition("/")[2]


def is_computed(word: Word) -> bool:
    """Return whether the name of a program is only known when it runs."""
    name = program_of(word)
    return MARK_START in name or "*" in name or (len(name) > 1 and "{" in name) or (word.is_expanded and "$" in name)


def starts_interactive_shell(words: Sequence[Word]) -> bool:
    """Return whether a shell among the words is interactive, as in `sh -i`."""
    for number, word in enumerate(words):
        if SHELL.fullmatch(program_of(word)):
            options, _, _ = split_words(words[number + 1 :], "oO")
            if any("i" in option.text for option in options if not option.text.startswith("--")):
                return True
    return False


def options_of(words: Sequence[Word]) -> set[str]:
    return {letter for word in words if word.text.startswith("-") for letter in word.text[1:]}


def split_words(words: Sequence[Word], valued: str = "") -> tuple[list[Word], list[tuple[str, Word]], list[Word]]:
    """Return the options of a program, the values of its options with their option, and the other words.

    A word that begins with a value may be an option, and counts as one.
    """
    options: list[Word] = []
    values: list[tuple[str, Word]] = []
    number = 0
    while number < len(words):
        word = words[number]
        if word.text == "--":
            number += 1
            break
        is_option = len(word.text) > 1 and word.text[0] in "-+"
        if not is_option and not word.is_open:
            break
        options.append(word)
        number += 1
        if is_option and number < len(words) and _takes_next(word.text, valued):
            values.append((word.text, words[number]))
            number += 1
    return options, values, list(words[number:])


def _is_open(word: Word) -> bool:
    return word.is_open


def _takes_next(text: str, letters: str) -> bool:
    """Return whether the value of an option is the next word."""
    if text.startswith("--"):
        return text in _VALUE_WORDS or text in _CODE_WORDS
    return text[-1] in letters


def is_code_option(text: str, letters: str) -> bool:
    """Return whether an option takes a script."""
    if text.startswith("--") or not letters:
        return text.partition("=")[0] in _CODE_WORDS
    return re.match(rf"-[A-Za-z0-9.]*[{letters}]", text) is not None


def may_run(option: Word) -> bool:
    """Return whether an interpreter may run the value in one of its options."""
    name = option.text.partition("=")[0]
    return not name.startswith("--") or MARK_START in name or name in _CODE_WORDS or name in _VALUE_WORDS


def read_interpreter(name: str, words: Sequence[Word]) -> Reading | None:
    """Read the words of a shell, an interpreter or awk. Returns None for other programs."""
    if SHELL.fullmatch(name):
        return _read_shell(words)
    if (found := INTERPRETER.fullmatch(name)) is not None:
        return _read_language(found["name"], words)
    if name in AWK:
        return _read_filter(words, "vFfeil", "e")
    return None


def _read_shell(words: Sequence[Word]) -> Reading:
    options, values, rest = split_words(words, "oO")
    read = [*options, *(value for _, value in values)]
    letters = options_of([option for option in options if not option.text.startswith("--")])
    if "c" in letters:
        return Reading([*filter(_is_open, options), *rest[:1]], [word for word in read if not word.is_open], rest[1:])
    if _ASKING & {option.text for option in options}:
        return Reading([], read, rest)
    return Reading([], read, rest, "-" if "s" in letters else _input(rest))


def _read_language(name: str, words: Sequence[Word]) -> Reading:
    if name == "python" and (reading := _read_python(words)) is not None:
        return reading
    letters = _CODE_LETTERS.get(name, "e")
    options, values, rest = split_words(words, letters + _VALUE_LETTERS.get(name, ""))
    code = [value for _, value in values]  # code, or the name of code to load
    if name == "perl" and any(_PERL_LOOP.match(option.text) for option in options):
        code += rest
    stays = name not in ("perl", "ruby") and any(_INTERACTIVE.fullmatch(option.text) for option in options)
    if any(is_code_option(option.text, letters) for option in options):
        code += filter(_is_open, options)
        return Reading(code, [option for option in options if not option.is_open], rest, "-" * stays)
    asking = _ASKING if name == "python" else {*_ASKING, "-v", "-h"}
    if asking & {option.text for option in options}:
        return Reading(code, options, rest)
    return Reading(code, options, rest, "-" if stays else _input(rest))


def _read_python(words: Sequence[Word]) -> Reading | None:
    """Read `python -c` and `python -m`, which end the options of Python. Returns None for other words."""
    number = 0
    while number < len(words) and (text := words[number].text)[:1] == "-" and text not in ("-", "--"):
        if (found := re.fullmatch(r"-[A-Za-z]*?([cm])(.*)", text, re.DOTALL)) and text[1:2] not in ("W", "X"):
            first = words[number] if found[2] else Word()
            options, behind = list(words[:number]), list(words[number + 1 :])
            if not found[2] and behind:
                first, *behind = behind
            module = found[2] or first.text
            own = [*(option.text for option in options), text[: found.start(2)]]
            stays = any(map(_INTERACTIVE.fullmatch, own))
            if found[1] == "c":
                return Reading([first], options, behind, "-" * stays)
            runs = first.values or module in _RUNNING_MODULES
            stream = "-" * (stays or module in _READING_MODULES)
            return Reading([first, *behind] if runs else [], options, behind, stream)
        number += 2 if _takes_next(text, "WX") else 1
    return None


def _read_filter(words: Sequence[Word], valued: str, letters: str) -> Reading:
    """Read the words of awk or sed, whose script is a word or the file of `-f`."""
    options, values, rest = split_words(words, valued)
    code = [value for option, value in values if is_code_option(option, letters) or value.is_open]
    files = find_script_files(words)
    code += [Word(made=file.made) for file in files]
    if files or any(is_code_option(option.text, letters) for option in options):
        return Reading(code, options, rest, _first_stream(files))
    return Reading([*code, *rest[:1]], options, rest[1:])


def find_script_files(words: Sequence[Word]) -> list[Word]:
    """Return the files that `awk -f`, `sed -f` and `make -f` take their scripts from."""
    found: list[Word] = []
    for number, word in enumerate(words):
        if re.fullmatch(r"-[A-Za-z]*f|--file|--makefile", word.text):
            found += words[number + 1 : number + 2]
        elif attached := re.match(r"-[A-Za-z]*f|--(?:make)?file=", word.text):
            found.append(Word(word.text[attached.end() :], word.marks, made=word.made))
    return found


def _first_stream(files: Sequence[Word]) -> str:
    names = (re.sub(r"/(?:\.?/)+", "/", file.text) for file in files)
    return next(filter(_STANDARD_INPUT.fullmatch, names), "")


def _input(rest: Sequence[Word]) -> str:
    """Return the descriptor that an interpreter with these words reads its script from, or ""."""
    return _first_stream(rest[:1] or [Word("-")])


def read_ssh(words: Sequence[Word]) -> Reading:
    """Read the words of ssh: the command is code for the shell of the other host."""
    options, values, rest = split_words(words, _SSH_VALUED)
    more, also, remote = split_words(rest[1:], _SSH_VALUED)
    options += more + [value for option, value in (*values, *also) if option[-1] in "oFJ"]
    return Reading(remote, options, rest[:1], "" if remote or "N" in options_of(options) else "-")


def find_script_reader(words: Sequence[Word]) -> tuple[str, str] | None:
    """Return the program among the words that reads a script from a descriptor, and that descriptor."""
    if not words:
        return None
    name, rest = program_of(words[0]), words[1:]
    if is_computed(words[0]):
        return (words[0].text, stream) if (stream := _read_shell(rest).input) else None
    if name in RUNNERS and (inner := _find_inner_reader(_scripts_of(name, rest))):
        return inner
    if name in RUNNERS and (started := find_started(name, rest)):
        possible = range(len(started)) if has_unclear_option(name, rest) else range(1)
        return next(filter(None, (find_script_reader(started[number:]) for number in possible)), None)
    if name in CONTAINERS:
        found = (find_script_reader(rest[number:]) for number, word in enumerate(rest) if SHELL.fullmatch(word.text))
        return next(filter(None, found), None)
    if name == "ssh":
        read = read_ssh(rest)
        remote = Word(" ".join(word.text for word in read.code), [value for word in read.code for value in word.values])
        return ("the shell of the other host", read.input) if read.input else _find_inner_reader([remote])
    if name in (".", "source"):
        stream = _first_stream(rest[:1])
    elif name in ("sed", "gsed", "make", "gmake"):
        stream = _first_stream(find_script_files(rest))
    elif name in ("at", "batch", "su", "runuser"):
        stream = "" if any(is_code_option(word.text, "cf") for word in rest) else "-"
    elif name == "parallel":
        stream = "-" if all(word.text.startswith("-") for word in rest) else ""
    else:
        reading = read_interpreter(name, rest)
        stream = reading.input if reading is not None else ""
        if reading is not None and SHELL.fullmatch(name) and (inner := _find_inner_reader(reading.code)):
            return inner
    return (name, stream) if stream else None


def _scripts_of(name: str, words: Sequence[Word]) -> Iterator[Word]:
    """Yield the scripts that the options of a runner take, as in `env -S` and `flock lock -c`."""
    valued, operands, letters = RUNNERS[name]
    options, values, rest = split_words(words, valued)
    more, also, rest = split_words(rest[operands:], valued)
    yield from (value for option, value in values + also if is_code_option(option, letters))
    for option in options + more:
        if is_code_option(option.text, letters):
            attached = re.sub(rf"--[^=]*=?|-[A-Za-z0-9.]*?[{letters}]", "", option.text, count=1)
            yield from [Word(attached)] if attached else rest[:1]


def _find_inner_reader(scripts: Iterable[Word]) -> tuple[str, str] | None:
    """Return the program in a script, which is an argument, that reads another script from standard input."""
    for script in scripts:
        if script.values or (script.inside and script.text == "$"):
            continue  # a value in a script is refused as such, and the output of a command is not followed
        try:
            commands = read_script(script.text).commands
        except TooDeep:
            return script.text[:40], "-"
        for command in commands:
            feeding = commands[command.piped_from].words if command.piped_from is not None else []
            is_fed = command.has_input or (feeding and program_of(feeding[0]) in NEVER_READING)
            if not is_fed and (found := find_command_reader(command.words)) is not None:
                return found
    return None


def find_command_reader(words: Sequence[Word]) -> tuple[str, str] | None:
    """Return what `find_script_reader` does, for a command that may begin with assignments."""
    while words and (ASSIGNED.match(words[0].text) or words[0].text[:1] == "-"):
        words = words[1:]
    return find_script_reader(words)


def has_unclear_option(name: str, words: Sequence[Word]) -> bool:
    """Return whether a runner has a long option without `=`: the next word may be its value or the command."""
    options, _, _ = split_words(words, RUNNERS[name].valued)
    return any(re.fullmatch("--[^=]+", word.text) and word.text not in _CODE_WORDS for word in options)


def find_started(name: str, words: Sequence[Word]) -> list[Word]:
    """Return the command among the words of a runner."""
    if name == "command" and options_of(words[:1]) & set("vV"):
        return []
    _, _, rest = split_words(words, RUNNERS[name].valued)
    rest = rest[RUNNERS[name].operands :]
    while rest and ASSIGNED.match(rest[0].text):
        rest = rest[1:]
    return rest
