"""The file: opened by many at once, created once, never used when it is wrong, never held for long."""

import hashlib
import os
import shutil
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import pytest

from shotclock.store import _database as database
from shotclock.store._schema import SCHEMA, VERSION
from shotclock.store.home import ATTEMPT_MS, StoreBusy, StoreUnusable
from shotclock.store.store import Store
from tests.store.work import NOW, all_alive, appears, holder, in_children, new_job

MOUNT_WITHIN_S = 30
JOIN_WITHIN_S = 30


def raw(home: Path) -> sqlite3.Connection:
    return sqlite3.connect(home / "shotclock.db", isolation_level=None, timeout=5)


def pragma(home: Path, name: str) -> object:
    connection = raw(home)
    try:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]
    finally:
        connection.close()


# --- opening --------------------------------------------------------------------------------------


def open_and_write(number: int, home: Path) -> int:
    with Store.open(home) as store:
        store.checkpoints.save(f"k{number}", "f", number, NOW)
    # The last one to close removes the log: opening again meets that, too.
    with Store.open(home) as store:
        return store.checkpoints.load(f"k{number}").state


@pytest.mark.slow
@pytest.mark.parametrize("round", range(2))
def test_twenty_processes_open_a_store_that_is_not_there_yet_and_all_succeed(home: Path, round: int):
    assert in_children(20, open_and_write, home) == list(range(20))
    assert pragma(home, "user_version") == VERSION
    assert pragma(home, "integrity_check") == "ok"


def test_the_writer_waits_for_the_disk_and_nobody_waits_for_a_reader(store: Store):
    with store._database.write() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert connection.execute("PRAGMA foreign_keys").fetchone()[0] == 1
        assert connection.execute("PRAGMA busy_timeout").fetchone()[0] == ATTEMPT_MS
    with store._database.write(durable=False) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 1  # NORMAL
    with store._database.write() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_a_store_can_be_closed_twice_and_is_not_used_after(store: Store):
    store.close()
    store.close()
    with pytest.raises(StoreUnusable, match="was closed"):
        store.jobs.get("x")


def test_two_stores_of_one_process_on_one_file_see_each_other(store: Store):
    with Store.open(store.home) as other:
        other.checkpoints.save("k", "f", 1, NOW)
        assert store.checkpoints.load("k").state == 1
    # Closing one must not drop the other's locks: a third, who comes and goes, would remove the log under us.
    store.checkpoints.save("k", "f", 2, NOW)
    assert in_children(1, open_and_write, store.home) == [0]
    assert store.checkpoints.load("k").state == 2


# --- versions -------------------------------------------------------------------------------------


def test_an_older_store_is_refused_with_the_way_out_and_left_alone(home: Path):
    Store.open(home).close()
    connection = raw(home)
    connection.execute(f"PRAGMA user_version={VERSION - 1}")
    connection.close()
    with pytest.raises(StoreUnusable, match=r"older format .*shotclock prune --reset"):
        Store.open(home)
    assert pragma(home, "user_version") == VERSION - 1


def test_a_store_of_a_newer_version_is_refused_and_left_alone(home: Path):
    Store.open(home).close()
    connection = raw(home)
    connection.execute(f"PRAGMA user_version={VERSION + 1}")
    connection.close()
    known = VERSION
    with pytest.raises(
        StoreUnusable, match=rf"newer Shotclock \(version {known + 1}, this one knows {known}\)"
    ) as caught:
        Store.open(home)
    assert caught.value.suggestion is not None and "upgrade" in caught.value.suggestion
    assert pragma(home, "user_version") == VERSION + 1


# --- wrong files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to be looked at" * 50, b"x", bytes(8192)])
def test_a_file_that_is_no_database_is_named_and_left_as_it_is(home: Path, content: bytes):
    home.mkdir(mode=0o700)
    (home / "shotclock.db").write_bytes(content)
    with pytest.raises(StoreUnusable, match="not a Shotclock store") as caught:
        Store.open(home)
    assert str(home / "shotclock.db") in str(caught.value)
    assert (home / "shotclock.db").read_bytes() == content


def test_a_database_of_another_program_is_left_alone(home: Path):
    home.mkdir(mode=0o700)
    connection = raw(home)
    connection.execute("CREATE TABLE jobs (theirs)")
    connection.close()
    before = (home / "shotclock.db").read_bytes()
    with pytest.raises(StoreUnusable, match="some other program"):
        Store.open(home)
    assert (home / "shotclock.db").read_bytes() == before


def test_damaged_pages_are_an_error_that_names_the_file_and_nothing_is_deleted(home: Path):
    with Store.open(home) as store:
        for number in range(50):
            store.checkpoints.save(f"k{number}", "f", "x" * 2000, NOW)
    path = home / "shotclock.db"
    content = bytearray(path.read_bytes())
    content[8192:] = b"\xa5" * (len(content) - 8192)
    path.write_bytes(content)
    with pytest.raises(StoreUnusable, match="corrupt") as caught, Store.open(home) as store:
        for number in range(50):
            store.checkpoints.load(f"k{number}")
    assert str(path) in str(caught.value)
    assert path.read_bytes() == bytes(content)


def test_an_empty_file_is_a_store_whose_creator_was_killed(home: Path):
    home.mkdir(mode=0o700)
    (home / "shotclock.db").touch()
    with Store.open(home) as store:
        store.checkpoints.save("k", "f", 1, NOW)


