"""`shotclock exec` in an interactive shell on a real terminal: Ctrl-C, Ctrl-\\, Ctrl-Z and `fg`."""

import contextlib
import fcntl
import os
import pty
import select
import shlex
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK, is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

EXEC = " ".join([*SHOTCLOCK, "exec"])
# What is waited for happens in a second; a machine on its knees takes longer to start bash, Python and pytest.
SOON_S = 30.0
PROMPT = b"ready$ "
# A leader that writes, and a child that has left for a session of its own and writes as well.
TICKING = """
echo $$ > pids
setsid sh -c 'echo $$ >> pids; while :; do echo child >> ticks; sleep 0.02; done' &
while :; do echo leader >> ticks; sleep 0.02; done
"""


class Shell:
    """An interactive bash, with a person at its keyboard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.screen = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environment = {**os.environ, "PS1": PROMPT.decode(), "TERM": "dumb", "SHOTCLOCK_HOME": str(folder / "home")}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], environment)
        self.shows(PROMPT)

    def type(self, text: str) -> None:
        self.screen = b""
        os.write(self.fd, text.encode())

    def shows(self, text: bytes) -> bytes:
        """Wait until it is on the screen; what was typed last clears it. Returns all of that."""
        give_up_at = time.monotonic() + SOON_S
        while text not in self.screen:
            left = give_up_at - time.monotonic()
            assert left > 0, f"waited in vain for {text!r}: {self.screen[-2000:]!r}"
            if select.select([self.fd], [], [], left)[0]:
                self.screen += os.read(self.fd, 65536)
        return self.screen

    def exit_code(self) -> int:
        self.type("echo code=$?.\n")
        self.shows(PROMPT)
        return int(self.screen.rpartition(b"code=")[2].split(b".")[0])

    def end(self) -> None:
        os.close(self.fd)
        wait_for(lambda: os.waitpid(self.pid, os.WNOHANG)[0], "the shell to end with its terminal", SOON_S)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.end()


def ticks(folder: Path) -> set[str]:
    """Who has written since the last look."""
    try:
        text = (folder / "ticks").read_text()
    except FileNotFoundError:
        return set()
    (folder / "ticks").unlink()
    return set(text.split())


def both_write(folder: Path) -> None:
    seen: set[str] = set()

    def have_written() -> bool:
        seen.update(ticks(folder))
        return len(seen) == 2

    wait_for(have_written, "both to write", SOON_S)


def below(pid: int) -> bytes:
    """The command lines of all processes below this one."""
    found = b""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            found += Path(f"/proc/{child}/cmdline").read_bytes() + b"\n" + below(int(child))
    return found


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_c_lets_pytest_print_its_summary(shell: Shell):
    (shell.folder / "test_slow.py").write_text(
        "import time\ndef test_a(): pass\ndef test_b():\n    print('begun', flush=True)\n    time.sleep(300)\n"
    )
    shell.type(f"{EXEC} --grace 60s -- {sys.executable} -m pytest -s -p no:cacheprovider test_slow.py\n")
    shell.shows(b"begun")
    shell.type("\x03")
    shown = shell.shows(PROMPT)
    assert b"KeyboardInterrupt" in shown and b"1 passed" in shown and b"shotclock:" not in shown
    assert shell.exit_code() == 2, "pytest's own"


def test_ctrl_backslash_is_the_commands(shell: Shell):
    (shell.folder / "work.sh").write_text("trap 'echo told; exit 0' QUIT; echo begun; while :; do sleep 0.05; done")
    shell.type(f"{EXEC} -- sh work.sh\n")
    shell.shows(b"begun")
    shell.type("\x1c")
    shown = shell.shows(PROMPT)
    assert b"told" in shown and b"shotclock:" not in shown
    assert shell.exit_code() == 0


LIVES_ON = """
import sys, time
for count in range(3):
    try:
        print(f"heard {count}", flush=True)
        time.sleep(300)
    except KeyboardInterrupt:
        pass
