"""`human-input`: a question to a person, at the terminal or, without one, in the inbox.

In the inbox it has a key of its run and step, so that a process that resumes the run finds it and its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import termios
from collections.abc import Callable
from typing import Any, Literal

import anyio

from ...calls.call import Call, Effects, Outcome, RunWait, no_time_left
from ...calls.outcomes import outcome_of_error
from ...calls.principal import Principal
from ...calls.runtime import Runtime
from ...core.envelope import Problem, Warning_, warning
from ...core.errors import Ending, Failure
from ...core.limits import ClockKind, Fired, in_seconds
from ...core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposalStatus
from ...core.validation import field
from ...people.inbox import Inbox
from ...people.person_wait import ask_and_wait
from ...people.proposal_checks import TEXT_LIMIT, TITLE_LIMIT
from ...supervise.clock import monotonic_ns, wall_time
from ...worker.context import current_scope
from .provider import Aside, Provider, StepCall, StepPart, StepResult, StepType, bounded_by_run

# Characters, pasted text included.
ANSWER_LIMIT = 1_000_000
END_OF_ANSWER = "."


class HumanStep(StepPart):
    type: Literal["human-input"]
    prompt: str = field(min_length=1)
    default: str | None = None
    placeholder: str | None = None
    allow_empty: bool = False
    multiline: bool = False
    choices: list[str] = field(default=[])


HUMAN = StepType(
    "human-input",
    "question to a person",
    HumanStep,
    lambda services: HumanProvider(services.inbox, aside=services.aside),
    default_ms=0,
    takes_slot=False,
    prints_text=True,
    can_repeat=True,
    can_extend=False,
    waits_when_approved=True,
    rules={"PROPOSAL_REJECTED": "rejected", "PROPOSAL_WITHDRAWN": "withdrawn"},
    other_rule="required",
)
STEP_TYPES = (HUMAN,)


class InputEnded(Exception):
    """A closed terminal, or input that ended without an answer."""


class HumanProvider(Provider):
    step_type = HUMAN

    def __init__(self, inbox: Callable[[], Inbox], stdin: int = 0, aside: Aside = contextlib.nullcontext) -> None:
        """`aside` is entered while a question is open: other output stops."""
        self._inbox = inbox
        self._stdin = stdin
        self._aside = aside
        self._turn = asyncio.Lock()  # one question at a time on the terminal

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        call.effects = Effects(mutates=False)
        terminal = _open_terminal(self._stdin)
        if terminal is None:
            return await self._ask_in_inbox(step, call)
        try:
            if not await self._wait_for_turn():
                call.restart_clocks()
                return StepResult(no_time_left(call))
            try:
                with self._aside():
                    call.restart_clocks()
                    return await self._ask_at_terminal(step, call, terminal)
            finally:
                self._turn.release()
        finally:
            os.close(terminal)

    async def _wait_for_turn(self) -> bool:
        """Wait for other questions; return False at the run's deadline. A question's limit starts when asked."""
        scope = current_scope.get()
        deadline = None if scope is None else scope.deadline
        limit_s = None if deadline is None else deadline.remaining_ns(monotonic_ns()) / 1e9
        try:
            return await asyncio.wait_for(self._turn.acquire(), limit_s)
        except TimeoutError:
            return False

    async def _ask_at_terminal(self, step: StepCall, call: Call, terminal: int) -> StepResult:
        if call.no_time_left:
            return StepResult(no_time_left(call))
        default, bell = step.settings.get("default"), call.bound.bell
        question = Question(terminal, step.settings)
        try:
            async with asyncio.timeout(None if bell is None else bell.remaining_ns(monotonic_ns()) / 1e9):
                answer = await question.ask()
        except TimeoutError:
            with contextlib.suppress(termios.error):
                termios.tcflush(terminal, termios.TCIFLUSH)  # half a line would begin the next answer
            await question.say("\n")
            return _result_without_answer(call, default)
        except InputEnded as ended:
            if default is not None:
                return _result_with_answer(str(default), [_default_warning(str(ended), default)])
            return StepResult(Outcome(Ending.NOT_STARTED, Problem("INPUT_REQUIRED", str(ended))))
        return _result_with_answer(answer)

    async def _ask_in_inbox(self, step: StepCall, call: Call) -> StepResult:
        try:
            # The question has its own clock, which also runs while the run is parked; the wait ends with the run.
            wait = RunWait(step.key, step.run_began_at, step.waits, lambda: bounded_by_run(call))
            waited = await ask_and_wait(self._inbox(), _make_request(step), Principal.local(), wait)
        except Failure as failure:
            return StepResult(outcome_of_error(failure), None, "human-input/required")
        proposal, waiting = waited.proposal, waited.around
        assert waiting is not None
        default = step.settings.get("default")
        match proposal.status:
            case ProposalStatus.APPROVED | ProposalStatus.MODIFIED:
                answer = None if proposal.decision is None else proposal.decision.answer
                return _result_with_answer(answer if isinstance(answer, str) else json.dumps(answer))
            case ProposalStatus.EXPIRED if _had_all_its_time(proposal, step):
                elapsed_ms = wall_time().since_ms(proposal.created_at)
                limit_ms = step.clocks.timeout_ms or 0
                return _result_without_answer(call, default, Fired(ClockKind.TIMEOUT, call.name, limit_ms, elapsed_ms))
            case _ if waited.is_late or proposal.status is ProposalStatus.EXPIRED:
                return _result_without_answer(
                    call, None, waiting.fired(ClockKind.TIMEOUT, monotonic_ns() - call.started_ns)
                )
        return StepResult(waited.outcome())


def _make_request(step: StepCall) -> ProposalRequest:
    prompt = " ".join(str(step.settings["prompt"]).split())
    title = prompt if len(prompt) <= TITLE_LIMIT else prompt[: TITLE_LIMIT - 1] + "…"
    notes = [] if title == prompt else [str(step.settings["prompt"])]
    notes.append(f"{step.name} of run {step.key.partition('/')[0]} waits for this answer.")
    default = step.settings.get("default")
    if default is not None:
        notes.append(f"Without one it is {str(default)!r}.")
    return ProposalRequest(
        Kind.QUESTION,
        title or "(no question)",
        "\n\n".join(notes)[:TEXT_LIMIT],
        choices=tuple(str(choice) for choice in step.settings.get("choices") or ()),
        default=default,
        policy=Policy(ttl_ms=step.clocks.timeout_ms or 0, when_expired="expire" if default is None else "default"),
    )


def _had_all_its_time(proposal: Proposal, step: StepCall) -> bool:
    own_ms = step.clocks.timeout_ms or 0
    return bool(own_ms) and proposal.expires_at.since_ms(proposal.created_at) >= own_ms


class Question:
    def __init__(self, terminal: int, settings: Any) -> None:
        self._terminal = terminal
        self._prompt = _printable(str(settings["prompt"]))
        self._default = settings.get("default")
        self._placeholder = settings.get("placeholder")
        self._may_be_empty = bool(settings.get("allow_empty"))
        self._is_multiline = bool(settings.get("multiline"))
        self._choices = [str(choice) for choice in settings.get("choices") or ()]
        self._typed = b""

    async def ask(self) -> str:
        """Ask until there is a valid answer. Raises InputEnded."""
        await self.say(self._format_prompt())
        while True:
            answer, is_end = await (self._lines() if self._is_multiline else self._line())
            if answer and self._choices and answer not in self._choices:
                if is_end:
                    raise InputEnded("the input ended with an answer that is not one of the choices")
                await self.say(f"one of {', '.join(map(_printable, self._choices))} is needed\n> ")
                continue
            if answer or self._may_be_empty:
                return answer
            if self._default is not None:
                return str(self._default)
            if is_end:
                raise InputEnded("the input ended without an answer")
            await self.say("an answer is needed\n> ")

    def _format_prompt(self) -> str:
        parts = [self._prompt]
        if self._choices:
            parts.append(f"({' | '.join(map(_printable, self._choices))})")
        if self._placeholder:
            parts.append(f"({_printable(str(self._placeholder))})")
        if self._default is not None:
            parts.append(f"[{_printable(str(self._default))}]")
        if self._is_multiline:
            parts.append(f"(several lines; end with a line that is only `{END_OF_ANSWER}`, or Ctrl-D)")
        return f"\n? {' '.join(parts)}\n> "

    async def _lines(self) -> tuple[str, bool]:
        lines: list[str] = []
        length = 0
        while True:
            line, is_end = await self._line()
            if line == END_OF_ANSWER or (is_end and not line):
                return "\n".join(lines), is_end
            lines.append(line)
            length += len(line)
            if length > ANSWER_LIMIT:
                raise InputEnded(f"the answer is longer than {ANSWER_LIMIT} characters")

    async def _line(self) -> tuple[str, bool]:
        """Return a line, and whether Ctrl-D ended the input there."""
        while b"\n" not in self._typed:
            part = await self._read()
            self._typed += part
            if not part:
                line, self._typed = self._typed, b""
                return line.decode("utf-8", "replace"), True
        line, _, self._typed = self._typed.partition(b"\n")
        return line.decode("utf-8", "replace").rstrip("\r"), False

    async def _read(self) -> bytes:
        while True:
            try:
                return os.read(self._terminal, 65536)
            except BlockingIOError:
                await anyio.wait_readable(self._terminal)
            except OSError as error:
                raise InputEnded(f"the terminal is gone: {error.strerror}") from None

    async def say(self, text: str) -> None:
        """Write to the terminal, within the question's clock if Ctrl-S stops it. A last newline is not waited for."""
        left = text.encode("utf-8", "replace")
        while left:
            try:
                left = left[os.write(self._terminal, left) :]
            except BlockingIOError:
                if text == "\n":
                    return
                await anyio.wait_writable(self._terminal)
            except OSError as error:
                raise InputEnded(f"the terminal is gone: {error.strerror}") from None