def test_a_store_that_was_removed_or_replaced_is_not_written_to_any_more(store: Store):
    shutil.rmtree(store.home)
    with pytest.raises(StoreUnusable, match="removed or replaced"):
        store.locks.acquire("l", holder=holder(), label="", token="t", now=NOW, is_alive=all_alive)
    assert not store.home.exists()
    with Store.open(store.home) as fresh:
        fresh.checkpoints.save("k", "f", 1, NOW)
    with pytest.raises(StoreUnusable, match="removed or replaced"):
        store.checkpoints.load("k")


# --- waiting --------------------------------------------------------------------------------------


def hold_or_wait(number: int, home: Path) -> str | None:
    """The first child stays in a transaction until the second, who is less patient than usual, has had enough."""
    if number == 0:
        with Store.open(home) as store, store._database.write():
            (home / "held").touch()
            appears(home / "had enough")
        return None
    database.BUSY_TIMEOUT_MS = 100
    appears(home / "held")
    try:
        with Store.open(home) as store:
            assert store.checkpoints.load("k").state == 1
            store.checkpoints.save("k", "f", 2, NOW)
    except StoreBusy as error:
        return error.code
    finally:
        (home / "had enough").touch()
    return "written"


def test_who_waits_too_long_for_another_process_is_told_so_and_readers_do_not_wait(store: Store):
    store.checkpoints.save("k", "f", 1, NOW)
    assert in_children(2, hold_or_wait, store.home) == [None, "STORE_BUSY"]
    assert store.checkpoints.load("k").state == 1
    store.checkpoints.save("k", "f", 2, NOW)


def test_who_waits_too_long_for_another_thread_is_told_so(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(database, "THREAD_WAIT_S", 0.1)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store._database.write():
            entered.set()
            leave.wait(JOIN_WITHIN_S)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert entered.wait(JOIN_WITHIN_S)
        with pytest.raises(StoreBusy, match="another thread"):
            store.jobs.get("x")
    finally:
        leave.set()
        thread.join(JOIN_WITHIN_S)
    assert store.jobs.get("x") is None


def test_many_threads_share_one_store(store: Store):
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round in range(25):
                store.checkpoints.save(f"k{number}", "f", round, NOW)
                assert store.checkpoints.load(f"k{number}").state == round
                store.locks.acquire("l", slots=99, holder=holder(number), label="", token=f"{number}.{round}", now=NOW,
                                    is_alive=all_alive)  # fmt: skip
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_WITHIN_S)
    assert not failures
    assert len(store.locks.list("l")) == 99 and not any(thread.is_alive() for thread in threads)


def test_a_callback_that_uses_the_store_is_told_and_does_not_hang(store: Store):
    store.locks.acquire("l", holder=holder(1), label="", token="a", now=NOW, is_alive=all_alive)
    store.idempotency.begin("s", "k", "d", holder(1), NOW, all_alive)

    def asks_back(_: object) -> bool:
        return store.jobs.get("x") is None

    with pytest.raises(StoreBusy, match="own transactions"):
        store.idempotency.begin("s", "k", "d", holder(2), NOW, asks_back)
    assert store.checkpoints.load("k") is None


def test_whatever_is_raised_inside_a_transaction_undoes_it_and_the_store_goes_on(store: Store):
    for raised in (KeyboardInterrupt, ValueError, SystemExit):
        with pytest.raises(raised), store._database.write() as connection:
            connection.execute("INSERT INTO checkpoints VALUES ('k', 'f', '1', 1)")
            raise raised
    assert store.checkpoints.load("k") is None
    store.checkpoints.save("k", "f", 1, NOW)


# --- the disk -------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_full_disk_is_said_loses_nothing_and_is_over_when_there_is_room(home: Path):
    home.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "none", str(home)]
    if subprocess.run(mount, timeout=MOUNT_WITHIN_S).returncode:
        pytest.skip("cannot mount here")
    try:
        with Store.open(home) as store:
            saved = 0
            with pytest.raises(StoreUnusable, match="full"):
                for saved in range(1000):
                    store.checkpoints.save(f"k{saved}", "f", "x" * 10_000, NOW)
            assert saved > 10
            assert [store.checkpoints.load(f"k{n}") is not None for n in range(saved + 1)] == [True] * saved + [False]
            with pytest.raises(StoreUnusable, match="full"):
                store.jobs.attach_or_create(new_job(arguments="x" * 900_000), all_alive)
            assert store.jobs.list() == ()
            subprocess.run(["mount", "-o", "remount,size=8m", home], timeout=MOUNT_WITHIN_S, check=True)
            store.checkpoints.save("more", "f", "x" * 10_000, NOW)
            assert store.checkpoints.load("more") is not None
        with Store.open(home) as store:
            assert store.checkpoints.load("k0") is not None and store.checkpoints.load("more") is not None
    finally:
        subprocess.run(["umount", home], timeout=MOUNT_WITHIN_S, check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_disk_that_is_full_from_the_start_is_a_clear_error(home: Path):
    home.mkdir(mode=0o700)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k,mode=0700", "none", home], timeout=MOUNT_WITHIN_S
    ).returncode:
        pytest.skip("cannot mount here")
    try:
        began = time.monotonic()
        with pytest.raises(StoreUnusable) as caught:
            Store.open(home)
        assert time.monotonic() - began < 5
        assert str(home) in str(caught.value)
    finally:
        subprocess.run(["umount", home], timeout=MOUNT_WITHIN_S, check=True)


def test_another_field_of_a_stored_record_needs_a_new_version_of_the_tables():
    digest = hashlib.sha256("\n".join(SCHEMA.statements).encode()).hexdigest()
    assert (VERSION, digest[:16]) == (16, "4483e2a6acfddf75")
