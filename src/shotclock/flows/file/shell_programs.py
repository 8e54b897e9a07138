"""Programs that run their arguments, one row each, and how their words are read.

`shell_quoting` decides where a value is refused; this module only knows the programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .shell_syntax import MARK_START, TooDeep, Word, read_script

ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<subscript>\[[^=]*\])?\+?=", re.DOTALL)
SHELL = re.compile(r"(?:ba|da|a|z|k|mk|c|tc|fi)?sh|rbash")
AWK = {"awk", "gawk", "mawk", "nawk"}
SCRIPT_FILE_PROGRAMS = {"sed", "gsed", "make", "gmake"}
CONTAINERS = {"docker", "podman", "kubectl"}  # they start a program inside a container


class Letters(NamedTuple):
    """The options of a program that runs its arguments."""

    valued: str = ""  # letters whose value is the next word
    code: str = ""  # letters that take a script
    operands: int = 0  # words between the options and the command of a runner
    last: str = ""  # letters that end the options


RUNNERS = {
    **dict.fromkeys(("command", "builtin", "coproc", "nohup", "setsid", "busybox"), Letters()),
    **{"env": Letters("uCa", "S"), "exec": Letters("a"), "sudo": Letters("CDghpRrTtUu"), "doas": Letters("Cu")},
    **{"nice": Letters("n"), "ionice": Letters("cnpPu"), "chrt": Letters("TPD", operands=1), "time": Letters("fo")},
    **{"timeout": Letters("ks", operands=1), "taskset": Letters(operands=1), "flock": Letters("Ew", "c", 1)},
    **{"chroot": Letters(operands=1), "unshare": Letters("GRSw"), "nsenter": Letters("tSG"), "stdbuf": Letters("ieo")},
    **{"xargs": Letters("adEILnPs"), "strace": Letters("aeEIoOpPsSuX")},
}
_LANGUAGES = {
    **{"python": Letters("WX", "c", last="cm"), "perl": Letters("eEI", "eE"), "ruby": Letters("erICE", "e")},
    **dict.fromkeys(("node", "nodejs"), Letters("eprC", "ep")),
    **{"php": Letters("rBREdczS", "rBRE"), "lua": Letters("el", "e")},
    **dict.fromkeys(("bun", "deno", "osascript", "Rscript"), Letters("e", "e")),
}
_SHELL_OPTIONS, _AWK_OPTIONS, _SSH_OPTIONS = (
    Letters("oO", "c"),
    Letters("vFfeil", "e"),
    Letters("bcDEeFIiJLlmOopQRSWwBP"),
)
# Options with a script in the next word or after `=`.
_CODE_WORDS = {"--eval", "--print", "--command", "--run", "--split-string", "--session-command", "--source"}
# Other options whose value is the next word. Each names code to load.
_VALUE_WORDS = {
    *("--require", "--import", "--loader", "--experimental-loader", "--input-type", "--conditions", "--preload"),
    *("--check-hash-based-pycs", "--env-file", "--rcfile", "--init-file", "--file", "--include", "--load"),
}
# Modules of Python that run their arguments or standard input.
_RUNNING_MODULES = {"timeit", "pdb", "trace", "cProfile", "profile", "code", "asyncio"}
NEVER_READING = {"echo", "printf", "curl", "wget"}  # programs that do not read their standard input
# `perl -n` and `perl -p` run a file name that ends in `|`, and `-a` and `-F` imply `-n`.
_PERL_LOOP = re.compile(r"-(?![MmI])[\w.]*[napF]")
# They make an interpreter read its standard input after the script.
_INTERACTIVE = re.compile(r"-(?![WXl])[A-Za-z]*i[A-Za-z]*|--interactive")
_STANDARD_INPUT = re.compile(r"-|/dev/stdin|(?:/dev|/proc/self)/fd/\d+")
_PRINTING = {"--version", "--help", "-V"}  # with one of these, an interpreter only prints something
# Variables that a program evaluates: as a script, a command, options, or code to load. Folders to search (PATH,
# PYTHONPATH, LD_LIBRARY_PATH) are not among them.
RUN_VARIABLE = re.compile(
    r"BASH_ENV|BASH_FUNC_.*|PS[0-4]|PROMPT_COMMAND"
    r"|(?:GIT_|GIT_SEQUENCE_|SUDO_|KUBE_|SYSTEMD_|HG)?EDITOR|VISUAL|FCEDIT|(?:GIT_|GH_|AWS_|SYSTEMD_|MAN)?PAGER"
    r"|LESSOPEN|LESSCLOSE|(?:GIT|SSH|SUDO)_ASKPASS|(?:RSYNC|CVS|BORG)_RSH|RSYNC_CONNECT_PROG"
    r"|GIT_(?:SSH|SSH_COMMAND|PROXY_COMMAND|EXTERNAL_DIFF|CONFIG.*)"
    r"|PERL5OPT|PERL5DB|PYTHON(?:STARTUP|BREAKPOINT|WARNINGS)|RUBYOPT|NODE_OPTIONS|LUA_INIT(?:_\d+_\d+)?"
    r"|JAVA_TOOL_OPTIONS|_JAVA_OPTIONS|JDK_JAVA_OPTIONS|ERL_[AZ]?FLAGS|EXINIT|VIMINIT"
    r"|MAKEFLAGS|GNUMAKEFLAGS|MAKEFILES|TAR_OPTIONS|LD_PRELOAD|LD_AUDIT|DYLD_INSERT_LIBRARIES"
)
INTERACTIVE_VARIABLE = "ENV"  # interactive POSIX shells read it. Elsewhere it is an ordinary setting


class InterpreterWords(NamedTuple):
    code: list[Word]
    options: list[Word]
    rest: list[Word]  # the script file, if any, and its arguments
    input: str = ""  # the descriptor that it reads its script from, if any


def program_of(word: Word) -> str:
    return word.text.rpartition("/")[2]


def is_computed(word: Word) -> bool:
    """Return whether a program's name is only known when it runs."""
    name = program_of(word)
    return MARK_START in name or "*" in name or (len(name) > 1 and "{" in name) or (word.is_expanded and "$" in name)


