"""A reader of shell commands: the quoting around each value, and the words of each simple command.

It follows POSIX and bash together, so a finding holds for either. Nothing is run or expanded.

AGENTS.md: a value in a command is data, or it is refused.
"""

from __future__ import annotations

import re
from enum import StrEnum

from ...core.value_types import field, record

DEPTH_LIMIT = 50  # commands inside commands. Each level takes a frame of the stack

MARK_START = "\ue000"
MARKED = re.compile("\ue000(\\d+)\ue001")
# `${x:1}`, `${x[1]}` and `${!x}` are arithmetic. Other expansions hold text.
_COMPUTED = re.compile(r"!|[#]?(?:[A-Za-z_]\w*|[\d@*#?$!-])?(?:\[|:(?![-+=?]))")
_ASSIGNS = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\[[^]]*\])?:?=")
_TO_SINGLE_QUOTE = re.compile(r"(?:[^'\\]|\\.)*", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([\da-fA-F]{1,2})|u([\da-fA-F]{1,4})|U([\da-fA-F]{1,8})|([0-7]{1,3})|(.))", re.DOTALL)
_BLANK = " \t"
_PROCESS_SUBSTITUTION = ("<(", ">(")
_OPENING = {"{", "if", "while", "until", "for", "case", "select"}
_CLOSING = {"}", "fi", "done", "esac"}
_BETWEEN = {"then", "else", "elif", "do", "!", "time"}
_KEPT = {"for", "case", "select", "function"}  # words of the grammar that are kept as first words


class ValueContext(StrEnum):
    """The quoting around a value. In a context named "in …" or "behind …" no variable is replaced by plain data."""

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
    """Commands nested deeper than DEPTH_LIMIT."""


@record
class Word:
    text: str = ""  # without its quotes. An expansion in braces or parentheses is `$`
    marks: list[int] = field(default_factory=list)  # positions of its values
    inside: list[tuple[int, int]] = field(default_factory=list)  # first and last command of each substitution
    is_quoted: bool = False
    is_expanded: bool = False  # the shell expands a variable or the output of a command in it
    made: list[int] = field(default_factory=list)  # positions of the values in its substitutions

    @property
    def values(self) -> list[int]:
        return [*self.marks, *self.made]

    @property
    def is_open(self) -> bool:
        """A value begins the word, which may be an option, an assignment or a name."""
        return self.text[:1] in (MARK_START, "$", "{") and bool(self.values)


@record
class SimpleCommand:
    words: list[Word] = field(default_factory=list)
    input: list[Word] = field(default_factory=list)  # here-strings, the text of here-documents, and the targets of `<`
    has_input: bool = False  # a redirection of its own feeds its standard input
    piped_from: int | None = None  # the first of the commands whose output it reads


@record
class Script:
    """The commands of a text. Those in a substitution follow the command that contains it."""

    places: dict[int, ValueContext] = field(default_factory=dict)
    commands: list[SimpleCommand] = field(default_factory=list)
    computed: list[tuple[int, int]] = field(default_factory=list)  # the commands whose output is read as arithmetic
    arrays: list[tuple[str, int, int]] = field(default_factory=list)
    """Variables assigned `( … )`, with the range of their items, which are read as commands."""
    defaults: list[tuple[str, Word]] = field(default_factory=list)
    """Variables that `${x=…}` and `${x:=…}` assign, with the default."""

    def values_between(self, ranges: list[tuple[int, int]]) -> list[int]:
        commands = [command for start, end in ranges for command in self.commands[start:end]]
        return [mark for each in commands for word in (*each.words, *each.input) for mark in word.marks]


def read_script(text: str) -> Script:
    """Read text as well as possible, even if no shell accepts it. Raises TooDeep."""
    script = Script()
    _ScriptReader(text, 0, len(text), script, 0).read_list("")
    for word in (word for command in script.commands for word in (*command.words, *command.input)):
        word.made = script.values_between(word.inside)
    return script


def _unescape(found: re.Match[str]) -> str:
    """Return the character of an escape in `$'…'`; a blank if it is not printed."""
    *hexadecimal, octal, char = found.groups()
    if char is not None:
        return " " if char.isalnum() else str(char)
    code = int(octal, 8) if octal else int(next(filter(None, hexadecimal)), 16)
    return written if (written := chr(code % 0x110000)).isprintable() else " "


