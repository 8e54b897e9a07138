"""What is delivered beside the package: the action, the hook, and Shotclock as the first process of a container."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.command_line import SHOTCLOCK
from tests.testing.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

ENDED_WITHIN_S = 30.0
FIRST_PROCESS = ["unshare", *([] if os.geteuid() == 0 else ["-r"]), "--pid", "--fork", "--mount-proc"]


def read(name: str) -> Any:
    return YAML(typ="safe").load((ROOT / name).read_text("utf-8"))


def with_shotclock(folder: Path) -> dict[str, str]:
    """Return an environment like that of a runner, in which `shotclock` is this one."""
    programs = folder / "shotclock" / "bin"
    programs.mkdir(parents=True)
    (programs / "shotclock").write_text(f'#!/bin/sh\nexec {" ".join(SHOTCLOCK)} "$@"\n')
    (programs / "shotclock").chmod(0o755)
    (programs / "shotclock-sh").touch()
    (folder / "added").touch()
    paths = {"RUNNER_TEMP": str(folder), "GITHUB_PATH": str(folder / "added")}
    return {**os.environ, **paths, "PATH": f"{programs}:{os.environ['PATH']}"}


def action_step(name: str) -> str:
    """Return the script of a step of the action."""
    return next(step["run"] for step in read("action.yml")["runs"]["steps"] if step["name"] == name)


@pytest.mark.parametrize(
    ("command", "limits", "code"),
    [
        ("echo one\nfalse | true", {"TIMEOUT": "20s", "IDLE": ""}, 1),
        ("echo one\nsetsid sleep 64 &\nsleep 64", {"TIMEOUT": "1s", "IDLE": ""}, 124),
        ("echo one\nsleep 64", {"TIMEOUT": "20s", "IDLE": "500ms"}, 124),
        ("echo one", {"TIMEOUT": "20s", "IDLE": ""}, 0),
    ],
)
def test_the_action_runs_a_command_within_its_limits(
    command: str, limits: dict[str, str], code: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", action_step("Run the command")],
        env={**with_shotclock(tmp_path), **limits, "COMMAND": command},
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
    )
    assert (done.returncode, done.stdout) == (code, "one\n"), done.stderr


def test_later_steps_find_the_program_of_the_action(tmp_path: Path) -> None:
    environment = with_shotclock(tmp_path)
    subprocess.run(["bash", "-ec", action_step("Put Shotclock on PATH")], env=environment, check=True, timeout=10)
    added = Path((tmp_path / "added").read_text().strip())
    assert sorted(each.name for each in added.iterdir()) == ["shotclock", "shotclock-sh"]
    assert (added / "shotclock").resolve() == tmp_path / "shotclock/bin/shotclock"


def test_the_hook_fails_for_each_file_with_a_finding(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("steps:\n  one: {exec: 'true', timeout: 5s}\n")
    (tmp_path / "bad.yaml").write_text("steps:\n  one: {exec: 'true', tiemout: 5s}\n")
    entry = read(".pre-commit-hooks.yaml")[0]["entry"]

    def hook(*files: str) -> subprocess.CompletedProcess[str]:
        # As pre-commit does: the words of the entry, then the names of the files.
        return subprocess.run(
            ["bash", "-c", f'{entry} "$@"', "hook", *files],
            cwd=tmp_path,
            env=with_shotclock(tmp_path / f"runner of {len(files)}"),
            capture_output=True,
            text=True,
            timeout=ENDED_WITHIN_S,
        )

    assert hook("good.yaml").returncode == 0
    both = hook("bad.yaml", "good.yaml")
    assert both.returncode == 1
    assert "tiemout" in both.stdout + both.stderr


def can_be_first() -> bool:
    try:
        return subprocess.run([*FIRST_PROCESS, "true"], stderr=subprocess.DEVNULL, timeout=10).returncode == 0
    except OSError:
        return False


@pytest.fixture
def first_process() -> list[str]:
    if not can_be_first():
        pytest.skip("namespaces are not ours to make here")
    return [*FIRST_PROCESS, *SHOTCLOCK, "exec"]


def test_the_first_process_of_a_container_stops_a_daemon_and_reaps_orphans(first_process: list[str]) -> None:
    orphans = "for i in 1 2 3; do (sleep 0.1 &); done; setsid sleep 64 & sleep 0.6; ps -eo stat= | grep -c ^Z; sleep 64"
    done = subprocess.run(
        [*first_process, "--timeout", "2s", "--", "bash", "-c", orphans],
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
    )
    assert (done.returncode, done.stdout) == (124, "0\n"), done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_process_of_a_container_ends_at_a_signal(
    first_process: list[str], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    command = ["bash", "-c", "touch started; exec sleep 64"]
    process = subprocess.Popen([*first_process, "--", *command], cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + ENDED_WITHIN_S
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), number)
    assert process.wait(timeout=ENDED_WITHIN_S) == code
