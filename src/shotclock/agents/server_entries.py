"""The words of `shotclock wrap` in the entry of a server: put in, changed, and taken out, in the text of a file.

The words come before the arguments, and the text of the command moves behind them as it is written. So the words can be
taken out again without a trace, also after other changes to the file.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from ..core.errors import Failure
from .json_text import Path, TextItem
from .mcp_clients import ConfigSyntax, ServerEntry

_END_OF_LIST = re.compile(r"\s*,")
_BETWEEN_MEMBERS = re.compile(r"[\s,]*")


def read_config(file: str, text: str, syntax: ConfigSyntax) -> Any:
    """Return the data of a file. Raises Failure with its mistake."""
    try:
        plain = syntax.blank_comments(text)
        data = syntax.parse(plain) if plain.strip() else {}
    except ValueError as error:
        raise Failure("CONFLICT", f"{file} was left as it is: {error}", suggestion="correct it first") from None
    if not isinstance(data, dict):
        raise Failure("CONFLICT", f"{file} was left as it is: it is not an object", suggestion="correct it first")
    return data


class ConfigEditor:
    """The text of a file while entries of servers are changed in it."""

    def __init__(self, file: str, text: str, syntax: ConfigSyntax) -> None:
        self.text: str = text
        self._file, self._syntax = file, syntax
        self._plain = syntax.blank_comments(text)
        """The text without comments, with everything in the same places."""
        self._expected = read_config(file, text, syntax)
        self._changed: list[tuple[str, ...]] = []

    def wrap(self, entry: ServerEntry, program: str, words: list[str]) -> None:
        """Put a program and its words before a server, or in place of those that are there."""
        count = entry.wrap_length
        behind = entry.command if count is None else entry.command[1 + count :]
        self._expect(entry, [program, *words, *behind])
        command = self._place(entry, "command")
        if count is None:
            self._insert_words(entry, command, [*map(_quoted, words), self._raw(command)])
        else:
            items = self._arguments(entry)
            self._replace(items[0].start, items[count - 1].end, ", ".join(map(_quoted, words)))
        command = self._place(entry, "command")
        self._replace(command.value_start, command.end, _quoted(program))

    def unwrap(self, entry: ServerEntry, *, had_args: bool) -> None:
        """Take the words out of an entry that has them. A list that becomes empty stays if the server `had_args`."""
        count = entry.wrap_length or 0
        self._expect(entry, entry.command[1 + count :])
        items = self._arguments(entry)
        raw = self._raw(items[count])
        command = self._place(entry, "command")
        self._replace(command.value_start, command.end, raw)
        items, command = self._arguments(entry), self._place(entry, "command")
        arguments = self._place(entry, "args")
        if len(items) > count + 1:
            self._replace(items[0].start, items[count + 1].start, "")
        elif not had_args and _BETWEEN_MEMBERS.fullmatch(
            self.text, arguments.end, command.start
        ):  # as `wrap` writes it
            self._replace(arguments.start, command.start, "")
        else:
            comma = _END_OF_LIST.match(self.text, items[-1].end)
            self._replace(items[0].start, items[-1].end if comma is None else comma.end(), "")

    def finish(self) -> str:
        """Return the new text. Raises Failure unless only the commands of the changed entries differ."""
        try:
            found = self._syntax.parse(self._syntax.blank_comments(self.text)) if self._changed else self._expected
            for path in self._changed:
                _inside(found, path).setdefault("args", [])
        except (ValueError, KeyError, TypeError):
            found = None
        if found != self._expected:
            raise self._not_editable(self._changed[-1])
        return self.text

    def _expect(self, entry: ServerEntry, command: list[str]) -> None:
        if not self._changed:
            self._expected = copy.deepcopy(self._expected)
        self._changed.append(entry.path)
        expected = _inside(self._expected, entry.path)
        expected["command"], expected["args"] = command[0], command[1:]

    def _insert_words(self, entry: ServerEntry, command: TextItem, quoted: list[str]) -> None:
        line_end = "\r\n" if "\r\n" in self.text else "\n"
        if "args" not in entry.content:
            label = self._plain[command.start : command.value_start]
            prefix, _, rest = label.rpartition("command")
            indent = _indent_before(self.text, command.start)
            comma = "," if ":" in rest or indent is None else ""  # lines of TOML have none
            after = " " if indent is None else f"{line_end}{indent}"
            self._replace(command.start, command.start, f"{prefix}args{rest}[{', '.join(quoted)}]{comma}{after}")
            return
        arguments, items = self._place(entry, "args"), self._arguments(entry)
        at, after = arguments.value_start + 1, ""
        if items:
            at = items[0].start
            indent = _indent_before(self.text, at)
            after = ", " if indent is None else f",{line_end}{indent}"
        self._replace(at, at, ", ".join(quoted) + after)

    def _place(self, entry: ServerEntry, key: str) -> TextItem:
        path: Path = (*entry.path, key)
        try:
            found = self._syntax.locate(self._plain, path)
        except (ValueError, IndexError):
            found = None
        if found is None:
            raise self._not_editable(entry.path)
        return found

    def _arguments(self, entry: ServerEntry) -> list[TextItem]:
        return self._syntax.list_items(self._plain, self._place(entry, "args").value_start)

    def _raw(self, item: TextItem) -> str:
        return self.text[item.value_start : item.end]

    def _replace(self, start: int, end: int, text: str) -> None:
        self.text = self.text[:start] + text + self.text[end:]
        self._plain = self._syntax.blank_comments(self.text)

    def _not_editable(self, path: tuple[str, ...]) -> Failure:
        message = f"{self._file} was left as it is: the entry of {path[-1]!r} cannot be changed in place"
        return Failure("CONFLICT", message, suggestion="leave the server out with --server, or write the entry by hand")


def _inside(data: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def _quoted(word: str) -> str:
    """Return a text in quotes that JSON and TOML read alike."""
    return json.dumps(word, ensure_ascii=False).replace("\x7f", "\\u007f")


def _indent_before(text: str, at: int) -> str | None:
    """Return the white space between the start of the line and this place. None: something else is there."""
    before = text[text.rfind("\n", 0, at) + 1 : at]
    before = before.removeprefix("\ufeff")
    return before if not before.strip() else None
