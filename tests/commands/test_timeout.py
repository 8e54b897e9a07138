"""`shotclock timeout` beside GNU timeout, on a terminal: exit codes, output, and who is left."""

import os
import pty
import select
import shutil
import signal
import subprocess
import termios
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shotclock.commands.timeout import Misused, read_duration_ms, read_signal
from shotclock.core.limits import MAX_MS
from tests.command_line import SHOTCLOCK, SOON_S, is_alive, wait_for
from tests.warm import own_terminal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

AT_ONCE = 8
WITHIN_S = 60.0
# A command of which `up` tells that it runs, and a wait for it: a signal that comes earlier tells nothing.
UP = "sh -c 'echo > up; exec sleep 10' & until [ -e up ]; do sleep .02; done;"

# Same exit code, same output, nothing left by ours.
SAME = [
    "timeout 10 true",
    "timeout 10 sh -c 'exit 2'",
    "timeout 10 sh -c 'exit 124'",
    "timeout 10 sh -c 'echo out; echo err >&2; exit 3'",
    "echo 'echo script $1; exit 4' > plain; chmod +x plain; timeout 10 ./plain word",
    ": > plain; chmod +x plain; PATH=$PWD:$PATH timeout 10 plain",
    "timeout 10 echo -s -k --help 1",
    "timeout -- 10 true",
    "timeout 0 true",
    "timeout inf true",
    "timeout .1 sleep 10",
    "timeout 0x.2 sleep 10",
    "timeout --preserve-status .1 sleep 10",
    "timeout --preserve-status .3 sh -c 'trap \"exit 7\" TERM; sleep 10 & wait'",
    "timeout .3 sh -c 'trap \"exit 7\" TERM; sleep 10 & wait'",
    "timeout -s INT .1 sleep 10",
    "timeout -sSIGHUP .1 sleep 10",
    "timeout --signal=usr1 .1 sleep 10",
    "timeout --signal RTMIN+1 .1 sleep 10",
    "timeout -s KILL .1 sleep 10",
    "timeout -k .1 .3 sh -c 'trap \"\" TERM; sleep 10'",
    "timeout --kill-after=.1 .3 sh -c 'trap \"\" TERM; sleep 10'",
    "timeout -s 0 -k .1 .1 sleep 10",
    "timeout -v .1 sleep 10",
    "timeout --verbose -s INT -k 1 .1 sleep 10",
    "timeout -vk1 .1 sleep 10",
    "timeout --foreground .1 sleep 10",
    "timeout --foreground 10 sh -c 'read x; echo got $x'",
    "timeout 10 sh -c 'kill -TERM $$'",
    "timeout 10 sh -c 'kill -INT $$'",
    "timeout 10 timeout .1 sleep 10",
    "timeout 2 timeout 10 sleep 10",
    "timeout 10 cat < /dev/null",
    "timeout 10 sh -c 'exit 3' & wait $!",
    "(trap '' INT; timeout -s INT .2 sleep 10)",
    "(trap '' CHLD; exec timeout 10 true)",
    f"timeout 5 {UP} kill -ALRM $!; wait $!",
    f"timeout 5 {UP} kill -TERM $!; wait $!",
    f"timeout 5 {UP} kill -HUP $!; wait $!",
    f"timeout -s USR1 5 {UP} kill -USR1 $!; wait $!",
    "timeout 5 sh -c 'trap \"exit 3\" TERM; echo > up; sleep 10 & wait' & until [ -e up ]; do sleep .02; done;"
    " kill -TERM $!; wait $!",
]
# The same exit code. The message is ours.
SAME_CODE = {
    "timeout": 125,
    "timeout 10": 125,
    "timeout invalid true": 125,
    "timeout -x 1 true": 125,
    "timeout -s bad 1 true": 125,
    "timeout 10 ./plain": 126,
    "timeout 10 no_such": 127,
    "timeout 10 -- true": 127,
    "timeout --help": 0,
    "timeout --version": 0,
}
# Different on purpose; docs/howto/replace.md names each. GNU's code and what it leaves, ours, our output.
DIFFERENT = {
    "timeout .3 sh -c 'setsid sleep 33 & sleep 10'": ((124, 1), 124, ""),
    "timeout 10 sh -c 'sleep 33 </dev/null >/dev/null 2>&1 & exit 5'": ((5, 1), 5, ""),
    "timeout --foreground .3 sh -c 'trap \"\" HUP; sleep 33 & sleep 33'": ((124, 2), 124, ""),
    "timeout 1 sh -c 'read x; echo got $x'; exit $?": ((124, 0), 0, "got typed\n"),
}


