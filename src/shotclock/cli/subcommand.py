"""The runner of subcommands: it reads the words, begins the call, has its work done, and answers with one envelope.

Work that looks or decides runs in a child that can be killed; what waits runs here.
"""

from __future__ import annotations

import os

from ..core.clocks import Clocks
from ..core.envelope import Envelope, Problem, join_problems, stop_problem, warning
from ..core.errors import Ending, Failure
from ..core.value_types import replace, value
from ..process.clock import monotonic_ns, process_began_ns
from ..runtime.call import (
    DEFAULT_CLOCKS,
    OURSELVES,
    Call,
    Outcome,
    Tool,
    admit,
    answer,
    inherited_deadline,
    no_time_left,
)
from .output import (
    Signalled,
    emit,
    emit_help,
    emit_text,
    note_stops,
    say_line,
    signals_heard,
    summary_line,
    wants_json,
)
from .parser import CommandTable, Mistakes, Parameter, command_help, flag, option, read_command, table_help

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..server.serve import Options

# What looks, decides or answers at once takes a moment; the store's own waits are shorter than this.
TIMEOUT_MS = 30_000


@value
class Work:
    """What a subcommand does, with the values that were typed."""

    name: str
    body: Callable[[], Outcome]
    timeout_ms: int = TIMEOUT_MS
    mutates: bool = False
    show: Callable[[Envelope], None] | None = None
    """Writes the answer for a person, in place of the envelope."""
    afterwards: Callable[[Outcome], None] | None = None
    """Called when it went well; outside of the work, for what is meant to outlive it."""


class Mistaken(Exception):
    """Every mistake in what was typed, where its values do not go together."""

    def __init__(self, mistakes: Mistakes) -> None:
        super().__init__(mistakes)
        self.mistakes = mistakes


@value
class Verb:
    """A verb of `inbox`, `job` or `token`, with the values that were typed."""

    name: str
    values: dict[str, Any]
    as_json: bool


def read_verb(
    table: CommandTable,
    words: list[str],
    check: Callable[[str, dict[str, Any], Callable[[str, str], None]], None],
    *,
    names_verb: bool = False,
    check_rest: Callable[[str, dict[str, Any], Callable[[str, str], None]], None] | None = None,
    tool: Tool = OURSELVES,
) -> Verb | int:
    """Read the words of `shotclock inbox`, `job` or `token`. Returns the exit code where that is all: help was asked
    for, or the words are wrong. `check` reports what is wrong with values that are each right; `names_verb`: the answer
    to wrong words names the verb as well. `check_rest` is called where something is wrong, and reports what would be
    refused later, under a code of its own: every mistake is named at once."""
    as_json = wants_json("--json" in words)
    reading = read_command(table, words)
    if reading.wants == "help" or not words:
        emit_help(table_help(table) if reading.command is None else command_help(table, reading.command))
        if words:
            return 0
    name, values, mistakes = "" if reading.command is None else reading.command.name, reading.values, reading.mistakes
    reported = {mistake["field"] for mistake in mistakes}

    def report(field: str, message: str) -> None:
        if field not in reported:
            mistakes.append({"field": field, "message": message})

    mistakes += settle_engine(values, mistakes)
    check(name, values, report)
    if mistakes:
        if check_rest is not None and name:
            check_rest(name, values, report)
        noun = table.name.split()[-1]
        return refuse(f"{noun} {name}".strip() if names_verb else noun, mistakes, as_json, tool=tool)
    return Verb(name, values, as_json)


# --- engines --------------------------------------------------------------------------------------------------

_ENGINE = "Reaching Temporal"
_OPENING = tuple(
    replace(each, heading=_ENGINE)
    for each in (
        flag("--tls", "Over TLS. Each of the next options says so as well; --tls=false does not.", default=None),
        option("--tls-ca-path", "FILE", "The certificates to trust, instead of those of this machine."),
        option("--tls-cert-path", "FILE", "Our certificate, for mTLS."),
        option("--tls-key-path", "FILE", "Its key."),
        option("--tls-server-name", "NAME", "The name in the server's certificate, if it is not the host of the URL."),
        option(
            "--api-key-file",
            "FILE",
            "The file that holds the API key; without it the variable TEMPORAL_API_KEY. The others have the variables "
            "of Temporal's own tools as well: TEMPORAL_TLS, TEMPORAL_TLS_SERVER_CA_CERT_PATH and so on.",
        ),
    )
)
ENGINE_KEYS = tuple(each.key for each in _OPENING)


def engine_options(help: str, *, required: bool = False) -> tuple[Parameter, ...]:
    """Return --on, and all that opens an engine. Whoever takes them gets the Address as `on`."""
    on = option("--on", "URL", help, read=_engine_url, required=required)
    return (replace(on, heading=_ENGINE), *_OPENING)


def _engine_url(text: str) -> str:
    from ..temporal.connection import parse_address

    parse_address(text)
    return text


def settle_engine(values: dict[str, Any], known: Mistakes) -> Mistakes:
    """Make one Address of --on and of what opens the engine, in place. Return what is wrong with them."""
    if "on" not in values:
        return []
    said = {each.key: values.pop(each.key) for each in _OPENING}
    url: str | None = values["on"]
    if url is None:
        if any(mistake["field"] == "on" for mistake in known):
            return []
        alone = [each for each in _OPENING if said[each.key] is not None]
        return [{"field": each.field, "message": "goes with --on URL, which is missing"} for each in alone]
    from ..temporal.connection import Address, AddressError, parse_address, read_address

    try:
        values["on"] = read_address(url, os.environ, said)
    except AddressError as error:
        values["on"] = Address(*parse_address(url))  # nothing is done with it
        return error.mistakes
    return []


