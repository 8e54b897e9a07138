"""Arguments: every problem at once, any name, nothing that was not asked for."""

import functools
import inspect
import json
import math
import typing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter
from pydantic_core import to_jsonable_python

from shotclock.core.arguments import (
    NotSerializable,
    misfit,
    parameters_of,
    plain_schema,
    signature_of,
    to_jsonable,
    to_valid_json,
)
from shotclock.core.content_blocks import Content
from shotclock.core.envelope import Problem, build_envelope, whole_text
from shotclock.core.errors import Ending


def order(name: str, count: int, *, price: float, tags: list[int] = [], note: str = "none") -> None:  # noqa: B006
    pass


def open_ended(name: str, **more: int) -> None:
    pass


def with_context(name: str, ctx: Any) -> None:
    pass


def with_context_by_keyword(name: str, *, ctx: Any = None, **more: Any) -> None:
    pass


def untyped(anything, other=None):
    pass


def nothing() -> None:
    pass


def fields(problems: list[dict[str, str]]) -> set[str]:
    return {problem["field"] for problem in problems}


# --- checking -------------------------------------------------------------------------------------


def test_every_problem_is_reported_at_once():
    accepted, problems = signature_of(order).check({"count": "many", "tags": [1, "x"], "colour": "red"})
    assert accepted == {}
    assert fields(problems) == {"name", "count", "price", "tags.1", "colour"}
    assert all(problem["message"] for problem in problems)


def test_arguments_arrive_as_the_function_wants_them_with_defaults_filled_in():
    accepted, problems = signature_of(order).check({"name": "x", "count": "3", "price": 1})
    assert problems == []
    assert accepted == {"name": "x", "count": 3, "price": 1.0, "tags": [], "note": "none"}


def test_a_default_that_can_be_changed_is_not_shared_between_calls():
    given = {"name": "x", "count": 1, "price": 1}
    first, _ = signature_of(order).check(given)
    first["tags"].append(1)  # type: ignore[attr-defined]
    assert signature_of(order).check(given)[0]["tags"] == []


def test_what_was_not_asked_for_is_refused_by_name():
    assert fields(signature_of(nothing).check({"a": 1, "b": 2})[1]) == {"a", "b"}
    assert signature_of(nothing).check({}) == ({}, [])


def test_an_argument_that_is_not_there_is_answered_with_those_that_are() -> None:
    def place(text: str, kind: str = "home") -> None: ...

    def now() -> None: ...

    for function, name, hint in (
        (place, "knid", "did you mean kind?"),
        (place, "colour", "there are text, kind"),
        (now, "zone", "there are none"),
    ):
        (problem,) = signature_of(function).check({"text": "a", name: 1} if function is place else {name: 1})[1]
        assert problem == {"field": name, "message": f"unknown argument; {hint}"}


def test_a_function_that_takes_more_gets_more_and_still_has_its_own_checked():
    signature = signature_of(open_ended)
    assert signature.check({"name": "x", "a": 1, "two words": 2}) == ({"name": "x", "a": 1, "two words": 2}, [])
    assert fields(signature.check({"a": 1})[1]) == {"name"}


def test_a_function_that_takes_more_gets_it_under_any_name():
    for extra in ["p0", "p1", "self", "model_config", "__class__", "__dict__", "", "ä", "a.b"]:
        accepted, problems = signature_of(open_ended).check({"name": "mine", extra: 7})
        assert (accepted, problems) == ({"name": "mine", extra: 7}, [])


def test_the_context_is_injected_and_cannot_be_passed_from_outside():
    signature = signature_of(with_context)
    assert signature.context_name == "ctx"
    assert signature.check({"name": "x"}) == ({"name": "x"}, [])
    assert fields(signature.check({"name": "x", "ctx": "forged"})[1]) == {"ctx"}


def test_the_context_may_be_a_keyword_among_others():
    signature = signature_of(with_context_by_keyword)
    assert signature.context_name == "ctx"
    assert signature.check({"name": "x", "more": 1}) == ({"name": "x", "more": 1}, [])


def test_a_function_without_the_word_gets_no_context():
    for function in [order, open_ended, untyped, nothing]:
        assert signature_of(function).context_name is None


def test_without_annotations_anything_goes():
    thing = object()
    assert signature_of(untyped).check({"anything": thing}) == ({"anything": thing, "other": None}, [])


AWKWARD = (
    "json dict copy schema construct validate fields model_config model_fields model_dump model_validate "
    "model_computed_fields self cls _private __mangled __class__ __dict__ p0 p1 p2 root alias default type ä"
).split()


