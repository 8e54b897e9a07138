"""Values that JSON writes alike, and what conversion makes of what was given. Each pair is one that somebody tried."""

import array
import collections
import datetime as dt
import decimal
import enum
import functools
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    RootModel,
    SecretStr,
    field_serializer,
    model_validator,
)

from shotclock.core.arguments import NotSerializable, signature_of
from shotclock.core.exact_values import Look, copy_arguments, exact, identity, look

BIG, ROUNDED = 2**53 + 1, 2.0**53


class Mode(enum.Flag):
    A = 1
    B = 2


class Zone(dt.tzinfo):
    def __init__(self, number: int = 0) -> None:
        self.number = number

    def utcoffset(self, moment: object) -> dt.timedelta:
        return dt.timedelta(hours=1)

    def dst(self, moment: object) -> None:
        return None


@dataclass(slots=True)
class Slots:
    a: int = 1
    _b: int = 2


class Masked(BaseModel):
    a: int = 1

    @field_serializer("a")
    def mask(self, value: int) -> int:
        return 0


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Attributed(dict[str, Any]):
    extra: int


def attributed(extra: int) -> Attributed:
    made = Attributed(a=1)
    made.extra = extra
    return made


class Point(typing.NamedTuple):
    a: int
    b: int


APART: list[tuple[Any, Any]] = [
    (Mode.A | Mode.B, 3),
    (dt.datetime(2026, 1, 1, tzinfo=Zone(1)), dt.datetime(2026, 1, 1, tzinfo=Zone(2))),
    (dt.timedelta(1), "P1D"),
    (Slots(1, 2), Slots(1, 3)),
    (Masked(a=1), Masked(a=2)),
    (Open(z=1), Open(z=2)),  # type: ignore[call-arg]
    (attributed(1), attributed(2)),
    (Point(1, 2), (1, 2)),
    (re.compile("a"), re.compile("a", re.I)),
    (decimal.Decimal("1E+1"), decimal.Decimal("10")),
    (decimal.Decimal("NaN"), "NaN"),
    ({1.0: 1}, {1: 1}),
    ({None: 1}, {"None": 1}),
    ({(1, "2"): 1}, {("1", 2): 1}),
    (collections.Counter(a=1), {"a": 1}),
    (float("-inf"), "-inf"),
    ({"x": b"", "x[0]": 1}, {"x": "", "x[0]": 1}),
    ([{1, "a"}, b""], [[1, "a"], b""]),
]


@pytest.mark.parametrize(("one", "other"), APART, ids=range(len(APART)))
def test_these_are_told_apart(one: Any, other: Any) -> None:
    assert exact({"v": one}) != exact({"v": other}) and identity({"v": one}) != identity({"v": other})
    assert identity({"v": one}) == identity(copy_arguments({"v": one})), "it is the same once it has travelled"


def local() -> Any:
    @dataclass
    class Local:
        a: int = 1

    return Local()


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


REFUSED = [
    {1: "a", "1": "b"},
    local(),
    endless(),
    type("int", (int,), {"__module__": "builtins"})(5),
    functools.partial(int, base=2),
    types.SimpleNamespace(a=1),
    array.array("i", [1]),
    object(),
    int,
    len,
    10**5000,
]


@pytest.mark.parametrize("value", REFUSED, ids=[type(each).__name__ for each in REFUSED])
def test_what_cannot_be_told_from_something_else_is_refused(value: Any) -> None:
    with pytest.raises(NotSerializable):
        exact({"v": value})


def test_json_is_its_own_identity() -> None:
    value = {"a": [1, 1.5, None, True, "x", {"b": {}}], "b": 2**53 + 1}
    assert exact(value) == (value, []) and identity(value) == value


def test_a_set_has_one_order_whatever_order_it_is_in() -> None:
    words = [f"w{number}" for number in range(50)]
    assert exact({"v": set(words)}).plain == exact({"v": set(reversed(words))}).plain == {"v": sorted(words)}


def test_a_path_is_the_same_whatever_it_was_put_together_from() -> None:
    assert exact({"v": Path("/srv") / "data"}) == exact({"v": Path("/srv/data")}) != exact({"v": Path("/srv/more")})


