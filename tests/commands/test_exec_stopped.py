"""`shotclock exec` stopped from outside: by signals, by readers that leave, by descriptors that are not there."""

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK, SOON_S, envelopes_in, wait_for
from tests.rows import corners

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "enveloped")]

# A leader with a child in its group and one that left for a session of its own.
TREE = "sleep 300 & setsid sleep 300 & echo ready; wait"
STUBBORN = "trap '' TERM INT HUP QUIT; echo ready; while :; do sleep 0.05; done"
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGQUIT: 131}
# `exec` without --json dies of the signal, so that a shell's loop ends.
DEATHS = {number: -number for number in SIGNALS}
# A second signal sooner than this is taken for the first one, sent twice.
ONE_WISH_S = 0.25


def cancelled(envelope: dict[str, Any], number: signal.Signals) -> None:
    assert envelope["error"]["code"] == "CANCELLED"
    assert envelope["error"]["retryable"] is False
    assert envelope["error"]["phase"] == "execution"
    assert envelope["error"]["context"]["signal"] == number.name
    assert envelope["meta"]["exit_code"] == SIGNALS[number]
    assert envelope["meta"]["ending"] == "killed"
    assert envelope["meta"]["survivors"] == []


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", corners(SIGNALS, signal.SIGINT, signal.SIGTERM))
def test_a_signal_stops_the_whole_tree_and_is_named(
    number: signal.Signals, no_survivors: Any, start: Any, validate_envelope: Any
):
    running = start("exec", "--grace", "300ms", "--", "sh", "-c", TREE)
    running.said(b"ready")
    running.signal(number)
    assert running.ends() == DEATHS[number]
    cancelled(validate_envelope(running.envelope()), number)
    assert running.stdout == b"ready\n"
    assert no_survivors.alive() == [], "gone when we are, not some time after"


@pytest.mark.parametrize("number", corners(SIGNALS, signal.SIGINT, signal.SIGTERM))
def test_a_signal_is_answered_in_json_with_the_output_so_far(
    number: signal.Signals, tmp_path: Path, start: Any, validate_envelope: Any
):
    running = start("exec", "--json", "--", "sh", "-c", f"echo so far; touch {tmp_path}/up; sleep 300")
    wait_for((tmp_path / "up").exists, "the command to be up")
    running.signal(number)
    assert running.ends() == SIGNALS[number]
    envelope = validate_envelope(running.envelope())
    cancelled(envelope, number)
    assert envelope["data"]["stdout"] == "so far\n"
    assert running.stderr == b""


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["passthrough", "json"])
def test_a_cancelled_call_says_that_its_data_is_partial(form: list[str], tmp_path: Path, start: Any):
    """F-013 of the contract: `"data": {"partial": true, …}`."""
    running = start("exec", *form, "--", "sh", "-c", f"touch {tmp_path}/up; sleep 300")
    wait_for((tmp_path / "up").exists, "the command to be up")
    running.signal(signal.SIGTERM)
    running.ends()
    assert running.envelope()["data"].get("partial") is True


@pytest.mark.parametrize("number", SIGNALS)
def test_the_signal_that_we_get_is_the_one_signal_that_the_command_gets(
    number: signal.Signals, start: Any, validate_envelope: Any
):
    names = ("INT", "TERM", "HUP", "QUIT")
    traps = "; ".join(f"trap 'echo {name}; sleep 0.2; echo cleaned; exit 0' {name}" for name in names)
    script = f"ulimit -c 0; {traps}; echo ready; while :; do sleep 0.05; done"
    running = start("exec", "--grace", "20s", "--", "sh", "-c", script)
    running.said(b"ready")
    running.signal(number)
    assert running.ends() == DEATHS[number]
    assert running.stdout.decode().split() == ["ready", number.name.removeprefix("SIG"), "cleaned"]
    cancelled(validate_envelope(running.envelope()), number)


def test_what_a_command_ended_by_sigint_leaves_behind_is_asked_to_end_as_well(start: Any):
    """A shell's background job ignores SIGINT. It need not be killed for that, nor waited for until the grace ends."""
    child = "trap 'echo child cleaned; exit 0' TERM; while :; do sleep 0.05; done"
    script = f'sh -c "{child}" & sleep 0.2; echo ready; wait'
    running = start("exec", "--grace", "60s", "--", "sh", "-c", script)
    running.said(b"ready")
    running.signal(signal.SIGINT)
    assert running.ends() == -signal.SIGINT
    assert running.stdout == b"ready\nchild cleaned\n"


