"""The answer and its exit code, whoever reads: somebody, nobody any more, a full disk, or a stdout that was closed."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

FLOW = "name: works\nsteps:\n  a: {exec: 'true'}\n"
FAILING = "name: fails\nsteps:\n  a: {exec: 'false'}\n"
PROPOSE = ["inbox", "propose", "--title", "Delete it?", "--wait", "0"]
# What to call, and the exit code of its answer.
CALLS = {
    "errors": (["errors", "TIMEOUT"], 0),
    "errors of an unknown code": (["errors", "NO_SUCH_CODE"], 5),
    "check": (["check", "works.yaml"], 0),
    "check of what is not there": (["check", "nowhere.yaml"], 5),
    "run": (["run", "works.yaml"], 0),
    "run that fails": (["run", "fails.yaml"], 3),
    "run that fails, as markdown": (["run", "fails.yaml", "--output", "markdown"], 3),
    "run, as junit": (["run", "works.yaml", "--output", "junit"], 0),
    "proposal that nobody has decided": (PROPOSE, 14),
    "proposal that is not there": (["inbox", "show", "p-none"], 5),
    "jobs": (["job", "list"], 0),
    "job that is not there": (["job", "status", "j-none"], 5),
    "tokens": (["token", "list"], 0),
    "unknown word": (["frob"], 2),
}
calls = pytest.mark.parametrize(("words", "code"), CALLS.values(), ids=CALLS)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any) -> Any:
    """`start`, in a folder with two workflows and a store of its own."""
    monkeypatch.chdir(tmp_path)
    Path("works.yaml").write_text(FLOW)
    Path("fails.yaml").write_text(FAILING)
    return lambda *words, **more: start(*words, env={"SHOTCLOCK_HOME": str(tmp_path / "home")}, **more)


@calls
def test_where_the_reader_has_left_the_exit_code_is_the_answers_own_and_nothing_is_said(
    words: list[str], code: int, begin: Any
):
    theirs, ours = os.pipe()
    os.close(theirs)
    running = begin(*words, stdout=ours)
    os.close(ours)
    assert running.ends() == code
    assert b"Broken" not in running.stderr and b"could not be written" not in running.stderr


@pytest.mark.parametrize(("words", "code"), list(CALLS.values())[::3], ids=list(CALLS)[::3])
def test_where_stdout_is_closed_no_call_succeeds_and_it_is_said_why(words: list[str], code: int, begin: Any):
    running = begin(*words, before=["sh", "-c", 'exec "$@" 1>&-', "sh"])
    assert running.ends() == (code or 74), running.stderr
    assert b"the answer could not be written: stdout is closed" in running.stderr
    assert b"Traceback" not in running.stderr


@calls
def test_where_the_disk_is_full_no_call_succeeds_and_it_is_said_why(words: list[str], code: int, begin: Any):
    with open("/dev/full", "wb") as full:
        running = begin(*words, stdout=full)
    assert running.ends() == (code or 74), running.stderr
    assert b"the answer could not be written: " in running.stderr


def test_what_only_an_approval_allows_is_not_done_when_the_reader_of_the_answer_has_left(tmp_path: Path):
    """`shotclock inbox propose … | true && delete` under pipefail once went on to delete."""
    line = f"{' '.join([*SHOTCLOCK, *PROPOSE[:3]])} Delete --wait 0 | true && touch deleted"
    environment = {**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home")}
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, timeout=60
    )
    assert ran.returncode == 14
    assert not (tmp_path / "deleted").exists()
