"""INPUT_WANTED: a command that waits for input is stopped, one that waits for anything else is not. Real ptys."""

import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.supervise import input_wait
from shotclock.supervise.environment import AGENT_MARKS
from tests.command_line import SHOTCLOCK, SOON_S

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

LIMIT_S = 1.0
TOLD_WITHIN_S = 2.0  # after the limit
PYTHON = sys.executable
LIMITS = ["--timeout", "12s", "--grace", "500ms", "--input-wait", f"{LIMIT_S:g}s"]
CONTROL_LIMITS = ["--timeout", "3s", "--grace", "100ms", "--input-wait", "500ms"]
ENDED_WITHIN_S = 30.0


class Running:
    """A `shotclock exec` with something of ours as its stdin, which this class keeps open."""

    def __init__(self, words: list[str], *, stdin: Any = None, env: dict[str, str] | None = None) -> None:
        self.ours: socket.socket | None = None
        if stdin is socket.socket:
            self.ours, stdin = socket.socketpair()
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        if self.ours is not None:
            stdin.close()

    def envelope(self) -> dict[str, Any]:
        try:
            self.process.wait(ENDED_WITHIN_S)
            assert self.process.stdout is not None
            found: dict[str, Any] = json.loads(self.process.stdout.read())
            return found
        finally:
            self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(SOON_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr, self.ours):
            if stream is not None:
                stream.close()


