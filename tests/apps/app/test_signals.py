"""A program of ours that is told to stop, that nobody listens to any more, or that has no streams."""

import json
import os
import pty
import random
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rows import corners

from .conftest import SOON_S, envelopes_in, wait_for

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


# --- signals ------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-013")
@pytest.mark.requirement("F-069")
@pytest.mark.requirement("F-031")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_lets_the_command_clean_up_and_is_answered_with_what_it_was(
    number: signal.Signals, tool: Any, tmp_path: Path, no_survivors: Any, validate_envelope: Any
):
    running = tool().start("patient", tmp_path)
    wait_for((tmp_path / "up").exists, "the command to be up")
    running.signal(number)
    ran = running.ends(within_s=5)
    assert no_survivors.wait_until_alone(5) == []
    assert ran.code == SIGNALS[number]
    envelope = validate_envelope(ran.json())
    assert envelope["ok"] is False
    assert envelope["data"] == {"partial": True}
    assert envelope["error"]["code"] == "CANCELLED"
    assert envelope["error"]["retryable"] is False
    assert envelope["error"]["phase"] == "execution"
    assert envelope["error"]["context"]["signal"] == number.name
    assert envelope["meta"]["exit_code"] == ran.code
    assert envelope["meta"]["timeout_ms"] == 5000
    assert (tmp_path / "tidied").exists()
    assert ran.stderr == b""


@pytest.mark.requirement("F-031")
def test_a_command_that_takes_no_notice_is_killed_after_its_grace(
    tool: Any, tmp_path: Path, no_survivors: Any, validate_envelope: Any
):
    running = tool().start("stubborn", tmp_path, "--timeout", "60s")
    wait_for((tmp_path / "up").exists, "the command to be up")
    running.signal(signal.SIGTERM)
    began = time.monotonic()
    ran = running.ends(within_s=15)
    assert time.monotonic() - began < 0.3 + 8, "the app's grace is 300 ms"
    assert (tmp_path / "asked").exists(), "the polite stop was forwarded"
    assert no_survivors.wait_until_alone(5) == []
    assert ran.code == 143
    assert validate_envelope(ran.json())["meta"]["ending"] == "killed"


@pytest.mark.requirement("F-013")
@pytest.mark.requirement("C-008")
def test_a_signal_says_which_steps_were_done(tool: Any, tmp_path: Path):
    running = tool().start("stepped", tmp_path, "--timeout", "60s")
    wait_for((tmp_path / "stuck").exists, "the second step")
    running.signal(signal.SIGTERM)
    data = running.ends(within_s=5).json()["data"]
    assert data["partial"] is True
    assert data["completed_steps"] == ["fetch"]
    assert data["failed_step"] == data["resume_from"] == "build"


@pytest.mark.requirement("F-013")
@pytest.mark.requirement("F-069")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once_without_writing_twice(
    second: signal.Signals, tool: Any, tmp_path: Path, no_survivors: Any
):
    running = tool("slow.py", SLOW_TO_STOP).start("unwinds", tmp_path)
    wait_for((tmp_path / "up").exists, "the command to be up")
    running.signal(signal.SIGTERM)
    wait_for((tmp_path / "asked").exists, "the polite stop")
    time.sleep(0.3)  # two in one instant are one wish: `timeout` signals a process and its group
    assert running.process.poll() is None
    running.signal(second)
    ran = running.ends(within_s=2)
    assert no_survivors.wait_until_alone(2) == []
    assert ran.code in (128 + second, 143)
    assert len(envelopes_in(ran.stdout)) <= 1
    assert b"Traceback" not in ran.stderr


SLOW_TO_STOP = """
import time
from pathlib import Path
from shotclock import App

app = App("slow", default_timeout="60s", grace="30s")

@app.command
def unwinds(folder: Path) -> None:
    import signal
    signal.signal(signal.SIGTERM, lambda *_: (folder / "asked").touch())
    (folder / "up").touch()
    while True:
        time.sleep(0.02)

app()
"""


@pytest.mark.requirement("F-013")
@pytest.mark.requirement("F-069")
@pytest.mark.parametrize("number", corners([signal.SIGTERM, signal.SIGINT], signal.SIGINT))
def test_at_whatever_moment_it_comes_there_is_one_envelope_or_none(
    number: signal.Signals, tool: Any, tmp_path: Path, no_survivors: Any, validate_envelope: Any
):
    """Start-up included. Before the first line of ours runs a signal is Python's own affair, and nothing is said."""
    program, moments = tool(), random.Random(number)
    began = time.perf_counter()
    usual_s = program("echo", "x").elapsed_s
    silent = answered = 0
    for _ in range(8):
        running = program.start("patient", tmp_path, "--timeout", "60s")
        time.sleep(moments.uniform(0, usual_s * 1.3))  # the moment is what is tested
        running.signal(number)
        ran = running.ends(within_s=8)
        assert ran.stdout.count(b"\n") == len(envelopes_in(ran.stdout)) <= 1, ran.stdout
        if ran.stdout:
            answered += 1
            envelope = validate_envelope(ran.json())
            assert envelope["error"]["code"] == "CANCELLED"
            assert ran.code == envelope["meta"]["exit_code"] == 128 + number
        else:
            silent += 1
            # KeyboardInterrupt in the middle of an import is Python's, before there is anything of ours.
            assert ran.code in (-number, 128 + number, 1), ran
    assert no_survivors.wait_until_alone(2) == []
    assert silent + answered == 8 and time.perf_counter() - began < 60


