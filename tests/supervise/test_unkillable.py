"""Work that belongs to another user: an ordinary user cannot kill it, and the answer says so on time."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shotclock.supervise import kernel
from tests.calls.bounds import ROOT, on_time
from tests.calls.work import FOREVER_S

pytestmark = [
    pytest.mark.usefixtures("no_survivors"),
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a program that runs as root for others"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv"),
]

NOBODY = 65534
GRACE_MS = 300
# An ordinary user who may read all files: the interpreter may lie in a folder of root's.
CAPABILITY = "+dac_read_search"
AS_NOBODY = [
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", f"--inh-caps={CAPABILITY}",
    f"--ambient-caps={CAPABILITY}", sys.executable,
]  # fmt: skip
APP = """
import subprocess, time
from shotclock import App
app = App("tool", grace="300ms")

@app.command(timeout="10s")
def leaves(command: str) -> str:
    subprocess.Popen(command.split())
    time.sleep(0.3)
    return "answer"

app()
"""


@pytest.fixture
def as_root(tmp_path: Path) -> list[str]:
    """Words that run a command as root, whoever says them: a setuid copy of setpriv."""
    if os.statvfs(tmp_path).f_flag & os.ST_NOSUID:
        pytest.skip("temporary files cannot be setuid programs here")
    program = shutil.copy(str(shutil.which("setpriv")), tmp_path / "suid")
    os.chmod(program, 0o4755)
    return [str(program), "--reuid=0"]


@pytest.fixture
def run(tmp_path: Path, validate_envelope: Any) -> Iterator[Callable[..., dict[str, Any]]]:
    """Run a program as nobody and return its envelope. What survives is killed at the end."""
    survivors: list[int] = []

    def answer(*words: str, before: Sequence[str] = ()) -> dict[str, Any]:
        ran = subprocess.run(
            [*before, *AS_NOBODY, *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=30,  # what survives keeps its stderr
            env={**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home")},
        )  # fmt: skip
        envelope: dict[str, Any] = validate_envelope(json.loads(ran.stdout))
        survivors.extend(survivor["pid"] for survivor in envelope["meta"]["survivors"])
        return envelope

    yield answer
    for pid in survivors:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def warning_codes(envelope: dict[str, Any]) -> list[str]:
    return [warning["code"] for warning in envelope["warnings"]]


@pytest.mark.parametrize("kind", ["sleep", "headless"])
def test_work_that_cannot_be_killed_is_abandoned_on_time_and_named(
    kind: str, as_root: list[str], run: Any, tmp_path: Path
) -> None:
    headless = [sys.executable, "-m", "tests.calls.work", "sleeps_without_a_main_thread", str(tmp_path)]
    work = ["sleep", str(FOREVER_S)] if kind == "sleep" else headless

    def attempt(number: int) -> dict[str, Any]:
        words = ["--timeout", f"{1 + number}s", "--grace", f"{GRACE_MS}ms", "--", *as_root, *work]
        envelope: dict[str, Any] = run("-m", "shotclock", "exec", "--json", *words)
        return envelope

    envelope = on_time(attempt, GRACE_MS)
    assert (envelope["error"]["code"], envelope["meta"]["ending"]) == ("TIMEOUT", "abandoned")
    assert warning_codes(envelope) == ["SURVIVORS"]
    [survivor] = envelope["meta"]["survivors"]
    assert not kernel.is_zombie(survivor["pid"])


def test_a_daemon_that_cannot_be_killed_is_a_survivor_and_is_not_said_to_be_stopped(
    as_root: list[str], run: Any
) -> None:
    script = 'setsid "$@" & sleep 0.2'
    words = ["sh", "-c", script, "sh", *as_root, "sleep", str(FOREVER_S)]
    envelope = run("-m", "shotclock", "exec", "--json", "--timeout", "20s", "--", *words)
    assert (envelope["ok"], envelope["meta"]["ending"]) == (True, "finished")
    assert warning_codes(envelope) == ["SURVIVORS"]
    assert [survivor["command"] for survivor in envelope["meta"]["survivors"]] == [f"sleep {FOREVER_S}"]


HIDING = ["unshare", "-m", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh"]


@pytest.fixture
def hide() -> list[str]:
    """Words that run a command where /proc shows the processes of its own user only."""
    if subprocess.run([*HIDING, "true"], stderr=subprocess.DEVNULL, timeout=10).returncode:
        pytest.skip("/proc cannot be mounted here")
    return HIDING


@pytest.mark.parametrize("timeout", ["20s", "0"])
def test_a_process_that_proc_hides_is_a_survivor_with_its_pid_and_is_not_waited_for(
    timeout: str, hide: list[str], as_root: list[str], run: Any
) -> None:
    script = 'setsid "$@" >/dev/null 2>&1 & echo $!; sleep 0.2'
    words = ["sh", "-c", script, "sh", *as_root, "sleep", str(FOREVER_S)]
    envelope = run("-m", "shotclock", "exec", "--json", "--timeout", timeout, "--", *words, before=hide)
    assert (envelope["ok"], envelope["meta"]["ending"]) == (True, "finished")
    pid = int(envelope["data"]["stdout"])
    assert envelope["meta"]["survivors"] == [{"pid": pid, "command": "unknown: /proc does not show it"}]
    assert not kernel.is_zombie(pid)


def test_a_timeout_over_a_process_that_proc_hides_does_not_claim_that_it_was_killed(
    hide: list[str], as_root: list[str], run: Any
) -> None:
    words = ["--timeout", "1s", "--grace", f"{GRACE_MS}ms", "--", *as_root, "sleep", str(FOREVER_S)]
    envelope = run("-m", "shotclock", "exec", "--json", *words, before=hide)
    assert (envelope["error"]["code"], envelope["meta"]["ending"]) == ("TIMEOUT", "abandoned")
    [survivor] = envelope["meta"]["survivors"]
    assert not kernel.is_zombie(survivor["pid"])


def test_doctor_says_that_proc_hides_processes(hide: list[str], run: Any) -> None:
    checks = {check["name"]: check for check in run("-m", "shotclock", "doctor", before=hide)["data"]["checks"]}
    assert checks["stopping"]["status"] == "warn" and "hidepid" in checks["stopping"]["detail"]


def test_a_run_names_what_its_steps_could_not_stop(as_root: list[str], run: Any, tmp_path: Path) -> None:
    step = {"exec": " ".join([*as_root, "sleep", str(FOREVER_S)]), "timeout": 1, "grace": "300ms"}
    (tmp_path / "flow.yaml").write_text(json.dumps({"steps": {"stays": step}}))
    (tmp_path / "home").mkdir(mode=0o777)
    os.chown(tmp_path / "home", NOBODY, NOBODY)
    envelope = run("-m", "shotclock", "run", str(tmp_path / "flow.yaml"), "--json")
    assert envelope["data"]["steps"]["stays"]["ending"] == "abandoned"
    assert [survivor["command"] for survivor in envelope["meta"]["survivors"]] == [f"sleep {FOREVER_S}"]


def test_what_a_function_leaves_and_cannot_be_killed_is_named(as_root: list[str], run: Any, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(APP)
    envelope = run(str(tmp_path / "tool.py"), "leaves", " ".join([*as_root, "sleep", str(FOREVER_S)]))
    assert (envelope["ok"], envelope["meta"]["ending"]) == (True, "finished")
    assert warning_codes(envelope) == ["SURVIVORS"]
    assert [survivor["command"] for survivor in envelope["meta"]["survivors"]] == [f"sleep {FOREVER_S}"]
