"""Idempotency keys: one runs, the others get its answer, and nothing runs twice because somebody died."""

from pathlib import Path

from shotclock.store.idempotency import CallInProgress, Finished, Fresh, Interrupted, Mismatch
from shotclock.store.store import Store
from tests.store.work import NOW, all_alive, all_dead, holder, in_children

ENVELOPE = {"ok": True, "data": {"x": [1, "ü"]}}


def test_the_first_runs_repeats_wait_and_then_get_its_answer(store: Store):
    begin = store.idempotency.begin
    assert begin("app", "k", "d", holder(1), NOW, all_alive) == Fresh()
    assert begin("app", "k", "d", holder(2), NOW + 1, all_alive) == CallInProgress()
    assert store.idempotency.finish("app", "k", ENVELOPE, NOW + 2)
    assert not store.idempotency.finish("app", "k", {"ok": False}, NOW + 3)
    assert begin("app", "k", "d", holder(2), NOW + 4, all_dead) == Finished(ENVELOPE, NOW + 2)


def test_keys_of_different_scopes_have_nothing_to_do_with_each_other(store: Store):
    for scope, key in (("a", "k"), ("b", "k"), ("a", "l"), ("", "ak"), ("\udcff", "k")):
        assert store.idempotency.begin(scope, key, "d", holder(), NOW, all_alive) == Fresh()


def test_other_arguments_under_the_same_key_are_a_mismatch_whatever_became_of_the_first(store: Store):
    store.idempotency.begin("a", "k", "d", holder(1), NOW, all_alive)
    mismatch = Mismatch(NOW)
    assert store.idempotency.begin("a", "k", "other", holder(2), NOW, all_alive) == mismatch
    assert store.idempotency.begin("a", "k", "other", holder(2), NOW, all_dead) == mismatch
    assert store.idempotency.begin("a", "k", "d", holder(2), NOW + 1, all_dead) == Interrupted(NOW)
    assert store.idempotency.begin("a", "k", "other", holder(2), NOW, all_dead) == mismatch
    store.idempotency.finish("a", "k", ENVELOPE, NOW)
    assert store.idempotency.begin("a", "k", "other", holder(2), NOW, all_dead) == mismatch


def test_after_a_death_nobody_runs_it_again_until_somebody_settles_it(store: Store):
    store.idempotency.begin("a", "k", "d", holder(1), NOW, all_alive)
    interrupted = Interrupted(NOW)
    assert store.idempotency.begin("a", "k", "d", holder(2), NOW + 5, all_dead) == interrupted
    # Whoever asks meanwhile hears the same, even if a new process has the pid of the dead one.
    assert store.idempotency.begin("a", "k", "d", holder(3), NOW + 6, all_alive) == interrupted
    assert store.idempotency.finish("a", "k", {"ok": False}, NOW + 7)
    assert store.idempotency.begin("a", "k", "d", holder(3), NOW + 8, all_alive) == Finished({"ok": False}, NOW + 7)


def test_what_may_be_repeated_is_dropped_and_runs_anew(store: Store):
    store.idempotency.begin("a", "k", "d", holder(1), NOW, all_alive)
    store.idempotency.begin("a", "k", "d", holder(2), NOW, all_dead)
    assert store.idempotency.drop("a", "k") and not store.idempotency.drop("a", "k")
    assert store.idempotency.begin("a", "k", "d", holder(2), NOW, all_alive) == Fresh()


def test_finishing_what_never_began_is_no_answer(store: Store):
    assert not store.idempotency.finish("a", "k", ENVELOPE, NOW)
    assert store.idempotency.begin("a", "k", "d", holder(), NOW, all_alive) == Fresh()


def test_old_ones_are_forgotten_but_not_what_still_runs(store: Store):
    begin = store.idempotency.begin
    for n, key in enumerate(["finished", "running", "dead", "young"]):
        begin("a", key, "d", holder(n), NOW + n, all_alive)
    store.idempotency.finish("a", "finished", ENVELOPE, NOW)
    lives = {holder(1), holder(3)}.__contains__
    assert store.idempotency.forget_begun_before(NOW + 3, lives) == 2
    assert store.idempotency.forget_begun_before(NOW + 3, lives) == 0
    assert isinstance(begin("a", "running", "d", holder(9), NOW, lives), CallInProgress)
    assert isinstance(begin("a", "young", "d", holder(9), NOW, lives), CallInProgress)
    assert begin("a", "finished", "d", holder(9), NOW, lives) == Fresh()
    assert begin("a", "dead", "d", holder(9), NOW, lives) == Fresh()


def begin_one(number: int, home: Path) -> str:
    with Store.open(home) as store:
        return type(store.idempotency.begin("a", "k", "d", holder(number), NOW, all_alive)).__name__


def test_of_twenty_processes_that_begin_at_once_one_runs(store: Store):
    answers = in_children(20, begin_one, store.home)
    assert sorted(answers) == ["CallInProgress"] * 19 + ["Fresh"]
