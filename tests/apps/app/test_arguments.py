"""Words on a command line become arguments of the declared types, or every one of them is complained about at once."""

import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import fields_of

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

GIVEN = {
    "path": ("/a b", "PosixPath('/a b')"),
    "count": ("3", "3"),
    "ratio": ("1e-3", "0.001"),
    "--colour": ("blue", "<Colour.BLUE: 'blue'>"),
    "--size": ("2", "<Size.LARGE: 2>"),
    "--mode": ("slow", "'slow'"),
    "--level": ("2", "2"),
    "--maybe": ("-4", "-4"),
    "--either": ("five", "'five'"),
    "--numbers": ("[1, 2]", "[1, 2]"),
    "--pairs": ('{"a": 1}', "{'a': 1}"),
    "--point": ('{"x": 1, "label": "é\\n"}', "Point(x=1, y=0, label='é\\n')"),
    "--box": ('{"corner": {"x": 1}, "width": 2}', "Box(corner=Point(x=1, y=0, label=None), width=2.0)"),
    "--tree": ('{"name": "a", "children": [{"name": "b"}]}', "Node(name='a', children=[Node(name='b', children=[])])"),
    "--when": ("2026-01-02T03:04:05Z", "datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=TzInfo(0))"),
    "--day": ("2026-01-02", "datetime.date(2026, 1, 2)"),
    "--every": ("PT5M", "datetime.timedelta(seconds=300)"),
    "--ident": ("12345678-1234-5678-1234-567812345678", "UUID('12345678-1234-5678-1234-567812345678')"),
    "--short": ("ab", "'ab'"),
    "--anything": ("[1]", "[1]"),
    "--raw": ("abc", "b'abc'"),
    "--listed": ('[1, "x"]', "(1, 'x')"),
}


def test_every_kind_of_type_arrives_as_itself(tool: Any, validate_envelope: Any):
    words = [word for name, (given, _) in GIVEN.items() for word in ([name, given] if name[0] == "-" else [given])]
    envelope = validate_envelope(tool().envelope("types", *words, "--loud", "--no-quiet", code=0))
    expected = {name.lstrip("-"): seen for name, (_, seen) in GIVEN.items()}
    assert envelope["data"] == {**expected, "loud": "True", "quiet": "False"}


def test_what_is_not_said_is_as_declared_and_lists_may_be_given_word_by_word(tool: Any):
    words = ["--numbers", "1", "--numbers=-2", "--listed", "1", "--listed", "x", "--count", "4", "--path=-"]
    data = tool().envelope("types", *words, code=0)["data"]
    assert data["numbers"] == "[1, -2]" and data["listed"] == "(1, 'x')"
    assert data["count"] == "4" and data["path"] == "PosixPath('-')"
    assert data["ratio"] == "0.5" and data["colour"] == "<Colour.RED: 'red'>" and data["quiet"] == "True"


@pytest.mark.requirement("F-015")
def test_everything_that_is_wrong_is_said_at_once_and_nothing_runs(tool: Any, tmp_path: Path, validate_envelope: Any):
    words = (
        "a b c --colour green --size 9 --mode x --level true --maybe q --numbers x --pairs 3 --box {} --when now "
        "--every soon --ident x --short abcd --listed [1] --loud=maybe --timeout soon --heartbeat-ms 0 --nope 3 --day"
    ).split()
    envelope = validate_envelope(tool().envelope("types", *words, "--point", '{"y": -1}', code=2))
    assert envelope["error"]["code"] == "ARG_ERROR"
    assert envelope["error"]["phase"] == "validation"
    assert envelope["error"]["retryable"] is False
    assert envelope["data"] is None
    assert envelope["meta"]["side_effects"] == "none" and envelope["meta"]["ending"] == "not_started"
    assert fields_of(envelope) == sorted(
        "--nope box.corner colour count day every heartbeat-ms ident level listed.1 loud maybe mode numbers.0 pairs "
        "point.x point.y ratio short size timeout when".split()
    )
    assert all(problem["message"] for problem in envelope["error"]["errors"])


MISTAKEN: list[tuple[list[str], list[str]]] = [
    ([], ["count", "path"]),
    (["--count", "1", "--count", "2"], ["count", "path"]),
    (["--path", "/a", "3"], ["count"]),
    (["a", "true"], ["count"]),
    (["a", "3", "0.5", "6", "seven"], ["arguments", "arguments"]),
    (["a", "3", "--cuont", "4", "--ratio=high"], ["--cuont", "ratio"]),
    (["--loud", "--timeout"], ["count", "path", "timeout"]),
]