@dataclass
class Use:
    line: str
    process: subprocess.Popen[bytes]
    fd: int
    mark: str
    output: bytes = b""

    def read(self, wait_s: float) -> None:
        while self.fd in select.select([self.fd], [], [], wait_s)[0]:
            try:
                chunk = os.read(self.fd, 65536)
            except OSError:  # the last process has closed the terminal
                return
            self.output += chunk

    @property
    def left(self) -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes() and is_alive(int(process.name)):
                    found.append(int(process.name))
            except OSError:
                continue
        return found


def results(lines: list[str], path: str, tmp_path: Path) -> Iterator[tuple[int, str, int]]:
    """Exit code, output, and the number of processes left, of each line in a shell on a terminal of its own."""
    for begin in range(0, len(lines), AT_ONCE):
        uses = [
            start(line, path, tmp_path / f"{begin + number}") for number, line in enumerate(lines[begin:][:AT_ONCE])
        ]
        give_up_at = time.monotonic() + WITHIN_S
        while any(use.process.poll() is None for use in uses):
            assert time.monotonic() < give_up_at, [use.line for use in uses if use.process.poll() is None]
            for use in uses:
                use.read(0.01)
        for use in uses:
            use.read(0)
            left = use.left
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            os.close(use.fd)
            code = use.process.returncode
            # GNU timeout kills itself with the command, and the shell says so.
            shown = [line for line in use.output.decode().split("\r\n") if not line.startswith("bash: line ")]
            yield code if code >= 0 else 128 - code, "\n".join(shown), len(left)


def start(line: str, path: str, folder: Path) -> Use:
    folder.mkdir(parents=True)
    (folder / "plain").write_text("")
    ours, theirs = pty.openpty()
    mark = f"USE={uuid.uuid4().hex}"
    environment = {**os.environ, "PATH": path, "LC_ALL": "C", "USE": mark.removeprefix("USE=")}
    process = subprocess.Popen(
        ["bash", "-c", f"stty -echo; {line}\nexit $?"],
        cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=own_terminal,
    )  # fmt: skip
    os.close(theirs)
    if "read x" in line:
        wait_for(lambda: is_silent(ours), "the terminal to be without echo")
        os.write(ours, b"typed\n")
    return Use(line, process, ours, mark)


def is_silent(fd: int) -> bool:
    return not termios.tcgetattr(fd)[3] & termios.ECHO


@pytest.fixture(scope="module")
def gnu() -> str:
    found = shutil.which("timeout")
    if found is None or b"GNU coreutils" not in subprocess.run([found, "--version"], capture_output=True).stdout:
        pytest.skip("GNU timeout is not here")
    return os.environ["PATH"]


@pytest.fixture
def ours(tmp_path: Path) -> str:
    """A PATH on which `timeout` is ours."""
    script = tmp_path / "bin" / "timeout"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {" ".join(SHOTCLOCK)} timeout "$@"\n')
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


def test_uses_of_timeout_end_as_under_gnu_timeout(gnu: str, ours: str, tmp_path: Path):
    theirs = list(results(SAME, gnu, tmp_path / "gnu"))
    for line, expected, came in zip(SAME, theirs, results(SAME, ours, tmp_path / "ours"), strict=True):
        assert came == (*expected[:2], 0), line


def test_what_goes_wrong_has_the_exit_code_of_gnu_timeout(gnu: str, ours: str, tmp_path: Path):
    lines = list(SAME_CODE)
    theirs = [code for code, _, _ in results(lines, gnu, tmp_path / "gnu")]
    assert dict(zip(lines, theirs, strict=True)) == SAME_CODE
    for line, (code, output, left) in zip(lines, results(lines, ours, tmp_path / "ours"), strict=True):
        assert (code, left) == (SAME_CODE[line], 0), line
        assert output.startswith("Usage:" if "help" in line else "timeout"), line


