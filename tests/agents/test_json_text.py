"""Changes to JSON files with comments and trailing commas: only the one place changes, and the result is right."""

import json
from pathlib import Path
from typing import Any

import pytest

from shotclock.agents import _json_text as json_text
from shotclock.agents.config_editor import ConfigEditor
from shotclock.agents.known_agents import EDITOR_JSON

TEXTS = (
    '{"a": 1}',
    '{"a": 1,}',
    "{ // of the file\n}",
    "{}",
    "{ /* one */ }",
    '\ufeff{\n  "a": 1, // about a\n  // about b, with "quotes", {braces}\n  "b": [1, 2, ], // about b\n}\n',
    '{\r\n\t"a": 1 // about a\r\n\t/* at the\r\n\tend */\r\n}\r\n',
    '// first\n{\n  "a": "// no comment, /* nor */ this",\n  "t": {\n    // empty\n  }\n}\n// last',
    '{\n  "t": {"x": 1 /* about x */}, // about t\n\n  "l": [\n    {"y": 1}, // about y\n  ],\n}\n',
    '{"a": 1, // about a\n "b": 2}',
    '{\n  "a": 1 /* begins\n  and ends */\n}\n',
    '{\n  "a": 1 /* one */ , // two\n}\n',
)
PATHS: tuple[json_text.KeyPath, ...] = (
    ("a",),
    ("new",),
    ("t", "new"),
    ("t", "x"),
    ("l", 1),
    ("l", 0),
    ("b", 2),
    ("n", "m", 0),
)


def read(text: str) -> Any:
    return json.loads(json_text.blank_comments(text))


def value_at(text: str, path: json_text.KeyPath) -> Any:
    return ConfigEditor(Path("file"), "the reader", text, EDITOR_JSON).read(path)


def comments(text: str) -> list[str]:
    return [found for found in json_text._COMMENT.findall(text) if found[0] == "/"]


def with_value(data: Any, path: json_text.KeyPath, value: object) -> Any:
    """Return the data with a value at the path, or None where that is impossible."""
    if not path:
        return value
    data = ([] if isinstance(path[0], int) else {}) if data is None else data
    if isinstance(data, list) and isinstance(path[0], int) and path[0] <= len(data):
        place = path[0]
        inner = with_value(data[place] if place < len(data) else None, path[1:], value)
        return [*data[:place], inner, *data[place + 1 :]]
    if isinstance(data, list) and isinstance(path[0], int):
        return [*data, with_value(None, path[1:], value)]  # any index behind the last appends
    if isinstance(data, dict) and isinstance(path[0], str):
        return {**data, path[0]: with_value(data.get(path[0]), path[1:], value)}
    raise ValueError(path)


@pytest.mark.parametrize("value", ["x", {"k": [1, {"n": None}]}])
def test_a_value_is_put_in_and_taken_out_between_comments(value: object) -> None:
    seen = 0
    for text in TEXTS:
        for path in PATHS:
            try:
                expected = with_value(read(text), path, value)
            except ValueError:
                with pytest.raises(ValueError, match="should be"):
                    json_text.put(text, path, value)
                continue
            after = json_text.put(text, path, value)
            assert read(after) == expected, (text, path, after)
            assert comments(after) == comments(text), (text, path, after)
            if value_at(text, path) is None and value_at(after, path) == value:
                seen += 1
                before = json_text.drop(after, path)
                empty = {"t", "n"} - read(text).keys()  # made on the way, or empty without us
                left = {name: each for name, each in read(text).items() if each != {}}
                assert {name: each for name, each in read(before).items() if each != {}} == left, (text, path, before)
                assert not empty & read(before).keys()
                assert comments(before) == comments(text), (text, path, after, before)
                assert before.startswith("\ufeff") == text.startswith("\ufeff")
    assert seen > 40


def test_every_item_can_be_dropped_between_comments() -> None:
    for text in TEXTS:
        data = read(text)
        for name in data:
            after = json_text.drop(text, (name,))
            assert read(after) == {key: each for key, each in data.items() if key != name}, (text, name, after)
        for name in (name for name, each in data.items() if isinstance(each, list)):
            after = json_text.drop(text, (name, 0))
            left = read(after).get(name, [])
            assert left == data[name][1:], (text, name, after)


def test_a_comment_stays_on_the_line_of_its_item() -> None:
    text = '{\n  "a": 1, // about a\n  "b": 2 // about b\n}\n'
    after = json_text.put(text, ("c",), 3)
    assert after == '{\n  "a": 1, // about a\n  "b": 2, // about b\n  "c": 3\n}\n'
    assert json_text.drop(after, ("c",)) == text
    text = '{\n  "a": 1, // about a\n}\n'
    assert json_text.put(text, ("c",), 3) == '{\n  "a": 1, // about a\n  "c": 3\n}\n'


def test_a_file_without_a_value_gets_one_behind_its_comments() -> None:
    for text in (None, "", "\n", "\ufeff", "// mine", "/* mine */\n"):
        made = json_text.with_object(text, "{}\n")
        assert read(made) == {}
        assert comments(made) == comments(text or "")
    assert json_text.with_object("[1]", "{}\n") == "[1]"
