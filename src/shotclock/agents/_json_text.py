"""Changes to the text of a JSON file that leave every other character as it is, comments and trailing commas too.

Places are found in a text with blanks for these, with all else in place. A path is a sequence of keys and indexes.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from ..core.value_types import JsonObject, value

KeyPath = tuple[str | int, ...]

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_USUAL_INDENT = "  "
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\r\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)
_REST_OF_LINE = re.compile(r"[ \t]*//[^\r\n]*")
_END_OF_LIST = re.compile(r"\s*,")
_BETWEEN_MEMBERS = re.compile(r"[\s,]*")
_VISIBLE = re.compile(r"[^\r\n]")


@value
class TextItem:
    """A member of an object or an element of a list: its place in the text."""

    key: str | int
    start: int
    value_start: int
    end: int


def blank_comments(text: str) -> str:
    """Return the text with spaces in place of comments, commas before a closing bracket, and a byte order mark.

    Every other character keeps its place, so that places in this text are places in the original.
    """
    return _blank_last_commas(without_comments(f" {text[1:]}" if text.startswith("\ufeff") else text))


def without_comments(text: str) -> str:
    """Return the text with spaces in place of comments alone."""
    # Mostly there are none, and it is much faster: Claude Code's file may have megabytes.
    return text if _is_json(text) else _COMMENT.sub(_blank, text)


def _blank_last_commas(text: str) -> str:
    return text if _is_json(text) else _LAST_COMMA.sub(_blank, text)


def _blank(match: re.Match[str]) -> str:
    return match[0] if match[0][0] == '"' else _VISIBLE.sub(" ", match[0])


def with_object(text: str | None, fresh: str) -> str:
    """Return the text, or a fresh one where it holds no value. Comments and a byte order mark stay."""
    if text is None or not text.strip():
        return fresh
    return text if blank_comments(text).strip() else f"{text}\n{fresh}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _read_members(members: list[tuple[str, Any]]) -> JsonObject:
    content: JsonObject = {}
    for name, item in members:
        if name in content:
            raise ValueError(f"it has {name!r} twice in one object, and programs differ in the one that counts")
        content[name] = item
    return content


def list_items(text: str, at: int) -> list[TextItem]:
    """Return the items of the object or list that begins at this place of a valid text."""
    is_object = text[at] == "{"
    found: list[TextItem] = []
    at = _skip(text, at + 1)
    while text[at] not in "}]":
        start, key = at, cast("str | int", len(found))
        if is_object:
            key, at = _DECODER.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        value_start = at
        at = _DECODER.raw_decode(text, at)[1]
        found.append(TextItem(key, start, value_start, at))
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def put(text: str, path: KeyPath, content: object) -> str:
    """Return the text with this value at the path. Missing objects and lists on the way are made.

    An index right after the last element of a list appends to it. Raises ValueError where something else is in the way.
    """
    plain = blank_comments(text)
    at = _skip(plain, 0)
    for depth, key in enumerate(path):
        if plain[at] != ("{" if isinstance(key, str) else "["):
            place = ".".join(map(str, path[:depth])) or "the file"
            raise ValueError(f"{place} should be {'an object' if isinstance(key, str) else 'a list'}")
        items = list_items(plain, at)
        item = _find(items, key)
        if item is None:
            for missing in reversed(path[depth + 1 :]):
                content = {missing: content} if isinstance(missing, str) else [content]
            return _append(text, plain, at, items, key, content)
        at = item.value_start
    end = _DECODER.raw_decode(plain, at)[1]
    return text[:at] + _indented(content, _unit(plain), _line_indent(text, at)) + text[end:]


def drop(text: str, path: KeyPath) -> str:
    """Return the text without the value at the path, and without the objects and lists that become empty.

    Comments around it stay.
    """
    plain = blank_comments(text)
    at, above = _skip(plain, 0), []
    for key in path:
        items = list_items(plain, at)
        item = _find(items, key)
        if item is None:
            return text
        above.append((at, items, item))
        at = item.value_start
    while len(above) > 1 and len(above[-1][1]) == 1 and not _around(text, plain, *above[-1]):
        above.pop()
    at, items, item = above[-1]
    place = items.index(item)
    if place + 1 < len(items):
        following = items[place + 1].start
        return text[: item.start] + _without_comma(text, item.end, following).lstrip() + text[following:]
    close = _skip(plain, item.end)
    if not place:
        return text[: at + 1] + _around(text, plain, *above[-1]) + text[close:]
    before, after = items[place - 1].end, _without_comma(text, item.end, close)
    kept = _without_comma(text, before, item.start).rstrip()
    is_open = kept and not after.lstrip(" \t").startswith(("\r", "\n"))  # the rest would be part of the comment
    return text[:before] + kept + ("\n" if is_open else "") + after + text[close:]


def _around(text: str, plain: str, at: int, items: list[TextItem], item: TextItem) -> str:
    """Return the comments, or nothing, in an object or list around its only item."""
    around = text[at + 1 : item.start] + _without_comma(text, item.end, _skip(plain, item.end))
    return around if around.strip() else ""


def _find_comma(text: str, start: int, end: int) -> int:
    """Return the place of the comma between two items, or behind the last one; -1 if there is none."""
    return without_comments(text).find(",", start, end)


def _without_comma(text: str, start: int, end: int) -> str:
    comma = _find_comma(text, start, end)
    return text[start:end] if comma < 0 else text[start:comma] + text[comma + 1 : end]


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _find(items: list[TextItem], key: str | int) -> TextItem | None:
    """Return the item of this key; of two with one key the last counts, as for every reader of JSON."""
    return next((item for item in reversed(items) if item.key == key), None)


def _append(text: str, plain: str, at: int, items: list[TextItem], key: str | int, content: object) -> str:
    label = f"{json.dumps(key, ensure_ascii=False)}: " if text[at] == "{" else ""
    if not items:
        outer, close = _line_indent(text, at), _skip(plain, at + 1)
        inner, kept = outer + _unit(plain), text[at + 1 : close]
        kept = kept if kept.strip() else f"\n{outer}"
        rendered = _indented(content, _unit(plain), inner)
        return f"{text[: at + 1]}\n{inner}{label}{rendered}{kept}{text[close:]}"
    end = items[-1].end
    comma = _find_comma(text, end, _skip(plain, end))
    text = text if comma >= 0 else f"{text[:end]},{text[end:]}"
    place = (end if comma < 0 else comma) + 1
    indent = _indent_before(text, items[-1].start)
    if indent is None:
        return f"{text[:place]} {label}{json.dumps(content, ensure_ascii=False)}{text[place:]}"
    rest = _REST_OF_LINE.match(text, place)  # a comment on the line belongs to the item before
    place = place if rest is None else rest.end()
    rendered = _indented(content, _unit(plain), _line_indent(text, items[-1].start))
    return f"{text[:place]}\n{indent}{label}{rendered}{text[place:]}"


def _indented(content: object, unit: str, indent: str) -> str:
    return json.dumps(content, ensure_ascii=False, indent=unit).replace("\n", f"\n{indent}")


def _indent_before(text: str, at: int) -> str | None:
    """Return the white space between the start of the line and this place. None: something else is there."""
    before = text[text.rfind("\n", 0, at) + 1 : at]
    return before if "\n" in text[:at] and not before.strip() else None


def _line_indent(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]


def _unit(text: str) -> str:
    """Return one step of the indentation of this file."""
    match = re.search(r"\{[ \t]*\r?\n([ \t]+)", text)
    return match[1] if match is not None else _USUAL_INDENT


def wrap(text: str, path: KeyPath, program: str, words: list[str], count: int) -> str:
    place, written = _members(text, path)["command"], ", ".join(map(_quoted, words))
    if count:
        items = _arguments(text, path)
        text = text[: items[0].start] + written + text[items[count - 1].end :]
    else:
        text = _insert_words(text, path, f"{written}, {text[place.value_start : place.end]}")
    place = _members(text, path)["command"]
    return text[: place.value_start] + _quoted(program) + text[place.end :]


def unwrap(text: str, path: KeyPath, count: int, *, keeps_list: bool) -> str:
    moved, place = _arguments(text, path)[count], _members(text, path)["command"]
    text = text[: place.value_start] + text[moved.start : moved.end] + text[place.end :]
    members, items = _members(text, path), _arguments(text, path)
    start, after = items[0].start, members["command"].start
    if len(items) > count + 1:
        return text[:start] + text[items[count + 1].start :]
    if not keeps_list and _BETWEEN_MEMBERS.fullmatch(text, members["args"].end, after):  # as `wrap` writes it
        return text[: members["args"].start] + text[after:]
    comma = _END_OF_LIST.match(text, items[-1].end)
    return text[:start] + text[items[-1].end if comma is None else comma.end() :]


def _insert_words(text: str, path: KeyPath, words: str) -> str:
    end_of_line = "\r\n" if "\r\n" in text else "\n"
    members = _members(text, path)
    if "args" not in members:
        at = members["command"].start
        indent = _indent_before(text, at)
        return f'{text[:at]}"args": [{words}],{" " if indent is None else end_of_line + indent}{text[at:]}'
    at, after = members["args"].value_start + 1, ""
    if items := _arguments(text, path):
        at = items[0].start
        indent = _indent_before(text, at)
        after = ", " if indent is None else f",{end_of_line}{indent}"
    return f"{text[:at]}{words}{after}{text[at:]}"


def _members(text: str, path: KeyPath) -> dict[str | int, TextItem]:
    """Return the members of the object at a path by their names, as they are written. Raises LookupError."""
    plain = blank_comments(text)
    at = _skip(plain, 0)
    for key in path:
        if (item := _find(list_items(plain, at), key)) is None:
            raise LookupError(key)
        at = item.value_start
    return {item.key: item for item in list_items(plain, at) if plain.startswith(str(item.key), item.start + 1)}


def _arguments(text: str, path: KeyPath) -> list[TextItem]:
    return list_items(blank_comments(text), _members(text, path)["args"].value_start)


def _quoted(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)


@value
class JsonSyntax:
    """JSON as one program reads it."""

    reads_comments: bool = False
    reads_last_commas: bool = False
    reads_byte_order_mark: bool = False

    def parse(self, text: str) -> Any:
        """Return the value of a file, None of an empty one. Raises ValueError where the program does not read it."""
        text = text.removeprefix("\ufeff") if self.reads_byte_order_mark else text
        text = without_comments(text) if self.reads_comments else text
        text = _blank_last_commas(text) if self.reads_last_commas else text
        try:
            return json.loads(text, object_pairs_hook=_read_members) if text.strip() else None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    put = staticmethod(put)
    drop = staticmethod(drop)
    wrap = staticmethod(wrap)
    unwrap = staticmethod(unwrap)
