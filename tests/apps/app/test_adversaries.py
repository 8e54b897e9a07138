"""Commands that hang, crash and make a mess: still one answer, alone on stdout, on time, and nothing is left."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import AT_ONCE, SOON_S, wait_for, warning_codes

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

TIMEOUT_MS = 700  # of the app; its grace is 200 ms
LATE_BY_AT_MOST_S = 5.0  # F-011: a sleeper exits within its timeout and this, the start of Python included

HANGING = [
    "sleeps",
    "holds-the-gil",
    "swallows-everything",
    "floods",
    "stops-itself",
    "closes-its-streams-and-sleeps",
    "has-a-child-that-holds-everything",
    "swallows-cancellation",
]


@pytest.mark.requirement("F-011")
@pytest.mark.requirement("F-012")
@pytest.mark.requirement("F-030")
@pytest.mark.parametrize("commands", [HANGING[n : n + AT_ONCE] for n in range(0, len(HANGING), AT_ONCE)], ids=str)
def test_whatever_hangs_is_answered_and_gone(commands: list[str], tool: Any, no_survivors: Any, validate_envelope: Any):
    program = tool("adversaries.py")
    runs = program.each([[command] for command in commands])
    assert no_survivors.wait_until_alone(1) == []
    for command, ran in zip(commands, runs, strict=True):
        assert ran.code == 10, command
        envelope = validate_envelope(ran.json())
        assert envelope["error"]["code"] == "TIMEOUT"
        assert envelope["error"]["retryable"] is False, "it may have changed something"
        assert envelope["error"]["phase"] == "execution"
        clock = envelope["error"]["context"]["clock"]
        assert (clock["kind"], clock["owner"]) == ("timeout", command.replace("-", "_"))
        assert clock["limit_ms"] == TIMEOUT_MS
        assert envelope["meta"]["timeout_ms"] == TIMEOUT_MS
        assert TIMEOUT_MS <= envelope["meta"]["duration_ms"] < TIMEOUT_MS + 2000
        assert envelope["meta"]["ending"] == "killed"
        assert envelope["meta"]["side_effects"] == "unknown"
        assert b"Traceback" not in ran.stderr[-10_000:]
    slowest_s = max(ran.elapsed_s for ran in runs)
    if (
        slowest_s >= TIMEOUT_MS / 1000 + LATE_BY_AT_MOST_S
    ):  # a machine on its knees: is it Python that is slow to start?
        slowest_s -= max(ran.elapsed_s for ran in program.each([["manifest"]] * len(commands)))
    assert slowest_s < TIMEOUT_MS / 1000 + LATE_BY_AT_MOST_S


CRASHING = {
    "segfaults": {"signal": "SIGSEGV"},
    "segfaults-async": {"signal": "SIGSEGV"},
    "exits-at-once": {"exit_code": 0},
    "kills-its-group": {"signal": "SIGKILL"},
}


@pytest.mark.requirement("F-011")
@pytest.mark.requirement("F-006")
def test_what_crashes_costs_its_answer_and_not_ours(tool: Any, no_survivors: Any, validate_envelope: Any):
    runs = tool("adversaries.py").each([[command] for command in CRASHING])
    assert no_survivors.wait_until_alone(1) == []
    for (command, context), ran in zip(CRASHING.items(), runs, strict=True):
        envelope = validate_envelope(ran.json())
        assert ran.code == envelope["meta"]["exit_code"] == 1, command
        assert envelope["error"]["code"] == "WORKER_CRASHED"
        assert envelope["error"]["context"] == context
        assert envelope["meta"]["timeout_ms"] == TIMEOUT_MS
        assert envelope["meta"]["side_effects"] == "unknown"


def test_a_command_that_kills_its_guardian_gains_nothing(tool: Any, no_survivors: Any, validate_envelope: Any):
    envelope = validate_envelope(tool("adversaries.py").envelope("kills-its-parent", code=1))
    assert no_survivors.wait_until_alone(1) == []
    assert envelope["error"]["code"] in ("SUPERVISOR_LOST", "WORKER_CRASHED")
    assert envelope["meta"]["side_effects"] == "unknown"


def test_a_command_that_stops_its_guardians_and_theirs_is_answered_for_on_time(
    tool: Any, no_survivors: Any, validate_envelope: Any
):
    [ran] = tool("adversaries.py").each([["stops-its-guardians"]])
    assert no_survivors.wait_until_alone(1) == []
    envelope = validate_envelope(ran.json())
    assert (envelope["error"]["code"], envelope["meta"]["ending"]) == ("TIMEOUT", "killed")
    assert ran.elapsed_s < envelope["meta"]["duration_ms"] / 1000 + 2.5, "the answer was there, and kept waiting"


ODD = {
    "leaves-with-sys-exit": ("INTERNAL_ERROR", "SystemExit: 0"),
    "raises-keyboard-interrupt": ("INTERNAL_ERROR", "KeyboardInterrupt"),
    "recurses": ("INTERNAL_ERROR", "RecursionError"),
    "returns-what-is-no-json": ("RESULT_NOT_SERIALIZABLE", "lock"),
}


def test_what_ends_oddly_is_an_error_with_a_reason(tool: Any, validate_envelope: Any):
    """Not a success and not a signal to us: `sys.exit(0)` in a command is no answer."""
    runs = tool("adversaries.py").each([[command] for command in ODD])
    for (command, (code, said)), ran in zip(ODD.items(), runs, strict=True):
        envelope = validate_envelope(ran.json())
        assert ran.code == 1 and envelope["error"]["code"] == code, command
        assert said in envelope["error"]["message"]


MESSY = ["writes-everywhere", "floods-and-returns", "closes-its-streams", "leaves-a-thread", "changes-what-it-runs-in"]


@pytest.mark.requirement("F-006")
def test_the_mess_a_command_makes_is_not_on_stdout(tool: Any, validate_envelope: Any):
    runs = tool("adversaries.py").each([[command] for command in MESSY])
    for command, ran in zip(MESSY, runs, strict=True):
        assert ran.code == 0, command
        assert validate_envelope(ran.json())["data"] == {"result": "answer"}, command
    assert sorted(runs[0].stderr.split()) == sorted(b"print dunder write child left in the buffer".split())
    assert len(runs[1].stderr) == 20_000_000


@pytest.mark.requirement("F-030")
@pytest.mark.requirement("F-031")
def test_a_daemon_left_behind_by_a_command_that_succeeded_is_stopped_and_named(tool: Any, no_survivors: Any):
    envelope = tool("adversaries.py").envelope("leaves-a-daemon", code=0)
    assert no_survivors.wait_until_alone(1) == []
    assert envelope["data"] == {"result": "answer"}
    assert warning_codes(envelope) == ["DESCENDANTS_STOPPED"]


@pytest.mark.requirement("F-030")
@pytest.mark.parametrize("command", ["has-a-child-that-holds-everything", "holds-the-gil"])
def test_kill_minus_nine_of_the_program_leaves_nothing(command: str, tool: Any, no_survivors: Any):
    running = tool("adversaries.py").start(command, "--timeout", "60s")
    needed = 7 if command.startswith("has") else 4  # front, zygotes, supervisor, worker; shell, sleeps
    wait_for(lambda: len(no_survivors.alive()) >= needed, "the tree to be up")
    running.signal(signal.SIGKILL)
    running.process.wait(SOON_S)
    assert no_survivors.wait_until_alone(3) == []
    assert running.stdout == b""


@pytest.mark.requirement("F-071")
def test_no_descriptor_of_the_caller_reaches_the_work(tool: Any, tmp_path: Path):
    """An inherited pipe in a grandchild hangs whoever reads it to its end."""
    program = tool(
        "descriptors.py",
        """
import os
from shotclock import App

app = App("descriptors")

@app.command
def opened() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the directory itself, closed by now
            pass
    return links

app()
""",
    )
    theirs, ours = os.pipe()
    pipe = f"pipe:[{os.fstat(ours).st_ino}]"
    try:
        with open(tmp_path / "secret", "w") as secret:
            envelope = program.envelope("opened", pass_fds=(secret.fileno(), ours), code=0)
    finally:
        os.close(theirs)
        os.close(ours)
    links = envelope["data"]
    assert not [link for link in links if "secret" in link or link == pipe or link.endswith("/out")], links