def test_the_differences_are_those_of_the_table(gnu: str, ours: str, tmp_path: Path):
    lines = list(DIFFERENT)
    theirs = [(code, left) for code, _, left in results(lines, gnu, tmp_path / "gnu")]
    assert theirs == [expected for expected, _, _ in DIFFERENT.values()]
    came = list(results(lines, ours, tmp_path / "ours"))
    assert came == [(code, output, 0) for _, code, output in DIFFERENT.values()]


def test_signal_0_has_the_name_that_coreutils_9_10_gives_it(shotclock: Any):
    ran = shotclock("timeout", "-v", "-s0", "-k", ".1", ".1", "sleep", "10")
    assert ran.code == 137
    assert ran.stderr.splitlines()[0] == b"timeout: sending signal 0 to command 'sleep'"


def test_without_k_a_command_that_ignores_the_signal_is_killed_after_five_seconds(shotclock: Any):
    ran = shotclock("timeout", ".3", "sh", "-c", "trap '' TERM; sleep 60")
    assert (ran.code, ran.stdout, ran.stderr) == (124, b"", b"")
    assert 5 < ran.elapsed_s < 20


def test_the_short_options_of_later_versions_are_there(shotclock: Any):
    assert shotclock("timeout", "-f", "-p", ".1", "sleep", "10").code == 143
    assert (
        shotclock("timeout", "-pv", ".1", "sleep", "10").stderr == b"timeout: sending signal TERM to command 'sleep'\n"
    )


def test_a_command_that_is_still_being_looked_for_gets_the_signal_too(shotclock: Any):
    """A long PATH keeps the child from its exec for a tenth of a second. Until then it has the name of a supervisor."""
    long_path = "/a:" * 40_000 + os.environ["PATH"]
    ran = shotclock("timeout", "-f", "-p", ".05", "sleep", "10", env={"PATH": long_path})
    assert ran.code == 143 and ran.elapsed_s < SOON_S, ran


def test_it_dies_of_the_signal_that_ended_the_command(start: Any):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        assert start("timeout", "10", "sh", "-c", f"kill -{int(number)} $$").ends() == -number


def test_nothing_is_added_and_no_variable_is_quiet(shotclock: Any):
    ran = shotclock(
        "timeout", "10", "sh", "-c", 'echo "$PAGER-$NO_COLOR"; exit 3', env={"PAGER": None, "NO_COLOR": None}
    )
    assert (ran.code, ran.stdout, ran.stderr) == (3, b"-\n", b"")


def test_the_deadline_of_a_caller_holds(shotclock: Any):
    ran = shotclock("timeout", "60", "sleep", "60", env={"SHOTCLOCK_REMAINING_MS": "900"})
    assert (ran.code, ran.stderr) == (124, b"") and ran.elapsed_s < SOON_S


def test_durations_and_signals_are_read_as_by_gnu_timeout():
    durations = {"0": 0, "1": 1000, ".5": 500, "1.": 1000, "1e-9": 1, "2m": 120_000, "1h": 3_600_000, " 1": 1000}
    durations |= {"1e-10000": 1, "0x1p-9999": 1, "0xep-9999": 1, "0e-10000": 0, "0x0p9": 0, ".0": 0, "0x1p9999": MAX_MS}
    durations |= {"1d": 86_400_000, "2.34e+5d": MAX_MS, "9.999999999": 10_000, "+.1s": 100, "1e-1": 100, "0.002m": 120}
    durations |= {"0.00003h": 108, "0.000001d": 87, "99999999999999999999": MAX_MS, "1e4932": MAX_MS}
    durations |= {"0x10": 16_000, "inf": MAX_MS, "INFINITYd": MAX_MS, "1e999": MAX_MS, "0.0015": 2}
    assert {text: read_duration_ms(text) for text in durations} == durations
    signals = {"TERM": 15, "sigint": 2, "0": 0, "EXIT": 0, "9": 9, "143": 15, "RTMIN": 34, "RTMAX-1": 63}
    assert {text: read_signal(text) for text in signals} == signals
    for text in ("", "-1", "1 s", "1S", "1ms", "1_000", "nan", "0x", "1e", "s", "1ss", "٣"):
        with pytest.raises(Misused):
            read_duration_ms(text)
    for text in ("", "TERMX", "-9", "100", "SIG", "RTMAX+1", "1.5"):
        with pytest.raises(Misused):
            read_signal(text)
