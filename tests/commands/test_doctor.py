"""`shotclock doctor`: health, a live self-test, and what was left behind. Real processes, all of them ours."""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.commands import doctor
from shotclock.supervise import kernel
from tests.command_line import SHOTCLOCK, SOON_S, is_alive, wait_for

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]  # each run holds a live self-test

DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
LONG_PAST = "1"  # a nanosecond after the machine came up


@pytest.fixture
def trace() -> str:
    """Others may be testing on this machine: we look at, and sweep, only what carries this."""
    return uuid.uuid4().hex


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def leave(trace: str, tmp_path: Path) -> Iterator[Start]:
    """A function that starts a process which carries a deadline, with no supervisor above it."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*argv: str, deadline: str = LONG_PAST, **options: Any) -> subprocess.Popen[bytes]:
        env = {**os.environ, "SHOTCLOCK_DEADLINE_NS": deadline, "TRACEPARENT": f"00-{trace}-{'1' * 16}-01"}
        out = tmp_path / f"left-{len(started)}"
        with open(out, "wb") as file:
            process = subprocess.Popen(
                argv or (sys.executable, "-c", DEAF),
                env=env,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=options.pop("stdout", file),
                **options,
            )
        started.append(process)
        if not argv:
            wait_for(lambda: b"ready" in out.read_bytes(), "the leftover to be up")
        return process

    yield run
    for process in started:
        process.kill()
        process.wait(SOON_S)


def checks(envelope: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in envelope["data"]["checks"]}


def pids(envelope: dict[str, Any]) -> list[int]:
    return [left["pid"] for left in envelope["data"]["leftovers"]]


# --- health ---------------------------------------------------------------------------------------


def test_this_machine_is_fit_and_a_daemon_really_was_killed(shotclock: Any, validate_envelope: Any, trace: str):
    ran = shotclock("doctor", "--trace", trace)
    envelope = validate_envelope(ran.json())
    assert ran.code == 0, envelope["error"]
    assert ran.stderr == b""
    found = checks(envelope)
    assert set(found) == {"stopping", "self_test", "input", "processes", "open_files", "state_directory", "leftovers"}
    assert all(set(check) == {"name", "status", "detail"} for check in found.values())
    assert found["self_test"]["status"] == "ok"
    assert envelope["data"]["self_test"]["survivors"] == []
    assert envelope["data"]["self_test"]["started"]
    assert envelope["data"]["mechanism"]["commands"] in ("cgroup", "subreaper", "process group")
    assert envelope["data"]["cannot_catch"]
    assert envelope["meta"]["side_effects"] == "none"


def test_a_terminal_gets_a_page(on_terminal: Any, trace: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    env = {"TERM": "xterm", "COLUMNS": "100"}
    seen = on_terminal("doctor", "--trace", trace, streams=("stdout", "stderr"), env=env)
    assert seen.code == 0
    assert "self test" in seen.screen
    assert "what it cannot catch" in seen.screen
    assert '{"ok"' not in seen.screen


@pytest.mark.parametrize(
    ("mode", "status"), [(0o700, "ok"), (0o755, "warn"), (0o777, "warn")], ids=["0700", "0755", "0777"]
)
def test_a_state_directory_that_others_may_look_into_is_a_warning(
    mode: int, status: str, shotclock: Any, tmp_path: Path, trace: str
):
    home = tmp_path / "state"
    home.mkdir()
    home.chmod(mode)
    ran = shotclock("doctor", "--trace", trace, env={"SHOTCLOCK_HOME": str(home)})
    assert checks(ran.json())["state_directory"]["status"] == status
    assert ran.code == 0


def test_a_state_directory_that_is_not_there_is_not_made(shotclock: Any, tmp_path: Path, trace: str):
    home = tmp_path / "deep" / "state"
    ran = shotclock("doctor", "--trace", trace, env={"SHOTCLOCK_HOME": str(home)})
    assert checks(ran.json())["state_directory"]["status"] == "ok"
    assert not home.parent.exists()


@pytest.mark.parametrize("home", ["/proc/nope", "/proc"])
def test_a_state_directory_where_nothing_can_be_made_is_called_unusable(shotclock: Any, home: str, trace: str):
    ran = shotclock("doctor", "--trace", trace, env={"SHOTCLOCK_HOME": home})
    state = checks(ran.json())["state_directory"]
    assert ran.code == 4 and state["status"] == "fail" and home in state["detail"]


def test_an_unusable_state_directory_exits_4_and_says_why(
    shotclock: Any, validate_envelope: Any, tmp_path: Path, trace: str
):
    (tmp_path / "file").touch()
    ran = shotclock("doctor", "--trace", trace, env={"SHOTCLOCK_HOME": str(tmp_path / "file" / "state")})
    envelope = validate_envelope(ran.json())
    assert ran.code == 4
    assert envelope["error"]["code"] == "MACHINE_UNFIT"
    assert "state_directory" in envelope["error"]["message"]
    assert checks(envelope)["self_test"]["status"] == "ok", "the others are told as well"


# --- on the clock ---------------------------------------------------------------------------------


def test_the_timeout_stops_it_in_the_middle_of_the_self_test(shotclock: Any, validate_envelope: Any):
    ran = shotclock("doctor", "--timeout", "300ms")
    envelope = validate_envelope(ran.json())
    assert ran.code == 10
    assert envelope["error"]["code"] == "TIMEOUT"
    assert envelope["meta"]["ending"] == "killed"
    assert envelope["meta"]["survivors"] == []
    assert 300 <= envelope["meta"]["duration_ms"] < 5000, "overshoot is measured elsewhere; the machine may be busy"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_it_and_the_envelope_says_so(
    number: signal.Signals, code: int, start: Any, validate_envelope: Any, no_survivors: Any
):
    running = start("doctor")
    wait_for(lambda: any("-S -c" in process.cmdline for process in no_survivors.alive()), "the self-test's tree")
    running.signal(number)
    assert running.ends() == code
    envelope = validate_envelope(running.envelope())
    assert envelope["error"]["code"] == "CANCELLED"
    assert envelope["error"]["context"]["signal"] == number.name
    assert envelope["data"] == {"partial": True}


def test_a_probe_that_hangs_is_a_finding_and_the_rest_is_told(tmp_path: Path):
    script = (
        "import json, time\n"
        "from shotclock.commands import doctor\n"
        "doctor.PROBE_LIMIT_MS = 1500\n"
        "doctor._check_state = lambda: time.sleep(60)\n"
        "doctor._check_open_files = lambda: 1 / 0\n"
        "print(json.dumps(doctor.examine(trace_id='nobody').as_data()))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=SOON_S, check=True)
    import json

    found = checks({"data": json.loads(ran.stdout)})
    assert found["state_directory"] == {"name": "state_directory", "status": "fail", "detail": "no answer within 1.5s"}
    assert found["open_files"]["status"] == "fail"
    assert "ZeroDivisionError" in found["open_files"]["detail"]
    assert found["leftovers"]["status"] == "ok"


# --- what was left behind -------------------------------------------------------------------------


def test_a_leftover_is_listed_and_not_touched(shotclock: Any, leave: Start, trace: str):
    left = leave()
    ran = shotclock("doctor", "--trace", trace)
    envelope = ran.json()
    assert pids(envelope) == [left.pid]
    assert checks(envelope)["leftovers"]["status"] == "warn"
    assert ran.code == 0
    assert left.poll() is None


def test_a_sweep_stops_it_even_if_it_ignores_term(shotclock: Any, leave: Start, trace: str, validate_envelope: Any):
    left = [leave(), leave("sleep", "60")]
    ran = shotclock("doctor", "--sweep", "--trace", trace)
    envelope = validate_envelope(ran.json())
    assert {each["pid"]: each["gone"] for each in envelope["data"]["swept"]} == {each.pid: True for each in left}
    assert [each.wait(SOON_S) for each in left] == [-signal.SIGKILL, -signal.SIGTERM]
    assert checks(envelope)["leftovers"] == {"name": "leftovers", "status": "ok", "detail": "2 stopped"}
    assert envelope["meta"]["side_effects"] == "complete"
    assert pids(shotclock("doctor", "--trace", trace).json()) == []


def test_a_sweep_without_free_descriptors_does_not_say_that_a_living_process_is_gone(leave: Start, trace: str):
    left = [leave(), leave()]
    found = doctor.find_leftovers(trace)
    assert {each.pid for each in found} == {each.pid for each in left}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    for free in (0, 1):  # none, and one, which shows no more than that a process has this pid
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + free, hard))
        try:
            swept = doctor.sweep_away(found)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [each["gone"] for each in swept] == [False, False]
    assert [each.poll() for each in left] == [None, None]


def test_what_still_has_time_is_no_leftover(shotclock: Any, leave: Start, trace: str):
    left = leave(deadline=str(time.monotonic_ns() + 3600 * 10**9))
    assert pids(shotclock("doctor", "--sweep", "--trace", trace).json()) == []
    assert left.poll() is None


def test_what_is_of_another_trace_is_left_alone(shotclock: Any, leave: Start, trace: str):
    left = leave()
    assert pids(shotclock("doctor", "--sweep", "--trace", f"{trace}-not").json()) == []
    assert left.poll() is None


def test_what_a_supervisor_is_stopping_is_no_leftover(shotclock: Any, start: Any, trace: str):
    command = ("--", sys.executable, "-c", DEAF)
    running = start(
        "exec", "--timeout", "1s", "--grace", "20s", *command, env={"TRACEPARENT": f"00-{trace}-{'1' * 16}-01"}
    )
    running.said(b"ready")
    time.sleep(2.5)  # overdue by more than a leftover would have to be: that is the case under test
    assert pids(shotclock("doctor", "--sweep", "--trace", trace).json()) == []
    assert running.process.poll() is None
    running.signal(signal.SIGKILL)
    running.ends()


def test_a_stopped_supervisor_guards_nothing(shotclock: Any, leave: Start, trace: str):
    """A real one is continued within a second, so this process only has its name."""
    script = "import subprocess, time; from shotclock.supervise import kernel; kernel.name_process('shotclock-sup'); "
    guard = leave(sys.executable, "-c", f"{script} subprocess.Popen(['sleep', '60']); time.sleep(60)")
    wait_for(lambda: kernel.children_of(guard.pid), "its child")
    assert pids(shotclock("doctor", "--trace", trace).json()) == []
    guard.send_signal(signal.SIGSTOP)
    children = kernel.children_of(guard.pid)
    assert set(pids(shotclock("doctor", "--trace", trace).json())) == {guard.pid, *children}
    assert set(pids(shotclock("doctor", "--sweep", "--trace", trace).json())) == {guard.pid, *children}
    assert not any(map(is_alive, children))


def test_what_lost_supervisor_and_caller_at_once_is_found_and_swept(
    shotclock: Any, start: Any, trace: str, no_survivors: Any
):
    tree = "setsid sleep 60 & echo $!; sleep 60"
    running = start(
        "exec", "--timeout", "500ms", "--", "bash", "-c", tree, env={"TRACEPARENT": f"00-{trace}-{'1' * 16}-01"}
    )
    wait_for(lambda: running.stdout.endswith(b"\n"), "the daemon")
    daemon = int(running.stdout)
    supervisor = [process for process in no_survivors.alive() if process.ppid == running.process.pid]
    os.kill(running.process.pid, signal.SIGSTOP)  # or it would notice, and kill what the other guarded
    for process in supervisor:
        os.kill(process.pid, signal.SIGKILL)
    running.signal(signal.SIGKILL)
    running.ends()
    assert is_alive(daemon), "this is the one case that nobody can catch"
    wait_for(lambda: pids(shotclock("doctor", "--trace", trace).json()), "it to be overdue")
    envelope = shotclock("doctor", "--sweep", "--trace", trace).json()
    assert daemon in pids(envelope)
    assert not is_alive(daemon)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of others")
def test_a_process_of_another_user_is_listed_and_never_touched(shotclock: Any, leave: Start, trace: str):
    left = leave("sleep", "60", user=65534, group=65534, cwd="/")
    envelope = shotclock("doctor", "--sweep", "--trace", trace).json()
    assert [each["kept"] for each in envelope["data"]["leftovers"]] == ["belongs to another user"]
    assert envelope["data"]["swept"] == []
    assert left.poll() is None


def test_a_sweep_asks_on_a_terminal_and_says_how_far_it_goes(leave: Start, trace: str):
    import pty

    left = leave()
    ours, theirs = pty.openpty()
    try:
        for answer, is_swept in ((b"\n", False), (b"y\n", True)):
            words = [*SHOTCLOCK, "doctor", "--sweep", "--trace", trace, "--json"]
            process = subprocess.Popen(words, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE)
            screen = b""
            while b"[y/N]" not in screen:
                assert select.select([ours], [], [], SOON_S)[0], screen
                screen += os.read(ours, 4096)
            assert trace.encode() in screen
            os.write(ours, answer)
            envelope = json.loads(process.communicate(timeout=30)[0])
            assert (envelope["ok"], left.poll() is not None) == (is_swept, is_swept), envelope
            if not is_swept:
                assert (envelope["error"]["code"], envelope["meta"]["ending"]) == ("PERSON_REQUIRED", "not_started")
        words = [*SHOTCLOCK, "doctor", "--sweep"]
        process = subprocess.Popen(words, stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL)
        os.write(ours, b"no\n")
        assert process.wait(30) != 0
        assert b"all your work on this machine" in os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_process_at_a_terminal_is_never_touched(shotclock: Any, leave: Start, trace: str):
    import pty

    ours, theirs = pty.openpty()
    try:
        # Opening a terminal as the leader of a fresh session makes it the controlling one.
        script = "import os, sys, time; os.open(os.ttyname(1), os.O_RDWR); time.sleep(60)"
        left = leave(sys.executable, "-c", script, stdout=theirs)
        wait_for(lambda: pids(shotclock("doctor", "--trace", trace).json()), "it to be listed")
        terminal = Path(f"/proc/{left.pid}/stat")
        wait_for(lambda: terminal.read_text().rpartition(")")[2].split()[4] != "0", "its terminal")
        envelope = shotclock("doctor", "--sweep", "--trace", trace).json()
        assert "terminal" in envelope["data"]["leftovers"][0]["kept"]
        assert left.poll() is None
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_command_line_cannot_write_escape_sequences_to_a_terminal(
    on_terminal: Any, leave: Start, trace: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    leave("bash", "-c", r'exec -a "$(printf "\033]0;owned\007")" sleep 60')
    env = {"TERM": "xterm", "COLUMNS": "100"}
    shown = wait_for(
        lambda: next(
            (
                seen.screen
                for seen in [on_terminal("doctor", "--trace", trace, streams=("stdout",), env=env)]
                if "owned" in seen.screen
            ),
            None,
        ),
        "the leftover to be listed",
    )
    assert "\x1b]" not in shown
