"""YAML as people and enemies write it: plain values, the place of everything, and no way to make it hang or raise."""

import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shotclock.flows.file.yaml_reader import DEPTH_LIMIT, NODE_LIMIT, TEXT_LIMIT, SourcePosition, Tree, read_tree
from tests.rows import row

# A flaw in a small file is found at once; only a reader that unfolds a bomb would take this long.
AT_ONCE_S = 10.0


def value(text: str) -> Any:
    tree = read_tree(text)
    assert not tree.flaws, tree.flaws
    return tree.value


def only_flaw(text: str) -> tuple[str, int, int]:
    (flaw,) = read_tree(text).flaws
    return flaw.rule, flaw.place.line, flaw.place.column


def place(tree: Tree, *path: str | int) -> SourcePosition:
    spot = tree.spots
    for part in path:
        spot = spot.inside[part]
    return spot.place


# --- values -----------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "nil": "nil",
    "true": True,
    "TRUE": True,
    "False": False,
    "tRue": "tRue",
    "yes": "yes",
    "no": "no",
    "on": "on",
    "off": "off",
    "Yes": "Yes",
    "y": "y",
    "0": 0,
    "-0": 0,
    "+5": 5,
    "010": 10,
    "0o10": 8,
    "0x1F": 31,
    "0b1": "0b1",
    "1_000": "1_000",
    "1:30": "1:30",
    "1.5": 1.5,
    ".5": 0.5,
    "5.": 5.0,
    "1e3": 1000.0,
    "-1.5E-2": -0.015,
    ".": ".",
    "-": "-",
    "+": "+",
    "1.2.3": "1.2.3",
    "2020-01-01": "2020-01-01",
    "2020-01-01T10:00:00Z": "2020-01-01T10:00:00Z",
    "'5'": "5",
    '"true"': "true",
    "'~'": "~",
    "=": "=",
    "<<": "<<",
    "!!str 5": "5",
    "|\n    two\n    lines\n": "two\nlines\n",
    ">-\n    one\n    line\n": "one line",
    "[1, [2, {b: 3}]]": [1, [2, {"b": 3}]],
}


def test_a_value_is_what_yaml_1_2_says() -> None:
    for written, meant in VALUES.items():
        with row(written, meant):
            if written == "-":
                written = "'-'"
            read = value(f"a: {written}")["a"]
            assert (read, type(read)) == (meant, type(meant))