def test_a_parameter_may_have_any_name_the_language_allows():
    for name in AWKWARD:
        namespace: dict[str, Any] = {}
        exec(f"def named(first: int, {name}: int, last: int = 3): pass", namespace)
        signature = signature_of(namespace["named"])
        assert signature.check({"first": 1, name: "2"}) == ({"first": 1, name: 2, "last": 3}, [])
        assert fields(signature.check({"first": 1})[1]) == {name}
        assert fields(signature.check({"first": 1, name: "x", "last": "y"})[1]) == {name, "last"}


def test_many_awkward_names_together_do_not_get_in_each_others_way():
    namespace: dict[str, Any] = {}
    exec(f"def named({', '.join(f'{name}: int' for name in AWKWARD)}): pass", namespace)
    values = {name: position for position, name in enumerate(AWKWARD)}
    assert signature_of(namespace["named"]).check(values) == (values, [])


def positional_only(a: int, /, b: int) -> None: ...
def any_number(*numbers: int) -> None: ...
def unknown_type(a: "Nowhere") -> None: ...  # noqa: F821


def test_a_signature_that_cannot_be_called_by_name_or_not_be_understood_is_refused_when_built():
    for function in [positional_only, any_number, unknown_type]:
        with pytest.raises(TypeError, match=function.__name__):
            signature_of(function)


def annotated(count: Annotated[int, Field(gt=0)], mode: Literal["a", "b"] = "a", where: Path = Path("/")) -> None:
    pass


def test_annotations_are_honoured_with_their_constraints():
    signature = signature_of(annotated)
    assert signature.check({"count": 1, "where": "/tmp"})[0] == {"count": 1, "mode": "a", "where": Path("/tmp")}
    assert fields(signature.check({"count": 0, "mode": "c", "where": 5})[1]) == {"count", "mode", "where"}


def test_a_signature_is_built_once():
    assert signature_of(order) is signature_of(order)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = ["name", "count", "price", "tags", "note", "ctx", "more", "p0", "anything"]


@given(
    st.sampled_from([order, open_ended, with_context, with_context_by_keyword, untyped, nothing, annotated]),
    st.dictionaries(st.sampled_from(NAMES) | st.text(), json_values, max_size=6),
)
def test_arbitrary_arguments_are_accepted_or_explained_and_never_raise(function: Any, arguments: dict[str, Any]):
    accepted, problems = signature_of(function).check(arguments)
    if problems:
        assert accepted == {}
        for problem in problems:
            assert set(problem) == {"field", "message"}
            assert all(isinstance(text, str) and text for text in problem.values())
    else:
        assert set(arguments) <= set(accepted)
        accepted.pop("ctx", None)
        if signature_of(function).context_name is not None:
            accepted["ctx"] = None
        function(**accepted)


def test_names_that_are_no_text_are_explained_too():
    for arguments in [{1: 2}, {None: 1}, {b"name": 1}, {(): 1}]:
        for function in [order, open_ended, nothing]:
            accepted, problems = signature_of(function).check(arguments)
            assert accepted == {} and problems


# --- results --------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"


@dataclass
class Spot:
    x: int
    when: datetime


class Model(BaseModel):
    path: Path


NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def test_what_python_has_and_json_has_not_is_written_in_the_usual_way():
    for value, written in [
        ({1, 2}, [1, 2]),
        ((1, "a"), [1, "a"]),
        (Path("/tmp/x"), "/tmp/x"),
        (NOON, "2026-01-02T12:00:00Z"),
        (timedelta(seconds=90), "PT1M30S"),
        (Decimal("1.10"), "1.10"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Colour.RED, "red"),
        (Spot(1, NOON), {"x": 1, "when": "2026-01-02T12:00:00Z"}),
        (Model(path=Path("/")), {"path": "/"}),
        ({1: "a", Colour.RED: "b"}, {"1": "a", "red": "b"}),
        (b"text", "dGV4dA=="),
    ]:
        assert to_jsonable(value) == written


