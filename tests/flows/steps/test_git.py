"""`git-checkout` with real git, real repositories, and remotes that hang: on time, and nothing half-made is left."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.limits import Clocks
from shotclock.flows.file.loader import load_text
from shotclock.flows.run.runs import RunRequest, start
from shotclock.flows.steps.git import GitProvider, InvalidRepository, Repository, ref_problem
from shotclock.store.store import Store
from tests.flows.steps import servers
from tests.flows.steps.conftest import OVERSHOOT_S, Tried
from tests.flows.steps.servers import Connection, Handler, Server, answers, response
from tests.rows import row

pytestmark = pytest.mark.usefixtures("no_survivors")

GIT_S = 30.0  # a git command on a local repository takes milliseconds
LIMIT_MS = 700
# Where it has to get so far that the remote is there: a busy machine may need a second try.
LIMITS_MS = (LIMIT_MS, 10 * LIMIT_MS)
GRACE_MS = 300
IDENTITY = {
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.invalid",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.invalid",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
}

Checkout = Callable[..., Tried]


def git(folder: Path, *words: str) -> str:
    ran = subprocess.run(
        ["git", *words],
        cwd=folder,
        env={**os.environ, **IDENTITY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GIT_S,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout.strip()


def commit(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "-m", name)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="session")
def made_origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "first", "1")
    commit(folder, "second", "2")
    git(folder, "tag", "-a", "v1", "-m", "one")
    git(folder, "checkout", "-q", "-b", "topic/one")
    commit(folder, "aside", "a")
    git(folder, "checkout", "-q", "main")
    commit(folder, "third", "3")
    return folder


@pytest.fixture
def origin(tmp_path: Path, made_origin: Path) -> Path:
    """Three commits on main, the second tagged v1; one on the branch topic/one."""
    return shutil.copytree(made_origin, tmp_path / "origin")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The step's folder."""
    return tmp_path / "work"


@pytest.fixture
def check_out(trial: Callable[..., Tried], tmp_path: Path) -> Checkout:
    home = tmp_path / "user"
    home.mkdir()

    def check_out(
        repository: object, *, timeout_ms: int = 30_000, clocks: Clocks | None = None, **settings: Any
    ) -> Tried:
        outer = {key: settings.pop(key) for key in ("run_ms", "cancel_after_s") if key in settings}
        token = os.environ["SHOTCLOCK_TEST_MARK"]
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "SHOTCLOCK_TEST_MARK": token, **settings.pop("env", {})}
        clocks = clocks or Clocks(timeout_ms=timeout_ms, grace_ms=GRACE_MS)
        return trial(GitProvider(), {"repository": str(repository), **settings}, clocks, env=env, **outer)

    return check_out


def assert_timed_out(tried: Tried, limit_ms: int = LIMIT_MS) -> None:
    assert tried.error["code"] == "TIMEOUT"
    assert tried.message == f"Git checkout timed out after {limit_ms}ms"
    assert tried.result.rule == "git-checkout/timeout"
    assert tried.meta["ending"] == "killed"
    assert tried.meta["side_effects"] == "none", "what there was of it is removed"
    assert tried.elapsed_s < (limit_ms + GRACE_MS) / 1000 + OVERSHOOT_S


# --- what is checked out -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_branch_is_checked_out_into_a_folder_of_the_repositorys_name(
    check_out: Checkout, origin: Path, work: Path
) -> None:
    tried = check_out(origin)
    assert tried.result.output == {
        "path": str(work / "origin"),
        "commit": git(origin, "rev-parse", "main"),
        "ref": "main",
    }
    assert (work / "origin/third").read_text() == "3"
    assert git(work / "origin", "symbolic-ref", "--short", "HEAD") == "main"
    assert git(work / "origin", "rev-list", "--count", "HEAD") == "3"
    assert git(work / "origin", "status", "--porcelain", "--branch") == "## main...origin/main"
    assert [path.name for path in work.iterdir()] == ["origin"], "the place where it was made is gone"
    assert tried.meta["side_effects"] == "complete"