def starts_interactive_shell(words: Sequence[Word]) -> bool:
    shells = (number for number, word in enumerate(words) if SHELL.fullmatch(program_of(word)))
    return any("i" in _letters(split_words(words[number + 1 :], _SHELL_OPTIONS)[0]) for number in shells)


def options_of(words: Sequence[Word]) -> set[str]:
    return {letter for word in words if word.text.startswith("-") for letter in word.text[1:]}


def _letters(options: Sequence[Word]) -> set[str]:
    return options_of([option for option in options if not option.text.startswith("--")])


def split_words(words: Sequence[Word], known: Letters) -> tuple[list[Word], list[tuple[str, Word]], list[Word]]:
    """Return the options, the values with their option, and the rest. A word that begins with a value is an option."""
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
        last = _find_last(word.text, known)
        if last is not None and last[2]:
            values.append((last[1], Word(last[2], word.marks, word.inside, made=word.made)))
        elif is_option and number < len(words) and (last is not None or _takes_next(word.text, known.valued)):
            values.append((word.text, words[number]))
            number += 1
        if last is not None:
            break
    return options, values, list(words[number:])


def _find_last(text: str, known: Letters) -> re.Match[str] | None:
    """Return the option in a cluster that ends the options, with its attached value."""
    if not known.last or text[1:2] in ("W", "X"):
        return None
    return re.fullmatch(rf"(-[A-Za-z]*?[{known.last}])(.*)", text, re.DOTALL)


def _takes_next(text: str, letters: str) -> bool:
    return text in _VALUE_WORDS or text in _CODE_WORDS if text.startswith("--") else text[-1] in letters


def is_code_option(text: str, letters: str) -> bool:
    if text.startswith("--") or not letters:
        return text.partition("=")[0] in _CODE_WORDS
    return re.match(rf"-[A-Za-z0-9.]*[{letters}]", text) is not None


