"""Arguments as JSON: which are refused, and which values a function receives instead."""

import collections
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    RootModel,
    SecretStr,
    model_validator,
)

from shotclock.core.arguments import Conversions, find_conversions, json_arguments, signature_of

BIG, ROUNDED = 2**53 + 1, 2.0**53
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


class Colour(enum.Enum):
    RED = "red"


@given(st.dictionaries(st.text(), values))
def test_json_is_copied_and_accepted(arguments: dict[str, Any]) -> None:
    assert json_arguments(arguments) == (arguments, [])


def test_a_copy_shares_nothing_with_the_arguments_of_the_caller() -> None:
    inner: list[int] = []
    copied, _ = json_arguments({"v": [inner, inner]})
    inner.append(1)
    assert copied == {"v": [[], []]}


def test_every_argument_that_is_not_json_is_named() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    others = {
        "bytes": b"abc", "tuple": (1, 2), "set": {1}, "number as a name": {1: 2}, "path": Path("/a"),
        "nan": float("nan"), "infinity": [float("inf")], "enum": Colour.RED, "object": object(), "deep": deep,
        "digits": 10**5000, "inside": {"a": [b""]}, "deque": collections.deque([1]), "halves": "\ud83d\ude00",
    }  # fmt: skip
    _, problems = json_arguments({"fine": 1, **others})
    assert [problem["field"] for problem in problems] == list(others)
    assert all(problem["message"].startswith("must be text, a number") for problem in problems)


# --- conversions --------------------------------------------------------------------------------------------------


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    amount: float = Field(default=0.0, validation_alias=AliasChoices("amt", "amount"))


class Before(BaseModel):
    a: str = "x"
    b: str = "y"

    @model_validator(mode="before")
    @classmethod
    def add(cls, value: Any) -> Any:
        return {"b": "made", **value}


class After(BaseModel):
    a: str = "x"
    b: str = "y"

    @model_validator(mode="after")
    def change(self) -> "After":
        self.b = "made"
        return self


@dataclass
class Sum:
    a: float
    total: float = field(init=False, default=0)
    tags: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.total = self.a * 2


class Odd:
    pass


ODD = Odd()
numbers = iter(range(1_000))


def function(
    aliased: Aliased | None = None,
    before: Before | None = None,
    after: After | None = None,
    sums: Sum | None = None,
    root: RootModel[float] | None = None,
    data: Json[Any] | None = None,
    pairs: list[tuple[float, int]] | None = None,
    rates: dict[int, float] | None = None,
    tags: frozenset[str] | None = None,
    raw: bytes | None = None,
    pin: SecretStr | None = None,
    ratio: float | None = None,
    count: int = 0,
    folder: Path = Path("/a"),
    odd: Annotated[Any, AfterValidator(lambda value: value and Odd())] = None,
    unsteady: Annotated[Any, AfterValidator(lambda value: value and next(numbers))] = None,
) -> None: ...


def test_the_values_that_the_function_receives_instead_are_found() -> None:
    table: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"ratio": 1, "raw": "abc", "pin": "1234", "pairs": [[1, 2.0]], "tags": ["a", "b"], "folder": "/b"}, {}),
        ({"aliased": {"amount": 1}, "rates": {"1": 2}}, {}),
        ({"aliased": {"amt": BIG}}, {"aliased": {"amount": ROUNDED}}),
        ({"before": {"a": "q"}}, {"before": {"a": "q", "b": "made"}}),
        ({"after": {"a": "q", "b": "r"}}, {"after": {"a": "q", "b": "made"}}),
        ({"sums": {"a": 1, "tags": ["b", "a", "b"]}}, {"sums": {"a": 1.0, "total": 2.0, "tags": ["a", "b"]}}),
        ({"root": BIG}, {"root": ROUNDED}),
        ({"data": '{"a": 1}'}, {"data": {"a": 1}}),
        ({"pairs": [[BIG, "1"]]}, {"pairs": [[ROUNDED, 1]]}),
        ({"rates": {"01": 1}}, {"rates": {"1": 1.0}}),
        ({"tags": ["b", "a"]}, {"tags": ["a", "b"]}),
        ({"ratio": BIG, "count": True}, {"ratio": ROUNDED, "count": 1}),
        ({"folder": "/a//b/"}, {"folder": "/a/b"}),
        ({"odd": 1}, {"odd": f"<{Odd.__module__}.Odd>"}),
    ]
    for arguments, runs_as in table:
        assert conversions_of(function, arguments) == Conversions(runs_as, []), arguments


def test_a_default_that_is_converted_is_found_as_well() -> None:
    def converting(amount: Annotated[float, Field(validate_default=True)] = BIG) -> None: ...

    assert conversions_of(converting, {}).runs_as == {"amount": ROUNDED}

    def with_object(odd: Any = ODD) -> None: ...

    assert conversions_of(with_object, {}).runs_as == {"odd": f"<{Odd.__module__}.Odd>"}, "no schema can show it"


def test_a_value_that_differs_every_time_is_named() -> None:
    assert conversions_of(function, {"unsteady": 1}) == Conversions({}, ["unsteady"])


def conversions_of(checked: Any, arguments: dict[str, Any]) -> Conversions:
    signature = signature_of(checked)
    converted, problems = signature.check(arguments)
    assert problems == []
    return find_conversions(signature, arguments, converted)