def test_a_command_that_handles_the_signal_and_fails_gives_its_own_code(start: Any):
    for number in SIGNALS:
        name = number.name.removeprefix("SIG")
        running = start("exec", "--", "sh", "-c", f"trap 'exit 3' {name}; echo ready; while :; do sleep 0.05; done")
        running.said(b"ready")
        running.signal(number)
        assert running.ends() == 3 == running.envelope()["meta"]["exit_code"]


def test_ctrl_c_ends_the_loop_of_a_shell(tmp_path: Path):
    """bash ends a loop only if its command died of SIGINT."""
    loop = f"for i in 1 2 3; do {' '.join(SHOTCLOCK)} exec -- sh -c 'echo $$ >> began; sleep 300'; done"
    shell = subprocess.Popen(["bash", "-c", loop], cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_for(lambda: (tmp_path / "began").exists() and (tmp_path / "began").read_text(), "the command to be up")
    os.killpg(shell.pid, signal.SIGINT)
    assert shell.wait(SOON_S) == -signal.SIGINT
    assert len((tmp_path / "began").read_text().split()) == 1


def test_a_signal_sent_twice_at_once_is_one_wish_and_leaves_the_command_its_grace(start: Any):
    """`timeout` sends its signal to the process that it started and to its group."""
    script = "trap 'sleep 0.5; echo cleaned; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    running = start("exec", "--grace", "20s", "--", "sh", "-c", script)
    running.said(b"ready")
    running.signal(signal.SIGTERM)
    time.sleep(0.02)
    running.signal(signal.SIGTERM)
    assert running.ends() == -signal.SIGTERM
    assert running.stdout == b"ready\ncleaned\n"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["passthrough", "json"])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once_with_exactly_one_envelope(
    form: list[str], second: signal.Signals, tmp_path: Path, start: Any, validate_envelope: Any
):
    stubborn = f"trap 'touch {tmp_path}/asked' INT; touch {tmp_path}/up; while :; do sleep 0.05; done"
    running = start("exec", *form, "--grace", "60s", "--", "sh", "-c", stubborn)
    wait_for((tmp_path / "up").exists, "the command to be up")
    running.signal(signal.SIGINT)
    wait_for((tmp_path / "asked").exists, "the polite stop")
    time.sleep(ONE_WISH_S)
    assert running.process.poll() is None
    running.signal(second)
    assert running.ends() == (130 if form else -signal.SIGINT), (
        "long before its grace is over; the first signal is the reason"
    )
    cancelled(validate_envelope(running.envelope()), signal.SIGINT)


@pytest.mark.parametrize("number", corners(SIGNALS, signal.SIGINT, signal.SIGTERM))
def test_however_often_it_is_told_there_is_one_envelope_and_no_traceback(
    number: signal.Signals, start: Any, validate_envelope: Any
):
    """Someone leans on Ctrl-C: signals also come while the answer is being written."""
    running = start("exec", "--grace", "60s", "--", "sh", "-c", STUBBORN)
    running.said(b"ready")
    give_up_at = time.monotonic() + SOON_S
    while running.process.poll() is None:
        assert time.monotonic() < give_up_at
        running.signal(number)
        time.sleep(0.0002)
    assert b"Traceback" not in running.stderr
    assert running.ends() == DEATHS[number]
    cancelled(validate_envelope(running.envelope()), number)


def test_a_signal_to_our_whole_group_is_no_different(start: Any, validate_envelope: Any):
    """Ctrl-C on a terminal goes to everyone in the foreground; the command is ours to stop, and only once."""
    running = start("exec", "--", "sh", "-c", "trap 'echo hurt' INT; (echo ready; exec sleep 300)", before=["setsid"])
    # The subshell says it: a signal between the shell's fork and exec would be lost on the way to `sleep`.
    running.said(b"ready")
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.ends() == -signal.SIGINT
    cancelled(validate_envelope(running.envelope()), signal.SIGINT)
    assert running.stdout == b"ready\nhurt\n"


EARLY = """
import os, signal, sys

class Early:
    def find_spec(self, name, path=None, target=None):
        if name == "shotclock.commands.exec":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Early())
from shotclock.main import run_program
run_program()
"""