@pytest.mark.requirement("F-013")
def test_leaning_on_ctrl_c_gives_one_envelope_at_most_and_no_traceback(tool: Any, tmp_path: Path):
    running = tool().start("patient", tmp_path, "--timeout", "60s")
    wait_for((tmp_path / "up").exists, "the command to be up")
    give_up_at = time.monotonic() + SOON_S
    while running.process.poll() is None:
        assert time.monotonic() < give_up_at
        running.signal(signal.SIGINT)
        time.sleep(0.0005)
    ran = running.ends()
    assert ran.code == 130
    assert ran.stdout.count(b"\n") == len(envelopes_in(ran.stdout)) <= 1
    assert b"Traceback" not in ran.stderr


def test_a_signal_to_the_whole_group_is_ours_to_answer(tool: Any, tmp_path: Path, validate_envelope: Any):
    """Ctrl-C at a terminal reaches everyone in the foreground; the command is asked by us, once."""
    running = tool().start("patient", tmp_path, before=["setsid"])
    wait_for((tmp_path / "up").exists, "the command to be up")
    os.killpg(running.process.pid, signal.SIGINT)
    ran = running.ends(within_s=5)
    assert ran.code == 130
    assert validate_envelope(ran.json())["error"]["context"]["signal"] == "SIGINT"
    assert (tmp_path / "tidied").exists()


VALIDATOR_THAT_HANGS = """
import sys, time
from pathlib import Path
from typing import Annotated
from pydantic import AfterValidator
from shotclock import App

app = App("slow", default_timeout="60s")

def check(path: Path) -> Path:
    path.touch()
    time.sleep(60)
    return path

@app.command
def take(path: Annotated[Path, AfterValidator(check)]) -> None: ...

app()
"""


@pytest.mark.requirement("F-013")
def test_a_signal_stops_the_checking_of_arguments_as_well(tool: Any, tmp_path: Path, validate_envelope: Any):
    running = tool("slow.py", VALIDATOR_THAT_HANGS).start("take", tmp_path / "up", "--validate-only")
    wait_for((tmp_path / "up").exists, "the checking to have begun")
    running.signal(signal.SIGTERM)
    ran = running.ends(within_s=5)
    assert ran.code == 143
    assert validate_envelope(ran.json())["error"]["code"] == "CANCELLED"


def test_what_nohup_started_does_not_hear_the_terminal_go(tool: Any, tmp_path: Path):
    running = tool().start("patient", tmp_path, "--timeout", "1500ms", before=["nohup"])
    wait_for((tmp_path / "up").exists, "the command to be up")
    running.signal(signal.SIGHUP)
    assert running.ends(within_s=8).code == 10


# --- nobody listens -----------------------------------------------------------------------------------


@pytest.mark.requirement("F-014")
@pytest.mark.parametrize(
    ("words", "code"), [(["echo", "x"], 0), (["sell", "tea"], 90), (["types"], 2), (["manifest"], 0)], ids=str
)
def test_a_reader_that_left_is_no_reason_to_complain_and_a_failure_keeps_its_exit_code(
    words: list[str], code: int, tool: Any
):
    theirs, ours = os.pipe()
    os.close(theirs)
    running = tool().start(*words, stdout=ours)
    os.close(ours)
    ran = running.ends()
    assert ran.code == code
    assert ran.stderr == b""


@pytest.mark.parametrize(("words", "code"), [(["echo", "x"], 74), (["types"], 2)], ids=str)
def test_an_answer_that_a_closed_stdout_cannot_take_is_said_on_stderr_and_is_no_success(
    words: list[str], code: int, tool: Any
):
    ran = tool().start(*words, before=["sh", "-c", 'exec "$@" 1>&-', "sh"]).ends()
    assert ran.code == code
    assert b"the answer could not be written: stdout is closed" in ran.stderr


def test_a_full_disk_under_stdout_is_said_on_stderr_and_is_no_success(tool: Any):
    with open("/dev/full", "wb") as full:
        ran = tool()("echo", "x", stdout=full)
    assert ran.code == 74
    assert b"could not be written" in ran.stderr
    assert b"Traceback" not in ran.stderr


