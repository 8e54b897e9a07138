"""The runner of subcommands: it reads the words, does the work on its clock, and answers with one envelope.

Work that looks or decides runs in a child that can be killed; work that waits runs here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from .._version import __version__
from ..calls.call import (
    DEFAULT_CLOCKS,
    OURSELVES,
    Call,
    Effects,
    Outcome,
    Tool,
    admit,
    answer,
    inherited_deadline,
    no_time_left,
)
from ..calls.commands import carry_out
from ..calls.outcomes import failure_outcome, outcome_of_error
from ..core.catalogue import BUDGET_VARIABLE, DEFAULT_BUDGET_MS
from ..core.envelope import Envelope, Problem, join_problems, stop_problem, warning
from ..core.errors import Ending, Failure
from ..core.limits import Clocks
from ..core.value_types import value
from ..core.visible_text import visible
from ..supervise.clock import monotonic_ns, process_began_ns
from .drawing import Draw, draw
from .output import (
    Signalled,
    StopListener,
    emit,
    emit_text,
    is_terminal,
    say_line,
    summary_line,
    wants_json,
    write_quietly,
)
from .parser import (
    CommandTable,
    Mistakes,
    ParsedLine,
    Subcommand,
    find_command,
)

TIMEOUT_MS = 30_000  # work that looks, decides or answers at once takes a moment; the store's own waits are shorter


@value
class ChildWork:
    name: str
    body: Callable[[], Outcome]
    timeout_ms: int = TIMEOUT_MS
    mutates: bool = False
    show: Callable[[Envelope], None] | None = None  # writes the answer for a person, in place of the envelope
    afterwards: Callable[[Outcome, bool], None] | None = (
        None  # called here after a success, to start what outlives the child
    )
    on_failure: Callable[[Failure], Outcome] = failure_outcome
    tool: Tool = OURSELVES
    draw: Draw | None = None  # draws the data of the answer instead, unless the work was stopped

    @staticmethod
    def looking(name: str, body: Callable[..., Outcome], draw: Draw) -> Callable[..., ChildWork]:
        """Return the `run` of a subcommand that changes nothing: its body runs in a child, and its answer is drawn."""

        def run(timeout: int, **values: Any) -> ChildWork:
            return ChildWork(name, partial(body, **values), timeout, draw=draw)

        return run


class Mistaken(Exception):
    def __init__(self, mistakes: dict[str, str]) -> None:
        super().__init__(mistakes)
        self.mistakes: list[dict[str, str]] = [
            {"field": field, "message": message} for field, message in mistakes.items()
        ]


def run_table(table: CommandTable, words: list[str], *, tool: Tool = OURSELVES) -> int:
    line = find_command(table, words)
    if line.wants == "help":
        return emit_text(table.help(), 0)
    if not words:
        write_quietly(sys.stderr, table.help())
    if line.mistakes:
        problem = problem_of(line.mistakes, line.suggestion)
        envelope = unstarted(table.name.split()[-1], problem, tool=tool)
        return deliver(envelope, wants_json(line.format), program=tool.name)
    if line.command is None:
        if line.format != "json":
            return emit_text(f"{table.name} {__version__}\n", 0)
        return perform(ChildWork(table.name, lambda: Outcome(Ending.FINISHED, data={"version": __version__})), True)
    return run_subcommand(table.name, line.command, line.words, tool=tool)


def run_subcommand(prefix: str, command: Subcommand, words: list[str], *, tool: Tool = OURSELVES) -> int:
    if command.main is not None:
        return command.main(words)
    line = command.read(words, prefix)
    if line.wants == "help":
        return emit_text(command.help(prefix), 0)
    as_json = wants_json(line.format)
    name = " ".join([*prefix.split()[1:][-1:], command.name])
    work = find_work(name, command, line)
    if line.mistakes or work is None:
        return deliver(unstarted(name, problem_of(line.mistakes), tool=tool), as_json, program=tool.name)
    return perform(work, as_json) if isinstance(work, ChildWork) else work(as_json)


def find_work(name: str, command: Subcommand, line: ParsedLine) -> ChildWork | Callable[[bool], int] | None:
    """Call the body, which returns the work to do. Adds its mistakes to the line's."""
    values = line.values
    values.pop("json", None)
    for each in command.options:
        line.mistakes += each.settle(values) if each.settle is not None else []
    is_missing = any(each.missing and values[each.key] is None for each in command.options)
    has_unknown = any(mistake["field"].startswith("-") for mistake in line.mistakes)
    if command.run is None or is_missing or has_unknown:
        return None  # reported already; the body could not judge the other values
    try:
        work: ChildWork | Callable[[bool], int] = command.run(**values)
        return work
    except Failure as failure:
        envelope = unstarted(name, failure)
        return lambda as_json: deliver(envelope, as_json)
    except Mistaken as mistaken:
        reported = {mistake["field"] for mistake in line.mistakes}
        line.mistakes += [mistake for mistake in mistaken.mistakes if mistake["field"] not in reported]
    return None


def draw_answer(how: Draw, data: object, stream: TextIO | None = None) -> None:
    """Draw an answer at once, without waiting for a terminal that does not read."""
    write_quietly(stream or sys.stdout, draw(how, data, to_stderr=stream is sys.stderr))


