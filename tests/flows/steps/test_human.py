"""Questions to a person: asked on a real pseudo-terminal, by the provider and by the command line."""

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.preloaded_zygote import Program
from shotclock.calls.principal import Principal
from shotclock.calls.runtime import Runtime
from shotclock.core.limits import Clocks, Deadline
from shotclock.core.proposal import Decision, Proposal, ProposalStatus
from shotclock.core.trace import TraceContext
from shotclock.flows.run.step_attempt import AnsweredAttempt, run_attempt
from shotclock.flows.steps._human import HumanProvider
from shotclock.flows.steps.provider import StepCall
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from shotclock.supervise.clock import monotonic_ns
from shotclock.worker.context import Scope, current_scope
from tests.warm import WarmStart, own_terminal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "home")]

SHOWN_WITHIN_S = 20.0  # an interpreter and rich, while others use the two cores
LATE_S = 3.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))


class Terminal:
    """A person's side of a pseudo-terminal."""

    def __init__(self) -> None:
        self.person, self.ours = pty.openpty()
        self.seen = ""

    def close(self) -> None:
        for fd in (self.person, self.ours):
            with contextlib.suppress(OSError):
                os.close(fd)

    def look(self) -> str:
        while select.select([self.person], [], [], 0)[0]:
            try:
                part = os.read(self.person, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            self.seen += part.decode("utf-8", "replace")
        return self.seen

    def type(self, text: str) -> None:
        os.write(self.person, text.encode())

    async def sees(self, words: str, times: int = 1) -> None:
        give_up_at = time.monotonic() + SHOWN_WITHIN_S
        while self.look().count(words) < times:
            assert time.monotonic() < give_up_at, self.seen
            await asyncio.sleep(0.005)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def ask(
    terminal: Terminal | None, conduct: Any = None, *, timeout: str = "20s", run_ms: int | None = None, **settings: Any
) -> AnsweredAttempt:
    """One question, while `conduct` plays the person."""

    async def main() -> AnsweredAttempt:
        store = Store.open()
        stdin = terminal.ours if terminal is not None else os.open(os.devnull, os.O_RDONLY)
        inbox = Inbox(store)
        provider = HumanProvider(lambda: inbox, stdin)
        async with Runtime(program=Program(), workers=1) as runtime:
            if run_ms is not None:
                current_scope.set(
                    Scope(Deadline.after_ms(monotonic_ns(), run_ms), -1, "run test", TraceContext("f" * 32))
                )
            call = StepCall("it", {"prompt": "Ship it?", **settings}, Clocks.of(timeout), {}, Path("/"), "run1/it.1")
            asking = asyncio.ensure_future(run_attempt(provider, call, runtime))
            try:
                if conduct is not None:
                    await (conduct() if terminal is not None else conduct(inbox))
                return await asyncio.wait_for(asking, SHOWN_WITHIN_S)
            finally:
                if not asking.done():
                    asking.cancel()
                await inbox.close()
                store.close()

    return asyncio.run(main())


def nobody() -> Inbox:
    raise AssertionError("there is a terminal to ask on")


def answering(terminal: Terminal, *typed: str, prompt: str = "Ship it?") -> Any:
    async def conduct() -> None:
        await terminal.sees(prompt)
        for text in typed:
            terminal.type(text)

    return conduct


# --- on a terminal --------------------------------------------------------------------------------


def test_what_is_typed_is_the_answer(terminal: Terminal) -> None:
    result = ask(terminal, answering(terminal, "yes, ", "plää\n"))

    assert result.output == "yes, plää"
    assert result.envelope.ok
    assert result.envelope.warnings == []
    assert result.envelope.meta["side_effects"] == "none"


def test_the_default_and_the_hint_are_shown_and_enter_takes_the_default(terminal: Terminal) -> None:
    result = ask(terminal, answering(terminal, "\n"), default="no", placeholder="yes or no")

    assert result.output == "no"
    assert "Ship it? (yes or no) [no]" in terminal.seen
    assert result.envelope.warnings == [], "the person has chosen it"


def test_nothing_is_no_answer_unless_it_may_be(terminal: Terminal) -> None:
    async def conduct() -> None:
        await terminal.sees("Ship it?")
        terminal.type("\n")
        await terminal.sees("an answer is needed")
        terminal.type("fine\n")

    assert ask(terminal, conduct).output == "fine"


def test_an_empty_answer_is_one_where_it_is_allowed(terminal: Terminal) -> None:
    assert ask(terminal, answering(terminal, "\n"), allow_empty=True).output == ""


@pytest.mark.parametrize("end", [".\n", "\x04"])
def test_several_lines_end_with_a_dot_or_the_end_of_input(terminal: Terminal, end: str) -> None:
    result = ask(terminal, answering(terminal, "one\n", "  two..\n", "\n", "three\n", end), multiline=True)

    assert result.output == "one\n  two..\n\nthree"


def test_the_end_of_input_without_an_answer_is_one_that_is_missing(terminal: Terminal) -> None:
    result = ask(terminal, answering(terminal, "\x04"))

    assert result.envelope.code == "INPUT_REQUIRED"
    assert result.rule == "human-input/required"


def test_a_question_that_nobody_answers_times_out(terminal: Terminal) -> None:
    began = time.monotonic()
    result = ask(terminal, timeout="400ms")

    assert time.monotonic() - began < 0.4 + LATE_S + 1
    assert result.envelope.code == "TIMEOUT"
    assert result.envelope.error["message"] == "Human input timed out after 0.4 seconds"
    assert result.rule == "human-input/timeout"
    clock = result.envelope.error["context"]["clock"]
    assert (clock["owner"], clock["limit_ms"]) == ("step it", 400)
    assert clock["elapsed_ms"] < 400 + LATE_S * 1000


def test_a_question_that_nobody_answers_is_answered_by_its_default_and_says_so(terminal: Terminal) -> None:
    result = ask(terminal, timeout="300ms", default="no")

    assert result.output == "no"
    assert result.envelope.ok
    (warned,) = result.envelope.warnings
    assert warned["code"] == "HUMAN_DEFAULTED"
    assert "no answer within 0.3 seconds" in warned["message"]


def test_the_end_of_the_run_is_no_answer(terminal: Terminal) -> None:
    result = ask(terminal, run_ms=500, default="no")

    assert result.envelope.code == "TIMEOUT"
    assert result.envelope.error["context"]["clock"]["owner"] == "run test"


def test_half_a_line_is_not_the_beginning_of_the_next_answer(terminal: Terminal) -> None:
    async def half() -> None:
        await terminal.sees("Ship it?")
        terminal.type("half a li")

    assert ask(terminal, half, timeout="500ms", default="no").output == "no"
    assert ask(terminal, answering(terminal, "whole\n", prompt="Second?"), prompt="Second?").output == "whole"


def test_what_other_steps_said_cannot_steer_the_terminal(terminal: Terminal) -> None:
    ask(terminal, answering(terminal, "x\n"), prompt="Ship it?\x1b]0;owned\x07\x1b[2J\x9b31m", default="\x1b[A")

    assert "\x1b" not in terminal.seen
    assert "\x07" not in terminal.seen
    assert "\x9b" not in terminal.seen


def test_a_terminal_that_takes_nothing_holds_nothing_up(terminal: Terminal) -> None:
    attributes = termios.tcgetattr(terminal.ours)
    termios.tcflow(terminal.ours, termios.TCOOFF)
    try:
        began = time.monotonic()
        result = ask(terminal, timeout="300ms", prompt="x" * 100_000)
        took_s = time.monotonic() - began
    finally:
        termios.tcflow(terminal.ours, termios.TCOON)
        termios.tcsetattr(terminal.ours, termios.TCSANOW, attributes)

    assert result.envelope.code == "TIMEOUT"
    assert took_s < 0.3 + LATE_S + 1


def test_a_terminal_that_hangs_up_is_gone(terminal: Terminal) -> None:
    async def hang_up() -> None:
        await terminal.sees("Ship it?")
        os.close(terminal.person)

    result = ask(terminal, hang_up)

    assert result.envelope.code == "INPUT_REQUIRED"


def test_two_questions_are_asked_one_after_the_other(terminal: Terminal) -> None:
    async def main() -> tuple[AnsweredAttempt, AnsweredAttempt]:
        provider = HumanProvider(nobody, terminal.ours)
        async with Runtime(program=Program(), workers=1) as runtime:

            def question(word: str, timeout: str) -> asyncio.Future[AnsweredAttempt]:
                call = StepCall(word, {"prompt": f"{word}?"}, Clocks.of(timeout), {}, Path("/"))
                return asyncio.ensure_future(run_attempt(provider, call, runtime))

            first = question("first", "20s")
            await terminal.sees("first?")
            second = question("second", "2s")
            await asyncio.sleep(0.3)  # long enough that it would have been asked
            assert "second?" not in terminal.look()
            terminal.type("one\n")
            await terminal.sees("second?")
            terminal.type("two\n")
            return await first, await second

    first, second = asyncio.run(asyncio.wait_for(main(), SHOWN_WITHIN_S))

    assert (first.output, second.output) == ("one", "two")


def test_a_cancelled_question_lets_the_next_one_be_asked(terminal: Terminal) -> None:
    async def main() -> AnsweredAttempt:
        provider = HumanProvider(nobody, terminal.ours)
        async with Runtime(program=Program(), workers=1) as runtime:

            def question(word: str) -> asyncio.Future[AnsweredAttempt]:
                call = StepCall(word, {"prompt": f"{word}?"}, Clocks.of("20s"), {}, Path("/"))
                return asyncio.ensure_future(run_attempt(provider, call, runtime))

            first = question("first")
            await terminal.sees("first?")
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            second = question("second")
            await terminal.sees("second?")
            terminal.type("two\n")
            return await second

    before = len(os.listdir("/proc/self/fd"))
    assert asyncio.run(asyncio.wait_for(main(), SHOWN_WITHIN_S)).output == "two"
    assert len(os.listdir("/proc/self/fd")) == before


# --- off a terminal -------------------------------------------------------------------------------


def deciding(decision: Decision, seen: list[Proposal] | None = None) -> Any:
    """The operator's side, in the inbox."""

    async def conduct(inbox: Inbox) -> None:
        give_up_at = time.monotonic() + SHOWN_WITHIN_S
        while not (found := await inbox.list(status=ProposalStatus.PENDING)):
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.005)
        if seen is not None:
            seen.extend([whole for each in found if (whole := await inbox.get(each.id))])
        await inbox.decide(found[0].id, decision, Principal.local())

    return conduct


