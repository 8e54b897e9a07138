"""Artifacts: what a step leaves is kept with its run, whole or not at all, and nothing else is."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.core.limits import WallTime
from shotclock.flows.file.loader import Finding
from shotclock.store.store import Retention, Store, prune
from shotclock.supervise.kernel import is_alive
from tests.conftest import Ran
from tests.flows.conftest import Load, step
from tests.rows import row

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

WITHIN_S = 30


def kept(envelope: Envelope, name: str) -> dict[str, bytes]:
    """The content of each artifact of a step, read from where the answer says it is, and compared with its digest."""
    data: Any = envelope.data
    found = {}
    for each in step(envelope, name).get("artifacts", ()):
        content = Path(data["artifacts"]["folder"], each["file"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (each["bytes"], each["sha256"])
        found[each["path"]] = content
    return found


def notes(envelope: Envelope, name: str) -> dict[str, Any]:
    return {note["code"]: note for note in step(envelope, name).get("warnings", ())}


def test_files_are_kept_however_the_step_ends(run: Callable[..., Envelope], store: Store) -> None:
    envelope = run("""
steps:
  good: {exec: "mkdir -p good/sub; echo 1 > good/a; echo 2 > good/sub/b; echo 3 > good/c.log", artifacts: good}
  bad: {exec: "echo why > bad.log; exit 1", artifacts: ["bad.*"]}
  late: {exec: "echo so far > late.log; sleep 60", timeout: 1s, grace: 0, artifacts: late.log}
  later:
    exec: "mkdir -p deep/er; echo x > deep/er/x.xml; echo y > deep/y.xml; echo z > deep/z.txt"
    artifacts: [deep/**/*.xml]
    depends_on: good
""")
    assert kept(envelope, "good") == {"good/a": b"1\n", "good/c.log": b"3\n", "good/sub/b": b"2\n"}
    assert kept(envelope, "bad") == {"bad.log": b"why\n"}
    assert kept(envelope, "late") == {"late.log": b"so far\n"} and step(envelope, "late")["status"] == "timed_out"
    assert kept(envelope, "later") == {"deep/er/x.xml": b"x\n", "deep/y.xml": b"y\n"}
    data: Any = envelope.data
    assert data["artifacts"]["files"] == 7
    folder = Path(data["artifacts"]["folder"])
    assert folder.stat().st_mode & 0o777 == 0o700 and folder.parent == store.home / "artifacts"


def test_files_of_a_step_that_the_run_stops_are_kept(run: Callable[..., Envelope]) -> None:
    envelope = run("steps: {a: {exec: 'echo so far > a.log; sleep 60', grace: 0, artifacts: a.log}}", stop_after=0.5)
    assert envelope.code == "CANCELLED" and kept(envelope, "a") == {"a.log": b"so far\n"}


def test_only_regular_files_below_the_working_directory_are_kept(run: Callable[..., Envelope], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    work = tmp_path / "work"
    (work / "out" / "sub").mkdir(parents=True)
    (work / "out" / "real").write_text("real")
    (work / "out" / ".hidden").write_text("hidden")
    (work / "out" / "inside").symlink_to("real")
    (work / "out" / "outside").symlink_to(tmp_path / "secret")
    (work / "out" / "up").symlink_to("../../secret")
    (work / "out" / "folder").symlink_to(tmp_path)
    (work / "out" / "loop").symlink_to("loop")
    (work / "out" / "sub" / "round").symlink_to("..")
    (work / "latest").symlink_to("out")
    (work / "away").symlink_to(tmp_path)
    os.mkfifo(work / "out" / "pipe")
    (work / "out" / "null").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(work / "out" / "socket"))
        envelope = run("""