def endless() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def test_what_cannot_be_written_is_refused_with_its_type_and_the_reason():
    for make in [object, lambda: [object()], lambda: len, lambda: {"f": len}, lambda: (endless(),), endless, deep]:
        value = make()
        with pytest.raises(NotSerializable, match=f"a {type(value).__name__} cannot be put into JSON: ."):
            to_jsonable(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.tuples(inner, inner) | st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_tuples_are_written_as_pydantic_would(value: object):
    assert to_jsonable(value) == to_jsonable_python(value)


ANY_CHARACTER = st.text(st.characters(exclude_categories=()))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_CHARACTER | st.binary() | st.dates() | st.decimals(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(ANY_CHARACTER | st.integers() | st.floats(), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(ANYTHING)
@example(math.nan)
@example([math.inf, -math.inf])
@example({"x": {math.nan: math.nan}})
@example(10**5000)
@example([-(10**5000)])
def test_whatever_is_accepted_can_be_written_as_strict_json(value: object):
    try:
        written = to_jsonable(value)
    except NotSerializable:
        return
    json.dumps(written, allow_nan=False)


def strictly_read(text: str) -> Any:
    """As the readers that take nothing but JSON in UTF-8: no NaN, no half characters."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    read = json.loads(text, parse_constant=refuse)
    json.dumps(read, ensure_ascii=False).encode()
    return read


@given(ANYTHING)
@example(dict([("\udcff", 1), ("\udcfe", {"\ufffd": 2})]))
@example([b"\xff", math.nan, "\ud800"])
@example("😀")
def test_a_result_is_json_that_every_reader_takes_and_says_where_it_was_changed(value: object):
    try:
        written, changes = to_valid_json(value)
    except NotSerializable:
        return
    assert strictly_read(json.dumps(written, allow_nan=False)) == written
    unchanged = to_jsonable(value) if not changes else None
    assert changes or written == unchanged
    if not changes and isinstance(value, str | int | float):
        assert written == value


def test_no_name_of_a_field_is_lost_because_it_cannot_be_read():
    written, changes = to_valid_json(dict([("\udcff", 1), ("\udcfe", 2), ("\ufffd", 3)]))
    assert sorted(written.values()) == [1, 2, 3] and changes


def test_a_result_that_cannot_be_written_is_refused_as_before():
    for value in [endless(), deep(), {"a": [object()]}]:
        with pytest.raises(NotSerializable):
            to_valid_json(value)


@given(ANY_CHARACTER, ANY_CHARACTER)
@example("\ud83d", "\ude00")
def test_an_envelope_is_written_so_that_every_reader_takes_it(data: str, message: str):
    whole = [st_text for st_text in (data, message) if st_text == whole_text(st_text)]
    problem = Problem("COMMAND_FAILED", message or "x", context={"said": data})
    envelope = build_envelope(
        data={data: [data]}, problem=problem, ending=Ending.FINISHED, mutates=True, idempotent=False, meta={}
    )
    read = strictly_read(envelope.to_json())
    assert read == envelope.to_dict(), "and what is shown elsewhere is the same"
    assert (read["warnings"] == []) is (len(whole) == 2 or data == whole_text(data))
    changes = [warning["context"]["changes"] for warning in read["warnings"]]
    assert all(len(each) >= 3 and each[0].startswith("data.") for each in changes), "what was changed is listed"


# --- plain types, which are checked without pydantic ----------------------------------------------


def plain_one(n: int, name: str, *, ratio: float = 0.5, deep: bool = False) -> int: ...
def plain_two(unit: Literal["s", "ms"], only: Literal["a"] = "a", n: int | None = None) -> list[int]: ...
def plain_three(names: list[str], sizes: list[list[int]], *, rates: list[float | None], from_: str = "x") -> str: ...
def plain_four(value: Any, scope: dict[str, Any], *, each: list[Any], more=None) -> dict[str, Any]: ...
def plain_none() -> None: ...
def not_quite(n: int = True, note: str = None, ratio: float = 1) -> bool: ...  # noqa: RUF013
def wide(n: int, **more: str) -> float: ...


PLAIN = [plain_one, plain_two, plain_three, plain_four, plain_none, not_quite, wide]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["s", "ms", "a", "3", "1.5"]),
)
ANYTHING = st.one_of(
    SCALARS,
    st.lists(st.one_of(SCALARS, st.lists(SCALARS, max_size=2)), max_size=3),
    st.dictionaries(SCALARS, SCALARS, max_size=2),
    st.binary(max_size=2),
)


def same(a: object, b: object) -> bool:
    """Equal and of the same types, inside as well; not-a-number is itself."""
    return repr(a) == repr(b) and type(a) is type(b)


def test_the_schema_of_plain_types_is_the_one_that_pydantic_writes():
    for function in PLAIN:
        from shotclock.core.arguments import Signature, plain_schema

        signature = Signature(function)
        assert signature._model is None, "pydantic was not asked"
        theirs = signature.build_model().model_json_schema(by_alias=True)
        theirs.pop("title")
        assert signature.json_schema() == {"properties": {}, **theirs}
        returned = typing.get_type_hints(function)["return"]
        assert plain_schema(returned) == TypeAdapter(returned).json_schema(mode="serialization")


@given(st.data())
def test_plain_arguments_are_taken_as_pydantic_takes_them(data: st.DataObject):
    from shotclock.core.arguments import Signature

    signature = Signature(data.draw(st.sampled_from(PLAIN)))
    names = st.sampled_from([*signature._fields, "other"])
    arguments = data.draw(st.dictionaries(names, ANYTHING, max_size=5))
    accepted = signature.accept_plain(arguments)
    if accepted is not None:
        signature._is_plain = False
        theirs, problems = signature.check(arguments)
        assert not problems and same(accepted, theirs)


def test_a_plain_call_is_taken_without_pydantic():
    from shotclock.core.arguments import Signature

    signature = Signature(plain_one)
    assert signature.check({"n": 2, "name": "x", "ratio": 1}) == (
        {"n": 2, "name": "x", "ratio": 1.0, "deep": False},
        [],
    )
    assert signature._model is None
    assert fields(signature.check({"n": "two"})[1]) == {"n", "name"}


def _plain(a: int, b: str = "b", *, c: float = 1.5, d: bool, **more: int) -> None: ...
def _few(ctx: object) -> None: ...
async def _async(a: int = ...) -> None: ...  # type: ignore[assignment]


class _Callable:
    def __call__(self, a: int, *, b: int = 2) -> None: ...

    async def method(self, a: int) -> None: ...


@functools.wraps(_plain)
def _wrapping(*arguments: object, **named: object) -> None: ...


def _signed(*arguments: object) -> None: ...


_signed.__signature__ = inspect.signature(_plain)  # type: ignore[attr-defined]


_FUNCTIONS = [
    _plain,
    _few,
    _async,
    _Callable(),
    _Callable().method,
    functools.partial(_plain, b="x"),
    _wrapping,
    _signed,
]


def test_parameters_are_those_that_inspect_finds() -> None:
    for place in range(len(_FUNCTIONS)):
        function: Any = _FUNCTIONS[place]
        kinds = {"by place or name": "POSITIONAL_OR_KEYWORD", "by name": "KEYWORD_ONLY", "rest": "VAR_KEYWORD"}
        expected = [
            (each.name, each.kind.name, ... if each.default is each.empty else each.default)
            for each in inspect.signature(function).parameters.values()
        ]
        assert [(each.name, kinds[each.kind], each.default) for each in parameters_of(function)] == expected


def test_a_result_fits_its_schema_or_the_place_and_the_reason_are_named() -> None:
    whole: dict[str, Any] = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    shop = {"type": "object", **whole, "additionalProperties": False}
    others = {"type": "object", "additionalProperties": {"type": "string"}}
    within = {"$defs": {"n": {"type": "number"}}, "items": {"$ref": "#/$defs/n"}, "type": "array"}
    for schema, good, bad in (
        (shop, [{"a": 1}, {"a": 1.0}], [{}, {"a": True}, {"a": 1.5}, {"a": 1, "b": 2}, [], None]),
        (others, [{}, {"x": "y"}], [{"x": 1}, {"x": None}]),
        ({"type": "object", "additionalProperties": True, "title": "T"}, [{"x": 1}], ["x"]),
        (within, [[], [1, 2.5], (1, 2)], [["a"], [True], [math.nan]]),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, [None, False], [0, "null"]),
        ({"enum": ["a", 1]}, ["a", 1], [True, "b"]),
        ({"const": 1}, [1], [True, 2]),
        ({"type": "string", "maxLength": 2}, ["ab"], ["abc"]),
    ):
        assert [misfit(value, schema) for value in good] == [None] * len(good), schema
        assert all(misfit(value, schema) for value in bad), schema
    deep = {"properties": {"a": {"items": {"required": ["b"]}}}}
    assert misfit({"a": [{}]}, deep) == "a[0]: 'b' is a required property"


def test_a_value_is_plain_only_if_it_is_written_the_same_and_content_becomes_its_block() -> None:
    block = {"type": "text", "text": "a"}
    assert to_jsonable({"a": [Content(block)], "b": {1.5}}) == {"a": [block], "b": [1.5]}
    assert all(map(plain_schema, (int | None, list[str], dict[str, Any], Literal["a"])))
    assert not any(map(plain_schema, (int | str, int | str | None, bytes, Literal[1], list[bytes])))
    assert plain_schema(int | None) == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert to_valid_json({"a": b"b", "\ud800": math.inf})[1] == [
        "names of fields: half characters became U+FFFD", "a: bytes became base64", "\ufffd: inf became a text",
    ]  # fmt: skip
