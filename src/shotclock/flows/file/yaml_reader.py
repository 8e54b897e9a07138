"""The reader of YAML: plain values, the position of every key, and all mistakes together.

It uses ruamel's events: its trees turn dates into objects, drop tags, lose the positions of merged keys and stop at the
first duplicate key. The language is YAML 1.2 (core schema): `yes` and `on` are text, `010` is ten, a date is text.
Merge keys (`<<`), which 1.2 left out, are read, because people use them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from ruamel.yaml.reader import ReaderError

from ...core.value_types import JsonObject, field, record, value

# Aliases can unfold a small file into a huge one, in values and in their length.
NODE_LIMIT, TEXT_LIMIT = 200_000, 8_000_000
DEPTH_LIMIT = 100  # later readers recurse
DIGITS_LIMIT = 400  # Python itself refuses very long numbers
SHOWN_LIMIT = 60

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+", re.ASCII)
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(
    r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)", re.ASCII
)


class SourcePosition(NamedTuple):
    """Lines and columns count from 1, in characters."""

    line: int = 1
    column: int = 1


TOP = SourcePosition()


@value
class YamlFlaw:
    rule: str
    message: str
    place: SourcePosition = TOP
    suggestion: str | None = None


@record
class Spot:
    place: SourcePosition = TOP
    inside: dict[str | int, Spot] = field(default_factory=dict)


@value
class Tree:
    value: Any
    spots: Spot
    flaws: tuple[YamlFlaw, ...] = ()
    is_whole: bool = True  # if not, `value` is None


def read_tree(text: str) -> Tree:
    reading = _TreeBuilder()
    try:
        value, spot = reading.document(text)
        return Tree(value, spot, tuple(reading.flaws))
    except _Unreadable as unreadable:
        flaw = unreadable.flaw
    except ReaderError as error:
        what = f"is not YAML: the character #x{error.character:04x} is not allowed in it"
        flaw = YamlFlaw("file/syntax", what, _place_at(text, error.position))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = TOP if mark is None else SourcePosition(mark.line + 1, mark.column + 1)
        why = " ".join(str(part) for part in (error.context, error.problem) if part)
        flaw = YamlFlaw("file/syntax", f"is not YAML: {why.partition(chr(10))[0][:200]}", place)
    except (YAMLError, ValueError, RecursionError, AssertionError) as error:  # the last for `%YAML 1.3`
        flaw = YamlFlaw("file/syntax", f"is not YAML: {str(error).partition(chr(10))[0][:200]}")
    return Tree(None, Spot(), (*reading.flaws, flaw), is_whole=False)


def quote(text: object) -> str:
    """Return text of the file in one line, without control characters."""
    whole = text if isinstance(text, str) else str(text)
    return repr(whole) if len(whole) <= SHOWN_LIMIT else f"{whole[:SHOWN_LIMIT]!r}…"


def _height_of(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + _height_of(each) for each in inside), default=0)


class _Unreadable(Exception):
    def __init__(self, flaw: YamlFlaw) -> None:
        super().__init__(flaw.message)
        self.flaw = flaw


@record
class _Anchored:
    value: Any
    spot: Spot
    size: int
    length: int  # of all texts in it together
    text: str | None  # as written, if it can be a key


class _TreeBuilder:
    def __init__(self) -> None:
        self.flaws: list[YamlFlaw] = []
        self._anchors: dict[str, _Anchored | None] = {}  # None while it is being read
        self._count = self._length = 0
        self._events: Iterator[Any] = iter(())

    def document(self, text: str) -> tuple[Any, Spot]:
        self._events = YAML(typ="safe", pure=True).parse(text)
        value, spot = None, Spot()
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                value, spot = self._node(next(self._events), 0)
                break
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                raise _Unreadable(YamlFlaw("file/documents", "holds more than one document", _place_of(event)))
            if isinstance(event, StreamEndEvent):
                break
        return value, spot

    def _node(self, event: Any, depth: int) -> tuple[Any, Spot]:
        meant = self._meant(event) if isinstance(event, AliasEvent) else None
        if depth + (0 if meant is None else _height_of(meant.value)) > DEPTH_LIMIT:
            raise _Unreadable(YamlFlaw("file/depth", f"is nested deeper than {DEPTH_LIMIT} levels", _place_of(event)))
        if meant is not None:
            self._grow(event, meant.size, meant.length)
            return meant.value, Spot(_place_of(event), meant.spot.inside)
        count, length = self._count, self._length
        self._grow(event, 1, len(event.value) if isinstance(event, ScalarEvent) else 0)
        name, text = event.anchor, None
        if name is not None:
            self._anchors[name] = None
        if isinstance(event, ScalarEvent):
            value, spot, text = self._scalar(event), Spot(_place_of(event)), event.value
        elif isinstance(event, SequenceStartEvent):
            value, spot = self._sequence(event, depth)
        else:
            value, spot = self._mapping(event, depth)
        if name is not None:
            self._anchors[name] = _Anchored(value, spot, self._count - count, self._length - length, text)
        return value, spot

    def _meant(self, event: Any) -> _Anchored:
        if event.anchor not in self._anchors:
            what = f"the alias {quote('*' + event.anchor)} does not name anything above it"
            raise _Unreadable(YamlFlaw("file/alias", what, _place_of(event)))
        meant = self._anchors[event.anchor]
        if meant is None:
            what = f"the alias {quote('*' + event.anchor)} is used inside what it names"
            raise _Unreadable(YamlFlaw("file/alias", what, _place_of(event)))
        return meant

    def _grow(self, event: Any, size: int, length: int) -> None:
        self._count += size
        self._length += length
        if self._count > NODE_LIMIT or self._length > TEXT_LIMIT:
            most = f"{NODE_LIMIT} values" if self._count > NODE_LIMIT else f"{TEXT_LIMIT} characters"
            raise _Unreadable(YamlFlaw("file/size", f"unfolds into more than {most}", _place_of(event)))

    def _sequence(self, event: Any, depth: int) -> tuple[list[Any], Spot]:
        self._check_tag(event)
        items: list[Any] = []
        spot = Spot(_place_of(event))
        for inner in self._events:
            if isinstance(inner, SequenceEndEvent):
                break
            spot_of_item = Spot(_place_of(inner))
            value, below = self._node(inner, depth + 1)
            spot_of_item.inside = below.inside
            spot.inside[len(items)] = spot_of_item
            items.append(value)
        return items, spot

    def _mapping(self, event: Any, depth: int) -> tuple[JsonObject, Spot]:
        self._check_tag(event)
        own: JsonObject = {}
        spot = Spot(_place_of(event))
        merged: list[tuple[Any, Spot]] = []
        for inner in self._events:
            if isinstance(inner, MappingEndEvent):
                break
            place = _place_of(inner)
            is_merge = isinstance(inner, ScalarEvent) and inner.value == "<<" and inner.implicit[0]
            key = self._key(inner, depth)
            value, below = self._node(next(self._events), depth + 1)
            if is_merge:
                merged += self._to_merge(value, below, place)
            elif key in own:
                what = f"the key {quote(key)} is written twice, first in line {spot.inside[key].place.line}"
                self.flaws.append(YamlFlaw("file/duplicate-key", what, place, "remove or rename one of them"))
            elif key is not None:
                own[key], spot.inside[key] = value, Spot(place, below.inside)
        for value, below in merged:
            for key, item in value.items():
                if key not in own:
                    own[key], spot.inside[key] = item, below.inside[key]
        return own, spot

    def _to_merge(self, value: Any, spot: Spot, place: SourcePosition) -> list[tuple[Any, Spot]]:
        if isinstance(value, dict):
            return [(value, spot)]
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            return [(item, spot.inside[number]) for number, item in enumerate(value)]
        self.flaws.append(YamlFlaw("file/merge", "`<<` takes a mapping, or a list of mappings", place))
        return []

    def _key(self, event: Any, depth: int) -> str | None:
        """Return a key as written: `1:` and `"1":` are the same, as in JSON."""
        if isinstance(event, AliasEvent):
            text = self._meant(event).text
        elif isinstance(event, ScalarEvent):
            self._node(event, depth + 1)
            text = None if event.implicit[0] and event.value in _NULL else event.value
        else:
            self._node(event, depth + 1)
            text = None
        if text is None:
            self._add_flaw(event, "file/key", "a key must be text", "put it in quotes")
        return text

    def _scalar(self, event: Any) -> Any:
        if event.tag in (None, "!"):
            return self._resolve_scalar(event, event.value) if event.implicit[0] else event.value
        if event.tag != "tag:yaml.org,2002:str":
            self._check_tag(event)
        return event.value

    def _resolve_scalar(self, event: Any, text: str) -> Any:
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if text[0] not in "+-.0123456789":
            return text
        if _BASED.fullmatch(text) or _INT.fullmatch(text):
            if len(text) > DIGITS_LIMIT:
                self._add_flaw(event, "file/number", f"a number of {len(text)} digits: put it in quotes")
                return 0
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if _FLOAT.fullmatch(text):
            number = math.inf if text[-1] in "fFnN" else float(text)
            if math.isfinite(number):
                return number
            self._add_flaw(event, "file/number", f"{quote(text)} cannot be used as a number")
            return 0
        return text

    def _add_flaw(self, event: Any, rule: str, message: str, suggestion: str | None = None) -> None:
        self.flaws.append(YamlFlaw(rule, message, _place_of(event), suggestion))

    def _check_tag(self, event: Any) -> None:
        if event.tag not in (None, "!"):
            tag = quote(str(event.tag).replace("tag:yaml.org,2002:", "!!"))
            self._add_flaw(event, "file/tag", f"the tag {tag} is not known here; there is only !!str")


def _place_of(event: Any) -> SourcePosition:
    return SourcePosition(event.start_mark.line + 1, event.start_mark.column + 1)


def _place_at(text: str, position: int) -> SourcePosition:
    before = text[:position].replace("\r\n", "\n").replace("\r", "\n")
    return SourcePosition(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
