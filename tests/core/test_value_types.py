"""Records: what `dataclasses` would have given, without its price at start-up."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.value_types import (
    MADE_UNCOMPILED,
    NamedTuple,
    as_dict,
    dataclass,
    default_factory,
    field,
    fields_of,
    record,
    replace,
    replace_fields,
    value,
)


@value
class Point:
    x: int
    y: int = 0
    """A docstring of a field."""
    tags: tuple[str, ...] = ()

    @property
    def sum(self) -> int:
        return self.x + self.y

    @classmethod
    def origin(cls) -> "Point":
        return cls(0)


@value
class Other:
    x: int
    y: int = 0
    tags: tuple[str, ...] = ()


@record
class Basket:
    owner: str
    items: list[int] = default_factory(factory=list)
    place: Point = default_factory(factory=Point.origin)
    note: str | None = None

    def add(self, item: int) -> None:
        self.items.append(item)


@record
class Empty:
    pass


points = st.builds(Point, st.integers(), st.integers(), st.lists(st.text(), max_size=3).map(tuple))
baskets = st.builds(Basket, st.text(), st.lists(st.integers(), max_size=3), points, st.none() | st.text())


@given(points)
def test_equal_values_have_equal_hashes_and_are_one_key(point: Point):
    twin = Point(point.x, y=point.y, tags=point.tags)
    assert twin is not point
    assert twin == point and not twin != point
    assert hash(twin) == hash(point)
    assert len({point, twin}) == 1


@given(points, points)
def test_values_are_equal_exactly_when_all_their_fields_are(one: Point, two: Point):
    assert (one == two) == ((one.x, one.y, one.tags) == (two.x, two.y, two.tags))


@given(points)
def test_values_of_another_type_are_never_equal_even_with_equal_fields(point: Point):
    assert point != Other(point.x, point.y, point.tags)
    assert point != (point.x, point.y, point.tags)
    assert point != None  # noqa: E711


@pytest.mark.parametrize("field", ["x", "y", "tags", "brand_new", "__class__"])
def test_a_value_cannot_be_changed(field: str):
    point = Point(1)
    with pytest.raises(AttributeError):
        setattr(point, field, 2)
    with pytest.raises(AttributeError):
        delattr(point, field)
    assert point == Point(1)


def test_a_record_can_be_changed_and_is_therefore_no_key():
    basket = Basket("me")
    basket.note = "x"
    assert basket == Basket("me", note="x")
    with pytest.raises(TypeError):
        hash(basket)


def test_a_record_takes_no_attribute_it_does_not_declare():
    with pytest.raises(AttributeError):
        Basket("me").colour = "red"  # type: ignore[attr-defined]
    assert not hasattr(Basket("me"), "__dict__")
    assert not hasattr(Point(1), "__dict__")


def test_a_default_that_is_made_is_made_anew_for_each_record():
    one, two = Basket("one"), Basket("two")
    one.add(1)
    assert (one.items, two.items) == ([1], [])
    assert one.place is not two.place


@pytest.mark.parametrize("items", [[], [1]])
def test_what_is_given_is_kept_even_if_it_is_empty(items: list[int]):
    assert Basket("me", items).items is items


@given(points | baskets, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_what_is_pickled_or_copied_comes_back_equal(original: object, protocol: int):
    for back in (
        pickle.loads(pickle.dumps(original, protocol)),
        copy.copy(original),
        copy.deepcopy(original),
    ):
        assert back == original
        assert type(back) is type(original)


@given(points, st.integers())
def test_changed_is_a_copy_with_some_fields_replaced(point: Point, x: int):
    other = replace_fields(point, x=x)
    assert other == Point(x, point.y, point.tags)
    assert replace_fields(other, x=point.x) == point


def test_changing_a_field_that_is_not_there_is_refused():
    with pytest.raises(TypeError):
        replace_fields(Point(1), z=1)


@pytest.mark.parametrize("arguments", [{}, {"x": 1, "z": 2}, {"y": 1}], ids=str)
def test_a_missing_or_unknown_field_is_refused(arguments: dict[str, int]):
    with pytest.raises(TypeError):
        Point(**arguments)  # type: ignore[arg-type]


def test_a_record_reads_like_the_call_that_makes_it():
    assert repr(Point(1, tags=("a",))) == "Point(x=1, y=0, tags=('a',))"
    assert eval(repr(Point(1, 2))) == Point(1, 2)
    assert repr(Empty()) == "Empty()"


def test_methods_properties_and_constructors_work_as_in_any_class():
    assert Point(1, 2).sum == 3
    assert Point.origin() == Point(0)
    assert Empty() == Empty()


def test_a_value_can_be_taken_apart_by_position():
    match Point(1, 2):
        case Point(x, y, _):
            assert (x, y) == (1, 2)
        case _:
            pytest.fail("did not match")


@given(points)
def test_the_fields_of_a_record_are_known_in_order(point: Point):
    assert fields_of(Point) == fields_of(point) == ("x", "y", "tags")
    assert as_dict(point) == {"x": point.x, "y": point.y, "tags": point.tags}
    assert Point(**as_dict(point)) == point


def test_the_first_objects_of_a_class_are_what_later_ones_are_and_refuse_the_same() -> None:
    @record
    class Fresh:
        x: int
        items: list[int] = default_factory(factory=list)
        note: str = "none"

    seen, refused = [], []
    for _ in range(2 * MADE_UNCOMPILED):
        seen.append(Fresh(1, note="n"))
        for arguments, named in ((), {}), ((1, [], "", 4), {}), ((1,), {"x": 2}), ((1,), {"y": 2}):
            with pytest.raises(TypeError) as raised:
                Fresh(*arguments, **named)  # type: ignore[arg-type]
            refused.append((arguments, str(raised.value)))
    assert all(each == seen[0] for each in seen)
    assert len({id(each.items) for each in seen}) == len(seen)
    assert len(set(map(str, refused))) == 4


# --- dataclasses ----------------------------------------------------------------------------------------------


def _declared(dataclass: Any, field: Any) -> list[type]:
    @dataclass
    class Plain:
        x: int
        y: list[int] = field(default_factory=list)
        z: int = field(default=3, compare=False)

    @dataclass(frozen=True, slots=True)
    class Frozen:
        x: int
        y: tuple[int, ...] = ()
        z: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "z", self.x + 1)

    @dataclass(frozen=True, slots=True, order=True)
    class Ordered:
        x: int
        y: int = 0
        z: int = 0

    @dataclass(slots=True, eq=False)
    class Same:
        x: int
        y: int = 0
        z: int = 0

    @dataclass(frozen=True)
    class Single:
        x: int
        y: int = field(default=0, init=False)
        z: int = field(default=0, init=False)

    return [Plain, Frozen, Ordered, Same, Single]


OURS, THEIRS = _declared(dataclass, field), _declared(dataclasses.dataclass, dataclasses.field)


@pytest.mark.parametrize("place", range(len(OURS)), ids=[kind.__name__ for kind in OURS])
def test_a_dataclass_of_ours_does_what_one_of_pythons_does(place: int) -> None:
    seen: list[list[object]] = []
    for kind, change in ((OURS[place], replace), (THEIRS[place], dataclasses.replace)):
        one, same, other = kind(1), kind(1), kind(2)
        by_name = {field.name: (field.init, field.default) for field in dataclasses.fields(kind)}
        changed_one = dataclasses.replace(one, x=5)
        assert repr(change(one, x=5)) == repr(changed_one)
        uncompared = copy.copy(one)
        object.__setattr__(uncompared, "z", 7)
        notes: list[object] = [
            one == uncompared,
            repr(one).partition(".")[2],
            one == same,
            one == other,
            one != other,
            by_name,
        ]
        notes += [dataclasses.asdict(one), changed_one.x, repr(copy.deepcopy(one)) == repr(one), kind.__match_args__]
        notes += [kind.__hash__ is None, hasattr(one, "__dict__"), kind.__name__, kind.__qualname__.rpartition(".")[2]]
        for attempt in ("hash(one) == hash(same)", "one < other", "setattr(one, 'x', 3)", "kind()", "kind(1, 2, 3, 4)"):
            try:
                notes.append(eval(attempt, {"one": one, "same": same, "other": other, "kind": kind}))
            except Exception as error:
                notes.append(type(error))
        seen.append(notes)
    assert seen[0] == seen[1]


def test_the_fields_of_a_subclass_are_found_where_they_were_declared() -> None:
    class Below(FrozenPoint):
        pass

    assert [field.name for field in dataclasses.fields(Below)] == ["x", "y"]
    assert dataclasses.is_dataclass(FrozenPoint) and dataclasses.fields(FrozenPoint) == dataclasses.fields(Below)


def test_a_frozen_dataclass_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(FrozenPoint(1, (2,)))) == FrozenPoint(1, (2,))


@dataclass(frozen=True, slots=True)
class FrozenPoint:
    x: int
    y: tuple[int, ...] = ()


class Note(NamedTuple):
    number: int
    text: str
    is_last: bool = False


def test_a_tuple_with_names_is_made_by_position_and_its_last_items_may_be_left_out():
    note = Note(1, "a")
    assert note == (1, "a", False) and (note.number, note.text, note.is_last) == note
    assert Note(1, "a", True).is_last and repr(note) == "Note(number=1, text='a', is_last=False)"
    assert pickle.loads(pickle.dumps(note)) == note and type(pickle.loads(pickle.dumps(note))) is Note
    match note:
        case Note(number=1, text=text):
            assert text == "a"
        case _:
            raise AssertionError


@pytest.mark.parametrize("items", [(), (1,), (1, "a", True, None)])
def test_a_tuple_with_too_few_or_too_many_items_is_refused(items: tuple[Any, ...]):
    with pytest.raises(TypeError, match="Note takes number, text, is_last, and was given"):
        Note(*items)


def test_a_tuple_with_names_takes_them_and_gives_them_back():
    note = Note(text="a", number=1)
    assert note == Note(1, "a") == Note(1, text="a", is_last=False)
    assert note._asdict() == {"number": 1, "text": "a", "is_last": False}
    assert note._replace(is_last=True) == (1, "a", True) and note == (1, "a", False)
    for items, named in ((), {"number": 1}), ((1,), {"number": 1, "text": "a"}), ((1, "a"), {"other": 2}):
        with pytest.raises(TypeError, match="Note takes number, text, is_last"):
            Note(*items, **named)  # type: ignore[arg-type]