def test_a_copy_shares_nothing_with_what_was_given() -> None:
    inner: list[int] = []
    value = {"v": [inner, inner], "w": (inner, Slots(1))}
    made: Any = copy_arguments(value)
    inner.append(1)
    assert made == {"v": [[], []], "w": ([], Slots(1))} and made["v"][0] is not made["v"][1]


# --- what conversion makes of it ----------------------------------------------------------------------------------


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    amount: float = Field(default=0.0, validation_alias=AliasChoices("amt", "amount"))
    other: float = Field(default=0.0, alias="o")


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
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.total = self.a * 2


def function(
    aliased: Aliased | None = None,
    before: Before | None = None,
    after: After | None = None,
    sums: Sum | None = None,
    root: RootModel[float] | None = None,
    data: Json[Any] | None = None,
    pairs: list[tuple[float, int]] | None = None,
    rates: dict[str, float] | None = None,
    numbers: frozenset[int] | None = None,
    raw: bytes | None = None,
    pin: SecretStr | None = None,
    ratio: float | None = None,
    anything: Any = None,
) -> None: ...


CONVERTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"aliased": {"amt": BIG}}, {"aliased.amount": ROUNDED}),
    ({"aliased": {"other": BIG}}, {"aliased.o": ROUNDED}),
    ({"aliased": {"o": BIG}}, {"aliased.o": ROUNDED}),
    ({"before": {"a": "q"}}, {"before.b": "made"}),
    ({"after": {"a": "q"}}, {"after.b": "made"}),
    ({"sums": {"a": 1}}, {"sums.total": 2.0}),
    ({"root": BIG}, {"root": ROUNDED}),
    ({"data": '{"a": 1}'}, {"data": {"a": 1}}),
    ({"pairs": [[BIG, "1"]]}, {"pairs[0][0]": ROUNDED, "pairs[0][1]": 1}),
    ({"rates": {"a b": BIG}}, {'rates["a b"]': ROUNDED}),
    ({"numbers": [2, "1"]}, {"numbers": [1, 2]}),
    ({"ratio": BIG}, {"ratio": ROUNDED}),
    ({"ratio": 1, "raw": "abc", "pin": "1234", "pairs": [[1, 2.0]], "numbers": [2, 1], "anything": {"a": 1}}, {}),
    ({"raw": b"abc", "anything": {b"a", (1, 2)}, "numbers": {1, 2}}, {}),
    ({}, {}),
]


@pytest.mark.parametrize(("given", "runs_as"), CONVERTED, ids=range(len(CONVERTED)))
def test_what_the_function_gets_is_told_where_it_is_something_else(
    given: dict[str, Any], runs_as: dict[str, Any]
) -> None:
    assert looked_at(function, given)._replace(lost_in_json=[]) == Look(runs_as, [], [])


def test_a_default_that_is_converted_is_told_as_well() -> None:
    def converting(amount: Annotated[float, Field(validate_default=True)] = BIG) -> None: ...

    assert looked_at(converting, {}).runs_as == {"amount": ROUNDED}


@pytest.mark.parametrize(
    ("given", "lost"),
    [
        ({"anything": [1, "a", {"b": None}]}, []),
        ({"anything": b"abc"}, ["anything"]),
        ({"raw": b"abc"}, ["raw"]),
        ({"pin": SecretStr("1234")}, ["pin"]),
        ({"pairs": [(1.0, 2)], "numbers": {1, 2}}, []),
        ({"pairs": [(1.0, 2)], "anything": (1, 2)}, ["anything"]),
        ({"ratio": float("inf")}, []),
        ({"aliased": Aliased(amt=1.0)}, []),  # type: ignore[call-arg]
    ],
    ids=repr,
)
def test_what_would_come_back_from_json_as_something_else_is_named(given: dict[str, Any], lost: list[str]) -> None:
    assert looked_at(function, given).lost_in_json == lost


def looked_at(checked: Any, given: dict[str, Any]) -> Look:
    signature = signature_of(checked)
    converted, problems = signature.check(copy_arguments(given))
    assert problems == []
    return look(signature, given, converted)