sys.exit(7)
"""


def test_ctrl_c_is_the_commands_and_ends_the_loop_only_if_it_ends_the_command(shell: Shell):
    shell.type(f"for i in 1 2 3; do echo round $i; {EXEC} -- sleep 300; done; echo after\n")
    shell.shows(b"round 1")
    wait_for(lambda: b"\nsleep\x00300" in below(shell.pid), "the command to be up", SOON_S)
    shell.type("\x03")
    shown = shell.shows(PROMPT)
    assert b"round 2" not in shown and b"shotclock:" not in shown
    assert shell.exit_code() == 130
    (shell.folder / "work.py").write_text(LIVES_ON)
    shell.type(f"{EXEC} -- {sys.executable} work.py\n")
    for count in range(3):
        shell.shows(b"heard %d" % count)
        shell.type("\x03")
    shell.shows(PROMPT)
    assert shell.exit_code() == 7


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT"])
def test_a_signal_to_us_alone_stops_the_command(name: str, shell: Shell):
    shell.type(f"{EXEC} -- sh -c 'echo $PPID > supervisor; echo is-$((40 + 2)); sleep 300; true'\n")
    shell.shows(b"is-42")
    supervisor = int((shell.folder / "supervisor").read_text())
    us = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(us, signal.Signals[f"SIG{name}"])
    assert f"CANCELLED: stopped by SIG{name}".encode() in shell.shows(PROMPT)
    assert shell.exit_code() == 128 + signal.Signals[f"SIG{name}"]


TERMINAL = """
import fcntl, os, signal, struct, sys, termios
tty = open("/dev/tty")
print("foreground:", os.tcgetpgrp(tty.fileno()) == os.getpgrp(), [os.isatty(fd) for fd in (0, 1, 2)])
print("variables:", *(os.environ.get(name, "none") for name in ("PAGER", "NO_COLOR", "EDITOR", "SSH_ASKPASS")))
def show(*_):  # print() is not for handlers: it may be in the middle of another
    os.write(1, f"window: {os.get_terminal_size()[:2]}\\n".encode())