def read_budget_ms(budget_ms: int | None) -> int | None:
    """Return the time to wait for work that may outlive us: 30 s by default, no limit where a person waits."""
    text = os.environ.get(BUDGET_VARIABLE, "").strip()
    if budget_ms is None and text:
        if not text.isdecimal():
            raise Mistaken({BUDGET_VARIABLE: f"{text!r} is not a whole number of milliseconds"})
        budget_ms = int(text)
    if budget_ms is None and not is_terminal(sys.stdout):
        budget_ms = DEFAULT_BUDGET_MS
    return budget_ms or None


def perform(work: ChildWork, as_json: bool) -> int:
    call = admit_call(work.name, work.timeout_ms, mutates=work.mutates, tool=work.tool)

    def body() -> Outcome:
        outcome = no_time_left(call) if call.no_time_left else carry_out_or_fail(call, work.body, work.on_failure)
        if outcome.problem is None and work.afterwards is not None:
            work.afterwards(outcome, as_json)
        return outcome

    envelope = conclude(call, body)
    if envelope.ok and isinstance(envelope.value, str):  # a format was named: the text is the data
        return emit_text(envelope.value, envelope.exit_code)
    show = work.show
    if work.draw is not None and envelope.ending == Ending.FINISHED:
        show = partial(_draw_data, work.draw)
    return deliver(envelope, as_json, show, work.tool.name)


def _draw_data(how: Draw, envelope: Envelope) -> None:
    draw_answer(how, envelope.data)


def carry_out_or_fail(
    call: Call, body: Callable[[], Outcome], on_failure: Callable[[Failure], Outcome] = failure_outcome
) -> Outcome:
    """Run the body in a child within the limits of its call. A Failure that it raises becomes its outcome."""

    def attempt() -> Outcome:
        try:
            return body()
        except Failure as failure:
            return on_failure(failure)

    return carry_out(call, attempt)


def conclude(
    call: Call, body: Callable[[], Outcome | Envelope], on_failure: Callable[[Failure], Outcome] = failure_outcome
) -> Envelope:
    """Do the work and answer the call, also where the work raises an exception or a signal stops it."""
    try:
        try:
            outcome = body()
        finally:
            StopListener.record_only()  # against a second signal
    except Signalled as signalled:
        ending = Ending.CANCELLED if call.mutates else Ending.NOT_STARTED
        outcome = Outcome(ending, stop_problem(signalled.name))
    except Failure as failure:
        outcome = on_failure(failure)
    except Exception as error:  # a bug: the caller still gets an envelope
        outcome = outcome_of_error(error)
    return answer(call, outcome)


def admit_call(
    name: str,
    timeout_ms: int,
    *,
    mutates: bool = False,
    idempotent: bool = False,
    tool: Tool = OURSELVES,
) -> Call:
    inherited = inherited_deadline(os.environ, monotonic_ns())
    clocks = Clocks(timeout_ms=timeout_ms)
    call = admit(name, clocks, parent=inherited.deadline, effects=Effects(mutates, idempotent), tool=tool)
    call.warnings = (*(warning("DEADLINE_UNREADABLE", text) for text in inherited.warnings), *call.warnings)
    call.time.began_ns = process_began_ns()
    return call


def problem_of(mistakes: Mistakes, suggestion: str | None = None) -> Problem:
    unique = [mistake for place, mistake in enumerate(mistakes) if mistake not in mistakes[:place]]
    return Problem("ARG_ERROR", join_problems(unique), "validation", errors=unique, suggestion=suggestion)


def problem_in(failure: Failure) -> Problem:
    context = dict(failure.context)
    errors: Any = context.pop("errors", None)
    suggestion = failure.suggestion
    return Problem(
        failure.code, str(failure), "validation", errors=errors, context=context or None, suggestion=suggestion
    )


def unstarted(name: str, why: Problem | Failure, *, timeout_ms: int = TIMEOUT_MS, tool: Tool = OURSELVES) -> Envelope:
    problem = problem_in(why) if isinstance(why, Failure) else why
    return answer_at_once(name, Outcome(Ending.NOT_STARTED, problem), Clocks(timeout_ms=timeout_ms), tool=tool)


def answer_at_once(
    name: str,
    outcome: Outcome,
    clocks: Clocks,
    *,
    defaults: Clocks = DEFAULT_CLOCKS,
    mutates: bool = True,
    tool: Tool = OURSELVES,
) -> Envelope:
    call = admit(name, clocks, defaults=defaults, effects=Effects(mutates), tool=tool)
    call.time.began_ns = process_began_ns()
    return answer(call, outcome)


def deliver(
    envelope: Envelope,
    as_json: bool,
    show: Callable[[Envelope], None] | None = None,
    program: str = "shotclock",
) -> int:
    """Write the envelope for a program. For a person, call `show`, and write problems to stderr."""
    StopListener.record_only()
    if as_json:
        return emit(envelope)
    if show is not None and envelope.data is not None:
        show(envelope)
    if envelope.error is not None or envelope.warnings:
        say_line(visible(summary_line(envelope, program)))
    return envelope.exit_code