def may_run(option: Word) -> bool:
    """Return whether an interpreter may run the value in an option."""
    name = option.text.partition("=")[0]
    return not name.startswith("--") or MARK_START in name or name in _CODE_WORDS or name in _VALUE_WORDS


def read_interpreter(name: str, words: Sequence[Word]) -> InterpreterWords | None:
    """Read a shell, an interpreter or awk. Returns None for other programs."""
    if SHELL.fullmatch(name):
        return _read_shell(words)
    if name in AWK:
        return _read_awk(words)
    language = name.rstrip("0123456789.")
    return _read_language(language, words) if language in _LANGUAGES else None


def _read_shell(words: Sequence[Word]) -> InterpreterWords:
    options, values, rest = split_words(words, _SHELL_OPTIONS)
    letters = _letters(options)
    read = [*options, *(value for _, value in values)]
    if "c" in letters:
        return InterpreterWords([*filter(_is_open, options), *rest[:1]], read, rest[1:])
    is_printing = bool(_PRINTING & {option.text for option in options})
    return InterpreterWords([], read, rest, "" if is_printing else "-" if "s" in letters else _script_stream(rest))


def _is_open(word: Word) -> bool:
    return word.is_open


def _read_language(name: str, words: Sequence[Word]) -> InterpreterWords:
    known = _LANGUAGES[name]
    options, values, rest = split_words(words, known)
    texts = {option.text for option in options}
    code = [value for _, value in values]  # code, or the name of code to load
    if name == "perl" and any(map(_PERL_LOOP.match, texts)):
        code += rest
    stream = "-" if name not in ("perl", "ruby") and any(map(_INTERACTIVE.fullmatch, texts)) else ""
    last = next((option[-1] for option, _ in values if _find_last(option, known)), "")
    if last == "m":
        module = code.pop()
        if module.values or module.text in _RUNNING_MODULES:
            return InterpreterWords([*code, module, *rest], options[:-1], rest, "-")
    elif last == "c" or (not known.last and any(is_code_option(text, known.code) for text in texts)):
        code += filter(_is_open, options)
    elif not (_PRINTING if name == "python" else {*_PRINTING, "-v", "-h"}) & texts:
        stream = stream or _script_stream(rest)
    return InterpreterWords(code, options[:-1] if last else options, rest, stream)


def _read_awk(words: Sequence[Word]) -> InterpreterWords:
    """Read awk, whose script is a word or the file of `-f`."""
    options, values, rest = split_words(words, _AWK_OPTIONS)
    code = [value for option, value in values if is_code_option(option, _AWK_OPTIONS.code) or value.is_open]
    files = find_script_files(words)
    code += [Word(made=file.made) for file in files]
    if files or any(is_code_option(option.text, _AWK_OPTIONS.code) for option in options):
        return InterpreterWords(code, options, rest, _find_stream(files))
    return InterpreterWords([*code, *rest[:1]], options, rest[1:])


def read_ssh(words: Sequence[Word]) -> InterpreterWords:
    """Read ssh: the command is code for the shell of the other host."""
    options, values, rest = split_words(words, _SSH_OPTIONS)
    more, also, remote = split_words(rest[1:], _SSH_OPTIONS)
    options += more + [value for option, value in (*values, *also) if option[-1] in "oFJ"]
    return InterpreterWords(remote, options, rest[:1], "" if remote or "N" in options_of(options) else "-")


def find_script_files(words: Sequence[Word]) -> list[Word]:
    """Return the script files of `awk -f`, `sed -f` and `make -f`."""
    found: list[Word] = []
    for number, word in enumerate(words):
        if re.fullmatch(r"-[A-Za-z]*f|--file|--makefile", word.text):
            found += words[number + 1 : number + 2]
        elif attached := re.match(r"-[A-Za-z]*f|--(?:make)?file=", word.text):
            found.append(Word(word.text[attached.end() :], word.marks, made=word.made))
    return found


def _find_stream(files: Sequence[Word]) -> str:
    """Return the first file that is a descriptor, or ""."""
    return next(filter(_STANDARD_INPUT.fullmatch, (re.sub(r"/(?:\.?/)+", "/", file.text) for file in files)), "")