# Where it comes from differs with both for a branch and for commits, whose depth nobody knows; else with the one.
REFS_AT_DEPTHS = [
    *((ref, 1) for ref in ("topic/one", "v1", "refs/heads/main", "COMMIT", "SHORT")),
    *((ref, depth) for ref in ("topic/one", "COMMIT") for depth in (None, 2)),
]


@pytest.mark.slow
def test_a_branch_a_tag_and_a_commit_are_found_at_any_depth(check_out: Checkout, origin: Path, work: Path) -> None:
    for number, (ref, depth) in enumerate(REFS_AT_DEPTHS):
        with row(ref, depth):
            wanted = git(origin, "rev-parse", {"COMMIT": "main~1", "SHORT": "main~1"}.get(ref, ref) + "^{commit}")
            ref = {"COMMIT": wanted, "SHORT": wanted[:9]}.get(ref, ref)
            tried = check_out(f"file://{origin}", ref=ref, fetch_depth=depth, path=f"deep/{number}")
            assert tried.result.envelope.ok, tried.error
            assert tried.result.output == {"path": str(work / f"deep/{number}"), "commit": wanted, "ref": ref}
            assert git(work / f"deep/{number}", "rev-parse", "HEAD") == wanted
            assert git(work / f"deep/{number}", "status", "--porcelain") == ""


@pytest.mark.slow
def test_a_shallow_one_has_no_more_than_was_asked_for(check_out: Checkout, origin: Path, work: Path) -> None:
    check_out(f"file://{origin}", fetch_depth=1)
    assert git(work / "origin", "rev-list", "--count", "HEAD") == "1"
    assert git(work / "origin", "for-each-ref", "--format=%(refname)", "refs/remotes") == "refs/remotes/origin/main"
    check_out(f"file://{origin}", fetch_depth=0)
    assert git(work / "origin", "rev-list", "--count", "HEAD") == "3", "0 is all of it"


@pytest.mark.slow
def test_a_relative_path_starts_at_the_steps_folder(check_out: Checkout, origin: Path, work: Path) -> None:
    assert check_out("../origin", path="here").result.envelope.ok
    assert (work / "here/third").exists()


@pytest.mark.slow
def test_an_empty_folder_that_is_there_is_filled(check_out: Checkout, origin: Path, work: Path) -> None:
    before = work.stat().st_ino
    tried = check_out(origin, path=".")
    assert tried.result.envelope.ok, tried.error
    assert (work / "third").exists() and work.stat().st_ino == before
    assert git(work, "status", "--porcelain") == ""


@pytest.mark.slow
def test_a_checkout_that_is_there_is_brought_up_to_date(check_out: Checkout, origin: Path, work: Path) -> None:
    check_out(origin)
    newest = commit(origin, "fourth", "4")
    assert check_out(origin).result.output["commit"] == newest
    assert (work / "origin/fourth").exists()
    assert check_out(f"{origin}/", ref="v1").result.envelope.ok
    assert not (work / "origin/third").exists()
    assert check_out(f"file://{origin}", ref="topic/one").result.envelope.ok
    assert (work / "origin/aside").exists()


@pytest.mark.slow
def test_nobodys_work_is_overwritten(check_out: Checkout, origin: Path, work: Path) -> None:
    check_out(origin)
    mine = commit(work / "origin", "mine", "m")
    commit(origin, "fourth", "4")
    tried = check_out(origin)
    assert "has commits that the remote does not have" in tried.message
    assert git(work / "origin", "rev-parse", "main") == mine
    check_out(origin, ref="v1")
    (work / "origin/second").write_text("changed, not committed")
    tried = check_out(origin, ref="refs/heads/topic/one")
    if tried.result.envelope.ok:  # the two agree on that file, so git carries the change over
        assert (work / "origin/second").read_text() == "changed, not committed"