def test_a_number_as_a_key_is_the_text_that_is_written() -> None:
    assert value("{1: a, 1.50: b, true: c, on: d, 0x1F: e}") == {
        "1": "a",
        "1.50": "b",
        "true": "c",
        "on": "d",
        "0x1F": "e",
    }


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(st.characters(codec="ascii"), max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text("abc ~1'\"", max_size=4), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_json_is_read_as_json(data: Any) -> None:
    import json

    assert value(json.dumps(data)) == data


# --- places -----------------------------------------------------------------------------------------------


def test_every_key_and_item_has_its_place() -> None:
    for newline in ["\n", "\r\n", "\r"]:
        with row(newline):
            text = "a: 1\nb:\n  c: {d: 2, 'e': [x,   y]}\n  ü: z\n\n  f:\n    - g\n    -  h: 1\n"
            tree = read_tree(text.replace("\n", newline))
            assert place(tree, "a") == SourcePosition(1, 1)
            assert place(tree, "b", "c") == SourcePosition(3, 3)
            assert place(tree, "b", "c", "d") == SourcePosition(3, 7)
            assert place(tree, "b", "c", "e") == SourcePosition(3, 13)
            assert place(tree, "b", "c", "e", 1) == SourcePosition(3, 24)
            assert place(tree, "b", "ü") == SourcePosition(4, 3)
            assert place(tree, "b", "f", 0) == SourcePosition(7, 7)
            assert place(tree, "b", "f", 1, "h") == SourcePosition(8, 8)


def test_what_an_alias_stands_for_has_its_place_where_it_is_written() -> None:
    tree = read_tree("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\nd:\n  <<: [{x: 3}, {z: 4}]\n  z: 5\n")
    assert tree.value == {"a": {"x": 1}, "b": {"x": 1}, "c": {"y": 2, "x": 1}, "d": {"z": 5, "x": 3}}
    assert place(tree, "b") == SourcePosition(2, 1)
    assert place(tree, "b", "x") == place(tree, "c", "x") == SourcePosition(1, 8)
    assert place(tree, "d", "z") == SourcePosition(6, 3)
    assert place(tree, "d", "x") == SourcePosition(5, 9)


def test_what_is_written_beats_what_is_merged_and_the_first_merged_beats_the_next() -> None:
    assert value("a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3}")["c"] == {"x": 1, "y": 1, "z": 3}
    assert value("a: &a {x: 1}\nb: {x: 2, <<: *a}")["b"] == {"x": 2}
    assert value("a: {'<<': 1}")["a"] == {"<<": 1}


def test_an_anchor_may_be_named_again_and_an_alias_may_be_a_key() -> None:
    assert value("a: &x 1\nb: *x\nc: &x 2\nd: *x") == {"a": 1, "b": 1, "c": 2, "d": 2}
    assert value("a: &x key\n*x : 1") == {"a": "key", "key": 1}


# --- flaws ------------------------------------------------------------------------------------------------

FLAWS = {
    "a tab for indentation": ("a:\n\tb: 1\n", ("file/syntax", 2, 1)),
    "an open bracket": ("a: [1,\nb: 2\n", ("file/syntax", 3, 1)),
    "an open quote": ('a: "x\n', ("file/syntax", 2, 1)),
    "a NUL": ("a: 1\nb: \0\n", ("file/syntax", 2, 4)),
    "a bell after CRLF": ("a: 1\r\nb: x\a", ("file/syntax", 2, 5)),
    "a second document": ("a: 1\n---\nb: 2\n", ("file/documents", 2, 1)),
    "an alias to nothing": ("a: 1\nb: *x\n", ("file/alias", 2, 4)),
    "a list that holds itself": ("a: &a [1, *a]\n", ("file/alias", 1, 11)),
    "a mapping that holds itself": ("a: &a\n  b: *a\n", ("file/alias", 2, 6)),
    "a mapping that merges itself": ("a: &a\n  <<: *a\n", ("file/alias", 2, 7)),
    "a merged number": ("a:\n  <<: 5\n", ("file/merge", 2, 3)),
    "a merged list of numbers": ("a: {<<: [1]}\n", ("file/merge", 1, 5)),
    "a list as a key": ("? [a, b]\n: 1\n", ("file/key", 1, 3)),
    "a mapping as a key": ("a:\n  ? {b: 1}\n  : 1\n", ("file/key", 2, 5)),
    "nothing as a key": ("a:\n  ~: 1\n", ("file/key", 2, 3)),
    "no key at all": (": 1\n", ("file/key", 1, 1)),
    "an alias to a list as a key": ("a: &x [1]\n*x : 1\n", ("file/key", 2, 1)),
    "a tag of one's own": ("a: !mine 5\n", ("file/tag", 1, 4)),
    "a tag on a list": ("a: !mine [5]\n", ("file/tag", 1, 4)),
    "a tag that runs code": ("a: !!python/object/apply:os.system [true]\n", ("file/tag", 1, 4)),
    "bytes": ("a: !!binary aGVsbG8=\n", ("file/tag", 1, 4)),
    "a set": ("a: !!set {x: ~}\n", ("file/tag", 1, 4)),
    "a number that is called one": ("a: !!int 5\n", ("file/tag", 1, 4)),
    "not a number": ("a: .nan\n", ("file/number", 1, 4)),
    "infinity": ("a: [-.inf]\n", ("file/number", 1, 5)),
    "a number past all floats": ("a: 1e999\n", ("file/number", 1, 4)),
    "a number past all patience": (f"a: {'9' * 5000}\n", ("file/number", 1, 4)),
    "lists too deep": ("[" * 200 + "]" * 200, ("file/depth", 1, DEPTH_LIMIT + 2)),
    "keys too deep": ("? " * 5000, ("file/depth", 1, 2 * (DEPTH_LIMIT + 1) + 1)),
}


def test_a_flaw_is_found_where_it_is() -> None:
    for text, flaw in FLAWS.values():
        with row(text, flaw):
            assert only_flaw(text) == flaw


def test_every_flaw_is_told_at_once_and_the_rest_is_still_read() -> None:
    tree = read_tree("a: 1\na: 2\nb: {c: 1, c: 2, d: !x 3}\ne: .inf\n~: 5\nf: 6\n")
    assert [(flaw.rule, flaw.place.line) for flaw in tree.flaws] == [
        ("file/duplicate-key", 2),
        ("file/duplicate-key", 3),
        ("file/tag", 3),
        ("file/number", 4),
        ("file/key", 5),
    ]
    assert tree.value["f"] == 6
    assert tree.is_whole


def test_a_key_that_is_there_twice_is_told_without_its_values() -> None:
    (flaw,) = read_tree("password: hunter2\n\npassword: hunter3\n").flaws
    assert flaw.message == "the key 'password' is written twice, first in line 1"


def test_nothing_in_a_message_is_obeyed_by_a_terminal_or_fills_it() -> None:
    tree = read_tree('"\\e[31m": 1\n"\\e[31m": 2\n' + f"? {'x' * 900}\n: 1\n? {'x' * 900}\n: 2\n")
    assert len(tree.flaws) == 2
    assert all(flaw.message.isprintable() and len(flaw.message) < 150 for flaw in tree.flaws)


# --- enemies ----------------------------------------------------------------------------------------------


def bomb(line: str) -> str:
    return "a0: &a0 {x: 1}\n" + "".join(line.format(n=n, before=n - 1) for n in range(1, 12))


BOMBS = {
    "lists": bomb("a{n}: &a{n} [*a{before}, *a{before}, *a{before}, *a{before}, *a{before}, *a{before}]\n"),
    "mappings": bomb("a{n}: &a{n} {{b: *a{before}, c: *a{before}, d: *a{before}, e: *a{before}, f: *a{before}}}\n"),
    "merges": bomb("a{n}: &a{n} {{<<: [*a{before}, *a{before}, *a{before}, *a{before}, *a{before}, *a{before}]}}\n"),
}


def test_a_bomb_does_not_go_off() -> None:
    for text in BOMBS.values():
        with row(text):
            began = time.process_time()
            tree = read_tree(text)
            assert time.process_time() - began < AT_ONCE_S
            assert [flaw.rule for flaw in tree.flaws] == ["file/size"]
            assert str(NODE_LIMIT) in tree.flaws[0].message


def test_a_long_text_that_is_said_again_and_again_is_a_bomb_as_well() -> None:
    """A thousand names to wait for, given to a thousand steps, are a million."""
    aliases = TEXT_LIMIT // 10_000
    text = f"a: &a [{'x' * 10_000}]\nb: [{'*a, ' * aliases}]"
    assert [flaw.rule for flaw in read_tree(text).flaws] == ["file/size"]
    assert str(TEXT_LIMIT) in read_tree(text).flaws[0].message
    assert read_tree(text.replace("*a, ", "", 2)).flaws == ()


@pytest.mark.slow
def test_a_million_brackets_are_one_flaw_and_no_recursion() -> None:
    for text in ["[" * 1_000_000, "{a: " * 300_000, "- " * 500_000]:
        with row(text):
            began = time.process_time()
            tree = read_tree(text)
            assert time.process_time() - began < AT_ONCE_S
            assert [flaw.rule for flaw in tree.flaws] == ["file/depth"]


def test_as_deep_as_allowed_is_read() -> None:
    assert read_tree("[" * DEPTH_LIMIT + "]" * DEPTH_LIMIT).flaws == ()


@given(st.text(max_size=60))
@example("? ? : - ,")
@example("&a &b c")
@example("*")
@example("%")
@example("!<")
@example("--- ---")
@example("...\n...")
@example("\ufeff\ufeffa: 1")
def test_whatever_the_text_nothing_is_raised(text: str) -> None:
    tree = read_tree(text)
    assert tree.is_whole or tree.flaws


@given(st.text("ab:-?[]{}&*!|>'\"%@`#, \n\t~<1.", max_size=40))
def test_whatever_the_signs_nothing_is_raised(text: str) -> None:
    tree = read_tree(text)
    assert tree.is_whole or tree.flaws
    assert all(flaw.place.line >= 1 and flaw.place.column >= 1 for flaw in tree.flaws)


def test_a_later_version_of_yaml_is_refused_and_an_earlier_one_is_read_as_this_one() -> None:
    assert [flaw.rule for flaw in read_tree("%YAML 1.3\n---\na: yes\n").flaws] == ["file/syntax"]
    assert read_tree("%YAML 1.1\n---\na: yes\n").value == {"a": "yes"}


def test_an_alias_does_not_nest_deeper_than_the_limit() -> None:
    half = DEPTH_LIMIT // 2
    inner = "[" * half + "]" * half
    for around, rules in ((half + 1, []), (half + 2, ["file/depth"])):
        tree = read_tree(f"a: &a {inner}\nb: " + "[" * (around - 1) + "*a" + "]" * (around - 1) + "\n")
        assert [flaw.rule for flaw in tree.flaws] == rules
