"""Values in shell commands: each reaches the shell as data, whatever the quoting around its placeholder.

A placeholder is not replaced by its value but by a reference to a variable that holds it, written so that it is one
word of data where it stands: bare, in double quotes, in single quotes, in a here-document. Nothing in a value is ever
read as shell. Where no such reference exists (arithmetic, a quoted here-document) a value that could mean something
else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

VARIABLE = "SHOTCLOCK_VALUE_{}"
# What Linux takes in one environment variable, less its name.
VALUE_LIMIT = 128 * 1024 - 64

MARK = "\ue000{}\ue001"
_MARKED = re.compile("\ue000(\\d+)\ue001")
_HEREDOC = re.compile(r"<<(?P<dash>-?)[ \t]*(?P<quote>['\"\\]?)(?P<word>[A-Za-z_][A-Za-z0-9_]*)['\"]?")
_PLAIN_NUMBER = re.compile(r"-?\d{1,18}")


class Unsafe(ValueError):
    """A value stands where it could not be kept from meaning something else."""


def mark(number: int) -> str:
    """What stands in a rendered command for value `number`. No template can write it by itself."""
    return MARK.format(number)


def has_marks(text: str) -> bool:
    return "\ue000" in text or "\ue001" in text


def unmarked(text: str, values: Sequence[str]) -> str:
    """The values themselves where marks of them stand."""
    if not has_marks(text):
        return text
    return _MARKED.sub(lambda found: values[number] if (number := int(found[1])) < len(values) else found[0], text)


def with_references(command: str, values: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The command with a reference for every mark, and the variables that hold the values. Raises Unsafe."""
    variables: dict[str, str] = {}
    scanner = _Scanner(command)
    written: list[str] = []
    position = 0
    for found in _MARKED.finditer(command):
        written.append(command[position : found.start()])
        position = found.end()
        value = values[int(found.group(1))]
        if "\0" in value:
            raise Unsafe("a value with a NUL byte in it cannot be handed to a command")
        try:
            size = len(value.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            raise Unsafe("a value with half a character in it cannot be handed to a command") from None
        if size > VALUE_LIMIT:
            raise Unsafe(f"a value of more than {VALUE_LIMIT} bytes cannot be handed over in a command: use `stdin`")
        name = VARIABLE.format(found.group(1))
        variables[name] = value
        written.append(_reference(scanner.state_at(found.start()), name, value))
        if scanner.is_past(found.start()):
            raise Unsafe("a value cannot stand behind a backslash: leave the backslash out, a value needs none")
    written.append(command[position:])
    return "".join(written), variables


def _reference(state: str, name: str, value: str) -> str:
    match state:
        case "bare":
            return f'"${{{name}}}"'
        case "double" | "heredoc":
            return f"${{{name}}}"
        case "single":
            return f"'\"${{{name}}}\"'"
        case "comment":
            return ""
        case "arithmetic":
            if _PLAIN_NUMBER.fullmatch(value.strip()):
                return value.strip()
            raise Unsafe(f"in $((…)) only a whole number can stand, not {value[:40]!r}")
        case _:
            raise Unsafe(f"a value cannot stand in {state}: it would not be replaced there, or be read as shell")


class _Scanner:
    """Follows the quoting of a POSIX shell command, as far as is needed to know what a place in it is."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        # What is open, from outside to inside: double, single, dollar-single, command, arithmetic, backtick, brace.
        self._open: list[str] = []
        self._pending: list[tuple[str, bool, bool]] = []
        self._heredoc: tuple[str, bool, bool] | None = None
        self._comment = False

    def state_at(self, position: int) -> str:
        """Positions have to be asked for from left to right."""
        while self._position < position:
            self._step()
        if self._heredoc is not None:
            return "a quoted here-document" if self._heredoc[1] else "heredoc"
        inside = self._open[-1] if self._open else ""
        match inside:
            case "" | "command":
                return "comment" if self._comment else "bare"
            case "dollar-single":
                return "$'…'"
            case "backtick":
                return "`…`"
            case "brace":
                return "${…}"
            case "paren":
                return "arithmetic"
            case _:
                return inside

    def is_past(self, position: int) -> bool:
        """A backslash before it has taken its first character along."""
        return self._position > position

    def _step(self) -> None:
        text, at = self._text, self._position
        char = text[at]
        if self._heredoc is not None:
            self._step_heredoc()
            return
        inside = self._open[-1] if self._open else ""
        if self._comment:
            if char == "\n":
                self._comment = False
                self._newline()
            else:
                self._position += 1
            return
        if inside == "single":
            if char == "'":
                self._open.pop()
            self._position += 1
            return
        if inside == "dollar-single":
            if char == "\\":
                self._position += 2
                return
            if char == "'":
                self._open.pop()
            self._position += 1
            return
        if char == "\\":
            self._position += 2
            return
        if inside == "double":
            self._step_expansions(char, closing='"')
            return
        if inside == "arithmetic":
            if text.startswith("))", at):
                self._open.pop()
                self._position += 2
                return
            if char == "(":
                self._open.append("paren")
            self._step_expansions(char, closing="")
            return
        if inside == "paren":
            if char == ")":
                self._open.pop()
            elif char == "(":
                self._open.append("paren")
            self._step_expansions(char, closing="")
            return
        if inside == "brace":
            if char == "}":
                self._open.pop()
                self._position += 1
                return
            if char == "'":
                self._open.append("single")
                self._position += 1
                return
            self._step_expansions(char, closing="")
            return
        self._step_bare(char, inside)

    def _step_bare(self, char: str, inside: str) -> None:
        text, at = self._text, self._position
        if char == "'":
            self._open.append("single")
        elif text.startswith("$'", at):
            self._open.append("dollar-single")
            self._position += 1
        elif char == "\n":
            self._newline()
            return
        elif char == "#" and (at == 0 or text[at - 1] in " \t\n;|&("):
            self._comment = True
        elif text.startswith("((", at):  # in shells that know it, a command of its own
            self._open.append("arithmetic")
            self._position += 1
        elif inside == "command" and char == ")":
            self._open.pop()
        elif inside == "command" and char == "(":
            self._open.append("command")
        elif inside == "backtick" and char == "`":
            self._open.pop()
        elif text.startswith("<<<", at):
            self._position += 2
        elif (found := _HEREDOC.match(text, at)) is not None:
            self._pending.append((found["word"], bool(found["quote"]), bool(found["dash"])))
            self._position = found.end()
            return
        else:
            self._step_expansions(char, closing="")
            return
        self._position += 1

    def _step_expansions(self, char: str, *, closing: str) -> None:
        text, at = self._text, self._position
        if closing and char == closing:
            self._open.pop()
        elif char == '"':
            self._open.append("double")
        elif text.startswith("$((", at):
            self._open.append("arithmetic")
            self._position += 2
        elif text.startswith("$(", at):
            self._open.append("command")
            self._position += 1
        elif text.startswith("${", at):
            self._open.append("brace")
            self._position += 1
        elif char == "`":
            if "backtick" in self._open:
                while self._open.pop() != "backtick":
                    pass
            else:
                self._open.append("backtick")
        self._position += 1

    def _newline(self) -> None:
        self._position += 1
        if self._pending:
            self._heredoc = self._pending.pop(0)

    def _step_heredoc(self) -> None:
        assert self._heredoc is not None
        word, _, dash = self._heredoc
        end = self._text.find("\n", self._position)
        end = len(self._text) if end < 0 else end
        line_start = self._text.rfind("\n", 0, self._position) + 1
        if self._position == line_start:
            line = self._text[line_start:end]
            if (line.lstrip("\t") if dash else line) == word:
                self._heredoc = None
                self._position = min(end + 1, len(self._text))
                if self._pending:
                    self._heredoc = self._pending.pop(0)
                return
        self._position += 1