def test_a_signal_that_comes_while_we_are_being_imported_leaves_no_traceback(tmp_path: Path):
    """Half of the time of a short run is spent there. An envelope is not asked for yet, silence is."""
    with open(tmp_path / "err", "wb") as err:
        ran = subprocess.run(
            [sys.executable, "-c", EARLY, "exec", "--", "touch", tmp_path / "ran"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
            timeout=SOON_S,
        )
    said = (tmp_path / "err").read_bytes()
    assert b"Traceback" not in said and b"KeyboardInterrupt" not in said
    assert ran.returncode in (130, -signal.SIGINT)
    assert not (tmp_path / "ran").exists()


# --- readers that leave ---------------------------------------------------------------------------


def closed_pipe() -> int:
    """The end to write into, of a pipe that nobody reads any more."""
    theirs, ours = os.pipe()
    os.close(theirs)
    return ours


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("echo x", 0), ("exit 3", 1)])
def test_an_envelope_that_nobody_reads_is_no_reason_to_complain_and_no_success_either(
    command: str, code: int, start: Any
):
    pipe = closed_pipe()
    running = start("exec", "--json", "--", "sh", "-c", command, stdout=pipe)
    os.close(pipe)
    assert running.ends() == code
    assert running.stderr == b""


def test_in_a_pipeline_whose_reader_left_nothing_is_said(tmp_path: Path):
    line = f"{' '.join(SHOTCLOCK)} exec --json -- echo x | true"
    with open(tmp_path / "err", "wb") as err:
        ran = subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, stderr=err, timeout=SOON_S)
    assert ran.returncode == 0
    assert (tmp_path / "err").read_bytes() == b""


@pytest.mark.parametrize("code", [0, 3])
def test_the_commands_exit_code_is_ours_even_if_nobody_reads_stderr(code: int, start: Any):
    pipe = closed_pipe()
    running = start("exec", "--", "sh", "-c", f"echo out; exit {code}", stderr=pipe)
    os.close(pipe)
    assert running.ends() == code
    assert running.stdout == b"out\n"


@pytest.mark.parametrize("way", [[], ["--idle", "20s"]], ids=["inherited", "relayed"])
def test_a_command_whose_reader_left_finds_out_the_way_it_would_without_us(
    way: list[str], start: Any, validate_envelope: Any
):
    pipe = closed_pipe()
    running = start("exec", *way, "--", "yes", stdout=pipe)
    os.close(pipe)
    assert running.ends() == 128 + signal.SIGPIPE
    assert validate_envelope(running.envelope())["data"]["signal"] == "SIGPIPE"


@pytest.mark.parametrize("number", corners(SIGNALS, signal.SIGINT, signal.SIGTERM))
def test_a_signal_ends_us_even_while_nobody_takes_the_answer(number: signal.Signals, tmp_path: Path, start: Any):
    """The command is gone, the pipe is full: then we are what hangs, and it must not take SIGKILL to end us."""
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    while select.select([], [ours], [], 0)[1]:
        os.write(ours, bytes(4096))
    os.set_blocking(ours, True)
    running = start("exec", "--json", "--", "touch", tmp_path / "ran", stdout=ours)
    os.close(ours)
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    wait_for(lambda: (tmp_path / "ran").exists() and not children.read_text(), "the command and its supervisor to end")
    assert running.process.poll() is None

    def ended() -> bool:
        running.signal(number)
        return running.process.poll() is not None

    wait_for(ended, "the end", within_s=3)
    os.close(theirs)
    assert b"Traceback" not in running.stderr


# --- descriptors that are not there ---------------------------------------------------------------


@pytest.mark.parametrize(("closed", "way"), [("0<&-", ["--json"]), ("1>&-", ["--idle", "20s"]), ("0<&- 1>&- 2>&-", [])])
def test_closed_standard_streams_change_neither_exit_code_nor_clock(
    closed: str, way: list[str], tmp_path: Path, start: Any
):
    """Daemons and cron jobs start programs like that. Then the next descriptors we open are 0, 1 and 2."""
    before = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    running = start("exec", *way, "--", "sh", "-c", f"touch {tmp_path}/ran; exit 3", before=before)
    assert running.ends() == (1 if way == ["--json"] else 3), running.stderr
    assert (tmp_path / "ran").exists()
    assert b"Traceback" not in running.stderr
    if closed == "0<&-":
        assert len(envelopes_in(running.stdout + running.stderr)) == 1

    late = start("exec", *way, "--timeout", "300ms", "--grace", "0", "--", "sleep", "300", before=before)
    assert late.ends() == (10 if way == ["--json"] else 124), late.stderr


@pytest.mark.parametrize("way", [[], ["--json"], ["--idle", "20s"]], ids=["inherited", "json", "relayed"])
def test_output_that_a_closed_stdout_cannot_take_is_no_success(way: list[str], start: Any):
    running = start("exec", *way, "--", "echo", "lost", before=["sh", "-c", 'exec "$@" 1>&-', "sh"])
    assert running.ends() != 0
    assert b"stdout is closed" in running.stderr or b"Bad file descriptor" in running.stderr


