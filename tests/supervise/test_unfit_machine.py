"""A machine without a /proc of its own processes: none, where nothing runs, or one of another PID namespace, where only
`exec` and `timeout` run: below a subreaper they need nothing but its own children."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "enveloped")]

NO_PROC = [
    "unshare",
    *([] if os.geteuid() == 0 else ["-r"]),
    "-m",
    "sh",
    "-c",
    'mount -t tmpfs none /proc && exec "$@"',
    "sh",
]
OTHER_PROC = ["unshare", *([] if os.geteuid() == 0 else ["-r"]), "-p", "--fork"]
KINDS = {"no /proc": NO_PROC, "/proc of another namespace": OTHER_PROC}

APP = """
import subprocess
from pathlib import Path
from shotclock import App
app = App("tool", default_timeout="5s")

@app.command
def spawn(marker: Path) -> str:
    marker.touch()
    subprocess.Popen(["setsid", "sleep", "63"])
    return "spawned"

@app.command
async def aspawn(marker: Path) -> str:
    marker.touch()
    return "spawned"

app()
"""


def can(words: list[str]) -> bool:
    try:
        return subprocess.run([*words, "true"], stderr=subprocess.DEVNULL, timeout=10).returncode == 0
    except OSError:
        return False


@pytest.fixture(params=KINDS)
def unfit(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    words = KINDS[request.param]
    if not can(words):
        pytest.skip("namespaces are not ours to make here")
    environment = {**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home")}

    def run(*argv: str) -> tuple[int, dict[str, Any], bytes]:
        ran = subprocess.run(
            [*words, *argv], cwd=tmp_path, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=60
        )
        assert b"Traceback" not in ran.stderr
        lines = [line for line in (ran.stdout + b"\n" + ran.stderr).splitlines() if line.startswith(b'{"ok":')]
        [envelope] = [json.loads(line) for line in lines]
        return ran.returncode, envelope, ran.stderr

    return run


def refused(code: int, envelope: dict[str, Any], expected: int = 4) -> None:
    assert (code, envelope["error"]["code"], envelope["meta"]["exit_code"]) == (expected, "MACHINE_UNFIT", expected)
    assert (envelope["meta"]["ending"], envelope["meta"]["side_effects"]) == ("not_started", "none")
    assert "/proc" in envelope["error"]["message"]


TREE = """setsid bash -c 'setsid sleep 300 & trap "" TERM; (trap "" TERM; setsid sleep 301; :) & sleep 302; :' &
(trap "" TERM; sleep 303; :) & echo done; sleep 304"""
ABOVE = """
import os, subprocess, sys
ran = subprocess.run(sys.argv[1:], capture_output=True, stdin=subprocess.DEVNULL)
try:
    os.waitpid(-1, os.WNOHANG)  # an orphan of ours, the first process of the namespace
    print("left behind")
except ChildProcessError:
    sys.stdout.buffer.write(ran.stdout + ran.stderr)