def test_off_a_terminal_the_question_is_in_the_inbox_and_its_answer_counts() -> None:
    seen: list[Proposal] = []
    result = ask(None, deciding(Decision(ProposalStatus.APPROVED, answer="west"), seen), choices=["east", "west"])

    assert result.envelope.ok and result.output == "west"
    assert seen[0].ask.title == "Ship it?" and seen[0].ask.choices == ("east", "west")
    assert "run run1" in seen[0].ask.justification


def test_an_operator_who_refuses_to_answer_fails_the_step() -> None:
    result = ask(None, deciding(Decision(ProposalStatus.REJECTED, "ask somebody else")), default="no")

    assert (result.envelope.code, result.rule) == ("PROPOSAL_REJECTED", "human-input/rejected")


def test_only_one_of_the_choices_will_do_on_a_terminal(terminal: Terminal) -> None:
    result = ask(terminal, answering(terminal, "north\n", "west\n"), choices=["east", "west"])

    assert result.output == "west" and "one of east, west is needed" in terminal.look()


# --- through the command line ---------------------------------------------------------------------

FLOW = """
    steps:
      ask: {type: human-input, prompt: "Which way?", timeout: 20}
      go: {exec: 'echo "going {{ outputs.ask }}"', depends_on: ask}
"""


@contextlib.contextmanager
def running(tmp_path: Path, terminal: Terminal, text: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "flow.yaml").write_text(textwrap.dedent(text))
    with open(tmp_path / "out", "wb") as out:
        process = WarmStart(
            [sys.executable, "-m", "shotclock", "run", str(tmp_path / "flow.yaml"), *options],
            stdin=terminal.ours,
            stdout=out,
            stderr=terminal.ours,
            start_new_session=True,
            preexec_fn=own_terminal,
            env={**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home"), "TERM": "xterm"},
        )
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            process.kill()
        process.wait(10)


def ended(process: subprocess.Popen[bytes], terminal: Terminal) -> int:
    give_up_at = time.monotonic() + SHOWN_WITHIN_S
    while process.poll() is None:
        terminal.look()
        assert time.monotonic() < give_up_at, terminal.seen
        time.sleep(0.01)
    return process.returncode


def test_a_person_answers_a_workflow_on_the_command_line(tmp_path: Path, terminal: Terminal) -> None:
    with running(tmp_path, terminal, FLOW, "--json") as process:
        asyncio.run(terminal.sees("Which way?"))
        terminal.type("north; rm -rf /\n")
        code = ended(process, terminal)

    envelope = json.loads((tmp_path / "out").read_text())
    assert code == 0, envelope
    assert envelope["data"]["steps"]["go"]["output"] == "going north; rm -rf /"


def test_the_question_stays_readable_while_other_steps_go_on(tmp_path: Path, terminal: Terminal) -> None:
    text = FLOW + "      busy: {exec: 'for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.2; done'}\n"
    with running(tmp_path, terminal, text) as process:
        asyncio.run(terminal.sees("Which way?"))
        time.sleep(1.0)  # several frames of whatever is drawn meanwhile
        after_question = terminal.look().partition("Which way?")[2]
        terminal.type("north\n")
        assert ended(process, terminal) == 0

    # Nothing that moves up over the question or wipes it may be drawn before it is answered.
    assert not re.search(r"\x1b\[\d*A|\x1b\[2K|\x1b\[\d*J", after_question), repr(after_question[:300])


def test_ctrl_c_at_a_question_stops_the_run(tmp_path: Path, terminal: Terminal) -> None:
    with running(tmp_path, terminal, FLOW, "--json") as process:
        asyncio.run(terminal.sees("Which way?"))
        terminal.type("\x03")
        code = ended(process, terminal)

    assert code == 130
    envelope = json.loads((tmp_path / "out").read_text())
    assert envelope["error"]["code"] == "CANCELLED"
    assert envelope["data"]["steps"]["ask"]["status"] == "cancelled"


def test_in_the_background_of_a_terminal_nobody_is_asked(tmp_path: Path, terminal: Terminal) -> None:
    """A read there would stop us with SIGTTIN, for ever."""
    program = textwrap.dedent(
        f"""
        import fcntl, os, subprocess, sys, termios
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        child = subprocess.Popen([sys.executable, "-m", "shotclock", "run", {str(tmp_path / "flow.yaml")!r}, "--json"],
                                 preexec_fn=lambda: os.setpgid(0, 0))
        sys.exit(child.wait(30))
        """
    )
    (tmp_path / "flow.yaml").write_text("steps: {ask: {type: human-input, prompt: Which?, timeout: 1, default: west}}")
    with open(tmp_path / "out", "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=terminal.ours,
            stdout=out,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home")},
        )
    try:
        assert process.wait(30) == 0
    finally:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)

    envelope = json.loads((tmp_path / "out").read_text())
    assert envelope["data"]["steps"]["ask"]["output"] == "west"
    assert envelope["data"]["steps"]["ask"]["warnings"][0]["code"] == "HUMAN_DEFAULTED"