@pytest.mark.slow
def test_what_is_there_and_no_checkout_of_it_is_left_alone(check_out: Checkout, origin: Path, work: Path) -> None:
    (work / "full").mkdir()
    (work / "full/file").write_text("mine")
    (work / "file").write_text("mine")
    (work / "link").symlink_to("nowhere")
    (work / "other").mkdir()
    git(work / "other", "init", "-q")
    git(work / "other", "remote", "add", "origin", "https://example.invalid/other.git")
    git(work, "init", "-q")  # a repository around them all, which is not to be found
    git(work, "remote", "add", "origin", str(origin))
    before = sorted(path.name for path in work.iterdir())
    for path in ("full", "file", "link", "other"):
        tried = check_out(origin, path=path)
        assert (tried.error["code"], tried.result.rule) == ("GIT_FAILED", "git-checkout/failed"), path
    assert sorted(path.name for path in work.iterdir()) == before
    assert (work / "full/file").read_text() == "mine"
    assert list((work / "other").iterdir()) == [work / "other/.git"]


@pytest.mark.slow
def test_submodules_are_not_fetched(check_out: Checkout, origin: Path, work: Path, tmp_path: Path) -> None:
    (tmp_path / "user/.gitconfig").write_text('[submodule]\n\trecurse = true\n[protocol "file"]\n\tallow = always\n')
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "-q", "-b", "main")
    commit(inner, "inside", "i")
    git(origin, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "module")
    git(origin, "commit", "-q", "-m", "module")
    for _ in range(2):
        assert check_out(origin).result.envelope.ok
        assert list((work / "origin/module").iterdir()) == []


