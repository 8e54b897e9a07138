"""Where the store lives, and who may look into it."""

import os
import pwd
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.errors import Failure, error_entry
from shotclock.store.home import StoreError, StoreUnusable, create_private_file, state_home
from shotclock.store.store import Store
from tests.rows import row
from tests.store.work import NOW, in_children, new_job

CHILD_WITHIN_S = 30
NULL_LISTENER = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else or to mount")


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


# --- where ----------------------------------------------------------------------------------------


def test_the_first_usable_variable_decides():
    table: list[Any] = [
        ({"SHOTCLOCK_HOME": "/a", "XDG_STATE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"SHOTCLOCK_HOME": "", "XDG_STATE_HOME": "/b", "HOME": "/c"}, "/b/shotclock"),
        ({"XDG_STATE_HOME": "", "HOME": "/c"}, "/c/.local/state/shotclock"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/c"}, "/c/.local/state/shotclock"),
        ({"SHOTCLOCK_HOME": "~/x", "HOME": "/c"}, "/c/x"),
        ({"SHOTCLOCK_HOME": "~", "HOME": "/c"}, "/c"),
    ]
    for environ, home in table:
        with row(environ, home):
            assert state_home(environ) == Path(home)


def test_without_HOME_the_password_database_knows():
    expected = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".local/state/shotclock"
    for environ in ({}, {"HOME": ""}, {"HOME": "relative"}):
        assert state_home(environ) == expected


def test_without_any_home_at_all_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch):
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(StoreUnusable, match="set SHOTCLOCK_HOME"):
        state_home({})


def test_a_relative_SHOTCLOCK_HOME_is_refused_for_it_would_be_another_store_everywhere():
    with pytest.raises(StoreUnusable, match="absolute"):
        state_home({"SHOTCLOCK_HOME": "state"})


def test_open_without_a_home_uses_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOTCLOCK_HOME", str(home))
    with Store.open() as store:
        assert store.path == home / "shotclock.db"
    assert store.path.exists()


def test_a_path_of_undecodable_bytes_works_and_can_be_named_in_an_error(tmp_path: Path):
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff?a=b#%41 \n"))
    with Store.open(odd) as store:
        store.checkpoints.save("k", "f", 1, NOW)
    with Store.open(odd) as store:
        assert store.checkpoints.load("k").state == 1
    odd.chmod(0o777)
    with pytest.raises(StoreUnusable) as caught:
        Store.open(odd)
    str(caught.value).encode("utf-8")


# --- who may --------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o377, 0o777])
def test_everything_is_private_whatever_the_umask(home: Path, umask: int):
    before = os.umask(umask)
    try:
        with Store.open(home / "deep" / "er") as store:
            store.checkpoints.save("k", "f", "x" * 100_000, NOW)
            os.close(create_private_file(store.folder("spool") / "input"))
            assert modes(store.home) == {
                "shotclock.db": 0o600, "shotclock.db-wal": 0o600, "shotclock.db-shm": 0o600, "spool": 0o700,
            }  # fmt: skip
            assert modes(store.home / "spool") == {"input": 0o600}
    finally:
        os.umask(before)
    assert modes(home.parent)["home"] == 0o700
    assert modes(home) == {"deep": 0o700}
    assert modes(home / "deep") == {"er": 0o700}


def test_a_database_that_was_readable_to_others_is_closed_to_them(home: Path):
    Store.open(home).close()
    (home / "shotclock.db").chmod(0o644)
    with Store.open(home):
        assert modes(home)["shotclock.db"] == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(home: Path, mode: int):
    home.mkdir()
    home.chmod(mode)
    with pytest.raises(StoreUnusable, match="others may write") as caught:
        Store.open(home)
    assert str(home) in str(caught.value)
    assert not list(home.iterdir())


@as_root
def test_a_directory_of_somebody_else_is_refused(home: Path):
    home.mkdir(mode=0o700)
    os.chown(home, NULL_LISTENER, NULL_LISTENER)
    with pytest.raises(StoreUnusable, match=f"belongs to user {NULL_LISTENER}"):
        Store.open(home)


@as_root
def test_a_database_of_somebody_else_is_refused(home: Path):
    Store.open(home).close()
    os.chown(home / "shotclock.db", NULL_LISTENER, NULL_LISTENER)
    with pytest.raises(StoreUnusable, match=f"belongs to user {NULL_LISTENER}"):
        Store.open(home)


def test_a_file_in_the_place_of_the_directory_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for home in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnusable, match="directory"):
            Store.open(home)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.timeout(20)
def test_a_pipe_or_a_directory_in_the_place_of_the_database_is_a_clear_error(home: Path):
    home.mkdir(mode=0o700)
    os.mkfifo(home / "shotclock.db")
    with pytest.raises(StoreUnusable, match="not a regular file"):
        Store.open(home)
    (home / "shotclock.db").unlink()
    (home / "shotclock.db").mkdir()
    with pytest.raises(StoreUnusable, match="not a regular file"):
        Store.open(home)


def test_a_dangling_link_in_the_place_of_the_database_is_a_clear_error(home: Path):
    home.mkdir(mode=0o700)
    (home / "shotclock.db").symlink_to("nowhere")
    with pytest.raises(StoreUnusable):
        Store.open(home)


def open_as_nobody(_: int, home: Path) -> str:
    os.setgroups([])
    os.setgid(NULL_LISTENER)
    os.setuid(NULL_LISTENER)
    try:
        Store.open(home)
    except StoreUnusable as error:
        return str(error)
    return "opened"


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_home_below_a_directory_we_may_not_write_to_or_look_into_is_a_clear_error(mode: int):
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        os.chmod(parent, mode)
        (said,) = in_children(1, open_as_nobody, Path(parent) / "home")
    assert "Permission denied" in said and f"{parent}/home" in said


@as_root
@pytest.mark.parametrize("already_there", [False, True])
def test_a_read_only_home_is_a_clear_error(home: Path, already_there: bool):
    home.mkdir(mode=0o700)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700", "none", home], timeout=CHILD_WITHIN_S)
    if mounted.returncode:
        pytest.skip("cannot mount here")
    try:
        if already_there:
            with Store.open(home) as store:
                store.jobs.attach_or_create(new_job(), lambda _: True)
        subprocess.run(["mount", "-o", "remount,ro", home], timeout=CHILD_WITHIN_S, check=True)
        with pytest.raises(StoreUnusable, match="cannot be") as caught:
            Store.open(home)
        assert str(home) in str(caught.value)
    finally:
        subprocess.run(["umount", home], timeout=CHILD_WITHIN_S, check=True)


# --- what it is called ----------------------------------------------------------------------------


def test_an_error_of_the_store_is_an_expected_failure_with_a_registered_code(home: Path):
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(StoreError) as caught:
        Store.open(home)
    assert isinstance(caught.value, Failure)
    assert caught.value.code == "STORE_UNUSABLE" and caught.value.context == {"store": str(home)}
    assert (error_entry("STORE_UNUSABLE").exit_code, error_entry("STORE_BUSY").exit_code) == (4, 12)
    assert error_entry("STORE_BUSY").retryable and not error_entry("STORE_UNUSABLE").retryable