signal.signal(signal.SIGWINCH, show)
print("ready", flush=True)
print("read:", input(), tty.readline().strip(), flush=True)
"""


def test_a_command_has_the_terminal(shell: Shell):
    (shell.folder / "work.py").write_text(TERMINAL)
    shell.type(f"unset PAGER NO_COLOR SSH_ASKPASS; EDITOR=vi {EXEC} -- {sys.executable} work.py\n")
    shown = shell.shows(b"ready")
    assert b"foreground: True [True, True, True]" in shown
    assert b"variables: none none vi none" in shown
    fcntl.ioctl(shell.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    shell.shows(b"window: (77, 33)")
    shell.type("one\ntwo\n")
    assert b"read: one two" in shell.shows(PROMPT)
    assert shell.exit_code() == 0


def test_what_a_command_on_a_terminal_leaves_behind_is_stopped(shell: Shell, no_survivors: Any):
    script = "trap '' TERM; setsid sleep 7301 & sleep 7302 & echo $PPID $$; sleep 7303"
    shell.type(f'{EXEC} --timeout 1s --grace 300ms -- sh -c "{script}"\n')
    assert b"TIMEOUT: stopped after 1s" in shell.shows(PROMPT)
    assert shell.exit_code() == 124
    assert not any(word in below(1) for word in (b"sleep\x007301", b"sleep\x007302", b"sleep\x007303"))


@pytest.mark.parametrize("way", ["", "--idle 1s ", "--json ", "--overtime 1m "])
def test_ctrl_z_stops_the_whole_tree_and_fg_continues_it(way: str, shell: Shell):
    (shell.folder / "work.sh").write_text(TICKING)
    shell.type(f"{EXEC} {way}-- sh work.sh\n")
    both_write(shell.folder)
    shell.type("\x1a")
    shell.shows(b"Stopped")
    shell.shows(PROMPT)
    ticks(shell.folder)
    pids = [int(word) for word in (shell.folder / "pids").read_text().split()]
    time.sleep(1.2 if "idle" in way else 0.3)  # the time in which nothing may happen
    assert ticks(shell.folder) == set()
    # D: it waits for a child that was stopped between vfork and exec, and will stop when that goes on.
    assert {state(pid) for pid in pids} <= {"T", "D"}

    shell.type("fg\n")
    both_write(shell.folder)
    shell.type("\x1a")
    shell.shows(b"Stopped")
    shell.shows(PROMPT)
    shell.type("bg\n")
    shell.shows(PROMPT)
    both_write(shell.folder)
    shell.type("fg\n")
    # bash shows the job before it gives it the terminal: a Ctrl-C in between is bash's own.
    wait_for(lambda: os.tcgetpgrp(shell.fd) != shell.pid, "the job to have the terminal", SOON_S)
    shell.type("\x03")
    shell.shows(PROMPT)
    assert shell.exit_code() == (1 if "json" in way else 130)
    assert not any(is_alive(pid) for pid in pids)


def test_the_timeout_goes_on_while_the_work_is_stopped(shell: Shell):
    (shell.folder / "work.sh").write_text(TICKING)
    shell.type(f"{EXEC} --timeout 5s --grace 200ms -- sh work.sh\n")
    both_write(shell.folder)
    shell.type("\x1a")
    shell.shows(b"Stopped")
    shell.shows(PROMPT)
    pids = [int(word) for word in (shell.folder / "pids").read_text().split()]
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "its clock to end the stopped work", SOON_S)
    shell.type("fg\n")
    assert b"TIMEOUT" in shell.shows(PROMPT)
    assert shell.exit_code() == 124


def test_stopped_work_is_gone_when_its_shotclock_is_killed(shell: Shell, no_survivors: Any):
    (shell.folder / "work.sh").write_text(TICKING)
    shell.type(f"{EXEC} -- sh work.sh\n")
    both_write(shell.folder)
    shell.type("\x1a")
    shell.shows(b"Stopped")
    shell.shows(PROMPT)
    pids = [int(word) for word in (shell.folder / "pids").read_text().split()]
    shell.type("kill -KILL %1\n")
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "the end of all of it", SOON_S)


# --- the modes of the terminal --------------------------------------------------------------------

WRECKS = r"stty raw -echo; printf '\033[?1049hfull screen'; sleep 60"
MODES = "stty -a > {0}; {1}; echo $? > code; stty -a > {2}; echo the end"


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], bytes]]:
    """A function that runs a script on a terminal, whose modes no shell puts right, and returns the screen."""
    started: list[tuple[int, int]] = []

    def run(lines: str) -> bytes:
        pid, fd = pty.fork()
        if pid == 0:
            os.chdir(tmp_path)
            home = str(tmp_path / "home")
            os.execvpe("sh", ["sh", "-c", lines], {**os.environ, "TERM": "xterm", "SHOTCLOCK_HOME": home})
        started.append((pid, fd))
        screen = b""
        give_up_at = time.monotonic() + SOON_S
        while b"the end" not in screen:
            assert select.select([fd], [], [], max(0, give_up_at - time.monotonic()))[0], screen
            screen += os.read(fd, 65536)
        return screen

    yield run
    for pid, fd in started:
        os.close(fd)
        wait_for(lambda pid=pid: os.waitpid(pid, os.WNOHANG)[0], "the script to end")


@pytest.mark.parametrize("words", [["exec", "--timeout", "500ms", "--"], ["timeout", "0.5"]])
def test_a_kill_restores_the_modes_and_the_screen_of_the_terminal(words: list[str], script: Any, tmp_path: Path):
    command = shlex.join([*SHOTCLOCK, *words, "sh", "-c", WRECKS])
    screen = script(MODES.format("before", command, "after"))
    assert (tmp_path / "code").read_text() == "124\n"
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()
    assert b"\x1b[?1047l" in screen.partition(b"full screen")[2]


def test_modes_that_a_command_leaves_when_it_ends_by_itself_stay(script: Any, tmp_path: Path):
    screen = script(MODES.format("before", shlex.join([*SHOTCLOCK, "exec", "--", "stty", "-echo"]), "after"))
    assert " -echo " in (tmp_path / "after").read_text()
    assert b"\x1b[?1047l" not in screen


def test_a_kill_of_a_command_that_changed_no_mode_writes_nothing_to_the_terminal(script: Any, tmp_path: Path):
    command = shlex.join([*SHOTCLOCK, "timeout", "0.3", "sleep", "60"])
    assert script(MODES.format("before", command, "after")) == b"the end\r\n"
