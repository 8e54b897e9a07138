"""Records: what `dataclasses` would have given, without its price at start-up."""

import copy
import pickle
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.value_types import as_dict, entity, field, fields_of, record, replace, value


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
    items: list[int] = field(default_factory=list)
    place: Point = field(default_factory=Point.origin)
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


def test_a_value_cannot_be_changed():
    point = Point(1)
    for name in ("x", "y", "tags", "brand_new", "__class__"):
        with pytest.raises(AttributeError):
            setattr(point, name, 2)
        with pytest.raises(AttributeError):
            delattr(point, name)
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


def test_an_empty_argument_replaces_the_default():
    for items in ([], [1]):
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
    other = replace(point, x=x)
    assert other == Point(x, point.y, point.tags)
    assert replace(other, x=point.x) == point


def test_changing_a_field_that_is_not_there_is_refused():
    with pytest.raises(TypeError):
        replace(Point(1), z=1)


def test_a_missing_or_unknown_field_is_refused():
    for arguments in ({}, {"x": 1, "z": 2}, {"y": 1}):
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


def test_an_entity_is_equal_only_to_itself_and_can_be_referenced_weakly() -> None:
    @entity
    class Server:
        name: str

    @entity(frozen=True)
    class Sealed:
        name: str
        length: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", len(self.name))

    for kind in (Server, Sealed):
        one = kind("a")
        assert one == one and one != kind("a") and len({one, kind("a")}) == 2
        assert weakref.ref(one)() is one
    Server("a").name = "b"
    with pytest.raises(AttributeError):
        Sealed("a").name = "b"  # type: ignore[misc]
    assert replace(Sealed("a"), name="abc").length == 3


def test_a_field_can_be_left_out_of_equality() -> None:
    @value
    class Caller:
        name: str
        via: str = field(default="", compare=False)

    assert Caller("a", "HTTP") == Caller("a") and hash(Caller("a", "HTTP")) == hash(Caller("a"))
