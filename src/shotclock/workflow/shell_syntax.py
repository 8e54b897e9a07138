"""The reader of shell commands: how the place of each value is quoted, and which words each simple command has.

It follows the grammar of POSIX and of bash together, whichever of them will run it: what only bash reads as arithmetic
or as a test is told as that. It knows enough to say where a value stands, and nothing is ever run or expanded.

docs/design.md: R50.
"""

from __future__ import annotations

import re
from enum import StrEnum

from ..core.value_types import field, record

# Commands inside commands: nobody writes deeper ones, and each level is a frame of ours.
DEPTH_LIMIT = 50

MARK_START = "\ue000"
MARKED = re.compile("\ue000(\\d+):(\\d+)\ue001")
# `${x:1}`, `${x[1]}` and `${!x}` are computed. What stands behind the others is text.
_COMPUTED = re.compile(r"!|[#]?(?:[A-Za-z_]\w*|[\d@*#?$!-])?(?:\[|:(?![-+=?]))")
_ASSIGNS = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\[[^]]*\])?:?=")
_ESCAPE = re.compile(r"\\(?:x([\da-fA-F]{1,2})|u([\da-fA-F]{1,4})|U([\da-fA-F]{1,8})|([0-7]{1,3})|(.))", re.DOTALL)
_BLANK = " \t"
_OPENING = {"{", "if", "while", "until", "for", "case", "select"}
_CLOSING = {"}", "fi", "done", "esac"}
_BETWEEN = {"then", "else", "elif", "do", "!", "time"}
_KEPT = {"for", "case", "select", "function"}


class ValueContext(StrEnum):
    """The quoting around a value. Where it says "in", no reference to a variable would be plain data."""

    BARE = "bare"
    DOUBLE = "double"
    SINGLE = "single"
    HEREDOC = "heredoc"
    COMMENT = "comment"
    ARITHMETIC = "arithmetic"
    OLD_ARITHMETIC = "in $[…]"
    QUOTED_HEREDOC = "in a quoted here-document"
    HEREDOC_WORD = "in the word that ends a here-document"
    DOLLAR_SINGLE = "in $'…'"
    BACKTICK = "in `…`"
    BRACE = "in ${…}"
    BACKSLASH = "behind a backslash"


class TooDeep(ValueError):
    """Commands that are inside each other deeper than is looked at."""


@record
class Word:
    text: str = ""
    """The word without its quotes. `$` stands for an expansion in braces or parentheses."""
    marks: list[int] = field(default_factory=list)
    """Positions of the values in the word."""
    inside: list[tuple[int, int]] = field(default_factory=list)
    """First and last command of each substitution in the word."""
    is_quoted: bool = False
    is_expanded: bool = False
    """Whether the shell expands a variable or the output of a command in the word."""
    made: list[int] = field(default_factory=list)
    """Positions of the values in the commands of its substitutions."""

    @property
    def values(self) -> list[int]:
        return [*self.marks, *self.made]

    @property
    def is_open(self) -> bool:
        """Whether a value begins the word, so that the word may be an option, an assignment or a name."""
        return self.text[:1] in (MARK_START, "$", "{") and bool(self.values)


@record
class Command:
    words: list[Word] = field(default_factory=list)
    input: list[Word] = field(default_factory=list)
    """Here-strings, the text of here-documents, and the targets of `<`."""
    has_input: bool = False
    """Whether a redirection of its own feeds its standard input."""
    piped_from: int | None = None
    """The first of the commands whose output it reads."""