def _script_stream(rest: Sequence[Word]) -> str:
    return _find_stream(rest[:1] or [Word("-")])


Reader = tuple[str, str]  # a program that reads a script, and from which descriptor


def find_script_reader(words: Sequence[Word]) -> Reader | None:
    """Return the program that reads a script from a descriptor, behind assignments and runners."""
    while words and (ASSIGNED.match(words[0].text) or words[0].text[:1] == "-"):
        words = words[1:]
    if not words:
        return None
    name, rest = program_of(words[0]), words[1:]
    if is_computed(words[0]):
        return (words[0].text, stream) if (stream := _read_shell(rest).input) else None
    if name in RUNNERS:
        if inner := _find_inner_reader(_scripts_of(RUNNERS[name], rest)):
            return inner
        started = find_started(name, rest)
        possible = range(len(started)) if has_unclear_option(name, rest) else range(min(1, len(started)))
        return next(filter(None, (find_script_reader(started[number:]) for number in possible)), None)
    if name in CONTAINERS:
        found = (find_script_reader(rest[number:]) for number, word in enumerate(rest) if SHELL.fullmatch(word.text))
        return next(filter(None, found), None)
    stream = ""
    if name in (".", "source"):
        stream = _find_stream(rest[:1])
    elif name in SCRIPT_FILE_PROGRAMS:
        stream = _find_stream(find_script_files(rest))
    elif name in ("at", "batch", "su", "runuser"):
        stream = "" if any(is_code_option(word.text, "cf") for word in rest) else "-"
    elif name == "parallel":
        stream = "-" if all(word.text.startswith("-") for word in rest) else ""
    elif name == "ssh":
        remote = read_ssh(rest)
        text = Word(
            " ".join(word.text for word in remote.code), [value for word in remote.code for value in word.values]
        )
        return ("the shell of the other host", remote.input) if remote.input else _find_inner_reader([text])
    elif (reading := read_interpreter(name, rest)) is not None:
        stream = reading.input
        if SHELL.fullmatch(name) and (inner := _find_inner_reader(reading.code)):
            return inner
    return (name, stream) if stream else None


def _scripts_of(runner: Letters, words: Sequence[Word]) -> Iterator[Word]:
    """Yield the scripts in a runner's options (`env -S`, `flock lock -c`)."""
    options, values, rest = split_words(words, runner)
    more, also, rest = split_words(rest[runner.operands :], runner)
    yield from (value for option, value in values + also if is_code_option(option, runner.code))
    for option in options + more:
        if is_code_option(option.text, runner.code):
            letters = runner.code or "-"
            attached = re.sub(rf"--[^=]*=?|-[A-Za-z0-9.]*?[{letters}]", "", option.text, count=1)
            yield from [Word(attached)] if attached else rest[:1]


def _find_inner_reader(scripts: Iterable[Word]) -> Reader | None:
    """Return the program in a script that reads another script from standard input."""
    for script in scripts:
        if script.values or (script.inside and script.text == "$"):
            continue  # a value in it is refused as such, and the output of a command is not followed
        try:
            commands = read_script(script.text).commands
        except TooDeep:
            return script.text[:40], "-"
        for command in commands:
            feeding = commands[command.piped_from].words if command.piped_from is not None else []
            is_fed = command.has_input or (feeding and program_of(feeding[0]) in NEVER_READING)
            if not is_fed and (found := find_script_reader(command.words)) is not None:
                return found
    return None


def has_unclear_option(name: str, words: Sequence[Word]) -> bool:
    """Return whether a long option has no `=`: the next word may be its value or the command."""
    options, _, _ = split_words(words, RUNNERS[name])
    return any(re.fullmatch("--[^=]+", word.text) and word.text not in _CODE_WORDS for word in options)


def find_started(name: str, words: Sequence[Word]) -> list[Word]:
    if name == "command" and options_of(words[:1]) & set("vV"):
        return []
    rest = split_words(words, RUNNERS[name])[2][RUNNERS[name].operands :]
    while rest and ASSIGNED.match(rest[0].text):
        rest = rest[1:]
    return rest