@pytest.mark.requirement("F-015")
def test_mistakes_of_every_kind_come_together(tool: Any):
    runs = tool().each([["types", *words] for words, _ in MISTAKEN])
    for (words, fields), ran in zip(MISTAKEN, runs, strict=True):
        assert ran.code == 2 and fields_of(ran.json()) == fields, words


@pytest.mark.requirement("O-009")
def test_validate_only_checks_everything_and_runs_nothing(tool: Any, tmp_path: Path, validate_envelope: Any):
    precious = tmp_path / "precious"
    precious.touch()
    envelope = validate_envelope(tool().envelope("wipe", precious, "--validate-only", code=0))
    assert envelope["data"] == {"valid": True}
    assert envelope["meta"]["side_effects"] == "none"
    assert fields_of(tool().envelope("wipe", "--validate-only", code=2)) == ["path"]
    assert precious.exists()


def test_a_word_that_looks_like_an_option_can_be_said(tool: Any):
    assert tool().envelope("echo", "--", "--text", code=0)["data"] == {"result": "--text"}


def test_text_stays_as_it_was_typed(tool: Any):
    texts = ["", "é€𝄞", "a\nb\t\\", "x" * 100_000, "[1]", "true"]
    # The last one is a byte that is no UTF-8, as Python passes it on: JSON cannot hold it, and the answer says so.
    env = {} if sys.getfilesystemencoding() == "utf-8" else {"PYTHONUTF8": "1"}
    runs = tool().each([["echo", "--text", text] for text in [*texts, "\udce4"]], env=env)
    for text, ran in zip(texts, runs, strict=False):
        assert ran.json()["data"]["result"] == text and ran.json()["warnings"] == []
    changed = runs[-1].json()
    assert changed["data"]["result"] == "\ufffd"
    assert [each["code"] for each in changed["warnings"]] == ["RESULT_CHANGED"]


def test_a_name_that_python_keeps_for_itself_loses_its_underscore(tool: Any):
    assert tool().envelope("import", "/x", code=0)["data"] == {"result": "/x"}


def test_what_a_command_takes_beyond_its_parameters_has_no_words(tool: Any):
    """`**more` is for calls by name, from Python and over MCP: on a command line a typing error would be one."""
    assert fields_of(tool().envelope("anything-more", "--fisrt", "x", code=2)) == ["--fisrt"]


def test_a_command_that_is_not_there_is_an_argument_error(tool: Any, validate_envelope: Any):
    hints = {"typse": "did you mean types?", "": "there are", "TYPEZ": "did you mean types?", "--nope": ""}
    for hint, ran in zip(hints.values(), tool().each([[word] for word in hints]), strict=True):
        assert ran.code == 2 and hint in validate_envelope(ran.json())["error"]["message"]


def test_types_that_are_hard_on_the_parser(tool: Any):
    program = tool(
        "odd.py",
        """
from __future__ import annotations
import enum
from typing import Annotated, Literal, NewType, Optional, Union
from pydantic import AfterValidator, BaseModel, Field
from shotclock import App, Context

app = App("odd")
Id = NewType("Id", int)

class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9

class Dog(BaseModel):
    kind: Literal["dog"]

class Mode(enum.IntFlag):
    A = 1
    B = 2

def even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value

@app.command(mutates=False)
def take(
    ctx: Context,
    ident: Id,
    pet: Annotated[Union[Cat, Dog], Field(discriminator="kind")],
    from_: str = "f",
    model_config: str = "m",
    camelCase: str = "h",
    flags: list[bool] = [],
    several: Optional[list[Cat]] = None,
    checked: Annotated[int, AfterValidator(even)] = 2,
    nested: dict[str, list[int]] | None = None,
    default: float = float("inf"),
    tags: set[str] = set(),
    mode: Mode = Mode.A,
    on: bool | None = None,
) -> str:
    return repr((ident, pet, from_, model_config, camelCase, flags, several, checked, nested, default, tags, mode, on))

app()
""",
    )
    words = ["take", "7", "--pet", '{"kind": "cat"}', "--from", "x", "--flags", "[true, false]", "--on"]
    words += ["--camelCase", "h"]
    words += ["--several", '[{"kind": "cat", "lives": 1}]', "--nested", '{"a": [1]}', "--tags", "x", "--tags", "x"]
    said = program.envelope(*words, code=0)["data"]["result"]
    assert said == (
        "(7, Cat(kind='cat', lives=9), 'x', 'm', 'h', [True, False], [Cat(kind='cat', lives=1)], 2, {'a': [1]}, inf, "
        "{'x'}, <Mode.A: 1>, True)"
    )
    problems = program.envelope("take", "x", "--pet", '{"kind": "cow"}', "--checked", "3", code=2)
    assert fields_of(problems) == ["checked", "ident", "pet"]
    program.envelope("manifest", code=0)
    assert program("take", "--help").code == 0


