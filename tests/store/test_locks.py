"""Locks: never more holders than places, dead ones replaced at once, and a conflict that says whom one waits for."""

import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from shotclock.core.limits import WallTime
from shotclock.store.idempotency import Lock
from shotclock.store.store import Store
from shotclock.supervise.kernel import is_alive, this_process
from tests.store.work import NOW, all_alive, holder, in_children, wall_now

ACQUIRED_WITHIN_S = 50


def acquire(store: Store, token: str, name: str = "l", **given: Any) -> Lock | None:
    asked: dict[str, Any] = {"holder": holder(), "label": "", "now": NOW, "is_alive": all_alive, **given}
    return store.locks.acquire(name, token=token, **asked)


def test_a_conflict_names_the_oldest_living_holder(store: Store):
    acquire(store, "a", slots=2, holder=holder(1), label="import x.csv")
    acquire(store, "b", slots=2, holder=holder(2), now=NOW + 10)
    found = acquire(store, "c", slots=2, holder=holder(3), now=NOW + 500)
    assert found is not None
    assert (found.holder.pid, found.label, found.acquired_at) == (1, "import x.csv", NOW)
    assert len(store.locks.list("l")) == 2


def test_a_dead_holder_is_replaced(store: Store):
    acquire(store, "a", holder=holder(1), label="was here")
    found = acquire(store, "b", holder=holder(2), is_alive=lambda who: who != holder(1))
    assert found is None
    assert [lock.token for lock in store.locks.list()] == ["b"]
    assert not store.locks.release("a")


def test_with_more_dead_holders_than_are_needed_all_of_them_go_and_the_living_stay(store: Store):
    for number in range(1, 4):
        acquire(store, str(number), slots=3, holder=holder(number))
    found = acquire(store, "new", slots=3, holder=holder(9), is_alive=lambda who: who in (holder(2), holder(9)))
    assert found is None
    assert [lock.token for lock in store.locks.list("l")] == ["2", "new"]


def test_releasing_is_idempotent_and_only_concerns_its_own_token(store: Store):
    acquire(store, "a")
    acquire(store, "b", name="other")
    assert store.locks.release("a") and not store.locks.release("a") and not store.locks.release("never")
    assert [lock.token for lock in store.locks.list()] == ["b"]


def test_the_same_process_gets_no_second_place_under_another_token(store: Store):
    acquire(store, "a")
    assert isinstance(acquire(store, "b"), Lock)


def test_asking_again_with_the_same_token_keeps_the_place_and_its_age(store: Store):
    acquire(store, "a")
    assert acquire(store, "a", now=NOW + 100) is None
    assert [lock.acquired_at for lock in store.locks.list()] == [NOW]
    assert isinstance(acquire(store, "b"), Lock)


def test_a_clock_that_is_set_back_prolongs_no_lease_beyond_what_was_left_of_it_when_the_store_saw_it_last(
    store: Store,
):
    hour_ms = 3_600_000
    acquire(store, "a", lease_ms=100_000)
    acquire(store, "other", name="m", lease_ms=50_000, now=NOW + 60_000)
    back = NOW - hour_ms
    assert isinstance(acquire(store, "b", now=back), Lock)
    assert [lock.expires_at for lock in store.locks.list()] == [back + 40_000, back + 50_000]
    assert isinstance(acquire(store, "b", now=back + 39_999), Lock), "moved once"
    assert acquire(store, "b", now=back + 40_000) is None


def test_a_lease_that_ran_out_may_be_taken_over_from_the_living_unless_it_was_renewed(store: Store):
    acquire(store, "a", lease_ms=100)
    assert isinstance(acquire(store, "b", now=NOW + 99), Lock)
    acquire(store, "a", lease_ms=100, now=NOW + 99)
    assert isinstance(acquire(store, "b", now=NOW + 198), Lock)
    assert acquire(store, "b", now=NOW + 199) is None
    assert [lock.token for lock in store.locks.list()] == ["b"]
    assert isinstance(acquire(store, "a", now=NOW + 200), Lock)


def test_a_token_holds_one_lock_only(store: Store):
    acquire(store, "a")
    with pytest.raises(ValueError, match="holds another lock"):
        acquire(store, "a", name="other")
    with pytest.raises(ValueError, match="holds another lock"):
        acquire(store, "a", holder=holder(2))
    assert len(store.locks.list()) == 1


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"slots": -1}, {"lease_ms": -1}, {"token": ""}])
def test_nonsense_is_refused(store: Store, wrong: dict[str, Any]):
    with pytest.raises(ValueError):
        acquire(store, **{"token": "t", **wrong})
    assert not store.locks.list()


def test_names_and_labels_may_hold_anything(store: Store):
    for name in ("", "device:\udcff", "\0", "a" * 10_000, "'; DROP TABLE locks; --"):
        assert acquire(store, f"t{name}", name=name, label=name) is None
        (lock,) = store.locks.list(name)
        assert lock.name == lock.label == name and lock.token == f"t{name}"


# --- against a model ------------------------------------------------------------------------------

NAMES = ("x", "y")