steps:
  all: {exec: "true", cwd: work, artifacts: [out]}
  glob: {exec: "true", cwd: work, artifacts: ["out/*"]}
  through: {exec: "true", cwd: work, artifacts: [latest/real, away/secret, away/*]}
""")
    wrong = {"folder", "loop", "null", "outside", "pipe", "socket", "up"}
    assert kept(envelope, "all") == {"out/.hidden": b"hidden", "out/inside": b"real", "out/real": b"real"}
    left_out = {each["path"] for each in notes(envelope, "all")["ARTIFACTS_LEFT_OUT"]["context"]["files"]}
    assert left_out == {f"out/{name}" for name in wrong} | {"out/sub/round"}
    assert kept(envelope, "glob") == {"out/inside": b"real", "out/real": b"real"}
    assert kept(envelope, "through") == {"latest/real": b"real"}
    why = {each["path"]: each["why"] for each in notes(envelope, "through")["ARTIFACTS_LEFT_OUT"]["context"]["files"]}
    assert why == dict.fromkeys(("away/secret", "away/*"), "it leads out of the working directory")


def test_a_path_that_may_lead_out_and_a_template_are_refused(problems: Callable[..., list[Finding]]) -> None:
    for path, message in (
        ("/etc/passwd", "may lead out"),
        ("../x", "may lead out"),
        ("a/../../x", "may lead out"),
        ("{{ item }}.log", "no templates"),
    ):
        with row(path):
            [finding] = problems(f"steps: {{a: {{exec: x, artifacts: ['{path}']}}}}")
            assert message in finding.message and finding.path[:3] == ("steps", "a", "artifacts")


def test_what_does_not_fit_is_left_out_whole_and_named(run: Callable[..., Envelope]) -> None:
    environment = {**os.environ, "SHOTCLOCK_RUN_ARTIFACTS_SIZE": "3kB"}
    flow = """
steps:
  one: {exec: "head -c 2000 /dev/zero > a; head -c 2000 /dev/zero > b; head -c 900 /dev/zero > c", artifacts: [a, b, c]}
  two: {exec: "echo more > d; head -c 200 /dev/zero > e", artifacts: [d, e], depends_on: one}
"""
    envelope = run(flow, environment=environment)
    assert {name: len(content) for name, content in kept(envelope, "one").items()} == {"a": 2000, "c": 900}
    assert kept(envelope, "two") == {"d": b"more\n"}, "the limit is that of the run"
    [left_out] = notes(envelope, "one")["ARTIFACTS_LEFT_OUT"]["context"]["files"]
    assert left_out["path"] == "b" and "3000 bytes at most, see SHOTCLOCK_RUN_ARTIFACTS_SIZE" in left_out["why"]
    with pytest.raises(Failure, match="'lots' is not a size"):
        run(flow, environment={**environment, "SHOTCLOCK_RUN_ARTIFACTS_SIZE": "lots"})


def test_a_missing_file_is_a_warning_an_error_or_nothing(run: Callable[..., Envelope]) -> None:
    envelope = run("""
steps:
  warns: {exec: "true", artifacts: ["*.missing"]}
  quiet: {exec: "true", artifacts: {path: x.missing, if_missing: ignore}}
  strict: {exec: "true", artifacts: [{path: y.missing, if_missing: error}]}
  behind: {exec: "true", depends_on: strict}
  failed: {exec: "exit 1", artifacts: {path: z.missing, if_missing: error}}
""")
    assert "'*.missing'" in notes(envelope, "warns")["ARTIFACT_MISSING"]["message"]
    assert step(envelope, "quiet")["status"] == "succeeded" and notes(envelope, "quiet") == {}
    assert step(envelope, "strict")["status"] == "failed"
    assert step(envelope, "strict")["error"]["code"] == "ARTIFACT_MISSING"
    assert step(envelope, "behind")["status"] == "skipped"
    assert step(envelope, "failed")["error"]["code"] == "COMMAND_FAILED" and notes(envelope, "failed") == {}


def test_items_and_later_visits(run: Callable[..., Envelope], tmp_path: Path) -> None:
    for name in "xy":
        (tmp_path / name).mkdir()
    envelope = run("""
steps:
  each: {exec: "echo {{ item }} > made", cwd: "{{ item }}", for_each: [x, y], artifacts: made}
  same: {exec: "echo {{ item }} > {{ item }}.txt", for_each: [x, y], artifacts: "?.txt"}
  again:
    exec: "n=$(find . -name 'turn*' | wc -l); touch turn$n; echo $n > again$n; test $n -ge 1"
    artifacts: "again?"
    on_fail: {run: fix}
  fix: {exec: "rm -f again0", on_success: {goto: again}}
""")
    data: Any = envelope.data
    files = {name: [each["file"] for each in step(envelope, name)["artifacts"]] for name in ("each", "same", "again")}
    assert files == {
        "each": ["each[0]/made", "each[1]/made"],
        "same": ["same/x.txt", "same/y.txt"],
        "again": ["again/again1"],
    }
    folder = Path(data["artifacts"]["folder"])
    on_disk = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert on_disk == {file for each in files.values() for file in each}


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_copy_leaves_no_half_file_that_counts(
    tmp_path: Path, shotclock: Callable[..., Ran]
) -> None:
    home, flow = tmp_path / "home", tmp_path / "flow.yaml"
    size = 2_000_000_000  # sparse, so that it is made at once, and takes a second to copy
    flow.write_text(
        "steps:\n"
        f"  a: {{exec: 'truncate -s {size} big; echo small > small', idempotent: true, artifacts: [big, small]}}\n"
    )
    env = {**os.environ, "SHOTCLOCK_HOME": str(home), "SHOTCLOCK_RUN_ARTIFACTS_SIZE": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "shotclock", "run", str(flow), "--run-id", "r"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    folder = home / "artifacts" / "r"
    give_up = time.monotonic() + WITHIN_S
    while not (list(folder.glob(".part-*")) and (folder / "a" / "small").exists()):  # which is copied first
        assert time.monotonic() < give_up and process.poll() is None
        time.sleep(0.001)
    process.kill()
    assert process.wait(WITHIN_S) == -signal.SIGKILL
    assert list(folder.glob(".part-*")) and not list(folder.rglob("big")), "it was killed in the middle"
    assert shotclock("report", "r", env=env).json()["data"]["artifacts"] is None
    flow.with_name("big").write_text("now small")
    env["SHOTCLOCK_RUN_ARTIFACTS_SIZE"] = "1MB"
    ended = shotclock("run", "--resume", "r", "--json", env=env).json()
    assert [each["path"] for each in ended["data"]["steps"]["a"]["artifacts"]] == ["small"]
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["small"], "its parts are removed"


@pytest.mark.slow
def test_a_report_links_the_files_until_they_are_pruned(
    tmp_path: Path, run: Callable[..., Envelope], store: Store, shotclock: Callable[..., Ran]
) -> None:
    for number in range(3):
        run("steps: {a: {exec: 'head -c 1000 /dev/zero > \"a b.log\"', artifacts: '*.log'}}", run_id=f"r{number}")
    env = {"SHOTCLOCK_HOME": str(store.home)}
    page = tmp_path / "page.html"
    data = shotclock("report", "r2", "--html", str(page), env=env).json()["data"]
    folder = store.home / "artifacts" / "r2"
    assert data["artifacts"] == {"folder": str(folder), "files": 1, "bytes": 1000, "is_deleted": False}
    assert data["steps"][0]["artifacts"][0]["file"] == "a/a b.log"
    assert f'href="file://{folder}/a/a%20b.log"' in page.read_text()
    assert "1 artifact of 1000 bytes" in shotclock("report", "r2", "--output", "markdown", env=env).stdout.decode()

    def left() -> list[str]:
        return sorted(path.name for path in (store.home / "artifacts").iterdir())

    now = WallTime(time.time_ns() // 1_000_000)
    most = Retention(artifacts_bytes=2500)
    assert prune(store, most, now, is_alive, dry_run=True).artifacts == 1
    assert prune(store, most, now, is_alive).artifacts == 1 and left() == ["r1", "r2"]
    old = shotclock("report", "r0", "--html", str(page), env=env).json()["data"]
    assert old["artifacts"]["is_deleted"] and "file://" not in page.read_text()
    assert prune(store, Retention(runs=1), now, is_alive).artifacts == 1 and left() == ["r2"], "those of deleted runs"


def test_a_run_whose_name_is_that_of_another_folder_has_one_of_its_own(
    run: Callable[..., Envelope], store: Store
) -> None:
    for name, folder in ((".", "%2E"), ("..", "%2E%2E")):
        envelope = run("steps: {a: {exec: echo hi | tee a.txt, artifacts: a.txt}}", run_id=name)
        data: Any = envelope.data
        assert data["artifacts"]["folder"] == str(store.home / "artifacts" / folder) and kept(envelope, "a")
        assert (store.home / "logs" / folder).is_dir()


def test_the_store_is_never_an_artifact(run: Callable[..., Envelope], tmp_path: Path, load: Load) -> None:
    envelope = run("steps: {a: {exec: echo hi > a.txt, artifacts: ['.']}}")
    assert set(kept(envelope, "a")) == {"a.txt"}
    envelope = run("steps: {a: {exec: 'true', artifacts: [home/shotclock.db]}}")
    assert kept(envelope, "a") == {} and "ARTIFACTS_LEFT_OUT" in notes(envelope, "a")