# --- the way of a call ----------------------------------------------------------------------------------------


def perform(work: Work, as_json: bool) -> int:
    """Do the work in a child, on its clock and on our caller's. Returns the exit code."""
    from ..runtime.commands import carry_out

    call = admit_call(work.name, work.timeout_ms, mutates=work.mutates)

    def body() -> Outcome:
        outcome = no_time_left(call) if call.no_time_left else carry_out(call, work.body)
        if outcome.problem is None and work.afterwards is not None:
            work.afterwards(outcome)
        return outcome

    envelope = conclude(call, body)
    if envelope.ok and isinstance(envelope.value, str):  # a text was asked for by name: it is the data
        return emit_text(envelope.value, envelope.exit_code, signals_heard)
    return deliver(envelope, as_json, work.show)


def conclude(call: Call, body: Callable[[], Outcome | Envelope]) -> Envelope:
    """Do the work and answer the call, also where the work raises a Failure or a signal stops it."""
    try:
        outcome = body()
    except Signalled as signalled:
        outcome = Outcome(Ending.NOT_STARTED, stop_problem(signalled.name))
    except Failure as failure:
        from ..runtime.outcomes import failure_outcome

        outcome = failure_outcome(failure)
    return answer(call, outcome)


def admit_call(
    name: str,
    timeout_ms: int,
    *,
    mutates: bool = False,
    idempotent: bool = False,
    tool: Tool = OURSELVES,
    since_start: bool = False,
) -> Call:
    """Start the clock of a subcommand, below the deadline of our caller. `since_start`: since this process began."""
    inherited = inherited_deadline(os.environ, monotonic_ns())
    return admit(
        name,
        Clocks(timeout_ms=timeout_ms),
        parent=inherited.deadline,
        mutates=mutates,
        idempotent=idempotent,
        tool=tool,
        notes=tuple(warning("DEADLINE_UNREADABLE", text) for text in inherited.warnings),
        began_ns=process_began_ns() if since_start else 0,
    )


def problem_of(mistakes: Mistakes, suggestion: str | None = None) -> Problem:
    """Return the refusal of a command line, with every mistake once."""
    unique = [mistake for place, mistake in enumerate(mistakes) if mistake not in mistakes[:place]]
    message = join_problems(unique)
    return Problem("ARG_ERROR", message, "validation", errors=unique, suggestion=suggestion)


def problem_in(failure: Failure) -> Problem:
    """Return what a Failure says, before anything began."""
    context = failure.context or None
    return Problem(failure.code, str(failure), "validation", context=context, suggestion=failure.suggestion)


def unstarted(name: str, problem: Problem, *, timeout_ms: int = TIMEOUT_MS, tool: Tool = OURSELVES) -> Envelope:
    """Return the answer to what never began."""
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
    """Return the answer for an outcome that is known before any call has begun, with the clocks it would have had."""
    call = admit(name, clocks, defaults=defaults, mutates=mutates, tool=tool, began_ns=process_began_ns())
    return answer(call, outcome)


def refuse(name: str, mistakes: Mistakes, as_json: bool, *, tool: Tool = OURSELVES) -> int:
    """Answer a command line that was not understood. Returns the exit code."""
    return deliver(unstarted(name, problem_of(mistakes), tool=tool), as_json)


def deliver(envelope: Envelope, as_json: bool, show: Callable[[Envelope], None] | None = None) -> int:
    """Write the envelope for a program; for a person what `show` makes of it, and what went wrong on stderr."""
    note_stops()
    if as_json:
        return emit(envelope, signals_heard)
    if show is not None and envelope.data is not None:
        show(envelope)
    if envelope.error is not None or envelope.warnings:
        from ..core.visible_text import visible

        say_line(visible(summary_line(envelope)), heard=signals_heard)
    return envelope.exit_code


# --- servers --------------------------------------------------------------------------------------------------


def read_serve_options(**written: Any) -> tuple[Options, Mistakes]:
    """Return how to serve, and every mistake in what was written. Raises Failure: tokens are looked for."""
    from ..server.serve import options_of

    options, mistakes = options_of(**written)
    return options, [{**mistake, "field": mistake["field"].replace("_", "-")} for mistake in mistakes]


def serve(name: str, target: str | None, options: Options, as_json: bool, *, to_stderr: bool = False) -> int:
    """Serve an App, or without a target the operators' page, until somebody stops it. Returns the exit code.

    What keeps it from serving is one envelope; after that stdout is the protocol's. `to_stderr`: it is from the start.
    """
    from ..server.serve import serve_inbox, serve_target

    try:
        return serve_inbox(options) if target is None else serve_target(target, options)
    except Failure as failure:
        if as_json and name == "serve":  # who started us as a server reads stderr, if anything
            say_line(f"shotclock: {failure.code}: {failure}")
        envelope = unstarted(name, problem_in(failure), timeout_ms=0)
    if as_json and to_stderr:
        say_line(envelope.to_json())
        return envelope.exit_code
    return deliver(envelope, as_json)