class LocksAgainstAModel(RuleBasedStateMachine):
    tokens = Bundle("tokens")

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.store = Store.open(Path(self.folder) / "home")
        self.now = NOW
        self.dead: set[int] = set()
        self.next_token = 0
        self.model: list[Lock] = []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    def lives(self, who: Any) -> bool:
        return who.pid not in self.dead

    @rule(ms=st.integers(0, 50))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(pid=st.integers(1, 4))
    def dies(self, pid: int) -> None:
        self.dead.add(pid)

    @rule(
        target=tokens,
        name=st.sampled_from(NAMES),
        slots=st.integers(1, 3),
        pid=st.integers(1, 6),
        lease_ms=st.none() | st.integers(0, 60),
    )
    def acquires(self, name: str, slots: int, pid: int, lease_ms: int | None) -> Any:
        if pid in self.dead:
            return multiple()
        self.next_token += 1
        token = f"t{self.next_token}"
        there = [lock for lock in self.model if lock.name == name]
        taken = [lock for lock in there if self.lives(lock.holder) and not self.expired(lock)]
        found = self.store.locks.acquire(
            name, slots=slots, holder=holder(pid), label=token, token=token, now=self.now, is_alive=self.lives,
            lease_ms=lease_ms,
        )  # fmt: skip
        if len(taken) >= slots:
            assert found == taken[0]
            return multiple()
        expires = None if lease_ms is None else self.now + lease_ms
        lock = Lock(name, token, holder(pid), token, self.now, expires)
        assert found is None
        self.model = [other for other in self.model if other.name != name or other in taken] + [lock]
        return token

    @rule(token=consumes(tokens))
    def releases(self, token: str) -> None:
        held = [lock for lock in self.model if lock.token == token]
        assert self.store.locks.release(token) == bool(held)
        self.model = [lock for lock in self.model if lock.token != token]

    @rule()
    def is_opened_anew(self) -> None:
        self.store.close()
        self.store = Store.open(Path(self.folder) / "home")

    @invariant()
    def the_store_says_what_the_model_says(self) -> None:
        if hasattr(self, "store"):
            assert list(self.store.locks.list()) == self.model

    def expired(self, lock: Lock) -> bool:
        return lock.expires_at is not None and lock.expires_at <= self.now


LocksAgainstAModel.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestLocksAgainstAModel = pytest.mark.slow(LocksAgainstAModel.TestCase)


# --- for real -------------------------------------------------------------------------------------


def contend(number: int, home: Path, times: int) -> int:
    """Takes the lock that often. Inside, nobody else may be: a file that must not exist yet is the witness."""
    me, witness, conflicts = this_process(), home / "inside", 0
    with Store.open(home) as store:
        for round in range(times):
            token = f"{number}.{round}"
            give_up_at = time.monotonic() + ACQUIRED_WITHIN_S
            while store.locks.acquire("l", holder=me, label="", token=token, now=wall_now(), is_alive=is_alive):
                conflicts += 1
                assert time.monotonic() < give_up_at, f"round {round}: never got it"
                time.sleep(random.uniform(0.001, 0.015))  # nineteen who ask all the time would be a test of the cores
            os.close(os.open(witness, os.O_CREAT | os.O_EXCL))
            count = int((home / "count").read_text() or 0)
            (home / "count").write_text(str(count + 1))
            os.unlink(witness)
            assert store.locks.release(token)
    return conflicts


@pytest.mark.slow
@pytest.mark.parametrize("times", [25, pytest.param(100, marks=pytest.mark.soak)])
def test_twenty_processes_take_one_lock_many_times_each_and_are_never_two_at_once(store: Store, times: int):
    (store.home / "count").write_text("")
    conflicts = in_children(20, contend, store.home, times)
    assert (store.home / "count").read_text() == str(20 * times)
    assert sum(conflicts) > 0
    assert store.locks.list() == ()


def die_holding(number: int, home: Path, rounds: int) -> int:
    """Forks children that take the lock and are killed holding it: each must be taken over from, by exactly one."""
    taken = 0
    for round in range(rounds):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with Store.open(home) as store:
                give_up_at = time.monotonic() + ACQUIRED_WITHIN_S
                while time.monotonic() < give_up_at:
                    found = store.locks.acquire(
                        "l",
                        holder=this_process(),
                        label="",
                        token=f"{number}.{round}",
                        now=wall_now(),
                        is_alive=is_alive,
                    )
                    if found is None:
                        os.close(os.open(home / "inside", os.O_CREAT | os.O_EXCL))
                        os.unlink(home / "inside")
                        os.write(writing, b"+")
                        os.kill(os.getpid(), 9)
                    time.sleep(0.001)
            os._exit(1)
        os.close(writing)
        taken += os.read(reading, 1) == b"+"
        os.close(reading)
        os.waitpid(child, 0)
    return taken


@pytest.mark.slow
def test_a_lock_whose_holders_are_all_killed_goes_from_one_to_the_next_and_is_never_stuck(store: Store):
    assert in_children(6, die_holding, store.home, 5) == [5] * 6
    (left,) = store.locks.list("l")
    assert not is_alive(left.holder)


def test_the_time_of_a_lock_is_the_time_it_was_given(store: Store):
    now: WallTime = wall_now()
    assert acquire(store, "a", now=now) is None
    assert [lock.acquired_at for lock in store.locks.list()] == [now]
