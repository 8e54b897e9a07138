"""Checkpoints: the last one saved, whole, as it was given."""

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shotclock.store import _database as database
from shotclock.store.store import Store
from tests.store.work import NOW, all_alive, new_job

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# As they come from file names and arguments: undecodable bytes are lone surrogates, and NUL is a character.
any_text = st.text() | st.text(st.sampled_from("aü\0\udcff\ud800'\U0001f600"))


@pytest.fixture(scope="module")
def shared() -> Any:
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "home") as store:
        yield store


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(key=any_text, fingerprint=any_text, state=json_values)
def test_what_is_saved_is_loaded_exactly(shared: Store, key: str, fingerprint: str, state: Any):
    shared.checkpoints.save(key, fingerprint, state, NOW)
    found = shared.checkpoints.load(key)
    assert (found.key, found.fingerprint, found.state, found.saved_at) == (key, fingerprint, state, NOW)
    assert shared.checkpoints.clear(key) and not shared.checkpoints.clear(key)
    assert shared.checkpoints.load(key) is None


def test_a_later_one_takes_the_place_of_the_earlier(store: Store):
    store.checkpoints.save("k", "f", [1], NOW)
    store.checkpoints.save("k", "g", [2], NOW + 5)
    found = store.checkpoints.load("k")
    assert (found.fingerprint, found.state, found.saved_at) == ("g", [2], NOW + 5)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("state", [math.nan, math.inf, {1, 2}, b"x", object(), "nested", {"a": {"b": math.nan}}])
def test_what_is_no_json_is_refused_and_the_one_before_stays(store: Store, state: object):
    if state == "nested":
        state = nested(100_000)
    store.checkpoints.save("k", "f", "before", NOW)
    with pytest.raises((ValueError, TypeError)):
        store.checkpoints.save("k", "f", state, NOW)
    assert store.checkpoints.load("k").state == "before"


def test_what_is_too_long_is_refused_before_it_keeps_anybody_waiting(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(database, "LONGEST_JSON", 100)
    with pytest.raises(ValueError, match="too many"):
        store.checkpoints.save("k", "f", "x" * 99, NOW)
    store.checkpoints.save("k", "f", "x" * 98, NOW)


def test_old_ones_are_forgotten_the_oldest_first_but_not_those_of_active_jobs(store: Store):
    store.jobs.attach_or_create(new_job(key="busy"), all_alive)
    for n, key in enumerate(["busy", "a", "b", "c"]):
        store.checkpoints.save(key, "f", n, NOW + n)
    assert store.checkpoints.forget_saved_before(NOW + 3, limit=1) == 1
    assert store.checkpoints.load("a") is None and store.checkpoints.load("b") is not None
    assert store.checkpoints.forget_saved_before(NOW + 3) == 1
    assert store.checkpoints.forget_saved_before(NOW + 3) == 0
    assert store.checkpoints.load("c") is not None and store.checkpoints.load("busy") is not None
    store.jobs.finish("job1", {}, NOW)
    assert store.checkpoints.forget_saved_before(NOW + 3) == 1