@record
class Script:
    """The commands of a text. Commands in a substitution follow the command that contains it."""

    places: dict[int, ValueContext] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    computed: list[tuple[int, int]] = field(default_factory=list)
    """The commands whose output is taken for arithmetic."""
    arrays: list[tuple[str, int, int]] = field(default_factory=list)
    """Which variables are given `( … )`, and where its items are, which are read as if they were commands."""
    defaults: list[tuple[str, Word]] = field(default_factory=list)
    """Which variables `${x=…}` and `${x:=…}` assign to, and what."""

    def values_between(self, ranges: list[tuple[int, int]]) -> list[int]:
        """Return the positions of the values in these commands."""
        commands = [command for start, end in ranges for command in self.commands[start:end]]
        return [mark for each in commands for word in (*each.words, *each.input) for mark in word.marks]


def read_script(text: str) -> Script:
    """Read a command. Never fails on one that a shell would refuse: it reads on as well as it can. Raises TooDeep."""
    script = Script()
    _Reader(text, 0, len(text), script, 0).read_list("")
    for word in (word for command in script.commands for word in (*command.words, *command.input)):
        word.made = script.values_between(word.inside)
    return script


def _unescaped(found: re.Match[str]) -> str:
    """Return the character of an escape in `$'…'`, or a blank for one that is not printed."""
    short, *_, octal, char = found.groups()
    if char is not None:
        return " " if char.isalnum() else str(char)
    code = int(octal, 8) if octal else int(short or found[2] or found[3], 16)
    return written if (written := chr(code % 0x110000)).isprintable() else " "


def _is_command_next(words: list[Word], word: str) -> bool:
    """Return whether a word stands where a command or a word of the grammar may: `function f {` and `for x do` among
    them."""
    first = words[0].text if words else ""
    is_named = first == "function" or (first == "coproc" and len(words) < 3)
    return not words or (word in _OPENING and is_named) or (word == "do" and first in ("for", "select"))