def _is_command_next(words: list[Word], word: str) -> bool:
    """Return whether a word of the grammar may follow, as in `function f {` and `for x do`."""
    first = words[0].text if words else ""
    is_named = first == "function" or (first == "coproc" and len(words) < 3)
    return not words or (word in _OPENING and is_named) or (word == "do" and first in ("for", "select"))


class _ScriptReader:
    """A reader of text[at:end]. Here-documents and backticks have their own."""

    def __init__(self, text: str, at: int, end: int, script: Script, depth: int) -> None:
        self._text = text
        self._at = at
        self._end = end
        self._script = script
        self._depth = depth
        # Here-documents after the next end of line: ending word, whether quoted, whether `<<-`, command.
        self._awaited: list[tuple[str, bool, bool, SimpleCommand]] = []

    def _sees(self, *texts: str) -> bool:
        return self._text.startswith(texts, self._at)

    def _go_deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise TooDeep(f"commands inside commands, more than {DEPTH_LIMIT} deep")

    def _mark_all(self, start: int, end: int, place: ValueContext) -> list[int]:
        """Note the place of every value in a range, and return their positions."""
        marks = [found.start() for found in MARKED.finditer(self._text, start, end)]
        self._script.places.update(dict.fromkeys(marks, place))
        return marks

    def _find(self, text: str) -> int:
        found = self._text.find(text, self._at, self._end)
        return self._end if found < 0 else found

    def _pass(self, end: int) -> None:
        self._at = min(end + 1, self._end)

    def read_list(self, closing: str, around: ValueContext = ValueContext.BARE) -> tuple[int, int]:
        """Read commands up to `closing`: `)` or the end. Returns the range of their numbers."""
        self._go_deeper()
        commands = self._script.commands
        first = pipeline = len(commands)
        groups: list[int] = []
        cases = 0
        is_branch = False
        command = SimpleCommand()
        commands.append(command)
        while self._at < self._end:
            char = self._text[self._at]
            if char == closing and not (closing == ")" and cases):
                self._at += 1
                break
            if char in _BLANK:
                self._at += 1
            elif self._sees("\\\n"):
                self._at += 2
            elif char == "#":
                end = self._find("\n")
                self._mark_all(self._at, end, ValueContext.COMMENT)
                self._at = end
            elif self._sees("&>"):
                self._at += 1
                self._read_redirection(command, around)
            elif char in "\n;&|)":
                if char == ")" and cases:
                    self._forget_pattern(pipeline)
                is_branch = self._sees(";;", ";&") or (is_branch and char == "\n")
                is_pipe = self._read_operator(char)
                command = SimpleCommand(piped_from=pipeline if is_pipe else None)
                commands.append(command)
                if not is_pipe:
                    pipeline = len(commands) - 1
            elif self._sees("((") and (not command.words or command.words[-1].text == "for"):
                self._at += 2
                self._read_arithmetic("))", ValueContext.ARITHMETIC)
            elif char == "(":
                is_pattern = command.words[0].text == "case" if command.words else is_branch
                is_branch = False
                if self._read_parentheses(command, around, is_pattern):
                    command = SimpleCommand()
                    commands.append(command)
            elif char in "<>" and not self._sees(*_PROCESS_SUBSTITUTION):
                self._read_redirection(command, around)
            else:
                word = self._read_word(around)
                if word is None:
                    continue
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
                if name in _KEPT or name not in _OPENING | _CLOSING | _BETWEEN:
                    command.words.append(word)
                elif name not in _CLOSING:
                    command = SimpleCommand(piped_from=command.piped_from)
                    commands.append(command)
                    pipeline = len(commands) - 1
        self._depth -= 1
        return first, len(commands)

    def _read_parentheses(self, command: SimpleCommand, around: ValueContext, is_pattern: bool) -> bool:
        """Read a subshell, an array, `()` of a function or a pattern. Returns whether a new command follows."""
        self._at += 1
        last = command.words[-1].text if command.words else ""
        is_array = last.endswith("=")
        is_function = self._sees(")") and len(command.words) in (1, 2) and not is_array
        inside = self.read_list(")", around)
        if is_pattern:
            self._forget_pattern(inside[0])
        if is_array:
            self._script.arrays.append((last.rstrip("+="), *inside))
        return is_function or is_pattern

    def _forget_pattern(self, first: int) -> None:
        """Remove the words that are a pattern of `case`."""
        inner: list[tuple[int, int]] = []
        for number, command in enumerate(self._script.commands[first:], first):
            if not any(start <= number < end for start, end in inner):
                inner += [each for word in command.words for each in word.inside]
                if command.words and command.words[0].text != "case":
                    command.words = []

    def _read_operator(self, char: str) -> bool:
        """Read an operator. Returns whether it is a pipe."""
        if char == "\n":
            self._at += 1
            self._read_heredocs()
        elif self._sees("&&", "||", ";;"):
            self._at += 2
            return False
        else:
            self._at += 2 if self._sees("|&") else 1
        return char == "|"

    def _read_test(self, command: SimpleCommand, around: ValueContext) -> None:
        while self._at < self._end:
            char = self._text[self._at]
            if char in " \t\n":
                self._at += 1
            elif char in "&|();<>" and not self._sees(*_PROCESS_SUBSTITUTION):
                self._at += 1
                command.words.append(Word(char))
            elif (word := self._read_word(around)) is not None:
                command.words.append(word)
                if word.text == "]]" and not word.is_quoted:
                    return

    def _read_redirection(self, command: SimpleCommand, around: ValueContext) -> None:
        text = self._text
        before = text[self._at - 1 : self._at]
        is_standard = not before.isdecimal() and before != "}"
        if self._sees("<<") and is_standard:
            command.has_input = True
        if self._sees("<<<"):
            self._at += 3
            command.input.append(self._read_target(around))
        elif self._sees("<<"):
            self._at += 2
            dash = self._sees("-")
            self._at += dash
            start = self._at
            word = self._read_target(around)
            self._script.places.update(dict.fromkeys(word.marks, ValueContext.HEREDOC_WORD))
            is_quoted = word.is_quoted or "\\" in text[start : self._at]
            self._awaited.append((word.text, is_quoted, dash, command))
        else:
            reads, is_copy = self._sees("<"), self._sees("<&")
            while self._at < self._end and text[self._at] in "<>&|" and not self._sees(*_PROCESS_SUBSTITUTION):
                self._at += 1
            target = self._read_target(around)
            if reads and is_standard:
                command.has_input = not is_copy  # `<&3` reads a descriptor that was opened before
            if reads:
                # A file that a value names is not the value.
                command.input.append(Word(inside=target.inside))

    def _read_target(self, around: ValueContext) -> Word:
        while self._at < self._end and self._text[self._at] in _BLANK:
            self._at += 1
        return self._read_word(around) or Word()

    def _read_heredocs(self) -> None:
        awaited, self._awaited = self._awaited, []
        for ending, is_quoted, dash, command in awaited:
            start = self._at
            end = self._end
            while self._at < self._end:
                line_end = self._find("\n")
                line = self._text[self._at : line_end]
                is_last = (line.lstrip("\t") if dash else line) == ending
                end = self._at if is_last else self._end
                self._pass(line_end)
                if is_last:
                    break
            body = Word()
            if is_quoted:
                body.marks += self._mark_all(start, end, ValueContext.QUOTED_HEREDOC)
            else:
                inner = _ScriptReader(self._text, start, end, self._script, self._depth)
                inner._read_text(body, "", ValueContext.HEREDOC)
            command.input.append(body)

    def _read_word(self, around: ValueContext) -> Word | None:
        """Read a word. Returns None for a descriptor's number, which belongs to the redirection behind it."""
        word = Word()
        start = self._at
        while self._at < self._end:
            char = self._text[self._at]
            if char in " \t\n;&|()":
                break
            if self._sees(*_PROCESS_SUBSTITUTION):
                self._at += 2
                word.inside.append(self.read_list(")"))
            elif char in "<>":
                if self._text[start : self._at].isdecimal():
                    return None
                break
            elif char in "'\"" or self._sees("$'"):
                word.is_quoted = True
                self._read_quotes(word)
            else:
                self._read_one(word, around)
        return word

    def _read_quotes(self, word: Word) -> None:
        if self._sees("'"):
            self._at += 1
            self._read_single(word, ValueContext.SINGLE)
        elif self._sees('"'):
            self._at += 1
            self._read_text(word, '"', ValueContext.DOUBLE)
        else:
            found = _TO_SINGLE_QUOTE.match(self._text, self._at + 2, self._end)
            written = "" if found is None else found[0]
            end = self._at + 2 + len(written)
            word.marks += self._mark_all(self._at, end, ValueContext.DOLLAR_SINGLE)
            word.text += _ESCAPE.sub(_unescape, written)
            self._pass(end)

    def _read_single(self, word: Word, place: ValueContext) -> None:
        end = self._find("'")
        word.marks += self._mark_all(self._at, end, place)
        word.text += self._text[self._at : end]
        self._pass(end)

    def _read_text(self, word: Word, closing: str, place: ValueContext) -> None:
        """Read text in double quotes, or the lines of a here-document."""
        while self._at < self._end:
            if closing and self._sees(closing):
                self._at += 1
                return
            self._read_one(word, place)

    def _read_one(self, word: Word, place: ValueContext) -> None:
        char = self._text[self._at]
        if char == "\\":
            self._at += 1
            if not self._read_mark(word, ValueContext.BACKSLASH) and self._at < self._end:
                word.text += "" if self._sees("\n") else self._text[self._at]
                self._at += 1
        elif self._sees("$[", "$((", "$(", "${") or char == "`":
            self._read_expansion(word, place)
        elif not self._read_mark(word, place):
            word.is_expanded = word.is_expanded or char == "$"
            word.text += char
            self._at += 1

    def _read_mark(self, word: Word, place: ValueContext) -> bool:
        if (found := MARKED.match(self._text, self._at)) is None:
            return False
        self._script.places[self._at] = place
        word.marks.append(self._at)
        word.text += found[0]
        self._at = found.end()
        return True

    def _read_expansion(self, word: Word, place: ValueContext) -> None:
        if self._sees("$["):
            self._at += 2
            word.inside += self._read_arithmetic("]", ValueContext.OLD_ARITHMETIC)
            return
        word.is_expanded = True
        if self._sees("${"):
            self._at += 2
            self._read_brace(word)
            return
        word.text += "$"
        if self._sees("$(("):
            self._at += 3
            word.inside += self._read_arithmetic("))", ValueContext.ARITHMETIC)
        elif self._sees("$("):
            self._at += 2
            word.inside.append(self.read_list(")"))
        else:
            self._read_backtick(word, place)

    def _read_backtick(self, word: Word, place: ValueContext) -> None:
        """Read up to an unescaped backtick. No value is accepted: backslashes and quotes depend on where it is."""
        start = end = self._at + 1
        while end < self._end and self._text[end] != "`":
            end += 2 if self._text[end] == "\\" else 1
        end = min(end, self._end)
        inner = _ScriptReader(self._text, start, end, self._script, self._depth)
        word.inside.append(inner.read_list("", ValueContext.BACKTICK))
        if place is not ValueContext.BARE or "\\" in self._text[start:end]:
            self._mark_all(start, end, ValueContext.BACKTICK)
        self._pass(end)

    def _read_brace(self, word: Word) -> None:
        """Read `${…}`. A value is accepted in double quotes, unless the expansion is arithmetic."""
        self._go_deeper()
        is_computed = _COMPUTED.match(self._text, self._at, self._end) is not None
        assigns = _ASSIGNS.match(self._text, self._at, self._end)
        text, marks, inside = word.text, len(word.marks), len(word.inside)
        while self._at < self._end and not self._sees("}"):
            if self._sees('"'):
                self._at += 1
                self._read_text(word, '"', ValueContext.BRACE if is_computed else ValueContext.DOUBLE)
            elif self._sees("'"):
                self._at += 1
                self._read_single(word, ValueContext.BRACE)
            else:
                self._read_one(word, ValueContext.BRACE)
        if assigns is not None:
            self._script.defaults.append((assigns["name"], Word(marks=word.marks[marks:], inside=word.inside[inside:])))
        word.text = f"{text}${MARK_START * (len(word.marks) - marks)}"
        self._pass(self._at)
        self._depth -= 1

    def _read_arithmetic(self, closing: str, place: ValueContext) -> list[tuple[int, int]]:
        """Read arithmetic, in which quotes make no difference. Returns its substitutions."""
        self._go_deeper()
        expression = Word()
        parens = 0
        while self._at < self._end:
            if not parens and self._sees(closing):
                self._at += len(closing)
                break
            if (char := self._text[self._at]) in "()":
                parens = max(0, parens + (1 if char == "(" else -1))
                self._at += 1
            else:
                self._read_one(expression, place)
        self._depth -= 1
        self._script.computed += expression.inside
        return expression.inside