def test_somebody_who_holds_the_pipe_and_does_not_read_can_still_stop_us(tool: Any):
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    while select.select([], [ours], [], 0)[1]:
        os.write(ours, bytes(4096))
    os.set_blocking(ours, True)
    running = tool().start("manifest", stdout=ours)
    os.close(ours)

    def ended() -> bool:
        running.signal(signal.SIGTERM)
        return running.process.poll() is not None

    time.sleep(1.0)  # long enough to be stuck, which is the case under test; ending earlier is fine as well
    wait_for(ended, "the end", within_s=3)
    os.close(theirs)
    assert b"Traceback" not in running.stderr


@pytest.mark.parametrize("closed", corners(["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"], "0<&- 1>&- 2>&-"))
def test_closed_streams_change_neither_exit_code_nor_clock(closed: str, tool: Any):
    """Daemons and cron start programs like that. Then the next descriptors that are opened are 0, 1 and 2."""
    program = tool()
    before = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    ran, late = program.start("sell", "tea", before=before), program.start("waits", "60", before=before)
    done = ran.ends()
    assert done.code == 90, done
    assert late.ends().code == 10
    assert b"Traceback" not in done.stderr
    if "1>" not in closed:
        assert done.json()["error"]["code"] == "SHOP_NO_STOCK"
    else:
        assert b"ok" not in done.stderr + done.stdout


# --- a terminal ---------------------------------------------------------------------------------------


def on_terminal(program: Any, *words: Any, type_in: bytes = b"", when: bytes = b"", env: Any = None) -> tuple[int, str]:
    """All three streams on a terminal: the exit code, and what it showed."""
    ours, theirs = pty.openpty()
    screen = b""
    running = program.start(*words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, before=["setsid", "-w"])
    os.close(theirs)
    give_up_at = time.monotonic() + SOON_S
    try:
        while time.monotonic() < give_up_at:
            ended = running.process.poll() is not None
            try:
                while select.select([ours], [], [], 0 if ended else 0.05)[0]:
                    screen += os.read(ours, 65536)
            except OSError:  # nobody has the other side any more
                ended = True
            if type_in and when in screen:
                os.write(ours, type_in)
                type_in = b""
            if ended:
                break
        return running.process.wait(SOON_S), screen.decode().replace("\r\n", "\n")
    finally:
        os.close(ours)


@pytest.mark.requirement("F-003")
def test_a_person_at_a_terminal_sees_the_result_and_a_program_the_envelope(tool: Any, validate_envelope: Any):
    program = tool()
    for env in ({}, {"CI": "true", "NO_COLOR": "1", "TERM": "dumb"}):
        assert on_terminal(program, "echo", "hello", env=env) == (0, "hello\n"), env
    form = ["--format", "json"]
    for words in ([*form, "echo", "hello"], ["echo", "hello", *form], ["echo", "hello", "--json"]):
        code, screen = on_terminal(program, *words)
        assert validate_envelope(json.loads(screen))["ok"] and code == 0, words
    validate_envelope(program.envelope("echo", "hello", code=0))
    for words in (["--format", "text", "echo", "hello"], ["echo", "hello", "--format=text"]):
        ran = program(*words)
        assert (ran.code, ran.stdout) == (0, b"hello\n"), words


@pytest.mark.requirement("C-036")
def test_only_a_person_who_types_it_back_lets_it_run(tool: Any):
    program = tool()
    code, screen = on_terminal(program, "danger", "db", type_in=b"wipe db\n", when=b"to continue")
    assert code == 0 and "db is gone" in screen
    code, screen = on_terminal(program, "danger", "db", type_in=b"yes\n", when=b"to continue")
    assert code == 4 and "db is gone" not in screen and "PERSON_REQUIRED" in screen
    assert "'yes' is not 'wipe db'; nothing was done" in screen and "run it again, and type 'wipe db'" in screen


@pytest.mark.requirement("C-036")
@pytest.mark.requirement("F-009")
@pytest.mark.parametrize("option", [[], ["--yes"]])
def test_nothing_but_a_person_answers_for_a_person(option: list[str], tool: Any, validate_envelope: Any):
    ran = tool()("danger", "db", *option, stdin=subprocess.PIPE)
    envelope = validate_envelope(ran.json())
    assert ran.code == (4 if option in ([], ["--json"]) else 2)
    assert envelope["meta"]["ending"] == "not_started" and envelope["meta"]["side_effects"] == "none"
    if ran.code == 4:
        assert envelope["error"]["code"] == "PERSON_REQUIRED"
        assert envelope["error"]["context"]["expected"] == "wipe db"
    assert ran.stderr == b"", "no prompt where nobody sits"