class OnTerminal:
    """A `shotclock exec` on a pty, at whose keyboard nobody sits."""

    def __init__(self, command: list[str]) -> None:
        words = [*SHOTCLOCK, "exec", *LIMITS, "--stdin", "--report", "json", "--", *command]
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe(words[0], words, {**os.environ, "TERM": "vt100"})
        self.screen = b""

    def envelope(self) -> dict[str, Any]:
        give_up_at = time.monotonic() + ENDED_WITHIN_S
        try:
            while (left_s := give_up_at - time.monotonic()) > 0 and select.select([self.fd], [], [], left_s)[0]:
                try:
                    chunk = os.read(self.fd, 65536)
                except OSError:  # the last process on it has ended
                    break
                self.screen += chunk
            assert b'{"ok":' in self.screen, self.screen[-2000:]
            found: dict[str, Any] = json.loads(self.screen[self.screen.rindex(b'{"ok":') :].splitlines()[0])
            return found
        finally:
            self.end()

    def end(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self.fd)
        except OSError:
            pass


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts `shotclock exec --json …`; whatever it started is ended with the test."""
    started: list[Running] = []

    def run(*words: str, **options: Any) -> Running:
        started.append(Running([*SHOTCLOCK, "exec", "--json", *words], **options))
        return started[-1]

    yield run
    for running in started:
        running.end()


@pytest.fixture(autouse=True)
def sees_waits() -> None:
    if (why := input_wait.find_blindness()) is not None:
        pytest.skip(f"nothing is claimed here: {why}")


def python(*lines: str) -> list[str]:
    return [PYTHON, "-c", "\n".join(("import os, select, socket, sys, threading, time", *lines))]


def assert_told(name: str, envelope: dict[str, Any], source: str) -> dict[str, Any]:
    error = envelope["error"]
    assert error is not None and error["code"] == "INPUT_WANTED", (name, envelope)
    wanted, clock = error["context"]["input"], error["context"]["clock"]
    assert wanted["waits_for"] == source, (name, wanted)
    assert clock["kind"] == "input" and clock["limit_ms"] == LIMIT_S * 1000, (name, clock)
    assert LIMIT_S * 1000 <= clock["elapsed_ms"] < (LIMIT_S + TOLD_WITHIN_S) * 1000, (name, clock)
    assert envelope["meta"]["ending"] == "killed" and envelope["meta"]["survivors"] == [], (name, envelope)
    found: dict[str, Any] = wanted
    return found


def test_a_program_at_a_terminal_that_nobody_answers_is_told(tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("line\n" * 500)
    pager = ["less", str(text)] if shutil.which("less") else python("import pydoc", "pydoc.ttypager('line\\n' * 500)")
    curses = python("import curses", "curses.wrapper(lambda screen: screen.getch())")
    commands = {
        "password": python("import getpass", "getpass.getpass()"),
        "confirmation": ["bash", "-c", 'read -r -p "Continue? [y/N] " answer'],
        "repl": ["env", "PYTHON_BASIC_REPL=1", PYTHON, "-i"],  # that of Python 3.13 looks for keys ten times a second
        "pager": pager,
        "full screen": curses,
        **({"editor": ["vim", "-u", "NONE", str(text)]} if shutil.which("vim") else {}),
    }
    running = {name: OnTerminal(command) for name, command in commands.items()}
    for name, each in running.items():
        wanted = assert_told(name, each.envelope(), "the terminal")
        assert "prompt" not in wanted, (name, wanted)


def test_a_program_that_reads_a_stdin_which_only_the_caller_holds_is_told(start: Start) -> None:
    commands = {
        "bare": (["cat"], None),
        "below a shell": (["bash", "-c", "cd /; cat; true"], None),
        "repl": ([PYTHON, "-i"], None),
        "prompt": (python("input('Overwrite it? ')"), None),
        "poll": (python("poller = select.poll()", "poller.register(0, select.POLLIN)", "poller.poll()"), None),
        "select": (python("select.select([0], [], [0])"), None),
        "epoll": (python("epoll = select.epoll()", "epoll.register(0, select.EPOLLIN)", "epoll.poll()"), None),
        "a pipe to itself": (python("ours, theirs = os.pipe()", "select.select([0, ours], [], [])"), None),
        "a resting thread": (
            python("threading.Thread(target=threading.Event().wait, daemon=True).start()", "os.read(0, 1)"),
            None,
        ),
        "a socket": (["cat"], socket.socket),
    }
    if shutil.which("node"):
        commands["event loop"] = (["node", "-e", "process.stdin.on('data', () => {})"], None)
    running = {name: start(*LIMITS, "--", *command, stdin=stdin) for name, (command, stdin) in commands.items()}
    for name, each in running.items():
        envelope = each.envelope()
        wanted = assert_told(name, envelope, "stdin")
        assert envelope["meta"]["exit_code"] == 10 and not envelope["error"]["retryable"], (name, envelope)
        if name == "prompt":
            assert wanted["prompt"] == "Overwrite it?"
            assert "'Overwrite it?'" in envelope["error"]["message"]
            assert "--input-wait 0" in envelope["error"]["suggestion"]


def test_work_that_waits_for_anything_else_is_not_told(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    listening = "server = socket.create_server(('127.0.0.1', 0))"
    commands = {
        "sleep": ["sleep", "60"],
        "a child": ["bash", "-c", "sleep 60; true"],
        "a lock": ["bash", "-c", f"exec 3>{log}.lock; flock 3; (exec 4>{log}.lock; flock 4)"],
        "a slow part of its own pipeline": ["bash", "-c", "sleep 60 | cat"],
        "an idle server": python(listening, "server.accept()"),
        "a server that also reads commands": python(listening, "select.select([0, server], [], [])"),
        "a console beside a server": python(
            listening, "threading.Thread(target=server.accept, daemon=True).start()", "os.read(0, 1)"
        ),
        "a connection, as of ssh": python(
            listening,
            "client = socket.create_connection(server.getsockname())",
            "poller = select.poll()",
            "poller.register(0, select.POLLIN)",
            "poller.register(client, select.POLLIN)",
            "poller.poll()",
        ),
        "a child or a key": python(
            "import subprocess",
            "subprocess.Popen(['sleep', '60'], stdin=subprocess.DEVNULL)",
            "select.select([0], [], [])",
        ),
        "a growing file": ["tail", "-f", str(log)],
        "a loop that also looks at stdin": python("while True: select.select([0], [], [], 0.05)"),
        "a console beside work": ["bash", "-c", "cat <&0 & while :; do :; done"],
        "output in between": ["bash", "-c", "cat <&0 & while echo tick; do sleep 0.1; done"],
        "a terminal of its own": python("import pty", "pid, fd = pty.fork()", "pid or os.read(0, 1)", "time.sleep(60)"),
        "another supervisor's work": [*SHOTCLOCK, "exec", "--input-wait", "0", "--timeout", "60s", "--", "cat"],
    }
    running = {name: start(*CONTROL_LIMITS, "--", *command) for name, command in commands.items()}
    codes = {name: each.envelope()["error"]["code"] for name, each in running.items()}
    # The inner `exec` has inherited the deadline, and ends a little earlier.
    assert codes == {**dict.fromkeys(commands, "TIMEOUT"), "another supervisor's work": "COMMAND_FAILED"}


def test_an_input_that_comes_or_has_ended_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    inner = " ".join([*SHOTCLOCK, "exec", "--json", *CONTROL_LIMITS, "--", "cat"])
    slow = Running(["bash", "-c", f"{{ sleep 2; echo late; }} | {inner}"])
    (tmp_path / "in").write_text("whole")
    with open(tmp_path / "in", "rb") as file:
        from_file = start(*CONTROL_LIMITS, "--", "bash", "-c", "cat; sleep 1.5", stdin=file)
    from_nothing = start(*CONTROL_LIMITS, "--", "bash", "-c", "cat; sleep 1.5", stdin=subprocess.DEVNULL)
    closed = start(*CONTROL_LIMITS, "--no-stdin", "--", "bash", "-c", "cat; sleep 1.5")
    seen = [each.envelope()["data"]["stdout"] for each in (slow, from_file, from_nothing, closed)]
    assert seen == ["late\n", "whole", "", ""]


def test_a_pipe_that_another_process_holds_open_is_a_pipeline(start: Start) -> None:
    ours, theirs = os.pipe()
    holder = subprocess.Popen(["sleep", "60"], stdout=theirs)
    try:
        running = start(*CONTROL_LIMITS, "--", "cat", stdin=ours)
        assert running.envelope()["error"]["code"] == "TIMEOUT"
    finally:
        holder.kill()
        holder.wait(SOON_S)
        os.close(ours)
        os.close(theirs)


def test_agents_have_the_limit_by_default_and_others_never(start: Start) -> None:
    limits = ["--timeout", "13s", "--grace", "100ms"]
    running = {mark: start(*limits, "--", "cat", env={mark: "1"}) for mark in AGENT_MARKS}
    running["turned off"] = start(*limits, "--input-wait", "0", "--", "cat", env={AGENT_MARKS[0]: "1"})
    running["no agent"] = start(*limits, "--", "cat")
    envelopes = {name: each.envelope() for name, each in running.items()}
    told = {name: each["error"]["code"] for name, each in envelopes.items()}
    assert told == {**dict.fromkeys(AGENT_MARKS, "INPUT_WANTED"), "turned off": "TIMEOUT", "no agent": "TIMEOUT"}
    for mark in AGENT_MARKS:
        assert envelopes[mark]["error"]["context"]["clock"]["limit_ms"] == 10_000


def test_without_json_the_output_passes_through_and_one_line_explains_the_rest() -> None:
    words = ["exec", *LIMITS, "--report", "line", "--", *python("input('Overwrite it? ')")]
    with subprocess.Popen(
        [*SHOTCLOCK, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.wait(ENDED_WITHIN_S) != 0
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read() == b"Overwrite it? "
        [line] = process.stderr.read().decode().strip().split("\n")
    assert line.startswith("shotclock: INPUT_WANTED: ")
    assert all(part in line for part in ("waited 1s for input from stdin", "'Overwrite it?'", "--input-wait 0")), line


def test_output_that_passes_through_us_keeps_its_order(tmp_path: Path) -> None:
    script = "for i in $(seq 300); do echo out$i; echo err$i >&2; done"
    words = [*SHOTCLOCK, "exec", "--input-wait", "5s", "--report", "none", "--", "bash", "-c", script]
    done = subprocess.run(
        words, input=b"", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=ENDED_WITHIN_S, check=True
    )
    assert done.stdout.decode().split() == [f"{name}{number}" for number in range(1, 301) for name in ("out", "err")]


def test_without_the_limit_nothing_of_it_is_loaded() -> None:
    code = "import sys; from shotclock.commands import exec; assert 'shotclock.supervise.input_wait' not in sys.modules"
    subprocess.run([PYTHON, "-c", code], check=True, timeout=ENDED_WITHIN_S)


def test_the_prompt_is_the_last_line_a_person_would_see() -> None:
    prompts = {
        b"": "",
        b"one\ntwo\n": "two",
        b"\x1b[1;32m?\x1b[0m Project name: \x1b[K": "? Project name:",
        b"\x1b]0;title\x07Password:\n\n": "Password:",
        b"10%\r50%\rSure? (y/n)": "Sure? (y/n)",
        b"\xff\x00 broken": "\ufffd broken",
    }
    assert {output: input_wait.last_line(output) for output in prompts} == prompts
