"""Programs and their words in a shell command: which words are scripts, and which programs read a script.

Only what is known of programs stands here; what may stand in a script is decided in `shell_quoting`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..core.value_types import lazy_pattern
from .shell_syntax import Word

ASSIGNED = lazy_pattern(r"(?P<name>[A-Za-z_]\w*)(?P<subscript>\[[^=]*\])?\+?=", re.DOTALL)
# They start the program that they are given; a script on their standard input is that program's.
STARTING = {
    *("env", "sudo", "doas", "exec", "command", "nohup", "nice", "ionice", "time", "timeout", "stdbuf", "setsid"),
    *("chroot", "unshare", "nsenter", "docker", "podman", "kubectl", "ssh", "runuser", "busybox", "xargs", "find"),
}
SHELL = lazy_pattern(r"(?:ba|da|a|z|k|mk|c|tc|fi)?sh|rbash")
INTERPRETER = lazy_pattern(r"(?P<name>python|perl|ruby|node|nodejs|php|lua|bun|deno|osascript|Rscript)[\d.]*")
# The options that take a script, by their letter.
_CODE_LETTERS = {"python": "c", "perl": "eE", "ruby": "e", "node": "ep", "nodejs": "ep", "php": "rBRE", "lua": "e"}
# The options whose value is the next word.
_VALUE_LETTERS = {"python": "WX", "perl": "I", "ruby": "rICE", "node": "rC", "nodejs": "rC", "php": "dczS", "lua": "l"}
_VALUE_WORDS = {
    *("--require", "--import", "--loader", "--experimental-loader", "--input-type", "--conditions", "--preload"),
    *("--check-hash-based-pycs", "--env-file"),
}
# Modules of Python that run their arguments, and those that run what they read.
_RUNNING_MODULES, _READING_MODULES = {"timeit", "pdb"}, {"code", "asyncio", "pdb"}
_CODE_WORDS = {"--eval", "--print", "--command", "--run"}
_SSH_OPTIONS_WITH_VALUE = set("bcDEeFIiJLlmOopQRSWwBP")
STANDARD_INPUT = lazy_pattern(r"-|/dev/stdin|(?:/dev|/proc/self)/fd/\d+")
AWK = {"awk", "gawk", "mawk", "nawk"}
# Variables whose value shells and other programs run: as script, as command, as options that take either, or as the
# file whose code each of them loads. What only says where to look (PATH, PYTHONPATH, LD_LIBRARY_PATH) is none of them.
RUN_VARIABLE = lazy_pattern(
    r"BASH_ENV|BASH_FUNC_.*|PS[0-4]|PROMPT_COMMAND"
    r"|(?:GIT_|GIT_SEQUENCE_|SUDO_|KUBE_|SYSTEMD_|HG)?EDITOR|VISUAL|FCEDIT|(?:GIT_|GH_|AWS_|SYSTEMD_|MAN)?PAGER"
    r"|LESSOPEN|LESSCLOSE|(?:GIT|SSH|SUDO)_ASKPASS|(?:RSYNC|CVS|BORG)_RSH|RSYNC_CONNECT_PROG"
    r"|GIT_(?:SSH|SSH_COMMAND|PROXY_COMMAND|EXTERNAL_DIFF|CONFIG_PARAMETERS|CONFIG_KEY_\d+)"
    r"|PERL5OPT|PERL5DB|PYTHON(?:STARTUP|BREAKPOINT|WARNINGS)|RUBYOPT|NODE_OPTIONS|LUA_INIT(?:_\d+_\d+)?"
    r"|JAVA_TOOL_OPTIONS|_JAVA_OPTIONS|JDK_JAVA_OPTIONS|ERL_[AZ]?FLAGS|EXINIT|VIMINIT"
    r"|MAKEFLAGS|GNUMAKEFLAGS|MAKEFILES|TAR_OPTIONS|LD_PRELOAD|LD_AUDIT|DYLD_INSERT_LIBRARIES"
)
# Read by POSIX shells that are interactive, and the name of many a setting elsewhere.
INTERACTIVE_VARIABLE = "ENV"


def program_of(word: Word) -> str:
    return word.text.rpartition("/")[2] if "/" in word.text else word.text


def find_program(words: Sequence[Word]) -> int:
    """Return where the program stands, behind assignments and what merely says how the next word is looked up."""
    number = 0
    is_looked_up = False
    while number < len(words):
        text = words[number].text
        if text in ("command", "builtin"):
            is_looked_up = True
        elif not ASSIGNED.match(text) and not (is_looked_up and text.startswith("-")):
            break
        number += 1
    return number


def starts_interactive_shell(words: Sequence[Word]) -> bool:
    """Return whether a shell among the words is to be interactive, as in `sh -i`."""
    for number, word in enumerate(words):
        if SHELL.fullmatch(program_of(word)):
            for option in words[number + 1 :]:
                if not option.text.startswith(("-", "+")):
                    break
                if not option.text.startswith("--") and "i" in option.text:
                    return True
    return False


def options_of(words: Sequence[Word]) -> set[str]:
    return {letter for word in words if word.text.startswith("-") for letter in word.text[1:]}


def is_code_option(text: str, letters: str) -> bool:
    if text in _CODE_WORDS:
        return True
    return re.fullmatch(rf"-[A-Za-z0-9.]*[{letters}]", text) is not None


def _takes_next(text: str, letters: str) -> bool:
    """Return whether the value of an option is the next word."""
    return text in _VALUE_WORDS or (not text.startswith("--") and text[-1] in letters)


def find_interpreted(words: Sequence[Word], name: str) -> list[Word]:
    """Return the scripts among the words of an interpreter."""
    if name == "python" and _module(words) in _RUNNING_MODULES:
        return list(words)
    return find_code_words(words, _CODE_LETTERS.get(name, "e"), valued=_VALUE_LETTERS.get(name, ""))


def _module(words: Sequence[Word]) -> str:
    """Return what `python -m` is to run."""
    skip = False
    for number, word in enumerate(words):
        if skip:
            skip = False
        elif not word.text.startswith("-"):
            return ""
        elif re.match(r"-[A-Za-z]*m", word.text) and not word.text.startswith(("-W", "-X", "--")):
            attached = word.text.partition("m")[2]
            return attached or (words[number + 1].text if number + 1 < len(words) else "")
        else:
            skip = _takes_next(word.text, "WX")
    return ""


def _reads_code(words: Sequence[Word], name: str) -> bool:
    """Return whether an interpreter with these words takes its standard input for a script."""
    if name == "python" and (module := _module(words)):
        return module in _READING_MODULES
    letters, valued = _CODE_LETTERS.get(name, "e"), _VALUE_LETTERS.get(name, "")
    skip = False
    for word in words:
        if skip:
            skip = False
        elif not word.text.startswith("-") or word.text == "-":
            return STANDARD_INPUT.fullmatch(word.text) is not None
        elif is_code_option(word.text, letters) or word.text.partition("=")[0] in _CODE_WORDS:
            return False
        else:
            skip = _takes_next(word.text, valued)
    return True


def find_script_files(words: Sequence[Word]) -> list[Word]:
    """Return the files that `awk -f` and `sed -f` take their scripts from."""
    found: list[Word] = []
    for number, word in enumerate(words):
        if word.text == "--file" or re.fullmatch(r"-[nrEsuz]*f", word.text):
            found += words[number + 1 : number + 2]
        elif attached := re.match(r"-[nrEsuz]*f|--file=", word.text):
            found.append(Word(word.text[attached.end() :], inside=word.inside))
    return found


def find_code_words(words: Sequence[Word], letters: str, *, stops: bool = True, valued: str = "") -> list[Word]:
    """Return the scripts among the words of a program: behind an option that takes one, or in the option's own word.
    The first word that is no option is a file, and what follows it is data, unless options may follow (`stops`)."""
    found = []
    is_next = skip = False
    for word in words:
        if is_next:
            found.append(word)
            is_next = False
            if not word.text.startswith("-"):
                continue
        if skip:
            skip = False
        elif word.text.startswith("-") and len(word.text) > 1:
            is_next = is_code_option(word.text, letters)
            skip = not is_next and _takes_next(word.text, valued)
            if re.match(rf"-[A-Za-z0-9.]*[{letters}]", word.text) or word.text.partition("=")[0] in _CODE_WORDS:
                found.append(word)
        elif stops:
            break
    return found


def find_shell_script(words: Sequence[Word]) -> tuple[list[Word], list[Word]]:
    """Return the script of `sh -c`, if there is one, and the other words that are no options."""
    asks = skip = False
    for number, word in enumerate(words):
        if skip:
            skip = False
        elif word.text[:1] in ("-", "+") and len(word.text) > 1:
            is_long = word.text.startswith("--")
            skip = word.text in ("--rcfile", "--init-file") or (not is_long and word.text[-1] in "oO")
            asks = asks or (word.text[0] == "-" and not is_long and "c" in word.text)
        else:
            return ([word], list(words[number + 1 :])) if asks else ([], list(words[number:]))
    return [], []


def find_awk_programs(words: Sequence[Word]) -> list[Word]:
    skip = ""
    has_file = False
    found = []
    for word in words:
        if skip:
            if skip in ("-e", "--source"):
                found.append(word)
            skip = ""
        elif word.text in ("-F", "-v", "-f", "-e", "-i", "--source", "--file", "--assign", "--field-separator"):
            skip = word.text
            has_file = has_file or word.text in ("-f", "--file")
        elif not word.text.startswith("-") or word.text == "-":
            return found if found or has_file else [word]
    return found


def find_sed_scripts(words: Sequence[Word]) -> list[Word]:
    scripts = find_code_words(words, "e", stops=False)
    return scripts or [word for word in words if not word.text.startswith("-")][:1]


def find_ssh_words(words: Sequence[Word]) -> tuple[Word | None, list[Word]]:
    """Return the host, and the command for the shell there."""
    skip = False
    for number, word in enumerate(words):
        if skip:
            skip = False
        elif word.text.startswith("-") and len(word.text) > 1:
            skip = word.text[-1] in _SSH_OPTIONS_WITH_VALUE and len(word.text) == 2
        else:
            return word, list(words[number + 1 :])
    return None, []


def find_names_to_read(words: Sequence[Word], valued: str = "dinNptu") -> list[Word]:
    found = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word.text.startswith("-") and len(word.text) > 1:
            skip = word.text[-1] in valued
        else:
            found.append(word)
    return found


def find_script_reader(words: Sequence[Word]) -> str | None:
    """Return the program among the words that takes its standard input for a script, if one does."""
    for number, word in enumerate(words):
        name, rest = program_of(word), words[number + 1 :]
        if number and program_of(words[0]) not in STARTING:
            return None
        if SHELL.fullmatch(name):
            script, operands = find_shell_script(rest)
            asks = any(is_code_option(each.text, "c") for each in rest)
            from_input = any(re.fullmatch(r"-[a-z]*s[a-z]*", each.text) for each in rest)
            is_input = not operands or from_input or STANDARD_INPUT.fullmatch(operands[0].text)
            if not script and not asks and is_input:
                return name
            return None
        if (found := INTERPRETER.fullmatch(name)) is not None:
            return name if _reads_code(rest, found["name"]) else None
        if name in AWK:
            return name if any(STANDARD_INPUT.fullmatch(each.text) for each in find_script_files(rest)) else None
        if name in (".", "source"):
            return name if rest and STANDARD_INPUT.fullmatch(rest[0].text) else None
        if name == "ssh":
            host, remote = find_ssh_words(rest)
            if host is not None and not remote:
                return "the shell on the other side"
            return find_script_reader([Word(text) for each in remote for text in each.text.split()])
        if name == "su":
            return None if any(is_code_option(each.text, "c") for each in rest) else name
        if name in ("at", "batch") or (name == "parallel" and all(each.text.startswith("-") for each in rest)):
            return name
    return None