sys.exit(ran.returncode)
"""


@pytest.fixture
def beside() -> Any:
    """Run a command in a PID namespace with the /proc of the one around it. All that it leaves behind is seen."""
    if not can(OTHER_PROC):
        pytest.skip("namespaces are not ours to make here")

    def run(*argv: str) -> tuple[int, bytes]:
        words = [*OTHER_PROC, sys.executable, "-c", ABOVE, *argv]
        ran = subprocess.run(words, capture_output=True, timeout=60)
        assert ran.stderr == b""
        return ran.returncode, ran.stdout

    return run


def test_with_the_proc_of_another_namespace_exec_stops_a_whole_tree_and_warns(beside: Any, validate_envelope: Any):
    limits = ["--timeout", "1s", "--grace", "300ms"]
    code, out = beside(*SHOTCLOCK, "exec", "--json", *limits, "--", "bash", "-c", TREE)
    envelope = validate_envelope(json.loads(out))
    assert (code, envelope["error"]["code"], envelope["meta"]["ending"]) == (10, "TIMEOUT", "killed")
    assert envelope["meta"]["survivors"] == [], "no child was left"
    assert [each["code"] for each in envelope["warnings"]] == ["PROC_UNFIT"]


def test_with_the_proc_of_another_namespace_exec_and_timeout_pass_codes_and_output_through(beside: Any):
    assert beside(*SHOTCLOCK, "exec", "--report", "none", "--", "sh", "-c", "echo out; exit 3") == (3, b"out\n")
    assert beside(*SHOTCLOCK, "timeout", "20", "sh", "-c", "echo out; exit 3") == (3, b"out\n")
    assert beside(*SHOTCLOCK, "timeout", "0.5", "sh", "-c", "setsid sleep 300 & sleep 300") == (124, b"")


def test_with_the_proc_of_another_namespace_the_shell_says_that_it_sees_no_owner(beside: Any):
    shell = "import sys; from shotclock.main import run_shell; run_shell()"
    code, out = beside(sys.executable, "-c", shell, "--timeout", "0", "-c", "echo out; exit 3")
    assert code == 3 and out.startswith(b"out\n") and b"does not end with its owner" in out


def test_with_the_proc_of_another_namespace_a_child_left_behind_is_stopped_and_has_no_wrong_name(beside: Any):
    _, out = beside(*SHOTCLOCK, "exec", "--json", "--", "sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo $!")
    envelope = json.loads(out)
    [left] = next(each for each in envelope["warnings"] if each["code"] == "DESCENDANTS_STOPPED")["context"][
        "processes"
    ]
    assert left == {"pid": int(envelope["data"]["stdout"]), "command": "unknown: /proc does not show it"}


@pytest.mark.parametrize("unfit", ["no /proc"], indirect=True)
@pytest.mark.parametrize("way", [[], ["--json"], ["--idle", "9s"]], ids=["inherited", "json", "relayed"])
def test_exec_refuses_before_anything_runs(way: list[str], unfit: Any, tmp_path: Path):
    code, envelope, _ = unfit(*SHOTCLOCK, "exec", *way, "--timeout", "1s", "--", "touch", str(tmp_path / "ran"))
    refused(code, envelope, 4 if way == ["--json"] else 125)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", ["spawn", "aspawn"])
def test_an_app_refuses_before_anything_runs(command: str, unfit: Any, tmp_path: Path):
    (tmp_path / "tool.py").write_text(APP)
    code, envelope, _ = unfit(sys.executable, "tool.py", command, str(tmp_path / "ran"))
    refused(code, envelope)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("way", [[], ["--http", "127.0.0.1:0"]], ids=["stdio", "http"])
def test_a_server_refuses_to_start_and_blames_the_machine(way: list[str], unfit: Any, tmp_path: Path):
    (tmp_path / "tool.py").write_text(APP.replace("\napp()\n", "\n"))
    code, envelope, _ = unfit(*SHOTCLOCK, "serve", "tool.py:app", *way)
    refused(code, envelope)
    assert not envelope["error"]["retryable"]


def test_a_run_is_refused_before_its_first_step(unfit: Any, tmp_path: Path):
    (tmp_path / "flow.yaml").write_text("steps:\n  a: {exec: touch ran}\n")
    code, envelope, _ = unfit(*SHOTCLOCK, "run", "flow.yaml")
    refused(code, envelope)
    assert not (tmp_path / "ran").exists()


def test_doctor_says_what_is_missing(unfit: Any):
    code, envelope, _ = unfit(*SHOTCLOCK, "doctor")
    assert (code, envelope["error"]["code"]) == (4, "MACHINE_UNFIT")
    failed = {check["name"]: check["detail"] for check in envelope["data"]["checks"] if check["status"] == "fail"}
    assert "/proc" in failed["stopping"]


def test_what_needs_no_process_still_answers(unfit: Any):
    code, envelope, _ = unfit(*SHOTCLOCK, "errors", "MACHINE_UNFIT")
    assert (code, envelope["ok"]) == (0, True)