@pytest.mark.slow
def test_nothing_of_the_users_set_up_is_run(check_out: Checkout, origin: Path, work: Path, tmp_path: Path) -> None:
    hooks = tmp_path / "template/hooks"
    hooks.mkdir(parents=True)
    for name in ("post-checkout", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran-a-hook\n")
        (hooks / name).chmod(0o755)
    (tmp_path / "user/.gitconfig").write_text(
        f"[init]\n\ttemplateDir = {tmp_path}/template\n"
        f"[core]\n\thooksPath = {hooks}\n\tpager = touch {tmp_path}/ran-a-hook\n"
    )
    assert check_out(origin, env={"GIT_TEMPLATE_DIR": str(tmp_path / "template")}).result.envelope.ok
    git(work / "origin", "config", "core.fsmonitor", f"touch {tmp_path}/ran-a-hook")
    assert check_out(origin, ref="v1").result.envelope.ok
    assert not (tmp_path / "ran-a-hook").exists()
    assert not (work / "origin/.git/hooks").exists()


@pytest.mark.slow
def test_a_workflow_inside_a_hook_of_git_touches_no_other_repository(
    check_out: Checkout, origin: Path, work: Path
) -> None:
    head = git(origin, "rev-parse", "HEAD")
    env = {"GIT_DIR": str(origin / ".git"), "GIT_WORK_TREE": str(origin), "GIT_INDEX_FILE": str(origin / ".git/index")}
    assert check_out(origin, ref="v1", path="here", env=env).result.envelope.ok
    assert git(origin, "rev-parse", "HEAD") == head
    assert git(origin, "status", "--porcelain") == ""
    assert (work / "here/second").exists()


# --- remotes that hang -------------------------------------------------------------------------------------


def dribbles_git(connection: Connection) -> None:
    connection.drip(b"003e" + b"0" * 40 + b" HEAD\0 multi_ack" + b"x" * 100_000)


def dribbles_refs(connection: Connection) -> None:
    connection.read_request()
    connection.send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-git-upload-pack-advertisement\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n22\r\n001e# service=git-upload-pack\n0000\r\nffff\r\nfff0"
    )
    connection.drip(b"0" * 65_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "handler"),
    [
        ("git", servers.says_nothing),
        ("git", dribbles_git),
        ("http", servers.says_nothing),
        ("http", servers.drips_headers),
        ("http", dribbles_refs),
        ("https", servers.says_nothing),
        ("ssh", servers.says_nothing),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_remote_that_hangs_is_left_on_time(scheme: str, handler: Handler, check_out: Checkout, work: Path) -> None:
    with Server(handler) as server:
        for limit_ms in LIMITS_MS:
            tried = check_out(f"{scheme}://127.0.0.1:{server.port}/a/repo.git", timeout_ms=limit_ms)
            if scheme == "ssh" and tried.error["code"] == "GIT_FAILED":
                pytest.skip("there is no ssh here")
            assert_timed_out(tried, limit_ms)
            if server.connections:
                break
        assert server.connections >= 1
        assert server.all_left(2)
    assert list(work.iterdir()) == []


SSH = """#!/bin/sh
# A remote that ignores being told to stop, and whose children do as well, in sessions of their own.
trap '' TERM INT HUP
setsid sh -c 'trap "" TERM INT HUP; while :; do sleep 1; done' &
(trap '' TERM; sleep 1000) &
echo $$ > "$MARK"
while :; do sleep 1; done
"""


@pytest.fixture
def stubborn_ssh(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    return {"GIT_SSH_COMMAND": str(tmp_path / "ssh"), "MARK": str(tmp_path / "mark")}


@pytest.mark.slow
def test_a_transport_that_ignores_signals_is_killed_with_all_it_started(
    check_out: Checkout, stubborn_ssh: dict[str, str], work: Path, no_survivors: Any
) -> None:
    for limit_ms in LIMITS_MS:
        tried = check_out("me@host:repo.git", timeout_ms=limit_ms, env=stubborn_ssh, path="some/where/deep")
        assert_timed_out(tried, limit_ms)
        if Path(stubborn_ssh["MARK"]).exists():
            break
    assert Path(stubborn_ssh["MARK"]).exists(), "the transport was never started"
    assert list(work.iterdir()) == [], "the folders above it are gone as well"
    assert no_survivors.wait_until_alone(2) == []


@pytest.mark.slow
def test_a_cancelled_step_kills_it_too_and_removes_what_there_is(
    check_out: Checkout, stubborn_ssh: dict[str, str], work: Path, no_survivors: Any
) -> None:
    with pytest.raises(asyncio.CancelledError):
        check_out("me@host:repo.git", env=stubborn_ssh, cancel_after_s=1.0)
    assert Path(stubborn_ssh["MARK"]).exists(), "the transport was never started"
    assert list(work.iterdir()) == []
    assert no_survivors.wait_until_alone(2) == []


PASSES_ONCE = """#!/bin/sh
# ls-remote is answered; a fetch gets as far as the first bytes of the pack, and no further.
shift
if [ ! -e "$MARK" ]; then touch "$MARK"; exec sh -c "$*"; fi
sh -c "$*" | { dd bs=1 count=20000 2>/dev/null; touch "$MARK.cut"; sleep 1000; }
"""


@pytest.mark.slow
def test_a_clone_that_stops_in_the_middle_is_removed(
    check_out: Checkout, origin: Path, work: Path, tmp_path: Path
) -> None:
    (origin / "large").write_bytes(os.urandom(3_000_000))
    commit(origin, "more", "m")
    (tmp_path / "ssh").write_text(PASSES_ONCE)
    (tmp_path / "ssh").chmod(0o755)
    env = {"GIT_SSH_COMMAND": str(tmp_path / "ssh"), "GIT_SSH_VARIANT": "simple", "MARK": str(tmp_path / "mark")}
    (work / "beside").write_text("mine")
    tried = check_out(f"host:{origin}", path="here", env=env, timeout_ms=2_000)
    assert_timed_out(tried, 2_000)
    assert (tmp_path / "mark.cut").exists(), "it never came to the middle"
    assert [path.name for path in work.iterdir()] == ["beside"]


@pytest.mark.slow
def test_silence_is_noticed_by_the_idle_clock(check_out: Checkout, stubborn_ssh: dict[str, str], work: Path) -> None:
    clocks = Clocks(timeout_ms=30_000, idle_ms=500, grace_ms=100)
    tried = check_out("host:repo", clocks=clocks, env=stubborn_ssh)
    assert (tried.error["code"], tried.result.rule) == ("STALLED", "git-checkout/stalled")
    assert tried.elapsed_s < 15
    assert list(work.iterdir()) == []


def test_the_next_checkout_removes_the_folder_that_a_killed_one_left(
    check_out: Checkout, origin: Path, work: Path
) -> None:
    for left in (work / ".here.part", work / "there" / ".there.part"):
        (left / ".git").mkdir(parents=True)
    (work / ".other.part").mkdir()
    for path in ("here", "there"):
        assert check_out(origin, path=path).result.envelope.ok
    assert {path.name for path in work.iterdir()} == {"here", "there", ".other.part"}
    assert not list((work / "there").glob(".there.*"))


def test_a_folder_that_another_checkout_uses_is_left_alone(check_out: Checkout, origin: Path, work: Path) -> None:
    (work / ".here.part" / ".git").mkdir(parents=True)
    in_use = os.open(work / ".here.part", os.O_RDONLY)
    try:
        fcntl.flock(in_use, fcntl.LOCK_EX)
        tried = check_out(origin, path="here")
    finally:
        os.close(in_use)
    assert "in use by another checkout" in tried.message
    assert (work / ".here.part" / ".git").is_dir() and not (work / "here").exists()


@pytest.mark.slow
def test_the_deadline_of_the_run_is_said_to_be_the_one(
    check_out: Checkout, stubborn_ssh: dict[str, str], work: Path
) -> None:
    tried = check_out("host:repo", run_ms=4_000, env=stubborn_ssh)
    assert tried.error["context"]["clock"]["owner"] == "run test"
    assert tried.result.rule == "git-checkout/timeout"
    assert tried.meta["timeout_ms"] < 4_000 and tried.elapsed_s < 4.0 + OVERSHOOT_S
    assert list(work.iterdir()) == []


def test_a_run_without_time_left_starts_nothing(check_out: Checkout, origin: Path, work: Path) -> None:
    tried = check_out(origin, run_ms=0)
    assert (tried.error["code"], tried.result.rule) == ("NO_TIME_LEFT", "git-checkout/timeout")
    assert list(work.iterdir()) == []


def test_a_remote_that_wants_a_password_is_not_waited_for(check_out: Checkout, work: Path, tmp_path: Path) -> None:
    asks = tmp_path / "askpass"
    asks.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nsleep 1000\n")
    asks.chmod(0o755)
    env = {"GIT_ASKPASS": str(asks), "SSH_ASKPASS": str(asks), "DISPLAY": ":0"}
    reply = response(status="401 Unauthorized", WWW_Authenticate='Basic realm="x"')
    with Server(answers(reply)) as server:
        tried = check_out(f"http://127.0.0.1:{server.port}/repo.git", env=env)
    assert tried.result.rule == "git-checkout/failed"
    # The second are the words of git 2.53.
    assert "could not read Username" in tried.message or "unable to get password from user" in tried.message
    assert not (tmp_path / "asked").exists()
    assert list(work.iterdir()) == []


# --- what fails, what is refused, what is not shown ---------------------------------------------------------


@pytest.mark.slow
def test_a_ref_that_is_not_there_fails_and_leaves_nothing(check_out: Checkout, origin: Path, work: Path) -> None:
    for ref, depth in (("nowhere", None), ("nowhere", 1), ("abcdef1234", 1), ("0" * 40, None), ("origin/main", None)):
        with row(ref, depth):
            tried = check_out(origin, ref=ref, fetch_depth=depth)
            assert (tried.error["code"], tried.result.rule) == ("GIT_FAILED", "git-checkout/failed")
            assert tried.message == f"{origin} has no branch, tag or commit {ref!r}"
            assert tried.meta["side_effects"] == "none"
            assert list(work.iterdir()) == []


@pytest.mark.slow
def test_a_repository_that_is_not_there_or_empty_fails(check_out: Checkout, work: Path, tmp_path: Path) -> None:
    tried = check_out(tmp_path / "nowhere.git")
    assert tried.result.rule == "git-checkout/failed"
    assert "does not appear to be a git repository" in tried.message
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q", "--bare")
    assert "it may be empty" in check_out(tmp_path / "empty").message
    assert list(work.iterdir()) == []


def test_without_git_it_says_so(check_out: Checkout, origin: Path, work: Path) -> None:
    tried = check_out(origin, env={"PATH": "/nowhere"})
    assert (tried.error["code"], tried.result.rule) == ("COMMAND_NOT_FOUND", "git-checkout/failed")
    assert list(work.iterdir()) == []


EVIL_REFS = [
    "--upload-pack=touch evil",
    "-f",
    "main;touch evil",
    "main --upload-pack=touch",
    "$(touch evil)",
    "a..b",
    "HEAD~1",
    "main^{commit}",
    "+main:main",
    ":main",
    "refs/*",
    "a\nb",
    "a\0b",
    "@{-1}",
    "",
    "x.lock",
    "../../etc",
    "/main",
]


def test_an_evil_ref_never_reaches_git(check_out: Checkout, origin: Path, work: Path) -> None:
    assert [ref for ref in EVIL_REFS if ref_problem(ref) is None] == []
    for ref in (EVIL_REFS[0], ""):
        tried = check_out(origin, ref=ref)
        assert (tried.result.rule, tried.result.envelope.ok) == ("git-checkout/failed", False)
        assert tried.meta["side_effects"] == "none"
    assert list(work.iterdir()) == [] and not Path("evil").exists()


@pytest.mark.slow
def test_an_evil_default_branch_of_the_remote_never_reaches_git(check_out: Checkout, origin: Path, work: Path) -> None:
    git(origin, "update-ref", "refs/heads/--orphan=evil", "main")
    (origin / ".git/HEAD").write_text("ref: refs/heads/--orphan=evil\n")
    assert "has an invalid name" in check_out(origin).message
    assert list(work.iterdir()) == []


EVIL_REPOSITORIES = [
    "--upload-pack=touch evil",
    "-c",
    "ext::sh -c touch% evil",
    "fd::17/foo",
    "sh::touch evil",
    "ssh://-oProxyCommand=touch evil/x",
    "ssh://me@-oProxyCommand=touch/x",
    "-oProxyCommand=touch:x",
    "me@-oProxyCommand=touch:x",
    "gopher://127.0.0.1/x",
    "http://127.0.0.1:1/\nevil",
    "",
    " ",
]


def test_an_evil_repository_never_reaches_git(check_out: Checkout, work: Path) -> None:
    for repository in EVIL_REPOSITORIES:
        with row(repository), pytest.raises(InvalidRepository):
            Repository.of(repository, work)
    for repository in (EVIL_REPOSITORIES[0], " "):
        tried = check_out(repository, path="here")
        assert (tried.error["code"], tried.result.rule) == ("STEP_INVALID", "git-checkout/failed"), tried.error
        assert tried.meta["ending"] == "not_started"
    assert list(work.iterdir()) == [] and not Path("evil").exists()


def test_a_rewritten_address_does_not_run_a_program_either(check_out: Checkout, work: Path, tmp_path: Path) -> None:
    (tmp_path / "user/.gitconfig").write_text(
        f'[url "ext::sh -c touch% {tmp_path}/evil% "]\n\tinsteadOf = https://x/\n[protocol "ext"]\n\tallow = always\n'
    )
    tried = check_out("https://x/repo.git", env={"GIT_ALLOW_PROTOCOL": "ext:https"})
    assert "not allowed" in tried.message
    assert not (tmp_path / "evil").exists()
    assert list(work.iterdir()) == []


SECRET = "t0ps3cr3t"


@pytest.mark.slow
def test_no_credentials_are_shown_or_stored(check_out: Checkout, origin: Path, work: Path) -> None:
    with Server(answers(response(b"no", "403 Forbidden"))) as server:
        tried = check_out(f"http://me:{SECRET}@127.0.0.1:{server.port}/repo.git")
        assert tried.result.rule == "git-checkout/failed"
        assert SECRET not in tried.result.envelope.to_json()
    with Server(lambda connection: connection.reset()) as server:
        tried = check_out(f"http://{SECRET}@127.0.0.1:{server.port}/repo.git")
        assert SECRET not in tried.result.envelope.to_json()
    for written in (f"https://me:{SECRET}@host/a.git", f"https://{SECRET}@host/a.git"):
        repository = Repository.of(written, work)
        assert repository.url == written
        assert (repository.stored, repository.shown) == ("https://host/a.git", "https://host/a.git")
        assert repository.without_secrets(f"fatal: {written} {SECRET}!").count(SECRET) == 0


def test_addresses_are_read_as_git_reads_them(tmp_path: Path) -> None:
    def of(written: str) -> Repository:
        return Repository.of(written, tmp_path)

    assert of("git@host:team/it.git").name == "it"
    assert of("ssh://git@host:22/team/it.git/").stored == "ssh://git@host:22/team/it.git/"
    assert of("ssh://git:pw@host/it").stored == "ssh://git@host/it"
    assert of("../a/b c.git").url == str(tmp_path.parent / "a/b c.git")
    assert of("../a/b c.git").name == "b-c"
    assert of("./x:y").url == str(tmp_path / "x:y")
    assert of("/srv/it/.git").name == "it"
    assert of("https://host/it.git").is_at("https://token@HOST/it/")
    assert not of("https://host/it.git").is_at("https://host/other.git")
    assert of("/srv/it.git").is_at("file:///srv/it")
    with pytest.raises(InvalidRepository):
        _ = of("/").name
    assert ref_problem("feature/x-1.2_3") is None


# --- through the engine --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", ["GITHUB_REPOSITORY", "the file's own repository", "nowhere"])
def test_a_checkout_without_a_repository_uses_that_of_github_or_of_the_file(
    where: str, origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    folder = tmp_path / "work"
    if where == "GITHUB_REPOSITORY":
        monkeypatch.setenv("GITHUB_SERVER_URL", tmp_path.parent.as_uri())
        monkeypatch.setenv("GITHUB_REPOSITORY", f"{tmp_path.name}/origin")
    elif where != "nowhere":
        folder = origin / "flows"
    folder.mkdir()
    text = "steps:\n  checkout-repo:\n    type: git-checkout\n    ref: main\n    clone_timeout_ms: 600000\n"
    loaded = load_text(text.encode(), "flow.yaml", folder)
    assert loaded.workflow is not None, loaded.findings
    request = RunRequest(loaded.workflow, str(folder / "flow.yaml"), folder)

    async def run() -> dict[str, Any]:
        with contextlib.closing(Store.open(tmp_path / "home")) as store:
            return (await start(request, store)).to_dict()

    step = asyncio.run(run())["data"]["steps"]["checkout-repo"]
    if where == "nowhere":
        assert step["error"]["code"] == "STEP_INVALID" and "GITHUB_REPOSITORY is not set" in step["error"]["message"]
    else:
        assert step["status"] == "succeeded", step
        assert (folder / "origin/third").read_text() == "3"