class _Reader:
    """A reader of text[at:end]. A here-document is read by one of its own, over its lines."""

    def __init__(self, text: str, at: int, end: int, script: Script, depth: int) -> None:
        self._text = text
        self._at = at
        self._end = end
        self._script = script
        self._depth = depth
        # Here-documents whose lines begin behind the next end of line: what ends them, and for which command.
        self._awaited: list[tuple[str, bool, bool, Command]] = []
        # The number before the next redirection, as in `2>`.
        self._number = ""

    # --- commands -----------------------------------------------------------------------------------------

    def read_list(self, closing: str, around: ValueContext = ValueContext.BARE) -> tuple[int, int]:
        """Read commands up to `closing`: `)` or the end. Returns from and to which command they are."""
        self._go_deeper()
        commands = self._script.commands
        first = pipeline = len(commands)
        groups: list[int] = []
        cases = 0
        is_branch = False
        command = Command()
        commands.append(command)
        while self._at < self._end:
            char = self._text[self._at]
            if char == closing and not (closing == ")" and cases):
                self._at += 1
                break
            if char in _BLANK:
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif char == "#":
                self._skip_comment()
            elif char in "\n;&|)":
                if char == ")" and cases:
                    self._forget_pattern(pipeline)
                is_branch = self._text.startswith((";;", ";&"), self._at) or (is_branch and char == "\n")
                is_pipe = self._read_operator(char)
                if is_pipe is None:  # a redirection of everything
                    self._read_redirection(command, around)
                    continue
                command = Command(piped_from=pipeline if is_pipe else None)
                commands.append(command)
                if not is_pipe:
                    pipeline = len(commands) - 1
            elif self._text.startswith("((", self._at) and (not command.words or command.words[-1].text == "for"):
                self._at += 2
                self._read_arithmetic("))", ValueContext.ARITHMETIC)
            elif char == "(":
                self._at += 1
                last = command.words[-1].text if command.words else ""
                is_array = last.endswith("=")
                is_function = self._text.startswith(")", self._at) and len(command.words) in (1, 2) and not is_array
                is_pattern = command.words[0].text == "case" if command.words else is_branch
                inside = self.read_list(")", around)
                is_branch = False
                if is_pattern:
                    self._forget_pattern(inside[0])
                if is_array:
                    self._script.arrays.append((last.rstrip("+="), *inside))
                if is_function or is_pattern:
                    command = Command()
                    commands.append(command)
            elif self._is_redirection(char):
                self._read_redirection(command, around)
            else:
                word = self._read_word(around)
                if word is None:
                    continue  # the number of a redirection
                is_branch = False
                name = "" if word.is_quoted or not _is_command_next(command.words, word.text) else word.text
                if name == "[[":
                    command.words.append(word)
                    self._read_test(command, around)
                    continue
                cases += (name == "case") - (name == "esac" and cases > 0)
                if name in _OPENING:
                    groups.append(pipeline)
                elif name in _CLOSING and groups:
                    pipeline = groups.pop()
                if name in _KEPT or not name or name not in _OPENING | _CLOSING | _BETWEEN:
                    command.words.append(word)
                elif name not in _CLOSING:
                    command = Command(piped_from=command.piped_from)
                    commands.append(command)
                    pipeline = len(commands) - 1
        self._depth -= 1
        return first, len(commands)

    def _forget_pattern(self, first: int) -> None:
        """Take the words away that are a pattern of `case`, and no command."""
        inner: list[tuple[int, int]] = []
        for number, command in enumerate(self._script.commands[first:], first):
            if not any(start <= number < end for start, end in inner):
                inner += [each for word in command.words for each in word.inside]
                if command.words and command.words[0].text != "case":
                    command.words = []

    def _go_deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise TooDeep(f"commands inside commands, more than {DEPTH_LIMIT} deep")

    def _read_operator(self, char: str) -> bool | None:
        """Read an operator. Returns whether it is a pipe; None if it is `&>`."""
        if char == "\n":
            self._at += 1
            self._read_heredocs()
            return False
        if self._text.startswith("&>", self._at):
            self._at += 1
            return None
        if self._text.startswith(("&&", "||", ";;"), self._at):
            self._at += 2
            return False
        self._at += 2 if self._text.startswith("|&", self._at) else 1
        return char == "|"

    def _read_test(self, command: Command, around: ValueContext) -> None:
        """Read the words of `[[ … ]]`, with its operators."""
        while self._at < self._end:
            char = self._text[self._at]
            if char in " \t\n":
                self._at += 1
            elif char in "&|();<>" and not self._text.startswith(("<(", ">("), self._at):
                self._at += 1
                command.words.append(Word(char))
            else:
                word = self._read_word(around)
                if word is None:
                    continue
                command.words.append(word)
                if word.text == "]]" and not word.is_quoted:
                    return

    # --- redirections and here-documents ------------------------------------------------------------------

    def _is_redirection(self, char: str) -> bool:
        return char in "<>" and not self._text.startswith(("<(", ">("), self._at)

    def _read_redirection(self, command: Command, around: ValueContext) -> None:
        text = self._text
        before = text[self._at - 1 : self._at]
        is_standard = self._number in ("", "0") if before.isdecimal() else before != "}"
        self._number = ""
        if text.startswith("<<", self._at) and is_standard:
            command.has_input = True
        if text.startswith("<<<", self._at):
            self._at += 3
            self._skip_blanks()
            command.input.append(self._read_word(around) or Word())
            return
        if text.startswith("<<", self._at):
            self._at += 2
            dash = text.startswith("-", self._at)
            self._at += dash
            self._skip_blanks()
            start = self._at
            word = self._read_word(around) or Word()
            for mark in word.marks:
                self._script.places[mark] = ValueContext.HEREDOC_WORD
            is_quoted = word.is_quoted or "\\" in text[start : self._at]
            self._awaited.append((word.text, is_quoted, dash, command))
            return
        reads = text[self._at] == "<"
        is_copy = text.startswith("<&", self._at)
        while self._at < self._end and text[self._at] in "<>&|" and not text.startswith(("<(", ">("), self._at):
            self._at += 1
        self._skip_blanks()
        target = self._read_word(around)
        if reads and is_standard:
            command.has_input = not is_copy  # `<&3` reads what was opened before
        if target is not None and reads:
            # A file that a value names is not the value.
            command.input.append(Word(inside=target.inside))

    def _skip_blanks(self) -> None:
        while self._at < self._end and self._text[self._at] in _BLANK:
            self._at += 1

    def _skip_comment(self) -> None:
        end = self._text.find("\n", self._at, self._end)
        end = self._end if end < 0 else end
        for found in MARKED.finditer(self._text, self._at, end):
            self._script.places[found.start()] = ValueContext.COMMENT
        self._at = end

    def _read_heredocs(self) -> None:
        awaited, self._awaited = self._awaited, []
        for ending, is_quoted, dash, command in awaited:
            start = self._at
            end = self._end
            while self._at < self._end:
                line_end = self._text.find("\n", self._at, self._end)
                line_end = self._end if line_end < 0 else line_end
                line = self._text[self._at : line_end]
                if (line.lstrip("\t") if dash else line) == ending:
                    end = self._at
                    self._at = min(line_end + 1, self._end)
                    break
                self._at = min(line_end + 1, self._end)
            body = Word()
            if is_quoted:
                for found in MARKED.finditer(self._text, start, end):
                    self._script.places[found.start()] = ValueContext.QUOTED_HEREDOC
                    body.marks.append(found.start())
            else:
                _Reader(self._text, start, end, self._script, self._depth)._read_text(body, "", ValueContext.HEREDOC)
            command.input.append(body)

    # --- words --------------------------------------------------------------------------------------------

    def _read_word(self, around: ValueContext) -> Word | None:
        """Read a word. Returns None if it is the number of a descriptor, which belongs to the redirection behind it."""
        word = Word()
        start = self._at
        while self._at < self._end:
            char = self._text[self._at]
            if char in " \t\n;&|()":
                break
            if char in "<>":
                if not self._text.startswith(("<(", ">("), self._at):
                    if self._text[start : self._at].isdecimal():
                        self._number = self._text[start : self._at]
                        return None
                    break
                self._at += 2
                word.inside.append(self.read_list(")"))
            elif char == "'":
                word.is_quoted = True
                self._at += 1
                self._read_single(word, ValueContext.SINGLE)
            elif char == '"':
                word.is_quoted = True
                self._at += 1
                self._read_text(word, '"', ValueContext.DOUBLE)
            elif self._text.startswith("$'", self._at):
                word.is_quoted = True
                self._at += 2
                self._read_dollar_single(word)
            else:
                self._read_one(word, around)
        return word

    def _read_single(self, word: Word, place: ValueContext) -> None:
        end = self._text.find("'", self._at, self._end)
        end = self._end if end < 0 else end
        for found in MARKED.finditer(self._text, self._at, end):
            self._script.places[found.start()] = place
            word.marks.append(found.start())
        word.text += self._text[self._at : end]
        self._at = min(end + 1, self._end)

    def _read_dollar_single(self, word: Word) -> None:
        before, word.text = word.text, ""
        while self._at < self._end and self._text[self._at] != "'":
            start = self._at
            self._at += self._text[self._at] == "\\"
            if (found := MARKED.match(self._text, self._at)) is not None:
                self._found(found, word, ValueContext.DOLLAR_SINGLE)
            else:
                self._at += 1
                word.text += self._text[start : self._at]
        word.text = before + _ESCAPE.sub(_unescaped, word.text)
        self._at = min(self._at + 1, self._end)

    def _read_text(self, word: Word, closing: str, place: ValueContext) -> None:
        """Read text in double quotes, or the lines of a here-document."""
        while self._at < self._end:
            if closing and self._text[self._at] == closing:
                self._at += 1
                return
            self._read_one(word, place)

    def _read_one(self, word: Word, place: ValueContext) -> None:
        """Read one character, value or expansion."""
        text, at = self._text, self._at
        char = text[at]
        if (found := MARKED.match(text, at)) is not None:
            self._found(found, word, place)
        elif char == "\\":
            self._at += 1
            if (found := MARKED.match(text, self._at)) is not None:
                self._found(found, word, ValueContext.BACKSLASH)
            elif self._at < self._end:
                word.text += "" if text[self._at] == "\n" else text[self._at]
                self._at += 1
        elif text.startswith("$((", at):
            self._at += 3
            word.is_expanded = True
            word.text += "$"
            self._read_arithmetic("))", ValueContext.ARITHMETIC, word)
        elif text.startswith("$[", at):
            self._at += 2
            self._read_arithmetic("]", ValueContext.OLD_ARITHMETIC, word)
        elif text.startswith("$(", at):
            self._at += 2
            word.is_expanded = True
            word.text += "$"
            word.inside.append(self.read_list(")"))
        elif text.startswith("${", at):
            self._at += 2
            word.is_expanded = True
            self._read_brace(word)
        elif char == "`":
            word.is_expanded = True
            word.text += "$"
            self._read_backtick(word, place)
        else:
            word.is_expanded = word.is_expanded or char == "$"
            word.text += char
            self._at += 1

    def _found(self, found: re.Match[str], word: Word, place: ValueContext) -> None:
        self._script.places[found.start()] = place
        word.marks.append(found.start())
        word.text += found[0]
        self._at = found.end()

    def _read_backtick(self, word: Word, place: ValueContext) -> None:
        """Read up to the next backtick that no backslash stands before. What backslashes in it mean depends on where it
        is, and so does a quote in quotes: no value may stand there."""
        start = end = self._at + 1
        while end < self._end and self._text[end] != "`":
            end += 2 if self._text[end] == "\\" else 1
        end = min(end, self._end)
        inner = _Reader(self._text, start, end, self._script, self._depth)
        word.inside.append(inner.read_list("", ValueContext.BACKTICK))
        if place is not ValueContext.BARE or "\\" in self._text[start:end]:
            for found in MARKED.finditer(self._text, start, end):
                self._script.places[found.start()] = ValueContext.BACKTICK
        self._at = min(end + 1, self._end)

    def _read_brace(self, word: Word) -> None:
        """Read `${…}`: text in double quotes may stand in it where it is text and not computed."""
        self._go_deeper()
        is_computed = _COMPUTED.match(self._text, self._at, self._end) is not None
        assigns = _ASSIGNS.match(self._text, self._at, self._end)
        text, marks, inside = word.text, len(word.marks), len(word.inside)
        while self._at < self._end and self._text[self._at] != "}":
            char = self._text[self._at]
            if char == '"':
                self._at += 1
                self._read_text(word, '"', ValueContext.BRACE if is_computed else ValueContext.DOUBLE)
            elif char == "'":
                self._at += 1
                self._read_single(word, ValueContext.BRACE)
            else:
                self._read_one(word, ValueContext.BRACE)
        if assigns is not None:
            default = Word(marks=word.marks[marks:], inside=word.inside[inside:])
            self._script.defaults.append((assigns["name"], default))
        word.text = f"{text}${MARK_START * (len(word.marks) - marks)}"
        self._at = min(self._at + 1, self._end)
        self._depth -= 1

    def _read_arithmetic(self, closing: str, place: ValueContext, word: Word | None = None) -> None:
        """Read an arithmetic expression, in which quotes make no difference."""
        self._go_deeper()
        inside = Word()
        parens = 0
        while self._at < self._end:
            char = self._text[self._at]
            if not parens and self._text.startswith(closing, self._at):
                self._at += len(closing)
                break
            if char in "()":
                parens = max(0, parens + (1 if char == "(" else -1))
                self._at += 1
            else:
                self._read_one(inside, place)
        self._depth -= 1
        self._script.computed += inside.inside
        if word is not None:
            word.inside += inside.inside