def _open_terminal(stdin: int) -> int | None:
    """Open the terminal of stdin anew: a non-blocking mode on the shared descriptor would confuse the shell.

    None without a terminal, and in its background, where reading would stop this process.
    """
    try:
        if not os.isatty(stdin):
            return None
        terminal = os.open(os.ttyname(stdin), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # not the controlling terminal: it has no background
        if os.tcgetpgrp(terminal) != os.getpgrp():
            os.close(terminal)
            return None
    return terminal


def _printable(text: str) -> str:
    """Replace control characters: prompts contain output of other steps."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def _result_without_answer(call: Call, default: object, fired: Fired | None = None) -> StepResult:
    """Return the result without an answer. `fired` is set where an earlier process asked."""
    fired = fired or call.fired(ClockKind.TIMEOUT, monotonic_ns() - call.started_ns)
    seconds = in_seconds(fired.limit_ms)
    if default is not None and fired.owner == call.name:  # the default does not apply at the end of the run
        return _result_with_answer(str(default), [_default_warning(f"no answer within {seconds}", default)])
    problem = Problem("TIMEOUT", f"Human input timed out after {seconds}", fired=fired)
    return StepResult(Outcome(Ending.CANCELLED, problem))


def _default_warning(why: str, default: object) -> Warning_:
    return warning("HUMAN_DEFAULTED", f"{why}; the answer is the default", default=str(default))


def _result_with_answer(answer: str, warnings: list[Warning_] | None = None) -> StepResult:
    return StepResult(Outcome(Ending.FINISHED, data={"answer": answer}, warnings=tuple(warnings or ())), answer)