LISTS = """
from typing import Any
from shotclock import App

app = App("lists")

@app.command(mutates=False)
def take(
    names: list[str] | None = None,
    *,
    sizes: tuple[str, int] | None = None,
    rows: list[list[int]] | None = None,
    any_: list[Any] | None = None,
    pairs: dict[str, int] | None = None,
    boxes: list[dict[str, int]] | None = None,
) -> list[Any]:
    return [each for each in (names, sizes, rows, any_, pairs, boxes) if each is not None]

@app.command(mutates=False)
def add(a: int, b: int = 1, *, loud: bool = False) -> int:
    return a + b

@app.command(mutates=False)
def say(text: str, *, loud: bool = False) -> str:
    return text

app()
"""


def test_a_list_is_given_word_by_word_or_as_one_json_list(tool: Any):
    expected: dict[tuple[str, ...], object] = {
        ("--names", "a", "--names", "b"): ["a", "b"],
        ("--names", '["a", "[b]"]'): ["a", "[b]"],
        ('["a"]',): ["a"],
        ("--names", "{a"): ["{a"],
        ("--names", "[]"): [],
        ("--sizes", '["a", 2]'): ["a", 2],
        ("--rows", "[1]", "--rows", "[2, 3]"): [[1], [2, 3]],
        ("--rows", "[[1], [2, 3]]"): [[1], [2, 3]],
        ("--any", "[1]", "--any", "x"): [[1], "x"],
        ("--pairs", '{"a": 1}'): {"a": 1},
        ("--boxes", '{"a": 1}', "--boxes", '{"a": 2}'): [{"a": 1}, {"a": 2}],
    }
    runs = tool("lists.py", LISTS).each([["take", *words] for words in expected])
    for (words, value), ran in zip(expected.items(), runs, strict=True):
        assert ran.json().get("data") == [value], (words, ran.json())


def test_a_list_or_object_that_is_no_json_is_refused_with_how_it_is_written(tool: Any):
    expected = {
        ("--names", "[1, 2]"): ("names.0", "valid string"),
        ("--names", '["a"'): ("names", """such as '["a", "[b]"]', also where a text itself begins with ["""),
        ("--names", "[draft] plan"): ("names", "is not JSON"),
        ("--names", '["a", "b"]', "--names", "c"): ("names", "is not alone: write all items as one JSON list"),
        ("--names", '["a"]', "--names", '["b"]'): ("names", "is not alone"),
        ('["a"]', "c"): ("names", "is not alone"),
        ("--names", "[" * 100_000): ("names", "nested too deeply"),
        ("--sizes", "[a", "--sizes", "2"): ("sizes", "is not alone"),
        ("--rows", "[1", "--rows", "[2]"): ("rows", "is not JSON"),
        ("--pairs", '{"a": 1'): ("pairs", "is not JSON"),
        ("--pairs", "[1]"): ("pairs", "valid dictionary"),
        ("--boxes", '{"a"', "--boxes", "{}"): ("boxes", "is not JSON"),
    }
    runs = tool("lists.py", LISTS).each([["take", *words] for words in expected])
    for (words, (field, message)), ran in zip(expected.items(), runs, strict=True):
        assert ran.code == 2, (words, ran.json())
        problem, *_ = ran.json()["error"]["errors"]
        assert problem["field"] == field and message in problem["message"], (words, problem)


def test_an_argument_without_a_place_is_refused(tool: Any):
    expected = {
        ("add", "1", "--a", "2"): {"b": "'1' is unclear beside --a: write --b '1'"},
        ("add", "--a", "2", "1"): {"b": "'1' is unclear beside --a: write --b '1'"},
        ("say", "x", "--loud", "true"): {"arguments": "unexpected argument 'true'"},
        ("take", "x", "--names", "y"): {"arguments": "unexpected argument 'x'"},
    }
    program = tool("lists.py", LISTS)
    for (words, mistakes), ran in zip(expected.items(), program.each([list(words) for words in expected]), strict=True):
        assert ran.code == 2, (words, ran.json())
        assert {each["field"]: each["message"] for each in ran.json()["error"]["errors"]} == mistakes, words
    assert program.envelope("say", "--loud", "true", code=0)["data"] == {"result": "true"}
    assert program.envelope("add", "--loud", "1", "0", code=0)["data"] == {"result": 1}
