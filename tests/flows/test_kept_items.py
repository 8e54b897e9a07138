"""Records of finished items are found again by the values of the items."""

from typing import Any

from shotclock.flows.run._kept_items import digest_of, match_items, merge_items


def done(item: Any, number: int = 0) -> dict[str, Any]:
    return {"item": digest_of(item), "status": "succeeded", "output": f"{item}@{number}"}


def found(records: list[dict[str, Any]], items: list[Any]) -> dict[int, str]:
    matched = match_items(records, [digest_of(item) for item in items])
    return {number: record["output"] for number, record in sorted(matched.items())}


def test_an_item_has_its_own_record_before_that_of_an_equal_one() -> None:
    records = [done("a", 0), {}, done("b", 2), done("b", 3)]
    assert found(records, ["a", "x", "b", "b"]) == {0: "a@0", 2: "b@2", 3: "b@3"}
    assert found(records, ["b", "b", "b", "a"]) == {0: "b@3", 2: "b@2", 3: "a@0"}
    assert found(records, ["b"]) == {0: "b@2"}
    assert found([done("1")], [1]) == {} and found([done({"n": [1]})], [2, {"n": [1]}]) == {1: "{'n': [1]}@0"}
    assert found([], ["a"]) == {}


def test_a_record_of_an_item_that_had_not_succeeded_counts_only_in_its_own_place() -> None:
    running = {"item": digest_of("a"), "status": "running", "output": "a"}
    assert found([running], ["a"]) == {0: "a"} and found([running], ["b", "a"]) == {}


def test_a_record_whose_place_another_item_takes_stays_behind_the_others() -> None:
    kept = [done("a", 0), {}, done("b", 2)]
    begun = {0: done("new", 0), 3: done("more", 3)}
    merged = merge_items(kept, begun)
    assert merged == [begun[0], {}, kept[2], begun[3], kept[0]]
    assert merge_items(merged, begun) == merged, "a second process that dies loses nothing"
    assert merge_items([], {}) == [] and merge_items(kept, {}) == kept
