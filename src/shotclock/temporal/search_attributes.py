"""What runs are found by in Temporal: their names, how they stand, the steps they are in, the clock that ended them.

Only what the namespace has registered may be set, or the run fails. So whoever starts a run looks, and tells its
workflow which there are. Pure: the workflow imports it.

A namespace is given them once:

    for name in ShotclockRun ShotclockStatus ShotclockClock ShotclockEnding; do
      temporal operator search-attribute create --namespace default --name $name --type Keyword
    done
    temporal operator search-attribute create --namespace default --name ShotclockStep --type KeywordList
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from temporalio.common import SearchAttributeKey, SearchAttributePair, SearchAttributeUpdate, TypedSearchAttributes

RUN = SearchAttributeKey.for_keyword("ShotclockRun")
STATUS = SearchAttributeKey.for_keyword("ShotclockStatus")
STEP = SearchAttributeKey.for_keyword_list("ShotclockStep")
CLOCK = SearchAttributeKey.for_keyword("ShotclockClock")
ENDING = SearchAttributeKey.for_keyword("ShotclockEnding")
KEYS: tuple[SearchAttributeKey[Any], ...] = (RUN, STATUS, STEP, CLOCK, ENDING)
TYPES = {key.name: "KeywordList" if key is STEP else "Keyword" for key in KEYS}
# Of a value, and of the steps that run at once: an index has limits of its own.
MOST_LETTERS = 200
MOST_STEPS = 20

WAITING = "waiting"
"""The status of a run that asks people."""


def describe_beginning(name: str, registered: Collection[str]) -> TypedSearchAttributes:
    """Return what a run is started with."""
    values: dict[SearchAttributeKey[Any], str] = {RUN: name[:MOST_LETTERS], STATUS: "running"}
    return TypedSearchAttributes(
        [SearchAttributePair(key, value) for key, value in values.items() if key.name in registered]
    )


def describe_progress(steps: Iterable[str], *, is_waiting: bool) -> dict[SearchAttributeKey[Any], Any]:
    """Return what a run has while it is under way."""
    shown = [name[:MOST_LETTERS] for name in steps][:MOST_STEPS]
    return {STATUS: WAITING if is_waiting else "running", STEP: shown}


def describe_end(
    envelope: Mapping[str, Any], errors: Iterable[Mapping[str, Any] | None]
) -> dict[SearchAttributeKey[Any], Any]:
    """Return what a run has when it has ended: its code, and the clock that has ended it or the first of its steps
    (`errors`) that one has ended."""
    own: Mapping[str, Any] | None = envelope["error"]
    clocks = [error["context"]["clock"] for error in (own, *errors) if error and "clock" in error.get("context", {})]
    values: dict[SearchAttributeKey[Any], Any] = {
        STATUS: "succeeded" if own is None else "failed",
        STEP: [],
        ENDING: "OK" if own is None else own["code"],
    }
    if clocks:
        values[CLOCK] = f"{clocks[0]['kind']} of {clocks[0]['owner']}"[:MOST_LETTERS]
    return values


def list_updates(
    values: Mapping[SearchAttributeKey[Any], Any], registered: Collection[str], shown: Mapping[str, Any]
) -> list[SearchAttributeUpdate[Any]]:
    """Return the changes from what is shown to these values, of those that are registered."""
    return [
        key.value_set(value) if value else key.value_unset()
        for key, value in values.items()
        if key.name in registered and shown.get(key.name) != value
    ]
