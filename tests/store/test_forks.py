"""A store and forks: both sides go on with connections of their own, and nothing that was committed is lost."""

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shotclock.store import _database as database
from shotclock.store.home import StoreUnusable
from shotclock.store.store import Store
from tests.store.work import NOW, appears, in_children

pytestmark = pytest.mark.usefixtures("no_survivors")

JOIN_WITHIN_S = 30


def fork(function: Callable[[], object]) -> tuple[int, int]:
    """A bare fork, as a program would make it. Its pid, and a pipe with what the function returned or raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            said = str(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    return child, reading


def heard(forked: tuple[int, int]) -> str:
    child, reading = forked
    answered, _, _ = select.select([reading], [], [], JOIN_WITHIN_S)
    if not answered:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)  # it answers last, or was killed
    said = os.read(reading, 65536).decode()  # not to the end: its own children may hold the pipe
    os.close(reading)
    return said


def come_and_go(_: int, home: Path) -> None:
    with Store.open(home) as store:
        store.checkpoints.load("k")


def test_parent_and_child_both_go_on_with_the_store_they_had(store: Store):
    store.checkpoints.save("k", "f", "before", NOW)

    def child() -> object:
        found = store.checkpoints.load("k").state
        store.checkpoints.save("child", "f", 1, NOW)
        return found

    assert heard(fork(child)) == "before"
    assert store.checkpoints.load("child").state == 1
    store.checkpoints.save("k", "f", "after", NOW)


def test_the_connection_is_never_the_same_on_both_sides(store: Store):
    with store._database.read() as connection:
        before = id(connection)
        assert before
    forked = fork(lambda: store._database._connection is None)
    assert store._database._connection is None
    assert heard(forked) == "True"


@pytest.mark.parametrize("anew", [False, True])
def test_what_a_child_commits_survives_the_end_of_its_parent_and_the_visit_of_a_stranger(home: Path, anew: bool):
    """With a connection that was open over the fork, the child's last commit is gone: SQLite believes in locks that
    only the parent had, and the stranger, thinking itself alone, removes the log that the child goes on writing."""

    def parent() -> None:
        store = Store.open(home)
        store.checkpoints.save("k", "f", 0, NOW)
        if os.fork() == 0:
            try:
                mine = Store.open(home) if anew else store
                mine.checkpoints.save("k", "f", 1, NOW)
                (home / "child is there").touch()
                appears(home / "stranger was there")
                mine.checkpoints.save("k", "f", 2, NOW)
                (home / "child is done").touch()
            finally:
                os._exit(0)
        appears(home / "child is there")

    assert heard(fork(parent)) == "None"
    in_children(1, come_and_go, home)
    (home / "stranger was there").touch()
    appears(home / "child is done")
    with Store.open(home) as store:
        assert store.checkpoints.load("k").state == 2


def test_a_fork_from_inside_a_transaction_leaves_the_child_without_the_store_and_the_parent_unharmed(store: Store):
    with store._database.write() as connection:
        connection.execute("INSERT INTO checkpoints VALUES ('k', 'f', '1', 1)")
        uses = fork(lambda: store.checkpoints.load("k"))
        opens = fork(lambda: Store.open(store.home))
        elsewhere = fork(lambda: Store.open(store.home / "other").path.name)
        said = heard(uses), heard(opens), heard(elsewhere)
    assert said[0].startswith("StoreUnusable") and "forked" in said[0]
    assert said[1].startswith("StoreUnusable") and "forked" in said[1]
    assert said[2] == "shotclock.db"
    assert store.checkpoints.load("k").state == 1


def test_a_fork_waits_for_a_transaction_of_another_thread_but_not_for_ever(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(database, "FORK_WAIT_S", 0.1)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store._database.write() as connection:
            entered.set()
            leave.wait(JOIN_WITHIN_S)
            connection.execute("INSERT INTO checkpoints VALUES ('k', 'f', '1', 1)")

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(JOIN_WITHIN_S)
    forked = fork(lambda: store.checkpoints.load("k"))
    leave.set()
    thread.join(JOIN_WITHIN_S)
    assert heard(forked).startswith("StoreUnusable")
    assert store.checkpoints.load("k").state == 1


@pytest.mark.slow
def test_threads_that_write_while_others_fork_lose_nothing(store: Store):
    stop = threading.Event()
    counts = [0, 0]
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            while not stop.is_set():
                store.checkpoints.save(f"k{number}", "f", counts[number] + 1, NOW)
                counts[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for round in range(20):
            assert heard(fork(lambda: store.checkpoints.save(f"c{round}", "f", round, NOW))) == "None"  # noqa: B023
    finally:
        stop.set()
        for thread in threads:
            thread.join(JOIN_WITHIN_S)
    assert not failures
    assert [store.checkpoints.load(f"k{n}").state for n in range(2)] == counts
    assert [store.checkpoints.load(f"c{n}").state for n in range(20)] == list(range(20))


def test_a_store_that_was_closed_stays_closed_in_a_child(store: Store):
    store.close()
    assert heard(fork(lambda: store.checkpoints.load("k"))).startswith(StoreUnusable.__name__)
