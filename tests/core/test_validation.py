"""Parts of a file: declared as classes, checked strictly, with every problem and its path."""

from typing import Annotated, Any, Literal

import pytest

from shotclock.core.validation import After, Before, Limits, OneOf, Part, ValidationError, field, json_schema_of


def _positive(number: int) -> int:
    if number <= 0:
        raise ValueError("must be above zero")
    return number


def _split(written: Any) -> Any:
    return written.split() if isinstance(written, str) else written


class Leaf(Part):
    """The least."""

    size: int = field(ge=0, le=10)
    name: str = field(default="x", keys=("name", "title"), min_length=1)


class Branch(Part):
    kind: Literal["branch"]
    leaf: Leaf | bool | None = None
    leaves: list[Leaf] = field(default=[])
    marks: dict[str, str | int | float | bool | None] = field(default={})
    count: Annotated[int, After(_positive)] = 1
    words: Annotated[list[str], Before(lambda written: written.split() if isinstance(written, str) else written)] = (
        field(default=[])
    )

    def check_together(self) -> None:
        if self.count > 1 and not self.leaves:
            raise ValueError("nothing to count")


class Stone(Part):
    kind: Literal["stone"]


Name = Annotated[str, Limits(pattern="^[a-z]+$")]


class Tree(Part):
    parts: dict[Name, Annotated[Branch | Stone, OneOf("kind", {"branch": Branch, "stone": Stone})]]


def problems(part: type[Part], written: Any) -> dict[tuple[Any, ...], str]:
    with pytest.raises(ValidationError) as refused:
        part.model_validate(written)
    return {each["loc"]: each["type"] for each in refused.value.errors()}


def test_a_part_has_what_was_written_and_the_defaults_of_the_rest() -> None:
    leaf = Leaf.model_validate({"size": 3, "title": "y"})
    assert (leaf.size, leaf.name) == (3, "y")
    assert leaf.model_dump() == {"size": 3, "name": "y"}
    assert Leaf(size=1) == Leaf.model_validate({"size": 1})
    assert Leaf(size=1).model_dump(exclude_unset=True) == {"size": 1}


def test_a_part_cannot_be_changed_and_defaults_are_not_shared() -> None:
    one, other = Branch.model_validate({"kind": "branch"}), Branch.model_validate({"kind": "branch"})
    with pytest.raises(AttributeError):
        one.count = 3
    assert one.leaves is not other.leaves and one == other


def test_a_number_is_nothing_else() -> None:
    for written in [True, 1.0, "1", None, [1]]:
        assert problems(Leaf, {"size": written}) == {("size",): "int_type"}


def test_every_problem_has_its_path() -> None:
    written = {
        "kind": "branch",
        "leaf": {"size": 11},
        "leaves": [{"size": 1}, {"nmae": "x"}, 3],
        "marks": {"a": [1]},
        "count": 0,
        "words": 7,
        "other": 1,
    }
    assert problems(Branch, written) == {
        ("leaf", "size"): "less_than_equal",
        ("leaf",): "bool_type",
        ("leaves", 1, "size"): "missing",
        ("leaves", 1, "nmae"): "extra_forbidden",
        ("leaves", 2): "model_type",
        ("marks", "a"): "bool_type",  # the last of four
        ("count",): "value_error",
        ("words",): "list_type",
        ("other",): "extra_forbidden",
    }


def test_two_names_of_one_key_are_one_too_many() -> None:
    assert problems(Leaf, {"size": 1, "name": "a", "title": "b"}) == {("title",): "extra_forbidden"}


def test_a_part_is_chosen_by_what_its_key_says() -> None:
    tree = Tree.model_validate({"parts": {"a": {"kind": "stone"}, "b": {"kind": "branch", "words": "x y"}}})
    assert isinstance(tree.parts["a"], Stone) and isinstance(tree.parts["b"], Branch)
    assert tree.parts["b"].words == ["x", "y"]
    written = {"parts": {"A": {"kind": "stone"}, "b": {"kind": "leaf"}, "c": {}, "d": 3, "e": {"kind": ["stone"]}}}
    assert problems(Tree, written) == {
        ("parts", "A"): "invalid_key",
        ("parts", "b"): "union_tag_invalid",
        ("parts", "c"): "union_tag_not_found",
        ("parts", "d"): "model_attributes_type",
        ("parts", "e"): "union_tag_invalid",
    }


def test_fields_are_looked_at_together_once_each_is_right() -> None:
    assert problems(Branch, {"kind": "branch", "count": 2}) == {(): "value_error"}


def test_the_json_schema_says_the_same() -> None:
    schema = json_schema_of(Tree)
    assert schema["$defs"]["Leaf"] == {
        "additionalProperties": False,
        "description": "The least.",
        "properties": {
            "size": {"type": "integer", "minimum": 0, "maximum": 10, "title": "Size"},
            "name": {"type": "string", "minLength": 1, "default": "x", "title": "Name"},
        },
        "required": ["size"],
        "type": "object",
    }
    assert schema["properties"]["parts"]["patternProperties"]["^[a-z]+$"]["discriminator"]["propertyName"] == "kind"