@pytest.mark.parametrize("way", [[], ["--json"], ["--idle", "20s"]], ids=["inherited", "json", "relayed"])
def test_output_that_a_full_disk_cannot_take_is_no_success(way: list[str], start: Any):
    with open("/dev/full", "wb") as full:
        running = start("exec", *way, "--", "echo", "lost", stdout=full)
    assert running.ends() != 0
    assert b"No space left on device" in running.stderr


@pytest.mark.parametrize("closed", ["0<&-", "0<&- 1>&- 2>&-"])
def test_waiting_costs_no_processor_time_even_without_standard_streams(closed: str, start: Any):
    running = start("exec", "--", "sleep", "1", before=["sh", "-c", f'exec "$@" {closed}', "sh"])
    wait_for(lambda: os.waitid(os.P_PID, running.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "the end")
    # With what its children used, the supervisor among them.
    _, status, usage = os.wait4(running.process.pid, 0)
    running.process.returncode = os.waitstatus_to_exitcode(status)
    assert usage.ru_utime + usage.ru_stime < 0.9


def test_a_daemon_in_its_own_session_is_asked_to_stop_with_its_command(start: Any):
    """While its parent dies, an orphan is in no listing of processes: it was missed in one of eight runs."""
    command = ["bash", "-c", "setsid sleep 300 & sleep 300"]
    running = [start("exec", "--timeout", "300ms", "--grace", "60s", "--", *command) for _ in range(8)]
    assert [each.ends() for each in running] == [124] * 8


# --- signals that are not ours --------------------------------------------------------------------

OTHERS = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO]
OTHERS += [signal.SIGPWR, signal.SIGXCPU, signal.SIGABRT, signal.SIGRTMIN, signal.SIGRTMIN + 3, signal.SIGRTMAX]
HANDLES = """
import signal, sys, time
numbers = [int(word) for word in sys.argv[1:]]
seen = []
for number in numbers:
    signal.signal(number, lambda number, _: (print(number, flush=True), seen.append(number)))
print("ready", flush=True)
while len(seen) < len(numbers):
    time.sleep(0.01)
sys.exit(7)
"""


@pytest.mark.parametrize("words", [["exec", "--"], ["timeout", "60"], ["exec", "--overtime", "1s", "--"]])
def test_signals_that_do_not_ask_us_to_stop_are_passed_on_and_the_command_goes_on(words: list[str], start: Any):
    others = [number for number in OTHERS if not (words[0] == "timeout" and number == signal.SIGALRM)]
    command = [sys.executable, "-c", HANDLES, *map(str, map(int, others))]
    running = start(*words, *command)
    running.said(b"ready")
    for count, number in enumerate(others):
        running.signal(number)
        wait_for(lambda count=count: len(running.stdout.split()) > count + 1, f"signal {number}")
    assert running.ends() == 7
    assert running.stdout.split() == [b"ready", *(b"%d" % number for number in others)]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGALRM, signal.SIGRTMIN + 3])
def test_a_command_that_such_a_signal_ends_has_its_own_ending(number: int, start: Any, tmp_path: Path):
    """Its daemon is stopped with its grace, not killed as by the death of `exec`."""
    daemon = f"trap 'touch {tmp_path}/cleaned; exit' TERM; echo ready; while :; do sleep 0.05; done"
    running = start("exec", "--", "bash", "-c", f"setsid bash -c {shlex.quote(daemon)} & wait")
    running.said(b"ready")
    running.signal(number)
    assert running.ends() == 128 + number
    assert running.envelope()["error"]["code"] == "COMMAND_FAILED"
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize("words", [["exec", "--"], ["timeout", "60"]])
def test_a_background_job_of_a_script_ignores_ctrl_c_as_does_its_command(words: list[str], tmp_path: Path):
    """A shell without job control starts its `&` jobs with SIGINT and SIGQUIT ignored."""
    ignored = "[int(line.split()[1], 16) & 6 for line in open('/proc/self/status') if line.startswith('SigIgn')]"
    command = f"import time; print({ignored}, flush=True); time.sleep(0.5); print('went on')"
    line = shlex.join([*SHOTCLOCK, *words, sys.executable, "-c", command])
    script = f"{line} > out 2> err & until grep -q 6 out; do sleep 0.02; done; kill -INT $!; wait $!"
    ran = subprocess.run(["sh", "-c", script], cwd=tmp_path, timeout=SOON_S)
    assert (tmp_path / "out").read_text() == "[6]\nwent on\n"
    assert ran.returncode == 0
