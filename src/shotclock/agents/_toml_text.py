"""Places of values in the text of a TOML file, so that a change can leave every other character as it is."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from .json_text import Path, TextItem

_SPACE = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")|' r"'''.*?'{3,5}(?!')|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'",
    re.DOTALL,
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\r\n]+")


def blank_comments(text: str) -> str:
    """Return the text with a space in place of a byte order mark. Comments stay: the parser knows them."""
    return f" {text[1:]}" if text.startswith("\ufeff") else text


def parse(text: str) -> dict[str, Any]:
    """Return the tables of a text. Raises ValueError with its mistake."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def locate(text: str, path: Path) -> TextItem | None:
    """Return the place of the value at a path of a valid text. None: there is none, or it is a table with a header."""
    found: dict[Path, TextItem] = {}
    table: Path = ()
    at = _skip(text, 0)
    while at < len(text):
        if text[at] == "[":
            is_list = text.startswith("[[", at)
            table, at = _read_key(text, at + 1 + is_list)
            table = (*table, at) if is_list else table  # tables of a list are never looked for
            at = text.index("]", at) + 1 + is_list
        else:
            at = _read_pair(text, at, table, found)
        at = _skip(text, at)
    return found.get(path)


def list_items(text: str, at: int) -> list[TextItem]:
    """Return the elements of the list that begins at this place of a valid text."""
    return _read_list(text, at)[0]


def _read_list(text: str, at: int) -> tuple[list[TextItem], int]:
    """Return the elements of a list, and the place after it."""
    found: list[TextItem] = []
    at = _skip(text, at + 1)
    while text[at] != "]":
        end = _end_of_value(text, at)
        found.append(TextItem(len(found), at, at, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found, at + 1


def _read_pair(text: str, start: int, table: Path, found: dict[Path, TextItem]) -> int:
    """Read a key and its value, and those inside an inline table. Returns the place after it."""
    key, at = _read_key(text, start)
    at = _end(_SPACE, text, text.index("=", at) + 1)
    path = (*table, *key)
    end = _read_table(text, at, path, found) if text[at] == "{" else _end_of_value(text, at)
    found[path] = TextItem(key[-1], start, at, end)
    return end


def _read_table(text: str, at: int, path: Path, found: dict[Path, TextItem]) -> int:
    at = _skip(text, at + 1)
    while text[at] != "}":
        at = _skip(text, _read_pair(text, at, path, found))
        if text[at] == ",":
            at = _skip(text, at + 1)
    return at + 1


def _read_key(text: str, at: int) -> tuple[Path, int]:
    """Return the parts of a dotted key, and the place after it."""
    parts: list[str] = []
    while True:
        at = _end(_SPACE, text, at)
        end = _end(_STRING if text[at] in "\"'" else _BARE_KEY, text, at)
        word = text[at:end]
        parts.append(tomllib.loads(f"key = {word}")["key"] if word[0] in "\"'" else word)
        at = _end(_SPACE, text, end)
        if text[at] != ".":
            return tuple(parts), at
        at += 1


def _end_of_value(text: str, at: int) -> int:
    if text[at] == "[":
        return _read_list(text, at)[1]
    if text[at] == "{":
        return _read_table(text, at, (), {})
    if text[at] in "\"'":
        return _end(_STRING, text, at)
    scalar = text[at : _end(_SCALAR, text, at)]
    return at + len(scalar.rstrip())


def _skip(text: str, at: int) -> int:
    return _end(_GAP, text, at)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    if match is None:
        raise ValueError(f"character {at} is not understood")
    return match.end()
